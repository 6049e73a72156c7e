"""What holds for every test: one thread, no network, no shared caches, no process group left behind."""

import gc
import os
import tempfile
from collections.abc import Iterator

# Before the first import of torch or Transformers, which read these once.
_CACHE = tempfile.TemporaryDirectory(prefix="lit_fsdp_tests_", ignore_cleanup_errors=True)
os.environ.update(
    HF_DATASETS_OFFLINE="1",
    HF_HOME=_CACHE.name,
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",  # its threads do not survive the fork of the ranks
)
for _name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    gc.freeze()  # what the imports left would be searched for garbage again and again
    # Counted, not torch.cuda.is_available(): forked ranks could not use CUDA after that.
    if torch.cuda.device_count():
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
