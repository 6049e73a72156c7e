"""Installing brings ``lit_fsdp.tasks`` and ``lit_fsdp.callbacks``, and no package ``tasks`` of its own."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import lit_fsdp

ROOT = Path(__file__).parent.parent
FOLDERS = ("lit_fsdp", "tasks", "callbacks")
BUILD = ("-m", "build", "--no-isolation", "--outdir")
INSTALL = ("-m", "pip", "install", "--no-deps", "--no-index")
# Prints where the packages come from; fails if a top-level `tasks` or `callbacks` is importable beside them.
LOOK = """
import importlib, importlib.resources, importlib.util
for name in ("tasks", "callbacks"):
    assert importlib.util.find_spec(name) is None, f"a top-level package {name} is importable"
for name in ("lit_fsdp", "lit_fsdp.tasks", "lit_fsdp.callbacks"):
    print(importlib.import_module(name).__file__)
template = importlib.resources.files("lit_fsdp.reporting").joinpath("report.html.jinja")
assert template.is_file(), f"{template} was not installed"
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, links kept as links: no build output lands in the working tree."""
    folder = tmp_path_factory.mktemp("clone")
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, *BUILD, out, "--wheel", cwd=clone)
    return next(out.glob("*.whl"))


def read_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if "dist-info" not in name}


@pytest.mark.full
def test_the_wheel_holds_every_source_file_once(clone: Path, wheel: Path) -> None:
    kinds = ("*.py", "*.jinja")
    sources = {str(p.relative_to(clone)) for f in FOLDERS for kind in kinds for p in (clone / f).rglob(kind)}
    assert "lit_fsdp/reporting/report.html.jinja" in sources
    expected = {name if name.startswith("lit_fsdp/") else f"lit_fsdp/{name}" for name in sources}
    assert set(read_files(wheel)) == expected | {"lit_fsdp/py.typed"}


@pytest.mark.full
def test_the_sdist_builds_the_same_wheel(clone: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, *BUILD, tmp_path, cwd=clone)  # without --wheel: the sdist, then the wheel from it
    assert read_files(next(tmp_path.glob("*.whl"))) == read_files(wheel)


@pytest.mark.full
def test_the_installed_wheel_is_imported_from_where_it_lies(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    run(sys.executable, *INSTALL, "--target", target, wheel, cwd=tmp_path)
    assert sorted(p.name for p in target.iterdir() if "-info" not in p.name) == ["bin", "lit_fsdp"]
    look = f"import sys; sys.path.insert(0, {str(target)!r}){LOOK}"
    found = run(sys.executable, "-I", "-c", look, cwd=tmp_path).split()
    assert found == [str(target / "lit_fsdp" / inner / "__init__.py") for inner in ("", "tasks", "callbacks")]


@pytest.mark.full
def test_an_editable_install_is_imported_from_the_working_tree(clone: Path, tmp_path: Path) -> None:
    env = tmp_path / "env"
    venv.create(env, symlinks=True)
    python = env / "bin" / "python"
    # Everything but lit_fsdp, pip included, comes from the environment that the tests run in.
    site_packages = next(env.glob("lib/python*/site-packages"))
    (site_packages / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    run(python, *INSTALL, "--no-build-isolation", "--ignore-installed", "-e", clone, cwd=tmp_path)
    found = run(python, "-I", "-c", LOOK, cwd=tmp_path).split()
    assert [Path(file).resolve() for file in found] == [clone / f / "__init__.py" for f in FOLDERS]
    assert (env / "bin" / "lit_fsdp").is_file()


# Imports all files of each room in a process that has none of ours yet; forked, as torch takes seconds to import.
IMPORT_ROOMS = """
import importlib, os, pkgutil, sys
import torch, transformers, peft

def import_all(room):
    package = importlib.import_module("lit_fsdp." + room)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "ray":  # of an extra: the modules that only its workers load
                raise
    return "lightning" in sys.modules

def try_first(room, may_load_lightning):
    if (child := os.fork()) == 0:
        try:
            code = int(import_all(room) and not may_load_lightning)
        except BaseException as error:
            print(room, repr(error), flush=True)
            code = 1
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{room}: fails as the first import, or imports lightning")

for room in ("quantization", "adapters", "sharding", "optim", "weights", "checkpoint", "profiling", "export"):
    try_first(room, False)
import lightning.pytorch
for room in ("strategy", "reporting", "planning", "tasks", "callbacks", "cli"):
    try_first(room, True)
"""


@pytest.mark.full
def test_each_room_can_be_the_first_that_is_imported_and_few_bring_lightning() -> None:
    run(sys.executable, "-c", IMPORT_ROOMS, cwd=ROOT)


@pytest.mark.full
def test_a_run_loads_no_package_that_it_does_not_use(tmp_path: Path) -> None:
    command = [
        "fit",
        f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
        "--trainer.devices=1",
        "--trainer.max_steps=1",
    ]
    unused = {"peft", "bitsandbytes", "datasets", "torchvision", "sklearn", "pandas", "ray"}
    look = f"import sys; from lit_fsdp.cli.main import main; assert main({command}) == 0; "
    look += f"print('loaded:', *sorted({unused} & set(sys.modules)))"
    assert run(sys.executable, "-c", look, cwd=tmp_path).splitlines()[-1] == "loaded:"


@pytest.mark.full
def test_adapters_and_quantization_load_no_compiler() -> None:
    look = "import sys; from lit_fsdp.adapters.layers import import_peft; import_peft(); "
    look += "print(*sorted({'bitsandbytes', 'peft', 'torch._inductor.compile_fx'} & set(sys.modules)))"
    assert run(sys.executable, "-c", look, cwd=ROOT).splitlines()[-1] == "bitsandbytes peft"


@pytest.mark.full
def test_every_public_name_is_found_and_none_is_loaded_before_it_is_used() -> None:
    look = "import sys, lit_fsdp; print('torch' in sys.modules); print(*(type(n).__name__ for n in"
    look += " map(lit_fsdp.__getattr__, set(lit_fsdp.__all__) - {'__version__'})))"
    is_loaded, *kinds = run(sys.executable, "-c", look, cwd=ROOT).split()
    assert is_loaded == "False"
    assert set(kinds) <= {"type", "ABCMeta"}
    assert set(lit_fsdp.__all__) <= set(dir(lit_fsdp))
    with pytest.raises(AttributeError, match="no attribute 'Meshh'"):
        lit_fsdp.__getattr__("Meshh")
