"""Redaction: what must not reach whoever reads a report, a log or a saved configuration, as people share those.

Note [Writing doors]: credentials are redacted where a text leaves the process, not where it comes from: reports, model
cards, saved configurations and hyper-parameters, tables, the one line of an error, tracebacks, log records, warnings.
A new door calls ``redact``. No library that we depend on does this; tokens are known by their published shapes.

Note [Code in tracebacks]: ``token = self.tokens[i]`` assigns no secret. In lines of source, and with spaces around the
``=``, only a value in quotes is one.
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

# A name says what it holds by its last word: `secret_layers`, `passwd_file`, `num_access_tokens` and `token_id` hold no
# secrets, and neither does every name that ends in token: eos_token is a part of the model. ``val/pass`` is a metric.
_WORD = r"(?:(?<![a-z0-9])|(?-i:(?<=[a-z0-9])(?=[A-Z])))"  # where one begins, also inside of camelCase
_PASSWORD = rf"passw(?:or)?ds?|passphrase|passcode|{_WORD}(?:(?-i:[Pp]wd|[Pp]w)|(?<![a-z0-9_/])(?<!\w-)(?:pass|pin))"
_CREDENTIAL = (
    rf"(?:{_WORD}|client)secrets?|{_WORD}credentials?|{_WORD}authorization|api[_-]?keys?|"
    rf"{_WORD}(?:access|account|private|secret|auth|signing|encryption)[_-]?keys?(?:[_-]?id)?|"
    rf"{_WORD}(?:auth|access|refresh|session|security|bearer|hf|hub|sas|id|api|private|deploy|service)[_-]?token|"
    r"(?<![a-z0-9_])(?<!\w-)token"
)
_OF_ENVIRONMENT = r"(?-i:(?<![A-Za-z0-9_.-])[A-Z][A-Z0-9_]*_(?:KEY|TOKEN))"
_SECRET_KEY = re.compile(rf"(?:{_PASSWORD}|{_CREDENTIAL}|{_OF_ENVIRONMENT})$", re.IGNORECASE)
_PASSWORD_KEY = re.compile(rf"(?:{_PASSWORD})$", re.IGNORECASE)
_ASSIGNED = rf"(?<![\w.-])(?:[\w.-]*(?:{_PASSWORD}|{_CREDENTIAL})|{_OF_ENVIRONMENT})"
_PASSWORD_ASSIGNED = rf"(?<![\w.-])[\w.-]*(?:{_PASSWORD})"
_IN_QUERY = rf"(?:[\w.-]*(?:{_CREDENTIAL}|{_PASSWORD}|token|signature|accesskeyid)|sig|key|auth|pwd)"
_NOT_REDACTED = r"(?!\(redacted)"
_END = r"[^\s\"'<>&;,)\]}`]+"  # a value that no quotes end
_QUOTED = rf"[rbfu]{{0,2}}(?P<quote>\\*[\"'])){_NOT_REDACTED}(?:(?!(?P=quote))(?:\\.|[^\\\n]))+"
_ODD = r"(?=\S*\d|\S{16})(?=\S{4})"  # no word of a sentence: `password: missing`
_NO_NUMBER = r"(?!\d+(?:\.\d+)?(?![\w.+/-]))"


def _ignore_case(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)


# Most texts have nothing of the kind. What each pattern of a group has in it is looked for first, as that is quick.
_WORDS = re.compile("pass|pw|pin|secret|credential|auth|key|token|sig|bearer", re.IGNORECASE)
# What is kept of a match is its first group.
_IN_CODE = (
    (
        re.compile("://"),
        _ignore_case(
            # User and password of an address, up to the last @: a password may hold any of /?#@. Of the web also a
            # user alone, which may be a token; elsewhere that is no secret: abfss://container@account. A port is no
            # password, and after the @ of an image follows its digest.
            r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://)[^\s/?#\"'<>@:]*:(?!\d{1,5}[/?#])(?:(?!://)[^\s\"'<>])*(?=@(?!sha256:))",
            r"((?<![a-z0-9+.-])(?:git\+)?https?://)[^\s/?#\"'<>]+(?=@)",
        ),
    ),
    (
        _WORDS,
        _ignore_case(
            rf"([?&;#]{_IN_QUERY}=){_NOT_REDACTED}{_END}",
            rf"({_ASSIGNED}(?:\s*=\s*|\\*[\"']?\s*:\s*){_QUOTED}",
            rf"(\\*[\"']{_PASSWORD_ASSIGNED}\\*[\"']\s*:\s*)\d[\d.]*",
            rf"(\bauthorization\\*[\"']?\s*[:=]\s*[\\\"']*(?:bearer|basic|token|digest|apikey)\s+){_NOT_REDACTED}{_END}",
            r"(\b(?-i:Bearer)\s+)(?=[\w.~+/-]*\d)[\w.~+/-]{16,}=*",
            r"()-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        ),
    ),
    (
        re.compile("hooks", re.IGNORECASE),
        _ignore_case(
            r"(\bhooks\.slack\.com/(?:services|workflows)/)[\w/-]+",
            r"(\bdiscord(?:app)?\.com/api/webhooks/)[\w/-]+",
        ),
    ),
)
_TOKEN = re.compile(
    r"""
    (?<![A-Za-z0-9])(?:
        (?:hf|api_org)_(?:[A-Za-z0-9]{30,}|oauth_[\w.-]{16,})
        | gh[pousr]_[A-Za-z0-9]{20,}
        | github_pat_\w{20,}
        | glpat-[\w-]{16,}
        | sk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}\w{16})[\w-]+
        | (?:AKIA|ASIA)[A-Z0-9]{16}
        | AIza[\w-]{35}
        | ya29\.[\w-]{20,}
        | nvapi-[\w-]{20,}
        | dapi[0-9a-f]{32}(?:-\d)?
        | xox[abeprs]-[\w-]{10,}
        | wandb_v\d_\w{16,}
        | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*
        | eyJhcGlf[\w+/-]{20,}=*  # of Neptune
    )(?![A-Za-z0-9])
    """,
    re.VERBOSE,
)
_IN_PROSE = _ignore_case(
    rf"({_PASSWORD_ASSIGNED}=)(?!None\b|null\b|True\b|False\b){_NOT_REDACTED}{_END}",
    rf"({_ASSIGNED}=)(?!None\b|null\b|True\b|False\b){_NOT_REDACTED}{_NO_NUMBER}{_END}",
    rf"({_PASSWORD_ASSIGNED}:\s+){_NOT_REDACTED}{_ODD}{_END}",
    rf"({_ASSIGNED}:\s+){_NOT_REDACTED}{_ODD}{_NO_NUMBER}{_END}",
    rf"((?=--?\w){_ASSIGNED}\s+)(?!-){_NOT_REDACTED}{_ODD}{_END}",
)
# Of a traceback, also of one in a group of exceptions: the lines of source are indented below where they are.
_SOURCE = re.compile(r"^(?P<indent>[ |+]*)File \"[^\"\n]*\", line \d+.*(?P<code>(?:\n(?P=indent)  .*)+)", re.MULTILINE)


def redact(value: Any) -> Any:
    """Replace the credentials in all texts of a value, and the values of keys such as ``password`` or ``api_key``.

    Addresses keep their host and path, so that one sees what was meant. A value may be a text, or dicts, lists, sets
    and dataclasses that hold some; what has no credentials comes back equal. Below the key of a secret only the
    names of parts are kept. A number that is the value itself is a secret of a password or a pin alone.
    """
    return _change_texts(value, _redact_text, _redact_below)


def redact_yaml(text: str) -> str:
    """Do so in the values of a YAML text; one without any is returned as it is."""
    import yaml  # late, as the front door needs the rest of this file

    config = yaml.safe_load(text)
    redacted = redact(config)
    return text if redacted == config else yaml.safe_dump(redacted, sort_keys=False, allow_unicode=True)


def hide_paths(value: Any) -> Any:
    """Shorten the absolute paths in all texts of a value: to what is below the current folder, else to ``…/name``.

    A value may be a text, or dicts, lists and dataclasses that hold some.
    """
    return _change_texts(value, lambda text: _PATH.sub(_shorten_match, text))


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


def _redact_text(text: str) -> str:
    for hint, patterns in _IN_CODE:
        for pattern in patterns if hint.search(text) else ():
            text = pattern.sub(rf"\g<1>{REDACTED}", text)
    text = _TOKEN.sub(REDACTED, text)
    if not _WORDS.search(text):
        return text
    parts, end = [], 0
    for found in _SOURCE.finditer(text):  # see Note [Code in tracebacks]
        parts += [_redact_prose(text[end : found.start("code")]), found["code"]]
        end = found.end()
    return "".join([*parts, _redact_prose(text[end:])])


def _redact_prose(text: str) -> str:
    for pattern in _IN_PROSE:
        text = pattern.sub(rf"\g<1>{REDACTED}", text)
    return text


def _redact_below(key: str, value: Any) -> Any:
    """Return the value of a key, redacted if its key says so."""
    if not _SECRET_KEY.search(key):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and not _PASSWORD_KEY.search(key) else _redact_all(value)


def _redact_all(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value in ("", b""):
        return value
    if isinstance(value, Mapping):
        return {name: _redact_all(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact_all(part) for part in value]
    return REDACTED


def _change_texts(
    value: Any, change: Callable[[str], str], below: Callable[[str, Any], Any] = lambda _, part: part
) -> Any:
    """Return a value with all its texts changed.

    ``below`` first sees each key of a dict, dataclass or named tuple, and its value.
    """
    if isinstance(value, str):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        parts = {name: _change_texts(below(name, part), change, below) for name, part in fields.items()}
        return dataclasses.replace(value, **parts)
    names = getattr(type(value), "__match_args__", ()) if isinstance(value, tuple) else ()
    if names and not hasattr(type(value), "n_sequence_fields"):  # a named tuple, none such as time.struct_time
        fields = dict(zip(names, value, strict=True))
        return type(value)(*(_change_texts(below(name, part), change, below) for name, part in fields.items()))
    if isinstance(value, Mapping):
        return {
            _change_texts(name, change, below): _change_texts(
                below(name, part) if isinstance(name, str) else part, change, below
            )
            for name, part in value.items()
        }
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_change_texts(part, change, below) for part in value)
    return value
