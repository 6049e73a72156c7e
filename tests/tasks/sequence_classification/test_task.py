"""Sequence classification on ranks equals that of Transformers on one device; what is exported has its logits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, get_peft_model
from text_tasks import (
    BERT,
    DEBERTA,
    LLAMA,
    MODERNBERT,
    SAVED,
    VOCAB_SIZE,
    save_tokenizer,
    train,
    write_rows,
)
from tokenizers.processors import TemplateProcessing
from torch.nn import functional
from training import GLOBAL_BATCH, NUM_STEPS, list_differences, train_stock
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.export.model import export_model
from lit_fsdp.tasks import LabeledTextData, Optimizer, SequenceClassification, TextTask, TrainTokenizer
from lit_fsdp.tasks.sequence_classification.task import CLASSIFIER
from lit_fsdp.tasks.text_model import check_data

NUM_ROWS = NUM_STEPS * GLOBAL_BATCH
TEXTS = [f"{'word ' * (i % 7)}the number {i} comes after the number {i - 1}." for i in range(NUM_ROWS)]
COLORS = ["blue", "green", "red"]
LABELS: dict[str, list[Any]] = {
    "single_label_classification": [COLORS[i % 5 % 3] for i in range(NUM_ROWS)],
    "multi_label_classification": [[c for j, c in enumerate(COLORS) if (i + j) % 3] for i in range(NUM_ROWS)],
    # So far apart that no step comes near all of them: near its target a gradient is the rounding of a difference.
    "regression": [0.7 * (i % 5) - 0.8 for i in range(NUM_ROWS)],
}
# Reads a text at its end token, which its tokenizer adds.
T5 = {
    "model_type": "t5",
    "vocab_size": VOCAB_SIZE,
    "d_model": 36,
    "d_kv": 12,
    "d_ff": 35,
    "num_layers": 2,
    "num_heads": 3,
}
T5 |= {"eos_token_id": 0, "decoder_start_token_id": 1, "dropout_rate": 0.0}
# Reads a text at the last place of its row, so that padding comes first.
XLNET = {"model_type": "xlnet", "vocab_size": VOCAB_SIZE, "d_model": 36, "d_inner": 35, "n_layer": 2, "n_head": 3}
XLNET |= {"dropout": 0.0, "summary_last_dropout": 0.0}
CASES = [
    (BERT, "single_label_classification"),
    (DEBERTA, "single_label_classification"),
    (LLAMA, "multi_label_classification"),
    (MODERNBERT, "regression"),
    (LLAMA, "reward"),
    (T5, "single_label_classification"),
    (XLNET, "single_label_classification"),
]
CASE_NAMES = [f"{config['model_type']}-{problem}" for config, problem in CASES]


def make_rows(problem: str) -> list[dict[str, Any]]:
    if problem == "reward":
        return [{"prompt": "count: ", "chosen": text, "rejected": text[: 5 + i % 9]} for i, text in enumerate(TEXTS)]
    return [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS[problem], strict=True)]


def make_data(folder: Path, problem: str, *, num_ranks: int = 2, **options: Any) -> LabeledTextData:
    source = write_rows(folder / "rows.jsonl", make_rows(problem))
    settings: dict[str, Any] = {"problem_type": "reward"} if problem == "reward" else {}
    settings |= {"batch_size": GLOBAL_BATCH // num_ranks, "shuffle": False, "num_workers": 0, "seq_length": 64}
    settings |= {"tokenizer": str(folder / "tokenizer"), "cache_dir": str(folder / "cache"), **options}
    return LabeledTextData(train=source, **settings)


def save_start(folder: Path, config: dict[str, Any], problem: str) -> str:
    """Write a tokenizer, and a classifier that every run starts from; return its folder."""
    folder.mkdir(exist_ok=True)
    side = "left" if config is XLNET else "right"
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(folder / "tokenizer", TEXTS), padding_side=side)
    if config is T5:
        ends = [(tokenizer.eos_token, tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {ends[0][0]}", special_tokens=ends)
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(1)
    names = {"id2label": dict(enumerate(COLORS if "label" in problem else ["LABEL_0"]))}
    settings = AutoConfig.for_model(**config, **names, problem_type=None if problem == "reward" else problem)
    settings.pad_token_id = 1
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder / "model")
    return str(folder / "model")


def compute_stock_loss(model: Any, tokenizer: Any, rows: list[dict[str, Any]], problem: str) -> torch.Tensor:
    """Return the loss that Transformers has for rows; for pairs, that of Bradley and Terry."""

    def read(texts: list[str]) -> Any:
        return tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)

    if problem == "reward":
        chosen, rejected = (
            model(**read([r["prompt"] + r[name] for r in rows])).logits for name in ("chosen", "rejected")
        )
        return -functional.logsigmoid(chosen - rejected).mean()
    targets: dict[str, Any] = {
        "single_label_classification": lambda: torch.tensor([COLORS.index(r["label"]) for r in rows]),
        "multi_label_classification": lambda: torch.tensor([[float(c in r["label"]) for c in COLORS] for r in rows]),
        "regression": lambda: torch.tensor([r["label"] for r in rows]),
    }
    return model(**read([r["text"] for r in rows]), labels=targets[problem]()).loss


@pytest.mark.full
@pytest.mark.parametrize(("config", "problem"), CASES, ids=CASE_NAMES)
def test_two_ranks_train_as_transformers_does_resume_and_export(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    start = save_start(tmp_path, config, problem)
    tokenizer, rows = AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), make_rows(problem)
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32)

    def compute_loss(step: int) -> torch.Tensor:
        batch = rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        return compute_stock_loss(model, tokenizer, batch, problem)

    truth = train_stock(model, compute_loss)
    result, _ = train(
        tmp_path / "out", lambda: (SequenceClassification(pretrained=start), make_data(tmp_path, problem))
    )
    differences = list_differences(result, truth)
    assert max(differences.values()) <= 1e-6, differences
    assert len(set(result.losses)) == NUM_STEPS

    rest, _ = train(
        tmp_path / "rest",
        lambda: (SequenceClassification(pretrained=start), make_data(tmp_path, problem)),
        source=tmp_path / "out" / "middle.ckpt",
    )
    assert rest.losses == result.losses[SAVED:]
    assert all(torch.equal(rest.weights[name], weight) for name, weight in result.weights.items())

    export_model(tmp_path / "out" / "last.ckpt", tmp_path / "exported")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert all(torch.equal(exported.state_dict()[name], weight) for name, weight in result.weights.items())
    assert list(exported.config.id2label.values()) == (COLORS if "label" in problem else ["LABEL_0"])
    inputs = AutoTokenizer.from_pretrained(tmp_path / "exported")(TEXTS[:3], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        model.load_state_dict(result.weights, strict=False)
        # The weights are equal bit for bit; kernels round by where they lie in memory.
        assert torch.allclose(exported.eval()(**inputs).logits, model.eval()(**inputs).logits, rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("config", [BERT, LLAMA], ids=["encoder", "decoder"])
def test_training_goes_on_from_a_classifier_of_peft_as_in_peft(config: dict[str, Any], tmp_path: Path) -> None:
    """Its settings name the heads of two kinds of classifiers."""
    problem = "single_label_classification"
    start, rows = save_start(tmp_path, config, problem), make_rows(problem)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query" if config is BERT else "q_proj"])
    model = get_peft_model(AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32), lora)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapters")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    def compute_loss(step: int) -> torch.Tensor:
        batch = rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        return compute_stock_loss(model, tokenizer, batch, problem)

    truth = train_stock(model, compute_loss)
    given = LoRA(pretrained=str(tmp_path / "adapters"))
    result, _ = train(
        tmp_path / "out", lambda: (SequenceClassification(pretrained=start, lora=given), make_data(tmp_path, problem))
    )
    assert max(list_differences(result, truth).values()) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("config", [BERT, LLAMA], ids=["encoder", "decoder"])
def test_adapters_train_with_a_new_head_and_load_as_the_card_says_with_equal_logits(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_start(tmp_path, config, "single_label_classification")
    torch.manual_seed(2)
    base = tmp_path / "base"
    options = {"add_pooling_layer": False} if config is BERT else {}
    AutoModel.from_config(AutoConfig.for_model(**config), **options).save_pretrained(base)

    def build() -> tuple[SequenceClassification, LabeledTextData]:
        task = SequenceClassification(pretrained=str(base), lora=LoRA(r=4))
        return task, make_data(tmp_path, "single_label_classification")

    result, _ = train(tmp_path / "out", build)
    alone, _ = train(
        tmp_path / "alone",
        lambda: (build()[0], make_data(tmp_path, "single_label_classification", num_ranks=1)),
        world_size=1,
    )
    assert max(list_differences(result, alone).values()) <= 1e-6
    whole, adapters = tmp_path / "whole", tmp_path / "adapters"
    export_model(tmp_path / "out" / "last.ckpt", adapters)
    export_model(tmp_path / "out" / "last.ckpt", whole, merge=True)
    loaded: dict[str, Any] = {}
    exec((adapters / "README.md").read_text().split("```python\n")[1].split("```")[0], loaded)
    stock = loaded["model"].eval()
    merged = AutoModelForSequenceClassification.from_pretrained(whole, dtype=torch.float32).eval()
    inputs = AutoTokenizer.from_pretrained(whole)(TEXTS[:3], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        assert torch.allclose(stock(**inputs).logits, merged(**inputs).logits, atol=1e-6)
    assert stock.config.id2label == merged.config.id2label == dict(enumerate(COLORS))
    # The pooler was drawn at random as well.
    heads = {"classifier", "bert.pooler.dense"} if config is BERT else {"score"}
    assert heads <= set(stock.peft_config["default"].modules_to_save)


def evaluate(folder: Path, problem: str, out: Path) -> None:
    import torch.distributed as dist
    from training import build_trainer

    from lit_fsdp import FSDP2Strategy

    data = make_data(folder, problem, validation=str(folder / "rows.jsonl"), eval_batch_size=5)
    trainer = build_trainer(FSDP2Strategy(print_plan=False))
    task = SequenceClassification(pretrained=str(folder / "model"))
    (found,) = trainer.validate(task, datamodule=data, verbose=False)
    assert task.headline_mode == "max"
    headlines = {"multi_label_classification": "f1_pct", "regression": "pearson"}
    assert task.headline_metric == headlines.get(problem, "accuracy_pct")
    assert f"val/{task.headline_metric}" in found
    if dist.get_rank() == 0:
        torch.save(found, out)


@pytest.mark.full
@pytest.mark.parametrize(("config", "problem"), CASES, ids=CASE_NAMES)
def test_metrics_count_every_row_once_on_any_number_of_ranks(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    from sklearn import metrics as stock_metrics  # type: ignore[import-untyped]

    from ranks import run_ranks

    start = save_start(tmp_path, config, problem)
    run_ranks(evaluate, tmp_path, problem, tmp_path / "found", world_size=3)
    found = {name: float(value) for name, value in torch.load(tmp_path / "found").items()}
    tokenizer, rows = AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), make_rows(problem)
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32).eval()
    with torch.no_grad():
        assert found["val/loss"] == pytest.approx(float(compute_stock_loss(model, tokenizer, rows, problem)), abs=1e-6)
        read = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
        if problem == "reward":
            scores = [
                model(**tokenizer([r["prompt"] + r[n] for r in rows], **read)).logits for n in ("chosen", "rejected")
            ]
            assert found["val/accuracy_pct"] == pytest.approx(
                100 * float((scores[0] > scores[1]).float().mean()), abs=1e-4
            )
            return
        logits = model(**tokenizer([r["text"] for r in rows], **read)).logits.double()
    if problem == "regression":
        labels = torch.tensor(LABELS[problem]).double()
        assert found["val/mse"] == pytest.approx(float((logits[:, 0] - labels).square().mean()), rel=1e-6)
        assert found["val/pearson"] == pytest.approx(
            float(torch.corrcoef(torch.stack([logits[:, 0], labels]))[0, 1]), abs=1e-5
        )
    elif problem == "single_label_classification":
        labels, chosen = [COLORS.index(label) for label in LABELS[problem]], logits.argmax(1).tolist()
        assert found["val/accuracy_pct"] == pytest.approx(100 * stock_metrics.accuracy_score(labels, chosen), abs=1e-4)
        f1 = stock_metrics.f1_score(labels, chosen, average="macro")
        assert found["val/f1_pct"] == pytest.approx(100 * f1, abs=1e-4)
    else:
        labels = [[int(c in row) for c in COLORS] for row in LABELS[problem]]
        chosen = (logits > 0).long().tolist()
        assert found["val/exact_match_pct"] == pytest.approx(
            100 * stock_metrics.accuracy_score(labels, chosen), abs=1e-4
        )
        f1 = stock_metrics.f1_score(labels, chosen, average="macro", zero_division=0)
        assert found["val/f1_pct"] == pytest.approx(100 * f1, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_numbers_to_predict_keep_their_digits_in_bfloat16(strategy: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": f"number {n}", "label": 1234.5 + n} for n in range(4)])
    settings: dict[str, Any] = {"tokenizer": TrainTokenizer(vocab_size=VOCAB_SIZE), "seq_length": 32, "batch_size": 4}
    settings |= {"num_workers": 0, "shuffle": False, "cache_dir": str(tmp_path / "cache")}
    data = LabeledTextData(train=rows, **settings)
    seen: list[list[float]] = []

    class Recorded(SequenceClassification):
        def sum_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(labels.tolist())
            return super().sum_losses(logits, labels)

    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        devices=1,
        precision="bf16-true",
        strategy="auto" if strategy == "auto" else FSDP2Strategy(print_plan=False),
        **options,
    )
    trainer.fit(Recorded(config=BERT), data)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert seen == [[1234.5, 1235.5, 1236.5, 1237.5]]


def test_pairs_of_a_reward_stay_together_where_a_batch_is_split() -> None:
    """[2 * rows, length]: the better and the worse text in turn."""
    task = SequenceClassification(pretrained="none")
    task.problem_type = "reward"
    batch = {"input_ids": torch.arange(6).view(6, 1), "attention_mask": torch.ones(6, 1), "labels": torch.zeros(3)}
    parts = [part for part, _ in task.split_batch(batch, 2)]
    assert [part["input_ids"].flatten().tolist() for part in parts] == [[0, 1], [2, 3, 4, 5]]
    assert [len(part["labels"]) for part in parts] == [1, 2]


def test_a_checkpoint_that_predicts_numbers_asks_for_the_problem_not_for_classes_of_its_name() -> None:
    task = SequenceClassification(pretrained="none", num_labels=2)
    with pytest.raises(
        ValueError, match=r"^data.problem_type: is 'single_label_classification' here, .*: set it to re"
    ):
        task.on_load_checkpoint({"classes": ["LABEL_0"]})


def test_rows_to_predict_do_not_change_what_a_model_was_trained_for() -> None:
    def start(task: SequenceClassification, **data: Any) -> None:
        task.trainer = SimpleNamespace(datamodule=SimpleNamespace(**data))  # type: ignore[assignment]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TextTask, "setup", lambda *_: None)
            task.setup("predict")

    for problem, classes in (("regression", None), ("multi_label_classification", ["a", "b"])):
        task = SequenceClassification(pretrained="none")
        start(task, problem_type=problem, classes=classes)
        task.model = torch.nn.Module()  # type: ignore[assignment]
        start(task, problem_type=None, classes=None)
        assert (task.problem_type, task.class_names) == (problem, classes or ["LABEL_0"])
        with pytest.raises(ValueError, match=f"got 'reward': the model was made for '{problem}': make a task anew"):
            start(task, problem_type="reward", classes=None)


def test_texts_without_the_end_token_that_a_model_reads_them_at_are_refused_in_a_line() -> None:
    task = SequenceClassification(pretrained="none")
    task.model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**T5))
    batch = {"input_ids": torch.full((2, 5), 7), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    with pytest.raises(
        ValueError, match=r"^model: T5ForSequenceClassification refuses a batch: .* <eos> token\.: take a"
    ):
        task.compute_logits(batch)


def test_a_classifier_that_reads_characters_is_refused_with_that_reason() -> None:
    with pytest.raises(ValueError, match=r"model_type: got 'canine': it reads characters, and no tokens"):
        check_data(AutoConfig.for_model("canine"), SimpleNamespace(), CLASSIFIER)
    with pytest.raises(ValueError, match=r"model_type: got 'vit': Transformers has no sequence classifier"):
        check_data(AutoConfig.for_model("vit"), SimpleNamespace(), CLASSIFIER)


@pytest.mark.full
def test_a_new_head_leaves_a_base_that_has_parameters_of_its_own(tmp_path: Path) -> None:
    """The base of XLNet holds its mask itself, as that of LayoutLMv3 does its first token."""
    start = save_start(tmp_path / "start", XLNET, "single_label_classification")
    task = SequenceClassification(pretrained=start, head="new", optimizer=Optimizer(learning_rate=1e-9))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, **options)
    trainer.fit(task, datamodule=make_data(tmp_path / "start", "single_label_classification", num_ranks=1))
    assert task.model is not None
    stored = AutoModelForSequenceClassification.from_pretrained(start).state_dict()
    changed = {name for name, p in task.model.named_parameters() if float((p - stored[name]).abs().max()) > 1e-6}
    assert changed >= {"logits_proj.weight"}
    assert not any(name.startswith("transformer.") for name in changed)


def test_a_new_t5_begins_its_decoder_with_the_padding_as_all_t5_do() -> None:
    task = SequenceClassification(config={"model_type": "t5", "num_layers": 1})
    task.class_names, task._pad_id = COLORS, 3
    assert task.read_config().decoder_start_token_id == 3
