"""Which modules become roots under manual optimization, where ``training_step`` calls several networks one by one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from lit_fsdp.sharding.wrap import Unit


def split_by_child(
    model: nn.Module, plan: Sequence[Unit], *, whole: Container[nn.Parameter] = ()
) -> list[tuple[nn.Module, list[Unit]]]:
    """Return each child of ``model`` with its part of the plan, to be sharded as a root of its own.

    Needed where backward runs inside the forward of ``model``, which as a root would still hold its parameters. Of a
    child that only holds others, such as ``nn.ModuleDict``, these are the roots, unless units cover it: nobody calls
    it, so nothing would gather what is its own.

    Args:
        model: With the children.
        plan: Its units.
        whole: The parameters that will not be sharded.

    Raises:
        ValueError: ``model`` itself has parameters, or two roots share one that is sharded.
    """
    if direct := [name for name, _ in model.named_parameters(recurse=False)]:
        raise ValueError(
            f"{', '.join(direct)}: under manual optimization, parameters of the LightningModule itself cannot be "
            "sharded; move them into a child module"
        )
    parts: list[tuple[nn.Module, list[Unit]]] = []
    names: dict[int, str] = {}  # of the parameters so far
    for root_name, root in _iterate_roots(model, "", plan, set()):
        for name, parameter in root.named_parameters(prefix=root_name):
            if parameter not in whole and (other := names.setdefault(id(parameter), name)) != name:
                raise ValueError(
                    f"{name} is {other} too: under manual optimization each child of the LightningModule is sharded by "
                    "itself, so they would train copies; make what they share a child of its own, which training_step "
                    "calls"
                )
        parts.append((root, _take_part(root, root_name, plan)))
    return parts


def _iterate_roots(
    model: nn.Module, name: str, plan: Sequence[Unit], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in model.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if child in seen or next(child.parameters(), None) is None:
            continue
        seen.add(child)
        is_called = (
            type(child).forward is not nn.Module.forward or next(child.parameters(recurse=False), None) is not None
        )
        if is_called or not _take_part(child, path, plan)[-1].parameters:
            yield path, child
        else:
            yield from _iterate_roots(child, path, plan, seen)


def _take_part(root: nn.Module, name: str, plan: Sequence[Unit]) -> list[Unit]:
    """Return the units inside a root, and the root with what is left, by their names there."""
    prefix = f"{name}."
    inside = [unit for unit in plan if unit.kind != "root" and all(n.startswith(prefix) for n in unit.names)]
    units = [replace(u, names=_strip(u.names, prefix), parameters=_strip(u.parameters, prefix)) for u in inside]
    taken = {parameter for unit in units for parameter in unit.parameters}
    left = tuple(parameter for parameter, _ in root.named_parameters() if parameter not in taken)
    return [*units, Unit(names=("",), kind="root", parameters=left)]


def _strip(names: Iterable[str], prefix: str) -> tuple[str, ...]:
    return tuple(name.removeprefix(prefix) for name in names)
