"""Tensor parallelism as the models of Transformers plan it: layers split over ranks that compute with their part.

A plan names a style for modules: ``colwise`` layers hold some rows of a weight and compute some of the outputs,
``rowwise`` layers hold some columns and add up what they compute. Parameters become DTensors of the dimension
``tensor``, which ``fully_shard`` then splits by rows over the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.errors import join_names
from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.sharding.torch_internals import to_local

_PARTIAL = "replicated_with_grad_allreduce"
# Of Transformers 5.23. Others hold rows that do not lie together, as fused weights and experts do.
STYLES = (
    *("colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_rep", "rowwise_split_input"),
    *("embedding_rowwise", _PARTIAL),
)
# Gradients count as the same up to this share of themselves, and of the largest one: kernels may add in any order.
_SAME, _NOISE = 1e-2, 1e-6
_HEADS = ("num_attention_heads", "num_key_value_heads")
INNER = "inner_forward"  # an attribute: the forward of a layer inside of another that was put around it


def parallelize_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of the models inside over the dimension ``tensor`` of a mesh, in place; nothing without it.

    Before anything is sharded or checkpointed. Weights must be the same on all ranks, or on the meta device.

    Raises:
        ValueError: A model has no plan, or one that does not fit; says what to set.
    """
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return
    dim = mesh["tensor"]
    size = dim.size()
    _refuse_changed(module, size)
    models = list(_find_models(module))
    if not models:
        names = dict.fromkeys(
            type(child).__name__ for child in module.children() if next(child.parameters(), None) is not None
        )
        raise ValueError(
            f"mesh.tensor: got {size}: {' and '.join(names) or type(module).__name__} has no plan for tensor "
            'parallelism; set mesh.tensor: 1, or split it in configure_model by device_mesh["tensor_parallel"]'
        )
    for model in models:
        _check_heads(model, size)
        _parallelize(model, dim)


def refuse_split(module: nn.Module) -> None:
    """Refuse layers that ``configure_model`` has split and not sharded: not all ranks would begin with one model."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(  # noqa: TRY004  a setting, not a type in code
                f"configure_model: {name} is split, and not sharded; call fully_shard there as well, with "
                'device_mesh["data_parallel"], or leave both to mesh.tensor'
            )


@torch.no_grad()
def check_gradients(module: nn.Module, mesh: DeviceMesh) -> bool:
    """Refuse gradients that the ranks of a layer do not agree on, and return whether there were any to compare.

    Each has a copy of what is not split, whose gradient has to be that of the others, or the copies part without a
    word. A plan that leaves out norms of single heads does that. Gathers one number for each parameter and waits for
    the device; all ranks must call it.

    Args:
        module: Sharded, after a backward.
        mesh: From ``build_mesh``.

    Raises:
        ValueError: They differ; says which, and what to set. Raised on all ranks.
    """
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return True
    whole = {name: p for name, p in module.named_parameters() if p.requires_grad and not _is_on_tensor(p)}
    if all(parameter.grad is None for parameter in whole.values()):
        return not whole
    norms = torch.stack([_measure_gradient(parameter) for parameter in whole.values()]).to(mesh.device_type)
    found = norms.new_empty(dist.get_world_size() * len(norms))
    dist.all_gather_into_tensor(found, norms)
    if not found.isfinite().all():  # of a scaler that looks for its scale: the next ones
        return False
    groups = found.view(-1, mesh["tensor"].size(), len(norms))  # ranks of a layer are neighbours
    low, high = groups.amin(1), groups.amax(1)
    is_other = (high - low > _SAME * high + _NOISE * high.amax(1, keepdim=True)).any(0).tolist()
    if names := [name for name, other in zip(whole, is_other, strict=True) if other]:
        raise ValueError(
            f"mesh.tensor: got {mesh['tensor'].size()}: gradients of {join_names(names)} differ between the ranks that "
            "share a layer: the plan of the model does not add up what each has found; set mesh.tensor: 1"
        )
    return True


def get_split_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a rank's part of a layer, which is the whole one without tensor parallelism."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor) and "tensor" in (names := parameter.device_mesh.mesh_dim_names or ()):
        index = names.index("tensor")
        placement: Any = parameter.placements[index]
        if not placement.is_replicate():
            shape[placement.dim] //= parameter.device_mesh.shape[index]  # without a rest, see _check_even
    return torch.Size(shape)


def _is_on_tensor(parameter: Tensor) -> bool:
    """Whether ranks hold parts of it, or FSDP2 adds up what they have found."""
    return isinstance(parameter, DTensor) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())


def _measure_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros((), device=parameter.device)
    return torch.linalg.vector_norm(to_local(gradient), dtype=torch.float32)


def _refuse_changed(module: nn.Module, size: int) -> None:
    for what, found in (("lora", iterate_adapters(module)), ("quantization", iterate_quantized(module))):
        if next(iter(found), None) is not None:
            raise describe_changed(what, size)


def describe_changed(what: str, size: int) -> ValueError:
    """Return the error for layers that have been changed by ``what``, and shall be split over ``size`` ranks."""
    return ValueError(
        f"mesh.tensor: got {size} with {what}: layers can be split only as they are; set mesh.tensor: 1, as "
        "sharding alone is enough for what trains few parameters"
    )


def _find_models(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost models that have a plan for their blocks: some have one for their head alone."""
    if any("*" in name for name in getattr(module, "tp_plan", None) or ()):
        yield module
        return
    for child in module.children():
        yield from _find_models(child)


def _check_heads(model: Any, size: int) -> None:
    config = model.config.get_text_config()
    counts = {name: getattr(config, name, None) for name in _HEADS}
    for name, count in counts.items():
        if isinstance(count, int) and count % size:
            fits = [
                n for n in _list_divisors(size) if all(not isinstance(c, int) or c % n == 0 for c in counts.values())
            ]
            raise ValueError(
                f"mesh.tensor: got {size}: it must divide the heads of {type(model).__name__}, which has {name} "
                f"{count}; set mesh.tensor: {max(fits)}"
            )


def _list_divisors(size: int) -> list[int]:
    """Return what fits the number of ranks as ``size`` does."""
    return [n for n in range(1, size + 1) if size % n == 0]


def _parallelize(model: Any, mesh: DeviceMesh) -> None:
    # Here and not above: whoever has no such model must not wait for the import.
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

    made: dict[int, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        kind = model.tp_plan.get(replace_layer_number_by_wildcard(name))
        if kind is None:
            if any(replace_layer_number_by_wildcard(f"{name}.{key}") in model.tp_plan for key in module._parameters):
                raise _refuse_style(model, f"{name}.*", "parameters", mesh)
            continue
        if kind not in STYLES:
            raise _refuse_style(model, name, kind, mesh)
        style: Any = _PartialGradients() if kind == _PARTIAL else ALL_PARALLEL_STYLES[kind]
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:  # else tied to one that was split
                style.shard_param(module, key, mesh)
                made[id(parameter)] = made[id(module._parameters[key])] = module._parameters[key]
                _check_even(f"{name}.{key}", made[id(parameter)])
            module._parameters[key] = made[id(parameter)]
        _install(style, module, mesh)
    # Tied to others that the plan does not name.
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]


class _PartialGradients:
    """Norms of single heads, of which a rank has some: all hold the weight, and their gradients are parts of one sum.

    Transformers adds them up in each backward, in place: with ``no_sync`` those of earlier micro-batches once more
    (seen in 5.23). Here FSDP2 does it when it reduces.
    """

    def shard_param(self, module: nn.Module, key: str, mesh: DeviceMesh) -> None:
        parameter: Any = module._parameters[key]
        value = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        module._parameters[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> None:  # noqa: ARG002  as styles of Transformers
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            kept = {key: p for key, p in module._parameters.items() if isinstance(p, DTensor)}
            module._parameters.update({k: p.to_local(grad_placements=[Partial()]) for k, p in kept.items()})
            try:
                return forward(*args, **kwargs)
            finally:
                module._parameters.update(kept)

        module.forward = run


def _install(style: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the forward of a layer compute with its part, also inside of another that was put around it."""
    around = vars(module).get("forward") if hasattr(module, INNER) else None
    if around is not None:
        module.forward = getattr(module, INNER)
    style.install_forward(module, mesh)
    if around is not None:
        setattr(module, INNER, module.forward)
        module.forward = around


def _check_even(name: str, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        return
    placement: Any
    (placement,), size = parameter.placements, parameter.device_mesh.size()
    if not placement.is_replicate() and (length := parameter.shape[placement.dim]) % size:
        raise ValueError(
            f"mesh.tensor: got {size}: it must divide what it splits: {name} has {length} "
            f"{'columns' if placement.dim else 'rows'}; set mesh.tensor: "
            f"{max(n for n in _list_divisors(size) if length % n == 0)}"
        )


def _refuse_style(model: nn.Module, name: str, kind: str, mesh: DeviceMesh) -> ValueError:
    return ValueError(
        f"mesh.tensor: got {mesh.size()}: the plan of {type(model).__name__} splits {name} as {kind}, which cannot be "
        "sharded as well yet; set mesh.tensor: 1"
    )
