"""Answers of ``plan``, each beside plans of the single steps that it is about."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from closed_form_models import Model
from launches import write_run
from plan_runs import enter_folder, main, plan
from planned_steps import describe_module
from search_problems import describe

from lit_fsdp.planning.closed_form.engine import estimate_step
from lit_fsdp.planning.estimate import Hardware, estimate_step_time
from lit_fsdp.planning.limits import find_largest
from lit_fsdp.planning.machines import find_machines, scale
from lit_fsdp.planning.nearest import find_nearest
from lit_fsdp.planning.needed_memory import count_outside_bytes
from lit_fsdp.planning.search.search import Variant, choose, list_changes, search
from lit_fsdp.planning.step_parts import MicroBatch, NoEstimateError, Ranks
from lit_fsdp.planning.timing.hardware import find_gpu
from lit_fsdp.planning.timing.links import Interconnect, choose_links, parse_links
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.reporting.report_files import Report, draw_section, render_html
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mesh import MeshSizes
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding

TINY = {"model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256}
TINY |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2**15}
GPU = "--gpu=RTX 4090"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter_folder(tmp_path, monkeypatch)
    trainer = {"precision": "bf16-true", "accelerator": "gpu"}
    write_run(tmp_path, trainer=trainer, model={"config": TINY}, data={"seq_length": 256, "batch_size": 2})
    return tmp_path


def plan_with(changes: dict[str, Any], *args: str) -> dict[str, Any]:
    """Plan a step with settings as an answer gives them."""
    options = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
    return plan("--config=run.yaml", *args, *options)


@pytest.mark.parametrize(
    "count_left",
    [
        lambda n: 70_000 - 7 * n,
        lambda n: 10**6 - n * n,
        lambda n: 5_000 - max(n, 4_000) ** 2 // 4_000,
        lambda n: -n,
        lambda n: 10**9 - n,
    ],
)
def test_the_largest_that_fits_is_found_to_a_percent_in_few_tries(count_left: Callable[[int], int]) -> None:
    tried: list[int] = []

    def count(n: int) -> int:
        tried.append(n)
        return count_left(n)

    found = find_largest(count, 20_000)
    truth = max((n for n in range(1, 20_001) if count_left(n) >= 0), default=None)
    assert len(tried) <= 16
    if found is None or truth is None:
        assert found is truth
    else:
        assert 0.99 * truth - 1 <= found <= truth


@pytest.mark.parametrize(
    ("question", "size"),
    [
        pytest.param("longest", "seq_length", marks=pytest.mark.full),
        pytest.param("largest", "batch_size", marks=pytest.mark.slow),
    ],
)
def test_a_limit_fits_and_two_percent_more_does_not(question: str, size: str) -> None:
    memory = f"--device-memory={count_outside_bytes(MeshSizes(1, 2)) + 150 * 2**20}B"
    found = plan("--config=run.yaml", "--devices=2", memory, f"--{question}")[question]["limits"]
    assert len(found) > 1
    assert found[0]["value"] < found[1]["value"]
    assert not any(limit["is_bound"] for limit in found[:2])
    for limit in found[:2]:
        step = {**limit["changes"], f"data.{size}": limit["value"]}
        fitting = plan_with(step, "--devices=2", memory)
        assert fitting["device"]["fits"]
        assert fitting["device"]["needed_bytes"] == limit["needed_bytes"]
        more = limit["value"] + (128 + limit["value"] // 50 if size == "seq_length" else 1 + limit["value"] // 50)
        assert not plan_with({**step, f"data.{size}": more}, "--devices=2", memory)["device"]["fits"]


@pytest.mark.full
def test_the_largest_batch_is_found_where_smaller_ones_hold_unreduced_gradients() -> None:
    options = ["--config=run.yaml", "--devices=2", "--data.global_batch_size=16", "--data.seq_length=16"]
    options.append("--trainer.strategy.sharding.no_sync=true")
    small, large = (plan(*options, f"--data.batch_size={n}", "--device-memory=8GiB")["device"] for n in (1, 8))
    memory = large["needed_bytes"]
    assert memory < small["needed_bytes"]  # one micro-batch has nothing to hold
    found = plan(*options, "--data.batch_size=1", f"--device-memory={memory}B", "--largest")["largest"]["limits"]
    assert (found[0]["value"], found[0]["needed_bytes"]) == (8, memory)


@pytest.mark.full
def test_a_step_that_does_not_fit_names_settings_that_do(capfd: pytest.CaptureFixture[str]) -> None:
    needed = plan("--config=run.yaml", "--devices=2", GPU)["memory"]["peak_bytes"]
    memory = f"--device-memory={count_outside_bytes(MeshSizes(1, 2)) + round(0.9 * needed)}B"
    found = plan("--config=run.yaml", "--devices=2", GPU, memory)
    assert "fits: NO" in capfd.readouterr().out
    settings = found["nearest"]["settings"]
    assert len(settings) == 3
    for near in settings:
        again = plan_with(near["changes"], *(["--devices=2"] if "devices" not in near["changes"] else []), GPU, memory)
        assert again["device"]["fits"]
        assert again["device"]["needed_bytes"] == near["needed_bytes"]
        assert again["time"]["step_s"] == pytest.approx(near["time"]["step_s"])
    assert "nearest" not in plan("--config=run.yaml", "--devices=2", GPU)


@pytest.mark.full
def test_rows_of_a_range_are_the_plans_of_each_number_and_cost_what_their_hours_do(folder: Path) -> None:
    (folder / "prices.yaml").write_text("RTX 4090: 0.4")
    link = "--link=pcie4,ethernet25"
    options = ("--config=run.yaml", "--devices=4", GPU, link)
    found = plan(*options, "--nodes=1..3", "--prices=prices.yaml")["scaling"]["machines"]
    assert [machine["nodes"] for machine in found] == [1, 2, 3]
    for machine in found:
        single = plan_with(machine["changes"], "--devices=4", f"--nodes={machine['nodes']}", GPU, link)
        assert single["time"]["step_s"] == pytest.approx(machine["time"]["step_s"])
        hours = 1e6 / machine["time"]["tokens_per_s_per_gpu"] / 3600
        assert machine["gpu_hours_per_million_tokens"] == pytest.approx(hours)
        assert machine["cost_per_million_tokens"] == pytest.approx(0.4 * hours)
        plain = plan(*options, f"--nodes={machine['nodes']}")
        is_faster = plain["time"]["step_s"] > 1.02 * machine["time"]["step_s"]
        assert is_faster is bool(machine["changes"])  # what is not 2 % faster is no reason to change
    assert any(machine["changes"] for machine in found)


@pytest.mark.slow
def test_a_global_batch_stays_what_it_is_on_any_number_of_gpus_and_with_any_micro_batch() -> None:
    options = ("--config=run.yaml", "--data.batch_size=4", "--data.global_batch_size=24", GPU)
    found = plan(*options, "--devices=1..4")["scaling"]["machines"]
    assert [machine["devices"] for machine in found] == [1, 2, 3]  # 24 rows are no whole number of 4 x 4
    for machine in found:
        single = plan(*options, f"--devices={machine['devices']}")
        assert single["micro_batches"] == 6 // machine["devices"]
        if not machine["changes"]:
            assert single["time"]["step_s"] == pytest.approx(machine["time"]["step_s"])
    for limit in plan(*options, "--devices=2", "--largest")["largest"]["limits"]:
        assert 12 % limit["value"] == 0
    found = plan(*options, "--devices=4..6")["scaling"]["machines"]
    assert [machine["devices"] for machine in found] == [6]


@pytest.mark.full
def test_a_range_begins_with_the_first_number_that_the_mesh_can_have(folder: Path) -> None:
    mesh = {"trainer.strategy.mesh.replicate": 2}
    found = plan_with(mesh, "--devices=1..3", GPU, "--search=true", "--write=chosen.yaml")
    assert found["ranks"]["devices"] == 2
    assert [machine["devices"] for machine in found["scaling"]["machines"]] == [2, 3]
    assert yaml.safe_load((folder / "chosen.yaml").read_text())["trainer"]["devices"] == 2


@pytest.mark.slow
def test_gpus_without_float8_are_no_answer_for_a_step_that_needs_it(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--trainer.precision=bf16-mixed", "--cheapest")
    recipe, emulate = ({"trainer.strategy.float8": value} for value in ("{}", "{emulate: true}"))
    listed = {
        name: {machine["gpu"] for machine in plan_with(changes, *options)["machines"]["machines"]}
        for name, changes in (("float8", recipe), ("emulated", emulate))
    }
    assert {"RTX 4090", "L4", "H100 SXM", "RTX 4000 Ada", "RTX 5070"} <= listed["float8"]
    assert {"RTX 3090", "A100 SXM 80GB", "A40", "RTX A4000"} <= listed["emulated"] - listed["float8"]
    refused = ["plan", "--config=run.yaml", "--trainer.precision=bf16-mixed", "--trainer.strategy.float8={}"]
    assert main([*refused, "--gpu=RTX 3090"]) == 2
    assert "float8: RTX 3090 has no products in float8" in capfd.readouterr().err


@pytest.mark.full
def test_pages_of_an_optimizer_are_not_offloaded_again() -> None:
    options = ("--config=run.yaml", "--model.optimizer.name=adamw_8bit_paged", "--devices=2", GPU, "--longest")
    found = plan(*options)
    settings = [limit["changes"] for limit in found["longest"]["limits"]]
    assert len(settings) == 2
    assert not any(key.endswith("cpu_offload") for changes in settings for key in changes)


@pytest.mark.slow(after=1)
@pytest.mark.full
@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_ranks_that_share_rows_stay_together_on_any_number(name: str) -> None:
    options = ("--config=run.yaml", GPU, f"--trainer.strategy.mesh.{name}=2", "--link=pcie4,ethernet25")
    machines = plan(*options, "--devices=1..4")["scaling"]["machines"]
    assert [machine["devices"] for machine in machines] == [2, 4]  # neither 1 nor 3
    for machine in machines:
        single = plan_with(machine["changes"], f"--devices={machine['devices']}", *options[1:])
        assert single["time"]["step_s"] == pytest.approx(machine["time"]["step_s"])
        assert single["memory"]["peak_bytes"] == machine["peak_bytes"]


@pytest.mark.full
def test_the_cheapest_gpus_come_first_and_fit(folder: Path) -> None:
    (folder / "prices.yaml").write_text("{RTX 4090: 0.4, RTX 3060 12GB: 0.01, H100 SXM: 90}")
    found = plan("--config=run.yaml", "--cheapest", "--prices=prices.yaml")["machines"]["machines"]
    costs = [machine["cost_per_million_tokens"] for machine in found]
    assert costs == sorted(costs)
    assert {machine["gpu"] for machine in found} == {"RTX 4090", "RTX 3060 12GB", "H100 SXM"}
    for machine in found:
        options = (f"--devices={machine['devices']}", f"--gpu={machine['gpu']}")
        single = plan_with(machine["changes"], *options)
        assert single["device"]["fits"]
        assert single["time"]["step_s"] == pytest.approx(machine["time"]["step_s"])


@pytest.mark.full
def test_memory_and_links_that_the_strategy_is_told_are_those_of_the_plan(folder: Path) -> None:
    strategy = {"class_path": "lit_fsdp.AutoFSDP2Strategy", "init_args": {"device_memory": "5GiB", "link": "pcie3x4"}}
    (folder / "auto.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    files = ["--config=run.yaml", "--config=auto.yaml", "--devices=2"]
    told = plan(*files, GPU)
    assert told["device"]["memory_bytes"] == 5 * 2**30
    assert any(note.startswith("pcie3x4: collectives achieve") for note in told["notes"])
    found = plan(*files, "--search=true")  # nothing more has to be said
    assert found["device"]["memory_bytes"] == 5 * 2**30
    assert found["search"]["chosen"] is not None


@pytest.mark.full
def test_one_card_and_copies_are_set_beside_several(capfd: pytest.CaptureFixture[str]) -> None:
    plan("--config=run.yaml", "--devices=4", GPU)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("what if: ")]
    one = plan("--config=run.yaml", "--devices=1", GPU)
    copies = {"trainer.strategy.mesh.replicate": -1, "trainer.strategy.mesh.shard": 1}
    own = plan_with(copies, "--devices=4", GPU)
    for line, what, single in zip(lines, ("one card", "4 copies"), (one, own), strict=True):
        assert line.startswith(f"what if: {what}")
        assert f": {single['time']['tokens_per_s']:,.0f} tokens/s" in line
    capfd.readouterr()
    assert main(["plan", "--config=run.yaml", "--devices=1", GPU]) == 0
    assert "what if" not in capfd.readouterr().out


def test_copies_inside_a_node_are_searched_where_one_gpu_holds_the_model() -> None:
    key = "trainer.strategy.mesh.shard"
    frozen = Model(num_hidden_layers=4)
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("norm" in name)  # few gradients to reduce, and all parameters to gather
    variants = [Variant(model=describe_module(frozen, Settings(), precision="bf16-true"))]
    chosen = choose(search(describe(2**40, splits_batch=False, variants=variants)))
    assert chosen is not None
    assert chosen.changes[key] == 1
    assert not any(key in candidate.changes for candidate in search(describe(1, splits_batch=False)))


@pytest.mark.full
@pytest.mark.parametrize("setting", ["offload: true", "mlp_chunks: 2"])
def test_what_the_closed_form_has_no_rule_for_is_traced_for_every_question(
    setting: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = (f"--trainer.strategy.activation_checkpointing={{mode: full, {setting}}}", "--devices=2", GPU)
    found = plan("--config=run.yaml", *changes)
    assert found["engine"] == "exact trace"
    assert f"activation_checkpointing.{setting.partition(':')[0]}: a setting without a rule" in capfd.readouterr().out
    assert "knobs" not in found


def test_less_recomputation_is_described_with_every_setting_that_changes() -> None:
    given = ActivationCheckpointing(mode="selective", every_n_blocks=2, saved_ops=("aten.mm",))
    less = ActivationCheckpointing(mode="full")
    changes = list_changes(Settings(activation_checkpointing=given), Settings(activation_checkpointing=less))
    key = "trainer.strategy.activation_checkpointing"
    assert changes == {f"{key}.mode": "full", f"{key}.every_n_blocks": 1, f"{key}.saved_ops": []}


def test_machines_keep_recomputation_that_has_settings_of_its_own() -> None:
    own = ActivationCheckpointing(mode="full", offload=True)
    tried = []

    def estimate(settings: Settings, **_: Any) -> SimpleNamespace:
        tried.append(settings.activation_checkpointing)
        time = SimpleNamespace(step_s=1.0, tokens_per_s_per_gpu=1.0)
        return SimpleNamespace(needed_bytes=2**50, estimate_time=lambda _: time)

    trials: Any = SimpleNamespace(
        settings=Settings(activation_checkpointing=own),
        find_chunked_loss=lambda: None,
        estimate=estimate,
        can_share=lambda ranks: True,
    )
    assert find_machines(trials, {}) == []
    assert set(tried) == {own}


def test_usual_links_are_those_of_as_many_cards_as_a_node_has_whatever_was_asked_first() -> None:
    model, micro_batch = describe(2**40).variants[0].model, MicroBatch(rows=1, length=512)
    ranks, gpu = Ranks(num_nodes=2, per_node=8), find_gpu("H100 SXM")
    assert gpu is not None
    cost = estimate_step(model, Settings(), micro_batch, ranks=ranks)

    def time(links: Interconnect) -> StepTime:
        options: dict[str, Any] = {"ranks": ranks, "micro_batch": micro_batch, "num_micro_batches": 1}
        return estimate_step_time(model, Settings(), Hardware(gpu=gpu, links=links), cost, **options)

    assert time(choose_links(gpu, 1)) == time(choose_links(gpu, 8))
    assert time(parse_links("nvlink4,ib400")).communication_s > time(choose_links(gpu, 8)).communication_s


def test_more_gpus_in_each_node_are_named_beside_more_nodes() -> None:
    class Fixed:
        """Fits 32 GPUs or more, and has no rows that could be shorter."""

        ranks, global_batch_size = Ranks(num_nodes=1, per_node=4), None

        def estimate(self, *, ranks: Ranks) -> SimpleNamespace:
            needed_bytes = 32 // ranks.world_size
            return SimpleNamespace(needed_bytes=needed_bytes, host_bytes=0, estimate_time=lambda _: None)

        @property
        def steps(self) -> None:
            raise NoEstimateError("no rows")

    trials: Any = Fixed()
    hardware: Any = None
    assert [near.changes for near in find_nearest([], trials, hardware, 1)] == [{"devices": 8, "nodes": 4}]


def test_what_is_configured_is_no_answer_where_a_trace_says_that_it_does_not_fit() -> None:
    def make(changes: dict[str, Any], step_s: float) -> Any:
        time = SimpleNamespace(step_s=step_s)
        return SimpleNamespace(changes=changes, fits=True, keeps_result=True, time=time, needed_bytes=1, host_bytes=0)

    candidates = [make({}, 1.0), make({"a": 1}, 2.0), make({"b": 1}, 1.5), make({"c": 1}, 3.0)]
    unused: Any = None
    found = find_nearest(candidates, unused, unused, 1)
    assert [near.changes for near in found] == [{"b": 1}, {"a": 1}, {"c": 1}]


def test_numbers_of_ranks_that_no_mesh_can_have_are_left_out_of_a_range() -> None:
    time = SimpleNamespace(step_s=1.0, tokens_per_s_per_gpu=1.0)
    trials: Any = SimpleNamespace(
        settings=Settings(sharding=Sharding(reshard_after_forward=2)),
        estimate=lambda *_, ranks: SimpleNamespace(needed_bytes=1, estimate_time=lambda _: time, ranks=ranks),
        can_share=lambda ranks: True,
    )
    hardware: Any = SimpleNamespace(gpu=None)
    found = scale(trials, [Ranks(num_nodes=1, per_node=n) for n in range(4, 9)], hardware, 1, {})
    assert [machine.trial.ranks.per_node for machine in found] == [4, 6, 8]


def test_texts_of_a_column_are_set_alike_on_a_page() -> None:
    rows = [["a", "1", "short"], ["b", "2", "long" * 20]]
    section = Section(title="s", name="s", tables=[Table(title="t", columns=["x", "y", "z"], rows=rows)])
    report = Report(name="n", status="fits", message="m", facts={}, parts=[draw_section(section, None)])
    page = render_html(report)
    assert '<th scope="col" class="text">z</th>' in page
    assert '<td>1</td><td class="text">short</td>' in page
