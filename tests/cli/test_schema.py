"""The schema of all YAML keys: what an editor accepts and refuses with it is what ``fit`` does."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match

from lit_fsdp.cli.main import main
from lit_fsdp.cli.schema import make_fit_schema
from lit_fsdp.parsing.config_files import load_yaml
from lit_fsdp.tasks import CausalLM

ROOT = Path(__file__).parents[2]
CONFIGS = [path for folder in ("configs", "examples") for path in sorted((ROOT / folder).rglob("*.yaml"))]
TASK: dict[str, Any] = {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": {"pretrained": "a/b", "lora": {"r": 8}}}


class Elsewhere(CausalLM):
    """A class of a module that is not found by its name any more."""


Elsewhere.__module__ = "gone"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads(json.dumps(make_fit_schema()))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def find_error(validator: Draft202012Validator, config: Any) -> ValidationError | None:
    return best_match(validator.iter_errors(config))


def test_an_editor_accepts_every_configuration_and_refuses_wrong_keys_and_types(
    validator: Draft202012Validator,
) -> None:
    assert len(CONFIGS) > 15
    for path in CONFIGS:
        if path.name != "sky.yaml":  # of SkyPilot
            assert find_error(validator, load_yaml(path.read_text())) is None, path
    good: list[Any] = [
        {"model": TASK, "data": {"init_args": {"batch_size": 2}}},  # the class is in another file
        {"model": {"class_path": "CausalLM"}, "trainer": {"strategy": "fsdp2", "callbacks": ["ModelCheckpoint"]}},
        {"model": {"class_path": "mytask.MyTask", "init_args": {"anything": 1}}},
        {"trainer": {"callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}]}},
        {"$schema": "lit_fsdp.schema.json", "trainer": {"max_steps": 3, "precision": "bf16-true"}},
    ]
    assert [find_error(validator, config) for config in good] == [None] * len(good)
    bad: list[tuple[Any, str]] = [
        ({"trainer": {"max_step": 3}}, "'max_step' was unexpected"),
        ({"trainer": {"max_steps": "many"}}, "'many' is not of type 'integer'"),
        ({"modle": TASK}, "'modle' was unexpected"),
        ({"run_summary": "often"}, "'often' is not of type 'boolean'"),
        ({"trainer": {"strategy": {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": {"mesh": {"shrad": 2}}}}}, ""),
        ({"model": {**TASK, "init_args": {"pretraind": "a/b"}}}, ""),
        ({"model": {**TASK, "init_args": {"lora": {"r": "eight"}}}}, ""),
        ({"model": {"class_path": "lit_fsdp.tasks.CausalML"}}, ""),
        ({"data": {"class_path": "TextData", "init_args": {"max_lenght": 3}}}, ""),
        ({"trainer": {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"save_tpo_k": 1}}]}}, ""),
    ]
    for config, expected in bad:
        error = find_error(validator, config)
        assert error is not None, config
        assert expected in error.message


def test_keys_have_their_help_and_default(validator: Draft202012Validator) -> None:
    schema: Any = validator.schema
    described = schema["$defs"]["Mesh"]["properties"]["shard"]
    assert described["default"] == -1
    assert described["description"].startswith("Over how many ranks")


@pytest.mark.full
def test_the_command_prints_it_alone_and_a_run_may_name_it(
    validator: Draft202012Validator, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == validator.schema
    assert main(["schema", "--outt=x"]) == 2
    assert capsys.readouterr().err == "error: outt: unknown key: expected no key here\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("$schema: lit_fsdp.schema.json\nmodel: CausalLM\n")
    assert main(["fit", "--config=run.yaml", "--print_config"]) == 0
