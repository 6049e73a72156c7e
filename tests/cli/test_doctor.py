import os
import shutil
import socket
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.cli import doctor
from lit_fsdp.cli.main import main
from lit_fsdp.strategy import process_group

Usage = namedtuple("Usage", "total used free")


def test_a_machine_is_on_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(process_group, "_find_gloo_address", lambda _: "127.0.1.1")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"│ torch                    │ {torch.__version__}" in shown
    assert "none that torch sees" in shown
    assert "warning: on several nodes: gloo, which NCCL needs beside it, would listen on " in shown
    assert "extra deepspeed: " in shown
    assert "extra test" not in shown
    assert "nothing that a run needs is missing\n" in shown
    assert len(shown.splitlines()) <= 40
    assert f" {socket.gethostname()} " not in shown


def test_gpus_are_described_with_what_is_wrong_with_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [("NVIDIA GeForce RTX 3060", 8, 6, 12), ("NVIDIA T4", 7, 5, 16)]
    cuda: dict[str, Any] = {
        "init": lambda: None,
        "device_count": lambda: 2,
        "get_device_properties": lambda i: SimpleNamespace(name=cards[i][0], major=cards[i][1], minor=cards[i][2]),
        "mem_get_info": lambda i: ((cards[i][3] - 1) * 2**30, cards[i][3] * 2**30),
        "get_device_capability": lambda i: cards[i][1:3],
        "can_device_access_peer": lambda a, b: a < b,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA GeForce RTX 3060, 11.0 of 12.0 GiB free, compute 8.6" in shown
    assert "1 of 2 pairs reach each other without host memory" in shown
    assert "warning: GPUs differ (NVIDIA GeForce RTX 3060, NVIDIA T4): a step takes as long as the slowest" in shown
    assert "warning: GPU 1 computes bfloat16 slowly or not at all: set precision 16-mixed" in shown


def test_a_gpu_that_is_full_is_described_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: int) -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: out of memory\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")

    card = SimpleNamespace(name="NVIDIA GeForce RTX 3060", major=8, minor=6)
    cuda: dict[str, Any] = {"device_count": lambda: 1, "get_device_properties": lambda _: card, "mem_get_info": read}
    for name, stand_in in {**cuda, "init": lambda: None, "get_device_capability": lambda _: (8, 6)}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "NVIDIA GeForce RTX 3060, which cannot be opened (CUDA error: out of memory), compute 8.6" in shown


@pytest.mark.parametrize("num_usable", [0, 1], ids=["driver too old", "parts of a card"])
def test_gpus_that_only_the_driver_counts_are_no_traceback(
    num_usable: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch asks the driver's library for the number until CUDA has started, which may fail, or find fewer."""
    counts = [4]

    def start() -> None:
        if not num_usable:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nUpdate it.")
        counts[0] = num_usable

    def read(index: int) -> SimpleNamespace:
        start()
        assert index < num_usable, "Invalid device id"
        return SimpleNamespace(name="NVIDIA A100 MIG 1g.10gb", major=8, minor=0)

    cuda: dict[str, Any] = {"init": start, "device_count": lambda: counts[0], "get_device_properties": read}
    for name, stand_in in {**cuda, "mem_get_info": lambda _: (2**30, 2**30)}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    if num_usable:
        assert shown.count("NVIDIA A100 MIG 1g.10gb, 1.0 of 1.0 GiB free, compute 8.0") == 1
    else:
        assert "warning: CUDA does not start: The NVIDIA driver on your system is too old (found" in shown


@pytest.mark.parametrize(
    ("cuda", "shown", "reason"),
    [
        (None, None, "torch is built for CPUs: install torch for CUDA"),
        ("13.0", "", "torch sees no GPU: CUDA_VISIBLE_DEVICES is ''"),
        ("13.0", None, "torch sees no GPU: is nvidia-smi well?"),
    ],
)
def test_a_driver_without_a_gpu_is_explained(
    cuda: str | None,
    shown: str | None,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    machine = doctor.read_machine()
    monkeypatch.setattr(doctor, "read_machine", lambda: {**machine, "driver": "595.1", "cuda": cuda})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40 - 2**29, 2**29))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"warning: there is an NVIDIA driver, but {reason}" in printed
    assert "warning: 0.5 GiB are free for runs, here" in printed


def test_what_keeps_runs_from_starting_ends_in_another_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["torch>=99", "not-a-package>=2", "rich", "nothing; python_version < '3'", "gone; extra == 'speech'"]
    monkeypatch.setattr(doctor, "requires", lambda _: needs)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert f"error: torch is {version('torch')}: expected >=99: pip install 'torch>=99'" in shown
    assert "error: not-a-package is not installed: pip install 'not-a-package>=2'" in shown
    assert shown.count("error: ") == 2
    assert "extra speech: not installed: gone: pip install 'lit_fsdp[speech]'" in shown


def test_a_folder_that_nobody_lets_us_look_into_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> Usage:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "│ free for cache of models │ cannot be read" in shown
    assert "warning: the folder for cache of models cannot be read by you: set another one, or its rights\n" in shown


def test_nobody_reading_on_is_no_error(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    end, begin = os.pipe()
    os.close(end)
    with os.fdopen(begin, "w", buffering=1) as pipe:  # as before `| head`
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["doctor"]) == 1
    assert capfd.readouterr().err == ""
