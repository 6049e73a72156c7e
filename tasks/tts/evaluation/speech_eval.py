"""What generated speech sounds like: decoded, its voice compared with the one asked for, its words with the text.

Note [Who listens]: the codec and the transcriber are on the first rank alone. What they heard, or the error they
failed with, is told to all ranks, so that all log the same names and none waits for another.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import functional as F

from lit_fsdp.tasks.tts.codec.formants import SPOKEN, build_codec_config, build_small_codec
from lit_fsdp.tasks.tts.codec.hub_codec import is_hub_codec, measure_hub_codec
from lit_fsdp.tasks.tts.config import read_raw_config
from lit_fsdp.tasks.tts.evaluation.generated import Clip, Spoken
from lit_fsdp.tasks.tts.families.family import FamilyConfig
from lit_fsdp.tasks.tts.families.qwen3_model import Qwen3TTS
from lit_fsdp.tasks.tts.families.speaker_encoder import compute_mels
from lit_fsdp.tasks.tts.generation import Speech
from lit_fsdp.tasks.tts.preparation.transcribe import fetch_transcriber, load_transcriber
from lit_fsdp.tasks.tts.pretrained import fetch_speech_model, find_codec, find_speech_model

if TYPE_CHECKING:  # it takes an eighth of a second, and most runs have no use for it
    from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec

_MIN_SAMPLES = 4800  # shorter audio has too few frames to tell a voice
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class SpeechEval:
    """How speech that is generated in validation is listened to, on the first rank.

    In ``predict``, where each rank has texts of its own, each decodes what it spoke.

    Args:
        codec: Codec, or model with one, by name or folder, that decodes it; ``formants`` is that of the quickstart.
        transcriber: A Whisper model of Transformers that writes it down, for the word error rate; ``null`` has none.
        device: Of both. ``cuda`` is faster, and takes their memory from training on the first rank.
    """

    codec: str
    transcriber: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What all ranks are told of a clip.

    Args:
        mels: Of its audio [1, frames, bands]; ``None`` where it is too short to tell a voice.
        text: What the transcriber understood; ``None`` where none has listened.
    """

    mels: Tensor | None
    text: str | None


def fetch_speech_eval(settings: SpeechEval) -> None:
    """Download what is needed, on one process per node."""
    if settings.codec != SPOKEN:
        fetch_speech_model(settings.codec, "speech_eval.codec")
    if settings.transcriber is not None:
        fetch_transcriber(settings.transcriber)


def check_speech_eval(settings: SpeechEval, config: FamilyConfig) -> None:
    """Refuse a codec that other codes belong to, before training and not at its first validation.

    Raises:
        ValueError: With the codec.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("speech_eval.device: got 'cuda': there is no GPU; set cpu")
    (own, size), wanted = _measure_codec(settings.codec), config.num_codebooks
    if own != wanted:
        raise ValueError(
            f"speech_eval.codec: got {settings.codec!r}: it has {own} codebooks: expected {wanted}, the model's"
        )
    if size < config.codebook_size:
        raise ValueError(
            f"speech_eval.codec: got {settings.codec!r}: its codes end at {size - 1}: expected "
            "those of the model, up to "
            f"{config.codebook_size - 1}"
        )


def _measure_codec(name: str) -> tuple[int, int]:
    """Return the number of codebooks of a codec and their size, from its configuration alone."""
    folder = None if name == SPOKEN else find_codec(find_speech_model(name))
    if folder is not None and is_hub_codec(folder):
        return measure_hub_codec(folder)
    about = build_codec_config() if folder is None else read_raw_config(folder)
    return about["encoder_valid_num_quantizers"], about["decoder_config"]["codebook_size"]


class Listener:
    """Decodes speech and writes it down; holds codec and transcriber from the first time on.

    Args:
        settings: Which ones, and where.
    """

    def __init__(self, settings: SpeechEval) -> None:
        self.settings = settings
        self._codec: FrameCodec | None = None

    def listen(self, rows: Sequence[Spoken]) -> list[Clip]:
        """Return the audio of generated speech, with what was understood of it."""
        codec = self._open()
        name = self.settings.transcriber
        transcribe = load_transcriber(name, self.settings.device) if name is not None else None
        clips = []
        for row in rows:
            (audio,) = codec.decode([row.speech.codes])
            text = None
            if transcribe is not None:
                text = transcribe([audio.numpy()], codec.sample_rate, [row.language])[0] if len(audio) else ""
            clips.append(Clip(audio=audio, sample_rate=codec.sample_rate, heard=text))
        return clips

    def write(self, speech: Speech, path: Path) -> None:
        """Write speech as a WAV file."""
        codec = self._open()
        (audio,) = codec.decode([speech.codes])
        write_wave(path, Clip(audio=audio, sample_rate=codec.sample_rate))

    def _open(self) -> FrameCodec:
        if self._codec is None:
            self._codec = open_codec(self.settings.codec).to(self.settings.device)
        return self._codec


def open_codec(name: str) -> FrameCodec:
    """Return a codec by the name or folder of its model."""
    from lit_fsdp.tasks.tts.codec.codec_12hz import load_codec

    return build_small_codec() if name == SPOKEN else load_codec(find_speech_model(name))


def run_on_first(work: Callable[[], Found], trainer: Trainer) -> Found:
    """Return on all ranks what ``work`` gives on the first; all must call it.

    Raises:
        RuntimeError: On all ranks, with the error of the first.
    """
    found: tuple[Any, str | None] = (None, None)
    cause: Exception | None = None
    if trainer.is_global_zero:
        try:
            found = (work(), None)
        except Exception as error:  # noqa: BLE001 - of whatever kind: the other ranks wait to be told
            cause = error
            found = (None, f"{type(error).__name__}: {error}")
    result: Found
    result, problem = trainer.strategy.broadcast(found)
    if problem is not None:
        raise RuntimeError(f"listening to generated speech failed on the first rank: {problem}") from cause
    return result


def describe_clips(clips: Sequence[Clip], config: Any) -> list[Heard]:
    """Return what all ranks need of clips.

    Args:
        clips: Audio.
        config: Of the model; one that takes no embeddings of speakers has no encoder to compare voices with.
    """
    encoder = config.speaker_encoder if config.voice_size is not None else None
    described = []
    for clip in clips:
        is_told = len(clip.audio) >= _MIN_SAMPLES
        mels = compute_mels(clip.audio[None], encoder) if encoder is not None and is_told else None
        described.append(Heard(mels=mels, text=clip.heard))
    return described


def compute_word_errors(rows: Sequence[Spoken], heard: Sequence[Heard]) -> dict[str, float]:
    """Return word and character error rates over all rows, or nothing where no transcriber has listened."""
    if any(h.text is None for h in heard):
        return {}
    from torchmetrics.functional.text import char_error_rate, word_error_rate

    own, wanted = [_simplify(h.text) for h in heard], [_simplify(row.text) for row in rows]
    rates = {"wer_pct": word_error_rate(own, wanted), "cer_pct": char_error_rate(own, wanted)}
    return {name: 100 * float(rate) for name, rate in rates.items()}


@torch.no_grad()
def compute_similarity(
    model: Qwen3TTS, heard: Sequence[Heard], voices: Sequence[Tensor | None], device: torch.device
) -> dict[str, float]:
    """Return the mean cosine between the voice of each clip and the one it was asked for.

    It is not a number where all clips are too short, and left out where no voice was asked for. Under a sharding
    strategy all ranks must call it, inside a method that gathers, with the same clips.

    Args:
        model: With its speaker encoder.
        heard: Clips.
        voices: The embeddings that they were generated with.
        device: Where the model is.
    """
    if model.speaker_encoder is None or all(voice is None for voice in voices):
        return {}
    dtype = next(model.speaker_encoder.parameters()).dtype
    found = []
    for clip, voice in zip(heard, voices, strict=True):
        if voice is not None and clip.mels is not None:
            own = model.speaker_encoder(clip.mels.to(device, dtype))[0].float().cpu()
            found.append(float(F.cosine_similarity(own, voice.float().cpu(), dim=0)))
    return {"speaker_similarity": sum(found) / len(found) if found else math.nan}


def write_audio(clips: Sequence[Clip], rows: Sequence[Spoken], loggers: Iterable[Any], step: int) -> None:
    """Give clips to those loggers that take audio, and write them into the folders of the others."""
    named = [(f"spoken/{i:02}_{row.speaker}", c) for i, (c, row) in enumerate(zip(clips, rows, strict=True))]
    named = [(name, clip) for name, clip in named if len(clip.audio)]
    for logger in loggers:
        add = getattr(getattr(logger, "experiment", None), "add_audio", None)  # of TensorBoard
        log = getattr(logger, "log_audio", None)  # of Weights & Biases
        folder = getattr(logger, "log_dir", None)
        for name, clip in named:
            if add is not None:
                add(name, clip.audio[None], step, sample_rate=clip.sample_rate)
            elif log is not None:
                log(name, [clip.audio.numpy()], sample_rate=[clip.sample_rate], caption=[clip.heard])
            elif folder is not None:
                write_wave(Path(folder) / f"{name}_step{step}.wav", clip)
        if named and add is None and log is None and folder is None:
            rank_zero_warn(f"{type(logger).__name__} takes no audio: generated speech is in the run's report only")


def write_wave(path: Path, clip: Clip) -> None:
    """Write a clip as 16-bit WAV, for which no package is needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(clip.to_wav())


def _simplify(text: str | None) -> str:
    """Drop case and punctuation, which no voice has."""
    # Marks, such as vowels of Hindi, are part of the letter before them.
    kept = (c if unicodedata.category(c)[0] in "LMN" or c in " '" else " " for c in (text or "").lower())
    return " ".join("".join(kept).split())
