"""The codec against the official package."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from speech_golden import CODEC, FILE, fill, make_audio

from lit_fsdp.tasks.tts.codec.codec_12hz import Codec
from lit_fsdp.tasks.tts.codec.loading import check_codec, load_codec

GOLDEN = load_file(FILE)
CLIPS = [make_audio(3.2, 130.0), make_audio(1.6, 210.0)]


@pytest.fixture(scope="module")
def codec() -> Codec:
    made = Codec(deepcopy(CODEC)).eval()
    fill(made)
    return made


def test_codes_are_the_official_ones_beyond_the_window(codec: Codec) -> None:
    # 80 positions: with the window of 25 from the configuration the end would get other codes.
    for codes, i in zip(codec.encode(CLIPS), (0, 1), strict=True):
        assert torch.equal(codes, GOLDEN[f"codes {i}"])


def test_the_window_of_the_configuration_would_change_the_codes(codec: Codec) -> None:
    config = codec.encoder.encoder_transformer.config
    wide, config.sliding_window = config.sliding_window, 25
    try:
        (codes,) = codec.encode(CLIPS[:1])
    finally:
        config.sliding_window = wide
    assert not torch.equal(codes, GOLDEN["codes 0"])
    assert torch.equal(codes[:10], GOLDEN["codes 0"][:10])


def test_audio_is_the_official_one(codec: Codec) -> None:
    (audio,) = codec.decode([GOLDEN["codes 0"]])
    assert len(audio) == 40 * 1920
    torch.testing.assert_close(audio[::16], GOLDEN["audio"], atol=1e-3, rtol=1e-3)


@pytest.mark.full
def test_long_audio_is_decoded_in_the_official_chunks(codec: Codec) -> None:
    (audio,) = codec.decode([torch.cat([GOLDEN["codes 0"]] * 9)[:330]])
    torch.testing.assert_close(audio[300 * 1920 :: 64], GOLDEN["long audio"], atol=1e-3, rtol=1e-3)


@pytest.mark.full
def test_audio_in_pieces_is_that_of_the_whole(codec: Codec) -> None:
    # Over a chunk, and over many windows of attention; some pieces are shorter than a kernel reaches back.
    codes = torch.cat([GOLDEN["codes 0"]] * 9)[:330]
    (whole,) = codec.decode([codes])
    with codec.open_stream() as stream:
        sizes = [1, 1, 2, 3, 0, 4, 289, 7, 23]
        pieces = [stream.decode(part) for part in codes.split(sizes)]
    assert [len(piece) for piece in pieces] == [1920 * size for size in sizes]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=5e-5, rtol=0)  # a 16-bit sample is 3e-5
    assert torch.equal(codec.decode([codes])[0], whole)  # nothing of the stream stays


def test_a_clip_gets_the_same_codes_in_any_batch(codec: Codec) -> None:
    clips = [make_audio(seconds, 150.0) for seconds in (0.5, 1.37, 0.9, 2.03)]
    together = codec.encode(clips)
    for clip, codes in zip(clips, together, strict=True):
        assert torch.equal(codec.encode([clip])[0], codes)
    assert [len(codes) for codes in together] == [7, 18, 12, 26]


def test_nothing_decodes_to_nothing(codec: Codec) -> None:
    assert len(codec.decode([torch.zeros(0, 16, dtype=torch.int64)])[0]) == 0


def test_a_codec_is_read_strictly(codec: Codec, tmp_path: Path) -> None:
    folder = tmp_path / "speech_tokenizer"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"config.json is missing: expected the folder speech_tokenizer"):
        load_codec(tmp_path)
    (folder / "config.json").write_text(json.dumps(CODEC))
    state = codec.state_dict()
    save_file(state, folder / "model.safetensors")
    assert all(torch.equal(value, state[name]) for name, value in load_codec(tmp_path).state_dict().items())
    state.pop("decoder.pre_conv.conv.bias")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"Missing key.*decoder.pre_conv.conv.bias"):
        load_codec(tmp_path)


def test_a_model_in_the_place_of_a_codec_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "dia"}')
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"codec: .*config.json is that of a model of type 'dia': expected .* DAC"):
        check_codec(str(tmp_path), "codec", num_codebooks=4, codebook_size=64)
