"""torchrun that loses ranks and nodes, and gets them back: the run goes on as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launches import OURS, ROOT, find_free_port, fork_ranks, write_run
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import Preemption, preemption
from lit_fsdp.strategy.elastic import advise_own_store, check_nodes, read_command
from lit_fsdp.strategy.trainer_settings import choose_accumulation, derive_accumulation
from ranks import run_ranks

NUM_STEPS = 40
# Writes the loss of each step by itself: loggers lose what they hold when a rank is killed.
TASK = """
import os, time
from pathlib import Path
from lit_fsdp.tasks import CausalLM

# Late enough for the other rank to find what the first one left in the store before it was started again.
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and os.environ["RANK"] == "0":
    time.sleep(4)

class Watched(CausalLM):
    def training_step(self, batch, batch_idx):
        # Slow from there on, so that what is to happen then happens in time.
        is_late = Path("limit").exists() and self.trainer.global_step >= int(Path("limit").read_text() or 0)
        time.sleep(1 if is_late else 0.05)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        step = self.trainer.global_step
        if self.trainer.is_global_zero and self.step_loss is not None and step != getattr(self, "written", 0):
            self.written = step
            with Path("losses").open("a") as file:
                file.write(f"{step} {self.trainer.world_size} {float(self.step_loss)} {os.getpid()}\\n")
"""
FIT = ("fit", "--config=run.yaml", "--model.class_path=watched.Watched")


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step of a run."""

    step: int
    world_size: int
    loss: float
    pid: int


def read_done() -> list[Done]:
    lines = Path("losses").read_text().splitlines() if Path("losses").exists() else []
    fields = [line.split() for line in lines if line.count(" ") == 3]
    return [Done(step=int(s), world_size=int(w), loss=float(x), pid=int(pid)) for s, w, x, pid in fields]


def configure(folder: Path) -> None:
    (folder / "watched.py").write_text(TASK)
    saves = {"every_n_train_steps": 5, "save_top_k": 2, "monitor": "step", "mode": "max"}
    checkpoint = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}
    trainer = {"max_steps": NUM_STEPS, "max_epochs": -1, "callbacks": [checkpoint]}
    # 8 rows a step, from 2 ranks or from 1; epochs of 7 steps, with 4 rows left over.
    write_run(folder, trainer=trainer, data={"batch_size": 2, "global_batch_size": 8})


@contextmanager
def agents(*options: str, **environ: str) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start agents of torchrun with one rank each, by name; what is left of them is killed in the end."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *options, "-m", "lit_fsdp", *FIT]

    def start(name: str) -> subprocess.Popen[bytes]:
        with Path(f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen([*command, "--ckpt_path=last"], env=environ, stdout=log, stderr=log))
        return started[-1]

    try:
        yield start
    finally:
        for agent in started:
            kill(*list_ranks(agent), agent.pid)
            agent.wait()


def list_ranks(agent: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def kill(*pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for(is_true: Callable[[], bool], agent: subprocess.Popen[bytes], timeout_s: float = 240) -> None:
    """Wait for something that happens while an agent lives."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if agent.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(read_logs())
        time.sleep(0.02)


def read_logs() -> str:
    return "".join(path.read_text()[-6000:] for path in Path.cwd().glob("*.log"))


def wait_for_step(step: int, world_size: int, agent: subprocess.Popen[bytes]) -> None:
    """Let the run come to a step, which has to be done by this many ranks, and be slow from there on."""
    Path("limit").write_text(str(step))
    wait_for(lambda: any(done.step == step and done.world_size == world_size for done in read_done()), agent)


@pytest.fixture
def truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The losses of an undisturbed run of one rank, in whose folder the test goes on."""
    monkeypatch.chdir(tmp_path)
    configure(tmp_path)
    (whole,) = fork_ranks(*FIT, "--run_name=whole", ranks=1)
    assert whole.code == 0, whole.err
    losses = {done.step: done.loss for done in read_done()}
    assert len(losses) == NUM_STEPS
    Path("losses").unlink()
    return losses


def check_losses(truth: dict[int, float]) -> None:
    steps = read_done()
    assert {done.step for done in steps} == set(truth)
    for done in steps:
        assert done.loss == pytest.approx(truth[done.step], rel=1e-6), done


@pytest.mark.full
def test_a_resumed_run_saves_no_checkpoint_between_the_micro_batches_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configure(tmp_path)
    for num_steps in (5, 6):  # the second run begins at a step of which a checkpoint was due
        (ended,) = fork_ranks(*FIT, f"--trainer.max_steps={num_steps}", "--ckpt_path=last", ranks=1)
        assert ended.code == 0, ended.err
    saved = sorted(str(path.relative_to("runs/run")) for path in Path("runs/run").glob("*/checkpoints/*"))
    last = "version_1/checkpoints/epoch=1-step=6.ckpt"  # at the end, as the second run has saved nothing by then
    assert saved == ["version_0/checkpoints/epoch=0-step=5.ckpt", last]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_in_the_store_of_its_agent(truth: dict[int, float]) -> None:
    with agents("--standalone", "--nproc-per-node=2", "--max-restarts=1") as start:
        agent = start("agent")
        wait_for_step(8, 2, agent)
        kill(list_ranks(agent)[1])
        num_done = len(read_done())
        wait_for(lambda: len(read_done()) > num_done + 1, agent)
        Path("limit").unlink()
        assert agent.wait(240) == 0, read_logs()
    check_losses(truth)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node", "agent", "first node"])
def test_nodes_and_ranks_that_are_killed_and_come_back_leave_no_trace_in_the_losses(
    truth: dict[int, float], lost: str
) -> None:
    port, is_host = find_free_port(), lost != "first node"
    options = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    options += [
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf=last_call_timeout=2{'' if is_host else ',is_host=0'}",
    ]
    Path("limit").write_text("0")
    with ExitStack() as stack:
        if not is_host:  # as docs/several_machines.md has it
            code = f"from torch.distributed import TCPStore as S; s = S('0.0.0.0', {port}, is_master=True); input()"
            store = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            stack.callback(lambda: store.communicate(b"\n"))
        start = stack.enter_context(agents(*options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
        stays = start("first")
        wait_for(lambda: bool(list_ranks(stays)), stays)
        goes = start("second")
        if lost == "first node":
            goes, stays = stays, goes
        wait_for_step(8, 2, stays)
        kill(goes.pid, *(list_ranks(goes) if lost != "agent" else ()))
        wait_for_step(12, 1, stays)
        repeated = [step for step, times in Counter(done.step for done in read_done()).items() if times > 1]
        assert repeated == ([6, 7, 8] if lost != "agent" else [])  # ranks without an agent save before they end
        shrunk = len(read_done())
        third = start("third")  # a node comes: nothing is lost
        wait_for(lambda: read_done()[-1].world_size == 2, stays)
        grown = [done.step for done in read_done()[shrunk - 1 :]]
        assert grown == list(range(grown[0], grown[-1] + 1))
        assert grown[-1] < NUM_STEPS - 6
        wait_for_step(grown[-1] + 3, 2, stays)
        kill(*list_ranks(third))  # a rank alone: its agent starts it again
        num_done = len(read_done())
        wait_for(lambda: len(read_done()) > num_done + 1 and read_done()[-1].world_size == 2, stays)
        Path("limit").unlink()
        assert [agent.wait(240) for agent in (stays, third)] == [0, 0], read_logs()
    check_losses(truth)


def test_a_changing_number_of_nodes_is_refused_with_the_command_that_works() -> None:
    torchrun = ["python", "-m", "torch.distributed.run"]
    message = "start each of them as TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 ..."
    for command in ([*torchrun, "--nnodes=1:4", "-m", "lit_fsdp"], [*torchrun, "--nnodes", "1:4"]):
        with pytest.raises(ValueError, match=message):
            check_nodes({}, command)
    with pytest.raises(ValueError, match=message):
        check_nodes({"PET_NNODES": "1:4"}, torchrun)
    for fixed in ("2", "2:2"):
        check_nodes({}, [*torchrun, f"--nnodes={fixed}"])
    check_nodes({}, [])
    three = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "3"}
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in advise_own_store(three | shared)
    assert advise_own_store(three) == advise_own_store(three | shared | {"GROUP_WORLD_SIZE": "1"}) == ""


def test_a_command_line_in_other_letters_is_read() -> None:
    with subprocess.Popen([b"cat", b"-", b"\xff"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 10
        while read_command(process.pid) == [""] and time.monotonic() < deadline:
            time.sleep(0.01)  # until the system knows it
        assert read_command(process.pid)[:2] == ["cat", "-"]


@pytest.mark.parametrize(
    ("agents", "restarts", "code"),
    [(1, 0, 0), (2, 0, 75), (2, 3, 0)],
    ids=["one node", "the node stays", "no restart is left"],
)
def test_only_a_rank_that_its_node_will_start_again_ends_as_one_that_failed(
    agents: int, restarts: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_MAX_RESTARTS": 3, "GROUP_WORLD_SIZE": agents}
    for name, count in counts.items():
        monkeypatch.setenv(name, str(count))
    monkeypatch.setattr(preemption, "_PATIENCE_S", 0.05)
    for signals, expected in (([], code), ([signal.SIGTERM], 0)):
        callback = Preemption()
        trainer = build_trainer(1, callback)
        callback.listen(trainer)
        try:
            for number in signals:
                os.kill(os.getpid(), number)
            callback.is_preempted = True
            with pytest.raises(SIGTERMException) as stop:
                callback.on_train_batch_start(trainer, None, None, 0)  # type: ignore[arg-type]
        finally:
            callback.teardown(trainer, None, "fit")  # type: ignore[arg-type]
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert stop.value.code == expected


def build_trainer(world_size: int, *callbacks: pl.Callback, **options: int) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "callbacks": list(callbacks)}
    return pl.Trainer(accelerator="cpu", devices=world_size, strategy=FSDP2Strategy(), **quiet, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("world_size", "expected"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_global_batch_stays_on_another_number_of_ranks(world_size: int, expected: int) -> None:
    trainer = build_trainer(world_size)
    data = SimpleNamespace(batch_size=2, global_batch_size=16)
    for _ in range(2):  # the command line asks first, then the strategy
        derive_accumulation(trainer, data, is_resumed=False)
        assert trainer.accumulate_grad_batches == expected


def test_the_data_of_a_later_fit_has_its_own_global_batch() -> None:
    trainer = build_trainer(2)
    found = []
    for batch_size, rows in ((2, 16), (2, 8), (1, 8), (1, None), (2, 16)):
        data = SimpleNamespace(batch_size=batch_size, global_batch_size=rows)
        derive_accumulation(trainer, data, is_resumed=None)
        found.append(trainer.accumulate_grad_batches)
    assert found == [4, 2, 4, 1, 4]
    trainer.accumulate_grad_batches = 3
    derive_accumulation(trainer, SimpleNamespace(batch_size=2), is_resumed=None)
    assert trainer.accumulate_grad_batches == 3  # what was set since stays


def test_a_global_batch_that_the_ranks_cannot_share_is_refused_or_on_a_resume_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = SimpleNamespace(batch_size=2, global_batch_size=16)
    message = r"global_batch_size: got 16: expected a multiple of 6 \(batch_size 2 x 3 ranks\), such as 12 or 18"
    with pytest.raises(ValueError, match=message):
        derive_accumulation(build_trainer(3), data, is_resumed=False)
    trainer = build_trainer(3)
    with pytest.warns(UserWarning, match=f"{message}; this start takes 18"):
        derive_accumulation(trainer, data, is_resumed=True)
    assert trainer.accumulate_grad_batches == 3
    for name, value in {"RESTART_COUNT": "0", "MAX_RESTARTS": "2"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    with pytest.warns(UserWarning, match="this start takes 18"):
        derive_accumulation(build_trainer(3), data, is_resumed=False)
    assert choose_accumulation(4, batch_size=4, num_ranks=3) == (
        1,
        "global_batch_size: got 4: expected a multiple of 12 (batch_size 4 x 3 ranks), such as 12",
    )


def test_a_global_batch_beside_an_accumulation_or_without_a_batch_size_is_refused() -> None:
    data = SimpleNamespace(batch_size=2, global_batch_size=8)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches: set \(4\) beside data.global_batch_size 8"):
        derive_accumulation(build_trainer(1, accumulate_grad_batches=4), data, is_resumed=False)
    with pytest.raises(ValueError, match="global_batch_size: got 8: needs batch_size, the rows in a micro-batch"):
        derive_accumulation(build_trainer(1), SimpleNamespace(global_batch_size=8), is_resumed=False)


@pytest.mark.full
def test_a_resume_from_python_takes_the_nearest_global_batch_and_a_fresh_run_is_refused(tmp_path: Path) -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

        test_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(pl.LightningDataModule):
        global_batch_size = 4

        def __init__(self, batch_size: int) -> None:
            super().__init__()
            self.batch_size = batch_size

        def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
            return torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=self.batch_size)  # type: ignore[arg-type]

        test_dataloader = train_dataloader

    def check() -> None:
        trainer = build_trainer(1, max_steps=1)
        trainer.fit(Module(), Data(2))
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        fresh = build_trainer(1, max_steps=2)
        with pytest.raises(ValueError, match="global_batch_size: got 4: expected a multiple of 3"):
            fresh.fit(Module(), Data(3))
        with pytest.warns(UserWarning, match="such as 3 or 6; this start takes 3"):
            fresh.fit(Module(), Data(3), ckpt_path=tmp_path / "run.ckpt")
        assert fresh.global_step == 2
        fresh.fit_loop.epoch_loop.max_steps = 3
        with pytest.raises(ValueError, match="global_batch_size: got 4: expected a multiple of 3"):
            fresh.fit(Module(), Data(3))  # after a resumed one
        tested = build_trainer(1, max_steps=1)
        tested.test(Module(), Data(3), ckpt_path=tmp_path / "run.ckpt")
        with pytest.raises(ValueError, match="global_batch_size: got 4: expected a multiple of 3"):
            tested.fit(Module(), Data(3))

    run_ranks(check, world_size=1)
