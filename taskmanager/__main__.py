"""``python -P -m taskmanager``."""

from __future__ import annotations

import sys

from taskmanager.main import main

if __name__ == "__main__":
    sys.exit(main())
