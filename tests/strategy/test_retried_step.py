"""A step that runs out of memory on a rank is redone on all of them, with the same result."""

import json
import math
import threading
import warnings
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from memory_faults import PHASES, Fault, Faults, describe_faults, draw_faults
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from training import (
    EVEN,
    UNEVEN,
    Recorder,
    Result,
    Rows,
    build_task,
    build_trainer,
    collate,
    gather_weights,
    list_differences,
    make_rows,
    save_model,
)

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Mesh, Sharding
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim import overlapped_steps
from lit_fsdp.optim.overlapped_steps import HostStepError, OverlappedSteps
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding import gloo_collectives
from lit_fsdp.sharding.shard import Compile
from lit_fsdp.strategy.batch_split import split_rows
from ranks import RankError, run_ranks

STEPS = 3
BATCH = 8  # rows of a step, on all ranks together


def list_phases(settings: dict[str, Any]) -> list[str]:
    """Return those that a step comes to."""
    return [phase for phase in PHASES if phase != "recompute" or "activation_checkpointing" in settings]


def train(
    folder: Path,
    faults: list[Fault] | None,
    *,
    accumulate: int = 1,
    task: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    retries: int = 9,
    **settings: Any,
) -> tuple[Result, list[str], Faults]:
    """Return what a run on these ranks leaves, the steps it has redone, and what this rank knows of its errors."""
    torch.manual_seed(0)
    torch.compiler.reset()  # in a run before, blocks may have been compiled for more than one size
    recorder, injector = Recorder(), Faults(faults, phases=list_phases(settings))
    strategy = FSDP2Strategy(oom_retries=retries, **settings)
    options: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": accumulate, **(trainer or {})}
    runner = build_trainer(strategy, callbacks=[recorder, injector], **options)
    model = build_task(folder, **(task or {}))
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    num_data_ranks = strategy.data_ranks.count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.fit(model, Rows(vocab_size, BATCH // num_data_ranks // accumulate))
    recorder.result.weights = gather_weights(model)
    return recorder.result, strategy.redone_steps, injector


def assert_equal(run: Result, truth: Result, tolerance: float, *what: object) -> dict[str, float]:
    """Return the largest differences, of losses, of gradient norms and of weights; on rank 0, which has the weights."""
    if dist.get_rank():
        return {}
    differences = list_differences(run, truth)
    assert max(differences.values()) <= tolerance, (differences, *what)
    return differences


def test_a_rank_that_runs_out_of_memory_alone_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the step is redone as it was, to the bit. Twice: in halves, to 1e-6."""
    folder = save_model(tmp_path, **UNEVEN)
    monkeypatch.setattr(gloo_collectives, "_LARGE_BYTES", 0)  # gathers as of large units

    def body() -> None:
        truth, redone, _ = train(folder, [])
        assert redone == []
        fault = Fault(rank=1, phase="backward", unit=2)
        run, redone, errors = train(folder, [fault])
        assert errors.raised == [fault] * (dist.get_rank() == 1)
        message = "CUDA out of memory. Tried to allocate 2.00 GiB."
        assert redone == [f"rank 1 ran out of memory in backward of step 2: {message}; redone as it was"]
        assert_equal(run, truth, 0)

        run, redone, _ = train(folder, [fault, Fault(rank=0, phase="unshard", unit=1, step=2)])
        assert redone[1].startswith("rank 0 ran out of memory in forward of step 3: CUDA")
        assert redone[1].endswith("; redone, like all later steps, with each micro-batch in 2 parts")
        assert_equal(run, truth, 1e-6)

    run_ranks(body)


RECOMPUTED = {"activation_checkpointing": ActivationCheckpointing(mode="full")}
OVERLAPPED = CPUOffload(pin_memory=False, overlap_optimizer=True)
NF4 = {"lora": LoRA(r=4, alpha=8), "quantization": Quantization()}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Each with what else the task and the Trainer are given. NF4 and adapters come with their own model.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputation": RECOMPUTED,
    "accumulation": {"accumulate": 2},
    "no_sync": {"accumulate": 2, "sharding": Sharding(no_sync=True)},
    "selective recomputation": {"activation_checkpointing": ActivationCheckpointing(mode="selective")},
    "inputs offloaded": {"activation_checkpointing": ActivationCheckpointing(mode="full", offload=True)},
    "MLP chunks": {"activation_checkpointing": ActivationCheckpointing(mode="full", mlp_chunks=2)},
    "offload": {"cpu_offload": CPUOffload(pin_memory=False)},
    "offload, optimizer beside compute": {"cpu_offload": OVERLAPPED},
    "the same, accumulation": {"cpu_offload": OVERLAPPED, "accumulate": 2},
    "kept gathered": {"sharding": Sharding(reshard_after_forward=False)},
    "gathered once a step": {
        "sharding": Sharding(reshard_after_forward=False, reshard_after_backward=False),
        "accumulate": 2,
    },
    "prefetch": {"sharding": Sharding(forward_prefetch=2, backward_prefetch=2)},
    "two gradients under way": {"sharding": Sharding(reduce_scatter_max_input_buffers=2)},
    "8 bits": {"sharding": Sharding(gather_bits=8, reduce_bits=8)},
    "bf16": {"trainer": {"precision": "bf16-mixed"}},
    "loss in chunks": {"task": {"loss_chunks": 2}},
    "compiled": {"compile": Compile(backend="aot_eager")},
    "nf4, dropout": {"task": {**NF4, "lora": LoRA(r=4, alpha=8, dropout=0.1)}, **RECOMPUTED},
    "nf4, kept dequantized": {
        "task": NF4,
        "activation_checkpointing": ActivationCheckpointing(mode="full", keep_dequantized=True),
        "accumulate": 2,
    },
    "nf4, offload, accumulation, recomputation": {
        "task": NF4,
        "cpu_offload": CPUOffload(pin_memory=False),
        "accumulate": 2,
        **RECOMPUTED,
    },
    "nf4, experts": {"task": {**NF4, "lora": LoRA(r=3, alpha=8, target_parameters=EXPERTS)}},
    "sequence": {"mesh": Mesh(sequence=2)},
    "hybrid": {"mesh": Mesh(replicate=2, shard=2), "world_size": 4},
    "kept over two": {"sharding": Sharding(reshard_after_forward=2), "world_size": 4},
}
NUM_FAULTS = 16  # of each setting in the slow tier
SWEPT = ("plain", "recomputation")  # there, at every rank, phase and unit
# Of a split step, where it is not 1e-6: other random numbers, and more sums, each of which is rounded.
SPLIT_TOLERANCES = {"nf4, dropout": math.inf, "8 bits": 2e-3, "bf16": 1e-3}


def check(folder: Path, out: Path, name: str, settings: dict[str, Any], num_faults: int | None) -> None:
    """Train with one error after the other, or at all places there are; compare each run with one that had none.

    Rank 0 writes what it has seen.
    """
    truth, _, errors = train(folder, None, **settings)
    reached: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reached, errors.reached)
    assert {phase for phase, *_ in errors.reached} == set(list_phases(settings))
    seen = []
    faults: Iterable[Fault] = islice(draw_faults(reached, name), num_faults)
    if num_faults is None:
        faults = (replace(fault, times=times) for fault in faults for times in (1, 2))
    for fault in faults:
        run, redone, errors = train(folder, [fault], **settings)
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(errors.raised))
        assert len(redone) == fault.times, (fault, redone)
        if fault.rank is not None:
            assert counts == [fault.times * (fault.rank == rank) for rank in range(len(counts))], fault
        tolerance = SPLIT_TOLERANCES.get(name, 1e-6) if len(redone) > 1 else 0
        differences = assert_equal(run, truth, tolerance, fault, redone)
        seen.append({**vars(fault), "raised": sum(counts), "redone": len(redone), "differences": differences})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seen))


def survive(folder: Path, name: str, num_faults: int | None) -> list[dict[str, Any]]:
    """Return what :func:`check` has seen."""
    wide = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "head_dim": 32}
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2}
    sizes: dict[str, Any] = EVEN | (wide if "nf4" in name else {}) | (experts if "experts" in name else {})
    model, settings = save_model(folder / "model", **sizes), dict(SETTINGS[name])
    world_size = settings.pop("world_size", 2)
    run_ranks(check, model, folder / "seen", name, settings, num_faults, world_size=world_size, timeout_s=1200)
    return list(json.loads((folder / "seen").read_text()))


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_survives_errors_anywhere(name: str, tmp_path: Path) -> None:
    """To the bit where the step was redone as it was, to 1e-6 where it was split."""
    assert len(survive(tmp_path, name, 3)) == 3


@pytest.fixture(scope="module")
def survived() -> dict[str, list[dict[str, Any]]]:
    """What the next test has seen, by setting."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_errors_anywhere_hundreds_of_times(name: str, tmp_path: Path, survived: dict[str, Any]) -> None:
    survived[name] = survive(tmp_path, name, None if name in SWEPT else NUM_FAULTS)
    assert len(survived[name]) >= NUM_FAULTS


@pytest.mark.slow
def test_they_are_hundreds_and_of_all_phases(tmp_path: Path, survived: dict[str, Any]) -> None:
    """Writes the page that is kept in benchmarks/results."""
    if survived.keys() != SETTINGS.keys():
        pytest.skip("needs all settings of the test above, in this process")
    faults = [fault for faults in survived.values() for fault in faults]
    assert len(faults) >= 200
    assert {fault["phase"] for fault in faults} == set(PHASES)
    (tmp_path / "oom_faults.md").write_text(describe_faults(survived))


class RaggedRows(pl.LightningDataModule):
    """Micro-batches of another size on each rank."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> DataLoader[Any]:
        rank = dist.get_rank()
        first, size = sum(self.sizes[:rank]), self.sizes[rank]
        batches = [list(range(first + step, first + step + size)) for step in range(STEPS)]
        return DataLoader(make_rows(64, 32), batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("cpu_offload", [None, OVERLAPPED])
def test_a_rank_with_fewer_rows_than_parts_counts_nothing_twice(cpu_offload: CPUOffload | None, tmp_path: Path) -> None:
    folder = save_model(tmp_path, **EVEN)

    def fit(faults: list[Fault]) -> tuple[Result, list[str]]:
        torch.manual_seed(0)
        recorder, strategy = Recorder(), FSDP2Strategy(oom_retries=9, cpu_offload=cpu_offload)
        task = build_task(folder)
        trainer = build_trainer(strategy, callbacks=[recorder, Faults(faults)], max_steps=STEPS)
        trainer.fit(task, RaggedRows([6, 1]))
        recorder.result.weights = gather_weights(task)
        return recorder.result, strategy.redone_steps

    def body() -> None:
        truth, _ = fit([])
        run, redone = fit([Fault(rank=0, phase="forward", unit=1, step=0, times=3)])
        assert redone[-1].endswith("with each micro-batch in 4 parts")
        assert_equal(run, truth, 1e-6)

    run_ranks(body)


@pytest.mark.full
def test_a_step_of_the_optimizer_that_runs_out_of_memory_is_not_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward waits for it, but its weights cannot be undone."""
    folder = save_model(tmp_path, **EVEN)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for the state")

    monkeypatch.setattr(overlapped_steps, "_step", fail)

    def body() -> None:
        with pytest.raises(HostStepError, match="MemoryError: no memory for the state"):
            train(folder, [], cpu_offload=OVERLAPPED)

    run_ranks(body)


@pytest.mark.full
def test_a_redone_step_works_beside_compute_as_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed forward has counted would keep gradients from being scaled as they arrive."""
    folder, num_scaled = save_model(tmp_path, **EVEN), []
    end = OverlappedSteps._end_backward

    def watch(steps: OverlappedSteps) -> None:
        num_scaled.append(sum(unit.is_scaled for unit in steps._units))
        end(steps)

    monkeypatch.setattr(OverlappedSteps, "_end_backward", watch)

    def body() -> None:
        train(folder, [Fault(rank=0, phase="forward", unit=3)], cpu_offload=OVERLAPPED)
        assert len(num_scaled) == STEPS
        assert set(num_scaled) == {max(num_scaled)} != {0}

    run_ranks(body)


class Counting(pl.LightningModule):
    """Changes all kinds of things in a step, beside its gradients. Its loss is a mean over rows."""

    mean: Tensor
    smooth: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.norm: nn.Module = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("smooth", torch.zeros(4))
        self.seen = MeanMetric()
        self.num_steps, self.by_name = 0, {"rows": 0}
        self.rows: list[int] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.mean += batch.mean(0)
        self.smooth = 0.9 * self.smooth + batch.mean(0)  # another tensor
        self.norm(batch)
        self.seen.update(batch)
        self.num_steps += 1
        self.rows.append(len(batch))
        self.by_name["rows"] += len(batch)
        loss: Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CountingByRows(Counting):
    """Says how its batches split."""

    def split_batch(self, batch: Tensor, num_parts: int) -> list[Any]:
        return split_rows(batch, num_parts)


def fit_counting(module: Counting, faults: list[Fault], accumulate: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    data: DataLoader[Tensor] = DataLoader(torch.randn(24, 4), batch_size=4)  # type: ignore[arg-type]
    strategy = FSDP2Strategy(oom_retries=9)
    trainer = build_trainer(
        strategy, callbacks=[Faults(faults)], max_epochs=1, max_steps=-1, accumulate_grad_batches=accumulate
    )
    trainer.fit(module, data)
    return {
        "weights": torch.cat([parameter.flatten() for parameter in module.parameters()]).detach(),
        "mean": module.mean.clone(),
        "smooth": module.smooth,
        "running": torch.cat([torch.empty(0), *module.norm.buffers()][:3]),
        "seen": module.seen.compute(),
        "logged": trainer.callback_metrics["loss"],
        "counts": torch.tensor([module.num_steps, len(module.rows), module.by_name["rows"]]),
    }


@pytest.mark.full(after=1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_step_changes_beside_gradients_is_set_back(accumulate: int) -> None:
    """To the bit; with dropout, so random numbers too."""

    def body() -> None:
        torch.manual_seed(3)
        truth = fit_counting(Counting(), [], accumulate)
        for phase in ("forward", "end"):
            torch.manual_seed(3)
            fault = Fault(rank=0, phase=phase, micro_batch=accumulate - 1)
            found = fit_counting(Counting(), [fault], accumulate)
            for name, value in truth.items():
                assert torch.equal(found[name], value), name

    run_ranks(body, world_size=1)


@pytest.mark.full
def test_a_module_says_how_its_batches_split() -> None:
    def body() -> None:
        runs = []
        for faults in ([], [Fault(rank=0, phase="end", times=2)]):
            torch.manual_seed(3)
            module = CountingByRows()
            module.net[2], module.norm = nn.Identity(), nn.Identity()
            runs.append(fit_counting(module, faults))
        truth, found = runs
        for name in ("weights", "logged"):
            assert torch.allclose(found[name], truth[name], rtol=0, atol=1e-6), name
        assert found["counts"].tolist() == [1 + 5 * 2, 1 + 5 * 2, 24]  # all but the first step in halves

    run_ranks(body, world_size=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "batch", "retries", "reason"),
    [
        (Fault(rank=1, phase="backward", times=2), 1, 9, "its micro-batch of 1 row cannot be split further"),
        (Fault(rank=1, phase="forward", times=3), 4, 2, "oom_retries 2 were used up"),
    ],
)
def test_a_step_that_cannot_be_redone_ends_the_run_and_says_why(
    fault: Fault, batch: int, retries: int, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path, **EVEN)

    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(oom_retries=retries), callbacks=[Faults([fault])], max_steps=STEPS)
        trainer.fit(build_task(folder), Rows(64, batch))

    with pytest.raises(RankError, match=f"CUDA out of memory(?s:.*)the step is not redone: {reason}"):
        run_ranks(body)
    assert f"step 2, which is not redone: {reason}" in capfd.readouterr().out


class ByHand(Counting):
    """Makes its steps itself."""

    automatic_optimization = False

    def configure_weights(self) -> None:
        raise AssertionError("weights were loaded before the setting was refused")


@pytest.mark.full
def test_retries_under_manual_optimization_are_refused_before_weights_are_loaded() -> None:
    def body() -> None:
        with torch.device("meta"):
            module = ByHand()
        trainer = build_trainer(FSDP2Strategy(oom_retries=2), gradient_clip_val=None)
        trainer.fit(module, DataLoader(torch.randn(4, 4)))  # type: ignore[arg-type]

    with pytest.raises(RankError, match="ValueError: oom_retries: got 2: under manual optimization"):
        run_ranks(body, world_size=1)


class FindsRate(Counting):
    """Has a learning rate that can be found."""

    lr = 0.1


@pytest.mark.full
def test_a_search_that_begins_training_once_more_leaves_nothing_behind(tmp_path: Path) -> None:
    def body() -> None:
        methods = dict(vars(dist.ProcessGroup))
        finder = LearningRateFinder(num_training_steps=4, early_stop_threshold=None, update_attr=False)
        strategy = FSDP2Strategy(oom_retries=2)
        callbacks = [finder, Faults([Fault(rank=1, phase="end")])]
        trainer = build_trainer(strategy, callbacks=callbacks, max_steps=STEPS, default_root_dir=tmp_path)
        trainer.fit(FindsRate(), DataLoader(torch.randn(32, 4), batch_size=4))  # type: ignore[arg-type]
        assert trainer.global_step == STEPS
        assert len(strategy.redone_steps) == 1
        assert dict(vars(dist.ProcessGroup)) == methods
        assert "step agreement" not in {thread.name for thread in threading.enumerate()}

    run_ranks(body)


def test_batches_split_by_rows() -> None:
    batch = {"ids": torch.arange(10).view(5, 2), "lengths": [[1], [2], [3], [4], [5]], "temperature": 2.0}
    parts = split_rows(batch, 2)
    assert [part["ids"].tolist() for part, _ in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7], [8, 9]]]
    assert [(part["lengths"], part["temperature"]) for part, _ in parts] == [([[1], [2]], 2.0), ([[3], [4], [5]], 2.0)]
    assert [weight for _, weight in parts] == [0.4, 0.6]
    assert len(split_rows(torch.zeros(3), 8)) == 3
    assert [y.tolist() for (_, y), _ in split_rows((torch.zeros(2, 3), torch.arange(2)), 2)] == [[0], [1]]
    with pytest.raises(ValueError, match="place 1 of the batch has 3 rows, and place 0 has 2"):
        split_rows((torch.zeros(2), torch.zeros(3)), 2)
    with pytest.raises(ValueError, match="no tensors with rows"):
        split_rows({"step": 3}, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"oom_retries": -1}, "got -1: expected 0"),
        ({"oom_retries": 2, "mesh": Mesh(tensor=2)}, "mesh.tensor 2"),
        ({"oom_retries": 2, "mesh": Mesh(sequence=2), "compile": Compile()}, "mesh.sequence 2 and compile"),
    ],
)
def test_retries_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"oom_retries: .*{message}"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=FSDP2Strategy(**settings), logger=False)
