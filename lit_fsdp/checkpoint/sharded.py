"""Sharded checkpoints: one folder per checkpoint, written by all ranks, read at any number of ranks.

Note [Complete or not there]: a checkpoint is written into a hidden folder beside its place; last comes a manifest
with the size and checksum of every file, then the folder is renamed. Each step is on the disk before the next, and
before an older checkpoint is removed. So a run that is killed at any moment, or whose machine loses power, leaves
either the whole checkpoint or none of that name. A file that is lost or cut short later is found before anything is
loaded, as is a changed byte in a small file, and with ``verify`` "full" in any file.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from typing_extensions import override

from lit_fsdp.checkpoint.leftovers import make_room
from lit_fsdp.checkpoint.manifest import (
    ChecksumFileSystem,
    Verify,
    check_files,
    describe_files,
    is_complete,
    write_manifest,
)
from lit_fsdp.checkpoint.optimizer_state import drop_state, keep_kernels, make_loadable_state
from lit_fsdp.checkpoint.places import get_save_number, put_in_place, remove_older, write_beside
from lit_fsdp.checkpoint.remote import Location, RemotePath
from lit_fsdp.checkpoint.space import SHARED, wait_for
from lit_fsdp.checkpoint.staging import has_gpu_tensors
from lit_fsdp.checkpoint.untrusted import load_plain, load_state, read_metadata
from lit_fsdp.errors import join_names
from lit_fsdp.files import DiskFullError, find_disk_full, sync_path
from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.sharding.mesh import DataRanks, gather_objects
from lit_fsdp.sharding.random_state import (
    collect_random_state,
    reseed,
    restore_common_random_state,
    restore_random_state,
)

META = "meta.pt"  # everything that is not a tensor of model or optimizer: plain types, loads with weights_only
LEAVES_OUT_FROZEN = "leaves_out_frozen"  # in meta: whether frozen parameters are left out
EXTRA = "extra_state"  # tensors beside those of model and optimizers
RANDOM_STATES = "random_states"  # in a single file
_RANDOM = "random_{rank}.pt"
_COPY_AHEAD_BYTES = 10_000_000  # torch's default

T = TypeVar("T")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause Python's search for garbage, except beside training: many parameters are many objects that are in use.

    It grows faster than they do: each search goes through all of them again.
    """
    pauses = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def get_trained_state(model: nn.Module) -> dict[str, Any]:
    """Return this rank's shards of all parameters that train, and all buffers but those of quantized weights."""
    fixed = {f"{name}.{key}" for name, layer in iterate_quantized(model) for key, _ in layer.named_buffers()}
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    return {name: value for name, value in state.items() if name not in fixed}


def drop_compiled(name: str) -> str:
    """Return a name without what ``torch.compile`` puts into it, as ``get_model_state_dict`` does."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def set_weights(model: nn.Module, state: dict[str, Any], *, strict: bool = True) -> None:
    """Load whole tensors or shards as ``get_model_state_dict`` names them. All ranks must call it.

    Torch's function takes ``_orig_mod`` of a compiled module for a part of a name only at the first name that a module
    has, so that the model misses those of ``self.compiled = torch.compile(self.net)``; seen in 2.13.
    """
    first_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if first_names.setdefault(module, name) == name or drop_compiled(name) == name:
            continue
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for own in (f"{name}.{key}" for key in (*(key for key, _ in tensors), "_extra_state")):
            if (plain := drop_compiled(own)) in state:
                state[own] = state.pop(plain)
    set_model_state_dict(model, state, options=StateDictOptions(strict=strict))


def join_states(
    model_state: Mapping[str, Any], optimizer_states: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the shards of model and optimizers, by parameter name, as one state that tools of torch can read.

    Raises:
        TypeError: It holds what is neither a tensor nor a plain value, which no checkpoint is read with.
    """
    state = {"state_dict": model_state} | {f"optimizer_{i}": s for i, s in enumerate(optimizer_states)}
    return {name: to_plain(part, name, copies=False) for name, part in state.items()}


@_without_garbage_collection()
def save_checkpoint(
    path: Location,
    state: dict[str, Any],
    *,
    meta: Mapping[str, Any],
    save_number: int = 0,
    random_state: Mapping[str, Any] | None = None,
    data_ranks: DataRanks | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint folder, see Note [Complete or not there]. All ranks of the group must call it.

    Args:
        path: The folder; one that exists is replaced.
        state: From ``join_states``.
        meta: Everything else; dataclasses, paths and enums in it become plain types. That of rank 0 is written.
        save_number: Grows with every save of a run, so that the newest can be told; that of rank 0 counts.
        random_state: Of this rank's generators; the present one if not given.
        data_ranks: Which random numbers this rank draws: of those that draw the same the first writes them. If not
            given, each has its own.
        group: Through which ranks agree; the default group if not given. A thread needs a group of its own.

    Raises:
        RuntimeError: Writing failed on a rank; raised on all, and no folder of that name is left half-written.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    with ExitStack() as held:

        def begin() -> Location:
            if rank == 0:
                if isinstance(path, RemotePath):
                    make_room(path, is_folder=True)
                return held.enter_context(write_beside(path, save_number))
            return path

        beside = agree(begin, group)[0]
        file_system = ChecksumFileSystem()
        # Without copies ahead where there is nothing to copy: they take a stream, whose context they may open.
        writer = _Writer(beside, file_system, _COPY_AHEAD_BYTES if has_gpu_tensors(state) else 0)
        with _plain_errors(path):
            save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())

        def write_rest() -> dict[str, Any]:
            small = []
            if data_ranks is None or data_ranks.place == 0:
                small.append(beside / _RANDOM.format(rank=rank if data_ranks is None else data_ranks.index))
                _save_plain(random_state or collect_random_state(), small[-1])
            if rank == 0:
                small.append(beside / META)
                _save_plain(meta, small[-1])
            if isinstance(beside, Path):
                sync_path(beside)  # names of files, before the manifest says that they are there
            return {**file_system.files, **describe_files(small)}

        parts = agree(write_rest, group)
        files = {name: entry for part in parts for name, entry in part.items()}

        def finish() -> None:
            if rank == 0:
                step = meta.get("global_step")
                write_manifest(beside, files, save_number=save_number, step=step if isinstance(step, int) else None)
                if isinstance(path, Path) and isinstance(beside, Path):
                    _await_files(path, beside)
                    put_in_place(path, beside)
                elif isinstance(path, RemotePath):
                    remove_older(path, beside, get_save_number(beside))

        agree(finish, group)


def _await_files(path: Path, beside: Path) -> None:
    """Refuse a save whose files are not all there, as each machine has written those of its ranks to its own disk."""
    if not wait_for(lambda: is_complete(beside)):
        raise RuntimeError(f"checkpoint {path} lacks the files of other machines: {SHARED}")


@_without_garbage_collection()
def load_checkpoint(
    path: Location,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    verify: Verify = "sizes",
    extra: Callable[[Collection[str]], Mapping[str, torch.Tensor]] | None = None,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint folder into a sharded model and its optimizers; return the rest. All ranks must call it.

    The number of ranks and the mesh may differ from those it was saved with. Files are verified first, each by one
    rank, so a checkpoint that is found to be damaged is refused before anything is changed.

    Args:
        path: The folder.
        model: Sharded as it shall be used from now on.
        optimizers: As many as were saved; empty loads the model alone.
        strict: Refuse a checkpoint that lacks parameters of the model or holds others.
        verify: ``full`` reads all files to compare their checksums, ``sizes`` only small ones.
        extra: Called with the names of what was saved beside model and optimizers, if anything was; returns tensors to
            fill with it, of those that are wanted.
        prepare: Called with what is returned, before the optimizers are compared with those of the checkpoint.

    A model may name ``parts_read_apart``: modules that it fills by itself where the checkpoint has nothing of them.

    Raises:
        ValueError: It is not complete, damaged, or of another model or number of optimizers; on all ranks.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    read: list[tuple[Metadata, dict[str, Any]]] = []
    agree(lambda: check_files(path, verify, part=rank, num_parts=world_size))
    agree(lambda: read.append((read_metadata(path), read_meta(path))))  # a disk or store may fail one rank alone
    ((metadata, meta),) = read
    options = StateDictOptions(strict=strict)
    stored = metadata.state_dict_metadata
    count = len({key.split(".")[0] for key in stored if key.startswith("optimizer_")})
    check_optimizers(path, count, optimizers)
    is_part = meta.get(LEAVES_OUT_FROZEN, False)
    if is_part and not getattr(model, "restores_frozen", False):
        raise ValueError(
            f"{path} holds only trainable parameters, and this model has no other weights; set pretrained "
            "and lora as in the run that saved it"
        )
    if prepare is not None:
        prepare(meta)
    weights = get_trained_state(model) if is_part else get_model_state_dict(model)
    for part in getattr(model, "parts_read_apart", ()):
        if not any(key.startswith(f"state_dict.{part}.") for key in stored):  # the run that saved it had none
            weights = {name: value for name, value in weights.items() if not name.startswith(f"{part}.")}
            is_part = True
    state: dict[str, Any] = {"state_dict": weights}
    for i, optimizer in enumerate(optimizers):
        state[f"optimizer_{i}"] = make_loadable_state(model, optimizer, options)
    _check_model(path, state["state_dict"], stored, strict=strict)
    groups = [[dict(group) for group in state[f"optimizer_{i}"]["param_groups"]] for i in range(len(optimizers))]
    without_step = [_take_out_unstepped(path, metadata, state, i, optimizer) for i, optimizer in enumerate(optimizers)]
    if beside := {key.removeprefix(f"{EXTRA}.") for key in stored if key.startswith(f"{EXTRA}.")}:
        state[EXTRA] = {} if extra is None else dict(extra(beside))
    # Without strict, parameters that are not stored keep their values.
    state["state_dict"] = {n: value for n, value in state["state_dict"].items() if f"state_dict.{n}" in stored}
    load_state(path, metadata, state)
    set_weights(model, state["state_dict"], strict=strict and not is_part)
    for i, optimizer in enumerate(optimizers):
        state[f"optimizer_{i}"]["state"] |= without_step[i]  # torch wants one for each parameter
        keep_kernels(groups[i], state[f"optimizer_{i}"]["param_groups"])
        set_optimizer_state_dict(model, optimizer, state[f"optimizer_{i}"], options=options)
        drop_state(optimizer, groups[i], without_step[i])
    return meta


def read_meta(path: Location) -> dict[str, Any]:
    """Return what a checkpoint folder holds beside tensors of model and optimizers: plain values.

    Raises:
        ValueError: It holds anything else, or is damaged.
    """
    meta = load_plain(path / META, path / META)
    if not isinstance(meta, dict):
        kind = type(meta).__name__
        raise ValueError(f"{path / META} holds a {kind}: expected a mapping; choose another checkpoint")  # noqa: TRY004
    return meta


def gather_random_states(data_ranks: DataRanks | None) -> list[dict[str, Any]]:
    """Return the states of the generators of all ranks that draw numbers of their own. All ranks must call it."""
    data = data_ranks or DataRanks()
    found = agree(lambda: (data.index, collect_random_state()) if data.place == 0 else None)
    return [state for _, state in sorted(filter(None, found), key=itemgetter(0))]


def read_random_state(
    path: Location, data_ranks: DataRanks, in_file: Sequence[dict[str, Any]] = ()
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what makes this rank draw as it would have without the interruption: in steps, and outside of them.

    Saved by another number of ranks with rows of their own, there is no such thing for steps: then all ranks start
    generators that depend on the checkpoint and on the rank.

    Args:
        path: Of the checkpoint.
        data_ranks: Which random numbers this rank draws.
        in_file: What a single file holds instead, from ``gather_random_states``.
    """
    count = len(in_file) or len(list(path.glob(_RANDOM.format(rank="*"))))
    if not count:
        return (lambda: None), (lambda: None)
    is_same, rank = count == data_ranks.count, data_ranks.index
    number = rank if is_same else 0
    file = path / _RANDOM.format(rank=number)
    state: dict[str, Any] = {}
    agree(lambda: state.update(in_file[number] if in_file else load_plain(file, file)))
    own = partial(restore_random_state, state) if is_same else partial(reseed, state, rank)
    return own, partial(restore_common_random_state, state)


def agree(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``work`` on every rank; return all results by rank, or raise on all ranks what failed on one.

    Without it the others would wait in the next collective for a rank that is gone. A ``ValueError`` stays one, that of
    a full disk becomes ``DiskFullError``, others become ``RuntimeError``.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as caught:  # noqa: BLE001  raised below, on every rank
        error = caught
    if not dist.is_initialized():
        if error is not None:
            raise error
        return [result]
    said = None if error is None else _describe_failure(error)
    boxes = gather_objects((said, result), group)
    for rank, (failed, _) in enumerate(boxes):
        if failed is not None:
            kind, text = failed
            raise kind(text if kind is ValueError else f"rank {rank}: {text}") from error
    return [result for _, result in boxes]


def _describe_failure(error: Exception) -> tuple[type[Exception], str]:
    """Return as what all ranks raise an error of one, and its text."""
    found = find_disk_full(error)
    kind = ValueError if isinstance(error, ValueError) else RuntimeError if found is None else DiskFullError
    return kind, str(error if kind is not DiskFullError else found) or type(error).__name__


def to_plain(value: Any, name: str = "checkpoint", *, copies: bool = True) -> Any:
    """Return a copy of ``value`` that ``weights_only`` loading accepts on any machine; ``name`` is for errors.

    Tensors are copied to the CPU, so what changes afterwards does not change the copy; without ``copies`` they stay.
    """
    plain = partial(to_plain, copies=copies)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copies else value
    if value is None or type(value) in (bool, int, float, complex, str, bytes, torch.dtype, torch.device):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain(k, f"a key of {name}"): plain(v, f"{name}.{k}") for k, v in value.items()}
    # Lists of OmegaConf too, and nothing that is written much shorter.
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview | range):
        items = [plain(v, f"{name}[{i}]") for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic | Enum):
        return plain(value.item() if isinstance(value, np.generic) else value.value, name)
    for kind in (bool, int, float, str):  # a subclass of these
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, PurePath | timedelta | datetime):
        return str(value)
    raise NotPlainError(name, value)


class NotPlainError(TypeError):
    """A value that ``weights_only`` loading would refuse, in what is to be saved."""

    def __init__(self, name: str, value: Any) -> None:
        self.found = f"{name} is a {type(value).__name__}"
        super().__init__(f"{self.found}, which a checkpoint cannot hold; let state_dict() return plain values")


def keep_plain(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a checkpoint can hold of a mapping, and the names of the others with what they are or have."""
    kept, others = {}, {}
    for name, value in values.items():
        try:
            to_plain(value, name, copies=False)
            kept[name] = value
        except NotPlainError as error:
            others[name] = error.found
    return kept, others


def check_same_optimizer(path: Location, optimizer: Optimizer, missing: Iterable[str]) -> None:
    """Refuse the state of another optimizer, in which names are missing: parts of this one's would stay at zero."""
    if first := next(iter(missing), None):
        raise ValueError(
            f"{path} has no {first} for {type(optimizer).__name__}: it was saved with another optimizer; resume it "
            "with the same optimizer.name, and the same parameters that train"
        )


def check_optimizers(path: Location, count: int, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a checkpoint of another number of optimizers, for a run that has any."""
    if not optimizers or count == len(optimizers):
        return
    if not count:
        raise ValueError(
            f"{path} holds weights without optimizers, as save_weights_only leaves it: resume from another checkpoint, "
            "or start a new run from its weights, which python -m lit_fsdp export writes"
        )
    raise ValueError(f"{path} holds {count} optimizers, the run has {len(optimizers)}; resume it with as many")


def check_same_groups(path: Location, optimizer: Optimizer, count: int) -> None:
    """Refuse the state of parameters that were grouped otherwise, which would get learning rates of others."""
    if count != len(optimizer.param_groups):
        raise ValueError(
            f"{path} holds {count} groups of parameters with learning rate and weight decay of their own, the run has "
            f"{len(optimizer.param_groups)}: resume it with the optimizer.name and layer_decay that it was saved with, "
            "and the same parameters that train; or start a new run from its weights, which python -m lit_fsdp export "
            "writes"
        )


class _Writer(FileSystemWriter):
    """Writes tensors, here or at an address."""

    def __init__(self, path: Location, file_system: ChecksumFileSystem, copy_ahead_bytes: int) -> None:
        # Our files are synced when they are closed: torch would do it before the last bytes leave Python's buffer, and
        # wait for all disks of this machine where they are objects; seen in 2.13 to 2.15.
        super().__init__(path.name, sync_files=False, per_thread_copy_ahead=copy_ahead_bytes)
        self.fs = file_system
        self.path: Any = path

    @property
    @override
    def checkpoint_id(self) -> Any:
        # Stored in the metadata, where an address would be an object of ours.
        return self.path.name if isinstance(self.path, RemotePath) else self.path

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # What led to it does not come through to other ranks, seen in torch 2.13.
            if (found := find_disk_full(error)) is not None:
                raise DiskFullError(str(found)) from error
            raise


def _save_plain(value: Any, path: Location) -> None:
    with path.open("wb") as file:
        torch.save(to_plain(value), file)
    if isinstance(path, Path):
        sync_path(path)


@contextmanager
def _plain_errors(path: Location) -> Iterator[None]:
    """Turn what ``torch.distributed.checkpoint`` raises when it writes into a ``RuntimeError`` of one line."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant: there is one process
            yield
    except CheckpointException as error:  # a BaseException: no `except Exception` would see it
        rank, (cause, _) = min(error.failures.items())
        kind = RuntimeError if find_disk_full(cause) is None else DiskFullError
        raise kind(f"{path} could not be written: rank {rank}: {cause}") from error


def _take_out_unstepped(
    path: Location, metadata: Metadata, state: dict[str, Any], number: int, optimizer: Optimizer
) -> dict[str, Any]:
    """Compare an optimizer with that of a checkpoint; take out, and return, the state of what had no step there."""
    name = f"optimizer_{number}"
    prefix, stored, own = f"{name}.param_groups.", metadata.state_dict_metadata, state[name]
    _drop_settings_of_schedules(own, optimizer, stored, prefix)
    check_same_groups(path, optimizer, len({k.split(".")[2] for k in stored if k.startswith(prefix)}))
    parts = (key.split(".") for key in stored if key.startswith(f"{name}."))
    known = {".".join(part[:i]) for part in parts for i in range(3, len(part) + 1)}  # of nested values, too
    missing = {p: [k for k in values if f"{name}.state.{p}.{k}" not in known] for p, values in own["state"].items()}
    stepped = {key.rpartition(".")[0].removeprefix(f"{name}.state.") for key in stored}  # by whatever optimizer
    unstepped = {p for p, keys in missing.items() if len(keys) == len(own["state"][p]) > 0 and p not in stepped}
    if unstepped:  # or trains only now
        saved: dict[str, Any] = {name: {"param_groups": [{"params": []} for _ in own["param_groups"]]}}
        load_state(path, metadata, saved, no_dist=True)  # ranks of a pipeline have other parameters
        unstepped &= {p for group in saved[name]["param_groups"] for p in group["params"]}
    settings = (f"param_groups.{i}.{key}" for i, group in enumerate(own["param_groups"]) for key in group)
    names = [key for key in settings if f"{name}.{key}" not in known]
    names += [f"{p}.{key}" for p, keys in missing.items() if p not in unstepped for key in keys]
    check_same_optimizer(path, optimizer, names)
    return {p: own["state"].pop(p) for p in unstepped}


def _drop_settings_of_schedules(
    state: dict[str, Any], optimizer: Optimizer, stored: Mapping[str, Any], prefix: str
) -> None:
    """Leave out what a learning rate schedule has put into groups since, such as ``initial_lr``.

    Lightning's ``LearningRateFinder`` saves before it has a schedule, and loads after.
    """
    for number, group in enumerate(state["param_groups"]):
        for key in group.keys() - optimizer.defaults.keys() - {"params"}:
            if f"{prefix}{number}.{key}" not in stored:
                del group[key]


def _check_model(path: Location, state: Mapping[str, Any], stored: Mapping[str, Any], *, strict: bool) -> None:
    prefix = "state_dict."
    missing = [name for name in state if prefix + name not in stored]
    unknown = [key.removeprefix(prefix) for key in stored if key.startswith(prefix)]
    unknown = [name for name in unknown if name not in state]
    for what, names in (("lacks", missing), ("holds", unknown)):
        if names and strict:
            raise ValueError(f"{path} {what} {join_names(names)}: it was saved from another model")
    for name, value in state.items():
        there = getattr(stored.get(prefix + name), "size", None)
        if there is None and isinstance(value, torch.Tensor) and prefix + name in stored:
            raise ValueError(f"{path}: {name} is no tensor, and the model's is")
        if there is not None and isinstance(value, torch.Tensor) and there != value.shape:
            raise ValueError(f"{path}: {name} has shape {tuple(there)}, the model's {tuple(value.shape)}")
