"""Checkpoints at addresses: written, replaced, found, removed and tidied there; none becomes a local folder."""

import json
import os
import pickle
import signal
import subprocess
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from launches import Ended, fork_ranks, write_run
from s3fs.core import S3File
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lit_fsdp import FSDP2Strategy
from lit_fsdp.checkpoint import sharded, single_file
from lit_fsdp.checkpoint.latest import enter, find_last_checkpoint, find_last_number, is_whole, measure_age
from lit_fsdp.checkpoint.leftovers import tidy_folders
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.checkpoint.places import LOCK, list_saves, write_beside
from lit_fsdp.checkpoint.reader import check_checkpoint
from lit_fsdp.checkpoint.remote import Location, RemotePath, UnreachableError, locate, locate_local
from lit_fsdp.checkpoint.sharded import load_checkpoint, save_checkpoint
from lit_fsdp.checkpoint.single_file import read_single_file, save_single_file
from lit_fsdp.checkpoint.untrusted import load_state, read_metadata
from lit_fsdp.checkpoint.writer import CheckpointWriter


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def save(path: Location, number: int) -> None:
    state = {"state_dict": {"weight": torch.full((3,), float(number))}}
    save_checkpoint(path, state, meta={"global_step": number * 10}, save_number=number)


def read(path: Location) -> float:
    model = Weights()
    load_checkpoint(enter(path), model)
    return model.weight[0].item()


def count_objects(folder: RemotePath) -> int:
    fs, path = fsspec.url_to_fs(str(folder))
    return len(fs.find(path))


def test_a_replaced_checkpoint_is_the_newest_whole_one_at_every_moment(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    path = memory / "last.ckpt"
    save(path, 1)
    assert is_whole(path)
    assert measure_age(path).key[0] == 1
    assert measure_age(path).step == 10
    write = RemotePath.write_bytes

    def fail_at_manifest(self: RemotePath, data: bytes) -> None:
        if self.name == MANIFEST:
            raise OSError("killed before the manifest")
        write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "write_bytes", fail_at_manifest)
        with pytest.raises(OSError, match="killed before"):
            save(path, 2)
    assert len(list_saves(path)) == 1  # nothing of it is left
    assert read(path) == 1  # the older one, as the newer has no manifest
    assert find_last_checkpoint([memory]) == path
    save(path, 3)
    assert read(path) == 3
    (only,) = list_saves(path)  # what it has replaced is gone
    assert not (only / LOCK).exists()
    assert find_last_number([memory]) == 3
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_writers_go_at_a_start_and_those_of_living_ones_stay(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = memory / "step=10.ckpt"
    save(path, 1)
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = os.uname().nodename
    with write_beside(memory / "own") as other:
        assert isinstance(other, RemotePath)
        own = (other / LOCK).read_text()
    assert own.startswith(f"{host} {os.getpid()} ")
    boot, _, began = own.split()[2].partition("/")
    # Of a container that was started again, with the same numbers: before the machine was booted, and since.
    restarted = own.replace(boot, "another-boot"), own.replace(began, f"{int(began) - 1}")
    claims = {2: f"{host} {dead.pid} {boot}/{began}\n", 3: own, 4: "another-host 1 x\n", 5: None}
    claims |= {6: restarted[0], 7: restarted[1]}
    for number, said_by in claims.items():
        folder = path / f"save-{number}-0000000{number}"
        (folder / "__0_0.distcp").write_bytes(b"a part")
        if said_by is not None:
            (folder / LOCK).write_bytes(said_by.encode())
    said: list[str] = []
    tidy_folders([memory, memory / "missing"], said.append)
    assert [save.name[:6] for save in list_saves(path)] == ["save-4", "save-3", "save-1"]
    assert sorted(line.split(": ")[1] for line in said) == ["a save that was interrupted"] * 4
    monkeypatch.setattr("lit_fsdp.checkpoint.places._ABANDONED_S", -1.0)
    tidy_folders([memory], said.append)
    assert [save.name[:6] for save in list_saves(path)] == ["save-3", "save-1"]
    assert read(path) == 1


def test_a_hostile_checkpoint_is_refused_there_too(memory: RemotePath) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, ("true",))

    path = memory / "step=1.ckpt"
    save(path, 1)
    single = memory / "single.ckpt"
    with single.open("wb") as file:
        torch.save({"state_dict": {}, "x": Hostile()}, file)
    with pytest.raises(ValueError, match="cannot be read safely"):
        check_checkpoint(single)
    folder = enter(path)
    assert isinstance(folder, RemotePath)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"].pop(".metadata")
    (folder / MANIFEST).write_bytes(json.dumps(manifest).encode())
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match=r"cannot be read safely: it names (posix|nt)\.system"):
        check_checkpoint(path)


def test_a_single_file_that_fails_half_way_leaves_the_older_one(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = memory / "last.ckpt"
    save_single_file(path, {"state_dict": {"a": torch.ones(9)}, "global_step": 7, "save_number": 2})
    assert measure_age(path).key[0] == 2
    assert is_whole(path)
    check_checkpoint(path)

    def write_half(_: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("lost the connection")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", write_half)
        with pytest.raises(UnreachableError, match="lost the connection"):
            save_single_file(path, {"state_dict": {}})
    assert torch.equal(read_single_file(path, "full")["state_dict"]["a"], torch.ones(9))


def test_what_cannot_be_written_to_is_refused_before_the_first_step(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(is_async=False, report=lambda _: None)
    assert writer.measure_space([memory], 2, Weights(), []) is None
    assert count_objects(memory) == 0  # it has tried, and left nothing

    def refuse(*_: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
    with pytest.raises(ValueError, match=r"dirpath: got 'memory://bucket/run', .* Access Denied"):
        writer.measure_space([memory], 2, Weights(), [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("foo://bucket/x", "fsspec knows no scheme 'foo'"),
        ("gcs://bucket/x", "gcsfs"),
        ("file://tmp/x", "expected the path alone, or file:// and a path from the root"),
        ("/here/file:/tmp/x", "expected for a folder of this machine no scheme"),
        ("s3:/bucket/x", "taken for a path"),
        ("/here/memory:/x", "taken for a path"),
        ("simplecache::s3://bucket/x", "without ::"),
        ("s3://", "an address with a name"),
    ],
)
def test_what_is_no_address_is_refused_and_never_a_folder(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        locate(given)


def test_paths_and_addresses_are_told_apart(tmp_path: Path) -> None:
    assert locate("memory://a/b/") == RemotePath("memory://a/b")
    assert locate("MEMORY://a/B") == RemotePath("memory://a/B")
    assert locate("odd:name/x") == Path("odd:name/x")
    assert locate("file:///a/b") == locate("FILE:///a/b") == Path("/a/b")
    (tmp_path / "data:").mkdir()  # fsspec has a scheme of this name
    assert locate(tmp_path / "data:" / "run") == tmp_path / "data:" / "run"
    with pytest.raises(ValueError, match="without file://"):  # Lightning would make a folder of its name
        locate_local("file:///a/b")
    with pytest.raises(TypeError):
        Path(RemotePath("memory://a"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only checkpoints can lie at an address"):
        locate_local("memory://a/b")
    assert locate_local(tmp_path) == tmp_path


def write_remote_run(folder: Path, dirpath: RemotePath | Path, **settings: Any) -> None:
    saving = {"dirpath": str(dirpath), "every_n_train_steps": 2, "save_top_k": 1, "save_last": True}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saving}
    strategy = {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": {"print_plan": False, **settings}}
    constant = {"lr_scheduler": {"type": "constant"}}  # else it would depend on the number of steps
    write_run(folder, trainer={"callbacks": [callback], "strategy": strategy}, model=constant)


def read_tensors(path: Location) -> dict[str, torch.Tensor]:
    folder = enter(path)
    metadata = read_metadata(folder)
    state = {
        name: torch.zeros(there.size, dtype=there.properties.dtype)
        for name, there in metadata.state_dict_metadata.items()
        if isinstance(there, TensorStorageMetadata)
    }
    load_state(folder, metadata, state, no_dist=True)
    return state


def check_ended(ended: list[Ended]) -> None:
    assert [e.code for e in ended] == [0] * len(ended), "".join(e.err for e in ended)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"async_save": True}])
def test_a_run_goes_on_from_s3_on_another_machine_as_if_it_had_never_stopped(
    s3: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    for folder, dirpath in ((whole, whole / "kept"), (first, s3), (second, s3)):
        folder.mkdir()
        write_remote_run(folder, dirpath, **settings)
    monkeypatch.chdir(whole)
    check_ended(fork_ranks("fit", "--config", "run.yaml", "--trainer.max_steps=6"))
    monkeypatch.chdir(first)
    check_ended(fork_ranks("fit", "--config", "run.yaml"))
    assert sorted(p.name for p in s3.glob("*")) == ["epoch=0-step=4.ckpt", "last.ckpt"]  # that of step 2 is removed
    assert list(first.rglob("*.ckpt")) == list(first.rglob("s3*")) == []
    monkeypatch.chdir(second)
    go_on = ("fit", "--config", "run.yaml", "--ckpt_path=last", "--trainer.max_steps=6")
    check_ended(fork_ranks(*go_on))
    assert sorted(p.name for p in s3.glob("*")) == ["epoch=0-step=6.ckpt", "last.ckpt"]
    assert len(list_saves(s3 / "last.ckpt")) == 1
    expected, found = read_tensors(whole / "kept" / "last.ckpt"), read_tensors(s3 / "last.ckpt")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    # One rank reads what two have written, and its own leftover of a save that was killed is gone.
    leftover = s3 / "last.ckpt" / "save-99-00000000"
    (leftover / "__0_0.distcp").write_bytes(b"a part")
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "empty"))
    elsewhere = (f"--ckpt_path={s3}/last.ckpt", f"--trainer.default_root_dir={tmp_path / 'root'}")
    ended = fork_ranks(*go_on[:3], *elsewhere, "--trainer.max_steps=7", ranks=1)
    check_ended(ended)
    assert "1 (now at 7)" in ended[0].out
    assert not leftover.exists()
    exported = second / "exported"
    check_ended(fork_ranks("export", f"--checkpoint={s3}", f"--out={exported}", ranks=1))
    assert (exported / "model.safetensors").is_file()


@pytest.mark.full
def test_a_run_that_is_killed_before_the_manifest_goes_on_from_the_checkpoint_before(
    s3: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_remote_run(tmp_path, s3, checkpoint_format="sharded")
    check_ended(fork_ranks("fit", "--config", "run.yaml", "--trainer.max_steps=2", ranks=1))

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(sharded, "write_manifest", die)
        (killed,) = fork_ranks("fit", "--config", "run.yaml", "--ckpt_path=last", ranks=1)
    assert killed.code == -signal.SIGKILL
    path = s3 / "epoch=0-step=4.ckpt"
    assert len(list_saves(path)) == 1
    assert not is_whole(path)
    (ended,) = fork_ranks("fit", "--config", "run.yaml", "--ckpt_path=last", ranks=1)
    check_ended([ended])
    assert f"is not complete: taking the newest complete checkpoint before it, {s3}/" in ended.err
    assert is_whole(path)
    assert len(list_saves(path)) == 1


@pytest.mark.full
def test_single_files_lie_there_too(s3: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_remote_run(tmp_path, s3, checkpoint_format="single_file")
    check_ended(fork_ranks("fit", "--config", "run.yaml", "--trainer.max_steps=2"))
    check_ended(fork_ranks("fit", "--config", "run.yaml", f"--ckpt_path={s3}/last.ckpt"))
    assert sorted(p.name for p in s3.glob("*")) == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert read_single_file(s3 / "last.ckpt", "full")["global_step"] == 4
    assert list(tmp_path.rglob("*.ckpt")) == []


@pytest.mark.full
def test_file_addresses_are_folders_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_remote_run(tmp_path, RemotePath(f"FILE://{tmp_path}/kept"))
    check_ended(fork_ranks("fit", "--config", "run.yaml", "--trainer.max_steps=2", ranks=1))
    check_ended(fork_ranks("fit", "--config", "run.yaml", f"--ckpt_path=file://{tmp_path}/kept/last.ckpt", ranks=1))
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert list(tmp_path.rglob("*:*")) == []


REFUSED = (
    ("trainer.callbacks[0]: dirpath: got 'foo://bucket/run': fsspec knows no scheme", "dirpath", "foo://bucket/run"),
    ("trainer.callbacks[0]: dirpath: got 'gcs://bucket/run': a package is missing", "dirpath", "gcs://bucket/run"),
    ("ckpt_path: got 'foo://bucket/x.ckpt': fsspec knows no scheme", "--ckpt_path", "foo://bucket/x.ckpt"),
    ("ckpt_path: 'memory://bucket/x.ckpt' does not exist", "--ckpt_path", "memory://bucket/x.ckpt"),
    ("trainer.default_root_dir: got 's3://bucket/x': only", "--trainer.default_root_dir", "s3://bucket/x"),
    (
        "trainer.logger.init_args.save_dir: got 's3://bucket/x': only",
        "--trainer.logger.init_args.save_dir",
        "s3://bucket/x",
    ),
    ("checkpoint: got 'foo://bucket/run': fsspec knows no scheme", "--checkpoint", "foo://bucket/run"),
    ("out: got 's3://bucket/run': only checkpoints", "--out", "s3://bucket/run"),
)


@pytest.mark.full
def test_what_no_store_can_hold_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for said, option, value in REFUSED:
        command = ["fit", "--config=run.yaml", "--trainer.logger=CSVLogger", "--trainer.logger.init_args.save_dir=logs"]
        if option in ("--checkpoint", "--out"):
            command = ["export", "--checkpoint=missing", "--out=out"]
        write_remote_run(tmp_path, RemotePath(value) if option == "dirpath" else tmp_path / "kept")
        before = sorted(tmp_path.rglob("*"))
        (ended,) = fork_ranks(*command, *([] if option == "dirpath" else [f"{option}={value}"]), ranks=1)
        assert ended.code == 2, ended.err
        (line,) = ended.errors
        assert line.startswith(f"error: {said}")
        assert sorted(tmp_path.rglob("*")) == before


def save_one(path: Location, number: int) -> None:
    state = {"weight": torch.full((3,), float(number))}
    save_single_file(path, {"state_dict": state, "global_step": number * 10, "save_number": number})


def find(folder: RemotePath) -> tuple[int, bool]:
    """Return the step that a run goes on from, and whether its checkpoint is a single file."""
    last = find_last_checkpoint([folder])
    assert last is not None
    return measure_age(last).step, enter(last).is_file()


def fail(*_: object, **__: object) -> None:
    raise OSError("killed")


@pytest.mark.full
@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_change_of_the_format_goes_on_from_the_newest(
    store: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: RemotePath = request.getfixturevalue(store)
    path = folder / "last.ckpt"
    save_one(path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "write_manifest", fail)
        with pytest.raises(OSError, match="killed"):
            save(path, 2)
    assert find(folder) == (10, True)
    save(path, 3)
    assert find(folder) == (30, False)
    assert read(path) == 3
    assert not path.is_file()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(UnreachableError, match="killed"):
            save_one(path, 4)
    assert find(folder) == (30, False)
    save_one(path, 5)
    assert find(folder) == (50, True)
    assert count_objects(folder) == 1  # nothing of what was replaced is left


@pytest.mark.full
def test_where_a_store_holds_both_formats_the_higher_number_counts(
    s3: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = s3 / "last.ckpt"
    save_one(path, 1)
    with monkeypatch.context() as patch:  # killed before the older one is removed
        patch.setattr(sharded, "remove_older", lambda *_: None)
        patch.setattr(single_file, "remove_older", lambda *_: None)
        save(path, 2)
        assert find(s3) == (20, False)
        save_one(path, 3)
    assert path.is_file()
    assert len(list_saves(path)) == 1
    assert find(s3) == (30, True)
    tidy_folders([s3], print)
    assert find(s3) == (30, True)
    assert count_objects(s3) == 1


def test_a_store_that_fails_is_not_taken_for_a_checkpoint_that_is_cut_short(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_one(memory / "step=10.ckpt", 1)
    save_one(memory / "step=20.ckpt", 2)
    folder = memory / "other" / "step=30.ckpt"
    save(folder, 3)
    (memory / "tiny.ckpt").write_bytes(b"x")
    assert find(memory) == (20, True)
    failing = ""
    num_left = 0

    def read_some(self: MemoryFile, size: int = -1) -> bytes:
        nonlocal num_left
        num_left -= self.path.endswith(failing)
        if self.path.endswith(failing) and num_left < 0:
            raise OSError("503 slow down")
        return BytesIO.read(self, size)

    monkeypatch.setattr(MemoryFile, "read", read_some)
    for num_reads in range(6):  # in the search for its end, and further in
        failing, num_left = "step=20.ckpt", num_reads
        with pytest.raises(UnreachableError, match=r"step=20\.ckpt: 503 slow down"):
            find_last_checkpoint([memory])
    for name in (".metadata", "meta.pt", "__0_0.distcp"):
        failing, num_left = name, 1 if name == "__0_0.distcp" else 0
        with pytest.raises(RuntimeError, match="503 slow down"):
            read(folder)


def test_a_store_that_removes_nothing_keeps_no_save_from_being_complete(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = memory / "last.ckpt"
    save(path, 1)

    remove = MemoryFileSystem.rm

    def refuse(self: MemoryFileSystem, path: str, **options: Any) -> None:
        if not path.endswith(".tmp"):  # of torch, which renames it
            raise OSError("503 slow down")
        remove(self, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", refuse)
        with pytest.warns(UserWarning, match=r"save-1-.* could not be tidied.*: 503 slow down"):
            save(path, 2)
        assert read(path) == 2
        with pytest.warns(UserWarning, match=r"save-1-.* could not be tidied.*: 503 slow down"):
            tidy_folders([memory], print)
        with pytest.warns(UserWarning, match=r"last\.ckpt could not be tidied"):
            FSDP2Strategy().remove_checkpoint(str(path))  # type: ignore[arg-type]  # Lightning keeps texts
        with pytest.raises(UnreachableError, match="503 slow down"):  # what has to work still has to
            path.remove()
    assert len(list_saves(path)) == 2
    save(path, 3)
    (only,) = list_saves(path)
    assert not (only / LOCK).exists()


def test_reading_one_tensor_after_another_takes_little_more_than_their_bytes(
    s3: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = s3 / "last.ckpt"
    state = {f"{i}": torch.full((50_000,), float(i)) for i in range(20)}
    num_bytes = sum(value.nbytes for value in state.values())
    save_checkpoint(path, {"state_dict": state}, meta={})
    folder = enter(path)
    metadata = read_metadata(folder)
    asked: list[int] = []
    fetch = S3File._fetch_range

    def count(self: Any, start: int, end: int) -> bytes:
        asked.append(end - start)
        return bytes(fetch(self, start, end))

    monkeypatch.setattr(S3File, "_fetch_range", count)
    for name, value in state.items():  # as export does
        found = torch.zeros_like(value)
        load_state(folder, metadata, {f"state_dict.{name}": found}, no_dist=True)
        assert torch.equal(found, value)
    assert sum(asked) < 4 * num_bytes
    asked.clear()
    everything = {f"state_dict.{name}": torch.zeros_like(value) for name, value in state.items()}
    load_state(folder, metadata, everything, no_dist=True)
    assert len(asked) <= 3  # as a resume does
