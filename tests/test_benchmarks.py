"""The command for GPU machines works, part by part, in small on a CPU."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "memory": ["plan_cpu", "closed form over allocator |", "| llama, lora, 32-true, 1 ranks, 2x160"],
    "qlora": ["qlora_8b_16gib", "| stock | 1 | 1 |", "| ours 1 | 1 | 1 |", "| `FSDP::pre_forward` |"],
    "lora": ["lora_8b_24gib", "| stock | 1 | 1 |", "| ours 1 | 1 | 1 |", "| `aten::mm` |"],
    "two_ranks": ["two_ranks_one_card", "share one card through gloo", "| ours | 2 | 1 |", "| `FSDP::all_gather` |"],
    "speed": ["vit_cpu", "| ours |", "| plain |", "| transformers |"],
}


def run_parts(results: Path, *parts: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DEVICE": device, "RESULTS": str(results), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *parts]
    return subprocess.run(command, env=environ, cwd=results, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.parametrize("part", [*list(PAGES)[:-1], pytest.param("speed", marks=pytest.mark.slow)])
def test_a_part_writes_its_page(part: str, tmp_path: Path) -> None:
    done = run_parts(tmp_path, part)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    name, *lines = PAGES[part]
    (page,) = tmp_path.glob(f"{name}_*.md")
    for line in lines:
        assert line in page.read_text(), page.read_text()


@pytest.mark.full
def test_unknown_parts_and_missing_gpus_are_refused(tmp_path: Path) -> None:
    done = run_parts(tmp_path, "qlora", "speeed")
    assert done.returncode == 2
    assert "got speeed: expected one of memory qlora lora two_ranks speed" in done.stderr
    done = run_parts(tmp_path, "qlora", device="cuda")
    assert done.returncode == 2
    assert "torch sees no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []
