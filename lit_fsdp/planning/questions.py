"""What a plan can be asked, and the answers in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lit_fsdp.planning.answers import (
    make_limit_section,
    make_machine_section,
    make_scale_section,
)
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.limits import Size, find_limits
from lit_fsdp.planning.machines import Machine, choose_machine, find_machines, scale
from lit_fsdp.planning.step_parts import Ranks
from lit_fsdp.planning.timing.hardware import Gpu
from lit_fsdp.planning.trials import Trials
from lit_fsdp.reporting.sections import Section
from lit_fsdp.sharding.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What is asked.

    Args:
        longest: How long rows may be.
        largest: How many rows a micro-batch may have.
        cheapest: Which GPUs would do.
        all_ranks: Numbers of ranks to compare, the first one as the measure of speed-up; none are not.
        prices: Of an hour of a GPU, where they are known.
    """

    longest: bool = False
    largest: bool = False
    cheapest: bool = False
    all_ranks: Sequence[Ranks] = ()
    prices: Mapping[Gpu, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything is asked."""
        return self.longest or self.largest or self.cheapest or bool(self.all_ranks)


def answer(questions: Questions, trials: Trials, hardware: Hardware | None, device_bytes: int | None) -> list[Section]:
    """Return a section for each question.

    Args:
        questions: What is asked.
        trials: Of the configured step.
        hardware: To estimate times for; ``all_ranks`` needs it.
        device_bytes: Memory of a GPU; all but ``cheapest`` need it.

    Raises:
        NoEstimateError: The step cannot be changed as a question asks for.
        ValueError: There is no link between nodes, or the GPU does not compute in the dtype of the step.
    """
    found = []
    sizes: dict[Size, bool] = {"seq_length": questions.longest, "batch_size": questions.largest}
    for size, is_asked in sizes.items():
        if is_asked and device_bytes is not None:
            limits = find_limits(trials, size, device_bytes, hardware)
            found.append(make_limit_section(size, limits, device_bytes))
    if questions.all_ranks and hardware is not None and device_bytes is not None:
        found.append(make_scale_section(scale(trials, questions.all_ranks, hardware, device_bytes, questions.prices)))
    if questions.cheapest:
        machines = find_machines(trials, questions.prices)
        found.append(make_machine_section(machines, has_prices=bool(questions.prices)))
    return found


def find_other_machines(trials: Trials, hardware: Hardware, device_bytes: int) -> list[Machine]:
    """Return the step on one card of several, and with a copy of the model on each, as two machines.

    Nothing for one card, which is that already, and no copies where these are configured.
    """
    given, ranks = trials.settings, trials.ranks
    if ranks.world_size == 1 or ranks.resolve(given.mesh).num_sharing > 1:
        return []
    one = replace(given, mesh=Mesh(), sharding=given.sharding.keep_least())
    tried = [(one, Ranks(num_nodes=1, per_node=1))]
    if ranks.resolve(given.mesh).num_shards > 1:
        tried.append((replace(one, mesh=Mesh(replicate=-1, shard=1)), ranks))
    return [
        choose_machine([trials.estimate(settings, ranks=own)], hardware, device_bytes, {}) for settings, own in tried
    ]
