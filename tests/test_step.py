"""docs/step.md says what is really called, in that order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Prints every function that is entered, as its file and qualified name.
TRACE = """
import sys
from pathlib import Path
import lit_fsdp.cli.train  # not traced, which takes seconds
from lit_fsdp.cli.main import main

packages = ("lit_fsdp/", "tasks/", "lightning/", "torch/optim/", "torch/distributed/fsdp/")
# Innermost first: an environment made in .venv of this repository lies below PYTHONPATH, too.
roots = sorted((str(Path(p).resolve()) for p in sys.path if p), key=len, reverse=True)
out = open(sys.argv[1], "w")

def find_name(path):
    for root in roots:
        if path.startswith(root + "/"):
            return path[len(root) + 1:]
    return ""

names = {}
def profile(frame, event, arg):
    if event == "call":
        path = frame.f_code.co_filename
        if path not in names:
            names[path] = find_name(path)
        if names[path].startswith(packages):
            out.write(f"{names[path]} {frame.f_code.co_qualname}\\n")

sys.setprofile(profile)
code = main(sys.argv[2:])
sys.setprofile(None)
out.close()
sys.exit(code)
"""
OPTIONS = (
    "--cpu_processes=1",
    "--trainer.precision=bf16-mixed",  # one rank gathers what it casts
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=1",
    "--trainer.val_check_interval=null",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--data.num_workers=0",
    "--data.seq_length=32",
    "--data.batch_size=1",
    "--model.sample_prompts=[]",
)


def read_page() -> list[str]:
    """Return ``file function`` of every line in the code blocks, in order."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "step.md").read_text(), re.DOTALL)
    return [" ".join(line.split()[:2]) for block in blocks for line in block.splitlines()]


@pytest.mark.full
def test_the_step_page_lists_the_frames_of_a_real_run_in_order(tmp_path: Path) -> None:
    out = tmp_path / "trace.txt"
    config = str(ROOT / "configs" / "quickstart.yaml")
    done = subprocess.run(
        [sys.executable, "-c", TRACE, str(out), "fit", "--config", config, *OPTIONS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    frames = read_page()
    assert len(frames) > 40
    calls = iter(
        line.replace("tasks/", "lit_fsdp/tasks/", 1) if line.startswith("tasks/") else line
        for line in out.read_text().splitlines()
    )
    for frame in frames:
        assert frame in calls, f"docs/step.md: {frame} is not called, or not after the lines above it"
