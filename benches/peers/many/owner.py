"""The second process of ``get``: holds the objects until its input ends.

Not for: being started by hand.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
del sys.path[1]  # this folder: its files are named like the systems

from many.scene import READY, Scene  # noqa: E402

scene = Scene(sys.argv[2], 1, int(sys.argv[3]), int(sys.argv[4]))
address = importlib.import_module(f"many.{sys.argv[1]}").owner(scene)
print(f"{READY}{address}", flush=True)
sys.stdin.read()
os._exit(0)
