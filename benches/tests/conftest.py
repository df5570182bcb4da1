"""Puts the modules of `benches/scaling`, which is a program and no package, on the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scaling"))
