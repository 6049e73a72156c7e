"""Random weights of large models in seconds, for what does not depend on their values."""

from __future__ import annotations

from typing import Any


def draw_quickly() -> None:
    """Let normal numbers on a CPU be those of a block of a million, again and again.

    A CPU draws the eight billion of an 8B model in a minute and a half. What a step takes does not depend on them.
    """
    import torch

    draw, size = torch.Tensor.normal_, 2**20
    block = torch.randn(size, generator=torch.Generator().manual_seed(0))

    def normal_(self: Any, mean: float = 0, std: float = 1, *, generator: Any = None) -> Any:
        if self.numel() < size or self.device.type != "cpu" or not self.is_contiguous():
            return draw(self, mean, std, generator=generator)
        scaled = (mean + std * block).to(self.dtype)
        for part in self.view(-1).split(size):
            part.copy_(scaled[: part.numel()])
        return self

    torch.Tensor.normal_ = normal_  # type: ignore[method-assign, assignment]
