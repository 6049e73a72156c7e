"""How close generated speech comes to what was recorded, and where it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lit_fsdp.tasks.tts.generation import Speech
from lit_fsdp.tasks.tts.layout import Codes


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A text that was recorded and generated.

    Args:
        text: What is said.
        speaker: By whom.
        target: Recorded codes [frames, codebooks].
        speech: The generated ones.
    """

    text: str
    speaker: str
    target: Codes
    speech: Speech

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


@dataclass(kw_only=True)
class SpeechReport:
    """The speech of the last validation."""

    rows: list[Spoken] = field(default_factory=list)
    listened: dict[str, float] = field(default_factory=dict)  # what listening has measured

    def summarize(self) -> dict[str, float]:
        """Return means over all rows."""
        if not self.rows:
            return {}
        count = len(self.rows)
        return {
            "duration_ratio": sum(row.duration_ratio for row in self.rows) / count,
            "missed_eos_pct": 100 * sum(not row.speech.has_ended for row in self.rows) / count,
            "equal_codes_pct": sum(row.equal_codes_pct for row in self.rows) / count,
            **self.listened,
        }


def describe_spoken(report: SpeechReport) -> list[str]:
    """Return a line for each text."""
    return [
        f"spoken: {row.speaker} | {row.text} | {len(row.speech.codes)} of {len(row.target)} frames, "
        f"{row.equal_codes_pct:.1f} % of the codes equal, {'ended' if row.speech.has_ended else 'no end'}"
        for row in report.rows
    ]
