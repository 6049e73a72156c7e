"""CSM from audio to a voice: prepared by its codec, trained on two ranks, spoken, and exported for Transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file, save_file
from speech_families import CSM, build_data, build_task, fit, make_checkpoint
from speech_training import build_trainer
from transformers import CsmForConditionalGeneration

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.cli.main import main
from lit_fsdp.tasks import Sampling, SpeechData, SpeechEval, TextToSpeech
from lit_fsdp.tasks.tts import voice_export
from lit_fsdp.tasks.tts.checkpoint import build_model, read_checkpoint
from lit_fsdp.tasks.tts.codec.formants import VOICES, synthesize
from lit_fsdp.tasks.tts.codec.loading import has_codec, load_codec
from lit_fsdp.tasks.tts.evaluation.speech_eval import SpeechEvaluator
from lit_fsdp.tasks.tts.preparation.audio import Limits
from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow
from lit_fsdp.tasks.tts.preparation.prepared import read_rows
from lit_fsdp.tasks.tts.preparation.preparer import Preparer
from lit_fsdp.tasks.tts.speaker import open_speaker
from lit_fsdp.tasks.tts.voice_export import export_voice
from ranks import run_ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CSM, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def prepared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    lines = []
    for i, (name, voice) in enumerate([*VOICES.items()] * 3):
        text = "open the door"[: 3 + i]
        soundfile.write(folder / f"{i}.wav", synthesize(text, voice), 24000)
        lines.append({"audio": f"{i}.wav", "text": text, "speaker": name})
    (folder / "in.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    args = ["prepare", "tts", f"--manifest={folder / 'in.jsonl'}", f"--out={folder / 'out'}", f"--model={base}"]
    assert main([*args, "--limits.min_seconds=0.1"]) == 0
    return folder / "out"


def test_rows_are_prepared_with_the_codec_of_the_model(base: Path, prepared: Path) -> None:
    rows = read_rows(prepared)
    stock = CsmForConditionalGeneration.from_pretrained(base).eval()
    for row in rows:
        audio, _ = soundfile.read(prepared.parent / row.audio, dtype="float32")
        length = -(-len(audio) // 1920) * 1920
        padded = torch.from_numpy(np.pad(audio, (0, length - len(audio))))
        with torch.no_grad():
            wanted = stock.codec_model.encode(padded[None, None], num_quantizers=6).audio_codes[0].T
        assert row.codes.tolist() == wanted.tolist()
        assert len(np.unique(row.codes)) > 5
        assert len(row.speaker_embedding) == 0
    codes = torch.from_numpy(rows[0].codes)
    (own,) = load_codec(base).decode([codes])
    with torch.no_grad():
        torch.testing.assert_close(own, stock.codec_model.decode(codes.T[None]).audio_values[0, 0])


@pytest.fixture(scope="module", params=[{}, {"lora": LoRA(r=2)}], ids=["full", "lora"])
def run(request: Any, base: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(fit, CSM, prepared, folder, 1, {"pretrained": str(base), **request.param}, world_size=2)
    return folder / "run.ckpt"


@pytest.mark.full
def test_transformers_loads_an_export_with_equal_logits(base: Path, run: Path, tmp_path: Path) -> None:
    export_voice(run, tmp_path / "out")
    stock, report = CsmForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    name = "backbone_model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert all(torch.equal(before[n], after[n]) for n in before if n.startswith("codec_model."))
    own: Any = build_model(read_checkpoint(run))
    codes = torch.arange(4 * 6).reshape(1, 4, 6)
    with torch.no_grad():
        states = own.backbone_model(inputs_embeds=own.backbone_model.embed_tokens(codes)).last_hidden_state
        wanted = stock.eval()(input_ids=codes, labels=codes)
        torch.testing.assert_close(own.lm_head(states), wanted.logits, atol=0, rtol=0)


@pytest.mark.full
def test_transformers_loads_trained_weights_as_they_are(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_checkpoint(run)
    config = replace(found.config, raw={**found.config.raw, "dtype": "bfloat16"})  # of what it was made of
    monkeypatch.setattr(voice_export, "read_checkpoint", lambda *_: replace(found, config=config))
    stock: Any = CsmForConditionalGeneration.from_pretrained(export_voice(run, tmp_path / "out").folder)
    assert torch.equal(stock.lm_head.weight, found.weights["lm_head.weight"])


@pytest.mark.full
def test_a_run_and_its_export_speak_the_same(run: Path, tmp_path: Path) -> None:
    export_voice(run, tmp_path / "voice")
    greedy = ["--sampling.do_sample=false", "--sampling.predictor_do_sample=false", "--sampling.max_frames=5"]
    for name, model in (("run", run), ("voice", tmp_path / "voice")):
        args = ["speak", f"--model={model}", "--text=a door", "--speaker=1", f"--out={tmp_path / name}.out"]
        assert main([*args, *greedy]) == 0
    own, exported = (soundfile.read(tmp_path / f"{name}.out" / "00000.wav")[0] for name in ("run", "voice"))
    assert len(own) % 1920 == 0
    np.testing.assert_array_equal(own, exported)


@pytest.mark.full
def test_speakers_of_the_training_data_keep_their_numbers(run: Path) -> None:
    speaker = open_speaker(str(run))
    assert speaker.voices == {"ada": 0, "bruno": 1}
    bytes_of = [speaker.encode("a", name, None).text_ids for name in ("ada", "bruno", "7")]
    texts = [speaker.tokenizer.decode(ids, skip_special_tokens=True) for ids in bytes_of]
    assert texts == ["[0]a", "[1]a", "[7]a"]
    with pytest.raises(ValueError, match="speaker: got 'eve': expected one of: 0, 1"):
        speaker.encode("a", "eve", None)
    with pytest.raises(ValueError, match="language: got 'german': csm is not told a language"):
        speaker.encode("a", "ada", "german")
    with pytest.raises(ValueError, match="ref_audio: csm has no speaker encoder"):
        speaker.embed(np.zeros(24000, dtype=np.float32))


def test_what_it_speaks_is_decoded_by_its_own_codec(base: Path, prepared: Path, tmp_path: Path) -> None:
    sampling = Sampling(max_frames=4, seed=0)
    task = build_task(
        CSM, pretrained=str(base), num_samples=2, sampling=sampling, speech_eval=SpeechEval(codec=str(base))
    )
    trainer = build_trainer(max_steps=1, logger=CSVLogger(tmp_path, name="", version=""))
    trainer.fit(task, build_data(prepared, batch_size=2))
    assert len(task.report.rows) == 2
    assert task.report.measured == {}  # there is no encoder to compare voices with
    spoken = [row.speech.codes for row in task.report.rows if len(row.speech.codes)]
    assert spoken
    paths = sorted(tmp_path.glob("spoken/*.wav"))
    for path, wanted in zip(paths, load_codec(base).decode(spoken), strict=True):
        audio, rate = soundfile.read(path, dtype="float32")
        assert rate == 24000
        assert wanted.abs().max() > 1e-3
        np.testing.assert_allclose(audio, wanted.clamp(-1, 1), atol=1e-4)  # of 16 bits


@pytest.mark.full
def test_weights_are_read_from_files_that_the_configuration_names(base: Path, prepared: Path, tmp_path: Path) -> None:
    for path in base.iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "model.safetensors").rename(tmp_path / "transformers.safetensors")
    save_file({"of.another.release": torch.zeros(1)}, tmp_path / "model.safetensors")
    raw = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "transformers_weights": "transformers.safetensors"}))
    own, same = (open_speaker(str(folder)).model.state_dict() for folder in (base, tmp_path))
    assert all(torch.equal(own[name], same[name]) for name in own)
    run_ranks(fit, CSM, prepared, tmp_path, 1, {"pretrained": str(tmp_path)}, world_size=1)
    export_voice(tmp_path / "run.ckpt", tmp_path / "out")
    CsmForConditionalGeneration.from_pretrained(tmp_path / "out")


def test_the_codec_is_found_where_no_file_has_the_usual_name(base: Path, tmp_path: Path) -> None:
    shutil.copy(base / "model.safetensors", tmp_path / "transformers.safetensors")
    raw = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "transformers_weights": "transformers.safetensors"}))
    own, same = (load_codec(folder).state_dict() for folder in (base, tmp_path))
    assert all(torch.equal(own[name], same[name]) for name in own)
    SpeechEvaluator(SpeechEval(codec=str(tmp_path))).check(TextToSpeech(config=CSM).read_config())
    digests = Preparer(model=str(tmp_path), limits=Limits()).describe_models()
    assert digests["codec"] == digests["model"]


def test_a_model_from_scratch_has_no_codec(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    weights = load_file(base / "model.safetensors")
    own = {name: tensor for name, tensor in weights.items() if not name.startswith("codec_model.")}
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert [has_codec(folder) for folder in (base, tmp_path)] == [True, False]
    assert [open_speaker(str(folder)).codec_source for folder in (base, tmp_path)] == [str(base), None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextToSpeech(config={"model_type": "x"}), "model_type: got 'x': expected one of 'qwen3_tts', 'csm'"),
        (lambda: TextToSpeech(config={**CSM, "num_codebooks": "six"}), "config: .*num_codebooks"),
        (lambda: TextToSpeech(config=CSM, sampling=Sampling(guidance_scale=2.0)), "guidance_scale: not used by csm"),
        (lambda: TextToSpeech(config=CSM, freeze=["encoder"]), "freeze: got encoder: expected some of talker"),
        (lambda: SpeechData(tokenizer="bytes", streaming=True), "streaming: got true: csm does not read text beside"),
        (lambda: SpeechData(tokenizer="bytes", speaker_embedding="mean"), "speaker_embedding: got 'mean': csm takes"),
    ],
)
def test_what_the_family_has_not_is_refused(make: Any, message: str) -> None:
    def build() -> None:
        made = make()
        if isinstance(made, SpeechData):
            made.attach(TextToSpeech(config=CSM).read_config())

    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.full
def test_built_in_voices_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind: csm has no built-in voices"):
        export_voice(run, tmp_path / "out", kind="custom_voice")


def test_a_language_that_training_would_refuse_is_rejected_before(base: Path, tmp_path: Path) -> None:
    rows = [ManifestRow(line=1, audio="a.wav", folder=tmp_path, text="a", language="german")]
    good, (rejected,), _ = Preparer(model=str(base), limits=Limits())(rows)
    assert not good
    assert rejected.reason == "language: got 'german': csm is not told a language: expected auto or english"
