"""Memory of the host is what a process may have of it."""

import os
from pathlib import Path

import pytest

from lit_fsdp.profiling import host_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {}, MACHINE),
        ("0::/", {"memory.max": "max\n"}, MACHINE),
        ("0::/", {"memory.max": f"{GIB}\n"}, GIB),  # a container
        ("0::/job_1/step_0", {"job_1/memory.max": f"{GIB}", "job_1/step_0/memory.max": "max"}, GIB),  # of SLURM
        ("0::/job_1/step_0", {"job_1/memory.max": "max", "job_1/step_0/memory.max": f"{GIB}"}, GIB),
        ("5:cpu,memory:/a\n2:cpuset:/b\n0::/", {"memory/a/memory.limit_in_bytes": f"{GIB}"}, GIB),  # version 1
        ("5:memory:/docker/f00", {"memory/memory.limit_in_bytes": f"{GIB}"}, GIB),  # whose name is that outside
        ("5:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
        ("2:cpuset:/", {"memory/memory.limit_in_bytes": f"{GIB}"}, MACHINE),
    ],
)
def test_limits_of_containers_and_jobs_count(
    groups: str, limits: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in limits.items():
        (path := tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "groups").write_text(f"{groups}\n")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path / "cgroup")
    assert host_memory.count_host_bytes() == expected


def test_a_system_without_groups_has_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "nothing")
    assert host_memory.count_host_bytes() == MACHINE
