"""What may be done to recordings and texts before they are judged: cut at pauses, brought to one loudness, mended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_fsdp.cache import hash_file
from lit_fsdp.tasks.tts.preparation.audio import Audio, AudioError, import_libraries
from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow

DUPLICATE = "duplicate:"  # begins the reason
LONGEST_S = 7200.0  # of a file that is cut: it is held in memory, 0.7 GB in two hours
_VAD_RATE = 16000
_JOINED_PAUSE_S = 1.0  # shorter ones stay inside a piece
_PEAK = 10 ** (-1 / 20)  # 1 dB below full scale
_SHORTEST_S = 0.4  # of which loudness can be measured: one block of ITU-R BS.1770


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """What is done to recordings and texts before they are judged by limits; nothing by default.

    Args:
        slice_seconds: Cut recordings without text that are longer at pauses, into pieces of up to this long, such as
            15; pauses between pieces are left out. Silero VAD finds the speech.
        loudness_lufs: Bring clips to this loudness (ITU-R BS.1770-4), such as -23. Where a peak would come closer to
            full scale than 1 dB, the clip stays softer.
        fix_text: Mend what is wrong with the Unicode of texts, by ftfy: text that was decoded wrongly, curly quotes,
            ligatures, control characters, HTML entities; and make each run of white space one space. Numbers and
            abbreviations stay as they are written.
        drop_duplicates: Leave out recordings whose file is, byte for byte, that of an earlier line.
    """

    slice_seconds: float | None = None
    loudness_lufs: float | None = None
    fix_text: bool = False
    drop_duplicates: bool = False

    def check(self, *, max_seconds: float, has_transcriber: bool) -> None:
        """Refuse what cannot work, and packages that are missing.

        Args:
            max_seconds: Of the limits.
            has_transcriber: Whether pieces get a text.

        Raises:
            ValueError: With the setting and the nearest fix.
        """
        if (longest := self.slice_seconds) is not None:
            if not 1 <= longest <= max_seconds:
                raise ValueError(
                    f"cleaning.slice_seconds: got {longest:g}: expected 1 to limits.max_seconds, {max_seconds:g}"
                )
            if not has_transcriber:
                raise ValueError(
                    "cleaning.slice_seconds: only recordings without text are cut, and nothing writes down what is "
                    "said in the pieces; set transcriber"
                )
        if self.loudness_lufs is not None and not -70 < self.loudness_lufs <= -5:
            raise ValueError(f"cleaning.loudness_lufs: got {self.loudness_lufs:g}: expected above -70, up to -5")
        for is_used, package in (
            (self.slice_seconds is not None, "silero_vad"),
            (self.loudness_lufs is not None, "pyloudnorm"),
            (self.fix_text, "ftfy"),
        ):
            if is_used and find_spec(package) is None:
                raise ValueError(f"cleaning: needs a package: {package}; pip install 'lit_fsdp[speech-cleaning]'")

    def may_slice(self, row: ManifestRow) -> bool:
        """Tell whether a recording may be cut: one whose text is not known."""
        return self.slice_seconds is not None and row.text is None

    def fix(self, text: str, counts: Counter[str]) -> str:
        """Return a text as it is to be read; counts it where it changed."""
        if not self.fix_text:
            return text
        import ftfy

        # Widths stay: full-width marks are those of Chinese and Japanese.
        fixed = " ".join(ftfy.fix_text(text, fix_character_width=False).split())
        counts["fixed_texts"] += fixed != text
        return fixed

    def level(self, audio: Audio, sample_rate: int, counts: Counter[str]) -> Audio:
        """Return a clip at the wanted loudness; counts it, and whether its peak kept it softer.

        Raises:
            AudioError: Its loudness cannot be measured.
        """
        if self.loudness_lufs is None:
            return audio
        import pyloudnorm

        if len(audio) < _SHORTEST_S * sample_rate:
            raise AudioError(f"too short to measure its loudness: {len(audio) / sample_rate:.2f} s, at least 0.4 s")
        found = pyloudnorm.Meter(sample_rate).integrated_loudness(audio.astype(np.float64))
        if not np.isfinite(found):
            raise AudioError("silence: too soft to measure its loudness")
        gain, peak = 10 ** ((self.loudness_lufs - found) / 20), float(np.abs(audio).max())
        is_limited = bool(gain * peak > _PEAK)
        counts["leveled_clips"] += 1
        counts["leveled_clips_below_loudness"] += is_limited
        return np.asarray(audio * (_PEAK / peak if is_limited else gain), dtype=np.float32)

    def slice(self, audio: Audio, sample_rate: int, counts: Counter[str]) -> list[tuple[float, float, Audio]]:
        """Return the pieces of a recording, each with where it begins and ends in seconds.

        Raises:
            AudioError: Nobody speaks in it.
        """
        assert self.slice_seconds is not None
        seconds = len(audio) / sample_rate
        if seconds <= self.slice_seconds:
            return [(0.0, seconds, audio)]
        spans = join_spans(_find_speech(audio, sample_rate, self.slice_seconds), self.slice_seconds)
        if not spans:
            raise AudioError(f"no speech was found in its {seconds:.2f} s")
        counts["sliced_files"] += 1
        counts["pieces"] += len(spans)
        counts["left_out_ms"] += round(1000 * (seconds - sum(end - begin for begin, end in spans)))
        return [(b, e, audio[round(b * sample_rate) : round(e * sample_rate)]) for b, e in spans]


def join_spans(spans: Sequence[tuple[float, float]], longest_s: float) -> list[tuple[float, float]]:
    """Return spans of which neighbours are one where their pause is short and they are not too long together.

    Args:
        spans: Begin and end in seconds, in order.
        longest_s: Of what is joined.
    """
    joined: list[tuple[float, float]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < _JOINED_PAUSE_S and end - joined[-1][0] <= longest_s:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def mark_duplicates(rows: Sequence[ManifestRow]) -> list[ManifestRow]:
    """Return rows of which those have a problem whose audio file is that of an earlier one.

    Only files of the same size are read.
    """
    paths = [_find_file(row) for row in rows]
    sizes = Counter(path.stat().st_size for path in paths if path is not None)
    first: dict[str, int] = {}
    digests: dict[Path, str] = {}
    marked = []
    for row, path in zip(rows, paths, strict=True):
        digest = None
        with suppress(OSError, ValueError):  # may not be read; its line is rejected
            if path is not None and sizes[path.stat().st_size] > 1:
                digest = digests[path] = digests.get(path) or hash_file(path)
        if digest is not None and (line := first.setdefault(digest, row.line)) != row.line:
            marked.append(replace(row, problem=f"{DUPLICATE} the same audio as line {line}"))
        else:
            marked.append(row)
    return marked


def _find_file(row: ManifestRow) -> Path | None:
    """Return the audio file of a row that can be used; what is wrong with others is said elsewhere."""
    with suppress(OSError, ValueError, RuntimeError):
        if row.problem is None and (path := row.resolve(row.audio)).is_file():
            return path
    return None


def _find_speech(audio: Audio, sample_rate: int, longest_s: float) -> list[tuple[float, float]]:
    """Return where somebody speaks: begin and end in seconds, none longer than that."""
    _, soxr = import_libraries()
    from silero_vad import get_speech_timestamps

    heard = soxr.resample(audio, sample_rate, _VAD_RATE, quality="HQ")
    found: list[dict[str, int]] = get_speech_timestamps(
        torch.from_numpy(np.ascontiguousarray(heard, dtype=np.float32)),
        _load_vad(),
        sampling_rate=_VAD_RATE,
        max_speech_duration_s=longest_s - 0.2,  # what is added before and after it counts
        speech_pad_ms=100,
    )
    return list(_convert(found, len(audio) / sample_rate))


def _convert(found: Sequence[dict[str, int]], seconds: float) -> Iterator[tuple[float, float]]:
    for part in found:
        yield part["start"] / _VAD_RATE, min(part["end"] / _VAD_RATE, seconds)


@lru_cache(maxsize=1)
def _load_vad() -> Any:
    from silero_vad import load_silero_vad

    return load_silero_vad()
