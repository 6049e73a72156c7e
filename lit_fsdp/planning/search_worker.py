"""The process in which ``fsdp2_auto`` searches by traces: started by ``SearchProcess``, one for a search."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule

from lit_fsdp.errors import ConfigError
from lit_fsdp.planning.auto_strategy import NAME
from lit_fsdp.planning.planned_trainer import PlannedGpu, PlannedTrainer
from lit_fsdp.planning.planner import describe_step, enter_fit
from lit_fsdp.planning.search import Candidate, search
from lit_fsdp.planning.search_process import REQUEST, RESULT, RequestReader, SearchRequest
from lit_fsdp.planning.traced_search import make_tracer
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy


def main(folder: Path) -> None:
    """Search for what the request in a folder says, and leave the result there, or why there is none.

    Args:
        folder: Where the request is.
    """
    Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    warnings.simplefilter("ignore")  # the run has its own
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = answer((folder / REQUEST).read_bytes())
    part = folder / "part"
    part.write_bytes(pickle.dumps(found))
    part.rename(folder / RESULT)


def answer(packed: bytes) -> list[Candidate] | str:
    """Return what a search finds, or in one line why it cannot.

    Args:
        packed: From ``pack_request``.
    """
    try:
        reader = RequestReader(BytesIO(packed))
        trainer = reader.trainer = _build_trainer(reader.load())
        return _search(reader.load(), trainer)
    except ConfigError as error:
        return error.line.removeprefix("plan: ").removeprefix(f"{NAME}: ")
    except Exception as error:  # noqa: BLE001  for the run to raise
        traceback.print_exc()
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}, see the traceback above"


def _search(request: SearchRequest, trainer: PlannedTrainer) -> list[Candidate]:
    problem = request.problem
    module = problem.variants[0].model.module
    assert isinstance(module, LightningModule)
    enter_fit(trainer, module)
    module.train()
    step = describe_step(trainer, module, request.batch)
    return search(replace(problem, trace=make_tracer([step], None, who=NAME)))


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
