"""Lightning's strategies that refuse CPUs, on CPUs: to compare the work they do, not to train with.

Lightning allows them on GPUs only, though gloo has the collectives they use. ``bench strategies`` and tests take these.
"""

from __future__ import annotations

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override


class FSDPOnCPU(FSDPStrategy):
    """FSDP1 with gloo. Lightning refuses ``FSDPStrategy`` itself by its class, seen in lightning 2.6.6."""

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # Lightning's would name no device, for which torch then looks in vain.
        return FullyShardedDataParallel(
            module=model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


class DeepSpeedOnCPU(DeepSpeedStrategy):
    """DeepSpeed's ZeRO with gloo, without its communication through shared memory, which takes minutes to compile."""

    @override
    def setup_environment(self) -> None:
        import deepspeed.ops

        # A table of DeepSpeed's, seen in 0.19.8: what it may compile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        DDPStrategy.setup_environment(self)  # past the refusal

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    @override
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed compares the number
