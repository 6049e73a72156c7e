"""YAML that no run could use: refused with its place, and before anything walks through it."""

import time
from pathlib import Path

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.parsing.config_files import check_config_files, check_options, list_quiet_callbacks, load_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
FILES = [
    (BOMB, "run.yaml, line 6, column 15: not valid YAML: more than 100,000 values once aliases such as *a4 are"),
    ("trainer: &a\n  callbacks: *a\n", "line 2, column 14: not valid YAML: *a stands for something that it is a part"),
    ("trainer: &a {<<: *a}\n", "line 1, column 18: not valid YAML: *a stands for something"),
    (f"trainer: {'[' * 3000}{']' * 3000}", "line 1, column 108: not valid YAML: nested in more than 100 levels"),
    ("trainer:\n  <<: 3\n", "line 2, column 7: not valid YAML: expected a mapping or list of mappings for merging"),
    (
        "trainer:\n\tmax_steps: 1\n",
        "line 2, column 1: not valid YAML: found character '\\t' that cannot start any tok",
    ),
    ("a: 1\n---\nb: 1\n", "line 2, column 1: not valid YAML: but found another document"),
    ("a: !!python/object/apply:os.system [ls]\n", "line 1, column 4: not valid YAML: could not determine a constr"),
    (f"seed_everything: {'1' * 5000}", "not valid YAML: Exceeds the limit (4300 digits)"),
    ("a: '\0'", "run.yaml: not valid YAML: unacceptable character"),
    ("trainer:\n  3: 1\n", "run.yaml, line 2: got 3 as a key: expected a name"),
    ("trainer:\n  1e-4: 1\n", "run.yaml, line 2: got 1e-4 as a key: expected a name"),  # a number to jsonargparse
    ("~: 1\n", "run.yaml, line 1: got ~ as a key: expected a name"),
    ("? [1, 2]\n: 1\n", "line 1, column 3: not valid YAML: found unhashable key"),
    ("trainer: [1]\n", "trainer: got a list (run.yaml, line 1): expected a mapping of its keys"),
    ("model:\n  class_path: A\n  width: 3\n", "model.width: beside class_path (run.yaml, line 3): expected it below"),
    ("model:\n  class_path: A\n  init_args:\n", "model.init_args: got nothing (run.yaml, line 3): expected a mapping"),
    ("x" * 2**21, "'run.yaml' has 2.0 MiB: expected settings, of 1 MiB or less"),
    ("\ufefftrainer: {max_steps: 1}\n", None),
    ("trainer: &t {max_steps: 1}\nmodel: {<<: *t}\n", None),
]


@pytest.mark.parametrize(("text", "line"), FILES, ids=[text[:20] for text, _ in FILES])
def test_a_file_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text, encoding="utf-8")
    args = ["fit", "--config", "run.yaml"]
    if line is None:
        assert check_config_files(args) == [Path("run.yaml")]
        return
    begin = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        check_config_files(args)
    assert line in refused.value.line
    assert "\n" not in refused.value.line
    assert time.monotonic() - begin < 2  # 9 ** 9 values of the first take hours


@pytest.mark.parametrize("args", [["--a.b", "&a [*a]"], ["--a.b=&a [*a]"]])
def test_an_option_without_an_end_is_refused_by_its_name(args: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options(["fit", *args])
    assert refused.value.line.startswith("a.b: got '&a [*a]': *a stands for something that it is a part of")


def test_text_with_an_ampersand_is_no_yaml_to_refuse() -> None:
    check_options(["speak", "--text", "[salt & pepper", "--name=&", "&x *y"])
    assert load_yaml("a: [1e-3, 'x & *y']") == {"a": [1e-3, "x & *y"]}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["trainer: {callbacks: [{class_path: lit_fsdp.callbacks.EMA}]}"], None),
        (["trainer: {callbacks: ModelCheckpoint}"], []),
        (["trainer: {callbacks: [my.BestCheckpoint, EMA, {class_path: pl.LearningRateMonitor}]}"], ["EMA"]),
        (["trainer: {callbacks: [ModelCheckpoint]}", "trainer: {callbacks: [EMA]}"], None),
        (["trainer: {callbacks: [ModelCheckpoint]}", "trainer: {max_steps: 3}"], []),
        (["data: {batch_size: 2}"], None),
    ],
)
def test_a_run_without_checkpoints_and_loggers_leaves_out_the_callbacks_that_need_them(
    given: list[str], left: list[str] | None, tmp_path: Path
) -> None:
    for i, text in enumerate(given):
        (tmp_path / f"{i}.yaml").write_text(text)
    assert list_quiet_callbacks([str(tmp_path / f"{i}.yaml") for i in range(len(given))]) == left
