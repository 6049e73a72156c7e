from collections.abc import Sequence
from typing import Any

import pytest
import torch
from planned_steps import trace, trace_short
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.planning.trace.allocator import MIB
from lit_fsdp.planning.trace.replay import replay_step, tell_storages_apart
from lit_fsdp.profiling.memory import Kind
from lit_fsdp.profiling.memory_log import MemoryEvent, MemoryLog
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing

PHASES = (("forward", 0), ("backward", 10), ("optimizer", 20))


def event(operator: int, mib: float, storage: int, kind: Kind = "activations", **more: Any) -> MemoryEvent:
    place = (operator, more.pop("unit", "a"), kind, more.pop("is_on_host", False))
    return MemoryEvent(*place, int(mib * MIB), storage, **more)


def log(first: Sequence[MemoryEvent], step: Sequence[MemoryEvent]) -> MemoryLog:
    return MemoryLog(events=[*first, *step], units=["a"] * 30, phases=PHASES, num_first=len(first))


def test_what_is_known_as_something_else_stays_where_it_is() -> None:
    weights = event(0, 40, 0, "parameters")
    step = [event(1, 20, 1), event(2, -20, 1, is_renamed=True), event(2, 20, 1, "gradients", is_renamed=True)]
    step += [event(3, 20, 2), event(4, -20, 2), event(5, -20, 1, "gradients")]
    found = replay_step(log([weights], step))
    assert found.reserved_bytes == found.steady_bytes == found.least_bytes == found.expandable_bytes == 80 * MIB
    assert found.num_retries == 0


def test_a_step_of_longer_rows_finds_no_room_where_shorter_ones_were() -> None:
    weights = event(0, 40, 0, "parameters")
    short, long = (log([weights], [event(1, mib, 1), event(2, -mib, 1)]) for mib in (50, 60))
    assert replay_step(long, [short, long]).reserved_bytes == 100 * MIB
    found = replay_step(short, [long])
    assert (found.reserved_bytes, found.num_retries) == (150 * MIB, 1)
    assert found.least_bytes == pytest.approx(100 * MIB, abs=2 * MIB)


def test_memory_of_the_host_is_left_out() -> None:
    step = [event(1, 20, 1), event(2, -20, 1), event(2, 20, 1, is_on_host=True), event(3, 20, 2), event(4, -20, 2)]
    assert replay_step(log([event(0, 40, 0, "parameters", is_on_host=True)], step)).reserved_bytes == 20 * MIB


def test_streams_that_take_turns_wait_in_each_step_where_memory_is_short() -> None:
    step = [event(1, 60, 1), event(2, -60, 1), event(11, 60, 2, stream=1), event(12, -60, 2, stream=1)]
    found = replay_step(log([event(0, 40, 0, "parameters")], step))
    assert found.reserved_bytes == found.steady_bytes == 160 * MIB
    assert found.least_bytes == pytest.approx(100 * MIB, abs=2 * MIB)
    assert found.num_retries == 2


def test_the_state_of_the_optimizer_is_made_at_the_end_of_the_first_step() -> None:
    state = event(0, 18, 1, "optimizer_state")
    step = [event(1, 40, 2), event(2, -40, 2)]
    # It is put into the block that was free, so the next step needs another one.
    found = replay_step(log([event(0, 20, 0, "parameters"), state], [*step, event(21, 0.5, 3), event(22, -0.5, 3)]))
    assert found.reserved_bytes == 20 * MIB + 40 * MIB + 40 * MIB + 2 * MIB
    assert found.least_bytes == pytest.approx(found.reserved_bytes, abs=2 * MIB)


def test_gradients_that_are_kept_are_found_by_the_next_step() -> None:
    step = [event(1, -40, 1, "gradients"), event(11, 40, 2, "gradients")]
    found = replay_step(log([event(0, 20, 0, "parameters"), event(0, 40, 1, "gradients")], step))
    assert found.reserved_bytes == 60 * MIB


def test_repeated_pieces_of_a_log_get_storages_of_their_own() -> None:
    block = [event(1, 2, 7), event(2, -2, 7, is_renamed=True), event(2, 2, 7, "gradients", is_renamed=True)]
    copies = [e._replace(unit=unit) for e in block for unit in ("a", "b")]
    ends = [event(3, -2, 8, "gradients", unit="b"), event(3, -2, 7, "gradients", unit="a")]
    told = tell_storages_apart([*copies, *ends])
    assert told is not None
    assert [(e.unit, e.storage) for e in told if not e.is_renamed] == [("a", 0), ("b", 1), ("b", 1), ("a", 0)]
    assert tell_storages_apart([*block, event(4, -3, 7, "gradients")]) is None


class Model(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "vocab_size": 32 * width}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        with torch.device("meta"):
            config = AutoConfig.for_model("llama", num_hidden_layers=depth, **sizes, **heads)
            self.model = AutoModelForCausalLM.from_config(config)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, use_cache=False).loss


def make_batch(length: int) -> dict[str, Tensor]:
    return {key: torch.zeros(2, length, dtype=torch.long) for key in ("input_ids", "labels")}


CASES: dict[str, dict[str, Any]] = {
    "one rank": {"world_size": 1},
    "recomputed": {
        "world_size": 4,
        "precision": "bf16-mixed",
        "activation_checkpointing": ActivationCheckpointing(mode="full"),
    },
}


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", CASES)
def test_the_allocator_of_a_traced_step_takes_more_than_its_tensors(name: str) -> None:
    traced = trace(Model(2, 64), make_batch(32), device_type="cuda", **CASES[name])
    assert traced.log is not None
    # Of compute, and where there are other ranks of gathers and of reduced gradients.
    assert len({event.stream for event in traced.log.events}) == (1 if name == "one rank" else 3)
    found = replay_step(traced.log)
    peak_bytes = traced.memory.peak.num_bytes
    assert peak_bytes <= found.least_bytes <= found.steady_bytes <= found.reserved_bytes
    assert peak_bytes <= found.expandable_bytes
    assert found.reserved_bytes % (2 * MIB) == 0


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_an_unfolded_step_is_replayed_as_the_step_of_all_blocks(name: str) -> None:
    whole = trace(Model(9, 1024), make_batch(512), **CASES[name])
    unfolded, _ = trace_short(Model(9, 1024), make_batch(512), **CASES[name])
    assert whole.log is not None
    assert unfolded.log is not None
    found, expected = (vars(replay_step(log)) for log in (unfolded.log, whole.log))
    for key in ("reserved_bytes", "steady_bytes", "least_bytes", "expandable_bytes"):
        assert found[key] == pytest.approx(expected[key], rel=0.02), key
