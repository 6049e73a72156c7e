"""Two machines with a network of their own, as Linux network namespaces: ranks reach each other by address only."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launches import OURS, ROOT, fork_ranks, write_run

from benchmarks.network_namespaces import INTERFACE, Node, find_obstacle, namespaces

# A machine that is reached by address is no host of its own name: is_host says which one has the store.
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=one")
FIT = ("-m", "lit_fsdp", "fit", "--config=run.yaml")


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)
    with namespaces(2) as nodes:
        yield nodes


def start(nodes: list[Node], commands: Sequence[Sequence[str]], **environ: str) -> list[tuple[int, str]]:
    """Run ``python <command>`` on each node at once; return its exit code and what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    environ = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen(node.wrap([sys.executable, *command]), env=environ, **pipes)  # type: ignore[call-overload]
        for node, command in zip(nodes, commands, strict=True)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, out) for process, out in zip(started, printed, strict=True)]


def read_metrics(name: str) -> str:
    (log,) = Path("runs", name).glob("version_*/metrics.csv")
    header, *rows = log.read_text().splitlines()
    number = header.split(",").index("train/loss")
    return "\n".join(row.split(",")[number] for row in rows)


@pytest.mark.slow
def test_torchrun_across_two_networks_gives_the_losses_of_one_machine(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    for ended in fork_ranks("fit", "--config=run.yaml", "--run_name=truth"):
        assert ended.code == 0, ended.err
    truth = read_metrics("truth")
    c10d, static = [], []
    for number, node in enumerate(nodes):
        own = (f"--rdzv-endpoint={nodes[0].address}:29400", f"--rdzv-conf=is_host={1 - number}")
        c10d.append([*TORCHRUN, *own, f"--local-addr={node.address}", *FIT, "--run_name=c10d"])
        own = (f"--master-addr={nodes[0].address}", "--master-port=29500", f"--node-rank={number}")
        static.append([*TORCHRUN[:4], *own, *FIT, "--run_name=static"])
    for commands, name in ((c10d, "c10d"), (static, "static")):
        ended = start(nodes, commands, GLOO_SOCKET_IFNAME=INTERFACE)
        assert [code for code, _ in ended] == [0, 0], ended
        assert read_metrics(name) == truth
    # The names of these hosts stand for no address, so gloo would listen where nobody else is.
    ended = start(nodes, static)
    advice = f"set GLOO_SOCKET_IFNAME to the network interface that nodes reach each other by (here: {INTERFACE})"
    for code, printed in ended:
        assert code != 0
        assert advice in printed
