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
    """Return a label as it is written: what text that is a number means depends on the labels of all rows.

    Raises:
        RowError: It is none.
    """
    if not isinstance(value, list):
        return _read_one(value)
    labels = [_read_one(one) for one in value]
    if len(set(map(str, labels))) < len(labels) or any(isinstance(label, float) for label in labels):
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
        if value == "":
            raise RowError("the label is empty: expected a name or a number")
        if _spells_list(value):  # in a table, which has no lists
            raise RowError(
                f"the label is the text {value!r}: several classes need a list, as JSON lines or Parquet have"
            )
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"the label is {value}: expected a finite number, or the name of a class")
    if isinstance(value, str | int | float):
        return value
    raise RowError(f"the label must be a name, a number, or a list of them, it is {describe(value)}")


def _read_number(value: Value) -> int | float | None:
    """Return the number that a label is, as text too; ``None`` if it is a name."""
    if not isinstance(value, str):
        return value
    if _INTEGER.fullmatch(value):
        return int(value)
    number = float(value) if _FRACTION.fullmatch(value) else math.nan
    return number if math.isfinite(number) else None


def _read_whole(value: Value) -> int | None:
    """Return the whole number that a label is, which 2.0 is too."""
    number = _read_number(value)
    return int(number) if number is not None and number == int(number) else None


def _list_spellings(value: Value) -> list[str]:
    """Return the names of classes that a label can mean, the first that there is."""
    whole = _read_whole(value)
    return [str(value)] if whole is None else [str(value), str(whole), f"{whole}.0"]


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

    @property
    def are_full(self) -> bool:
        """Whether each row lists all labels that any has, two or more: as lists of 0 and 1 for two classes do."""
        return self.are_lists and len(self.values) > 1 and len(self._codes) == len(self._ends) * len(self.values)

    @property
    def decimal(self) -> Value | None:
        """The first label that is a number with a point or an exponent, such as 1.0."""
        return next((value for value in self.values if isinstance(_read_number(value), float)), None)

    def find_problem(self, given: ProblemType | None, *, has_classes: bool) -> ProblemType:
        """Return what these labels are of: as given, else by what they are.

        Args:
            given: What they are known to be of.
            has_classes: Whether classes have names, so that a number in text is one.

        Raises:
            ValueError: They cannot be of what is given.
        """
        name = next((value for value in self.values if _read_number(value) is None), None)
        fractions = [value for value in self.values if isinstance(value, float) and not value.is_integer()]
        are_numbers = fractions or (not has_classes and self.decimal is not None)
        found = REGRESSION if name is None and are_numbers else SINGLE
        problem = given or (MULTI if self.are_lists else found)
        if (problem == MULTI) != self.are_lists:
            kind = "lists" if self.are_lists else f"no lists, such as {self.values[0]!r}"
            other = MULTI if self.are_lists else f"{SINGLE} or {REGRESSION}"
            raise ValueError(f"{_SETTING} is {problem!r}: the labels are {kind}; set {other}")
        if problem == REGRESSION and name is not None:
            raise ValueError(f"{_SETTING} is {problem!r}: a label is {name!r}, which is no number; set {SINGLE}")
        if problem != REGRESSION and name is None and fractions:
            raise ValueError(
                f"{_SETTING} is {problem!r}: a label is {fractions[0]}, which is no class; set {REGRESSION}"
            )
        return problem

    def list_classes(self) -> list[str]:
        """Return the names of the classes there are: sorted, or all numbers up to the largest.

        Raises:
            ValueError: Some are numbers, and others are names; or there is but one, or are far more than labels; or a
                number is below 0.
        """
        name = next((v for v in self.values if isinstance(v, str) and not _INTEGER.fullmatch(v)), None)
        number = next((value for value in self.values if not isinstance(value, str)), None)
        if name is not None and number is not None:
            raise ValueError(
                f"labels are names and numbers, such as {name!r} and {number}; make all names, or set classes"
            )
        names = self._list_whole_numbers() if name is None else sorted(map(str, self.values))
        if len(names) < 2:
            raise ValueError(
                f"all labels are {names[0]!r}: expected two classes or more; set classes"
                if names
                else "all labels are empty lists; set classes"
            )
        return names

    def _list_whole_numbers(self) -> list[str]:
        """Return 0 to the largest of labels that are whole numbers."""
        numbers = sorted({int(value) for value in self.values})
        if not numbers:
            return []
        if numbers[0] < 0:
            names = f": {[str(number) for number in numbers]}" if len(numbers) <= _SHOWN else " to the names of all"
            raise ValueError(f"a label is {numbers[0]}, and numbers of classes begin with 0; set classes{names}")
        num_classes = numbers[-1] + 1
        if num_classes > max(_MANY, 10 * len(numbers)):
            raise ValueError(
                f"a label is {num_classes - 1}: there would be {num_classes} classes, of which {len(numbers)} have "
                f"rows; set classes, or {_SETTING}: {REGRESSION}"
            )
        return [str(i) for i in range(num_classes)]

    def list_numbers(self) -> NDArray[np.float32]:
        """Return the number that each of ``values`` is."""
        return np.asarray([_read_number(value) for value in self.values], dtype=np.float32)

    def number_classes(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of the class of each of ``values``.

        Raises:
            ValueError: One is none of them.
        """
        places = {name: i for i, name in enumerate(classes)}
        found = [next((places[n] for n in _list_spellings(v) if n in places), None) for v in self.values]
        if None in found and None not in (whole := [_read_whole(value) for value in self.values]):
            found = [number if number in range(len(classes)) else None for number in whole]  # a data set numbers them
        if None in found:
            value = self.values[found.index(None)]
            known = f"the classes are {join_names(classes[:_FEW])}" + (" ..." if len(classes) > _FEW else "")
            hint = suggest(value, list(classes), known) if isinstance(value, str) else known
            raise ValueError(f"a label is {value!r}, which is none of the {len(classes)} classes: {hint}")
        return np.asarray(found, dtype=np.int64)


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
    numbers: Any = labels.list_numbers() if problem == REGRESSION else labels.number_classes(classes)
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
