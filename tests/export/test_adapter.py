"""Adapters out: what peft loads over the same base is what was trained, and so is what they are merged into."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_training import TOLERANCE, load_stock, save_dequantized
from export_runs import PLAIN, measure, run_model, save_base, train
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.export.model import export_model
from lit_fsdp.quantization.quantize import Quantization
from ranks import run_ranks

# Linear layers by name: of those that are called as single experts were, peft makes fused ones; seen in 0.21.
EXPERTS = replace(
    PLAIN,
    target_modules=["q_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
PATTERNS = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6}, "alpha_pattern": {"v_proj": 3.5}}
RUNS: dict[str, tuple[str, LoRA, Quantization | None]] = {
    "plain": ("llama", PLAIN, None),
    "gaussian": ("llama", replace(PLAIN, init_lora_weights="gaussian"), None),
    "rslora": ("llama", replace(PLAIN, use_rslora=True), None),
    "dora": ("llama", replace(PLAIN, use_dora=True), None),
    "patterns": ("llama", LoRA(r=4, alpha=8, **PATTERNS), None),
    "ends": ("llama", replace(PLAIN, target_modules=["embed_tokens", "lm_head", "q_proj"]), None),
    "regex": (
        "llama",
        replace(PLAIN, target_modules=r"model\.layers\.[02]\..*_proj", exclude_modules=["k_proj"]),
        None,
    ),
    "saved": ("llama", replace(PLAIN, modules_to_save=["lm_head", "norm"]), None),
    "tied": ("tied", replace(PLAIN, target_modules=["embed_tokens", "v_proj"]), None),
    "gpt2": ("gpt2", PLAIN, None),
    "mixtral": ("mixtral", PLAIN, None),
    "mixtral attention": ("mixtral", replace(PLAIN, target_modules=["q_proj", "v_proj"]), None),
    "qwen3_moe": ("qwen3_moe", PLAIN, None),
    "experts": (
        "mixtral",
        replace(EXPERTS, rank_pattern={"gate_up_proj": 3}, alpha_pattern={"experts.down_proj": 3}),
        None,
    ),
    "experts only": ("qwen3_moe", replace(EXPERTS, target_modules=[]), None),
    "experts gpt_oss": ("gpt_oss", EXPERTS, None),
    "experts olmoe": ("olmoe", EXPERTS, None),
    "experts deepseek_v3": ("deepseek_v3", EXPERTS, None),
    "experts nf4": ("mixtral", EXPERTS, Quantization()),
    "falcon nf4": ("falcon", PLAIN, Quantization()),
    "nf4": ("llama", replace(PLAIN, modules_to_save=["lm_head"]), Quantization(double_quant=False)),
    "nf4 double": ("llama", PLAIN, Quantization()),
    "nf4 dense": (
        "llama",
        replace(PLAIN, modules_to_save=["q_proj", "layers.1.mlp.up_proj"]),
        Quantization(skip_modules=["lm_head", "down_proj"]),
    ),
    "int8 head": ("llama", PLAIN, Quantization(type="int8", skip_modules=[])),
    "nf4 blocks": ("llama", PLAIN, Quantization(block_size=32)),
    "dora nf4": ("llama", replace(PLAIN, use_dora=True), Quantization()),
    "mixtral nf4": (
        "mixtral",
        replace(PLAIN, target_modules=["q_proj", "v_proj"]),
        Quantization(skip_modules=["lm_head", "experts"]),
    ),
    "int8": ("llama", PLAIN, Quantization(type="int8")),
    "fp4": ("llama", PLAIN, Quantization(type="fp4")),
    "loftq": ("llama", replace(PLAIN, init_lora_weights="loftq"), Quantization()),
    "loftq int8": ("llama", replace(PLAIN, init_lora_weights="loftq"), Quantization(type="int8")),
    "olora fp4": ("llama", replace(PLAIN, init_lora_weights="olora"), Quantization(type="fp4", double_quant=False)),
    "pissa": ("llama", replace(PLAIN, init_lora_weights="pissa"), None),
    "pissa fast": ("llama", LoRA(r=4, alpha=8, init_lora_weights="pissa_niter_16", use_rslora=True, **PATTERNS), None),
    "olora": ("llama", replace(PLAIN, init_lora_weights="olora", modules_to_save=["lm_head"]), None),
    "pissa nf4": ("llama", replace(PLAIN, init_lora_weights="pissa"), Quantization()),
    "loftq attention": (
        "llama",
        replace(PLAIN, init_lora_weights="loftq", target_modules=["q_proj", "v_proj"]),
        Quantization(),
    ),
    "olora attention int8": (
        "llama",
        replace(PLAIN, init_lora_weights="olora", target_modules=["q_proj", "v_proj"], modules_to_save=["down_proj"]),
        Quantization(type="int8", skip_modules=["gate_proj"]),
    ),
    "pissa mixtral nf4": ("mixtral", replace(PLAIN, init_lora_weights="pissa"), Quantization()),
    "loftq gpt_oss fp4": (
        "gpt_oss",
        replace(PLAIN, init_lora_weights="loftq"),
        Quantization(type="fp4", block_size=32),
    ),
}
# A case or two of each claim; the others with `pytest -m slow`.
QUICK = (
    "dora",
    "ends",
    "saved",
    "tied",
    "gpt2",
    "mixtral",
    "nf4 double",
    "int8",
    "loftq",
    "pissa fast",
    "experts",
    "experts nf4",
    "falcon nf4",
    "loftq attention",
    "pissa mixtral nf4",
)
# Their base weights are computed anew, by two roundings.
MOVED = ("pissa", "pissa fast", "olora")
# peft adds up their weights, which are multiplied apart here.
ADDED = ("experts", "experts only", "experts gpt_oss", "experts olmoe", "experts deepseek_v3", "experts nf4")
QUANTIZED_MORE = {"experts nf4": "experts", "falcon nf4": "FalconLinear layers"}
# Scales that are no power of two: peft rounds a product and its sum, one kernel here rounds once.
SCALED = ("patterns",)
# What peft loads over the base; the others only merge.
MERGED = (
    *("pissa nf4", "olora fp4", "int8", "loftq int8", "nf4 dense", "int8 head", "nf4 blocks"),
    *("olora attention int8", "pissa mixtral nf4", "loftq gpt_oss fp4"),
)
LOADED = [name for name in RUNS if name not in MERGED]
# The trained weights are what was left of the base, quantized, so that what is merged is exactly those.
OVER_QUANTIZED = (
    *("loftq", "loftq int8", "pissa nf4", "olora fp4"),
    *("loftq attention", "olora attention int8", "pissa mixtral nf4", "loftq gpt_oss fp4"),
)


def mark(names: Iterable[str], quick: Sequence[str] = QUICK) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


class Runs:
    """Runs that are started when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_base(self, family: str) -> Path:
        path = self.folder / "models" / family
        return path if path.exists() else save_base(path, family)

    def get(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            path.mkdir()
            family, lora, quantization = RUNS[name]
            settings = {"pretrained": str(self.get_base(family)), "lora": lora, "quantization": quantization}
            run_ranks(train, path, settings)
        return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.full(after=2)
@pytest.mark.parametrize("name", mark(LOADED))
def test_peft_loads_it_over_the_same_base_with_the_logits_of_the_training_model(
    runs: Runs, name: str, tmp_path: Path
) -> None:
    path = runs.get(name)
    family, _, quantization = RUNS[name]
    exported = export_model(path / "last.ckpt", tmp_path / "out")
    assert exported.files == ["README.md", "adapter_config.json", "adapter_model.safetensors", "export_manifest.json"]
    folder = runs.get_base(family)
    card = (tmp_path / "out/README.md").read_text()
    said = re.findall("Its (.*) were quantized too, which these lines leave in full", card)
    assert said == [QUANTIZED_MORE[name]] if name in QUANTIZED_MORE else said == []
    if name in QUANTIZED_MORE:  # stock libraries have these in full alone: what they compute with, in full
        folder, quantization = save_dequantized(tmp_path / "dense", folder, quantization), None
    base = load_stock(folder, quantization)
    plain = run_model(base)
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    logits = run_model(model)
    assert measure(plain, path) > 1e-3
    assert measure(logits, path) <= (TOLERANCE if name in (*MOVED, *ADDED, *SCALED) else 0.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layers", "tolerance"),
    [
        ("nf4 dense", "llm_int8_skip_modules=['q_proj', 'down_proj', 'model.layers.1.mlp.up_proj', 'lm_head']", 0.0),
        ("int8 head", "llm_int8_skip_modules=[]", 0.01),  # it multiplies in int8
        ("nf4 double", "", 0.0),
        ("nf4 blocks", "", None),
    ],
)
def test_the_card_quantizes_the_layers_that_training_did(
    runs: Runs, name: str, layers: str, tolerance: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs.get(name)
    monkeypatch.chdir(tmp_path)
    export_model(path / "last.ckpt", tmp_path / "out")
    card = Path("out/README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert layers in code
    assert ("llm_int8_skip_modules" in code) == bool(layers)
    found: dict[str, Any] = {}
    exec(code.replace("=quantization)", "=quantization, dtype='float32')"), found)
    logits = run_model(found["model"])
    assert ("blocks of 64: logits differ" in card) == (tolerance is None)
    assert measure(logits, path) > 1e-3 if tolerance is None else measure(logits, path) <= tolerance


@pytest.mark.full
def test_peft_finds_the_base_by_itself(runs: Runs, tmp_path: Path) -> None:
    export_model(runs.get("saved") / "last.ckpt", tmp_path / "out")
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert measure(run_model(model), runs.get("saved")) == 0.0


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    "name",
    mark(
        ["plain", "dora", "ends", "saved", "tied", "mixtral", "gpt2", "experts"],
        quick=("dora", "saved", "tied", "gpt2", "experts"),
    ),
)
def test_the_file_holds_what_peft_writes(runs: Runs, name: str, tmp_path: Path) -> None:
    exported = export_model(runs.get(name) / "last.ckpt", tmp_path / "out")
    base = load_stock(runs.get_base(RUNS[name][0]), None)
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    model.save_pretrained(tmp_path / "truth", save_embedding_layers=False)
    ours, truth = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("out", "truth"))
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[key], truth[key]) for key in truth)
    assert exported.num_parameters == sum(value.numel() for value in truth.values())
    assert exported.dtype == "float32"
    ours, truth = (json.loads((tmp_path / kind / "adapter_config.json").read_text()) for kind in ("out", "truth"))
    for config in (ours, truth):
        for key in ("target_modules", "modules_to_save", "target_parameters"):
            config[key] = sorted(config[key] or []) if not isinstance(config[key], str) else config[key]
    assert {key: value for key, value in ours.items() if value != truth[key]} == {}


@pytest.mark.full(after=2)
@pytest.mark.parametrize("name", mark(RUNS))
def test_merged_weights_are_those_that_peft_merges(runs: Runs, name: str, tmp_path: Path) -> None:
    path = runs.get(name)
    family, _, quantization = RUNS[name]
    exported = export_model(path / "last.ckpt", tmp_path / "out", merge=True)
    assert "config.json" in exported.files
    assert not any(file.startswith("adapter") for file in exported.files)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    if quantization is None or name in OVER_QUANTIZED:
        assert measure(run_model(model), path) <= TOLERANCE
    if name in OVER_QUANTIZED:
        return
    export_model(path / "last.ckpt", tmp_path / "adapter")
    truth = PeftModel.from_pretrained(load_stock(runs.get_base(family), None), tmp_path / "adapter")
    merged = truth.merge_and_unload().state_dict()
    if family == "tied":
        del merged["lm_head.weight"]  # which peft changes too
    differences = {key: float((model.state_dict()[key] - merged[key]).abs().max()) for key in merged}
    assert max(differences.values()) <= (1e-6 if name in MOVED else 0.0), differences
