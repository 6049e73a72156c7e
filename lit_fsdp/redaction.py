"""What a report must not tell about the machine it was written on: it is something that people share."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LEFT_OUT = "(left out)"
_NAME = r"[^\s/'\"<>|:;,()\[\]{}]+"
_PATH = re.compile(rf"(?:file://|(?<![\w./~-]))/(?:{_NAME}/)+(?:{_NAME})?")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
# Not every name that ends in token: eos_token is a part of the model.
_SECRET = re.compile(r"passw|secret|credential|api_?key|access_?key|(auth|access|hf|hub)_?token|^token$", re.IGNORECASE)


def hide_paths(value: Any) -> Any:
    """Shorten the absolute paths in all texts of a value: to what is below the current folder, else to ``…/name``.

    A value may be a text, or dicts, lists and dataclasses that hold some.
    """
    if isinstance(value, str):
        return _PATH.sub(lambda found: shorten_path(found[0].removeprefix("file://")), value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: hide_paths(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {hide_paths(key): hide_paths(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(hide_paths, value)) if type(value) in (list, tuple) else value
    return value


def hide_secrets(config: Any) -> Any:
    """Leave out the values of keys such as ``password`` or ``api_key``."""
    if isinstance(config, dict):
        return {
            key: LEFT_OUT if isinstance(value, str) and _SECRET.search(str(key)) else hide_secrets(value)
            for key, value in config.items()
        }
    return [hide_secrets(part) for part in config] if isinstance(config, list) else config


def hide_hosts(text: str) -> str:
    """Leave out the name of this machine and numeric addresses, which errors of connections have in them."""
    name = socket.gethostname()
    if len(name) > 3 and name != "localhost":
        text = re.sub(rf"\b{re.escape(name)}\b", "(host)", text)
    return _ADDRESS.sub("(host)", text)


def shorten_path(path: str | Path) -> str:
    """Return a path below the current folder as seen from there, any other as ``…/name``."""
    path = Path(path)
    if not path.is_absolute():
        return str(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else f"…/{path.name}"
