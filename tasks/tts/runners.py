"""Who hands lines of a manifest to a ``Preparer``: processes of this machine or of a Ray cluster, shard by shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from lit_fsdp.tasks.tts.manifest import ManifestRow, read_manifest
from lit_fsdp.tasks.tts.prepared import SUMMARY, ShardFormat, write_shard
from lit_fsdp.tasks.tts.preparing import Preparer, Rejected
from lit_fsdp.tasks.tts.ray_runner import Job, run_on_ray

REJECTS = "rejects.jsonl"
_PLAN = "prepare.json"  # what the shards in a folder were made of


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run of preparation left in a folder.

    Args:
        folder: Where.
        num_rows: Good ones.
        num_rejected: Lines that gave none; ``rejects.jsonl`` says why.
        seconds: Of audio in all rows.
        num_resumed: Shards that were there from an earlier run.
    """

    folder: Path
    num_rows: int
    num_rejected: int
    seconds: float
    num_resumed: int


def prepare_shards(
    manifest: Path,
    out: Path,
    preparer: Preparer,
    *,
    num_processes: int = 1,
    rows_per_shard: int = 256,
    shard_format: ShardFormat = "parquet",
    show_progress: bool = True,
    ray_address: str | None = None,
) -> Prepared:
    """Prepare a manifest into a folder, shard by shard; shards that are complete are not made again.

    Processes of this machine and workers of Ray give the same files, byte for byte.

    Args:
        manifest: JSON lines.
        out: The folder, made if need be.
        preparer: What is done.
        num_processes: How many work side by side, each with a codec of its own.
        rows_per_shard: Lines of the manifest in a shard.
        shard_format: Of the shards.
        show_progress: Draw a bar.
        ray_address: Work on this Ray cluster, ``local`` or ``auto``; ``None`` works without Ray.

    Raises:
        ValueError: The folder holds shards of something else.
    """
    rows = read_manifest(manifest)
    shards = [rows[i : i + rows_per_shard] for i in range(0, len(rows), rows_per_shard)]
    out.mkdir(parents=True, exist_ok=True)
    _check_plan(out, rows, preparer, rows_per_shard=rows_per_shard, shard_format=shard_format)
    paths = [out / f"shard-{i:05}.{shard_format}" for i in range(len(shards))]
    missing = [i for i, path in enumerate(paths) if not _name_summary(path).is_file()]
    jobs = [(preparer, shards[i], paths[i]) for i in missing]
    num_rows = len(rows) - sum(len(shards[i]) for i in missing)
    with _Bar(len(rows), num_rows, is_shown=show_progress) as bar:
        for count in _run(jobs, num_processes, ray_address):
            bar.add(count)
    return _finish(out, paths, num_resumed=len(paths) - len(missing))


def prepare_shard(preparer: Preparer, rows: Sequence[ManifestRow], path: Path) -> int:
    """Prepare the lines of one shard and write it, what was rejected beside it; return how many lines there were."""
    good, rejected = preparer(rows)
    if good:
        write_shard(path, good)
    summary = {"num_rows": len(good), "seconds": sum(row.seconds for row in good)}
    text = json.dumps({**summary, "rejected": [asdict(r) for r in rejected]}, ensure_ascii=False)
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(_name_summary(path))  # last: the shard is complete when it is there
    return len(rows)


def _run(jobs: Sequence[Job], num_processes: int, ray_address: str | None) -> Iterator[int]:
    if ray_address is not None and jobs:
        yield from run_on_ray(jobs, prepare_shard, num_workers=num_processes, address=ray_address)
        return
    if num_processes == 1 or len(jobs) < 2:
        yield from (prepare_shard(*job) for job in jobs)
        return
    # Not forked: threads of torch do not survive it.
    with ProcessPoolExecutor(min(num_processes, len(jobs)), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(prepare_shard, *job) for job in jobs]):
            yield done.result()


def _name_summary(path: Path) -> Path:
    return path.with_name(f".{path.stem}.json")


def _check_plan(
    out: Path, rows: Iterable[ManifestRow], preparer: Preparer, *, rows_per_shard: int, shard_format: str
) -> None:
    """Refuse to mix shards that were made of other lines or with other settings."""
    lines = hashlib.sha256("\n".join(repr(asdict(row)) for row in rows).encode()).hexdigest()
    plan = {"manifest": lines, "rows_per_shard": rows_per_shard, "format": shard_format, **asdict(preparer)}
    path = out / f".{_PLAN}"
    if not path.is_file():
        path.write_text(json.dumps(plan))
        return
    stored = json.loads(path.read_text())
    if changed := [name for name, value in plan.items() if stored.get(name) != value]:
        raise ValueError(
            f"out: {out} holds shards made with another {changed[0]} ({stored.get(changed[0])!r}): expected the same "
            "settings to go on, or another folder"
        )


def _finish(out: Path, paths: Sequence[Path], *, num_resumed: int) -> Prepared:
    parts = [json.loads(_name_summary(path).read_text()) for path in paths]
    rejected = [Rejected(**r) for part in parts for r in part["rejected"]]
    lines = (json.dumps(asdict(r), ensure_ascii=False) for r in sorted(rejected, key=lambda r: r.line))
    (out / REJECTS).write_text("".join(f"{line}\n" for line in lines))
    found = Prepared(
        folder=out,
        num_rows=sum(part["num_rows"] for part in parts),
        num_rejected=len(rejected),
        seconds=sum(part["seconds"] for part in parts),
        num_resumed=num_resumed,
    )
    summary = {"num_rows": found.num_rows, "num_rejected": found.num_rejected, "seconds": round(found.seconds, 3)}
    (out / SUMMARY).write_text(json.dumps(summary) + "\n")
    return found


class _Bar:
    """A progress bar over lines of the manifest."""

    def __init__(self, total: int, done: int, *, is_shown: bool) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self._bar = tqdm(total=total, initial=done, desc="preparing", unit=" clips", disable=not is_shown)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, count: int) -> None:
        self._bar.update(count)
