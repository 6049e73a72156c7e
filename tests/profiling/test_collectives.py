"""The connections between ranks: measured, fitted, on the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import ROOT, find_free_port, fork_ranks, run_processes
from waiting import wait_until

from lit_fsdp.cli import bench as bench_cli
from lit_fsdp.cli.main import main
from lit_fsdp.profiling.collectives import MEASURED, Collective, Timing, count_wire_bytes, fit_line, measure_fabric
from ranks import run_ranks


def make_timing(num_bytes: int, seconds: float, collective: Collective = "all_gather") -> Timing:
    times = {"seconds": seconds, "seconds_low": seconds, "seconds_high": seconds}
    return Timing(collective=collective, num_bytes=num_bytes, num_ranks=4, **times)


@pytest.mark.parametrize(
    ("collective", "factor"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.5)]
)
def test_the_line_is_found_again(collective: Collective, factor: float) -> None:
    # 50 us and 20 GB/s on the bus
    sizes = [2**k for k in range(10, 28, 3)]
    line = fit_line([make_timing(size, 50e-6 + factor * size / 20e9, collective) for size in sizes])
    assert line is not None
    assert line.alpha_s == pytest.approx(50e-6)
    assert line.bandwidth_gb_s == pytest.approx(20)
    assert line.worst_pct is not None
    assert line.worst_pct < 1e-6
    assert count_wire_bytes(collective, 1000, 4) == 1000 * factor


def test_a_latency_is_not_negative_and_small_sizes_count_as_much_as_large_ones() -> None:
    line = fit_line([make_timing(10**6, 1e-3), make_timing(10**7, 20e-3)])
    assert line is not None
    assert line.worst_pct is None  # any line meets two points
    assert line.alpha_s == 0
    # 0.75 and 0.375 GB/s: between them, in inverse
    assert 0.375 < line.bandwidth_gb_s < 0.75
    off = [make_timing(10**3, 1e-3), make_timing(10**6, 2e-3), make_timing(10**9, 1.3)]
    line = fit_line(off)
    assert line is not None
    assert line.alpha_s == pytest.approx(1e-3, rel=0.4)


def test_one_size_or_times_that_do_not_grow_have_no_line() -> None:
    assert fit_line([make_timing(10**6, 1e-3)]) is None
    assert fit_line([make_timing(10**6, 1e-3), make_timing(10**6, 2e-3)]) is None
    assert fit_line([make_timing(10**3, 1.0), make_timing(10**9, 0.1)]) is None


def measure() -> None:
    timings = measure_fabric([3000, 10], num_repeats=3, device=torch.device("cpu"), num_nodes=1)
    assert [timing.collective for timing in timings] == [kind for kind in MEASURED for _ in range(2)]
    # Rounded up to 4 bytes for each of 3 ranks; then in blocks of 260 bytes for 256 numbers, and in 2 bytes each.
    assert [timing.num_bytes for timing in timings] == [*[12, 3000] * 3, 780, 780, 6, 1500, 780, 780]
    for timing in timings:
        assert 0 < timing.seconds_low <= timing.seconds <= timing.seconds_high
        wire = count_wire_bytes(timing.collective, timing.num_bytes, 3)
        assert timing.bus_gb_s == pytest.approx(wire / timing.seconds / 1e9)


def test_every_collective_is_timed_at_every_size() -> None:
    run_ranks(measure, world_size=3)


# The command line


def check_files(folder: Path, num_ranks: int, sizes: list[int]) -> None:
    assert (folder / "comm.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((folder / "comm.json").read_text())
    assert (found["version"], found["num_ranks"], found["num_nodes"], found["backend"]) == (1, num_ranks, 1, "gloo")
    assert set(found["collectives"]) == set(MEASURED)
    for kind, one in found["collectives"].items():
        if "bits" not in kind:
            assert [timing["num_bytes"] for timing in one["timings"]] == sizes
        assert set(one) == {"alpha_s", "bandwidth_gb_s", "worst_pct", "timings"}


def test_it_starts_its_ranks_and_writes_what_they_find(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks=2", "--sizes=2KB, 1KiB", "--repeats=2", "--backend=gloo", f"--out={tmp_path / 'new'}"]
    assert main(["bench", "comm", *options]) == 0
    printed = capfd.readouterr().out
    assert all(name in printed for name in (*MEASURED, "1.953 KiB", "bus GB/s", "comm.json"))
    check_files(tmp_path / "new", 2, [1024, 2000])


def test_under_torchrun_it_uses_those_ranks(tmp_path: Path) -> None:
    options = ["--sizes=1KiB,2KB", "--repeats=2", f"--out={tmp_path}"]
    ended = fork_ranks("bench", "comm", *options, ranks=3)
    assert [rank.code for rank in ended] == [0, 0, 0], ended[0].err
    assert [bool(rank.out) for rank in ended] == [True, False, False]
    check_files(tmp_path, 3, [1032, 2004])  # 4 bytes for each of 3 ranks
    ended = fork_ranks("bench", "comm", "--ranks=2", ranks=3)
    assert [rank.code for rank in ended] == [2, 2, 2]
    assert ended[0].errors == ["error: ranks: got 2: torchrun started 3; leave it out"]


@pytest.mark.full
def test_under_srun_it_uses_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"):
        monkeypatch.setenv(name, "2")
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    bench = "import os, sys; os.environ.update(SLURM_PROCID=sys.argv[1], SLURM_LOCALID='0'); "
    bench += "from lit_fsdp.cli.main import main; sys.exit(main(['bench', 'comm', *sys.argv[2:]]))"
    options = ["--sizes=1KiB", "--repeats=2", f"--out={tmp_path}"]
    ended = run_processes(*(["-c", bench, str(rank), *options] for rank in range(2)), timeout_s=120, **meeting)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    assert [bool(rank.out) for rank in ended] == [True, False]
    found = json.loads((tmp_path / "comm.json").read_text())
    assert (found["num_ranks"], found["num_nodes"]) == (2, 2)
    ended = run_processes(*(["-c", bench, str(rank), "--ranks=3"] for rank in range(2)))
    assert ended[0].errors == ["error: ranks: got 3: srun started 2; leave it out"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", "bench: no benchmark: expected one of comm"),
        ("com", "bench com: unknown benchmark: did you mean comm?"),
        ("comm --sizes=3XB", "sizes: got '3XB': expected a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ("comm --sizes=1KiB,,2KiB", "sizes: got '': expected a number"),
        ("comm --sizes=0KiB", "sizes: got '0KiB': expected more than nothing"),
        ("comm --ranks=0", "ranks: got 0: someone has to send"),
        ("comm --ranks=1", "ranks: got 1: someone has to send"),
        ("comm --ranks=many", "ranks: got 'many': expected int"),
        ("comm --repeats=0", "repeats: got 0: expected 1 or more"),
        ("comm --timeout_s=0", "timeout_s: got 0.0: expected seconds above 0"),
        ("comm --backend=mpi", "backend: got 'mpi': expected one of auto, nccl or gloo"),
        ("comm --repeat=3", "repeat: unknown key: did you mean repeats?"),
        ("comm --out={file}", "out: got {file}: File exists; choose another folder"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: str, expected: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", *options.format(file=tmp_path / "file").split()]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert expected.format(file=tmp_path / "file") in lines[0]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm", "--backend=nccl"]) == 2 or torch.cuda.device_count()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    capfd.readouterr()
    assert main(["bench", "comm", "--ranks=3", "--backend=nccl"]) == 2
    expected = "error: ranks: got 3: this node has 2 GPUs; use --ranks=2 or --backend=gloo\n"
    assert capfd.readouterr().err == expected


@pytest.mark.full
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_all(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "pid"

    def fail(*_: Any, **__: Any) -> None:
        if os.environ["RANK"] == "0":
            other.write_text(f"{os.getpid()}\n")
            time.sleep(600)
        wait_until(lambda: other.exists() and other.read_text().endswith("\n"))
        if how == "raise":
            raise OSError("made up")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(bench_cli, "measure_fabric", fail)
    assert main(["bench", "comm", "--ranks=2", "--backend=gloo"]) == 1
    assert not Path("/proc", other.read_text().strip()).exists()
    reason = "rank 1 failed, so all were ended: OSError: made up"
    reason = reason if how == "raise" else "rank 1 was ended (SIGKILL), and so were all"
    assert f"error: {reason}" in capfd.readouterr().err.splitlines()


@pytest.mark.full
def test_ctrl_c_ends_all_ranks() -> None:
    options = ["--ranks=2", "--backend=gloo", "--sizes=1MB", "--repeats=1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lit_fsdp", "bench", "comm", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background ignores Ctrl-C, and so would what is started here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        wait_until(lambda: len(children.read_text().split()) == 2)
        ranks = children.read_text().split()
        process.send_signal(signal.SIGINT)  # to the first process only; a terminal's reaches the ranks too
        _, err = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert err == "error: interrupted; all ranks were ended\n"
    assert not any(Path("/proc", rank).exists() for rank in ranks)


def test_ctrl_c_while_ranks_are_started_ends_them_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start, ranks = bench_cli.start_processes, []

    def start_and_interrupt(*args: Any, **options: Any) -> Any:
        context = start(*args, **options)
        assert context is not None
        ranks.extend(context.pids())
        os.kill(os.getpid(), signal.SIGINT)
        return context

    monkeypatch.setattr(bench_cli, "start_processes", start_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        code = main(["bench", "comm", "--ranks=2", "--backend=gloo", "--sizes=1MB", "--repeats=1000000"])
    except KeyboardInterrupt:
        code = None
    finally:
        signal.signal(signal.SIGINT, before)
        left = [rank for rank in ranks if Path("/proc", str(rank)).exists()]
        for rank in left:
            os.kill(rank, signal.SIGKILL)
    assert code == 130
    assert capfd.readouterr().err == "error: interrupted; all ranks were ended\n"
    assert (len(ranks), left) == (2, [])
