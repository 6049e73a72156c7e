"""Preparation with folders like those on the Hub: codec, speaker encoder and transcriber are read from files."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speech_training import save_model
from tiny_whisper import save_whisper
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from lit_fsdp.cli.main import main
from lit_fsdp.tasks.tts.codec.codec_12hz import Codec
from lit_fsdp.tasks.tts.codec.formants import SENTENCES, VOICES, synthesize
from lit_fsdp.tasks.tts.codec.loading import load_codec
from lit_fsdp.tasks.tts.families.model_types import load_speech_model
from lit_fsdp.tasks.tts.families.speaker_encoder import compute_mels
from lit_fsdp.tasks.tts.preparation.audio import Limits, read_audio
from lit_fsdp.tasks.tts.preparation.mapped_rows import map_rows
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow, read_rows
from lit_fsdp.tasks.tts.preparation.preparer import Preparer
from lit_fsdp.tasks.tts.preparation.runners import prepare_shards

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (folder := tmp_path / "base").mkdir()
    return save_model(folder)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    lines = []
    for i, (name, voice) in enumerate(VOICES.items()):
        soundfile.write(folder / f"{i}.wav", synthesize(SENTENCES[i], voice), 24000, subtype="FLOAT")
        lines.append({"audio": f"{i}.wav", "text": SENTENCES[i], "speaker": name, "language": "english"})
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def prepare(model: Path, manifest: Path, out: Path, transcriber: Path | None = None) -> list[PreparedRow]:
    whisper = None if transcriber is None else str(transcriber)
    preparer = Preparer(model=str(model), limits=Limits(), transcriber=whisper)
    prepare_shards(manifest, out, preparer, rows_per_shard=1, show_progress=False)
    return read_rows(out)


def test_codes_and_embeddings_are_those_of_the_models_in_the_folder(base: Path, clips: Path, tmp_path: Path) -> None:
    rows = prepare(base, clips / "in.jsonl", tmp_path / "out")
    model, codec = load_speech_model(base)[2], load_codec(base)
    assert model.speaker_encoder is not None
    assert model.config.speaker_encoder is not None
    for i, row in enumerate(rows):
        audio = torch.from_numpy(read_audio(clips / f"{i}.wav", 24000))
        np.testing.assert_array_equal(row.codes, codec.encode([audio])[0].numpy())
        wanted = model.speaker_encoder(compute_mels(audio[None], model.config.speaker_encoder))[0].detach()
        np.testing.assert_array_equal(row.speaker_embedding, wanted.numpy())
    assert len({row.codes.tobytes() for row in rows}) == 2


def test_of_the_model_nothing_but_its_speaker_encoder_is_read(base: Path, clips: Path, tmp_path: Path) -> None:
    whole = prepare(base, clips / "in.jsonl", tmp_path / "whole")
    shutil.copytree(base, less := tmp_path / "less")
    weights = load_file(base / "model.safetensors")
    save_file({n: t for n, t in weights.items() if n.startswith("speaker_encoder.")}, less / "model.safetensors")
    part = prepare(less, clips / "in.jsonl", tmp_path / "part")
    assert [row.to_plain() for row in part] == [row.to_plain() for row in whole]


def test_a_speaker_encoder_that_lacks_a_tensor_is_refused(base: Path, clips: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    del weights["speaker_encoder.fc.bias"]
    save_file(weights, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"speaker encoder does not fit config.json: .*fc\.bias"):
        prepare(base, clips / "in.jsonl", tmp_path / "out")


@pytest.mark.parametrize("part", ["model.safetensors", "speech_tokenizer/model.safetensors"])
def test_shards_of_a_model_that_has_changed_under_its_name_are_not_mixed(
    base: Path, clips: Path, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(base, clips / "in.jsonl", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    shutil.copytree("base", "copy")  # the same model
    for name in ("base", "copy"):
        assert len(prepare(Path(name), clips / "in.jsonl", tmp_path / "out")) == 2
    weights = load_file(base / part)
    save_file(
        {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}, base / part
    )
    with pytest.raises(ValueError, match="holds shards made with another model: its files have changed"):
        prepare(base, clips / "in.jsonl", tmp_path / "out")
    prepare(tmp_path / "copy", clips / "in.jsonl", tmp_path / "out")
    with pytest.raises(ValueError, match=rf"another model \('{base}'\): expected the same to go on"):
        prepare(Path("base"), clips / "in.jsonl", tmp_path / "out")


def hear(folder: Path, audio: Any) -> str:
    """What Transformers makes of a clip."""
    processor: Any = WhisperProcessor.from_pretrained(folder)
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    inputs = processor(audio, sampling_rate=16000, return_tensors="pt")
    ids = model.generate(inputs.input_features, task="transcribe")
    return str(processor.batch_decode(ids, skip_special_tokens=True)[0]).strip()


def test_a_whisper_model_writes_down_what_has_no_text(
    base: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whisper = save_whisper(tmp_path / "whisper")
    manifest = clips / "untold.jsonl"
    manifest.write_text('{"audio": "0.wav"}\n{"audio": "1.wav", "text": "told"}\n')
    command = ["prepare", "tts", f"--manifest={manifest}", f"--out={tmp_path / 'out'}", f"--model={base}"]
    assert main([*command, f"--transcriber={whisper}", "--device=cpu"]) == 0
    heard, told = read_rows(tmp_path / "out")
    assert told.text == "told"
    assert heard.text == hear(whisper, read_audio(clips / "0.wav", 16000)) != ""
    assert heard.text == prepare(base, manifest, tmp_path / "again", whisper)[0].text
    shutil.copytree(whisper, tmp_path / "copy")
    assert len(prepare(base, manifest, tmp_path / "again", tmp_path / "copy")) == 2
    weights = load_file(whisper / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, whisper / "model.safetensors")
    with pytest.raises(ValueError, match="made with another transcriber: its files have changed"):
        prepare(base, manifest, tmp_path / "again", whisper)
    with pytest.raises(ValueError, match=r"made with another transcriber .*whisper'.: expected the same to go on"):
        prepare(base, manifest, tmp_path / "again")
    capsys.readouterr()
    assert main([*command, f"--transcriber={base}", "--device=cpu"]) != 0
    assert "names 'qwen3_tts': expected a Whisper model" in capsys.readouterr().err


def test_languages_that_the_model_has_not_are_said_before_the_work(
    base: Path, clips: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [json.loads(line) for line in (clips / "in.jsonl").read_text().splitlines()]
    manifest = clips / "klingon.jsonl"
    manifest.write_text("".join(json.dumps({**line, "language": "klingon"}) + "\n" for line in told))
    with pytest.raises(ValueError, match=r"manifest: language: got 'klingon': .* one of .*, on all 2 lines"):
        prepare(base, manifest, tmp_path / "none")
    others = [{**line, "language": name} for line, name in zip(told, ("klingon", "elvish"), strict=True)]
    manifest.write_text("".join(json.dumps(line) + "\n" for line in others))
    with pytest.raises(
        ValueError, match=r"manifest: language: got 'klingon': .*; language: got 'elvish': .*all 2 lines"
    ):
        prepare(base, manifest, tmp_path / "none")
    manifest.write_text("".join(json.dumps(line) + "\n" for line in [*told, {**told[0], "language": "klingon"}]))
    monkeypatch.setattr(Preparer, "_prepare", lambda _, rows: pytest.fail(caplog.text))
    with pytest.raises(pytest.fail.Exception, match=r"manifest: language: got 'klingon': .*: left out: line 3"):
        prepare(base, manifest, tmp_path / "none")  # where the corrected manifest goes on


def speak_clips(folder: Path, count: int) -> list[dict[str, Any]]:
    """Clips of different lengths, and their lines of a manifest."""
    lines = []
    for i in range(count):
        text = " ".join(SENTENCES * 2)[: 9 + 7 * ((i * 3) % count)]
        audio = synthesize(text, list(VOICES.values())[i % 2])
        soundfile.write(folder / f"{i}.wav", audio[: len(audio) - 700 * i], 24000, subtype="FLOAT")
        lines.append({"audio": f"{i}.wav", "text": text})
    return lines


def test_batches_give_the_same_bytes_as_one_by_one(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = speak_clips(tmp_path, 7)
    for i in (1, 2, 4, 5):
        del lines[i]["text"]
    lines[2]["language"] = lines[5]["language"] = "english"
    lines[3] |= {"ref_audio": "0.wav", "ref_text": lines[0]["text"]}
    (manifest := tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    whisper = save_whisper(tmp_path / "whisper")
    weights = load_file(whisper / "model.safetensors")  # as drawn, it hears the same in all clips
    loud = {name: 250 * tensor if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    save_file(loud, whisper / "model.safetensors", metadata={"format": "pt"})
    sizes: list[int] = []
    encode = Codec.encode
    monkeypatch.setattr(Codec, "encode", lambda codec, clips: sizes.append(len(clips)) or encode(codec, clips))
    for batch_size in (1, 3):
        preparer = Preparer(model=str(base), limits=Limits(), transcriber=str(whisper), batch_size=batch_size)
        prepare_shards(manifest, tmp_path / str(batch_size), preparer, show_progress=False)
    assert sizes == [*[1] * 8, 3, 3, 1, 1]
    shards = [(tmp_path / name / "shard-00000.parquet").read_bytes() for name in "13"]
    assert shards[0] == shards[1]
    assert len({row.text for row in read_rows(tmp_path / "3")}) == 7
    assert (tmp_path / "3/rejects.jsonl").read_text() == ""


def test_of_a_batch_that_fails_only_what_is_wrong_is_left_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = speak_clips(tmp_path, 4)
    (manifest := tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    longest, encode = max(soundfile.info(tmp_path / f"{i}.wav").frames for i in range(4)), Codec.encode

    def fail(codec: Codec, clips: Any) -> Any:
        if any(len(clip) == longest for clip in clips):
            raise MemoryError("too much")
        return encode(codec, clips)

    monkeypatch.setattr(Codec, "encode", fail)
    preparer = Preparer(model=str(base), limits=Limits(), batch_size=4)
    done = prepare_shards(manifest, tmp_path / "out", preparer, show_progress=False)
    assert (done.num_rows, done.num_rejected) == (3, 1)
    assert "MemoryError: too much" in (tmp_path / "out/rejects.jsonl").read_text()


def test_what_a_row_goes_on_from_and_how_it_is_said_are_prepared(base: Path, clips: Path, tmp_path: Path) -> None:
    told = {"audio": "0.wav", "text": SENTENCES[0], "instruct": " Whisper. "}
    lines: list[dict[str, Any]] = [{**told, "ref_audio": "1.wav", "ref_text": f" {SENTENCES[1]}"}, told]
    lines += [{**told, "ref_text": "a"}, {**told, "ref_audio": "1.wav", "ref_text": " "}]
    lines += [{**told, "ref_audio": "1.wav", "ref_text": "a" * 200}]
    (manifest := clips / "told.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first, second = prepare(base, manifest, tmp_path / "out")
    reference = torch.from_numpy(read_audio(clips / "1.wav", 24000))
    assert first.ref_codes is not None
    np.testing.assert_array_equal(first.ref_codes, load_codec(base).encode([reference])[0].numpy())
    assert (first.ref_text, first.instruct, second.instruct) == (SENTENCES[1], "Whisper.", "Whisper.")
    assert second.ref_codes is None
    assert second.ref_text == ""
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert reasons[0] == "ref_text: not used without ref_audio, in which it is said"
    assert reasons[1].startswith("ref_text: empty")
    assert reasons[2].startswith("ref_audio: text: too long for its audio")
    mapped = map_rows(str(tmp_path / "out"), tmp_path / "cache")
    assert [row.to_plain() for row in mapped] == [row.to_plain() for row in (first, second)]
