"""Files are written whole or not at all, and what a disk refuses is one line."""

import errno
import os
from pathlib import Path

import pytest
from small_disk import small_disk

from lit_fsdp.files import open_whole, refuse_unwritable, write_whole


def test_a_file_that_is_written_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "before")
    with small_disk(10_000):
        with pytest.raises(ValueError, match=r"^out: \S+: File too large: free some, or choose another disk$"):  # noqa: SIM117
            with refuse_unwritable("out", tmp_path):
                write_whole(path, "after" * 10_000)
        with pytest.raises(OSError, match="too large"), open_whole(path, "wb") as file:  # only when it is flushed
            file.write(b"x" * 10_001)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["plan.json"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full"), "No space left on device: free some, or choose another disk"),
        (PermissionError(errno.EACCES, "no", "here/x/y"), "Permission denied: choose another folder"),
        (PermissionError(errno.EPERM, "no", ".here.0a1b.incomplete"), "Operation not permitted: choose another"),
        (OSError(errno.EIO, "no", str(Path("here").absolute().parent)), "Input/output error: choose another folder"),
        (OSError(errno.EROFS, "no"), "Read-only file system: choose another folder"),
        (Exception("I/O error: No space left on device (os error 28)"), "No space left on device: free some"),
    ],
)
def test_what_a_disk_refuses_is_one_line(error: Exception, said: str) -> None:
    with pytest.raises(ValueError, match=f"^cache_dir: here: {said}"), refuse_unwritable("cache_dir", Path("here")):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "gone"),
        RuntimeError("os error"),
        KeyError(28),
        PermissionError(errno.EACCES, "no", "/data/train.parquet"),
        OSError(errno.ENOSPC, "full", "/elsewhere/x"),
        OSError(errno.EIO, "no"),  # of a read
        ValueError("/data/model.safetensors: no (os error 13)"),
    ],
)
def test_other_errors_keep_their_kind(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, refuse_unwritable("out", Path("here")):
        raise error
    assert caught.value is error


def test_what_a_link_leads_to_is_written_with_the_mode_that_it_had(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.yaml", tmp_path / "link.yaml"
    path.write_text("before")
    path.chmod(0o600)
    link.symlink_to(path.name)
    write_whole(link, "after")
    assert (link.is_symlink(), path.read_text(), path.stat().st_mode & 0o777) == (True, "after", 0o600)


def test_several_write_one_file_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    with open_whole(path) as first, open_whole(path) as second:
        first.write("first")
        second.write("second")
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208
