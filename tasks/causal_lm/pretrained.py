"""Whether the adapters of a checkpoint belong to the model of a run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_fsdp.base_model import describe_base
from lit_fsdp.quantization import Quantization


def check_base(stored: dict[str, Any], pretrained: str, quantization: Quantization | None) -> None:
    """Refuse adapters of another model; warn of those trained over other roundings of it.

    Args:
        stored: From ``describe_base``, in the checkpoint.
        pretrained: The model of this run.
        quantization: Of this run.

    Raises:
        ValueError: Its weights are not those that the adapters were trained with.
    """
    own = describe_base(pretrained, quantization)
    if stored["fingerprint"] != own["fingerprint"]:
        raise ValueError(
            f"pretrained: got {pretrained!r}: the checkpoint holds adapters of {stored['name']!r}, whose weights are "
            "other ones; set pretrained to that model"
        )
    if stored["quantization"] != own["quantization"]:
        rank_zero_warn(
            f"quantization: the adapters of the checkpoint were trained with {stored['quantization']}, this run has "
            f"{own['quantization']}: losses will differ"
        )
