"""Makes the shared test modules importable."""

import sys
from pathlib import Path

for _folder in (Path(__file__).resolve().parents[2], Path(__file__).resolve().parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
