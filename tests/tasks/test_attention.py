"""Packed rows attend without a mask as they do with one, on every way there is; and what cannot is refused."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from models import LANGUAGE_MODELS, build_language_model
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from training import Recorder, Result, build_task, build_trainer, collate, gather_weights, list_differences
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_fsdp import ActivationCheckpointing, Compile, FSDP2Strategy
from lit_fsdp.errors import ConfigError
from lit_fsdp.planning.planned_step import PlannedGpu, PlannedTrainer, prepare_step
from lit_fsdp.planning.trace.apart import run_apart
from lit_fsdp.planning.trace.exact_trace import trace_step
from lit_fsdp.tasks import CausalLM, LoRA, Quantization, TextData, attention
from lit_fsdp.tasks.attention import DocumentMask, choose_attention, pack_documents
from lit_fsdp.tasks.loading import build_train_loader
from lit_fsdp.tasks.text.batches import add_document_lengths, list_document_lengths
from lit_fsdp.tasks.text_model import check_packing
from ranks import run_ranks

TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-6
LENGTHS = ((7, 1, 12, 4), (1, 23))  # of documents; two are longer than a window
WINDOW = 5
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, **_LAYERS},
    # Its soft caps are no kernel's.
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make_inputs() -> dict[str, Any]:
    """Return ``input_ids`` and ``position_ids`` [2, 24]."""
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": torch.stack([torch.cat([*map(torch.arange, row)]) for row in LENGTHS])}


def build(family: str, wanted: Any = "auto") -> tuple[Any, str]:
    """Return a model with the same weights each time, and the name of its attention."""
    torch.manual_seed(0)
    sizes = LANGUAGE_MODELS.get(family, LANGUAGE_MODELS["llama"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]}))
    return model.train(), choose_attention(model, wanted, is_packed=True, needs_one_graph=False)


def compute(model: Any, name: str, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [rows, length, vocabulary], and gradients of a loss that all of them are in."""
    model.zero_grad()
    with pack_documents(inputs, name) as packed:
        logits = model(**packed, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measure_difference(own: Tensor, truth: Tensor) -> float:
    """Return how far numbers are apart, in parts of the largest."""
    return float(((own - truth).abs().max() / truth.abs().max()).detach())


@contextmanager
def kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Let ``varlen_attn`` run here, as its documentation says what it computes; yield the windows of its calls."""
    windows: list[tuple[int, int]] = []

    def run(*states: Tensor, scale: float | None, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
        query, key, value, starts, _, longest, _ = states
        (left, right), parts = window_size, []
        windows.append(window_size)
        assert longest == int(starts.diff().max())
        for begin, end in pairwise(starts.tolist()):
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = (distance >= -right) & ((distance <= left) | (left < 0))
            own: Any = [values[begin:end].transpose(0, 1)[None] for values in (query, key, value)]
            part = functional.scaled_dot_product_attention(*own, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", run)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    yield windows


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_attend_as_with_a_mask_and_as_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs()
    masked, truth = compute(build(family, "eager" if family == "gemma2" else "sdpa")[0], "", inputs)
    model, name = build(family)
    assert name == ("varlen_eager" if family == "gemma2" else "varlen_sdpa")
    ways = {"in turn": compute(model, name, inputs)}
    if family != "gemma2":
        with kernel_on_cpu(monkeypatch) as windows:
            ways["at once"] = compute(model, name, inputs)
        expected = {"mistral": {(WINDOW - 1, 0)}, "gemma3_text": {(WINDOW - 1, 0), (-1, 0)}}
        assert set(windows) == expected.get(family, {(-1, 0)})
    for way, (logits, gradients) in ways.items():
        assert measure_difference(logits, masked) <= TOLERANCE, way
        worst = {key: measure_difference(gradients[key], truth[key]) for key in truth if truth[key].abs().max() > 1e-5}
        assert find_largest(worst.values()) <= GRADIENT_TOLERANCE, (way, worst)
    alone = model(input_ids=inputs["input_ids"][:1, 8:20], use_cache=False).logits
    assert measure_difference(ways["in turn"][0][:1, 8:20], alone) <= TOLERANCE


@pytest.mark.parametrize("is_at_once", [False, True], ids=["in turn", "at once"])
def test_a_document_is_the_same_to_the_last_bit_whatever_its_neighbours_are(
    is_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs()
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, :8] = 9
    for family in ("llama", "gemma3_text", *(() if is_at_once else ("gemma2",))):
        model, name = build(family)
        with kernel_on_cpu(monkeypatch) if is_at_once else nullcontext():
            first, second = (compute(model, name, batch)[0] for batch in (inputs, other))
        assert not first[0, :8].equal(second[0, :8])
        assert first[0, 8:].equal(second[0, 8:])
        assert first[1].equal(second[1])


def run_flash(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend as the flash packages do with what Transformers hands them: by the starts of documents alone."""
    assert mask is None
    starts = options["cu_seq_lens_q"]
    assert starts.equal(options["cu_seq_lens_k"])
    assert starts.dtype == torch.int32
    assert options["max_length_q"] == options["max_length_k"] == int(starts.diff().max())
    window, groups = options.get("sliding_window"), query.shape[1] // key.shape[1]
    states = [query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)]
    tokens = [values.transpose(1, 2).flatten(0, 1) for values in states]
    parts = []
    for begin, end in pairwise(starts.tolist()):
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = (distance >= 0) & (distance < (window or end))
        own: Any = [values[begin:end].transpose(0, 1)[None] for values in tokens]
        part = functional.scaled_dot_product_attention(*own, attn_mask=seen, scale=options["scaling"])
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts).unflatten(0, (len(query), -1)), None


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_flash_packages_are_told_where_documents_begin(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs()
    masked, truth = compute(build(family, "sdpa")[0], "", inputs)
    model, _ = build(family, "sdpa")
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, run_flash)
        monkeypatch.setattr(model.config, "_attn_implementation_internal", name)
        logits, gradients = compute(model, name, inputs)
        assert measure_difference(logits, masked) <= TOLERANCE
        worst = {key: measure_difference(gradients[key], truth[key]) for key in truth if truth[key].abs().max() > 1e-5}
        assert find_largest(worst.values()) <= GRADIENT_TOLERANCE, (name, worst)


def test_no_mask_of_the_row_is_made_and_generation_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, make = list[Any](), attention.make_document_mask

    def watch(*args: Any) -> DocumentMask:
        seen.append(make(*args))
        return seen[-1]

    model, name = build("mistral")
    monkeypatch.setattr(attention, "make_document_mask", watch)
    compute(model, name, make_inputs())
    assert len(seen) == 1  # for all layers
    assert isinstance(seen[0], DocumentMask)
    assert (seen[0].lengths, seen[0].window, seen[0].max_length) == (LENGTHS, WINDOW, 23)
    assert seen[0].cu_seq_lens.tolist() == [0, 7, 8, 20, 24, 25, 48]
    padded = {"input_ids": make_inputs()["input_ids"], "attention_mask": (torch.arange(24) > 3).long().expand(2, 24)}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    first, second = (m.eval().generate(**padded, **options) for m in (model, build("mistral", "sdpa")[0]))
    assert first.equal(second)
    assert len(seen) == 1


@pytest.mark.parametrize("wanted", ["varlen", "sdpa"])
@pytest.mark.parametrize("lengths", [LENGTHS, ((24,), (24,))], ids=["packed", "whole"])
def test_a_forward_asks_no_gpu_whether_rows_are_packed_where_the_batch_says_so(
    wanted: str, lengths: tuple[tuple[int, ...], ...]
) -> None:
    model, name = build("llama", wanted)
    positions = torch.stack([torch.cat([*map(torch.arange, row)]) for row in lengths])
    inputs = {**make_inputs(), "position_ids": positions}
    expected = compute(model, name, inputs)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        found = compute(model, name, add_document_lengths(inputs))
    begin = next(event.time_range.end for event in profiler.events() if event.name == "aten::embedding")
    after = {event.name for event in profiler.events() if event.time_range.start > begin}
    assert {"aten::linear", "MmBackward0"} <= after
    assert after.isdisjoint({"aten::is_nonzero", "aten::item", "aten::_local_scalar_dense", "aten::nonzero"})
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][key], expected[1][key]) for key in expected[1])
    own = find_packed_sequence_indices(positions)  # other positions than those of the batch are looked at
    with pack_documents(add_document_lengths(make_inputs()), name):
        other = masking_utils.find_packed_sequence_indices(positions)
    assert (own is None) == (other is None)


_HYBRID = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
_HYBRID |= {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 3 + ["conv"], "vocab_size": 96}
_EXPERTS = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_EXPERTS |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 96}


@pytest.mark.parametrize(
    ("family", "sizes", "rounding", "leaks"),
    [
        ("lfm2", _HYBRID, 0.0, True),  # a convolution passes on less than what rounding in 16 bits may come to
        ("qwen3_moe", _EXPERTS, 0.0, False),
        ("qwen3_moe", _EXPERTS, 0.03, False),  # where experts round otherwise beside other tokens, in all rows
    ],
)
def test_documents_that_see_each_other_are_told_from_rounding_in_16_bits(
    family: str, sizes: dict[str, Any], rounding: float, leaks: bool
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16).eval()
    chosen = choose_attention(model, "auto", is_packed=True, needs_one_graph=False)

    def compute_logits(**inputs: Tensor) -> Tensor:
        with pack_documents(inputs, chosen) as packed:
            logits: Tensor = model(**packed, use_cache=False).logits
        return logits + rounding * logits.std() * torch.randn_like(logits).clamp(-1, 1)

    with pytest.raises(ValueError, match="see each other") if leaks else nullcontext():
        check_packing(compute_logits, sizes["vocab_size"], torch.device("cpu"), family)


def test_ranks_that_round_apart_judge_packed_rows_alike() -> None:
    def body() -> None:
        def compute_logits(input_ids: Tensor, **_: Tensor) -> Tensor:
            logits = functional.one_hot(input_ids, 8).float()
            return logits + dist.get_rank() * logits.cumsum(1)  # only on the second rank one document sees another

        check_packing(compute_logits, 8, torch.device("cpu"), "model")

    run_ranks(body)


def test_lengths_of_documents_are_where_positions_begin_again() -> None:
    positions = make_inputs()["position_ids"]
    assert list_document_lengths(positions) == LENGTHS
    assert list_document_lengths(positions[:, 2:10]) == ((5, 1, 2), (8,))  # rows may begin in the middle
    data = TextData(train="pydoc", tokenizer="none")
    data.trainer = SimpleNamespace(lightning_module=CausalLM(config={"model_type": "llama"}))  # type: ignore[assignment]
    assert data.on_before_batch_transfer(make_inputs(), 0)["document_lengths"] == LENGTHS
    data.trainer = SimpleNamespace(lightning_module=torch.nn.Module())  # type: ignore[assignment]  # of a user
    assert "document_lengths" not in data.on_before_batch_transfer(make_inputs(), 0)


def attend(queries: Tensor, values: Tensor, lengths: tuple[int, ...] = (3, 5)) -> Tensor:
    """Attend to the documents of a row, and return [1, length, heads, width]."""
    mask = attention.make_document_mask((lengths,), None, torch.device("cpu"))
    # Called by the name under which Transformers has it.
    found = AttentionInterface()["varlen_sdpa"](torch.nn.Identity(), queries, queries, values, mask, scaling=None)
    return found[0]  # type: ignore[no-any-return]


@pytest.mark.full
def test_the_kernel_is_called_in_the_dtype_of_autocast_and_without_leaving_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build("llama")  # registers the names
    dtypes = set[torch.dtype]()

    def run(*states: Any, **_: Any) -> Tensor:
        dtypes.update(values.dtype for values in states[:3])
        return states[0] * states[5]  # type: ignore[no-any-return]

    monkeypatch.setattr(varlen, "varlen_attn", run)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    queries = torch.randn(1, 2, 8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        attend(queries, queries.bfloat16())  # as rotary embeddings leave them
    assert dtypes == {torch.bfloat16}
    compiled = torch.compile(attention.attend_at_once, backend="eager", fullgraph=True)
    for lengths in ((3, 5), (1, 7), (1, 2, 5)):
        mask = attention.make_document_mask((lengths,), None, torch.device("cpu"))
        own: Any = (queries, queries, queries, mask, None)
        assert compiled(*own).equal(attention.attend_at_once(*own))


def test_gpus_older_than_the_kernel_attend_to_one_document_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, is_before in (((7, 5), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert attention.is_before_flash(torch.device("cuda")) == is_before
    assert not attention.is_before_flash(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    build("llama")
    in_turn = "varlen: sdpa of one document after another"
    for device, precision, said in (
        ("cuda", "bfloat16", "varlen: varlen_attn of torch, and what it does not take one document after another"),
        ("cuda", "16-mixed", "varlen: varlen_attn of torch, and what it does not take one document after another"),
        ("cuda", "float32", in_turn),
        ("cpu", "bf16-true", in_turn),
    ):
        assert attention.describe_attention("varlen_sdpa", torch.device(device), precision) == said
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "is_before_flash", lambda _: True)
    monkeypatch.setattr(varlen, "varlen_attn", None)
    queries = torch.randn(1, 2, 8, 4)
    alone = functional.scaled_dot_product_attention(*[queries[:, :, 3:]] * 3, is_causal=True)
    torch.testing.assert_close(attend(queries, queries)[:, 3:], alone.transpose(1, 2))


@pytest.mark.parametrize(
    ("dtype", "is_before_flash", "is_shared"),
    [(torch.float16, False, True), (torch.float16, True, False), (torch.float32, False, False)],
)
def test_heads_are_shared_in_one_call_only_where_a_gpu_has_a_kernel_for_it(
    dtype: torch.dtype, is_before_flash: bool, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(*states: Tensor, **options: Any) -> Tensor:
        shared.append((options["enable_gqa"], states[1].shape[1]))
        return run(*states, **options)

    shared, run = list[tuple[bool, int]](), functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", note)
    monkeypatch.setattr(attention, "SHARES_HEADS_IN_FLOAT32", False)
    monkeypatch.setattr(attention, "_get_device_type", lambda _: "cuda")
    monkeypatch.setattr(attention, "is_before_flash", lambda _: is_before_flash)
    query, keys = torch.randn(1, 4, 8, 4, dtype=dtype), torch.randn(1, 2, 8, 4, dtype=dtype)
    found = attention.attend_fused(query, keys, keys, window=8, options={})
    whole = keys.repeat_interleave(2, dim=1)
    torch.testing.assert_close(found, run(query, whole, whole, is_causal=True).transpose(1, 2))
    assert shared == [(is_shared, 2 if is_shared else 4)]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("deepseek_v32", {}),
        ("deepseek_v4", {}),
        ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"]}),
    ],
)
def test_models_that_choose_what_tokens_see_keep_their_masks(family: str, config: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 67}
    settings = AutoConfig.for_model(family, **{**sizes, **config})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    expected = model.config._attn_implementation
    assert choose_attention(model, "auto", is_packed=True, needs_one_graph=False) == expected
    with pytest.raises(ValueError, match=f"takes masks only; set attention: auto, which is {expected} here"):
        choose_attention(model, "varlen", is_packed=True, needs_one_graph=False)


class Rows(pl.LightningDataModule):
    """Rows of documents of other lengths in each, and no rest."""

    packing = True

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for i in range(32):
            ids = torch.randint(3, 60, (24,), generator=generator)
            cuts = [1 + i % 7, 5 + i % 11, 24 - 6 - i % 11 - i % 7]
            labels, positions = ids.clone(), torch.cat([*map(torch.arange, cuts)])
            labels[positions == 0] = -100
            rows.append({"input_ids": ids, "labels": labels, "position_ids": positions})
        return build_train_loader(rows, batch_size=2, collate=collate, shuffle=False, trainer=self.trainer)


class PaddedRows(pl.LightningDataModule):
    """Batches of other lengths in each step, padded on the right."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for i in range(32):
            length = 12 + 3 * (i // 2)  # of both rows of a batch; the second is shorter by one
            ids = torch.randint(3, 60, (length,), generator=generator)
            mask = torch.arange(length) < length - i % 2
            labels = torch.where(mask, ids, -100)
            rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask.long()})
        return build_train_loader(rows, batch_size=2, collate=collate, shuffle=False, trainer=self.trainer)


class KnownRows(PaddedRows):
    """Says so, by which the strategy knows it before the second batch."""

    has_changing_lengths = True


class CountGraphs(pl.Callback):
    """How many graphs there are after each step."""

    def __init__(self) -> None:
        self.after_step: list[int] = []
        torch._dynamo.utils.counters.clear()  # ranks are forks of a process that may have compiled

    def on_train_batch_end(self, *_: Any) -> None:
        self.after_step.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def fit_rows(folder: Path, out: Path, task: dict[str, Any], strategy: dict[str, Any], data: Any = Rows) -> None:
    pl.seed_everything(0)
    recorder, graphs = Recorder(), CountGraphs()
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), callbacks=[recorder, graphs], max_steps=6)
    module = build_task(folder, **task)
    trainer.fit(module, data())
    recorder.result.weights = gather_weights(module)
    if trainer.is_global_zero:
        torch.save({**vars(recorder.result), "num_graphs": graphs.after_step}, out)


FULL = {"activation_checkpointing": ActivationCheckpointing(mode="full")}
SELECTIVE = {"activation_checkpointing": ActivationCheckpointing(mode="selective")}
NF4 = {"lora": LoRA(r=4), "quantization": Quantization(type="nf4")}
FITS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "recomputed": ({}, FULL, 1),
    "recomputed in part, two ranks": ({}, SELECTIVE, 2),
    "adapters over 4 bits, loss in chunks": ({**NF4, "loss_chunks": 3}, FULL, 1),
    "compiled": ({}, {"compile": Compile(backend="eager")}, 1),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FITS)
def test_runs_without_a_mask_learn_as_those_with_one(name: str, tmp_path: Path) -> None:
    task, strategy, world_size = FITS[name]
    torch.manual_seed(1)
    build_language_model("gemma3_text", "cpu", **FAMILIES["gemma3_text"]).save_pretrained(tmp_path)
    results = []
    for wanted in ("auto", "sdpa"):
        out = tmp_path / f"{wanted}.pt"
        run_ranks(fit_rows, tmp_path, out, {**task, "attention": wanted}, strategy, world_size=world_size)
        found = torch.load(out)
        # Documents of other lengths in each batch compile nothing anew.
        graphs = found.pop("num_graphs")
        assert graphs[1:] == graphs[1:2] * 5
        assert "compile" not in strategy or graphs[-1]
        results.append(Result(**found))
    assert len(results[1].losses) == 6
    assert results[1].losses[-1] != results[1].losses[0]
    differences = list_differences(*results)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
@pytest.mark.parametrize(("task", "data"), [({}, PaddedRows), (NF4, KnownRows)], ids=["full", "adapters, known"])
def test_padded_rows_of_changing_lengths_compile_twice_at_most_once_where_known_and_learn_the_same(
    task: dict[str, Any], data: type[PaddedRows], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    build_language_model("llama", "cpu").save_pretrained(tmp_path)
    results = []
    for strategy in ({"compile": Compile(backend="aot_eager")}, {}):
        out = tmp_path / f"{len(results)}.pt"
        run_ranks(fit_rows, tmp_path, out, task, {**FULL, **strategy}, data, world_size=1)
        found = torch.load(out)
        graphs = found.pop("num_graphs")
        times = 1 if data is KnownRows else 2  # for the first length alone, then for any
        assert graphs == [graphs[0], *[times * graphs[0]] * 5]
        assert bool(graphs[0]) == ("compile" in strategy)
        results.append(Result(**found))
    assert results[1].losses[-1] != results[1].losses[0]
    differences = list_differences(*results)
    assert max(differences.values()) <= TOLERANCE, differences


def trace(wanted: Any, *, precision: Any = "bf16-true", accelerator: Any = None, **config: Any) -> Any:
    """Trace a packed step of four documents of 512 tokens each."""
    settings = {**LANGUAGE_MODELS["llama"], "max_position_embeddings": 2048, **config}
    task = CausalLM(config={"model_type": "llama", **settings}, attention=wanted)
    trainer = PlannedTrainer(
        accelerator=accelerator or PlannedGpu(),
        devices=1,
        strategy=FSDP2Strategy(print_plan=False),
        precision=precision,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    step = prepare_step(trainer, task, TextData(train="pydoc", tokenizer="none", seq_length=2048))
    return run_apart(partial(trace_step, step), "test")


@pytest.mark.full
def test_a_plan_counts_the_attention_that_a_run_has() -> None:
    for options in ({}, {"precision": "32-true"}, {"accelerator": "cpu", "precision": "32-true"}):
        with_mask, without = (trace(wanted, **options) for wanted in ("sdpa", "auto"))
        num_layers, itemsize = 3, 2 if not options else 4
        saved = with_mask.memory.peak.num_bytes - without.memory.peak.num_bytes
        assert saved > 0.8 * (num_layers - 1) * 2048**2 * itemsize, options
        assert with_mask.flops.uncounted == without.flops.uncounted == ()
        # Each token sees a quarter of the row.
        heads = LANGUAGE_MODELS["llama"]
        assert with_mask.flops.forward - without.flops.forward == pytest.approx(
            num_layers * 4 * 2048 * (2048 - 512) * heads["num_attention_heads"] * 8, rel=0.01
        ), options


def test_a_plan_of_compiled_attention_is_refused_before_it_runs() -> None:
    with pytest.raises(ConfigError) as caught:
        trace("flex_attention")
    assert caught.value.line.startswith("attention: got 'flex_attention': it is compiled")
    assert "plan with attention: sdpa" in caught.value.line


@pytest.mark.parametrize(
    ("wanted", "packing", "message"),
    [
        ("flex_attention", True, "attention: got 'flex_attention': torch trains with it on GPUs only; set auto"),
        ("flash_attention_3", True, "got 'flash_attention_3': it needs a GPU and a package: pip install flash-attn-3"),
        (
            "varlen",
            False,
            "got 'varlen': it is for packed rows, and TextData has none here; set auto",
        ),
    ],
)
def test_a_choice_that_cannot_work_here_is_refused(wanted: Any, packing: bool, message: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.txt"
    source.write_text("a b c\n" * 50)
    data = TextData(train=str(source), tokenizer="none", packing=packing)
    data.setup = lambda stage=None: None  # type: ignore[method-assign]
    task = CausalLM(config={"model_type": "llama", **LANGUAGE_MODELS["llama"]}, attention=wanted)

    def body() -> None:
        with pytest.raises(ValueError, match=message):
            build_trainer(FSDP2Strategy(print_plan=False)).fit(task, data)

    run_ranks(body, world_size=1)


def test_models_with_attention_of_their_own_keep_their_masks() -> None:
    config = AutoConfig.for_model("falcon", hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert choose_attention(model, "auto", is_packed=True, needs_one_graph=False) == "sdpa"
    with pytest.raises(ValueError, match=r"FalconForCausalLM has attention of its own, .* which is sdpa here"):
        choose_attention(model, "varlen", is_packed=True, needs_one_graph=False)
    model, _ = build("llama", "sdpa")
    assert choose_attention(model, "auto", is_packed=True, needs_one_graph=True) == "sdpa"
    assert choose_attention(model, "auto", is_packed=False, needs_one_graph=False) == "sdpa"
