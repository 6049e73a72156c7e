"""How many rows of each round the ranks get, where one is faster than another.

Note [Shares]: a round is the micro-batches of all ranks that run at the same time: ``batch_size`` x ranks rows. A
share moves rows of a round from one rank to another, and nothing else: each optimizer step has the rows that it has
with equal shares, and the loss is a mean over all its targets, whoever had them. So losses stay the same, and a
checkpoint can be resumed with other shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from statistics import median
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_fsdp.profiling.communication_meter import CommunicationMeter
from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.strategy.trainer_settings import get_data_ranks

Share = list[int] | Literal["auto"] | None

_WARMUP_ROUNDS, _MEASURED_ROUNDS = 3, 8


def check_share(share: Share) -> None:
    """Refuse shares that no ranks could have.

    Raises:
        ValueError: With what is expected.
    """
    if share is None or share == "auto":
        return
    if not share or min(share) < 1:
        raise ValueError(
            f"share: got {share}: expected a number from 1 for each rank, such as [3, 1]: sharded models need every "
            "rank in every step; or auto"
        )


def split_rows(share: Share, *, batch_size: int, num_ranks: int) -> tuple[int, ...]:
    """Return how many rows of each round every rank gets; of ``auto``, as long as nothing is measured.

    Args:
        share: One number a rank, in proportion.
        batch_size: Rows of a rank, if all had as many.
        num_ranks: That share the rows.

    Raises:
        ValueError: There is not one number for each rank, or they cannot have whole rows; with the nearest that can.
    """
    if share is None or share == "auto":
        return (batch_size,) * num_ranks
    num_rows, total = batch_size * num_ranks, sum(share)
    if len(share) != num_ranks:
        raise ValueError(f"share: got {share}: expected a number for each of {num_ranks} ranks, or auto")
    unit = total // gcd(*share)  # rows of the smallest round that it divides
    if num_rows % unit:
        nearest = balance_rows(share, num_rows)
        # Both the ratio and the number of ranks have to divide the round.
        step = unit // gcd(unit, num_ranks)
        sizes = [size for k in (batch_size // step, batch_size // step + 1) if (size := k * step)]
        raise ValueError(
            f"share: got {share}: {num_rows} rows (batch_size {batch_size} x {num_ranks} ranks) do not divide by "
            f"{unit}: set it to {list(nearest)}, or batch_size to {' or '.join(map(str, sizes))}"
        )
    return tuple(number * num_rows // total for number in share)


def refuse_unsplit(trainer: Trainer, data: object) -> None:
    """Refuse data with a ``share`` that the ranks of a Trainer cannot have, before they start."""
    share, batch_size = getattr(data, "share", None), getattr(data, "batch_size", None)
    if isinstance(share, list) and isinstance(batch_size, int):
        split_rows(share, batch_size=batch_size, num_ranks=get_data_ranks(trainer).count)


def count_largest(share: Share, batch_size: int) -> int:
    """Return the rows of the largest micro-batch of a rank; of ``auto``, before it measures."""
    if share is None or share == "auto":
        return batch_size
    return -(-batch_size * len(share) * max(share) // sum(share))


def balance_rows(speeds: Sequence[float], num_rows: int) -> tuple[int, ...]:
    """Return how many of ``num_rows`` rows each rank gets, so that the last one is done as early as can be.

    Every rank gets at least one. Ranks of equal speed differ by at most one row, the first ones have it.

    Args:
        speeds: Rows a second of each rank, or anything in proportion.
        num_rows: Of a round, at least one a rank.
    """
    rows = [1] * len(speeds)
    for _ in range(num_rows - len(rows)):
        first = min(range(len(rows)), key=lambda rank: ((rows[rank] + 1) / speeds[rank], rank))
        rows[first] += 1
    return tuple(rows)


class SpeedMeter:
    """Finds how fast each rank is, in the first rounds of a run, and settles shares by it once.

    The speed of a rank is its rows by the seconds of a micro-batch that it does not wait for others. Waiting is what
    FSDP2's collectives add, see Note [What is timed].

    Args:
        trainer: Whose ranks they are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._meter: CommunicationMeter | None = None
        self._num_rounds = 0
        self._seconds: list[float] = []  # of micro-batches after the warm-up, without waiting
        self.settled: tuple[int, ...] | None = None  # rows of each rank; also what a checkpoint has

    def begin_round(self) -> None:
        """Go on with measuring. To be called right before a micro-batch is handed out."""
        if self.settled is not None:
            return
        if self._meter is None:
            self._meter = self._attach()
        self._meter.resume()

    def end_round(self, rows: Sequence[int], num_done: int) -> tuple[int, ...] | None:
        """Note that this rank is done with its micro-batch; return the shares from now on, once, when they are known.

        All ranks must call it alike. Nothing changes within an optimizer step.

        Args:
            rows: Of the round, by rank.
            num_done: Rounds of this epoch so far.
        """
        if self.settled is not None or self._meter is None:
            return None
        self._meter.end_step()
        self._num_rounds += 1
        done = self._meter.take(wait=True)
        if self._num_rounds > _WARMUP_ROUNDS:
            self._seconds += [step.step_s - step.add_up().exposed_s for step in done]
        if len(self._seconds) < _MEASURED_ROUNDS or num_done % self._trainer.accumulate_grad_batches:
            return None
        self.stop()
        found = gather_objects((get_data_ranks(self._trainer).index, median(self._seconds)))
        # Of ranks that share their rows, the slowest one counts.
        speeds = [number / max(s for i, s in found if i == index) for index, number in enumerate(rows)]
        self.settled = balance_rows(speeds, sum(rows))
        told = ", ".join(f"{speed:.3g}" for speed in speeds)
        rank_zero_info(
            f"share: auto: the ranks do {told} rows/s without waiting: from now on they get {list(self.settled)} rows "
            "of each round"
        )
        return self.settled

    def stop(self) -> None:
        """Give FSDP2 back what it had, until the next round begins."""
        if self._meter is not None:
            self._meter.detach()
        self._meter = None

    def _attach(self) -> CommunicationMeter:
        module = self._trainer.lightning_module
        meter = CommunicationMeter(module, self._trainer.strategy.root_device)
        if not meter.num_units:
            raise ValueError(
                f"share: got 'auto' with {type(self._trainer.strategy).__name__}: it needs FSDP2Strategy, whose "
                "collectives say how long a rank waits for others; give a number for each rank, such as [3, 1]"
            )
        meter.attach()
        return meter
