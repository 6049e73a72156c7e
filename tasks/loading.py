"""Which sample goes to which rank, and where an interrupted epoch goes on.

Note [Global order]: an epoch is one order of all samples, the same on every rank. Ranks that share their rows count as
one here, see ``DataRanks``. The k-th micro-batches of
all ranks together are the k-th slice of ``world_size * batch_size`` samples of that order, of which rank r
takes the r-th part. So 1 rank x 8, 2 ranks x 4 and 2 ranks x 2 accumulated twice see the same samples in
every optimizer step. A place in the epoch is one number, ``samples_seen``, that means the same at every world
size. Where the ranks have unequal shares, their parts of a slice are as unequal: Note [Shares].
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from lit_fsdp.sharding.mesh import DataRanks
from lit_fsdp.sharding.random_state import own_generators
from lit_fsdp.strategy.trainer_settings import get_data_ranks, refuse_overfit
from lit_fsdp.tasks.length_groups import Ints, choose_group_size, group_by_length
from lit_fsdp.tasks.shares import Share, SpeedMeter, split_rows

_NO_BATCH = object()
_SETTLED = "settled_rows"  # in the state of a loader: what ``share: auto`` has found
NEW_RUN = (
    "start a new run from its weights: python -m lit_fsdp export makes a folder of them, which "
    "model.init_args.pretrained can name"
)
PADDING = -1  # stands for "no sample" where the last batch of an evaluation is not full


class Rows(Protocol):
    """What a loader reads: a length and rows by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


# Lightning replaces every sampler but a DistributedSampler, unless use_distributed_sampler is false.
class GlobalSampler(DistributedSampler[int]):
    """The samples of one rank, in the order of Note [Global order].

    Args:
        num_samples: How many samples the whole data set has.
        batch_size: Samples in a micro-batch of one rank, if all have as many.
        num_replicas: How many ranks share the data set.
        rank: Which of them this is.
        shuffle: Take a new order each epoch, drawn from ``seed`` and the epoch's number.
        seed: Of that order. Must be the same on all ranks.
        drop_last: Leave out the last micro-batch if the ranks cannot all fill it. Otherwise it is filled up
            with ``PADDING``, so that every rank gets as many batches of the same size.
        batches_per_step: With ``drop_last``, leave out what does not fill this many micro-batches of every rank: an
            epoch is a whole number of optimizer steps, the same at any world size.
        rows: Samples in a micro-batch of each rank, where they differ; ``batch_size`` in the mean.
        lengths: Of each sample, to have those of like lengths follow each other: Note [Length groups].
        group_size: How many of them do.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool,
        batches_per_step: int = 1,
        rows: Sequence[int] | None = None,
        lengths: Ints | None = None,
        group_size: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        samples: Any = range(num_samples)
        super().__init__(samples, num_replicas, rank, shuffle, seed, drop_last)
        self.dataset_size = num_samples
        self.global_batch_size = batch_size * num_replicas
        self.batches_per_step = batches_per_step
        self.samples_seen = 0
        self.lengths, self.group_size = lengths, group_size
        self._rows_before: tuple[tuple[int, int], tuple[int, ...]] | None = None
        self.rows: tuple[int, ...] = ()
        self.share_out((batch_size,) * num_replicas if rows is None else rows)

    def share_out(self, rows: Sequence[int]) -> None:
        """Give each rank this many samples of every round from the present place on; together as many as before."""
        assert (len(rows), sum(rows)) == (self.num_replicas, self.global_batch_size), rows
        if self.rows:
            self._rows_before = (self.epoch, self.samples_seen), self.rows
        self.rows = tuple(rows)
        self.batch_size = self.rows[self.rank]
        self.num_samples = self.num_batches * self.batch_size  # what upstream calls a rank's share of an epoch
        self.total_size = self.num_batches * self.global_batch_size

    def find_part(self, epoch: int, samples_seen: int) -> slice:
        """Return which part of an epoch's order this rank's micro-batch at a place is."""
        place, rows = self._rows_before or ((-1, 0), self.rows)
        rows = rows if (epoch, samples_seen) < place else self.rows
        begin = samples_seen + sum(rows[: self.rank])
        return slice(begin, begin + rows[self.rank])

    @property
    def num_batches(self) -> int:
        """Micro-batches per rank in a whole epoch."""
        num_whole, rest = divmod(self.dataset_size, self.global_batch_size)
        return num_whole // self.batches_per_step * self.batches_per_step if self.drop_last else num_whole + bool(rest)

    @property
    def num_batches_left(self) -> int:
        """Micro-batches per rank from the present place to the end of the epoch."""
        return self.count_batches_left(self.samples_seen)

    def __len__(self) -> int:
        # Of the whole epoch also after a resume, because Lightning counts the batches before it, too.
        return self.num_batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        order = self.draw_order(self.epoch)
        begin = self.find_part(self.epoch, self.samples_seen).start
        for _ in range(self.num_batches_left):
            part = order[begin : begin + self.batch_size]
            yield from part.tolist()
            yield from [PADDING] * (self.batch_size - len(part))
            begin += self.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; stay in place if it is the present one: it may be resumed."""
        if epoch != self.epoch:
            self.epoch, self.samples_seen = epoch, 0

    def count_batches_left(self, samples_seen: int) -> int:
        """Return how many micro-batches per rank there are from a place to the end of the epoch."""
        end = self.dataset_size if self.batches_per_step == 1 else self.num_batches * self.global_batch_size
        num_whole, rest = divmod(max(end - samples_seen, 0), self.global_batch_size)
        return num_whole if self.drop_last or not rest else num_whole + 1

    def list_samples(self, epoch: int, samples_seen: int) -> list[int]:
        """Return the samples of this rank's micro-batch at a place; draws the order of that epoch."""
        return self.draw_order(epoch)[self.find_part(epoch, samples_seen)].tolist()

    def draw_order(self, epoch: int) -> torch.Tensor:
        """Return all samples in the order of an epoch."""
        if not self.shuffle:
            return torch.arange(self.dataset_size)
        generator = torch.Generator().manual_seed(mix_seeds(self.seed, epoch))
        order = torch.randperm(self.dataset_size, generator=generator)
        return order if self.lengths is None else group_by_length(order, self.lengths, self.group_size, generator)


def mix_seeds(*numbers: int) -> int:
    """Return one seed for several numbers. With seed + epoch, the second epoch of seed 0 would be the first of 1."""
    state = np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


class ResumableLoader(DataLoader[Any]):
    """A training loader that goes on where a checkpoint was saved, at any world size.

    Its state counts the batches that were handed out, not those that workers fetched ahead. Iterating goes on
    from the present place: after a whole pass with the next epoch, after a break or a resume with the next
    sample.

    Args:
        dataset: Rows by number.
        sampler: Holds the place in the epoch.
        on_restore: Called with the sampler if the loaded state was saved under another global batch size, so
            that who counts batches can correct the count.
        fingerprint: Of the rows, as text; a place in the middle of an epoch is only taken up with the same. Empty
            compares nothing.
        speed_meter: Settles how many rows each rank gets, while training runs.
        options: Further arguments of ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Rows,
        sampler: GlobalSampler,
        on_restore: Callable[[GlobalSampler], None] | None = None,
        fingerprint: str = "",
        speed_meter: SpeedMeter | None = None,
        **options: Any,
    ) -> None:
        self.speed_meter = speed_meter
        self.on_restore = on_restore
        self.fingerprint = fingerprint
        # Called with each batch and the place at which it begins; returns what is handed out in its stead.
        self.annotate: Callable[[Any, tuple[int, int]], Any] | None = None
        options = {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last, **options}
        super().__init__(dataset, sampler=sampler, **options)  # type: ignore[arg-type]

    # A generator, so that workers start at the first batch and not at iter(): Lightning sets the epoch in
    # between.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        place = self._sampler
        batches = self._start()
        while True:
            with own_generators():
                batch = next(batches, _NO_BATCH)
            if batch is _NO_BATCH:
                break
            begin = place.epoch, place.samples_seen
            place.samples_seen += place.global_batch_size
            batch = batch if self.annotate is None else self.annotate(batch, begin)
            if self.speed_meter is None:
                yield batch
            elif (rows := (yield from self._measure(self.speed_meter, batch))) is not None:
                self.share_out(rows)
                del batches  # what workers fetched ahead is shared out anew
                batches = self._start()
        place.set_epoch(place.epoch + 1)

    def _start(self) -> Iterator[Any]:
        """Return batches from the present place on.

        Workers are seeded by it and by the seed of the run, as a resumed run starts them once more. A seed that is
        drawn would leave other numbers to the steps, as to dropout.
        """
        place = self._sampler
        seed = mix_seeds(torch.initial_seed(), place.seed, place.rank, place.epoch, place.samples_seen)
        self.generator = torch.Generator().manual_seed(seed)
        return super().__iter__()

    def _measure(self, meter: SpeedMeter, batch: Any) -> Generator[Any, None, tuple[int, ...] | None]:
        """Hand out a batch, and return the shares of the ranks if these are settled then."""
        meter.begin_round()
        try:
            yield batch
        except GeneratorExit:
            meter.stop()
            raise
        place = self._sampler
        rows = meter.end_round(place.rows, place.num_batches - place.num_batches_left)
        if not place.num_batches_left:
            meter.stop()
        return rows

    def share_out(self, rows: Sequence[int]) -> None:
        """Give each rank this many rows of every round from the next batch on; see Note [Shares]."""
        place, batches = self._sampler, self.batch_sampler
        assert isinstance(batches, BatchSampler)
        place.share_out(rows)
        batches.batch_size = place.batch_size

    @property
    def mean_batch_size(self) -> int:
        """Rows of a rank in a round, in the mean of all ranks; ``batch_size`` is what this one began with."""
        return self._sampler.global_batch_size // self._sampler.num_replicas

    @property
    def last_place(self) -> tuple[int, int]:
        """Where the micro-batch that was handed out last begins: epoch, and samples of all ranks before it."""
        place = self._sampler
        return place.epoch, place.samples_seen - place.global_batch_size

    def list_samples(self, place: tuple[int, int]) -> list[int]:
        """Return which samples this rank's micro-batch at a ``last_place`` has. Costs as much as starting an epoch."""
        return self._sampler.list_samples(*place)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch and what it depends on; the same on every rank."""
        place, settled = self._sampler, self.speed_meter and self.speed_meter.settled
        return {
            "epoch": place.epoch,
            "samples_seen": place.samples_seen,
            "global_batch_size": place.global_batch_size,
            "batches_per_step": place.batches_per_step,
            **self._order,
            **({_SETTLED: list(settled)} if settled else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ValueError: It is in the middle of an order that cannot be drawn again, or was saved by another kind of
                loader.
        """
        if "samples_seen" not in state_dict:
            raise ValueError(f"data: the checkpoint was saved with a stream of another kind: restore it, or {NEW_RUN}")
        place = self._sampler
        state_dict = {"length_groups": 0, **state_dict}  # older checkpoints are of orders without
        # What only one side knows is not compared.
        saved_order = {name: state_dict.get(name, own) for name, own in self._order.items()}
        seen, is_over = state_dict["samples_seen"], is_epoch_over({**state_dict, **saved_order})
        if seen and not is_over and saved_order != self._order:
            changed = ", ".join(
                "the rows are others" if name == "fingerprint" else f"{name} {value}, now {self._order[name]}"
                for name, value in saved_order.items()
                if value != self._order[name]
            )
            raise ValueError(
                f"the checkpoint was saved {seen} samples into an epoch whose order has changed since "
                f"({changed}); restore what it was, or {NEW_RUN}"
            )
        place.epoch = state_dict["epoch"]
        place.samples_seen = place.dataset_size if is_over else seen
        layout = {"global_batch_size": place.global_batch_size, "batches_per_step": place.batches_per_step}
        if layout != {name: state_dict.get(name, 1) for name in layout} and self.on_restore is not None:
            self.on_restore(place)

    @property
    def _sampler(self) -> GlobalSampler:
        assert isinstance(self.sampler, GlobalSampler)
        return self.sampler

    @property
    def _order(self) -> dict[str, Any]:
        place = self._sampler
        order = {"num_samples": place.dataset_size, "seed": place.seed, "shuffle": int(place.shuffle)}
        order["length_groups"] = place.group_size
        return {**order, "fingerprint": self.fingerprint} if self.fingerprint else order


class IndexedRows(Dataset[tuple[int, Any]]):
    """Rows with their numbers; ``PADDING`` gives ``(PADDING, first row)``, which must count nowhere."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.rows[max(index, 0)]


def hash_rows(rows: Iterable[object]) -> str:
    """Return a digest of rows in their order, for ``fingerprint``: of the bytes of each, or its ``repr``."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(row if isinstance(row, bytes) else repr(row).encode())
    return digest.hexdigest()


def build_train_loader(
    rows: Rows,
    *,
    batch_size: int,
    collate: Callable[[list[Any]], Any],
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    trainer: Trainer | None = None,
    what: str = "the training data",
    fingerprint: str = "",
    whole_steps: bool = False,
    share: Share = None,
    lengths: Ints | None = None,
) -> ResumableLoader:
    """Return a loader for this rank that drops the last incomplete micro-batch and resumes exactly.

    Args:
        rows: The whole data set, the same on all ranks.
        batch_size: Rows in a micro-batch of one rank, if all have as many.
        collate: Makes a batch of a list of rows.
        shuffle: Take a new order each epoch.
        seed: Of that order.
        num_workers: Processes that read ahead; 0 reads in the main process.
        trainer: Gives the rank and how many have rows of their own; without it there is one rank.
        what: Names the data in errors.
        fingerprint: Tells the rows from others, such as a digest of them: a checkpoint in the middle of an epoch is
            not resumed with other rows.
        whole_steps: Leave out what does not fill an optimizer step, so that an epoch has the same steps at any world
            size.
        share: Of the ranks in the rows of each round, in proportion; ``auto`` by their speed, see Note [Shares].
        lengths: Of each row, to have those of like lengths in a batch: Note [Length groups].
    """
    if trainer is not None:
        refuse_overfit(trainer)
    data = get_data(trainer)
    given_rows = split_rows(share, batch_size=batch_size, num_ranks=data.count)
    batches_per_step = trainer.accumulate_grad_batches if whole_steps and trainer is not None else 1
    if len(rows) < (needed := batch_size * data.count * batches_per_step):
        times = f" x {batches_per_step} accumulated" if batches_per_step > 1 else ""
        setting = "global_batch_size" if whole_steps else "batch_size"
        raise ValueError(
            f"{what}: {len(rows)} rows do not fill one global batch of {needed} "
            f"(batch_size {batch_size} x {data.count} ranks{times}); lower {setting} or add data"
        )
    sampler = GlobalSampler(
        len(rows),
        batch_size=batch_size,
        num_replicas=data.count,
        rank=data.index,
        shuffle=shuffle,
        seed=seed,
        drop_last=True,
        batches_per_step=batches_per_step,
        rows=given_rows,
        lengths=lengths,
        group_size=0 if lengths is None else choose_group_size(len(rows), needed if whole_steps else None),
    )
    on_restore = meter = None
    if trainer is not None:
        restore_epoch(trainer)
        on_restore = partial(correct_progress, trainer)
        meter = SpeedMeter(trainer) if share == "auto" and data.count > 1 else None
    loader = ResumableLoader(
        rows,
        sampler,
        on_restore,
        fingerprint,
        meter,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=is_on_gpu(trainer),
    )
    if meter is not None and trainer is not None and (settled := _read_settled(trainer, sampler)):
        meter.settled = settled
        loader.share_out(settled)
        rank_zero_info(f"share: auto: the ranks get {list(settled)} rows of each round, as the checkpoint has it")
    return loader


def _read_settled(trainer: Trainer, sampler: GlobalSampler) -> tuple[int, ...] | None:
    """Return the shares that the run of a checkpoint settled, if they are for these ranks and rounds."""
    states = read_loader_states(trainer)
    rows = tuple(states[0].get(_SETTLED, ())) if states else ()
    fits = len(rows) == sampler.num_replicas and sum(rows) == sampler.global_batch_size
    return rows if fits else None


def build_eval_loader(
    rows: Rows,
    *,
    batch_size: int,
    collate: Callable[[list[tuple[int, Any]]], Any],
    num_workers: int = 0,
    trainer: Trainer | None = None,
) -> DataLoader[Any]:
    """Return a loader that gives every row exactly once over all ranks, as many batches of one size to each.

    Args:
        rows: The whole data set, the same on all ranks.
        batch_size: Rows in a batch of one rank.
        collate: Makes a batch of a list of ``(index, row)``. Rows with index ``PADDING`` only fill the last
            batch up; they must not count in any loss or metric. A whole batch of them is possible.
        num_workers: Processes that read ahead; 0 reads in the main process.
        trainer: Gives the rank and how many have rows of their own; without it there is one rank.
    """
    data = get_data(trainer)
    sampler = GlobalSampler(
        len(rows), batch_size=batch_size, num_replicas=data.count, rank=data.index, shuffle=False, drop_last=False
    )
    return DataLoader(
        IndexedRows(rows),
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=is_on_gpu(trainer),
    )


def get_data(trainer: Trainer | None) -> DataRanks:
    """Return which rows are those of this rank; without a trainer there is one rank."""
    return DataRanks() if trainer is None else get_data_ranks(trainer)


def is_on_gpu(trainer: Trainer | None) -> bool:
    """Whether batches go to a GPU. That the machine has one is not enough: pinning would start CUDA for a CPU run."""
    return trainer is not None and trainer.strategy.root_device.type == "cuda"


def read_loader_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what a checkpoint has of the training loaders, until Lightning has handed it over; empty in a new run."""
    loop: Any = trainer.fit_loop
    # Private, seen in Lightning 2.6.6; there is no other way to the state before Lightning has decided.
    return list(loop._combined_loader_states_to_load)


def restore_epoch(trainer: Trainer) -> None:
    """Make Lightning go on in the epoch that a checkpoint's place is in. Does nothing but on a resume.

    Must be called before Lightning hands the loader its state, which it only does in the middle of an epoch.
    """
    loop: Any = trainer.fit_loop
    states = read_loader_states(trainer)
    if not states or "epoch" not in states[0]:  # of a loader of another kind, which this one will refuse
        return
    if loop.epoch_progress.current.processed <= states[0]["epoch"]:
        return
    batches = loop.epoch_loop.batch_progress
    is_over = batches.is_last_batch or is_epoch_over(states[0])
    if not is_over:
        # An epoch that max_steps, max_time or early stopping cut short counts as a whole one, and the rest of
        # its samples would be skipped. Count it as open.
        for epochs in (loop.epoch_progress.current, loop.epoch_progress.total):
            epochs.processed -= 1
            epochs.completed = min(epochs.completed, epochs.processed)
        loop.restarting = True
    elif loop.restarting:
        # With max_steps set, Lightning takes up a finished epoch as if it were open: its batch count would let the
        # next epoch end before its first batch, and a validation that it skips would count as a step in logs. Count
        # it as closed.
        for epochs in (loop.epoch_progress.current, loop.epoch_progress.total):
            epochs.completed = epochs.processed
        loop.epoch_loop.restarting = False


def is_epoch_over(state: Mapping[str, Any]) -> bool:
    """Whether the loader that saved this state would have given no further batch in its epoch."""
    step_size = state["global_batch_size"] * state.get("batches_per_step", 1)
    return bool(state["num_samples"] - state["samples_seen"] < step_size)


def correct_progress(trainer: Trainer, sampler: GlobalSampler) -> None:
    """Tell Lightning how many batches have passed, in batches of the present global size.

    Lightning restores its count in batches of the old size and would leave the epoch too early or too late.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress
    num_done = sampler.num_batches - sampler.num_batches_left
    if batches.is_last_batch:  # it only compares whether at least all were done
        num_done = max(sampler.num_batches, batches.current.ready)
    shift_progress(trainer, num_done)


def shift_progress(trainer: Trainer, num_done: int) -> None:
    """Tell Lightning that this many batches of the epoch have passed."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    shift = num_done - batches.current.ready
    # All by the same: from their differences Lightning tells where in a step the checkpoint was saved.
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches.current, name, getattr(batches.current, name) + shift)
