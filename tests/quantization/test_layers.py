"""Which layers are quantized, what they hold, and that experts compute what Transformers' experts do."""

from typing import Any

import pytest
import torch
from models import LANGUAGE_MODELS, build_language_model, dequantize_model, make_tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3nTextConfig, HYV4Config
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Indexer

from lit_fsdp.adapters.inject import list_left_out
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.profiling.flops import FlopCounter
from lit_fsdp.quantization import groups
from lit_fsdp.quantization.layers import (
    QuantizedExperts,
    QuantizedLinear,
    iterate_quantized,
    list_quantizable,
    quantize_model,
)
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.load import init_weights, materialize

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": WIDE,
    "qwen3_moe": {**WIDE, "moe_intermediate_size": 64},
    "gpt_oss": WIDE,
}

KINDS = [Quantization(), Quantization(type="fp4", double_quant=False), Quantization(type="int8")]


def list_quantized(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, _ in iterate_quantized(model)}


def build_quantized(family: str, settings: Quantization, **config: Any) -> nn.Module:
    model = build_language_model(family, **config)
    quantize_model(model, settings)
    materialize(model, torch.device("cpu"))
    init_weights(model, 3)
    return model


def test_all_linear_layers_but_the_head_are_quantized_and_frozen() -> None:
    model = build_language_model("llama", **WIDE)
    assert quantize_model(model, Quantization()) == []
    assert list_quantized(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(not p.requires_grad for _, layer in iterate_quantized(model) for p in layer.parameters())
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ([], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}),
        (["self_attn", "lm_head"], {"gate_proj", "up_proj", "down_proj"}),
        (["*_proj"], {"lm_head"}),
        (["model.layers.*.mlp", "lm_head"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_names_parts_of_names_and_patterns_are_skipped(skip: list[str], expected: set[str]) -> None:
    model = build_language_model("llama", **WIDE)
    quantize_model(model, Quantization(skip_modules=skip))
    assert list_quantized(model) == expected


def build_on_meta(family: str) -> Any:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 67}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


def test_linear_layers_that_are_only_written_otherwise_are_quantized() -> None:
    """Those of Falcon are of a class of their own, which Transformers keeps in full."""
    model = build_on_meta("falcon")
    assert any(type(m) is not nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    quantize_model(model, Quantization(type="int8"))
    assert list_quantized(model) == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


def test_a_model_that_divides_its_weights_for_an_evaluation_is_refused() -> None:
    """Stock libraries fail when they evaluate it with adapters over 4 bits."""
    with pytest.raises(ValueError, match=r"RwkvForCausalLM divides its weights .* \(config.rescale_every\)"):
        quantize_model(build_on_meta("rwkv"), Quantization(type="int8"))


@pytest.mark.parametrize("skip", [None, ["lm_head"]])
def test_layers_that_a_model_keeps_in_float32_stay_as_transformers_leaves_them(skip: list[str] | None) -> None:
    """The indexer of DeepSeek V3.2 casts to the dtype of its weight."""
    sizes = {**LANGUAGE_MODELS["deepseek_v3"], "hidden_size": 64, "index_head_dim": 16, "index_n_heads": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v32", **{**sizes, "q_lora_rank": 64}))
    assert any(name.endswith("indexer.weights_proj") for name in list_quantizable(model))
    quantize_model(model, Quantization(type="int8", skip_modules=skip))
    assert "weights_proj" not in list_quantized(model) >= {"wq_b", "q_b_proj"}


def test_layers_whose_codes_a_model_would_cast_to_or_clamp_stay_dense() -> None:
    """Indexers, as that of HunYuan 4, and heads cast to the dtype of their weight; Gemma 3n clamps small ones."""
    indexer = HYV4Indexer(HYV4Config(hidden_size=64, q_lora_rank=64, index_head_dim=64, index_n_heads=2), 0)
    left = quantize_model(nn.ModuleDict({"indexer": indexer}).to("meta"), Quantization())
    assert left == ["indexer.weights_proj (its input is cast to the dtype of its weight)"]
    left = quantize_model(build_on_meta("xlstm"), Quantization(type="int8", skip_modules=[]))
    assert "lm_head (its input is cast to the dtype of its weight)" in left
    altup = nn.ModuleDict({"altup": Gemma3nTextAltUp(Gemma3nTextConfig(hidden_size=64))}).to("meta")
    assert len(quantize_model(altup, Quantization(type="int8"))) == 2
    assert list_quantized(altup) == {"modality_router"}


class Doubled(nn.Linear):
    """Does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_that_compute_something_else_are_not() -> None:
    modules = nn.ModuleDict({"doubled": Doubled(64, 64), "attention": nn.MultiheadAttention(64, 2)})
    assert list_quantizable(modules) == {}


def test_a_name_to_skip_that_is_none_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"quantization.skip_modules: got 'q_prj': .* did you mean q_proj\?"):
        quantize_model(build_language_model("llama", **WIDE), Quantization(skip_modules=["q_prj"]))


def test_a_shared_head_and_rows_that_make_no_blocks_stay_and_are_named() -> None:
    model = build_language_model("llama", **{**WIDE, "intermediate_size": 100}, tie_word_embeddings=True)
    left = quantize_model(model, Quantization(skip_modules=[]))
    assert any(text.startswith("lm_head (its weight is that of another layer") for text in left)
    assert any("mlp.down_proj (its rows of 100 do not divide into blocks of 64)" in text for text in left)
    assert list_quantized(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_a_model_in_which_nothing_can_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing to quantize in LlamaForCausalLM: .* do not divide"):
        quantize_model(build_language_model("llama", hidden_size=40, intermediate_size=72), Quantization())


@pytest.mark.parametrize("type_", ["nf4", "fp4", "int8"])
def test_a_layer_takes_the_bytes_it_should(type_: Any) -> None:
    dense = nn.Linear(256, 64, device="meta")
    for double in (False, True) if type_ != "int8" else (None,):
        layer = QuantizedLinear(dense, Quantization(type=type_, double_quant=double))
        bits = 8 * sum(t.numel() for t in (*layer.parameters(), *layer.buffers()) if t.dtype == torch.uint8)
        settings = layer.quantization
        per_weight = 8 + 32 / 256 if type_ == "int8" else 4 + (8 / 64 if settings.is_double else 32 / 64)
        nested = 32 * (256 * 64 / 64 / 256 + 1) if settings.is_double else 0
        assert bits == per_weight * 256 * 64 + nested


@pytest.mark.parametrize(
    "settings", [Quantization(), Quantization(type="fp4", double_quant=False), Quantization(type="int8")]
)
@pytest.mark.parametrize("family", ["llama", *EXPERTS])
def test_a_quantized_model_computes_what_a_dense_one_does_with_its_weights(family: str, settings: Quantization) -> None:
    config = EXPERTS.get(family, WIDE)
    model = build_quantized(family, settings, **config)
    dense = dequantize_model(model, build_language_model(family, "cpu", **config))
    kinds = {type(layer) for _, layer in iterate_quantized(model)}
    assert any(issubclass(kind, QuantizedExperts) for kind in kinds) == (family != "llama")
    tokens = make_tokens()
    with torch.no_grad():
        difference = model(tokens).logits - dense(tokens).logits
    assert float(difference.abs().max()) <= 1e-6


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_weights_that_a_model_reads_past_their_layers_are_left(family: str) -> None:
    """Mamba never calls ``dt_proj``, and Jamba only once Transformers has quantized it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 67, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, **({"use_mamba_kernels": False} if family == "jamba" else {}))
    torch.manual_seed(1)
    dense = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    left = quantize_model(
        model, Quantization(type="int8", skip_modules=["lm_head", *(["experts"] if family == "jamba" else [])])
    )
    assert any("dt_proj (the module around it reads its weight)" in text for text in left)
    assert "dt_proj" not in list_quantized(model)
    materialize(model, torch.device("cpu"))
    init_weights(model, 3)
    like = dequantize_model(model, dense)
    with torch.no_grad():
        expected, logits = (each(input_ids=make_tokens(), use_cache=False).logits for each in (like, model))
    assert float((logits - expected).abs().max() / expected.std()) <= 1e-5


def test_weights_that_kernels_of_gpus_are_passed_stay_dense_and_get_no_adapter() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 67, "mamba_n_heads": 8}
    sizes |= {"mamba_d_head": 16, "num_attention_heads": 4, "num_local_experts": 2, "shared_intermediate_size": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granitemoehybrid", **sizes))
    assert {name.rpartition(".")[2] for name in list_left_out(model, LoRA())} == {"out_proj"}
    left = quantize_model(model, Quantization(type="int8"))
    assert left == [f"model.layers.{i}.mamba.out_proj (the module around it reads its weight)" for i in range(2)]


def test_the_seed_gives_the_same_codes_whether_the_model_is_quantized_at_once_or_later() -> None:
    whole = build_language_model("llama", **WIDE)
    materialize(whole, torch.device("cpu"))
    init_weights(whole, 3)
    model = build_quantized("llama", Quantization(type="int8"), **WIDE)
    dense = dequantize_model(model, build_language_model("llama", "cpu", **WIDE))
    for (name, a), (_, b) in zip(whole.named_parameters(), dense.named_parameters(), strict=True):
        assert float((a - b).abs().max()) <= float(a.abs().max()) * (0.5 / 127 + 1e-3), name


class Operators(TorchDispatchMode):
    """Lists the operators that run, with the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran.append((str(func), out.shape if isinstance(out, Tensor) else None))
        return out


def find_experts(model: nn.Module) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith("experts"))


def run_experts(experts: Any, chosen: Tensor) -> list[Tensor]:
    """Return what comes out, and the gradients of what comes in."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(chosen), WIDE["hidden_size"], generator=generator, requires_grad=True)
    weights = torch.rand(chosen.shape, generator=generator, requires_grad=True)
    y = experts(x, chosen, weights)
    y.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


def route(num_experts: int) -> list[Tensor]:
    """Choose two experts for each of 12 tokens: spread, and always the same."""
    spread = torch.stack([torch.arange(12) % num_experts, (torch.arange(12) + 1) % num_experts], dim=1)
    return [spread, torch.tensor([[0, num_experts - 1]]).expand(12, 2).contiguous()]


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("family", EXPERTS)
def test_gradients_of_experts_are_those_of_dense_ones(family: str, settings: Quantization) -> None:
    model = build_quantized(family, settings, **EXPERTS[family])
    dense = dequantize_model(model, build_language_model(family, "cpu", **EXPERTS[family]))
    experts = find_experts(model)
    for chosen in route(experts.num_experts):
        for found, expected in zip(*(run_experts(e, chosen) for e in (experts, find_experts(dense))), strict=True):
            assert float((found - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("settings", KINDS[::2], ids=str)
def test_experts_run_the_same_operators_wherever_tokens_go_and_wait_for_none(settings: Quantization) -> None:
    experts = find_experts(build_quantized("qwen3_moe", settings, **EXPERTS["qwen3_moe"]))
    ran, flops = [], []
    for chosen in route(experts.num_experts):
        with FlopCounter() as counter, Operators() as operators:
            run_experts(experts, chosen)
        ran.append(operators.ran)
        flops.append(counter.flops)
    assert ran[0] == ran[1]
    waits = ("_local_scalar_dense", "nonzero", "unique", "bincount")
    assert [name for name, _ in ran[0] if any(wait in name for wait in waits)] == []
    products = 2 * 12 * 2 * 3 * 64 * 64  # of 12 tokens with 2 experts each, not with all
    assert (flops[0].forward, flops[0].backward) == (products, products)


def test_experts_are_multiplied_one_by_one_where_no_kernel_takes_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = find_experts(build_quantized("qwen3_moe", Quantization(), **EXPERTS["qwen3_moe"]))
    chosen = route(experts.num_experts)
    expected = [run_experts(experts, c) for c in chosen]
    monkeypatch.setattr(groups, "has_grouped_product", lambda *_: False)
    for c, truth in zip(chosen, expected, strict=True):
        with Operators() as operators:
            found = run_experts(experts, c)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, truth, strict=True))
        dequantized = [name for name, _ in operators.ran if "dequantize_4bit" in name]
        assert len(dequantized) == 4 * len(c.unique())  # two projections, forward and backward


@pytest.mark.full(after=1)
@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.type)
def test_a_compiled_layer_is_one_graph_and_keeps_no_dense_weight(settings: Quantization) -> None:
    """A compiler may share what forward and backward dequantize, and would keep it in between."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    layers_ = nn.Sequential(*model.to("meta"))
    quantize_model(layers_, settings)
    materialize(layers_, torch.device("cpu"))
    init_weights(layers_, 0)
    results, saved = [], []

    def keep(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    for _ in range(2):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layers_(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
        torch._dynamo.reset()
        layers_.compile(backend="aot_eager", fullgraph=True)
    assert {dtype for shape, dtype in saved if shape[0] != 5} <= {torch.uint8}
    assert (5, 128) in {shape for shape, _ in saved}
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(*results, strict=True))
    assert float(results[0][0].abs().max()) > 0
