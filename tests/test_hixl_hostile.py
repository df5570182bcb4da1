"""Hostile peers of the module `hixl`: a native engine that sends whatever it likes, and memory that does not answer."""

from __future__ import annotations

import contextlib
import os
import random
import struct

import pytest

import hixl
from hixl_ends import LIMIT, Child, End, ends, listener, pattern
from llm_datadist.native import Busy, Engine, Message
from peers import eventually


def message(kind: int, number: int, rest: bytes = b"") -> bytes:
    return struct.pack("<BQ", kind, number) + rest


def test_invalid_messages_have_no_effect() -> None:
    draw, address = random.Random(5), listener()  # noqa: S311
    with ends(End, End) as (target, client), Engine(metadata=b"hixl 1") as hostile:
        remote, local = target.add("remote", 4096, 1), client.add("local", 4096)
        target.initialize(address)
        client.initialize("127.0.0.1:0")
        target.register("remote")
        client.register("local")
        assert client.call("connect", address, LIMIT) == hixl.SUCCESS
        peer = hostile.link(address).result(10)
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
        wrong += [message(7, number, struct.pack("<QQQ", remote, 2**64 - 1, 0)) for number in range(20)]
        wrong += [draw.randbytes(draw.randrange(200)) for _ in range(200)]
        for text in wrong:

            def is_sent(text: bytes = text) -> bool:
                with contextlib.suppress(Busy):
                    peer.send(text)
                    return True
                return False

            assert eventually(is_sent)
            hostile.events()
        assert client.move(address, 0, [(local, remote, 4096)]) == hixl.SUCCESS
        assert client.bytes("local") == pattern(1, 4096)
        status, notifies = target.notifies()
        assert status == hixl.SUCCESS
        assert all(len(name.encode()) <= 1024 and len(text.encode()) <= 1024 for name, text in notifies)


def test_peer_that_reads_no_answers_delays_no_other() -> None:
    address = listener()
    with ends(End, End) as (target, client), Engine(metadata=b"hixl 1") as hostile:
        remote, local = target.add("remote", 64, 1), client.add("local", 64)
        target.initialize(address)
        client.initialize("127.0.0.1:0")
        target.register("remote")
        client.register("local")
        peer = hostile.link(address).result(10)
        question = message(3, 1, bytes(8 * 2048))
        with contextlib.suppress(Busy):
            for _ in range(2000):
                peer.send(question)
        assert client.call("connect", address, LIMIT) == hixl.SUCCESS
        assert client.move(address, 0, [(local, remote, 64)]) == hixl.SUCCESS
        assert client.notify(address, "a", "b") == hixl.SUCCESS
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
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave a page of another process without an answer")
def test_read_of_memory_that_does_not_answer_is_a_timeout() -> None:
    """The kernel may still write to the destination, so it stays in use until the process of the target ends."""
    with ends(End, Child) as (client, target):
        address, size = listener(), 4 << 20  # above what rings carry
        assert target.initialize(address) == hixl.SUCCESS
        assert client.initialize("127.0.0.1") == hixl.SUCCESS
        silent, local = target.add_silent("silent", size), client.add("m", size)
        assert target.register_range(silent, size)[0] == hixl.SUCCESS
        status, handle = client.register("m")
        assert status == hixl.SUCCESS
        assert client.call("connect", address, LIMIT) == hixl.SUCCESS
        assert client.move(address, 0, [(local, silent, size)], 300) == hixl.TIMEOUT
        assert client.call("deregister_mem", handle) == hixl.TIMEOUT
        assert client.move(address, 0, [(local, silent, size)], 300) == hixl.PARAM_INVALID
        target.kill()
        assert client.call("deregister_mem", handle) == hixl.SUCCESS
