"""Subclasses that replace parts of a task's step: what is planned for them is what they do, not what the task does."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launches import ROOT, fork_ranks, write_run
from plan_runs import Recorded, check_refused, enter_folder, fit, plan
from torch import nn

from lit_fsdp.planning.closed_form.overrides import keeps_gradients, list_overrides, list_untraced
from lit_fsdp.tasks import CausalLM, ImageClassification, TextToSpeech
from lit_fsdp.tasks.base import Task

OWN = """
import torch
from lit_fsdp.tasks import CausalLM

class OwnOptimizerLM(CausalLM):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

class OwnBackwardLM(CausalLM):
    def backward(self, loss):
        loss.backward()

class OwnLossLM(CausalLM):
    def sum_losses(self, output, labels):
        loss_sum, num_targets = super().sum_losses(output, labels)
        return loss_sum + output.logits.square().sum(), num_targets

class TalkingLM(CausalLM):
    def on_train_epoch_end(self):
        print("an epoch")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter_folder(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_run(tmp_path, trainer={"enable_checkpointing": False}, data={"seq_length": 128})
    (tmp_path / "own_tasks.py").write_text(OWN)
    return tmp_path


class Scaled(CausalLM):
    def sum_losses(self, output: Any, labels: Any) -> Any:
        loss_sum, num_targets = super().sum_losses(output, labels)
        return 2 * loss_sum, num_targets


class Stepping(CausalLM):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Another one, of which nobody knows whether it lets go of gradients."""


class SteppingAndReleasing(Stepping):
    releases_gradients = True


@pytest.mark.parametrize(("kind", "keeps"), [(Scaled, False), (Stepping, True), (SteppingAndReleasing, False)])
def test_a_step_of_an_optimizer_of_ones_own_may_keep_gradients(kind: type[CausalLM], keeps: bool) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert keeps_gradients(kind(config=config)) == keeps


class ScaledTwice(Scaled):
    pass


class Mixin:
    def compute_loss(self, batch: Any) -> Any:
        return super().compute_loss(batch)  # type: ignore[misc]


class Mixed(Mixin, CausalLM):
    pass


class Logging(CausalLM):
    rate = 2

    def __init__(self) -> None:
        super().__init__(config={"model_type": "llama"})

    def on_train_epoch_end(self) -> None:
        self.log("one", 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def generate(self, prompts: list[str]) -> list[str]:
        return prompts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)

    def helper(self) -> None:
        """Is new, so nobody but what is replaced would call it."""


class Trusted(Scaled):
    def measure_batch(self, batch: Any) -> Any:
        return super().measure_batch(batch)


class Own(Task):
    def measure_batch(self, batch: Any) -> Any:
        return None

    def find_loss(self, batch: Any) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.find_loss(batch)


class Derived(Own):
    def find_loss(self, batch: Any) -> Any:
        return 2 * batch


class Pooled(ImageClassification):
    def compute_logits(self, pixel_values: Any) -> Any:
        return super().compute_logits(pixel_values)


class Whispering(TextToSpeech):
    def configure_units(self, model: Any) -> Any:
        return super().configure_units(model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "owner", "names"),
    [
        (Scaled, "Scaled", ["sum_losses"]),
        (ScaledTwice, "Scaled", ["sum_losses"]),
        (Mixed, "Mixin", ["compute_loss"]),
        (Pooled, "Pooled", ["compute_logits"]),
        (Whispering, "Whispering", ["configure_units"]),
        (Derived, "Derived", ["find_loss"]),
        (Logging, "", []),
        (Trusted, "", []),
        (Own, "", []),
        *((task, "", []) for task in (CausalLM, ImageClassification, TextToSpeech)),
    ],
)
def test_what_a_subclass_replaces_of_the_step_is_found(task: type[nn.Module], owner: str, names: list[str]) -> None:
    module = task.__new__(task)
    nn.Module.__init__(module)
    found = list_overrides(module)
    assert found[1] == names
    assert not owner or found[0] == owner


def write_example() -> None:
    """Write the example of docs/own_task.md where it says."""
    text = (ROOT / "docs" / "own_task.md").read_text()
    found = re.search(r"```python\n# mytask.py.*?\n(.*?)```", text, re.DOTALL)
    assert found is not None
    assert "class SmoothedLM(CausalLM)" in found[1]
    Path("mytask.py").write_text(found[1])


@pytest.mark.full
def test_the_example_of_the_guide_holds_what_its_plan_says() -> None:
    write_example()
    own = ["--config=run.yaml", "--model.class_path=mytask.SmoothedLM"]
    _, report = fit(*own, "--monitoring=true")
    memory = report["memory"]
    assert "predicted" not in memory["numbers"]
    reason = "SmoothedLM: overrides sum_losses, which the closed form cannot see"
    assert f"Nothing was predicted: {reason}." in memory["notes"]
    parents, planned = plan("--config=run.yaml", "--devices=2"), plan(*own, "--devices=2", "--exact=true")
    assert planned["engine"] == plan(*own, "--devices=2")["engine"] == "exact trace"
    assert planned["closed_form_peak_bytes"] is None
    assert any(reason in note for note in planned["notes"])
    peak_bytes = planned["memory"]["peak_bytes"]
    assert peak_bytes == pytest.approx(memory["numbers"]["step"]["peak_bytes"], rel=0.01)
    assert peak_bytes > 1.1 * parents["memory"]["peak_bytes"]


def test_the_example_of_the_guide_counts_targets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    write_example()
    task = __import__("mytask").SmoothedLM
    logits, labels = torch.randn(2, 6, 9), torch.tensor([[1, 2, -100, 3, 4, -100], [-100, -100, 5, 6, 7, 8]])
    monkeypatch.setattr(CausalLM, "sum_losses", lambda *_: (torch.zeros(()), 7))
    found, _ = task(penalty=0.5, config={"model_type": "llama"}).sum_losses(
        type("Output", (), {"logits": logits})(), labels
    )
    targets = logits[:, :-1][labels[:, 1:] != -100]
    assert found.item() == pytest.approx(0.5 * torch.logsumexp(targets, -1).square().sum().item())


@pytest.mark.full
def test_a_search_traces_what_the_closed_form_cannot_see(capfd: pytest.CaptureFixture[str]) -> None:
    own = ["--config=run.yaml", "--model.class_path=own_tasks.OwnLossLM", "--devices=2"]
    found = plan(*own, "--device-memory=8GiB", "--search=true")
    assert found["search"]["candidates"][0]["peak_bytes"] == found["memory"]["peak_bytes"]
    said = capfd.readouterr()
    assert "OwnLossLM: overrides sum_losses, which the closed form cannot see: no closed form" in said.out
    assert "search: traced 1: " in said.err


def test_fsdp2_auto_traces_what_the_closed_form_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.planning.auto_strategy.SearchProcess", Recorded)
    own = ["--config=run.yaml", "--model.class_path=own_tasks.OwnLossLM", "--trainer.strategy=fsdp2_auto"]
    check_refused(fork_ranks("fit", *own), "OwnLossLM: overrides sum_losses, which the closed form cannot see")
    assert Path("packed").exists()


@pytest.mark.full
def test_an_optimizer_of_ones_own_is_traced_and_has_no_time(capfd: pytest.CaptureFixture[str]) -> None:
    own = ["--config=run.yaml", "--devices=2", "--gpu=RTX 4090", "--model.class_path=own_tasks.OwnOptimizerLM"]
    found = plan(*own)
    assert found["engine"] == "exact trace"
    assert found["time"] is None
    assert found["memory"]["largest_bytes_by_kind"]["optimizer_state"] == 0
    assert "no time of a step: OwnOptimizerLM overrides configure_optimizers" in " ".join(found["notes"])
    capfd.readouterr()
    searched = plan(*own, "--search=true")["search"]["candidates"]
    assert searched[0]["peak_bytes"] == found["memory"]["peak_bytes"]
    assert not any({"model.optimizer.name", "data.batch_size"} & candidate["changes"].keys() for candidate in searched)
    said = capfd.readouterr()
    assert "OwnOptimizerLM overrides configure_optimizers" in said.out
    assert "search: traced 2: " in said.err


@pytest.mark.full
def test_what_no_engine_follows_is_said_and_what_changes_no_step_is_not() -> None:
    common = ["--config=run.yaml", "--devices=2"]
    unseen, talking = (plan(*common, f"--model.class_path=own_tasks.{name}LM") for name in ("OwnBackward", "Talking"))
    assert "left out: what backward of the task does, which no engine follows" in unseen["notes"]
    assert (unseen["engine"], talking["engine"]) == ("exact trace", "closed form")


def test_what_nobody_follows_is_found_in_any_class() -> None:
    class Plain(pl.LightningModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

        def measure_batch(self, batch: Any) -> None:
            return None

    assert list_untraced(Plain()) == ["optimizer_step"]
    for task in (CausalLM, ImageClassification, TextToSpeech):
        assert list_untraced(task.__new__(task)) == []
