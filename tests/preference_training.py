"""Trains on tiny preferences on forked ranks, and a single one to compare with."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from differences import find_largest
from training import EVEN, OPTIMIZER, Recorder, Result, build_trainer, gather_weights, list_differences, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import LRSchedule, PreferenceData, PreferenceTuning, TrainTokenizer
from ranks import run_ranks

NUM_STEPS, GLOBAL_BATCH, NUM_PAIRS = 3, 8, 24
Trained = tuple[Result, list[dict[str, float]]]
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "kl")


def write_pairs(path: Path, num_rows: int = NUM_PAIRS) -> Path:
    """Write pairs of numbers to add: rows of many lengths."""
    rows = []
    for n in range(num_rows):
        prompt = f"{'please ' * (n % 5)}add {n} and {n + 1}"
        rows.append({"prompt": prompt, "chosen": f" it is {2 * n + 1}{' indeed' * (n % 3)}", "rejected": f" no {n}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_data(folder: Path, **options: Any) -> PreferenceData:
    """Return the data of the pairs in a folder."""
    settings: dict[str, Any] = {
        "train": str(folder / "pairs.jsonl"),
        "tokenizer": TrainTokenizer(vocab_size=300),
        "num_workers": 0,
        "shuffle": False,
        "seq_length": 48,
        "cache_dir": str(folder / "cache"),
        **options,
    }
    return PreferenceData(**settings)


def make_inputs(folder: Path) -> Path:
    """Write a model and pairs."""
    save_model(folder / "model", **{**EVEN, "vocab_size": 320})
    write_pairs(folder / "pairs.jsonl")
    return folder


def make_task(folder: Path, **options: Any) -> PreferenceTuning:
    """Return the task that starts from the model in a folder."""
    settings: dict[str, Any] = {
        "pretrained": str(folder / "model"),
        "beta": 0.1,
        "optimizer": OPTIMIZER,
        "lr_scheduler": LRSchedule(type="constant"),
        **options,
    }
    return PreferenceTuning(**settings)


class PreferenceRecorder(Recorder):
    """Keeps the metrics of preferences, too."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def _read(self, trainer: Any) -> None:
        before = len(self.result.losses)
        super()._read(trainer)
        if len(self.result.losses) > before:
            found = {name: trainer.callback_metrics.get(f"train/{name}") for name in METRICS}
            self.metrics.append({name: float(value) for name, value in found.items() if value is not None})


def fit(folder: Path, out: Path, task_options: dict[str, Any], options: dict[str, Any]) -> None:
    """Train on this rank; rank 0 writes the result to ``out``."""
    torch.manual_seed(5)  # adapters are drawn from it
    options = dict(options)
    data_options, source = options.pop("data", {}), options.pop("ckpt_path", None)
    strategy = FSDP2Strategy(print_plan=False, **options.pop("strategy", {}))
    accumulate = options.get("accumulate_grad_batches", 1)
    recorder = PreferenceRecorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = build_trainer(strategy, callbacks=callbacks, **{"max_steps": NUM_STEPS, **options})
    task = make_task(folder, **task_options)
    data = make_data(folder, batch_size=GLOBAL_BATCH // dist.get_world_size() // accumulate, **data_options)
    trainer.fit(task, data, ckpt_path=source)
    recorder.result.weights = gather_weights(task)
    if trainer.is_global_zero:
        torch.save({"result": vars(recorder.result), "metrics": recorder.metrics}, out)


def train(folder: Path, world_size: int, task: dict[str, Any], **options: Any) -> Trained:
    """Train on forked ranks; return the result and the metrics of each step."""
    run_ranks(fit, folder, folder / "out.pt", task, options, world_size=world_size)
    found = torch.load(folder / "out.pt")
    return Result(**found["result"]), found["metrics"]


def compare(
    found: tuple[Result, list[dict[str, float]]], truth: tuple[Result, list[dict[str, float]]]
) -> dict[str, float]:
    """Return the largest differences: of losses, of gradient norms and metrics relative to these, and of weights."""
    (run, metrics), (other, expected) = found, truth
    assert len(run.losses) == len(other.losses) > 0
    differences = list_differences(run, other)
    steps = zip(metrics, expected, strict=True)
    differences["metrics"] = find_largest(
        abs(step[name] - value) / max(abs(value), 1) for step, true in steps for name, value in true.items()
    )
    return differences
