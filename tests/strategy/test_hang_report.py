"""A rank that others wait for is named, with what it does; the run itself is left alone."""

import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launches import fork_ranks, write_run
from lightning.pytorch import Trainer
from training import EVEN, GLOBAL_BATCH, NUM_STEPS, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.profiling import flight_recorder
from lit_fsdp.strategy import hang_watch
from lit_fsdp.strategy.hang_report import RankReport, Wait, describe_hang, read_report, write_report
from lit_fsdp.strategy.hang_watch import choose_report_s
from lit_fsdp.strategy.roll_call import wait_until
from ranks import run_ranks

REPORT_S = 0.8
TASK = """
import os, threading, time
from pathlib import Path
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from lit_fsdp.strategy import hang_watch
from lit_fsdp.tasks import CausalLM, TextData

SLEPT = set()
REPORTED = threading.Event()  # a while after this rank has answered an alarm, however busy the machine is
format_stacks = hang_watch.format_stacks

def format_and_wake(*args):
    threading.Timer(1.5, REPORTED.set).start()
    return format_stacks(*args)

hang_watch.format_stacks = format_and_wake

class LoneTask(CausalLM):
    def __init__(self, *, fault: str, **kwargs):
        super().__init__(**kwargs)
        self.fault = fault

    def is_due(self, fault, step):
        is_due = self.fault == fault and self.trainer.global_rank == 1 and self.trainer.global_step == step
        is_first = step not in SLEPT
        SLEPT.update([step] * is_due)
        if is_due and is_first:
            REPORTED.clear()
        return is_due and is_first

    def setup(self, stage):
        super().setup(stage)
        if self.fault == "sleep":
            dist.new_group([0], backend="gloo")  # one that rank 1 is not in, as a mesh has
        if self.is_due("sleep", 0):
            REPORTED.wait(60)  # in setup

    def training_step(self, *args, **kwargs):
        if self.is_due("sleep", 1):
            REPORTED.wait(60)  # in training_step
        if self.fault == "sleep" and self.trainer.global_step == 3:
            self.make_group()
        if self.is_due("skip", 2):
            del self.model.model.layers[1]
        if self.fault == "send":
            Path(f"{self.trainer.global_rank}.pid").write_text(str(os.getpid()))
            time.sleep(0.1)
        return super().training_step(*args, **kwargs)

    def make_group(self):
        if self.is_due("sleep", 3):
            REPORTED.wait(60)  # before new_group
        dist.new_group(backend="gloo")

    def validation_step(self, *args, **kwargs):
        if self.is_due("sleep", 2):
            REPORTED.wait(60)  # in validation_step
        return super().validation_step(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        if self.is_due("sleep", 4):
            REPORTED.wait(60)  # in on_save_checkpoint

class SlowSaver(CausalLM):
    def configure_model(self):
        super().configure_model()
        write = FileSystemWriter.write_data

        def write_slowly(*args, **kwargs):
            time.sleep(3 * self.trainer.global_rank)
            return write(*args, **kwargs)

        FileSystemWriter.write_data = write_slowly

    def training_step(self, *args, **kwargs):
        time.sleep(0.15)
        return super().training_step(*args, **kwargs)

class LoneData(TextData):
    def train_dataloader(self):
        loader, task = super().train_dataloader(), self.trainer.lightning_module
        collate = loader.collate_fn
        def collate_late(rows):
            if task.is_due("sleep", 5):
                REPORTED.wait(60)  # in a loader
            return collate(rows)
        loader.collate_fn = collate_late
        return loader
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    saves = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_train_steps": 4}}
    strategy = {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": {"hang_report_s": REPORT_S, "timeout_s": 60}}
    trainer = {"val_check_interval": 2, "max_epochs": -1, "callbacks": [saves], "strategy": strategy, "max_steps": 6}
    write_run(tmp_path, trainer=trainer, data={"validation": "train.jsonl"})
    (tmp_path / "lone.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(fault: str) -> Sequence[str]:
    task = ("--model.class_path=lone.LoneTask", f"--model.fault={fault}", "--data.class_path=lone.LoneData")
    return ("fit", "--config=run.yaml", *task)


def read_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("hang: ")]


def find_line(comment: str) -> int:
    return next(i for i, line in enumerate(TASK.splitlines(), start=1) if comment in line)


@pytest.mark.full
def test_a_rank_that_sleeps_is_named_with_what_it_does(folder: Path) -> None:
    first, second = fork_ranks(*options("sleep"), timeout_s=400)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert read_lines(second.err) == []  # rank 0 says it for all
    lines = read_lines(first.err)
    gathers = "all_gather of unit model.model.embed_tokens"
    expected = (
        ("barrier", "step 0 in training", "in setup"),
        (gathers, "step 1 in training_step", "in training_step"),
        (gathers, "step 2 in validation_step", "in validation_step"),
        ("new_group", "step 3 in training_step", "before new_group"),
        ("broadcast", "step 4 in training", "in on_save_checkpoint"),
        (gathers, "step 5 in data loading", "in a loader"),
    )
    for call, step, comment in expected:
        place = rf"rank 1 on \S+, which is at {step} \(lone.py:{find_line(comment)} in \w+\)"
        line = re.compile(rf"hang: rank 0 has waited \d+ s in {call} at step \d for {place}; stacks")
        # Once, with the line that says it is over right behind. A busy machine may be late elsewhere too.
        (index,) = [i for i, said in enumerate(lines) if line.match(said)]
        assert re.fullmatch(r"hang: over: the run went on after \d+ s", lines[index + 1])
    # Every rank has written where it was, and the first hang was before the run had a folder.
    for rank, place in enumerate(("unit model.model.embed_tokens", "REPORTED.wait(60)  # in validation_step")):
        text = next(folder.rglob(f"hang_rank{rank}.txt")).read_text()
        assert text.count("thread MainThread:") >= 5
        assert place in text
        assert "last collectives:" in text
    assert "REPORTED.wait(60)  # in setup" in second.err


@pytest.mark.full
def test_a_slow_save_beside_training_is_no_hang_while_training_goes_on(folder: Path) -> None:
    saves = ("--trainer.callbacks.init_args.every_n_train_steps=20", "--trainer.strategy.async_save=true")
    task = ("--model.class_path=lone.SlowSaver", "--trainer.max_steps=44", "--trainer.val_check_interval=null")
    first, second = fork_ranks("fit", "--config=run.yaml", *task, *saves, timeout_s=120)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    # In steps 20 to 40 there is none; then all wait until the second save can begin, and for the last one.
    assert not [line for line in read_lines(first.err + second.err) if "different" in line or "training_step" in line]


@pytest.mark.full
def test_a_rank_that_skips_a_unit_is_told_from_the_others(folder: Path) -> None:
    def end(pids: list[int]) -> None:
        def is_written() -> bool:
            texts = [path.read_text() for path in folder.rglob("hang_rank*.txt")]
            return any("reduce_scatter" in text for text in texts) and len(texts) == 2

        assert wait_until(is_written, 60)
        time.sleep(5 * REPORT_S)  # until it is said; the ranks would hang until timeout_s
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    # Both send as many bytes: gloo ends a process that receives more than it waits for.
    sizes = ("--model.config.intermediate_size=73", "--model.config.vocab_size=318")
    first, _ = fork_ranks(*options("skip"), *sizes, meanwhile=end)
    line = read_lines(first.err)[-1]
    # The one that rank 1 has skipped, and what it does instead.
    waits = r"rank 0 in all_gather of unit model.model.layers.1, rank 1 in reduce_scatter of unit model"
    assert re.match(rf"hang: ranks have waited \d+ s in different collectives: {waits}", line)
    assert re.search(r"collective \d+ of their group was the first to differ: gloo:all_gather .* on rank 0", line)


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_gone_is_named_once(folder: Path, number: signal.Signals, rank: int) -> None:
    def send(pids: list[int]) -> None:
        assert wait_until((folder / f"{rank}.pid").exists, 60)
        time.sleep(0.3)
        os.kill(pids[rank], number)
        if number == signal.SIGSTOP:
            assert wait_until(lambda: any(folder.rglob(f"hang_rank{1 - rank}.txt")), 60)
            time.sleep(5 * REPORT_S)  # until it is said
            os.kill(pids[rank], signal.SIGCONT)

    report_s = REPORT_S if number == signal.SIGSTOP else 10
    more = f"--trainer.strategy.hang_report_s={report_s}"
    ranks = fork_ranks(*options("send"), more, timeout_s=90, meanwhile=send)
    gone, left = ranks[rank], ranks[1 - rank]
    if number == signal.SIGKILL:  # gloo sees it at once, so there is nothing to add
        assert (gone.code, left.code) == (-signal.SIGKILL, 1)
        assert len(left.errors) == 1
        assert "another rank failed first" in left.errors[0]
        # Of which torch would write 40 lines at each look. One may be under way when rank 0 ends.
        assert left.err.count("TCPStore.cpp") <= 1
        assert read_lines(left.err) == []
        return
    assert (gone.code, left.code) == (0, 0), gone.err + left.err
    lines = read_lines(left.err)
    said = re.compile(
        r"hang: rank 0 has waited \d+ s in .* at step \d for rank 1, which does not answer: it has ended, is"
    )
    (index,) = [i for i, line in enumerate(lines) if said.match(line)]
    assert re.search(r"\(last seen at step \d in (training|validation)\)", lines[index])
    assert lines[index + 1].startswith("hang: over: the run went on after ")
    assert read_lines(gone.err) == []


def make_report(rank: int, *, waits: Sequence[Wait] = (), **changes: Any) -> RankReport:
    begun = {wait.group: wait.number for wait in waits} | changes.pop("begun", {})
    history = {wait.group: [(wait.number, wait.operation)] for wait in waits}
    fields: dict[str, Any] = {"step": 12, "activity": "training", "place": "a.py:3 in f", "unit": None, "call": None}
    fields["host"] = f"node{rank // 2}"
    fields |= {
        "waits": list(waits),
        "is_waiting": bool(waits),
        "begun": begun,
        "history": history,
        "host": f"node{rank // 2}",
    }
    report = RankReport(rank=rank, **{**fields, **changes})
    assert read_report(write_report(report)) == report
    return report


def describe(*reports: RankReport, world_size: int = 4, last_seen: dict[int, str] | None = None) -> str:
    return describe_hang(reports, world_size=world_size, waited_s=301.4, last_seen=last_seen or {})


def make_wait(group: str, ranks: Sequence[int], number: int, operation: str = "nccl:all_gather") -> Wait:
    return Wait(group=group, ranks=list(ranks), number=number, operation=operation)


def test_ranks_that_wait_for_one_that_waits_name_the_one_it_waits_for() -> None:
    # Shards over 0, 1 and 2, 3; replicas over 0, 2 and 1, 3. Only rank 3 is late, rank 0 is two collectives from it.
    reports = [
        make_report(0, waits=[make_wait("across_0", (0, 2), 5)], begun={"inside_0": 10}, unit="layers.1"),
        make_report(1, waits=[make_wait("across_1", (1, 3), 5)], begun={"inside_0": 10}),
        make_report(2, waits=[make_wait("inside_1", (2, 3), 10)], begun={"across_0": 4}),
        make_report(3, begun={"inside_1": 9, "across_1": 4}, activity="data loading", place="rows.py:7 in __getitem__"),
    ]
    line = describe(*reports)
    late = "for rank 3 on node1, which is at step 12 in data loading (rows.py:7 in __getitem__)"
    assert line == f"ranks 0-2 have waited 301 s in nccl:all_gather (rank 1) at step 12 {late}"


def test_a_save_beside_training_does_not_hide_who_is_late() -> None:
    save, gather = make_wait("gloo 3", range(2), 2, "gloo:all_gather"), make_wait("nccl 0", range(2), 40)
    first = make_report(0, waits=[save, gather])
    # What a side thread waits in does not hold the run back.
    late = make_report(1, waits=[save], begun={"nccl 0": 39}, is_waiting=False, activity="an export")
    assert "for rank 1 on node0, which is at step 12 in an export" in describe(first, late, world_size=2)


def test_of_two_backends_that_wait_the_collective_that_began_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the host goes on behind a gather of NCCL, up to what ranks compare over gloo."""

    def make_entry(number: int, at_ns: int) -> dict[str, Any]:
        where = {"pg_id": 0, "process_group": ["0", ""], "thread_id": "1", "is_p2p": False}
        sizes = {"input_sizes": [[2]], "output_sizes": [[4]]}
        state = {"retired": False, "state": "started", "profiling_name": "gather", "time_created_ns": at_ns}
        return {**where, **sizes, **state, "collective_seq_id": number}

    dumps = {"gloo": [make_entry(7, 200)], "nccl": [make_entry(40, 100), make_entry(41, 300)]}
    recorders = {name: partial(lambda text, *_: text, json.dumps({"entries": dumps[name]})) for name in dumps}
    monkeypatch.setattr(flight_recorder, "_RECORDERS", recorders)
    known = flight_recorder.list_collectives()
    assert [collective.number for collective in known] == [40, 7, 41]
    begun = hang_watch.list_begun(known, {(collective.key, collective.number) for collective in known})
    assert [(collective.group, collective.number) for collective in begun] == [("nccl 0", 40), ("gloo 0", 7)]


def test_many_late_and_silent_ranks_are_named_shortly() -> None:
    waits = [make_wait("nccl 0", range(8), 7)]
    line = describe(make_report(0, waits=waits), make_report(1), world_size=8, last_seen={2: "at step 11 in training"})
    assert "rank 1 on node0, which is at" in line
    assert "rank 2, which does not answer" in line
    assert "(last seen at step 11 in training)" in line
    assert "rank 3, which has not come to this run: its script is somewhere else still" in line  # such as between runs
    assert line.endswith(" and ranks 5-7")


def test_a_collective_that_all_have_come_to_blames_nobody() -> None:
    waits = [make_wait("nccl 0", range(4), 7)]
    line = describe(*(make_report(rank, waits=waits) for rank in range(4)))
    assert line == "all ranks have come to nccl:all_gather, which is not over after 301 s: see what slows it"


def test_collectives_that_differ_under_one_number_are_told_apart() -> None:
    """Nobody is behind: both have begun the seventh of their group."""
    reports = [make_report(rank, waits=[make_wait("nccl 0", range(2), 7, f"nccl:op{rank}")]) for rank in range(2)]
    line = describe(*reports, world_size=2)
    assert "different collectives: rank 0 in nccl:op0, rank 1 in nccl:op1; collective 7 of their group was" in line


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"hang_report_s": 0}, "hang_report_s: got 0: expected seconds above 0, auto, or null for no report"),
        ({"hang_report_s": math.nan}, "hang_report_s: got nan: expected seconds above 0"),
        (
            {"hang_report_s": 300.0, "timeout_s": 100.0},
            "hang_report_s: got 300: the run fails after timeout_s 100 already: set it to 50, or to",
        ),
    ],
)
def test_a_report_that_could_never_come_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Trainer(strategy=FSDP2Strategy(**settings), accelerator="cpu", devices=2, logger=False)
    Trainer(strategy=FSDP2Strategy(**settings | {"hang_report_s": None}), accelerator="cpu", devices=2, logger=False)


def test_a_short_timeout_brings_the_report_forward() -> None:
    assert [choose_report_s("auto", timeout_s) for timeout_s in (1800.0, 600.0, 100.0)] == [300.0, 300.0, 50.0]
    assert choose_report_s(400.0, 1800.0) == 400.0
    Trainer(strategy=FSDP2Strategy(timeout_s=100.0), accelerator="cpu", devices=2, logger=False)


def count(calls: list[str], name: str, ask: Callable[..., Any], *args: Any) -> Any:
    calls.append(name)
    return ask(*args)


def test_watching_costs_a_step_nothing(tmp_path: Path) -> None:
    """Counted: what the watch asks grows with time, not with steps, and nothing is hooked to the model."""

    def body(folder: Path) -> None:
        calls: list[str] = []
        for name in ("count_collectives", "list_collectives", "find_position"):
            ask = getattr(hang_watch, name)
            setattr(hang_watch, name, partial(count, calls, name, ask))
        num_hooks = []
        for report_s in (None, 300.0):
            strategy = FSDP2Strategy(print_plan=False, hang_report_s=report_s)
            trainer, task = build_trainer(strategy), build_task(folder)
            begin = time.monotonic()
            trainer.fit(task, Rows(EVEN["vocab_size"], GLOBAL_BATCH // 2))
            took_s = time.monotonic() - begin
            assert trainer.global_step == NUM_STEPS
            kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
            num_hooks.append([len(getattr(module, kind)) for module in task.modules() for kind in kinds])
            assert set(calls) <= {"count_collectives"}
            assert len(calls) <= (0 if report_s is None else 1 + took_s / 5)
        assert num_hooks[0] == num_hooks[1]
        assert not [thread for thread in threading.enumerate() if thread.name == "hang watch"]

    run_ranks(body, save_model(tmp_path, **EVEN))
