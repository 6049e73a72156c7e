"""The same shards by the workers of a Ray cluster, through Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow
from lit_fsdp.tasks.tts.preparation.preparer import Preparer

Job = tuple[Preparer, list[ManifestRow], Path]


class ShardWorker:
    """Prepares shards by their numbers; lives in a process of Ray, with a codec of its own.

    Args:
        jobs: All of them, as an object of Ray.
        work: Prepares one.
    """

    def __init__(self, jobs: Any, work: Callable[..., int]) -> None:
        import ray

        self.jobs: Sequence[Job] = ray.get(jobs)
        self.work = work

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return how many lines each shard of a batch had."""
        return {"count": [self.work(*self.jobs[int(number)]) for number in batch["number"]]}


def run_on_ray(jobs: Sequence[Job], work: Callable[..., int], *, num_workers: int, address: str) -> Iterator[int]:
    """Prepare shards on a cluster; yield the lines of each as it is done.

    Args:
        jobs: Preparer, lines and path of each shard; the paths must lead to the same place on all nodes.
        work: Prepares one.
        num_workers: How many at a time.
        address: Of the cluster; ``local`` starts one on this machine, ``auto`` takes the one that is running.

    Raises:
        ValueError: Ray is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError(f"backend: got 'ray': {error}: pip install 'lit_fsdp[ray]'") from error
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False  # there is one of ours
        numbers = ray.data.from_items([{"number": i} for i in range(len(jobs))], override_num_blocks=len(jobs))
        num_workers = min(num_workers, len(jobs))
        done = numbers.map_batches(
            ShardWorker,
            fn_constructor_args=(ray.put(list(jobs)), work),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=num_workers),
            num_gpus=_share_gpus(jobs[0][0], num_workers, ray.cluster_resources().get("GPU", 0)),
        )
        for row in done.iter_rows():
            yield int(row["count"])
    finally:
        if is_ours:
            ray.shutdown()


def _share_gpus(preparer: Preparer, num_workers: int, num_gpus: float) -> float | None:
    """Return how much of a GPU each worker takes: one, or less where there are more workers.

    Raises:
        ValueError: The cluster has none.
    """
    if preparer.device == "cpu":
        return None
    if not num_gpus:
        raise ValueError("device: got 'cuda': the Ray cluster has no GPU; set cpu")
    workers_per_gpu = -(-num_workers // int(num_gpus))
    return 1 / workers_per_gpu
