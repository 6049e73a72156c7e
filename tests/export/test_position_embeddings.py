"""What is exported of a model that was trained at another size needs no option to compute what it computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification

from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import save_checkpoint
from lit_fsdp.export.model import Exported, export_model
from lit_fsdp.tasks.image_classification.model import check_size
from lit_fsdp.weights.base_weights import IMAGE_SIZE

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 4}
MODELS: dict[str, dict[str, Any]] = {
    "vit": SIZES,
    "deit": SIZES,
    "ijepa": SIZES,
    "dinov2": SIZES,
    "beit": {**SIZES, "use_relative_position_bias": True},
    "clip": {"vision_config": {**SIZES, **IMAGES}, "text_config": {**SIZES, "vocab_size": 8}},
    "siglip": {"vision_config": {**SIZES, **IMAGES}, "text_config": {**SIZES, "vocab_size": 8}},
    "swin": {"embed_dim": 16, "depths": [1], "num_heads": [1], "window_size": 2, "use_absolute_embeddings": True},
}
SQUARE = ("clip", "siglip")  # have no other image_size
DYNAMIC = ("dinov2", "beit")  # interpolate without being told


def build(model_type: str) -> Any:
    torch.manual_seed(0)
    options = {**({} if model_type in SQUARE else IMAGES), **MODELS[model_type]}
    config = AutoConfig.for_model(model_type, **options, num_labels=3, architectures=[])
    model = AutoModelForImageClassification.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # which some begin with zeros
            if "position" in name or "cls_token" in name or "bias" in name:
                parameter.normal_(std=0.5)
    return model


def save_and_export(model: Any, size: tuple[int, int], folder: Path, **options: Any) -> Exported:
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    meta = {EXPORT: {"config.json": config.to_json_string()}, "global_step": 1}
    if check_size(model.config, size):
        meta[IMAGE_SIZE] = list(size)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_checkpoint(folder / "last.ckpt", {"state_dict": state}, meta=meta)
    return export_model(folder / "last.ckpt", folder / "model", **options)


@pytest.mark.slow(after=8)
@pytest.mark.full
@pytest.mark.parametrize("size", [(24, 24), (12, 16)], ids=str)
@pytest.mark.parametrize("model_type", MODELS)
def test_an_exported_model_computes_at_the_size_it_was_trained_on_what_it_did(
    model_type: str, size: tuple[int, int], tmp_path: Path
) -> None:
    model = build(model_type)
    pixels = torch.randn(2, 3, *size)
    exported = save_and_export(model, size, tmp_path)
    stock = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    is_told = model_type in SQUARE and size[0] != size[1]
    options = {"interpolate_pos_encoding": True}
    with torch.no_grad():
        expected = model(pixels, **({} if model_type == "dinov2" else options)).logits
        assert torch.allclose(stock(pixels, **(options if is_told else {})).logits, expected, atol=1e-5)
    changed = [n for n, p in stock.named_parameters() if not torch.equal(p, model.get_parameter(n))]
    assert len(changed) == (0 if is_told or model_type in DYNAMIC else 1)
    assert len(exported.notes) == (model_type not in DYNAMIC)
    if is_told:
        assert exported.notes[0].endswith("call it with `interpolate_pos_encoding=True`.")
        assert exported.notes[0] in (tmp_path / "model" / "README.md").read_text()


def test_positions_that_trained_in_low_precision_are_interpolated_in_float32(tmp_path: Path) -> None:
    model = build("vit").bfloat16()
    save_and_export(model, (24, 24), tmp_path, dtype="float32")
    stock = AutoModelForImageClassification.from_pretrained(tmp_path / "model", dtype=torch.float32)
    embeddings, pixels = model.float().vit.embeddings, torch.randn(1, 3, 24, 24)
    with torch.no_grad():
        expected = embeddings(pixels, interpolate_pos_encoding=True)
        assert torch.allclose(stock.vit.embeddings(pixels), expected, atol=1e-6)
