"""Trains a tiny language model under the Trainer on forked ranks, and in a plain torch loop to compare with."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from differences import find_largest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy, Mesh
from lit_fsdp.tasks import CausalLM, LRSchedule, Optimizer
from lit_fsdp.tasks.loading import build_train_loader
from ranks import run_ranks

NUM_STEPS, GLOBAL_BATCH, LENGTH = 8, 8, 16
EVEN = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
# No size divides by 2 or 4, and 67 rows leave the last of 4 ranks fewer than the others.
UNEVEN = {"vocab_size": 67, "hidden_size": 33, "intermediate_size": 49, "num_attention_heads": 3, "head_dim": 10}
TIED = {**EVEN, "tie_word_embeddings": True}
# Rounding differs between 1 and N ranks; a larger eps keeps Adam from blowing up the sign of a gradient near 0.
OPTIMIZER = Optimizer(learning_rate=1e-3, weight_decay=0.1, eps=1e-4)


@dataclass
class Result:
    """What a run leaves behind."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Environment(LightningEnvironment):
    """Ranks that exist already, as under torchrun."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()


class Recorder(pl.Callback):
    """Keeps the loss and gradient norm of every step."""

    reads_weights = False

    def __init__(self) -> None:
        self.result = Result()
        self._first = 0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._first = trainer.global_step - len(self.result.losses)

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        self._read(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._read(trainer)

    def _read(self, trainer: pl.Trainer) -> None:
        if trainer.global_step > self._first + len(self.result.losses):
            self.result.losses.append(float(trainer.callback_metrics["train/loss"]))
            self.result.grad_norms.append(float(trainer.callback_metrics["train/grad_norm"]))


def make_rows(vocab_size: int, num_rows: int = NUM_STEPS * GLOBAL_BATCH) -> list[dict[str, Tensor]]:
    """Return rows with between 1 and all of their tokens as targets, so that a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(num_rows):
        ids = torch.randint(vocab_size, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: (i * 5) % (LENGTH - 1)] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Rows(pl.LightningDataModule):
    """The rows of ``make_rows`` in global order."""

    def __init__(
        self, vocab_size: int, batch_size: int, num_rows: int = NUM_STEPS * GLOBAL_BATCH, share: Any = None
    ) -> None:
        super().__init__()
        self.vocab_size, self.batch_size, self.num_rows, self.share = vocab_size, batch_size, num_rows, share

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's share."""
        rows = make_rows(self.vocab_size, self.num_rows)
        return build_train_loader(
            rows,
            batch_size=self.batch_size,
            collate=collate,
            shuffle=False,
            trainer=self.trainer,
            share=self.share,
        )


def save_model(folder: Path, **config: Any) -> Path:
    """Write a random model that every run starts from."""
    torch.manual_seed(1)
    options = {"model_type": "llama", "num_hidden_layers": 3, "max_position_embeddings": 64, **config}
    settings = AutoConfig.for_model(**options)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    return folder


def train_stock(
    model: nn.Module,
    compute_loss: Callable[[int], Tensor],
    *,
    num_steps: int = NUM_STEPS,
    clip_norm: float | None = 1.0,
    clip_value: float | None = None,
) -> Result:
    """Train on one device without Lightning, FSDP or our task: the truth all runs are compared with.

    Args:
        model: Of which all is trained that is not frozen.
        compute_loss: Returns the loss of a step, by its number; without a graph if it has run backward itself.
        num_steps: How many steps.
        clip_norm: Largest norm of the gradients.
        clip_value: Largest value of a gradient.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices, vectors = ([p for p in trained.values() if (p.ndim >= 2) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=OPTIMIZER.resolve_rate(), eps=OPTIMIZER.eps)
    result = Result()
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = compute_loss(step)
        if loss.requires_grad:
            loss.backward()
        result.losses.append(float(loss.detach()))
        result.grad_norms.append(float(nn.utils.clip_grad_norm_(trained.values(), clip_norm or float("inf"))))
        if clip_value is not None:
            nn.utils.clip_grad_value_(trained.values(), clip_value)
        optimizer.step()
    # Under the names that they have without peft.
    names = {name: name.removeprefix("base_model.model.").replace("modules_to_save.default.", "") for name in trained}
    result.weights = {names[name]: p.detach() for name, p in trained.items()}
    return result


def train_plainly(folder: Path, **clipping: Any) -> Result:
    """Train a saved model with ``train_stock``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = make_rows(model.config.vocab_size)
    steps = [rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH] for step in range(NUM_STEPS)]
    return train_stock(model, lambda step: model(**collate(steps[step])).loss, num_steps=NUM_STEPS, **clipping)


def build_trainer(strategy: Any, *, callbacks: list[Any] | None = None, **options: Any) -> pl.Trainer:
    """Return a quiet Trainer for ranks that exist already."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "strategy": strategy,
        "plugins": [Environment()],
        "max_steps": NUM_STEPS,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(**{**settings, **options}, callbacks=callbacks)


def build_task(folder: Path, **options: Any) -> CausalLM:
    """Return the task that starts from a saved model."""
    settings: dict[str, Any] = {"optimizer": OPTIMIZER, "lr_scheduler": LRSchedule(type="constant"), **options}
    return CausalLM(pretrained=str(folder), **settings)


def gather_weights(task: CausalLM) -> dict[str, Tensor]:
    """Return all weights in full, under the names of the model itself. All ranks must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(task, options=options)
    return {name.removeprefix("model."): value for name, value in state.items()}


def fit_and_write(
    trainer: pl.Trainer,
    task: Any,
    data: Any,
    out: Path | None,
    *,
    save: Path | None = None,
    load: Path | None = None,
    first_step: int = 4,
) -> None:
    """Train on this rank, and save the checkpoint that is asked for; rank 0 writes the result to ``out``.

    Of a run that goes on from a checkpoint, losses and norms of the steps before ``first_step`` are 0.
    """
    recorder = next(callback for callback in trainer.callbacks if isinstance(callback, Recorder))
    if load is not None:
        recorder.result = Result(losses=[0.0] * first_step, grad_norms=[0.0] * first_step)
    trainer.fit(task, data, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    recorder.result.weights = gather_weights(task)
    if out is not None and trainer.is_global_zero:
        torch.save(vars(recorder.result), out)


def fit(folder: Path, out: Path, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    """Train on this rank; rank 0 writes the result to ``out``."""
    options = dict(options)
    task_options, source = options.pop("task", {}), options.pop("ckpt_path", None)
    share = options.pop("share", None)
    accumulate = options.get("accumulate_grad_batches", 1)
    mesh = strategy.get("mesh", Mesh())
    num_ranks = dist.get_world_size() // (mesh.sequence * mesh.tensor)  # with rows of their own
    batch_size = GLOBAL_BATCH // num_ranks // accumulate
    callbacks = [Recorder(), *options.pop("callbacks", [])]
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), callbacks=callbacks, **options)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    data = Rows(vocab_size, batch_size, share=share)
    fit_and_write(trainer, build_task(folder, **task_options), data, out, load=source, first_step=0)


def train_sharded(folder: Path, tmp_path: Path, *, world_size: int, strategy: dict[str, Any], **options: Any) -> Result:
    """Train under ``FSDP2Strategy(**strategy)`` and ``Trainer(**options)`` on forked ranks.

    Of ``options``, ``task`` holds settings of the task, ``ckpt_path`` is a checkpoint to go on from, and ``share``
    is that of the data.
    """
    out = tmp_path / "result.pt"
    backend = "cpu:gloo,cuda:nccl" if options.get("accelerator") == "gpu" else "gloo"
    run_ranks(fit, folder, out, strategy, options, world_size=world_size, backend=backend)
    return Result(**torch.load(out))


def list_differences(run: Result, truth: Result) -> dict[str, float]:
    """Return the largest differences to the truth, by what they are of; of norms relative, as they may be large."""
    pairs: Iterator[tuple[float, float]] = zip(run.losses, truth.losses, strict=True)
    differences = {"loss": find_largest(abs(a - b) for a, b in pairs)}
    norms = zip(run.grad_norms, truth.grad_norms, strict=True)
    differences["grad_norm"] = find_largest(abs(a - b) / max(b, sys.float_info.min) for a, b in norms)
    # A tied weight is in the state dict under both its names.
    weights = (float((run.weights[name] - weight).abs().max()) for name, weight in truth.weights.items())
    differences["weight"] = find_largest(weights)
    return differences
