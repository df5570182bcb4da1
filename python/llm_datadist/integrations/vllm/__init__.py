"""vLLM on llm_datadist: prefill and decode in separate processes, and offloading to host memory.

vLLM calls ``register`` through the entry point ``vllm.general_plugins``. It only makes names known, so a vLLM that
names neither of them behaves as if this package were not installed. The how-to page "vLLM" describes the configuration.
"""

from __future__ import annotations

from contextlib import suppress

__all__ = ["register"]


def register() -> None:
    """Make ``LlmDatadistConnector`` and ``LlmDatadistOffloadingSpec`` known to vLLM. Further calls change nothing.

    A vLLM that lacks one of the two interfaces does not get that name. The function never raises, because vLLM would
    not start then.
    """
    # A second registration of a name is a ValueError.
    with suppress(ImportError, ValueError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

        KVConnectorFactory.register_connector("LlmDatadistConnector", f"{__name__}.connector", "LlmDatadistConnector")
    with suppress(ImportError, ValueError):
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: PLC0415

        name = "LlmDatadistOffloadingSpec"
        OffloadingSpecFactory.register_spec(name, f"{__name__}.offloading", name)
