"""``python -m lit_fsdp``, also what Lightning's launcher starts again for every further local rank."""

from __future__ import annotations

import sys

from lit_fsdp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
