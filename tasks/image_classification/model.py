"""The classifier itself: its configuration, its head, what trains and how fast."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel

from lit_fsdp.adapters.layers import clean_name
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.planning.image_reader import count_tokens, find_embeddings
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.tasks.pretrained import load_config, make_config
from lit_fsdp.weights.base_weights import get_pretrained_folder

BACKBONE = "backbone"  # in freeze: all but the head


def check_start(pretrained: str | None, settings: dict[str, Any] | None, head: str) -> None:
    """Refuse a model that is not named, or named twice.

    Args:
        pretrained: Name or folder of a model.
        settings: Or else its configuration.
        head: What becomes of its head.

    Raises:
        ValueError: With what is expected.
    """
    if (pretrained is None) == (settings is None):
        raise ValueError(
            "pretrained or config: expected one of them: a model's name or folder, or an architecture such as "
            "{model_type: vit, hidden_size: 192}"
        )
    if settings is not None and "model_type" not in settings:
        raise ValueError(f"config.model_type: missing, got {sorted(settings)}: expected one such as vit")
    if head != "auto" and pretrained is None:
        raise ValueError(f"head: got {head!r}: a model from config has none to keep; leave it out")


def find_classes(data: Any, num_classes: int | None) -> list[str]:
    """Return the names of the classes, in the order of the model's outputs.

    Args:
        data: The data module, which may have them in ``classes``.
        num_classes: How many there are, if the data does not say it.

    Raises:
        ValueError: Neither says it, or they contradict each other.
    """
    names = list(data.classes) if hasattr(data, "classes") else None
    if data is None and num_classes is None:
        raise ValueError("num_classes: not set, and there is no data module that says it; set data to ImageData, or it")
    if names is None and num_classes is None:
        raise ValueError("num_classes: not set, and the data has no classes; set it")
    if names is not None and num_classes not in (None, len(names)):
        raise ValueError(f"num_classes: got {num_classes}: the data has {len(names)} classes; leave it out")
    return names or [str(i) for i in range(num_classes or 0)]


def read_config(
    pretrained: str | None, settings: dict[str, Any] | None, *, class_names: Sequence[str], drop_path: float | None
) -> PreTrainedConfig:
    """Return the configuration of a classifier for these classes.

    Args:
        pretrained: Name or folder of a model.
        settings: Or else its ``model_type`` and further settings.
        class_names: In the order of its outputs.
        drop_path: Rate of stochastic depth, if it is to be set.

    Raises:
        ValueError: There is no such model or setting.
    """
    config = load_config(pretrained) if pretrained is not None else make_config(settings or {})
    if drop_path is not None:
        if not hasattr(config, "drop_path_rate"):
            raise ValueError(
                f"drop_path: got {drop_path}: {type(config).__name__} has no stochastic depth; leave it out"
            )
        config.drop_path_rate = drop_path
    config.num_labels = len(class_names)  # which some have beside their names
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: i for i, name in enumerate(class_names)}
    return config


def build_classifier(config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """Return a classifier on the meta device.

    Args:
        config: Its configuration.
        attention: Implementation, if not that which Transformers would choose.

    Raises:
        ValueError: Transformers classifies no images with this model, or has no such attention for it.
    """
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    # Of several classifiers of one architecture, Transformers takes the first, but not where nothing is set.
    config.architectures = config.architectures or []
    try:
        with torch.device("meta"):
            return AutoModelForImageClassification.from_config(config, dtype=torch.float32, **options)
    except (ImportError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if config.model_type == "timm_wrapper" and isinstance(error, ImportError):
            raise ValueError(
                'config: models of timm need timm and torchvision: pip install -e ".[timm]", with a torchvision that '
                f"fits the installed torch; {reason[:200]}"
            ) from error
        if "attention" in str(error).lower() and attention is not None:
            raise ValueError(f"attention: got {attention!r}: {reason}; leave it out") from error
        raise ValueError(f"{type(config).__name__}: no image classifier: {reason[:200]}") from error


def find_head(config: PreTrainedConfig, model: PreTrainedModel) -> list[str]:
    """Return the names of the modules whose parameters have other shapes for another number of classes.

    Args:
        config: That the model was built from.
        model: On the meta device.

    Raises:
        ValueError: There are none.
    """
    found = _list_changed(config, model, num_labels=len(config.id2label or ()) + 1)
    if not found:
        raise ValueError(f"{type(model).__name__}: no part of it depends on the number of classes")
    return list(dict.fromkeys(name.rpartition(".")[0] for name in found))


def check_size(config: PreTrainedConfig, size: tuple[int, int]) -> bool:
    """Return whether the model must be told to interpolate its position embeddings to images of this size.

    Args:
        config: That the model was built from.
        size: Height and width of the images.

    Raises:
        ValueError: It takes no such images.
    """
    # Not the model itself, which may have an attention that only works on a GPU.
    model = build_classifier(type(config).from_dict(config.to_dict()), None).eval()
    pixels = torch.empty(1, 3, *size, device="meta")
    reason = ""
    for options in ({}, {"interpolate_pos_encoding": True}):  # some always do
        try:
            _ = model(pixel_values=pixels, **options).logits
            return bool(options)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            reason = reason or (str(error).splitlines() or [type(error).__name__])[0][:200]
            if "meta" in reason or isinstance(error, NotImplementedError):  # cannot be told without values
                return False
    given = getattr(_find_vision(config), "image_size", None)
    own = (given, given) if isinstance(given, int) else tuple(given or size)
    fix = "it cannot be trained here: its inputs are not the pixels of color images"
    if own != size:
        fix = f"it takes {own[0]} x {own[1]}; set the size of the processor to that, or image_size of config"
    name = type(model).__name__
    raise ValueError(f"data.processor: images become {size[0]} x {size[1]} pixels, and {name} says: {reason}: {fix}")


def _find_vision(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a configuration that is about images: models such as CLIP read texts too."""
    return getattr(config, "vision_config", None) or config


def _list_changed(config: PreTrainedConfig, model: PreTrainedModel, **changes: Any) -> list[str]:
    """Return the parameters that have another shape, or are only there, before these changes."""
    other_config = type(config).from_dict(config.to_dict())
    for name, value in changes.items():
        setattr(other_config, name, value)
    shapes = {name: p.shape for name, p in build_classifier(other_config, None).named_parameters()}
    return [name for name, p in model.named_parameters() if p.shape != shapes.get(name)]


def keeps_head(pretrained: str | None, head: str, class_names: Sequence[str], *, is_told: bool = True) -> bool:
    """Return whether the head of a pretrained model stays.

    Args:
        pretrained: Name or folder of the model.
        head: ``keep``, ``new``, or ``auto``: if it was trained for these classes in this order.
        class_names: Of the data, in the order of its labels.
        is_told: Warn if a head that is there is drawn anew.

    Raises:
        ValueError: It shall stay, and cannot be for these classes.
    """
    if pretrained is None or head == "new":
        return False
    stored = AutoConfig.from_pretrained(get_pretrained_folder(pretrained))
    names = [stored.id2label[i] for i in sorted(stored.id2label)]
    if head == "keep":
        if len(names) != len(class_names):
            raise ValueError(
                f"head: got 'keep': {pretrained} has {len(names)} classes, the data {len(class_names)}; set head: new"
            )
        if names != list(class_names) and sorted(names) == sorted(class_names):
            raise ValueError(
                f"head: got 'keep': {pretrained} has the classes of the data in another order "
                f"({', '.join(names[:5])} ...): set data.classes to that"
            )
        return True
    # Configurations of timm on the Hub name no class of Transformers; others end in ...WithTeacher.
    is_classifier = any("ForImageClassification" in name for name in stored.architectures or ())
    if not is_classifier and (stored.architectures or stored.model_type != "timm_wrapper"):
        return False
    if names != list(class_names) and is_told:
        rank_zero_warn(
            f"head: drawn anew: {pretrained} was trained for {len(names)} classes ({', '.join(names[:5])} ...), the "
            f"data has {len(class_names)} ({', '.join(class_names[:5])} ...)"
        )
    return names == list(class_names)


def rest_frozen(model: nn.Module) -> None:
    """Let modules of which nothing trains compute as in evaluation: batch statistics stay, nothing is dropped."""
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def train_head(lora: LoRA, head: Sequence[str]) -> LoRA:
    """Return the settings of adapters with the modules of the head among those that train in full."""
    named = [name for name in head if name not in lora.modules_to_save]
    return replace(lora, modules_to_save=(*lora.modules_to_save, *named))


def freeze_modules(model: nn.Module, names: Sequence[str], head: Sequence[str]) -> None:
    """Turn off gradients of named parts.

    Args:
        model: Changed in place.
        names: Of modules or parameters, in full, by their last parts, or as patterns with ``*``; ``backbone`` is all
            but the head.
        head: Modules of the head.

    Raises:
        ValueError: There is no such part, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for wanted in names:
        if wanted == BACKBONE:
            hits = [name for name in parameters if not _is_inside(name, head)]
        else:
            hits = [name for name in parameters if _fits(name, wanted)]
        if not hits:
            raise ValueError(f"freeze: got {wanted!r}: the model has no such module; expected a name such as layers.0")
        for name in hits:
            parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"freeze: got {list(names)}: nothing is left to train; leave out the head")


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _fits(name: str, wanted: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) for pattern in (wanted, f"{wanted}.*", f"*.{wanted}", f"*.{wanted}.*")
    )


def find_blocks(model: nn.Module, layer_decay: float) -> list[str]:
    """Return the names of the blocks in order, and say how many there are where that sets learning rates.

    Args:
        model: Without adapters, not sharded yet.
        layer_decay: Factor from one to the next.

    Raises:
        ValueError: There are none, and learning rates shall differ.
    """
    blocks = list_blocks(model)
    if layer_decay != 1 and not blocks:
        raise ValueError(f"layer_decay: got {layer_decay}: no blocks found in {type(model).__name__}; leave it out")
    if layer_decay != 1:
        rank_zero_info(f"layer_decay: {len(blocks)} blocks, from {blocks[0]} to {blocks[-1]}")
    return blocks


def list_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks, from the first to the last.

    They are elements of lists of modules, with two or more weights each: a convolution and its norm are part of a
    block. Of lists inside of lists the innermost are taken whose elements, all of one class, hold half of what those
    of any class do: layers, and not stages or stems.

    Args:
        model: Without adapters, not sharded yet.
    """
    groups: dict[str, dict[str, int]] = {}  # class of the elements -> name and size of each
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for i, child in enumerate(module):
                if sum(p.ndim >= 2 for p in child.parameters()) >= 2:
                    size = sum(p.numel() for p in child.parameters())
                    groups.setdefault(type(child).__name__, {})[f"{name}.{i}".removeprefix(".")] = size
    groups = {kind: sizes for kind, sizes in groups.items() if len(sizes) >= 2}
    most = max((sum(sizes.values()) for sizes in groups.values()), default=0)
    found = {name for sizes in groups.values() if 2 * sum(sizes.values()) >= most for name in sizes}
    innermost = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return [name for name, _ in model.named_modules() if name in innermost]


def compute_depths(model: nn.Module, blocks: Sequence[str]) -> tuple[dict[str, int], int]:
    """Return the depth of each parameter by its name, and that of the head.

    Depth 0 is what comes before the first block, then each block is one more; what lies between blocks belongs to
    the next one, and what comes after the last to the head.

    Args:
        model: Not sharded yet.
        blocks: Names of its blocks in order.
    """
    depths: dict[str, int] = {}
    waiting: list[str] = []
    for name, _ in model.named_parameters():
        block = next((i for i, prefix in enumerate(blocks) if name.startswith(f"{prefix}.")), None)
        if block is None:
            waiting.append(name)
            continue
        depths |= dict.fromkeys(waiting, block + 1 if block else 0)
        waiting = []
        depths[name] = block + 1
    return depths | dict.fromkeys(waiting, len(blocks) + 1), len(blocks) + 1


def measure_distances(model: nn.Module, blocks: Sequence[str], layer_decay: float) -> dict[str, int]:
    """Return how many blocks, its own counted, lie between each parameter and the head, by its name.

    Args:
        model: As it will train, not sharded yet.
        blocks: Names of its blocks in order.
        layer_decay: Factor on the learning rate from one to the next.

    Raises:
        ValueError: Nothing that trains is away from the head, so that the factor would be ignored.
    """
    depths, last = compute_depths(model, blocks)
    if layer_decay != 1 and all(depths[name] == last for name, p in model.named_parameters() if p.requires_grad):
        raise ValueError(f"layer_decay: got {layer_decay}: no block trains, only what comes after them; leave it out")
    return {clean_name(name): last - depth for name, depth in depths.items()}


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
