"""What users of Lightning write works under ``FSDP2Strategy`` as under DDP, or is refused."""

import csv
import random
import threading
import time
import warnings
from collections import UserList
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from bitsandbytes import optim as bnb_optim
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from differences import find_largest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from models import Block, to_full
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, IterableDataset, default_collate
from training import build_trainer
from transformers import AutoModel, BartConfig, PreTrainedConfig, Wav2Vec2Config

from lit_fsdp import ActivationCheckpointing, Compile, FSDP2Strategy, Mesh, MixedPrecision, Sharding, Wrap
from lit_fsdp.sharding.layer_drop import describe_layer_drop
from lit_fsdp.sharding.torch_internals import list_units
from lit_fsdp.tasks.loading import build_train_loader
from ranks import RankError, run_ranks

NUM_ROWS = 32


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that know their number."""

    def __init__(self) -> None:
        self.x = torch.randn(NUM_ROWS, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "number": torch.tensor(index),
            "drawn": torch.rand(1 + index % 3)[0],  # as random crops do that try again
            "x": self.x[index],
            "y": self.x[index].sum().sin()[None],
        }


class Plain(pl.LightningModule):
    """What a user writes who has not heard of sharding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 1))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=NUM_ROWS // dist.get_world_size() // 4)


class BuiltEarly(Plain):
    """Builds its optimizer before sharding, in groups."""

    def __init__(self, build: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        first, last = self.net[0].parameters(), self.net[2].parameters()
        self.optimizer = build([{"params": first, "lr": 2e-2}, {"params": last}], lr=1e-2)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def gather(module: nn.Module) -> dict[str, Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Tensor] = get_model_state_dict(module, options=options)
    return {name.removeprefix("module."): value for name, value in state.items()}


def train(build: Callable[[], pl.LightningModule], out: Path, is_sharded: bool, **options: Any) -> None:
    """Train on this rank; rank 0 writes the weights. Checkpoints ``save`` and ``resume`` are options."""
    pl.seed_everything(0, verbose=False)
    module, evaluates = build(), options.pop("evaluates", False)
    saved, resume, own = options.pop("save", None), options.pop("resume", None), options.pop("strategy", {})
    strategy: Any = FSDP2Strategy(print_plan=False, **own) if is_sharded else DDPStrategy(find_unused_parameters=True)
    settings = {"gradient_clip_val": None, "use_distributed_sampler": True, "max_steps": -1, "max_epochs": 2, **options}
    trainer = build_trainer(strategy, **settings)
    trainer.fit(module, ckpt_path=resume)
    if saved is not None:
        trainer.save_checkpoint(saved)
    if evaluates:
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
    weights = gather(module)
    if dist.get_rank() == 0:
        torch.save(weights, out)


def compare(build: Callable[[], pl.LightningModule], folder: Path, *, world_size: int = 2, **options: Any) -> None:
    """Compare the weights after training with those of DDP."""
    for name in ("sharded", "ddp"):
        run_ranks(partial(train, **options), build, folder / name, name == "sharded", world_size=world_size)
    assert_same(folder / "sharded", folder / "ddp", 2e-5)


def assert_same(path: Path, other: Path, tolerance: float) -> None:
    weights, expected = torch.load(path), torch.load(other)
    assert weights.keys() == expected.keys()
    filled = {name: value for name, value in expected.items() if value.numel()}
    assert find_largest(float((weights[name] - value).abs().max()) for name, value in filled.items()) <= tolerance


class SpectralNorm(Plain):
    """Its layers have a weight that each use computes anew, by one more step of an iteration."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.net[0], self.net[2]):
            spectral_norm(layer)


@pytest.mark.full
def test_a_weight_that_each_use_moves_on_is_used_by_steps_alone(tmp_path: Path) -> None:
    compare(SpectralNorm, tmp_path)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "build",
    [
        partial(torch.optim.AdamW, eps=1e-4),
        pytest.param(partial(torch.optim.Adagrad, initial_accumulator_value=0.1), marks=pytest.mark.full),
    ],
    ids=["adamw", "adagrad"],  # that one has state from the beginning
)
def test_an_optimizer_built_in_init_trains_the_sharded_parameters(
    build: Callable[..., torch.optim.Optimizer], world_size: int, tmp_path: Path
) -> None:
    module = partial(BuiltEarly, build)
    compare(module, tmp_path, world_size=world_size)
    run_ranks(partial(train, max_epochs=1, save=tmp_path / "c"), module, tmp_path / "half", True, world_size=world_size)
    run_ranks(partial(train, resume=tmp_path / "c"), module, tmp_path / "resumed", True, world_size=world_size)
    assert_same(tmp_path / "resumed", tmp_path / "sharded", 0.0)


class Replaced(BuiltEarly):
    """Replaces the parameters that its optimizer holds."""

    def configure_model(self) -> None:
        self.net[2] = nn.Linear(15, 1)


def test_an_optimizer_of_parameters_that_the_module_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"optimizer 0 \(SGD\) holds a parameter of shape \(1, 15\) that the module"):
        run_ranks(train, partial(Replaced, torch.optim.SGD), tmp_path / "out", True, world_size=1)


class KeepsList(torch.optim.SGD):
    """Steps what it was given, as optimizers from papers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]


def test_an_optimizer_with_a_list_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"optimizer 0 \(KeepsList\) holds parameters from before .* attribute mine"):
        run_ranks(train, partial(BuiltEarly, KeepsList), tmp_path / "out", True)


class Stepped(Plain):
    """Brings an optimizer of another library."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=1e-2)


class Quantized(Plain):
    """Holds weights of bitsandbytes, as Transformers loads them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        layer = layer.requires_grad_(False).to("cpu")  # which quantizes
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), layer, nn.Linear(64, 1))


class FourBits(Quantized):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__(Linear4bit(64, 64, compress_statistics=True, quant_type="nf4", quant_storage=storage))


class EightBits(Quantized):
    def __init__(self) -> None:
        super().__init__(Linear8bitLt(64, 64, has_fp16_weights=False))


class SparseGradients(Plain):
    """Embeds numbers of rows with gradients of the rows alone that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, 6, sparse=True)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return super().training_step({**batch, "x": batch["x"] + self.table(batch["number"])}, index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Waves(Plain):
    """Has complex weights, as Fourier neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(batch["x"]) * self.weight)
        return super().training_step({**batch, "x": x}, index)


class Scripted(Plain):
    """Has a part that torch.jit has compiled."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.net[0] = torch.jit.script(self.net[0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            partial(Stepped, bnb_optim.AdamW8bit),
            "AdamW8bit of bitsandbytes.* cannot step .*; take lit_fsdp.optim.AdamW8bit",
        ),
        (partial(Stepped, torch.optim.Adafactor), "got Adafactor of torch.optim: .*; take lit_fsdp.optim.Adafactor"),
        (EightBits, r"net.2.weight is a Int8Params of bitsandbytes: .* load it in 4 bits, or set quantization"),
        pytest.param(SparseGradients, "table.sparse: got True: .*; leave it out", marks=pytest.mark.full),
        pytest.param(Waves, "weight is torch.complex64: .* keep torch.view_as_real", marks=pytest.mark.full),
        pytest.param(Scripted, "net.0 is a script of torch.jit: .*; leave torch.jit out", marks=pytest.mark.full),
    ],
    ids=["AdamW8bit", "Adafactor", "Linear8bitLt", "sparse", "complex", "script"],
)
def test_what_cannot_be_sharded_trains_on_one_rank_and_is_refused_on_two(
    build: Callable[[], pl.LightningModule], message: str, tmp_path: Path
) -> None:
    run_ranks(train, build, tmp_path / "out", True, world_size=1)
    with pytest.raises(RankError, match=message):
        run_ranks(train, build, tmp_path / "out", True)


@pytest.mark.full
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
def test_4_bit_layers_of_bitsandbytes_are_sharded_and_resume(storage: torch.dtype, tmp_path: Path) -> None:
    build = partial(FourBits, storage)
    run_ranks(partial(train, max_epochs=1, save=tmp_path / "part"), build, tmp_path / "1", True)
    run_ranks(partial(train, resume=tmp_path / "part"), build, tmp_path / "resumed", True)
    run_ranks(train, build, tmp_path / "ddp", False)
    weights, expected = torch.load(tmp_path / "resumed"), torch.load(tmp_path / "ddp")
    codes = weights.pop("net.2.weight")
    assert torch.equal(codes.view(-1), expected["net.2.weight"].view(-1).view(torch.uint8))
    assert weights.keys() == {name for name in expected if not name.startswith("net.2.weight")}
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_codes_of_bitsandbytes_are_not_cast(precision: Any, tmp_path: Path) -> None:
    for storage in ("uint8", "float32", "bfloat16"):
        build = partial(FourBits, getattr(torch, storage))
        run_ranks(partial(train, precision=precision), build, tmp_path / storage, True)
        assert_same(tmp_path / storage, tmp_path / "uint8", 0.0)


class Unsized(Plain):
    """Leaves a size to the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.LazyLinear(15)


@pytest.mark.full
def test_parameters_without_a_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"net.0.weight has no size before the first forward: .* nn.Linear for"):
        run_ranks(train, Unsized, tmp_path / "out", True, world_size=1)


class NoFeatures(Plain):
    """Adds a layer that a setting has given no outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 0)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) + self.extra(batch["x"]).sum()


@pytest.mark.full
def test_parameters_without_elements_train_nothing_and_are_saved_and_resumed(tmp_path: Path) -> None:
    run_ranks(partial(train, save=tmp_path / "checkpoint"), NoFeatures, tmp_path / "first", True)
    compare(NoFeatures, tmp_path, max_epochs=4)
    run_ranks(partial(train, resume=tmp_path / "checkpoint", max_epochs=4), NoFeatures, tmp_path / "resumed", True)
    assert_same(tmp_path / "resumed", tmp_path / "sharded", 0)


class Marked(Plain):
    """Chooses what decays by an attribute of parameters, as Mamba's do."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight._no_weight_decay = True

    def configure_optimizers(self) -> Any:
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in self.parameters():
            groups[getattr(parameter, "_no_weight_decay", False)].append(parameter)
        kept = {"params": groups[True], "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": groups[False]}, kept], lr=1e-2, eps=1e-4, weight_decay=1.0)


def test_parameters_keep_the_attributes_that_a_module_gave_them(tmp_path: Path) -> None:
    compare(Marked, tmp_path)


class Hooked(Plain):
    """Has what sharding cannot keep."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 0)
        self.held = (self.net[2].bias,)
        self.rnn = nn.LSTM(1, 15)  # keeps a list of its own up to date

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        states, _ = self.rnn(batch["y"][:, None])
        return nn.functional.mse_loss(self.net[2](states[:, 0]), batch["y"])


def warn_of_what_is_lost(out: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Hooked, out, True)
    said = " ".join(str(warning.message) for warning in caught)
    is_lost = dist.get_world_size() > 1
    if not dist.get_rank():
        assert ("hooks on net.0.weight do not outlive sharding" in said) == is_lost
        assert ("held: parameters in plain lists stay as they were" in said) == is_lost
    assert "_flat_weights" not in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_and_lists_of_parameters_are_named_where_they_are_lost(tmp_path: Path, world_size: int) -> None:
    run_ranks(warn_of_what_is_lost, tmp_path / "out", world_size=world_size)


class OwnIterator(DataLoader[Any]):
    """Wraps what it iterates over, as the loaders of PyTorch Geometric do."""

    def _get_iterator(self) -> Any:
        return map(dict, super()._get_iterator())  # type: ignore[arg-type]


class Wrapped(Plain):
    def train_dataloader(self) -> DataLoader[Any]:
        return OwnIterator(Rows(), batch_size=8)


def test_a_loader_with_an_iterator_of_its_own_is_left_alone(tmp_path: Path) -> None:
    run_ranks(train, Wrapped, tmp_path / "out", True, world_size=1)
    assert not torch.load(tmp_path / "out")["net.2.bias"].isnan().any()


class WithoutOptimizer(Plain):
    """Measures, and trains nothing."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        nn.init.constant_(self.net[0].bias, bias)

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.full(after=1)
@pytest.mark.parametrize("checkpoint_format", ["sharded", "single_file"])
def test_a_module_without_an_optimizer_is_saved_and_resumed(checkpoint_format: str, tmp_path: Path) -> None:
    settings = {"checkpoint_format": checkpoint_format}
    saving = partial(train, strategy=settings, max_epochs=1, save=tmp_path / "c")
    run_ranks(saving, partial(WithoutOptimizer, 0.5), tmp_path / "half", True)
    run_ranks(partial(train, strategy=settings, resume=tmp_path / "c"), WithoutOptimizer, tmp_path / "resumed", True)
    assert_same(tmp_path / "half", tmp_path / "resumed", 0.0)


class CompiledBeside(Plain):
    """Keeps its network also as ``torch.compile`` returns it, and uses that."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.net, backend="eager")

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.fast(batch["x"]), batch["y"])


@pytest.mark.full
@pytest.mark.parametrize(("checkpoint_format", "world_size"), [("sharded", 1), ("sharded", 2), ("single_file", 2)])
def test_a_network_and_what_compile_made_of_it_are_resumed(
    checkpoint_format: str, world_size: int, tmp_path: Path
) -> None:
    run = partial(run_ranks, world_size=world_size)
    settings = partial(train, strategy={"checkpoint_format": checkpoint_format})
    run(settings, CompiledBeside, tmp_path / "whole", True)
    run(settings, Plain, tmp_path / "plain", True)
    run(partial(settings, max_epochs=1, save=tmp_path / "c"), CompiledBeside, tmp_path / "half", True)
    run(partial(settings, resume=tmp_path / "c"), CompiledBeside, tmp_path / "resumed", True)
    assert_same(tmp_path / "resumed", tmp_path / "whole", 0.0)
    weights, plain = torch.load(tmp_path / "resumed"), torch.load(tmp_path / "plain")
    assert {name: torch.equal(value, weights[name]) for name, value in plain.items()} == dict.fromkeys(plain, True)
    if checkpoint_format == "single_file":
        half, loaded = torch.load(tmp_path / "half"), CompiledBeside.load_from_checkpoint(tmp_path / "c")
        assert torch.equal(loaded.fast._orig_mod[0].weight, half["fast.0.weight"])


class UsedLater(Plain):
    """Has a layer that no step uses, and one that only the second epoch does; saves before its first step."""

    def __init__(self, begin: Path | None = None) -> None:
        super().__init__()
        self.begin = begin
        self.idle, self.late = nn.Linear(6, 5), nn.Linear(6, 1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        made = self.net(batch["x"])
        return nn.functional.mse_loss(made + self.late(batch["x"]) if self.current_epoch else made, batch["y"])

    def on_train_start(self) -> None:
        if self.begin is not None:
            self.trainer.save_checkpoint(self.begin)


@pytest.mark.full
@pytest.mark.parametrize(
    ("checkpoint_format", "world_size"),
    [("sharded", 2), ("single_file", 1), ("single_file", 2)],
)
def test_parameters_without_a_step_are_saved_and_resumed_as_such(
    checkpoint_format: str, world_size: int, tmp_path: Path
) -> None:
    run = partial(run_ranks, world_size=world_size)
    settings = partial(train, strategy={"checkpoint_format": checkpoint_format})
    run(settings, UsedLater, tmp_path / "whole", True)
    run(
        partial(settings, max_epochs=1, save=tmp_path / "c"),
        partial(UsedLater, tmp_path / "b"),
        tmp_path / "half",
        True,
    )
    for saved in ("b", "c"):  # before the first step, and before the first one of some
        run(partial(settings, resume=tmp_path / saved), UsedLater, tmp_path / "resumed", True)
        assert_same(tmp_path / "resumed", tmp_path / "whole", 0.0)


@pytest.mark.full
def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    for name, begin in (("saving", tmp_path / "b"), ("whole", None)):
        run_ranks(train, partial(UsedLater, begin), tmp_path / name, True)
    assert_same(tmp_path / "saving", tmp_path / "whole", 0.0)


class Counted(Plain):
    """Goes on with the next row after a resume, and logs which step it makes."""

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.log("made", float(self.global_step))
        return super().training_step(batch, _)

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.net(batch["x"])

    def train_dataloader(self) -> DataLoader[Any]:
        return build_train_loader(Rows(), batch_size=4, collate=default_collate, trainer=self.trainer)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=8)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("is_accumulated", [True, False])
def test_what_max_steps_ended_within_an_epoch_is_accumulated_and_logged_as_without_the_end(
    is_accumulated: bool, tmp_path: Path
) -> None:
    def run(name: str, **options: Any) -> None:
        callbacks = [GradientAccumulationScheduler({0: 2, 1: 1})] if is_accumulated else []
        options |= {"logger": CSVLogger(tmp_path, name="", version=name), "log_every_n_steps": 1}
        train(Counted, tmp_path / f"{name}.pt", True, callbacks=callbacks, val_check_interval=4, **options)
        rows = list(csv.DictReader((tmp_path / name / "metrics.csv").open()))
        assert [int(row["step"]) for row in rows] == [int(float(row["made"])) for row in rows]

    steps = {"max_steps": 2 if is_accumulated else 4, "max_epochs": -1}  # by then, a validation has been
    run_ranks(run, "whole", world_size=1)
    run_ranks(partial(run, save=tmp_path / "c", **steps), "half", world_size=1)
    run_ranks(partial(run, resume=tmp_path / "c"), "resumed", world_size=1)
    assert_same(tmp_path / "resumed.pt", tmp_path / "whole.pt", 0.0)


class GlobalShuffle(torch.utils.data.Sampler[int]):
    """A sampler as users write it, which Lightning splits over ranks: it draws from the global generators."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(NUM_ROWS).numpy()
        np.random.shuffle(order)  # noqa: NPY002
        numbers = order.tolist()
        random.shuffle(numbers)
        return iter(numbers)

    def __len__(self) -> int:
        return NUM_ROWS


class Shuffled(Plain):
    """Takes rows in an order from the global generators, drops out, and writes down what it saw and drew."""

    def __init__(self, out: Path, num_workers: int = 0) -> None:
        super().__init__()
        self.out, self.num_workers = out, num_workers
        self.dropout = nn.Dropout()
        self.seen: list[list[int]] = []
        self.drawn: list[list[float]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.seen[-1] += batch["number"].tolist()
        self.drawn.append([float(torch.rand(())), np.random.rand(), random.random()])  # noqa: NPY002
        self.drawn[-1] += batch["drawn"].tolist()
        return nn.functional.mse_loss(self.net(self.dropout(batch["x"])), batch["y"])

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=4, sampler=GlobalShuffle(), num_workers=self.num_workers)

    def on_train_end(self) -> None:
        self.out.mkdir(exist_ok=True)
        torch.save((self.seen, self.drawn), self.out / f"{dist.get_rank()}.pt")


def read_seen(folder: Path) -> tuple[list[list[list[int]]], list[Any]]:
    """Return the rows of each rank and epoch, and what each rank drew in each step."""
    seen, drawn = zip(*(torch.load(folder / f"{rank}.pt") for rank in range(2)), strict=True)
    for epoch in zip(*seen, strict=True):
        assert sorted(number for rank in epoch for number in rank) == list(range(NUM_ROWS))
    assert not set(np.array(drawn[0]).flat) & set(np.array(drawn[1]).flat)  # by torch, NumPy and Python
    return list(seen), list(drawn)


@pytest.mark.full
def test_samplers_on_the_global_generators_lose_no_row_and_go_on_after_a_resume(tmp_path: Path) -> None:
    for name, options in {
        "whole": {"max_epochs": 3},
        "half": {"max_epochs": 2, "save": tmp_path / "c"},
        "resumed": {"max_epochs": 3, "resume": tmp_path / "c"},
    }.items():
        run_ranks(partial(train, **options), partial(Shuffled, tmp_path / f"{name}_seen"), tmp_path / name, True)
    seen, drawn = read_seen(tmp_path / "whole_seen")
    resumed_seen, resumed_drawn = read_seen(tmp_path / "resumed_seen")
    for rank in range(2):
        assert seen[rank][0] != seen[rank][1]
        assert resumed_seen[rank][-1] == seen[rank][-1]
        assert resumed_drawn[rank] == drawn[rank][-len(resumed_drawn[rank]) :]
    assert_same(tmp_path / "whole", tmp_path / "resumed", 0.0)


class Resumed(Shuffled):
    """Goes on inside an epoch, which begins no new one."""

    def on_train_start(self) -> None:
        self.seen.append([])


class SaveInside(pl.Callback):
    """Saves inside the second epoch, of four batches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)


def resume_inside(folder: Path, num_workers: int) -> None:
    """Go on inside an epoch whose loader cannot be told where."""
    saving = partial(Shuffled, folder / "whole_seen", num_workers)
    train(saving, folder / "out", True, callbacks=[SaveInside(folder / "c")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(partial(Resumed, folder / "seen", num_workers), folder / "out", True, max_epochs=3, resume=folder / "c")
    said = [str(w.message) for w in caught]
    assert any("your dataloader is not resumable" in line for line in said) == (dist.get_rank() == 0)


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [1, 0])
def test_inside_an_epoch_a_users_sampler_begins_again_on_all_ranks_alike_which_is_said(
    num_workers: int, tmp_path: Path
) -> None:
    run_ranks(resume_inside, tmp_path, num_workers)
    seen = [torch.load(tmp_path / "seen" / f"{rank}.pt")[0] for rank in range(2)]
    assert [[len(epoch) for epoch in rank] for rank in seen] == [[8, 16]] * 2  # the rest of one, and another
    for first, second in zip(*seen, strict=True):
        assert not set(first) & set(second)
        assert len({*first, *second}) == len(first) + len(second)


@pytest.mark.full
def test_workers_of_two_ranks_draw_other_numbers(tmp_path: Path) -> None:
    run_ranks(train, partial(Shuffled, tmp_path / "seen", num_workers=1), tmp_path / "out", True)
    read_seen(tmp_path / "seen")


class Drawing(Plain):
    """Draws in each step."""

    def __init__(self, drawn: list[list[float]]) -> None:
        super().__init__()
        drawn.append([])
        self.drawn = drawn

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.drawn[-1] += [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
        return super().training_step(batch, _)


def draw_in_two_runs(folder: Path) -> None:
    drawn: list[list[float]] = []
    for _ in range(2):
        train(partial(Drawing, drawn), folder / "out", True)
    torch.save(drawn, folder / f"{dist.get_rank()}.pt")


def test_a_second_run_in_one_process_draws_by_its_own_seed(tmp_path: Path) -> None:
    run_ranks(draw_in_two_runs, tmp_path)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one[0] == one[1]
    assert other[0] == other[1] != one[0]


class Adversaries(Plain):
    """Two networks, of which one trains at a time."""

    def __init__(self, is_by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_by_hand = is_by_hand
        self.judge = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net.scale, self.judge.scale = (nn.Parameter(torch.tensor(value)) for value in (0.5, 1.5))

    def configure_optimizers(self) -> Any:
        networks = (self.net, self.judge)
        return [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks], []

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):  # type: ignore[arg-type]
            with torch.no_grad():
                self.judge(self.net(batch["x"]))  # both are gathered now
            self.toggle(optimizer, sign)
            made = self.net(batch["x"]) * self.net.scale
            loss = self.judge(batch["y"]).mean() - sign * self.judge(made).mean() * self.judge.scale
            self.manual_backward(loss)
            idle = self.judge if sign > 0 else self.net
            assert all(p.grad is None for p in idle.parameters()), "a network that does not train got gradients"
            optimizer.step()
            optimizer.zero_grad()
            if not self.is_by_hand:
                self.untoggle_optimizer(optimizer)

    def toggle(self, optimizer: Any, sign: int) -> None:
        if not self.is_by_hand:
            self.toggle_optimizer(optimizer)
            return
        self.net.requires_grad_(sign > 0)
        self.judge.requires_grad_(sign < 0)

    def on_train_end(self) -> None:
        assert "toggle_optimizer" not in vars(self), "a copy of the module would toggle the original"


@pytest.mark.full(after=1)
@pytest.mark.parametrize("is_by_hand", [False, True])
def test_toggled_optimizers_train_one_network_at_a_time(is_by_hand: bool, tmp_path: Path) -> None:
    compare(partial(Adversaries, is_by_hand), tmp_path)


class Agent(Plain):
    """As in reinforcement learning: networks in a container, and a temperature that no forward reads."""

    def __init__(self, container: type[nn.Module] = nn.ModuleDict) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.networks = container()
        self.networks.add_module("actor", self.net)
        self.networks.add_module("judge", nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.thermostat = nn.Module()
        self.thermostat.heat = nn.Parameter(torch.tensor(0.3))
        self.networks.get_submodule("actor").scale = nn.Parameter(torch.tensor(0.9))
        del self.net

    def configure_optimizers(self) -> Any:
        children = (*self.networks.children(), self.thermostat)
        return [torch.optim.SGD(child.parameters(), lr=0.1) for child in children], []

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        actor, judge = self.networks.children()
        of_actor, of_judge, of_heat = self.optimizers()  # type: ignore[misc]
        made = actor(batch["x"])
        of_heat.zero_grad()
        self.manual_backward(self.thermostat.heat.exp() * (made.detach().mean() - 1))
        of_heat.step()
        of_actor.zero_grad()
        self.manual_backward((made * self.thermostat.heat.detach()).square().mean() + judge(made).mean())
        self.manual_backward(actor.scale.square())
        of_actor.step()
        of_judge.zero_grad()
        self.manual_backward((judge(batch["y"]) - actor(batch["x"]).detach()).square().mean())
        of_judge.step()


@pytest.mark.parametrize("container", [nn.ModuleDict, pytest.param(nn.Module, marks=pytest.mark.full)])
def test_networks_in_a_container_and_a_parameter_that_no_forward_reads_train(
    container: type[nn.Module], tmp_path: Path
) -> None:
    compare(partial(Agent, container), tmp_path)


class Distribution(nn.Module):
    """Returns a distribution, as actors do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(self.mean(x), 1.0)


class Actor(Plain):
    """Learns by hand from what a distribution says."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor = Distribution()

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.actor(batch["x"])
        self.manual_backward(self.net(batch["x"]).square().mean() - self.actor(batch["x"]).log_prob(batch["y"]).mean())


def train_with_warnings(out: Path) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(Actor, out, True)
    said = [str(warning.message) for warning in warned if "finds no tensors" in str(warning.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert all(text.startswith("Distribution returns a Normal, in which") for text in said)


@pytest.mark.full
def test_a_network_by_hand_whose_gradients_are_lost_in_an_object_is_named(tmp_path: Path) -> None:
    run_ranks(train_with_warnings, tmp_path / "out")


class Looked(Plain):
    """Looks at its network between backward and step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self(torch.ones(1, 6))


class Limited(Plain):
    """Looks at its networks after a step; then limits the weights of one, and moves those of its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.target = deepcopy(self.net).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, 0)
        with torch.no_grad():
            wanted = self.target(batch["x"])
        optimizer.zero_grad()
        self.manual_backward(loss + (self.net(batch["x"]) - wanted).square().mean())
        optimizer.step()
        with torch.no_grad():
            self.net(batch["x"])
            self.target(batch["x"])

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for own, target in zip(self.net.parameters(), self.target.parameters(), strict=True):
                own.clamp_(-0.2, 0.2)
                target.lerp_(own, 0.5)


@pytest.mark.full
@pytest.mark.parametrize("build", [Looked, Limited])
def test_what_a_forward_without_a_backward_has_gathered_hides_no_step_and_no_change(
    build: Callable[[], pl.LightningModule], tmp_path: Path
) -> None:
    compare(build, tmp_path)


class Samples(Plain):
    """Draws from its network outside of steps, from before the first one on; what it draws is in what is compared."""

    context: ClassVar[Callable[[], Any]] = torch.no_grad

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 1))
        self.register_buffer("drawn", torch.zeros(1))

    def draw(self) -> None:
        with self.context():
            self.drawn += self.net(torch.ones(1, 6)).sum()

    def on_train_start(self) -> None:
        self.draw()

    def on_train_batch_end(self, *_: Any) -> None:
        self.draw()


class SamplesForInference(Samples):
    """Draws under ``inference_mode``, also in a training step, and evaluates under it."""

    context = torch.inference_mode

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.draw()
        return super().training_step(batch, index)

    @torch.inference_mode()
    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        is_reduced = not isinstance(self.trainer.strategy, DDPStrategy)  # which fails where ranks meet over gloo
        self.log("val", super().training_step(batch, index), sync_dist=is_reduced)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class CopiesTarget(Samples):
    """Copies its network to a target inside of training steps, before these use both."""

    def __init__(self) -> None:
        super().__init__()
        self.target = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if index % 2:
            self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            wanted = batch["y"] + 0.1 * self.target(batch["x"])
        return super().training_step({**batch, "y": wanted}, index)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("build", [Samples, SamplesForInference, CopiesTarget])
def test_networks_may_be_called_outside_of_steps_and_without_gradients(
    build: type[Samples], world_size: int, tmp_path: Path
) -> None:
    compare(build, tmp_path, world_size=world_size)


class UsesShards(Samples):
    """Does with weights what sharding does not allow."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.own = use, nn.Parameter(torch.ones(6, 6))

    def draw(self) -> None: ...

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.use == "penalty":
            return loss + sum(parameter.square().sum() for parameter in self.net.parameters())
        if self.use == "others":
            torch.func.functional_call(self.net, {"1.down.weight": torch.zeros(8, 16)}, batch["x"])
        if self.use == "product":
            return loss + (batch["x"].float() @ self.own).mean()
        return loss

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.use == "norm":
            self.log_dict(grad_norm(self.net, 2))
        if self.use == "numbers":  # as histograms of TensorBoard
            self.net[0].weight.detach().cpu().numpy()
        if self.use == "copy":  # as an average made when a fit starts
            deepcopy(self)
        if self.use == "list":  # as ModelEmaV3 of timm
            kept = [*self.state_dict().values(), torch.zeros(2)]  # a buffer
            torch._foreach_lerp_(kept, kept, 0.1)

    def on_train_end(self) -> None:
        if self.use == "save":
            save_file(self.net.state_dict(), "/dev/null")  # as save_pretrained of Transformers and peft


@pytest.mark.full
@pytest.mark.parametrize(
    ("use", "error", "meaning"),
    [
        ("penalty", "got mixed torch.Tensor and DTensor", r"inside its forward.* take weight\.full_tensor\(\)"),
        ("norm", "not allocated yet", r"take torch\.nn\.utils\.get_total_norm for a norm"),
        ("numbers", "not supported for tensor subclasses", r"shards were read as plain.*full_tensor\(\) for all"),
        ("copy", "FSDP does not support deepcopy", r"before it is sharded: in __init__.*copy\.load_state_dict"),
        ("list", "got mixed torch.Tensor and DTensor", r"foreach=False.*leave its buffers out, or take the EMA"),
        ("others", "got another tensor for 1.down.weight, which is sharded", r"a min_num_params above the size"),
        ("save", "on an invalid python storage", r"get_model_state_dict with .*on rank 0 save_pretrained with that"),
        ("product", "to have the same dtype", r"give x\.to\(weight\.dtype\) to products of your own"),
    ],
)
def test_an_error_that_sharding_leads_to_says_what_to_do(use: str, error: str, meaning: str, tmp_path: Path) -> None:
    options = {"precision": "bf16-mixed" if use == "product" else "32-true"}
    with pytest.raises(RankError, match=rf"(?s){error}.*{meaning}"):
        run_ranks(partial(train, **options), partial(UsesShards, use), tmp_path / "out", True)


class TakesNumbers(Samples):
    """Looks at gradients as one does on one device, and as one should."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        gradients: list[Any] = [parameter.grad for parameter in self.net.parameters()]
        assert all(float(to_full(gradient.norm())) >= gradient.norm().item() for gradient in gradients)
        assert torch.nn.utils.get_total_norm(gradients).item() > 0
        if not gradients[0].abs().sum():
            raise AssertionError


def warn_of_numbers(out: Path, world_size: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(TakesNumbers, out, True)
    said = [str(w.message).split(" ")[0] for w in caught if "takes a number of what is computed from" in str(w.message)]
    assert [place.rpartition(":")[0] for place in said] == [__file__] * 2 * (world_size > 1 and dist.get_rank() == 0)
    assert len(set(said)) == len(said)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_numbers_of_this_ranks_rows_are_warned_about_once_a_place(world_size: int, tmp_path: Path) -> None:
    run_ranks(warn_of_numbers, tmp_path / "out", world_size, world_size=world_size)


class Timed(nn.Module):
    """Makes an embedding of the time in float32 and gives it to a layer of its own, as diffusion models do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.linear = dtype, nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        time = torch.arange(4.0).sin().expand(len(x), 4)
        return x + self.linear(time.to(self.dtype)).tanh()


class MakesFloat32(Samples):
    """Adds noise to what is in bfloat16, and draws samples from more of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype_of_noise = dtype
        self.net = nn.Sequential(nn.Linear(6, 8), Timed(dtype), Timed(dtype), nn.Linear(8, 1))

    def draw(self) -> None:
        with torch.no_grad():
            self.drawn += self.net(torch.ones(1, 6, dtype=self.dtype_of_noise)).float().sum()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        noisy = batch["x"] + torch.linspace(0, 0.1, 6)
        return super().training_step({"x": noisy.to(self.dtype_of_noise), "y": batch["y"]}, index)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "precision", "strategy"),
    [
        (1, "bf16-mixed", {}),
        (2, "bf16-mixed", {}),
        (2, "bf16-true", {}),
        (2, "bf16-mixed", {"activation_checkpointing": ActivationCheckpointing(mode="full"), "compile": Compile()}),
    ],
)
def test_layers_in_16_bits_take_what_a_module_makes_in_float32(
    world_size: int, precision: str, strategy: dict[str, Any], tmp_path: Path
) -> None:
    options = {"precision": precision, "strategy": {"wrap": Wrap(module_classes=["Timed"]), **strategy}}
    for dtype in (torch.bfloat16, torch.float32):
        build = partial(MakesFloat32, dtype)
        run_ranks(partial(train, **options), build, tmp_path / str(dtype), True, world_size=world_size)
    assert_same(tmp_path / "torch.float32", tmp_path / "torch.bfloat16", 0.0)
    options["strategy"] |= {"mixed_precision": MixedPrecision(cast_forward_inputs=False)}
    with pytest.raises(RankError, match="must have the same dtype"):
        run_ranks(partial(train, **options), build, tmp_path / "out", True, world_size=1)


class ValidatesAverage(Samples):
    """Validates an average of its weights, which hooks put in their place and take out again."""

    def __init__(self) -> None:
        super().__init__()
        self.average = deepcopy(self.net).requires_grad_(False)
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for mean, own in zip(self.average.parameters(), self.net.parameters(), strict=True):
            mean.data.mul_(0.5).add_(own.data, alpha=0.5)
        self.draw()

    def on_validation_epoch_start(self) -> None:
        self.kept = [own.detach().clone() for own in self.net.parameters()]
        for mean, own in zip(self.average.parameters(), self.net.parameters(), strict=True):
            own.data.copy_(mean.data)

    def validation_step(self, *_: Any) -> None:
        self.draw()

    def on_validation_epoch_end(self) -> None:
        for before, own in zip(self.kept, self.net.parameters(), strict=True):
            own.data.copy_(before)

    test_step, on_test_epoch_start = validation_step, on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    test_dataloader = val_dataloader


@pytest.mark.full
def test_hooks_put_other_weights_in_place_for_an_evaluation_and_take_them_out_again(tmp_path: Path) -> None:
    compare(ValidatesAverage, tmp_path, evaluates=True)


class Differentiated(Plain):
    """Differentiates inside of a step: a penalty on gradients, on the weights of blocks, or an attack on its inputs."""

    def __init__(self, kind: str, is_by_hand: bool) -> None:
        super().__init__()
        self.kind, self.automatic_optimization = kind, not is_by_hand

    def compute_loss(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        out = self.net(x)
        if self.kind == "penalty on weights":
            return out.square().mean() + 0.1 * sum(p.square().sum() for p in self.net.parameters())
        if self.kind == "penalty on gradients":
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.mean() + (gradient.norm(dim=1) - 1).square().mean()
        (gradient,) = torch.autograd.grad(out.square().mean(), x)
        return self.net((x + 0.1 * gradient.sign()).detach()).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.compute_loss(batch["x"])
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


@pytest.mark.full(after=1)
@pytest.mark.parametrize("is_by_hand", [False, True], ids=["automatic", "by hand"])
@pytest.mark.parametrize("kind", ["penalty on gradients", "penalty on weights", "attack on inputs"])
def test_steps_differentiate_inside_where_gathered_weights_stay(kind: str, is_by_hand: bool, tmp_path: Path) -> None:
    kept = Sharding(reshard_after_forward=False, reshard_after_backward=False)
    strategy = {"sharding": kept, "wrap": Wrap(module_classes=["Linear"])}
    compare(partial(Differentiated, kind, is_by_hand), tmp_path, strategy=strategy)


class Penalized(Differentiated):
    """Penalizes gradients before or after other forwards of the same blocks, in two micro-batches; validates forces."""

    def __init__(self, order: str, is_by_hand: bool) -> None:
        super().__init__("penalty on gradients", is_by_hand)
        self.order = order
        self.net = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 1))

    def compute_loss(self, x: Tensor) -> Tensor:
        other = x.detach().clone() * 0.5
        if self.order == "first":
            loss = super().compute_loss(x)
            return loss + self.net(other).square().mean()
        if self.order == "last":
            return self.net(other).square().mean() + super().compute_loss(x)
        if self.order == "attack":
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(self.net(x).square().mean(), x)
            return self.net((x + 0.1 * gradient.sign()).detach()).square().mean()
        x.requires_grad_()  # only to be logged
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        self.log("norm", gradient.detach().norm())
        return self.net(other).square().mean()

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        with torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        self.log("val", force.detach().norm(), sync_dist=not isinstance(self.trainer.strategy, DDPStrategy))

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


@pytest.mark.full
@pytest.mark.parametrize("is_by_hand", [False, True], ids=["automatic", "by hand"])
@pytest.mark.parametrize("order", ["first", "last", "logged", "attack"])
def test_gradients_of_gradients_keep_the_weights_they_need(order: str, is_by_hand: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {} if is_by_hand else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    compare(partial(Penalized, order, is_by_hand), tmp_path, inference_mode=False, **options)


@pytest.mark.full
def test_a_run_keeps_no_weights_for_the_next_one() -> None:
    def body() -> None:
        module = Penalized("last", is_by_hand=False)
        trainer = build_trainer(FSDP2Strategy(wrap=Wrap(module_classes=["Block"])), max_steps=2, inference_mode=False)
        for run in (trainer.fit, trainer.validate):
            run(module)
            units = [(unit.is_gathered, unit._group.reshard_after_backward) for unit in list_units(module)]
            assert units == [(False, True)] * 3

    run_ranks(body)


class Clamps(Plain):
    """Changes gradients by itself, after backward."""

    def on_after_backward(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-2, 1e-2)


class ClampsByHand(Clamps):
    """Does so for each of several steps of a bare optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        for _ in range(2):
            self.manual_backward(self.net(batch["x"]).square().mean())
            self.net.zero_grad()
            self.manual_backward(super().training_step(batch, 0))
            optimizer.step()
            optimizer.zero_grad()


class Follows(Plain):
    """Predicts what an average of its own weights says, which follows after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.target = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"] + self.target(batch["x"]))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for own, average in zip(self.net.parameters(), self.target.parameters(), strict=True):
            average.lerp_(own, 0.3)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=1e-4)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("build", [Clamps, ClampsByHand, Follows])
def test_hooks_find_gradients_and_shards_where_gathered_weights_stay(build: type[Plain], tmp_path: Path) -> None:
    kept = Sharding(reshard_after_forward=False, reshard_after_backward=False)
    compare(build, tmp_path, strategy={"sharding": kept, "wrap": Wrap(module_classes=["Linear"])})


class UnfreezesInside(Plain):
    """Unfreezes a layer between the first two micro-batches of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_end(self, _: Any, __: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.net[0].requires_grad_(True)

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.net(batch["x"])

    val_dataloader = Plain.train_dataloader


@pytest.mark.full
@pytest.mark.parametrize("num_validated", [0, 1])
def test_layers_are_unfrozen_between_micro_batches_where_gathered_weights_stay(
    num_validated: int, tmp_path: Path
) -> None:
    """As on one device: DDP on several does not average the gradients of what is unfrozen later."""
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "limit_val_batches": num_validated}
    kept = Sharding(reshard_after_forward=False, reshard_after_backward=False)
    strategy = {"sharding": kept, "wrap": Wrap(module_classes=["Linear"])}
    run_ranks(partial(train, strategy=strategy, **options), UnfreezesInside, tmp_path / "sharded", True)
    run_ranks(partial(train, **options), UnfreezesInside, tmp_path / "ddp", False, world_size=1)
    assert_same(tmp_path / "sharded", tmp_path / "ddp", 2e-5)


class Whole(Plain):
    """Has a whole number for a parameter, which trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.tensor(3), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.times


def test_a_whole_number_may_be_a_parameter(tmp_path: Path) -> None:
    compare(Whole, tmp_path)


class LogsOnTheFirst(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


def test_a_metric_that_one_rank_lacks_ends_the_run_at_once(tmp_path: Path) -> None:
    stopper = EarlyStopping("loss", check_on_train_epoch_end=True)
    with pytest.raises(RankError, match="Early stopping conditioned on metric `loss` which is not available"):
        run_ranks(partial(train, callbacks=[stopper]), LogsOnTheFirst, tmp_path / "out", True)


class WithRate(Plain):
    """Has a learning rate that can be found."""

    lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)


def find_rate(folder: Path) -> None:
    finder = LearningRateFinder(num_training_steps=24, early_stop_threshold=None)
    train(WithRate, folder / "out", True, callbacks=[finder], default_root_dir=folder, max_epochs=8)
    assert finder.optimal_lr is not None
    suggested = finder.optimal_lr.suggestion()
    assert suggested is not None
    assert suggested != WithRate.lr
    assert list(folder.glob("*lr_find*")) == []
    WithRate.lr = suggested
    train(WithRate, folder / "plain", True, max_epochs=8)
    if dist.get_rank() == 0:
        assert_same(folder / "out", folder / "plain", 0.0)  # of the search, nothing is left in the optimizer either


@pytest.mark.full
def test_the_learning_rate_finder_restores_the_weights_from_a_folder(tmp_path: Path) -> None:
    run_ranks(find_rate, tmp_path)


def test_the_learning_rate_finder_is_refused_for_a_module_without_a_rate(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="LearningRateFinder: Plain has no lr or learning_rate, which it changes"):
        run_ranks(partial(train, callbacks=[LearningRateFinder()]), Plain, tmp_path / "out", True, world_size=1)


class OwnPlan(Plain):
    """Shards itself as Lightning's ``ModelParallelStrategy`` asks for."""

    def configure_model(self) -> None:
        if self.device_mesh is None:  # under DDP
            return
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@pytest.mark.full
def test_code_for_model_parallel_strategy_finds_its_mesh(tmp_path: Path) -> None:
    compare(OwnPlan, tmp_path)


class SplitByHand(Plain):
    """Splits and shards its layers itself, as Lightning's ``ModelParallelStrategy`` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))  # 15 have no halves

    def configure_model(self) -> None:
        if self.device_mesh is None:  # under DDP
            return
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)  # type: ignore[arg-type]
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self) -> DataLoader[Any]:
        num_ranks = self.trainer.distributed_sampler_kwargs["num_replicas"]  # with rows of their own
        return DataLoader(Rows(), batch_size=NUM_ROWS // num_ranks // 4)


def test_code_for_model_parallel_strategy_splits_layers_by_its_mesh(tmp_path: Path) -> None:
    run_ranks(partial(train, strategy={"mesh": Mesh(tensor=2)}), SplitByHand, tmp_path / "split", True, world_size=4)
    run_ranks(train, SplitByHand, tmp_path / "ddp", False, world_size=2)
    assert_same(tmp_path / "split", tmp_path / "ddp", 2e-5)


class SplitInPart(SplitByHand):
    """Forgets to shard what it splits."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel()})


def test_layers_that_are_split_and_not_sharded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"configure_model: net.0.weight is split, and not sharded; call fully_shard"):
        run_ranks(partial(train, strategy={"mesh": Mesh(tensor=2)}), SplitInPart, tmp_path / "split", True)


class Pipeline(Plain):
    """The recipe of docs/strategy.md: two stages, each sharded over half of the ranks, under manual optimization."""

    automatic_optimization = False

    def configure_model(self) -> None:
        size = self.trainer.world_size // 2
        mesh = init_device_mesh(self.device.type, (2, size), mesh_dim_names=("stage", "shard"))
        self.number, self.share = mesh.get_local_rank("stage"), mesh.get_local_rank("shard")
        part = self.net[:2] if self.number == 0 else self.net[2:]
        del self.net
        self.add_module(f"stage_{self.number}", fully_shard(part, mesh=mesh["shard"]))
        stage = PipelineStage(part, self.number, 2, self.device, group=mesh.get_group("stage"))
        self.schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:  # type: ignore[override]
        if self.number == 0:
            self.schedule.step(batch["x"])
        else:
            self.schedule.step(target=batch["y"])
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def train_dataloader(self) -> DataLoader[Any]:
        size = self.trainer.world_size // 2
        own = torch.utils.data.Subset(Rows(), range(self.share, NUM_ROWS, size))
        return DataLoader(own, batch_size=NUM_ROWS // size // 4)


def train_pipeline(out: Path) -> None:
    module = Pipeline()
    strategy = FSDP2Strategy(print_plan=False)
    trainer = build_trainer(strategy, gradient_clip_val=None, max_steps=-1, max_epochs=2)
    trainer.fit(module)
    weights = {name: to_full(parameter).detach() for name, parameter in module.named_parameters()}
    torch.save(weights, out / f"{dist.get_rank()}.pt")


@pytest.mark.full
def test_a_pipeline_under_manual_optimization_trains_as_one_module(tmp_path: Path) -> None:
    run_ranks(train_pipeline, tmp_path, world_size=4)
    first, last = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "2.pt")
    found = {name.replace("stage_0", "net"): value for name, value in first.items()}
    found |= {name.replace("stage_1", "net"): value for name, value in last.items()}
    torch.save(found, tmp_path / "pipeline")
    run_ranks(partial(train, use_distributed_sampler=False), NotShuffled, tmp_path / "ddp", False, world_size=2)
    assert_same(tmp_path / "pipeline", tmp_path / "ddp", 2e-5)


class NotShuffled(Plain):
    """Takes rows in their order, every second one on each of two ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        own = torch.utils.data.Subset(Rows(), range(dist.get_rank(), NUM_ROWS, dist.get_world_size()))
        return DataLoader(own, batch_size=NUM_ROWS // dist.get_world_size() // 4)


class Uneven(Plain):
    """Has more rows to validate on the first rank than on the second."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=8 + 8 * dist.get_rank())

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.net(batch["x"])


def test_uneven_validation_batches_are_refused_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    refusal = r"val_dataloader: got 2 batches on one rank and 4 on another: .*as many on each"
    with pytest.raises(RankError, match=refusal):
        run_ranks(partial(train, use_distributed_sampler=False), Uneven, tmp_path / "out", True, timeout_s=60)


class Shrinking(Plain):
    """Has fewer rows from the second epoch on, on one rank."""

    def train_dataloader(self) -> DataLoader[Any]:
        num_rows = 24 - 8 * (dist.get_rank() and self.trainer.current_epoch)
        return DataLoader(torch.utils.data.Subset(Rows(), range(num_rows)), batch_size=8)


@pytest.mark.full
def test_loaders_that_are_made_anew_are_compared_anew(tmp_path: Path) -> None:
    run = partial(train, use_distributed_sampler=False, reload_dataloaders_every_n_epochs=1, max_epochs=2)
    with pytest.raises(RankError, match=r"train_dataloader: got 2 batches on one rank and 3 on another: "):
        run_ranks(run, Shrinking, tmp_path / "out", True, timeout_s=60)


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows of unknown number."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([Rows()[i] for i in range(self.num_rows)])


class Streamed(Plain):
    """Has data of unknown length to train and to validate, which may be less on a rank."""

    rows: ClassVar[dict[str, tuple[int, int]]] = {"train": (24, 24), "validation": (16, 16)}

    def load(self, name: str) -> DataLoader[Any]:
        return DataLoader(Stream(self.rows[name][dist.get_rank()]), batch_size=8)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.load("train")

    def val_dataloader(self) -> DataLoader[Any]:
        return self.load("validation")

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.net(batch["x"])


class ShortTraining(Streamed):
    rows: ClassVar = Streamed.rows | {"train": (24, 16)}


class ShortValidation(Streamed):
    rows: ClassVar = Streamed.rows | {"validation": (8, 16)}


class NothingToTrain(Streamed):
    rows: ClassVar = Streamed.rows | {"train": (16, 0)}


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    ("task", "refusal"),
    [
        (ShortTraining, r"train_dataloader: rank 1 ran out of data after 2 batches, rank 0 has more"),
        (ShortValidation, r"val_dataloader: rank 0 ran out of data after 1 batches, rank 1 has more"),
        (NothingToTrain, r"train_dataloader: got 0 batches on one rank and some on another"),
        (Streamed, None),
    ],
)
def test_ranks_that_run_out_of_data_of_unknown_length_before_others_are_named(
    tmp_path: Path, task: type[Streamed], refusal: str | None
) -> None:
    run = partial(run_ranks, partial(train, max_epochs=2, num_sanity_val_steps=0), task, tmp_path / "out", True)
    if refusal is None:
        run(timeout_s=60)
        return
    with pytest.raises(RankError, match=refusal):
        run(timeout_s=60)


class Late(Streamed):
    """Begins a batch later on one rank: until then the others find what that rank said last."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.2 * dist.get_rank())


def train_again(out: Path) -> None:
    """Three runs in one process over streams; the last one ends by its steps, where one rank would have more."""
    for rows, options in (((8, 8), {}), ((8, 8), {}), ((16, 32), {"max_steps": 2, "limit_val_batches": 0})):
        Streamed.rows = {"train": rows, "validation": (8, 8)}
        train(Late, out, True, num_sanity_val_steps=0, **options)


@pytest.mark.full
def test_streams_are_compared_anew_in_each_run_and_not_past_its_last_step(tmp_path: Path) -> None:
    run_ranks(train_again, tmp_path / "out", timeout_s=60)


class Scaled(Plain):
    """Has parameters of no dimension, one of its own and one in a child, used and limited as CLIP's are."""

    def __init__(self, is_meta: bool = False) -> None:
        super().__init__()
        self.is_meta = is_meta
        if not is_meta:
            self.build()

    def build(self) -> None:
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.net.scale = nn.Parameter(torch.tensor(1.0))

    def configure_model(self) -> None:
        if self.is_meta and not hasattr(self, "shift"):
            with torch.device("meta"):
                self.build()
                self.net[0] = nn.Linear(6, 15)

    def configure_weights(self) -> None:
        with torch.no_grad():
            self.shift.fill_(0.5)
            self.net.scale.fill_(1.0)
            for value in self.net[0].parameters():
                value.fill_(0.1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        with torch.no_grad():
            self.net.scale.clamp_(min=0.99)
        return nn.functional.mse_loss(self.net(batch["x"]) * self.net.scale.exp() + self.shift, batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=True)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_of_no_dimension_train_and_resume(world_size: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    compare(Scaled, tmp_path, world_size=world_size, **options)
    weights = torch.load(tmp_path / "sharded")
    assert weights["shift"].shape == weights["net.scale"].shape == ()
    assert 0.97 < weights["net.scale"] < 1.0
    for checkpoint_format in ("sharded", "single_file"):
        settings = {**options, "strategy": {"checkpoint_format": checkpoint_format}}
        checkpoint = tmp_path / f"{checkpoint_format}.ckpt"
        saving = partial(train, max_epochs=1, save=checkpoint, **settings)
        run_ranks(saving, Scaled, tmp_path / "half", True, world_size=world_size)
        resuming = partial(train, resume=checkpoint, **settings)
        run_ranks(resuming, Scaled, tmp_path / "resumed", True, world_size=world_size)
        assert_same(tmp_path / "resumed", tmp_path / "sharded", 0.0)


@pytest.mark.full
def test_parameters_of_no_dimension_may_be_built_on_the_meta_device(tmp_path: Path) -> None:
    run_ranks(train, partial(Scaled, is_meta=True), tmp_path / "out", True)
    assert 0.0 < float((torch.load(tmp_path / "out")["shift"] - 0.5).abs()) < 0.2


class WithBackbone(pl.LightningModule):
    """Trains its head first."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(16) if has_norm else nn.LayerNorm(16)
        self.backbone = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh())
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch["x"])), batch["y"])

    def configure_optimizers(self) -> Any:
        parameters = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)

    train_dataloader = Plain.train_dataloader


def train_backbone(out: Path, *, is_sharded: bool = True, has_norm: bool = False, **options: Any) -> None:
    callback = BackboneFinetuning(1, train_bn=False, backbone_initial_ratio_lr=0.5)
    options = {"max_epochs": 4, **options}
    train(partial(WithBackbone, has_norm), out, is_sharded, callbacks=[callback], **options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("checkpoint_format", "world_size", "options"),
    [
        ("sharded", 2, {}),
        ("single_file", 1, {"has_norm": True}),
        ("sharded", 1, {"has_norm": True}),
    ],
)
def test_a_run_that_has_unfrozen_its_backbone_is_resumed(
    checkpoint_format: str, world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    run = partial(run_ranks, world_size=world_size)
    strategy = {"checkpoint_format": checkpoint_format, "wrap": Wrap(module_classes=["Linear"])}
    sharded: dict[str, Any] = {**options, "strategy": strategy}
    # On one rank: with more, DDP never averages gradients of what was frozen when it wrapped the module.
    run_ranks(lambda: train_backbone(tmp_path / "ddp", is_sharded=False, **options), world_size=1)
    run(lambda: train_backbone(tmp_path / "whole", **sharded))
    assert_same(tmp_path / "whole", tmp_path / "ddp", 2e-5)
    run(lambda: train_backbone(tmp_path / "half", save=tmp_path / "c", **{**sharded, "max_epochs": 3}))
    resume = partial(train_backbone, tmp_path / "resumed", resume=tmp_path / "c")
    run(lambda: resume(**sharded))
    assert_same(tmp_path / "resumed", tmp_path / "whole", 0.0)
    before, after = torch.load(tmp_path / "half"), torch.load(tmp_path / "resumed")
    assert not torch.equal(before["backbone.0.weight"], after["backbone.0.weight"])

    # Other names of parameters, and in the first case another number of ranks.
    checkpointing = {**strategy, "activation_checkpointing": ActivationCheckpointing(mode="full")}
    run_ranks(lambda: resume(**{**sharded, "strategy": checkpointing}), world_size=1)
    assert_same(tmp_path / "resumed", tmp_path / "whole", 1e-6)


class Gate(nn.Module):
    """Adds a branch with a weight of its own, as ReZero and LayerScale do; a block to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.linear(x).tanh()


class Gated(Plain):
    """Uses a parameter of no dimension in compiled blocks, one by its name, one on the first rank, and one nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Gate(), Gate(), nn.Linear(6, 1))
        self.scale, self.own, self.idle = (nn.Parameter(torch.tensor(value)) for value in (1.5, 0.5, 2.0))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        made = self.net(batch["x"]) * self.get_parameter("scale")
        return nn.functional.mse_loss(made * self.own if self.global_rank == 0 else made, batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=1.0)


@pytest.mark.full
def test_parameters_of_no_dimension_train_in_compiled_blocks_and_where_one_rank_uses_them(tmp_path: Path) -> None:
    compiled = Compile(backend="aot_eager")
    settings = {"compile": compiled, "wrap": Wrap(module_classes=["Gate"]), "sharding": Sharding(no_sync=True)}
    compare(Gated, tmp_path, strategy=settings, accumulate_grad_batches=2, gradient_clip_val=0.3)
    weights = torch.load(tmp_path / "sharded")
    assert weights["idle"] == 2.0, "what no rank has used decayed"
    assert weights["own"] != 0.5


class SecondOrder(Plain):
    """Trains with an optimizer that runs the step many times and keeps a history."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)


def test_a_run_with_lbfgs_trains_and_is_not_resumed(tmp_path: Path) -> None:
    compare(SecondOrder, tmp_path, world_size=1, save=tmp_path / "c.ckpt")
    with pytest.raises(RankError, match=r"a run with LBFGS cannot be resumed: .* start a new run from the weights"):
        run_ranks(partial(train, resume=tmp_path / "c.ckpt"), SecondOrder, tmp_path / "resumed", True, world_size=1)
    half = {"mixed_precision": MixedPrecision(param_dtype="float16")}
    with pytest.raises(RankError, match=r"got LBFGS with gradients in float16: .*; set precision: bf16-mixed or 32-tr"):
        run_ranks(partial(train, strategy=half), SecondOrder, tmp_path / "half", True, world_size=1)


class Sharpness(torch.optim.SGD):
    """Steps with the gradients from uphill of here, and puts weights back as implementations of SAM do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = self.param_groups[0]["params"]
        scale = 0.3 / to_full(nn.utils.get_total_norm([p.grad for p in parameters]))
        kept = [p.data.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad * scale)
        with torch.enable_grad():
            closure()
        for p, data in zip(parameters, kept, strict=True):
            p.data = data
        super().step()
        return loss


class Assigns(Plain):
    """Replaces the values of weights: shards in its optimizer, whole ones in hooks, those of a target in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(6, 15).requires_grad_(False)

    def on_fit_start(self) -> None:
        self.target.load_state_dict({"weight": torch.ones(15, 6), "bias": torch.arange(15.0)})

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if index == 2:
            self.target.load_state_dict(self.net[0].state_dict())
        return super().training_step({**batch, "y": batch["y"] + self.target(batch["x"]).mean(1, keepdim=True)}, index)

    def configure_optimizers(self) -> Any:
        return Sharpness(self.net.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], index: int) -> None:
        bias = self.net[0].bias
        bias.data = to_full(bias).clamp(-0.2, 0.2)
        if isinstance(bias, DTensor):
            with pytest.raises(
                RuntimeError, match=r"got torch.float64 of .* for shards of torch.float32 of \[15\]: shape"
            ):
                bias.data = bias.data.double()
        if index == 0:  # gathers the weights that are loaded
            with torch.no_grad():
                self.target(batch["x"])
            self.target.load_state_dict({"weight": torch.full((15, 6), 0.5), "bias": torch.zeros(15)})
        with pytest.raises(RuntimeError, match=r"size mismatch for bias: .*torch.Size\(\[\]\).*torch.Size\(\[15\]\)"):
            self.target.load_state_dict({"weight": torch.ones(15, 6), "bias": torch.tensor(0.0)})


def test_data_that_is_assigned_or_loaded_reaches_the_shards(tmp_path: Path) -> None:
    compare(Assigns, tmp_path)


class Momentum(Plain):
    """Moves a teacher after its student, and prototypes to length 1, before a step uses them, as DINO and SwAV do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 5))
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.prototypes, self.shift = nn.Linear(5, 1, bias=False), nn.Parameter(torch.zeros(6))

    @torch.no_grad()
    def move(self, index: int) -> None:
        for own, theirs in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            if index % 3 == 0:
                theirs.data = theirs.data * 0.9 + own.data * 0.1
            elif index % 3 == 1:
                theirs.data.mul_(0.9).add_(own.detach().data, alpha=0.1)
            else:
                theirs.lerp_(own, 0.1)
        self.prototypes.weight.copy_(nn.functional.normalize(self.prototypes.weight.data.clone()))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.move(index)
        x = batch["x"] + self.shift
        with torch.no_grad():
            wanted = batch["y"] + self.teacher(x).mean(1, keepdim=True)
        return nn.functional.mse_loss(self.prototypes(self.net(x)), wanted)


class MovesLater(Momentum):
    """Moves its teacher when the student is called already, as MoCo does."""

    @torch.no_grad()
    def move(self, index: int) -> None:
        own, theirs = list(self.net.parameters()), list(self.teacher.parameters())
        torch._foreach_mul_(theirs, 0.9)
        torch._foreach_add_(theirs, own, alpha=0.1)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        made = self.prototypes(self.net(batch["x"] + self.shift))
        self.move(index)
        with torch.no_grad():
            wanted = batch["y"] + self.teacher(batch["x"]).mean(1, keepdim=True)
        return nn.functional.mse_loss(made, wanted)


class Pair(nn.Module):
    """Two networks, of which its forward calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.maker(x)
        return made


class CallsInside(Plain):
    """Calls a network inside of another one, also after that one's backward, as GANomaly of Anomalib does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.net = False, Pair()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net.maker, self.net.judge)]

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        for_maker, for_judge = self.optimizers()
        made, real = self.net(batch["x"]), self.net.judge(batch["x"])
        loss = (self.net.judge(made) - real).square().mean() + (made - batch["y"]).square().mean()
        for_maker.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        for_maker.step()
        for_judge.zero_grad()
        self.manual_backward((self.net.judge(made.detach()) + 1).square().mean() + (real - 1).square().mean())
        for_judge.step()


@pytest.mark.full(after=1)
@pytest.mark.parametrize("build", [MovesLater, CallsInside])
def test_networks_that_are_units_are_called_and_changed_by_themselves(build: type[Plain], tmp_path: Path) -> None:
    wrap = Wrap(policy="module_classes", module_classes=["Sequential"])
    compare(build, tmp_path, strategy={"wrap": wrap})


class ReadsFirst(Plain):
    """Reads its weights before it calls anything: for a penalty, and to compute with others near them."""

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        with torch.no_grad():
            none = {name: torch.zeros(p.shape) for name, p in self.net.named_parameters()}
            assert not torch.func.functional_call(self.net, none, batch["x"]).any()
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        near = {name: p + 0.1 * p.detach().sign() for name, p in self.net.named_parameters()}
        return nn.functional.mse_loss(torch.func.functional_call(self.net, near, batch["x"]), batch["y"]) + penalty


class SometimesOwn(Plain):
    """Uses only a block in some steps, and nothing that is outside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(6), Block(6)]), nn.Linear(6, 1)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](batch["x"]))
        return ((self.head(hidden) if index % 2 else hidden) - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReadsAlone(SometimesOwn):
    """Looks at a weight, or copies all, on one rank, in a step that calls a block first."""

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if dist.get_rank() and index % 2:
            assert self.head.weight.mean().isfinite()
        elif dist.get_rank():
            copy = deepcopy(self.head)
            assert type(copy._parameters) is dict
            assert copy(batch["x"]).shape == batch["y"].shape
        return super().training_step(batch, index)


class CallsCompiled(SometimesOwn):
    """Calls a compiled function of its file, which reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        apply = partial(torch.compile, backend="eager", fullgraph=True)
        globals()["apply_compiled"] = apply(lambda module, x: nn.functional.linear(x, module.head.weight))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        hidden: Tensor = apply_compiled(self, batch["x"])  # type: ignore[name-defined]  # noqa: F821
        return (hidden - self.head(self.blocks[0](batch["x"])) - batch["y"]).square().mean()


@pytest.mark.full
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("build", [Momentum, ReadsFirst, SometimesOwn, ReadsAlone, CallsCompiled])
def test_a_step_begins_with_shards_and_gathers_what_it_uses(
    build: type[Plain], accumulated: int, tmp_path: Path
) -> None:
    compare(build, tmp_path, accumulate_grad_batches=accumulated)


class FailsOnce(Plain):
    """Ends its first run in an error, before a step uses a weight, after it, or in the backward of a block."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(6), Block(6)), nn.Linear(6, 1)
        self.place, self.has_failed = place, False

    def fail(self, place: str) -> None:
        if self.place == place and not self.has_failed:
            self.has_failed = True
            raise ValueError("once")

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.fail("before")
        hidden = self.blocks[0](batch["x"])
        hidden.register_hook(lambda _: self.fail("backward"))
        loss = (self.head(self.blocks[1](hidden)) - batch["y"]).square().mean()
        self.fail("after")
        return loss


def fail_and_train(build: Callable[[], FailsOnce], out: Path, is_sharded: bool) -> None:
    module = build()
    with pytest.raises(ValueError, match="once"):
        train(lambda: module, out, is_sharded)
    assert module.head.weight.requires_grad
    assert {type(holder._parameters) for holder in module.modules()} == {dict}
    assert not is_sharded or all(isinstance(p, DTensor) for p in module.parameters())
    train(lambda: module, out, is_sharded)


@pytest.mark.full
@pytest.mark.parametrize("place", ["before", "after", "backward"])
def test_a_module_trains_again_after_an_error_in_a_step(place: str, tmp_path: Path) -> None:
    for name in ("sharded", "ddp"):
        run_ranks(fail_and_train, partial(FailsOnce, place), tmp_path / name, name == "sharded")
    assert_same(tmp_path / "sharded", tmp_path / "ddp", 2e-5)


class KeepsArguments(Plain):
    """Is given its network and how to build an optimizer, as templates of Lightning are, and keeps all of it."""

    def __init__(self, net: nn.Module, build: Any, width: int = 15, sizes: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def configure_optimizers(self) -> Any:
        return self.hparams["build"](self.parameters())

    def configure_callbacks(self) -> list[pl.Callback]:
        return [KeepsObject()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scales"], checkpoint["steps"] = {"of": {"y": partial(int)}, "by": 2}, [3]
        checkpoint["special"] = {"loss": nn.L1Loss(), "net": self.net}  # as PyTorch Forecasting does

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "scales" not in checkpoint  # what is left of it would be taken for all
        assert checkpoint["steps"] == [3]
        for name, value in checkpoint["special"].items():
            raise AssertionError(name, value)


class KeepsObject(pl.Callback):
    """Has a state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError(state_dict)


def save_arguments(out: Path, is_file: bool) -> None:
    def build() -> pl.LightningModule:
        return KeepsArguments(Plain().net, partial(torch.optim.SGD, lr=0.1), sizes=UserList([1]))

    own = {"checkpoint_format": "single_file" if is_file else "sharded"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(build, out.with_suffix(".pt"), True, max_epochs=1, strategy=own, save=out)
    said = [str(warning.message) for warning in warned if "which a checkpoint cannot hold" in str(warning.message)]
    expected = {
        "net is a Sequential, build is a partial": "needs it: say so by save_hyperparameters(ignore=['net', 'build'])",
        "KeepsObject.lock is a lock": "a resumed run begins with a new state of the callback",
        "scales.of.y is a partial, special.loss is a L1Loss": "on_load_checkpoint has to do without",
    }
    assert len(said) == (len(expected) if dist.get_rank() == 0 else 0)
    for text, (begin, end) in zip(said, expected.items(), strict=False):
        assert text.startswith(begin)
        assert text.endswith(end)
    train(build, out.with_suffix(".pt"), True, max_epochs=2, strategy=own, resume=out)


@pytest.mark.full
@pytest.mark.parametrize("is_file", [False, True])
def test_what_no_checkpoint_can_hold_is_left_out_which_is_said(is_file: bool, tmp_path: Path) -> None:
    run_ranks(save_arguments, out := tmp_path / "c.ckpt", is_file)
    meta = torch.load(out if is_file else out / "meta.pt", weights_only=True)
    assert meta["hyper_parameters"] == {"width": 15, "sizes": [1]}
    if is_file:
        loaded = KeepsArguments.load_from_checkpoint(out, net=Plain().net, build=None)
        assert all(value.equal(meta["state_dict"][name]) for name, value in loaded.state_dict().items())


class Averaged(Plain):
    """Has the average of its weights take their place for a moment, and clamps a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.averages: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return super().training_step({**batch, "x": batch["x"] * self.scale}, index) - self.scale

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], index: int) -> None:
        self.scale.data = torch.clamp(self.scale.data, 0, 1.25)
        parameters, kept = dict(self.named_parameters()), {}
        for name, p in parameters.items():
            self.averages[name] = 0.5 * p.data + 0.5 * self.averages.get(name, p.data.clone())
            kept[name], p.data = p.data, self.averages[name]
        assert to_full(parameters["net.0.bias"]).equal(to_full(self.averages["net.0.bias"]))
        for name, p in parameters.items():
            p.data = kept[name]


def test_data_that_is_kept_has_the_values_from_before_others_were_assigned(tmp_path: Path) -> None:
    compare(Averaged, tmp_path)
    assert 1.0 < torch.load(tmp_path / "sharded")["scale"] <= 1.25


class Limited(Plain):
    """Limits the rows of an embedding, and says what became of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, 6, max_norm=0.1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"] + self.table(batch["number"])), batch["y"])


def train_limited(out: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Limited, out, True)
    said = " ".join(str(warning.message) for warning in caught)
    assert ("max_norm of table has no lasting effect" in said) == (dist.get_rank() == 0)
    assert "training_step changes" not in said


def test_embeddings_with_a_maximal_norm_are_warned_about_and_not_limited(tmp_path: Path) -> None:
    run_ranks(train_limited, tmp_path / "out")
    assert float(torch.load(tmp_path / "out")["table.weight"].norm(dim=1).min()) > 0.1


class Dropped(Plain):
    """Skips layers of Wav2Vec2, or of BART, as its configuration says."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.model = AutoModel.from_config(config)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.ran = []
        for number, layer in enumerate(self.model.encoder.layers):
            layer.register_forward_hook(lambda *_, number=number: self.ran.append(number))
        sound = batch["x"].repeat(1, 40)
        return self.model(sound).last_hidden_state.square().mean() + super().training_step(batch, 0)


SOUND = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 4}
FRAMES = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
PLACES = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}


def train_dropped(layerdrop: float) -> None:
    module = Dropped(Wav2Vec2Config(**SOUND, **FRAMES, **PLACES, layerdrop=layerdrop))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_trainer(FSDP2Strategy(print_plan=False), max_steps=1, use_distributed_sampler=True).fit(module)
    said = [str(warning.message) for warning in caught if "layerdrop" in str(warning.message)]
    told = ["config.layerdrop: got 0.99: no effect, as Transformers runs every layer of a sharded model: set 0"]
    assert said == (told if layerdrop and dist.get_rank() == 0 else [])
    assert module.ran == [0, 1, 2, 3]


@pytest.mark.parametrize("layerdrop", [0.99, pytest.param(0.0, marks=pytest.mark.full)])
def test_layers_that_a_sharded_model_does_not_skip_are_warned_about(layerdrop: float) -> None:
    run_ranks(train_dropped, layerdrop)


def test_layers_that_each_rank_would_skip_for_itself_are_warned_about() -> None:
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 8, "decoder_layerdrop": 0.2}
    module = Dropped(BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2))  # type: ignore[arg-type]
    said = "config.decoder_layerdrop: got 0.2: ranks skip different layers and wait for each other: set 0"
    assert describe_layer_drop(module, 2) == said
    assert describe_layer_drop(module, 1) is None  # where it works


class Edited(Plain):
    """Changes weights after their use in a step, one of them whole, and others between steps."""

    def __init__(self, edits: str) -> None:
        super().__init__()
        self.edits = edits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.edits == "first":
            self.net[2].weight.data.mul_(0.9)
            self.net[2].bias.data = torch.zeros(1)
        if self.edits == "later" and (self.current_epoch, batch_idx) == (1, 2):
            nn.init.zeros_(self.net[2].bias)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            if self.edits == "hook":  # gathers, so that what follows is in vain
                self.net(batch["x"])
            self.net[0].weight.clamp_(-0.3, 0.3)


SAID = {
    "first": "training_step changes net.2.weight, net.2.bias: ",
    "later": "training_step or a hook changes net.2.bias: ",
    "hook": "training_step or a hook changes net.0.weight: ",
}


def train_edited(out: Path, edits: str, sharding: Sharding) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(partial(Edited, edits), out, True, accumulate_grad_batches=2, strategy={"sharding": sharding})
    said = [str(w.message) for w in caught if " changes gathered copies of the weights" in str(w.message)]
    expected = [SAID[edits]] if edits else []
    expected += ["a hook between micro-batches changes net.0.weight: "] * (not sharding.reshard_after_backward)
    assert len(said) == len(expected) * (dist.get_rank() == 0)
    assert all(line.startswith(start) for line, start in zip(said, expected, strict=False))


@pytest.mark.parametrize(
    ("edits", "sharding"),
    [
        ("first", Sharding()),
        ("later", Sharding()),
        ("hook", Sharding()),
        ("", Sharding()),
        pytest.param(
            "first", Sharding(reshard_after_forward=False, reshard_after_backward=False), marks=pytest.mark.full
        ),
    ],
    ids=["first", "later", "hook", "none", "gathered until the step"],
)
def test_weights_that_are_changed_inside_a_step_are_warned_about_once(
    edits: str, sharding: Sharding, tmp_path: Path
) -> None:
    run_ranks(train_edited, tmp_path / "out", edits, sharding)
