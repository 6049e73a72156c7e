"""Rules of the closed form for rotary positions and for dropout, each beside the exact trace."""

from typing import Any

import pytest
from closed_form_models import Model, compare, estimate_lm

from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from ranks import run_ranks

SHARED = {"num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"family": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
PARTS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
RECOMPUTED = {
    "precision": "bf16-true",
    "rows": 2,
    "length": 512,
    "activation_checkpointing": ActivationCheckpointing(mode="full"),
}
ON_GPUS = {"world_size": 2, "precision": "bf16-true", "length": 448, "device_type": "cuda"}

OPT = {"family": "opt", "ffn_dim": 704, "word_embed_proj_dim": 256, "pad_token_id": 0, "dropout": 0.1}

# A model, how its step goes, and whether the test is a quick one.
CASES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    # A part of each head is rotated; GLM's layers repeat cosines and sines for themselves, Ernie's as well.
    ({"family": "glm", "head_dim": 64, **SHARED}, {"length": 384}, True),
    ({"family": "glm4", "head_dim": 64, **SHARED}, RECOMPUTED, False),
    ({"family": "phi3", "rope_parameters": PARTS, "resid_pdrop": 0.1, **SHARED}, ON_GPUS, False),
    ({"family": "phi", "resid_pdrop": 0.1, "pad_token_id": 0}, ON_GPUS, False),
    ({"family": "stablelm", "use_parallel_residual": True, "hidden_dropout": 0.1, **SHARED}, RECOMPUTED, False),
    ({"family": "ernie4_5", **SHARED}, {"length": 512, "precision": "bf16-true"}, False),
    ({"family": "nemotron", **SHARED}, RECOMPUTED, False),
    # Attention that drops: all scores on CPUs, nothing of them on GPUs.
    (GPT2, {"length": 512}, True),
    (GPT2, {"length": 512, "device_type": "cuda"}, True),
    (GPT2, {**RECOMPUTED, "device_type": "cuda"}, False),
    ({**GPT2, "attn_implementation": "eager"}, {"length": 384, "precision": "bf16-true"}, False),
    (
        {"attention_dropout": 0.1, "attn_implementation": "eager", **SHARED},
        {"length": 384, "precision": "bf16-true", "device_type": "cuda"},
        False,
    ),
    # Layers of the MLP are in the block itself; queries are scaled before the kernel, positions are those of each row.
    (OPT, {"rows": 2, "length": 384, "world_size": 2}, True),
    ({**OPT, "mode": "nf4", "tie_word_embeddings": False}, RECOMPUTED, False),
    ({**OPT, "attention_dropout": 0.1}, ON_GPUS, False),
    (
        {**OPT, "attention_dropout": 0.1, "attn_implementation": "eager"},
        {"length": 384, "precision": "bf16-true"},
        False,
    ),
    # Before torch 2.14, no kernel of GPUs shares heads in float32.
    (SHARED, {"length": 512, "device_type": "cuda"}, False),
]

SELECTIVE = {"activation_checkpointing": ActivationCheckpointing(mode="selective"), "precision": "bf16-true"}
FULL_ON_GPUS = {"world_size": 2, "device_type": "cuda"}
WINDOWED = {**SHARED, "num_hidden_layers": 6, "head_dim": 64, "sliding_window": 128}

# Of small vocabularies, so that the peak is in a block and not in the loss.
MASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_hidden_layers": 6, "vocab_size": 16}, {**SELECTIVE, "rows": 2, "length": 512, "masked": "padded"}),
    ({"family": "qwen3", "head_dim": 64, **SHARED}, {**SELECTIVE, **ON_GPUS, "length": 2048, "masked": "packed"}),
    # Documents that are attended to one by one are joined, and no product of the block makes that.
    ({"attn_implementation": "varlen_sdpa", **SHARED}, {**SELECTIVE, "length": 1024, "masked": "packed"}),
    ({"attn_implementation": "varlen_sdpa", **SHARED}, {**SELECTIVE, **ON_GPUS, "length": 1024, "masked": "packed"}),
    # In float32 on GPUs, too, and each document has heads of its own there.
    ({"attn_implementation": "varlen_sdpa", **SHARED}, {"rows": 2, "length": 512, "masked": "packed", **FULL_ON_GPUS}),
    # Of a window alone there is one mask for all rows; of windows and of all tokens there are two.
    ({"family": "mistral", **WINDOWED}, {**SELECTIVE, **ON_GPUS, "rows": 4, "length": 512}),
    ({"family": "mistral", **WINDOWED}, {**RECOMPUTED, "rows": 4}),
    ({"family": "gemma3_text", **WINDOWED}, {**SELECTIVE, **ON_GPUS, "rows": 2, "length": 512, "masked": "padded"}),
    # Without a kernel the mask is of numbers, also where nothing is hidden but what comes later.
    (
        {"family": "gemma2", "attn_implementation": "eager", **WINDOWED},
        {**SELECTIVE, "length": 384, "masked": "packed"},
    ),
    ({**GPT2, "attn_implementation": "eager"}, {**RECOMPUTED, "length": 384}),
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "options"), MASKED, ids=str)
def test_masks_are_kept_once_and_made_again_by_blocks_that_are_recomputed(
    model: dict[str, Any], options: dict[str, Any]
) -> None:
    run_ranks(compare, model, options, 0.005, world_size=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "options"),
    [pytest.param(*case, marks=[] if is_quick else pytest.mark.slow) for *case, is_quick in CASES],
    ids=str,
)
def test_the_peak_is_within_half_a_percent_of_the_exact_trace(model: dict[str, Any], options: dict[str, Any]) -> None:
    run_ranks(compare, model, options, 0.005, world_size=1)


def test_selective_recomputation_keeps_no_mask_in_each_block() -> None:
    deep, shallow = (
        [
            estimate_lm(Model(num_hidden_layers=n, vocab_size=16), length=1024, masked=masked, **SELECTIVE)
            for masked in ("", "packed")
        ]
        for n in (8, 4)
    )
    extra = [masked.peak.num_bytes - plain.peak.num_bytes for plain, masked in (deep, shallow)]
    assert extra[0] == extra[1]
    assert 1024**2 <= extra[0] <= 1024**2 + 1024**2 * 2 + 1024 * 8  # once, once as numbers, and of the batch


def test_attention_that_drops_keeps_its_scores_on_cpus_only() -> None:
    scores = 3 * 4 * 512 * 512 * 4  # of 3 layers with 4 heads, in float32
    model = {"hidden_size": 256, "attention_dropout": 0.1}
    without, on_gpu, on_cpu = (
        estimate_lm(Model(**{**model, "attention_dropout": p}), length=512, device_type=device_type).peak.num_bytes
        for p, device_type in ((0.0, "cuda"), (0.1, "cuda"), (0.1, "cpu"))
    )
    assert on_gpu == without
    assert on_cpu - on_gpu == pytest.approx(3 * scores, rel=0.1)  # before and after some are dropped, and which


def test_grouped_heads_keep_their_scores_in_float32_where_no_kernel_of_gpus_shares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = []
    for is_shared in (True, False):
        monkeypatch.setattr("lit_fsdp.planning.closed_form.attention_reader.SHARES_HEADS_IN_FLOAT32", is_shared)
        peaks.append(estimate_lm(Model(**SHARED), length=512, device_type="cuda").peak.num_bytes)
    assert peaks[1] - peaks[0] > 3 * 4 * 512 * 512 * 4  # of 3 layers with 4 heads


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        # What was left out in silence, or would be.
        ({"family": "mpt", "d_model": 256, "n_heads": 4, "n_layers": 3}, "a MptAttention, which attends by itself"),
        ({**OPT, "word_embed_proj_dim": 128}, r"decoder: project_out \(Linear\) beside its blocks"),
        ({**OPT, "do_layer_norm_before": False}, "0 norms beside its blocks"),
        ({**OPT, "layerdrop": 0.1}, "a dropout layerdrop of 0.1"),
        ({"family": "biogpt"}, "a mask of attention that it makes for every batch"),
    ],
    ids=["alibi", "projections", "norms of sums", "layers", "mask"],
)
def test_what_has_no_rule_is_traced_and_not_left_out(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableModuleError, match=reason):
        estimate_lm(Model(**model))
