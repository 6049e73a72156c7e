"""LayerDrop of models of Transformers, which does not work in sharded ones."""

from __future__ import annotations

import sys

from torch import nn

_SETTINGS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def describe_layer_drop(model: nn.Module, world_size: int) -> str | None:
    """Return what becomes of the first LayerDrop that a configuration inside ``model`` sets, ``None`` without one.

    Transformers looks for torch's mark of sharded modules and runs every layer of those, as in Wav2Vec2. Models that do
    not look, such as BART, skip other layers on each rank, whose gathers then do not fit together.
    """
    # Seen in transformers 5: the modules that look for the mark import this function.
    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    is_looked_for = any(hasattr(sys.modules.get(file), "is_fsdp_managed_module") for file in files)
    for module in model.modules():
        config = getattr(module, "config", None)
        for name in _SETTINGS:
            value = getattr(config, name, None)
            if not isinstance(value, int | float) or value <= 0:
                continue
            if is_looked_for:
                return (
                    f"config.{name}: got {value}: no effect, as Transformers runs every layer of a sharded model: set 0"
                )
            if world_size > 1:
                return f"config.{name}: got {value}: ranks skip different layers and wait for each other: set 0"
    return None
