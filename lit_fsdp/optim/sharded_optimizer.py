"""What optimizers that work on local shards have in common: which parameters they take, how state is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Private, seen in torch 2.13.
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

# Seen in torch 2.13 and transformers 5.23.
_ADAFACTORS = (("torch.optim", "Adafactor"), ("transformers.optimization", "Adafactor"))


class ShardOptimizer(Optimizer):
    """An optimizer whose state has dtypes and shapes of its own, in the same shards as the parameters.

    Tensors of the state that belong to rows of a parameter are DTensors with its placements, so checkpoints reshard
    them together with it.
    """

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not isinstance(parameter, DTensor):
                continue
            # Rows of other shardings would be cut into pieces.
            if not all(p.is_replicate() or p.is_shard(0) for p in parameter.placements):
                raise ValueError(
                    f"{type(self).__name__}: got a parameter with placements {parameter.placements}: it works on "
                    "whole rows, sharded over dimension 0 alone; set optimizer.name: adamw, or mesh.tensor: 1"
                )

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update([(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None])
        return loss

    def update(self, work: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Step these parameters, each with the settings of its group."""
        raise NotImplementedError

    def name_state(self, parameter: Tensor) -> list[str]:
        """Return the names of the tensors kept for a parameter, beside the number of steps."""
        raise NotImplementedError

    def make_state(self, parameter: Tensor, like: Tensor) -> list[Tensor]:
        """Return these tensors as they are before the first step. Called without gradients.

        They are where ``like`` is: the parameter itself, or on the meta device.
        """
        raise NotImplementedError

    def count_step(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, made at its first step, for its next step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state.update(zip(self.name_state(parameter), self.make_state(parameter, parameter), strict=True))
        state["step"] += 1
        return state

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = self.state
        # The stock method would cast every tensor of the state to the dtype of its parameter.
        super().load_state_dict({**state_dict, "state": {}})
        for number, parameter in zip(numbers, parameters, strict=True):
            loaded = state_dict["state"].get(number)
            if loaded is None:
                continue
            expected = ["step", *self.name_state(parameter)]
            if loaded.keys() != set(expected):
                raise ValueError(
                    f"{type(self).__name__}: got a state of {', '.join(loaded)} for a parameter of shape "
                    f"{tuple(parameter.shape)}, expected {', '.join(expected)}: it was saved by another optimizer"
                )
            old = before.get(parameter, {})
            tensors = {n: self.take_over(parameter, v, old.get(n)) for n, v in loaded.items() if n != "step"}
            self.state[parameter] = {"step": loaded["step"], **tensors}  # that stays on the CPU

    def take_over(self, parameter: Tensor, value: Tensor, old: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return what is kept of a loaded tensor; ``old`` is what was kept before."""
        return value.to(parameter.device)


def refuse_whole_steps(optimizer: Optimizer) -> None:
    """Refuse the optimizers of other libraries that fail in their first step of shards, by what to take instead.

    Raises:
        ValueError: It is one of them, and its parameters are sharded.
    """
    if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        return
    kind = type(optimizer)
    if kind.__module__.startswith("bitsandbytes."):
        ours = "lit_fsdp.optim.AdamW8bit" if "Adam" in kind.__name__ else "one of torch.optim"
    elif (kind.__module__, kind.__name__) in _ADAFACTORS:  # not a subclass, which may do it otherwise
        ours = "lit_fsdp.optim.Adafactor"
    else:
        return
    raise ValueError(
        f"configure_optimizers: got {kind.__name__} of {kind.__module__}: it cannot step sharded parameters; take "
        f"{ours}"
    )


def read_steps(state: dict[str, Tensor]) -> int:
    """Return how many steps a state has seen; 1 in a dry run, whose tensors have no values."""
    return 1 if isinstance(state["step"], FakeTensor) else int(state["step"])


def make_zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous zeros with the shape, device, mesh and placements of ``like``."""
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
