"""Who comes when a run starts: ranks tell each other where they are and what they start with, and none waits for long.

Rank 0 has the store, or torchrun's agent does. Every rank signs in there; rank 0 looks who came, compares what they
start with, and writes the verdict that all others read. So all ranks end with the same line.

Note [Old keys]: the agents of torchrun keep one store through all restarts of their ranks, and torch leaves the keys
of a process group in it. Ranks that start again find where the earlier ones listened, and fail with
``connectFullMesh failed`` or hang. The number of the restart is no way out: each agent counts for itself. So rank 0
offers a name that nobody used before, each rank answers with a word of its own, and the verdict lists these words.
They meet below that name. Seen in torch 2.13 (pytorch#135712); the name can go when torch does so, the roll call stays.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

import torch.distributed as dist

# Public, but not in the __all__ that mypy goes by, seen in torch 2.15.
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

# Private, seen in torch 2.13 to 2.15: the store of a process group that the user may have started.
from torch.distributed.distributed_c10d import _get_default_store

from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.strategy.elastic import find_agent, has_agent_store
from lit_fsdp.strategy.slurm import choose_port, find_own_tasks

_POLL_S = (0.001, 0.1)  # the first pause and the longest
_GRACE_S = 5.0  # for what takes a moment once its other end is there
_LATE_S = 30.0  # how much later than a rank that is refused rank 0 may start
_REFUSED = "lit_fsdp/refused"  # the line of a rank that will not come
_UNKNOWN_S = 10.0  # until a name that no server knows is taken for wrong

PLACE = "a path"  # in the JSON of a fact, whatever it is on another rank: what lies there differs between nodes

_calls = count()  # of this process: a second run of it must not read the answers of the first

_stores: dict[tuple[int, str, int], Store] = {}  # by process, address and port; that of rank 0 listens until it ends

_shared: list[str] = []  # the lines that this process has told the others


@dataclass(frozen=True, kw_only=True)
class Presence:
    """A rank that came.

    Args:
        rank: Its number.
        host: Where it is.
        pid: Its process there.
        facts: What has to be the same on all ranks, by name.
        notes: What may differ, by name.
        word: Nobody else's, see Note [Old keys].
    """

    rank: int
    host: str
    pid: int
    facts: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    word: str = field(default_factory=lambda: uuid4().hex)


def sign_in(rank: int, facts: Mapping[str, str], notes: Mapping[str, str] | None = None) -> Presence:
    """Return the presence of this process."""
    return Presence(rank=rank, host=socket.gethostname(), pid=os.getpid(), facts=facts, notes=notes or {})


def open_store(address: str, port: int, *, rank: int, timeout_s: float) -> Store:
    """Return the store where ranks meet: that of torchrun's agent, else one that rank 0 has. The same for each run.

    Raises:
        ValueError: The address is unknown here, or something else has the port.
        RuntimeError: Nobody came to the port in time.
    """
    host, limit, place = socket.gethostname(), timedelta(seconds=timeout_s), (os.getpid(), address, port)
    if place in _stores:
        _stores[place].set_timeout(limit)
        return _stores[place]
    try:
        _wait_for_name(address, port, timeout_s)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR: got {address!r}: {host} knows no host of this name: expected the name or address of the "
            "machine of rank 0"
        ) from error
    except OverflowError:
        raise ValueError(f"MASTER_PORT: got {port}: expected 1 to 65535") from None
    own: dict[str, Any] = {}
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not has_agent:
        own = {"is_master": True, "master_listen_fd": _listen(port)}
    _wait_for_listener(address, port, host, timeout_s)
    found: list[Store] = []

    def connect() -> None:
        with suppress(DistError):
            found.append(TCPStore(address, port, None, timeout=limit, wait_for_workers=False, **own))

    # In a thread: what listens there may be no store and never answer, and torch would wait for it without an end.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(timeout_s, _GRACE_S))
    if not found:
        raise ValueError(
            f"MASTER_PORT: got {port}: what listens there on {address} is not rank 0 of this run, as {host} sees it: "
            "choose a port that is free"
        )
    _stores[place] = found[0]
    return found[0]


def call_roll(
    store: Store,
    own: Presence,
    *,
    world_size: int,
    timeout_s: float,
    find_lost: Callable[[], str | None] = lambda: None,
    is_kept: bool = False,
    advice: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Store:
    """Wait until all ranks are here and start with the same; all that are there end alike if not. Takes milliseconds.

    Args:
        store: From ``open_store``.
        own: This rank.
        world_size: How many ranks have to come.
        timeout_s: How long rank 0 waits for the others, and they for it.
        find_lost: Asked while rank 0 waits; returns why the wait is in vain, once it is.
        is_kept: Whether the store may have keys of ranks that are gone.
        advice: Added to what names missing ranks, where others have started in this store before.
        say: Called on rank 0 with a line for each note that is not the same on all ranks.

    Returns:
        The part of the store that only these ranks know, see Note [Old keys].

    Raises:
        RuntimeError: Some did not come; names those that did and those that are missing.
        ValueError: They start with different things, or two came as the same rank.
    """
    whole, store = store, PrefixStore(f"lit_fsdp/start_{world_size}/{next(_calls)}", store)
    try:
        if own.rank == 0:
            name, present = _lead(
                store, own, world_size, timeout_s, lambda: find_lost() or _take_refusal(whole), advice
            )
            for line in describe_notes(present):
                say(line)
        else:
            name = _follow(store, own, world_size, timeout_s, is_kept, advice)
    except DistError as error:  # no answer from the store
        raise RuntimeError(f"the connection to rank 0 was lost while the ranks started ({error})") from error
    return PrefixStore(f"{name}/run", store)


def _starts_again() -> bool:
    """Whether this rank may start again in the same store, where its next roll call would find what it leaves."""
    agent = find_agent(os.environ)
    return has_agent_store(os.environ) and (agent is None or agent.num_restarts < agent.max_restarts)


def _take_refusal(store: Store) -> str | None:
    if not store.check([_REFUSED]):
        return None
    line = store.get(_REFUSED).decode()
    store.delete_key(_REFUSED)
    return line


def get_store(name: str) -> Store:
    """Return the part of the process group's store that has this name."""
    return PrefixStore(name, _get_default_store())


def share_refusal(line: str, patience_s: float, say: Callable[[str], None]) -> bool:
    """Tell the other ranks in which line this one ends, and return whether it is said: rank 0 says it for all.

    False where ranks have no store in common, or lose it: a line that is told twice is better than one that is lost.
    Uses the store of the process group, else that of torchrun's agent, or one of rank 0 where there is none. A line
    that only this rank has ends the roll call of the others, where it will not be started again.

    Args:
        line: Of this rank.
        patience_s: How long others wait for rank 0, and rank 0 for them to read.
        say: Called on rank 0, before the others can know: torchrun ends it as soon as one of them has ended. Called on
            a rank that finds no rank 0, before it waits longer for that to start.
    """
    has_group = dist.is_initialized()
    place = _Place(dist.get_rank(), dist.get_world_size(), "", 0) if has_group else _find_place()
    if place is None or place.world_size == 1 or line in _shared:
        return False
    rank, world_size = place.rank, place.world_size
    _shared.append(line)
    is_said = rank == 0
    if is_said:
        say(line)
    try:
        if has_group:
            store = get_store("refusals")
        else:
            name = f"refusals_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # agents may keep earlier ones
            options: dict[str, Any] = {"address": place.address, "port": place.port, "rank": rank}
            try:
                whole = open_store(**options, timeout_s=patience_s)
            except RuntimeError:
                say(line)
                is_said = True
                whole = open_store(**options, timeout_s=_LATE_S)
            store = PrefixStore(name, whole)
        if rank == 0:
            store.set("0", line)
            wait_until(lambda: not store.check(["0"]), patience_s)
            return True
        is_told = wait_until(lambda: store.check(["0"]), patience_s) and store.get("0").decode() == line
        if not is_told and not has_group and not _starts_again():
            whole.set(_REFUSED, f"rank {rank} on {socket.gethostname()} ended: {line}")
        # The last one leaves nothing behind: ranks that start again with the same count would find it.
        if store.add("readers", 1) == world_size - 1:
            store.delete_key("readers")
            store.delete_key("0")
        return is_told or is_said
    except (DistError, ValueError, RuntimeError):  # it went with another rank
        return is_said


class _Place(NamedTuple):
    """Where a rank meets the others that something else has started."""

    rank: int
    world_size: int
    address: str
    port: int


def _find_place() -> _Place | None:
    environ = os.environ
    if "TORCHELASTIC_USE_AGENT_STORE" in environ:
        address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        return _Place(rank, world_size, address, int(port)) if address and port.isdecimal() else None
    try:
        tasks = None if "RANK" in environ else find_own_tasks()
    except ValueError:  # what is wrong with them is the line, or comes after it
        return None
    if tasks is None:
        return None
    return _Place(tasks.rank, tasks.total, environ.get("MASTER_ADDR", tasks.first_node), choose_port(environ))


def compare_in_group(rank: int, facts: Mapping[str, str]) -> None:
    """Compare what ranks know only later, and all of them know. A collective: one that is gone is noticed at once.

    Raises:
        ValueError: They are not the same on all ranks; the line is the same on all.
    """
    present = gather_objects(asdict(sign_in(rank, facts)))
    known = set.intersection(*(set(one["facts"]) for one in present))
    shared = [one | {"facts": {name: one["facts"][name] for name in sorted(known)}} for one in present]
    if (refusal := describe_difference([Presence(**one) for one in shared])) is not None:
        raise ValueError(refusal)


def describe_missing(present: Sequence[Presence], world_size: int, timeout_s: float) -> str:
    """Return which ranks came, from where, and which did not."""
    came = {p.rank for p in present}
    missing = [rank for rank in range(world_size) if rank not in came]
    return (
        f"start_timeout_s: {len(came)} of {world_size} ranks came within {timeout_s:g} s: {_locate(present) or 'none'}"
        f"; missing: {name_ranks(missing)}: see what stopped them there, or set start_timeout_s higher if they start "
        "slowly"
    )


def describe_difference(present: Sequence[Presence]) -> str | None:
    """Return the first fact that is not the same on all ranks: both values, and who has which."""
    first, *others = present
    if all(other.facts == first.facts for other in others):
        return None
    for name in dict.fromkeys(name for presence in present for name in presence.facts):
        expected = _read_fact(first, name)
        if differing := [p for p in others if not _is_same(_read_fact(p, name), expected)]:
            value = _read_fact(differing[0], name)
            same = [p.rank for p in differing if _read_fact(p, name) == value]
            name, expected, value = _narrow(name, expected, value)
            return (
                f"{name}: rank {first.rank} on {first.host} has {expected}, {name_ranks(same)} on "
                f"{differing[0].host} has {value}: expected the same on all ranks"
            )
    return None


def _read_fact(presence: Presence, name: str) -> str:
    """Return a fact; of settings that are one value elsewhere, all."""
    parts = {key.removeprefix(f"{name}."): text for key, text in presence.facts.items() if key.startswith(f"{name}.")}
    return presence.facts.get(name) or ", ".join(f"{key} {text}" for key, text in parts.items()) or "not set"


def _narrow(name: str, text: str, other: str) -> tuple[str, str, str]:
    """Return the first part of a fact that differs, and both of its values: of all they would be too long to read."""
    with suppress(ValueError):  # no JSON
        value, others = json.loads(text), json.loads(other)
        if isinstance(value, list) and isinstance(others, list):
            value, others = dict(enumerate(value)), dict(enumerate(others))
        if isinstance(value, dict) and isinstance(others, dict):
            for key in dict.fromkeys([*value, *others]):
                both = [json.dumps(side[key]) if key in side else "not set" for side in (value, others)]
                if not _is_same(*both):
                    return _narrow(f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}", *both)
    return name, text, other


def _is_same(text: str, other: str) -> bool:
    """Whether two facts are equal, but for paths: one that a run writes to is there on some nodes only, or not yet."""
    try:
        return text == other or _match(json.loads(text), json.loads(other))
    except ValueError:  # no JSON
        return False


def _match(value: Any, other: Any) -> bool:
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_match(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_match, value, other))
    is_place = PLACE in (value, other) and isinstance(value, str) and isinstance(other, str)
    return is_place or (type(value) is type(other) and bool(value == other))


def describe_notes(present: Sequence[Presence]) -> list[str]:
    """Return a line for each note that is not the same on all ranks: every value, and who has it."""
    lines = []
    for name in dict.fromkeys(name for presence in present for name in presence.notes):
        found: dict[str, list[Presence]] = {}
        for presence in present:
            found.setdefault(presence.notes.get(name, "none"), []).append(presence)
        if len(found) > 1:
            have = "; ".join(f"{value} on {_locate(those)}" for value, those in found.items())
            lines.append(f"{name} differs between ranks: {have}")
    return lines


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether it is done in time. Not ``store.wait``: each that is in vain has torch write lines on stderr."""
    pause_s, longest_s = _POLL_S
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True


def _lead(
    offers: Store,
    own: Presence,
    world_size: int,
    timeout_s: float,
    find_lost: Callable[[], str | None],
    advice: str,
) -> tuple[str, list[Presence]]:
    advice = advice if offers.check(["name"]) else ""
    name, present = uuid4().hex, {own.rank: own}
    offers.set("name", name)
    store = PrefixStore(name, offers)

    def look() -> bool:
        for rank in range(world_size):
            if rank not in present and (found := _read_presence(store, f"{rank}/1")) is not None:
                present[rank] = found
        return len(present) == world_size

    lost: list[str] = []

    def look_again() -> bool:
        lost.extend(filter(None, [None if (is_complete := look()) else find_lost()]))
        return is_complete or bool(lost)

    is_over = wait_until(look_again, timeout_s)
    came = [present[rank] for rank in sorted(present)]
    twins = [twin for p in came if (twin := _read_presence(store, f"{p.rank}/2")) is not None]
    refusal = _describe_twin(twins[0], present[twins[0].rank]) if twins else None
    failure = None
    if refusal is None and lost:
        failure = lost[0]
    elif refusal is None and not is_over:
        failure = describe_missing(came, world_size, timeout_s) + advice
    elif refusal is None:
        refusal = describe_difference(came)
    words = [presence.word for presence in [*came, *twins]]
    store.set("verdict", json.dumps({"words": words, "refusal": refusal, "failure": failure}))
    if refusal or failure:
        # The store has to stay until the others know why the run ends.
        wait_until(lambda: store.add("readers", 0) >= len(words) - 1, _GRACE_S)
    _raise_verdict(refusal, failure)
    return name, came


def _follow(offers: Store, own: Presence, world_size: int, timeout_s: float, is_kept: bool, advice: str) -> str:
    text, name = json.dumps(asdict(own)), ""
    verdict: dict[str, Any] = {"words": []}
    deadline = time.monotonic() + timeout_s
    offers.set(f"came/{own.rank}", text)

    def look() -> bool:
        nonlocal name, verdict, deadline
        if offers.check(["name"]) and (now := offers.get("name").decode()) != name:
            # It may be an old one. Rank 0 counts from when it came itself.
            name, deadline = now, time.monotonic() + timeout_s + _GRACE_S
            number = offers.add(f"{name}/{own.rank}", 1)
            offers.set(f"{name}/{own.rank}/{number}", text)
            if number > 1 and not is_kept:
                raise ValueError(_describe_twin(own, _read_presence(offers, f"{name}/{own.rank}/1")))
        if name and offers.check([f"{name}/verdict"]):
            verdict = json.loads(offers.get(f"{name}/verdict"))
        return own.word in verdict["words"] or time.monotonic() > deadline

    wait_until(look, math.inf)
    if own.word not in verdict["words"]:
        present = [p for rank in range(world_size) if (p := _read_presence(offers, f"came/{rank}")) is not None]
        raise RuntimeError(describe_missing(present, world_size, timeout_s) + (advice if name else ""))
    if verdict["refusal"] or verdict["failure"]:
        offers.add(f"{name}/readers", 1)
    _raise_verdict(verdict["refusal"], verdict["failure"])
    return name


def _raise_verdict(refusal: str | None, failure: str | None) -> None:
    if refusal is not None:
        raise ValueError(refusal)
    if failure is not None:
        raise RuntimeError(failure)


def _describe_twin(own: Presence, other: Presence | None) -> str:
    where = "elsewhere" if other is None else f"on {other.host} (pid {other.pid})"
    return (
        f"rank {own.rank} came twice: {where} and on {own.host} (pid {own.pid}): give each process a rank of its own, "
        "with RANK or NODE_RANK"
    )


def _locate(present: Sequence[Presence]) -> str:
    """Return ``ranks 0-1 on a, rank 2 on b``."""
    hosts: dict[str, list[int]] = {}
    for presence in present:
        hosts.setdefault(presence.host, []).append(presence.rank)
    return ", ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items())


def _read_presence(store: Store, key: str) -> Presence | None:
    return Presence(**json.loads(store.get(key))) if store.check([key]) else None


def _listen(port: int) -> int:
    """Return a socket that listens on a port of all addresses; to be closed by the store."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=2048, dualstack_ipv6=is_dual).detach()
    except OSError as error:
        host = f"{socket.gethostname()}, the host of rank 0"
        if error.errno != errno.EADDRINUSE:
            why = f"{error.strerror or error} on {host}, at that port: choose one that is free"
        else:
            why = (
                f"something else on {host}, listens there already: if it is rank 0 of this run, started twice, give "
                "each process a rank of its own, with RANK or NODE_RANK; else choose a port that is free"
            )
        raise ValueError(f"MASTER_PORT: got {port}: {why}") from error


def _wait_for_name(address: str, port: int, timeout_s: float) -> None:
    """Look a name up, again and again: that of a pod or a machine of a cloud is known seconds after it starts."""
    problem: OSError | None = None
    began = time.monotonic()

    def is_over() -> bool:
        nonlocal problem
        problem = None
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except OSError as error:
            problem = error
        # A server of names that does not answer may do so later than it would learn of a name.
        return problem is None or (problem.errno != socket.EAI_AGAIN and time.monotonic() - began > _UNKNOWN_S)

    wait_until(is_over, timeout_s)
    if problem is not None:
        raise problem


def _wait_for_listener(address: str, port: int, host: str, timeout_s: float) -> None:
    def is_there() -> bool:
        try:
            with socket.create_connection((address, port), timeout=max(min(timeout_s, 5.0), 0.1)):
                return True
        except OSError:
            return False

    if not wait_until(is_there, timeout_s):
        raise RuntimeError(
            f"start_timeout_s: nobody listens at MASTER_ADDR {address}, MASTER_PORT {port}, within {timeout_s:g} s, as "
            f"{host} sees it: rank 0 did not start, or is on another host, or a firewall is in between"
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``ranks 0-3, 6``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, span)) for span in spans)}"
