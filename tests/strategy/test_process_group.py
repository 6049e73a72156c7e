"""A host that other nodes cannot reach by its name is found before ranks wait for each other."""

import os
import socket
import subprocess
import sys
import time
from hashlib import pbkdf2_hmac
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import find_free_port
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch.distributed import HashStore

from lit_fsdp.strategy import process_group
from lit_fsdp.strategy.process_group import check_gloo_address, init_process_group, wait_for_threads


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the name of this host stand for these addresses."""
    found: list[Any] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])


@pytest.mark.parametrize(
    ("addresses", "listens"),
    [(["127.0.1.1"], "127.0.1.1"), ([], "127.0.0.1"), (["203.0.113.7", "127.0.1.1"], "127.0.1.1")],
    ids=["debian", "unknown name", "an address of another host first"],
)
def test_a_host_that_other_nodes_cannot_reach_is_refused_with_the_variable_to_set(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], listens: str
) -> None:
    resolve_to(monkeypatch, *addresses)
    message = rf"listen on {listens}, .* host name node7 .* set GLOO_SOCKET_IFNAME .* \(here: eth0, ib0\)"
    with pytest.raises(ValueError, match=message):
        check_gloo_address("node0", {})
    with pytest.raises(ValueError, match=message):
        check_gloo_address("10.1.2.3", {"GLOO_SOCKET_IFNAME": ""})
    check_gloo_address("node0", {"GLOO_SOCKET_IFNAME": "eth0"})
    for same_machine in ("localhost", "127.0.0.1", "::1"):
        check_gloo_address(same_machine, {})


def test_a_host_that_other_nodes_reach_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "0.0.0.0")
    check_gloo_address("node0", {})


def test_a_run_on_several_nodes_is_checked_before_its_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.1.1")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    met: list[int] = []
    monkeypatch.setattr(process_group, "_init_dist_connection", lambda *_, **__: met.append(1))
    monkeypatch.setattr(process_group, "open_store", lambda *_, **__: HashStore())

    def call_roll(*_: Any, **__: Any) -> HashStore:
        met.append(0)
        return HashStore()

    monkeypatch.setattr(process_group, "call_roll", call_roll)
    options: dict[str, Any] = {"environment": LightningEnvironment(), "device": torch.device("cpu"), "timeout_s": 60}
    options |= {"start_timeout_s": 60, "facts": {}}
    with pytest.raises(ValueError, match="set GLOO_SOCKET_IFNAME"):
        init_process_group(num_nodes=2, **options)
    assert met == []
    monkeypatch.setattr(process_group.atexit, "register", lambda _: None)
    init_process_group(num_nodes=1, **options)
    assert met == [0, 1]


def meet_again(place: Path, rank: int) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.name}
    os.environ.update({name: str(value) for name, value in own.items()}, TORCHELASTIC_RUN_ID="test")
    options: dict[str, Any] = {"num_nodes": 1, "timeout_s": 30, "start_timeout_s": 10, "facts": {}}
    kept = []  # as strategies and meshes do
    for _ in range(3):
        for timeout_s in (30, 20):  # of a run, and of the next one in the same group
            init_process_group(TorchElasticEnvironment(), torch.device("cpu"), **{**options, "timeout_s": timeout_s})
            dist.all_reduce(total := torch.ones(()))
            assert total == 2
            assert dist.group.WORLD is not None
            assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds() == timeout_s
        kept.append(dist.group.WORLD)
        dist.destroy_process_group()
    (place / str(rank)).touch()


def test_a_process_meets_the_others_again_after_its_process_group_was_destroyed(tmp_path: Path) -> None:
    (place := tmp_path / str(find_free_port())).mkdir()
    processes = [get_context("fork").Process(target=meet_again, args=(place, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(list(place.iterdir())) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="looks at threads as Linux shows them")
def test_a_process_ends_after_its_threads_and_not_never() -> None:
    began = time.monotonic()
    computing = Thread(target=pbkdf2_hmac, args=("sha256", b"", b"", 1_000_000))  # without the GIL, as gloo's do
    computing.start()
    wait_for_threads(60.0)
    assert not computing.is_alive()
    assert time.monotonic() - began < 30.0
    sleeping, over = Event(), Event()
    waits = Thread(target=lambda: (sleeping.set(), over.wait(60.0)))
    waits.start()
    sleeping.wait()
    endless = Thread(target=pbkdf2_hmac, args=("sha256", b"", b"", 1_000_000))
    endless.start()
    began = time.monotonic()
    wait_for_threads(0.05)
    assert time.monotonic() - began < 0.5
    over.set()
    endless.join()
    waits.join()


LEAVES = """
import sys, time, threading
from hashlib import pbkdf2_hmac
from pathlib import Path
from lightning.fabric.plugins.environments import LightningEnvironment
import torch
from lit_fsdp.strategy.process_group import init_process_group

def compute():
    pbkdf2_hmac("sha256", b"", b"", 400_000)  # without the GIL, which it needs afterwards
    Path(sys.argv[1]).write_text("done")

init_process_group(
    LightningEnvironment(), torch.device("cpu"), num_nodes=1, timeout_s=60.0, start_timeout_s=60.0, facts={}
)
threading.Thread(target=compute, daemon=True).start()
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks at threads as Linux shows them")
def test_python_does_not_end_under_a_thread_that_computes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path / "done")], check=True, timeout=120)
    assert (tmp_path / "done").exists()  # daemons are not waited for by Python itself
