"""A run on the CPU leaves the GPUs of its machine alone: nothing starts CUDA, which no fork could use after that."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from launches import ROOT, Ended, run_processes, write_run
from training import EVEN, save_model

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""

FIT = """
import gc, sys
from pathlib import Path
import lightning.pytorch as pl
import torch
from training import EVEN, Rows, build_task
from lit_fsdp import FSDP2Strategy, LoRA, Quantization
from lit_fsdp.callbacks import CommunicationLogger, MemoryLogger, StabilityMonitor, ThroughputLogger

# Unless GPUs are hidden, Lightning 2.6 starts CUDA before its sanity check, and torch 2.13 in the first step of AdamW
# and when a sharded checkpoint is written.
torch.cuda.get_rng_state_all = list
torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda optimizer: None

ways = {"full": {}, "lora": {"lora": LoRA(r=2)}, "nf4": {"lora": LoRA(r=2), "quantization": Quantization()}}
trainer = pl.Trainer(
    accelerator="cpu", devices=int(sys.argv[2]), strategy=FSDP2Strategy(print_plan=False), max_steps=2,
    callbacks=[CommunicationLogger(), MemoryLogger(), StabilityMonitor(), ThroughputLogger()],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False,
)
task = build_task(Path("model"), **ways[sys.argv[1]])
trainer.fit(task, Rows(EVEN["vocab_size"], 4))
# What is imported while a model is built under "meta" keeps no tensor without values, as default arguments are.
assert not [t for t in gc.get_objects() if type(t) is torch.Tensor and t.is_meta]
"""


def run(folder: Path, *command: str) -> tuple[Ended, list[str]]:
    """Run ``python <command>`` where a GPU seems to be; return how it ended, and the stacks that started CUDA."""
    notes, customized = folder / "notes", folder / "customized"
    notes.mkdir()
    customized.mkdir()
    customize = f"from pathlib import Path\nfrom cuda_starts import pretend\npretend(Path({str(notes)!r}))\n"
    (customized / "sitecustomize.py").write_text(customize)
    path = os.pathsep.join(map(str, (customized, ROOT, ROOT / "tests")))
    (ended,) = run_processes(command, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="0")
    return ended, [note.read_text() for note in notes.iterdir()]


def list_modules() -> list[str]:
    """Return all modules of ours that can be imported here, but those that run the command line or need peft."""
    names = []
    for folder in ("lit_fsdp", "tasks", "callbacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if folder == "lit_fsdp" else ("lit_fsdp", *parts)
            names.append(".".join(parts).removesuffix(".__init__"))
    # The two are imported where peft already is; the fits below hold that.
    left_out = ["__main__", ".adapters.experts", ".adapters.linear"]
    left_out += [] if find_spec("ray") else [".ray_worker"]  # which imports an extra
    return [name for name in names if not name.endswith(tuple(left_out))]


@pytest.mark.full
def test_no_import_starts_cuda(tmp_path: Path) -> None:
    ended, starts = run(tmp_path, "-c", IMPORT_ALL, *list_modules())
    assert ended.code == 0, ended.err
    assert not starts, "\n".join(starts)


@pytest.mark.full
@pytest.mark.parametrize(("way", "ranks"), [("full", 2), ("lora", 1), ("nf4", 1)])
def test_a_fit_on_the_cpu_starts_no_cuda_but_where_bitsandbytes_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, ranks: int
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", **{**EVEN, "hidden_size": 64, "intermediate_size": 128})
    (tmp_path / "fit.py").write_text(FIT)
    ended, starts = run(tmp_path, "fit.py", way, str(ranks))
    assert ended.code == 0, ended.err
    assert len(starts) == (way != "full")
    assert all("bitsandbytes/cuda_specs.py" in stack for stack in starts), "\n".join(starts)


@pytest.mark.full
@pytest.mark.slow(after=1)
@pytest.mark.parametrize("way", ["nf4", "full"])
def test_the_command_line_hides_the_gpus_from_all_ranks_of_a_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {**EVEN, "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2}
    quantized = {"lora": {"r": 2}, "quantization": {"type": "nf4"}} if way == "nf4" else {}
    write_run(tmp_path, model={"config": sizes | {"intermediate_size": 128}, **quantized})
    command = ["-m", "lit_fsdp", "fit", "--config=run.yaml", "--cpu_processes=2", "--monitoring=true"]
    ended, starts = run(tmp_path, *command)
    assert ended.code == 0, ended.err
    assert "2 on cpu" in ended.out
    assert not starts, "\n".join(starts)
