"""Shell completion, in a real bash."""

import subprocess
import time
from pathlib import Path

import pytest
from launches import Start, fork_commands

from lit_fsdp.cli.main import COMMANDS, main

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    (ended,) = fork_commands([Start(args=["completion", "bash"], folder=folder)])
    assert (ended.code, ended.err) == (0, "")
    (folder / "lit_fsdp.bash").write_text(ended.out)
    return folder / "lit_fsdp.bash"


def complete(script: Path, *words: str) -> list[str]:
    """What bash offers at the end of these words."""
    body = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_lit_fsdp; printf "%s\\n" "${COMPREPLY[@]}"'
    ended = subprocess.run(["bash", "-c", body, script, "lit_fsdp", *words], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.full
def test_bash_completes_commands_options_and_values(script: Path) -> None:
    assert set(complete(script, "")) == {*COMMANDS}
    assert complete(script, "bench", "s") == ["scaling", "strategies"]
    assert complete(script, "bench", "comm", "--backend", "g") == ["gloo"]
    assert complete(script, "fit", "--config", "x.yaml", "--trainer.max_s") == ["--trainer.max_steps"]
    assert "--model.lora.r" in complete(script, "fit", "--model.lora")
    assert "--trainer.strategy.mesh.shard" in complete(script, "plan", "--trainer.strategy.mesh")
    assert complete(script, "export", "--dtype", "b") == ["bfloat16"]
    assert complete(script, "export", "--overwrite", "") == ["true", "false"]
    begin = time.perf_counter()
    complete(script, "fit", "--trainer.")
    assert time.perf_counter() - begin < 1.0  # without Python: as a shell starts it, too


def test_it_is_asked_for_by_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert capsys.readouterr().err == "error: shell: got 'fish': expected bash or zsh\n"
    assert main(["completion"]) == 2
    assert "error: shell: missing" in capsys.readouterr().err
