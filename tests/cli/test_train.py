"""The command line: what it accepts, and that what it refuses ends in one line that helps."""

import errno
import importlib.util
import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lightning.pytorch  # noqa: F401  sets up its loggers, once
import pytest
import yaml
from lightning.fabric.plugins.environments import MPIEnvironment

from lit_fsdp.checkpoint.manifest import compute_crc32
from lit_fsdp.cli.main import COMMANDS, format_help, main
from lit_fsdp.cli.messages import describe_exception
from lit_fsdp.errors import nearest
from lit_fsdp.reporting.lost_logs import outlive_lost_output
from lit_fsdp.strategy.processes import choose_processes, describe_idle_cores

ROOT = Path(__file__).parents[2]
TORCHRUN = {"RANK": "0", "GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
UNEQUAL = {**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"}

TASK = '''
import os
from dataclasses import dataclass
from typing import Literal
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from lit_fsdp.strategy.processes import choose_processes

@dataclass(frozen=True, kw_only=True)
class Size:
    width: int = 4
    kind: Literal["small", "large"] = "small"

class TinyTask(LightningModule):
    def __init__(self, hidden: int, size: Size | None = None, refusing_rank: str = "none"):
        super().__init__()
        self.save_hyperparameters()
        self.refusing_rank = refusing_rank
        self.layer = torch.nn.Linear(4, hidden)

    def configure_model(self):
        if self.refusing_rank in ("all", os.environ.get("LOCAL_RANK")):
            refuse()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log_dict({"train/loss": loss, "train/tokens_seen": 8.0 * (self.global_step + 1)})
        return loss

    def train_dataloader(self):
        return DataLoader(torch.ones(64, 4), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class OtherTask(TinyTask):
    pass

class BuggyTask(TinyTask):
    def training_step(self, batch, batch_idx):
        raise ValueError("raised by the code of the user")

class NoStep(LightningModule):
    pass

class NoData(LightningModule):
    def training_step(self, batch, batch_idx):
        return None

@dataclass(frozen=True, kw_only=True)
class Grid:
    rows: int = 1

class TinyStrategy(SingleDeviceStrategy):
    def __init__(self, *, grid: Grid = Grid(), fast: bool = True):
        super().__init__("cpu")
        if grid.rows == 7:
            refuse()

def refuse():
    """Raise a ValueError from inside lit_fsdp."""
    choose_processes("auto", 1, cpu_processes=-1, has_accelerator=False, environ={})
'''
REFUSAL = "cpu_processes: got -1: expected 1 or more"
RUN = """
model: {class_path: tinytask.TinyTask, init_args: {hidden: 3}}
trainer: {strategy: auto, accelerator: cpu, max_steps: 2, enable_model_summary: false}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a task of their own and a run."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "tinytask.py").write_text(TASK)
    (folder / "run.yaml").write_text(RUN)
    (folder / "broken.yaml").write_text("trainer:\n  max_steps: [1\n  max_epochs: 1\n")
    (folder / "unfinished.py").write_text("import os\ndef task(:\n")
    (folder / "dividing.py").write_text("import os\nsize = 1 / 0\n")
    (folder / "imports_nothing.py").write_text("import a_package_nobody_has\n")
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["lit_fsdp"])
    for name in (
        "lightning",
        "lightning.pytorch",
        "lightning.fabric",
    ):  # they hold the stderr of another test
        monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.NullHandler()])
    for name in (*TORCHRUN, "LIT_FSDP_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def start(*args: str, **more: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "lit_fsdp", *args]
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def errors_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if "error: " in line]


SIMPLE = [
    # an unknown key, at every depth, from a file and as an option
    ("{trainer: {max_step: 3}}", "", "trainer.max_step: unknown key: did you mean max_steps?"),
    ("{}", "--trainer.max_step=3", "trainer.max_step: unknown key: did you mean max_steps?"),
    ("{max_steps: 3}", "", "max_steps: unknown key: did you mean trainer.max_steps?"),
    ("{trainr: {max_steps: 3}}", "", "trainr: unknown key: did you mean trainer?"),
    ("{progress_bar: {refresh: 3}}", "", "progress_bar.refresh: unknown key: did you mean refresh_rate?"),
    ("{model: {init_args: {hiden: 3}}}", "",
     "model.init_args.hiden: unknown key of tinytask.TinyTask: did you"),
    ("{}", "--model.hiden=3",
     "model.init_args.hiden: unknown key of tinytask.TinyTask: did you mean hidden?"),
    ("{model: {init_args: {size: {widht: 3}}}}", "",
     "model.init_args.size.widht: unknown key of tinytask.Size"),
    ("{}", "--trainer.strategy=tinytask.TinyStrategy --trainer.strategy.grid.row=2",
     "trainer.strategy.init_args.grid.row: unknown key of tinytask.TinyStrategy: did you"),
    ("{trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {save_topk: 3}}]}}", "",
     "trainer.callbacks[0].init_args.save_topk: unknown key of lightning.pytorch"),
    # a wrong type or choice
    ("{trainer: {max_steps: abc}}", "", "trainer.max_steps: got 'abc': expected int"),
    ("{model: {init_args: {hidden: x}}}", "", "model.init_args.hidden: got 'x': expected int"),
    ("{model: {init_args: {size: {kind: tiny}}}}", "",
     "model.init_args.size.kind: got 'tiny': expected small or large"),
    ("{model: {init_args: {size: 3}}}", "",
     "model.init_args.size: got 3: expected a mapping of the keys of Size"),
    ("{model: {init_args: {size: large}}}", "", "got 'large': expected a mapping of the keys of Size, such as {kind"),
    ("{}", "--model.size={kind:large}", "expected a mapping of the keys of Size, with a space after each colon"),
    ("{trainer: {strategy: {class_path: tinytask.TinyStrategy, init_args: {grid: 3}}}}", "",
     "trainer.strategy.init_args.grid: got 3: expected mapping"),
    ("{}", "--trainer.strategy=lit_fsdp.FSDP2Strategy --trainer.strategy.cpu_offload=true",
     "trainer.strategy.init_args.cpu_offload: got 'true': expected a mapping of the keys of CPUOffload, {} for"),
    ("{}", "--trainer.strategy=lit_fsdp.FSDP2Strategy --trainer.strategy.activation_checkpointing=full",
     "trainer.strategy.init_args.activation_checkpointing: got 'full': expected a mapping of"),
    ("{trainer: {strategy: {class_path: lit_fsdp.FSDP2Strategy, init_args: {cpu_offload: true}}}}", "",
     "trainer.strategy.init_args.cpu_offload: got True: expected a mapping of the keys of CPUOffload, {} for"),
    ("{}", "--trainer.precision=bf17", "trainer.precision: got 'bf17': expected one of"),
    ("{}", "--trainer.precision=fp16", "64, 32, 16, bf16 or null: did you mean 16-mixed?"),
    ("{trainer: 3}", "", "trainer: got 3 (extra.yaml, line 1): expected a mapping"),
    ("{seed_everything: x}", "", "seed_everything: got 'x': expected true or false or int"),
    ("{data: {class_path: TextData, init_args: {train: [5]}}}", "",
     "data.init_args.train[0]: got 5: expected str or mapping"),
    # a class
    ("{model: {class_path: tinytask.TinyTsk}}", "",
     "model.class_path: got 'tinytask.TinyTsk': module tinytask has no TinyTsk: did you mean TinyTask?"),
    ("{model: {class_path: tiny_cli_tsk.TinyTask}}", "", "no module tiny_cli_tsk: did you mean tinytask?"),
    ("{}", "--model=TinyTsk",
     "model.class_path: got 'TinyTsk': no class of this name: did you mean TinyTask?"),
    ("{}", "--trainer.strategy.help=fsdp2", "no class of this name: did you mean FSDP2Strategy?"),
    ("{}", "--model=torch.nn.Linear",
     "model.class_path: got 'torch.nn.Linear': expected a subclass of Lightning"),
    ("{}", "--model=imports_nothing.Task",
     "importing imports_nothing.Task failed: No module named 'a_package_nob"),
    ("{}", "--trainer.strategy=fsdp2 --trainer.strategy.mesh.shard=2",
     "trainer.strategy: got 'fsdp2' before, which has no mesh.shard: expected class_path: lit_fsdp"),
    # a value that is missing, or too much
    ("{}", "--trainer.max_steps", "trainer.max_steps: no value given: expected one argument"),
    ("{}", "something", "something: unexpected argument: expected --key=value"),
    ("{trainer: {max_steps: 1, max_steps: 2}}", "",
     "trainer.max_steps: given twice (extra.yaml, lines 1 and 1)"),
    ("[1, 2]", "", "extra.yaml: got a sequence: expected keys"),
    ("{}", "--config=ruin.yaml", "--config: 'ruin.yaml' does not exist: did you mean run.yaml?"),
    ("{}", "--config=", "--config: got no path: expected that of a YAML file"),
    ("{}", "--config=broken.yaml", "broken.yaml, line 3, column 13: not valid YAML: expected ',' or ']'"),
    ("{}", "--ckpt_path=ruin.yaml", "ckpt_path: 'ruin.yaml' does not exist: did you mean run.yaml?"),
    ("{}", "--ckpt_path=hpc", "ckpt_path: got 'hpc': no hpc_ckpt_<n>.ckpt lies in "),
    # what a class of ours or of Lightning refuses while it is built
    ("{}", "--trainer.strategy=tinytask.TinyStrategy --trainer.strategy.grid.rows=7",
     f"trainer.strategy: {REFUSAL}"),
    ("{}", "--trainer.strategy=fsdp3", "trainer.strategy: got 'fsdp3': did you mean fsdp2?"),
    # numbers that Lightning takes without a word, or refuses without naming the setting
    ("{}", "--trainer.limit_train_batches=2.5", "trainer.limit_train_batches: got 2.5: expected a number of batches"),
    ("{}", "--trainer.val_check_interval=0", "trainer.val_check_interval: got 0: expected a number of batches from 1"),
    ("{}", "--trainer.max_steps=0", "trainer.max_steps: got 0: expected 1 or more, or -1 for no limit"),
    ("{}", "--trainer.min_steps=9", "trainer.min_steps: got 9: training ends at max_steps 2: expected 2 or less"),
    ("{trainer: {gradient_clip_val: .nan}}", "", "trainer.gradient_clip_val: got nan: expected above 0, or null"),
    ("{}", "--trainer.devices=two", "trainer.devices: got 'two': expected auto, a number of processes from 1 to 1024"),
    ("{}", "--trainer.devices=1,2", "trainer.devices: got '1,2': `devices` selected with `CPUAccelerator` should be"),
    ("{}", "--trainer.max_time=abc", "trainer.max_time: got 'abc': `Timer(duration='abc')` is not a valid duration"),
    ("{trainer: {max_time: {foo: 3}}}", "", "trainer.max_time: got {'foo': 3}: "),
    ("{trainer: {detect_anomaly: null}}", "", "trainer.detect_anomaly: got null: expected true or false, or leave it"),
    ("{model: {init_args: {size: {width: null}}}}", "", "model.init_args.size.width: got null: expected int, or leave"),
    ("{}", "--seed_everything=-1", "seed_everything: got -1: expected 0 to 4294967295, or true for a random one"),
    ("{}", "--trainer.default_root_dir=run.yaml", "trainer.default_root_dir: got 'run.yaml': "),
    # what a module of the user's dies of
    ("{}", "--model=unfinished.Task", "importing unfinished.Task failed: invalid syntax (unfinished.py, line 2)"),
    ("{}", "--model=dividing.Task", "importing dividing.Task failed: ZeroDivisionError: division by zero ("),
    ("{}", "--model=dividing.Task", "dividing.py, line 2)"),
    # what a run cannot do without
    ("{}", "--model=tinytask.NoStep", "model: got NoStep: it has no training_step: expected a class_path of a task"),
    ("{}", "--model=tinytask.NoData", "data: missing: NoData has no train_dataloader of its own: expected a class"),
    ("{}", "--model=tinytask.NoData --data=LightningDataModule", "data: got LightningDataModule: it has no train_data"),
    ("{}", "--cpu_processes=0", "cpu_processes: got 0: expected 1 or more"),
    ("", "", "--config: 'extra.yaml' is empty: expected settings of trainer, model and data"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "options", "expected"), SIMPLE)
def test_a_broken_configuration_ends_in_one_line_with_path_and_expectation(
    folder: Path, capfd: pytest.CaptureFixture[str], extra: str, options: str, expected: str
) -> None:
    (folder / "extra.yaml").write_text(extra)
    code = main(["fit", "--config=run.yaml", "--config", "extra.yaml", *options.split()])
    lines = capfd.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert expected in lines[0]
    assert len(lines[0]) <= 520


def test_a_required_value_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model=tinytask.TinyTask"]) == 2
    assert main(["fit"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: model.init_args.hidden: missing: expected a value")
    assert second == "error: model: missing: expected a value, here or in the YAML of --config"


def test_an_option_of_a_class_that_is_chosen_only_later_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model.hidden=3", "--config=run.yaml"]) == 2
    expected = "error: model.init_args.hidden: no class has been chosen up to here: put --config or the class before"
    assert capsys.readouterr().err.startswith(expected)


def test_a_package_that_is_not_installed_is_named_with_its_command(capfd: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    assert main(["fit", "--config=run.yaml", "--trainer.logger=WandbLogger"]) == 2
    assert 'wandb is not installed: pip install "lit_fsdp[wandb]"' in errors_in(capfd.readouterr().err)[0]


def test_a_package_that_a_setting_needs_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8", raising=False)
    options = ("--trainer.strategy=lit_fsdp.FSDP2Strategy", "--trainer.strategy.float8.emulate=true")
    assert main(["fit", "--config=run.yaml", *options]) == 2
    assert errors_in(capfd.readouterr().err) == [
        'error: float8 needs the package torchao: pip install "lit_fsdp[float8]"'
    ]


def test_commands_that_do_not_exist_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fti"]) == 2
    assert main(["--config=run.yaml", "fit"]) == 2
    known = ", ".join(COMMANDS)
    assert capsys.readouterr().err.splitlines() == [
        "error: fti: unknown command: did you mean fit?",
        f"error: --config=run.yaml: an option before the command: expected {known} first",
    ]


def test_a_folder_that_was_removed_and_a_home_that_nobody_knows_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    for code, remove_at in enumerate(("lit_fsdp.cli.main._run_command", ""), start=1):
        gone.mkdir()
        monkeypatch.chdir(gone)
        if remove_at:  # while it runs
            monkeypatch.setattr(remove_at, lambda _: (gone.rmdir(), Path("x").resolve()))
        else:
            gone.rmdir()
        assert main(["fit"]) == code
        assert capsys.readouterr().err.startswith("error: the current folder was removed: change to one that is there")
    with pytest.raises(RuntimeError) as unknown:
        Path("~no.such.user/x.jsonl").expanduser()
    assert "no home folder is known for it: set HOME" in (describe_exception(unknown.value) or "")


def test_files_merge_deeply_and_options_win(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "first.yaml").write_text("trainer: {max_steps: 7, precision: bf16-true}\nrun_name: first\n")
    (folder / "second.yaml").write_text("trainer: {max_steps: 9}\nmodel: {init_args: {size: {width: 5}}}\n")
    files = ["--config=run.yaml", "--config=first.yaml", "--config=second.yaml"]
    options = ["--model.init_args.size.kind=large", "--trainer.strategy=tinytask.TinyStrategy"]
    assert main(["fit", *files, *options, "--trainer.strategy.grid.rows=3", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["trainer"]["max_steps"], config["trainer"]["precision"]) == (9, "bf16-true")
    assert config["run_name"] == "first"
    assert config["model"]["init_args"]["size"] == {"width": 5, "kind": "large"}
    assert config["trainer"]["strategy"]["init_args"] == {"grid": {"rows": 3}, "fast": True}
    assert config["seed_everything"] == 0


def test_the_default_strategy_takes_its_settings_as_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model=tinytask.TinyTask", "--model.hidden=3", "--trainer.strategy.mesh.shard=2"]
    assert main(["fit", *options, "--print_config"]) == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert trainer["strategy"]["class_path"] == "lit_fsdp.FSDP2Strategy"
    assert trainer["strategy"]["init_args"]["mesh"]["shard"] == 2
    assert main(["fit", *options, "--trainer.strategy.mesh.shrd=2"]) == 2
    assert "trainer.strategy.init_args.mesh.shrd: unknown key" in capsys.readouterr().err


def test_a_run_leaves_everything_in_one_folder_and_can_be_repeated(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["fit", "--config=run.yaml", "--run_name=one", "--trainer.log_every_n_steps=1"]
    assert main(args) == 0
    run = folder / "runs" / "one" / "version_0"
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert {"checkpoints", "config", "events", "metrics"} <= names
    assert (run / "checkpoints" / "last.ckpt").is_symlink()
    assert "Run summary" in capfd.readouterr().out
    assert not (folder / "config.yaml").exists()

    assert main(["fit", f"--config={run / 'config.yaml'}"]) == 0
    assert (run.parent / "version_1" / "config.yaml").read_text() == (run / "config.yaml").read_text()


def test_a_requeued_job_with_a_path_says_that_it_begins_there_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.warns(UserWarning, match="nowhere.ckpt: this job was requeued, and begins there again"):
        assert main(["fit", "--config=run.yaml", "--ckpt_path=nowhere.ckpt"]) == 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*requeued")
        assert main(["fit", "--config=run.yaml", "--ckpt_path=last", "--trainer.max_steps=1"]) == 0


def test_ckpt_path_last_does_not_start_afresh_beside_a_checkpoint_of_another_strategy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = folder / "runs" / "other" / "version_0" / "checkpoints" / "epoch=0-step=2.ckpt"
    saved.mkdir(parents=True)
    (saved / "meta.pt").touch()
    assert main(["fit", "--config=run.yaml", "--run_name=other", "--ckpt_path=last"]) == 2
    (line,) = errors_in(capsys.readouterr().err)
    assert f"{saved}, was not saved by FSDP2Strategy" in line


def test_a_sharded_checkpoint_is_refused_by_a_strategy_that_cannot_read_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = folder / "runs" / "sharded" / "version_0" / "checkpoints" / "last.ckpt"
    saved.mkdir(parents=True)
    (saved / "complete.json").write_text("{}")
    assert main(["validate", "--config=run.yaml", f"--ckpt_path={saved}", "--trainer.strategy=auto"]) == 2
    (line,) = errors_in(capsys.readouterr().err)
    assert "it holds shards, which SingleDeviceStrategy does not read: set trainer.strategy to fsdp2" in line


def test_ckpt_path_last_finds_the_earlier_run_and_the_command_line_wins_over_its_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config=run.yaml", "--run_name=again"]) == 0
    again = ["fit", "--config=run.yaml", "--run_name=again", "--ckpt_path=last", "--trainer.max_steps=3"]
    capfd.readouterr()
    assert main([*again, "--model.init_args.size.width=9"]) == 0
    assert "1 (now at 3)" in capfd.readouterr().out
    # As of the folder of the run, from a run of another name.
    by_run = ["fit", "--config=run.yaml", "--run_name=further", "--ckpt_path=runs/again", "--trainer.max_steps=4"]
    assert main(by_run) == 0
    assert "1 (now at 4)" in capfd.readouterr().out
    saved = yaml.safe_load((folder / "runs/again/version_1/config.yaml").read_text())
    assert saved["model"]["init_args"]["size"]["width"] == 9


def test_last_goes_on_with_the_run_of_its_name_where_a_logger_puts_checkpoints_elsewhere(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = "{class_path: CSVLogger, init_args: {save_dir: logs}}"
    run = ["fit", "--config=run.yaml", f"--trainer.logger={logger}", "--ckpt_path=last"]
    assert main([*run, "--run_name=sweep/a"]) == 0
    for name, steps in (("b", 1), ("a", 3), ("a", 4)):
        assert main([*run, f"--run_name=sweep/{name}", f"--trainer.max_steps={steps}"]) == 0
        assert f"1 (now at {steps})" in capfd.readouterr().out
    assert len([*(folder / "logs").glob("*/version_*/checkpoints/last.ckpt")]) == 4


def test_the_best_checkpoint_of_another_process_is_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("fit", "validate"):
        assert main([command, "--config=run.yaml", "--ckpt_path=best"]) == 2
        (line,) = errors_in(capsys.readouterr().err)
        assert "ckpt_path: got 'best': only the process that trained knows its best checkpoint" in line


def test_progress_bar_summary_and_monitoring_can_be_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    off = ["--run_summary=false", "--trainer.enable_progress_bar=false", "--monitoring=false"]
    off += ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    assert main(["fit", "--config=run.yaml", *off]) == 0
    assert capfd.readouterr().out.strip() == ""


@pytest.mark.full
def test_a_run_goes_on_where_the_file_it_prints_to_is_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    number = errno.ENOSPC
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", refuse)
    monkeypatch.setattr(stream, "flush", refuse)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.warns(
        UserWarning, match="stdout cannot be written to: No space left on device: training goes"
    ) as found:
        code = main(["fit", "--config=run.yaml", "--run_name=full"])
    assert (code, sum("stdout" in str(warning.message) for warning in found)) == (0, 1)
    sys.stdout.flush()  # as Python does last, which would end with 120
    number = errno.EPIPE
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(BrokenPipeError), outlive_lost_output():
        print("to nobody")


@pytest.mark.full
def test_a_run_whose_output_nobody_reads_any_more_ends_and_blames_no_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    assert main(["fit", "--config=run.yaml", "--run_name=piped", "--monitoring=false"]) == 1
    assert errors_in(capfd.readouterr().err) == []


def test_an_error_of_the_users_code_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="raised by the code of the user"):
        main(["fit", "--config=run.yaml", "--model=tinytask.BuggyTask"])


def test_what_our_code_refuses_while_running_is_one_line_unless_debugging(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["fit", "--config=run.yaml", "--model.refusing_rank=all"]
    assert main(args) == 2
    assert errors_in(capfd.readouterr().err) == [f"error: {REFUSAL}"]
    monkeypatch.setenv("LIT_FSDP_DEBUG", "1")
    with pytest.raises(ValueError, match="expected 1 or more"):
        main(args)


def test_srun_on_this_machine_is_no_reason_to_warn_outside_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with warnings.catch_warnings(record=True) as found:
        assert main(["fit", "--config=run.yaml", "--model.refusing_rank=all"]) == 2
    assert not [warning for warning in found if "srun" in str(warning.message)]


def test_a_bug_in_our_code_is_no_refusal() -> None:
    with pytest.raises(AttributeError) as bug:
        nearest(None, ["a"])  # type: ignore[arg-type]
    assert describe_exception(bug.value) is None
    environ = {**TORCHRUN, "LOCAL_WORLD_SIZE": "two"}
    with pytest.raises(ValueError, match="invalid literal") as bug:  # int("two"), not a raise of ours
        choose_processes("auto", 1, cpu_processes=None, has_accelerator=False, environ=environ)
    assert describe_exception(bug.value) is None


def test_what_may_not_be_read_is_told_in_one_line_if_it_is_not_the_users_code_that_reads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_in_own_code(path: Path) -> None:
        path.open()

    denied = [PermissionError(errno.EACCES, "Permission denied", "somebody/else/__0_0.distcp") for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=denied))
        for read, line in (
            (compute_crc32, "somebody/else/__0_0.distcp: Permission denied"),
            (read_in_own_code, None),
        ):
            with pytest.raises(PermissionError) as caught:
                read(Path("somebody"))
            assert describe_exception(caught.value) == line
    saved = folder / "runs" / "shared" / "version_0"
    (saved / "checkpoints").mkdir(parents=True)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not os.fspath(path).endswith("version_0") and access(path, mode)
    )
    assert main(["fit", "--config=run.yaml", "--run_name=shared", "--ckpt_path=last"]) == 2  # not afresh
    (line,) = errors_in(capsys.readouterr().err)
    assert "version_0 cannot be read, and may hold the newest checkpoint" in line


@pytest.mark.parametrize(
    ("devices", "nodes", "cpu", "environ", "expected"),
    [
        ("auto", 1, None, {}, ("auto", 1)),
        ("auto", 1, 2, {}, (2, 1)),
        (4, 1, 2, {}, (4, 1)),
        ("auto", 1, None, TORCHRUN, (2, 2)),
        (-1, 2, None, TORCHRUN, (2, 2)),
        ([3, 5], 1, None, TORCHRUN, ([3, 5], 2)),
        ("0,1", 2, None, TORCHRUN, ("0,1", 2)),
        (3, 1, None, TORCHRUN, "torchrun started 2 processes on this node: expected 2"),
        (2, 3, None, TORCHRUN, "torchrun started 2 nodes: expected 2"),
        ("auto", 1, None, UNEQUAL, "started 1 processes on this node, of 3 on 2 nodes: .* the same --nproc-per-node"),
    ],
)
def test_the_number_of_processes_comes_from_torchrun_where_nothing_is_set(
    devices: object, nodes: int, cpu: int | None, environ: dict[str, str], expected: object
) -> None:
    def choose() -> object:
        return choose_processes(devices, nodes, cpu_processes=cpu, has_accelerator=False, environ=environ)

    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            choose()
    else:
        assert choose() == expected


def test_processes_of_mpirun_do_not_train_alone_under_other_strategies_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(["fit", "--config=run.yaml", "--trainer.strategy=ddp"]) == 2
    assert "OMPI_COMM_WORLD_SIZE: got 2 in the environment" in capsys.readouterr().err
    main(["plan", "--config=run.yaml", "--trainer.strategy=fsdp2"])  # starts nothing
    assert "error: data: not set: a plan needs one" in capsys.readouterr().err


def test_an_mpi4py_without_an_mpi_library_is_named_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")  # of mpi4py 4.1.2
    monkeypatch.setattr(MPIEnvironment, "detect", staticmethod(Mock(side_effect=missing)))
    assert main(["fit", "--config=run.yaml"]) == 2
    (line,) = errors_in(capsys.readouterr().err)
    assert line.startswith("error: trainer: mpi4py is installed, ")
    assert "finds no MPI library: pip uninstall mpi4py, or " in line


def test_deepspeed_is_refused_on_a_cpu_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_DEEPSPEED_AVAILABLE", "_DEEPSPEED_GREATER_EQUAL_0_16"):
        monkeypatch.setattr(f"lightning.pytorch.strategies.deepspeed.{name}", True)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__="0.19.8", utils=Mock()))
    options = ("--trainer.strategy=deepspeed_stage_2", "--trainer.devices=2")
    assert main(["fit", "--config=run.yaml", *options]) == 2
    line = "error: trainer.strategy: DeepSpeedStrategy trains on CUDA GPUs only, "
    assert errors_in(capsys.readouterr().err)[0].startswith(line)


@pytest.mark.full
def test_a_number_of_batches_stays_whole_whatever_was_imported_before(folder: Path) -> None:
    # Python's typing gives the Trainer's Optional[Union[int, float]] as it was made first; here as after any `bench`.
    code = "from typing import *; import lit_fsdp.cli.bench, lightning.pytorch as pl, sys; "
    code += "assert get_type_hints(pl.Trainer.__init__)['limit_train_batches'].__args__[0] is float; "
    code += "from lit_fsdp.cli.main import main; "
    args = ["fit", "--config=run.yaml", "--trainer.limit_train_batches=1", "--print_config"]
    code += f"sys.path.insert(0, '.'); sys.exit(main({args}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, capture_output=True, check=True)
    assert "  limit_train_batches: 1\n" in done.stdout


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_that_share_cores_are_warned_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, num_processes: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    refused = ["--trainer.strategy=tinytask.TinyStrategy", "--trainer.strategy.grid.rows=7"]  # before a rank is started
    assert main(["fit", "--config=run.yaml", f"--trainer.devices={num_processes}", *refused]) == 2
    line = f"{num_processes} processes compute on 2 cores, as there is no GPU for them: they wait for one another"
    assert (line in [str(warning.message) for warning in recwarn]) == (num_processes == 3)


def test_cpu_processes_has_no_effect_beside_a_gpu() -> None:
    chosen = choose_processes("auto", 1, cpu_processes=2, has_accelerator=True, environ={})
    assert chosen == ("auto", 1)


def test_help_lists_the_commands_on_one_screen_without_loading_torch() -> None:
    process = start("--help", PYTHONPROFILEIMPORTTIME="1")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert all(line.startswith("import time:") for line in err.splitlines()), err
    loaded = {line.split("|")[-1].strip().partition(".")[0] for line in err.splitlines()[1:]}
    # All of it is of Python, which also looks for Jython's "org", of an environment's start, or ours.
    others = {name for name in loaded if not name.startswith("_")} - sys.stdlib_module_names
    assert "lit_fsdp" in others <= {"lit_fsdp", "sitecustomize", "org"}
    assert out.strip() == format_help()
    assert len(out.splitlines()) <= 40
    assert all(f"  {name} " in out for name in ("fit", "validate", "test", "predict", "export"))


@pytest.mark.full
@pytest.mark.parametrize(("command", "first"), [("plan", "--devices"), ("preview", "--rows"), ("fit", "--ckpt_path")])
def test_the_help_of_a_command_begins_with_its_own_options(
    command: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    given = "--config FILE [--config FILE ...]"
    given = f"({given} | --model MODEL)" if command == "plan" else given
    assert usage == f"usage: python -m lit_fsdp {command} {given} [--KEY=VALUE ...]"
    options = [line.split()[0] for line in lines if line.startswith("  -")]
    assert options[0] == first
    # The keys of a run come before the 40 settings of the Trainer, which end it.
    assert options.index("--run_name") < options.index("--model") < options.index("--trainer")
    assert options[-1].startswith("--trainer.")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    import lit_fsdp

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit_fsdp {lit_fsdp.__version__}\n"


@pytest.mark.full
def test_a_refusal_in_a_process_of_its_own_is_one_line_and_code_2() -> None:
    process = start("fit", "--config=run.yaml", "--trainer.max_step=3")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.splitlines() == ["error: trainer.max_step: unknown key: did you mean max_steps?"]


@pytest.mark.full
@pytest.mark.parametrize("refusing_rank", [pytest.param("all", marks=pytest.mark.slow), "1"])
def test_all_ranks_end_soon_and_say_who_failed(refusing_rank: str) -> None:
    process = start(
        "fit",
        "--config=run.yaml",
        "--trainer.strategy=ddp",
        "--cpu_processes=2",
        f"--model.refusing_rank={refusing_rank}",
    )
    # Returns only when the last rank, which shares the pipe, has closed it: none is left behind. One that waited for
    # the process group to time out would take half an hour.
    _, err = process.communicate(timeout=300)
    assert process.returncode == (2 if refusing_rank == "all" else 1)
    assert "Traceback" not in err
    first = [line for line in errors_in(err) if line.startswith("error: ")]
    assert len(first) == 1
    if refusing_rank == "all":
        assert first == [f"error: {REFUSAL}"]
    else:
        assert f"[rank 1] error: {REFUSAL}" in err
        assert first[0].startswith("error: rank 1 (exit code 2) failed first, see the message there")


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("MASTER_PORT", "")])
def test_what_a_launcher_left_in_the_shell_stops_only_commands_with_ranks(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["fit", "--config=none.yaml"]) == 2
    assert name in capsys.readouterr().err
    assert main(["export", "--checkpoint=none", "--out=exported"]) == 2
    assert "none does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_processes", "environ", "expected"),
    [
        (2, {**TORCHRUN, "OMP_NUM_THREADS": "1"}, "such as to 8"),
        (2, {**TORCHRUN, "OMP_NUM_THREADS": "8"}, None),
        (16, {**TORCHRUN, "OMP_NUM_THREADS": "1"}, None),
        (2, {"OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_an_optimizer_on_the_host_is_told_of_cores_that_torchrun_leaves_idle(
    num_processes: int, environ: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    found = describe_idle_cores(num_processes, environ)
    assert found is None if expected is None else expected in str(found)
