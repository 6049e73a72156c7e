"""The plan of a speech model is what its run holds."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from launches import ROOT
from plan_runs import check_held, enter_folder, fit, plan
from speech_families import CSM, DIA

from lit_fsdp.planning.search.report import apply_changes

MINE = """
from torch.utils.data import DataLoader
from lit_fsdp.tasks import SpeechData

class Largest(SpeechData):
    '''Every batch is of the largest size, as a plan has it.'''

    def train_dataloader(self):
        return DataLoader([self.make_example_batch()] * 16, batch_size=None)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="full"),
        pytest.param(
            ["--trainer.strategy.activation_checkpointing.mode=full"],
            id="activation_checkpointing",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--model.lora={r: 4}"], id="lora", marks=pytest.mark.slow),
        pytest.param(["--model.lora={r: 4}", "--model.quantization={type: nf4}"], id="qlora", marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_what_a_run_on_two_ranks_holds(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_folder(tmp_path, monkeypatch)
    check(ROOT / "configs" / "tts_quickstart.yaml", options)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [CSM, DIA], ids=["csm", "dia"])
def test_so_is_that_of_other_families(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder(tmp_path, monkeypatch)
    config = yaml.safe_load((ROOT / "configs" / "tts_quickstart.yaml").read_text())
    config["model"]["init_args"] |= {"config": raw, "sampling": {"max_frames": 40}}
    (tmp_path / "tts_quickstart.yaml").write_text(yaml.safe_dump(config))
    check(tmp_path / "tts_quickstart.yaml", [])


@pytest.mark.full
def test_fsdp2_auto_finds_settings_and_the_run_is_as_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder(tmp_path, monkeypatch)
    strategy = ["--trainer.strategy=lit_fsdp.AutoFSDP2Strategy", "--trainer.strategy.device_memory=1496MiB"]
    path = ROOT / "configs" / "tts_quickstart.yaml"
    said, memory = fit_speech(f"--config={path}", *strategy, "--data.batch_size=4")
    # The defaults need 1.73 GiB.
    assert re.search(r"fsdp2_auto: .*activation_checkpointing.mode=\w+: 1\.[234]\d of 1\.46 GiB with headroom", said)
    assert memory["predicted"]["peak_bytes"] == pytest.approx(memory["step"]["peak_bytes"], rel=0.01)


@pytest.mark.full
def test_what_a_search_writes_with_adapters_freezes_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder(tmp_path, monkeypatch)
    raw = yaml.safe_load((ROOT / "configs" / "tts_quickstart.yaml").read_text())
    raw["model"]["init_args"]["freeze"] = ["text_embedding"]
    Path("run.yaml").write_text(yaml.safe_dump(raw))
    found = plan("--config=run.yaml", "--devices=1", "--device-memory=2GiB", "--search=true")
    candidates = found["search"]["candidates"]
    adapted = [found["changes"] for found in candidates if "model.lora" in found["changes"]]
    assert any("model.quantization" in changes for changes in adapted)
    for changes in adapted:
        Path("mine.yaml").write_text(yaml.safe_dump(apply_changes(raw, changes)))
        plan("--config=mine.yaml", "--devices=1")


def fit_speech(*options: str) -> tuple[str, dict[str, Any]]:
    """Train, and return what the first rank says, and the report's numbers of memory."""
    quiet = ["--trainer.max_steps=3", "--trainer.enable_checkpointing=false", "--model.num_samples=0"]
    said, sections = fit(*options, *quiet, "--trainer.accelerator=cpu")
    assert sum(part["num_trainable"] for part in sections["parts"]["numbers"].values()) > 0
    return said, sections["memory"]["numbers"]


def check(path: Path, options: list[str]) -> None:
    Path("mine.py").write_text(MINE)
    config = [f"--config={path}", "--data=mine.Largest", "--data.max_seconds=2"]
    config += ["--data.train=formants", "--data.tokenizer=bytes", "--data.batch_size=4", "--trainer.accelerator=cpu"]
    _, memory = fit_speech(*config, *options)
    real = memory["step"]
    assert memory["predicted"]["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.01)
    found = plan(*config, *options, "--devices=2", "--exact=true", "--gpu=RTX 4090")
    time = found["time"]
    assert time["step_s"] > time["compute_s"] > 0
    assert found["flops"]["hardware"] > 0
    assert found["closed_form_peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.01)
    check_held(found["memory"], real)
