"""Reads YAML: ``--config`` files before jsonargparse does, which tells no line, and all values by one loader."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace, get_loader, set_loader

from lit_fsdp.errors import ConfigError, nearest, suggest
from lit_fsdp.files import describe_special_file
from lit_fsdp.parsing.renamed import rename_key
from lit_fsdp.redaction import REDACTED

# jsonargparse drops a scalar given for one of these groups without a word, seen in 4.53.
_SECTIONS = ("trainer", "progress_bar")
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
# How names end of callbacks that Lightning refuses in a run without checkpoints and loggers.
_WRITERS = ("Checkpoint", "LearningRateMonitor", "DeviceStatsMonitor")
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML has been built with it
_MAX_BYTES, _MAX_NODES, _MAX_DEPTH = 2**20, 100_000, 100  # far above any configuration that somebody wrote
_load_plain = get_loader("yaml")


def check_config_files(args: Sequence[str]) -> list[Path]:
    """Return the files named by ``--config``; each exists, is valid YAML and has no key twice.

    Raises:
        ConfigError: What is wrong with which file, on which line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", nargs="?", default=[])
    given = parser.parse_known_args(list(args))[0].config
    if any(value is not None and not value.strip() for value in given):
        raise ConfigError("--config: got no path: expected that of a YAML file")
    # A mapping may be given in place of a file; an option without a value is for the next parser to refuse.
    files = [Path(value).expanduser() for value in given if value and not value.lstrip().startswith("{")]
    for file in files:
        if (problem := describe_special_file(file)) is not None:
            raise ConfigError(f"--config: {str(file)!r} {problem}")
        if not file.is_file():
            guess = nearest(file.name, [f.name for f in file.parent.glob("*.y*ml")])
            what = "is a folder" if file.is_dir() else "does not exist"
            hint = f"did you mean {file.parent / guess}?" if guess else "expected the path of a YAML file"
            raise ConfigError(f"--config: {str(file)!r} {what}: {hint}")
        _check_content(file)
    return files


def list_quiet_callbacks(config: Sequence[str]) -> list[Any] | None:
    """Return the callbacks of a configuration that a run without checkpoints and loggers can have.

    ``None`` if those are all of them. Lightning refuses the others in such a run; they are told by their names.

    Args:
        config: Its files, in the order in which they are merged.
    """
    given: list[Any] = []
    for file in check_config_files([f"--config={path}" for path in config]):
        trainer = (load_yaml(file.read_text(encoding="utf-8")) or {}).get("trainer")
        if isinstance(trainer, Mapping) and "callbacks" in trainer:
            found = trainer["callbacks"] or []
            given = found if isinstance(found, list) else [found]
    names = [str(one.get("class_path") if isinstance(one, Mapping) else one) for one in given]
    quiet = [one for one, name in zip(given, names, strict=True) if not name.endswith(_WRITERS)]
    return quiet if len(quiet) < len(given) else None


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
        _look_for_dropped(load_yaml(file.read_text(encoding="utf-8")), config, "")
    for arg, after in zip(args, [*args[1:], ""], strict=True):
        option, equals, value = arg.partition("=")
        if option.startswith("--") and (value if equals else after).strip() == "{}":
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


def use_own_loader() -> None:
    """Let jsonargparse read YAML by ``load_yaml``, in this whole process."""
    set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))


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
            if key == "init_args":
                raise ConfigError(f"{path}.class_path: missing: expected the class that the init_args are of")
            if (new := rename_key(name)) != name:
                raise ConfigError(f"{name}: renamed: {new.rpartition('.')[2]}")
            siblings = {str(sibling).partition(".")[0] for sibling in inside.keys()}  # noqa: SIM118 of a Namespace
            raise ConfigError(f"{name}: unknown key: {suggest(str(key), siblings, 'expected one that --help lists')}")


def load_yaml(text: str) -> Any:
    """Return what a YAML text says, as jsonargparse reads it; what has no end is not YAML.

    An alias that lies in what it stands for would be walked through for ever, and nine aliases of nine aliases of nine
    take hours.

    Raises:
        yaml.YAMLError: With the place, and what is wrong there.
    """
    _check_size(text)
    try:
        return _load_plain(text)
    except ValueError as error:  # a number of 5,000 digits
        raise yaml.YAMLError(str(error)) from error


def check_options(args: Sequence[str]) -> None:
    """Refuse the value of an option that has no end; jsonargparse 4.53 reads some past the loader that it was given.

    Raises:
        ConfigError: With the option.
    """
    for before, arg in zip(["", *args], args, strict=False):
        option, equals, value = arg.partition("=") if arg.startswith("--") else (before, "=", arg)
        if not equals or "&" not in value:
            continue
        try:
            _check_size(value)
        except _EndlessError as error:
            got = value if len(value) <= 40 else f"{value[:40]}..."
            raise ConfigError(f"{option.removeprefix('--')}: got {got!r}: {error.problem}") from None
        except yaml.YAMLError:  # plain text, or for jsonargparse to refuse
            continue


class _EndlessError(yaml.MarkedYAMLError):  # type: ignore[misc]  # yaml has no types
    problem: str


def _check_size(text: str, loader: Any = _FAST_LOADER) -> None:
    """Count nodes as they are after aliases are replaced, without making one."""
    open_sizes: list[int] = [0]  # of the collections around the present place, the whole text first
    open_anchors: list[str | None] = [None]
    sizes: dict[str, int] = {}
    for event in yaml.parse(text, Loader=loader):
        problem, anchor = None, getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in open_anchors:
                problem = f"*{anchor} stands for something that it is a part of: expected it outside of &{anchor}"
            open_sizes[-1] += sizes.get(anchor or "", 0)
        elif isinstance(event, yaml.ScalarEvent):
            open_sizes[-1] += 1
            if anchor is not None:
                sizes[anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_sizes.append(1)
            open_anchors.append(anchor)
            if len(open_sizes) > _MAX_DEPTH:
                problem = f"nested in more than {_MAX_DEPTH} levels: expected fewer"
        elif isinstance(event, yaml.CollectionEndEvent):
            size, closed = open_sizes.pop(), open_anchors.pop()
            open_sizes[-1] += size
            if closed is not None:
                sizes[closed] = size
        if open_sizes[-1] > _MAX_NODES:
            problem = f"more than {_MAX_NODES:,} values once aliases such as *{anchor} are replaced: expected fewer"
        if problem is not None:
            raise _EndlessError(problem=problem, problem_mark=event.start_mark)


def _read_nodes(file: Path) -> yaml.Node | None:
    """Return the root of a file, of which a value can be made."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            size = file.stat().st_size / 2**20
            raise ConfigError(f"--config: {str(file)!r} has {size:.1f} MiB: expected settings, of 1 MiB or less")
        text = content.decode()
        try:
            _check_size(text)
        except _EndlessError:
            raise
        except yaml.YAMLError:
            _check_size(text, yaml.SafeLoader)  # raises it again, with a place and words where libyaml has fewer
        root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        load_yaml(text)
        return root
    except UnicodeDecodeError:
        raise ConfigError(f"--config: {str(file)!r} is not text: expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"--config: {str(file)!r} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).replace("\n", " ") or "cannot be read"
        raise ConfigError(f"{file}{where}: not valid YAML: {problem}") from None


def _check_content(file: Path) -> None:
    root = _read_nodes(file)
    if root is None:
        raise ConfigError(f"--config: {str(file)!r} is empty: expected settings of trainer, model and data")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file}: got a {root.id}: expected keys such as `trainer: {{max_steps: 100}}`")
    for key, value in root.value:
        _refuse_other_than_text(key, file)
        if key.value not in _SECTIONS:
            continue
        if not isinstance(value, yaml.MappingNode):
            where = f"{file}, line {value.start_mark.line + 1}"
            got = value.value if isinstance(value, yaml.ScalarNode) else "a list"
            raise ConfigError(f"{key.value}: got {got} ({where}): expected a mapping of its keys")
        for inner, _ in value.value:
            _refuse_other_than_text(inner, file)
    _check_mappings(root, file, "")


def _refuse_other_than_text(key: yaml.Node, file: Path) -> None:
    is_text = key.tag == "tag:yaml.org,2002:str" and (key.style or isinstance(load_yaml(key.value), str))  # not 1e-4
    if not is_text and key.tag != "tag:yaml.org,2002:merge":
        got = key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
        raise ConfigError(f"{file}, line {key.start_mark.line + 1}: got {got or 'nothing'} as a key: expected a name")


def _check_mappings(node: yaml.Node, file: Path, path: str) -> None:
    """Refuse two equal keys, of which YAML keeps the last in silence, and what cannot stand beside a class."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _check_mappings(item, file, f"{path}[{index}]")
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else str(key.value)
        if name in seen and key.value != "<<":
            lines = f"lines {seen[name].start_mark.line + 1} and {key.start_mark.line + 1}"
            raise ConfigError(f"{name}: given twice ({file}, {lines}): expected it once")
        seen[name] = key
        _check_mappings(value, file, name)
    keys = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
    if "class_path" not in keys or "<<" in keys:
        return
    for key, value in keys.items():
        where = f"({file}, line {value.start_mark.line + 1})"
        if key not in _CLASS_KEYS:
            raise ConfigError(f"{path}.{key}: beside class_path {where}: expected it below {path}.init_args")
        if key == "init_args" and not isinstance(value, yaml.MappingNode):
            got = value.value or "nothing" if isinstance(value, yaml.ScalarNode) else "a list"
            raise ConfigError(f"{path}.init_args: got {got} {where}: expected a mapping of the class's arguments")
