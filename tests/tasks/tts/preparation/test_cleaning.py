"""Recordings that are cut, levelled and left out, and texts that are mended: only where it is asked for."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_whisper import save_whisper

from lit_fsdp.cli.main import main
from lit_fsdp.tasks.tts.codec.formants import VOICES, synthesize
from lit_fsdp.tasks.tts.preparation import cleaning
from lit_fsdp.tasks.tts.preparation.audio import Limits
from lit_fsdp.tasks.tts.preparation.cleaning import Cleaning, join_spans, mark_duplicates
from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow
from lit_fsdp.tasks.tts.preparation.prepared import read_rows
from lit_fsdp.tasks.tts.preparation.preparer import Preparer
from lit_fsdp.tasks.tts.preparation.runners import Prepared, prepare_shards

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

WORDS = "open the door please and come in to see the boat at noon"


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    (path := folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def prepare(manifest: Path, out: Path, cleaning: Cleaning, **options: Any) -> Prepared:
    preparer = Preparer(model="formants", limits=Limits(max_seconds=20), cleaning=cleaning, **options)
    return prepare_shards(manifest, out, preparer, rows_per_shard=1, show_progress=False)


def test_long_recordings_become_pieces_of_speech(tmp_path: Path) -> None:
    pytest.importorskip("silero_vad")
    silence = np.zeros(3 * 24000, dtype=np.float32)
    ada, bruno = (synthesize(WORDS, voice) for voice in VOICES.values())
    long = np.concatenate([silence, ada, silence, bruno, np.zeros(12000, dtype=np.float32), ada, silence])
    soundfile.write(tmp_path / "long.wav", long, 24000)
    soundfile.write(tmp_path / "short.wav", ada, 24000)
    soundfile.write(tmp_path / "silent.wav", np.tile(silence, 6) + 1e-2, 24000)
    lines = [{"audio": "long.wav"}, {"audio": "short.wav"}, {"audio": "silent.wav"}, {"audio": "long.wav", "text": "a"}]
    whisper = save_whisper(tmp_path / "whisper")
    manifest = write(tmp_path, lines)
    options = {"transcriber": str(whisper)}
    done = prepare(manifest, tmp_path / "out", Cleaning(slice_seconds=12), **options)
    rows = read_rows(tmp_path / "out")
    spans = [tuple(map(float, row.audio.partition("#t=")[2].split(","))) for row in rows if "#" in row.audio]
    assert len(spans) == 2  # the last two are near each other
    bounds = [(3, 3 + len(ada) / 24000), (6 + len(ada) / 24000, 6.5 + (2 * len(ada) + len(bruno)) / 24000)]
    for (begin, end), (first, last) in zip(spans, bounds, strict=True):
        assert first - 0.3 < begin < first + 0.3
        assert last - 0.3 < end < last + 0.5
    assert [row.audio for row in rows if "#" not in row.audio] == ["short.wav"]
    for row, (begin, end) in zip(rows, spans, strict=False):
        assert row.seconds == pytest.approx(end - begin, abs=1e-3)
        assert row.text  # of its own
    assert done.cleaned["sliced_files"] == 1
    assert done.cleaned["pieces"] == 2
    assert done.cleaned["left_out_ms"] == pytest.approx(
        1000 * (len(long) / 24000 - sum(e - b for b, e in spans)), abs=2
    )
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert reasons[0].startswith("no speech was found in its 18.00 s")
    assert reasons[1].startswith("too long: 2")  # its text cannot be cut
    assert json.loads((tmp_path / "out/summary.json").read_text())["cleaned"] == done.cleaned
    assert prepare(manifest, tmp_path / "plain", Cleaning(), **options).cleaned == {}


def test_short_pauses_stay_inside_a_piece() -> None:
    spans = [(0.0, 2.0), (2.5, 4.0), (5.5, 6.0), (6.1, 9.0), (9.2, 12.0)]
    assert join_spans(spans, 5.0) == [(0.0, 4.0), (5.5, 9.0), (9.2, 12.0)]
    assert join_spans([], 5.0) == []


def test_clips_get_one_loudness_as_far_as_their_peaks_allow(tmp_path: Path) -> None:
    pyloudnorm = pytest.importorskip("pyloudnorm")
    from lit_fsdp.tasks.tts.preparation.cleaning import Counter

    audio, counts, meter = synthesize(WORDS, VOICES["ada"]), Counter[str](), pyloudnorm.Meter(24000)
    for gain in (0.05, 0.9):
        leveled = Cleaning(loudness_lufs=-23).level(audio * np.float32(gain), 24000, counts)
        assert leveled.dtype == np.float32
        assert meter.integrated_loudness(leveled) == pytest.approx(-23, abs=0.01)
    loud = Cleaning(loudness_lufs=-6).level(audio, 24000, counts)
    assert np.abs(loud).max() == pytest.approx(10 ** (-1 / 20), abs=1e-6)
    assert counts == {"leveled_clips": 3, "leveled_clips_below_loudness": 1}
    soundfile.write(tmp_path / "soft.wav", audio * 0.1, 24000, subtype="FLOAT")
    soundfile.write(tmp_path / "loud.wav", audio, 24000, subtype="FLOAT")
    manifest = write(tmp_path, [{"audio": f"{name}.wav", "text": WORDS} for name in ("soft", "loud")])
    prepare(manifest, tmp_path / "out", Cleaning(loudness_lufs=-23))
    soft, loud = read_rows(tmp_path / "out")
    np.testing.assert_allclose(soft.speaker_embedding, loud.speaker_embedding, atol=1e-4)
    prepare(manifest, tmp_path / "plain", Cleaning())
    soft, loud = read_rows(tmp_path / "plain")
    assert not np.allclose(soft.speaker_embedding, loud.speaker_embedding, atol=1e-4)


def test_texts_are_mended_and_keep_what_is_right(tmp_path: Path) -> None:
    pytest.importorskip("ftfy")
    soundfile.write(tmp_path / "a.wav", synthesize(WORDS, VOICES["ada"]), 24000)
    texts = {
        "donâ€™t  say\tâ€œnoâ€\x9d": 'don\'t say "no"',
        "a \ufb01sh &amp; a bird\u0007": "a fish & a bird",
        "\u4f60\u597d\uff0c2026\u3002": "\u4f60\u597d\uff0c2026\u3002",
        "plain": "plain",
    }
    manifest = write(tmp_path, [{"audio": "a.wav", "text": text} for text in texts])
    done = prepare(manifest, tmp_path / "out", Cleaning(fix_text=True))
    assert [row.text for row in read_rows(tmp_path / "out")] == list(texts.values())
    assert done.cleaned == {"fixed_texts": 2}


def test_the_same_file_again_is_left_out_until_one_is_another(tmp_path: Path) -> None:
    ada, bruno = (synthesize(WORDS[:20], voice) for voice in VOICES.values())
    for name, audio in (("a", ada), ("b", bruno)):
        soundfile.write(tmp_path / f"{name}.wav", audio, 24000)
    shutil.copy(tmp_path / "a.wav", tmp_path / "copy.wav")
    names = ["a.wav", "b.wav", "copy.wav", "lost.wav", "a.wav"]
    manifest = write(tmp_path, [{"audio": name, "text": "open"} for name in names])
    done = prepare(manifest, tmp_path / "out", Cleaning(drop_duplicates=True))
    assert (done.num_rows, done.cleaned) == (2, {"duplicates": 2})
    found = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in found if row["line"] != 4] == [
        (3, "duplicate: the same audio as line 1"),
        (5, "duplicate: the same audio as line 1"),
    ]
    assert prepare(manifest, tmp_path / "out", Cleaning(drop_duplicates=True)).num_resumed == 5
    shutil.copy(tmp_path / "b.wav", tmp_path / "a.wav")  # now line 3 is the first of its kind
    done = prepare(manifest, tmp_path / "out", Cleaning(drop_duplicates=True))
    assert [row.audio for row in read_rows(tmp_path / "out")] == ["a.wav", "copy.wav"]
    assert prepare(manifest, tmp_path / "plain", Cleaning()).num_rows == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cleaning.slice_seconds=40"], "slice_seconds: got 40: expected 1 to limits.max_seconds, 30"),
        (["--cleaning.slice_seconds=12"], "nothing writes down what is said in the pieces; set transcriber"),
        (["--cleaning.loudness_lufs=3"], "loudness_lufs: got 3: expected above -70, up to -5"),
        (["--batch_size=0"], "batch_size: got 0: expected 1 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    manifest = write(tmp_path, [{"audio": "a.wav", "text": "a"}])
    command = ["prepare", "tts", f"--manifest={manifest}", f"--out={tmp_path / 'out'}", "--model=formants"]
    assert main([*command, *options]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_fsdp.tasks.tts.preparation import cleaning

    monkeypatch.setattr(cleaning, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs a package: ftfy; pip install 'lit_fsdp\[speech-cleaning\]'"):
        Cleaning(fix_text=True).check(max_seconds=30, has_transcriber=False)
    Cleaning().check(max_seconds=30, has_transcriber=False)


def test_a_file_that_cannot_be_read_stops_no_search_for_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"same")
    hash_file = cleaning.hash_file

    def refuse(path: Path) -> str:
        if path.name == "a":
            raise ValueError(f"{path}: cannot be read: Permission denied")
        return hash_file(path)

    monkeypatch.setattr(cleaning, "hash_file", refuse)
    rows = mark_duplicates([ManifestRow(line=i, audio=name, folder=tmp_path) for i, name in enumerate("abc")])
    assert [row.problem for row in rows] == [None, None, "duplicate: the same audio as line 1"]
