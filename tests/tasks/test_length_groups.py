from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from lit_fsdp.tasks.length_groups import choose_group_size, compute_efficiency
from lit_fsdp.tasks.loading import GlobalSampler, ResumableLoader, build_train_loader

LENGTHS = np.random.default_rng(1).lognormal(4, 0.6, 1000).astype(np.int64) + 1


def samplers(num_replicas: int, batch_size: int, *, is_grouped: bool = True, **options: Any) -> list[GlobalSampler]:
    return [
        GlobalSampler(
            len(LENGTHS),
            batch_size=batch_size,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=True,
            drop_last=True,
            lengths=LENGTHS if is_grouped else None,
            group_size=choose_group_size(len(LENGTHS), **options),
        )
        for rank in range(num_replicas)
    ]


@pytest.mark.parametrize(("num_replicas", "batch_size", "step_size"), [(1, 16, None), (4, 4, None), (3, 4, 12)])
def test_batches_that_ranks_compute_together_have_like_lengths_and_an_epoch_has_each_row_once(
    num_replicas: int, batch_size: int, step_size: int | None
) -> None:
    ranks = samplers(num_replicas, batch_size, step_size=step_size)
    plain = samplers(num_replicas, batch_size, is_grouped=False)
    rounds = [np.array([list(rank) for rank in ways]).reshape(num_replicas, -1, batch_size) for ways in (ranks, plain)]
    assert len(set(rounds[0].flatten())) == rounds[0].size  # no row twice
    # The longest of each round, over all ranks: what the slowest of them computes while the others wait.
    costs = [LENGTHS[one].max(axis=(0, 2)).sum() * num_replicas * batch_size / LENGTHS[one].sum() for one in rounds]
    assert costs[0] < 1.3
    assert costs[1] > 2
    # Long batches are anywhere in the epoch, and the next epoch has others.
    longest = LENGTHS[rounds[0]].max(axis=(0, 2))
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3
    first = {tuple(sorted(batch)) for batch in rounds[0].transpose(1, 0, 2).reshape(len(longest), -1)}
    order = ranks[0].draw_order(1)[: rounds[0].size].numpy().reshape(len(longest), -1)
    assert not first & {tuple(sorted(batch)) for batch in order}


def test_the_order_of_length_groups_is_the_same_on_any_number_of_ranks() -> None:
    expected = samplers(1, 8)[0].draw_order(3).tolist()
    assert sorted(expected) == list(range(len(LENGTHS)))
    for ranks in (samplers(4, 2), samplers(3, 5)):
        assert all(rank.draw_order(3).tolist() == expected for rank in ranks)
    assert [sampler.draw_order(3).tolist() for sampler in samplers(1, 8, step_size=24)] != [expected]


def test_a_place_among_length_groups_is_gone_on_with_at_another_batch_size_and_refused_without_them() -> None:
    def load(batch_size: int, lengths: Any = LENGTHS) -> ResumableLoader:
        return build_train_loader(range(len(LENGTHS)), batch_size=batch_size, collate=list, lengths=lengths)

    first = load(8)
    batches = iter(first)
    seen = sum((next(batches) for _ in range(31)), [])
    state, second = first.state_dict(), load(4)
    second.load_state_dict(state)
    assert seen + sum(second, []) == samplers(1, 4)[0].draw_order(0).tolist()
    with pytest.raises(ValueError, match=r"samples into an epoch .*\(length_groups 64, now 0\)"):
        load(8, None).load_state_dict(state)
    del state["length_groups"]  # as of a checkpoint of an earlier version, which knew no groups
    with pytest.raises(ValueError, match=r"\(length_groups 0, now 64\)"):
        load(8).load_state_dict(state)


@pytest.mark.parametrize("batch_size", [4, 16, 64])
def test_length_groups_pad_no_more_than_those_of_transformers(batch_size: int) -> None:
    (ours,) = samplers(1, batch_size)
    generator = torch.Generator().manual_seed(0)
    theirs = LengthGroupedSampler(batch_size, lengths=LENGTHS.tolist(), generator=generator)
    found = [compute_efficiency(LENGTHS[list(order)], batch_size) for order in (ours.draw_order(0), theirs)]
    assert found[0] > found[1]


def test_efficiency_is_the_share_of_tokens_in_padded_batches() -> None:
    assert compute_efficiency(np.array([1, 3, 5]), 2) == 9 / (2 * 3 + 5)
    assert compute_efficiency(np.array([1, 3, 5]), 2, 4) == 9 / (2 * 4 + 8)
