from pathlib import Path

import pytest

from lit_fsdp.profiling.memory import KINDS
from lit_fsdp.profiling.memory_log import Peak, StepMemory
from lit_fsdp.reporting.memory_section import plot_step
from lit_fsdp.reporting.plots import render_svg, write_png
from lit_fsdp.reporting.sections import Curve, Plot

CURVES = (
    Curve(label="forward", x=[1, 2, 4], y=[1.0, 2.0, 3.0]),
    Curve(label="backward", x=[1, 2, 4], y=[2.0, 1.0, 0.5]),
)
SETTINGS = [{}, {"kind": "stacked", "spans": [("phase A", 1, 2), ("phase B", 2, 4)]}, {"kind": "bars"}, {"log_x": True}]


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_plot_names_its_axes_curves_and_spans(settings: dict, tmp_path: Path) -> None:
    plot = Plot(title="Memory over a step", x_label="time in s", y_label="GiB", curves=CURVES, **settings)
    svg = render_svg(plot)
    assert svg.startswith("<svg")
    assert "href=" not in svg.replace('href="#', "")  # needs no other file
    spans = [name for name, _, _ in settings.get("spans", [])]
    for text in ("Memory over a step", "time in s", "GiB", "forward", "backward", *spans):
        assert text in svg
    write_png(plot, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_memory_of_a_device_is_drawn_where_it_is_near() -> None:
    by_kind = {kind: [0, 2**20, 2**20] for kind in KINDS}
    peak = Peak(num_bytes=7 * 2**20, operator=1, phase="forward", unit="", by_kind={}, by_unit={})
    memory = StepMemory(peak=peak, by_kind=by_kind, phases=[("forward", 0, 2), ("optimizer", 2, 3)])
    near, far = (plot_step(memory, title="", limit_bytes=num * 2**20) for num in (20, 40))
    assert near.levels == [("20.0 MiB: what tensors may take", 20.0)]
    assert "20.0 MiB: what tensors may take" in render_svg(near)
    assert not far.levels
    assert near.curves[0].y == [0.0, 1.0, 1.0]
