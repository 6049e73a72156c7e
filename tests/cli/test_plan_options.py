"""Short forms of ``plan``: a model without a configuration, ranges, and flags that stand alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from launches import write_run
from plan_runs import enter_folder, main, plan

from lit_fsdp.cli.plan_options import make_settings, parse_counts, spell_options
from lit_fsdp.errors import ConfigError

TINY = {"model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256}
TINY |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
GPU = "--gpu=RTX 4090"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter_folder(tmp_path, monkeypatch)
    write_model(tmp_path / "tiny")
    write_run(tmp_path, model={"config": TINY})
    return tmp_path


def write_model(folder: Path, **settings: Any) -> None:
    """Write a folder with config.json alone, as a download of it leaves."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY, **settings}))


def check_refused(args: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


@pytest.mark.full
def test_a_folder_alone_is_planned_as_the_configuration_that_it_stands_for(folder: Path) -> None:
    (folder / "same.yaml").write_text(json.dumps(make_settings("tiny", "qlora", 512)))
    short = plan("--model", "tiny", "--method", "qlora", "--seq_length", "512", "--devices=2", GPU)
    assert short == plan("--config=same.yaml", "--devices=2", GPU)
    assert short["memory"]["quantized_bytes"] > 0
    assert short["device"]["fits"]


@pytest.mark.full
def test_layers_that_are_stored_dense_can_be_planned_to_train_in_full(folder: Path) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    write_model(folder / "nf4", quantization_config={**stored, "llm_int8_skip_modules": ["lm_head", "q_proj"]})
    adapters = plan("--model=nf4", "--method=lora", "--seq_length=256")
    full = plan("--model=nf4", "--method=lora", "--seq_length=256", "--model.lora.modules_to_save=[q_proj]")
    states = [found["memory"]["largest_bytes_by_kind"]["optimizer_state"] for found in (adapters, full)]
    assert states[1] > states[0]


@pytest.mark.full
def test_rows_are_no_longer_than_the_model_has_positions_where_nobody_says_how_long(folder: Path) -> None:
    write_model(folder / "short", max_position_embeddings=256)
    assert plan("--model=short") == plan("--model=short", "--seq_length=256")


@pytest.mark.parametrize("model", ["gpt2", "bert-base-uncased"])
def test_a_name_of_the_hub_needs_no_owner(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fsdp.cli.plan_options.fetch_pretrained", raise_unreachable)
    _, config = spell_options(["plan", "--model", model])
    assert json.loads(config.removeprefix("--config="))["model"]["init_args"] == {"pretrained": model}


def raise_unreachable(*_: Any, **__: Any) -> None:
    raise ValueError("the Hub is not there")


@pytest.mark.full
def test_a_model_takes_the_place_of_one_with_random_weights(folder: Path) -> None:
    (folder / "named.yaml").write_text(json.dumps(make_settings("tiny", "full", 256)))
    assert spell_options(["plan", "--config=run.yaml", "--model=tiny"])[-1] == "--model.config=null"
    assert spell_options(["plan", "--config=named.yaml", "--model=tiny"])[-1] == "--model.pretrained=tiny"
    found = plan("--config=run.yaml", "--model=./tiny")
    assert found["memory"] == plan("--config=run.yaml")["memory"]


@pytest.mark.full
def test_the_first_number_of_a_range_is_written_where_it_was_searched(folder: Path) -> None:
    options = ("--config=run.yaml", GPU, "--device-memory=1.2GiB", "--search")
    plan(*options, "--devices=2..3", "--write=chosen.yaml")
    written = (folder / "chosen.yaml").read_text()
    assert yaml.safe_load(written)["trainer"]["devices"] == 2
    assert written.startswith("# Chosen by `plan --search true` for 2 ranks: ")


@pytest.mark.full
def test_a_method_and_a_model_change_those_of_a_configuration(folder: Path) -> None:
    write_model(folder / "deeper", num_hidden_layers=6)
    (folder / "full.yaml").write_text(json.dumps(make_settings("tiny", "full", 256)))
    found = plan("--config=full.yaml", "--model=./deeper", "--method=lora", "--seq-length=128")
    assert found == plan("--model=./deeper", "--method=lora", "--seq-length=128", "--trainer.precision=bf16-mixed")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--longest", "--gpu", "RTX 4090"], ["--longest=true", "--gpu=RTX 4090"]),
        (["--search", "false", "--cheapest"], ["--search=false", "--cheapest=true"]),
        (["--device-memory", "-8GiB"], ["--device_memory=-8GiB"]),
        (["-c", "a.yaml", "--model.lora={r: 8}"], ["--config=a.yaml", "--model.lora={r: 8}"]),
        (["--model", "CausalLM"], ["--model=CausalLM"]),
        (
            ["--config=a.yaml", "--method", "full"],
            ["--config=a.yaml", "--model.lora=null", "--model.quantization=null"],
        ),
    ],
)
def test_the_parser_is_given_names_with_values(args: list[str], expected: list[str]) -> None:
    assert spell_options(["plan", *args]) == ["plan", *expected]


def test_a_range_is_all_of_few_numbers_and_doublings_of_many() -> None:
    assert parse_counts("1..8", "nodes") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert parse_counts("2..50", "nodes") == [2, 4, 8, 16, 32, 50]
    assert parse_counts(" 4 ", "nodes") == [4]
    for text, said in (("8..1", "a range that rises"), ("0..2", "1 or more"), ("few", "a number, or a range")):
        with pytest.raises(ConfigError) as caught:
            parse_counts(text, "nodes")
        assert said in caught.value.line


@pytest.mark.full
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model=./absent"], "got './absent': there is no such folder"),
        (["--model=tiny", "--method=qlra"], "method: got 'qlra': did you mean qlora?"),
        (["--model=tiny", "--seq_length", "-5"], "seq_length: got '-5': expected a number of tokens"),
        (["--model=tiny", "--nodes=1..2", GPU, "--prices=h100.yaml"], "prices: h100.yaml: no price of RTX 4090"),
        (["--model=tiny", "--seq_length=long"], "seq_length: got 'long': expected a number of tokens"),
        (["--model=tiny", "--seq_length=5000"], "max_position_embeddings: got 4096, and data.seq_length 5000"),
        (
            ["--model=tiny", "--search", "--device-memory=1GiB", "--write=tiny/config.json/mine.yaml"],
            "write: got tiny/config.json: File exists; choose another folder",
        ),
        (["--model=tiny", "--longest"], "longest: what has to fit is not known"),
        (["--model=tiny", "--nodes=1..4"], "nodes, devices: got a range: it compares speed; name a GPU"),
        (["--model=tiny", "--prices=p.yaml", GPU], "prices: got p.yaml: "),
        (["--model=tiny", "--prices=near.yaml", "--cheapest"], "'RTX 490': no such GPU is known: nearest: RTX 4090"),
        (["--model=tiny", "--prices=free.yaml", "--cheapest"], "RTX 4090: got 0: expected the price of an hour"),
        (["--model=mxfp4", "--method=lora"], "its weights are stored as mxfp4: only those of bitsandbytes"),
        (["--config=run.yaml", "--config={method: lora}"], "method: got lora: an option of the command line"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    folder: Path, args: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "mxfp4", quantization_config={"quant_method": "mxfp4"})
    (folder / "near.yaml").write_text("RTX 490: 0.3")
    (folder / "h100.yaml").write_text("H100 SXM: 2.5")
    (folder / "free.yaml").write_text("RTX 4090: 0")
    check_refused(args, said, capfd)
    assert not (folder / "planned").exists()
