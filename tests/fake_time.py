"""Time that passes only where a test lets it, so that what is measured with it is exact on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lit_fsdp.sharding.gloo_collectives import GlooReduceScatter


class FakeTime:
    """Stands for the module ``time``, in modules of ours that read the clock: ``patch.setattr(module, "time", fake)``.

    A sleep takes as long as it says, and nothing else takes any time. Sleep for whole seconds: their sums are exact.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now

    def meet_in_collectives(self, patch: pytest.MonkeyPatch, takes_s: float = 0.0) -> None:
        """Let ranks of which each has a fake time wait for each other in collectives, such as those of FSDP2.

        All come out of one that blocks at the same time.

        Args:
            patch: Undoes it.
            takes_s: So long after the last one has come into it.
        """
        reduce = dist.all_reduce

        def make(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                result = call(*args, **kwargs)
                if not kwargs.get("async_op"):
                    now = torch.tensor(self.now, dtype=torch.float64)
                    reduce(now, op=dist.ReduceOp.MAX, group=kwargs.get("group"))
                    self.now = float(now) + takes_s
                return result

            return run

        for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
            patch.setattr(dist, name, make(getattr(dist, name)))
        # Gathers of units as small as those of tests are torch's.
        patch.setattr(GlooReduceScatter, "__call__", make(GlooReduceScatter.__call__))
