import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from training import EVEN, build_trainer, gather_weights, make_rows, save_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from lit_fsdp import CPUOffload, FSDP2Strategy
from lit_fsdp.tasks import CausalLM, Optimizer, TextData, TrainTokenizer
from lit_fsdp.tasks.text.tokenizer import train_tokenizer
from lit_fsdp.tasks.text_model import build_model
from ranks import run_ranks

TINY = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64, **EVEN, "vocab_size": 300}

OPT = {
    "model_type": "opt",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


def make_data(folder: Path, **options: Any) -> TextData:
    """Return data of a few short documents, with a tokenizer trained on them."""
    path = folder / "text.jsonl"
    rows = [{"text": f"the number {i} comes after the number {i - 1}."} for i in range(1, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"seq_length": 16, "batch_size": 2, "num_workers": 0, "cache_dir": str(folder / "cache"), **options}
    return TextData(train=str(path), tokenizer=TrainTokenizer(vocab_size=300), **settings)


def test_the_loss_of_padded_and_packed_batches_is_that_of_transformers(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    task = CausalLM(pretrained=str(folder))
    task.model = model
    rows = make_rows(64, 4)
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    expected = model(input_ids=ids, labels=labels).loss
    loss_sum, num_targets = task.compute_loss({"input_ids": ids, "labels": labels})
    assert num_targets == (labels[:, 1:] != -100).sum()
    assert float((loss_sum / num_targets).detach()) == pytest.approx(float(expected.detach()), abs=1e-6)

    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    cut = labels.masked_fill(mask == 0, -100)
    expected = model(input_ids=ids, attention_mask=mask, labels=cut).loss
    loss_sum, num_targets = task.compute_loss({"input_ids": ids, "labels": cut, "attention_mask": mask})
    assert float((loss_sum / num_targets).detach()) == pytest.approx(float(expected.detach()), abs=1e-6)


def test_logits_that_are_a_view_of_others_have_the_loss_of_their_copy() -> None:
    task = CausalLM(config=OPT)
    task.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**OPT))
    labels = torch.arange(16).view(2, 8)
    logits = torch.randn(2, 3, 8, 300)[:, 1]  # of one of several streams, as those of ProphetNet
    losses = [task.sum_losses(SimpleNamespace(logits=given), labels)[0] for given in (logits, logits.clone())]
    assert float(losses[0]) == float(losses[1])


def test_a_batch_without_targets_has_a_loss_of_zero_and_a_gradient(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    task = CausalLM(pretrained=str(folder))
    task.model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    loss_sum, num_targets = task.compute_loss({"input_ids": ids, "labels": torch.full_like(ids, -100)})
    assert (float(loss_sum.detach()), int(num_targets)) == (0.0, 0)
    loss_sum.backward()


_DBRX: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 1,
    "max_seq_len": 64,
    "vocab_size": 64,
    "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10_000.0},
    "ffn_config": {
        "ffn_hidden_size": 32,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_loss_weight": 0.5,
        "hidden_size": 32,
    },
}


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mixtral", {**EVEN, "num_key_value_heads": 4, "num_local_experts": 4, "router_aux_loss_coef": 0.5}),
        # Whose configurations call the factor otherwise.
        ("jetmoe", {"hidden_size": 32, "num_local_experts": 4, "vocab_size": 64, "aux_loss_coef": 0.5}),
        ("dbrx", _DBRX),
    ],
    ids=["mixtral", "jetmoe", "dbrx"],
)
def test_router_losses_of_a_mixture_of_experts_count_per_target(model_type: str, settings: dict[str, Any]) -> None:
    depth = {} if model_type == "dbrx" else {"num_hidden_layers": 1}
    config = AutoConfig.for_model(model_type, output_router_logits=True, **depth, **settings)
    task = CausalLM(config={"model_type": "mixtral"})
    task.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}
    expected = task.model(**batch).loss  # its own: cross entropy + coefficient x router loss
    loss_sum, num_targets = task.compute_loss(batch)
    assert float((loss_sum / num_targets).detach()) == pytest.approx(float(expected.detach()), abs=1e-6)


@pytest.mark.parametrize(
    ("ends", "generation", "used"),
    [([2, 7], {}, [2, 7]), (7, {}, 2), ([7, 8], {}, 2), ([2, 7], {"eos_token_id": 5}, 5)],
    ids=["a turn too", "of another vocabulary", "all of another", "set"],
)
def test_a_text_ends_with_every_end_that_the_model_names_beside_that_of_the_tokenizer(
    ends: Any, generation: dict[str, Any], used: Any
) -> None:
    seen: dict[str, Any] = {}

    def generate(**settings: Any) -> torch.Tensor:
        seen.update(settings)
        return settings["input_ids"]

    task = CausalLM(config=TINY, generation=generation)
    task.trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    task.model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends), generate=generate)  # type: ignore[assignment]
    decode = {"batch_decode": lambda ids, **_: ["" for _ in ids]}
    task.get_tokenizer = lambda: SimpleNamespace(eos_token_id=2, pad_token_id=0, chat_template=None, **decode)  # type: ignore[method-assign]
    ids = torch.ones(1, 4, dtype=torch.long)
    assert task._continue(ids, torch.ones_like(ids)) == [""]
    assert seen["eos_token_id"] == used


@pytest.mark.parametrize("given", [None, {"eos_token_id": 0, "top_k": 7}, {"eos_token_id": [0, 9], "top_k": 8}])
def test_an_exported_base_model_that_was_trained_to_chat_ends_where_a_turn_does(
    given: dict[str, Any] | None, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(["a"], TrainTokenizer(vocab_size=300))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if given is not None:
        save_model(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
    task = CausalLM(config=TINY) if given is None else CausalLM(pretrained=str(tmp_path))
    task.trainer = SimpleNamespace(datamodule=SimpleNamespace(tokenizer=tokenizer))  # type: ignore[assignment]
    task.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    (tmp_path / "out").mkdir()
    for name, text in task.collect_export_files(task.model).items():
        (tmp_path / "out" / name).write_text(str(text))
    exported = GenerationConfig.from_pretrained(tmp_path / "out")
    assert exported.eos_token_id == ([0, 9, turn] if given and given["top_k"] == 8 else [0, turn])
    assert given is None or exported.top_k == given["top_k"]


def train_and_sample(folder: Path, out: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=30)
    task = CausalLM(config=TINY, generation={"max_new_tokens": 8}, sample_prompts=["the number", "1"])
    data = make_data(folder)
    trainer.fit(task, datamodule=data)
    with torch.no_grad():
        texts = task.generate(["the number", "1"])
    weights = gather_weights(task)
    if trainer.is_global_zero:
        torch.save((texts, weights, task.model.config.to_dict()), out)


@pytest.mark.full
def test_generated_text_is_that_of_the_unsharded_model(tmp_path: Path) -> None:
    run_ranks(train_and_sample, tmp_path, tmp_path / "out")
    texts, weights, settings = torch.load(tmp_path / "out", weights_only=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(weights)
    data = make_data(tmp_path)
    data.setup("fit")
    for prompt, text in zip(["the number", "1"], texts, strict=True):
        ids = data.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        eos = data.tokenizer.eos_token_id
        output = model.generate(ids, max_new_tokens=8, eos_token_id=eos, pad_token_id=eos)
        assert text == data.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert texts[0].strip()


def evaluate(folder: Path, model: Path, out: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False))
    task = CausalLM(pretrained=str(model))
    source = str(folder / "text.jsonl")
    data = make_data(folder, validation=source, test=source, packing=False)
    metrics = [*trainer.validate(task, datamodule=data, verbose=False)]
    metrics += trainer.test(task, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        torch.save(metrics, out)


@pytest.mark.full
def test_evaluation_is_the_mean_over_all_tokens_at_every_world_size(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **{**EVEN, "vocab_size": 300})
    make_data(tmp_path).setup("fit")
    found = []
    for world_size in (1, 2, 3):
        run_ranks(evaluate, tmp_path, folder, tmp_path / "out", world_size=world_size)
        found.append(torch.load(tmp_path / "out"))
    for metrics in found:
        assert metrics[0]["val/loss"] == pytest.approx(found[0][0]["val/loss"], abs=1e-6)
        assert metrics[1]["test/loss"] == pytest.approx(found[0][0]["val/loss"], abs=1e-6)
        perplexity = torch.tensor(metrics[0]["val/loss"]).exp()
        assert metrics[0]["val/perplexity"] == pytest.approx(float(perplexity), rel=1e-6)


class Frozen(CausalLM):
    """Keeps its second block in evaluation, as a user may who trains the others."""

    def change_model(self, model: Any) -> None:
        super().change_model(model)
        model.model.layers[1].eval()

    def on_train_batch_start(self, *_: Any) -> None:
        first, second = self.model.model.layers
        assert {part.training for part in first.modules()} == {True}
        assert {part.training for part in second.modules()} == {False}


def train_frozen(folder: Path) -> None:
    task = Frozen(config=TINY, loss_chunks=2, sample_prompts=["1"])
    trainer = build_trainer(FSDP2Strategy(), max_steps=2, val_check_interval=1, limit_val_batches=1)
    trainer.fit(task, datamodule=make_data(folder, validation=str(folder / "text.jsonl")))
    assert trainer.global_step == 2


@pytest.mark.full
def test_what_a_task_keeps_in_evaluation_stays_so(tmp_path: Path) -> None:
    """Checks of attention and of the loss, and samples, run in evaluation and come back from it."""
    run_ranks(train_frozen, tmp_path)


class Metrics(pl.Callback):
    """Keeps what is logged after every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit_twice(folder: Path, out: Path) -> None:
    seen: list[list[dict[str, float]]] = []
    for max_steps, ckpt_path in ((4, None), (8, folder / "checkpoint")):
        metrics = Metrics()
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[metrics], max_steps=max_steps)
        task = CausalLM(config=TINY)
        trainer.fit(task, datamodule=make_data(folder), ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(folder / "checkpoint")
        seen.append(metrics.steps)
    if trainer.is_global_zero:
        torch.save((seen, trainer.global_step), out)


@pytest.mark.full
def test_the_metrics_of_a_step_are_logged_and_tokens_go_on_counting_after_a_resume(tmp_path: Path) -> None:
    run_ranks(fit_twice, tmp_path, tmp_path / "out")
    (first, second), last_step = torch.load(tmp_path / "out")
    names = ("loss", "perplexity", "grad_norm", "learning_rate", "tokens_seen")
    assert set(first[0]) == {f"train/{name}" for name in names}
    assert first[0]["train/perplexity"] == pytest.approx(float(torch.tensor(first[0]["train/loss"]).exp()), rel=1e-6)
    counts = [step["train/tokens_seen"] for step in first]
    assert counts == sorted(counts)
    assert last_step == 8
    assert second[-1]["train/tokens_seen"] > counts[-1] + 2 * counts[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "pretrained or config"),
        ({"pretrained": "a", "config": {"model_type": "llama"}}, "pretrained or config"),
        ({"config": {"hidden_size": 8}}, "config.model_type: missing"),
        ({"config": TINY, "generation": {"max_new_token": 5}}, "did you mean max_new_tokens?"),
        ({"config": TINY, "sample_prompts": ["a", ""]}, r"sample_prompts\[1\]: got .*: it is empty"),
        ({"config": TINY, "optimizer": Optimizer(betas=(1.5, 0.9))}, r"optimizer.betas: got \(1.5, 0.9\)"),
        ({"config": TINY, "optimizer": Optimizer(eps=-1.0)}, "optimizer.eps: got -1.0"),
        ({"config": TINY, "optimizer": Optimizer(weight_decay=-0.1)}, "optimizer.weight_decay: got -0.1"),
    ],
)
def test_settings_that_name_no_one_model_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(**settings)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": {"model_type": "lama"}}, "Transformers has no such model"),
        ({"config": {**TINY, "hiden_size": 8}}, "hiden_size: no settings of LlamaConfig"),
        ({"config": {**TINY, "vocab_size": 10}}, "vocab_size: got 10: the tokenizer has"),
        ({"config": {**TINY, "num_attention_heads": 5}}, "not a multiple of the number of attention heads"),
        ({"config": {**TINY, "hidden_size": "x"}}, "hidden_size"),
        ({"config": {**TINY, "max_position_embeddings": 8}}, "rows are longer than the model has positions"),
        (
            {"config": {"model_type": "bloom", "hidden_size": 32, "n_head": 4}, "attention": "sdpa"},
            "attention: got 'sdpa': BloomForCausalLM does not have it; set auto",
        ),
        ({"config": {"model_type": "t5"}}, "model_type: got 't5': Transformers has no causal language model of this"),
        (
            {"config": {**OPT}, "attention": "sdpa"},
            "OPTForCausalLM with sdpa attention lets the documents of a packed row see each other",
        ),
        ({"config": TINY, "attention": "flash_attention_2"}, "pip install flash-attn"),
    ],
)
def test_models_that_cannot_be_built_are_refused_with_the_reason(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=message):
            build_trainer(FSDP2Strategy()).fit(CausalLM(**settings), datamodule=make_data(tmp_path))

    run_ranks(body, world_size=1)


_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1}
_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "mem_len": None}
_BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        *product(["bert", "roberta", "electra", "roformer", "gpt_neox", "llama", "bart"], [{}, {"is_decoder": True}]),
        ("gpt_neox_japanese", {}),
        *product(["xlm"], [{}, {"causal": True}]),
        *product(["xlnet"], [{}, {"attn_type": "uni"}]),
        *product(["gemma3_text"], [{}, {"use_bidirectional_attention": True}]),
    ],
)
def test_models_whose_tokens_see_later_ones_are_refused_and_no_others(
    model_type: str, settings: dict[str, Any]
) -> None:
    sizes = {"bart": _BART, "xlnet": _XLNET, "xlm": _XLM}.get(model_type, _SIZES)
    config = AutoConfig.for_model(model_type, vocab_size=64, **sizes, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(8, 24).repeat(2, 1)
    ids[1, -1] = 5
    first, second = model(ids, use_cache=False).logits[:, :-1]
    if torch.equal(first, second):
        build_model(config, "auto")
        return
    with pytest.raises(ValueError, match=f"model_type: got '{model_type}' with .*: set config.*with MaskedLM"):
        build_model(config, "auto")


def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for name in ("models/mein", "./models/mein", str(tmp_path / "models" / "mein")):
        with pytest.raises(ValueError, match=f"pretrained: got '{name}': there is no such folder: did you mean .*mine"):
            CausalLM(pretrained=name).prepare_data()
    for name in ("no/such/folder", "~/no-such"):
        with pytest.raises(ValueError, match=f"pretrained: got '{name}': there is no such folder: seen from"):
            CausalLM(pretrained=name).prepare_data()
    with pytest.raises(ValueError, match="pretrained: got 'no/such': no such folder, and the Hub says"):
        CausalLM(pretrained="no/such").prepare_data()
    Path("models/mine/config.json").write_text('{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 5}')
    with pytest.raises(ValueError, match=r"pretrained: models/mine: config.json: The hidden size \(32\) is not a mul"):
        CausalLM(pretrained="models/mine").read_config()


@pytest.mark.full
def test_a_second_run_of_the_same_object_keeps_its_weights(tmp_path: Path) -> None:
    def body() -> None:
        task = CausalLM(config=TINY)
        trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=2)
        trainer.fit(task, datamodule=make_data(tmp_path))
        before: dict[str, Tensor] = {name: w.clone() for name, w in gather_weights(task).items()}
        source = str(tmp_path / "text.jsonl")
        trainer.validate(task, datamodule=make_data(tmp_path, validation=source), verbose=False)
        after = gather_weights(task)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_ranks(body)


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
def test_models_that_keep_documents_apart_train_on_packed_rows(model_type: str, tmp_path: Path) -> None:
    def body() -> None:
        config = {**TINY, "model_type": model_type, "num_key_value_heads": 4}
        trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
        trainer.fit(CausalLM(config=config), datamodule=make_data(tmp_path))
        assert trainer.global_step == 1

    run_ranks(body)


@pytest.mark.full
def test_one_task_can_be_run_many_times(tmp_path: Path) -> None:
    def body() -> None:
        task = CausalLM(config=TINY, generation={"max_new_tokens": 2}, sample_prompts=["the"])
        source = str(tmp_path / "text.jsonl")
        data = make_data(tmp_path, validation=source, test=source)
        trainer = build_trainer(FSDP2Strategy(print_plan=False, cpu_offload=CPUOffload()), max_steps=2)
        trainer.fit(task, datamodule=data)
        for _ in range(2):
            trainer.validate(task, datamodule=data, verbose=False)
        trainer.test(task, datamodule=data, verbose=False)
        again = build_trainer(FSDP2Strategy(print_plan=False, cpu_offload=CPUOffload()), max_steps=4)
        again.fit(task, datamodule=data)
        assert again.global_step == 4

    run_ranks(body)


def test_ranks_drop_different_units(tmp_path: Path) -> None:
    drawn: list[torch.Tensor] = []

    class Drawing(CausalLM):
        def training_step(self, *args: Any) -> Any:
            drawn.append(torch.rand(4))
            return super().training_step(*args)

    def body() -> None:
        torch.manual_seed(0)
        trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
        trainer.fit(Drawing(config=TINY), datamodule=make_data(tmp_path))
        draws = [torch.empty(4) for _ in range(2)]
        torch.distributed.all_gather(draws, drawn[0])
        assert not torch.equal(*draws)

    run_ranks(body)
