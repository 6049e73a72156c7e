"""Tensors inside of objects that torch does not look into: distributions, namespaces, instances of any class."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

_MAX_DEPTH = 16  # a graph of PyTorch Geometric takes 4, a distribution made of others one more for each
_PLAIN = (NoneType, bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_LEAVES = frozenset({*_PLAIN, Tensor, nn.Parameter})
_OPAQUE = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def list_objects(value: Any) -> list[Any]:
    """Return the objects that torch overlooks in what a module is given or returns.

    It looks into lists, tuples, dicts and dataclasses, and refuses those that contain themselves.
    """
    found, rest = [], [value]
    while rest:
        value = rest.pop()
        kind = type(value)
        if kind in _LEAVES:
            continue
        if kind is tuple or kind is list:
            rest += value
        elif kind is dict:
            rest += value.values()
        elif is_dataclass(value) and not isinstance(value, type):
            rest += [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
        elif not isinstance(value, _OPAQUE):
            found.append(value)
    return found


def list_tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in values: themselves, attributes, and in containers at any depth. No code of theirs runs."""
    seen: set[int] = set()
    return [tensor for value in values for tensor in _iterate(value, 0, seen)]


def _iterate(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if type(value) in _PLAIN or id(value) in seen or depth == _MAX_DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    if isinstance(value, _OPAQUE):
        return
    inner: Iterable[Any]
    if isinstance(value, dict):
        inner = list(value.values())
    else:
        is_container = isinstance(value, list | tuple | set | frozenset | deque)
        inner = list(value) if is_container else _list_attributes(value)
    for part in inner:
        yield from _iterate(part, depth + 1, seen)


def _list_attributes(value: Any) -> list[Any]:
    kind: Any = type(value)
    own = getattr(value, "__dict__", None)
    found = list(own.values()) if isinstance(own, dict) else []
    for slot in _list_slots(kind):
        try:
            found.append(slot.__get__(value))
        except AttributeError:  # has no value yet
            continue
    return found


@cache
def _list_slots(kind: type) -> tuple[MemberDescriptorType, ...]:
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return tuple(member for member in members if isinstance(member, MemberDescriptorType))
