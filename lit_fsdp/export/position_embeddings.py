"""Position embeddings of an image model, written for the size of the images that it was trained on.

A model that is given images of another size than its own has to be told to interpolate, in every call. Here the
interpolated embeddings are written instead, together with the new size.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from typing_extensions import override

from lit_fsdp.checkpoint.reader import StoredCheckpoint, build_on_meta
from lit_fsdp.weights.base_weights import IMAGE_SIZE

_FLAG = "interpolate_pos_encoding"


@dataclass(frozen=True, kw_only=True)
class ResizedCheckpoint(StoredCheckpoint):
    """A checkpoint whose position embeddings, and size in ``config.json``, are those of the images in training."""

    position_name: str  # of the parameter in the model
    shape: torch.Size  # of the parameter at the new size
    image: Tensor  # without values: one of the new size
    module: nn.Module  # computes embeddings at the old size, on the CPU
    key: str  # name of the parameter in it

    @torch.no_grad()
    def interpolate(self, stored: Tensor) -> Tensor:
        """Return embeddings of the old size at the new one, ``float32``, as the model computes them in a forward."""
        # With nothing in the image and in all other parameters, what is left of the embeddings are the positions.
        values = {key: torch.zeros(p.shape) for key, p in self.module.named_parameters()} | {self.key: stored.float()}
        return _embed(self.module, values, torch.zeros(self.image.shape), **{_FLAG: True}).reshape(self.shape)

    @override
    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = self.position_name
        if own not in wanted:
            return super().read(wanted)
        tensors = super().read({**wanted, own: super().describe(own)})
        return {**tensors, own: self.interpolate(tensors[own]).to(wanted[own].dtype)}

    @override
    def describe(self, name: str) -> Tensor:
        there = super().describe(name)
        return there.new_empty(self.shape) if name == self.position_name else there


def resize_positions(stored: StoredCheckpoint) -> StoredCheckpoint:
    """Return a checkpoint as if its model had been of the size of the images that it was trained on all along.

    The checkpoint itself where there is no other size, or where a model of that size would compute something else: its
    embeddings then stay as they were stored, and it has to be told to interpolate.
    """
    if IMAGE_SIZE not in stored.meta:
        return stored
    try:
        return _resize(stored)
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError):
        # A size that the architecture does not take, or embeddings of another kind: nothing to write.
        return stored


def explain_size(stored: StoredCheckpoint) -> tuple[str, ...]:
    """Return what whoever loads a model that was trained on images of another size than its own must know."""
    if IMAGE_SIZE not in stored.meta:
        return ()
    size = " x ".join(str(length) for length in stored.meta[IMAGE_SIZE])
    if isinstance(stored, ResizedCheckpoint):
        return (f"Its position embeddings were interpolated to the images it was trained on, {size}.",)
    note = f"It was trained on images of {size}, to which its position embeddings are interpolated: call it with "
    return (f"{note}`{_FLAG}=True`.",)


@torch.no_grad()
def _resize(stored: StoredCheckpoint) -> StoredCheckpoint:
    height, width = stored.meta[IMAGE_SIZE]
    config = json.loads(stored.files["config.json"])
    holder = config.get("vision_config", config)
    holder["image_size"] = height if height == width else [height, width]
    files = {**stored.files, "config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
    old, new = build_on_meta(stored), build_on_meta(replace(stored, files=files))
    name, prefix = _find_module(old, new)
    shape = new.get_parameter(name).shape
    old_module, new_module = (_materialize(model, model.get_submodule(prefix)) for model in (old, new))
    resized = ResizedCheckpoint(
        **{**vars(stored), "files": files},
        position_name=name,
        shape=shape,
        image=torch.empty(1, holder.get("num_channels", 3), height, width, device="meta"),
        module=old_module,
        key=name.removeprefix(f"{prefix}."),
    )
    return resized if _is_exact(resized, new_module) else stored


def _find_module(old: PreTrainedModel, new: PreTrainedModel) -> tuple[str, str]:
    """Return the one parameter that depends on the size, and the module around it that can interpolate it."""
    shapes = {name: p.shape for name, p in new.named_parameters()}
    (name,) = [name for name, p in old.named_parameters() if p.shape != shapes.get(name)]
    prefix = name.rpartition(".")[0]
    while _FLAG not in inspect.signature(old.get_submodule(prefix).forward).parameters:
        if not prefix:
            raise LookupError(name)
        prefix = prefix.rpartition(".")[0]
    return name, prefix


def _materialize(model: PreTrainedModel, module: nn.Module) -> nn.Module:
    """Give a part of a model on the meta device memory and random values, and its buffers those that they have."""
    module = module.to_empty(device="cpu").eval()
    with torch.random.fork_rng(devices=[]):
        for child in module.modules():
            model._init_weights(child)  # private, seen in transformers 5.23: also sets buffers that files do not hold
    return module


def _is_exact(resized: ResizedCheckpoint, new: nn.Module) -> bool:
    """Whether a model of the new size computes from the result what the old one does when it interpolates."""
    generator = torch.Generator().manual_seed(0)
    state = {key: torch.randn(p.shape, generator=generator) for key, p in resized.module.named_parameters()}
    pixels = torch.randn(2, *resized.image.shape[1:], generator=generator)
    expected = _embed(resized.module, state, pixels, **{_FLAG: True})
    found = _embed(new, state | {resized.key: resized.interpolate(state[resized.key])}, pixels)
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def _embed(module: nn.Module, parameters: dict[str, Tensor], pixels: Tensor, **options: Any) -> Tensor:
    found = functional_call(module, parameters, (pixels,), options)
    return found[0] if isinstance(found, tuple) else found
