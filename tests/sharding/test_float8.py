"""Products in float8: sharded training equals one device's, follows the curve without, and is refused elsewhere."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import EVEN, list_differences, save_model, train_sharded
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp import Float8, LoRA, Mesh, Quantization
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.sharding.float8 import convert_linears
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.settings import Settings

torchao = pytest.importorskip("torchao")
CPU = torch.device("cpu")
BF16 = MixedPrecision(param_dtype="bfloat16")


def build_llama(**sizes: int) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**EVEN, "num_hidden_layers": 2, **sizes}))


@pytest.mark.full
def test_sharded_training_equals_that_of_one_rank_and_follows_the_curve_without(tmp_path: Path) -> None:
    folder = save_model(tmp_path, **EVEN)
    # Its scales are of single rows, so that they are the same whoever has the row.
    strategy = {"float8": Float8(recipe="rowwise_with_gw_hp", emulate=True)}
    whole = train_sharded(folder, tmp_path, world_size=1, strategy=strategy)
    split = train_sharded(folder, tmp_path, world_size=2, strategy=strategy)
    without = train_sharded(folder, tmp_path, world_size=2, strategy={})
    assert max(list_differences(split, whole).values()) <= 1e-6
    # Rounded to 4 significant bits: neither the same, nor far from it.
    assert 1e-5 < list_differences(split, without)["loss"] < 5e-3


def test_all_linear_layers_of_blocks_are_converted_with_the_parameters_they_had() -> None:
    model = build_llama()
    before = dict(model.named_parameters())
    assert convert_linears(model, Float8(emulate=True)) == []
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind != "Float8Linear"} == {"lm_head"}
    assert len(kinds) == 2 * 7 + 1
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_layers_of_other_sizes_are_named_and_those_to_skip_left() -> None:
    model = build_llama(intermediate_size=72)
    odd = convert_linears(model, Float8(emulate=True, skip_modules=("self_attn.q_proj", "layers.1")))
    assert odd == [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    converted = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert converted == {*(f"model.layers.0.self_attn.{name}_proj" for name in "kvo"), "lm_head"}


def quantize() -> None:
    model = build_llama()
    quantize_model(model, Quantization())
    convert_linears(model, Float8(emulate=True))


def adapt() -> None:
    model = build_llama()
    add_adapters(model, LoRA(r=4))
    convert_linears(model, Float8(emulate=True))


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "device": (lambda: Float8().check_machine(CPU, BF16), "got a cpu device.*set float8.emulate"),
    "quantized": (quantize, "quantized weights.*leave float8 or quantization out"),
    "adapters": (adapt, "gradients of the frozen weights.*leave float8 or lora out"),
    "name": (
        lambda: convert_linears(build_llama(), Float8(skip_modules=("q_prj",))),
        "float8.skip_modules: got 'q_prj'.*did you mean q_proj",
    ),
    "sizes": (
        lambda: convert_linears(nn.Sequential(nn.Linear(8, 16)), Float8()),
        "no linear layer that could multiply in it; sizes of 0 do not divide by 16",
    ),
    "tensor": (
        lambda: Settings(mesh=Mesh(tensor=2), float8=Float8()).check(world_size=2, ranks_per_node=2, device=CPU),
        "mesh.tensor: got 2 with float8",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_with_what_to_set(case: str) -> None:
    act, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [((8, 6), "bfloat16", "compute capability 8.6: expected 8.9"), ((9, 0), None, "compute in float32.*bf16-mixed")],
)
def test_gpus_and_dtypes_without_such_products_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: Any, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with pytest.raises(ValueError, match=message):
        Float8().check_machine(torch.device("cuda"), MixedPrecision(param_dtype=dtype))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"lit_fsdp\[float8\]\""):
        Float8(emulate=True).check_machine(CPU, BF16)
