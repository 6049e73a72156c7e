"""Fine-tune large models on small GPUs: PyTorch Lightning with an FSDP2 strategy.

Names are imported when they are first used, so that ``python -m lit_fsdp --help`` need not load torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_fsdp.adapters.lora import LoRA
    from lit_fsdp.optim.factory import Optimizer
    from lit_fsdp.planning.auto_strategy import AutoFSDP2Strategy
    from lit_fsdp.quantization.quantize import Quantization
    from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
    from lit_fsdp.sharding.cpu_offload import CPUOffload
    from lit_fsdp.sharding.float8 import Float8
    from lit_fsdp.sharding.mesh import Mesh
    from lit_fsdp.sharding.mixed_precision import MixedPrecision
    from lit_fsdp.sharding.settings import Settings
    from lit_fsdp.sharding.shard import Compile, Sharding
    from lit_fsdp.sharding.wrap import Unit, Wrap
    from lit_fsdp.strategy.fsdp2 import FSDP2Strategy

__all__ = [
    "ActivationCheckpointing",
    "AutoFSDP2Strategy",
    "CPUOffload",
    "Compile",
    "FSDP2Strategy",
    "Float8",
    "LoRA",
    "Mesh",
    "MixedPrecision",
    "Optimizer",
    "Quantization",
    "Settings",
    "Sharding",
    "Unit",
    "Wrap",
    "__version__",
]
__version__ = version("lit_fsdp")

_HOMES = {
    "ActivationCheckpointing": "sharding.activation_checkpointing",
    "AutoFSDP2Strategy": "planning.auto_strategy",
    "CPUOffload": "sharding.cpu_offload",
    "Compile": "sharding.shard",
    "FSDP2Strategy": "strategy.fsdp2",
    "Float8": "sharding.float8",
    "LoRA": "adapters.lora",
    "Mesh": "sharding.mesh",
    "MixedPrecision": "sharding.mixed_precision",
    "Optimizer": "optim.factory",
    "Quantization": "quantization.quantize",
    "Settings": "sharding.settings",
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
