"""``FSDP2Strategy``: answers what Lightning asks of a strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core import rank_zero
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lit_fsdp.checkpoint.latest import enter
from lit_fsdp.checkpoint.manifest import Verify
from lit_fsdp.checkpoint.places import discard, follow
from lit_fsdp.checkpoint.remote import Location, RemotePath, locate
from lit_fsdp.checkpoint.sharded import RANDOM_STATES, keep_plain, load_checkpoint, read_random_state
from lit_fsdp.checkpoint.single_file import load_single_file
from lit_fsdp.checkpoint.space import DiskSpace
from lit_fsdp.checkpoint.writer import CheckpointFormat, CheckpointWriter
from lit_fsdp.errors import get_first_line, join_names
from lit_fsdp.optim.overlapped_steps import OverlappedSteps
from lit_fsdp.optim.sharded_optimizer import refuse_whole_steps
from lit_fsdp.parsing.mappings import TakesMappings
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.buffers import has_statistics_of_ranks, sync_buffers
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.float8 import Float8, convert_linears
from lit_fsdp.sharding.gloo_collectives import replace_collectives
from lit_fsdp.sharding.layer_drop import describe_layer_drop
from lit_fsdp.sharding.low_bit import compare_crossing
from lit_fsdp.sharding.mesh import DataRanks, Mesh, MeshSizes, build_mesh, make_module_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.random_state import collect_random_state, join_generators, split_generators
from lit_fsdp.sharding.replaced_method import ReplacedMethod
from lit_fsdp.sharding.sequence import SequenceGroup, build_sequence_group
from lit_fsdp.sharding.settings import PRESETS, Settings
from lit_fsdp.sharding.shard import (
    STEPS,
    Compile,
    Sharding,
    find_roots,
    no_sync,
    register_steps,
    reshard,
)
from lit_fsdp.sharding.tensor_parallel import check_gradients
from lit_fsdp.sharding.torch_internals import gather_when_called, settle_root
from lit_fsdp.sharding.unit_table import make_table, print_table
from lit_fsdp.sharding.wrap import Unit, Wrap, get_class
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.finetuning import restore_groups
from lit_fsdp.strategy.gathered_weights import GatheredWeights, list_limited
from lit_fsdp.strategy.hang_watch import HangWatch, choose_report_s, watch_for_hangs
from lit_fsdp.strategy.known_errors import explain
from lit_fsdp.strategy.launcher import Launcher, describe_ended, note_lost
from lit_fsdp.strategy.lightning_internals import (
    check_monitors,
    count_steps_of_loggers,
    end_restart,
    evaluate_without_inference_mode,
    forget_skipped,
    forget_train_loader,
    get_evaluation_loop,
    is_last_micro_batch,
    is_placeholder,
    save_where_all_fail,
    save_whole_steps,
    watch_monitors,
)
from lit_fsdp.strategy.notebook_launcher import NotebookLauncher, check_weights, is_notebook, refuse_lost_weights
from lit_fsdp.strategy.overlapped_optimizer import overlap_optimizer
from lit_fsdp.strategy.plateaus import PLATEAUS, note_plateaus, restore_plateaus
from lit_fsdp.strategy.precision_plugin import FSDP2Precision, translate_precision
from lit_fsdp.strategy.process_group import MAX_TIMEOUT_S, init_process_group
from lit_fsdp.strategy.processes import count_started, describe_idle_cores, refuse_unread
from lit_fsdp.strategy.random_streams import RandomStreams
from lit_fsdp.strategy.rank_facts import check_shared_rows, list_device_facts, list_device_notes, list_row_facts
from lit_fsdp.strategy.rank_paths import RankPaths, watch_paths
from lit_fsdp.strategy.rebinding import (
    keep_attributes,
    rebind_optimizers,
    remember_parameters,
    warn_of_hooks,
    warn_of_lists,
)
from lit_fsdp.strategy.retried_step import RetriedSteps, check_retries
from lit_fsdp.strategy.roll_call import compare_in_group
from lit_fsdp.strategy.run_settings import RUN_SETTINGS, collect_run_settings, warn_of_changes
from lit_fsdp.strategy.slurm import find_own_tasks
from lit_fsdp.strategy.trainer_settings import (
    check_learning_rate_finder,
    check_trainer,
    count_checkpoints,
    count_micro_batches,
    derive_accumulation,
    is_accumulation_derived,
    list_checkpoint_folders,
    settle_accumulation,
)
from lit_fsdp.strategy.uneven_loaders import EvenBatches
from lit_fsdp.weights.load import init_weights, iterate_meta, materialize


@dataclass(frozen=True, kw_only=True)
class _Sharded:
    """How a run has sharded a module. Its second run may be under another strategy, or after one of another module."""

    settings: Settings
    precision: str
    dtypes: MixedPrecision
    plan: list[Unit]


# Of a checkpoint, without which no run goes on.
_NEEDED = frozenset({"state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers"})
_SHARDED: WeakKeyDictionary[pl.LightningModule, _Sharded] = WeakKeyDictionary()
# Modules that have memory without values, as an error or Ctrl-C came before these: a second run fills them.
_UNFILLED: WeakSet[pl.LightningModule] = WeakSet()


def get_used_settings(module: pl.LightningModule, mesh: Mesh) -> Settings:
    """Return what a module was sharded with; the defaults on this mesh if its user has sharded it."""
    return _SHARDED[module].settings if module in _SHARDED else Settings(mesh=mesh)


class FSDP2Strategy(TakesMappings, EvenBatches, RandomStreams):
    """Shards parameters, gradients and optimizer state with FSDP2 (``fully_shard``).

    The LightningModule becomes the root FSDP unit, the modules that ``wrap`` finds become units inside it. Build
    large models in ``configure_model`` under ``torch.device("meta")``: they get their memory after sharding, and
    their values from the hook ``configure_weights()``, or else from their modules' ``reset_parameters``.
    A module that has a method ``configure_units(model)`` returning a list of ``Unit`` decides itself; one that
    calls ``fully_shard`` in ``configure_model`` is left as it is.

    Args:
        mesh: How the ranks are arranged.
        wrap: Which modules form an FSDP unit.
        sharding: What happens to gathered parameters and unreduced gradients.
        mixed_precision: Dtypes that win over those of the Trainer's ``precision``.
        activation_checkpointing: Activation checkpointing.
        cpu_offload: Keep shards in host memory; ``null`` keeps them on the device.
        compile: Compile every block; ``null`` does not.
        float8: Multiply in float8 in linear layers; ``null`` does not. Needs the extra ``float8``.
        checkpoint_format: ``sharded`` writes a folder, every rank its own part. ``single_file`` gathers everything
            on rank 0 and writes what Lightning's other strategies can read. Both are always read.
        save_frozen: Whether checkpoints hold frozen parameters. ``null`` leaves them out of folders where
            the module gets them back by itself, such as the pretrained model below adapters.
        async_save: Copy shards to host memory and write them beside training, at most one checkpoint at a
            time. Costs host memory for one copy of this rank's shards and optimizer state.
        verify_checkpoint: What is compared before a checkpoint is loaded. ``sizes``: the sizes of all files, and the
            checksums of those up to 16 MiB. ``full``: all checksums, for which every file is read once more.
        print_plan: Print the table of units when ``fit`` starts.
        timeout_s: How long a collective may take before the run fails.
        start_timeout_s: How long ranks wait for each other when the run starts, in seconds. Those that came then end
            with one line that says who is missing.
        hang_report_s: After how many seconds in which a rank waits for others all ranks write what they wait for, and
            one line says who is missing and where. Nothing is ended. ``auto`` is 300, or half of ``timeout_s`` if that
            is less; ``null`` never does.
        oom_retries: How often in a run a training step is redone on all ranks after one of them has run out of memory:
            at first as it was, later in smaller parts, with the same result, see ``docs/out_of_memory.md``. Costs one
            exchange between hosts in each micro-batch. 0 ends the run at the first time.
    """

    is_distributed = True
    num_nodes = 1

    def __init__(
        self,
        mesh: Mesh | None = None,
        wrap: Wrap | None = None,
        sharding: Sharding | None = None,
        mixed_precision: MixedPrecision | None = None,
        activation_checkpointing: ActivationCheckpointing | None = None,
        cpu_offload: CPUOffload | None = None,
        compile: Compile | None = None,  # noqa: A002
        float8: Float8 | None = None,
        checkpoint_format: CheckpointFormat = "sharded",
        save_frozen: bool | None = None,
        async_save: bool = False,
        verify_checkpoint: Verify = "sizes",
        print_plan: bool = False,
        timeout_s: float = 1800.0,
        start_timeout_s: float = 180.0,
        hang_report_s: float | Literal["auto"] | None = "auto",
        oom_retries: int = 0,
    ) -> None:
        super().__init__()
        self.settings = Settings(
            mesh=mesh or Mesh(),
            wrap=wrap or Wrap(),
            sharding=sharding or Sharding(),
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing or ActivationCheckpointing(),
            cpu_offload=cpu_offload,
            compile=compile,
            float8=float8,
        )
        self.prints_plan = print_plan
        self.checkpoint_format = checkpoint_format
        self.save_frozen = save_frozen
        self.async_save = async_save
        # Given the names of what on_save_checkpoint put under extra_state, returns tensors to load it into.
        self.make_extra_state: Callable[[Collection[str]], Mapping[str, Tensor]] | None = None
        self._writer = CheckpointWriter(
            checkpoint_format=checkpoint_format,
            save_frozen=save_frozen,
            is_async=async_save,
            timeout_s=timeout_s,
            report=rank_zero.rank_zero_warn,
        )
        self.disk_space: DiskSpace | None = None  # when fit began
        self.checkpoint_folders: list[Location] = []  # where earlier runs of this name have left theirs
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.hang_report_s = hang_report_s
        self._hang_watch: HangWatch | None = None
        self.oom_retries = oom_retries
        self._retried_steps: RetriedSteps | None = None
        self._rank_paths: RankPaths | None = None
        # What has to be the same on all ranks when the run starts, by name; the command line adds what it knows.
        self.facts = {"torch": torch.__version__} | {name: version(name) for name in ("lightning", "lit_fsdp")}
        self.verify_checkpoint = verify_checkpoint
        self._saved_settings: dict[str, Any] = {}  # of the run that saved the checkpoint
        self._noted_plateaus: dict[str, Any] = {}  # likewise
        self._goes_on_by_metrics = False  # a run that was resumed with those
        self._left_out: set[str] = set()  # what it means that no checkpoint can hold something, as was said
        self._has_seen_step = self._has_checked_gradients = False
        self._checked_loaders: set[tuple[RunningStage | None, int]] = set()
        self.device_mesh: DeviceMesh | None = None
        self.sequence_group: SequenceGroup | None = None  # the ranks that share the tokens of this rank's rows
        self.plan: list[Unit] = []
        self._gathered_weights: GatheredWeights | None = None  # of the run
        self._unit_table: Table | None = None  # to be printed
        self._hooks: list[RemovableHandle | ReplacedMethod] = []  # until the run has ended
        self.overlapped_steps: OverlappedSteps | None = None  # with cpu_offload.overlap_optimizer

    @property
    def missing_checkpoint(self) -> Location | None:
        """The newest checkpoint that was due, if it could not be saved."""
        return self._writer.missing

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _gathered(self) -> GatheredWeights:
        assert self._gathered_weights is not None
        return self._gathered_weights

    @property
    def _real_optimizers(self) -> list[Optimizer]:
        return [optimizer for optimizer in self.optimizers if not is_placeholder(optimizer)]

    # What Lightning wants to know

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """How many ranks this node has."""
        return len(self.parallel_devices or [])

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        data = self.data_ranks
        return {"num_replicas": data.count, "rank": data.index}

    @property
    def mesh_sizes(self) -> MeshSizes:
        """How many ranks each dimension of the mesh has."""
        return self.settings.mesh.resolve(world_size=self.world_size, ranks_per_node=self.num_processes)

    @property
    @override
    def data_ranks(self) -> DataRanks:
        """Which rows are those of this rank, which may share them with others."""
        sizes = {"world_size": self.world_size, "ranks_per_node": self.num_processes}
        return self.settings.mesh.locate(self.global_rank, **sizes)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # into the shards

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_checkpoint does

    @property
    @override
    def precision_plugin(self) -> FSDP2Precision:
        # The Trainer sets it; only a strategy without a Trainer has none.
        return self._precision_plugin or FSDP2Precision(override=self.settings.mixed_precision)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # Lightning cannot know ours and hands over its own. The accelerator is known by then, devices are not yet.
        self._precision_plugin: FSDP2Precision | None = None
        if plugin is not None:
            device_type = "cuda" if isinstance(self.accelerator, CUDAAccelerator) else "cpu"
            self._precision_plugin = translate_precision(plugin, self.settings.mixed_precision, device_type)

    # From the Trainer's construction to the process group

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        is_rank = self.cluster_environment.creates_processes_externally
        refuse_unread(os.environ, self.cluster_environment, len(self.parallel_devices or ()), self.num_nodes)
        if is_rank and self.parallel_devices:
            kind = type(self.cluster_environment)  # of others, and by default, it may be known after this
            is_known = kind.__module__.startswith("lightning.") and kind is not LightningEnvironment
            started = count_started(
                len(self.parallel_devices),
                self.num_nodes,
                num_found=type(self.accelerator).auto_device_count(),  # type: ignore[union-attr]
                num_ranks=self.cluster_environment.world_size() if is_known else None,
                environ=os.environ,
                tasks=find_own_tasks() if isinstance(self.cluster_environment, SLURMEnvironment) else None,
            )
            if started < len(self.parallel_devices):
                rank_zero.rank_zero_warn(
                    f"devices: {started} of {len(self.parallel_devices)} on this node are used, one by each process "
                    "that was started; the others stay idle"
                )
            self.parallel_devices = self.parallel_devices[:started]
        if not is_rank:
            is_forked = is_notebook() and self.num_processes * self.num_nodes > 1
            forks = NotebookLauncher(self, num_nodes=self.num_nodes) if is_forked else None
            self._launcher = forks or Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        self._check_settings()

    def _check_settings(self) -> None:
        """Refuse what cannot work, when the Trainer is built: before processes, collectives or memory."""
        check_retries(self.oom_retries, self.settings)
        self.settings.check(world_size=self.world_size, ranks_per_node=self.num_processes, device=self.root_device)
        for name in ("timeout_s", "start_timeout_s"):
            if not 0 < (given := getattr(self, name)) <= MAX_TIMEOUT_S:
                raise ValueError(f"{name}: got {given}: expected seconds above 0, up to {MAX_TIMEOUT_S:,.0f}")
        choose_report_s(self.hang_report_s, self.timeout_s)
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm: got true: FSDP2Strategy does not replace layers; call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm in configure_model instead"
            )
        if self._checkpoint_io is not None:
            raise ValueError(
                f"plugins: got {type(self._checkpoint_io).__name__}: FSDP2Strategy writes checkpoints itself; leave it "
                "out, and set async_save to write beside training"
            )

    def check_module(self, module: object) -> None:
        """Refuse a module that would compute the same rows on all ranks that ``mesh.sequence`` lets share them.

        A module that splits their tokens, as :class:`lit_fsdp.tasks.CausalLM` does, has a method
        ``check_sequence(size)``, which refuses what it cannot split.

        Raises:
            ValueError: With what to set instead.
        """
        if (size := self.settings.mesh.sequence) == 1:
            return
        check = getattr(module, "check_sequence", None)
        if check is None:
            raise ValueError(
                f"mesh.sequence: got {size}: {type(module).__name__} does not split the tokens of its rows over ranks, "
                "as CausalLM does; set 1"
            )
        check(size)

    def set_world_ranks(self) -> None:
        """Tell the environment which rank this is, where the environment does not know."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero.rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        trainer = self._module.trainer
        self.check_module(self._module)
        check_trainer(trainer)  # before callbacks are set up, some of which copy the module
        if trainer.state.fn == TrainerFn.FITTING:
            # A path given to ``fit`` is not known before the checkpoint is loaded, and that of a run before is there
            # until then, seen in lightning 2.6.6.
            derive_accumulation(trainer, get_data_module(trainer), is_resumed=None)
        try:
            super().setup_environment()  # which starts CUDA
        except RuntimeError as error:  # Lightning counts the GPUs of a driver that is too old for torch, too
            raise ValueError(
                f"accelerator: {self.root_device} cannot be used; set cpu, or devices that can: {get_first_line(error)}"
            ) from error
        if self.settings.float8 is not None:  # not with the other settings: plans are made on machines without GPUs
            self.settings.float8.check_machine(self.root_device, self.precision_plugin.mixed_precision)
        join_generators()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        init_process_group(
            self.cluster_environment,
            self.root_device,
            num_nodes=self.num_nodes,
            timeout_s=self.timeout_s,
            start_timeout_s=self.start_timeout_s,
            facts={
                "number of ranks": str(self.world_size),
                **self.facts,
                **list_device_facts(self.root_device, self.precision_plugin.mixed_precision),
            },
            notes=list_device_notes(self.root_device),
            find_lost=partial(describe_ended, self._launcher),
        )
        self._hang_watch = watch_for_hangs(trainer, choose_report_s(self.hang_report_s, self.timeout_s))
        self._build_mesh()

    def _build_mesh(self) -> None:
        options: dict[str, Any] = {
            "device_type": self.root_device.type,
            "world_size": self.world_size,
            "ranks_per_node": self.num_processes,
            "timeout_s": self.timeout_s,
        }
        self.device_mesh = build_mesh(self.settings.mesh, **options)
        self.sequence_group = build_sequence_group(self.settings.mesh, **options)
        self._module._device_mesh = make_module_mesh(self.device_mesh)

    # From the user's model to shards

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta") if empty_init else nullcontext():
            yield

    @override
    def model_to_device(self) -> None:
        """Nothing to move: sharding and ``materialize`` put everything in its place."""

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self._hang_watch is not None:
            self._hang_watch.folder = Path(trainer.log_dir or trainer.default_root_dir)
        self.model = module = self._module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        evaluate_without_inference_mode(trainer)
        self._hooks += forget_skipped(trainer, self._writer)
        self._hooks += watch_monitors(trainer)
        self._hooks += save_where_all_fail(trainer, has_begun=lambda: self._has_seen_step)
        self._hooks += save_whole_steps(trainer)
        if is_fitting:
            self._check_fit()
        if find_roots(module):  # by its user, or in an earlier run
            self._check_unchanged(module)
            self.plan = _SHARDED[module].plan if module in _SHARDED else []
        else:
            self._shard(module)
        if is_fitting:
            self._describe_fit(module)
            self._writer.begin([*self.checkpoint_folders, *list_checkpoint_folders(trainer)])
        self._writer.choose_parameters(module)
        self._fill(module)
        keep_attributes(module)
        warn_of_lists(module)
        self.barrier()
        if is_fitting:
            self._writer.data_ranks = self.data_ranks
            split_generators(self.broadcast(collect_random_state()), self.data_ranks.index)  # see Note [Two streams]
            self._build_optimizers(trainer)
            self._watch_paths(module)
            self._check_disk(trainer)
        self._gathered_weights = GatheredWeights(module, self.settings.sharding)
        self.setup_precision_plugin()

    def _check_unchanged(self, module: pl.LightningModule) -> None:
        """Refuse settings that come too late, as its user or an earlier run has sharded the module.

        Raises:
            ValueError: With what to do instead.
        """
        # Of what its user has sharded, the mesh was used: ``device_mesh`` is made of it.
        used = get_used_settings(module, self.settings.mesh)
        before = {name: getattr(used, name) for name in self.settings.list_changed(used)}
        who, answer = "", "leave it out, or let the strategy shard the module"
        if module in _SHARDED:
            if _SHARDED[module].dtypes != self.precision_plugin.mixed_precision:
                before["precision"] = _SHARDED[module].precision
            else:  # other words for the same
                before.pop("mixed_precision", None)
            values = ", ".join(f"{name}: {value}" for name, value in before.items())
            who, answer = " by an earlier run", f"set what that had ({values}), or build the module anew"
        if before:
            raise ValueError(
                f"{', '.join(before)}: {get_class(module).__name__} is sharded already{who}, so this would be "
                f"ignored; {answer}"
            )

    def _build_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        # Of an earlier fit that was resumed and had no step left, nothing counts in this one.
        self._saved_settings, self._noted_plateaus = {}, {}
        self.restore_random_later(None, None)
        self.setup_optimizers(trainer)
        rebind_optimizers(self._module, self._real_optimizers)
        for optimizer in self._real_optimizers:
            refuse_whole_steps(optimizer)
            if isinstance(optimizer, torch.optim.LBFGS) and self.precision_plugin.scaler is not None:
                raise ValueError(
                    "configure_optimizers: got LBFGS with gradients in float16: the loss is scaled for one backward, "
                    "and LBFGS takes several in a step; set precision: bf16-mixed or 32-true, or another optimizer"
                )
        if self.settings.cpu_offload is not None and self.settings.cpu_offload.overlap_optimizer:
            self.overlapped_steps = overlap_optimizer(self._module, self._real_optimizers)
            if self.overlapped_steps.is_deferred:
                self.precision_plugin.overlapped_steps = self.overlapped_steps

    def _watch_paths(self, module: nn.Module) -> None:
        assert self.device_mesh is not None
        # On CPUs ranks have just waited for each other to reduce. The host of a GPU is ahead of it, and stays so.
        is_deferred = self.root_device.type != "cpu"
        self._rank_paths = watch_paths(module, self.device_mesh, timeout_s=self.timeout_s, is_deferred=is_deferred)

    def _check_fit(self) -> None:
        trainer = self._module.trainer
        is_automatic = self._module.automatic_optimization
        self.settings.check_accumulation(
            num_micro_batches=self._count_fixed_micro_batches(trainer), is_automatic=is_automatic
        )
        if self.oom_retries and not is_automatic:
            raise ValueError(
                f"oom_retries: got {self.oom_retries}: under manual optimization training_step makes the optimizer "
                "step itself, so it cannot be undone; leave it out"
            )
        check_learning_rate_finder(self._module)

    def _count_fixed_micro_batches(self, trainer: pl.Trainer) -> int | None:
        """Return the micro-batches of a step; ``None`` where settings may be for other numbers as well."""
        # A global batch may leave one on this number of ranks, and more on that of the next start.
        return None if is_accumulation_derived(trainer) else count_micro_batches(trainer)

    def _check_disk(self, trainer: pl.Trainer) -> None:
        folders, num_at_once = list_checkpoint_folders(trainer), count_checkpoints(trainer)
        if not folders or not any(num_at_once):
            return
        counts = [getattr(callback, "estimate_checkpoint_bytes", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        extra_bytes = sum(count(self._module) for count in counts if count is not None)
        self.disk_space = self._writer.measure_space(folders, num_at_once, self._module, self.optimizers, extra_bytes)
        if self.disk_space is None:
            return
        self.disk_space.check()
        if shortage := self.disk_space.describe_shortage():
            rank_zero.rank_zero_warn(shortage)

    def _shard(self, module: pl.LightningModule) -> None:
        assert self.device_mesh is not None
        remember_parameters(module)
        sent = [name for name in ("gather_bits", "reduce_bits") if getattr(self.settings.sharding, name) is not None]
        if sent and self.mesh_sizes.num_shards == 1:
            rank_zero.rank_zero_warn(
                f"sharding.{' and '.join(sent)}: no effect: each copy is on one rank, so nothing is gathered or "
                "scattered"
            )
        bits, num_shards = self.settings.sharding.reduce_bits, self.mesh_sizes.num_shards
        if bits is not None and (times := compare_crossing(bits, num_shards, self.num_processes)) >= 1:
            rank_zero.rank_zero_warn(
                f"sharding.reduce_bits: got {bits}: with {self.num_processes} ranks on a node it sends {times:.2f} "
                "times as much between nodes as float32 does, see docs/communication.md: "
                + ("set 8, or " if bits == 16 else "leave it out, or ")
                + "mixed_precision.reduce_dtype: bfloat16"
            )
        if self.settings.float8 is not None and (odd := convert_linears(module, self.settings.float8)):
            rank_zero.rank_zero_warn(f"float8: {join_names(odd)} stay as they are: their sizes do not divide by 16")
        self.plan = shard_module(
            module,
            self.settings,
            dtypes=self.precision_plugin.mixed_precision,
            mesh=self.device_mesh,
            device=self.root_device,
            is_whole=module.automatic_optimization,
            has_changing_lengths=getattr(get_data_module(module.trainer), "has_changing_lengths", False),
        )
        knows_nodes = self.num_processes * self.num_nodes == self.world_size  # not under Ray, which places ranks itself
        if self.root_device.type == "cpu" and self.mesh_sizes.num_shards > 1 and knows_nodes:
            sharding = self.settings.sharding
            replace_collectives(
                module, self.num_nodes, gathers=sharding.gather_bits is None, reduces=sharding.reduce_bits is None
            )
        warn_of_hooks(module)
        limited = list_limited(module)
        if limited := [n for n in limited if isinstance(module.get_parameter(f"{n}.weight"), DTensor)]:
            rank_zero.rank_zero_warn(
                f"max_norm of {join_names(limited)} has no lasting effect: it changes gathered copies of the weights; "
                "see docs/limits.md"
            )
        for root in find_roots(module):
            gather_when_called(root)
        plugin = self.precision_plugin
        _SHARDED[module] = _Sharded(
            settings=self.settings, precision=str(plugin.precision), dtypes=plugin.mixed_precision, plan=self.plan
        )

    def _describe_fit(self, module: pl.LightningModule) -> None:
        """Warn of what only training would suffer from, and keep the table of units to be printed."""
        is_on_host = self.settings.cpu_offload is not None and self.root_device.type != "cpu"
        idle = describe_idle_cores(self.num_processes, os.environ) if is_on_host else None
        for line in (idle, describe_layer_drop(module, self.world_size)):
            if line is not None:
                rank_zero.rank_zero_warn(line)
        if self.prints_plan and self.plan and self.is_global_zero:
            self._unit_table = make_table(module, self.plan, self.mesh_sizes)

    def _print_units(self) -> None:
        """Print the table of units, once nothing is left that could refuse the run."""
        if self._unit_table is not None:
            print_table(self._unit_table)
            self._unit_table = None

    def _fill(self, module: pl.LightningModule) -> None:
        """Give memory to what was built on the meta device, and values."""
        is_empty = module in _UNFILLED or next(iterate_meta(module), None) is not None
        if is_empty:
            _UNFILLED.add(module)
        parameter_device = torch.device("cpu") if self.settings.cpu_offload is not None else None
        materialize(module, self.root_device, parameter_device=parameter_device)
        register_steps(module, STEPS)
        if module in _SHARDED:
            for root in find_roots(module):
                settle_root(root)
        configure_weights: Any = getattr(module, "configure_weights", None)
        if is_empty and configure_weights is not None:
            configure_weights()
        elif is_empty:
            init_weights(module, self.broadcast(torch.initial_seed()))
        _UNFILLED.discard(module)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        roots = find_roots(self._module) if self.settings.sharding.no_sync else []
        with no_sync(*roots):
            yield

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if (loader := (self._module.trainer.state.stage, dataloader_idx)) not in self._checked_loaders:
            self._checked_loaders.add(loader)
            check_shared_rows(batch, self.mesh_sizes)  # of its first batch
            if loader[0] == RunningStage.TRAINING:
                count_steps_of_loggers(self._module.trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    def finish_steps(self) -> None:
        """Wait until weights and optimizer state are those after the last step, see ``cpu_offload.overlap_optimizer``.

        For code of your own that reads or changes them between a step and the next forward.
        """
        if self.overlapped_steps is not None:
            self.overlapped_steps.finish()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self.overlapped_steps is not None:
            self.overlapped_steps.begin_backward()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._gathered.keep_toggles()
        self._gathered.begin_step()
        output = super().training_step(*args, **kwargs)
        self._has_seen_step = True
        if self._goes_on_by_metrics:
            end_restart(self._module.trainer)
        self._gathered.end_step()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output = super().validation_step(*args, **kwargs)
        self._let_go_after_last()
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output = super().test_step(*args, **kwargs)
        self._let_go_after_last()
        return output

    def _let_go_after_last(self) -> None:
        """Reshard for hooks that put weights back, such as those that an average of them took the place of."""
        if get_evaluation_loop(self._module.trainer).batch_progress.is_last_batch:
            reshard(self._module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._rank_paths is not None:
            closure = self._rank_paths.compare_after(closure, self._module.trainer.global_step + 1)

        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        # What a forward after backward has gathered, such as that of a hook, is old by now. Of several optimizers,
        # another may have a backward to come.
        self._gathered.reshard(None if self._module.automatic_optimization else optimizer)
        return result

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if not self._has_checked_gradients and self.device_mesh is not None:
            self._has_checked_gradients = check_gradients(self._module, self.device_mesh)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return self.end_backward(self.begin_backward(closure_loss, optimizer, *args, **kwargs))

    def begin_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run all of ``backward`` but what follows the gradients; return the loss as it was scaled."""
        with self._own_generators():
            self.pre_backward(loss)
            loss = self.precision_plugin.pre_backward(loss, self._module)
            self.precision_plugin.backward(loss, self._module, optimizer, *args, **kwargs)
        return loss

    def end_backward(self, loss: Tensor) -> Tensor:
        """Run what follows the gradients of a micro-batch; return the loss without its graph."""
        if is_last_micro_batch(self._module.trainer):
            self._gathered.end_backward()
        with self._own_generators():
            loss = self.precision_plugin.post_backward(loss, self._module)
            self.post_backward(loss)
        return loss

    @property
    def redone_steps(self) -> list[str]:
        """A line for each training step of the last ``fit`` that was redone after a rank ran out of memory."""
        return [] if self._retried_steps is None else self._retried_steps.events

    def _retry_steps(self, trainer: pl.Trainer) -> None:
        if self._retried_steps is not None:  # of a search before, such as that of LearningRateFinder
            self._retried_steps.stop()
        self._retried_steps = RetriedSteps(self, trainer, self._module, self.oom_retries, rank_zero.rank_zero_warn)

    @override
    def on_train_start(self) -> None:
        self._has_seen_step = self._has_checked_gradients = False
        self._gathered.begin_training()
        trainer = self._module.trainer
        check_weights(trainer)
        settle_accumulation(trainer, get_data_module(trainer))
        super().on_train_start()
        if self.oom_retries:
            self._retry_steps(trainer)
        if self.world_size > 1:  # before the first step, and only now, as the loader is there
            compare_in_group(self.global_rank, list_row_facts(trainer))
            if has_statistics_of_ranks(self._module):
                rank_zero.rank_zero_warn(
                    "BatchNorm: each rank normalizes by statistics of its own batch; running statistics are averaged "
                    "before an evaluation and a checkpoint"
                )
        if self._saved_settings:  # compared here, as the loader is there
            warn_of_changes(self._saved_settings, collect_run_settings(trainer, self.settings.mixed_precision))
            self._saved_settings = {}
        self._goes_on_by_metrics = bool(self._noted_plateaus)
        restore_plateaus(trainer, self._noted_plateaus)
        self._noted_plateaus = {}
        self._print_units()

    @override
    def on_validation_start(self) -> None:
        self._print_units()
        self._begin_evaluation(super().on_validation_start)

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation(super().on_test_start)

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation(super().on_predict_start)

    def _finish_comparison(self) -> None:
        if self._rank_paths is not None:
            self._rank_paths.finish()

    def forget_path(self) -> None:
        """Do not compare what ranks did in a training step that all of them have undone."""
        if self._rank_paths is not None:
            self._rank_paths.forget()

    def _begin_evaluation(self, begin: Callable[[], None]) -> None:
        self._gathered.keep_toggles()
        self._gathered.reshard()  # what hooks have drawn from, for those that put other weights in place
        self.finish_steps()
        self._finish_comparison()
        begin()
        check_weights(self._module.trainer)
        sync_buffers(self._module)
        self._gathered.begin_evaluation()

    def end_evaluation(self) -> None:
        """Let go of what an evaluation has gathered; what its hooks have frozen or unfrozen stays so."""
        if self._gathered_weights is not None:
            self._gathered_weights.end_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._gathered.reshard()  # what was used after the last batch, such as for samples
        self.end_evaluation()
        if self._module.trainer.sanity_checking:
            check_monitors(self._module.trainer)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        refuse_lost_weights(self._module)
        self._writer.wait()  # what callbacks save of themselves depends on whether it succeeds
        self.finish_steps()
        sync_buffers(self._module)
        return self._writer.get_model_state(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.finish_steps()
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return {} if is_placeholder(optimizer) else self._writer.get_optimizer_state(self._module, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path | RemotePath, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options: FSDP2Strategy writes folders with torch.distributed.checkpoint")
        trainer = self._module.trainer
        for callback in trainer.callbacks if "callbacks" not in checkpoint else ():  # type: ignore[attr-defined]
            if getattr(callback, "changes_saved_weights", False):
                raise ValueError(
                    f"weights_only: got true: the weights would be saved, and not what {type(callback).__name__} makes "
                    "of them; leave it out"
                )
        self._finish_comparison()
        self._leave_out_objects(checkpoint)
        checkpoint[RUN_SETTINGS] = collect_run_settings(trainer, self.settings.mixed_precision)
        if noted := note_plateaus(trainer):
            checkpoint[PLATEAUS] = noted
        self._writer.save(locate(self.broadcast(str(filepath))), checkpoint)
        if trainer.state.finished:  # the user saves, after the run has waited for earlier saves
            self._writer.close()
            self._note_missing()

    def _leave_out_objects(self, checkpoint: dict[str, Any]) -> None:
        """Leave out what users' code wants to save that no checkpoint can hold, such as a network in ``hparams``."""
        for owner in (pl.LightningModule, pl.LightningDataModule):
            checkpoint.pop(owner.CHECKPOINT_HYPER_PARAMS_TYPE, None)  # a class, of OmegaConf
            key = owner.CHECKPOINT_HYPER_PARAMS_KEY
            if key in checkpoint:
                checkpoint[key], others = keep_plain(checkpoint[key])
                self._say_left_out(
                    others,
                    f"load_from_checkpoint needs it: say so by save_hyperparameters(ignore={list(others)})",
                )
        if "callbacks" in checkpoint:
            checkpoint["callbacks"], others = keep_plain(checkpoint["callbacks"])
            self._say_left_out(others, "a resumed run begins with a new state of the callback")
        _, others = keep_plain({key: value for key, value in checkpoint.items() if key not in _NEEDED})
        self._say_left_out(others, "on_load_checkpoint has to do without")
        for key in others:
            value = checkpoint.pop(key)
            # What reads a mapping of nothing but objects goes through its items. Of others, what is left could be taken
            # for all of it, such as for the parameters of a data set that get a default where one is missing.
            if isinstance(value, Mapping) and not keep_plain(value)[0]:
                checkpoint[key] = {}

    def _say_left_out(self, others: Mapping[str, str], meaning: str) -> None:
        if others and meaning not in self._left_out:
            self._left_out.add(meaning)
            rank_zero.rank_zero_warn(
                f"{', '.join(others.values())}, which a checkpoint cannot hold: left out of it; {meaning}"
            )

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        place = locate(filepath)
        if self.is_global_zero:
            self._writer.remove(place, partial(discard, place))

    @override
    def on_train_end(self) -> None:
        if self._gathered_weights is not None:  # also called after an error, which may have come before
            self._gathered_weights.end_training()
        self._finish_comparison()
        self.finish_steps()
        self._writer.close()
        self._note_missing()

    def _note_missing(self) -> None:
        # An exception would end a script before it can save its weights elsewhere.
        if self.is_global_zero:
            path = self.missing_checkpoint
            note_lost(self._writer, None if path is None else f"{path} could not be saved: the disk is full")

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if weights_only is False:
            raise ValueError("weights_only: got false: FSDP2Strategy reads tensors and plain values only; leave it out")
        path = enter(follow(locate(self.broadcast(str(checkpoint_path)))))
        is_fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        extra = self.make_extra_state if is_fitting else None  # an evaluation after fit leaves its state as it is
        load = load_single_file if path.is_file() else partial(load_checkpoint, extra=extra)
        optimizers = self._real_optimizers if is_fitting else []
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ValueError(
                f"{path}: a run with LBFGS cannot be resumed: its history belongs to no parameter, so it cannot be "
                "sharded; start a new run from the weights, or train with another optimizer"
            )
        is_strict = self._module.strict_loading
        prepare = partial(restore_groups, self._module.trainer, self._module) if is_fitting else None
        meta = load(path, self._module, optimizers, strict=is_strict, verify=self.verify_checkpoint, prepare=prepare)
        random_states = meta.pop(RANDOM_STATES, ())
        if is_fitting:
            self._writer.go_on_from(path)
            self._saved_settings = meta.get(RUN_SETTINGS, {})
            self._noted_plateaus = meta.get(PLATEAUS, {})
            self.restore_random_later(*read_random_state(path, self.data_ranks, random_states))
            forget_train_loader(self._module.trainer)
        return meta

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done by ``load_checkpoint``."""

    # Between ranks

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            device = self.root_device
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        if tensor.is_inference():  # of a method of the user's, which may not be changed outside of it
            tensor = tensor.clone()
        # gloo has no mean, and Lightning's way of telling misses it in a combined backend.
        is_mean = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
        op = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) and not is_mean else reduce_op
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if is_mean else op, group=group)
        if op == dist.ReduceOp.SUM and group is None and (copies := self.data_ranks.copies) > 1 and not is_mean:
            return _divide(tensor, copies)  # each number was counted so often
        return _divide(tensor, dist.get_world_size(group)) if is_mean else tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Lightning counts votes by a sum over all ranks, and that of ``reduce`` counts the ranks of one layer once.
        vote = torch.tensor(int(decision), device=self.root_device)
        return bool(self.reduce(vote, reduce_op="min" if all else "max"))

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.lightning_module is not None:
            explain(exception, self.lightning_module)

    @override
    def teardown(self) -> None:
        # Not super(): it would move the shards to the CPU, and Lightning's next run on this module back.
        assert self.cluster_environment is not None and self.accelerator is not None  # noqa: PT018
        self._checked_loaders.clear()
        if self._gathered_weights is not None:
            self._gathered_weights.remove()
            self._gathered_weights = None
        if self._retried_steps is not None:
            self._retried_steps.stop()
        if self._hang_watch is not None:
            self._hang_watch.stop()
            self._hang_watch = None
        if self._rank_paths is not None:  # before the steps below, which were there first
            self._rank_paths.detach()
            self._rank_paths = None
        while self._hooks:
            self._hooks.pop().remove()
        if self.overlapped_steps is not None:
            steps, self.overlapped_steps, self.precision_plugin.overlapped_steps = self.overlapped_steps, None, None
            steps.close()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _divide(tensor: Tensor, number: int) -> Tensor:
    """Divide a tensor in place, in float64: of whole numbers, float32 has those up to 2**24."""
    return tensor.copy_(tensor.to(torch.promote_types(tensor.dtype, torch.float64)) / number)


for _name, (_description, _settings) in PRESETS.items():
    StrategyRegistry.register(_name, FSDP2Strategy, description=_description, override=True, **_settings)
