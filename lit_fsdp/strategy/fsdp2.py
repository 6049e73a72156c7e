"""``FSDP2Strategy``: what Lightning asks of a strategy, answered by the files beside this one."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist

# Private, seen in lightning 2.6.6: what its own strategies are made of.
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lit_fsdp.checkpoint.single_file import load_single_file
from lit_fsdp.checkpoint.state import load_checkpoint, read_random_state
from lit_fsdp.checkpoint.writer import CheckpointFormat, CheckpointWriter
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.buffers import sync_buffers
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh, build_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.random_state import collect_random_state, reseed
from lit_fsdp.sharding.settings import PRESETS, Settings
from lit_fsdp.sharding.shard import Compile, Sharding, find_roots, no_sync, register_steps
from lit_fsdp.sharding.unit_table import print_plan
from lit_fsdp.sharding.wrap import Unit, Wrap
from lit_fsdp.strategy.lightning_internals import (
    check_trainer,
    count_micro_batches,
    delay_killing,
    forget_train_loader,
    keep_links,
    reduce_in_place,
    refuse_ignored,
    use_no_grad,
    warn_of_batch_norm,
)
from lit_fsdp.strategy.precision_plugin import FSDP2Precision, translate_precision
from lit_fsdp.weights.load import init_weights, iterate_meta, materialize

# What each module was sharded with: a second run of it may be under another strategy object.
_SHARDED_WITH: WeakKeyDictionary[pl.LightningModule, Settings] = WeakKeyDictionary()
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "generate")


def find_used_settings(module: pl.LightningModule) -> Settings:
    """Return what a module was sharded with; the defaults if its user has sharded it."""
    return _SHARDED_WITH.get(module, Settings())


class FSDP2Strategy(ParallelStrategy):
    """Shards parameters, gradients and optimizer state with FSDP2 (``fully_shard``).

    The LightningModule becomes the root FSDP unit, the modules found by ``units`` become units inside it. Build
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
        checkpoint_format: ``sharded`` writes a folder, every rank its own part. ``single_file`` gathers everything
            on rank 0 and writes what Lightning's other strategies can read. Both are always read.
        save_frozen: Whether checkpoints hold parameters that do not train. ``null`` leaves them out of folders where
            the module gets them back by itself, such as the pretrained model below adapters.
        async_save: Copy shards to host memory and write them beside training, at most one checkpoint at a
            time. Costs host memory for one copy of this rank's shards and optimizer state.
        print_plan: Print the units when ``fit`` starts.
        timeout_s: How long a collective may take before the run fails.
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
        checkpoint_format: CheckpointFormat = "sharded",
        save_frozen: bool | None = None,
        async_save: bool = False,
        print_plan: bool = True,
        timeout_s: float = 1800.0,
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
        )
        self.prints_plan = print_plan
        self.checkpoint_format = checkpoint_format
        self.extra_state: dict[str, Tensor] = {}  # filled on loading with what on_save_checkpoint put under this name
        self._writer = CheckpointWriter(
            checkpoint_format=checkpoint_format,
            save_frozen=save_frozen,
            is_async=async_save,
            report=rank_zero.rank_zero_warn,
        )
        self._restore_random: Callable[[], None] | None = None  # from a checkpoint, until the first batch
        self.timeout_s = timeout_s
        self.device_mesh: DeviceMesh | None = None
        self.plan: list[Unit] = []

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
        return {"num_replicas": self.world_size, "rank": self.global_rank}

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
        device_type = "cuda" if isinstance(self.accelerator, CUDAAccelerator) else "cpu"
        override = self.settings.mixed_precision if plugin is not None else None
        ours = None if plugin is None else translate_precision(plugin, override, device_type)
        self._precision_plugin: FSDP2Precision | None = ours

    # From the Trainer's construction to the process group

    @override
    def _configure_launcher(self) -> None:
        self._check_settings()
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _check_settings(self) -> None:
        """Refuse what cannot work, when the Trainer is built: before processes, collectives or memory."""
        self.settings.check(world_size=self.world_size, ranks_per_node=self.num_processes, device=self.root_device)
        refuse_ignored(self.root_device, self._layer_sync, self._checkpoint_io)
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s: got {self.timeout_s}: expected seconds above 0")

    def set_world_ranks(self) -> None:
        """Tell the environment which rank this is, where the environment does not know."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero.rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        check_trainer(self.lightning_module.trainer)  # before callbacks are set up, some of which copy the module
        delay_killing()
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo for what is in host memory
            own: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
            _init_dist_connection(self.cluster_environment, backend, timeout=timedelta(seconds=self.timeout_s), **own)
            atexit.register(_destroy_dist_connection)  # Lightning does it for plain "nccl" only
        sizes = {"world_size": self.world_size, "ranks_per_node": self.num_processes}
        self.device_mesh = build_mesh(self.settings.mesh, device_type=device.type, timeout_s=self.timeout_s, **sizes)
        self.lightning_module._device_mesh = self.device_mesh

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
        assert self.accelerator is not None and self.lightning_module is not None  # noqa: PT018
        self.accelerator.setup(trainer)
        self.model = self.lightning_module
        use_no_grad(trainer)
        keep_links(trainer, self._writer.skipped)
        if trainer.state.fn == TrainerFn.FITTING:
            is_automatic = self.lightning_module.automatic_optimization
            self.settings.check_accumulation(num_micro_batches=count_micro_batches(trainer), is_automatic=is_automatic)
        if find_roots(self.lightning_module):  # by its user, or in an earlier run
            used = find_used_settings(self.lightning_module)
            self.settings.check_unchanged(used, type(self.lightning_module).__name__)
        else:
            self._shard(self.lightning_module)
        self._writer.choose_parameters(self.lightning_module)
        self._fill(self.lightning_module)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            warn_of_batch_norm(self.lightning_module)
            reseed(collect_random_state(), self.global_rank)  # else dropout would drop the same on all ranks
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: pl.LightningModule) -> None:
        assert self.device_mesh is not None
        is_shown = self.prints_plan and self.is_global_zero and module.trainer.state.fn == TrainerFn.FITTING
        self.plan = shard_module(
            module,
            self.settings,
            dtypes=self.precision_plugin.mixed_precision,
            mesh=self.device_mesh,
            device=self.root_device,
            is_whole=module.automatic_optimization,
            show=partial(print_plan, module, mesh=self.device_mesh) if is_shown else None,
        )
        _SHARDED_WITH[module] = self.settings

    def _fill(self, module: pl.LightningModule) -> None:
        """Give memory to what was built on the meta device, and values."""
        is_empty = next(iterate_meta(module), None) is not None
        parameter_device = torch.device("cpu") if self.settings.cpu_offload is not None else None
        materialize(module, self.root_device, parameter_device=parameter_device)
        register_steps(module, _STEPS)
        if is_empty and hasattr(module, "configure_weights"):
            fill: Any = module.configure_weights
            fill()
        elif is_empty:
            init_weights(module, self.broadcast(torch.initial_seed()))

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        assert self.lightning_module is not None
        roots = find_roots(self.lightning_module) if self.settings.sharding.no_sync else []
        with no_sync(*roots):
            yield

    @override
    def on_validation_start(self) -> None:
        assert self.lightning_module is not None
        sync_buffers(self.lightning_module)

    on_test_start = on_predict_start = on_validation_start

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        sync_buffers(self.lightning_module)
        return self._writer.get_model_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self._writer.get_optimizer_state(self.lightning_module, getattr(optimizer, "_optimizer", optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options: FSDP2Strategy writes folders with torch.distributed.checkpoint")
        assert self.lightning_module is not None
        self._writer.save(Path(self.broadcast(str(filepath))), checkpoint)
        if self.lightning_module.trainer.state.finished:  # saved by the user, after the run has waited for the rest
            self._writer.wait()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._writer.remove(partial(super().remove_checkpoint, filepath))

    @override
    def on_train_end(self) -> None:
        self._writer.wait()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        path = Path(self.broadcast(str(checkpoint_path)))
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        extra = self.extra_state if is_fitting else {}  # an evaluation after fit leaves its state as it is
        load = load_single_file if path.is_file() else partial(load_checkpoint, extra=extra)
        optimizers = self.optimizers if is_fitting else []
        meta = load(path, self.lightning_module, optimizers, strict=self.lightning_module.strict_loading)
        if is_fitting:
            self._restore_random = read_random_state(path, self.global_rank, self.world_size)
            forget_train_loader(self.lightning_module.trainer)
        return meta

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Not when loading: the data loader draws its seed in between, as it did before the checkpoint.
        if self._restore_random is not None:
            self._restore_random()
            self._restore_random = None

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done by ``load_checkpoint``."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
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
        is_shared = isinstance(tensor, Tensor) and dist.is_initialized()
        return reduce_in_place(tensor, group, reduce_op) if is_shared else tensor

    @override
    def teardown(self) -> None:
        # Not super(): it would move the shards to the CPU, and Lightning's next run on this module back.
        assert self.cluster_environment is not None and self.accelerator is not None  # noqa: PT018
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, (description, settings) in PRESETS.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=description, **settings)


FSDP2Strategy.register_strategies(StrategyRegistry)
