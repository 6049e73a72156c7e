"""From the shards of a checkpoint to one Hugging Face folder, without a process group or a GPU.

Tensors are read, cast, converted to the Hub's names and written one after the other: the host holds the largest of
them, and the piece of it that one rank has saved, never the model. A checkpoint of adapters becomes a folder of peft,
or they are merged into the model that they were trained over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_fsdp.checkpoint.reader import StoredCheckpoint, build_on_meta, find_checkpoint, find_run, open_checkpoint
from lit_fsdp.export.adapter import double_ranks, needs_base, write_adapter
from lit_fsdp.export.folder import ADAPTER_CONFIG, check_out, list_files, make_beside, write_model, write_small_files
from lit_fsdp.export.merge import AdaptedWeights, BaseWeights, find_aliases, open_base, read_lora, read_quantization
from lit_fsdp.export.model_card import write_model_card
from lit_fsdp.export.position_embeddings import ResizedCheckpoint, explain_size, resize_positions
from lit_fsdp.export.quantized import Quantizer
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.base_weights import BASE, LORA
from lit_fsdp.weights.hub_names import Part, list_saved_names, plan_parts

Dtype = Literal["keep", "float32", "bfloat16", "float16"]
_MAX_SHARD_GB = 5.0
_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Args:
        checkpoint: Where it came from.
        folder: Where it is.
        files: Their names.
        num_parameters: Shared ones counted once; of adapters, theirs.
        dtype: Of the weights; of several, one that holds all their values.
        num_bytes: Of all weights.
        notes: Sentences that whoever uses it should read.
    """

    checkpoint: Path
    folder: Path
    files: list[str]
    num_parameters: int
    dtype: str
    num_bytes: int
    notes: tuple[str, ...] = ()


def export_model(
    checkpoint: Path,
    out: Path,
    *,
    dtype: Dtype = "keep",
    max_shard_gb: float = _MAX_SHARD_GB,
    overwrite: bool = False,
    merge: bool = False,
    base: str | None = None,
    quantization: Quantization | None = None,
) -> Exported:
    """Write the model of a sharded checkpoint as a folder that ``from_pretrained`` reads.

    It is written beside its place and renamed when it is complete. The disk needs room for it, the host memory for
    its largest tensor. All files of the checkpoint are read once to verify them, those of the optimizer too.

    Args:
        checkpoint: Folder of a checkpoint, or of a run, of which the newest complete one is taken.
        out: The folder to make. Of a checkpoint of adapters, it is one that peft reads.
        dtype: Of the weights; ``keep`` leaves them as they were stored, merged ones as those of the base.
        max_shard_gb: Begin another file of weights above this size, in 10^9 bytes.
        overwrite: Replace an exported model that is there.
        merge: Add adapters to the weights of their base model, which makes a model that needs no peft.
        base: Where the base model is, if not under the name that the run knew it by: name on the Hub, or a folder.
        quantization: Write the weights of linear layers in 4 or 8 bits, as bitsandbytes has them; ``null`` does not.

    Raises:
        ValueError: With what is wrong with the checkpoint or a setting.
    """
    if quantization is not None:
        quantization.check()
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype: got {dtype!r}: expected one of {', '.join(get_args(Dtype))}")
    if not max_shard_gb > 0:
        raise ValueError(f"max_shard_gb: got {max_shard_gb}: expected above 0, such as 5")
    source = find_checkpoint(Path(checkpoint))
    out = Path(out).resolve()
    check_out(out, source, overwrite=overwrite)
    stored = open_checkpoint(source)
    if "speech" in stored.meta:
        raise ValueError(f"{source} holds speech, which `python -m lit_fsdp export-voice` writes")
    _check_combination(stored, merge=merge, base=base, max_shard_gb=max_shard_gb, quantization=quantization)
    folder = open_base(stored, base) if merge or (LORA in stored.meta and needs_base(read_lora(stored))) else None
    if folder is not None:
        check_out(out, source, folder, overwrite=overwrite)
    if LORA in stored.meta and not merge:
        return _export_adapter(stored, out, folder, dtype)
    stored = resize_positions(stored)
    max_bytes = int(max_shard_gb * 1e9)
    if merge:
        assert folder is not None
        return _export_merged(stored, out, folder, dtype, quantization, max_bytes=max_bytes)
    return _export_whole(stored, out, dtype, quantization, max_bytes=max_bytes)


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


# A whole model


def _export_whole(
    stored: StoredCheckpoint, out: Path, dtype: Dtype, quantization: Quantization | None, *, max_bytes: int
) -> Exported:
    model = build_on_meta(stored)
    parts = plan_parts(model, _choose_tensors(model, stored, dtype))
    aliases = find_aliases(model)

    def read(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sources = {name: _find_stored_name(name, aliases, stored) for name in wanted}
        tensors = stored.read({sources[name]: like for name, like in wanted.items()})
        return {name: tensors[sources[name]] for name in wanted}

    with make_beside(out) as folder:
        quantizer = _build_quantizer(stored, quantization, parts)
        num_bytes = write_model(folder, parts, read, model, max_bytes=max_bytes, quantizer=quantizer)
        name = _find_dtype(tensor.dtype for part in parts for tensor in part.outputs.values())
        num_parameters = sum(p.numel() for p in model.parameters())
        changes = {"quantization_config": quantizer.config} if quantizer is not None else {}
        _write_rest(folder, stored, out.name, model, name, num_parameters, **changes)
        files = list_files(folder)
    return Exported(
        checkpoint=stored.path,
        folder=out,
        files=files,
        num_parameters=num_parameters,
        dtype=name,
        num_bytes=num_bytes,
        notes=explain_size(stored),
    )


def _choose_tensors(model: PreTrainedModel, stored: StoredCheckpoint, dtype: Dtype) -> dict[str, Tensor]:
    """Return what to read, on the meta device, in the model's order; refuse a checkpoint of another model."""
    expected = model.state_dict()
    aliases = find_aliases(model)
    unknown = [name for name in stored.tensors if name not in expected]
    missing = [n for n in expected if not any(alias in stored.tensors for alias in aliases.get(n, [n]))]
    for what, names in (("lacks", missing), ("holds", unknown)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{stored.path} {what} {', '.join(names[:5])}{more}: it is no {type(model).__name__}")
    chosen: dict[str, Tensor] = {}
    for name in list_saved_names(model):
        there = stored.describe(_find_stored_name(name, aliases, stored))
        if there.shape != expected[name].shape:
            shapes = f"{tuple(there.shape)}, that of {type(model).__name__} {tuple(expected[name].shape)}"
            raise ValueError(f"{stored.path}: {name} has shape {shapes}")
        chosen[name] = there.to(_choose_dtype(there.dtype, dtype))
    return chosen


def _find_stored_name(name: str, aliases: Mapping[str, list[str]], stored: StoredCheckpoint) -> str:
    return next(alias for alias in [name, *aliases.get(name, [])] if alias in stored.tensors)


# Adapters


def _export_adapter(stored: StoredCheckpoint, out: Path, base: Path | None, dtype: Dtype) -> Exported:
    weights = AdaptedWeights(stored)
    opened: Any = nullcontext() if base is None else BaseWeights(base, build_on_meta(stored), weights.trained)
    with opened as base_weights, make_beside(out) as folder:
        wanted = None if dtype == "keep" else getattr(torch, dtype)
        num_parameters, num_bytes = write_adapter(folder, weights, base_weights, wanted)
        files = {name: text for name, text in stored.files.items() if name not in _MODEL_FILES}
        if base is not None:
            config = double_ranks(json.loads(files[ADAPTER_CONFIG]))
            files[ADAPTER_CONFIG] = json.dumps(config, indent=2, sort_keys=True) + "\n"
        write_small_files(folder, files)
        name = _find_dtype(wanted or stored.describe(n).dtype for n in weights.list_trained())
        card = write_model_card(
            out.name,
            architecture=type(build_on_meta(stored)).__name__,
            dtype=name,
            num_parameters=num_parameters,
            meta=stored.meta,
            run=find_run(stored.path),
            is_adapter=True,
            notes=explain_size(stored),
        )
        (folder / "README.md").write_text(card)
        names = list_files(folder)
    return Exported(
        checkpoint=stored.path,
        folder=out,
        files=names,
        num_parameters=num_parameters,
        dtype=name,
        num_bytes=num_bytes,
        notes=explain_size(stored),
    )


def _export_merged(
    stored: StoredCheckpoint, out: Path, base: Path, dtype: Dtype, quantization: Quantization | None, *, max_bytes: int
) -> Exported:
    weights = AdaptedWeights(stored)
    tied = build_on_meta(stored)
    is_untied = any(len(names) > 1 and name in weights.changed for name, names in find_aliases(tied).items())
    changes: dict[str, Any] = {"tie_word_embeddings": False} if is_untied else {}
    model = build_on_meta(stored, **changes)
    with BaseWeights(base, tied, weights.trained) as base_weights, make_beside(out) as folder:
        state = model.state_dict()
        dtypes = {name: _choose_dtype(base_weights.get_dtype(name), dtype) for name in list_saved_names(model)}
        parts = plan_parts(model, {name: state[name].to(wanted) for name, wanted in dtypes.items()})
        read = partial(_read_merged, weights, base_weights)
        quantizer = _build_quantizer(stored, quantization, parts)
        num_bytes = write_model(folder, parts, read, model, max_bytes=max_bytes, quantizer=quantizer)
        name = _find_dtype(tensor.dtype for part in parts for tensor in part.outputs.values())
        num_parameters = sum(p.numel() for p in model.parameters())
        changes |= {"quantization_config": quantizer.config} if quantizer is not None else {}
        _write_rest(folder, stored, out.name, model, name, num_parameters, **changes)
        files = list_files(folder)
    return Exported(
        checkpoint=stored.path,
        folder=out,
        files=files,
        num_parameters=num_parameters,
        dtype=name,
        num_bytes=num_bytes,
        notes=explain_size(stored),
    )


def _read_merged(weights: AdaptedWeights, base: BaseWeights, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    stored = weights.checkpoint
    for name, like in wanted.items():
        if name in weights.trained:
            tensors |= stored.read({name: like})
            continue
        tensor = base.read(name)
        tensor = weights.merge(name, tensor) if name in weights.layers else tensor
        if isinstance(stored, ResizedCheckpoint) and name == stored.positions.name:
            tensor = stored.positions.interpolate(tensor)
        tensors[name] = tensor.to(like.dtype)
    return tensors


# Both


def _build_quantizer(
    stored: StoredCheckpoint, settings: Quantization | None, parts: Iterable[Part]
) -> Quantizer | None:
    outputs = {name: tensor for part in parts for name, tensor in part.outputs.items()}
    return None if settings is None else Quantizer(build_on_meta(stored), settings, outputs)


def _choose_dtype(stored: torch.dtype, dtype: Dtype) -> torch.dtype:
    return getattr(torch, dtype) if dtype != "keep" and stored.is_floating_point else stored


def _find_dtype(dtypes: Iterable[torch.dtype]) -> str:
    """Return the name of the narrowest dtype that all weights can be loaded in without loss."""
    found = {dtype for dtype in dtypes if dtype.is_floating_point}
    return str(reduce(torch.promote_types, found)).removeprefix("torch.")


def _write_rest(
    folder: Path,
    stored: StoredCheckpoint,
    title: str,
    model: PreTrainedModel,
    dtype: str,
    num_parameters: int,
    **changes: Any,
) -> None:
    """Write configuration, tokenizer and model card."""
    files = {name: content for name, content in stored.files.items() if name != ADAPTER_CONFIG}
    config = {**json.loads(files["config.json"]), "dtype": dtype, **changes}
    files["config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_small_files(folder, files)
    card = write_model_card(
        title,
        architecture=type(model).__name__,
        dtype=dtype,
        num_parameters=num_parameters,
        meta=stored.meta,
        run=find_run(stored.path),
        notes=explain_size(stored),
    )
    (folder / "README.md").write_text(card)
