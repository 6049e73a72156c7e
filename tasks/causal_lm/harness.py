"""A language model measured by lm-evaluation-harness, sharded where one device is too small for it.

Note [Ranks that answer alike]: every rank puts the same requests through the model, each time with its own part of the
weights. So gathers meet, whatever a task asks for, and all ranks come to the same result. More ranks take memory off
each, not time.
"""

from __future__ import annotations

import io
import logging
import sys
from contextlib import nullcontext, redirect_stderr
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_fsdp.errors import ConfigError, get_first_line, suggest
from lit_fsdp.tasks.causal_lm.opened import OpenedLM, open_tokenizer
from lit_fsdp.tasks.loading import get_data


def find_tasks(names: list[str], include_path: str | None) -> Any:
    """Return what lm-evaluation-harness loads tasks with; refuse a task that it has not.

    Args:
        names: Of tasks, groups or tags, or patterns of them.
        include_path: A folder with the YAML files of more tasks.

    Raises:
        ValueError: There is no such task.
        ConfigError: The package lm_eval is missing.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ConfigError(f'evaluate needs the package {error.name}: pip install "lit_fsdp[eval]"') from None
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    if include_path is not None:  # the harness's own are thousands of files to look through
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(manager.match_tasks([name]) for name in names):
            return manager
    manager = TaskManager(include_path=include_path)
    for name in names:
        if not manager.match_tasks([name]):
            hint = suggest(name, manager.all_tasks, "lm_eval --tasks list names all")
            raise ValueError(f"tasks: got {name!r}: no such task: {hint}; include_path takes a folder of your own")
    return manager


class HarnessLM(OpenedLM):
    """A language model that is there already, whose ``predict`` measures it by tasks of lm-evaluation-harness.

    See Note [Ranks that answer alike].

    Args:
        tasks: Their names.
        include_path: A folder with the YAML files of more tasks.
        num_fewshot: Examples before each question; what the task says if not given.
        limit: Questions of each task.
        batch_size: Rows at once.
        apply_chat_template: Whether questions are put as messages of a chat.
        options: Of ``OpenedLM``.
    """

    def __init__(
        self,
        *,
        tasks: list[str],
        include_path: str | None = None,
        num_fewshot: int | None = None,
        limit: int | None = None,
        batch_size: int = 8,
        apply_chat_template: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.tasks, self.include_path = tasks, include_path
        self.num_fewshot, self.limit = num_fewshot, limit
        self.batch_size, self.apply_chat_template = batch_size, apply_chat_template
        self.results: dict[str, Any] | None = None

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Measure, once: the batch says nothing."""
        from datasets.exceptions import DatasetsError
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        device = self.device

        class ShardedLM(HFLM):  # type: ignore[misc]  # it has no types
            @property
            def device(self) -> torch.device:
                """Return where the model computes, which with offload is not where its weights lie."""
                return device

        manager = find_tasks(self.tasks, self.include_path)
        tokenizer = open_tokenizer(self.source)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # advice for models that it loads itself
        # One rank shows how far it is, to somebody who sees it.
        is_seen = self.trainer.is_global_zero and sys.stderr.isatty()
        with nullcontext() if is_seen else redirect_stderr(io.StringIO()):
            model = ShardedLM(pretrained=self.model, tokenizer=tokenizer, batch_size=self.batch_size)
            try:
                self.results = simple_evaluate(
                    model,
                    tasks=self.tasks,
                    num_fewshot=self.num_fewshot,
                    limit=self.limit,
                    apply_chat_template=self.apply_chat_template,
                    task_manager=manager,
                    log_samples=False,
                )
            except (ConnectionError, FileNotFoundError, DatasetsError) as error:  # FileNotFoundError: no cache either
                first = get_first_line(error)
                raise ValueError(
                    f"tasks: got {', '.join(self.tasks)}: their data cannot be had: {first}; fetch it where the Hub "
                    "can be reached, or give tasks of your own by include_path"
                ) from error
        return {}


class HarnessData(LightningDataModule):
    """One empty batch for each rank: tasks bring their own data. Ranks that share rows get it together."""

    @override
    def predict_dataloader(self) -> DataLoader[int]:
        ranks: Any = range(get_data(self.trainer).count)
        return DataLoader(ranks, batch_size=1)
