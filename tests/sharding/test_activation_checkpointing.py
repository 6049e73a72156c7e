"""Recomputing changes what is kept and computed twice, and nothing else: no number and no name."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Parent, build_language_model, compute_loss, make_tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    NemotronHConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.layers import iterate_quantized, quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Compile
from lit_fsdp.sharding.wrap import Wrap, iterate_blocks, plan_units
from lit_fsdp.weights.load import init_weights, materialize

SETTINGS = {
    "none": ActivationCheckpointing(),
    "full": ActivationCheckpointing(mode="full"),
    "every 2": ActivationCheckpointing(mode="full", every_n_blocks=2),
    "every 3": ActivationCheckpointing(mode="full", every_n_blocks=3),
    "selective": ActivationCheckpointing(mode="selective"),
    "only mm": ActivationCheckpointing(mode="selective", saved_ops=["aten.mm"]),
    "nested": ActivationCheckpointing(mode="full"),
    "offload": ActivationCheckpointing(mode="full", offload=True),
    "offload every 2": ActivationCheckpointing(mode="full", every_n_blocks=2, offload=True),
    "offload selective": ActivationCheckpointing(mode="selective", offload=True),
}


SMALL: Any = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# Layers of linear attention, whose part of a cache has no length, around one of the other kind.
HYBRID: Any = {
    **SMALL,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_only_layers": [0, 1, 2],
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
# Layers of experts, which have no part of a cache at all.
EXPERTS: Any = {
    **SMALL,
    "layers_block_type": ["mamba", "moe", "attention"],
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "chunk_size": 8,
}
T5 = T5Config(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0)


def build(device: str = "cpu") -> Parent:
    torch.manual_seed(0)
    # Dropout would differ if the random state were not the same when recomputing.
    return Parent(build_language_model("llama", device, attention_dropout=0.1)).train()


def run(name: str) -> tuple[Tensor, dict[str, Tensor], list[int], int]:
    """Return loss, gradients, how often each block ran, and the operations of matrix products and attention."""
    model = build()
    units = Wrap(module_classes=["LlamaDecoderLayer", "LlamaMLP"]) if name == "nested" else Wrap()
    blocks = list(iterate_blocks(plan_units(model, units)))
    apply_activation_checkpointing(model, SETTINGS[name], blocks)
    counts = [0, 0, 0]

    def count(i: int) -> Callable[..., None]:
        def add(*_: Any) -> None:
            counts[i] += 1

        return add

    for i, layer in enumerate(model.model.model.layers):
        layer.self_attn.q_proj.register_forward_pre_hook(count(i))
    torch.manual_seed(1)
    with FlopCounterMode(display=False) as flops:
        loss = compute_loss(model, make_tokens())
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, counts, flops.get_total_flops()


@pytest.fixture(scope="module")
def truth() -> tuple[Tensor, dict[str, Tensor], list[int], int]:
    return run("none")


@pytest.mark.filterwarnings("error::FutureWarning")  # of what a later torch does with hooks on saved tensors
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", [2, 2, 2]),
        ("every 2", [2, 1, 2]),
        ("every 3", [2, 1, 1]),
        ("selective", [2, 2, 2]),
        ("only mm", [2, 2, 2]),
        ("nested", [2, 2, 2]),
        ("offload", [2, 2, 2]),
        ("offload every 2", [2, 1, 2]),
        ("offload selective", [2, 2, 2]),
    ],
)
def test_loss_and_gradients_stay_bit_for_bit_while_blocks_run_again(
    name: str, expected: list[int], truth: tuple[Tensor, dict[str, Tensor], list[int], int]
) -> None:
    loss, gradients, counts, _ = run(name)
    assert counts == expected
    assert torch.equal(loss, truth[0])
    assert gradients.keys() == truth[1].keys()
    assert [n for n in gradients if not torch.equal(gradients[n], truth[1][n])] == []


class Normed(nn.Module):
    """A block with running statistics, and a count that may be another tensor each time."""

    def __init__(self, is_replaced: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.inner = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))
        self.register_buffer("num_calls", torch.zeros(()))
        self.is_replaced = is_replaced

    def forward(self, x: Tensor) -> Tensor:
        if self.is_replaced:
            self.num_calls = self.num_calls + 1
        else:
            self.num_calls.add_(1)
        return x + torch.sin(self.inner(torch.sin(self.norm(self.linear(x)))))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["full", "nested", "selective"])
def test_running_statistics_count_a_batch_once(name: str, is_compiled: bool) -> None:
    found = []
    for setting in ("none", name):
        torch.manual_seed(0)
        model = nn.Sequential(*(Normed(is_replaced=not is_compiled) for _ in range(2)))
        blocks = ["0", "0.inner", "1", "1.inner"] if name == "nested" else ["0", "1"]
        apply_activation_checkpointing(model, SETTINGS[setting], blocks)
        if is_compiled and setting != "none":
            for block in model:
                block.compile(backend="aot_eager")
        for step in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), requires_grad=True)
            model(x).square().sum().backward()
        found.append({**dict(model.named_buffers()), **{n: p.grad for n, p in model.named_parameters()}})
    assert len(found[1]) == 2 * 13
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-6 if is_compiled else 0, msg=key)


def test_selective_saves_the_expensive_part_and_full_does_not(
    truth: tuple[Tensor, dict[str, Tensor], list[int], int],
) -> None:
    kept, full, half, selective, only_mm = truth[3], *(run(n)[3] for n in ("full", "every 2", "selective", "only mm"))
    assert kept == selective
    assert kept < only_mm < half < full  # attention is a small part of so short a sequence


def test_names_and_the_module_tree_stay_as_they_are() -> None:
    model = build("meta")
    parameters = [name for name, _ in model.named_parameters()]
    modules = [(name, type(module)) for name, module in model.named_modules()]
    state = list(model.state_dict())
    plan = plan_units(model, Wrap())
    chosen = apply_activation_checkpointing(model, ActivationCheckpointing(mode="full"), list(iterate_blocks(plan)))
    assert chosen == [f"model.model.layers.{i}" for i in range(3)]
    assert [name for name, _ in model.named_parameters()] == parameters
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert list(model.state_dict()) == state
    assert plan_units(model, Wrap()) == plan


def test_blocks_take_positions_keywords_and_return_structures() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, scale: float, more: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return torch.sin(self.linear(x)) * scale, {"y": more["y"] * 2}

    def compute() -> Tensor:
        out, extra = model(torch.ones(2, 4), scale=3.0, more={"y": torch.ones(2, 4, requires_grad=True)})
        return (out + extra["y"]).sum()

    torch.manual_seed(0)
    model = nn.Sequential(Odd())[0]
    parent = nn.Sequential(model)
    compute().backward()
    expected = model.linear.weight.grad.clone()
    model.zero_grad()
    apply_activation_checkpointing(parent, ActivationCheckpointing(mode="full"), ["0"])
    compute().backward()
    assert torch.equal(model.linear.weight.grad, expected)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "llama but the first block", "qwen3_next", "nemotron_h"])
def test_a_model_that_is_called_with_a_cache_has_the_same_gradients(kind: str, mode: Any) -> None:
    gradients = []
    for settings in (ActivationCheckpointing(), ActivationCheckpointing(mode=mode)):
        torch.manual_seed(0)
        model: Any = T5ForConditionalGeneration(T5)
        if kind != "t5":
            configs: dict[str, Any] = {
                "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4),
                "qwen3_next": Qwen3NextConfig(**HYBRID),
                "nemotron_h": NemotronHConfig(**EXPERTS),
            }
            model = AutoModelForCausalLM.from_config(configs.get(kind, LlamaConfig(**SMALL)))
        assert model.config.use_cache
        # Those of GPT-2 are given it without a keyword.
        names = ("LlamaDecoderLayer", "GPT2Block", "T5Block", "Qwen3NextDecoderLayer", "NemotronHBlock")
        blocks = [n for n, m in model.named_modules() if type(m).__name__ in names]["first" in kind :]
        apply_activation_checkpointing(model.train(), settings, blocks)
        ids = torch.arange(18).view(2, 9) + 1
        torch.manual_seed(1)  # of dropout
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    for name, gradient in plain.items():  # the order of sums differs where both stacks of T5 read the same states
        assert float((gradient - recomputed[name]).abs().max()) <= 2e-6 * float(gradient.abs().max()), name

    model.eval()
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, **({"decoder_input_ids": ids} if kind == "t5" else {}))
    assert cache.past_key_values.get_seq_length() == 9, "generating keeps its cache"
    if kind != "t5":
        with pytest.raises(ValueError, match=r"(past_key_values|cache): it is not empty"):
            model(input_ids=ids, past_key_values=cache.past_key_values)


def test_less_is_kept_for_backward() -> None:
    def count_kept(recompute: ActivationCheckpointing) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(16) for _ in range(4)])
        apply_activation_checkpointing(model, recompute, [str(i) for i in range(4)])
        kept: set[tuple[int, int]] = set()

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                kept.add((tensor.data_ptr(), tensor.nbytes))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(torch.ones(64, 16)).sum()
        return loss.numel() + sum(num_bytes for _, num_bytes in kept)

    assert (
        count_kept(ActivationCheckpointing(mode="full"))
        < count_kept(ActivationCheckpointing(mode="full", every_n_blocks=2))
        < count_kept(ActivationCheckpointing())
    )


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (
            ActivationCheckpointing(mode="full", every_n_blocks=0),
            "activation_checkpointing.every_n_blocks: got 0: expected 1 or more",
        ),
        (
            ActivationCheckpointing(every_n_blocks=2),
            "activation_checkpointing.every_n_blocks: got 2 with mode 'none'; set mode to 'full'",
        ),
        (
            ActivationCheckpointing(mode="full", saved_ops=["aten.mm"]),
            "activation_checkpointing.saved_ops: not used by mode 'full'",
        ),
        (
            ActivationCheckpointing(mode="selective", keep_dequantized=True),
            "activation_checkpointing.keep_dequantized: not used by mode 'selective'",
        ),
        (
            ActivationCheckpointing(mode="full", keep_dequantized=True),
            "keep_dequantized: got true, and no linear layer of the blocks is quantized",
        ),
        (
            ActivationCheckpointing(mode="selective", saved_ops=["aten.nothing"]),
            "got 'aten.nothing': torch has no such operator",
        ),
        (ActivationCheckpointing(offload=True), "activation_checkpointing.offload: got true with mode 'none'"),
        (ActivationCheckpointing(mode="selective", saved_ops=["mm"]), "got 'mm': torch has no such operator"),
        (ActivationCheckpointing(mode="selective", saved_ops=[""]), "got '': torch has no such operator"),
        (ActivationCheckpointing(mode="selective", saved_ops=["aten"]), "got 'aten': torch has no such operator"),
        (
            ActivationCheckpointing(mode="selective", saved_ops=["nowhere.mm"]),
            "got 'nowhere.mm': torch has no such operator",
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused(recompute: ActivationCheckpointing, message: str) -> None:
    model = nn.Sequential(Block())
    with pytest.raises(ValueError, match=message):
        apply_activation_checkpointing(model, recompute, ["0"])
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("name", ["offload", "keep_dequantized"])
def test_what_compiled_blocks_do_not_keep_is_refused_beside_them(name: str) -> None:
    recompute = ActivationCheckpointing(mode="full", **{name: True})
    settings = Settings(activation_checkpointing=recompute, compile=Compile())
    with pytest.raises(ValueError, match=rf"^activation_checkpointing.{name}: .*compiled blocks keep .* out$"):
        settings.check(world_size=1, ranks_per_node=1, device=torch.device("cpu"))


def test_selective_refuses_blocks_inside_blocks() -> None:
    model = Parent(nn.Sequential(nn.Sequential(Block())))
    with pytest.raises(ValueError, match=r"got 'selective': block model.0.0 lies inside block model.0; set mode to"):
        apply_activation_checkpointing(model, ActivationCheckpointing(mode="selective"), ["model.0", "model.0.0"])
    assert apply_activation_checkpointing(model, ActivationCheckpointing(mode="full"), ["model.0", "model.0.0"]) == [
        "model.0",
        "model.0.0",
    ]


def build_quantized() -> nn.Sequential:
    """Two blocks of one block each."""
    model = nn.Sequential(*[nn.Sequential(Block(64)) for _ in range(2)]).to("meta")
    quantize_model(model, Quantization())
    materialize(model, torch.device("cpu"))
    init_weights(model, 0)
    return model


KEEP = ActivationCheckpointing(mode="full", keep_dequantized=True)


def test_kept_weights_refuse_blocks_inside_blocks() -> None:
    with pytest.raises(ValueError, match=r"keep_dequantized: got true: block 0.0 lies inside block 0; set mode to"):
        apply_activation_checkpointing(build_quantized(), KEEP, ["0", "0.0", "1", "1.0"])


def test_weights_are_kept_for_each_backward_over_a_graph_and_under_autocast() -> None:
    found: list[Any] = []
    for recompute in (ActivationCheckpointing(mode="full"), KEEP):
        model = build_quantized()
        apply_activation_checkpointing(model, recompute, ["0", "1"])
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(x.grad)
        assert not any(layer.kept for _, layer in iterate_quantized(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("recompute", [*SETTINGS.values(), KEEP], ids=[*SETTINGS, "keep"])
def test_copies_of_a_model_compute_with_their_own_weights(recompute: ActivationCheckpointing) -> None:
    model = build_quantized()
    apply_activation_checkpointing(model, recompute, ["0", "1"])
    x = torch.linspace(-1, 1, 3 * 64).view(3, 64).requires_grad_()
    kept = model(x)
    model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    model[1]._forward_pre_hooks.clear()
    other: Any
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other[0][0].norm.weight.mul_(2)
        assert not torch.equal(other(x), kept)
        other(x).sum().backward()
    assert torch.equal(model(x), kept)


def test_without_blocks_it_is_refused_unless_off() -> None:
    assert apply_activation_checkpointing(nn.Linear(2, 2), ActivationCheckpointing(), []) == []
    with pytest.raises(ValueError, match="got 'full': no blocks were found"):
        apply_activation_checkpointing(nn.Linear(2, 2), ActivationCheckpointing(mode="full"), [])


@pytest.mark.parametrize(
    ("kind", "saved_ops", "operator"),
    [("nf4", (), "bitsandbytes.gemm_4bit"), ("int8", (), "aten.mm"), ("int8", ("aten.mul",), "")],
)
def test_selective_computes_products_with_quantized_weights_once(
    kind: Any, saved_ops: tuple[str, ...], operator: str
) -> None:
    counts, gradients = [], []
    for settings in (
        ActivationCheckpointing(),
        ActivationCheckpointing(mode="selective", saved_ops=saved_ops),
    ):
        model = build_language_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)
        quantize_model(model, Quantization(type=kind))
        materialize(model, torch.device("cpu"))
        init_weights(model, 0)
        parent = Parent(model)
        apply_activation_checkpointing(parent, settings, list(iterate_blocks(plan_units(parent, Wrap()))))
        with CountCalls(operator) as calls:
            compute_loss(parent, make_tokens()).backward()
        counts.append(calls.num_calls)
        gradients.append({n: p.grad for n, p in parent.named_parameters() if p.grad is not None})
    assert counts[0] == counts[1]
    assert counts[0] or not operator
    assert gradients[0].keys() == gradients[1].keys()
    assert [n for n in gradients[0] if not torch.equal(gradients[0][n], gradients[1][n])] == []


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_weight_that_is_kept_is_dequantized_once_for_recomputation_and_backward(kind: Any) -> None:
    """Two blocks of seven layers: but for the three of the first block whose input gets no gradient."""
    counts, gradients = [], []
    for keeps in (False, True):
        torch.manual_seed(0)
        model = build_language_model("llama", hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=2)
        quantize_model(model, Quantization(type=kind))
        add_adapters(model, LoRA(r=4))
        materialize(model, torch.device("cpu"))
        init_weights(model, 0)
        parent = Parent(model)
        recompute = ActivationCheckpointing(mode="full", keep_dequantized=keeps)
        apply_activation_checkpointing(parent, recompute, list(iterate_blocks(plan_units(parent, Wrap()))))
        # The product of bitsandbytes dequantizes inside; for int8, codes are multiplied by their scales.
        with CountCalls("bitsandbytes.gemm_4bit" if kind == "nf4" else "aten.mul") as calls:
            loss = compute_loss(parent, make_tokens())
            loss.backward()
        counts.append(calls.num_calls)
        gradients.append({n: p.grad for n, p in parent.named_parameters() if p.grad is not None} | {"loss": loss})
        assert not any(layer.kept for _, layer in iterate_quantized(model))
    assert counts[0] - counts[1] == 2 * 7 - 3
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) == 2 * 2 * 7 + 1
    assert [n for n in gradients[0] if not torch.equal(gradients[0][n], gradients[1][n])] == []


class CountCalls(TorchDispatchMode):
    """Counts how often an operator is computed."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.num_calls = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += str(func.overloadpacket) == self.name
        return func(*args, **(kwargs or {}))
