"""Labels of rows: what they are of, classes or numbers, and as tensors."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fsdp.errors import join_names, suggest
from lit_fsdp.tasks.row_files import describe
from lit_fsdp.tasks.text.batches import IGNORED
from lit_fsdp.tasks.text.messages import RowError

# The first three are the names of Transformers.
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression", "reward"]
SINGLE, MULTI, REGRESSION, REWARD = get_args(ProblemType)
VALUES, CODES, ENDS = "label_values.json", "labels.int32", "label_ends.int64"
_FEW = 5  # that are named in errors
_SHOWN = 10  # classes whose rows a preview counts
_SETTING = "data.problem_type"
# Text that is a number, as CSV files have them; 01 and 1_000 are names, which int() would take.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FRACTION = re.compile(r"[+-]?(?=.*[.eE])((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MANY = 1000  # classes of which most have no row

Value = str | int | float


def read_label(value: object) -> list[Value] | Value:
    """Return a label, numbers in text as numbers.

    Raises:
        RowError: It is none.
    """
    if not isinstance(value, list):
        return _read_one(value)
    labels = [_read_one(one) for one in value]
    numbers = [label for one, label in zip(value, labels, strict=True) if not isinstance(one, str)]
    if len(set(numbers)) < len(numbers) or any(isinstance(number, float) for number in numbers):
        raise RowError(f"the label is {value}: expected the classes that apply, each once, not 0 or 1 for each class")
    return labels


def _spells_list(text: str) -> bool:
    try:
        return isinstance(ast.literal_eval(text), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _read_one(value: object) -> Value:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        value = value.strip()
        if _INTEGER.fullmatch(value):
            value = int(value)
        elif _FRACTION.fullmatch(value):
            value = float(value)
        elif value == "":
            raise RowError("the label is empty: expected a name or a number")
        elif _spells_list(value):  # in a table, which has no lists
            raise RowError(
                f"the label is the text {value!r}: several classes need a list, as JSON lines or Parquet have"
            )
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"the label is {value}: expected a finite number, or the name of a class")
    if isinstance(value, str | int | float):
        return value
    raise RowError(f"the label must be a name, a number, or a list of them, it is {describe(value)}")


class LabelWriter:
    """Collects the labels of rows, and writes them to a folder."""

    def __init__(self) -> None:
        self._codes: list[int] = []
        self._ends: list[int] = []
        self._values: dict[tuple[type, Value], int] = {}
        self._lists = 0

    def add(self, label: list[Value] | Value) -> None:
        """Append the label of a row."""
        self._lists += isinstance(label, list)
        for value in label if isinstance(label, list) else [label]:
            self._codes.append(self._values.setdefault((type(value), value), len(self._values)))
        self._ends.append(len(self._codes))

    def finish(self, folder: Path) -> None:
        """Write what :class:`Labels` reads.

        Raises:
            ValueError: Some labels are lists, and others are not.
        """
        if self._lists not in (0, len(self._ends)):
            raise ValueError(f"{self._lists} of {len(self._ends)} labels are lists; make all of them lists, or none")
        np.asarray(self._codes, dtype=np.int32).tofile(folder / CODES)
        np.asarray(self._ends, dtype=np.int64).tofile(folder / ENDS)
        found = {"values": [value for _, value in self._values], "are_lists": self._lists > 0}
        (folder / VALUES).write_text(json.dumps(found))


class Labels:
    """The labels that :class:`LabelWriter` has written."""

    def __init__(self, folder: Path) -> None:
        found = json.loads((folder / VALUES).read_text())
        self.values: list[Value] = found["values"]
        self.are_lists: bool = found["are_lists"]
        self._codes: NDArray[np.int32] = np.fromfile(folder / CODES, dtype=np.int32)
        self._ends: NDArray[np.int64] = np.fromfile(folder / ENDS, dtype=np.int64)

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        """Return the places in ``values`` of the labels of a row: one, or any number where labels are lists."""
        return self._codes[self._ends[row - 1] if row else 0 : self._ends[row]]

    def find_problem(self, given: ProblemType | None) -> ProblemType:
        """Return what these labels are of: as given, else by what they are.

        Raises:
            ValueError: They cannot be of what is given.
        """
        numbers = [value for value in self.values if not isinstance(value, str)]
        found = REGRESSION if any(isinstance(value, float) for value in numbers) else SINGLE
        problem = given or (MULTI if self.are_lists else found)
        if (problem == MULTI) != self.are_lists:
            kind = "lists" if self.are_lists else f"no lists, such as {self.values[0]!r}"
            other = MULTI if self.are_lists else f"{SINGLE} or {REGRESSION}"
            raise ValueError(f"{_SETTING}: got {problem!r}: the labels are {kind}; set {other}")
        if problem == REGRESSION and len(numbers) < len(self.values):
            name = next(value for value in self.values if isinstance(value, str))
            raise ValueError(f"{_SETTING}: got {problem!r}: a label is {name!r}, which is no number; set {SINGLE}")
        if problem != REGRESSION and any(isinstance(value, float) for value in numbers):
            number = next(value for value in numbers if isinstance(value, float))
            raise ValueError(f"{_SETTING}: got {problem!r}: a label is {number}, which is no class; set {REGRESSION}")
        return problem

    def list_classes(self) -> list[str]:
        """Return the names of the classes there are: sorted, or all numbers up to the largest.

        Raises:
            ValueError: Some are numbers, and others are names; or there is but one, or are far more than labels.
        """
        numbers = [value for value in self.values if isinstance(value, int)]
        if len(numbers) not in (0, len(self.values)):
            name = next(value for value in self.values if isinstance(value, str))
            raise ValueError(
                f"labels are names and numbers, such as {name!r} and {numbers[0]}; make all names, or set classes"
            )
        if numbers and (num_classes := max(numbers) + 1) > max(_MANY, 10 * len(numbers)):
            raise ValueError(
                f"a label is {num_classes - 1}: there would be {num_classes} classes, of which {len(numbers)} have "
                f"rows; set classes, or {_SETTING}: {REGRESSION}"
            )
        names = [str(i) for i in range(max(numbers) + 1)] if numbers else sorted(map(str, self.values))
        if len(names) < 2:
            raise ValueError(
                f"all labels are {names[0]!r}: expected two classes or more; set classes"
                if names
                else "all labels are empty lists; set classes"
            )
        return names

    def number_classes(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of the class of each of ``values``.

        Raises:
            ValueError: One is none of them.
        """
        places: dict[Value, int] = {name: i for i, name in enumerate(classes)}
        are_names = all(str(value) in places for value in self.values)
        if not are_names and all(isinstance(value, int) for value in self.values):
            places = {i: i for i in range(len(classes))}  # a data set numbers its classes
        numbers = []
        for value in self.values:
            place = places.get(value, places.get(str(value)))
            if place is None:
                known = f"the classes are {join_names(classes[:_FEW])}" + (" ..." if len(classes) > _FEW else "")
                hint = suggest(str(value), list(classes), known)
                raise ValueError(f"a label is {value!r}, which is none of the {len(classes)} classes: {hint}")
            numbers.append(place)
        return np.asarray(numbers, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The labels of rows as a model learns them.

    Args:
        labels: Of all rows of a source.
        problem: What they are of.
        numbers: By place in ``labels.values``: the number of a class, or the value.
        num_classes: How many there are.
    """

    labels: Labels
    problem: ProblemType
    numbers: NDArray[Any]
    num_classes: int

    def __getitem__(self, row: int) -> Any:
        """Return the target of a row: a number, or for several labels 0 or 1 for each class."""
        numbers = self.numbers[self.labels[row]]
        if self.problem != MULTI:
            return numbers[0]
        found = np.zeros(self.num_classes, dtype=np.float32)
        found[numbers] = 1
        return found


def make_targets(labels: Labels, problem: ProblemType, classes: Sequence[str]) -> Targets:
    """Return labels as a model with these classes learns them.

    Raises:
        ValueError: A label is none of them.
    """
    numbers: Any = np.asarray(labels.values, dtype=np.float32) if problem == REGRESSION else None
    numbers = labels.number_classes(classes) if numbers is None else numbers
    return Targets(labels=labels, problem=problem, numbers=numbers, num_classes=len(classes))


def stack_targets(targets: Sequence[Any], is_filler: Sequence[bool], problem: ProblemType) -> Tensor:
    """Return targets as a tensor [batch], or [batch, classes] for several labels.

    Rows that only fill up a batch have -100 for a class, and NaN for a number.
    """
    stacked = torch.from_numpy(np.stack([np.asarray(target) for target in targets]))
    stacked = stacked.long() if problem == SINGLE else stacked.float()
    stacked[torch.tensor(is_filler)] = IGNORED if problem == SINGLE else math.nan
    return stacked


def describe_target(target: Any, problem: ProblemType, classes: Sequence[str]) -> str:
    """Return a target of :class:`Targets` as text."""
    if problem == REGRESSION:
        return f"{target:g}"
    chosen = [int(target)] if problem == SINGLE else np.flatnonzero(target).tolist()
    return ", ".join(classes[number] for number in chosen) or "no class"


def count_targets(targets: Sequence[Any], problem: ProblemType, classes: Sequence[str]) -> str:
    """Return in a line which labels rows have, and how many of each."""
    found = np.asarray(targets)
    if problem == REGRESSION:
        return f"labels are from {found.min():g} to {found.max():g}, {found.mean():g} in the mean"
    counts = np.bincount(found, minlength=len(classes)) if problem == SINGLE else found.sum(axis=0).astype(int)
    pairs = sorted(zip(counts.tolist(), classes, strict=True), key=lambda pair: -pair[0])
    rest = f" and {len(pairs) - _SHOWN} more classes" * (len(pairs) > _SHOWN)
    return "labels: " + ", ".join(f"{name} {count:,}" for count, name in pairs[:_SHOWN]) + rest
