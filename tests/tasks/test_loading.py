import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lit_fsdp.tasks.loading import (
    PADDING,
    GlobalSampler,
    ResumableLoader,
    build_eval_loader,
    build_train_loader,
)
from lit_fsdp.tasks.text.ray_text import PassLoader
from ranks import run_ranks


def collate(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def collate_indexed(rows: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([index for index, _ in rows])


def samplers(num_samples: int, batch_size: int, num_replicas: int, **options: Any) -> list[GlobalSampler]:
    options = {"shuffle": True, "drop_last": True, **options}
    return [
        GlobalSampler(num_samples, batch_size=batch_size, num_replicas=num_replicas, rank=rank, **options)
        for rank in range(num_replicas)
    ]


def steps(ranks: list[GlobalSampler], accumulate: int = 1) -> list[list[int]]:
    """The samples of each optimizer step over all ranks, in global order."""
    orders = [list(rank) for rank in ranks]
    size = ranks[0].batch_size
    micro = [[sample for order in orders for sample in order[k : k + size]] for k in range(0, len(orders[0]), size)]
    return [sum(micro[k : k + accumulate], []) for k in range(0, len(micro), accumulate)]


def loader_of(num_samples: int, batch_size: int, num_workers: int = 0, **options: Any) -> ResumableLoader:
    return build_train_loader(
        range(num_samples), batch_size=batch_size, collate=collate, num_workers=num_workers, **options
    )


class Recorder(LightningModule):
    """Writes down which samples it saw, as (epoch, samples)."""

    def __init__(self, num_samples: int, batch_size: int, num_workers: int = 0, *, validates: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.loader_options = (num_samples, batch_size, num_workers)
        self.validates = validates
        self.seen: list[tuple[int, list[int]]] = []
        self.logged: list[int] = []  # the steps that loggers are told
        self.validated: list[list[int]] = []
        self.predicted: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.tolist()))
        self.logged.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(batch.tolist())

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.predicted.append(batch.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> ResumableLoader:
        return loader_of(*self.loader_options, trainer=self.trainer)

    def val_dataloader(self) -> Any:
        if not self.validates:
            return []
        return build_eval_loader(range(5), batch_size=2, collate=collate_indexed, trainer=self.trainer)

    def predict_dataloader(self) -> DataLoader[Any]:
        return build_eval_loader(range(5), batch_size=2, collate=collate_indexed, trainer=self.trainer)


class SaveAt(Callback):
    """Saves once, at the n-th call of one hook."""

    def __init__(self, hook: str, count: int, path: Path) -> None:
        self.count = count

        def save(trainer: Trainer, *_: Any, **__: Any) -> None:
            self.count -= 1
            if not self.count and not trainer.sanity_checking:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def fit(module: Recorder, *callbacks: Callback, resume: Path | None = None, **options: Any) -> Recorder:
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False, **options}
    trainer = Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 1),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, ckpt_path=resume, weights_only=False)
    return module


@pytest.mark.parametrize(("batch_size", "num_replicas", "accumulate"), [(4, 2, 1), (2, 2, 2), (1, 4, 2), (2, 4, 1)])
def test_every_layout_sees_the_same_samples_in_every_optimizer_step(
    batch_size: int, num_replicas: int, accumulate: int
) -> None:
    expected = steps(samplers(67, 8, 1))
    found = steps(samplers(67, batch_size, num_replicas), accumulate)
    assert [set(step) for step in expected] == [set(step) for step in found[: len(expected)]]
    assert sum(expected, []) == sum(found, [])[:64]


def test_an_epoch_has_no_sample_twice_and_a_new_order_for_each_epoch_and_seed() -> None:
    orders = set()
    for seed in range(2):
        (sampler,) = samplers(40, 4, 1, seed=seed)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            order = tuple(sampler)
            assert sorted(order) == list(range(40))
            orders.add(order)
    assert len(orders) == 6


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 16])
def test_an_evaluation_sees_every_sample_once_in_as_many_batches_on_every_rank(num_replicas: int) -> None:
    ranks = samplers(13, 2, num_replicas, shuffle=False, drop_last=False)
    seen = sum(steps(ranks), [])
    assert [s for s in seen if s != PADDING] == list(range(13))
    assert {len(list(rank)) for rank in ranks} == {len(ranks[0])} == {2 * ranks[0].num_batches}


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("new_batch_size", [2, 4, 8])
def test_a_loader_goes_on_at_the_next_sample_at_any_batch_size(num_workers: int, new_batch_size: int) -> None:
    whole = sum((batch.tolist() for batch in loader_of(64, 4)), [])
    first = loader_of(64, 4, num_workers)
    batches = iter(first)
    seen = sum((next(batches).tolist() for _ in range(6)), [])
    state = first.state_dict()  # workers have fetched further by now
    second = loader_of(64, new_batch_size, num_workers)
    second.load_state_dict(state)
    seen += sum((batch.tolist() for batch in second), [])
    assert seen == whole
    assert second.state_dict()["epoch"] == 1
    assert sum((batch.tolist() for batch in second), []) != whole  # the next pass is the next epoch


def test_a_place_in_an_order_that_changed_is_refused_in_the_middle_but_not_at_the_end_of_an_epoch() -> None:
    first = loader_of(64, 8)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    with pytest.raises(ValueError, match=r"saved 24 samples into an epoch .*num_samples 64, now 60.*restore"):
        loader_of(60, 8).load_state_dict(first.state_dict())
    for _ in range(5):
        next(batches)
    loader_of(60, 8).load_state_dict(first.state_dict())


def test_a_place_in_a_stream_of_ray_and_one_in_rows_are_not_taken_for_each_other() -> None:
    rows, stream = loader_of(64, 8), PassLoader([], trainer=None)
    with pytest.raises(
        ValueError, match=r"^data: the checkpoint was saved with a stream of another kind: restore it, or"
    ):
        rows.load_state_dict({"passes": 1})
    with pytest.raises(
        ValueError, match=r"^data: the checkpoint was saved with rows of another kind: restore them, or"
    ):
        stream.load_state_dict(rows.state_dict())


def test_a_run_saved_in_a_stream_of_ray_is_not_gone_on_with_in_rows(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(Recorder(64, 8), SaveAt("on_train_batch_end", 3, path), max_steps=3)
    saved = torch.load(path, weights_only=False)
    saved["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [{"passes": 1}]
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"^data: the checkpoint was saved with a stream of another kind"):
        fit(Recorder(64, 8), resume=path)


POINTS = [
    ("on_train_batch_end", 3),
    ("on_train_batch_end", 8),
    ("on_train_batch_end", 11),
    ("on_train_epoch_end", 1),
    ("on_validation_end", 1),
    ("on_validation_end", 2),
]


@pytest.mark.full
@pytest.mark.parametrize(("hook", "count"), POINTS)
@pytest.mark.parametrize(("num_workers", "accumulate"), [(0, 1), (2, 1), (0, 2)])
def test_a_resumed_fit_sees_what_the_uninterrupted_one_saw(
    tmp_path: Path, hook: str, count: int, num_workers: int, accumulate: int
) -> None:
    if accumulate > 1 and (hook, count) in POINTS[:3:2]:
        count += 1  # at the end of an optimizer step
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "val_check_interval": 4}
    module = Recorder(67, 8, num_workers, validates=True)
    path = tmp_path / "saved.ckpt"
    save = SaveAt(hook, count, path)
    whole = fit(module, save, **options)
    assert [epoch for epoch, _ in whole.seen] == [0] * 8 + [1] * 8
    state = torch.load(path, weights_only=False)
    loader_state = state["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    num_seen = loader_state["epoch"] * 8 + loader_state["samples_seen"] // 8
    assert 0 < num_seen < 16
    resumed = fit(Recorder(67, 8, num_workers, validates=True), resume=path, **options)
    assert resumed.seen == whole.seen[num_seen:]


@pytest.mark.full
@pytest.mark.parametrize("new_batch_size", [4, 16])
@pytest.mark.parametrize(
    ("hook", "count"), [("on_train_batch_end", 3), ("on_train_batch_end", 8), ("on_train_epoch_end", 1)]
)
def test_a_fit_resumed_at_another_batch_size_ends_both_epochs_where_it_should(
    tmp_path: Path, hook: str, count: int, new_batch_size: int
) -> None:
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(67, 8), SaveAt(hook, count, path)).seen
    resumed = fit(Recorder(67, new_batch_size), resume=path).seen
    num_seen = 8 * count if hook == "on_train_batch_end" else 64
    orders = {e: sum((batch for epoch, batch in whole if epoch == e), []) for e in range(2)}
    rest = {e: sum((batch for epoch, batch in resumed if epoch == e), []) for e in range(2)}
    expected = orders[0][num_seen:]
    if expected:
        expected = list(samplers(67, 1, 1)[0])[num_seen : num_seen + (67 - num_seen) // new_batch_size * new_batch_size]
    assert rest[0] == expected
    assert rest[1][:64] == orders[1][: len(rest[1])]
    assert len(rest[1]) == 67 // new_batch_size * new_batch_size


@pytest.mark.full
@pytest.mark.parametrize("resume_by", [{"max_steps": 16}, {"max_epochs": 2}])
@pytest.mark.parametrize("saves_at_the_end", [True, False])
@pytest.mark.parametrize("num_steps", [3, 8, 11])
def test_a_fit_that_max_steps_ended_within_an_epoch_goes_on_within_it(
    tmp_path: Path, resume_by: dict[str, int], saves_at_the_end: bool, num_steps: int
) -> None:
    whole = fit(Recorder(67, 8)).seen
    path = tmp_path / "saved.ckpt"
    save = SaveAt("on_fit_end", 1, path) if saves_at_the_end else SaveAt("on_train_epoch_end", -(-num_steps // 8), path)
    first = fit(Recorder(67, 8), save, max_steps=num_steps).seen
    assert first == whole[:num_steps]
    resumed = fit(Recorder(67, 8), resume=path, **resume_by)
    assert resumed.seen == whole[num_steps:]
    assert resumed.logged == list(range(num_steps, 16))


def test_limit_train_batches_ends_an_epoch_for_good(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(67, 8), SaveAt("on_train_epoch_end", 1, path), limit_train_batches=3).seen
    assert [epoch for epoch, _ in whole] == [0] * 3 + [1] * 3
    assert fit(Recorder(67, 8), resume=path, limit_train_batches=3).seen == whole[3:]


def test_lightning_keeps_our_samplers_on_two_ranks_although_it_may_replace_samplers(tmp_path: Path) -> None:
    def body() -> None:
        rank = int(os.environ["RANK"])
        module = Recorder(19, 2, validates=True)
        fit(
            module,
            strategy=DDPStrategy(process_group_backend="gloo"),
            devices=2,
            use_distributed_sampler=True,
        )
        torch.save((module.seen, module.validated), tmp_path / f"{rank}.pt")

    run_ranks(body)
    seen, validated = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    order = list(samplers(19, 1, 1)[0])
    for rank in range(2):
        assert [batch for epoch, batch in seen[rank] if epoch == 0] == [
            order[k + 2 * rank : k + 2 * rank + 2] for k in range(0, 16, 4)
        ]
    assert [v[:2] for v in validated] == [[[0, 1], [4, PADDING]], [[2, 3], [PADDING, PADDING]]]


# In the middle of an epoch, with its last step, and beyond it.
@pytest.mark.parametrize("layouts", [[(4, 5), (2, 10), (8, 16)], [(2, 8), (1, 16)]])
def test_whole_steps_are_the_same_samples_whatever_the_layout_and_wherever_it_changes(
    tmp_path: Path, layouts: list[tuple[int, int]]
) -> None:
    """67 rows make 8 steps of 8, of which micro-batches of 2 would otherwise leave a ninth."""

    class WholeSteps(Recorder):
        def train_dataloader(self) -> ResumableLoader:
            return loader_of(*self.loader_options, trainer=self.trainer, whole_steps=True)

    def list_steps(seen: list[tuple[int, list[int]]]) -> list[int]:
        return [row for _, rows in seen for row in rows]

    whole = list_steps(fit(WholeSteps(67, 8)).seen)
    assert len(whole) == 2 * 64
    seen: list[int] = []
    saved: Path | None = None
    for k, (batch_size, num_steps) in enumerate(layouts):
        path = tmp_path / f"{k}.ckpt"
        accumulate, module = 8 // batch_size, WholeSteps(67, batch_size)
        save = SaveAt("on_train_batch_end", (num_steps - len(seen) // 8) * accumulate, path)
        fit(module, save, resume=saved, accumulate_grad_batches=accumulate, max_steps=num_steps)
        seen += list_steps(module.seen)
        assert len(seen) == num_steps * 8
        saved = path
    assert seen == whole


def test_an_epoch_of_whole_steps_is_over_though_rows_are_left() -> None:
    loader = loader_of(67, 2, seed=1)
    state = loader.state_dict() | {"samples_seen": 64, "batches_per_step": 4, "seed": 0}
    loader.load_state_dict(state)  # in the middle of an epoch, another order would be refused
    assert len(list(loader)) == 0
    with pytest.raises(ValueError, match="an epoch whose order has changed"):
        loader.load_state_dict(state | {"batches_per_step": 1})


def test_prediction_tells_which_rows_are_real() -> None:
    module = Recorder(8, 2)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.predict(module, return_predictions=False)
    assert module.predicted == [[0, 1], [2, 3], [4, PADDING]]


def test_overfit_batches_is_refused_because_lightning_would_replace_the_sampler() -> None:
    for given in (2, 0.25):
        with pytest.raises(ValueError, match=rf"overfit_batches: got {given}: .* limit_train_batches: {given} "):
            fit(Recorder(64, 8), overfit_batches=given)


def test_too_few_rows_for_a_global_batch_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"the training data: 7 rows do not fill one global batch of 8 \(batch_size 8 x 1 ranks\)",
    ):
        loader_of(7, 8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_knows_which_samples_it_gave_last_though_workers_are_ahead(num_workers: int) -> None:
    rows = list(range(100, 123))
    loader = build_train_loader(rows, batch_size=4, collate=collate, seed=3, num_workers=num_workers)
    places = []
    for _ in range(2):
        for batch in loader:
            assert [rows[i] for i in loader.list_samples(loader.last_place)] == batch.tolist()
            places.append((loader.last_place, batch.tolist()))
    assert len({place for place, _ in places}) == len(places) == 10
    # Also later, and of an epoch that is over.
    assert all([rows[i] for i in loader.list_samples(place)] == batch for place, batch in places)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_leaves_the_numbers_that_steps_draw_alone_as_a_resumed_run_begins_more_of_them(
    num_workers: int,
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = loader_of(8, 4, num_workers)
    for _ in range(2):
        list(loader)
    assert torch.equal(torch.get_rng_state(), before)


class Noise:
    """Rows that are drawn."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


def test_what_rows_draw_in_workers_depends_on_the_seed_of_the_run() -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat(list(build_train_loader(Noise(), batch_size=4, collate=torch.stack, num_workers=1)))

    first = draw(5)
    assert torch.equal(draw(5), first)
    assert not torch.equal(draw(6), first)


def test_samplers_of_several_ranks_know_their_own_share() -> None:
    ranks = samplers(20, 2, 3)
    for sampler in ranks:
        order = list(sampler)
        assert sampler.list_samples(0, 6) == order[2:4]
