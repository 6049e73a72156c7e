"""Of a model on the Hub, what is read is fetched, and nothing else."""

import json
import logging
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from lit_fsdp.tasks.tts.families.qwen3_layout import encode_text
from lit_fsdp.tasks.tts.pretrained import fetch_speech_model
from lit_fsdp.tasks.tts.tokenizer import load_tokenizer
from lit_fsdp.weights import base_weights as base_model
from lit_fsdp.weights.base_weights import get_pretrained_folder

BESIDE = ["config.json", "generation_config.json", "tokenizer.json", "ckpt.pt", "pytorch_model.bin"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for a repository, and the cache beside it."""
    (remote := tmp_path / "remote").mkdir()
    (cache := tmp_path / "cache").mkdir()

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False, **_: Any) -> str:
        assert name == "someone/speech"
        for path in remote.rglob("*"):
            own = path.relative_to(remote).as_posix()
            if path.is_file() and not local_files_only and any(fnmatch(own, pattern) for pattern in allow_patterns):
                (cache / own).parent.mkdir(exist_ok=True)
                shutil.copy(path, cache / own)
        return str(cache)

    monkeypatch.setattr(base_model, "snapshot_download", download)
    return remote


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        (None, {"model.safetensors"}),
        ("transformers.safetensors", {f"transformers-0000{i}-of-00002.safetensors" for i in (1, 2)}),
        ("transformers.safetensors.index.json", {f"transformers-0000{i}-of-00002.safetensors" for i in (1, 2)}),
    ],
)
def test_of_weights_that_are_there_twice_those_that_are_read_are_fetched(
    hub: Path, named: str | None, wanted: set[str]
) -> None:
    index = "transformers.safetensors.index.json"
    parts = [f"transformers-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in [*BESIDE, *parts, index, "model.safetensors", "speech_tokenizer/model.safetensors"]:
        (hub / name).parent.mkdir(exist_ok=True)
        (hub / name).touch()
    (hub / "config.json").write_text(json.dumps({} if named is None else {"transformers_weights": named}))
    fetch_speech_model("someone/speech")
    folder = get_pretrained_folder("someone/speech")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    beside = {"config.json", "generation_config.json", "tokenizer.json", index, "speech_tokenizer/model.safetensors"}
    assert found == wanted | beside


def test_the_tokenizer_is_read_beside_a_model_that_transformers_does_not_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # As Qwen3-TTS is published: without tokenizer.json.
    vocab = {letter: i for i, letter in enumerate([*sorted(ByteLevel.alphabet()), "he", "ass", "istant", "assistant"])}
    merges = ["#version: 0.2", "h e"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    added = {str(len(vocab) + i): {"content": token, **flags} for i, token in enumerate([*special, "assistant"])}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<|endoftext|>"}))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_tts", "architectures": ["Qwen3TTS"]}')
    logging.getLogger("transformers").addHandler(caplog.handler)  # it does not propagate
    try:
        tokenizer = load_tokenizer(str(tmp_path))
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    ids = encode_text(tokenizer, "he")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "assistant", "\u010a", "he"]
    assert "instantiate a model" not in caplog.text
