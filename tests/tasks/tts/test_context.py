"""CSM goes on from speech that it is given with its text, as Transformers has it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file
from speech_families import CSM, DIA, make_checkpoint
from transformers import CsmForConditionalGeneration

from lit_fsdp.cli.main import main
from lit_fsdp.tasks.tts.codec.formants import VOICES, synthesize
from lit_fsdp.tasks.tts.codec.loading import load_codec
from lit_fsdp.tasks.tts.generation import GREEDY, Sampling
from lit_fsdp.tasks.tts.speaker import Reference, open_speaker

AUDIO, END = 268, 269  # ids that stand for a frame and for the end of frames


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose codes depend on what was before, and are such as the codec has."""
    folder = make_checkpoint(CSM, tmp_path_factory.mktemp("base"))
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2 and not name.startswith("codec_model."):
            weight *= 4
    weights["lm_head.weight"][64:] = 0
    weights["depth_decoder.codebooks_head.weight"][..., 64:] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "a.wav"
    soundfile.write(path, synthesize("open the door", VOICES["ada"])[: 3 * 1920], 24000, subtype="FLOAT")
    return path


def test_what_it_says_after_speech_is_what_transformers_says(base: Path, reference: Path) -> None:
    speaker = open_speaker(str(base), Sampling(**GREEDY, max_frames=6))
    audio = torch.from_numpy(soundfile.read(reference, dtype="float32")[0])
    codes = load_codec(base).encode([audio])[0].numpy()
    given = Reference(text="ab", codes=codes)
    utterances = [speaker.encode("hello", None, None, reference=given), speaker.encode("hello", None, None)]
    told, plain = speaker.speak(utterances, is_streaming=False)
    assert told.codes.tolist() != plain.codes.tolist()

    stock: Any = CsmForConditionalGeneration.from_pretrained(base).eval()
    stock.generation_config.pad_token_id = stock.generation_config.eos_token_id = 0
    ids = [*utterances[0].context_ids, *[AUDIO] * len(codes), END, *utterances[0].text_ids]
    wanted = stock.generate(
        input_ids=torch.tensor([ids]),
        input_values=audio[None, None],
        input_values_cutoffs=torch.tensor([[len(audio)]]),
        do_sample=False,
        depth_decoder_do_sample=False,
        max_new_tokens=6,
    )[0]
    assert told.codes.tolist() == wanted[: len(told.codes)].tolist()


@pytest.mark.full
def test_the_command_takes_a_recording_with_its_text(
    base: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["speak", f"--model={base}", "--text=hello", "--sampling.max_frames=6", "--sampling.do_sample=false"]
    given = [f"--ref_audio={reference}", "--ref_text=ab"]
    for name, options in (("told", given), ("plain", [])):
        assert main([*command, f"--out={tmp_path / name}", *options]) == 0
    told, plain = (soundfile.read(tmp_path / name / "00000.wav")[0] for name in ("told", "plain"))
    assert not np.array_equal(told, plain)
    assert "cut off at sampling.max_frames 6: no end was written" in capsys.readouterr().out
    assert main([*command, f"--out={tmp_path / 'x'}", given[0]]) != 0
    assert "ref_text: missing: csm goes on from ref_audio" in capsys.readouterr().err
    assert main([*command, f"--out={tmp_path / 'x'}", given[1]]) != 0
    assert "ref_text: not used without ref_audio" in capsys.readouterr().err
    other = make_checkpoint(DIA, tmp_path / "dia")
    (tmp_path / "codec").mkdir()
    assert main(["speak", f"--model={other}", "--text=a", f"--out={tmp_path / 'x'}", f"--codec={base}", *given]) != 0
    assert "codebooks: expected 4" in capsys.readouterr().err


def test_its_own_limit_of_ten_seconds_is_not_followed(base: Path) -> None:
    own = json.dumps({"max_new_tokens": 125, "temperature": 1, "depth_decoder_top_k": 9})
    speaker = open_speaker(str(base))
    values = speaker.family.complete_sampling(Sampling(), own)
    assert (values.max_frames, values.temperature, values.predictor_top_k) == (1125, 1.0, 9)
    assert isinstance(values.temperature, float)  # which Transformers insists on
    assert speaker.family.complete_sampling(Sampling(max_frames=125), own).max_frames == 125


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ('{"top_k": "9"}', r"generation_config.json: top_k: got '9': expected a whole number"),
        ('{"temperature": true}', r"generation_config.json: temperature: got True: expected a number"),
        ('{"te', "generation_config.json: cannot read it: Unterminated"),
        ("[1]", "generation_config.json: cannot read it"),
    ],
)
def test_settings_of_a_model_that_cannot_be_are_named(base: Path, own: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_speaker(str(base)).family.complete_sampling(Sampling(), own)
