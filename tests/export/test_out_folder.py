"""One process at a time writes an out folder; it is there whole or not at all, and nothing of others is lost."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from lit_fsdp.export import out_folder
from lit_fsdp.export.out_folder import MANIFEST, list_files, lock_out, write_beside

FORK = get_context("fork")


def export(out: Path, text: str = "new", *, overwrite: bool = False) -> None:
    with write_beside(out, overwrite=overwrite) as folder:
        (folder / "config.json").write_text(text)
        (folder / "codec").mkdir()
        (folder / "codec" / "weights").write_text(text)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_inside(body: Callable[[], None]) -> None:
    """Run a body that ends its own process by SIGKILL."""
    process = FORK.Process(target=body)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_of_two_exports_at_once_one_wins_whole_and_the_other_is_refused(tmp_path: Path) -> None:
    barrier, said = FORK.Barrier(2), FORK.Queue()

    def run(text: str) -> None:
        barrier.wait(60)
        try:
            with write_beside(tmp_path / "out", overwrite=True) as folder:
                for i in range(50):
                    (folder / f"{i}").write_text(text)
                barrier.wait(60)  # the other has tried by now
            said.put((text, ""))
        except ValueError as error:
            barrier.wait(60)
            said.put((text, str(error)))

    for _ in range(10):
        processes = [FORK.Process(target=run, args=(text,)) for text in ("a", "b")]
        for process in processes:
            process.start()
        results = sorted((said.get(timeout=60) for _ in processes), key=lambda result: result[1])
        for process in processes:
            process.join(60)
        (winner, no_error), (_, error) = results
        assert not no_error
        assert "is being written by another process: wait for that one, or choose another folder" in error
        assert {path.read_text() for path in (tmp_path / "out").glob("[0-9]*")} == {winner}
        assert len(list_files(tmp_path / "out")) == 51
        assert list_names(tmp_path) == ["out"]


def test_the_later_one_sees_what_the_earlier_one_has_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="is not empty"), write_beside(out, overwrite=False) as folder:
        (folder / "config.json").touch()
        out.mkdir()
        (out / "mine.txt").write_text("came meanwhile")
    assert list_files(tmp_path) == ["out/mine.txt"]


def test_what_a_killed_export_left_goes_with_the_next_and_nothing_else_does(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "out.0123abcd"

    def body() -> None:
        with write_beside(out, overwrite=False) as folder:
            (folder / "model.safetensors").write_bytes(bytes(1000))
            kill()

    kill_inside(body)
    assert not out.exists()
    assert any(name.endswith(".incomplete") for name in list_names(tmp_path))
    with write_beside(other, overwrite=False) as folder:  # is alive, and has almost the same name
        (folder / "config.json").touch()
        export(out)
        assert folder.is_dir()
    assert list_names(tmp_path) == ["out", "out.0123abcd"]


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system where two folders cannot swap their places at once."""
    monkeypatch.setattr("lit_fsdp.export.out_folder.exchange", lambda *_: False)


@pytest.mark.usefixtures("no_exchange")
def test_a_kill_while_one_takes_the_place_of_another_loses_neither(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(out, "old")

    def body() -> None:
        real = Path.rename

        def rename(self: Path, target: Path) -> Path:
            done = real(self, target)
            kill()
            return done

        Path.rename = rename  # type: ignore[method-assign]  # of a process that ends here
        export(out, overwrite=True)

    kill_inside(body)
    assert not out.exists()
    with pytest.raises(ValueError, match="is not empty"):
        export(out)
    assert (out / "config.json").read_text() == "old"
    export(out, overwrite=True)
    assert (out / "config.json").read_text() == "new"
    assert list_names(tmp_path) == ["out"]


def test_at_no_moment_is_there_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    export(out, "old")
    real, seen = shutil.rmtree, []

    def remove(path: Path, **options: bool) -> None:
        seen.append((out / "config.json").read_text())
        real(path, **options)

    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("two steps where one would do"))
    monkeypatch.setattr(shutil, "rmtree", remove)
    export(out, overwrite=True)
    assert seen == ["new"]
    assert list_names(tmp_path) == ["out"]


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "no"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_replacement_that_fails_half_way_is_undone(
    error: BaseException, is_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", Path.rename
    export(out, "old")

    def rename(self: Path, target: Path) -> Path:
        if self == out and is_done:
            real(self, target)
            raise error
        if self.suffix == ".incomplete":
            raise error
        return real(self, target)

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(Path, "rename", rename)
        export(out, overwrite=True)
    assert (out / "config.json").read_text() == "old"
    assert list_names(tmp_path) == ["out"]


@pytest.mark.parametrize("is_new", [True, False])
def test_all_of_it_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    out = tmp_path / "out"
    synced: list[tuple[str, bool]] = []
    if not is_new:
        export(out, "old")

    def is_in_place() -> bool:
        return out.exists() and (out / "config.json").read_text() == "new"

    monkeypatch.setattr(
        out_folder, "sync_path", lambda path: synced.append((path.relative_to(tmp_path).as_posix(), is_in_place()))
    )
    export(out, overwrite=True)
    hidden = ".out.incomplete"
    parts = [f"{hidden}/{name}" for name in ("codec", "codec/weights", "config.json", MANIFEST)]
    assert sorted(synced) == sorted([(".", True), *((name, False) for name in (hidden, *parts))])


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path / "out")
    begun = []
    with pytest.raises(ValueError, match=r"out: .*out is a mount point.*: choose a folder in it$"):  # noqa: SIM117
        with write_beside(tmp_path / "out", overwrite=True):
            begun.append(1)
    assert not begun


def test_a_replaced_folder_keeps_its_mode_and_empty_folders_of_others_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(out)
    out.chmod(0o2775)
    export(out, "again", overwrite=True)
    assert out.stat().st_mode & 0o7777 == 0o2775
    (out / "mine").mkdir()
    with pytest.raises(ValueError, match=r"no export wrote mine in it"):
        export(out, overwrite=True)
    assert (out / "mine").is_dir()


def test_only_files_that_an_export_wrote_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(out)
    assert json.loads((out / MANIFEST).read_text())["files"] == list_files(out)
    export(out, "again", overwrite=True)
    (out / "codec" / "notes.txt").write_text("mine")
    (out / ".git").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"no export wrote \.git, codec/notes\.txt in it: move that elsewhere"):
        export(out, "third", overwrite=True)
    assert (out / "config.json").read_text() == "again"
    assert (out / "codec" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (None, f"has no {MANIFEST}, in which an export lists its files"),
        ("{", "is damaged"),
        ('{"files": 3}', "is damaged"),
        ("[]", "is damaged"),
        pytest.param("[" * 100_000, "is damaged", id="deep"),
        ("\ud800", "is damaged"),
    ],
)
def test_a_folder_without_a_list_of_its_files_is_kept(tmp_path: Path, manifest: str | None, reason: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "thesis.tex").write_text("years of work")
    if manifest is not None:
        (tmp_path / MANIFEST).write_bytes(manifest.encode(errors="surrogatepass"))
    before = list_files(tmp_path.parent)
    with pytest.raises(ValueError, match=reason):
        export(tmp_path, overwrite=True)
    assert list_files(tmp_path.parent) == before


def test_others_may_read_it_as_any_folder(tmp_path: Path) -> None:
    export(tmp_path / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"out: got .*file/out: .*: choose another folder$"):
        export(tmp_path / "file" / "out")
    with pytest.raises(ValueError, match=r"out: .*: No space left on device: free some"):  # noqa: SIM117
        with write_beside(tmp_path / "out", overwrite=False) as folder:
            (folder / "part").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list_names(tmp_path) == ["file"]


def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new"
    with (
        lock_out(out, out / ".lock"),
        pytest.raises(ValueError, match="another process"),
        lock_out(out, out / ".lock"),
    ):
        pass
    kill_inside(lambda: lock_out(out, out / ".lock").__enter__() or kill())  # type: ignore[func-returns-value]
    with lock_out(out, out / ".lock"):
        assert list_names(out) == [".lock"]
    assert list_names(out) == []
