"""Checkpoints in one file, as Lightning's own strategies write them, so that runs can move between strategies.

Rank 0 holds the whole model and optimizer state in host memory while it writes or reads one.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from lit_fsdp.checkpoint.latest import SAVE_NUMBER, has_end
from lit_fsdp.checkpoint.leftovers import make_room
from lit_fsdp.checkpoint.manifest import Verify
from lit_fsdp.checkpoint.optimizer_state import collect_state, drop_state, keep_kernels, make_loadable_state
from lit_fsdp.checkpoint.places import put_in_place, remove_older, write_beside
from lit_fsdp.checkpoint.remote import Location, RemotePath
from lit_fsdp.checkpoint.sharded import (
    agree,
    check_optimizers,
    check_same_groups,
    check_same_optimizer,
    drop_compiled,
    set_weights,
    to_plain,
)
from lit_fsdp.checkpoint.untrusted import load_plain
from lit_fsdp.errors import join_names
from lit_fsdp.weights.shard_writer import get_inner_place, get_local_shard

_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)


def gather_model_state(model: nn.Module) -> dict[str, Any]:
    """Return all weights in full on rank 0, as the module names them, and nothing elsewhere. All ranks must call it."""
    whole = get_model_state_dict(model, options=_GATHER)
    # By these names load_from_checkpoint looks for compiled parts, and so do Lightning's strategies.
    own = {name: drop_compiled(name) for name in model.state_dict()}
    others = sorted(whole.keys() - set(own.values()))
    return {name: whole[plain] for name, plain in own.items() if plain in whole} | {
        name: whole[name] for name in others
    }


def gather_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an unsharded optimizer on rank 0, by number of the parameter. All ranks must call it."""
    named = collect_state(model, optimizer, _GATHER)
    if not named:
        return {}
    numbers = {name: i for i, name in enumerate(n for group in named["param_groups"] for n in group["params"])}
    groups = [{**group, "params": [numbers[n] for n in group["params"]]} for group in named["param_groups"]]
    return {"state": {numbers[n]: state for n, state in named["state"].items()}, "param_groups": groups}


def save_single_file(path: Location, checkpoint: Mapping[str, Any]) -> None:
    """Write what rank 0 has gathered, beside ``path`` first. All ranks must call it."""

    def write() -> None:
        if isinstance(path, RemotePath):
            plain = to_plain(checkpoint)
            make_room(path, is_folder=False)
            with path.replace_contents() as file:
                torch.save(plain, file)
            remove_older(path, path, checkpoint.get(SAVE_NUMBER))
            return
        with write_beside(path) as beside:
            assert isinstance(beside, Path)
            with beside.open("wb") as file:
                torch.save(to_plain(checkpoint), file)
            put_in_place(path, beside)

    is_first = not dist.is_initialized() or dist.get_rank() == 0
    agree(lambda: write() if is_first else None)


def load_single_file(
    path: Location,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    verify: Verify = "sizes",
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Load a file into a sharded model and its optimizers; return the rest. All ranks must call it.

    Args:
        path: Written by any of Lightning's strategies that keep one file.
        model: Sharded.
        optimizers: With parameters in the order they had when the file was written; empty loads the model alone.
        strict: Refuse missing and unknown parameters.
        verify: ``full`` reads the file once more, to compare the checksums that ``torch.save`` puts into it.
        prepare: Called with what is returned, before the optimizers are compared with those of the file.

    Raises:
        ValueError: It is no such file, or of another model or number of optimizers; on all ranks.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    checkpoint: dict[str, Any] = {}
    # First of all: it shards what a forward pass before has left gathered. Torch would not know those parameters from
    # the optimizer's, seen in 2.13.
    weights = get_model_state_dict(model)

    def read() -> dict[str, Any]:
        if is_first:
            checkpoint.update(read_single_file(path, verify))
            _check(path, checkpoint, weights, optimizers, strict=strict)
        return {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}

    meta = agree(read)[0]
    if prepare is not None:
        prepare(meta)
    # A collective for some optimizers, so on every rank.
    present: list[Any] = [make_loadable_state(model, optimizer) for optimizer in optimizers]
    states: list[dict[str, Any]] = [{} for _ in optimizers]

    def name_states() -> list[Any]:
        for i, optimizer in enumerate(optimizers if is_first else []):
            check_same_groups(path, optimizer, len(checkpoint["optimizer_states"][i]["param_groups"]))
            _check_counts(path, checkpoint["optimizer_states"][i]["param_groups"], present[i]["param_groups"])
            states[i] = _name_state(checkpoint["optimizer_states"][i], present[i])
            saved, expected = states[i]["state"], present[i]["state"]
            names = [f"{n}.{key}" for n in saved for key in expected.get(n, {}) if key not in saved[n]]
            if not saved:  # never stepped, or of an optimizer that has none
                groups = states[i]["param_groups"]
                names = [f"param_groups.{key}" for key in optimizer.defaults if any(key not in g for g in groups)]
            check_same_optimizer(path, optimizer, names)
            _check_shapes(path, saved, expected)
        return [(state.get("param_groups"), list(state.get("state", ()))) for state in states]

    named = agree(name_states)[0]
    set_weights(model, _spread(checkpoint.get("state_dict", {}), weights))
    for i, optimizer in enumerate(optimizers):
        groups, stepped = named[i]
        own = [dict(group) for group in present[i]["param_groups"]]
        keep_kernels(own, groups)
        state = {"state": _spread(states[i].get("state", {}), present[i]["state"]), "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, state)
        drop_state(optimizer, own, present[i]["state"].keys() - set(stepped))
    return meta


def read_single_file(path: Location, verify: Verify = "sizes") -> dict[str, Any]:
    """Return what a file holds, by names without ``_orig_mod``; tensors of a local one stay in it until they are used.

    Raises:
        ValueError: It is no such file, is damaged, or holds more than tensors and plain values.
    """
    if not has_end(path):
        raise ValueError(f"{path} is no checkpoint: expected a folder of ours or a file written by torch.save")
    if verify == "full":
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                name = archive.testzip()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} is damaged: {error}; choose another checkpoint") from error
        if name is not None:
            raise ValueError(f"{path} is damaged: the checksum of {name} differs; choose another checkpoint")
    checkpoint: Any = load_plain(path, path, is_mapped=True)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{path} is no checkpoint of Lightning: it has no state_dict")
    checkpoint["state_dict"] = {drop_compiled(name): value for name, value in checkpoint["state_dict"].items()}
    return checkpoint


@torch.no_grad()
def _spread(stored: Any, own: Any) -> Any:
    """Fill this rank's shards with what rank 0 has read, in place; return them. What is not stored stays.

    Torch has the same in ``StateDictOptions(broadcast_from_rank0=True)``, seen in 2.13, but for tensors of one device:
    offloaded parameters are in host memory, and the buffers beside them on the GPU.
    """
    places, spec = tree_flatten_with_path(own)
    there = dict(tree_flatten_with_path(stored)[0])
    leaves = [leaf for _, leaf in places]
    sent = {
        i: is_traceable_wrapper_subclass(there[p]) if isinstance(leaf, Tensor) else there[p]
        for i, (p, leaf) in enumerate(places)
        if p in there
    }
    box = [sent]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    for i, value in box[0].items():
        if not isinstance(leaves[i], Tensor):
            leaves[i] = value
            continue
        first, local = get_local_shard(leaves[i])
        whole = _send_whole(there.get(places[i][0]), local, leaves[i].shape, is_wrapped=value)
        rows = whole.narrow(0, first, len(local)) if local.ndim else whole
        inner = get_inner_place(leaves[i])
        local.copy_(rows[(slice(None), *inner)] if inner else rows)
    return tree_unflatten(leaves, spec)


def _send_whole(stored: Any, local: Tensor, shape: torch.Size, *, is_wrapped: bool) -> Tensor:
    """Return what rank 0 has read, on all ranks, to be copied into ``local``."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_wrapped:  # as torchao's 8-bit states are: there is no view of them as bytes
        box = [stored]
        if dist.is_initialized():
            dist.broadcast_object_list(box, src=0)
        # Copied to its like it keeps the bits. A shard whose size does not divide by the blocks is plain.
        is_alike = bool(is_traceable_wrapper_subclass(local))
        return box[0] if is_alike else torch.empty(shape).copy_(box[0])
    if is_first:
        whole = torch.as_tensor(stored).to(local.device, local.dtype).contiguous()
    else:
        whole = torch.empty(shape, dtype=local.dtype, device=local.device)
    if dist.is_initialized() and whole.numel():
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)  # as bytes: not every backend knows every dtype
    return whole


def _check(
    path: Location,
    checkpoint: dict[str, Any],
    weights: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
) -> None:
    stored = checkpoint["state_dict"]
    for verb, names in (("lacks", weights.keys() - stored.keys()), ("holds", stored.keys() - weights.keys())):
        if names and strict:
            raise ValueError(f"{path} {verb} {join_names(sorted(names))}: it was saved from another model")
    _check_shapes(path, stored, weights)
    check_optimizers(path, len(checkpoint.get("optimizer_states", [])), optimizers)


def _check_counts(path: Location, saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the state of more or fewer parameters than a group has: it is numbered, and would go to others."""
    counts = [(len(theirs["params"]), len(ours["params"])) for theirs, ours in zip(saved, own, strict=True)]
    if found := next((both for both in counts if both[0] != both[1]), None):
        raise ValueError(
            f"{path} holds the optimizer's state of a group of {found[0]} parameters, the run has {found[1]} there: "
            "resume it with the same parameters that train, as those of a single file have no names"
        )


def _check_shapes(path: Location, stored: Any, own: Any) -> None:
    there = dict(tree_flatten_with_path(stored)[0])
    for place, value in tree_flatten_with_path(own)[0]:
        found = there.get(place)
        if isinstance(found, Tensor) and isinstance(value, Tensor) and found.shape != value.shape:
            name = ".".join(str(getattr(step, "key", step)) for step in place)
            raise ValueError(f"{path}: {name} has shape {tuple(found.shape)}, the model's {tuple(value.shape)}")


def _name_state(numbered: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by parameter name, in the order of the one at present."""
    names = [name for group in present["param_groups"] for name in group["params"]]
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in numbered["param_groups"]]
    return {"state": {names[i]: state for i, state in numbered["state"].items()}, "param_groups": groups}
