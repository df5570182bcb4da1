"""The channel inside the real LMCache (0.5.6), on a CPU: two processes read each other's L1 memory."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel.factory import create_transfer_channel_context

import llm_datadist.integrations.lmcache  # noqa: F401 - registers the channel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from lmcache.v1.distributed.transfer_channel.abstract import TransferChannelContext

SIZE = 1 << 22
LIMIT = 30


def context(memory: np.ndarray, port: int) -> TransferChannelContext:
    desc = L1MemoryDesc(ptr=memory.ctypes.data, size=SIZE, align_bytes=4096)
    url = f"127.0.0.1:{port}"
    return create_transfer_channel_context("llm_datadist", desc, url, url)


def _run(pipe: Connection, port: int) -> None:
    memory = np.arange(SIZE // 4, dtype=np.uint32).view(np.uint8)
    served = context(memory, port)
    pipe.send("ready")
    pipe.recv()
    served.close()


@pytest.fixture
def peer() -> Iterator[int]:
    port = 18_470
    spawn = multiprocessing.get_context("spawn")
    pipe, there = spawn.Pipe()
    process = spawn.Process(target=_run, args=(there, port))
    process.start()
    assert pipe.poll(LIMIT)
    assert pipe.recv() == "ready"
    yield port
    pipe.send("close")
    process.join(LIMIT)
    assert process.exitcode == 0


def result(client: Any, task: int) -> list[bool]:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        status = client.query_read_status(task)
        if status.is_finished():
            return list(status.succeeded_mask)
        time.sleep(0.001)
    raise TimeoutError


def test_objects_are_read_from_the_peer(peer: int) -> None:
    memory = np.zeros(SIZE, np.uint8)
    here = context(memory, 0)
    url = f"127.0.0.1:{peer}"
    client = here.get_transfer_channel_client(url)
    assert here.get_transfer_channel_client(url) is client
    assert here.get_num_connected_clients() == 1
    objects = [(index * 65_536, 4096 + index) for index in range(16)]
    moved = [(offset + 32_768, size) for offset, size in objects]
    local, remote = here.get_transfer_channel_address(moved), here.get_transfer_channel_address(objects)
    assert result(client, client.submit_read(local, remote)) == [True] * 16
    source = np.arange(SIZE // 4, dtype=np.uint32).view(np.uint8)
    expected = np.zeros(SIZE, np.uint8)
    for (to, size), (at, _) in zip(moved, objects):
        expected[to : to + size] = source[at : at + size]
    assert np.array_equal(memory, expected)

    beyond = here.get_transfer_channel_address([(SIZE - 8, 16)])
    assert result(client, client.submit_read(here.get_transfer_channel_address([(0, 16)]), beyond)) == [False]
    with pytest.raises(KeyError):
        client.query_read_status(99)
    here.remove_transfer_channel_client(url)
    here.remove_transfer_channel_client(url)
    assert here.get_num_connected_clients() == 0
    here.close()
