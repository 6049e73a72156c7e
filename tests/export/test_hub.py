"""``export --push_to_hub``: what reaches the Hub, and what is refused before the work and after it."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from export_runs import PLAIN, save_base, train
from hub_stand_in import TOKEN, Hub, serve_hub
from launches import run_processes
from models import LANGUAGE_MODELS

from lit_fsdp.checkpoint.reader import StoredCheckpoint
from lit_fsdp.cli.main import main
from lit_fsdp.export.hub import HubPlace, find_place, push_folder
from lit_fsdp.export.model_card import write_model_card
from ranks import run_ranks

pytestmark = pytest.mark.full


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process knows as the only one, and whose token it has."""
    with serve_hub() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # its protocol is not served
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(train, folder, {"config": {"model_type": "llama", **LANGUAGE_MODELS["llama"]}})
    return folder


def test_a_folder_reaches_the_hub_whole_and_private(hub: Hub, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["-m", "lit_fsdp", "export", f"--checkpoint={run / 'last.ckpt'}", f"--out={out}", "--push_to_hub=tiny"]
    environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    (ended,) = run_processes([*command, "--commit_message=the first"], **environ)
    assert ended.code == 0, ended.err
    assert f"pushed      {hub.url}/ada/tiny/commit/c0ffee" in ended.out
    assert ended.err == ""  # no bars in a pipe
    assert TOKEN not in ended.out
    repo = hub.repos["ada/tiny"]
    assert repo["private"] is True
    assert repo["messages"] == ["the first"]
    local = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "export_manifest.json"}
    assert repo["files"] == local
    assert b"# ada/tiny\n" in local["README.md"]


def test_no_weights_of_an_earlier_export_are_left_that_would_be_loaded_instead(
    hub: Hub, run: Path, tmp_path: Path
) -> None:
    def push(name: str, *options: str) -> dict[str, bytes]:
        out = tmp_path / name
        command = ["export", f"--checkpoint={run / 'last.ckpt'}", f"--out={out}", "--push_to_hub=tiny"]
        assert main([*command, *options]) == 0
        return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "export_manifest.json"}

    push("whole")
    files = hub.repos["ada/tiny"]["files"]
    others = {"adapter_config.json": b"{}", "tiny-q8_0.gguf": b"", "notes/model.safetensors": b"of the user"}
    files.update(others)
    sent = push("parts", "--max_shard_gb=1e-5")
    assert "model.safetensors.index.json" in sent  # which Transformers reads where there is no model.safetensors
    del others["adapter_config.json"]  # for whose sake it would load another model
    assert files == sent | others
    assert files == (whole := push("whole again")) | others  # as the parts are gone, too
    # Adapters beside it are loaded by peft, over the base that they name.
    (folder := tmp_path / "adapters").mkdir()
    (folder / "adapter_config.json").write_text("{}")
    push_folder(folder, HubPlace(name="ada/tiny", private=True), "adapters")
    assert files == whole | others | {"adapter_config.json": b"{}"}


def test_what_the_hub_will_refuse_is_refused_before_the_export(
    hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*options: str, code: int = 2) -> str:
        assert main(["export", f"--checkpoint={run / 'last.ckpt'}", f"--out={tmp_path / 'out'}", *options]) == code
        assert not (tmp_path / "out").exists()
        assert hub.repos.keys() <= {"ada/open"}
        (line,) = capsys.readouterr().err.splitlines()
        assert TOKEN not in line
        return line

    assert "private: not used without push_to_hub" in refuse("--private=false")
    assert "commit_message: not used without push_to_hub" in refuse("--commit_message=x")
    assert "push_to_hub: got 'a/b/c': expected a name" in refuse("--push_to_hub=a/b/c")
    assert "'eve/tiny': ada may write below ada, lab, museum" in refuse("--push_to_hub=eve/tiny")
    assert "ada may only read what museum has" in refuse("--push_to_hub=museum/tiny")
    hub.repos["ada/open"] = {"private": False, "files": {}, "messages": []}
    assert "ada/open is there, and public: set private to false" in refuse("--push_to_hub=open")
    hub.user["auth"]["accessToken"]["role"] = "read"
    assert "the token may only read" in refuse("--push_to_hub=tiny")
    hub.broken = "whoami"
    assert "cannot be asked: it answered 507 (storage is full)" in refuse("--push_to_hub=tiny", code=1)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "z" * 32)
    hub.broken = ""
    assert "refused the token: run `hf auth login`" in refuse("--push_to_hub=tiny")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be asked: ConnectError" in refuse("--push_to_hub=tiny", code=1)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token of the Hub: run `hf auth login`, or set HF_TOKEN" in refuse("--push_to_hub=tiny")


def test_a_folder_that_could_not_be_sent_stays_and_the_command_told_sends_it(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ["export", f"--checkpoint={run / 'last.ckpt'}", f"--out={out}", "--push_to_hub=lab/tiny"]
    hub.broken = "/commit/"
    assert main(args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: push_to_hub: {out} is complete, but was not sent: it answered 507 (storage is full)"
    )
    assert (out / "model.safetensors").is_file()
    hub.broken = ""
    retry = shlex.split(line.partition("to try again: ")[2])
    program = shutil.which(retry[0], path=str(Path(sys.executable).parent))
    assert program is not None
    environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run([program, *retry[1:]], env=environ, check=True, capture_output=True)
    repo = hub.repos["lab/tiny"]
    assert repo["private"] is True
    assert repo["files"]["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert "export_manifest.json" not in repo["files"]


def test_the_card_of_adapters_over_a_folder_names_no_base_that_the_hub_would_refuse(hub: Hub, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama")
    run_ranks(train, tmp_path, {"pretrained": str(base), "lora": PLAIN})
    args = ["export", f"--checkpoint={tmp_path / 'last.ckpt'}", f"--out={tmp_path / 'out'}", "--push_to_hub=adapters"]
    assert main(args) == 0
    assert f'from_pretrained("{base}")' in hub.repos["ada/adapters"]["files"]["README.md"].decode()


@pytest.mark.parametrize("is_pushed", [False, True])
def test_the_card_of_a_classifier_finds_its_classes_where_the_adapters_are(
    is_pushed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, str | bytes] = {"config.json": '{"architectures": ["ViTForImageClassification"]}'}
    meta = {"base": {"name": "lab/vit", "fingerprint": "", "quantization": None}}
    nothing: Any = None
    stored = StoredCheckpoint(path=tmp_path / "a" / "b", meta=meta, files=files, metadata=nothing, tensors={})
    monkeypatch.chdir(tmp_path)
    place = tmp_path / ("cache" if is_pushed else "ada/tiny")
    place.mkdir(parents=True)
    (place / "classes.json").write_text('["cat"]')
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: place / name)
    card = write_model_card("ada/tiny", stored, "float32", 1, is_adapter=True, is_pushed=is_pushed)
    lines = card.split("```python\n")[1].split("\n")
    found: dict[str, Any] = {}
    exec("\n".join(line for line in lines if "huggingface_hub" in line or "json" in line), found)
    assert found["classes"] == ["cat"]


def test_public_is_what_was_asked_for(hub: Hub, run: Path, tmp_path: Path) -> None:
    args = ["export", f"--checkpoint={run / 'last.ckpt'}", f"--out={tmp_path / 'out'}", "--push_to_hub=open"]
    assert main([*args, "--private=false"]) == 0
    assert hub.repos["ada/open"]["private"] is False
    assert hub.repos["ada/open"]["messages"] == ["Model of step 3"]
    assert find_place("open", private=False).name == "ada/open"
