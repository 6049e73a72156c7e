"""Everything the strategy can be told, checked as a whole before any process, collective or memory."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from lit_fsdp.errors import check_choices
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload, build_offload_policy
from lit_fsdp.sharding.float8 import Float8
from lit_fsdp.sharding.low_bit import describe_quantized
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.shard import Compile, Sharding
from lit_fsdp.sharding.tensor_parallel import describe_changed
from lit_fsdp.sharding.wrap import Wrap


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of ``FSDP2Strategy``, which documents them."""

    mesh: Mesh = field(default_factory=Mesh)
    wrap: Wrap = field(default_factory=Wrap)
    sharding: Sharding = field(default_factory=Sharding)
    mixed_precision: MixedPrecision | None = None
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    cpu_offload: CPUOffload | None = None
    compile: Compile | None = None
    float8: Float8 | None = None

    def check(self, *, world_size: int, ranks_per_node: int, device: torch.device) -> None:
        """Raise a ``ValueError`` with the nearest fix for what cannot work on these ranks."""
        for name, part in vars(self).items():
            check_choices(part, name)
        sizes = self.mesh.resolve(world_size=world_size, ranks_per_node=ranks_per_node)
        if sizes.sequence > 1 and sizes.tensor > 1:
            raise ValueError(
                f"mesh.tensor: got {sizes.tensor} with mesh.sequence {sizes.sequence}: the heads of attention are "
                "shared by one of them only; set one of them to 1"
            )
        size = self.sharding.reshard_after_forward
        if sizes.tensor > 1 and not isinstance(size, bool):
            raise ValueError(
                f"sharding.reshard_after_forward: got {size} with mesh.tensor {sizes.tensor}: split layers cannot stay "
                "gathered over some ranks alone; set true or false"
            )
        for name in ("gather_bits", "reduce_bits"):
            # Blocks have other neighbours on each rank of a split layer: what these ranks share would be rounded apart.
            if sizes.tensor > 1 and getattr(self.sharding, name) == 8:
                near = "leave it out" if name == "gather_bits" else "set 16, or leave it out"
                raise ValueError(
                    f"sharding.{name}: got 8 with mesh.tensor {sizes.tensor}: what the ranks of a split layer all hold "
                    f"would be rounded differently on each; {near}"
                )
        if sizes.tensor > 1 and self.float8 is not None:
            raise ValueError(
                f"mesh.tensor: got {sizes.tensor} with float8: torchao scales by the largest number of a whole weight, "
                "of which each rank has a part; set mesh.tensor to 1, or leave float8 out"
            )
        if sizes.tensor > 1 and self.compile is not None and self.compile.dynamic is not False:
            # The compiler follows sizes through DTensor without an end, seen in torch 2.13 and 2.15.
            raise ValueError(
                f"compile.dynamic: got {self.compile.dynamic} with mesh.tensor {sizes.tensor}: torch cannot compile "
                "split layers for changing sizes; set false"
            )
        reduced = self.mixed_precision.reduce_dtype if self.mixed_precision is not None else None
        if self.sharding.reduce_bits is not None and reduced not in (None, "float32"):
            raise ValueError(
                f"sharding.reduce_bits: got {self.sharding.reduce_bits} with mixed_precision.reduce_dtype {reduced}, "
                "which would round the sum as well; set that to float32"
            )
        self.wrap.check()
        self.sharding.check(sizes.num_shards)
        self.activation_checkpointing.check()
        build_offload_policy(self.cpu_offload, device)
        if self.compile is not None:
            self.compile.check()
            for name in ("keep_dequantized", "offload", "mlp_chunks"):
                if given := getattr(self.activation_checkpointing, name):
                    raise ValueError(
                        f"activation_checkpointing.{name}: got {str(given).lower()} with compile: compiled blocks keep "
                        "what they choose; leave one of them out"
                    )

    def check_adapted(self, *, has_adapters: bool, is_quantized: bool) -> None:
        """Raise a ``ValueError`` for what cannot work with a model that is known to get adapters or 4 or 8 bits.

        What has been built is refused too, by its layers.
        """
        for what, is_there in (("lora", has_adapters), ("quantization", is_quantized)):
            if self.mesh.tensor > 1 and is_there:
                raise describe_changed(what, self.mesh.tensor)
        if self.sharding.gather_bits is not None and is_quantized:
            raise describe_quantized("quantization")

    def check_accumulation(self, *, num_micro_batches: int | None, is_automatic: bool) -> None:
        """Raise a ``ValueError`` if gradients shall be held without micro-batches to hold them over.

        Args:
            num_micro_batches: Accumulated in a step; ``None`` if that changes during the run, or with the ranks.
            is_automatic: Whether Lightning runs backward, not the user's ``training_step``.
        """
        if self.sharding.no_sync and not is_automatic:
            raise ValueError(
                "sharding.no_sync: got true: under manual optimization training_step decides when to reduce; "
                "use lit_fsdp.sharding.shard.no_sync there and leave the setting out"
            )
        if self.sharding.no_sync and num_micro_batches == 1:
            raise ValueError(
                "sharding.no_sync: got true with trainer.accumulate_grad_batches 1: there is nothing to hold; "
                "set accumulate_grad_batches to 2 or more, or leave it out"
            )

    def list_changed(self, used: Settings) -> list[str]:
        """Return the names of the settings that are not those of ``used``."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(used, f.name)]


# Names for Trainer(strategy=...): what they mean, and the settings they stand for.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("Full sharding over all ranks", {}),
    "fsdp2_offload": ("Full sharding, shards in host memory", {"cpu_offload": CPUOffload()}),
    "fsdp2_grad_op": (
        "Gradients and optimizer state sharded, parameters kept gathered after forward",
        {"sharding": Sharding(reshard_after_forward=False)},
    ),
    "fsdp2_hybrid": (
        "Sharded inside a node, replicated between nodes",
        {"mesh": Mesh(replicate=-1, shard="node")},
    ),
}
