import shutil
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from training import EVEN, Recorder, Rows, build_task, build_trainer, fit_and_write, save_model

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Mesh, MixedPrecision, Sharding, Wrap
from lit_fsdp.callbacks import MemoryLogger
from lit_fsdp.checkpoint.manifest import is_complete
from lit_fsdp.sharding.wrap import Unit, plan_units
from lit_fsdp.strategy import fsdp2
from lit_fsdp.strategy.precision_plugin import FSDP2Precision
from lit_fsdp.tasks import CausalLM
from ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp2", FSDP2Strategy()),
        ("fsdp2_offload", FSDP2Strategy(cpu_offload=CPUOffload())),
        ("fsdp2_grad_op", FSDP2Strategy(sharding=Sharding(reshard_after_forward=False))),
        ("fsdp2_hybrid", FSDP2Strategy(mesh=Mesh(replicate=-1, shard="node"))),
    ],
)
def test_registered_names_stand_for_these_settings(name: str, expected: FSDP2Strategy) -> None:
    found = StrategyRegistry.get(name)
    assert isinstance(found, FSDP2Strategy)
    assert found.settings == expected.settings


class OwnPrecision(Precision):
    """A plugin as users write it."""


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: FSDP2Strategy(mesh=Mesh(replicate=2, shard=3)), {}, "needs 6 ranks, 4 were started"),
        (lambda: FSDP2Strategy(mesh=Mesh(replicate=-1, shard=-1)), {}, "both -1"),
        (lambda: FSDP2Strategy(sharding=Sharding(reshard_after_forward=3)), {}, r"expected one of \[2\]"),
        (lambda: FSDP2Strategy(sharding=Sharding(backward_prefetch=0)), {}, "backward_prefetch: got 0"),
        (lambda: FSDP2Strategy(cpu_offload=CPUOffload(pin_memory=True)), {}, "pinning needs a GPU"),
        (lambda: FSDP2Strategy(wrap=Wrap(policy="module_classes")), {}, "policy is 'module_classes'"),
        (
            lambda: FSDP2Strategy(activation_checkpointing=ActivationCheckpointing(every_n_blocks=2)),
            {},
            "with mode 'none'",
        ),
        (lambda: FSDP2Strategy(timeout_s=0), {}, "timeout_s: got 0"),
        (lambda: FSDP2Strategy(start_timeout_s=-1), {}, "start_timeout_s: got -1"),
        (
            lambda: FSDP2Strategy(verify_checkpoint="ful"),
            {},
            "verify_checkpoint: got 'ful': expected sizes or full: did you mean full",
        ),
        (
            lambda: FSDP2Strategy(activation_checkpointing=ActivationCheckpointing(mode="selectiv")),
            {},
            "^activation_checkpointing.mode: got 'selectiv': expected one of none, full or selective: did you mean sel",
        ),
        (
            lambda: FSDP2Strategy(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
            {},
            r"^mixed_precision.param_dtype: got torch.bfloat16: expected one of .*: did you mean bfloat16\?$",
        ),
        (
            lambda: FSDP2Strategy(mixed_precision=MixedPrecision(param_dtype="half")),
            {},
            "param_dtype: got 'half': expected one of float32, bfloat16 or float16$",
        ),
        (lambda: FSDP2Strategy(mesh=Mesh(shard="nodes")), {}, "^mesh.shard: got 'nodes': .* did you mean node"),
        (lambda: FSDP2Strategy(checkpoint_format="single"), {}, "got 'single': .* did you mean single_file"),
        (
            lambda: FSDP2Strategy(hang_report_s="never"),
            {},
            "hang_report_s: got 'never': expected one of float, auto or null",
        ),
        (FSDP2Strategy, {"precision": "16-true"}, "nearest: 16-mixed or bf16-true"),
        (FSDP2Strategy, {"precision": "64-true"}, "expected one of 32-true"),
        (FSDP2Strategy, {"plugins": [OwnPrecision()]}, "cannot work with OwnPrecision; leave out trainer.plugins"),
        (FSDP2Strategy, {"sync_batchnorm": True}, "sync_batchnorm: got true: .* call .*convert_sync_batchnorm in"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_the_trainer_is_built(
    make: Callable[[], Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pl.Trainer(accelerator="cpu", devices=4, strategy=make(), logger=False, **options)


def test_a_gpu_that_only_the_driver_counts_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: torch.device) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nUpdate it.")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", start)
    monkeypatch.setattr(torch.cuda, "get_device_capability", start)  # asked before by Lightning, of torch for CUDA
    trainer = pl.Trainer(accelerator="auto", devices=1, strategy=FSDP2Strategy(), max_steps=1, logger=False)
    with pytest.raises(ValueError, match=r"^accelerator: cuda:0 .*set cpu.*: The NVIDIA driver .*\.$"):
        trainer.fit(BoringModel())


def test_the_precision_of_the_trainer_reaches_the_strategy_and_explicit_dtypes_win() -> None:
    strategy = FSDP2Strategy(mixed_precision=MixedPrecision(reduce_dtype="bfloat16"))
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, precision="bf16-mixed", logger=False)
    assert isinstance(trainer.precision_plugin, FSDP2Precision)
    assert trainer.precision == "bf16-mixed"
    dtypes = strategy.precision_plugin.mixed_precision
    assert (dtypes.storage_dtype, dtypes.param_dtype, dtypes.reduce_dtype) == ("float32", "bfloat16", "bfloat16")


def fit(folder: Path, out: Path | None, mesh: Mesh, max_steps: int, save: Path | None, load: Path | None) -> None:
    strategy = FSDP2Strategy(mesh=mesh, print_plan=False)
    trainer = build_trainer(strategy, callbacks=[Recorder()], max_steps=max_steps)
    data = Rows(64, 12 // trainer.world_size, num_rows=8 * 12)
    fit_and_write(trainer, build_task(folder), data, out, save=save, load=load)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "tolerance"),
    [
        ((1, 2), 2, 0.0),
        ((1, 2), 1, 1e-6),
        ((1, 2), 3, 1e-6),
        ((2, 2), 2, 1e-6),
        pytest.param((1, 1), 2, 1e-6, marks=pytest.mark.slow),
        pytest.param((1, 4), 2, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_goes_on_like_one_that_was_not_interrupted(
    before: tuple[int, int], after: int, tolerance: float, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    ranks, mesh, checkpoint = prod(before), Mesh(replicate=before[0]), tmp_path / "checkpoint"
    run_ranks(fit, folder, tmp_path / "whole", mesh, 8, None, None, world_size=ranks)
    run_ranks(fit, folder, None, mesh, 4, checkpoint, None, world_size=ranks)
    run_ranks(fit, folder, tmp_path / "resumed", Mesh(), 8, None, checkpoint, world_size=after)
    whole, resumed = torch.load(tmp_path / "whole"), torch.load(tmp_path / "resumed")
    for name in ("losses", "grad_norms"):
        differences = [abs(a - b) for a, b in zip(whole[name][4:], resumed[name][4:], strict=True)]
        assert find_largest(differences) <= tolerance
    assert all((whole["weights"][n] - w).abs().max() <= tolerance for n, w in resumed["weights"].items())


def train_with_model_checkpoint(folder: Path) -> None:
    losses: dict[int, float] = {}

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])

    keeper = ModelCheckpoint(
        folder / "kept", monitor="train/loss", save_top_k=2, every_n_train_steps=2, save_last="link"
    )
    options = {"callbacks": [Note(), keeper], "enable_checkpointing": True, "max_steps": 8}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), **options)
    trainer.fit(build_task(folder / "model"), Rows(64, 4))
    kept = sorted(p.name for p in (folder / "kept").iterdir())
    best = sorted((2, 4, 6, 8), key=lambda step: losses[step])[:2]
    assert kept == [*(f"epoch=0-step={step}.ckpt" for step in sorted(best)), "last.ckpt"]
    assert Path(keeper.best_model_path).name == f"epoch=0-step={best[0]}.ckpt"
    last = folder / "kept" / "last.ckpt"
    assert last.is_symlink()
    assert (last / "meta.pt").is_file()
    assert (Path(keeper.best_model_path) / ".metadata").is_file()
    meta = torch.load(last / "meta.pt", weights_only=True)
    assert last.resolve().name.endswith(f"step={meta['global_step']}.ckpt")


@pytest.mark.full
def test_model_checkpoint_keeps_the_best_folders_and_links_the_last(tmp_path: Path) -> None:
    save_model(tmp_path / "model", **EVEN)
    run_ranks(train_with_model_checkpoint, tmp_path)


def train_until_the_disk_is_full(folder: Path) -> None:
    class Fill(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                usage = shutil.disk_usage(folder)
                shutil.disk_usage = lambda _: usage._replace(free=0)  # type: ignore[assignment]

    keeper = ModelCheckpoint(folder / "kept", every_n_train_steps=1, save_last="link")
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[Fill(), keeper], enable_checkpointing=True)
    trainer.fit(build_task(folder / "model"), Rows(64, 4))
    assert sorted(p.name for p in (folder / "kept").iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert (folder / "kept" / "last.ckpt").resolve().name == "epoch=0-step=3.ckpt"
    assert is_complete(folder / "kept" / "last.ckpt")


@pytest.mark.full
def test_last_stays_at_the_last_checkpoint_that_the_disk_had_room_for(tmp_path: Path) -> None:
    save_model(tmp_path / "model", **EVEN)
    run_ranks(train_until_the_disk_is_full, tmp_path)


def look_inside(folder: Path) -> None:
    strategy = FSDP2Strategy(print_plan=False)
    trainer = build_trainer(strategy, max_steps=1)
    task = build_task(folder)
    trainer.fit(task, Rows(64, 4))
    assert all(isinstance(p, DTensor) for p in task.parameters())
    local = sum(p.to_local().numel() for p in task.parameters() if isinstance(p, DTensor))
    assert local == sum(p.numel() for p in task.parameters()) // 2  # every size is even
    state = trainer.optimizers[0].state
    assert all(isinstance(s["exp_avg"], DTensor) for s in state.values())
    assert not trainer.validate_loop.inference_mode
    rank = torch.tensor(float(trainer.global_rank))
    assert strategy.reduce(rank.clone(), reduce_op="mean") == 0.5
    assert strategy.reduce(rank.clone(), reduce_op="sum") == 1.0
    assert strategy.reduce(rank.clone(), reduce_op="max") == 1.0
    assert strategy.broadcast(trainer.global_rank, src=1) == 1
    assert strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(trainer.global_rank == 0, all=True)


def test_parameters_and_optimizer_state_are_sharded(tmp_path: Path) -> None:
    run_ranks(look_inside, save_model(tmp_path / "model", **EVEN))


def fit_twice(folder: Path) -> None:
    counts = []
    for _ in range(2):
        strategy = FSDP2Strategy(mesh=Mesh(replicate=2), oom_retries=1, timeout_s=77, async_save=True)
        options = {"max_steps": 1, "callbacks": [MemoryLogger()], "default_root_dir": folder.parent}
        trainer = build_trainer(strategy, **options)
        trainer.fit(build_task(folder), Rows(64, 4))
        trainer.save_checkpoint(folder.parent / "run.ckpt")
        counts.append(len(dist.distributed_c10d._world.pg_map))
        assert strategy.device_mesh is not None
        backends = [group._get_backend(torch.device("cpu")) for group in strategy.device_mesh.get_all_groups()]
        assert [backend.options._timeout.total_seconds() for backend in backends] == [77, 77]
    assert counts[0] == counts[1]


def test_a_second_run_in_a_process_makes_no_more_process_groups(tmp_path: Path) -> None:
    run_ranks(fit_twice, save_model(tmp_path / "model", **EVEN))


def fit_in_turns(folder: Path) -> None:
    big, small = build_task(folder), BoringModel()
    trainers = [build_trainer(FSDP2Strategy(print_plan=False)) for _ in range(2)]
    for trainer, module in ((trainers[0], big), (trainers[0], small), (trainers[0], big), (trainers[1], big)):
        trainer.fit(module, Rows(EVEN["vocab_size"], 2) if module is big else None)
        strategy: Any = trainer.strategy
        assert {name for unit in strategy.plan for name in unit.parameters} == dict(module.named_parameters()).keys()


@pytest.mark.full
def test_the_units_are_those_of_the_module_that_runs_whatever_ran_before(tmp_path: Path) -> None:
    run_ranks(fit_in_turns, save_model(tmp_path / "model", **EVEN), world_size=1)


class Draws(BoringModel):
    """Keeps what its steps draw."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def resume_without_a_step(folder: Path) -> None:
    def fit(trainer: pl.Trainer, path: Path | None = None) -> list[float]:
        torch.manual_seed(7)
        trainer.fit_loop.epoch_loop.max_steps = 1 + trainer.global_step if path is None else 1
        trainer.fit(module := Draws(), ckpt_path=path)
        return module.drawn

    first, second = (build_trainer(FSDP2Strategy(print_plan=False), max_steps=1) for _ in range(2))
    drawn = fit(first)
    torch.manual_seed(8)
    first.save_checkpoint(folder / "a.ckpt")
    assert fit(second, folder / "a.ckpt") == []
    assert fit(second) == drawn


def test_random_numbers_of_a_checkpoint_are_for_the_run_that_resumed_it_alone(tmp_path: Path) -> None:
    run_ranks(resume_without_a_step, tmp_path, world_size=1)


def test_ranks_wait_as_long_for_each_other_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: Any, timeout_s: float, start_timeout_s: float, **__: Any) -> None:
        raise RuntimeError(f"{timeout_s} and at the start {start_timeout_s}")

    monkeypatch.setattr(fsdp2, "init_process_group", meet)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_steps": 1}
    strategy = FSDP2Strategy(timeout_s=77.0, start_timeout_s=5.0)
    with pytest.raises(RuntimeError, match=r"^77\.0 and at the start 5\.0$"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options).fit(BoringModel())


def load_from(path: Path, folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(FSDP2Strategy(print_plan=False)).fit(build_task(folder), Rows(64, 4), ckpt_path=path)


@pytest.mark.full
def test_what_is_no_checkpoint_folder_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    (tmp_path / "empty").mkdir()
    run_ranks(load_from, tmp_path / "empty", folder, "no complete checkpoint")
    torch.save({}, tmp_path / "file.ckpt")
    run_ranks(load_from, tmp_path / "file.ckpt", folder, "no checkpoint of Lightning: it has no state_dict")


class ShardedByUser(CausalLM):
    """Calls ``fully_shard`` itself."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class OwnUnits(CausalLM):
    """Decides its units."""

    def configure_units(self, model: pl.LightningModule) -> list[Unit]:
        return plan_units(model, Wrap(module_classes=["LlamaMLP"]))


def fit_refused(make: Callable[[Path], Any], strategy: FSDP2Strategy, options: Any, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(strategy, **options).fit(make(folder), Rows(64, 8))


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "settings", "options", "message"),
    [
        (build_task, {"sharding": Sharding(no_sync=True)}, {}, "nothing to hold"),
        (
            lambda f: ShardedByUser(pretrained=str(f)),
            {"activation_checkpointing": ActivationCheckpointing(mode="full")},
            {},
            "activation_checkpointing: Sharded",
        ),
        (lambda f: OwnUnits(pretrained=str(f)), {"wrap": Wrap(policy="model_plan")}, {}, "configure_units decides"),
        (build_task, {"wrap": Wrap(module_classes=["Nothing"])}, {}, "no module has such a class; the model has: "),
    ],
)
def test_settings_that_would_be_ignored_are_refused_in_setup(
    make: Callable[[Path], Any], settings: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    strategy = FSDP2Strategy(print_plan=False, **settings)
    run_ranks(fit_refused, make, strategy, options, message, folder, world_size=1)


class GlobalBatch(pl.LightningDataModule):
    """Of which one rank takes all at once."""

    batch_size = global_batch_size = 2

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(8, 32), batch_size=self.batch_size)  # type: ignore[arg-type]


def test_a_global_batch_that_is_one_micro_batch_on_these_ranks_goes_with_no_sync() -> None:
    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(sharding=Sharding(no_sync=True)), max_steps=1)
        trainer.fit(BoringModel(), datamodule=GlobalBatch())
        assert (trainer.accumulate_grad_batches, trainer.global_step) == (1, 1)

    run_ranks(body, world_size=1)


def test_a_second_run_of_a_module_with_other_settings_is_refused_by_what_the_first_had() -> None:
    def body() -> None:
        module = BoringModel()
        build_trainer(FSDP2Strategy(), precision="bf16-mixed", max_steps=1).fit(module)
        build_trainer(FSDP2Strategy(), precision="bf16-mixed").validate(module)
        dtypes = MixedPrecision(param_dtype="bfloat16")  # the same by other words
        build_trainer(FSDP2Strategy(mixed_precision=dtypes), precision="bf16-mixed").validate(module)
        known = "BoringModel is sharded already by an earlier run, so this would be ignored; set what that had"
        with pytest.raises(
            ValueError, match=rf"^precision: {known} \(precision: bf16-mixed\), or build the module anew"
        ):
            build_trainer(FSDP2Strategy()).validate(module)
        with pytest.raises(ValueError, match=rf"^cpu_offload: {known} \(cpu_offload: None\), or build"):
            build_trainer(FSDP2Strategy(cpu_offload=CPUOffload()), precision="bf16-mixed").validate(module)

    run_ranks(body, world_size=1)


def test_a_fit_after_an_evaluation_prints_the_units_and_warns_of_what_training_suffers_from() -> None:
    class Dropping(BoringModel):
        config = SimpleNamespace(encoder_layerdrop=0.1)

    def body() -> None:
        module, text = Dropping(), StringIO()
        with redirect_stdout(text), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            build_trainer(FSDP2Strategy(print_plan=True)).validate(module, verbose=False)
            assert "FSDP units" not in text.getvalue()
            assert not any("layerdrop" in str(warning.message) for warning in warned)
            build_trainer(FSDP2Strategy(print_plan=True), max_steps=1).fit(module)
        if dist.get_rank() == 0:
            assert "FSDP units, mesh replicate 1 x shard 2" in text.getvalue()
            assert any("encoder_layerdrop: got 0.1" in str(warning.message) for warning in warned)

    run_ranks(body)


def test_lists_of_yaml_and_tuples_of_python_are_the_same_settings() -> None:
    assert Wrap(module_classes=["A"]) == Wrap(module_classes=("A",))
    assert ActivationCheckpointing(mode="selective", saved_ops=["aten.mm"]) == ActivationCheckpointing(
        mode="selective", saved_ops=("aten.mm",)
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches: got 0: expected 1 or more"),
        ({"limit_train_batches": 0}, "limit_train_batches: got 0: nothing would be trained"),
        ({"callbacks": [EMAWeightAveraging()]}, "callbacks: got EMAWeightAveraging: .* lit_fsdp.callbacks.EMA"),
        ({"callbacks": [StochasticWeightAveraging(1e-3)]}, "got StochasticWeightAveraging: it copies the model"),
        ({"callbacks": [ModelPruning("l1_unstructured")]}, "got ModelPruning: it lists parameters before"),
        ({"callbacks": [LearningRateFinder()]}, "got LearningRateFinder: CausalLM has no lr or learning_rate"),
        ({"callbacks": [BackboneFinetuning()]}, "got BackboneFinetuning: CausalLM has no backbone"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),  # not the addresses of callbacks
)
def test_settings_of_the_trainer_that_would_harm_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False), **options)
        with pytest.raises(ValueError, match=message):
            trainer.fit(build_task(save_model(tmp_path / "model", **EVEN)), Rows(EVEN["vocab_size"], 4))

    run_ranks(body, world_size=1)


@pytest.mark.full
def test_the_graph_of_a_model_is_not_traced_on_one_rank_of_several(tmp_path: Path) -> None:
    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False), logger=TensorBoardLogger(tmp_path, log_graph=True))
        module = BoringModel()
        module.example_input_array = torch.ones(2, 32)
        with pytest.raises(ValueError, match=r"log_graph: got true: .* in a run on one rank"):
            trainer.fit(module)
        build_trainer(FSDP2Strategy(print_plan=False), fast_dev_run=True).fit(module)  # whose logger has any attribute

    run_ranks(body, world_size=2)


def test_callbacks_are_given_back_as_they_were(tmp_path: Path) -> None:
    """They may go on under another strategy."""

    def body() -> None:
        callbacks = [ModelCheckpoint(tmp_path / "saved", monitor="train/loss"), EarlyStopping("train/loss")]
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(build_task(save_model(tmp_path / "model", **EVEN)), Rows(EVEN["vocab_size"], 4))
        assert callbacks[0].best_model_path
        replaced = {name for callback in callbacks for name, value in vars(callback).items() if callable(value)}
        assert replaced == {"log", "log_dict"}  # by Lightning

    run_ranks(body, world_size=1)
