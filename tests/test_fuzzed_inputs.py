"""Random inputs: whatever a file holds, it is read, or refused in a line that names it. hypothesis shrinks what is not.

By default a few examples, always the same; many new ones with ``pytest -m slow``.
"""

import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from input_rows import make_image, make_speech, make_text
from lightning.pytorch import Trainer

from lit_fsdp.checkpoint.manifest import check_sizes, read_position
from lit_fsdp.checkpoint.untrusted import load_plain
from lit_fsdp.cli.main import main
from lit_fsdp.tasks.image_classification.sources import Fields, open_images
from lit_fsdp.tasks.pretrained import load_config
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.rows import RowFormat, parse_row
from lit_fsdp.tasks.text.sources import list_parts, read_parts
from lit_fsdp.tasks.tts.evaluation.prompts import read_prompts
from lit_fsdp.tasks.tts.preparation.manifest import read_manifest
from lit_fsdp.tasks.tts.preparation.prepared import read_rows
from lit_fsdp.weights.safetensors_io import TensorFiles

WORDS = st.sampled_from(["", "null", "true", "1e-4", "3k", "a: b", "é", "\u2028", "{", "${x}", "nan"])


def values(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return anything that JSON and YAML can hold, with these numbers."""
    plain = st.none() | st.booleans() | numbers | WORDS | st.text(max_size=8)
    return st.recursive(
        plain, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(WORDS, inside, max_size=3), max_leaves=6
    )


# Small ones for models: one of 10^12 layers is built for hours.
SETTINGS = values(st.integers(-3, 3000) | st.floats())
VALUES = values(st.integers() | st.sampled_from([10**400, 2**31, 2**63, "\ud800"]) | st.floats())
MANY = 2000


def amounts(few: int) -> pytest.MarkDecorator:
    """Run a test on ``few`` examples, and on many under the marker ``slow``."""
    return pytest.mark.parametrize("num_examples", [few, pytest.param(MANY, marks=pytest.mark.slow)])


def each(num_examples: int, **arguments: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Call a function at once with that many examples; few are the same each time."""
    checks = list(HealthCheck)
    is_few = num_examples < MANY
    limits = settings(
        max_examples=num_examples,
        derandomize=is_few,
        deadline=None,
        database=None,
        suppress_health_check=checks,
        phases=[Phase.generate] if is_few else [Phase.generate, Phase.shrink],
    )

    def run(function: Callable[..., None]) -> None:
        limits(given(**arguments)(function))()

    return run


def list_keys(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where each value of a configuration lies."""
    for key, value in config.items() if isinstance(config, dict) else ():
        yield (*path, key)
        yield from list_keys(value, (*path, key))


def put(config: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return a configuration with another value in one place."""
    changed = deepcopy(config)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return changed


# YAML


@pytest.fixture
def configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Good ones, of which a run would begin to train."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    for name in ("fit", "validate"):  # by now all has been built and checked
        monkeypatch.setattr(Trainer, name, lambda *args, **kwargs: None)
    found = {}
    for make in (make_text, make_image, make_speech):
        make(tmp_path)
        found[make.__name__] = yaml.safe_load((tmp_path / "run.yaml").read_text())
    return found


@pytest.mark.full
@amounts(30)
def test_a_random_value_is_taken_or_refused_by_its_key(
    num_examples: int, configurations: dict[str, Any], tmp_path: Path
) -> None:
    # What is inside `config` is Transformers' and read when the model is built: see the last test.
    places = [(n, path) for n, c in configurations.items() for path in list_keys(c) if "config" not in path[:-1]]

    @each(num_examples, place=st.sampled_from(places), value=SETTINGS)
    def check(place: tuple[str, tuple[str, ...]], value: Any) -> None:
        name, path = place
        Path("random.yaml").write_text(yaml.safe_dump(put(configurations[name], path, value)))
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            code = main(["fit", "--config=random.yaml"])
        lines = [line for line in stderr.getvalue().splitlines() if line.startswith("error: ")]
        assert code in (0, 2), lines
        assert len(lines) == (1 if code else 0)
        names = {part for part in path if part != "init_args"} | {*(value if isinstance(value, dict) else ())}
        assert not code or any(part in lines[0] for part in names), (path, lines)


# Data

FIELDS = (
    "text",
    "prompt",
    "completion",
    "messages",
    "role",
    "content",
    "image",
    "label",
    "audio",
    "speaker",
    "seconds",
)
FIELDS += ("audio_codes", "num_frames", "speaker_embedding", "language", "tools")
ROWS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)
LINES = ROWS.map(lambda row: json.dumps(row).encode()) | VALUES.map(lambda row: json.dumps(row).encode()) | st.binary()
CELLS = st.text(max_size=6) | st.sampled_from(['"', ",", "\n", "\r", "\x00", "text", "image", "label"])


def read_text(path: Path, row_format: RowFormat) -> None:
    for row in read_parts(list_parts(str(path), split="train", txt_documents="file"), "reading"):
        with contextlib.suppress(RowError):  # whoever reads adds file and line
            parse_row(row, row_format)
        assert str(path) in row.where


def read_images(path: Path) -> None:
    open_images(str(path), split=None, split_of="train", fields=Fields(image="image", label="label"))


TEXT_READERS = [partial(read_text, row_format=RowFormat(format=name)) for name in ("auto", "chat", "prompt_completion")]
JSON_READERS: list[Callable[[Path], object]] = [*TEXT_READERS, read_images, read_manifest, read_prompts]


def check_readers(path: Path, readers: list[Callable[[Path], object]]) -> None:
    """Read a file by all of them; what they refuse names it."""
    for reader in readers:
        try:
            reader(path)
        except ValueError as error:
            assert path.name in str(error), (reader, error)
            assert type(error) is ValueError, (reader, repr(error))  # not UnicodeDecodeError, JSONDecodeError


@amounts(40)
def test_random_rows_of_json_lines_are_read_or_refused_by_file(num_examples: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    @each(num_examples, lines=st.lists(LINES, min_size=1, max_size=3))
    def check(lines: list[bytes]) -> None:
        path.write_bytes(b"\n".join(lines) + b"\n")
        check_readers(path, JSON_READERS)


@amounts(40)
def test_random_prepared_rows_are_read_or_refused_by_file(num_examples: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    @each(num_examples, lines=st.lists(LINES, min_size=1, max_size=3))
    def check(lines: list[bytes]) -> None:
        path.write_bytes(b"\n".join(lines) + b"\n")
        check_readers(path, [read_rows])


@amounts(40)
def test_random_tables_are_read_or_refused_by_file(num_examples: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"

    @each(num_examples, rows=st.lists(st.lists(CELLS, max_size=3), max_size=4), tail=st.binary(max_size=6))
    def check(rows: list[list[str]], tail: bytes) -> None:
        text = io.StringIO()
        csv.writer(text).writerows([("text", "image", "label"), *rows] if len(rows) % 2 else rows)
        path.write_bytes(text.getvalue().encode(errors="replace") + tail)
        check_readers(path, [*TEXT_READERS, read_images])


# Models and checkpoints

CONTENTS = VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30)


def spoil(good: Any, inside: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[bytes]:
    """Return contents of a JSON file in which one value of a good one is another."""
    places = list(list_keys(good))

    def replace(place: tuple[str, ...], value: Any) -> bytes:
        return json.dumps(put(good, place, value)).encode()

    return CONTENTS | st.builds(replace, st.sampled_from(places), inside)


@amounts(50)
def test_a_random_manifest_of_a_checkpoint_is_read_or_refused_by_name(num_examples: int, tmp_path: Path) -> None:
    good = {"save_number": 3, "step": 2, "files": {"meta.pt": {"bytes": 3, "crc32": 7}}}
    (tmp_path / "meta.pt").write_bytes(b"abc")

    @each(num_examples, content=spoil(good))
    def check(content: bytes) -> None:
        (tmp_path / "complete.json").write_bytes(content)
        position = read_position(tmp_path)
        assert position is None or isinstance(position[0], int)
        check_readers(tmp_path, [check_sizes])


@amounts(50)
def test_a_random_meta_file_is_refused_by_name(num_examples: int, tmp_path: Path) -> None:
    path = tmp_path / "meta.pt"

    @each(num_examples, content=st.binary(max_size=60) | st.binary(max_size=30).map(lambda tail: b"PK\x03\x04" + tail))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        check_readers(path, [lambda path: load_plain(path, path)])


@amounts(50)
def test_a_random_index_of_weights_is_read_or_refused_by_name(num_examples: int, tmp_path: Path) -> None:
    good = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}

    @each(num_examples, content=spoil(good), weights=st.binary(max_size=40))
    def check(content: bytes, weights: bytes) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        (tmp_path / "model-1.safetensors").write_bytes(len(weights).to_bytes(8, "little") + weights)
        check_readers(tmp_path, [TensorFiles])


@amounts(30)
def test_a_random_configuration_of_a_model_is_read_or_refused_by_name(num_examples: int, tmp_path: Path) -> None:
    good = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 67,
    }
    good |= {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "dtype": "float32", "architectures": ["a"]}

    @each(num_examples, content=spoil(good, SETTINGS))
    def check(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        check_readers(tmp_path, [lambda folder: load_config(str(folder))])
