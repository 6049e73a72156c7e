"""Ranks that Ray starts, each on a GPU of its own."""

from pathlib import Path

import pytest
from launches import run_processes, write_run

from ranks import GPUS, count_gpus

pytest.importorskip("ray.train")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_each_worker_of_ray_trains_on_its_own_gpu(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All GPUs by default. ``16-mixed`` is refused on CPUs, where the command itself builds its trainer."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, trainer={"accelerator": "auto", "precision": precision})
    fit = ["-m", "lit_fsdp", "fit", "--config=run.yaml", "--launcher=ray", "--address=local"]
    visible = GPUS or ",".join(map(str, range(count_gpus())))
    ended = run_processes(fit, CUDA_VISIBLE_DEVICES=visible)[0]
    assert ended.code == 0, ended.err
    printed = ended.out + ended.err
    assert "4 (now at 4)" in printed
    assert f"{count_gpus()} on cuda" in printed
