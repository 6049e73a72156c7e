"""An exponential moving average of the weights, in the same shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from lit_fsdp.checkpoint.space import count_bytes
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.sharding.shard import reshard
from lit_fsdp.sharding.torch_internals import to_local
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy

PART = 2**22  # weights that are cast at a time, to 16 MiB
_EXACT = "average/"  # in extra_state, before the names of averages that the weights' own dtype would round


class EMA(StepCallback):
    """Keep a moving average of the weights that train: it is validated, saved, tested and exported in their place.

    Those that are unfrozen during the run are averaged from then on. Each rank averages its own shards, so nothing is
    sent. The average takes 4 bytes for each parameter of the shard, in ``float32`` also where weights are not, and a
    step at most 16 MiB more. While the average is evaluated, a copy of the trained weights lies beside it. Where
    weights are in 16 bits, saving takes 6 bytes for each parameter while the checkpoint is put together, and loading 4
    until training starts.
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
        self._module: LightningModule | None = None  # whose averages these are
        self._stored: Collection[str] = ()  # of a checkpoint that is loaded: names of its weights beside the average
        self._exact: dict[str, Tensor] = {}  # read from it
        self._num_updates = 0
        self._kept: dict[str, Tensor] = {}  # what is to come back after an evaluation of the average

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if pl_module is not self._module:
            self._averages, self._module = {}, pl_module
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

    @property
    def changes_saved_weights(self) -> bool:
        """Whether saves need this callback: Lightning does not ask it for those of weights alone."""
        return bool(self._averages)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the weights as they are; a checkpoint is loaded after this."""
        assert isinstance(trainer.strategy, FSDP2Strategy)
        self._averages, self._stored, self._num_updates = {}, (), 0
        self._follow(pl_module)
        trainer.strategy.make_extra_state = partial(self._make_room, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, FSDP2Strategy)
        super().on_train_start(trainer, pl_module)
        self._exact, trainer.strategy.make_extra_state = {}, None  # nothing is loaded any more

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # an epoch may begin with unfreezing some
            self._follow(pl_module)

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
            _wait_for_copies(trainer.strategy.root_device)
            reshard(pl_module)  # the root keeps what a forward without backward has gathered, with the old values
            averages, weights = self._list_pairs(pl_module)
            self._kept = {name: weight.clone() for name, weight in zip(self._averages, weights, strict=True)}
            torch._foreach_copy_(weights, averages)

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kept:
            _wait_for_copies(trainer.strategy.root_device)
        self._restore(trainer, pl_module)

    on_test_end = on_predict_end = on_validation_end

    @torch.no_grad()
    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kept:
            if isinstance(trainer.strategy, FSDP2Strategy):
                trainer.strategy.end_evaluation()
            averaged = self._follow(pl_module)  # of which some may have been unfrozen since
            torch._foreach_copy_([to_local(averaged[n].detach()) for n in self._kept], list(self._kept.values()))
            self._kept = {}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and isinstance(trainer.strategy, FSDP2Strategy):
            trainer.strategy.make_extra_state = None  # an evaluation loads the average alone

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore(trainer, pl_module)

    @override
    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._averages:
            return
        stored = checkpoint["state_dict"]
        averaged = {name: p for name, p in self._follow(pl_module).items() if name in stored}
        weights = {name: stored[name].detach().float() for name in averaged}
        if shown := [name for name in self._kept if name in weights]:  # while the average is, as before a preemption
            weights |= {name: weights[name].clone() for name in shown}
            torch._foreach_copy_([to_local(weights[name]) for name in shown], [self._kept[name] for name in shown])
        low = [name for name, p in averaged.items() if p.dtype != torch.float32]
        checkpoint["extra_state"] = weights | {f"{_EXACT}{name}": self._averages[name] for name in low}
        names = {id(parameter): name for name, parameter in averaged.items()}
        average = {  # under all names of what is tied
            _drop_wrappers(alias): self._averages[names[id(parameter)]].to(parameter.dtype)
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
        for name, average, weight in zip(self._averages, *self._list_pairs(pl_module), strict=True):
            loaded = weight.float().clone()  # the average, or what a run without one has saved
            if name in self._stored:
                weight.copy_(average)  # where the strategy has put what lay beside
                exact = self._exact.get(f"{_EXACT}{name}")
                loaded = loaded if exact is None else to_local(exact)
            average.copy_(loaded)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_updates = state_dict["num_updates"]

    def _list_pairs(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of the averages and of the weights, which share memory with them."""
        averaged = self._follow(module)
        return [to_local(self._averages[n]) for n in averaged], [to_local(p.detach()) for p in averaged.values()]

    def _follow(self, module: nn.Module, names: Collection[str] = ()) -> dict[str, nn.Parameter]:
        """Begin averages of what trains by now and of ``names``, with the weights as they are; return all with one."""
        parameters = {_drop_wrappers(name): p for name, p in module.named_parameters()}
        for name, parameter in parameters.items():
            if name not in self._averages and (parameter.requires_grad or name in names):
                self._averages[name] = parameter.detach().to(torch.float32, copy=True)
        return {name: parameters[name] for name in self._averages}

    def _make_room(self, module: nn.Module, stored: Collection[str]) -> dict[str, Tensor]:
        """Return where to put what lay beside the average in a checkpoint, also of weights that are frozen so far."""
        averaged = self._follow(module, stored)
        self._stored = stored
        low = [name for name in averaged if f"{_EXACT}{name}" in stored]
        self._exact = {f"{_EXACT}{name}": torch.empty_like(self._averages[name]) for name in low}
        return {name: room for name, room in (self._averages | self._exact).items() if name in stored}


def _wait_for_copies(device: torch.device) -> None:
    """Let a GPU come to its end: of offloaded weights, it may still have to fetch what is to be overwritten."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def _list_trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, by the names that checkpoints have."""
    return {_drop_wrappers(name): p for name, p in module.named_parameters() if p.requires_grad}


def _drop_wrappers(name: str) -> str:
    """Return the name that a parameter has in a checkpoint: without wrappers of recomputation and ``torch.compile``."""
    return ".".join(part for part in name.split(".") if part not in ("_checkpoint_wrapped_module", "_orig_mod"))
