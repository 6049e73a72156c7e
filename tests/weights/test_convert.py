"""Files whose names and layouts are not the model's are read as Transformers reads them, each rank its own part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from huggingface_hub import constants
from models import build_language_model, to_full
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import list_differences, train_plainly, train_sharded
from transformers import AutoModelForCausalLM, LlamaForCausalLM, conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, ConversionOps, Transpose, WeightConverter

from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.wrap import Wrap, iterate_blocks, plan_units
from lit_fsdp.weights import safetensors_io as tensor_files
from lit_fsdp.weights.base_weights import get_pretrained_folder
from lit_fsdp.weights.convert import clean_name
from lit_fsdp.weights.load import load_weights, materialize
from lit_fsdp.weights.safetensors_io import TensorFiles
from ranks import run_ranks

EXPERTS = ("mixtral", "qwen3_moe")


def shard(model: nn.Module) -> nn.Module:
    plan = plan_units(model, Wrap())
    apply_activation_checkpointing(
        model, ActivationCheckpointing(mode="full", every_n_blocks=2), list(iterate_blocks(plan))
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    options = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    shard_model(model, plan, mesh=mesh, sharding=Sharding(), **options)
    return model


def load(
    family: str, folder: Path, *, is_sharded: bool = True, dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    model = build_language_model(family, **config).to(dtype)
    model = shard(model) if is_sharded else model
    materialize(model, torch.device("cpu"))
    load_weights(model, folder)
    return model


def read_state(model: nn.Module) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    full = {n: to_full(t).detach() for n, t in tensors}
    return {clean_name(name): tensor for name, tensor in full.items()}


def list_unequal(model: nn.Module, expected: nn.Module) -> list[str]:
    a, b = read_state(model), read_state(expected)
    assert a.keys() == b.keys()
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> dict[str, Tensor]:
    """Save a random model as it is on the Hub, and return what is in the file."""
    torch.manual_seed(0)
    build_language_model(family, "cpu", **config).to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, state: dict[str, Tensor]) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )


@contextmanager
def count_reads() -> Iterator[list[int]]:
    """Collect the bytes of each read of a file's tensors."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        sizes.append(preadv(*args))
        return sizes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        yield sizes


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_stored_one_by_one_become_one_tensor_bit_for_bit(family: str, world_size: int, tmp_path: Path) -> None:
    stored = save(family, tmp_path)
    assert sum(".experts.0." in name for name in stored) == 3 * 3  # three matrices in each of three layers
    build_language_model(family, "cpu").save_pretrained(tmp_path / "other", max_shard_size="20KB")
    expected = {p: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (tmp_path, tmp_path / "other")}

    def body() -> None:
        for folder, model in expected.items():
            assert list_unequal(load(family, folder), model) == []
            assert list_unequal(load(family, folder, is_sharded=False), model) == []

    run_ranks(body, world_size=world_size)


@pytest.mark.full
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_dtypes_are_cast_as_transformers_casts_them(stored: torch.dtype, kept: torch.dtype, tmp_path: Path) -> None:
    save("mixtral", tmp_path, stored)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=kept)

    def body() -> None:
        model = load("mixtral", tmp_path, dtype=kept)
        parameters = {name for name, _ in expected.named_parameters()}
        assert parameters.isdisjoint(list_unequal(model, expected))

    run_ranks(body)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", *EXPERTS])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_reads_its_share_and_nothing_larger_than_its_rows(family: str, world_size: int, tmp_path: Path) -> None:
    config = {"vocab_size": 512, "num_experts" if family == "qwen3_moe" else "num_local_experts": 8}
    save(family, tmp_path, **config)
    with TensorFiles(tmp_path) as files:
        total = sum(t.num_rows * t.row_bytes for t in files.tensors.values())

    def body() -> None:
        with count_reads() as sizes:
            model = load(family, tmp_path, **config)
        assert sum(sizes) == sum(p.to_local().numel() * 4 for p in model.parameters())  # not a byte more
        assert abs(sum(sizes) - total / world_size) < 0.01 * total
        assert max(sizes) == max(p.to_local().numel() * 4 for p in model.parameters() if p.ndim < 3)

    run_ranks(body, world_size=world_size)


class LargestTensor(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that is made on the CPU."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu" and not isinstance(out, DTensor):
            self.num_bytes = max(self.num_bytes, out.nbytes)
        return out


def test_a_buffer_beside_a_large_embedding_is_rebuilt_without_drawing_the_embedding(tmp_path: Path) -> None:
    save("gemma3_text", tmp_path, vocab_size=2048)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "model.embed_tokens.embed_scale" in dict(expected.named_buffers())

    def body() -> None:
        model = shard(build_language_model("gemma3_text", vocab_size=2048))
        materialize(model, torch.device("cpu"))
        with LargestTensor() as largest:
            load_weights(model, tmp_path)
        assert list_unequal(model, expected) == []
        assert largest.num_bytes == 2048 * 32 * 4 / 2

    run_ranks(body)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_the_prefix_of_the_base_model_may_be_there_or_not(family: str, tmp_path: Path) -> None:
    state = save(family, tmp_path, tie_word_embeddings=True)
    prefix = build_language_model(family).base_model_prefix
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "with").mkdir()
    rewrite(tmp_path / "with", state)
    rewrite(tmp_path, {name.removeprefix(f"{prefix}."): tensor for name, tensor in state.items()})

    def body() -> None:
        assert list_unequal(load(family, tmp_path, tie_word_embeddings=True), expected) == []
        base = shard(build_language_model(family, tie_word_embeddings=True).base_model)
        materialize(base, torch.device("cpu"))
        load_weights(base, tmp_path / "with")
        assert list_unequal(base, expected.base_model) == []

    run_ranks(body)


def test_names_that_transformers_skips_are_skipped(tmp_path: Path) -> None:
    state = save("llama", tmp_path)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    rewrite(tmp_path, state)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list_unequal(load("llama", tmp_path, is_sharded=False), expected) == []


@pytest.mark.full
@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_weight_is_found_under_either_name(kept: str, tmp_path: Path) -> None:
    state = save("llama", tmp_path, tie_word_embeddings=True)
    weight = state.pop("model.embed_tokens.weight")
    state |= {
        name: weight.clone() for name in ("model.embed_tokens.weight", "lm_head.weight") if kept in (name, "both")
    }
    rewrite(tmp_path, state)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)

    def body() -> None:
        model = load("llama", tmp_path, tie_word_embeddings=True)
        assert list_unequal(model, expected) == []
        assert model.lm_head.weight is model.model.embed_tokens.weight

    run_ranks(body)


def test_two_different_tensors_for_one_tied_weight_are_refused_on_all_ranks(tmp_path: Path) -> None:
    state = save("llama", tmp_path, tie_word_embeddings=True)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1, -1] += 1  # a row of the last rank
    rewrite(tmp_path, state)

    def body() -> None:
        with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight differ"):
            load("llama", tmp_path, tie_word_embeddings=True)

    run_ranks(body)


@pytest.mark.full
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            "experts.2.w1.",
            r"gate_up_proj cannot be made of 3 stored \S+w1.weight and 4 stored \S+w3.weight \(such as model",
        ),
        ("experts.2.", r"gate_up_proj, made of 3 stored .* has shape \(3, 128, 32\), the model's \(4, 128, 32\)"),
        ("w3.", r"gate_up_proj cannot be made of 4 stored \S+w1.weight and 0 stored \S+w3.weight"),
        ("w2.", "does not fit MixtralForCausalLM: it lacks model.layers.0.mlp.experts.down_proj"),
        ("gate.", "does not fit MixtralForCausalLM: it lacks model.layers.0.mlp.gate.weight, model.layers.1"),
    ],
)
def test_lost_experts_are_refused_by_name_before_anything_is_read(lost: str, message: str, tmp_path: Path) -> None:
    state = save("mixtral", tmp_path)
    rewrite(tmp_path, {name: tensor for name, tensor in state.items() if lost not in name})

    def body() -> None:
        with count_reads() as sizes, pytest.raises(ValueError, match=message):
            load("mixtral", tmp_path)
        assert sizes == []

    run_ranks(body)


def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path) -> None:
    state = save("mixtral", tmp_path)
    name, experts = "model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj"
    other = {"norm.weight": state[name].clone()}
    for changed, message in [
        (state | other, r"model.norm.weight is stored twice, as model.norm.weight and as norm.weight"),
        (state | {experts: torch.zeros(4, 128, 32)}, rf"{experts} is stored twice, as .*w1.weight and as {experts}"),
        (
            state | {name: state[name].to(torch.uint8)},
            r"model.norm.weight is made of torch.uint8, which",
        ),
    ]:
        rewrite(tmp_path, changed)
        with pytest.raises(ValueError, match=message):
            load("mixtral", tmp_path, is_sharded=False)


def test_what_files_may_lack_is_initialized_alike_at_every_world_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = save("llama", tmp_path)
    rewrite(tmp_path, {name: tensor for name, tensor in state.items() if name != "lm_head.weight"})
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", ["lm_head"])
    whole = load("llama", tmp_path, is_sharded=False)
    assert 0.01 < float(whole.lm_head.weight.detach().std()) < 0.04
    assert torch.equal(whole.model.embed_tokens.weight, state["model.embed_tokens.weight"])

    def body() -> None:
        assert list_unequal(load("llama", tmp_path), whole) == []

    run_ranks(body, world_size=3)


def test_a_base_model_is_no_checkpoint_of_a_model_with_a_head(tmp_path: Path) -> None:
    save("llama", tmp_path)
    build_language_model("llama", "cpu").base_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM: it lacks lm_head.weight$"):
        load("llama", tmp_path, is_sharded=False)


@pytest.mark.full
@pytest.mark.parametrize("family", EXPERTS)
def test_a_run_from_experts_stored_one_by_one_equals_one_device(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "NUM_STEPS", 2)
    save(family, tmp_path)
    truth = train_plainly(tmp_path)
    run = train_sharded(tmp_path, tmp_path, world_size=2, strategy={}, max_steps=2)
    assert len(run.losses) == 2
    differences = list_differences(run, truth)
    assert max(differences.values()) < 1e-6, differences


def convert(source: str | list[str], target: str | list[str], *operations: ConversionOps) -> WeightConverter:
    return WeightConverter(source, target, list(operations))


# Each with the rows its sources are read by.
LAYOUTS: dict[str, tuple[str | None, WeightConverter]] = {
    "joined": ("joined", convert(["mlp.left.weight", "mlp.right.weight"], "mlp.gate_proj.weight", Concatenate(dim=0))),
    "inside": ("inside", convert(["mlp.left.weight", "mlp.right.weight"], "mlp.gate_proj.weight", Concatenate(dim=1))),
    "split inside": (
        "inside",
        convert("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], Chunk(dim=1)),
    ),
    "split": (None, convert("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], Chunk(dim=0))),
    "turned": (None, convert("mlp.turned.weight", "mlp.gate_proj.weight", Transpose(0, 1))),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_other_layouts_are_read_by_rows_where_their_operations_keep_rows_apart(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, converter = LAYOUTS[layout]
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # fills the table
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "LlamaForCausalLM", [converter])
    monkeypatch.setattr(tensor_files, "MAX_BLOCK_BYTES", 500)  # two to four rows at once
    state = save("llama", tmp_path, intermediate_size=66)
    (source, *_) = converter.source_patterns
    assert f"model.layers.0.{source}" in state
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    converted = sum(t.numel() * 4 for name, t in state.items() if name.endswith(tuple(converter.source_patterns)))

    def body() -> None:
        with count_reads() as sizes:
            model = load("llama", tmp_path, intermediate_size=66)
        assert list_unequal(model, expected) == []
        own = sum(p.to_local().numel() * 4 for p in model.parameters())
        if rows is None:
            assert sum(sizes) > own + converted / 3  # every rank reads these in full
        else:
            assert sum(sizes) == own

    for world_size in (2, 3):
        run_ranks(body, world_size=world_size)


def test_a_model_on_the_hub_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--someone--tiny"
    save("mixtral", repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = get_pretrained_folder("someone/tiny")
    expected = AutoModelForCausalLM.from_pretrained(folder)
    assert list_unequal(load("mixtral", folder, is_sharded=False), expected) == []
