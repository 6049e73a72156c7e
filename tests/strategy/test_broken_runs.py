"""What a run refuses on two ranks: one clear line from each of them, and no rank waits for another."""

import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from launches import Ended, fork_ranks, run_processes, torchrun, write_run
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.cli import ckpt_path, facts

STRATEGY = "trainer.strategy.init_args"
GOOD = '{"text": "a good row"}\n'

CONFIGS = {
    "mesh.shard=3": f"{STRATEGY}.mesh 1x3 (replicate x shard) needs 3 ranks, 2 were started; set replicate=1 shard=2",
    "mesh.replicate=-1": f"{STRATEGY}.mesh: replicate and shard are both -1",
    "mesh.shrad=2": f"{STRATEGY}.mesh.shrad: unknown key of lit_fsdp.Mesh: did you mean shard?",
    "sharding.reshard_after_forward=3": f"{STRATEGY}.sharding.reshard_after_forward: got 3: it must divide the 2",
    "cpu_offload.pin_memory=true": f"{STRATEGY}.cpu_offload.pin_memory: got true: pinning needs a GPU",
    "activation_checkpointing.every_n_blocks=2": f"{STRATEGY}.activation_checkpointing.every_n_blocks: got 2 with",
    'activation_checkpointing.saved_ops=["aten.mm"]': f"{STRATEGY}.activation_checkpointing.saved_ops: not used by",
    'wrap.module_classes=["Nothing"]': f"{STRATEGY}.wrap.module_classes: got ['Nothing']: no module has such a class; "
    "the model has: CausalLM, Embedding,",
    "wrap.policy=min_size": f"{STRATEGY}.wrap.min_num_params: got None with policy 'min_size'",
    "compile.backend=nothing": f"{STRATEGY}.compile.backend: got 'nothing': expected one such as",
    "--trainer.precision=8-bit": "trainer.precision: got '8-bit': expected one of",
    "--trainer.precision=16-mixed": "trainer.precision: got '16-mixed': float16 needs a GPU and the run is on cpu",
    "--trainer.devices=3": "trainer.devices: got 3: torchrun started 2 processes on this node: expected 2",
    "--model.config.vocab_size=260": "model.init_args.config.vocab_size: got 260: the tokenizer has 300 tokens",
    "--model.config.hiden_size=8": "model.init_args.config: hiden_size: no settings of LlamaConfig",
    "--model.config.hidden_size=33": "model.init_args.config.hidden_size: got 33: The hidden size (33) is not",
    "--model.config.model_type=lama": "model.init_args.config.model_type: got 'lama': Transformers has no such model",
    "--model.config=null": "model.init_args.pretrained or config: expected one of them",
    "--model.pretrained=lacking": "model.init_args.pretrained or config: expected one of them",
    "--model.config=null --model.pretrained=empty": "model.init_args.pretrained: got 'empty': it has no config.json",
    "--model.config=null --model.pretrained=lacking": "lacking does not fit LlamaForCausalLM: it lacks model.layers.1",
    "--model.quantization.type=nf4": "model.init_args.quantization: quantized weights cannot be trained; set lora",
    "--model.lora.target_modules=[q_prj]": "model.init_args.lora.target_modules: got 'q_prj': the model has no such",
    "--model.lr_scheduler.min_lr_rate=0.1": "model.init_args.lr_scheduler.min_lr_rate: not used by type 'linear'",
    "--model.lr_scheduler.warmup_steps=3 --model.lr_scheduler.warmup_ratio=0.1": (
        "model.init_args.lr_scheduler: "
        "warmup_steps"
    ),
    "--trainer.max_steps=-1 --trainer.max_epochs=-1": "model.init_args.lr_scheduler: the run has no end",
    "--ckpt_path=incomplet.ckpt": "ckpt_path: 'incomplet.ckpt' does not exist: did you mean incomplete.ckpt?",
    "--ckpt_path=incomplete.ckpt": "ckpt_path: incomplete.ckpt is no complete checkpoint: complete.json is missing",
    "--ckpt_path=train.jsonl": "ckpt_path: train.jsonl is no checkpoint: expected a folder",
}  # fmt: skip

DATA: dict[str, tuple[str | bytes, str]] = {
    "json.jsonl": (GOOD + '{"text": \n', "json.jsonl line 2: not valid JSON: Expecting value at column 1"),
    "field.jsonl": (GOOD + '{"txt": "a"}\n', "field.jsonl line 2: the row has: txt: expected messages, "),
    "type.jsonl": (GOOD + '{"text": 3}\n', 'type.jsonl line 2: "text" must be a string, it is a number (3)'),
    "list.jsonl": (GOOD + "[1]\n", "list.jsonl line 2: must be an object like"),
    "blank.jsonl": (GOOD + '{"text": " "}\n', 'blank.jsonl line 2: "text" is empty'),
    "empty.jsonl": ("", "empty.jsonl: the file is empty"),
    "utf8.jsonl": (GOOD.encode() + b'{"text": "\xff"}\n', "utf8.jsonl line 2: not UTF-8 (byte 0xff at column 11)"),
    "utf8.txt": (b"good\n\xfe", "utf8.txt line 2: not UTF-8 (byte 0xfe at column 1)"),
    "role.jsonl": (
        '{"messages": [{"role": "usr", "content": "x"}]}',
        "role.jsonl line 1: message 1 has the role 'usr'",
    ),
    "chat.jsonl": (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        "chat.jsonl line 1: a chat, but the tokenizer has no chat template",
    ),
    "little.jsonl": (GOOD, "data.init_args.train (1 documents, 4 tokens, as rows of 32 tokens): 1 rows do not fill"),
    "broken.parquet": ("PAR1xx", "broken.parquet: not readable as Parquet"),
    "quote.csv": ('text,b\na,b\n"x', "quote.csv line 3: not valid CSV"),
    "fields.csv": ("text,b\na,b\nc\n", "fields.csv line 3: has 1 fields, the header has 2"),
    "letter.docx": ("x", "data.init_args.train: letter.docx: cannot read .docx; known are .txt, .jsonl"),
    "empty": ("", "data.init_args.train: empty: no file in this folder ends in .txt"),
    "trian.jsonl": ("", "data.init_args.train: trian.jsonl: no such file or folder"),
    "null": ("", "data.init_args.train: not set"),
}

TRAIN = "data.init_args.train"
DATA = {
    name: (content, line if line.startswith(TRAIN) else f"{TRAIN}: {line}") for name, (content, line) in DATA.items()
}

# What only one rank meets, after the process group has come up.
USER_DATA = """
import os
import signal
from lit_fsdp.tasks import CausalLM, TextData

class LoneData(TextData):
    def train_dataloader(self):
        if self.trainer.global_rank == 1:
            self.batch_size = 1000
        return super().train_dataloader()

class StoppedTask(CausalLM):
    def __init__(self, *, stop_at: int, **kwargs):
        super().__init__(**kwargs)
        self.stop_at = stop_at

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == self.stop_at:
            raise KeyboardInterrupt

class KilledTask(CausalLM):
    def __init__(self, **kwargs):
        if os.environ.get("LOCAL_RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(**kwargs)

class RowsOfTheNode(TextData):
    def setup(self, stage):
        # As if each node had its own file of this name.
        self.sources["train"] = (f"rows_{os.environ['RANK']}.jsonl", None)
        super().setup(stage)

class LoneTask(CausalLM):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1:
            raise ValueError("raised by the code of the user")
        return super().training_step(batch, batch_idx)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that works, and everything that can be wrong around it."""
    folder = tmp_path_factory.mktemp("broken")
    write_run(folder)
    for name, (content, _) in DATA.items():
        if "." in name and name != "trian.jsonl":
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "empty").mkdir()
    (folder / "incomplete.ckpt").mkdir()
    (folder / "lone.py").write_text(USER_DATA)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=320, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "lacking")
    weights = load_file(folder / "lacking" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "lacking" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def spell(setting: str) -> list[str]:
    """The options for a setting, which is one of the strategy unless it says more."""
    return setting.split() if setting.startswith("--") else [f"--trainer.strategy.{setting}"]


def check_all_refuse(expected: str, *args: str, is_met: bool = False) -> None:
    before = sorted(Path("runs").rglob("*"))
    first, second = fork_ranks(*args)
    assert first.code in (1, 2), first.err
    assert second.code == first.code
    assert len(first.errors) == 1, first.err + second.err
    assert first.errors[0].startswith(f"error: {expected}")
    # Before they have met they cannot know that both say the same.
    assert second.errors in ([], [f"[rank 1] {first.errors[0]}"])
    assert not (is_met and second.errors)
    assert "Traceback" not in first.err + second.err
    assert len((first.err + second.err).splitlines()) <= 3, first.err + second.err
    assert sorted(Path("runs").rglob("*")) == before


def thin_out(cases: Iterable[str], every: int) -> list[Any]:
    """Return all cases, of which only every so many is not slow: each starts two processes."""
    return [case if i % every == 0 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


@pytest.mark.full(after=1)
@pytest.mark.parametrize("setting", thin_out(CONFIGS, 3))
def test_a_broken_configuration_is_refused_by_every_rank_in_the_same_line(setting: str) -> None:
    check_all_refuse(CONFIGS[setting], "fit", "--config=run.yaml", *spell(setting))


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", thin_out(DATA, 2))
def test_broken_data_is_refused_by_every_rank_with_file_and_line(name: str) -> None:
    is_found_early = name in ("letter.docx", "empty", "trian.jsonl", "null")  # before ranks have met
    check_all_refuse(DATA[name][1], "fit", "--config=run.yaml", f"--data.train={name}", is_met=not is_found_early)


REAL = [
    ("--trainer.strategy.mesh.shard=3", CONFIGS["mesh.shard=3"]),
    ("--trainer.strategy.mesh.shrad=2", CONFIGS["mesh.shrad=2"]),
    ('--trainer.strategy.wrap.module_classes=["Nothing"]', CONFIGS['wrap.module_classes=["Nothing"]']),
    ("--ckpt_path=incomplete.ckpt", CONFIGS["--ckpt_path=incomplete.ckpt"]),
    ("--data.train=json.jsonl", DATA["json.jsonl"][1]),
    ("--data.train=chat.jsonl", DATA["chat.jsonl"][1]),
    ("--data.train=little.jsonl", DATA["little.jsonl"][1]),
    ("--data.train=broken.parquet", DATA["broken.parquet"][1]),
]


@pytest.mark.slow
def test_torchrun_ends_with_one_line_where_a_rank_finds_the_same_later_than_the_others() -> None:
    Path("late.py").write_text(
        "import os, sys, time\nfrom lit_fsdp.cli.main import main\n"
        "time.sleep(1.5 if os.environ['RANK'] == '2' else 0)\nsys.exit(main())\n"
    )
    options = ["--standalone", "--nproc-per-node=3", "late.py", "fit", "--config=lacking.yaml"]
    (ended,) = run_processes(["-m", "torch.distributed.run", *options])
    assert len(ended.errors) == 1, ended.err
    assert ended.errors[0].startswith("error: --config: 'lacking.yaml' does not exist"), ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("option", "expected"), REAL)
def test_torchrun_ends_with_that_line(option: str, expected: str) -> None:
    ended = torchrun("fit", "--config=run.yaml", option)
    assert ended.code == 1, ended.err
    # torchrun ends the other rank as soon as it sees the first one fail, maybe before it could say so, too.
    lines = {line.removeprefix("[rank 1] ") for line in ended.errors}
    assert len(lines) == 1
    assert len(ended.errors) <= 2
    assert lines.pop().startswith(f"error: {expected}")


def check_second_failed_alone(first: Ended, second: Ended, cause: str, code: int) -> None:
    assert (first.code, second.code) == (1, code), first.err + second.err
    assert cause in second.err
    assert "Traceback" not in first.err
    assert len(first.errors) == 1
    assert first.errors[0].startswith("error: another rank failed first, see the message there")


@pytest.mark.full
def test_a_refusal_on_one_rank_ends_the_other_one() -> None:
    ranks = fork_ranks("fit", "--config=run.yaml", "--data.class_path=lone.LoneData")
    check_second_failed_alone(*ranks, cause="rows do not fill one global batch of 2000", code=2)
    assert len(ranks[1].errors) == 1


def test_an_error_of_the_users_code_on_one_rank_ends_the_other_one() -> None:
    ranks = fork_ranks("fit", "--config=run.yaml", "--model.class_path=lone.LoneTask")
    check_second_failed_alone(*ranks, cause="ValueError: raised by the code of the user", code=1)


def test_ranks_that_found_different_checkpoints_end_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Path("step=7.ckpt")
    found.mkdir()
    monkeypatch.setattr(
        ckpt_path, "find_last_checkpoint", lambda *_, **__: found if os.environ["RANK"] == "0" else None
    )
    monkeypatch.setattr(ckpt_path, "check_checkpoint", lambda _: None)
    ranks = fork_ranks("fit", "--config=run.yaml", "--ckpt_path=last", timeout_s=100)
    host = socket.gethostname()
    other = f"rank 1 on {host} has no checkpoint"
    line = f"ckpt_path: rank 0 on {host} has step 7, save 0, {other}: expected the same on all ranks"
    assert ranks[0].errors == [f"error: {line}"], ranks[0].err
    assert [rank.code for rank in ranks] == [2, 2]


def test_ranks_that_read_other_data_end_before_the_first_step_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    host, rows = socket.gethostname(), Path("train.jsonl").read_text()
    # Before the first collective by samples of the files, before the first step by all rows.
    for rank, text in enumerate((rows, rows.replace("word7 ", "WORD7 "))):
        Path(f"rows_{rank}.jsonl").write_text(text)
    describe = facts.describe_source
    same = "expected the same on all ranks"
    with monkeypatch.context() as patch:
        patch.setattr(facts, "describe_source", lambda _: describe(f"rows_{os.environ['RANK']}.jsonl"))
        ranks = fork_ranks("fit", "--config=run.yaml", timeout_s=100)
    size = f"1 file of {len(rows):,} bytes"
    assert len(ranks[0].errors) == 1
    pattern = rf"error: data.init_args.train: rank 0 on {host} has {size} \(digest \w+\), rank 1 on {host} has {size} "
    assert re.match(pattern, ranks[0].errors[0]), ranks[0].err
    ranks = fork_ranks("fit", "--config=run.yaml", "--data.class_path=lone.RowsOfTheNode", timeout_s=100)
    pattern = rf"error: training data: rank 0 on {host} has [\d,]+ rows \(digest \w+\), rank 1 on {host} has .*: {same}"
    assert [rank.code for rank in ranks] == [2, 2]
    assert len(ranks[0].errors) == 1
    assert re.match(pattern, ranks[0].errors[0]), ranks[0].err
    assert "train/loss" not in ranks[0].out


@pytest.mark.full
def test_a_rank_that_is_killed_while_it_starts_ends_the_run_that_started_it() -> None:
    task = ("--model.class_path=lone.KilledTask", "--cpu_processes=2", "--trainer.strategy.start_timeout_s=300")
    began = time.monotonic()
    (ended,) = run_processes(["-m", "lit_fsdp", "fit", "--config=run.yaml", *task], timeout_s=250)
    assert time.monotonic() - began < 200
    assert (ended.code, len(ended.errors)) == (1, 1)
    assert ended.errors[0].startswith("error: rank 1 was killed (SIGKILL)")


@pytest.mark.full
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_last_checkpoint_of_a_run_that_has_none_is_refused(command: str) -> None:
    line = "ckpt_path: got 'last': no run below runs/new has a checkpoint"
    check_all_refuse(line, command, "--config=run.yaml", "--run_name=new", "--ckpt_path=last")


@pytest.mark.full
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_command_without_data_of_its_kind_is_refused(command: str) -> None:
    name = {"validate": "validation"}.get(command, command)
    check_all_refuse(f"data.init_args.{name}: not set", command, "--config=run.yaml")


@pytest.mark.full
@pytest.mark.parametrize(
    ("stop_at", "said"), [(0, "before there was a checkpoint"), (2, "--ckpt_path last goes on from")]
)
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, stop_at: int, said: str) -> None:
    saver = "class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {every_n_train_steps: 1}"
    task = ["--model.class_path=lone.StoppedTask", f"--model.stop_at={stop_at}", f"--run_name={tmp_path.name}"]
    ranks = fork_ranks("fit", "--config=run.yaml", *task, f"--trainer.callbacks+={{{saver}}}")
    assert [rank.code for rank in ranks] == [1, 1]
    (line,) = ranks[0].errors
    assert line.startswith(f"error: interrupted{':' if stop_at else ''} {said}")
    assert ranks[1].errors == []
    assert not stop_at or line.endswith(f"runs/{tmp_path.name}/version_0/checkpoints/epoch=0-step=2.ckpt")
