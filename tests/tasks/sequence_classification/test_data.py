"""What rows with labels become, and which are refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from text_tasks import save_tokenizer, write_rows
from transformers import AutoTokenizer

from lit_fsdp.tasks import LabeledColumns, LabeledTextData, TrainTokenizer
from lit_fsdp.tasks.sequence_classification.labels import stack_targets
from lit_fsdp.tasks.text.batches import read_exact

TEXT = "the number one comes after the number zero. "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), [TEXT])


@pytest.fixture
def make(tmp_path: Path, tokenizer: str) -> Any:
    def make(*labels: Any, rows: list[dict[str, Any]] | None = None, **options: Any) -> LabeledTextData:
        rows = rows or [{"text": f"{TEXT}{i}", "label": label} for i, label in enumerate(labels)]
        settings: dict[str, Any] = {"seq_length": 64, "batch_size": 2, "num_workers": 0, "shuffle": False}
        settings |= {"cache_dir": str(tmp_path / "cache"), "tokenizer": tokenizer, **options}
        return LabeledTextData(**{"train": write_rows(tmp_path / "rows.jsonl", rows), **settings})

    return make


@pytest.mark.parametrize(
    ("labels", "problem", "classes", "expected"),
    [
        (["no", "yes"], "single_label_classification", ["no", "yes"], torch.tensor([0, 1])),
        ([2, 0], "single_label_classification", ["0", "1", "2"], torch.tensor([2, 0])),
        (["1", "0"], "single_label_classification", ["0", "1"], torch.tensor([1, 0])),  # as CSV files have them
        ([True, False], "single_label_classification", ["false", "true"], torch.tensor([1, 0])),
        ([["b", "a"], []], "multi_label_classification", ["a", "b"], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        (["[UNK]", "[b"], "single_label_classification", ["[UNK]", "[b"], torch.tensor([0, 1])),
        (["01", "1_0"], "single_label_classification", ["01", "1_0"], torch.tensor([0, 1])),  # names, as they are
        (["1.0", "2.0-beta"], "single_label_classification", ["1.0", "2.0-beta"], torch.tensor([0, 1])),  # one is none
        (["1", "a"], "single_label_classification", ["1", "a"], torch.tensor([0, 1])),
        ([["3.10", "3.9"], []], "multi_label_classification", ["3.10", "3.9"], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([1, 2.5], "regression", None, torch.tensor([1.0, 2.5])),
        (["-1e-1", "+.5"], "regression", None, torch.tensor([-0.1, 0.5])),
    ],
)
def test_what_is_learned_follows_from_the_labels(
    make: Any, labels: list[Any], problem: str, classes: Any, expected: torch.Tensor, tokenizer: str
) -> None:
    data = make(*labels)
    data.setup("fit")
    assert (data.problem_type, data.classes) == (problem, classes)
    (batch,) = data.train_dataloader()
    labels = read_exact(batch["labels"]) if problem == "regression" else batch["labels"]
    assert torch.equal(labels, expected)
    assert labels.dtype == expected.dtype
    stock = AutoTokenizer.from_pretrained(tokenizer)([f"{TEXT}{i}" for i in range(2)], padding=True)
    assert batch["input_ids"].tolist() == stock["input_ids"]  # as a pipeline of Transformers reads them
    assert batch["attention_mask"].tolist() == stock["attention_mask"]


@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "parquet"])
@pytest.mark.parametrize(("labels", "expected"), [([2, 0], [2, 0]), ([[0, 2], []], [[1, 0, 1], [0, 0, 0]])])
def test_classes_are_those_that_a_data_set_names(
    make: Any, tmp_path: Path, labels: Any, expected: Any, is_saved: bool
) -> None:
    """In its order, of which one has no row; where they are numbers themselves, none is taken for a place."""
    names = ["3", "1", "2"]
    kind: Any = ClassLabel(names=names)
    features = Features({"text": Value("string"), "label": List(kind) if isinstance(labels[0], list) else kind})

    def save(name: str, labels: Any) -> str:
        rows = {"text": [f"{TEXT}{i}" for i in range(len(labels))], "label": labels}
        made, where = Dataset.from_dict(rows, features=features), tmp_path / (name if is_saved else f"{name}.parquet")
        made.save_to_disk(where) if is_saved else made.to_parquet(where)
        return str(where)

    later = labels[:1]  # without the first class, or the second
    data = make(train=save("train", labels), validation=save("validation", later))
    data.setup("fit")
    assert data.classes == names
    for loader, wanted in ((data.train_dataloader(), expected), (data.val_dataloader(), expected[:1])):
        assert next(iter(loader))["labels"][: len(wanted)].tolist() == wanted
    if isinstance(labels[0], int):
        with pytest.raises(ValueError, match=r'train: .*row 1: "label" is missing'):
            make(train=save("unlabelled", [-1, 0])).setup("fit")
        numbers = make(train=save("numbers", labels), problem_type="regression")
        numbers.setup("fit")
        assert numbers.classes is None
        # Those given win: in their order, also with others; names of their own are those of the numbers.
        for classes, wanted in ((["2", "3", "9", "1"], [0, 1]), (["a", "b", "c"], [2, 0])):
            given = make(train=save("given", labels), classes=classes)
            given.setup("fit")
            assert given.classes == classes
            assert next(iter(given.train_dataloader()))["labels"].tolist() == wanted


def test_chats_and_pairs_are_rendered_and_long_pairs_left_out(make: Any, tokenizer: str) -> None:
    answers = ["one", "two", f"{TEXT * 9}"]
    chat = [{"role": "user", "content": "count"}]
    rows = [{"prompt": chat, "chosen": [{"role": "assistant", "content": a}], "rejected": [*chat]} for a in answers]
    data = make(rows=rows, problem_type="reward")
    with pytest.warns(UserWarning, match="1 pairs are longer than seq_length 64 and are left out, 2 are kept"):
        data.setup("fit")
    (batch,) = data.train_dataloader()
    texts = AutoTokenizer.from_pretrained(tokenizer).batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert texts[:2] == ["user: count\nassistant: one\n", "user: count\nuser: count\n"]
    assert len(texts) == 4
    assert batch["labels"].tolist() == [1, 1]


USER = {"role": "user", "content": "ok?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
AS_CHATS = ["user: ok?\nassistant: yes\n", "user: ok?\nassistant: no\n"]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("row", "columns", "texts"),
    [
        ({"chosen": "yes", "rejected": "no"}, {}, ["yes", "no"]),
        ({"prompt": "ok? ", "chosen": "yes", "rejected": "no", "margin": 1.0}, {}, ["ok? yes", "ok? no"]),
        ({"question": "ok? ", "chosen": "yes", "rejected": "no"}, {"prompt": "question"}, ["ok? yes", "ok? no"]),
        (
            {"instruction": "is", "input": "it? ", "better": "yes", "worse": "no"},
            {"prompt": "instruction", "chosen": "better", "rejected": "worse"},
            ["is\nit? yes", "is\nit? no"],
        ),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, {}, AS_CHATS),
        ({"chosen": [YES], "rejected": [NO]}, {}, ["assistant: yes\n", "assistant: no\n"]),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, {}, AS_CHATS),
        ({"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]}, {}, AS_CHATS),
        ({"prompt": "ok?", "chosen": [USER, YES], "rejected": [USER, NO]}, {}, AS_CHATS),
        ({"messages": [USER], "chosen": YES, "rejected": NO}, {}, AS_CHATS),
        ({"dialog": [USER], "chosen": YES, "rejected": NO}, {"messages": "dialog"}, AS_CHATS),
        (
            {"conversations": [{"from": "human", "value": "ok?"}], "chosen": YES, "rejected": NO, "system": "s"},
            {},
            [f"system: s\n{text}" for text in AS_CHATS],
        ),
        (
            {"chosen": [USER, YES], "rejected": [USER, NO], "sys": "s"},
            {"system": "sys"},
            [f"system: s\n{t}" for t in AS_CHATS],
        ),
        (
            {
                "q": [{"who": "user", "says": "ok?"}],
                "chosen": {"who": "gpt", "says": "yes"},
                "rejected": {"who": "gpt", "says": "no"},
            },
            {"prompt": "q", "role": "who", "content": "says"},
            AS_CHATS,
        ),
    ],
)
def test_pairs_of_a_reward_are_read_as_those_of_preferences(
    make: Any, row: dict[str, Any], columns: dict[str, str], texts: list[str]
) -> None:
    data = make(rows=[row], problem_type="reward", columns=LabeledColumns(**columns))
    data.setup("fit")
    (shown,) = data.make_preview("train", 1).rows
    assert "".join(piece.text for piece in shown) == f"[chosen] {texts[0]}[rejected] {texts[1]}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "ok?", "chosen": "yes", "rejected": "no"}, r"is not read; set columns: \{prompt: question\}"),
        (
            {"instruction": "a", "input": "b", "chosen": "yes", "rejected": "no"},
            r"set columns: \{prompt: instruction\}",
        ),
        ({"prompt": "a", "chosen": "yes", "rejected": "yes"}, '"chosen" and "rejected" are the same; remove the row'),
        ({"prompt": "a", "chosen": "yes", "rejected": None}, '"rejected" is empty; remove the row or set bad_rows'),
        ({"prompt": "a", "chosen": [YES], "rejected": [NO]}, "not messages; give all three as messages"),
        ({"prompt": "a", "chosen": "yes", "rejected": "no", "system": "s"}, '"system" has no place in a pair of texts'),
        (
            {"chosen": "yes", "rejected": "no", "tools": TOOLS},
            '"tools" has no place in a pair of texts; give prompt and',
        ),
        (
            {"prompt": "a", "chosen": "yes"},
            r'"rejected" is missing \(the row has: prompt, chosen\); set columns.rejected',
        ),
    ],
)
def test_pairs_of_a_reward_that_would_lose_something_are_refused(make: Any, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"train: .*rows.jsonl line 1: .*{message}"):
        make(rows=[row], problem_type="reward").setup("fit")


def test_columns_of_pairs_are_refused_where_rows_have_a_label(make: Any) -> None:
    with pytest.raises(
        ValueError, match=r"columns\.chosen: only pairs have one; set problem_type: reward, or leave it"
    ):
        make("a", "b", columns=LabeledColumns(chosen="better"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"premise": "a", "hypothesis": "b"},
            r"the row has: premise, hypothesis, label: expected text, or messages.*\{text: premise\}; texts in",
        ),
        (
            {"text": "a", "text_pair": "b"},
            r'"text_pair" is not read; join it to "text", or leave it out with columns: \{text: text\}$',
        ),
        (
            {"instruction": "a", "output": "b"},
            r"expected text, or messages; set columns, such as columns: \{text: instr",
        ),
        (
            {"prompt": "a", "completion": "b"},
            r"expected text, or messages; set columns, such as columns: \{text: prompt",
        ),
        ({"body": "a"}, r"the row has: body, label: expected .*such as columns: \{text: body\}$"),
        ({"dialog": [USER]}, r"columns: \{messages: dialog\}$"),
    ],
)
def test_only_text_and_messages_can_have_a_label(make: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"train: .*rows.jsonl line 1: .*{message}"):
        make(rows=[{**row, "label": "x"}]).setup("fit")


@pytest.mark.parametrize("row", [{"text": "a", "text_pair": "b"}, {"instruction": "b", "output": "c", "text": "a"}])
def test_a_text_that_columns_name_is_read_whatever_is_beside_it(make: Any, row: dict[str, Any]) -> None:
    data = make(rows=[{**row, "label": label} for label in "xy"], columns=LabeledColumns(text="text"))
    data.setup("fit")
    assert data.make_preview("train", 1).rows[0][1].text == "a"


def test_long_texts_are_cut_as_the_tokenizer_cuts(make: Any, tokenizer: str) -> None:
    data = make("a", "b", seq_length=4)
    with pytest.warns(UserWarning, match="2 of 2 rows are longer than seq_length 4 and are cut"):
        data.setup("fit")
    (batch,) = data.train_dataloader()
    stock = AutoTokenizer.from_pretrained(tokenizer)(f"{TEXT}0", truncation=True, max_length=4)
    assert batch["input_ids"][0].tolist() == stock["input_ids"]


def test_a_preview_shows_each_text_with_its_label_and_counts_labels(make: Any) -> None:
    cases: list[tuple[list[Any], str, str]] = [
        (["b", "a", "b"], "[b] ", "labels: b 2, a 1"),
        ([["a"], [], ["a", "b"]], "[a] ", "labels: a 2, b 1"),
        ([0.5, 2, -1], "[0.5] ", "labels are from -1 to 2, 0.5 in the mean"),
    ]
    for labels, title, line in cases:
        data = make(*labels)
        data.setup("fit")
        found = data.make_preview("train", 1)
        assert [piece.text for piece in found.rows[0]] == [title, f"{TEXT}0"]
        assert found.describe()[1] == line
        assert "learned" not in "".join(found.describe())
    data = make(rows=[{"prompt": "1?", "chosen": "yes", "rejected": "no"}], problem_type="reward")
    data.setup("fit")
    (row,) = data.make_preview("train", 1).rows
    assert "".join(piece.text for piece in row) == "[chosen] 1?yes[rejected] 1?no"


def test_rows_that_fill_up_a_batch_have_no_label() -> None:
    assert stack_targets([1, 1], [False, True], "single_label_classification").tolist() == [1, -100]
    assert math.isnan(stack_targets([1.5, 1.5], [False, True], "regression")[1])


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (["a", None], {}, r'train: .*rows.jsonl line 2: "label" is missing \(the row has: text, label\); set label'),
        (["a", {"x": 1}], {}, "the label must be a name, a number, or a list of them, it is"),
        (["a", ["b"]], {}, "1 of 2 labels are lists"),
        (["a", ""], {}, "line 2: the label is empty: expected a name or a number"),
        (["a", '["b"]'], {}, r"""the label is the text '\["b"\]': several classes need a list, as JSON lines or"""),
        (["a", 1], {}, "labels are names and numbers, such as 'a' and 1"),
        (
            ["1.0", "2.0-beta"],
            {"problem_type": "regression"},
            "data.problem_type is 'regression': a label is '2.0-beta', which is no number; set single_label",
        ),
        (["a", "b"], {"problem_type": "regression"}, "a label is 'a', which is no number; set single_label"),
        (
            [0.5, 1],
            {"problem_type": "single_label_classification"},
            "a label is 0.5, which is no class; set regression",
        ),
        (["a", "b"], {"problem_type": "multi_label_classification"}, "the labels are no lists, such as 'a'"),
        (["good", "god"], {"classes": ["good", "bad"]}, "'god', which is none of the 2 classes: did you mean good"),
        ([[0, 1, 0], [1, 0, 0]], {}, "the classes that apply, each once, not 0 or 1 for each class"),
        ([[0.0, 1.0], [1.0, 0.0]], {}, "not 0 or 1 for each class"),
        ([[True, False, True], [False, True, True]], {}, "not 0 or 1 for each class"),
        ([["0", "1", "0"], ["1", "0", "0"]], {}, "line 1: the label is .* each once, not 0 or 1 for each class"),
        ([[0, 1], [1, 0]], {}, "train: every row lists all of the labels 0, 1: expected the classes that apply, not 0"),
        ([["0", "1"], ["1", "0"]], {"classes": ["a", "b"]}, "every row lists all of the labels 0, 1"),
        ([-1, 1], {}, r"a label is -1, and numbers of classes begin with 0; set classes: \['-1', '1'\]$"),
        ([[-1], [1]], {}, r"set classes: \['-1', '1'\]$"),
        ([-1, 1], {"classes": ["a", "b"]}, "a label is -1, which is none of the 2 classes: the classes are a, b"),
        ([0.5, "a"], {}, "labels are names and numbers, such as 'a' and 0.5; make all names, or set classes"),
        ([0, 10**9], {}, "there would be 1000000001 classes, of which 2 have rows; set classes, or data.problem_type"),
        (["a", "a"], {}, "all labels are 'a': expected two classes or more"),
        ([[], []], {}, "all labels are empty lists; set classes"),
        ([1.5, 2.5], {"classes": ["1.5", "2.5"]}, "classes: got 2 of them, and a label is a number with a fraction"),
        (["a", "b"], {"problem_type": "reward"}, '"chosen" is missing'),
        (["a", "b"], {"label": "lable"}, r'"lable" is missing \(the row has: text, label\)'),
    ],
)
def test_labels_that_mean_nothing_are_refused(make: Any, labels: list[Any], options: Any, message: str) -> None:
    data = make(*labels, **options)
    with pytest.raises(ValueError, match=message):
        data.setup("fit")
        data.train_dataloader()


@pytest.mark.parametrize(
    ("labels", "settings", "classes", "expected"),
    [
        # pandas makes decimals of whole numbers with gaps.
        ([2.0, 0.0], {"problem_type": "single_label_classification"}, ["0", "1", "2"], [2, 0]),
        (["3.10", "3.9"], {"problem_type": "single_label_classification"}, ["3.10", "3.9"], [0, 1]),
        (["3.10", "3.9"], {"classes": ["3.9", "3.10"]}, ["3.9", "3.10"], [1, 0]),
        (["2.0", "0.0"], {"classes": ["bad", "so", "good"]}, ["bad", "so", "good"], [2, 0]),  # a CSV file
        ([2.0, 0.0], {"classes": ["bad", "so", "good"]}, ["bad", "so", "good"], [2, 0]),
        ([2.0, 1.0], {"classes": ["1", "2", "3"]}, ["1", "2", "3"], [1, 0]),
        ([2, 1.0], {"classes": ["1.0", "2.0"]}, ["1.0", "2.0"], [1, 0]),
        ([1, "-1"], {"classes": ["-1", "1"]}, ["-1", "1"], [1, 0]),
    ],
)
def test_decimals_are_classes_where_classes_are_set(
    make: Any, labels: list[Any], settings: Any, classes: list[str], expected: list[int]
) -> None:
    data = make(*labels, **settings)
    data.setup("fit")
    assert (data.problem_type, data.classes) == ("single_label_classification", classes)
    (batch,) = data.train_dataloader()
    assert batch["labels"].tolist() == expected


@pytest.mark.parametrize("labels", [[0.0, 1.0, 2.0], ["0", "1.0"], [1, 2.5]])
def test_a_line_says_that_decimals_are_regression_and_how_to_have_classes(
    make: Any, labels: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make(*labels).setup("fit")
        make(*labels, problem_type="regression").setup("fit")
    shown = next(label for label in labels if "." in str(label))
    line = (
        f"labels such as {shown} are numbers to predict (regression); to have classes, set data.problem_type: single_"
    )
    assert caplog.text.count(line) == 1


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1, 2], [0, 1, 2]),  # all are places, and not all are names
        ([1, 2, 3], [0, 1, 2]),  # all are names
        (["3", "1", "1"], [2, 0, 0]),
    ],
)
def test_numbers_are_all_names_of_classes_or_all_their_places(make: Any, labels: Any, expected: list[int]) -> None:
    data = make(*labels, classes=["1", "2", "3"], batch_size=3)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch["labels"].tolist() == expected


def test_a_validation_label_that_training_does_not_have_is_refused(make: Any, tmp_path: Path) -> None:
    validation = write_rows(tmp_path / "validation.jsonl", [{"text": TEXT, "label": "c"}])
    data = make("a", "b", validation=validation)
    data.setup("fit")
    assert data.classes == ["a", "b"]
    with pytest.raises(
        ValueError, match="validation: a label is 'c', which is none of the 2 classes: the classes are a, b"
    ):
        data.val_dataloader()


def test_a_bad_row_is_named_also_where_a_tokenizer_is_trained_on_it(make: Any) -> None:
    rows = [{"text": TEXT, "label": "a"}, {"text": TEXT}, {"text": TEXT, "label": "b"}]
    with pytest.raises(ValueError, match=r'train: .*rows.jsonl line 2: "label" is missing'):
        make(rows=rows, tokenizer=TrainTokenizer(vocab_size=300)).setup("fit")
    data = make(rows=rows, tokenizer=TrainTokenizer(vocab_size=300), bad_rows="skip")
    with pytest.warns(UserWarning, match="train: 1 bad rows are skipped"):
        data.setup("fit")
    pairs = [{"chosen": "a", "rejected": "b"}]
    with pytest.raises(ValueError, match="make a reward model; set problem_type: reward"):
        make(rows=pairs).setup("fit")


def test_predictions_are_numbered_by_the_rows_of_the_source_also_where_bad_ones_are_left_out(
    make: Any, tmp_path: Path
) -> None:
    predict = write_rows(tmp_path / "predict.jsonl", [{"text": ""}, {"text": TEXT}, {"other": TEXT}, {"text": TEXT}])
    data = make("a", "b", predict=predict, bad_rows="skip", eval_batch_size=3)
    with pytest.warns(UserWarning, match="predict: 2 bad rows are skipped"):
        data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert batch["index"].tolist() == [1, 3, -1]


def test_paragraphs_of_pydoc_are_labeled_with_their_topics(make: Any) -> None:
    data = make(train="pydoc", validation_fraction=0.1, batch_size=4, seq_length=128)
    with pytest.warns(UserWarning, match="are cut"):
        data.setup("fit")
    assert len(data.classes) == 8
    assert len(data.train_dataloader()) > 100
