"""What encoded rows say."""

from typing import Any

from lit_fsdp.tasks.text.tokens import Encoded


def learned(tokenizer: Any, encoded: Encoded) -> list[str]:
    """The text of each run of learned tokens."""
    runs: list[list[int]] = [[]]
    for token, is_learned in zip(encoded.ids, encoded.learn, strict=True):
        if is_learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]
