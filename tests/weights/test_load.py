"""One seed is one model at every world size, and files are read bit for bit; what nothing fills is named."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Parent, Stack, build_image_model, build_language_model, compute_loss, make_tokens, to_full
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM, RegNetConfig, RegNetModel

from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.wrap import Wrap, iterate_blocks, plan_units
from lit_fsdp.weights.load import init_weights, iterate_meta, load_weights, materialize
from ranks import run_ranks

CPU = torch.device("cpu")


def shard(
    model: nn.Module, units: Wrap | None = None, checkpointing: ActivationCheckpointing | None = None
) -> nn.Module:
    plan = plan_units(model, units or Wrap())
    apply_activation_checkpointing(model, checkpointing or ActivationCheckpointing(), list(iterate_blocks(plan)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    options = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    shard_model(model, plan, mesh=mesh, sharding=Sharding(), **options)
    return model


def read_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers in full, also those outside the state dict."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {n: to_full(t).detach().clone() for n, t in tensors}


def list_unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def build_stack() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Stack(), nn.BatchNorm1d(3))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build_language_model("llama"),
    "llama tied": lambda: build_language_model("llama", tie_word_embeddings=True),
    "mixtral": lambda: build_language_model("mixtral"),
    "gpt2": lambda: build_language_model("gpt2"),
    "opt": lambda: build_language_model("opt"),
    "qwen2": lambda: build_language_model("qwen2"),
    "qwen3_moe": lambda: build_language_model("qwen3_moe"),
    "gemma3_text": lambda: build_language_model("gemma3_text"),
    "gpt_neox in a parent": lambda: Parent(build_language_model("gpt_neox")),
    "vit": build_image_model,
    "stack": build_stack,
}


def initialize(model: nn.Module, seed: int = 7) -> dict[str, Tensor]:
    materialize(model, CPU)
    init_weights(model, seed)
    assert list(iterate_meta(model)) == []
    return read_state(model)


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Tensor]]:
    return {name: initialize(build()) for name, build in BUILDERS.items()}


@pytest.mark.full(after=1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_seed_gives_one_model_at_every_world_size(world_size: int, whole: dict[str, dict[str, Tensor]]) -> None:
    def body() -> None:
        torch.manual_seed(dist.get_rank())  # the state of each rank's own generator must not matter
        before = torch.get_rng_state()
        for name, build in BUILDERS.items():
            assert list_unequal(initialize(shard(build())), whole[name]) == [], name
        assert torch.equal(torch.get_rng_state(), before)

    run_ranks(body, world_size=world_size)


@pytest.mark.full
def test_neither_the_plan_nor_recompute_changes_the_weights(whole: dict[str, dict[str, Tensor]]) -> None:
    plans = [
        Wrap(module_classes=["LlamaMLP", "LlamaAttention"]),
        Wrap(policy="min_size", min_num_params=3000),
        Wrap(policy="repeated_blocks", own_embeddings=False),
    ]

    def body() -> None:
        for name in ("llama", "llama tied"):
            for units in plans:
                for mode in (ActivationCheckpointing(), ActivationCheckpointing(mode="full", every_n_blocks=2)):
                    model = shard(BUILDERS[name](), units, mode)
                    assert list_unequal(initialize(model), whole[name]) == [], (name, units, mode)

    run_ranks(body)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_another_seed_is_another_model_and_no_two_modules_are_alike(
    name: str, whole: dict[str, dict[str, Tensor]]
) -> None:
    other = initialize(BUILDERS[name](), seed=8)
    drawn = [n for n, t in whole[name].items() if t.is_floating_point() and t.ndim >= 2 and t.std() > 0]
    assert drawn
    assert [n for n in drawn if torch.equal(other[n], whole[name][n])] == []
    state = whole[name]
    twins = [
        (a, b)
        for i, a in enumerate(drawn)
        for b in drawn[i + 1 :]
        if state[a].shape == state[b].shape and torch.equal(state[a], state[b]) and "lm_head" not in b
    ]
    assert twins == []


def test_weights_have_the_spread_the_model_asks_for_and_buffers_their_values() -> None:
    model = build_language_model("llama", hidden_size=64, vocab_size=500, initializer_range=0.05)
    state = initialize(model)
    normal = build_language_model("llama", "cpu", hidden_size=64, vocab_size=500, initializer_range=0.05)
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            num = parameter.numel() - (64 if "embed" in name else 0)  # the row of the padding is zero
            std = float(parameter.square().sum() / num) ** 0.5
            assert std == pytest.approx(0.05, rel=4 / math.sqrt(2 * num)), name
            assert abs(float(parameter.mean())) < 5 * 0.05 / math.sqrt(num), name
    expected = dict(normal.named_buffers())
    assert expected
    assert list_unequal({n: b for n, b in state.items() if n in expected}, expected) == []


def test_gpt2_keeps_its_scaled_projections(whole: dict[str, dict[str, Tensor]]) -> None:
    for i in range(3):
        for part in ("attn", "mlp"):
            std = float(whole["gpt2"][f"transformer.h.{i}.{part}.c_proj.weight"].std())
            assert std == pytest.approx(0.02 / math.sqrt(2 * 3), rel=0.1)


def test_tied_weights_stay_one_parameter_and_train_as_one() -> None:
    torch.manual_seed(0)
    plain = build_language_model("llama", "cpu", tie_word_embeddings=True)

    def body() -> None:
        model = shard(build_language_model("llama", tie_word_embeddings=True))
        initialize(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        plain.load_state_dict({n: t for n, t in read_state(model).items() if "inv_freq" not in n})
        for m in (model, plain):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                compute_loss(m, make_tokens()).backward()
                optimizer.step()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        expected = read_state(plain)
        for name, tensor in read_state(model).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)

    run_ranks(body)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


class Shifted(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(1, 4).to(dtype), persistent=persistent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32])
def test_what_nothing_sets_is_refused_by_name(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(2, 2), Bare())
        shifted = nn.Sequential(nn.Linear(2, 2), Shifted(dtype))
    materialize(bare, CPU)
    with pytest.raises(
        ValueError, match=r"^1\.gain: nothing initializes this parameter.*reset_parameters.*set pretrained"
    ):
        init_weights(bare, 0)
    assert isinstance(bare[1].gain, nn.Parameter)
    materialize(shifted, CPU)
    with pytest.raises(ValueError, match=r"^1\.shift: nothing sets these buffers"):
        init_weights(shifted, 0)


def test_buffers_that_only_a_module_around_sets_are_set_beside_weights_of_files(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("kept", torch.full((2,), 5.0))
            self.register_buffer("factor", torch.ones(2), persistent=False)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def reset_parameters(self) -> None:
            for layer in self.layers:
                layer.linear.reset_parameters()
                layer.kept.zero_()
                layer.factor.fill_(3.0)

    plain = Layers()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")

    class Reader(nn.Module):
        """Reads a weight, so it cannot run beside those of files; nothing needs it to."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            self.linear.weight.data.div_(float(self.linear.weight.norm()))

    reader = Reader()
    (tmp_path / "reader").mkdir()
    save_file(reader.state_dict(), tmp_path / "reader" / "model.safetensors")

    def body() -> None:
        with torch.device("meta"):
            model, other = shard(Layers()), shard(Reader())
        materialize(other, CPU)
        load_weights(other, tmp_path / "reader")
        assert all(to_full(value).equal(reader.state_dict()[name]) for name, value in other.state_dict().items())
        materialize(model, CPU)
        load_weights(model, tmp_path)
        assert [layer.factor.tolist() for layer in model.layers] == [[3.0, 3.0]] * 2
        assert all(to_full(value).equal(plain.state_dict()[name]) for name, value in model.state_dict().items())

    run_ranks(body)


def test_integer_parameters_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
        model.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    materialize(model, CPU)
    with pytest.raises(ValueError, match="codes"):
        init_weights(model, 0)


def test_an_error_while_initializing_leaves_the_sharded_parameters_in_place() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise RuntimeError("no luck")

    def body() -> None:
        with torch.device("meta"):
            model = shard(nn.Sequential(nn.Linear(2, 2), Broken(2, 2)))
        materialize(model, CPU)
        with pytest.raises(RuntimeError, match="no luck"):
            init_weights(model, 0)
        assert all(isinstance(p, DTensor) for p in model.parameters())

    run_ranks(body)


def test_materialize_keeps_values_flags_and_ties() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.add_module("real", nn.BatchNorm1d(2))
    model.real.running_mean.fill_(5.0)
    model.real.weight.data.fill_(6.0)
    weight = model.real.weight
    materialize(model, CPU)
    assert model[1].weight is model[0].weight
    assert [p.requires_grad for p in model[0].parameters()] == [True, False]
    assert model.real.weight is weight
    assert model.real.weight.tolist() == [6.0, 6.0]
    assert model.real.running_mean.tolist() == [5.0, 5.0]
    assert bool(torch.isnan(model[2].running_mean).all())


def test_materialize_takes_buffers_and_metrics_along_and_parameters_elsewhere() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.metric = MeanMetric()
    model.metric.update(3.0)
    with torch.device("meta"):
        model.empty = nn.Linear(2, 2)
    # "meta" stands for a GPU here: any device but the one they are on.
    materialize(model, torch.device("meta"), parameter_device=CPU)
    assert model.metric.mean_value.is_meta
    assert model.metric.device.type == "meta"
    assert model[0].running_mean.is_meta
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert model[0].weight.tolist() == [1.0, 1.0]


@pytest.fixture(scope="module", params=["llama", "llama tied", "gpt2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    family, _, tied = request.param.partition(" ")
    torch.manual_seed(0)
    model = build_language_model(family, "cpu", **({"tie_word_embeddings": True} if tied else {}))
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "parts", max_shard_size="30KB")
    assert (folder / "one" / "model.safetensors").is_file()
    assert len(list((folder / "parts").glob("model-*.safetensors"))) > 2
    return request.param, {"one": folder / "one", "parts": folder / "parts"}


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_files_are_read_bit_for_bit(saved: tuple[str, dict[str, Path]], world_size: int) -> None:
    name, folders = saved
    expected = read_state(AutoModelForCausalLM.from_pretrained(folders["one"], dtype=torch.float32))

    def body() -> None:
        for folder in folders.values():
            for model in (
                BUILDERS[name](),
                shard(BUILDERS[name](), checkpointing=ActivationCheckpointing(mode="full")),
            ):
                materialize(model, CPU)
                load_weights(model, folder)
                assert list_unequal(read_state(model), expected) == []

    run_ranks(body, world_size=world_size)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    build_language_model("llama", "cpu").save_pretrained(tmp_path, max_shard_size="30KB")
    path = next(iter(sorted(tmp_path.glob("model-*.safetensors"))))
    path.write_bytes(path.read_bytes()[:-100])
    model = build_language_model("llama")
    materialize(model, CPU)
    with pytest.raises(ValueError, match=f"{path.name}.*download the file again"):
        load_weights(model, tmp_path)


def test_files_of_another_dtype_are_cast_to_the_models(tmp_path: Path) -> None:
    model = build_language_model("llama", "cpu").bfloat16()
    model.save_pretrained(tmp_path)
    loaded = build_language_model("llama")
    materialize(loaded, CPU)
    load_weights(loaded, tmp_path)
    expected = {name: p.detach().float() for name, p in model.named_parameters()}
    assert list_unequal({n: p.detach() for n, p in loaded.named_parameters()}, expected) == []


def write_broken(how: str, folder: Path) -> None:
    model = build_language_model("llama", "cpu")
    model.save_pretrained(folder, max_shard_size="30KB" if how == "part" else "1GB")
    if how == "part":
        next(iter(sorted(folder.glob("model-*-of-*.safetensors")))).unlink()
        return
    path = folder / "model.safetensors"
    state = load_file(path)
    if how == "missing":
        del state["model.layers.1.mlp.up_proj.weight"]
    elif how == "unknown":
        state["model.layers.9.bias"] = torch.zeros(2)
    elif how == "shape":
        state["lm_head.weight"] = torch.zeros(68, 32)
    elif how == "turned":
        state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(32, 64)
    path.unlink()
    if how != "empty":
        save_file(state, path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"does not fit LlamaForCausalLM: it lacks model.layers.1.mlp.up_proj.weight$"),
        ("unknown", r"has tensors unknown to the model: model.layers.9.bias$"),
        ("shape", r"lm_head.weight has shape \(68, 32\), the model's \(67, 32\)"),
        ("turned", r"model.layers.0.mlp.up_proj.weight has shape \(32, 64\), the model's \(64, 32\)"),
        ("part", r"names files that are not there: model-00001-of-"),
        ("empty", r"expected model.safetensors or model.safetensors.index.json in this folder"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(how: str, message: str, tmp_path: Path) -> None:
    write_broken(how, tmp_path)
    model = build_language_model("llama")
    materialize(model, CPU)
    with pytest.raises(ValueError, match=message):
        load_weights(model, tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused_by_name(tmp_path: Path) -> None:
    build_language_model("llama", "cpu").save_pretrained(tmp_path, max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.json"
    content: dict[str, Any] = json.loads(index.read_text())
    files = content["weight_map"]
    files["lm_head.weight"] = next(f for f in files.values() if f != files["lm_head.weight"])
    index.write_text(json.dumps(content))
    model = build_language_model("llama")
    materialize(model, CPU)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_weights(model, tmp_path)


def test_what_a_model_leaves_as_its_modules_have_it_is_drawn_as_they_draw_it() -> None:
    # RegNet draws the weight of a convolution and leaves its bias to torch.
    config = RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8)
    with torch.device("meta"):
        model = RegNetModel(config)
    materialize(model, CPU)
    init_weights(model, 0)
    found = dict(model.named_parameters())
    name = next(name for name in found if name.endswith("attention.2.bias"))
    assert found[name].abs().max() <= found[name.replace("bias", "weight")][0].numel() ** -0.5  # as nn.Conv2d
    assert all(parameter.isfinite().all() for parameter in found.values())
    assert found[name].unique().numel() == found[name].numel()
