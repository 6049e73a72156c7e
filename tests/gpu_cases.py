"""What is trained on GPUs, or on ranks that pass for some: every task, with what decides where tensors are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import speech_families
import torch
import torch.distributed as dist
from adapter_training import LORA
from adapter_training import SIZES as WIDE
from image_training import NUM_CLASSES, RESNET, VIT, ImageRows, save_classifier
from lightning.pytorch.callbacks import ModelCheckpoint
from speech_training import build_data as build_speech_data
from speech_training import build_task as build_speech_task
from speech_training import make_rows as make_speech_rows
from torch import Tensor
from training import Rows, build_task, build_trainer, gather_weights, save_model
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, MixedPrecision, Sharding
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.callbacks import EMA, CommunicationLogger, MemoryLogger, StabilityMonitor, ThroughputLogger
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.buffers import sync_buffers
from lit_fsdp.tasks import ImageClassification, LRSchedule, Optimizer
from lit_fsdp.tasks.tts.preparation.prepared import write_shard

NUM_STEPS = 3  # and a checkpoint after each


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    model: str = "llama"
    task: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callable[[], pl.Callback]] = ()


OFFLOAD = {"cpu_offload": CPUOffload()}
OVERLAPPED = {"cpu_offload": CPUOffload(overlap_optimizer=True)}
FILE, BESIDE = {"checkpoint_format": "single_file"}, {"async_save": True}
SCALED = {"precision": "16-mixed"}
KEPT = Sharding(reshard_after_forward=False, reshard_after_backward=False, no_sync=True)
OFFLOADED_INPUTS = {"activation_checkpointing": ActivationCheckpointing(mode="full", offload=True)}
SPEECH = {"csm": (speech_families.CSM, 6), "dia": (speech_families.DIA, 4)}  # with the number of codebooks
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QLORA = {"lora": LORA, "quantization": Quantization()}
CASES = {
    "float16 offloaded, one file": Case(strategy=OFFLOAD | FILE, trainer=SCALED),
    "nf4 offloaded, one file": Case(task=QLORA, strategy=OFFLOAD | FILE),
    "nf4 offloaded, saved beside": Case(task=QLORA, strategy=OFFLOAD | BESIDE, trainer={"precision": "bf16-true"}),
    "full, accumulated": Case(
        strategy=BESIDE | {"sharding": Sharding(no_sync=True)}, trainer={"accumulate_grad_batches": 2}
    ),
    "full offloaded, accumulated": Case(strategy=OFFLOAD | BESIDE, trainer={"accumulate_grad_batches": 2}),
    "full offloaded, overlapped": Case(strategy=OVERLAPPED | BESIDE),
    "full offloaded, overlapped, accumulated": Case(
        strategy=OVERLAPPED | FILE | {"activation_checkpointing": ActivationCheckpointing(mode="full")},
        trainer={"accumulate_grad_batches": 2},
    ),
    "full offloaded, overlapped, gathered once a step": Case(
        strategy=OVERLAPPED | BESIDE | {"sharding": KEPT},
        trainer={"accumulate_grad_batches": 2},
        callbacks=(CommunicationLogger, partial(MemoryLogger, trace_step=2), StabilityMonitor, EMA),
    ),
    "float16 offloaded, overlapped": Case(strategy=OVERLAPPED | BESIDE, trainer=SCALED),
    "nf4 offloaded, overlapped": Case(task=QLORA, strategy=OVERLAPPED | BESIDE, trainer={"precision": "bf16-true"}),
    "full offloaded, not pinned": Case(
        strategy={"cpu_offload": CPUOffload(pin_memory=False)},
        trainer={"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
    ),
    "float16, one file": Case(
        strategy=FILE | {"activation_checkpointing": ActivationCheckpointing(mode="full")}, trainer=SCALED
    ),
    "float16 offloaded, reduced in float16": Case(
        strategy=OFFLOAD | {"mixed_precision": MixedPrecision(reduce_dtype="float16")}, trainer=SCALED
    ),
    "lora": Case(task={"lora": LORA}, strategy=BESIDE),
    "nf4, inputs of blocks offloaded": Case(task=QLORA, strategy=FILE | OFFLOADED_INPUTS),
    "full offloaded, inputs of blocks as well": Case(strategy=OFFLOAD | OFFLOADED_INPUTS),
    "int8 offloaded": Case(task={"lora": LORA, "quantization": Quantization(type="int8")}, strategy=OFFLOAD | FILE),
    "nf4, one file": Case(task=QLORA, strategy=FILE),
    "dora offloaded": Case(
        task={"lora": LoRA(r=4, alpha=8, use_dora=True), "quantization": Quantization()}, strategy=OFFLOAD | FILE
    ),
    "olora offloaded": Case(
        task={
            "lora": LoRA(r=4, alpha=8, init_lora_weights="olora"),
            "quantization": Quantization(double_quant=False),
        },
        strategy=OFFLOAD | BESIDE,
    ),
    "adafactor offloaded": Case(task={"optimizer": Optimizer(name="adafactor")}, strategy=OFFLOAD | FILE),
    "muon": Case(task={"optimizer": Optimizer(name="muon")}, strategy=BESIDE),
    "muon offloaded": Case(task={"optimizer": Optimizer(name="muon")}, strategy=OFFLOAD | FILE),
    "8-bit adamw offloaded": Case(task={"optimizer": Optimizer(name="adamw_8bit")}, strategy=OFFLOAD | FILE),
    "images, batch norm offloaded, one file": Case(model="resnet", strategy=OFFLOAD | FILE),
    "images, batch norm, saved beside": Case(model="resnet", strategy=BESIDE),
    "images, batch norm in bfloat16": Case(model="resnet", strategy=BESIDE, trainer={"precision": "bf16-mixed"}),
    "images, vit offloaded": Case(model="vit", strategy=OFFLOAD | BESIDE),
    "experts in nf4 offloaded": Case(model="qwen3_moe", task=QLORA, strategy=OFFLOAD | FILE),
    "monitored": Case(
        callbacks=(CommunicationLogger, MemoryLogger, partial(StabilityMonitor, policy="skip"), ThroughputLogger, EMA)
    ),
    "monitored, offloaded": Case(
        task=QLORA,
        strategy=OFFLOAD | BESIDE,
        callbacks=(CommunicationLogger, partial(MemoryLogger, trace_step=None), StabilityMonitor, EMA),
    ),
    "csm offloaded": Case(model="csm", strategy=OFFLOAD | FILE),
    "dia offloaded": Case(model="dia", strategy=OFFLOAD | BESIDE),
    "speech": Case(model="speech", strategy=BESIDE),
    "speech offloaded": Case(model="speech", strategy=OFFLOAD | FILE),
}


def save_start(folder: Path, case: str) -> Path:
    """Write the model, or the rows, that a case begins with."""
    folder.mkdir()
    name = CASES[case].model
    if name == "llama":
        save_model(folder, **WIDE)
    elif name == "qwen3_moe":
        torch.manual_seed(1)
        settings = AutoConfig.for_model(**MOE, **WIDE, num_hidden_layers=2, max_position_embeddings=64)
        AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    elif name in SPEECH:
        write_shard(folder / "shard-00000.parquet", speech_families.make_rows(SPEECH[name][1]))
    elif name == "speech":
        write_shard(folder / "shard-00000.parquet", make_speech_rows())
    else:
        save_classifier(folder, RESNET if name == "resnet" else VIT)
    return folder


def _build(folder: Path, case: Case) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    size = 4 // dist.get_world_size()
    if case.model in SPEECH:
        return speech_families.build_task(SPEECH[case.model][0]), speech_families.build_data(folder, batch_size=size)
    if case.model in ("llama", "qwen3_moe"):
        return build_task(folder, **case.task), Rows(WIDE["vocab_size"], size)
    if case.model == "speech":
        return build_speech_task(), build_speech_data(folder, batch_size=size)
    options: dict[str, Any] = {"num_classes": NUM_CLASSES, "head": "keep"}
    schedule = LRSchedule(type="constant")
    return ImageClassification(pretrained=str(folder), lr_scheduler=schedule, **options), ImageRows(size)


def _fit(folder: Path, case: Case, ckpt_path: Path | None) -> dict[str, Tensor]:
    pl.seed_everything(0, verbose=False)
    saver = ModelCheckpoint(folder / "runs", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    task, data = _build(folder, case)
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False, **case.strategy),
        callbacks=[*([saver] if ckpt_path is None else []), *(make() for make in case.callbacks)],
        default_root_dir=folder,
        **{"accelerator": "gpu", "max_steps": NUM_STEPS, "enable_checkpointing": ckpt_path is None, **case.trainer},
    )
    trainer.fit(task, data, ckpt_path=ckpt_path)
    is_offloaded = case.strategy.get("cpu_offload") is not None
    assert {parameter.device.type for parameter in task.parameters()} == {"cpu" if is_offloaded else "cuda"}
    assert {buffer.device.type for buffer in task.buffers()} <= {"cuda"}
    if is_offloaded:
        shards = [p.to_local() for p in task.parameters()]  # type: ignore[operator]
        assert {shard.is_pinned() for shard in shards if shard.numel()} == {
            case.strategy["cpu_offload"].pin_memory is None
        }
    sync_buffers(task)  # as a checkpoint does
    return gather_weights(task)  # type: ignore[arg-type]


def train_and_go_on(folder: Path, name: str, tolerance: float) -> None:
    """Train a case, saving after each step; go on from the second step, and compare the weights at the end."""
    case = CASES[name]
    whole = _fit(folder, case, None)
    resumed = _fit(folder, case, folder / "runs" / "step=2.ckpt")
    assert whole.keys() == resumed.keys()
    for key, weight in whole.items():
        assert torch.allclose(weight, resumed[key], rtol=0.0, atol=tolerance), key
