"""Files of safetensors that are written tensor by tensor, in any order, without ever holding one whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # readers view the bytes as numbers, the widest of which have 8


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes."""

    file: BufferedWriter
    begin: int
    shape: torch.Size
    dtype: torch.dtype


class TensorWriter:
    """Writes safetensors files whose shapes are known beforehand; a context manager.

    ``safetensors.torch.save_file`` wants all tensors of a file at once; here the host holds one tensor.

    Args:
        folder: Where the files are made.
        files: By file name, the tensors it shall hold; those on the meta device will do.

    Raises:
        ValueError: A tensor has a dtype that safetensors does not know.
    """

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._folder, self._files = folder, files
        self._open = ExitStack()
        self._places: dict[str, _Place] = {}

    def __enter__(self) -> TensorWriter:
        """Write the headers."""
        try:
            for name, tensors in self._files.items():
                self._begin(name, tensors)
        except BaseException:
            self._open.close()
            raise
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place. Each must be written once.

        Raises:
            ValueError: It holds NaN, which no model can use.
        """
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(
                f"{name} holds NaN: training broke down before this checkpoint, or nothing ever filled this buffer; "
                "take an earlier one"
            )
        place = self._places.pop(name)
        assert (tensor.shape, tensor.dtype) == (place.shape, place.dtype), name
        place.file.seek(place.begin)
        place.file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            if error is None:
                assert not self._places, f"not written: {sorted(self._places)[:5]}"

    def _begin(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        file = self._open.enter_context((self._folder / name).open("wb"))
        self._open.callback(_write_through, file)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        offsets: dict[str, int] = {}
        # The wide dtypes first, so that each tensor begins at a multiple of its own width.
        for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"{key} is stored as {tensor.dtype}, which safetensors does not know")
            end = begin + tensor.numel() * tensor.element_size()
            header[key] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            offsets[key], begin = begin, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        file.write(len(text).to_bytes(8, "little") + text)
        data = 8 + len(text)
        for key, tensor in tensors.items():
            self._places[key] = _Place(file, data + offsets[key], tensor.shape, tensor.dtype)


def _write_through(file: BufferedWriter) -> None:
    """Make sure that a power cut after the folder was renamed cannot leave it without its data."""
    file.flush()
    os.fsync(file.fileno())
