"""From audio files to rows: the same in any grouping, never stopped by one bad file, resumed where it was."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from multiprocessing import Value, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_disk import small_disk
from waiting import wait_until

from lit_fsdp.cli.main import main
from lit_fsdp.export.out_folder import lock_out
from lit_fsdp.tasks.tts.codec.formants import SENTENCES, VOICES, build_small_codec, synthesize
from lit_fsdp.tasks.tts.preparation import runners
from lit_fsdp.tasks.tts.preparation.audio import AudioError, Limits, check_text, read_audio
from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow
from lit_fsdp.tasks.tts.preparation.prepared import average_speakers, read_rows
from lit_fsdp.tasks.tts.preparation.preparer import Preparer
from lit_fsdp.tasks.tts.preparation.runners import Prepared, prepare_shards

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

PREPARER = Preparer(model="formants", limits=Limits())


def speak(place: int) -> Any:
    name = list(VOICES)[place % 2]
    return synthesize(SENTENCES[place % len(SENTENCES)], VOICES[name])


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good clips in several formats, and a manifest of them."""
    folder = tmp_path_factory.mktemp("clips")
    lines = []
    for i, (ending, rate) in enumerate(
        (("wav", 24000), ("flac", 24000), ("wav", 48000), ("mp3", 44100), ("ogg", 24000))
    ):
        audio = speak(i)
        if rate != 24000:
            import soxr

            audio = soxr.resample(audio, 24000, rate)
        stereo = np.stack([audio, audio], axis=1) if i == 2 else audio
        soundfile.write(folder / f"{i}.{ending}", stereo, rate)
        name = ("Ada", "Bruno", " Ada\t", "Bruno", "ADA\u00a0")[i]
        lines.append({"audio": f"{i}.{ending}", "text": SENTENCES[i % 4], "speaker": name})
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def prepare(manifest: Path, out: Path, **options: Any) -> Prepared:
    settings: dict[str, Any] = {"rows_per_shard": 2, "show_progress": False}
    return prepare_shards(manifest, out, PREPARER, **{**settings, **options})


def test_files_of_all_formats_become_rows(clips: Path, tmp_path: Path) -> None:
    done = prepare(clips / "in.jsonl", tmp_path)
    assert (done.num_rows, done.num_rejected) == (5, 0)
    rows = read_rows(tmp_path)
    assert [row.audio for row in rows] == ["0.wav", "1.flac", "2.wav", "3.mp3", "4.ogg"]
    assert [row.speaker for row in rows] == ["ada", "bruno", "ada", "bruno", "ada"]  # whatever is around a name
    audio = read_audio(clips / "1.flac", 24000)
    (codes,) = build_small_codec().encode([torch.from_numpy(audio)])
    np.testing.assert_array_equal(rows[1].codes, codes.numpy())
    assert all(len(row.codes) == -(-round(row.seconds * 24000) // 1920) for row in rows)
    assert len(rows[0].speaker_embedding) == 128


def test_resampled_stereo_is_the_same_sound(clips: Path) -> None:
    own, wanted = read_audio(clips / "2.wav", 24000), speak(2)
    assert abs(len(own) - len(wanted)) <= 1
    own, wanted = own[:20000], wanted[:20000]
    assert np.corrcoef(own, wanted)[0, 1] > 0.999


@pytest.mark.parametrize("shard_format", ["parquet", "jsonl"])
def test_any_grouping_gives_the_same_rows(clips: Path, tmp_path: Path, shard_format: str) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    prepare(clips / "in.jsonl", whole, rows_per_shard=100, shard_format=shard_format)
    prepare(clips / "in.jsonl", split, rows_per_shard=1, shard_format=shard_format)
    pairs = zip(read_rows(whole), read_rows(split), strict=True)
    assert all(a.to_plain() == b.to_plain() for a, b in pairs)


@pytest.mark.slow
def test_processes_side_by_side_write_the_same_bytes(clips: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        prepare(clips / "in.jsonl", tmp_path / str(count), num_processes=count)
    for path in sorted((tmp_path / "1").glob("shard-*")):
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


@pytest.mark.slow
def test_workers_of_ray_write_the_same_bytes(clips: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    prepare(clips / "in.jsonl", tmp_path / "local")
    done = prepare(clips / "in.jsonl", tmp_path / "ray", num_processes=2, ray_address="local")
    assert done.num_rows == 5
    shards = sorted((tmp_path / "local").glob("shard-*"))
    assert len(shards) == 3
    for path in shards:
        assert path.read_bytes() == (tmp_path / "ray" / path.name).read_bytes()


def test_bad_files_are_rejected_with_the_reason_and_stop_nothing(clips: Path, tmp_path: Path) -> None:
    good = speak(0)
    soundfile.write(tmp_path / "good.wav", good, 24000)
    soundfile.write(tmp_path / "short.wav", good[:2400], 24000)
    soundfile.write(tmp_path / "long.wav", np.tile(good, 40), 24000)
    soundfile.write(tmp_path / "silent.wav", good * 1e-4, 24000)
    soundfile.write(tmp_path / "clipped.wav", np.clip(good * 9, -1, 1), 24000)
    (tmp_path / "text.wav").write_text("no audio")
    lines: list[Any] = [
        {"audio": "good.wav", "text": "hello"},
        {"audio": "missing.wav", "text": "hello"},
        {"audio": "short.wav", "text": "hello"},
        {"audio": "long.wav", "text": "hello"},
        {"audio": "silent.wav", "text": "hello"},
        {"audio": "clipped.wav", "text": "hello"},
        {"audio": "text.wav", "text": "hello"},
        {"audio": "good.wav", "text": "  "},
        {"audio": "good.wav"},
        {"audio": "good.wav", "text": 7},
        {"text": "hello"},
        {"audio": 5, "text": "hello"},
        {"audio": "good.wav", "text": "hello", "ref_audio": "short.wav"},
        {"audio": "good.wav", "text": "...!"},
        {"audio": "good.wav", "text": "hello<|im_end|>"},
        {"audio": "good.wav", "text": "hello", "instruct": "<tts_pad>"},
        {"audio": "good.wav", "text": "hello", "ref_audio": "good.wav", "ref_text": "<|endoftext|> so"},
    ]
    manifest = tmp_path / "in.jsonl"
    manifest.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "{broken\n")
    done = prepare(manifest, tmp_path / "out")
    assert (done.num_rows, done.num_rejected) == (1, 17)
    found = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    reasons = [
        *("no such file", "too short: 0.10 s, at least 0.4 s", "too long: 42.", "silence: peak -81 dB", "clipped: "),
        *("cannot be read", "text: empty", "text: missing, and no transcriber", "text: expected text"),
        *("audio: missing", "audio: got 5: expected the path", "ref_audio: too short"),
        *("text: got '...!': no letter or number in it", "text: '<|im_end|>' in it is a control token"),
        *("instruct: '<tts_pad>' in it is", "ref_text: '<|endoftext|>' in it is", "not valid JSON"),
    ]
    assert [row["line"] for row in found] == list(range(2, 19))
    for row, reason in zip(found, reasons, strict=True):
        assert row["reason"].startswith(reason), row


def test_audio_that_was_replaced_is_prepared_again_and_named(
    clips: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for clip in clips.iterdir():
        shutil.copy(clip, tmp_path)
    manifest, out = tmp_path / "in.jsonl", tmp_path / "out"
    (tmp_path / "4.ogg").rename(tmp_path / "later.ogg")
    assert prepare(manifest, out).num_rejected == 1
    assert prepare(manifest, out).num_resumed == 3
    before = read_rows(out)
    times = (tmp_path / "2.wav").stat()
    shutil.copy(tmp_path / "2.wav", tmp_path / "copy.wav")
    (tmp_path / "copy.wav").replace(tmp_path / "2.wav")  # the same again
    (tmp_path / "3.mp3").unlink()  # no longer needed
    assert prepare(manifest, out).num_resumed == 3

    samples, rate = soundfile.read(tmp_path / "0.wav")
    soundfile.write(tmp_path / "0.wav", samples[::-1], rate)
    os.utime(tmp_path / "0.wav", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "later.ogg").rename(tmp_path / "4.ogg")
    done = prepare(manifest, out)
    assert (done.num_rows, done.num_rejected, done.num_resumed) == (5, 0, 1)
    after = read_rows(out)
    assert not np.array_equal(after[0].codes, before[0].codes)
    assert [row.to_plain() for row in after[1:4]] == [row.to_plain() for row in before[1:4]]
    assert caplog.messages == [
        "shard-00000.parquet is made again: changed since it was prepared: 0.wav",
        "shard-00002.parquet is made again: changed since it was prepared: 4.ogg",
    ]


def test_of_two_that_prepare_into_one_folder_the_later_is_refused(clips: Path, tmp_path: Path) -> None:
    with lock_out(tmp_path, tmp_path / ".prepare.lock"), pytest.raises(ValueError, match="another process"):
        prepare(clips / "in.jsonl", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_clip_that_fails_in_a_way_nobody_foresaw_is_rejected_too(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lit_fsdp.tasks.tts.preparation import preparer as preparing

    def load(name: str, device: str) -> Any:
        def transcribe(audio: Any, rate: int, languages: Any) -> list[str]:
            raise ValueError(f"Unsupported language: {languages[0]}")

        return transcribe

    monkeypatch.setattr(preparing, "load_transcriber", load)
    monkeypatch.setattr(Preparer, "describe_models", lambda _: {})
    manifest = [
        {"audio": f"{'a' * 300}.wav", "text": "a name that no file system has"},
        {"audio": str(clips / "0.wav"), "language": "sichuan_dialect"},
        {"audio": str(clips / "0.wav"), "text": "good"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in manifest))
    preparer = Preparer(model="formants", limits=Limits(), transcriber="some-whisper")
    done = prepare_shards(tmp_path / "in.jsonl", tmp_path / "out", preparer, rows_per_shard=3, show_progress=False)
    assert (done.num_rows, done.num_rejected) == (1, 2)
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert "File name too long" in reasons[0]
    assert reasons[1] == "ValueError: Unsupported language: sichuan_dialect"


@pytest.mark.parametrize("line", ["[" * 100_000, '{"audio": "0.wav", "text": "a\\ud800"}', f'{{"a": {"1" * 5000}}}'])
def test_a_line_that_python_cannot_hold_stops_nothing(clips: Path, tmp_path: Path, line: str) -> None:
    good = json.dumps({"audio": str(clips / "0.wav"), "text": "good"})
    (tmp_path / "in.jsonl").write_text(f"{line}\n{good}\n")
    done = prepare(tmp_path / "in.jsonl", tmp_path / "out")
    assert (done.num_rows, done.num_rejected) == (1, 1)
    assert '"reason": "not valid JSON: ' in (tmp_path / "out" / "rejects.jsonl").read_text()


def test_a_manifest_may_hold_breaks_of_other_kinds(clips: Path, tmp_path: Path) -> None:
    line = json.dumps({"audio": str(clips / "0.wav"), "text": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "in.jsonl").write_text(f"\ufeff{line}\r\n", encoding="utf-8")
    prepare(tmp_path / "in.jsonl", tmp_path / "out")
    assert [row.text for row in read_rows(tmp_path / "out")] == ["a\u2028b"]


def test_a_file_of_hours_is_rejected_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(40 * 8000, dtype=np.int16), 8000)
    monkeypatch.setattr(soundfile, "read", lambda *_, **__: pytest.fail("read all of it"))
    (tmp_path / "in.jsonl").write_text('{"audio": "long.wav", "text": "a"}\n')
    prepare(tmp_path / "in.jsonl", tmp_path / "out")
    (found,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(found)["reason"] == "too long: 40.00 s, at most 30 s"


def test_a_missing_package_stops_the_run_and_rejects_nothing(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ValueError, match=r"reading audio needs a package: soxr; pip install"):
        prepare(clips / "in.jsonl", tmp_path)
    assert not list(tmp_path.glob(".shard-*"))


def test_an_interrupted_run_goes_on_where_it_was(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StopError(Exception):
        pass

    made: list[Path] = []
    real = runners.prepare_shard

    def stop_at_the_second(preparer: Preparer, rows: Any, path: Path) -> int:
        if made:
            (path.parent / f"{path.name}.0123abcd.part").write_bytes(b"half a shard")  # as open_whole calls it
            raise StopError
        made.append(path)
        return real(preparer, rows, path)

    monkeypatch.setattr(runners, "prepare_shard", stop_at_the_second)
    with pytest.raises(StopError):
        prepare(clips / "in.jsonl", tmp_path)
    monkeypatch.setattr(runners, "prepare_shard", real)
    before = made[0].stat().st_mtime_ns
    done = prepare(clips / "in.jsonl", tmp_path)
    assert (done.num_rows, done.num_resumed) == (5, 1)
    assert made[0].stat().st_mtime_ns == before
    assert len(read_rows(tmp_path)) == 5
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("summary.json", "was not prepared to the end; start the same"),
        ("shard-00001.parquet", "has 3 rows of 5 that were prepared; start the same"),
    ],
)
def test_a_folder_that_was_not_prepared_to_the_end_is_not_trained_on(
    clips: Path, tmp_path: Path, lost: str, message: str
) -> None:
    prepare(clips / "in.jsonl", tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path)
    prepare(clips / "in.jsonl", tmp_path)
    assert len(read_rows(tmp_path)) == 5


def test_a_name_that_promises_samples_without_a_header_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_bytes(bytes(4800))
    with pytest.raises(AudioError, match=r"^cannot be read: samplerate must be specified"):
        read_audio(tmp_path / "a.raw", 24000)


@pytest.mark.parametrize("ending", ["wav", "mp3", "flac", "ogg"])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_file_that_was_cut_is_rejected(tmp_path: Path, ending: str, share: float) -> None:
    path = tmp_path / f"a.{ending}"
    soundfile.write(path, np.tile(speak(0), 3), 24000)
    assert len(read_audio(path, 24000)) == 3 * len(speak(0))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(AudioError, match=r"cut short|cannot be read"):
        read_audio(path, 24000)


def test_a_wav_file_that_was_written_to_a_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, speak(0), 24000)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 4 + whole[8:40] + b"\xff" * 4 + whole[44:])
    assert len(read_audio(path, 24000)) == len(speak(0))


@pytest.mark.parametrize("damage", ["lost", "cut", "changed", "summary cut"])
def test_a_shard_that_is_not_whole_is_made_again(clips: Path, tmp_path: Path, damage: str) -> None:
    prepare(clips / "in.jsonl", tmp_path, shard_format="jsonl")
    shard = tmp_path / "shard-00001.jsonl"
    whole = shard.read_bytes()
    if damage == "lost":
        shard.unlink()
    elif damage == "summary cut":
        (tmp_path / ".shard-00001.json").write_text('{"num_ro')
    else:
        shard.write_bytes(whole[:-9] if damage == "cut" else whole.replace(b"1", b"2"))
    done = prepare(clips / "in.jsonl", tmp_path, shard_format="jsonl")
    assert (done.num_rows, done.num_resumed) == (5, 2)
    assert shard.read_bytes() == whole


def test_a_shard_without_good_rows_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"audio": "none.wav", "text": "a"}\n')
    assert prepare(tmp_path / "in.jsonl", tmp_path / "out").num_resumed == 0
    assert prepare(tmp_path / "in.jsonl", tmp_path / "out").num_resumed == 1


def test_a_manifest_may_be_named_in_another_way_to_go_on(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(clips)
    lines = (clips / "in.jsonl").read_text()
    (clips / "named.jsonl").write_text(f"{lines}{{broken\n")  # of that line there is no folder
    monkeypatch.chdir(clips)
    prepare(Path("named.jsonl"), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    for path in (clips, tmp_path / "link", Path("link"), Path(os.path.relpath(clips, tmp_path))):
        assert prepare(path / "named.jsonl", tmp_path / "out").num_resumed == 3
    shutil.copytree(clips, tmp_path / "copy")  # whose audio may be another's
    with pytest.raises(ValueError, match="made with another manifest: its lines or its folder have changed"):
        prepare(tmp_path / "copy" / "named.jsonl", tmp_path / "out")
    (clips / "named.jsonl").write_text(lines)
    with pytest.raises(ValueError, match="made with another manifest: its lines or its folder have changed"):
        prepare(clips / "named.jsonl", tmp_path / "out")


def test_shards_of_other_settings_are_not_mixed(clips: Path, tmp_path: Path) -> None:
    prepare(clips / "in.jsonl", tmp_path)
    with pytest.raises(ValueError, match="holds shards made with another rows_per_shard"):
        prepare(clips / "in.jsonl", tmp_path, rows_per_shard=3)
    other = Preparer(model="formants", limits=Limits(min_seconds=0.5))
    with pytest.raises(ValueError, match=r"made with another limits\.min_seconds 0\.4: expected the same to go on"):
        prepare_shards(clips / "in.jsonl", tmp_path, other, rows_per_shard=2)
    plan = json.loads((tmp_path / ".prepare.json").read_text())
    del plan["limits"]["max_letters_per_s"]
    (tmp_path / ".prepare.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"another limits\.max_letters_per_s: an earlier release began it: expected"):
        prepare(clips / "in.jsonl", tmp_path)
    (tmp_path / ".prepare.json").write_text('{"man')
    with pytest.raises(ValueError, match=r"out: .*prepare.json is damaged"):
        prepare(clips / "in.jsonl", tmp_path)
    with pytest.raises(ValueError, match=r"out: .* is a file"):
        prepare(clips / "in.jsonl", tmp_path / "summary.json")


def test_clips_without_text_are_transcribed(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_fsdp.tasks.tts.preparation import preparer as preparing

    heard: list[tuple[int, int, str]] = []

    def load(name: str, device: str) -> Any:
        assert name == "some-whisper"

        def transcribe(audio: Any, rate: int, languages: Any) -> list[str]:
            heard.append((len(audio), rate, languages[0]))
            return [" heard "]

        return transcribe

    monkeypatch.setattr(preparing, "load_transcriber", load)
    monkeypatch.setattr(Preparer, "describe_models", lambda _: {})
    manifest = clips / "untold.jsonl"
    manifest.write_text('{"audio": "0.wav", "language": "english"}\n{"audio": "1.flac", "text": "told"}\n')
    preparer = Preparer(model="formants", limits=Limits(), transcriber="some-whisper")
    prepare_shards(manifest, tmp_path, preparer, show_progress=False)
    assert [row.text for row in read_rows(tmp_path)] == ["heard", "told"]
    assert heard == [(1, 24000, "english")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "audio_codes": [[1, 2], [3]]}', r"line 2: audio_codes: got frames of \[1, 2\] codes"),
        ('{"text": "a", "audio_codes": [1, 2]}', "line 2: audio_codes: got 1 dimensions"),
        ('{"text": "a", "audio_codes": [[1.5]]}', "line 2: audio_codes: got 2 dimensions of float64"),
        ('{"text": "a", "audio_codes": [["x"]]}', "line 2: audio_codes: got 2 dimensions of <U1"),
        ('{"text": "a", "audio_codes": [[1]], "speaker_embedding": [[1], [1, 2]]}', "line 2: speaker_embedding"),
        ('{"text": "a", "audio_codes": [[1]], "speaker": 7}', "line 2: speaker: got 7: expected text"),
        ('{"text": "a", "audio_co', "line 2: not valid JSON: Invalid control"),
        ("[" * 100_000, "line 2: not valid JSON: nested too deeply"),
        ("[1]", "line 2: must be an object"),
        ("caf\udce9", r"line 2: not UTF-8 \(byte 0xe9 at column 4\)"),
        ('{"text": "a", "audio_codes": [[1, 2]], "seconds": "abc"}', "line 2: seconds: got 'abc': expected a number"),
        ('{"text": "a", "audio_codes": [[1, 2]], "seconds": NaN}', "line 2: seconds: got nan: expected a number"),
        (
            '{"text": "a", "audio_codes": [[1, 2]], "seconds": -1}',
            "line 2: seconds: got -1: expected a number, 0 or more",
        ),
        (
            '{"text": "a", "audio_codes": [[1, 2]], "ref_text": "b", "ref_codes": [[1]]}',
            "line 2: ref_codes: got 1 codebooks, audio_codes has 2: expected as many",
        ),
        ('{"text": "a", "audio_codes": [[1]]}', "line 2: has 1 codebooks, .*mine.jsonl line 1 has 2: expected as many"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    good = '{"text": "a\u2028b", "audio_codes": [[1, 2]], "speaker_embedding": [1.0, 2.0]}'
    (tmp_path / "mine.jsonl").write_bytes(f"{good}\n{text}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"mine.jsonl {message}"):
        read_rows(tmp_path)


def test_names_in_rows_of_your_own_have_no_white_space_around_them(tmp_path: Path) -> None:
    names = ["Kim ", "kim", " ", None]
    rows = [{"text": "a", "audio_codes": [[1]], "speaker": name, "language": name} for name in names]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = read_rows(tmp_path)
    assert [row.speaker for row in found] == ["kim", "kim", "default", "default"]
    assert [row.language for row in found] == ["Kim", "kim", "auto", "auto"]


def test_embeddings_have_one_size_where_they_are_used(tmp_path: Path) -> None:
    rows = [{"text": "a", "audio_codes": [[1, 2]], "speaker_embedding": size * [1.0]} for size in (0, 2, 1)]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = read_rows(tmp_path)
    with pytest.raises(ValueError, match=r"line 3: has 1 numbers in speaker_embedding, \S+ line 2 has 2: expected as"):
        average_speakers(found)


def test_a_damaged_shard_of_parquet_is_named(clips: Path, tmp_path: Path) -> None:
    prepare(clips / "in.jsonl", tmp_path)
    shard = tmp_path / "shard-00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"shard-00001.parquet: not readable as Parquet"):
        read_rows(tmp_path)
    shard.write_bytes(whole[:40] + bytes(byte ^ 1 for byte in whole[40:60]) + whole[60:])  # a page, not the footer
    with pytest.raises(ValueError, match=r"shard-00001.parquet: not readable as Parquet"):
        read_rows(tmp_path)
    shard.unlink()
    shard.symlink_to("gone.parquet")
    with pytest.raises(ValueError, match=r"shard-00001.parquet: is a link to gone.parquet, which is not there"):
        read_rows(tmp_path)


@pytest.mark.parametrize("shard_format", ["parquet", "jsonl"])
def test_a_disk_that_fills_up_is_one_line_and_leaves_whole_files_only(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shard_format: str
) -> None:
    out = tmp_path / "out"
    command = ["prepare", "tts", f"--manifest={clips / 'in.jsonl'}", f"--out={out}", "--model=formants"]
    command += [f"--format={shard_format}", "--rows_per_shard=2"]
    with small_disk(2_000):
        assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: out: {out}: File too large: free some, or choose another disk"
    assert {path.name for path in out.iterdir()} == {".prepare.json"}
    assert main(command) == 0
    assert len(read_rows(out)) == 5


def test_the_command_prepares_and_says_so(clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", "tts", f"--manifest={clips / 'in.jsonl'}", f"--out={tmp_path / 'out'}", "--model=formants"]
    assert main([*command, "--format=jsonl"]) == 0
    printed = capsys.readouterr()
    assert "rows      5, 0.00" in printed.out
    assert "preparing" not in printed.err  # a bar is for terminals
    assert main(["prepare", "images"]) == 2
    assert "expected `prepare tts`" in capsys.readouterr().err
    lost = [word.replace("in.jsonl", "lost.jsonl") for word in command if not word.startswith("--model")]
    assert main([*lost, "--model=some/model-that-would-be-downloaded"]) != 0
    assert "lost.jsonl: cannot be read" in capsys.readouterr().err
    assert main([*command, "--limits.min_seconds=50"]) != 0
    assert "limits: got min_seconds 50, max_seconds 30" in capsys.readouterr().err


def hold(ready: Any) -> None:
    ready.set()
    time.sleep(600)


def lead(ready: Any, pid: Any) -> None:
    """Start a process as the pool does, and wait for it."""
    worker = get_context("fork").Process(target=work, args=(ready,), daemon=False)
    worker.start()
    pid.value = worker.pid
    worker.join()


def work(ready: Any) -> None:
    runners.begin_worker(Value("i", 0))  # what each worker of the pool begins with
    hold(ready)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(number: int) -> None:
    context = get_context("fork")
    ready, pid = context.Event(), context.Value("i", 0)
    parent = context.Process(target=lead, args=(ready, pid))
    parent.start()
    assert ready.wait(60)
    assert is_alive(pid.value)
    os.kill(parent.pid, number)
    parent.join()
    wait_until(lambda: not is_alive(pid.value), 10)


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def end_by_force(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_line_and_the_next_command_goes_on(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", "tts", f"--manifest={clips / 'in.jsonl'}", f"--out={tmp_path}", "--model=formants"]
    command.append("--rows_per_shard=2")
    with monkeypatch.context() as patch:
        patch.setattr(runners, "get_context", lambda _: get_context("fork"))
        patch.setattr(runners, "prepare_shard", end_by_force)
        assert main([*command, "--num_processes=2"]) == 1
    error = "a process was killed, perhaps for lack of memory: set it lower, and start the command again to go on"
    assert capsys.readouterr().err.splitlines() == [f"error: num_processes: got 2: {error}"]
    assert main(command) == 0
    assert len(read_rows(tmp_path)) == 5


@pytest.mark.slow
def test_a_killed_command_leaves_no_process_and_goes_on_where_it_was(clips: Path, tmp_path: Path) -> None:
    lines = (clips / "in.jsonl").read_text() * 60
    (manifest := clips / "many.jsonl").write_text(lines)
    prepare(manifest, tmp_path / "whole", rows_per_shard=5)
    command = [
        sys.executable,
        "-m",
        "lit_fsdp",
        "prepare",
        "tts",
        f"--manifest={manifest}",
        f"--out={tmp_path / 'out'}",
    ]
    command += ["--model=formants", "--rows_per_shard=5", "--num_processes=2"]
    with subprocess.Popen(command) as process:
        wait_until(lambda: len([*(tmp_path / "out").glob("shard-*")]) >= 3, 300)
        children = list_children(process.pid)
        process.kill()
    assert len(children) >= 2
    wait_until(lambda: not any(map(is_alive, children)), 10)
    done = len([*(tmp_path / "out").glob(".shard-*.json")])
    assert 0 < done < 60
    again = prepare(manifest, tmp_path / "out", rows_per_shard=5)
    assert (again.num_rows, again.num_resumed) == (300, done)
    for path in (tmp_path / "whole").glob("shard-*"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.parametrize("damage", ["data", "both", "pipe"])
def test_a_wav_file_is_as_long_as_its_own_sizes_say(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, speak(0), 24000)
    whole = path.read_bytes()
    cut = whole[: len(whole) // 2]
    sizes = {"data": len(cut) - 8, "both": len(whole) - 8, "pipe": 0xFFFFFFFF}
    path.write_bytes(cut[:4] + struct.pack("<I", sizes[damage]) + cut[8:])
    with pytest.raises(AudioError, match=f"cut short: {len(cut)} bytes of {len(whole)} are there"):
        read_audio(path, 24000)


@pytest.mark.parametrize("kind", ["RF64", "WAVEX"])
def test_wav_files_of_other_kinds_are_read_and_refused_when_cut(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, speak(0), 24000, format=kind)
    assert len(read_audio(path, 24000)) == len(speak(0))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(AudioError, match=r"cut short|cannot be read"):
        read_audio(path, 24000)


@pytest.mark.parametrize(
    ("text", "seconds", "message"),
    [
        ("the quick brown fox jumps over the lazy dog", 2.5, None),
        ("the quick brown fox jumps over the lazy dog", 1.0, "text: too long for its audio: 35.0 letters a second"),
        ("敏捷的棕色狐狸跳过了懒狗", 2.0, None),
        ("敏捷的棕色狐狸跳过了懒狗", 1.0, "text: too long"),
        ("다람쥐 헌 쳇바퀴에 타고파", 1.5, None),
        ("다람쥐 헌 쳇바퀴에 타고파", 0.9, "text: too long"),
        ("いろはにほへとちりぬるを", 1.2, None),
        ("いろはにほへとちりぬるを", 0.8, "text: too long"),
        ("नमस्ते दुनिया", 0.8, None),
        ("Hi!", 8.0, None),
        ("7", 8.0, None),
        ("...!", 2.0, r"text: got '\.\.\.!': no letter or number in it: expected what is said"),
        ("\u200b", 2.0, r"text: got '\\u200b': no letter"),
        ("\x07\x1b", 2.0, "no letter or number in it"),
        ("- – ♪", 20.0, "no letter or number in it"),
        ("Hi!", 11.0, r"text: too short for its audio: 0.2 letters a second \(3 characters in 11.00 s\), at least 0.5"),
        ("1 234 567", 20.0, None),
        ("0049 170 1234567", 1.5, "text: too long for its audio: 28.0 letters a second"),
    ],
)
def test_a_text_is_as_long_as_its_audio(text: str, seconds: float, message: str | None) -> None:
    if message is None:
        check_text(text, seconds, Limits())
        return
    with pytest.raises(AudioError, match=message):
        check_text(text, seconds, Limits())


def test_a_cut_file_that_says_nothing_of_it_is_rejected_by_its_text(tmp_path: Path) -> None:
    words = "open the door and let the seven stones roll"
    audio = synthesize(words, VOICES["ada"])
    soundfile.write(tmp_path / "whole.mp3", audio, 24000)
    soundfile.write(tmp_path / "cut.wav", audio[: len(audio) // 3], 24000)  # sizes and all are right
    mp3 = (tmp_path / "whole.mp3").read_bytes()
    plain = mp3[mp3.index(mp3[:2], 2) :]  # without the first frame, which says how many there are
    (tmp_path / "plain.mp3").write_bytes(plain)
    (tmp_path / "cut.mp3").write_bytes(plain[: len(plain) // 3])
    lines = [{"audio": name, "text": words} for name in ("whole.mp3", "plain.mp3", "cut.wav", "cut.mp3")]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = prepare(tmp_path / "in.jsonl", tmp_path / "out")
    assert (done.num_rows, done.num_rejected) == (2, 2)
    found = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [row["audio"] for row in found] == ["cut.wav", "cut.mp3"]
    assert all(row["reason"].startswith("text: too long for its audio: ") for row in found)


def fail_first(_: Preparer, rows: list[ManifestRow], path: Path) -> int:
    if rows[0].line == 1:
        raise RuntimeError("the first shard")
    time.sleep(0.1)
    path.with_suffix(".done").touch()
    return len(rows)


def test_an_error_of_one_process_does_not_wait_for_all_shards(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "get_context", lambda _: get_context("fork"))
    monkeypatch.setattr(runners, "prepare_shard", fail_first)
    (tmp_path / "in.jsonl").write_text(f'{{"audio": "{clips / "0.wav"}", "text": "open"}}\n' * 30)
    with pytest.raises(RuntimeError, match="the first shard"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out", rows_per_shard=1, num_processes=2)
    assert len(list((tmp_path / "out").glob("*.done"))) < 15


def refuse_lines(_: Preparer, rows: list[ManifestRow], __: Path) -> int:
    raise ValueError(f"{len(rows)} lines came to a process")


def test_processes_for_the_cpu_leave_gpus_alone(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "get_context", lambda _: get_context("fork"))
    monkeypatch.setattr(runners, "prepare_shard", refuse_lines)
    monkeypatch.setattr(runners.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(runners.torch.cuda, "set_device", end_by_force)
    with pytest.raises(ValueError, match="lines came to a process"):
        prepare(clips / "in.jsonl", tmp_path, num_processes=2)
