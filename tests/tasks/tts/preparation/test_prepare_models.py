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
from lit_fsdp.tasks.tts.codec.formants import SENTENCES, VOICES, synthesize
from lit_fsdp.tasks.tts.codec.loading import load_codec
from lit_fsdp.tasks.tts.families.model_types import load_speech_model
from lit_fsdp.tasks.tts.families.speaker_encoder import compute_mels
from lit_fsdp.tasks.tts.preparation.audio import Limits, read_audio
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
    base: Path, clips: Path, tmp_path: Path, part: str
) -> None:
    prepare(base, clips / "in.jsonl", tmp_path / "out")
    prepare(base, clips / "in.jsonl", tmp_path / "out")
    weights = load_file(base / part)
    save_file(
        {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}, base / part
    )
    with pytest.raises(ValueError, match="holds shards made with another model: its files have changed"):
        prepare(base, clips / "in.jsonl", tmp_path / "out")


def hear(folder: Path, audio: Any) -> str:
    """What Transformers makes of a clip."""
    processor: Any = WhisperProcessor.from_pretrained(folder)
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    inputs = processor(audio, sampling_rate=16000, return_tensors="pt")
    ids = model.generate(inputs.input_features)
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
