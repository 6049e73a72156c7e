"""Training of a masked language model of Transformers."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForMaskedLM, PreTrainedConfig
from typing_extensions import override

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.masked_lm.masking import Masking, mask_batch
from lit_fsdp.tasks.text.batches import IGNORED, Batch
from lit_fsdp.tasks.text.tokenizer import get_pad_id
from lit_fsdp.tasks.text_model import ModelKind
from lit_fsdp.tasks.text_task import TextTask

MASKED_LM = ModelKind(
    auto_class=AutoModelForMaskedLM,
    name="masked language model",
    expected="one of an encoder, such as modernbert, bert or roberta",
)
_EVALUATION = 0  # in place of an epoch, of which the first is 1: all evaluations hide the same tokens


class MaskedLM(TextTask):
    """Trains any masked language model of Transformers, from its weights or from scratch.

    Tokens are hidden as ``DataCollatorForLanguageModeling`` of Transformers hides them: anew each time that a row
    comes, and the same ones on any number of ranks and after a resume. An evaluation hides the same each time. With
    data that learns part of a text, only tokens of that part are hidden.

    Metrics: ``train/loss`` and ``train/perplexity`` over all hidden tokens of a step, ``train/grad_norm``,
    ``train/learning_rate``, ``train/tokens_seen`` (hidden tokens), and loss and perplexity of ``val/`` and ``test/``.

    Args:
        pretrained: Model name on the Hugging Face Hub, or a folder with ``config.json`` and safetensors.
        config: Instead, the architecture of a model with random weights: ``model_type`` and the arguments of its
            Transformers configuration.
        attention: Implementation of attention. ``auto`` is ``sdpa``, that of torch, where the model has it, else
            ``eager``; ``flash_attention_2`` needs the package flash-attn and a GPU.
        mlm_probability: Share of the tokens that are hidden, and predicted. Special tokens never are.
        mask_replace_prob: Share of the hidden tokens that become the mask token.
        random_replace_prob: Share of the hidden tokens that become another token at random; the rest stay as they are.
        seed: Of what is hidden.
        lora: Train low-rank adapters and leave the model as it is; ``null`` trains all of it.
        quantization: Keep the frozen weights in 4 or 8 bits; needs ``lora``.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
    """

    example_config = "{model_type: modernbert, hidden_size: 256}"
    kind = MASKED_LM

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto",
        mlm_probability: float = 0.15,
        mask_replace_prob: float = 0.8,
        random_replace_prob: float = 0.1,
        seed: int = 0,
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
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
        if not 0 < mlm_probability <= 1:
            raise ValueError(f"mlm_probability: got {mlm_probability}: expected above 0, up to 1, such as 0.15")
        shares = {"mask_replace_prob": mask_replace_prob, "random_replace_prob": random_replace_prob}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: got {share}: expected 0 to 1")
        if (total := sum(shares.values())) > 1 + 1e-9:
            least = f"with mask_replace_prob it is {total:g}, above 1"
            raise ValueError(f"random_replace_prob: got {random_replace_prob}: {least}; lower one of them")
        if seed < 0:
            raise ValueError(f"seed: got {seed}: expected 0 or more")
        self.mlm_probability, self.seed = mlm_probability, seed
        self.mask_replace_prob, self.random_replace_prob = mask_replace_prob, random_replace_prob
        self._masking: Masking | None = None
        self._pad_id: int | None = None

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = get_data_module(self.trainer)
        if not self.has_tokenizer:
            raise ValueError(
                "data: it has no tokenizer, which has the mask token: expected TextData, or one with a tokenizer"
            )
        tokenizer = data.tokenizer
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "data.tokenizer: it has no mask token: expected that of a masked model, or one trained with "
                "tokenizer.mask_token: true"
            )
        self._pad_id = get_pad_id(tokenizer)
        self._masking = self._make_masking(tokenizer.mask_token_id, tokenizer.all_special_ids, len(tokenizer))

    @override
    def read_config(self) -> PreTrainedConfig:
        """Return the model's configuration; a new model gets the padding of the tokenizer, whose row never learns."""
        config = super().read_config()
        if self.config_settings is not None and "pad_token_id" not in self.config_settings:
            config.pad_token_id = self._pad_id
        return config

    def _make_masking(self, mask_id: int, special_ids: list[int], vocab_size: int) -> Masking:
        return Masking(
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
            mask_id=mask_id,
            special_ids=special_ids,
            vocab_size=vocab_size,
        )

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        """Fetch the configuration of the model, and nothing else."""
        self._masking = self._make_masking(0, [0], 1)  # whatever the tokenizer has, it takes as much memory
        return super().prepare_plan(data)

    @override
    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hide tokens; return the sum of the losses of these, and their number.

        Args:
            batch: ``input_ids`` and ``labels`` [batch, length], and ``position_ids`` (packed) or ``attention_mask``
                (padded) of that shape. Tokens with the label -100 are not hidden.
        """
        assert self._masking is not None
        masked = mask_batch(batch, self._masking, seed=self.seed, epoch=self._count_draws())
        labels = masked.pop("labels")
        return self.sum_losses(self.run_model(**masked).logits, labels)

    def _count_draws(self) -> int:
        """Return what makes the masks of a row others than before."""
        if not self.training:
            return _EVALUATION
        # Of a stream, all passes are one epoch of Lightning; a small source of a mixture comes several times in one.
        repeats = getattr(get_data_module(self.trainer), "repeats_rows", False)
        return 1 + (self.trainer.global_step if repeats else self.trainer.current_epoch)

    def sum_losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all hidden tokens, and their number: the place for a loss of your own.

        Args:
            logits: [batch, length, vocabulary].
            labels: [batch, length]; -100 is no target.
        """
        flat = logits.float().flatten(0, 1)
        loss_sum = functional.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return loss_sum, (labels != IGNORED).sum()

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        raise ValueError(
            "MaskedLM continues no text; export it, and fill gaps with a fill-mask pipeline of Transformers"
        )
