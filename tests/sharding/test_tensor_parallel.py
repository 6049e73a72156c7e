"""Layers that are split over ranks compute what whole ones do, and their checkpoints fit any other mesh."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from training import (
    EVEN,
    GLOBAL_BATCH,
    LENGTH,
    TIED,
    Result,
    list_differences,
    save_model,
    train_plainly,
    train_sharded,
)
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import ActivationCheckpointing, Compile, CPUOffload, Mesh, Sharding
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.callbacks import CommunicationLogger
from lit_fsdp.export import export_model
from lit_fsdp.planning.trace.apart import run_apart
from lit_fsdp.planning.trace.dry_run import fake_ranks
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.mesh import build_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.tensor_parallel import parallelize_layers
from lit_fsdp.weights.load import init_weights, materialize
from ranks import RankError, run_ranks

TOLERANCE = 1e-6
# Split in two, 33 and 25 rows: two shards of them are not equal.
TIED_UNEVENLY: dict[str, Any] = {**TIED, "num_key_value_heads": 2, "vocab_size": 66, "intermediate_size": 50}
QWEN = {**EVEN, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
WHOLE = Mesh()
SPLIT = Mesh(tensor=2)


def cut(result: Result, first: int) -> Result:
    """Return a result without its first steps."""
    return Result(losses=result.losses[first:], grad_norms=result.grad_norms[first:], weights=result.weights)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = save_model(tmp_path_factory.mktemp("models") / "tied", **TIED_UNEVENLY)
    return folder, train_plainly(folder)


def check_export(checkpoint: Path, out: Path, run: Result) -> None:
    """Compare what is exported with the weights that the run had."""
    export_model(checkpoint, out)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert exported.keys() == run.weights.keys()
    assert [name for name, value in exported.items() if not torch.equal(value, run.weights[name])] == []


# One run with what most often goes together, in the default tier; the others alone.
@pytest.mark.parametrize(
    ("mesh", "num_ranks", "strategy", "options"),
    [
        (SPLIT, 4, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, {"task": {"loss_chunks": 2}}),
        pytest.param(SPLIT, 2, {}, {}, marks=pytest.mark.full),
        pytest.param(Mesh(tensor=2, replicate=2), 4, {}, {}, marks=pytest.mark.full),
        pytest.param(SPLIT, 4, {"cpu_offload": CPUOffload()}, {}, marks=pytest.mark.full),
        pytest.param(
            SPLIT, 4, {"sharding": Sharding(no_sync=True)}, {"accumulate_grad_batches": 2}, marks=pytest.mark.full
        ),
        pytest.param(SPLIT, 2, {"compile": Compile(backend="aot_eager", dynamic=False)}, {}, marks=pytest.mark.full),
    ],
    ids=["2x2", "1x2", "2x1x2", "offload", "no_sync", "compiled"],
)
def test_split_layers_train_as_whole_ones_do(
    tmp_path: Path,
    tied: tuple[Path, Result],
    mesh: Mesh,
    num_ranks: int,
    strategy: dict[str, Any],
    options: dict[str, Any],
) -> None:
    folder, truth = tied
    run = train_sharded(folder, tmp_path, world_size=num_ranks, strategy={"mesh": mesh, **strategy}, **options)
    assert {name: d for name, d in list_differences(run, truth).items() if d > TOLERANCE} == {}


@pytest.mark.parametrize("dynamic", [None, True])
def test_split_layers_are_compiled_for_fixed_sizes_only(dynamic: bool | None) -> None:
    settings = Settings(mesh=SPLIT, compile=Compile(backend="aot_eager", dynamic=dynamic))
    with pytest.raises(ValueError, match=rf"compile.dynamic: got {dynamic} with mesh.tensor 2: .*; set false"):
        settings.check(world_size=2, ranks_per_node=2, device=torch.device("cpu"))


@pytest.mark.full
def test_biases_of_split_layers_are_added_once(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "biased", **EVEN, attention_bias=True, mlp_bias=True)
    run = train_sharded(folder, tmp_path, world_size=4, strategy={"mesh": SPLIT})
    assert {n: d for n, d in list_differences(run, train_plainly(folder)).items() if d > TOLERANCE} == {}


@pytest.mark.full
def test_norms_of_heads_get_the_gradients_of_all_heads_once(tmp_path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **QWEN)).save_pretrained(folder := tmp_path / "qwen")
    strategy = {"mesh": SPLIT, "sharding": Sharding(no_sync=True)}
    run = train_sharded(folder, tmp_path, world_size=4, strategy=strategy, accumulate_grad_batches=2)
    assert {n: d for n, d in list_differences(run, train_plainly(folder)).items() if d > TOLERANCE} == {}


def test_a_plan_that_leaves_norms_of_heads_out_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model("phi", **EVEN, num_hidden_layers=1, qk_layernorm=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder := tmp_path / "phi")
    with pytest.raises(RankError, match=r"q_layernorm.weight, .* differ between the ranks that share a layer"):
        train_sharded(folder, tmp_path, world_size=2, strategy={"mesh": SPLIT}, max_steps=1)


@pytest.mark.slow(after=5)
@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "form"),
    [
        ((SPLIT, 4), (WHOLE, 4), "sharded"),
        ((SPLIT, 4), (SPLIT, 2), "sharded"),
        ((WHOLE, 1), (SPLIT, 4), "sharded"),
        ((SPLIT, 4), (WHOLE, 1), "single_file"),
        ((WHOLE, 1), (SPLIT, 4), "single_file"),
        ((SPLIT, 4), (SPLIT, 4), "sharded"),
        ((SPLIT, 4), (WHOLE, 1), "sharded"),
        ((WHOLE, 4), (SPLIT, 4), "sharded"),
    ],
)
def test_a_run_goes_on_under_another_mesh(
    tmp_path: Path, tied: tuple[Path, Result], before: tuple[Mesh, int], after: tuple[Mesh, int], form: str
) -> None:
    folder, truth = tied
    save = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=4)
    options = {"max_steps": 4, "callbacks": [save], "enable_checkpointing": True}
    strategy = {"mesh": before[0], "checkpoint_format": form}
    train_sharded(folder, tmp_path, world_size=before[1], strategy=strategy, **options)
    (saved,) = (tmp_path / "saved").glob("step=4.ckpt")
    if (before, form) == ((SPLIT, 4), "sharded"):
        check_export(saved, tmp_path / "exported", Result(**torch.load(tmp_path / "result.pt")))
    strategy = {"mesh": after[0], "checkpoint_format": form}
    run = train_sharded(folder, tmp_path, world_size=after[1], strategy=strategy, ckpt_path=str(saved))
    assert {name: d for name, d in list_differences(run, cut(truth, 4)).items() if d > TOLERANCE} == {}


class Noting(CommunicationLogger):
    """Leaves in a file what it has measured."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        section = self.make_section() if trainer.is_global_zero else None
        if section is not None:
            self.path.write_text(json.dumps({"collectives": section.numbers["collectives"], "notes": section.notes}))


@pytest.mark.full
def test_what_split_layers_send_has_a_row_of_its_own(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    noting = Noting(tmp_path / "found.json")
    train_sharded(folder, tmp_path, world_size=4, strategy={"mesh": SPLIT}, callbacks=[noting])
    found = json.loads(noting.path.read_text())
    sizes = {kind: (numbers["calls"], numbers["num_bytes"]) for kind, numbers in found["collectives"].items()}
    # Of each of 3 layers 2 sums in forward and 5 in backward, of inputs of q, k, v, gate and up; of the head's input,
    # and of embeddings. The logits of 64 tokens are gathered.
    num_tokens = GLOBAL_BATCH // 2 * LENGTH
    assert sizes["tensor"] == (3 * 7 + 2 + 1, 4 * num_tokens * ((3 * 7 + 2) * 32 + 64))
    assert sizes["all_reduce"] == (0, 0)
    # FSDP2 gathers half of each split layer, and what it does is what the plan says.
    assert [note for note in found["notes"] if "the plan says" in note] == []
    assert sizes["all_gather"][0] > 0


def draw(is_split: bool) -> dict[str, torch.Tensor]:
    """Return random weights of a model that was sharded, and maybe split, before it had any."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TIED_UNEVENLY, num_hidden_layers=1))
    mesh = build_mesh(SPLIT if is_split else WHOLE, device_type="cpu", world_size=4, ranks_per_node=4)
    shard_module(model, Settings(), dtypes=MixedPrecision(), mesh=mesh, device=torch.device("cpu"))
    materialize(model, torch.device("cpu"))
    init_weights(model, 3)
    found = {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


@pytest.mark.full
def test_random_weights_are_the_same_in_every_mesh() -> None:
    def body() -> None:
        whole, split = draw(is_split=False), draw(is_split=True)
        assert whole.keys() == split.keys()
        assert [name for name, value in whole.items() if not torch.equal(value, split[name])] == []

    run_ranks(body, world_size=4)


def build_small(kind: str, **changes: Any) -> nn.Module:
    """Return a model on the meta device, of one layer."""
    settings = {**EVEN, "num_hidden_layers": 1, "n_layer": 1, "n_head": 4, "n_embd": 32, **changes}
    known = {name: value for name, value in settings.items() if hasattr(AutoConfig.for_model(kind), name)}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known))


def add_lora(model: nn.Module) -> nn.Module:
    add_adapters(model, LoRA(r=2))
    return model


def quantize(model: nn.Module) -> nn.Module:
    quantize_model(model, Quantization())
    return model


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: nn.ModuleDict({"model": build_small("gpt2")}), ("GPT2LMHeadModel has no plan", "set mesh.tensor: 1")),
        (lambda: nn.Sequential(nn.Linear(4, 4)), ("Linear has no plan", 'device_mesh["tensor_parallel"]')),
        (
            lambda: build_small("llama", num_attention_heads=6, hidden_size=48),
            ("num_attention_heads 6", "set mesh.tensor: 2"),
        ),
        (lambda: build_small("llama", num_key_value_heads=2), ("num_key_value_heads 2", "set mesh.tensor: 2")),
        (lambda: build_small("llama", vocab_size=66), ("embed_tokens.weight has 66 rows", "set mesh.tensor: 2")),
        (lambda: build_small("llama", intermediate_size=66), ("mlp.gate_proj.weight has 66 rows",)),
        (lambda: build_small("mixtral"), ("mlp.experts as moe_tp_experts", "set mesh.tensor: 1")),
        (lambda: add_lora(build_small("llama")), ("with lora", "set mesh.tensor: 1")),
        (lambda: quantize(build_small("llama")), ("with quantization", "set mesh.tensor: 1")),
    ],
    ids=["gpt2", "no model", "heads", "key heads", "vocabulary", "hidden", "experts", "lora", "quantized"],
)
def test_what_cannot_be_split_is_refused_with_what_to_set(
    build: Callable[[], nn.Module], parts: tuple[str, ...]
) -> None:
    module = build()

    def refuse() -> str:
        with fake_ranks(4):
            mesh = build_mesh(Mesh(tensor=4), device_type="cpu", world_size=4, ranks_per_node=4)
            with pytest.raises(ValueError, match=r"^mesh.tensor: got 4") as error:
                parallelize_layers(module, mesh)
        return str(error.value)

    said = run_apart(refuse, "test")  # a part of the model may be split by then
    assert [part for part in parts if part not in said] == []
