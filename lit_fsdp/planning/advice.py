"""Which settings would take less memory, and about how much less: from what a run held when it had none left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lit_fsdp.profiling.memory import Kind
from lit_fsdp.sharding.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What one rank of a run held, in bytes, and what could be changed about it.

    Args:
        held: By kind. What is neither a parameter, a gradient, optimizer state nor a gathered parameter counts as
            activations.
        reserved: By the allocator from the driver, beyond what tensors take.
        settings: Of the strategy.
        num_shards: Ranks that one copy of the model is split over.
        num_replicas: Copies.
        num_blocks: Units that can be recomputed.
        num_params: Elements of the model, all ranks together.
        num_trainable: Those that need a gradient.
        gathered_bytes: Of all units at once, in the dtype of compute.
        largest_unit_bytes: The largest of them.
        parameter_bytes: Of one element as it is stored; 0 if there are several dtypes.
        micro_batch_size: Samples of this rank in a micro-batch; 0 if that is not known.
        has_adapters: Whether the task has a setting ``lora`` that is not used; ``None`` if it has none at all.
        has_quantization: Likewise ``quantization``.
        is_gpu: Whether the memory is that of a GPU.
    """

    held: Mapping[Kind, int]
    reserved: int
    settings: Settings
    num_shards: int
    num_replicas: int
    num_blocks: int
    num_params: int
    num_trainable: int
    gathered_bytes: int
    largest_unit_bytes: int
    parameter_bytes: int
    micro_batch_size: int
    has_adapters: bool | None = None
    has_quantization: bool | None = None
    is_gpu: bool = True


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One setting that would help.

    Args:
        setting: As it is written in YAML or on the command line.
        saved_bytes: Less on this rank, about; of activations that a failed step had only begun to make, at least.
        cost: What it takes in return.
        keeps_result: Whether the run computes the same, up to rounding.
    """

    setting: str
    saved_bytes: int
    cost: str
    keeps_result: bool = True


def suggest_settings(situation: Situation) -> list[Suggestion]:
    """Return what would help: first what changes no result, in each part the largest saving first.

    Savings are upper bounds of their own; two that save the same bytes do not add up.
    """
    found = [suggestion for rule in _RULES if (suggestion := rule(situation)) is not None]
    found = [suggestion for suggestion in found if suggestion.saved_bytes > 0.01 * sum(situation.held.values())]
    return sorted(found, key=lambda suggestion: (not suggestion.keeps_result, -suggestion.saved_bytes))


def _activations(now: Situation) -> int:
    return sum(now.held.get(kind, 0) for kind in ("activations", "rest"))


def _states(now: Situation) -> int:
    return sum(now.held.get(kind, 0) for kind in ("parameters", "gradients", "optimizer_state"))


def _recompute(now: Situation) -> Suggestion | None:
    if (
        now.settings.activation_checkpointing.mode == "full"
        and now.settings.activation_checkpointing.every_n_blocks == 1
    ) or not now.num_blocks:
        return None
    saved = _activations(now) * (now.num_blocks - 1) // now.num_blocks  # one block at a time is computed again
    cost = "forward of each block runs twice: about a third more compute"
    return Suggestion(setting="trainer.strategy.activation_checkpointing.mode: full", saved_bytes=saved, cost=cost)


def _split_micro_batches(now: Situation) -> Suggestion | None:
    if now.micro_batch_size < 2:
        return None
    setting = (
        f"data.batch_size: {now.micro_batch_size // 2} (now {now.micro_batch_size}), with twice the "
        "trainer.accumulate_grad_batches"
    )
    saved = _activations(now) * (now.micro_batch_size - now.micro_batch_size // 2) // now.micro_batch_size
    return Suggestion(setting=setting, saved_bytes=saved, cost="every unit is gathered twice as often in a step")


def _shorten(now: Situation) -> Suggestion | None:
    if now.micro_batch_size != 1:
        return None
    cost = "samples are cut or split; attention sees less"
    setting = "data.seq_length: half of it"
    return Suggestion(setting=setting, saved_bytes=_activations(now) // 2, cost=cost, keeps_result=False)


def _reshard(now: Situation) -> Suggestion | None:
    if now.settings.sharding.reshard_after_forward is True or now.num_shards == 1:
        return None
    saved = now.gathered_bytes - 2 * now.largest_unit_bytes
    if (kept := now.settings.sharding.reshard_after_forward) is not False:
        saved = saved // int(kept)
    cost = "one more all-gather of every unit in backward"
    return Suggestion(setting="trainer.strategy.sharding.reshard_after_forward: true", saved_bytes=saved, cost=cost)


def _release_gradients(now: Situation) -> Suggestion | None:
    if not now.settings.sharding.no_sync or now.num_shards == 1:
        return None
    share = now.num_trainable / max(now.num_params, 1)
    saved = int(now.gathered_bytes * share) * (now.num_shards - 1) // now.num_shards
    cost = "gradients are reduced in every micro-batch"
    return Suggestion(setting="trainer.strategy.sharding.no_sync: false", saved_bytes=saved, cost=cost)


def _shard_replicas(now: Situation) -> Suggestion | None:
    if now.num_replicas == 1:
        return None
    saved = _states(now) * (now.num_replicas - 1) // now.num_replicas
    cost = "parameters travel between nodes as well"
    return Suggestion(setting="trainer.strategy.mesh.replicate: 1", saved_bytes=saved, cost=cost)


def _offload(now: Situation) -> Suggestion | None:
    if now.settings.cpu_offload is not None or not now.is_gpu:
        return None
    cost = "that much host memory; every step copies the shards up and the gradients down, AdamW runs on the CPU"
    return Suggestion(setting="trainer.strategy.cpu_offload: {}", saved_bytes=_states(now), cost=cost)


def _add_ranks(now: Situation) -> Suggestion:
    cost = "as many more GPUs"
    setting = f"twice the ranks (now {now.num_shards * now.num_replicas})"
    return Suggestion(setting=setting, saved_bytes=_states(now) // 2, cost=cost)


def _defragment(now: Situation) -> Suggestion:
    setting = "environment variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return Suggestion(setting=setting, saved_bytes=now.reserved, cost="none that is known")


def _shrink_state(now: Situation) -> Suggestion | None:
    elements = now.num_trainable / now.num_shards
    state = now.held.get("optimizer_state", 0)
    if not elements or not 6 < state / elements < 10:  # two numbers of 4 bytes: AdamW in float32
        return None
    cost = "moments in 8 bits"
    setting = "model.optimizer.name: adamw_8bit"
    return Suggestion(setting=setting, saved_bytes=int(state * 0.74), cost=cost, keeps_result=False)


def _halve_dtype(now: Situation) -> Suggestion | None:
    if now.parameter_bytes != 4:
        return None
    cost = "weights and optimizer state are rounded to bfloat16; with adapters, frozen weights only"
    return Suggestion(
        setting="trainer.precision: bf16-true", saved_bytes=_states(now) // 2, cost=cost, keeps_result=False
    )


def _add_adapters(now: Situation) -> Suggestion | None:
    if now.has_adapters is not True:
        return None
    saved = now.held.get("gradients", 0) + now.held.get("optimizer_state", 0)
    cost = "trains about 1 % of the weights"
    return Suggestion(setting="model.lora: {r: 16}", saved_bytes=int(saved * 0.98), cost=cost, keeps_result=False)


def _quantize(now: Situation) -> Suggestion | None:
    if now.has_quantization is not True or not now.parameter_bytes:
        return None
    saved = int(now.held.get("parameters", 0) * (1 - 0.53 / now.parameter_bytes))  # 4 bits and the scales
    extra = "" if now.has_adapters is False else ", with model.lora"
    cost = "weights in 4 bits; their products are slower"
    setting = f"model.quantization.type: nf4{extra}"
    return Suggestion(setting=setting, saved_bytes=saved, cost=cost, keeps_result=False)


_RULES: tuple[Callable[[Situation], Suggestion | None], ...] = (
    _recompute,
    _split_micro_batches,
    _shorten,
    _reshard,
    _release_gradients,
    _shard_replicas,
    _offload,
    _add_ranks,
    _defragment,
    _shrink_state,
    _halve_dtype,
    _add_adapters,
    _quantize,
)
