"""This rank's shard of one tensor of a model: which rows it holds, and how they are stored.

Whoever fills a model writes dense rows here, in any number of blocks, and then calls ``finish``. What becomes of
them, whether they are cast, quantized or split between a weight and its adapter, is decided here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Private, seen in torch 2.13: which rows of a sharded parameter are this rank's.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from typing_extensions import override

from lit_fsdp.adapters.initialization import decompose, is_decomposed
from lit_fsdp.adapters.layers import ADAPTER, clean_name, is_adapter_name, iterate_adapters
from lit_fsdp.quantization.layers import ABSMAX, NESTED, QuantizedLayer
from lit_fsdp.quantization.quantize import compress_absmax, dequantize_shard, quantize_rows, requantize


class ShardWriter:
    """Rows that are stored as they are, cast to the dtype of the tensor; of a split layer some of their columns.

    Args:
        target: Parameter or buffer, sharded by rows or not at all, with memory.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.shape: tuple[int, ...] = tuple(target.shape)
        self.dtype = target.dtype
        self.begin, self.local = get_local_shard(target)
        self._inner = get_inner_place(target)

    @property
    def holds_rows(self) -> bool:
        """Whether whole ones, or some of their columns."""
        return not self._inner

    @property
    def device(self) -> torch.device:
        """Where ranks compute and communicate: not where the shard is, if that is in host memory."""
        return (
            torch.device(self.target.device_mesh.device_type) if isinstance(self.target, DTensor) else self.local.device
        )

    @property
    def end(self) -> int:
        """The row after the last of this rank's; a scalar is one row."""
        return self.begin + (len(self.local) if self.local.dim() else 1)

    def write(self, first: int, rows: Tensor) -> None:
        """Store ``rows``, of which the first is row ``first`` of the whole tensor."""
        local = self.local if self.local.dim() else self.local.view(1)
        rows = rows[(slice(None), *self._inner)] if self._inner else rows
        local[first - self.begin : first - self.begin + len(rows)].copy_(rows)

    def finish(self) -> None:
        """Call it when all rows are written, on all ranks in the same order: ranks may exchange rows."""


class QuantizedShardWriter(ShardWriter):
    """Rows that are quantized on the way. Double quantization gathers the maxima of all ranks once.

    Args:
        layer: The quantized layer, with memory.
        name: Of one of its weights.
    """

    def __init__(self, layer: QuantizedLayer, name: str) -> None:
        super().__init__(getattr(layer, name))
        self.shape, self.dtype = tuple(layer.dense_shapes[name]), torch.float32
        self.layer, self.name = layer, name
        self._absmax: Tensor | None = None

    @override
    def write(self, first: int, rows: Tensor) -> None:
        place = slice(first - self.begin, first - self.begin + len(rows))
        rows = rows.to(self.device).reshape(-1, self.shape[-1])
        rows = rows.float() if rows.dtype == torch.float64 else rows
        codes, absmax = quantize_rows(rows, self.layer.quantization)
        self.local[place].copy_(codes.view(self.local[place].shape))
        found = self._get_absmax()[place]
        found.copy_(absmax.view(found.shape))

    @override
    def finish(self) -> None:
        local, self._absmax = self._get_absmax(), None
        _, stored = get_local_shard(getattr(self.layer, self.name + ABSMAX))
        if not self.layer.quantization.is_double:
            stored.copy_(local.view(torch.uint8))
            return
        nested = getattr(self.layer, self.name + NESTED)
        if len(self.shape) == 2:
            codes, second = compress_absmax(gather_rows(local, self.target, self.shape[0]))
            stored.copy_(codes[self.begin : self.end])
            nested.copy_(second)
            return
        seconds = torch.empty(len(local), nested.shape[-1], dtype=torch.uint8, device=local.device)
        for i, absmax in enumerate(local):  # each matrix lies on one rank
            codes, seconds[i] = compress_absmax(absmax)
            stored[i].copy_(codes)
        nested.copy_(gather_rows(seconds, self.target, self.shape[0]))

    def _get_absmax(self) -> Tensor:
        if self._absmax is None:
            num_blocks = self.layer.quantization.count_blocks(self.shape[-1])
            self._absmax = torch.empty(*self.local.shape[:-1], num_blocks, device=self.device)
        return self._absmax


class DecomposedShardWriter(ShardWriter):
    """Rows of a weight out of which an adapter is made before they are stored; see ``decompose``.

    Every rank holds the whole weight, in ``float32``, while it is decomposed.

    Args:
        writer: Where what is left of the weight goes.
        layer: The layer of peft around it, with memory.
    """

    def __init__(self, writer: ShardWriter, layer: Any) -> None:
        super().__init__(writer.target)
        self.shape, self.dtype = writer.shape, writer.dtype
        self.writer, self.layer = writer, layer
        self._dense: Tensor | None = None

    @override
    def write(self, first: int, rows: Tensor) -> None:
        if self._dense is None:
            self._dense = torch.empty(self.end - self.begin, *self.shape[1:], device=self.device)
        self._dense[first - self.begin : first - self.begin + len(rows)].copy_(rows)

    @override
    def finish(self) -> None:
        dense, self._dense = self._dense, None
        if dense is None:
            dense = torch.empty(0, *self.shape[1:], device=self.device)
        whole = gather_rows(dense, self.target, self.shape[0])
        # Once, not on every rank: it takes long, and its last bits need not be the same everywhere.
        if not dist.is_initialized() or dist.get_rank() == 0:
            quantization: Any = getattr(self.layer.get_base_layer(), "quantization", None)
            factors = decompose(self.layer, whole, partial(requantize, settings=quantization))
        else:
            r = self.layer.r[ADAPTER]
            factors = whole.new_empty(r, self.shape[1]), whole.new_empty(self.shape[0], r), torch.empty_like(whole)
        a, b, rest = (factor.contiguous() for factor in factors)
        if dist.is_initialized():
            for tensor in (a, b, rest):
                dist.broadcast(tensor, src=0)
        self.writer.write(self.begin, rest[self.begin : self.end])
        self.writer.finish()
        for full, holder in ((a, self.layer.lora_A), (b, self.layer.lora_B)):
            factor = ShardWriter(holder[ADAPTER].weight)
            factor.write(factor.begin, full[factor.begin : factor.end])


def build_shard_writers(model: nn.Module, *, is_quantized: bool = False) -> dict[str, ShardWriter]:
    """Map names as they are in files to the shards to fill. What adapters add is left out, as it is in no file.

    ``is_quantized`` says that the files hold the codes of quantized layers, which are stored as they are.
    """
    around = {id(layer.get_base_layer()): layer for _, layer in iterate_adapters(model) if is_decomposed(layer)}
    found: dict[str, ShardWriter] = {}
    for name, module in model.named_modules():
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        quantized = module.dense_shapes if isinstance(module, QuantizedLayer) and not is_quantized else {}
        parts = {key + end for key in quantized for end in (ABSMAX, NESTED)}
        for key, tensor in (*module._parameters.items(), *kept.items()):
            full_name = f"{name}.{key}" if name else key
            if tensor is None or key in parts or is_adapter_name(full_name):
                continue
            writer = QuantizedShardWriter(module, key) if key in quantized else ShardWriter(tensor)
            if key == "weight" and id(module) in around:
                writer = DecomposedShardWriter(writer, around[id(module)])
            found[clean_name(full_name)] = writer
    return found


def init_magnitudes(layer: Any) -> None:
    """Let DoRA start at the lengths of the rows of the base weight, as it is stored; nothing without DoRA.

    The base weight must have its values, and the adapter add nothing yet.
    """
    if ADAPTER not in layer.lora_magnitude_vector:
        return
    base = layer.get_base_layer()
    magnitude = ShardWriter(layer.lora_magnitude_vector[ADAPTER].weight)
    if isinstance(base, QuantizedLayer):
        codes, absmax = (get_local_shard(getattr(base, key))[1] for key in ("weight", f"weight{ABSMAX}"))
        nested = getattr(base, f"weight{NESTED}", None)
        nested = None if nested is None else nested.to(codes.device)
        local = dequantize_shard(codes, absmax, nested, base.quantization, first=magnitude.begin)
    else:
        local = get_local_shard(base.weight)[1]
    magnitude.write(magnitude.begin, torch.linalg.norm(local.float(), dim=1))


def get_local_shard(target: Tensor) -> tuple[int, Tensor]:
    """Return which row of a tensor is the first of this rank's shard, and the memory of the shard."""
    if not isinstance(target, DTensor):
        return 0, target.detach()
    _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return (offset[0] if offset else 0), target.to_local().detach()


def get_inner_place(target: Tensor) -> tuple[slice, ...]:
    """Return which columns of its rows this rank holds, by dimension; empty if it holds all."""
    if not isinstance(target, DTensor):
        return ()
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if tuple(shape[1:]) == tuple(target.shape[1:]):
        return ()
    return tuple(slice(begin, begin + size) for begin, size in zip(offset[1:], shape[1:], strict=True))


def gather_rows(local: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """Return all ``num_rows`` rows of a tensor that is sharded as ``like`` is. All ranks must call it.

    ``local`` is this rank's shard, on the device on which ranks communicate.
    """
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size((num_rows, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), like.device_mesh, like.placements, shape=shape, stride=stride, run_check=False
    ).full_tensor()
