"""What each command costs a user, from the prompt to the prompt: seconds of wall time and of CPU, exit codes.

    python benchmarks/commands.py --repeats 3 --out benchmarks/results/commands_DATE.md

In a new folder, with chats made here and a Llama of 0.2 M parameters with random weights, so that what is measured is
starting, reading, writing and ending. Each command is run so many times in turn; figures are medians. Where one ends
with another code than it should, the page has it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

_RUN = "--config run.yaml --trainer.max_steps 3"
_NUM_MISTAKES = 2  # at the end, which exit with 2
# Later ones go on from what earlier ones leave.
_COMMANDS = f"""
doctor
preview --config run.yaml --rows 3
plan --config run.yaml --gpu "RTX 4090" --devices 2
fit {_RUN}
fit --config run.yaml --trainer.max_steps 6 --ckpt_path last
fit {_RUN} --run_name adapters --model.lora.r 8
fit {_RUN} --run_name nf4 --model.lora.r 8 --model.quantization.type nf4 --trainer.precision bf16-true
fit {_RUN} --run_name mixed --data.train "[{{path: chats.jsonl, weight: 3}}, {{path: more.jsonl, weight: 1}}]"
fit {_RUN} --run_name stream --data.streaming true
fit {_RUN} --run_name samples --model.sample_prompts "[What is 2?]"
fit --config dpo.yaml --trainer.max_steps 3
chat --model runs/run --max_new_tokens 8 < prompts.txt
generate --model runs/run --prompts prompts.txt --out answers.jsonl --max_new_tokens 8
predict --config run.yaml --ckpt_path last --data.predict prompts.txt
export --checkpoint runs/run --out model
export --checkpoint runs/adapters --out merged --merge true
schema > schema.json
fit {_RUN} --model.lora.rr 8
fit {_RUN} --data.train chts.jsonl
"""
_CONFIG = """
trainer: {accelerator: cpu, devices: 2, logger: true, strategy: {class_path: lit_fsdp.FSDP2Strategy}}
model: {class_path: CausalLM, init_args: {pretrained: tiny}}
data: {class_path: TextData, init_args: {train: chats.jsonl, tokenizer: tiny, seq_length: 64, batch_size: 2}}
"""
_DPO = """
trainer: {accelerator: cpu, devices: 2, strategy: {class_path: lit_fsdp.FSDP2Strategy}}
model: {class_path: PreferenceTuning, init_args: {pretrained: tiny}}
data: {class_path: PreferenceData, init_args: {train: pairs.jsonl, tokenizer: tiny, seq_length: 64, batch_size: 2}}
"""
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def make_folder(folder: Path) -> None:
    """Write what the commands read: chats, pairs, prompts, configurations and a model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lit_fsdp.tasks import TrainTokenizer
    from lit_fsdp.tasks.text.tokenizer import train_tokenizer

    pairs = [(f"What is {n}?", f"It is {n % 7}. " * 3) for n in range(400)]
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs]
    better = [{"prompt": q, "chosen": a, "rejected": "No."} for q, a in pairs]
    for name, rows in (("chats", chats), ("more", chats[:50]), ("pairs", better)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "prompts.txt").write_text("What is 2?\nWhat is 3?\n")
    (folder / "run.yaml").write_text(_CONFIG)
    (folder / "dpo.yaml").write_text(_DPO)
    tokenizer = train_tokenizer([json.dumps(row) for row in chats], TrainTokenizer(vocab_size=300))
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes))
    model.save_pretrained(folder / "tiny")


def list_commands() -> list[str]:
    """Return all that are measured."""
    return [line for line in _COMMANDS.splitlines() if line]


def get_expected_code(command: str) -> int:
    """Return with what a command should exit."""
    return 2 if command in list_commands()[-_NUM_MISTAKES:] else 0


def run(command: str, folder: Path) -> tuple[float, float, int]:
    """Return seconds of wall time and of CPU, with all processes, and the exit code."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "LIT_FSDP_CACHE": str(folder / "cache"),
    }
    line = f"{shlex.quote(sys.executable)} -m lit_fsdp {command}"
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    wall_s, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != get_expected_code(command):
        print(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}", file=sys.stderr, flush=True)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def main() -> None:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    commands = list_commands()
    found: dict[str, list[tuple[float, float, int]]] = {command: [] for command in commands}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as name:
            make_folder(Path(name))
            for command in commands:
                found[command].append(run(command, Path(name)))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "peft"))
    setting = (
        f"`python benchmarks/commands.py --repeats {args.repeats}` on {os.cpu_count()} cores of a CPU "
        f"({platform.machine()}), Python {platform.python_version()}; {packages}. Medians. `fit` takes 3 steps on two "
        "ranks. CPU seconds are those of all processes; the machine is shared, so wall time says little."
    )
    lines = [
        f"# What each command costs, {date.today().isoformat()}",
        "",
        setting,
        "",
        "| `python -m lit_fsdp` | CPU, s | wall, s | exit code |",
        "|---|---|---|---|",
    ]
    for command, runs in found.items():
        wall_s, cpu_s = (statistics.median(one[place] for one in runs) for place in (0, 1))
        codes = ", ".join(map(str, dict.fromkeys(code for *_, code in runs)))
        lines.append(f"| `{command}` | {cpu_s:.1f} | {wall_s:.1f} | {codes} |")
    page = "\n".join(lines) + "\n"
    print(page)
    if args.out:
        args.out.write_text(page)
    if wrong := [c for c, runs in found.items() if any(code != get_expected_code(c) for *_, code in runs)]:
        sys.exit(f"exited otherwise than expected: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
