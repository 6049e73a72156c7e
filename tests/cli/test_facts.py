"""Which settings ranks have to agree on: those that change what is computed, and no others."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace

from lit_fsdp.checkpoint.manifest import write_manifest
from lit_fsdp.cli import facts, source_digest
from lit_fsdp.cli.facts import choose_facts, describe_start, list_sources, list_versions
from lit_fsdp.cli.source_digest import describe_source
from lit_fsdp.strategy.roll_call import describe_difference, sign_in

MODEL = {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": {"pretrained": "base", "lora": {"r": 8}}}


def build(changes: dict[str, Any]) -> Namespace:
    settings = Namespace()
    settings.update(Namespace(trainer=Namespace(max_steps=3, devices=2, enable_progress_bar=True, precision="32-true")))
    settings["trainer.max_time"] = None
    settings["trainer.callbacks"] = [Namespace(class_path="EMA", init_args=Namespace(decay=0.9, folder="/a"))]
    settings["trainer.strategy"] = Namespace(
        class_path="lit_fsdp.FSDP2Strategy", init_args=Namespace(mesh=Namespace(shard=2), start_timeout_s=60.0)
    )
    settings["model"] = Namespace(class_path=MODEL["class_path"], init_args=Namespace(**MODEL["init_args"]))
    arguments = Namespace(train=["/a/x.jsonl"], num_workers=2, batch_size=4, share=[3, 1], cache_dir="/a")
    settings["data"] = Namespace(class_path="lit_fsdp.tasks.TextData", init_args=arguments)
    settings["run_name"], settings["run_summary"] = "one", True
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


def test_a_relative_path_may_be_there_on_some_nodes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    present = []
    for rank, rate in enumerate((0.5, 0.5, 0.6)):
        callback = Namespace(class_path="mine.Notes", init_args=Namespace(out="notes.txt", rate=rate))
        present.append(sign_in(rank, choose_facts(build({"trainer.callbacks": [callback]}))))
        (tmp_path / "notes.txt").touch()  # as rank 0 does, or the run before it did
    assert describe_difference(present[:2]) is None
    told = describe_difference(present)
    assert told is not None
    assert told.startswith("trainer.callbacks[0].init_args.rate: rank 0 on ")
    assert " has 0.6: " in told


@pytest.mark.parametrize(
    "changes",
    [
        {"model.init_args.lora": {"r": 16}},
        {"model.init_args.pretrained": "org/other"},
        {"trainer.strategy.init_args.mesh.shard": 1},
        {"trainer.precision": "bf16-mixed"},
        {"data.init_args.batch_size": 8},
        {"data.init_args.share": [1, 3]},
        {"trainer.max_steps": 4},
        {"trainer.callbacks": []},
        {"run_summary": False},  # which gathers from all ranks, as a time does in each step
        {"trainer.max_time": "00:01:00:00"},
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


def test_versions_are_compared_of_what_the_task_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "version", lambda name: f"{name} 1.0")
    assert list(list_versions(build({}))) == ["transformers", "peft"]
    plain = {"model.init_args.lora": None, "model.init_args.optimizer": Namespace(name="adamw")}
    assert list(list_versions(build(plain))) == ["transformers"]
    eight = plain | {"model.init_args.optimizer": Namespace(name="adamw_8bit")}
    four = plain | {"model.init_args.quantization": Namespace(type="nf4")}
    assert list(list_versions(build(eight))) == list(list_versions(build(four))) == ["transformers", "bitsandbytes"]
    assert list_versions(build({"model.class_path": "own.Task"})) == {}


def test_data_is_known_by_its_files_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("a", "b"):
        (tmp_path / node / "class").mkdir(parents=True)
        (tmp_path / node / "x.jsonl").write_text("row\n" * 100_000)
        (tmp_path / node / "class" / "1.png").write_bytes(b"image")
    (tmp_path / "b" / "cache-1.arrow").write_text("of the datasets library")
    (tmp_path / "b" / "class" / "loop").symlink_to(tmp_path / "b")
    assert describe_source(str(tmp_path / "a")) == describe_source(str(tmp_path / "b"))
    assert describe_source(str(tmp_path / "a")).startswith("2 files of 400,005 bytes (digest ")
    one = describe_source(str(tmp_path / "a" / "x.jsonl"))
    monkeypatch.chdir(tmp_path / "b")
    assert one == describe_source(["x.jsonl"]) == describe_source("*.jsonl") == describe_source(Path("x.jsonl"))
    for change in ("row\n" * 99_999, "row\n" * 50_000 + "odd\n" + "row\n" * 49_999):
        (tmp_path / "b" / "x.jsonl").write_text(change)
        assert describe_source("x.jsonl") != one
        assert describe_source(str(tmp_path / "a")) != describe_source(str(tmp_path / "b"))
    named = ["org/name", "s3://bucket/rows.jsonl", "/elsewhere/{00..09}.tar"]
    assert describe_source(named) == "org/name, s3://bucket/rows.jsonl, a path"


def test_a_folder_of_millions_is_not_listed_before_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_digest, "_MOST_FILES", 8)
    for i in range(20):
        (tmp_path / f"{i}.jsonl").write_text("row")
    read, scan = [], os.scandir

    class Counted:
        def __init__(self, folder: Path) -> None:
            self.entries = scan(folder)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return (read.append(entry.name) or entry for entry in self.entries)  # type: ignore[func-returns-value]

        def __exit__(self, *_: object) -> None:
            self.entries.close()

    monkeypatch.setattr(os, "scandir", Counted)
    told = "1 folder of more than 8 entries, which are not compared"
    assert describe_source(str(tmp_path)) == told
    assert len(read) == 9, "it stops where it knows that there are too many"
    assert describe_source(str(tmp_path / "*.jsonl")) == f"a path, {told}"
    assert len(read) == 18


def test_only_the_data_of_the_command_is_looked_at(tmp_path: Path) -> None:
    settings = build({"data.init_args.train": "org/train", "data.init_args.predict": "org/predict"})
    assert list_sources(settings, "fit") == {"data.init_args.train": "org/train"}
    assert list_sources(settings, "predict") == {"data.init_args.predict": "org/predict"}
    assert list_sources(Namespace(data=None), "fit") == {}


def test_what_data_of_ones_own_takes_as_its_source_starts_on_any_node(tmp_path: Path) -> None:
    text = "a prompt " * 50  # too long for a file name
    assert list_sources(build({"data.init_args.train": text}), "fit") == {"data.init_args.train": text}
    (tmp_path / "rows").mkdir()
    sources = [build({"data.init_args.train": Namespace(rows=place, take=3)}) for place in ("/a/rows", str(tmp_path))]
    expected = {"data.init_args.train": '{"rows": "a path", "take": 3}'}
    assert [list_sources(one, "fit") for one in sources] == [expected, expected]


def test_several_sources_are_told_by_what_they_hold_and_their_weights(tmp_path: Path) -> None:
    for node, text in (("first", "same"), ("second", "same"), ("third", "other")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "a.jsonl").write_text(text)

    def describe(node: str, weight: float) -> str:
        sources = [{"path": str(tmp_path / node / "a.jsonl"), "weight": weight}, "org/data"]
        return list_sources(build({"data.init_args.train": sources}), "fit")["data.init_args.train"]

    assert describe("first", 0.5) == describe("second", 0.5)
    assert len({describe("first", 0.5), describe("third", 0.5), describe("first", 0.6)}) == 3
    assert describe("first", 0.5).endswith('{"weight": 0.5}; org/data')
