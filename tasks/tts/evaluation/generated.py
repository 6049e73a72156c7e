"""How close generated speech comes to what was recorded, and where it ends."""

from __future__ import annotations

import io
import re
import struct
import wave
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_fsdp.files import open_whole
from lit_fsdp.tasks.tts.generation import Speech
from lit_fsdp.tasks.tts.utterance import Codes

MEASURED = ("duration_ratio", "missed_eos_pct", "equal_codes_pct")  # of all generated speech


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text that was recorded and generated.

    Args:
        text: What is said.
        speaker: By whom.
        target: Recorded codes [frames, codebooks].
        speech: The generated ones.
        language: Of the text.
    """

    text: str
    speaker: str
    target: Codes
    speech: Speech
    language: str = "auto"

    @property
    def duration_ratio(self) -> float:
        """Generated frames by recorded ones."""
        return len(self.speech.codes) / max(len(self.target), 1)

    @property
    def equal_codes_pct(self) -> float:
        """Share of the longer one's codes that are the same at the same place."""
        own, target = self.speech.codes, torch.from_numpy(self.target)
        length = min(len(own), len(target))
        same = int((own[:length] == target[:length]).sum())
        return 100 * same / max(own.numel(), target.numel(), 1)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Generated speech as audio.

    Args:
        audio: [samples], between -1 and 1, on the CPU.
        sample_rate: Of it.
        transcript: What the transcriber wrote down; ``None`` without one.
    """

    audio: Tensor
    sample_rate: int
    transcript: str | None = None

    def write(self, path: Path) -> None:
        """Write a 16-bit WAV file, for which no package is needed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_whole(path, "wb") as file:
            file.write(self.to_wav())

    def to_wav(self) -> bytes:
        """Return the contents of a 16-bit WAV file."""
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(self.sample_rate)
            writer.writeframes(to_samples(self.audio))
        return file.getvalue()


def to_samples(audio: Tensor) -> bytes:
    """Return audio [samples], between -1 and 1, as 16-bit samples."""
    return (audio.clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes()


def make_open_header(sample_rate: int) -> bytes:
    """Return the header of a 16-bit WAV file with one channel, of which nobody knows yet how long it is."""
    form = struct.pack("<HHIIHH", 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    unknown = b"\xff\xff\xff\xff"
    return b"RIFF" + unknown + b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + unknown


@dataclass(kw_only=True)
class SpeechReport:
    """The speech of the last validation.

    Args:
        rows: What was generated, with what was recorded.
        measured: What ``speech_eval`` has measured.
        clips: The audio of ``rows``, on rank 0; empty without ``speech_eval``.
        recorded: What the codec makes of the recorded codes, beside ``clips``.
        step: When.
        history: What was measured at each step of this process, ``step`` included.
        problems: What failed in any validation, by the step at which each came first.
    """

    rows: list[Sample] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    recorded: list[Clip] = field(default_factory=list)
    step: int = 0
    history: dict[int, dict[str, float]] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)

    def warn(self, problem: str, step: int) -> None:
        """Say once what failed, and keep it."""
        kind = re.sub(r"\d+", "#", problem)  # sizes and numbers differ each time
        if kind not in {re.sub(r"\d+", "#", known) for known in self.problems}:
            self.problems[problem] = step
            rank_zero_warn(f"num_samples: {problem}: training goes on")

    def summarize(self) -> dict[str, float]:
        """Return means over all rows."""
        if not self.rows:
            return {}
        count = len(self.rows)
        means = (
            sum(row.duration_ratio for row in self.rows) / count,
            100 * sum(not row.speech.has_ended for row in self.rows) / count,
            sum(row.equal_codes_pct for row in self.rows) / count,
        )
        return {**dict(zip(MEASURED, means, strict=True)), **self.measured}


def describe_samples(report: SpeechReport) -> list[str]:
    """Return a line for each text."""
    return [
        f"spoken: {row.speaker} | {row.text} | {len(row.speech.codes)} of {len(row.target)} frames, "
        f"{row.equal_codes_pct:.1f} % of the codes equal, {'ended' if row.speech.has_ended else 'cut off'}"
        for row in report.rows
    ]
