"""Fine-tuning of text-to-speech models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.untrusted import refuse_other_forms
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.reporting.sections import Section
from lit_fsdp.sharding.wrap import Unit, Wrap, plan_units
from lit_fsdp.strategy.batch_split import BatchPart
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.tasks.base import Task
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.masks import keep_branches
from lit_fsdp.tasks.pretrained import describe_misfit
from lit_fsdp.tasks.tts.batch_places import count_step
from lit_fsdp.tasks.tts.checkpoint import SPEECH, check_run, describe_run, read_generation_config
from lit_fsdp.tasks.tts.evaluation.generated import describe_samples
from lit_fsdp.tasks.tts.evaluation.metrics import SpeechMetrics
from lit_fsdp.tasks.tts.evaluation.predict import Prediction
from lit_fsdp.tasks.tts.evaluation.samples import SpokenSamples
from lit_fsdp.tasks.tts.evaluation.speech_eval import SpeechEval, SpeechEvaluator
from lit_fsdp.tasks.tts.families.family import Family, FamilyConfig, SpeechOutput
from lit_fsdp.tasks.tts.families.model_types import parse_family, read_family
from lit_fsdp.tasks.tts.generation import Sampling, SamplingValues, Speech
from lit_fsdp.tasks.tts.parts import (
    check_adapters,
    check_parts,
    count_parts,
    freeze_parts,
    list_outside_blocks,
    make_parts_section,
)
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.pretrained import check_stored, fetch_speech_model
from lit_fsdp.tasks.tts.utterance import Batch
from lit_fsdp.weights.base_weights import (
    BASE,
    CONFIG,
    begin_fingerprint,
    fetch_pretrained,
    get_pretrained_folder,
    knows_all_values,
)
from lit_fsdp.weights.load import init_weights

_MAX_RATIO = 3  # speech of validation is up to this many times as long as what was recorded
Part = Literal["talker", "text_embedding", "audio_embedding", "code_predictor", "encoder", "decoder"]


class TextToSpeech(Task):
    """Trains Qwen3-TTS (12 Hz), CSM or Dia on prepared speech, from published weights or from scratch.

    ``model_type`` in the model's ``config.json`` says which of them it is; docs/speech.md says what each can do. The
    loss has two parts: cross-entropies over codebook 0 with the end, and over the other codebooks. Each is a mean over
    the whole step.

    Metrics: ``train/loss``, ``train/talker_loss``, ``train/sub_talker_loss``, ``train/grad_norm``,
    ``train/learning_rate``, ``train/tokens_seen`` (frames and ends); of ``val/`` the losses,
    ``accuracy_codebook_00_pct`` and so on, ``eos_recall_pct``, and with ``num_samples`` the ``duration_ratio``,
    ``missed_eos_pct`` and ``equal_codes_pct`` of generated speech, and with ``speech_eval`` its ``wer_pct``,
    ``cer_pct`` and, of Qwen3-TTS, ``speaker_similarity``.

    Args:
        pretrained: Model name on the Hugging Face Hub, such as Qwen/Qwen3-TTS-12Hz-1.7B-Base, sesame/csm-1b or
            nari-labs/Dia-1.6B-0626, or a folder.
        config: Instead, the contents of such a model's ``config.json``, for a model with random weights.
        attention: Implementation of attention. ``sdpa`` is that of torch; ``flash_attention_2`` needs the package
            flash-attn and a GPU.
        freeze: Parts to freeze. Qwen3-TTS has ``talker``, ``text_embedding`` (a sixth of the 1.7B model and a
            third of the 0.6B one) and ``code_predictor``, and its speaker encoder never trains; CSM also has
            ``audio_embedding``; Dia has ``encoder`` and ``decoder``.
        lora: Train low-rank adapters and leave the model as it is; ``null`` trains it. ``target_modules:
            all-linear`` means the linear layers of the blocks; of Qwen3-TTS and CSM, those of the talker only.
        quantization: Keep the linear layers of the blocks, of all parts, in 4 or 8 bits; needs ``lora``.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
        sampling: How speech is generated; what is not given is as ``pretrained`` has it, or else its family.
        num_samples: Generate speech for up to N rows of validation, or of training where nothing is held out, after
            each validation and when training ends, and compare it with what was recorded. Speech without an end is cut
            at three times the longest of them. What fails there is a warning, and training goes on. 0 generates none.
        speech_eval: Decode that speech, give it to the loggers, and measure voice and words; ``null`` compares codes
            only. In ``predict`` its codec writes a WAV file of each text.
    """

    has_perplexity = False

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa",
        freeze: Sequence[Part] = (),
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
        sampling: Sampling | None = None,
        num_samples: int = 0,
        speech_eval: SpeechEval | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if (pretrained is None) == (config is None):
            raise ValueError("pretrained or config: expected one of them: a model's name or folder, or its config.json")
        if lora is not None and freeze:
            raise ValueError("freeze: not used with lora, which freezes all of the model; leave one of them out")
        if num_samples < 0:
            raise ValueError(f"num_samples: got {num_samples}: expected 0 or more")
        self.pretrained, self.config_settings = pretrained, config
        self.attention, self.frozen_names = attention, tuple(freeze)
        self.lora, self.quantization = lora, quantization
        check_adapters(lora, quantization)
        self.sampling = sampling or Sampling()
        self.sampling.complete()
        self.num_samples, self.speech_eval = num_samples, speech_eval
        self.model: nn.Module | None = None
        self.val_metrics: SpeechMetrics | None = None
        self._part_sizes: dict[str, tuple[int, int]] = {}  # parameters of each part of the model, all and trained
        self._parts: Tensor | None = None  # [4] of this step: both losses, both counts
        self._evaluator = SpeechEvaluator(speech_eval) if speech_eval is not None else None
        self._samples = SpokenSamples(num_samples, self._evaluator)
        self.report = self._samples.report
        self._prediction: Prediction | None = None
        self._files: dict[str, Any] | None = None  # what a checkpoint says besides its tensors
        self._opened: tuple[Family, FamilyConfig] | None = None
        if config is not None:
            self._check_family()

    # Model

    @override
    def prepare_data(self) -> None:
        """Download the model, on one process per node."""
        if self.pretrained is not None:
            fetch_speech_model(self.pretrained)
        if self._evaluator is not None:
            self._evaluator.fetch()

    @override
    def check_data(self, data: Any, stage: str) -> None:
        """Fetch the configuration of the model, and check the rows by it."""
        if hasattr(data, "check_rows"):
            self._fetch_config()
            data.check_rows(stage, self.read_config())

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        """Fetch the configuration of the model, and nothing else."""
        self._fetch_config()
        if hasattr(data, "attach"):
            data.attach(self.read_config())
        return super().prepare_plan(data)

    def _fetch_config(self) -> None:
        if self.pretrained is not None:
            fetch_pretrained(self.pretrained, patterns=CONFIG)

    @override
    def measure_batch(self, batch: Mapping[str, Any]) -> MicroBatch:
        return self.family.measure_batch(batch)

    def read_step(self, step: ModelReader) -> int:
        """Put a step on the tape of a plan; see ``Family.read_step``."""
        return self.family.read_step(self.model, step)

    @override
    def enter_dry_run(self, batch: Mapping[str, Any]) -> AbstractContextManager[None]:
        return keep_branches(batch)

    @property
    def family(self) -> Family:
        """What kind of model it is, by its configuration."""
        return self._open()[0]

    def read_config(self) -> FamilyConfig:
        """Return the model's configuration."""
        return self._open()[1]

    def _check_family(self) -> None:
        check_parts(self.family, self.frozen_names)
        self.family.check_sampling(self.sampling)

    def _open(self) -> tuple[Family, FamilyConfig]:
        if self._opened is None:
            if self.pretrained is not None:
                self._opened = read_family(get_pretrained_folder(self.pretrained))
                check_stored(self._opened[1].raw, self.pretrained)
            else:
                assert self.config_settings is not None
                self._opened = parse_family(deepcopy(self.config_settings))
        return self._opened

    @override
    def setup(self, stage: str) -> None:
        family, config = self._open()
        self.complete_sampling()
        self._files = None  # of another run's data
        super().setup(stage)
        if stage == "fit":  # nothing of another run's steps
            self._parts, self._samples = None, SpokenSamples(self.num_samples, self._evaluator)
            self.report = self._samples.report
        if self._evaluator is not None:
            if not self.num_samples and stage != "predict":
                raise ValueError("speech_eval: not used, as num_samples is 0; set that, or leave it out")
            self._evaluator.check(config)
        if self.val_metrics is None:
            self.val_metrics = SpeechMetrics(config.num_codebooks, family.get_loss_weights(config))

    @override
    def configure_model(self) -> None:
        if self.model is not None:  # a second run of the same object
            return
        family, config = self._open()
        self._check_family()
        with torch.device("meta"):
            model = family.build_model(config, self.attention)
        if self.lora is not None and self.lora.target_modules == "all-linear":
            self.lora = replace(self.lora, target_modules=family.linears)
        rest = list_outside_blocks(model, family)
        self.adapt_model(model, lora=self.lora, quantization=self.quantization, keep=rest)
        freeze_parts(model, family, self.frozen_names)
        self._part_sizes = count_parts(family.list_parts(model))
        self.take_model(model)

    def make_section(self) -> Section | None:
        """Return the sizes of the parts of the model, for the report."""
        return make_parts_section(self._part_sizes) if self._part_sizes else None

    def configure_units(self, model: nn.Module) -> list[Unit]:
        """Return the units: each block of the model, the text embedding, the speaker encoder, and the rest.

        Args:
            model: This module.
        """
        idle = [name for name, _ in model.named_modules() if name.endswith("model.speaker_encoder")]
        return plan_units(model, Wrap(policy="module_classes", module_classes=self.family.blocks), idle=idle)

    @override
    def configure_weights(self) -> None:
        """Read this rank's shards of the pretrained weights, or draw random ones."""
        assert self.model is not None
        if self.pretrained is None:
            init_weights(self.model, self.get_seed())
        else:
            self.family.load_weights(self.model, get_pretrained_folder(self.pretrained), seed=self.get_seed())

    @property
    @override
    def restores_frozen(self) -> bool:
        # A full checkpoint keeps all of the model, the speaker encoder too.
        return self.pretrained is not None and self.lora is not None

    # Steps

    def forward(self, batch: Batch) -> SpeechOutput:
        """Return losses and logits. Under a sharding strategy all ranks must call it.

        Args:
            batch: From ``Family.collate``.
        """
        assert self.model is not None
        return self.model(batch)

    @override
    def split_batch(self, batch: Batch, num_parts: int) -> Sequence[BatchPart]:
        raise ValueError("a batch of speech has the frames of all utterances in one row, which has no rows to split")

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.forward(batch)
        counts = count_step(batch, output, self.trainer)
        sums = output.talker_loss, output.predictor_loss, output.num_tokens, output.num_frames
        parts = torch.stack([value.detach().double() for value in sums])
        self._parts = parts if self._parts is None else self._parts + parts
        # What divides the sum later is the number of tokens; frames have a number of their own.
        ratio = (counts[0] / counts[1].clamp(min=1)).to(output.predictor_loss.dtype)
        own, other = self.family.get_loss_weights(self.read_config())
        return self.weigh_loss(own * output.talker_loss + other * ratio * output.predictor_loss, output.num_tokens)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if self._parts is None:
            return
        parts, self._parts = self._parts, None
        if dist.is_initialized():
            dist.all_reduce(parts)
        talker, predictor = parts[0] / parts[2].clamp(min=1), parts[1] / parts[3].clamp(min=1)
        self.log_step({"train/talker_loss": talker.float(), "train/sub_talker_loss": predictor.float()})

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if self.val_metrics is not None:
            self.val_metrics.reset()

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert self.val_metrics is not None
        self.val_metrics.update(self.forward(batch), batch)

    @override
    def on_validation_epoch_end(self) -> None:
        assert self.val_metrics is not None
        if self.val_metrics.update_called:
            values = self.val_metrics.compute()
            self.val_metrics.reset()
            self.log_dict({f"val/{name}": value for name, value in values.items()}, sync_dist=True)
        if self.num_samples and not self.trainer.sanity_checking:
            self.log_dict(self._samples.speak(self), sync_dist=True)

    @override
    def on_train_end(self) -> None:
        """Generate the samples once more, and log how close they come."""
        if self.num_samples:
            if self._samples.tried_step != self.trainer.global_step:  # else validation has done it
                self._samples.speak(self)
            is_new = self.report.step == self.trainer.global_step  # not where the last ones failed
            for line in describe_samples(self.report) if is_new else ():
                rank_zero_info(line)

    # Generation

    @torch.no_grad()
    def generate(self, batch: Batch, rows: Sequence[PreparedRow] | None = None) -> list[Speech]:
        """Return the speech for prompts. Under a sharding strategy all ranks must call it.

        Args:
            batch: From ``Family.collate_prompts``.
            rows: What was recorded of them: the speech is then compared with it in ``report``, and evaluated.
        """
        assert self.model is not None
        on_device, sampling = {name: value.to(self.device) for name, value in batch.items()}, self.complete_sampling()
        if rows is not None:  # as long as no end is learned yet, the official limit would take minutes
            longest = max(len(row.codes) for row in rows)
            sampling = replace(sampling, max_frames=min(sampling.max_frames, _MAX_RATIO * longest))
        work = partial(self.family.generate, self.model, on_device, sampling)
        if rows is None:
            return work()
        voices = on_device.get("speaker", torch.zeros(len(rows), 1))
        return self._samples.compare(self, work, rows, list(voices))

    def complete_sampling(self) -> SamplingValues:
        """Return how speech is generated, with what ``pretrained`` says where ``sampling`` does not."""
        return self.family.complete_sampling(self.sampling, read_generation_config(self.pretrained))

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Generate speech; return the ``index`` of texts, codes as ``prediction``, and whether each ``has_ended``.

        With ``speech_eval``, ``audio`` has the path of each WAV file.
        """
        assert self._prediction is not None
        return self._prediction.describe(self.generate(batch), batch["index"].tolist())

    @override
    def on_predict_start(self) -> None:
        self._prediction = Prediction(self.trainer, self._evaluator)

    @override
    def on_predict_end(self) -> None:
        if self._prediction is not None:
            self._prediction.finish(self.complete_sampling().max_frames)

    # Checkpoints

    @property
    def _origin(self) -> dict[str, Any]:
        return {"pretrained": self.pretrained, "lora": self.lora, "quantization": self.quantization}

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.trainer.is_global_zero and self.lora is not None and self.pretrained is not None:
            begin_fingerprint(self.pretrained)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.trainer.is_global_zero and self.model is not None:
            if self._files is None or (BASE in self._files and not knows_all_values(self._files[BASE])):
                data = get_data_module(self.trainer)
                self._files = describe_run(self.read_config(), data, **self._origin)
            checkpoint.update(self._files)

    @override
    def describe_misfit(self, checkpoint: Mapping[str, Any]) -> str | None:
        return describe_misfit(checkpoint, lora=self.lora, config=self.config_settings)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        data = get_data_module(self.trainer)
        with refuse_other_forms():
            check_run(checkpoint, data, **self._origin, will_train=self.trainer.state.fn == "fit")
            if SPEECH in checkpoint and hasattr(data, "restore_voices"):
                data.restore_voices(checkpoint[SPEECH]["voices"])
