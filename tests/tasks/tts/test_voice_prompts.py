"""What a text is told beside its words: from rows and options to the model."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speech_families import CSM, DIA, build_model, make_utterances
from speech_families import make_rows as make_family_rows
from speech_golden import draw
from speech_training import build_data, make_config, make_rows, save_model

from lit_fsdp.cli.main import main
from lit_fsdp.tasks.tts.codec.formants import SENTENCES, VOICES, build_small_codec, synthesize
from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.evaluation.prompts import PromptRow
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.families.qwen3_layout import encode_instruct, encode_text
from lit_fsdp.tasks.tts.generation import GREEDY, Sampling
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow, read_rows, write_shard
from lit_fsdp.tasks.tts.rows import check_row
from lit_fsdp.tasks.tts.speaker import Reference, open_speaker
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer


def make_told_rows() -> list[PreparedRow]:
    """Rows of which the first goes on from speech and the second follows an instruction."""
    first, second, *others = make_rows(4)
    codes = (draw("before", 20, 16).abs() * 63).long().numpy()
    return [replace(first, ref_text="so", ref_codes=codes), replace(second, instruct="Whisper."), *others]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_data_hands_on_what_its_rows_go_on_from_and_follow(tmp_path: Path, ending: str) -> None:
    rows, tokenizer = make_told_rows(), build_byte_tokenizer()
    (folder := tmp_path / "prepared").mkdir()
    write_shard(folder / f"shard-00000.{ending}", rows)
    stored = read_rows(folder)
    assert [row.to_plain() for row in stored] == [row.to_plain() for row in rows]
    data = build_data(folder, cache_dir=str(tmp_path / "cache"))
    data.attach(parse_config(make_config()))
    data.setup("fit")
    first, second, third, _ = (data.encode_prompt(row) for row in data.pick_validation(4))
    assert first.context_ids == encode_text(tokenizer, "so")
    np.testing.assert_array_equal(first.context_codes, rows[0].ref_codes)
    assert second.instruct_ids == encode_instruct(tokenizer, "Whisper.")
    assert (len(third.context_ids), third.context_codes, len(third.instruct_ids)) == (0, None, 0)
    # What is read counts in the longest row, as it takes memory.
    longest_s = (max(len(row.codes) for row in rows[1:]) + 0.1) / 12.5
    assert rows[0].num_frames > longest_s * 12.5
    short = build_data(folder, cache_dir=str(tmp_path / "cache"), max_seconds=longest_s)
    short.attach(parse_config(make_config()))
    with pytest.warns(UserWarning, match="1 of 4 rows are longer than max_seconds"):
        short.setup("fit")


def test_rows_that_a_model_cannot_be_told_are_refused() -> None:
    family, config = parse_family(DIA)
    row = make_family_rows(config.num_codebooks, 1)[0]
    check_row(row, family, config)
    with pytest.raises(ValueError, match="instruct: dia takes no instructions; leave it out"):
        check_row(replace(row, instruct="Whisper."), family, config)
    with pytest.raises(ValueError, match="ref_text: dia does not read what is said before; leave it out"):
        check_row(replace(row, ref_text="a", ref_codes=row.codes), family, config)
    family, config = parse_family(make_config())
    with pytest.raises(ValueError, match="got 4 codebooks: expected 16"):
        check_row(replace(make_rows(1)[0], ref_text="a", ref_codes=row.codes), family, config)


def test_a_model_that_makes_voices_of_instructions_is_given_none(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-00000.parquet", make_told_rows())
    raw = {**make_config(), "tts_model_type": "voice_design"}
    data = build_data(tmp_path, speaker_embedding=None)
    data.attach(parse_config(raw))
    data.setup("fit")
    assert data.speaker_embedding == "none"
    assert all(data.encode_prompt(row).speaker is None for row in data.pick_validation(4))
    # The next model with the same data is one that takes voices.
    data.attach(parse_config(make_config()))
    data.setup("fit")
    assert data.speaker_embedding == "mean"
    assert data.voices.keys() == {row.speaker for row in make_told_rows()}
    assert all(data.encode_prompt(row).speaker is not None for row in data.pick_validation(4))


def test_without_a_name_the_first_voice_speaks_of_the_data_else_of_the_model(tmp_path: Path) -> None:
    config = make_config()
    config["talker_config"]["spk_id"] = {"vivian": 3065, "ryan": 3061}
    data = build_data(tmp_path)
    data.attach(parse_config(config))
    assert data.encode_prompt(PromptRow(text="a")).speaker == 3065
    data.voices = {"kim": 1}
    assert data.encode_prompt(PromptRow(text="a")).speaker == 1


def test_csm_learns_from_rows_that_go_on_from_speech() -> None:
    family, config = parse_family(CSM)
    model = build_model(CSM).eval()
    first, second = make_utterances(CSM, make_family_rows(config.num_codebooks, 2), {})
    told: dict[str, Any] = {"context_ids": second.text_ids, "context_codes": second.codes}
    prompt = replace(first, **told)
    batch = family.collate([prompt], config)
    spoken = family.collate_prompts([prompt], config)
    size = spoken["text_ids"].shape[1]
    for name in ("text_ids", "codes", "frame_mask"):  # what speaking reads is what training reads
        assert torch.equal(batch[name][:, :size], spoken[name])
    assert first.codes is not None
    assert torch.equal(batch["targets"][:-1], torch.from_numpy(first.codes))
    pair, alone = (model(family.collate(us, config)) for us in ([prompt, second], [prompt]))
    torch.testing.assert_close(pair.logits[: len(first.codes) + 1], alone.logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(alone.logits, model(family.collate([first], config)).logits, atol=1e-3)


def test_the_command_goes_on_from_a_recording_and_follows_an_instruction(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    (folder := tmp_path / "base").mkdir()
    save_model(folder)
    build_byte_tokenizer().save_pretrained(folder)
    said = synthesize(SENTENCES[0], VOICES["ada"])
    soundfile.write(tmp_path / "ref.wav", said, 24000, subtype="FLOAT")
    told = [f"--ref_audio={tmp_path / 'ref.wav'}", f"--ref_text={SENTENCES[0]}", "--instruct=Whisper."]
    greedy = [f"--sampling.{name}=false" for name in GREEDY]
    command = ["speak", f"--model={folder}", f"--out={tmp_path / 'out'}", "--text=so", *told, *greedy]
    assert main([*command, "--sampling.max_frames=5"]) == 0
    speaker, codec = open_speaker(str(folder), Sampling(**GREEDY, max_frames=5)), build_small_codec()
    (codes,) = codec.encode([torch.from_numpy(said)])
    reference = Reference(embedding=speaker.embed(said), text=SENTENCES[0], codes=codes.numpy())
    utterance = speaker.encode("so", None, None, reference=reference, instruct="Whisper.")
    (speech,) = speaker.speak([utterance], is_streaming=False)
    whole = codec.decode([torch.cat([codes, speech.codes])])[0]
    audio, _ = soundfile.read(tmp_path / "out/00000.wav", dtype="float32")
    np.testing.assert_allclose(audio, whole[len(codes) * 1920 :].clamp(-1, 1), atol=1e-4)
    (line,) = (tmp_path / "out/spoken.jsonl").read_text().splitlines()
    assert json.loads(line)["instruct"] == "Whisper."
    for other in (replace(utterance, instruct_ids=()), replace(utterance, context_ids=(), context_codes=None)):
        assert not torch.equal(speaker.speak([other], is_streaming=False)[0].codes, speech.codes)


def test_the_command_refuses_a_recording_without_a_voice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile = pytest.importorskip("soundfile")
    (folder := tmp_path / "base").mkdir()
    save_model(folder)
    build_byte_tokenizer().save_pretrained(folder)
    said = synthesize(SENTENCES[0], VOICES["ada"])
    soundfile.write(tmp_path / "silent.wav", 1e-4 * said, 24000, subtype="FLOAT")
    soundfile.write(tmp_path / "short.wav", said[:2000], 24000)
    command = ["speak", f"--model={folder}", f"--out={tmp_path / 'out'}", "--text=so"]
    for name, reason in (("silent", "silence: peak -8"), ("short", "too short: 0.08 s, at least 0.1 s")):
        assert main([*command, f"--ref_audio={tmp_path / name}.wav"]) != 0
        assert f"ref_audio: {tmp_path / name}.wav: {reason}" in capsys.readouterr().err
    assert main([*command, f"--ref_audio={tmp_path / 'short.wav'}", "--ref_text= "]) != 0
    assert "ref_text: empty: expected what is said in ref_audio" in capsys.readouterr().err


OFFICIAL = os.environ.get("LIT_FSDP_QWEN_TTS_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(OFFICIAL is None, reason="LIT_FSDP_QWEN_TTS_PYTHON names no Python that has qwen-tts")
@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("ref_text", [None, SENTENCES[0]])
def test_the_official_package_clones_alike(tmp_path: Path, is_streaming: bool, ref_text: str | None) -> None:
    soundfile = pytest.importorskip("soundfile")
    assert OFFICIAL is not None
    (folder := tmp_path / "base").mkdir()
    save_model(folder)
    build_byte_tokenizer().save_pretrained(folder)
    said = synthesize(SENTENCES[0], VOICES["ada"])
    said = said[: len(said) // 1920 * 1920]
    soundfile.write(tmp_path / "ref.wav", said, 24000, subtype="FLOAT")
    asked: dict[str, Any] = {"texts": ["hello there", "so"], "languages": ["Auto", "English"], "ref_text": ref_text}
    script = Path(__file__).parents[2] / "official_clone.py"
    command = [OFFICIAL, str(script), str(folder), str(tmp_path / "spoken.json"), str(tmp_path / "ref.wav")]
    request = json.dumps({**asked, "is_streaming": is_streaming, "max_frames": 8})
    done = subprocess.run([*command, request], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    speaker, codec = open_speaker(str(folder), Sampling(**GREEDY, max_frames=8)), build_small_codec()
    codes = codec.encode([torch.from_numpy(said)])[0].numpy() if ref_text is not None else None
    reference = Reference(embedding=speaker.embed(said), text=ref_text, codes=codes)
    prompts = [
        speaker.encode(text, None, language, reference=reference)
        for text, language in zip(asked["texts"], asked["languages"], strict=True)
    ]
    official = json.loads((tmp_path / "spoken.json").read_text())
    for wanted, prompt, own in zip(official, prompts, speaker.speak(prompts, is_streaming=is_streaming), strict=True):
        assert wanted["codes"] == own.codes.tolist()
        audio = speaker.decode(codec, own.codes, prompt)
        # Its cut is rounded, and may be a sample early.
        torch.testing.assert_close(audio, torch.tensor(wanted["audio"])[-len(audio) :], atol=1e-3, rtol=1e-3)
