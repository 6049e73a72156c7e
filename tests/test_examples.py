"""What users copy from ``examples/`` runs as it stands."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launches import OURS, find_free_port, write_run

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

# Stands for SLURM's: starts the tasks of one node with the variables that Lightning reads.
SRUN = """#!/usr/bin/env bash
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" &
    pids[rank]=$!
done
for pid in "${pids[@]}"; do wait "$pid" || code=1; done
exit "${code:-0}"
"""


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    """Run a command as a user does in a shell, with the Python of the tests first on PATH; return what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env = {**clean, "OMP_NUM_THREADS": "1", **paths, **environ}
    ended = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.full
def test_a_task_and_data_of_ones_own_train_from_their_folder(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "own_task", tmp_path / "own_task")
    lines = (folder / "mytask.py").read_text().splitlines()
    assert len(lines) <= 60, "short enough to be read before it is copied"
    command = ["-m", "lit_fsdp", "fit", "--config=run.yaml", "--trainer.max_steps=30", "--monitoring=false"]
    out = run(sys.executable, *command, cwd=folder)
    assert "30 (now at 30)" in out
    assert "2 on cpu" in out


@pytest.mark.full
def test_the_notebook_trains_on_one_device(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    short = "\n".join(code).replace("max_steps=60", "max_steps=4")
    (tmp_path / "notebook.py").write_text(short)
    out = run(sys.executable, "notebook.py", cwd=tmp_path, HF_HOME=str(tmp_path))
    assert "val/loss" in out


@pytest.mark.full
def test_torchrun_starts_a_run_and_continues_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    script, port = EXAMPLES / "torchrun.sh", str(find_free_port())
    start = {"cwd": tmp_path, "NPROC_PER_NODE": "2", "MASTER_PORT": port}
    first = run("bash", script, "run.yaml", **start)  # type: ignore[arg-type]
    assert "4 (now at 4)" in first
    more = run("bash", script, "run.yaml", "--trainer.max_steps=6", **start)  # type: ignore[arg-type]
    assert "2 (now at 6)" in more


@pytest.mark.full
def test_torchrun_starts_an_elastic_run_on_the_nodes_that_are_there(tmp_path: Path) -> None:
    write_run(tmp_path, data={"global_batch_size": 8})
    start = {"cwd": tmp_path, "NNODES": "1:2", "NPROC_PER_NODE": "1", "MASTER_PORT": str(find_free_port())}
    out = run("bash", EXAMPLES / "torchrun.sh", "run.yaml", **start)  # type: ignore[arg-type]
    assert "4 (now at 4)" in out
    assert "1 on cpu" in out


@pytest.mark.full
def test_the_sbatch_script_starts_one_task_for_each_rank(tmp_path: Path) -> None:
    write_run(tmp_path)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    slurm = {"JOB_ID": "17", "JOB_NAME": "train", "NODELIST": "localhost", "NNODES": "1", "NTASKS": "2"}
    environ = {f"SLURM_{name}": value for name, value in {**slurm, "NTASKS_PER_NODE": "2"}.items()}
    environ["PATH"] = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    out = run("bash", EXAMPLES / "slurm.sbatch", "run.yaml", cwd=tmp_path, MASTER_PORT=str(find_free_port()), **environ)
    assert "4 (now at 4)" in out
    assert "2 on cpu" in out
