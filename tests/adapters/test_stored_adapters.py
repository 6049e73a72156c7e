"""A run that starts from adapters of another one goes on as stock peft does, and refuses those that do not fit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from adapter_training import BASES, BATCH, SIZES, TOLERANCE, compare, train_plainly, train_sharded
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel, get_peft_model
from preference_training import train as train_preferences
from preference_training import write_pairs
from torch import Tensor
from training import Rows, build_task, build_trainer, save_model
from transformers import AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import open_checkpoint
from lit_fsdp.checkpoint.remote import RemotePath
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.tasks import PreferenceTuning
from lit_fsdp.tasks.stored_adapters import open_adapters
from ranks import RankError, run_ranks

LORA = LoRA(r=4, alpha=12, use_rslora=True, rank_pattern={"q_proj": 2}, modules_to_save=["lm_head", "model.norm"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", **{**SIZES, "vocab_size": 320})


def save_adapters(folder: Path, base: Path, lora: LoRA = LORA, **options: Any) -> Path:
    """Let stock peft write adapters that change the model."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora.build_config())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapters(tmp_path_factory.mktemp("adapters"), base)


def read_stock(base: Path, adapters: Path) -> dict[str, Tensor]:
    """Return what peft trains on from there, by names in the model."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters, is_trainable=True)
    return {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): p.detach()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "nf4 double"])
def test_training_goes_on_from_a_folder_of_peft_as_in_peft(
    kind: str, base: Path, adapters: Path, tmp_path: Path
) -> None:
    stock = read_stock(base, adapters)
    given = LoRA(pretrained=str(adapters), r=4)  # what is said again may be
    result, start = train_sharded(base, tmp_path, 2, lora=given, quantization=BASES[kind])
    assert all(torch.equal(start[name], value) for name, value in stock.items())
    differences = compare(result, train_plainly(base, stock, BASES[kind], LORA))
    assert max(differences.values()) <= TOLERANCE, differences


def save_run(base: Path, path: Path, save_frozen: bool | None = None, max_steps: int = 2) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False, save_frozen=save_frozen), max_steps=max_steps)
    trainer.fit(build_task(base, lora=LORA), Rows(67, BATCH // 2))
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "last.ckpt"
    run_ranks(save_run, base, folder)
    return folder


@pytest.mark.full
def test_preferences_start_from_a_run_and_are_compared_with_it(base: Path, run: Path, tmp_path: Path) -> None:
    stored = open_checkpoint(run)
    _, start = train_sharded(base, tmp_path, 3, lora=LoRA(pretrained=str(run)), max_steps=1)
    for name in stored.tensors:
        assert torch.equal(start[name], stored.read({name: stored.describe(name)})[name])
    write_pairs(tmp_path / "pairs.jsonl")
    shutil.copytree(base, tmp_path / "model")
    result, _ = train_preferences(tmp_path, 2, {"lora": LoRA(pretrained=str(run))})
    assert result.losses[0] == pytest.approx(0.6931472, abs=1e-6)  # the reference is what it starts from
    assert result.losses[-1] < result.losses[0]


@pytest.mark.full
def test_training_starts_from_a_run_that_saved_frozen_weights_too(base: Path, run: Path, tmp_path: Path) -> None:
    run_ranks(save_run, base, tmp_path / "last.ckpt", True)
    _, truth = train_sharded(base, tmp_path, 2, lora=LoRA(pretrained=str(run)), max_steps=1)
    _, start = train_sharded(base, tmp_path, 2, lora=LoRA(pretrained=str(tmp_path / "last.ckpt")), max_steps=1)
    assert all(torch.equal(start[name], value) for name, value in truth.items())


def test_a_folder_of_peft_is_read_by_its_address_and_its_odd_values_are_refused(adapters: Path, tmp_path: Path) -> None:
    found = open_adapters(LoRA(pretrained=adapters.as_uri(), r=16))  # the default, which cannot be told from none
    assert found.lora.r == LORA.r
    assert found.describe().startswith(f"lora: r {LORA.r}, alpha {LORA.alpha}, ")
    for name, value in (("rank_pattern", [1]), ("lora_alpha", None), ("r", "x")):
        settings = json.loads((adapters / ADAPTER_CONFIG).read_text())
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({**settings, name: value}))
        with pytest.raises(ValueError, match=f"^lora.pretrained: .*{ADAPTER_CONFIG}: .*: expected adapters of LoRA"):
            open_adapters(LoRA(pretrained=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "lora.r: got 8: the adapters of {} have 4; leave it out"),
        ({"init_lora_weights": "pissa"}, "lora.init_lora_weights: got 'pissa' with lora.pretrained, where adapters"),
        ({"pretrained": "no/such/adapters"}, "lora.pretrained: got 'no/such/adapters': there is no such folder"),
    ],
)
def test_settings_that_contradict_stored_adapters_are_refused(
    changes: dict[str, Any], message: str, base: Path, adapters: Path
) -> None:
    with pytest.raises(ValueError, match=r"^lora") as caught:
        build_task(base, lora=replace(LoRA(pretrained=str(adapters)), **changes))
    assert str(caught.value).startswith(message.format(adapters))


def test_a_reference_without_the_adapters_that_training_starts_from_is_refused(base: Path, adapters: Path) -> None:
    for reference in ("adapters", "model"):
        with pytest.raises(ValueError, match=f"^reference: got '{reference}': .*; set precomputed$"):
            PreferenceTuning(pretrained=str(base), lora=LoRA(pretrained=str(adapters)), reference=reference)


def start_from(base: Path, *runs: Path) -> None:
    given = LoRA(pretrained=str(runs[dist.get_rank()]))
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
    trainer.fit(build_task(base, lora=given), Rows(67, BATCH // 2))


@pytest.mark.full
def test_a_run_that_has_gone_on_is_neither_mixed_nor_taken_for_the_reference(
    base: Path, run: Path, tmp_path: Path
) -> None:
    later, source = tmp_path / "later.ckpt", tmp_path / "last.ckpt"
    run_ranks(save_run, base, later, None, 3)
    with pytest.raises(RankError, match=r"lora.pretrained: .*: ranks have found several checkpoints"):
        run_ranks(start_from, base, run, later)
    write_pairs(tmp_path / "pairs.jsonl")
    shutil.copytree(base, tmp_path / "model")
    shutil.copytree(run, source)
    task = {"lora": LoRA(pretrained=str(source))}
    saved = {"callbacks": [ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)]}
    truth, _ = train_preferences(tmp_path, 2, task, enable_checkpointing=True, **saved)
    (middle,) = (tmp_path / "saved").glob("*step=2.ckpt")
    assert train_preferences(tmp_path, 2, task, ckpt_path=middle)[0].losses == truth.losses[2:]
    shutil.rmtree(source)
    shutil.copytree(later, source)
    with pytest.raises(RankError, match=r"lora.pretrained: .* holds other values by now than the reference"):
        train_preferences(tmp_path, 2, task, ckpt_path=middle)


@pytest.mark.full
def test_adapters_of_another_model_are_refused(base: Path, run: Path, tmp_path: Path) -> None:
    deeper = save_model(tmp_path / "deeper", **{**SIZES, "vocab_size": 320, "num_hidden_layers": 4})
    stored = save_adapters(tmp_path / "adapters", deeper)
    whole = save_adapters(tmp_path / "whole", deeper, LoRA(r=4), save_embedding_layers=True)
    messages = {
        str(stored): "the model does not train: it is of another model",
        str(run): "whose weights are other",
        str(whole): "which stays as it is in pretrained",
    }
    for given, message in messages.items():
        target = base if given == str(stored) else deeper
        with pytest.raises(RankError) as caught:
            train_sharded(target, tmp_path, 1, lora=LoRA(pretrained=given), max_steps=1)
        assert message in str(caught.value)


def test_a_store_that_lets_nobody_in_is_refused_as_the_setting_that_names_it(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Unable to locate credentials")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", refuse)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "exists", refuse)
    with pytest.raises(ValueError, match=rf"^lora\.pretrained: {memory}: Unable to locate credentials; see whether it"):
        open_adapters(LoRA(pretrained=str(memory)))
