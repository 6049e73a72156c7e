"""An exponential moving average of the weights, in the same shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lit_fsdp.checkpoint.space import count_bytes
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.sharding.torch_internals import to_local
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy

PART = 2**22  # weights that are cast at a time, to 16 MiB
_EXACT = "average/"  # in extra_state, before the names of averages that the weights' own dtype would round


class EMA(StepCallback):
    """Keep a moving average of the weights that train: it is validated, saved, tested and exported in their place.

    Each rank averages its own shards, so nothing is sent. The average takes 4 bytes for each parameter of the shard, in
    ``float32`` also where weights are not, and a step at most 16 MiB more. While the average is evaluated, a copy of
    the trained weights lies beside it. Where weights are in 16 bits, saving takes 6 bytes for each parameter while the
    checkpoint is put together, and loading 4 until training starts.
    Checkpoints hold the average as the weights, and beside it the weights that training goes on with, at any number of
    ranks; of weights in low precision also the average in ``float32``.

    Args:
        decay: How much of the average stays in a step: 0.999 averages over about 1,000 steps.
        warmup: Begin with less, (1 + step) / (10 + step), so that the first weights are soon forgotten.
    """

    def __init__(self, decay: float = 0.999, warmup: bool = True) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay: got {decay}: expected above 0, below 1, such as 0.999")
        self.decay, self.warmup = decay, warmup
        self._averages: dict[str, Tensor] = {}
        self._exact: dict[str, Tensor] = {}  # read from a checkpoint; NaN where it has none
        self._num_updates = 0
        self._kept: list[Tensor] | None = None  # what is to come back after an evaluation of the average

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, FSDP2Strategy):  # a setting, not a type in code
            name = type(strategy).__name__
            raise ValueError(f"EMA: got {name}: it needs FSDP2Strategy; set trainer.strategy to fsdp2")  # noqa: TRY004
        if strategy.checkpoint_format != "sharded":
            raise ValueError("EMA: checkpoints of a single file have no place for it; set checkpoint_format to sharded")
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_weights_only", False):  # Lightning would not ask this callback then
                raise ValueError(
                    "EMA: save_weights_only: true would save the weights and not the average; leave it out"
                )

    def estimate_checkpoint_bytes(self, module: nn.Module) -> int:
        """Return what this rank adds to a checkpoint: weights in ``float32``, and averages of those in 16 bits."""
        trained = [parameter.detach() for parameter in _list_trained(module).values()]
        return sum(count_bytes(p) // p.element_size() * (4 if p.dtype == torch.float32 else 8) for p in trained)

    reads_weights = True  # after each step, see ``cpu_offload.overlap_optimizer``

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the weights as they are; a checkpoint is loaded after this."""
        assert isinstance(trainer.strategy, FSDP2Strategy)
        trained = _list_trained(pl_module)
        self._averages = {name: p.detach().to(torch.float32, copy=True) for name, p in trained.items()}
        self._num_updates = 0
        low = {name: self._averages[name] for name, p in trained.items() if p.dtype != torch.float32}
        self._exact = {f"{_EXACT}{name}": torch.full_like(average, torch.nan) for name, average in low.items()}
        trainer.strategy.extra_state = self._averages | self._exact

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, FSDP2Strategy)
        super().on_train_start(trainer, pl_module)
        self._exact, trainer.strategy.extra_state = {}, self._averages  # nothing is loaded any more

    @override
    @torch.no_grad()
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        decay = min(self.decay, (1 + self._num_updates) / (10 + self._num_updates)) if self.warmup else self.decay
        self._num_updates += 1
        averages, weights = self._list_pairs(pl_module)
        for parts in _list_parts(averages, weights):
            torch._foreach_lerp_([average for average, _ in parts], [weight.float() for _, weight in parts], 1 - decay)

    @override
    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the average of this ``fit`` or of one before; weights of a checkpoint alone are the average already."""
        if self._averages and not trainer.sanity_checking:
            _reshard(pl_module)
            averages, weights = self._list_pairs(pl_module)
            self._kept = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, averages)

    on_test_start = on_predict_start = on_validation_start

    @override
    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kept is not None:
            _reshard(pl_module)
            torch._foreach_copy_(self._list_pairs(pl_module)[1], self._kept)
            self._kept = None

    on_test_end = on_predict_end = on_validation_end

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and isinstance(trainer.strategy, FSDP2Strategy):
            trainer.strategy.extra_state = {}  # a checkpoint that is loaded to be evaluated has nothing to put there

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)

    @override
    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._averages:
            return
        trained = _list_trained(pl_module)
        stored = checkpoint["state_dict"]
        weights = {name: stored[name].detach().float() for name in trained}
        if self._kept is not None:  # saved while the average is shown, as before a preemption
            weights = {name: weight.clone() for name, weight in weights.items()}
            torch._foreach_copy_([to_local(weight) for weight in weights.values()], self._kept)
        low = [name for name, p in trained.items() if p.dtype != torch.float32]
        checkpoint["extra_state"] = weights | {f"{_EXACT}{name}": self._averages[name] for name in low}
        names = {id(parameter): name for name, parameter in trained.items()}
        average = {  # under all names of what is tied
            _drop_wrapper(alias): self._averages[names[id(parameter)]].to(parameter.dtype)
            for alias, parameter in pl_module.named_parameters(remove_duplicate=False)
            if id(parameter) in names
        }
        checkpoint["state_dict"] = {**stored, **average}

    @override
    @torch.no_grad()
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the average for the average again, and go on with the weights that lay beside it."""
        if not self._averages:  # no training: the average stays
            return
        if trainer.state.fn != TrainerFn.FITTING:  # after one: what was loaded is what is evaluated
            averages, weights = self._list_pairs(pl_module)
            torch._foreach_copy_(averages, weights)
            return
        is_stored = self.state_key in checkpoint.get("callbacks", {})
        for name, average, weight in zip(self._averages, *self._list_pairs(pl_module), strict=True):
            loaded = weight.float().clone()  # the average, or what a run without one has saved
            if is_stored:
                weight.copy_(average)  # where the strategy has put what lay beside
                exact = self._exact.get(f"{_EXACT}{name}")
                if exact is not None and not to_local(exact).isnan().all():
                    loaded = to_local(exact)
            average.copy_(loaded)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_updates = state_dict["num_updates"]

    def _list_pairs(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of the averages and of the weights, which share memory with them."""
        trained = _list_trained(module)
        return [to_local(self._averages[n]) for n in trained], [to_local(p.detach()) for p in trained.values()]


def _list_parts(averages: list[Tensor], weights: list[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield pairs, or parts of large ones, that hold up to ``PART`` weights together."""
    parts: list[tuple[Tensor, Tensor]] = []
    size = 0
    for average, weight in zip(averages, weights, strict=True):
        for pair in zip(average.view(-1).split(PART), weight.view(-1).split(PART), strict=True):
            if parts and size + pair[0].numel() > PART:
                yield parts
                parts, size = [], 0
            parts.append(pair)
            size += pair[0].numel()
    if parts:
        yield parts


def _reshard(module: nn.Module) -> None:
    """Let go of gathered parameters: the root keeps them after a forward without backward, with the old values."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _list_trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, by the names that checkpoints have."""
    return {_drop_wrapper(name): p for name, p in module.named_parameters() if p.requires_grad}


def _drop_wrapper(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")
