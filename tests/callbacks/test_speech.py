"""What a speech model said is in the report of its run, to listen to."""

import base64
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_runs import Page, TinyTask, fit_tiny, read_numbers

from lit_fsdp.callbacks import SpokenReport, speech
from lit_fsdp.tasks.tts.evaluation.generated import Clip, Sample, SpeechReport
from lit_fsdp.tasks.tts.generation import Speech

TEXTS = ("good morning", "<script>alert(1)</script> | read /mnt/anna/secret/a.wav")


class Speaking(TinyTask):
    """Has spoken already."""

    def __init__(self, *, is_evaluated: bool = True, seconds: float = 0.5) -> None:
        super().__init__()
        target = np.ones((8, 16), dtype=np.int64)
        spoken = [Speech(codes=torch.ones(n, 16, dtype=torch.int64), has_ended=n < 8) for n in (4, 8)]
        rows = [
            Sample(text=text, speaker="kim", target=target, speech=own) for text, own in zip(TEXTS, spoken, strict=True)
        ]
        clips = [
            Clip(audio=torch.linspace(-1, 1, int(seconds * 24000)), sample_rate=24000, transcript="hm") for _ in TEXTS
        ]
        measured = {"wer_pct": 75.0, "speaker_similarity": float("nan")} if is_evaluated else {}
        self.report = SpeechReport(rows=rows, measured=measured, clips=clips if is_evaluated else [], step=7)


def report(folder: Path, module: Any) -> Path:
    fit_tiny(folder, module, callbacks=[SpokenReport()])
    return folder / "tiny" / "version_0"


@pytest.mark.full
def test_the_page_speaks(tmp_path: Path) -> None:
    folder = report(tmp_path, Speaking())
    page = (folder / "report.html").read_text()
    sounds = re.findall(r'<audio controls[^>]* src="data:audio/wav;base64,([^"]+)"></audio>', page)
    assert len(sounds) == 2
    files = re.findall(r"\]\((report/speech_\d\.wav)\)", (folder / "report.md").read_text())
    for text, name in zip(sounds, files, strict=True):
        assert base64.b64decode(text) == (folder / name).read_bytes()
        with wave.open(str(folder / name)) as file:
            assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (24000, 12000, 1)
            samples = np.frombuffer(file.readframes(12000), dtype=np.int16)
        assert (samples[0], samples[-1]) == (-32767, 32767)
    # A page that forbids itself everything must allow this, and nothing that is fetched.
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; media-src data:\"", page)


@pytest.mark.full
def test_the_page_says_what_was_said_and_how_well(tmp_path: Path) -> None:
    folder = report(tmp_path, Speaking())
    page = Page((folder / "report.html").read_text())
    assert "script" not in page.tags
    assert "<script>alert(1)</script> | read …/a.wav" in page.text
    assert "anna" not in page.text
    for words in ("spoken at step 7", "wer", "75 %", "too short to tell", "heard", "missed eos"):
        assert words in page.text, words
    numbers = read_numbers(folder)["sections"]["speech"]["numbers"]
    assert (numbers["step"], numbers["wer_pct"], numbers["speaker_similarity"]) == (7, 75.0, None)
    assert (numbers["duration_ratio"], numbers["missed_eos_pct"], numbers["equal_codes_pct"]) == (0.75, 50.0, 75.0)
    assert [row["num_frames"] for row in numbers["rows"]] == [4, 8]


@pytest.mark.full
def test_a_recorded_clip_follows_the_generated_one_and_measures_are_drawn_over_time(tmp_path: Path) -> None:
    module = Speaking(seconds=0.25)
    module.report.recorded = [Clip(audio=torch.zeros(3000 * (i + 1)), sample_rate=24000) for i in range(2)]
    module.report.history = {
        3: {"wer_pct": 90.0, "speaker_similarity": float("nan")},
        7: {"wer_pct": 75.0, "speaker_similarity": 0.5},
    }
    folder = report(tmp_path, module)
    page = (folder / "report.html").read_text()
    titles = re.findall(r'<figure class="sound"><figcaption>(.*?):', page)
    assert titles == ["kim", "recorded", "kim", "recorded"]
    with wave.open(str(folder / "report/speech_4.wav")) as file:
        assert file.getnframes() == 6000
    assert [path.name for path in (folder / "report").glob("speech_*.png")] == [
        "speech_1_words_and_characters_that_were_heard_wrong.png"  # one finite similarity is no curve
    ]
    history = read_numbers(folder)["sections"]["speech"]["numbers"]["history"]
    assert [(found["step"], found["wer_pct"]) for found in history] == [(3, 90.0), (7, 75.0)]


@pytest.mark.full
def test_a_page_does_not_grow_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "_MAX_BYTES", 40_000)
    folder = report(tmp_path, Speaking())  # clips of 24 kB
    page = (folder / "report.html").read_text()
    assert page.count("<audio ") == 1
    assert "1 of 2 clips are left out: together they are too long for a page." in page


@pytest.mark.full
def test_without_audio_there_is_text_and_the_setting_that_would_help(tmp_path: Path) -> None:
    page = (report(tmp_path, Speaking(is_evaluated=False)) / "report.html").read_text()
    assert "<audio " not in page
    assert "good morning" in page
    assert "model.speech_eval.codec" in page


@pytest.mark.full
@pytest.mark.parametrize("found", [None, "a report of another kind", SpeechReport()])
def test_nothing_is_said_where_nothing_was(tmp_path: Path, found: Any) -> None:
    module = TinyTask()
    module.report = found
    assert "speech" not in read_numbers(report(tmp_path, module))["sections"]
