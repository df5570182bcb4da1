"""The sequences of calls of known programs that use the module `hixl`."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest

import hixl
from hixl_ends import listener, pattern

pytestmark = [
    pytest.mark.usefixtures("hixl_way"),
    pytest.mark.parametrize("hixl_way", ["process", "tcp"], indirect=True),
]
SIZE = 3 << 20  # above the bytes that rings carry


def opened(address: str, options: dict[str, str]) -> hixl.Hixl:
    engine = hixl.Hixl()
    assert engine.initialize(address, options) == hixl.SUCCESS
    return engine


def buffer(seed: int | None = None) -> Any:
    return ctypes.create_string_buffer(b"" if seed is None else pattern(seed, SIZE), SIZE)


def registered(engine: hixl.Hixl, memory: Any, kind: hixl.MemType) -> int:
    status, handle = engine.register_mem(hixl.MemDesc(ctypes.addressof(memory), SIZE), kind)
    assert status == hixl.SUCCESS
    return handle


def poll(engine: hixl.Hixl, request: int, states: list[tuple[int, hixl.TransferStatus]]) -> None:
    """Ask for the state of a request until it has ended, and note every answer."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        states.append(engine.get_transfer_status(request))
        if states[-1] != (hixl.SUCCESS, hixl.TransferStatus.WAITING):
            return
        time.sleep(0.0005)


def test_expert_balancing_reads_both_ways_and_polls_in_another_thread() -> None:
    addresses = [listener(), listener()]
    engines = [opened(address, {}) for address in addresses]
    weights, received = [buffer(1), buffer(2)], [buffer(), buffer()]
    handles = [
        [registered(engine, memory, hixl.MEM_DEVICE) for memory in both]
        for engine, *both in zip(engines, weights, received)
    ]
    for engine, peer in zip(engines, reversed(addresses)):
        assert engine.connect(peer, 300000) == hixl.SUCCESS

    states: list[list[tuple[int, hixl.TransferStatus]]] = [[], []]
    pollers = []
    for index, engine in enumerate(engines):
        local, remote = ctypes.addressof(received[index]), ctypes.addressof(weights[1 - index])
        step = SIZE // 64
        ops = [
            hixl.TransferOpDesc(local_addr=local + at, remote_addr=remote + at, len=step) for at in range(0, SIZE, step)
        ]
        status, request = engine.transfer_async(addresses[1 - index], hixl.READ, ops)
        assert (status, request > 0) == (hixl.SUCCESS, True)
        pollers.append(threading.Thread(target=poll, args=(engine, request, states[index])))
        pollers[-1].start()
    for poller in pollers:
        poller.join(90)
    assert [polled[-1] for polled in states] == [(hixl.SUCCESS, hixl.TransferStatus.COMPLETED)] * 2
    assert [memory.raw for memory in received] == [weights[1].raw, weights[0].raw]

    for engine, peer in zip(engines, reversed(addresses)):
        assert engine.disconnect(peer) in (hixl.SUCCESS, hixl.NOT_CONNECTED)
    for engine, own in zip(engines, handles):
        assert [engine.deregister_mem(handle) for handle in own] == [hixl.SUCCESS] * 2
        engine.finalize()


def test_direct_transport_registers_after_connecting_and_reconnects_to_refresh() -> None:
    options = {hixl.OPTION_AUTO_CONNECT: "1"}
    address = listener()
    sender, receiver = opened(address, options), opened(listener(), options)
    for seed in range(1, 6):
        assert receiver.connect(address) == (hixl.SUCCESS if seed == 1 else hixl.ALREADY_CONNECTED)
        tensor, result = buffer(seed), buffer()
        both = ((sender, tensor), (receiver, result))
        handles = [(engine, registered(engine, memory, hixl.MEM_HOST)) for engine, memory in both]
        if seed % 2:
            assert receiver.disconnect(address) == hixl.SUCCESS
            assert receiver.connect(address) in (hixl.SUCCESS, hixl.ALREADY_CONNECTED)
        ops = [hixl.TransferOpDesc(ctypes.addressof(result), ctypes.addressof(tensor), SIZE)]
        assert receiver.transfer_sync(address, hixl.READ, ops, 30000) == hixl.SUCCESS
        assert result.raw == tensor.raw
        for engine, handle in handles:
            assert engine.deregister_mem(handle) == hixl.SUCCESS
        # The memory of the sender is gone now. The connection stays.
        assert receiver.transfer_sync(address, hixl.READ, ops, 30000) == hixl.PARAM_INVALID
    receiver.finalize()
    sender.finalize()
