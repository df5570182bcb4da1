"""vLLM on llm_datadist: prefill and decode in separate processes, and offloading to host memory, a peer or a keeper.

vLLM calls ``register`` through the entry point ``vllm.general_plugins``. It only registers names, so a vLLM that
uses none of them behaves as if this package were not installed. The how-to page "Use it in vLLM" describes the
configuration.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register"]

logger = logging.getLogger("vllm.llm_datadist")


def register() -> None:
    """Register the names of this package with vLLM. Further calls change nothing.

    The names are ``LlmDatadistConnector``, ``LlmDatadistOffloadingSpec``, ``LlmDatadistP2PTier`` and
    ``LlmDatadistStoreTier``. A vLLM that lacks one of the interfaces does not get that name, and logs a warning. The
    function never raises, because vLLM would not start then.
    """
    _guarded(_add_connector)
    _guarded(_add_offloading)
    _guarded(lambda: _add_tier("LlmDatadistP2PTier", "p2p_tier"))
    _guarded(lambda: _add_tier("LlmDatadistStoreTier", "store_tier"))


def _guarded(add: Callable[[], None]) -> None:
    try:
        with suppress(ValueError):  # a second registration of a name
            add()
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("llm_datadist cannot register itself with this vLLM: %s", error)


def _add_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    KVConnectorFactory.register_connector("LlmDatadistConnector", f"{__name__}.connector", "LlmDatadistConnector")


def _add_offloading() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: PLC0415

    name = "LlmDatadistOffloadingSpec"
    OffloadingSpecFactory.register_spec(name, f"{__name__}.offloading", name)


def _add_tier(name: str, module: str) -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: PLC0415

    SecondaryTierFactory.register_tier(name, f"{__name__}.{module}", name)
