"""Models that bitsandbytes has quantized already: each rank reads the bytes of its own rows."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_runs import KINDS, PLAIN, Model, measure, run_model, save_base, train
from models import build_language_model, make_tokens
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import OPTIMIZER, Rows, build_trainer, collate, gather_weights, make_rows
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.export.model import export_model
from lit_fsdp.quantization.layers import iterate_quantized, quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.causal_lm.opened import OpenedLM, load_whole, open_source
from lit_fsdp.weights.load import load_weights, materialize
from lit_fsdp.weights.prequantized import QuantizedFiles, read_quantization
from lit_fsdp.weights.safetensors_io import TensorFiles
from ranks import RankError, run_ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it was, in ``dense``, and as Transformers saves it in each kind."""
    folder = tmp_path_factory.mktemp("models")
    save_base(folder / "dense", "llama")
    for name, (_, options) in KINDS.items():
        config = BitsAndBytesConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config, dtype=torch.float32)
        model.save_pretrained(folder / name)
    return folder


def load(model: Path, out: Path, quantization: Quantization | None, lora: LoRA | None = PLAIN) -> None:
    """Write all weights that a run begins with."""
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
    task = Model(pretrained=str(model), lora=lora, quantization=quantization, optimizer=replace(OPTIMIZER))
    found: dict[str, Tensor] = {}
    task.on_train_start = lambda: found.update(gather_weights(task))  # type: ignore[method-assign]
    trainer.fit(task, Rows(67, 2))
    if trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in found.items()}, out)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("nf4 double", 3),
        ("int8", 3),
        ("fp4", 1),
        *(
            pytest.param(kind, world_size, marks=pytest.mark.slow)
            for kind, world_size in (("nf4 double", 1), ("nf4", 1), ("nf4", 3), ("fp4", 3), ("int8", 1))
        ),
    ],
)
def test_the_bytes_are_those_of_the_file_and_of_our_own_rounding(
    models: Path, kind: str, world_size: int, tmp_path: Path
) -> None:
    run_ranks(load, models / kind, tmp_path / "stored", None, world_size=world_size)
    run_ranks(load, models / "dense", tmp_path / "ours", KINDS[kind][0], world_size=world_size)
    stored, ours = (torch.load(tmp_path / name) for name in ("stored", "ours"))
    assert stored.keys() == ours.keys()
    base = [name for name in ours if "lora_" not in name]
    assert any(name.endswith("base_layer.weight_absmax") for name in base)
    assert [name for name in base if not torch.equal(stored[name], ours[name])] == []
    codes = load_file(models / kind / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(
        stored["model.layers.1.mlp.up_proj.base_layer.weight"].flatten(), codes.flatten().view(torch.uint8)
    )


def test_settings_come_from_the_file(models: Path) -> None:
    for kind, (settings, _) in KINDS.items():
        found = read_quantization(models / kind)
        assert found is not None
        assert (found.type, found.block_size, found.is_double) == (
            settings.type,
            settings.block_size,
            settings.is_double,
        )
    assert read_quantization(models / "dense") is None


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
def test_a_rank_reads_its_rows_and_not_a_byte_more(models: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        num_bytes, copy_rows = 0, TensorFiles.copy_rows

        def count(self: TensorFiles, name: str, begin: int, out: Tensor) -> None:
            nonlocal num_bytes
            is_small = any(part in name for part in ("quant_state", "weight_format", "_nested"))
            num_bytes += 0 if is_small else out.nbytes
            copy_rows(self, name, begin, out)

        monkeypatch.setattr(TensorFiles, "copy_rows", count)
        task = Model(pretrained=str(models / kind), lora=PLAIN)
        build_trainer(FSDP2Strategy(print_plan=False), max_steps=1).fit(task, Rows(67, 2))
        own = [p.to_local() for name, p in task.named_parameters() if "lora_" not in name]  # type: ignore[operator]
        assert num_bytes == sum(p.nbytes for p in own)

    run_ranks(body, world_size=3)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4 double", *(pytest.param(k, marks=pytest.mark.slow) for k in ("nf4", "fp4"))])
def test_adapters_trained_over_it_are_exported_and_merged(models: Path, kind: str, tmp_path: Path) -> None:
    run_ranks(train, tmp_path, {"pretrained": str(models / kind), "lora": PLAIN})
    export_model(tmp_path / "last.ckpt", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(models / kind)
    assert measure(run_model(base), tmp_path) > 1e-3
    assert measure(run_model(PeftModel.from_pretrained(base, tmp_path / "adapter")), tmp_path) == 0.0
    exported = export_model(tmp_path / "last.ckpt", tmp_path / "merged", merge=True)
    assert exported.dtype == "float32"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    assert not hasattr(model.config, "quantization_config")
    assert measure(run_model(model), tmp_path) < 5e-6


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
def test_a_run_over_it_is_opened_as_it_was_trained(
    models: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    run_ranks(train, tmp_path, {"pretrained": str(models / kind), "lora": PLAIN})
    path = str(tmp_path / "last.ckpt")
    model = load_whole(open_source(path), dtype="float32", attention="sdpa", device=torch.device("cpu"))
    logits = run_model(model)
    assert measure(logits, tmp_path) <= 1e-6

    def predict(quantization: Quantization | None = None) -> None:
        task = OpenedLM(source=path, quantization=quantization)
        rows = [{"input_ids": tokens, "labels": tokens} for tokens in make_tokens()]
        loader = DataLoader(rows, batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
        (metrics,) = build_trainer(FSDP2Strategy(print_plan=False)).validate(task, loader, ckpt_path=path)
        losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), make_tokens()[:, 1:].flatten())
        assert metrics["val/loss"] == pytest.approx(float(losses), abs=1e-6)

    run_ranks(predict)
    other = Quantization(type="fp4")
    with pytest.raises(RankError, match=r"quantization\.type: got 'fp4': the weights of pretrained are stored with"):
        run_ranks(predict, other)
    with pytest.raises(ValueError, match=r"^quantization: the weights of .* are quantized already; leave it out$"):
        load_whole(open_source(path, quantization=other), dtype="float32", attention="sdpa", device=torch.device("cpu"))


def fit(model: Path, **options: Any) -> None:
    build_trainer(FSDP2Strategy(print_plan=False), max_steps=1).fit(
        Model(pretrained=str(model), **options), Rows(67, 2)
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": PLAIN, "quantization": Quantization(type="fp4")}, "quantization.type: got 'fp4': the weights of"),
        ({"lora": PLAIN, "quantization": Quantization(block_size=128)}, "quantization.block_size: got 128: the"),
        (
            {"lora": PLAIN, "quantization": Quantization(double_quant=False)},
            "quantization.double_quant: got False: the weights",
        ),
        (
            {"lora": replace(PLAIN, modules_to_save=["lm_head", "1.mlp.down_proj"])},
            "lora.modules_to_save: model.layers.1.mlp.down_proj is stored quantized, and cannot be trained; name it in",
        ),
        (
            {"lora": PLAIN, "quantization": Quantization(skip_modules=["q_proj"])},
            "quantization.skip_modules: the weights of",
        ),
        (
            {"lora": replace(PLAIN, init_lora_weights="loftq"), "quantization": Quantization()},
            "lora.init_lora_weights: got 'loftq': it needs the",
        ),
        (
            {"lora": replace(PLAIN, init_lora_weights="pissa")},
            "lora.init_lora_weights: got 'pissa': it needs the weights that those of",
        ),
        ({}, "quantization: quantized weights cannot be trained; set lora"),
    ],
)
def test_settings_that_contradict_the_file_are_refused(models: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(lambda: fit(models / "nf4 double", **options), world_size=1)
    assert any(line.startswith(f"ValueError: {message}") for line in str(caught.value).splitlines())


def test_equal_settings_are_accepted(models: Path) -> None:
    run_ranks(lambda: fit(models / "nf4 double", lora=PLAIN, quantization=Quantization()), world_size=1)


def change(folder: Path, out: Path, **changes: Any) -> Path:
    """Copy a model with another description of one of its weights."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"
    state = {**json.loads(bytes(tensors[name].tolist())), **changes}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [128, 32]}, "q_proj.weight has rows of 32, which do not divide into its blocks of 64"),
        ({"shape": [64, 128]}, r"q_proj.weight is stored in 2048 bytes for a weight of \(64, 128\)"),
        ({"nested_blocksize": 512}, "has a second level of blocks that are not of 256"),
        ({"blocksize": 8192}, "block_size: got 8192: expected one of"),
    ],
)
def test_weights_that_could_not_be_sharded_are_refused_by_name(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = change(models / "nf4 double", tmp_path / "changed", **changes)
    with pytest.raises(ValueError, match=message):
        QuantizedFiles(folder)


def save_quantized(folder: Path, model_type: str, **sizes: Any) -> tuple[nn.Module, nn.Module]:
    """Save a model of bitsandbytes; return it, and the same on the meta device, before it is quantized."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "dense")
    options = {"quantization_config": BitsAndBytesConfig(**KINDS["nf4"][1]), "dtype": torch.float32}
    stock = AutoModelForCausalLM.from_pretrained(folder / "dense", **options)
    stock.save_pretrained(folder / "stored")
    with torch.device("meta"):
        return stock, AutoModelForCausalLM.from_config(config)


@pytest.mark.full
def test_weights_are_found_under_the_names_that_files_have_for_them(tmp_path: Path) -> None:
    """As of Gemma 3, whose text model is ``language_model.model`` there."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = {**sizes, "vocab_size": 67, "num_key_value_heads": 1, "head_dim": 32}
    stock, model = save_quantized(tmp_path, "gemma3", text_config=text, vision_config={**sizes, "image_size": 28})
    settings = read_quantization(tmp_path / "stored", model)
    assert settings is not None
    quantize_model(model, settings)
    materialize(model, torch.device("cpu"))
    load_weights(model, tmp_path / "stored")
    kinds = {name: type(module).__name__ for name, module in stock.named_modules()}
    assert {name for name, _ in iterate_quantized(model)} == {n for n, kind in kinds.items() if kind == "Linear4bit"}
    assert torch.equal(run_model(model), run_model(stock))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        (
            "gpt2",
            {"n_embd": 64, "n_head": 2, "n_layer": 1},
            r"attn.c_attn is stored .* \(a Conv1D cannot be quantized\)",
        ),
        (
            "falcon_mamba",
            {"hidden_size": 64, "num_hidden_layers": 1, "state_size": 16, "time_step_rank": 64},
            r"mixer.dt_proj is stored .* \(the module around it reads its weight\)",
        ),
    ],
)
def test_layers_that_cannot_be_computed_with_as_they_are_stored_are_refused(
    model_type: str, sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, model = save_quantized(tmp_path, model_type, vocab_size=67, **sizes)
    with pytest.raises(ValueError, match=message):
        read_quantization(tmp_path / "stored", model)


def test_weights_of_several_kinds_are_refused(models: Path, tmp_path: Path) -> None:
    folder = change(models / "nf4 double", tmp_path / "changed", blocksize=32)
    with pytest.raises(ValueError, match="its weights are quantized in 2 ways"):
        read_quantization(folder)


def test_a_dense_model_refuses_them(models: Path) -> None:
    model = build_language_model("llama", "cpu")
    with pytest.raises(ValueError, match="holds quantized weights, and LlamaForCausalLM has none; quantize it alike"):
        load_weights(model, models / "nf4 double")


def test_it_is_validated_without_adapters(models: Path, tmp_path: Path) -> None:
    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False))
        task = Model(pretrained=str(models / "nf4 double"))
        loader = DataLoader(make_rows(67, 4), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
        (metrics,) = trainer.validate(task, loader, verbose=False)
        if trainer.is_global_zero:
            torch.save(metrics["val/loss"], tmp_path / "loss")

    run_ranks(body)
    batch = collate(make_rows(67, 4))
    with torch.no_grad():
        truth = AutoModelForCausalLM.from_pretrained(models / "nf4 double").train()(**batch).loss
    assert torch.load(tmp_path / "loss") == pytest.approx(float(truth), abs=1e-6)
