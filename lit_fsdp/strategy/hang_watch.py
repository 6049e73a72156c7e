"""A thread of each rank that sees when a collective waits for too long, and has all ranks say where they are.

Note [An alarm]: every rank looks at itself a few times per ``hang_report_s``, notes in the store of the run what it
does, and asks whether there is an alarm. The first rank that waits for too long raises it. Then every rank answers with
a report and writes its stacks; rank 0 makes one line of the answers. If it does not answer, the next one does. Who does
not answer is named in the line. When the wait of the rank that raised the alarm ends, a second line says so.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # as in roll_call.py

from lit_fsdp.profiling.flight_recorder import Collective, count_collectives, list_collectives, name_switch
from lit_fsdp.redaction import redact
from lit_fsdp.strategy.hang_report import RankReport, Wait, describe_hang, read_report, write_report
from lit_fsdp.strategy.roll_call import get_store
from lit_fsdp.strategy.thread_position import find_position, find_wait, format_stacks

_REPORT_S = 300.0
_LONGEST_POLL_S = 5.0
_GRACE_S = 1.0  # beside the time in which each rank looks twice
_STORE_TIMEOUT_S = 10.0
_NUM_REMEMBERED = 300  # collectives of a group that ranks compare
_NUM_WRITTEN = 20

_STAGES = {"train": "training", "sanity_check": "the sanity check", "validate": "validation"}
_STAGES |= {"test": "the test", "predict": "prediction"}

_watches = count()  # of this process, the same on all ranks: a second run must not read alarms of the first


def choose_report_s(report_s: float | Literal["auto"] | None, timeout_s: float) -> float | None:
    """Return the seconds that ``hang_report_s`` stands for; refuse what is no time, or comes after the run has failed.

    Raises:
        ValueError: With a value that works.
    """
    if report_s is None:
        return None
    if report_s == "auto":
        return min(_REPORT_S, timeout_s / 2)
    if not report_s > 0:
        raise ValueError(f"hang_report_s: got {report_s}: expected seconds above 0, auto, or null for no report")
    if report_s >= timeout_s:
        raise ValueError(
            f"hang_report_s: got {report_s:g}: the run fails after timeout_s {timeout_s:g} already: set it to "
            f"{timeout_s / 2:g}, or to null for no report"
        )
    return report_s


def watch_for_hangs(trainer: pl.Trainer, report_s: float | None) -> HangWatch | None:
    """Start to watch the thread that calls this; ``None`` if nothing is to be watched. All ranks must call it."""
    if report_s is None or dist.get_world_size() == 1:
        return None
    if switch := name_switch():
        rank_zero_warn(
            f"hang_report_s: {switch} turns torch's Flight Recorder off, without which nobody knows how long a "
            "collective waits: leave the variable out, or set hang_report_s to null"
        )

    def get_step() -> tuple[int, str]:
        stage = trainer.state.stage
        return trainer.global_step, "start-up" if stage is None else _STAGES.get(stage.value, stage.value)

    watch = HangWatch(report_s, get_step)
    watch.start()
    return watch


class HangWatch:
    """Watches the thread that makes it, from ``start`` to ``stop``. Needs the process group.

    Args:
        report_s: How long a wait may take before ranks report.
        get_step: Returns the number of optimizer steps, and what the run does, such as ``validation``. Called from
            another thread.
    """

    folder: Path | None = None  # where stacks are written; none: on stderr

    def __init__(self, report_s: float, get_step: Callable[[], tuple[int, str]]) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._report_s, self._get_step = report_s, get_step
        self._poll_s = min(report_s / 10, _LONGEST_POLL_S)
        self._grace_s = 2 * self._poll_s + _GRACE_S
        self._watched = threading.get_ident()
        # A connection of its own: one that is shared would wait as long as the watched thread waits in it.
        self._store: Store = get_store(f"hangs/{next(_watches)}").clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._is_lost = False
        # What failed earlier in this process never ends.
        self._ignored = {(key, begun) for key, (begun, over) in count_collectives().items() if begun > over}
        self._waits: dict[Any, float] = {}  # what this rank waits in, since when
        self._progress: Any = None  # where the run was then
        self._alarm = _Alarm(self._store, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch. Where others go on to wait for this rank, they will read that it has left."""
        self._stop.set()
        self._thread.join(_STORE_TIMEOUT_S)

    def _leave(self) -> None:
        if self._has_store():
            with suppress(DistError):
                self._store.set(f"seen/{self.rank}", f"at step {self._get_step()[0]}, where it left the run")

    def _has_store(self) -> bool:
        """Whether the store is still there. It may go with rank 0, and each call in vain has torch write 40 lines."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not self._is_lost and isinstance(store, TCPStore):
            try:
                socket.create_connection((store.host, store.port), timeout=_STORE_TIMEOUT_S).close()
            except OSError:
                self._is_lost = True
        return not self._is_lost

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            waited_s = self._measure_wait()
            try:
                if self._has_store():
                    self._exchange(waited_s)
            except DistError:
                self._is_lost = True
            if self._is_lost and waited_s >= self._report_s:
                self._report_alone(waited_s)
                return
        self._leave()

    # What this rank waits in

    def _measure_wait(self) -> float:
        """Return for how many seconds this rank has waited in one thing, 0 if it does not."""
        counts = count_collectives()
        found: set[Any] = {(key, begun) for key, (begun, over) in counts.items() if begun > over} - self._ignored
        if (place := find_wait(self._watched)) is not None:
            found.add((place,))
        # What waits while the run goes on holds nothing back, such as a slow rank's part of a save beside training.
        if (progress := (self._get_step(), counts)) != self._progress:
            self._progress, self._waits = progress, {}
        now = time.monotonic()
        self._waits = {what: self._waits.get(what, now) for what in found}
        if now - min(self._waits.values(), default=now) < self._report_s:
            return now - min(self._waits.values(), default=now)
        # Before anybody is alarmed: what the counts were told late of is over.
        groups = {collective.key for collective in list_collectives() if not collective.is_over}
        self._ignored |= {what for what in found if isinstance(what[0], str) and what[0] not in groups}
        self._waits = {what: since for what, since in self._waits.items() if what not in self._ignored}
        return now - min(self._waits.values(), default=now)

    def _describe(self) -> tuple[RankReport, list[Collective]]:
        known = list_collectives()
        begun = list_begun(known, set(self._waits))
        position = find_position(self._watched)
        step, doing = self._get_step()
        groups = _list_groups()
        waits = [
            Wait(group=c.group, ranks=groups.get(c.group.split()[-1], [self.rank]), number=c.number, operation=_name(c))
            for c in begun
        ]
        past = {wait.group: [c for c in known if c.group == wait.group][-_NUM_REMEMBERED:] for wait in waits}
        report = RankReport(
            rank=self.rank,
            host=socket.gethostname(),
            step=step,
            activity=(position and position.activity) or doing,
            place=position.place if position else "ended",
            unit=position.unit if position else None,
            call=position.call if position else None,
            waits=waits,
            # What another thread waits in, such as a save beside training, does not hold the run back. NCCL's
            # collectives do, and in backward they come from a thread of autograd.
            is_waiting=any(c.thread == self._watched or c.group.startswith("nccl") for c in begun)
            or find_wait(self._watched) is not None,
            begun={c.group: c.number for c in known},
            history={group: [(c.number, _name(c)) for c in of_group] for group, of_group in past.items()},
        )
        return report, known

    # Between ranks, see Note [An alarm]

    def _exchange(self, waited_s: float) -> None:
        step, doing = self._get_step()
        self._store.set(f"seen/{self.rank}", f"at step {step} in {doing}")
        alarm = self._alarm
        if waited_s >= self._report_s and not alarm.is_raised():
            alarm.raise_by_me(waited_s)
        if not alarm.is_raised():
            return
        if alarm.is_mine and waited_s < self._report_s:
            alarm.end()
        if (ended_s := alarm.read_end()) is not None:
            if alarm.is_said:
                _say(f"over: the run went on after {ended_s:.0f} s")
            self._alarm = _Alarm(self._store, alarm.number + 1)
        elif alarm.answered_at is None:
            alarm.answered_at = time.monotonic()
            report, known = self._describe()
            alarm.answer(report)
            self._write_stacks(report, known)
        else:
            self._try_to_say(alarm)

    def _try_to_say(self, alarm: _Alarm) -> None:
        assert alarm.answered_at is not None
        # The others leave it to rank 0 as long as it may do so, and do not ask for answers meanwhile.
        patience_s = self._grace_s * (1 if self.rank == 0 else 2)
        is_late = time.monotonic() - alarm.answered_at > patience_s
        if alarm.is_settled or not (is_late or self.rank == 0):
            return
        answered = [rank for rank in range(self.world_size) if alarm.has_answer(rank)]
        if not (is_late or len(answered) == self.world_size) or not alarm.settle():
            return
        silent = set(range(self.world_size)) - set(answered)
        line = describe_hang(
            [alarm.read_answer(rank) for rank in answered],
            world_size=self.world_size,
            waited_s=alarm.waited_s + time.monotonic() - alarm.answered_at,
            last_seen={r: self._store.get(f"seen/{r}").decode() for r in silent if self._store.check([f"seen/{r}"])},
        )
        _say(f"{line}; {self._name_stacks()}")

    def _report_alone(self, waited_s: float) -> None:
        """Say what this rank waits in: the connection to the others is lost."""
        report, known = self._describe()
        line = describe_hang([report], world_size=1, waited_s=waited_s, last_seen={})
        self._write_stacks(report, known)
        _say(f"rank {self.rank} sees no store of the run, which was with rank 0 or torchrun: {line}")

    def _name_stacks(self) -> str:
        return "stacks of all ranks on stderr" if self.folder is None else f"stacks: {self.folder / 'hang_rank*.txt'}"

    def _write_stacks(self, report: RankReport, known: list[Collective]) -> None:
        waits = [f"waits in {w.operation}, collective {w.number} of {w.group}, ranks {w.ranks}" for w in report.waits]
        last = [f"{c.group} {c.number} {_name(c)}{'' if c.is_over else ' (not over)'}" for c in known[-_NUM_WRITTEN:]]
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        head = f"{now} rank {self.rank} on {report.host}, pid {os.getpid()}: step {report.step}, {report.activity}"
        lines = [
            head,
            f"at {report.place}, unit {report.unit}",
            *waits,
            "",
            format_stacks(self._watched),
            "last collectives:",
            *last,
        ]
        text = "".join(f"{line}\n" for line in lines)
        text = redact(text)
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / f"hang_rank{self.rank}.txt").open("a") as file:
                    file.write(f"{text}\n")
                return
        except OSError as error:  # a full disk may be what the run waits for
            text = f"{error}\n{text}"
        sys.stderr.write(text)


class _Alarm:
    """What ranks tell each other of one hang; the next one has the next number."""

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self._store = PrefixStore(str(number), store)
        self.is_mine = False  # whether this rank has raised it
        self.is_said = False  # whether this rank has said the line
        self.is_settled = False  # whether any rank has
        self.answered_at: float | None = None
        self.waited_s = 0.0  # when it was raised, once it is
        self._began = 0.0

    def is_raised(self) -> bool:
        if self.waited_s == 0.0 and self._store.check(["raised"]):
            self.waited_s = float(self._store.get("raised"))
        return self.waited_s > 0.0

    def raise_by_me(self, waited_s: float) -> None:
        if self._store.add("raisers", 1) == 1:
            self.is_mine, self.waited_s = True, waited_s
            self._began = time.monotonic() - waited_s
            self._store.set("raised", str(waited_s))

    def end(self) -> None:
        self._store.set("ended", str(time.monotonic() - self._began))

    def read_end(self) -> float | None:
        return float(self._store.get("ended")) if self._store.check(["ended"]) else None

    def answer(self, report: RankReport) -> None:
        self._store.set(f"answer/{report.rank}", write_report(report))

    def has_answer(self, rank: int) -> bool:
        return bool(self._store.check([f"answer/{rank}"]))

    def read_answer(self, rank: int) -> RankReport:
        return read_report(self._store.get(f"answer/{rank}"))

    def settle(self) -> bool:
        """Return whether the line is this rank's to say: of all that ask, it is the first's."""
        self.is_settled, self.is_said = True, self._store.add("said", 1) == 1
        return self.is_said


def list_begun(known: list[Collective], keys: set[Any]) -> list[Collective]:
    """Return the oldest collective that is not over, of each group that seems to wait, the oldest of all first.

    Later ones are queued behind it, and a rank may be ahead of another with those.
    """
    waiting, found = {what[0] for what in keys}, dict[str, Collective]()
    for collective in known:
        if not collective.is_over and collective.key in waiting:
            found.setdefault(collective.key, collective)
    return list(found.values())


def _name(collective: Collective) -> str:
    return f"{collective.operation} {collective.sizes}"


def _list_groups() -> dict[str, list[int]]:
    """Return the ranks of every process group that this rank is in, by name."""
    known: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
    # Of a group that was made without this rank, as those of a mesh, torch has a number instead. Seen in torch 2.13.
    return {group.group_name: sorted(ranks) for group, ranks in known.items() if isinstance(group, dist.ProcessGroup)}


def _say(line: str) -> None:
    # Not a warning of Python's, which is shown once for each place in the code.
    sys.stderr.write(f"hang: {redact(line)}\n")
    sys.stderr.flush()
