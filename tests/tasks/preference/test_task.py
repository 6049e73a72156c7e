"""Preference tuning: the same on any number of ranks and by any reference, resumed, planned, exported."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from adapter_training import SIZES
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from plan_runs import plan
from preference_training import (
    NUM_PAIRS,
    NUM_STEPS,
    Trained,
    compare,
    fit,
    make_data,
    make_inputs,
    make_task,
    train,
    write_pairs,
)
from safetensors.torch import load_file, save_file
from training import build_trainer, save_model
from transformers import AutoModelForCausalLM

from lit_fsdp import ActivationCheckpointing, FSDP2Strategy
from lit_fsdp.checkpoint.reader import open_checkpoint
from lit_fsdp.export.model import export_model
from lit_fsdp.profiling.communication_meter import CommunicationMeter
from lit_fsdp.tasks import LoRA, LRSchedule, PreferenceTuning, Quantization, TextData
from lit_fsdp.tasks.preference.batches import REFERENCE
from ranks import run_ranks

LORA = LoRA(r=4, alpha=8)
CHECKPOINTED = {"activation_checkpointing": ActivationCheckpointing(mode="full")}
MODEL, PRECOMPUTED = {"reference": "model"}, {"reference": "precomputed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("preferences"))


def check(found: Trained, truth: Trained) -> None:
    for result in (found[0], truth[0]):
        result.weights = {n: w for n, w in result.weights.items() if not n.startswith("reference.")}
    differences = compare(found, truth)
    assert max(differences.values()) <= 1e-6, differences


@pytest.mark.full(after=0)
@pytest.mark.parametrize(
    "task",
    [
        pytest.param({}, id="sigmoid"),
        pytest.param({"loss_type": "ipo", "beta": 0.5}, id="ipo", marks=pytest.mark.slow),
        pytest.param({"loss_type": "robust", "label_smoothing": 0.1}, id="robust", marks=pytest.mark.slow),
        pytest.param({"loss_type": "orpo"}, id="orpo"),
        pytest.param({"loss_type": "simpo", "beta": 2.0}, id="simpo", marks=pytest.mark.slow),
        pytest.param({"loss_type": "kto", "undesirable_weight": 0.1, "beta": 0.5}, id="kto"),
    ],
)
def test_any_number_of_ranks_and_any_reference_give_the_same(task: dict[str, Any], folder: Path) -> None:
    kind = task.get("loss_type", "sigmoid")
    model, precomputed = ({}, {}) if kind in ("orpo", "simpo") else (MODEL, PRECOMPUTED)
    truth = train(folder, 1, {**task, **model}, accumulate_grad_batches=2)
    assert truth[0].losses[-1] < truth[0].losses[0]
    if kind == "kto":
        assert min(step["kl"] for step in truth[1][1:]) > 1e-4  # or nothing of it would be tested
    shutil.rmtree(folder / "cache" / "reference", ignore_errors=True)
    for options in ({**model, "loss_chunks": 3}, precomputed):
        check(train(folder, 2, {**task, **options}, accumulate_grad_batches=2, strategy=CHECKPOINTED), truth)
    if kind not in ("orpo", "kto"):  # whose terms of a round depend on the rounds
        check(train(folder, 2, {**task, **precomputed}), truth)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("kind", ["sigmoid", "kto"])
def test_a_reference_is_computed_before_epochs_whose_steps_were_counted_at_the_start(kind: str, folder: Path) -> None:
    task = {"loss_type": kind, "lr_scheduler": LRSchedule(type="cosine")}  # which asks for the number of steps
    epoch = {"max_steps": -1, "max_epochs": 1}
    truth = train(folder, 1, {**task, **MODEL}, **epoch)
    shutil.rmtree(folder / "cache" / "reference", ignore_errors=True)
    for _ in ("computed", "read"):
        check(train(folder, 1, {**task, **PRECOMPUTED}, **epoch), truth)


@pytest.mark.full
@pytest.mark.parametrize(
    ("lora", "quantization"),
    [
        pytest.param(LORA, None, id="full"),
        pytest.param(LORA, Quantization(), id="nf4"),
        pytest.param(replace(LORA, modules_to_save=["down_proj"]), Quantization(), id="nf4 beside what trains in full"),
    ],
)
def test_every_reference_is_the_model_below_the_adapters(
    lora: LoRA, quantization: Quantization | None, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / "pairs.jsonl", tmp_path / "pairs.jsonl")
    save_model(tmp_path / "model", **{**SIZES, "vocab_size": 320})
    task = {"lora": lora, "quantization": quantization}
    truth = train(tmp_path, 1, {**task, **MODEL})
    assert truth[0].losses[0] == pytest.approx(0.6931472, abs=1e-7)  # as nothing has been learned yet
    assert truth[0].losses[-1] < truth[0].losses[0]
    check(train(tmp_path, 2, task, strategy=CHECKPOINTED), truth)
    check(train(tmp_path, 2, {**task, **PRECOMPUTED}), truth)


def save(folder: Path, runs: Path, task: dict[str, Any]) -> None:
    saver = ModelCheckpoint(runs, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(folder, folder / "out.pt", task, {"callbacks": [saver], "enable_checkpointing": True})


def resume(folder: Path, runs: Path, task: dict[str, Any]) -> None:
    fit(folder, folder / "out.pt", task, {"ckpt_path": str(runs / "step=2.ckpt")})


@pytest.mark.full
@pytest.mark.parametrize(
    "task", [pytest.param(PRECOMPUTED, id="precomputed"), pytest.param(MODEL, id="model"), {"lora": LORA}]
)
def test_a_resumed_run_is_the_same_bit_for_bit_and_its_export_is_the_model_alone(
    task: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    run_ranks(save, folder, tmp_path, task)
    whole = torch.load(folder / "out.pt")
    shutil.rmtree(folder / "cache" / "reference", ignore_errors=True)  # as on another machine
    run_ranks(resume, folder, tmp_path, task)
    resumed = torch.load(folder / "out.pt")
    assert resumed["result"]["losses"] == whole["result"]["losses"][2:]
    weights = whole["result"]["weights"]
    assert all(torch.equal(resumed["result"]["weights"][name], weight) for name, weight in weights.items())

    checkpoint = tmp_path / f"step={NUM_STEPS}.ckpt"
    assert not [name for name in open_checkpoint(checkpoint, "sizes").tensors if "reference" in name]
    export_model(checkpoint, tmp_path / "exported", merge="lora" in task)
    assert "after 24 preference pairs" in (tmp_path / "exported" / "README.md").read_text()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    if "lora" not in task:
        assert all(torch.equal(exported[name], weights[name]) for name in exported)
    else:
        base = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
        assert exported.keys() == base.keys()
        assert any(not torch.equal(exported[name], base[name]) for name in base)


@pytest.mark.full
def test_a_checkpoint_of_another_reference_goes_on_with_a_second_model(folder: Path, tmp_path: Path) -> None:
    run_ranks(save, folder, tmp_path, PRECOMPUTED)
    whole = torch.load(folder / "out.pt")["result"]
    run_ranks(resume, folder, tmp_path, MODEL)
    resumed = torch.load(folder / "out.pt")["result"]
    assert resumed["losses"] == pytest.approx(whole["losses"][2:], abs=1e-6)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-6)


@pytest.mark.full
def test_a_plan_counts_the_second_model_and_the_second_pass(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = [
        *("--model=PreferenceTuning", f"--model.pretrained={folder / 'model'}", "--data=PreferenceData"),
        *("--trainer.strategy=fsdp2", "--data.tokenizer.vocab_size=300", "--data.seq_length=64", "--devices=2"),
        "--gpu=RTX 4080",
        f"--data.train={folder / 'pairs.jsonl'}",
    ]
    found = {reference: plan(*args, f"--model.reference={reference}") for reference in ("precomputed", "model")}
    kinds = {reference: of_plan["memory"]["largest_bytes_by_kind"] for reference, of_plan in found.items()}
    weights = AutoModelForCausalLM.from_pretrained(folder / "model")
    shards = sum(weight.nbytes for weight in weights.parameters()) // 2
    assert kinds["model"]["parameters"] - kinds["precomputed"]["parameters"] == pytest.approx(shards, rel=0.01)
    for kind in ("optimizer_state", "gradients", "gathered"):  # the reference is let go of before the model runs
        assert kinds["model"][kind] == kinds["precomputed"][kind], kind
    assert found["model"]["flops"]["model"] > 1.2 * found["precomputed"]["flops"]["model"]


class CountGathers(Callback):
    """Writes how often each unit is gathered in a step."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.meter = CommunicationMeter(pl_module, trainer.strategy.root_device)
        self.meter.attach()
        self.meter.resume()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.meter.end_step()
        (step,) = self.meter.take(wait=True)
        self.meter.detach()
        gathers = {unit.unit: unit.calls for unit in step.units if unit.collective == "all_gather"}
        torch.save(gathers, self.out)


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "calls"),
    [
        pytest.param(MODEL, {"model.model.layers.0": 2, "reference.model.layers.0": 1}, id="model"),
        # Three passes: the reference is computed before. Nothing is gathered ahead of a backward that does not come.
        pytest.param({"loss_type": "kto"}, {"model.model.layers.0": 3}, id="kto"),
    ],
)
def test_no_unit_is_gathered_oftener_than_it_is_used(
    task: dict[str, Any], calls: dict[str, int], folder: Path, tmp_path: Path
) -> None:
    train(folder, 2, task, callbacks=[CountGathers(tmp_path / "calls")], max_steps=2)
    found = torch.load(tmp_path / "calls")
    assert {name: found[name] for name in calls} == calls
    assert found["model.model.norm + model.lm_head"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta: got 0.0: expected above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing: got 0.5: expected 0 to below 0.5"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "not used by loss_type 'ipo', but by sigmoid, robust, simpo"),
        ({"simpo_gamma": 0.5}, "simpo_gamma: got 0.5: not used by loss_type 'sigmoid', but by simpo"),
        ({"loss_type": "orpo", "desirable_weight": 1.0}, "but by kto; leave it out"),
        ({"loss_type": "kto", "undesirable_weight": -1.0}, "undesirable_weight: got -1.0: expected 0 or more"),
        ({"loss_type": "orpo", "reference": "model"}, "reference: got 'model': loss_type 'orpo' needs none"),
        ({"reference": "adapters"}, "reference: got 'adapters': there are none without lora; set precomputed"),
        ({"reference": "model"}, "reference: got 'model': it is read from pretrained, which is not set"),
        ({"reference": "adapters", "lora": LoRA(modules_to_save=("lm_head",))}, "lora.modules_to_save trains lm_head"),
        ({"reference": "adapters", "lora": LoRA(init_lora_weights="pissa")}, "'pissa' starts from other weights"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"expected|leave it out|set precomputed") as caught:
        PreferenceTuning(config={"model_type": "llama"}, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({}, "precomputed"),
        ({"lora": LORA}, "adapters"),
        ({"lora": LoRA(modules_to_save=("lm_head",))}, "precomputed"),
        ({"loss_type": "simpo"}, None),
        ({"loss_type": "dpo"}, "precomputed"),
    ],
)
def test_the_reference_is_the_cheapest_that_is_right(options: dict[str, Any], source: str | None) -> None:
    assert PreferenceTuning(config={"model_type": "llama"}, **options).reference_source == source


def test_a_batch_without_the_reference_it_should_have_is_refused(folder: Path) -> None:
    task = make_task(folder)
    task.model = AutoModelForCausalLM.from_pretrained(folder / "model")
    data = make_data(folder, batch_size=2)
    data.setup("fit")
    with pytest.raises(ValueError, match="the batch has no reference_logps; set data to PreferenceData"):
        task.compute_loss(next(iter(data.train_dataloader())))
    with pytest.raises(ValueError, match="data: got TextData: its rows are no preferences; set PreferenceData"):
        task.prepare_plan(TextData(tokenizer="none"))
    with pytest.raises(ValueError, match=r"mesh\.sequence: got 2: PreferenceTuning adds up"):
        task.check_sequence(2)


class Logged(DummyLogger):
    """Keeps what is logged of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.steps.setdefault(step or 0, {}).update(metrics)


@pytest.mark.full
def test_metrics_are_added_up_over_ranks_only_in_steps_where_somebody_reads_them(folder: Path, tmp_path: Path) -> None:
    """Eleven steps: the first of the epoch, two that are logged, and the last."""

    def run(log_every_n_steps: int, callbacks: list[Callback]) -> tuple[int, Logged]:
        calls, all_reduce, logger = [0], dist.all_reduce, Logged()

        def count(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return all_reduce(*args, **kwargs)

        torch.manual_seed(5)
        settings: dict[str, Any] = {"max_steps": 11, "limit_val_batches": 0, "enable_checkpointing": bool(callbacks)}
        settings |= {"logger": logger, "callbacks": callbacks, "log_every_n_steps": log_every_n_steps}
        trainer = build_trainer(FSDP2Strategy(), default_root_dir=tmp_path, **settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", count)
            trainer.fit(make_task(folder, loss_type="simpo", beta=2.0), make_data(folder, batch_size=1))
        return calls[0], logger

    def body() -> None:
        calls, logged = run(1, [])
        few_calls, few = run(4, [])
        assert calls - few_calls == 11 - 4
        assert list(few.steps) == [3, 7]
        for step, values in few.steps.items():
            assert values == logged.steps[step]
            assert "train/rewards/margins" in values
        watched = ModelCheckpoint(tmp_path, monitor="train/rewards/margins", every_n_train_steps=3)
        assert run(4, [watched])[0] >= calls

    run_ranks(body)


@pytest.mark.full
def test_a_model_that_has_trained_is_no_reference_for_other_data(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    task = make_task(folder, **PRECOMPUTED)
    Trainer(**options).fit(task, make_data(folder, batch_size=4))
    Trainer(**options).fit(task, make_data(folder, batch_size=4))  # the same data: its numbers are kept
    others = make_data(folder, batch_size=4, train=str(write_pairs(tmp_path / "others.jsonl", 8)))
    with pytest.raises(ValueError, match=r"the model has gone on from there; .*for other data make a task anew"):
        Trainer(**options).fit(task, others)
    assert others._reference == {}


@pytest.mark.parametrize("other", [{"lora": LORA}, MODEL, {"loss_type": "kto"}], ids=["adapters", "model", "kto"])
def test_data_gives_no_task_the_reference_of_another(other: dict[str, Any], folder: Path) -> None:
    data = make_data(folder)
    data.setup("fit")
    make_task(folder, **PRECOMPUTED)._tell_data(data)
    data._reference["train"] = np.zeros((NUM_PAIRS, 2), dtype=np.float32)
    assert REFERENCE in data._get_rows("train")[0]
    make_task(folder, **other)._tell_data(data)
    assert REFERENCE not in data._get_rows("train")[0]


@pytest.mark.full
def test_one_other_value_below_makes_another_reference(tmp_path: Path) -> None:
    folder = make_inputs(tmp_path)
    task = make_task(folder, **PRECOMPUTED)
    task.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    found = task._identify_reference()
    assert task._identify_reference() == found
    weights = load_file(folder / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"][0, 0] += 1
    save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
    assert task._identify_reference() != found


def test_a_reference_of_weights_that_are_rounded_otherwise_is_another_one(folder: Path) -> None:
    def identify(**settings: Any) -> dict[str, Any]:
        task = make_task(folder, **PRECOMPUTED)
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
        task.trainer = Trainer(strategy=FSDP2Strategy(**settings), **options)
        return task._identify_reference()

    known = identify()
    assert identify(mixed_precision={"param_dtype": "bfloat16"}) != known
    assert identify(float8={"emulate": True}) != known
    assert identify(sharding={"gather_bits": 8}) != known
    for of_gradients in ({"mixed_precision": {"reduce_dtype": "bfloat16"}}, {"sharding": {"reduce_bits": 8}}):
        assert identify(**of_gradients) == known  # which it has none of


@pytest.mark.full
def test_the_precomputed_reference_keeps_its_digits_in_bfloat16(folder: Path) -> None:
    task, data = make_task(folder, **PRECOMPUTED), make_data(folder, batch_size=4)
    seen: list[torch.Tensor] = []
    read = task._get_reference_logps
    task._get_reference_logps = lambda *inputs: seen.append(read(*inputs)) or seen[-1]  # type: ignore[func-returns-value, method-assign]
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False, "precision": "bf16-true"}
    trainer = Trainer(strategy=FSDP2Strategy(print_plan=False), **options)
    trainer.fit(task, data)
    torch.distributed.destroy_process_group()
    assert torch.equal(seen[0], torch.from_numpy(data._reference["train"][:4].T.reshape(-1)))


def test_pairs_stay_together_where_a_batch_is_split() -> None:
    """[2 * rows, length]: first all chosen, then all rejected."""
    task = PreferenceTuning(pretrained="none", beta=0.1)
    batch = {"input_ids": torch.arange(8).view(8, 1), "labels": torch.arange(8).view(8, 1)}
    parts = task.split_batch(batch, 2)
    assert [part["labels"].flatten().tolist() for part, _ in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [weight for _, weight in parts] == [1.0, 1.0]
    with pytest.raises(ValueError, match="loss_type 'orpo' has a mean over the micro-batch"):
        PreferenceTuning(pretrained="none", loss_type="orpo").split_batch(batch, 2)
