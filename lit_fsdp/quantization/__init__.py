"""4- and 8-bit weights as plain rows of bytes, which shard like any other tensor."""

from lit_fsdp.quantization.quantize import Quantization

__all__ = ["Quantization"]
