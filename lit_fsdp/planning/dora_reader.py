"""The rule for DoRA (arXiv:2402.09353), as peft computes it: a LoRA whose rows have lengths that train."""

from __future__ import annotations

from typing import Any

from lit_fsdp.planning.reader import Reader
from lit_fsdp.planning.tape import FLOAT32
from lit_fsdp.quantization.layers import QuantizedLinear


def read_lengths(reader: Reader, module: Any, key: str, values: tuple[int, int], features: tuple[int, int]) -> int:
    """Add what DoRA without dropout makes of a layer and its LoRA; return the output of both.

    Args:
        reader: Has read both.
        module: The layer with adapters.
        key: Of the adapter.
        values: What the layer and the LoRA returned, that not scaled yet.
        features: Of the layer.
    """
    tape, base = reader.tape, module.base_layer
    result, low = values
    num_in, num_out = features
    size, item = tape.sizes[result], tape.itemsize
    dense, rank = num_in * num_out, module.r[key]
    is_quantized = isinstance(base, QuantizedLinear)
    # The product of the adapter's matrices goes through an identity matrix; then the weight, and the sum of both.
    weight = max(dense * (FLOAT32 + item if item != FLOAT32 else FLOAT32), 3 * dense * item) if is_quantized else 0
    temp = num_in * num_in * item + (weight or 2 * dense * item)
    half = tape.add("mm", (), num_in * rank * item, flops=2 * num_in * num_in * rank)
    product = tape.add("mm", (half,), dense * item, flops=2 * num_in * rank * num_out)
    tape.add("norm", (product,), 0, forward_temp=temp)
    inner = result if base.bias is None else tape.add("sub", (result,), size, shares_grad=True)
    lengths = reader.list_trained(module.lora_magnitude_vector[key].weight)
    kept_too = tape.add("mul", (inner,), size, saves=(inner,), weights=lengths, backward_temp=size)
    added = tape.add_pointwise("mul", tape.add("mul", (low,), size, saves=(low,), backward_temp=size))
    return tape.add_sum(result, tape.add_sum(kept_too, added))
