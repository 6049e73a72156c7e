"""Ranks that are not equally fast: who gets which rows, and that nothing else depends on it."""

import json
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from training import (
    EVEN,
    NUM_STEPS,
    Rows,
    build_task,
    build_trainer,
    list_differences,
    save_model,
    train_plainly,
    train_sharded,
)

from lit_fsdp import FSDP2Strategy, Mesh
from lit_fsdp.tasks.loading import GlobalSampler, ResumableLoader
from lit_fsdp.tasks.shares import balance_rows, check_share, count_largest, split_rows
from ranks import run_ranks


def build_loaders(*rows: int, num_workers: int = 0, num_samples: int = 90) -> list[ResumableLoader]:
    """The loader of each rank, which gets this many of the rows of a round."""
    size, rest = divmod(sum(rows), len(rows))
    assert not rest
    options: dict[str, Any] = {"batch_size": size, "num_replicas": len(rows), "shuffle": True, "drop_last": True}
    samplers = [GlobalSampler(num_samples, rank=rank, rows=rows, **options) for rank in range(len(rows))]
    return [ResumableLoader(range(num_samples), sampler, num_workers=num_workers) for sampler in samplers]


def read_rounds(loaders: list[ResumableLoader], num_rounds: int | None = None) -> list[list[list[int]]]:
    """The samples of each rank in each round."""
    rounds = []
    for batches in zip(*loaders, strict=True):
        rounds.append([batch.tolist() for batch in batches])
        if len(rounds) == num_rounds:
            break
    return rounds


def join(rounds: list[list[list[int]]]) -> list[list[int]]:
    return [sum(ranks, []) for ranks in rounds]


def test_a_round_has_the_rows_of_equal_shares_and_each_rank_its_own() -> None:
    equal, unequal = read_rounds(build_loaders(3, 3, 3)), read_rounds(build_loaders(6, 1, 2))
    assert join(equal) == join(unequal)
    assert len(equal) == 10
    assert {tuple(map(len, ranks)) for ranks in unequal} == {(6, 1, 2)}


@pytest.mark.parametrize("rows", [(4, 4), (1, 7)])
def test_an_epoch_goes_on_with_other_shares_after_a_resume(rows: tuple[int, int]) -> None:
    whole = join(read_rounds(build_loaders(4, 4)))
    read_rounds(first := build_loaders(6, 2), 4)
    state = first[0].state_dict()
    assert all(loader.state_dict() == state for loader in first)
    for loader in (second := build_loaders(*rows)):
        loader.load_state_dict(state)
    assert join(read_rounds(second)) == whole[4:]


class SettleAfter:
    """Stands for a meter that knows after some rounds."""

    settled = None

    def __init__(self, num_rounds: int, rows: tuple[int, ...]) -> None:
        self.num_rounds, self.rows = num_rounds, rows

    def begin_round(self) -> None:
        assert self.num_rounds is not None

    def end_round(self, rows: tuple[int, ...], num_done: int) -> tuple[int, ...] | None:
        return self.rows if num_done == self.num_rounds else None

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shares_that_are_settled_in_an_epoch_lose_and_repeat_no_row(num_workers: int) -> None:
    loaders = build_loaders(4, 4, num_workers=num_workers)
    for loader in loaders:
        loader.speed_meter = SettleAfter(3, (7, 1))  # type: ignore[assignment]
    rounds, places = [], []
    for batches in zip(*loaders, strict=True):
        rounds.append([batch.tolist() for batch in batches])
        places.append(loaders[1].last_place)
    assert join(rounds) == join(read_rounds(build_loaders(4, 4)))
    assert [len(ranks[1]) for ranks in rounds] == [4] * 3 + [1] * 8
    # Also of what came before: a loss that jumped is looked for there.
    assert [loaders[1].list_samples(place) for place in places] == [ranks[1] for ranks in rounds]


def test_rows_are_split_by_shares() -> None:
    assert split_rows([3, 1], batch_size=2, num_ranks=2) == (3, 1)
    assert split_rows([2, 6], batch_size=2, num_ranks=2) == (1, 3)
    assert split_rows(None, batch_size=2, num_ranks=3) == split_rows("auto", batch_size=2, num_ranks=3) == (2, 2, 2)
    assert (count_largest([3, 1], 2), count_largest([3, 1], 3), count_largest("auto", 4)) == (3, 5, 4)


@pytest.mark.parametrize(
    ("share", "batch_size", "num_ranks", "message"),
    [
        ([], 2, 2, r"share: got \[\]: expected a number from 1 for each rank, such as \[3, 1\]"),
        ([3, 0], 2, 2, r"share: got \[3, 0\]: expected a number from 1 for each rank"),
        ([3, 1], 2, 3, r"share: got \[3, 1\]: expected a number for each of 3 ranks, or auto"),
        (
            [3, 1],
            3,
            2,
            r"6 rows \(batch_size 3 x 2 ranks\) do not divide by 4: set it to \[5, 1\], or batch_size to 2 or 4$",
        ),
        ([2, 2, 1], 1, 3, r"3 rows .* do not divide by 5: set it to \[1, 1, 1\], or batch_size to 5$"),
    ],
)
def test_shares_that_cannot_be_are_refused_with_the_nearest(
    share: list[int], batch_size: int, num_ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_share(share)
        split_rows(share, batch_size=batch_size, num_ranks=num_ranks)


def test_what_a_refusal_proposes_is_taken() -> None:
    for share, batch_size in product(([3, 1], [5, 2, 1], [7, 7, 2, 2]), range(1, 12)):
        try:
            rows = split_rows(share, batch_size=batch_size, num_ranks=len(share))
            assert sum(rows) == batch_size * len(share)
            assert all(a * sum(share) == b * sum(rows) for a, b in zip(rows, share, strict=True))
        except ValueError as error:
            lists, _, sizes = str(error).partition("set it to ")[2].partition(", or batch_size to ")
            assert sum(split_rows(json.loads(lists), batch_size=batch_size, num_ranks=len(share))) > 0
            for size in sizes.split(" or "):
                split_rows(share, batch_size=int(size), num_ranks=len(share))


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 1.0), (1.0, 9.7, 2.3), (100.0, 1.0, 1.0)])
def test_balanced_rows_are_done_as_early_as_can_be(speeds: tuple[float, ...]) -> None:
    for num_rows in range(len(speeds), 15):
        rows = balance_rows(speeds, num_rows)
        ways = [way for way in product(range(1, num_rows + 1), repeat=len(speeds)) if sum(way) == num_rows]
        ends = [max(n / v for n, v in zip(way, speeds, strict=True)) for way in (rows, *ways)]
        assert rows in ways
        assert ends[0] == min(ends)


# Parity

RUNS: dict[str, dict[str, Any]] = {
    "2 ranks, accumulated": {"world_size": 2, "accumulate_grad_batches": 2, "share": [3, 1]},
    "4 ranks, 2 x 2": {"world_size": 4, "share": [3, 1, 2, 2], "strategy": {"mesh": Mesh(replicate=2)}},
}


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", RUNS)
def test_training_with_unequal_shares_equals_one_device(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    result = train_sharded(folder, tmp_path, **{"strategy": {}, **RUNS[name]})
    differences = list_differences(result, train_plainly(folder))
    assert max(differences.values()) <= 1e-6, differences


@pytest.mark.full
def test_a_resume_with_other_shares_is_the_same_run(tmp_path: Path) -> None:
    def body() -> None:
        for share, max_steps, source in ((None, 1, None), ([3, 1], 2, saved), ([1, 3], 3, saved)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=max_steps)
                trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], 4, share=share), ckpt_path=source)
            trainer.save_checkpoint(saved)
            assert [str(w.message) for w in caught if str(w.message).startswith("resume: ")] == []

    folder, saved = save_model(tmp_path / "model", **EVEN), tmp_path / "saved"
    run_ranks(body)


# What is measured

SLEEP_S = 0.08  # for a row, on the slow rank


def fit_throttled(folder: Path, out: Path, share: Any, options: dict[str, Any]) -> None:
    """Train where rank 1 is slow; write the losses, what ranks got, and save a checkpoint."""
    task, losses = build_task(folder), []
    step, sizes = task.training_step, []

    def sleep_and_step(batch: Any, batch_idx: int) -> Any:
        sizes.append(len(batch["labels"]))
        time.sleep(SLEEP_S * len(batch["labels"]) * dist.get_rank())
        return step(batch, batch_idx)

    task.training_step = sleep_and_step  # type: ignore[method-assign]
    keep = LambdaCallback(on_train_batch_end=lambda *_: losses.append(float(task.step_loss)))
    trainer: Trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[keep], **options)
    resumed = str(out.parent / "saved") if (out.parent / "saved").exists() else None
    trainer.fit(task, Rows(EVEN["vocab_size"], 4, 18 * 8, share), ckpt_path=resumed)
    all_sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_sizes, sizes)
    if share == "auto" and options["max_steps"] == 15:
        trainer.save_checkpoint(out.parent / "saved")
    loader: Any = trainer.train_dataloader
    groups = [module for module in task.modules() if hasattr(module, "_get_fsdp_state")]
    is_left = any("post_backward" in vars(g) for m in groups for g in m._get_fsdp_state()._fsdp_param_groups)
    assert not is_left
    if trainer.is_global_zero:
        torch.save({"losses": losses, "sizes": all_sizes, "settled": loader.sampler.rows}, out)


@pytest.mark.full
def test_auto_gives_a_slow_rank_fewer_rows_and_the_same_losses_and_a_resume_keeps_it(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    found = {}
    runs = {"equal": (None, 18), "too short": ("auto", 5), "auto": ("auto", 15), "resumed": ("auto", 18)}
    for name, (share, max_steps) in runs.items():
        run_ranks(fit_throttled, folder, out := tmp_path / f"{name}.pt", share, {"max_steps": max_steps}, world_size=2)
        found[name] = torch.load(out)
    fast, slow = found["auto"]["settled"]
    assert (fast + slow, slow < fast) == (8, True)
    assert found["too short"]["sizes"] == [[4] * 5] * 2
    assert found["auto"]["sizes"] == [[4] * 11 + [rows] * 4 for rows in (fast, slow)]
    assert found["resumed"]["sizes"] == [[rows] * 3 for rows in (fast, slow)]
    losses = found["auto"]["losses"] + found["resumed"]["losses"]
    assert len(losses) == 18 > NUM_STEPS
    assert find_largest(abs(a / b - 1) for a, b in zip(losses, found["equal"]["losses"], strict=True)) <= 1e-6
