"""Settings in Python as they are written in YAML: ``CausalLM(lora={"r": 8})``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, get_args, get_type_hints

from lit_fsdp.errors import ConfigError, list_words


class TakesMappings:
    """A class whose arguments that are dataclasses may be given as mappings; subclasses inherit it.

    What the constructor of a subclass names in its annotations is read as YAML is, with the same errors, here as
    ``ValueError``. What it hands on as ``**kwargs`` is read where it arrives. Signatures stay as they are written.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        init = vars(cls).get("__init__")
        if inspect.isfunction(init) and _may_have_settings(init):
            cls.__init__ = _read_mappings(init)  # type: ignore[method-assign]  # of this class alone


def list_settings(hint: Any) -> list[type]:
    """Return the dataclasses that a type hint names, at any depth of its alternatives and items."""
    return [part for part in _walk(hint) if inspect.isclass(part) and dataclasses.is_dataclass(part)]


def find_settings(owner: Any, name: str) -> Any:
    """Return the dataclass that an argument of a class, or a field of a dataclass, is read as; ``None`` if not one."""
    for base in getattr(owner, "__mro__", ()):  # none of a function that makes one
        init = vars(base).get("__init__")
        if inspect.isfunction(init) and name in inspect.signature(init).parameters:
            try:
                found = list_settings(get_type_hints(init).get(name))
            except (NameError, TypeError):  # names imported for type checkers only
                return None
            return found[0] if len(found) == 1 else None
    return None


def _walk(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _walk(part)


def _may_have_settings(init: Callable[..., Any]) -> bool:
    """Whether a constructor names a dataclass, or a class that is only known later."""
    # Others stay as they are: save_hyperparameters() of Lightning looks for constructors in neighbouring frames.
    try:
        return any(list_settings(hint) for hint in get_type_hints(init).values())
    except (NameError, TypeError):
        return True


def _read_mappings(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that turns mappings into the dataclasses of its annotations first."""
    signature = inspect.signature(init)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  see below
        # save_hyperparameters() goes from frame to frame while they are of constructors, by name and by this variable,
        # and stops before the arguments of a subclass at any other. Private, seen in lightning 2.6.6.
        __class__ = _NoArguments  # noqa: F841
        try:
            bound = signature.bind_partial(self, *args, **kwargs)
            hints = get_type_hints(init)
        except (TypeError, NameError):  # python's own error, or names imported for type checkers only
            bound, hints = signature.bind_partial(), {}
        given = bound.arguments
        wanted = {name: hint for name, hint in hints.items() if name in given and _is_to_read(given[name], hint)}
        if wanted:
            given |= read_mappings({name: given[name] for name in wanted}, wanted)
            args, kwargs = bound.args[1:], bound.kwargs
        init(self, *args, **kwargs)

    return __init__


def _is_to_read(value: Any, hint: Any) -> bool:
    """Whether a value has a mapping in it where a dataclass may stand, or is nothing that may stand there."""
    if isinstance(value, str) and (words := list_words(hint)):
        return value not in words
    settings = tuple(list_settings(hint))
    if not settings or value is None:
        return False
    choices = [choice for choice in (get_args(hint) or (hint,)) if choice is not type(None)]
    if all(choice in settings for choice in choices) and not isinstance(value, settings):
        return True
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Mapping) or any(isinstance(item, Mapping) for item in items)


class _NoArguments:
    def __init__(self) -> None: ...


class _BuildError(BaseException):
    """Carries an error past jsonargparse, which takes any ``Exception`` for a mismatch of a union."""


def read_mappings(given: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return what values stand for, read as a configuration is.

    Args:
        given: By name.
        hints: The type of each.

    Raises:
        ValueError: With the path of the setting, what was given, and what was expected.
    """
    # Here, as a script that gives dataclasses needs no parser.
    from lit_fsdp.parsing.parser import OneLineParser, read_path, refuse_null

    def build(class_type: type, *args: Any, **kwargs: Any) -> Any:
        try:
            kwargs.pop("applied_instantiation_links", None)  # of options to each other, of which there are none
            refuse_null(class_type, kwargs)
            return class_type(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise _BuildError(str(error)) from error

    parser = OneLineParser()
    for name in given:
        parser.add_argument(f"--{name}", type=hints[name])
    try:
        parsed = parser.parse_object({name: _to_plain(value) for name, value in given.items()})
        built = parser.instantiate(parsed, instantiators=[(build, object, True)])
    except ConfigError as error:
        raise ValueError(error.line) from None
    except _BuildError as error:
        path = read_path(error)
        raise ValueError(f"{path}.{error}" if path else str(error)) from error.__cause__
    return {name: built[name] for name in given}


def _to_plain(value: Any) -> Any:
    """Return mappings of any kind as dictionaries, which jsonargparse asks for."""
    if isinstance(value, Mapping):
        return {str(name): _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list) else value
