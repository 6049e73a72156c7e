"""Our tasks under Lightning's other strategies do the same work, or say why not before ranks start."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_training import VIT, ImageRows, save_classifier
from launches import run_processes
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from models import to_full
from speech_training import build_data, build_task, make_rows
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from training import GLOBAL_BATCH, OPTIMIZER, UNEVEN, Recorder, Rows, build_trainer, save_model
from training import build_task as build_text_task
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lit_fsdp import FSDP2Strategy, LoRA
from lit_fsdp.strategy.cpu_trials import DeepSpeedOnCPU, FSDPOnCPU
from lit_fsdp.tasks import ImageClassification, LRSchedule, Optimizer, Task
from lit_fsdp.tasks.image_classification.metrics import Metrics
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from ranks import run_ranks

NUM_STEPS = 3
QUICKSTART = Path(__file__).parents[2] / "configs" / "vit_digits_quickstart.yaml"
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "fsdp2": lambda: FSDP2Strategy(print_plan=False),
    "ddp": DDPStrategy,
    "fsdp": FSDPOnCPU,
    "fsdp_recomputing": lambda: FSDPOnCPU(activation_checkpointing_policy={LlamaDecoderLayer}),
    "model_parallel": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "deepspeed_stage_2": lambda: DeepSpeedOnCPU(stage=2, logging_level=40),
    "deepspeed_stage_3": lambda: DeepSpeedOnCPU(stage=3, logging_level=40),
}
NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


class Losses(Recorder):
    """Keeps losses where a strategy knows no norm before its step."""

    def _read(self, trainer: Any) -> None:
        if trainer.global_step > len(self.result.losses):
            self.result.losses.append(float(trainer.callback_metrics["train/loss"]))
            self.result.grad_norms.append(float(trainer.callback_metrics.get("train/grad_norm", 0.0)))


def write_inputs(kind: str, folder: Path) -> Path:
    """Write what a task of this kind starts from."""
    if kind == "text":
        return save_model(folder, **UNEVEN)
    if kind == "images":
        return save_classifier(folder, VIT)
    folder.mkdir()
    write_shard(folder / "shard-00000.parquet", make_rows())
    return folder


def make_task(kind: str, folder: Path, **options: Any) -> tuple[Task, Any]:
    """Return a task and its data, for two ranks."""
    if kind == "text":
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        return build_text_task(folder, **options), Rows(vocab_size, GLOBAL_BATCH // 2)
    if kind == "images":
        settings: dict[str, Any] = {"optimizer": OPTIMIZER, "lr_scheduler": LRSchedule(type="constant"), **options}
        return ImageClassification(pretrained=str(folder), head="keep", num_classes=5, **settings), ImageRows(4)
    return build_task(**options), build_data(folder, batch_size=3)


def train(name: str, kind: str, folder: Path, out: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
    """Train under a strategy on this rank; rank 0 writes losses and norms."""
    recorder = Losses()
    settings = {"max_steps": NUM_STEPS, "gradient_clip_val": 0.1, **settings}
    trainer = build_trainer(STRATEGIES[name](), callbacks=[recorder], **settings)
    task, data = make_task(kind, folder, **options)
    trainer.fit(task, data)
    if trainer.is_global_zero:
        out.write_text(json.dumps([recorder.result.losses, recorder.result.grad_norms]))


def compare(
    names: list[str], kind: str, tmp_path: Path, options: dict[str, Any], settings: dict[str, Any]
) -> dict[str, list[list[float]]]:
    """Train under each strategy, and check that losses and norms are those of ``fsdp2``."""
    folder, found = write_inputs(kind, tmp_path / "inputs"), {}
    for name in ("fsdp2", *names):
        out = tmp_path / f"{name}.json"
        run_ranks(train, name, kind, folder, out, options, settings)
        found[name] = json.loads(out.read_text())
    (losses, norms), others = found["fsdp2"], {name: found[name] for name in names}
    assert len(losses) == NUM_STEPS
    assert min(norms) > 0.1  # clipped, or a wrong norm would not show in the losses
    for name, (own_losses, own_norms) in others.items():
        assert own_losses == pytest.approx(losses, abs=1e-6), name
        if not name.startswith("deepspeed"):
            assert own_norms == pytest.approx(norms, rel=1e-5), name
    return found


# A learning rate and a weight decay that show in the losses of three steps what decays and what does not.
STRONG = Optimizer(learning_rate=1e-2, weight_decay=5.0, eps=1e-4)


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("text", None),
        ("images", None),
        ("speech", None),
        ("text", LoRA(r=4)),
        ("images", LoRA(r=4)),
        ("speech", LoRA(r=4)),
    ],
    ids=["text", "images", "speech", "text_lora", "images_lora", "speech_lora"],
)
def test_losses_and_norms_are_those_of_fsdp2(kind: str, lora: LoRA | None, tmp_path: Path) -> None:
    options = {"lora": lora} if lora is not None else {"optimizer": STRONG} if kind != "speech" else {}
    names = ["ddp", "fsdp", "model_parallel", *["fsdp_recomputing"] * (kind == "text")]
    compare(names, kind, tmp_path, options, {})


@pytest.mark.slow
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("kind", ["text", "images", "speech"])
@pytest.mark.parametrize("lora", [None, LoRA(r=4)], ids=["full", "lora"])
def test_losses_under_deepspeed_are_those_of_fsdp2(kind: str, lora: LoRA | None, tmp_path: Path) -> None:
    options = {"lora": lora} if lora is not None else {"optimizer": STRONG} if kind != "speech" else {}
    compare(["deepspeed_stage_2", "deepspeed_stage_3"], kind, tmp_path, options, {})


@pytest.mark.full
def test_losses_with_accumulated_gradients_are_those_of_fsdp2(tmp_path: Path) -> None:
    compare(["ddp", "fsdp", "model_parallel"], "text", tmp_path, {}, {"accumulate_grad_batches": 2})


def fit_global_batch(folder: Path, rows: int) -> int:
    trainer = build_trainer(DDPStrategy(), max_steps=1)
    task, data = make_task("text", folder)
    data.global_batch_size = rows
    trainer.fit(task, data)
    return trainer.accumulate_grad_batches


def test_the_global_batch_of_data_counts_under_ddp_too(tmp_path: Path) -> None:
    folder = write_inputs("text", tmp_path / "inputs")  # data of 4 rows a micro-batch

    def body() -> None:
        assert fit_global_batch(folder, 12) == 3
        with pytest.raises(ValueError, match="global_batch_size: got 10: expected a multiple of 4"):
            fit_global_batch(folder, 10)

    run_ranks(body, world_size=1)


def test_the_blocks_of_fsdp2_are_sharded_by_fsdp1_and_by_model_parallel(tmp_path: Path) -> None:
    def body() -> None:
        for name, kind in (("fsdp", FullyShardedDataParallel), ("model_parallel", FSDPModule)):
            trainer = build_trainer(STRATEGIES[name](), max_steps=1)
            task, data = make_task("text", folder)
            trainer.fit(task, data)
            assert trainer.model is not None
            sharded = [module for module in trainer.model.modules() if isinstance(module, kind)]
            inner = [module.module if isinstance(module, FullyShardedDataParallel) else module for module in sharded]
            assert sum(isinstance(module, LlamaDecoderLayer) for module in inner) == 3, name
            own = sum(getattr(p, "_local_tensor", p).numel() for p in task.parameters())
            total = torch.tensor(own)
            dist.all_reduce(total)
            assert own < 0.6 * total, name

    folder = write_inputs("text", tmp_path / "inputs")
    run_ranks(body)


def resume_alone(folder: Path, out: Path) -> None:
    found = []
    for source in (None, out / "a.ckpt"):
        trainer = build_trainer(ModelParallelStrategy(1, 1), max_steps=2)
        task, data = make_task("text", folder)
        trainer.fit(task, data, ckpt_path=source)
        trainer.save_checkpoint(out / "a.ckpt")
        moments = (state["exp_avg"] for state in trainer.optimizers[0].state.values())
        found.append([to_full(tensor) for tensor in (*task.parameters(), *moments)])
    first, restored = found
    assert all(torch.equal(a, b) for a, b in zip(first, restored, strict=True))


@pytest.mark.full
def test_model_parallel_restores_weights_and_moments_on_one_rank(tmp_path: Path) -> None:
    run_ranks(resume_alone, write_inputs("text", tmp_path / "inputs"), tmp_path, world_size=1)


def test_parameters_are_whole_under_fsdp1_where_a_model_runs_outside_of_its_steps(tmp_path: Path) -> None:
    def body() -> None:
        task, data = make_task("text", folder, loss_chunks=2, sample_prompts=["a"])
        data.packing = True  # the model runs before the first step, too, to see whether it can have packed rows

        def continue_rows(rows: Any, **_: Any) -> list[str]:
            logits.append(task(input_ids=torch.tensor([[3, 4]])))
            return ["b" for _ in rows]

        class Tokenizer:
            eos_token_id, chat_template = 1, None

            def __call__(self, texts: Any, **_: Any) -> dict[str, list[Any]]:
                return {"input_ids": [[3, 4] for _ in texts]}

        logits: list[torch.Tensor] = []
        task.continue_rows, task.get_tokenizer = continue_rows, Tokenizer  # type: ignore[method-assign]
        build_trainer(FSDPOnCPU(), max_steps=1).fit(task, data)
        (only,) = logits
        assert only.shape == (1, 2, UNEVEN["vocab_size"])

    folder = write_inputs("text", tmp_path / "inputs")
    run_ranks(body)


@pytest.mark.parametrize(
    ("make", "options", "accumulate", "line"),
    [
        (
            FSDPStrategy,
            {"optimizer": Optimizer(name="adafactor")},
            1,
            "optimizer.name: got 'adafactor' under",
        ),
        (ModelParallelStrategy, {}, 1, "tensor_parallel_size: got 'auto', which is 2 ranks"),
        pytest.param(
            lambda: DeepSpeedOnCPU(stage=2), {}, 4, "accumulate_grad_batches: got 4 under", marks=NEEDS_DEEPSPEED
        ),
    ],
    ids=["adafactor", "tensor_parallel", "accumulation"],
)
def test_what_a_strategy_cannot_do_is_refused_with_a_way_out(
    make: Callable[[], Any], options: dict[str, Any], accumulate: int, line: str
) -> None:
    strategy = make()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    trainer = build_stub(strategy, accumulate)
    task = ImageClassification(config={"model_type": "vit"}, num_classes=2, **options)
    with pytest.raises(ValueError, match=line) as error:
        task.check_strategy(trainer)
    assert "set " in str(error.value)


def build_stub(strategy: Any, accumulate: int) -> Any:
    """Return what the check reads of a Trainer; Lightning builds none with these strategies where there is no GPU."""
    return SimpleNamespace(strategy=strategy, callbacks=[], accumulate_grad_batches=accumulate)


def test_metrics_count_in_float64_after_a_strategy_has_cast_them_with_the_model() -> None:
    task = ImageClassification(config={"model_type": "vit"}, num_classes=3)
    task.val_metrics = Metrics(3)
    task.to(torch.bfloat16)  # as DDP and DeepSpeed with bf16-true
    task.on_validation_epoch_start()
    counts = torch.full((), 300.0), torch.tensor(1.0)
    for loss_sum in counts:
        task.update_eval_loss("val", loss_sum, torch.tensor(257))
    task.val_metrics.update(torch.eye(3), torch.arange(3))
    error = 1 - torch.eye(3).softmax(1).max().item()
    assert float(task.val_loss.compute()) == pytest.approx(301 / 514, rel=1e-12)
    assert task.val_metrics.compute().values["calibration_error_pct"] == pytest.approx(100 * error)


@pytest.mark.full
def test_tensor_parallel_is_refused_before_ranks_start(tmp_path: Path) -> None:
    strategy = '{"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}'
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.default_root_dir={tmp_path}"]
    command = ["-m", "lit_fsdp", "fit", f"--config={QUICKSTART}", f"--trainer.strategy={strategy}", *options]
    (ended,) = run_processes(command)
    assert ended.code == 2
    (line,) = ended.errors
    assert "tensor_parallel_size: 1 and data_parallel_size: 2" in line
