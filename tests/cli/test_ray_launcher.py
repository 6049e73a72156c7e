"""The command line on a Ray cluster of this machine."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launches import OURS, ROOT, fork_ranks, run_processes, write_run
from waiting import wait_until

pytest.importorskip("ray.train")
FIT = ("-m", "lit_fsdp", "fit", "--config", "run.yaml", "--launcher", "ray")
KILLER = """
import os, signal
from pathlib import Path
from lightning.pytorch import Callback

class KillOnce(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 5 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
MARKER = """
import os
from pathlib import Path
from lightning.pytorch import Callback

class Marker(Callback):
    def on_train_batch_end(self, trainer, *_):
        Path(f"pid_{trainer.global_rank}").write_text(str(os.getpid()))
"""


def read_losses(folder: Path, version: str = "version_*") -> dict[int, float]:
    """Return the loss of each step, of the run that did it last."""
    losses = {}
    for path in sorted(folder.glob(f"{version}/metrics.csv")):
        with path.open() as file:
            losses |= {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    return losses


@pytest.mark.full
def test_a_killed_worker_starts_again_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_train_steps": 2}}
    write_run(tmp_path, trainer={"max_steps": 8, "callbacks": [checkpoints]})
    undisturbed = fork_ranks("fit", "--config=run.yaml", "--run_name=undisturbed")
    assert [rank.code for rank in undisturbed] == [0, 0], undisturbed
    (tmp_path / "killer.py").write_text(KILLER)
    options = ["--num_workers=2", "--address=local", "--max_failures=1", "--trainer.callbacks+=killer.KillOnce"]
    ended = run_processes([*FIT, *options, "--run_name=killed"])[0]
    assert ended.code == 0, ended.err
    assert (tmp_path / "killed").exists()
    assert "4 (now at 8)" in ended.out + ended.err
    runs = tmp_path / "runs"
    expected, found = read_losses(runs / "undisturbed"), read_losses(runs / "killed")
    assert sorted(found) == sorted(expected) == list(range(8))
    assert [found[step] for step in found] == pytest.approx([expected[step] for step in found], rel=1e-6)
    assert min(read_losses(runs / "killed", "version_1")) == 4, "the step after the last checkpoint"
    # What Ray knows: metrics, and where the last checkpoint is.
    snapshot = next((runs / "killed" / "ray").glob("*/checkpoint_manager_snapshot.json"))
    last = json.loads(snapshot.read_text())["latest_checkpoint_result"]
    assert last["metrics"]["step"] == 8
    pointer = json.loads((snapshot.parent / last["checkpoint_dir_name"] / "checkpoint.json").read_text())
    assert "step=8" in pointer["path"]
    assert Path(pointer["path"]).is_dir()


@pytest.mark.full
def test_what_is_wrong_is_said_once_before_ray_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    missing, nobody, workers, plain = run_processes(
        [*FIT, "--address=local", "--num_workers=1", "--data.train=nothere.jsonl"],
        [*FIT, "--address=127.0.0.1:9"],
        [*FIT, "--num_workers=0"],
        ["-m", "lit_fsdp", "fit", "--config=run.yaml", "--num_workers=2"],
    )
    for ended, line in (
        (missing, "error: data.init_args.train: nothere.jsonl"),
        (nobody, "error: address: got '127.0.0.1:9': nobody answers there"),
        (workers, "error: num_workers: got 0: expected 1 or more"),
        (plain, "error: num_workers: got 2: not used without --launcher ray"),
    ):
        assert ended.code == 2, ended.err
        assert len(ended.errors) == 1
        assert ended.errors[0].startswith(line)
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_tasks_of_slurm_are_no_ranks_where_ray_starts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job of two tasks, where `srun ray start` has given both nodes to Ray."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    job = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "70123", "SLURM_JOB_NAME": "train"}
    command = [*FIT, "--address=local", "--num_workers=1", "--data.train=nothere.jsonl"]
    (batch,) = run_processes(command, **job, SLURM_PROCID="0")
    assert batch.errors[0].startswith("error: data.init_args.train: nothere.jsonl"), batch.err
    (task,) = run_processes(command, **job, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2")
    assert task.errors == [
        "error: launcher: got 'ray' in each of 2 tasks of SLURM: start it once, with python or srun --ntasks=1"
    ]


@pytest.mark.full
def test_a_missing_ray_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    hide = f"import sys; sys.modules['ray'] = None; from lit_fsdp.cli.main import main; sys.exit(main({list(FIT[2:])}))"
    ended = run_processes(["-c", hide])[0]
    assert ended.code == 2, ended.err
    assert "pip install 'lit_fsdp[ray]'" in ended.errors[0]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_all_workers(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, trainer={"max_steps": -1})
    (tmp_path / "marker.py").write_text(MARKER)
    command = [sys.executable, *FIT, "--address=local", "--num_workers=2", "--trainer.callbacks+=marker.Marker"]
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    environ = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(command, env=environ, stdout=err, stderr=err, start_new_session=True)
        try:
            wait_until(lambda: len(list(tmp_path.glob("pid_*"))) == 2, timeout_s=400)
            os.kill(process.pid, number)
            code = process.wait(timeout=120)
        finally:
            process.kill()
    # Without what processes of Ray say, one of which fails where another cluster is on this machine.
    said = "\n".join(line for line in (tmp_path / "err").read_text().splitlines() if " pid=" not in line)
    assert code == 128 + number, said
    assert "Traceback" not in said
    assert "error: interrupted" in said
    pids = [int(path.read_text()) for path in tmp_path.glob("pid_*")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=60)
