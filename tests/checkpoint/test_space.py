"""A run knows before its first step whether its checkpoints fit, and does not end well if the last one did not."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixed_gradients import build_weights, run_steps, shard
from launches import fork_ranks, write_run
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core import rank_zero
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lit_fsdp.checkpoint import space
from lit_fsdp.checkpoint import writer as writer_module
from lit_fsdp.checkpoint.latest import is_whole
from lit_fsdp.checkpoint.manifest import is_complete
from lit_fsdp.checkpoint.sharded import save_checkpoint
from lit_fsdp.checkpoint.space import DiskSpace, estimate_state_bytes
from lit_fsdp.checkpoint.writer import CheckpointWriter
from lit_fsdp.optim.adafactor import Adafactor
from lit_fsdp.optim.adamw_8bit import AdamW8bit
from lit_fsdp.optim.muon import Muon
from lit_fsdp.strategy.trainer_settings import count_checkpoints
from ranks import run_ranks

Build = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": Adafactor,
    "muon": lambda p: Muon([{"params": [w], "is_hidden": w.ndim == 2} for w in p]),
    "8bit": lambda p: AdamW8bit(p, lr=0.1),
}


def count(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_will_keep_is_known_without_a_step(name: str) -> None:
    model = nn.Linear(1024, 64)
    model.weight.requires_grad_(name != "adamw")
    optimizer = OPTIMIZERS[name](model.parameters())
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    of_all = register_optimizer_step_post_hook(lambda *_: called.append(2))
    before = model.weight.clone()
    estimate = estimate_state_bytes([optimizer])
    of_all.remove()
    assert not optimizer.state
    assert not called
    assert torch.equal(model.weight, before)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    assert estimate == pytest.approx(count(optimizer), abs=8)  # but for the counts of steps
    assert estimate_state_bytes([optimizer]) == count(optimizer)


@pytest.mark.parametrize("name", ["adafactor", "muon", "8bit"])
def test_the_state_of_shards_is_counted_without_memory(name: str) -> None:
    def body() -> None:
        module = shard(build_weights())
        optimizer: Any = OPTIMIZERS[name](module.parameters())
        make, made = optimizer.make_state, []
        optimizer.make_state = lambda *given: made.append(make(*given)) or made[-1]
        optimizer._is_paged = True  # pages are for GPUs, and never given back
        estimate = estimate_state_bytes([optimizer])
        assert all(tensor.is_meta for tensors in made for tensor in tensors)
        optimizer._is_paged = False
        run_steps(module, optimizer, range(1))
        assert estimate == estimate_state_bytes([optimizer]) - 4 * len(optimizer.state)  # the counts of steps

    run_ranks(body)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and says itself what a copy of it holds."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_no_inner_optimizer_steps_before_the_first_step() -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    stepped: list[int] = []
    inner.register_step_post_hook(lambda *_: stepped.append(1))
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.clone()
    assert estimate_state_bytes([Lookahead(inner)]) is None
    assert not stepped
    assert torch.equal(model.weight, before)


def test_what_only_a_step_can_tell_is_said() -> None:
    assert estimate_state_bytes([torch.optim.LBFGS(nn.Linear(2, 2).parameters())]) is None
    space = DiskSpace(
        folder=Path("a"),
        checkpoint_bytes=2**30,
        is_least=True,
        num_at_once=3,
        bytes_at_once=3 * 2**30,
        free_bytes=2**31,
    )
    assert str(space) == "a checkpoint takes at least 1.00 GiB, 2.00 GiB are free"
    assert "up to 3 lie there at once" in (space.describe_shortage() or "")


def run(folder: Path, frees: list[int], *options: str) -> tuple[list[Any], list[Path]]:
    """Run two ranks that are told these numbers of free bytes one after the other, the last for ever."""
    write_run(folder, trainer={"max_steps": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(rank_zero, "rank_zero_warn", rank_zero.rank_zero_info)  # pytest keeps warnings of forked ranks
        free = "lit_fsdp.checkpoint.writer.measure_free"
        patch.setattr(free, lambda _: frees.pop(0) if len(frees) > 1 else frees[0])
        ranks = fork_ranks("fit", "--config=run.yaml", *options)
    return ranks, [
        path for path in folder.glob("runs/run/version_*/checkpoints/*") if path.is_dir() and not path.is_symlink()
    ]


@pytest.mark.full
def test_a_disk_that_gets_full_ends_the_run_with_a_line_and_an_exit_code(tmp_path: Path) -> None:
    ranks, checkpoints = run(tmp_path, [2**40, 1000], "--monitoring=true")
    assert [rank.code for rank in ranks] == [1, 1]
    assert checkpoints == []
    (line,) = [line for rank in ranks for line in rank.errors]
    assert "step=3.ckpt could not be saved" in line
    assert "3 (now at 3)" in ranks[0].out  # the summary
    assert "1024.00 GiB are free at the start" in ranks[0].out
    assert "NOT saved" in ranks[0].out
    (report,) = tmp_path.glob("runs/run/version_0/report.html")
    assert "NOT saved" in report.read_text()


@pytest.mark.full
def test_a_disk_without_room_for_one_checkpoint_is_refused_before_the_first_step(tmp_path: Path) -> None:
    ranks, checkpoints = run(tmp_path, [1000])
    assert [rank.code for rank in ranks] == [2, 2]
    assert checkpoints == []
    assert "is too full for one: a checkpoint takes 0.00 GiB" in ranks[0].errors[0]
    assert "free 0.06 GiB, set dirpath" in ranks[0].errors[0]
    assert "Run summary" not in ranks[0].out
    ranks, _ = run(tmp_path, [1000], "--trainer.enable_checkpointing=false")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err


def test_a_folder_that_may_not_be_written_to_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, model = CheckpointWriter(is_async=False, report=print), nn.Linear(2, 2)
    asked: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, _: asked.append(path))
    with pytest.raises(ValueError, match=r"^checkpoints: \S*/new cannot be written to: set dirpath"):
        writer.measure_space([tmp_path / "new"], (1, 0), model, [])
    assert asked == [tmp_path]  # where it would be made


def test_the_estimate_is_what_is_written(tmp_path: Path) -> None:
    model = nn.Linear(1024, 2048)
    model.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    writer = CheckpointWriter(is_async=False, report=print)
    space = writer.measure_space([tmp_path / "not" / "there"], (2, 1), model, [optimizer], extra_bytes=7)
    alone = writer.measure_space([tmp_path], (0, 3), model, [torch.optim.LBFGS(model.parameters())], extra_bytes=7)
    assert alone is not None
    assert alone.checkpoint_bytes == sum(p.nbytes for p in model.parameters())
    assert (alone.is_least, alone.num_at_once, alone.bytes_at_once) == (False, 3, 3 * alone.checkpoint_bytes)
    assert space is not None
    assert (space.num_at_once, space.bytes_at_once) == (3, 2 * space.checkpoint_bytes + alone.checkpoint_bytes)
    assert not (tmp_path / "not").exists()
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    states = [writer.get_optimizer_state(model, optimizer)]
    assert writer.save(tmp_path / "a", {"state_dict": writer.get_model_state(model), "optimizer_states": states})
    written = sum(file.stat().st_size for file in (tmp_path / "a").glob("*.distcp"))
    assert space.checkpoint_bytes == pytest.approx(written, rel=0.01)


def test_savers_of_weights_alone_are_counted_apart(tmp_path: Path) -> None:
    def count(*savers: ModelCheckpoint) -> tuple[int, int]:
        return count_checkpoints(Trainer(callbacks=list(savers), logger=False, default_root_dir=tmp_path))

    def saver(name: str, **options: Any) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / name, monitor=name, **options)

    weights = saver("a", save_weights_only=True, save_top_k=3)
    assert count(weights) == (0, 4)
    assert count(weights, saver("b", save_top_k=2, save_last=True)) == (4, 3)
    assert count(saver("c", save_top_k=0)) == (0, 0)


@pytest.mark.full
def test_a_disk_with_room_for_one_but_not_for_all_is_said_once(tmp_path: Path) -> None:
    size = ["--model.init_args.config.hidden_size=256"]
    ranks, checkpoints = run(tmp_path, [72 * 2**20], *size)  # 7.5 MiB each
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    assert len(checkpoints) == 1
    assert [rank.err.count("may get too full") for rank in ranks] == [1, 0]
    assert "up to 2 lie there at once" in ranks[0].err


SCRIPT = """
import shutil, sys
import lightning.pytorch as pl, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_fsdp import FSDP2Strategy

out, is_saved = sys.argv[1], sys.argv[2] == "saved"
strategy = FSDP2Strategy(print_plan=False)
saver = ModelCheckpoint(dirpath=out, every_n_train_steps=2)
trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=[saver], max_steps=2, logger=False)
usage, frees = shutil.disk_usage, [2**40]
shutil.disk_usage = lambda path: usage(path)._replace(free=frees.pop() if frees else 1000)
trainer.fit(BoringModel())
print("fit has returned")
if is_saved:
    shutil.disk_usage = usage
    trainer.save_checkpoint(out + "/elsewhere")
"""


@pytest.mark.full
def test_a_script_whose_last_checkpoint_is_missing_ends_with_a_line_and_code_1_unless_it_saves(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for word, code in (("lost", 1), ("saved", 0)):
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / word), word]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == code, ended.stderr
        assert "fit has returned" in ended.stdout
        assert ("error: " in ended.stderr and "could not be saved" in ended.stderr) == (code == 1)
        assert (tmp_path / word / "elsewhere").exists() == (code == 0)


def save_in_own_folders(folder: Path, shares: bool) -> None:
    """Write on each rank in a folder of this machine, as a path of the same name on machines that share no disk."""
    own = folder if shares else folder / str(dist.get_rank())
    own.mkdir(exist_ok=True)
    os.chdir(own)
    model = nn.Linear(4, 4)
    writer = CheckpointWriter(is_async=False, report=print)
    path = Path("runs/checkpoints/step=1.ckpt")
    begin = partial(writer.measure_space, [path.parent], (1, 0), model, [])
    save = partial(save_checkpoint, path, {"state_dict": {str(dist.get_rank()): torch.ones(3)}}, meta={})
    if shares:
        begin()
        save()
        assert is_complete(path)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(space, "_PATIENCE_S", 0.2)
            with pytest.raises(ValueError, match=r"runs/checkpoints on .* is not the one on .* where rank"):
                begin()
            with pytest.raises(RuntimeError, match=r"step=1.ckpt lacks the files of other machines"):
                save()
        assert not path.exists()
    assert not list(Path().rglob(".shared-*"))


@pytest.mark.parametrize("shares", [True, False])
def test_machines_with_a_folder_each_save_nothing_that_looks_complete(tmp_path: Path, shares: bool) -> None:
    run_ranks(save_in_own_folders, tmp_path, shares)


def save_beside_a_full_disk(folder: Path) -> None:
    model, path = nn.Linear(4, 4), folder / "checkpoints" / "step=1.ckpt"
    writer = CheckpointWriter(checkpoint_format="single_file", is_async=False, report=pytest.fail)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(writer_module, "measure_free", lambda _: 0)
        found = writer.measure_space([path.parent], (1, 0), model, [])
        assert found is not None
        found.check()
        assert writer.save(path, {"state_dict": writer.get_model_state(model), "optimizer_states": []})


def test_a_single_file_needs_no_room_on_machines_that_do_not_write_it(tmp_path: Path) -> None:
    run_ranks(save_beside_a_full_disk, tmp_path)
    assert is_whole(tmp_path / "checkpoints" / "step=1.ckpt")
