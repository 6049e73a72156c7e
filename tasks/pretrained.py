"""What tasks share whose model is one of Transformers: what it starts from, adapters over it, the files it exports."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from typing_extensions import override

from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import agree
from lit_fsdp.checkpoint.untrusted import refuse_other_forms
from lit_fsdp.errors import get_first_line
from lit_fsdp.export.adapter import describe_adapters
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.quantization.layers import is_named, list_quantizable
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.strategy.precision_plugin import get_compute_dtype
from lit_fsdp.tasks.base import Task
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.model_config import (
    SIZES,
    explain_build_errors,
    load_config,
    make_config,
    refuse_other_quantization,
)
from lit_fsdp.tasks.stored_adapters import StoredAdapters, open_adapters
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

_MEANINGS = ("alpha", "alpha_pattern", "use_rslora")  # settings of adapters that their tensors do not show


class PretrainedTask(Task):
    """A task whose model is pretrained, or made from a configuration, with adapters over it where asked for.

    A subclass writes :meth:`build_model` and :meth:`compute_loss`. What is trained, read, saved, planned and exported
    follows from the model.

    Args:
        pretrained: Model name on the Hugging Face Hub, or a folder with ``config.json`` and safetensors.
        config: Instead, the architecture of a model with random weights: ``model_type`` and the arguments of its
            Transformers configuration.
        lora: Train low-rank adapters and leave the model as it is; ``null`` trains all of it.
        quantization: Keep the frozen weights in 4 or 8 bits; needs ``lora``.
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
    """

    example_config = "{model_type: llama, hidden_size: 256}"  # in errors

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRSchedule | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if (pretrained is None) == (config is None):
            raise ValueError(
                "pretrained or config: expected one of them: a model's name or folder, or an architecture such as "
                f"{self.example_config}"
            )
        if config is not None and "model_type" not in config:
            raise ValueError(
                f"config.model_type: missing, got {sorted(map(str, config))}: expected one as in {self.example_config}"
            )
        if config is not None:
            make_config(config)  # now, as ranks take long to start
        if quantization is not None:
            quantization.check()
        self.stored_adapters: StoredAdapters | None = None
        if lora is not None and lora.pretrained is not None:
            if pretrained is None:
                raise ValueError(
                    f"lora.pretrained: got {lora.pretrained!r} without pretrained: set that to the model which these "
                    "adapters were trained over"
                )
            self.stored_adapters = open_adapters(lora)
            lora = self.stored_adapters.lora
        if lora is not None:
            lora.check(is_quantized=quantization is not None)
        self.pretrained, self.config_settings = pretrained, config
        self.lora, self.quantization = lora, quantization
        self.model: PreTrainedModel | None = None
        self._is_planned = False
        self._export_files: dict[str, str | bytes] | None = None
        self._base: dict[str, Any] | None = None

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._export_files = None  # another run may have other data, and its tokenizer

    @override
    def prepare_data(self) -> None:
        """Download the model, on one process per node."""
        if self.pretrained is not None:
            fetch_pretrained(self.pretrained)
        if self.stored_adapters is not None:
            self.stored_adapters.fetch()

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
            config = load_config(self.pretrained)
            refuse_other_quantization(config, self.pretrained)
            return config
        assert self.config_settings is not None
        return make_config(self.config_settings)

    def build_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Return the model that is trained, built under ``torch.device("meta")``: without memory.

        Args:
            config: That of :meth:`read_config`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no build_model, which returns the model on device meta")

    def change_model(self, model: PreTrainedModel) -> None:
        """Change a model on the meta device in place, after adapters were added."""

    @override
    def configure_model(self) -> None:
        if self.model is not None:  # a second run of the same object
            return
        with explain_build_errors(self.config_settings):
            model = self.build_model(self.read_config())
        if self.stored_adapters is not None and self.lora is not None:
            self.lora = self.stored_adapters.choose_saved(model, self.lora)
        self.resolve_quantization(model)
        self.adapt_model(model, lora=self.lora, quantization=self.quantization)
        self.change_model(model)
        self.take_model(model)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        if self.lora is not None and next(iterate_adapters(self), None) is None:
            name = type(self).__name__.removeprefix("FSDP")
            raise ValueError(
                f"lora: {name}.configure_model has added no adapters; call self.adapt_model there, or leave it out"
            )
        return super().configure_optimizers()

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
        if stored is not None and self.lora is None and self.trainer.state.fn == TrainerFn.FITTING:
            raise ValueError(
                "quantization: quantized weights cannot be trained; set lora, such as {r: 16}, or pretrained to the "
                "model that they were made of"
            )
        # In a plan, the names of layers are parts, as Transformers takes them.
        if stored is not None and stored.skip_modules is not None and self.lora is not None and not self._is_planned:
            quantized = list_quantizable(model).keys() - {*stored.skip_modules}
            if saved := sorted(name for name in quantized if is_named(name, self.lora.modules_to_save)):
                raise ValueError(
                    f"lora.modules_to_save: {saved[0]} is stored quantized, and cannot be trained; name it in "
                    "target_modules, or set pretrained to the model that its weights were made of"
                )
        if stored is not None and self.lora is not None and self.lora.init_lora_weights not in ("default", "gaussian"):
            raise ValueError(
                f"lora.init_lora_weights: got {self.lora.init_lora_weights!r}: it needs the weights that those of "
                "pretrained were made of; set default"
            )

    @override
    def configure_weights(self) -> None:
        """Read this rank's shards of the pretrained weights and adapters, or draw random ones."""
        assert self.model is not None
        self.load_base()
        if self.stored_adapters is not None:
            self._check_base(self.stored_adapters)
            self.stored_adapters.fill(self.model)
            rank_zero_info(self.stored_adapters.describe())

    def load_base(self) -> None:
        """Read this rank's shards of the pretrained weights, and draw what is new, or draw all of it."""
        assert self.model is not None
        if self.pretrained is None:
            init_weights(self.model, self.get_seed())
        else:
            load_weights(self.model, get_pretrained_folder(self.pretrained), seed=self.get_seed())

    def _check_base(self, adapters: StoredAdapters) -> None:
        """Refuse adapters over another model as far as they know theirs; warn where they only know its name."""
        if adapters.checkpoint is not None:
            check_adapters(
                adapters.checkpoint.meta, pretrained=self.pretrained, quantization=self.quantization, lora=None
            )
        elif adapters.base is not None and Path(adapters.base).name != Path(str(self.pretrained)).name:
            rank_zero_warn(
                f"lora.pretrained: {adapters.given} was trained over {adapters.base}, and pretrained is "
                f"{self.pretrained}: right only if that has the same weights"
            )

    @property
    @override
    def restores_frozen(self) -> bool:
        return self.pretrained is not None and self.lora is not None

    # Steps

    def compute_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all targets of a micro-batch, and their number, two scalars.

        Args:
            batch: A micro-batch of this rank.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compute_loss, which returns a sum and its targets")

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weigh_loss(*self.compute_loss(batch))

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.update_eval_loss("val", *self.compute_loss(batch))

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.update_eval_loss("test", *self.compute_loss(batch))

    # Checkpoints

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
            checkpoint[BASE] = {**self._base, "compute_dtype": get_compute_dtype(self.trainer, self)}

    @override
    def describe_misfit(self, checkpoint: Mapping[str, Any]) -> str | None:
        return describe_misfit(checkpoint, lora=self.lora, config=self.config_settings)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        with refuse_other_forms():
            check_adapters(checkpoint, pretrained=self.pretrained, quantization=self.quantization, lora=self.lora)

    def _has_base(self) -> bool:
        """Whether a checkpoint leaves out weights, which it knows by their fingerprint instead."""
        return self.restores_frozen and any(not p.requires_grad for p in self.parameters())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep Transformers from warning and advising inside this context."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_stored_tokenizer(name: str) -> Any:
    """Return the tokenizer of a folder or of a model on the Hub.

    Raises:
        ValueError: There is none.
    """
    from transformers import AutoTokenizer

    # First, as Transformers tries a Hub that it cannot reach for a minute; seen in 5.23.
    fetch_pretrained(name, "tokenizer", CONFIG)
    folder = Path(name).expanduser()
    check_config_file(folder)
    try:
        # Of the Hub by its name, which Transformers knows some tokenizers by.
        return AutoTokenizer.from_pretrained(folder if folder.is_dir() else name, trust_remote_code=False)
    except StrictDataclassError as error:
        raise ValueError(f"tokenizer: got {name!r}: config.json: {error.__cause__ or error}") from error
    except (OSError, ValueError) as error:
        reason = get_first_line(error).strip()
        if reason.endswith(":"):  # a list follows of what it could be made of, seen in Transformers 5.23
            reason = "it has no tokenizer.json, nor files that one is made of; name a model or folder that has"
        raise ValueError(f"tokenizer: got {name!r}: there is no tokenizer that can be loaded: {reason}") from error


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
    # That of a checkpoint is given with what its base was stored with.
    if given.skip_modules not in (None, stored.skip_modules):
        raise ValueError("quantization.skip_modules: the weights of pretrained are quantized already; leave it out")


def describe_misfit(
    checkpoint: Mapping[str, Any], *, lora: LoRA | None, config: Mapping[str, Any] | None
) -> str | None:
    """Return why adapters and sizes of a run are not those of a checkpoint, ``None`` where they may be.

    Args:
        checkpoint: Its metadata.
        lora: Of the run.
        config: Of a model that the run makes itself.
    """
    stored = checkpoint.get(LORA)
    if EXPORT not in checkpoint or not isinstance(stored, Mapping | None):
        return None
    if (stored is None) != (lora is None):
        holds, trains = ("adapters", "has none") if lora is None else ("whole weights", "has adapters")
        return f"lora: it holds {holds}, this run {trains}"
    if stored is not None and lora is not None:
        own = asdict(lora)
        for name in ("r", "rank_pattern", "use_dora", *_MEANINGS):
            if name in stored and stored[name] != own[name]:
                return f"lora.{name}: it was saved with {stored[name]!r}, this run has {own[name]!r}"
    saved = json.loads(str(checkpoint[EXPORT].get("config.json", "{}")))
    for name, value in (config or {}).items():
        is_size = name == "model_type" or (SIZES.fullmatch(name) and name != "vocab_size")
        if is_size and saved.get(name, value) != value:
            return f"config.{name}: it was saved with {saved[name]!r}, this run has {value!r}"
    return None


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
    names = list(_MEANINGS)
    if not {stored["init_lora_weights"], own["init_lora_weights"]} <= {"default", "gaussian", "loftq"}:
        names.append("init_lora_weights")  # also says what was taken out of the base
    for name in names:
        if stored[name] != own[name]:
            raise ValueError(
                f"lora.{name}: got {own[name]!r}: the adapters of the checkpoint were trained with {stored[name]!r}; "
                "set that"
            )
