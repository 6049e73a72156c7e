"""Where the time of a step goes, and how many operations it takes."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_time import FakeTime
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from training import EVEN, GLOBAL_BATCH, Rows, build_task, build_trainer, save_model

from lit_fsdp import ActivationCheckpointing, FSDP2Strategy
from lit_fsdp.callbacks import ThroughputLogger
from lit_fsdp.planning.timing.step_estimate import get_matmul_dtype
from lit_fsdp.reporting.sections import HasSection, Section
from ranks import run_ranks

# What each part takes, so that every sum of some of them is another number.
SLEEPS = {"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 8.0, "other": 32.0}
time = FakeTime()


@pytest.fixture(autouse=True)
def time_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.profiling.clock.time", time)


class SlowRows(Dataset[Tensor]):
    def __init__(self, sleep_s: float = SLEEPS["data"]) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.sleep_s)
        return torch.full((4,), float(index))


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(SLEEPS["backward"])
        return grads[0]


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        time.sleep(SLEEPS["optimizer"])
        return loss


class SlowTask(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(SLEEPS["forward"])
        self.log("train/samples_seen", 10.0 * (self.global_step + 1))
        return SlowBackward.apply(self.layer(batch)).sum()  # type: ignore[no-untyped-call,no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(1000)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowSGD(self.parameters(), lr=1e-9)


class SlowHook(Callback):
    """Takes its time after batches; every third step stands for a checkpoint, when Lightning calls another hook."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step % 3 == 0:
            trainer.callbacks[0].on_save_checkpoint(trainer, trainer.lightning_module, {})  # type: ignore[attr-defined]
            time.sleep(1000)
        else:
            time.sleep(SLEEPS["other"])


class Memory(Logger):
    name, version = "memory", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        if any(name.startswith("speed/") for name in metrics):
            assert step is not None
            self.logged.append((step, {n: v for n, v in metrics.items() if n.startswith("speed/")}))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def fit(callback: ThroughputLogger, folder: Path, rows: Dataset[Tensor] | None = None, **options: Any) -> Section:
    settings = {"logger": False, "max_steps": 7, "enable_checkpointing": False, "callbacks": [callback]}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(**{**settings, **quiet, **options}, default_root_dir=folder, num_sanity_val_steps=1)
    trainer.fit(SlowTask(), DataLoader(rows or SlowRows()), DataLoader(SlowRows()))
    section = callback.make_section()
    assert section is not None
    return section


def test_every_part_gets_its_time_and_pauses_count_nowhere(tmp_path: Path) -> None:
    callback = ThroughputLogger(num_warmup_steps=2, starved_pct=50)
    assert isinstance(callback, HasSection)
    options = {"val_check_interval": 3, "limit_val_batches": 1, "accumulate_grad_batches": 2}
    section = fit(callback, tmp_path, callbacks=[callback, SlowHook()], **options)
    parts = {part: [2 * time_s] * 7 for part, time_s in SLEEPS.items()}
    parts["optimizer"] = [SLEEPS["optimizer"]] * 7
    # After each of the two batches of a step there is either the hook or a pause: a checkpoint, a validation.
    parts["other"] = [SLEEPS["other"] * num_hooks for num_hooks in (0, 1, 2, 0, 1, 2, 0)]
    assert {curve.label: list(curve.y) for curve in section.plots[0].curves} == parts
    steps = [sum(values) for values in zip(*parts.values(), strict=True)]
    for name, values in {**parts, "step": steps}.items():
        assert section.numbers[f"{name}_s"] == statistics.median(values[2:]), name
    assert section.numbers["samples_per_s"] == pytest.approx(10 * 5 / sum(steps[2:]))  # 10 a step
    assert section.tables[0].title == "Speed, medians of 5 steps after the warm-up"


def test_it_logs_every_interval_and_what_is_left_at_the_end(tmp_path: Path) -> None:
    memory = Memory()
    fit(ThroughputLogger(num_warmup_steps=1), tmp_path, logger=memory, log_every_n_steps=3, limit_val_batches=0)
    assert [step for step, _ in memory.logged] == [3, 6, 7]
    names = {"step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "model_tflop_s"}
    assert set(memory.logged[0][1]) == {f"speed/{n}" for n in names | {"samples_per_s", "samples_per_s_per_rank"}}


def test_a_second_fit_begins_anew_and_a_failed_one_leaves_nothing_behind(tmp_path: Path) -> None:
    callback = ThroughputLogger()

    class Failing(Callback):
        def on_after_backward(self, *_: Any) -> None:
            raise RuntimeError("stop here")

    class FailingEarly(Callback):
        def on_before_backward(self, *_: Any) -> None:
            raise RuntimeError("stop here")

    for failing in (Failing(), FailingEarly()):
        with pytest.raises(RuntimeError, match="stop here"):
            fit(callback, tmp_path, callbacks=[callback, failing], limit_val_batches=0)
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        assert callback.make_section() is None
    section = fit(callback, tmp_path, limit_val_batches=0, fast_dev_run=True)
    assert section.numbers["steps"] == 1
    assert any("none is after the 5 of the warm-up" in note for note in section.notes)


def test_an_interval_without_a_step_is_no_wait_for_data(tmp_path: Path) -> None:
    """The last interval has none where a run ends with a step that is logged."""
    section = fit(
        ThroughputLogger(num_warmup_steps=1, starved_pct=99), tmp_path, log_every_n_steps=7, limit_val_batches=0
    )
    assert section.numbers["steps"] == 6  # after the warm-up
    assert not any("waits for data" in note for note in section.notes)


def test_waiting_for_data_is_warned_of_once_with_what_helps(tmp_path: Path) -> None:
    callback = ThroughputLogger(num_warmup_steps=1)
    with pytest.warns(
        UserWarning, match=r"rank 0 waits for data 30 % of its time \(6 of 20 s a step\): raise num"
    ) as caught:
        section = fit(callback, tmp_path, SlowRows(6), log_every_n_steps=2, limit_val_batches=0)
    assert len([w for w in caught if "waits for data" in str(w.message)]) == 1
    assert len([note for note in section.notes if "waits for data" in note]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_warmup_steps": -1}, "num_warmup_steps: got -1: expected 0 or more"),
        ({"starved_pct": 0.0}, "starved_pct: got 0.0: expected above 0"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputLogger(**options)


class SlowRank(Callback):
    """Rank 1 reads its data slowly."""

    def on_before_backward(self, *_: Any) -> None:
        time.sleep(3)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        fetch = loop._on_before_fetch

        def wait() -> None:
            fetch()
            if dist.get_rank() == 1:
                time.sleep(1)

        loop._on_before_fetch = wait


def fit_sharded(folder: Path, strategy: dict[str, Any], accumulate: int, out: Path) -> None:
    callback = ThroughputLogger(num_warmup_steps=1)
    batch_size = GLOBAL_BATCH // dist.get_world_size() // accumulate
    callbacks = [callback, SlowRank()]
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False, **strategy),
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        max_steps=4,
    )
    trainer.fit(build_task(folder), Rows(64, batch_size))
    section = callback.make_section()
    assert section is not None
    steps = [sum(parts) for parts in zip(*[curve.y for curve in section.plots[0].curves], strict=True)]
    torch.save((steps, section.numbers, section.tables, section.notes), out / str(dist.get_rank()))


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "accumulate"), [({}, 1), ({"activation_checkpointing": ActivationCheckpointing(mode="full")}, 2)]
)
def test_on_two_ranks_each_counts_its_own_operations_and_the_slow_one_is_named(
    tmp_path: Path, strategy: dict[str, Any], accumulate: int
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(fit_sharded, folder, strategy, accumulate, tmp_path)
    steps, numbers, tables, notes = torch.load(tmp_path / "0", weights_only=False)
    others, *_ = torch.load(tmp_path / "1", weights_only=False)
    sizes, num_tokens = (32, 64, 64, 3), GLOBAL_BATCH // 2 * 16
    hidden, inner, vocabulary, layers = sizes
    num_weights = layers * (4 * hidden * hidden + 3 * hidden * inner) + vocabulary * hidden
    model = (6 * num_weights + 12 * layers * hidden * 16) * num_tokens
    flops = numbers["first_step_flops_of_rank_0"]
    assert flops["model"] == model
    assert (flops["hardware"] > 1.2 * model) == bool(strategy)
    # All steps have as many elements, so the rate is operations over time.
    rates = [3 * model / sum(times[1:]) / 1e12 for times in (steps, others)]
    assert numbers["model_tflop_s"] == pytest.approx(sum(rates) / 2)
    assert (steps[1:], others[1:]) == ([3 * accumulate] * 3, [4 * accumulate] * 3)
    data = next(row for row in tables[0].rows if row[0] == "data s")
    assert tuple(data) == ("data s", f"{accumulate / 2:.4f}", "14.3 %", f"{accumulate:.4f} (rank 1)")
    (note,) = [note for note in notes if "waits for data" in note]
    assert note.startswith(f"rank 1 waits for data 25 % of its time ({accumulate} of {4 * accumulate} s a step)")
    assert numbers["tokens_per_s"] == pytest.approx(2 * numbers["tokens_per_s_per_rank"])


def test_compiled_blocks_are_not_counted_and_it_says_so(tmp_path: Path) -> None:
    task = SlowTask()
    task.layer.compile(backend="eager")
    callback = ThroughputLogger()
    trainer = Trainer(fast_dev_run=True, callbacks=[callback], accelerator="cpu", enable_progress_bar=False)
    trainer.fit(task, DataLoader(SlowRows()))
    section = callback.make_section()
    assert section is not None
    assert "FLOPs are not counted: what is compiled cannot be seen" in section.notes
    assert "model_tflop_s" not in section.numbers
    assert section.numbers["compiler"]["recompilations"] == 0
    assert any(note.startswith("rank 0 compiled ") for note in section.notes)


def test_a_slow_start_is_not_taken_for_slow_data(tmp_path: Path) -> None:
    class SlowStart(SlowRows):
        def __getitem__(self, index: int) -> Tensor:
            time.sleep(1000 if index < 1 else 0)
            return torch.ones(4)

    callback = ThroughputLogger(num_warmup_steps=1)
    section = fit(callback, tmp_path, SlowStart(), limit_val_batches=0)
    assert not any("waits for data" in note for note in section.notes)


def test_mfu_is_of_the_peak_of_the_dtype_that_is_computed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Peaked(ThroughputLogger):
        def _choose_peak(self, trainer: Trainer, module: LightningModule) -> float | None:
            return 1e-6

    section = fit(Peaked(num_warmup_steps=1), tmp_path, limit_val_batches=0, max_steps=3)
    assert section.numbers["mfu_pct"] == pytest.approx(100 * section.numbers["model_tflop_s"] / 1e-6)
    assert section.numbers["hfu_pct"] == section.numbers["mfu_pct"] > 0

    class Undo(Callback):
        def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
            if trainer.global_step == 0:
                peaked.on_step_undone(trainer, module)

    peaked = Peaked(num_warmup_steps=1)
    undone = fit(peaked, tmp_path, limit_val_batches=0, max_steps=3, callbacks=[peaked, Undo()])
    flops = "first_step_flops_of_rank_0"
    assert undone.numbers[flops] == section.numbers[flops]
    assert undone.numbers["model_tflop_s"] == section.numbers["model_tflop_s"]
    uncounted = fit(Peaked(num_warmup_steps=1, count_flops=False), tmp_path, limit_val_batches=0, max_steps=3).numbers
    assert uncounted["step_s"] > 0
    assert not uncounted.keys() & {"model_tflop_s", "mfu_pct", "hfu_pct"}
    for precision, matmul, expected in (
        ("32-true", "highest", "float32"),
        ("32-true", "high", "tf32"),
        ("bf16-mixed", "highest", "bfloat16"),
        ("bf16-true", "highest", "bfloat16"),
        ("64-true", "highest", "float64"),
    ):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda matmul=matmul: matmul)
        strategies: list[Any] = ["auto"] if precision == "64-true" else ["auto", FSDP2Strategy()]
        for strategy in strategies:
            trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, precision=precision, logger=False)  # type: ignore[arg-type]
            task = SlowTask().double() if precision == "64-true" else SlowTask()
            assert get_matmul_dtype(trainer, task) == expected
