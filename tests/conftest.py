"""What holds for every test: one thread, no network, no shared caches, no process group left behind."""

import atexit
import gc
import importlib.util
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before the first import of torch or Transformers, which read these once.
_CACHE = tempfile.TemporaryDirectory(prefix="lit_fsdp_tests_", ignore_cleanup_errors=True)
os.environ.update(
    HF_DATASETS_OFFLINE="1",
    HF_HOME=_CACHE.name,
    HF_HUB_OFFLINE="1",
    LIT_FSDP_CACHE=f"{_CACHE.name}/lit_fsdp",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",  # its threads do not survive the fork of the ranks
)
for _name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ranks import count_gpus, hide_gpus  # noqa: E402

torch.set_num_threads(1)
hide_gpus()
import peft  # noqa: E402, F401  with bitsandbytes: what ranks import late, here so that forked ones do not each pay for it


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the first cases of ``full(after=N)`` in the default tier; skip what needs a GPU where there is none."""
    gc.freeze()  # what the imports left would be searched for garbage again and again
    if importlib.util.find_spec("triton"):
        atexit.register(gc.unfreeze)  # else Triton 3.9 (torch 2.15) prints all it has as leaked, after the summary
    num_cases = Counter[str]()
    for item in items:
        first = item.nodeid.partition("[")[0]
        marker = item.get_closest_marker("full")
        if marker is not None and num_cases[first] < marker.kwargs.get("after", 0):
            item.own_markers.remove(marker)
        num_cases[first] += 1
    if count_gpus():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """Fail the test that leaves one, not the next test that trips over it."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left a process group behind; call strategy.teardown() or use run_ranks")


@pytest.fixture(autouse=True)
def what_a_test_wrote_is_not_imported_by_the_next(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget modules in the folder of the test: another one may write one of the same name."""
    yield
    folder: Path | None = request.node.funcargs.get("tmp_path")
    for name, module in list(sys.modules.items()) if folder is not None else ():
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).is_relative_to(folder or ""):
            del sys.modules[name]
