"""From the shards of a checkpoint to one Hugging Face folder, without a process group or a GPU.

Tensors are read, cast, converted to the Hub's names and written one after the other: the host holds the largest of
them, and the piece of it that one rank has saved, never the model. A checkpoint of adapters becomes a folder of peft,
or they are merged into the model that they were trained over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_fsdp.checkpoint.manifest import Verify, check_verify
from lit_fsdp.checkpoint.reader import StoredCheckpoint, build_on_meta, open_checkpoint, resolve_checkpoint
from lit_fsdp.checkpoint.remote import Location
from lit_fsdp.errors import join_names
from lit_fsdp.export.adapter import double_ranks, needs_base, write_adapter
from lit_fsdp.export.folder import ADAPTER_CONFIG, join_dtypes, write_model, write_small_files
from lit_fsdp.export.gguf_file import GGUFType, check_gguf, write_gguf
from lit_fsdp.export.hub import find_place, push_folder
from lit_fsdp.export.merge import AdaptedWeights, BaseWeights, list_aliases, open_base, read_lora, read_quantization
from lit_fsdp.export.model_card import write_model_card
from lit_fsdp.export.out_folder import check_out, list_files, locate_out, write_beside
from lit_fsdp.export.position_embeddings import explain_size, resize_positions
from lit_fsdp.export.quantized import Quantizer
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.base_weights import BASE, LORA
from lit_fsdp.weights.hub_names import list_saved_names, plan_parts
from lit_fsdp.weights.prequantized import QuantizedFiles

Dtype = Literal["keep", "float32", "bfloat16", "float16"]
_MAX_SHARD_GB = 5.0
_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    checkpoint: Location
    folder: Path
    files: list[str]
    num_parameters: int  # shared ones counted once; of adapters, theirs
    dtype: str  # of the weights; of several, one that holds all their values
    num_bytes: int  # of all weights
    notes: tuple[str, ...] = ()  # sentences that whoever uses it should read
    url: str | None = None  # of the commit on the Hub


def export_model(
    checkpoint: str | Path,
    out: Path,
    *,
    dtype: Dtype = "keep",
    max_shard_gb: float = _MAX_SHARD_GB,
    overwrite: bool = False,
    merge: bool = False,
    base: str | None = None,
    quantization: Quantization | None = None,
    gguf: GGUFType | None = None,
    verify: Verify = "full",
    push_to_hub: str | None = None,
    private: bool = True,
    commit_message: str | None = None,
) -> Exported:
    """Write the model of a sharded checkpoint as a folder that ``from_pretrained`` reads.

    It is written beside its place, by one process at a time, and renamed when it is complete. The disk needs room for
    it, the host memory for its largest tensor.

    Args:
        checkpoint: Folder of a checkpoint, or of a run, of which the newest complete one is taken; or an address such
            as s3://bucket/run.
        out: The folder to make, on this machine. Of a checkpoint of adapters, it is one that peft reads.
        dtype: Of the weights; ``keep`` leaves them as they were stored, merged ones as those of the base.
        max_shard_gb: Begin another file of weights above this size, in 10^9 bytes.
        overwrite: Replace an exported model that is there. A folder with files that no export wrote is refused.
        merge: Add adapters to the weights of their base model, which makes a model that needs no peft.
        base: Where the base model is, if not under the name that the run knew it by: name on the Hub, or a folder.
        quantization: Write the weights of linear layers in 4 or 8 bits, as bitsandbytes has them; ``null`` does not.
        gguf: Instead of a Hugging Face folder, one GGUF file for llama.cpp, tokenizer and all, with matrices of this
            type. For models of the families Llama, Qwen 2 and 3, and Gemma.
        verify: ``full`` first reads all files of the checkpoint, those of the optimizer too, to compare their
            checksums. ``sizes`` does so only for files up to 16 MiB, and compares the sizes of the others.
        push_to_hub: Then send the folder to the Hugging Face Hub under this name, such as user/my-model. The token is
            that of ``hf auth login`` or of HF_TOKEN.
        private: Whether only you, or your organization, see it there.
        commit_message: Of what is sent. By default it names the step.

    Raises:
        ValueError: With what is wrong with the checkpoint or a setting.
        RuntimeError: The folder is complete, but could not be sent.
    """
    _check_values(dtype, max_shard_gb, verify, quantization)
    _check_push(push_to_hub, private=private, commit_message=commit_message)
    out = locate_out(out)
    source = resolve_checkpoint(checkpoint)
    check_out(out, source, overwrite=overwrite)
    # Whether it may be sent, before all is read.
    place = None if push_to_hub is None else find_place(push_to_hub, private=private)
    stored = open_checkpoint(source, verify)
    if "speech" in stored.meta:
        raise ValueError(f"{source} holds speech, which `python -m lit_fsdp export-voice` writes")
    _check_combination(stored, merge=merge, base=base, max_shard_gb=max_shard_gb, quantization=quantization)
    if gguf is not None:
        _check_gguf_settings(stored, dtype, max_shard_gb, quantization, merge=merge)
    needs_files = merge or (LORA in stored.meta and needs_base(read_lora(stored)))
    base_folder = open_base(stored, base) if needs_files else None
    sources = [source] if base_folder is None else [source, base_folder]
    title = out.name if place is None else place.name
    is_adapter = LORA in stored.meta and not merge
    stored = stored if is_adapter else resize_positions(stored)
    adapted = AdaptedWeights(stored) if LORA in stored.meta else None
    with (
        nullcontext() if base_folder is None else QuantizedFiles(base_folder) as files,
        write_beside(out, *sources, overwrite=overwrite) as folder,
    ):
        base_weights = None
        if adapted is not None and files is not None:
            base_weights = BaseWeights(files, build_on_meta(stored), adapted.trained)
        if adapted is not None and is_adapter:
            written = _write_adapter(folder, adapted, base_weights, dtype)
        else:
            max_bytes = int(max_shard_gb * 1e9)
            written = _write_whole(
                folder, stored, adapted, base_weights, dtype, quantization, max_bytes=max_bytes, gguf=gguf, name=title
            )
        num_parameters, dtype_name, num_bytes = written
        card = write_model_card(
            title,
            stored,
            dtype_name,
            num_parameters,
            is_adapter=is_adapter,
            is_gguf=gguf is not None,
            is_pushed=place is not None,
            quantized_more=() if adapted is None else adapted.quantized_more,
            unquantized=None if adapted is None else adapted.unquantized,
        )
        (folder / "README.md").write_text(card)
    message = commit_message or f"Model of step {int(stored.meta.get('global_step', 0)):,}"
    url = None if place is None else push_folder(out, place, message)
    return Exported(
        checkpoint=stored.path,
        folder=out,
        files=list_files(out),
        num_parameters=num_parameters,
        dtype=dtype_name,
        num_bytes=num_bytes,
        notes=explain_size(stored),
        url=url,
    )


def _check_values(dtype: Dtype, max_shard_gb: float, verify: Verify, quantization: Quantization | None) -> None:
    """Refuse values that no checkpoint would make right."""
    if quantization is not None:
        quantization.check()
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype: got {dtype!r}: expected one of {', '.join(get_args(Dtype))}")
    check_verify(verify)
    if not max_shard_gb > 0:
        raise ValueError(f"max_shard_gb: got {max_shard_gb}: expected above 0, such as 5")


def _check_push(push_to_hub: str | None, *, private: bool, commit_message: str | None) -> None:
    if push_to_hub is None and (not private or commit_message is not None):
        name = "commit_message" if private else "private"
        raise ValueError(f"{name}: not used without push_to_hub, which sends the folder; set that, or leave it out")


def _check_combination(
    stored: StoredCheckpoint, *, merge: bool, base: str | None, max_shard_gb: float, quantization: Quantization | None
) -> None:
    """Refuse settings that would be ignored, or cannot be followed."""
    if LORA not in stored.meta:
        for name, value in (("merge", merge), ("base", base)):
            if value:
                got = str(value).lower() if name == "merge" else repr(value)
                raise ValueError(f"{name}: got {got}: {stored.path} holds a whole model and no adapters; leave it out")
        return
    if BASE not in stored.meta:
        raise ValueError(
            f"{stored.path} holds adapters over random weights, which no other tool could load; train them over a "
            "model of pretrained"
        )
    lora, trained_over = read_lora(stored), read_quantization(stored)
    if merge:
        return
    if quantization is not None:
        raise ValueError("quantization: adapters are not quantized; set merge to true, or leave it out")
    if needs_base(lora) and trained_over is not None:
        raise ValueError(
            f"merge: got false: adapters of init_lora_weights {lora.init_lora_weights!r} over "
            f"{trained_over.type} weights fit only what was left "
            "of these, which no other tool could load; set merge to true, which gives the model as it was trained"
        )
    if base is not None and not needs_base(lora):
        raise ValueError(
            f"base: got {base!r}: adapters of init_lora_weights {lora.init_lora_weights!r} are "
            "exported without it; leave it out"
        )
    if max_shard_gb != _MAX_SHARD_GB:
        raise ValueError(f"max_shard_gb: got {max_shard_gb}: adapters are one file; leave it out")


def _check_gguf_settings(
    stored: StoredCheckpoint, dtype: Dtype, max_shard_gb: float, quantization: Quantization | None, *, merge: bool
) -> None:
    if LORA in stored.meta and not merge:
        raise ValueError("gguf: adapters alone are no model: set merge to true, or leave gguf out")
    for name, is_set in {
        "dtype": dtype != "keep",
        "max_shard_gb": max_shard_gb != _MAX_SHARD_GB,
        "quantization": quantization is not None,
    }.items():
        if is_set:
            raise ValueError(f"{name}: not used with gguf, which says the type of all weights; leave it out")
    check_gguf(build_on_meta(stored).config, stored.files)


def _write_adapter(
    folder: Path, weights: AdaptedWeights, base: BaseWeights | None, dtype: Dtype
) -> tuple[int, str, int]:
    """Write a folder of peft; return the number of parameters, their dtype and their bytes."""
    outputs = write_adapter(folder, weights, base, None if dtype == "keep" else getattr(torch, dtype))
    files = {name: text for name, text in weights.checkpoint.files.items() if name not in _MODEL_FILES}
    if base is not None:
        files[ADAPTER_CONFIG] = _format_json(double_ranks(json.loads(files[ADAPTER_CONFIG])))
    write_small_files(folder, files)
    num_bytes = sum(tensor.nbytes for tensor in outputs)
    return sum(tensor.numel() for tensor in outputs), join_dtypes(outputs), num_bytes


def _write_whole(
    folder: Path,
    stored: StoredCheckpoint,
    adapted: AdaptedWeights | None,
    base: BaseWeights | None,
    dtype: Dtype,
    quantization: Quantization | None,
    *,
    max_bytes: int,
    gguf: GGUFType | None,
    name: str,
) -> tuple[int, str, int]:
    """Write a model with all its weights, adapters merged; return the same."""
    changes: dict[str, Any] = {}
    model = build_on_meta(stored)
    read: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    if adapted is not None and base is not None:
        changed = {*adapted.layers, *adapted.trained}
        if any(len(names) > 1 and name in changed for name, names in list_aliases(model).items()):
            changes["tie_word_embeddings"] = False
            model = build_on_meta(stored, **changes)
        state = model.state_dict()
        tensors = {name: state[name].to(base.get_dtype(name)) for name in list_saved_names(model)}
        read = partial(adapted.read_merged, base)
    else:
        sources = _match_names(model, stored)
        tensors = {name: stored.describe(source) for name, source in sources.items()}
        read = partial(_read_stored, stored, sources)
    if gguf is not None:
        path = folder / f"{name.rpartition('/')[2]}-{gguf}.gguf"
        num_bytes = write_gguf(path, gguf, plan_parts(model, tensors), read, model, stored.files, name)
        return sum(p.numel() for p in model.parameters()), gguf, num_bytes
    if dtype != "keep":
        tensors = {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in tensors.items()}
    parts = plan_parts(model, tensors)
    outputs = {name: tensor for part in parts for name, tensor in part.outputs.items()}
    quantizer = None if quantization is None else Quantizer(build_on_meta(stored), quantization, outputs)
    num_bytes = write_model(folder, parts, read, model, max_bytes=max_bytes, quantizer=quantizer)
    if quantizer is not None:
        changes["quantization_config"] = quantizer.config
    files = {name: content for name, content in stored.files.items() if name != ADAPTER_CONFIG}
    dtype_name = join_dtypes(outputs.values())
    files["config.json"] = _format_json({**json.loads(files["config.json"]), "dtype": dtype_name, **changes})
    write_small_files(folder, files)
    return sum(p.numel() for p in model.parameters()), dtype_name, num_bytes


def _match_names(model: PreTrainedModel, stored: StoredCheckpoint) -> dict[str, str]:
    """Map the tensors to save, in the model's order, to those stored; refuse a checkpoint of another model."""
    expected = model.state_dict()
    aliases = list_aliases(model)
    known = {name: [n for n in (name, *aliases.get(name, ())) if n in stored.tensors] for name in expected}
    unknown = [name for name in stored.tensors if name not in expected]
    missing = [name for name, names in known.items() if not names]
    for what, names in (("lacks", missing), ("holds", unknown)):
        if names:
            raise ValueError(f"{stored.path} {what} {join_names(names)}: it is no {type(model).__name__}")
    sources = {name: known[name][0] for name in list_saved_names(model)}
    for name, source in sources.items():
        if (shape := stored.describe(source).shape) != expected[name].shape:
            shapes = f"{tuple(shape)}, that of {type(model).__name__} {tuple(expected[name].shape)}"
            raise ValueError(f"{stored.path}: {name} has shape {shapes}")
    return sources


def _read_stored(
    stored: StoredCheckpoint, sources: Mapping[str, str], wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    tensors = stored.read({sources[name]: like for name, like in wanted.items()})
    return {name: tensors[sources[name]] for name in wanted}


def _format_json(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
