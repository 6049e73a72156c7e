"""AdamW of torch on sharded parameters, without DTensor between its kernel and the shards.

Note [Why not DTensor]: when DTensor of torch 2.13 first sees a step, it goes through all of its tensors once for each
of them, which for thousands of parameters takes minutes. To be dropped when it does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lit_fsdp.sharding.torch_internals import to_local


class AdamW(torch.optim.AdamW):
    """AdamW, which updates each number by itself, so that a shard needs no other. State and results are torch's.

    Args as there. Without ``fused`` and ``foreach`` torch chooses as for plain tensors: on GPUs ``foreach``.
    """

    # Private, seen in torch 2.13 to 2.15: fills lists of parameters, gradients and state, which are then updated.
    @override
    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        parameters, gradients, *_ = lists
        # Otherwise DTensor makes shards of gradients.
        if all(_get_placements(p) == _get_placements(g) for p, g in zip(parameters, gradients, strict=True)):
            for tensors in lists:
                tensors[:] = map(to_local, tensors)
        return has_complex


def _get_placements(tensor: Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None
