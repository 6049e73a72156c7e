"""From audio files to rows that a model trains on. One class does the work on a batch; runners hand it batches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fsdp.errors import join_names
from lit_fsdp.tasks.tts.codec.formants import SPOKEN, describe_voice
from lit_fsdp.tasks.tts.codec.loading import find_codec, open_codec
from lit_fsdp.tasks.tts.config import CONFIG, SpeechConfig, read_config, read_raw_config
from lit_fsdp.tasks.tts.families.family import FamilyConfig
from lit_fsdp.tasks.tts.families.model_types import is_speech_model, read_family
from lit_fsdp.tasks.tts.families.speaker_encoder import SpeakerEncoder, compute_mels, load_speaker_encoder
from lit_fsdp.tasks.tts.preparation.audio import (
    Audio,
    AudioError,
    Limits,
    check_audio,
    check_text,
    import_libraries,
    read_audio,
)
from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.preparation.transcribe import find_transcriber, load_transcriber
from lit_fsdp.tasks.tts.pretrained import find_speech_model
from lit_fsdp.weights.safetensors_io import compute_fingerprint

_SMALL_VOICE = 128  # numbers in the embedding of a speaker by formulas
log = logging.getLogger(__name__)
_open_codec = lru_cache(maxsize=1)(open_codec)


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
        device: ``cuda`` is the current one of the process.
    """

    model: str
    limits: Limits
    transcriber: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"

    def __call__(self, rows: Sequence[ManifestRow]) -> tuple[list[PreparedRow], list[Rejected]]:
        """Return the rows of those lines that are good, in order, and why the others are not."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums are rounded by the number of threads, and codes must not depend on it
        try:
            # On GPUs convolutions would else be rounded to 10 bits.
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                return self._prepare(rows)
        finally:
            torch.set_num_threads(num_threads)

    def describe_models(self) -> dict[str, str]:
        """Return what tells the models from others of the same name or folder: digests of their contents."""
        found = {}
        if self.model != SPOKEN:
            folder = find_speech_model(self.model)
            found = {"model": _describe_folder(folder), "codec": _describe_folder(find_codec(folder))}
        if self.transcriber is not None:
            found["transcriber"] = _describe_folder(find_transcriber(self.transcriber))
        return found

    def check_languages(self, rows: Sequence[ManifestRow]) -> None:
        """Say which languages the model does not have, before hours of work on the others.

        Raises:
            ValueError: There is no line in a language that it has.
        """
        config = self._read_config()
        lines: dict[str, list[str]] = {}
        for row in rows if config is not None else ():
            if (problem := _find_language_problem(config, row)) is not None and row.problem is None:
                lines.setdefault(problem, []).append(str(row.line))
        num_without = sum(map(len, lines.values()))
        if num_without and num_without == sum(row.problem is None for row in rows):
            problem = "; ".join(lines)
            raise ValueError(f"manifest: {problem}, on all {num_without} lines")
        for problem, numbers in lines.items():
            log.warning("manifest: %s: left out: line %s", problem, join_names(numbers))

    def _prepare(self, rows: Sequence[ManifestRow]) -> tuple[list[PreparedRow], list[Rejected]]:
        # What fails here is a setting or a missing package; what fails below, one clip.
        import_libraries()
        config, codec = self._read_config(), _open_codec(self.model, self.device)
        needs_text = self.transcriber is not None and any(row.text is None for row in rows)
        transcribe = load_transcriber(str(self.transcriber), self.device) if needs_text else None
        encoder = _load_encoder(self.model, self.device) if isinstance(config, SpeechConfig) else None
        prepared: list[PreparedRow] = []
        rejected: list[Rejected] = []
        for row in rows:
            try:
                audio, reference = self._read(row, config, codec.sample_rate)
                text = row.text
                if text is None:
                    assert transcribe is not None
                    (text,) = transcribe([audio], codec.sample_rate, [row.language])
                if not text.strip():
                    raise AudioError("text: the transcript is empty")
                check_text(text, len(audio) / codec.sample_rate, self.limits)
                # One by one: kernels may round differently in a batch, and codes must not depend on it.
                (codes,) = codec.encode([torch.from_numpy(audio)])
                embedding = self._embed(reference, encoder)
            except Exception as error:  # noqa: BLE001 - of whatever kind: one clip must not stop the others
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

    def _read(self, row: ManifestRow, config: FamilyConfig | None, sample_rate: int) -> tuple[Audio, Audio]:
        if row.problem is not None:
            raise AudioError(row.problem)
        if row.text is not None and not row.text.strip():
            raise AudioError("text: empty: expected words, or no text at all to have it transcribed")
        if row.text is None and self.transcriber is None:
            raise AudioError("text: missing, and no transcriber is set")
        if (problem := _find_language_problem(config, row)) is not None:
            raise AudioError(problem)
        audio = read_audio(row.resolve(row.audio), sample_rate, self.limits.max_seconds)
        check_audio(audio, sample_rate, self.limits)
        if row.ref_audio is None:
            return audio, audio
        try:
            reference = read_audio(row.resolve(row.ref_audio), sample_rate, self.limits.max_seconds)
            check_audio(reference, sample_rate, self.limits)
        except AudioError as error:
            raise AudioError(f"ref_audio: {error}") from error
        return audio, reference

    def _embed(self, audio: Audio, encoder: SpeakerEncoder | None) -> NDArray[np.float32]:
        if self.model == SPOKEN:
            return describe_voice(audio, _SMALL_VOICE)
        if encoder is None:
            return np.zeros(0, dtype=np.float32)
        with torch.inference_mode():
            mels = compute_mels(torch.from_numpy(audio)[None].to(self.device), encoder.config)
            return np.asarray(encoder(mels)[0].cpu().numpy(), dtype=np.float32)

    def _read_config(self) -> FamilyConfig | None:
        """Return the configuration of the model; of a codec alone there is none."""
        folder = find_speech_model(self.model) if self.model != SPOKEN else None
        return read_family(folder)[1] if folder is not None and is_speech_model(folder) else None


def _find_language_problem(config: FamilyConfig | None, row: ManifestRow) -> str | None:
    try:
        if config is not None:
            config.get_language_id(row.language)
    except ValueError as error:
        return str(error)
    return None


def _describe(error: Exception) -> str:
    if isinstance(error, AudioError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@lru_cache(maxsize=1)
def _load_encoder(name: str, device: str) -> SpeakerEncoder | None:
    folder = find_speech_model(name)
    config = read_config(folder).speaker_encoder
    return None if config is None else load_speaker_encoder(folder, config).to(device)


def _describe_folder(folder: Path) -> str:
    """Return a digest of the configuration and all tensors."""
    read_raw_config(folder)  # says what is wrong with it
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    digest.update(compute_fingerprint(folder).encode())
    return digest.hexdigest()
