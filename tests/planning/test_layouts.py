"""Which of several layouts is recommended."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from closed_form_models import Model
from search_problems import describe

from lit_fsdp.optim.factory import Optimizer, OptimizerName
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.layouts import Layout, choose_layout, derive_speed
from lit_fsdp.planning.limits import find_limits
from lit_fsdp.planning.planned_step import PlannedStep
from lit_fsdp.planning.search.search import list_changes
from lit_fsdp.planning.step_parts import MicroBatch, NoEstimateError, Ranks
from lit_fsdp.planning.timing.links import parse_links
from lit_fsdp.planning.trials import Trial, Trials
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.mixed_precision import read_precision
from lit_fsdp.sharding.settings import Settings


def make_layout(tokens_per_s: float, *, copies: int = 1, fits: bool = True, rounds: bool = False) -> Layout:
    time: Any = SimpleNamespace(tokens_per_s=tokens_per_s)
    trial: Any = SimpleNamespace(ranks=Ranks(num_nodes=1, per_node=4), settings=Settings(mesh=Mesh(replicate=copies)))
    return Layout(trial=trial, time=time, fits=fits, rounds=rounds)


@pytest.mark.parametrize(
    ("layouts", "exact", "any_bits"),
    [
        ([make_layout(1.0), make_layout(1.9), make_layout(2.0, copies=2)], 2, 2),
        ([make_layout(1.97), make_layout(2.0, copies=2)], 0, 0),  # the error of estimates does not tell them apart
        ([make_layout(1.97), make_layout(1.98), make_layout(2.0, copies=2)], 1, 1),  # but of a mesh, the fastest
        ([make_layout(1.97), make_layout(1.98, fits=False), make_layout(2.0, copies=2)], 0, 0),
        ([make_layout(1.0), make_layout(1.95, rounds=True), make_layout(1.97)], 2, 2),  # and bits are kept
        ([make_layout(1.0), make_layout(1.97, rounds=True), make_layout(2.0, rounds=True)], 0, 1),  # most of them
        ([make_layout(1.0), make_layout(1.5), make_layout(1.6, rounds=True)], 1, 2),
        ([make_layout(1.0, fits=False), make_layout(0.5), make_layout(9.0, fits=False)], 1, 1),
        ([make_layout(1.0, fits=False), make_layout(0.5, rounds=True)], None, 1),
    ],
)
def test_the_fastest_that_fits_is_chosen_and_of_near_ones_the_first_mesh(
    layouts: list[Layout], exact: int | None, any_bits: int
) -> None:
    assert choose_layout(layouts, rounds=False) is (None if exact is None else layouts[exact])
    assert choose_layout(layouts, rounds=True) is layouts[any_bits]


def test_every_size_of_the_mesh_that_differs_is_named() -> None:
    given = Settings(mesh=Mesh(replicate=2, sequence=2, tensor=2))
    changes = {f"trainer.strategy.mesh.{name}": 1 for name in ("replicate", "sequence", "tensor")}
    assert list_changes(given, Settings()) == changes


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        *((mesh, "adamw") for mesh in (Mesh(), Mesh(tensor=2), Mesh(replicate=2), Mesh(sequence=2))),
        (Mesh(replicate=4), "muon"),
    ],
    ids=str,
)
def test_a_step_that_was_measured_is_predicted_to_take_what_it_took(mesh: Mesh, optimizer: OptimizerName) -> None:
    problem = describe(2**40)
    cost: Any = SimpleNamespace(
        flops=Flops(forward=10**12, backward=2 * 10**12), moved_bytes=0, exchanges=(), split_units=(), memory=None
    )
    trial = Trial(
        model=replace(problem.variants[0].model, optimizer=Optimizer(name=optimizer)),
        settings=Settings(mesh=mesh),
        ranks=Ranks(num_nodes=1, per_node=4),
        micro_batch=MicroBatch(rows=1, length=512),
        num_micro_batches=1,
        cost=cost,
    )
    speed = derive_speed(trial, compute_s=0.8, optimizer_s=0.1, other_s=0.05)
    time = trial.estimate_time(Hardware(gpu=problem.hardware.gpu, links=parse_links("pcie4"), speed=speed))
    assert (time.compute_s, time.optimizer_s, time.other_s) == pytest.approx((0.8, 0.1, 0.05))


def make_trials(mesh: Mesh, data: Any) -> Trials:
    """Return those of a small model on 4 ranks."""
    module: Any = Model()
    module.measure_batch = lambda _: MicroBatch(rows=1, length=64)
    module.optimizer_settings = Optimizer()
    precision = SimpleNamespace(mixed_precision=read_precision("32-true"))
    strategy: Any = SimpleNamespace(settings=Settings(mesh=mesh), precision_plugin=precision)
    step = PlannedStep(
        module=module,
        strategy=strategy,
        batch={},
        ranks=Ranks(num_nodes=1, per_node=4),
        num_micro_batches=4,
        clip_norm=None,
        notes=(),
    )
    return Trials([(step, {})], data)


@pytest.mark.parametrize("name", ["sequence", "tensor"])
def test_a_global_batch_is_one_card_s_alone_where_only_several_share_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = make_trials(Mesh(**{name: 2}), SimpleNamespace(batch_size=1, global_batch_size=8))
    monkeypatch.setattr(trials, "_count", lambda *_: None)
    assert trials.estimate().num_micro_batches == 4
    assert trials.estimate(Settings(), ranks=Ranks(num_nodes=1, per_node=1)).num_micro_batches == 8
    assert trials.estimate(Settings(), ranks=Ranks(num_nodes=1, per_node=4)).num_micro_batches == 2


def test_the_largest_micro_batch_is_no_question_where_frames_decide_its_rows() -> None:
    trials = make_trials(Mesh(), SimpleNamespace(batch_size=1, max_frames_per_batch=1500))
    with pytest.raises(NoEstimateError, match="max_frames_per_batch: it decides how many rows"):
        find_limits(trials, "batch_size", 2**40, None)
