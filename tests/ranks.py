"""Runs a function on several ranks inside one test, forked on the CPU, and decides which processes see the GPUs."""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path

import cloudpickle
import torch
import torch._dynamo  # loaded here so that forked ranks do not each pay for it
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SHOWN = "LIT_FSDP_TESTS_GPUS"  # for workers of pytest-xdist, which start once this process has hidden them
GPUS = os.environ.get(_VARIABLE)  # before anything is hidden; none: all
if GPUS == "" and "PYTEST_XDIST_WORKER" in os.environ:
    GPUS = os.environ.get(_SHOWN)


def hide_gpus() -> None:
    """Hide the GPUs from this process and those it starts: a CPU test is the same on a machine that has some.

    It must not start CUDA either, as no fork could use it then. Only ranks on GPUs see them, see ``run_ranks``.
    """
    os.environ[_VARIABLE] = ""
    os.environ.pop(_SHOWN, None)
    if GPUS is not None:
        os.environ[_SHOWN] = GPUS
    # Starts autograd's engine, without threads. In builds for CUDA a first backward on fake tensors would start one for
    # the GPU that torch fakes, and no rank that was forked after that could run backward; seen in torch 2.14 and 2.15.
    torch.zeros((), requires_grad=True).backward()


@contextmanager
def _show_gpus() -> Iterator[None]:
    hidden = os.environ.pop(_VARIABLE, None)
    try:
        if GPUS is not None:
            os.environ[_VARIABLE] = GPUS
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        if hidden is not None:
            os.environ[_VARIABLE] = hidden


@cache
def count_gpus() -> int:
    """Count the GPUs that ranks on GPUs have; ``torch.cuda.device_count()`` is 0 in the process of the tests."""
    with _show_gpus():
        return torch.cuda.device_count()  # asks the driver's library, not CUDA


class RankError(RuntimeError):
    """What went wrong on the first rank that failed, with that rank's traceback as the message."""


def run_ranks(
    body: Callable[..., None],
    *args: object,
    world_size: int = 2,
    backend: str = "gloo",
    timeout_s: float = 300.0,
    is_on_gpus: bool | None = None,
) -> None:
    """Run ``body(*args)`` on every rank of a fresh process group; raise what the first failing rank raised.

    Ranks meet through a file, not a port, so tests can run side by side. ``RANK``, ``LOCAL_RANK`` and
    ``WORLD_SIZE`` are set as torchrun does. Those on the CPU are forked: about 1 s instead of 5-11 s. Those on GPUs
    are new processes that see the GPUs, as CUDA cannot be used in a fork.

    Args:
        body: What each rank runs, maybe a local function. Its return value is dropped; it asserts or writes files.
        args: Passed to every rank alike.
        world_size: How many ranks; 1 makes a process group of one.
        backend: For ``init_process_group``.
        timeout_s: After this long all ranks are killed and the call fails: a hang costs one test, not a run.
        is_on_gpus: Whether ranks see the GPUs; by default those with NCCL do.
    """
    __tracebackhide__ = True
    is_on_gpus = "nccl" in backend if is_on_gpus is None else is_on_gpus
    work = _pack(body, args) if is_on_gpus else (body, args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _show_gpus() if is_on_gpus else nullcontext():
            ranks = start_processes(
                _enter,
                args=(world_size, backend, timeout_s, folder, work, torch.initial_seed()),
                nprocs=world_size,
                join=False,
                start_method="spawn" if is_on_gpus else "fork",
            )
        assert ranks is not None
        first = folder / "error"
        try:
            is_done = _join(ranks, timeout_s)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankError(first.read_text() if first.exists() else str(error)) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        num_done = len([*folder.glob("*.done")])
        if is_done and num_done < world_size:  # the processes ended well, as after SystemExit(0) or KeyboardInterrupt
            said = f"of {world_size} ranks {num_done} came to the end of the body"
            raise RankError(first.read_text() if first.exists() else said)
    if not is_done:
        raise RankError(f"of {world_size} ranks some still ran after {timeout_s:g} s and were killed")


def _pack(body: Callable[..., None], args: tuple[object, ...]) -> bytes:
    """Return what another process can run. Test modules go along: only pytest knows how to import them."""
    module = sys.modules[body.__module__]
    if not module.__name__.rpartition(".")[2].startswith("test_"):
        return cloudpickle.dumps((body, args))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((body, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _join(ranks: ProcessContext, timeout_s: float) -> bool:
    """Return whether all ranks ended in time; raise if one failed."""
    deadline = time.monotonic() + timeout_s
    # Each call returns as soon as any one rank ends. The grace period is what the others get after a failure.
    while (left := deadline - time.monotonic()) > 0:
        if ranks.join(timeout=left, grace_period=1.0):
            return True
    return False


def _enter(
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    folder: Path,
    work: bytes | tuple[Callable[..., None], tuple[object, ...]],
    seed: int,
) -> None:
    torch.set_num_threads(1)
    if isinstance(work, bytes):  # a forked one goes on where the test is
        torch.manual_seed(seed)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        if "gloo" in backend:  # a rank that is done at once would leave while another one still connects to it
            dist.all_reduce(torch.zeros(1))
        body, args = cloudpickle.loads(work) if isinstance(work, bytes) else work
        body(*args)
    except BaseException:
        _write_once(folder / "error", f"rank {rank} of {world_size} raised\n\n{traceback.format_exc()}")
        raise
    (folder / f"{rank}.done").touch()
    if dist.is_initialized():  # a body may have torn it down itself
        dist.destroy_process_group()


def _write_once(path: Path, text: str) -> None:
    """Keep the first error only: the other ranks' "connection closed by peer" would hide the cause."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return
