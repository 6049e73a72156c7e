"""A disk that fills up, for tests of what is written."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: writing more fails with ``File too large``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
