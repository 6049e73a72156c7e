"""What users copy from ``examples/`` runs as it stands."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from launches import OURS, find_free_port, write_run
from transformers import AutoModelForTokenClassification

from lit_fsdp.tasks import TrainTokenizer
from lit_fsdp.tasks.text.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

# Stands for SLURM's, without which test_slurm.py is skipped: starts the tasks of one node.
SRUN = """#!/usr/bin/env bash
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "${@:2}" &
    pids[rank]=$!
done
for pid in "${pids[@]}"; do wait "$pid" || code=1; done
exit "${code:-0}"
"""


def run(*command: str | Path, cwd: Path, timeout_s: float = 300, **environ: str) -> str:
    """Run a command as a user does in a shell, with the Python of the tests first on PATH; return what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env = {**clean, "OMP_NUM_THREADS": "1", **paths, **environ}
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
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
def test_a_task_on_a_class_of_transformers_is_planned_resumed_and_exported_as_it_is(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "own_task", tmp_path / "own_task")
    command = (sys.executable, "-m", "lit_fsdp")
    planned = run(*command, "plan", "--config=tagger.yaml", cwd=folder)
    assert "exact trace" in planned
    short = ("--config=tagger.yaml", "--trainer.accelerator=cpu", "--monitoring=false")
    first = run(*command, "fit", *short, "--trainer.max_steps=100", cwd=folder)
    assert "100 (now at 100)" in first
    loss = float(re.search(r"val/loss\W+([\d.]+)", first)[1])  # type: ignore[index]
    assert loss < 0.6  # that of guessing is 0.69
    assert "20 (now at 120)" in run(*command, "fit", *short, "--trainer.max_steps=120", "--ckpt_path=last", cwd=folder)
    run(*command, "export", "--checkpoint=runs/tagger", "--out=exported", cwd=folder)
    model = AutoModelForTokenClassification.from_pretrained(folder / "exported").eval()
    with torch.no_grad():
        chosen = model(input_ids=torch.tensor([[49, 1, 48, 2, 47] + [0] * 11])).logits.argmax(-1)
    assert chosen[0, :4].tolist() == [1, 0, 1, 0]


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
def test_two_nodes_that_lightning_starts_are_one_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    start = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    command = ("bash", EXAMPLES / "lightning_nodes.sh", "run.yaml", "--trainer.devices=1")
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(run, *command, cwd=tmp_path, **start, NODE_RANK=number) for number in ("0", "1")]
        first, second = [node.result() for node in nodes]
    assert "4 (now at 4)" in first
    assert "2 on cpu" in first
    assert "Run summary" not in second


@pytest.mark.full
def test_the_file_for_clouds_starts_a_run_on_two_machines_and_continues_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    task = yaml.safe_load((EXAMPLES / "sky.yaml").read_text())
    assert (ROOT / task["envs"]["CONFIG"]).is_file()
    script = task["run"].replace("every_n_train_steps: 500", "every_n_train_steps: 2")
    # As SkyPilot sets them on each of its machines; https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html
    given = {"NODE_IPS": "127.0.0.1\n127.0.0.2", "NUM_NODES": str(task["num_nodes"]), "NUM_GPUS_PER_NODE": "1"}
    start = {f"SKYPILOT_{name}": value for name, value in given.items()}
    start |= {**task["envs"], "CONFIG": "run.yaml", "RUNS": f"{tmp_path}/saved"}
    for options, done in (("", "4 (now at 4)"), ("--trainer.max_steps=6", "2 (now at 6)")):
        start |= {"OPTIONS": options, "MASTER_PORT": str(find_free_port())}
        with ThreadPoolExecutor() as pool:
            nodes = [
                pool.submit(run, "bash", "-c", script, cwd=tmp_path, **start, SKYPILOT_NODE_RANK=rank) for rank in "01"
            ]
            first, _ = [node.result() for node in nodes]
        assert done in first
        assert "2 on cpu" in first
    assert Path(start["RUNS"], "last.ckpt").is_dir()


@pytest.mark.full
def test_the_sbatch_script_starts_one_task_for_each_rank(tmp_path: Path) -> None:
    write_run(tmp_path)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    slurm = {"JOB_ID": "17", "JOB_NAME": "train", "NODELIST": "localhost", "NNODES": "1", "NTASKS": "2"}
    environ = {f"SLURM_{name}": value for name, value in {**slurm, "STEP_TASKS_PER_NODE": "2"}.items()}
    environ["PATH"] = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    out = run("bash", EXAMPLES / "slurm.sbatch", "run.yaml", cwd=tmp_path, MASTER_PORT=str(find_free_port()), **environ)
    assert "4 (now at 4)" in out
    assert "2 on cpu" in out


@pytest.mark.full
def test_a_torch_trainer_of_ray_streams_text_into_the_strategy(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    rows = ({"text": f"word{i} is {i * i}. " * 20} for i in range(200))
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = train_tokenizer(["word is 0 1 2 3 4 5 6 7 8 9."], TrainTokenizer(vocab_size=300))
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    options = [f"--train={tmp_path}/train.jsonl", f"--tokenizer={tmp_path}/tokenizer", "--steps=4", "--save_every=2"]
    options += ["--address=local", "--num_cpus=4"]
    out = run(sys.executable, EXAMPLES / "ray_train.py", *options, cwd=tmp_path, timeout_s=600)
    assert "step 4: train/loss" in out
    assert len(list((tmp_path / "ray_run" / "checkpoints").glob("*.ckpt"))) == 1
