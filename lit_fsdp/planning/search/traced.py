"""Searches by traces, where the closed form has no rules: for ``plan``, and as the process that ``fsdp2_auto`` starts.

Each step is traced in a process of its own, as a trace shards its module and torch keeps layouts of its ranks.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule

from lit_fsdp.errors import ConfigError
from lit_fsdp.planning.auto_strategy import NAME
from lit_fsdp.planning.planned_step import PlannedGpu, PlannedStep, PlannedTrainer, describe_step, enter_fit
from lit_fsdp.planning.search.process import REQUEST, RESULT, RequestReader, SearchRequest
from lit_fsdp.planning.search.search import Candidate, search
from lit_fsdp.planning.step_parts import ModelToTrain
from lit_fsdp.planning.trace.apart import print_error, run_apart
from lit_fsdp.planning.trace.dry_run import TracedStep
from lit_fsdp.planning.trace.exact_trace import unfold_step
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy


def make_tracer(
    steps: Sequence[PlannedStep], data: Any, *, who: str = "search", numbers: Iterator[int] | None = None
) -> Callable[[ModelToTrain, Settings, int, int], TracedStep]:
    """Return what traces a step of one of these models, for ``Problem.trace``.

    Args:
        steps: One for each model of the search, whose modules stay as they are.
        data: The data module, whose ``batch_size`` is set where it is another; ``None`` if they
            always are, as where the module does not say how many those are.
        who: Searches, for the line that each trace prints.
        numbers: Of the traces, for that line; from 1 by default.
    """
    by_module = {id(step.module): step for step in steps}
    traced: dict[str, TracedStep] = {}
    numbers = count(1) if numbers is None else numbers

    def trace(model: ModelToTrain, settings: Settings, size: int, num_micro_batches: int) -> TracedStep:
        key = f"{id(model.module)} {model.optimizer} {settings} {size} {num_micro_batches}"
        if key not in traced:
            step = replace(by_module[id(model.module)], num_micro_batches=num_micro_batches)
            begin = time.monotonic()
            traced[key] = run_apart(lambda: _trace(step, model, settings, size, data, who), who)
            peak_gib, seconds = traced[key].memory.peak.num_bytes / 2**30, time.monotonic() - begin
            print(f"{who}: traced {next(numbers)}: {peak_gib:.2f} GiB, in {seconds:.1f} s", file=sys.stderr, flush=True)
        return traced[key]

    return trace


def answer(packed: bytes) -> list[Candidate] | str:
    """Return what a search finds, or in one line why it cannot."""
    try:
        reader = RequestReader(BytesIO(packed))
        trainer = reader.trainer = _build_trainer(reader.load())
        request: SearchRequest = reader.load()
        module = request.problem.variants[0].model.module
        assert isinstance(module, LightningModule)
        enter_fit(trainer, module)
        module.train()
        step = describe_step(trainer, module, request.batch)
        return search(replace(request.problem, trace=make_tracer([step], None, who=NAME)))
    except ConfigError as error:
        return error.line.removeprefix("plan: ").removeprefix(f"{NAME}: ")
    except Exception as error:  # noqa: BLE001  for the run to raise
        return f"{print_error(error)}, see the traceback above"


def _trace(step: PlannedStep, model: ModelToTrain, settings: Settings, size: int, data: Any, who: str) -> TracedStep:
    module: Any = step.module
    step.strategy.settings = settings
    if hasattr(module, "optimizer_settings"):
        module.optimizer_settings = model.optimizer
    if getattr(data, "batch_size", size) != size:
        data.batch_size = size
        step = replace(step, batch=data.make_example_batch())
    return unfold_step(step, who=who)


def _build_trainer(settings: Mapping[str, Any]) -> PlannedTrainer:
    given = dict(settings)
    accelerator = "cpu" if given.pop("device_type") == "cpu" else PlannedGpu()
    return PlannedTrainer(
        accelerator=accelerator,
        strategy=FSDP2Strategy(mixed_precision=given.pop("mixed_precision")),
        plugins=[LightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def _end_with_parent(folder: Path) -> None:
    os.read(0, 1)  # returns when the run has ended, however it did
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _main(folder: Path) -> None:
    """Search for what the request in a folder says, and leave the result there, or why there is none."""
    Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    warnings.simplefilter("ignore")  # the run has its own
    # Of the latter's messages, the one about a package that only 4-bit weights on CPUs would gain from, see main.py.
    for name in ("lightning.pytorch.utilities.rank_zero", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = answer((folder / REQUEST).read_bytes())
    part = folder / "part"
    part.write_bytes(pickle.dumps(found))
    part.rename(folder / RESULT)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
