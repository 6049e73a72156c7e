import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.planning.timing.hardware import GPUS, find_gpu
from lit_fsdp.planning.timing.links import (
    LINKS,
    Group,
    Interconnect,
    arrange_groups,
    choose_links,
    find_link,
    parse_links,
    read_comm,
    time_collective,
    time_exchange,
    time_low_bit,
)
from lit_fsdp.profiling.collectives import COLLECTIVES, MEASURED, count_wire_bytes

US = 1e-6
GB = 10**9


def write_comm(folder: Path, *, num_ranks: int = 2, num_nodes: int = 1, **changes: Any) -> Path:
    line = {"alpha_s": 1e-4, "bandwidth_gb_s": 2.0, "worst_pct": 5.0}
    collectives = {kind: {**line, **changes.get(kind, {})} for kind in (*COLLECTIVES, *changes)}
    path = folder / "comm.json"
    path.write_text(json.dumps({"num_ranks": num_ranks, "num_nodes": num_nodes, "collectives": collectives}))
    return path


def test_a_gather_inside_a_node_takes_its_latency_and_its_bytes() -> None:
    net = Interconnect(intra=find_link("nvlink4"))
    expected = (8.4 + 7 * 3.4) * US + 7 / 8 / 360
    assert time_collective("all_gather", GB, Group(num_ranks=8), net) == pytest.approx(expected)
    assert time_collective("all_reduce", GB, Group(num_ranks=8), net) == pytest.approx(
        (8.4 + 14 * 3.4) * US + 2 * 7 / 8 / 360
    )


def test_a_gather_over_nodes_runs_at_the_slower_of_both_links() -> None:
    group = Group(num_ranks=16, num_nodes=2)
    latency = (8.4 + 14 * 3.4 + 14.0) * US
    slow, fast = parse_links("nvlink4,ib400x2"), parse_links("nvlink4,ib400x8")
    assert time_collective("all_gather", GB, group, slow) == pytest.approx(latency + 15 / 16 / 92)
    assert time_collective("all_gather", GB, group, fast) == pytest.approx(latency + 15 / 16 / 360)


def test_groups_of_replicas_share_the_network_cards_of_a_node() -> None:
    shard, replica = arrange_groups(4, 8, 8)
    assert shard == Group(num_ranks=8)
    assert replica == Group(num_ranks=4, num_nodes=4, num_beside=8)
    net = parse_links("nvlink4,ib400x8")
    alone = Group(num_ranks=4, num_nodes=4)
    ratio = time_collective("all_reduce", GB, replica, net) / time_collective("all_reduce", GB, alone, net)
    assert ratio == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "shard", "replica"),
    [
        ((1, 128, 8), Group(num_ranks=128, num_nodes=16), Group(num_ranks=1)),
        ((8, 1, 8), Group(num_ranks=1), Group(num_ranks=8)),
        ((16, 2, 8), Group(num_ranks=2), Group(num_ranks=16, num_nodes=4, num_beside=2)),
        ((2, 16, 8), Group(num_ranks=16, num_nodes=2), Group(num_ranks=2, num_nodes=2, num_beside=8)),
        # Two or four ranks of each layer: as many groups, of ranks that are not neighbours.
        ((1, 4, 8, 2), Group(num_ranks=4), Group(num_ranks=1)),
        ((1, 8, 8, 2), Group(num_ranks=8, num_nodes=2, num_beside=2), Group(num_ranks=1)),
        ((2, 2, 8, 4), Group(num_ranks=2), Group(num_ranks=2, num_nodes=2, num_beside=8)),
    ],
)
def test_neighbours_share_a_copy(sizes: tuple[int, ...], shard: Group, replica: Group) -> None:
    assert arrange_groups(*sizes) == (shard, replica)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_ranks_never_make_a_collective_faster(collective: Any) -> None:
    net = parse_links("nvlink4,ib400x8")
    groups = [arrange_groups(1, n, 8)[0] for n in (1, 2, 4, 8, 16, 128, 1024, 4096)]
    for size in (10**3, 10**6, GB):
        times = [time_collective(collective, size, group, net) for group in groups]
        assert times == sorted(times)
        assert times[0] == 0 < times[1]


def test_a_small_reduction_over_many_nodes_goes_through_a_tree() -> None:
    net = parse_links("nvlink4,ib400x8")
    group = Group(num_ranks=512, num_nodes=512)
    assert time_collective("all_reduce", 1000, group, net) < 0.05 * 2 * 511 * 14 * US
    ring = 8.4 * US + 2 * 511 * 14 * US + count_wire_bytes("all_reduce", 100 * GB, 512) / 360e9
    assert time_collective("all_reduce", 100 * GB, group, net) < ring


def test_a_measured_line_replaces_the_table(tmp_path: Path) -> None:
    net = parse_links(str(write_comm(tmp_path)))
    assert time_collective("all_gather", GB, Group(num_ranks=2), net) == pytest.approx(1e-4 + 0.5 / 2)
    # Three hops instead of one.
    assert time_collective("all_gather", GB, Group(num_ranks=4), net) == pytest.approx(3e-4 + 0.75 / 2)
    assert net.notes == ()


def test_fewer_bits_take_what_they_were_measured_to_take_and_else_what_they_send(tmp_path: Path) -> None:
    group = Group(num_ranks=2)
    old = parse_links(str(write_comm(tmp_path)))
    assert time_low_bit("gather_bits_8", GB, group, old) == time_collective("all_gather", GB, group, old)
    assert time_low_bit("reduce_bits_8", GB, group, old) == time_exchange(GB, group, old)
    # With rounding, which takes longer than the link.
    slower = {kind: {"bandwidth_gb_s": 0.25} for kind in MEASURED if kind not in COLLECTIVES}
    new = parse_links(str(write_comm(tmp_path, **slower)))
    assert time_low_bit("gather_bits_8", GB, group, new) == pytest.approx(1e-4 + 0.5 / 0.25)
    assert time_low_bit("reduce_bits_16", GB, group, new) == pytest.approx(1e-4 + 0.5 / 0.25)
    assert time_collective("all_gather", GB, group, new) == time_collective("all_gather", GB, group, old)
    assert time_low_bit("gather_bits_8", GB, Group(num_ranks=1), new) == 0


def test_a_measurement_over_nodes_stands_for_the_network(tmp_path: Path) -> None:
    path = write_comm(tmp_path, num_ranks=16, num_nodes=2)
    net = parse_links(f"nvlink4,{path}")
    group = Group(num_ranks=16, num_nodes=2)
    assert time_collective("all_gather", GB, group, net) == pytest.approx(1e-4 + 15 / 16 / 2)
    with pytest.raises(ValueError, match="is between nodes"):
        parse_links(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvlnk4", r"got 'nvlnk4': unknown: nearest: nvlink4"),
        ("pcie6", r"nearest: pcie"),
        ("ib400", r"name what is inside a node first, as pcie4,ib400"),
        ("nvlink4,pcie4", r"pcie4 is not between nodes"),
        ("nvlink4,ib400x0", r"is not between nodes: expected a network"),
        ("pcie4,ib100,ib100", r"expected one for inside a node, and one between nodes"),
        ("pcie4,", r"expected one for inside a node, and one between nodes"),
        ("nowhere.json", r"nowhere.json: not a comm.json of bench comm \(FileNotFoundError"),
    ],
)
def test_links_that_are_none_are_refused_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_links(text)


def test_files_that_say_too_little_are_refused(tmp_path: Path) -> None:
    path = write_comm(tmp_path, all_reduce={"alpha_s": None})
    with pytest.raises(ValueError, match="no line could be laid through the times of all_reduce"):
        read_comm(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"not a comm\.json"):
        read_comm(path)


def test_nodes_without_a_network_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pcie4: it does not say what is between the 2 nodes; add a network, such as"):
        time_collective("all_gather", GB, Group(num_ranks=4, num_nodes=2), parse_links("pcie4"))


def test_names_are_read_as_people_write_them() -> None:
    assert find_link("NVLink 4") == LINKS["nvlink4"]
    assert find_link("PCIe 4.0 x16").name == "pcie4"
    assert find_link("pcie4x8").gb_s == find_link("pcie4").gb_s / 2
    net = parse_links("pcie4, eth25")
    assert str(net) == "pcie4,ethernet25"
    assert str(parse_links("nvlink4,ib400x8")) == "nvlink4,ib400x8"
    assert "46 GB/s" in parse_links("pcie4,ib400").notes[1]


def test_every_gpu_has_usual_links() -> None:
    usual = {gpu.name: str(choose_links(gpu)) for gpu in GPUS}
    assert usual["H100 SXM"] == usual["H200 SXM"] == "nvlink4,ib400x8"
    assert usual["RTX 4090"] == usual["RTX 3090"] == "pcie4,ethernet25"
    assert usual["RTX A6000"] == "pcie4p2p,ethernet25"
    assert usual["T4"] == "pcie3p2p,ethernet25"
    gpu = find_gpu("H200")
    assert gpu is not None
    assert str(choose_links(gpu, ranks_per_node=4)) == "nvlink4,ib400x4"
    assert "is assumed for H200" in choose_links(gpu).notes[0]


def test_direct_links_are_faster_than_through_the_host_and_newer_ones_than_older() -> None:
    for kind in ("nvlink{}", "pcie{}", "pcie{}p2p"):
        known = [LINKS[name].gb_s for n in range(2, 6) if (name := kind.format(n)) in LINKS]
        assert known == sorted(known)
        assert len(known) > 2
    assert LINKS["pcie4"].gb_s < LINKS["pcie4p2p"].gb_s < LINKS["nvlink3bridge"].gb_s
    assert LINKS["ethernet100"].gb_s < LINKS["ib100"].gb_s
