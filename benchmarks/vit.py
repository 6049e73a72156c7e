"""A vision transformer under FSDP2: ours, a plain loop over `fully_shard`, and the Trainer of Transformers.

    python benchmarks/vit.py --ranks 2 --repeats 9 --image-size 96 --out benchmarks/results/vit_DATE.md

Each variant runs in fresh processes, in turn, ``repeats`` times, each turn in another order, with the same random
weights, images, units and optimizer, without clipping or logging. All see the same images in every step, which their
losses show: one whose last loss is another ends the benchmark. Timed are optimizer steps after a warm-up, by wall
clock and by the CPU time of the process, which other work on the machine disturbs less. Memory is the peak on the GPU,
or what the process on a CPU grows by at most after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

VARIANTS = ("ours", "plain", "transformers")
CONFIG = {
    "image_size": 48,
    "patch_size": 8,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
}
CLASSES, BATCH, WARMUP, LEARNING_RATE = 100, 8, 3, 1e-4
MAX_DIFFERENCE = 1e-4  # of the losses of two runs: sums are rounded in other orders


class Clock:
    """Notes the time at the end of every step, and the memory that a run takes."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.bytes_before = 0

    def start_memory(self) -> None:
        """Begin to measure memory: what a run needs is imported, and there is no model yet."""
        import transformers.models.vit.modeling_vit  # noqa: F401

        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        self.bytes_before = read_memory("VmRSS")

    def tick(self) -> None:
        """Note wall clock and CPU time."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), time.process_time()))

    def report(self, loss: float) -> None:
        """Print what rank 0 has measured as JSON."""
        import torch

        if int(os.environ.get("RANK", "0")):
            return
        pairs = list(zip(self.marks, self.marks[1:], strict=False))[WARMUP:]
        has_gpu = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() if has_gpu else read_memory("VmHWM") - self.bytes_before
        numbers = {
            "wall_s": statistics.median(b[0] - a[0] for a, b in pairs),
            "cpu_s": statistics.median(b[1] - a[1] for a, b in pairs),
            "peak_gib": peak / 2**30,
            "loss": loss,
        }
        print("RESULT " + json.dumps(numbers), flush=True)


def read_memory(name: str) -> int:
    """Return a number of bytes of this process from Linux: ``VmRSS`` of now, ``VmHWM`` the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def make_images() -> Any:
    """Return images by number, with their classes."""
    import torch

    class Images(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            pixels = torch.randn(3, CONFIG["image_size"], CONFIG["image_size"], generator=generator)
            return {"pixel_values": pixels, "labels": torch.tensor(index % CLASSES)}

    return Images()


def build_model() -> Any:
    """Return the model that all variants begin with."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(num_labels=CLASSES, **CONFIG))


def run_ours(folder: Path, ranks: int, steps: int, clock: Clock) -> float:
    """Train with ImageClassification under FSDP2Strategy."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, DistributedSampler

    from lit_fsdp import FSDP2Strategy
    from lit_fsdp.tasks import ImageClassification, LRSchedule, Optimizer

    class Tick(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    clock.start_memory()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=ranks,
        strategy=FSDP2Strategy(print_plan=False),
        max_steps=steps,
        callbacks=[Tick()],
        use_distributed_sampler=False,
        **dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
            False,  # type: ignore[arg-type]
        ),
    )
    optimizer = Optimizer(learning_rate=LEARNING_RATE, weight_decay=0.0)
    task = ImageClassification(
        pretrained=str(folder),
        num_classes=CLASSES,
        head="keep",
        optimizer=optimizer,
        lr_scheduler=LRSchedule(type="constant"),
    )
    images = make_images()
    sampler = DistributedSampler(images, ranks, int(os.environ["RANK"]), shuffle=False)
    trainer.fit(task, DataLoader(images, BATCH, sampler=sampler))
    return float(trainer.callback_metrics["train/loss"])


def run_plain(folder: Path, ranks: int, steps: int, clock: Clock) -> float:
    """Train in a loop over fully_shard."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import ViTForImageClassification

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    clock.start_memory()
    model = ViTForImageClassification.from_pretrained(folder).to(device).train()
    for layer in model.vit.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    images = make_images()
    batches = iter(DataLoader(images, BATCH, sampler=DistributedSampler(images, shuffle=False)))
    for _ in range(steps):
        batch = {name: value.to(device) for name, value in next(batches).items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    dist.all_reduce(loss := loss.detach())
    dist.destroy_process_group()
    return float(loss) / ranks


def run_transformers(folder: Path, ranks: int, steps: int, clock: Clock) -> float:
    """Train with the Trainer of Transformers, with FSDP2 of accelerate."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTForImageClassification

    class Tick(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    class Keep(Trainer):
        last_loss: torch.Tensor

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss: Any = super().compute_loss(*given, **named)
            self.last_loss = loss.detach()
            return loss

    if not torch.cuda.is_available():
        _force_fsdp_on_cpus()
    fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["ViTLayer"]}
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",  # batches by turns to ranks: together the images of the others
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            max_grad_norm=0.0,
            learning_rate=LEARNING_RATE,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            optim="adamw_torch_fused",
            dataloader_pin_memory=False,
            fsdp=True,
            fsdp_config={**fsdp, "reshard_after_forward": True},
        )
        clock.start_memory()
        model = ViTForImageClassification.from_pretrained(folder)
        trainer = Keep(model=model, args=arguments, train_dataset=make_images(), callbacks=[Tick()])
        trainer.train()
    parameters = list(trainer.model_wrapped.parameters())
    if not all(isinstance(parameter, DTensor) for parameter in parameters):
        raise RuntimeError("the Trainer has not sharded the model: accelerate took another way than FSDP2")
    dist.all_reduce(trainer.last_loss)
    return float(trainer.last_loss) / ranks


def _force_fsdp_on_cpus() -> None:
    """Let accelerate shard on CPUs too, where it takes DDP without a word; seen in accelerate 1.15."""
    import accelerate.state
    from accelerate.utils import DistributedType

    original = accelerate.state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            values = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}
            self._shared_state.update(values)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    accelerate.state.AcceleratorState.__init__ = init


RUNS = {"ours": run_ours, "plain": run_plain, "transformers": run_transformers}


def measure(variant: str, folder: Path, ranks: int, steps: int) -> dict[str, float]:
    """Run a variant in processes of its own; return what its rank 0 has measured."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    own = [str(Path(__file__).resolve()), "--variant", variant, "--model", str(folder)]
    command = [*launcher, *own, "--ranks", str(ranks), "--steps", str(steps)]
    command += ["--image-size", str(CONFIG["image_size"])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise RuntimeError(f"{variant} failed:\n{done.stderr[-4000:]}")
    numbers: dict[str, float] = json.loads(found[-1])
    return numbers


def check_losses(runs: dict[str, list[dict[str, float]]]) -> None:
    """Refuse to compare runs that have not done the same work."""
    losses = {f"{variant} {turn}": run["loss"] for variant, found in runs.items() for turn, run in enumerate(found)}
    if not max(losses.values()) - min(losses.values()) <= MAX_DIFFERENCE:  # also where one is NaN
        raise RuntimeError(f"last losses differ by more than {MAX_DIFFERENCE}: {losses}")


def write_report(runs: dict[str, list[dict[str, float]]], ranks: int, steps: int) -> str:
    """Return the table as Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "accelerate"))
    size = CONFIG["image_size"]
    lines = [
        f"# A vision transformer under FSDP2, {date.today().isoformat()}",
        "",
        (
            f"{ranks} ranks, {BATCH} images of {size} x {size} a rank and step, {steps} steps, {WARMUP} to warm up; "
            f"{len(runs['ours'])} runs of each in turn, in changing order. {platform.machine()}, {os.cpu_count()} "
            f"CPUs, {versions}. Peaks are those of rank 0, on CPUs what the process grows by after its imports. "
            "Medians over runs of the median step, with the smallest and largest; ratios are to the plain loop of the "
            "same turn."
        ),
        "",
        "| | wall s a step | images/s | speed to plain, wall | speed to plain, CPU time | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for variant, found in runs.items():
        walls = [run["wall_s"] for run in found]
        pairs = list(zip(found, runs["plain"], strict=True))
        ratios = {key: [base[key] / run[key] for run, base in pairs] for key in ("wall_s", "cpu_s")}
        cells = [
            _show(walls, 3),
            f"{ranks * BATCH / statistics.median(walls):.1f}",
            _show(ratios["wall_s"], 2),
            _show(ratios["cpu_s"], 2),
            f"{statistics.median(run['peak_gib'] for run in found):.3f}",
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    losses = ", ".join(f"{found[0]['loss']:.6f} {variant}" for variant, found in runs.items())
    lines += ["", f"Loss of the last step: {losses}."]
    return "\n".join(lines) + "\n"


def _show(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def main() -> None:
    """Measure all variants, or run one of them on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--image-size", type=int, default=CONFIG["image_size"], help="a multiple of 8")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    CONFIG["image_size"] = args.image_size
    if args.variant is not None:
        clock = Clock()
        loss = RUNS[args.variant](args.model, args.ranks, args.steps, clock)
        clock.report(loss)
        return
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        build_model().save_pretrained(name)
        for turn in range(args.repeats):
            order = [VARIANTS[(turn + i) % len(VARIANTS)] for i in range(len(VARIANTS))]
            for variant in order if turn // len(VARIANTS) % 2 == 0 else reversed(order):
                runs[variant].append(measure(variant, Path(name), args.ranks, args.steps))
                print(variant, runs[variant][-1], flush=True)
                check_losses(runs)
    report = write_report(runs, args.ranks, args.steps)
    print(report)
    if args.out is not None:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
