"""What README and guides show exists: links, commands, YAML keys, imports; the site is built without a warning."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from parsed_commands import find_refusals, list_blocks, list_commands

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *ROOT.glob("*.md"),
    *(p for folder in ("docs", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.md")),
]
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def make_anchor(heading: str) -> str:
    """Return the anchor that both GitHub and the site give a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def list_anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {make_anchor(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


def test_links_lead_to_what_is_there() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in LINK.findall(text):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in list_anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(PAGES) > 30
    assert broken == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A current folder as the guides assume it: the README's YAML, modules that guides name, and ``configs/``."""
    folder = tmp_path_factory.mktemp("user")
    for path in [ROOT / "configs", *(ROOT / "examples" / "own_task").glob("tagger.*")]:
        (folder / path.name).symlink_to(path)
    (folder / "run.yaml").write_text(list_blocks(ROOT / "README.md", "yaml")[0])  # which is finetune.yaml too
    for block in [block for page in GUIDES for kind in ("python", "yaml") for block in list_blocks(page, kind)]:
        named = re.match(r"# (\w+\.(py|yaml))\b", block)
        if named and not (folder / named[1]).exists():
            (folder / named[1]).write_text(block)
    return folder


@pytest.mark.full
def test_every_command_of_the_guides_is_one_that_its_parser_takes(folder: Path) -> None:
    shells = [block for page in GUIDES for block in list_blocks(page, "bash")]
    shells += [re.sub(r"^# ?", "", line) for path in (ROOT / "configs").rglob("*.yaml") for line in list_comments(path)]
    shells += [path.read_text() for path in (ROOT / "examples").iterdir() if path.suffix in (".sh", ".sbatch")]
    commands = [c for shell in shells for c in list_commands(shell) if "..." not in c]
    assert len(commands) > 50
    assert find_refusals(commands, folder) == {}


@pytest.mark.full
def test_a_misspelt_option_is_no_command_that_its_parser_takes(folder: Path) -> None:
    wrong = [
        ["fit", "--config", "finetune.yaml", "--model.lora.rr=8"],
        ["plan", "--config", "finetune.yaml", "--gpus=8"],
        ["exprt", "--out", "model"],
    ]
    assert len(find_refusals(wrong, folder)) == len(wrong)


@pytest.mark.full
def test_every_yaml_block_of_the_guides_has_keys_that_there_are(folder: Path) -> None:
    commands = []
    for page in GUIDES:
        for index, block in enumerate(list_blocks(page, "yaml")):
            if set(yaml.safe_load(block)) <= {"trainer", "model", "data", "run_name"}:
                path = folder / f"{page.stem}_{index}.yaml"
                path.write_text(block)
                commands.append(["fit", "--config", "finetune.yaml", "--config", path.name])
    assert len(commands) > 10
    assert find_refusals(commands, folder) == {}


def test_every_python_block_of_the_guides_imports_what_there_is() -> None:
    imports = [
        (node.module, alias.name)
        for page in GUIDES
        for block in list_blocks(page, "python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lit_fsdp"
        for alias in node.names
    ]
    assert len(imports) > 10
    assert [pair for pair in imports if not hasattr(importlib.import_module(pair[0]), pair[1])] == []


@pytest.mark.full
def test_a_library_that_imports_pytorch_lightning_is_given_the_other_package() -> None:
    blocks = list_blocks(ROOT / "docs" / "migrating.md", "python")
    block = next(block for block in blocks if "pytorch_lightning" in block)
    use = """
        import pytorch_lightning as first
        from pytorch_lightning.callbacks.early_stopping import EarlyStopping
        from pytorch_lightning.loggers import CSVLogger
        from pytorch_lightning.strategies import Strategy
        from lit_fsdp import FSDP2Strategy
        assert first is lightning.pytorch
        assert EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
        assert issubclass(FSDP2Strategy, Strategy)
    """
    subprocess.run([sys.executable, "-c", block + dedent(use)], check=True)


def read_migrations() -> dict[str, tuple[set[str], list[str]]]:
    """Return for each framework of migrating.md its keys, and the options that they become."""
    found = {}
    for section in (ROOT / "docs" / "migrating.md").read_text().split("\n## ")[1:]:
        table = section.partition("|---|---|\n")[2].partition("\n\n")[0]
        rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
        theirs = {
            key
            for row in rows
            for span in re.findall("`([^`]+)`", row[0])
            for key in re.findall(r"(\w+)(?:: |=)", span)
        }
        spans = [re.findall(r"`([a-z][\w.]*): ([^`]+)`", row[1]) for row in rows]
        assert all(pairs or "nothing" in row[1] for row, pairs in zip(rows, spans, strict=True))
        found[section.splitlines()[0]] = theirs, [f"--{key}={value}" for pairs in spans for key, value in pairs]
    return found


def list_arguments(*functions: Any) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters}


def list_axolotl_keys() -> set[str]:
    spec = importlib.util.find_spec("axolotl")  # without importing it
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("axolotl is not installed")
    files = (Path(spec.submodule_search_locations[0]) / "utils" / "schemas").glob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    # Inside `message_property_mappings` are words of the user's own rows.
    return {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)} | {"content"}


def list_llama_factory_keys() -> set[str]:
    spec = importlib.util.find_spec("llamafactory")  # without importing it
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llamafactory is not installed")
    files = (Path(spec.submodule_search_locations[0]) / "hparams").glob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    own = {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return own | list_arguments(importlib.import_module("transformers").TrainingArguments)


def list_trainer_keys() -> set[str]:
    launch = Path(importlib.import_module("accelerate.commands.launch").__file__ or "").read_text()
    arguments = importlib.import_module("transformers").TrainingArguments
    return list_arguments(arguments) | set(re.findall(r'"--(fsdp_\w+)"', launch))


def list_lightning_keys() -> set[str]:
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    return list_arguments(FSDPStrategy, FullyShardedDataParallel, MixedPrecision) | {"minutes"}


def list_trl_keys() -> set[str]:
    spec = importlib.util.find_spec("trl")  # without importing it
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    folder = Path(spec.submodule_search_locations[0])
    files = [*(folder / "trainer").glob("*_config.py"), folder / "scripts" / "utils.py"]
    files += [folder / "experimental" / name / f"{name}_config.py" for name in ("orpo", "cpo")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("title", "list_keys"),
    [
        ("axolotl", list_axolotl_keys),
        ("LLaMA-Factory", list_llama_factory_keys),
        ("SFTTrainer", list_trl_keys),
        ("DPOTrainer", list_trl_keys),
        ("ORPOTrainer", list_trl_keys),
        ("RewardTrainer", list_trl_keys),
        ("accelerate", list_trainer_keys),
        ("FSDPStrategy", list_lightning_keys),
    ],
)
def test_what_one_migrates_from_has_the_keys_of_its_table(title: str, list_keys: Callable[[], set[str]]) -> None:
    (theirs,) = [theirs for name, (theirs, _) in read_migrations().items() if title in name]
    assert len(theirs) >= 8
    assert theirs - list_keys() == set()


@pytest.mark.full
def test_what_one_migrates_to_has_the_keys_of_each_table(folder: Path) -> None:
    configs = {"PO": "dpo.yaml", "Reward": "configs/sequence_classification_quickstart.yaml"}
    commands = [
        ["fit", "--config", next((c for name, c in configs.items() if name in title), "finetune.yaml"), option]
        for title, (_, ours) in read_migrations().items()
        for option in ours
    ]
    assert len(commands) > 50
    assert find_refusals(commands, folder) == {}


def test_every_guide_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in text] == []


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    site = tmp_path / "site"
    assert "reshard_after_forward" in (site / "reference" / "lit_fsdp" / "index.html").read_text()
    assert 'href="repository/"' in (site / "index.html").read_text()  # the README


def list_comments(path: Path) -> Iterable[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("#")]
