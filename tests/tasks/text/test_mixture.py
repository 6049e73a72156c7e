import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict
from lightning.pytorch import LightningModule
from training import build_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import TextData
from lit_fsdp.tasks.text.mixture import share_out
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, train_tokenizer
from ranks import run_ranks

SIZES = {"a": 12, "b": 40}


def make_text(name: str, number: int) -> str:
    return f"{name}{number} " + "word " * (number * 5 % 13 + 1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [make_text(name, number) for name, size in SIZES.items() for number in range(size)]
    train_tokenizer(texts, TrainTokenizer(vocab_size=300)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, size in SIZES.items():
        rows = [{"text": make_text(name, number)} for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tokenizer").symlink_to(tokenizer)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mix(*weights: float) -> list[str | dict[str, Any]]:
    return [{"path": f"{name}.jsonl", "weight": weight} for name, weight in zip(SIZES, weights, strict=True)]


def make(train: Any, **options: Any) -> TextData:
    options = {"tokenizer": "tokenizer", "packing": False, "seq_length": 32, "batch_size": 2, **options}
    data = TextData(train=train, cache_dir="cache", num_workers=0, **options)
    data.setup("fit")
    return data


def read_rows(data: TextData) -> list[str]:
    """Return the rows of an epoch as text, before they are shuffled."""
    rows = data.train_dataloader().dataset
    return [data.tokenizer.decode(rows[i]["input_ids"]) for i in range(len(rows))]


def test_an_epoch_has_the_share_of_each_source_exactly_and_evenly_spread(folder: Path) -> None:
    def read(**options: Any) -> list[str]:
        return [row.split()[0] for row in read_rows(make(mix(0.7, 0.3), **options))]

    rows = read()
    assert len(rows) == 52
    for end in range(1, 53):  # no stretch of the epoch has another mixture
        assert abs(sum(row[0] == "a" for row in rows[:end]) - end * 36 / 52) < 1
    times = Counter(rows)
    assert {name: times[name] for name in times if name[0] == "a"} == {f"a{number}": 3 for number in range(12)}
    assert [number for name, number in times.items() if name[0] == "b"] == [1] * 16
    assert read() == rows
    assert {row for row in read(seed=1) if row[0] == "b"} != {row for row in rows if row[0] == "b"}
    assert [row for row in read(shuffle=False) if row[0] == "b"] == [f"b{number}" for number in range(16)]


def test_shares_add_up_to_all_rows_and_are_right_to_within_one() -> None:
    assert share_out(10, [1, 1, 1]) == [4, 3, 3]
    for total in (1, 7, 1000):
        counts = share_out(total, weights := [0.5, 1.3, 1e-3, 7])
        assert sum(counts) == total
        assert np.abs(np.array(counts) - total * np.array(weights) / sum(weights)).max() < 1


@pytest.mark.parametrize("packing", [True, False])
def test_a_mixture_is_the_file_that_its_rows_would_make(folder: Path, packing: bool) -> None:
    mixed = make(mix(3, 1), packing=packing)
    texts = read_rows(make(mix(3, 1)))
    Path("whole.jsonl").write_text("".join(json.dumps({"text": text.partition("<|")[0]}) + "\n" for text in texts))
    whole = make("whole.jsonl", packing=packing)
    rows, expected = (data.train_dataloader().dataset for data in (mixed, whole))
    assert len(rows) == len(expected)
    for i in range(len(rows)):
        assert {name: row.tolist() for name, row in rows[i].items()} == {
            name: row.tolist() for name, row in expected[i].items()
        }
    found, whole_found = mixed.make_preview("train", 2), whole.make_preview("train", 2)
    assert found.describe()[:-2] == whole_found.describe()
    assert found.rows == whole_found.rows
    assert [(one.num_drawn, one.num_used, one.num_documents) for one in found.sources] == [(39, 12, 12), (13, 13, 40)]
    assert found.describe()[-2:] == [
        f"a.jsonl: 39 rows (75.0%), {found.sources[0].num_tokens:,} tokens, of 12 rows: each comes 3.25 times",
        f"b.jsonl: 13 rows (25.0%), {found.sources[1].num_tokens:,} tokens, of 40 rows: 27 are left out",
    ]
    assert sum(one.num_tokens for one in found.sources) == found.num_kept
    assert found.make_section().numbers["sources"][1]["num_drawn"] == 13


def test_each_source_may_have_columns_and_a_format_of_its_own(folder: Path) -> None:
    Path("c.jsonl").write_text("".join(json.dumps({"said": f"c{i}", "text": "not this"}) + "\n" for i in range(3)))
    sources = ["a.jsonl", {"path": "c.jsonl", "columns": {"text": "said"}, "format": "text"}]
    for tokenizer in ("tokenizer", TrainTokenizer(vocab_size=300)):  # which reads all sources, each in its way
        rows = read_rows(make(sources, tokenizer=tokenizer))
        assert [row.split()[0].partition("<")[0] for row in rows[-4:]] == ["a11", "c0", "c1", "c2"]
        assert len(rows) == 15
    data = make(mix(1, 1), validation_fraction=0.25)
    held_out, rows = data.val_dataloader().dataset.rows, data.train_dataloader().dataset
    assert (len(held_out), len(rows)) == (13, 39)
    assert not set(rows.documents) & set(held_out.documents)


def test_two_splits_of_a_data_set_are_told_apart_and_a_split_that_no_source_takes_is_refused(folder: Path) -> None:
    splits = {name: Dataset.from_dict({"text": [name, name]}) for name in ("one", "two")}
    DatasetDict(splits).save_to_disk("saved")
    sources = [{"path": "saved", "split": name} for name in splits]
    assert [one.name for one in make(sources).make_preview("train", 1).sources] == ["saved [one]", "saved [two]"]
    with pytest.raises(ValueError, match=r"train_split: got 'one': each source has its own split; leave it out"):
        make(sources, train_split="one")
    assert len(read_rows(make([sources[0], "saved", "a.jsonl"], train_split="two"))) == 16


def test_sources_may_be_paths_of_python(folder: Path) -> None:
    for sources in (Path("a.jsonl"), [Path("a.jsonl")], [Path("a.jsonl"), {"path": "b.jsonl", "weight": None}]):
        data = make(sources)
        data.check_stage("fit")
        assert read_rows(data)[:12] == read_rows(make("a.jsonl"))


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ([{"path": "a.jsonl", "wieght": 1}], r"train\[0\].wieght: unknown key: did you mean weight?"),
        ([{"path": "a.jsonl", "columns": {"txt": "a"}}], r"train\[0\].columns.txt: unknown key of .*: did you mean"),
        ([{"weight": 1}], r"train\[0\].path: missing"),
        ([{"path": "a.jsonl", "weight": "x"}], r"train\[0\].weight: got 'x': expected one of int, float or null"),
        ([{"path": "a.jsonl", "format": "chats"}], r"train\[0\].format: got 'chats': expected .* did you mean chat?"),
        ([3], r"train\[0\]: got 3: expected a path, or a mapping such as {path: a.jsonl, weight: 1}"),
        ([["a.jsonl"]], r"train\[0\]: got \['a.jsonl'\]: expected a path, or a mapping"),
        (mix(1, 0), r"train\[1\].weight: got 0: expected more than 0"),
        (mix(-1, 1), r"train\[0\].weight: got -1: expected more than 0"),
        (mix(float("inf"), 1), r"train\[0\].weight: got inf: expected more than 0"),
        ([*mix(1, 1), "pydoc"], r"train\[2\].weight: missing: expected one for each source"),
        (mix(1, 1e-9), r"train\[1\].weight: got 1e-09: of 52 rows that is less than one; raise it"),
        ([*mix(1, 1), {"path": "d.jsonl", "weight": 1}], r"train\[2\]: d.jsonl: no such file"),
        (["a.jsonl", {"path": "b.jsonl", "split": "test"}], r"train\[1\].split: got 'test': b.jsonl has no splits"),
        (
            ["a.jsonl", {"path": "b.jsonl", "columns": {"text": "said"}}],
            r'train\[1\]: b.jsonl line 1: "said" is missing',
        ),
    ],
)
def test_sources_that_cannot_be_are_refused_by_their_place(folder: Path, sources: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(sources).train_dataloader()


def test_weights_are_for_training_and_a_source_needs_rows_to_train_on(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"validation: weights are for train"):
        make("a.jsonl", validation=mix(1, 1))
    Path("one.jsonl").write_text('{"text": "alone"}\n')
    sources = [{"path": "one.jsonl", "weight": 1}, {"path": "a.jsonl", "weight": 1}]
    with pytest.raises(ValueError, match=r"train\[0\] \(one.jsonl\): validation_fraction holds out all of its rows"):
        make(sources, validation_fraction=0.9).train_dataloader()


class Seen(LightningModule):
    """Writes down the first tokens of the rows that all ranks see in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, [str(row[row >= 0].tolist()) for row in batch["labels"]])
        self.rows += [row for rows in found for row in rows]
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(options: dict[str, Any], out: str, resume: str | None, max_steps: int = -1) -> None:
    data = TextData(tokenizer="tokenizer", cache_dir="cache", num_workers=0, **options)
    module = Seen()
    runner = build_trainer(FSDP2Strategy(print_plan=False), gradient_clip_val=None, max_steps=max_steps, max_epochs=2)
    runner.fit(module, datamodule=data, ckpt_path=resume)
    runner.save_checkpoint(f"{out}.ckpt")
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(module.rows))


@pytest.mark.full
@pytest.mark.parametrize(
    "way", [{"packing": True, "seq_length": 16}, {"packing": False}, {"packing": False, "group_by_length": True}]
)
def test_a_mixture_goes_on_at_the_next_row_on_another_number_of_ranks(folder: Path, way: dict[str, Any]) -> None:
    options = {"train": mix(0.7, 0.3), "global_batch_size": 4, **way}
    one, two = {**options, "batch_size": 4}, {**options, "batch_size": 2}
    run_ranks(train, one, "whole", None, world_size=1)
    run_ranks(train, two, "begin", None, 5, world_size=2)
    run_ranks(train, one, "end", "begin.ckpt", world_size=1)
    whole, begin, end = (json.loads(Path(name).read_text()) for name in ("whole", "begin", "end"))
    assert len(begin) == 20 < len(whole) // 2  # within the first epoch
    assert begin + end == whole
    with pytest.raises(RuntimeError, match=r"samples into an epoch whose order has changed since \(the rows are othe"):
        other = {**one, "train": mix(0.6, 0.4)}
        run_ranks(train, other, "other", "begin.ckpt", world_size=1)
