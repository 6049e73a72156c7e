"""Audio files: read, mixed to mono, resampled, checked and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NO_SIZE = 0x7FFFF000  # and above: what writers to a pipe put where a size belongs
Audio = NDArray[np.float32]  # [samples], mono, between -1 and 1


class AudioError(ValueError):
    """Says why a clip cannot be used, in words for a list of rejects."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Which clips are good enough.

    Args:
        min_seconds: Shorter clips are rejected.
        max_seconds: Longer ones too.
        min_peak_db: Clips that stay below are taken for silence; 0 is full scale.
        max_clipped_pct: Clips with more samples at full scale than this share are taken for clipped.
    """

    min_seconds: float = 0.4
    max_seconds: float = 30.0
    min_peak_db: float = -50.0
    max_clipped_pct: float = 0.5

    def check(self) -> None:
        """Refuse limits that nothing can keep.

        Raises:
            ValueError: With the setting and the nearest fix.
        """
        if not 0 <= self.min_seconds < self.max_seconds:
            raise ValueError(
                f"limits: got min_seconds {self.min_seconds:g}, max_seconds {self.max_seconds:g}: expected 0 or more, "
                "and the second above the first"
            )
        if not 0 <= self.max_clipped_pct <= 100:
            raise ValueError(f"limits.max_clipped_pct: got {self.max_clipped_pct:g}: expected 0 to 100")


def read_audio(path: Path, sample_rate: int, max_seconds: float | None = None) -> Audio:
    """Return a WAV, FLAC, MP3 or OGG file as mono at a sample rate.

    Args:
        path: The file.
        sample_rate: To which it is resampled.
        max_seconds: Refuse longer ones before they take memory.

    Raises:
        AudioError: It cannot be read, ends before its end, is too long, or has nothing in it.
    """
    soundfile, soxr = import_libraries()
    if not path.is_file():
        raise AudioError(f"no such file: {path}")
    try:
        _check_wav_is_whole(path)
        info = soundfile.info(path)
        seconds = info.duration
        if max_seconds is not None and seconds > max_seconds:
            raise AudioError(f"too long: {seconds:.2f} s, at most {max_seconds:g} s")
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise AudioError(f"cannot be read: {error.error_string}") from error
    if len(samples) < info.frames:
        raise AudioError(f"cut short: {len(samples) / rate:.2f} s of {seconds:.2f} s are there")
    mono = samples.mean(axis=1, dtype=np.float32)
    if not len(mono):
        raise AudioError("no samples in it")
    if not np.isfinite(mono).all():
        raise AudioError("has samples that are not finite")
    if rate != sample_rate:
        mono = soxr.resample(mono, rate, sample_rate, quality="HQ")
    return np.ascontiguousarray(mono, dtype=np.float32)


def _check_wav_is_whole(path: Path) -> None:
    """Refuse a WAV file that is shorter than it says: libsndfile reads what is there, and its text says more."""
    with path.open("rb") as file:
        header = file.read(8)
    size, num_bytes = path.stat().st_size, 8 + int.from_bytes(header[4:], "little")
    # One less: some leave the last padding byte out.
    if header[:4] == b"RIFF" and size < num_bytes - 1 and num_bytes < _NO_SIZE:
        raise AudioError(f"cut short: {size} bytes of {num_bytes} are there")


def check_audio(audio: Audio, sample_rate: int, limits: Limits) -> None:
    """Refuse a clip that would teach nothing, or something wrong.

    Raises:
        AudioError: Too short, too long, silent or clipped, with the number and the limit.
    """
    seconds = len(audio) / sample_rate
    if seconds < limits.min_seconds:
        raise AudioError(f"too short: {seconds:.2f} s, at least {limits.min_seconds:g} s")
    if seconds > limits.max_seconds:
        raise AudioError(f"too long: {seconds:.2f} s, at most {limits.max_seconds:g} s")
    peak_db = 20 * np.log10(max(float(np.abs(audio).max()), 1e-10))
    if peak_db < limits.min_peak_db:
        raise AudioError(f"silence: peak {peak_db:.0f} dB, at least {limits.min_peak_db:g} dB")
    clipped_pct = 100 * float(np.mean(np.abs(audio) >= 0.999))
    if clipped_pct > limits.max_clipped_pct:
        raise AudioError(f"clipped: {clipped_pct:.1f} % of samples at full scale, at most {limits.max_clipped_pct:g} %")


def import_libraries() -> tuple[Any, Any]:
    """Return soundfile and soxr, which only those need who read or write audio.

    Raises:
        ValueError: One is not installed.
    """
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise ValueError(f"reading audio needs a package: {error.name}; pip install 'lit_fsdp[speech]'") from error
    return soundfile, soxr
