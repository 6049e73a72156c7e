"""What ``bench scaling`` makes of runs on several numbers of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from launches import write_run
from plan_runs import main as run_main
from plan_runs import plan

from lit_fsdp.cli.main import main
from lit_fsdp.planning.needed_memory import count_outside_bytes
from lit_fsdp.profiling.collectives import MEASURED
from lit_fsdp.sharding.mesh import MeshSizes


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
    (["--reports=a.json", "--steps=50"], "steps: got 50 with reports"),
    (["--reports=a.json", "--ranks=1,2"], "ranks: got 1,2 with reports"),
    (["--reports=missing.json"], "missing.json: no report of a run with `monitoring: true`"),
    (["--reports=a.json", "--link=pcie4"], "link: got pcie4: what shall be predicted is not known; add --config"),
    (["--config=run.yaml", '--reports=["a", "b"]', "--link=pcie4"], "reports: got 2 with link: expected one"),
    (["--config=run.yaml", "--link=pcie44"], "link: got 'pcie44': unknown: nearest: pcie4"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks=1,4"], "ranks: got 4: this node has 1 GPU\n"),
        (["--ranks=2,4", "--link=pcie44"], "ranks: got 2: this node has 1 GPU\n"),
        (["--ranks=1,4", "--link=pcie44"], "link: got 'pcie44'"),
        (["--ranks=2,4", "--link=pcie44", "--reports=a.json"], "link: got 'pcie44'"),
    ],
    ids=str,
)
def test_only_ranks_that_run_have_to_be_here(
    options: list[str], message: str, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    write_run(in_a_folder)
    assert main(["bench", "scaling", "--config=run.yaml", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_report_without_speed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"sections": {"speed": {"title": "Speed", "error": "failed"}}}))
    assert main(["bench", "scaling", "--reports", str(path)]) == 2
    err = capsys.readouterr().err
    assert "no report of a run with `monitoring: true`" in err
    assert "Error" not in err
    for status, said in (("failed", "failed"), ("interrupted", "was interrupted")):
        path.write_text(json.dumps({"run": {"status": status}, "sections": {}}))
        assert main(["bench", "scaling", "--reports", str(path)]) == 2
        assert f"report.json: the run {said}, so its report says nothing of its speed" in capsys.readouterr().err


def test_tokens_are_not_compared_with_samples(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ranks, unit in (("a.json", 1, "tokens"), ("b.json", 2, "samples")):
        numbers = {"ranks": ranks, f"{unit}_per_s": 100.0, "step_s": 1.0}
        (in_a_folder / name).write_text(json.dumps({"sections": {"speed": {"numbers": numbers}}}))
    assert main(["bench", "scaling", '--reports=["a.json", "a.json"]']) == 0
    assert main(["bench", "scaling", '--reports=["a.json", "b.json"]']) == 2
    assert "got speeds in several units (a.json: tokens, b.json: samples)" in capsys.readouterr().err


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


ALL_NAMES = ["one card", "4 shards", "2 copies of 2 shards", "4 copies"]
SECONDS = {"forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.01, "data_s": 0.002, "other_s": 0.003}


def write_measured(folder: Path, bandwidth_gb_s: float) -> list[str]:
    """Write what was measured of a run on one card and of links, and return the options that name it."""
    speed = {"sections": {"speed": {"numbers": {"ranks": 1, **SECONDS}}}}
    (folder / "report.json").write_text(json.dumps(speed))
    line = {"alpha_s": 1e-5, "bandwidth_gb_s": bandwidth_gb_s, "worst_pct": 1.0}
    comm = {"num_ranks": 2, "num_nodes": 1, "backend": "gloo", "collectives": dict.fromkeys(MEASURED, line)}
    (folder / "comm.json").write_text(json.dumps(comm))
    return ["bench", "scaling", "--config=run.yaml", "--reports=report.json", "--link=comm.json", "--out=out"]


def list_options(layout: dict[str, Any]) -> list[str]:
    changes = layout["changes"].items()
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes]


@pytest.mark.full
def test_what_more_cards_bring_is_what_was_measured_and_the_bytes_of_each_layout(
    in_a_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_run(in_a_folder, trainer={"accumulate_grad_batches": 2})
    assert run_main(write_measured(in_a_folder, bandwidth_gb_s=0.1)) == 0
    printed = capfd.readouterr().out
    found = json.loads((in_a_folder / "out" / "scaling.json").read_text())
    layouts = {(layout["name"], *layout["changes"].items()): layout for layout in found["layouts"]}
    assert len(layouts) == len(found["layouts"])
    alone = found["layouts"][0]
    assert (alone["name"], alone["devices"]) == ("one card", 1)
    assert alone["time"]["step_s"] == pytest.approx(sum(SECONDS.values()))
    for layout in found["layouts"][1:]:
        step = plan("--config=run.yaml", "--devices=2", *list_options(layout))
        outside_bytes = count_outside_bytes(MeshSizes(step["ranks"]["replicas"], step["ranks"]["shards"]))
        assert layout["needed_bytes"] == round(1.15 * step["memory"]["peak_bytes"]) + outside_bytes
        sent = step["communication"]["bytes_per_step"]
        wire = sent["gather"] / 2 + sent["reduce_scatter"] / 2 + sent["all_reduce"]
        calls = sum(step["communication"]["collectives_per_step"].values())
        # Over gloo nothing hides; a rank updates the shard that it has.
        assert layout["time"]["exposed_communication_s"] == pytest.approx(wire / 0.1e9 + 1e-5 * calls)
        share = 1 if layout["name"] == "2 copies" else 0.5
        assert layout["time"]["optimizer_s"] == pytest.approx(share * SECONDS["optimizer_s"], rel=0.01)
    exact, rounded = (found["layouts"][found[key]] for key in ("recommended", "recommended_rounded"))
    speeds = [layout["time"]["tokens_per_s"] for layout in found["layouts"] if not layout["rounds"]]
    assert exact["time"]["tokens_per_s"] * 1.02 >= max(speeds)
    assert rounded["time"]["tokens_per_s"] * 1.02 >= max(layout["time"]["tokens_per_s"] for layout in found["layouts"])
    # The lines to paste are those settings.
    lines = printed.partition("\ntrainer:\n")[2].partition("\n\n")[0]
    (in_a_folder / "chosen.yaml").write_text(f"trainer:\n{lines}\n")
    assert yaml.safe_load((in_a_folder / "chosen.yaml").read_text())["trainer"]["devices"] == exact["devices"] == 2
    again = plan("--config=run.yaml", "--config=chosen.yaml")
    own = plan("--config=run.yaml", "--devices=2", *list_options(exact))
    assert again["ranks"] == own["ranks"]
    assert again["communication"] == own["communication"]


@pytest.mark.full
def test_a_link_that_is_too_slow_leaves_one_card(in_a_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(in_a_folder)
    assert run_main(write_measured(in_a_folder, bandwidth_gb_s=1e-4)) == 0
    assert "More cards do not help" in capfd.readouterr().out
    assert json.loads((in_a_folder / "out" / "scaling.json").read_text())["recommended"] == 0


@pytest.mark.full
def test_links_inside_nodes_and_between_them_bring_copies_of_shards(in_a_folder: Path) -> None:
    write_run(in_a_folder, trainer={"accumulate_grad_batches": 2, "num_nodes": 2})
    options = write_measured(in_a_folder, bandwidth_gb_s=1.0)
    across = json.loads((in_a_folder / "comm.json").read_text()) | {"num_ranks": 4, "num_nodes": 2}
    across["collectives"] = {kind: {**line, "bandwidth_gb_s": 0.005} for kind, line in across["collectives"].items()}
    (in_a_folder / "across.json").write_text(json.dumps(across))
    options = [option.replace("comm.json", "comm.json,across.json") for option in options]
    assert run_main([*options, "--ranks=1,2"]) == 0
    found = json.loads((in_a_folder / "out" / "scaling.json").read_text())
    assert [*dict.fromkeys(layout["name"] for layout in found["layouts"])] == ALL_NAMES
    changed = {key.rpartition(".")[2] for layout in found["layouts"] for key in layout["changes"]}
    assert changed >= {"reshard_after_forward", "no_sync", "gather_bits", "reduce_bits"}
    copies = next(layout for layout in found["layouts"] if layout["name"] == "2 copies of 2 shards")
    assert not copies["rounds"]
    step = plan("--config=run.yaml", "--devices=2", *list_options(copies))
    sent = step["communication"]["bytes_per_step"]
    # Only what copies add up goes between nodes, of both ranks of a node over one link.
    wire_s = (sent["gather"] + sent["reduce_scatter"]) / 2 / 1e9 + 2 * sent["all_reduce"] / 0.005e9
    calls = sum(step["communication"]["collectives_per_step"].values())
    assert copies["time"]["exposed_communication_s"] == pytest.approx(wire_s + 1e-5 * calls)
    chosen = found["layouts"][found["recommended"]]
    assert (chosen["name"], chosen["changes"]["trainer.strategy.sharding.no_sync"]) == ("2 copies of 2 shards", True)


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
