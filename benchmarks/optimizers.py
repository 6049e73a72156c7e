"""Time and state of an optimizer step, by name, on one thread of the CPU or on a GPU.

    python benchmarks/optimizers.py --repeats 9 --out benchmarks/results/optimizers_DATE.md

One parameter of 4,096 x 1,024 floats, the same gradient for all; medians of steps, names in turn.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from lit_fsdp.optim.factory import Optimizer, build_optimizer

NAMES = ("adamw", "adamw_8bit", "adafactor")


def main() -> None:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gradient = torch.randn(4096, 1024, device=device)
    built = {}
    for name in NAMES:
        parameter = nn.Parameter(torch.randn(4096, 1024, device=device))
        parameter.grad = gradient.clone()
        built[name] = build_optimizer([parameter], Optimizer(name=name))
        built[name].step()  # makes the state
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(args.repeats):
        for name, optimizer in built.items():
            begin = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"one thread of a CPU ({platform.machine()})"
    packages = f"torch {version('torch')}, bitsandbytes {version('bitsandbytes')}"
    setting = (
        f"`python benchmarks/optimizers.py --repeats {args.repeats}` on {where}; {packages}. One parameter of 4,096 x "
        "1,024 floats; medians, names in turn. Ratios count: the machine is shared."
    )
    lines = [
        f"# Steps of optimizers, {date.today().isoformat()}",
        "",
        setting,
        "",
        "| name | ns per parameter and step | to adamw | bytes of state per parameter |",
        "|---|---|---|---|",
    ]
    base = statistics.median(times["adamw"])
    for name, optimizer in built.items():
        step = statistics.median(times[name])
        (state,) = optimizer.state.values()
        num_bytes = sum(t.numel() * t.element_size() for t in state.values() if torch.is_tensor(t) and t.dim())
        count = gradient.numel()
        lines.append(f"| {name} | {step / count * 1e9:.2f} | {step / base:.1f} | {num_bytes / count:.3f} |")
    page = "\n".join(lines) + "\n"
    print(page)
    if args.out:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
