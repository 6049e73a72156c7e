"""What errors of torch mean in a module that is sharded, told beside them."""

from __future__ import annotations

import re

from torch import nn

from lit_fsdp.sharding.shard import find_roots

_MEANINGS = {
    r"aten\._foreach_[\w.]+ got mixed torch\.Tensor and DTensor": (
        "one list holds shards and whole tensors, as an average does of weights and buffers: set foreach=False of what "
        "made it, leave its buffers out, or take the EMA callback"
    ),
    "FSDP does not support deepcopy": (
        "a network is copied before it is sharded: in __init__, or in setup of a first fit; renew the copy by "
        "copy.load_state_dict(network.state_dict())"
    ),
    "got mixed torch.Tensor and DTensor": (
        "weights of an FSDP unit are whole inside its forward, and shards elsewhere: call the module itself, take "
        "weight.full_tensor(), set sharding.reshard_after_forward: false, or where a step calls networks inside of a "
        "network, or moves one after another, let wrap.module_classes name their classes"
    ),
    "out of bounds for storage of size 0": (
        "FSDP2 had let go of a gathered weight by then. Where a block returns an object of a class of its own, let it "
        "return tensors, tuples or dicts; else set sharding.reshard_after_forward and reshard_after_backward to false"
    ),
    r"its data is not allocated yet|numpy\(\) is not supported for tensor subclasses": (
        "shards were read as plain tensors: take torch.nn.utils.get_total_norm for a norm of gradients, and "
        ".full_tensor() for all else"
    ),
    "data pointer on an invalid python storage": (
        "shards cannot be written as whole weights: on all ranks call torch's get_model_state_dict with "
        "StateDictOptions(full_state_dict=True, cpu_offload=True), and on rank 0 save_pretrained with that state_dict"
    ),
    r"(must|to) have the same dtype.*(BFloat16|Half)": (
        "weights are gathered in 16 bits: give x.to(weight.dtype) to products of your own"
    ),
}


def explain(error: BaseException, module: nn.Module) -> None:
    """Add a note to an error that sharding leads to, with what to do instead.

    Args:
        error: What a step or a hook has raised.
        module: The module that was trained.
    """
    if not isinstance(error, (RuntimeError, AssertionError)) or not find_roots(module):
        return
    for pattern, meaning in _MEANINGS.items():
        if re.search(pattern, str(error)):
            error.add_note(f"{meaning}. More of it: docs/limits.md")
            return
