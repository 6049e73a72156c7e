"""Training of a causal language model of Transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.reporting.sections import Section
from lit_fsdp.sharding.sequence import SequenceGroup
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.lightning_strategies import call_in_forward
from lit_fsdp.tasks.attention import Attention
from lit_fsdp.tasks.causal_lm.chunked_loss import check_chunked_loss, install_chunked_loss, sum_chunked_losses
from lit_fsdp.tasks.causal_lm.samples import Prompt, Samples, encode_prompts
from lit_fsdp.tasks.causal_lm.sequence import (
    check_heads,
    check_split,
    mask_whole_rows,
    split_attention,
    split_batch,
)
from lit_fsdp.tasks.evaluation_mode import evaluation_mode
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.text.batches import IGNORED, Batch
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.tokenizer import get_pad_id
from lit_fsdp.tasks.text_model import add_turn_end, check_generation, get_end_ids, weigh_aux_loss
from lit_fsdp.tasks.text_task import TextTask
from lit_fsdp.weights.base_weights import get_pretrained_folder

GENERATION = "generation_config.json"


class CausalLM(TextTask):
    """Trains any causal language model of Transformers, from its weights or from scratch.

    Metrics: ``train/loss`` and ``train/perplexity`` over all target tokens of a step, ``train/grad_norm``,
    ``train/learning_rate``, ``train/tokens_seen`` (target tokens), and loss and perplexity of ``val/`` and
    ``test/``.

    Args:
        pretrained: Model name on the Hugging Face Hub, or a folder with ``config.json`` and safetensors.
        config: Instead, the architecture of a model with random weights: ``model_type`` and the arguments of its
            Transformers configuration.
        attention: How tokens attend. ``auto`` takes ``varlen`` for packed rows where the model allows it, else what
            Transformers would. ``varlen`` needs no mask: ``varlen_attn`` of torch on GPUs in half precision, elsewhere
            one document after another. ``sdpa`` and ``eager`` have a mask of the row length squared. ``flex_attention``
            is compiled, for GPUs; ``flash_attention_2``, ``3`` and ``4`` need a GPU and their package.
        lora: Train low-rank adapters and leave the model as it is; ``null`` trains all of it.
        quantization: Keep the frozen weights in 4 or 8 bits; needs ``lora``. Taken from the files of
            ``pretrained`` where these are quantized already.
        loss_chunks: Compute output head and loss in this many parts of the tokens, each once more in backward. 8 leave
            an eighth of the memory of logits, most of it in models with a large vocabulary, for about 5 % of time.
            1 computes all at once.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
        sample_prompts: What to answer at each validation, and when training ends: texts, which are continued, or lists
            of messages with ``role`` and ``content``, for the chat template. Answers are printed, logged and in the
            report.
        generation: Arguments of ``generate`` for samples and predictions, such as ``max_new_tokens``.
    """

    headline_metric = "perplexity"

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        attention: Attention = "auto",
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        loss_chunks: int = 1,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
        sample_prompts: list[Prompt] | None = None,
        generation: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            pretrained=pretrained,
            config=config,
            attention=attention,
            lora=lora,
            quantization=quantization,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        self.loss_chunks = loss_chunks
        self.check_loss_chunks()
        self.samples = Samples(sample_prompts or [])
        self.generation = {"max_new_tokens": 64, **(generation or {})}
        self._is_split_checked = False
        self._strategy: Any = None  # of the run
        check_generation(self.generation)

    def check_loss_chunks(self) -> None:
        """Refuse a loss in chunks that could not be computed."""
        if self.loss_chunks < 1:
            raise ValueError(f"loss_chunks: got {self.loss_chunks}: expected 1 or more, such as 8")
        if self.loss_chunks > 1 and type(self).sum_losses is not CausalLM.sum_losses:
            raise ValueError(
                f"loss_chunks: got {self.loss_chunks}: {type(self).__name__}.sum_losses takes the logits of all "
                "tokens; set loss_chunks: 1"
            )

    def check_sequence(self, size: int) -> None:
        """Refuse a ``mesh.sequence`` that could not share the tokens of a row, as far as is known without the model.

        Args:
            size: How many ranks, above 1.
        """
        if type(self).sum_losses is not CausalLM.sum_losses:
            raise ValueError(
                f"mesh.sequence: got {size}: {type(self).__name__}.sum_losses takes the labels of whole rows; set 1"
            )
        if self.attention.startswith(("flash", "flex")):
            raise ValueError(
                f"mesh.sequence: got {size} with attention {self.attention!r}, which takes whole rows; set attention: "
                "auto"
            )
        if self.pretrained is None or Path(self.pretrained).expanduser().is_dir():
            check_heads(self.read_config(), size)

    # Model

    # The closed form knows the step of this class, not of those below.
    measure_batch = TextTask.measure_batch

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = get_data_module(self.trainer)
        if hasattr(data, "given_problem") and type(self).compute_loss is CausalLM.compute_loss:
            raise ValueError(f"data: got {type(data).__name__}: its rows are labelled as a whole; set TextData")
        if self.samples.prompts and stage == "fit":
            self.samples.check(self.get_tokenizer())
        if (size := self._count_sharing()) > 1:
            check_heads(self.read_config(), size)

    def _count_sharing(self) -> int:
        """Return how many ranks share the tokens of a row."""
        strategy = self.trainer.strategy
        return strategy.settings.mesh.sequence if isinstance(strategy, FSDP2Strategy) else 1

    @override
    def configure_model(self) -> None:
        self._strategy = self.trainer.strategy
        super().configure_model()

    @override
    def change_model(self, model: PreTrainedModel) -> None:
        if self.loss_chunks > 1:
            install_chunked_loss(model, self.loss_chunks)
        if self._count_sharing() > 1:
            split_attention(model)

    @property
    @override
    def restores_frozen(self) -> bool:
        return self.pretrained is not None

    @property
    @override
    def leaves_out_frozen(self) -> bool:
        return self.lora is not None  # without, they are few, such as those that a model never trains

    # Steps

    def forward(self, **inputs: Any) -> Tensor:
        """Return logits [batch, length, vocabulary]. Under a sharding strategy all ranks must call it.

        With ``mesh.sequence`` too, these are whole rows, computed by each rank alone.

        Args:
            inputs: ``input_ids``, and ``position_ids`` or ``attention_mask``.
        """
        assert self.model is not None
        with self.pack_inputs(inputs) as packed:
            return self.model(**packed, use_cache=False).logits

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all target tokens, and their number.

        Args:
            batch: ``input_ids`` and ``labels`` [batch, length], and ``position_ids`` (packed) or
                ``attention_mask`` (padded) of that shape; and ``document_lengths``, as
                ``TextData`` adds them. Labels are not shifted; -100 is no target. With
                ``mesh.sequence`` the sum is that of this rank's tokens.
        """
        assert self.model is not None
        sequence: SequenceGroup | None = getattr(self._strategy, "sequence_group", None)
        if sequence is not None:
            return self._compute_own_loss(batch, sequence)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = batch["labels"]
        with self.pack_inputs(inputs) as packed:
            if self.loss_chunks > 1:
                return sum_chunked_losses(self.model, packed, labels), (labels[:, 1:] != IGNORED).sum()
            output = self.model(**packed, use_cache=False)
        return self.sum_losses(output, labels)

    def sum_losses(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all target tokens, and their number: the place for a loss of your own.

        Args:
            output: Of the model, with ``logits`` [batch, length, vocabulary].
            labels: [batch, length], not shifted; -100 is no target.
        """
        return self._sum_model_losses(output, (labels[:, 1:] != IGNORED).sum(), labels=labels)

    def _compute_own_loss(self, batch: Batch, sequence: SequenceGroup) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of this rank's tokens of the rows of a group, and their number."""
        assert self.model is not None
        part = split_batch(batch, sequence)
        num_targets = (part.targets != IGNORED).sum()
        inputs = {**part.inputs, "sequence": sequence}
        with mask_whole_rows(part.rows), self.pack_inputs(inputs) as packed:
            if self.loss_chunks > 1:
                return sum_chunked_losses(self.model, packed, part.targets, is_shifted=True), num_targets
            output = self.model(**packed, use_cache=False)
        return self._sum_model_losses(output, num_targets, labels=None, shift_labels=part.targets)

    def _sum_model_losses(self, output: Any, num_targets: Tensor, **labels: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.model is not None
        vocab_size = self.model.config.get_text_config().vocab_size
        logits = output.logits.contiguous()  # which Transformers takes a view of; those of ProphetNet are one of others
        # The model's own loss, as a sum: divided by "1 item".
        loss_sum = self.model.loss_function(logits=logits, vocab_size=vocab_size, num_items_in_batch=1, **labels)
        aux_loss = weigh_aux_loss(self.model, output)
        # A mean over tokens already.
        return loss_sum if aux_loss is None else loss_sum + aux_loss * num_targets, num_targets

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Continue prompts; return ``index`` of each in its source, the ``prompt`` as read, and the ``prediction``."""
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        texts = self._continue(ids, batch["attention_mask"])
        # With its special tokens, which show where a chat template puts the turns.
        prompts = self.get_tokenizer().batch_decode([row[kept] for row, kept in zip(ids, mask, strict=True)])
        return {"index": batch["index"].tolist(), "prompt": prompts, "prediction": texts}

    @override
    def on_fit_start(self) -> None:
        self._check_split()
        super().on_fit_start()
        if self.loss_chunks > 1:
            assert self.model is not None
            call_in_forward(self, partial(check_chunked_loss, self, self.model))

    @override
    def on_validation_start(self) -> None:
        self._check_split()
        super().on_validation_start()

    on_test_start = on_validation_start

    def _check_split(self) -> None:
        sequence: SequenceGroup | None = getattr(self._strategy, "sequence_group", None)
        if self._is_split_checked or sequence is None:
            return
        assert self.model is not None
        name = type(self.model).__name__.removeprefix("FSDP")
        with evaluation_mode(self):
            check_split(self, sequence, self.model.config.get_text_config().vocab_size, self.device, name)
        self._is_split_checked = True

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return answers to texts and chats. Under a sharding strategy all ranks must call it.

        Args:
            prompts: At least one.

        Raises:
            ValueError: The chat template cannot render one of them.
        """
        encoded = encode_prompts(self.get_tokenizer(), prompts)
        for result in encoded:
            if isinstance(result, RowError):
                raise result
        return self.continue_rows([result.ids for result in encoded if not isinstance(result, RowError)])

    def continue_rows(self, rows: Sequence[Sequence[int]], **settings: Any) -> list[str]:
        """Return what follows token ids. Under a sharding strategy all ranks must call it.

        Args:
            rows: Ids of each prompt, at least one; they are padded on the left.
            settings: Of ``generate``, in place of those of ``generation``.
        """
        length, pad = max(map(len, rows)), get_pad_id(self.get_tokenizer())
        ids = torch.tensor([[pad] * (length - len(row)) + [*row] for row in rows], device=self.device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=self.device)
        return self._continue(ids, mask, **settings)

    # Samples

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.samples.forget_after(self.trainer.global_step)

    @override
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self.samples.prompts and not self.trainer.sanity_checking and self.has_tokenizer:
            self.samples.answer(self)

    @override
    def on_train_end(self) -> None:
        """Answer ``sample_prompts``, if the last validation was not after the last step."""
        if self.samples.prompts and self.trainer.global_step not in self.samples.answers:
            self.samples.answer(self)

    def make_section(self) -> Section | None:
        """Return the answers to ``sample_prompts`` as a part of the report."""
        return self.samples.make_section()

    def _continue(self, input_ids: Tensor, attention_mask: Tensor, **changes: Any) -> list[str]:
        assert self.model is not None
        tokenizer = self.get_tokenizer()
        generate: Any = self.model.generate
        settings = {"eos_token_id": get_end_ids(self.model, tokenizer), **self.generation, **changes}
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
        """Return the same with how to generate."""
        generation = deepcopy(model.generation_config)
        if self.has_tokenizer and self.pretrained is None:
            # Or generation would end at a token that the model has never seen.
            tokenizer = self.get_tokenizer()
            changes |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
            generation.update(**changes, pad_token_id=get_pad_id(tokenizer))
        files = super().collect_export_files(model, **changes)
        given = None if self.pretrained is None else get_pretrained_folder(self.pretrained) / GENERATION
        if given is not None and given.is_file():
            files[GENERATION] = given.read_text()
        elif model.can_generate():
            files[GENERATION] = generation.to_json_string()
        if GENERATION in files and self.has_tokenizer:
            settings = json.loads(files[GENERATION])
            ends = settings.get("eos_token_id")
            if ends is not None and (wanted := add_turn_end(ends, self.get_tokenizer())) != ends:
                files[GENERATION] = json.dumps(settings | {"eos_token_id": wanted}, indent=2) + "\n"
        return files

    # Tokenizer

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the data."""
        if not self.has_tokenizer:
            raise ValueError("sample_prompts: generating text needs data with a tokenizer, such as TextData")
        return get_data_module(self.trainer).tokenizer
