"""A moving average of sharded weights is that of one device, and lives on in checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from lightning.pytorch.callbacks import BackboneFinetuning
from models import to_full
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import EVEN, GLOBAL_BATCH, TIED, UNEVEN, Rows, build_task, build_trainer, gather_weights, save_model

from lit_fsdp import CPUOffload, FSDP2Strategy
from lit_fsdp.callbacks import EMA
from lit_fsdp.callbacks import ema as ema_module
from lit_fsdp.profiling.memory_trace import MemoryTrace
from ranks import run_ranks

DECAY = 0.8


class Keep(pl.Callback):
    """Keeps the weights after every step, and those that are validated."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.validated: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.steps.append(copy(module))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.steps) - 1:
            self.steps.append(copy(module))

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.validated = copy(module)


def copy(module: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in gather_weights(module).items()}


class Both(Rows):
    """Validates on what it trains on."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def fit(folder: Path, out: Path, sizes: dict[str, Any], steps: int, resume: str | None, accumulate: int) -> None:
    keep, ema = Keep(), EMA(decay=DECAY, warmup=False)
    options: dict[str, Any] = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "accumulate_grad_batches": accumulate}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[ema, keep], max_steps=steps, **options)
    task = build_task(folder)
    data = Both(sizes["vocab_size"], GLOBAL_BATCH // dist.get_world_size() // accumulate)
    trainer.fit(task, data, ckpt_path=resume)
    trainer.save_checkpoint(out / f"{steps}.ckpt")
    if trainer.is_global_zero:
        torch.save((keep.steps, keep.validated), out / "kept.pt")


def average(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The truth, from the weights after every step."""
    found = {name: value.clone() for name, value in steps[0].items()}
    for weights in steps[1:]:
        for name, value in weights.items():
            found[name] = DECAY * found[name] + (1 - DECAY) * value
    return found


def load(folder: Path, out: Path, checkpoint: Path) -> None:
    """Validate the checkpoint in a run without the callback."""
    keep = Keep()
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[keep], limit_val_batches=1)
    task = build_task(folder)
    trainer.validate(task, Both(64, 2), ckpt_path=str(checkpoint), verbose=False)
    if trainer.is_global_zero:
        torch.save(keep.validated, out / "validated.pt")


def find_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return find_largest(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "accumulate"), [(EVEN, 1), (UNEVEN, 2)])
def test_the_average_is_that_of_the_weights_after_each_step(
    sizes: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **sizes)
    run_ranks(fit, folder, tmp_path, sizes, 8, None, accumulate)
    steps, validated = torch.load(tmp_path / "kept.pt")
    assert len(steps) == 9
    assert find_difference(validated, average(steps)) < 1e-6
    assert find_difference(steps[-1], average(steps)) > 1e-4


@pytest.mark.full
def test_a_run_that_is_resumed_on_other_ranks_goes_on_with_weights_and_average(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(fit, folder, tmp_path, EVEN, 8, None, 1)
    whole, validated = torch.load(tmp_path / "kept.pt")
    run_ranks(fit, folder, tmp_path, EVEN, 4, None, 1)
    first, _ = torch.load(tmp_path / "kept.pt")
    run_ranks(load, folder, tmp_path, tmp_path / "4.ckpt")  # without the callback, it is the average that is there
    assert find_difference(torch.load(tmp_path / "validated.pt"), average(first)) < 1e-6
    run_ranks(fit, folder, tmp_path, EVEN, 8, str(tmp_path / "4.ckpt"), 1, world_size=1)
    rest, again = torch.load(tmp_path / "kept.pt")
    assert find_difference(rest[0], first[-1]) < 1e-7
    assert find_difference(rest[-1], whole[-1]) < 1e-6
    assert find_difference(again, validated) < 1e-6


class WithBackbone(pl.LightningModule):
    """Trains its head first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
        self.head = nn.Linear(5, 1)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = (self.head(self.backbone(batch)) - batch.sum(1, keepdim=True)).square().mean()
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.05, eps=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=4 // dist.get_world_size())

    val_dataloader = train_dataloader


def unfreeze(out: Path, epochs: int, resume: str | None, strategy: dict[str, Any]) -> None:
    keep, ema = Keep(), EMA(decay=DECAY, warmup=False)
    callbacks = [ema, BackboneFinetuning(1, verbose=False), keep]
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": epochs, "use_distributed_sampler": True}
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), callbacks=callbacks, **options)
    trainer.fit(WithBackbone(), ckpt_path=resume)
    trainer.save_checkpoint(out / f"{epochs}.ckpt")
    if trainer.is_global_zero:
        torch.save((keep.steps, keep.validated), out / "kept.pt")


class WithAll(WithBackbone):
    """Its optimizer has what is frozen, too."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-4)


class UnfreezeInValidation(pl.Callback):
    """Unfreezes on a metric, as it were: while the average is shown."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        module.backbone.requires_grad_(requires_grad=True)


def test_weights_that_are_unfrozen_while_the_average_is_shown_join(tmp_path: Path) -> None:
    def body() -> None:
        module, ema, keep = WithAll(), EMA(decay=DECAY, warmup=False), Keep()
        module.backbone.requires_grad_(requires_grad=False)
        options: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "use_distributed_sampler": True}
        callbacks = [UnfreezeInValidation(), ema, keep]
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=callbacks, **options)
        trainer.fit(module)
        if trainer.is_global_zero:
            torch.save((keep.steps, keep.validated), tmp_path / "kept.pt")

    run_ranks(body)
    steps, validated = torch.load(tmp_path / "kept.pt")
    assert not torch.equal(steps[-1]["backbone.0.weight"], steps[0]["backbone.0.weight"])
    assert find_difference(validated, average(steps)) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [{}, pytest.param({"cpu_offload": CPUOffload(overlap_optimizer=True)}, id="overlapped")],
)
def test_weights_that_are_unfrozen_join_and_a_resume_on_other_ranks_goes_on_with_both(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(unfreeze, tmp_path, 4, None, strategy)
    steps, validated = torch.load(tmp_path / "kept.pt")
    name = "backbone.0.weight"
    assert torch.equal(steps[3][name], steps[0][name])
    assert not torch.equal(steps[4][name], steps[0][name])
    assert find_difference(validated, average(steps)) < 1e-6
    assert find_difference(validated, steps[-1]) > 1e-3
    run_ranks(unfreeze, tmp_path, 2, None, strategy)
    run_ranks(unfreeze, tmp_path, 4, str(tmp_path / "2.ckpt"), strategy, world_size=1)
    rest, again = torch.load(tmp_path / "kept.pt")
    assert find_difference(rest[0], steps[6]) < 1e-6
    assert find_difference(rest[-1], steps[-1]) < 1e-6
    assert find_difference(again, validated) < 1e-6


class Compiled(WithBackbone):
    """Has what ``torch.compile`` has made of a part, in its place or beside it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, torch.compile(self.backbone, backend="eager"))


def fit_compiled(out: Path, name: str, epochs: int, resume: str | None) -> None:
    keep, ema = Keep(), EMA(decay=DECAY, warmup=False)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": epochs, "use_distributed_sampler": True}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[ema, keep], **options)
    trainer.fit(Compiled(name), ckpt_path=resume)
    trainer.save_checkpoint(out / f"{epochs}.ckpt")
    alone = Keep()
    tester = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[alone], use_distributed_sampler=True)
    tester.validate(Compiled(name), ckpt_path=out / f"{epochs}.ckpt", verbose=False)
    if trainer.is_global_zero:
        torch.save((keep.steps, keep.validated, alone.validated), out / "kept.pt")


@pytest.mark.full
@pytest.mark.parametrize("name", ["backbone", "fast"])
def test_a_checkpoint_of_compiled_parts_holds_their_average(name: str, tmp_path: Path) -> None:
    run_ranks(fit_compiled, tmp_path, name, 3, None)
    steps, validated, saved = torch.load(tmp_path / "kept.pt")
    assert find_difference(validated, average(steps)) < 1e-6
    assert find_difference(saved, validated) == 0.0
    run_ranks(fit_compiled, tmp_path, name, 1, None)
    run_ranks(fit_compiled, tmp_path, name, 3, str(tmp_path / "1.ckpt"), world_size=1)
    rest, again, _ = torch.load(tmp_path / "kept.pt")
    assert find_difference(rest[-1], steps[-1]) < 1e-6
    assert find_difference(again, validated) < 1e-6


class Averages(pl.Callback):
    """Keeps the average that training begins and ends with, and the weights."""

    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.found: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        whole = {name: to_full(average).clone() for name, average in self.ema._averages.items()}
        self.found += [whole, copy(module)]

    on_train_end = on_train_start


def keep_averages(folder: Path, out: Path, steps: int, resume: str | None) -> None:
    ema = EMA(decay=0.99)
    keep = Averages(ema)
    options: dict[str, Any] = {"precision": "bf16-true", "limit_val_batches": 0}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[ema, keep], max_steps=steps, **options)
    trainer.fit(build_task(folder), Both(EVEN["vocab_size"], GLOBAL_BATCH // dist.get_world_size()), ckpt_path=resume)
    trainer.save_checkpoint(out / f"{steps}.ckpt")
    if trainer.is_global_zero:
        torch.save(keep.found, out / "averages.pt")


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 1])
def test_the_average_of_weights_in_low_precision_is_resumed_exactly_on_any_number_of_ranks(
    world_size: int, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(keep_averages, folder, tmp_path, 4, None)
    *_, average, weights = torch.load(tmp_path / "averages.pt")
    run_ranks(keep_averages, folder, tmp_path, 5, str(tmp_path / "4.ckpt"), world_size=world_size)
    resumed, started, *_ = torch.load(tmp_path / "averages.pt")
    assert all(value.dtype == torch.float32 for value in average.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in average.values())
    assert find_difference(resumed, average) == 0
    assert find_difference(started, weights) == 0


class Preempted(pl.Callback):
    """Saves while the average is validated, as before a preemption."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


class Seen(Keep):
    """Keeps the weights that are tested."""

    def on_test_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.validated = copy(module)


class All(Both):
    """Tests on the same."""

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


def preempt(folder: Path, out: Path, sizes: dict[str, Any]) -> None:
    def run(steps: int, *more: pl.Callback, **options: Any) -> tuple[Any, Any, Seen]:
        keep, ema = Seen(), EMA(decay=DECAY, warmup=False)
        options = {"limit_val_batches": 1, "limit_test_batches": 1, "num_sanity_val_steps": 0, **options}
        trainer = build_trainer(
            FSDP2Strategy(print_plan=False), callbacks=[ema, keep, *more], max_steps=steps, **options
        )
        task = build_task(folder)
        return trainer, task, keep

    data = All(sizes["vocab_size"], GLOBAL_BATCH)
    trainer, task, keep = run(8, Preempted(out / "in_validation.ckpt"))
    trainer.fit(task, data)
    truth = average(keep.steps)
    for path in (None, str(out / "in_validation.ckpt")):  # tests of the same trainer have the average
        trainer.test(task, data, ckpt_path=path, verbose=False)
        assert find_difference(keep.validated, truth) < 1e-6
    again, other, resumed = run(9)
    again.fit(other, data, ckpt_path=str(out / "in_validation.ckpt"))
    assert find_difference(resumed.steps[0], keep.steps[-1]) < 1e-7
    fresh, third, seen = run(9)
    fresh.test(third, data, ckpt_path=str(out / "in_validation.ckpt"), verbose=False)
    assert find_difference(seen.validated, truth) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("sizes", [EVEN, TIED], ids=["untied", "tied"])
def test_a_checkpoint_of_a_validation_and_tests_after_a_fit_have_the_right_weights(
    sizes: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(preempt, save_model(tmp_path / "model", **sizes), tmp_path, sizes, world_size=1)


class Wide(pl.LightningModule):
    """Large enough to be more than what describes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 512), nn.Linear(512, 256)
        self.first.weight.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.first(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(8, 256), batch_size=4)  # type: ignore[arg-type]


class Other(Wide):
    """Keeps the weights that are tested."""

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = to_full(self.last.weight).clone()

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


def train_one_test_another(folder: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[EMA()], gradient_clip_val=None, max_steps=1)
    trainer.fit(Wide())
    other = Other()
    own = other.last.weight.detach().clone()
    trainer.test(other, verbose=False)
    assert torch.equal(other.seen, own)


@pytest.mark.full
def test_a_module_that_was_not_trained_is_tested_with_its_own_weights(tmp_path: Path) -> None:
    run_ranks(train_one_test_another, tmp_path, world_size=1)


def save_weights_alone(folder: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[EMA()], gradient_clip_val=None, max_steps=1)
    trainer.fit(Wide())
    with pytest.raises(ValueError, match=r"weights_only: got true: .* not what EMA makes of them; leave it out"):
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    assert not (folder / "weights.ckpt").exists()


@pytest.mark.full
def test_weights_are_not_saved_without_their_average(tmp_path: Path) -> None:
    run_ranks(save_weights_alone, tmp_path, world_size=1)


def measure(folder: Path, precision: str) -> None:
    """Compare what a checkpoint was said to take with what it takes."""
    strategy = FSDP2Strategy(print_plan=False)
    saving = pl.callbacks.ModelCheckpoint(folder / precision, every_n_train_steps=1)
    options: dict[str, Any] = {"enable_checkpointing": True, "precision": precision, "max_steps": 1}
    trainer = build_trainer(strategy, callbacks=[EMA(), saving], gradient_clip_val=None, **options)
    trainer.fit(Wide())
    if trainer.is_global_zero:
        written = sum(file.stat().st_size for file in (folder / precision).rglob("*.distcp"))
        assert strategy.disk_space is not None
        assert strategy.disk_space.checkpoint_bytes == pytest.approx(written, rel=0.04)


def test_weights_are_overwritten_once_the_gpu_has_fetched_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(1, 1, bias=False)
    seen: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: seen.append(module.weight.item()))
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    trainer: Any = SimpleNamespace(strategy=strategy, sanity_checking=False)
    ema: Any = EMA()
    nn.init.constant_(module.weight, 2.0)
    ema._follow(module)  # the average
    nn.init.constant_(module.weight, 3.0)
    for start, end in ((ema.on_validation_start, ema.on_validation_end), (ema.on_predict_start, ema.on_predict_end)):
        start(trainer, module)
        end(trainer, module)
    assert seen == [3.0, 2.0, 3.0, 2.0]
    ema.on_test_start(trainer, module)
    ema.on_exception(trainer, module, RuntimeError())  # of a GPU that may answer no more
    assert len(seen) == 5
    assert module.weight.item() == 3.0


def test_what_a_checkpoint_takes_is_known_before_the_first_step(tmp_path: Path) -> None:
    for precision in ("32-true", "bf16-true"):
        run_ranks(measure, tmp_path, precision)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decay: got 1: expected above 0, below 1"):
        EMA(decay=1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"EMA: got SingleDeviceStrategy: it needs FSDP2Strategy"):
        EMA().setup(trainer, pl.LightningModule(), "fit")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_takes_no_copy_of_all_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = (ema_module.PART * 2 + 7, 5, 3 * 1000, 0)
    module = nn.ParameterList(torch.randn(size).to(dtype) for size in sizes)
    ema = EMA(decay=DECAY, warmup=False)
    ema._averages = {name: torch.randn(p.numel()) for name, p in module.named_parameters()}
    weights: Any = [p.detach().float() for p in module]
    expected = [a.clone() for a in ema._averages.values()]
    torch._foreach_lerp_(expected, weights, 1 - DECAY)
    with MemoryTrace(module, [], plan=(), device=torch.device("cpu")) as trace:
        trace.add_inputs(ema._averages)
        trace.begin_phase("optimizer")
        ema.on_step_end(None, module)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(ema._averages.values(), expected, strict=True))
    held = sum(t.numel() * t.element_size() for t in (*module, *expected))
    assert trace.finish().peak.num_bytes - held <= 4 * ema_module.PART * (dtype == torch.bfloat16)
