"""The ranks of a notebook: forks of its kernel, which cannot be one of them and go on afterwards."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy

# Private, seen in lightning 2.6.6: the launcher of ddp_notebook, which hands whole weights back to the kernel.
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

PATIENCE_S = 15.0  # seconds
_TRAINED: WeakSet[LightningModule] = WeakSet()  # in ranks that have ended


def is_notebook() -> bool:
    """Whether a user waits for this process, which cannot be started again for each rank as a script can."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)  # as Lightning asks


class NotebookLauncher(_MultiProcessingLauncher):
    """Forks all ranks of this machine from the kernel, and waits for them.

    What comes back are metrics, results and the path of the best checkpoint. Weights do not: whole, they may be more
    than this machine has room for. The module of the kernel stays as it was.
    """

    def __init__(self, strategy: ParallelStrategy, *, num_nodes: int) -> None:
        super().__init__(strategy, start_method="fork")
        self._num_nodes = num_nodes
        self._check()

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function of the Trainer in all ranks.

        Raises:
            ValueError: The ranks could not be started from here.
            RuntimeError: The user has interrupted them.
        """
        self._check()
        self._already_fit = False  # Lightning refuses a second fit, after which the kernel would have old weights
        try:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        except KeyboardInterrupt:
            self._end_ranks()
            _note_trained(trainer)
            # Not the same again: Lightning would answer it by ignoring any later one, and by leaving the kernel.
            raise RuntimeError("interrupted: all ranks have ended") from None
        _note_trained(trainer)
        return result

    def _check(self) -> None:
        if self._num_nodes > 1:
            raise ValueError(
                f"num_nodes: got {self._num_nodes}: a notebook starts the ranks of its own machine only; set 1, or "
                "run a script under torchrun"
            )
        uses_gpu = self._strategy.root_device.type == "cuda" and torch.cuda.is_initialized()
        if uses_gpu or dist.is_initialized():
            count = len(self._strategy.parallel_devices or ())
            what = "has used a GPU already" if uses_gpu else "holds the process group of a run with devices=1"
            raise ValueError(
                f"devices: got {count}: this kernel {what}, which its forks cannot share: "
                "restart it and start with these devices, or set devices=1"
            )

    def _end_ranks(self) -> None:
        """Give ranks, which an interrupted kernel interrupts too, time to end; kill those that do not."""
        deadline = time.monotonic() + PATIENCE_S
        for process in self.procs:
            process.join(timeout=max(deadline - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                process.join()

    @override
    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        self.procs = []  # of an earlier run, none of them this rank's
        os.environ["LOCAL_RANK"] = str(process_idx)
        self._strategy.set_world_ranks()  # type: ignore[attr-defined]  # now, as every rank would print until then
        super()._wrapping_function(process_idx, *args, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        if not trainer.is_global_zero:
            return None
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))


def _note_trained(trainer: Trainer | None) -> None:
    if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
        _TRAINED.add(trainer.lightning_module)


def check_weights(trainer: Trainer) -> None:
    """Refuse to evaluate a module whose trained weights have ended with the ranks of a notebook. Once all is loaded.

    Raises:
        ValueError: With the argument that loads them.
    """
    if trainer.lightning_module not in _TRAINED:
        return
    if trainer.ckpt_path is None and trainer.state.fn != TrainerFn.FITTING:
        raise ValueError(
            'ckpt_path: not given: the trained weights ended with the ranks that had them; give "best", "last" or the '
            "path of a checkpoint"
        )
    _TRAINED.discard(trainer.lightning_module)  # in this process, which has weights now
    if trainer.ckpt_path is None:
        rank_zero_warn("fit starts from the beginning: the trained weights ended with their ranks; ckpt_path goes on")


def refuse_lost_weights(module: LightningModule) -> None:
    """Refuse to save, from the kernel of a notebook, a module whose trained weights have ended with its ranks.

    Raises:
        ValueError: With what saves them.
    """
    if module in _TRAINED:
        raise ValueError(
            "save_checkpoint: the trained weights ended with the ranks that had them: take a checkpoint that "
            "ModelCheckpoint saved while they trained"
        )
