from pathlib import Path

import pytest

from lit_fsdp.callbacks.plots import render_svg, write_png
from lit_fsdp.callbacks.sections import Curve, Plot

CURVES = (
    Curve(label="forward", x=[1, 2, 4], y=[1.0, 2.0, 3.0]),
    Curve(label="backward", x=[1, 2, 4], y=[2.0, 1.0, 0.5]),
)
SETTINGS = [{}, {"kind": "stacked", "spans": [("phase A", 1, 2), ("phase B", 2, 4)]}, {"kind": "bars"}, {"log_x": True}]


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
