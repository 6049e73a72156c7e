"""The classifier itself: its configuration, its head, the images that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel

from lit_fsdp.errors import get_first_line
from lit_fsdp.planning.closed_form.image_reader import count_tokens, find_embeddings
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.tasks.classifier import name_classes


def set_classes(config: PreTrainedConfig, class_names: Sequence[str], drop_path: float | None) -> None:
    """Make a configuration that of a classifier for these classes; ``drop_path`` sets its stochastic depth."""
    if drop_path is not None:
        if not hasattr(config, "drop_path_rate"):
            raise ValueError(
                f"drop_path: got {drop_path}: {type(config).__name__} has no stochastic depth; leave it out"
            )
        config.drop_path_rate = drop_path
    name_classes(config, class_names)


def build_classifier(config: PreTrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """Return a classifier on the meta device; without ``attention`` with what Transformers takes for it."""
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    # Of several classifiers of one architecture, Transformers takes the first, but not where nothing is set.
    config.architectures = config.architectures or []
    try:
        with torch.device("meta"):
            return AutoModelForImageClassification.from_config(config, dtype=torch.float32, **options)
    except (ImportError, ValueError) as error:
        reason = get_first_line(error)
        if config.model_type == "timm_wrapper" and isinstance(error, ImportError):
            raise ValueError(
                'config: models of timm need timm and torchvision: pip install -e ".[timm]", with a torchvision that '
                f"fits the installed torch; {reason[:200]}"
            ) from error
        if "attention" in str(error).lower() and attention is not None:
            raise ValueError(f"attention: got {attention!r}: {reason}; leave it out") from error
        raise ValueError(f"{type(config).__name__}: no image classifier: {reason[:200]}") from error


def check_size(config: PreTrainedConfig, size: tuple[int, int]) -> bool:
    """Return whether the model must be told to interpolate its position embeddings to this height and width."""
    # Not the model itself, which may have an attention that only works on a GPU.
    model = build_classifier(type(config).from_dict(config.to_dict()), None).eval()
    pixels = torch.empty(1, 3, *size, device="meta")
    reason = ""
    for options in ({}, {"interpolate_pos_encoding": True}):  # some always do
        try:
            _ = model(pixel_values=pixels, **options)[0]
            return bool(options)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            reason = reason or get_first_line(error)[:200]
            if "meta" in reason or isinstance(error, NotImplementedError):  # cannot be told without values
                return False
    # Models such as CLIP read texts too.
    given = getattr(getattr(config, "vision_config", None) or config, "image_size", None)
    own = (given, given) if isinstance(given, int) else tuple(given or size)
    fix = "it cannot be trained here: its inputs are not the pixels of color images"
    if own != size:
        fix = f"it takes {own[0]} x {own[1]}; set the size of the processor to that, or image_size of config"
    name = type(model).__name__
    raise ValueError(f"data.processor: images become {size[0]} x {size[1]} pixels, and {name} says: {reason}: {fix}")


def measure_images(model: nn.Module, pixels: Tensor, *, is_mixed: bool = False) -> MicroBatch | None:
    """Return how many images there are, and their tokens: patches, and those that the model puts before them.

    Args:
        model: A transformer over patches; for models of another kind the result is ``None``.
        pixels: [images, channels, height, width].
        is_mixed: Whether the model gets mixtures of them.
    """
    found = next(((name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d)), None)
    if found is None or found[1].kernel_size != found[1].stride:
        return None
    name, convolution = found
    rows, _, height, width = pixels.shape
    high, wide = convolution.kernel_size
    around = find_embeddings(model, name)
    # Where there is no such module, no tokens are known.
    num_own = 0 if around is None else count_tokens(model.get_submodule(around), convolution.out_channels)
    return MicroBatch(rows=rows, length=(height // high) * (width // wide) + num_own, is_mixed=is_mixed)
