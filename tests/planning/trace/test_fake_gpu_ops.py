import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_fsdp.planning.trace.fake_gpu_ops import run_as_gpus
from lit_fsdp.sharding.torch_internals import SHARES_HEADS_IN_FLOAT32

LENGTH = 32


def list_saved(
    *, as_gpus: bool, enable_gqa: bool = False, is_recomputed: bool = False
) -> list[tuple[str, tuple[int, ...]]]:
    """Run attention and dropout forward and backward; return dtypes and shapes of what is kept."""
    saved: list[tuple[str, tuple[int, ...]]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((str(tensor.dtype), tuple(tensor.shape)))
        return tensor

    def compute(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = F.scaled_dot_product_attention(q, k, k, None, 0.0 if enable_gqa else 0.1, enable_gqa=enable_gqa)
            return F.dropout(y, 0.1).sum()

    with FakeTensorMode():
        q, k = (torch.empty(1, heads, LENGTH, 16, requires_grad=True) for heads in (4, 2 if enable_gqa else 4))
        if as_gpus:
            with run_as_gpus():
                loss = checkpoint(compute, q, k, use_reentrant=False) if is_recomputed else compute(q, k)
                loss.backward()
        else:
            compute(q, k).backward()
    return saved


def has_scores(saved: list[tuple[str, tuple[int, ...]]]) -> bool:
    return any(shape[-2:] == (LENGTH, LENGTH) for _, shape in saved)


def test_attention_that_drops_keeps_no_scores_and_dropout_keeps_bytes_as_on_gpus() -> None:
    here, there = list_saved(as_gpus=False), list_saved(as_gpus=True)
    assert has_scores(here)
    assert not has_scores(there)
    masks = {dtype for dtype, shape in there if shape == (1, 4, LENGTH, 16)}
    assert "torch.bool" in masks
    assert "torch.bool" not in {dtype for dtype, _ in here}


def test_what_is_computed_again_in_backward_runs_as_on_gpus_too() -> None:
    assert not has_scores(list_saved(as_gpus=True, is_recomputed=True))


@pytest.mark.parametrize("is_shared", [False, True])
def test_heads_that_are_shared_in_float32_keep_their_scores_where_no_kernel_of_gpus_shares_them(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_fsdp.planning.trace.fake_gpu_ops.SHARES_HEADS_IN_FLOAT32", is_shared)
    assert has_scores(list_saved(as_gpus=True, enable_gqa=True)) is not is_shared
    assert not has_scores(list_saved(as_gpus=False, enable_gqa=True))


def test_the_kernel_for_float32_shares_heads_where_it_says_so() -> None:
    q, k = (torch.empty(1, heads, LENGTH, 16, device="meta") for heads in (4, 2))
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    sums, seed = torch.empty(1, 4, LENGTH, device="meta"), torch.empty((), device="meta")
    gradients = backward(q, q, k, k, None, q, sums, seed, seed, 0.0, [True, True, True, False])
    assert (gradients[1].shape == k.shape) is SHARES_HEADS_IN_FLOAT32


def test_functions_of_torch_are_their_own_again_afterwards() -> None:
    before = F.dropout, F.scaled_dot_product_attention
    with run_as_gpus():
        assert F.dropout is not before[0]
        x = torch.ones(4)
        assert F.dropout(x, 0.5, training=False) is x
    assert (F.dropout, F.scaled_dot_product_attention) == before
