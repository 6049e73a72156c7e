"""Attention of packed rows on CUDA: kernels without a mask compute what a mask does, and need less memory."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.tasks.attention import choose_attention, pack_documents
from ranks import run_ranks

pytestmark = pytest.mark.gpu

LENGTHS = (700, 1, 1200, 147)  # of documents
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def run_step(family: str, wanted: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return logits, a gradient, and the most bytes of a step over two rows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, sliding_window=256 if family == "mistral" else None)
    name = wanted if wanted == "flex_attention" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).to("cuda", dtype)
    name = choose_attention(model, wanted, is_packed=True, needs_one_graph=False)  # type: ignore[arg-type]
    ids = torch.randint(64, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.cat([*map(torch.arange, LENGTHS)]).expand(2, -1).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pack_documents({"input_ids": ids, "position_ids": positions}, name) as inputs:
        logits = model(**inputs, use_cache=False).logits.float()
    logits.square().mean().backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    return logits.detach().cpu(), gradient.float().cpu(), torch.cuda.max_memory_allocated() - before


def check_all(family: str) -> None:
    for dtype, tolerance, others in (
        (torch.float32, 1e-5, ["auto"]),
        (torch.bfloat16, 0.05, ["auto", "flex_attention"]),
    ):
        masked = run_step(family, "sdpa", dtype)
        for wanted in others:
            found = run_step(family, wanted, dtype)
            for own, truth in zip(found[:2], masked[:2], strict=True):
                assert float((own - truth).abs().max() / truth.abs().max()) <= tolerance, (dtype, wanted)
            if wanted == "auto":
                assert found[2] < masked[2], (dtype, found[2], masked[2])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_kernels_of_gpus_attend_to_documents_as_a_mask_does(family: str) -> None:
    run_ranks(check_all, family, world_size=1, is_on_gpus=True)
