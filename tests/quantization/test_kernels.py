"""What importing bitsandbytes costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lit_fsdp.quantization.kernels import compile_later


def test_functions_that_are_decorated_meanwhile_compile_once_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[Any, dict[str, Any]]] = []

    def compile_now(model: Any, **options: Any) -> Any:
        compiled.append((model, options))
        return model if isinstance(model, nn.Module) else lambda *args: ("compiled", model(*args))

    monkeypatch.setattr(torch, "compile", compile_now)
    with compile_later():

        @torch.compile(dynamic=False)
        def double(x: int) -> int:
            return 2 * x

        triple: Callable[[int], Any] = torch.compile(lambda x: 3 * x)
        layer = nn.Linear(1, 1)
        assert torch.compile(layer, mode="default") is layer  # which has parameters that others ask it for
    assert torch.compile is compile_now
    assert compiled == [(layer, {"mode": "default"})]
    assert [double(2), double(3), triple(4)] == [("compiled", 4), ("compiled", 6), ("compiled", 12)]
    assert double.__name__ == "double"
    assert [options for _, options in compiled[1:]] == [{"dynamic": False}, {}]
    with pytest.raises(ImportError, match="a package"), compile_later():
        raise ImportError("a package")
    assert torch.compile is compile_now
