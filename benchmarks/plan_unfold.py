"""Compares steps that are unfolded from a few blocks with traces of all blocks, for every causal language model.

Each type that Transformers builds from a small configuration is traced twice, one after the other, in processes of
their own. What trains and what is recomputed goes round: all kept, full recomputation, LoRA over NF4 with selective.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.errors import ConfigError
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.planning.trace.apart import run_apart
from lit_fsdp.planning.trace.dry_run import TracedStep, fake_ranks, trace_training_step
from lit_fsdp.planning.trace.short_model import choose_stacks, shorten_model
from lit_fsdp.planning.trace.unfold import UnevenBlocksError, unfold_trace
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mixed_precision import cast_parameters, read_precision
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import plan_module

Comparison: TypeAlias = tuple[str, str, float, float, float]
"""The blocks of each stack, those traced, the error of the peak in percent, and both times of the CPU."""

NOTHING_REPEATS = "nothing repeats"
WORLD_SIZE, ROWS, LENGTH = 4, 2, 128
SIZES = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0}
# What some types need besides, or have otherwise: heads that are not grouped, and what has no default.
OTHERS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},  # of --layers 8
    "gptj": {"rotary_dim": 16},
    "helium": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "ministral": {"head_dim": 32},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "reformer": {"is_decoder": True},
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_layers": 8},
    "xlnet": {"d_head": 32},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
UNGROUPED: tuple[str, ...] = ("axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32")
UNGROUPED += ("dots3_note", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa")
UNGROUPED += ("kimi_linear", "longcat_flash", "minicpm3", "youtu")
OTHERS |= {name: {"num_key_value_heads": 4} for name in UNGROUPED}
REACHES = (1, 2)  # of neighbours, as a plan tries them
MODES = (("full", "none", "bf16-mixed"), ("full", "full", "bf16-mixed"), ("nf4", "selective", "bf16-true"))


class Model(nn.Module):
    """A model of Transformers with the loss that it computes itself, on the meta device."""

    def __init__(self, model_type: str, num_layers: int, mode: str) -> None:
        super().__init__()
        sizes = SIZES | {"num_hidden_layers": num_layers} | OTHERS.get(model_type, {})
        inner = [name for name in CONFIG_MAPPING[model_type].sub_configs if name in ("text_config", "vision_config")]
        config = AutoConfig.for_model(model_type, **sizes, **{name: dict(sizes) for name in inner})
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        if mode == "nf4":
            quantize_model(self.model, Quantization())
            add_adapters(self.model, LoRA(r=8))

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        return self.model(**batch, use_cache=False).loss


def trace(module: Any, settings: Settings, precision: str, marked: list[str]) -> TracedStep:
    """Return the step, traced."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    dtypes = read_precision(precision)
    cast_parameters(module, dtypes, keep=list_adapter_parameters(module))
    with fake_ranks(WORLD_SIZE):
        return trace_training_step(
            module,
            settings,
            {"input_ids": ids, "labels": ids.clone()},
            dtypes=dtypes,
            compute_loss=lambda batch: module.step(batch),  # noqa: PLW0108  looked up when it is sharded
            build_optimizer=lambda: build_optimizer(module.parameters(), Optimizer()),
            step_name="step",
            ranks_per_node=WORLD_SIZE,
            marked=marked,
        )


def measure(make: Callable[[], Model], settings: Settings, precision: str) -> Comparison:
    """Compare the two traces of one model."""

    def run_whole() -> tuple[int, float]:
        begin = time.process_time()
        traced = trace(make(), settings, precision, [])
        return traced.memory.peak.num_bytes, time.process_time() - begin

    def run_short(reach: int) -> tuple[int, float, str, str] | str:
        begin = time.process_time()
        module = make()
        stacks = choose_stacks(module, plan_module(module, settings.wrap), settings, reach=reach)
        if not stacks:
            return NOTHING_REPEATS
        shorten_model(module, stacks)
        names = [name for stack in stacks for name in stack.blocks]
        try:
            unfolded = unfold_trace(trace(module, settings, precision, names), stacks)
        except UnevenBlocksError as error:
            return str(error)
        depths = "+".join(str(stack.depth) for stack in stacks)
        kept = "+".join(str(len(stack.kept)) for stack in stacks)
        return unfolded.memory.peak.num_bytes, time.process_time() - begin, depths, kept

    for reach in REACHES:
        found = run_apart(partial(run_short, reach), "benchmark")
        if not isinstance(found, str):
            break
    if isinstance(found, str):
        raise UnevenBlocksError(found)
    whole, whole_s = run_apart(run_whole, "benchmark")
    peak, short_s, depth, kept = found
    return depth, kept, 100 * (peak / whole - 1), whole_s, short_s


def measure_type(model_type: str, num_layers: int, case: tuple[str, str, str]) -> Comparison:
    """Compare the two traces of one type, with twice the blocks if its kinds of blocks don't repeat in these."""
    mode, recompute, precision = case
    what: Any = ActivationCheckpointing(mode=recompute)  # type: ignore[arg-type]
    settings = Settings(activation_checkpointing=what)
    try:
        return measure(partial(Model, model_type, num_layers, mode), settings, precision)
    except UnevenBlocksError as error:
        if str(error) != NOTHING_REPEATS:
            raise
    return measure(partial(Model, model_type, 2 * num_layers, mode), settings, precision)


def write_report(lines: list[str], errors: list[float], failures: list[str], args: argparse.Namespace) -> str:
    """Return the results as Markdown."""
    head = [
        "# Unfolded from few blocks, against the trace of all",
        "",
        f"`plan_unfold.py --layers {args.layers}`, {datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__},",
        f"transformers {transformers.__version__}, CPU shared with other work (times are of the CPU). Peak of one",
        f"step of a tiny model, AdamW, {WORLD_SIZE} ranks, {ROWS} rows of {LENGTH} tokens.",
        "",
    ]
    if errors:
        worst, median = max(map(abs, errors)), statistics.median(map(abs, errors))
        head += [f"{len(errors)} steps: median error {median:.3f} %, worst {worst:.3f} %.", ""]
    head += ["| model | trains, recomputes | blocks | traced | error | whole, s | unfolded, s |", "|---" * 7 + "|"]
    tail = ["", "Not compared:", "", *(f"- {failure}" for failure in sorted(failures))] if failures else []
    return "\n".join([*head, *sorted(lines), *tail, ""])


def main() -> None:
    """Run all types, print each, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="Blocks of each model, or half of them")
    parser.add_argument("--only", default="", help="Types, separated by commas")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    lines, errors, failures = [], [], []
    cases = dict(zip(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), cycle(MODES), strict=False))
    for model_type in args.only.split(",") if args.only else cases:
        case = cases[model_type]
        what = ", ".join(case[:2])
        try:
            depth, kept, error, whole_s, short_s = measure_type(model_type, args.layers, case)
            errors.append(error)
            cells = [model_type, what, depth, kept, f"{error:+.3f} %", f"{whole_s:.1f}", f"{short_s:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        except (ConfigError, UnevenBlocksError) as error:
            text = error.line if isinstance(error, ConfigError) else str(error)
            failures.append(f"{model_type}, {what}: {text[:160]}")
            print(failures[-1], flush=True)
        if args.out:
            args.out.write_text(write_report(lines, errors, failures, args))


if __name__ == "__main__":
    main()
