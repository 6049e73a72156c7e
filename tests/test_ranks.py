"""The tests of every other file lean on ``run_ranks``: a failure on a rank must never pass for a success."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

import ranks
from ranks import RankError, run_ranks


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_runs_the_body_in_one_group(tmp_path: Path, world_size: int) -> None:
    def body() -> None:
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        (tmp_path / os.environ["RANK"]).write_text(str(total.item()))

    run_ranks(body, world_size=world_size)
    sums = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sums == {str(rank): str(sum(range(world_size + 1))) for rank in range(world_size)}


def test_the_rank_that_failed_first_is_the_one_shown() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            raise ValueError("shard 1 is wrong")
        dist.barrier()  # the other rank then fails too, through the lost connection

    with pytest.raises(RankError, match=r"rank 1 of 2 raised(.|\n)*shard 1 is wrong"):
        run_ranks(body)


@pytest.mark.parametrize(("code", "message"), [(7, "exit code 7"), (0, "of 1 ranks 0 came to the end of the body")])
def test_a_rank_that_dies_without_a_traceback_fails_the_test(code: int, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(os._exit, code, world_size=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SIGTERMException])
def test_a_rank_that_is_asked_to_end_in_the_body_fails_the_test_though_its_process_ends_well(
    error: type[BaseException],
) -> None:
    def body() -> None:
        raise error

    with pytest.raises(RankError, match=f"rank 0 of 1 raised(.|\n)*{error.__name__}"):
        run_ranks(body, world_size=1)


@pytest.mark.full
def test_a_hang_is_killed_in_time(tmp_path: Path) -> None:
    def body() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    with pytest.raises(RankError, match="of 2 ranks some still ran after 5 s"):
        run_ranks(body, timeout_s=5)
    ranks = list(tmp_path.iterdir())
    assert len(ranks) == 2
    assert not any(Path("/proc", rank.name).exists() for rank in ranks)


def test_ranks_can_run_backward_after_the_parent_did() -> None:
    # Forking after the autograd engine ran is a known trap: it must hold for parity tests.
    def body() -> None:
        weight = torch.ones(4, requires_grad=True)
        (weight * 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 4

    body()
    run_ranks(body)


@pytest.mark.full
def test_ranks_on_gpus_are_new_processes_that_see_them_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GPUS", "7,8")

    def body() -> None:
        is_new = "pytest" not in sys.modules  # which no fork of this process can be
        (tmp_path / str(dist.get_rank())).write_text(f"{is_new} {os.environ['CUDA_VISIBLE_DEVICES']}")

    for is_on_gpus, expected in ((True, "True 7,8"), (False, "False ")):
        run_ranks(body, is_on_gpus=is_on_gpus)
        assert [(tmp_path / rank).read_text() for rank in "01"] == [expected] * 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


FAKE_FIRST = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from ranks import hide_gpus, run_ranks

hide_gpus()

def body():
    torch.ones(4, requires_grad=True).sum().backward()

with FakeTensorMode():
    body()
run_ranks(body, world_size=1)
"""


@pytest.mark.full
def test_ranks_can_run_backward_after_a_first_one_of_the_parent_on_fake_tensors() -> None:
    # Of builds for CUDA only, in a process that has run no backward.
    subprocess.run([sys.executable, "-c", FAKE_FIRST], cwd=Path(__file__).parent, check=True)


@pytest.mark.full
@pytest.mark.parametrize("shown", ["0,3", "", None])
def test_workers_of_xdist_know_the_gpus_that_their_parent_hid(shown: str | None) -> None:
    visible = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "PYTEST_", "LIT_"))}
    code = "from ranks import GPUS, hide_gpus; hide_gpus(); print(repr(GPUS)); {}"
    worker = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True, "
        "env={**os.environ, 'PYTEST_XDIST_WORKER': 'gw0'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(worker), code.format("")],
        cwd=Path(__file__).parent,
        env=environ | visible,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sorted(done.stdout.splitlines()) == [repr(shown)] * 2


@pytest.mark.full
def test_tests_that_are_interrupted_still_say_what_failed(tmp_path: Path) -> None:
    body = "def test_fails():\n    assert 1 == 2\n\ndef test_hangs(tmp_path):\n    raise KeyboardInterrupt\n"
    (tmp_path / "test_two.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-q", "test_two.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert "assert 1 == 2" in ended.stdout, ended.stdout + ended.stderr
    assert "AttributeError" not in ended.stderr
