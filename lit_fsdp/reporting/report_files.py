"""The three files of a run report: a page, the same as Markdown, and its numbers."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from lightning.pytorch.utilities import rank_zero_warn

from lit_fsdp.files import write_whole
from lit_fsdp.redaction import hide_hosts, hide_paths, redact
from lit_fsdp.reporting.plots import NARROW, render_svg, write_png
from lit_fsdp.reporting.sections import HasSection, Section

HTML, MARKDOWN, JSON, PICTURES = "report.html", "report.md", "report.json", "report"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot as it lies in the files."""

    title: str
    wide: str  # as ``<svg>`` for a screen; empty where the narrow one does for all
    narrow: str  # as ``<svg>`` for a phone
    png: str  # its file, as seen from the folder of the report


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Audio as it lies in the files."""

    title: str
    source: str  # the whole file as a ``data:`` address
    wav: str  # its file, as seen from the folder of the report


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section that has been drawn."""

    section: Section
    anchor: str  # its name in the page
    pictures: Sequence[Picture] = ()
    recordings: Sequence[Recording] = ()
    code: str = ""  # text that is shown as it is


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is written."""

    name: str
    status: str  # how it ended, in one word
    message: str  # the same in a sentence
    facts: Mapping[str, str]  # what comes first: labels and values
    parts: Sequence[Part]
    numbers: Mapping[str, Any] = field(default_factory=dict)  # for ``report.json``
    kind: str = "Run report"
    footer: str = "The same is in report.md, all numbers in report.json."


def draw_section(section: Section, folder: Path | None, *, code: str = "", is_grid: bool = False) -> Part:
    """Draw the plots of a section, and write them as PNG, and its sounds as WAV, into the report's folder.

    Without a folder they are in the page alone.
    Its texts are cleared of credentials and of paths of this machine. ``code`` is shown with the rest as it is. A grid
    has small pictures beside each other.
    """
    section, code = hide_paths(redact(section)), redact(code)
    anchor = _make_slug(section.name)
    if folder is not None and (section.plots or section.sounds):
        (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    pictures = []
    for number, plot in enumerate(section.plots, start=1):
        png = f"{PICTURES}/{anchor}_{number}_{_make_slug(plot.title)}.png"
        if folder is not None:
            write_png(plot, folder / png)
        wide, narrow = "" if is_grid else render_svg(plot), render_svg(plot, NARROW)
        pictures.append(Picture(title=plot.title, wide=wide, narrow=narrow, png=png))
    recordings = []
    for number, sound in enumerate(section.sounds, start=1):
        wav = f"{PICTURES}/{anchor}_{number}.wav"
        if folder is not None:
            (folder / wav).write_bytes(sound.wav)
        source = f"data:audio/wav;base64,{b64encode(sound.wav).decode()}"
        recordings.append(Recording(title=sound.title, source=source, wav=wav))
    return Part(section=section, anchor=anchor, pictures=pictures, recordings=recordings, code=code)


def draw_sections(callbacks: Iterable[Any], folder: Path) -> dict[str, tuple[Part, dict[str, Any]]]:
    """Return what callbacks have to say, drawn and for ``report.json``, by the names of sections.

    A section that cannot be made becomes a note that says so.
    """
    taken = {"curves", "checkpoints", "units", "configuration", "environment"}
    found: dict[str, tuple[Part, dict[str, Any]]] = {}
    for callback in callbacks:
        if not isinstance(callback, HasSection):
            continue
        try:
            section = callback.make_section()
            if section is None:
                continue
            section = _rename(section, taken)
            part = draw_section(section, folder)
            entry = {"title": section.title, "notes": section.notes, "numbers": make_plain(section.numbers)}
        except Exception as error:  # noqa: BLE001 - of a callback that may be anyone's
            name, text = type(callback).__name__, f"{type(error).__name__}: {error}"
            rank_zero_warn(f"{name} has no section in the report: make_section: {text}")
            text = redact(hide_hosts(text))
            note = f"This section could not be made: {text}"
            section = _rename(Section(title=name, name=name.lower(), notes=[note]), taken)
            part, entry = draw_section(section, folder), {"title": name, "error": text}
        taken.add(section.name)
        found[section.name] = (part, entry)
    return found


def write_report(report: Report, folder: Path) -> None:
    """Write the three files, credentials redacted; those that exist are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    redacted = {name: redact(getattr(report, name)) for name in ("name", "message", "facts", "numbers")}
    report = replace(report, **redacted)  # its parts were redacted when they were drawn
    texts = {
        JSON: json.dumps(report.numbers, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        MARKDOWN: _format_markdown(report),
        HTML: render_html(report),
    }
    for name, text in texts.items():
        write_whole(folder / name, text)


def add_section(folder: Path, section: Section) -> bool:
    """Put a section at the end of a report that was written before, in place of one of its name.

    Returns whether there is a report in the folder.
    """
    if not all((folder / name).is_file() for name in (HTML, MARKDOWN, JSON)):
        return False
    part = draw_section(section, folder)
    report = Report(name="", status="", message="", facts={}, parts=[part])
    rendered, anchor = render_html(report), re.escape(part.anchor)
    page = (folder / HTML).read_text(encoding="utf-8")
    for pattern, end in (
        (f'<section id="{anchor}">.*?</section>\n', "</main>"),
        (f'<li><a href="#{anchor}">.*?\n', "</ol>"),
    ):
        new = re.search(pattern, rendered, re.DOTALL)
        assert new is not None
        page = re.sub(pattern, "", page, flags=re.DOTALL)
        begin, end, rest = page.partition(end)
        page = f"{begin}{new[0]}{end}{rest}"
    heading = f"## {_escape(part.section.title)}\n"
    text = (folder / MARKDOWN).read_text(encoding="utf-8")
    text = re.sub(rf"^{re.escape(heading)}.*?(?=^## |\Z)", "", text, flags=re.DOTALL | re.M)
    text = f"{text.rstrip()}\n\n{heading}{_format_markdown(report).partition(heading)[2]}"
    numbers = json.loads((folder / JSON).read_text(encoding="utf-8"))
    entry = {"title": part.section.title, "notes": part.section.notes, "numbers": make_plain(section.numbers)}
    numbers.setdefault("sections", {})[section.name] = hide_paths(redact(entry))
    write_whole(folder / JSON, json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(folder / MARKDOWN, text)
    write_whole(folder / HTML, page)
    return True


def make_plain(value: Any) -> Any:
    """Return a value in the types of JSON; a number that is not finite becomes ``None``.

    Raises:
        TypeError: It has none there.
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): make_plain(part) for key, part in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [make_plain(part) for part in value]
    raise TypeError(f"a {type(value).__name__} has no place in JSON: expected numbers, texts, lists and dicts")


def _rename(section: Section, taken: set[str]) -> Section:
    """Return a section with a name that no other has."""
    if not isinstance(section, Section):
        raise TypeError(f"make_section returned a {type(section).__name__}: expected a Section, or None")
    name, number = section.name, 1
    while name in taken:
        number += 1
        name = f"{section.name}_{number}"
    return replace(section, name=name)


def _make_slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:60] or "part"


def render_html(report: Report) -> str:
    """Return a report as one page that needs no other file and runs no script."""
    template = resources.files("lit_fsdp.reporting").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(report=report)


def _format_markdown(report: Report) -> str:
    blocks = [f"# {_escape(report.name)}", f"**{report.status}**: {_escape(report.message)}"]
    blocks.append(_format_table(["", ""], list(report.facts.items())))
    for part in report.parts:
        section = part.section
        blocks.append(f"## {_escape(section.title)}")
        blocks += map(_escape, section.notes)
        if part.code:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", part.code)), default=0))
            blocks.append(f"{fence}yaml\n{part.code.rstrip()}\n{fence}")
        blocks += [f"![{_escape(picture.title)}]({picture.png})" for picture in part.pictures]
        blocks += [f"[{_escape(recording.title)}]({recording.wav})" for recording in part.recordings]
        for table in section.tables:
            blocks += [f"### {_escape(table.title)}"] if table.title else []
            blocks.append(_format_table(table.columns, table.rows))
    return "\n\n".join(blocks) + "\n"


def _format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines)


def _escape(text: str) -> str:
    """Keep a text from being read as a tag, as the end of a cell or as markup."""
    text = re.sub(r"([\\`*|\[\]])", r"\\\1", str(text)).replace("&", "&amp;").replace("<", "&lt;")
    return " ".join(text.split())
