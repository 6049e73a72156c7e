"""``fsdp2_auto``: the strategy that looks for the settings with which a run fits its GPUs and is fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.estimate import (
    Hardware,
    describe_model,
    get_optimizer,
    guess_optimizer,
    guess_shape,
    make_example_batch,
    measure_batch,
)
from lit_fsdp.planning.search.process import NotPicklableError, SearchProcess, SearchRequest, pack_request
from lit_fsdp.planning.search.search import (
    Candidate,
    Problem,
    Variant,
    choose,
    choose_smallest,
    count_tries,
    format_changes,
    search,
)
from lit_fsdp.planning.step_parts import NoEstimateError, Ranks
from lit_fsdp.planning.timing.hardware import choose_usual_gpu, find_gpu, parse_memory
from lit_fsdp.planning.timing.links import choose_links, parse_links
from lit_fsdp.profiling.device_memory import count_usable_bytes, read_card
from lit_fsdp.profiling.host_memory import count_host_bytes
from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.sharding.mixed_precision import cast_parameters
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import find_roots
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy, get_used_settings
from lit_fsdp.strategy.trainer_settings import count_micro_batches

NAME = "fsdp2_auto"
_GIB = 2**30
_PATIENCE_S = 10.0


class AutoFSDP2Strategy(FSDP2Strategy):
    """FSDP2Strategy that chooses its settings of sharding, recomputation and offload when a run starts.

    It estimates memory and time of a step for every combination, as the search of ``plan`` does, takes the fastest that
    fits the GPU on which the least memory is free when the run starts, and prints what and why. All of these compute
    the same. What changes training (batch, adapters, 4-bit weights, optimizer) stays as configured;
    ``plan --search true`` tries that too. Needs data with ``make_example_batch``. Where the closed form has no rules
    for a model, ``fit`` traces some of the settings on the first rank, up to a minute each, and refuses what cannot be
    traced; evaluation takes the defaults. A module that is sharded already stays as it is.

    Args:
        device_memory: Of a GPU, with a unit, such as 15GiB, where less may be used than is free.
        link: What connects the GPUs, such as ``pcie4`` or ``nvlink4,ib400x8``, or a comm.json of ``bench comm``;
            ``null`` takes what usually connects such GPUs.
        **kwargs: Of ``FSDP2Strategy``, without those that are chosen.
    """

    def __init__(self, device_memory: str | None = None, link: str | None = None, **kwargs: Any) -> None:
        # The command line takes arguments of the parent from here, but for those that are set.
        super().__init__(mesh=None, sharding=None, activation_checkpointing=None, cpu_offload=None, **kwargs)
        self._configured = self.settings
        self.device_bytes = None if device_memory is None else parse_memory(device_memory)
        self.links = None if link is None else parse_links(link)
        self.memory_note = ""  # which memory settings are chosen for

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if (module := self.lightning_module) is not None:
            # As it is sharded already; else not with what an earlier fit chose, of another module or accumulation.
            self._use(get_used_settings(module, self.settings.mesh) if find_roots(module) else self._configured)
        super().setup(trainer)

    @override
    def _shard(self, module: pl.LightningModule) -> None:
        """Choose, also for an evaluation, as training may follow."""
        try:
            self._choose(module)
        except NoEstimateError as error:
            if module.trainer.state.fn == TrainerFn.FITTING:
                raise ValueError(f"{NAME}: {error}; set trainer.strategy to fsdp2, and its settings by hand") from error
            self._use(self._configured)
        super()._shard(module)

    @override
    def _count_fixed_micro_batches(self, trainer: pl.Trainer) -> int | None:
        # A module keeps what an earlier fit chose: no_sync, too, which does nothing without accumulation.
        return None if find_roots(self._module) else super()._count_fixed_micro_batches(trainer)

    def _use(self, settings: Settings) -> None:
        """Set ``settings``, and the mesh that they have; the one that is there may be of another module's."""
        before, self.settings = self.settings, settings
        if settings.mesh != before.mesh:
            self._build_mesh()

    def _choose(self, module: pl.LightningModule) -> None:
        """Set ``settings``, the same on all ranks."""
        batch = make_example_batch(get_data_module(module.trainer))
        problem, reason = self._describe(module, batch)
        candidates: list[Candidate] = []
        try:
            candidates = [] if reason else search(problem)
        except UnreadableModuleError as error:
            reason = str(error)
        if reason:
            if module.trainer.state.fn != TrainerFn.FITTING:
                raise NoEstimateError(reason)
            candidates = self._search_by_traces(module, batch, problem, reason)
        chosen = choose(candidates)
        if chosen is None:
            chosen = choose_smallest(candidates)
            self._report_missing(chosen, problem.device_bytes)
        chosen = self.broadcast(chosen)
        self._use(chosen.settings)
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._check_fit()
        self._report(chosen, candidates[0], problem)

    def _search_by_traces(
        self, module: pl.LightningModule, batch: Any, problem: Problem, reason: str
    ) -> list[Candidate]:
        """Return what a search by traces finds on the first rank, while the others wait for it.

        Raises:
            NoEstimateError: On all ranks alike, whatever went wrong on the first.
        """
        if not module.automatic_optimization:
            raise NoEstimateError(f"{type(module).__name__} optimizes manually, so its step cannot be traced")
        problem = replace(problem, only_fastest=True)
        rank_zero_info(
            f"{NAME}: no closed form ({reason}), so settings are traced, up to a minute each: some of "
            f"{count_tries(problem)}, and of as many with offload where nothing fits without"
        )
        # Not one collective that waits for the end of the search: that would run into its timeout.
        patience_s = min(_PATIENCE_S, self.timeout_s / 4)
        searching: SearchProcess | None = None
        found: list[Candidate] | str | None = None
        try:
            if self.is_global_zero:
                try:
                    request = SearchRequest(problem=problem, batch=batch)
                    packed = pack_request(request, module.trainer, self._describe_trainer(module.trainer))
                    searching = SearchProcess(packed)
                except Exception as error:  # noqa: BLE001  the other ranks wait, whatever it is
                    known = isinstance(error, NotPicklableError | OSError)
                    found = str(error) if known else f"{type(error).__name__}: {error}"
            while (found := self.broadcast(found if searching is None else searching.wait(patience_s))) is None:
                pass
        finally:
            if searching is not None:
                searching.stop()
        if isinstance(found, str):
            raise NoEstimateError(f"no closed form ({reason}), and no trace: {found}")
        return found

    def _describe_trainer(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return arguments of a Trainer that is as this one, to trace with."""
        return {
            "device_type": self.root_device.type,
            "devices": self.num_processes,
            "num_nodes": self.num_nodes,
            "precision": trainer.precision,
            "mixed_precision": self._configured.mixed_precision,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        }

    def _describe(self, module: pl.LightningModule, batch: Any) -> tuple[Problem, str]:
        """Return what is searched for, and why the closed form cannot, if it cannot."""
        trainer: Any = module.trainer
        cast_parameters(module, self.precision_plugin.mixed_precision, keep=list_adapter_parameters(module))
        reason = ""
        try:
            micro_batch = measure_batch(module, batch)
            optimizer = get_optimizer(module)
        except NoEstimateError as error:
            # A trace takes both from the module; what is left are estimates of time that go for all settings alike.
            reason = str(error)
            micro_batch, optimizer = guess_shape(batch), guess_optimizer(module)
        hardware, device_bytes = self.choose_hardware()
        problem = Problem(
            variants=[Variant(model=describe_model(module, self, optimizer))],
            settings=self._configured,
            ranks=Ranks(num_nodes=self.num_nodes, per_node=self.num_processes),
            micro_batch=micro_batch,
            # Gradients can only be held over micro-batches whose number is known.
            num_micro_batches=(count_micro_batches(trainer) or 1) if module.automatic_optimization else 1,
            splits_batch=False,
            tries_optimizers=False,
            hardware=hardware,
            device_bytes=device_bytes,
            device_type=self.root_device.type,
            host_bytes=min(gather_objects(count_host_bytes())),  # else ranks would differ about what fits
        )
        return problem, reason

    def choose_hardware(self) -> tuple[Hardware, int]:
        """Return the GPU with the least memory for a rank, its links, and that memory, which ``memory_note`` names.

        All ranks must call it.
        """
        if self.root_device.type == "cuda":
            self.barrier()  # else another rank may still start CUDA, in memory that is free until then
            cards = gather_objects(read_card(self.root_device))
            usable = count_usable_bytes(cards)
            rank = usable.index(min(usable))
            memory, card = usable[rank], cards[rank]
            total, name, num_sharing = card.total, card.name, sum(other.uuid == card.uuid for other in cards)
            share = "" if num_sharing == 1 else f" for each of the {num_sharing} ranks on it"
            self.memory_note = f"free on the GPU of rank {rank}{share}, which has {total / _GIB:.2f} GiB"
        else:
            memory = total = min(gather_objects(count_host_bytes() // self.num_processes))
            name, self.memory_note = "", "a rank's share of the host"
        if self.device_bytes is not None and self.device_bytes < memory:
            memory, self.memory_note = self.device_bytes, "device_memory"
        gpu = find_gpu(name, total / _GIB) or choose_usual_gpu(total / _GIB)
        return Hardware(gpu=gpu, links=self.links or choose_links(gpu, self.num_processes)), memory

    def _report_missing(self, smallest: Candidate, device_bytes: int) -> None:
        sizes = (
            f"the smallest has {smallest.peak_bytes / _GIB:.2f} GiB of tensors and needs "
            f"{smallest.needed_bytes / _GIB:.2f} GiB with headroom, of {device_bytes / _GIB:.2f} GiB "
            f"({self.memory_note})"
        )
        help_text = (
            "take more GPUs or a smaller batch, or see plan --search true, which tries adapters and 4-bit weights too"
        )
        if smallest.peak_bytes > device_bytes:
            raise ValueError(f"{NAME}: nothing fits: {sizes}; {help_text}")
        rank_zero_warn(f"{NAME}: nothing fits with headroom: {sizes}; going on with that; {help_text}")

    def _report(self, chosen: Candidate, default: Candidate, problem: Problem) -> None:
        text = format_changes(chosen.changes) if chosen.changes else "the defaults"
        if chosen.host_bytes:
            text += f", with {chosen.host_bytes * self.num_processes / _GIB:.1f} GiB of host memory on each node"
        rank_zero_info(
            f"{NAME}: {text}: {chosen.needed_bytes / _GIB:.2f} of {problem.device_bytes / _GIB:.2f} GiB with headroom "
            f"({self.memory_note}), "
            f"{chosen.time.step_s / default.time.step_s:.2f} of the time of the defaults, which need "
            f"{default.needed_bytes / _GIB:.2f} GiB (speed as on {problem.hardware.gpu.name}, {problem.hardware.links})"
        )


StrategyRegistry.register(
    NAME, AutoFSDP2Strategy, description="Sharding, recomputation and offload as a search finds them", override=True
)
