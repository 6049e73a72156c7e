"""Out of memory: what took it, and which settings would take less."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter
from typing_extensions import override

from lit_fsdp.planning.advice import Situation, Suggestion, suggest_settings
from lit_fsdp.profiling.device_memory import (
    is_out_of_memory,
    read_resident_bytes,
    start_recording,
    stop_recording,
    write_snapshot,
)
from lit_fsdp.profiling.expected_communication import count_gathered_bytes
from lit_fsdp.profiling.memory import KINDS, Kind, is_on, iterate_states, measure_states
from lit_fsdp.redaction import redact
from lit_fsdp.reporting.lost_logs import outlive_lost_log
from lit_fsdp.reporting.metrics import find_run_folder
from lit_fsdp.sharding.buffers import has_batch_statistics
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.launcher import outlive_children
from lit_fsdp.strategy.retried_step import check_retries

_GIB = 2**30
_EVALUATIONS: dict[TrainerFn | None, str] = {TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
_EVALUATING = ("validation", *_EVALUATIONS.values())


class OOMReport(Callback):
    """Say what was in memory when there was none left, and what would help, in ``out_of_memory.md``.

    The file in the run's folder has, of the first rank that failed: what was being done, the memory by kind, the
    largest tensors, the settings that would help with what each would save, and the traceback. The first part is
    printed too. Every rank then fails with the error it had: ranks that wait for it end with the run, as after any
    other error.

    The kernel may end a process that takes too much host memory without a word; then there is no report.

    Args:
        num_tensors: How many of the largest tensors to list.
        snapshot: Note the last 100,000 allocations of a GPU in training, and write them beside the report
            (``out_of_memory_rank_<r>.pickle``) for https://pytorch.org/memory_viz. Costs some hundred MiB of host
            memory for each rank, and some time in every step. GPU only.
        fallback_dir: Folder for it if the run has none of its own, which it has with TensorBoardLogger or
            CSVLogger; by default the Trainer's ``default_root_dir``.
    """

    def __init__(self, num_tensors: int = 10, snapshot: bool = False, fallback_dir: str | None = None) -> None:
        if num_tensors < 1:
            raise ValueError(f"num_tensors: got {num_tensors}: expected 1 or more")
        self.num_tensors = num_tensors
        self.snapshot = snapshot
        self.fallback_dir = fallback_dir
        self._folder: Path | None = None
        self._phase, self._batch = "the start", None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.snapshot and trainer.strategy.root_device.type != "cuda":
            raise ValueError("snapshot: got true: only CUDA has them; leave it out")
        self._phase, self._batch = f"the start of {stage}", None
        self._resident_bytes = read_resident_bytes()
        self._folder = find_run_folder(trainer, self.fallback_dir)
        if trainer.is_global_zero:  # of an earlier run in this folder
            (self._folder / "out_of_memory.md").unlink(missing_ok=True)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.snapshot:
            start_recording(self)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._phase, self._batch = "forward", batch

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._phase = "backward"

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._phase = "the optimizer step"

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._phase, self._batch = "what follows a step", None

    @override
    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self._phase, self._batch = _EVALUATIONS.get(trainer.state.fn, "validation"), batch

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]  # for ``*_``

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self._report(trainer, pl_module, exception)
        finally:
            stop_recording(self)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._batch = None
        stop_recording(self)

    def _report(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        batch, self._batch = self._batch, None
        if self._folder is None or not is_out_of_memory(exception):
            return
        outlive_children(trainer.strategy.launcher)
        where = f"rank {trainer.global_rank} of {trainer.world_size}, in {self._phase}, step {trainer.global_step + 1}"
        try:
            head = self._describe(trainer, pl_module, exception, batch, where=where)
        except Exception as error:  # noqa: BLE001  there may be no memory for this either, and the cause must be heard
            print(f"out of memory on {where}; no report: {type(error).__name__}: {error}", flush=True)
            return
        head, stack = redact((head, "".join(traceback.format_exception(exception))))
        path = self._folder / "out_of_memory.md"
        with outlive_lost_log(trainer, type(self).__name__, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("x", encoding="utf-8") as file:  # of the first rank that fails
                    file.write(f"{head}\n## Traceback\n\n```\n{stack}```\n")
                print(f"{head}\nreport: {path}", flush=True)
            except FileExistsError:
                print(f"out of memory on {where}; another rank has reported: {path}", flush=True)
            if self.snapshot:
                write_snapshot(self._folder / f"out_of_memory_rank_{trainer.global_rank}.pickle")

    def _describe(
        self, trainer: Trainer, module: LightningModule, error: BaseException, batch: Any, *, where: str
    ) -> str:
        device = trainer.strategy.root_device
        held = measure_states(module, trainer.optimizers, device=device)
        lines = [f"# Out of memory on {where}", "", str(error).strip().split("\n")[0], ""]
        allocated, reserved = read_resident_bytes() - self._resident_bytes, 0
        if device.type == "cuda":
            allocated = torch.cuda.memory_allocated(device)
            reserved = torch.cuda.memory_reserved(device) - allocated
            free, total = torch.cuda.mem_get_info(device)
            others = total - free - allocated - reserved
            taken = f"Of {_gib(total)} the tensors of this rank took {_gib(allocated)}; the allocator held another"
            lines += [f"{taken} {_gib(reserved)}, and {_gib(others)} went to CUDA, NCCL and other processes.", ""]
        held["activations"] = max(allocated - sum(held.values()), 0)
        lines += ["## By kind", "", "| kind | GiB |", "|---|---|"]
        spelled = {"activations": "activations and the rest"}
        lines += [f"| {spelled.get(k, k.replace('_', ' '))} | {held[k] / _GIB:.3f} |" for k in KINDS if held.get(k)]
        if device.type != "cuda":
            lines += ["", f"In all, what the process has grown by since the start: {_gib(allocated)}."]
        lines += ["", "## Largest tensors", "", "| tensor | shape | dtype | GiB |", "|---|---|---|---|"]
        lines += _list_largest(trainer, module, device, self.num_tensors)
        strategy = trainer.strategy
        if isinstance(strategy, FSDP2Strategy) and strategy.plan:
            situation = _assess(strategy, module, held, reserved, batch, is_evaluating=self._phase in _EVALUATING)
            lines += ["", "## What would help", "", *_list_suggestions(suggest_settings(situation))]
            if self._phase in ("forward", "backward") and _could_retry(strategy, module):
                again = "a step that runs out of memory is redone in smaller parts, with the same result"
                lines += ["", f"With trainer.strategy.oom_retries: 4 {again}."]
        return "\n".join(lines) + "\n"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def _iterate_alive(device: torch.device) -> Iterator[Tensor]:
    for thing in gc.get_objects():
        # Not isinstance(): some things import a module when they are asked for their class.
        if not issubclass(type(thing), Tensor) or issubclass(type(thing), DTensor) or not is_on(thing, device):
            continue
        if thing.layout is torch.strided and not torch._is_functional_tensor(thing):  # else it has no storage
            yield thing


def _list_largest(trainer: Trainer, module: LightningModule, device: torch.device, num_tensors: int) -> list[str]:
    names: dict[int, str] = {}
    for kind, name, tensor in iterate_states(module, trainer.optimizers):
        label = {"parameters": name, "gathered": f"{name}, gathered", "gradients": f"gradient of {name}"}
        names[tensor.untyped_storage()._cdata] = label.get(kind, f"optimizer state of {name}")
    sizes: dict[int, tuple[int, Tensor]] = {}
    for tensor in _iterate_alive(device):
        storage = tensor.untyped_storage()
        sizes.setdefault(storage._cdata, (storage.nbytes(), tensor))
    largest = sorted(sizes.items(), key=lambda item: -item[1][0])[:num_tensors]
    return [
        f"| {names.get(key, '-')} | {list(tensor.shape)} | {str(tensor.dtype).removeprefix('torch.')} "
        f"| {num_bytes / _GIB:.3f} |"
        for key, (num_bytes, tensor) in largest
    ]


def _assess(
    strategy: FSDP2Strategy,
    module: LightningModule,
    held: dict[Kind, int],
    reserved: int,
    batch: Any,
    *,
    is_evaluating: bool,
) -> Situation:
    plan, settings = strategy.plan, strategy.settings
    sizes_of_mesh = strategy.mesh_sizes
    parameters = dict(module.named_parameters())
    stored = {p.element_size() for p in parameters.values() if p.is_floating_point()}
    compute = strategy.precision_plugin.mixed_precision.build_policy().param_dtype
    units = ([parameters[name] for name in unit.parameters if name in parameters] for unit in plan)
    sizes = [count_gathered_bytes(own, compute) for own in units]
    data = get_data_module(module.trainer)
    reads_eval_size = is_evaluating and hasattr(data, "eval_batch_size")
    return Situation(
        held=held,
        reserved=reserved,
        settings=settings,
        num_shards=sizes_of_mesh.num_shards,
        num_replicas=sizes_of_mesh.replicate,
        num_blocks=sum(unit.kind == "block" for unit in plan),
        num_params=sum(unit.num_params for unit in plan),
        num_trainable=sum(unit.num_trainable for unit in plan),
        gathered_bytes=sum(sizes),
        largest_unit_bytes=max(sizes, default=0),
        parameter_bytes=stored.pop() if len(stored) == 1 else 0,
        batch_size=_get_batch_size(data, batch, "eval_batch_size" if reads_eval_size else "batch_size"),
        batch_setting="data.eval_batch_size" if reads_eval_size else "data.batch_size",
        is_evaluating=is_evaluating,
        has_global_batch=getattr(data, "global_batch_size", None) is not None,
        is_sum_of_rows=getattr(module, "is_sum_of_rows", True),
        can_add_adapters=_is_unset(module, "lora"),
        can_quantize=_is_unset(module, "quantization"),
        has_seq_length=hasattr(data, "seq_length"),
        optimizer_name=own.name if (own := getattr(module, "optimizer_settings", None)) is not None else None,
        is_gpu=strategy.root_device.type == "cuda",
    )


def _get_batch_size(data: object, batch: Any, name: str) -> int:
    """Return the setting: a pair is two rows of a batch. Without one the rows; 0 where they differ or frames decide."""
    if name == "batch_size" and getattr(data, "max_frames_per_batch", None) is not None:
        return 0
    if isinstance(size := getattr(data, name, None), int):
        return size
    rows = {t.shape[0] for t in tree_iter(batch) if isinstance(t, Tensor) and t.dim()}
    return rows.pop() if len(rows) == 1 else 0


def _is_unset(module: LightningModule, name: str) -> bool | None:
    """Return whether a task has this setting and does not use it; ``None`` if it has none."""
    return getattr(module, name) is None if hasattr(module, name) else None


def _could_retry(strategy: FSDP2Strategy, module: LightningModule) -> bool:
    """Whether ``oom_retries`` is left to be set, and would not be refused."""
    try:
        check_retries(1, strategy.settings)
    except ValueError:
        return False
    can_split = hasattr(module, "split_batch") and getattr(module, "is_sum_of_rows", True)
    return not strategy.oom_retries and module.automatic_optimization and can_split and not has_batch_statistics(module)


def _list_suggestions(suggestions: Iterable[Suggestion]) -> Iterator[str]:
    yield "| setting | saves about, GiB | in return |"
    yield "|---|---|---|"
    for suggestion in suggestions:
        cost = suggestion.cost if suggestion.keeps_result else f"{suggestion.cost}; another result"
        yield f"| {suggestion.setting} | {suggestion.saved_bytes / _GIB:.2f} | {cost} |"
