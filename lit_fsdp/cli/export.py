"""``export``: the model of a checkpoint becomes a folder that other tools read."""

from __future__ import annotations

from collections.abc import Sequence

from lit_fsdp.cli.parser import run_function
from lit_fsdp.export.model import export_model


def run_export(args: Sequence[str]) -> int:
    """Export a model and print what was written.

    Args:
        args: The command line, the command first.
    """
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
    for note in exported.notes:
        print(f"note        {note}")
    return 0
