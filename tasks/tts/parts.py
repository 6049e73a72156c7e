"""The parts of a speech model: how many parameters they have, and which of them train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lit_fsdp.quantization.layers import count_weights
from lit_fsdp.tasks.tts.families.family import Family


def describe_parameters(parts: Mapping[str, nn.Module | None]) -> str:
    """Return the number of parameters of each part, and how many of them train, as a table."""
    rows = [(name, total, trained) for name, (total, trained) in count_parts(parts).items() if total]
    rows.append(("all", sum(total for _, total, _ in rows), sum(trained for _, _, trained in rows)))
    lines = [f"{name:<16}{total:>16,}{trained:>16,}" for name, total, trained in rows]
    return "\n".join([f"{'parameters':<16}{'all':>16}{'trained':>16}", *lines])


def count_parts(parts: Mapping[str, nn.Module | None]) -> dict[str, tuple[int, int]]:
    """Return weights and trainable weights of each part, by name; what two parts share counts for the first."""
    counts, seen = {}, set[int]()
    for name, part in parts.items():
        own = {n: p for n, p in part.named_parameters() if id(p) not in seen} if part is not None else {}
        seen |= {id(p) for p in own.values()}
        sizes = count_weights(part) if part is not None else {}
        counts[name] = (sum(sizes[n] for n in own), sum(sizes[n] for n, p in own.items() if p.requires_grad))
    return counts


def freeze_parts(model: nn.Module, family: Family, names: Sequence[str]) -> None:
    """Let named parts of a model not train.

    Raises:
        ValueError: The model has no such part, or nothing is left.
    """
    check_parts(family, names)
    beginnings = tuple(b for name in names for b in family.parts[name])
    for name, parameter in model.named_parameters():
        if beginnings and name.startswith(beginnings):
            parameter.requires_grad_(False)


def check_parts(family: Family, names: Sequence[str]) -> None:
    """Refuse to freeze what a model does not have, or all of it.

    Raises:
        ValueError: With the name.
    """
    if unknown := sorted(set(names) - family.parts.keys()):
        raise ValueError(f"freeze: got {', '.join(unknown)}: expected some of {', '.join(family.parts)}")
    if set(names) == family.parts.keys():
        raise ValueError("freeze: got all parts: nothing is left to train; leave one out, or set lora")
