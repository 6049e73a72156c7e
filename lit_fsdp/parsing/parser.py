"""Parsers whose every refusal is one line: where in the YAML, what was given, what was expected.

Note [Errors of jsonargparse]: they are nested text, with lines for every alternative of a union. What they are made
of is in the frames of their tracebacks: setting, type and value, and the errors of all alternatives. That is read
here, and of several alternatives the deepest counts. The names in those frames are private, seen in jsonargparse 4.53;
where one is missing, the text is printed as it is.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import logging
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import EnumType
from pathlib import Path
from types import FrameType, ModuleType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import jsonargparse
from jsonargparse._typehints import get_all_subclass_paths  # private, seen in 4.53
from jsonargparse.typing import register_type
from typing_extensions import override

from lit_fsdp.checkpoint.remote import describe_local_only, is_remote, locate_local
from lit_fsdp.errors import ConfigError, nearest, suggest
from lit_fsdp.parsing.config_files import check_options, use_own_loader
from lit_fsdp.parsing.renamed import RENAMED, rename_key

_BASES = ("LightningModule", "LightningDataModule")  # what model and data are without a class
_TYPE_WORDS = {type(None): "null", bool: "true or false", collections.abc.Iterable: "list", dict: "mapping"}
# What other tools call precisions and dtypes, which no spelling tells: "fp16" looks most like "bf16".
_SYNONYMS = {
    "fp16": ("16-mixed", "float16"),
    "float16": ("16-mixed",),
    "half": ("16-mixed", "float16"),
    "bf16": ("bfloat16",),
    "bfloat16": ("bf16-mixed",),
    "fp32": ("32-true", "float32"),
    "float32": ("32-true",),
}


_is_wanted: ContextVar[bool] = ContextVar("is_wanted", default=False)  # see find_parser


class OneLineParser(jsonargparse.ArgumentParser):
    """A parser that raises one line instead of printing its usage.

    The parser that jsonargparse makes for each class is of the same type, and hands on what it refuses. The first one
    changes how jsonargparse reads YAML and ``Path`` in this process; importing this module changes nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_own_loader()
        # Of every setting that is a path of this machine: an address would become a folder named after its scheme.
        register_type(Path, str, _read_local, fail_already_registered=False)
        # What this logger is given is dropped, but only after a record was made of it; seen in jsonargparse 4.53.
        logging.getLogger("jsonargparse_null_logger").disabled = True
        # An abbreviation is a typo that runs: --trainer.max_step=3 would be taken for max_steps.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a ``ConfigError``, or for a class what the parser that holds it makes one of."""
        error = ex or _RefusalError(
            message.removeprefix("unrecognized arguments: "), "unexpected argument: expected --key=value", self
        )
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, message) from error
        try:
            line = describe_refusal(error, getattr(ex, "subcommand_parser", self))
        except KeyError:  # another jsonargparse
            line = message
        raise ConfigError(line) from ex

    @override
    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Read a command line whose values all come to an end."""
        if _is_wanted.get():
            raise _ParserFound(self)
        # It hands null on to a class as the word None, seen in jsonargparse 4.53; drop when that is mended.
        if "defaults" in kwargs and args is not None and len(args) == 1 and args[0].endswith("=None"):
            args = [f"{args[0].removesuffix('None')}null"]
        check_options(sys.argv[1:] if args is None else args)
        return super().parse_args(args, *more, **kwargs)

    @override
    def validate(self, namespace: jsonargparse.Namespace, *args: Any, **kwargs: Any) -> None:
        """Refuse a scalar given for a dataclass, which jsonargparse 4.53 lets pass until it is built."""
        for key in self.groups or {}:
            value = namespace.get(key)
            if isinstance(value, bool | int | float | str | list):
                raise _RefusalError(key, f"got {value!r}: expected mapping")
        super().validate(namespace, *args, **kwargs)


def find_parser(run: Callable[[Sequence[str]], Any], args: Sequence[str]) -> OneLineParser:
    """Return the parser that a command would read its options with; the command goes no further.

    Args:
        run: The command.
        args: Its command line, without options.
    """
    token = _is_wanted.set(True)
    try:
        run(args)
    except _ParserFound as found:
        return found.parser
    finally:
        _is_wanted.reset(token)
    raise AssertionError(f"{' '.join(args)} has read no command line")


def run_function(function: Callable[..., Any], args: Sequence[str], *, command: str, description: str) -> Any:
    """Call a function with the settings of a command line, one option for each of its arguments.

    Args:
        function: Its docstring is the help.
        args: The options.
        command: What comes before them.
        description: The first line of the help.
    """
    parser = OneLineParser(prog=f"python -m lit_fsdp {command}", description=description)
    parser.add_function_arguments(function, fail_untyped=True)
    return function(**parser.instantiate(parser.parse_args(list(args))).as_dict())


def order_help(parser: jsonargparse.ArgumentParser, titles: Mapping[str, str]) -> None:
    """Sort the groups of options that ``--help`` shows.

    Args:
        parser: Of one command.
        titles: In their order, by the key that a group of options shares, such as ``trainer``; ``options`` are those
            without one, and the name of the command has the arguments of its method.
    """
    # Private, seen in Python 3.11: argparse has no way to say it.
    groups: dict[str, Any] = {"options": parser._optionals, **(parser.groups or {})}
    order = [groups[name] for name in titles if name in groups]  # a method without arguments has none
    for name in titles.keys() & groups.keys():
        groups[name].title = titles[name]
    parser._action_groups = [*order, *(group for group in parser._action_groups if group not in order)]


def _read_local(given: object) -> Path:
    if given is None:  # of a union with null, this type is asked first
        raise TypeError("expected a path")
    return locate_local(str(given))


def prefer_whole_numbers(parser: jsonargparse.ArgumentParser) -> None:
    """Let a whole number stay one in the Trainer's settings that take both: as a share, 1 batch would be all of them.

    ``Optional[Union[int, float]]`` has the types the other way round where a module imported before it has made
    ``Union[float, int]``, as the typing of Python keeps what it has made; jsonargparse takes the first type that fits.
    """
    actions: list[Any] = parser._actions
    for action in actions:
        typehint = getattr(action, "_typehint", None)
        types = get_args(typehint) if get_origin(typehint) in (Union, UnionType) else ()
        if int in types and float in types[: types.index(int)]:
            action._typehint = Union[(int, *(kind for kind in types if kind is not int))]


def refuse_null(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse ``null`` for an argument whose type has none, which jsonargparse 4.53 takes for not given.

    Raises:
        ValueError: With the argument, and the types that it may have.
    """
    empty = [name for name, value in arguments.items() if value is None]
    try:
        hints = get_type_hints(function if dataclasses.is_dataclass(function) else function.__init__) if empty else {}
    except NameError:  # names imported for type checkers only
        return
    for name in empty:
        hint = hints.get(name, Any)
        choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not {Any, object, None, type(None)} & set(choices) and get_origin(hint) is not Annotated:
            expected = " or ".join(word for choice in choices for word in _name_types(choice))
            raise ValueError(f"{name}: got null: expected {expected}, or leave it out")


def check_out_folder(folder: Path, setting: str = "out") -> None:
    """Refuse a folder that cannot be written to, before anything runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: got {folder}: {error.strerror}; choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{setting}: got {folder}: not writable; choose another folder")


class _ParserFound(BaseException):  # no error: nothing shall explain it
    def __init__(self, parser: OneLineParser) -> None:
        super().__init__()
        self.parser = parser


class _RefusalError(TypeError):
    """What is refused here, or what is left of a command line, of which only ``parser`` knows what it may be."""

    def __init__(self, key: str, text: str, parser: jsonargparse.ArgumentParser | None = None) -> None:
        super().__init__(f"{key}: {text}")
        self.key, self.text, self.parser = key, text, parser


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """One thing that is wrong, or one alternative of a union that does not fit."""

    error: BaseException
    function: str = ""  # of jsonargparse, where it was found
    at: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the variables there
    path: str = ""  # in the YAML
    depth: int = 0  # in how many settings and classes it lies
    owner: str = ""  # class that the setting is of
    setting: Any = None  # its type, with all alternatives
    typehint: Any = None  # the alternative
    value: Any = None

    def enter(self, function: str, at: Mapping[str, Any]) -> _Refusal:
        """Return what is known one call further in."""
        inside = dataclasses.replace(self, function=function, at=at)
        match function:
            case "_check_type" | "_load_config" | "instantiate_classes" | "group_instantiate_class":
                action = at.get("self", at.get("group"))
                path = _join(self.path, getattr(action, "dest", ""))  # a parser has none
                setting = getattr(action, "_typehint", None)
                return dataclasses.replace(inside, path=path, depth=self.depth + 1, setting=setting)
            case "resolve_help_type":  # private, seen in jsonargparse 4.53: of --<path>.help
                path = at["option_string"].removeprefix("--").removesuffix(".help")
                return dataclasses.replace(inside, path=path, setting=at["self"]._typehint)
            case "apply_config":
                return dataclasses.replace(inside, path=at["dest"])
            case "adapt_class_type":
                path = self.path if dataclasses.is_dataclass(at["val_class"]) else f"{self.path}.init_args"
                return dataclasses.replace(inside, path=path, depth=self.depth + 1, owner=at["value"]["class_path"])
            case "adapt_typehints":
                if self.function == function and "n" in self.at:  # in a list
                    inside = dataclasses.replace(inside, path=f"{self.path}[{self.at['n']}]", depth=self.depth + 1)
                return dataclasses.replace(inside, typehint=at["typehint"], value=at.get("val_input", at["val"]))
        return inside

    @property
    def rank(self) -> int:
        """How little it says of several alternatives: 2 of a type that is no class, 1 where no class was named."""
        if self.function != "adapt_typehints":
            return 0
        return 2 if "val_input" not in self.at else 1 if "val_class" not in self.at else 0


_FUNCTIONS = {"_check_type", "_load_config", "instantiate_classes", "group_instantiate_class", "apply_config"}
_FUNCTIONS |= {"adapt_class_type", "adapt_typehints", "raise_union_unexpected_value"}
_FUNCTIONS |= {"check_values", "check_required", "import_object", "resolve_help_type"}


def _read_refusals(error: BaseException, place: _Refusal) -> Iterator[_Refusal]:
    """Follow an error to where it was raised; at a union, each of its alternatives."""
    seen: set[FrameType] = set()
    cause: BaseException | None = error
    while cause is not None:
        error, cause = cause, cause.__cause__
        for frame, _ in traceback.walk_tb(error.__traceback__):
            function, module = frame.f_code.co_name, frame.f_globals["__name__"]
            if frame in seen or function not in _FUNCTIONS or not module.startswith("jsonargparse."):
                continue
            seen.add(frame)
            if function != "raise_union_unexpected_value":
                place = place.enter(function, frame.f_locals)
            elif get_origin(place.typehint) is not Literal:
                for alternative in frame.f_locals["exceptions"]:
                    yield from _read_refusals(alternative, place)
                return
    yield dataclasses.replace(place, error=error)


def read_path(error: BaseException) -> str:
    """Return the YAML path of the class that was being built when an error was raised, without its ``init_args``."""
    return max((r.path for r in _read_refusals(error, _Refusal(error=error))), key=len).removesuffix(".init_args")


def describe_refusal(error: BaseException, parser: jsonargparse.ArgumentParser) -> str:
    """Return ``path: what was given: what was expected`` for what a parser refused.

    Args:
        error: What jsonargparse raised, see Note [Errors of jsonargparse].
        parser: The one that refused, or that holds it.
    """
    refusals = list(_read_refusals(error, _Refusal(error=error)))
    depth = max(refusal.depth for refusal in refusals)
    refusals = sorted((r for r in refusals if r.depth == depth), key=lambda refusal: refusal.rank)
    first = refusals[0]
    key, text = ("", _explain_types(refusals)) if first.rank == 2 else _explain(first, parser)
    path = _join(first.path, key)
    return f"{path}: {text}" if path else text


def _join(*keys: str) -> str:
    return ".".join(filter(None, keys))


def _without_subcommand(key: str, parser: jsonargparse.ArgumentParser) -> str:
    commands = next((action.choices for action in parser._actions if action.dest == "subcommand"), None) or ()
    name, _, rest = key.partition(".")
    return rest if name in commands else key


def _explain_types(refusals: Sequence[_Refusal]) -> str:
    """Say which types a value may have, and which of their words it probably means."""
    first = refusals[0]
    names = list(dict.fromkeys(name for refusal in refusals for name in _name_types(refusal.typehint)))
    names.sort(key="null".__eq__)
    value = _get_given(first.value)
    if any(refusal.typehint is Path for refusal in refusals) and is_remote(value):
        return describe_local_only(str(value))
    if (new := RENAMED.get(".".join(first.path.split(".")[-2:]) + f"={value}")) is not None:
        return f"got {value!r}: renamed: {new}"
    listed = ", ".join(names[:-1]) + (" or " if len(names) > 1 else "") + names[-1]
    meant = (name for name in _SYNONYMS.get(str(value).lower(), ()) if name in names)
    guess = next(meant, None) or nearest(str(value), set(names) - {"int", "float", "str", "list", "null"})
    hint = f": did you mean {guess}?" if guess else ""
    return f"got {value!r}: expected {'one of ' if len(names) > 2 else ''}{listed}{hint}"


def _name_types(typehint: Any) -> list[str]:
    """Translate a type into the words of a YAML file."""
    if get_origin(typehint) is Literal:
        return [str(choice) for choice in get_args(typehint)]
    if isinstance(typehint, EnumType):
        return list(typehint.__members__)
    origin = get_origin(typehint) or typehint
    return [_TYPE_WORDS.get(origin) or getattr(origin, "__name__", None) or str(typehint)]


def _explain(refusal: _Refusal, parser: jsonargparse.ArgumentParser) -> tuple[str, str]:
    """Return what to add to the path and what to say, for everything but a plain wrong type."""
    error, at = refusal.error, refusal.at
    match error:
        case _RefusalError() if error.parser and error.key.startswith("--"):
            return _explain_key(error.key.split()[0].partition("=")[0][2:], error.parser, refusal)
        case _RefusalError():
            return error.key, error.text
        case argparse.ArgumentError(argument_name=str(name), message=message):
            option = name.split("/")[-1]
            # Private, seen in jsonargparse 4.53: the type of an option, which argparse is not told.
            flags = {
                name for a in parser._actions if getattr(a, "_typehint", None) is bool for name in a.option_strings
            }
            wanted = f"expected true or false, such as {option} true" if option in flags else message
            return option.removeprefix("--"), f"no value given: {wanted}"
    match refusal.function:
        case "check_values":
            known = getattr(error, "subcommand_parser", at["self"])
            return _explain_key(_without_subcommand(at["key"], at["self"]), known, refusal)
        case "check_required":
            first, *others = (_without_subcommand(key, at["parser"]) for key in at["missing"])
            also = f" (also missing: {', '.join(others)})" if others else ""
            owner = f", {refusal.owner} cannot do without" if refusal.owner else ""
            where = (
                ", here or in the YAML of --config" if any(a.dest == "config" for a in at["parser"]._actions) else ""
            )
            return first, f"missing: expected a value{where}{owner}{also}"
        case "import_object":
            return _explain_import(refusal)
        case "_load_config":
            return "", f"got {at['value']!r}: expected a mapping of its keys"
        case "adapt_typehints" if refusal.rank == 1:
            expected = f"a class_path of a {refusal.typehint.__name__}"
            if dataclasses.is_dataclass(refusal.typehint):
                expected = _describe_mapping(refusal.typehint, refusal.value)
            return "", f"got {_get_given(refusal.value)!r}: expected {expected}"
        case "adapt_typehints" if at.get("subclass") is False:
            return "class_path", f"got {at['val']['class_path']!r}: expected a subclass of {refusal.typehint.__name__}"
    return "", str(error)


def _explain_key(key: str, parser: jsonargparse.ArgumentParser, refusal: _Refusal) -> tuple[str, str]:
    """Say of an unknown key what it is called, or may have meant; only the parser that refused it has the others."""
    if refusal.owner.rpartition(".")[2] in _BASES:
        return key, "no class has been chosen up to here: put --config or the class before this option"
    hidden = {argparse.SUPPRESS, "help", "config", "print_config", "print_shtab"}
    known = sorted({action.dest for action in parser._actions} - hidden)
    prefix = ""
    for part in key.split("."):
        siblings = sorted({k.removeprefix(prefix).split(".")[0] for k in known if k.startswith(prefix)})
        if part not in siblings:
            break
        prefix += f"{part}."
    if part == "init_args":
        return f"{prefix}class_path", "missing: expected the class that the init_args are of"
    old = _join(refusal.path, key)
    new = rename_key(old)
    start = len(_join(refusal.path, prefix)) + 1 if refusal.path else len(prefix)
    if new != old and new[start:].split(".")[0] in siblings:
        return key, f"renamed: {new[start:]}"
    elsewhere = [k for k in known if k.endswith(f".{part}")]
    listed = ", ".join(siblings) if len(siblings) <= 15 else "the keys that --help lists"
    expected = f"expected one of {listed}" if siblings else "expected no key here"
    hint = f"did you mean {elsewhere[0]}?" if len(elsewhere) == 1 else suggest(part, siblings, expected)
    owner = f" of {refusal.owner}" if refusal.owner else ""
    return f"{prefix}{part}", f"unknown key{owner}: {hint}"


def _explain_import(refusal: _Refusal) -> tuple[str, str]:
    """Say why there is no such class."""
    error, class_path = refusal.error, str(refusal.at["name"])
    got = f"got {class_path!r}"
    module, _, name = class_path.rpartition(".")
    if (new := RENAMED.get(name)) is not None:
        return "class_path", f"{got}: renamed: {_join(module, new)}"
    if isinstance(error, AttributeError) and error.obj is sys.modules.get(module):
        hint = suggest(name, [n for n in dir(error.obj) if not n.startswith("_")], "expected a class in it")
        return "class_path", f"{got}: module {module} has no {name}: {hint}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        missing = f"{error.obj.__name__}.{error.name}"
    if missing and class_path.startswith(f"{missing}."):
        return "class_path", f"{got}: {_explain_missing_module(missing)}"
    if not isinstance(error, ValueError):
        return "class_path", f"importing {class_path} failed: {_name_line(error)}"
    given, typehint = refusal.value, refusal.typehint
    if isinstance(given, tuple):  # a nested option, as jsonargparse keeps it
        example = "lit_fsdp.FSDP2Strategy" if class_path == "fsdp2" else "one"
        return "", f"{got} before, which has no {given[0]}: expected class_path: {example}"
    if dataclasses.is_dataclass(typehint) and not module:
        return "", f"{got}: expected {_describe_mapping(typehint, class_path)}"
    known = [path.rpartition(".")[2] for path in get_all_subclass_paths(refusal.setting)]
    begun = (path for path in known if name and path.lower().startswith(name.lower()))  # as fsdp2 and ddp do
    guess = nearest(name, known) or next(begun, None)
    hint = f"did you mean {guess}?" if guess else "expected module.Class, or the name of a class of ours"
    return "class_path", f"{got}: no class of this name: {hint}"


def _name_line(error: BaseException) -> str:
    """Return an error of a module that is imported, with the line that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    if isinstance(error, SyntaxError) or not frames:  # says it itself
        return str(error)
    kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
    return f"{kind}{error} ({frames[-1].filename}, line {frames[-1].lineno})"


def _explain_missing_module(name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    folders = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(Path.cwd())]
    known = [module.name for module in pkgutil.iter_modules(folders)]
    guess = nearest(leaf, known if parent else [*known, "lit_fsdp", "lightning"])
    hint = f"did you mean {_join(parent, guess)}?" if guess else "expected one that python can import"
    return f"no module {name}: {hint}"


def _describe_mapping(settings: Any, value: Any) -> str:
    """Return what to write instead of a plain value: the key that takes it, if one does."""
    if re.match(r"\{\s*\w+:[^\s,}]", str(value)):
        return f"a mapping of the keys of {settings.__name__}, with a space after each colon"
    key = next((name for name, hint in get_type_hints(settings).items() if value in get_args(hint)), None)
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    has_defaults = all((field.default, field.default_factory) != missing for field in dataclasses.fields(settings))
    example = f", such as {{{key}: {value}}}" if key else ", {} for its defaults" if has_defaults else ""
    return f"a mapping of the keys of {settings.__name__}{example}"


def _get_given(value: Any) -> Any:
    """Return a value without the nested option that jsonargparse keeps with it."""
    return value.val if type(value).__name__ == "NestedArg" else value
