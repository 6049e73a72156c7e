"""``completion``: a script with which a shell completes commands, options and their values, without asking Python."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lit_fsdp.cli.bench import BENCHMARKS
from lit_fsdp.cli.main import COMMANDS
from lit_fsdp.cli.schema import make_schema
from lit_fsdp.errors import ConfigError
from lit_fsdp.parsing.parser import find_parser, run_function

Shell = Literal["bash", "zsh"]
_PROGRAM = "lit_fsdp"
# Of commands that have commands of their own. shtab leaves out those without a text.
_WORDS = {"bench": {name: text for name, (_, text) in BENCHMARKS.items()}, "prepare": {"tts": "Audio files."}}
_WITH_CONFIG = ("fit", "validate", "test", "predict", "plan", "preview")
_MAX_HELP = 80


def run_completion(args: Sequence[str]) -> int:
    """Print the script.

    Args:
        args: The command line, the command first.
    """
    shells = [f"--shell={args[1]}"] if len(args) == 2 and not args[1].startswith("-") else args[1:]
    description = "Print a script with which a shell completes commands, options and values."
    print(run_function(make_script, shells, command="completion", description=description))
    return 0


def make_script(shell: Shell) -> str:
    """Return the script, to be saved and loaded when the shell starts.

    It completes what is typed after `lit_fsdp`, the console script. It lists the options of this version, so make it
    again after an upgrade.

    Args:
        shell: That will load it. Its name alone will do: `completion bash`.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError('completion needs the package shtab: pip install "lit_fsdp[completion]"') from None
    parser = argparse.ArgumentParser(prog=_PROGRAM, allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.summary)
        if name not in _WORDS:
            _add_options(of_command, name)
            continue
        words = of_command.add_subparsers()
        for word, summary in _WORDS[name].items():
            _add_options(words.add_parser(word, help=summary), name, word)
    script: str = shtab.complete(parser, shell)
    return script


def list_options(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the dotted options for the keys of a schema, with what each of them may be."""
    options: dict[str, Mapping[str, Any]] = {}
    for key, value in _walk(schema, schema.get("$defs", {}), "", ()):
        options.setdefault(key, value)
    return options


def _walk(
    schema: Mapping[str, Any], defs: Mapping[str, Any], path: str, seen: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:  # one that holds itself has no last key
            yield from _walk(defs[name], defs, path, (*seen, name))
        return
    for one in schema.get("anyOf", ()):
        yield from _walk(one, defs, path, seen)
    properties = schema.get("properties", {})
    for key, value in properties.items():
        if key in ("$schema", "class_path", "dict_kwargs"):
            continue
        # jsonargparse takes the arguments of a class without `init_args` between.
        inside = path if key == "init_args" else f"{path}.{key}".removeprefix(".")
        if key != "init_args":
            yield inside, value
        yield from _walk(value, defs, inside, seen)


def _add_options(parser: argparse.ArgumentParser, *words: str) -> None:
    import shtab

    module, function = COMMANDS[words[0]].entry.split(":")
    has_config = words[0] in _WITH_CONFIG
    found = find_parser(getattr(importlib.import_module(module), function), list(words))
    options = dict(list_options(make_schema(found, words[0] if has_config else "")))
    if has_config:
        options = {"config": {"type": "string", "description": "A YAML file; may be given several times."}, **options}
    for key, schema in options.items():
        text = " ".join(str(schema.get("description", "")).split()).replace("`", "")
        choices = _list_choices(schema)
        option = parser.add_argument(f"--{key}", choices=choices, help=_shorten(text).replace("%", "%%"))
        if choices is None:
            option.complete = shtab.FILE  # type: ignore[attr-defined]


def _list_choices(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the values there can be, as on a command line; ``None`` of what is not a choice."""
    found: list[str] = []
    for one in schema.get("anyOf", [schema]):
        types = one.get("type", [])
        types = [types] if isinstance(types, str) else types
        if "enum" in one:
            found += [str(value) for value in one["enum"]]
        elif set(types) <= {"boolean", "null"} and types:
            found += ["true", "false"] if "boolean" in types else []
        else:
            return None
    return found or None


def _shorten(text: str) -> str:
    sentence = text.split(". ", maxsplit=1)[0]
    return sentence if len(sentence) <= _MAX_HELP else f"{sentence[: _MAX_HELP - 3]}..."
