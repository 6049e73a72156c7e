"""A run that goes on from its checkpoint ends where one without interruption does: every task, form and optimizer."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from image_training import RESNET, VIT, make_data, write_folder
from lightning.pytorch.callbacks import ModelCheckpoint
from models import to_full
from speech_training import build_data as build_speech_data
from speech_training import make_config, make_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import EVEN, build_trainer

from lit_fsdp import FSDP2Strategy, LoRA, Quantization
from lit_fsdp.optim.adamw_8bit import AdamW8bit
from lit_fsdp.tasks import CausalLM, ImageClassification, LRSchedule, Optimizer, TextData, TextToSpeech, TrainTokenizer
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from ranks import run_ranks

SAVED_AT, NUM_STEPS = 2, 4
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64, **EVEN, "vocab_size": 300}


class Plain(pl.LightningModule):
    """A module as anybody writes it."""

    kinds: dict[str, Callable[[Any], Any]] = {  # noqa: RUF012
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
        "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        "adamw_8bit": lambda p: AdamW8bit(p, lr=1e-2),
        "scheduled": lambda p: _schedule(torch.optim.AdamW(p, lr=1e-2)),
        "manual": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "two, manual": lambda p: [torch.optim.SGD(p[:2], lr=1e-2), torch.optim.AdamW(p[2:], lr=1e-2)],
        "none": lambda _: None,
    }

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.kind = optimizer
        self.automatic_optimization = "manual" not in optimizer
        self.first, self.last = nn.Linear(300, 7), nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += len(batch)
        loss = self.last(self.first(batch).relu()).square().mean()
        if not self.automatic_optimization:
            optimizers: Any = self.optimizers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return self.kinds[self.kind](list(self.parameters()))

    def train_dataloader(self) -> DataLoader[Tensor]:
        # The same rows in every step: a stock loader begins again.
        rows = torch.randn(4, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
        return DataLoader(rows.repeat(16, 1), batch_size=4)  # type: ignore[arg-type]


def _schedule(optimizer: torch.optim.Optimizer) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def build_plain(_: Path, optimizer: str) -> tuple[Any, Any]:
    return Plain(optimizer), None


def get_options(optimizer: str) -> dict[str, Any]:
    settings: Any = {"name": optimizer, "learning_rate": 1e-2, "weight_decay": 0.1}
    return {"optimizer": Optimizer(**settings), "lr_scheduler": LRSchedule(type="cosine")}


def build_language(folder: Path, optimizer: str) -> tuple[Any, Any]:
    """With packing, which is checked by a forward pass before the checkpoint is loaded."""
    data = TextData(
        train=str(folder / "text.jsonl"),
        tokenizer=TrainTokenizer(vocab_size=300),
        seq_length=16,
        batch_size=2,
        num_workers=0,
        cache_dir=str(folder / "cache"),
    )
    return CausalLM(config=LLAMA, **get_options(optimizer)), data


def build_chunked(folder: Path, optimizer: str) -> tuple[Any, Any]:
    """With a loss in chunks, which is checked likewise."""
    _, data = build_language(folder, optimizer)
    return CausalLM(config=LLAMA, loss_chunks=2, **get_options(optimizer)), data


def build_images(folder: Path, optimizer: str) -> tuple[Any, Any]:
    return ImageClassification(config=VIT, **get_options(optimizer)), make_data(folder, batch_size=2)


def build_batch_norm(folder: Path, optimizer: str) -> tuple[Any, Any]:
    return ImageClassification(config=RESNET, **get_options(optimizer)), make_data(folder, batch_size=2)


def build_speech(folder: Path, optimizer: str) -> tuple[Any, Any]:
    return TextToSpeech(config=make_config(), **get_options(optimizer)), build_speech_data(folder, batch_size=2)


OURS = ("adamw", "adamw_8bit", "adafactor")
BUILDERS: dict[str, tuple[Callable[[Path, str], tuple[Any, Any]], tuple[str, ...]]] = {
    "language": (build_language, OURS),
    "plain": (build_plain, tuple(Plain.kinds)),
    "language, loss in chunks": (build_chunked, OURS[:1]),
    "images": (build_images, OURS),
    "images, batch norm": (build_batch_norm, OURS),
    "speech": (build_speech, OURS),
}
CASES = [
    (task, optimizer, checkpoint_format)
    for task, (_, optimizers) in BUILDERS.items()
    for optimizer, checkpoint_format in product(optimizers, ("single_file", "sharded"))
]
# These found faults; others with -m "not slow".
QUICK = {("language", "adamw", "single_file"), ("plain", "sgd", "single_file")}


def choose_tier(task: str, optimizer: str, checkpoint_format: str) -> list[pytest.MarkDecorator]:
    if (task, optimizer, checkpoint_format) in QUICK:
        return []
    is_second = optimizer in ("adamw_8bit", "adafactor") and task not in ("language", "plain")
    return [pytest.mark.full, *([pytest.mark.slow] if is_second else [])]


class Save(pl.Callback):
    """Saves on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == SAVED_AT:
            trainer.save_checkpoint(self.path)


def read_all(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    """Return in full all weights, buffers and tensors of optimizers."""
    found: dict[str, Any] = dict(module.state_dict())
    for i, optimizer in enumerate(trainer.optimizers):
        for j, state in enumerate(optimizer.state.values()):
            found |= {f"{i}.{j}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        found |= {f"{i}.{j}.lr": torch.tensor(group["lr"]) for j, group in enumerate(optimizer.param_groups)}
    return {k: to_full(v).clone() for k, v in found.items()}


def fit(folder: Path, task: str, optimizer: str, checkpoint_format: Any, path: Path | None) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    save = [Save(folder / "a.ckpt")] if path is None else []
    strategy = FSDP2Strategy(print_plan=False, checkpoint_format=checkpoint_format)
    module, data = BUILDERS[task][0](folder, optimizer)
    clip = None if task == "plain" else 1.0
    limits: dict[str, Any] = {
        "limit_train_batches": NUM_STEPS,
        "limit_val_batches": 0,
        "max_epochs": 1,
        "max_steps": -1,
    }
    trainer = build_trainer(strategy, callbacks=save, gradient_clip_val=clip, **limits)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return read_all(trainer, module)


def fit_twice(folder: Path, task: str, optimizer: str, checkpoint_format: str) -> None:
    whole = fit(folder, task, optimizer, checkpoint_format, None)
    path = folder / "a.ckpt"
    assert path.is_dir() is (checkpoint_format == "sharded")
    resumed = fit(folder, task, optimizer, checkpoint_format, path)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def restore(
    folder: Path, optimizer: str, adapters: dict[str, Any], checkpoint_format: Any, source: str | None, target: str
) -> None:
    """Train a few steps, or restore the state of another run; save it, and rank 0 also what there is in full."""
    pl.seed_everything(3, verbose=False)
    _, data = build_language(folder, optimizer)
    module = CausalLM(
        config={**LLAMA, "hidden_size": 64, "intermediate_size": 128}, **get_options(optimizer), **adapters
    )
    strategy = FSDP2Strategy(print_plan=False, checkpoint_format=checkpoint_format)
    precision = "bf16-true" if adapters else "32-true"
    trainer = build_trainer(strategy, max_steps=3, limit_val_batches=0, precision=precision)
    trainer.fit(module, datamodule=data, ckpt_path=source and folder / source)
    trainer.save_checkpoint(folder / target)
    state = read_all(trainer, module)
    if trainer.is_global_zero:
        torch.save(state, folder / f"{target}.pt")


# With adapters, float32 ones are sharded on one rank, too, and codes are plain.
QLORA = {"lora": LoRA(r=4), "quantization": Quantization()}


@pytest.mark.full
@pytest.mark.parametrize("checkpoint_format", ["single_file", "sharded"])
@pytest.mark.parametrize(
    ("optimizer", "adapters"), [*((name, {}) for name in OURS), pytest.param("adamw", QLORA, id="adapters over NF4")]
)
def test_what_one_rank_saved_is_restored_on_two_and_back(
    optimizer: str, adapters: dict[str, Any], checkpoint_format: str, tmp_path: Path
) -> None:
    rows = ({"text": f"the number {i} comes after the number {i - 1}."} for i in range(1, 60))
    (tmp_path / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    states = []
    for source, target, world_size in ((None, "one", 1), ("one", "two", 2), ("two", "back", 1)):
        run_ranks(restore, tmp_path, optimizer, adapters, checkpoint_format, source, target, world_size=world_size)
        states.append(torch.load(tmp_path / f"{target}.pt"))
    one, two, back = states
    assert sum(name.startswith("0.") for name in one) > 20  # of the optimizer
    for other in (two, back):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("task", "optimizer", "checkpoint_format"),
    [pytest.param(*case, marks=choose_tier(*case)) for case in CASES],
)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(
    task: str, optimizer: str, checkpoint_format: str, tmp_path: Path
) -> None:
    if task.startswith("images"):
        write_folder(tmp_path / "train", {"cat": 9, "dog": 8, "eel": 8})
        write_folder(tmp_path / "test", {"cat": 4, "dog": 2, "eel": 3})
    elif task == "speech":
        write_shard(tmp_path / "shard-00000.parquet", make_rows())
    elif task != "plain":
        rows = ({"text": f"the number {i} comes after the number {i - 1}."} for i in range(1, 60))
        (tmp_path / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run_ranks(fit_twice, tmp_path, task, optimizer, checkpoint_format)


class Plateau(Plain):
    """Halves its learning rate at each validation, as none is ever good enough."""

    def __init__(self, interval: str) -> None:
        super().__init__("adamw")
        self.interval = interval

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.last(self.first(batch).relu()).square().mean(), sync_dist=True)

    val_dataloader = Plain.train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)
        settings = {"scheduler": schedule, "monitor": "val/loss", "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": {**settings, "frequency": 2 if self.interval == "step" else 1}}


def fit_on_a_plateau(folder: Path, interval: str, saves: dict[str, Any]) -> None:
    def run(path: Path | None) -> dict[str, Tensor]:
        pl.seed_everything(3, verbose=False)
        module, callbacks = Plateau(interval), []
        if path is None:
            callbacks = [ModelCheckpoint(folder, "{step}", save_top_k=-1, **saves)]
        epochs: dict[str, Any] = {"limit_train_batches": 2, "max_epochs": 4}
        if interval == "step":  # four validations, too
            epochs = {"limit_train_batches": 8, "max_epochs": 1, "val_check_interval": 2}
        limits: dict[str, Any] = {**epochs, "limit_val_batches": 1, "max_steps": -1, "num_sanity_val_steps": 0}
        options = {**limits, "enable_checkpointing": path is None, "gradient_clip_val": None}
        trainer = build_trainer(FSDP2Strategy(), callbacks=callbacks, **options)
        trainer.fit(module, ckpt_path=path)
        return read_all(trainer, module)

    whole = run(None)
    assert whole["0.0.lr"] == 1e-2 / 2**3  # the first loss is the best
    for step in (3, 5, 7) if saves.get("every_n_train_steps") else (2, 4, 6):
        resumed = run(folder / f"step={step}.ckpt")
        assert whole.keys() == resumed.keys()
        assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("interval", "saves"),
    [
        ("epoch", {}),
        ("step", {}),
        ("epoch", {"save_on_train_epoch_end": True}),
        ("epoch", {"every_n_train_steps": 1}),
    ],
    ids=["by epoch", "by step", "by epoch, saved after it", "by epoch, saved inside"],
)
def test_a_schedule_that_steps_by_a_metric_goes_on(interval: str, saves: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(fit_on_a_plateau, tmp_path, interval, saves)
