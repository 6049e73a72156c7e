"""What ``plan --search`` prints can be read: narrow tables of figures, settings in full, one unit for each column."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from search_problems import describe

from lit_fsdp.planning.search.report import print_search
from lit_fsdp.planning.search.search import Candidate, choose, format_changes, search
from lit_fsdp.reporting.sections import Table, print_table

GIB = 2**30
_LONG = {"model.lora": {"r": 16, "alpha": 32.0}, "trainer.strategy.activation_checkpointing.mode": "selective"}
_LONG |= {"trainer.strategy.sharding.reshard_after_forward": False, "trainer.accumulate_grad_batches": 16}


def scale(candidate: Candidate, *, seconds: float, num_bytes: int) -> Candidate:
    """Return a candidate that takes so long, and so much of everything."""
    time = candidate.time
    factor = seconds / time.step_s
    names = ("compute_s", "exposed_s", "optimizer_s")
    return replace(
        candidate,
        time=replace(time, **{name: factor * getattr(time, name) for name in names}),
        peak_bytes=num_bytes,
        host_bytes=num_bytes,
        compiled_s=factor * time.step_s,
    )


def show(candidates: Sequence[Candidate], capsys: pytest.CaptureFixture[str], device_bytes: int = 24 * GIB) -> str:
    capsys.readouterr()
    print_search(candidates, choose(candidates), device_bytes, ranks_per_node=4)
    return capsys.readouterr().out


def find_header(printed: str) -> list[str]:
    """Return the columns of the first table, words of both lines joined."""
    lines = [[cell.strip() for cell in line.split("┃")[1:-1]] for line in printed.splitlines() if line.startswith("┃")]
    return [" ".join(words).strip() for words in zip(lines[0], lines[1], strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("columns", [80, 120, None])
def test_figures_are_in_a_narrow_table_and_settings_in_a_list(
    columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    candidates = [scale(c, seconds=123.4, num_bytes=123 * GIB) for c in search(describe(200 * GIB))]
    candidates = [replace(c, fits=i > 0, changes=_LONG if i else {}) for i, c in enumerate(candidates)]
    printed = show(candidates, capsys)
    *said, chosen_line = printed.splitlines()
    assert chosen_line.startswith("chosen: ")
    assert max(len(line) for line in said) <= (columns or 80)
    figures = re.findall(r"^│ +(\*?\d+) +│", printed, re.MULTILINE)
    listed = re.findall(r"^ +(\*?\d+)  ", printed, re.MULTILINE)
    assert len(figures) > 4
    assert figures == listed
    assert [int(number.strip("*")) for number in figures] == list(range(1, len(figures) + 1))
    assert [number for number in figures if "*" in number] == ["*2"]
    assert "1  as configured (does not fit)" in printed
    whole = " ".join(printed.split())
    assert whole.count(format_changes(_LONG)) == len(figures)  # ... of which the last is that of the chosen
    for name, value in _LONG.items():  # none is broken
        setting = format_changes({name: value})
        assert sum(setting in line for line in said) == len(figures) - 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("seconds", "num_bytes", "units"), [(0.002, 60 * 2**20, ("MiB", "ms")), (2.0, 6 * GIB, ("GiB", "s"))]
)
def test_a_column_has_the_unit_of_its_largest_figure(
    seconds: float, num_bytes: int, units: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = search(describe(24 * GIB))
    large = scale(first, seconds=seconds, num_bytes=num_bytes)
    printed = show([large, *(scale(c, seconds=seconds / 500, num_bytes=num_bytes // 50) for c in others)], capsys)
    size, time = units
    assert find_header(printed)[:6] == [
        "#",
        f"peak {size}",
        "left GiB",
        f"host {size}/rank",
        f"step {time}",
        f"compiled {time}",
    ]
    row = next(line for line in printed.splitlines() if line.startswith("│"))
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells[1] == cells[3] == ("60.00" if size == "MiB" else "6.00")
    assert cells[4] == cells[5] == "2.00"


@pytest.mark.full
def test_host_memory_is_of_a_rank_in_the_table_and_of_a_node_for_the_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, *others = search(describe(24 * GIB))
    chosen = scale(others[0], seconds=0.001, num_bytes=3 * GIB)
    printed = show([replace(first, fits=False), chosen], capsys)
    assert "host GiB/rank" in find_header(printed)
    assert printed.endswith("; 12.00 GiB of host memory on each node\n")
    assert "host" not in show([replace(first, fits=False), replace(chosen, host_bytes=0)], capsys)


def test_a_table_in_a_pipe_is_as_wide_as_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table(title="", columns=["name"], rows=[["word " * 30]])
    widths = []
    for columns in ("60", None):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        print_table(table)
        widths.append(max(len(line.rstrip()) for line in capsys.readouterr().out.splitlines()))
    assert widths[0] <= 60
    assert widths[1] > 150
