"""A tiny speech model and ragged clips to train it on, and the parts of a run on ranks that exist already."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from speech_golden import CONFIG, draw
from training import OPTIMIZER, Environment, Result, train_stock

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import LRSchedule, SpeechData, TextToSpeech
from lit_fsdp.tasks.tts.codec.formants import build_codec_config, build_small_codec
from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.families.qwen3_model import Qwen3TTS
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.utterance import Batch
from lit_fsdp.weights.load import init_weights, materialize

NUM_STEPS, GLOBAL_BATCH = 3, 6


def make_config() -> dict[str, Any]:
    """The tiny model with a text vocabulary for bytes, so that ranks have rows of no even size."""
    raw = deepcopy(CONFIG)
    raw |= {"im_start_token_id": 256, "im_end_token_id": 257, "tts_pad_token_id": 259}
    raw |= {"tts_bos_token_id": 260, "tts_eos_token_id": 261}
    raw["talker_config"]["text_vocab_size"] = 263
    return raw


def save_model(folder: Path) -> Path:
    """Write the tiny model as a folder like those on the Hub, with a codec and settings of generation."""
    with torch.device("meta"):
        model = Qwen3TTS(parse_config(make_config()))
    materialize(model, torch.device("cpu"))
    init_weights(model, 5)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(make_config()))
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_k": 7, "subtalker_top_k": 9}')
    (codec := folder / "speech_tokenizer").mkdir()
    (codec / "config.json").write_text(json.dumps(build_codec_config()))
    save_file(build_small_codec().state_dict(), codec / "model.safetensors")
    (codec / "preprocessor_config.json").write_text(
        '{"feature_extractor_type": "EncodecFeatureExtractor", "feature_size": 1, "sampling_rate": 24000}'
    )
    return folder


def make_rows(
    num_rows: int = NUM_STEPS * GLOBAL_BATCH, *, num_codebooks: int = 16, syllable: str = "a", voice_size: int = 32
) -> list[PreparedRow]:
    """Clips of 2 to 14 frames, so that a mean of means over ranks would be wrong."""
    rows = []
    for i in range(num_rows):
        codes = (draw(f"row {i}", 2 + (i * 7) % 13, num_codebooks).abs() * 63).long().numpy()
        rows.append(
            PreparedRow(
                audio=f"{i}.wav",
                text=syllable * (1 + i % 5),
                codes=codes,
                seconds=len(codes) / 12.5,
                speaker="kim" if i % 2 else "lee",
                speaker_embedding=draw(f"voice {i}", voice_size).numpy(),
            )
        )
    return rows


def train_model(model: Any, batches: list[Batch], loss_weights: tuple[float, float]) -> Result:
    """Train on one device without Lightning, FSDP or our task, with one forward for the whole step."""
    losses = (compute_loss(model, batch, loss_weights) for batch in batches)
    result = train_stock(model, lambda _: next(losses), num_steps=len(batches))
    result.weights = {name: p.detach() for name, p in model.named_parameters()}
    return result


def compute_loss(model: Any, batch: Batch, loss_weights: tuple[float, float]) -> torch.Tensor:
    output = model(batch)
    own, other = loss_weights
    return own * output.talker_loss / output.num_tokens + other * output.predictor_loss / output.num_frames


def build_task(**options: Any) -> TextToSpeech:
    return TextToSpeech(config=make_config(), optimizer=OPTIMIZER, lr_scheduler=LRSchedule(type="constant"), **options)


def build_data(folder: Path, **options: Any) -> SpeechData:
    settings: dict[str, Any] = {"speaker_embedding": "row", "shuffle": False, "num_workers": 0}
    return SpeechData(train=str(folder), tokenizer="bytes", **{**settings, **options})


def build_trainer(**options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {"max_steps": NUM_STEPS, "gradient_clip_val": 1.0, "logger": False}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    if dist.is_initialized():
        settings |= {"strategy": FSDP2Strategy(print_plan=False), "plugins": [Environment()]}
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(accelerator="cpu", devices=devices, use_distributed_sampler=False, **{**settings, **options})
