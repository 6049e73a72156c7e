"""From audio files to rows that a model trains on. One class does the work on a batch; runners hand it batches."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fsdp.errors import join_names
from lit_fsdp.tasks.tts.codec.formants import SPOKEN, describe_voice
from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec
from lit_fsdp.tasks.tts.codec.loading import find_codec, open_codec
from lit_fsdp.tasks.tts.config import CONFIG, SpeechConfig, read_config, read_raw_config
from lit_fsdp.tasks.tts.families.family import Family, FamilyConfig
from lit_fsdp.tasks.tts.families.model_types import is_speech_model, read_family
from lit_fsdp.tasks.tts.families.speaker_encoder import SpeakerEncoder, compute_mels, load_speaker_encoder
from lit_fsdp.tasks.tts.preparation.audio import (
    Audio,
    AudioError,
    Limits,
    check_audio,
    check_text,
    check_tokens,
    import_libraries,
    read_audio,
)
from lit_fsdp.tasks.tts.preparation.cleaning import LONGEST_S, Cleaning
from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.preparation.transcribe import Transcribe, find_transcriber, load_transcriber
from lit_fsdp.weights.base_weights import get_pretrained_folder
from lit_fsdp.weights.safetensors_io import compute_fingerprint

_AHEAD = 4  # batches that are read at once, so that those of similar length share one
_LARGEST_S = 3600.0  # of audio that is read at once, 0.35 GB
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
class _Tools:
    """What a preparer works with, in this process."""

    family: Family | None
    config: FamilyConfig | None
    codec: FrameCodec
    transcribe: Transcribe | None
    encoder: SpeakerEncoder | None


@dataclass(kw_only=True)
class _Clip:
    """A clip on its way to a row."""

    row: ManifestRow
    name: str
    audio: Audio = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    reference: Audio = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    text: str | None = None
    codes: Any = None
    ref_codes: Any = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.text = self.row.text

    @contextmanager
    def keep_error(self) -> Iterator[None]:
        """Keep an error in this context, of whatever kind: one clip must not stop the others."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.error = error


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
        cleaning: What is done to recordings and texts before.
        batch_size: Clips that are encoded, or written down, at once. On a CPU the rows are the same, byte for byte.
    """

    model: str
    limits: Limits
    transcriber: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    cleaning: Cleaning = field(default_factory=Cleaning)
    batch_size: int = 1

    def __call__(self, rows: Sequence[ManifestRow]) -> tuple[list[PreparedRow], list[Rejected], Counter[str]]:
        """Return the rows of those lines that are good, in order, why the others are not, and what cleaning did."""
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
            folder = get_pretrained_folder(self.model)
            found = {"model": _describe_folder(folder), "codec": _describe_folder(find_codec(folder))}
        if self.transcriber is not None:
            found["transcriber"] = _describe_folder(find_transcriber(self.transcriber))
        return found

    def check_languages(self, rows: Sequence[ManifestRow]) -> None:
        """Say which languages the model does not have, before hours of work on the others.

        Raises:
            ValueError: There is no line in a language that it has.
        """
        config = self._read_model()[1]
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

    def _prepare(self, rows: Sequence[ManifestRow]) -> tuple[list[PreparedRow], list[Rejected], Counter[str]]:
        # What fails here is a setting or a missing package; what fails below, one clip.
        import_libraries()
        tools = self._open_tools(rows)
        prepared: list[PreparedRow] = []
        rejected: list[Rejected] = []
        counts: Counter[str] = Counter()
        waiting: list[_Clip] = []
        for row in rows:
            waiting += self._read(row, tools, counts)
            num_samples = sum(len(clip.audio) for clip in waiting)
            if len(waiting) >= _AHEAD * self.batch_size or num_samples > _LARGEST_S * tools.codec.sample_rate:
                self._finish(waiting, tools, counts, prepared, rejected)
                waiting = []
        self._finish(waiting, tools, counts, prepared, rejected)
        return prepared, rejected, counts

    def _open_tools(self, rows: Sequence[ManifestRow]) -> _Tools:
        opened, codec = self._read_model(), _open_codec(self.model, self.device)
        needs_text = self.transcriber is not None and any(row.text is None for row in rows)
        transcribe = load_transcriber(str(self.transcriber), self.device) if needs_text else None
        encoder = _load_encoder(self.model, self.device) if isinstance(opened[1], SpeechConfig) else None
        return _Tools(family=opened[0], config=opened[1], codec=codec, transcribe=transcribe, encoder=encoder)

    def _read(self, row: ManifestRow, tools: _Tools, counts: Counter[str]) -> list[_Clip]:
        """Return the clips of a line: one, or the pieces of a long recording; with what is wrong with them."""
        try:
            self._check_row(row, tools)
            rate, is_cut = tools.codec.sample_rate, self.cleaning.may_slice(row)
            audio = read_audio(row.resolve(row.audio), rate, LONGEST_S if is_cut else self.limits.max_seconds)
            pieces = self.cleaning.slice(audio, rate, counts) if is_cut else [(0.0, len(audio) / rate, audio)]
            reference = self._read_reference(row, rate, counts)
        except Exception as error:  # noqa: BLE001 - of whatever kind: one clip must not stop the others
            return [_Clip(row=row, name=row.audio, error=error)]
        whole = len(pieces) == 1 and len(pieces[0][2]) == len(audio)
        clips = []
        for begin, end, piece in pieces:
            # A part of a file as the Media Fragments of the W3C name it.
            clip = _Clip(row=row, name=row.audio if whole else f"{row.audio}#t={begin:.3f},{end:.3f}")
            with clip.keep_error():
                check_audio(piece, rate, self.limits)
                clip.audio = self.cleaning.level(piece, rate, counts)
                clip.reference = clip.audio if reference is None else reference
            clips.append(clip)
        return clips

    def _check_row(self, row: ManifestRow, tools: _Tools) -> None:
        if row.problem is not None:
            raise AudioError(row.problem)
        if row.text is not None and not row.text.strip():
            raise AudioError("text: empty: expected words, or no text at all to have it transcribed")
        if row.text is None and self.transcriber is None:
            raise AudioError("text: missing, and no transcriber is set")
        if row.ref_text is not None and not row.ref_text.strip():
            raise AudioError("ref_text: empty: expected what is said in ref_audio, or no ref_text at all")
        if (problem := _find_language_problem(tools.config, row)) is not None:
            raise AudioError(problem)
        if tools.family is not None:
            try:
                tools.family.check_prompt(ref_text=row.ref_text, instruct=row.instruct)
            except ValueError as error:
                raise AudioError(str(error)) from error

    def _read_reference(self, row: ManifestRow, sample_rate: int, counts: Counter[str]) -> Audio | None:
        if row.ref_audio is None:
            return None
        try:
            reference = read_audio(row.resolve(row.ref_audio), sample_rate, self.limits.max_seconds)
            check_audio(reference, sample_rate, self.limits)
            if row.ref_text is not None:
                check_text(row.ref_text, len(reference) / sample_rate, self.limits)
            return self.cleaning.level(reference, sample_rate, counts)
        except AudioError as error:
            raise AudioError(f"ref_audio: {error}") from error

    def _finish(
        self,
        clips: Sequence[_Clip],
        tools: _Tools,
        counts: Counter[str],
        prepared: list[PreparedRow],
        rejected: list[Rejected],
    ) -> None:
        """Make rows of clips, in batches; in their order."""
        rate = tools.codec.sample_rate
        silent = [clip for clip in clips if clip.error is None and clip.text is None]
        for clip, text in self._batch(silent, lambda part: _transcribe(part, tools)):
            clip.text = text
        for clip in clips:
            with clip.keep_error():
                if clip.error is None:
                    clip.text = self.cleaning.fix((clip.text or "").strip(), counts)
                    if not clip.text:
                        raise AudioError("text: the transcript is empty")
                    check_text(clip.text, len(clip.audio) / rate, self.limits)
        for clip, codes in self._batch(clips, lambda part: _encode([clip.audio for clip in part], tools)):
            clip.codes = codes
        told = [clip for clip in clips if clip.row.ref_text is not None]
        for clip, codes in self._batch(told, lambda part: _encode([clip.reference for clip in part], tools)):
            clip.ref_codes = codes
        for clip in clips:
            with clip.keep_error():
                if clip.error is None:
                    prepared.append(self._make_row(clip, rate, self._embed(clip.reference, tools.encoder), counts))
            if clip.error is not None:
                rejected.append(Rejected(line=clip.row.line, audio=clip.name, reason=_describe(clip.error)))

    def _batch(self, clips: Sequence[_Clip], work: Callable[[list[_Clip]], list[Any]]) -> Iterator[tuple[_Clip, Any]]:
        """Yield clips with what is made of them in batches of similar length; of a batch that fails, one by one."""
        good = sorted((clip for clip in clips if clip.error is None), key=lambda clip: len(clip.audio))
        for begin in range(0, len(good), self.batch_size):
            part = good[begin : begin + self.batch_size]
            try:
                yield from zip(part, work(part), strict=True)
                continue
            except Exception as error:  # noqa: BLE001 - one clip must not stop the others
                if len(part) == 1:
                    part[0].error = error
                    continue
            for clip in part:
                with clip.keep_error():
                    yield clip, work([clip])[0]

    def _make_row(
        self, clip: _Clip, sample_rate: int, embedding: NDArray[np.float32], counts: Counter[str]
    ) -> PreparedRow:
        row = clip.row
        instruct, ref_text = (self.cleaning.fix((text or "").strip(), counts) for text in (row.instruct, row.ref_text))
        for name, text in (("text", clip.text), ("instruct", instruct), ("ref_text", ref_text)):
            check_tokens(text or "", name)
        return PreparedRow(
            audio=clip.name,
            text=clip.text or "",
            codes=clip.codes,
            seconds=round(len(clip.audio) / sample_rate, 4),
            speaker=row.speaker.lower(),
            language=row.language.lower(),
            speaker_embedding=embedding,
            instruct=instruct,
            ref_text=ref_text,
            ref_codes=clip.ref_codes,
        )

    def _embed(self, audio: Audio, encoder: SpeakerEncoder | None) -> NDArray[np.float32]:
        if self.model == SPOKEN:
            return describe_voice(audio, _SMALL_VOICE)
        if encoder is None:
            return np.zeros(0, dtype=np.float32)
        with torch.inference_mode():
            mels = compute_mels(torch.from_numpy(audio)[None].to(self.device), encoder.config)
            return np.asarray(encoder(mels)[0].cpu().numpy(), dtype=np.float32)

    def _read_model(self) -> tuple[Family, FamilyConfig] | tuple[None, None]:
        """Return family and configuration of the model; of a codec alone there are none."""
        folder = get_pretrained_folder(self.model) if self.model != SPOKEN else None
        return read_family(folder) if folder is not None and is_speech_model(folder) else (None, None)


def _transcribe(clips: Sequence[_Clip], tools: _Tools) -> list[str]:
    assert tools.transcribe is not None
    return tools.transcribe([c.audio for c in clips], tools.codec.sample_rate, [c.row.language for c in clips])


def _encode(clips: Sequence[Audio], tools: _Tools) -> list[NDArray[np.int64]]:
    return [codes.numpy() for codes in tools.codec.encode([torch.from_numpy(clip) for clip in clips])]


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
    folder = get_pretrained_folder(name)
    config = read_config(folder).speaker_encoder
    return None if config is None else load_speaker_encoder(folder, config).to(device)


def _describe_folder(folder: Path) -> str:
    """Return a digest of the configuration and all tensors."""
    read_raw_config(folder)  # says what is wrong with it
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    digest.update(compute_fingerprint(folder).encode())
    return digest.hexdigest()
