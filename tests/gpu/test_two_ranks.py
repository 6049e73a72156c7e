"""Several ranks on one GPU, through gloo: the code that one rank alone never reaches, where there is one card.

Slow: gloo takes everything through host memory. What NCCL does, and how fast, only several GPUs can show.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapter_training import BASES, LORA, SIZES, compare
from adapter_training import fit as fit_adapters
from adapter_training import train_sharded as train_adapters
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Stack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import (
    EVEN,
    GLOBAL_BATCH,
    NUM_STEPS,
    TIED,
    Recorder,
    Result,
    Rows,
    build_task,
    build_trainer,
    fit,
    gather_weights,
    list_differences,
    save_model,
    train_plainly,
)

from benchmarks.one_card import share_card
from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Mesh, Sharding
from lit_fsdp.profiling.communication_meter import CommunicationMeter
from lit_fsdp.quantization.quantize import Quantization
from ranks import run_ranks

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-5  # as in test_parity.py


def train(folder: Path, out: Path, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    fit(folder, out, strategy, {"accelerator": "gpu", **share_card(), **options})


@pytest.mark.parametrize(
    ("config", "world_size", "strategy", "options"),
    [
        (EVEN, 2, {}, {}),
        (TIED, 2, {"sharding": Sharding(reshard_after_forward=False)}, {}),
        (EVEN, 2, {"cpu_offload": CPUOffload(), "activation_checkpointing": ActivationCheckpointing(mode="full")}, {}),
        (EVEN, 2, {"sharding": Sharding(no_sync=True)}, {"accumulate_grad_batches": 2}),
        (EVEN, 4, {"mesh": Mesh(replicate=2)}, {}),
    ],
    ids=["full", "grad_op tied", "offload recompute", "no_sync", "hybrid"],
)
def test_ranks_that_share_a_gpu_train_like_one_cpu(
    config: dict[str, Any], world_size: int, strategy: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder, out = save_model(tmp_path / "model", **config), tmp_path / "result"
    run_ranks(train, folder, out, strategy, options, world_size=world_size, is_on_gpus=True)
    differences = list_differences(Result(**torch.load(out)), train_plainly(folder))
    assert max(differences.values()) <= TOLERANCE, differences


def train_quantized(folder: Path, out: Path, task_options: dict[str, Any], strategy: dict[str, Any]) -> None:
    fit_adapters(folder, out, task_options, strategy, {"accelerator": "gpu", **share_card()})


@pytest.mark.parametrize("base", ["nf4 double", "int8"])
@pytest.mark.parametrize("offload", [None, CPUOffload()], ids=["device", "host"])
def test_quantized_shards_on_a_gpu_train_like_one_cpu(base: str, offload: CPUOffload | None, tmp_path: Path) -> None:
    folder, out = save_model(tmp_path / "model", **SIZES), tmp_path / "result"
    options = {"quantization": BASES.get(base, Quantization(type="int8")), "lora": LORA}
    truth, _ = train_adapters(folder, tmp_path, 1, **options)
    run_ranks(train_quantized, folder, out, options, {"cpu_offload": offload}, is_on_gpus=True)
    differences = compare(Result(**torch.load(out, map_location="cpu")["result"]), truth)
    differences = {n: d for n, d in differences.items() if n in ("losses", "grad_norms") or "lora_" in n}
    assert max(differences.values()) <= 1e-4, differences  # as in test_qlora.py


def save_and_resume(folder: Path, root: Path, offload: CPUOffload | None) -> None:
    """Train at once, and in two runs with a checkpoint that is written beside training."""
    given = {"accelerator": "gpu", **share_card()}
    half = NUM_STEPS // 2

    def run(num_steps: int, ckpt_path: Path | None = None, **options: Any) -> tuple[list[float], dict[str, Any]]:
        recorder, task = Recorder(), build_task(folder)
        first_step = half if ckpt_path is not None else 0
        recorder.result.losses = [0.0] * first_step
        strategy = FSDP2Strategy(print_plan=False, async_save=True, cpu_offload=offload)
        callbacks = [recorder, *options.pop("callbacks", [])]
        trainer = build_trainer(strategy, callbacks=callbacks, max_steps=num_steps, **given, **options)
        rows = Rows(EVEN["vocab_size"], GLOBAL_BATCH // dist.get_world_size())
        trainer.fit(task, rows, ckpt_path=ckpt_path)
        return recorder.result.losses[first_step:], gather_weights(task)

    whole_losses, whole = run(NUM_STEPS)
    # Of two saves the second one takes the buffers of the first.
    keeper = ModelCheckpoint(root, filename="{step}", every_n_train_steps=half // 2, save_top_k=-1)
    run(half, callbacks=[keeper], enable_checkpointing=True, default_root_dir=root)
    (path,) = (p for p in root.iterdir() if f"step={half}" in p.name)
    losses, weights = run(NUM_STEPS, ckpt_path=path)
    assert losses == pytest.approx(whole_losses[half:], abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("offload", [None, CPUOffload()], ids=["device", "host"])
def test_a_checkpoint_written_beside_training_resumes(offload: CPUOffload | None, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(save_and_resume, folder, tmp_path / "run", offload, is_on_gpus=True)


def meter_steps() -> None:
    share_card()
    device = torch.device("cuda", 0)
    mesh = init_device_mesh("cuda", (2,))
    model = Stack(width=512, num_blocks=4).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    meter = CommunicationMeter(model, device)
    meter.attach()
    x = torch.ones(64, 5, device=device)
    for step in range(6):
        meter.resume()
        model(x).sum().backward()
        meter.end_step(step)
    steps = meter.take(wait=True)
    assert [step.tag for step in steps] == list(range(6))
    for step in steps[2:]:  # the first ones initialize
        assert step.add_up("all_gather").calls == 9
        assert step.add_up("reduce_scatter").calls == 5
        assert all(unit.seconds > 0 and 0 <= unit.exposed_s <= unit.seconds for unit in step.units)
        assert step.add_up().exposed_s <= step.step_s


def test_collectives_of_ranks_that_share_a_gpu_are_timed() -> None:
    run_ranks(meter_steps, is_on_gpus=True)
