"""What lies in files of any task is read, or refused in one line."""

import errno
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from lit_fsdp.tasks import ImageData, LabeledTextData, PreferenceData, RayTextData, SpeechData, TaskData, TextData
from lit_fsdp.tasks.image_classification.sources import Fields, fetch_images, open_images
from lit_fsdp.tasks.row_files import is_saved
from lit_fsdp.tasks.text.sources import check_source, list_parts

OPEN: dict[str, Callable[[str], Any]] = {
    "text": lambda source: list_parts(source, split="train", txt_documents="file"),
    "images": lambda source: open_images(
        source, split=None, split_of="predict", fields=Fields(image="image", label="label")
    ),
}


@pytest.mark.parametrize("task", OPEN)
@pytest.mark.parametrize("damage", ["cut", "no rows", "state of nothing", "no JSON", "a list"])
def test_a_damaged_data_set_is_refused_in_one_line(tmp_path: Path, damage: str, task: str) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image(decode=False)})
    rows = [{"text": "word " * 100, "image": {"bytes": bytes(900), "path": None}}] * 4
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path))
    assert OPEN[task](str(tmp_path))
    (table,), state, info = tmp_path.glob("*.arrow"), tmp_path / "state.json", tmp_path / "dataset_info.json"
    if damage == "cut":
        table.write_bytes(table.read_bytes()[:1500])
    elif damage == "no rows":
        table.unlink()
    else:
        state_or_info = state if damage == "state of nothing" else info
        state_or_info.write_text({"state of nothing": "{}", "no JSON": "{", "a list": "[]"}[damage])
    with pytest.raises(ValueError, match=r"damaged, as a data set of save_to_disk: .+: copy it or save it") as caught:
        OPEN[task](str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_others_call_dataset_info_makes_no_saved_data_set(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "dataset_info.json").write_text('{"rows": {"file_name": "rows.jsonl"}}')
    assert not is_saved(tmp_path)
    (tmp_path / "data-00000-of-00001.arrow").touch()  # of a copy that broke off
    assert is_saved(tmp_path)


@pytest.mark.parametrize("task", OPEN)
def test_a_data_set_of_a_hub_that_cannot_be_reached_takes_three_lines(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, lines = logging.getLogger("huggingface_hub.utils._http"), list[str]()

    def fail(*_: Any, **__: Any) -> None:
        for attempt in range(1, 6):
            log.warning("'no such name' thrown while requesting HEAD https://hub/README.md")
            log.warning("Retrying in %ss [Retry %s/5].", 2**attempt, attempt)
        raise OSError("could not be reached")

    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(datasets, "load_dataset", fail)
    for number in (1, 2):  # told again in another attempt of the user's
        with pytest.raises(ValueError, match="could not be reached"):
            OPEN[task]("nobody/nothing")
        assert len(lines) == 2 * number


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)  # not by its mode, which binds nobody who is root
    for read in (check_source, lambda source: fetch_images(source, split=None, split_of="train")):
        with pytest.raises(ValueError, match=rf"^{tmp_path}: cannot be read: Permission denied$"):
            read(str(tmp_path))


def test_hidden_files_of_a_folder_are_not_read(tmp_path: Path) -> None:
    for name in ("a.txt", "below/b.txt", "._a.txt", ".ipynb_checkpoints/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    parts = list_parts(str(tmp_path), split="train", txt_documents="file")
    assert [path.name for part in parts for path in part.list_files()] == ["a.txt", "b.txt"]


@pytest.mark.parametrize("kind", [ImageData, LabeledTextData, PreferenceData, RayTextData, SpeechData, TextData])
def test_an_empty_source_is_refused_and_not_taken_for_the_current_folder(kind: type[TaskData]) -> None:
    named: dict[str, Any] = {} if kind is ImageData else {"tokenizer": "made/up"}
    emptied: list[Any] = ["", " "]
    if kind not in (ImageData, SpeechData):
        emptied.append(["a.jsonl", ""])
    if kind is TextData:
        emptied += [[{"path": ""}], [{"path": ["a.jsonl", ""]}, "b.jsonl"]]
    for source in emptied:
        with pytest.raises(ValueError, match=r"^train: got '\s*': expected .*; see whether a variable of the shell is"):
            kind(**named, train=source)
    with pytest.raises(ValueError, match=r"^validation: got '': expected "):
        kind(**named, train="train.jsonl", validation="")


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (
            "data/train-0-of-1.parquet data/validation-0.parquet",
            "data/train-*.parquet data/validation-*.parquet",
        ),
        ("data/test-0.parquet data/train-0.parquet data/train-1.parquet", "data/train-*.parquet data/test-*.parquet"),
        ("train.jsonl dev.jsonl", "train*.jsonl dev*.jsonl"),
        ("alpaca_train.json alpaca_Test_1.json", "alpaca_train*.json alpaca_Test_*.json"),
        ("train/a.txt eval/a.txt", "train eval"),
        ("train/a.txt train/test_1.txt", None),
        ("train-0.txt train-1.txt", None),
        ("test-0.txt validation-0.txt", None),
        ("trainer.txt testimony.txt values.txt device.txt", None),
        ("train.txt test.md", None),
        ("how-to-train-your-dragon.txt unit-test.txt notes.txt", None),
    ],
)
def test_a_folder_with_several_splits_is_refused_with_what_to_name(
    tmp_path: Path, names: str, patterns: str | None
) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    expected = sorted(tmp_path / name for name in names.split() if not name.endswith(".md"))
    source, options = str(tmp_path), {"split": "train", "txt_documents": "file"}
    if patterns is None:
        check_source(source)
        assert [path for part in list_parts(source, **options) for path in part.list_files()] == expected
        return
    line = re.escape("expected one, such as " + " or ".join(f"{tmp_path}/{name}" for name in patterns.split()))
    for read in (check_source, lambda source: list_parts(source, **options)):
        with pytest.raises(
            ValueError, match=rf"^{tmp_path}: holds several splits, such as \S+ and \S+: {line}; or name all"
        ):
            read(source)
    for pattern in patterns.split():
        (part, *_) = list_parts(f"{tmp_path}/{pattern}", **options)
        assert part.list_files()[0] in expected


def test_what_datasets_writes_about_rows_is_none_and_packed_files_are_told_of(tmp_path: Path) -> None:
    for name in ("a.jsonl", "README.md", "dataset_infos.json", "inner/dataset_dict.json", "inner/state.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}')
    options: Any = {"split": "train", "txt_documents": "file"}
    (part,) = list_parts(str(tmp_path), **options)
    assert part.list_files() == [tmp_path / "a.jsonl"]
    for name in ("b.jsonl.gz", "c.TSV", "inner/d.arrow"):
        (tmp_path / name).touch()
    line = rf"^{tmp_path}: 3 files there are not read, such as b\.jsonl\.gz: expected \.txt, .*; unpack or convert them"
    with pytest.warns(UserWarning, match=line) as caught:
        (part,) = list_parts(str(tmp_path), **options)
    assert len(caught) == 1
    assert part.list_files() == [tmp_path / "a.jsonl"]
