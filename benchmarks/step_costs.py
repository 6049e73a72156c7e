"""What one step spends its time on, by torch's profiler: operators, kernels, and the work of FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NUM_ROWS = 12
_RANGES = "FSDP::"  # how torch names what fully_shard does
_TITLES = {
    "operators": "Operators, by what each runs itself",
    "kernels": "Kernels",
    "ranges": "FSDP2's own work; some lie inside others",
}

Costs = dict[str, list[tuple[str, int, float]]]


def start_profile() -> profile:
    """Start to record; the caller has waited for the device, and does again before ``list_costs``."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler = profile(activities=activities)
    profiler.start()
    return profiler


def list_costs(profiler: profile) -> Costs:
    """Stop to record; return name, calls and seconds of what took the most, of GPU time where there is one."""
    profiler.stop()
    on_gpu = ProfilerActivity.CUDA in profiler.activities
    own, whole = (
        ("self_device_time_total", "device_time_total") if on_gpu else ("self_cpu_time_total", "cpu_time_total")
    )
    found: dict[str, dict[str, tuple[int, float]]] = {"operators": {}, "kernels": {}, "ranges": {}}
    for event in profiler.key_averages():
        name, attribute = event.key, own
        if name.startswith(_RANGES):
            if event.device_type != DeviceType.CPU:  # the same range once more
                continue
            kind, name, attribute = "ranges", name.split()[0], whole  # without that of the unit
        elif event.is_user_annotation and event.device_type != DeviceType.CPU:  # a range of Python code, no kernel
            continue
        else:
            kind = "operators" if event.device_type == DeviceType.CPU else "kernels"
        calls, seconds = found[kind].get(name, (0, 0.0))
        found[kind][name] = (calls + event.count, seconds + getattr(event, attribute) / 1e6)
    return {
        kind: sorted(((n, c, s) for n, (c, s) in all_.items()), key=lambda r: -r[2]) for kind, all_ in found.items()
    }


def format_costs(costs: Any, step_s: float) -> list[str]:
    """Return tables of them in Markdown; ``step_s`` is a step that nobody recorded."""
    lines: list[str] = []
    for kind, title in _TITLES.items():
        total = sum(seconds for _, _, seconds in costs[kind])
        rows = [row for row in costs[kind][:NUM_ROWS] if row[2] > 0]
        if not rows:
            continue
        share = "" if kind == "ranges" else f"; {total * 1e3:.1f} ms in all, a step takes {step_s * 1e3:.1f} ms"
        lines += ["", f"{title}{share}:", "", "| name | calls | ms | share |", "|---|---|---|---|"]
        for name, calls, seconds in rows:
            part = seconds / (step_s if kind == "ranges" else total)
            lines.append(f"| `{name[:90].replace('|', '/')}` | {calls} | {seconds * 1e3:.2f} | {part:.1%} |")
    return lines
