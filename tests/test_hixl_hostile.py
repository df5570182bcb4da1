"""Hostile peers of the module `hixl`: a native engine that sends whatever it likes, and memory that does not answer."""

from __future__ import annotations

import contextlib
import os
import random
import struct

import pytest

import hixl
from hixl_ends import Child, End, connected, ends, listener, paired, pattern
from llm_datadist.native import Busy, Engine, Message
from peers import eventually


def message(kind: int, number: int, rest: bytes = b"") -> bytes:
    return struct.pack("<BQ", kind, number) + rest


def test_invalid_messages_have_no_effect() -> None:
    draw = random.Random(5)  # noqa: S311
    with connected(End, End) as pair, Engine(metadata=b"hixl 1") as hostile:
        peer = hostile.link(pair.address).result(10)
        wrong = [
            b"",
            b"\x00",
            message(1, 0, b"x"),
            message(3, 0, b"x" * 7),
            message(6, 2**64 - 1, b"\x01"),
            message(99, 0),
        ]
        wrong += [message(4, 1, struct.pack("<Q", 2**64 - 1)), message(4, 1, struct.pack("<Q", 1) + b"\xff")]
        wrong += [message(4, 1, struct.pack("<Q", 1025) + b"x" * 1025), message(3, 0, bytes(8 * 2049)), b"\x07" * 65536]
        wrong += [message(8, 1), message(8, 1, bytes(9)), *(message(8, 1, struct.pack("<Q", k)) for k in range(2000))]
        wrong += [message(7, number, struct.pack("<QQQ", pair.remote_address, 2**64 - 1, 0)) for number in range(20)]
        wrong += [draw.randbytes(draw.randrange(200)) for _ in range(200)]
        for text in wrong:

            def is_sent(text: bytes = text) -> bool:
                with contextlib.suppress(Busy):
                    peer.send(text)
                    return True
                return False

            assert eventually(is_sent)
            hostile.events()
        assert pair.move(0) == hixl.SUCCESS
        assert pair.local.bytes("m") == pattern(1, 4096)
        status, notifies = pair.remote.notifies()
        assert status == hixl.SUCCESS
        assert all(len(name.encode()) <= 1024 and len(text.encode()) <= 1024 for name, text in notifies)


def test_peer_that_reads_no_answers_delays_no_other() -> None:
    with ends(End, End) as both, Engine(metadata=b"hixl 1") as hostile:
        pair = paired(*both)
        peer = hostile.link(pair.address).result(10)
        question = message(3, 1, bytes(8 * 2048))
        with contextlib.suppress(Busy):
            for _ in range(2000):
                peer.send(question)
        assert pair.connect() == hixl.SUCCESS
        assert pair.move(0) == hixl.SUCCESS
        assert pair.local.notify(pair.address, "a", "b") == hixl.SUCCESS
        assert eventually(lambda: any(isinstance(event, Message) for event in hostile.events()))


def test_peer_sees_no_address_that_is_hidden() -> None:
    address = listener()
    with ends(End) as (target,), Engine(metadata=b"hixl 1") as hostile:
        target.initialize(address)
        shown, hidden = target.add("shown", 64), target.add("hidden", 64)
        _, handle = target.register("shown")
        target.register("hidden", 0, 64, 1, True)
        peer = hostile.link(address).result(10)
        peer.send(message(3, 7, struct.pack("<QQQ", shown, hidden, 8)))
        answers: list[bytes] = []
        eventually(
            lambda: answers.extend(event.data for event in hostile.events() if isinstance(event, Message)) or answers
        )
        assert answers == [message(7, 7, struct.pack("<QQQ", shown, 64, handle) + bytes(48))]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave a page of another process without an answer")
def test_read_of_memory_that_does_not_answer_is_a_timeout() -> None:
    """The kernel may still write to the destination, so it stays in use until the process of the target ends."""
    size = 4 << 20  # above what rings carry
    with connected(End, Child, size=size) as pair:
        client, target = pair.local, pair.remote
        pair.remote_address = target.add_silent("silent", size)
        assert target.register_range(pair.remote_address, size)[0] == hixl.SUCCESS
        handle = client.register("m")[1]
        assert pair.move(0, limit=300) == hixl.TIMEOUT
        assert client.call("deregister_mem", handle) == hixl.TIMEOUT
        assert pair.move(0, limit=300) == hixl.PARAM_INVALID
        target.kill()
        assert client.call("deregister_mem", handle) == hixl.SUCCESS
