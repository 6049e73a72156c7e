import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from report_runs import TinyTask
from torch.utils.data import DataLoader, Dataset

from lit_fsdp.cli.messages import describe_exception
from lit_fsdp.strategy import launcher
from lit_fsdp.strategy.launcher import PatientObserver, describe_failed, outlive_children
from lit_fsdp.tasks.row_files import Row, check_rows, make_bad, parse_json


def test_what_was_killed_leaves_no_message_and_that_is_said() -> None:
    assert describe_failed({0: 0, 1: 1}) == "rank 1 (exit code 1) failed first, see the message there"
    assert describe_failed({1: -9, 2: -15, 3: 1}).startswith("rank 1 was killed (SIGKILL), and left no message")
    assert describe_failed({1: -11, 2: -15, 3: 1}) == "rank 1 was ended by SIGSEGV, and left no message"
    assert describe_failed({}) == "another rank failed first, see the message there"


def test_a_killed_reader_of_data_is_one_line() -> None:
    error = RuntimeError("DataLoader worker (pid 25034) is killed by signal: Killed. ")
    line = describe_exception(error)
    assert line is not None
    assert line.startswith("DataLoader worker (pid 25034) is killed by signal: Killed")
    assert "set num_workers of the data lower" in line
    assert describe_exception(RuntimeError("DataLoader worker (pid 2) exited unexpectedly")) is None


class _OneRow(Dataset[Any]):
    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.read()


@pytest.mark.full
def test_what_our_code_refuses_while_another_process_reads_data_is_one_line() -> None:
    def refuse() -> Row:
        return next(check_rows([make_bad("cats/a: b.png", "cannot be read")]))

    def fail() -> Any:
        return parse_json("{")  # an error of json

    for read, line in ((refuse, "cats/a: b.png: cannot be read"), (fail, None)):
        with pytest.raises((ValueError, RuntimeError), match="in DataLoader worker process 0") as caught:
            next(iter(DataLoader(_OneRow(read), num_workers=1, multiprocessing_context="fork")))
        assert describe_exception(caught.value) == line


def test_a_missing_gpu_is_named_with_the_way_out() -> None:
    line = describe_exception(MisconfigurationException("No supported gpu backend found!"))
    assert line == "accelerator: No supported gpu backend found! torch sees none on this machine; set it to auto"


def test_an_evaluation_after_the_end_of_an_epoch_is_one_line() -> None:
    data = DataLoader(torch.ones(4, 4))
    trainer = pl.Trainer(accelerator="cpu", val_check_interval=9, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="must be less than or equal") as raised:
        trainer.fit(TinyTask(), data, data)
    line = describe_exception(raised.value)
    assert line is not None
    assert line.startswith("trainer.val_check_interval: got 9: an epoch has 4 batches: set it to 4 or less")


@pytest.mark.full
@pytest.mark.parametrize("speaks", [True, False])
def test_a_rank_that_others_failed_beside_has_time_to_say_why(speaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, may_go = threading.Event(), threading.Event()

    def wait(seconds: float) -> None:
        assert seconds == 15.0
        waits.set()
        may_go.wait(60)

    monkeypatch.setattr(launcher, "time", SimpleNamespace(sleep=wait))
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    failed.wait()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as main:
        children = SimpleNamespace(procs=[failed])
        observer = PatientObserver(main.pid, children.procs, sleep_period=1)
        observer.start()
        assert waits.wait(60)
        assert main.poll() is None
        if speaks:
            outlive_children(children)
        may_go.set()
        observer.join(60)
        if speaks:
            assert main.poll() is None
            main.kill()
        assert main.wait(60) == -9
