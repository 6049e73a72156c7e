"""What users copy from README and docs/python.md runs as it is written, on tiny models under the names it has."""

import json
import re
import runpy
import shlex
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from image_training import save_classifier, write_folder
from launches import ROOT, Start, fork_commands, fork_ranks
from peft import AutoPeftModelForCausalLM
from speech_training import make_rows
from speech_training import save_model as save_speech_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, ViTImageProcessor

from lit_fsdp.checkpoint.latest import find_last_checkpoint
from lit_fsdp.tasks import TrainTokenizer
from lit_fsdp.tasks.text.tokenizer import train_tokenizer
from lit_fsdp.tasks.tts.preparation.prepared import write_shard

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
QWEN = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
QWEN |= {"num_attention_heads": 4, "num_key_value_heads": 2}
VIT = {"model_type": "vit", "image_size": 16, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64}
VIT |= {"num_hidden_layers": 2, "num_attention_heads": 2}


def read_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def write_text(folder: Path) -> None:
    """Chats, and a tiny model of the name that the guides use: a folder where they are run."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i}?"},
                {"role": "assistant", "content": f"It is {i % 7}. " * 24},
            ]
        }
        for i in range(60)
    ]
    (folder / "data").mkdir()
    (folder / "data" / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = folder / "Qwen" / "Qwen3-0.6B"
    tokenizer = train_tokenizer([json.dumps(row) for row in rows], TrainTokenizer(vocab_size=300))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **QWEN)).save_pretrained(model)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.full
def test_the_commands_of_the_readme_run_one_after_the_other(folder: Path) -> None:
    write_text(folder)
    (config,) = (block for block in read_blocks("README.md", "yaml") if block.startswith("# finetune.yaml"))
    (folder / "finetune.yaml").write_text(config)
    (commands,) = (block for block in read_blocks("README.md", "bash") if "preview" in block)
    printed: dict[str, str] = {}
    for line in commands.splitlines():
        command = shlex.split(line, comments=True)
        launcher, args = command[: command.index("lit_fsdp")], command[command.index("lit_fsdp") + 1 :]
        if launcher[0] == "torchrun":
            count = int(launcher[1].partition("=")[2])
            ended = fork_ranks(*args, ranks=count, timeout_s=120)
        else:
            ended = fork_commands([Start(args=args, folder=folder)], timeout_s=120)
        assert {one.code for one in ended} == {0}, f"{line}: {ended[0].err}"
        printed[line.partition("#")[0].strip()] = ended[0].out + ended[0].err
    assert len(printed) == 8
    (again,) = (text for line, text in printed.items() if "--ckpt_path last" in line)
    assert "runs/finetune/version_0/checkpoints/" in again
    (adapted,) = (text for line, text in printed.items() if "qlora" in line)
    assert "learning_rate" not in adapted  # that of the YAML
    assert sorted(p.parent.name for p in folder.glob("runs/*/version_*")) == ["finetune"] * 3 + ["qlora"]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "my-model")
    assert loaded.config.model_type == "qwen3"


def run_script(name: str, **replaced: str) -> None:
    """Run a script of docs/python.md in the current folder, in a process of its own."""
    (text,) = (block for block in read_blocks("docs/python.md", "python") if block.startswith(f"# {name}"))
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    Path(name).write_text(text)
    process: Any = get_context("fork").Process(target=runpy.run_path, args=(name,), kwargs={"run_name": "__main__"})
    process.start()
    process.join(timeout=120)
    process.kill()
    process.join()
    assert process.exitcode == 0


@pytest.mark.full
def test_the_scripts_for_text_train_and_export(folder: Path) -> None:
    write_text(folder)
    run_script("train_text.py")
    trained, start = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("my-model", "Qwen/Qwen3-0.6B"))
    assert not torch.equal(trained.lm_head.weight.float(), start.lm_head.weight.float())
    run_script("train_qlora.py")
    assert AutoPeftModelForCausalLM.from_pretrained("my-adapters").peft_config["default"].r == 16
    AutoModelForCausalLM.from_pretrained("my-merged-model")


@pytest.mark.full
def test_the_script_for_images_trains_and_exports(folder: Path) -> None:
    counts = {"cat": 14, "dog": 12, "eel": 12}
    for split in ("train", "validation"):
        write_folder(folder / "data" / split, counts)
    model = folder / "google" / "vit-base-patch16-224-in21k"
    save_classifier(model, VIT)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(model)
    run_script("train_images.py")
    trained = AutoModelForImageClassification.from_pretrained("my-classifier")
    assert list(trained.config.id2label.values()) == list(counts)


@pytest.mark.full
def test_the_script_for_speech_trains(folder: Path) -> None:
    model = folder / "Qwen" / "Qwen3-TTS-12Hz-0.6B-Base"
    model.mkdir(parents=True)
    save_speech_model(model)
    (folder / "prepared").mkdir()
    write_shard(folder / "prepared" / "shard-00000.parquet", make_rows())
    run_script("train_speech.py", **{"tokenizer=MODEL": 'tokenizer="bytes"'})  # of the tiny model
    assert find_last_checkpoint([folder / "runs" / "speech" / "checkpoints"]) is not None


def test_scripts_are_short_enough_to_be_read() -> None:
    scripts = [block for block in read_blocks("docs/python.md", "python") if block.startswith("# train_")]
    assert len(scripts) == 4
    assert max(len([line for line in script.splitlines() if line]) for script in scripts) <= 25
