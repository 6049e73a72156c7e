"""Every file in ``configs/`` is a run that can be started with the command in its head comment."""

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from launches import OURS

from lit_fsdp import FSDP2Strategy
from lit_fsdp.cli.main import main
from lit_fsdp.cli.train import TrainerCLI

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.yaml"))


def read_commands(config: Path) -> list[list[str]]:
    """The commands of our own in the head comment, as arguments."""
    head: list[str] = []
    for line in (ROOT / config).read_text().splitlines():
        if not line.startswith("#"):
            break
        head.append(line.removeprefix("#").strip())
    text = "\n".join(head).replace("\\\n", " ")
    return [found.split() for found in re.findall(r"-m lit_fsdp (.*)", text)]


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave nothing in the repository, and know of no launcher."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["lit_fsdp"])


@pytest.mark.full(after=6)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_head_comment_holds_the_command_and_it_parses(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = read_commands(config)
    assert any(str(config) in arg for command in commands for arg in command), f"{config}: no command in its head"
    for command in commands:
        if command[0] == "bench":  # its other options are its own
            continue
        assert main([*command, "--print_config"]) == 0, capsys.readouterr().err


@pytest.mark.full(after=4)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_strategy_task_and_data_can_be_built(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(cli: TrainerCLI, _subcommand: str) -> None:
        built.append(cli)

    built: list[Any] = []
    monkeypatch.setattr(TrainerCLI, "_run_subcommand", build)
    # Where it will run there may be GPUs; what has to be right here are its settings.
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.precision=null"]
    TrainerCLI(["fit", f"--config={config}", *options])
    (cli,) = built
    assert isinstance(cli.trainer.strategy, FSDP2Strategy)
    assert isinstance(cli.model, pl.LightningModule)
    assert isinstance(cli.datamodule, pl.LightningDataModule)
