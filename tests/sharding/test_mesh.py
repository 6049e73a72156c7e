"""Settings become numbers before any process group exists, and neighbouring ranks share a copy."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lit_fsdp.sharding.mesh import Mesh, build_mesh, build_sequence_mesh, make_module_mesh
from ranks import run_ranks


@pytest.mark.parametrize(
    ("settings", "world_size", "ranks_per_node", "expected"),
    [
        ({}, 1, 1, (1, 1)),
        ({}, 6, 2, (1, 6)),
        ({"replicate": 2}, 6, 2, (2, 3)),
        ({"replicate": 6}, 6, 2, (6, 1)),
        ({"replicate": -1, "shard": 2}, 8, 8, (4, 2)),
        ({"replicate": -1, "shard": 8}, 8, 8, (1, 8)),
        ({"replicate": -1, "shard": "node"}, 8, 4, (2, 4)),
        ({"replicate": 3, "shard": "node"}, 6, 2, (3, 2)),
        ({"shard": "node"}, 4, 4, (1, 4)),
        ({"tensor": 2}, 8, 4, (1, 4, 1, 2)),
        ({"tensor": 2, "sequence": 2}, 8, 4, (1, 2, 2, 2)),
        ({"replicate": -1, "shard": "node", "tensor": 2}, 8, 4, (2, 2, 1, 2)),
        ({"replicate": 2, "tensor": 4}, 8, 4, (2, 1, 1, 4)),
    ],
)
def test_the_rest_is_worked_out(
    settings: dict[str, Any], world_size: int, ranks_per_node: int, expected: tuple[int, ...]
) -> None:
    sizes = Mesh(**settings).resolve(world_size=world_size, ranks_per_node=ranks_per_node)
    assert sizes == (*expected, 1, 1)[:4]


def test_every_accepted_mesh_uses_all_ranks_and_every_other_is_refused() -> None:
    degrees = (-1, *range(1, 9))
    for world_size in range(1, 9):
        for replicate in degrees:
            for shard in degrees:
                mesh = Mesh(replicate=replicate, shard=shard)
                known = [d for d in (replicate, shard) if d != -1]
                fits = bool(known) and (
                    world_size % known[0] == 0 if len(known) == 1 else replicate * shard == world_size
                )
                if not fits:
                    with pytest.raises(ValueError, match=r"^mesh"):
                        mesh.resolve(world_size=world_size, ranks_per_node=1)
                    continue
                resolved = mesh.resolve(world_size=world_size, ranks_per_node=1)
                assert resolved[0] * resolved[1] == world_size
                assert all(asked in (-1, got) for asked, got in zip((replicate, shard), resolved, strict=False))


@pytest.mark.parametrize(
    ("settings", "world_size", "parts"),
    [
        ({"replicate": 2, "shard": 3}, 4, ("2x3", "needs 6 ranks", "4 were started", "replicate=2 shard=2", "start 6")),
        ({"replicate": 3}, 4, ("3x-1", "4 were started", "replicate=2 shard=2")),
        ({"replicate": 8}, 4, ("8x-1", "needs 8 ranks", "replicate=4 shard=1")),
        ({"shard": 8}, 4, ("1x8", "needs 8 ranks", "replicate=1 shard=4")),
        ({"shard": "node"}, 4, ("1xnode", "needs 2 ranks", "4 were started")),
        ({"replicate": -1, "shard": -1}, 4, ("both -1", "replicate=1 shard=4")),
        ({"replicate": 0}, 4, ("mesh.replicate", "got 0", "-1 for the rest")),
        ({"shard": 0}, 4, ("mesh.shard", "got 0")),
        ({"replicate": -2}, 4, ("mesh.replicate", "got -2")),
        ({"shard": -3}, 4, ("mesh.shard", "got -3")),
        ({"tensor": 0}, 4, ("mesh.tensor", "got 0", "1 or more")),
        ({"sequence": -1}, 4, ("mesh.sequence", "got -1", "1 or more")),
        ({"tensor": 3}, 4, ("mesh.tensor", "got tensor 3", "4 ranks", "set tensor=4 or start 6 ranks")),
        ({"sequence": 2, "tensor": 4}, 4, ("got sequence 2 x tensor 4", "divide the 4 ranks", "start 8 ranks")),
        ({"shard": 4, "tensor": 2}, 4, ("1x4", "needs 8 ranks", "4 were started", "replicate=1 shard=2")),
    ],
)
def test_a_refusal_shows_the_numbers_and_what_would_fit(
    settings: dict[str, Any], world_size: int, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"^mesh") as error:
        Mesh(**settings).resolve(world_size=world_size, ranks_per_node=2)
    assert [part for part in parts if part not in str(error.value)] == []


def test_neighbouring_ranks_share_a_copy_and_wait_as_long_as_the_setting_says() -> None:
    def body() -> None:
        rank = dist.get_rank()
        mesh = build_mesh(Mesh(replicate=2), device_type="cpu", world_size=4, ranks_per_node=2, timeout_s=77)
        backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
        assert [backend.options._timeout.total_seconds() for backend in backends] == [77, 77]
        assert mesh.mesh_dim_names == ("replicate", "shard")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert dist.get_process_group_ranks(mesh.get_group("shard")) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert dist.get_process_group_ranks(mesh.get_group("replicate")) == [rank % 2, rank % 2 + 2]
        flat = build_mesh(Mesh(), device_type="cpu", world_size=4, ranks_per_node=2)
        assert flat.mesh_dim_names == ("shard",)
        assert flat.mesh.tolist() == [0, 1, 2, 3]

    run_ranks(body, world_size=4)


def test_neighbours_share_a_layer_then_a_row() -> None:
    settings: dict[str, Any] = {"world_size": 8, "ranks_per_node": 8}
    mesh = Mesh(replicate=1, sequence=2, tensor=2)
    places = [mesh.locate(rank, **settings) for rank in range(8)]
    assert [(place.index, place.place) for place in places] == [(r // 4, r % 4) for r in range(8)]
    assert {(place.count, place.copies) for place in places} == {(2, 2)}

    def body() -> None:
        rank = dist.get_rank()
        built = build_mesh(mesh, device_type="cpu", **settings)
        assert (built.mesh_dim_names, tuple(built.mesh.shape)) == (("shard", "tensor"), (4, 2))
        own = make_module_mesh(built)
        for name, ranks in (
            ("data_parallel", [r for r in range(8) if r % 2 == rank % 2]),
            ("tensor_parallel", [rank // 2 * 2, rank // 2 * 2 + 1]),
        ):
            assert dist.get_process_group_ranks(own[name].get_group()) == ranks
        sequence = build_sequence_mesh(mesh, device_type="cpu", **settings)
        assert dist.get_process_group_ranks(sequence.get_group()) == [r for r in places_of(rank) if r % 2 == rank % 2]

    def places_of(rank: int) -> list[int]:
        return list(range(rank // 4 * 4, rank // 4 * 4 + 4))

    run_ranks(body, world_size=8)


def test_a_wrong_mesh_is_refused_before_any_collective() -> None:
    with pytest.raises(ValueError, match="needs 3 ranks"):
        build_mesh(Mesh(replicate=1, shard=3), device_type="cpu", world_size=4, ranks_per_node=4)
