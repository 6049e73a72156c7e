"""``fsdp2_auto`` for models without a closed form: what it chooses by traces, and how it ends where it cannot."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from launches import fork_ranks, run_processes, write_run
from plan_runs import Recorded, check_refused, count_needed_bytes, enter_folder, plan
from search_problems import describe, estimate_512
from torch import nn

from lit_fsdp.planning.estimate import ModelToTrain
from lit_fsdp.planning.search.process import RESULT, RequestReader, SearchProcess, SearchRequest, pack_request
from lit_fsdp.planning.search.search import Candidate, StepCost, Variant, choose, search
from lit_fsdp.planning.search.traced import answer
from lit_fsdp.planning.step_parts import Replay
from lit_fsdp.planning.timing.hardware import find_gpu
from lit_fsdp.sharding.settings import Settings

PERSIMMON = {"model_type": "persimmon", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512}
PERSIMMON |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}

OWN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Stack(LightningModule):
    def __init__(self, trouble: str = "", manual: bool = False):
        super().__init__()
        self.trouble = trouble
        self.automatic_optimization = not manual
        if trouble == "pickle":
            self.stream = (i for i in range(3))

    def configure_model(self):
        with torch.device("meta"):
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        if self.trouble == "values" and float(batch["x"].sum()) > 1e9:
            return None
        if self.trouble == "error":
            raise KeyError("no such thing")
        loss = self.net(batch["x"]).square().mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Rows(LightningDataModule):
    def make_example_batch(self):
        return {"x": torch.zeros(4, 32)}

    def train_dataloader(self):
        rows = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        return DataLoader([{"x": row} for row in rows], batch_size=4)

    val_dataloader = train_dataloader
"""

SCRIPT = """
from lightning.pytorch import Trainer
from lit_fsdp import AutoFSDP2Strategy

if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(strategy=AutoFSDP2Strategy(), accelerator="cpu", devices=2, max_steps=2, **quiet)
    trainer.fit(Stack(), Rows())
    print(f"chosen: {trainer.strategy.settings.sharding.reshard_after_forward}\\n", end="", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter_folder(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_run(tmp_path, model={"config": PERSIMMON}, data={"batch_size": 1})
    (tmp_path / "own_stack.py").write_text(OWN)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = {"accelerator": "cpu", "max_steps": 3, "log_every_n_steps": 1, "strategy": "fsdp2_auto", **quiet}
    own = {"trainer": trainer, "model": "own_stack.Stack", "data": "own_stack.Rows", "monitoring": False}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    return tmp_path


def read_losses(name: str) -> list[float]:
    (version,) = Path("runs", name).iterdir()
    lines = (version / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    return [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]


@pytest.mark.slow
def test_a_run_takes_what_the_search_of_plan_takes_and_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # With fewer tokens, recomputation saves nothing.
    config = ["--config=run.yaml", "--data.batch_size=8", "--data.seq_length=64"]
    common = [*config, "--devices=2"]
    kept = ["--trainer.strategy=lit_fsdp.FSDP2Strategy", "--trainer.strategy.sharding.reshard_after_forward=false"]
    device_bytes = count_needed_bytes(*common, *kept) - 2**14  # a block less
    found = plan(*common, "--search=true", f"--device-memory={device_bytes}B", "--gpu=RTX 4090", "--link=pcie4")
    changes = found["search"]["candidates"][found["search"]["chosen"]]["changes"]
    assert list(changes) == [
        "trainer.strategy.sharding.reshard_after_forward",
        "trainer.strategy.activation_checkpointing.mode",
    ]
    monkeypatch.setattr("lit_fsdp.planning.auto_strategy.choose_usual_gpu", lambda _: find_gpu("RTX 4090"))
    strategy = "--trainer.strategy"
    options = [f"{strategy}=lit_fsdp.AutoFSDP2Strategy", f"{strategy}.device_memory={device_bytes}B"]
    chosen = fork_ranks("fit", *config, *options, f"{strategy}.link=pcie4", "--run_name=chosen")
    assert [rank.code for rank in chosen] == [0, 0], chosen[0].err
    spelled = [f"{key.removeprefix('trainer.strategy.')}={str(value).lower()}" for key, value in changes.items()]
    assert f"fsdp2_auto: {', '.join(spelled)}: " in chosen[0].err
    given = [f"--{key}={str(value).lower()}" for key, value in changes.items()]
    plain = fork_ranks("fit", *config, f"{strategy}=lit_fsdp.FSDP2Strategy", *given, "--run_name=plain")
    assert [rank.code for rank in plain] == [0, 0], plain[0].err
    assert read_losses("chosen") == read_losses("plain")


@pytest.mark.slow
def test_a_module_of_a_script_that_is_run_is_traced_too() -> None:
    Path("script.py").write_text(OWN + SCRIPT)
    (ended,) = run_processes(["script.py"])
    assert ended.code == 0, ended.err
    assert "fsdp2_auto: traced 2: " in ended.err
    assert ended.out.count("chosen: False") == 2


@pytest.mark.slow
def test_what_goes_wrong_in_the_process_that_traces_ends_all_ranks() -> None:
    ranks = fork_ranks("fit", "--config=own.yaml", "--model.trouble=error")
    check_refused(ranks, "a trace failed, see the traceback above (KeyError: 'no such thing')")
    assert "Traceback" in ranks[0].err


@pytest.mark.full
def test_a_search_ends_where_the_one_of_plan_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.planning.auto_strategy.SearchProcess", Recorded)
    check_refused(fork_ranks("fit", "--config=own.yaml"), "Stack does not say what shape its batches have")
    assert Path("stopped").exists()
    found = answer(Path("packed").read_bytes())
    assert isinstance(found, list)
    peak_bytes = plan("--config=own.yaml", "--devices=2")["memory"]["peak_bytes"]
    assert found[0].peak_bytes == peak_bytes
    chosen = choose(found)
    assert chosen is not None
    assert chosen.changes == {"trainer.strategy.sharding.reshard_after_forward": False}


@pytest.mark.full
def test_the_search_of_plan_takes_what_that_of_a_run_takes_for_a_module_that_is_no_task(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lit_fsdp.planning.auto_strategy.SearchProcess", Recorded)
    fork_ranks("fit", "--config=own.yaml")
    by_run = answer(Path("packed").read_bytes())
    assert isinstance(by_run, list)
    capfd.readouterr()
    found = plan("--config=own.yaml", "--devices=2", "--device-memory=8GiB", "--search=true")
    candidates = found["search"]["candidates"]
    assert candidates[0]["peak_bytes"] == found["memory"]["peak_bytes"] == by_run[0].peak_bytes
    taken = choose(by_run)
    assert taken is not None
    assert candidates[found["search"]["chosen"]]["changes"] == taken.changes
    said = capfd.readouterr().out
    assert "Stack does not say what shape its batches have (measure_batch): each setting is traced" in said
    for told in (said, Path("planned/plan.html").read_text()):
        assert "rows/s" in told
        assert "tokens/s" not in told


@pytest.mark.full
@pytest.mark.parametrize(
    ("trouble", "said"),
    [("values", "the step of Stack cannot run on tensors without values"), ("error", "KeyError: 'no such thing'")],
)
def test_why_a_step_cannot_be_traced_is_said(monkeypatch: pytest.MonkeyPatch, trouble: str, said: str) -> None:
    monkeypatch.setattr("lit_fsdp.planning.auto_strategy.SearchProcess", Recorded)
    fork_ranks("fit", "--config=own.yaml", f"--model.trouble={trouble}", ranks=1)
    found = answer(Path("packed").read_bytes())
    assert isinstance(found, str)
    assert said in found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.trouble=pickle"], "Stack cannot be copied to the process that would trace it (TypeError: "),
        (["--model.manual=true"], "Stack optimizes manually, so its step cannot be traced"),
    ],
)
def test_what_cannot_be_traced_is_refused_on_all_ranks(options: list[str], said: str) -> None:
    check_refused(fork_ranks("fit", "--config=own.yaml", *options), said)


@pytest.mark.slow
def test_a_search_may_take_longer_than_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.planning.auto_strategy.SearchProcess", Recorded)
    monkeypatch.setattr(Recorded, "wait_s", 25.0)
    strategy = ["--trainer.strategy=lit_fsdp.AutoFSDP2Strategy", "--trainer.strategy.timeout_s=20"]
    check_refused(fork_ranks("fit", "--config=own.yaml", *strategy), "nothing was tried")


def test_an_evaluation_traces_nothing_and_takes_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.planning.auto_strategy.SearchProcess", Recorded)
    ranks = fork_ranks("validate", "--config=own.yaml")
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert not Path("packed").exists()


def test_weights_are_not_copied_and_a_shared_one_stays_shared() -> None:
    module = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    module[1].weight = module[0].weight
    problem = describe(2**40)
    model = replace(problem.variants[0].model, module=module)
    problem = replace(problem, variants=[Variant(model=model)])
    packed = pack_request(SearchRequest(problem=problem, batch={"x": torch.zeros(2)}), None, {"devices": 2})
    assert len(packed) < 100_000
    reader = RequestReader(BytesIO(packed))
    assert reader.load() == {"devices": 2}
    copied = reader.load().problem.variants[0].model.module
    assert copied[0].weight.is_meta
    assert copied[1].weight is copied[0].weight
    assert module[0].weight.device.type == "cpu"


@pytest.mark.full
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_what_can_only_be_slower_is_not_traced_and_the_choice_is_the_same(num_micro_batches: int) -> None:
    problem = describe(2**40, splits_batch=False, tries_optimizers=False, num_micro_batches=num_micro_batches)
    sizes = sorted(candidate.needed_bytes for candidate in search(problem))
    for device_bytes in (2**40, sizes[len(sizes) // 2], sizes[0], sizes[0] - 1):
        small = replace(problem, device_bytes=device_bytes)
        every, num_all = search_counting(small)
        some, num_traced = search_counting(replace(small, only_fastest=True))
        assert choose(some) == choose(every)
        assert num_traced < num_all
    assert search_counting(replace(problem, only_fastest=True))[1] <= 1 + num_micro_batches


@pytest.mark.full
def test_what_holds_more_is_traced_where_the_allocator_may_take_less_for_it() -> None:
    def trace(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> StepCost:
        cost = estimate_512(model, settings, rows, num_micro_batches)
        taken = round(cost.memory.peak.num_bytes * (1.02 if settings.sharding.reshard_after_forward is False else 2.0))
        names = ("reserved_bytes", "steady_bytes", "least_bytes", "expandable_bytes")
        return replace(cost, replay=Replay(num_retries=0, **dict.fromkeys(names, taken)))

    problem = describe(2**40, splits_batch=False, tries_optimizers=False, trace=trace)
    for needed in sorted(candidate.needed_bytes for candidate in search(problem)):
        small = replace(problem, device_bytes=needed)
        assert choose(search(replace(small, only_fastest=True))) == choose(search(small))


def search_counting(problem: Any) -> tuple[list[Candidate], int]:
    traced: set[Settings] = set()

    def trace(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> StepCost:
        traced.add(settings)
        return estimate_512(model, settings, rows, num_micro_batches)

    return search(replace(problem, trace=trace)), len(traced)


@pytest.mark.parametrize("left", [None, b"", b"\x80damaged"])
def test_a_search_that_leaves_nothing_to_read_is_no_error_of_one_rank_alone(tmp_path: Path, left: bytes | None) -> None:
    searching = object.__new__(SearchProcess)
    searching._process = SimpleNamespace(wait=lambda _: 3)  # type: ignore[assignment]
    searching._folder = SimpleNamespace(name=str(tmp_path))  # type: ignore[assignment]
    if left is not None:
        (tmp_path / RESULT).write_bytes(left)
    assert searching.wait(1.0) == "the process that traces ended with exit code 3, and left no result"
