"""Steps optimizers with gradients that are given, so that runs on different meshes must agree to the last bit."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from differences import find_largest
from models import to_full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_fsdp.checkpoint.sharded import join_states, load_checkpoint, save_checkpoint
from lit_fsdp.checkpoint.single_file import (
    gather_model_state,
    gather_optimizer_state,
    load_single_file,
    save_single_file,
)

# Rows on 1, 2, 3 and 2x2 ranks: even, uneven, and none at all on the last of three.
SHAPES = {
    "aligned": (67, 256),  # rows of whole blocks of 256
    "experts": (5, 4, 256),
    "unaligned": (40, 200),
    "few_rows": (2, 2100),
    "conv": (24, 3, 8, 8),
    "short_rows": (1024, 16),
    "norm": (512,),
}
MESHES = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2x2": (4, 2)}  # number of ranks, copies


def build_weights(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a module that has a parameter of each shape."""
    module, generator = nn.Module(), torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator) * 0.05
        module.register_parameter(name, nn.Parameter(values.to(dtype)))
    return module


def shard(module: nn.Module, num_copies: int = 1) -> nn.Module:
    """Shard over all ranks of the group, or over what is left of them when there are copies."""
    size = dist.get_world_size()
    shape, names = (size,), ("shard",)
    if num_copies > 1:
        shape, names = (num_copies, size // num_copies), ("replicate", "shard")
    return fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def build_with(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], num_copies: int | None = None
) -> tuple[Any, Any]:
    """Return whole parameters, or sharded ones, and their optimizer."""
    module = build_weights()
    if num_copies is not None:
        shard(module, num_copies)
    return module, kind(module.parameters(), **options)


def set_gradients(module: nn.Module, step: int) -> None:
    """Give every parameter the gradient of this step: of several sizes, and zero in some rows."""
    for index, parameter in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (-index)
        gradient[step % 2 :: 7] = 0
        gradient = gradient.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient.to(parameter.device)


def run_steps(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Step with the gradients of these steps."""
    for step in steps:
        set_gradients(module, step)
        optimizer.step()
        optimizer.zero_grad()


def read_all(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every weight and every tensor of the state in full."""
    tensors: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        tensors[name] = parameter.detach()
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {n: to_full(t).clone() for n, t in tensors.items()}


def list_unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in a bit, or are in one of both only."""
    return [n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n])]


def list_differences(actual: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest number."""
    assert actual.keys() == truth.keys()
    return {n: find_largest([float((actual[n] - t).abs().max() / t.abs().max())]) for n, t in truth.items()}


def save_run(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write checkpoints after 3 steps, as ``folder`` and as ``file``; all ranks must call it.

    ``truth`` gets what all numbers are then, and 2 steps later.
    """
    run_steps(module, optimizer, range(3))
    state = join_states(get_model_state_dict(module), [get_optimizer_state_dict(module, optimizer)])
    save_checkpoint(folder / "folder", state, meta={})
    whole = {"state_dict": gather_model_state(module)}
    save_single_file(folder / "file", whole | {"optimizer_states": [gather_optimizer_state(module, optimizer)]})
    truth = [read_all(module, optimizer)]
    run_steps(module, optimizer, range(3, 5))
    truth.append(read_all(module, optimizer))
    if dist.get_rank() == 0:
        torch.save(truth, folder / "truth")


def load_run(folder: Path, kind: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what ``save_run`` wrote, over other weights."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    if kind == "folder":
        load_checkpoint(folder / "folder", module, [optimizer])
    else:
        load_single_file(folder / "file", module, [optimizer], strict=True)
