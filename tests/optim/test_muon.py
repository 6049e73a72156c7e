"""Muon over AdamW as one optimizer: the bits of torch's two on one device, on whatever ranks hold the parameters."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixed_gradients import MESHES, build_weights, list_unequal, run_steps, set_gradients, shard
from models import to_full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

from lit_fsdp.optim.muon import Muon, count_work, list_hidden_matrices, orthogonalize
from ranks import run_ranks

HIDDEN = {"aligned", "experts", "unaligned", "few_rows"}  # as if "short_rows" were an embedding
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def build(module: nn.Module) -> Muon:
    """Return the optimizer of the parameters that ``build_weights`` makes."""
    named = dict(module.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if (n in HIDDEN) is is_hidden], "is_hidden": is_hidden}
        for is_hidden in (True, False)
    ]
    return Muon(groups, **OPTIONS)


def train_with_torch(num_steps: int) -> dict[str, Tensor]:
    """Return the weights after steps of torch's own optimizers, each expert by itself."""
    module = build_weights()
    named = dict(module.named_parameters())
    matrices = {n: [p] if p.ndim == 2 else [nn.Parameter(e) for e in p.detach()] for n, p in named.items()}
    muon = torch.optim.Muon([m for n in sorted(HIDDEN) for m in matrices[n]], **OPTIONS, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([p for n, p in named.items() if n not in HIDDEN], **OPTIONS)
    for step in range(num_steps):
        set_gradients(module, step)
        for expert, gradient in zip(matrices["experts"], named["experts"].grad, strict=True):
            expert.grad = gradient
        muon.step()
        adamw.step()
    named["experts"].data = torch.stack(matrices["experts"])
    return {n: p.detach() for n, p in named.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_has_the_bits_of_torch_on_one_device(mesh: str) -> None:
    world_size, num_copies = MESHES[mesh]
    truth = train_with_torch(3)

    def body() -> None:
        module = shard(build_weights(), num_copies)
        optimizer = build(module)
        run_steps(module, optimizer, range(3))
        found = {n: to_full(p.detach()) for n, p in module.named_parameters()}
        assert list_unequal(found, truth) == []
        kept = {n: {*optimizer.state[p]} - {"step"} for n, p in module.named_parameters()}
        assert {n for n, keys in kept.items() if keys == {"momentum_buffer"}} == HIDDEN

    run_ranks(body, world_size=world_size)


@pytest.mark.parametrize("shape", [(96, 32), (32, 96), (3, 32, 48), (0, 32, 48)])
def test_singular_values_become_about_one(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))).float())
    assert ((values > 0.6) & (values < 1.3)).all()


def test_what_a_step_computes_and_sends_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        # Two ranks step two equal matrices in one exchange, and the third one alone; experts are whole already.
        model = nn.ParameterList(torch.randn(shape) for shape in [(64, 256), (64, 256), (32, 16), (4, 16, 24)])
        shapes = [parameter.shape for parameter in model]
        shard(model)
        optimizer, sent, exchange = (
            Muon([{"params": model.parameters(), "is_hidden": True}]),
            [],
            dist.all_to_all_single,
        )

        def count(received: Tensor, given: Tensor, *args: Any, **options: Any) -> Any:
            sent.append(given.nbytes)
            return exchange(received, given, *args, **options)

        monkeypatch.setattr(dist, "all_to_all_single", count)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        flops, sizes = count_work(shapes, 2)
        assert sent[::2] == sizes[::2]  # there; back, the owner of a matrix sends all of it
        total = torch.tensor(counter.get_total_flops())
        dist.all_reduce(total)
        assert total == 2 * flops

    run_ranks(body)


def test_what_is_hidden_are_matrices_of_blocks_sharded_or_not() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts)

    def body() -> None:
        model = AutoModel.from_config(config)
        parts = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate", "gate_up_proj", "down_proj")
        expected = {n for n, _ in model.named_parameters() if any(part in n for part in parts)}
        for is_sharded in (False, True):
            if is_sharded:
                for layer in model.layers:
                    fully_shard(layer)
                fully_shard(model)
            hidden = list_hidden_matrices(model)
            assert {n for n, p in model.named_parameters() if p in hidden} == expected
        assert len(expected) == 2 * len(parts)

    run_ranks(body, world_size=1)


@pytest.mark.parametrize(
    ("model_type", "sizes", "others"),
    [
        ("swin", {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "image_size": 32}, "bias_table"),
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}, "A_log"),
        ("rwkv", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}, "time_"),
    ],
)
def test_tables_and_vectors_of_blocks_are_left_to_adamw(model_type: str, sizes: dict[str, Any], others: str) -> None:
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes))
    hidden = list_hidden_matrices(model)
    names = [name for name, parameter in model.named_parameters() if parameter in hidden]
    assert len(names) >= 4
    assert not any(others in name for name in names)


def test_a_copy_steps_as_it_does() -> None:
    matrix = nn.Parameter(torch.ones(8, 4))
    optimizer = copy.deepcopy(Muon([{"params": [matrix], "is_hidden": True}]))
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones(8, 4)
    optimizer.step()
    assert optimizer.state[parameter].keys() == {"step", "momentum_buffer"}


def test_what_it_has_no_whole_matrices_of_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a parameter of shape \(8,\): expected a matrix or a stack"):
        Muon([{"params": [nn.Parameter(torch.zeros(8))], "is_hidden": True}])

    def body() -> None:
        twice = distribute_tensor(torch.zeros(8, 8), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)])
        with pytest.raises(ValueError, match=r"rows split over dimensions \[0, 1\] of the mesh: expected one"):
            Muon([{"params": [nn.Parameter(twice)], "is_hidden": True}])

    run_ranks(body, world_size=4)
