"""What must not be told to whoever reads a report, a log or a saved configuration: people share those.

Note [Writing doors]: credentials are left out where a text leaves the process, not where it comes from: reports, model
cards, saved configurations and hyper-parameters, tables, the one line of an error, tracebacks, log records, warnings.
A new door calls ``redact``. No library that we depend on does this; tokens are known by their published shapes.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REDACTED = "(redacted)"
_NAME = r"[^\s/'\"<>|:;,()\[\]{}]+"
_PATH = re.compile(rf"(?:file://|(?<![\w./~-]))/(?:{_NAME}/)+(?:{_NAME})?")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")

# Not every name that ends in token: eos_token is a part of the model.
_WORDS = (
    r"passw(?:or)?d|passphrase|secret|credential|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key|"
    r"(?:auth|access|refresh|session|security|bearer|hf|hub|sas|id)[_-]?token"
)
_IN_CAPITALS = r"(?-i:[A-Z][A-Z0-9_]*_(?:KEY|TOKEN))"  # of the environment
_SECRET_KEY = re.compile(rf"{_WORDS}|passw|authorization|^(?:token|pwd|{_IN_CAPITALS})$", re.IGNORECASE)
_ASSIGNED = rf"(?:[\w-]*(?:{_WORDS})s?|token|pwd|{_IN_CAPITALS})"
_IN_QUERY = rf"(?:[\w.-]*(?:{_WORDS}|token|signature|accesskeyid)|sig|key|auth|pwd)"
_END = r"[^\s\"'<>&;,)\]}`]+"  # a value that no quotes end
# What is kept of a match is its first group.
_SECRETS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # User and password of an address; of the web also a user alone, which may be a token. Elsewhere that is no
        # secret: abfss://container@account.
        r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://)[^\s/?#\"'<>@:]*:[^\s/?#\"'<>]*(?=@)",
        r"((?<![a-z0-9+.-])(?:git\+)?https?://)[^\s/?#\"'<>]+(?=@)",
        rf"([?&;#]{_IN_QUERY}=)(?!\(credential){_END}",
        rf"((?<![\w-]){_ASSIGNED}\s*=\s*[\"']?)(?!None\b|null\b|True\b|False\b|\(credential){_END}",
        rf"([\"']{_ASSIGNED}[\"']\s*:\s*[\"']?)(?!\(credential)(?:(?<=[\"'])[^\"']+|\d+)",
        r"(\b(?:bearer|basic)\s+)(?=[\w.~+/-]*[\d=])[\w.~+/-]{12,}=*",
        r"()-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    )
) + tuple(
    re.compile(rf"()(?<![A-Za-z0-9_-]){shape}(?![A-Za-z0-9])")
    for shape in (
        r"(?:hf|api_org)_[A-Za-z0-9]{20,}",
        r"gh[pousr]_[A-Za-z0-9]{20,}",
        r"github_pat_\w{20,}",
        r"glpat-[\w-]{16,}",
        r"sk-(?=[\w-]*\d)[\w-]{16,}",
        r"(?:AKIA|ASIA)[A-Z0-9]{16}",
        r"AIza[\w-]{35}",
        r"xox[abeprs]-[\w-]{10,}",
        r"wandb_v\d_\w{16,}",
        r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",
    )
)


def redact(value: Any) -> Any:
    """Leave out the credentials in all texts of a value, and the values of keys such as ``password`` or ``api_key``.

    Addresses keep their host and path, so that one sees what was meant. A value may be a text, or dicts, lists and
    dataclasses that hold some; what has no credentials comes back equal.
    """
    return _change_texts(value, _hide_in_text)


def redact_yaml(text: str) -> str:
    """Do so in the values of a YAML text; one without any is returned as it is."""
    import yaml  # late, as the front door needs the rest of this file

    config = yaml.safe_load(text)
    hidden = redact(config)
    return text if hidden == config else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True)


def hide_paths(value: Any) -> Any:
    """Shorten the absolute paths in all texts of a value: to what is below the current folder, else to ``…/name``.

    A value may be a text, or dicts, lists and dataclasses that hold some.
    """
    return _change_texts(value, lambda text, _: _PATH.sub(_shorten_match, text))


def hide_hosts(text: str) -> str:
    """Leave out the name of this machine and numeric addresses, which errors of connections have in them."""
    name = socket.gethostname()
    if len(name) > 3 and name != "localhost":
        text = re.sub(rf"\b{re.escape(name)}\b", "(host)", text)
    return _ADDRESS.sub("(host)", text)


def shorten_path(path: str | Path) -> str:
    """Return a path below the current folder as seen from there, any other as ``…/name``; an address as it is."""
    if "://" in str(path):
        return str(path)
    path = Path(path)
    if not path.is_absolute():
        return str(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else f"…/{path.name}"


def _shorten_match(found: re.Match[str]) -> str:
    return shorten_path(found[0].removeprefix("file://"))


def _hide_in_text(text: str, key: str) -> str:
    """Return a text without credentials; all of it is one if its key says so."""
    if text and _SECRET_KEY.search(key):
        return REDACTED
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<1>{REDACTED}", text)
    return text


def _change_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return a value with all its texts changed; of those in dicts, ``change`` is also told the key."""
    if isinstance(value, str):
        return change(value, key)
    if type(value) is int and key:  # a password may be one
        return value if (changed := change(str(value), key)) == str(value) else changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _change_texts(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {
            _change_texts(name, change): _change_texts(part, change, name if isinstance(name, str) else "")
            for name, part in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_change_texts(part, change, key) for part in value)
    return value
