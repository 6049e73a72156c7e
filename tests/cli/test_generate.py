"""A file of prompts is answered as Transformers would, one by one, by any number of ranks."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from chat_run import SIZES, answer_plainly, make_run, write_prompts
from launches import fork_ranks
from text_tasks import save_tokenizer
from training import save_model

from lit_fsdp.cli.main import main

PROMPTS: list[Any] = [
    "word1 is",
    [{"role": "user", "content": "what is word3?"}],
    "word1 is 4. word1 is 5. word1",
    "word",
    [{"role": "system", "content": "short"}, {"role": "user", "content": "word2"}],
]


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


@pytest.mark.full
def test_answers_are_those_of_transformers_on_any_number_of_ranks_and_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    make_run(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    expected = answer_plainly(PROMPTS, 6)
    assert any(text.strip() for text in expected)
    before = sorted(tmp_path.iterdir())
    for model, ranks, batch_size in (("runs/run", 2, 2), ("runs/run", 1, 1), ("exported", 2, 3), ("exported", 1, 5)):
        args = ("generate", f"--model={model}", "--prompts=prompts.jsonl", "--out=new/out.jsonl")
        options = (f"--batch_size={batch_size}", "--max_new_tokens=6", "--trainer.accelerator=cpu")
        ended = fork_ranks(*args, *options, ranks=ranks)
        assert [rank.code for rank in ended] == [0] * ranks, ended[0].err
        rows = read("new/out.jsonl")
        assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["prediction"] for row in rows] == expected, (model, ranks)
        assert rows[0]["prompt"] == PROMPTS[0]
        assert rows[4]["prompt"] == "[system]short<|endoftext|>[user]word2<|endoftext|>[assistant]"
        Path("new/out.jsonl").unlink()
        Path("new").rmdir()
    assert sorted(tmp_path.iterdir()) == before, "nothing is left but the answers"
    Path("lines.txt").write_text("word1 is\nword\n")
    drawn = []
    for seed in (1, 1, 2):
        args = ("generate", "--model=runs/run", "--prompts=lines.txt", "--out=out.csv", f"--seed={seed}")
        options = ("--temperature=1.5", "--max_new_tokens=8", "--quantization.type=nf4", "--trainer.accelerator=cpu")
        ended = fork_ranks(*args, *options)
        assert [rank.code for rank in ended] == [0, 0], ended[0].err
        drawn.append(Path("out.csv").read_text())
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].startswith("index,prompt,prediction\n0,word1 is,")
    args = ("generate", "--model=runs/run", "--prompts=lines.txt", "--out=out.jsonl", "--data.format=chat")
    (ended_alone,) = fork_ranks(*args, "--max_new_tokens=2", "--trainer.accelerator=cpu", ranks=1)
    assert ended_alone.code == 0, ended_alone.err
    assert [row["prompt"] for row in read("out.jsonl")] == [
        f"[user]{t}<|endoftext|>[assistant]" for t in ("word1 is", "word")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": "no.jsonl"}, "prompts: got 'no.jsonl': no such file"),
        ({"prompts": "a.pdf"}, "prompts: got 'a.pdf': expected a file that ends in .txt"),
        ({"prompts": "."}, "prompts: got '.': no such file"),
        ({"out": "out.txt"}, "out: got 'out.txt': expected a file that ends in .jsonl"),
        ({"out": "a.pdf/out.jsonl"}, "out: got 'a.pdf': "),
        ({"out": "."}, "out: . is a folder: expected a file"),
        ({"out": "./a.jsonl"}, "out: got 'a.jsonl': it holds the prompts, which answers would replace: choose another"),
        ({"batch_size": "0"}, "batch_size: got 0: expected 1 or more"),
        ({"max_new_tokens": "0"}, "max_new_tokens: got 0: expected 1 or more"),
        ({"top_p": "0.5"}, "top_p: not used with temperature 0"),
        ({"model": "./no"}, "model: got './no': there is no such folder"),
        ({"config": "run.yaml"}, "config: "),
        ({"batchsize": "3"}, "batchsize: unknown key: did you mean batch_size?"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_and_nothing_is_written(
    change: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "a.pdf"):
        Path(name).write_text("{}")
    before = sorted(tmp_path.iterdir())
    options = {"model": "model", "prompts": "a.jsonl", "out": "out.jsonl"} | change
    assert main(["generate", *(f"--{name}={value}" for name, value in options.items())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.full
def test_a_row_that_is_not_known_is_answered_with_an_option_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "base", num_key_value_heads=2, **SIZES)
    save_tokenizer(tmp_path / "base", ["word1 is 4."])
    Path("in.jsonl").write_text('{"said": "word1 is", "answered": "4"}\n')
    args = ("generate", "--model=base", "--prompts=in.jsonl", "--out=out.jsonl", "--max_new_tokens=2")
    (ended,) = fork_ranks(*args, "--trainer.accelerator=cpu", ranks=1)
    assert ended.code == 2, ended.err
    (option,) = shlex.split(ended.err.partition("; set --data.columns, such as ")[2])
    (ended,) = fork_ranks(*args, "--trainer.accelerator=cpu", option, ranks=1)
    assert ended.code == 0, ended.err
    assert [row["prompt"] for row in read("out.jsonl")] == ["user: word1 is\n"]
