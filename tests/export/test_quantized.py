"""A model that leaves in 4 or 8 bits is what Transformers would make of it with bitsandbytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_runs import KINDS, PLAIN, run_model, save_base, train
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import join_states, save_checkpoint
from lit_fsdp.export.model import export_model
from lit_fsdp.quantization.quantize import Quantization
from ranks import run_ranks


@pytest.fixture(scope="module", params=["llama", "tied", "mixtral"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / request.param, request.param)


def save_whole(base: Path, path: Path) -> Path:
    """Write a checkpoint of a model that has never trained."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = AutoConfig.from_pretrained(base)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_checkpoint(path, join_states(state, []), meta={EXPORT: {"config.json": config.to_json_string()}})
    return path


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("nf4 double", "bfloat16"),
        ("int8", "float32"),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind, name in (
                ("nf4 double", "float32"),
                ("nf4", "float32"),
                ("nf4", "bfloat16"),
                ("fp4", "float32"),
                ("fp4", "bfloat16"),
                ("int8", "bfloat16"),
            )
        ),
    ],
)
def test_transformers_loads_what_it_would_have_made(base: Path, kind: str, name: Any, tmp_path: Path) -> None:
    settings, options = KINDS[kind]
    checkpoint, dtype = save_whole(base, tmp_path / "last.ckpt"), getattr(torch, name)
    export_model(checkpoint, tmp_path / "out", quantization=settings, dtype=name, max_shard_gb=100e-6)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    config = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=dtype)
    truth = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=config)
    assert type(model.model.layers[0].self_attn.q_proj) is type(truth.model.layers[0].self_attn.q_proj)
    assert (run_model(model) - run_model(truth)).abs().max() == 0.0


@pytest.mark.full(after=1)
def test_the_files_hold_what_save_pretrained_writes(base: Path, tmp_path: Path) -> None:
    settings, options = KINDS["nf4 double"]
    export_model(save_whole(base, tmp_path / "last.ckpt"), tmp_path / "out", quantization=settings)
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(tmp_path / "truth")
    ours, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "truth"))
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        if ".quant_state." in name:
            assert json.loads(bytes(ours[name].tolist())) == json.loads(bytes(value.tolist()))
        else:
            assert torch.equal(ours[name], value), name


@pytest.mark.full
def test_a_merged_model_leaves_in_4_bits(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama")
    run_ranks(train, tmp_path, {"pretrained": str(base), "lora": PLAIN})
    settings, options = KINDS["nf4 double"]
    export_model(tmp_path / "last.ckpt", tmp_path / "dense", merge=True)
    export_model(tmp_path / "last.ckpt", tmp_path / "out", merge=True, quantization=settings)
    config = BitsAndBytesConfig(**options)
    truth = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    logits = run_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (logits - run_model(truth)).abs().max() == 0.0
    with pytest.raises(ValueError, match="adapters are not quantized; set merge to true, or leave it out"):
        export_model(tmp_path / "last.ckpt", tmp_path / "new", quantization=settings)


@pytest.mark.full(after=1)
def test_layers_that_do_not_divide_into_blocks_or_are_skipped_stay_dense(base: Path, tmp_path: Path) -> None:
    checkpoint = save_whole(base, tmp_path / "last.ckpt")
    settings = replace(KINDS["nf4"][0], skip_modules=["k_proj", "lm_head"])
    export_model(checkpoint, tmp_path / "out", quantization=settings)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.self_attn.k_proj" in config["llm_int8_skip_modules"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model.model.layers[1].self_attn.k_proj) is torch.nn.Linear
    with pytest.raises(ValueError, match="nothing to quantize in"):
        export_model(checkpoint, tmp_path / "new", quantization=Quantization(block_size=4096))
    with pytest.raises(ValueError, match="block_size: got 7"):
        export_model(checkpoint, tmp_path / "new", quantization=Quantization(block_size=7))


def test_layers_that_transformers_would_not_quantize_stay_dense(tmp_path: Path) -> None:
    checkpoint = save_whole(save_base(tmp_path / "model", "falcon"), tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="nothing to quantize in FalconForCausalLM"):
        export_model(checkpoint, tmp_path / "out", quantization=Quantization())
    assert not (tmp_path / "out").exists()
