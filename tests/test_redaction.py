import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from lit_fsdp.redaction import REDACTED, hide_hosts, hide_paths, redact, redact_yaml
from lit_fsdp.reporting.report_files import draw_section
from lit_fsdp.reporting.run_facts import describe_end
from lit_fsdp.reporting.sections import Section, Table, print_table


@pytest.mark.parametrize(
    ("text", "redacted"),
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
def test_absolute_paths_become_names_and_nothing_else_changes(text: str, redacted: str | None) -> None:
    expected = text if redacted is None else redacted
    assert hide_paths({"k": [text, (text, 1)]}) == {"k": [expected, (expected, 1)]}


def test_what_lies_below_the_current_folder_is_seen_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hide_paths(f"in {tmp_path}/runs/x.ckpt") == "in runs/x.ckpt"


def test_secrets_go_and_tokens_of_the_model_stay() -> None:
    config = {"logger": [{"api_key": "k", "hf_token": "t"}], "eos_token": "</s>", "token": None, "tokenizer": "x"}
    redacted = {"logger": [{"api_key": REDACTED, "hf_token": REDACTED}], "eos_token": "</s>", "token": None}
    assert redact(config) == {**redacted, "tokenizer": "x"}


def test_hosts_go_from_errors_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    text = "Connection closed by peer [10.0.12.3]:4711 on gpu-box-7 (torch 2.13.0)"
    assert hide_hosts(text) == "Connection closed by peer [(host)]:4711 on (host) (torch 2.13.0)"


X = REDACTED
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        # addresses
        ("https://anna:pw@host:80/a?b=1", f"https://{X}@host:80/a?b=1"),
        ("cannot open 's3://key:p@ss@bucket/a', twice", f"cannot open 's3://{X}@bucket/a', twice"),
        ("git+https://ghtoken@github.com/a", f"git+https://{X}@github.com/a"),
        ("https://h/a?token=t&n=3#access_token=u", f"https://h/a?token={X}&n=3#access_token={X}"),
        ("https://h/a?X-Amz-Credential=c&X-Amz-Signature=s", f"https://h/a?X-Amz-Credential={X}&X-Amz-Signature={X}"),
        ("<a href='https://h/?sv=1&amp;sig=s%2F'>", f"<a href='https://h/?sv=1&amp;sig={X}'>"),
        # names with values
        ("WANDB_API_KEY=0a1b2c, PATH=/bin", f"WANDB_API_KEY={X}, PATH=/bin"),
        ("--data.password='a b'", f"--data.password='{X}'"),
        ("{'api_key': 'a b', 'n': 1}", f"{{'api_key': '{X}', 'n': 1}}"),
        ("{'password': 4711, 'port': 4711}", f"{{'password': {X}, 'port': 4711}}"),
        ('{"secret": "a"}', f'{{"secret": "{X}"}}'),
        ("Authorization: Bearer abcdefghijkl123", f"Authorization: Bearer {X}"),
        # shapes
        *((f"got {token}, no", f"got {X}, no") for token in (
            "hf_" + "aB1" * 11, "ghp_" + "aB1" * 12, "github_pat_11ABC_" + "a1" * 15, "glpat-" + "aB1-" * 5,
            "sk-proj-" + "aB1_" * 9, "sk-ant-api03-" + "aB1-" + "aB1" * 9, "AKIAIOSFODNN7EXAMPLE", "AIza" + "aB1_-" * 7,
            "xoxb-12345-abcde", "wandb_v1_" + "a1" * 20, JWT, PEM, "hf_oauth_" + "aB1" * 9, "dapi" + "0123abcd" * 4,
            "nvapi-" + "aB1-" * 9, "ya29." + "aB1-" * 9, "eyJhcGlfYWRkcmVzcyI6Imh0dHBz" + "aB1" * 9,
        )),
        (f"tok-hf_{'aB1' * 11}", f"tok-{X}"),
        ("https://hooks.slack.com/services/T0/B0/XXX", f"https://hooks.slack.com/services/{X}"),
        ("https://discord.com/api/webhooks/12/ab-c_d", f"https://discord.com/api/webhooks/{X}"),
        # a password up to the last @, whatever is in it
        ("s3://AKIA123:wJalr/K7+x@bucket/a", f"s3://{X}@bucket/a"),
        ("'https://u:p/w#x?y@h/a' failed", f"'https://{X}@h/a' failed"),
        # values with spaces and the other quote end at their own
        ("password=\"hunter 'n' 2\", n=1", f'password="{X}", n=1'),
        (r'{\"password\": \"a b\"}', rf'{{\"password\": \"{X}\"}}'),
        # headers, YAML and options
        ("password: hunter2", f"password: {X}"),
        ("aws_secret_access_key: wJalrXUtnFEMI/K7MDENG+bPx", f"aws_secret_access_key: {X}"),
        ("X-Api-Key: abcd1234", f"X-Api-Key: {X}"),
        ("Authorization: token abcdef", f"Authorization: token {X}"),
        ("Authorization: Bearer abcdef", f"Authorization: Bearer {X}"),
        ("x --password hunter2 --n 1", f"x --password {X} --n 1"),
        ("AccountName=a;AccountKey=ab1==;clientSecret=b", f"AccountName=a;AccountKey={X};clientSecret={X}"),
        # what is none
        *((text, text) for text in (
            "abfss://box@account.dfs.core.windows.net/a", "ssh://git@github.com/a", "tcp://localhost:29500/a@b",
            "eos_token='</s>'", "max_tokens=5", "https://h/?max_tokens=5", "token: expected a value", "api_key=None",
            "task-scheduler-long-name-1", "commit 0a1b2c3d4e5f60718293a4b5c6d7e8f901234567", "hf_home", "AKIA",
            "basic understanding", "https://huggingface.co/a/b?download=true", "password: missing",
            "docker://a:b@sha256:0123456789abcdef", "oci://reg:5000/x/y@v1", "basic modeling_utils1",
            "sk-SK-bratislava-2024-data", "hf_hubdownloadedmodel2024test", "api_key: Optional[str] = None",
            # other words
            "valid_tokens=51 grid_token=52 invalid_token_id=53", "image_id_tokens: 12345", "num_access_tokens: 12345",
            "secretary=anna2 secret_layers=12 passwd_file=/etc/x1", "PWD=/home/x1", "hub_token_count: 12345",
            # metrics
            "val/pass: 0.25", "test/pin=0.9375", '{"val/pass": 0.25}',
            # code
            "token = self.tokens[idx]", "pwd = os.getcwd()", "PRIMARY_KEY=7",
        )),
    ],
)  # fmt: skip
def test_credentials_go_from_texts_and_the_rest_stays(text: str, redacted: str) -> None:
    assert redact({"k": [text, (text, 1)]}) == {"k": [redacted, (redacted, 1)]}
    assert redact(redacted) == redacted


KEYS = ("password", "pin", "apiKey", "hf_token", "AWS_SECRET_ACCESS_KEY", "clientsecret", "pass", "pw", "X-Api-Key")
OTHER_KEYS = (
    "secretary",
    "secret_layers",
    "passwd_file",
    "valid_tokens",
    "grid_token",
    "invalid_token_id",
    "eos_token",
    "val/pass",
    "test/pin",
)


@pytest.mark.parametrize("key", KEYS)
def test_all_below_the_key_of_a_secret_is_redacted(key: str) -> None:
    value = {"a": {"b": 1.5}, "c": [b"x", {"y"}], "d": None, "e": True}
    assert redact({key: value}) == {key: {"a": {"b": X}, "c": [X, [X]], "d": None, "e": True}}
    assert redact({key: 4711})[key] == (X if key in ("password", "pin", "pass", "pw") else 4711)


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_keys_with_other_words_keep_their_values(key: str) -> None:
    for value in (3, 0.5, "text", ["a"], {"b": 1}):
        assert redact({key: value}) == {key: value}


@dataclass(frozen=True)
class Login:
    user: str
    password: str
    num_tries: int = 3


class Pair(NamedTuple):
    url: str
    api_key: str


def test_fields_of_dataclasses_and_named_tuples_are_keys_too() -> None:
    assert redact([Login("anna", "x"), Pair("https://u:p@h/a", "x")]) == [
        Login("anna", REDACTED),
        Pair(f"https://{REDACTED}@h/a", REDACTED),
    ]


def fail_with(token: str) -> None:
    tokens = [token]
    token=tokens[0]; raise OSError(f"password={token}")  # fmt: skip  # noqa: E702


def test_the_code_of_a_traceback_stays_and_its_secrets_go() -> None:
    for kind in (OSError, ExceptionGroup):
        try:
            try:
                fail_with("hunter2")
            except OSError as error:
                raise (error if kind is OSError else ExceptionGroup("several", [error])) from None
        except (OSError, ExceptionGroup) as error:
            text = redact("".join(traceback.format_exception(error)))
        assert "    token=tokens[0]; raise OSError(" in text
        assert f"OSError: password={X}" in text
        assert "hunter2\n" not in text


def test_a_long_text_takes_no_longer_by_its_square() -> None:
    for text in (
        "a" * 60_000,
        "a-" * 30_000,
        "a." * 30_000,
        "x://a:b" * 9_000,
        "https://" * 9_000,
        "token=" * 9_000,
        "sk-" * 20_000,
    ):
        begin = time.perf_counter()
        redact(text)
        assert time.perf_counter() - begin < 5


def test_a_configuration_without_credentials_keeps_its_bytes() -> None:
    text = "a:   {b: 1, c: .nan}  # kept\nd: 'x'\n"
    assert redact_yaml(text) == text
    redacted = redact_yaml(text + "token: abc\ndata: {password: 123, url: Größe}\n")
    assert yaml.safe_load(redacted)["data"] == {"password": REDACTED, "url": "Größe"}
    assert yaml.safe_load(redacted)["token"] == REDACTED


def test_tables_in_the_terminal_tell_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table(title="Run", columns=(), rows=[("last checkpoint", "s3://key:hunter2@bucket/run.ckpt")]))
    printed = capsys.readouterr().out
    assert "@bucket/run.ckpt" in printed
    assert "hunter2" not in printed


def test_sections_of_a_report_tell_no_credentials(tmp_path: Path) -> None:
    table = Table(title="", columns=("file",), rows=[("https://anna:hunter2@host/a",)])
    section = Section(title="Data", name="data", numbers={"api_key": "hunter2"}, tables=[table], notes=["pwd=hunter2"])
    part = draw_section(section, tmp_path, code="url: https://anna:hunter2@host/a")
    assert "hunter2" not in str(part)
    assert part.code == f"url: https://{X}@host/a"


def test_a_credential_at_which_a_long_error_is_cut_is_not_told_in_part() -> None:
    text = "x" * 1470 + " https://anna:hunter2hunter2hunter2@host"
    assert "hunter2" not in describe_end(OSError(text), "at step 1")[1]
