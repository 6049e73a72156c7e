"""A run of adapters over a 4-bit base on the command line, from the start to what other tools load."""

import json
import logging
from pathlib import Path

import pytest
import torch
from launches import fork_ranks, write_run
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lit_fsdp.cli.main import main

ARCHITECTURE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RUN = "runs/run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was started twice: from scratch, and from its last checkpoint."""
    folder = tmp_path_factory.mktemp("user")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **ARCHITECTURE)).save_pretrained(folder / "base")
    model = {"config": None, "pretrained": "base", "lora": {"r": 4, "alpha": 8}, "quantization": {"type": "nf4"}}
    write_run(folder, model=model, data={"validation": "train.jsonl"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for ranks, steps in ((2, 2), (1, 4)):
            command = ("fit", "--config=run.yaml", "--ckpt_path=last", f"--trainer.max_steps={steps}")
            ended = fork_ranks(*command, ranks=ranks)
            assert [rank.code for rank in ended] == [0] * ranks, ended[0].err
    return folder


@pytest.mark.full
def test_the_second_run_went_on_where_the_first_ended(folder: Path) -> None:
    rows = (folder / RUN / "version_1" / "metrics.csv").read_text().splitlines()
    steps = [row.split(",")[rows[0].split(",").index("step")] for row in rows[1:]]
    assert "0" not in steps
    assert "3" in steps


@pytest.mark.full
@pytest.mark.parametrize("command", [pytest.param("validate", marks=pytest.mark.slow), "predict"])
def test_other_commands_start_from_it(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"word{i}"}) + "\n" for i in range(4)))
    options = ["--data.predict=prompts.jsonl"] if command == "predict" else []
    ended = fork_ranks(command, "--config=run.yaml", "--ckpt_path=last", *options)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err


@pytest.mark.full
def test_it_leaves_as_adapters_and_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["export", f"--checkpoint={RUN}", "--out=adapters"]) == 0
    assert "adapter_model.safetensors" in capsys.readouterr().out
    assert main(["export", f"--checkpoint={RUN}", "--out=merged", "--merge=true", "--base=base"]) == 0
    adapted = AutoPeftModelForCausalLM.from_pretrained("adapters", dtype=torch.float32)
    assert isinstance(adapted, PeftModel)
    merged = AutoModelForCausalLM.from_pretrained("merged")
    ids = AutoTokenizer.from_pretrained("adapters")("word3 is 7.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert (adapted(ids).logits - merged(ids).logits).abs().max() < 1e-6
        with adapted.disable_adapter():
            change = (adapted(ids).logits - merged(ids).logits).abs().max()
        assert change > 1e-4, change
    assert (folder / "merged" / "tokenizer.json").read_text() == (folder / "adapters" / "tokenizer.json").read_text()


def test_the_card_says_over_which_weights_to_load_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert main(["export", f"--checkpoint={RUN}", "--out=carded"]) == 0
    card = (folder / "carded" / "README.md").read_text()
    assert card.startswith(
        "---\nbase_model: base\nlibrary_name: peft\npipeline_tag: text-generation\n---\n\n# carded\n\n"
        "Adapters of LlamaForCausalLM, "
    )
    assert "null" not in card + (folder / RUN / "version_0" / "config.yaml").read_text()
    begin = card.index("```python\n") + len("```python\n")
    code = card[begin : card.index("```", begin)]
    assert 'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True' in code
    found: dict[str, object] = {}
    exec(code, found)
    assert isinstance(found["model"], PeftModel)


def test_it_leaves_in_4_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    options = ["--merge=true", "--quantization.type=nf4", "--quantization.double_quant=false"]
    assert main(["export", f"--checkpoint={RUN}", "--out=small", *options]) == 0
    model = AutoModelForCausalLM.from_pretrained("small")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert model.config.quantization_config.bnb_4bit_quant_type == "nf4"


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        ("--merge=true --quantization.type=nf5", 2, "type: got 'nf5': expected one of nf4, fp4 or int8"),
        ("--merge=true --quantization.block_size=7", 2, "quantization.block_size: got 7: expected one of 32, 64"),
        ("--quantization.type=nf4", 2, "quantization: adapters are not quantized; set merge to true, or leave it"),
        ("--merge=maybe", 2, "merge: got 'maybe': expected true or false"),
        (
            "--base=base",
            2,
            "base: got 'base': adapters of init_lora_weights 'default' are exported without it; leave it out",
        ),
        ("--merge=true --base=nowhere", 2, "base: got 'nowhere': no such folder, and the Hub says: "),
        ("--merge=true --dtype=int8", 2, "dtype: got 'int8': expected one of keep, float32, bfloat16"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: str,
    code: int,
    expected: str,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["export", f"--checkpoint={RUN}", "--out=new", *options.split()]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert expected in line
    assert not (folder / "new").exists()


def test_a_kernel_that_no_gpu_needs_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["bench", "--help"]) == 0
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "why")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["something else"]


@pytest.mark.full
def test_last_takes_the_newest_that_fits_and_says_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of adapters after whole weights in the same run name, each kind in version folders of its own."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **ARCHITECTURE)).save_pretrained("base")
    write_run(tmp_path, model={"config": None, "pretrained": "base"})
    run, lora = ("fit", "--config=run.yaml", "--trainer.max_steps=1"), "--model.lora.r=4"
    further = ("fit", "--config=run.yaml", "--ckpt_path=last", "--trainer.max_steps=2")
    validate = ("validate", "--config=run.yaml", "--ckpt_path=last", "--data.validation=train.jsonl")
    rank = "--model.lora.r=2"
    commands = [run, (*further, lora), (*run, lora), further, (*further, rank), (*validate, rank), (*further, lora)]
    whole, other_kind, adapters, resumed, other_rank, validated, resumed_adapters = (
        fork_ranks(*command, ranks=1)[0] for command in commands
    )
    first, second = (f"{tmp_path}/{RUN}/version_{k}/checkpoints/epoch=0-step=1.ckpt" for k in (0, 1))
    third = f"{tmp_path}/{RUN}/version_2/checkpoints/epoch=0-step=2.ckpt"
    for ended in (whole, adapters, resumed, resumed_adapters):
        assert ended.code == 0, ended.err
    why = "does not fit: lora: it holds whole weights, this run has adapters"
    assert other_kind.code == other_rank.code == 2
    assert f"'last': {first} {why}: set" in other_kind.errors[0]
    assert f"{second} does not fit: lora: it holds adapters, this run has none: taking" in resumed.err
    assert f"checkpoint at {first}" in resumed.err
    assert (
        f"{third} {why}; {second} does not fit: lora.r: it was saved with 4, this run has 2: " in other_rank.errors[0]
    )
    assert other_rank.errors[0].endswith(", take another --run_name, or leave --ckpt_path out to start afresh")
    assert validated.errors[0].endswith("this run has 2: set it as there, or take another --run_name")
    assert resumed_adapters.err.count(f"{third} {why}: taking") == 1
    assert f"checkpoint at {second}" in resumed_adapters.err
    assert len(list((tmp_path / RUN).glob("version_*"))) == 4
