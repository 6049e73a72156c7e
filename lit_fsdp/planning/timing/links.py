"""What connects GPUs: a table of links with what collectives achieve on them, and the time of a collective.

Note [Links]: a collective takes ``latency + bytes a rank sends / bus bandwidth`` ("bus" as in ``count_wire_bytes``).
The table holds bandwidths that NCCL reaches with large messages, not those on data sheets:

- NVLink: NCCL's own model of a link (``src/graph/topo.h``: 12.0 GB/s for GA10x, 20.0 for V100 and A100, 20.6 for
  Hopper, 40.1 for Blackwell) times the links of a GPU, at most 235 on A100 (``tuning.cc``). NVIDIA gives 360 as what
  to expect on H100 (nccl-tests#326); 8 x A100 measure 200 to 235 (nccl-tests#149, #178, stas00/ml-engineering).
- PCIe between GPUs that reach each other: 12.0 for PCIe 3 x16 in ``topo.h``, doubled by each generation, halved with
  the lanes.
- PCIe through host memory, as between GeForce cards, whose driver forbids the direct way: 0.48 of the raw rate in each
  direction while both are busy. This is the one measurement found: two RTX 5090 at PCIe 5 x8, 30 of 63 GB/s. It
  depends on the board more than anything else here: measure it with ``bench comm``.
- InfiniBand, and RoCE alike: 0.92 of the line rate (46 to 48 of 50 GB/s with 400 Gb/s, nccl-tests#290).
- Ethernet with TCP: 0.6 of the line rate (nccl#209), from 100 Gb/s on 0.4 (nccl#450).

Latencies are those of NCCL's ring with its simple protocol in ``tuning.cc``: 8.4 us for the call, and for each
neighbour in the ring 3.4 us by NVLink, 5.7 by PCIe, 14.0 from node to node.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from pathlib import Path
from typing import Any

from lit_fsdp.planning.timing.hardware import Gpu
from lit_fsdp.profiling.collectives import COLLECTIVES, MEASURED, Collective, Line, LowBit, Measured, count_wire_bytes

CALL_S = 8.4e-6
_HOP_S = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14.0e-6}
_TREE_SHARE = 0.92  # of the bandwidth of a ring, in tuning.cc


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of connection.

    Args:
        name: As ``find_link`` knows it.
        gb_s: What large collectives achieve, in 1e9 bytes a second and direction: of a GPU inside a node, of a network
            card between nodes.
        hop_s: Seconds to pass something on to the next rank.
        is_network: Whether it connects nodes.
        is_through_host: Whether everything goes through the memory of the host.
        lines: Where it was measured: latency and bandwidth of each collective, instead of the two above.
        num_measured: Ranks that took part in that.
        is_blocking: Whether compute stands still while anything is sent, as with gloo.
    """

    name: str
    gb_s: float
    hop_s: float
    is_network: bool = False
    is_through_host: bool = False
    lines: Mapping[Measured, Line] = field(default_factory=dict)
    num_measured: int = 0
    is_blocking: bool = False


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """How the GPUs of a run are connected.

    Args:
        intra: Inside a node.
        inter: Between nodes; ``None`` where that is not known.
        num_nics: Network cards of a node, each with the bandwidth of ``inter``.
        is_usual: Whether nobody named it: with other ranks in a node it is another one, see ``choose_links``.
        notes: What was assumed.
    """

    intra: Link
    inter: Link | None = None
    num_nics: int = 1
    is_usual: bool = False
    notes: tuple[str, ...] = ()

    @property
    def has_rounding(self) -> bool:
        """Whether times of fewer bits have their rounding: where ``bench comm`` has measured it."""
        links = [link for link in (self.intra, self.inter) if link is not None]
        return all(set(MEASURED) <= link.lines.keys() for link in links)

    def __str__(self) -> str:
        inter = "" if self.inter is None else f",{self.inter.name}" + f"x{self.num_nics}" * (self.num_nics > 1)
        return self.intra.name + inter


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of a collective, on how many nodes they are, and which others are busy at the same time."""

    num_ranks: int
    num_nodes: int = 1
    num_beside: int = 1  # groups that use the same network cards at once, with this one


def arrange_groups(num_replicas: int, num_shards: int, ranks_per_node: int, num_split: int = 1) -> tuple[Group, Group]:
    """Return the groups that shards are gathered in, and that replicas reduce in.

    Neighbouring ranks share a copy, as in ``build_mesh``. The nearest ``num_split`` of them hold parts of the same
    layers, and each of these parts is gathered in a group of its own, at the same time.
    """
    split_here = min(num_split, ranks_per_node)
    per_node = max(ranks_per_node // num_split, 1)  # of one such group
    copies_per_node = max(per_node // num_shards, 1)
    shard_nodes, replica_nodes = ceil(num_shards / per_node), ceil(num_replicas / copies_per_node)
    beside = min(num_shards, per_node) * split_here if replica_nodes > 1 else 1
    return (
        Group(num_ranks=num_shards, num_nodes=shard_nodes, num_beside=split_here if shard_nodes > 1 else 1),
        Group(num_ranks=num_replicas, num_nodes=replica_nodes, num_beside=beside),
    )


def time_collective(collective: Collective, num_bytes: float, group: Group, net: Interconnect) -> float:
    """Return the seconds of one collective.

    A ring over all ranks, which passes each node once, so that its bandwidth is the smaller of the two kinds of links;
    for an all-reduce over nodes, a tree where that is faster. ``num_bytes`` is the full size.

    Raises:
        ValueError: It crosses nodes, and nothing is known of what is between them.
    """
    if group.num_ranks < 2 or not num_bytes:
        return 0.0
    wire = count_wire_bytes(collective, 1, group.num_ranks) * num_bytes
    rounds = 2 if collective == "all_reduce" else 1
    if group.num_nodes == 1:
        return _time_on(net.intra, collective, wire, rounds * (group.num_ranks - 1), rounds)
    if net.inter is None:
        raise ValueError(
            f"link: got {net}: it does not say what is between the {group.num_nodes} nodes; add a network, such as "
            f"{net},ib400x8 or {net},ethernet25"
        )
    if net.inter.lines:
        return _time_on(net.inter, collective, wire * group.num_beside, rounds * (group.num_ranks - 1), rounds)
    inside, crossing = group.num_ranks - group.num_nodes, group.num_nodes - 1
    bandwidth = net.inter.gb_s * net.num_nics / group.num_beside
    if inside:
        line = net.intra.lines.get(collective)
        bandwidth = min(bandwidth, net.intra.gb_s if line is None else line.bandwidth_gb_s)
    latency = CALL_S + rounds * (inside * net.intra.hop_s + crossing * net.inter.hop_s)
    ring = latency + wire / bandwidth / 1e9
    if collective != "all_reduce":
        return ring
    depth = ceil(log2(group.num_nodes)) * net.inter.hop_s
    tree = CALL_S + 2 * (inside / group.num_nodes * net.intra.hop_s + depth)
    return min(ring, tree + wire / (_TREE_SHARE * bandwidth) / 1e9)


def time_low_bit(collective: LowBit, num_bytes: float, group: Group, net: Interconnect) -> float:
    """Return the seconds of a collective that sends fewer bits; ``num_bytes`` are what it sends, at full size.

    Rounding is in it only where ``bench comm`` has measured the link.

    Raises:
        ValueError: As ``time_collective``.
    """
    link = net.intra if group.num_nodes == 1 else net.inter
    if link is not None and collective in link.lines and group.num_ranks > 1 and num_bytes:
        wire = count_wire_bytes(collective, 1, group.num_ranks) * num_bytes * group.num_beside
        return _time_on(link, collective, wire, group.num_ranks - 1, 1)
    if collective == "gather_bits_8":
        return time_collective("all_gather", num_bytes, group, net)
    return time_exchange(num_bytes, group, net)


def time_exchange(num_bytes: float, group: Group, net: Interconnect) -> float:
    """Return the seconds of an exchange from all to all in place of a reduce-scatter of as many bytes.

    Each rank of a node sends a part to every rank on others, so more crosses between nodes than in a ring.

    Raises:
        ValueError: As ``time_collective``.
    """
    ring = time_collective("reduce_scatter", num_bytes, group, net)
    if group.num_nodes == 1 or not ring:
        return ring
    assert net.inter is not None
    own = ceil(group.num_ranks / group.num_nodes)
    crossing = own * (group.num_ranks - own) / group.num_ranks * num_bytes * group.num_beside
    line = net.inter.lines.get("reduce_scatter")
    gb_s = net.inter.gb_s * net.num_nics if line is None else line.bandwidth_gb_s
    return max(ring, CALL_S + crossing / gb_s / 1e9)


def _time_on(link: Link, collective: Measured, wire: float, num_hops: int, rounds: int) -> float:
    if (line := link.lines.get(collective)) is None:
        return CALL_S + num_hops * link.hop_s + wire / link.gb_s / 1e9
    # A ring of more ranks has more hops than the one that was measured.
    growth = max(num_hops / (rounds * (link.num_measured - 1)), 1.0)
    return line.alpha_s * growth + wire / line.bandwidth_gb_s / 1e9


def find_link(name: str) -> Link:
    """Return a link of the table by a name such as ``nvlink4``, ``PCIe 4.0 x8`` or ``ib400``.

    Raises:
        ValueError: There is none of that name; the message has the nearest.
    """
    key = re.sub(r"[ _]|\.0", "", name.lower())
    key = re.sub(r"^eth(?=\d)", "ethernet", re.sub(r"^infiniband", "ib", key)).removesuffix("x16")
    if key in LINKS:
        return LINKS[key]
    near = difflib.get_close_matches(key, LINKS, n=3, cutoff=0.4)
    kinds = "nvlink2 to nvlink5, nvlink3bridge, pcie3 to pcie5, ib25 to ib400, ethernet10 to ethernet400"
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise ValueError(f"link: got {name!r}: unknown: {hint}there are {kinds}, or a comm.json of bench comm")


def parse_links(text: str) -> Interconnect:
    """Read what connects GPUs from what a user writes: inside a node, then between nodes.

    Args:
        text: Such as ``pcie4``, ``nvlink4,ib400x8`` (eight cards in each node) or ``runs/comm.json,ethernet25``. A
            file of ``bench comm`` over several nodes stands for the second.

    Raises:
        ValueError: A part is unknown, or at the wrong place; the message has the nearest.
    """
    first, *rest = [part.strip() for part in text.split(",")]
    if len(rest) > 1 or not first or (rest and not rest[0]):
        raise ValueError(
            f"link: got {text!r}: expected one for inside a node, and one between nodes, as nvlink4,ib400x8"
        )
    intra = _read_part(first)
    if intra.is_network:
        raise ValueError(
            f"link: got {text!r}: {intra.name} is between nodes: name what is inside a node first, as pcie4,{first}"
        )
    if not rest:
        return Interconnect(intra=intra, notes=(*_describe(intra, 1, "a GPU inside a node"),))
    found = re.fullmatch(r"((?:ib|infiniband|roce|eth|ethernet)[ _]?\d+)x(\d+)", rest[0].lower())
    inter, num_nics = _read_part(found[1] if found else rest[0]), int(found[2]) if found else 1
    if not inter.is_network or num_nics < 1:
        raise ValueError(f"link: got {text!r}: {rest[0]} is not between nodes: expected a network, such as ib400x8")
    notes = (*_describe(intra, 1, "a GPU inside a node"), *_describe(inter, num_nics, "a node"))
    return Interconnect(intra=intra, inter=inter, num_nics=num_nics, notes=notes)


def choose_links(gpu: Gpu, ranks_per_node: int = 8) -> Interconnect:
    """Return what usually connects GPUs of a kind, where nobody says.

    GeForce cards: PCIe x16 through the host, though mainboards for consumers have one such slot, and 25 Gb/s Ethernet.
    SXM modules: NVLink, and a network card for each GPU. A bridge between two cards is not assumed.
    """
    text = next((links for pattern, links in _USUAL if re.search(pattern, gpu.name)), None)
    assert text is not None, gpu.name
    text = text.replace("xGPU", f"x{min(ranks_per_node, 8)}")
    net = parse_links(text)
    return replace(net, is_usual=True, notes=(f"link: {text} is assumed for {gpu.name}", *net.notes))


def read_comm(path: Path) -> Link:
    """Return the link that ``bench comm`` measured: inside a node, or between nodes if it ran on several.

    Raises:
        ValueError: The file is none of ``bench comm``, or a collective has no line through its times.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        num_ranks, num_nodes = int(found["num_ranks"]), int(found["num_nodes"])
        measured = found["collectives"]
        # A file of before bits were measured has none of these lines.
        values = {kind: measured[kind] for kind in MEASURED if kind in COLLECTIVES or kind in measured}
        lines = {
            kind: Line(alpha_s=v["alpha_s"], bandwidth_gb_s=v["bandwidth_gb_s"], worst_pct=v["worst_pct"])
            for kind, v in values.items()
            if v["alpha_s"] is not None
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"link: {path}: not a comm.json of bench comm ({type(error).__name__}: {error}); write one with "
            "python -m lit_fsdp bench comm --out=FOLDER"
        ) from error
    if missing := [kind for kind in COLLECTIVES if kind not in lines]:
        raise ValueError(
            f"link: {path}: no line could be laid through the times of {', '.join(missing)}; measure several --sizes, "
            "far apart"
        )
    gathered = lines["all_gather"]
    return Link(
        name=path.name,
        gb_s=gathered.bandwidth_gb_s,
        hop_s=gathered.alpha_s / (num_ranks - 1),
        is_network=num_nodes > 1,
        lines=lines,
        num_measured=num_ranks,
        is_blocking=found.get("backend") == "gloo",
    )


def _read_part(part: str) -> Link:
    return read_comm(Path(part)) if part.endswith(".json") else find_link(part)


def _describe(link: Link, count: int, where: str) -> list[str]:
    """Return what is assumed of a link, unless it was measured."""
    way = ", through host memory" if link.is_through_host else ""
    return [] if link.lines else [f"{link.name}: collectives achieve {link.gb_s * count:.3g} GB/s for {where}{way}"]


# RTX 3090 and RTX A6000 have the bridge.
_NVLINK = {"nvlink2": 120.0, "nvlink3": 235.0, "nvlink4": 360.0, "nvlink5": 720.0, "nvlink3bridge": 48.0}
_PCIE = {3: (12.0, 15.75), 4: (24.0, 31.5), 5: (48.0, 63.0)}  # with 16 lanes: direct, and the raw rate


def _list_links() -> Iterator[Link]:
    for name, gb_s in _NVLINK.items():
        yield Link(name=name, gb_s=gb_s, hop_s=_HOP_S["nvlink"])
    for generation, (direct, raw) in _PCIE.items():
        for lanes, suffix in ((16, ""), (8, "x8"), (4, "x4")):
            name, part, hop_s = f"pcie{generation}{suffix}", lanes / 16, _HOP_S["pcie"]
            yield Link(name=f"{name}p2p", gb_s=direct * part, hop_s=hop_s)
            yield Link(name=name, gb_s=0.48 * raw * part, hop_s=hop_s, is_through_host=True)
    for gbit in (10, 25, 50, 100, 200, 400):
        for kind, share in (("ethernet", 0.6 if gbit < 100 else 0.4), ("ib", 0.92), ("roce", 0.92)):
            yield Link(name=f"{kind}{gbit}", gb_s=share * gbit / 8, hop_s=_HOP_S["network"], is_network=True)


LINKS: Mapping[str, Link] = {link.name: link for link in _list_links()}
# By the name of the GPU, the first that fits.
_USUAL = (
    (r"H\d00 SXM", "nvlink4,ib400xGPU"),
    (r"A100 SXM", "nvlink3,ib200xGPU"),
    (r"V100 SXM", "nvlink2,ib100x4"),
    (r"H\d00 (PCIe|NVL)", "pcie5p2p,ib100"),
    (r"V100|T4|Titan|Quadro", "pcie3p2p,ethernet25"),
    (r"A100|\b(A10|A30|A40|L4|L40|L40S)\b", "pcie4p2p,ethernet100"),
    (r"RTX (A\d|\d+ Ada)", "pcie4p2p,ethernet25"),
    (r"RTX 20", "pcie3,ethernet25"),
    (r"RTX (3050|4060)", "pcie4x8,ethernet25"),
    (r"RTX [34]0", "pcie4,ethernet25"),
    (r"RTX 50", "pcie5,ethernet25"),
)
