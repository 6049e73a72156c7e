"""What MemoryLogger logs, prints and leaves behind."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from training import EVEN, GLOBAL_BATCH, LENGTH, Recorder, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import MemoryLogger
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.profiling.memory import measure_states
from lit_fsdp.reporting.lost_logs import list_lost_logs
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.wrap import Wrap
from lit_fsdp.tasks import CausalLM
from ranks import run_ranks


class Sizes(Recorder):
    """Reads the bytes that stay, for comparison, and holds some memory on the last rank."""

    held: dict[str, int]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.held = measure_states(pl_module, trainer.optimizers)  # type: ignore[assignment]
        if trainer.is_last_batch is False and dist.get_rank() == dist.get_world_size() - 1:
            self.ballast = torch.ones(2**25)  # 128 MiB


def fit(folder: Path, out: Path, options: dict[str, Any], settings: dict[str, Any], strategy: dict[str, Any]) -> None:
    """Train four steps, and check on every rank what can be checked there."""
    memory, sizes = MemoryLogger(**settings), Sizes()
    logger = CSVLogger(out, name="", version="")
    options = {"max_steps": 4, "log_every_n_steps": 1, "logger": logger, "default_root_dir": out, **options}
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), callbacks=[memory, sizes], **options)
    batch_size = GLOBAL_BATCH // dist.get_world_size() // options.get("accumulate_grad_batches", 1)
    trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], batch_size))
    section = memory.make_section()
    assert section is not None
    if dist.get_world_size() > 1:
        assert section.numbers["rss_gib"]["max_rank"] == dist.get_world_size() - 1
        assert len(section.numbers["peak_rss_gib"]["ranks"]) == dist.get_world_size()
    if settings.get("trace_step", 2) is None or strategy.get("compile"):
        assert "step" not in section.numbers
        return
    step = section.numbers["step"]
    assert step["step"] == 2
    if dist.get_rank() == 0:
        predicted = section.numbers["predicted"]
        assert predicted["measured_bytes"] == step["peak_bytes"]
        assert abs(predicted["difference_pct"]) < 1
        assert predicted["peak_bytes_by_kind"]["optimizer_state"] == step["peak_bytes_by_kind"]["optimizer_state"]
        assert (section.tables[1].title[:22], section.tables[1].columns[1]) == (
            "Tensors in step 2, ran",
            "predicted peak",
        )
        assert any("peak predicted" in note for note in section.notes)
        which = "the largest micro-batch" if options.get("accumulate_grad_batches", 1) > 1 else "the batch"
        shape = f"{batch_size} rows of {LENGTH} tokens, without a mask of attention"
        assert f"Predicted for {which}, {shape}, of that step and rank; plan counts" in section.notes[1]
    assert step["largest_bytes_by_kind"]["parameters"] == sizes.held["parameters"]
    assert step["peak_bytes"] == sum(step["peak_bytes_by_kind"].values())
    assert step["peak_bytes_by_unit"]["model.model.layers.0"]["parameters"] > 0
    # No gradient of the step before is kept through forward.
    plot = section.plots[1]
    gradients = next(curve for curve in plot.curves if curve.label == "gradients")
    assert max(gradients.y) > 0
    end_of_forward = plot.spans[0][2]
    assert not any(y for x, y in zip(gradients.x, gradients.y, strict=True) if x < end_of_forward)
    phases = [name for name, _, _ in section.plots[1].spans]
    assert phases == ["forward", "backward"] * options.get("accumulate_grad_batches", 1) + ["optimizer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), **EVEN)


def read_rows(out: Path) -> list[dict[str, str]]:
    lines = [line.split(",") for line in (out / "metrics.csv").read_text().splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.mark.full
def test_it_logs_every_step_and_names_the_rank_that_holds_most(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit, folder, tmp_path, {}, {}, {}, world_size=2)
    rows = [row for row in read_rows(tmp_path) if row.get("memory/rss_gib")]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert float(rows[-1]["memory/max_peak_rss_gib"]) > float(rows[-1]["memory/peak_rss_gib"])
    assert float(rows[-1]["memory/max_peak_rss_gib_rank"]) == 1
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["run.png", "step.png"]


@pytest.mark.full
def test_a_step_far_from_its_prediction_is_warned_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Activations of a row more than the step has.
    monkeypatch.setattr(CausalLM, "measure_batch", lambda *_: MicroBatch(rows=GLOBAL_BATCH + 3, length=LENGTH))

    def body() -> None:
        memory = MemoryLogger()
        options: dict[str, Any] = {"max_steps": 3, "default_root_dir": tmp_path}
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[memory], **options)
        with pytest.warns(UserWarning, match=r"memory of step 2: peak predicted .* \(-\d\d.\d %\): a plan of this run"):
            trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], GLOBAL_BATCH))

    run_ranks(body, world_size=1)


def replace_measuring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CausalLM, "measure_batch", lambda *_: None)


def replace_step(patch: pytest.MonkeyPatch) -> None:
    class Mine(CausalLM):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    patch.setattr("training.CausalLM", Mine)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "strategy", "reason"),
    [
        (replace_measuring, {}, "CausalLM does not say what shape its batches have (measure_batch)"),
        (replace_step, {}, "Mine: overrides training_step, which the closed form cannot see"),
        (None, {"cpu_offload": CPUOffload()}, "on a CPU, offload moves nothing"),
        (None, None, "the strategy is SingleDeviceStrategy"),
    ],
)
def test_where_nothing_is_predicted_the_reason_is_said(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    strategy: dict[str, Any] | None,
    reason: str,
) -> None:
    if change is not None:
        change(monkeypatch)

    def body() -> None:
        memory = MemoryLogger()
        options: dict[str, Any] = {"max_steps": 3, "default_root_dir": tmp_path}
        chosen = "auto" if strategy is None else FSDP2Strategy(print_plan=False, **strategy)
        build_trainer(chosen, callbacks=[memory], **options).fit(
            build_task(folder), Rows(EVEN["vocab_size"], GLOBAL_BATCH)
        )
        section = memory.make_section()
        assert section is not None
        assert "predicted" not in section.numbers
        assert section.notes == [f"Nothing was predicted: {reason}."]

    run_ranks(body, world_size=1)


@pytest.mark.full
def test_of_micro_batches_alike_the_one_with_a_mask_is_predicted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = (MicroBatch(rows=2, length=LENGTH, is_masked=is_masked) for is_masked in (False, True))
    monkeypatch.setattr(CausalLM, "measure_batch", lambda *_: next(shapes))

    def body() -> None:
        memory = MemoryLogger(warn_pct=1000)
        options: dict[str, Any] = {"max_steps": 2, "accumulate_grad_batches": 2, "default_root_dir": tmp_path}
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[memory], **options)
        trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], 2))
        section = memory.make_section()
        assert section is not None
        assert f"2 rows of {LENGTH} tokens, with a mask of attention" in section.notes[1]

    run_ranks(body, world_size=1)


def test_accumulated_micro_batches_are_one_step(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit, folder, tmp_path, {"accumulate_grad_batches": 2}, {}, {}, world_size=2)


def test_units_that_are_chosen_by_class_names_are_predicted_too(folder: Path, tmp_path: Path) -> None:
    """FSDP2 puts classes of its own before those names, and a model is predicted when it is sharded."""
    wrap = Wrap(policy="module_classes", module_classes=["LlamaDecoderLayer"])
    run_ranks(fit, folder, tmp_path, {"max_steps": 2}, {}, {"wrap": wrap}, world_size=1)


@pytest.mark.full
def test_without_a_traced_step_the_rest_is_there(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit, folder, tmp_path, {}, {"trace_step": None}, {}, world_size=1)
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["run.png"]


def fit_twice_and_fail(folder: Path, out: Path) -> None:
    memory = MemoryLogger()
    for stop in (3, 2):  # the second run ends while its step is traced
        options: dict[str, Any] = {"max_steps": stop, "log_every_n_steps": 1, "default_root_dir": out}
        trainer = build_trainer("auto", callbacks=[memory], **options)
        task = build_task(folder)
        if stop == 2:
            task.on_before_optimizer_step = fail_in_step_2.__get__(task)  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="in the traced step"):
                trainer.fit(task, Rows(EVEN["vocab_size"], GLOBAL_BATCH))
        else:
            trainer.fit(task, Rows(EVEN["vocab_size"], GLOBAL_BATCH))
            assert memory.make_section().numbers["step"]["step"] == 2  # type: ignore[union-attr]
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert memory.make_section() is None


def fail_in_step_2(self: Any, optimizer: Any) -> None:
    if self.global_step == 1:
        raise RuntimeError("in the traced step")


def test_an_error_in_the_traced_step_leaves_no_mode_behind(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit_twice_and_fail, folder, tmp_path, world_size=1)


def test_a_trial_run_leaves_no_files(folder: Path, tmp_path: Path) -> None:
    trial = MemoryLogger(), {"fast_dev_run": 3, "default_root_dir": tmp_path / "out"}

    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[trial[0]], **trial[1])
        trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], GLOBAL_BATCH))

    run_ranks(body, world_size=1)
    assert not (tmp_path / "out" / "memory").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace_step": 1}, "trace_step: got 1: .* expected 2 or more"),
        ({"warn_pct": 0}, "warn_pct: got 0: expected above 0"),
        ({"snapshot_steps": [0]}, "snapshot_steps: got \\[0\\]: steps are counted from 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryLogger(**settings)


def test_a_snapshot_that_a_disk_does_not_take_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("lit_fsdp.callbacks.memory.write_snapshot", write)
    trainer, memory = Trainer(accelerator="cpu", logger=False), MemoryLogger(snapshot_steps=[1])
    memory._folder, memory._is_recording = tmp_path, True
    with pytest.warns(UserWarning, match=r"MemoryLogger cannot write to .*: No space left on device: training goes on"):
        memory._write_snapshot(trainer)
    assert list_lost_logs(trainer) == ["MemoryLogger: No space left on device"]


def test_snapshots_without_a_gpu_are_refused(folder: Path) -> None:
    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[MemoryLogger(snapshot_steps=[2])])
        with pytest.raises(ValueError, match="only CUDA"):
            trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], GLOBAL_BATCH))

    run_ranks(body, world_size=1)
