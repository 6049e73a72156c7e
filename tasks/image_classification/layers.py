"""Which layers train, and how fast: frozen parts, the head beside adapters, and rates that fall with depth."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lit_fsdp.adapters.layers import clean_name
from lit_fsdp.quantization.layers import is_named

BACKBONE = "backbone"  # in freeze: all but the head


def freeze_modules(model: nn.Module, names: Sequence[str], head: Sequence[str]) -> None:
    """Turn off gradients of modules or parameters, in place.

    Args:
        model: Not sharded yet.
        names: In full, their last parts, or patterns with ``*``; ``backbone`` is all but the head.
        head: Modules of the head.
    """
    parameters = dict(model.named_parameters())
    for wanted in names:
        if wanted == BACKBONE:
            hits = [name for name in parameters if not _is_inside(name, head)]
        else:
            hits = [name for name in parameters if is_named(name, [wanted])]
        if not hits:
            raise ValueError(f"freeze: got {wanted!r}: the model has no such module; expected a name such as layers.0")
        for name in hits:
            parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"freeze: got {list(names)}: nothing is left to train; leave out the head")


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def rest_frozen(model: nn.Module) -> None:
    """Let modules of which nothing trains compute as in evaluation: batch statistics stay, nothing is dropped."""
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def list_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks of a model without adapters, from the first to the last.

    They are elements of lists of modules, with two or more weights each: a convolution and its norm are part of a
    block. Of lists inside of lists the innermost are taken whose elements, all of one class, hold half of what those
    of any class do: layers, and not stages or stems.
    """
    groups: dict[str, dict[str, int]] = {}  # class of the elements -> name and size of each
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for i, child in enumerate(module):
                if sum(p.ndim >= 2 for p in child.parameters()) >= 2:
                    size = sum(p.numel() for p in child.parameters())
                    groups.setdefault(type(child).__name__, {})[f"{name}.{i}".removeprefix(".")] = size
    groups = {kind: sizes for kind, sizes in groups.items() if len(sizes) >= 2}
    most = max((sum(sizes.values()) for sizes in groups.values()), default=0)
    found = {name for sizes in groups.values() if 2 * sum(sizes.values()) >= most for name in sizes}
    innermost = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return [name for name, _ in model.named_modules() if name in innermost]


def measure_distances(model: nn.Module, blocks: Sequence[str], layer_decay: float) -> dict[str, int]:
    """Return how many blocks, its own counted, lie between each parameter and the head, by its name.

    What comes before the first block is farthest away, as if it were a block. What lies between blocks belongs to the
    next one, and what comes after the last to the head.

    Args:
        model: As it will train, not sharded yet.
        blocks: Names of its blocks in order, from before it had adapters.
        layer_decay: Factor on the learning rate; refused where it would change nothing.
    """
    if not blocks:
        raise ValueError(f"layer_decay: got {layer_decay}: no blocks found in {type(model).__name__}; leave it out")
    rank_zero_info(f"layer_decay: {len(blocks)} blocks, from {blocks[0]} to {blocks[-1]}")
    distances: dict[str, int] = {}
    waiting: list[str] = []
    for name, _ in model.named_parameters():
        block = next((i for i, prefix in enumerate(blocks) if name.startswith(f"{prefix}.")), None)
        if block is None:
            waiting.append(name)
            continue
        distances |= dict.fromkeys(waiting, len(blocks) - block if block else len(blocks) + 1)
        waiting = []
        distances[name] = len(blocks) - block
    distances |= dict.fromkeys(waiting, 0)
    if not any(distances[name] for name, p in model.named_parameters() if p.requires_grad):
        raise ValueError(f"layer_decay: got {layer_decay}: no block trains, only what comes after them; leave it out")
    return {clean_name(name): distance for name, distance in distances.items()}
