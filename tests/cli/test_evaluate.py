"""``evaluate``: tasks of lm-evaluation-harness on a run of two ranks, against the harness on its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from launches import fork_ranks, write_run

from lit_fsdp.cli.main import main

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.full
ROWS = [
    {"question": f"word{i} is", "choices": [f" {i}.", f" {i + 1}. word", f" x{i}"], "answer": i % 3} for i in range(9)
]
COMMON = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "tasks/rows.jsonl"}}, "test_split": "test"}
COMMON["doc_to_text"] = "{{question}}"
TASKS: dict[str, dict[str, Any]] = {
    "words": {
        "output_type": "multiple_choice",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}{{choices[1]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of two ranks was started, beside a folder of tasks."""
    folder = tmp_path_factory.mktemp("user")
    write_run(folder)
    config = yaml.safe_load((folder / "run.yaml").read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump({**config, "monitoring": True}))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    for name, task in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **COMMON, **task}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = fork_ranks("fit", "--config=run.yaml")
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    return folder


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]
    return results


def test_two_ranks_find_what_the_harness_finds_and_the_report_of_the_run_says_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    args = ("--tasks=words,go_on,rolling", "--include_path=tasks", "--trainer.accelerator=cpu")
    ended = fork_ranks("evaluate", "--model=runs/run", *args)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    assert "evaluation.json, and into the report in " in ended[0].out
    assert "it/s" not in ended[0].err + ended[1].err  # no bars in a pipe
    assert ended[1].out == ""
    run = folder / "runs" / "run" / "version_0"
    ours = read_results(run / "evaluation.json")
    assert main(["export", "--checkpoint=runs/run", f"--out={tmp_path / 'model'}"]) == 0
    truth = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(tmp_path / "model"), "dtype": "float32"},
        device="cpu",
        batch_size=8,
        tasks=[*TASKS],
        task_manager=lm_eval.tasks.TaskManager(include_path="tasks"),
        log_samples=False,
    )
    assert truth is not None
    for task in TASKS:
        for key, value in truth["results"][task].items():
            if isinstance(value, float):
                assert ours[task][key] == pytest.approx(value, rel=1e-6), (task, key)
    # An exported folder on one rank, into a file of its own.
    one = fork_ranks("evaluate", f"--model={tmp_path / 'model'}", f"--out={tmp_path / 'one.json'}", *args, ranks=1)
    assert one[0].code == 0, one[0].err
    found = read_results(tmp_path / "one.json")
    for task in TASKS:
        assert {k: v for k, v in found[task].items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in ours[task].items() if isinstance(v, float)}, rel=1e-6
        )
    # Once more: the section is replaced.
    again = fork_ranks("evaluate", "--model=runs/run", *args, "--limit=3")
    assert [rank.code for rank in again] == [0, 0], again[0].err
    text, page = (run / "report.md").read_text(), (run / "report.html").read_text()
    assert text.count("## Evaluation\n") == 1
    assert "the first 3 questions of each task" in text
    assert "| words | acc |" in text
    assert page.count('<section id="evaluation">') == page.count('<li><a href="#evaluation">') == 1
    assert page.rstrip().endswith("</html>")
    assert json.loads((run / "report.json").read_text())["sections"]["evaluation"]["numbers"]["limit"] == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--tasks=[word]", "tasks: got 'word': no such task: did you mean words?"),
        ("--tasks=[]", "tasks: got []: expected the name of one"),
        ("--tasks=words,", "tasks: got 'words,': expected the name of one"),
        ("--tasks=[words] --limit=0", "limit: got 0: expected 1 or more"),
        ("--tasks=[words] --batch_size=0", "batch_size: got 0: expected 1 or more"),
        ("--tasks=[words] --out=x.txt", "out: got 'x.txt': expected a file that ends in .json"),
        ("--tasks=[words] --out=run.yaml/x.json", "out: got 'run.yaml': "),
        ("--tasks=[words] --include_path=none", "include_path: got 'none': expected a folder"),
        (
            "--tasks=[words] --apply_chat_template=true",
            "apply_chat_template: got true: the tokenizer of runs/run has no",
        ),
        ("--tasks=[words] --model=runs/nothing", "model: "),
        ("--tasks=[words] --limits=3", "limits: unknown key: did you mean limit?"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(
    options: str, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["evaluate", "--model=runs/run", "--include_path=tasks", *options.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")


def test_tasks_whose_data_is_out_of_reach_are_refused_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {**COMMON, **TASKS["words"], "task": "far", "dataset_path": "someone/far", "dataset_kwargs": {}}
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(task))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args = ("--tasks=far", f"--include_path={tmp_path}", "--trainer.accelerator=cpu")
    ended = fork_ranks("evaluate", "--model=runs/run", *args, ranks=1)[0]
    assert ended.code != 0
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert "tasks: got far: their data cannot be had: " in errors[0]
    assert "Traceback" not in ended.err
