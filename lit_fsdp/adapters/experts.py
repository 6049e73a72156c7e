"""Adapters of the fused experts of a mixture: peft's layer around a parameter, computed in groups.

Note [Low rank in groups]: peft adds ``scaling * B A`` to the weights of all experts in each forward. That takes a
dense copy of them and a gradient of its size, and is impossible for rows of bytes. Here the experts multiply by ``A``
and then by ``B``, in the same products in groups as by their weights. Parameters, names and layout are those of peft.

Importing this file imports peft: see Note [peft starts CUDA] in ``layers.py``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from typing_extensions import override

from lit_fsdp.adapters.layers import ADAPTER
from lit_fsdp.quantization.groups import GroupedExperts, LowRankMatrices


class ExpertAdapter(ParamWrapper):
    """An adapter of one weight of experts; those of several weights are nested, as in peft.

    Args:
        base_layer: The experts, or the adapter of another of their weights.
        parameter_name: Of the weight.
        config: Of peft.
        r: Rank of each expert.
        alpha: Before it is divided by the rank.
    """

    def __init__(self, base_layer: nn.Module, *, parameter_name: str, config: Any, r: int, alpha: Any) -> None:
        super().__init__(base_layer, ADAPTER, parameter_name=parameter_name, config=config, r=r, lora_alpha=alpha)

    @override
    def forward(self, *args: Any, added: dict[str, LowRankMatrices] | None = None, **kwargs: Any) -> Tensor:
        """Return what the experts do with what is added here, and by the adapters around."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        if not (self.disable_adapters or self.merged):
            added = {**(added or {}), self.parameter_name: self.get_matrices()}
        result: Tensor = self.base_layer(*args, added=added, **kwargs)
        return result

    def get_matrices(self) -> LowRankMatrices:
        """Return what is added to the weight of each expert; the adapter must be gathered."""
        a: Tensor = self.lora_A[ADAPTER].get_parameter("weight")  # [experts * rank, in]
        b: Tensor = self.lora_B[ADAPTER].get_parameter("weight")  # [out, rank * experts]
        return LowRankMatrices(
            a=a.view(self.num_experts, -1, a.shape[1]),
            # The experts are the rows of A, but of B the last of two dimensions.
            b=b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1),
            scaling=self.scaling[ADAPTER],
        )

    @override
    def _get_in_out_features(self, module: nn.Module) -> Any:
        shapes = getattr(self.get_base_layer(), "dense_shapes", {})
        if self.parameter_name not in shapes:
            return super()._get_in_out_features(module)
        # Private, seen in peft 0.21: as it does for dense weights, of which this one has the bytes only.
        self._param_ndim = 3
        self.num_experts, *sizes = shapes[self.parameter_name]
        return tuple(sizes)


def list_expert_weights(module: nn.Module) -> list[str]:
    """Return the names of the weights of experts, in the order in which peft nests their adapters."""
    shapes = getattr(module, "dense_shapes", None)
    return [*shapes] if shapes else [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3]


def add_expert_adapter(model: nn.Module, name: str, *, config: Any, r: int, alpha: float) -> None:
    """Put an adapter around experts, in place.

    Args:
        model: Changed in place.
        name: Of a weight of experts in it.
        config: Of peft.
        r: Rank of each expert.
        alpha: Before it is divided by the rank.
    """
    path, _, parameter_name = name.rpartition(".")
    module = model.get_submodule(path)
    experts: Any = module.get_base_layer() if isinstance(module, ExpertAdapter) else module
    if not isinstance(experts, GroupedExperts):
        kind: Any = type(experts)
        experts.__class__ = _mix_into(kind)
    with torch.device(next(experts.parameters()).device):
        adapter = ExpertAdapter(module, parameter_name=parameter_name, config=config, r=r, alpha=alpha)
    model.set_submodule(path, adapter)


@cache
def _mix_into(kind: Any) -> Any:
    # Still one of its own class, so that the model's initializer knows it.
    return type(f"Grouped{kind.__name__}", (GroupedExperts, kind), {})
