"""What lies in a Hugging Face folder: weights, written tensor by tensor, and small files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from lit_fsdp.errors import join_names
from lit_fsdp.export.quantized import Quantizer
from lit_fsdp.export.safetensors_writer import open_tensor_files
from lit_fsdp.weights.file_names import check_names, join_name
from lit_fsdp.weights.hub_names import Part, convert_part
from lit_fsdp.weights.safetensors_io import INDEX

ADAPTER_CONFIG = "adapter_config.json"
_SOURCE = "checkpoint"  # in errors
# Of configurations, tokenizers and templates of chats. No code, and no weights that would be unpickled.
_SMALL = (".json", ".jinja", ".txt", ".model", ".tokenizer", ".codes", ".bpe", ".spm", ".tiktoken", ".vocab")


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
        for part in tqdm(parts, desc="writing tensors", delay=2.0, disable=None):  # into a terminal only
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
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return num_bytes


def check_room(folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of tensors; refuse more than the disk has left."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        needed = f"{num_bytes / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB left"
        raise ValueError(f"out: the model needs {needed}; free some, or choose another disk or dtype")
    return num_bytes


def join_dtypes(tensors: Iterable[Tensor]) -> str:
    """Return the name of the narrowest dtype that all weights can be loaded in without loss."""
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return str(reduce(torch.promote_types, found)).removeprefix("torch.")


def write_small_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files by the names that a checkpoint tells, all or none; none of them outside of the folder.

    Raises:
        ValueError: A name would lead out of the folder, or ends as code or weights do. Or a file is neither text nor
            bytes.
    """
    check_names(files, source=_SOURCE)
    if strange := [name for name in files if not name.endswith(_SMALL)]:
        raise ValueError(
            f"{_SOURCE}: its file {strange[0]} is none of a configuration or a tokenizer: expected a name that ends in "
            f"{join_names(_SMALL)}; choose another checkpoint, or leave it out of checkpoint['export']"
        )
    for name, content in files.items():
        if not isinstance(content, str | bytes):
            raise ValueError(f"{_SOURCE}: its file {name} is a {type(content).__name__}: expected text")  # noqa: TRY004
        path = join_name(folder, name, source=_SOURCE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
