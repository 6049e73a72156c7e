"""What would train otherwise than its settings say is refused, with the layer or setting and the reason."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from adapter_training import LORA, SIZES
from models import build_language_model
from torch.utils.data import DataLoader
from training import Rows, build_task, build_trainer, collate, make_rows, save_model

from lit_fsdp import FSDP2Strategy, Wrap
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks import CausalLM
from ranks import run_ranks

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.mark.parametrize(
    ("family", "config", "lora", "message"),
    [
        (
            "llama",
            {**WIDE, "tie_word_embeddings": True},
            LoRA(target_modules=["q_proj", "lm_head"], init_lora_weights="pissa"),
            "lm_head: init_lora_weights 'pissa' would change the weight that it shares",
        ),
        (
            "llama",
            WIDE,
            LoRA(target_modules=["embed_tokens"], init_lora_weights="olora"),
            "embed_tokens: init_lora_weights 'olora' is only for linear",
        ),
        (
            "llama",
            WIDE,
            LoRA(target_modules=["embed_tokens"], use_dora=True),
            "embed_tokens: use_dora is only for linear layers",
        ),
        (
            "llama",
            WIDE,
            LoRA(r=65, init_lora_weights="pissa"),
            r"init_lora_weights 'pissa' has no rank 65 in a weight of \(64, 64\)",
        ),
        ("llama", WIDE, LoRA(rank_pattern={"q_prj": 2}), "lora.rank_pattern: got 'q_prj': none of the targets"),
        ("llama", WIDE, LoRA(alpha_pattern={"lm_head": 2}), "lora.alpha_pattern: got 'lm_head': none of the targets"),
        ("llama", WIDE, LoRA(target_modules="("), r"lora.target_modules: got '\(': no regular expression"),
        ("gpt2", {}, LoRA(use_dora=True), "c_attn: use_dora is only for linear layers"),
        ("gpt2", {}, LoRA(init_lora_weights="pissa"), "c_attn: init_lora_weights 'pissa' is only for linear layers"),
    ],
)
def test_starts_that_could_not_be_what_they_say(family: str, config: Any, lora: LoRA, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_adapters(build_language_model(family, **config), lora)


def test_loftq_is_for_quantized_layers() -> None:
    model = build_language_model("llama", **WIDE)
    quantize_model(model, Quantization())
    with pytest.raises(
        ValueError, match="lm_head: init_lora_weights 'loftq' fits the error of quantization, and this layer is not"
    ):
        add_adapters(model, LoRA(target_modules=["q_proj", "lm_head"], init_lora_weights="loftq"))


def test_a_model_that_has_its_weights_is_neither_quantized_nor_decomposed() -> None:
    model = build_language_model("llama", "cpu", **WIDE)
    with pytest.raises(ValueError, match="quantization: weights are quantized while they are loaded"):
        quantize_model(model, Quantization())
    with pytest.raises(
        ValueError, match=r"lora.init_lora_weights: got 'pissa': it is made of weights while they are loaded"
    ):
        add_adapters(model, LoRA(init_lora_weights="pissa"))


def test_patterns_are_full_names_last_parts_or_regular_expressions() -> None:
    model = build_language_model("llama", **WIDE)
    pattern = {"v_proj": 2, r"model\.layers\.[01]\.mlp\..*": 3, "model.layers.2.mlp.up_proj": 5}
    add_adapters(model, LoRA(r=7, rank_pattern=pattern))
    ranks = {name: layer.r["default"] for name, layer in iterate_adapters(model)}
    assert {ranks[f"model.layers.{i}.self_attn.v_proj"] for i in range(3)} == {2}
    assert {ranks[f"model.layers.{i}.mlp.down_proj"] for i in range(3)} == {3, 7}
    assert ranks["model.layers.2.mlp.up_proj"] == 5
    assert model.peft_config["default"].rank_pattern == pattern


def test_large_weights_that_are_left_for_their_kind_are_named() -> None:
    left = quantize_model(
        build_language_model("gpt2", n_embd=64, tie_word_embeddings=False), Quantization(skip_modules=[], block_size=32)
    )
    assert any("c_attn (a Conv1D cannot be quantized)" in text for text in left)


class WithoutAdapters(CausalLM):
    """Forgets to add them."""

    def configure_model(self) -> None:
        lora, self.lora = self.lora, None
        super().configure_model()
        self.lora = lora


def fit_refused(make: Any, strategy: Any, options: dict[str, Any], message: str) -> None:
    trainer = build_trainer(strategy, max_steps=1, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make(), Rows(67, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", **SIZES)


def test_settings_that_a_run_would_ignore_are_refused_before_its_first_step(folder: Path) -> None:
    ours: dict[str, Any] = {"print_plan": False}

    def body() -> None:
        dora = LoRA(r=4, use_dora=True)
        inside = FSDP2Strategy(wrap=Wrap(policy="min_size", min_num_params=2000), **ours)
        fit_refused(lambda: build_task(folder, lora=dora), inside, {}, "wrap: .* whose use_dora needs its weight")
        forgetful = WithoutAdapters(pretrained=str(folder), lora=LORA)
        fit_refused(lambda: forgetful, FSDP2Strategy(**ours), {}, "lora: WithoutAdapters.configure_model has added no")
        quantized = build_task(folder, quantization=Quantization())
        fit_refused(lambda: quantized, FSDP2Strategy(**ours), {}, "quantization: quantized weights cannot be trained")
        validated = build_task(folder, quantization=Quantization())
        loader = DataLoader(make_rows(67, 4), batch_size=4, collate_fn=collate)
        build_trainer(FSDP2Strategy(**ours)).validate(validated, loader, verbose=False)
        fit_refused(lambda: validated, FSDP2Strategy(**ours), {}, "quantization: quantized weights cannot be trained")

    run_ranks(body, world_size=1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="auto", precision="bf16-true", logger=False, max_steps=1
    )
    with pytest.raises(ValueError, match=r"lora.dtype: got 'float32' with trainer.precision bf16-true"):
        trainer.fit(build_task(folder, lora=LORA), Rows(67, 4))


class Thawing(CausalLM):
    """Trains the first block for a step, then freezes it."""

    def configure_model(self) -> None:
        super().configure_model()
        self.get_submodule("model.model.embed_tokens").requires_grad_(requires_grad=False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.get_submodule("model.model.layers.0").requires_grad_(requires_grad=False)


def save_and_load(folder: Path, out: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 3, "max_position_embeddings": 64, **SIZES}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
    trainer.fit(build_task(folder, lora=LORA), Rows(67, 4))
    trainer.save_checkpoint(out / "adapters")
    with pytest.raises(ValueError, match="holds only trainable parameters, and this model has no other"):
        build_trainer(FSDP2Strategy(print_plan=False), max_steps=2).fit(
            CausalLM(config=config, lora=LORA), Rows(67, 4), ckpt_path=out / "adapters"
        )
    thawing = Thawing(pretrained=str(folder))
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
    trainer.fit(thawing, Rows(67, 4))
    trainer.save_checkpoint(out / "all")
    if dist.get_rank() == 0:
        meta = torch.load(out / "all" / "meta.pt", weights_only=True)
        assert meta["leaves_out_frozen"] is False
        assert torch.load(out / "adapters" / "meta.pt", weights_only=True)["leaves_out_frozen"] is True


@pytest.mark.full
def test_what_trained_is_in_the_checkpoint_and_goes_only_where_the_rest_is(folder: Path, tmp_path: Path) -> None:
    run_ranks(save_and_load, folder, tmp_path, world_size=2)
