"""What settings send over a slow link between nodes, and that the documentation shows what was measured."""

import json
from pathlib import Path

import pytest

from benchmarks import links, low_bit_wire, scaling_advice
from benchmarks.network_namespaces import find_obstacle

ROOT = Path(__file__).parents[1]
ADVICES = [ROOT / "benchmarks" / "results" / f"scaling_advice_2026-11-{day}.md" for day in (24, 27)]
FEWER_BITS = ROOT / "benchmarks" / "results" / "low_bit_wire_2026-11-23.md"
CURVES = ROOT / "benchmarks" / "results" / "low_bit_curves_2026-11-28.md"
RESULTS = ROOT / "benchmarks" / "results" / "links_2026-11-28.md"


def test_the_tables_of_documentation_and_results_are_what_was_measured() -> None:
    summary = json.loads(RESULTS.with_suffix(".json").read_text())["rates"]
    table = "\n".join(links.make_table(summary))
    assert table in RESULTS.read_text()
    assert table in (ROOT / "docs" / "communication.md").read_text()
    assert "\n".join(links.make_plan_table(summary)) in RESULTS.read_text()


def test_the_tables_of_fewer_bits_are_what_was_measured() -> None:
    found, curves = (json.loads(page.with_suffix(".json").read_text()) for page in (FEWER_BITS, CURVES))
    tables = {FEWER_BITS: low_bit_wire.make_link_table(found["links"])}
    tables[CURVES] = low_bit_wire.make_curve_table(curves["curves"])
    for page, lines in tables.items():
        assert "\n".join(lines) in page.read_text()
    assert "\n".join(tables[FEWER_BITS]) in (ROOT / "docs" / "communication.md").read_text()
    for rows in found["links"].values():
        assert all(row["sent_mb"] == pytest.approx(row["expected_mb"], rel=0.03) for row in rows.values())


@pytest.mark.parametrize("page", ADVICES, ids=lambda page: page.stem)
def test_how_often_more_cards_were_judged_right_is_what_was_measured(page: Path) -> None:
    cases = json.loads(page.with_suffix(".json").read_text())["cases"]
    for k in (0, 1):
        assert "\n".join(scaling_advice.make_table(cases, k)) in page.read_text()
        counted = f"{scaling_advice.count_right(cases, k)} of {len(cases)}"
        assert counted in page.read_text()
        assert counted in (ROOT / "docs" / "communication.md").read_text()


@pytest.mark.full
def test_a_node_sends_what_its_settings_say(tmp_path: Path) -> None:
    if obstacle := find_obstacle():
        pytest.skip(f"needs network namespaces: {obstacle}")
    found = links.measure([links.UNLIMITED], 1, 128, 2, tmp_path, is_planned=False)[links.UNLIMITED]
    sent = {name: values["sent"][0] for name, values in found.items()}
    assert sent[links.ALONE] < 0.05e6  # of the barriers
    expected = {
        name: links.count_sent_bytes(setting, links.plan_setting(setting, 128, 2)[1])
        for name, setting in links.SETTINGS.items()
    }
    assert min(expected.values()) > 1.5e6
    for name, num_bytes in expected.items():
        assert sent[name] == pytest.approx(num_bytes, rel=0.03), name
