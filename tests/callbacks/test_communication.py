"""What is logged and said about communication."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fake_time import FakeTime
from lightning.pytorch.loggers import CSVLogger
from memory_faults import Fault, Faults
from torch import Tensor
from torch.utils.data import DataLoader
from training import EVEN, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy, Mesh, Sharding
from lit_fsdp.callbacks import CommunicationLogger
from lit_fsdp.profiling.expected_communication import estimate_bytes, estimate_collectives
from lit_fsdp.reporting.communication_section import NUMBERS, Interval, Straggler, find_straggler
from lit_fsdp.reporting.plots import render_svg
from lit_fsdp.reporting.rank_stats import Spread
from lit_fsdp.reporting.sections import HasSection
from lit_fsdp.tasks import CausalLM, LoRA
from ranks import run_ranks

METRICS = {
    f"comm/{name}"
    for name in (
        "gather_gib",
        "reduce_scatter_gib",
        "all_reduce_gib",
        "collective_s",
        "exposed_s",
        "overlapped_s",
        "exposed_pct",
        "bandwidth_gb_s",
    )
}


class Memory(CSVLogger):
    """Keeps what is logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        if "comm/exposed_s" in metrics:
            self.logged.append((step, dict(metrics)))


def check_predicted(predicted: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare calls and bytes of each collective; those that no plan has are none."""
    for kind, measured in found.items():
        assert predicted.get(kind, {"calls": 0, "num_bytes": 0}).items() <= measured.items(), kind
    assert found.keys() - predicted.keys() <= {"tensor", "all_to_all"}


def measure_hybrid(folder: Path) -> None:
    callback, logger = CommunicationLogger(num_warmup_steps=1), Memory(folder)
    sharding = Sharding(no_sync=True)
    strategy = FSDP2Strategy(print_plan=False, mesh=Mesh(replicate=2), sharding=sharding)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 2, "limit_val_batches": 1}
    trainer = build_trainer(strategy, callbacks=[callback], logger=logger, max_steps=5, **options)
    task, data = build_task(folder), Rows(64, batch_size=1)
    data.val_dataloader = data.train_dataloader  # type: ignore[method-assign]
    trainer.val_check_interval = 3  # also between two micro-batches
    trainer.fit(task, data)
    assert "val/loss" in trainer.callback_metrics
    assert isinstance(callback, HasSection)
    section = callback.make_section()
    assert section is not None
    sizes = {"num_shards": 2, "num_replicas": 2, "num_micro_batches": 2}
    counts = estimate_collectives(strategy.plan, sharding, **sizes)
    units = estimate_bytes(task, strategy.plan, sharding, strategy.precision_plugin.mixed_precision, **sizes)
    found = section.numbers["collectives"]
    assert found["all_gather"]["calls"] == counts.gathers
    assert found["reduce_scatter"]["num_bytes"] == sum(unit.reduce_scatter_step for unit in units)
    assert found["all_reduce"]["calls"] == counts.all_reduces == 5
    check_predicted(section.numbers["predicted"], found)
    assert not [note for note in section.notes if "plan" in note]
    json.dumps(section.numbers)
    assert [rank["rank"] for rank in section.numbers["ranks"]] == [0, 1, 2, 3]
    for rank in section.numbers["ranks"]:
        assert 0 < rank["exposed_s"] == rank["collective_s"] < rank["step_s"]
        assert rank["exposed_pct"] == pytest.approx(100 * rank["exposed_s"] / rank["step_s"])
    assert all(render_svg(plot) for plot in section.plots)
    if dist.get_rank() == 0:
        # The first interval, of steps 1 and 2, has one step after the warmup; the last one is not full.
        assert [step for step, _ in logger.logged] == [2, 4, 5]
        for _, metrics in logger.logged:
            assert set(metrics) == METRICS
            total = sum(unit.gather_step for unit in units)
            assert metrics["comm/gather_gib"] == pytest.approx(total / 2**30)
            assert metrics["comm/overlapped_s"] == 0
            assert 0 < metrics["comm/exposed_pct"] < 100
    else:
        assert logger.logged == []


@pytest.mark.full
def test_counts_and_bytes_are_those_of_the_plan_and_everything_is_logged(tmp_path: Path) -> None:
    run_ranks(measure_hybrid, save_model(tmp_path / "model", **EVEN), world_size=4)


def slow_one_rank_down(folder: Path, slow: int, out: Path) -> None:
    time, patch = FakeTime(), pytest.MonkeyPatch()  # this process ends with the test
    patch.setattr("lit_fsdp.profiling.clock.time", time)
    time.meet_in_collectives(patch, takes_s=1)
    callback = CommunicationLogger()
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[callback], max_steps=6)
    task = build_task(folder)
    if dist.get_rank() == slow:

        class Slow(pl.Callback):
            def on_train_start(self, trainer: Any, task: Any) -> None:
                task.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: time.sleep(8))

        trainer.callbacks.append(Slow())  # type: ignore[attr-defined]
    trainer.fit(task, Rows(64, batch_size=1))
    section = callback.make_section()
    assert section is not None
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"numbers": section.numbers, "notes": list(section.notes)}))


@pytest.mark.full
@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_that_sleeps_in_forward_is_the_straggler(slow: int, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(slow_one_rank_down, folder, slow, tmp_path / "out", world_size=3)
    found = json.loads((tmp_path / "out").read_text())
    ranks, straggler = found["numbers"]["ranks"], found["numbers"]["straggler"]
    num_calls = sum(kind["calls"] for kind in found["numbers"]["collectives"].values())
    assert [rank["collective_s"] for rank in ranks] == [num_calls + 8 * (rank != slow) for rank in range(3)]
    step_s = num_calls + 8 + 2  # the number of tokens is added up too, and the norm of gradients
    assert [rank["step_s"] for rank in ranks] == [step_s] * 3
    assert straggler == {"rank": slow, "waited_s": 8, "waited_pct": pytest.approx(100 * 8 / step_s)}
    assert f"rank {slow} is the straggler" in found["notes"][-1]


def use_a_unit_twice(folder: Path) -> None:
    callback = CommunicationLogger()
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[callback], max_steps=2)
    task = build_task(folder)
    configure = task.configure_model

    def configure_twice() -> None:
        configure()
        layers = task.model.model.layers
        layers.append(layers[0])
        task.model.config.num_hidden_layers += 1

    task.configure_model = configure_twice  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="gather calls") if dist.get_rank() == 0 else _nothing():
        trainer.fit(task, Rows(64, batch_size=1))
    section = callback.make_section()
    assert section is not None
    assert section.numbers["collectives"]["all_gather"]["calls"] > section.numbers["predicted"]["all_gather"]["calls"]
    assert "gather calls" in section.notes[0]


class Twice(CausalLM):
    """Runs its model twice in each micro-batch, as tasks that compare do."""

    with_grad = True

    def compute_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(self.with_grad):
            first, _ = super().compute_loss(batch)
        second, num_targets = super().compute_loss(batch)
        return first + second, num_targets


def run_a_model_twice(folder: Path, with_grad: bool, options: dict[str, Any]) -> None:
    callback = CommunicationLogger()
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[callback], max_steps=2)
    task = Twice(pretrained=str(folder), **options)
    task.with_grad = with_grad
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* had .* calls of")
        trainer.fit(task, Rows(64, batch_size=1))
    section = callback.make_section()
    assert section is not None
    counts, predicted = section.numbers["collectives"], section.numbers["predicted"]
    assert counts["all_gather"]["calls"] > predicted["all_gather"]["calls"]
    assert predicted["reduce_scatter"].items() <= counts["reduce_scatter"].items()
    assert "ran more than once in each micro-batch" in section.notes[0]


@pytest.mark.full
@pytest.mark.parametrize(("with_grad", "options"), [(True, {}), (False, {"lora": LoRA(r=4)})], ids=["full", "lora"])
def test_a_model_that_runs_twice_is_told_and_no_warning(tmp_path: Path, with_grad: bool, options: Any) -> None:
    run_ranks(run_a_model_twice, save_model(tmp_path / "model", **EVEN), with_grad, options)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.full
def test_a_difference_to_the_plan_is_told(tmp_path: Path) -> None:
    run_ranks(use_a_unit_twice, save_model(tmp_path / "model", **EVEN))


def redo_a_step(folder: Path) -> None:
    callback = CommunicationLogger(num_warmup_steps=0)
    faults = Faults([Fault(rank=0, phase="unshard", unit=2)])
    strategy = FSDP2Strategy(print_plan=False, oom_retries=1)
    trainer = build_trainer(strategy, callbacks=[callback, faults], max_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(build_task(folder), Rows(64, 2))
    assert len(strategy.redone_steps) == 1
    assert [str(warning.message) for warning in caught if "the plan says" in str(warning.message)] == []


@pytest.mark.full
def test_a_step_that_is_redone_is_not_compared_with_the_plan(tmp_path: Path) -> None:
    run_ranks(redo_a_step, save_model(tmp_path, **EVEN))


def fit_twice_and_fail(folder: Path) -> None:
    callback = CommunicationLogger(num_warmup_steps=0)
    for num_steps in (2, 3):
        task = build_task(folder)
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[callback], max_steps=num_steps)
        trainer.fit(task, Rows(64, batch_size=1))
        section = callback.make_section()
        assert section is not None
        assert section.numbers["intervals"]["step"] == [num_steps]

    def fail(*_: Any) -> None:
        raise KeyError("made up")

    task.on_train_batch_end = fail  # type: ignore[method-assign]
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[callback], max_steps=2)
    with pytest.raises(KeyError):
        trainer.fit(task, Rows(64, batch_size=1))
    for module in task.modules():
        for group in getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_fsdp_param_groups", ()):
            assert type(group._all_gather_comm).__name__ == "GlooAllGather"


@pytest.mark.full
def test_one_callback_measures_several_runs_and_leaves_a_failed_one(tmp_path: Path) -> None:
    run_ranks(fit_twice_and_fail, save_model(tmp_path / "model", **EVEN))


def try_one_step(folder: Path) -> None:
    callback = CommunicationLogger()
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[callback], fast_dev_run=True)
    trainer.fit(build_task(folder), Rows(64, batch_size=1))
    section = callback.make_section()
    assert section is not None
    assert not any(math.isnan(rank["step_s"]) for rank in section.numbers["ranks"])
    assert section.numbers["units"][0]["seconds"] > 0


def test_a_run_that_is_all_warmup_is_measured_too(tmp_path: Path) -> None:
    run_ranks(try_one_step, save_model(tmp_path / "model", **EVEN))


class Plain(pl.LightningModule):
    """No sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_without_fsdp2_a_note_says_that_nothing_is_measured(tmp_path: Path) -> None:
    callback = CommunicationLogger()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=2, callbacks=[callback], enable_checkpointing=False, **quiet)  # type: ignore[arg-type]
    trainer.fit(Plain(), DataLoader(torch.ones(4, 4)))
    section = callback.make_section()
    assert section is not None
    assert section.notes == [
        "communication is not measured: nothing is sharded with FSDP2 (the strategy is SingleDeviceStrategy)"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_warmup_steps": -1}, "num_warmup_steps: got -1: expected 0 or more"),
        ({"straggler_pct": 0.0}, "straggler_pct: got 0.0: expected a part of the step above 0, up to 100"),
    ],
)
def test_a_wrong_setting_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommunicationLogger(**options)


def test_ranks_that_hardly_differ_have_no_straggler() -> None:
    def make(*collective_s: float) -> Interval:
        values = {name: collective_s if name == "collective_s" else (1.0,) * len(collective_s) for name in NUMBERS}
        return Interval(step=1, spreads={name: Spread(values=found) for name, found in values.items()})

    assert find_straggler(make(0.50, 0.52, 0.54), 5.0) is None
    assert find_straggler(make(0.50, 0.10, 0.54), 5.0) == Straggler(
        rank=1, waited_s=pytest.approx(0.42), waited_pct=pytest.approx(42)
    )
    # One rank that waits longer than all others is no reason to name any.
    assert find_straggler(make(0.50, 0.51, 0.50, 0.90), 5.0) is None
