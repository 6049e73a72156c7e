"""``plan`` on the command line, and what it says beside what a run holds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launches import ROOT, write_run
from plan_runs import check_held, enter_folder, fit, main, plan

from lit_fsdp.callbacks import ThroughputLogger
from lit_fsdp.planning.needed_memory import HEADROOM, count_outside_bytes
from lit_fsdp.planning.timing.hardware import find_gpu, parse_memory
from lit_fsdp.planning.timing.step_estimate import StepTimeEstimator
from lit_fsdp.sharding.mesh import MeshSizes
from lit_fsdp.weights.safetensors_io import TensorFiles

QWEN3 = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN3 |= {"vocab_size": 151936, "num_hidden_layers": 36, "max_position_embeddings": 40960}
QWEN2 = {"model_type": "qwen2", "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064}
QWEN2 |= {"num_hidden_layers": 80, "max_position_embeddings": 32768}
# The architectures that the configurations name, as their config.json has them.
BIG: dict[str, dict[str, Any]] = {
    "causal_lm_qlora_2x8gb": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "causal_lm_qlora_1x8gb": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "causal_lm_lora_4x16gb": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "causal_lm_qlora_2x24gb_70b": {
        **QWEN2,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "tie_word_embeddings": False,
    },
}
BIASED = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
BIASED |= {"num_attention_heads": 2, "num_key_value_heads": 2}
LORA = {"r": 4, "dtype": "float32"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user works, with a tiny run."""
    enter_folder(tmp_path, monkeypatch)
    write_run(tmp_path)
    return tmp_path


def find_fast_peak(logger: Any, trainer: Any, module: Any) -> float:
    """Do as if the CPU that a run is on were a GPU."""
    gpu = find_gpu("RTX 4090")
    assert gpu is not None
    logger._estimator = StepTimeEstimator(gpu=gpu, dtype="float32", links=logger.links)
    return gpu.fp32_tflops


def count_adapters() -> int:
    """Return how many parameters trained in the last plan, over all ranks."""
    found: dict[str, Any] = json.loads(Path("planned/plan.json").read_text())
    return int(found["model"]["trained"])


def write_config(folder: Path, **settings: Any) -> Path:
    """Write a model folder in which any look at the weights would fail."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="full"),
        pytest.param({"lora": LORA}, id="lora", marks=pytest.mark.slow),
        pytest.param({"lora": LORA, "quantization": {"type": "nf4"}}, id="nf4", marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_what_a_run_on_two_ranks_holds(
    folder: Path, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = {"model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256}
    architecture |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sections = {"trainer": {"enable_checkpointing": False}, "data": {"seq_length": 128}}
    write_run(folder, model={"config": architecture, **model}, **sections)
    monkeypatch.setattr(ThroughputLogger, "_choose_peak", find_fast_peak)
    _, report = fit("--config=run.yaml", "--monitoring=true")
    real, speed = report["memory"]["numbers"]["step"], report["speed"]
    assert any(note.startswith("step predicted 0.") and "measured" in note for note in speed["notes"])
    for options in ((), ("--exact=true",)):
        found = plan("--config=run.yaml", "--devices=2", *options, "--gpu=RTX 4090")
        assert found["time"]["step_s"] == pytest.approx(speed["numbers"]["predicted"]["step_s"], rel=1e-9)
        check_held(found["memory"], real)
        assert found["memory"]["peak_phase"] == real["peak_phase"]


@pytest.mark.full
def test_a_search_leaves_out_what_the_settings_refuse(capfd: pytest.CaptureFixture[str]) -> None:
    config = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
    bits = ("--trainer.strategy.sharding.gather_bits=8", "--trainer.precision=bf16-mixed")
    searched = plan(config, *bits, "--devices=2", "--search=true", "--gpu=RTX 4090")["search"]
    trained = {tuple(candidate["changes"]) for candidate in searched["candidates"]}
    assert any("model.lora" in changes for changes in trained)
    assert not any("model.quantization" in changes for changes in trained)
    said = " ".join(capfd.readouterr().out.split())
    assert "not tried: model.lora, model.quantization: sharding.gather_bits: got 8 with quantization: rounding" in said


@pytest.mark.full
def test_split_layers_are_traced_timed_and_searched(capfd: pytest.CaptureFixture[str]) -> None:
    config, split = f"--config={ROOT / 'configs' / 'quickstart.yaml'}", "--trainer.strategy.mesh.tensor=2"
    Path("ema.yaml").write_text("trainer: {callbacks: {class_path: lit_fsdp.callbacks.EMA}}")
    whole = plan(config, "--devices=2")
    found = plan(config, "--config=ema.yaml", split, "--devices=4", "--gpu=RTX 4090")
    assert (found["engine"], found["ranks"]["tensor"]) == ("exact trace", 2)
    assert "EMA: its average, 1.00 MiB of each GPU in float32, is not counted" in found["notes"]  # a quarter
    sent, before = (p["communication"]["bytes_per_step"]["reduce_scatter"] for p in (found, whole))
    num_norms = 9 * 128  # which are not split
    assert sent == (before - 4 * num_norms) // 2 + 4 * num_norms
    # As CommunicationLogger counts them, see test_what_split_layers_send_has_a_row_of_its_own: of each of 4 layers 7
    # sums of 128 features, two more, and the logits of 1,024 tokens by as many words.
    assert found["communication"]["collectives_per_step"]["tensor"] == 4 * 7 + 2 + 1
    assert found["communication"]["bytes_per_step"]["tensor"] == 4 * 1024 * ((4 * 7 + 2) * 128 + 1024)
    time = found["time"]
    assert 0 < time["communication_s_by_collective"]["tensor"] < time["exposed_communication_s"] < time["step_s"]
    capfd.readouterr()
    options = ["--trainer.strategy.sharding.reshard_after_forward=true", "--search=true", "--gpu=RTX 4090"]
    searched = plan(config, split, "--devices=4", *options)
    configured, *others = searched["search"]["candidates"]
    assert configured["time"]["step_s"] == time["step_s"]
    assert len(others) > 1
    assert "chosen: sharding.reshard_after_forward=false" in capfd.readouterr().out


@pytest.mark.full
def test_the_time_of_split_rows_holds_what_their_ranks_exchange() -> None:
    config, split = f"--config={ROOT / 'configs' / 'quickstart.yaml'}", "--trainer.strategy.mesh.sequence=2"
    found = plan(config, split, "--devices=2", "--gpu=RTX 4090")
    time = found["time"]
    assert 0 < time["communication_s_by_collective"]["all_to_all"] < time["exposed_communication_s"] < time["step_s"]
    assert [note for note in found["notes"] if "leaves out" in note] == []


def test_the_quickstart_plans_on_the_processes_that_it_starts(capfd: pytest.CaptureFixture[str]) -> None:
    Path("ema.yaml").write_text("trainer: {callbacks: {class_path: lit_fsdp.callbacks.EMA}}")
    found = plan(f"--config={ROOT / 'configs' / 'quickstart.yaml'}", "--config=ema.yaml")
    assert found["model"] == {"weights": 1_049_728, "trained": 1_049_728}
    assert "EMA: its average, 2.00 MiB of each GPU in float32, is not counted" in found["notes"]
    assert found["ranks"] == {"world_size": 2, "nodes": 1, "devices": 2, "replicas": 1, "shards": 2, "tensor": 1}
    assert found["memory"]["peak_bytes"] == sum(found["memory"]["peak_bytes_by_kind"].values())
    assert found["device"] is None
    assert Path("planned/plan.png").read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out
    for words in (
        "optimizer state",
        "at the peak",
        "all-gather of parameters",
        "CUDA context",
        "1 x 2 ranks",
        "parameters: 1,049,728",
    ):
        assert words in printed
    assert "fits:" not in printed


@pytest.mark.full
@pytest.mark.parametrize("num_layers", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BIG)
def test_the_big_configurations_plan_from_the_architecture_alone(
    folder: Path, name: str, num_layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a file of weights was opened")

    monkeypatch.setattr(TensorFiles, "__init__", refuse)
    config = BIG[name] if num_layers is None else {**BIG[name], "num_hidden_layers": num_layers}
    model = write_config(folder / "model", **config)
    found = plan(f"--config={ROOT / 'configs' / name}.yaml", f"--model.pretrained={model}", "--device-memory=24GiB")
    assert found["device"]["fits"]
    is_quantized, is_offloaded, is_alone = "qlora" in name, "70b" in name or "1x8gb" in name, "1x" in name
    assert (found["memory"]["quantized_bytes"] > 0) is is_quantized
    assert (found["host"]["bytes"] > 0) is is_offloaded
    stored = found["host"]["bytes_by_kind"] if is_offloaded else found["memory"]["largest_bytes_by_kind"]
    assert found["memory"]["quantized_bytes"] < stored["parameters"]
    gathered_bytes = found["communication"]["bytes_per_step"]["gather"]
    assert gathered_bytes == 0 if is_alone else gathered_bytes > found["memory"]["largest_bytes_by_kind"]["parameters"]


@pytest.mark.full
@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_engines_agree_and_the_trace_says_so(packing: bool, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--config=run.yaml", "--devices=2", f"--data.packing={packing}", "--data.batch_size=2"]
    options += ["--data.seq_length=256", "--trainer.strategy.activation_checkpointing.mode=full"]
    counted, traced = plan(*options), plan(*options, "--exact=true")
    assert (counted["engine"], traced["engine"]) == ("closed form", "exact trace")
    counted_bytes, traced_bytes = counted["memory"]["peak_bytes"], traced["memory"]["peak_bytes"]
    assert counted_bytes == pytest.approx(traced_bytes, rel=0.01)
    assert traced["closed_form_peak_bytes"] == counted_bytes
    assert f"{100 * (counted_bytes / traced_bytes - 1):+.1f} %" in capfd.readouterr().out
    parts = counted["memory"]["peak_activation_bytes_by_part"]
    assert sum(parts.values()) == counted["memory"]["peak_bytes_by_kind"]["activations"]
    assert {"residual stream", "head and loss"} < set(parts)


@pytest.mark.full
def test_what_the_closed_form_has_no_rules_for_is_traced() -> None:
    architecture = (
        "{model_type: persimmon, vocab_size: 64, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, "
    )
    architecture += "num_attention_heads: 2}"
    found = plan("--config=run.yaml", "--devices=2", f"--model.config={architecture}")
    assert found["engine"] == "exact trace"
    assert found["closed_form_peak_bytes"] is found["time"] is None
    assert found["flops"]["hardware"] > found["flops"]["model"] > 0
    assert "no closed form" in found["notes"][0]


@pytest.mark.full
def test_offload_on_one_rank_is_counted_by_both_engines() -> None:
    options = ["--config=run.yaml", "--devices=1", "--trainer.strategy.cpu_offload={}"]
    counted, traced = plan(*options), plan(*options, "--exact=true")
    assert traced["engine"] == "exact trace"
    assert counted["host"]["bytes_by_kind"].items() <= traced["host"]["bytes_by_kind"].items()
    assert traced["memory"]["peak_bytes"] == pytest.approx(counted["memory"]["peak_bytes"], rel=0.03)


@pytest.mark.full
def test_what_is_offloaded_is_host_memory_and_no_device_memory() -> None:
    offload = "--trainer.strategy.cpu_offload={}"
    on_device, on_host = (plan("--config=run.yaml", "--devices=2", *more) for more in ((), (offload,)))
    states = on_device["memory"]["largest_bytes_by_kind"]
    host = on_host["host"]["bytes_by_kind"]
    assert host["optimizer_state"] == states["optimizer_state"]
    buffers = on_host["memory"]["largest_bytes_by_kind"]["parameters"]
    assert 0 < host["parameters"] == states["parameters"] - buffers
    assert host["gradients"] == host["parameters"]
    assert on_host["memory"]["largest_bytes_by_kind"]["optimizer_state"] == 0
    assert on_host["memory"]["peak_bytes"] < on_device["memory"]["peak_bytes"]


@pytest.mark.full
def test_what_async_save_stages_is_host_memory(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--config=run.yaml", "--devices=2", "--trainer.strategy.async_save=true"]
    on_device, on_host = (plan(*options, *more)["host"] for more in ((), ("--trainer.strategy.cpu_offload={}",)))
    assert "the copy that async_save writes" in capfd.readouterr().out
    kinds = on_host["bytes_by_kind"]
    assert on_device["staged_bytes"] == on_host["staged_bytes"] == kinds["parameters"] + kinds["optimizer_state"] > 0
    assert on_device["bytes"] == on_device["staged_bytes"]
    assert on_host["bytes"] == sum(kinds.values()) + on_host["staged_bytes"]
    model = write_config(folder / "model", model_type="llama", architectures=["LlamaForCausalLM"], **BIASED)
    options += ["--model.config=null", f"--model.pretrained={model}", f"--model.lora={json.dumps(LORA)}"]
    of_adapters, of_all = (plan(*options, *more)["host"] for more in ((), ("--trainer.strategy.save_frozen=true",)))
    # 4 bytes for each number of an adapter, and 8 for its optimizer state, whose counts of steps are few.
    assert of_adapters["staged_bytes"] == pytest.approx(12 * count_adapters() / 2, rel=0.02)
    assert of_all["staged_bytes"] > 2 * of_adapters["staged_bytes"]


@pytest.mark.full
def test_a_step_fits_where_its_peak_and_the_headroom_do(capfd: pytest.CaptureFixture[str]) -> None:
    roomy = plan("--config=run.yaml", "--devices=2", "--device-memory=24GB")["device"]
    assert roomy["fits"]
    assert roomy["memory_bytes"] == 24 * 10**9
    assert "fits: yes" in capfd.readouterr().out
    tight = plan("--config=run.yaml", "--devices=2", "--device-memory", "1GiB")
    outside_bytes = count_outside_bytes(MeshSizes(replicate=1, shard=2))
    needed = round(tight["memory"]["peak_bytes"] * HEADROOM) + outside_bytes
    assert tight["device"]["outside_bytes"] == outside_bytes
    assert tight["device"]["needed_bytes"] == needed
    assert tight["device"]["left_bytes"] == 2**30 - needed < 0
    assert not tight["device"]["fits"]
    assert "fits: NO" in capfd.readouterr().out


@pytest.mark.full
def test_a_traced_step_needs_what_its_allocations_were_replayed_in(capfd: pytest.CaptureFixture[str]) -> None:
    found = plan("--config=run.yaml", "--devices=2", "--exact=true", "--device-memory=4GiB")
    device, replay, peak_bytes = found["device"], found["memory"]["replay"], found["memory"]["peak_bytes"]
    assert device["needed_bytes"] == replay["least_bytes"] + device["outside_bytes"]
    assert peak_bytes < replay["least_bytes"] <= replay["steady_bytes"] <= replay["reserved_bytes"]
    assert device["headroom_factor"] == replay["least_bytes"] / peak_bytes
    printed = capfd.readouterr().out
    assert f" x {device['headroom_factor']:.2f} for the allocator (replayed) + 1.09 GiB for CUDA and NCCL = " in printed
    assert f"allocator, replayed: works from {replay['least_bytes'] / 2**20:.2f} MiB" in printed


@pytest.mark.full
def test_more_ranks_hold_less_each_and_settings_of_gpus_need_none() -> None:
    options = ["--config=run.yaml", "--trainer.accelerator=gpu", "--trainer.devices=4"]
    options += ["--trainer.precision=16-mixed", "--trainer.accumulate_grad_batches=3"]
    few = plan(*options)
    many = plan(*options, "--devices=8", "--nodes=2")
    assert (few["ranks"]["world_size"], many["ranks"]["world_size"]) == (4, 16)
    state = "optimizer_state"
    assert many["memory"]["largest_bytes_by_kind"][state] < few["memory"]["largest_bytes_by_kind"][state] / 3
    assert few["micro_batches"] == 3
    assert few["communication"]["collectives_per_step"]["gather"] % 3 == 0


@pytest.mark.full
def test_padded_rows_need_a_mask_only_where_something_is_padded() -> None:
    options = ["--config=run.yaml", "--devices=2", "--data.packing=false", "--data.seq_length=256"]
    one, padded = (
        plan(*options, "--data.batch_size=1", *more)["memory"]["peak_bytes"]
        for more in ((), ("--data.pad_to_multiple_of=257",))
    )
    assert padded > one + 256 * 256


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--device-memory=16 gallons", "expected a number and one of B, KB"),
        ("--device-memory=0GiB", "expected more than nothing"),
        ("--devices=0", "devices: got 0: expected 1 or more"),
        ("--nodes=-1", "nodes: got -1: expected 1 or more"),
        ("--device_memry=1GiB", "device_memory"),
        ("--trainer.strategy=ddp", "only FSDP2Strategy can be planned"),
        ("--data.seq_length=999999", "rows are longer than the model has positions"),
        ("--data=lightning.pytorch.demos.boring_classes.BoringDataModule", "has no method make_example_batch"),
        ("--model.pretrained=nowhere", "expected one of them"),
        ("--out=run.yaml", "choose another folder"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(option: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config=run.yaml", "--devices=2", option]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert not dist.is_initialized()


MINE = """
import lightning.pytorch as pl
import torch
from torch import nn

class Net(pl.LightningModule):
    def __init__(self, width: int = 256, by_hand: bool = False, peeks: bool = False):
        super().__init__()
        self.width, self.automatic_optimization, self.peeks = width, not by_hand, peeks

    def setup(self, stage):
        raise AssertionError("a plan needs no setup")

    def configure_model(self):
        with torch.device("meta"):
            self.net = nn.Sequential(*[nn.Linear(self.width, self.width, bias=False) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        loss = self.net(batch["x"]).square().mean()
        if self.peeks and loss > 1:
            loss = loss / 2
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=int(steps))]

class Data(pl.LightningDataModule):
    def make_example_batch(self):
        return {"x": torch.zeros(8, 256)}
"""


@pytest.mark.full
def test_a_task_and_data_of_ones_own_need_one_method(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(MINE)
    own = ["--model=mine.Net", "--data=mine.Data", "--devices=4"]
    memory = plan(*own)["memory"]["largest_bytes_by_kind"]
    assert memory["parameters"] == memory["optimizer_state"] == 4 * 256 * 256 * 4 // 4
    for option, said in (("by_hand", "optimizes manually"), ("peeks", "tensors without values")):
        capfd.readouterr()
        assert main(["plan", *own, f"--model.{option}=true"]) == 2
        assert said in capfd.readouterr().err


@pytest.mark.full
def test_a_model_with_values_is_planned_as_one_without(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    for device in ("meta", "cpu"):
        (folder / f"on_{device}.py").write_text(MINE.replace('"meta"', f'"{device}"'))
        found.append(plan(f"--model=on_{device}.Net", f"--data=on_{device}.Data", "--devices=4"))
        printed = capfd.readouterr()
        assert ("this process has allocated it" in printed.out) is (device == "cpu")
        assert "Warning" not in printed.err
    assert found[0]["memory"] == found[1]["memory"]
    assert found[0]["memory"]["peak_bytes"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--trainer.accelerator=gpu", "--trainer.precision=16-mixed"], id="scaler"),
        pytest.param(["--model.optimizer.name=adamw_8bit", "--exact=true"], id="8bit"),
        pytest.param([f"--model.config={json.dumps({**BIASED, 'model_type': 'phi'})}"], id="phi"),
    ],
)
def test_libraries_do_not_warn_of_what_no_plan_does(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config=run.yaml", "--devices=2", *options]) == 0
    assert "Warning" not in (said := capfd.readouterr().err), said
    assert "GradScaler" not in said


@pytest.mark.full
def test_a_time_names_its_gpu_and_one_rank_sends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def say(*options: str) -> str:
        plan("--config=run.yaml", *options)
        return capfd.readouterr().out

    alone = say("--devices=1", "--gpu=H100")
    assert "Time of a step on H100 PCIe; also known: H100 SXM" in alone
    assert not any(words in alone for words in ("with fewer than", "link: ", "hidden communication", "collectives ach"))
    several = say("--devices=2", "--gpu=H100 SXM")
    assert "Time of a step on H100 SXM " in several
    assert "also known" not in several
    assert "takes longer than compute" in several
    assert "link: nvlink4,ib400x2 is assumed for H100 SXM" in several
    larger = say("--devices=2", "--gpu=A100", "--device-memory=80GiB")
    assert "Time of a step on A100 PCIe 80GB" in larger


def test_sizes_of_memory_have_units() -> None:
    assert [parse_memory(text) for text in ("16GiB", "24 gb", "1.5MiB")] == [16 * 2**30, 24 * 10**9, 3 * 2**19]


@pytest.mark.full
def test_a_plan_prints_nothing_beside_its_result() -> None:
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    command = [sys.executable, "-m", "lit_fsdp", "plan", "--config", str(config), "--gpu", "RTX 4080", "--devices", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Seed set" not in done.stdout + done.stderr
