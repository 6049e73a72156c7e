"""Evaluation of generated speech: on rank 0, for all ranks."""

import math
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from speech_training import build_data, build_task, build_trainer, make_config, make_rows, save_model
from torch import Tensor

from lit_fsdp.tasks import Sampling, SpeechEval, TextToSpeech
from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.evaluation import speech_eval
from lit_fsdp.tasks.tts.evaluation.generated import Clip
from lit_fsdp.tasks.tts.generation import Speech
from lit_fsdp.tasks.tts.preparation import transcribe as transcribing
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from ranks import run_ranks

GREEDY = Sampling(do_sample=False, predictor_do_sample=False, max_frames=6)
MODULE = "lit_fsdp.tasks.tts.evaluation.speech_eval"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_shard(folder / "shard-00000.jsonl", make_rows(4))
    return folder


def validate(folder: Path, out: Path, settings: SpeechEval) -> None:
    pl.seed_everything(0, verbose=False)
    logger = CSVLogger(out, name="", version="")
    task = build_task(sampling=GREEDY, num_samples=2, speech_eval=settings)
    data = build_data(folder, validation=str(folder), batch_size=2)
    try:
        (found,) = build_trainer(logger=logger).validate(task, data, verbose=False)
    except RuntimeError as error:
        found = str(error)
    torch.save((found, len(task.report.clips)), out / f"{dist.get_rank()}.pt")


def run(folder: Path, out: Path, settings: SpeechEval) -> list[Any]:
    run_ranks(validate, folder, out, settings, world_size=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.full
def test_generated_speech_is_decoded_and_measured(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["A!", "aa bb"])  # where "a" and "aa" were said
    monkeypatch.setattr(f"{MODULE}.fetch_transcriber", lambda _: None)
    monkeypatch.setattr(f"{MODULE}.load_transcriber", lambda *_: lambda *_: [next(texts)])
    (found, num_clips), (others, _) = run(prepared, tmp_path, SpeechEval(codec="formants", transcriber="some"))
    assert found["val/wer_pct"] == pytest.approx(50.0)
    assert found["val/cer_pct"] == pytest.approx(100.0)
    assert -1 <= found["val/speaker_similarity"] <= 1
    assert found == others
    clips = sorted(path.name for path in (tmp_path / "spoken").iterdir())
    assert clips == ["00_lee_step0.wav", "01_kim_step0.wav"]
    assert num_clips == 2
    with wave.open(str(tmp_path / "spoken" / clips[0])) as file:
        assert (file.getframerate(), file.getnframes() % 1920) == (24000, 0)
        assert file.getnframes() > 0


@pytest.mark.full
def test_codec_and_transcriber_are_on_rank_0_alone(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = speech_eval.open_codec

    def open_codec(name: str, device: str) -> Any:
        (tmp_path / f"codec on {dist.get_rank()}").touch()
        return opened(name, device)

    def load(*_: Any) -> Any:
        (tmp_path / f"transcriber on {dist.get_rank()}").touch()
        return lambda *_: [""]

    monkeypatch.setattr(f"{MODULE}.fetch_transcriber", lambda _: None)
    monkeypatch.setattr(f"{MODULE}.open_codec", open_codec)
    monkeypatch.setattr(f"{MODULE}.load_transcriber", load)
    (_, num_clips), (_, num_others) = run(prepared, tmp_path, SpeechEval(codec="formants", transcriber="some"))
    assert sorted(path.name for path in tmp_path.glob("* on *")) == ["codec on 0", "transcriber on 0"]
    assert (num_clips, num_others) == (2, 0)


@pytest.mark.full
def test_ranks_that_would_measure_other_things_log_the_same(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 writes clips too short to tell a voice, rank 1 longer ones, as devices of two kinds might.
    eos = parse_config(make_config()).ids.eos

    def end_early(module: Any, inputs: Any, logits: Tensor) -> Tensor | None:
        if not isinstance(module, torch.nn.Linear) or logits.shape[-1] != 1088 or logits.dim() != 2:
            return None
        away = torch.zeros_like(logits)
        away[..., eos] = -1e4 if dist.get_rank() else 1e4
        return logits + away

    handle = torch.nn.modules.module.register_module_forward_hook(end_early)
    try:
        (found, _), (others, _) = run(prepared, tmp_path, SpeechEval(codec="formants"))
    finally:
        handle.remove()
    assert found.keys() == others.keys()
    assert math.isnan(found["val/speaker_similarity"])
    assert math.isnan(others["val/speaker_similarity"])


@pytest.mark.full
def test_an_error_of_the_evaluation_reaches_all_ranks(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(f"{MODULE}.write_audio", fail)
    for said, _ in run(prepared, tmp_path, SpeechEval(codec="formants")):
        assert said == "speech_eval failed on rank 0: OSError: no space left on device"


def test_loggers_get_audio_as_they_take_it() -> None:
    logged: list[Any] = []
    takes = SimpleNamespace(log_audio=lambda name, audio, step, **a: logged.append((name, len(audio[0]), step, a)))
    clip = Clip(audio=torch.zeros(480), sample_rate=24000, transcript="hm")
    silent = Clip(audio=torch.zeros(0), sample_rate=24000)
    rows: Any = [SimpleNamespace(speaker="kim"), SimpleNamespace(speaker="lee")]
    with pytest.warns(UserWarning, match=r"SimpleNamespace takes no audio: .* in the run's report only"):
        speech_eval.write_audio([clip, silent], rows, [takes, SimpleNamespace()], 3)
    assert logged == [("spoken/00_kim", 480, 3, {"sample_rate": [24000], "caption": ["hm"]})]


def test_spellings_of_one_sound_are_no_errors_of_speech() -> None:
    texts = ["Don\u2019t say \u2018no\u2019!", "Caf\N{LATIN SMALL LETTER E WITH ACUTE}", "the dogs\u2019 home"]
    heard = ["don't say 'no'", "cafe\N{COMBINING ACUTE ACCENT}", "the dogs' home"]
    assert speech_eval.compute_word_errors(texts, heard) == {"wer_pct": 0.0, "cer_pct": 0.0}
    assert speech_eval.compute_word_errors(["we're"], ["were"])["wer_pct"] == 100.0


def test_codec_and_transcriber_are_fetched_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(f"{MODULE}.fetch_codec", lambda name, _: fetched.append(name))
    monkeypatch.setattr(f"{MODULE}.fetch_transcriber", fetched.append)
    build_task(num_samples=1, speech_eval=SpeechEval(codec="some/codec", transcriber="some/whisper")).prepare_data()
    assert fetched == ["some/codec", "some/whisper"]


def test_what_is_no_whisper_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "wav2vec2"}')
    with pytest.raises(ValueError, match=r"transcriber: .* names 'wav2vec2': expected a Whisper model"):
        transcribing.fetch_transcriber(str(tmp_path))


def test_a_codec_of_other_codes_is_refused_before_training(prepared: Path) -> None:
    raw = make_config()
    talker = raw["talker_config"]
    talker |= {n: 2048 + i for n, i in talker.items() if n.startswith("codec_") and isinstance(i, int)}
    talker["vocab_size"], talker["code_predictor_config"]["vocab_size"] = 3072, 2048
    task = TextToSpeech(config=raw, num_samples=1, speech_eval=SpeechEval(codec="formants"))
    with pytest.raises(ValueError, match=r"speech_eval.codec: got 'formants': its codes end at 63: expected .* 2047"):
        build_trainer(max_steps=1).fit(task, build_data(prepared))


@pytest.mark.parametrize(
    "precision", [HalfPrecision("bf16-true"), MixedPrecision("bf16-mixed", "cpu")], ids=["true", "mixed"]
)
def test_the_codec_decodes_in_float32_whatever_the_precision_of_a_step(precision: Precision, tmp_path: Path) -> None:
    speech = Speech(codes=torch.arange(64).view(4, 16), has_ended=True)
    wanted = speech_eval.SpeechEvaluator(SpeechEval(codec="formants")).decode(speech)
    evaluator = speech_eval.SpeechEvaluator(SpeechEval(codec=str(save_model(tmp_path))))
    with precision.predict_step_context():
        found = evaluator.decode(speech)
    assert torch.equal(found.audio, wanted.audio)
