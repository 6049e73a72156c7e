"""Rows of preferences: their layouts, what is tokenized of them, and the batches."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.cli.main import main
from lit_fsdp.tasks import PreferenceColumns, PreferenceData, TrainTokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION, GOOD, BAD = "How much is 1 + 1?", "It is 2.", "No idea."


UNKNOWN = (
    "the row has: question, response_w, response_l: expected prompt, chosen and rejected, or prompt, completion and "
    "label, or messages and label; set columns, such as columns: {prompt: question, chosen: response_w, rejected: "
    "response_l}"
)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


USER, BETTER, WORSE = message("user", QUESTION), message("assistant", GOOD), message("assistant", BAD)
SYSTEM = message("system", "Be brief.")
AS_CHAT = f"[chosen] <user>{QUESTION}</s><assistant>⟦{GOOD}</s>⟧[rejected] <user>{QUESTION}</s><assistant>⟦{BAD}</s>⟧"
AS_ANSWER = f"[label: true] <user>{QUESTION}</s><assistant>⟦{GOOD}</s>⟧"
AS_TEXT = f"[chosen] {QUESTION}⟦ {GOOD}<|endoftext|>⟧[rejected] {QUESTION}⟦ {BAD}<|endoftext|>⟧"


def make(folder: Path, rows: list[Any], **options: Any) -> PreferenceData:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"tokenizer": TrainTokenizer(vocab_size=280), "chat_template": TEMPLATE, "num_workers": 0, **options}
    data = PreferenceData(train=str(folder / "rows.jsonl"), cache_dir=str(folder / "cache"), **options)
    data.setup("fit")
    return data


def load_both(data: PreferenceData) -> list[Any]:
    return [data.train_dataloader(), data.build_eval_loader("validation")]


def show(data: PreferenceData, number: int = 0) -> str:
    return "".join(piece.mark() for piece in data.make_preview("train", number + 1).rows[number])


@pytest.mark.parametrize(
    ("row", "options", "shown"),
    [
        ({"prompt": QUESTION, "chosen": f" {GOOD}", "rejected": f" {BAD}"}, {}, AS_TEXT),
        ({"chosen": f"{QUESTION} {GOOD}", "rejected": f"{QUESTION} {BAD}"}, {}, AS_TEXT),
        ({"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}, {"format": "chat"}, AS_CHAT),
        ({"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]}, {}, AS_CHAT),
        ({"prompt": [USER], "chosen": [USER, BETTER], "rejected": [USER, WORSE]}, {}, AS_CHAT),
        ({"chosen": [USER, BETTER], "rejected": [USER, WORSE]}, {}, AS_CHAT),
        # UltraFeedback: whole chats beside the text of the question.
        ({"prompt": QUESTION, "chosen": [USER, BETTER], "rejected": [USER, WORSE], "score_chosen": 8.0}, {}, AS_CHAT),
        # axolotl: one message each.
        ({"messages": [USER], "chosen": BETTER, "rejected": WORSE}, {}, AS_CHAT),
        (
            {"question": QUESTION, "good": GOOD, "bad": BAD},
            {"format": "chat", "columns": PreferenceColumns(prompt="question", chosen="good", rejected="bad")},
            AS_CHAT,
        ),
        (
            {"instruction": "How much is", "input": "1 + 1?", "chosen": f" {GOOD}", "rejected": f" {BAD}"},
            {"columns": PreferenceColumns(prompt="instruction")},
            AS_TEXT.replace("is 1", "is\n1"),
        ),
        ({"question": QUESTION, "chosen": [USER, BETTER], "rejected": [USER, WORSE]}, {}, AS_CHAT),
        ({"question": QUESTION, "chosen": f"{QUESTION} {GOOD}", "rejected": f"{QUESTION} {BAD}"}, {}, AS_TEXT),
        (
            {
                "dialog": [{"who": "human", "says": QUESTION}],
                "w": {"who": "gpt", "says": GOOD},
                "l": {"who": "gpt", "says": BAD},
            },
            {"columns": PreferenceColumns(prompt="dialog", chosen="w", rejected="l", role="who", content="says")},
            AS_CHAT,
        ),
        ({"prompt": [USER], "completion": [BETTER], "label": True}, {}, AS_ANSWER),
        ({"messages": [USER, BETTER], "label": True}, {}, AS_ANSWER),
        (
            {"messages": [USER, WORSE, USER, BETTER], "label": True, "completion": None},
            {},
            f"[label: true] <user>{QUESTION}</s><assistant>{BAD}</s><user>{QUESTION}</s><assistant>⟦{GOOD}</s>⟧",
        ),
        # LLaMA-Factory.
        (
            {
                "conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": GOOD}],
                "kto_tag": True,
            },
            {"columns": PreferenceColumns(label="kto_tag")},
            AS_ANSWER,
        ),
    ],
)
def test_layouts_mean_a_prompt_with_completions(
    row: dict[str, Any], options: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    if shown.startswith("[label"):
        other = {name: "false" if value is True else value for name, value in row.items()}
        assert show(make(tmp_path, [other, row], **options)) == shown.replace("true", "false")
        assert show(make(tmp_path, [other, row], **options), 1) == shown
    else:
        assert show(make(tmp_path, [row], **options)) == shown


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "response_w": "b", "response_l": "c"}, UNKNOWN),
        (
            {"query": "a", "answer": "b", "label": True},
            "set columns, such as columns: {prompt: query, completion: answer, label: label}",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, '"chosen" and "rejected" are the same'),
        ({"chosen": "b", "rejected": "c"}, "have no beginning in common"),
        ({"chosen": "a b", "rejected": "a b c"}, "is the beginning of the other"),
        ({"prompt": "a", "chosen": [BETTER], "rejected": [WORSE]}, "('a'), not messages; give all three as"),
        ({"prompt": "a", "chosen": [BETTER], "rejected": "c"}, "('c'): expected the same form"),
        ({"prompt": [USER], "chosen": "b", "rejected": "c"}, "the prompt is a list of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, '"rejected" is empty'),
        ({"prompt": "a", "chosen": "b", "rejected": None}, '"rejected" is empty; remove the row or set bad_rows: skip'),
        ({"prompt": "a", "completion": None, "chosen": None, "rejected": None, "label": True}, '"completion" is empty'),
        ({"chosen": 5, "rejected": 6}, '"chosen" is a number (5): expected text, or messages'),
        # LLaMA-Factory: without its question, what the answers happen to begin with would be the prompt.
        (
            {"instruction": "Translate", "input": "Hund", "chosen": "The dog.", "rejected": "The cat."},
            '"instruction" beside "chosen" and "rejected" is not read; set columns: {prompt: instruction}, or remove',
        ),
        ({"Question": "a", "chosen": [BETTER], "rejected": [WORSE]}, "is not read; set columns: {prompt: Question}"),
        (
            {"query": "a", "chosen": [SYSTEM, BETTER], "rejected": [SYSTEM, WORSE]},
            "is not read; set columns: {prompt: q",
        ),
        ({"prompt": "", "query": "a", "chosen": "b c", "rejected": "b d"}, "is not read; set columns: {prompt: query}"),
        (
            {"prompt": "a", "completion": "b", "label": "good"},
            "\"label\" must be true or false, it is a string ('good')",
        ),
        ({"completion": "b", "label": True}, "a completion needs its prompt"),
        ({"messages": [BETTER, USER], "label": True}, 'the last message is by "user": expected the answer that'),
        ({"messages": [BETTER], "label": True}, "the answer is the only message: expected its prompt before it"),
        ({"messages": [USER, BETTER], "tag": True}, "set columns, such as columns: {label: tag}"),
    ],
)
def test_other_rows_are_answered_with_what_to_do(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b", "label": True} if "label" in row else {"chosen": "a b", "rejected": "a c"}
    with pytest.raises(ValueError, match=r"train: .*rows\.jsonl line 2: ") as caught:
        make(tmp_path, [good, row])
    assert message in str(caught.value)


def test_a_bad_completion_takes_the_pair_along(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": f" {n}", "rejected": " " if n == 1 else " no"} for n in range(4)]
    data = make(tmp_path, rows, bad_rows="skip", batch_size=3, shuffle=False)
    (batch,) = data.train_dataloader()
    documents = zip(batch["input_ids"], batch["labels"], strict=True)
    texts = [data.tokenizer.decode(ids[labels != -100]) for ids, labels in documents]
    assert texts == [f" {end}<|endoftext|>" for end in ("0", "2", "3", "no", "no", "no")]
    assert data.make_preview("train", 0).num_bad == 1


def test_pairs_are_cut_at_the_end_and_left_out_when_nothing_is_left_to_learn(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": " b", "rejected": " c" * 30},
        {"prompt": "a " * 40, "chosen": " b", "rejected": " c"},
    ]
    data = make(tmp_path, rows, seq_length=16, batch_size=1)
    with pytest.warns(UserWarning, match="3 of 4 documents are longer than seq_length 16 and are cut; 1 pairs"):
        (batch,) = data.train_dataloader()
    assert batch["input_ids"].shape == (2, 16)
    assert int((batch["labels"][1] != -100).sum()) == 15
    data = make(tmp_path, rows[1:], seq_length=16)
    with pytest.raises(ValueError, match="seq_length: got 16: no completion of 1 pairs fits in"):
        data.train_dataloader()


def test_kto_holds_out_both_completions_of_a_prompt_or_none(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f" good {n}", "rejected": f" bad {n}"} for n in range(20)]
    data = make(tmp_path, rows, validation_fraction=0.3)
    data.is_unpaired, data.trainer = True, None
    ids = [torch.cat([batch["input_ids"].flatten() for batch in loader]) for loader in load_both(data)]
    train, validation = (set(re.findall(r"(\d+)\?", data.tokenizer.decode(row))) for row in ids)
    assert len(validation) == 6
    assert not train & validation


def test_a_reference_of_pairs_is_not_read_for_the_same_completions_with_labels(tmp_path: Path) -> None:
    """Which of them are held out differs."""
    pairs = [{"prompt": f"a{n}", "chosen": " b", "rejected": " c"} for n in range(8)]
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    found = {}
    for name, rows in (("pairs", pairs), ("labelled", labelled), ("again", pairs)):
        data = make(tmp_path, rows, validation_fraction=0.5)
        data.is_unpaired = True
        data.setup("fit")
        found[name] = data.locate_reference("train", model="m")
    assert found["pairs"] == found["again"] != found["labelled"]


def test_kto_sets_each_prompt_beside_the_completion_of_another_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f" good {n}", "rejected": f" bad {n}"} for n in range(6)]
    found: dict[int, dict[str, tuple[str, bool]]] = {}
    for size in (1, 4):
        data = make(tmp_path, rows, batch_size=size)
        data.is_unpaired = True
        data.trainer = None
        batches = list(data.train_dataloader())
        found[size] = {}
        for batch in batches:
            texts = data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
            for own, other, is_good in zip(texts[:size], texts[size:], batch["desirable"].tolist(), strict=True):
                found[size][own] = (other, is_good)
    assert found[1].items() == found[4].items()  # whatever the batches
    assert len(found[1]) == 12
    for own, (other, is_good) in found[1].items():
        assert own.split("?")[0] == other.split("?")[0]
        assert own != other
        assert is_good == ("good" in own)
    assert len({other.split("?")[1] for other, _ in found[1].values()}) == 12


def test_pairs_cannot_be_made_of_labels(tmp_path: Path) -> None:
    data = make(tmp_path, [{"prompt": "a", "completion": " b", "label": n % 2} for n in range(4)])
    with pytest.raises(ValueError, match="rows have a label, and loss_type learns of pairs; set loss_type: kto"):
        data.train_dataloader()


def test_labelled_rows_beside_pairs_are_counted_where_the_loss_learns_of_pairs(tmp_path: Path) -> None:
    pair, labelled = {"prompt": "a", "chosen": " b", "rejected": " c"}, {"prompt": "a", "completion": " b", "label": 1}
    data = make(tmp_path, [labelled, pair, labelled])
    with pytest.warns(UserWarning, match="train: 2 rows have a label, not chosen and rejected, and are left out; set"):
        assert data.count_rows("train") == len(data.train_dataloader()) == 1


def test_rows_that_fill_up_an_evaluation_learn_nothing(tmp_path: Path) -> None:
    data = make(tmp_path, [{"prompt": "a", "chosen": f" b{n}", "rejected": " c"} for n in range(3)], eval_batch_size=2)
    data.sources["validation"] = data.sources["train"]
    data.setup("validate")
    batches = list(data.build_eval_loader("validation"))
    assert [(batch["labels"] != -100).any(1).tolist() for batch in batches] == [[True] * 4, [True, False] * 2]


def test_an_example_batch_is_as_large_as_any(tmp_path: Path) -> None:
    data = make(tmp_path, [{"prompt": "a", "chosen": " b", "rejected": " c"}], seq_length=32, batch_size=3)
    data.is_unpaired = data.has_reference = True
    batch = data.make_example_batch()
    assert batch["input_ids"].shape == (6, 32)
    assert not bool(batch["attention_mask"].all())
    assert (batch["desirable"].dtype, batch["reference_logps"].shape) == (torch.bool, (6,))


def test_preview_shows_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, [{"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]}] * 5)
    monkeypatch.chdir(tmp_path)
    data = {"train": "rows.jsonl", "tokenizer": {"vocab_size": 280}, "chat_template": TEMPLATE, "cache_dir": "cache"}
    parts = {
        "model": {"class_path": "lit_fsdp.tasks.PreferenceTuning", "init_args": {"pretrained": "nobody/has-this"}},
        "data": {"class_path": "lit_fsdp.tasks.PreferenceData", "init_args": data},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(parts))
    assert main(["preview", "--config=run.yaml", "--rows=1"]) == 0
    shown = capsys.readouterr().out
    first, second = AS_CHAT.split("[rejected]")
    assert f"{first}\n┈┈┈\n[rejected]{second}" in shown
    assert "10 documents" in shown
    assert "as 5 rows" in shown
