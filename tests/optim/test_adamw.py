"""AdamW without DTensor is that of torch to the bit, weights and state, whoever has the shards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_fsdp.optim.adamw import AdamW
from ranks import run_ranks


class SeesDTensor(TorchDispatchMode):
    """Notes whether an operator of the optimizer was given DTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("_fused_adamw", "lerp")  # of one kernel, and of a loop
        self.is_seen |= any(name in str(func) for name in names) and DTensor in types
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [True, False])
def test_it_is_that_of_torch(fused: bool) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        values = [torch.randn(5, 3), torch.randn(1, 4), torch.randn(())]  # one rank has no row of the second
        optimizers = []
        for kind in (torch.optim.AdamW, AdamW):
            sharded = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for v in values[:2]]
            parameters = [*sharded, nn.Parameter(values[2].clone())]
            optimizers.append(kind(parameters, lr=0.1, weight_decay=0.1, amsgrad=True, fused=fused))
        for step in range(3):
            torch.manual_seed(step)
            grads = [torch.randn(v.shape) for v in values]
            for optimizer in optimizers:
                for parameter, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
                    parameter.grad = grad.clone()
                    if isinstance(parameter, DTensor):
                        # Once a whole one, of which DTensor makes shards.
                        is_whole = step == 2 and len(parameter) > 1
                        parameter.grad = distribute_tensor(grad, mesh, [Replicate() if is_whole else Shard(0)])
                with SeesDTensor() as seen:
                    optimizer.step()
            assert seen.is_seen == (step == 2)  # by the second, which is ours
        stock, own = (optimizer.state_dict()["state"] for optimizer in optimizers)
        assert stock.keys() == own.keys() == {0, 1, 2}
        for number, state in stock.items():
            for name, value in state.items():
                assert type(own[number][name]) is type(value)
                assert torch.equal(get_whole(own[number][name]), get_whole(value))
        for ours, theirs in zip(*(optimizer.param_groups[0]["params"] for optimizer in optimizers), strict=True):
            assert torch.equal(get_whole(ours), get_whole(theirs))

    run_ranks(body, world_size=2)


def get_whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.redistribute(placements=[Replicate()]).to_local() if isinstance(tensor, DTensor) else tensor.detach()
