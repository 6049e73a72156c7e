"""``plan`` on the command line, and searches of ``fsdp2_auto`` that trace nothing."""

import json
import os
import sys
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launches import OURS, Ended, fork_ranks

from lit_fsdp.cli import main as cli


def enter_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work there, as a user who has set nothing."""
    monkeypatch.chdir(folder)
    for name in OURS:
        monkeypatch.delenv(name, raising=False)


def main(args: list[str]) -> int | None:
    """Run the command in a process of its own: torch keeps what it worked out for ranks, also for those of a plan."""
    process = get_context("fork").Process(target=_enter, args=(args,))
    process.start()
    process.join()
    return process.exitcode


def _enter(args: list[str]) -> None:
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    warnings.showwarning = _print_warning  # pytest keeps them otherwise
    code = cli.main(args)
    assert not dist.is_initialized()
    sys.exit(code)


def _print_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning):
        print(f"{category.__name__}: {message}", file=sys.stderr)


def count_needed_bytes(*args: str) -> int:
    """Return the memory that a GPU must have for a step."""
    needed: int = plan(*args, "--device-memory=1GiB")["device"]["needed_bytes"]
    return needed


def plan(*args: str, code: int = 0) -> dict[str, Any]:
    """Plan and return ``plan.json``."""
    assert main(["plan", *args, "--out=planned"]) == code
    found: dict[str, Any] = json.loads(Path("planned/plan.json").read_text())
    return found


def fit(*args: str) -> tuple[str, dict[str, Any]]:
    """Train on two ranks, and return what the first one says, and the sections of the report."""
    ended = fork_ranks("fit", *args)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    report = next(Path("runs").rglob("report.json"))
    return ended[0].err + ended[0].out, json.loads(report.read_text())["sections"]


def check_held(planned: dict[str, Any], real: dict[str, Any], *, rel: float = 0.01) -> None:
    """Compare the memory of a plan with what a step of a run has held."""
    assert planned["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=rel)
    for kind in ("parameters", "optimizer_state", "gradients", "gathered"):
        assert planned["largest_bytes_by_kind"][kind] == real["largest_bytes_by_kind"][kind], kind


class Recorded:
    """Stands for a process that searches: keeps what it is given, and finds nothing after some time."""

    wait_s = 0.0

    def __init__(self, packed: bytes) -> None:
        Path("packed").write_bytes(packed)
        self.end = time.monotonic() + self.wait_s

    def wait(self, timeout_s: float) -> str | None:
        time.sleep(min(timeout_s, self.wait_s))
        return None if time.monotonic() < self.end else "nothing was tried"

    def stop(self) -> None:
        Path("stopped").touch()


def check_refused(ranks: list[Ended], said: str) -> None:
    assert [rank.code for rank in ranks] == [2, 2], ranks
    (line,) = {line for rank in ranks for line in rank.errors}
    assert said in line
    assert line.endswith("set trainer.strategy to fsdp2, and its settings by hand")
