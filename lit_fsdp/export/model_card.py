"""The model card of an exported model: what it is, how it was trained, how good it was."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.weights.base_weights import BASE, LORA

_TAGS = {"ForCausalLM": "text-generation", "ForImageClassification": "image-classification"}


def write_model_card(
    name: str,
    *,
    architecture: str,
    dtype: str,
    num_parameters: int,
    meta: Mapping[str, Any],
    run: Path | None,
    is_adapter: bool = False,
    notes: Sequence[str] = (),
) -> str:
    """Return the text of a ``README.md`` as the Hugging Face Hub shows it.

    Args:
        name: What to call the model.
        architecture: Name of its class.
        dtype: Of its weights.
        num_parameters: Shared ones counted once.
        meta: What the checkpoint holds beside tensors.
        run: The folder of the run, for its ``config.yaml`` and ``metrics.csv``, where they are known.
        is_adapter: Whether it is only what is added to the base model that ``meta`` names.
        notes: What else to say, before the metrics.
    """
    seen = meta.get("targets_seen")
    after = f" after {seen:,.0f} target tokens" if seen and architecture.endswith("ForCausalLM") else ""
    step = int(meta.get("global_step", 0))
    base = meta.get(BASE)
    head = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    head += [f"base_model: {base['name']}"] if base is not None else []
    head += [f"pipeline_tag: {tag}" for ending, tag in _TAGS.items() if architecture.endswith(ending)]
    what = f"Adapters of {architecture}" if is_adapter else architecture
    lines = [
        *head,
        "---",
        "",
        f"# {name}",
        "",
        f"{what}, {num_parameters:,} parameters in {dtype}, from step {step:,}{after}. Trained with lit_fsdp.",
    ]
    if is_adapter and base is not None:
        lines += _explain_loading(name, base, architecture, meta[LORA]["modules_to_save"])
    lines += [line for note in notes for line in ("", note)]
    if metrics := _read_metrics(run, step):
        lines += ["", "## Metrics", "", "| metric | value | step |", "|---|---|---|"]
        lines += [f"| {key} | {value:.6g} | {at:,} |" for key, (value, at) in sorted(metrics.items())]
    if run is not None and (config := run / "config.yaml").is_file():
        lines += ["", "## Configuration", "", "```yaml", config.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _explain_loading(name: str, base: Mapping[str, Any], architecture: str, saved: Sequence[str]) -> list[str]:
    """Return how to load adapters over the same weights that they were trained over."""
    options = f'"{base["name"]}"'
    auto, quantization = "AutoModelForCausalLM", base["quantization"]
    if architecture.endswith("ForImageClassification"):
        auto = "AutoModelForImageClassification"
        options += ", num_labels=num_labels, ignore_mismatched_sizes=True"
    imports = auto
    lines = ["", "## Loading", "", "```python", "from peft import PeftModel"]
    setup: list[str] = []
    if quantization is not None:
        imports += ", BitsAndBytesConfig"
        options += ", quantization_config=quantization"
        is_double = quantization["double"] is None or quantization["double"]
        arguments = "load_in_8bit=True"
        if quantization["type"] != "int8":
            arguments = f'load_in_4bit=True, bnb_4bit_quant_type="{quantization["type"]}", '
            arguments += f"bnb_4bit_use_double_quant={is_double}, bnb_4bit_compute_dtype=torch.bfloat16"
            lines.insert(-1, "import torch")
        if auto == "AutoModelForImageClassification":  # whose head Transformers would quantize
            arguments += f", llm_int8_skip_modules={list(saved)}"
        setup = [f"quantization = BitsAndBytesConfig({arguments})"]
    if "num_labels" in options:
        lines.insert(-1, "import json")
        setup.insert(0, f'num_labels = len(json.load(open("{name}/classes.json")))')
    lines += [f"from transformers import {imports}", "", *setup]
    lines += [f"model = {auto}.from_pretrained({options})"]
    lines += [f'model = PeftModel.from_pretrained(model, "{name}")', "```"]
    if quantization is not None:
        lines += ["", "They were trained over the base model with its weights quantized like this."]
    return lines


def _read_metrics(run: Path | None, step: int) -> dict[str, tuple[float, int]]:
    """Return the last value of each metric before the checkpoint, and after how many steps it was."""
    metrics: dict[str, tuple[float, int]] = {}
    if run is None or not (path := run / "metrics.csv").is_file():
        return metrics
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at = row.get("step")
            if not at or int(at) >= step:  # counted from 0
                continue
            values = {key: value for key, value in row.items() if value and key not in ("step", "epoch")}
            metrics |= {key: (float(value), int(at) + 1) for key, value in values.items()}
    return metrics
