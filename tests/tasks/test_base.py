import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from differences import find_largest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from training import (
    EVEN,
    Recorder,
    Result,
    Rows,
    build_task,
    build_trainer,
    collate,
    gather_weights,
    list_differences,
    make_rows,
    save_model,
    train_plainly,
    train_stock,
)
from transformers import AutoModelForCausalLM, get_scheduler

from lit_fsdp import FSDP2Strategy, MixedPrecision
from lit_fsdp.tasks import CausalLM, LRSchedule, Optimizer, Task
from lit_fsdp.tasks.loading import build_train_loader
from ranks import run_ranks

TOLERANCE = 1e-6


def train_and_compare(
    folder: Path, truth: Result, make_strategy: Callable[[], Any], batch_size: int, accumulate: int
) -> None:
    recorder = Recorder()
    trainer = build_trainer(make_strategy(), callbacks=[recorder], accumulate_grad_batches=accumulate)
    task = build_task(folder)
    trainer.fit(task, Rows(64, batch_size))
    recorder.result.weights = gather_weights(task)
    if trainer.is_global_zero:  # which holds the gathered weights
        differences = list_differences(recorder.result, truth)
        assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    ("make_strategy", "world_size", "batch_size", "accumulate"),
    [
        (lambda: SingleDeviceStrategy("cpu"), 1, 8, 1),
        (lambda: SingleDeviceStrategy("cpu"), 1, 2, 4),
        (DDPStrategy, 2, 4, 1),
        (DDPStrategy, 2, 2, 2),
        (lambda: FSDP2Strategy(print_plan=False), 2, 1, 4),
    ],
    ids=["1x8", "1x2x4", "ddp 2x4", "ddp 2x2x2", "fsdp2 2x1x4"],
)
def test_the_loss_of_a_step_does_not_depend_on_how_the_batch_is_split(
    make_strategy: Callable[[], Any], world_size: int, batch_size: int, accumulate: int, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    args = (folder, train_plainly(folder), make_strategy, batch_size, accumulate)
    run_ranks(train_and_compare, *args, world_size=world_size)


class FirstRows(Rows):
    """One epoch of three micro-batches per rank."""

    def train_dataloader(self) -> Any:
        rows = make_rows(64, 3 * self.batch_size * self.trainer.world_size)
        return build_train_loader(
            rows, batch_size=self.batch_size, collate=collate, shuffle=False, trainer=self.trainer
        )


def train_an_epoch(folder: Path, out: Path, batch_size: int) -> None:
    recorder = Recorder()
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False), callbacks=[recorder], max_steps=-1, max_epochs=1, accumulate_grad_batches=2
    )
    trainer.fit(build_task(folder), FirstRows(64, batch_size))
    if trainer.is_global_zero:
        torch.save((recorder.result.losses, recorder.result.grad_norms), out)


def test_a_last_step_of_fewer_micro_batches_is_a_mean_over_what_it_has(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(train_an_epoch, folder, tmp_path / "out", 4, world_size=2)
    losses, norms = torch.load(tmp_path / "out")
    assert len(losses) == 2  # of two micro-batches, then of one

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = make_rows(64, 24)
    parts = [collate(rows[:16]), collate(rows[16:])]
    truth = train_stock(model, lambda step: model(**parts[step]).loss, num_steps=2)
    assert losses == pytest.approx(truth.losses, abs=TOLERANCE)
    assert norms == pytest.approx(truth.grad_norms, abs=TOLERANCE)


def train_in(folder: Path, out: Path, options: dict[str, Any], mixed_precision: MixedPrecision | None) -> None:
    recorder = Recorder()
    strategy = FSDP2Strategy(print_plan=False, mixed_precision=mixed_precision)
    trainer = build_trainer(strategy, callbacks=[recorder], **options)
    task = build_task(folder)
    trainer.fit(task, Rows(64, 4))
    state = next(iter(trainer.optimizers[0].state.values()))
    if trainer.is_global_zero:
        facts = {
            "losses": recorder.result.losses,
            "parameter": next(task.parameters()).dtype,
            "optimizer": state["exp_avg"].dtype,
            "frequencies": next(b.dtype for n, b in task.named_buffers() if n.endswith("inv_freq")),
            "is_fused": trainer.optimizers[0].param_groups[0]["fused"],
        }
        torch.save(facts, out)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "mixed_precision", "stored", "tolerance"),
    [
        ({"precision": "32-true"}, None, torch.float32, 1e-6),
        ({"precision": "bf16-mixed"}, None, torch.float32, 0.02),
        ({"precision": "bf16-true"}, None, torch.bfloat16, 0.03),
        ({}, MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32"), torch.float32, 0.02),
        ({}, MixedPrecision(param_dtype="float16", reduce_dtype="float32"), torch.float32, 0.01),
    ],
    ids=["32-true", "bf16-mixed", "bf16-true", "explicit bf16", "explicit fp16 with loss scaling"],
)
def test_precisions_store_what_they_say_and_follow_the_float32_curve(
    options: dict[str, Any],
    mixed_precision: MixedPrecision | None,
    stored: torch.dtype,
    tolerance: float,
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    truth = train_plainly(folder)
    run_ranks(train_in, folder, tmp_path / "out", options, mixed_precision)
    facts = torch.load(tmp_path / "out")
    assert facts["parameter"] == facts["optimizer"] == stored
    assert facts["frequencies"] == torch.float32
    assert facts["is_fused"] is (mixed_precision is None or mixed_precision.param_dtype != "float16")
    differences = [abs(a - b) for a, b in zip(facts["losses"], truth.losses, strict=True)]
    assert find_largest(differences) <= tolerance
    assert (max(differences) > 1e-6) is (tolerance > 1e-6)  # it did compute in another dtype


class Linear(Task):
    """A task of one layer, to look at its optimizer."""

    def configure_model(self) -> None:
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.weigh_loss(self.layer(batch).square().sum(), torch.tensor(batch.numel()))


class Unsized(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(10, 4))


def fit_linear(task: Task, load: Path | None = None, save: Path | None = None, **options: Any) -> list[float]:
    """Return the learning rate of every step."""
    rates: list[float] = []

    class Read(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", callbacks=[Read()], **quiet, enable_model_summary=False, **options)
    trainer.fit(task, torch.utils.data.DataLoader(torch.ones(10, 4), batch_size=1), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return rates


@pytest.mark.parametrize("accumulate", [1, 2])
def test_values_are_current_after_every_step_and_logged_in_full_once_an_epoch(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, float]] = []
    calls: list[tuple[int, str]] = []

    class Read(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step == len(found):  # a micro-batch without a step
                return
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            assert metrics == {
                "train/learning_rate": pytest.approx(rates[-1]),
                "train/grad_norm": float(module._grad_norm),
                "train/loss": pytest.approx(float(module.step_loss), rel=1e-6),
                "train/samples_seen": trainer.global_step * 4.0 * accumulate,
            }
            found.append(metrics)

        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    class Counted(Linear):
        target_name = "samples"

    log_in_full = _ResultCollection.log

    def log(results: Any, hook: str, name: str, *args: Any, **kwargs: Any) -> None:
        calls.append((trainer.current_epoch, name))
        log_in_full(results, hook, name, *args, **kwargs)

    monkeypatch.setattr(_ResultCollection, "log", log)
    rates: list[float] = []
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[Read()],
        accumulate_grad_batches=accumulate,
        max_epochs=2,
        enable_model_summary=False,
        **quiet,  # type: ignore[arg-type]
    )
    rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(Counted(Optimizer(learning_rate=0.1)), torch.utils.data.DataLoader(rows, batch_size=1))
    names = {name for _, name in calls}
    assert len(names) == 4
    assert len(calls) == len(set(calls))
    assert {(0, name) for name in names} <= set(calls)
    assert len({row["train/loss"] for row in found}) == 20 / accumulate


@pytest.mark.parametrize(
    ("optimizer", "schedule", "changes"),
    [
        (Optimizer(learning_rate=1.0), LRSchedule(), []),
        (
            Optimizer(learning_rate=0.5, weight_decay=0.2),
            LRSchedule(),
            [
                "optimizer.learning_rate was 1.0 in the checkpoint, is 0.5",
                "optimizer.weight_decay was 0.0 in the checkpoint, is 0.2",
            ],
        ),
        (
            Optimizer(learning_rate=1.0, betas=(0.9, 0.95)),
            LRSchedule(),
            ["optimizer.betas was (0.9, 0.999) | (0.9, 0.95)"],
        ),
        (
            Optimizer(learning_rate=1.0),
            LRSchedule(type="cosine"),
            ["lr_scheduler.type was linear | cosine"],
        ),
        (Optimizer(learning_rate=1.0), LRSchedule(warmup_steps=2), ["warm-up steps was 0 | 2"]),
    ],
)
def test_a_resumed_run_takes_its_rates_from_its_configuration_and_says_what_differs(
    optimizer: Optimizer,
    schedule: LRSchedule,
    changes: list[str],
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:
    path = tmp_path / "half.ckpt"
    first = fit_linear(Linear(Optimizer(learning_rate=1.0), LRSchedule()), max_steps=5, save=path)
    assert first == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    rates = fit_linear(Linear(optimizer, schedule), max_steps=10, load=path)
    if schedule == LRSchedule():
        assert rates == pytest.approx([optimizer.learning_rate * factor for factor in (0.5, 0.4, 0.3, 0.2, 0.1)])
    found = sorted(str(w.message) for w in recwarn if str(w.message).startswith("resume: "))
    expected = [*changes, "steps of the run was 5 | 10"]
    assert found == sorted(f"resume: {change.replace('|', 'in the checkpoint, is')} now" for change in expected)


class Seen(Linear):
    """Writes down which rows it is trained on. Its schedule asks for the number of steps, as that of all tasks does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def train_dataloader(self) -> Any:
        rows = [torch.full((4,), float(i)) for i in range(20)]
        return build_train_loader(rows, batch_size=2, collate=torch.stack, trainer=self.trainer)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[:, 0].tolist())
        return super().training_step(batch, batch_idx)


class Resized(Linear):
    """Writes down its learning rates, over rows and batches of any number."""

    def __init__(self, num_rows: int, batch_size: int) -> None:
        super().__init__(Optimizer(learning_rate=1.0), LRSchedule())
        self.num_rows, self.batch_size, self.rates = num_rows, batch_size, list[float]()

    def train_dataloader(self) -> Any:
        rows = [torch.full((4,), float(i)) for i in range(self.num_rows)]
        return build_train_loader(rows, batch_size=self.batch_size, collate=torch.stack, trainer=self.trainer)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    ("saved_at", "num_rows", "batch_size", "last_step"),
    [
        (10, 20, 4, 15),  # after an epoch of 10 steps one of 5
        (4, 20, 4, 12),  # 12 rows of the first epoch are left, and all of the second
        (10, 8, 2, 14),
        (10, 20, 2, 20),
        (2, 20, 2, 20),
    ],
)
def test_a_schedule_ends_with_a_resumed_run_that_has_other_steps_in_an_epoch(
    saved_at: int, num_rows: int, batch_size: int, last_step: int, tmp_path: Path
) -> None:
    def body() -> None:
        path, limits, resumed = (
            tmp_path / "saved.ckpt",
            {"max_epochs": 2, "max_steps": -1},
            Resized(num_rows, batch_size),
        )
        build_trainer(FSDP2Strategy(), callbacks=[SaveInEpoch(path, saved_at)], **limits).fit(Resized(20, 2))
        with warnings.catch_warnings(record=True) as said:
            build_trainer(FSDP2Strategy(), **limits).fit(resumed, ckpt_path=path)
        assert resumed.rates == pytest.approx([1 - step / last_step for step in range(saved_at, last_step)])
        steps = [str(w.message) for w in said if "steps of the run" in str(w.message)]
        assert steps == [f"resume: steps of the run was 20 in the checkpoint, is {last_step} now"] * (last_step != 20)

    run_ranks(body, world_size=1)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("scheduling", [{0: 1, 1: 2}, {0: 3, 1: 1}])
def test_a_schedule_ends_with_a_run_whose_accumulation_changes_and_a_resume_goes_on_in_it(
    scheduling: dict[int, int], tmp_path: Path
) -> None:
    def fit(*callbacks: pl.Callback, path: Path | None = None) -> list[float]:
        module = Resized(20, 2)
        callbacks = (GradientAccumulationScheduler(scheduling), *callbacks)
        build_trainer(FSDP2Strategy(), callbacks=[*callbacks], max_epochs=2, max_steps=-1).fit(module, ckpt_path=path)
        return module.rates

    def body() -> None:
        first, second = (math.ceil(10 / scheduling[epoch]) for epoch in (0, 1))
        saved = [tmp_path / "in the first.ckpt", tmp_path / "in the second.ckpt"]
        rates = fit(SaveInEpoch(saved[0], 2), SaveInEpoch(saved[1], first + 2))
        steps = [*(i // scheduling[0] for i in range(10)), *(first + i // scheduling[1] for i in range(10))]
        assert rates == pytest.approx([1 - step / (first + second) for step in steps])
        for path in saved:
            resumed = fit(path=path)
            assert resumed == pytest.approx(rates[-len(resumed) :])

    run_ranks(body, world_size=1)


class SaveInEpoch(pl.Callback):
    """Saves in the middle of the first epoch, or after it."""

    def __init__(self, path: Path, step: int = 2) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.full
@pytest.mark.parametrize("make_strategy", [DDPStrategy, lambda: FSDP2Strategy(print_plan=False)], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("limit", [{"max_epochs": 2, "max_steps": -1}, {"max_steps": 10}], ids=["epochs", "steps"])
def test_a_resume_in_an_epoch_goes_on_with_its_next_rows(
    make_strategy: Callable[[], Any], limit: dict[str, int], tmp_path: Path
) -> None:
    def body() -> None:
        path, whole, resumed = tmp_path / "saved.ckpt", Seen(), Seen()
        build_trainer(make_strategy(), callbacks=[SaveInEpoch(path)], **limit).fit(whole)
        build_trainer(make_strategy(), **limit).fit(resumed, ckpt_path=path)
        assert len(whole.seen) == 10
        assert resumed.seen == whole.seen[2:]

    run_ranks(body)


def test_a_module_that_logs_in_its_own_way_logs_every_step() -> None:
    names = []

    class Own(Linear):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            names.append(name)

    fit_linear(Own(Optimizer()), max_steps=5)
    assert names.count("train/loss") == 5


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRSchedule(type="constant"), [1.0] * 10),
        (LRSchedule(type="constant", warmup_steps=2), [0.0, 0.5] + [1.0] * 8),
        (LRSchedule(type="linear"), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (LRSchedule(type="linear", warmup_ratio=0.2), [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
    ],
)
def test_schedules_move_the_learning_rate_as_they_say(schedule: LRSchedule, expected: list[float]) -> None:
    rates = fit_linear(Linear(Optimizer(learning_rate=1.0), schedule), max_steps=10)
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("num_warmup_steps", [0, 3])
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("constant_with_warmup", LRSchedule(type="constant")),
        ("linear", LRSchedule(type="linear")),
        ("cosine", LRSchedule(type="cosine")),
        ("cosine_with_min_lr", LRSchedule(type="cosine", min_lr_rate=0.1)),
    ],
)
def test_schedules_are_those_of_transformers(name: str, schedule: LRSchedule, num_warmup_steps: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"min_lr_rate": schedule.min_lr_rate} if schedule.min_lr_rate else {}
    theirs = get_scheduler(name, optimizer, num_warmup_steps, 10, scheduler_specific_kwargs=options).lr_lambdas[0]
    sizes = {"num_warmup_steps": num_warmup_steps, "num_steps": 10}
    assert [schedule.compute_factor(step, **sizes) for step in range(11)] == [theirs(step) for step in range(11)]


def test_a_cosine_does_not_rise_again_after_the_end() -> None:
    schedule = LRSchedule(type="cosine", min_lr_rate=0.1)
    assert schedule.compute_factor(15, num_warmup_steps=0, num_steps=10) == pytest.approx(0.1)


def test_norms_and_biases_are_not_decayed() -> None:
    task = Linear(Optimizer(weight_decay=0.5))
    fit_linear(task, max_steps=1)
    decay = {id(p): g["weight_decay"] for g in task.optimizers().param_groups for p in g["params"]}
    assert {n: decay[id(p)] for n, p in task.layer.named_parameters()} == {
        "0.weight": 0.5,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(lr_scheduler=LRSchedule(warmup_steps=-1)), "warmup_steps -1"),
        (lambda: Linear(lr_scheduler=LRSchedule(warmup_steps=1, warmup_ratio=0.1)), "both set"),
        (lambda: Linear(lr_scheduler=LRSchedule(type="linear", min_lr_rate=0.1)), "not used by type 'linear'"),
        (lambda: Linear(lr_scheduler=LRSchedule(type="cosine", min_lr_rate=2.0)), "expected 0 to 1"),
        (lambda: Linear(Optimizer(learning_rate=0.0)), "expected above 0"),
        (
            lambda: CausalLM(config={"model_type": "llama"}, lr_scheduler=LRSchedule(type="cosin")),
            "^lr_scheduler.type: got 'cosin': expected one of linear, cosine or constant: did you mean cosine",
        ),
    ],
)
def test_contradictions_are_refused_when_the_task_is_built(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_loss_that_is_not_a_number_is_not_left_out_of_the_mean() -> None:
    class Evaluated(Linear):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.update_eval_loss("val", batch.sum(), torch.tensor(batch.numel()))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    rows = torch.tensor([[1.0], [math.nan], [3.0]])
    (found,) = trainer.validate(Evaluated(), torch.utils.data.DataLoader(rows, batch_size=1))
    assert math.isnan(found["val/loss"])
    (found,) = trainer.validate(Evaluated(), torch.utils.data.DataLoader(rows[::2], batch_size=1))
    assert found["val/loss"] == 2


def test_a_task_whose_loss_is_no_cross_entropy_logs_no_perplexity_of_evaluations_either() -> None:
    class Squared(Linear):
        has_perplexity = False

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.update_eval_loss("val", batch.sum(), torch.tensor(batch.numel()))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    (found,) = trainer.validate(Squared(), torch.utils.data.DataLoader(torch.ones(2, 1), batch_size=1))
    assert found == {"val/loss": 1}


class Failing(Linear):
    """Fails where it is told to, once."""

    fails = ""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        super().on_before_backward(loss)
        self.fail("backward")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.update_eval_loss("val", batch.sum(), torch.tensor(batch.numel()))
        self.fail("validation")

    def fail(self, where: str) -> None:
        if self.fails == where:
            self.fails = ""
            raise RuntimeError("out of memory")


def test_a_run_that_failed_leaves_nothing_to_the_next_one_of_the_same_task() -> None:
    norms = []
    for fails in ("", "backward"):
        torch.manual_seed(0)
        task = Failing(Optimizer())
        task.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                fit_linear(task, max_steps=1)
            torch.manual_seed(0)
        fit_linear(task, max_steps=1)
        assert task.targets_seen == 4
        norms.append(float(task.get_grad_norm()))
    assert norms[0] == norms[1]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    rows = torch.utils.data.DataLoader(torch.tensor([[1.0], [2.0], [3.0]]), batch_size=1)
    task.fails = "validation"
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.validate(task, rows)
    (found,) = trainer.validate(task, rows)
    assert found["val/loss"] == 2


def test_a_schedule_without_an_end_is_refused_unless_it_is_constant() -> None:
    with pytest.raises(ValueError, match="no end"):
        fit_linear(Linear(lr_scheduler=LRSchedule(type="linear")), max_steps=-1, max_epochs=-1, max_time="00:00:00:01")
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    rows = torch.utils.data.DataLoader(Unsized(), batch_size=1)
    with pytest.raises(ValueError, match="max_epochs where the data has a length"):
        trainer.fit(Linear(lr_scheduler=LRSchedule(type="linear")), rows)


def test_fused_adamw_with_float16_gradients_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)

    def body() -> None:
        strategy = FSDP2Strategy(print_plan=False, mixed_precision=MixedPrecision(param_dtype="float16"))
        task = CausalLM(pretrained=str(folder), optimizer=Optimizer(fused=True))
        with pytest.raises(ValueError, match="float16 gradients overflow"):
            build_trainer(strategy).fit(task, Rows(64, 8))

    run_ranks(body, world_size=1)
