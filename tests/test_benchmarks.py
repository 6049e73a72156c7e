"""The command for GPU machines works, part by part, in small on a CPU."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "memory": ["plan_cpu", "closed form over allocator |", "| llama, lora, 32-true, 1 ranks, 2x160"],
    "qlora": ["qlora_8b_16gib", "| stock | 1 | 1 |", "| ours 1 | 1 | 1 |", "| `FSDP::cast_forward_inputs` |"],
    "lora": ["lora_8b_24gib", "| stock | 1 | 1 |", "| ours 1 | 1 | 1 |", "| `aten::mm` |"],
    "context": ["qlora_8b_24gib_16k_offload", "| ours 1 | 1 | 1 |"],
    "offload": ["offload_cpu", "| `no offload` |", "| `cpu_offload: {overlap_optimizer: true}` |"],
    "two_ranks": ["two_ranks_one_card", "share one card through gloo", "| ours | 2 | 1 |", "| `FSDP::all_gather` |"],
    "packed": ["packed_attention_cpu", "| `sdpa` |", "| `auto` |"],
    "records": ["lora_8b_4096", "| stock | 1 | 1 |", "| ours 1 compiled | 1 | 1 |"],
    "speed": ["optimizers_cpu", "| adamw |", "| adafactor |"],
}


def run_parts(results: Path, *parts: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DEVICE": device, "RESULTS": str(results), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *parts]
    return subprocess.run(command, env=environ, cwd=results, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part in ("memory", "qlora") else pytest.mark.slow) for part in PAGES]
)
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
    known = "memory qlora lora context offload two_ranks packed steps records speed"
    assert f"got speeed: expected one of {known}" in done.stderr
    done = run_parts(tmp_path, "qlora", device="cuda")
    assert done.returncode == 2
    assert "torch sees no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_attention_that_fails_is_named_beside_what_was_measured(tmp_path: Path) -> None:
    """On a CPU ``flex_attention`` is refused."""
    page, script = tmp_path / "page.md", ROOT / "benchmarks" / "packed_attention.py"
    sizes = ("--length=64", "--documents=2", "--repeats=1", f"--out={page}", "--attention", "flex_attention", "sdpa")
    done = subprocess.run([sys.executable, str(script), *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "not measured: `flex_attention`, repeat 1" in done.stderr
    assert "| `sdpa` |" in page.read_text()
    assert "- `flex_attention`, repeat 1: ended with" in page.read_text()


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of ``benchmarks/step.py``."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("step")


def test_the_page_of_offload_has_what_there_is_and_says_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    offload: Any = importlib.import_module("offload")
    given = argparse.Namespace(
        device="cuda", precision="bf16-mixed", layers=2, shape="tiny", micro_batches=1, length=64, steps=5
    )
    run = {"steps_s": [1.0], "peak_gib": 1.0, "losses": [8.0], "device": "GPU", "torch": "2.13"}
    found: dict[str, Any] = {variant: [] for variant in offload.VARIANTS} | {"no offload": [run]}
    page = offload.format_page(given, found, ["`cpu_offload: {}`, repeat 1: ended with 1"])
    assert "| `no offload` | 1.000" in page
    assert "- `cpu_offload: {}`, repeat 1: ended with 1" in page
    assert "did not do the same work" not in page
    for loss in (9.0, float("nan")):
        other = {"cpu_offload: {}": [{**run, "losses": [loss]}]}
        assert "**These runs did not do the same work.**" in offload.format_page(given, {**found, **other}, [])


def test_only_runs_with_equal_losses_are_compared(step: Any) -> None:
    plain = {"plain": [{"loss": 9.0}]}
    assert step.is_equal_work({**plain, "ours": [{"loss": 9.0 * (1 + 0.9e-6)}]}, bf16=False)
    for other in (9.0 * (1 - 1.2e-6), 9.0 * (1 + 1.2e-6), float("nan")):
        assert not step.is_equal_work({**plain, "ours": [{"loss": other}]}, bf16=False)
        assert not step.is_equal_work({"ours": [{"loss": other}], **plain}, bf16=False)


def test_ratios_are_of_one_round_also_where_a_run_has_failed(step: Any) -> None:
    runs = {"plain": [{"s": 1.0, "round": 0}, {"s": 4.0, "round": 2}], "ours": [{"s": 3.0, "round": 1}]}
    assert step.compare(runs, "ours", "s") == []
    runs["ours"].append({"s": 2.0, "round": 2})
    assert step.compare(runs, "ours", "s") == [0.5]


def test_of_ranks_that_fail_the_one_that_was_not_killed_says_why(step: Any) -> None:
    class Server:
        def run(self, _: str, __: Any, ___: Any, logs: Path, ____: float) -> list[int]:
            for rank, text in enumerate(("Error of a connection", "ValueError: the cause")):
                (logs / f"log.{rank}").write_text(text)
            return [-9, 1]

    assert step.run_ranks("script.py", {}, 2, server=Server()) == "ValueError: the cause"


def test_one_rank_sees_one_gpu(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, first in (("3,1", "3"), ("", ""), (None, "0")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert step.list_variables(0, 1, 29500) == {"CUDA_VISIBLE_DEVICES": first}
    assert "CUDA_VISIBLE_DEVICES" not in step.list_variables(0, 2, 29500)


def test_what_fails_last_is_in_the_file_too(step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = {"step_wall_s": 1.0, "step_cpu_s": 1.0, "first_step_wall_s": 2.0, "first_step_cpu_s": 2.0}
    measured: Any = iter(({**done, "peak_gib": 1.0, "loss": 9.0}, "OutOfMemoryError: 2 GiB", "RuntimeError: of all"))
    monkeypatch.setattr(step, "measure", lambda *_: next(measured))
    monkeypatch.setattr(step, "build_case", lambda *_: None)
    out = tmp_path / "numbers.json"
    options = {"ranks": 1, "rounds": 1, "steps": 6, "size": "tiny", "precision": "32-true", "trl_python": None}
    given = argparse.Namespace(**options, fork=False, take_turns=False, out=out, variants=["plain", "ours"])
    about = {"date": "", "device": "", "versions": {}, "options": "", "note": "", "load_before": [0.0]}
    found: dict[str, Any] = {**about, "cases": {}}
    step.run_case("vit", given, found)
    given.variants = ["plain"]
    step.run_case("full", given, found)
    failed = [case["failed"] for case in json.loads(out.read_text())["cases"].values()]
    assert failed == [{"ours": "OutOfMemoryError: 2 GiB"}, {"plain": "RuntimeError: of all"}]
    assert all(f"failed: {why} |" in out.with_suffix(".md").read_text() for case in failed for why in case.values())


def test_variants_that_run_at_once_take_one_step_after_the_other(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_rank(rank: int, turns: Any, times: Any) -> None:
        monkeypatch.setattr(sys.modules["step_variants"], "NUM_RANKS", 2)
        monkeypatch.setattr(sys.modules["step_variants"], "RANK", rank)
        for _ in range(3):
            turns.wait()
            begin = time.monotonic()
            time.sleep(0.01 + 0.02 * rank)
            times.put((begin, time.monotonic(), turns.index))
            turns.pass_on()

    one_forks = threading.Lock()  # filelock 4.3 lets no two threads fork at once

    def measure(_: str, __: str, ___: Path, ____: Any, turns: Any) -> list[tuple[float, float, int]]:
        context = get_context("fork")
        times = context.SimpleQueue()
        ranks = [context.Process(target=be_rank, args=(rank, turns, times)) for rank in (0, 1)]
        for rank in ranks:
            with one_forks:
                rank.start()
        found = [times.get() for _ in range(6)]
        for rank in ranks:
            rank.join()
        return found

    monkeypatch.setattr(step, "measure", measure)
    given = argparse.Namespace(ranks=2)
    found = dict(step.measure_in_turn(["plain", "ours", "ddp"], "full", Path(), given))
    assert list(found) == ["plain", "ours", "ddp"]
    both = sorted(interval for measured in found.values() for interval in measured)
    assert [index for _, _, index in both] == [0, 0, 1, 1, 2, 2] * 3
    for n in range(0, len(both) - 2, 2):  # both ranks of one have ended before any of the next begins
        assert max(end for _, end, _ in both[n : n + 2]) <= both[n + 2][0]


@pytest.mark.slow
def test_the_page_of_steps_is_made_of_the_numbers_beside_it(tmp_path: Path) -> None:
    done = run_parts(tmp_path, "steps")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (numbers,) = tmp_path.glob("step_cpu_*.json")
    page = numbers.with_suffix(".md")
    written = page.read_text()
    page.unlink()
    for line in ("| plain loop over", "| ours |", "| Trainer of Transformers |", "all runs agree to"):
        assert line in written, written
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--page", str(numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert page.read_text() == written
    cases = json.loads(numbers.read_text())["cases"]
    assert len(cases) == len(done.stdout.splitlines()[1].split("|")) - 3


def test_options_of_the_step_benchmark_that_cannot_be_are_refused() -> None:
    for option, expected in (
        (["--steps", "5"], "--steps: got 5: expected 6 or more"),
        (["--rounds", "0"], "expected 1 or more"),
        (["--trl-python", "nowhere"], "--trl-python: got nowhere: expected the Python of an environment that has TRL"),
        (
            ["--take-turns", "--fork", "--cases", "full"],
            "--take-turns: its variants are processes of their own and measure no start",
        ),
        (["--out", "page.md"], "--out: got page.md: expected a name ending in .json"),
    ):
        command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *option]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert expected in done.stderr
