"""A model with few blocks that holds all that a deep one does: which blocks those are, and the model without the rest.

Note [Short model]: blocks of one kind repeat the same memory, step after step. A block also meets what its neighbours
leave behind: FSDP2 frees the buffers of one gather at the next, and reduces one gradient while another is computed.
So a block stands for all of its kind whose neighbours, up to a distance, are of the same kinds too. Blocks are left
out so that each of the others keeps its neighbours; the first and last of a stack have none on one side, and stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import Unit, iterate_blocks

_NUMBER = re.compile("idx|index|layer|depth|number|seed")  # in names of what says which block it is
_MIN_DEPTH = 5  # of a stack that is worth shortening


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A list of blocks, and which of them are kept.

    Args:
        name: Of the list.
        depth: How many blocks it has.
        kinds: The number of the kind of each block, alike or not in its neighbours.
        kept: Numbers of those that are kept.
        templates: For each block that is left out, the place among the kept of one that stands for it.
        twins: Places of two kept blocks, each of which could stand for the other.
        reach: To what distance neighbours were looked at.
    """

    name: str
    depth: int
    kinds: Sequence[int]
    kept: Sequence[int]
    templates: Mapping[int, int]
    twins: Sequence[tuple[int, int]]
    reach: int

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks of the short model."""
        return [f"{self.name}.{i}" for i in range(len(self.kept))]


def choose_stacks(module: nn.Module, units: Sequence[Unit], settings: Settings, *, reach: int) -> list[Stack]:
    """Return the stacks of a model that can be shortened, and how.

    Args:
        module: Not sharded.
        units: From ``plan_module``.
        settings: Of the strategy.
        reach: How far blocks look for neighbours.
    """
    names = list(iterate_blocks(units))
    every = settings.activation_checkpointing.every_n_blocks
    recomputed = set(names[::every])
    reached = _list_reached(module)
    stacks = []
    for name, blocks in _iterate_stacks(module, names):
        kinds = _tell_kinds(module, name, blocks, recomputed, reached)
        if (stack := _shorten(name, kinds, reach)) is not None:
            stacks.append(stack)
    if every > 1 and not _keeps_stride(stacks, names, recomputed, every):
        return []
    return stacks


def shorten_model(module: nn.Module, stacks: Sequence[Stack]) -> None:
    """Leave out blocks of a model for good, and tell its modules and configurations that there are fewer."""
    for stack in stacks:
        blocks: Any = module.get_submodule(stack.name)
        kept = [blocks[i] for i in stack.kept]
        blocks._modules = {str(i): block for i, block in enumerate(kept)}
        for holder in _list_holders(module, stack.name):
            _tell_depth(holder, stack)


def _iterate_stacks(module: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the outermost lists of which every element is a unit, or all it has is in units inside."""
    found: list[str] = []
    for name, child in module.named_modules():
        is_list = isinstance(child, nn.ModuleList | nn.Sequential) and len(child) >= _MIN_DEPTH
        if not name or not is_list or any(name.startswith(f"{outer}.") for outer in found):
            continue
        elements = [f"{name}.{i}" for i in range(len(child))]
        if all(_is_in_units(e, block, names) for e, block in zip(elements, child, strict=True)):
            found.append(name)
            yield name, list(child)


def _is_in_units(name: str, element: nn.Module, names: Sequence[str]) -> bool:
    inside = tuple(f"{unit}." for unit in names if unit == name or unit.startswith(f"{name}."))
    own = (key for held in (element.named_parameters(), element.named_buffers()) for key, _ in held)
    return bool(inside) and all(f"{name}.{key}".startswith(inside) for key in own)


def _tell_kinds(
    module: nn.Module, name: str, blocks: Sequence[nn.Module], recomputed: set[str], reached: set[str]
) -> list[Hashable]:
    layer_types = _find_layer_types(module, name, len(blocks))
    numbers = _list_numbers(blocks)
    kinds: list[Hashable] = []
    for i, block in enumerate(blocks):
        path = f"{name}.{i}"
        marks = tuple(sorted(r.removeprefix(path) for r in recomputed if r == path or r.startswith(f"{path}.")))
        kinds.append((_describe(block, numbers), marks, path in reached, layer_types[i] if layer_types else None))
    return kinds


def _list_numbers(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Return the modules and attributes that say which block it is: their numbers rise evenly from block to block."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for i, block in enumerate(blocks):
        for name, child in block.named_modules():
            for key, value in vars(child).items():
                if type(value) is int and _NUMBER.search(key):
                    found.setdefault((name, key), []).append((i, value))
    return {place for place, points in found.items() if _rise_evenly(points)}


def _rise_evenly(points: Sequence[tuple[int, int]]) -> bool:
    (first, low), (last, high) = points[0], points[-1]
    return high > low and all((value - low) * (last - first) == (high - low) * (i - first) for i, value in points)


def _are_numbers(values: Sequence[Any]) -> bool:
    """Whether a list has the numbers of the blocks themselves, such as those with experts where that is all."""
    return all(type(value) is int for value in values) and _rise_evenly(list(enumerate(values)))


def _describe(block: nn.Module, numbers: set[tuple[str, str]]) -> Hashable:
    """Return what makes a block of the kind it is: classes, shapes, what trains, and settings but for its numbers."""
    parts: list[Any] = []
    for name, child in block.named_modules():
        parts.append((name, type(child)))
        for key, value in vars(child).items():
            if isinstance(value, float):  # such as what is dropped, which may grow with depth
                parts.append((key, bool(value)))
            elif isinstance(value, int | str | None):
                parts.append((key, None if (name, key) in numbers else value))
    for name, p in block.named_parameters(remove_duplicate=False):
        parts.append((name, type(p), tuple(p.shape), p.dtype, p.requires_grad))
    parts += [(name, tuple(b.shape), b.dtype) for name, b in block.named_buffers(remove_duplicate=False)]
    return tuple(parts)


def _list_reached(module: nn.Module) -> set[str]:
    """Return the modules at or after the first that trains: backward gets there."""
    reached, is_reached = set(), False
    for name, child in module.named_modules():
        if is_reached or any(p.requires_grad for p in child.parameters()):
            reached.add(name)
        is_reached = is_reached or any(p.requires_grad for p in child.parameters(recurse=False))
    return reached


def _find_layer_types(module: nn.Module, name: str, depth: int) -> Sequence[Hashable] | None:
    """Return what configurations around a stack say of each of its blocks."""
    lists = [value for holder in _list_holders(module, name) for _, value in _iterate_per_block(holder, depth)]
    columns = [tuple(value) for value in lists if not _are_numbers(value)]
    return list(zip(*columns, strict=True)) if columns else None


def _list_holders(module: nn.Module, name: str) -> list[Any]:
    """Return the modules around a stack and their configurations: what may say how many blocks there are."""
    owners = [module, *(module.get_submodule(name[:i]) for i, char in enumerate(name) if char == ".")]
    return [
        holder for owner in owners for holder in (owner, getattr(owner, "config", None)) if hasattr(holder, "__dict__")
    ]


def _iterate_per_block(holder: Any, depth: int) -> Iterator[tuple[str, Sequence[Any]]]:
    for key, value in vars(holder).items():
        is_list = isinstance(value, list | tuple) and len(value) == depth
        if is_list and "layer" in key and all(isinstance(item, str | int | float | bool | None) for item in value):
            yield key, value


def _tell_depth(holder: Any, stack: Stack) -> None:
    for key, value in list(_iterate_per_block(holder, stack.depth)):
        kind: Any = type(value)  # list or tuple
        vars(holder)[key] = kind(value[i] for i in stack.kept)
    for key, value in list(vars(holder).items()):
        if type(value) is int and value == stack.depth and ("layer" in key or key == "depth"):
            vars(holder)[key] = len(stack.kept)


def _shorten(name: str, kinds: Sequence[Hashable], reach: int) -> Stack | None:
    """Return which blocks to keep: of each kind among its kinds of neighbours one, and two of the most frequent."""
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    padded = [-1 - i for i in range(reach)] + [numbers[kind] for kind in kinds]
    padded += [-1 - reach - i for i in range(reach)]
    contexts = [tuple(padded[i : i + 2 * reach + 1]) for i in range(len(kinds))]
    if not (counts := Counter(contexts)):
        return None
    frequent = max(counts, key=lambda context: counts[context])
    least = {context: 2 if context == frequent and counts[context] > 1 else 1 for context in counts}
    kept = list(range(len(kinds)))
    while cut := _find_cut(kept, contexts, padded, reach, least):
        del kept[cut[0] : cut[1]]
    if len(kept) == len(kinds):
        return None
    places: dict[Any, list[int]] = {}
    for place, i in enumerate(kept):
        places.setdefault(contexts[i], []).append(place)
    return Stack(
        name=name,
        depth=len(kinds),
        kinds=[numbers[kind] for kind in kinds],
        kept=kept,
        templates={i: places[contexts[i]][-1] for i in range(len(kinds)) if i not in kept},
        twins=[(place[0], other) for place in places.values() for other in place[1:]],
        reach=reach,
    )


def _find_cut(
    kept: Sequence[int],
    contexts: Sequence[Any],
    padded: Sequence[int],
    reach: int,
    least: Mapping[Any, int],
) -> tuple[int, int] | None:
    """Return the longest run that can go: what was around it fits together, and enough of each context is left."""
    num = len(kept)
    line = [*padded[:reach], *(padded[i + reach] for i in kept), *padded[len(padded) - reach :]]
    around = [tuple(line[i : i + 2 * reach]) for i in range(num + 1)]  # of the border before each
    counts = Counter(contexts[i] for i in kept)
    for length in range(num - 1, 0, -1):
        for begin in range(num - length + 1):
            if around[begin] == around[begin + length]:
                gone = Counter(contexts[i] for i in kept[begin : begin + length])
                if all(counts[context] - n >= least[context] for context, n in gone.items()):
                    return begin, begin + length
    return None


def _keeps_stride(stacks: Sequence[Stack], names: Sequence[str], recomputed: set[str], every: int) -> bool:
    """Whether every n-th block of the short model is one that was recomputed before."""
    gone = [f"{stack.name}.{i}" for stack in stacks for i in stack.templates]
    left = [name for name in names if not any(name == g or name.startswith(f"{g}.") for g in gone)]
    return all((name in recomputed) == (i % every == 0) for i, name in enumerate(left))
