"""Fine-tune large models on small GPUs: PyTorch Lightning with an FSDP2 strategy.

Names are imported when they are first used, so that ``python -m lit_fsdp --help`` need not load torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_fsdp.planning.auto_strategy import AutoFSDP2Strategy
    from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
    from lit_fsdp.sharding.cpu_offload import CPUOffload
    from lit_fsdp.sharding.mesh import Mesh
    from lit_fsdp.sharding.mixed_precision import MixedPrecision
    from lit_fsdp.sharding.shard import Compile, Sharding
    from lit_fsdp.sharding.wrap import Unit, Wrap
    from lit_fsdp.strategy.fsdp2 import FSDP2Strategy

__all__ = [
    "ActivationCheckpointing",
    "AutoFSDP2Strategy",
    "CPUOffload",
    "Compile",
    "FSDP2Strategy",
    "Mesh",
    "MixedPrecision",
    "Sharding",
    "Unit",
    "Wrap",
    "__version__",
]
__version__ = version("lit_fsdp")

_HOMES = {
    "AutoFSDP2Strategy": "planning.auto_strategy",
    "Compile": "sharding.shard",
    "FSDP2Strategy": "strategy.fsdp2",
    "Mesh": "sharding.mesh",
    "MixedPrecision": "sharding.mixed_precision",
    "CPUOffload": "sharding.cpu_offload",
    "ActivationCheckpointing": "sharding.activation_checkpointing",
    "Sharding": "sharding.shard",
    "Unit": "sharding.wrap",
    "Wrap": "sharding.wrap",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"lit_fsdp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lit_fsdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *globals()]
