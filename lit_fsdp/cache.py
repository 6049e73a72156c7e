"""Work done once, on disk: by the first process that comes, while all others wait. Checked whenever it is used again.

No rank waits in a collective, which would time out after minutes; they wait for a file lock, as long as it
takes.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from lit_fsdp.files import UnwritableError, refuse_unwritable, sync_path, write_whole

log = logging.getLogger(__name__)

# The last file written, with digest and state of the others; a folder without it, or with other contents, is not read.
COMPLETE = "complete"
_FOUND = "found.json"
_SAMPLE_BYTES = 1 << 14


def get_cache_dir(cache_dir: str | None) -> Path:
    """Return the setting, else ``LIT_FSDP_CACHE``, else ``~/.cache/lit_fsdp``."""
    return Path(cache_dir or os.environ.get("LIT_FSDP_CACHE") or "~/.cache/lit_fsdp").expanduser()


def make_key(**facts: Any) -> str:
    """Return a name that changes whenever a fact does. Facts must be JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def hash_files(cache_dir: Path, paths: Sequence[Path]) -> list[str]:
    """Return digests of the contents of files, read by one process, and all again only after one of them has changed.

    Raises:
        ValueError: One cannot be read.
    """
    return list(compute_once(cache_dir, "digests", paths, lambda: [hash_file(path) for path in paths]))


def compute_once(cache_dir: Path, name: str, paths: Sequence[Path], compute: Callable[[], Any]) -> Any:
    """Return what ``compute`` finds in files: by one process, and again only after one of them has changed.

    Args:
        cache_dir: Where it is kept.
        name: What it is, a folder there.
        paths: The files.
        compute: Its result must be JSON.
    """
    states = [(str(path.resolve()), *read_state(path)) for path in paths]

    def build(folder: Path) -> None:
        (folder / _FOUND).write_text(json.dumps(compute()))

    return json.loads((build_once(cache_dir / name / make_key(file=_FOUND, files=states), build) / _FOUND).read_text())


def read_digests(folder: Path) -> dict[str, str]:
    """Return what tells the contents of a folder of :func:`build_once` from others: a digest of each file, by name."""
    return {name: digest for name, (digest, _) in json.loads((folder / COMPLETE).read_text()).items()}


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``, filled by ``build`` in exactly one of the processes that call this at the same time.

    If the one that builds fails, those that waited for it raise the same ``ValueError``. If it is killed, the
    next one builds. Whoever comes later tries again. A folder that was damaged since is built anew, with a warning.
    Files are read again only if something has touched them since they were written, as for a folder that was copied.

    Args:
        folder: Must lie on a disk with file locks, shared by all processes that should share the work.
        build: Called with an empty folder beside ``folder``, which is renamed when all is written.

    Raises:
        UnwritableError: The disk of the cache is full or may not be written to.
    """
    if _is_whole(folder):
        return folder
    with refuse_unwritable("cache_dir", folder.parent):
        _build_locked(folder, build)
    return folder


def _build_locked(folder: Path, build: Callable[[Path], None]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:  # a file is in its place, or /proc
        raise UnwritableError(f"cache_dir: cannot make the folder {folder.parent}: {error.strerror}") from error
    failure = folder.with_name(f"{folder.name}.failed")
    known_failure = _read_failure(failure)
    with _locked(folder):
        if _is_whole(folder):
            return
        if (folder / COMPLETE).exists():
            log.warning("%s is damaged and made again", folder)
        new_failure = _read_failure(failure)
        if new_failure is not None and new_failure != known_failure:  # it happened while this process waited
            raise ValueError(new_failure["reason"])
        try:
            _build(folder, build)
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # the disk may be full: those who wait see so themselves
                write_whole(failure, json.dumps({"id": uuid.uuid4().hex, "reason": reason}))
            raise
        failure.unlink(missing_ok=True)


def _locked(folder: Path) -> Any:
    lock = FileLock(f"{folder}.lock", thread_local=False)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that prepares %s", folder)
        return lock.acquire(timeout=-1)


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    for left_by_the_killed in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(left_by_the_killed, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        build(temporary)
        written = {name: (hash_file(path), read_state(path)) for name, path in _list_files(temporary).items()}
        (temporary / COMPLETE).write_text(json.dumps(written))
        for path in temporary.rglob("*"):
            if path.is_file():
                sync_path(path)  # a power cut must not leave the marker on disk and the data not
        if folder.exists():  # not whole, or build_once had returned
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _is_whole(folder: Path) -> bool:
    """Whether all files of a folder are as they were written."""
    try:
        written, files = json.loads((folder / COMPLETE).read_text()), _list_files(folder)
        return written.keys() == files.keys() and all(
            state == read_state(files[name]) or digest == hash_file(files[name])
            for name, (digest, state) in written.items()
        )
    except (AttributeError, OSError, ValueError, TypeError):  # not there, cut, or being replaced just now
        return False


def _list_files(folder: Path) -> dict[str, Path]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / COMPLETE)
    return {str(path.relative_to(folder)): path for path in files}


def read_state(path: Path) -> list[int]:
    """Return what changes with a file. Anyone may set size and time back, but not the time of a status change."""
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def hash_file(path: Path) -> str:
    """Return a digest of the contents of a file; raise a ``ValueError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def sample_file(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes, and a digest of that and of what lies at its begin, middle and end.

    Reads at most 48 KiB: a change between these is seen only where the size changes, too.

    Raises:
        OSError: It cannot be read.
    """
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(b"%d" % size)
        for place in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
    return size, digest.hexdigest()


def _read_failure(path: Path) -> dict[str, str] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
