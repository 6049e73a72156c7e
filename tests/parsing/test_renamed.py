"""A setting with an old name is refused in one line with the new one."""

import sys
from pathlib import Path

import pytest
import yaml

from lit_fsdp.cli.main import main
from lit_fsdp.parsing.renamed import RENAMED

STRATEGY = "trainer.strategy"
MODELS = {"lora": "CausalLM", "quantization": "CausalLM", "schedule": "CausalLM", "lr_scheduler": "CausalLM"}
MODELS |= {"mixing": "ImageClassification", "mixup": "ImageClassification"}
MODELS |= {"listening": "TextToSpeech", "speak_rows": "TextToSpeech"}

# As they were written before, the settings of the strategy and of models, and as they are written now.
SETTINGS = {
    "recompute": "activation_checkpointing",
    "recompute.every": "activation_checkpointing.every_n_blocks",
    "activation_checkpointing.every": "every_n_blocks",
    "units": "wrap",
    "units.rule": "wrap.policy",
    "wrap.rule": "policy",
    "units.classes": "wrap.module_classes",
    "wrap.classes": "module_classes",
    "sharding.hold_gradients": "no_sync",
    "offload": "cpu_offload",
    "async_checkpoints": "async_save",
    "quantization.double": "double_quant",
    "quantization.skip": "skip_modules",
    "lora.targets": "target_modules",
    "lora.exclude": "exclude_modules",
    "lora.init": "init_lora_weights",
    "lora.rslora": "use_rslora",
    "lora.dora": "use_dora",
    "schedule": "lr_scheduler",
    "schedule.shape": "lr_scheduler.type",
    "lr_scheduler.shape": "type",
    "lr_scheduler.warmup_fraction": "warmup_ratio",
    "lr_scheduler.min_factor": "min_lr_rate",
    "mixing": "mixup",
    "mixing.mixup": "mixup.mixup_alpha",
    "mixup.mixup": "mixup_alpha",
    "mixup.cutmix": "cutmix_alpha",
    "mixup.cutmix_share": "switch_prob",
    "mixup.probability": "prob",
    "listening": "speech_eval",
    "speak_rows": "num_samples",
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit_fsdp"])


def refuse(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def nest(path: str, value: str) -> str:
    """YAML of one setting."""
    for key in reversed(path.split(".")):
        value = f"{{{key}: {value}}}"
    return value


@pytest.mark.full(after=5)
@pytest.mark.parametrize("old", SETTINGS)
def test_an_old_key_is_refused_with_the_new_one_from_a_file_and_as_an_option(
    old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS.get(old.partition(".")[0])
    section, class_path = ("model", model) if model else (STRATEGY, "lit_fsdp.FSDP2Strategy")
    expected = f"error: {section}.init_args.{old}: renamed: {SETTINGS[old]}"
    settings = f"{{class_path: {class_path}, init_args: {nest(old, '1')}}}"
    Path("run.yaml").write_text(nest(section, settings))
    assert refuse("fit", "--config=run.yaml", capsys=capsys) == expected
    assert refuse("fit", f"--{section}={class_path}", f"--{section}.{old}=1", capsys=capsys) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["fit", f"--{STRATEGY}.wrap.policy=classes"],
            f"{STRATEGY}.init_args.wrap.policy: got 'classes': renamed: module_classes",
        ),
        (
            ["fit", '--trainer.callbacks=[{"class_path": "lit_fsdp.TrafficLogger"}]'],
            "trainer.callbacks[0].class_path: got 'lit_fsdp.TrafficLogger': renamed: lit_fsdp.CommunicationLogger",
        ),
        (
            ["fit", "--trainer.callbacks=TrafficLogger"],
            "trainer.callbacks.class_path: got 'TrafficLogger': renamed: CommunicationLogger",
        ),
        (["export", "--quantization.double=true"], "quantization.double: renamed: double_quant"),
        (["export", "--quantization.skip=[a]"], "quantization.skip: renamed: skip_modules"),
    ],
)
def test_so_are_values_classes_and_options_of_export(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse(*args, capsys=capsys) == f"error: {expected}"


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (nest(f"{STRATEGY}.init_args.offload", "{}"), [], f"{STRATEGY}.init_args.offload: renamed: cpu_offload"),
        ("{modle: {}}", [], "modle: unknown key: did you mean model?"),
        ("{}", ["--model.schedule={}"], "model.init_args.schedule: renamed: lr_scheduler"),
        ("{}", ["--model.schedule", "{}"], "model.init_args.schedule: renamed: lr_scheduler"),
        ("{}", [f"--{STRATEGY}.nonsense={{}}"], f"{STRATEGY}.init_args.nonsense: unknown key: expected one that"),
    ],
)
def test_empty_mappings_of_unknown_keys_are_refused_though_jsonargparse_drops_them(
    content: str, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": {"config": {"model_type": "llama"}}}
    data = {"class_path": "lit_fsdp.tasks.TextData", "init_args": {"train": "pydoc", "tokenizer": {"vocab_size": 300}}}
    Path("base.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    Path("run.yaml").write_text(content)
    files = ["--config=base.yaml"] + ["--config=run.yaml"] * (content != "{}")
    assert refuse("fit", *files, *options, capsys=capsys).startswith(f"error: {expected}")


def test_every_entry_of_the_table_is_tried_here() -> None:
    names = {key.rpartition(".")[2] for key in RENAMED} - {"TrafficLogger", "policy=classes"}
    assert names == {old.rpartition(".")[2] for old in SETTINGS}


def test_a_class_of_the_user_may_use_an_old_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from lightning.pytorch import LightningModule\n"
        "class Mine(LightningModule):\n"
        "    def __init__(self, listening: int = 1):\n"
        "        super().__init__()\n"
    )
    assert main(["fit", "--model=mine.Mine", "--model.listening=2", "--print_config"]) == 0
    assert "listening: 2" in capsys.readouterr().out
    line = refuse("fit", "--model=mine.Mine", "--model.mixing=2", capsys=capsys)
    assert line == "error: model.init_args.mixing: unknown key of mine.Mine: expected one of listening"
