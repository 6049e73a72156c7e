import json
import multiprocessing
import os
import pickle
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from training import EVEN, Recorder, build_trainer
from waiting import count_waiting, run_forks, tell_of_waiting, wait_until

from lit_fsdp import FSDP2Strategy
from lit_fsdp.cache import COMPLETE, read_digests
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.tasks import CausalLM, LoRA, Optimizer
from lit_fsdp.tasks.text import tokens
from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text.rows import Columns
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, train_tokenizer
from ranks import run_ranks

FORK = multiprocessing.get_context("fork")
TEXTS = [f"document {i} says " + "word " * (i % 7 + 1) for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = train_tokenizer(TEXTS, TrainTokenizer(vocab_size=300))
    trained.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    trained.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def make(source: Any, tokenizer: Any, cache: Path, **options: Any) -> TextData:
    options = {"num_workers": 0, "seq_length": 16, "batch_size": 4, **options}
    return TextData(train=None if source is None else str(source), tokenizer=tokenizer, cache_dir=str(cache), **options)


@pytest.fixture
def num_tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gains an entry each time rows are tokenized in this process."""
    calls: list[int] = []
    real = tokens.write_tokens

    def count(*args: Any, **options: Any) -> None:
        calls.append(1)
        real(*args, **options)

    monkeypatch.setattr("lit_fsdp.tasks.text.data.write_tokens", count)
    return calls


def test_a_second_setup_reads_the_cache_until_something_that_matters_changes(
    tmp_path: Path, source: Path, tokenizer: str, num_tokenized: list[int]
) -> None:
    cache = tmp_path / "cache"

    def tokenizations(setting: Any = tokenizer, **options: Any) -> int:
        num_tokenized.clear()
        make(source, setting, cache, **options).setup("fit")
        return len(num_tokenized)

    assert tokenizations() == 1
    assert tokenizations() == 0
    assert tokenizations(seq_length=64, packing=False, batch_size=2, seed=3, validation_fraction=0.2) == 0
    assert tokenizations(TrainTokenizer(vocab_size=280)) == 1
    assert tokenizations(TrainTokenizer(vocab_size=280)) == 0
    os.utime(source, ns=(1, 1))
    assert tokenizations() == 0
    source.write_text(source.read_text().replace("says", "SAYS"))
    os.utime(source, ns=(1, 1))  # of the same size and time as before
    assert tokenizations() == 1
    with source.open("a") as file:
        file.write('{"text": "one more"}\n')
    assert tokenizations() == 1
    assert tokenizations() == 0


def test_of_processes_that_set_up_at_the_same_time_one_tokenizes(tmp_path: Path, source: Path, tokenizer: str) -> None:
    log = tmp_path / "log"
    real = tokens.write_tokens

    def slow(*args: Any, **options: Any) -> None:
        with log.open("a") as file:
            file.write("x")
        wait_until(lambda: count_waiting(tmp_path) == 1)
        real(*args, **options)

    def body() -> None:
        tell_of_waiting(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lit_fsdp.tasks.text.data.write_tokens", slow)
            data = make(source, tokenizer, tmp_path / "cache")
            data.setup("fit")
            assert len(data.train_dataloader()) > 0

    assert run_forks(body, 2) == [0, 0]
    assert log.read_text() == "x"


def test_tokens_of_a_killed_process_are_never_taken_as_complete(tmp_path: Path, source: Path, tokenizer: str) -> None:
    cache, started = tmp_path / "cache", tmp_path / "started"

    def stuck(folder: Path, rows: Any, **options: Any) -> None:
        (folder / tokens.TOKENS).write_bytes(b"1234")
        started.touch()
        time.sleep(600)

    def body() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lit_fsdp.tasks.text.data.write_tokens", stuck)
            make(source, tokenizer, cache).setup("fit")

    process = FORK.Process(target=body, daemon=True)
    process.start()
    wait_until(started.exists)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(120)
    assert not list((cache / "tokens").glob(f"*/{COMPLETE}"))
    data = make(source, tokenizer, cache, packing=False)
    data.setup("fit")
    rows = data.train_dataloader().dataset
    assert [data.tokenizer.decode(rows[i]["input_ids"]) for i in (0, 39)] == [
        TEXTS[i] + "<|endoftext|>" for i in (0, 39)
    ]
    assert not list((cache / "tokens").glob("*.tmp"))


@pytest.mark.parametrize("name", [tokens.TOKENS, tokens.LEARN, tokens.ENDS, tokens.SUMMARY, COMPLETE])
@pytest.mark.parametrize("damage", ["changed", "cut", "lost"])
def test_damaged_tokens_are_made_again(
    tmp_path: Path, source: Path, tokenizer: str, num_tokenized: list[int], name: str, damage: str
) -> None:
    def read() -> list[list[int]]:
        data = make(source, tokenizer, tmp_path / "cache")
        data.setup("fit")
        rows = data.train_dataloader().dataset
        return [rows[i]["labels"].tolist() for i in range(len(rows))]

    before = read()
    (path,) = (tmp_path / "cache" / "tokens").glob(f"*/{name}")
    whole, digests = path.read_bytes(), read_digests(path.parent)
    path.unlink()
    if damage != "lost":
        path.write_bytes(whole[:-1] if damage == "cut" else bytes([whole[0] ^ 1]) + whole[1:])
    assert read() == before
    assert len(num_tokenized) == 2
    assert read_digests(path.parent) == digests
    assert path.read_bytes() == whole or name == COMPLETE  # which holds times as well


def test_shuffled_lines_are_refused_in_the_middle_of_an_epoch(tmp_path: Path, source: Path, tokenizer: str) -> None:
    path = tmp_path / "saved.ckpt"
    run(make(source, tokenizer, tmp_path / "cache"), Seen(), max_steps=1).save_checkpoint(path)
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(reversed(lines)))
    with pytest.raises(ValueError, match=r"saved 4 samples into an epoch .* changed since \(the rows are others\)"):
        run(make(source, tokenizer, tmp_path / "cache"), Seen(), resume=path)
    source.write_text("".join(lines))
    run(make(source, tokenizer, tmp_path / "cache"), Seen(), resume=path)


def test_a_packed_batch_has_positions_and_no_mask_and_a_padded_one_the_opposite(
    tmp_path: Path, source: Path, tokenizer: str
) -> None:
    data = make(source, tokenizer, tmp_path / "cache")
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {name: tuple(t.shape) for name, t in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (4, 16)
    )
    assert {t.dtype for t in batch.values()} == {torch.int64}
    data = make(source, tokenizer, tmp_path / "cache", packing=False, pad_to_multiple_of=5, seq_length=8)
    data.setup("fit")
    with pytest.warns(UserWarning, match=r"train: \d+ of 40 rows are longer than seq_length 8 and are cut"):
        loader = data.train_dataloader()
    batch = next(iter(loader))
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["input_ids"].shape[1] % 5 == 0
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == data.tokenizer.pad_token_id).all()
    kept = batch["attention_mask"] == 1
    assert (batch["labels"][kept] == batch["input_ids"][kept]).all()


def test_held_out_documents_are_the_same_in_every_run_and_not_trained_on(
    tmp_path: Path, source: Path, tokenizer: str
) -> None:
    held_out = []
    for seed in range(2):
        data = make(source, tokenizer, tmp_path / "cache", packing=False, validation_fraction=0.1, seed=seed)
        data.setup("fit")
        train, validation = data.train_dataloader().dataset, data.val_dataloader().dataset.rows
        assert (len(train), len(validation)) == (36, 4)
        assert not set(train.documents) & set(validation.documents)
        held_out.append(validation.documents.tolist())
    assert held_out[0] == held_out[1]
    data = make(source, tokenizer, tmp_path / "cache", validation_fraction=0.99)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"validation_fraction: 0.99 of 40 rows leaves none to train on"):
        data.train_dataloader()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_every_label_once_at_every_world_size(
    tmp_path: Path, source: Path, tokenizer: str, packing: bool, world_size: int
) -> None:
    class Stub:
        strategy = SimpleNamespace(root_device=torch.device("cpu"))

        def __init__(self, global_rank: int) -> None:
            self.global_rank, self.world_size = global_rank, world_size

    data = make(None, tokenizer, tmp_path / "cache", validation=str(source), packing=packing, seq_length=30)
    data.setup("validate")
    rows = data.val_dataloader().dataset.rows
    expected = sum(int((rows[i]["labels"] != -100).sum()) for i in range(len(rows)))
    found, shapes = 0, []
    for rank in range(world_size):
        data.trainer = Stub(rank)  # type: ignore[assignment]
        batches = list(data.val_dataloader())
        found += sum(int((batch["labels"] != -100).sum()) for batch in batches)
        shapes.append([len(batch["input_ids"]) for batch in batches])
    assert found == expected
    assert shapes == [shapes[0]] * world_size


def test_prompts_are_padded_on_the_left_and_numbered(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "document 3"}\n{"text": "document 4 says word word"}\n'
        '{"messages": [{"role": "user", "content": "word"}]}\n'
    )
    data = make(
        None,
        tokenizer,
        tmp_path / "cache",
        predict=str(path),
        eval_batch_size=2,
        loss_on="completion",
        seq_length=64,
    )
    data.setup("predict")
    first, second = data.predict_dataloader()
    assert set(first) == {"input_ids", "attention_mask", "index"}
    assert (first["index"].tolist(), second["index"].tolist()) == ([0, 1], [2, -1])
    mask = first["attention_mask"]
    assert mask[:, -1].all()
    assert not mask[0, 0]
    texts = [data.tokenizer.decode(ids[m == 1]) for ids, m in zip(first["input_ids"], mask, strict=True)]
    assert texts == ["document 3", "document 4 says word word"]
    assert data.tokenizer.decode(second["input_ids"][0][second["attention_mask"][0] == 1]) == "user: word\nassistant: "


def test_a_second_run_of_a_task_saves_the_tokenizer_of_its_own_data(
    tmp_path: Path, source: Path, tokenizer: str
) -> None:
    task = CausalLM(config={"model_type": "llama", "num_hidden_layers": 1, **EVEN, "vocab_size": 300})
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for template in ("first {{ messages }}", "second {{ messages }}"):
        data = make(source, tokenizer, tmp_path / "cache", chat_template=template, validation=str(source))
        trainer = Trainer(accelerator="cpu", limit_val_batches=1, enable_model_summary=False, **quiet)
        trainer.validate(task, data)
        checkpoint: dict[str, Any] = {}
        task.on_save_checkpoint(checkpoint)
        assert checkpoint[EXPORT]["chat_template.jinja"] == template


def test_predictions_are_numbered_by_the_rows_of_the_source_also_where_bad_ones_are_left_out(
    tmp_path: Path, tokenizer: str
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text('{"prompt": "document 3"}\n{"other": ""}\n{"text": "document 4"}\n{"prompt": ""}\n')
    second.write_text('{"prompt": "document 5"}\n')
    settings: dict[str, Any] = {"predict": [{"path": str(first)}, {"path": str(second)}], "bad_rows": "skip"}
    data = make(None, tokenizer, tmp_path / "cache", eval_batch_size=2, **settings)
    with pytest.warns(UserWarning, match="2 bad rows are skipped, 2 are good"):
        data.setup("predict")
    assert [batch["index"].tolist() for batch in data.predict_dataloader()] == [[0, 2], [4, -1]]


def test_too_few_rows_are_refused_with_the_numbers(tmp_path: Path, source: Path, tokenizer: str) -> None:
    data = make(source, tokenizer, tmp_path / "cache", batch_size=4, seq_length=4000)
    data.setup("fit")
    with pytest.raises(
        ValueError,
        match=r"train \(40 documents, \d+ tokens, as rows of 4000 tokens\): 1 rows do not fill one global",
    ):
        data.train_dataloader()


def test_the_report_tells_the_rows_that_fill_no_batch_and_those_that_are_cut(
    tmp_path: Path, source: Path, tokenizer: str
) -> None:
    data = make(source, tokenizer, tmp_path / "cache", packing=False, batch_size=6, seq_length=8)
    run(data, Seen(), max_steps=1)
    section = data.make_section()
    assert section is not None
    rows = data.train_dataloader().dataset
    num_tokens = sum(len(rows[i]["input_ids"]) for i in range(len(rows)))
    found = {name: section.numbers[name] for name in ("num_left_over", "num_cut", "num_cut_off_tokens", "num_empty")}
    num_cut, num_empty = rows.count_cuts()
    assert found == {
        "num_left_over": 40 - 6 * 6,
        "num_cut": num_cut,
        "num_cut_off_tokens": section.numbers["num_tokens"] - num_tokens,
        "num_empty": num_empty,
    }
    assert num_cut > 0
    assert "4 rows at the end of an epoch fill no batch and are left out" in section.notes


def test_rows_can_be_sent_to_spawned_workers_without_the_tokens(tmp_path: Path, source: Path, tokenizer: str) -> None:
    data = make(source, tokenizer, tmp_path / "cache")
    data.setup("fit")
    rows = data.train_dataloader().dataset
    sent = pickle.dumps(rows)
    for name in (tokens.TOKENS, tokens.LEARN):
        (kept,) = (tmp_path / "cache").rglob(name)
        assert kept.read_bytes() not in sent
    assert (pickle.loads(sent)[1]["input_ids"] == rows[1]["input_ids"]).all()


class Seen(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch["input_ids"].tolist())
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def run(data: TextData, module: LightningModule, resume: Path | None = None, max_steps: int = -1) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=False)
    return trainer


@pytest.mark.full
@pytest.mark.filterwarnings("error:Total length of")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_on_pydoc_with_its_own_tokenizer_resumes_where_it_stopped(tmp_path: Path, num_workers: int) -> None:
    def data() -> TextData:
        setting = TrainTokenizer(vocab_size=1000)
        return make("pydoc", setting, tmp_path / "cache", seq_length=4096, batch_size=8, num_workers=num_workers)

    whole, first, second = Seen(), Seen(), Seen()
    run(data(), whole)
    path = tmp_path / "saved.ckpt"
    run(data(), first, max_steps=3).save_checkpoint(path)
    run(data(), second, resume=path)
    assert len(first.batches) == 3 < len(whole.batches)
    assert first.batches + second.batches == whole.batches


def test_the_command_line_takes_a_trained_or_a_named_tokenizer() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TextData, "data")
    name = f"{TextData.__module__}.TextData"
    trained = {
        "class_path": f"{TrainTokenizer.__module__}.TrainTokenizer",
        "init_args": {"vocab_size": 512},
    }
    for given, expected in (
        ("some/model", "some/model"),
        (trained, TrainTokenizer(vocab_size=512)),
        ({"vocab_size": 512}, TrainTokenizer(vocab_size=512)),
    ):
        config = parser.parse_object(
            {"data": {"class_path": name, "init_args": {"train": ["a", "b"], "tokenizer": given}}}
        )
        data = parser.instantiate(config).data
        assert data.tokenizer_setting == expected
        assert data.sources["train"][0] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_size": 0}, "batch_size: got 0: expected 1 or more"),
        ({"seq_length": 1}, "seq_length: got 1: expected 2 or more"),
        ({"validation_fraction": 1.0}, "validation_fraction: got 1.0: expected 0 to below 1"),
        ({"test_split": "test"}, "test_split: not used, as test names no data set"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make("pydoc", "some/model", tmp_path, **options)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, source: Path, tokenizer: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_dir: cannot make the folder .*file/digests: Not a directory"):
        make(source, tokenizer, tmp_path / "file").setup("fit")
    with pytest.raises(ValueError, match=r"cache_dir: cannot make the folder /proc/cache/digests: No such file"):
        make(source, tokenizer, Path("/proc/cache")).setup("fit")


def test_a_tokenizer_that_is_not_there_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_unreachable(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("nobody answers")

    monkeypatch.setattr("lit_fsdp.weights.base_weights.snapshot_download", be_unreachable)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)  # tries again and again
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    line = "tokenizer: got 'models/lama': there is no such folder: did you mean models/llama?"
    for name, why in (
        ("models/lama", line),
        ("lama", "tokenizer: got 'lama': no such folder, and the Hub says: nobody"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            make("pydoc", name, tmp_path).setup("fit")
    with pytest.raises(RuntimeError, match="setup"):
        _ = make("pydoc", "some/model", tmp_path).tokenizer
    with pytest.raises(ValueError, match="train: not set"):
        make(None, "some/model", tmp_path).setup("fit")


def list_layouts() -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Return the same chats in every layout, with the settings that a layout needs."""
    pairs = [(f"what comes after {i}", f"the number {i + 1}") for i in range(24)]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    roles = {"user": "human", "assistant": "gpt"}
    names = {"messages": "dialog", "role": "speaker", "content": "said"}
    return {
        "messages": ({}, [{"messages": chat} for chat in chats]),
        "sharegpt": (
            {},
            [{"conversations": [{"from": roles[m["role"]], "value": m["content"]} for m in chat]} for chat in chats],
        ),
        "alpaca": ({}, [{"instruction": q, "input": "", "output": a} for q, a in pairs]),
        "pairs of messages": ({}, [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats]),
        "pairs of texts": ({"format": "chat"}, [{"prompt": q, "completion": a} for q, a in pairs]),
        "named": (
            {"columns": Columns(**names)},
            [{"dialog": [{names[key]: text for key, text in m.items()} for m in chat]} for chat in chats],
        ),
        "a question and its answer": (
            {"columns": Columns(instruction="q", output="a")},
            [{"q": q, "a": a} for q, a in pairs],
        ),
    }


def train_on_layouts(folder: Path, packing: bool, lora: bool) -> None:
    losses = {}
    for name, (settings, rows) in list_layouts().items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = TextData(
            train=str(path),
            tokenizer=str(folder / "tokenizer"),
            seq_length=32,
            packing=packing,
            batch_size=2,
            num_workers=0,
            cache_dir=str(folder / "cache"),
            **settings,
        )
        config = {"model_type": "llama", "num_hidden_layers": 2, **EVEN, "vocab_size": 300}
        pl.seed_everything(0)
        task = CausalLM(config=config, lora=LoRA(r=2) if lora else None, optimizer=Optimizer(learning_rate=1e-2))
        trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=2, callbacks=[recorder := Recorder()])
        trainer.fit(task, datamodule=data)
        losses[name] = recorder.result.losses
    expected = losses["messages"]
    assert len(expected) == 2
    assert expected[0] != expected[1]
    assert losses == dict.fromkeys(losses, expected)


@pytest.mark.full(after=1)
@pytest.mark.parametrize(("packing", "lora"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_same_chats_train_alike_in_every_layout(tmp_path: Path, packing: bool, lora: bool) -> None:
    trained = train_tokenizer([f"what comes after the number {i}" for i in range(24)], TrainTokenizer(vocab_size=300))
    trained.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    trained.save_pretrained(tmp_path / "tokenizer")
    run_ranks(train_on_layouts, tmp_path, packing, lora)
