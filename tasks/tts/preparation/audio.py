"""Audio files: read, mixed to mono, resampled, checked and written."""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_NO_SIZE = 0x7FFFF000  # and above: what writers to a pipe put where a size belongs
_LARGEST_PAGE = 27 + 255 + 255 * 255  # of OGG, in bytes
_PAUSES_S = 10.0  # a word in a clip that is not longer may stand among pauses
# Syllables, and half of them: 4 Chinese characters take as long as 12 letters of English. By beginnings of their names.
_WEIGHTS = {"CJK ": 3.0, "HANGUL SYLLABLE": 2.5, "HIRAGANA": 2.0, "KATAKANA": 2.0}
# What tokenizers of these models read as one token of control, also of Whisper: <|im_end|>, <|en|>, <tts_pad>.
_CONTROL = re.compile(r"<\|[^<>|]+\|>|<tts_\w+>")
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
        max_letters_per_s: Clips whose text has more are taken for cut: nobody speaks so fast (25 are 320 English words
            a minute). Spaces and marks do not count; a Chinese character counts as 3 letters, a Korean one as 2.5, a
            kana as 2, a digit as 3.
        min_letters_per_s: Clips of more than 10 s whose text has fewer are taken for another text's.
    """

    min_seconds: float = 0.4
    max_seconds: float = 30.0
    min_peak_db: float = -50.0
    max_clipped_pct: float = 0.5
    max_letters_per_s: float = 25.0
    min_letters_per_s: float = 0.5

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
        if not 0 <= self.min_letters_per_s < self.max_letters_per_s:
            raise ValueError(
                f"limits: got min_letters_per_s {self.min_letters_per_s:g}, max_letters_per_s "
                f"{self.max_letters_per_s:g}: expected 0 or more, and the second above the first"
            )


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
        _check_is_whole(path)
        info = soundfile.info(path)
        seconds = info.duration
        if max_seconds is not None and seconds > max_seconds:
            raise AudioError(f"too long: {seconds:.2f} s, at most {max_seconds:g} s")
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise AudioError(f"cannot be read: {error.error_string}") from error
    except TypeError as error:  # of soundfile, where a name ends in .raw: samples without a header
        raise AudioError(f"cannot be read: {error}") from error
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


def _check_is_whole(path: Path) -> None:
    """Refuse a WAV or OGG file that lacks its end: libsndfile reads what is there, and its text says more."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(12)
        if header[:4] in (b"RIFF", b"RF64") and header[8:] == b"WAVE":
            _check_wav_is_whole(file, size, int.from_bytes(header[4:8], "little"))
        elif header[:4] == b"OggS":
            _check_ogg_is_whole(file, size)


def _check_wav_is_whole(file: BinaryIO, size: int, riff_size: int) -> None:
    long_size = None
    num_bytes = 8 + riff_size if riff_size < _NO_SIZE else 0
    while len(chunk := file.read(8)) == 8:
        length = int.from_bytes(chunk[4:], "little")
        if chunk[:4] == b"ds64":  # of RF64: sizes of more than 32 bits
            body = file.read(length)
            num_bytes, long_size = 8 + int.from_bytes(body[:8], "little"), int.from_bytes(body[8:16], "little")
            file.seek(length % 2, os.SEEK_CUR)
            continue
        if chunk[:4] == b"data":
            length = long_size if long_size is not None and length >= _NO_SIZE else length
            if length < _NO_SIZE or long_size is not None:
                num_bytes = max(num_bytes, file.tell() + length)
            break
        file.seek(length + length % 2, os.SEEK_CUR)
    # One less: some leave the last padding byte out.
    if size < num_bytes - 1:
        raise AudioError(f"cut short: {size} bytes of {num_bytes} are there")


def _check_ogg_is_whole(file: BinaryIO, size: int) -> None:
    """Refuse what does not end with a whole page (RFC 3533); some recorders mark none as the last."""
    begin = max(0, size - 2 * _LARGEST_PAGE)
    file.seek(begin)
    end = file.read()
    place = end.rfind(b"OggS")
    page = end[place:] if place >= 0 else b""
    num_segments = page[26] if len(page) > 26 else 0
    length = 27 + num_segments + sum(page[27 : 27 + num_segments])
    is_whole = len(page) > 26 and len(page) >= length
    if not is_whole:
        raise AudioError("cut short: the end of its OGG stream is not there")


def check_text(text: str, seconds: float, limits: Limits) -> None:
    """Refuse a text that nobody says in that time: of a file that was cut, or of another clip, or without words.

    Raises:
        AudioError: With the text, or the rate and the limit.
    """
    rate = sum(_count_letters(character) for character in text) / seconds
    if rate == 0:
        raise AudioError(f"text: got {text[:40]!r}: no letter or number in it: expected what is said")
    what = f"{rate:.1f} letters a second ({len(text)} characters in {seconds:.2f} s)"
    if rate > limits.max_letters_per_s:
        raise AudioError(f"text: too long for its audio: {what}, at most {limits.max_letters_per_s:g}")
    if seconds > _PAUSES_S and rate < limits.min_letters_per_s:
        raise AudioError(f"text: too short for its audio: {what}, at least {limits.min_letters_per_s:g}")


def check_tokens(text: str, name: str) -> None:
    """Refuse a text in which training would read a token of control, such as the end of the text.

    Args:
        text: The text.
        name: Of its field.

    Raises:
        AudioError: With the token.
    """
    if found := _CONTROL.search(text):
        raise AudioError(f"{name}: {found[0]!r} in it is a control token, which nobody says: expected words alone")


def _count_letters(character: str) -> float:
    """Return as how many letters of an alphabet a character counts, by the time that it takes to say it."""
    kind = unicodedata.category(character)[0]
    if kind not in "LN":  # marks, such as vowels of Hindi, are part of the letter before them
        return 0.0
    if kind == "N":
        return 3.0  # spoken as a word
    name = unicodedata.name(character, "")
    return next((weight for script, weight in _WEIGHTS.items() if name.startswith(script)), 1.0)


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
