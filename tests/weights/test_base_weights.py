"""A model is told from others by all of its values, and from a copy of itself by nothing."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lit_fsdp.weights.base_weights import begin_fingerprint, describe_base, is_base, knows_all_values
from lit_fsdp.weights.safetensors_io import compute_fingerprint, sample_fingerprint

ROWS = 512


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(ROWS, 8, generator=generator) for name in ("a", "b")} | {"scale": torch.tensor(2.0)}


def test_any_changed_row_is_another_model_and_files_divided_otherwise_are_not(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    fingerprint = describe_base(str(save(tmp_path / "base", tensors)), None)["fingerprint"]
    for row in (0, 100, ROWS // 2, ROWS - 1):
        changed = {**tensors, "b": tensors["b"].clone()}
        changed["b"][row, 3] += 1e-6
        assert not is_base(fingerprint, save(tmp_path / f"row {row}", changed))
    assert not is_base(fingerprint, save(tmp_path / "scale", {**tensors, "scale": torch.tensor(3.0)}))
    swapped = {**tensors, "a": tensors["b"], "b": tensors["a"]}
    assert not is_base(fingerprint, save(tmp_path / "swapped", swapped))

    parts = tmp_path / "parts"
    parts.mkdir()
    save_file({"b": tensors["b"]}, parts / "1.safetensors")
    save_file({"a": tensors["a"], "scale": tensors["scale"]}, parts / "2.safetensors", metadata={"format": "pt"})
    index = '{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "scale": "2.safetensors"}}'
    (parts / "model.safetensors.index.json").write_text(index)
    assert is_base(fingerprint, parts)


def test_a_file_is_read_in_full_once_until_it_changes(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save(tmp_path / "base", tensors)
    read, whole = [], Path.open

    def watched(path: Path, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("buffering") == 0:
            read.append(path.name)
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", watched)
    first, second = (describe_base(str(base), None)["fingerprint"] for _ in range(2))
    assert first == second
    assert read == ["model.safetensors"]
    save_file({**tensors, "scale": torch.tensor(3.0)}, base / "model.safetensors")
    assert describe_base(str(base), None)["fingerprint"] != first
    assert len(read) == 2


def test_without_a_cache_it_is_computed_each_time(
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    names = {name: f"{i}.safetensors" for i, name in enumerate(tensors)}
    for name, part in names.items():
        save_file({name: tensors[name]}, base / part)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "file"))
    fingerprint = describe_base(str(base), None)["fingerprint"]
    (said,) = caplog.messages  # of three files
    assert said.startswith(f"{tmp_path / 'file'}: the digests of a model cannot be kept")
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    assert is_base(fingerprint, base)

    def fail_elsewhere(*_: object) -> None:  # in the process that this one has waited for
        raise ValueError("OSError: gone")

    monkeypatch.setattr("lit_fsdp.weights.safetensors_io.compute_once", fail_elsewhere)
    assert is_base(fingerprint, base)


def test_the_fingerprint_of_an_earlier_release_is_compared_by_samples_which_is_said(
    tensors: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = save(tmp_path / "base", tensors)
    fingerprint = sample_fingerprint(base)
    with caplog.at_level(logging.WARNING):
        assert is_base(fingerprint, base)
    (line,) = caplog.messages
    assert "compared by samples of its weights only: the checkpoint is of an earlier release" in line
    assert not is_base(fingerprint, save(tmp_path / "other", {**tensors, "a": tensors["a"] + 1}))


def test_what_takes_long_to_read_is_known_by_samples_until_it_is_read(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, is_read = save(tmp_path / "base", tensors), threading.Event()
    known = describe_base(str(base), None)

    def read_slowly(folder: Path) -> str:
        assert is_read.wait(60)
        return compute_fingerprint(folder)

    monkeypatch.setattr("lit_fsdp.weights.base_weights.compute_fingerprint", read_slowly)
    monkeypatch.setattr("lit_fsdp.weights.base_weights._PATIENCE_S", 0.01)
    begun = begin_fingerprint(str(base))
    try:
        first = describe_base(str(base), None)
    finally:
        is_read.set()
    assert first == {**known, "fingerprint": sample_fingerprint(base)}
    assert (knows_all_values(first), knows_all_values(known)) == (False, True)
    begun.result(60)
    assert describe_base(str(base), None) == known
