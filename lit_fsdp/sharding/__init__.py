"""A model becomes FSDP2 units on a mesh of ranks. Nothing here knows Lightning.

``wrap`` decides which modules form units, ``settings`` holds all settings, and ``parallelize`` applies them in the one
order that works. Only settings are handed on here: the rest would import peft and Transformers.
"""

from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Compile, Sharding
from lit_fsdp.sharding.wrap import Unit, Wrap

__all__ = [
    "ActivationCheckpointing",
    "CPUOffload",
    "Compile",
    "Mesh",
    "MixedPrecision",
    "Settings",
    "Sharding",
    "Unit",
    "Wrap",
]
