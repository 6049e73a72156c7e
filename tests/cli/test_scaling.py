"""What ``bench scaling`` makes of runs on several numbers of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from launches import write_run

from lit_fsdp.cli.main import main


def write_report(folder: Path, ranks: int, per_s: float, exposed_s: float) -> str:
    step = {"step_s": 2.0, "exposed_s": exposed_s, "exposed_pct": 50 * exposed_s}
    collectives = {"all_gather": {"wire_bytes": 2**29}, "all_reduce": {"wire_bytes": 2**28}}
    speed = {"ranks": ranks, "tokens_per_s": per_s, "tokens_per_s_per_rank": per_s / ranks, "step_s": 2.0}
    comm = (
        {"title": "Communication", "notes": ["one rank"]}
        if ranks == 1
        else {"numbers": {"step": step, "collectives": collectives}}
    )
    path = folder / f"{ranks}.json"
    path.write_text(json.dumps({"sections": {"speed": {"numbers": speed}, "comm": comm}}))
    return str(path)


def test_reports_are_compared_with_the_fewest_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [write_report(tmp_path, 4, 3000.0, 1.0), write_report(tmp_path, 1, 1000.0, 0.0)]
    assert main(["bench", "scaling", "--reports", json.dumps(given), "--out", str(tmp_path / "out")]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert cells[0] == ["1", "1,000.0", "1,000.0", "100 %", "2.0000", "0.0000", "0 %", "0.0"]
    assert cells[1] == ["4", "3,000.0", "750.0", "75 %", "2.0000", "1.0000", "50 %", "768.0"]
    runs = json.loads((tmp_path / "out" / "scaling.json").read_text())["runs"]
    assert [(run["num_ranks"], run["per_s_per_rank"], run["wire_bytes"]) for run in runs] == [
        (1, 1000, 0),
        (4, 750, 3 * 2**28),
    ]
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")


REFUSED: list[tuple[list[str], str]] = [
    ([], "config or reports: expected one of them"),
    (["--config=run.yaml", "--reports=a.json"], "config or reports: expected one of them"),
    (["--config=run.yaml", "--steps=4"], "steps: got 4"),
    (["--config=run.yaml", "--ranks=0,2"], "ranks: got '0,2'"),
    (["--config=run.yaml", "--ranks=2,2"], "ranks: got '2,2'"),
    (["--config=run.yaml", "--ranks=two"], "ranks: got 'two'"),
    (["--reports=missing.json"], "missing.json: no report of a run with `monitoring: true`"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_cannot_be_compared_is_refused_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    assert main(["bench", "scaling", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_report_without_speed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"sections": {"speed": {"title": "Speed", "error": "failed"}}}))
    assert main(["bench", "scaling", "--reports", str(path)]) == 2
    assert "no report of a run with `monitoring: true`" in capsys.readouterr().err


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_one_configuration_runs_on_one_and_two_ranks(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(in_a_folder)
    assert main(["bench", "scaling", "--config=run.yaml", "--steps=10", "--out=out"]) == 0
    runs: list[dict[str, Any]] = json.loads((in_a_folder / "out" / "scaling.json").read_text())["runs"]
    assert [run["num_ranks"] for run in runs] == [1, 2]
    assert runs[0]["exposed_s"] == 0 < runs[1]["exposed_s"] < runs[1]["step_s"]
    assert runs[0]["wire_bytes"] == 0 < runs[1]["wire_bytes"]
    assert {path.name for path in in_a_folder.iterdir()} == {"run.yaml", "train.jsonl", "cache", "out"}


@pytest.mark.slow
def test_a_run_that_fails_says_why(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(in_a_folder, model={"config": {"model_type": "nothing"}})
    assert main(["bench", "scaling", "--config=run.yaml", "--ranks=1"]) == 2
    assert "error: the run on 1 ranks failed: " in capsys.readouterr().err
