"""What a run writes stays in its place, and tells no credentials, whatever ends it."""

import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  sets up its loggers, once
import pytest
import yaml

from lit_fsdp import callbacks
from lit_fsdp.cli.main import main
from lit_fsdp.cli.messages import redact_logs
from lit_fsdp.redaction import REDACTED

TASK = """
import logging
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

class Remote(LightningModule):
    def __init__(self, url: str, storage: dict, mirrors: list[str] = [], is_down: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.url, self.storage, self.is_down = url, storage, is_down
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        logging.getLogger("anyone").error("reading %s", self.url)
        rank_zero_info(f"reading {self.url}")
        rank_zero_warn(f"slow: {self.url}")
        if self.is_down:
            raise OSError(f"cannot reach {self.url} with {self.storage}")
        return self.layer(batch).square().mean()

    def train_dataloader(self):
        return DataLoader(torch.ones(8, 4), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
# Each is looked for, byte by byte, in all that was written and printed.
SECRETS = ("hunter2", "5igned", "hf_abcdefghijklmnopqrst0123456789", "0123456789abcdef0123", "471108154711")
URL = f"https://anna:{SECRETS[0]}@data.example.org/train.tar?part=1&X-Amz-Signature={SECRETS[1]}"
SETTINGS: dict[str, Any] = {
    "url": URL,
    "storage": {
        "api_key": SECRETS[3],
        "region": "north",
        "env": {"WANDB_API_KEY": SECRETS[3], "password": 471108154711},
    },
    "mirrors": ["https://example.org/b.tar", f"https://example.org/{SECRETS[2]}/b.tar"],
}
TRAINER = {"strategy": "auto", "accelerator": "cpu", "max_steps": 2, "log_every_n_steps": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a task of their own and a run."""
    (tmp_path / "user").mkdir()
    monkeypatch.chdir(tmp_path / "user")
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    monkeypatch.setattr(sys, "argv", ["lit_fsdp"])
    Path("remotetask.py").write_text(TASK)
    model = {"class_path": "remotetask.Remote", "init_args": SETTINGS}
    Path("run.yaml").write_text(yaml.safe_dump({"model": model, "trainer": TRAINER}))
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):  # they hold the stderr of another test
        monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.NullHandler()])
    return tmp_path / "user"


def check_secrets(folder: Path, printed: str) -> None:
    for secret in SECRETS:
        assert secret not in printed
        told = [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert told == []


def test_no_file_and_no_line_of_a_run_tells_a_credential(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert main(["fit", "--config=run.yaml"]) == 0
    shown = [warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in warned]
    printed = "".join([*capfd.readouterr(), caplog.text, *shown])
    check_secrets(folder / "runs", printed)
    for what in ("reading", "slow:"):
        assert f"{what} https://{REDACTED}@data.example.org/train.tar?part=1&X-Amz-Signature={REDACTED}" in printed
    names = "model.init_args.url, model.init_args.storage.api_key, model.init_args.storage.env.WANDB_API_KEY"
    assert f"config.yaml: redacted {names}" in printed
    run = folder / "runs" / "run" / "version_0"
    saved = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]
    assert saved["storage"]["region"] == "north"
    assert saved["mirrors"] == ["https://example.org/b.tar", f"https://example.org/{REDACTED}/b.tar"]
    assert {"report.html", "report.json", "report.md", "hparams.yaml"} <= {path.name for path in run.iterdir()}


def test_an_error_that_names_a_credential_tells_it_nowhere(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    try:
        main(["fit", "--config=run.yaml", "--model.is_down=true"])
    except OSError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    printed = "".join([*capfd.readouterr(), caplog.text])
    check_secrets(folder / "runs", printed)
    assert f"OSError: cannot reach https://{REDACTED}@data.example.org/train.tar" in printed
    assert "cannot reach" in (folder / "runs/run/version_0/report.md").read_text()
    assert main(["fit", "--config=run.yaml", f"--trainer.strategy={URL}"]) == 2
    check_secrets(folder / "runs", capfd.readouterr().err)


def test_a_warning_of_ours_is_its_text_and_that_of_others_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", lambda *args: f"{args[2]}:{args[3]}: {args[0]}\n")
    for place, name in ((sys, "excepthook"), (logging, "_logRecordFactory")):
        monkeypatch.setattr(place, name, getattr(place, name))  # put back at the end
    redact_logs()
    own, other = str(Path(callbacks.__path__[0]) / "report.py"), str(Path(yaml.__path__[0]) / "loader.py")
    assert warnings.formatwarning("slow data", UserWarning, own, 7) == "warning: slow data\n"
    assert warnings.formatwarning(URL, UserWarning, own, 7).startswith(f"warning: https://{REDACTED}@data")
    assert warnings.formatwarning("old", DeprecationWarning, own, 7) == f"{own}:7: old\n"
    assert warnings.formatwarning("slow", UserWarning, other, 7) == f"{other}:7: slow\n"
    monkeypatch.setenv("LIT_FSDP_DEBUG", "1")
    assert warnings.formatwarning("slow data", UserWarning, own, 7) == f"{own}:7: slow data\n"


def test_errors_in_threads_in_logs_and_nobody_waits_for_tell_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    for place, name in ((sys, "excepthook"), (logging, "_logRecordFactory"), (warnings, "formatwarning")):
        monkeypatch.setattr(place, name, getattr(place, name))  # put back at the end

    def fail() -> None:
        raise OSError(URL)

    class Late:
        def __del__(self) -> None:
            fail()

    redact_logs()
    logger = logging.getLogger("anyone")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stderr)])
    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    Late()
    try:
        fail()
    except OSError:
        logger.exception("no data")
    printed = capsys.readouterr().err
    assert printed.count(f"OSError: https://{REDACTED}@data.example.org") == 3
    assert printed.count("in fail") == 3
    assert "Exception in thread loader:" in printed
    assert not any(secret in printed for secret in SECRETS)


@pytest.mark.full
def test_a_run_from_a_saved_configuration_asks_for_its_credentials(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config=run.yaml"]) == 0
    saved = "--config=runs/run/version_0/config.yaml"
    capfd.readouterr()
    assert main(["fit", saved]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: model.init_args.url: got 'https://{REDACTED}@data.example.org")
    assert line.endswith("give the whole value again, in the file or as an option")
    Path("again.yaml").write_text(yaml.safe_dump({"model": {"init_args": SETTINGS}}))
    assert main(["fit", saved, "--config=again.yaml"]) == 0


ODD = ["", ".", "..", "../../x", "a/../../x", "a//b", "a/", "/tmp/x", "a\0b", "a\nb", " ", "a\\b", "x" * 256]


@pytest.mark.full(after=4)
@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_a_run_name_stays_below_runs(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    Path("name.yaml").write_text(yaml.safe_dump({"run_name": name}))
    before = sorted(folder.parent.rglob("*.*"))
    assert main(["fit", "--config=run.yaml", "--config=name.yaml"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "error: run_name: got '" in line
    assert "a folder below runs: expected one to 255 printable characters" in line
    assert sorted(folder.parent.rglob("*.*")) == before


def test_a_run_name_may_have_sub_folders_and_last_finds_them(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config=run.yaml", "--run_name=sweep/lr-3", "--monitoring=false"]) == 0
    assert (folder / "runs/sweep/lr-3/version_0/config.yaml").is_file()
    capfd.readouterr()
    again = ["--ckpt_path=last", "--trainer.max_steps=3", "--monitoring=false"]
    assert main(["fit", "--config=run.yaml", "--run_name=sweep/lr-3", *again]) == 0
    assert "1 (now at 3)" in capfd.readouterr().out
