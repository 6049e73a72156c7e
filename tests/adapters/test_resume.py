"""A checkpoint of adapters holds what trains, and goes on over the same base at any number of ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from adapter_training import SIZES
from differences import find_largest
from models import to_full
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.utils.data import DataLoader
from training import NUM_STEPS, Recorder, Result, Rows, build_task, build_trainer, collate, make_rows, save_model
from transformers import AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy, Mesh
from lit_fsdp.adapters.layers import is_adapter_name
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.latest import find_last_checkpoint
from lit_fsdp.quantization.quantize import Quantization
from ranks import RankError, run_ranks

BATCH, SAVED_AT = 12, 4
PLAIN = LoRA(r=4, alpha=8, modules_to_save=["lm_head", "norm"])
DROPOUT = replace(PLAIN, dropout=0.1)


class Save(pl.Callback):
    """Saves after some steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT and not self.path.exists():
            trainer.save_checkpoint(self.path)


class AllRows(Rows):
    """The same rows to validate with, and prompts."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_rows(67, 4), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]


def fit(
    model: Path,
    out: Path,
    *,
    save: Path | None = None,
    load: Path | None = None,
    lora: LoRA = PLAIN,
    strategy: dict[str, Any] | None = None,
    replicate: int = 1,
) -> None:
    """Train on this rank over 4-bit weights, quantized twice; rank 0 writes the losses."""
    recorder = Recorder()
    if load is not None:
        recorder.result = Result(losses=[0.0] * SAVED_AT, grad_norms=[0.0] * SAVED_AT)
    torch.manual_seed(5)
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False, mesh=Mesh(replicate=replicate), **(strategy or {})),
        callbacks=[recorder, *([Save(save)] if save else [])],
    )
    task = build_task(model, lora=lora, quantization=Quantization())
    trainer.fit(task, Rows(67, BATCH // dist.get_world_size(), num_rows=NUM_STEPS * BATCH), ckpt_path=load)
    if trainer.is_global_zero:
        torch.save(recorder.result.losses, out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", **SIZES)


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "dropout": (2, {"lora": DROPOUT}),  # other numbers of ranks draw it in another way
    "2": (2, {}),
    "2x2": (4, {"replicate": 2}),
    "frozen": (2, {"strategy": {"save_frozen": True}}),
}


def run_whole(model: Path, folder: Path, name: str) -> None:
    """Train for all steps, with a checkpoint on the way, unless that has been done."""
    path = folder / f"{name}.ckpt"
    if not path.exists():
        ranks, options = RUNS[name]
        run_ranks(lambda: fit(model, folder / name, save=path, **options), world_size=ranks)


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with the checkpoints that they left on the way; others are added when they are first needed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("2", "frozen"):
        run_whole(model, folder, name)
    return folder


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("saved", "world_size", "replicate", "tolerance"),
    [
        ("2", 1, 1, 1e-6),
        ("dropout", 2, 1, 0.0),
        pytest.param("2", 2, 1, 0.0, marks=pytest.mark.slow),
        pytest.param("2", 3, 1, 1e-6, marks=pytest.mark.slow),
        pytest.param("2x2", 2, 1, 1e-6, marks=pytest.mark.slow),
        pytest.param("2x2", 4, 2, 0.0, marks=pytest.mark.slow),
        ("frozen", 3, 1, 1e-6),
    ],
)
def test_a_resumed_run_has_the_losses_of_one_without_interruption(
    runs: Path, model: Path, saved: str, world_size: int, replicate: int, tolerance: float, tmp_path: Path
) -> None:
    lora = DROPOUT if saved == "dropout" else PLAIN
    run_whole(model, runs, saved)

    def resume() -> None:
        fit(model, tmp_path / "out", load=runs / f"{saved}.ckpt", lora=lora, replicate=replicate)

    run_ranks(resume, world_size=world_size)
    whole, resumed = torch.load(runs / saved)[SAVED_AT:], torch.load(tmp_path / "out")[SAVED_AT:]
    assert len(whole) == len(resumed) == NUM_STEPS - SAVED_AT
    assert find_largest(abs(a - b) for a, b in zip(whole, resumed, strict=True)) <= tolerance


def read_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of every weight in a checkpoint."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {k.removeprefix("state_dict.model."): v for k, v in metadata.items() if k.startswith("state_dict.")}
    return {name: value.size.numel() * value.properties.dtype.itemsize for name, value in weights.items()}


def test_a_checkpoint_holds_only_what_trains(runs: Path) -> None:
    names = set(read_sizes(runs / "2.ckpt"))
    saved = {"lm_head.weight", "model.norm.weight"}
    norms = {f"model.layers.{i}.{kind}_layernorm.weight" for i in range(3) for kind in ("input", "post_attention")}
    assert {name for name in names if not is_adapter_name(name)} == saved
    assert len(names - saved) == 3 * 7 * 2
    assert not names & norms
    frozen = read_sizes(runs / "frozen.ckpt")
    left_out = sum(num_bytes for name, num_bytes in frozen.items() if name not in names)
    assert left_out > 50_000
    assert count_bytes(runs / "2.ckpt") <= count_bytes(runs / "frozen.ckpt") - left_out


def count_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("__*.distcp"))


def test_on_request_it_holds_the_frozen_weights_with_all_their_statistics(runs: Path) -> None:
    sizes = read_sizes(runs / "frozen.ckpt")
    name = "model.layers.1.mlp.down_proj.base_layer.weight"
    assert sizes[name] == 64 * 192 // 2
    assert sizes[f"{name}_absmax"] == 64 * 192 // 64
    assert sizes[f"{name}_nested"] == 4 * 2
    assert "model.embed_tokens.weight" in sizes
    assert set(read_sizes(runs / "2.ckpt")) < set(sizes)


@pytest.mark.full
def test_adapters_over_another_model_of_the_same_shapes_are_refused(runs: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", **SIZES)
    change_one_weight(other)
    with pytest.raises(RankError) as caught:
        run_ranks(lambda: fit(other, tmp_path / "out", load=runs / "2.ckpt"))
    (line,) = [x for x in str(caught.value).splitlines() if x.startswith("ValueError")]
    assert f"pretrained: got {str(other)!r}: the checkpoint holds adapters of" in line
    assert line.endswith("whose weights are other ones; set pretrained to that model")


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 16}, "lora.alpha: got 16: the adapters of the checkpoint were trained with 8; set that"),
        pytest.param({"use_rslora": True}, "lora.use_rslora: got True: the adapters", marks=pytest.mark.slow),
        pytest.param(
            {"alpha_pattern": {"q_proj": 2}},
            "lora.alpha_pattern: got {'q_proj': 2}: the adapters",
            marks=pytest.mark.slow,
        ),
        (
            {"init_lora_weights": "pissa"},
            "lora.init_lora_weights: got 'pissa': the adapters of the checkpoint were trained with 'default'",
        ),
    ],
)
def test_settings_under_which_adapters_would_mean_something_else_are_refused(
    runs: Path, model: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    lora = replace(PLAIN, **changes)
    with pytest.raises(RankError) as caught:
        run_ranks(lambda: fit(model, tmp_path / "out", load=runs / "2.ckpt", lora=lora))
    assert any(line.startswith(f"ValueError: {message}") for line in str(caught.value).splitlines())


def change_one_weight(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data += 0.01
    model.save_pretrained(folder)


class Spy(pl.Callback):
    """Keeps the trained weights as a run without training sees them."""

    def on_validation_start(self, _: pl.Trainer, task: pl.LightningModule) -> None:
        self.weights = {n: to_full(p).clone() for n, p in task.named_parameters() if p.requires_grad}


@pytest.mark.full
def test_validation_and_the_newest_checkpoint_start_from_it(runs: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "a-step=4.ckpt").symlink_to(runs / "2.ckpt")
    found = find_last_checkpoint([tmp_path / "checkpoints"])
    assert found == runs / "2.ckpt"

    def validate(path: Path, out: Path) -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[spy := Spy()])
        task = build_task(model, lora=PLAIN, quantization=Quantization())
        (metrics,) = trainer.validate(task, AllRows(67, 4), ckpt_path=path, verbose=False)
        if trainer.is_global_zero:
            torch.save((metrics["val/loss"], spy.weights), out)

    for name, path in (("part", found), ("frozen", runs / "frozen.ckpt")):
        run_ranks(lambda p=path, n=name: validate(p, tmp_path / n))
    (loss, weights), (truth, full) = (torch.load(tmp_path / name) for name in ("part", "frozen"))
    assert loss == truth
    b = [value for name, value in weights.items() if "lora_B" in name]
    assert all(isinstance(value, Tensor) and value.abs().max() > 0 for value in b)
    assert all(torch.equal(weights[name], full[name]) for name in weights)
