"""The share of tokens in padded batches, with and without ``group_by_length``, of the docstrings in Python's library.

    python benchmarks/length_groups.py --out benchmarks/results/length_groups_DATE.md

Rows are cut at 1,024 tokens of a tokenizer trained on them (vocabulary of 2,000). Nothing is timed.
"""

from __future__ import annotations

import argparse
import ast
import platform
import sysconfig
import warnings
from datetime import date
from pathlib import Path

import numpy as np

from lit_fsdp.tasks import TrainTokenizer
from lit_fsdp.tasks.length_groups import choose_group_size, compute_efficiency
from lit_fsdp.tasks.loading import GlobalSampler
from lit_fsdp.tasks.text.tokenizer import train_tokenizer

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LONGEST = 1024
_SIZES = (4, 8, 16)


def list_docstrings() -> list[str]:
    """Return the docstrings of the library without its tests and packages."""
    root, found = Path(sysconfig.get_path("stdlib")), []
    for path in sorted(root.rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & set(path.relative_to(root).parts):
            continue
        tree = ast.parse(path.read_bytes())
        found += [
            text for node in ast.walk(tree) if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node))
        ]
    return found


def main() -> None:
    """Count and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of old escapes in the library
    texts = list_docstrings()
    ids = train_tokenizer(texts, TrainTokenizer(vocab_size=2000))(texts, verbose=False)["input_ids"]
    lengths = np.array([min(len(row), _LONGEST) for row in ids], dtype=np.int64)
    setting = (
        f"`python benchmarks/length_groups.py`: {len(texts):,} docstrings of the library of Python "
        f"{platform.python_version()}, cut at {_LONGEST:,} tokens (vocabulary of 2,000); the first epoch, "
        "seed 0. Counted, not timed."
    )
    lines = [
        f"# Padding with and without group_by_length, {date.today().isoformat()}",
        "",
        setting,
        "",
        f"| `batch_size` | {' | '.join(map(str, _SIZES))} |",
        "|---" * (len(_SIZES) + 1) + "|",
    ]
    for grouped in (False, True):
        options = {"lengths": lengths, "group_size": choose_group_size(len(lengths))} if grouped else {}
        sampler = GlobalSampler(len(lengths), batch_size=1, shuffle=True, seed=0, drop_last=False, **options)
        order = sampler.draw_order(0).numpy()
        shares = [f"{100 * compute_efficiency(lengths[order], size):.1f} %" for size in _SIZES]
        lines.append(f"| `group_by_length: {str(grouped).lower()}` | {' | '.join(shares)} |")
    page = "\n".join(lines) + "\n"
    print(page)
    if args.out:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
