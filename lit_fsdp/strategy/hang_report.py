"""What ranks that wait tell each other, and the one line that is made of it: who is missing, and where."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lit_fsdp.strategy.roll_call import name_ranks

_MOST_NAMED = 4  # of the ranks that are missing, each with its place


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A collective that a rank has begun and that is not over.

    Args:
        group: Of which process group.
        ranks: Those in the group.
        number: The how-many-th of the group.
        operation: What the backend calls it, and the shapes of inputs and outputs.
    """

    group: str
    ranks: Sequence[int]
    number: int
    operation: str


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Where a rank is while others, or itself, wait.

    Args:
        rank: Its number.
        host: Its machine.
        step: How many optimizer steps it has made.
        activity: Such as ``data loading`` or ``validation``.
        place: A line of code.
        unit: The FSDP unit that it gathers or reduces.
        call: The function of ``torch.distributed`` that it is in.
        waits: The oldest collective of each group that is not over, those of other threads too.
        is_waiting: Whether the run itself waits for other ranks, maybe in something else than a collective.
        begun: The number of the last collective it has begun, by group.
        history: The last collectives of the groups that it waits in, by group, as number and operation.
    """

    rank: int
    host: str
    step: int
    activity: str
    place: str
    unit: str | None
    call: str | None
    waits: Sequence[Wait]
    is_waiting: bool
    begun: Mapping[str, int]
    history: Mapping[str, Sequence[tuple[int, str]]]


def write_report(report: RankReport) -> str:
    """Return a report as text for a store."""
    return json.dumps(asdict(report))


def read_report(text: str | bytes) -> RankReport:
    """Return the report of ``write_report``."""
    fields = json.loads(text)
    waits = [Wait(**wait) for wait in fields.pop("waits")]
    history = {group: [(n, operation) for n, operation in past] for group, past in fields.pop("history").items()}
    return RankReport(waits=waits, history=history, **fields)


def describe_hang(
    reports: Sequence[RankReport], *, world_size: int, waited_s: float, last_seen: Mapping[int, str]
) -> str:
    """Return who waits, in what, and for whom.

    Args:
        reports: Of the ranks that have answered.
        world_size: How many ranks there are.
        waited_s: How long the first of them has waited.
        last_seen: Where the others were when they were last heard of.
    """
    answers = {report.rank: report for report in reports}
    lacking = {report.rank: _list_lacking(report, answers, world_size) for report in reports}
    # Only those that do not wait themselves: with several groups, ranks wait for each other in chains.
    missing = sorted(
        rank
        for rank in set().union(*lacking.values())
        if rank not in answers or not (answers[rank].is_waiting or lacking[rank])
    )
    if missing:
        first = next(report for report in reports if set(missing) & lacking[report.rank])
        alike = [report.rank for report in reports if lacking[report.rank]]
        has = "have" if len(alike) > 1 else "has"
        places = [_locate(rank, answers, last_seen) for rank in missing[:_MOST_NAMED]]
        more = f" and {name_ranks(missing[_MOST_NAMED:])}" if len(missing) > _MOST_NAMED else ""
        inside = _describe_wait(first) if len(alike) == 1 else f"{_describe_wait(first)} (rank {first.rank})"
        return (
            f"{name_ranks(alike)} {has} waited {waited_s:.0f} s in {inside} at step {first.step} for "
            f"{' and '.join(places)}{more}"
        )
    waiting = [report for report in reports if report.is_waiting or report.waits]
    kinds: dict[str, list[int]] = {}
    for report in waiting:
        kinds.setdefault(_describe_wait(report), []).append(report.rank)
    if len(kinds) == 1 and _find_difference(waiting) is None:
        return (
            f"all ranks have come to {next(iter(kinds))}, which is not over after {waited_s:.0f} s: see what slows it"
        )
    inside = ", ".join(f"{name_ranks(ranks)} in {kind}" for kind, ranks in kinds.items())
    return (
        f"ranks have waited {waited_s:.0f} s in different collectives: {inside}{_find_difference(waiting) or ''}: "
        "all ranks have to run the same modules in the same order"
    )


def _list_lacking(report: RankReport, answers: Mapping[int, RankReport], world_size: int) -> set[int]:
    """Return the ranks that have not come to where this one waits."""
    if report.is_waiting and not report.waits:  # in no collective: whoever does not wait too
        return {rank for rank in range(world_size) if rank not in answers or not answers[rank].is_waiting}
    return {
        rank
        for wait in report.waits
        for rank in wait.ranks
        if rank not in answers or answers[rank].begun.get(wait.group, 0) < wait.number
    }


def _describe_wait(report: RankReport) -> str:
    # The stack says it in the words of torch. NCCL returns at once, so there only the recorder knows.
    name = report.call or (report.waits[0].operation if report.waits else report.place)
    return f"{name} of unit {report.unit}" if report.unit else name


def _locate(rank: int, answers: Mapping[int, RankReport], last_seen: Mapping[int, str]) -> str:
    if rank not in answers:
        if (seen := last_seen.get(rank)) is None:
            return f"rank {rank}, which has not come to this run: its script is somewhere else still, or has ended"
        return (
            f"rank {rank}, which does not answer: it has ended, is stopped, or holds Python's lock (last seen {seen})"
        )
    report = answers[rank]
    return f"rank {rank} on {report.host}, which is at step {report.step} in {report.activity} ({report.place})"


def _find_difference(waiting: Sequence[RankReport]) -> str | None:
    """Return where the collectives of two ranks first differ, as far back as they are known."""
    for other in waiting[1:]:
        for group, past in waiting[0].history.items():
            known = dict(other.history.get(group, ()))
            for number, operation in past:
                if number in known and known[number] != operation:
                    return (
                        f"; collective {number} of their group was the first to differ: {operation} on rank "
                        f"{waiting[0].rank}, {known[number]} on rank {other.rank}"
                    )
    return None
