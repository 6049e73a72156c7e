"""A window of steps is traced on every rank, and nothing goes on running after it."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity
from training import EVEN, GLOBAL_BATCH, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import Profile
from ranks import run_ranks


def fit(folder: Path, root: Path, callbacks: list[Any], max_steps: int = 5) -> None:
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False),
        callbacks=callbacks,
        default_root_dir=root,
        max_steps=max_steps,
    )
    trainer.fit(build_task(folder), Rows(64, GLOBAL_BATCH // 2))


def is_running() -> bool:
    return bool(torch.autograd._profiler_enabled())


def read_names(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), **EVEN)


def profile_a_window(folder: Path, root: Path) -> None:
    class Watch(Callback):
        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            assert is_running() == (trainer.global_step + 1 in (3, 4))

    fit(folder, root, [Profile(start_step=3, num_steps=2, num_rows=5), Watch()])
    assert not is_running()


@pytest.mark.full
def test_each_rank_writes_the_steps_of_the_window_and_what_took_time(folder: Path, tmp_path: Path) -> None:
    run_ranks(profile_a_window, folder, tmp_path)
    for rank in range(2):
        names = read_names(tmp_path / "profile" / f"rank{rank}.json.gz")
        assert names.count("Optimizer.step#AdamW.step") == 2
        assert len({name for name in names if name.startswith("FSDP::")}) > 3
        # Embedding, three blocks and head in forward, the blocks again in backward, in each of the two steps.
        text = (tmp_path / "profile" / f"rank{rank}.txt").read_text()
        assert re.search(r"FSDP::all_gather +16 x +\d+\.\d+ ms +\d+\.\d %", text)
        assert "Self CPU time total" in text


def leave_early(folder: Path, root: Path) -> None:
    class Failing(Callback):
        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("stop here")

    callback = Profile(start_step=3, num_steps=50, ranks=[1])
    with pytest.raises(RuntimeError, match="stop here"):
        fit(folder, root / "failed", [callback, Failing()])
    assert not is_running()
    fit(folder, root / "short", [callback], max_steps=4)  # the same object once more; the run ends inside the window
    assert not is_running()


@pytest.mark.full
def test_a_run_that_fails_or_ends_inside_the_window_leaves_a_partial_trace(folder: Path, tmp_path: Path) -> None:
    run_ranks(leave_early, folder, tmp_path)
    assert not (tmp_path / "short" / "profile" / "rank0.json.gz").exists()
    failed, short = (read_names(tmp_path / run / "profile" / "rank1.json.gz") for run in ("failed", "short"))
    assert failed.count("Optimizer.step#AdamW.step") == 1 + 1  # the second one never came to its end
    assert short.count("Optimizer.step#AdamW.step") == 2


def end_before(folder: Path, root: Path) -> None:
    with pytest.warns(UserWarning, match="nothing was profiled: start_step is 10, and the run had 2 steps"):
        fit(folder, root, [Profile()], max_steps=2)


def test_a_run_that_ends_before_the_window_says_so(folder: Path, tmp_path: Path) -> None:
    run_ranks(end_before, folder, tmp_path, world_size=1)


def make_event(name: str, begin: int, end: int, *, on_gpu: bool = False, is_range: bool = False) -> FunctionEvent:
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return FunctionEvent(
        begin, name, 0, begin, end, device_type=device, is_user_annotation=is_range, use_device="cuda", stack=[]
    )


def test_a_kernel_counts_once_however_often_the_profiler_of_a_gpu_has_it() -> None:
    operator = make_event("c10d::_allgather_base_", 1, 2)
    operator.append_kernel("ncclDevKernel_AllGather", 0, 25)
    product = make_event("aten::mm", 20, 21)
    product.append_kernel("sgemm", 0, 75)
    kernels = [make_event("ncclDevKernel_AllGather", 5, 30, on_gpu=True), make_event("sgemm", 30, 105, on_gpu=True)]
    ranges = [make_event("FSDP::all_gather (layers.0)", 0, 10, is_range=True)]
    ranges += [make_event("FSDP::all_gather (layers.0)", 4, 30, on_gpu=True, is_range=True)]
    events = EventList([*ranges, operator, product, *kernels], use_device="cuda")
    events._build_tree()
    profiler: Any = SimpleNamespace(key_averages=events.key_averages, activities=[ProfilerActivity.CUDA])
    text = Profile()._summarize(profiler)
    assert re.search(r"FSDP::all_gather +1 x +0\.025 ms +25\.0 %", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_step": 1}, "start_step: got 1: expected 2 or more"),
        ({"num_steps": 0}, "num_steps: got 0: expected 1 or more"),
        ({"ranks": []}, "ranks: got .*: expected numbers of ranks"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Profile(**options)
