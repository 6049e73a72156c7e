"""Keeps the shape of the code base: who may import whom, how long things may grow, what may be written."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SOURCE_FOLDERS = ("lit_fsdp", "tasks", "callbacks")
OTHER_FOLDERS = ("tests", "benchmarks", "configs", "docs", ".ci")

# A module may import only from lines above its own; tasks and callbacks have rules of their own below.
LAYERS = [
    {"cli_errors", "processes", "manifest", "random_state", "signals", "clock", "tape", "gloo", "gpu_kernels"},
    {"reader", "overrides", "hardware", "flops", "spikes", "bad_steps", "timeline", "fabric"},
    {"links"},
    {"mesh", "units", "precision", "offload", "clipping", "quantization", "shard_optimizer"},
    {"quantized_layers"},
    {"adapters", "adamw_8bit", "adafactor"},
    {"recompute", "plan_table", "optimizers", "traffic_meter", "unit_watch"},
    {"sharding", "fsdp_internals", "tensor_files", "buffers"},
    {"memory"},
    {"memory_trace", "expert_reader", "norm_reader", "dora_reader", "step_parts"},
    {"linear_reader", "rotary_reader"},
    {"attention_reader", "image_reader"},
    {"block_reader"},
    {"model_reader", "step_walk"},
    {"conversion", "own_rows", "quantized_files"},
    {"weights", "settings", "traffic"},
    {"base_model", "advice", "assembly", "unit_timeline"},
    {"checkpoint", "last_checkpoint", "hub_names", "tensor_writer", "model_card", "quantized_export", "step_time"},
    {"single_file", "checkpoint_reader", "model_folder"},
    {"merging", "positions"},
    {"export_adapter"},
    {"precision_plugin", "lightning_internals", "checkpoint_writer", "export"},
    {"work"},
    {"dry_run", "closed_form"},
    {"plan", "strategy"},
    {"estimate"},
    {"forecast"},
    {"search"},
    {"search_process"},
    {"auto_strategy", "planned_trainer", "trace_errors", "variants"},
    {"planner"},
    {"traced_search"},
    {"search_worker"},
    {"tasks", "callbacks"},
    {"config_files", "default_callbacks"},
    {"trainer_cli", "export_cli", "scaling_cli", "plan_report", "search_report"},
    {"bench_cli", "plan_cli", "prepare_cli", "speech_cli"},
    {"cli"},
    {"__init__", "__main__"},
]
# Who may import these, so that an upstream change lands in few places.
DOORS = {
    "bitsandbytes": ("quantization", "adamw_8bit"),
    "peft": ("adapters",),
    "lightning": (
        *("strategy", "precision_plugin", "lightning_internals", "tasks", "callbacks"),
        *("forecast", "auto_strategy", "planner", "default_callbacks", "trainer_cli", "plan_cli"),
        *("planned_trainer", "search_worker", "variants"),
    ),
    "pytorch_lightning": (),  # a second copy of Lightning's classes
}
# Each may import those before it.
SHARED_BY_TASKS = ("tasks.schedule", "tasks.base", "tasks.loading", "tasks.pretrained", "tasks.masks")
SHARED_BY_CALLBACKS = tuple(
    f"callbacks.{name}"
    for name in (
        *("readings", "exchange", "sections", "plots", "history", "redaction", "environment", "curves"),
        *("run_facts", "report_files", "step_memory", "traffic_section", "step_forecast"),
    )
)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
HOMELESS = {"utils", "util", "helpers", "common", "misc"}
# Put together here, so that this file does not contain what it looks for.
MACHINE_FOLDERS = ("work", "root", "home/[a-z]+", "tmp/venv")
MACHINE_PATHS = re.compile(rf"(?<![\w.~/-])/({'|'.join(MACHINE_FOLDERS)})\b(?![-.])")


def files(*folders: str, suffix: str = "") -> list[Path]:
    """All files below these folders, each once: the links inside ``lit_fsdp`` are not followed."""
    found = (p for f in folders for p in (ROOT / f).rglob(f"*{suffix}") if p.is_file())
    return sorted(p for p in found if "__pycache__" not in p.parts and ".egg-info" not in str(p))


def module_name(path: Path) -> str:
    """``tasks/x/task.py`` is ``tasks.x.task``, ``lit_fsdp/mesh.py`` is ``mesh``, a package is its folder."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "lit_fsdp":
        return ".".join(parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(p): p for p in files(*SOURCE_FOLDERS, suffix=".py")}
YAML = files("configs", "tests", "docs", "benchmarks", suffix=".yaml")
PYTHON = files(*SOURCE_FOLDERS, "tests", "benchmarks", suffix=".py")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, also inside functions; names taken from a module of ours are dropped."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner.removeprefix("lit_fsdp.") in SOURCES else module


def is_inside(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def layer_of(module: str) -> int:
    for depth, names in enumerate(LAYERS):
        if is_inside(module, *names):
            return depth
    raise AssertionError(f"{module} has no layer: add it to LAYERS and to docs/decisions.md")


def may_import(own: str, target: str) -> bool:
    """Whether ``own`` may import ``target``, both modules of ours."""
    if layer_of(own) != layer_of(target):
        return layer_of(target) < layer_of(own)
    if own in {"tasks", "callbacks"}:  # the face of its package
        return is_inside(target, own)
    if is_inside(own, "callbacks"):
        shared = SHARED_BY_CALLBACKS
        return target in (shared[: shared.index(own)] if own in shared else shared)
    if own in SHARED_BY_TASKS:
        return target in SHARED_BY_TASKS[: SHARED_BY_TASKS.index(own)]
    task = ".".join(own.split(".")[:2])
    return task.startswith("tasks.") and is_inside(target, *SHARED_BY_TASKS, task)


def find_bad_imports(own: str, source: str) -> list[str]:
    """What ``own`` imports against the rules, in words."""
    bad = []
    for target in imported_modules(ast.parse(source)):
        if target.startswith("."):
            bad.append(f"{own} uses a relative import")
        elif is_inside(target, "tasks", "callbacks"):
            bad.append(f"{own} imports {target}: write lit_fsdp.{target}")
        elif target == "lit_fsdp" or is_inside(target, "lit_fsdp"):
            inner = target.removeprefix("lit_fsdp").removeprefix(".") or "__init__"
            if own in SOURCES and not may_import(own, inner):
                bad.append(f"{own} must not import {inner}")
        for package, doors in DOORS.items():
            if is_inside(target, package) and own in SOURCES and not is_inside(own, *doors):
                bad.append(f"{own} imports {package}, which only {doors} may")
    return bad


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def find_private_names(source: str) -> list[str]:
    """Underscore names of ours that are taken from another file."""
    bad, modules = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and is_inside(node.module or "", "lit_fsdp", "ranks"):
            modules |= {alias.asname or alias.name for alias in node.names}
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            bad += [n for n in names if is_private(n)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            bad += [f"{node.value.id}.{n}" for n in [node.attr] if is_private(n)]
    return bad


def find_long_functions(source: str) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    lengths = ((f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions)
    return [f"{name} has {length} lines" for name, length in lengths if length > MAX_FUNCTION_LINES]


def find_short_class_paths(node: object) -> list[str]:
    """Strings of a parsed YAML file that name ``tasks.x`` or ``callbacks.x`` without ``lit_fsdp.``."""
    if isinstance(node, dict):
        return [bad for value in node.values() for bad in find_short_class_paths(value)]
    if isinstance(node, list):
        return [bad for value in node for bad in find_short_class_paths(value)]
    return [node] if isinstance(node, str) and re.match(r"(tasks|callbacks)\.\w", node) else []


@pytest.mark.parametrize("own", SOURCES)
def test_imports_point_downwards_and_through_the_doors(own: str) -> None:
    layer_of(own)
    assert find_bad_imports(own, SOURCES[own].read_text()) == []


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_the_project_is_imported_by_its_full_and_public_names(path: Path) -> None:
    source = path.read_text()
    assert find_bad_imports(relative(path), source) == []
    assert find_private_names(source) == []


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_nothing_outgrows_its_budget(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE_LINES
    assert find_long_functions(source) == []
    assert path.stem not in HOMELESS, "a function with no home is a sign of a missing noun"


def test_class_paths_in_yaml_are_full() -> None:
    bad = {relative(path): find_short_class_paths(yaml.safe_load(path.read_text())) for path in YAML}
    assert {path: names for path, names in bad.items() if names} == {}


def test_no_file_names_a_path_of_one_machine() -> None:
    top = [p for p in ROOT.glob("*") if p.is_file()]
    for path in [*top, *files(*SOURCE_FOLDERS, *OTHER_FOLDERS)]:
        text = path.read_bytes().decode(errors="ignore")
        assert not (hit := MACHINE_PATHS.search(text)), f"{relative(path)}: {hit and hit.group()}"


# From here on: the rules above catch what they are meant to catch.


@pytest.mark.parametrize(
    ("own", "source", "is_allowed"),
    [
        ("sharding", "from lit_fsdp.mesh import Mesh", True),
        ("sharding", "from lit_fsdp.recompute import Recompute", True),
        ("mesh", "from lit_fsdp.sharding import shard_model", False),
        ("mesh", "def f():\n    import lit_fsdp.strategy", False),
        ("mesh", "from lit_fsdp.units import Unit", False),
        ("mesh", "from lit_fsdp import FSDP2Strategy", False),
        ("mesh", "import lightning.pytorch", False),
        ("strategy", "from lightning.pytorch.strategies import ParallelStrategy", True),
        ("strategy", "from lit_fsdp.tasks.base import Task", False),
        ("strategy", "import pytorch_lightning", False),
        ("strategy", "import peft", False),
        ("sharding", "from .mesh import Mesh", False),
        ("tasks", "from lit_fsdp.tasks.causal_lm.task import CausalLM", True),
        ("adamw_8bit", "import bitsandbytes", True),
        ("tasks.base", "import bitsandbytes", False),
        ("tasks.base", "from lit_fsdp.strategy import FSDP2Strategy", True),
        ("tasks.base", "from lit_fsdp.tasks.causal_lm import CausalLM", False),
        ("tasks.causal_lm.task", "import bitsandbytes", False),
        ("tasks.causal_lm.task", "from lit_fsdp.tasks.base import Task", True),
        ("tasks.causal_lm.task", "from lit_fsdp.tasks.causal_lm.data import TextData", True),
        ("tasks.causal_lm.task", "from lit_fsdp.tasks.text_to_speech.task import X", False),
        ("tasks.causal_lm.task", "from lit_fsdp.tasks import CausalLM", False),
        ("tasks.causal_lm.task", "from lit_fsdp.callbacks.progress import Progress", False),
        ("tasks.causal_lm.task", "from tasks.base import Task", False),
        ("callbacks", "from lit_fsdp.callbacks.progress import Progress", True),
        ("callbacks", "from lit_fsdp.tasks.base import Task", False),
        ("callbacks.progress", "from lit_fsdp.callbacks.traffic import Traffic", False),
        ("callbacks.progress", "from lit_fsdp.memory import predict_memory", True),
        ("callbacks.progress", "from lit_fsdp.tasks.base import Task", False),
        ("callbacks.progress", "from lit_fsdp.cli import main", False),
        ("cli", "from lit_fsdp.tasks import CausalLM", True),
        ("__main__", "from lit_fsdp.cli import main", True),
    ],
)
def test_the_import_rules_tell_right_from_wrong(
    monkeypatch: pytest.MonkeyPatch, own: str, source: str, is_allowed: bool
) -> None:
    monkeypatch.setitem(SOURCES, own, Path("made_up.py"))
    assert (find_bad_imports(own, source) == []) is is_allowed


def test_the_other_rules_catch_made_up_violations() -> None:
    with pytest.raises(AssertionError, match="has no layer"):
        layer_of("wrapping")
    assert find_private_names("from lit_fsdp.mesh import _split") == ["_split"]
    assert find_private_names("from lit_fsdp import mesh\nmesh._split()") == ["mesh._split"]
    assert find_private_names("from lit_fsdp import __version__\nself._x = mesh.split()") == []
    assert find_long_functions("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES) == ["f has 61 lines"]
    assert find_long_functions("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)) == []
    assert find_short_class_paths({"model": [{"class_path": "tasks.A"}, "lit_fsdp.tasks.A"]}) == ["tasks.A"]
    assert MACHINE_PATHS.search("see " + "/wo" + "rk/main/x.py")
    assert not MACHINE_PATHS.search("https://example.org/work/x and a/work/b")
