"""What vLLM carries between the scheduler and the workers for the connector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.step import Step

__all__ = ["Address", "StepMetadata"]


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers: the work of one step."""

    step: Step


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker to the scheduler: where its engine listens, ``host:port``."""

    address: str
