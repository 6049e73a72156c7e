"""Work done once, on disk: by the first process that comes, while all others wait.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

COMPLETE = "complete"  # the last file written; a folder without it is never read


def get_cache_dir(cache_dir: str | None) -> Path:
    """Return the setting, else ``LIT_FSDP_CACHE``, else ``~/.cache/lit_fsdp``."""
    return Path(cache_dir or os.environ.get("LIT_FSDP_CACHE") or "~/.cache/lit_fsdp").expanduser()


def make_key(**facts: Any) -> str:
    """Return a name that changes whenever a fact does. Facts must be JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``, filled by ``build`` in exactly one of the processes that call this at the same time.

    If the one that builds fails, those that waited for it raise the same ``ValueError``. If it is killed, the
    next one builds. Whoever comes later tries again.

    Args:
        folder: Must lie on a disk with file locks, shared by all processes that should share the work.
        build: Called with an empty folder beside ``folder``, which is renamed when all is written.
    """
    if (folder / COMPLETE).exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file is in its place, or it may not be written to
        raise ValueError(f"cache_dir: cannot make the folder {folder.parent}: {error.strerror}") from error
    failure = folder.with_name(f"{folder.name}.failed")
    known_failure = _read_failure(failure)
    with _locked(folder):
        if (folder / COMPLETE).exists():
            return folder
        new_failure = _read_failure(failure)
        if new_failure is not None and new_failure != known_failure:  # it happened while this process waited
            raise ValueError(new_failure["reason"])
        try:
            _build(folder, build)
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            failure.write_text(json.dumps({"id": uuid.uuid4().hex, "reason": reason}))
            raise
        failure.unlink(missing_ok=True)
    return folder


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
        (temporary / COMPLETE).touch()
        for path in temporary.rglob("*"):
            if path.is_file():
                _write_through(path)
        if folder.exists():  # without the marker, or build_once had returned
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_through(path: Path) -> None:
    """Make sure that a power cut cannot leave the marker on disk and the data not."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_failure(path: Path) -> dict[str, str] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):  # the latter: being written just now
        return None
