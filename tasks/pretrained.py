"""What tasks share whose model is one of Transformers: what it starts from, adapters over it, the files it exports."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import agree
from lit_fsdp.checkpoint.untrusted import refuse_other_forms
from lit_fsdp.errors import join_names, suggest
from lit_fsdp.export.adapter import describe_adapters
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.base import Task, refuse_quantized_training
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.weights.base_weights import (
    BASE,
    CONFIG,
    LORA,
    begin_fingerprint,
    check_config_file,
    describe_base,
    fetch_pretrained,
    get_pretrained_folder,
    is_base,
    knows_all_values,
)
from lit_fsdp.weights.load import init_weights, load_weights
from lit_fsdp.weights.prequantized import read_quantization

# What every model is made of; 0 would be none. Of parts that only some have, such as shared experts, 0 may mean none.
_SIZES = re.compile(
    r"num_(hidden_layers|attention_heads|key_value_heads)|n_(embd|head|layer|positions)|head_dim|"
    r"(hidden|intermediate|vocab|image|patch)_size|max_position_embeddings"
)
_SHARES = re.compile(r"(\w+_)?(dropout|pdrop|dropout_prob)")
# What bad values come to in Transformers.
_OF_VALUES = (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


class PretrainedTask(Task):
    """A task whose model is pretrained, or made from a configuration, with adapters over it where asked for.

    A subclass builds the model in ``configure_model`` and calls :meth:`resolve_quantization` and ``adapt_model`` there.
    Its settings of these names say what they mean.
    """

    example_config = "{model_type: llama, hidden_size: 256}"  # in errors

    def __init__(
        self,
        *,
        pretrained: str | None,
        config: dict[str, Any] | None,
        lora: LoRA | None,
        quantization: Quantization | None,
        optimizer: Optimizer | None,
        lr_scheduler: LRSchedule | None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if (pretrained is None) == (config is None):
            raise ValueError(
                "pretrained or config: expected one of them: a model's name or folder, or an architecture such as "
                f"{self.example_config}"
            )
        if config is not None and "model_type" not in config:
            raise ValueError(
                f"config.model_type: missing, got {sorted(config)}: expected one as in {self.example_config}"
            )
        if config is not None:
            make_config(config)  # now, as ranks take long to start
        if quantization is not None:
            quantization.check()
        if lora is not None:
            lora.check(is_quantized=quantization is not None)
        self.pretrained, self.config_settings = pretrained, config
        self.lora, self.quantization = lora, quantization
        self.model: PreTrainedModel | None = None
        self._is_planned = False
        self._export_files: dict[str, str | bytes] | None = None
        self._base: dict[str, Any] | None = None

    @override
    def prepare_data(self) -> None:
        """Download the model, on one process per node."""
        if self.pretrained is not None:
            fetch_pretrained(self.pretrained)

    @override
    def setup(self, stage: str) -> None:
        """Refuse to train quantized weights; also those of a model that an evaluation has built before."""
        if stage == "fit":
            refuse_quantized_training(self.quantization, self.lora)

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        """Fetch the configuration of the model, and nothing else."""
        if self.pretrained is not None:
            fetch_pretrained(self.pretrained, patterns=CONFIG)
        self._is_planned = True
        return super().prepare_plan(data)

    def read_config(self) -> PreTrainedConfig:
        """Return the model's configuration."""
        if self.pretrained is not None:
            return load_config(self.pretrained)
        assert self.config_settings is not None
        return make_config(self.config_settings)

    def resolve_quantization(self, model: nn.Module) -> None:
        """Set ``quantization`` to how the weights of ``pretrained`` are stored, if they are stored quantized.

        A plan, for which no weights are fetched, goes by what ``config.json`` says of them.

        Args:
            model: On the meta device.

        Raises:
            ValueError: The settings say it otherwise, or the run could not train such weights.
        """
        stored, given = None, self.quantization
        if self.pretrained is not None:
            folder = get_pretrained_folder(self.pretrained)
            stored = _read_planned_quantization(folder) if self._is_planned else read_quantization(folder, model)
        if stored is not None and given is not None:
            _compare_quantization(stored, given)
        self.quantization = stored or given
        if self.quantization is not None and self.lora is None and self.trainer.state.fn == TrainerFn.FITTING:
            raise ValueError(
                "quantization: quantized weights cannot be trained; set lora, such as {r: 16}, or "
                + ("pretrained to the model that they were made of" if stored is not None else "leave it out")
            )
        if stored is not None and self.lora is not None and self.lora.init_lora_weights not in ("default", "gaussian"):
            raise ValueError(
                f"lora.init_lora_weights: got {self.lora.init_lora_weights!r}: it needs the weights that those of "
                "pretrained were made of; set default"
            )

    @override
    def configure_weights(self) -> None:
        """Read this rank's shards of the pretrained weights, or draw random ones."""
        assert self.model is not None
        if self.pretrained is None:
            init_weights(self.model, self.get_seed())
        else:
            load_weights(self.model, get_pretrained_folder(self.pretrained), seed=self.get_seed())

    @property
    @override
    def restores_frozen(self) -> bool:
        return self.pretrained is not None and self.lora is not None

    def collect_export_files(self, model: PreTrainedModel, **changes: Any) -> dict[str, str | bytes]:
        """Return the small files of a Hugging Face folder by name, so that a checkpoint is enough to export.

        Args:
            model: Sharded or not.
            changes: Settings of its configuration that are written otherwise than it has them.
        """
        config = deepcopy(model.config)
        # FSDP2 puts a class of its own in front of the model's.
        config.update({"architectures": [type(model).__name__.removeprefix("FSDP")], **changes})
        files: dict[str, str | bytes] = {"config.json": config.to_json_string()}
        if self.lora is not None:
            files[ADAPTER_CONFIG] = describe_adapters(model, self.lora, self.pretrained)
        return files

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.trainer.is_global_zero and self._has_base():
            assert self.pretrained is not None
            begin_fingerprint(self.pretrained)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if not self.trainer.is_global_zero or not isinstance(self.model, PreTrainedModel):
            return  # its metadata is that of rank 0
        if self._export_files is None:
            self._export_files = self.collect_export_files(self.model)
        checkpoint[EXPORT] = self._export_files
        if self.lora is not None:
            checkpoint[LORA] = asdict(self.lora)  # plain, as any strategy may write it
        if self._has_base():
            assert self.pretrained is not None
            if self._base is None or not knows_all_values(self._base):
                self._base = describe_base(self.pretrained, self.quantization)
            checkpoint[BASE] = self._base

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        with refuse_other_forms():
            check_adapters(checkpoint, pretrained=self.pretrained, quantization=self.quantization, lora=self.lora)

    def _has_base(self) -> bool:
        """Whether a checkpoint leaves out weights, which it knows by their fingerprint instead."""
        return self.restores_frozen and any(not p.requires_grad for p in self.parameters())


def load_config(pretrained: str) -> PreTrainedConfig:
    """Return the configuration of a model, a folder or of the Hub."""
    folder = get_pretrained_folder(pretrained)
    check_config_file(folder)
    try:
        return drop_quantization(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except StrictDataclassError as error:
        raise ValueError(f"pretrained: {pretrained}: config.json: {error.__cause__ or error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"pretrained: got {pretrained!r}: {str(error).strip().splitlines()[0]}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # what values of other types come to
        what = f"Transformers cannot read it: {type(error).__name__}: {error}"
        raise ValueError(f"pretrained: {pretrained}: config.json: {what}") from error


def make_config(settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the configuration that settings describe, ``model_type`` among them.

    Raises:
        ValueError: With the setting, its value and the rule.
    """
    settings = dict(settings)
    model_type = settings.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type)
    except (TypeError, ValueError):
        raise ValueError(f"config.model_type: got {model_type!r}: Transformers has no such model") from None
    known = [name for name in vars(config) if not name.startswith("_") and not hasattr(PreTrainedConfig(), name)]
    if unknown := sorted(str(name) for name in settings if not _is_setting(name, config)):
        hint = suggest(unknown[0], known, f"expected some of its own, such as {', '.join(known[:3])}")
        raise ValueError(f"config: {', '.join(unknown)}: no settings of {type(config).__name__}: {hint}")
    _check_sizes(settings, config)
    try:
        config = AutoConfig.for_model(model_type, **settings)
    except _OF_VALUES as error:
        raise ValueError(_explain_config(settings, error)) from error
    _check_heads(settings, config)
    return config


@contextmanager
def explain_build_errors(settings: Mapping[str, Any] | None) -> Iterator[None]:
    """Turn what Transformers raises for bad values while a model is built into one line about its configuration.

    All else stays what it is: missing memory, lost connections, and what our own code raises.

    Args:
        settings: ``config`` of the task, or ``None`` of a pretrained model.

    Raises:
        ValueError: With the setting, its value and the rule.
        ImportError: A package is missing that only this model needs; in one line.
    """
    try:
        yield
    except (*_OF_VALUES, RuntimeError, ImportError) as error:
        # Of the others, torch has classes for memory, devices and connections; of memory of the host it has none.
        is_other = isinstance(error, RuntimeError) and (type(error) is not RuntimeError or "allocate" in str(error))
        if is_other or _is_our_own(error):
            raise
        if isinstance(error, ImportError):
            raise ImportError(" ".join(str(error).split()), name=error.name) from error  # noqa: TRY004  what it was
        raise ValueError(_explain_config(settings, error)) from error


def _is_our_own(error: BaseException) -> bool:
    """Whether an error was raised in our code."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).partition(".")[0] == __name__.partition(".")[0]


def _explain_config(settings: Mapping[str, Any] | None, error: Exception) -> str:
    """Say what a configuration is refused for, with the setting whose name or value the error has."""
    first = next(iter(str(error.__cause__ or error).strip().splitlines()), "")
    why = first if isinstance(error, StrictDataclassError | ValueError) else f"{type(error).__name__}: {first}"
    if settings is None:
        return f"pretrained: the model cannot be built from its config.json: {why}"
    words = set(re.findall(r"\w+", first))
    named = [name for name in settings if name in words or name.replace("_", " ") in first]
    named += [name for name, value in settings.items() if isinstance(value, float) and repr(value) in first]
    named += [n for n, value in settings.items() for word in words if f"'{word}'" in repr(value) and n != "model_type"]
    if not named:
        return f"config: got {join_names([f'{k} {v!r}' for k, v in settings.items()])}: no model can be built: {why}"
    return f"config.{named[0]}: got {settings[named[0]]!r}: {why}"


def _is_setting(name: Any, config: PreTrainedConfig) -> bool:
    """Whether a model reads this setting: most are fields, some just read from what was given, as ``head_dim`` is."""
    if not isinstance(name, str) or name.startswith("_") or callable(getattr(type(config), name, None)):
        return False
    # Asked of the class, as Gemma 4 refuses to tell what its layers have different ones of, seen in transformers 5.23.
    if name in vars(config) or hasattr(type(config), name) or name in type(config).attribute_map:
        return True
    own = type(config).__module__
    reads = re.compile(rf'(getattr\(config, |kwargs\.(get|pop)\()"{re.escape(name)}"')
    for module in (own, own.replace(".configuration_", ".modeling_")):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and reads.search(Path(spec.origin).read_text(encoding="utf-8")):
            return True
    return False


def _check_sizes(settings: Mapping[str, Any], defaults: PreTrainedConfig) -> None:
    """Refuse sizes of which no model can be made, or none that computes anything; a default can be no mistake."""
    for name, value in settings.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_number = is_number and value != vars(defaults).get(name)
        if is_number and _SIZES.fullmatch(name) and value < 1:
            raise ValueError(f"config.{name}: got {value}: expected 1 or more")
        if is_number and _SHARES.fullmatch(name) and not 0 <= value < 1:
            raise ValueError(f"config.{name}: got {value}: expected 0 to below 1")


def _check_heads(given: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse heads and experts that cannot be shared out."""
    heads, groups = (given.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    # Only where both are given: some architectures do not use their default.
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        raise ValueError(
            f"config.num_key_value_heads: got {groups}: the {heads} heads of num_attention_heads share them evenly: "
            f"expected a divisor, such as {math.gcd(heads, groups)}"
        )
    counts = [vars(config).get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts, chosen = next((n for n in counts if n), None), vars(config).get("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(chosen, int) and chosen > experts:
        raise ValueError(f"config.num_experts_per_tok: got {chosen}: there are {experts} experts: expected fewer")


def read_tokenizer_files(tokenizer: Any) -> dict[str, str | bytes]:
    """Return the files of a tokenizer by name: texts, but for the models of SentencePiece."""
    files: dict[str, str | bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            name, content = path.relative_to(folder).as_posix(), path.read_bytes()
            try:
                files[name] = content.decode()
            except UnicodeDecodeError:
                files[name] = content
    return files


def drop_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration without that of bitsandbytes, whose layers we have ourselves."""
    settings: Any = getattr(config, "quantization_config", None)
    if isinstance(settings, dict) and settings.get("quant_method") == "bitsandbytes":
        del config.quantization_config
    return config


def _read_planned_quantization(folder: Path) -> Quantization | None:
    """Return how ``config.json`` says that the weights are stored, which need not be there."""
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    if settings.get("quant_method") != "bitsandbytes":
        return None
    skip = settings.get("llm_int8_skip_modules")
    options: dict[str, Any] = {"type": "int8"}
    if settings.get("load_in_4bit"):
        is_double = settings.get("bnb_4bit_use_double_quant", False)
        options = {"type": settings["bnb_4bit_quant_type"], "double_quant": is_double}
    return Quantization(**options, skip_modules=None if skip is None else tuple(skip))


def _compare_quantization(stored: Quantization, given: Quantization) -> None:
    for setting, name in (("type", "type"), ("block_size", "block_size"), ("double_quant", "is_double")):
        ours, theirs = getattr(given, name), getattr(stored, name)
        if ours != theirs:
            raise ValueError(
                f"quantization.{setting}: got {ours!r}: the weights of pretrained are stored with {theirs!r}; leave "
                "quantization out"
            )
    if given.skip_modules is not None:
        raise ValueError("quantization.skip_modules: the weights of pretrained are quantized already; leave it out")


def check_adapters(
    checkpoint: Mapping[str, Any], *, pretrained: str | None, quantization: Quantization | None, lora: LoRA | None
) -> None:
    """Refuse adapters over another model, or that would mean something else, though they would fit.

    Warns of adapters that were trained over other roundings of the model.
    """
    if BASE in checkpoint and pretrained is not None:
        stored, own = checkpoint[BASE], None if quantization is None else asdict(quantization)
        name, fingerprint = stored["name"], str(stored["fingerprint"])
        # Each rank, as one of them reads all files and the others wait for its file lock, however long that takes: in
        # a collective they would give up. Samples are read at once.
        is_asked = knows_all_values(stored) or not dist.is_initialized() or dist.get_rank() == 0
        if not all(agree(lambda: not is_asked or is_base(fingerprint, get_pretrained_folder(pretrained)))):
            raise ValueError(
                f"pretrained: got {pretrained!r}: the checkpoint holds adapters of {name!r}, whose weights "
                "are other ones; set pretrained to that model"
            )
        if stored["quantization"] != own:
            rank_zero_warn(
                f"quantization: the adapters of the checkpoint were trained with {stored['quantization']}, this run "
                f"has {own}: losses will differ"
            )
    if LORA not in checkpoint or lora is None:
        return
    stored, own = checkpoint[LORA], asdict(lora)
    names = ["alpha", "alpha_pattern", "use_rslora"]
    if not {stored["init_lora_weights"], own["init_lora_weights"]} <= {"default", "gaussian", "loftq"}:
        names.append("init_lora_weights")  # also says what was taken out of the base
    for name in names:
        if stored[name] != own[name]:
            raise ValueError(
                f"lora.{name}: got {own[name]!r}: the adapters of the checkpoint were trained with {stored[name]!r}; "
                "set that"
            )
