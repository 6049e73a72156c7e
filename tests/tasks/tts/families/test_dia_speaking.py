"""Dia from audio to a voice: prepared by DAC, trained on two ranks, spoken, and exported for Transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from speech_families import DAC, DIA, fit, make_checkpoint
from transformers import DacConfig, DacModel, DiaForConditionalGeneration

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.cli.main import main
from lit_fsdp.tasks import Sampling, SpeechEval, TextToSpeech
from lit_fsdp.tasks.tts.checkpoint import build_model, read_checkpoint
from lit_fsdp.tasks.tts.codec.formants import VOICES, synthesize
from lit_fsdp.tasks.tts.evaluation.speech_eval import SpeechEvaluator
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.generation import Speech
from lit_fsdp.tasks.tts.preparation.audio import read_audio
from lit_fsdp.tasks.tts.preparation.prepared import read_rows
from lit_fsdp.tasks.tts.speaker import open_speaker
from lit_fsdp.tasks.tts.voice_export import export_voice
from ranks import run_ranks


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codec")
    torch.manual_seed(3)
    DacModel(DacConfig(**DAC)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(codec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    lines = []
    for i, voice in enumerate([*VOICES.values()] * 3):
        soundfile.write(folder / f"{i}.wav", synthesize("open the door"[: 3 + i], voice), 24000)
        lines.append({"audio": f"{i}.wav", "text": "open the door"[: 3 + i], "speaker": "ada"})
    (folder / "in.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    args = ["prepare", "tts", f"--manifest={folder / 'in.jsonl'}", f"--out={folder / 'out'}", f"--model={codec}"]
    assert main([*args, "--limits.min_seconds=0.1"]) == 0
    return folder / "out"


def test_rows_are_prepared_with_the_codec_at_its_own_rate(codec: Path, prepared: Path) -> None:
    stock = DacModel.from_pretrained(codec).eval()
    for row in read_rows(prepared):
        assert len(row.codes) == -(-round(row.seconds * 44100) // 512)
        audio = read_audio(prepared.parent / row.audio, 44100)
        padded = torch.from_numpy(np.pad(audio, (0, len(row.codes) * 512 - len(audio))))
        with torch.no_grad():
            wanted = stock.encode(padded[None, None]).audio_codes[0].T
        assert row.codes.tolist() == wanted[: len(row.codes)].tolist()
        assert len(np.unique(row.codes)) > 5


@pytest.fixture(scope="module", params=[{}, {"lora": LoRA(r=2)}], ids=["full", "lora"])
def run(request: Any, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    base = make_checkpoint(DIA, tmp_path_factory.mktemp("base"))
    run_ranks(fit, DIA, prepared, folder, 1, {"pretrained": str(base), **request.param}, world_size=2)
    return folder / "run.ckpt"


@pytest.mark.full
def test_transformers_loads_an_export_with_equal_logits(run: Path, tmp_path: Path) -> None:
    export_voice(run, tmp_path / "out")
    stock, report = DiaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    own: Any = build_model(read_checkpoint(run))
    ids = {"input_ids": torch.arange(5)[None], "decoder_input_ids": torch.arange(24).reshape(1, 6, 4)}
    with torch.no_grad():
        states = own.model(**ids).last_hidden_state
        logits = own.logits_dense(states).view(1, 6, 4, -1).transpose(1, 2)[0]
        torch.testing.assert_close(logits, stock.eval()(**ids).logits, atol=0, rtol=0)


@pytest.mark.full
def test_a_run_and_its_export_speak_the_same(codec: Path, run: Path, tmp_path: Path) -> None:
    export_voice(run, tmp_path / "voice")
    for name, model in (("run", run), ("voice", tmp_path / "voice")):
        args = ["speak", f"--model={model}", "--text=a door", f"--codec={codec}", f"--out={tmp_path / name}.out"]
        assert main([*args, "--sampling.max_frames=5"]) == 0
    own, exported = (soundfile.read(tmp_path / f"{name}.out" / "00000.wav") for name in ("run", "voice"))
    assert own[1] == 44100
    np.testing.assert_array_equal(own[0], exported[0])
    with pytest.raises(ValueError, match="speaker: got 'ada': expected one of: none"):
        open_speaker(str(run)).encode("a", "ada", None)


def test_defaults_of_sampling_are_those_of_the_family() -> None:
    chosen = TextToSpeech(config=DIA, sampling=Sampling(max_frames=9)).complete_sampling()
    assert (chosen.temperature, chosen.top_k, chosen.guidance_scale, chosen.max_frames) == (1.2, 45, 3.0, 9)
    for name, value in (("predictor_top_k", 9), ("repetition_penalty", 1.2)):
        with pytest.raises(ValueError, match=f"sampling.{name}: not used by dia"):
            TextToSpeech(config=DIA, sampling=Sampling(**{name: value}))
    with pytest.raises(ValueError, match=r"sampling.guidance_scale: got 0.5: expected 1 \(none\) or above"):
        TextToSpeech(config=DIA, sampling=Sampling(guidance_scale=0.5))


def test_what_the_model_says_comes_before_its_family_and_after_what_is_given(tmp_path: Path) -> None:
    base = make_checkpoint(DIA, tmp_path)
    own = {"top_k": 7, "guidance_scale": 2.0, "repetition_penalty": 1.3}
    (base / "generation_config.json").write_text(json.dumps(own))
    sampling = Sampling(guidance_scale=4.0)
    for values in (
        TextToSpeech(pretrained=str(base), sampling=sampling).complete_sampling(),
        open_speaker(str(base), sampling).sampling,
    ):
        assert (values.guidance_scale, values.top_k, values.temperature) == (4.0, 7, 1.2)


def test_a_codec_of_other_codes_is_refused_before_training(codec: Path) -> None:
    evaluator = SpeechEvaluator(SpeechEval(codec=str(codec)))
    evaluator.check(parse_family(DIA)[1])
    fewer = {**DIA, "decoder_config": {**DIA["decoder_config"], "num_channels": 3}, "delay_pattern": [0, 2, 3]}
    with pytest.raises(ValueError, match=r"it has 4 codebooks: expected 3, the model's"):
        evaluator.check(parse_family(fewer)[1])
    ids = {"eos_token_id": 65, "pad_token_id": 66, "bos_token_id": 67}
    larger = {**DIA, "decoder_config": {**DIA["decoder_config"], **ids}}
    with pytest.raises(ValueError, match=r"its codes end at 63: expected those of the model, up to 64"):
        evaluator.check(parse_family(larger)[1])


def test_it_is_transcribed_at_the_rate_of_its_codec(codec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[int] = []

    def transcribe(clips: Any, rate: int, languages: Any) -> list[str]:
        rates.append(rate)
        return ["hm"]

    monkeypatch.setattr("lit_fsdp.tasks.tts.evaluation.speech_eval.load_transcriber", lambda *_: transcribe)
    codes = torch.zeros(20, 4, dtype=torch.int64)
    evaluator = SpeechEvaluator(SpeechEval(codec=str(codec), transcriber="some"))
    clip = evaluator.transcribe(evaluator.decode(Speech(codes=codes, has_ended=True)), "auto")
    assert (clip.transcript, clip.sample_rate, len(clip.audio), rates) == ("hm", 44100, 20 * 512, [44100])
