"""Text that streams: the rows of TextData, the same on any number of ranks and workers and after any resume."""

import csv
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from launches import fork_ranks, write_run
from lightning.pytorch import LightningModule
from PIL import Image
from torch import Tensor
from training import build_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import TextData, TrainTokenizer
from lit_fsdp.tasks.data import refuse_endless
from lit_fsdp.tasks.text.rows import Columns, RowFormat
from lit_fsdp.tasks.text.sources import DatasetPart, StreamedPart, list_shards
from lit_fsdp.tasks.text.streaming import StreamLoader, StreamSource
from lit_fsdp.tasks.text.tokenizer import train_tokenizer
from ranks import run_ranks

CHAT = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "One more."}]
ROWS = [
    {"prompt": "What", "completion": f"word {i}"} if i % 3 else {"text": f"word {i} " * (1 + i * i % 17)}
    for i in range(150)
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    train_tokenizer((str(row) for row in ROWS), TrainTokenizer(vocab_size=300)).save_pretrained(str(folder / "t"))
    (folder / "rows").mkdir()
    for number in range(3):
        rows = [*ROWS[number * 50 : number * 50 + 50], {"messages": CHAT}]
        lines = [f"{json.dumps(row)}\n" for row in rows]
        lines.insert(5, "\n")  # which is no row
        (folder / "rows" / f"{number}.jsonl").write_text("".join(lines if number else [*lines, "not json\n"]))
    (folder / "own.jsonl").write_text("".join(f"{json.dumps({'body': f'body {i} ' * 3})}\n" for i in range(40)))
    return folder


def list_sources(folder: Path, *weights: float) -> list[dict[str, Any]]:
    """Return two sources with columns of their own, with weights if there are any."""
    sources: list[dict[str, Any]] = [{"path": str(folder / "rows")}]
    sources.append({"path": str(folder / "own.jsonl"), "columns": {"text": "body"}})
    return [{**source, **({"weight": weights[n]} if weights else {})} for n, source in enumerate(sources)]


def build(folder: Path, **settings: Any) -> TextData:
    given = {"train": str(folder / "rows"), "tokenizer": str(folder / "t"), "chat_template": TEMPLATE, "num_workers": 0}
    given |= {"bad_rows": "skip", "seq_length": 16, "cache_dir": str(folder / "cache")}
    given |= {"shuffle_buffer_size": 70} if settings.get("streaming") else {}
    return TextData(**{**given, **settings})


def load(data: TextData, *, rank: int = 0, num_ranks: int = 1, state: dict[str, Any] | None = None) -> StreamLoader:
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        world_size=num_ranks,
        global_rank=rank,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(_combined_loader_states_to_load=[]),
        overfit_batches=0,
        max_steps=1000,
        accumulate_grad_batches=1,
        limit_train_batches=1.0,
        current_epoch=0,
        train_dataloader=None,
    )
    data.setup("fit")
    loader = data.train_dataloader()
    assert isinstance(loader, StreamLoader)
    if state is not None:
        loader.load_state_dict({**state, "global_batch_size": sum(loader.rows)})  # without Lightning's counts
    return loader


def take(loader: StreamLoader, num_rows: int) -> list[dict[str, Tensor]]:
    """Return rows, without the padding of their batches."""
    found: list[dict[str, Tensor]] = []
    for batch in loader:
        sizes = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum(1).tolist()
        rows = [{name: values[i, :size] for name, values in batch.items()} for i, size in enumerate(sizes)]
        found += rows
        if len(found) >= num_rows:
            break
    return found


def assert_same(own: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(own) == len(expected)
    for number, (row, other) in enumerate(zip(own, expected, strict=True)):
        for name in other:
            assert torch.equal(row[name], other[name]), f"{name} of row {number}"


@pytest.mark.parametrize(("packing", "is_list"), [(True, False), (False, False), (True, True)])
def test_a_stream_in_order_gives_the_rows_of_text_data(folder: Path, packing: bool, is_list: bool) -> None:
    build_here = partial(build, folder, **({"train": list_sources(folder)} if is_list else {}))
    with pytest.warns(UserWarning, match=r"train(\[0\])?: 1 bad rows are skipped"):
        stored = build_here(shuffle=False, packing=packing)
        stored.setup("fit")
    rows = stored.train_dataloader().dataset
    num_whole = len(rows) - packing
    expected = [{name: torch.from_numpy(values) for name, values in rows[i].items()} for i in range(num_whole)]
    with pytest.warns(
        UserWarning, match=r"train: 1 bad row is skipped by now, the last: .*0\.jsonl line 53: not valid JSON"
    ):
        own = take(load(build_here(shuffle=False, packing=packing, streaming=True)), num_whole)
    assert_same(own, expected)
    assert num_whole > 100


@pytest.mark.full(after=1)
@pytest.mark.filterwarnings("ignore:train. 1.* bad row")
@pytest.mark.parametrize(("packing", "weights"), [(True, ()), (False, ()), (True, (2, 1)), (False, (1, 4))])
def test_ranks_and_resumes_anywhere_see_the_same_rows(folder: Path, packing: bool, weights: tuple[float, ...]) -> None:
    settings = {"streaming": True, "packing": packing, "pad_to_multiple_of": 1}
    settings |= {"train": list_sources(folder, *weights)} if weights else {}
    num_rows = 600  # more than two passes
    expected = take(load(build(folder, **settings, batch_size=1)), num_rows)
    of_ranks = [take(load(build(folder, **settings, batch_size=2), rank=r, num_ranks=3), 200) for r in range(3)]
    together = [row for k in range(0, 200, 2) for rows in of_ranks for row in rows[k : k + 2]]
    assert_same(together, expected)
    unequal = [
        take(load(build(folder, **settings, batch_size=2, share=[3, 1]), rank=r, num_ranks=2), 50) for r in (0, 1)
    ]
    assert_same(unequal[0][:3] + unequal[1][:1] + unequal[0][3:6], expected[:7])
    loader = load(build(folder, **settings, batch_size=1))
    states = [loader.state_dict() for _ in islice(loader, num_rows)]
    for seen in (1, 2, 63, 64, 65, 70, 71, 140, 251, 252, 253, 400, 599):
        state = json.loads(json.dumps(states[seen - 1]))
        resumed = load(build(folder, **settings, batch_size=1), state=state)
        assert_same(take(resumed, min(num_rows - seen, 80)), expected[seen : seen + 80])
        assert resumed.state_dict()["samples_seen"] == min(num_rows, seen + 80)


def test_each_pass_has_all_rows_in_an_order_of_its_own(folder: Path) -> None:
    settings = {"streaming": True, "packing": False, "train": str(folder / "rows" / "1.jsonl"), "seq_length": 500}
    by_order = [
        [tuple(row["input_ids"].tolist()) for row in take(load(build(folder, **settings, **changes)), 102)]
        for changes in ({"shuffle": False}, {}, {"seed": 1})
    ]
    passes = [rows[begin : begin + 51] for rows in by_order for begin in (0, 51)]
    assert all(sorted(rows) == sorted(passes[0]) for rows in passes)
    assert passes[0] == passes[1]
    assert len({tuple(rows) for rows in passes}) == 5


def test_sources_with_weights_give_their_shares_at_any_time(folder: Path) -> None:
    """And each of them all of its rows, before any comes again."""
    train = [{"path": str(folder / "rows" / "1.jsonl"), "weight": 0.7}, {**list_sources(folder)[1], "weight": 0.3}]
    settings = {"streaming": True, "packing": False, "train": train, "seq_length": 500, "shuffle_buffer_size": 20}
    stored = build(folder, packing=False, train=train, seq_length=500)
    stored.setup("fit")
    names = [{tuple(store[n][0].tolist()) for n in range(len(store))} for store in stored._stores["train"].stores]
    assert [len(rows) for rows in names] == [51, 40]
    rows = [tuple(row["input_ids"].tolist()) for row in take(load(build(folder, **settings)), 400)]
    own = [[row for row in rows if row in of_source] for of_source in names]
    for size in range(20, 401, 20):  # a block is shuffled
        assert sum(row in names[0] for row in rows[:size]) == round(0.7 * size)
    for of_source, found in zip(names, own, strict=True):
        assert set(found[: len(of_source) + 20]) == of_source  # a pass ends within a block
        counts = [found.count(row) for row in of_source]
        assert max(counts) - min(counts) <= 1
    other = [tuple(row["input_ids"].tolist()) for row in take(load(build(folder, **settings, seed=1)), 400)]
    assert other != rows
    data = build(folder, **settings)
    data.setup("fit")
    assert len(data.make_preview("train", 3).lengths) >= 91


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:train. 1.* bad row")
def test_workers_of_files_and_of_shards_give_the_rows_of_the_main_process(folder: Path, tmp_path: Path) -> None:
    data = build(folder, streaming=True)
    data.setup("fit")
    for number in range(5):  # datasets takes no file that is not JSON, nor one of other columns
        rows = "".join(f"{json.dumps({'text': f'{number} word {i} ' * 5})}\n" for i in range(100))
        (tmp_path / f"{number}.jsonl").write_text(rows)
    shards = list_shards(str(tmp_path), "train")
    assert len(shards) == 5
    assert [row.fields["text"] for row in shards[1].read_after(98)] == ["1 word 98 " * 5, "1 word 99 " * 5]
    sources = [StreamSource(parts=[(part, data.row_format) for part in shards])]
    weighted = [StreamSource(parts=sources[0].parts[n : n + 4], weight=weight) for n, weight in ((0, 1.5), (4, 1.0))]
    for given in (None, sources, weighted):
        taken = []
        for num_workers in (0, 2):
            loader = load(build(folder, streaming=True, num_workers=num_workers, batch_size=2))
            loader.stream.sources = given or loader.stream.sources
            loader.place = loader.stream.begin
            first = take(loader, 300)
            state = loader.state_dict()
            resumed = load(build(folder, streaming=True, num_workers=num_workers, batch_size=2), state=state)
            resumed.stream.sources = given or resumed.stream.sources
            taken.append([*first, *take(resumed, 100)])
        assert_same(taken[1], taken[0])


def test_a_resume_of_other_rows_or_in_another_order_is_refused(folder: Path) -> None:
    state = load(build(folder, streaming=True)).state_dict()
    load(build(folder, streaming=True, num_workers=1, batch_size=4), state=state)
    changes = {"train": str(folder / "rows" / "1.jsonl")}, {"columns": Columns(text="body")}
    for change in ({"shuffle": False}, {"seed": 1}, {"seq_length": 8}, *changes):
        with pytest.raises(ValueError, match=r"saved in a stream of other rows, or in another order: restore train, "):
            load(build(folder, streaming=True, **change), state=state)
    mixed = [partial(build, folder, streaming=True, train=list_sources(folder, 1, weight)) for weight in (1, 2)]
    state = load(mixed[0]()).state_dict()
    load(mixed[0](), state=state)
    with pytest.raises(ValueError, match="saved in a stream of other rows"):
        load(mixed[1](), state=state)
    with pytest.raises(ValueError, match=r"streaming: got true: the checkpoint was saved without it"):
        load(build(folder, streaming=True), state={"epoch": 0, "samples_seen": 4})


def test_a_resume_after_lines_of_a_file_were_shuffled_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its name and size are the same."""
    file = tmp_path / "rows.txt"
    rows = [f"row {n:04} of a stream\n" for n in range(2000)]
    file.write_text("".join(rows))
    build_here = partial(build, folder, streaming=True, train=str(file), txt_documents="line")
    state = load(build_here()).state_dict()
    load(build_here(), state=state)
    file.write_text("".join(reversed(rows)))
    with pytest.raises(ValueError, match=r"saved in a stream of other rows"):
        load(build_here(), state=state)


def test_a_saved_data_set_is_known_by_its_rows_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    texts = [f"row {n:02} of a stream" for n in range(20)]
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    for place, rows in (("a", texts), ("b", texts), ("c", texts[::-1])):
        columns = {"text": rows, "image": [Image.new("L", (2, 2)) for _ in rows]}  # which is not read, nor decoded
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / place / "rows"))
    streams = {name: load(build(folder, streaming=True, train=str(tmp_path / name / "rows"))) for name in "abc"}
    streams["b"].load_state_dict(streams["a"].state_dict())
    with pytest.raises(ValueError, match=r"saved in a stream of other rows"):
        streams["c"].load_state_dict(streams["a"].state_dict())


def test_what_a_stream_cannot_keep_is_refused_before_it_is_read(folder: Path) -> None:
    for settings, problem in (
        ({"validation_fraction": 0.1}, "validation_fraction: a stream has no share to hold out: set validation"),
        ({"tokenizer": TrainTokenizer(vocab_size=300)}, "tokenizer: a stream is not read to train one"),
        ({"share": "auto"}, r"share: got 'auto' with streaming: give a number for each rank"),
        ({"train": [{"path": "a.jsonl", "weight": 0.7}, "b.jsonl"]}, r"train\[1\]\.weight: missing: expected one"),
        ({"packing": False, "group_by_length": True}, "group_by_length: got true with streaming"),
        ({"shuffle_buffer_size": 0}, "shuffle_buffer_size: got 0: expected 1 or more"),
    ):
        with pytest.raises(ValueError, match=problem):
            build(folder, streaming=True, **settings)
    with pytest.raises(ValueError, match=r"shuffle_buffer_size: got 70: only a stream is shuffled in parts: leave it"):
        build(folder, shuffle_buffer_size=70)
    data = build(folder, streaming=True)
    endless = SimpleNamespace(max_steps=-1, limit_train_batches=1.0, accumulate_grad_batches=1)
    with pytest.raises(ValueError, match=r"max_steps: got -1: TextData streams train .*: set trainer\.max_steps"):
        refuse_endless(endless, data)  # type: ignore[arg-type]
    refuse_endless(endless, build(folder))  # type: ignore[arg-type]
    data.setup("fit")
    data.trainer = endless  # type: ignore[assignment]  # in a script, which no command line has checked
    with pytest.raises(ValueError, match=r"max_steps: got -1: TextData streams train .*: set trainer\.max_steps"):
        data.train_dataloader()


@pytest.mark.filterwarnings("ignore:train. 1.* bad row")
def test_a_stream_without_a_good_row_ends_and_a_bad_one_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n" * 100)
    settings = {"streaming": True, "train": str(tmp_path / "bad.jsonl")}
    with pytest.raises(ValueError, match=r"train: .*bad\.jsonl line \d+: the row has: no fields"):
        take(load(build(folder, **settings, bad_rows="error")), 1)
    with (
        pytest.warns(UserWarning, match="100 bad rows are skipped by now"),
        pytest.raises(ValueError, match=r"train: no row of the whole stream is good"),
    ):
        take(load(build(folder, **settings)), 1)
    two = {"train": [{"path": str(folder / "rows" / "1.jsonl"), "weight": 9}, {**list_sources(folder)[1], "weight": 1}]}
    two["train"][1]["columns"] = {"text": "bdy"}  # which none of its rows has
    with pytest.raises(ValueError, match="train: no row of source 2 of 2 is good: expected at least one"):
        take(load(build(folder, streaming=True, **two)), 1000)
    data = build(folder, streaming=True, **two)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"train: none of the first \d+ rows of source 2 of 2 is good, the first: "):
        data.make_preview("train", 3)
    # A good row that comes again and again within a block, and is in few of its chunks.
    (tmp_path / "one.jsonl").write_text('{"text": "alone"}\n')
    two["train"] = [
        {"path": str(folder / "rows" / "1.jsonl"), "weight": 99},
        {"path": f"{tmp_path}/one.jsonl", "weight": 1},
    ]
    loader = load(build(folder, streaming=True, packing=False, shuffle_buffer_size=1000, **two))
    assert len(take(loader, 5000)) == 5000
    assert loader.place.sources[1].num_passes > 30
    empty = load(build(folder, streaming=True))
    part = DatasetPart(name="empty", dataset=datasets.Dataset.from_dict({"text": []}))
    empty.stream.sources = [StreamSource(parts=[(part, RowFormat())])]
    with pytest.raises(ValueError, match="train: there are no rows"):
        take(empty, 1)
    data = build(folder, **settings)
    data.setup("fit")
    with pytest.raises(ValueError, match="train: none of the first 100 rows is good, the first: "):
        data.make_preview("train", 3)


def lose_the_line(num_rows: int) -> Iterator[dict[str, str]]:
    yield from ({"text": f"word {i}"} for i in range(num_rows))
    raise ConnectionError("the line was cut\nby whom nobody knows")


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_shard_that_cannot_be_read_on_is_named_in_one_line(folder: Path, num_workers: int) -> None:
    loader = load(build(folder, streaming=True, num_workers=num_workers))
    shard = datasets.IterableDataset.from_generator(lose_the_line, gen_kwargs={"num_rows": 100})
    part = StreamedPart(name="a/b shard 1 of 1", dataset=shard, revision="")
    loader.stream.sources = [StreamSource(parts=[(part, RowFormat())])]
    problem = (
        r"^train: a/b shard 1 of 1 after row 64: cannot be read on: ConnectionError: the line was cut; --ckpt_path"
    )
    with pytest.raises(ValueError, match=problem):
        take(loader, 1000)


@pytest.mark.filterwarnings("ignore:train. 1.* bad row")
def test_a_preview_shows_what_the_stream_begins_with(folder: Path) -> None:
    data = build(folder, streaming=True)
    loader = load(data)
    for _ in range(2):  # the second time from another place on
        take(loader, 50)
    found = data.make_preview("train", 3)
    first = take(load(build(folder, streaming=True)), 3)
    assert [[i for piece in row for i in piece.ids] for row in found.rows] == [r["input_ids"].tolist() for r in first]
    assert found.describe()[0].startswith("what the stream begins with: 153 documents, ")
    assert (found.num_bad, found.efficiency) == (1, 1.0)
    assert data.make_section() is not None
    strict = build(folder, streaming=True, bad_rows="error")
    strict.setup("fit")
    with pytest.raises(ValueError, match=r"train: .*0\.jsonl line 53: not valid JSON"):  # as training would
        strict.make_preview("train", 3)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_field_of_a_stream_that_is_not_read_is_named_once(folder: Path, tmp_path: Path, num_workers: int) -> None:
    rows = [{"prompt": "What", "completion": f"word {i}", "system": "short" * (i % 4)} for i in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loader = load(build(folder, streaming=True, train=str(tmp_path / "rows.jsonl"), num_workers=num_workers))
    with pytest.warns(UserWarning, match=r'train: of \d+ rows, \d+ rows have "system" beside a prompt') as warned:
        take(loader, 100)
    assert sum('have "system"' in str(one.message) for one in warned) == 1
    stored = build(folder, train=str(tmp_path / "rows.jsonl"))
    with pytest.warns(UserWarning, match='60 rows have "system"'):
        stored.setup("fit")
    streamed = build(folder, streaming=True, train=str(tmp_path / "rows.jsonl"))
    streamed.setup("fit")
    found = [data.make_preview("train", 1).num_unread for data in (stored, streamed)]
    assert found == [{"system": 60}, {"system": 60}]


class Seen(LightningModule):
    """Writes down what all ranks see, and the steps after which it validates; saves checkpoints."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.out, self.found = out, {"rows": [], "validated": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, [str(row[row >= 0].tolist()) for row in batch["labels"]])
        self.found["rows"] += [row for rows in found for row in rows]
        return self.layer(torch.ones(1, 1)).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, rest = divmod(batch_idx + 1, self.trainer.accumulate_grad_batches)
        if not rest and step in (2, 4):
            self.trainer.save_checkpoint(f"{self.out}_{step}.ckpt")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.found["validated"].append(self.trainer.global_step)

    def on_train_end(self) -> None:
        if dist.get_rank() == 0:
            self.out.write_text(json.dumps({**self.found, "steps": self.trainer.global_step}))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def see(folder: Path, out: Path, source: Path | None, num_accumulated: int) -> None:
    data = build(folder, streaming=True, validation=str(folder / "rows" / "1.jsonl"))
    options = {"max_steps": 12, "max_epochs": 1, "val_check_interval": 3 * num_accumulated, "num_sanity_val_steps": 0}
    options |= {"accumulate_grad_batches": num_accumulated, "gradient_clip_val": None}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), **options)
    trainer.fit(Seen(out), datamodule=data, ckpt_path=source)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:train. 1.* bad row")
def test_a_run_goes_on_for_all_of_its_steps_with_fewer_rows_in_each(folder: Path, tmp_path: Path) -> None:
    found = {}
    runs = (("whole", 3, 1, None), ("ranks", 1, 1, "whole_2"), ("same", 1, 3, "whole_2"), ("fewer", 1, 1, "same_4"))
    for name, num_ranks, num_accumulated, source in runs:
        checkpoint = None if source is None else tmp_path / f"{source}.ckpt"
        run_ranks(see, folder, tmp_path / name, checkpoint, num_accumulated, world_size=num_ranks)
        found[name] = json.loads((tmp_path / name).read_text())
        validated = [6, 9, 12] if name == "fewer" else [3, 6, 9, 12]
        assert (found[name]["steps"], found[name]["validated"]) == (12, validated), name
    rows = found["whole"]["rows"][6:]
    assert (len(rows), found["same"]["rows"]) == (30, rows)
    assert (found["ranks"]["rows"], found["fewer"]["rows"]) == (rows[:10], rows[6:14])


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step, by the last run that has it."""
    found: dict[int, float] = {}
    for file in sorted(folder.glob("runs/*/version_*/metrics.csv")):
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
        found |= {int(row["step"]): float(row["train/loss"]) for row in rows if row.get("train/loss")}
    return found


@pytest.mark.full
def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"every_n_train_steps": 3, "save_top_k": -1, "save_on_train_epoch_end": False}
    class_path = "lightning.pytorch.callbacks.ModelCheckpoint"
    trainer = {
        "strategy": "fsdp2",
        "max_steps": 8,
        "callbacks": [{"class_path": class_path, "init_args": checkpoint}],
        "val_check_interval": 1.0,
        "log_every_n_steps": 1,
    }
    data = {"streaming": True, "train": "rows", "validation": "train.jsonl", "bad_rows": "skip", "num_workers": 1}
    data |= {"tokenizer": "t", "batch_size": 2, "global_batch_size": 8, "shuffle_buffer_size": 20}
    losses = {}
    for name in ("whole", "killed", "elastic"):
        folder = tmp_path / name
        folder.mkdir()
        write_run(folder, trainer=trainer, data=data)
        lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
        (folder / "rows").mkdir()
        for number in range(3):
            (folder / "rows" / f"{number}.jsonl").write_text("".join([*lines[number::3], "not json\n"]))
        train_tokenizer(lines, TrainTokenizer(vocab_size=300)).save_pretrained(str(folder / "t"))
        monkeypatch.chdir(folder)

        def kill_after_step_6(pids: list[int]) -> None:
            deadline = time.monotonic() + 60
            while not list(Path().glob("runs/*/version_0/checkpoints/*step=6.ckpt/complete.json")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        is_killed, command = name != "whole", ("fit", "--config", "run.yaml")
        ended = fork_ranks(*command, timeout_s=90, meanwhile=kill_after_step_6 if is_killed else None)
        assert [end.code for end in ended] == ([-signal.SIGKILL] * 2 if is_killed else [0, 0]), ended[0].err
        if is_killed:
            ranks = 1 if name == "elastic" else 2
            ended = fork_ranks(*command, "--ckpt_path", "last", ranks=ranks, timeout_s=90)
            assert [end.code for end in ended] == [0] * ranks, ended[0].err
        losses[name] = read_losses(folder)
    assert sorted(losses["whole"]) == list(range(8))
    for name, tolerance in (("killed", 0), ("elastic", 1e-6)):
        assert {6, 7} < losses[name].keys()  # what a killed run had last may not be on disk
        expected = {step: losses["whole"][step] for step in losses[name]}
        assert losses[name] == pytest.approx(expected, abs=tolerance, rel=0)
    assert len(set(losses["whole"].values())) == 8
