"""A bad step is found, named and, if asked for, left out on all ranks as if its batch had never been."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from memory_faults import Fault, Faults
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import EVEN, GLOBAL_BATCH, Rows, build_trainer, collate, make_rows, save_model

from lit_fsdp import ActivationCheckpointing, FSDP2Strategy
from lit_fsdp.callbacks import StabilityMonitor, UnstableTrainingError
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.reporting.sections import HasSection
from lit_fsdp.tasks import CausalLM, LRSchedule
from lit_fsdp.tasks.loading import build_train_loader
from ranks import RankError, run_ranks

BAD_STEP, BAD_RANK = 3, 1
NUM_ROWS = 8 * GLOBAL_BATCH


class Order(Rows):
    """The rows of ``Rows`` in a chosen order."""

    def __init__(self, batch_size: int, order: list[int]) -> None:
        super().__init__(64, batch_size)
        self.order = order

    def train_dataloader(self) -> DataLoader[Any]:
        rows = make_rows(64, NUM_ROWS)
        chosen = [rows[i] for i in self.order]
        return build_train_loader(
            chosen, batch_size=self.batch_size, collate=collate, shuffle=False, trainer=self.trainer
        )


class Breaker(Callback):
    """Puts something into what one module computes, in one step, on one rank."""

    def __init__(self, module: str, value: float = math.nan, *, step: int = BAD_STEP, phase: str = "forward") -> None:
        self.module, self.value, self.step, self.phase = module, value, step, phase

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def change(_module: nn.Module, _args: Any, output: Any) -> Any:
            if trainer.global_step + 1 != self.step or not self.is_on or dist.get_rank() != BAD_RANK:
                return None
            if self.phase == "forward":
                return output * self.value
            output.register_hook(lambda grad: grad * self.value)
            return None

        self.is_on = False
        pl_module.get_submodule(self.module).register_forward_hook(change)

    def on_train_batch_start(self, *_: Any) -> None:
        self.is_on = True


class Keeper(Callback):
    """Keeps weights and optimizer state after each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.step = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        state: dict[str, Any] = {n: p.to_local().clone() for n, p in pl_module.named_parameters()}  # type: ignore[attr-defined]
        for i, values in trainer.optimizers[0].state_dict()["state"].items():
            state |= {f"{i}.{k}": _copy(v) for k, v in values.items()}
        self.states.append(state)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return getattr(value, "to_local", lambda: value)().clone()


def differ(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    return [n for n in a if not (torch.equal(a[n], b[n]) if isinstance(a[n], Tensor) else a[n] == b[n])]


def fit(
    folder: Path,
    callbacks: list[Any],
    *,
    order: list[int] | None = None,
    data: type[Order] = Order,
    accumulate: int = 1,
    optimizer: str = "adamw",
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[CausalLM, Trainer]:
    settings = {"accumulate_grad_batches": accumulate, "max_steps": 5, "log_every_n_steps": 1, **options}
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy or {}), callbacks=callbacks, **settings)
    task = CausalLM(
        pretrained=str(folder),
        optimizer=Optimizer(name=optimizer, learning_rate=1e-3, weight_decay=0.1),  # type: ignore[arg-type]
        lr_scheduler=LRSchedule(type="constant"),
    )
    batch_size = GLOBAL_BATCH // dist.get_world_size() // accumulate
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(task, data(batch_size, order or list(range(NUM_ROWS))), ckpt_path=ckpt_path)
        finally:
            trainer.said = [str(w.message) for w in caught if "step " in str(w.message)]  # type: ignore[attr-defined]
    return task, trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), **EVEN)


def skip_as_if_it_had_not_been(folder: Path, optimizer: str, accumulate: int) -> None:
    monitor, kept, truth = StabilityMonitor(policy="skip"), Keeper(), Keeper()
    breaker = Breaker("model.model.layers.1.mlp.up_proj")
    _, trainer = fit(folder, [monitor, breaker, kept], optimizer=optimizer, accumulate=accumulate)
    begin = (BAD_STEP - 1) * GLOBAL_BATCH
    order = [i for i in range(NUM_ROWS) if not begin <= i < begin + GLOBAL_BATCH]
    fit(folder, [truth], optimizer=optimizer, accumulate=accumulate, order=order, max_steps=4)
    assert len(kept.states) == 5
    assert differ(kept.states[BAD_STEP - 1], kept.states[BAD_STEP - 2]) == []
    for mine, other in zip(kept.states[BAD_STEP:], truth.states[BAD_STEP - 1 :], strict=True):
        assert differ(mine, other) == []
    assert differ(kept.states[-1], kept.states[0])
    (event,) = monitor.state_dict()["events"]
    assert (event["step"], event["kind"], event["ranks"]) == (BAD_STEP, "nonfinite_loss", [BAD_RANK])
    per_rank = GLOBAL_BATCH // 2 // accumulate
    samples = [begin + k * 2 * per_rank + per_rank + i for k in range(accumulate) for i in range(per_rank)]
    assert event["samples"] == {str(BAD_RANK): samples}
    assert (event["unit"], event["phase"]) == ("model.model.layers.1", "forward")
    if dist.get_rank() == 0:
        (said,) = trainer.said  # type: ignore[attr-defined]
        named = f"rank 1, samples {', '.join(map(str, samples))}; first in model.model.layers.1, forward; skipped"
        assert said == f"step 3: the loss is not finite (nan); {named}"
    assert monitor.state_dict()["counts"] == {"nonfinite_loss": 1, "skipped_steps": 1}


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("optimizer", "accumulate"), [("adamw", 1), ("adamw", 2), ("adafactor", 1), ("adamw_8bit", 1), ("muon", 1)]
)
def test_a_skipped_step_changes_no_bit_of_weights_and_optimizer(folder: Path, optimizer: str, accumulate: int) -> None:
    run_ranks(skip_as_if_it_had_not_been, folder, optimizer, accumulate)


def bad_gradient(folder: Path, recompute: bool) -> None:
    monitor = StabilityMonitor(policy="skip")
    breaker = Breaker("model.model.layers.1.mlp.up_proj", math.inf, phase="backward")
    strategy = {"activation_checkpointing": ActivationCheckpointing(mode="full")} if recompute else {}
    task, _ = fit(folder, [breaker, monitor], strategy=strategy)
    (event,) = monitor.state_dict()["events"]
    assert (event["kind"], event["ranks"], event["step"]) == ("nonfinite_grad", [], BAD_STEP)
    # It goes on into the blocks before it; those after it are good.
    assert (event["unit"], event["phase"]) == ("model.model.layers.1", "backward")
    assert set(event["samples"]) == {"0", "1"}
    assert all(p.isfinite().all() for p in task.parameters())


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_a_bad_gradient_names_the_unit_that_backward_met_first(folder: Path, recompute: bool) -> None:
    run_ranks(bad_gradient, folder, recompute)


def loss_spike(folder: Path) -> None:
    # What comes last is what the loss is computed of: confident and wrong.
    breaker = Breaker("model.lm_head", 80.0, step=5)
    monitor = StabilityMonitor(policy="skip", window=6)
    fit(folder, [breaker, monitor], max_steps=6)
    (event,) = monitor.state_dict()["events"]
    assert (event["step"], event["kind"], event["ranks"], event["unit"]) == (5, "loss_spike", [BAD_RANK], None)
    assert event["loss"] > event["limit"] > 3
    section = monitor.make_section()
    assert isinstance(monitor, HasSection)
    assert section is not None
    assert section.numbers["loss_spike"] == section.numbers["skipped_steps"] == 1
    assert section.tables[0].rows[0][:2] == ("5", "a spike of the loss")
    quiet = StabilityMonitor(policy="skip", window=6, loss_sigmas=None, grad_norm_sigmas=None)
    fit(folder, [breaker, quiet], max_steps=6)
    assert quiet.state_dict()["events"] == []


@pytest.mark.full
def test_a_spike_of_the_loss_names_the_rank_with_the_largest(folder: Path) -> None:
    run_ranks(loss_spike, folder)


def stop(folder: Path, tmp_path: Path) -> None:
    kept, truth = Keeper(), Keeper()
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=BAD_STEP)
    with pytest.raises(UnstableTrainingError, match=r"step 3: the loss is not finite; .*unstable-step=3.ckpt"):
        fit(folder, [StabilityMonitor(policy="stop"), Breaker("model.model.layers.0.mlp"), kept, checkpoint], **options)
    assert len(kept.states) == 3
    assert differ(kept.states[2], kept.states[1]) == []
    found = list(tmp_path.rglob("*.ckpt"))
    # ModelCheckpoint does not save the same step once more.
    assert found == [tmp_path / "kept" / f"unstable-step={BAD_STEP}.ckpt"]
    monitor, resumed = StabilityMonitor(policy="stop"), Keeper()
    resumed.step = 3
    fit(folder, [monitor, resumed], ckpt_path=str(found[0]))
    assert monitor.state_dict()["counts"] == {"nonfinite_loss": 1, "skipped_steps": 1}
    assert len(monitor.state_dict()["loss"]) == 4  # two before it, two after it
    begin = (BAD_STEP - 1) * GLOBAL_BATCH
    order = [i for i in range(NUM_ROWS) if not begin <= i < begin + GLOBAL_BATCH]
    fit(folder, [truth], order=order, max_steps=4)
    assert differ(resumed.states[-1], truth.states[-1]) == []


@pytest.mark.full
def test_stop_ends_the_run_with_the_weights_before_saved_and_a_resume_goes_on_after_the_batch(
    folder: Path, tmp_path: Path
) -> None:
    run_ranks(stop, folder, tmp_path)


def stop_at_the_last_step(folder: Path) -> None:
    fit(folder, [StabilityMonitor(policy="stop"), Breaker("model.model.layers.0", step=5)])


@pytest.mark.full
def test_stop_at_the_last_step_fails_the_run_too(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankError, match="UnstableTrainingError: step 5"):
        run_ranks(stop_at_the_last_step, folder)


@pytest.mark.full
def test_a_stop_on_a_full_disk_does_not_say_that_weights_are_saved(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_fsdp.checkpoint.writer.measure_free", lambda _: 0)
    with pytest.raises(RankError, match="step 5: the loss is not finite; weights of before could not be saved"):
        run_ranks(stop_at_the_last_step, folder)


def warn(folder: Path) -> None:
    monitor = StabilityMonitor()
    task, trainer = fit(folder, [monitor, Breaker("model.model.layers.1.self_attn.o_proj")], max_steps=6)
    # From then on the weights are broken: counted, but told once.
    assert monitor.state_dict()["counts"] == {"nonfinite_loss": 4}
    assert [event["step"] for event in monitor.state_dict()["events"]] == [BAD_STEP]
    assert monitor.state_dict()["events"][0]["unit"] == "model.model.layers.1"
    assert monitor.state_dict()["events"][0]["samples"] == {"1": [20, 21, 22, 23]}
    assert any(p.isnan().any() for p in task.parameters())
    if dist.get_rank() == 0:
        assert len(trainer.said) == 1  # type: ignore[attr-defined]


def test_warn_reports_the_first_bad_step_and_changes_nothing(folder: Path) -> None:
    run_ranks(warn, folder)


def learn_nothing(folder: Path, policy: Any) -> None:
    class Silent(Order):
        def train_dataloader(self) -> DataLoader[Any]:
            loader = super().train_dataloader()
            begin = (BAD_STEP - 1) * GLOBAL_BATCH
            for row in loader.dataset[begin : begin + GLOBAL_BATCH]:  # type: ignore[index]
                row["labels"].fill_(-100)
            return loader

    monitor, kept = StabilityMonitor(policy=policy, max_skips=1), Keeper()
    breaker = [Breaker("model.lm_head", step=BAD_STEP + 1)] if policy == "warn" else []
    _, trainer = fit(folder, [monitor, kept, *breaker], data=Silent, max_steps=4)
    event, *more = monitor.state_dict()["events"]
    assert [one["kind"] for one in more] == ["nonfinite_loss"] * len(breaker)  # what follows is told for itself
    assert (event["step"], event["kind"], event["ranks"]) == (BAD_STEP, "no_targets", [])
    assert event["samples"] == {"0": [16, 17, 18, 19], "1": [20, 21, 22, 23]}
    assert len(monitor.state_dict()["loss"]) == 3 - len(breaker)
    assert (differ(kept.states[2], kept.states[1]) == []) == (policy != "warn")  # else weights decay
    if dist.get_rank() == 0:
        line = trainer.said[0]  # type: ignore[attr-defined]
        done = "" if policy == "warn" else "; skipped"
        what = "step 3: loss and gradient are 0: no row has a target to learn; samples 16, 17, 18, 19 (rank 0); 20, 21"
        assert line.startswith(what)
        assert line.endswith(f"(rank 1){done}")


@pytest.mark.parametrize("policy", ["warn", *(pytest.param(one, marks=pytest.mark.full) for one in ("skip", "stop"))])
def test_a_step_without_targets_is_told_and_ends_no_run(folder: Path, policy: str) -> None:
    run_ranks(learn_nothing, folder, policy)


def skip_too_often(folder: Path, tmp_path: Path) -> None:
    class Always(Breaker):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            self.is_on, self.step = True, max(trainer.global_step + 1, 2)

    with pytest.raises(UnstableTrainingError, match=r"step 4: .* the last of 3 bad steps in a row \(max_skips\)"):
        fit(
            folder,
            [StabilityMonitor(policy="skip", max_skips=3), Always("model.lm_head")],
            default_root_dir=tmp_path,
            max_steps=8,
        )


def test_too_many_skips_in_a_row_end_the_run(folder: Path, tmp_path: Path) -> None:
    run_ranks(skip_too_often, folder, tmp_path)


class Plain(LightningModule):
    """A module of somebody else: no loss of the step, no norm, no samples."""

    bad_step: int | None = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss = batch.square().mean()
        is_bad = self.global_step == self.bad_step and self.trainer.global_rank == self.trainer.world_size - 1
        return loss * math.nan if is_bad else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit_plain(strategy: str) -> None:
    torch.manual_seed(0)
    monitor = StabilityMonitor(policy="skip")
    chosen = FSDP2Strategy(print_plan=False) if strategy == "fsdp2" else strategy
    trainer = build_trainer(chosen, callbacks=[monitor], max_steps=5, gradient_clip_val=None)
    task = Plain()
    trainer.fit(task, DataLoader(torch.randn(20, 4), batch_size=2))
    (event,) = monitor.state_dict()["events"]
    assert (event["step"], event["ranks"], event["samples"]) == (3, [BAD_RANK], {"1": None})
    assert event["phase"] == "loss"
    assert all(p.isfinite().all() for p in task.parameters())
    step = trainer.optimizers[0].state_dict()["state"][0]["step"]
    assert int(step) == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_any_module_under_any_strategy_is_watched(strategy: str) -> None:
    run_ranks(fit_plain, strategy)


def redo_a_step(policy: str) -> None:
    found = []
    for faults in ([], [Fault(rank=0, phase="end", step=2, micro_batch=1)]):
        torch.manual_seed(0)
        monitor = StabilityMonitor(policy=policy, window=4)  # type: ignore[arg-type]
        strategy = FSDP2Strategy(print_plan=False, oom_retries=1)
        trainer = build_trainer(
            strategy,
            callbacks=[monitor, Faults(faults)],
            max_steps=4,
            gradient_clip_val=None,
            accumulate_grad_batches=2,
        )
        task = Plain()
        task.bad_step = None
        trainer.fit(task, DataLoader(torch.randn(32, 4), batch_size=2))
        found.append(monitor.state_dict())
    assert found[0]["events"] == []
    assert found[0] == found[1]


@pytest.mark.full(after=1)
@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_a_step_that_is_redone_counts_once(policy: str) -> None:
    run_ranks(redo_a_step, policy)


def test_one_device_needs_no_process_group_and_a_second_fit_begins_anew(tmp_path: Path) -> None:
    monitor = StabilityMonitor()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for max_steps, expected in ((4, {"nonfinite_loss": 2}), (2, {})):
        trainer = Trainer(accelerator="cpu", callbacks=[monitor], max_steps=max_steps, **quiet)
        trainer.fit(Plain(), DataLoader(torch.randn(8, 4), batch_size=2))
        assert monitor.state_dict()["counts"] == expected
    section = monitor.make_section()
    assert section is not None
    assert section.notes == ["no step was bad"]


def test_gradients_by_which_a_scaler_finds_its_scale_are_not_bad_but_a_loss_is() -> None:
    found, scales = [], []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**100)):
        torch.manual_seed(0)
        monitor = StabilityMonitor(policy="skip")
        precision = MixedPrecision("bf16-mixed" if scaler is None else "16-mixed", "cpu", scaler)
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", plugins=[precision], callbacks=[monitor], max_steps=4, **quiet)
        trainer.fit(Plain(), DataLoader(torch.randn(8, 4), batch_size=2))
        found.append(monitor.state_dict())
        scales.append(scaler and scaler.get_scale())
    assert [state["counts"] for state in found] == [{"nonfinite_loss": 1, "skipped_steps": 1}] * 2
    assert scales[1] == 2.0**96  # of four steps, none of which changed a weight
    assert found[1]["loss"][0] == pytest.approx(found[0]["loss"][0], rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "ignore"}, "policy: got 'ignore': expected warn, skip or stop"),
        ({"loss_sigmas": 0.0}, "loss_sigmas: got 0.0: expected above 0"),
        ({"grad_norm_sigmas": -1.0}, "grad_norm_sigmas: got -1.0: expected above 0"),
        ({"window": 1}, "window: got 1: expected 4 or more"),
        ({"max_skips": 0}, "max_skips: got 0: expected 1 or more"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StabilityMonitor(**options)
