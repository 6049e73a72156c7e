"""Getting a checkpoint from disk into N sharded ranks: memory, bytes and seconds, ours beside Transformers'.

    python benchmarks/weights_in.py --gib 1 --ranks 1 2 4

Every measurement runs in fresh processes (gloo, CPU). They first load a tiny model the same way, so that lazy imports
and the buffers of the process group are not counted. All methods end alike: sharded float32 parameters that have been
written to once, because a mapped file that nobody has touched takes neither memory nor time.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.wrap import Wrap, plan_units
from lit_fsdp.weights.load import load_weights, materialize

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 16000, "num_attention_heads": 16},
    "mixtral": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 16000,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
    },
}
MIB = 2**20


def shard(model: nn.Module) -> nn.Module:
    """Shard a model over all ranks as ``FSDP2Strategy`` does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    options = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    shard_model(model, plan_units(model, Wrap()), mesh=mesh, sharding=Sharding(), **options)
    return model


def load_ours(folder: Path) -> nn.Module:
    """Meta device, shard, then every rank its own rows."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    shard(model)
    materialize(model, torch.device("cpu"))
    load_weights(model, folder)
    return model


def load_whole(folder: Path) -> nn.Module:
    """``from_pretrained`` on every rank, then shard."""
    return shard(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def load_distributed(folder: Path) -> nn.Module:
    """Transformers' own sharded loading."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)


METHODS: dict[str, Callable[[Path], nn.Module]] = {
    "ours": load_ours,
    "from_pretrained, then shard": load_whole,
    "from_pretrained(distributed_config)": load_distributed,
}


class CountedSlice:
    """A tensor in a file; counts the bytes that are taken out of it."""

    def __init__(self, inner: Any, counts: list[int]) -> None:
        self.inner, self.counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows = self.inner[index]
        self.counts.append(rows.nbytes)
        return rows


class CountedFile:
    """An open file of Transformers, whose slices count."""

    counts: list[int]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.inner = CountedFile.opener(*args, **options)

    @staticmethod
    def opener(*_: Any, **__: Any) -> Any:
        """Stands for ``safe_open``, set by ``count_reads``."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "CountedFile":
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def get_slice(self, name: str) -> CountedSlice:
        """Return a counted slice."""
        return CountedSlice(self.inner.get_slice(name), self.counts)


@contextmanager
def count_reads() -> Iterator[list[int]]:
    """Collect the bytes of every read, by whichever way a method reads."""
    counts: list[int] = []
    module: Any = transformers.modeling_utils
    preadv, opener = os.preadv, module.safe_open

    def counted(*args: Any) -> int:
        counts.append(preadv(*args))
        return counts[-1]

    CountedFile.counts, CountedFile.opener = counts, staticmethod(opener)  # type: ignore[method-assign]
    os.preadv, module.safe_open = counted, CountedFile  # type: ignore[assignment]
    try:
        yield counts
    finally:
        os.preadv, module.safe_open = preadv, opener


def read_status(*names: str) -> dict[str, int]:
    """Return entries of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {n: int(line.split()[1]) * 1024 for n in names for line in lines if line.startswith(f"{n}:")}


@contextmanager
def watch_memory() -> Iterator[dict[str, int]]:
    """Measure how far memory rises: all resident pages, and without those of mapped files."""
    rise: dict[str, int] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = read_status("VmRSS", "RssAnon")
    anonymous, is_over = [before["RssAnon"]], threading.Event()

    def sample() -> None:
        while not is_over.wait(0.002):
            anonymous.append(read_status("RssAnon")["RssAnon"])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield rise
    finally:
        anonymous.append(read_status("RssAnon")["RssAnon"])
        is_over.set()
        thread.join()
        rise["resident"] = read_status("VmHWM")["VmHWM"] - before["VmRSS"]
        rise["anonymous"] = max(anonymous) - before["RssAnon"]


def measure_rank(rank: int, world_size: int, method: str, big: Path, tiny: Path, out: Path) -> None:
    """Load on one rank and write down what it took."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=world_size)
    load = METHODS[method]
    load(tiny)
    dist.barrier()
    with count_reads() as counts, watch_memory() as rise, torch.no_grad():
        start = time.perf_counter()
        model = load(big)
        own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        for local in own:
            local.mul_(1)
        seconds = time.perf_counter() - start
    total = torch.stack([local.double().sum() for local in own]).sum()
    dist.all_reduce(total)
    result = {**rise, "bytes": sum(counts), "seconds": seconds, "sum": float(total)}
    result["share"] = sum(local.nbytes for local in own)
    (out / f"{rank}.part").write_text(json.dumps(result))
    (out / f"{rank}.part").rename(out / f"{rank}.json")
    while len(list(out.glob("*.json"))) < world_size:
        time.sleep(0.01)
    # A rank was once aborted with "terminate called without an active exception", probably by threads of gloo while the
    # interpreter ended, seen in torch 2.13: all results are written, so leave without that.
    os._exit(0)


def measure(method: str, world_size: int, big: Path, tiny: Path) -> dict[str, float]:
    """Return the largest value over the ranks of one run."""
    with tempfile.TemporaryDirectory() as name:
        mp.start_processes(
            measure_rank, (world_size, method, big, tiny, Path(name)), nprocs=world_size, start_method="spawn"
        )
        ranks = [json.loads(path.read_text()) for path in Path(name).glob("*.json")]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def save_model(family: str, num_bytes: float, folder: Path) -> int:
    """Write random weights of about this size as they are on the Hub, and return their bytes."""
    torch.manual_seed(0)

    def build(num_layers: int, device: str) -> Any:
        config = AutoConfig.for_model(family, **FAMILIES[family], num_hidden_layers=num_layers)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    one, two = (sum(p.nbytes for p in build(n, "meta").parameters()) for n in (1, 2))
    model = build(max(1, round((num_bytes - one) / (two - one)) + 1), "cpu")
    model.save_pretrained(folder, max_shard_size="400MB")
    return sum(p.nbytes for p in model.parameters())


def print_table(family: str, size: int, runs: dict[tuple[int, str], list[dict[str, float]]]) -> None:
    """Print medians, in Markdown."""
    print(f"\n### {family}, {size / MIB:.0f} MiB in float32\n")
    print("| ranks | method | peak anonymous MiB | peak resident MiB | 1/N + 200 MiB | read MiB | 1/N MiB | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for (world_size, method), results in runs.items():
        median = {key: statistics.median(r[key] for r in results) for key in results[0]}
        low, high = (f(r["seconds"] for r in results) for f in (min, max))
        print(
            f"| {world_size} | {method} | {median['anonymous'] / MIB:.0f} | {median['resident'] / MIB:.0f} "
            f"| {size / world_size / MIB + 200:.0f} | {median['bytes'] / MIB:.0f} | {size / world_size / MIB:.0f} "
            f"| {median['seconds']:.2f} ({low:.2f}-{high:.2f}) |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, medians of {args.repeats}")
    for family in args.families:
        with tempfile.TemporaryDirectory() as name:
            big, tiny = Path(name) / "big", Path(name) / "tiny"
            size = save_model(family, args.gib * 2**30, big)
            save_model(family, 0, tiny)
            runs: dict[tuple[int, str], list[dict[str, float]]] = {}
            for _ in range(args.repeats):  # methods take turns, so that all see the same disturbances
                for world_size in args.ranks:
                    for method in METHODS:
                        if world_size > 1 or method != "from_pretrained(distributed_config)":  # plain on one rank
                            runs.setdefault((world_size, method), []).append(measure(method, world_size, big, tiny))
            sums = [r["sum"] for results in runs.values() for r in results]
            assert max(sums) - min(sums) <= 1e-6 * max(map(abs, sums)), "methods loaded different weights"
            print_table(family, size, runs)


if __name__ == "__main__":
    main()
