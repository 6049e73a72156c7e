"""Ranks that cannot start together end soon, each with a line that names who came, who did not, and what differs."""

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from launches import find_free_port
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # as in roll_call.py

from lit_fsdp.strategy import roll_call
from lit_fsdp.strategy.roll_call import (
    Presence,
    call_roll,
    describe_difference,
    describe_missing,
    open_store,
    share_refusal,
    sign_in,
    wait_until,
)


def start_ranks(folder: Path, *ranks: int, world_size: int, port: int, **options: Any) -> list[str]:
    """Let these ranks come, each in a process, and return what each was told or has to say: nothing if all is well."""
    facts: Callable[[int], dict[str, str]] = options.pop("facts", lambda _: {})
    find_lost: Callable[[], str | None] = options.pop("find_lost", lambda: None)
    timeout_s: float = options.pop("timeout_s", 30.0)
    notes: Callable[[int], dict[str, str]] = options.pop("notes", lambda _: {})

    def body(place: int, rank: int) -> None:
        try:
            store = open_store("127.0.0.1", port, rank=rank, timeout_s=timeout_s)
            own, said = sign_in(rank, facts(rank), notes(rank)), list[str]()
            limits = {"world_size": world_size, "timeout_s": timeout_s}
            call_roll(store, own, find_lost=find_lost, say=said.append, **limits)  # type: ignore[arg-type]
            found = "".join(said)
            # The store goes with rank 0, and the others may still read.
            time.sleep(0.3 if rank == 0 else 0)
        except (ValueError, RuntimeError) as error:
            found = str(error)
        (folder / f"{place}.json").write_text(json.dumps(found))

    context = get_context("fork")
    processes = [context.Process(target=body, args=(place, rank)) for place, rank in enumerate(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [json.loads((folder / f"{place}.json").read_text()) for place in range(len(ranks))]


def test_ranks_that_start_with_the_same_go_on(tmp_path: Path) -> None:
    assert start_ranks(tmp_path, 0, 1, 2, world_size=3, port=find_free_port()) == ["", "", ""]


def test_a_missing_rank_is_named_by_all_that_came(tmp_path: Path) -> None:
    found = start_ranks(tmp_path, 0, 2, world_size=4, port=find_free_port(), timeout_s=0.5)
    host = socket.gethostname()
    assert found[0].startswith(
        f"start_timeout_s: 2 of 4 ranks came within 0.5 s: ranks 0, 2 on {host}; missing: ranks 1, 3"
    )
    assert found[1] == found[0]


def test_what_differs_is_named_with_both_values_and_hosts(tmp_path: Path) -> None:
    facts = lambda rank: {"torch": "2.13", "ckpt_path": "a.ckpt" if rank == 0 else "none"}  # noqa: E731
    found = start_ranks(tmp_path, 0, 1, 2, world_size=3, port=find_free_port(), facts=facts)
    host = socket.gethostname()
    assert set(found) == {
        f"ckpt_path: rank 0 on {host} has a.ckpt, ranks 1-2 on {host} has none: expected the same on all ranks"
    }


def test_of_long_settings_what_differs_is_named_alone() -> None:
    layers = {"class_path": "Layers", "init_args": {"many": list(range(200)), "size": 32, "folder": "a path"}}
    facts = {"callbacks": [layers], "model.optimizer": None}
    changed = layers | {"init_args": layers["init_args"] | {"size": 64, "folder": "data"}}  # type: ignore[operator]
    for other, line in {
        ("callbacks", json.dumps([changed])): "callbacks[0].init_args.size: rank 0 on {} has 32, rank 1 on {} has 64:",
        ("callbacks", json.dumps([layers, 1])): "callbacks[1]: rank 0 on {} has not set, rank 1 on {} has 1:",
        ("model.optimizer.lr", "0.1"): "model.optimizer: rank 0 on {} has null, rank 1 on {} has lr 0.1:",
    }.items():
        first = {name: json.dumps(value) for name, value in facts.items()}
        second = {name: text for name, text in first.items() if not other[0].startswith(f"{name}.")} | dict([other])
        said = describe_difference([sign_in(0, first), sign_in(1, second)])
        assert said == line.format(*[socket.gethostname()] * 2) + " expected the same on all ranks"


def test_what_may_differ_is_told_by_rank_0_and_ends_nothing(tmp_path: Path) -> None:
    notes = lambda rank: {"GPU": "large" if rank == 1 else "small"}  # noqa: E731
    found = start_ranks(tmp_path, 0, 1, 2, world_size=3, port=find_free_port(), notes=notes)
    host = socket.gethostname()
    assert found == [f"GPU differs between ranks: small on ranks 0, 2 on {host}; large on rank 1 on {host}", "", ""]


@pytest.mark.full
def test_two_processes_that_take_themselves_for_one_rank_are_told(tmp_path: Path) -> None:
    found = start_ranks(tmp_path, 0, 1, 1, world_size=3, port=find_free_port(), timeout_s=1.0)
    assert any(line.startswith("rank 1 came twice: ") for line in found)


def test_rank_0_ends_at_once_when_a_rank_it_started_is_gone(tmp_path: Path) -> None:
    began = time.monotonic()
    find_lost = lambda: "rank 2 was killed"  # noqa: E731
    assert start_ranks(tmp_path, 0, world_size=3, port=find_free_port(), find_lost=find_lost) == ["rank 2 was killed"]
    assert time.monotonic() - began < 20


def test_a_name_that_becomes_known_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    find, asked = socket.getaddrinfo, list[str]()

    def look_up(address: str, *args: Any, **options: Any) -> Any:
        if address != "pod-0":
            return find(address, *args, **options)
        asked.append(address)
        if len(asked) > 2:
            return find("127.0.0.1", *args, **options)
        raise socket.gaierror((socket.EAI_NONAME, socket.EAI_AGAIN)[len(asked) - 1], "not yet")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(RuntimeError, match=r"nobody listens at MASTER_ADDR pod-0"):
        open_store("pod-0", find_free_port(), rank=1, timeout_s=0.3)
    assert len(asked) > 2


def test_places_where_nobody_can_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_UNKNOWN_S", 0.2)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"MASTER_ADDR: got 'no.such.host.invalid': .* knows no host of this name"):
        open_store("no.such.host.invalid", 29500, rank=1, timeout_s=30)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        line = (
            rf"MASTER_PORT: got {port}: something else on .*: if it is rank 0 of this run, .* with RANK or NODE_RANK;"
        )
        with pytest.raises(ValueError, match=line):
            open_store("127.0.0.1", port, rank=0, timeout_s=30)
    assert time.monotonic() - began < 15
    with pytest.raises(RuntimeError, match=rf"nobody listens at MASTER_ADDR 127.0.0.1, MASTER_PORT {port}, within 0.3"):
        open_store("127.0.0.1", port, rank=1, timeout_s=0.3)


@pytest.mark.full
def test_a_port_where_something_else_never_answers_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        pid = os.fork()
        if not pid:  # torch's thread waits for ever
            try:
                open_store("127.0.0.1", port, rank=1, timeout_s=1)
            except ValueError as error:
                (tmp_path / "line").write_text(str(error))
            os._exit(0)
        os.waitpid(pid, 0)
    assert (
        (tmp_path / "line").read_text().startswith(f"MASTER_PORT: got {port}: what listens there on 127.0.0.1 is not")
    )


TORCHRUN = {"WORLD_SIZE": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
OWN_STORE = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # where nodes come and go
SLURM = {"SLURM_NTASKS": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "3"}


def share(folder: Path, port: int, *ranks: int, launcher: dict[str, str] = TORCHRUN) -> list[bool]:
    """Let ranks of torchrun or SLURM, one of them late, end in the same line; return who then found it said."""
    said = folder / "said"

    def body(rank: int) -> None:
        own = {"SLURM_PROCID" if launcher is SLURM else "RANK": str(rank)}
        os.environ.update({**launcher, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        time.sleep(1 if rank == 2 else 0)
        is_said = share_refusal("the same", 5 if len(ranks) > 1 else 0.3, lambda _: said.touch())
        (folder / f"{rank}.json").write_text(json.dumps(is_said and said.exists()))

    processes = [get_context("fork").Process(target=body, args=(rank,)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]


def test_the_first_rank_says_the_line_of_all_before_torchrun_can_end_it_for_one_that_ended(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", port := find_free_port(), is_master=True, wait_for_workers=False)
    assert share(tmp_path, port, 0, 1, 2) == [True, True, True]
    # The next start, which the store of the agents outlives: here only one has something to say.
    assert share(tmp_path, port, 1) == [False]
    assert store.num_keys() <= 2


@pytest.mark.full
@pytest.mark.parametrize("launcher", [SLURM, OWN_STORE])
def test_the_first_rank_says_the_line_of_all_where_no_agent_has_a_store(
    tmp_path: Path, launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert share(tmp_path, find_free_port(), 0, 1, 2, launcher=launcher) == [True, True, True]
    (tmp_path / "said").unlink()
    monkeypatch.setattr(roll_call, "_LATE_S", 0.3)
    assert share(tmp_path, find_free_port(), 1, launcher=launcher) == [True]  # there is no first one: it says it itself


def test_a_rank_that_ends_alone_before_it_signs_in_ends_the_roll_call_unless_it_starts_again(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", port := find_free_port(), is_master=True, wait_for_workers=False)
    agent = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "1", "GROUP_WORLD_SIZE": "3"}
    for count, line in {"0": "1 of 3 ranks came within", "1": "^rank 1 on .* ended: the same$"}.items():
        assert share(tmp_path, port, 1, launcher=agent | {"TORCHELASTIC_RESTART_COUNT": count}) == [False]
        with pytest.raises(RuntimeError, match=line):
            call_roll(store, sign_in(0, {}), world_size=3, timeout_s=0.3 if count == "0" else 30)


def test_a_rank_that_slurm_starts_before_the_first_one_ends_its_roll_call(tmp_path: Path) -> None:
    port = find_free_port()
    with ThreadPoolExecutor() as pool:
        early = pool.submit(share, tmp_path, port, 1, launcher=SLURM)
        assert wait_until((tmp_path / "said").exists, 30)  # it has waited for the first rank, in vain
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        with pytest.raises(RuntimeError, match=r"^rank 1 on .* ended: the same$"):
            call_roll(store, sign_in(0, {}), world_size=3, timeout_s=30)
        assert early.result() == [True]


def meet(store: Store, rank: int, count: int, timeout_s: float) -> str:
    """Return whether a rank of torchrun finds the others, or the line it ends with."""
    try:
        options: dict[str, Any] = {"world_size": count, "timeout_s": timeout_s, "is_kept": True, "advice": "; nodes"}
        part = call_roll(store, sign_in(rank, {}), **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    part.set(str(rank), "here")
    return "ok" if wait_until(lambda: part.check([str(r) for r in range(count)]), 10) else "alone"


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is the first one of its process, as after a restart."""
    monkeypatch.setattr(roll_call, "_calls", repeat(0))


@pytest.mark.usefixtures("fresh_processes")
def test_ranks_that_start_again_do_not_take_what_those_before_them_left() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            late = [pool.submit(meet, store, rank, 3, 60) for rank in (2, 1)]
            time.sleep(0.1)  # so they find what the start before has left
            late.append(pool.submit(meet, store, 0, 3, 60))
            assert [rank.result() for rank in late] == ["ok"] * 3


@pytest.mark.usefixtures("fresh_processes")
def test_ranks_of_torchrun_name_who_is_missing_and_who_came_twice() -> None:
    store, host = HashStore(), socket.gethostname()
    with ThreadPoolExecutor() as pool:
        lines = list(pool.map(lambda rank: meet(store, rank, 3, 0.5), (0, 2)))
        assert lines[0] == lines[1]
        assert f"ranks 0, 2 on {host}; missing: rank 1" in lines[0]
        assert "; nodes" not in lines[0]  # nobody was there before
        again = list(pool.map(lambda rank: meet(store, rank, 3, 0.5), (0, 2)))
        assert again == [f"{lines[0]}; nodes"] * 2
        twins = list(pool.map(lambda rank: meet(store, rank, 4, 0.5), (1, 1, 0)))
        assert twins[0].startswith("rank 1 came twice: on ")
        assert twins == twins[:1] * 3
        began = time.monotonic()
        assert "missing: rank 0: " in meet(HashStore(), 1, 2, 0.5)
        assert time.monotonic() - began < 2


def test_long_lists_of_ranks_are_told_by_host() -> None:
    present = [Presence(rank=r, host=f"node{r // 4}", pid=r, facts={}) for r in range(12) if r not in (5, 6)]
    line = describe_missing(present, 16, 60.0)
    assert "ranks 0-3 on node0, ranks 4, 7 on node1, ranks 8-11 on node2; missing: ranks 5-6, 12-15:" in line
    assert describe_difference(present) is None
