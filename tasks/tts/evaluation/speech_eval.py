"""What generated speech sounds like: decoded, its voice compared with the one asked for, its words with the text.

Note [Rank 0 evaluates]: codec and transcriber are on rank 0 alone. What it found, or the error it failed with, is
broadcast, so that all ranks log the same names and none waits for another.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.text import char_error_rate, word_error_rate

from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec
from lit_fsdp.tasks.tts.codec.loading import check_codec, fetch_codec, open_codec
from lit_fsdp.tasks.tts.evaluation.generated import Clip, Sample, SpeechReport
from lit_fsdp.tasks.tts.families.family import FamilyConfig
from lit_fsdp.tasks.tts.families.speaker_encoder import SpeakerEncoder, compute_mels
from lit_fsdp.tasks.tts.generation import Speech
from lit_fsdp.tasks.tts.preparation.transcribe import fetch_transcriber, load_transcriber

_MIN_SAMPLES = 4800  # shorter audio has too few frames to tell a voice
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class SpeechEval:
    """How generated speech of validation is evaluated, on rank 0.

    In ``predict``, where each rank has texts of its own, each rank decodes what it generated.

    Args:
        codec: Codec, or model with one, by name or folder, that decodes it; ``formants`` is that of the quickstart.
        transcriber: A Whisper model of Transformers that writes it down, for the word error rate; ``null`` has none.
        device: Of both. ``cuda`` is faster, and takes their memory from training on rank 0.
    """

    codec: str
    transcriber: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"


class SpeechEvaluator:
    """Decodes generated speech and measures it; holds the codec from the first use on.

    Args:
        settings: Which codec and transcriber, and where.
    """

    def __init__(self, settings: SpeechEval) -> None:
        self.settings = settings
        self._codec: FrameCodec | None = None
        self._recorded: dict[bytes, Clip] = {}  # by their codes: each validation has the same rows

    def fetch(self) -> None:
        """Download what is needed, on one process per node."""
        fetch_codec(self.settings.codec, "speech_eval.codec")
        if self.settings.transcriber is not None:
            fetch_transcriber(self.settings.transcriber)

    def check(self, config: FamilyConfig) -> None:
        """Refuse a codec that other codes belong to, before training and not at its first validation.

        Raises:
            ValueError: With the codec.
        """
        if self.settings.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("speech_eval.device: got 'cuda': there is no GPU; set cpu")
        sizes = {"num_codebooks": config.num_codebooks, "codebook_size": config.codebook_size}
        check_codec(self.settings.codec, "speech_eval.codec", **sizes)

    def decode(self, speech: Speech) -> Clip:
        """Return speech as audio, computed in float32 whatever the precision of the run."""
        with _in_float32(self.settings.device):
            if self._codec is None:
                self._codec = open_codec(self.settings.codec, self.settings.device)
            (audio,) = self._codec.decode([speech.codes])
        return Clip(audio=audio, sample_rate=self._codec.sample_rate)

    def decode_recorded(self, row: Sample) -> Clip:
        """Return what the codec makes of the recorded codes of a row: the best that a model can sound like."""
        codes = torch.from_numpy(row.target).long()
        key = row.target.tobytes()
        if key not in self._recorded:
            self._recorded[key] = self.decode(Speech(codes=codes, has_ended=True))
        return self._recorded[key]

    def transcribe(self, clip: Clip, language: str) -> Clip:
        """Return a clip with its transcript, if a transcriber is set."""
        if self.settings.transcriber is None:
            return clip
        transcribe = load_transcriber(self.settings.transcriber, self.settings.device)
        audio = clip.audio.numpy()
        (text,) = transcribe([audio], clip.sample_rate, [language]) if len(audio) else [""]
        return replace(clip, transcript=text)

    def list_metrics(self, *, has_voices: bool) -> list[str]:
        """Return what ``evaluate`` measures.

        Args:
            has_voices: Whether the model has a speaker encoder, and its rows voices to compare with.
        """
        words = ["wer_pct", "cer_pct"] if self.settings.transcriber is not None else []
        return [*words, *(["speaker_similarity"] if has_voices else [])]

    def evaluate(
        self, report: SpeechReport, trainer: Trainer, model: Any, voices: Sequence[Tensor]
    ) -> dict[str, float]:
        """Return what is measured of a report's rows, the same on all ranks; all must call it in a gathering method.

        On rank 0 ``report`` gets its clips, and the loggers too; see Note [Rank 0 evaluates].

        Args:
            report: With its rows.
            trainer: Has the loggers.
            model: With its speaker encoder, if it has one.
            voices: The embedding that each row was generated with, zeros where it was none.
        """
        encoder = getattr(model, "speaker_encoder", None)

        def work() -> list[tuple[str | None, Tensor | None]]:
            report.clips = [self.transcribe(self.decode(row.speech), row.language) for row in report.rows]
            report.recorded = [self.decode_recorded(row) for row in report.rows]
            write_audio(report.clips, report.rows, trainer.loggers, report.step)
            return [(clip.transcript, compute_clip_mels(clip, encoder)) for clip in report.clips]

        found = run_on_rank_0(work, trainer)
        measured = compute_word_errors([row.text for row in report.rows], [text for text, _ in found])
        if encoder is not None and any(voice.any() for voice in voices):
            measured["speaker_similarity"] = compute_similarity(encoder, [mels for _, mels in found], voices)
        return measured


@contextmanager
def _in_float32(device: str) -> Iterator[None]:
    """Undo what a step of Lightning sets for the model: autocast, and the dtype that new tensors have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


def run_on_rank_0(work: Callable[[], Found], trainer: Trainer) -> Found:
    """Return on all ranks what ``work`` gives on rank 0; all must call it.

    Raises:
        RuntimeError: On all ranks, with the error of rank 0.
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
        raise RuntimeError(f"speech_eval failed on rank 0: {problem}") from cause
    return result


def compute_clip_mels(clip: Clip, encoder: SpeakerEncoder | None) -> Tensor | None:
    """Return log-mel frames [1, frames, mels]; ``None`` where the clip is too short, or without a speaker encoder."""
    if encoder is None or len(clip.audio) < _MIN_SAMPLES:
        return None
    return compute_mels(clip.audio[None], encoder.config)


def compute_word_errors(texts: Sequence[str], transcripts: Sequence[str | None]) -> dict[str, float]:
    """Return word and character error rates over all texts, or nothing where there is no transcript."""
    if any(transcript is None for transcript in transcripts):
        return {}
    own, wanted = [_simplify(text or "") for text in transcripts], [_simplify(text) for text in texts]
    rates = {"wer_pct": word_error_rate(own, wanted), "cer_pct": char_error_rate(own, wanted)}
    return {name: 100 * float(rate) for name, rate in rates.items()}


@torch.no_grad()
def compute_similarity(encoder: SpeakerEncoder, mels: Sequence[Tensor | None], voices: Sequence[Tensor]) -> float:
    """Return the mean cosine between the voice of each clip and the one asked for; NaN where all clips are too short.

    Under a sharding strategy all ranks must call it, inside a method that gathers, with the same clips.

    Args:
        encoder: Of the model.
        mels: Of each clip; ``None`` where it is too short to tell a voice.
        voices: The embeddings that they were generated with; a row of zeros asks for no voice.
    """
    like = next(encoder.parameters())
    found = []
    for own, voice in zip(mels, voices, strict=True):
        if own is not None and voice.any():
            embedding = encoder(own.to(voice.device, like.dtype))[0].float()
            found.append(float(F.cosine_similarity(embedding.cpu(), voice.float().cpu(), dim=0)))
    return sum(found) / len(found) if found else math.nan


def write_audio(clips: Sequence[Clip], rows: Sequence[Sample], loggers: Iterable[Any], step: int) -> None:
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
                log(name, [clip.audio.numpy()], step, sample_rate=[clip.sample_rate], caption=[clip.transcript])
            elif folder is not None:
                clip.write(Path(folder) / f"{name}_step{step}.wav")
        if named and add is None and log is None and folder is None:
            rank_zero_warn(f"{type(logger).__name__} takes no audio: generated speech is in the run's report only")


def _simplify(text: str) -> str:
    """Drop case and punctuation, which no voice has."""
    # One spelling for letters with accents, which may be two characters, and for the apostrophe.
    text = unicodedata.normalize("NFC", text).lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    # Marks, such as vowels of Hindi, are part of the letter before them.
    kept = (c if unicodedata.category(c)[0] in "LMN" or c in " '" else " " for c in text)
    words = (word.strip("'") for word in "".join(kept).split())  # quotes around it
    return " ".join(filter(None, words))
