"""From a sharded checkpoint to speech: by command, by exported folder, and by the official package."""

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from speech_training import build_data, build_task, build_trainer, make_config, make_rows, save_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.manifest import MANIFEST, describe_files, write_manifest
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import META
from lit_fsdp.cli.main import main
from lit_fsdp.cli.speak import speak_texts
from lit_fsdp.export.out_folder import lock_out
from lit_fsdp.tasks import TextToSpeech
from lit_fsdp.tasks.tts import voice_export
from lit_fsdp.tasks.tts.checkpoint import build_model, read_checkpoint
from lit_fsdp.tasks.tts.codec.formants import build_small_codec
from lit_fsdp.tasks.tts.evaluation.generated import Clip
from lit_fsdp.tasks.tts.families.model_types import load_speech_model
from lit_fsdp.tasks.tts.generation import GREEDY, Sampling
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from lit_fsdp.tasks.tts.speaker import open_speaker
from lit_fsdp.tasks.tts.voice_export import export_voice
from ranks import run_ranks

SHORT = Sampling(**GREEDY, max_frames=8)
OFFICIAL = os.environ.get("LIT_FSDP_QWEN_TTS_PYTHON")


def train(folder: Path, options: dict[str, Any]) -> None:
    pl.seed_everything(0, verbose=False)
    strategy = FSDP2Strategy(print_plan=False)
    trainer = build_trainer(max_steps=2, strategy=strategy)
    task = TextToSpeech(**options) if "pretrained" in options else build_task(**options)
    trainer.fit(task, build_data(folder, batch_size=3))
    trainer.save_checkpoint(folder / "run.ckpt")
    full = get_model_state_dict(task, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if trainer.is_global_zero:
        torch.save(full, folder / "full.pt")


def make_run(folder: Path, **options: Any) -> Path:
    write_shard(folder / "shard-00000.parquet", make_rows())
    run_ranks(train, folder, options, world_size=2)
    return folder / "run.ckpt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like those on the Hub, codec and all."""
    return save_model(tmp_path_factory.mktemp("base"))


def speak(model: Path, name: str | None) -> Tensor:
    speaker = open_speaker(str(model), SHORT)
    return speaker.speak([speaker.encode("hello", name, None)], is_streaming=False)[0].codes


@pytest.mark.full
def test_a_checkpoint_is_read_whole(run: Path) -> None:
    weights = read_checkpoint(run).weights
    wanted = torch.load(run.parent / "full.pt")
    assert {f"model.{name}" for name in weights} == wanted.keys()
    assert all(torch.equal(tensor, wanted[f"model.{name}"]) for name, tensor in weights.items())


@pytest.mark.full(after=1)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_checkpoint_writes_no_file_outside_when_it_speaks_or_is_exported(
    run: Path, tmp_path: Path, absolute: bool
) -> None:
    hostile, temporary = tmp_path / "run.ckpt", tmp_path / "temporary"
    shutil.copytree(run, hostile)
    temporary.mkdir()
    meta = torch.load(hostile / META, weights_only=True)
    meta[EXPORT][str(tmp_path / "stolen.json") if absolute else "../../stolen.json"] = "{}"
    torch.save(meta, hostile / META)
    write_manifest(hostile, describe_files(p for p in hostile.iterdir() if p.name != MANIFEST))
    before = sorted(tmp_path.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        with pytest.raises(ValueError, match="for the name of a file"):
            speak_texts(str(hostile), tmp_path / "spoken", text="hello", codec="formants")
        with pytest.raises(ValueError, match="for the name of a file"):
            export_voice(hostile, tmp_path / "out", first_row=1070)
    assert sorted(tmp_path.rglob("*")) == before


def test_of_two_that_speak_into_one_folder_the_later_is_refused(run: Path, tmp_path: Path) -> None:
    with lock_out(tmp_path, tmp_path / ".speak.lock"), pytest.raises(ValueError, match="another process"):
        speak_texts(str(run), tmp_path, text="hello", codec="formants", sampling=SHORT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_built_in_voice_says_what_its_embedding_says(run: Path, tmp_path: Path) -> None:
    folder = export_voice(run, tmp_path / "voices", first_row=1070).folder
    config = json.loads((folder / "config.json").read_text())
    assert config["tts_model_type"] == "custom_voice"
    # Beside those that the model had.
    assert config["talker_config"]["spk_id"] == {"ann": 90, "bo": 91, "kim": 1070, "lee": 1071}
    assert not any(name.startswith("speaker_encoder") for name in load_file(folder / "model.safetensors"))
    for name in ("Kim", "LEE"):
        assert torch.equal(speak(folder, name), speak(run, name))
    assert not torch.equal(speak(folder, "kim"), speak(folder, "lee"))
    assert torch.equal(speak(folder, None), speak(run, None)), "where nobody is named, the same one speaks"


def train_with_built_in_voices(folder: Path) -> None:
    config = {**make_config(), "tts_model_type": "custom_voice"}
    trainer = build_trainer(max_steps=1, strategy=FSDP2Strategy(print_plan=False))
    trainer.fit(TextToSpeech(config=config), build_data(folder, speaker_embedding="none", batch_size=6))
    trainer.save_checkpoint(folder / "run.ckpt")


@pytest.mark.full
def test_a_model_with_built_in_voices_keeps_them_where_the_data_has_none(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-00000.parquet", make_rows(6))
    run_ranks(train_with_built_in_voices, tmp_path, world_size=1)
    folder = export_voice(tmp_path / "run.ckpt", tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["tts_model_type"] == "custom_voice"
    assert config["talker_config"]["spk_id"] == {"ann": 90, "bo": 91}
    assert torch.equal(speak(folder, "ann"), speak(tmp_path / "run.ckpt", "ann"))


def test_a_base_export_keeps_the_speaker_encoder_and_all_else(run: Path, tmp_path: Path) -> None:
    folder = export_voice(run, tmp_path / "base", kind="base").folder
    state = load_speech_model(folder)[2].state_dict()
    assert any(name.startswith("speaker_encoder") for name in state)
    assert all(torch.equal(state[name], tensor) for name, tensor in read_checkpoint(run).weights.items())


@pytest.mark.full
def test_adapters_are_merged_over_their_base(base: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, pretrained=str(base), lora=LoRA(r=2, alpha=64.0))
    weights, before = read_checkpoint(run).weights, load_file(base / "model.safetensors")
    assert weights.keys() == before.keys()
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed
    assert all("talker.model.layers" in name and "_proj" in name for name in changed)
    full = torch.load(tmp_path / "full.pt")
    name = "talker.model.layers.0.mlp.up_proj"
    a, b = (full[f"model.{name}.lora_{part}.default.weight"] for part in "AB")
    torch.testing.assert_close(weights[f"{name}.weight"], before[f"{name}.weight"] + 32 * b @ a)


@pytest.mark.full
def test_a_fine_tuned_model_takes_its_codec_and_settings_along(base: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, pretrained=str(base))
    folder = export_voice(run, tmp_path / "out", first_row=1070).folder
    assert (folder / "speech_tokenizer/model.safetensors").is_file()
    weights, before = read_checkpoint(run).weights, load_file(base / "model.safetensors")
    assert weights.keys() == before.keys()
    # An issue of the official script: without its encoder the model cannot go on with data of other speakers.
    encoder = [name for name in before if name.startswith("speaker_encoder.")]
    assert encoder
    assert all(torch.equal(weights[name], before[name]) for name in encoder)
    speaker = open_speaker(str(folder))
    assert (speaker.sampling.top_k, speaker.sampling.predictor_top_k) == (7, 9)
    assert open_speaker(str(folder), Sampling(top_k=3)).sampling.top_k == 3
    assert open_speaker(str(folder), Sampling(top_k=50)).sampling.top_k == 50  # also where that is the official value


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speakers": ["max"]}, "speakers: got max: expected some of those of the training data: kim, lee"),
        ({"first_row": 1087}, "first_row: got 1087: 2 voices from there on do not fit the 1088 rows"),
        ({"first_row": 65}, "first_row: got 65: .* special"),
        ({"first_row": 5}, "first_row: got 5: .* are codes, special, or voices already"),
        ({"kind": "base", "speakers": ["kim"]}, "speakers: not used by kind 'base'"),
    ],
)
def test_exports_that_cannot_be_are_refused(run: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_voice(run, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_what_a_refusal_of_voices_names_is_possible(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in published models, whose voices lie among the last rows.
    found = read_checkpoint(run)
    found = replace(found, config=replace(found.config, speakers={"ann": 1085, "bo": 1087}))
    monkeypatch.setattr(voice_export, "read_checkpoint", lambda *_: found)
    with pytest.raises(ValueError, match=r"2 voices from there on do not fit .*: expected such as 1083$"):
        export_voice(run, tmp_path / "out", first_row=1085)
    assert export_voice(run, tmp_path / "out", first_row=1083).folder.is_dir()
    found = replace(found, voices={str(i): found.voices["kim"] for i in range(2000)})
    with pytest.raises(ValueError, match="expected fewer speakers, as so many rows are free nowhere"):
        export_voice(run, tmp_path / "many", first_row=1070)
    found = replace(found, config=replace(found.config, speaker_encoder=None), voices={})  # of instructions
    with pytest.raises(ValueError, match="had no embeddings of any: leave kind out"):
        export_voice(run, tmp_path / "designed", kind="custom_voice")


def test_the_command_speaks_into_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile = pytest.importorskip("soundfile")
    (tmp_path / "texts.jsonl").write_text('{"text": "one", "speaker": "kim"}\n{"text": "twenty two"}\n{"text": "3"}\n')
    options = ["--codec=formants", "--sampling.max_frames=6", "--batch_size=2", f"--texts={tmp_path / 'texts.jsonl'}"]
    assert main(["speak", f"--model={run}", f"--out={tmp_path / 'out'}", *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    lines = [json.loads(line) for line in (tmp_path / "out/spoken.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        info = soundfile.info(tmp_path / f"out/{i:05}.wav")
        assert (info.samplerate, info.frames) == (24000, line["num_frames"] * 1920)
    assert main(["speak", f"--model={run}", "--out=x", "--text=a", "--speaker=max", "--codec=formants"]) != 0
    assert "speaker: got 'max': expected one of: ann, bo, kim, lee" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["speak", f"--model={tmp_path / 'empty'}", "--out=x", "--text=a"]) == 2
    assert capsys.readouterr().err.startswith(f"error: model: {tmp_path / 'empty'} ")
    assert main(["speak", f"--model={run}", "--out=x", "--text=a"]) != 0
    assert "codec: not given, and the model has none" in capsys.readouterr().err
    clone = ["--ref_audio=x.wav", "--codec=formants", f"--texts={tmp_path / 'texts.jsonl'}"]
    assert main(["speak", f"--model={run}", "--out=x", *clone]) != 0
    assert "that name a speaker, such as 'kim': expected texts without speakers" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["speak", f"--model={run}", f"--out={tmp_path / 'file'}", "--text=a", "--codec=formants"]) != 0
    assert "file is a file: expected a folder" in capsys.readouterr().err
    assert main(["speak", f"--model={tmp_path / 'file'}", "--out=x", "--text=a", "--codec=formants"]) == 2
    assert "file is a file: expected a folder that FSDP2Strategy has written; resume" in capsys.readouterr().err
    clone = ["--ref_audio=lost.wav", "--codec=formants", "--text=a"]
    assert main(["speak", f"--model={run}", "--out=x", *clone]) != 0
    assert "ref_audio: lost.wav: no such file" in capsys.readouterr().err
    (tmp_path / "none.txt").write_text("\n")
    assert main(["speak", f"--model={run}", "--out=x", "--codec=formants", f"--texts={tmp_path / 'none.txt'}"]) != 0
    assert "none.txt: empty: expected a text in each line" in capsys.readouterr().err
    assert main(["export", f"--checkpoint={run}", f"--out={tmp_path / 'y'}"]) != 0
    assert "export-voice" in capsys.readouterr().err


def test_files_that_an_earlier_list_names_are_removed_and_no_others(run: Path, tmp_path: Path) -> None:
    names = ["00000.wav", "00001.wav", "00002.wav"]
    others = ["00002.flac", "00003.wav", "mine.wav", "../00002.wav"]
    (tmp_path / "out").mkdir()
    for name in (*names, *others):
        (tmp_path / "out" / name).touch()
    listed = [*names, *others, "/00002.wav", ["00002.wav"], None]
    rows = [json.dumps(name if name is None else {"audio": name}) for name in listed if name != "00003.wav"]
    (tmp_path / "out" / "spoken.jsonl").write_text("\n".join([*rows, "{broken"]))
    options = ["--codec=formants", "--sampling.max_frames=6", "--text=a"]
    assert main(["speak", f"--model={run}", f"--out={tmp_path / 'out'}", *options]) == 0
    assert len((tmp_path / "out/spoken.jsonl").read_text().splitlines()) == 1
    wanted = {"00000.wav", "spoken.jsonl", "00002.flac", "00003.wav", "mine.wav"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == wanted
    assert (tmp_path / "00002.wav").is_file()


@pytest.mark.full
def test_a_command_that_is_killed_leaves_no_audio_under_another_text_or_under_none(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "out", Clip.write
    speak_texts(str(run), out, texts=_write_texts(tmp_path, "old", 4), codec="formants", sampling=SHORT)
    written = []

    def write_until_killed(clip: Clip, path: Path) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt  # nothing of the command would run after a real kill either
        written.append(path.name)
        write(clip, path)

    monkeypatch.setattr(Clip, "write", write_until_killed)
    texts = _write_texts(tmp_path, "new", 6)
    with pytest.raises(KeyboardInterrupt):
        speak_texts(str(run), out, texts=texts, codec="formants", sampling=SHORT, batch_size=2)
    listed = [json.loads(line) for line in (out / "spoken.jsonl").read_text().splitlines()]
    assert [(line["audio"], line["text"]) for line in listed] == [(f"{i:05}.wav", f"new {i}") for i in range(4)]
    assert sorted(path.name for path in out.glob("*.wav")) == written


def _write_texts(folder: Path, word: str, count: int) -> Path:
    path = folder / "texts.txt"
    path.write_text("".join(f"{word} {i}\n" for i in range(count)))
    return path


def test_audio_comes_out_before_the_last_code_is_written(run: Path, tmp_path: Path) -> None:
    speaker, codec = open_speaker(str(run), SHORT), build_small_codec().eval()
    text, is_written = speaker.encode("hello", "kim", None), []
    write = speaker.family.write

    def count(*args: Any) -> Any:
        for frame in write(*args):
            is_written.append(frame.codes is not None)
            yield frame

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speaker.family, "write", count)
        stream = speaker.stream(text, codec, is_streaming=False, num_frames=3)
        pieces = [next(stream)]
        assert (len(pieces[0].audio), sum(is_written)) == (3 * 1920, 3)
        pieces += stream
    (speech,) = speaker.speak([text], is_streaming=False)
    assert len(speech.codes) > 3
    assert torch.equal(torch.cat([piece.codes for piece in pieces]), speech.codes)
    (audio,) = codec.decode([speech.codes])
    torch.testing.assert_close(torch.cat([piece.audio for piece in pieces]), audio, atol=5e-5, rtol=0)
    assert [piece.has_ended for piece in pieces] == [None] * (len(pieces) - 1) + [speech.has_ended]


@pytest.mark.full
def test_stdout_gets_the_audio_of_the_file_and_nothing_else(
    run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    options = [f"--model={run}", f"--out={tmp_path}", "--codec=formants", "--sampling.max_frames=6"]
    assert main(["speak", *options, "--text=hello", "--to_stdout=true"]) == 0
    out, err = capfdbinary.readouterr()
    file = (tmp_path / "00000.wav").read_bytes()
    assert (out[:4], out[8:40], out[44:]) == (file[:4], file[8:40], file[44:])  # but for the lengths
    assert b"00000.wav" in err
    (tmp_path / "texts.txt").write_text("one\n")
    assert main(["speak", *options, f"--texts={tmp_path / 'texts.txt'}", "--to_stdout=true"]) != 0
    assert b"to_stdout: one text at a time" in capfdbinary.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(OFFICIAL is None, reason="LIT_FSDP_QWEN_TTS_PYTHON names no Python that has qwen-tts")
def test_the_official_package_loads_an_export_and_speaks_alike(base: Path, tmp_path: Path) -> None:
    assert OFFICIAL is not None
    run = make_run(tmp_path, pretrained=str(base))
    folder = export_voice(run, tmp_path / "out", first_row=1070).folder
    speaker = open_speaker(str(folder), SHORT)
    tail = [257, 10, 256, 258, 10]  # anything: it is cut off
    ids = [[*speaker.encode(text, "kim", None).text_ids, *tail] for text in ("hello", "good day")]
    script = Path(__file__).parents[2] / "official_speech.py"
    command = [OFFICIAL, str(script), str(folder), str(tmp_path / "spoken.json"), json.dumps(ids)]
    done = subprocess.run([*command, '["Kim", "lee"]', "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spoken = json.loads((tmp_path / "spoken.json").read_text())
    pairs = [speaker.encode(text, name, None) for text, name in (("hello", "kim"), ("good day", "lee"))]
    for official, own in zip(spoken, speaker.speak(pairs, is_streaming=False), strict=True):
        assert official["codes"] == own.codes.tolist()
        (audio,) = build_small_codec().decode([own.codes])
        torch.testing.assert_close(audio[::480], torch.tensor(official["audio"]), atol=1e-3, rtol=1e-3)


def test_the_model_of_a_checkpoint_is_ready_to_speak(run: Path) -> None:
    model = build_model(read_checkpoint(run))
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with adapters and a part that trained in full, and its base, which has moved since."""
    folder = tmp_path_factory.mktemp("adapted")
    (was := folder / "was").mkdir()
    save_model(was)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(was / "model.safetensors").items()}
    save_file(weights, was / "model.safetensors")
    (data := folder / "data").mkdir()
    run = make_run(data, pretrained=str(was), lora=LoRA(r=2, alpha=64.0, modules_to_save=["codec_head"]))
    return run, was.rename(folder / "now")


@pytest.mark.full
def test_adapters_are_merged_into_their_base_wherever_it_is(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    run, base = adapted
    with pytest.raises(ValueError, match=r"base: got '.*was': there is no such folder"):
        read_checkpoint(run)
    folder = export_voice(run, tmp_path / "out", base=str(base), first_row=1070).folder
    assert (folder / "speech_tokenizer/model.safetensors").is_file()
    assert torch.equal(speak(folder, "kim"), speak_from(run, base))


def speak_from(run: Path, base: Path) -> Tensor:
    speaker = open_speaker(str(run), SHORT, base=str(base))
    return speaker.speak([speaker.encode("hello", "kim", None)], is_streaming=False)[0].codes


@pytest.mark.full
def test_merged_weights_have_the_dtypes_of_their_base(adapted: tuple[Path, Path]) -> None:
    run, base = adapted
    weights, before = read_checkpoint(run, str(base)).weights, load_file(base / "model.safetensors")
    assert {name: w.dtype for name, w in weights.items()} == {name: w.dtype for name, w in before.items()}
    full = torch.load(run.parent / "full.pt")
    assert torch.equal(weights["talker.codec_head.weight"], full["model.talker.codec_head.weight"].bfloat16())
    assert not torch.equal(weights["talker.codec_head.weight"], before["talker.codec_head.weight"])


def test_another_base_is_refused(adapted: tuple[Path, Path], base: Path, run: Path) -> None:
    own, _ = adapted
    with pytest.raises(ValueError, match=r"its weights are not those of '.*was' that the adapters were trained over"):
        read_checkpoint(own, str(base))
    with pytest.raises(ValueError, match=r"base: got '.*': .* started from no model; leave it out"):
        read_checkpoint(run, str(base))


def train_streaming(folder: Path) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = build_trainer(max_steps=1)
    trainer.fit(build_task(), build_data(folder, batch_size=3, streaming=True))
    trainer.save_checkpoint(folder / "run.ckpt")


@pytest.mark.full
def test_an_export_says_which_layout_it_was_trained_with(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-00000.parquet", make_rows())
    run_ranks(train_streaming, tmp_path, world_size=1)
    notes = export_voice(tmp_path / "run.ckpt", tmp_path / "out", first_row=1070).notes
    assert any("trained with data.streaming: speak with --streaming true" in note for note in notes)
    assert any("no codec" in note for note in notes)
