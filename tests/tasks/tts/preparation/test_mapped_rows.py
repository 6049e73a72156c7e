"""Rows that are pages of a file are the rows that were prepared, and cost no rank the memory of their codes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from speech_training import build_data, build_task, make_rows

from lit_fsdp.tasks.tts.preparation import mapped_rows
from lit_fsdp.tasks.tts.preparation.mapped_rows import map_rows
from lit_fsdp.tasks.tts.preparation.prepared import read_rows, write_shard


def write(folder: Path, largest: int = 63) -> Path:
    rows = make_rows(7)
    rows[3] = replace(rows[3], codes=np.where(rows[3].codes == rows[3].codes.max(), largest, rows[3].codes))
    write_shard(folder / "shard-00000.parquet", rows[:4])
    write_shard(folder / "shard-00001.jsonl", [replace(row, speaker_embedding=np.zeros(0)) for row in rows[4:6]])
    write_shard(folder / "shard-00002.jsonl", rows[6:])
    return folder


@pytest.mark.parametrize(("largest", "kind"), [(63, np.int16), (32767, np.int16)])
def test_mapped_rows_are_those_that_were_prepared(tmp_path: Path, largest: int, kind: type) -> None:
    (folder := tmp_path / "prepared").mkdir()
    wanted, rows = read_rows(write(folder, largest)), map_rows(str(folder), tmp_path / "cache")
    assert [(row.to_plain(), row.where) for row in rows] == [(row.to_plain(), row.where) for row in wanted]
    for row in rows:  # views of a file, which no rank can change
        assert row.codes.dtype == kind
        assert not row.codes.flags.owndata
        assert not row.codes.flags.writeable
        assert not row.speaker_embedding.flags.owndata


def test_rows_are_read_by_one_process_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "prepared").mkdir()
    write(folder)
    before = [row.to_plain() for row in map_rows(str(folder), tmp_path / "cache")]
    with monkeypatch.context() as patch:
        patch.setattr(mapped_rows, "read_rows", lambda _: pytest.fail("read again"))
        assert [row.to_plain() for row in map_rows(str(folder), tmp_path / "cache")] == before
    write_shard(folder / "shard-00002.jsonl", make_rows(2))
    assert len(map_rows(str(folder), tmp_path / "cache")) == 8
    (folder / "summary.json").write_text(json.dumps({"num_rows": 9}))
    for _ in range(2):
        with pytest.raises(ValueError, match="has 8 rows of 9 that were prepared"):
            map_rows(str(folder), tmp_path / "cache")


def test_a_cache_that_takes_nothing_leaves_rows_in_memory(tmp_path: Path) -> None:
    (folder := tmp_path / "prepared").mkdir()
    write(folder)
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(UserWarning, match=r"cache_dir: .* each rank keeps the codes of \S+ in its memory"):
        rows = map_rows(str(folder), tmp_path / "cache")
    assert all(row.codes.flags.writeable for row in rows)


def test_batches_and_their_fingerprint_are_those_of_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path / "shard-00000.parquet", make_rows(6))
    found = []
    for is_mapped in (True, False):
        if not is_mapped:
            monkeypatch.setattr("lit_fsdp.tasks.tts.data.map_rows", lambda source, _: read_rows(source))
        data = build_data(tmp_path, batch_size=3)
        data.attach(build_task().read_config())
        data.setup("fit")
        loader = data.train_dataloader()
        found.append((loader.state_dict()["fingerprint"], list(loader)))
    (mark, batches), (same, others) = found
    assert mark == same
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
