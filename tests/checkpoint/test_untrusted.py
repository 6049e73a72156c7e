"""Nothing in a checkpoint is run, whichever of its files is hostile and whoever reads it."""

import os
import pickle
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import fork_ranks, write_run
from models import Stack
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from lit_fsdp.checkpoint.manifest import MANIFEST, describe_files, write_manifest
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import META, join_states, load_checkpoint, read_random_state, save_checkpoint
from lit_fsdp.checkpoint.single_file import load_single_file
from lit_fsdp.checkpoint.untrusted import METADATA, read_metadata
from lit_fsdp.cli.main import main
from lit_fsdp.sharding.mesh import DataRanks

MARKER = "code_has_run"  # made in the current folder


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (MARKER,)


def replace_metadata(path: Path) -> None:
    (path / METADATA).write_bytes(pickle.dumps(Evil()))


def extend_metadata(path: Path) -> None:
    metadata = read_metadata(path)
    metadata.planner_data = Evil()
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def replace_meta(path: Path) -> None:
    torch.save({"epoch": Evil(), EXPORT: {}}, path / META)


def replace_meta_by_pickle(path: Path) -> None:
    (path / META).write_bytes(pickle.dumps(Evil()))


def replace_random_state(path: Path) -> None:
    torch.save({"python": Evil()}, path / "random_0.pt")


def replace_part(path: Path, key: str) -> None:
    """Let one tensor or value be read from a file that holds something else."""
    metadata = read_metadata(path)
    torch.save(Evil(), path / "__9_0.distcp")
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == key]
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, (path / "__9_0.distcp").stat().st_size
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def replace_tensor(path: Path) -> None:
    replace_part(path, "state_dict.first.weight")


def replace_value(path: Path) -> None:
    replace_part(path, "optimizer_0.param_groups.0.lr")


def read_carelessly(path: Path) -> None:
    """Read all of a folder as torch does by itself, up to what is hostile."""
    for file in (path / META, path / "random_0.pt"):
        torch.load(file, weights_only=False)
    for file in sorted(path.glob("__9*.distcp")):
        torch.load(file, weights_only=False)
    FileSystemReader(path).read_metadata()


ATTACKS: dict[str, Callable[[Path], None]] = {
    a.__name__: a
    for a in (
        *(replace_metadata, extend_metadata, replace_meta, replace_meta_by_pickle, replace_random_state),
        *(replace_tensor, replace_value),
    )
}


def attack(path: Path, name: str) -> None:
    """Change a checkpoint, and its manifest with it, as whoever made it could."""
    ATTACKS[name](path)
    write_manifest(path, describe_files(p for p in path.iterdir() if p.name != MANIFEST))


def load(path: Path) -> None:
    """Read all that a run reads."""
    model = Stack()
    load_checkpoint(path, model, [torch.optim.AdamW(model.parameters())])
    read_random_state(path, DataRanks())


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in the current folder."""
    monkeypatch.chdir(tmp_path)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    state = join_states(get_model_state_dict(model), [get_optimizer_state_dict(model, optimizer)])
    save_checkpoint(Path("ckpt"), state, meta={"epoch": 3, EXPORT: {}})
    load(Path("ckpt"))
    return Path("ckpt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", list(ATTACKS))
def test_a_hostile_file_of_a_folder_is_refused_in_one_line_and_not_run(name: str, saved: Path) -> None:
    attack(saved, name)
    with pytest.raises(
        ValueError, match=r"^\S*ckpt\S* (cannot|could not) be read.*; choose another checkpoint$"
    ) as caught:
        load(saved)
    assert "mkdir" in str(caught.value) or "more than tensors" in str(caught.value)
    assert not Path(MARKER).exists()
    with pytest.raises(Exception, match=r".*"):  # whatever becomes of the rest
        read_carelessly(saved)
        pickle.loads(b"")
    assert Path(MARKER).is_dir(), "the attack would not have worked"


@pytest.mark.parametrize("as_pickle", [False, True])
def test_a_hostile_single_file_is_refused_in_one_line_and_not_run(as_pickle: bool, tmp_path: Path) -> None:
    path, model = tmp_path / "a.ckpt", Stack()
    content = {"state_dict": model.state_dict(), "callbacks": Evil()}
    if as_pickle:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"^\S*a\.ckpt (is no checkpoint|cannot be read safely: it names \w+\.mkdir)"):
        load_single_file(path, model, [], strict=True)


class Attribute:
    """Asks for an attribute, as early releases of Python 3.11 did for members of enums."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return getattr, self.args


def test_pickles_reach_no_attribute(saved: Path) -> None:
    for kind, name in ((Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (TensorProperties, "__new__")):
        (saved / METADATA).write_bytes(pickle.dumps(Attribute(kind, name)))
        with pytest.raises(ValueError, match=r"ckpt.* read .*\.metadata"):
            read_metadata(saved)


# What a pickle may name, or get from a call of it, by its opcodes.
MODULE = "torch.distributed.checkpoint.metadata"
OBJECTS = {
    "a class": f"c{MODULE}\nMetadata\n",
    "a class in a dict": f"c{MODULE}\nMetadataIndex\n",
    "a function": "ctorch.serialization\n_get_layout\n",
    "another function": "cbuiltins\ngetattr\n",
    "a member": f"c{MODULE}\n_MEM_FORMAT_ENCODING\n(I0\ntR",
    "a layout": "ctorch.serialization\n_get_layout\n(Vtorch.strided\ntR",
    "a dtype": "ctorch\nfloat32\n",
    "a size": "ctorch\nSize\n((I1\nttR",
    "the class of sizes": "ctorch\nSize\n",
}


def test_what_a_checkpoint_sets_does_not_outlive_its_reading(saved: Path) -> None:
    good = pickle.loads((saved / METADATA).read_bytes())
    body, stored = pickle.dumps(good, protocol=2), pickle.dumps(good)
    for (what, found), name in product(OBJECTS.items(), ("_value_", "__qualname__", "__defaults__", "version")):
        for state in (f"(dV{name}\nVchanged\ns", f"(N(dV{name}\nVchanged\nst"):  # of `__dict__`, of slots
            (saved / METADATA).write_bytes(body[:2] + f"{found}{state}b0".encode() + body[2:])
            try:
                read_metadata(saved)
            except ValueError as error:
                assert re.search(r"cannot (be read safely|read its)", str(error))
            (saved / METADATA).write_bytes(pickle.dumps(good))  # as the next save does
            assert (saved / METADATA).read_bytes() == stored, f"{name} of {what}"
            assert read_metadata(saved).state_dict_metadata.keys() == good.state_dict_metadata.keys()
            for kind in (Metadata, MetadataIndex, _MEM_FORMAT_ENCODING, torch.Size):
                assert vars(kind).get(name) != "changed", f"{name} of {what}"


def test_what_early_python_3_11_wrote_is_read(saved: Path) -> None:
    get_state: Any = TensorProperties.__getstate__
    metadata = read_metadata(saved)
    with pytest.MonkeyPatch.context() as patch:
        member = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
        patch.setattr(
            TensorProperties,
            "__getstate__",
            lambda p: tuple(member if isinstance(v, _MEM_FORMAT_ENCODING) else v for v in get_state(p)),
        )
        (saved / METADATA).write_bytes(pickle.dumps(metadata))
    assert len({getattr(v, "size", None) for v in metadata.state_dict_metadata.values()}) > 2
    assert read_metadata(saved) == metadata


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "storage_data", None), "it holds a NoneType where a dict belongs"),
        (lambda m: m.state_dict_metadata.update(x=3), ".int. object has no attribute .state."),
        (lambda m: delattr(next(iter(m.state_dict_metadata.values())), "size"), "no 'size'"),
    ],
)
def test_metadata_of_another_form_is_refused_in_one_line(
    change: Callable[[Any], None], message: str, saved: Path
) -> None:
    metadata = read_metadata(saved)
    change(metadata)
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=rf"ckpt: torch \S+ cannot read its \.metadata \({message}"):
        read_metadata(saved)


def test_what_could_not_be_read_again_is_not_saved() -> None:
    with pytest.raises(TypeError, match=r"state_dict\.layer\._extra_state is a Evil, which a checkpoint cannot hold"):
        join_states({"layer.weight": torch.ones(1), "layer": {"_extra_state": Evil()}}, [])


ENTRIES = ("fit", "validate", "test", "predict", "export", "chat", "generate", "speak", "export-voice")


def write_command(entry: str, checkpoint: Path) -> list[str]:
    """Return the command line that reads a checkpoint."""
    if entry == "speak":
        return ["speak", f"--model={checkpoint}", "--out=spoken", "--text=hello", "--codec=formants"]
    if entry == "chat":
        return ["chat", f"--model={checkpoint}"]
    if entry == "generate":
        return ["generate", f"--model={checkpoint}", "--prompts=train.jsonl", "--out=out.jsonl"]
    if entry.startswith("export"):
        return [entry, f"--checkpoint={checkpoint}", "--out=out"]
    return [entry, "--config=run.yaml", f"--ckpt_path={checkpoint}", "--cpu_processes=1"]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a user, with a run that left a folder and a single file."""
    folder = tmp_path_factory.mktemp("user")
    write_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = fork_ranks("fit", "--config=run.yaml", "--trainer.max_steps=1")
        assert [rank.code for rank in ended] == [0, 0], ended[0].err
        shutil.copytree("runs/run/version_0/checkpoints/last.ckpt", "folder.ckpt")
    return folder


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.full(after=3)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ["extend_metadata", "replace_metadata", "replace_meta", "single file"])
def test_no_command_runs_what_a_checkpoint_holds(
    kind: str,
    entry: str,
    user: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(user, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("folder.ckpt")
    if kind == "single file":
        checkpoint = Path("file.ckpt")
        torch.save({"state_dict": {}, "callbacks": Evil()}, checkpoint)
    else:
        attack(checkpoint, kind)
    before = sorted(tmp_path.rglob("*"))
    assert main(write_command(entry, checkpoint)) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert checkpoint.name in line
    assert any(reason in line for reason in ("mkdir", "is a file: expected a folder", "no folder: expected one"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.full
@pytest.mark.parametrize("kind", ["replace_random_state", "replace_value"])
def test_neither_does_a_run_once_it_has_started(
    kind: str, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(user, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    attack(Path("folder.ckpt"), kind)
    ranks = fork_ranks("fit", "--config=run.yaml", "--ckpt_path=folder.ckpt")
    assert {rank.code for rank in ranks} == {2}
    (line,) = {line for rank in ranks for line in rank.errors}
    assert "folder.ckpt" in line
    assert "mkdir" in line
    assert not Path(MARKER).exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "change", "reason"),
    [
        (("fit", "--config=run.yaml", "--ckpt_path=folder.ckpt"), {"targets_seen": None}, "(no 'targets_seen')"),
        (
            ("fit", "--config=run.yaml", "--ckpt_path=folder.ckpt"),
            None,
            "meta.pt holds a list: expected a mapping",
        ),
        (
            ("export", "--checkpoint=folder.ckpt", "--out=out"),
            {"lora": {"targets": ["q_proj"]}, "base": {}},
            "argument 'targets'",
        ),
        (
            ("export-voice", "--checkpoint=folder.ckpt", "--out=out"),
            {"speech": {"speakers": {}}},
            "metadata has another form (no 'voices')",
        ),
    ],
)
def test_metadata_as_another_version_wrote_it_is_refused_in_one_line(
    command: tuple[str, ...],
    change: dict[str, Any] | None,
    reason: str,
    user: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(user, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def write(path: Path) -> None:
        meta = torch.load(path / META, weights_only=True) | (change or {})
        torch.save([] if change is None else {k: v for k, v in meta.items() if v is not None}, path / META)

    monkeypatch.setitem(ATTACKS, "write", write)
    attack(Path("folder.ckpt"), "write")
    ranks = fork_ranks(*command, ranks=2 if command[0] == "fit" else 1)
    assert {rank.code for rank in ranks} == {2}, ranks[0].err
    (line,) = {line.removeprefix("[rank 1] ") for rank in ranks for line in rank.errors}
    assert reason in line
