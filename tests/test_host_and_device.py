"""Runs on ranks that pass for GPUs: nothing mixes host and device, nothing reads what has not arrived.

See ``stand_in_gpu.py`` for what that checks. Each run saves a checkpoint beside or between its steps, and a second one
goes on from there to the same weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from adapter_training import LORA
from adapter_training import SIZES as WIDE
from image_training import NUM_CLASSES, RESNET, ImageRows, save_classifier
from image_training import VIT as VIT_SIZES
from lightning.pytorch.callbacks import ModelCheckpoint
from speech_training import build_data as build_speech_data
from speech_training import build_task as build_speech_task
from speech_training import make_rows as make_speech_rows
from stand_in_gpu import TooEarlyError, WrongPlaceError, find_place, run_as_gpus
from torch import Tensor, nn
from training import Rows, build_task, build_trainer, gather_weights, save_model

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, MixedPrecision, Sharding
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks import ImageClassification, LRSchedule, Optimizer
from lit_fsdp.tasks.tts.preparation.prepared import write_shard

NUM_STEPS = 3  # and a checkpoint after each


def add(first: Tensor, second: Tensor) -> None:
    first + second


def copy_early(number: Tensor, use: Callable[[Tensor], Any], wait: Callable[[], None] = lambda: None) -> None:
    arriving = number.to("cpu", non_blocking=True)
    wait()
    use(arriving)


def overwrite_early(wait: Callable[[], None] = lambda: None) -> None:
    shard = torch.zeros(4).pin_memory()
    shard.to("cuda", non_blocking=True)
    wait()
    shard.add_(1)


def wait_for_event() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def wait_for_other_stream() -> None:
    torch.cuda.Stream().record_event().synchronize()


def refuse() -> None:
    host, device = torch.ones(4), torch.ones(4, device="cuda")
    assert (host.device.type, device.device.type, nn.Parameter(device).is_cuda) == ("cpu", "cuda", True)
    assert find_place(torch.zeros_like(device)[1:].float()) == find_place(device.new_empty(2)) == "device"
    assert find_place(device.cpu()) == find_place(torch.zeros_like(device, device="cpu")) == "host"
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    (leaf * torch.tensor(2.0) + device[torch.tensor([0, 1, 2, 3])]).sum().backward()  # numbers and indices may mix
    assert leaf.grad is not None and leaf.grad.is_cuda and leaf.grad.tolist() == [2.0] * 4  # noqa: PT018
    for mix in (
        lambda: add(host, device),
        lambda: torch.cat([host, device]),
        lambda: torch.ones(()).add_(device.sum()),
        lambda: host[torch.tensor([0], device="cuda")],
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([device], device[0], host[0]),
        lambda: nn.functional.embedding(torch.tensor([0]), device.view(2, 2)),
        device.numpy,
        device.pin_memory,
    ):
        with pytest.raises(WrongPlaceError):
            mix()  # type: ignore[no-untyped-call]
    for early in (
        lambda: copy_early(device, lambda t: t + 1),
        lambda: copy_early(device.sum(), Tensor.item),
        lambda: copy_early(device, Tensor.numpy),
        lambda: copy_early(device, lambda t: torch.save(t, "/dev/null")),
        lambda: copy_early(device, lambda t: t + 1, wait_for_other_stream),
        overwrite_early,
    ):
        with pytest.raises(TooEarlyError):
            early()
    for wait in (wait_for_event, torch.cuda.synchronize, torch.cuda.current_stream().synchronize, device.sum().item):
        copy_early(device, Tensor.numpy, wait)
        overwrite_early(wait)
    copy_early(device, lambda t: t.to("cuda", non_blocking=True))  # in order, on one stream


def test_the_stand_in_refuses_what_mixes_and_what_comes_too_early() -> None:
    run_as_gpus(refuse)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    model: str = "llama"
    task: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


OFFLOAD = {"cpu_offload": CPUOffload()}
FILE, BESIDE = {"checkpoint_format": "single_file"}, {"async_save": True}
SCALED = {"precision": "16-mixed"}
QLORA = {"lora": LORA, "quantization": Quantization()}
CASES = {
    "float16 offloaded, one file": Case(strategy=OFFLOAD | FILE, trainer=SCALED),
    "nf4 offloaded, one file": Case(task=QLORA, strategy=OFFLOAD | FILE),
    "nf4 offloaded, saved beside": Case(task=QLORA, strategy=OFFLOAD | BESIDE, trainer={"precision": "bf16-true"}),
    "full, accumulated": Case(
        strategy=BESIDE | {"sharding": Sharding(no_sync=True)}, trainer={"accumulate_grad_batches": 2}
    ),
    "full offloaded, accumulated": Case(strategy=OFFLOAD | BESIDE, trainer={"accumulate_grad_batches": 2}),
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
    "8-bit adamw offloaded": Case(task={"optimizer": Optimizer(name="adamw_8bit")}, strategy=OFFLOAD | FILE),
    "images, batch norm offloaded, one file": Case(model="resnet", strategy=OFFLOAD | FILE),
    "images, batch norm, saved beside": Case(model="resnet", strategy=BESIDE),
    "images, vit offloaded": Case(model="vit", strategy=OFFLOAD | BESIDE),
    "speech": Case(model="speech", strategy=BESIDE),
    "speech offloaded": Case(model="speech", strategy=OFFLOAD | FILE),
}


def save_start(folder: Path, name: str) -> None:
    """Write the model, or the rows, that a case begins with."""
    folder.mkdir()
    if name == "llama":
        save_model(folder, **WIDE)
    elif name == "speech":
        write_shard(folder / "shard-00000.parquet", make_speech_rows())
    else:
        save_classifier(folder, RESNET if name == "resnet" else VIT_SIZES)


def build(folder: Path, case: Case) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    size = 4 // dist.get_world_size()
    if case.model == "llama":
        return build_task(folder, **case.task), Rows(WIDE["vocab_size"], size)
    if case.model == "speech":
        return build_speech_task(), build_speech_data(folder, batch_size=size)
    options: dict[str, Any] = {"num_classes": NUM_CLASSES, "head": "keep"}
    schedule = LRSchedule(type="constant")
    return ImageClassification(pretrained=str(folder), lr_scheduler=schedule, **options), ImageRows(size)


def fit(folder: Path, case: Case, ckpt_path: Path | None, *, steps: int = NUM_STEPS) -> dict[str, Tensor]:
    torch.manual_seed(0)
    saver = ModelCheckpoint(folder / "runs", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    task, data = build(folder, case)
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False, **case.strategy),
        callbacks=[saver] if ckpt_path is None else None,
        **{"accelerator": "gpu", "max_steps": steps, "enable_checkpointing": ckpt_path is None, **case.trainer},
    )
    trainer.fit(task, data, ckpt_path=ckpt_path)
    is_offloaded = case.strategy.get("cpu_offload") is not None
    assert {find_place(parameter) for parameter in task.parameters()} == {"host" if is_offloaded else "device"}
    assert {find_place(buffer) for buffer in task.buffers()} <= {"device"}
    if is_offloaded:
        is_pinned = {p.to_local().is_pinned() for p in task.parameters()}  # type: ignore[operator]
        assert is_pinned == {case.strategy["cpu_offload"].pin_memory is None}
    return gather_weights(task)  # type: ignore[arg-type]


def train_and_go_on(folder: Path, case: Case) -> None:
    whole = fit(folder, case, None)
    resumed = fit(folder, case, folder / "runs" / "step=2.ckpt")
    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name


@pytest.mark.full(after=3)
@pytest.mark.parametrize("name", list(CASES))
def test_a_run_keeps_host_and_device_apart_and_resumes_exactly(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_start(tmp_path / "start", case.model)
    run_as_gpus(train_and_go_on, tmp_path / "start", case, world_size=2)
