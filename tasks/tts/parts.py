"""The parts of a speech model: how many parameters they have, which of them train, and which are quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lit_fsdp.adapters.lora import KEEPS_BASE, LoRA
from lit_fsdp.quantization.layers import count_weights
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.tasks.tts.families.family import Family


def make_parts_section(counts: Mapping[str, tuple[int, int]]) -> Section:
    """Return the number of parameters of each part, and how many of them train, for the report.

    Args:
        counts: As ``count_parts`` returns them.
    """
    sizes = {name: both for name, both in counts.items() if both[0]}
    rows = [(name, f"{total:,}", f"{trained:,}") for name, (total, trained) in sizes.items()]
    total, trained = (sum(column) for column in zip(*sizes.values(), strict=True))
    rows.append(("all", f"{total:,}", f"{trained:,}"))
    numbers = {name: {"num_parameters": total, "num_trainable": trained} for name, (total, trained) in sizes.items()}
    table = Table(title="Parts of the model", columns=("part", "parameters", "trainable"), rows=rows)
    return Section(title="Parts", name="parts", numbers=numbers, tables=[table])


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


def check_adapters(lora: LoRA | None, quantization: Quantization | None) -> None:
    """Refuse settings that mean nothing, or that could not be exported.

    Raises:
        ValueError: With the setting and the nearest fix.
    """
    if quantization is not None:
        quantization.check()
    if lora is None:
        return
    if lora.pretrained is not None:
        raise ValueError(
            f"lora.pretrained: got {lora.pretrained!r}: speech starts from no adapters; export the run that trained "
            "them, and set pretrained to its folder"
        )
    lora.check(is_quantized=quantization is not None)
    if quantization is not None and lora.init_lora_weights not in KEEPS_BASE:
        raise ValueError(
            f"lora.init_lora_weights: got {lora.init_lora_weights!r} with quantization: speech "
            "is exported over the model in full, which is not "
            f"what such adapters belong to: set {' or '.join(KEEPS_BASE)}"
        )


def list_outside_blocks(model: nn.Module, family: Family) -> list[str]:
    """Return what lies outside of blocks, by name: embeddings, projections, and the heads of all codebooks."""
    blocks = [n for n, m in model.named_modules() if any(fnmatchcase(type(m).__name__, p) for p in family.blocks)]
    inside = tuple(f"{name}." for name in blocks)
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return sorted(name for name in owners if not name.startswith(inside))
