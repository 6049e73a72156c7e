"""Names that others wrote stay inside of the folder that they are names in, wherever they are read."""

import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import join_states, load_checkpoint, save_checkpoint
from lit_fsdp.export.model import export_model
from lit_fsdp.weights.file_names import is_plain_name, join_name
from lit_fsdp.weights.safetensors_io import TensorFiles

HOSTILE: list[Any] = [
    *("../x", "/etc/x", "..", ".", "", "a/../../x", "a//x", "a/", "./x", "a\0b", "a\nb", "\ud800", "..\\x", " x", "x "),
    *(3, None, ["x"], "x" * 256, "é" * 128),
]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_names_that_lead_elsewhere_are_refused_with_what_told_them(name: Any) -> None:
    assert not is_plain_name(name)
    with pytest.raises(ValueError, match=r"^config.json: got .* for the name of a file: expected one to 255 printable"):
        join_name(Path("here"), name, source="config.json")


@pytest.mark.parametrize("name", ["x", "a/b/c.json", "..x", "...", "x..", "Größe 1", "x" * 255, "epoch=0-step=2"])
def test_other_names_are_names(name: str) -> None:
    assert join_name(Path("here"), name, source="config.json") == Path("here") / name


# Where they are read: what each of these writes leads to a file that is there.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model, beside a file that it has no business with."""
    save_file({"weight": torch.ones(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_of_safetensors_cannot_name_files_elsewhere(folder: Path, absolute: bool) -> None:
    name = str(folder.parent / "outside.safetensors") if absolute else "../outside.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ValueError, match="for the name of a file"):
        TensorFiles(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "../index.json"])
def test_a_configuration_cannot_name_weights_elsewhere(folder: Path, name: str) -> None:
    (folder.parent / "index.json").write_text(json.dumps({"weight_map": {}}))
    (folder / "config.json").write_text(json.dumps({"transformers_weights": name}))
    with pytest.raises(ValueError, match=r"config\.json: got .* for the name of a file"):
        TensorFiles(folder)


@pytest.mark.parametrize("content", ['{"weight_map": 3}', '{"weight_map": {"weight": [1]}}', "[]"])
def test_an_index_that_is_none_is_refused(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        TensorFiles(folder)


def describe(path: Path) -> dict[str, int]:
    return {"bytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}


def change_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest["files"])
    (path / MANIFEST).write_text(json.dumps(manifest))


def name_in_manifest(path: Path) -> None:
    """Let the list of a checkpoint's files name one beside it, in its true size."""
    other = path.parent / "outside.safetensors"
    change_manifest(path, lambda files: files.update({"../outside.safetensors": describe(other)}))


def name_in_metadata(path: Path) -> None:
    """Let a checkpoint say that its tensors lie in a file beside it, which is the same."""
    (path.parent / "outside.distcp").write_bytes((path / "__0_0.distcp").read_bytes())
    metadata = pickle.loads((path / ".metadata").read_bytes())  # ours
    for there in metadata.storage_data.values():
        there.relative_path = "../outside.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    change_manifest(path, lambda files: files.update({".metadata": describe(path / ".metadata")}))


@pytest.mark.parametrize("tamper", [name_in_manifest, name_in_metadata])
def test_a_checkpoint_cannot_name_files_elsewhere(folder: Path, tamper: Callable[[Path], None]) -> None:
    path = folder.parent / "run.ckpt"
    model = torch.nn.Linear(2, 2)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_checkpoint(path, join_states(state, []), meta={EXPORT: {"config.json": "{}"}})
    tamper(path)
    with pytest.raises(ValueError, match="for the name of a file"):
        load_checkpoint(path, torch.nn.ModuleDict({"model": model}))
    with pytest.raises(ValueError, match="for the name of a file"):
        export_model(path, folder.parent / "out")


STRANGE: list[Any] = [
    *({"../stolen.json": "{}"}, {"{root}/stolen.json": "{}"}, {"x.json": {"a": 1}}),
    *({name: "x"} for name in ("modeling.py", "pytorch_model.bin", "a/b.safetensors", "json", "x.sh")),
]


@pytest.mark.parametrize("files", STRANGE)
def test_an_export_writes_no_file_elsewhere(folder: Path, files: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, architectures=["LlamaForCausalLM"], **sizes))
    path = folder.parent / "run.ckpt"
    files = {name.format(root=folder.parent): content for name, content in files.items()}
    meta = {EXPORT: {"config.json": model.config.to_json_string(), **files}}
    save_checkpoint(path, join_states({f"model.{n}": t for n, t in model.state_dict().items()}, []), meta=meta)
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(ValueError, match=r"^checkpoint: "):
        export_model(path, folder.parent / "out")
    assert sorted(folder.parent.rglob("*")) == before
