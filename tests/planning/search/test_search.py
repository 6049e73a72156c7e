"""``plan --search``: what it tries, what it picks, and the configuration that it writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from launches import write_run
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from plan_runs import count_needed_bytes, enter_folder, main, plan
from search_problems import BIGGER, describe, estimate_512
from speech_training import build_task

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form.engine import StepEstimate
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.estimate import ModelToTrain
from lit_fsdp.planning.search.report import apply_changes
from lit_fsdp.planning.search.search import Candidate, Variant, choose, choose_smallest, search
from lit_fsdp.planning.search.steps import splits_batch
from lit_fsdp.planning.step_parts import MicroBatch, Ranks
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.settings import PRESETS, Settings
from lit_fsdp.sharding.shard import Compile, Sharding
from lit_fsdp.tasks import ImageClassification, PreferenceTuning
from lit_fsdp.tasks.image_classification.mixup import Mixup

MIB = 2**20


def roomy(problem: dict[str, Any] | None = None) -> list[Candidate]:
    return search(describe(2**40, **(problem or {})))


def test_each_candidate_is_slower_and_clearly_smaller_than_the_one_before() -> None:
    _, *others = roomy()
    same = [candidate for candidate in others if candidate.keeps_result]
    assert len(same) > 2
    for faster, smaller in pairwise(same):
        assert faster.time.step_s < smaller.time.step_s
        assert smaller.peak_bytes <= 0.95 * faster.peak_bytes


@pytest.mark.full
def test_the_fastest_that_fits_and_computes_the_same_is_chosen() -> None:
    _, *others = roomy()
    middle = sorted(c.needed_bytes for c in others if c.keeps_result)[1]
    found = search(describe(middle))
    chosen = choose(found)
    assert chosen is not None
    assert chosen.fits
    assert chosen.keeps_result
    assert chosen.needed_bytes <= middle == chosen.needed_bytes
    assert all(c.time.step_s >= chosen.time.step_s for c in found if c.fits and c.keeps_result)


@pytest.mark.full
def test_an_optimizer_of_whole_rows_is_not_tried_where_layers_are_split_by_columns() -> None:
    tried = []

    def trace(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> StepEstimate:
        tried.append((settings.mesh.tensor, model.optimizer.name))
        return estimate_512(model, replace(settings, mesh=Mesh()), rows, num_micro_batches)

    for mesh in (Mesh(), Mesh(tensor=2)):
        search(describe(1, settings=Settings(mesh=mesh), trace=trace))  # nothing fits, so all are tried
    assert set(tried) == {(1, "adamw"), (1, "adamw_8bit"), (2, "adamw")}


def test_what_is_configured_stays_where_nothing_is_faster() -> None:
    kept = Settings(sharding=Sharding(reshard_after_forward=False))
    problem = describe(2**40, splits_batch=False)
    first, second = (choose(search(replace(problem, settings=settings))) for settings in (Settings(), kept))
    assert first is not None
    assert second is not None
    assert first.changes == {"trainer.strategy.sharding.reshard_after_forward": False}
    assert second.changes == {}


def test_what_is_configured_stays_where_of_its_training_nothing_else_fits() -> None:
    least = Settings(activation_checkpointing=ActivationCheckpointing(mode="full"))
    needed_bytes = search(describe(2**40, rows=1, settings=least))[0].needed_bytes
    found = search(describe(needed_bytes, rows=1, settings=least))
    configured, *others = found
    assert configured.fits
    assert not any(candidate.keeps_result for candidate in others)
    assert any(candidate.fits and 1.02 * candidate.time.step_s < configured.time.step_s for candidate in others)
    assert choose(found) is configured


@pytest.mark.full
def test_another_training_is_chosen_only_where_nothing_else_fits() -> None:
    # What is left when nothing that computes the same fits, on a host with no room for offload.
    candidates = roomy({"host_bytes": 0})
    others = [c.needed_bytes for c in candidates if not c.keeps_result]
    same = [c.needed_bytes for c in candidates if c.keeps_result]
    assert min(others) < min(same)
    chosen = choose(search(describe(min(others), host_bytes=0)))
    assert chosen is not None
    assert chosen.changes["model.optimizer.name"] == "adamw_8bit"
    # With such a host, offload computes the same.
    chosen = choose(search(describe(min(others))))
    assert chosen is not None
    assert chosen.keeps_result
    assert chosen.changes["trainer.strategy.cpu_offload"] == {}


@pytest.mark.full
def test_a_fused_optimizer_is_unset_where_another_takes_its_place() -> None:
    problem = describe(2**40)
    model = replace(problem.variants[0].model, optimizer=Optimizer(fused=False))
    found = search(replace(problem, variants=[Variant(model=model)]))
    changed = [c.changes for c in found if "model.optimizer.name" in c.changes]
    assert changed
    assert all(changes["model.optimizer.fused"] is None for changes in changed)


def test_a_paged_optimizer_is_not_offloaded() -> None:
    problem = describe(1)
    model = replace(problem.variants[0].model, optimizer=Optimizer(name="adamw_8bit_paged"))
    assert not any(c.host_bytes for c in search(replace(problem, variants=[Variant(model=model)])))


@pytest.mark.full
def test_masks_are_those_of_the_size_that_is_tried() -> None:
    def measure(rows: int) -> MicroBatch:
        return MicroBatch(rows=rows, length=512, is_masked=rows > 1)

    problem = describe(2**40, rows=1, num_micro_batches=4)
    plain, masked = (search(replace(problem, measure=m))[1:] for m in (None, measure))
    sizes = [max(c.peak_bytes for c in found if c.changes.get("data.batch_size") == 4) for found in (plain, masked)]
    assert sizes[1] > sizes[0]


def test_offload_that_the_host_has_no_room_for_is_not_what_comes_nearest() -> None:
    problem = describe(1, rows=1, tries_optimizers=False)
    (smallest, on_device) = (choose_smallest(search(replace(problem, host_bytes=size))) for size in (None, 0))
    assert smallest.host_bytes > 0 == on_device.host_bytes
    # With all that saves memory, which the configured step has not.
    assert on_device.changes == {"trainer.strategy.activation_checkpointing.mode": "full"}
    assert smallest.needed_bytes < on_device.needed_bytes


@pytest.mark.full
def test_offload_is_tried_only_where_nothing_fits_without() -> None:
    assert not any(c.host_bytes for c in roomy())
    assert not any(c.host_bytes for c in roomy({"settings": Settings(cpu_offload=CPUOffload())})[1:])
    assert any(c.host_bytes for c in search(describe(1)))
    assert choose(search(describe(1))) is None


def test_over_a_slow_link_parameters_are_gathered_once_a_step_or_nodes_have_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lit_fsdp.planning.search.search._pick", list)
    found = roomy({"num_nodes": 4, "num_micro_batches": 8, "splits_batch": False})
    chosen = choose(found)
    assert chosen is not None
    assert chosen.changes["trainer.strategy.sharding.reshard_after_backward"] is False
    mesh = {"trainer.strategy.mesh.replicate": -1, "trainer.strategy.mesh.shard": "node"}
    often, copies = (next(c for c in found if c.changes == changes) for changes in ({}, mesh))
    assert chosen.time.by_collective["all_gather"] < often.time.by_collective["all_gather"] / 8
    assert copies.time.step_s < often.time.step_s
    assert copies.time.by_collective["all_reduce"] > 0


def test_one_card_with_offload_keeps_what_it_has_copied_until_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.planning.search.search._pick", list)
    settings = Settings(cpu_offload=CPUOffload())
    alone: dict[str, Any] = {
        "ranks": Ranks(num_nodes=1, per_node=1),
        "num_micro_batches": 8,
        "splits_batch": False,
        "settings": settings,
    }
    found = [c for c in search(describe(2**20, **alone)) if c.settings.cpu_offload is not None]
    kept = [c for c in found if not c.settings.sharding.reshard_after_backward]
    by_copies = sorted(found, key=lambda c: c.time.by_collective["host_copy"])
    assert {c.settings.sharding.no_sync for c in kept} == {False, True}
    assert all(c in kept for c in by_copies[: len(kept)])


@pytest.mark.full
def test_over_several_nodes_the_second_gather_may_stay_inside_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lit_fsdp.planning.search.search._pick", list
    )  # this model is small, and all it keeps is less than 5 %
    key = "trainer.strategy.sharding.reshard_after_forward"
    tried = [c for c in roomy({"num_nodes": 4, "splits_batch": False}) if c.changes.keys() <= {key}]
    found = {c.changes.get(key, True): c for c in tried}
    regathered, full = (found[value] for value in (4, True))
    assert regathered.settings.sharding.reshard_after_forward == 4
    assert regathered.time.step_s < full.time.step_s
    assert regathered.peak_bytes > full.peak_bytes
    assert not any(type(c.changes.get(key)) is int for c in roomy())


def test_second_gathers_are_tried_among_ranks_that_divide_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.planning.search.search._pick", list)
    uneven = Settings(mesh=Mesh(replicate=2, shard=6), sharding=Sharding(reshard_after_forward=3))
    found = roomy({"num_nodes": 3, "splits_batch": False, "settings": uneven})
    tried = {(c.settings.sharding.reshard_after_forward, c.settings.activation_checkpointing.mode) for c in found}
    assert {(3, "none"), (3, "selective"), (3, "full")} < tried  # as configured, with all else
    assert any(size == 4 for size, _ in tried)  # over all 12 ranks
    assert not any(
        c.settings.mesh.shard == 6 and c.settings.sharding.reshard_after_forward == 4 for c in found
    )  # 6 are not divided by the 4 of a node


@pytest.mark.full
def test_what_compiled_blocks_would_save_is_said_and_not_chosen() -> None:
    compiled = Settings(compile=Compile())
    for candidate in roomy():
        assert candidate.compiled_s is not None
        assert candidate.compiled_s < candidate.time.step_s
        assert candidate.settings.compile is None
    found = roomy({"settings": compiled})
    assert all(candidate.compiled_s is None and candidate.settings.compile == Compile() for candidate in found)
    assert found[0].time.step_s == roomy()[0].compiled_s
    assert all(candidate.compiled_s is None for candidate in roomy({"device_type": "cpu"}))


@pytest.mark.full
def test_the_batch_is_split_with_accumulation_in_return_or_not_at_all() -> None:
    for candidate in roomy({"rows": 6, "num_micro_batches": 2}):
        rows, num = (candidate.changes.get(k) for k in ("data.batch_size", "trainer.accumulate_grad_batches"))
        assert (rows is None) is (num is None)
        assert rows is None or rows * num == 12
    fixed = roomy({"splits_batch": False})
    assert not any("data.batch_size" in candidate.changes for candidate in fixed)


@pytest.mark.full
def test_a_batch_of_pairs_is_split_by_its_own_size() -> None:
    pairs: dict[str, Any] = {"measure": lambda size: MicroBatch(rows=2 * size, length=512), "batch_size": 4}
    configured, *found = roomy({"rows": 8, "num_micro_batches": 2, **pairs})
    as_configured = roomy({"rows": 8, "num_micro_batches": 2})[0].time
    assert configured.time == as_configured
    assert roomy({"rows": 8, "num_micro_batches": 2, "batch_size": 4, "splits_batch": False})[0].time == as_configured
    split = [candidate.changes for candidate in found if "data.batch_size" in candidate.changes]
    assert split
    assert all(changes["data.batch_size"] * changes["trainer.accumulate_grad_batches"] == 8 for changes in split)


@pytest.mark.parametrize(
    ("task", "is_split"),
    [
        (lambda: PreferenceTuning(config=BIGGER), True),
        (lambda: PreferenceTuning(config=BIGGER, loss_type="orpo"), False),  # a mean over the pairs of a micro-batch
        (lambda: PreferenceTuning(config=BIGGER, loss_type="kto"), False),
        (build_task, True),  # though it cannot be split once it is made
        (lambda: ImageClassification(config={"model_type": "vit"}), True),
        (lambda: ImageClassification(config={"model_type": "vit"}, mixup=Mixup(mixup_alpha=1.0)), False),
    ],
    ids=["dpo", "orpo", "kto", "speech", "images", "mixup"],
)
def test_a_batch_is_split_only_where_the_training_stays_the_same(task: Callable[[], Any], is_split: bool) -> None:
    options: dict[str, Any] = {"val_check_interval": 1.0, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}
    trainer: Any = SimpleNamespace(**options, callbacks=[])
    step: Any = SimpleNamespace(module=task())
    assert splits_batch(trainer, step, SimpleNamespace(batch_size=8)) is is_split
    assert not splits_batch(trainer, step, SimpleNamespace(batch_size=8, max_frames_per_batch=100))
    trainer.callbacks = [GradientAccumulationScheduler({0: 2})]
    assert not splits_batch(trainer, step, SimpleNamespace(batch_size=8))


def test_changes_are_put_where_yaml_has_them() -> None:
    config = {"trainer": {"strategy": "fsdp2_hybrid"}, "model": {"class_path": "M", "init_args": {"lora": None}}}
    config |= {"data": {"class_path": "D"}}
    changes = {"trainer.strategy.activation_checkpointing.mode": "full", "model.lora": {"r": 16}, "data.batch_size": 2}
    found = apply_changes(
        config, {**changes, "trainer.accumulate_grad_batches": 4, "model.optimizer.name": "adamw_8bit"}
    )
    strategy = found["trainer"]["strategy"]
    assert strategy["class_path"] == "lit_fsdp.FSDP2Strategy"
    assert strategy["init_args"] == {
        "mesh": {"replicate": -1, "shard": "node"},
        "activation_checkpointing": {"mode": "full"},
    }
    assert found["trainer"]["accumulate_grad_batches"] == 4
    assert found["model"]["init_args"] == {"lora": {"r": 16}, "optimizer": {"name": "adamw_8bit"}}
    assert found["data"] == {"class_path": "D", "init_args": {"batch_size": 2}}
    assert config["data"] == {"class_path": "D"}
    auto = {"class_path": "lit_fsdp.AutoFSDP2Strategy", "init_args": {"device_memory": "8GiB", "timeout_s": 60}}
    found = apply_changes({"trainer": {"strategy": auto}}, {"trainer.strategy.activation_checkpointing.mode": "full"})
    assert found["trainer"]["strategy"] == {
        "class_path": "lit_fsdp.FSDP2Strategy",
        "init_args": {"timeout_s": 60, "activation_checkpointing": {"mode": "full"}},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter_folder(tmp_path, monkeypatch)
    write_run(tmp_path, model={"config": BIGGER}, data={"seq_length": 128, "batch_size": 4})
    return tmp_path


@pytest.mark.parametrize("name", PRESETS)
def test_a_strategy_that_has_a_name_keeps_what_that_stands_for(name: str) -> None:
    found = apply_changes({"trainer": {"strategy": name}}, {"trainer.strategy.activation_checkpointing.mode": "full"})
    arguments = found["trainer"]["strategy"]["init_args"]
    assert arguments.pop("activation_checkpointing") == {"mode": "full"}
    kinds = {"mesh": Mesh, "sharding": Sharding, "cpu_offload": CPUOffload}
    assert {key: kinds[key](**value) for key, value in arguments.items()} == PRESETS[name][1]


@pytest.mark.full
def test_the_written_configuration_takes_what_the_search_said(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_fsdp.planning.search.search._pick", list)  # to see all that was tried
    # More than the headroom, less than what is configured.
    device_bytes = count_needed_bytes("--config=run.yaml", "--devices=2") - MIB
    options = ["--config=run.yaml", "--devices=2", f"--device-memory={device_bytes}B", "--search=true"]
    options += ["--trainer.check_val_every_n_epoch=null"]  # by default 1
    found = plan(*options, "--write=chosen/mine.yaml")
    assert not found["device"]["fits"]
    candidates, chosen = found["search"]["candidates"], found["search"]["chosen"]
    assert not candidates[0]["fits"]
    assert candidates[chosen]["fits"]
    trained = {
        (*(c["changes"].get(f"model.{name}") is not None for name in ("lora", "loss_chunks")),) for c in candidates
    }
    assert trained == {(True, True), (True, False), (False, True), (False, False)}
    assert "chosen: " in capfd.readouterr().out
    again = plan("--config=chosen/mine.yaml", f"--device-memory={device_bytes}B")
    assert again["memory"]["peak_bytes"] == candidates[chosen]["peak_bytes"]
    assert again["device"]["fits"]
    assert again["ranks"]["world_size"] == 2
    assert main(["fit", "--config=chosen/mine.yaml", "--trainer.accelerator=cpu", "--print_config"]) == 0
    assert main(["plan", *options, "--write=chosen/mine.yaml"]) == 2
    assert "it exists; choose another file" in capfd.readouterr().err
    written = yaml.safe_load(Path("chosen/mine.yaml").read_text())
    assert written["trainer"]["check_val_every_n_epoch"] is None
    assert not {"search", "write", "out", "devices", "config"} & written.keys()


@pytest.mark.full
def test_the_written_configuration_tells_no_credentials(folder: Path) -> None:
    options = ["--config=run.yaml", "--devices=2", "--device-memory=16GiB", "--search=true", "--write=mine.yaml"]
    plan(*options, "--trainer.logger=CSVLogger", "--trainer.logger.init_args.save_dir=https://anna:hunter2@host/x")
    written = Path("mine.yaml").read_text()
    assert "@host/x" in written
    assert "hunter2" not in written


@pytest.mark.slow(after=3)
@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--search=true"], "what has to fit is not known; add --device-memory"),
        (["--write=mine.yaml"], "not used without search"),
        (["--search=true", "--device-memory=1GiB", "--exact=true"], "trace the chosen one afterwards"),
        (["--search=true", "--device-memory=1MiB", "--write=mine.yaml"], "mine.yaml is not written, as nothing fits"),
        (["--gpu=RTX 9999"], "gpu: got 'RTX 9999': not in lit_fsdp/planning/timing/hardware.py; nearest: RTX"),
        (["--gpu=RTX 4090", "--link=pcie9"], "link: got 'pcie9': unknown"),
        (["--link=pcie4"], "not used without gpu"),
        (["--gpu=T4", "--trainer.precision=bf16-true"], "T4 has no tensor cores for bfloat16"),
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line(
    folder: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config=run.yaml", "--devices=2", *options]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert not Path("mine.yaml").exists()


@pytest.mark.full
def test_what_has_no_closed_form_is_searched_by_traces(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = {key: value for key, value in BIGGER.items() if key != "num_key_value_heads"}
    config = json.dumps({**own, "model_type": "persimmon", "num_hidden_layers": 1})
    options = ["--config=run.yaml", "--devices=2", "--data.batch_size=1", f"--model.config={config}"]
    device_bytes = count_needed_bytes(*options) - MIB
    options += ["--search=true", f"--device-memory={device_bytes}B", "--write=mine.yaml"]
    found = plan(*options)["search"]
    printed = capfd.readouterr()
    assert "no closed form, so each setting is traced" in printed.out
    assert "search: traced 1: " in printed.err
    candidates, chosen = found["candidates"], found["candidates"][found["chosen"]]
    assert not candidates[0]["fits"]
    assert chosen["fits"]
    # Something that trains alike fits, so nothing else was tried.
    assert all(candidate["keeps_result"] for candidate in candidates)
    again = plan("--config=mine.yaml", "--exact=true")
    assert again["memory"]["peak_bytes"] == chosen["peak_bytes"]


@pytest.mark.full
def test_a_search_by_traces_on_one_card_tries_offload() -> None:
    offloads = set[bool]()

    def trace(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> StepEstimate:
        offloads.add(settings.cpu_offload is not None)
        return estimate_512(model, settings, rows, num_micro_batches)

    search(replace(describe(2**40), ranks=Ranks(num_nodes=1, per_node=1), device_bytes=1, trace=trace))
    assert offloads == {False, True}


@pytest.mark.full
def test_a_search_by_traces_tries_what_computes_the_same_before_other_optimizers() -> None:
    problem = describe(2**40)
    chunked = replace(problem.variants[0], changes={"model.loss_chunks": 8})
    names: list[str] = []

    def trace(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> StepEstimate:
        names.append(model.optimizer.name)
        return estimate_512(model, settings, rows, num_micro_batches)

    found = search(replace(problem, device_bytes=1, variants=[problem.variants[0], chunked], trace=trace))
    assert set(names) == {"adamw", "adamw_8bit"}
    assert "adamw" not in names[names.index("adamw_8bit") :]
    assert not any(candidate.fits for candidate in found)


@pytest.mark.slow
def test_a_search_by_traces_ends_where_one_by_the_closed_form_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_form = plan(*(options := ["--config=run.yaml", "--devices=2", "--device-memory=2GiB", "--search=true"]))
    monkeypatch.setattr("lit_fsdp.planning.search.search.estimate_step", refuse)
    by_trace = plan(*options)
    first, second = (found["search"]["candidates"][found["search"]["chosen"]] for found in (by_form, by_trace))
    assert second["changes"] == first["changes"]
    assert second["peak_bytes"] == pytest.approx(first["peak_bytes"], rel=0.01)
    assert second["time"]["step_s"] == pytest.approx(first["time"]["step_s"], rel=0.1)


def refuse(*_: Any, **__: Any) -> None:
    raise UnreadableModuleError("model", "a test says so")


SUBCLASS = """
from lit_fsdp.tasks import CausalLM

class Mine(CausalLM):
    def sum_losses(self, output, labels):
        return super().sum_losses(output, labels)

    def measure_batch(self, batch):  # holds what its parent does: no need to trace it
        return super().measure_batch(batch)
"""


@pytest.mark.full
def test_what_a_task_cannot_train_is_not_tried(folder: Path) -> None:
    (folder / "mine.py").write_text(SUBCLASS)
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["model"]["class_path"] = "mine.Mine"
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    found = plan("--config=run.yaml", "--devices=2", "--device-memory=8GiB", "--search=true")
    assert not any("model.loss_chunks" in candidate["changes"] for candidate in found["search"]["candidates"])
    assert any("model.lora" in candidate["changes"] for candidate in found["search"]["candidates"])


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_has_no_closed_form_is_timed_by_its_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    options = ["--config=run.yaml", "--devices=2", "--gpu=RTX 4090", f"--trainer.precision={precision}"]
    options.append("--model.attention=sdpa")  # of documents one by one, only the trace knows the products
    dense = plan(*options)
    monkeypatch.setattr("lit_fsdp.planning.plan.estimate_step", refuse)
    traced = plan(*options)
    assert (dense["engine"], traced["engine"]) == ("closed form", "exact trace")
    assert any("no closed form" in note for note in traced["notes"])
    assert traced["flops"]["model"] == dense["flops"]["model"]
    assert traced["time"]["compute_s"] == pytest.approx(dense["time"]["compute_s"], rel=0.25)


SILENT = """
from lit_fsdp.tasks import CausalLM

class Mine(CausalLM):
    def measure_batch(self, batch):
        return None
"""


@pytest.mark.full
def test_a_task_that_does_not_say_its_shape_is_planned_without_a_time(folder: Path) -> None:
    (folder / "silent.py").write_text(SILENT)
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["model"]["class_path"] = "silent.Mine"
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    found = plan("--config=run.yaml", "--devices=2", "--gpu=RTX 4090")
    assert found["time"] is None
    assert found["device"]["fits"]
    assert any("no time of a step: Mine does not say" in note for note in found["notes"])


@pytest.mark.full
def test_a_named_gpu_gives_its_memory_and_the_time_of_a_step(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = plan("--config=run.yaml", "--devices=4", "--gpu=RTX 4090")
    assert few["device"]["memory_bytes"] == 24 * 2**30
    many = plan("--config=run.yaml", "--devices=8", "--nodes=64", "--gpu=RTX 4090", "--link=pcie4,ib100")
    for found in (few, many):
        time = found["time"]
        total = time["compute_s"] + time["exposed_communication_s"] + time["optimizer_s"]
        assert time["step_s"] == pytest.approx(total)
    assert many["time"]["tokens_per_s_per_gpu"] < few["time"]["tokens_per_s_per_gpu"]
    assert "tokens/s" in capfd.readouterr().out
    assert json.loads(Path("planned/plan.json").read_text())["time"]["bound"] == "link"
