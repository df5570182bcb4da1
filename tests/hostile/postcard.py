"""The postcard encoding, as far as the protocol uses it.

Integers wider than a byte are little-endian groups of seven bits; the high bit says that more follow. Signed integers
are zigzag-coded first. Booleans and bytes take one byte. Text, byte strings and lists start with their length. Options
start with 0 or 1. An enum starts with the number of its variant. Structs, tuples and arrays of a fixed length are their
fields, one after the other. Not for: which fields a message has (`messages`).
"""

from __future__ import annotations

from typing import Any, Callable


def uint(number: int) -> bytes:
    assert 0 <= number < 2**64, number
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def sint(number: int) -> bytes:
    return uint((number << 1) ^ (number >> 63) if number >= 0 else ((-number) << 1) - 1)


def flag(value: bool) -> bytes:
    return bytes([value])


def blob(data: bytes) -> bytes:
    return uint(len(data)) + data


def text(value: str) -> bytes:
    return blob(value.encode())


def some(encoded: bytes | None) -> bytes:
    return b"\x00" if encoded is None else b"\x01" + encoded


def many(encoded: list[bytes]) -> bytes:
    return uint(len(encoded)) + b"".join(encoded)


class Reader:
    """Decodes values from the front of a body."""

    def __init__(self, body: bytes) -> None:
        self.body, self.at = body, 0

    def raw(self, count: int) -> bytes:
        taken = self.body[self.at : self.at + count]
        assert len(taken) == count, "the body is too short"
        self.at += count
        return taken

    def byte(self) -> int:
        return self.raw(1)[0]

    def flag(self) -> bool:
        value = self.byte()
        assert value in {0, 1}, value
        return value == 1

    def uint(self) -> int:
        number, shift = 0, 0
        while True:
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    def sint(self) -> int:
        number = self.uint()
        return number >> 1 if number & 1 == 0 else -((number + 1) >> 1)

    def text(self) -> str:
        return self.raw(self.uint()).decode()

    def some(self, read: Callable[[], Any]) -> Any:
        return read() if self.flag() else None

    def many(self, read: Callable[[], Any]) -> list[Any]:
        return [read() for _ in range(self.uint())]

    def done(self) -> None:
        """Check that no bytes are left."""
        assert self.at == len(self.body), f"{len(self.body) - self.at} more bytes"
