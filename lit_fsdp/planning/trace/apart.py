"""Runs a trace in a forked process: it shards its module and torch keeps layouts of its ranks, and both end with it."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from lit_fsdp.errors import ConfigError

T = TypeVar("T")


def run_apart(work: Callable[[], T], who: str) -> T:
    """Return what ``work`` does, in a forked process.

    Raises:
        ConfigError: ``work`` did, or the process was ended.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, who))
    process.start()
    sender.close()
    try:
        found: T | ConfigError = receiver.recv()
    except EOFError:
        process.join()
        raise ConfigError(f"{who}: a trace ended with exit code {process.exitcode}") from None
    process.join()
    if isinstance(found, ConfigError):
        raise found
    return found


def print_error(error: Exception) -> str:
    """Print a traceback, and return the error on one line."""
    traceback.print_exc()
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _send(sender: Connection, work: Callable[[], object], who: str) -> None:
    gc.freeze()  # what has threads, as a process group of gloo, would wait for them where it is collected
    warnings.simplefilter("ignore")  # who builds the module has said them
    torch.set_num_threads(1)  # others do not outlive a fork
    try:
        sender.send(work())
    except ConfigError as error:
        sender.send(error)
    except Exception as error:  # noqa: BLE001  for the search to raise
        sender.send(ConfigError(f"{who}: a trace failed, see the traceback above ({print_error(error)})"))
