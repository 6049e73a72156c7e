"""Optimizers whose state is sharded with the parameters, so that checkpoints reshard it."""

from lit_fsdp.optim.adafactor import Adafactor
from lit_fsdp.optim.adamw import AdamW
from lit_fsdp.optim.adamw_8bit import AdamW8bit
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.optim.muon import Muon

__all__ = ["Adafactor", "AdamW", "AdamW8bit", "Muon", "Optimizer", "build_optimizer"]
