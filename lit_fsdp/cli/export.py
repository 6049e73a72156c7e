"""``export``: the model of a checkpoint becomes a folder that other tools read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

import jsonargparse
from typing_extensions import override

from lit_fsdp.errors import ConfigError, describe_config_error, explain_unknown_key
from lit_fsdp.export.model import export_model


def run_export(args: Sequence[str]) -> int:
    """Export a model and print what was written.

    Args:
        args: The command line, the command first.
    """
    parser = ExportParser(
        prog="python -m lit_fsdp export",
        description="Write the model of a checkpoint as one Hugging Face folder: safetensors, configuration, "
        "tokenizer and model card.",
        allow_abbrev=False,
    )
    parser.add_function_arguments(export_model, fail_untyped=True)
    settings = parser.instantiate(parser.parse_args(list(args[1:])))
    exported = export_model(**settings.as_dict())
    print(f"checkpoint  {exported.checkpoint}")
    print(f"folder      {exported.folder}")
    print(f"files       {', '.join(exported.files)}")
    print(f"model       {exported.num_parameters:,} parameters, {exported.dtype}, {exported.num_bytes / 2**30:.3f} GiB")
    for note in exported.notes:
        print(f"note        {note}")
    return 0


class ExportParser(jsonargparse.ArgumentParser):
    """A parser whose every refusal is one line, with the nearest known option."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise instead of printing the usage."""
        known = {action.dest for action in self._actions if action.dest != argparse.SUPPRESS}
        message = explain_unknown_key(message, known - {"help", "config", "print_config"})
        raise ConfigError(describe_config_error(message)) from ex
