"""One Hugging Face folder: written beside its place, tensor by tensor, and renamed when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from lit_fsdp.checkpoint.sharded import make_beside, replace_folder
from lit_fsdp.export.quantized import Quantizer
from lit_fsdp.export.safetensors_writer import open_tensor_files
from lit_fsdp.weights.hub_names import Part, convert_part

ADAPTER_CONFIG = "adapter_config.json"
_CONFIGS = ("config.json", ADAPTER_CONFIG)
_INDEX = "model.safetensors.index.json"


def check_out(out: Path, *sources: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something else than an exported model, or lies in what is read, or the reverse."""
    for source, what in zip(sources, ("the checkpoint", "the base model"), strict=False):
        if source.resolve().is_relative_to(out) or out.is_relative_to(source.resolve()):
            raise ValueError(f"out: {out} holds or lies in {what}: expected another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"out: {out} is a file: expected a folder to make")
    if any(out.iterdir()) and not overwrite:
        raise ValueError(f"out: {out} is not empty: expected a new folder, or set overwrite to true")
    if any(out.iterdir()) and not any((out / name).is_file() for name in _CONFIGS):
        raise ValueError(f"out: {out} has no config.json: it is not replaced, as it holds no exported model")


@contextmanager
def write_beside(out: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of ``out`` once the body has ended well."""
    beside = make_beside(out)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    replace_folder(out, beside)


def write_model(
    folder: Path,
    parts: Sequence[Part],
    read: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    model: PreTrainedModel,
    *,
    max_bytes: int,
    quantizer: Quantizer | None = None,
) -> int:
    """Write the weights of a model under the names of the Hub, in files of up to ``max_bytes``; return their bytes.

    ``read`` returns the inputs of one part, of the shapes and dtypes that it is given.

    Raises:
        ValueError: The disk is too small, or a value is beyond the dtype.
    """
    outputs = {name: tensor for part in parts for name, tensor in part.outputs.items()}
    if quantizer is not None:
        outputs = quantizer.convert(outputs)
    num_bytes = check_room(folder, outputs)
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(outputs, filename_pattern=pattern, max_shard_size=max_bytes)
    by_file = {file: {n: outputs[n] for n in names} for file, names in split.filename_to_tensors.items()}
    with open_tensor_files(folder, by_file) as write:
        for part in tqdm(parts, desc="writing tensors", delay=2.0):
            tensors = read(part.inputs)
            for name, tensor in tensors.items():
                if tensor.dtype == torch.float16 and torch.isinf(tensor).any():
                    raise ValueError(
                        f"dtype: {name} holds values beyond those of float16: expected bfloat16 or float32"
                    )
            tensors = convert_part(model, tensors)
            for name, tensor in (tensors if quantizer is None else quantizer.convert(tensors)).items():
                write(name, tensor)
    if split.is_sharded:
        num_parameters = sum(p.numel() for p in model.parameters())
        metadata = {"total_parameters": num_parameters, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return num_bytes


def check_room(folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of tensors; refuse more than the disk has left."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        needed = f"{num_bytes / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB left"
        raise ValueError(f"out: the model needs {needed}; free some, or choose another disk or dtype")
    return num_bytes


def write_small_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files by name, none of them outside of the folder."""
    for name, content in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"checkpoint: its file {name} would lie outside of the folder")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def list_files(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
