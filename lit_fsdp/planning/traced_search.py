"""Traces what a search tries, where the closed form has no rules: each step in a process of its own."""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from lit_fsdp.errors import ConfigError
from lit_fsdp.planning.dry_run import TracedStep
from lit_fsdp.planning.estimate import ModelToTrain
from lit_fsdp.planning.forecast import measure_batch
from lit_fsdp.planning.planner import COUNTED_SHARE, PlannedStep, trace_exactly
from lit_fsdp.sharding.settings import Settings


def make_tracer(
    steps: Sequence[PlannedStep], data: Any, *, who: str = "search"
) -> Callable[[ModelToTrain, Settings, int, int], TracedStep]:
    """Return what traces a step of one of these models, for ``Problem.trace``.

    Args:
        steps: One for each model of the search, whose modules stay as they are.
        data: The data module, whose ``batch_size`` is set where rows are not those of the steps; ``None`` if they
            always are, as where the module does not say how many those are.
        who: Searches, for the line that each trace prints.
    """
    by_module = {id(step.module): step for step in steps}
    traced: dict[str, TracedStep] = {}

    def trace(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> TracedStep:
        key = f"{id(model.module)} {model.optimizer} {settings} {rows} {num_micro_batches}"
        if key not in traced:
            step = replace(by_module[id(model.module)], num_micro_batches=num_micro_batches)
            begin = time.monotonic()
            traced[key] = _run_apart(lambda: _trace(step, model, settings, rows, data), who)
            peak_gib, seconds = traced[key].memory.peak.num_bytes / 2**30, time.monotonic() - begin
            print(f"{who}: traced {len(traced)}: {peak_gib:.2f} GiB, in {seconds:.1f} s", file=sys.stderr, flush=True)
        return traced[key]

    return trace


def _trace(step: PlannedStep, model: ModelToTrain, settings: Settings, rows: int, data: Any) -> TracedStep:
    module: Any = step.module
    step.strategy.settings = settings
    if hasattr(module, "optimizer_settings"):
        module.optimizer_settings = model.optimizer
    if data is not None and measure_batch(module, step.batch).rows != rows:
        data.batch_size = rows
        step = replace(step, batch=data.make_example_batch())
    ranks = step.ranks
    replicas, shards = settings.mesh.resolve(world_size=ranks.world_size, ranks_per_node=ranks.per_node)
    traced = trace_exactly(replace(step, ranks=replace(ranks, num_replicas=replicas, num_shards=shards)))
    return replace(traced, moved_bytes=int(traced.moved_bytes * COUNTED_SHARE))


def _run_apart(work: Callable[[], TracedStep], who: str) -> TracedStep:
    """Return what ``work`` does, in a forked process: a trace shards its module, and torch keeps layouts of its ranks.

    Raises:
        ConfigError: ``work`` did, or the process was ended.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, who))
    process.start()
    sender.close()
    try:
        found: TracedStep | ConfigError = receiver.recv()
    except EOFError:
        process.join()
        raise ConfigError(f"{who}: a trace ended with exit code {process.exitcode}") from None
    process.join()
    if isinstance(found, ConfigError):
        raise found
    return found


def _send(sender: Connection, work: Callable[[], TracedStep], who: str) -> None:
    warnings.simplefilter("ignore")  # who builds the module has said them
    try:
        sender.send(work())
    except ConfigError as error:
        sender.send(error)
    except Exception as error:  # noqa: BLE001  for the search to raise
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        sender.send(ConfigError(f"{who}: a trace failed, see the traceback above ({reason})"))
