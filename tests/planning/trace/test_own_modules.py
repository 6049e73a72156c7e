"""``plan`` of LightningModules that are no tasks of ours, beside what ``fit`` of the same module holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from plan_runs import enter_folder, fit, plan

from lit_fsdp.planning.estimate import guess_shape

MINE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.planning.step_parts import MicroBatch


class Classifier(LightningModule):
    def configure_model(self):
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
        with torch.device("meta"):
            self.model = BertForSequenceClassification(BertConfig(vocab_size=8000, **sizes))

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class LettingGo(Classifier):
    releases_gradients = True

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()


class Counted(LightningModule):
    optimizer_settings = Optimizer(learning_rate=1e-4)

    def configure_model(self):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss

    def measure_batch(self, batch):
        return MicroBatch(rows=batch["input_ids"].shape[0], length=batch["input_ids"].shape[1])

    def configure_optimizers(self):
        return build_optimizer(self.parameters(), self.optimizer_settings, is_scaled=False)


class CountedLettingGo(Counted):
    releases_gradients = True


class Convolved(Classifier):
    def configure_model(self):
        super().configure_model()
        with torch.device("meta"):
            self.patches, self.windows = torch.nn.Conv1d(4, 4, 2, stride=2), torch.nn.Conv1d(4, 4, 3)


class Paired(Classifier):
    def training_step(self, batch):
        (ids, labels), = batch
        return self.model(input_ids=ids, labels=labels).loss


class Rows(LightningDataModule):
    def make_example_batch(self):
        return {"input_ids": torch.zeros(8, 64, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}

    def train_dataloader(self):
        rows = [{"input_ids": torch.full((64,), i), "labels": torch.tensor(i % 2)} for i in range(64)]
        return DataLoader(rows, batch_size=8)


class Pairs(LightningDataModule):
    def make_example_batch(self):
        return [tuple(Rows().make_example_batch().values())]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user works, with modules of their own."""
    enter_folder(tmp_path, monkeypatch)
    (tmp_path / "mine.py").write_text(MINE)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer: dict[str, Any] = {"accelerator": "cpu", "strategy": "fsdp2", "max_steps": 2, "log_every_n_steps": 1}
    run = {"trainer": trainer | quiet, "model": "mine.Classifier", "data": "mine.Rows"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


@pytest.mark.slow(after=1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Classifier", []),
        ("Classifier", ["--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=1.0"]),
        ("LettingGo", []),
    ],
)
def test_a_plan_holds_gradients_as_long_as_the_run_does(name: str, options: list[str]) -> None:
    options = ["--config=run.yaml", f"--model=mine.{name}", *options]
    _, report = fit(*options, "--monitoring=true")
    real, planned = report["memory"]["numbers"]["step"], plan(*options, "--devices=2")["memory"]
    assert f"Nothing was predicted: {name} does not say what shape its batches have" in report["memory"]["notes"][0]
    assert planned["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.01)
    assert (planned["peak_phase"], planned["peak_unit"]) == (real["peak_phase"], real["peak_unit"])
    for kind in ("parameters", "optimizer_state", "gathered"):
        assert planned["largest_bytes_by_kind"][kind] == real["largest_bytes_by_kind"][kind], kind
    for kind in ("optimizer_state", "gradients"):
        assert planned["peak_bytes_by_kind"][kind] == real["peak_bytes_by_kind"][kind], kind


@pytest.mark.full
def test_a_batch_may_be_lists_and_tuples_and_a_step_take_no_number_of_it() -> None:
    named, paired = (
        plan("--config=run.yaml", f"--model=mine.{name}", f"--data=mine.{data}", "--devices=2")
        for name, data in (("Classifier", "Rows"), ("Paired", "Pairs"))
    )
    assert paired["memory"] == named["memory"]
    batch = {"input_ids": torch.zeros(8, 64), "labels": torch.zeros(8)}
    assert guess_shape([tuple(batch.values())]) == guess_shape(batch)


@pytest.mark.full
@pytest.mark.parametrize(("name", "is_noted"), [("Classifier", False), ("Convolved", True)])
def test_convolutions_with_windows_that_overlap_are_noted(name: str, is_noted: bool) -> None:
    notes = plan("--config=run.yaml", f"--model=mine.{name}", "--devices=2")["notes"]
    assert any(note.startswith("convolutions (1): what cuDNN's algorithms take") for note in notes) is is_noted


@pytest.mark.full
def test_gradients_that_are_kept_lie_where_their_shards_do() -> None:
    for offload, is_on_gpu in (([], True), (["--trainer.strategy=fsdp2_offload"], False)):
        kept, let_go = (
            plan("--config=run.yaml", f"--model=mine.{name}", "--devices=2", *offload)
            for name in ("Classifier", "LettingGo")
        )
        assert (kept["memory"]["peak_bytes"] > 1.03 * let_go["memory"]["peak_bytes"]) is is_on_gpu
        assert kept["host"] == let_go["host"]
    assert kept["memory"] == let_go["memory"]


@pytest.mark.full
def test_the_closed_form_counts_no_module_that_keeps_gradients() -> None:
    kept, let_go = (
        plan("--config=run.yaml", f"--model=mine.{name}", "--devices=2") for name in ("Counted", "CountedLettingGo")
    )
    assert (kept["engine"], let_go["engine"]) == ("exact trace", "closed form")
    assert "Counted: keeps gradients through the next forward" in kept["notes"][0]
