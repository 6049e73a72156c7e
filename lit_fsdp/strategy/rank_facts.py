"""What a rank knows of its device and its rows, to be compared with the others."""

from __future__ import annotations

from collections.abc import Sized

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_fsdp.sharding.mesh import MeshSizes, gather_objects
from lit_fsdp.sharding.mixed_precision import MixedPrecision


def list_device_facts(device: torch.device, dtypes: MixedPrecision) -> dict[str, str]:
    """Return what has to be the same on all ranks: dtypes, whether the GPU has them, and NCCL.

    Args:
        device: Of this rank.
        dtypes: That the run asks for.
    """
    names = {"kept": dtypes.storage_dtype, "computed": dtypes.param_dtype, "reduced": dtypes.reduce_dtype}
    facts = {"device": device.type}
    facts["dtypes"] = ", ".join(f"{what} in {name or 'that of the model'}" for what, name in names.items())
    if device.type != "cuda":
        return facts
    if dist.is_nccl_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if "bfloat16" in names.values() and not torch.cuda.is_bf16_supported(including_emulation=False):
        facts["dtypes"] += " (bfloat16 emulated: this GPU has none)"
    return facts


def list_device_notes(device: torch.device) -> dict[str, str]:
    """Return what may differ: name and memory of the GPU."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    # Cards of one kind differ by a few MiB, as their drivers do.
    return {"GPU": f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"}


def compute_digest(batch: object) -> str:
    """Return a digest of all tensors, numbers and texts of a batch; waits for the device."""
    digest = xxhash.xxh128()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | int | float):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def check_shared_rows(batch: object, sizes: MeshSizes) -> None:
    """Refuse a batch that ranks with the same rows do not agree on. All ranks must call it, before the step.

    Raises:
        ValueError: On all ranks, with how rows are shared out.
    """
    if sizes.num_sharing == 1:
        return
    found = gather_objects(compute_digest(batch))
    for first in range(0, len(found), sizes.num_sharing):
        if len(set(found[first : first + sizes.num_sharing])) > 1:
            name, size = ("tensor", sizes.tensor) if sizes.tensor > 1 else ("sequence", sizes.sequence)
            raise ValueError(
                f"mesh.{name}: got {size}: ranks {first} to {first + sizes.num_sharing - 1} share rows, and their data "
                "gave them different ones; share out by trainer.strategy.distributed_sampler_kwargs, not by the number "
                "of all ranks, or leave the sampler to the Trainer"
            )


def list_row_facts(trainer: pl.Trainer) -> dict[str, str]:
    """Return number and fingerprint of the rows to train on, for loaders that resume by them; reads nothing."""
    loaders = [loader for loader in tree_leaves(trainer.train_dataloader) if getattr(loader, "fingerprint", "")]
    return {
        f"training data{f' {i}' if i else ''}": f"{_count_rows(loader.dataset)} (digest {loader.fingerprint[:12]})"
        for i, loader in enumerate(loaders)
    }


def _count_rows(rows: object) -> str:
    return f"{len(rows):,} rows" if isinstance(rows, Sized) else "a stream"
