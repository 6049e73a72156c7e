"""``bench``: measures the machines themselves, before or beside a run."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from lit_fsdp.cli.messages import report_error
from lit_fsdp.cli.scaling import bench_scaling, make_table
from lit_fsdp.cli.strategies import bench_strategies
from lit_fsdp.errors import ConfigError, suggest
from lit_fsdp.parsing.parser import check_out_folder, run_function
from lit_fsdp.planning.timing.hardware import parse_memory
from lit_fsdp.profiling.collectives import MEASURED, Line, Measured, Timing, fit_line, measure_fabric
from lit_fsdp.strategy.process_group import MAX_TIMEOUT_S
from lit_fsdp.strategy.processes import is_torchrun
from lit_fsdp.strategy.signals import put_off_interrupt
from lit_fsdp.strategy.slurm import choose_port, find_own_tasks

Backend = Literal["auto", "nccl", "gloo"]
_TIMING = ("num_bytes", "seconds", "seconds_low", "seconds_high", "bus_gb_s")  # of each in the file
_DEFAULT_SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


def run_bench(args: Sequence[str]) -> int:
    """Run one benchmark and return the exit code of the process.

    Args:
        args: The command line, the command first.
    """
    what = args[1] if len(args) > 1 else ""
    if what in ("-h", "--help"):
        print(_HELP.format(benchmarks="\n".join(f"  {name:12}{summary}" for name, (_, summary) in BENCHMARKS.items())))
        return 0
    if what not in BENCHMARKS:
        hint = suggest(what, BENCHMARKS, f"expected one of {', '.join(BENCHMARKS)}")
        raise ConfigError(f"bench {what}: unknown benchmark: {hint}" if what else f"bench: no benchmark: {hint}")
    run, summary = BENCHMARKS[what]
    code: int = run_function(run, args[2:], command=f"bench {what}", description=summary)
    return code


def bench_comm(
    ranks: int | None = None,
    sizes: str = _DEFAULT_SIZES,
    backend: Backend = "auto",
    repeats: int = 20,
    out: Path | None = None,
    timeout_s: float = 300.0,
) -> int:
    """Measure the connections between ranks: time and bandwidth of each collective by size.

    Starts its ranks itself, on this node, or uses those of torchrun or srun. Prints a table.

    Args:
        ranks: How many to start. By default one for each GPU, or 2 on the CPU. Not under torchrun or srun, which have
            started them.
        sizes: Full sizes of the messages, with units, such as 64KiB,1MiB,1GB.
        backend: ``nccl`` between GPUs, ``gloo`` between CPUs; ``auto`` takes what the machine has.
        repeats: Of each collective and size.
        out: Folder for ``comm.json`` and the plot ``comm.png``. By default nothing is written.
        timeout_s: How long a collective may take.
    """
    try:
        num_bytes = [parse_memory(size.strip(), "sizes", example="64KiB,1MiB") for size in sizes.split(",")]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if repeats < 1:
        raise ConfigError(f"repeats: got {repeats}: expected 1 or more")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(f"timeout_s: got {timeout_s}: expected seconds above 0, up to {MAX_TIMEOUT_S:,.0f}")
    launcher = _find_launcher()
    backend, world_size = _choose_ranks(ranks, backend, launcher)
    if out is not None:
        check_out_folder(out)
    body = (num_bytes, backend, repeats, out, timeout_s)
    if launcher is not None:
        measure_links(*body)
        return 0
    return _run_ranks(world_size, body)


def _find_launcher() -> str | None:
    """Return what has started the ranks, of which this process is one, in the variables of torchrun; or ``None``."""
    if is_torchrun(os.environ):
        return "torchrun"
    try:
        tasks = find_own_tasks()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if tasks is None or tasks.total == 1:  # one task starts ranks on its node, as without SLURM
        return None
    os.environ.update(RANK=str(tasks.rank), LOCAL_RANK=os.environ["SLURM_LOCALID"])
    os.environ.update(WORLD_SIZE=str(tasks.total), LOCAL_WORLD_SIZE=str(tasks.per_node))
    os.environ.update(MASTER_PORT=str(choose_port(os.environ)))
    os.environ.setdefault("MASTER_ADDR", tasks.first_node)
    return "srun"


def _choose_ranks(ranks: int | None, backend: Backend, launcher: str | None) -> tuple[Backend, int]:
    """Return the backend and how many ranks there will be, or refuse."""
    num_gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if num_gpus and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not num_gpus:
        raise ConfigError("backend: got 'nccl': there is no GPU here; use gloo")
    if launcher is not None:
        started, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if ranks not in (None, started):
            raise ConfigError(f"ranks: got {ranks}: {launcher} started {started}; leave it out")
    else:
        started = local = ranks if ranks is not None else num_gpus if backend == "nccl" else 2
    if started < 2:
        raise ConfigError(f"ranks: got {started}: someone has to send, and someone to receive: expected 2 or more")
    if backend == "nccl" and local > num_gpus:
        raise ConfigError(
            f"ranks: got {local}: this node has {num_gpus} GPUs; use --ranks={num_gpus} or --backend=gloo"
        )
    return backend, started


def _run_ranks(world_size: int, body: tuple[Any, ...]) -> int:
    """Start ranks on this node and wait for them; none outlives this call."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    # Forked ones need not import torch again, but could not use CUDA.
    method = "spawn" if body[1] == "nccl" else "fork"
    processes: Sequence[Any] = ()
    try:
        with put_off_interrupt():  # one that comes now would leave ranks that nobody knows
            context = start_processes(
                _enter, args=(world_size, port, body), nprocs=world_size, join=False, start_method=method
            )
            assert context is not None
            processes = context.processes
        while not context.join(grace_period=1.0):  # returns when one has ended, raises when it has failed
            continue
    except ProcessRaisedException as error:
        lines = error.msg.strip().splitlines()
        report_error(f"rank {error.error_index} failed, so all were ended: {lines[-1]}")
        return 1
    except ProcessExitedException as error:
        report_error(f"rank {error.error_index} was ended ({error.signal_name or error.exit_code}), and so were all")
        return 1
    except KeyboardInterrupt:
        report_error("interrupted; all ranks were ended")
        return 128 + signal.SIGINT
    finally:
        _end(processes)
    return 0


def _end(processes: Sequence[Any]) -> None:
    with put_off_interrupt():  # one that comes now would leave ranks that were stopped
        # Stopped first: whoever saw another one gone would say so, below the line that says why.
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGSTOP)
        for process in processes:
            process.kill()
            process.join()


def _enter(rank: int, world_size: int, port: int, body: tuple[Any, ...]) -> None:
    # Ctrl-C reaches all of them: end at once, without a traceback each. Also what they get when their parent is gone.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    measure_links(*body)


def measure_links(sizes: list[int], backend: Backend, repeats: int, out: Path | None, timeout_s: float) -> None:
    """Measure as one of the ranks; the first one says what was found."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **options)
    try:
        ranks = _describe_ranks(device, backend, repeats)
        timings = measure_fabric(sizes, num_repeats=repeats, device=device, num_nodes=ranks["num_nodes"])
        if dist.get_rank() == 0:
            _report(timings, ranks, out)
    finally:
        dist.destroy_process_group()


def _describe_ranks(device: torch.device, backend: Backend, repeats: int) -> dict[str, Any]:
    # Added up, as nodes may have unequal numbers of ranks.
    num_nodes = torch.tensor(int(os.environ["LOCAL_RANK"] == "0"), device=device)
    dist.all_reduce(num_nodes)
    return {
        "num_ranks": dist.get_world_size(),
        "num_nodes": int(num_nodes),
        "backend": backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "repeats": repeats,
    }


def _report(timings: Sequence[Timing], ranks: dict[str, Any], out: Path | None) -> None:
    by_kind = {kind: [timing for timing in timings if timing.collective == kind] for kind in MEASURED}
    lines = {kind: fit_line(found) for kind, found in by_kind.items()}
    console = Console(width=160)
    title = f"{ranks['num_ranks']} ranks on {ranks['num_nodes']} node(s), {ranks['backend']}, {ranks['device']}"
    console.print(_make_table(title, by_kind))
    console.print(_make_lines_table(lines))
    if out is None:
        return
    unknown = {"alpha_s": None, "bandwidth_gb_s": None, "worst_pct": None}
    collectives = {
        kind: {
            **(unknown if (line := lines[kind]) is None else asdict(line)),
            "timings": [{name: getattr(timing, name) for name in _TIMING} for timing in found],
        }
        for kind, found in by_kind.items()
    }
    # Late, as they load Lightning.
    from lit_fsdp.files import refuse_unwritable, write_whole
    from lit_fsdp.reporting.plots import write_png
    from lit_fsdp.reporting.sections import Curve, Plot

    curves = [
        Curve(label=kind, x=[timing.num_bytes for timing in found], y=[timing.bus_gb_s for timing in found])
        for kind, found in by_kind.items()
    ]
    plot = Plot(title=title, x_label="size in bytes", y_label="bus GB/s", curves=curves, log_x=True)
    with refuse_unwritable("out", out):
        text = json.dumps({"version": 1, **ranks, "collectives": collectives}, indent=1)
        write_whole(out / "comm.json", f"{text}\n")
        write_png(plot, out / "comm.png")
    console.print(f"written: {out / 'comm.json'}, {out / 'comm.png'}", soft_wrap=True)


def _make_table(title: str, by_kind: dict[Measured, list[Timing]]) -> Table:
    table = make_table(title, "collective", "size", "median", "shortest", "longest", "bus GB/s")
    for kind, found in by_kind.items():
        for timing in found:
            seconds = (timing.seconds, timing.seconds_low, timing.seconds_high)
            cells = [_format_size(timing.num_bytes), *(f"{1e3 * value:.3f} ms" for value in seconds)]
            table.add_row(kind, *cells, f"{timing.bus_gb_s:.3g}")
        table.add_section()
    return table


def _make_lines_table(lines: dict[Measured, Line | None]) -> Table:
    title = "latency + bytes on the wire / bandwidth"
    table = make_table(title, "collective", "latency", "bandwidth", "off by up to")
    for kind, line in lines.items():
        cells = ["-", "-", "-"]
        if line is not None:
            worst = "-" if line.worst_pct is None else f"{line.worst_pct:.0f} %"
            cells = [f"{1e3 * line.alpha_s:.3f} ms", f"{line.bandwidth_gb_s:.3g} GB/s", worst]
        table.add_row(kind, *cells)
    return table


def _format_size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"


# By the word after ``bench``: what runs it, and its line in the help. A further benchmark is one more entry.
BENCHMARKS: dict[str, tuple[Callable[..., int], str]] = {
    "comm": (bench_comm, "Time and bandwidth of each collective by size, and a line fitted through them."),
    "scaling": (bench_scaling, "Speed of one configuration, and what it waits for, as ranks grow."),
    "strategies": (bench_strategies, "One configuration under FSDP2, DDP, FSDP1, ModelParallelStrategy, DeepSpeed."),
}

_HELP = """\
usage: python -m lit_fsdp bench BENCHMARK [--KEY=VALUE ...]

Measure the machines themselves.

benchmarks:
{benchmarks}

`python -m lit_fsdp bench comm --help` lists the options of one."""
