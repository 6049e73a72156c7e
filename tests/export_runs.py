"""Trains models, with adapters or whole, that are exported afterwards, and says how far what left is from them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LANGUAGE_MODELS, make_tokens
from torch import Tensor, nn
from training import OPTIMIZER, Rows, build_trainer
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.export.model import export_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks import CausalLM

# Rows of 64 and 192 weights, so that all of them make blocks.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "tied": {**SIZES, "tie_word_embeddings": True},
    "apertus": {},
    "mixtral": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32},
    "qwen3_moe": {},
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "falcon": {"hidden_size": 64, "ffn_hidden_size": 128},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
PLAIN = LoRA(r=4, alpha=8)
KINDS: dict[str, tuple[Quantization, dict[str, Any]]] = {
    "nf4 double": (
        Quantization(),
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "nf4": (Quantization(double_quant=False), {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp4": (Quantization(type="fp4", double_quant=False), {"load_in_4bit": True}),
    "int8": (Quantization(type="int8"), {"load_in_8bit": True}),
}


class Model(CausalLM):
    """Runs through the hooks of all its units, the outermost too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def save_base(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(1)
    model_type = "llama" if family == "tied" else family
    config = AutoConfig.for_model(model_type, **{**LANGUAGE_MODELS[model_type], **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


def train(folder: Path, settings: dict[str, Any]) -> None:
    """Train for three steps, save ``last.ckpt``, and write what the trained model makes of some tokens."""
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=3)
    task = Model(optimizer=replace(OPTIMIZER, learning_rate=0.02), **settings)
    trainer.fit(task, Rows(67, 2))
    trainer.save_checkpoint(folder / "last.ckpt")
    task.train("lora" in settings)  # as run_model runs them
    with torch.no_grad():
        logits = task(make_tokens())
    if trainer.is_global_zero:
        torch.save(logits, folder / "logits.pt")


def run_model(model: nn.Module) -> Tensor:
    with torch.no_grad():  # not in eval(), in which bitsandbytes packs 4-bit weights for other kernels on some CPUs
        return model.train()(input_ids=make_tokens(), use_cache=False).logits


def measure(logits: Tensor, path: Path) -> float:
    return float((logits - torch.load(path / "logits.pt")).abs().max())


def refuse(checkpoint: Path, out: Path, **options: Any) -> str:
    """Return the one line of a refusal, which leaves nothing behind."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        export_model(checkpoint, out, **options)
    assert sorted(out.parent.rglob("*")) == before
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


_MEASURE = """
import sys, threading, time
from pathlib import Path
from lit_fsdp.export.model import export_model

def read_mb():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3

small, large, out, is_merged = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "merged"
export_model(small, out / "small", merge=is_merged)  # what is imported late is no part of the measurement
peak, is_done = 0.0, False
def watch():
    global peak
    while not is_done:
        peak = max(peak, read_mb())
        time.sleep(0.001)
begin = read_mb()
thread = threading.Thread(target=watch)
thread.start()
exported = export_model(large, out / "out", max_shard_gb=0.1, merge=is_merged)
is_done = True
thread.join()
print(peak - begin, exported.num_bytes / 1e6)
"""


def check_memory(small: Path, large: Path, out: Path, kind: str, limit_mb: float) -> None:
    """Export a large checkpoint in a fresh process, after a small one, and compare what the host holds with a limit."""
    command = [sys.executable, "-c", _MEASURE, str(small), str(large), str(out), kind]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    peak, size_mb = map(float, printed.split())
    assert size_mb > 250
    assert peak < limit_mb, f"peak {peak:.0f} MB, model {size_mb:.0f} MB, limit {limit_mb:.0f} MB"
