"""What a speech model said in its last validation: to listen to, and beside what it was to say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_fsdp.reporting.sections import Curve, Plot, Section, Sound, Table

_MAX_BYTES = 4 * 2**20  # of all clips in the page together: 87 s at 24 kHz
_UNITS = {"_pct": " %"}
_OVER_TIME = (
    ("Voice: cosine to the one asked for", "cosine", ("speaker_similarity",)),
    ("Words and characters that were heard wrong", "%", ("wer_pct", "cer_pct")),
    ("Length of speech, by that recorded", "ratio", ("duration_ratio",)),
)


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
        if not all(hasattr(report, name) for name in ("rows", "clips", "recorded", "history", "summarize", "problems")):
            return None
        problems = [f"Warning: {problem} (first at step {step:,})." for problem, step in report.problems.items()]
        if not report.rows:
            numbers = {"rows": [], "warnings": list(report.problems)}
            return Section(title="Speech", name="speech", numbers=numbers, notes=problems) if problems else None
        values = {name: float(value) for name, value in report.summarize().items()}
        clips = report.clips or [None] * len(report.rows)
        pairs = list(zip(report.rows, clips, report.recorded or [None] * len(report.rows), strict=True))
        sounds, num_shown = _list_sounds(pairs)
        notes = [f"{len(report.rows)} texts of the validation data, spoken at step {report.step:,}."]
        audible = sum(clip is not None and len(clip.audio) > 0 for clip in clips)
        if audible > num_shown:
            left = audible - num_shown
            notes.append(f"{left} of {audible} clips are left out: together they are too long for a page.")
        if len(sounds) > num_shown:
            notes.append("Recorded clips are what the codec makes of their codes: the best that a model can reach.")
        notes += problems
        if not report.clips and not problems:
            notes.append("There is no audio, as nothing decodes it: model.speech_eval.codec does.")
        described = [_describe(row, clip) for row, clip in zip(report.rows, clips, strict=True)]
        return Section(
            title="Speech",
            name="speech",
            numbers={
                "step": report.step,
                **values,
                "rows": described,
                "history": [{"step": step, **found} for step, found in report.history.items()],
                "warnings": list(report.problems),
            },
            tables=[_list_values(values), _list_rows(report.rows, clips)],
            plots=_plot_history(report.history),
            notes=notes,
            sounds=sounds,
        )


def _list_sounds(pairs: Sequence[tuple[Any, Any, Any]]) -> tuple[list[Sound], int]:
    """Return generated clips, each with its recorded one, as far as there is room, and how many are generated ones.

    Args:
        pairs: Rows with both clips; ``None`` for what there is not.
    """
    sounds: list[Sound] = []
    num_bytes = num_shown = 0
    for row, clip, recorded in pairs:
        wav = clip.to_wav() if clip is not None and len(clip.audio) else b""
        if not wav or num_bytes + len(wav) > _MAX_BYTES:
            continue
        other = recorded.to_wav() if recorded is not None and len(recorded.audio) else b""
        title = f"{row.speaker}: {row.text}"
        num_bytes, num_shown = num_bytes + len(wav), num_shown + 1
        sounds.append(Sound(title=title, wav=wav))
        if other and num_bytes + len(other) <= _MAX_BYTES:
            num_bytes += len(other)
            sounds.append(Sound(title=f"recorded: {title}", wav=other))
    return sounds, num_shown


def _plot_history(history: Mapping[int, Mapping[str, float]]) -> list[Plot]:
    """Return what was measured over the steps, from two of them on."""
    plots = []
    for title, unit, names in _OVER_TIME:
        curves = []
        for name in names:
            points = [
                (step, found[name]) for step, found in history.items() if math.isfinite(found.get(name, math.nan))
            ]
            if len(points) > 1:
                steps, values = zip(*points, strict=True)
                curves.append(Curve(label=name.removesuffix("_pct").replace("_", " "), x=steps, y=values))
        if curves:
            plots.append(Plot(title=title, x_label="step", y_label=unit, curves=curves, from_zero=unit == "%"))
    return plots


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
