"""Keeps out of the terminal what libraries say that a run makes no use of."""

from __future__ import annotations

import logging
import re
import warnings

from lit_fsdp.errors import is_debugging

_KNOWN_WARNINGS = (
    ".*LightningCLI's args parameter.*",  # advice for scripts
    ".*Experiment logs directory .* exists and is not empty.*",  # meant: both loggers share it
    ".*torch.distributed.nn.functional.all_gather.*",  # Lightning's own call, seen in 2.6.6
    ".*isinstance\\(treespec, LeafSpec\\).*",  # likewise
    "The `srun` command is available on your system.*",  # a job that needs it is refused without, see slurm.py
    "Since DeepSpeed handles gradient clipping internally.*",  # so our tasks leave it to DeepSpeed
    "The dirpath has changed from .*",  # meant: each run has its own folder
    "Your `IterableDataset` has `__len__` defined.*",  # that of a stream is the same for any number of workers
)
# Lines of Lightning that say what the configuration or the summary does, or nothing: the one line that counts is below.
_BANNERS = re.compile(
    r"(\[rank: \d+\] )?"
    r"(Seed set to|[GTH]PU available|Initializing distributed:|-+\ndistributed_backend=|LOCAL_RANK: |.{0,4}Tip: |"
    r"`Trainer(\.\w+` stopped: `max_(steps|epochs)=|\(\w+=.+\)` was configured)|Loading `train_dataloader` to estimate|"
    r"Restoring states from the checkpoint path)"  # another line says when that is done
)


def hide_warnings() -> None:
    """Keep warnings of libraries out of the terminal that a run of ours makes no use of."""
    for known in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)


def hide_banners() -> None:
    """Keep lines of Lightning out of the terminal that say what the configuration does."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("lightning.")]:
        logging.getLogger(name).addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return is_debugging() or record.levelno > logging.INFO or not _BANNERS.match(record.getMessage())
