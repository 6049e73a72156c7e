import json
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest

from lit_fsdp.sharding.mesh import DataRanks
from lit_fsdp.tasks import RayTextData, TextData, TrainTokenizer
from lit_fsdp.tasks.text.batches import PackedRows, stack_rows
from lit_fsdp.tasks.text.ray_text import PassLoader, StreamedRows, read_tables, tokenize
from lit_fsdp.tasks.text.rows import RowFormat
from lit_fsdp.tasks.text.streaming import Document, HeldDocuments
from lit_fsdp.tasks.text.tokenizer import train_tokenizer

TEXTS = [f"word {i} " * (1 + i * i % 17) for i in range(30)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    train_tokenizer(TEXTS, TrainTokenizer(vocab_size=300)).save_pretrained(str(tmp_path))
    return str(tmp_path)


def test_streamed_documents_make_the_rows_of_documents_on_disk() -> None:
    random = np.random.default_rng(0)
    passes = [
        [
            (random.integers(300, size=n, dtype=np.int32), random.random(n) < 0.7)
            for n in random.integers(1, 60, size=40)
        ]
        for _ in range(2)
    ]
    whole = HeldDocuments([*passes[0], *passes[1]])
    expected = PackedRows(whole, np.arange(80), seq_length=16, pad_id=0)
    num_whole = int(whole.lengths.sum()) // 16
    streamed = StreamedRows(lambda number: passes[number], seq_length=16, pad_id=0)
    for i, row in enumerate(islice(streamed, num_whole)):
        for name, values in expected[i].items():
            np.testing.assert_array_equal(row[name], values, err_msg=f"{name} of row {i}")


def test_a_rank_without_documents_ends_instead_of_waiting() -> None:
    with pytest.raises(ValueError, match="no document to this rank"):
        next(iter(StreamedRows(lambda _: [], seq_length=16, pad_id=0)))


def test_a_resumed_stream_begins_a_new_pass_and_says_so() -> None:
    opened: list[int] = []

    def open_pass(number: int) -> list[Document]:
        opened.append(number)
        return [(np.arange(8, dtype=np.int32), np.ones(8, dtype=np.bool_))]

    def build(trainer: Any = None) -> PassLoader:
        rows = StreamedRows(open_pass, seq_length=8, pad_id=0)
        return PassLoader(rows, trainer=trainer, batch_size=1, collate_fn=stack_rows)

    first, resumed = build(), build()
    for _ in islice(first, 3):
        pass
    assert opened == [0, 1, 2]
    with pytest.warns(UserWarning, match=r"pass 3 of the stream is not gone on with: a new one begins"):
        resumed.load_state_dict(first.state_dict())
    next(iter(resumed))
    assert opened[-1] == 3, "not the order of the first pass again"

    loop = SimpleNamespace(_combined_loader_states_to_load=[first.state_dict()])  # which Lightning keeps between epochs
    with pytest.warns(UserWarning, match=r"pass 3 of the stream is not gone on with"):
        between_epochs = build(SimpleNamespace(fit_loop=loop, overfit_batches=0.0))
    next(iter(between_epochs))
    assert opened[-1] == 3


CHAT = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "One more."}]
CALL = {"function": {"name": "f", "arguments": {"day": "2020-01-01", "n": 1, "none": None}}}
OTHER_CALL = {"function": {"name": "g", "arguments": {"n": 1.5, "day": ["a"]}}}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "rows.jsonl",
            [
                *[{"text": text} for text in (*TEXTS, "2020-01-01")],
                {"prompt": "What", "completion": "word 3"},
                {"messages": CHAT},
                {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [CALL, OTHER_CALL]}]},
            ],
        ),
        ("DATES.JSONL", [{"text": "2020-01-01"}]),
        ("rows.csv", 'prompt,completion\n"1\nis ",007\n2,1.50\n'),
    ],
)
def test_ray_makes_the_tokens_that_text_data_makes(name: str, rows: Any, folder: str, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or (m.tool_calls | tojson) }}<|endoftext|>{% endfor %}"
    )
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    path = tmp_path / name
    path.write_text(rows if isinstance(rows, str) else "".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"tokenizer": folder, "chat_template": template, "seq_length": 16}
    on_disk = TextData(train=str(path), cache_dir=str(tmp_path / "cache"), **settings)
    on_disk.setup("fit")
    store = on_disk.train_dataloader().dataset.store  # type: ignore[attr-defined]
    data = RayTextData(train=str(path), **settings)
    given = {"chat_template": data.chat_template, "row_format": data.row_format, "skips_bad_rows": False}
    (read,) = read_tables(str(path), pa.fs.LocalFileSystem())
    table = tokenize(read, tokenizer=folder, **given)
    assert table["ids"].to_pylist() == [store[i][0].tolist() for i in range(len(store))]
    assert table["learn"].to_pylist() == [store[i][1].tolist() for i in range(len(store))]


def test_bad_rows_of_a_stream_end_the_run_or_are_left_out(folder: str) -> None:
    rows = pa.Table.from_pylist([{"text": "good"}, {"text": " "}])
    settings = {"tokenizer": folder, "chat_template": None, "row_format": RowFormat()}
    with pytest.raises(ValueError, match=r'train: the row .*"text" is empty'):
        tokenize(rows, skips_bad_rows=False, **settings)
    assert len(tokenize(rows, skips_bad_rows=True, **settings)) == 1


def test_processes_of_ray_in_another_folder_find_files_and_tokenizer(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def read(paths: list[str], **_: Any) -> Any:
        given["paths"] = paths
        return SimpleNamespace(map_batches=lambda _, *, fn_kwargs, **__: given.update(fn_kwargs))

    module = SimpleNamespace(data=SimpleNamespace(read_parquet=read))
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.data", module.data)
    monkeypatch.chdir(Path(folder).parent)
    here, name = Path(folder).parent, Path(folder).name
    RayTextData(train=["a.parquet", "s3://bucket/b.parquet"], tokenizer=name).make_ray_datasets()
    assert given["paths"] == [str(here / "a.parquet"), "s3://bucket/b.parquet"]
    assert given["tokenizer"] == str(here / name)
    RayTextData(train="~/a.parquet", tokenizer="org/name").make_ray_datasets()
    assert (given["paths"], given["tokenizer"]) == ([str(Path.home() / "a.parquet")], "org/name")


def test_a_file_that_is_not_there_is_named_with_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(paths: list[str], **_: Any) -> Any:
        raise FileNotFoundError(paths[-1])

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=SimpleNamespace(read_parquet=read)))
    monkeypatch.setitem(sys.modules, "ray.data", sys.modules["ray"].data)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.parquet").touch()
    (tmp_path / "rows").mkdir()
    data = RayTextData(train=["part.parquet", "prat.parquet"], tokenizer="t")
    with pytest.raises(ValueError, match=r"train: .*/prat\.parquet: no such file .* did you mean .*/part\.parquet\?"):
        data.make_ray_datasets()
    with pytest.raises(ValueError, match=r"train: .*\*\.parquet: no such file or folder; Ray reads no patterns"):
        RayTextData(train="*.parquet", tokenizer="t").make_ray_datasets()
    with pytest.raises(ValueError, match=r"train: .*/rosw: no such file .* did you mean .*/rows\?"):
        RayTextData(train="rosw", tokenizer="t")


def test_settings_that_a_stream_cannot_keep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train: got a\.txt: expected files or folders of one kind: \.parquet"):
        RayTextData(train="a.txt", tokenizer="t")
    with pytest.raises(ValueError, match="of one kind"):
        RayTextData(train=["a.jsonl", "b.csv"], tokenizer="t")
    with pytest.raises(ValueError, match=r"validation_fraction: .*set validation"):
        RayTextData(train="a.csv", tokenizer="t", validation_fraction=0.1)
    with pytest.raises(ValueError, match="packing: got false"):
        RayTextData(train="a.csv", tokenizer="t", packing=False)
    with pytest.raises(ValueError, match=r"share: got 'auto': .*leave it out"):
        RayTextData(train="a.csv", tokenizer="t", share="auto")
    data = RayTextData(train="a.csv", tokenizer="t")
    with pytest.raises(ValueError, match="train: a stream is not looked at"):
        data.make_preview("train", 3)
    loops = {"max_steps": -1, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}
    alone = SimpleNamespace(world_size=1, global_rank=0, strategy=SimpleNamespace(), **loops)
    data.trainer = alone  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"max_steps: got -1: RayTextData streams .* set trainer\.max_steps"):
        data.train_dataloader()
    for ended in ({"max_steps": 5}, {"limit_train_batches": 8}):
        vars(alone).update(loops | ended)
        with pytest.raises(
            ValueError, match="train: Ray streams nothing to this process" if find_spec("ray") else "needs Ray"
        ):
            data.train_dataloader()
    ranks = SimpleNamespace(data_ranks=DataRanks(count=2, index=0))  # of 4: pairs see the same rows
    data.trainer = SimpleNamespace(world_size=4, global_rank=0, strategy=ranks)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"train: Ray deals different documents .*mesh\.tensor 1"):
        data.train_dataloader()
