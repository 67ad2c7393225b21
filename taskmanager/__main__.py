"""``python -P -m taskmanager``."""

from __future__ import annotations

import sys

from common.lasting_imports import lasting_imports

with lasting_imports():
    from taskmanager.main import main

if __name__ == "__main__":
    sys.exit(main())
