"""How often ``torch.compile`` compiles in a run, how long that takes, and where compiled code is left."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Literal

import torch

_MAX_NAMED = 10  # steps in a sentence


class CompilationMeter:
    """Counts what ``torch.compile`` makes in this process between ``start`` and ``stop``.

    A function is compiled again when its inputs are other ones than those it was compiled for: another number of
    dimensions, a gradient where there was none, a shape that was fixed before.

    Attributes:
        num_first: How many functions were compiled. Equal blocks are one.
        num_again: How often one of them was compiled once more.
        total_s: Seconds, on the host, for all of this.
    """

    num_first = num_again = 0
    total_s = 0.0

    def __init__(self) -> None:
        self._again_in: list[int] = []  # steps, one for each compilation more
        self._is_over = False
        self._seen: dict[str, set[str]] = {}  # by function, its compilations
        self._before: dict[str, Counter[str]] = {}
        self._began = 0.0
        self._is_on = False

    def start(self) -> None:
        """Begin to count. Imports the compiler, which takes a second or two: only where something is compiled."""
        # Private in name; seen in torch 2.13 to 2.15.
        from torch._dynamo.callback import callback_handler

        self._handler = callback_handler
        self._before = {kind: Counter(torch._dynamo.utils.counters[kind]) for kind in ("graph_break", "unimplemented")}
        self._handler.register_start_callback(self._begin)
        self._handler.register_end_callback(self._end)
        self._is_on = True

    def stop(self) -> None:
        """Count no more."""
        if self._is_on:
            self._is_on = False
            self._handler.remove_start_callback(self._begin)
            self._handler.remove_end_callback(self._end)

    def end_step(self, step: int) -> str | None:
        """Note whether anything was compiled once more in a step; return a warning, once, if no more will be."""
        self._again_in += [step] * (self.num_again - len(self._again_in))
        if self._is_over or not any("recompile limit" in reason for reason in self.list_reasons("unimplemented")):
            return None
        self._is_over = True
        return (
            f"step {step}: a function was compiled as often as compile.recompile_limit allows. For inputs that fit "
            "none of its compilations it now runs uncompiled: set compile.dynamic to true, or the limit higher. "
            "TORCH_LOGS=recompiles says what differs"
        )

    def describe(self) -> tuple[dict[str, Any], list[str]]:
        """Return numbers for a report, and sentences."""
        breaks, steps = self.list_reasons("graph_break"), list(dict.fromkeys(self._again_in))
        numbers = {
            "functions": self.num_first,
            "recompilations": self.num_again,
            "recompiled_in_steps": steps,
            "total_s": self.total_s,
            "graph_breaks": breaks,
            "is_over_limit": self._is_over,
        }
        shown = ", ".join(map(str, steps[:_MAX_NAMED])) + (", ..." if len(steps) > _MAX_NAMED else "")
        again = f", {self.num_again} times more for other inputs (in steps {shown})" if steps else ""
        notes = [f"rank 0 compiled {self.num_first} functions{again}, in {self.total_s:.1f} s"]
        return numbers, notes + [f"compiled code was left, {n} x when it was compiled: {r}" for r, n in breaks.items()]

    def list_reasons(self, kind: Literal["graph_break", "unimplemented"]) -> dict[str, int]:
        """Return the first lines of what torch says since ``start``, and how often.

        ``graph_break``: compiled code is left for Python. ``unimplemented``: a function is not compiled.
        """
        if not self._before:
            return {}
        found = Counter(torch._dynamo.utils.counters[kind]) - self._before[kind]
        return {reason.partition("\n")[0]: num for reason, num in found.items()}

    def _begin(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, what: Any) -> None:
        self.total_s += time.perf_counter() - self._began
        # "4/1" is the second compilation of function 4; its backward, compiled later, has the same name.
        function, _, number = what.compile_id.rpartition("/")
        known = self._seen.setdefault(function, set())
        if number not in known:
            known.add(number)
            self.num_first += len(known) == 1
            self.num_again += len(known) > 1
