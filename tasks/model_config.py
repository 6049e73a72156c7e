"""The configuration of a model of Transformers: read from its folder or made of settings, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import math
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from lit_fsdp.errors import get_first_line, join_names, suggest
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.weights.base_weights import check_config_file, get_pretrained_folder

# What every model is made of; 0 would be none. Of parts that only some have, such as shared experts, 0 may mean none.
SIZES = re.compile(
    r"num_(hidden_layers|attention_heads|key_value_heads)|n_(embd|head|layer|positions)|head_dim|"
    r"(hidden|intermediate|vocab|image|patch)_size|max_position_embeddings"
)
_SHARES = re.compile(r"(\w+_)?(dropout|pdrop|dropout_prob)")
# What bad values come to in Transformers.
_OF_VALUES = (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


def load_config(pretrained: str) -> PreTrainedConfig:
    """Return the configuration of a model, a folder or of the Hub."""
    folder = get_pretrained_folder(pretrained)
    check_config_file(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"pretrained: got {pretrained!r}: {_describe_folder(folder)}")
    try:
        return drop_quantization(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except StrictDataclassError as error:
        raise ValueError(f"pretrained: {pretrained}: config.json: {error.__cause__ or error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"pretrained: got {pretrained!r}: {get_first_line(error)}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # what values of other types come to
        what = f"Transformers cannot read it: {type(error).__name__}: {error}"
        raise ValueError(f"pretrained: {pretrained}: config.json: {what}") from error


def _describe_folder(folder: Path) -> str:
    """Return what a folder is that holds no model, and what to set instead."""
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            "it holds adapters and no model: set pretrained to the model below them, and lora.pretrained to this "
            "folder to go on from them; or export the run that trained them with --merge true, and set it to that"
        )
    return "it has no config.json: expected a model's folder, such as `python -m lit_fsdp export` writes of a run"


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
        if is_number and SIZES.fullmatch(name) and value < 1:
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


def refuse_other_quantization(config: PreTrainedConfig, pretrained: str) -> None:
    """Refuse weights that are stored quantized in a format that none of our layers holds, before any are fetched.

    Args:
        config: From :func:`load_config`.
        pretrained: Where it is from, for the error.

    Raises:
        ValueError: With the format.
    """
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))  # an enum, or its text
    raise ValueError(
        f"pretrained: got {pretrained!r}: its weights are stored as {method}: only those of bitsandbytes, 4-bit or "
        "int8, can be trained over; set pretrained to a copy in bfloat16, and quantization: {type: nf4} for 4 bits"
    )


def drop_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration without that of bitsandbytes, whose layers we have ourselves."""
    settings: Any = getattr(config, "quantization_config", None)
    if isinstance(settings, dict) and settings.get("quant_method") == "bitsandbytes":
        del config.quantization_config
    return config
