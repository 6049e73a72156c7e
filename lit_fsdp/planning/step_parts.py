"""What an estimate of a step is made from: the model, its micro-batches and the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.profiling.collectives import Traffic
from lit_fsdp.sharding.mesh import Mesh, MeshSizes
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.wrap import Unit


class NoEstimateError(ValueError):
    """There is no closed form of this step; says why."""


class Exchange(NamedTuple):
    """What ranks that work on the same rows send each other: tokens and heads from all to all, or of a split layer."""

    kind: Traffic
    num_bytes: int  # the full size, see ``count_wire_bytes``
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What CUDA's allocator takes for a traced step, if it is as its model, see Note [Caching allocator].

    Args:
        reserved_bytes: Taken from the driver where there is enough.
        steady_bytes: The least memory in which a second step runs without retries: never has to wait until memory that
            is free for the moment went back to the driver.
        least_bytes: The least memory in which the step works.
        num_retries: Of a step in that.
        expandable_bytes: As ``reserved_bytes``, with ``expandable_segments``.
    """

    reserved_bytes: int
    steady_bytes: int
    least_bytes: int
    num_retries: int
    expandable_bytes: int


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

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return self.rows * self.length

    def describe(self) -> str:
        """Return a few words."""
        rows = f"{self.rows:,} row{'s' * (self.rows > 1)} of {self.length:,} tokens"
        return f"{rows}, {'with' if self.is_masked else 'without'} a mask of attention"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many nodes, and how many ranks on each."""

    num_nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        """All of them."""
        return self.num_nodes * self.per_node

    def resolve(self, mesh: Mesh) -> MeshSizes:
        """Return how many ranks each dimension of a mesh has."""
        return mesh.resolve(world_size=self.world_size, ranks_per_node=self.per_node)


@dataclass(frozen=True, kw_only=True)
class ModelToTrain:
    """A model as it will be trained.

    Args:
        module: On the meta device, with adapters, quantized and cast as it will be; or sharded already.
        units: From ``plan_module``.
        dtypes: What the Trainer's precision comes to.
        optimizer: Its settings.
    """

    module: nn.Module
    units: Sequence[Unit]
    dtypes: MixedPrecision
    optimizer: Optimizer

    @property
    def compute_dtype(self) -> torch.dtype:
        """What it computes in: as the precision says, else the widest dtype of its parameters."""
        floating = [p.dtype for p in self.module.parameters() if p.is_floating_point()]
        return self.dtypes.build_policy().param_dtype or max(floating, key=lambda dtype: dtype.itemsize)
