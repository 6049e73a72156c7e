"""How much memory the host has for a process: that of the machine, or what its container or job may have of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def count_host_bytes() -> int:
    """Return the bytes of memory that the kernel would give this process and those beside it, in use or not.

    The least of the machine's and of the limits of the control groups that the process is in, of version 1 or 2:
    https://docs.kernel.org/admin-guide/cgroup-v2.html. Containers and jobs of SLURM have such limits.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _list_limits():
        with suppress(OSError, ValueError):  # there is none: no such file, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def _list_limits() -> Iterator[Path]:
    """Yield where limits may be: of the group of this process, and of those that it is in."""
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if not kinds:
            root, name = _ROOT, "memory.max"
        elif "memory" in kinds.split(","):
            root, name = _ROOT / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see the name that its group has outside: its own is the root then.
        folder = Path(group).relative_to("/")
        yield from (root / part / name for part in (folder, *folder.parents))
