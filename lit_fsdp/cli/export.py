"""``export``: the model of a checkpoint becomes a folder that other tools read."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # exported without saying so

from lit_fsdp.export.model import export_model
from lit_fsdp.parsing.parser import run_function


def run_export(args: Sequence[str]) -> int:
    """Export a model and print what was written.

    Args:
        args: The command line, the command first.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()  # of files that are sent
    exported = run_function(
        export_model,
        args[1:],
        command="export",
        description="Write the model of a checkpoint as one Hugging Face folder: safetensors, configuration, tokenizer "
        "and model card.",
    )
    print(f"checkpoint  {exported.checkpoint}")
    print(f"folder      {exported.folder}")
    print(f"files       {', '.join(exported.files)}")
    print(f"model       {exported.num_parameters:,} parameters, {exported.dtype}, {exported.num_bytes / 2**30:.3f} GiB")
    if exported.url is not None:
        print(f"pushed      {exported.url}")
    for note in exported.notes:
        print(f"note        {note}")
    return 0
