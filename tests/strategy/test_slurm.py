"""SLURM starts the ranks: how many comes from it, its signal makes all save, and the requeued job is the same run."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
import torch
from launches import ROOT, find_free_port, fork_ranks, run_processes, write_run
from safetensors.torch import load_file
from slurm_cluster import Cluster

from lit_fsdp.strategy.processes import choose_processes
from lit_fsdp.strategy.slurm import choose_port, describe_idle, find_tasks, mend_variables

# Of a task of `srun -N1 -w n2 -n2` below `sbatch -N2 --ntasks-per-node=4`, as SLURM 22.05 sets them.
STEP = {"SLURM_JOB_ID": "70123", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
STEP |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}
STEP |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n2"}
TWO_NODES = STEP | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}

NUM_STEPS = 400
# Slow until the signal comes, as the time limit is minutes; what is left after the requeue goes at full speed.
TASK = """
import os, time
from lit_fsdp.tasks import CausalLM

class Slow(CausalLM):
    def training_step(self, batch, batch_idx):
        if "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(0.3)
        return super().training_step(batch, batch_idx)
"""
OPTIONS = ("--model.class_path=slow.Slow", f"--trainer.max_steps={NUM_STEPS}", "--trainer.max_epochs=-1")


def test_the_number_of_ranks_and_where_they_meet_come_from_the_step() -> None:
    tasks = find_tasks(STEP)
    assert tasks is not None
    assert (tasks.rank, tasks.total, tasks.first_node, choose_port(STEP)) == (1, 2, "n2", 15123)
    arguments = {"cpu_processes": None, "has_accelerator": False, "environ": STEP}
    assert choose_processes("auto", 1, tasks=tasks, **arguments) == (2, 1)  # type: ignore[arg-type]
    assert choose_processes("auto", 1, tasks=find_tasks(TWO_NODES), **arguments) == (2, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got 4: SLURM started 2 processes .* or use --ntasks-per-node=4"):
        choose_processes(4, 1, tasks=tasks, **arguments)  # type: ignore[arg-type]
    mended = dict(STEP)
    mend_variables(mended, tasks)
    assert (mended["SLURM_NTASKS_PER_NODE"], mended["MASTER_ADDR"]) == ("2", "n2")
    names = ("n[7-8,10]", "n[07-08],m1", "n7,m1", "gpu-n[3,5]-ib", "n7")
    found = [find_tasks(STEP | {"SLURM_STEP_NODELIST": name}) for name in names]
    assert [one and one.first_node for one in found] == ["n7", "n07", "n7", "gpu-n3-ib", "n7"]


def test_a_shell_that_slurm_has_opened_is_no_task_and_a_task_below_salloc_is() -> None:
    shell = STEP | {"SLURM_JOB_NAME": "interactive"}
    assert find_tasks(shell, "bash") is None
    assert find_tasks(shell | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, "bash") is None
    assert find_tasks({}) is None
    script = find_tasks(shell | {"SLURM_STEP_NUM_TASKS": "2"}, "bash")  # srun bash train.sh, below salloc
    assert script is not None
    assert (script.rank, script.total) == (1, 2)
    task = find_tasks(shell, "slurmstepd")
    assert task is not None
    mend_variables(shell, task)
    assert shell["SLURM_JOB_NAME"] == "lit_fsdp"  # else Lightning would take each task for a run of its own


@pytest.mark.full
def test_gpus_that_no_task_takes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = find_tasks(STEP)
    assert tasks is not None
    assert [describe_idle(tasks, num_gpus) for num_gpus in (0, 1, 2)] == [None] * 3
    assert "which has 4 GPUs" in str(describe_idle(tasks, 4))
    # As a run says it: sbatch --ntasks=1 --gpus-per-node=4, without srun.
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, trainer={"accelerator": "auto"})
    pretend = "import torch; torch.accelerator.device_count = lambda: 4; import sys; from lit_fsdp.cli.main import main"
    job = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}
    for devices, count in (("auto", 1), ("1", 0)):
        options = ["fit", "--config=run.yaml", f"--trainer.devices={devices}", "--data.batch_size=0"]
        (ended,) = run_processes(["-c", f"{pretend}; sys.exit(main({options}))"], **job)
        assert ended.err.count("SLURM started 1 of the processes on this node, which has 4 GPUs") == count, ended.err
        assert "data.init_args.batch_size" in ended.errors[0]


def test_tasks_that_srun_did_not_start_and_unequal_nodes_are_refused() -> None:
    batch = {name: value for name, value in TWO_NODES.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    with pytest.raises(ValueError, match=r"SLURM_NTASKS: got 4, .* start it with srun"):
        find_tasks(batch)
    assert find_tasks(batch | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}) is not None
    with pytest.raises(ValueError, match=r"4 tasks on 2 nodes, 3,1 of them: .* use --ntasks-per-node=2"):
        find_tasks(TWO_NODES | {"SLURM_STEP_TASKS_PER_NODE": "3,1"})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (obstacle := slurm_cluster.find_obstacle()) is not None:
        pytest.skip(obstacle)
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster: Cluster, folder: Path, *options: str, given: tuple[str, ...] = ()) -> tuple[str, Path]:
    """Submit the example with two tasks on two nodes, as it stands but for what this machine lacks."""
    output = folder / f"{len(list(folder.glob('*.out')))}.out"
    small = ("--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={output}")
    # The nodes have no names that stand for this machine.
    environ = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "examples" / "slurm.sbatch")
    return cluster.submit(*small, *options, script, "run.yaml", *given, cwd=folder, **environ), output


def read_losses(folder: Path, name: str) -> dict[int, float]:
    """The losses of all runs of this name, by step; one that was logged twice with different values fails."""
    losses: dict[int, float] = {}
    for log in sorted((folder / "runs" / name).glob("version_*/metrics.csv")):
        with log.open() as file:
            for row in csv.DictReader(file):
                if row.get("train/loss"):
                    assert losses.setdefault(int(row["step"]), float(row["train/loss"])) == float(row["train/loss"])
    return losses


def export(folder: Path, name: str) -> dict[str, torch.Tensor]:
    out = folder / f"{name}_model"
    (done,) = run_processes(["-m", "lit_fsdp", "export", f"--checkpoint=runs/{name}", f"--out={out}"])
    assert done.code == 0, done.err
    return load_file(out / "model.safetensors")


@pytest.mark.slow
def test_before_the_time_limit_all_ranks_save_and_the_requeued_job_ends_like_one_that_was_never_stopped(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    (tmp_path / "slow.py").write_text(TASK)
    # SLURM looks every 30 s: the signal comes 60 to 90 s after the start.
    job, output = submit(cluster, tmp_path, "--time=2", "--signal=USR1@30", given=OPTIONS)
    state = cluster.wait_for(job, lambda now: now["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"))
    printed = output.read_text()
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("COMPLETED", "1", "0:0"), printed
    assert f"requeued job {job}" in printed
    (saved,) = Path("runs/run").glob("version_*/checkpoints/preempted-step=*.ckpt")
    step = int(saved.name.removesuffix(".ckpt").rpartition("=")[2])
    assert 0 < step < NUM_STEPS
    assert printed.count("Run summary") == 1
    assert f"{NUM_STEPS - step} (now at {NUM_STEPS})" in printed
    assert "2 on cpu" in printed

    for ended in fork_ranks("fit", "--config=run.yaml", "--run_name=truth", *OPTIONS):
        assert ended.code == 0, ended.err
    truth = read_losses(tmp_path, "truth")
    assert sorted(truth) == list(range(NUM_STEPS))
    assert read_losses(tmp_path, "run") == truth
    ours, expected = export(tmp_path, "run"), export(tmp_path, "truth")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once_and_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    write_run(tmp_path)
    refusals = {
        "--trainer.devices=3": "error: trainer.devices: got 3: SLURM started 1 processes on this node: expected 1",
        "--data.batch_size=0": "error: data.init_args.batch_size: got 0: expected 1 or more",
        "--data.train=lacking.jsonl": "error: data.init_args.train: ",
    }
    for given, expected in refusals.items():
        job, output = submit(cluster, tmp_path, given=(given,))
        state = cluster.wait_for(job, lambda now: now["JobState"] in ("FAILED", "COMPLETED", "CANCELLED"))
        printed = output.read_text()
        assert (state["JobState"], state["Restarts"]) == ("FAILED", "0"), printed
        errors = [line for line in printed.splitlines() if line.startswith(("error: ", "[rank "))]
        assert len(errors) == 1, printed
        assert errors[0].startswith(expected), printed


@pytest.mark.slow
def test_srun_starts_one_run_below_salloc_and_with_torchrun_and_what_it_did_not_start_is_refused(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "PYTHONPATH": str(ROOT)}
    fit = "python -m lit_fsdp fit --config=run.yaml"
    command = ("salloc", "--nodes=2", "--ntasks-per-node=1", "--job-name=interactive", "sh", "-c", f"srun {fit} 2>&1")
    printed = cluster.call(*command, cwd=tmp_path, **environ)
    assert printed.count("Run summary") == 1, printed
    assert "2 on cpu" in printed
    # srun may start torchrun on each node: ranks are then those of torchrun.
    torchrun = "torchrun --nnodes=2 --nproc-per-node=1 --node-rank=$SLURM_NODEID --master-addr=127.0.0.1"
    torchrun += f" --master-port={find_free_port()} -m lit_fsdp fit --config=run.yaml"
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", f"{torchrun} 2>&1")
    printed = cluster.call(*command, cwd=tmp_path, **environ)
    assert printed.count("Run summary") == 1, printed
    assert "2 on cpu" in printed
    bench = "python -m lit_fsdp bench comm --sizes=1KiB,2KiB --repeats=2 2>&1"
    printed = cluster.call("srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", bench, cwd=tmp_path, **environ)
    assert printed.count("2 ranks on 2 node(s)") == 1, printed
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{fit}\n")
    options = ("--nodes=2", "--ntasks-per-node=1", "--output=bare.out", "job.sh")
    job = cluster.submit(*options, cwd=tmp_path, **environ)
    cluster.wait_for(job, lambda now: now["JobState"] in ("FAILED", "COMPLETED"))
    assert "error: SLURM_NTASKS: got 2, but SLURM has not started this process" in Path("bare.out").read_text()
