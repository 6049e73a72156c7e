"""The shape of the code base: the order of its rooms, who may know whom, what may be written. One test a rule."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SOURCE_FOLDERS = ("lit_fsdp", "tasks", "callbacks")
OTHER_FOLDERS = ("tests", "benchmarks", "configs", "docs", "examples", ".ci", ".github")

# Each imports only from those before it; docs/decisions.md says why there are these.
ROOMS = (
    *("errors", "redaction", "files", "cache", "quantization", "adapters", "sharding", "optim", "weights"),
    *("checkpoint", "parsing", "profiling", "strategy", "export", "reporting", "planning", "tasks", "callbacks", "cli"),
)
# Which rooms may import these, so that an upstream change lands in few places.
DOORS = {
    "bitsandbytes": {"quantization"},
    "torchao": {"sharding"},
    "peft": {"adapters"},
    "lightning": {"strategy", "reporting", "planning", "tasks", "callbacks", "cli"},
    "ray": {"tasks", "callbacks", "cli"},
}
# Tasks that another one is made of.
MADE_OF = {"preference": "causal_lm"}
HOMELESS = {"utils", "util", "helpers", "common", "misc", "experimental"}
# Put together here, so that this file does not contain what it looks for.
MACHINE_FOLDERS = ("work", "root", "home/[a-z]+", "tmp/venv")
MACHINE_PATHS = re.compile(rf"(?<![\w.~/-])/({'|'.join(MACHINE_FOLDERS)})\b(?![-.])")


def files(*folders: str, suffix: str = "") -> list[Path]:
    """All files below these folders, each once: the links inside ``lit_fsdp`` are not followed."""
    found = (p for f in folders for p in (ROOT / f).rglob(f"*{suffix}") if p.is_file())
    return sorted(p for p in found if "__pycache__" not in p.parts and ".egg-info" not in str(p))


def module_name(path: Path) -> str:
    """As it is imported: ``tasks/x/task.py`` is ``lit_fsdp.tasks.x.task``, a package is its folder."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return name if parts[0] == "lit_fsdp" else f"lit_fsdp.{name}"


SOURCES = {module_name(p): p for p in files(*SOURCE_FOLDERS, suffix=".py")}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def list_imported(own: str) -> list[str]:
    """Every module that one of ours imports, also inside functions; names taken from a module of ours are dropped."""
    found = []
    for node in ast.walk(ast.parse(SOURCES[own].read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            found += [name if name in SOURCES else module for name in inner]
    return found


def is_inside(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def room_of(module: str) -> str:
    """``sharding`` of ``lit_fsdp.sharding.shard.mesh``; empty for the package itself and what starts it."""
    parts = module.split(".")
    return "" if len(parts) == 1 or parts[1] == "__main__" else parts[1]


def may_import(own: str, target: str) -> bool:
    """Whether ``own`` may import ``target``, both modules of ours."""
    room, other = room_of(own), room_of(target)
    if not room:
        return True
    if not other:  # the public face imports from above
        return False
    if room != other:
        return ROOMS.index(other) < ROOMS.index(room) and (room, other) != ("callbacks", "tasks")
    if room == "callbacks":  # one callback does not know another
        return own == "lit_fsdp.callbacks"
    if room == "tasks" and own != "lit_fsdp.tasks":  # neither does one task
        own_task, other_task = own.split(".")[2], target.split(".")[2]
        is_task = (ROOT / "tasks" / other_task / "task.py").exists()  # others are what tasks share
        return not is_task or other_task in (own_task, MADE_OF.get(own_task))
    return True


def test_imports_go_up_the_list_of_rooms() -> None:
    assert {room_of(name) for name in SOURCES} - {""} <= set(ROOMS), "a new room needs a decision in docs/decisions.md"
    bad = [
        f"{own} must not import {target}"
        for own in SOURCES
        for target in list_imported(own)
        if is_inside(target, "lit_fsdp") and not may_import(own, target)
    ]
    assert bad == []


def test_no_file_is_imported_by_what_it_imports() -> None:
    """Late imports count: a cycle that is put off is a cycle."""
    edges = {own: {t for t in list_imported(own) if t in SOURCES and t != own} for own in SOURCES}
    while leaves := {own for own, targets in edges.items() if not targets & edges.keys()}:
        edges = {own: targets for own, targets in edges.items() if own not in leaves}
    # What is left either is in a cycle or imports one: those that nothing left imports are not in it.
    while roots := edges.keys() - {t for targets in edges.values() for t in targets}:
        edges = {own: targets for own, targets in edges.items() if own not in roots}
    assert sorted(edges) == []


def test_each_dependency_has_its_doors() -> None:
    bad = [
        f"{own} imports {package}, which only {sorted(rooms)} may"
        for own in SOURCES
        for target in list_imported(own)
        for package, rooms in DOORS.items()
        if is_inside(target, package) and room_of(own) not in rooms
    ]
    assert bad == []


@pytest.mark.full
def test_no_underscore_name_of_ours_crosses_a_file() -> None:
    bad = []
    for path in [*SOURCES.values(), *files("tests", "benchmarks", suffix=".py")]:
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.ImportFrom, ast.Attribute))]
        froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and is_inside(n.module or "", "lit_fsdp")]
        names = [a.name for node in froms for a in node.names]
        modules = {a.asname or a.name for n in froms for a in n.names if f"{n.module}.{a.name}" in SOURCES}
        names += [
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        ]
        bad += [f"{relative(path)}: {n}" for n in names if n.startswith("_") and not n.endswith("__")]
    assert bad == []


def test_every_file_is_named_by_what_it_is_about() -> None:
    paths = files(*SOURCE_FOLDERS, "tests", "benchmarks", suffix=".py")
    homeless = [relative(p) for p in paths if HOMELESS & {p.stem, *p.relative_to(ROOT).parts}]
    assert homeless == [], "a function with no home is a sign of a missing noun"


def test_class_paths_in_yaml_are_full() -> None:
    def find_short(node: object) -> list[str]:
        if isinstance(node, (dict, list)):
            return [bad for value in (node.values() if isinstance(node, dict) else node) for bad in find_short(value)]
        return [node] if isinstance(node, str) and re.match(r"(tasks|callbacks)\.\w", node) else []

    for path in files("configs", "tests", "docs", "benchmarks", "examples", suffix=".yaml"):
        assert find_short(yaml.safe_load(path.read_text())) == [], relative(path)


def test_no_file_names_a_path_of_one_machine() -> None:
    top = [p for p in ROOT.glob("*") if p.is_file() and p.name != ".git"]  # of a work tree that is a file
    for path in [*top, *files(*SOURCE_FOLDERS, *OTHER_FOLDERS)]:
        text = path.read_bytes().decode(errors="ignore")
        assert not (hit := MACHINE_PATHS.search(text)), f"{relative(path)}: {hit and hit.group()}"
