import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form.engine import StepEstimate, estimate_step
from lit_fsdp.planning.step_parts import Exchange, MicroBatch, ModelToTrain, Ranks
from lit_fsdp.planning.timing.hardware import GPUS, Gpu, find_gpu, get_product_share
from lit_fsdp.planning.timing.links import (
    Group,
    Interconnect,
    Link,
    parse_links,
    time_collective,
    time_exchange,
)
from lit_fsdp.planning.timing.step_time import (
    CONTENTION,
    Machine,
    StepTime,
    UnitTimes,
    Workload,
    compute_waits,
    count_update_bytes,
    estimate_time,
    time_units,
)
from lit_fsdp.profiling.expected_communication import UnitBytes, estimate_bytes
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.low_bit import compare_crossing
from lit_fsdp.sharding.mixed_precision import cast_parameters, read_precision
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import Unit, plan_module

GB = 10**9
# Round numbers: 100 TFLOP/s, 1000 GB/s, no latency.
ROUND = Gpu(
    name="round",
    memory_gib=80,
    bandwidth_gb_s=1250,
    fp32_tflops=10,
    tf32_tflops=None,
    bf16_tflops=100,
    fp16_tflops=100,
)
PLAN = [
    Unit(names=("embed",), kind="embedding", parameters=("e",), num_params=10**8, num_trainable=10**8),
    *(
        Unit(names=(f"block.{i}",), kind="block", parameters=("b",), num_params=10**8, num_trainable=10**8)
        for i in range(8)
    ),
    Unit(names=("",), kind="root", parameters=("r",), num_params=1000, num_trainable=1000),
]


def make_net(gb_s: float, *, is_through_host: bool = False) -> Interconnect:
    return Interconnect(intra=Link(name="wire", gb_s=gb_s, hop_s=0.0, is_through_host=is_through_host))


def count_units(plan: list[Unit], *, n: int = 1, reshard: bool = True, held: bool = False) -> list[UnitBytes]:
    units = []
    for unit in plan:
        gathers = n * (2 if reshard and unit.kind != "root" else 1)
        size = unit.num_params
        units.append(
            UnitBytes(
                unit=unit.names[0],
                gather=2 * size,
                reduce_scatter=4 * size,
                all_reduce=0,
                gather_step=2 * size * gathers,
                reduce_scatter_step=4 * size * (1 if held else n),
                all_reduce_step=0,
                reduced=2 * size,
                num_gathers=gathers,
                num_reductions=1 if held else n,
            )
        )
    return units


def estimate(net: Interconnect, *, tflop: float = 300, n: int = 1, num_shards: int = 2, **options: Any) -> StepTime:
    work: dict[str, Any]
    machine: dict[str, Any]
    flops = Flops(forward=int(tflop / 3 * 1e12) * n, backward=int(tflop * 2 / 3 * 1e12) * n)
    units = options.pop("units", None) or count_units(PLAN, n=n)
    work = {"flops": flops, "plan": PLAN, "units": units, "tokens": 1000, "num_micro_batches": n, "moved_bytes": 0}
    machine = {"gpu": ROUND, "links": net, "num_shards": num_shards, "ranks_per_node": 8, "efficiency": 1.0}
    for name, value in options.items():
        (machine if name in Machine.__dataclass_fields__ else work)[name] = value
    return estimate_time(Workload(**work), Machine(**machine))


class Case:
    """A Llama on the meta device, and what its step comes to."""

    def __init__(
        self,
        *,
        num_shards: int,
        num_replicas: int = 1,
        layers: int = 4,
        length: int = 2048,
        activation_checkpointing: ActivationCheckpointing | None = None,
        is_quantized: bool = False,
        num_micro_batches: int = 1,
    ) -> None:
        sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
        with torch.device("meta"):
            config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=layers, num_key_value_heads=32)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if is_quantized:
            quantize_model(model, Quantization())
        dtypes = read_precision("bf16-mixed")
        cast_parameters(model, dtypes)
        settings = Settings(activation_checkpointing=activation_checkpointing or ActivationCheckpointing(mode="full"))
        self.plan, self.length = plan_module(model, settings.wrap), length
        self.num_shards, self.num_replicas = num_shards, num_replicas
        self.step: StepEstimate = estimate_step(
            ModelToTrain(module=model, units=self.plan, dtypes=dtypes, optimizer=Optimizer()),
            settings,
            MicroBatch(rows=1, length=length),
            ranks=Ranks(num_nodes=1, per_node=num_shards),
            num_micro_batches=num_micro_batches,
        )
        self.units = estimate_bytes(
            model, self.plan, settings.sharding, dtypes, num_shards=num_shards, num_replicas=num_replicas
        )
        self.work = Workload(
            flops=self.step.flops,
            plan=self.plan,
            units=self.units,
            tokens=length,
            moved_bytes=self.step.moved_bytes,
            update_bytes=count_update_bytes(self.plan, Optimizer(), num_shards=num_shards, itemsize=4),
        )

    def estimate(self, gpu: str, links: str, **options: Any) -> StepTime:
        found = find_gpu(gpu)
        assert found is not None
        machine = Machine(
            gpu=found,
            links=parse_links(links),
            num_shards=self.num_shards,
            num_replicas=self.num_replicas,
            **{"ranks_per_node": 8, **options},
        )
        return estimate_time(self.work, machine)


def test_compute_is_flops_over_the_peak_and_bytes_over_the_bandwidth() -> None:
    alone = estimate(make_net(100), num_shards=1, units=zero_units(), moved_bytes=1000 * GB)
    assert alone.compute_s == pytest.approx(3 + 1)
    assert alone.communication_s == alone.exposed_s == 0
    assert alone.step_s == alone.compute_s
    assert alone.mfu_pct == pytest.approx(75)
    assert alone.tokens_per_s == alone.tokens_per_s_per_gpu == 250
    assert estimate(make_net(100), num_shards=1, units=zero_units(), efficiency=0.5).compute_s == pytest.approx(6)


def zero_units() -> list[UnitBytes]:
    return [replace(u, gather=0, reduce_scatter=0, gather_step=0, reduce_scatter_step=0) for u in count_units(PLAN)]


def test_collectives_take_their_bytes_over_the_link() -> None:
    step = estimate(make_net(10))
    gathered, reduced = 9 * 2 * 0.2 * GB, 9 * 0.4 * GB  # of 9 units, half of it sent by each of two ranks
    assert step.by_collective["all_gather"] == pytest.approx(gathered / 2 / 10e9, rel=1e-3)
    assert step.by_collective["reduce_scatter"] == pytest.approx(reduced / 2 / 10e9, rel=1e-3)
    assert step.communication_s == sum(step.by_collective.values())


def test_gathered_parameters_and_gradients_are_copied() -> None:
    units = count_units(PLAN)
    alone, shared = estimate(make_net(10), units=zero_units()), estimate(make_net(10), units=units)
    copied = sum(2 * unit.gather_step + 1.5 * unit.reduce_scatter_step for unit in units)
    assert shared.compute_s - alone.compute_s == pytest.approx(copied / 1000e9)


def make_times(count: int, *, gather: float, reduce: float, num_reductions: int = 1) -> list[UnitTimes]:
    unit = UnitTimes(
        share=1 / count,
        gather=gather,
        regather=gather,
        reduce_scatter=reduce,
        all_reduce=0.0,
        copy_up=0.0,
        copy_down=0.0,
        num_reductions=num_reductions,
        num_gathers=1,
        is_regathered=True,
    )
    return [unit] * count


def test_what_hides_behind_compute_costs_only_the_two_ends() -> None:
    # 4 units of 1 s in forward and 2 s in backward; the first gathers and the last reduction have nothing beside them.
    times = make_times(4, gather=0.5, reduce=1.0)
    assert compute_waits(times, 12.0, 1 / 3, 1) == pytest.approx(0.5 + 0.5 + 1.0)


def test_what_does_not_hide_is_waited_for() -> None:
    # 3 gathers wait 1 s each in forward; in backward 2 + 3 beside 2 in the middle, 2 at the start, 3 at the end.
    times = make_times(4, gather=2.0, reduce=3.0)
    first, forward = 2.0, 3 * 1.0
    backward = 2.0 + max(2.0 - 2, 0) + 2 * (2.0 + 3 - 2) + max(3.0 - 2, 0) + 3.0
    assert compute_waits(times, 12.0, 1 / 3, 1) == pytest.approx(first + forward + backward)


def test_reductions_that_may_wait_hold_up_compute_only_where_no_gather_is_behind_them() -> None:
    # Each reduction of 3 s lies beside 2 s of compute. With one at once the next begins when the last has arrived.
    kept = make_times(4, gather=0.0, reduce=3.0)
    waits = [compute_waits(kept, 12.0, 1 / 3, 1, number) for number in (1, 2, 4)]
    assert waits[0] == pytest.approx(3 * 1.0 + 3.0)
    # The link is never idle after the first unit: in all it takes as long, and compute has waited elsewhere.
    assert waits == pytest.approx([waits[0]] * 3)
    uneven = [replace(unit, reduce_scatter=wait) for unit, wait in zip(kept, (1.0, 1.0, 1.0, 3.0), strict=True)]
    # The 3 s of the last unit, which comes first, are made up for beside the next ones.
    assert [compute_waits(uneven, 12.0, 1 / 3, 1, number) for number in (1, 2)] == pytest.approx([1.0 + 1.0, 1.0])


def test_only_the_reduce_scatter_holds_a_buffer_up() -> None:
    # 3 s of all-reduces follow each reduction of 1 s, on the same link; 2 s of compute beside.
    unit = replace(make_times(1, gather=0.0, reduce=1.0)[0], share=0.25, all_reduce=3.0)
    # Reduced at 3, 7, 11 and 15 s, when the link is free; buffers are free then, not after the all-reduces.
    waits = compute_waits([unit] * 4, 12.0, 1 / 3, 1)
    assert waits == pytest.approx(18.0 - 8.0)
    assert compute_waits([unit] * 4, 12.0, 1 / 3, 1, 4) == pytest.approx(waits)  # the link is what takes so long


def test_an_exchange_crosses_between_nodes_with_all_ranks_of_a_node() -> None:
    net = Interconnect(intra=Link(name="wire", gb_s=1e6, hop_s=0.0), inter=Link(name="net", gb_s=10.0, hop_s=0.0))
    for own, num_nodes in ((1, 2), (2, 2), (8, 2), (8, 4)):
        group = Group(num_ranks=own * num_nodes, num_nodes=num_nodes)
        ring, exchange = time_collective("reduce_scatter", 100 * GB, group, net), time_exchange(100 * GB, group, net)
        more = compare_crossing(16, own * num_nodes, own) * 2
        assert exchange / ring == pytest.approx(max(more, 1.0), rel=1e-3)
    alone = Group(num_ranks=8)
    assert time_exchange(GB, alone, net) == time_collective("reduce_scatter", GB, alone, net)


def test_what_ranks_of_the_same_rows_send_each_other_is_exposed() -> None:
    net = make_net(10.0)
    alone = estimate(net)
    exchanges = [Exchange("all_reduce", 10**9, 2), Exchange("all_reduce", 10**9, 2), Exchange("all_gather", 10**9, 2)]
    split = estimate(net, num_split=2, exchanges=exchanges)
    # A sum sends all of its bytes where there are two ranks, a gather half.
    assert split.by_collective["tensor"] == pytest.approx(0.25, rel=1e-3)
    assert split.exposed_s - alone.exposed_s == pytest.approx(0.25, rel=1e-3)
    assert split.tokens_per_s * split.step_s == pytest.approx(2 * alone.tokens_per_s * alone.step_s)
    rows = estimate(net, exchanges=[Exchange("all_to_all", 10**9, 2)])
    assert rows.by_collective["all_to_all"] == pytest.approx(0.05, rel=1e-3)


def test_hidden_collectives_cost_compute_a_share_of_their_time() -> None:
    free, usual, serial = (estimate(make_net(10), contention=c) for c in (0.0, None, 1.0))
    assert free.exposed_s < usual.exposed_s < serial.exposed_s
    assert serial.exposed_s == pytest.approx(serial.communication_s)
    hidden = free.communication_s - free.exposed_s
    assert usual.exposed_s == pytest.approx(free.exposed_s + CONTENTION * hidden)
    assert estimate(make_net(10, is_through_host=True)).exposed_s > usual.exposed_s


def test_a_faster_link_never_makes_a_step_longer() -> None:
    steps = [estimate(make_net(gb_s)) for gb_s in (0.1, 1, 3, 10, 30, 100, 1000)]
    assert [step.step_s for step in steps] == sorted((step.step_s for step in steps), reverse=True)
    assert steps[0].bound == "link"
    assert steps[-1].bound == "compute"
    # A link without end leaves compute alone.
    assert estimate(make_net(1e9)).exposed_s == pytest.approx(0, abs=1e-3)


def test_more_ranks_are_never_faster_for_each_gpu_at_a_fixed_batch() -> None:
    steps = []
    for num_shards in (1, 2, 4, 8, 16, 64, 512, 4096):
        case = Case(num_shards=num_shards, layers=2)
        steps.append(case.estimate("H100 SXM", "nvlink4,ib400x8"))
    # The optimizer's part shrinks with the shard.
    times = [step.compute_s + step.exposed_s for step in steps]
    assert times == sorted(times)
    # Rings of thousands take milliseconds for each of these two blocks.
    assert 1000 * steps[0].tokens_per_s > steps[-1].tokens_per_s > 100 * steps[0].tokens_per_s


def test_shards_inside_nodes_and_replicas_between_them_win_over_a_slow_network() -> None:
    full, hybrid = Case(num_shards=16), Case(num_shards=8, num_replicas=2)
    slow, fast = "nvlink4,ethernet25", "nvlink4,ib400x8"
    # One all-reduce of the gradients instead of two gathers and a reduction, in all half as many bytes.
    assert hybrid.estimate("H100 SXM", slow).step_s < 0.6 * full.estimate("H100 SXM", slow).step_s
    gains = [full.estimate("H100 SXM", n).exposed_s / hybrid.estimate("H100 SXM", n).exposed_s for n in (slow, fast)]
    assert gains[0] > gains[1]
    assert set(hybrid.estimate("H100 SXM", slow).by_collective) == {"all_gather", "reduce_scatter", "all_reduce"}


def test_whole_copies_only_reduce_their_gradients() -> None:
    case = Case(num_shards=1, num_replicas=2, layers=2)
    found = case.estimate("H100 SXM", "nvlink4").by_collective
    num_bytes = 4 * sum(unit.num_params for unit in case.plan)
    assert list(found) == ["all_reduce"]
    assert found["all_reduce"] == pytest.approx(num_bytes / 360e9, rel=0.05)


def test_parameters_that_stay_gathered_save_the_second_gather() -> None:
    twice = estimate(make_net(3))
    once = estimate(make_net(3), units=count_units(PLAN, reshard=False))
    assert once.by_collective["all_gather"] == pytest.approx(twice.by_collective["all_gather"] / 2, rel=1e-3)
    assert once.step_s < twice.step_s
    # Gathered again inside the node only.
    net = replace(make_net(100), inter=Link(name="slow", gb_s=1, hop_s=0.0, is_network=True))
    whole = estimate(net, num_shards=16)
    inside = estimate(net, num_shards=16, regather_ranks=8)
    assert inside.by_collective["all_gather"] == pytest.approx(whole.by_collective["all_gather"] / 2, rel=0.02)


def test_accumulation_repeats_gathers_and_held_gradients_are_reduced_once() -> None:
    one = estimate(make_net(3))
    four = estimate(make_net(3), n=4)
    held = estimate(make_net(3), n=4, units=count_units(PLAN, n=4, held=True))
    assert four.step_s == pytest.approx(4 * one.step_s, rel=1e-6)
    assert held.by_collective["all_gather"] == four.by_collective["all_gather"]
    assert held.by_collective["reduce_scatter"] == pytest.approx(one.by_collective["reduce_scatter"])
    assert held.step_s < four.step_s
    assert four.tokens == 4 * one.tokens
    assert four.crossover_tokens == pytest.approx(one.crossover_tokens)


def test_recomputation_costs_time_but_is_no_work_of_the_model() -> None:
    flops = Flops(forward=10**14, backward=2 * 10**14, recomputed=10**14)
    step = estimate(make_net(1), num_shards=1, flops=flops, units=zero_units())
    assert step.compute_s == pytest.approx(4)
    assert step.mfu_pct == pytest.approx(75)


def test_offload_copies_shards_twice_up_and_gradients_down_and_steps_on_the_host() -> None:
    here = estimate(make_net(100), update_bytes=8 * GB)
    there = estimate(make_net(100), update_bytes=8 * GB, offloaded_bytes=2 * GB, ranks_per_node=2)
    copies = 2 * 2 * GB + 9 * 0.4 * GB / 2
    assert there.by_collective["host_copy"] == pytest.approx(copies / 20e9, rel=1e-3)
    assert here.optimizer_s == pytest.approx(8 / 1000)
    assert there.optimizer_s == pytest.approx(8 / 25)
    assert there.step_s > here.step_s
    assert any("offload: 20 GB/s" in note for note in there.notes)


def test_an_update_beside_compute_costs_what_the_last_backward_and_the_next_forward_leave() -> None:
    flops = Flops(forward=10**14, backward=2 * 10**14, recomputed=0)  # 1 s and 2 s
    options: dict[str, Any] = {"num_shards": 1, "flops": flops, "units": zero_units(), "offloaded_bytes": GB}

    def time_update(seconds: float, n: int = 1) -> float:
        update_bytes = int(50e9 * seconds)
        found = estimate(make_net(1), n=n, update_bytes=update_bytes, overlaps_update=True, ranks_per_node=1, **options)
        return found.optimizer_s

    num_units = sum(unit.num_params > 0 for unit in PLAN)
    assert time_update(1.0) == pytest.approx(1.0 / num_units)  # a quarter beside backward, the rest beside forward
    assert time_update(4.0) == pytest.approx(3.0 - 1.0 + 4.0 / num_units)
    assert time_update(12.0) == pytest.approx(3.0 - 2.0 + 9.0 - 1.0 + 12.0 / num_units)
    # Of several micro-batches, the last backward and the first forward alone.
    assert time_update(1.0, n=4) == pytest.approx(0.75 - 0.25 + 1.0 / num_units)


def test_the_root_is_gathered_first_and_embeddings_compute_nothing() -> None:
    work = Workload(flops=Flops(), plan=PLAN, units=count_units(PLAN), tokens=1, moved_bytes=0)
    times = time_units(work, Machine(gpu=ROUND, links=make_net(1), num_shards=2, ranks_per_node=2))
    assert times[0].gather == pytest.approx(1e-6, rel=0.1, abs=1e-5)
    assert times[1].share == 0
    assert not times[0].is_regathered
    assert sum(unit.share for unit in times) == pytest.approx(1)


def test_the_crossover_of_a_model_is_that_of_its_parameters() -> None:
    case = Case(num_shards=1024, layers=24, length=1024)
    gpu = find_gpu("H100 SXM")
    assert gpu is not None
    assert gpu.bf16_tflops is not None
    share = 400 / gpu.bf16_tflops
    step = case.estimate("H100 SXM", "nvlink4", ranks_per_node=1024, efficiency=share)
    # Without latencies, and what is not a product: 8 bytes and 8 FLOPs a parameter, and the embedding is gathered too.
    machine = Machine(
        gpu=replace(gpu, bandwidth_gb_s=10**9),
        links=make_net(300),
        num_shards=1024,
        ranks_per_node=1024,
        efficiency=share,
    )
    wire = estimate_time(case.work, machine)
    assert wire.crossover_tokens == pytest.approx(400e12 / 300e9, rel=0.12)
    assert step.crossover_tokens > wire.crossover_tokens


def test_the_optimizer_moves_its_bytes() -> None:
    plan = [Unit(names=("",), kind="root", parameters=("r",), num_params=1000, num_trainable=800)]
    assert count_update_bytes(plan, Optimizer(), num_shards=4, itemsize=4) == 10 * 4 * 200
    assert count_update_bytes(plan, Optimizer(name="adamw_8bit"), num_shards=4, itemsize=4) == (6 * 4 + 4) * 200
    assert count_update_bytes(plan, Optimizer(name="muon"), num_shards=4, itemsize=4) == (8 * 4 + 8) * 200
    assert count_update_bytes(plan, Optimizer(name="adafactor"), num_shards=1, itemsize=2) == 9 * 2 * 800


def test_compiled_blocks_move_less() -> None:
    eager = estimate(make_net(100), moved_bytes=1000 * GB)
    compiled = estimate(make_net(100), moved_bytes=1000 * GB, is_compiled=True)
    assert eager.compute_s - compiled.compute_s == pytest.approx(0.6)


def test_what_is_moved_is_typical_of_llamas() -> None:
    case = Case(num_shards=8, layers=8)
    assert case.step.moved_bytes / case.step.flops.hardware == pytest.approx(1.2e-3, rel=0.35)


def test_what_is_moved_grows_with_tokens_and_micro_batches_and_recomputation() -> None:
    once = Case(num_shards=2, layers=2).step.moved_bytes
    assert once == pytest.approx(4 * Case(num_shards=2, length=512, layers=2).step.moved_bytes, rel=0.01)
    assert Case(num_shards=2, layers=2, num_micro_batches=3).step.moved_bytes == 3 * once
    kept = Case(num_shards=2, layers=2, activation_checkpointing=ActivationCheckpointing()).step.moved_bytes
    assert kept < once < 1.5 * kept


def test_quantized_weights_are_moved_once_more_for_each_product() -> None:
    dense, quantized = (Case(num_shards=2, layers=2, is_quantized=q).step.moved_bytes for q in (False, True))
    weights, last = 4 * 4096**2 + 3 * 4096 * 11008, 4096 * 11008
    # Of two blocks, in bfloat16: in forward, in backward, and again but for the last product of a block.
    assert quantized - dense == pytest.approx(2 * 2 * (3 * weights - last), rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, r"tokens: got 0: expected 1 or more"),
        ({"efficiency": 40.0}, r"efficiency: got 40.0: expected a share of the peak, above 0 and up to 1.1"),
        ({"contention": -0.1}, r"contention: got -0.1: .* 0 to 1"),
        ({"dtype": "tf32"}, r"precision: round has no tensor cores for tf32; use float16 or float32"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(make_net(1), **options)


def test_what_was_assumed_is_said() -> None:
    notes = Case(num_shards=2, layers=1).estimate("RTX 4090", "pcie4").notes
    assert any("92 % of the peak of RTX 4090" in note for note in notes)
    assert any("through host memory" in note for note in notes)


def test_all_gpus_reach_some_of_their_peak() -> None:
    assert all(0.5 < get_product_share(gpu) < 1.2 for gpu in GPUS)


def test_an_estimate_takes_milliseconds() -> None:
    case = Case(num_shards=8, layers=32)
    case.estimate("H100 SXM", "nvlink4")
    begin = time.process_time()
    for _ in range(20):
        case.estimate("H100 SXM", "nvlink4")
    assert (time.process_time() - begin) / 20 < 0.02
