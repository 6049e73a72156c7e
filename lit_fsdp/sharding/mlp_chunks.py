"""The MLPs of recomputed blocks run over pieces of the sequence, so that what they compute inside is never there whole.

Note [MLPs in pieces]: an MLP looks at one token at a time, and what it computes inside is several times as wide as
what it is given. Each piece of the sequence is recomputed on its own, right before its own backward, inside of the
block that is recomputed. So recomputation of the block has to stop before its MLP, or that would be computed once more.
It stops at the last tensor that anybody has saved, which is the input of the MLP: pieces save nothing of their own, and
read theirs from it. Where a norm or dropout comes after the MLP and saves something, recomputation goes on to there,
and the MLP is computed a third time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# How models of Transformers call what comes after attention; seen in 5.23.
NAMES = ("mlp", "feed_forward", "ffn", "ff", "moe", "block_sparse_moe", "shared_mlp", "DenseReluDense")
# What widens beside the part with such a name, in models that have both: it would stay whole.
_BESIDE = ("experts", "mlps", "ffn_output")
# Where torch has what looks from one token to others.
_MIXING = tuple(
    f"torch.nn.modules.{name}" for name in ("batchnorm", "instancenorm", "fold", "padding", "pooling", "rnn")
)
_SETTING = "activation_checkpointing.mlp_chunks"


def split_mlps(model: nn.Module, num_chunks: int, blocks: Sequence[str], options: Mapping[str, Any]) -> None:
    """Let the MLPs of recomputed blocks run over pieces of the sequence.

    Only their ``forward`` is replaced, as that of the blocks.

    Args:
        model: Not sharded.
        num_chunks: Pieces of the sequence, at most one for each token.
        blocks: Names of the recomputed blocks.
        options: Of ``checkpoint``, as for the blocks.

    Raises:
        ValueError: A block has no MLP, or one in which tokens depend on each other. Nothing is changed then.
    """
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            raise ValueError(
                f"{_SETTING}: got {num_chunks}, and config.output_router_logits of {name or type(module).__name__} is "
                "true: the loss of its routers would read pieces in another order; set it to false, or leave "
                "mlp_chunks out"
            )
    found = [name for block in blocks for name in _find_mlps(model, block, num_chunks)]
    for name in found:
        mlp = model.get_submodule(name)
        mlp.forward = _InPieces(mlp.forward, name, num_chunks, options)


def _find_mlps(model: nn.Module, block: str, num_chunks: int) -> list[str]:
    """Return the outermost parts of a block that have the name of an MLP."""
    found: list[str] = []
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        is_named = name != block and name.rpartition(".")[2] in NAMES and next(module.parameters(), None) is not None
        if not is_named or any(name.startswith(f"{outer}.") for outer in found):
            continue
        found.append(name)
        for inner, part in module.named_modules(prefix=name):
            if _mixes_tokens(part):
                raise ValueError(
                    f"{_SETTING}: got {num_chunks}: {inner}, a {type(part).__name__}, lets tokens depend on each "
                    "other, so that pieces would compute something else; leave mlp_chunks out"
                )
    module = model.get_submodule(block)
    if found and (beside := [name for name in _BESIDE if hasattr(module, name)]):
        raise ValueError(
            f"{_SETTING}: got {num_chunks}: block {block}, a {type(module).__name__}, computes {beside[0]} beside "
            f"{found[0]}, which would stay whole; leave mlp_chunks out"
        )
    if not found:
        parts = ", ".join(name for name, _ in module.named_children())
        raise ValueError(
            f"{_SETTING}: got {num_chunks}: block {block}, a {type(module).__name__}, has no part called "
            f"{', '.join(NAMES[:-1])} or {NAMES[-1]}, only {parts or 'none'}; leave mlp_chunks out"
        )
    return found


def _mixes_tokens(part: nn.Module) -> bool:
    if isinstance(part, nn.GroupNorm | nn.MultiheadAttention) or hasattr(part, "expert_capacity"):
        return True
    modules = {one.__module__ for one in type(part).__mro__}
    if "torch.nn.modules.conv" in modules:
        return any(size > 1 for size in part.kernel_size)  # type: ignore[union-attr]
    return not modules.isdisjoint(_MIXING)


class _InPieces:
    """The ``forward`` of an MLP, over pieces; see Note [MLPs in pieces]. Not a function, so that copies are right."""

    def __init__(self, forward: Any, name: str, num_chunks: int, options: Mapping[str, Any]) -> None:
        self.forward, self.name, self.num_chunks, self.options = forward, name, num_chunks, dict(options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {key: value for key, value in [*enumerate(args), *kwargs.items()] if isinstance(value, Tensor)}
        self._check(tensors)
        num_tokens = next(iter(tensors.values())).shape[-2]
        num_pieces = min(self.num_chunks, num_tokens)
        if num_pieces < 2:
            return self.forward(*args, **kwargs)

        # Without the tensors: what computes a piece again lives as long as the graph, and they must not.
        keys = list(tensors)
        others = [None if i in tensors else value for i, value in enumerate(args)]
        named = {key: None if key in tensors else value for key, value in kwargs.items()}
        pieces = _Pieces(list(tensors.values()), num_pieces)
        place = next(iter(tensors.values())).new_empty(0)  # tells ``checkpoint`` whose random state it has to keep
        rows = next(iter(tensors.values())).shape[:-2]

        def run(i: int, _: Tensor) -> Any:
            given = dict(zip(keys, pieces.take(i), strict=True))
            return self.forward(
                *(given.get(i, value) for i, value in enumerate(others)),
                **{key: given.get(key, value) for key, value in named.items()},
            )

        # Hooks of the block would save what ``checkpoint`` is given, and recompute the block up to the last piece.
        with saved_tensors_hooks(_leave, _leave):
            made = [checkpoint(run, i, place, use_reentrant=False, **self.options) for i in range(num_pieces)]
        if not isinstance(made[0], tuple):
            return self._join(made, rows, pieces.sizes)
        return tuple(self._join(parts, rows, pieces.sizes) for parts in zip(*made, strict=True))

    def _join(self, parts: Sequence[Any], rows: torch.Size, sizes: Sequence[int]) -> Any:
        """Return values of all tokens from those of pieces: [*rows, tokens, ...] or [rows x tokens, ...]."""
        if all(part is None for part in parts):
            return None
        if all(isinstance(part, Tensor) for part in parts):
            if all(part.shape[:-1] == (*rows, size) for part, size in zip(parts, sizes, strict=True)):
                return torch.cat(list(parts), -2)
            if all(part.shape[:1] == (rows.numel() * size,) for part, size in zip(parts, sizes, strict=True)):
                split = [part.unflatten(0, (rows.numel(), size)) for part, size in zip(parts, sizes, strict=True)]
                return torch.cat(split, 1).flatten(0, 1)
        raise RuntimeError(
            f"{_SETTING}: {self.name} returns what is not one value for each token, which cannot be put together from "
            "pieces; leave mlp_chunks out"
        )

    def _check(self, tensors: Mapping[Any, Tensor]) -> None:
        shapes = {tensor.shape[:-1] for tensor in tensors.values()}
        if len(shapes) != 1 or not next(iter(shapes)):
            raise RuntimeError(
                f"{_SETTING}: {self.name} is not called with tensors [..., tokens, width] of the same tokens alone; "
                "leave mlp_chunks out"
            )


class _Pieces:
    """The pieces of what an MLP is given: in forward those of its graph, in backward those of what the block keeps."""

    def __init__(self, tensors: Sequence[Tensor], num_pieces: int) -> None:
        size, rest = divmod(tensors[0].shape[-2], num_pieces)
        self.sizes = [size + (i < rest) for i in range(num_pieces)]
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._kept: Any = None
        if torch.is_grad_enabled():
            # First of all: where nothing is saved after this, recomputation of the block ends here.
            self._kept = _Keep.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        self._left = self._split(tensors)

    def take(self, i: int) -> list[Tensor]:
        """Return a piece of each tensor, and let go of it."""
        if i not in self._left:
            self._left = self._split([tensor.detach() for tensor in self._kept.grad_fn.saved_tensors])
            for pieces in self._left.values():
                for piece, needs_grad in zip(pieces, self._needs_grad, strict=True):
                    piece.requires_grad_(needs_grad)
        return [piece.contiguous() for piece in self._left.pop(i)]

    def _split(self, tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        # Not tensor_split, of which each piece would have a gradient of the size of the whole.
        split = [tensor.split(self.sizes, -2) for tensor in tensors]
        return {i: list(pieces) for i, pieces in enumerate(zip(*split, strict=True))}


class _Keep(torch.autograd.Function):
    """Saves tensors; nothing else."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Any:
        raise AssertionError("nobody computes with what it returns")


def _leave(tensor: Tensor) -> Tensor:
    return tensor
