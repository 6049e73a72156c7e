"""The model card of an exported model: what it is, how it was trained, how good it was."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported without saying so

from lit_fsdp.checkpoint.reader import StoredCheckpoint, find_run
from lit_fsdp.errors import join_names
from lit_fsdp.export.position_embeddings import explain_size
from lit_fsdp.redaction import redact, redact_yaml
from lit_fsdp.weights.base_weights import BASE

_TAGS = {
    "ForCausalLM": "text-generation",
    "ForImageClassification": "image-classification",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
}
_BLOCK_SIZE = 64  # of 4-bit weights in Transformers, which knows no other
_BLOCKS = (
    " A block had {size} weights in training. From a full base, these lines make blocks of {known}: logits differ."
)
_MORE = " Its {} were quantized too, which these lines leave in full: logits differ by that error."


def write_model_card(
    name: str,
    stored: StoredCheckpoint,
    dtype: str,
    num_parameters: int,
    *,
    is_adapter: bool,
    is_gguf: bool = False,
    is_pushed: bool = False,
    quantized_more: Sequence[str] = (),
    unquantized: Sequence[str] | None = None,
) -> str:
    """Return the text of a ``README.md`` as the Hugging Face Hub shows it.

    Configuration and metrics are those of the run that wrote the checkpoint, where they are known; without credentials.

    Args:
        name: Title, and the folder in the lines that load it.
        stored: The checkpoint.
        dtype: Of the weights.
        num_parameters: That were written.
        is_adapter: Whether they are adapters alone.
        is_gguf: Whether they are one file for llama.cpp.
        is_pushed: Whether ``name`` is that on the Hub, where readers will load them from.
        quantized_more: What adapters were trained over in fewer bits, and Transformers has in full, such as experts.
        unquantized: The linear layers below adapters that stayed dense; ``None`` if they are those that Transformers
            leaves dense anyway.
    """
    meta, run = stored.meta, find_run(stored.path)
    config = json.loads(stored.files["config.json"])
    architecture = config["architectures"][0]
    seen = meta.get("targets_seen")
    what_seen = meta.get("targets_name", "target tokens")
    after = f" after {seen:,.0f} {what_seen}" if seen and architecture.endswith("ForCausalLM") else ""
    step = int(meta.get("global_step", 0))
    base = meta.get(BASE)
    is_on_hub = base is not None and _is_hub_name(base["name"])
    data = ModelCardData(
        library_name="peft" if is_adapter else "gguf" if is_gguf else "transformers",
        base_model=base["name"] if base is not None and is_on_hub else None,
        pipeline_tag=next((tag for ending, tag in _TAGS.items() if architecture.endswith(ending)), None),
    )
    what = f"Adapters of {architecture}" if is_adapter else architecture
    after = f"{num_parameters:,} parameters in {dtype}, from step {step:,}{after}"
    lines = ["---", data.to_yaml(), "---", "", f"# {name}", "", f"{what}, {after}. Trained with lit_fsdp."]
    if base is not None and not is_on_hub:
        lines += ["", f"The base model was `{base['name']}`."]
    if is_adapter and base is not None:
        lines += _explain_loading(name, base, config, unquantized, is_pushed=is_pushed)
        lines[-1] += _MORE.format(join_names(quantized_more)) if quantized_more else ""
        if base["quantization"] is not None and (size := base["quantization"]["block_size"]) != _BLOCK_SIZE:
            lines[-1] += _BLOCKS.format(size=size, known=_BLOCK_SIZE)
    lines += [line for note in explain_size(stored) for line in ("", note)]
    if metrics := _read_metrics(run, step):
        lines += ["", "## Metrics", "", "| metric | value | step |", "|---|---|---|"]
        lines += [f"| {key} | {value:.6g} | {at:,} |" for key, (value, at) in sorted(metrics.items())]
    if run is not None and (config := run / "config.yaml").is_file():
        lines += ["", "## Configuration", "", "```yaml", redact_yaml(config.read_text()).rstrip(), "```"]
    return str(redact("\n".join(lines))) + "\n"


def _is_hub_name(name: str) -> bool:
    """Whether the Hub takes a base model for one of its own; it refuses cards with another, such as a folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _explain_loading(
    name: str,
    base: Mapping[str, Any],
    config: Mapping[str, Any],
    unquantized: Sequence[str] | None,
    *,
    is_pushed: bool,
) -> list[str]:
    """Return how to load adapters over the same weights that they were trained over."""
    architecture = config["architectures"][0]
    ending = next((ending for ending in _TAGS if architecture.endswith(ending)), "ForCausalLM")
    auto, options, quantization = f"AutoModel{ending}", f'"{base["name"]}"', base["quantization"]
    is_classifier = ending.endswith("Classification")
    imports, setup, after = ["from peft import PeftModel"], [], []
    names = []
    if is_classifier:
        imports.insert(0, "import json")
        path = f'hf_hub_download("{name}", "classes.json")' if is_pushed else f'"{name}/classes.json"'
        setup.append(f"classes = json.load(open({path}))")
        options += ", num_labels=len(classes), id2label=dict(enumerate(classes)), ignore_mismatched_sizes=True"
    if ending == "ForSequenceClassification" and config.get("pad_token_id") is not None:
        options += f", pad_token_id={config['pad_token_id']}"  # by which decoders find the end of a text
    if quantization is not None:
        names = ["BitsAndBytesConfig"]
        options += ", quantization_config=quantization"
        arguments = "load_in_8bit=True"
        if quantization["type"] != "int8":
            arguments = f'load_in_4bit=True, bnb_4bit_quant_type="{quantization["type"]}", '
            is_double = quantization["double_quant"] is not False
            dtype = base.get("compute_dtype", "bfloat16")  # an earlier state did not write it down
            arguments += f"bnb_4bit_use_double_quant={is_double}, bnb_4bit_compute_dtype=torch.{dtype}"
            imports.insert(-1, "import torch")
        if unquantized is not None:
            arguments += f", llm_int8_skip_modules={list(unquantized)}"
        setup.append(f"quantization = BitsAndBytesConfig({arguments})")
        after = ["", "They were trained over the base model with its weights quantized like this."]
    if is_classifier and is_pushed:
        imports.insert(-1, "from huggingface_hub import hf_hub_download")
    return [
        *("", "## Loading", "", "```python"),
        *imports,
        *(f"from transformers import {', '.join([auto, *names])}", ""),
        *setup,
        f"model = {auto}.from_pretrained({options})",
        f'model = PeftModel.from_pretrained(model, "{name}")',
        "```",
        *after,
    ]


def _read_metrics(run: Path | None, step: int) -> dict[str, tuple[float, int]]:
    """Return the last value of each metric before the checkpoint, and after how many steps it was."""
    metrics: dict[str, tuple[float, int]] = {}
    if run is None or not (path := run / "metrics.csv").is_file():
        return metrics
    with path.open(newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            with suppress(KeyError, TypeError, ValueError):  # a row without a step, or one that a killed run has cut
                at = int(row["step"])  # counted from 0
                values = {key: value for key, value in row.items() if value and key not in ("step", "epoch")}
                metrics |= {key: (float(value), at + 1) for key, value in values.items() if at < step}
    return metrics
