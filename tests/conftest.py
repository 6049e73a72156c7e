"""What holds for every test: one thread, no network, no shared caches, no process group left behind."""

import atexit
import gc
import importlib.util
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

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
for _name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "TRANSFORMERS_CACHE", "COLUMNS"):  # the last set by pytest-xdist
    os.environ.pop(_name, None)

import fsspec  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning_utilities.core.rank_zero import rank_zero_only  # noqa: E402
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402

from ranks import count_gpus, hide_gpus  # noqa: E402

torch.set_num_threads(1)
hide_gpus()
# A forked process that collects a process group of this one would wait for ever for threads that it has not.
os.register_at_fork(after_in_child=gc.freeze)
# Lightning is not imported here: without handlers of pytest beside it, it would print its messages itself.
logging.disable()  # bitsandbytes says which kernel it has not; pytest-xdist would print that after its summary
# What ranks import late, here so that forked ones do not each pay for it.
from lit_fsdp.adapters.layers import import_peft  # noqa: E402

import_peft()  # with bitsandbytes

with suppress(ImportError):  # Lightning asks of each folder of a logger whether it is one of S3
    import s3fs  # noqa: F401

logging.disable(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the first cases of ``full(after=N)`` and ``slow(after=N)`` in the tiers before; skip what needs a GPU."""
    gc.freeze()  # what the imports left would be searched for garbage again and again
    if importlib.util.find_spec("triton"):
        atexit.register(gc.unfreeze)  # else Triton 3.9 (torch 2.15) prints all it has as leaked, after the summary
    num_cases = Counter[str]()
    for item in items:
        first = item.nodeid.partition("[")[0]
        for tier in ("full", "slow"):
            marker = item.get_closest_marker(tier)
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
def layouts_of_ranks_are_forgotten() -> Iterator[None]:
    """Clear what torch keeps for DTensors: ranks that are forked later would all be the rank it was kept for."""
    yield
    _clear_sharding_prop_cache()


@pytest.fixture(autouse=True)
def commands_in_this_process_leave_it_as_it_was() -> Iterator[None]:
    """Undo what a command does for its own process: a later test's ranks would be silent, or believe other things."""
    levels = {logger: logger.level for logger in _loggers()}
    environ, hook, rank = dict(os.environ), sys.excepthook, getattr(rank_zero_only, "rank", 0)
    path = list(sys.path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)  # a run that saved on one ignores it until its process ends
    for name in os.environ.keys() - environ.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
    sys.excepthook, sys.path[:] = hook, path
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # a process of rank 3 warns of nothing
    for logger in _loggers():
        if logger.level != levels.get(logger, logging.NOTSET):
            logger.setLevel(levels.get(logger, logging.NOTSET))


def _loggers() -> list[logging.Logger]:
    return [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]


@pytest.fixture(autouse=True)
def what_a_test_wrote_is_not_imported_by_the_next(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget modules in the folder of the test: another one may write one of the same name."""
    known = set(sys.modules)  # thousands: to look at the files of all would take 0.1 s after each test
    yield
    folder: Path | None = (request.node.funcargs or {}).get("tmp_path")  # of a test that Ctrl-C ended there are none
    for name in sys.modules.keys() - known if folder is not None else ():
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and Path(file).is_relative_to(folder or ""):
            del sys.modules[name]


@pytest.fixture
def memory() -> Iterator[Any]:
    """A folder of the store that fsspec has in the memory of a process, as a ``RemotePath``."""
    from lit_fsdp.checkpoint.remote import RemotePath

    fs = fsspec.filesystem("memory")
    fs.rm("/", recursive=True)
    yield RemotePath("memory://bucket/run")
    fs.rm("/", recursive=True)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of a stand-in for S3 on this machine, found as users tell fsspec of theirs; a ``RemotePath``."""
    from lit_fsdp.checkpoint.remote import locate

    pytest.importorskip("s3fs")
    stand_in = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = stand_in.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    conf: dict[str, Any] = {}
    fsspec.config.set_conf_env(conf, {"FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}"})
    monkeypatch.setitem(fsspec.config.conf, "s3", conf["s3"])
    folder: Any = locate(f"s3://bucket-{os.urandom(4).hex()}/run")  # the stand-in outlives its server
    fsspec.filesystem("s3").mkdir(str(folder.parent))
    yield folder
    server.stop()
