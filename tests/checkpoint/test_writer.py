"""Damage is found before loading, saving beside training changes nothing, a full disk ends no run."""

import errno
import os
import resource
import shutil
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path
from training import (
    EVEN,
    GLOBAL_BATCH,
    NUM_STEPS,
    OPTIMIZER,
    Recorder,
    Result,
    Rows,
    build_task,
    build_trainer,
    fit_and_write,
    list_differences,
    save_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.checkpoint import manifest
from lit_fsdp.checkpoint import writer as writer_module
from lit_fsdp.checkpoint.latest import is_whole
from lit_fsdp.checkpoint.manifest import (
    ChecksumFileSystem,
    Verify,
    check_files,
    check_sizes,
    describe_files,
    is_complete,
    read_position,
    write_manifest,
)
from lit_fsdp.checkpoint.reader import read_plain
from lit_fsdp.checkpoint.remote import RemotePath, UnreachableError
from lit_fsdp.checkpoint.sharded import agree, save_checkpoint
from lit_fsdp.checkpoint.writer import CheckpointFormat, CheckpointWriter
from lit_fsdp.sharding.random_state import collect_random_state, reseed, restore_random_state
from lit_fsdp.tasks import CausalLM
from ranks import run_ranks


def train(
    folder: Path,
    out: Path | None,
    *,
    max_steps: int = NUM_STEPS,
    load: Path | None = None,
    first_step: int = 4,
    num_rows: int = NUM_STEPS * GLOBAL_BATCH,
    save: Path | None = None,
    is_async: bool = False,
    checkpoint_format: CheckpointFormat = "sharded",
    callbacks: Any = (),
) -> None:
    """Train a model with dropout, so that random states matter."""
    strategy = FSDP2Strategy(print_plan=False, async_save=is_async, checkpoint_format=checkpoint_format)
    trainer = build_trainer(
        strategy, callbacks=[Recorder(), *callbacks], max_steps=max_steps, enable_checkpointing=bool(callbacks)
    )
    data = Rows(64, GLOBAL_BATCH // trainer.world_size, num_rows)
    fit_and_write(trainer, build_task(folder), data, out, save=save, load=load, first_step=first_step)


@pytest.fixture
def dropout_model(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=64)
    assert config.resid_pdrop == 0.1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.full
@pytest.mark.parametrize("steps_per_epoch", [NUM_STEPS, 4], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_async": True}, {"checkpoint_format": "single_file"}],
    ids=["sync", "async", "single file"],
)
def test_a_resumed_run_with_dropout_goes_on_bit_for_bit(
    dropout_model: Path, options: dict[str, Any], steps_per_epoch: int, tmp_path: Path
) -> None:
    num_rows = steps_per_epoch * GLOBAL_BATCH

    def run(out: str | None, **more: Any) -> None:
        torch.manual_seed(5)
        train(dropout_model, tmp_path / out if out else None, num_rows=num_rows, **options, **more)

    run_ranks(lambda: run("whole"))
    run_ranks(lambda: run(None, max_steps=4, save=tmp_path / "checkpoint"))
    assert is_whole(tmp_path / "checkpoint")
    run_ranks(lambda: run("resumed", load=tmp_path / "checkpoint"))
    whole, resumed = torch.load(tmp_path / "whole"), torch.load(tmp_path / "resumed")
    assert whole["losses"][4:] == resumed["losses"][4:]
    assert all(torch.equal(whole["weights"][n], w) for n, w in resumed["weights"].items())


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.full
def test_saving_beside_training_gives_the_same_run_and_the_same_checkpoint(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    for name, is_async in (("sync", False), ("async", True)):
        callbacks = [ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_last="link")]
        run_ranks(lambda a=is_async, c=callbacks, n=name: train(folder, tmp_path / f"{n}.pt", is_async=a, callbacks=c))
        kept = [p.name for p in (tmp_path / name).iterdir() if not p.is_symlink()]
        assert len(kept) == 1, kept  # older ones are gone, nothing is left half-written
        assert is_complete(tmp_path / name / "last.ckpt")
    sync, other = (Result(**torch.load(tmp_path / f"{name}.pt")) for name in ("sync", "async"))
    assert max(list_differences(sync, other).values()) == 0.0
    saved = []
    for name in ("sync", "async"):
        dcp_to_torch_save((tmp_path / name / "last.ckpt").resolve(), tmp_path / f"{name}.plain")
        saved.append(dict(tree_flatten_with_path(torch.load(tmp_path / f"{name}.plain", weights_only=True))[0]))
    assert saved[0].keys() == saved[1].keys()
    assert [place for place, value in saved[0].items() if not equal(value, saved[1][place])] == []
    run_ranks(lambda: train(folder, None, max_steps=10, load=tmp_path / "async" / "last.ckpt", first_step=8))


def write_folder(folder: Path) -> None:
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(name.encode() * 1000)
    write_manifest(folder, describe_files(sorted(folder.iterdir())))


def test_missing_cut_and_changed_files_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "whole")
    check_files(tmp_path / "whole", "full")
    assert is_complete(tmp_path / "whole")
    for damage, message in (("missing", "b.bin is missing"), ("cut", "b.bin has 4999 bytes of 5000")):
        folder = tmp_path / damage
        shutil.copytree(tmp_path / "whole", folder)
        (folder / "b.bin").unlink() if damage == "missing" else (folder / "b.bin").write_bytes(b"x" * 4999)
        assert not is_complete(folder)
        with pytest.raises(ValueError, match=message):
            check_sizes(folder)
    changed = bytearray((tmp_path / "whole" / "b.bin").read_bytes())
    changed[1234] ^= 1
    (tmp_path / "whole" / "b.bin").write_bytes(changed)
    for verify in get_args(Verify):
        with pytest.raises(ValueError, match=r"b\.bin is damaged: its checksum differs"):
            check_files(tmp_path / "whole", verify)
    (tmp_path / "whole" / "complete.json").write_text("{")
    with pytest.raises(ValueError, match=r"complete\.json is damaged"):
        check_sizes(tmp_path / "whole")


def save_random(path: Path) -> list[str]:
    """Save as one rank; return the names of the files that were read for it."""
    read: list[str] = []
    compute = manifest.compute_crc32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "compute_crc32", lambda file: (read.append(file.name), compute(file))[1])
        state = {"state_dict": {"weight": torch.randn(300, 70), "bias": torch.ones(3)}, "lr": 0.5}
        save_checkpoint(path, state, meta={"epoch": 1})
    return read


def test_checksums_are_computed_while_writing_and_compared_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    assert sorted(save_random(path)) == ["meta.pt", "random_0.pt"]
    names = {"meta.pt", "random_0.pt", ".metadata", "__0_0.distcp"}
    assert check_sizes(path) == describe_files(path / name for name in names)
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged"):
        check_files(path, "sizes")  # a small one
    monkeypatch.setattr(manifest, "VERIFIED_BYTES", len(content) - 1)
    check_files(path, "sizes")
    for part in (0, 1):  # of the four files in order, each rank reads two
        if part == 0:
            check_files(path, "full", part=part, num_parts=2)
        else:
            with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged"):
                check_files(path, "full", part=part, num_parts=2)
    (path / "meta.pt").write_bytes((path / "meta.pt").read_bytes()[::-1])
    with pytest.raises(ValueError, match=r"meta\.pt is damaged"):
        check_files(path, "sizes")


def test_a_state_in_host_memory_is_written_without_a_stream_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU, torch would copy ahead on one; in a thread, and on a CPU, that opens a context on GPU 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("took a stream"))
    save_checkpoint(tmp_path / "ckpt", {"state_dict": {"weight": torch.ones(3)}}, meta={}, random_state={"seed": 1})
    assert is_complete(tmp_path / "ckpt")


def test_the_writing_thread_has_the_gpu_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: chosen.append((threading.current_thread().name, d)))
    writer = CheckpointWriter(is_async=True, report=print)
    assert writer.save(tmp_path / "ckpt", {"state_dict": {"weight": torch.ones(3)}})
    writer.close()
    assert is_complete(tmp_path / "ckpt")
    assert chosen == [("checkpoint", 3)]


def read_timeouts(folder: Path) -> None:
    groups: list[Any] = []
    make = torch.distributed.new_group

    def remember(*args: Any, **options: Any) -> Any:
        groups.append(make(*args, **options))
        return groups[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "new_group", remember)
        writer = FSDP2Strategy(async_save=True, timeout_s=77)._writer
        assert writer.save(folder / "ckpt", {"state_dict": {"weight": torch.ones(3)}})
        writer.close()
    assert is_complete(folder / "ckpt")
    (group,) = groups
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_ranks_that_write_beside_training_wait_as_long_as_the_setting_says(tmp_path: Path) -> None:
    run_ranks(read_timeouts, tmp_path, world_size=1)


def load_damaged(folder: Path, path: Path, verify: Verify, message: str) -> None:
    task = CausalLM(pretrained=str(folder), optimizer=OPTIMIZER)
    before: dict[str, Any] = {}

    def remember(*_: Any) -> None:
        before.update({n: p.detach().clone() for n, p in task.named_parameters()})

    task.on_fit_start = remember  # type: ignore[method-assign]  # after the weights are in, before the checkpoint is
    with pytest.raises(ValueError, match=message):
        strategy = FSDP2Strategy(print_plan=False, verify_checkpoint=verify)
        build_trainer(strategy).fit(task, Rows(64, 4), ckpt_path=path)
    assert before
    assert all(torch.equal(before[n].to_local(), p.to_local()) for n, p in task.named_parameters())


@pytest.mark.full
def test_a_damaged_checkpoint_is_refused_on_every_rank_and_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(lambda: train(folder, None, max_steps=1, save=tmp_path / "checkpoint"))
    names = sorted(p.name for p in (tmp_path / "checkpoint").iterdir())
    assert {"__0_0.distcp", "__1_0.distcp", "random_0.pt", "random_1.pt", "meta.pt", ".metadata"} < set(names)
    for name in ("__1_0.distcp", ".metadata"):
        damaged = tmp_path / f"damaged{name}"
        shutil.copytree(tmp_path / "checkpoint", damaged)
        content = bytearray((damaged / name).read_bytes())
        content[len(content) // 2] ^= 0xFF
        (damaged / name).write_bytes(content)
        run_ranks(load_damaged, folder, damaged, "sizes", f"{name} is damaged")  # of small files in any case
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "VERIFIED_BYTES", 0)
            run_ranks(load_damaged, folder, damaged, "full", f"{name} is damaged")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_full_disk_skips_the_save_keeps_older_ones_until_the_next_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    reports: list[str] = []
    writer = CheckpointWriter(is_async=is_async, report=reports.append)
    state = {"state_dict": {"weight": torch.ones(1000)}}
    removed: list[str] = []
    assert writer.save(tmp_path / "again", state)
    assert writer.save(tmp_path / "first", state)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        assert not writer.save(tmp_path / "second", state)
        for name in ("first", "again"):
            writer.remove(tmp_path / name, partial(removed.append, name))
    assert "second was NOT saved: the disk has 0.06 GiB too little" in reports[0]
    assert removed == []
    assert writer.missing == tmp_path / "second"
    assert is_complete(tmp_path / "first")
    assert not (tmp_path / "second").exists()
    assert writer.save(Path("again"), state)  # the one that was due to go is replaced, so the new one stays
    writer.wait()
    assert writer.missing is None
    assert removed == ["first"]
    writer.remove(tmp_path / "again", partial(removed.append, "again"))
    assert removed == ["first", "again"]


def fail_once(folder: Path, is_async: bool) -> None:
    """A caller may go on after a save that failed, as one whose disk was full for a moment."""
    writer = CheckpointWriter(is_async=is_async, report=print)
    state = {"state_dict": {"weight": torch.ones(3)}}
    assert writer.save(folder / "first", state)
    writer.wait()
    removed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChecksumFileSystem, "create_stream", fail_to_write)
        with pytest.raises(RuntimeError, match="no space left"):
            writer.save(folder / "second", state)
            writer.wait()
    writer.remove(folder / "first", partial(removed.append, "first"))
    assert (writer.missing, removed) == (folder / "second", [])
    assert writer.save(folder / "third", state)
    writer.close()
    assert removed == ["first"]


def exceed_quota(folder: Path, is_async: bool, checkpoint_format: CheckpointFormat, limit_bytes: int) -> None:
    """One rank may write no large file any more, where the disk has room."""
    reports: list[str] = []
    writer = CheckpointWriter(is_async=is_async, checkpoint_format=checkpoint_format, report=reports.append)
    state = {"state_dict": {"weight": torch.ones(300_000)}}
    assert writer.save(folder / "first", state)
    writer.wait()
    failing = 1 if limit_bytes < 1000 else 0  # of the tensors, which are the same, rank 0 writes all
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    writer.save(folder / "second", state)
    writer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(reports) == 1, reports
    assert "second was NOT saved: " in reports[0]
    assert f"rank {failing}: [Errno 27] File too large; training goes on" in reports[0]
    assert (writer.missing, writer.skipped) == (folder / "second", {folder / "second"})
    assert writer.save(folder / "third", state)
    writer.close()
    torch.distributed.barrier()  # rank 0 lets go of its lock
    assert (writer.missing, sorted(path.name for path in folder.iterdir())) == (None, ["first", "third"])


@pytest.mark.parametrize(
    ("is_async", "checkpoint_format", "limit_bytes"),
    [
        (True, "sharded", 100_000),
        (False, "sharded", 100_000),
        (False, "sharded", 500),  # of the small files beside
        (False, "single_file", 100_000),
    ],
)
def test_a_disk_that_takes_no_more_skips_the_save_on_all_ranks_and_the_run_goes_on(
    tmp_path: Path, is_async: bool, checkpoint_format: CheckpointFormat, limit_bytes: int
) -> None:
    run_ranks(exceed_quota, tmp_path, is_async, checkpoint_format, limit_bytes)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_checkpoint_that_outlived_a_failed_save_goes_after_the_next(tmp_path: Path, is_async: bool) -> None:
    run_ranks(fail_once, tmp_path, is_async)


class Scored(BoringModel):
    """Logs a score of its choice in each step."""

    SCORES = (3.0, 2.0, 2.5, 4.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", self.SCORES[batch_idx])
        return super().training_step(batch, batch_idx)


def fill_up_for_the_second_best(folder: Path, is_async: bool) -> None:
    def save(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "best-step=2.ckpt":
            raise OSError(errno.ENOSPC, "No space left on device")
        save_checkpoint(path, *args, **options)

    best = ModelCheckpoint(folder, "best-{step}", "score", save_last="link", every_n_train_steps=1)
    each = ModelCheckpoint(folder, "each-{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False)
    links: list[tuple[str, bool]] = []

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if (folder / "last.ckpt").is_symlink():
                links.append(((folder / "last.ckpt").readlink().name, is_complete(folder / "last.ckpt")))

    strategy = FSDP2Strategy(print_plan=False, async_save=is_async)
    trainer = build_trainer(
        strategy, callbacks=[best, each, Look()], max_steps=4, limit_val_batches=0, enable_checkpointing=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "save_checkpoint", save)
        trainer.fit(Scored())
    torch.distributed.barrier()  # rank 0 lets go of its lock
    names = {f"each-step={step}.ckpt" for step in range(1, 5)}
    assert {path.name for path in folder.iterdir()} == {*names, "best-step=3.ckpt", "last.ckpt"}
    # The one that is worse than what could not be saved has taken the place of the first.
    assert [best.best_model_path] == list(best.best_k_models) == [str(folder / "best-step=3.ckpt")]
    assert all(is_there for _, is_there in links)
    assert [name for name, _ in links] == ["best-step=1.ckpt"] * 2 + ["best-step=3.ckpt"]
    saved = read_plain(folder / "each-step=2.ckpt")["callbacks"][best.state_key]
    assert Path(saved["best_model_path"]).name == "best-step=1.ckpt"


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_best_stays_and_is_linked_where_the_disk_had_no_room_for_a_better_one(
    tmp_path: Path, is_async: bool
) -> None:
    run_ranks(fill_up_for_the_second_best, tmp_path, is_async)


def test_every_file_and_name_is_on_the_disk_before_the_older_checkpoint_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str, int]] = []  # what was done, to which path, with how many bytes
    sync, rename = os.fsync, Path.rename

    def note_sync(file: Any) -> None:
        path = Path(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}").readlink()
        events.append(("sync", path.name, path.stat().st_size if path.is_file() else 0))
        sync(file)

    def note_rename(self: Path, target: Path) -> Path:
        events.append(("rename", f"{self.name} -> {target.name}", 0))
        return rename(self, target)

    state = {"state_dict": {"weight": torch.ones(3000)}}
    for kind, is_async in (("sharded", False), ("sharded", True), ("single_file", False)):
        writer = CheckpointWriter(checkpoint_format=kind, is_async=is_async, report=print)
        path = tmp_path / f"{kind} {is_async}" / "last.ckpt"
        assert writer.save(path, state)
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", note_sync)
            patch.setattr(Path, "rename", note_rename)
            patch.setattr(shutil, "rmtree", lambda gone, **_: events.append(("remove", Path(gone).name, 0)))
            assert writer.save(path, state)
            writer.remove(path.with_name("older"), lambda: events.append(("remove", "older", 0)))
            writer.close()
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.name != ".metadata"]
        beside, placed = ".last.ckpt.incomplete", ("rename", ".last.ckpt.incomplete -> last.ckpt", 0)
        sizes = {beside if file == path else file.name: file.stat().st_size for file in files}
        if kind == "sharded":
            sizes[".metadata.tmp"] = (path / ".metadata").stat().st_size  # synced before it gets its name
            manifest_part = next(i for i, (_, name, _) in enumerate(events) if name.startswith("complete.json"))
            sizes[events[manifest_part][1]] = sizes.pop("complete.json")
            assert {*sizes, beside} == {name for what, name, _ in events[: events.index(placed)] if what == "sync"}
            assert ("sync", beside, 0) in events[:manifest_part]  # names come before what vouches for them
            assert ("rename", "last.ckpt -> .last.ckpt.replaced", 0) in events
        for name, size in sizes.items():
            assert events.index(("sync", name, size)) < events.index(placed), name
        after = events[events.index(placed) + 1 :]
        assert after[0] == ("sync", path.parent.name, 0)
        assert ("remove", "older", 0) in after
        assert ("remove", "older", 0) not in events[: events.index(placed)]
        events.clear()


def test_saves_are_numbered_from_the_last_one_of_the_run_on(tmp_path: Path) -> None:
    state = {"state_dict": {"weight": torch.ones(3)}, "global_step": 7}
    for folder, is_async in (("version_0", False), ("version_1", True)):
        writer = CheckpointWriter(is_async=is_async, report=print)
        writer.begin([tmp_path / "version_0", tmp_path / "missing"])
        for name in ("a.ckpt", "b.ckpt"):
            assert writer.save(tmp_path / folder / name, state)
        writer.close()
    found = [read_position(tmp_path / folder / "b.ckpt") for folder in ("version_0", "version_1")]
    assert found == [(2, 7), (4, 7)]


def fail_beside_training(folder: Path) -> None:
    writer = CheckpointWriter(is_async=True, report=print)
    path = folder / "blocked" / "checkpoint"
    assert writer.save(path, {"state_dict": {"weight": torch.ones(3)}})
    writer.wait()
    assert is_complete(path)
    removed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChecksumFileSystem, "create_stream", fail_to_write)
        assert writer.save(path.with_name("next"), {"state_dict": {"weight": torch.ones(3)}})
        writer.remove(path, lambda: removed.append(1))
        with pytest.raises(RuntimeError, match=r"saving a checkpoint beside training failed.*no space left"):
            writer.wait()
    assert removed == []  # the older one is all there is
    torch.distributed.barrier()  # rank 0 removes it
    assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint"]


def fail_to_write(*_: Any) -> Any:
    raise OSError("no space left on this imaginary device")


def test_folders_that_rank_0_cannot_look_into_end_the_run_on_all_ranks() -> None:
    def body() -> None:
        with (
            pytest.raises(RuntimeError, match="rank 0: memory://bucket: no answer"),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(RemotePath, "glob", Mock(side_effect=UnreachableError("memory://bucket: no answer")))
            CheckpointWriter(is_async=False, report=print).begin([RemotePath("memory://bucket")])

    run_ranks(body)


def test_an_error_beside_training_surfaces_and_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    run_ranks(fail_beside_training, tmp_path)


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    def body() -> None:
        rank = torch.distributed.get_rank()

        def work() -> int:
            if rank == 1:
                raise ValueError("rank 1 cannot")
            return rank

        with pytest.raises(ValueError, match="rank 1 cannot"):
            agree(work)
        assert agree(lambda: rank) == [0, 1, 2]

    run_ranks(body, world_size=3)


def test_the_random_state_of_a_gpu_is_not_asked_for_by_a_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # to start it fails here
    state = collect_random_state()
    assert "cuda" not in state
    restore_random_state({**state, "cuda": torch.zeros(16, dtype=torch.uint8)})
    assert not torch.cuda.is_initialized()


def test_random_states_are_restored_exactly_and_reseeding_depends_on_the_rank() -> None:
    import random

    import numpy as np

    state = collect_random_state()
    torch.save(state, Path("/dev/null"))
    first = (torch.rand(3).tolist(), random.random(), np.random.rand())  # noqa: NPY002
    restore_random_state(state)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == first  # noqa: NPY002
    reseed(state, 0)
    zero = torch.rand(3).tolist()
    reseed(state, 1)
    assert torch.rand(3).tolist() != zero
    reseed(state, 0)
    assert torch.rand(3).tolist() == zero
