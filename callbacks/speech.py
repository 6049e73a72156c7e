"""What a speech model said in its last validation: to listen to, and beside what it was to say."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_fsdp.reporting.sections import Section, Sound, Table

_MAX_BYTES = 4 * 2**20  # of all clips in the page together: 87 s at 24 kHz
_UNITS = {"_pct": " %"}


class SpokenReport(Callback):
    """Put the speech of the last validation into the report: audio, texts, and what was measured of it.

    Reads ``report`` of the LightningModule, as ``TextToSpeech`` has it with ``num_samples``; there is audio in it with
    ``speech_eval``. Does nothing for others.
    """

    def __init__(self) -> None:
        self._module: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._module = pl_module

    def make_section(self) -> Section | None:
        """Return what was said, with as many clips as the page can hold."""
        report: Any = getattr(self._module, "report", None)
        if not all(hasattr(report, name) for name in ("rows", "clips", "summarize", "problems")):
            return None
        problems = [f"Warning: {problem} (first at step {step:,})." for problem, step in report.problems.items()]
        if not report.rows:
            numbers = {"rows": [], "warnings": list(report.problems)}
            return Section(title="Speech", name="speech", numbers=numbers, notes=problems) if problems else None
        values = {name: float(value) for name, value in report.summarize().items()}
        clips = report.clips or [None] * len(report.rows)
        sounds, num_bytes = [], 0
        for row, clip in zip(report.rows, clips, strict=True):
            wav = clip.to_wav() if clip is not None and len(clip.audio) else b""
            if wav and num_bytes + len(wav) <= _MAX_BYTES:
                num_bytes += len(wav)
                sounds.append(Sound(title=f"{row.speaker}: {row.text}", wav=wav))
        notes = [f"{len(report.rows)} texts of the validation data, spoken at step {report.step:,}."]
        audible = sum(clip is not None and len(clip.audio) > 0 for clip in clips)
        if audible > len(sounds):
            left = audible - len(sounds)
            notes.append(f"{left} of {audible} clips are left out: together they are too long for a page.")
        notes += problems
        if not report.clips and not problems:
            notes.append("There is no audio, as nothing decodes it: model.speech_eval.codec does.")
        described = [_describe(row, clip) for row, clip in zip(report.rows, clips, strict=True)]
        return Section(
            title="Speech",
            name="speech",
            numbers={"step": report.step, **values, "rows": described, "warnings": list(report.problems)},
            tables=[_list_values(values), _list_rows(report.rows, clips)],
            notes=notes,
            sounds=sounds,
        )


def _describe(row: Any, clip: Any) -> dict[str, Any]:
    return {
        "text": row.text,
        "speaker": row.speaker,
        "heard": None if clip is None else clip.transcript,
        "num_frames": len(row.speech.codes),
        "num_recorded_frames": len(row.target),
        "equal_codes_pct": row.equal_codes_pct,
        "has_ended": row.speech.has_ended,
    }


def _list_values(values: dict[str, float]) -> Table:
    rows = []
    for name, value in values.items():
        suffix = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
        shown = "too short to tell" if math.isnan(value) else f"{value:.3g}{_UNITS.get(suffix, '')}"
        rows.append([name.removesuffix(suffix).replace("_", " "), shown])
    return Table(title="Measured over all of them", columns=["what", "value"], rows=rows)


def _list_rows(rows: Any, clips: Any) -> Table:
    listened = any(clip is not None and clip.transcript is not None for clip in clips)
    columns = ["text", "speaker", "frames", "recorded", "equal codes in %", "ended", *(["heard"] if listened else [])]
    cells = []
    for row, clip in zip(rows, clips, strict=True):
        numbers = [f"{len(row.speech.codes):,}", f"{len(row.target):,}", f"{row.equal_codes_pct:.1f}"]
        heard = [clip.transcript or ""] if listened else []
        cells.append([row.text, row.speaker, *numbers, "yes" if row.speech.has_ended else "no", *heard])
    return Table(title="Text by text", columns=columns, rows=cells)
