"""A killed save leaves nothing for ever, and what it had completed is found and put in its place."""

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import fork_ranks, write_run
from torch import nn
from waiting import wait_until

from lit_fsdp import FSDP2Strategy
from lit_fsdp.checkpoint import places, sharded, single_file
from lit_fsdp.checkpoint.latest import find_last_checkpoint
from lit_fsdp.checkpoint.leftovers import tidy_folders
from lit_fsdp.checkpoint.manifest import MANIFEST, is_complete, read_position
from lit_fsdp.checkpoint.places import discard, name_replaced
from lit_fsdp.checkpoint.sharded import load_checkpoint, save_checkpoint
from lit_fsdp.checkpoint.single_file import read_single_file, save_single_file


def save(path: Path, number: int) -> None:
    save_checkpoint(path, {"state_dict": {"weight": torch.full((3,), float(number))}}, meta={}, save_number=number)


def run_until_killed(work: Callable[[], None]) -> None:
    process = get_context("fork").Process(target=work)
    process.start()
    # Not join(60), which waits for a pipe that children of the killed one hold as well.
    wait_until(lambda: process.exitcode is not None, 60)
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
        patch.setattr(sharded, {"before the manifest": "write_manifest", "after it": "put_in_place"}[moment], die)


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
    assert ["removed" in line for line in said] == [number == 1]


def test_what_a_metric_in_the_name_has_put_into_a_folder_of_its_own_is_tidied_too(tmp_path: Path) -> None:
    folder = tmp_path / "step=6-val"
    save(folder / ".loss=0.5.ckpt.incomplete", 2)
    (folder / ".loss=0.4.ckpt.incomplete").mkdir()
    tidy_folders([tmp_path], lambda _: None)
    assert [path.name for path in folder.iterdir()] == ["loss=0.5.ckpt"]


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


def test_an_older_one_stays_beside_one_that_was_damaged_since_and_nothing_else_is_said(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", 2)
    save(tmp_path / ".last.ckpt.replaced", 1)
    (tmp_path / "last.ckpt" / MANIFEST).unlink()
    said: list[str] = []
    tidy_folders([tmp_path], said.append)
    assert (read(tmp_path / ".last.ckpt.replaced"), said) == (1, [])


def list_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextmanager
def pause_at(moment: str, work: Callable[[], None]) -> Iterator[None]:
    """Let another process do this up to a moment, and to its end after the body."""
    fork = get_context("fork")
    reached, may_go_on = fork.Event(), fork.Event()
    room = sharded if hasattr(sharded, moment) else single_file
    original = getattr(room, moment)

    def pause(*args: Any, **options: Any) -> None:
        reached.set()
        assert may_go_on.wait(60)
        original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in (sharded, single_file):
            patch.setattr(module, moment, pause, raising=False)
        process = fork.Process(target=work)
        process.start()
    try:
        assert reached.wait(60)
        yield
    finally:
        may_go_on.set()
        process.join(60)
    assert process.exitcode == 0


def save_file(path: Path, number: int) -> None:
    save_single_file(path, {"state_dict": {"weight": torch.full((3,), float(number))}, "save_number": number})


def read_either(path: Path) -> float:
    return read(path) if path.is_dir() else float(read_single_file(path)["state_dict"]["weight"][0])


@pytest.mark.parametrize(
    ("write", "moment"), [(save, "write_manifest"), (save, "put_in_place"), (save_file, "put_in_place")]
)
def test_what_another_process_writes_is_neither_tidied_nor_taken_over(
    tmp_path: Path, write: Callable[[Path, int], None], moment: str
) -> None:
    path = tmp_path / "last.ckpt"
    with pause_at(moment, lambda: write(path, 1)):
        before, said = list_names(tmp_path), list[str]()
        found = find_last_checkpoint([tmp_path], report=said.append)
        tidy_folders([tmp_path], said.append)
        with pytest.raises(ValueError, match=r"last\.ckpt: another process writes this checkpoint: end that one, or"):
            write(path, 2)
        assert (list_names(tmp_path), said) == (before, [])
        # Complete is complete, whoever is about to put it in its place.
        assert (found and read_either(found)) == (None if moment == "write_manifest" else 1)
    assert read_either(path) == 1
    write(path, 2)
    assert read_either(path) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_data_workers_of_a_killed_writer_do_not_keep_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"

    def fork_and_die(*_: object, **__: object) -> None:
        if not (worker := os.fork()):
            signal.pause()
        (tmp_path / "worker").write_text(str(worker))
        die()

    save(folder / "a.ckpt", 1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sharded, "write_manifest", fork_and_die)
            run_until_killed(lambda: save(folder / "a.ckpt", 2))
        tidy_folders([folder], lambda _: None)
        assert [path.name for path in folder.iterdir()] == ["a.ckpt"]
    finally:
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("write", [save, save_file])
def test_a_save_that_fails_leaves_nothing_but_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, int], None]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    path = tmp_path / "last.ckpt"
    write(path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "write_manifest", refuse)
        patch.setattr(torch, "save", lambda _, file: (file.write(b"x" * 1000), write is save or refuse()))
        with pytest.raises(OSError, match="no space left"):
            write(path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    assert read_either(path) == 1


def test_a_save_that_is_complete_stays_where_it_cannot_be_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(".incomplete"):
            raise OSError(errno.EIO, "no rename")
        return Path(shutil.move(self, target))

    path = tmp_path / "last.ckpt"
    save(path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="no rename"):
            save(path, 2)
    found = find_last_checkpoint([tmp_path])
    assert found is not None
    assert read(found) == 2


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


def test_where_locks_cannot_be_had_checkpoints_are_saved_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks on this file system")

    left = tmp_path / ".a.ckpt.incomplete"
    left.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        save(tmp_path / "b.ckpt", 1)
        tidy_folders([tmp_path], lambda _: None)
    assert read(tmp_path / "b.ckpt") == 1
    assert sorted(tmp_path.iterdir()) == [left, tmp_path / "b.ckpt"]  # locks that are none do not pile up


def test_a_folder_that_takes_nothing_is_named_without_hidden_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    monkeypatch.setattr("lit_fsdp.checkpoint.places.hold_lock", refuse)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  compared whole
        save(tmp_path / "last.ckpt", 1)
    assert str(caught.value) == f"checkpoint last.ckpt: {tmp_path}: Read-only file system: choose another folder"


def test_what_two_runs_remove_at_once_is_gone_and_ends_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def unlink_late(path: Any, **options: Any) -> None:
        unlink(path, **options)
        raise FileNotFoundError(errno.ENOENT, "the other run was faster", path)

    strategy = FSDP2Strategy()
    save(tmp_path / "a.ckpt", 1)
    save(tmp_path / "b.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "b.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_late)
        for name in ("a", "a", "last"):
            strategy.remove_checkpoint(tmp_path / f"{name}.ckpt")
    assert list(tmp_path.iterdir()) == [tmp_path / "b.ckpt"]
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.warns(UserWarning, match=r"b\.ckpt\.incomplete could not be removed"):
        strategy.remove_checkpoint(tmp_path / "b.ckpt")


def test_what_a_run_was_removing_when_it_was_killed_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.ckpt", 1)
    save(tmp_path / "b.ckpt", 2)
    unlink = os.unlink

    def unlink_one(name: Any, **options: Any) -> None:
        if str(name).endswith(".distcp"):
            die()
        unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_one)
        run_until_killed(lambda: discard(tmp_path / "a.ckpt"))
    assert (tmp_path / ".a.ckpt.incomplete").is_dir()
    said: list[str] = []
    tidy_folders([tmp_path], said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]
    assert len(said) == 1


def test_a_checkpoint_goes_beside_leftovers_and_from_a_disk_without_room_for_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, "no space", str(path))

    save(tmp_path / "a.ckpt", 1)
    shutil.copytree(tmp_path / "a.ckpt", tmp_path / ".a.ckpt.incomplete")
    monkeypatch.setattr(places, "claim", find_full)
    discard(tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_single_file_that_is_cut_short_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save_single_file(path, {"state_dict": {}})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda _, file: (file.write(b"x" * 1000), file.flush(), die()))
        run_until_killed(lambda: save_single_file(path, {"state_dict": {}}))
    assert (tmp_path / ".last.ckpt.incomplete").stat().st_size == 1000
    tidy_folders([tmp_path], lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
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
    assert {path.name for path in first.iterdir()} == {".last.ckpt.incomplete", ".last.ckpt.lock"}
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
