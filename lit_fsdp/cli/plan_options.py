"""What may be written short on the command line of ``plan``: a model without a configuration, and questions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_fsdp.errors import ConfigError, suggest
from lit_fsdp.tasks.model_config import load_config
from lit_fsdp.tasks.text_model import get_max_positions
from lit_fsdp.weights.base_weights import CONFIG, fetch_pretrained

Method = Literal["full", "lora", "qlora"]

_SPELLED = {"--device-memory": "--device_memory", "--seq-length": "--seq_length", "-c": "--config"}
_SIZES = {"--device_memory", "--seq_length", "--devices", "--nodes"}  # of which a negative one is no option of its own
_FLAGS = {"--exact", "--search", "--longest", "--largest", "--cheapest"}  # may stand alone, for true
_LORA = {"r": 16, "alpha": 32, "target_modules": "all-linear"}
_METHODS: dict[str, dict[str, Any]] = {
    "full": {"lora": None, "quantization": None},
    "lora": {"lora": _LORA, "quantization": None},
    "qlora": {"lora": _LORA, "quantization": {"type": "nf4", "double_quant": True}},
}
_MAX_RANGE, _MOST_ROWS = 2**16, 8
_USUAL_LENGTH = 2048  # tokens of a row


def spell_options(args: Sequence[str]) -> list[str]:
    """Return the command line as the parser takes it.

    ``--model`` with a folder or a name of the Hub becomes a configuration like those in ``configs``, or the model of
    the one that is given. ``--method`` and ``--seq_length`` become settings of model and data.

    Raises:
        ConfigError: A short option has a value that it cannot have.
    """
    command, *rest = _split_values(args)
    taken: dict[str, str | None] = {}
    kept = []
    for name, value in rest:
        is_short = name in ("--method", "--seq_length") or (name == "--model" and _is_pretrained(value))
        if is_short:
            taken[name] = value
        else:
            kept.append(name if value is None else f"{name}={value}")
    configs = [value for name, value in rest if name == "--config"]
    settings = _write_settings(taken, has_config=bool(configs))
    if "--model" in taken and any(_has_random_model(value) for value in configs):
        settings.append("--model.config=null")
    return [command[0], *kept, *settings] if configs else [command[0], *settings, *kept]


def parse_counts(text: str, setting: str) -> list[int]:
    """Return the numbers that ``1..8`` means: all up to 8 of them, else the first one doubled up to the last.

    Raises:
        ConfigError: It is neither a number nor a range.
    """
    found = re.fullmatch(r"\s*(-?\d+)(?:\s*\.\.\s*(-?\d+))?\s*", text)
    if found is None:
        raise ConfigError(f"{setting}: got {text!r}: expected a number, or a range such as 1..8")
    first, last = int(found[1]), int(found[2] or found[1])
    if first < 1:
        raise ConfigError(f"{setting}: got {text}: expected 1 or more")
    if last < first or last > max(first, _MAX_RANGE):
        raise ConfigError(f"{setting}: got {text}: expected a range that rises, to {_MAX_RANGE:,} at most, as 1..8")
    if last - first < _MOST_ROWS:
        return list(range(first, last + 1))
    counts = [first]
    while 2 * counts[-1] < last:
        counts.append(2 * counts[-1])
    return [*counts, last]


def _split_values(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return options with their values, in the order in which they were given; what stands alone has none."""
    found: list[tuple[str, str | None]] = []
    waits = False
    for arg in args:
        is_option = arg.startswith("-") and not (waits and found[-1][0] in _SIZES and re.match(r"-[\d.]", arg))
        if waits and not is_option:
            found[-1] = (found[-1][0], arg)
            waits = False
            continue
        name, sign, value = arg.partition("=")
        found.append((_SPELLED.get(name, name), value if sign else None))
        waits = not sign and (arg.startswith("--") or arg == "-c")
    return [(name, "true" if value is None and name in _FLAGS else value) for name, value in found]


def _is_pretrained(value: str | None) -> bool:
    """Tell a folder, or a name of the Hub, from the name of a class: of both, only some of the Hub begin small."""
    if value is None or value.lstrip().startswith("{"):
        return False
    return "/" in value or Path(value).is_dir() or ("." not in value and value[:1].islower())


def _has_random_model(config: str | None) -> bool:
    """Whether a configuration has a model with random weights, which a named one takes the place of."""
    try:
        content = yaml.safe_load(Path(config or "").read_text(encoding="utf-8"))
        return content["model"]["init_args"].get("config") is not None
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):  # refused where it is read
        return False


def _write_settings(taken: Mapping[str, str | None], *, has_config: bool) -> list[str]:
    model, method, length = (taken.get(name) for name in ("--model", "--method", "--seq_length"))
    for name, value in taken.items():
        if not value:
            raise ConfigError(f"{name.removeprefix('--')}: got nothing: {_EXPECTED[name]}")
    if method is not None and method not in _METHODS:
        raise ConfigError(f"method: got {method!r}: {suggest(method, _METHODS, _EXPECTED['--method'])}")
    if length is not None and not re.fullmatch(r"\d+", length):
        raise ConfigError(f"seq_length: got {length!r}: {_EXPECTED['--seq_length']}")
    changes = {} if method is None else _METHODS[method]
    if not has_config and model is not None:
        settings = make_settings(model, method or "full", int(length) if length else _choose_length(model))
        return [f"--config={json.dumps(settings)}"]
    options = [] if model is None else [f"--model.pretrained={model}"]
    options += [f"--model.{name}={json.dumps(value)}" for name, value in changes.items()]
    return [*options, *([] if length is None else [f"--data.seq_length={length}"])]


def _choose_length(pretrained: str) -> int:
    """Return the tokens of a row where nobody says how many: the usual ones, or all positions of the model."""
    try:
        fetch_pretrained(pretrained, patterns=CONFIG)
        limit = get_max_positions(load_config(pretrained))
    except ValueError:  # the plan refuses this model, by its setting
        limit = None
    return min(limit or _USUAL_LENGTH, _USUAL_LENGTH)


_EXPECTED = {
    "--model": "expected a folder with config.json, or a name of the Hub such as Qwen/Qwen3-8B",
    "--method": "expected full, lora or qlora",
    "--seq_length": "expected a number of tokens, such as 4096",
}


def make_settings(pretrained: str, method: str, seq_length: int) -> dict[str, Any]:
    """Return the configuration of a fine-tune, as those in ``configs`` are: recomputed blocks, one row, packed chats.

    Args:
        pretrained: A folder or a name on the Hub.
        method: ``full``, ``lora`` or ``qlora``.
        seq_length: Tokens of a row.
    """
    # Frozen weights can be in bfloat16 alone; what an optimizer moves by little needs float32 beside it.
    precision = "bf16-mixed" if method == "full" else "bf16-true"
    strategy = {"activation_checkpointing": {"mode": "full"}}
    given = {name: value for name, value in _METHODS[method].items() if value is not None}
    return {
        "trainer": {
            "accelerator": "gpu",
            "precision": precision,
            "strategy": {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": strategy},
            "max_epochs": 1,
            "gradient_clip_val": 1.0,
        },
        "model": {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": {"pretrained": pretrained, **given}},
        "data": {
            "class_path": "lit_fsdp.tasks.TextData",
            "init_args": {
                "train": "HuggingFaceH4/no_robots",  # as in configs; a plan reads no data
                "validation_fraction": 0.02,
                "tokenizer": pretrained,
                "seq_length": seq_length,
                "batch_size": 1,
            },
        },
    }
