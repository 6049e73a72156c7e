"""The model card of an exported model: what it is, how it was trained, how good it was."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_model_card(
    name: str, *, architecture: str, dtype: str, num_parameters: int, meta: Mapping[str, Any], run: Path | None
) -> str:
    """Return the text of a ``README.md`` as the Hugging Face Hub shows it.

    Args:
        name: What to call the model.
        architecture: Name of its class.
        dtype: Of its weights.
        num_parameters: Shared ones counted once.
        meta: What the checkpoint holds beside tensors.
        run: The folder of the run, for its ``config.yaml`` and ``metrics.csv``, where they are known.
    """
    seen = meta.get("targets_seen")
    after = f" after {seen:,.0f} target tokens" if seen and architecture.endswith("ForCausalLM") else ""
    step = int(meta.get("global_step", 0))
    head = ["---", "library_name: transformers"]
    head += ["pipeline_tag: text-generation"] if architecture.endswith("ForCausalLM") else []
    lines = [
        *head,
        "---",
        "",
        f"# {name}",
        "",
        f"{architecture}, {num_parameters:,} parameters in {dtype}, from step {step:,}{after}. Trained with lit_fsdp.",
    ]
    if metrics := _read_metrics(run, step):
        lines += ["", "## Metrics", "", "| metric | value | step |", "|---|---|---|"]
        lines += [f"| {key} | {value:.6g} | {at:,} |" for key, (value, at) in sorted(metrics.items())]
    if run is not None and (config := run / "config.yaml").is_file():
        lines += ["", "## Configuration", "", "```yaml", config.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"


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
