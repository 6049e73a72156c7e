"""Training of a sequence classifier of Transformers: classes, numbers, or a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.strategy.batch_split import BatchPart
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.tasks.classifier import CLASSES, Classifier, find_head, list_classes, name_classes
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.sequence_classification.labels import MULTI, REGRESSION, REWARD, SINGLE, ProblemType
from lit_fsdp.tasks.sequence_classification.metrics import HEADLINES, build_metrics, update_metrics
from lit_fsdp.tasks.text.batches import IGNORED, Batch, read_exact
from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text.tokenizer import get_pad_id
from lit_fsdp.tasks.text_model import ModelKind
from lit_fsdp.tasks.text_task import TextTask
from lit_fsdp.weights.base_weights import get_pretrained_folder
from lit_fsdp.weights.safetensors_io import TensorFiles

CLASSIFIER = ModelKind(
    auto_class=AutoModelForSequenceClassification,
    name="sequence classifier",
    expected="one such as modernbert, roberta, llama or qwen3",
)
_NUMBER = ["LABEL_0"]  # what Transformers calls the output of a model that has one
_PLANNED_CLASSES = 2  # where a plan cannot know


class SequenceClassification(Classifier, TextTask):
    """Trains any sequence classifier of Transformers: one label of a text or several, a number, or a reward.

    What it is follows from the data, see ``LabeledTextData``. The head is made anew for the classes of the data, unless
    the model was trained for just these. A reward model learns that of a pair the first text is better (Bradley-Terry).

    Metrics: ``train/loss`` over all rows of a step, ``train/grad_norm``, ``train/learning_rate`` and
    ``train/samples_seen``. Under ``val/`` and ``test/`` there are ``loss`` and, of one label, ``accuracy_pct`` and
    ``f1_pct`` (mean over classes); of several, ``exact_match_pct`` and ``f1_pct``; of a number, ``mse`` and
    ``pearson``. Of a reward, ``accuracy_pct`` says of how many pairs the better text has the higher one.

    Args:
        pretrained: Model name on the Hugging Face Hub, or a folder with ``config.json`` and safetensors.
        config: Instead, the architecture of a model with random weights: ``model_type`` and the arguments of its
            Transformers configuration.
        num_labels: How many classes the model has, if the data does not say it.
        attention: Implementation of attention. ``auto`` is ``sdpa``, that of torch, where the model has it, else
            ``eager``; ``flash_attention_2`` needs the package flash-attn and a GPU.
        head: ``new`` draws the classification head at random; ``keep`` takes that of ``pretrained``; ``auto`` keeps it
            where its classes are those of the data.
        lora: Train low-rank adapters, and the head, and leave the rest as it is; ``null`` trains all of it.
        quantization: Keep the frozen weights in 4 or 8 bits; needs ``lora``.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
    """

    target_name = "samples"
    headline_metric = HEADLINES[SINGLE]
    headline_mode = "max"
    example_config = "{model_type: modernbert, hidden_size: 256}"
    kind = CLASSIFIER

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        num_labels: int | None = None,
        attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto",
        head: Literal["auto", "new", "keep"] = "auto",
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
    ) -> None:
        super().__init__(
            head=head,
            pretrained=pretrained,
            config=config,
            attention=attention,
            lora=lora,
            quantization=quantization,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        if num_labels is not None and num_labels < 2:
            raise ValueError(f"num_labels: got {num_labels}: expected 2 or more; a number or a reward needs no setting")
        self.num_labels = num_labels
        self.problem_type: ProblemType = SINGLE
        self.metrics: nn.ModuleDict | None = None  # of val and test
        self._pad_id: int | None = None

    # Model

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        """Fetch the configuration of the model, and nothing else."""
        self._set_problem(data)
        notes = super().prepare_plan(data)
        known = getattr(data, "classes", None)
        if self.problem_type in (REGRESSION, REWARD):
            self.class_names = _NUMBER
        elif known is None and self.num_labels is None:
            notes.append(f"the number of classes is taken to be {_PLANNED_CLASSES}; model.init_args.num_labels says it")
            self.class_names = [str(i) for i in range(_PLANNED_CLASSES)]
        else:
            self.class_names = list(known or map(str, range(self.num_labels or 0)))
        return notes

    @override
    def setup(self, stage: str) -> None:
        data = get_data_module(self.trainer)
        self._set_problem(data)
        super().setup(stage)
        if self.problem_type in (REGRESSION, REWARD):
            if self.num_labels is not None:
                raise ValueError(
                    f"num_labels: got {self.num_labels}: a {self.problem_type} has one output; leave it out"
                )
            self.class_names = _NUMBER
        elif self.model is None or getattr(data, "classes", None) is not None:
            self.class_names = list_classes(data, self.num_labels, setting="num_labels")
        if self.has_tokenizer:
            self._pad_id = get_pad_id(data.tokenizer)

    def _set_problem(self, data: Any) -> None:
        if isinstance(data, TextData):
            got = type(data).__name__
            raise ValueError(f"data: got {got}: its rows have no labels; set LabeledTextData")  # noqa: TRY004
        found: ProblemType | None = getattr(data, "problem_type", None)
        if self.model is not None:  # a second run of the same object; rows to predict do not say what they are for
            if found not in (None, self.problem_type):
                raise ValueError(
                    f"data.problem_type: got {found!r}: the model was made for {self.problem_type!r}: make a task anew"
                )
            return
        self.problem_type = found or SINGLE
        self.headline_metric = HEADLINES[self.problem_type]

    @override
    def read_config(self) -> PreTrainedConfig:
        """Return the model's configuration, with the classes."""
        config = super().read_config()
        if not self.knows_classes:  # before the data is known
            return config
        name_classes(config, self.class_names)
        if self.problem_type != REWARD:
            config.update({"problem_type": self.problem_type})
        if self._pad_id is not None:  # by which decoders find the end of a text
            config.get_text_config().pad_token_id = self._pad_id
        elif config.get_text_config().pad_token_id is None:
            config.get_text_config().pad_token_id = 0
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # as all models of T5 have it, but no new configuration
        return config

    @override
    def build_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        model = super().build_model(config)
        self.choose_head(*_list_head(model, find_head(config, model, super().build_model), self.pretrained))
        self.metrics = nn.ModuleDict(
            {stage: build_metrics(self.problem_type, len(self.class_names)) for stage in ("val", "test")}
        )
        return model

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        _refuse_number(checkpoint, self.problem_type)
        super().on_load_checkpoint(checkpoint)

    # Steps

    def compute_logits(self, batch: Batch) -> Tensor:
        """Return logits [texts, outputs] in float32, inside of a step.

        Args:
            batch: ``input_ids`` and ``attention_mask`` [texts, length].
        """
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if getattr(self.model.config, "summary_type", None) == "last":  # type: ignore[union-attr]  # as of XLNet
            inputs = _pad_in_front(**inputs)
        logits: Tensor = self.run_model(**inputs).logits.float()
        return logits

    @override
    def split_batch(self, batch: Batch, num_parts: int) -> Sequence[BatchPart]:
        if self.problem_type != REWARD:
            return super().split_batch(batch, num_parts)
        texts = ("input_ids", "attention_mask")  # [2 * rows, length], pairs in turn
        pairs = {name: value.unflatten(0, (-1, 2)) if name in texts else value for name, value in batch.items()}
        return [
            ({name: value.flatten(0, 1) if name in texts else value for name, value in part.items()}, weight)
            for part, weight in super().split_batch(pairs, num_parts)
        ]

    @override
    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all rows with a label, and their number.

        Args:
            batch: ``input_ids`` and ``attention_mask`` [texts, length], and ``labels`` [batch], or [batch, classes] of
                0 and 1 for several labels. Numbers to predict are those of ``keep_exact``. Of a reward, texts are pairs
                in turn.
        """
        return self.sum_losses(self.compute_logits(batch), self._read_labels(batch))

    def _read_labels(self, batch: Batch) -> Tensor:
        return read_exact(batch["labels"]) if self.problem_type == REGRESSION else batch["labels"]

    def sum_losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all rows with a label, and their number: the place for a loss of your own.

        Args:
            logits: [texts, outputs].
            labels: [batch] or [batch, classes]; -100, or NaN where they are numbers, is no label.
        """
        if self.problem_type == SINGLE:
            loss_sum = functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
            return loss_sum, (labels != IGNORED).sum()
        is_label = ~labels.isnan()
        labels = torch.where(is_label, labels, 0.0)
        if self.problem_type == MULTI:
            losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
            is_label = is_label.all(1)
        elif self.problem_type == REGRESSION:
            losses = (logits[:, 0] - labels).square()
        else:
            losses = -functional.logsigmoid(logits[0::2, 0] - logits[1::2, 0])
        return (losses * is_label).sum(), is_label.sum()

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        for stage in ("val", "test"):
            self._get_metrics(stage).reset()

    on_test_epoch_start = on_validation_epoch_start

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch) -> None:
        logits, labels = self.compute_logits(batch), self._read_labels(batch)
        self.update_eval_loss(stage, *self.sum_losses(logits, labels))
        update_metrics(self._get_metrics(stage), self.problem_type, logits, labels)

    def _get_metrics(self, stage: str) -> MetricCollection:
        assert self.metrics is not None
        metrics = self.metrics[stage]
        assert isinstance(metrics, MetricCollection)
        return metrics

    on_test_start = on_predict_start = Classifier.on_validation_start

    @override
    def log_evaluation(self, stage: Literal["val", "test"]) -> None:
        super().log_evaluation(stage)
        metrics = self._get_metrics(stage)
        for name, value in metrics.compute().items():  # over all ranks
            scaled = 100 * value if name.endswith("_pct") else value
            self.log(f"{stage}/{name}", scaled.float(), sync_dist=True)  # equal on all ranks already
        metrics.reset()

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, list[Any]]:
        """Return ``index`` of each row in its source, ``prediction``, and ``probability`` where there are classes."""
        logits, names = self.compute_logits(batch), self.class_names
        found: dict[str, list[Any]] = {"index": batch["index"].tolist()}
        if self.problem_type == SINGLE:
            probability, predicted = logits.softmax(1).max(1)
            return found | {"prediction": [names[i] for i in predicted], "probability": probability.tolist()}
        if self.problem_type == MULTI:
            shares = logits.sigmoid().tolist()
            chosen = [[name for name, p in zip(names, row, strict=True) if p > 0.5] for row in shares]
            return found | {"prediction": chosen, "probability": [dict(zip(names, row, strict=True)) for row in shares]}
        return found | {"prediction": logits[:, 0].tolist()}


def _refuse_number(checkpoint: Mapping[str, Any], problem: ProblemType) -> None:
    """Refuse a checkpoint that predicts numbers for data of which only classes are known, as of rows to predict."""
    if checkpoint.get(CLASSES) == _NUMBER and problem not in (REGRESSION, REWARD):
        raise ValueError(
            f"data.problem_type: is {problem!r} here, and the checkpoint gives each text one number: set it to "
            f"{REGRESSION}, or to {REWARD} if it was trained on pairs"
        )


def _pad_in_front(input_ids: Tensor, attention_mask: Tensor) -> Batch:
    """Move padding before the text, for models that read the last place of a row, padded or not.

    Args:
        input_ids: [texts, length].
        attention_mask: The same; 0 is padding.
    """
    order = attention_mask.argsort(dim=1, stable=True)
    return {"input_ids": input_ids.gather(1, order), "attention_mask": attention_mask.gather(1, order)}


def _list_head(model: PreTrainedModel, head: list[str], pretrained: str | None) -> tuple[list[str], list[str]]:
    """Return the modules of the head, and those that files of ``pretrained`` lack, such as a pooler.

    Args:
        model: On the meta device.
        head: What of it depends on the number of classes.
        pretrained: Name or folder of what is loaded.
    """
    base = f"{model.base_model_prefix}."
    own = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    if any(name.startswith(base) for name in own):
        # Also layers between. The base itself is none, though that of XLNet has parameters of its own.
        head = [name for name in own if not f"{name}.".startswith(base)]
    poolers = [name for name in own if "pooler" in name and name not in head]
    if pretrained is None or not poolers:
        return head, []
    folder = get_pretrained_folder(pretrained)
    if not any(folder.glob("*.safetensors")):  # a plan fetches none
        return head, []
    with TensorFiles(folder) as files:
        stored = {name.removeprefix(base) for name in files.tensors}
    return head, [name for name in poolers if f"{name.removeprefix(base)}.weight" not in stored]
