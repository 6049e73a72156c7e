"""What classifiers share, of images and of text: their classes, and the head, which may be new."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.errors import join_names
from lit_fsdp.tasks.pretrained import PretrainedTask
from lit_fsdp.weights.base_weights import get_pretrained_folder
from lit_fsdp.weights.load import load_weights

CLASSES = "classes"  # in the metadata of a checkpoint: their names, in the order of the model's outputs
_CLASSIFIERS = ("ForImageClassification", "ForSequenceClassification")


class Classifier(PretrainedTask):
    """A task whose model has a head for the classes of its data, which is made anew where it is of others.

    A subclass calls :meth:`choose_head` when the model is built, and sets ``class_names`` in ``setup``.

    Args:
        head: ``new``, ``keep`` or ``auto``.
        settings: Those of the class behind.
    """

    def __init__(self, *, head: str, **settings: Any) -> None:
        super().__init__(**settings)
        if head != "auto" and self.pretrained is None:
            raise ValueError(f"head: got {head!r}: a model from config has none to keep; leave it out")
        self.head = head
        self._head: list[str] = []
        self._drawn: list[str] = []
        self._is_untrained = False
        self._class_names: list[str] | None = None

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of the model's outputs; there are some once ``setup`` has run."""
        assert self._class_names is not None
        return self._class_names

    @class_names.setter
    def class_names(self, names: list[str]) -> None:
        if self.model is not None and self._class_names is not None:  # a second run of the same object
            _refuse_other_classes(names, self._class_names, "model")
        self._class_names = names

    @property
    def knows_classes(self) -> bool:
        """Whether there are ``class_names`` yet."""
        return self._class_names is not None

    @property
    def head_modules(self) -> list[str]:
        """Names of the modules of the head."""
        return self._head

    def choose_head(self, head: Sequence[str], drawn: Sequence[str] = ()) -> None:
        """Decide whether the head of the model stays, and let it train beside adapters.

        Args:
            head: Names of its modules.
            drawn: Names of others that files of ``pretrained`` do not have.
        """
        is_fit = self.trainer.state.fn == TrainerFn.FITTING
        keeps = keeps_head(self.pretrained, self.head, self.class_names, is_told=is_fit)
        self._head, self._drawn = list(head), [*drawn, *([] if keeps else head)]
        self._is_untrained = not (is_fit or keeps)
        self.lora = self.lora and train_head(self.lora, [*head, *drawn])

    @override
    def load_base(self) -> None:
        assert self.model is not None
        if self.pretrained is None:
            super().load_base()
            return
        folder = get_pretrained_folder(self.pretrained)
        unused = load_weights(self.model, folder, seed=self.get_seed(), new=self._drawn, takes_part=True)
        if unused:
            rank_zero_warn(f"pretrained: {len(unused)} tensors are not used, such as {', '.join(unused[:3])}")

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        # Not told before: which checkpoint is loaded is known after configure_model, seen in lightning 2.6.6.
        if self._is_untrained and not self.trainer.ckpt_path and self.trainer.state.fn != TrainerFn.FITTING:
            rank_zero_warn("head: its weights are random, and no checkpoint replaces them: set ckpt_path")
        self._is_untrained = False

    @override
    def collect_export_files(self, model: PreTrainedModel, **changes: Any) -> dict[str, str | bytes]:
        """Return the same, and beside adapters the names of the classes."""
        files = super().collect_export_files(model, **changes)
        if self.lora is not None:
            files["classes.json"] = json.dumps(self.class_names, indent=1)  # without config.json, which names them
        return files

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if EXPORT in checkpoint:
            checkpoint[CLASSES] = self.class_names

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if (stored := checkpoint.get(CLASSES)) is not None:
            _refuse_other_classes(self.class_names, stored, "checkpoint")


def _refuse_other_classes(names: Sequence[str], trained: Sequence[str], what: str) -> None:
    """Refuse classes of the data that are not those that a model or checkpoint was trained for, in their order."""
    if list(names) != list(trained):
        raise ValueError(
            f"classes: the {what} was trained for {len(trained)} classes ({join_names(trained)}), and the data "
            f"has {len(names)} ({join_names(names)}); set data.classes to those"
        )


def list_classes(data: Any, num_classes: int | None, *, setting: str = "num_classes") -> list[str]:
    """Return the names of the classes in the order of the model's outputs: those of the data, else numbers.

    Args:
        data: The data module; its ``classes`` are names, or ``None``.
        num_classes: How many, if the user says it.
        setting: By which the user does.
    """
    given = getattr(data, "classes", None)
    names = None if given is None else list(given)
    if data is None and num_classes is None:
        raise ValueError(f"{setting}: not set, and there is no data module that says it; set data, or it")
    if names is None and num_classes is None:
        raise ValueError(f"{setting}: not set, and the data has no classes; set it")
    if names is not None and num_classes not in (None, len(names)):
        raise ValueError(f"{setting}: got {num_classes}: the data has {len(names)} classes; leave it out")
    return names or [str(i) for i in range(num_classes or 0)]


def name_classes(config: PreTrainedConfig, class_names: Sequence[str]) -> None:
    """Make a configuration that of a classifier for these classes."""
    config.num_labels = len(class_names)  # which some have beside their names
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: i for i, name in enumerate(class_names)}


def find_head(
    config: PreTrainedConfig, model: PreTrainedModel, build: Callable[[PreTrainedConfig], PreTrainedModel]
) -> list[str]:
    """Return the names of the modules whose parameters have other shapes for another number of classes."""
    other_config = type(config).from_dict(config.to_dict())
    other_config.num_labels = len(config.id2label or ()) + 1
    shapes = {name: p.shape for name, p in build(other_config).named_parameters()}
    changed = [name for name, p in model.named_parameters() if p.shape != shapes.get(name)]
    if not changed:
        raise ValueError(f"{type(model).__name__}: no part of it depends on the number of classes")
    return list(dict.fromkeys(name.rpartition(".")[0] for name in changed))


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
    stored = AutoConfig.from_pretrained(get_pretrained_folder(pretrained), trust_remote_code=False)
    names = [stored.id2label[i] for i in sorted(stored.id2label)]
    if head == "keep":
        if len(names) != len(class_names):
            raise ValueError(
                f"head: got 'keep': {pretrained} has {len(names)} classes, the data {len(class_names)}; set head: new"
            )
        if names != list(class_names) and sorted(names) == sorted(class_names):
            raise ValueError(
                f"head: got 'keep': {pretrained} has the classes of the data in another order "
                f"({join_names(names)}): set data.classes to that"
            )
        return True
    # Configurations of timm on the Hub name no class of Transformers; others end in ...WithTeacher.
    is_classifier = any(kind in name for name in stored.architectures or () for kind in _CLASSIFIERS)
    if not is_classifier and (stored.architectures or stored.model_type != "timm_wrapper"):
        return False
    if names != list(class_names) and is_told:
        rank_zero_warn(
            f"head: drawn anew: {pretrained} was trained for {len(names)} classes ({join_names(names)}), the "
            f"data has {len(class_names)} ({join_names(class_names)})"
        )
    return names == list(class_names)


def train_head(lora: LoRA, head: Sequence[str]) -> LoRA:
    """Return the settings of adapters with the modules of the head among those that train in full."""
    named = [name for name in head if name not in lora.modules_to_save]
    return replace(lora, modules_to_save=(*lora.modules_to_save, *named))
