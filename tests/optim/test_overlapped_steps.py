"""Steps of an optimizer beside forward and backward: the same bits as one step after the other."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from adapter_training import LORA
from adapter_training import SIZES as WIDE
from stand_in_gpu import run_as_gpus
from torch import Tensor
from training import EVEN, TIED, UNEVEN, Recorder, Rows, build_task, build_trainer, gather_weights, save_model

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Sharding
from lit_fsdp.callbacks import EMA, StabilityMonitor
from lit_fsdp.optim.overlapped_steps import OverlappedSteps
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.torch_internals import to_local
from lit_fsdp.tasks import CausalLM, LRSchedule, Optimizer
from ranks import RankError, run_ranks

NUM_STEPS, NUM_BLOCKS = 6, 3
OVERLAPPED = {"cpu_offload": CPUOffload(overlap_optimizer=True)}
RECOMPUTED = {"activation_checkpointing": ActivationCheckpointing(mode="full")}
WARMUP = {"lr_scheduler": LRSchedule(type="cosine", warmup_steps=3)}
GPU = {"accelerator": "gpu"}


class SpoiledRows(Rows):
    """A batch in which one loss is not a number, on one rank."""

    def on_before_batch_transfer(self, batch: dict[str, Tensor], _: int) -> dict[str, Tensor]:
        assert self.trainer is not None
        is_bad = self.trainer.global_step == 2 and self.trainer.is_global_zero
        return {**batch, "spoiled": torch.tensor(is_bad)}


class SpoiledLoss(CausalLM):
    reads_weights = False

    def training_step(self, batch: dict[str, Tensor], *args: Any) -> Tensor:
        loss = super().training_step({n: t for n, t in batch.items() if n != "spoiled"}, *args)
        return loss * torch.nan if batch["spoiled"] else loss  # type: ignore[operator]


# Model, ranks, settings of the strategy, the Trainer, the task.
RUNS: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "1 rank": (EVEN, 1, {}, {}, WARMUP),
    "never clipped, loss in chunks": (UNEVEN, 2, RECOMPUTED, {"gradient_clip_val": None}, {"loss_chunks": 3}),
    "tied, always clipped": (TIED, 2, {}, {"gradient_clip_val": 1e-3}, WARMUP),
    "by value": (EVEN, 2, {}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, {}),
    "accumulated": (EVEN, 2, {}, {"accumulate_grad_batches": 4}, WARMUP),
    "accumulated, 1 rank": (TIED, 1, RECOMPUTED, {"accumulate_grad_batches": 2}, {}),
    "accumulated without communication": (
        *(UNEVEN, 2, {"sharding": Sharding(no_sync=True)}, {"accumulate_grad_batches": 2}, {}),
    ),
    "lora over 4 bits": (WIDE, 2, {}, {"precision": "bf16-true"}, {"lora": LORA, "quantization": Quantization()}),
    "lora, accumulated, 1 rank": (EVEN, 1, RECOMPUTED, {"accumulate_grad_batches": 2}, {"lora": LORA} | WARMUP),
    "8-bit state": (
        *({**EVEN, "hidden_size": 256}, 2, {}, {"precision": "bf16-true"}),
        {"optimizer": Optimizer(name="adamw_8bit", learning_rate=1e-3, weight_decay=0.1)},
    ),
    "gathered throughout": (
        *(EVEN, 2, {"sharding": Sharding(reshard_after_forward=False)}, {"precision": "bf16-mixed"}, {}),
    ),
    "a step is skipped": (EVEN, 2, {}, {"callbacks": [StabilityMonitor(policy="skip")]}, {"spoiled": True}),
    "on a GPU": (EVEN, 1, RECOMPUTED, GPU, {}),
    "on a GPU, accumulated": (TIED, 1, {}, GPU | {"accumulate_grad_batches": 2}, {}),
    "on GPUs, float16": (EVEN, 2, {}, GPU | {"precision": "16-mixed"}, {}),
}


def train(
    folder: Path, out: Path, overlaps: bool, strategy: dict[str, Any], trainer: dict[str, Any], task: dict[str, Any]
) -> None:
    options, task_options = dict(trainer), dict(task)
    recorder, early, num_pending = Recorder(), [], []
    is_spoiled = task_options.pop("spoiled", False)
    end, take = OverlappedSteps._end_backward, OverlappedSteps._take_over

    def watch_end(steps: Any) -> None:
        early.append(sum(unit.is_scaled for unit in steps._units))
        end(steps)

    def watch_take(steps: Any, *args: Any) -> None:
        take(steps, *args)
        num_pending.append(sum(unit.step is not None for unit in steps._units))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlappedSteps, "_end_backward", watch_end)
        patch.setattr(OverlappedSteps, "_take_over", watch_take)
        runner = build_trainer(
            FSDP2Strategy(cpu_offload=CPUOffload(overlap_optimizer=overlaps), **strategy),
            callbacks=[recorder, *options.pop("callbacks", [])],
            max_steps=NUM_STEPS,
            **options,
        )
        num_micro_batches = options.get("accumulate_grad_batches", 1)
        batch_size = 8 // dist.get_world_size() // num_micro_batches
        rows = (SpoiledRows if is_spoiled else Rows)(int(folder.name), batch_size)
        module = build_task(folder, **task_options)
        if is_spoiled:
            module.__class__ = SpoiledLoss
        runner.fit(module, rows)
    if overlaps:
        # Blocks at least: a head may be used in pieces.
        assert early == ([0] * (num_micro_batches - 1) + [max(early)]) * NUM_STEPS
        assert max(early) >= NUM_BLOCKS
        assert sum(num >= NUM_BLOCKS for num in num_pending) >= NUM_STEPS - 2  # of float16, some overflow
    else:
        assert early == []
    optimizer = runner.optimizers[0]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        f"{number}.{name}": to_local(value)
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state[parameter].items()
    }
    weights = gather_weights(module)
    if runner.is_global_zero:
        run = {"losses": recorder.result.losses, "norms": recorder.result.grad_norms}
        torch.save(run | {"weights": weights, "states": states}, out)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", list(RUNS))
def test_bits_are_those_of_steps_one_after_the_other(name: str, tmp_path: Path) -> None:
    sizes, world_size, *settings = RUNS[name]
    folder = save_model(tmp_path / str(sizes["vocab_size"]), **sizes)
    results = []
    for overlaps in (False, True):
        run = run_as_gpus if settings[1].get("accelerator") == "gpu" else run_ranks
        run(train, folder, tmp_path / "result", overlaps, *settings, world_size=world_size)  # type: ignore[operator]
        results.append(torch.load(tmp_path / "result"))
    plain, overlapped = results
    assert len(plain["losses"]) == NUM_STEPS
    for kind in ("losses", "norms"):
        assert torch.equal(torch.tensor(overlapped[kind]).nan_to_num(), torch.tensor(plain[kind]).nan_to_num())
    for kind in ("weights", "states"):
        assert plain[kind]
        assert overlapped[kind].keys() == plain[kind].keys()
        assert [n for n, t in plain[kind].items() if not torch.equal(t, overlapped[kind][n])] == []


class Reader(pl.Callback):
    """Might read weights."""


class Manual(CausalLM):
    reads_weights = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, *args: Any) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, *args))
        optimizer.step()


def with_hook(task: CausalLM) -> CausalLM:
    configure = task.configure_optimizers

    def configure_with_hook() -> Any:
        configured = configure()
        configured["optimizer"].register_step_post_hook(lambda *_: None)
        return configured

    task.configure_optimizers = configure_with_hook  # type: ignore[method-assign]
    return task


def fall_back(folder: Path, build: Callable[[Path], Any], callbacks: list[Any], message: str) -> None:
    trainer = build_trainer(FSDP2Strategy(**OVERLAPPED), callbacks=callbacks, max_steps=2, gradient_clip_val=None)
    with pytest.warns(UserWarning, match=message) as caught:
        trainer.fit(build(folder), Rows(64, 4))
    assert sum("overlap_optimizer" in str(warning.message) for warning in caught) == 1


def test_the_thread_has_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: chosen.append((threading.current_thread().name, d)))
    steps = OverlappedSteps([])
    steps._pool.submit(int).result()
    steps.close()
    assert chosen == [("optimizer_0", 3)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "callbacks", "message"),
    [
        (build_task, [Reader()], "Reader may use weights or gradients in its hooks, unless it says reads_weights = F"),
        (build_task, [EMA()], "EMA may use weights or gradients in its hooks; the optimizer steps between"),
        (lambda f: with_hook(build_task(f)), [], "AdamW has hooks that run after a step"),
        (lambda f: build_task(f, optimizer=Optimizer(name="adafactor")), [], "Adafactor may need all gradients"),
        (lambda f: Manual(pretrained=str(f)), [], "manual optimization may use weights right after a step"),
    ],
)
def test_what_rules_it_out_is_said_in_one_line(
    build: Callable[[Path], Any], callbacks: list[Any], message: str, tmp_path: Path
) -> None:
    run_ranks(fall_back, save_model(tmp_path / "model", **EVEN), build, callbacks, message, world_size=1)


def fail_in_thread(folder: Path) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("of this step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_fsdp.optim.overlapped_steps._step", fail)
        build_trainer(FSDP2Strategy(**OVERLAPPED), max_steps=2).fit(build_task(folder), Rows(64, 4))


@pytest.mark.full
def test_an_error_in_a_step_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ArithmeticError: of this step"):
        run_ranks(fail_in_thread, save_model(tmp_path / "model", **EVEN), world_size=1)
