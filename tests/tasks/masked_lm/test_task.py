"""Masked language models on ranks equal those of Transformers on one device, given the same masks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from text_tasks import BERT, DEBERTA, MODERNBERT, SAVED, save_tokenizer, train, write_rows
from torch.profiler import ProfilerActivity, profile
from training import GLOBAL_BATCH, NUM_STEPS, list_differences, train_stock
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

from lit_fsdp.export.model import export_model
from lit_fsdp.tasks import LoRA, MaskedLM, TextData
from lit_fsdp.tasks.masked_lm.masking import Masking, mask_batch

NUM_ROWS = NUM_STEPS * GLOBAL_BATCH
TEXTS = [f"{'word ' * (i % 7)}the number {i} comes after the number {i - 1}." for i in range(NUM_ROWS)]


def make_data(folder: Path, *, num_ranks: int = 2, **options: Any) -> TextData:
    source = write_rows(folder / "rows.jsonl", [{"text": text} for text in TEXTS])
    settings: dict[str, Any] = {"batch_size": GLOBAL_BATCH // num_ranks, "shuffle": False, "num_workers": 0}
    settings |= {"seq_length": 64, "packing": False, "cache_dir": str(folder / "cache"), **options}
    return TextData(train=source, tokenizer=str(folder / "tokenizer"), **settings)


def save_start(folder: Path, config: dict[str, Any]) -> str:
    """Write a tokenizer, and a model that every run starts from; return its folder."""
    save_tokenizer(folder / "tokenizer", TEXTS)
    torch.manual_seed(1)
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(**config, pad_token_id=1)).save_pretrained(folder / "model")
    return str(folder / "model")


def make_masking(tokenizer: Any) -> Masking:
    return Masking(
        mlm_probability=0.3,
        mask_replace_prob=0.8,
        random_replace_prob=0.1,
        mask_id=tokenizer.mask_token_id,
        special_ids=tokenizer.all_special_ids,
        vocab_size=len(tokenizer),
    )


@pytest.mark.full
@pytest.mark.parametrize("config", [BERT, DEBERTA, MODERNBERT], ids=lambda config: config["model_type"])
def test_two_ranks_train_as_transformers_does_resume_and_export(config: dict[str, Any], tmp_path: Path) -> None:
    start = save_start(tmp_path, config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    model = AutoModelForMaskedLM.from_pretrained(start, dtype=torch.float32)

    def compute_loss(step: int) -> torch.Tensor:
        texts = [f"{text}{tokenizer.eos_token}" for text in TEXTS[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]]
        batch = dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(**mask_batch({**batch, "labels": labels}, make_masking(tokenizer), seed=5, epoch=1)).loss

    def build() -> tuple[MaskedLM, TextData]:
        return MaskedLM(pretrained=start, mlm_probability=0.3, seed=5), make_data(tmp_path)

    truth = train_stock(model, compute_loss)
    result, _ = train(tmp_path / "out", build)
    differences = list_differences(result, truth)
    assert max(differences.values()) <= 1e-6, differences
    assert len(set(result.losses)) == NUM_STEPS
    rest, _ = train(tmp_path / "rest", build, source=tmp_path / "out" / "middle.ckpt")
    assert rest.losses == result.losses[SAVED:]
    assert all(torch.equal(rest.weights[name], weight) for name, weight in result.weights.items())

    export_model(tmp_path / "out" / "last.ckpt", tmp_path / "exported")
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    model.load_state_dict(result.weights, strict=False)
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(exported(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").mask_token == tokenizer.mask_token


@pytest.mark.full
def test_adapters_on_two_ranks_equal_those_on_one(tmp_path: Path) -> None:
    start = save_start(tmp_path, BERT)

    def build(num_ranks: int) -> tuple[MaskedLM, TextData]:
        return MaskedLM(pretrained=start, lora=LoRA(r=4)), make_data(tmp_path, num_ranks=num_ranks)

    two, _ = train(tmp_path / "two", lambda: build(2))
    one, _ = train(tmp_path / "one", lambda: build(1), world_size=1)
    assert max(list_differences(two, one).values()) <= 1e-6
    assert any("lora_A" in name for name in two.weights)


def test_tokens_are_hidden_as_often_as_by_transformers_and_alike_in_any_batch(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer", TEXTS))
    masking, generator = make_masking(tokenizer), torch.Generator().manual_seed(0)
    ids = torch.randint(3, len(tokenizer), (200, 128), generator=generator)
    ids[:, -1] = tokenizer.eos_token_id
    whole = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    masked = mask_batch(whole, masking, seed=0, epoch=1)

    def count(inputs: torch.Tensor, labels: torch.Tensor) -> list[float]:
        hidden = labels != -100
        kinds = (
            inputs == tokenizer.mask_token_id,
            inputs == ids,
            (inputs != ids) & (inputs != tokenizer.mask_token_id),
        )
        return [float(hidden.float().mean()), *(float((kind & hidden).sum() / hidden.sum()) for kind in kinds)]

    torch.manual_seed(0)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    stock = collate([{"input_ids": row} for row in ids])
    counts, expected = count(masked["input_ids"], masked["labels"]), count(stock["input_ids"], stock["labels"])
    assert counts == pytest.approx(expected, abs=0.02)  # draws of 7,500 tokens
    assert (masked["labels"][:, -1] == -100).all()

    padded = {name: torch.nn.functional.pad(value[7:9], (0, 5)) for name, value in whole.items()}
    padded["labels"][:, -5:] = -100
    part = mask_batch(padded, masking, seed=0, epoch=1)
    for name in ("input_ids", "labels"):
        assert torch.equal(part[name][:, :-5], masked[name][7:9])
    for changed in ({"seed": 1, "epoch": 1}, {"seed": 0, "epoch": 2}):
        other = mask_batch(whole, masking, **changed)["labels"] != -100
        shared = float((other & (masked["labels"] != -100)).float().mean())
        assert shared == pytest.approx(counts[0] ** 2, abs=0.01)  # as two draws have in common


@pytest.mark.parametrize("num_special", [0, 3, 100])
def test_special_tokens_are_never_hidden_and_no_operator_has_a_size_that_a_gpu_would_have_to_tell(
    num_special: int,
) -> None:
    shares = {"mlm_probability": 0.9, "mask_replace_prob": 0.8, "random_replace_prob": 0.1}
    special = list(range(0, 2 * num_special, 2))[::-1]
    masking = Masking(**shares, mask_id=4, special_ids=special, vocab_size=250)
    ids = torch.arange(250).repeat(2, 1)
    batch = {"input_ids": ids, "labels": ids}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        labels = mask_batch(batch, masking, seed=0, epoch=1)["labels"]
    is_special = torch.tensor([i in special for i in range(250)])
    assert (labels[:, is_special] == -100).all()
    assert float((labels[:, ~is_special] != -100).float().mean()) > 0.8
    waiting = {"aten::_unique", "aten::_unique2", "aten::nonzero", "aten::item", "aten::masked_select"}
    assert waiting.isdisjoint(event.key for event in profiler.key_averages())


@pytest.mark.parametrize(
    ("options", "is_other"),
    [
        ({}, False),
        ({"streaming": True}, True),
        ({"train": [{"path": "rows.jsonl", "weight": 3}, {"path": "other.jsonl", "weight": 1}]}, True),
    ],
)
def test_a_row_that_comes_again_in_an_epoch_is_hidden_anew(
    options: dict[str, Any], is_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, hidden = MaskedLM(config=BERT), list[torch.Tensor]()
    shares = {"mlm_probability": 0.5, "mask_replace_prob": 0.8, "random_replace_prob": 0.1}
    masking = Masking(**shares, mask_id=0, special_ids=[0], vocab_size=100)
    monkeypatch.setattr(task, "_masking", masking)
    monkeypatch.setattr(task, "run_model", lambda **inputs: SimpleNamespace(logits=inputs["input_ids"]))
    monkeypatch.setattr(task, "sum_losses", lambda _, labels: hidden.append(labels))
    data = TextData(**{"train": "rows.jsonl", "tokenizer": "tokenizer", **options})
    ids = torch.arange(5, 69)[None]
    for epoch, step in ((0, 3), (0, 3), (0, 4), (1, 8)):
        task._trainer = SimpleNamespace(datamodule=data, current_epoch=epoch, global_step=step)
        task.compute_loss({"input_ids": ids, "labels": ids.clone()})
    assert torch.equal(hidden[0], hidden[1])
    assert torch.equal(hidden[0], hidden[2]) is not is_other
    assert not torch.equal(hidden[0], hidden[3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlm_probability": 0.0}, "mlm_probability: got 0.0: expected above 0"),
        ({"mask_replace_prob": 0.95}, "with mask_replace_prob it is 1.05, above 1"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_settings_that_make_no_mask_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedLM(config=BERT, **settings)
