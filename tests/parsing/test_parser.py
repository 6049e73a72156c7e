"""Options are read as the same values in YAML are."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.parsing.parser import OneLineParser


@dataclass(frozen=True, kw_only=True)
class Part:
    """Settings within settings, none of which is null by default."""

    name: str | None = "a"
    rate: float | None = 1.0


class Whole:
    """Takes settings as a task does."""

    def __init__(self, part: Part | None = None, path: str | None = "b") -> None:
        self.part, self.path = part, path


@pytest.mark.parametrize("key", ["part.name", "part.rate", "init_args.part.rate", "path"])
def test_null_as_an_option_is_null_at_any_depth(key: str) -> None:
    parser = OneLineParser()
    parser.add_subclass_arguments(Whole, "model")
    value = parser.parse_args([f"--model={__name__}.Whole", f"--model.{key}=null"]).model.init_args
    for name in key.removeprefix("init_args.").split("."):
        value = value[name]
    assert value is None


def test_null_as_an_option_of_the_command_is_no_path_of_that_name() -> None:
    parser = OneLineParser()
    parser.add_argument("--ckpt_path", type=str | Path | None, default="last")
    assert parser.parse_args(["--ckpt_path=null"]).ckpt_path is None


class Color(Enum):
    """Choices that a class of a user has."""

    RED = 1
    BLUE = 2


class Painted:
    """Takes one of them."""

    def __init__(self, color: Color | None = None) -> None:
        self.color = color


def test_the_names_of_an_enum_are_what_is_expected() -> None:
    parser = OneLineParser()
    parser.add_subclass_arguments(Painted, "model")
    with pytest.raises(ConfigError) as refused:
        parser.parse_args([f"--model={__name__}.Painted", "--model.color=BLU"])
    expected = "model.init_args.color: got 'BLU': expected one of RED, BLUE or null: did you mean BLUE?"
    assert refused.value.line == expected
