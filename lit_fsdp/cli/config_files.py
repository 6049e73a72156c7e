"""Checks the ``--config`` files themselves, before jsonargparse reads them without telling file and line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lit_fsdp.cli.renamed import rename_key
from lit_fsdp.errors import ConfigError, nearest, suggest
from lit_fsdp.redaction import REDACTED

# jsonargparse drops a scalar given for one of these groups without a word, seen in 4.53.
_SECTIONS = ("trainer", "progress_bar")


def check_config_files(args: Sequence[str]) -> list[Path]:
    """Return the files named by ``--config``; each exists, is valid YAML and has no key twice.

    Raises:
        ConfigError: What is wrong with which file, on which line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", nargs="?", default=[])
    given = parser.parse_known_args(list(args))[0].config
    # A mapping may be given in place of a file; an option without a value is for the next parser to refuse.
    files = [Path(value).expanduser() for value in given if value and not value.lstrip().startswith("{")]
    for file in files:
        if not file.is_file():
            guess = nearest(file.name, [f.name for f in file.parent.glob("*.y*ml")])
            what = "is a folder" if file.is_dir() else "does not exist"
            hint = f"did you mean {file.parent / guess}?" if guess else "expected the path of a YAML file"
            raise ConfigError(f"--config: {str(file)!r} {what}: {hint}")
        _check_content(file)
    return files


def refuse_dropped_keys(config: Any, files: Sequence[Path], args: Sequence[str]) -> None:
    """Refuse an unknown key whose value is an empty mapping, which jsonargparse 4.53 drops without a word.

    Args:
        config: What it made of files and options.
        files: In the order in which they were merged.
        args: The command line.

    Raises:
        ConfigError: With the key, and what it is called now or may have meant.
    """
    for file in files:
        _look_for_dropped(yaml.safe_load(file.read_text()), config, "")
    for option, equals, value in (arg.partition("=") for arg in args if arg.startswith("--")):
        if equals and value.strip() == "{}":
            given: Any = {}
            for part in reversed(option.removeprefix("--").split(".")):
                given = {part: given}
            _look_for_dropped(given, config, "")


def refuse_left_out(config: Any) -> None:
    """Refuse a value whose credential was redacted when the configuration was saved, unless it was given again.

    Raises:
        ConfigError: With the first of them.
    """
    for path, value in list_left_out(config):
        raise ConfigError(
            f"{path}: got {value!r}: it was redacted when this configuration was saved: give the whole value again, "
            "in the file or as an option"
        )


def list_left_out(config: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and value of each setting that holds what stands for a credential."""
    if isinstance(config, str) and REDACTED in config:
        yield path, config
    elif isinstance(config, Mapping | Namespace):
        for key, value in (config if isinstance(config, Mapping) else vars(config)).items():
            yield from list_left_out(value, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list | tuple):
        for number, value in enumerate(config):
            yield from list_left_out(value, f"{path}[{number}]")


def _look_for_dropped(given: Any, parsed: Any, path: str) -> None:
    if not isinstance(given, Mapping) or not isinstance(parsed, Mapping | Namespace):
        return
    if given.get("class_path", "") not in ("", parsed.get("class_path")):  # of a class that another one replaced
        return
    for key, value in given.items():
        inside, name = parsed, f"{path}.{key}" if path else str(key)
        if key not in inside and isinstance(inside.get("init_args"), Mapping | Namespace):
            inside, name = inside["init_args"], f"{path}.init_args.{key}"
        if key in inside:
            _look_for_dropped(value, inside[key], name)
        elif value == {}:
            if (new := rename_key(name)) != name:
                raise ConfigError(f"{name}: renamed: {new.rpartition('.')[2]}")
            siblings = {str(sibling).partition(".")[0] for sibling in inside.keys()}  # noqa: SIM118 of a Namespace
            raise ConfigError(f"{name}: unknown key: {suggest(str(key), siblings, 'expected one that --help lists')}")


def _check_content(file: Path) -> None:
    try:
        root = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise ConfigError(f"--config: {str(file)!r} is not text: expected a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"{file}{where}: not valid YAML: {problem}") from None
    if root is None:
        raise ConfigError(f"--config: {str(file)!r} is empty: expected settings of trainer, model and data")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file}: got a {root.id}: expected keys such as `trainer: {{max_steps: 100}}`")
    for key, value in root.value:
        if key.value in _SECTIONS and not isinstance(value, yaml.MappingNode):
            where = f"{file}, line {value.start_mark.line + 1}"
            raise ConfigError(f"{key.value}: got {value.value} ({where}): expected a mapping of its keys")
    _refuse_repeated_keys(root, file, "")


def _refuse_repeated_keys(node: yaml.Node, file: Path, path: str) -> None:
    """Refuse two equal keys, of which YAML keeps the last in silence."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_repeated_keys(item, file, f"{path}[{index}]")
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else str(key.value)
        if name in seen and key.value != "<<":
            lines = f"lines {seen[name].start_mark.line + 1} and {key.start_mark.line + 1}"
            raise ConfigError(f"{name}: given twice ({file}, {lines}): expected it once")
        seen[name] = key
        _refuse_repeated_keys(value, file, name)
