"""The rules for linear layers: dense, quantized, and with adapters."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_fsdp.adapters.layers import ADAPTER
from lit_fsdp.planning.closed_form.reader import Reader, UnreadableModuleError
from lit_fsdp.planning.closed_form.tape import FLOAT32, QUANTIZED
from lit_fsdp.quantization.layers import QuantizedLinear


def read_linear(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add a linear layer: dense, quantized, or with an adapter.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    tape = reader.tape
    if hasattr(module, "lora_A"):
        return _read_adapted(reader, name, module, x)
    if not is_linear(module):
        raise UnreadableModuleError(name, f"a {type(module).__name__}")
    num_in, num_out = get_features(module)
    num_rows = tape.sizes[x] // (num_in * tape.itemsize)
    flops = 2 * num_rows * num_in * num_out
    size = num_rows * num_out * tape.itemsize
    if isinstance(module, QuantizedLinear):
        is_4bit = module.quantization.type != "int8"
        bias: nn.Parameter | None = module.bias
        product = QUANTIZED[0] if is_4bit else QUANTIZED[1 if bias is None else 2]
        temp = num_in * num_out * tape.itemsize  # the dense weight; of 4 bits, in forward inside the kernel
        weights = reader.list_trained(bias)
        options: dict[str, Any] = {"forward_temp": 0 if is_4bit else temp, "backward_temp": temp, "weights": weights}
        options |= {"forward_moved": temp, "backward_moved": temp}  # written once in each
        return tape.add(product, (x,), size, flops=flops, backward_flops=flops * tape.needs_grad[x], **options)
    return read_product(reader, "mm" if module.bias is None else "addmm", x, size, flops, module.weight, module.bias)


def read_product(reader: Reader, name: str, x: int, num_bytes: int, flops: int, weight: Any, bias: Any = None) -> int:
    """Add a product with a matrix, which keeps what goes in if the matrix is trained."""
    is_trained = weight.requires_grad
    return reader.tape.add(
        name,
        (x,),
        num_bytes,
        saves=(x,) if is_trained else (),
        weights=reader.list_trained(weight, bias),
        flops=flops,
        backward_flops=flops * (is_trained + reader.tape.needs_grad[x]),
    )


def is_linear(module: nn.Module) -> bool:
    """Whether it multiplies by a matrix."""
    return isinstance(module, nn.Linear) or _is_conv1d(module) or hasattr(module, "lora_A")


def list_linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers directly inside a module."""
    return {key: child for key, child in module.named_children() if is_linear(child)}


def get_features(module: Any) -> tuple[int, int]:
    """Return how many numbers go into a linear layer, and come out."""
    module = getattr(module, "base_layer", module)
    if _is_conv1d(module):
        return module.weight.shape[0], module.weight.shape[1]
    return module.in_features, module.out_features


def _is_conv1d(module: nn.Module) -> bool:
    # By name: its class comes with all of Transformers.
    return type(module).__name__ == "Conv1D"


def _read_adapted(reader: Reader, name: str, module: Any, x: int) -> int:
    tape = reader.tape
    is_plain = hasattr(module, "is_plain") and module.is_plain()
    if is_plain and module.takes_base():
        return _read_with_base(reader, name, module, x)
    y = read_linear(reader, name, module.base_layer, x)
    for key, lora_a in module.lora_A.items():
        before, has_lengths = type(module.lora_dropout[key]), key in module.lora_magnitude_vector
        if before not in (nn.Identity, nn.Dropout) or (has_lengths and before is nn.Dropout):
            raise UnreadableModuleError(name, f"an adapter {'with dora ' * has_lengths}behind a {before.__name__}")
        dropped = tape.add_dropout(x, getattr(module.lora_dropout[key], "p", 0.0))
        low = read_linear(reader, name, lora_a, dropped)
        if is_plain:
            y = _read_up(reader, module.lora_B[key], y, low)
            continue
        added = read_linear(reader, name, module.lora_B[key], low)
        if has_lengths:
            y = _read_dora(reader, module, key, (y, added))
        else:
            y = tape.add_sum(y, tape.add_pointwise("mul", added))
    tape.release(x)  # also of what was dropped
    return y


def _read_with_base(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add a frozen layer and its adapter as one function, see Note [Adapter in one function]."""
    tape, base = reader.tape, module.base_layer
    down, up = module.lora_A[ADAPTER], module.lora_B[ADAPTER]
    with tape.without_graph():
        y = read_linear(reader, name, base, x)
        low = read_linear(reader, name, down, x)
    num_in, num_out = get_features(base)
    flops, wanted = 2 * (tape.sizes[low] // tape.itemsize), int(tape.needs_grad[x])  # of one number in or out
    num_rows = tape.sizes[x] // (num_in * tape.itemsize)
    dense = num_in * num_out * tape.itemsize * wanted if isinstance(base, QuantizedLinear) else 0
    added = tape.add(
        "addmm",
        (y, low, x),
        tape.sizes[y],
        saves=(x, low),
        weights=[*reader.list_trained(down.weight), *reader.list_trained(up.weight)],
        flops=flops * num_out,
        backward_flops=flops * (2 * num_out + (1 + wanted) * num_in) + 2 * num_rows * num_in * num_out * wanted,
        backward_temp=dense + tape.sizes[low],
        backward_moved=dense,
    )
    tape.keep(low)  # see _read_up
    tape.release(x)
    return added


def _read_up(reader: Reader, up: Any, y: int, low: int) -> int:
    """Add the product that adds to ``y``, see Note [Adapter in one function] in ``adapters/linear.py``."""
    tape, rank = reader.tape, up.weight.shape[1]
    flops = 2 * (tape.sizes[y] // tape.itemsize) * rank
    added = tape.add(
        "addmm",
        (y, low),
        tape.sizes[y],
        saves=(low,),
        weights=reader.list_trained(up.weight),
        shares_grad=True,
        flops=flops,
        backward_flops=2 * flops,
    )
    if tape.needs_grad[low]:
        tape.keep(low)  # a function of Python saves when it has run, so recomputation ends after it, not before
    return added


def _read_dora(reader: Reader, module: Any, key: str, values: tuple[int, int]) -> int:
    """Add what DoRA without dropout (arXiv:2402.09353), as peft computes it, makes of a layer and its LoRA.

    ``values`` are what both returned, that of the LoRA not scaled yet.
    """
    tape, base = reader.tape, module.base_layer
    result, low = values
    num_in, num_out = get_features(module)
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
