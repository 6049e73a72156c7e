"""AdamW with 8-bit state on sharded parameters, with the kernels of bitsandbytes.

Note [Blocks do not cross rows]: bitsandbytes quantizes the state in blocks of 256 values that share a scale. It cuts
them from a flat tensor, so on shards they would depend on the number of ranks, and a checkpoint could not be read at
another one. Here each row (index 0; all that follows flattened) has blocks of its own: codes have the parameter's
shape, scales are [rows, blocks of a row], both sharded like the parameter. Which bytes a block holds then
depends on nothing but the parameter. Where a row is a multiple of 256 long, which is so in most large models,
these are the blocks of bitsandbytes itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lit_fsdp.optim.sharded_optimizer import ShardOptimizer, make_zeros, read_steps
from lit_fsdp.quantization.kernels import load_kernels
from lit_fsdp.sharding.torch_internals import to_local

BLOCK_SIZE = 256  # fixed in the kernels of bitsandbytes
MIN_8BIT_SIZE = 4096  # as in bitsandbytes, but of the whole parameter, not of a shard
MIN_ROW_LENGTH = 128  # below, more than half of a block would be empty
_MIN_PAGED_SIZE = 100_000  # as in bitsandbytes: smaller tensors stay on the GPU
# How many elements one call of a kernel gets: bounds the float32 copies on the CPU and fits its 32-bit sizes.
CHUNK_SIZE = 1 << 24
_8BIT_NAMES = ("codes1", "codes2", "absmax1", "absmax2")


@dataclass(frozen=True)
class _CodeBook:
    """The 256 values that codes stand for, as shares of the largest of their block."""

    values: Tensor
    zero_code: int


class AdamW8bit(ShardOptimizer):
    """AdamW that keeps its two running means in 8 bits each; see Note [Blocks do not cross rows].

    About 2 bytes of state for each parameter instead of 8. Parameters of fewer than 4096 elements, or with rows
    of fewer than 128, keep float32 state. No collectives.

    Args:
        params: Parameters, sharded over dimension 0 or whole, or groups of them.
        lr: Learning rate.
        betas: Decay of the running means of gradient and squared gradient.
        eps: Keeps steps of tiny gradients finite.
        weight_decay: Decoupled, as in ``torch.optim.AdamW``.
        is_paged: Keep large states in memory that the GPU's driver moves to the host when the GPU runs out of it.

    Raises:
        ValueError: A parameter has a dtype, a place or a sharding it does not work with.
        ModuleNotFoundError: bitsandbytes is not installed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        is_paged: bool = False,
    ) -> None:
        _load_functional()
        self._is_paged = is_paged
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise ValueError(
                    f"AdamW8bit: got a parameter of {parameter.dtype}: its kernels compute in float32; use AdamW"
                )
            if self._is_paged and parameter.device.type != "cuda":
                raise ValueError(
                    f"AdamW8bit: got is_paged with a parameter on {parameter.device.type}: pages move between GPU and "
                    "host memory, and this state would be in host memory anyway; leave is_paged out"
                )

    @override
    def update(self, work: list[tuple[Tensor, dict[str, Any]]]) -> None:
        for parameter, group in work:
            self._update(parameter, group)
        if self._is_paged:
            torch.cuda.synchronize()  # pages are also read by the CPU, which does not wait for kernels

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.count_step(parameter)
        local, gradient = to_local(parameter), to_local(parameter.grad)  # type: ignore[arg-type]
        if not local.numel():  # this rank has no row of a small parameter
            return
        num_rows = local.shape[0] if local.ndim else 1
        rows = local.reshape(num_rows, -1)  # [rows, length of a row]; a copy if the layout is unusual
        update = self._update_8bit if is_8bit(parameter.shape) else self._update_32bit
        update(rows, gradient.to(local.dtype).reshape(rows.shape), state, group)
        if not local.is_contiguous():  # addresses are not compared: tensors without values have none
            local.copy_(rows.reshape(local.shape))

    @override
    def name_state(self, parameter: Tensor) -> list[str]:
        return [*(_8BIT_NAMES if is_8bit(parameter.shape) else ("exp_avg", "exp_avg_sq"))]

    @override
    def make_state(self, parameter: Tensor, like: Tensor) -> list[Tensor]:
        if not is_8bit(parameter.shape):
            return [make_zeros(like, torch.float32) for _ in range(2)]
        num_blocks = ceil(parameter.shape[1:].numel() / BLOCK_SIZE)
        scales = [make_zeros(like.flatten(1)[:, :num_blocks], torch.float32) for _ in range(2)]
        return [*(self._make_codes(like) for _ in range(2)), *scales]

    def _make_codes(self, parameter: Tensor) -> Tensor:
        local = to_local(parameter)
        is_aligned = parameter.shape[1:].numel() % BLOCK_SIZE == 0  # else kernels get copies with padding
        if local.is_meta or not (self._is_paged and is_aligned and local.numel() >= _MIN_PAGED_SIZE):
            return make_zeros(parameter, torch.uint8)
        kernels = _load_functional()
        pages: Tensor = kernels.get_paged(*local.shape, dtype=torch.uint8, device=local.device)
        kernels.fill(pages, 0)
        return pages

    def _update_32bit(self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = (to_local(state[name]).view(rows.shape) for name in ("exp_avg", "exp_avg_sq"))
        first = (exp_avg, beta1, group["eps"], read_steps(state), group["lr"])
        second = (exp_avg_sq, beta2)
        _load_functional().optimizer_update_32bit(
            "adam", gradient.contiguous(), rows, *first, *second, weight_decay=group["weight_decay"]
        )

    def _update_8bit(self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        tensors = [to_local(state[name]) for name in _8BIT_NAMES]
        for pages in filter(_is_pages, tensors):
            _load_functional().prefetch_tensor(pages)
        chunk_rows = max(1, CHUNK_SIZE // rows.shape[1])
        for start in range(0, rows.shape[0], chunk_rows):
            chunk = slice(start, start + chunk_rows)
            parts = []
            for tensor in tensors:
                parts.append(tensor.view(rows.shape[0], -1)[chunk])
                if _is_pages(tensor):
                    parts[-1].is_paged = True  # type: ignore[attr-defined]  # else bitsandbytes takes it for host memory
            self._update_chunk(rows[chunk], gradient[chunk], parts, read_steps(state), group)

    def _update_chunk(
        self, rows: Tensor, gradient: Tensor, state: list[Tensor], step: int, group: dict[str, Any]
    ) -> None:
        books = make_code_books(rows.device)
        codes1, codes2, absmax1, absmax2 = state
        updated = (rows, codes1, codes2)
        missing = -rows.shape[1] % BLOCK_SIZE
        if missing:
            zeros = (0.0, *(float(book.zero_code) for book in books))
            rows, codes1, codes2 = (pad(t, (0, missing), value=z) for t, z in zip(updated, zeros, strict=True))
            gradient = pad(gradient, (0, missing))
        # The kernel for the CPU counts scales as one list.
        tables = (*(book.values for book in books), absmax1.view(-1), absmax2.view(-1))
        settings = (*group["betas"], 0.0, 0.0, group["eps"], step, group["lr"])
        _load_functional().optimizer_update_8bit_blockwise(
            *("adam", gradient.contiguous(), rows, codes1, codes2, *settings, *tables),
            weight_decay=group["weight_decay"],
        )
        if missing:
            for own, copy in zip(updated, (rows, codes1, codes2), strict=True):
                own.copy_(copy[:, : own.shape[1]])

    # Checkpoints: pages look like host memory to torch, so they are exchanged as tensors on the GPU.

    @override
    def state_dict(self) -> dict[str, Any]:
        state_dict = super().state_dict()
        if not self._is_paged:
            return state_dict
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():
            copies = {}
            for name, value in state.items():
                if _is_pages(value):
                    copies[name] = make_zeros(parameters[number].detach(), value.dtype)
                    to_local(copies[name]).copy_(value)
            state_dict["state"][number] = {**state, **copies}
        return state_dict

    @override
    def take_over(self, parameter: Tensor, value: Tensor, old: Tensor | None) -> Tensor:
        if not self._is_paged or value.dtype != torch.uint8:
            return super().take_over(parameter, value, old)
        codes = self._make_codes(parameter.detach()) if old is None else old  # pages are never given back
        to_local(codes).copy_(to_local(value))
        return codes


@cache
def make_code_books(device: torch.device) -> tuple[_CodeBook, _CodeBook]:
    """Return what the codes of the two means stand for, which is kept: for a dry run, make it before."""
    maps = [_load_functional().create_dynamic_map(signed=is_signed) for is_signed in (True, False)]
    first, second = (_CodeBook(m.to(device), int((m == 0).nonzero()[0])) for m in maps)
    return first, second


def is_8bit(shape: torch.Size) -> bool:
    """Whether ``AdamW8bit`` keeps the state of a parameter of this whole shape in 8 bits."""
    return shape.numel() >= MIN_8BIT_SIZE and len(shape) > 1 and shape[1:].numel() >= MIN_ROW_LENGTH


def _is_pages(tensor: Tensor) -> bool:
    return getattr(tensor, "is_paged", False)  # set by bitsandbytes


def _load_functional() -> Any:
    return load_kernels("8-bit AdamW").functional
