"""What could be trained in place of what a configuration has: adapters, quantized weights, a loss in chunks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lightning.pytorch import LightningModule

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.quantize import Quantization

_LOSS_CHUNKS, _LORA_RANK = 8, 16


def list_variants(module: LightningModule) -> list[tuple[LightningModule, dict[str, Any]]]:
    """Return copies of a module that would train otherwise, none of them built yet, with the settings for it.

    A task says by its attributes ``loss_chunks``, ``lora`` and ``quantization`` what it can do, and by
    ``frozen_names`` what its setting ``freeze`` has, which adapters take the place of.
    """
    chunks = {"model.loss_chunks": _LOSS_CHUNKS} if _takes_chunks(module) else {}
    trainings: list[dict[str, Any]] = [{}]
    if getattr(module, "lora", "") is None:
        released: dict[str, Any] = {"model.freeze": []} if getattr(module, "frozen_names", ()) else {}
        trainings.append({"model.lora": {"r": _LORA_RANK}, **released})
        if getattr(module, "quantization", "") is None:
            trainings.append({**trainings[-1], "model.quantization": {"type": "nf4"}})
    found: list[tuple[LightningModule, dict[str, Any]]] = []
    choices = [{**more, **training} for training in trainings for more in ([{}, chunks] if chunks else [{}])]
    for changes in choices[1:]:
        variant: Any = deepcopy(module)
        if "model.loss_chunks" in changes:
            variant.loss_chunks = changes["model.loss_chunks"]
        if "model.lora" in changes:
            variant.lora = LoRA(**changes["model.lora"])
        if "model.freeze" in changes:
            variant.frozen_names = ()
        if "model.quantization" in changes:
            variant.quantization = Quantization(**changes["model.quantization"])
        found.append((variant, changes))
    return found


def _takes_chunks(module: LightningModule) -> bool:
    task: Any = module
    if getattr(module, "loss_chunks", None) != 1:
        return False
    try:
        task.loss_chunks = _LOSS_CHUNKS
        task.check_loss_chunks()
    except ValueError:
        return False
    finally:
        task.loss_chunks = 1
    return True
