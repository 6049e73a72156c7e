"""Training of an image classifier of Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from lit_fsdp.adapters.layers import clean_name
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.buffers import sync_buffers
from lit_fsdp.strategy.batch_split import BatchPart
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.tasks.classifier import Classifier, find_head, list_classes
from lit_fsdp.tasks.image_classification.data import Batch
from lit_fsdp.tasks.image_classification.layers import (
    freeze_modules,
    list_blocks,
    measure_distances,
    rest_frozen,
)
from lit_fsdp.tasks.image_classification.metrics import IGNORED, Evaluation, Metrics, list_predictions
from lit_fsdp.tasks.image_classification.mixup import Mixup, mix
from lit_fsdp.tasks.image_classification.model import (
    build_classifier,
    check_size,
    measure_images,
    set_classes,
)
from lit_fsdp.tasks.image_classification.preprocessing import PROCESSOR_FILE, Preprocessing, compare_colors
from lit_fsdp.tasks.image_classification.skipped import SkippedImages
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.model_config import explain_build_errors
from lit_fsdp.weights.base_weights import IMAGE_SIZE, get_pretrained_folder

_PLANNED_CLASSES = 1000  # where a plan cannot know


class ImageClassification(Classifier):
    """Trains any image classifier of Transformers, from its weights or from scratch.

    The head is made anew for the classes of the data, unless the model was trained for just these. Metrics:
    ``train/loss`` over all images of a step, ``train/grad_norm``, ``train/learning_rate``, ``train/samples_seen``; and
    of ``val/`` and ``test/`` ``loss``, ``top1_pct``, ``top5_pct``, ``class_accuracy_pct`` (mean over classes) and
    ``calibration_error_pct`` (expected, 15 bins); every image counts once. ``skipped_images``: those not decoded.

    Args:
        pretrained: Model name on the Hugging Face Hub, or a folder with ``config.json`` and safetensors.
        config: Instead, the architecture of a model with random weights: ``model_type`` and the arguments of its
            Transformers configuration. ``{model_type: timm_wrapper, architecture: NAME}`` is a model of timm.
        num_classes: How many the model has, if the data does not say it.
        attention: Implementation of attention, if not that which Transformers chooses.
        head: ``new`` draws the classification head at random; ``keep`` takes that of ``pretrained``; ``auto`` keeps it
            where its classes are those of the data.
        lora: Train low-rank adapters, and the head, and leave the rest as it is; ``null`` trains all of it.
        quantization: Keep the frozen weights in 4 or 8 bits; needs ``lora``.
        freeze: Names of modules or parameters to freeze, such as ``embeddings`` or ``layers.0``, also as
            patterns; ``backbone`` is all but the head: a linear probe.
        label_smoothing: Share of each target that is spread over all classes. Evaluation does not smooth.
        mixup: Train on mixtures of images: mixup and cutmix.
        layer_decay: Factor on the learning rate for each block from the head down, 0.75 for example; 1 changes nothing.
        drop_path: Rate of stochastic depth, for models that have it.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
    """

    target_name = "samples"
    headline_metric = "top1_pct"
    headline_mode = "max"
    example_config = "{model_type: vit, hidden_size: 192}"

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        num_classes: int | None = None,
        attention: Literal["sdpa", "eager", "flash_attention_2"] | None = None,
        head: Literal["auto", "new", "keep"] = "auto",
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        freeze: list[str] | None = None,
        label_smoothing: float = 0.0,
        mixup: Mixup | None = None,
        layer_decay: float = 1.0,
        drop_path: float | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
    ) -> None:
        super().__init__(
            head=head,
            pretrained=pretrained,
            config=config,
            lora=lora,
            quantization=quantization,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        rules = {
            "num_classes": (num_classes, num_classes is None or num_classes >= 2, "2 or more"),
            "label_smoothing": (label_smoothing, 0 <= label_smoothing < 1, "0 to below 1, such as 0.1"),
            "layer_decay": (layer_decay, 0 < layer_decay <= 1, "above 0, up to 1, such as 0.75"),
            "drop_path": (drop_path, drop_path is None or 0 <= drop_path < 1, "0 to below 1, such as 0.1"),
        }
        for name, (value, is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"{name}: got {value}: expected {expected}")
        if lora is not None and freeze:
            raise ValueError(
                "freeze: lora freezes all but adapters and head; leave it out, or use lora.exclude_modules"
            )
        if mixup is not None:
            mixup.check()
        self.num_classes, self.attention = num_classes, attention
        self.frozen_names, self.label_smoothing, self.mixup = freeze or [], label_smoothing, mixup
        self.layer_decay, self.drop_path = layer_decay, drop_path
        self.val_metrics: Metrics | None = None
        self.test_metrics: Metrics | None = None
        self.evaluation: dict[str, Evaluation] = {}  # the last one of val and test, read by the report
        self._skipped = SkippedImages()
        self._distances: dict[str, int] = {}
        self._interpolates = False
        self._image_size = (0, 0)

    # Model

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        """Fetch the configuration of the model, and nothing else."""
        notes = super().prepare_plan(data)
        count = self.num_classes or (data.count_classes() if hasattr(data, "count_classes") else None)
        if count is None:
            count = _PLANNED_CLASSES
            notes.append(f"the number of classes is taken to be {count:,}; model.init_args.num_classes would say it")
        self.class_names = [str(i) for i in range(count)]
        return notes

    @override
    def measure_batch(self, batch: Mapping[str, Any]) -> MicroBatch | None:
        assert self.model is not None
        return measure_images(self.model, batch["pixel_values"], is_mixed=self.mixup is not None)

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.class_names = list_classes(get_data_module(self.trainer), self.num_classes)

    @override
    def configure_model(self) -> None:
        if self.model is not None:  # a second run of the same object, whose images may have another size
            self._follow_images(self.model.config)
            return
        config = self.read_config()
        with explain_build_errors(self.config_settings):
            model = build_classifier(config, self.attention)
        self.choose_head(find_head(config, model, build_classifier))
        self._follow_images(config)
        preprocessing = self._get_preprocessing()
        if self.pretrained is not None and preprocessing and self.trainer.state.fn == TrainerFn.FITTING:
            compare_colors(preprocessing, self.pretrained, get_pretrained_folder(self.pretrained))
        self.resolve_quantization(model)
        blocks = list_blocks(model) if self.layer_decay != 1 else []  # adapters would count as weights
        self.adapt_model(model, lora=self.lora, quantization=self.quantization)
        freeze_modules(model, self.frozen_names, self.head_modules)
        if self.layer_decay != 1:
            self._distances = measure_distances(model, blocks, self.layer_decay)
        self.val_metrics, self.test_metrics = (Metrics(len(self.class_names)) for _ in range(2))
        self.take_model(model)

    def _follow_images(self, config: PreTrainedConfig) -> None:
        if preprocessing := self._get_preprocessing():
            self._image_size = preprocessing.size
            self._interpolates = check_size(config, preprocessing.size)

    def _get_preprocessing(self) -> Preprocessing | None:
        return getattr(get_data_module(self.trainer), "preprocessing", None)

    @override
    def read_config(self) -> PreTrainedConfig:
        """Return the model's configuration, with the classes."""
        config = super().read_config()
        set_classes(config, self.class_names, self.drop_path)
        return config

    @override
    def get_lr_factors(self) -> dict[nn.Parameter, float]:
        if not self._distances or self.model is None:
            return {}
        return {p: self.layer_decay ** self._distances[clean_name(name)] for name, p in self.model.named_parameters()}

    # Steps

    @override
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if mode and self.model is not None:
            rest_frozen(self.model)
        return self

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits [batch, classes]. Under a sharding strategy all ranks must call it.

        Args:
            pixel_values: [batch, channels, height, width].
        """
        return self.compute_logits(pixel_values)

    def compute_logits(self, pixel_values: Tensor) -> Tensor:
        """Return logits [batch, classes], inside of a step: calling ``self`` there would gather the root twice.

        Args:
            pixel_values: [batch, channels, height, width].
        """
        assert self.model is not None
        options = {"interpolate_pos_encoding": True} if self._interpolates else {}
        return self.model(pixel_values=pixel_values, **options)[0]  # not by a name: PP-LCNet has another one

    def sum_losses(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the sum of the losses of all images with a class: the place for a loss of your own.

        Args:
            logits: [batch, classes].
            labels: [batch]; -100 is no target.
            label_smoothing: Share of each target that is spread over all classes.
        """
        return nn.functional.cross_entropy(
            logits.float(), labels, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing
        )

    @property
    @override
    def is_sum_of_rows(self) -> bool:
        return self.mixup is None

    @override
    def split_batch(self, batch: Batch, num_parts: int) -> Sequence[BatchPart]:
        if not self.is_sum_of_rows:
            raise ValueError("mixup mixes images of one micro-batch, which parts would change")
        return super().split_batch({name: batch[name] for name in ("pixel_values", "labels")}, num_parts)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.model is not None
        rest_frozen(self.model)  # Lightning does not call train() before a fit

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Count bad images: here, as ``training_step`` may run again after it ran out of memory."""
        self._skipped.add("train", batch)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pixels, labels = batch["pixel_values"], batch["labels"]
        is_valid = labels != IGNORED
        if self.mixup is None:
            loss_sum = self.sum_losses(self.compute_logits(pixels), labels, self.label_smoothing)
            return self.weigh_loss(loss_sum, is_valid.sum())
        mixed = mix(pixels, is_valid, self.mixup)
        logits, pair = self.compute_logits(mixed.pixels), (labels, labels[mixed.partners])
        own, other = (self.sum_losses(logits, targets, self.label_smoothing) for targets in pair)
        return self.weigh_loss(mixed.share * own + (1 - mixed.share) * other, is_valid.sum())

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._sync_buffers()

    on_test_start = on_predict_start = on_validation_start

    def _sync_buffers(self) -> None:
        """Do as FSDP2Strategy does where another strategy runs the task."""
        if self.model is not None and not isinstance(self.trainer.strategy, FSDP2Strategy):
            sync_buffers(self.model)

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        for metrics in (self.val_metrics, self.test_metrics):
            if metrics is not None:
                metrics.reset()

    on_test_epoch_start = on_validation_epoch_start

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_metrics)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch, self.test_metrics)

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch, metrics: Metrics | None) -> None:
        assert metrics is not None
        self._skipped.add(stage, batch)
        logits, labels = self.compute_logits(batch["pixel_values"]), batch["labels"]
        self.update_eval_loss(stage, self.sum_losses(logits, labels), (labels != IGNORED).sum())
        metrics.update(logits, labels)

    @override
    def log_evaluation(self, stage: Literal["val", "test"]) -> None:
        super().log_evaluation(stage)
        metrics = self.val_metrics if stage == "val" else self.test_metrics
        if metrics is None or not metrics.has_batches:
            return
        self._log_skipped(stage)
        found = self.evaluation[stage] = metrics.compute()
        for name, value in found.values.items():
            self.log(f"{stage}/{name}", value, sync_dist=True)  # equal on all ranks already

    def _log_skipped(self, stage: str) -> None:
        if total := self._skipped.finish(stage, self.trainer):
            self.log(f"{stage}/skipped_images", float(total), sync_dist=True)  # likewise

    @override
    def on_train_epoch_end(self) -> None:
        self._log_skipped("train")

    @override
    def on_predict_epoch_end(self) -> None:
        self._skipped.finish("predict", self.trainer)

    @property
    def skipped_images(self) -> dict[str, int]:
        """How many images of the last epoch of each stage could not be decoded, over all ranks."""
        return self._skipped.totals

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, list[Any]]:
        """Classify images; see :func:`list_predictions`."""
        self._skipped.add("predict", batch)
        return list_predictions(self.compute_logits(batch["pixel_values"]), batch, self.class_names)

    # Checkpoints

    @override
    def collect_export_files(self, model: PreTrainedModel, **changes: Any) -> dict[str, str | bytes]:
        """Return the same with the processor of the images."""
        files = super().collect_export_files(model, **changes)
        if (preprocessing := self._get_preprocessing()) is not None:
            files[PROCESSOR_FILE] = preprocessing.describe()
        return files

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self._sync_buffers()  # in place, so in the state that is saved too
        if EXPORT in checkpoint and self._interpolates:
            checkpoint[IMAGE_SIZE] = list(self._image_size)
