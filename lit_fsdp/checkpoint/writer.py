"""Writes checkpoints one at a time, in the training thread or beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from lit_fsdp.checkpoint.latest import SAVE_NUMBER, find_last_number, measure_age
from lit_fsdp.checkpoint.leftovers import tidy_folders
from lit_fsdp.checkpoint.optimizer_state import collect_state
from lit_fsdp.checkpoint.remote import Location, RemotePath, check_writable
from lit_fsdp.checkpoint.sharded import (
    EXTRA,
    LEAVES_OUT_FROZEN,
    RANDOM_STATES,
    agree,
    gather_random_states,
    get_trained_state,
    join_states,
    save_checkpoint,
    to_plain,
)
from lit_fsdp.checkpoint.single_file import gather_model_state, gather_optimizer_state, save_single_file
from lit_fsdp.checkpoint.space import (
    SPARE_BYTES,
    DiskSpace,
    check_access,
    check_mark,
    count_bytes,
    estimate_state_bytes,
    leave_mark,
    measure_free,
)
from lit_fsdp.checkpoint.staging import Stager
from lit_fsdp.files import find_disk_full
from lit_fsdp.sharding.mesh import DataRanks, make_group
from lit_fsdp.sharding.random_state import collect_random_state

CheckpointFormat = Literal["sharded", "single_file"]
T = TypeVar("T")
_WRITING: WeakSet[threading.Thread] = WeakSet()  # beside training


class CheckpointWriter:
    """Saves checkpoints; at most one is in flight.

    Asynchronously, ``save`` copies the shards to host memory and returns; of a GPU, that memory is pinned and kept for
    the next time. A thread writes them, with a process group of its own, as the default one belongs to training.

    Args:
        checkpoint_format: A folder of shards, or one file that rank 0 gathers and writes.
        save_frozen: Whether to write frozen parameters; ``None`` leaves it to the module.
        is_async: Write beside training; folders only.
        timeout_s: How long ranks wait for each other when they write beside training.
        report: Called on every rank with a line for the user when a save was skipped.
    """

    def __init__(
        self,
        *,
        checkpoint_format: CheckpointFormat = "sharded",
        save_frozen: bool | None = None,
        is_async: bool,
        timeout_s: float = 1800.0,
        report: Callable[[str], None],
    ) -> None:
        if is_async and checkpoint_format == "single_file":
            raise ValueError("async_save: not used by checkpoint_format 'single_file'; leave one of them out")
        if save_frozen is False and checkpoint_format == "single_file":
            raise ValueError(
                "save_frozen: got false: not used by checkpoint_format 'single_file'; leave one of them out"
            )
        self.checkpoint_format = checkpoint_format
        self.save_frozen = save_frozen
        self._left_out: set[str] = set()  # parameters that are not written, as they are frozen
        self._leaves_out_frozen = False  # in the last state
        self.is_async = is_async
        self.timeout_s = timeout_s
        self.data_ranks: DataRanks | None = None  # which random numbers this rank draws
        self.report = report
        self.skipped: set[Location] = set()  # for want of space; the same on all ranks
        self.on_skip: Callable[[], None] = lambda: None  # called on all ranks when one was added
        self.save_number = 0  # of the last save; only that of rank 0 is written
        self._group: dist.ProcessGroup | None = None
        self._stager = Stager()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._to_remove: dict[Location, Callable[[], None]] = {}  # once the newest is safe
        self._to_link: list[Callable[[], None]] = []  # likewise, unless it is skipped
        self._in_flight: Location | None = None
        self.newest: Location | None = None  # that was due
        self.missing: Location | None = None  # the same, if it could not be saved

    def choose_parameters(self, model: nn.Module) -> None:
        """Choose which parameters to write; refuse to leave out those that the model would not get back.

        A model that fills its frozen parameters by itself has the attribute ``restores_frozen``, and one that still
        wants to have them written ``leaves_out_frozen``, which is false.
        """
        is_restored = getattr(model, "restores_frozen", False)
        if self.save_frozen is False and not is_restored:
            raise ValueError(
                "save_frozen: got false: the frozen parameters have random values, which no run could get back; set "
                "pretrained, or leave it out"
            )
        self._left_out = list_left_out(model, self.checkpoint_format, self.save_frozen)

    def begin(self, folders: Collection[Location]) -> None:
        """Tidy the folders of a run, and number its saves from the last one there on; all ranks must call it."""

        def tidy() -> None:
            tidy_folders(folders, self.report)
            self.save_number = max(self.save_number, find_last_number(folders))

        is_first = not dist.is_initialized() or dist.get_rank() == 0
        agree(lambda: tidy() if is_first else None)  # of a store that does not answer all ranks shall know

    def go_on_from(self, path: Location) -> None:
        """Number saves from that of a checkpoint on, wherever it lies."""
        self.save_number = max(self.save_number, measure_age(path).save_number)

    def measure_space(
        self,
        folders: Sequence[Location],
        num_at_once: tuple[int, int],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra_bytes: int = 0,
    ) -> DiskSpace | None:
        """Return what checkpoints in these folders will take and what is free, the fullest; all ranks must call it.

        Of addresses nobody knows what is free: they are only tried out. ``None`` where there are no other folders.

        Args:
            folders: Where they go.
            num_at_once: How many there will be at once, and how many of weights alone.
            model: Sharded.
            optimizers: Of the run.
            extra_bytes: What this rank will write beside model and optimizers, where it is not weights alone.

        Raises:
            ValueError: Nothing can be written there, or shards of machines would go to folders of their own.
        """
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        addresses = dict.fromkeys(folder for folder in folders if isinstance(folder, RemotePath))
        here = [folder for folder in folders if not isinstance(folder, RemotePath)]

        def check() -> None:
            for address in addresses if is_first else ():
                check_writable(address)
            for folder in here if is_first or self.checkpoint_format == "sharded" else ():
                check_access(folder)

        agree(check)
        if not here:
            return None
        if self.checkpoint_format == "sharded":
            _check_shared(here, is_first=is_first)
        is_whole = self.checkpoint_format == "single_file"  # which is not gathered only to be counted
        own = count_bytes(model.state_dict() if is_whole else self.get_model_state(model))
        num_whole, num_weights = num_at_once
        states = agree(lambda: (own, extra_bytes, estimate_state_bytes(optimizers)) if num_whole else (own, 0, 0))
        weights = sum(weights for weights, *_ in states)
        whole = weights + sum(extra + (state or 0) for _, extra, state in states)
        frees = self._choose_writers(agree(lambda: [measure_free(folder) for folder in here]))
        free, folder = min((min(found), folder) for folder, *found in zip(here, *frees, strict=True))
        return DiskSpace(
            folder=folder,
            checkpoint_bytes=whole,
            is_least=any(state is None for *_, state in states),
            num_at_once=num_whole + num_weights,
            bytes_at_once=num_whole * whole + num_weights * weights,
            free_bytes=free,
        )

    def get_model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the weights as they will be written; all ranks must call it."""
        if self.checkpoint_format == "single_file":
            return gather_model_state(model)
        # All parameters, once other ones are trainable: those trained before would be lost.
        self._leaves_out_frozen = bool(self._left_out) and self._left_out == _list_frozen(model)
        return get_trained_state(model) if self._leaves_out_frozen else get_model_state_dict(model)

    def get_optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as it will be written; all ranks must call it."""
        if self.checkpoint_format == "sharded":
            return collect_state(model, optimizer)
        return gather_optimizer_state(model, optimizer)

    def save(self, path: Location, checkpoint: Mapping[str, Any]) -> bool:
        """Write a checkpoint; all ranks must call it. Returns whether it was, or will be, written.

        Waits for the one in flight. Where the disk has no room, or a quota is used up, says so and returns, and
        training goes on.

        Args:
            path: Folder or file; one that exists is replaced.
            checkpoint: As Lightning puts it together: ``state_dict`` and ``optimizer_states`` from this object, and
                plain values.

        Raises:
            RuntimeError: This save, or the one that was in flight, failed.
        """
        self.wait()
        self.keep(path)  # what is due to go is the one that this replaces
        self.newest = self.missing = path  # until it is there
        tensors = ("state_dict", "optimizer_states", EXTRA)
        state = join_states(checkpoint["state_dict"], checkpoint.get("optimizer_states", []))
        if EXTRA in checkpoint:
            state[EXTRA] = checkpoint[EXTRA]
        meta = {key: value for key, value in checkpoint.items() if key not in tensors}
        meta[LEAVES_OUT_FROZEN] = self._leaves_out_frozen
        if missing := self._compute_missing_bytes(path, state):
            self._skip(path, f"the disk has {missing / 2**30:.2f} GiB too little")
            return False
        self.skipped.discard(path)
        self.save_number += 1
        if not self.is_async:
            try:
                if self.checkpoint_format == "sharded":
                    save_checkpoint(path, state, meta=meta, save_number=self.save_number, data_ranks=self.data_ranks)
                else:
                    states = gather_random_states(self.data_ranks)
                    save_single_file(path, {**checkpoint, SAVE_NUMBER: self.save_number, RANDOM_STATES: states})
            except Exception as error:
                if (found := find_disk_full(error)) is None:
                    raise
                self._skip(path, str(found))
                return False
            self._note_safe()
            return True
        for thread in list(_WRITING):  # of another run in this process, which has the same group
            thread.join()
        if self._group is None and dist.is_initialized():
            self._group = make_group("checkpoints", self.timeout_s)
        staged: dict[str, Any] = {}
        agree(lambda: staged.update(self._stager.stage(state)))  # one host may have too little memory to pin
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._write,
            args=(path, staged, to_plain(meta), self.save_number, collect_random_state(), device),
            name="checkpoint",
            daemon=True,
        )
        self._in_flight, self.missing = path, None
        _WRITING.add(self._thread)
        self._thread.start()  # a daemon: a run that fails must not wait for ranks that are gone
        return True

    def remove(self, path: Location, remove: Callable[[], None]) -> None:
        """Remove an older checkpoint once the newest is safe: at once, or after the next save that succeeds.

        It stays if it is saved again meanwhile, or if no save succeeds any more.
        """
        if self._thread is None and self.missing is None:
            remove()
        else:
            self._to_remove[_name_place(path)] = remove

    def keep(self, path: Location) -> None:
        """Do not remove what ``remove`` was called for."""
        self._to_remove.pop(_name_place(path), None)

    def link(self, path: Location, link: Callable[[], None]) -> None:
        """Let a link lead to a checkpoint once it is there; never, if its save is skipped. All ranks must call it."""
        if self._thread is not None and path == self._in_flight:
            self._to_link.append(link)
        elif path not in self.skipped:
            link()

    def wait(self) -> None:
        """Wait for the save in flight, raise its error, and do what had to wait for it."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self.missing = self._in_flight
            self._to_link.clear()
            if (found := find_disk_full(error)) is not None and self.missing is not None:
                self._skip(self.missing, str(found))
                return
            raise RuntimeError(f"saving a checkpoint beside training failed: {error}") from error
        self._note_safe()

    def close(self) -> None:
        """Wait as ``wait`` does, and give the host memory back."""
        self.wait()
        self._stager.release()

    def _skip(self, path: Location, why: str) -> None:
        self.skipped.add(path)
        self.report(
            f"checkpoint {path} was NOT saved: {why}; training goes on, older checkpoints are kept; free some space "
            "before the next one is due"
        )
        self.on_skip()

    def _note_safe(self) -> None:
        self.missing = None
        links, removals = self._to_link, self._to_remove
        self._to_link, self._to_remove = [], {}
        for do in (*links, *removals.values()):
            do()

    def _write(
        self,
        path: Location,
        state: dict[str, Any],
        meta: dict[str, Any],
        save_number: int,
        random_state: dict[str, Any],
        device: int | None,
    ) -> None:
        try:
            if device is not None:  # a thread begins on GPU 0, where each call to CUDA would open a context
                torch.cuda.set_device(device)
            save_checkpoint(
                path,
                state,
                meta=meta,
                save_number=save_number,
                random_state=random_state,
                data_ranks=self.data_ranks,
                group=self._group,
            )
        except Exception as error:  # noqa: BLE001  raised by wait(), in the training thread
            self._error = error

    def _compute_missing_bytes(self, path: Location, state: dict[str, Any]) -> int:
        """Return how many bytes the disk lacks for this state; 0 if it fits. The same on all ranks."""
        if isinstance(path, RemotePath):
            return 0
        folder = path.parent
        needed = sum(agree(lambda: count_bytes(state))) + SPARE_BYTES
        return max(needed - min(self._choose_writers(agree(lambda: measure_free(folder)))), 0)

    def _choose_writers(self, by_rank: list[T]) -> list[T]:
        """Return what those ranks have found that write: a single file is only on the disk of the first."""
        return by_rank[:1] if self.checkpoint_format == "single_file" else by_rank


def _check_shared(folders: Sequence[Path], *, is_first: bool) -> None:
    """Refuse folders that machines do not share, before there is anything to save; all ranks must call it."""
    with ExitStack() as held:
        marks = agree(lambda: [held.enter_context(leave_mark(f)) for f in folders] if is_first else [])[0]

        def look() -> None:
            for folder, mark in zip(folders, marks, strict=True):
                if mark is not None:
                    check_mark(folder, mark)

        agree(look)


def list_left_out(model: nn.Module, checkpoint_format: CheckpointFormat, save_frozen: bool | None) -> set[str]:
    """Return the names of the parameters that are not written: frozen ones that the model fills by itself."""
    is_restored = getattr(model, "restores_frozen", False)
    is_left_out = getattr(model, "leaves_out_frozen", True) if save_frozen is None else not save_frozen
    return _list_frozen(model) if is_restored and is_left_out and checkpoint_format == "sharded" else set()


def _name_place(path: Location) -> Location:
    """Return the same for all ways to name a checkpoint; a link stays what it is."""
    return path.parent.resolve() / path.name


def _list_frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
