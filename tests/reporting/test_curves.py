import itertools
import math

from lit_fsdp.reporting.curves import Series, make_curves_section


def test_a_short_series_keeps_every_value() -> None:
    series = Series(max_points=8)
    values = [(step, float(step % 3)) for step in range(7)]
    for step, value in values:
        series.add(step, value)
        assert series.list_points() == values[: step + 1]
    assert not series.is_thinned


def test_a_long_series_keeps_its_bound_its_peaks_and_its_last_value() -> None:
    series = Series(max_points=40)
    num_steps = 100_000
    peaks = {777: 50.0, 60_001: -50.0, 99_998: math.nan}
    for step in range(num_steps):
        series.add(step, peaks.get(step, math.sin(step)))
        assert len(series.list_points()) <= 44
    points = series.list_points()
    steps = [step for step, _ in points]
    assert steps == sorted(steps)
    assert {777, 60_001, 99_998, num_steps - 1} <= set(steps)
    assert series.is_thinned
    # Spread evenly: no part of the run is thinned more than another.
    assert max(b - a for a, b in itertools.pairwise(steps)) < num_steps / 5
    assert (series.low, series.high, series.num_values) == ((60_001, -50.0), (777, 50.0), num_steps)
    assert (series.num_not_finite, series.first_not_finite) == (1, 99_998)
    assert series.last == (num_steps - 1, math.sin(num_steps - 1))


def test_a_counter_is_in_the_table_and_in_no_plot() -> None:
    names = ("train/loss", "epoch", "step", "train/tokens_seen", "val/step_time", "train/num_epoch")
    history = {name: Series() for name in names}
    for series in history.values():
        series.add(1, 2.0)
    section = make_curves_section(history)
    assert [row[0] for row in section.tables[0].rows] == list(names)
    assert {plot.title for plot in section.plots} == {"train/loss", "val/step_time", "train/num_epoch"}
