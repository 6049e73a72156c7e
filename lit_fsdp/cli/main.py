"""The front door: picks the command, and ends every failure a user can fix in one line.

Nothing heavy is imported here: ``--help``, ``--version`` and a mistyped command answer before torch loads.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lit_fsdp.cli.launch_variables import check_launch_variables, drop_stale_variables
from lit_fsdp.cli.messages import describe_exception, is_refusal, print_traceback, redact_logs, report_error
from lit_fsdp.errors import ConfigError, get_first_line, is_debugging, suggest


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand.

    Args:
        summary: Its line in ``--help``.
        entry: ``module:function`` of what runs it, imported only when asked for. The function takes the whole
            argument list, the command's name first.
        has_ranks: Whether it may be one of the processes that a launcher has started.
    """

    summary: str
    entry: str
    has_ranks: bool = False


_FOLDER_GONE = "the current folder was removed: change to one that is there, also where a new one has its name"

_TRAINER = "lit_fsdp.cli.train:run_trainer"

COMMANDS: dict[str, Command] = {
    "fit": Command(summary="Train, from the start or from --ckpt_path.", entry=_TRAINER, has_ranks=True),
    "validate": Command(summary="Measure on the validation data.", entry=_TRAINER, has_ranks=True),
    "test": Command(summary="Measure on the test data.", entry=_TRAINER, has_ranks=True),
    "predict": Command(summary="Run the model over the predict data.", entry=_TRAINER, has_ranks=True),
    "chat": Command(
        summary="Talk to the model of a run, a checkpoint, a folder or the Hub.",
        entry="lit_fsdp.cli.chat:run_chat",
    ),
    "generate": Command(
        summary="Answer a file of prompts with such a model, on all GPUs.",
        entry="lit_fsdp.cli.generate:run_generate",
        has_ranks=True,
    ),
    "export": Command(
        summary="Write the model of a checkpoint for Transformers and other tools.",
        entry="lit_fsdp.cli.export:run_export",
    ),
    "plan": Command(
        summary="Tell what a run will take of GPUs, host and network, without any of them.",
        entry="lit_fsdp.cli.plan:run_plan",
    ),
    "preview": Command(
        summary="Show rows of text as the model sees them, and which tokens are learned.",
        entry="lit_fsdp.cli.preview:run_preview",
    ),
    "prepare": Command(
        summary="Turn data into what a task trains on: `prepare tts` audio files into codes.",
        entry="lit_fsdp.cli.prepare:run_prepare",
    ),
    "speak": Command(
        summary="Turn text into WAV files with a speech model.",
        entry="lit_fsdp.cli.speak:run_speak",
    ),
    "export-voice": Command(
        summary="Write the model of a speech checkpoint for qwen-tts, with its voices built in.",
        entry="lit_fsdp.cli.speak:run_export_voice",
    ),
    "evaluate": Command(
        summary="Measure a language model by tasks of lm-evaluation-harness.",
        entry="lit_fsdp.cli.evaluate:run_evaluate",
        has_ranks=True,
    ),
    "bench": Command(
        summary="Measure links (`bench comm`), more ranks (`bench scaling`) or other strategies (`bench strategies`).",
        entry="lit_fsdp.cli.bench:run_bench",
        has_ranks=True,
    ),
    "doctor": Command(
        summary="Tell what this machine has and what is missing, to paste into an issue.",
        entry="lit_fsdp.cli.doctor:run_doctor",
    ),
    "schema": Command(
        summary="Print a JSON schema of all YAML keys, with which editors complete and check them.",
        entry="lit_fsdp.cli.schema:run_schema",
    ),
    "completion": Command(
        summary="Print what lets a shell complete commands and options: `completion bash`, `completion zsh`.",
        entry="lit_fsdp.cli.completion:run_completion",
    ),
}

_HELP = """\
usage: python -m lit_fsdp COMMAND [--config FILE ...] [--KEY=VALUE ...]

Sharded training (FSDP2) with PyTorch Lightning.

commands:
{commands}

Every setting is a YAML key and a dotted option of the same name. Several --config files merge, the later
one wins; options win over files. `python -m lit_fsdp fit --help` lists all keys.

examples:
  python -m lit_fsdp fit --config run.yaml
  python -m lit_fsdp fit --config run.yaml --config gpu.yaml --trainer.max_steps=100
  torchrun --nproc-per-node=4 -m lit_fsdp fit --config run.yaml
  python -m lit_fsdp fit --config run.yaml --launcher ray --address host:6379
  python -m lit_fsdp export --checkpoint runs/run --out folder

options:
  -h, --help     Show this help and exit.
  --version      Show the version and exit.

environment:
  LIT_FSDP_DEBUG=1   Show the traceback of every error, also of those that print as one line."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process.

    0 is success, 2 a command line or configuration that is wrong, 1 everything else. An error that is neither
    the configuration's nor raised by our own code on purpose leaves with its traceback.

    Args:
        args: The command line without the program's name; ``None`` reads ``sys.argv``.
    """
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print(format_help())
        return 0
    if args[0] == "--version":
        print(f"lit_fsdp {importlib.import_module('lit_fsdp').__version__}")
        return 0
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # of all libraries, here and in ranks; tqdm reads it when imported
    try:
        _import_from_current_folder()
        return _run_command(args)
    except ConfigError as error:
        if is_debugging():
            print_traceback(type(error), error, error.__traceback__)
        _report_once(error.line)
        return 2
    except KeyboardInterrupt:
        if not is_debugging():
            sys.excepthook = _report_interruption  # Python then ends as Ctrl-C ends a process, which shells look at
        raise
    except SystemExit as stop:  # --help and --print_config of a command end this way
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _leave_closed_output():
            return 1
        # In a folder that is gone nothing else that failed can be described.
        line = f"{_FOLDER_GONE} ({get_first_line(error)})" if _is_folder_gone() else describe_exception(error)
        if line is None or is_debugging():
            raise
        _report_once(line)
        return 2 if is_refusal(error) else 1  # what the user gave, or what failed


def format_help() -> str:
    """List the commands that exist, on one screen."""
    width = max(map(len, COMMANDS)) + 2
    return _HELP.format(commands="\n".join(f"  {name:{width}}{c.summary}" for name, c in COMMANDS.items()))


def _run_command(args: list[str]) -> int:
    name = args[0]
    if name.startswith("-"):
        raise ConfigError(f"{name}: an option before the command: expected {', '.join(COMMANDS)} first")
    if name not in COMMANDS:
        hint = suggest(name, COMMANDS, f"expected one of {', '.join(COMMANDS)}")
        raise ConfigError(f"{name}: unknown command: {hint}")
    # Libraries read them while they are imported.
    if COMMANDS[name].has_ranks:
        check_launch_variables(os.environ)
    else:
        drop_stale_variables(os.environ)
    # Of an extra package that only 4-bit weights on CPUs would gain from; seen in bitsandbytes 0.50.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_missing_kernel)
    module, function = COMMANDS[name].entry.split(":")
    run = getattr(_import_fast(module), function)
    redact_logs()
    code = run(args)
    return int(code or 0)


def _leave_closed_output() -> bool:
    """Whether nobody reads what is printed any more, as behind ``| head``; then nothing is written there again."""
    try:
        sys.stdout.flush()
        poll = select.poll()  # where Python holds nothing back, there is nothing left to flush
        poll.register(sys.stdout.fileno(), 0)
        if not poll.poll(0):
            return False
    except BrokenPipeError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _report_interruption(*_: object) -> None:
    report_error("ended by Ctrl-C")


def _report_once(line: str) -> None:
    """Report an error, unless torchrun or SLURM has started this process and the first of its ranks says the same."""
    is_one_of_many = "TORCHELASTIC_USE_AGENT_STORE" in os.environ or "SLURM_STEP_ID" in os.environ
    is_early = is_one_of_many and not is_debugging()
    share = importlib.import_module("lit_fsdp.strategy.roll_call").share_refusal if is_early else None
    if share is None or not share(line, patience_s=5.0, say=report_error):
        report_error(line)


def _is_no_missing_kernel(record: logging.LogRecord) -> bool:
    return "Failed to load CPU gemm_4bit_forward" not in record.getMessage()


def _import_fast(name: str) -> ModuleType:
    """Import without looking for garbage in between, which takes a second of six; then set aside what stays."""
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(_unfreeze)
    return module


def _unfreeze() -> None:
    """Look for garbage again at the end, which takes a second: else Triton prints all it has as leaked.

    Seen in Triton 3.9, which torch 2.15 for CUDA brings.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


def _is_folder_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _import_from_current_folder() -> None:
    """Let ``class_path: mytask.MyTask`` find ``mytask.py`` here, also from the console script."""
    if _is_folder_gone():
        raise ConfigError(_FOLDER_GONE)
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
