"""Training of a causal language model of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available
from typing_extensions import override

from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.causal_lm.batches import IGNORED, Batch
from lit_fsdp.tasks.causal_lm.chunked_loss import check_chunked_loss, install_chunked_loss, sum_chunked_losses
from lit_fsdp.tasks.causal_lm.model import build_model, check_data, check_generation, check_length, check_packing
from lit_fsdp.tasks.causal_lm.tokenizer import get_pad_id
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.masks import keep_branches, needs_mask
from lit_fsdp.tasks.pretrained import PretrainedTask, explain_build_errors, read_tokenizer_files
from lit_fsdp.weights.base_weights import get_pretrained_folder

GENERATION = "generation_config.json"


class CausalLM(PretrainedTask):
    """Trains any causal language model of Transformers, from its weights or from scratch.

    Metrics: ``train/loss`` and ``train/perplexity`` over all target tokens of a step, ``train/grad_norm``,
    ``train/learning_rate``, ``train/tokens_seen`` (target tokens), and loss and perplexity of ``val/`` and
    ``test/``.

    Args:
        pretrained: Model name on the Hugging Face Hub, or a folder with ``config.json`` and safetensors.
        config: Instead, the architecture of a model with random weights: ``model_type`` and the arguments of its
            Transformers configuration.
        attention: Implementation of attention. ``sdpa`` is that of torch; ``flash_attention_2`` needs the
            package flash-attn and a GPU.
        lora: Train low-rank adapters and leave the model as it is; ``null`` trains all of it.
        quantization: Keep the frozen weights in 4 or 8 bits; needs ``lora``. Taken from the files of
            ``pretrained`` where these are quantized already.
        loss_chunks: Compute output head and loss in this many parts of the tokens, each once more in backward. 8 leave
            an eighth of the memory of logits, most of it in models with a large vocabulary, for about 5 % of time.
            1 computes all at once.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
        sample_prompts: Texts to continue when training ends, printed.
        generation: Arguments of ``generate`` for samples and predictions, such as ``max_new_tokens``.
    """

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa",
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        loss_chunks: int = 1,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
        sample_prompts: list[str] | None = None,
        generation: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            pretrained=pretrained,
            config=config,
            lora=lora,
            quantization=quantization,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        self.attention = attention
        self.loss_chunks = loss_chunks
        self.check_loss_chunks()
        self.sample_prompts = sample_prompts or []
        self.generation = {"max_new_tokens": 64, **(generation or {})}
        self._is_packing_checked = False
        check_generation(self.generation)
        if empty := [prompt for prompt in self.sample_prompts if not prompt]:
            raise ValueError(f"sample_prompts: {len(empty)} of them are empty; expected a word or more")

    def check_loss_chunks(self) -> None:
        """Refuse a loss in chunks that could not be computed."""
        if self.loss_chunks < 1:
            raise ValueError(f"loss_chunks: got {self.loss_chunks}: expected 1 or more, such as 8")
        if self.loss_chunks > 1 and type(self).sum_losses is not CausalLM.sum_losses:
            raise ValueError(
                f"loss_chunks: got {self.loss_chunks}: {type(self).__name__}.sum_losses takes the logits of all "
                "tokens; set loss_chunks: 1"
            )

    # Model

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        """Fetch the configuration of the model, and nothing else."""
        notes = super().prepare_plan(data)
        check_length(self.read_config(), data)
        return notes

    @override
    def measure_batch(self, batch: Mapping[str, Any]) -> MicroBatch:
        rows, length = batch["input_ids"].shape
        return MicroBatch(rows=rows, length=length, is_masked=needs_mask(batch))

    @override
    def enter_dry_run(self, batch: Mapping[str, Any]) -> AbstractContextManager[None]:
        return keep_branches(batch)

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.attention == "flash_attention_2" and not is_flash_attn_2_available():
            raise ValueError(
                "attention: got 'flash_attention_2': it needs a GPU and a package: pip install flash-attn; "
                "or set sdpa, which is fast too"
            )
        check_data(self.read_config(), getattr(self.trainer, "datamodule", None))

    @override
    def configure_model(self) -> None:
        if self.model is not None:  # a second run of the same object
            return
        with explain_build_errors(self.config_settings):
            model = build_model(self.read_config(), self.attention)
        self.resolve_quantization(model)
        self.adapt_model(model, lora=self.lora, quantization=self.quantization)
        if self.loss_chunks > 1:
            install_chunked_loss(model, self.loss_chunks)
        self.model = model  # not before all is well: other strategies could not move it away
        self.finish_model()

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        if self.lora is not None and next(iterate_adapters(self), None) is None:
            name = type(self).__name__.removeprefix("FSDP")
            raise ValueError(
                f"lora: {name}.configure_model has added no adapters; call self.adapt_model there, or leave it out"
            )
        return super().configure_optimizers()

    @property
    @override
    def restores_frozen(self) -> bool:
        return self.pretrained is not None

    # Steps

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary]. Under a sharding strategy all ranks must call it.

        Args:
            inputs: ``input_ids``, and ``position_ids`` or ``attention_mask``.
        """
        assert self.model is not None
        return self.model(**inputs, use_cache=False).logits

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all target tokens, and their number.

        Args:
            batch: ``input_ids`` and ``labels`` [batch, length], and ``position_ids`` (packed) or
                ``attention_mask`` (padded) of that shape. Labels are not shifted; -100 is no target.
        """
        assert self.model is not None
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = batch["labels"]
        if self.loss_chunks > 1:
            return sum_chunked_losses(self.model, inputs, labels), (labels[:, 1:] != IGNORED).sum()
        return self.sum_losses(self.model(**inputs, use_cache=False), labels)

    def sum_losses(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all target tokens, and their number: the place for a loss of your own.

        Args:
            output: Of the model, with ``logits`` [batch, length, vocabulary].
            labels: [batch, length], not shifted; -100 is no target.
        """
        assert self.model is not None
        config = self.model.config.get_text_config()
        num_targets = (labels[:, 1:] != IGNORED).sum()
        # The model's own loss, as a sum: divided by "1 item".
        loss_sum = self.model.loss_function(
            logits=output.logits, labels=labels, vocab_size=config.vocab_size, num_items_in_batch=1
        )
        if getattr(output, "aux_loss", None) is not None:
            # Of mixture-of-experts routers, a mean over tokens already.
            loss_sum = loss_sum + config.router_aux_loss_coef * output.aux_loss * num_targets
        return loss_sum, num_targets

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.weigh_loss(*self.compute_loss(batch))

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.update_eval_loss("val", *self.compute_loss(batch))

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.update_eval_loss("test", *self.compute_loss(batch))

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Continue prompts; return ``index`` of each in its source and ``prediction``."""
        texts = self._continue(batch["input_ids"], batch["attention_mask"])
        return {"index": batch["index"].tolist(), "prediction": texts}

    @override
    def on_fit_start(self) -> None:
        self._check_packing()
        if self.loss_chunks > 1:
            assert self.model is not None
            check_chunked_loss(self, self.model)

    @override
    def on_validation_start(self) -> None:
        self._check_packing()

    on_test_start = on_validation_start

    def _check_packing(self) -> None:
        if self._is_packing_checked or not getattr(getattr(self.trainer, "datamodule", None), "packing", False):
            return
        self._is_packing_checked = True
        assert self.model is not None
        was_training = self.training
        self.eval()
        name = f"{type(self.model).__name__.removeprefix('FSDP')} with {self.attention} attention"
        check_packing(self, self.model.config.get_text_config().vocab_size, self.device, name)
        self.train(was_training)

    def generate(self, prompts: list[str]) -> list[str]:
        """Return continuations of texts. Under a sharding strategy all ranks must call it.

        Args:
            prompts: At least one.
        """
        tokenizer = self._get_tokenizer()
        rows = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        length, pad = max(map(len, rows)), get_pad_id(tokenizer)
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=self.device)
        return self._continue(ids, mask)

    @override
    def on_train_end(self) -> None:
        """Print continuations of ``sample_prompts``."""
        if not self.sample_prompts:
            return
        self.eval()
        with torch.no_grad():
            texts = self.generate(self.sample_prompts)
        self.train()
        for prompt, text in zip(self.sample_prompts, texts, strict=True):
            rank_zero_info(f"sample: {prompt}|{text}")

    def _continue(self, input_ids: Tensor, attention_mask: Tensor) -> list[str]:
        assert self.model is not None
        tokenizer = self._get_tokenizer()
        generate: Any = self.model.generate
        # Of chat models several tokens end a text, that of a turn among them.
        ends: Any = getattr(self.model.generation_config, "eos_token_id", None)
        known = isinstance(ends, list) and tokenizer.eos_token_id in ends
        settings = {"eos_token_id": ends if known else tokenizer.eos_token_id, **self.generation}
        output = generate(
            input_ids=input_ids,  # [batch, length], padded on the left
            attention_mask=attention_mask,
            pad_token_id=get_pad_id(tokenizer),
            synced_gpus=self.trainer.world_size > 1,  # ranks go on until the last is done: each step gathers
            **settings,
        )
        return tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)

    # Checkpoints

    @override
    def collect_export_files(self, model: PreTrainedModel, **changes: Any) -> dict[str, str | bytes]:
        """Return the same with the tokenizer, if the data has one, and how to generate."""
        generation = deepcopy(model.generation_config)
        files: dict[str, str | bytes] = {}
        if hasattr(getattr(self.trainer, "datamodule", None), "tokenizer"):
            tokenizer = self._get_tokenizer()
            files = read_tokenizer_files(tokenizer)
            if self.pretrained is None:  # or generation would end at a token that the model has never seen
                changes |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
                generation.update(**changes, pad_token_id=get_pad_id(tokenizer))
        files |= super().collect_export_files(model, **changes)
        if model.can_generate():
            files[GENERATION] = generation.to_json_string()
        if self.pretrained is not None and (given := get_pretrained_folder(self.pretrained) / GENERATION).is_file():
            files[GENERATION] = given.read_text()
        return files

    # Tokenizer

    def _get_tokenizer(self) -> Any:
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "tokenizer"):
            raise RuntimeError("generating text needs a data module with a tokenizer, such as TextData")
        return data.tokenizer
