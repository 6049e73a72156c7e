"""A host that other nodes cannot reach by its name is found before ranks wait for each other."""

import socket
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed import HashStore

from lit_fsdp.strategy import process_group
from lit_fsdp.strategy.process_group import check_gloo_address, init_process_group


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
    monkeypatch.setattr(process_group, "call_roll", lambda *_, **__: met.append(0))
    options: dict[str, Any] = {"environment": LightningEnvironment(), "device": torch.device("cpu"), "timeout_s": 60}
    options |= {"start_timeout_s": 60, "facts": {}}
    with pytest.raises(ValueError, match="set GLOO_SOCKET_IFNAME"):
        init_process_group(num_nodes=2, **options)
    assert met == []
    monkeypatch.setattr(process_group.atexit, "register", lambda _: None)
    init_process_group(num_nodes=1, **options)
    assert met == [0, 1]
