import socket
from pathlib import Path

import pytest

from lit_fsdp.redaction import LEFT_OUT, hide_hosts, hide_paths, hide_secrets


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("no /mnt/anna/x/file.bin, or", "no …/file.bin, or"),
        ("'/mnt/anna/x/'", "'…/x'"),
        ("see https://example.org/a/b or 3/4/5 tokens/s", None),
        ("file:///mnt/anna/x.bin", "…/x.bin"),
        ("dirpath:/mnt/anna/x", "dirpath:…/x"),
        ("runs/x/version_0 and ./a/b and ~/a/b", None),
        ("a / b", None),
    ],
)
def test_absolute_paths_become_names_and_nothing_else_changes(text: str, hidden: str | None) -> None:
    expected = text if hidden is None else hidden
    assert hide_paths({"k": [text, (text, 1)]}) == {"k": [expected, (expected, 1)]}


def test_what_lies_below_the_current_folder_is_seen_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hide_paths(f"in {tmp_path}/runs/x.ckpt") == "in runs/x.ckpt"


def test_secrets_go_and_tokens_of_the_model_stay() -> None:
    config = {"logger": [{"api_key": "k", "hf_token": "t"}], "eos_token": "</s>", "token": None, "tokenizer": "x"}
    hidden = {"logger": [{"api_key": LEFT_OUT, "hf_token": LEFT_OUT}], "eos_token": "</s>", "token": None}
    assert hide_secrets(config) == {**hidden, "tokenizer": "x"}


def test_hosts_go_from_errors_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    text = "Connection closed by peer [10.0.12.3]:4711 on gpu-box-7 (torch 2.13.0)"
    assert hide_hosts(text) == "Connection closed by peer [(host)]:4711 on (host) (torch 2.13.0)"
