"""Speech to text, by a Whisper model of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.errors import get_first_line
from lit_fsdp.tasks.tts.config import CONFIG, read_raw_config
from lit_fsdp.tasks.tts.preparation.audio import Audio
from lit_fsdp.weights.base_weights import fetch_pretrained, get_pretrained_folder

Transcribe = Callable[[Sequence[Audio], int, Sequence[str]], list[str]]
_SECONDS = 30  # that it reads at once
_LARGEST = 16  # parts of that length in a batch
# Not the copies in other dtypes that some of these models have.
_PATTERNS = ("model.safetensors", "model-*.safetensors", "*.json", "merges.txt")


def fetch_transcriber(name: str) -> None:
    """Download a Whisper model, unless it is a folder or in the cache.

    Raises:
        ValueError: There is no such model, or it is no Whisper.
    """
    fetch_pretrained(name, "transcriber", _PATTERNS)
    folder = find_transcriber(name)
    kind = read_raw_config(folder).get("model_type") if (folder / CONFIG).is_file() else "nothing"
    if kind != "whisper":
        raise ValueError(
            f"transcriber: got {name!r}: its config.json names {kind!r}: expected a Whisper model, such as "
            "openai/whisper-large-v3-turbo"
        )


def find_transcriber(name: str) -> Path:
    """Return the folder of a model that is there or has been fetched."""
    return get_pretrained_folder(name, _PATTERNS)


@lru_cache(maxsize=1)
def load_transcriber(name: str, device: str = "cpu") -> Transcribe:
    """Return a function from clips, their sample rate and languages to texts, which it writes in batches.

    Args:
        name: Of a model that has been fetched, or its folder.
        device: Where it runs.

    Raises:
        ValueError: There is no such model.
    """
    import soxr
    from transformers import WhisperForConditionalGeneration, WhisperProcessor
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    try:
        folder = find_transcriber(name)
        processor: Any = WhisperProcessor.from_pretrained(folder)
        model: Any = WhisperForConditionalGeneration.from_pretrained(folder).eval().to(device)
        if model.device.type == "cpu":
            model.float()  # large ones are stored in float16, which CPUs multiply slowly and sum less exactly
    except OSError as error:
        raise ValueError(f"transcriber: got {name!r}: {get_first_line(error)}") from error

    is_multilingual = getattr(model.generation_config, "is_multilingual", True)  # others refuse a language
    known = {*LANGUAGES.values(), *LANGUAGES, *TO_LANGUAGE_CODE} if is_multilingual else set()
    # Where neither a task nor a language is given, the model chooses: also to translate. Fine-tuned ones may lack the
    # ids of older ones, which name a task, or a language too, and are not read beside a task.
    has_ids = any(getattr(settings, "forced_decoder_ids", None) for settings in (model.generation_config, model.config))
    names_task = is_multilingual and not has_ids and hasattr(model.generation_config, "task_to_id")
    to_words = {"task": "transcribe"} if names_task else {}

    def transcribe(clips: Sequence[Audio], sample_rate: int, languages: Sequence[str]) -> list[str]:
        rate = processor.feature_extractor.sampling_rate
        parts: dict[str | None, list[tuple[int, Any]]] = {}  # by language: clip and features
        for number, (clip, language) in enumerate(zip(clips, languages, strict=True)):
            audio = clip if rate == sample_rate else soxr.resample(clip, sample_rate, rate, quality="HQ")
            # It finds out itself what it has no name for, such as dialects.
            name = language.lower() if language.lower() in known else None
            for begin in range(0, len(audio), _SECONDS * rate):
                part = audio[begin : begin + _SECONDS * rate]
                # One by one, as sums over a batch may be rounded otherwise.
                inputs = processor(part, sampling_rate=rate, return_tensors="pt", return_attention_mask=True)
                parts.setdefault(name, []).append((number, inputs))
        texts: list[list[str]] = [[] for _ in clips]
        for name, own in parts.items():
            for begin in range(0, len(own), _LARGEST):
                batch = own[begin : begin + _LARGEST]
                for (number, _), text in zip(batch, write([inputs for _, inputs in batch], name), strict=True):
                    texts[number].append(text)
        return [" ".join(found) for found in texts]

    def write(batch: list[Any], language: str | None) -> list[str]:
        features, mask = (
            torch.cat([inputs[name] for inputs in batch]) for name in ("input_features", "attention_mask")
        )
        options = {**to_words, **({} if language is None else {"language": language})}
        with torch.inference_mode():
            features, mask = features.to(model.device, model.dtype), mask.to(model.device)
            ids = model.generate(features, attention_mask=mask, **options)
        return [text.strip() for text in processor.batch_decode(ids, skip_special_tokens=True)]

    return transcribe
