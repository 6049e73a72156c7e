"""Ranks as forks of a process that has imported all they need: a run then costs its steps, not 10 s of imports a rank.

For CPUs only, as CUDA does not live on in forks. ``ForkServer`` starts this file under the Python of a variant; the
process imports, then forks the ranks of each order that it reads, and answers with their exit codes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MODULES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "transformers.trainer",
    "accelerate.utils",
    "peft",
    "bitsandbytes",
    "lightning.pytorch.strategies",
    "lit_fsdp.strategy.fsdp2",
    "lit_fsdp.tasks.text_task",
    "lit_fsdp.tasks.tts.task",
    "lit_fsdp.callbacks.report",
    "datasets",
    "trl.trainer.sft_trainer",
)
_MARK = "codes: "


class ForkServer:
    """A process that has imported; it ends with the ``with``."""

    def __init__(self, python: Path) -> None:
        command = [str(python), __file__]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
        )

    def run(
        self, script: str, order: Mapping[str, Any], ranks: Sequence[Mapping[str, str]], logs: Path, limit_s: float
    ) -> list[int]:
        """Fork a rank for each of these environments; return their exit codes.

        Args:
            script: A file of this folder, with a function ``be_rank``.
            order: What that takes.
            ranks: Variables of each.
            logs: What rank 0 prints goes into ``log.0`` there, and so on.
            limit_s: Ranks that take longer are killed, as are all when one fails.

        Raises:
            RuntimeError: The process has died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"script": script, "order": order, "ranks": ranks, "logs": str(logs), "limit_s": limit_s}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return list(json.loads(line.removeprefix(_MARK)))
        raise RuntimeError(f"the process that imports has died with exit code {self._process.wait()}")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def be_fork(script: str, order: Mapping[str, Any], environ: Mapping[str, str], log: Path) -> None:
    """Be one rank, and end."""
    code = 1
    try:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.update(environ)
        import_module(Path(script).stem).be_rank(order)  # only now: a script may read its rank as it is imported
        code = 0
    except BaseException:  # noqa: BLE001  a fork must never come back into the loop of its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(pids: Sequence[int], limit_s: float) -> list[int]:
    """Return exit codes; when one fails or time is up, the others are killed."""
    end = time.monotonic() + limit_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
        if any(codes.values()) or time.monotonic() > end:
            time.sleep(2)  # the others may be about to say why
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, 9)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def main() -> None:
    """Import, then fork as asked until there is nothing more to read."""
    for name in _MODULES:
        if find_spec(name.partition(".")[0]) is not None:  # not every Python has all
            import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank, environ in enumerate(job["ranks"]):
            if (pid := os.fork()) == 0:
                be_fork(job["script"], job["order"], environ, Path(job["logs"]) / f"log.{rank}")
            pids.append(pid)
        print(f"{_MARK}{json.dumps(wait_for(pids, job['limit_s']))}", flush=True)


if __name__ == "__main__":
    main()
