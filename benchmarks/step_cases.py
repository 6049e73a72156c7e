"""What ``step.py`` trains: models with random weights in folders, and rows that all variants read in the same order."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

LEARNING_RATE = 1e-4
LORA_RANK = 16
_TEXT_MODELS: dict[str, dict[str, Any]] = {
    # Rows of whole blocks of 64, so that ours quantizes them all, too.
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "cpu": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
    | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "cuda": {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "1gb": {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 14}
    | {"num_attention_heads": 16, "num_key_value_heads": 16},
    "experts": {"vocab_size": 4096, "hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4}
    | {"model_type": "qwen3_moe", "initializer_range": 0.05},  # so that a loss shows what experts learned
}
_VIT: dict[str, dict[str, int]] = {
    "tiny": {"image_size": 16, "patch_size": 8, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    | {"num_attention_heads": 3},
    "cpu": {"image_size": 64, "patch_size": 8, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6}
    | {"num_attention_heads": 3},
    # Of ViT-H.
    "cuda": {"image_size": 224, "patch_size": 14, "hidden_size": 1280, "intermediate_size": 5120}
    | {"num_hidden_layers": 32, "num_attention_heads": 16},
}
CLASSES = 100
Adapters = Literal["lora", "qlora"]
Size = Literal["tiny", "cpu", "cuda"]
_LIGHTNING = ("ours_own_module", "model_parallel", "lightning_fsdp", "ddp")
_OURS = ("ours", "ours_monitored")
_HF = ("accelerate", "hf_trainer")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of training.

    Args:
        title: For pages.
        kind: What is trained.
        variants: Who trains it; ratios are to the first.
        batch: Rows of a rank and step, by size of the machine; ``length`` likewise, of a row of text.
        adapters: What is trained of the model; ``None`` all of it.
        targets: Of the adapters, by the names of peft.
        is_rounded: Whether weights are rounded to NF4 first, so that quantization, then without its second level,
            changes none: stock libraries leave fused experts in full, and must compute the same.
        model: Which language model; ``None`` takes a Llama by the size of the machine.
        ranks: ``None`` takes those that are asked for.
        num_steps: Instead of those that are asked for.
    """

    title: str
    kind: Literal["text", "image", "speech"]
    variants: tuple[str, ...]
    batch: dict[Size, int]
    length: dict[Size, int]
    adapters: Adapters | None = None
    targets: dict[str, Any] = field(default_factory=lambda: {"target_modules": "all-linear"})
    is_rounded: bool = False
    model: str | None = None
    ranks: int | None = None
    num_steps: int | None = None


_TEXT: dict[str, Any] = {
    "kind": "text",
    "batch": {"tiny": 1, "cpu": 1, "cuda": 2},
    "length": {"tiny": 16, "cpu": 128, "cuda": 2048},
}
_LEAST: dict[str, Any] = _TEXT | {"batch": {"tiny": 1, "cpu": 1, "cuda": 1}, "length": dict.fromkeys(_TEXT_MODELS, 16)}
_NO_LENGTH: dict[str, Any] = {"length": {}}
_EXPERTS: dict[str, Any] = _TEXT | {"model": "experts", "ranks": 1, "variants": ("stock", "ours"), "is_rounded": True}
_EXPERTS["targets"] = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = {
    "full": Case(title="Text, all weights", variants=("plain", *_OURS, *_LIGHTNING, *_HF, "trl"), **_TEXT),
    "no_compute": Case(
        title="Text, all weights, next to no compute",
        variants=("plain", *_OURS, *_LIGHTNING, *_HF, "trl"),
        model="tiny",
        num_steps=24,
        **_LEAST,
    ),
    "lora": Case(title="Text, LoRA", variants=("plain", *_OURS, *_LIGHTNING, *_HF, "trl"), adapters="lora", **_TEXT),
    "qlora_1": Case(
        title="Text, QLoRA on one rank",
        variants=("stock", *_OURS, "ours_own_module", "hf_trainer", "trl"),
        adapters="qlora",
        ranks=1,
        **_TEXT,
    ),
    "qlora": Case(
        title="Text, QLoRA",
        variants=("accelerate_whole", *_OURS, *_LIGHTNING, *_HF, "trl"),
        adapters="qlora",
        **_TEXT,
    ),
    "experts_lora": Case(title="Text, LoRA on fused experts, one rank", adapters="lora", **_EXPERTS),
    "experts_qlora": Case(
        title="Text, QLoRA on fused experts (in full for stock), one rank", adapters="qlora", **_EXPERTS
    ),
    "vit": Case(
        title="Vision transformer",
        kind="image",
        variants=("plain", *_OURS, *_LIGHTNING, *_HF),
        batch={"tiny": 2, "cpu": 4, "cuda": 32},
        **_NO_LENGTH,
    ),
    "speech": Case(
        title="Speech (Qwen3-TTS)",
        kind="speech",
        variants=("plain", *_OURS, *_LIGHTNING, *_HF),
        batch={"tiny": 1, "cpu": 2, "cuda": 8},
        length={"tiny": 8, "cpu": 40, "cuda": 200},
    ),
    "startup_tiny": Case(
        title="Start-up with a tiny model",
        variants=("plain", *_OURS, *_HF),
        model="tiny",
        num_steps=2,
        **_LEAST,
    ),
    "startup_1gb": Case(
        title="Start-up with a checkpoint of 1 GB",
        variants=("plain", *_OURS, *_HF),
        model="1gb",
        num_steps=2,
        **_LEAST,
    ),
}


def build_case(case: Case, size: Size, num_rows: int, folder: Path) -> None:
    """Write the model and the rows of a case."""
    import torch

    torch.manual_seed(0)
    if case.kind == "speech":
        rows = _build_speech(size, case.length[size], case.batch[size], num_rows, folder)
    elif case.kind == "image":
        rows = _build_images(size, num_rows, folder)
    else:
        rows = _build_text(case, size, num_rows, folder)
    torch.save(rows, folder / "rows.pt")


def _build_text(case: Case, size: Size, num_rows: int, folder: Path) -> Any:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = {"model_type": "llama", **_TEXT_MODELS[case.model or size]}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, max_position_embeddings=4096, **ends))
    if case.is_rounded:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        for matrix in (p for p in model.parameters() if p.dim() > 1):
            matrix.data = dequantize_4bit(*quantize_4bit(matrix.data, quant_type="nf4"))
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2").save_pretrained(folder)
    ids = torch.randint(sizes["vocab_size"], (num_rows, case.length[size]))
    return [{"input_ids": row, "labels": row} for row in ids]


def _build_images(size: Size, num_rows: int, folder: Path) -> Any:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    sizes = _VIT[size]
    ViTForImageClassification(ViTConfig(num_labels=CLASSES, **sizes)).save_pretrained(folder)
    return [
        {"pixel_values": torch.randn(3, sizes["image_size"], sizes["image_size"]), "labels": torch.tensor(i % CLASSES)}
        for i in range(num_rows)
    ]


def _build_speech(size: Size, num_frames: int, batch: int, num_rows: int, folder: Path) -> Any:
    """Write rows that are batches already; all utterances have the same length, so a mean of means is one of all."""
    import torch
    from plan_models import SPEECH
    from safetensors.torch import save_file

    from lit_fsdp.tasks.tts.families.model_types import parse_family
    from lit_fsdp.tasks.tts.utterance import Utterance
    from lit_fsdp.weights.load import init_weights, materialize

    raw: Any = SPEECH["qwen3_tts_0p6b" if size == "cuda" else "qwen3_tts"]
    raw = {"model_type": "qwen3_tts"} | raw
    family, config = parse_family(raw)
    with torch.device("meta"):
        model = family.build_model(config)
    materialize(model, torch.device("cpu"))
    init_weights(model, 5)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    talker = raw["talker_config"]
    rows = []
    for _ in range(num_rows // batch):
        codes = torch.randint(2048, (batch, num_frames, talker["num_code_groups"])).numpy()
        voices = torch.randn(batch, raw["speaker_encoder_config"]["enc_dim"]).numpy()
        utterances = [
            Utterance(text_ids=list(range(1, 12)), codes=code, speaker=voice)
            for code, voice in zip(codes, voices, strict=True)
        ]
        rows.append(family.collate(utterances, config))
    return rows


def list_own_rows(rows: Sequence[Any], batch: int, rank: int, num_ranks: int) -> list[Any]:
    """Return the rows of a rank: batches go to ranks in turn, as accelerate deals them."""
    return [row for i, row in enumerate(rows) if i // batch % num_ranks == rank]


def fill_adapters(named_parameters: Iterator[tuple[str, Any]]) -> int:
    """Give the first matrices of adapters numbers that go with the name of their layer, sharded or not; count them.

    Each library draws its own otherwise.
    """
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    count = 0
    for name, parameter in named_parameters:
        if (found := re.search(r"layers\.\d+\..*(?=\.lora_A\b)", name)) is None:
            continue
        layer = found.group().replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        generator = torch.Generator().manual_seed(zlib.crc32(layer.encode()))
        values = torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(0.1).to(parameter.device)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                values = distribute_tensor(values, mesh, placements, src_data_rank=None)
            parameter.copy_(values)
        count += 1
    return count
