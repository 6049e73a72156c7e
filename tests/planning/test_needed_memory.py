from types import SimpleNamespace
from typing import Any

import pytest

from lit_fsdp.planning.needed_memory import (
    CONTEXT_BYTES,
    CUBLAS_BYTES,
    compute_needed_bytes,
    count_outside_bytes,
    list_communicators,
)
from lit_fsdp.sharding.mesh import MeshSizes

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "ranks", "mib"),
    [
        (MeshSizes(1, 1), [], 0),
        (MeshSizes(1, 2), [2], 544),
        (MeshSizes(1, 8), [8], 688),
        (MeshSizes(8, 1), [8, 8], 2 * 688),  # the mesh has two dimensions, though one is of one rank
        (MeshSizes(2, 8), [16, 8, 2], 2 * 688 + 544),
        (MeshSizes(1, 2, sequence=4), [8, 4], 2 * 688),
        (MeshSizes(1, 4, tensor=2), [8, 4, 2], 2 * 688 + 544),
    ],
)
def test_each_group_of_ranks_has_a_communicator(sizes: MeshSizes, ranks: list[int], mib: int) -> None:
    assert list_communicators(sizes) == ranks
    assert count_outside_bytes(sizes) == CONTEXT_BYTES + CUBLAS_BYTES + mib * MIB


def test_what_was_replayed_comes_before_the_usual_headroom() -> None:
    cost: Any = SimpleNamespace(memory=SimpleNamespace(peak=SimpleNamespace(num_bytes=1000 * MIB)), replay=None)
    outside = CONTEXT_BYTES + CUBLAS_BYTES
    assert compute_needed_bytes(cost, MeshSizes(1, 1)) == 1150 * MIB + outside
    cost.replay = SimpleNamespace(least_bytes=1040 * MIB)
    assert compute_needed_bytes(cost, MeshSizes(1, 1)) == 1040 * MIB + outside
