"""Optimizers by name: what settings are refused, and that a sharded run is the same as one on one device."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from torch import nn
from training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    Recorder,
    Result,
    Rows,
    build_trainer,
    collate,
    fit_and_write,
    list_differences,
    make_rows,
    save_model,
)
from transformers import AutoModelForCausalLM

from lit_fsdp import CPUOffload, FSDP2Strategy, Mesh, MixedPrecision
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.optim.muon import list_hidden_matrices
from lit_fsdp.sharding.mixed_precision import ShardedGradScaler
from lit_fsdp.tasks import CausalLM, LRSchedule
from lit_fsdp.tasks.lr_schedule import ConfiguredLR
from ranks import run_ranks

VOCAB_SIZE = 66
# Matrices of 4096 elements and more, in rows of one block of 256.
WIDE = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
# Muon multiplies whole matrices in bfloat16, for which most CPUs have no fast kernel.
NARROW = {**WIDE, "hidden_size": 64, "intermediate_size": 64}
SETTINGS = {
    "adamw": Optimizer(learning_rate=1e-3, weight_decay=0.1, eps=1e-4),
    "adamw_8bit": Optimizer(name="adamw_8bit", learning_rate=1e-3, weight_decay=0.1, eps=1e-4),
    "adafactor": Optimizer(name="adafactor", learning_rate=1e-2, weight_decay=0.1),
    "muon": Optimizer(name="muon", learning_rate=1e-3, weight_decay=0.1, eps=1e-4),
}


class MuonBesideAdamW:
    """Two optimizers of torch: the first steps matrices that are neither embedding nor head."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        ends, hidden = ([p for p in groups[0]["params"] if (p.shape[0] == VOCAB_SIZE) is x] for x in (True, False))
        self.parts = [
            torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([{**groups[0], "params": ends}, groups[1]], lr=1e-3, eps=1e-4),
        ]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


STOCK: dict[str, Callable[..., Any]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3, eps=1e-4),
    "adamw_8bit": lambda groups: bitsandbytes.optim.AdamW8bit(groups, lr=1e-3, eps=1e-4),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "muon": MuonBesideAdamW,
}
TOLERANCE = 1e-6
NAMES = ["adamw_8bit", "adafactor", "muon"]  # tests/sharding/test_parity.py has AdamW


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model that all runs of an optimizer start from."""
    wide, narrow = (save_model(tmp_path_factory.mktemp("model"), **sizes) for sizes in (WIDE, NARROW))
    return dict.fromkeys(SETTINGS, wide) | {"muon": narrow}


def train_with_stock(folder: Path, name: str, change: Optimizer | None = None, seed: int | None = None) -> Result:
    """Train in a plain loop with the optimizer of its own library, from step 4 on as changed: the truth.

    With ``seed``, there is noise in the last bits of gradients.
    """
    noise = torch.Generator().manual_seed(seed or 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices, others = ([p for p in model.parameters() if (p.ndim >= 2) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, rows, result = STOCK[name](groups), make_rows(VOCAB_SIZE), Result()
    for step in range(NUM_STEPS):
        if step == 4 and change is not None:
            for group, decay in zip(optimizer.param_groups, (change.weight_decay, 0.0), strict=True):
                group.update(lr=change.learning_rate, betas=change.betas, weight_decay=decay)
        loss = model(**collate(rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])).loss
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters() if seed is not None else ():
            parameter.grad *= 1 + torch.finfo(torch.float32).eps * torch.randn(parameter.shape, generator=noise)
        result.losses.append(float(loss.detach()))
        result.grad_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    result.weights = {n: p.detach() for n, p in model.named_parameters()}
    return result


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> dict[str, Result]:
    """What each library makes of the model on one device."""
    return {name: train_with_stock(folders[name], name) for name in STOCK}


def fit(folder: Path, out: Path, settings: Optimizer, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    """Train on this rank; rank 0 writes the result."""
    path = options.pop("ckpt_path", None)
    save = out.with_suffix(".ckpt") if "max_steps" in options else None
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), callbacks=[Recorder()], **options)
    task = CausalLM(pretrained=str(folder), optimizer=settings, lr_scheduler=LRSchedule(type="constant"))
    batch_size = GLOBAL_BATCH // dist.get_world_size() // trainer.accumulate_grad_batches
    fit_and_write(trainer, task, Rows(VOCAB_SIZE, batch_size), out, save=save, load=path)


def list_limits(folder: Path, name: str, truth: dict[str, Result]) -> dict[str, float]:
    """Return how far a run may be from the truth.

    A sum over ranks rounds in another order. float32 state carries that on as it is; in 8 bits it tips a code over to
    the next one here and there (test_adamw_8bit.py shows that nothing else differs). That must stay small beside
    what 8 bits cost in any case, on one device as well, and no single weight may be further off than by those.
    Muon rounds what it got to bfloat16, where a last bit may tip it over too (test_muon.py shows that nothing else
    differs): it may be twice as far off as the furthest run with noise in the last bits of gradients on one device.
    """
    if name == "muon":
        noisy = [compare(train_with_stock(folder, "muon", seed=seed), truth["muon"]) for seed in range(4)]
        return {key: 2 * max(differences[key] for differences in noisy) for key in noisy[0]}
    if name != "adamw_8bit":
        return dict.fromkeys(("loss", "grad_norm", "weight"), TOLERANCE)
    shares = {"loss": 0.1, "grad_norm": 0.1, "weight": 1.0, "mean_weight": 0.01}
    return {k: shares[k] * v for k, v in compare(truth["adamw_8bit"], truth["adamw"]).items()}


def compare(run: Result, truth: Result) -> dict[str, float]:
    """Return the largest differences, that of gradient norms relative to the largest, and the mean one of weights."""
    differences = list_differences(run, truth)
    norms = zip(run.grad_norms, truth.grad_norms, strict=True)
    differences["grad_norm"] = find_largest(abs(a - b) for a, b in norms) / max(truth.grad_norms)
    weights = torch.cat([(run.weights[n] - w).abs().flatten() for n, w in truth.weights.items()])
    return differences | {"mean_weight": float(weights.mean())}


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("world_size", "strategy", "options"),
    [
        pytest.param(1, {}, {}, marks=pytest.mark.slow),
        (2, {"cpu_offload": CPUOffload()}, {"accumulate_grad_batches": 2}),
        pytest.param(4, {"mesh": Mesh(replicate=2)}, {}, marks=pytest.mark.slow),
        (4, {}, {}),
    ],
    ids=["1", "2 offload accumulating", "2x2", "4 uneven"],
)
def test_sharded_training_equals_the_stock_optimizer_on_one_device(
    name: str,
    world_size: int,
    strategy: dict[str, Any],
    options: dict[str, Any],
    folders: dict[str, Path],
    truth: dict[str, Result],
    tmp_path: Path,
) -> None:
    run_ranks(fit, folders[name], tmp_path / "out", SETTINGS[name], strategy, options, world_size=world_size)
    differences = compare(Result(**torch.load(tmp_path / "out")), truth[name])
    limits = list_limits(folders[name], name, truth)
    assert all(differences[k] <= limit for k, limit in limits.items()), (differences, limits)


@pytest.mark.full
def test_all_of_them_learn_a_batch_by_heart(folders: dict[str, Path]) -> None:
    losses = {}
    in_four_times_narrower = replace(SETTINGS["muon"], learning_rate=4e-3)
    for name, settings in (SETTINGS | {"muon": in_four_times_narrower}).items():
        model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
        hidden, batch = list_hidden_matrices(model), collate(make_rows(VOCAB_SIZE, 4))
        optimizer = build_optimizer(model.parameters(), settings, hidden=hidden)
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        losses[name] = float(loss.detach())
    assert losses["adamw"] < 0.2
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], abs=0.05)
    assert losses["adafactor"] < 0.2
    assert losses["muon"] < 0.2


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Runs of 2 ranks without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    results = {}
    for name in NAMES:
        run_ranks(fit, folders[name], out, SETTINGS[name], {}, {})
        results[name] = Result(**torch.load(out))
        results[name].losses[:4] = results[name].grad_norms[:4] = [0.0] * 4
    return results


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world_size", "strategy"),
    [
        ("adamw_8bit", 2, {"async_save": True}),
        pytest.param("adamw_8bit", 2, {"checkpoint_format": "single_file"}, marks=pytest.mark.slow),
        pytest.param("adamw_8bit", 4, {}, marks=pytest.mark.slow),
        ("adafactor", 2, {}),
        ("muon", 2, {}),
    ],
    ids=["adamw_8bit 2 async", "adamw_8bit 2 file", "adamw_8bit 4", "adafactor 2", "muon 2"],
)
def test_a_resumed_run_is_the_same_to_the_bit_on_as_many_ranks(
    name: str,
    world_size: int,
    strategy: dict[str, Any],
    folders: dict[str, Path],
    truth: dict[str, Result],
    whole: dict[str, Result],
    tmp_path: Path,
) -> None:
    run_ranks(fit, folders[name], tmp_path / "half", SETTINGS[name], strategy, {"max_steps": 4})
    resumed = (folders[name], tmp_path / "resumed", SETTINGS[name], strategy, {"ckpt_path": tmp_path / "half.ckpt"})
    run_ranks(fit, *resumed, world_size=world_size)
    differences = compare(Result(**torch.load(tmp_path / "resumed")), whole[name])
    limits = list_limits(folders[name], name, truth) if world_size != 2 else dict.fromkeys(differences, 0.0)
    assert all(differences[k] <= limit for k, limit in limits.items()), (differences, limits)


@pytest.mark.full
@pytest.mark.parametrize("checkpoint_format", ["sharded", "single_file"])
def test_settings_that_a_resume_changes_are_those_it_trains_with(
    checkpoint_format: str, folders: dict[str, Path], truth: dict[str, Result], tmp_path: Path
) -> None:
    folder, strategy = folders["adamw"], {"checkpoint_format": checkpoint_format}
    changed = Optimizer(learning_rate=3e-4, weight_decay=0.3, betas=(0.8, 0.99), eps=1e-4)
    run_ranks(fit, folder, tmp_path / "half", SETTINGS["adamw"], strategy, {"max_steps": 4})
    run_ranks(fit, folder, tmp_path / "resumed", changed, strategy, {"ckpt_path": tmp_path / "half.ckpt"})
    run, expected = Result(**torch.load(tmp_path / "resumed")), train_with_stock(folder, "adamw", changed)
    assert list_differences(run, truth["adamw"])["weight"] > 100 * TOLERANCE
    expected.losses[:4] = expected.grad_norms[:4] = [0.0] * 4
    differences = compare(run, expected)
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


@pytest.mark.parametrize(
    ("fused", "is_scaled", "expected"), [(None, False, True), (None, True, False), (False, False, False)]
)
def test_one_kernel_steps_all_parameters_unless_steps_are_skipped(
    fused: bool | None, is_scaled: bool, expected: bool
) -> None:
    parameters = [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))]
    optimizer = build_optimizer(parameters, Optimizer(fused=fused), is_scaled=is_scaled)
    assert [group["fused"] for group in optimizer.param_groups] == [expected] * 2


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_with_infinite_float16_gradients_are_skipped(name: str, folders: dict[str, Path]) -> None:
    def body() -> None:
        strategy = FSDP2Strategy(print_plan=False, mixed_precision=MixedPrecision(param_dtype="float16"))
        trainer = build_trainer(strategy)
        trainer.strategy.precision_plugin.scaler = ShardedGradScaler("cpu", init_scale=2.0**26)
        task = CausalLM(
            pretrained=str(folders[name]), optimizer=SETTINGS[name], lr_scheduler=LRSchedule(type="constant")
        )
        trainer.fit(task, Rows(VOCAB_SIZE, 8))
        steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
        assert len(steps) == 1
        assert 0 < steps.pop() < NUM_STEPS
        assert all(p.to_local().isfinite().all() for p in task.parameters())

    run_ranks(body, world_size=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adafactor", "betas": (0.9, 0.95)}, r"betas: got \(0.9, 0.95\): not used by adafactor; .* adamw or"),
        ({"name": "adafactor", "eps": 1e-6}, "eps: got 1e-06: not used by adafactor"),
        ({"name": "adamw_8bit", "fused": True}, r"fused: got True: not used by adamw_8bit; leave .* to adamw$"),
        ({"name": "adamw_8bit_paged", "fused": False}, "fused: got False: not used by adamw_8bit_paged"),
        ({"momentum": 0.9}, "momentum: got 0.9: not used by adamw; leave it out, or set optimizer.name to muon"),
        ({"name": "adamw8bit"}, "^optimizer.name: got 'adamw8bit': expected one of adamw, .*: did you mean adamw_8bit"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0: expected above 0"),
        ({"betas": (0.9, 1.0)}, "betas: got .*: expected two numbers from 0 to below 1"),
    ],
)
def test_settings_that_would_not_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(config={"model_type": "llama"}, optimizer=Optimizer(**settings))


def test_pages_without_a_gpu_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path, **WIDE)

    class Unread(CausalLM):
        def configure_weights(self) -> None:
            raise AssertionError("the weights are being read")

    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False, cpu_offload=CPUOffload()))
        task = Unread(pretrained=str(folder), optimizer=Optimizer(name="adamw_8bit_paged"))
        with pytest.raises(ValueError, match=r"adamw_8bit_paged with parameters on cpu: .* set adamw_8bit"):
            trainer.fit(task, Rows(VOCAB_SIZE, 8))

    run_ranks(body, world_size=1)
    with pytest.raises(ValueError, match="set adamw_8bit"):
        build_optimizer([nn.Parameter(torch.zeros(4))], Optimizer(name="adamw_8bit_paged"))


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModuleNotFoundError, match="pip install bitsandbytes"):
        build_optimizer([nn.Parameter(torch.zeros(4))], Optimizer(name="adamw_8bit"))


def test_a_rate_that_is_not_set_is_one_at_which_the_optimizer_trains_and_ten_times_that_for_adapters() -> None:
    def list_rates(optimizer: Optimizer, *, has_adapters: bool) -> set[float]:
        parameters = [nn.Parameter(torch.ones(2, 2))]
        built = build_optimizer(parameters, optimizer, has_adapters=has_adapters)
        return {group["lr"] for group in built.param_groups}

    for name, rate in (("adamw", 1e-4), ("adamw_8bit", 1e-4), ("adafactor", 1e-2)):
        assert list_rates(Optimizer(name=name), has_adapters=False) == {rate}  # type: ignore[arg-type]
        assert list_rates(Optimizer(name=name), has_adapters=True) == {10 * rate}  # type: ignore[arg-type]
    given = Optimizer(name="adafactor", learning_rate=3e-3)
    assert list_rates(given, has_adapters=True) == {3e-3}


def test_groups_that_a_callback_adds_to_unfreeze_parameters_keep_its_rates_also_in_a_resumed_run() -> None:
    def build() -> tuple[torch.optim.Optimizer, ConfiguredLR]:
        first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
        optimizer = torch.optim.SGD([first], lr=1.0)
        schedule = ConfiguredLR(optimizer, lambda step: 1 / (1 + step))
        optimizer.add_param_group({"params": [second], "lr": 0.7})  # as Lightning's BaseFinetuning does
        return optimizer, schedule

    optimizer, schedule = build()
    resumed, continued = build()
    for rate in (1 / 2, 1 / 3):
        optimizer.step()
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [rate, 0.7]
    resumed.load_state_dict(optimizer.state_dict())
    continued.load_state_dict(schedule.state_dict())
    resumed.step()
    continued.step()
    assert [group["lr"] for group in resumed.param_groups] == [1 / 4, 0.7]
