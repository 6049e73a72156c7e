"""Several ranks from a notebook: forks of its kernel, which lives on whatever becomes of them."""

import importlib.util
import json
from pathlib import Path

import pytest
from launches import run_processes

FIRST = """
import os, signal
from lightning.pytorch import Callback, Trainer, seed_everything
from lit_fsdp import FSDP2Strategy
from lit_fsdp.strategy import notebook_launcher
from lit_fsdp.tasks import CausalLM, TextData

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 32, "vocab_size": 300}
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}

def make_task():
    seed_everything(0, verbose=False)
    return CausalLM(config=LLAMA, optimizer={"eps": 1e-4})

def make_data(ranks):
    sizes = {"seq_length": 32, "batch_size": 4 // ranks, "eval_batch_size": 4 // ranks, "num_workers": 0}
    return TextData(train="pydoc", validation_fraction=0.05, tokenizer={"vocab_size": 300}, cache_dir="cache", **sizes)

def make(devices, steps=3, **options):
    settings = {**QUIET, "max_steps": steps, "limit_val_batches": 2, "log_every_n_steps": 1, **options}
    return Trainer(strategy=FSDP2Strategy(print_plan=False), accelerator="cpu", devices=devices, **settings)

def say(name, value):
    print("SAID", json.dumps({name: value}), flush=True)

def refused(function):
    try:
        function()
    except Exception as error:
        return str(error).strip().splitlines()[-1]

class Break(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == 1:
            raise ValueError("broken on rank 1")

class Interrupt(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == 0 and trainer.global_step == 1:
            os.kill(os.getppid(), signal.SIGINT)
"""
CELLS = (
    f"import json\n{FIRST}",
    """task, two = make_task(), make(2)
two.fit(task, make_data(2))
say("two", float(two.callback_metrics["train/loss"]))
say("best", float(two.validate(task, make_data(2), ckpt_path="best", verbose=False)[0]["val/loss"]))
say("without weights", refused(lambda: two.validate(task, make_data(2))))
say("saved by hand", refused(lambda: two.save_checkpoint("by_hand.ckpt")))
more = make(2, steps=4)
say("goes on", refused(lambda: more.fit(task, make_data(2), ckpt_path=two.checkpoint_callback.best_model_path)))
say("saves again", "step=4" in more.checkpoint_callback.best_model_path)""",
    """say("nodes", refused(lambda: make(2, num_nodes=2)))
say("broken", refused(lambda: make(2, callbacks=[Break()]).fit(make_task(), make_data(2))))
notebook_launcher.PATIENCE_S = 0.5
interrupted = make(2, steps=10_000, callbacks=[Interrupt()])
cut_short = make_task()
say("interrupted", refused(lambda: interrupted.fit(cut_short, make_data(2))))
say("after it", refused(lambda: interrupted.validate(cut_short, make_data(2))))
say("can be interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)""",
    """whole, one = make_task(), make(1)
one.fit(whole, make_data(1))
say("one", float(one.callback_metrics["train/loss"]))
say("one evaluated", float(one.validate(whole, make_data(1), verbose=False)[0]["val/loss"]))
say("after one", refused(lambda: make(2)))""",
)
KERNEL = """
import json, sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)])
NotebookClient(notebook, timeout=300).execute()
outputs = [out for cell in notebook.cells for out in cell.outputs if out.output_type == "stream"]
print("".join(out.text for out in outputs if out.name == "stdout"))
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["prompt", "kernel"])
def test_ranks_of_a_notebook_train_and_the_kernel_lives_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real kernel where there is one, and as Python is at a prompt, by which Lightning knows both."""
    if kind == "kernel" and not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))):
        pytest.skip("needs nbclient and ipykernel")
    monkeypatch.chdir(tmp_path)
    code = "import sys\nsys.ps1 = '>>> '\n" + "\n".join(CELLS)
    if kind == "kernel":
        code = f"import io, sys\nsys.stdin = io.StringIO({json.dumps(json.dumps(CELLS))})\n{KERNEL}"
    (tmp_path / "cells.py").write_text(code)
    (ended,) = run_processes(["cells.py"], timeout_s=300, CUDA_VISIBLE_DEVICES="")
    assert ended.code == 0, ended.err[-3000:]
    said: dict[str, object] = {}
    for line in ended.out.splitlines():
        if line.startswith("SAID "):
            said |= json.loads(line.removeprefix("SAID "))
    assert said["two"] == pytest.approx(said["one"], abs=1e-6)
    assert said["best"] == pytest.approx(said["one evaluated"], abs=1e-6)
    assert str(said["without weights"]).startswith("ValueError: ckpt_path: not given: the trained weights ended with")
    assert str(said["saved by hand"]).startswith("save_checkpoint: the trained weights ended with the ranks that had")
    assert (said["goes on"], said["saves again"]) == (None, True)
    assert str(said["nodes"]).startswith("num_nodes: got 2: a notebook starts the ranks of its own machine only")
    assert said["broken"] == "ValueError: broken on rank 1"
    assert said["interrupted"] == "interrupted: all ranks have ended"
    assert str(said["after it"]).startswith("ValueError: ckpt_path: not given: the trained weights ended with")
    assert said["can be interrupted"] is True
    assert str(said["after one"]).startswith("devices: got 2: this kernel holds the process group of a run with devic")
