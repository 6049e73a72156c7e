"""From audio files to rows that a model trains on. One class does the work on a batch; runners hand it batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fsdp.tasks.tts.audio import Audio, AudioError, Limits, check_audio, read_audio
from lit_fsdp.tasks.tts.config import MODEL_TYPE, read_config
from lit_fsdp.tasks.tts.formants import SPOKEN, build_small_codec, describe_voice
from lit_fsdp.tasks.tts.manifest import ManifestRow
from lit_fsdp.tasks.tts.model import Qwen3TTS, load_model
from lit_fsdp.tasks.tts.prepared import PreparedRow
from lit_fsdp.tasks.tts.pretrained import find_speech_model
from lit_fsdp.tasks.tts.speaker_encoder import compute_mels

if TYPE_CHECKING:  # it takes an eighth of a second, and most runs have no use for it
    from lit_fsdp.tasks.tts.codec import AnyCodec

Transcribe = Callable[[Sequence[Audio], int, Sequence[str]], list[str]]
_SMALL_VOICE = 128  # numbers in the embedding of a speaker by formulas
_WHISPER_SECONDS = 30  # that it hears at once


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A line of the manifest that gave no row."""

    line: int
    audio: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preparer:
    """Turns lines of a manifest into rows; plain settings, so that any process can have one.

    The same lines give the same rows in any grouping and order.

    Args:
        model: Name or folder of the model whose codec and speaker encoder are used, fetched before; or ``formants``,
            for the small codec and voices described by their spectrum, which need no files.
        limits: Which clips are good enough.
        transcriber: A Whisper model of Transformers, name or folder, for clips without text; ``None`` rejects them.
    """

    model: str
    limits: Limits
    transcriber: str | None = None

    def __call__(self, rows: Sequence[ManifestRow]) -> tuple[list[PreparedRow], list[Rejected]]:
        """Return the rows of those lines that are good, in order, and why the others are not."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums are rounded by the number of threads, and codes must not depend on it
        try:
            return self._prepare(rows)
        finally:
            torch.set_num_threads(num_threads)

    def _prepare(self, rows: Sequence[ManifestRow]) -> tuple[list[PreparedRow], list[Rejected]]:
        # What fails here is a setting; what fails below, one clip.
        languages, codec = self._list_languages(), self._load_codec()
        needs_text = self.transcriber is not None and any(row.text is None for row in rows)
        transcribe = load_transcriber(str(self.transcriber)) if needs_text else None
        self._load_encoder()
        prepared: list[PreparedRow] = []
        rejected: list[Rejected] = []
        for row in rows:
            try:
                audio, reference = self._read(row, languages, codec.sample_rate)
                text = row.text
                if text is None:
                    assert transcribe is not None
                    (text,) = transcribe([audio], codec.sample_rate, [row.language])
                if not text.strip():
                    raise AudioError("text: nothing was heard")
                # One by one: kernels may round differently in a batch, and codes must not depend on it.
                (codes,) = codec.encode([torch.from_numpy(audio)])
                embedding = self._embed(reference)
            except (AudioError, OSError, ValueError, RuntimeError) as error:
                rejected.append(Rejected(line=row.line, audio=row.audio, reason=_describe(error)))
                continue
            prepared.append(
                PreparedRow(
                    audio=row.audio,
                    text=text.strip(),
                    codes=codes.numpy(),
                    seconds=round(len(audio) / codec.sample_rate, 4),
                    speaker=row.speaker.lower(),
                    language=row.language.lower(),
                    speaker_embedding=embedding,
                )
            )
        return prepared, rejected

    def _read(self, row: ManifestRow, known: Sequence[str], sample_rate: int) -> tuple[Audio, Audio]:
        if row.problem is not None:
            raise AudioError(row.problem)
        if row.text is not None and not row.text.strip():
            raise AudioError("text: empty: expected words, or no text at all to have it transcribed")
        if row.text is None and self.transcriber is None:
            raise AudioError("text: missing, and no transcriber is set")
        if known and row.language.lower() not in ("auto", *known):
            raise AudioError(f"language: got {row.language!r}: expected auto or one of {', '.join(known)}")
        audio = read_audio(row.find(row.audio), sample_rate)
        check_audio(audio, sample_rate, self.limits)
        if row.ref_audio is None:
            return audio, audio
        try:
            reference = read_audio(row.find(row.ref_audio), sample_rate)
            check_audio(reference, sample_rate, self.limits)
        except AudioError as error:
            raise AudioError(f"ref_audio: {error}") from error
        return audio, reference

    def _load_encoder(self) -> Qwen3TTS | None:
        return _load_speech_model(self.model) if self._is_qwen3() else None

    def _embed(self, audio: Audio) -> NDArray[np.float32]:
        if self.model == SPOKEN:
            return describe_voice(audio, _SMALL_VOICE)
        model = self._load_encoder()
        if model is None:
            return np.zeros(0, dtype=np.float32)
        config = model.config.speaker_encoder
        if model.speaker_encoder is None or config is None:
            return np.zeros(0, dtype=np.float32)
        with torch.inference_mode():
            mels = compute_mels(torch.from_numpy(audio)[None], config)
            return np.asarray(model.speaker_encoder(mels)[0].numpy(), dtype=np.float32)

    def _list_languages(self) -> list[str]:
        return sorted(read_config(find_speech_model(self.model)).languages) if self._is_qwen3() else []

    def _is_qwen3(self) -> bool:
        """Tell whether the model may have a speaker encoder and languages."""
        if self.model == SPOKEN:
            return False
        path = find_speech_model(self.model) / "config.json"
        return json.loads(path.read_text()).get("model_type") == MODEL_TYPE

    def _load_codec(self) -> AnyCodec:
        return build_small_codec() if self.model == SPOKEN else _load_real_codec(self.model)


def _describe(error: Exception) -> str:
    if isinstance(error, AudioError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@lru_cache(maxsize=1)
def _load_real_codec(name: str) -> AnyCodec:
    from lit_fsdp.tasks.tts.codec import load_codec

    return load_codec(find_speech_model(name))


@lru_cache(maxsize=1)
def _load_speech_model(name: str) -> Qwen3TTS:
    """Return the model for its speaker encoder; the rest of it is let go of."""
    model = load_model(find_speech_model(name))
    model.talker = torch.nn.Identity()  # type: ignore[assignment]
    return model


@lru_cache(maxsize=1)
def load_transcriber(name: str) -> Transcribe:
    """Return a function from clips, their sample rate and languages to texts, by a Whisper model of Transformers.

    Args:
        name: On the Hub, or a folder.

    Raises:
        ValueError: There is no such model.
    """
    import soxr
    from transformers import WhisperForConditionalGeneration, WhisperProcessor
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    try:
        processor: Any = WhisperProcessor.from_pretrained(name)
        model: Any = WhisperForConditionalGeneration.from_pretrained(name).eval()
    except OSError as error:
        raise ValueError(f"transcriber: got {name!r}: {str(error).strip().splitlines()[0]}") from error

    known = {*LANGUAGES.values(), *LANGUAGES, *TO_LANGUAGE_CODE}

    def transcribe(clips: Sequence[Audio], sample_rate: int, languages: Sequence[str]) -> list[str]:
        texts = []
        for clip, language in zip(clips, languages, strict=True):
            rate = processor.feature_extractor.sampling_rate
            audio = clip if rate == sample_rate else soxr.resample(clip, sample_rate, rate, quality="HQ")
            # It finds out itself what it has no name for, such as dialects.
            options = {"language": language.lower()} if language.lower() in known else {}
            heard = []
            for begin in range(0, len(audio), _WHISPER_SECONDS * rate):
                part = audio[begin : begin + _WHISPER_SECONDS * rate]
                inputs = processor(part, sampling_rate=rate, return_tensors="pt", return_attention_mask=True)
                with torch.inference_mode():
                    ids = model.generate(inputs.input_features, attention_mask=inputs.attention_mask, **options)
                heard.append(processor.batch_decode(ids, skip_special_tokens=True)[0].strip())
            texts.append(" ".join(heard))
        return texts

    return transcribe
