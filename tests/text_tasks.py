"""Trains tasks over text on forked ranks: interrupted or not, exported afterwards, and what is compared."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from training import OPTIMIZER, Recorder, Result, build_trainer, gather_weights

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import LRSchedule, TextTask, TrainTokenizer
from lit_fsdp.tasks.text.tokenizer import train_tokenizer
from ranks import run_ranks

VOCAB_SIZE, SAVED = 300, 3  # steps before a checkpoint
# 34 rows of embeddings are no multiple of what 2 ranks share: 17 heads of 2 would be no model.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}
BERT = {"model_type": "bert", **SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Attends in a way of its own, which torch's sdpa does not have.
DEBERTA = {**BERT, "model_type": "deberta-v2", "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
LLAMA = {"model_type": "llama", **SIZES, "num_key_value_heads": 3, "head_dim": 12}
MODERNBERT = {"model_type": "modernbert", **SIZES, "global_attn_every_n_layers": 2, "local_attention": 8}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as JSON lines; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save_tokenizer(folder: Path, texts: list[str]) -> str:
    """Write a small tokenizer with a mask token; return the folder."""
    tokenizer = train_tokenizer(texts, TrainTokenizer(vocab_size=VOCAB_SIZE, mask_token=True))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(str(folder))
    return str(folder)


class SaveOnce(pl.Callback):
    """Saves a checkpoint in the middle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path)


def _fit(out: Path, build: Callable[[], tuple[TextTask, Any]], source: Path | None, options: dict[str, Any]) -> None:
    recorder = Recorder()
    callbacks = [recorder, *([] if source else [SaveOnce(out / "middle.ckpt")])]
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=callbacks, **options)
    task, data = build()
    task.optimizer_settings, task.lr_scheduler = OPTIMIZER, LRSchedule(type="constant")
    trainer.fit(task, datamodule=data, ckpt_path=None if source is None else str(source))
    recorder.result.weights = gather_weights(task)
    if source is None:
        trainer.save_checkpoint(out / "last.ckpt")
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save((vars(recorder.result), metrics), out / "result.pt")


def train(
    out: Path,
    build: Callable[[], tuple[TextTask, Any]],
    *,
    world_size: int = 2,
    source: Path | None = None,
    **options: Any,
) -> tuple[Result, dict[str, float]]:
    """Train on forked ranks, and return the result and the last metrics; leaves ``middle.ckpt`` and ``last.ckpt``.

    Args:
        out: Folder for what is left.
        build: Called on each rank; returns the task and its data.
        world_size: How many ranks.
        source: A checkpoint to go on from.
        options: Of the Trainer.
    """
    out.mkdir(exist_ok=True)
    run_ranks(_fit, out, build, source, options, world_size=world_size)
    result, metrics = torch.load(out / "result.pt")
    return Result(**result), metrics
