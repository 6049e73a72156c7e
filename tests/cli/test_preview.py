import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.cli.main import main
from lit_fsdp.cli.preview import format_row, print_preview
from lit_fsdp.tasks import TextData
from lit_fsdp.tasks.row_files import show_controls
from lit_fsdp.tasks.text.mixture import SourceCount
from lit_fsdp.tasks.text.preview import Piece, Preview

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [{"instruction": f"count to {i}", "output": " ".join(map(str, range(i)))} for i in range(1, 13)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, {"output": "lost"}]))
    data: dict[str, Any] = {
        "train": "a.jsonl",
        "tokenizer": {"vocab_size": 300},
        "bad_rows": "skip",
        "chat_template": TEMPLATE,
        "seq_length": 64,
        "cache_dir": "cache",
    }
    parts = {
        # Weights and GPUs that are not here: neither is needed.
        "model": {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": {"pretrained": "nobody/has-this"}},
        "data": {"class_path": "lit_fsdp.tasks.TextData", "init_args": data},
        "trainer": {"accelerator": "gpu", "devices": 4, "precision": "bf16-true"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(parts))
    monkeypatch.chdir(tmp_path)
    return "--config=run.yaml"


def test_rows_are_shown_as_the_model_sees_them_and_counted(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", config, "--rows=2", "--data.packing=false", "--ids=true"]) == 0
    shown = capsys.readouterr().out
    assert "<user>count to 1</s><assistant>⟦0</s>⟧\n" in shown
    assert "<user>count to 2</s><assistant>⟦0 1</s>⟧\n" in shown
    assert "count to 3" not in shown
    assert "1 bad rows were left out; the first:\na.jsonl line 13: the row has: output" in shown

    # The same figures, from the batches that a run gets.
    data = TextData(
        train="a.jsonl",
        tokenizer=next(str(folder.parent) for folder in Path("cache").glob("tokenizers/*/tokenizer.json")),
        bad_rows="skip",
        chat_template=TEMPLATE,
        seq_length=64,
        packing=False,
        batch_size=len(ROWS),
        num_workers=0,
        cache_dir="cache",
    )
    with pytest.warns(UserWarning, match="bad rows are skipped"):
        data.setup("fit")
        found = data.make_preview("train", 1)
        (batch,) = data.train_dataloader()
    assert found.efficiency == float(batch["attention_mask"].double().mean())
    assert sum(count for _, _, count in found.count_lengths()) == len(ROWS) == len(found.lengths)
    assert (found.num_cut, found.num_learned) == (0, int((batch["labels"] != -100).sum()))
    (first,) = found.rows
    ids = [token for piece in first for token in piece.ids]
    assert " ".join(map(str, first[1].ids)) in shown
    assert data.tokenizer.decode(ids) == "<user>count to 1</s><assistant>0</s>"


def test_what_is_cut_off_is_not_counted_as_learned(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    cut = ["--data.packing=false", "--data.seq_length=8"]  # not even the question
    assert main(["preview", config, *cut, "--rows=1"]) == 0
    shown = capsys.readouterr().out
    assert "train row 1: 8 tokens, 0 learned" in shown
    assert "\n0.0% of the tokens are learned\n" in shown
    assert "12 documents are longer than seq_length 8 and are cut there; 12 of them keep no token to learn" in shown


def test_a_packed_row_shows_where_a_document_begins(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", config, "--rows=1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("train row 1: 64 tokens, ")
    assert "<assistant>⟦0</s>⟧\n┈┈┈\n<user>count to 2" in shown
    assert "packed into" in shown


@pytest.mark.full
def test_a_mixture_and_what_it_leaves_out_are_told_in_preview_and_report(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"prompt": f"say {i}", "completion": "x " * i, "system": "be short" * (i % 2)} for i in range(1, 31)]
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    sources = "--data.train=[{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]"
    padded = ["--data.packing=false", "--data.seq_length=32", "--data.batch_size=5"]
    assert main(["preview", config, sources, *padded, "--data.group_by_length=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # 12 good rows of a and 30 of b are an epoch of 42, of which 31.5 and 10.5 are their shares.
    assert "a.jsonl: 32 rows (76.2%), " in "\n".join(lines)
    assert any(line.endswith("of 12 rows: each comes 2.667 times") for line in lines)
    assert any(line.startswith("b.jsonl: 10 rows (23.8%), ") and line.endswith(": 20 are left out") for line in lines)
    assert (
        '15 rows have "system" beside a prompt that is text, which has no place for it: it is not read; set format: '
        "chat to read it"
    ) in lines

    assert main(["preview", config, sources, *padded]) == 0
    others = capsys.readouterr().out.splitlines()
    both = [next(line for line in found if "the rest is padding" in line) for found in (lines, others)]
    shares = [float(line.split("%")[0]) for line in both]
    assert shares[0] > shares[1]
    assert f"{shares[1]}% would be without group_by_length" in lines
    assert f"{shares[0]}% would be with group_by_length: true" in others

    assert main(["preview", config, "--data.train=b.jsonl", "--data.format=chat", *padded]) == 0
    assert '"system"' not in capsys.readouterr().out


def test_colors_say_what_marks_say() -> None:
    row = [
        Piece(text="[red]a", ids=[1], is_learned=False, begins_document=True),
        Piece(text="b", ids=[2], is_learned=True, begins_document=False),
    ]
    text = format_row(row, has_colors=True)
    assert text.plain == "[red]ab"
    assert [(span.start, span.end, str(span.style)) for span in text.spans] == [(0, 6, "dim"), (6, 7, "bold green")]
    assert format_row(row, has_colors=False).plain == "[red]a⟦b⟧"


@pytest.mark.full(after=3)
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--rows=-1"], "rows: got -1: expected 0 or more"),
        (["--split=test"], "data.init_args.test: not set; name a file, a folder, a data set, or pydoc"),
        (["--data.train=gone.jsonl"], "data.init_args.train: gone.jsonl: no such file or folder"),
        (
            ["--data.train=[{path: a.jsonl, weight: 0}]"],
            "data.init_args.train[0].weight: got 0: expected more",
        ),
        (["--data.train=[{path: a.jsonl, wieght: 1}]"], "data.init_args.train[0].wieght: unknown key"),
        (
            ["--data.train=paths.json"],
            "data.init_args.train: all 2 rows are bad, the first: paths.json row 1",
        ),
        (["--data.group_by_length=true"], "data.init_args.group_by_length: packed rows have one length"),
        (["--data=lit_fsdp.tasks.ImageData"], "data: got ImageData: only text has a preview"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    config: str, options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("paths.json").write_text('["a.jsonl", {"path": "a.jsonl"}]')
    assert main(["preview", config, *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_no_row_commands_the_terminal_and_a_report_shows_the_ends_of_long_ones() -> None:
    assert show_controls("a\x1b[2J\r\n\tb\x9b") == "a␛[2J␍\n\tb\\x9b"

    long = [
        Piece(text=f"{'q' * 170} hf_{'sEcReT12' * 4} {'q' * 5000}Q", ids=[1], is_learned=False, begins_document=True),
        *(Piece(text=f"<{n}>", ids=[2], is_learned=n % 2 == 0, begins_document=False) for n in range(5000)),
    ]
    preview = Preview(
        rows=[long],
        num_rows=1,
        is_packed=True,
        lengths=np.array([5001]),
        seq_length=8192,
        num_learned=2500,
        efficiency=1.0,
        num_bad=0,
        bad=[],
    )
    ((_, shown),) = preview.make_section().tables[0].rows
    assert shown.startswith("qqq")
    assert "q […] q" in shown
    assert "sEcReT" not in shown
    assert "Q⟦<0>⟧<1>" in shown
    assert len(shown) < 1000


def test_a_credential_in_the_address_of_a_source_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    name = "https://me:hunter2@host/a.jsonl?X-Amz-Signature=0123456789abcdef"
    source = SourceCount(name=name, num_documents=1, num_used=1, num_drawn=1, num_tokens=5, share=1.0)
    found = Preview(
        rows=[],
        num_rows=1,
        is_packed=False,
        lengths=np.array([5]),
        seq_length=8,
        num_learned=5,
        efficiency=1.0,
        num_bad=0,
        bad=(),
        sources=[source],
    )
    print_preview(found, split="train", shows_ids=False)
    shown = capsys.readouterr().out
    assert "host/a.jsonl" in shown
    assert "hunter2" not in shown
    assert "0123456789abcdef" not in shown


def test_bars_fit_a_narrow_terminal(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["preview", config, "--rows=0", "--data.packing=false"]) == 0
    bars = [line for line in capsys.readouterr().out.splitlines() if "█" in line]
    assert bars
    assert max(map(len, bars)) < 60
