"""A language model from where it lies: a run, a checkpoint, a folder of weights or of adapters, or the Hub.

No export is written: a checkpoint is read as it is, its adapters over the base model that they were trained over. Only
its small files, such as those of the tokenizer, are laid into the cache, where Transformers can read them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.cache import build_once, get_cache_dir, make_key
from lit_fsdp.checkpoint.reader import StoredCheckpoint, open_checkpoint, resolve_checkpoint
from lit_fsdp.checkpoint.remote import RemotePath, locate
from lit_fsdp.export.folder import ADAPTER_CONFIG, write_small_files
from lit_fsdp.export.merge import open_base, read_lora, read_quantization
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.mixed_precision import MixedPrecision, cast_parameters
from lit_fsdp.tasks.causal_lm.task import GENERATION, CausalLM
from lit_fsdp.tasks.model_config import drop_quantization, load_config
from lit_fsdp.tasks.stored_adapters import fill_adapters, naming, read_adapter_folder
from lit_fsdp.tasks.text.tokenizer import load_tokenizer
from lit_fsdp.tasks.text_model import build_model
from lit_fsdp.weights.base_weights import BASE, LORA, fetch_base, fetch_pretrained, get_pretrained_folder
from lit_fsdp.weights.load import init_unstored, load_weights, materialize
from lit_fsdp.weights.prequantized import read_quantization as read_stored_quantization

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]
DtypeName = Literal["float32", "bfloat16", "float16"]
_ANSWER_NOTHING = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a model is made of, before any of its weights are read.

    Args:
        given: What the user calls it.
        folder: Holds ``config.json``, and the files that say how to generate.
        tokenizer: Folder or name to load the tokenizer from.
        pretrained: Name or folder of the weights, of adapters those of their base; ``None`` if all are in a checkpoint.
        checkpoint: With trained weights.
        adapter: Folder of peft with them.
        lora: Settings of the adapters.
        quantization: In which the base is kept.
        dtype: Of the weights, as they are stored.
    """

    given: str
    folder: Path
    tokenizer: str
    pretrained: str | None = None
    checkpoint: StoredCheckpoint | None = None
    adapter: Path | None = None
    lora: LoRA | None = None
    quantization: Quantization | None = None
    dtype: DtypeName = "float32"

    def read_config(self) -> PreTrainedConfig:
        """Return the configuration of the model."""
        if self.pretrained is not None:
            return load_config(self.pretrained)
        return drop_quantization(AutoConfig.from_pretrained(self.folder, trust_remote_code=False))

    def read_generation(self) -> GenerationConfig | None:
        """Return how the model says that it wants to generate, if it does."""
        return GenerationConfig.from_pretrained(self.folder) if (self.folder / GENERATION).is_file() else None


def open_source(given: str, *, base: str | None = None, quantization: Quantization | None = None) -> ModelSource:
    """Find out what a model is made of; it is downloaded if need be.

    Args:
        given: Run, checkpoint, folder of a model or of adapters, or a name on the Hub.
        base: Of adapters: where their base model is, if not where it was.
        quantization: Keep the weights in 4 or 8 bits, also those that are stored whole.

    Raises:
        ValueError: There is nothing of the kind, or it is damaged, or no language model.
    """
    try:
        path = locate(given)
    except ValueError as error:
        raise ValueError(f"model: {error}") from None
    path = path.expanduser() if isinstance(path, Path) else path
    if isinstance(path, Path) and path.is_dir() and (path / ADAPTER_CONFIG).is_file():
        source = _open_adapter(given, path, base)
    elif isinstance(path, RemotePath) or path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        source = _open_checkpoint(given, path, base)
    else:
        name = str(path) if given.startswith("file:") else given
        fetch_pretrained(name, "model")
        if base is not None:
            raise ValueError(f"base: got {base!r}: {given} holds no adapters; leave it out")
        dtype, folder = _read_dtype(load_config(name)), get_pretrained_folder(name)
        source = ModelSource(given=given, folder=folder, tokenizer=name, pretrained=name, dtype=dtype)
    _refuse_other_kinds(source)
    if quantization is not None:
        quantization.check()
        if source.pretrained is None:
            raise ValueError(
                f"quantization: {given} holds all weights, and they are quantized while they are read from safetensors "
                "only; export it, and give the folder"
            )
        source = replace(source, quantization=quantization)
    return source


def _refuse_other_kinds(source: ModelSource) -> None:
    """Refuse a model for something else, also where it has the weights of one that generates, as an encoder may."""
    names = AutoConfig.from_pretrained(source.folder, trust_remote_code=False).architectures or []
    if names and re.search(r"For(?!CausalLM|ConditionalGeneration)", names[0]):
        raise ValueError(
            f"model: {source.given} is a {names[0]}, which answers nothing: expected a causal language model, such as "
            "LlamaForCausalLM"
        )


def _open_checkpoint(given: str, path: Path | RemotePath, base: str | None) -> ModelSource:
    try:
        stored = open_checkpoint(resolve_checkpoint(path))
    except ValueError as error:
        raise ValueError(f"model: {str(error).removeprefix('checkpoint: ')}") from error
    if "speech" in stored.meta:
        raise ValueError(f"model: {stored.path} holds speech: python -m lit_fsdp speak reads it")
    key = make_key(files={name: repr(content) for name, content in stored.files.items()})
    folder = build_once(get_cache_dir(None) / "opened" / key, lambda new: write_small_files(new, stored.files))
    source = ModelSource(given=given, folder=folder, tokenizer=str(folder), checkpoint=stored)
    found = {str(t.properties.dtype).removeprefix("torch.") for t in stored.tensors.values()}
    if LORA not in stored.meta or BASE not in stored.meta:
        if base is not None:
            raise ValueError(f"base: got {base!r}: {stored.path} holds all weights of its model; leave it out")
        lora = read_lora(stored) if LORA in stored.meta else None
        if lora is not None and found & {"uint8", "int8"}:
            raise ValueError(
                f"model: {stored.path} holds adapters over random weights that were quantized, which serves as a trial "
                "only: train them over pretrained weights, or leave out quantization"
            )
        return replace(source, lora=lora, dtype=_widest(found))
    name = fetch_base(str(stored.meta[BASE]["name"]), None) if base is None else str(open_base(stored, base))
    return replace(
        source,
        pretrained=name,
        lora=read_lora(stored),
        quantization=read_quantization(stored),
        dtype=_read_dtype(load_config(name)),
    )


def _open_adapter(given: str, folder: Path, base: str | None) -> ModelSource:
    with naming("model"):
        stored = read_adapter_folder(folder)
    # Ours, and those of stock peft where they say it.
    if (folder / "classes.json").is_file() or stored.task_type in _ANSWER_NOTHING:
        raise ValueError(
            f"model: {given} holds adapters of a classifier, which answers nothing: expected those of a causal "
            "language model, such as LlamaForCausalLM"
        )
    if not (base or stored.base):
        raise ValueError(f"base: missing: {folder / ADAPTER_CONFIG} names no base model: expected its name or folder")
    name = fetch_base(str(stored.base), base)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return ModelSource(
        given=given,
        folder=get_pretrained_folder(name),
        tokenizer=str(folder) if has_tokenizer else name,
        pretrained=name,
        adapter=folder,
        lora=stored.lora,
        dtype=_read_dtype(load_config(name)),
    )


def _read_dtype(config: PreTrainedConfig) -> DtypeName:
    return _widest({str(config.dtype).removeprefix("torch.")})


def _widest(found: set[str]) -> DtypeName:
    return next((name for name in ("bfloat16", "float16") if found == {name}), "float32")


def load_whole(source: ModelSource, *, dtype: DtypeName, attention: Attention, device: torch.device) -> PreTrainedModel:
    """Return a model with all its weights in this process, ready to generate.

    Args:
        source: What it is made of.
        dtype: Of the weights that are not quantized; adapters stay in ``float32``.
        attention: Implementation of attention.
        device: Where to.

    Raises:
        ValueError: The base of adapters has other weights than they were trained over, or something else does not fit.
    """
    if source.checkpoint is not None and source.pretrained is not None:
        open_base(source.checkpoint, source.pretrained)  # or its weights may be other ones by now
    model = build_model(source.read_config(), attention)
    stored = read_stored_quantization(get_pretrained_folder(source.pretrained), model) if source.pretrained else None
    if stored is not None and source.quantization not in (None, stored):
        raise ValueError(f"quantization: the weights of {source.pretrained} are quantized already; leave it out")
    lora, quantization = source.lora, stored or source.quantization
    if quantization is not None:
        quantize_model(model, quantization, keep=() if lora is None else lora.modules_to_save)
    if lora is not None:
        add_adapters(model, lora)
    cast_parameters(model, MixedPrecision(storage_dtype=dtype), keep=list_adapter_parameters(model))
    materialize(model, device)
    if source.pretrained is not None:
        load_weights(model, get_pretrained_folder(source.pretrained))
    else:
        init_unstored(model)
    _fill_adapters(model, source)
    if source.checkpoint is not None:
        _fill(model, source.checkpoint)
    if (generation := source.read_generation()) is not None:
        model.generation_config = generation
    return model.eval().requires_grad_(False)


def _fill_adapters(model: nn.Module, source: ModelSource) -> None:
    if source.adapter is not None and source.lora is not None:
        with naming("model"):
            fill_adapters(model, source.adapter, source.lora)


def _fill(model: PreTrainedModel, stored: StoredCheckpoint) -> None:
    """Read the tensors of a checkpoint into a model, one after another."""
    state = model.state_dict()
    if unknown := [name for name in stored.tensors if name not in state]:
        raise ValueError(f"model: {stored.path} holds {unknown[0]}: it is no {type(model).__name__}")
    for name in stored.tensors:
        like = stored.describe(name)
        if like.shape != state[name].shape:
            raise ValueError(f"model: {stored.path}: {name} has shape {tuple(like.shape)}: it is of another model")
        state[name].copy_(stored.read({name: like})[name])


class OpenedLM(CausalLM):
    """A language model that is there already, to predict with: ``generate`` runs it.

    Args:
        source: Run, checkpoint, folder of a model or of adapters, or a name on the Hub.
        base: Of adapters: where their base model is, if not where it was.
        quantization: Keep the weights in 4 or 8 bits.
        attention: Implementation of attention.
        generation: Arguments of ``generate``, such as ``max_new_tokens``.
    """

    def __init__(
        self,
        *,
        source: str,
        base: str | None = None,
        quantization: Quantization | None = None,
        attention: Attention = "auto",
        generation: dict[str, Any] | None = None,
    ) -> None:
        self.source = open_source(source, base=base, quantization=quantization)
        config = None if self.source.pretrained is not None else {"model_type": self.source.read_config().model_type}
        super().__init__(
            pretrained=self.source.pretrained,
            config=config,
            attention=attention,
            lora=self.source.lora,
            quantization=self.source.quantization,
            generation=generation,
        )

    @override
    def read_config(self) -> PreTrainedConfig:
        return self.source.read_config()

    @override
    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        generation = self.source.read_generation()
        if is_new and self.model is not None and generation is not None:
            self.model.generation_config.eos_token_id = generation.eos_token_id

    @override
    def load_base(self) -> None:
        assert self.model is not None
        if self.source.pretrained is None:
            init_unstored(self.model)  # all else is in the checkpoint
        else:
            super().load_base()

    @override
    def configure_weights(self) -> None:
        super().configure_weights()
        assert self.model is not None
        _fill_adapters(self.model, self.source)


def open_tokenizer(source: ModelSource) -> Any:
    """Return the tokenizer of a model.

    Raises:
        ValueError: It has none.
    """
    if source.checkpoint is not None and not (source.folder / "tokenizer_config.json").is_file():
        raise ValueError(
            f"model: {source.checkpoint.path} holds no tokenizer, as the data of its run had none: export it, and add "
            "the files of one to the folder"
        )
    try:
        return load_tokenizer(source.tokenizer)
    except ValueError as error:
        raise ValueError(f"model: {source.given}: {error}") from error
