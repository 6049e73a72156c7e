"""Which settings would take less memory, and about how much less: from what a run held when it had none left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

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
        batch_setting: What decides the rows of the micro-batch: ``data.batch_size``, or ``data.eval_batch_size``.
        batch_size: Its value; 0 if that is not known, or does not decide.
        is_evaluating: Whether an evaluation has failed.
        has_global_batch: Whether ``data.global_batch_size`` decides how many micro-batches a step has.
        is_sum_of_rows: Whether micro-batches of other sizes that make up the same step compute the same.
        can_add_adapters: Whether the task has a setting ``lora`` that is not used; ``None`` if it has none at all.
        can_quantize: Likewise ``quantization``.
        has_seq_length: Whether the data has a setting ``seq_length``.
        optimizer_name: The optimizer that the task chooses by name; ``None`` if it chooses none.
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
    batch_size: int
    batch_setting: str = "data.batch_size"
    has_global_batch: bool = False
    is_sum_of_rows: bool = True
    is_evaluating: bool = False
    can_add_adapters: bool | None = None
    can_quantize: bool | None = None
    has_seq_length: bool = True
    optimizer_name: str | None = "adamw"
    is_gpu: bool = True

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.num_shards * self.num_replicas * self.settings.mesh.tensor


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
    found = [*_keep_result(situation), *_change_result(situation)]
    found = [suggestion for suggestion in found if suggestion.saved_bytes > 0.01 * sum(situation.held.values())]
    return sorted(found, key=lambda suggestion: (not suggestion.keeps_result, -suggestion.saved_bytes))


def _sum_held(now: Situation, *kinds: Kind) -> int:
    return sum(now.held.get(kind, 0) for kind in kinds)


def _keep_result(now: Situation) -> Iterator[Suggestion]:
    activations = _sum_held(now, "activations", "rest")
    states = _sum_held(now, "parameters", "gradients", "optimizer_state")
    settings, strategy = now.settings, "trainer.strategy"
    recompute, reshard = settings.activation_checkpointing, settings.sharding.reshard_after_forward
    if now.num_blocks and not (recompute.mode == "full" and recompute.every_n_blocks == 1):
        yield Suggestion(
            setting=f"{strategy}.activation_checkpointing.mode: full",
            saved_bytes=activations * (now.num_blocks - 1) // now.num_blocks,  # one block at a time is computed again
            cost="forward of each block runs twice: about a third more compute",
        )
    if (size := now.batch_size) >= 2:
        parts = next(n for n in range(2, size + 1) if size % n == 0)  # fewest that make up the same step
        times = "twice" if parts == 2 else f"{parts} times"
        follows = now.is_evaluating or now.has_global_batch
        more = "" if follows else f", with {times} the trainer.accumulate_grad_batches"
        yield Suggestion(
            setting=f"{now.batch_setting}: {size // parts} (now {size}){more}",
            saved_bytes=activations * (parts - 1) // parts,
            cost=f"every unit is gathered {times} as often" + ("" if now.is_evaluating else " in a step"),
            keeps_result=now.is_sum_of_rows or now.is_evaluating,
        )
    if reshard is not True and now.num_shards > 1:
        saved = now.gathered_bytes - 2 * now.largest_unit_bytes
        both = "" if settings.sharding.reshard_after_backward else ", and reshard_after_backward: true"
        yield Suggestion(
            setting=f"{strategy}.sharding.reshard_after_forward: true{both}",
            saved_bytes=saved if reshard is False else saved // reshard,
            cost="one more all-gather of every unit in backward",
        )
    if settings.sharding.no_sync and now.num_shards > 1 and not now.is_evaluating:
        gradients = int(now.gathered_bytes * (now.num_trainable / max(now.num_params, 1)))
        yield Suggestion(
            setting=f"{strategy}.sharding.no_sync: false",
            saved_bytes=gradients * (now.num_shards - 1) // now.num_shards,
            cost="gradients are reduced in every micro-batch",
        )
    if now.num_replicas > 1:
        both = "" if settings.mesh.shard == -1 else ", and shard: -1"
        yield Suggestion(
            setting=f"{strategy}.mesh.replicate: 1{both}",
            saved_bytes=states * (now.num_replicas - 1) // now.num_replicas,
            cost="parameters travel between nodes as well",
        )
    if settings.cpu_offload is None and now.is_gpu and now.optimizer_name != "adamw_8bit_paged":  # on the host already
        yield Suggestion(
            setting=f"{strategy}.cpu_offload: {{}}",
            saved_bytes=states,
            cost="that much host memory, more where it is pinned; every step copies the shards up"
            + ("" if now.is_evaluating else " and the gradients down, AdamW runs on the CPU"),
        )
    if (shard := settings.mesh.shard) in (-1, "node"):  # a number stays what it is on any number of ranks
        own = f" of each node (now {now.num_shards * settings.mesh.tensor})"
        yield Suggestion(
            setting="twice the ranks" + (own if shard == "node" else f" (now {now.num_ranks})"),
            saved_bytes=states // 2,
            cost="as many more GPUs",
        )
    yield Suggestion(
        setting="environment variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        saved_bytes=now.reserved,
        cost="none that is known",
    )


def _change_result(now: Situation) -> Iterator[Suggestion]:
    suggest, state = partial(Suggestion, keeps_result=False), _sum_held(now, "optimizer_state")
    if now.batch_size == 1 and now.has_seq_length:
        yield suggest(
            setting="data.seq_length: half of it",
            saved_bytes=_sum_held(now, "activations", "rest") // 2,
            cost="samples are cut or split; attention sees less",
        )
    # Two numbers of 4 bytes: AdamW in float32. The other works on whole rows.
    has_choice = now.optimizer_name is not None and now.settings.mesh.tensor == 1
    if has_choice and now.num_trainable and 6 < state * now.num_shards / now.num_trainable < 10:
        yield suggest(
            setting="model.optimizer.name: adamw_8bit", saved_bytes=int(state * 0.74), cost="moments in 8 bits"
        )
    if now.parameter_bytes == 4:
        yield suggest(
            setting="trainer.precision: bf16-true",
            saved_bytes=_sum_held(now, "parameters", "gradients", "optimizer_state") // 2,
            cost="weights and optimizer state are rounded to bfloat16; with adapters, frozen weights only",
        )
    if now.can_add_adapters:
        yield suggest(
            setting="model.lora: {r: 16}",
            saved_bytes=int(_sum_held(now, "gradients", "optimizer_state") * 0.98),
            cost="trains about 1 % of the weights",
        )
    if now.can_quantize and now.parameter_bytes:
        extra = "" if now.can_add_adapters is False else ", with model.lora"
        yield suggest(
            setting=f"model.quantization.type: nf4{extra}",
            saved_bytes=int(_sum_held(now, "parameters") * (1 - 0.53 / now.parameter_bytes)),  # 4 bits and the scales
            cost="weights in 4 bits; their products are slower",
        )
