"""However the processes of a run are started, it is the same run."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
from launches import OURS, Ended, find_free_port, fork_ranks, run_processes, torchrun, write_run
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import KubeflowEnvironment, SLURMEnvironment

from lit_fsdp import FSDP2Strategy, Mesh
from lit_fsdp.strategy.launcher import check_nodes_by_hand

RUN = ("-m", "lit_fsdp", "fit", "--config=run.yaml")
NODES = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all launches run, and where ``one`` has run on one device and ``two`` on forked ranks."""
    folder = tmp_path_factory.mktemp("launches")
    write_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        check(*fork_ranks("fit", "--config=run.yaml", "--run_name=one", "--data.batch_size=8", ranks=1))
        check(*fork_ranks("fit", "--config=run.yaml", "--run_name=two"), ranks=2)
    return folder


def read_losses(folder: Path, name: str) -> list[float]:
    """The losses that the only run of this name has logged."""
    (version,) = (folder / "runs" / name).iterdir()
    assert (version / "config.yaml").is_file()
    with (version / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


def check(*ended: Ended, ranks: int = 1) -> None:
    for process in ended:
        assert process.code == 0, process.err
    out = "".join(process.out for process in ended)
    assert out.count("Run summary") == 1
    assert f"{ranks} on cpu" in out
    assert ("(rank 1)" in out) == (ranks == 2)  # peak memory of both was gathered


# A launch on two nodes is two of torchrun; test_broken_runs.py and others launch it on one, when slow tests run.
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["lightning", pytest.param("torchrun", marks=pytest.mark.slow), "nodes"])
def test_all_launchers_give_the_losses_of_one_device_at_every_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.chdir(folder)
    if launcher == "lightning":
        check(*run_processes([*RUN, "--run_name=lightning", "--cpu_processes=2"]), ranks=2)
    elif launcher == "torchrun":
        check(torchrun("fit", "--config=run.yaml", "--run_name=torchrun"), ranks=2)
    else:
        port = find_free_port()
        nodes = [[*NODES, f"--master-port={port}", f"--node-rank={k}", *RUN, "--run_name=nodes"] for k in range(2)]
        check(*run_processes(*nodes), ranks=2)
    truth = read_losses(folder, "one")
    assert len(truth) == 4
    assert read_losses(folder, launcher) == pytest.approx(truth, rel=1e-6)
    assert read_losses(folder, launcher) == read_losses(folder, "two")


def test_under_slurm_the_trainer_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    slurm = {
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "n[7-8]",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    strategy = FSDP2Strategy()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, logger=False, enable_checkpointing=False
    )
    assert isinstance(strategy.cluster_environment, SLURMEnvironment)
    assert strategy.launcher is None
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (4, 3, 1, 1)
    for given, expected in {
        "devices=1": r"devices: got 1: SLURM started 2 processes on this node: .* --ntasks-per-node=1",
        "devices=4": r"devices: got 4: SLURM started 2 processes on this node: give the Trainer devices=2, or use",
        "num_nodes=3": r"num_nodes: got 3: SLURM started 2 nodes: give the Trainer num_nodes=2, or use --nodes=3",
    }.items():
        name, _, value = given.partition("=")
        with pytest.raises(ValueError, match=expected):
            pl.Trainer(**{"accelerator": "cpu", "devices": 2, "strategy": FSDP2Strategy()} | {name: int(value)})


def test_ranks_of_a_node_are_those_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that the Trainer of a script counts: all GPUs, or one process on a CPU."""
    variables = {"RANK": "3", "GROUP_RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "one"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(CPUAccelerator, "auto_device_count", staticmethod(lambda: 8))
    strategy = FSDP2Strategy(mesh=Mesh(replicate=-1, shard="node"))
    pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False)
    assert (strategy.num_processes, strategy.mesh_sizes.replicate, strategy.mesh_sizes.shard) == (2, 2, 2)
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.warns(UserWarning, match="2 of 8 on this node are used, one by each process that was started"):
        pl.Trainer(accelerator="cpu", strategy=FSDP2Strategy(), logger=False)
    monkeypatch.setattr(CPUAccelerator, "auto_device_count", staticmethod(lambda: 1))
    with pytest.raises(ValueError, match=r"devices: got 8: torchrun started 2 processes on this node: .* devices=2,"):
        pl.Trainer(accelerator="cpu", devices=8, strategy=FSDP2Strategy(), logger=False)
    with pytest.raises(ValueError, match=r"devices: got 1: torchrun started 2 processes on this node: .* devices=2,"):
        pl.Trainer(accelerator="cpu", strategy=FSDP2Strategy(), logger=False, enable_checkpointing=False)


def test_without_a_launcher_the_trainer_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    strategy = FSDP2Strategy()
    pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    assert strategy.launcher is not None


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_a_process_that_a_launcher_nobody_reads_has_started_does_not_train_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"_?SIZE: got 2 .* GROUP_RANK, .*: each process would train alone: start"):
        pl.Trainer(accelerator="cpu", strategy=FSDP2Strategy(), logger=False)


@pytest.mark.parametrize(
    ("variables", "num_nodes"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1),  # left over, and this process starts both
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "NODE_RANK": "1"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "NODE_RANK": "1", "LOCAL_RANK": "1"}, 2),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 1),
    ],
)
def test_a_process_that_starts_the_ranks_of_its_node_is_taken_whoever_has_started_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_nodes: int
) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "MASTER_ADDR": "n7", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    options = {"strategy": FSDP2Strategy(), "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, num_nodes=num_nodes, **options)
    assert trainer.world_size == 2 * num_nodes


def test_as_many_ranks_as_a_launcher_that_only_lightning_reads_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n7", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    options = {"accelerator": "cpu", "plugins": KubeflowEnvironment(), "logger": False, "enable_checkpointing": False}
    assert pl.Trainer(**options, num_nodes=2, devices=1, strategy=FSDP2Strategy()).world_size == 2
    with pytest.raises(ValueError, match=r"devices: got 1, with num_nodes 1: 2 processes were started: give the"):
        pl.Trainer(**options, strategy=FSDP2Strategy())


def test_nodes_that_nothing_has_told_where_they_are_are_refused_before_they_wait_for_each_other() -> None:
    place = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    message = r"num_nodes: got 2: not set in the environment: MASTER_PORT, NODE_RANK: on every node set MASTER_ADDR and"
    with pytest.raises(ValueError, match=message):
        check_nodes_by_hand(2, {"MASTER_ADDR": "node0"})
    with pytest.raises(ValueError, match="NODE_RANK: got 2 in the environment: expected 0 to 1"):
        check_nodes_by_hand(2, {**place, "NODE_RANK": "2"})
    check_nodes_by_hand(2, {**place, "NODE_RANK": "1"})
    check_nodes_by_hand(1, {})
