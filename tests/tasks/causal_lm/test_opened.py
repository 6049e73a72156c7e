"""What is opened, from wherever it lies, has the logits of the model that was trained."""

import json
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from export_runs import FAMILIES, PLAIN, measure, run_model, save_base, train
from models import LANGUAGE_MODELS, make_tokens
from torch import Tensor
from torch.utils.data import DataLoader
from training import build_trainer
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.cli.chat import chat
from lit_fsdp.export.model import export_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.mesh import DataRanks
from lit_fsdp.tasks.causal_lm.harness import HarnessData
from lit_fsdp.tasks.causal_lm.opened import OpenedLM, load_whole, open_source, open_tokenizer
from ranks import run_ranks

CPU: dict[str, Any] = {"dtype": "float32", "attention": "sdpa", "device": torch.device("cpu")}
RUNS: dict[str, tuple[str, LoRA | None, Quantization | None]] = {
    "all weights": ("tied", None, None),
    "dora": ("llama", replace(PLAIN, use_dora=True, rank_pattern={"q_proj": 2}), None),
    "saved": ("llama", replace(PLAIN, modules_to_save=["lm_head"], exclude_modules=["k_proj"]), None),
    "nf4": ("llama", PLAIN, Quantization()),
    "experts nf4": (
        "mixtral",
        replace(PLAIN, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
        Quantization(),
    ),
    "pissa nf4": ("llama", replace(PLAIN, init_lora_weights="pissa"), Quantization()),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_and_its_export_have_the_logits_of_the_training_model(name: str, tmp_path: Path) -> None:
    family, lora, quantization = RUNS[name]
    base = save_base(tmp_path / "base", family)
    settings = {"pretrained": str(base), "lora": lora, "quantization": quantization}
    run_ranks(train, tmp_path, {n: value for n, value in settings.items() if value is not None})
    opened = load_whole(open_source(str(tmp_path / "last.ckpt")), **CPU)
    assert measure(run_model(opened), tmp_path) <= 1e-6
    if name == "nf4":
        moved = save_base(tmp_path / "other", "llama")
        (moved / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\1")
        base.rename(tmp_path / "moved")
        with pytest.raises(ValueError, match=r"^base: got '.*/base': there is no such folder: .*, set --base to its"):
            open_source(str(tmp_path / "last.ckpt"))
        moved.rename(base)
        with pytest.raises(ValueError, match=r"^base: .* its weights are not those of"):
            load_whole(open_source(str(tmp_path / "last.ckpt")), **CPU)
        opened = load_whole(open_source(str(tmp_path / "last.ckpt"), base=str(tmp_path / "moved")), **CPU)
        assert measure(run_model(opened), tmp_path) <= 1e-6
        base.rename(moved)
        (tmp_path / "moved").rename(base)
    if name == "pissa nf4":  # no other tool could load these
        return
    export_model(tmp_path / "last.ckpt", tmp_path / "exported")
    source = open_source(str(tmp_path / "exported"), quantization=quantization)
    assert (source.adapter is not None) == (lora is not None)
    assert measure(run_model(load_whole(source, **CPU)), tmp_path) <= 1e-6


class ReadLM(OpenedLM):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.train().model(input_ids=batch, use_cache=False).logits


def predict(folder: Path) -> None:
    path, trainer = str(folder / "last.ckpt"), build_trainer(FSDP2Strategy(print_plan=False))
    found: Any = trainer.predict(ReadLM(source=path), DataLoader(make_tokens(), batch_size=2), ckpt_path=path)
    torch.save(found[0], folder / "predicted.pt")


@pytest.mark.full(after=1)
def test_a_model_of_a_checkpoint_needs_no_random_weights(tmp_path: Path) -> None:
    """Those of Apertus have none: it sets its activations where it is built."""
    base = save_base(tmp_path / "base", "apertus")
    run_ranks(train, tmp_path, {"pretrained": str(base)})
    run_ranks(predict, tmp_path)
    assert measure(torch.load(tmp_path / "predicted.pt"), tmp_path) <= 1e-6


@pytest.mark.full(after=1)
def test_adapters_over_random_weights_that_were_quantized_are_refused_by_what_they_are(tmp_path: Path) -> None:
    config = {"model_type": "llama", **LANGUAGE_MODELS["llama"], **FAMILIES["llama"]}
    run_ranks(train, tmp_path, {"config": config, "lora": PLAIN, "quantization": Quantization()}, world_size=1)
    with pytest.raises(ValueError, match=r"^model: .* holds adapters over random weights that were quantized, "):
        open_source(str(tmp_path / "last.ckpt"))


def test_models_without_the_attention_of_torch_are_opened_without_a_setting(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=67, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    default: Any = signature(chat).parameters["attention"].default
    opened = load_whole(open_source(str(tmp_path)), **{**CPU, "attention": default})
    assert torch.equal(run_model(opened), run_model(model))


def test_what_cannot_be_opened_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, adapter = save_base(tmp_path / "base", "llama"), tmp_path / "adapter"
    adapter.mkdir()
    good = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}

    def refuse(text: str, given: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=text) as caught:
            open_source(given, **options)
        assert "\n" not in str(caught.value)

    for change, text in (
        ({"peft_type": "LOHA"}, "model: .*adapter_config.json: peft_type: got 'LOHA': not known here"),
        ({"bias": "all"}, "bias: got 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: got 'pissa': not known here"),
        ({"lora_bias": True}, "lora_bias: got True: not known here"),
        ({"r": None}, "base: missing"),
        ({}, "base: missing: .* names no base model"),
        (
            {"base_model_name_or_path": "./no"},
            "base: got './no': there is no such .*; if it is elsewhere, set --base",
        ),
        ({"task_type": "SEQ_CLS"}, "^model: adapter holds adapters of a classifier, which answers nothing: expected"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(good | change))
        refuse(text, "adapter")
    (adapter / "classes.json").write_text("[]")  # as export writes it
    refuse("^model: adapter holds adapters of a classifier", "adapter")
    (adapter / "classes.json").unlink()
    (adapter / "adapter_config.json").write_text("[")
    refuse("model: adapter/adapter_config.json: ", "adapter")
    refuse("base: got 'x': base holds no adapters", "base", base="x")
    refuse("model: got './no': there is no such folder", "./no")
    source = open_source(f"file://{base}")
    assert source.pretrained == source.tokenizer == str(base)
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "bert", "architectures": ["BertForMaskedLM"]}  # it has the weights of one that generates
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps(config))
    refuse("^model: encoder is a BertForMaskedLM, which answers nothing: expected", "encoder")
    (tmp_path / "empty").mkdir()
    refuse("^model: .*empty is no checkpoint, and no run", "empty")
    (tmp_path / "file.ckpt").write_text("")
    refuse("^model: .*file.ckpt is a file: expected a folder", "file.ckpt")
    refuse(r"quantization.block_size: got 7", str(base), quantization=Quantization(block_size=7))
    with pytest.raises(ValueError, match=r"^model: base: tokenizer: got 'base': there is no tokenizer"):
        open_tokenizer(open_source("base"))


def test_ranks_that_share_rows_are_measured_once_not_as_often_as_there_are_of_them() -> None:
    data = HarnessData()
    strategy = SimpleNamespace(data_ranks=DataRanks(count=2, copies=2))  # two groups of mesh.tensor: 2
    data.trainer = SimpleNamespace(world_size=4, strategy=strategy)  # type: ignore[assignment]
    assert len(data.predict_dataloader()) == 2  # of which the Trainer gives each group one
