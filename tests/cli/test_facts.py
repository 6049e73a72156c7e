"""Which settings ranks have to agree on: those that change what is computed, and no others."""

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace

from lit_fsdp.checkpoint.manifest import write_manifest
from lit_fsdp.cli.facts import choose_facts, describe_start

MODEL = {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": {"pretrained": "base", "lora": {"r": 8}}}


def build(changes: dict[str, Any]) -> Namespace:
    settings = Namespace()
    settings.update(Namespace(trainer=Namespace(max_steps=3, devices=2, enable_progress_bar=True, precision="32-true")))
    settings["trainer.callbacks"] = [Namespace(class_path="EMA", init_args=Namespace(decay=0.9, folder="/a"))]
    settings["trainer.strategy"] = Namespace(
        class_path="lit_fsdp.FSDP2Strategy", init_args=Namespace(mesh=Namespace(shard=2), start_timeout_s=60.0)
    )
    settings["model"] = Namespace(class_path=MODEL["class_path"], init_args=Namespace(**MODEL["init_args"]))
    arguments = Namespace(train=["/a/x.jsonl"], num_workers=2, batch_size=4, cache_dir="/a")
    settings["data"] = Namespace(class_path="lit_fsdp.tasks.TextData", init_args=arguments)
    settings["run_name"] = "one"
    for name, value in changes.items():
        settings[name] = value
    return settings


@pytest.mark.parametrize(
    "changes",
    [
        {"data.init_args.num_workers": 0},
        {"run_name": "two"},
        {"trainer.enable_progress_bar": False},
        {"trainer.devices": 4},
        {"data.init_args.train": ["/b/x.jsonl", "/b/y.jsonl"]},
        {"data.init_args.cache_dir": None},
        {"model.init_args.pretrained": "/scratch/base"},
        {"model.init_args.pretrained": Path("/scratch/base")},
        {"trainer.callbacks": [Namespace(class_path="EMA", init_args=Namespace(decay=0.9, folder="/b"))]},
        {"trainer.strategy.init_args.start_timeout_s": 600.0},
    ],
    ids=str,
)
def test_what_rightly_differs_between_nodes_is_not_compared(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    assert choose_facts(build(changes)) == choose_facts(build({}))


@pytest.mark.parametrize(
    "changes",
    [
        {"model.init_args.lora": {"r": 16}},
        {"model.init_args.pretrained": "org/other"},
        {"trainer.strategy.init_args.mesh.shard": 1},
        {"trainer.precision": "bf16-mixed"},
        {"data.init_args.batch_size": 8},
        {"trainer.max_steps": 4},
        {"trainer.callbacks": []},
    ],
    ids=str,
)
def test_what_changes_the_mathematics_is_compared_by_its_name(changes: dict[str, Any]) -> None:
    before, after = choose_facts(build({})), choose_facts(build(changes))
    assert [name for name in before if after.get(name) != before[name]] == list(changes)


def test_a_checkpoint_is_known_by_its_step_and_save_wherever_it_lies(tmp_path: Path) -> None:
    for name, number in (("a/x.ckpt", 2), ("b/y.ckpt", 2), ("b/z.ckpt", 3)):
        (tmp_path / name).mkdir(parents=True)
        write_manifest(tmp_path / name, {}, save_number=number, step=10)
    first, same, other = (describe_start(tmp_path / name) for name in ("a/x.ckpt", "b/y.ckpt", "b/z.ckpt"))
    assert first == same == "step 10, save 2"
    assert other == "step 10, save 3"
    assert describe_start(None) == "no checkpoint"
