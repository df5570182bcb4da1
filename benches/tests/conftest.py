"""Puts the modules of `benches` and of two of its folders, programs and no packages, on the import path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("scaling", "peers", "vllm", ".")]
