"""Rows whose tokens are split over ranks train as on one rank; and what cannot be split is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from lightning.pytorch.callbacks import ModelCheckpoint
from models import build_language_model
from torch import Tensor
from torch.utils.data import DataLoader
from training import Recorder, Result, build_task, build_trainer, collate, fit_and_write, list_differences
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import ActivationCheckpointing, Compile, FSDP2Strategy, Mesh, Sharding, Wrap
from lit_fsdp.callbacks import CommunicationLogger, MemoryLogger
from lit_fsdp.planning.plan import plan_step
from lit_fsdp.planning.plan_report import describe_plan
from lit_fsdp.planning.planned_step import PlannedTrainer, prepare_step
from lit_fsdp.sharding.sequence import SequenceGroup, count_shared_heads
from lit_fsdp.tasks import CausalLM, LoRA
from lit_fsdp.tasks.causal_lm.sequence import check_heads, shift_labels, split_attention, split_batch
from lit_fsdp.tasks.loading import build_eval_loader, build_train_loader
from ranks import RankError, run_ranks

TOLERANCE = 1e-6
LENGTH, NUM_STEPS, GLOBAL_BATCH = 18, 3, 4  # 18 is no multiple of 4
_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def make_rows(kind: str) -> list[dict[str, Tensor]]:
    """Return rows of two documents each (packed), or of one with holes, shorter than the row (padded)."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(GLOBAL_BATCH * (NUM_STEPS + 1)):
        ids = torch.randint(3, 67, (LENGTH,), generator=generator)
        labels, end = ids.clone(), 5 + i % 9
        labels[: i % 4] = -100
        if kind == "packed":
            labels[end] = -100
            extra = {"position_ids": torch.cat([torch.arange(end), torch.arange(LENGTH - end)])}
        else:
            mask = (torch.arange(LENGTH) < LENGTH - end).long()
            mask[2:4] = 0  # also where later tokens would see it
            labels[mask == 0] = -100
            extra = {"attention_mask": mask}
        rows.append({"input_ids": ids, "labels": labels, **extra})
    return rows


class Rows(pl.LightningDataModule):
    """The same rows in the same order, however many ranks share them."""

    def __init__(self, kind: str, batch_size: int) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return build_train_loader(
            make_rows(self.kind), batch_size=self.batch_size, collate=collate, shuffle=False, trainer=self.trainer
        )


def fit_rows(folder: Path, out: Path, case: dict[str, Any], mesh: Mesh) -> None:
    """Train on this rank; rank 0 writes what came of it."""
    pl.seed_everything(0)
    strategy = FSDP2Strategy(mesh=mesh, print_plan=False, **case.get("strategy", {}))
    callbacks: list[Any] = [Recorder()]
    if (saves := case.get("save")) is not None:
        callbacks.append(ModelCheckpoint(saves, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = build_trainer(
        strategy,
        callbacks=callbacks,
        max_steps=case.get("max_steps", NUM_STEPS),
        enable_checkpointing=saves is not None,
    )
    task = build_task(folder, **case.get("task", {}))
    num_data_ranks = dist.get_world_size() // mesh.sequence
    data = Rows(case["kind"], GLOBAL_BATCH // num_data_ranks)
    fit_and_write(trainer, task, data, out, load=case.get("from"), first_step=0)


def train(tmp_path: Path, case: dict[str, Any], mesh: Mesh, world_size: int) -> Result:
    """Train on forked ranks, from the same weights in each call."""
    folder, out = tmp_path / "model", tmp_path / "result.pt"
    if not folder.exists():
        torch.manual_seed(1)
        build_language_model(case.get("family", "llama"), "cpu", **case.get("config", {})).save_pretrained(folder)
    run_ranks(fit_rows, folder, out, case, mesh, world_size=world_size)
    return Result(**torch.load(out))


FULL = {"activation_checkpointing": ActivationCheckpointing(mode="full")}
UNITS = {"wrap": Wrap(module_classes=["*Attention"])}  # ``fully_shard`` gives these a class of its own
CASES: dict[str, tuple[dict[str, Any], Mesh, int]] = {
    # 2 key-value heads for 4 ranks
    "packed, recomputed": ({"kind": "packed", "strategy": FULL}, Mesh(sequence=4), 4),
    "padded, two data ranks": ({"kind": "padded"}, Mesh(sequence=2), 4),
    "packed, two copies": ({"kind": "packed"}, Mesh(replicate=2, sequence=2), 4),
    "padded, eager, chunks": (
        {"kind": "padded", "task": {"attention": "eager", "loss_chunks": 3}},
        Mesh(sequence=2),
        2,
    ),
    "sliding, packed": ({"kind": "packed", "family": "gemma3_text", "config": _SLIDING}, Mesh(sequence=2), 2),
    "sliding, padded": (
        {"kind": "padded", "family": "mistral", "config": {"sliding_window": 5}, "strategy": FULL},
        Mesh(sequence=4),
        4,
    ),
    "without a mask, sliding": (
        {"kind": "packed", "family": "gemma3_text", "config": _SLIDING, "task": {"attention": "varlen"}},
        Mesh(sequence=2),
        2,
    ),
    "adapters": ({"kind": "packed", "task": {"lora": LoRA(r=4)}, "strategy": FULL}, Mesh(sequence=2), 2),
    "compiled": ({"kind": "packed", "strategy": {"compile": Compile(backend="eager")}}, Mesh(sequence=2), 2),
    "sinks": ({"kind": "padded", "family": "gpt_oss", "task": {"attention": "eager"}}, Mesh(sequence=2), 2),
    "sinks, attention as units": ({"kind": "padded", "family": "gpt_oss", "strategy": UNITS}, Mesh(sequence=2), 2),
    "packed, eager attention as units": (
        {"kind": "packed", "task": {"attention": "eager"}, "strategy": UNITS},
        Mesh(sequence=2),
        2,
    ),
}


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", CASES)
def test_split_rows_train_as_on_one_rank(name: str, tmp_path: Path) -> None:
    case, mesh, world_size = CASES[name]
    result = train(tmp_path, case, mesh, world_size)
    truth = train(tmp_path, {**case, "strategy": {}}, Mesh(), 1)
    assert len(truth.losses) == NUM_STEPS
    assert truth.losses[-1] != truth.losses[0]
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
def test_a_checkpoint_resumes_with_another_degree(tmp_path: Path) -> None:
    case = {"kind": "packed", "max_steps": 4}
    truth = train(tmp_path, case, Mesh(), 1)
    train(tmp_path, {**case, "max_steps": 2, "save": tmp_path / "saved"}, Mesh(sequence=4), 4)
    resumed = {**case, "from": str(tmp_path / "saved" / "step=2.ckpt")}
    result = train(tmp_path, resumed, Mesh(sequence=2), 4)
    assert result.losses == pytest.approx(truth.losses[2:], abs=TOLERANCE)
    worst = find_largest(float((result.weights[name] - weight).abs().max()) for name, weight in truth.weights.items())
    assert worst <= TOLERANCE


class Silent:
    """A group of which nothing is sent."""


def test_slices_of_a_batch_make_up_the_whole_of_it() -> None:
    batch = collate(make_rows("packed")[:3])
    parts = [split_batch(batch, SequenceGroup(group=Silent(), size=4, rank=rank)) for rank in range(4)]  # type: ignore[arg-type]
    names = ("input_ids", "position_ids", "attention_mask")
    ids, positions, present = (torch.cat([part.inputs[name] for part in parts], 1) for name in names)
    targets = torch.cat([part.targets for part in parts], 1)
    assert all(part.targets.shape == (3, 5) for part in parts)
    assert ids[:, :LENGTH].equal(batch["input_ids"])
    assert positions[:, :LENGTH].equal(batch["position_ids"])  # those of a slice do not start again
    assert targets[:, :LENGTH].equal(shift_labels(batch["labels"]))  # also over the end of a slice
    assert (targets[:, LENGTH:] == -100).all()
    assert present.sum(1).tolist() == [LENGTH] * 3
    assert targets[:, 4].equal(batch["labels"][:, 5])
    with pytest.raises(ValueError, match=r"mesh.sequence: got 4: of images in a batch nothing is known"):
        split_batch({**batch, "images": batch["input_ids"]}, SequenceGroup(group=Silent(), size=4, rank=0))  # type: ignore[arg-type]


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=6, hidden_size=48)
    with pytest.raises(ValueError, match=r"mesh.sequence: got 4: .*6 attention heads.* expected one of \[1, 2, 3, 6\]"):
        check_heads(config, 4)
    check_heads(config, 3)
    linear = AutoConfig.for_model("qwen3_next", num_attention_heads=4)
    with pytest.raises(ValueError, match="qwen3_next has layers of linear_attention"):
        check_heads(linear, 2)
    balanced = AutoConfig.for_model("mixtral", num_attention_heads=4, output_router_logits=True)
    with pytest.raises(ValueError, match=r"mesh.sequence: got 2 with config.output_router_logits: .*set output_router"):
        check_heads(balanced, 2)
    assert [count_shared_heads(heads, 4) for heads in (1, 2, 4, 6, 8)] == [4, 2, 1, 2, 1]


def test_attention_that_is_not_looked_up_by_name_is_refused() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=32, n_head=4, n_layer=1, vocab_size=67)
    task = CausalLM(config={"model_type": "bloom"}, attention="eager")
    model = _build(config, task.attention)
    with pytest.raises(ValueError, match="BloomForCausalLM has attention of its own"):
        split_attention(model)


def _build(config: Any, attention: str) -> Any:
    from lit_fsdp.tasks.text_model import build_model

    return build_model(config, attention)


class Plain(pl.LightningModule):
    """A module that knows nothing of sequences."""


class OwnLoss(CausalLM):
    """Takes the labels of whole rows."""

    def sum_losses(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        return output.logits.sum(), (labels != -100).sum()


def test_modules_that_cannot_split_rows_are_refused_before_ranks_start() -> None:
    strategy = FSDP2Strategy(mesh=Mesh(sequence=2))
    config = {"model_type": "llama", "num_attention_heads": 3, "hidden_size": 48, "num_key_value_heads": 3}
    refused: list[tuple[Any, str]] = [
        (Plain(), "mesh.sequence: got 2: Plain does not split the tokens of its rows over ranks"),
        (OwnLoss(config={"model_type": "llama"}), "OwnLoss.sum_losses takes the labels of whole rows"),
        (CausalLM(config={"model_type": "llama"}, attention="flash_attention_2"), "set attention: auto"),
        (CausalLM(config=config), r"3 attention heads .* expected one of \[1, 3\]"),
    ]
    for module, message in refused:
        with pytest.raises(ValueError, match=message):
            strategy.check_module(module)
        FSDP2Strategy().check_module(module)
    strategy.check_module(CausalLM(config={"model_type": "llama"}))
    settings = FSDP2Strategy(mesh=Mesh(sequence=2, tensor=2)).settings
    with pytest.raises(ValueError, match=r"mesh.tensor: got 2 with mesh.sequence 2"):
        settings.check(world_size=4, ranks_per_node=4, device=torch.device("cpu"))
    settings = FSDP2Strategy(mesh=Mesh(tensor=2), sharding=Sharding(reshard_after_forward=2)).settings
    with pytest.raises(ValueError, match=r"reshard_after_forward: got 2 with mesh.tensor 2: .* set true or false"):
        settings.check(world_size=8, ranks_per_node=8, device=torch.device("cpu"))


class Mixed(CausalLM):
    """Adds to each token the one before, beside attention."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        layer: Any = self.model.model.layers[0]
        layer.mlp.register_forward_hook(lambda _module, _inputs, output: output + output.roll(1, dims=1))


def fit_mixed(folder: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(mesh=Mesh(sequence=2), print_plan=False))
    trainer.fit(Mixed(pretrained=str(folder)), Rows("packed", GLOBAL_BATCH))


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused(tmp_path: Path) -> None:
    build_language_model("llama", "cpu").save_pretrained(tmp_path)
    with pytest.raises(RankError, match="LlamaForCausalLM computes something else of split rows"):
        run_ranks(fit_mixed, tmp_path)


def measure_exchanges(folder: Path) -> None:
    callback = CommunicationLogger(num_warmup_steps=0)
    strategy = FSDP2Strategy(mesh=Mesh(sequence=2), print_plan=False)
    trainer = build_trainer(strategy, callbacks=[callback], max_steps=NUM_STEPS, log_every_n_steps=1)
    trainer.fit(build_task(folder), Rows("packed", GLOBAL_BATCH))
    section = callback.make_section()
    assert section is not None
    assert not [note for note in section.notes if "the plan says" in note]  # shards are expected over all ranks
    if not trainer.is_global_zero:
        return
    found = section.numbers["collectives"]["all_to_all"]
    num_layers, own_tokens, head_bytes = 3, GLOBAL_BATCH * LENGTH // 2, 8 * 4
    # Forward and backward: queries, keys and values before attention, what it returns after it.
    assert found["calls"] == num_layers * 4
    assert found["num_bytes"] == num_layers * 2 * own_tokens * head_bytes * ((4 + 2 + 2) + 4)
    assert found["wire_bytes"] == found["num_bytes"] / 2
    assert found["seconds"] == found["exposed_s"] > 0
    assert [row for row in section.tables[0].rows if row[0] == "all_to_all"]
    assert [row for row in section.tables[2].rows if row[0] == "all_to_all split attention"]


def test_exchanges_are_measured_in_a_row_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(1)
    build_language_model("llama", "cpu").save_pretrained(tmp_path)
    run_ranks(measure_exchanges, tmp_path)


def fit_measured(folder: Path, out: Path) -> None:
    callback = MemoryLogger(trace_step=2, fallback_dir=str(out.parent))
    strategy = FSDP2Strategy(mesh=Mesh(sequence=2), print_plan=False)
    trainer = build_trainer(strategy, callbacks=[callback], max_steps=NUM_STEPS)
    trainer.fit(build_task(folder), Rows("packed", GLOBAL_BATCH))
    section = callback.make_section()
    if trainer.is_global_zero:
        assert section is not None
        torch.save(section.numbers, out)


def plan_measured(folder: Path, mesh: Mesh, out: Path) -> None:
    dist.destroy_process_group()
    data = Rows("packed", GLOBAL_BATCH)
    data.make_example_batch = lambda: collate(make_rows("packed")[:GLOBAL_BATCH])  # type: ignore[attr-defined]
    strategy = FSDP2Strategy(mesh=mesh)
    trainer = PlannedTrainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=NUM_STEPS, logger=False)
    plan = plan_step(prepare_step(trainer, build_task(folder), data), exact=True)
    peak = plan.memory.peak
    torch.save(
        (
            peak.num_bytes,
            dict(peak.by_kind),
            [exchange.num_bytes for exchange in plan.exchanges],
            describe_plan(plan, None)["communication"],
        ),
        out,
    )


@pytest.mark.full
def test_a_plan_has_the_memory_of_a_run_and_activations_fall(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(1)
    build_language_model("llama", "cpu").save_pretrained(folder)
    run_ranks(fit_measured, folder, tmp_path / "run.pt")
    run = torch.load(tmp_path / "run.pt", weights_only=False)
    plans = {}
    for size in (1, 2):
        run_ranks(plan_measured, folder, Mesh(sequence=size), tmp_path / "plan.pt", world_size=1)
        plans[size] = torch.load(tmp_path / "plan.pt", weights_only=False)
    (_, whole, none, _), (num_bytes, split, exchanges, communication) = plans[1], plans[2]
    assert run["step"]["peak_bytes"] == pytest.approx(num_bytes, rel=0.01)
    assert run["step"]["peak_bytes_by_kind"]["activations"] == pytest.approx(split["activations"], rel=0.01)
    assert split["activations"] < 0.55 * whole["activations"]  # masks and positions stay whole
    assert split["parameters"] == whole["parameters"]  # over two ranks either way
    assert (none, len(exchanges)) == ([], 3 * 4)
    assert communication["collectives_per_step"]["all_to_all"] == 12
    assert communication["bytes_per_step"]["all_to_all"] == sum(exchanges)


class Evaluated(Rows):
    """Four rows to evaluate."""

    def val_dataloader(self) -> DataLoader[Any]:
        rows = make_rows(self.kind)[:4]
        return build_eval_loader(
            rows, batch_size=2, collate=lambda found: collate([row for _, row in found]), trainer=self.trainer
        )


def evaluate(folder: Path) -> None:
    """Validate with split rows, then continue a text with whole ones; compare both with the stock model."""
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = collate(make_rows("packed")[:4])
    expected = float(stock(**batch, use_cache=False).loss.detach())
    task = build_task(folder)
    trainer = build_trainer(FSDP2Strategy(mesh=Mesh(sequence=2), print_plan=False))
    (found,) = trainer.validate(task, Evaluated("packed", 2), verbose=False)
    assert found["val/loss"] == pytest.approx(expected, abs=TOLERANCE)
    ids = batch["input_ids"][:1, :7]
    with torch.no_grad():
        torch.testing.assert_close(task(input_ids=ids), stock(input_ids=ids).logits)
    assert task.model is not None
    generate: Any = task.model.generate
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert generate(input_ids=ids, **options).equal(stock.generate(input_ids=ids, **options))


@pytest.mark.full
def test_evaluation_splits_rows_and_generation_does_not(tmp_path: Path) -> None:
    torch.manual_seed(1)
    build_language_model("llama", "cpu").save_pretrained(tmp_path)
    run_ranks(evaluate, tmp_path)
