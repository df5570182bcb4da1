"""A transfer channel for LMCache: peers read each other's L1 memory through this engine.

Importing this module registers the channel under the name ``"llm_datadist"``. It was tested with LMCache 0.5.6.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from lmcache.v1.distributed.transfer_channel.abstract import (
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelServer,
)
from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress, TransferChannelReadResult
from lmcache.v1.distributed.transfer_channel.factory import register_transfer_channel_factory

from llm_datadist.integrations.lmcache.arena import Arena, ArenaReader

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LlmDatadistChannelClient", "LlmDatadistChannelContext", "LlmDatadistChannelServer"]

_TIMEOUT_S = 30.0


class LlmDatadistChannelServer(TransferChannelServer):  # type: ignore[misc]
    """The server of a process: its engine, which serves reads of the L1 memory.

    Args:
        listen_url: where the engine listens, ``host:port`` or ``[ipv6]:port``.
        advertise_url: where peers reach it.
        l1_memory_desc: the L1 memory.
        engine_options: keyword arguments of ``Engine``.
    """

    def __init__(
        self, listen_url: str, advertise_url: str, l1_memory_desc: Any, engine_options: Mapping[str, Any] | None = None
    ) -> None:
        self.advertise_url = advertise_url
        self.arena = Arena(listen_url, l1_memory_desc.ptr, l1_memory_desc.size, engine_options or {})

    def close(self) -> None:
        """Close the engine."""
        self.arena.close()


class LlmDatadistChannelClient(TransferChannelClient):  # type: ignore[misc]
    """Reads the L1 memory of one peer.

    Args:
        transfer_channel_server_url: where the peer listens.
        arena: the arena of this process, which is written.
    """

    def __init__(self, transfer_channel_server_url: str, arena: Arena) -> None:
        self._reader = ArenaReader(arena, transfer_channel_server_url, _TIMEOUT_S)

    def submit_read(
        self, local_addresses: list[TransferChannelAddress], remote_addresses: list[TransferChannelAddress]
    ) -> int:
        """Start a read, and return its task id."""
        return self._reader.submit(_ranges(local_addresses), _ranges(remote_addresses))

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        """Return whether a read has ended, and which objects are in place. The log says why a read failed."""
        outcome = self._reader.outcome(task_id)
        return TransferChannelReadResult(finished=outcome is not None, succeeded_mask=outcome or [])

    def close(self) -> None:
        """Cancel the reads that run."""
        self._reader.close()


class LlmDatadistChannelContext(TransferChannelContext):  # type: ignore[misc]
    """The server of a process, and its clients by peer.

    Args:
        l1_memory_desc: the L1 memory.
        listen_url: where the engine listens, ``host:port`` or ``[ipv6]:port``.
        advertise_url: where peers reach it.
        engine_options: keyword arguments of ``Engine``, for example ``{"token_file": "/path"}``.
    """

    def __init__(
        self, l1_memory_desc: Any, listen_url: str, advertise_url: str, engine_options: Mapping[str, Any] | None = None
    ) -> None:
        self._server = LlmDatadistChannelServer(listen_url, advertise_url, l1_memory_desc, engine_options)
        self._lock = threading.Lock()
        self._clients: dict[str, LlmDatadistChannelClient] = {}

    def get_transfer_channel_server(self) -> LlmDatadistChannelServer:
        """Return the server."""
        return self._server

    def get_transfer_channel_client(self, peer_advertise_url: str) -> LlmDatadistChannelClient:
        """Return the client of a peer, and link to the peer at the first call."""
        with self._lock:
            client = self._clients.get(peer_advertise_url)
            if client is None:
                client = LlmDatadistChannelClient(peer_advertise_url, self._server.arena)
                self._clients[peer_advertise_url] = client
            return client

    def remove_transfer_channel_client(self, peer_advertise_url: str) -> None:
        """Close the client of a peer, if there is one."""
        with self._lock:
            client = self._clients.pop(peer_advertise_url, None)
        if client is not None:
            client.close()

    def get_transfer_channel_address(self, lmcache_addresses: list[tuple[int, int]]) -> list[TransferChannelAddress]:
        """Return the addresses of objects, given by offset and size."""
        return [TransferChannelAddress(offset, size) for offset, size in lmcache_addresses]

    def get_num_connected_clients(self) -> int:
        """Return the number of clients that were not removed."""
        with self._lock:
            return len(self._clients)

    def close(self) -> None:
        """Close all clients and the server."""
        try:
            for url in list(self._clients):
                self.remove_transfer_channel_client(url)
        finally:
            self._server.close()


def _ranges(addresses: list[TransferChannelAddress]) -> list[tuple[int, int]]:
    return [(address.offset, address.size) for address in addresses]


register_transfer_channel_factory("llm_datadist", LlmDatadistChannelContext)
