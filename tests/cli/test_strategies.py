"""What ``bench strategies`` runs, reads and prints."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from launches import ROOT, run_processes, write_run

from lit_fsdp.cli.main import main
from lit_fsdp.cli.strategies import Compared, describe_sharded, list_strategies, measure_loss_difference

PARTS = sorted((ROOT / "configs" / "strategies").glob("*.yaml"))


def read_rows(out: str) -> dict[str, list[str]]:
    """Return the cells of the printed table, by strategy."""
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.mark.full
def test_strategies_do_the_same_work_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [f"lightning.pytorch.callbacks.{name}" for name in ("ModelCheckpoint", "LearningRateMonitor")]
    write_run(tmp_path, trainer={"callbacks": [{"class_path": name} for name in callbacks]})
    monkeypatch.chdir(tmp_path)
    before = [path.name for path in tmp_path.iterdir()]
    options = ["--strategies=fsdp2,ddp,fsdp,model_parallel", "--steps=6", "--rounds=1", "--out=out"]
    assert main(["bench", "strategies", "--config=run.yaml", *options]) == 0
    rows = read_rows(capsys.readouterr().out)
    assert {name: cells[-1] for name, cells in rows.items()} == {
        "fsdp2": "parameters, gradients, optimizer state",
        "ddp": "nothing",
        "fsdp": "parameters, gradients, optimizer state",
        "model_parallel": "parameters, gradients, optimizer state",
    }
    found = json.loads((tmp_path / "out" / "strategies.json").read_text())["strategies"]
    by_name = {one["name"]: one for one in found}
    losses = by_name["fsdp2"]["losses"]
    assert len(losses) == 6
    for one in found:
        assert one["losses"] == pytest.approx(losses, abs=1e-6), one["name"]
        assert one["held"]["parameters"] == pytest.approx(1.0 if one["name"] == "ddp" else 0.5, abs=0.02)
    sent = by_name["fsdp2"]["wire_bytes"]
    compared = 2 * 8  # two checksums of what the ranks did
    assert by_name["model_parallel"]["wire_bytes"] == {**sent, "all_gather": sent["all_gather"] - compared}
    # Tokens are kept in the folder that run.yaml names.
    assert {path.name for path in tmp_path.iterdir()} == {*before, "cache", "out"}


def test_a_strategy_that_does_not_run_is_a_line_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: Path, files: Any, setting: dict[str, Any], **_: Any) -> list[dict[str, Any]]:
        if "DDP" in setting["class_path"]:
            raise RuntimeError("trainer.strategy: refused")
        rank = {"step_s": [0.5, 0.5], "losses": [2.0], "peak_gib": 1.0, "wire_bytes": {"all_gather": 2**20}}
        held = {"parameters": 0.5, "gradients": None, "optimizer state": 0.5}
        return [{**rank, "held": held, "unknown": ["c10d::send"]}] * 2

    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_fsdp.cli.strategies._run", run)
    assert main(["bench", "strategies", "--config=run.yaml", "--strategies=fsdp2,ddp", "--rounds=2"]) == 1
    out = capsys.readouterr().out
    rows = read_rows(out)
    assert rows["fsdp2"][0] == "0.5000"
    assert rows["fsdp2"][4:] == ["1.000", "0.0e+00", "parameters, optimizer state (gradients: not shown)"]
    assert rows["ddp"][-1] == "not run"
    assert "ddp: trainer.strategy: refused" in out
    assert "fsdp2: bytes of c10d::send are not counted" in out
    assert out.count("ddp, 2 ranks") == 1  # not tried again in the second round


@pytest.mark.parametrize(("given", "start_timeout_s"), [("", 500.0), ("start_timeout_s: 7.0", 7.0)])
def test_slow_ranks_of_fsdp2_are_waited_for_as_long_as_the_run(
    given: str, start_timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    def call(command: list[str], _: float) -> tuple[int, str]:
        path = next(part.partition("=")[2] for part in command if part.endswith("/strategy.yaml"))
        written.append(yaml.safe_load(Path(path).read_text())["trainer"]["strategy"])
        return 1, ""

    write_run(tmp_path)
    strategy = f"trainer: {{strategy: {{class_path: lit_fsdp.FSDP2Strategy, init_args: {{{given}}}}}}}"
    (tmp_path / "own.yaml").write_text(strategy)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_fsdp.cli.strategies.run_command", call)
    assert main(["bench", "strategies", "--config=run.yaml", "--strategies=own.yaml,ddp", "--timeout_s=500"]) == 1
    assert [setting.get("init_args", {}) for setting in written] == [{"start_timeout_s": start_timeout_s}, {}]


KILLED = """
import os, signal, sys
from pathlib import Path
from lit_fsdp.cli import main, scaling, strategies

code = "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(60)"

def run(folder, *_, **__):
    Path("folder").write_text(str(folder))
    def end(*_):
        while not (Path("pid").exists() and Path("pid").read_text()):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    scaling.run_command([sys.executable, "-c", code], 60.0)

scaling._run = strategies._run = run
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "bench", [["strategies", "--strategies=ddp"], ["scaling", "--ranks=1"]], ids=["strategies", "scaling"]
)
def test_a_signal_to_end_takes_the_run_and_its_folder_along(
    bench: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (ended,) = run_processes(["-c", KILLED, "bench", *bench, "--config=run.yaml"], timeout_s=100.0)
    assert ended.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not Path((tmp_path / "folder").read_text()).exists()


def test_small_parameters_kept_whole_do_not_hide_that_the_rest_is_sharded() -> None:
    held = {"parameters": 0.3, "gradients": 0.25, "optimizer state": 1.0}
    assert describe_sharded(Compared(name="x", held=held), 4) == "parameters, gradients"


@pytest.mark.parametrize("losses", [[1.0, math.nan], [math.nan, 1.0]])
def test_a_loss_that_is_not_a_number_is_no_loss_that_is_the_same(losses: list[float]) -> None:
    first, other = Compared(name="fsdp2", losses=[1.0, 1.0]), Compared(name="ddp", losses=losses)
    assert math.isnan(measure_loss_difference(other, first) or 0.0)
    assert measure_loss_difference(first, first) == 0


REFUSED: list[tuple[list[str], str]] = [
    (["--strategies=dpp"], "strategies: got 'dpp': did you mean ddp?"),
    (["--strategies=ddp,ddp"], "expected each once"),
    (["--strategies=run,run.yaml"], "strategies: got 'run,run.yaml': expected each once, also as the name of a file"),
    (["--strategies=run.yaml"], "expected a file with trainer.strategy.class_path"),
    (["--steps=4"], "steps: got 4: the first 4 only warm up: expected 6 or more"),
    (["--rounds=0"], "rounds: got 0"),
    (["--ranks=1"], "ranks: got 1: nothing is sharded over one"),
    (["--timeout_s=0"], "timeout_s: got 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_cannot_be_compared_is_refused_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "strategies", "--config=run.yaml", *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_each_part_in_configs_is_a_strategy_that_is_compared() -> None:
    known = list_strategies(4)
    assert {path.stem for path in PARTS} == known.keys() - {"fsdp2"}
    for path in PARTS:
        assert yaml.safe_load(path.read_text())["trainer"]["strategy"] == known[path.stem]


@pytest.mark.parametrize("part", PARTS, ids=lambda path: path.stem)
def test_each_part_fits_the_case_study(
    part: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    relative = part.relative_to(ROOT)
    command = f"fit --config configs/vit_mnist_4gpu.yaml --config {relative}"
    assert command in part.read_text()
    assert main([*command.split(), "--print_config"]) == 0, capsys.readouterr().err
    printed = yaml.safe_load(capsys.readouterr().out)
    strategy = printed["trainer"]["strategy"]
    assert strategy["class_path"] == yaml.safe_load(part.read_text())["trainer"]["strategy"]["class_path"]
