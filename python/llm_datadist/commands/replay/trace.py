"""Requests of a trace: read from a JSON-lines file, or generated with the same distribution. `serve` serves them.

A line of the file is an object with ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens) and
``hash_ids``: one id for each block of 512 input tokens, the last of which may be partial. An id stands for the whole
prefix up to the end of its block: blocks with equal ids are equal, and so are all blocks before them.
"""

from __future__ import annotations

import bisect
import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE_BLOCK_TOKENS = 512
"""Tokens that one id of a trace file stands for."""

MAX_ID = 2**62 - 1
"""Largest id of a block."""

_REQUIRED = ("timestamp", "input_length", "output_length", "hash_ids")


class Request(NamedTuple):
    """One request: arrival in milliseconds, lengths in tokens, ids of its input blocks in order."""

    arrival_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class TraceError(ValueError):
    """A trace that cannot be read. The text names the file, the line and the reason."""


def read_trace(path: str, limit: int | None = None) -> list[Request]:
    """Return the first `limit` requests of a JSON-lines file (all without a limit). Raises TraceError."""
    requests: list[Request] = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(requests) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    request = _parse(line, requests[-1].arrival_ms if requests else 0)
                except ValueError as error:
                    raise TraceError(f"{path}:{number}: {error}") from None
                requests.append(request)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: contains no request")
    return requests


def _parse(line: str, earliest_ms: float) -> Request:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a request: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"an object was expected, not {type(fields).__name__}")  # noqa: TRY004
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    arrival = fields["timestamp"]
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < 2**63:
        raise ValueError(f"timestamp must be milliseconds from 0 up, not {arrival!r}")
    if arrival < earliest_ms:
        raise ValueError(f"timestamp {arrival} is before the request above")
    input_tokens = _count(fields, "input_length", 1)
    output_tokens = _count(fields, "output_length", 0)
    return Request(arrival, input_tokens, output_tokens, _ids(fields["hash_ids"], input_tokens))


def _count(fields: Mapping[str, object], name: str, least: int) -> int:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} must be a number of tokens from {least} up, not {value!r}")
    return value


def _ids(ids: object, input_tokens: int) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids must be a list, not {type(ids).__name__}")  # noqa: TRY004
    expected = -(-input_tokens // FILE_BLOCK_TOKENS)
    if len(ids) != expected:
        raise ValueError(f"{len(ids)} hash_ids, but input_length {input_tokens} takes {expected} (512 tokens each)")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ID:
            raise ValueError(f"a hash id must be an integer in 0 ... 2^62-1, not {value!r}")
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids contains an id twice, so it cannot name a prefix")
    return tuple(ids)


# The distribution of the public conversation trace (12,031 requests): quantiles, then frequencies.
_SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_FIRST_INPUT = (891, 894, 905, 1336, 5264, 13056, 25561, 38538, 89869, 126195)
_OUTPUT = (1, 3, 24, 156, 350, 472, 597, 698, 1120, 2000)
_GROWTH = (1, 2, 5, 8, 23, 425, 4267, 7046, 17091, 60000)
_DISTANCE = (5, 44, 141, 229, 423, 901, 1662, 2131, 5110, 10514)
_CONTINUES = 0.387
_REPEATS = 0.027
_CUT_BACK = 0.12
_LONGEST_INPUT = _FIRST_INPUT[-1]
_TICK_MS = 3000.0
_REQUESTS_PER_TICK = 10


def make_trace(requests: int, seed: int, block_tokens: int = FILE_BLOCK_TOKENS) -> list[Request]:
    """Generate a trace of that many requests, with the lengths and the prefix sharing of the public conversation trace.

    Every request starts with one common block (the system prompt). About four in ten continue an earlier conversation
    and share its full blocks. Some of these have a part of the history removed, and a few repeat an earlier prompt
    unchanged. Equal arguments give equal traces.
    """
    return list(_conversations(requests, random.Random(seed), block_tokens))  # noqa: S311  (not a secret)


def _conversations(requests: int, dice: random.Random, block_tokens: int) -> Iterator[Request]:
    made: list[Request] = []
    heads: list[int] = []  # index of the latest request of each conversation, ascending
    next_id = 1
    for index in range(requests):
        earlier: Request | None = None
        if heads and dice.random() < _CONTINUES:
            earlier = made[_take_head(heads, index - _draw(_DISTANCE, dice))]
        kept, tokens = _prompt(earlier, dice, block_tokens)
        blocks = list(kept)
        if not blocks:
            blocks.append(0)
        fresh = -(-tokens // block_tokens) - len(blocks)
        blocks.extend(range(next_id, next_id + fresh))
        next_id += max(fresh, 0)
        arrival = _TICK_MS * (index // _REQUESTS_PER_TICK)
        request = Request(arrival, tokens, _draw(_OUTPUT, dice), tuple(blocks))
        made.append(request)
        heads.append(index)
        yield request


def _prompt(earlier: Request | None, dice: random.Random, block_tokens: int) -> tuple[tuple[int, ...], int]:
    """Return the blocks that a request shares with an earlier one, and its input length in tokens."""
    if earlier is None:
        return (), _draw(_FIRST_INPUT, dice)
    chance = dice.random()
    if chance < _REPEATS:
        return earlier.blocks, earlier.input_tokens
    kept = earlier.blocks[: earlier.input_tokens // block_tokens]
    tokens = earlier.input_tokens + earlier.output_tokens + _draw(_GROWTH, dice)
    if chance < _REPEATS + _CUT_BACK or tokens > _LONGEST_INPUT:
        kept = kept[: dice.randint(0, len(kept))]
        tokens = len(kept) * block_tokens + _draw(_FIRST_INPUT, dice)
        tokens = max(min(tokens, _LONGEST_INPUT), len(kept) * block_tokens + 1)
    return kept, tokens


def _take_head(heads: list[int], wanted: int) -> int:
    """Remove and return the first conversation whose latest request is at or after `wanted`, else the last one."""
    return heads.pop(min(bisect.bisect_left(heads, wanted), len(heads) - 1))


def _draw(quantiles: tuple[int, ...], dice: random.Random) -> int:
    """Draw from the distribution with those quantiles at `_SHARES`, log-linear between them."""
    share = dice.random()
    upper = bisect.bisect_right(_SHARES, share, 1, len(_SHARES) - 1)
    low, high = quantiles[upper - 1], quantiles[upper]
    part = (share - _SHARES[upper - 1]) / (_SHARES[upper] - _SHARES[upper - 1])
    return round(math.exp(math.log(low) + part * (math.log(high) - math.log(low))))


def describe(requests: list[Request]) -> dict[str, int | float]:
    """Return counts of a trace: requests, block references, distinct blocks, and its span in seconds."""
    references = sum(len(request.blocks) for request in requests)
    return {
        "requests": len(requests),
        "block_references": references,
        "distinct_blocks": len({block for request in requests for block in request.blocks}),
        "most_blocks_in_a_request": max((len(request.blocks) for request in requests), default=0),
        "span_s": (requests[-1].arrival_ms - requests[0].arrival_ms) / 1000 if requests else 0.0,
    }
