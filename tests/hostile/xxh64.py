"""XXH64 with seed 0: the checksum that ends the body of each message.

Python takes seconds for a body of many MiB, in which no peer answers pings. So a C compiler, if there is one, compiles
the loop over a long body. Not for: checksums of the blocks of a cache, which use XXH3.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

MASK = 2**64 - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def _left(number: int, bits: int) -> int:
    return (number << bits | number >> (64 - bits)) & MASK


def _round(lane: int, word: int) -> int:
    return _left((lane + word * P2) & MASK, 31) * P1 & MASK


def _lane(lane: int, words: tuple[int, ...]) -> int:
    """Return a lane after all of its words. The same as `_round` for each word, without the calls."""
    for word in words:
        mixed = (lane + word * P2) & MASK
        lane = (mixed << 31 | mixed >> 33) * P1 & MASK
    return lane


LONG = 1 << 16  # bytes of a body that is worth the compiled loop
SOURCE = f"""
#include <stdint.h>
#include <string.h>
void run(const unsigned char *data, uint64_t stripes, uint64_t *lanes) {{
    for (uint64_t at = 0; at < stripes; at++)
        for (int lane = 0; lane < 4; lane++) {{
            uint64_t word;
            memcpy(&word, data + 32 * at + 8 * lane, 8);
            word = lanes[lane] + word * {P2}ULL;
            lanes[lane] = (word << 31 | word >> 33) * {P1}ULL;
        }}
}}
"""


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The loop over all lanes in C, or `None` without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "xxh64.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=SOURCE.encode(), check=True)  # noqa: S603
        return ctypes.CDLL(str(library))


def _lanes(data: bytes, whole: int) -> list[int]:
    """Return the four lanes after the first `whole` stripes of 32 bytes."""
    starts = ((P1 + P2) & MASK, P2, 0, -P1 & MASK)
    if len(data) >= LONG and (compiled := _compiled()) is not None:
        lanes = (ctypes.c_uint64 * 4)(*starts)
        compiled.run(ctypes.c_char_p(data), ctypes.c_uint64(whole), lanes)
        return list(lanes)
    words = struct.unpack_from(f"<{4 * whole}Q", data)
    return [_lane(start, words[at::4]) for at, start in enumerate(starts)]


def xxh64(data: bytes) -> int:
    whole = len(data) // 32
    if whole:
        lanes = _lanes(data, whole)
        total = sum(_left(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            total = ((total ^ _round(0, lane)) * P1 + P4) & MASK
    else:
        total = P5
    total = (total + len(data)) & MASK
    at = 32 * whole
    while at + 8 <= len(data):
        total = (_left(total ^ _round(0, int.from_bytes(data[at : at + 8], "little")), 27) * P1 + P4) & MASK
        at += 8
    if at + 4 <= len(data):
        total = (_left(total ^ int.from_bytes(data[at : at + 4], "little") * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        total = _left(total ^ byte * P5 & MASK, 11) * P1 & MASK
    total = (total ^ total >> 33) * P2 & MASK
    total = (total ^ total >> 29) * P3 & MASK
    return total ^ total >> 32
