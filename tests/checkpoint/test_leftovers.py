"""A killed save leaves nothing for ever, and what it had completed is found and put in its place."""

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from launches import fork_ranks, write_run
from torch import nn

from lit_fsdp.checkpoint import sharded
from lit_fsdp.checkpoint.latest import find_last_checkpoint
from lit_fsdp.checkpoint.leftovers import tidy_folders
from lit_fsdp.checkpoint.manifest import MANIFEST, is_complete, read_position
from lit_fsdp.checkpoint.places import LOCK, claim, is_being_written, name_replaced
from lit_fsdp.checkpoint.sharded import load_checkpoint, save_checkpoint
from lit_fsdp.checkpoint.single_file import save_single_file


def save(path: Path, number: int) -> None:
    save_checkpoint(path, {"state_dict": {"weight": torch.full((3,), float(number))}}, meta={}, save_number=number)


def run_until_killed(work: Callable[[], None]) -> None:
    process = get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rename_once(self: Path, target: Path) -> Path:
    """The second rename of a replacement, from the hidden name to the visible one, never comes."""
    if self.name.endswith(".incomplete"):
        die()
    os.rename(self, target)  # noqa: PTH104
    return target


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def read(path: Path) -> float:
    model = Weights()
    load_checkpoint(path, model)
    return model.weight[0].item()


def kill_at(patch: pytest.MonkeyPatch, moment: str) -> None:
    if moment == "between the renames":
        patch.setattr(Path, "rename", rename_once)
    else:
        patch.setattr(sharded, {"before the manifest": "write_manifest", "after it": "replace_folder"}[moment], die)


@pytest.mark.parametrize("moment", ["before the manifest", "after it", "between the renames"])
def test_a_replacement_that_is_killed_leaves_the_newest_complete_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    with monkeypatch.context() as patch:
        kill_at(patch, moment)
        run_until_killed(lambda: save(path, 2))
    number = 1 if moment == "before the manifest" else 2
    found = find_last_checkpoint([tmp_path])
    assert found is not None
    assert read(found) == number
    said: list[str] = []
    tidy_folders([tmp_path, tmp_path / "missing"], said.append)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt"]
    assert read(path) == number
    assert not (path / LOCK).exists()
    assert ["removed" in line for line in said] == [number == 1]


def test_the_next_save_keeps_what_the_killed_one_had_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    for number, moment in ((2, "between the renames"), (3, "before the manifest")):
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            run_until_killed(lambda n=number: save(path, n))  # type: ignore[misc]
    assert read(path) == 2
    save(path, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    for name in ("folder.ckpt", "file.ckpt", "empty.ckpt", "old.ckpt"):
        beside = tmp_path / f".{name}.incomplete"
        if name == "file.ckpt":
            continue
        beside.mkdir()
        if name != "empty.ckpt":  # that writer is about to claim it
            (beside / "part").write_text("content")
    lock, file = tmp_path / ".folder.ckpt.incomplete" / LOCK, tmp_path / ".file.ckpt.incomplete"
    before = {".folder.ckpt.incomplete", ".file.ckpt.incomplete", ".empty.ckpt.incomplete"}
    with claim(lock), claim(file):
        # A data worker that is forked now has both open, and outlives the writer.
        worker = get_context("fork").Process(target=signal.pause, daemon=True)
        worker.start()
        tidy_folders([tmp_path], lambda _: None)
        assert {path.name for path in tmp_path.iterdir()} == before
    tidy_folders([tmp_path], lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [".empty.ckpt.incomplete"]
    worker.kill()
    worker.join()


def test_what_cannot_be_tidied_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "not yours")

    save(tmp_path / "last.ckpt", 1)
    (tmp_path / "last.ckpt").rename(name_replaced(tmp_path / "last.ckpt"))
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        tidy_folders([tmp_path], said.append)
    assert said == [f"{tmp_path / 'last.ckpt'}: what an interrupted save left beside it stays there: not yours"]
    found = find_last_checkpoint([tmp_path])
    assert found is not None
    assert read(found) == 1


def test_ranks_that_look_at_once_see_the_same(tmp_path: Path) -> None:
    beside = tmp_path / ".a.ckpt.incomplete"
    beside.mkdir()
    (beside / LOCK).write_text("the process is gone")
    with ThreadPoolExecutor(4) as ranks:
        seen = ranks.map(lambda _: [is_being_written(beside) for _ in range(2000)], range(4))
    assert not any(any(rank) for rank in seen)


def test_where_locks_cannot_be_had_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks on this file system")

    beside = tmp_path / ".a.ckpt.incomplete"
    beside.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        with claim(beside / LOCK):
            assert is_being_written(beside)
    tidy_folders([tmp_path], lambda _: None)
    assert beside.exists()


def test_a_single_file_that_is_cut_short_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save_single_file(path, {"state_dict": {}})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda _, file: (file.write(b"x" * 1000), file.flush(), die()))
        run_until_killed(lambda: save_single_file(path, {"state_dict": {}}))
    assert (tmp_path / ".last.ckpt.incomplete").stat().st_size == 1000
    tidy_folders([tmp_path], lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_run_goes_on_from_the_newest_and_tidies_its_own_folders_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saves = {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True, "enable_version_counter": False}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}
    write_run(tmp_path, trainer={"callbacks": [callback]})
    run = ("fit", "--config=run.yaml", "--run_name=a", "--ckpt_path=last")
    other = tmp_path / "runs" / "b" / "version_0" / "checkpoints" / ".last.ckpt.incomplete"
    other.mkdir(parents=True)
    (other / "part").write_text("content")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_once)
        # The first save replaces nothing: it needs no second rename, but dies there all the same.
        assert [rank.code for rank in fork_ranks(*run, ranks=1)] == [-signal.SIGKILL]
    first = tmp_path / "runs" / "a" / "version_0" / "checkpoints"
    assert [path.name for path in first.iterdir()] == [".last.ckpt.incomplete"]
    ranks = fork_ranks(*run, ranks=2)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    assert "3 (now at 4)" in ranks[0].out
    assert [path.name for path in first.iterdir()] == ["last.ckpt"]
    last = tmp_path / "runs" / "a" / "version_1" / "checkpoints" / "last.ckpt"
    assert [read_position(first / "last.ckpt"), read_position(last)] == [(1, 1), (4, 4)]
    assert is_complete(last)
    # The clock was set back meanwhile, and the earlier one copied.
    os.utime(last / MANIFEST, (1, 1))
    assert find_last_checkpoint([first, last.parent]) == last
    assert other.exists()
