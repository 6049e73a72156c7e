"""What tasks share whose model reads tokens: how it is built, what its data must fit, the tokenizer beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import import_utils
from typing_extensions import override

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.errors import ConfigError
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.lightning_strategies import call_in_forward
from lit_fsdp.tasks.attention import (
    VARLEN,
    Attention,
    choose_attention,
    describe_attention,
    pack_documents,
    plan_attention,
)
from lit_fsdp.tasks.data import TaskData
from lit_fsdp.tasks.evaluation_mode import evaluation_mode
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.masks import keep_branches, needs_mask
from lit_fsdp.tasks.pretrained import PretrainedTask, read_tokenizer_files
from lit_fsdp.tasks.text_model import (
    CAUSAL_LM,
    ModelKind,
    build_model,
    check_data,
    check_length,
    check_packing,
    check_positions,
    count_positions,
    explain_refused_inputs,
)

# What Transformers asks whether a package is there, and its name for pip.
_PACKAGES = {
    "flash_attention_2": ("flash_attn_2", "flash-attn"),
    "flash_attention_3": ("flash_attn_3", "flash-attn-3"),
    "flash_attention_4": ("flash_attn_4", "flash-attn-4"),
}


class TextTask(PretrainedTask):
    """A task over a model of Transformers that reads tokens. A subclass names its ``kind`` and writes its loss.

    Args:
        pretrained: Model name on the Hugging Face Hub, or a folder with ``config.json`` and safetensors.
        config: Instead, the architecture of a model with random weights: ``model_type`` and the arguments of its
            Transformers configuration.
        attention: How tokens attend. ``auto`` takes ``varlen`` for packed rows where the model allows it, else what
            Transformers would. ``varlen`` needs no mask: ``varlen_attn`` of torch on GPUs in half precision, elsewhere
            one document after another. ``sdpa`` and ``eager`` have a mask of the row length squared. ``flex_attention``
            is compiled, for GPUs; ``flash_attention_2``, ``3`` and ``4`` need a GPU and their package.
        lora: Train low-rank adapters and leave the model as it is; ``null`` trains all of it.
        quantization: Keep the frozen weights in 4 or 8 bits; needs ``lora``.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
    """

    kind: ModelKind = CAUSAL_LM

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        attention: Attention = "auto",
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
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
        self._is_packing_checked = False

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        """Fetch the configuration of the model, and nothing else."""
        notes = super().prepare_plan(data)
        check_length(self.read_config(), data)
        return notes

    @override
    def measure_batch(self, batch: Mapping[str, Any]) -> MicroBatch | None:
        rows, length = batch["input_ids"].shape
        return MicroBatch(rows=rows, length=length, is_masked=needs_mask(batch))

    @override
    @contextmanager
    def enter_dry_run(self, batch: Mapping[str, Any]) -> Iterator[None]:
        if self.attention == "flex_attention":  # what was compiled would run, at addresses that are none
            raise ConfigError(
                "attention: got 'flex_attention': it is compiled, and compiled code cannot run on tensors without "
                "values: plan with attention: sdpa, whose mask takes more memory"
            )
        with keep_branches(batch), plan_attention(batch, self.trainer.strategy.root_device.type):
            yield

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._check_attention()
        check_data(self.read_config(), get_data_module(self.trainer), self.kind)

    @override
    def build_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        model = build_model(config, self.attention, self.kind)
        check_positions(model, get_data_module(self.trainer))
        strategy = self.trainer.strategy
        compile_settings = strategy.settings.compile if isinstance(strategy, FSDP2Strategy) else None
        name = choose_attention(
            model,
            self.attention,
            is_packed=self._is_packed,
            needs_one_graph=compile_settings is not None and compile_settings.fullgraph,
        )
        if self.attention == "auto" and self._is_packed:
            dtypes = getattr(self.trainer.precision_plugin, "mixed_precision", None)
            precision = self.trainer.precision if dtypes is None else dtypes.param_dtype or dtypes.storage_dtype
            rank_zero_info(f"attention: auto: {describe_attention(name, strategy.root_device, str(precision))}")
        return model

    @property
    def longest_row(self) -> int | None:
        """How many tokens a row may have, as far as the model says."""
        return None if self.model is None else count_positions(self.model)

    @property
    def _is_packed(self) -> bool:
        return bool(getattr(get_data_module(self.trainer), "packing", False))

    def _check_attention(self) -> None:
        """Refuse an implementation that is not there, or would do nothing."""
        package = _PACKAGES.get(self.attention)
        if package is not None and not getattr(import_utils, f"is_{package[0]}_available")():
            raise ValueError(
                f"attention: got {self.attention!r}: it needs a GPU and a package: pip install {package[1]}; or set "
                "auto, which is fast too"
            )
        if self.attention == "flex_attention" and self.trainer.strategy.root_device.type == "cpu":
            raise ValueError("attention: got 'flex_attention': torch trains with it on GPUs only; set auto")
        data = get_data_module(self.trainer)
        if self.attention == VARLEN and isinstance(data, TaskData) and not self._is_packed:
            raise ValueError(
                f"attention: got {VARLEN!r}: it is for packed rows, and {type(data).__name__} has none here; set auto, "
                "or TextData with packing"
            )

    def forward(self, **inputs: Any) -> Tensor:
        """Return the logits of the model. Under a sharding strategy all ranks must call it.

        Args:
            inputs: ``input_ids`` [batch, length], and ``position_ids`` or ``attention_mask``.
        """
        return self.run_model(**inputs).logits

    def run_model(self, **inputs: Any) -> Any:
        """Return what the model returns, inside of a step: calling ``self`` there would gather the root twice.

        Args:
            inputs: ``input_ids`` [batch, length], and ``position_ids`` or ``attention_mask``.
        """
        assert self.model is not None
        if "use_cache" in inspect.signature(self.model.forward).parameters:  # those that could generate
            inputs = {"use_cache": False, **inputs}
        with explain_refused_inputs(self.model), self.pack_inputs(inputs) as packed:
            return self.model(**packed)

    def pack_inputs(self, batch: Mapping[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Return a context for forward, of the inputs of the model: in it attention knows the documents of a batch.

        Args:
            batch: What the model takes, and of packed rows ``document_lengths``.
        """
        assert self.model is not None
        # Private in all but name, seen in transformers 5.23.
        return pack_documents(batch, str(self.model.config._attn_implementation))

    @override
    def on_fit_start(self) -> None:
        if self._is_packing_checked or not self._is_packed:
            return
        assert self.model is not None
        attention = str(self.model.config._attn_implementation)
        name = f"{type(self.model).__name__.removeprefix('FSDP')} with {attention} attention"
        vocab_size = self.model.config.get_text_config().vocab_size
        with evaluation_mode(self):
            call_in_forward(self, partial(check_packing, self, vocab_size, self.device, name))
        self._is_packing_checked = True  # not before: a second run of what was refused is refused, too

    on_validation_start = on_test_start = on_fit_start

    # Checkpoints

    @property
    def has_tokenizer(self) -> bool:
        """Whether the data has a tokenizer."""
        return hasattr(get_data_module(self.trainer), "tokenizer")

    @override
    def collect_export_files(self, model: PreTrainedModel, **changes: Any) -> dict[str, str | bytes]:
        """Return the same with the tokenizer, if the data has one."""
        files = super().collect_export_files(model, **changes)
        if self.has_tokenizer:
            files |= read_tokenizer_files(get_data_module(self.trainer).tokenizer)
        return files
