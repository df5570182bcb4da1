"""Modules of the tests in the place of packages that are not installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def put(patch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put a module with these contents in the place of each name."""
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        patch.setitem(sys.modules, name, module)
