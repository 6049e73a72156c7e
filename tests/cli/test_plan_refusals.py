"""What ``plan`` says in one line, with exit code 2, of what ``fit`` would refuse and of steps that fail."""

import json
from pathlib import Path
from typing import Any

import pytest
from launches import fork_ranks, write_run
from plan_runs import enter_folder, main, plan

from lit_fsdp.planning.timing.hardware import parse_memory

MINE = """
import lightning.pytorch as pl
import torch
from torch import nn
from lit_fsdp.tasks import TextData

class Net(pl.LightningModule):
    def __init__(self, trouble: str = ""):
        super().__init__()
        self.trouble = trouble

    def configure_model(self):
        with torch.device("meta"):
            self.net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        x = self.net(batch["x"])
        if self.trouble == "none":
            return None
        if self.trouble == "no loss":
            return {"x": x}
        if self.trouble == "no forward":
            return self(x).sum()
        if self.trouble == "shape":
            x = x @ torch.ones(3, 3)
        if self.trouble == "dim":
            x = x.sum(dim=7)
        if self.trouble == "value":
            raise ValueError("Input image size (32*32) doesn't match model (224*224).")
        if self.trouble == "bug":
            x = {}["missing"]
        if self.trouble == "mask":
            x = x[x > 0]
        if self.trouble == "item":
            x = x / x.sum().item()
        if self.trouble == "numpy":
            x = x * float(x.detach().numpy().sum())
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

class Data(pl.LightningDataModule):
    def make_example_batch(self):
        return {"x": torch.zeros(8, 64)}
"""


ROBERTA = "{model_type: roberta, is_decoder: true, vocab_size: 320, hidden_size: 32, intermediate_size: 64, "
ROBERTA += "num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 32, pad_token_id: 1}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter_folder(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_run(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def check_refused(args: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args]) == 2
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert said in lines[0]
    assert "Traceback" not in err


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--trainer.accumulate_grad_batches=0", "accumulate_grad_batches: got 0: expected 1 or more"),
        ("--trainer.limit_train_batches=0", "limit_train_batches: got 0: nothing would be trained"),
        ("--trainer.overfit_batches=2", "set limit_train_batches: 2 and data.shuffle: false instead"),
        ("--trainer.overfit_batches=0.25", "set limit_train_batches: 0.25 and data.shuffle: false instead"),
        ("--trainer.gradient_clip_val=-1", "gradient_clip_val: got -1"),
        (f"--model.init_args.config={ROBERTA}", "seq_length: got 32: RobertaForCausalLM begins to count positions"),
    ],
)
def test_what_fit_refuses_is_not_planned(option: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    check_refused(["--config=run.yaml", "--devices=2", option], said, capfd)
    (ended,) = fork_ranks("fit", "--config=run.yaml", option, ranks=1)
    assert ended.code != 0
    assert said in " ".join(ended.errors)


@pytest.mark.full
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("none", "model: Net.training_step returned None: a plan needs a step that trains: return the loss"),
        ("no loss", "model: Net.training_step returned a dict without loss"),
        (
            "no forward",
            'the step itself fails: Net: NotImplementedError: Module [FSDPNet] is missing the required "forward"',
        ),
        ("shape", "the step itself fails: Net: RuntimeError: "),
        ("dim", "the step itself fails: Net: IndexError: Dimension out of range"),
        ("value", "the step itself fails: Net: ValueError: Input image size (32*32) doesn't match model (224*224)"),
        ("mask", "the step of Net cannot run on tensors without values (DynamicOutputShapeException: aten.nonzero"),
        ("item", "the step of Net cannot run on tensors without values (DataDependentOutputException"),
        ("numpy", "the step of Net cannot run on tensors without values (RuntimeError: .numpy()"),
    ],
)
def test_why_a_step_cannot_be_followed_is_said(trouble: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    check_refused(["--model=mine.Net", "--data=mine.Data", "--devices=2", f"--model.trouble={trouble}"], said, capfd)


@pytest.mark.full
def test_what_helps_where_values_are_asked_for_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    own = ["--model=mine.Net", "--data=mine.Data", "--devices=2"]
    check_refused([*own, "--model.trouble=mask"], "boolean masks such as x[mask]", capfd)
    assert main(["plan", *own]) == 0
    # A bug in the user's code that no size explains keeps its traceback.
    assert main(["plan", *own, "--model.trouble=bug"]) != 0
    assert "KeyError: 'missing'" in capfd.readouterr().err


def test_a_module_that_is_no_task_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    own = ["--model=lightning.LightningModule", "--data=mine.Data", "--devices=2"]
    check_refused(own, "model: LightningModule has no training_step", capfd)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices=100000000"], "devices: 100,000,000 ranks on 1 nodes: at most 1,048,576"),
        (["--devices=8", "--nodes=10000000"], "80,000,000 ranks on 10,000,000 nodes: at most 1,048,576"),
        (["--device-memory", "-5GiB"], "got '-5GiB': expected more than nothing"),
        (["--device-memory=-5GiB"], "got '-5GiB': expected more than nothing"),
        (["--trainer.devices=-1"], "trainer.devices: got -1, all GPUs of a machine"),
    ],
)
def test_numbers_that_no_plan_has_are_refused(options: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    check_refused(["--config=run.yaml", *options], said, capfd)


@pytest.mark.full
def test_devices_of_the_plan_stand_in_for_all_of_a_machine() -> None:
    assert plan("--config=run.yaml", "--trainer.devices=-1", "--devices=4")["ranks"]["world_size"] == 4
    assert plan("--config=run.yaml", "--device-memory=10TiB", "--devices=2")["device"]["memory_bytes"] == 10 * 2**40
    assert parse_memory("2tb") == 2 * 10**12


@pytest.mark.full
def test_the_note_about_fsdp2_auto_says_what_is_left_to_do() -> None:
    auto = ["--config=run.yaml", "--devices=2", "--trainer.strategy=fsdp2_auto", "--device-memory=8GiB"]
    plain, searched = (plan(*auto, *more)["notes"] for more in ((), ("--search=true",)))
    assert any(note.endswith("those of fsdp2; add --search true") for note in plain)
    assert any(note.endswith("those of fsdp2") for note in searched)


def test_a_flag_without_a_value_is_refused_with_how_it_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    for args in (["--config=run.yaml", "--run_summary"], ["--run_summary", "--config=run.yaml"]):
        check_refused(args, "run_summary: no value given: expected true or false, such as --run_summary true", capfd)
    check_refused(["--config=run.yaml", "--gpu"], "gpu: no value given: expected one argument", capfd)


@pytest.mark.full
def test_both_engines_call_the_place_of_the_peak_alike() -> None:
    # The peak is the loss, in no unit, as a head with tied weights is in that of the root.
    options = ["--config=run.yaml", "--devices=2", "--model.config.tie_word_embeddings=true", "--data.seq_length=128"]
    found: list[dict[str, Any]] = [plan(*options, *more)["memory"] for more in ((), ("--exact=true",))]
    assert {memory["peak_unit"] for memory in found} == {"(outside units)"}, json.dumps(found)[:500]


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trainer.precision=32-true"], "float8: got a compute in float32"),
        (["--trainer.precision=bf16-mixed", "--model.lora.r=4"], "float8: the model has adapters"),
    ],
)
def test_float8_is_refused_where_fit_refuses_it(
    options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    check_refused(
        ["--config=run.yaml", "--trainer.strategy=lit_fsdp.FSDP2Strategy", "--trainer.strategy.float8={}", *options],
        said,
        capfd,
    )


def test_accumulation_by_a_schedule_is_planned_with_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    schedule = "[{class_path: GradientAccumulationScheduler, init_args: {scheduling: {0: 4}}}]"
    options = [
        "--trainer.strategy=lit_fsdp.FSDP2Strategy",
        "--trainer.strategy.sharding.no_sync=true",
        f"--trainer.callbacks={schedule}",
    ]
    assert main(["plan", "--config=run.yaml", "--devices=2", *options]) == 0
    assert "note: GradientAccumulationScheduler changes how many micro-batches" in capfd.readouterr().out
