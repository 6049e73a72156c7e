"""Who hands lines of a manifest to a ``Preparer``: processes of this machine or of a Ray cluster, shard by shard."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from lit_fsdp.cache import hash_file, read_state
from lit_fsdp.checkpoint.manifest import describe_files
from lit_fsdp.errors import join_names
from lit_fsdp.export.out_folder import lock_out
from lit_fsdp.files import refuse_unwritable, remove_parts, write_whole
from lit_fsdp.tasks.tts.preparation.cleaning import DUPLICATE, mark_duplicates
from lit_fsdp.tasks.tts.preparation.manifest import ManifestRow, read_manifest
from lit_fsdp.tasks.tts.preparation.prepared import PLAN, SUMMARY, ShardFormat, write_shard
from lit_fsdp.tasks.tts.preparation.preparer import Preparer, Rejected
from lit_fsdp.tasks.tts.preparation.ray_runner import Job, run_on_ray
from lit_fsdp.weights.file_names import join_name

REJECTS = "rejects.jsonl"
_LOCK = ".prepare.lock"
_MODELS = ("model", "transcriber")  # settings that name one

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run of preparation left in a folder.

    Args:
        folder: Where.
        num_rows: Good ones.
        num_rejected: Lines that gave none; ``rejects.jsonl`` says why.
        seconds: Of audio in all rows.
        num_resumed: Shards that were there from an earlier run.
        cleaned: What cleaning did, by name: how many files, clips or texts it changed, and ``left_out_ms`` of pauses.
    """

    folder: Path
    num_rows: int
    num_rejected: int
    seconds: float
    num_resumed: int
    cleaned: dict[str, int]


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
        show_progress: Draw a bar, if this is a terminal.
        ray_address: Work on this Ray cluster, ``local`` or ``auto``; ``None`` works without Ray.

    Raises:
        ValueError: The folder holds shards of something else, or another process is writing it.
        RuntimeError: One of the processes was killed.
    """
    rows = read_manifest(manifest)
    shards = [rows[i : i + rows_per_shard] for i in range(0, len(rows), rows_per_shard)]
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file: expected a folder, or the name of a new one")
    with lock_out(out, out / _LOCK), refuse_unwritable("out", out):
        preparer.check_languages(rows)  # before the folder is one of these rows
        _check_plan(out, rows, preparer, rows_per_shard=rows_per_shard, shard_format=shard_format)
        remove_parts(out)
        if preparer.cleaning.drop_duplicates:
            rows = mark_duplicates(rows)
            shards = [rows[i : i + rows_per_shard] for i in range(0, len(rows), rows_per_shard)]
        paths = [out / f"shard-{i:05}.{shard_format}" for i in range(len(shards))]
        missing = [i for i, path in enumerate(paths) if not _is_whole(path, shards[i])]
        if missing:  # until they are there, the folder must not look finished
            (out / SUMMARY).unlink(missing_ok=True)
        jobs = [(preparer, shards[i], paths[i]) for i in missing]
        num_rows = len(rows) - sum(len(shards[i]) for i in missing)
        is_off = None if show_progress else True  # None: where there is no terminal
        with tqdm(total=len(rows), initial=num_rows, desc="preparing", unit=" clips", disable=is_off) as bar:
            for count in _run(jobs, num_processes, ray_address):
                bar.update(count)
        return _finish(out, paths, num_resumed=len(paths) - len(missing))


def prepare_shard(preparer: Preparer, rows: Sequence[ManifestRow], path: Path) -> int:
    """Prepare the lines of one shard and write it, what was rejected beside it; return how many lines there were."""
    # Before they are decoded: what is replaced in between is found by a resume.
    inputs = {}
    for name, file in _list_inputs(rows).items():
        with suppress(OSError, ValueError):  # may not be read; its line is rejected
            inputs[name] = (read_state(file), hash_file(file))
    good, rejected, cleaned = preparer(rows)
    path.unlink(missing_ok=True)
    if good:
        write_shard(path, good)
    summary = {"num_rows": len(good), "seconds": sum(row.seconds for row in good)}
    files = describe_files([path] if good else [])
    text: dict[str, Any] = {**summary, "rejected": [asdict(r) for r in rejected], "files": files, "inputs": inputs}
    text |= {"cleaned": cleaned, "duplicates": _list_duplicates(rows)}
    write_whole(_name_summary(path), json.dumps(text, ensure_ascii=False))  # last: it says what is complete
    return len(rows)


def _run(jobs: Sequence[Job], num_processes: int, ray_address: str | None) -> Iterator[int]:
    if ray_address is not None and jobs:
        yield from run_on_ray(jobs, prepare_shard, num_workers=num_processes, address=ray_address)
        return
    if num_processes == 1 or len(jobs) < 2:
        yield from (prepare_shard(*job) for job in jobs)
        return
    context = get_context("spawn")  # not forked: threads of torch do not survive it
    number = context.Value("i", 0) if jobs[0][0].device == "cuda" else None
    try:
        with ProcessPoolExecutor(min(num_processes, len(jobs)), context, begin_worker, (number,)) as pool:
            try:
                for done in as_completed([pool.submit(prepare_shard, *job) for job in jobs]):
                    yield done.result()
            finally:  # an error and Ctrl-C would else come after all shards
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"num_processes: got {num_processes}: a process was killed, perhaps for lack of memory: set it lower, and "
            "start the command again to go on"
        ) from error


def begin_worker(number: Any) -> None:
    """Let a process of the pool end with the one that started it, and have a GPU of its own.

    Args:
        number: How many have begun, of all processes; ``None`` where no GPU is used, which would take its memory.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if number is not None:
        _choose_gpu(number)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however it went: nobody else would end it.

    It would go on to write into a folder that is prepared anew. What it is writing is left as after any kill.
    """
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])  # a pipe that the system closes: no signal is needed, and none can be missed
    os._exit(1)


def _choose_gpu(number: Any) -> None:
    """Give each process a GPU of its own, as far as there are enough."""
    with number.get_lock():
        own = number.value
        number.value += 1
    if count := torch.cuda.device_count():
        torch.cuda.set_device(own % count)


def _name_summary(path: Path) -> Path:
    return path.with_name(f".{path.stem}.json")


def _is_whole(path: Path, rows: Sequence[ManifestRow]) -> bool:
    """Tell whether a shard is as it was written, byte for byte, of files that are still the same.

    One without good rows is where its summary is. What was prepared of a file that is gone stays.
    """
    try:
        summary = json.loads(_name_summary(path).read_text(encoding="utf-8"))
        paths = [join_name(path.parent, name, source=path) for name in summary["files"]]
        if summary["files"] != describe_files(paths) or path.is_file() != bool(paths):
            return False
        known = summary["inputs"]
        if summary["duplicates"] != _list_duplicates(rows):  # of a file that was replaced since
            return False
        changed = [name for name, file in _list_inputs(rows).items() if _is_other(file, known.get(name))]
    except (OSError, ValueError, KeyError, TypeError):  # not there, cut, or of an earlier release
        return False
    if changed:
        log.warning("%s is made again: changed since it was prepared: %s", path.name, join_names(changed))
    return not changed


def _list_duplicates(rows: Iterable[ManifestRow]) -> list[str]:
    """Return which lines are left out as duplicates, and of what."""
    return [f"{row.line}: {row.problem}" for row in rows if (row.problem or "").startswith(DUPLICATE)]


def _list_inputs(rows: Iterable[ManifestRow]) -> dict[str, Path]:
    """Return the audio files of lines that are regular files, by their names in the manifest."""
    found = {}
    for row in rows:
        for name in filter(None, (row.audio, row.ref_audio)):
            with suppress(OSError, ValueError, RuntimeError):  # no name of a file; its line is rejected
                if (path := row.resolve(name)).is_file():
                    found[name] = path
    return found


def _is_other(file: Path, known: tuple[list[int], str] | None) -> bool:
    """Tell whether a file is another one than that of this state and digest, or was not there."""
    return known is None or (read_state(file) != known[0] and hash_file(file) != known[1])


def _check_plan(
    out: Path, rows: Iterable[ManifestRow], preparer: Preparer, *, rows_per_shard: int, shard_format: str
) -> None:
    """Refuse to mix shards that were made of other lines or with other settings."""
    lines = hashlib.sha256("\n".join(repr(asdict(row)) for row in rows).encode()).hexdigest()
    plan: dict[str, Any] = {"manifest": lines, "rows_per_shard": rows_per_shard, "format": shard_format}
    plan |= {"contents": preparer.describe_models(), **asdict(preparer)}
    path = out / PLAN
    if not path.is_file():
        if foreign := sorted(file.name for kind in ("parquet", "jsonl") for file in out.glob(f"*.{kind}")):
            raise ValueError(
                f"out: {out} holds {foreign[0]}, which no `prepare tts` has put there and `fit` would train on as "
                "well: expected an empty folder, or the name of a new one"
            )
        write_whole(path, json.dumps(plan))
        return
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"out: {path} is damaged: {error}: expected another folder, or an empty one") from error
    # Models by their contents alone, as a folder has many names.
    if changed := [name for name in plan if name not in _MODELS and stored.get(name) != plan[name]]:
        was = _describe_change(changed[0], stored, plan)
        raise ValueError(
            f"out: {out} holds shards made with another {was}: expected the same to go on, or another folder"
        )


def _describe_change(name: str, stored: dict[str, Any], plan: dict[str, Any]) -> str:
    """Return which setting is another one now, and what it was."""
    old, value = stored.get(name), plan[name]
    if name == "manifest":
        return "manifest: its lines or its folder have changed, or an earlier release began it"
    if name == "contents":
        is_transcriber = (old or {}).get("transcriber") != value.get("transcriber")
        model = "transcriber" if is_transcriber else "model"
        if stored.get(model) != plan[model]:
            return f"{model} ({stored.get(model)!r})"
        return f"{model}: its files have changed, or an earlier release began it"
    if not isinstance(value, dict) or not isinstance(old, dict):
        return f"{name} ({old!r})"
    parts = [f"{name}.{key} {old[key]!r}" if key in old else f"{name}.{key}" for key in value]
    parts = [part for part, key in zip(parts, value, strict=True) if old.get(key) != value[key]]
    began = "" if value.keys() <= old.keys() else ": an earlier release began it"
    return f"{parts[0] if parts else name}{began}"


def _finish(out: Path, paths: Sequence[Path], *, num_resumed: int) -> Prepared:
    parts = [json.loads(_name_summary(path).read_text()) for path in paths]
    rejected = [Rejected(**r) for part in parts for r in part["rejected"]]
    lines = (json.dumps(asdict(r), ensure_ascii=False) for r in sorted(rejected, key=lambda r: r.line))
    write_whole(out / REJECTS, "".join(f"{line}\n" for line in lines))
    found = Prepared(
        folder=out,
        num_rows=sum(part["num_rows"] for part in parts),
        num_rejected=len(rejected),
        seconds=sum(part["seconds"] for part in parts),
        num_resumed=num_resumed,
        cleaned=dict(sum((Counter(part["cleaned"]) for part in parts), Counter())),
    )
    if num_duplicates := sum(len(part["duplicates"]) for part in parts):
        found.cleaned["duplicates"] = num_duplicates
    summary: dict[str, Any] = {"num_rows": found.num_rows, "num_rejected": found.num_rejected}
    summary["seconds"] = round(found.seconds, 3)
    if found.cleaned:
        summary["cleaned"] = found.cleaned
    write_whole(out / SUMMARY, json.dumps(summary) + "\n")
    return found
