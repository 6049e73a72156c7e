"""MLPs in pieces of the sequence: the same training and as many FLOPs, with less kept of them."""

import copy
import pickle
from pathlib import Path
from typing import Any

import adapter_training
import pytest
import torch
from differences import find_largest
from models import Block, Parent, build_language_model, compute_loss, make_tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from training import EVEN, list_differences, save_model, train_plainly, train_sharded
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import ActivationCheckpointing, Compile, CPUOffload, Mesh, Sharding
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.layers import iterate_quantized, quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import apply_activation_checkpointing
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import Wrap, iterate_blocks, plan_units
from lit_fsdp.weights.load import init_weights, materialize

TOLERANCE = 1e-6
WHOLE = ActivationCheckpointing(mode="full")
PIECES = ActivationCheckpointing(mode="full", mlp_chunks=3)


def apply(model: nn.Module, settings: ActivationCheckpointing) -> None:
    apply_activation_checkpointing(model, settings, list(iterate_blocks(plan_units(model, Wrap()))))


def build(family: str, *, quantization: Quantization | None = None, **config: Any) -> Parent:
    torch.manual_seed(0)
    if quantization is None:
        return Parent(build_language_model(family, "cpu", **config)).train()
    model = build_language_model(family, **{"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, **config})
    quantize_model(model, quantization)
    add_adapters(model, LoRA(r=4, dropout=0.0))
    materialize(model, torch.device("cpu"))
    init_weights(model, 0)
    return Parent(model).train()


def run(model: Parent, *, length: int = 8) -> tuple[dict[str, Tensor], int]:
    """Return the loss and all gradients, and the FLOPs of forward and backward."""
    torch.manual_seed(1)
    tokens = make_tokens(length=length)
    with FlopCounterMode(display=False) as flops:
        # Of each token itself, as a single one has no next.
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach()}, flops.get_total_flops()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "nf4 + lora": ("llama", {"quantization": Quantization()}),
    "int8 + lora": ("llama", {"quantization": Quantization(type="int8")}),
    "experts": ("qwen3_moe", {}),
    "nf4 experts + lora": ("mixtral", {"quantization": Quantization()}),
    "experts that return their scores": ("gpt_oss", {}),
    "parallel to attention": ("gpt_neox", {"hidden_dropout": 0.0}),
}
QUICK = ("llama", "nf4 + lora", "experts")


@pytest.mark.parametrize(
    ("case", "length"),
    [
        *[pytest.param(name, 8, marks=[] if name in QUICK else pytest.mark.full) for name in CASES],  # 3, 3 and 2
        ("llama", 2),  # as many pieces as tokens
        ("llama", 1),
    ],
)
def test_pieces_compute_the_same_with_as_many_flops(case: str, length: int) -> None:
    family, options = CASES[case]
    found = []
    for settings in (None, WHOLE, PIECES):
        model = build(family, **options)
        if settings is not None:
            apply(model, settings)
        found.append(run(model, length=length))
    (truth, _), (_, flops), (values, own_flops) = found
    assert own_flops == flops > 0
    assert values.keys() == truth.keys()
    assert find_largest(float((values[name] - truth[name]).abs().max()) for name in truth) <= TOLERANCE


def test_a_norm_after_the_mlp_takes_its_forward_once_more_and_changes_nothing() -> None:
    models = [build("gemma3_text") for _ in range(2)]
    for model, settings in zip(models, (WHOLE, PIECES), strict=True):
        apply(model, settings)
    (truth, flops), (values, own_flops) = map(run, models)
    tokens, width, inner = 2 * 8, 32, 64
    # Recomputation would have ended before the last product of the MLP, but for the norm; pieces end there.
    assert own_flops - flops == 3 * 2 * 2 * tokens * width * inner
    assert find_largest(float((values[name] - truth[name]).abs().max()) for name in truth) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama", "nf4 + lora"])
def test_nothing_as_wide_as_the_mlp_is_ever_there_whole(case: str) -> None:
    family, options = CASES[case]
    found = []
    for settings in (WHOLE, PIECES):
        model = build(family, **options)
        apply(model, settings)
        with WidestTensor(model.model.config.intermediate_size, {p.shape[0] for p in model.parameters()}) as widest:
            compute_loss(model, make_tokens(length=60)).backward()
        found.append(widest.num_tokens)
    assert found == [2 * 60, 2 * 20]


class CountProducts(TorchDispatchMode):
    """Counts products with 4-bit weights, each of which dequantizes them."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += str(func.overloadpacket) == "bitsandbytes.gemm_4bit"
        return func(*args, **(kwargs or {}))


class WidestTensor(TorchDispatchMode):
    """The most tokens of what any operator returns that is as wide as the MLP inside."""

    def __init__(self, width: int, rows_of_weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width, self.rows_of_weights, self.num_tokens = width, rows_of_weights, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() >= 2 and out.shape[-1] == self.width:
            num_tokens = 0 if out.shape[-2] in self.rows_of_weights else out.numel() // self.width
            self.num_tokens = max(self.num_tokens, num_tokens)
        return out


class DroppingMLP(nn.Module):
    """Takes two tensors, one of them by keyword, and a number; notes what it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)
        self.dropped: list[Tensor] = []

    def forward(self, x: Tensor, *, scale: float, gate: Tensor) -> Tensor:
        mask = self.dropout(torch.ones(*x.shape[:-1], 64))
        self.dropped.append(mask == 0)
        return self.down(torch.relu(self.up(x)) * mask) * scale * gate


class DroppingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), DroppingMLP()

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)  # the random state is not that at the start of the block
        return x + self.mlp(self.norm(x), scale=2.0, gate=x.sigmoid())


def compute_twice(model: nn.Module) -> list[Tensor]:
    """Return the gradients of two backwards over one graph, under autocast."""
    torch.manual_seed(2)
    x = torch.linspace(-1, 1, 2 * 7 * 16).view(2, 7, 16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().sum()
    torch.rand(5)
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in (x, *model.parameters()) if p.grad is not None]


def test_a_graph_may_be_used_twice_under_autocast() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(DroppingBlock()).eval()  # pieces would draw other numbers than the whole
    pieces = copy.deepcopy(whole)
    apply_activation_checkpointing(whole, WHOLE, ["0"])
    apply_activation_checkpointing(pieces, PIECES, ["0"])
    found = [compute_twice(model) for model in (whole, pieces)]
    assert len(found[0]) == 1 + 6
    for one, other in zip(*found, strict=True):  # sums over tokens are rounded to bfloat16 in each piece
        assert float((one - other).abs().max() / one.abs().max()) <= 2**-6


def test_a_piece_drops_again_what_it_dropped_in_forward_also_in_copies() -> None:
    model = nn.Sequential(DroppingBlock())
    apply_activation_checkpointing(model, PIECES, ["0"])
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        dropped: Any = each[0].mlp.dropped
        dropped.clear()
        compute_twice(each)
        forward, first, second = dropped[:3], dropped[3:6], dropped[6:]
        assert len({tuple(mask.flatten().tolist()) for mask in forward}) == 3
        for again in (first, second):  # the last piece first
            assert all(torch.equal(one, other) for one, other in zip(forward, reversed(again), strict=True))


def test_kept_weights_are_dequantized_once_for_recomputation_and_backward_of_a_piece() -> None:
    found, counts = [], []
    for settings in (
        PIECES,
        ActivationCheckpointing(mode="full", mlp_chunks=3, keep_dequantized=True, offload=True),
    ):
        model = build("llama", quantization=Quantization())
        apply(model, settings)
        with CountProducts() as products:
            found.append(run(model)[0])
        counts.append(products.num_calls)
        assert not any(layer.kept for _, layer in iterate_quantized(model))
    assert counts[1] < counts[0]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_generation_and_evaluation_need_no_graph() -> None:
    model = build("llama").eval()
    tokens = make_tokens()
    truth = model.model.generate(tokens, max_new_tokens=4, do_sample=False)
    apply(model, PIECES)
    assert torch.equal(model.model.generate(tokens, max_new_tokens=4, do_sample=False), truth)


# Sharded training

RANKS = [pytest.param(1, marks=pytest.mark.full), 2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = save_model(tmp_path_factory.mktemp("llama") / "model", **EVEN)
    return folder, train_plainly(folder)


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (2, {}),
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(2, {"mesh": Mesh(tensor=2)}, marks=pytest.mark.full),
        pytest.param(2, {"mesh": Mesh(sequence=2)}, marks=pytest.mark.full),
        pytest.param(2, {"cpu_offload": CPUOffload(pin_memory=False)}, marks=pytest.mark.full),
        pytest.param(2, {"sharding": Sharding(reshard_after_forward=False, no_sync=True)}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sharded_training_equals_one_device(
    world_size: int, strategy: dict[str, Any], llama: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, truth = llama
    recompute = ActivationCheckpointing(mode="full", mlp_chunks=3, offload="cpu_offload" not in strategy)
    more = {"accumulate_grad_batches": 2} if "sharding" in strategy else {}
    result = train_sharded(
        folder,
        tmp_path,
        world_size=world_size,
        strategy={"activation_checkpointing": recompute, **strategy},
        **more,
    )
    assert len(result.losses) == 8
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
@pytest.mark.parametrize("world_size", RANKS)
def test_sharded_nf4_with_adapters_equals_stock_libraries(world_size: int, tmp_path: Path) -> None:
    folder, settings = save_model(tmp_path / "model", **adapter_training.SIZES), Quantization()
    result, start = adapter_training.train_sharded(
        folder, tmp_path, world_size, strategy={"activation_checkpointing": PIECES}, quantization=settings
    )
    truth = adapter_training.train_plainly(folder, start, settings, adapter_training.LORA)
    differences = adapter_training.compare(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
@pytest.mark.parametrize("world_size", RANKS)
def test_sharded_experts_equal_one_device(world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {**EVEN, "num_local_experts": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes)).save_pretrained(tmp_path / "model")
    truth = train_plainly(tmp_path / "model")
    strategy = {"activation_checkpointing": PIECES}
    result = train_sharded(tmp_path / "model", tmp_path, world_size=world_size, strategy=strategy)
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ActivationCheckpointing(mlp_chunks=4),
            "mlp_chunks: got 4 with mode 'none', which keeps what MLPs compute; set",
        ),
        (ActivationCheckpointing(mode="selective", mlp_chunks=4), "mlp_chunks: got 4 with mode 'selective'"),
        (ActivationCheckpointing(mode="full", mlp_chunks=1), "mlp_chunks: got 1: expected 2 or more, or null"),
        (PIECES, r"got 3: block 0, a Block, has no part called mlp, .* or DenseReluDense, only norm, up, down; leave"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(settings: ActivationCheckpointing, message: str) -> None:
    model = nn.Sequential(Block())
    with pytest.raises(ValueError, match=message):
        apply_activation_checkpointing(model, settings, ["0"])
    assert "forward" not in vars(model[0])


def test_beside_compile_it_is_refused() -> None:
    settings = Settings(activation_checkpointing=PIECES, compile=Compile())
    with pytest.raises(ValueError, match=r"mlp_chunks: got 3 with compile: .* leave one of them out"):
        settings.check(world_size=1, ranks_per_node=1, device=torch.device("cpu"))


def test_losses_of_routers_are_refused() -> None:
    model = build("mixtral", output_router_logits=True)
    with pytest.raises(ValueError, match=r"config.output_router_logits of model is true: .* set it to false"):
        apply(model, PIECES)


@pytest.mark.parametrize(
    "part",
    [nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16), nn.GRU(16, 16), nn.ZeroPad2d((0, 0, 1, -1)), nn.GroupNorm(2, 16)],
    ids=lambda p: type(p).__name__,
)
def test_tokens_that_depend_on_each_other_are_refused(part: nn.Module) -> None:
    model = nn.Sequential(nn.Sequential(Block(16)))
    model[0].mlp = nn.Sequential(nn.Linear(16, 16), part)
    with pytest.raises(ValueError, match=rf"got 3: 0.mlp.1, a {type(part).__name__}, lets tokens depend on each other"):
        apply_activation_checkpointing(model, PIECES, ["0"])


def test_a_block_that_would_compute_the_larger_part_whole_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(Block(16)))
    model[0].mlp, model[0].experts = nn.Linear(16, 16), nn.Linear(16, 64)
    with pytest.raises(ValueError, match=r"got 3: block 0, a Sequential, computes experts beside 0.mlp, which would"):
        apply_activation_checkpointing(model, PIECES, ["0"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mlp, x: mlp(x, x[:1]), "0.mlp is not called with tensors .* of the same tokens alone"),
        (lambda mlp, x: mlp(), "0.mlp is not called with tensors"),
        (lambda mlp, x: mlp(x).mean(), "0.mlp returns what is not one value for each token"),
    ],
)
def test_what_is_no_mlp_by_what_it_takes_and_returns_is_refused_in_the_first_step(call: Any, message: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *args: Tensor) -> Tensor:
            return self.linear(args[0]).mean() if "returns" in message else args[0]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Odd()

        def forward(self, x: Tensor) -> Any:
            return call(self.mlp, x)

    model = nn.Sequential(Layer())
    apply_activation_checkpointing(model, PIECES, ["0"])
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, 4, 4, requires_grad=True))
