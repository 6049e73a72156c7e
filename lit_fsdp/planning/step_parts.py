"""What a walk along a training step is told, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lit_fsdp.profiling.memory import Kind

OUTSIDE = "(outside units)"


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The shape of a micro-batch.

    Args:
        rows: How many.
        length: Tokens of each; of an image, its patches and what the model puts before them.
        is_masked: Whether attention needs a mask: rows hold several documents, or are padded.
        shapes: Of its tensors, by name, for a model that reads its own step (``read_step``).
        num_bytes: Of its tensors, for such a model.
        is_mixed: Whether the step makes other images of those of the batch, and gives them to the model.
    """

    rows: int
    length: int
    is_masked: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    is_mixed: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"micro_batch.{name}: got {getattr(self, name)}: expected 1 or more")

    def describe(self) -> str:
        """Return a few words."""
        rows = f"{self.rows:,} row{'s' * (self.rows > 1)} of {self.length:,} tokens"
        return f"{rows}, {'with' if self.is_masked else 'without'} a mask of attention"


@dataclass(frozen=True, kw_only=True)
class UnitSizes:
    """Bytes of one unit on one rank.

    Args:
        label: Its name in tables.
        gathered: All its parameters, in the dtype of compute.
        cast: The shard in the dtype of compute, where that is another than it is stored in.
        reduce: What its gradients are reduced from, at full size.
        reduced: The shard that comes out, in the dtype of reduction.
        gradient: The shard of the gradient that is kept.
        kept: What stays of a gather after forward, where it is resharded to fewer ranks.
        last_gradient: The gradient of its last parameter, of which FSDP2 lets go later.
        reshards: Whether it is resharded after forward.
        trains: Whether it has a gradient.
        is_root: Whether it is the root.
        is_idle: Whether no step has a use for it.
        is_reached: Whether backward gathers it ahead: not what is frozen before the first unit that trains.
        num_parameters: How many it has.
    """

    label: str
    gathered: int
    cast: int
    reduce: int
    reduced: int
    gradient: int
    kept: int
    last_gradient: int
    reshards: bool
    trains: bool
    is_root: bool
    is_idle: bool
    is_reached: bool
    num_parameters: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The most that was alive during one part of the step.

    Args:
        phase: ``forward``, ``backward`` or ``optimizer``.
        unit: Which unit was computing.
        num_bytes: All of it.
        by_kind: Bytes of each kind.
        activations: Bytes of those by the part of the model that made them.
    """

    phase: str
    unit: str
    num_bytes: int
    by_kind: Mapping[Kind, int]
    activations: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class WalkSettings:
    """How a step goes.

    Args:
        num_shards: Ranks that share a copy of the model.
        is_replicated: Whether there are several copies.
        num_micro_batches: Accumulated in a step.
        holds_gradients: Whether only the last of them reduces.
        reduce_itemsize: Bytes of a number of the dtype that gradients are reduced in.
        casts_shards: Whether gradients are kept in another dtype than they are reduced in.
        forward_prefetch: Wrap gathered ahead in forward.
        backward_prefetch: Wrap gathered ahead in backward.
        saved_ops: Names of operators whose outputs are kept although a block is computed again.
        keeps_shards: Whether sharded gradients stay on the device.
    """

    num_shards: int
    is_replicated: bool
    num_micro_batches: int
    holds_gradients: bool
    reduce_itemsize: int
    casts_shards: bool
    forward_prefetch: int
    backward_prefetch: int
    saved_ops: frozenset[str]
    keeps_shards: bool


@dataclass
class Gradient:
    """The gradient of a value, in backward.

    Args:
        num_bytes: Of it.
        is_view: Whether it is a view, to which autograd adds nothing in place.
        refs: How many hold it.
    """

    num_bytes: int
    is_view: bool
    refs: int = 1
