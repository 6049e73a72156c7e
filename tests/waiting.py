"""How tests follow other processes: by what these do, however long they take for it."""

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(is_true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Return once something is true.

    Args:
        is_true: Asked every few milliseconds.
        timeout_s: After this long it is taken for something that never will be, and the test fails.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"still not after {timeout_s:g} s"
        time.sleep(0.005)


def tell_of_waiting(folder: Path) -> None:
    """Let this process, which ends with the test, leave a file when it begins to wait for another one's cache."""

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("waiting for another process"):
                (folder / f"{os.getpid()}.waits").touch()

    log = logging.getLogger("lit_fsdp.cache")
    log.setLevel(logging.INFO)
    log.addHandler(Tell())


def count_waiting(folder: Path) -> int:
    """Return how many processes have told so."""
    return len(list(folder.glob("*.waits")))


def run_forks(body: Callable[[], None], num_processes: int) -> list[int | None]:
    """Run ``body`` in forked processes at the same time; return how each exited."""
    processes = [multiprocessing.get_context("fork").Process(target=body) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]
