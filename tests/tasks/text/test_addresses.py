"""Text at an address gives the tokens of the same text on a disk, made once, and again only when an object changes."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launches import fork_ranks, write_run

from lit_fsdp.checkpoint.remote import RemotePath
from lit_fsdp.tasks import TextData, TrainTokenizer
from lit_fsdp.tasks.text import data as text_data
from lit_fsdp.tasks.text.tokenizer import train_tokenizer

ROWS = [{"text": f"word {i} \u2028 " * (1 + i % 5)} for i in range(20)]
SECRET = "s3cr3tv4lu3"


def write_files(folder: Path) -> None:
    folder.mkdir()
    lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in ROWS]
    (folder / "a.jsonl").write_text("\ufeff" + "".join(lines[:10]))
    (folder / "b.json").write_text(json.dumps(ROWS[10:]))
    (folder / "c.csv").write_text('text\n"of, a table"\n')
    (folder / "inner").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "inner" / "d.parquet")
    (folder / "e.txt").write_text("one\n\ntwo\n")
    (folder / "README.md").write_text("not read")


def copy(folder: Path, store: RemotePath) -> None:
    for path in folder.rglob("*.*"):
        with (store / str(path.relative_to(folder))).open("wb") as file:
            file.write(path.read_bytes())


def read_tokens(train: Any, folder: Path, **settings: Any) -> list[list[int]]:
    given = {"tokenizer": str(folder / "t"), "cache_dir": str(folder / "cache"), "txt_documents": "paragraph"}
    data = TextData(train=train, **{**given, "num_workers": 0, "packing": False, **settings})
    data.check_stage("fit")
    data.setup("fit")
    loader = data.train_dataloader()
    rows: Any = loader.dataset
    if settings.get("streaming"):
        return [ids.tolist() for ids, _ in rows.take(skips_bad_rows=False).documents]
    return [rows[i]["input_ids"].tolist() for i in range(len(rows))]


def check_store(store: RemotePath, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tokenizer((row["text"] for row in ROWS), TrainTokenizer(vocab_size=300)).save_pretrained(str(folder / "t"))
    write_files(folder / "files")
    copy(folder / "files", store)
    expected = read_tokens(str(folder / "files"), folder)
    assert len(expected) == 43
    assert read_tokens(f"file://{folder}/files", folder) == expected
    assert sorted(read_tokens(str(store), folder)) == sorted(expected)
    assert read_tokens([f"{store}/a.jsonl", f"{store}/b.json"], folder) == expected[:20]
    assert read_tokens(f"{store}/*.csv", folder) == expected[20:21]
    streamed = read_tokens(str(store), folder, streaming=True, shuffle=False)
    assert sorted(streamed) == sorted(expected)

    with monkeypatch.context() as patch:
        patch.setattr(text_data, "write_tokens", None)
        assert len(read_tokens(str(store), folder)) == 43, "the tokens are kept, and nothing is made again"
    with (store / "e.txt").open("wb") as file:
        file.write(b"one\n\nsix\n")  # of the same size
    assert sorted(read_tokens(str(store), folder)) != sorted(expected)


def test_text_in_a_store_gives_the_tokens_of_text_on_a_disk(
    memory: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_store(memory, tmp_path, monkeypatch)


@pytest.mark.full
def test_text_on_s3_gives_the_tokens_of_text_on_a_disk(
    s3: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_store(s3, tmp_path, monkeypatch)


def test_what_is_wrong_at_an_address_is_one_line(
    memory: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"tokenizer": TrainTokenizer(vocab_size=300), "cache_dir": str(tmp_path)}
    (memory / "a.bin").write_bytes(b"1")
    for train, problem in (
        ("foo://bucket/a.jsonl", "train: got 'foo://bucket/a.jsonl': fsspec knows no scheme 'foo'"),
        (f"{memory}/none.jsonl", "train: memory://bucket/run/none.jsonl: there is no such object, and none below it"),
        (f"{memory}/a.bin", r"train: memory://bucket/run/a\.bin: cannot read \.bin; known are \.txt, "),
        (str(memory), "train: memory://bucket/run: nothing there can be read; known are"),
    ):
        with pytest.raises(ValueError, match=problem):
            TextData(train=train, **data).check_stage("fit")

    for name in ("data/train-0.jsonl", "data/test-0.jsonl"):
        (memory / "hub" / name).write_bytes(b'{"text": "a"}\n')
    several = (
        r"train: memory://bucket/run/hub: holds several splits, .* such as memory://bucket/run/hub/data/train-\*\.jso"
    )
    with pytest.raises(ValueError, match=several):
        TextData(train=f"{memory}/hub", **data).check_stage("fit")
    TextData(train=f"{memory}/hub/data/train-*.jsonl", **data).check_stage("fit")

    def deny(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    (memory / "a.jsonl").write_bytes(b'{"text": "a"}\n{}\n')
    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "info", deny)
        with pytest.raises(ValueError, match=r"train: memory://.*a\.jsonl: Access Denied; see whether it is there"):
            TextData(train=f"{memory}/a.jsonl", **data).check_stage("fit")
    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "open", deny)
        with pytest.raises(ValueError, match=r"cannot be read: memory://.*a\.jsonl: Access Denied"):
            TextData(train=f"{memory}/a.jsonl", **data).setup("fit")
    with pytest.raises(ValueError, match=r"train: memory://bucket/run/a\.jsonl line 2: the row has: no fields"):
        TextData(train=f"{memory}/a.jsonl", **data).setup("fit")


@pytest.mark.full
def test_a_run_on_s3_trains_as_on_a_disk_and_keeps_no_secret(
    s3: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, data={"train": f"{s3}/a.jsonl", "streaming": True, "tokenizer": "t"})
    lines = (tmp_path / "train.jsonl").read_text()
    (s3 / "a.jsonl").write_bytes(lines.encode())
    train_tokenizer([lines], TrainTokenizer(vocab_size=300)).save_pretrained("t")
    losses = []
    for train in (f"{s3}/a.jsonl", "train.jsonl"):
        for ended in fork_ranks("fit", "--config", "run.yaml", f"--data.train={train}", timeout_s=90):
            assert ended.code == 0, ended.err
        found = sorted(Path().glob("runs/*/version_*/metrics.csv"))[-1].read_text().splitlines()
        losses.append([line.split(",")[found[0].split(",").index("train/loss")] for line in found[1:]])
    assert losses[0] == losses[1]
    given = f"s3://key:{SECRET}@bucket/none.jsonl"
    (ended,) = fork_ranks("fit", "--config", "run.yaml", f"--data.train={given}", ranks=1, timeout_s=90)
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert SECRET not in ended.out + ended.err
    assert not any(SECRET in path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file())
