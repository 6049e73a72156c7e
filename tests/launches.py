"""Starts the command line as users do: in processes of its own, under torchrun, or quickly on forked ranks."""

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lit_fsdp.cli.main import main

# What a run imports late, loaded here so that forked ranks do not each pay for it.
for _name in (
    "lit_fsdp.cli.train",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
):
    import_module(_name)

ROOT = Path(__file__).parent.parent
OURS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is left of a process or rank: exit code (``None`` if it had to be killed), what it printed, and its time."""

    code: int | None
    out: str
    err: str
    took_s: float | None = None

    @property
    def errors(self) -> list[str]:
        """The lines in which our command line reports an error."""
        return [line for line in self.err.splitlines() if line.startswith(("error: ", "[rank "))]


def write_run(folder: Path, **sections: dict[str, Any]) -> None:
    """Write ``run.yaml``, a tiny language model for four steps on the CPU, and its ``train.jsonl``.

    Args:
        folder: Where to.
        sections: Merged into the sections of that name, one level deep (``model`` and ``data``: their init_args).
    """
    rows = ({"text": " ".join(f"word{(i * 7 + k * k) % 53} is {k + i}." for k in range(12))} for i in range(60))
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    architecture = {"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64}
    architecture |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    trainer = {"accelerator": "cpu", "max_steps": 4, "log_every_n_steps": 1, "gradient_clip_val": 1.0, **quiet}
    data = {"train": "train.jsonl", "tokenizer": {"vocab_size": 300}, "seq_length": 32, "batch_size": 4}
    data |= {"num_workers": 0, "cache_dir": "cache"}
    run: dict[str, Any] = {
        "monitoring": False,  # a second in every run, and tested elsewhere
        "trainer": trainer | sections.get("trainer", {}),
        "model": {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": {"config": architecture}},
        "data": {"class_path": "lit_fsdp.tasks.TextData", "init_args": data | sections.get("data", {})},
    }
    run["model"]["init_args"] |= sections.get("model", {})
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def find_free_port() -> int:
    """Return a port that nobody listens on, below those that the kernel gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def run_processes(*commands: Sequence[str], timeout_s: float = 600.0, **environ: str) -> list[Ended]:
    """Start ``python <command>`` for each command at once in the current folder, and wait for all of them.

    Args:
        commands: Arguments of ``python``.
        timeout_s: After this long what still runs is killed, with all that it started.
        environ: Added to the environment.
    """
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    started = [subprocess.Popen([sys.executable, *c], env=environ, **pipes) for c in commands]
    deadline = time.monotonic() + timeout_s
    ended = []
    for process in started:
        try:
            # Returns only when the last process that shares the pipe has closed it: none is left behind.
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            ended.append(Ended(code=process.returncode, out=out, err=err))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            ended.append(Ended(code=None, out=out, err=err))
    return ended


def torchrun(*args: str, ranks: int = 2, timeout_s: float = 600.0) -> Ended:
    """Run the command line under ``torchrun --standalone``, once for each rank, in the current folder."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "lit_fsdp", *args]
    return run_processes(command, timeout_s=timeout_s)[0]


def fork_ranks(
    *args: str, ranks: int = 2, timeout_s: float = 600.0, meanwhile: Callable[[list[int]], None] | None = None
) -> list[Ended]:
    """Run the command line on forked ranks with the variables that torchrun sets, in the current folder.

    About 1 s instead of 10 with processes that import torch. Nobody ends a rank because another one failed, as
    torchrun would: one that hangs is killed after ``timeout_s`` and has the code ``None``.

    Args:
        args: The command line.
        ranks: How many.
        timeout_s: From the start on.
        meanwhile: Called with the process ids once they are started.
    """
    context = get_context("fork")
    port = find_free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [context.Process(target=_enter, args=(r, ranks, port, folder, args)) for r in range(ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        codes = []
        if meanwhile is not None:
            meanwhile([process.pid for process in processes if process.pid is not None])
        for process in processes:
            process.join(timeout=max(deadline - time.monotonic(), 0.1))
            codes.append(process.exitcode)
            process.kill()
            process.join()
        printed = [[(folder / f"{r}.{kind}").read_text() for kind in ("out", "err")] for r in range(ranks)]
    return [Ended(code=code, out=out, err=err) for code, (out, err) in zip(codes, printed, strict=True)]


def _enter(rank: int, ranks: int, port: int, folder: Path, args: tuple[str, ...]) -> None:
    values = (rank, rank, 0, ranks, ranks, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(OURS, values, strict=True)}, TORCHELASTIC_RUN_ID="test")
    _run_main(args, folder / str(rank))


def _run_main(args: Sequence[str], printed: Path) -> NoReturn:
    for number, kind in ((1, "out"), (2, "err")):
        with printed.with_name(f"{printed.name}.{kind}").open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    # Lightning's messages go through the handlers of whoever imported it first, here pytest's.
    logging.basicConfig(force=True, stream=sys.stderr, format="%(message)s")
    sys.argv = ["lit_fsdp", *args]
    sys.exit(main(args))


@dataclass(frozen=True, kw_only=True)
class Start:
    """A command line to run in a folder of its own, with ``environ`` added to an environment without a launcher's."""

    args: Sequence[str]
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)


def fork_commands(starts: Sequence[Start], *, timeout_s: float = 60.0, at_once: int = 2) -> list[Ended]:
    """Run command lines as a user would, each in a forked process; what it leaves running is killed with it.

    Args:
        starts: What to run.
        timeout_s: Of each; one that takes longer is killed and has the code ``None``.
        at_once: How many run at a time.
    """
    context, waiting, running = get_context("fork"), list(enumerate(starts)), dict[int, tuple[Any, float]]()
    ended: list[Ended | None] = [None] * len(starts)
    with tempfile.TemporaryDirectory() as name:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, start = waiting.pop(0)
                process = context.Process(target=_enter_command, args=(start, Path(name, str(number))))
                process.start()
                running[number] = process, time.monotonic()
            wait([process.sentinel for process, _ in running.values()], timeout=1.0)
            for number, (process, begin) in list(running.items()):
                took_s, code = time.monotonic() - begin, process.exitcode
                if code is None and took_s < timeout_s:
                    continue
                with suppress(ProcessLookupError):  # what it has started
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                out, err = (Path(name, f"{number}.{kind}").read_text() for kind in ("out", "err"))
                ended[number] = Ended(code=code, out=out, err=err, took_s=took_s)
                del running[number]
    return [end for end in ended if end is not None]


def _enter_command(start: Start, printed: Path) -> NoReturn:
    os.setsid()
    os.chdir(start.folder)
    for name in (*OURS, "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    os.environ.update(start.environ)
    # As Python shows warnings, which pytest keeps.
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _print_warning
    _run_main(start.args, printed)


def _print_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    print(f"{category.__name__}: {message}", file=sys.stderr)
