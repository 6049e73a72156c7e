"""Merging streams, casts and untangles; what does not fit together is refused in one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from export_runs import PLAIN, check_memory, refuse, save_base, train
from models import LANGUAGE_MODELS, build_language_model
from peft import PeftModel
from safetensors.torch import load_file
from training import Rows
from transformers import AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import join_states, save_checkpoint
from lit_fsdp.export.adapter import describe_adapters
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.export.model import export_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks import CausalLM
from lit_fsdp.weights.base_weights import BASE, LORA, describe_base
from lit_fsdp.weights.load import init_weights
from ranks import run_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over a base model in bfloat16, which is ``base`` in its folder."""
    folder = tmp_path_factory.mktemp("run")
    base = save_base(folder / "base", "mixtral", torch.bfloat16)
    run_ranks(train, folder, {"pretrained": str(base), "lora": replace(PLAIN, modules_to_save=["lm_head"])})
    return folder


def merge_by_peft(run: Path, tmp_path: Path, dtype: torch.dtype) -> dict[str, Any]:
    export_model(run / "last.ckpt", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(run / "base", dtype=dtype)
    return PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()


@pytest.mark.full
def test_weights_are_added_in_full_precision_and_rounded_once_to_the_dtype_of_the_base(
    run: Path, tmp_path: Path
) -> None:
    exported = export_model(run / "last.ckpt", tmp_path / "out", merge=True)
    assert exported.dtype == json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    truth = merge_by_peft(run, tmp_path, torch.float32)
    assert [n for n, value in model.state_dict().items() if not torch.equal(value, truth[n].bfloat16())] == []
    rounded = merge_by_peft(run, tmp_path / "rounded", torch.bfloat16)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, rounded[name].to(value.dtype), rtol=2**-7, atol=1e-3, msg=name)


@pytest.mark.full
def test_a_dtype_is_that_of_the_merged_weights(run: Path, tmp_path: Path) -> None:
    exported = export_model(run / "last.ckpt", tmp_path / "out", merge=True, dtype="float32", max_shard_gb=50e-6)
    assert exported.dtype == "float32"
    assert "model.safetensors.index.json" in exported.files
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    truth = merge_by_peft(run, tmp_path, torch.float32)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, truth[name])] == []
    export_model(run / "last.ckpt", tmp_path / "half", dtype="bfloat16")
    halves, whole = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("half", "adapter"))
    assert all(torch.equal(halves[name], whole[name].bfloat16()) for name in whole)


@pytest.mark.full
def test_a_copy_of_the_base_will_do_and_the_card_names_it(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "base", tmp_path / "copy")
    export_model(run / "last.ckpt", tmp_path / "a", merge=True, base=str(tmp_path / "copy"))
    export_model(run / "last.ckpt", tmp_path / "b", merge=True)
    ours, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(ours[name], truth[name]) for name in truth)
    card = (tmp_path / "a" / "README.md").read_text()
    assert f"The base model was `{run / 'base'}`." in card
    assert "base_model:" not in card  # the Hub refuses a card whose base model is a folder


# Refusals


def save_adapters(
    path: Path,
    base: Path,
    lora: LoRA,
    quantization: Quantization | None = None,
    has_base: bool = True,
    family: str = "llama",
) -> Path:
    """Write a checkpoint of adapters that have never trained."""
    model = build_language_model(family, "cpu")
    model.config.architectures = [type(model).__name__]
    add_adapters(model, replace(lora, init_lora_weights="default"))
    init_weights(model, 0)
    files = {"config.json": model.config.to_json_string(), ADAPTER_CONFIG: describe_adapters(model, lora, str(base))}
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    own = {EXPORT: files, LORA: lora, BASE: describe_base(str(base), quantization) if has_base else None}
    kept = {name: value for name, value in own.items() if value is not None}
    save_checkpoint(path, join_states(state, []), meta=kept)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "llama"
    build_language_model("llama", "cpu").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapters(tmp_path_factory.mktemp("run") / "last.ckpt", base, PLAIN)


def test_another_base_is_refused(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    build_language_model("llama", "cpu").save_pretrained(tmp_path / "other")
    message = refuse(checkpoint, tmp_path / "out", merge=True, base=str(tmp_path / "other"))
    assert message == (
        f"base: got {str(tmp_path / 'other')!r}: its weights are not those of {str(base)!r} that the adapters were "
        "trained over; set base to a copy of that model"
    )
    message = refuse(checkpoint, tmp_path / "out", merge=True, base="no/such-model")
    assert message.startswith("base: got 'no/such-model': no such folder, and the Hub says: ")
    assert "--base" not in message  # which it is the value of


def test_a_base_that_is_gone_is_named(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "moved")
    path = save_adapters(tmp_path / "last.ckpt", tmp_path / "moved", replace(PLAIN, init_lora_weights="olora"))
    shutil.rmtree(tmp_path / "moved")
    message = refuse(path, tmp_path / "out")
    assert message.startswith(f"base: got {str(tmp_path / 'moved')!r}: there is no such folder: ")
    assert message.endswith("; if it is elsewhere, set --base to its folder")


def test_settings_without_need_are_refused(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    message = refuse(checkpoint, tmp_path / "out", base=str(base))
    assert message.endswith("adapters of init_lora_weights 'default' are exported without it; leave it out")
    assert "max_shard_gb: got 1: adapters are one file" in refuse(checkpoint, tmp_path / "out", max_shard_gb=1)
    model = build_language_model("llama", "cpu")
    model.config.architectures = [type(model).__name__]
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    whole = tmp_path / "whole.ckpt"
    save_checkpoint(whole, join_states(state, []), meta={EXPORT: {"config.json": model.config.to_json_string()}})
    expected = f"merge: got true: {whole} holds a whole model and no adapters; leave it out"
    assert refuse(whole, tmp_path / "out", merge=True) == expected
    assert refuse(whole, tmp_path / "out", base=str(base)).startswith(f"base: got {str(base)!r}: {whole} holds a whole")


def test_what_no_other_tool_could_load_is_refused(base: Path, tmp_path: Path) -> None:
    path = save_adapters(
        tmp_path / "last.ckpt", base, replace(PLAIN, init_lora_weights="pissa"), Quantization(block_size=32)
    )
    message = refuse(path, tmp_path / "out")
    assert message.startswith(
        "merge: got false: adapters of init_lora_weights 'pissa' over nf4 weights fit only what was left"
    )
    path = save_adapters(tmp_path / "random.ckpt", base, PLAIN, has_base=False)
    assert "holds adapters over random weights" in refuse(path, tmp_path / "out")
    assert "holds adapters over random weights" in refuse(path, tmp_path / "out", merge=True)


@pytest.mark.parametrize("names", [["q_proj", "down_proj"], "all-linear", ["mlp.gate_proj"]])
def test_layers_that_peft_would_take_for_experts_are_refused(names: Any, tmp_path: Path) -> None:
    build_language_model("deepseek_v3", "cpu").save_pretrained(tmp_path / "base")
    lora = replace(PLAIN, target_modules=names)
    path = save_adapters(tmp_path / "last.ckpt", tmp_path / "base", lora, family="deepseek_v3")
    message = refuse(path, tmp_path / "out")
    reasons = ("peft would take ", "peft could not load the adapters: Cannot convert PEFT target(s)")
    assert message.startswith(tuple(f"merge: got false: {reason}" for reason in reasons))
    assert message.endswith("set merge to true, or train with other lora.target_modules")
    export_model(path, tmp_path / "out", merge=True)
    task = CausalLM(pretrained=str(tmp_path / "base"), lora=lora)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with pytest.warns(UserWarning, match=r"^lora.target_modules: peft .*: they can be exported only with merge: true$"):
        pl.Trainer(accelerator="cpu", devices=1, max_steps=1, **quiet).fit(task, Rows(67, 2))


def test_a_folder_that_is_not_complete_is_refused(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    for name in (MANIFEST, "__0_0.distcp"):
        shutil.copytree(checkpoint, tmp_path / name / "last.ckpt")
        (tmp_path / name / "last.ckpt" / name).unlink()
        assert name in refuse(tmp_path / name / "last.ckpt", tmp_path / "out")
    assert "holds or lies in the base model" in refuse(checkpoint, base / "out", merge=True)


def test_only_an_exported_folder_is_replaced(checkpoint: Path, tmp_path: Path) -> None:
    export_model(checkpoint, tmp_path / "out")
    assert "is not empty" in refuse(checkpoint, tmp_path / "out", merge=True)
    export_model(checkpoint, tmp_path / "out", merge=True, overwrite=True)
    assert not (tmp_path / "out" / ADAPTER_CONFIG).exists()


# Memory


@pytest.mark.slow
def test_memory_is_that_of_one_tensor_not_of_the_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 128}
    monkeypatch.setitem(LANGUAGE_MODELS, "llama", {**LANGUAGE_MODELS["llama"], **size})
    model = build_language_model("llama", "cpu")
    model.save_pretrained(tmp_path / "base")
    largest = max(p.numel() * 4 for p in model.parameters()) / 1e6
    del model
    save_adapters(tmp_path / "last.ckpt", tmp_path / "base", PLAIN)
    check_memory(checkpoint, tmp_path / "last.ckpt", tmp_path, "merged", 5 * largest + 20)
