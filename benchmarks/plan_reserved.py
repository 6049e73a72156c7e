"""What a model of CUDA's allocator takes for traced steps, beside their tensors: no GPU is asked.

python benchmarks/plan_reserved.py --out benchmarks/results/plan_reserved_DATE.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.planning.step_parts import Replay
from lit_fsdp.planning.trace.apart import run_apart
from lit_fsdp.planning.trace.dry_run import TracedStep, fake_ranks, trace_training_step
from lit_fsdp.planning.trace.replay import replay_step
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mixed_precision import cast_parameters, read_precision
from lit_fsdp.sharding.settings import Settings

GIB = 2**30
EIGHT_B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
EIGHT_B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SMALL = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
SMALL |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
RECOMPUTED = ActivationCheckpointing(mode="full")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: its model, ranks, precision, settings and the lengths of its rows, the traced step first."""

    name: str
    sizes: dict[str, Any]
    method: str = "full"
    world_size: int = 8
    precision: str = "bf16-mixed"
    settings: Settings
    lengths: Sequence[int] = (4096,)


CASES = [
    Case(name="8B, full, recomputed", sizes=EIGHT_B, settings=Settings(activation_checkpointing=RECOMPUTED)),
    Case(
        name="8B, full, recomputed, `cpu_offload`",
        sizes=EIGHT_B,
        settings=Settings(activation_checkpointing=RECOMPUTED, cpu_offload=CPUOffload()),
    ),
    Case(name="8B, full, all kept", sizes=EIGHT_B, precision="bf16-true", settings=Settings()),
    Case(
        name="8B, LoRA, recomputed",
        sizes=EIGHT_B,
        method="lora",
        world_size=2,
        precision="bf16-true",
        settings=Settings(activation_checkpointing=RECOMPUTED),
    ),
    Case(
        name="8B, LoRA over NF4, recomputed",
        sizes=EIGHT_B,
        method="nf4",
        world_size=1,
        precision="bf16-true",
        settings=Settings(activation_checkpointing=RECOMPUTED),
    ),
    Case(name="0.6B, full, all kept", sizes=SMALL, world_size=2, settings=Settings(), lengths=(2048,)),
    Case(
        name="0.6B, full, all kept, rows of other lengths",
        sizes=SMALL,
        world_size=2,
        settings=Settings(),
        lengths=(2048, 1112, 1733, 480, 1977, 1301, 850, 2048),
    ),
]


class Model(nn.Module):
    """A Llama with the loss that it computes itself, on the meta device."""

    def __init__(self, sizes: dict[str, Any], method: str) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", pad_token_id=0, **sizes))
        if method == "nf4":
            quantize_model(self.model, Quantization())
        if method != "full":
            add_adapters(self.model, LoRA(r=16))

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        return self.model(**batch, use_cache=False).loss


def trace(case: Case, length: int) -> TracedStep:
    """Return the step with one row, all blocks traced."""
    module: Any = Model(case.sizes, case.method)
    ids, dtypes = torch.zeros(1, length, dtype=torch.long), read_precision(case.precision)
    cast_parameters(module, dtypes, keep=list_adapter_parameters(module))
    with fake_ranks(case.world_size):
        return trace_training_step(
            module,
            case.settings,
            {"input_ids": ids, "labels": ids.clone()},
            dtypes=dtypes,
            compute_loss=lambda batch: module.step(batch),  # noqa: PLW0108  looked up when it is sharded
            build_optimizer=lambda: build_optimizer(module.parameters(), Optimizer()),
            step_name="step",
            ranks_per_node=case.world_size,
        )


def replay(case: Case) -> tuple[int, int, Replay]:
    """Return the peak of the tensors, what is allocated and freed in the first step, and what the allocator takes."""
    traced = [run_apart(partial(trace, case, length), "benchmark") for length in case.lengths]
    logs = [step.log for step in traced if step.log is not None]
    assert len(logs) == len(traced)
    num_events = sum(not event.is_renamed and not event.is_on_host for event in logs[0].events)
    return max(step.memory.peak.num_bytes for step in traced), num_events, replay_step(logs[0], logs[1:])


def write_report(lines: Sequence[str]) -> str:
    """Return the results as Markdown."""
    head = [
        "# What CUDA's allocator takes, replayed",
        "",
        f"`plan_reserved.py`, {datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__}, transformers",
        f"{transformers.__version__}, CPU.",
        "**A model of the allocator, after its source: no GPU has met these numbers.** Every allocation of a traced",
        "step is replayed on the stream that it is made on, and then the step again: one row of 4,096 tokens, 2,048",
        "for the small model. Factors are of the peak of the tensors.",
        "",
        "- least: both steps work with this much memory. That is what `fits` takes.",
        "- waits: how often, with that, later steps find no memory, wait for the GPU and give free memory back.",
        "- never waits: the least memory in which later steps do not.",
        "- reserved: what the allocator keeps where there is room; then the same with `expandable_segments`.",
        "",
        "| step | ranks | allocations and frees | tensors, GiB | least | waits | never waits | reserved | expandable |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lengths = ", ".join(f"{length:,}" for length in CASES[-1].lengths)
    tail = ["", f"Rows of other lengths: one step each of {lengths} tokens."]
    return "\n".join([*head, *lines, *tail, ""])


def make_row(case: Case, run: Callable[[Case], tuple[int, int, Replay]]) -> str:
    """Return a line of the table."""
    peak_bytes, num_events, found = run(case)
    sizes = (found.least_bytes, found.steady_bytes, found.reserved_bytes, found.expandable_bytes)
    least, *others = (f"{num_bytes / peak_bytes:.2f}" for num_bytes in sizes)
    cells = [case.name, case.world_size, f"{num_events:,}", f"{peak_bytes / GIB:.2f}", least, found.num_retries]
    return f"| {' | '.join(map(str, [*cells, *others]))} |"


def main() -> None:
    """Replay all cases, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = []
    for case in CASES:
        lines.append(make_row(case, replay))
        print(lines[-1], flush=True)
    args.out.write_text(write_report(lines))


if __name__ == "__main__":
    main()
