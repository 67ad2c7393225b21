"""``python -P -m jobmanager --dir DIR [-D key=value ...]``."""

from __future__ import annotations

import sys

from common.lasting_imports import lasting_imports

with lasting_imports():
    from jobmanager.main import main

sys.exit(main(sys.argv[1:]))
