"""Safetensors files written tensor by tensor, in any order: the host holds one tensor, never a whole file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedWriter
from pathlib import Path

import torch
from torch import Tensor

from lit_fsdp.weights.safetensors_io import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # readers view the bytes as numbers, the widest of which have 8
_Places = dict[str, tuple[BufferedWriter, int, Tensor]]  # file, first byte, and a tensor of this shape and dtype


@contextmanager
def open_tensor_files(
    folder: Path, files: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write the headers of safetensors files; give the function that writes one tensor, to be called once for each.

    ``safetensors.torch.save_file`` wants all tensors of a file at once; here those given may be on the meta device.

    Raises:
        ValueError: A tensor has a dtype that safetensors does not know, or, when it is written, holds NaN.
    """
    places: _Places = {}
    with ExitStack() as stack:
        for file_name, tensors in files.items():
            file = stack.enter_context((folder / file_name).open("wb"))
            places |= _write_header(file, tensors)
        yield partial(_write_tensor, places)
        assert not places, f"not written: {sorted(places)[:5]}"


def _write_header(file: BufferedWriter, tensors: Mapping[str, Tensor]) -> _Places:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    begin = 0
    # The wide dtypes first, so that each tensor begins at a multiple of its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is stored as {tensor.dtype}, which safetensors does not know")
        end = begin + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        offsets[name], begin = begin, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: (file, 8 + len(text) + offsets[name], tensor) for name, tensor in tensors.items()}


def _write_tensor(places: _Places, name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and tensor.isnan().any():
        raise ValueError(
            f"{name} holds NaN: training broke down before this checkpoint, or nothing ever filled this buffer; "
            "take an earlier one"
        )
    file, begin, like = places.pop(name)
    assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), name
    file.seek(begin)
    file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
