"""The data module of a run, and what it may say of itself beside its loaders.

Note [What data says]: any ``LightningDataModule`` trains, and so do plain loaders. Each of these adds something where a
data module has it, under the names that ``TaskData`` and the classes below it give them:

- ``batch_size``, ``eval_batch_size``, ``global_batch_size``, ``share``: rows of a step, and how ranks share them
- ``is_endless``, ``repeats_rows``, ``has_changing_lengths``: what its batches are like
- ``tokenizer``, ``seq_length``, ``packing``: of text; ``problem_type``, ``classes``: of labels; ``preprocessing``,
  ``count_classes()``: of images; ``check_rows()``, ``attach()``, ``pick_validation()``, ``restore_voices()``: of speech
- ``check_stage()``: refuses what is missing before ranks start; ``make_ray_datasets()``: what Ray streams
- ``make_example_batch()``: for plans; ``make_preview()``: for ``preview``; ``make_section()``: for the report
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def get_data_module(trainer: Trainer) -> Any:
    """Return the data module of a run, or ``None`` for plain loaders; see Note [What data says]."""
    return trainer.datamodule  # type: ignore[attr-defined]  # set by its data connector
