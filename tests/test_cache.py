import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from small_disk import small_disk
from waiting import count_waiting, run_forks, tell_of_waiting, wait_until

from lit_fsdp import cache
from lit_fsdp.cache import COMPLETE, build_once, get_cache_dir, make_key

FORK = multiprocessing.get_context("fork")


def count(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def note(log: Path) -> None:
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")


def test_of_several_processes_one_builds_and_all_read(tmp_path: Path) -> None:
    folder, log = tmp_path / "key", tmp_path / "log"

    def build(inside: Path) -> None:
        note(log)
        wait_until(lambda: count_waiting(tmp_path) == 2)
        (inside / "data").write_text("all of it")

    def body() -> None:
        tell_of_waiting(tmp_path)
        assert (build_once(folder, build) / "data").read_text() == "all of it"

    assert run_forks(body, 3) == [0, 0, 0]
    assert count(log) == 1


def test_those_who_waited_for_a_failure_raise_the_same_and_whoever_comes_later_tries_again(
    tmp_path: Path,
) -> None:
    folder, log = tmp_path / "key", tmp_path / "log"

    def build(inside: Path) -> None:
        note(log)
        wait_until(lambda: count_waiting(tmp_path) == 2)
        raise ValueError(f"no good for {os.getpid()}")

    def body() -> None:
        tell_of_waiting(tmp_path)
        try:
            build_once(folder, build)
        except ValueError as error:
            (tmp_path / f"error{os.getpid()}").write_text(str(error))

    run_forks(body, 3)
    errors = {path.read_text() for path in tmp_path.glob("error*")}
    assert len(errors) == 1
    assert len(list(tmp_path.glob("error*"))) == 3
    assert count(log) == 1

    def build_well(inside: Path) -> None:
        (inside / "data").touch()

    assert (build_once(folder, build_well) / "data").exists()


def test_a_killed_builder_leaves_nothing_that_is_taken_as_complete(tmp_path: Path) -> None:
    folder, started = tmp_path / "key", tmp_path / "started"

    def build_for_ever(inside: Path) -> None:
        (inside / "data").write_text("half of")
        started.touch()
        time.sleep(600)

    def build(inside: Path) -> None:
        assert not list(inside.iterdir())
        (inside / "data").write_text("all of it")

    def take_over() -> None:
        tell_of_waiting(tmp_path)
        build_once(folder, build)

    process = FORK.Process(target=build_once, args=(folder, build_for_ever), daemon=True)
    process.start()
    wait_until(started.exists)
    waiter = FORK.Process(target=take_over)
    waiter.start()
    wait_until(lambda: count_waiting(tmp_path) == 1)
    assert waiter.is_alive()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(120)
    waiter.join(120)
    assert waiter.exitcode == 0
    assert (build_once(folder, build_for_ever) / "data").read_text() == "all of it"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_without_the_marker_is_built_anew(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    folder.mkdir()
    (folder / "data").write_text("half of")

    def build(inside: Path) -> None:
        (inside / "data").write_text("all of it")

    assert (build_once(folder, build) / "data").read_text() == "all of it"
    assert (folder / COMPLETE).exists()


def test_a_key_changes_with_every_fact_and_the_cache_lies_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert make_key(a=1, b=[2]) == make_key(b=[2], a=1) != make_key(a=1, b=[3])
    monkeypatch.setenv("LIT_FSDP_CACHE", "/some/where")
    assert get_cache_dir(None) == Path("/some/where")
    assert get_cache_dir("here") == Path("here")
    monkeypatch.delenv("LIT_FSDP_CACHE")
    assert get_cache_dir(None) == Path.home() / ".cache" / "lit_fsdp"


def test_contents_are_read_again_only_where_something_has_touched_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "key", []
    build_once(folder, lambda inside: [(inside / name).write_text(name) for name in ("one", "two")] and None)
    whole = cache.hash_file
    monkeypatch.setattr(cache, "hash_file", lambda path: read.append(path.name) or whole(path))
    build_once(folder, lambda _: pytest.fail("built again"))
    assert read == []
    stat = (folder / "two").stat()
    os.utime(folder / "two", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as it was, but for the time of the change
    build_once(folder, lambda _: pytest.fail("built again"))
    assert read == ["two"]


def test_a_cache_on_a_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tokens" / "key"

    def build(out: Path) -> None:
        (out / "data").write_bytes(b"x" * 100)

    # Not even the reason of the failure can be written.
    full = pytest.raises(ValueError, match=r"^cache_dir: \S+/tokens: File too large: free some, or choose another")
    with small_disk(0), full:
        build_once(folder, build)
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == []
    assert (build_once(folder, build) / "data").read_bytes() == b"x" * 100
