"""Which errors end in one line, and that line.

Nothing heavy is imported here, as the front door needs it before torch loads.
"""

from __future__ import annotations

import dis
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from lit_fsdp.errors import describe_unknown_metric, is_debugging
from lit_fsdp.redaction import redact

_KILLED_WORKER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: Killed")
_LATE_CHECK = re.compile(r"`val_check_interval` \((\d+)\) must be .* number of the training batches \((\d+)\)")
# Lightning refuses what is monitored when it first needs it.
_MONITORS = (
    re.compile(
        r"`(?P<by>ModelCheckpoint)\(monitor='(?P<name>.*?)'\)` could not find .* metrics: (?P<known>.*?)\. HINT"
    ),
    re.compile(r"(?P<by>Early) stopping conditioned on metric `(?P<name>.*?)` .*the following: (?P<known>.*)"),
)
_EXTRAS = {"wandb": "wandb", "mlflow": "mlflow"}


def report_error(line: str) -> None:
    """Print ``error: line`` on stderr, with the rank in front on all but the first; credentials redacted."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    prefix = f"[rank {rank}] " if rank != "0" else ""
    line = " ".join(redact(line).split())
    line = line if len(line) <= 500 else f"{line[:497]}..."
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"{prefix}error: {line}\n")
    sys.stderr.flush()


def print_traceback(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, credentials redacted; for ``sys.excepthook``."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _print_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        sys.stderr.write(f"Exception in thread {args.thread.name if args.thread else '?'}:\n")
        print_traceback(args.exc_type, args.exc_value, args.exc_traceback)


def _print_ignored_error(args: sys.UnraisableHookArgs) -> None:
    sys.stderr.write(redact(f"{args.err_msg or 'Exception ignored in'}: {args.object!r}\n"))
    print_traceback(args.exc_type, args.exc_value, args.exc_traceback)


def redact_logs() -> None:
    """Redact the credentials in all that this process logs, warns of, or dies of from here on, in any thread.

    Called once everything is imported, as Lightning puts a format of its own in the place of that of warnings.
    """
    sys.excepthook = print_traceback
    if threading.excepthook is threading.__excepthook__:  # another's does something else with it, such as count
        threading.excepthook = _print_thread_error
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _print_ignored_error
    if getattr(warnings.formatwarning, "is_redacted", False):  # a second command in one process
        return
    make_record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning

    def make_redacted_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # the logger will say what is wrong with these arguments
            return record
        if (redacted := redact(text)) != text:
            record.msg, record.args = redacted, ()
        if record.exc_info and record.exc_info[0]:
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            if (redacted := redact(text)) != text:
                record.exc_text = redacted  # which formatters print instead
        return record

    def format_redacted_warning(
        message: Warning | str, category: type[Warning], filename: str, *args: Any, **kwargs: Any
    ) -> str:
        # Of a warning of ours or Lightning's, a user needs the text: it is about their settings or data.
        is_told = issubclass(category, UserWarning) and not is_debugging()
        if is_told and _is_inside(filename, ("lit_fsdp", "lightning")):
            return str(redact(f"warning: {message}\n"))
        return str(redact(format_warning(message, category, filename, *args, **kwargs)))

    format_redacted_warning.is_redacted = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_redacted_record)
    warnings.formatwarning = format_redacted_warning


def quieten_ray() -> None:
    """Hide what processes of Ray Train say each second where the cluster has no dashboard; seen in ray 2.60."""
    logging.getLogger("ray.train.v2._internal.execution.controller.placement_group_cleaner").setLevel(logging.ERROR)


def is_refusal(error: BaseException) -> bool:
    """Whether an error that ``describe_exception`` tells in one line is about what the user gave."""
    is_misconfigured = any(base.__name__ == "MisconfigurationException" for base in type(error).__mro__)
    is_of_settings = isinstance(error, ValueError | ImportError)  # such as of an extra that a setting needs
    return is_of_settings or is_misconfigured or any(p.search(str(error)) for p in _MONITORS)


def describe_exception(
    error: BaseException, *, trusted: Iterable[str] = ("lit_fsdp",), is_building: bool = False
) -> str | None:
    """Return the one line that tells a user all, or ``None`` where the traceback is needed.

    One line is enough for what our own code refused: a ``raise`` written in our folders. An error that merely
    passes through them is a bug of ours, and needs its traceback.

    Args:
        error: What was raised.
        trusted: The packages whose ``raise`` is a refusal.
        is_building: Whether they were given nothing but settings, so that what they pass on is one too.
    """
    line = str(error) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        for package, extra in _EXTRAS.items():
            if package in line.lower():
                return f'the package {package} is not installed: pip install "lit_fsdp[{extra}]"'
    for pattern in _MONITORS:
        if found := pattern.search(line):
            by = {"Early": "EarlyStopping"}.get(found["by"], found["by"])
            known = re.findall(r"[^\s,`'\[\]]+", found["known"])
            return f"{by}.monitor: {describe_unknown_metric(found['name'], known)}"
    names = {base.__name__ for base in type(error).__mro__}
    if "MisconfigurationException" in names:
        is_gpu_missing = line.startswith("No supported gpu backend")
        return f"accelerator: {line} torch sees none on this machine; set it to auto" if is_gpu_missing else line
    if "OutOfMemoryError" in names or "DefaultCPUAllocator: can't allocate memory" in line:
        return f"out of memory: {line.splitlines()[0]}"  # where it was is in the report
    if (meaning := _describe_known(line)) is not None:
        return meaning
    if line.startswith("Caught ") and " in DataLoader worker process " in line.splitlines()[0]:
        return _read_worker_error(line, trusted) if isinstance(error, ValueError | TypeError | RuntimeError) else None
    if isinstance(error, PermissionError) and error.filename is not None and _comes_from(error, trusted):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    last = _find_last(error.__traceback__)
    if last is None or not _is_inside(last.tb_frame.f_code.co_filename, trusted):
        return None
    # Not the frame's own last instruction, which is that of a `finally` or `with` around the raise.
    raised_here = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    is_refusal = (raised_here or is_building) and isinstance(error, ValueError | TypeError | RuntimeError)
    return line if is_refusal or isinstance(error, FileNotFoundError | ImportError) else None


def _find_last(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _describe_known(line: str) -> str | None:
    """Return what some lines of others mean."""
    if killed := _KILLED_WORKER.search(line):
        return f"{killed[0]}: the kernel does so when host memory runs out; set num_workers of the data lower"
    if late := _LATE_CHECK.search(line):  # Lightning knows it once the data is there
        return (
            f"trainer.val_check_interval: got {late[1]}: an epoch has {late[2]} batches: set it to {late[2]} or less, "
            "or check_val_every_n_epoch: null, to count batches of all epochs"
        )
    if line == "Could not determine home directory.":  # of pathlib, also for the user in ~user
        return (
            "a path begins with ~, such as that of the cache (LIT_FSDP_CACHE), and no home folder is known for it: set "
            "HOME, or write the whole path"
        )
    if line.startswith("cannot load MPI library"):  # of mpi4py, seen in 4.1.2; Lightning expects an ImportError
        return (
            "mpi4py is installed, which Lightning asks for the ranks of mpirun, and it finds no MPI library: pip "
            "uninstall mpi4py, or put an MPI library where it looks, such as by LD_LIBRARY_PATH"
        )
    return None


def _read_worker_error(text: str, trusted: Iterable[str]) -> str | None:
    """Return what a worker of a DataLoader was refused with, out of the traceback that torch makes the message of."""
    *_, last = text.split("Traceback (most recent call last):\n")
    trace, _, said = re.split(r"^(?! ).*?(: |$)", last, maxsplit=1, flags=re.MULTILINE)
    *_, frame = trace.split('  File "')
    filename, _, code = frame.partition('"')
    raised_here = code.partition("\n    ")[2].startswith("raise ")
    return said.strip() if raised_here and _is_inside(filename, trusted) else None


def _comes_from(error: BaseException, packages: Iterable[str]) -> bool:
    """Whether packages have asked Python itself for what failed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and frames[-1].f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names:
        frames.pop()
    return bool(frames) and _is_inside(frames[-1].f_code.co_filename, packages)


def _is_inside(filename: str, packages: Iterable[str]) -> bool:
    if not Path(filename).is_absolute():  # of no file, such as <frozen posixpath>
        return False
    folders = [folder for package in packages for folder in getattr(sys.modules.get(package), "__path__", ())]
    # Of ours, two folders are links to their neighbours.
    roots = {Path(folder, name).resolve() for folder in folders for name in ("", "tasks", "callbacks")}
    return any(Path(filename).resolve().is_relative_to(root) for root in roots)
