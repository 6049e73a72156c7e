"""Errors on one line: where in the YAML, what was given, what was expected.

Note [Report of jsonargparse]: it describes a wrong value by nested text. ``Parser key "k":`` and ``Problem
with given class_path 'X':`` open a level, every alternative of a union gets its own lines, and the one that
matters is the deepest. :func:`describe_config_error` reads that text back, seen in jsonargparse 4.53.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import dis
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args, get_type_hints

_KILLED_WORKER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: Killed")
_LATE_CHECK = re.compile(r"`val_check_interval` \((\d+)\) must be .* number of the training batches \((\d+)\)")
_EXTRAS = {"wandb": "wandb", "mlflow": "mlflow"}
_NOISE = re.compile(
    r"(Does not validate|Errors:|Given value type|Subclass types expect|an? (class path|dict with)|"
    r"Expected a path but|$)"
)
_BASES = ("lightning.LightningModule", "lightning.LightningDataModule")  # what model and data are without a class
_Levels = tuple[tuple[str, str], ...]


class ConfigError(SystemExit):
    """A command line or configuration that cannot be run; ``line`` says why.

    A ``SystemExit`` because jsonargparse turns most exceptions raised while parsing into text of its own.
    """

    def __init__(self, line: str) -> None:
        super().__init__(2)
        self.line = line


@dataclasses.dataclass(frozen=True)
class _Finding:
    """One line of a report, with the keys (``key``) and classes (``class``) it was found under."""

    levels: _Levels
    text: str


def is_debugging() -> bool:
    """Whether every error shall keep its traceback, on ``LIT_FSDP_DEBUG=1``."""
    return os.environ.get("LIT_FSDP_DEBUG") == "1"


def report_error(line: str) -> None:
    """Print ``error: line`` on stderr, with the rank in front on all but the first."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    prefix = f"[rank {rank}] " if rank != "0" else ""
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"{prefix}error: {_one_line(line)}\n")
    sys.stderr.flush()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` was probably meant to be."""
    known = list(known)
    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def join_names(names: Sequence[str]) -> str:
    """Return names for an error: the first five, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def explain_unknown_key(message: str, known: Iterable[str]) -> str:
    """Rewrite jsonargparse's refusals of a key as ``Unknown key "a.b": did you mean c?``.

    Done by the parser that refused, as only that one has the ``known`` keys.
    """
    if found := re.match(r"(?:Subcommand|(Group)) '([^']+)' does not accept option '([^']+)'", message):
        key = f"{found[2]}.{found[3]}" if found[1] else found[3]
    elif found := re.match(r"Option '([^']+)' is not accepted|unrecognized arguments: --([^=\s]+)", message):
        key = found[1] or found[2]
    else:
        return message
    known = sorted(k for k in known if k and k != "print_shtab")
    prefix = ""
    for part in key.split("."):
        siblings = sorted({k[len(prefix) :].split(".")[0] for k in known if k.startswith(prefix)})
        if part not in siblings:
            return f'Unknown key "{prefix}{part}": {_suggest_key(part, siblings, known)}'
        prefix += f"{part}."
    return message


def explain_bare_flag(message: str, actions: Iterable[argparse.Action]) -> str:
    """Rewrite the refusal of an option without a value, where that is true or false."""
    # Private, seen in jsonargparse 4.53: the type of an option, which argparse is not told.
    flags = {action.dest for action in actions if getattr(action, "_typehint", None) is bool}
    found = re.fullmatch(r"argument --(\S+): expected one argument", message.strip())
    if found is None or found[1] not in flags:
        return message
    return f"argument --{found[1]}: expected true or false, such as --{found[1]} true"


def describe_config_error(message: str, *, subcommand: str | None = None) -> str:
    """Turn a report of jsonargparse into ``path: what was given: what was expected``.

    Args:
        message: The report, see Note [Report of jsonargparse].
        subcommand: Left out of the path when the report starts with it.
    """
    if message.strip() == "Unexpected config:":
        return "config: the file is empty: expected settings of trainer, model and data"
    findings, given, bases = _read_report(message)
    if not findings:
        return _one_line(message)
    depth = max(len(f.levels) for f in findings)
    deepest = [f for f in findings if len(f.levels) == depth]
    expected = [f for f in deepest if re.match("Expected a (<|typing|list|dict|tuple)", f.text)]
    special = [f for f in deepest if f not in expected and not f.text.startswith("Not a valid subclass")]
    chosen = (special or [f for f in deepest if f not in expected] or expected)[0]
    keys = tuple(level for level in chosen.levels if level[0] == "key")
    value = given.get(chosen.levels, given.get(keys, ""))
    if chosen in expected:
        suffix, text = "", _explain_type([f.text for f in expected], value)
    else:
        suffix, text = _explain(chosen, value, bases.get(chosen.levels, bases.get(keys, [])))
    path = _format_path(chosen.levels, suffix, is_list=value.startswith("["))
    if subcommand and path.startswith(f"{subcommand}."):
        path = path.removeprefix(f"{subcommand}.")
    return _one_line(f"{path}: {text}" if path else text)


def describe_exception(error: BaseException, *, trusted: Iterable[str] = ("lit_fsdp",)) -> str | None:
    """Return the one line that tells a user all, or ``None`` where the traceback is needed.

    One line is enough for what our own code refused: a ``raise`` written in our folders. An error that merely
    passes through them is a bug of ours, and needs its traceback.

    Args:
        error: What was raised.
        trusted: The packages whose ``raise`` is a refusal.
    """
    line = str(error) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        for package, extra in _EXTRAS.items():
            if package in line.lower():
                return f'the package {package} is not installed: pip install "lit_fsdp[{extra}]"'
    names = {base.__name__ for base in type(error).__mro__}
    if "MisconfigurationException" in names:
        is_gpu_missing = line.startswith("No supported gpu backend")
        return f"accelerator: {line} torch sees none on this machine; set it to auto" if is_gpu_missing else line
    if "OutOfMemoryError" in names or "DefaultCPUAllocator: can't allocate memory" in line:
        return f"out of memory: {line.splitlines()[0]}"  # where it was is in the report
    if killed := _KILLED_WORKER.search(line):
        return f"{killed[0]}: the kernel does so when host memory runs out; set num_workers of the data lower"
    if late := _LATE_CHECK.search(line):  # Lightning knows it once the data is there
        return (
            f"trainer.val_check_interval: got {late[1]}: an epoch has {late[2]} batches: set it to {late[2]} or less, "
            "or check_val_every_n_epoch: null, to count batches of all epochs"
        )
    frames = list(_walk(error.__traceback__))
    if not frames or not _is_inside(frames[-1].tb_frame.f_code.co_filename, trusted):
        return None
    if isinstance(error, FileNotFoundError | ImportError):
        return line
    raised_here = dis.opname[frames[-1].tb_frame.f_code.co_code[frames[-1].tb_lasti]] == "RAISE_VARARGS"
    if raised_here and isinstance(error, ValueError | TypeError | RuntimeError):
        return line
    return None


def _walk(traceback: TracebackType | None) -> Iterable[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_inside(filename: str, packages: Iterable[str]) -> bool:
    roots: set[Path] = set()
    for package in packages:
        for folder in getattr(sys.modules.get(package), "__path__", ()):
            # Of ours, two folders are links to their neighbours.
            roots |= {Path(folder, name).resolve() for name in ("", "tasks", "callbacks")}
    return any(Path(filename).resolve().is_relative_to(root) for root in roots)


def _suggest_key(part: str, siblings: list[str], known: list[str]) -> str:
    elsewhere = [k for k in known if k.endswith(f".{part}")]
    if len(elsewhere) == 1:
        return f"did you mean {elsewhere[0]}?"
    if guess := nearest(part, siblings):
        return f"did you mean {guess}?"
    if not siblings:
        return "expected no key here"
    if len(siblings) <= 15:
        return f"expected one of {', '.join(siblings)}"
    return "expected one of the keys that --help lists"


def _read_report(message: str) -> tuple[list[_Finding], dict[_Levels, str], dict[_Levels, list[str]]]:
    """Return the findings, and by level the value that was given and the classes that were expected there."""
    findings: list[_Finding] = []
    given: dict[_Levels, str] = {}
    bases: dict[_Levels, list[str]] = {}
    open_levels: list[tuple[int, tuple[str, str]]] = []
    for raw in message.splitlines():
        line = raw.lstrip(" -")
        indent = len(raw) - len(line)
        while line and open_levels and open_levels[-1][0] >= indent:
            open_levels.pop()
        levels = tuple(level for _, level in open_levels)
        if found := re.match(r'Parser key "([^"]+)"[^:]*:(.*)', line):
            open_levels.append((indent, ("key", found[1])))
            if found[2].strip():
                findings.append(_Finding((*levels, ("key", found[1])), found[2].strip()))
        elif found := re.match(r"Problem with given class_path '([^']+)':", line):
            open_levels.append((indent, ("class", found[1])))
        elif line.startswith("Given value: "):
            given[levels] = line.removeprefix("Given value: ")
        elif line.startswith("Subtypes: "):
            bases[levels] = re.findall(r"[\w.]+\.[A-Z]\w*", line)
        elif not _NOISE.match(line):
            findings.append(_Finding(levels, line))
    return findings, given, bases


def _format_path(levels: _Levels, suffix: str, *, is_list: bool) -> str:
    path = ""
    for index, (kind, name) in enumerate(levels):
        if kind == "key":
            path += f".{name}" if path else name
            continue
        if is_list:
            path += f"[{name.rsplit('.', 1)[-1]}]"
        is_last = index == len(levels) - 1
        if not (is_last and suffix in ("", "class_path")) and not _is_dataclass(name):
            path += ".init_args"
    return f"{path}.{suffix}" if suffix and path else path or suffix


def _explain_type(texts: list[str], value: str) -> str:
    names: list[str] = []
    for text in texts:
        body, _, got = text.removeprefix("Expected a ").partition(". Got value: ")
        value = got or value
        names += _name_types(body)
    names = list(dict.fromkeys(names))
    if "null" in names:
        names = [n for n in names if n != "null"] + ["null"]
    listed = ", ".join(names[:-1]) + (" or " if len(names) > 1 else "") + names[-1]
    guess = nearest(_bare(value), set(names) - {"int", "float", "str", "list", "null"})
    hint = f": did you mean {guess}?" if guess else ""
    return f"got {_quote(value)}: expected {'one of ' if len(names) > 2 else ''}{listed}{hint}"


def _name_types(body: str) -> list[str]:
    """Translate a type as jsonargparse prints it into the words of a YAML file."""
    if literal := re.match(r"typing\.Literal\[(.*)\]$", body):
        return [str(choice) for choice in ast.literal_eval(f"[{literal[1]}]")]
    body = re.sub(r"<class '([^']+)'>", r"\1", body)
    body = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", body)
    words = {"NoneType": "null", "bool": "true or false", "Iterable": "list", "dict": "mapping"}
    return [words.get(body, body)]


def _explain(finding: _Finding, value: str, bases: list[str]) -> tuple[str, str]:
    """Return what to add to the path and what to say, for everything but a plain wrong type."""
    text, owner = finding.text, next((n for kind, n in reversed(finding.levels) if kind == "class"), "")
    if (found := re.match(r'Unknown key "([^"]+)": (.*)', text)) and owner in _BASES:
        return found[1], "no class has been chosen up to here: put --config or the class before this option"
    if found := re.match(r'Unknown key "([^"]+)": (.*)', text):
        return found[1], f"unknown key{f' of {owner}' if owner else ''}: {found[2]}"
    if found := re.match(r"the following arguments are required: (.*)", text):
        first, *others = found[1].split(", ")
        also = f" (also missing: {', '.join(others)})" if others else ""
        return first, f"missing: expected a value{f', {owner} cannot do without' if owner else ''}{also}"
    if found := re.match(r"module '([^']+)' has no attribute '([^']+)'", text):
        if owner == f"{found[1]}.{found[2]}":
            return "class_path", f"got {owner!r}: {_explain_missing_class(found[1], found[2])}"
        if owner.startswith(f"{found[1]}.{found[2]}."):
            return "class_path", f"got {owner!r}: {_explain_missing_module(f'{found[1]}.{found[2]}')}"
    if (found := re.match(r"No module named '([^']+)'", text)) and owner.startswith(f"{found[1]}."):
        return "class_path", f"got {owner!r}: {_explain_missing_module(found[1])}"
    return _explain_class(text, owner, value, bases)


def _explain_class(text: str, owner: str, value: str, bases: list[str]) -> tuple[str, str]:
    """Continue :func:`_explain` with what is wrong with a class, and with the rest."""
    suffix = "" if value.startswith("[") else "class_path"
    if found := re.match(r"Expected a dot import path string: (.*?)(?:\. Got value.*)?$", text):
        if value.startswith("NestedArg("):
            known = "lit_fsdp.FSDP2Strategy" if found[1] == "fsdp2" else "one"
            key = value.split("'")[1]
            return "", f"got {found[1]!r} before, which has no {key}: expected class_path: {known}"
        guess = nearest(found[1], _list_subclasses(bases))
        settings = next(filter(_is_dataclass, bases), "")
        if settings and not guess and "." not in found[1]:
            return "", f"got {_quote(found[1])}: expected {_describe_mapping(settings, found[1])}"
        hint = f"did you mean {guess}?" if guess else "expected module.Class, or the name of a class of ours"
        return suffix, f"got {found[1]!r}: no class of this name: {hint}"
    if found := re.match(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)", text):
        return suffix, f"got {found[1] or value!r}: expected a subclass of {found[2]}"
    if found := re.match(r"Not a valid subclass of (\w+)(?:\. Got value: (.*))?", text):
        base = next((b for b in bases if b.endswith(f".{found[1]}")), "")
        what = _describe_mapping(base, found[2] or value) if _is_dataclass(base) else f"a class_path of a {found[1]}"
        return "", f"got {_quote(found[2] or value)}: expected {what}"
    if found := re.match(r"argument (?:-c/)?--(\S+): (expected .*)", text):
        return found[1], f"no value given: {found[2]}"
    if found := re.match(r"unrecognized arguments: (.*)", text):
        return "", f"{found[1]}: unexpected argument: expected --key=value"
    if owner:
        return "class_path", f"importing {owner} failed: {text}"
    return "", text


def _explain_missing_class(module: str, name: str) -> str:
    names = [n for n in dir(sys.modules.get(module)) if not n.startswith("_")]
    guess = nearest(name, names)
    hint = f"did you mean {guess}?" if guess else "expected a class in it"
    return f"module {module} has no {name}: {hint}"


def _explain_missing_module(name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    folders = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(Path.cwd())]
    known = [module.name for module in pkgutil.iter_modules(folders)]
    guess = nearest(leaf, known if parent else [*known, "lit_fsdp", "lightning"])
    full = f"{parent}.{guess}" if parent else guess
    hint = f"did you mean {full}?" if guess else "expected one that python can import"
    return f"no module {name}: {hint}"


def _find_class(class_path: str) -> object:
    module, _, name = class_path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _is_dataclass(class_path: str) -> bool:
    return dataclasses.is_dataclass(_find_class(class_path))


def _describe_mapping(class_path: str, value: str) -> str:
    """Return what to write instead of a plain value: the key that takes it, if one does."""
    settings: Any = _find_class(class_path)
    key = next((name for name, hint in get_type_hints(settings).items() if value in get_args(hint)), None)
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    has_defaults = all((field.default, field.default_factory) != missing for field in dataclasses.fields(settings))
    example = f", such as {{{key}: {value}}}" if key else ", {} for its defaults" if has_defaults else ""
    return f"a mapping of the keys of {settings.__name__}{example}"


def _list_subclasses(class_paths: list[str]) -> set[str]:
    found: set[str] = set()
    todo: list[type] = [c for c in map(_find_class, class_paths) if isinstance(c, type)]
    while todo:
        children: list[type] = todo.pop().__subclasses__()
        for subclass in children:
            if subclass.__name__ not in found:
                found.add(subclass.__name__)
                todo.append(subclass)
    return {name for name in found if not name.startswith("_")}


def _bare(value: str) -> str:
    nested = re.match(r"NestedArg\(key='[^']*', val='(.*)'\)$", value)
    return nested[1] if nested else value


def _quote(value: str) -> str:
    value = _bare(value)
    return value if re.match(r"[\[{(\d-]|(None|True|False)$", value) else f"'{value}'"


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 500 else f"{text[:497]}..."
