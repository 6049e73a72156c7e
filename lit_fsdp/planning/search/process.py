"""A search by traces in a process of its own: a run has ranks and perhaps CUDA, and what is traced is sharded.

A forked process could use neither, so it is a fresh one. What it is given goes there pickled: the module as it is
before sharding, without its Trainer, and with parameters that are all on the meta device.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lit_fsdp.planning.search.search import Candidate, Problem
from lit_fsdp.strategy.hang_watch import HangWatch
from lit_fsdp.strategy.processes import OTHER_VARIABLES

_WORKER = "lit_fsdp.planning.search.traced"
REQUEST, RESULT = "request.pkl", "result.pkl"  # files in the folder that the process is told
# Of launchers, which would make a rank of it.
_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"),
    *OTHER_VARIABLES.values(),
)


class NotPicklableError(ValueError):
    """A module cannot be given to another process; says why."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What is searched for, and the micro-batch that a trace needs besides."""

    problem: Problem  # of one variant, the module to trace
    batch: Any


class SearchProcess:
    """A search that runs beside this process; end it with :meth:`stop`.

    Args:
        request: From :func:`pack_request`.
    """

    def __init__(self, request: bytes) -> None:
        self._folder = TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / REQUEST).write_bytes(request)
        environ = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would make a context on every GPU
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # Its standard input is never written to: that it closes tells the process that this one has gone.
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(folder)], stdin=subprocess.PIPE, env=environ, start_new_session=True
        )

    def wait(self, timeout_s: float) -> list[Candidate] | str | None:
        """Return what was found, why nothing was, or ``None`` if it still searches after ``timeout_s``."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        try:
            found: list[Candidate] | str = pickle.loads(Path(self._folder.name, RESULT).read_bytes())
        except Exception:  # noqa: BLE001  damaged pickles raise anything, and the other ranks wait
            return f"the process that traces ended with exit code {code}, and left no result"
        return found

    def stop(self) -> None:
        """End the process, with those that it has started, and remove what it was given."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._folder.cleanup()


def pack_request(request: SearchRequest, trainer: object, settings: Mapping[str, Any]) -> bytes:
    """Return the bytes from which another process makes a request.

    Args:
        request: Of a module that is not sharded.
        trainer: Of the module; in the other process one of these ``settings`` takes its place.
        settings: Arguments of a Trainer.

    Raises:
        NotPicklableError: The module holds what cannot leave this process.
    """
    stream = BytesIO()
    packer = _Packer(stream, trainer)  # one for both, as one reads both
    try:
        packer.dump(dict(settings))
        packer.dump(request)
    except Exception as error:  # of any kind: objects say in their own ways that they cannot be pickled
        name = type(request.problem.variants[0].model.module).__name__
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise NotPicklableError(f"{name} cannot be copied to the process that would trace it ({reason})") from error
    return stream.getvalue()


class RequestReader(pickle.Unpickler):
    """Reads what :func:`pack_request` has packed: the settings first, then the request."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream)
        self.trainer: object = None  # to be set before the request is read

    def persistent_load(self, pid: Any) -> Any:
        """Return what stands for an object that stays in its process."""
        return self.trainer if pid == "trainer" else None


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # by value what a user's script has defined
    def __init__(self, stream: BytesIO, trainer: object) -> None:
        super().__init__(stream)
        self._trainer = trainer

    def persistent_id(self, obj: Any) -> str | None:
        if obj is self._trainer:
            return "trainer"
        return "none" if isinstance(obj, DeviceMesh | HangWatch) else None  # what holds groups of this process

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is nn.Parameter and not obj.is_meta:
            meta = nn.Parameter(torch.empty_like(obj, device="meta"), requires_grad=obj.requires_grad)
            meta.__dict__.update(obj.__dict__)
            return meta.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)
