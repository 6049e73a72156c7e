"""Parses command lines of ``lit_fsdp`` with the real parsers and stops there: nothing is built, nothing runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

_ENDS = (">", ">>", "<", "|", "&")  # of the words that are a command's own
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def list_blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language on a page of Markdown, in their order."""
    return [text for name, text in _BLOCK.findall(page.read_text()) if name == language]


def list_commands(shell: str) -> list[list[str]]:
    """Return what follows ``python -m lit_fsdp``, or ``-m lit_fsdp`` of a launcher, in each command of a script.

    ``$config`` is ``finetune.yaml``, other variables are 2.
    """
    commands = []
    shell = shell.replace("\\\n", " ").replace('"$@"', "").replace("$config", "finetune.yaml")
    for line in re.sub(r"\$\{[^}]*\}|\$\w+", "2", shell).splitlines():
        for part in line.split(" && ") if "-m lit_fsdp" in line else []:
            words = shlex.split(part, comments=True)
            starts = [i for i, pair in enumerate(pairwise(words)) if pair == ("-m", "lit_fsdp")]
            commands += [list(takewhile(lambda word: word not in _ENDS, words[i + 2 :])) for i in starts[:1]]
    return commands


def find_refusals(commands: Sequence[Sequence[str]], folder: Path) -> dict[str, str]:
    """Parse commands in a folder, all in one new process.

    Returns:
        What was printed for each command that its parser refused.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        input=json.dumps([list(command) for command in commands]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refusals: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return refusals


class _Parsed(BaseException):
    """A command line was read to its end."""


def _parse_all() -> None:
    from lit_fsdp.cli.main import main
    from lit_fsdp.parsing.parser import OneLineParser

    original = OneLineParser.parse_args

    def parse_and_stop(self: OneLineParser, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        raise _Parsed

    OneLineParser.parse_args = parse_and_stop  # type: ignore[method-assign,assignment]
    refusals = {}
    for command in json.load(sys.stdin):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
                code = main(command)
        except _Parsed:
            continue
        if code != 0 or "--help" not in " ".join(command):
            refusals[shlex.join(command)] = printed.getvalue().strip() or f"exit code {code}"
    print(json.dumps(refusals))


if __name__ == "__main__":
    _parse_all()
