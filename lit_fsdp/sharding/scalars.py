"""Parameters of no dimension, such as CLIP's ``logit_scale``, which ``fully_shard`` refuses: every rank keeps a copy.

For optimizers, clipping and checkpoints they are replicated DTensors, so that they mix with the sharded ones. The code
of the model reads plain parameters in the same memory, where gradients add up until a backward is over. Then one
all-reduce averages those of all of them, as FSDP2 averages the others. So it does after a backward that reaches no unit
of their root, such as that of a temperature, which is read outside of every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache, partial, reduce
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lit_fsdp.sharding.torch_internals import (
    assign_data,
    call_after_backward,
    call_after_this_backward,
    read_data,
    will_end_backward,
)

_HELD: WeakSet[nn.Module] = WeakSet()
_REDUCTIONS: WeakKeyDictionary[nn.Module, ReferenceType[Callable[[], None]]] = WeakKeyDictionary()
_LINK = "plain_form"  # the attribute of the DTensor that holds its link


class _Plain(nn.Parameter):
    """Stays in the memory of its DTensor when values are assigned to its ``data``."""

    data = property(read_data, assign_data)


class _Link:
    """The plain form of a parameter; a deep copy of that, which has other memory, begins without."""

    def __init__(self, plain: nn.Parameter) -> None:
        self.plain = plain

    def __deepcopy__(self, memo: Any) -> None:
        return None


def replicate_scalars(
    model: nn.Module, mesh: DeviceMesh, *, leave: Container[nn.Parameter] = ()
) -> dict[nn.Parameter, tuple[nn.Module, str]]:
    """Replace the parameters of no dimension, which are the same on all ranks; return what they became, and where.

    Those in ``leave`` stay as they are.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    placements = [Replicate()] * mesh.ndim
    for module in model.modules():
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        own = {name: p for name, p in named if not p.ndim and p not in leave}
        for name, parameter in own.items():
            if parameter not in made:
                value = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
                made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                places[made[parameter]] = (module, name)
            module.register_parameter(name, made[parameter])
        if own:
            kind: Any = type(module)
            module.__class__ = _read_plainly(kind, tuple(own))
    return places


def reduce_after_backward(root: nn.Module, places: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
    """Reduce gradients of what ``replicate_scalars`` has made, in these places of a sharded root, after a backward."""
    function = partial(reduce_scalars, root, places, mesh)
    call_after_backward(root, function)  # which keeps it
    for module, _ in _iterate_scalars(root):
        _REDUCTIONS[module] = ref(function)
    link_scalars(root)


def link_scalars(model: nn.Module) -> None:
    """Make the plain parameters that the code of a model reads. Before compiled code runs, which cannot make them."""
    for module, parameter in _iterate_scalars(model):
        if not parameter.is_meta:
            _get_plain(module, parameter)


def _iterate_scalars(model: nn.Module) -> Iterator[tuple[nn.Module, DTensor]]:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, DTensor) and not parameter.ndim:
                yield module, parameter


def hold_scalars(root: nn.Module, is_held: bool) -> None:
    """Let gradients add up over backwards without reducing them, or no longer."""
    (_HELD.add if is_held else _HELD.discard)(root)


def drop_scalar_gradients(root: nn.Module) -> None:
    """Let go of the gradients that plain forms have added up."""
    for parameter in root.parameters():
        if (link := getattr(parameter, _LINK, None)) is not None:
            link.plain.grad = None


@torch.no_grad()
def reduce_scalars(root: nn.Module, places: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
    """Average the gradients of all parameters of no dimension, used on this rank or not, at the end of a backward.

    Those that no rank has used get none.
    """
    found: list[tuple[nn.Module, Any]] = [(module, module._parameters[name]) for module, name in places]
    found = [(module, parameter) for module, parameter in found if parameter.requires_grad]
    if root in _HELD or not found:
        return
    parameters = [parameter for _, parameter in found]
    plain = [_get_plain(module, parameter) for module, parameter in found]
    is_used = [value.grad is not None for value in plain]
    dtype = reduce(torch.promote_types, (value.dtype for value in plain), torch.float32)
    gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in plain]
    counts = torch.tensor(is_used, dtype=dtype).to(plain[0].device, non_blocking=True)
    row = torch.cat([torch.stack([gradient.to(dtype) for gradient in gradients]), counts])
    if mesh.size() > 1:
        for group in mesh.get_all_groups():
            dist.all_reduce(row, group=group)
    means = row[: len(plain)] / mesh.size()
    # Waits for the device, so only where this rank cannot know. A dry run has no values.
    if not all(is_used) and not isinstance(row, FakeTensor):
        is_used = [bool(count) for count in row[len(plain) :].tolist()]
    for parameter, value, mean, is_used_somewhere in zip(parameters, plain, means, is_used, strict=True):
        value.grad = None
        if is_used_somewhere:
            gradient = DTensor.from_local(mean.to(value.dtype, copy=True), mesh, parameter.placements, run_check=False)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@cache
def _read_plainly(kind: Any, names: tuple[str, ...]) -> Any:
    """Return a class like ``kind``, with attributes that are the plain forms of these parameters."""
    return type(
        kind.__name__, (kind,), {"__module__": kind.__module__, **{n: property(_make_reader(n)) for n in names}}
    )


def _make_reader(name: str) -> Any:
    def read(module: nn.Module) -> Tensor | None:
        # Not through the class, whose attribute this is.
        parameter: Any = module._parameters.get(name)
        if not isinstance(parameter, DTensor) or parameter.is_meta:
            return parameter
        # As FSDP2 does where it gathers: what toggles gradients only knows the parameter.
        link = getattr(parameter, _LINK, None)
        if link is None or link.plain.requires_grad != parameter.requires_grad:
            return _get_plain(module, parameter)
        return link.plain

    return read


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _get_plain(module: nn.Module, parameter: Any) -> nn.Parameter:
    """Return the plain form of a module's parameter, which needs a gradient where it does; made at the first call."""
    link: _Link | None = getattr(parameter, _LINK, None)
    if link is None:
        value = parameter.detach().to_local()
        can_train = value.is_floating_point() or value.is_complex()
        link = _Link(_Plain(value, requires_grad=can_train))
        setattr(parameter, _LINK, link)
        reduction = _REDUCTIONS.get(module)  # none of a copy, of which no backward is reduced
        if can_train and reduction is not None:
            link.plain.register_post_accumulate_grad_hook(partial(_reduce_later, reduction))
    link.plain.requires_grad_(parameter.requires_grad)
    return link.plain


def _reduce_later(reduction: ReferenceType[Callable[[], None]], plain: Tensor) -> None:
    """See to it that the gradient of a plain form is reduced after the backward that runs, if no unit does."""
    function: Any = reduction()
    if function is None or (root := function.args[0]) in _HELD:
        return

    def reduce_what_is_left() -> None:
        if plain.grad is not None and not will_end_backward(root):
            function()

    call_after_this_backward(reduce_what_is_left)
