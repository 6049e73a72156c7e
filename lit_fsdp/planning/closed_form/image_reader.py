"""Rules for images: their patches, the tokens that are put before these, and heads over what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from lit_fsdp.planning.closed_form.linear_reader import get_features, list_linears, read_linear
from lit_fsdp.planning.closed_form.reader import Reader, UnreadableModuleError, check_dropouts, get_dropout, list_filled
from lit_fsdp.planning.closed_form.tape import FLOAT32, INDEX

_FIRST = ("cls_token", "distillation_token")
_LATE = "register_tokens"  # joined to the others when positions were added
_POSITIONS = "position_embeddings"
_UNUSED = "mask_token"  # of pretraining


def find_embeddings(model: nn.Module, convolution: str) -> str | None:
    """Return the name of the innermost module around the convolution of the patches that has parameters of its own."""
    return next((name for name in list_parents(convolution) if _list_own(model.get_submodule(name))), None)


def list_parents(name: str) -> list[str]:
    """Return the names of the modules around one, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def count_tokens(embeddings: nn.Module, width: int) -> int:
    """Return how many tokens of its own a module puts before the patches, such as one for the class."""
    own = _list_own(embeddings)
    return sum(p.numel() // width for key, p in own.items() if "token" in key and key != _UNUSED)


def read_pixels(reader: Reader, convolution: Any, num_patches: int) -> int:
    """Add the images of the batch, as the model gets them."""
    tape = reader.tape
    area = convolution.kernel_size[0] * convolution.kernel_size[1]
    pixels = reader.rows * num_patches * area * convolution.in_channels
    tape.batch_bytes = pixels * FLOAT32 + reader.rows * INDEX
    x = tape.add_value(0)
    if reader.is_mixed:
        x = tape.add("mix", (x,), pixels * FLOAT32)
        tape.hold(x)
    if tape.itemsize != FLOAT32:
        x = tape.add("to", (x,), pixels * tape.itemsize)
        tape.hold(x)  # FSDP2 passes it to the root, which holds what it was called with
    return x


def read_patches(reader: Reader, convolution: Any, x: int, num_patches: int) -> int:
    """Add a convolution that makes one token of each patch."""
    area, width = convolution.kernel_size[0] * convolution.kernel_size[1], convolution.out_channels
    flops = 2 * reader.rows * num_patches * area * convolution.in_channels * width
    weights = reader.list_trained(convolution.weight, convolution.bias)
    options: dict[str, Any] = {"flops": flops, "backward_flops": flops * bool(weights)}
    size = reader.rows * num_patches * width * reader.tape.itemsize
    return reader.tape.add("convolution", (x,), size, saves=(x,), weights=weights, **options)


def read_tokens(reader: Reader, name: str, module: Any, x: int, num_patches: int) -> int:
    """Add what puts tokens before the patches, and adds positions, which may be those of images of another size.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    tape, own = reader.tape, _list_own(module)
    unknown = [key for key in own if key not in (*_FIRST, _LATE, _POSITIONS, _UNUSED)]
    filled = list_filled(module)
    if unknown or len(filled) != 1:
        raise UnreadableModuleError(name, f"patches with {', '.join(unknown) or ', '.join(filled)}")
    check_dropouts(name, module, ("dropout",))
    row = tape.sizes[x] // num_patches  # of one token of every image
    width = row // reader.rows // tape.itemsize
    first = [own[key] for key in _FIRST if key in own]
    num_tokens = num_patches + sum(p.numel() // width for p in first)
    if first:
        x = tape.add("cat", (x,), num_tokens * row, weights=reader.list_trained(*first))
    if _POSITIONS in own:
        x = _add_positions(reader, name, module, x, (num_patches, num_tokens))
    if _LATE in own:
        # Gradients of what is before and after them come one by one, each of all tokens.
        weights = reader.list_trained(own[_LATE])
        x = tape.add("cat", (x,), reader.length * row, weights=weights, backward_temp=tape.sizes[x])
    return tape.add_dropout(x, get_dropout(module, "dropout"))


def _add_positions(reader: Reader, name: str, module: Any, x: int, counts: tuple[int, int]) -> int:
    tape, table = reader.tape, getattr(module, _POSITIONS)
    (num_patches, num_tokens), (num_known, width) = counts, table.shape[-2:]
    of_patches = num_known - (num_tokens - num_patches)
    stored = next((n for m in module.modules() if (n := getattr(m, "num_patches", None)) is not None), of_patches)
    if stored != of_patches:
        raise UnreadableModuleError(name, f"{num_known} positions for {stored} patches")
    weights = reader.list_trained(table)
    if num_known == num_tokens:
        return tape.add("add", (x,), tape.sizes[x], weights=weights, shares_grad=True)
    # Of images of another size: stretched like an image, by some in float32.
    itemsize = FLOAT32 if "float32" in inspect.getsource(type(module)) else tape.itemsize
    before, after = (n * width * itemsize for n in (of_patches, num_patches))
    # The gradient of all of it is put together of two, which are as large as it.
    options: dict[str, Any] = {"forward_temp": before * (itemsize != tape.itemsize)}
    options["backward_temp"] = before + num_known * width * tape.itemsize
    y = tape.add("upsample", (), after, weights=weights, **options)
    y = tape.add_cast(y, itemsize, tape.itemsize)
    return tape.add_sum(x, tape.add("cat", (y,), num_tokens * width * tape.itemsize, splits_grad=True))


def read_classifier(reader: Reader, name: str, module: nn.Module, x: int) -> int:
    """Add a head over the first token, or over it and the mean of the patches; return its output.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    tape, heads = reader.tape, list_linears(module)
    filled = list_filled(module)
    if len(heads) != 1 or len(filled) != 2:
        raise UnreadableModuleError(
            name, f"{len(heads)} heads" if len(heads) != 1 else f"a head of {', '.join(filled)}"
        )
    ((key, head),) = heads.items()
    one = tape.sizes[x] // reader.length
    num_in, width = get_features(head)[0], one // reader.rows // tape.itemsize
    pooled = tape.add("select", (x,), one)
    if num_in == 2 * width:
        mean = tape.add("mean", (x,), one, backward_temp=tape.sizes[x] - one)
        pooled = tape.add("cat", (pooled, mean), 2 * one, splits_grad=True)
    elif num_in != width:
        raise UnreadableModuleError(name, f"a head over {num_in} numbers, of tokens of {width}")
    return read_linear(reader, f"{name}.{key}" if name else key, head, pooled)


def _list_own(module: nn.Module) -> Mapping[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))
