from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.profiling.memory import KINDS, measure_states
from lit_fsdp.profiling.memory_log import StepMemory
from lit_fsdp.profiling.memory_trace import MemoryTrace
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lit_fsdp.sharding.mesh import Mesh, build_mesh
from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.wrap import Unit, Wrap, iterate_blocks, plan_units
from ranks import run_ranks

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
NUM_TOKENS, VOCAB_SIZE = 2 * 128, 500


class Run:
    """A small sharded model that has run one step, with its optimizer."""

    def __init__(
        self, *, recompute: str = "none", reshard: bool = True, precision: MixedPrecisionPolicy | None = None
    ) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **SIZES)
        self.model = AutoModelForCausalLM.from_config(config)
        self.plan: list[Unit] = plan_units(self.model, Wrap())
        apply_activation_checkpointing(
            self.model, ActivationCheckpointing(mode=recompute), list(iterate_blocks(self.plan))
        )  # type: ignore[arg-type]
        sizes = {"world_size": dist.get_world_size(), "ranks_per_node": dist.get_world_size()}
        shard_model(
            self.model,
            self.plan,
            mesh=build_mesh(Mesh(), device_type="cpu", timeout_s=60, **sizes),
            sharding=Sharding(reshard_after_forward=reshard),
            mp_policy=precision or MixedPrecisionPolicy(),
            offload_policy=OffloadPolicy(),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        torch.manual_seed(dist.get_rank())
        self.ids = torch.randint(VOCAB_SIZE, (2, NUM_TOKENS // 2))
        self.step()

    def step(self, trace: MemoryTrace | None = None) -> float:
        begin = trace.begin_phase if trace is not None else lambda _: None
        begin("forward")
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        begin("backward")
        loss.backward()
        begin("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def trace(self) -> StepMemory:
        trace = MemoryTrace(self.model, [self.optimizer], plan=self.plan, device=CPU)
        with trace:
            trace.add_inputs(self.ids)
            self.step(trace)
        return trace.finish()


def read_allocator_peak(step: Callable[[], Any]) -> int:
    """Return by how many bytes torch's own allocator grew at most during a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = total = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak


def compare_with_the_allocator(world_size: int, settings: dict[str, Any]) -> None:
    # Collectives that do nothing: gloo takes memory of its own for them.
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    run = Run(**settings)
    held = sum(measure_states(run.model, [run.optimizer]).values())
    grown = run.trace().peak.num_bytes - held
    real = read_allocator_peak(run.step)
    assert abs(grown - real) / (held + real) < 0.01, (grown, real, held)


CASES = [
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"reshard": False},
    {"precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
]


@pytest.mark.slow(after=7)
@pytest.mark.full(after=3)
@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_peak_is_that_of_the_allocator_within_1_percent(settings: dict[str, Any], world_size: int) -> None:
    run_ranks(compare_with_the_allocator, world_size, settings, world_size=1)


def check_kinds() -> None:
    run = Run()
    held = measure_states(run.model, [run.optimizer])
    num_trained = sum(parameter.to_local().numel() for parameter in run.model.parameters())
    traced = run.trace()
    assert set(traced.by_kind) == set(KINDS)
    assert traced.by_kind["parameters"][0] == held["parameters"]
    steps = 4 * len(list(run.model.parameters()))  # of AdamW, one float each
    assert traced.by_kind["optimizer_state"][0] == 8 * num_trained + steps
    (_, _, forward), (_, _, backward), (_, _, end) = traced.phases
    assert [name for name, _, _ in traced.phases] == ["forward", "backward", "optimizer"]
    # What is kept from one phase to the next.
    last = {kind: values[forward - 1] for kind, values in traced.by_kind.items()}
    assert last["activations"] > NUM_TOKENS * VOCAB_SIZE * 4  # the logits alone
    assert last["gradients"] == 0
    last = {kind: values[backward - 1] for kind, values in traced.by_kind.items()}
    assert (last["gathered"], last["gradients"]) == (0, 4 * num_trained)
    assert last["activations"] == 2 * 4  # the loss, which the loop still holds, and the sum it was divided from
    assert all(traced.by_kind[kind][end - 1] == 0 for kind in ("gathered", "communication"))
    # Two blocks at most are gathered, or on their way.
    block = 4 * max(unit.num_params for unit in run.plan if unit.kind == "block")
    assert block <= max(traced.by_kind["gathered"]) < 2 * block
    assert max(traced.by_kind["communication"]) >= block


@pytest.mark.full
def test_every_kind_has_the_bytes_that_follow_from_the_sizes() -> None:
    run_ranks(check_kinds, world_size=2)


def check_repeats() -> None:
    run = Run()
    first, *others = [run.trace() for _ in range(20)]
    assert all(other.by_kind == first.by_kind for other in others)


@pytest.mark.full
def test_when_threads_of_gloo_let_go_of_tensors_makes_no_difference() -> None:
    run_ranks(check_repeats, world_size=2)


def check_units() -> None:
    run = Run()
    peak = run.trace().peak
    assert peak.phase == "backward"
    assert sum(peak.by_kind.values()) == peak.num_bytes
    assert sum(sum(kinds.values()) for kinds in peak.by_unit.values()) == peak.num_bytes
    blocks = [peak.by_unit[f"model.layers.{i}"] for i in range(3)]
    assert len({kinds["parameters"] for kinds in blocks}) == 1
    assert len({kinds["optimizer_state"] for kinds in blocks}) == 1
    # The loss over all logits makes the peak of so small a model: no block's backward has begun.
    assert peak.unit == "(outside units)"
    assert len({kinds["activations"] for kinds in blocks}) == 1
    assert min(kinds["activations"] for kinds in blocks) > 0


def test_the_peak_says_whose_memory_it_is() -> None:
    run_ranks(check_units, world_size=2)


def check_recompute() -> None:
    kept, recomputed = Run().trace(), Run(recompute="full").trace()
    end_of_forward = [traced.phases[0][2] - 1 for traced in (kept, recomputed)]
    first, second = (t.by_kind["activations"][end] for t, end in zip((kept, recomputed), end_of_forward, strict=True))
    assert second < 0.5 * first
    backward = slice(*recomputed.phases[1][1:])
    assert max(recomputed.by_kind["activations"][backward]) > second  # one block, computed again


def test_recomputed_blocks_keep_their_inputs_only() -> None:
    run_ranks(check_recompute, world_size=2)


def check_values() -> None:
    plain, traced = Run(), Run()
    assert plain.step() == (loss := traced.step(MemoryTrace(traced.model, [], device=CPU)))
    assert loss > 0
    resize = torch.UntypedStorage.resize_
    traced.trace()
    assert torch.UntypedStorage.resize_ is resize
    plain.step()
    for (name, a), b in zip(plain.model.named_parameters(), traced.model.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    assert not any(module._forward_pre_hooks for name, module in traced.model.named_modules() if "mlp" in name)
    num_hooks = [sum(len(m._forward_hooks) for m in run.model.modules()) for run in (plain, traced)]
    assert num_hooks[0] == num_hooks[1]


@pytest.mark.full
def test_a_traced_step_computes_the_same_and_leaves_nothing_behind() -> None:
    run_ranks(check_values, world_size=2)


def test_an_unsharded_model_is_traced_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 200, bias=False), torch.nn.Linear(200, 10, bias=False))
    optimizer = torch.optim.SGD(model.parameters())
    trace = MemoryTrace(model, [optimizer], device=CPU)
    rows = torch.empty(7, 100)
    with trace:
        rows.copy_(torch.ones(7, 100))  # no part of a step yet
        trace.begin_phase("forward")
        loss = model(rows).sum()
        trace.begin_phase("backward")
        loss.backward()
    traced = trace.finish()
    assert traced.by_kind["parameters"][-1] == 4 * (100 * 200 + 200 * 10)
    assert traced.by_kind["activations"][0] == 4 * 7 * 100


def multiply_often(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x @ weight).sum() for _ in range(3)])


def multiply_transposed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.nn.functional.linear(x, weight).sum() for _ in range(3)])


def multiply_and_pass_on(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    other = weight * 2.0  # waits for its gradient, which is that of the weight too, until the product has run
    product = (x @ weight).sum()
    return torch.stack([product, other.add_(weight).mul_(x.new_ones(()).expand(500, 500)).sum()])


@pytest.mark.parametrize(
    ("compute", "num_peak"), [(multiply_often, 2), (multiply_transposed, 3), (multiply_and_pass_on, 3)]
)
def test_gradients_are_summed_in_place_where_autograd_does(compute: Callable[..., torch.Tensor], num_peak: int) -> None:
    # In place, unless the first is a view, or somebody else's too.
    model = torch.nn.Linear(500, 500, bias=False)
    x = torch.ones(2, 500)

    def step(begin: Callable[[str], None] = lambda _: None) -> None:
        begin("forward")
        loss = compute(model.weight * 1.0, x).sum()
        begin("backward")
        loss.backward()
        model.zero_grad()

    trace = MemoryTrace(model, [], device=CPU)
    with trace:
        step(trace.begin_phase)
    held = size = 4 * 500 * 500
    grown = trace.finish().peak.num_bytes - held
    assert grown == pytest.approx(num_peak * size, rel=0.03)
    assert grown == pytest.approx(read_allocator_peak(step), rel=0.01)


def test_a_trace_without_operators_says_so() -> None:
    with pytest.raises(RuntimeError, match="no operator"):
        MemoryTrace(torch.nn.Linear(1, 1), [], device=CPU).finish()
