"""Every parameter lands in exactly one unit, whatever the rule, the model family and who holds the model."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Parent, Stack, build_image_model, build_language_model
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from lit_fsdp.profiling.expected_communication import estimate_collectives
from lit_fsdp.sharding.mesh import MeshSizes
from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.unit_table import make_table
from lit_fsdp.sharding.wrap import Unit, Wrap, count_shard_bytes, iterate_blocks, plan_units
from ranks import run_ranks

RULES = [
    Wrap(),
    Wrap(own_embeddings=False),
    Wrap(policy="model_plan"),
    Wrap(policy="no_split_modules"),
    Wrap(policy="repeated_blocks"),
    Wrap(policy="min_size", min_num_params=1),
    Wrap(policy="min_size", min_num_params=3000),
    Wrap(policy="min_size", min_num_params=10**9),
    Wrap(module_classes=["*Layer", "*Block", "*MLP", "*Attention"]),
]


def check_ownership(model: nn.Module, plan: list[Unit]) -> None:
    expected = {name: p.numel() for name, p in model.named_parameters()}
    owned = [name for unit in plan for name in unit.parameters]
    assert sorted(owned) == sorted(expected)
    assert sum(unit.num_params for unit in plan) == sum(expected.values())
    assert plan[-1].names == ("",)
    assert plan[-1].kind == "root"
    assert [unit.kind for unit in plan].count("root") == 1
    names = [name for unit in plan for name in unit.names]
    assert len(names) == len(set(names))
    modules = dict(model.named_modules())
    for unit in plan:
        assert unit.num_params == sum(expected[name] for name in unit.parameters)
        for name in unit.parameters:
            inside = [n for n in names if not n or name.startswith(f"{n}.")]
            assert max(inside, key=len) in unit.names
        # Their forward is never called, so they could not gather anything.
        assert not any(isinstance(modules[name], nn.ModuleList | nn.ModuleDict) for name in unit.names)


def describe(wrap: Wrap) -> str:
    return f"{wrap.policy}-{wrap.min_num_params or ''}{'' if wrap.own_embeddings else 'embeddings-in-root'}"


def shape_of(plan: list[Unit]) -> list[tuple[str, tuple[str, ...]]]:
    return [(unit.kind, unit.names) for unit in plan]


@pytest.mark.parametrize("rule", RULES, ids=describe)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt_neox", "opt", "gpt2", "vit"])
def test_every_parameter_is_in_one_unit_alone_or_inside_a_parent(family: str, rule: Wrap) -> None:
    model = build_image_model() if family == "vit" else build_language_model(family)
    if (family, rule.policy) == ("gpt2", "model_plan"):
        rule = Wrap()  # does not fit by itself, which is the claim of another test
    plan = plan_units(model, rule)
    check_ownership(model, plan)
    parent = Parent(model)
    inside = plan_units(parent, rule)
    check_ownership(parent, inside)
    if rule.policy != "min_size":  # there the model itself may become a unit of its parent
        moved = [(kind, tuple(f"model.{name}" for name in names)) for kind, names in shape_of(plan[:-1])]
        assert shape_of(inside[:-1]) == moved


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_the_models_own_plan_gathers_norm_and_head_together(family: str) -> None:
    plan = plan_units(build_language_model(family), Wrap())
    assert shape_of(plan) == [
        ("embedding", ("model.embed_tokens",)),
        *(("block", (f"model.layers.{i}",)) for i in range(3)),
        ("head", ("model.norm", "lm_head")),
        ("root", ("",)),
    ]
    assert plan[-1].num_params == 0
    assert list(iterate_blocks(plan)) == [f"model.layers.{i}" for i in range(3)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_tied_weights_and_their_norm_land_in_the_root(family: str) -> None:
    model = build_language_model(family, tie_word_embeddings=True)
    plan = plan_units(model, Wrap())
    assert shape_of(plan) == [*(("block", (f"model.layers.{i}",)) for i in range(3)), ("root", ("",))]
    assert plan[-1].parameters == ("model.embed_tokens.weight", "model.norm.weight")
    assert plan[-1].num_params == 67 * 32 + 32


def test_a_unit_around_tied_weights_does_not_share_them_with_the_root() -> None:
    model = build_language_model("llama", tie_word_embeddings=True)
    wrap = Wrap(policy="min_size", min_num_params=200)  # all norms together, so ``model`` would be a unit
    assert ("block", ("model",)) in shape_of(plan_units(build_language_model("llama", tie_word_embeddings=False), wrap))
    plan = plan_units(model, wrap)
    assert ("block", ("model",)) not in shape_of(plan)
    assert "model.embed_tokens.weight" in plan[-1].parameters


def test_a_plan_that_does_not_fit_falls_to_the_marked_blocks() -> None:
    model = build_language_model("gpt2")
    assert "transformer.layers.*" in model.fsdp_plan  # inherited; GPT-2 has h
    plan = plan_units(model, Wrap())
    assert shape_of(plan) == [*(("block", (f"transformer.h.{i}",)) for i in range(3)), ("root", ("",))]
    with pytest.raises(ValueError, match=r"wrap.policy: got 'model_plan': it finds nothing in GPT2LMHeadModel"):
        plan_units(model, Wrap(policy="model_plan"))


def test_a_plan_that_fits_in_part_gets_the_ends_it_lacks() -> None:
    model = build_language_model("gpt_neox", tie_word_embeddings=False)
    plan = plan_units(model, Wrap())
    assert shape_of(plan) == [
        ("embedding", ("gpt_neox.embed_in",)),
        *(("block", (f"gpt_neox.layers.{i}",)) for i in range(3)),
        ("head", ("lm_head",)),
        ("root", ("",)),
    ]


def test_a_class_that_holds_embeddings_and_all_layers_is_a_block() -> None:
    plan = plan_units(build_language_model("llama", tie_word_embeddings=False), Wrap(module_classes=("LlamaModel",)))
    assert (plan[0].kind, plan[0].names) == ("block", ("model",))


def test_embeddings_stay_in_the_root_when_asked() -> None:
    for rule in (Wrap(own_embeddings=False), Wrap(policy="no_split_modules", own_embeddings=False)):
        plan = plan_units(build_language_model("llama"), rule)
        assert "model.embed_tokens.weight" in plan[-1].parameters
        assert not any(unit.kind == "embedding" for unit in plan)
        assert any(unit.kind == "head" for unit in plan)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_makes_tokens_of_images_is_no_block_although_transformers_lists_it_as_one(keeps: bool) -> None:
    model = build_image_model(model_type="dinov2", mlp_ratio=1)
    assert "Dinov2Embeddings" in model._no_split_modules
    plan = plan_units(model, Wrap(own_embeddings=keeps))
    assert list(iterate_blocks(plan)) == [f"dinov2.encoder.layer.{i}" for i in range(3)]
    assert shape_of(plan)[0] == (
        ("embedding", ("dinov2.embeddings",)) if keeps else ("block", ("dinov2.encoder.layer.0",))
    )
    assert ("dinov2.embeddings.cls_token" in plan[-1].parameters) is not keeps
    named = plan_units(model, Wrap(module_classes=["Dinov2Layer", "Dinov2Embeddings"], own_embeddings=keeps))
    assert ("embedding", ("dinov2.embeddings",)) in shape_of(named)


def test_frozen_parameters_are_owned_but_not_counted_as_trainable() -> None:
    model = build_language_model("llama")
    for layer in model.model.layers:
        layer.mlp.requires_grad_(False)
    plan = plan_units(model, Wrap())
    for unit in plan[1:4]:
        assert unit.num_params - unit.num_trainable == 3 * 32 * 64
    assert plan[0].num_trainable == plan[0].num_params


def test_what_no_step_uses_is_a_unit_that_is_never_gathered() -> None:
    model = Parent(Stack())
    model.extra = Block().requires_grad_(False)
    plan = plan_units(model, Wrap(policy="repeated_blocks"), idle=["extra"])
    assert [unit.names for unit in plan if unit.kind == "idle"] == [("extra",)]
    used = [unit for unit in plan if not unit.names[0].startswith("extra")]
    assert estimate_collectives(used, Sharding()).gathers == estimate_collectives(plan, Sharding()).gathers
    check_ownership(model, plan)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_module_with_two_names_is_no_shared_parameter(is_first: bool) -> None:
    model = build_language_model("llama")
    parent = nn.Module()
    if is_first:
        parent.backbone = model.model
    parent.model = model
    if not is_first:
        parent.backbone = model.model
    plan = plan_units(parent, Wrap())
    check_ownership(parent, plan)
    assert len(list(iterate_blocks(plan))) == 3
    assert plan[-1].num_params == 0 or is_first  # the plan of the inner model alone names no head


def test_two_models_in_one_parent_keep_their_own_plans() -> None:
    parent = nn.Module()
    parent.a, parent.b = build_language_model("llama"), build_language_model("gpt_neox")
    plan = plan_units(parent, Wrap())
    check_ownership(parent, plan)
    assert len(list(iterate_blocks(plan))) == 6
    assert [unit.names for unit in plan if unit.kind == "head"] == [("a.model.norm", "a.lm_head"), ("b.lm_head",)]


def test_repeated_blocks_are_found_in_plain_torch() -> None:
    plan = plan_units(Stack(), Wrap())
    assert shape_of(plan) == [*(("block", (f"blocks.{i}",)) for i in range(3)), ("root", ("",))]
    stages = nn.Sequential(nn.Linear(7, 7), nn.Sequential(*[Block() for _ in range(2)]), nn.ReLU(), nn.Linear(7, 7))
    assert list(iterate_blocks(plan_units(stages, Wrap()))) == ["1.0", "1.1"]
    with_gaps = nn.Sequential(Block(), None, Block())  # type: ignore[arg-type]  # layers that are left out, as in scVI
    assert list(iterate_blocks(plan_units(with_gaps, Wrap()))) == ["0", "2"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    assert list(iterate_blocks(plan_units(encoder, Wrap()))) == ["layers.0", "layers.1"]


def test_a_block_that_is_there_twice_is_one_unit() -> None:
    model = nn.Module()
    block = nn.Sequential(nn.Linear(2, 2))
    model.layers = nn.ModuleList([block, nn.Sequential(nn.Linear(2, 2)), block])
    model.again = nn.ModuleList([nn.Sequential(nn.Linear(2, 3)), block])
    plan = plan_units(model, Wrap())
    check_ownership(model, plan)
    assert [unit.names for unit in plan] == [("layers.0",), ("layers.1",), ("again.0",), ("",)]


def test_a_model_without_blocks_is_one_unit_under_auto_and_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = plan_units(model, Wrap())
    assert shape_of(plan) == [("root", ("",))]
    check_ownership(model, plan)
    for rule in ("model_plan", "no_split_modules", "repeated_blocks"):
        with pytest.raises(ValueError, match=f"wrap.policy: got '{rule}'.*Sequential.*'auto'"):
            plan_units(model, Wrap(policy=rule))


def test_min_size_takes_the_smallest_modules_that_are_large_enough() -> None:
    model = Stack()  # a block: norm 14, up 112, down 98
    plan = plan_units(model, Wrap(policy="min_size", min_num_params=100))
    assert [unit.names[0] for unit in plan[:4]] == ["blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up"]
    assert [unit.num_params for unit in plan[:2]] == [112, 112]
    plan = plan_units(model, Wrap(policy="min_size", min_num_params=200))
    assert [unit.names for unit in plan] == [("blocks.0",), ("blocks.1",), ("blocks.2",), ("",)]
    for size in (1, 14, 98, 99, 112, 113, 224, 225, 1000):
        plan = plan_units(model, Wrap(policy="min_size", min_num_params=size))
        check_ownership(model, plan)
        assert all(unit.num_params >= size for unit in plan[:-1])


def test_min_size_keeps_attention_of_torch_whole() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    plan = plan_units(model, Wrap(policy="min_size", min_num_params=10))
    check_ownership(model, plan)
    assert not any("out_proj" in name for unit in plan for name in unit.names)


def test_classes_match_names_and_patterns_and_may_nest() -> None:
    model = build_language_model("llama")
    by_name = plan_units(model, Wrap(module_classes=["LlamaDecoderLayer"]))
    assert shape_of(by_name) == shape_of(
        plan_units(model, Wrap(policy="module_classes", module_classes=["*DecoderLayer"]))
    )
    nested = plan_units(model, Wrap(module_classes=["*DecoderLayer", "LlamaMLP"]))
    check_ownership(model, nested)
    assert list(iterate_blocks(nested))[:2] == ["model.layers.0", "model.layers.0.mlp"]
    refusal = r"\['decoderlayer'\].*no module has such a class.*LlamaDecoderLayer"
    with pytest.raises(ValueError, match=refusal) as error:
        plan_units(model, Wrap(module_classes=["decoderlayer"]))
    assert "LlamaRotaryEmbedding" not in str(error.value)  # it has no parameters


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            Wrap(policy="repeated_blocks", module_classes=["A"]),
            "wrap.module_classes: not used by policy 'repeated_blocks'",
        ),
        (Wrap(policy="module_classes"), "wrap.module_classes: empty"),
        (Wrap(policy="min_size"), "got None with policy 'min_size'"),
        (Wrap(min_num_params=5), "got 5 with policy 'auto'"),
        (Wrap(policy="min_size", min_num_params=0), "got 0: expected 1 or more"),
        (Wrap(policy="min_size", min_num_params=-3), "got -3"),
        (
            Wrap(policy="min_size", min_num_params=3, module_classes=["A"]),
            "wrap.module_classes: not used by policy 'min_size'",
        ),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(units: Wrap, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_units(Stack(), units)


def build_mixed() -> nn.Module:
    model = Stack(width=7)
    model.first.to(torch.bfloat16).requires_grad_(requires_grad=False)  # two that train must have one
    return model


BUILDERS: dict[str, Any] = {
    "llama": lambda: build_language_model("llama"),
    "gpt2": lambda: build_language_model("gpt2"),
    "mixtral": lambda: build_language_model("mixtral"),
    "vit": build_image_model,
    "stack of two dtypes": build_mixed,
}


@pytest.mark.full
@pytest.mark.parametrize("num_shards", [2, 3])
def test_counted_bytes_are_those_of_the_first_ranks_shards(num_shards: int) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (num_shards,), mesh_dim_names=("shard",))
        options = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
        for name, build in BUILDERS.items():
            model = build()
            plan = plan_units(model, Wrap())
            counted = [count_shard_bytes(model, unit, num_shards) for unit in plan]
            shard_model(model, plan, mesh=mesh, sharding=Sharding(), **options)
            local = {n: p.to_local() for n, p in model.named_parameters()}
            real = [sum(local[n].numel() * local[n].element_size() for n in unit.parameters) for unit in plan]
            if dist.get_rank() == 0:
                assert counted == real, name
            else:
                assert all(c >= r for c, r in zip(counted, real, strict=True)), name

    run_ranks(body, world_size=num_shards)


@pytest.mark.parametrize(("sizes", "num_shards"), [(MeshSizes(1, 3), 3), (MeshSizes(2, 4), 4), (MeshSizes(1, 2, 2), 4)])
def test_the_table_prints_the_numbers_of_the_plan(sizes: MeshSizes, num_shards: int) -> None:
    model = build_language_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    plan = plan_units(model, Wrap())
    console = Console(width=150, file=io.StringIO(), record=True)
    console.print(make_table(model, plan, sizes))
    text = " ".join(console.export_text().replace("│", " ").replace("┃", " ").split())
    num_bytes = [count_shard_bytes(model, unit, num_shards) for unit in plan]
    assert f"replicate {sizes.replicate} x shard {sizes.shard}" in text
    block = plan[1]
    assert f"model.layers.0 .. 2 3 x {block.num_params:,} 3 x {block.num_trainable:,} 3 x {num_bytes[1]:,}" in text
    assert f"model.embed_tokens 2,144 0 {num_bytes[0]:,}" in text
    assert f"model.norm + lm_head 2,176 2,176 {num_bytes[4]:,}" in text
    total = sum(p.numel() for p in model.parameters())
    assert f"all 6 units {total:,} {total - 2144:,} {sum(num_bytes):,}" in text


def test_blocks_of_different_size_get_rows_of_their_own() -> None:
    model = Stack()
    model.blocks.append(Block(9))
    model.blocks[2].requires_grad_(False)
    plan = plan_units(model, Wrap())
    table = make_table(model, plan, MeshSizes(1, 2))
    assert list(table.columns[0].cells) == ["blocks.0 .. 1", "blocks.2", "blocks.3", "(root)", "all 5 units"]
