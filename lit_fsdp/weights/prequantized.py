"""Files whose weights are quantized already, as Transformers saves a model of bitsandbytes.

They hold the same bytes as our layers, see Note [Rows of bytes] in ``quantize.py``, under other names: here each
weight gets the names and shapes of ours, so that a rank reads its rows of it as of any other tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_fsdp.quantization.layers import ABSMAX, NESTED, list_quantizable, list_unfit
from lit_fsdp.quantization.quantize import NESTED_BLOCK_SIZE, Quantization, dequantize
from lit_fsdp.weights.convert import plan_conversions
from lit_fsdp.weights.safetensors_io import StoredTensor, TensorFiles

_STATE = ".quant_state.bitsandbytes__"
_INT8_MAXIMA, _INT8_LAYOUT = ".SCB", ".weight_format"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


class QuantizedFiles(TensorFiles):
    """The tensors of a model's files, quantized weights under the names that our layers have for them.

    Files without such weights are as :class:`TensorFiles` has them.

    Args:
        folder: As there.

    Raises:
        ValueError: As there, or weights are quantized as our layers are not.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.quantized: dict[str, Quantization] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._made: dict[str, Tensor] = {}
        try:
            for name in list(self.tensors):
                if _STATE in name:
                    self._view_4bit(*name.split(_STATE))
                elif name.endswith(_INT8_MAXIMA):
                    self._view_8bit(name.removesuffix(_INT8_MAXIMA))
        except BaseException:
            self.__exit__()
            raise

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def copy_rows(self, name: str, begin: int, out: Tensor) -> None:
        if name in self._made:
            out.copy_(self._made[name][begin : begin + len(out)])
        else:
            super().copy_rows(name, begin, out)

    def get_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a weight had before, or has."""
        return self._dtypes.get(name, self.tensors[name].dtype)

    def read_dense(self, name: str) -> Tensor:
        """Return a quantized weight in the dtype that it had before."""
        codes, absmax = self.read(name), self.read(name + ABSMAX)
        nested = self.read(name + NESTED) if name + NESTED in self.tensors else None
        return dequantize(codes, absmax, nested, self.quantized[name], self._dtypes[name])

    def _view_4bit(self, name: str, kind: str) -> None:
        state: dict[str, Any] = json.loads(bytes(self.read(f"{name}{_STATE}{kind}")))
        parts = {part: self.tensors.pop(name + part, None) for part in _PARTS}
        codes, absmax = self.tensors[name], parts[".absmax"]
        settings = Quantization(type=kind, block_size=state["blocksize"], double_quant="nested_blocksize" in state)  # type: ignore[arg-type]
        rows, columns = _check_4bit(name, codes, state, settings)
        if absmax is None:
            raise ValueError(f"{codes.path}: {name}.absmax is missing; download the file again")
        num_blocks = settings.count_blocks(columns)
        self.tensors[name] = replace(codes, shape=(rows, columns // 2), dtype=torch.uint8)
        width = num_blocks * absmax.dtype.itemsize
        self.tensors[name + ABSMAX] = replace(absmax, shape=(rows, width), dtype=torch.uint8)
        if (nested := parts[".nested_absmax"]) is not None:
            self.tensors[name + NESTED] = nested
            maxima = self.read(name + NESTED)
            values = torch.cat([maxima, torch.tensor([state["nested_offset"]])]).view(torch.uint8)
            self._make(name + NESTED, values, nested)
        del self.tensors[f"{name}{_STATE}{kind}"]
        self.quantized[name], self._dtypes[name] = settings, getattr(torch, state["dtype"])

    def _view_8bit(self, layer: str) -> None:
        name = f"{layer}.weight"
        codes, maxima = self.tensors[name], self.tensors.pop(layer + _INT8_MAXIMA)
        if layer + _INT8_LAYOUT in self.tensors:
            if int(self.read(layer + _INT8_LAYOUT)):
                raise ValueError(f"{codes.path}: {name} is not stored row by row; save it with a newer bitsandbytes")
            del self.tensors[layer + _INT8_LAYOUT]
        if codes.dtype != torch.int8 or len(codes.shape) != 2 or maxima.dtype != torch.float32:
            raise ValueError(f"{codes.path}: {name} is stored as {codes.dtype} {codes.shape}: expected rows of int8")
        self.tensors[name] = replace(codes, dtype=torch.uint8)
        self.tensors[name + ABSMAX] = replace(maxima, shape=(codes.shape[0], 4), dtype=torch.uint8)
        self.quantized[name], self._dtypes[name] = Quantization(type="int8"), torch.float16

    def _make(self, name: str, values: Tensor, like: StoredTensor) -> None:
        self._made[name] = values
        self.tensors[name] = replace(like, shape=tuple(values.shape), dtype=values.dtype)


def _check_4bit(name: str, codes: StoredTensor, state: dict[str, Any], settings: Quantization) -> tuple[int, int]:
    """Return rows and columns of a weight; refuse one that our layers cannot hold."""
    shape = tuple(state["shape"])
    settings.check()
    num_bytes = math.prod(codes.shape) * codes.dtype.itemsize
    if len(shape) != 2 or 2 * num_bytes != math.prod(shape):
        raise ValueError(f"{codes.path}: {name} is stored in {num_bytes} bytes for a weight of {shape}")
    if state.get("nested_blocksize", NESTED_BLOCK_SIZE) != NESTED_BLOCK_SIZE:
        raise ValueError(f"{codes.path}: {name} has a second level of blocks that are not of {NESTED_BLOCK_SIZE}")
    if shape[1] % settings.block_size:
        raise ValueError(
            f"{codes.path}: {name} has rows of {shape[1]}, which do not divide into its blocks of "
            f"{settings.block_size}, so it cannot be sharded by rows; set pretrained to the model that it was made of"
        )
    return shape[0], shape[1]


def read_quantization(folder: Path, model: nn.Module | None = None) -> Quantization | None:
    """Return how the weights of a model's files are quantized, ``None`` if they are not.

    Args:
        folder: Of the files.
        model: On the meta device; its linear layers that are not quantized in the files are named in ``skip``.

    Raises:
        ValueError: They are quantized in several ways, or one is not of a layer that can be.
    """
    with QuantizedFiles(folder) as files:
        found = set(files.quantized.values())
        stored = {name: files.tensors[name] for name in files.quantized}
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(f"{folder}: its weights are quantized in {len(found)} ways: expected one for all of them")
    (settings,) = found
    if model is None:
        return settings
    # Files may have other names than the model, as they are saved under those of its first release.
    conversions, _ = plan_conversions(model, stored, model.state_dict(keep_vars=True))
    names = {c.first_target.removesuffix(".weight") for c in conversions if c.converter is None}
    known, unfit = list_quantizable(model), list_unfit(model)
    if name := min((n for n in names if n in unfit or n not in known), default=None):
        reason = unfit.get(name, f"a {type(model.get_submodule(name)).__name__} cannot be quantized")
        raise ValueError(
            f"{folder}: {name} is stored quantized, and cannot be computed with so ({reason}); set pretrained to the "
            "model that it was made of"
        )
    return replace(settings, skip_modules=tuple(name for name in known if name not in names))
