"""What ``plan`` says of every configuration for cards of a size, which its head repeats.

    python benchmarks/plan_configs.py --out benchmarks/results/plan_configs_DATE.md

Nothing is measured and nothing downloaded: the sizes of the models stand below, as far as they are known without a look
at the Hub, and lie in a cache of the Hub that is made for this.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
GIB = 2**30
_QWEN = {"hidden_act": "silu", "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "attention_bias": False}
_QWEN |= {"initializer_range": 0.02, "num_attention_heads": 16, "num_key_value_heads": 8, "attention_dropout": 0}
_PREDICTOR = {**_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "vocab_size": 2048}
_PREDICTOR |= {"num_code_groups": 16, "max_position_embeddings": 65536}
_TALKER = {**_QWEN, "num_hidden_layers": 28, "vocab_size": 3072, "text_vocab_size": 151936, "text_hidden_size": 2048}
_TALKER |= {"num_code_groups": 16, "max_position_embeddings": 32768, "spk_id": {}, "spk_is_dialect": {}}
_TALKER |= {"codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154}
_TALKER |= {"codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157}
_TALKER |= {"codec_language_id": {"english": 2050}, "code_predictor_config": _PREDICTOR}
_QWEN_TTS = {"model_type": "qwen3_tts", "tokenizer_type": "qwen3_tts_tokenizer_12hz", "tts_model_type": "base"}
_QWEN_TTS |= {"im_start_token_id": 151644, "im_end_token_id": 151645, "tts_pad_token_id": 151671}
_QWEN_TTS |= {"tts_bos_token_id": 151672, "tts_eos_token_id": 151673}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_hidden_layers": 36}
_QWEN3 |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "Qwen/Qwen2.5-72B-Instruct": {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192}
    | {"intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"max_position_embeddings": 32768, "tie_word_embeddings": False},
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base": {**_QWEN_TTS, "tts_model_size": "1b7"}
    | {"talker_config": {**_TALKER, "hidden_size": 2048, "intermediate_size": 6144}}
    | {"speaker_encoder_config": {"enc_dim": 2048, "sample_rate": 24000}},
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base": {**_QWEN_TTS, "tts_model_size": "0b6"}
    | {"talker_config": {**_TALKER, "hidden_size": 1024, "intermediate_size": 3072}}
    | {"speaker_encoder_config": {"enc_dim": 1024, "sample_rate": 24000}},
    # What Transformers takes where nothing is said are the sizes of these two.
    "sesame/csm-1b": {"model_type": "csm", "tie_codebooks_embeddings": True, "codec_config": {"model_type": "mimi"}},
    "nari-labs/Dia-1.6B-0626": {"model_type": "dia"},
    "facebook/dinov2-giant": {"model_type": "dinov2", "hidden_size": 1536, "num_hidden_layers": 40}
    | {"num_attention_heads": 24, "mlp_ratio": 4, "use_swiglu_ffn": True, "image_size": 518, "patch_size": 14},
    "google/vit-huge-patch14-224-in21k": {"model_type": "vit", "hidden_size": 1280, "intermediate_size": 5120}
    | {"num_hidden_layers": 32, "num_attention_heads": 16, "image_size": 224, "patch_size": 14},
}
_ADAPTERS = ("--model.freeze=[]", "--trainer.precision=bf16-true", "--model.lora.r=16")
_NF4 = "--model.quantization.type=nf4"
# The shipped ones, as they are and with other settings that docs name.
OPTIONS: dict[str, list[Sequence[str]]] = {
    "tts_csm_1b_lora_1x16gb": [(), (_NF4,)],
    "tts_dia_1p6b_lora_1x16gb": [(), (_NF4,)],
    "tts_qwen3_1p7b_4x16gb": [(), ("--devices=1", *_ADAPTERS), ("--devices=1", *_ADAPTERS, _NF4)],
}
_SQUARE = {"height": 224, "width": 224}
PROCESSORS: dict[str, dict[str, Any]] = {
    "facebook/dinov2-giant": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}}
    | {"do_center_crop": True, "crop_size": _SQUARE},
    "google/vit-huge-patch14-224-in21k": {"image_processor_type": "ViTImageProcessor", "size": _SQUARE},
}


def write_cache(folder: Path) -> None:
    """Write the configurations where huggingface_hub looks for what it has fetched."""
    for name, config in CONFIGS.items():
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / "sizes"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        if name in PROCESSORS:
            (snapshot / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("sizes")


def plan(config: Path, memory: str, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """Return what ``plan`` writes."""
    out = folder / config.stem
    command = [sys.executable, "-m", "lit_fsdp", "plan", f"--config={config}", f"--device-memory={memory}"]
    environment = {**os.environ, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command += [f"--out={out}", *options]
    subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((out / "plan.json").read_text())
    return found


def describe(config: Path, options: Sequence[str], memory: str, found: dict[str, Any], took_s: float) -> str:
    """Return a row of the report."""
    peak, device = found["memory"], found["device"]
    kinds = ("parameters", "optimizer_state", "gradients", "gathered", "communication", "activations", "rest")
    cells = [
        " ".join([config.name, *options]),
        str(found["ranks"]["world_size"]),
        found["engine"],
        f"{peak['peak_bytes'] / GIB:.2f}",
    ]
    cells += [f"{peak['peak_bytes_by_kind'][kind] / GIB:.2f}" for kind in kinds]
    cells += [f"{found['host']['bytes'] / GIB:.1f}" if found["host"]["bytes"] else ""]
    cells += [f"{device['needed_bytes'] / GIB:.1f} of {memory}", "yes" if device["fits"] else "NO", f"{took_s:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Plan all, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--only", default="", help="Only configurations with this in their name")
    args = parser.parse_args()
    columns = ["configuration", "GPUs", "engine", "peak", "parameters", "optimizer state", "gradients", "gathered"]
    columns += ["communication", "activations", "rest", "host of a rank", "needed", "fits", "to plan, s"]
    lines = [
        "# Plans of the shipped configurations",
        "",
        f"{datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__}, CPU: planned, not measured on any GPU. GiB of",
        "one GPU, the kinds at the moment of the peak. Needed: 1.15 times the peak for the allocator, and what",
        "CUDA and NCCL take (docs/planning.md). What callbacks hold, such as a moving average, is not in it.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    with tempfile.TemporaryDirectory() as name:
        write_cache(Path(name) / "cache")
        for config in sorted((ROOT / "configs").glob("*.yaml")):
            card = re.search(r"x(\d+)gb", config.stem)
            if card is None or args.only not in config.name:
                continue
            for options in OPTIONS.get(config.stem, [()]):
                begin = time.perf_counter()
                found = plan(config, f"{card[1]}GiB", Path(name), options)
                lines.append(describe(config, options, card[1], found, time.perf_counter() - begin))
                print(lines[-1], flush=True)
    if args.out:
        source = "The sizes of the models are those in `benchmarks/plan_configs.py`, which were not read from the Hub."
        args.out.write_text("\n".join([*lines, "", source, ""]))


if __name__ == "__main__":
    main()
