"""The messages of the protocol: encoders for those of a hostile peer, decoders for those of the engine.

Encoders take plain numbers and check nothing, because most of the messages are wrong on purpose. Decoded messages are
dictionaries with the name of the variant under "is". Not for: the order of messages (see the docstring of the package).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .postcard import Reader, blob, flag, many, sint, some, text, uint

if TYPE_CHECKING:
    from collections.abc import Sequence

NEVER = 600_000  # ms: a deadline that is later than the end of every attack
U32, U64 = 2**32 - 1, 2**64 - 1
# Numbers of the kind in an answer that reports a failure.
INVALID_ARGUMENT, OUT_OF_MEMORY, BUSY, GRANT_ENDED = 0, 2, 17, 18


def party(cluster: int, instance: int) -> bytes:
    """The sender: cluster id, random number of the engine, and the flag for remote-accessible mode."""
    return uint(cluster) + uint(instance) + flag(True)


def comm(name: str, members: list[tuple[int, int]], listener: str) -> bytes:
    """A communicator: its name, (cluster, rank) of each member, and the entry of the listener in the rank table."""
    return text(name) + many([uint(cluster) + uint(rank) for cluster, rank in members]) + text(listener)


def purpose_link(link: int, probe: bool = False, ensure: bool = False) -> bytes:
    return uint(0) + uint(link) + some(None) + flag(probe) + flag(ensure)


def purpose_call(link: int, rings: bool = False) -> bytes:
    return uint(1) + uint(link) + flag(False) + flag(rings)


RING_OFFER = b""
RING_USED = uint(0)


def ring_refused(reason: str) -> bytes:
    """Return an encoded `RingAnswer::Refused`."""
    return uint(1) + text(reason)


def read_ring_answer(body: bytes) -> str | None:
    """Return the reason why the other side uses no rings, if it uses none."""
    reader = Reader(body)
    reason = reader.text() if reader.uint() else None
    reader.done()
    return reason


def purpose_meet() -> bytes:
    return uint(2)


def purpose_announce(communicator: bytes) -> bytes:
    """Variant 3: this side has entered a communicator."""
    return uint(3) + communicator


def hello(purpose: bytes, who: bytes, host: str, nonce: bytes) -> bytes:
    return purpose + who + some(None) + text(host) + nonce


def read_hello(body: bytes) -> dict[str, Any]:
    """The purpose of a dialler, the link that it names, and whether it offers a ring."""
    reader = Reader(body)
    kind = ("Link", "Call", "Meet", "Announce")[reader.uint()]
    link = reader.uint() if kind in {"Link", "Call"} else None
    rings = kind == "Call" and (reader.flag(), reader.flag())[1]
    return {"is": kind, "link": link, "rings": rings}


def welcome(who: bytes, mac: bytes, local: str | None) -> bytes:
    return who + mac + some(None if local is None else text(local)) + some(None)


def read_welcome(body: bytes) -> dict[str, Any]:
    """The last message of an acceptor. "unsigned" is the same message with a zero mac, over which the mac is made."""
    reader = Reader(body)
    told: dict[str, Any] = {"from": (reader.uint(), reader.uint(), reader.flag())}
    start = reader.at
    told["mac"] = reader.raw(32)
    told["unsigned"] = body[:start] + bytes(32) + body[reader.at :]
    told["local"] = reader.some(reader.text)
    told["secret"] = reader.some(lambda: reader.raw(32))
    reader.done()
    return told


def attach(region: int | None) -> bytes:
    """The memory to map: generations, the region of the host if there is one, and no memory to read by process id."""
    return flag(True) + some(None if region is None else uint(region)) + some(None) + some(None)


ATTACHED = uint(0) + uint(0)  # all of an offer can be used


def read_attached(body: bytes) -> dict[str, str | None]:
    """Return the reasons why the other side cannot use parts of an offer."""
    reader = Reader(body)
    told = {name: reader.text() if reader.uint() else None for name in ("mapped", "registered")}
    reader.done()
    return told


def offer(version: bytes, address: bytes, pools: tuple[bytes | None, bytes | None] = (None, None)) -> bytes:
    """The pools of one side that UCX may read; a pool is (address, length, key)."""
    return blob(version) + blob(address) + b"".join(some(pool) for pool in pools)


def offered_pool(base: int, length: int, key: bytes) -> bytes:
    return uint(base) + uint(length) + blob(key)


def confirm(metadata: bytes = b"", fabric: bytes | None = None, name: bytes = b"") -> bytes:
    """The last message of the side that dials a link."""
    return blob(name) + blob(metadata) + some(fabric)


def entered(metadata: bytes = b"", fabric: bytes | None = None, name: bytes = b"") -> bytes:
    """Answer 0 of the side that accepts a link: it has entered the link."""
    return uint(0) + blob(name) + blob(metadata) + some(fabric) + uint(0)


def later(reason: str) -> bytes:
    """Answer 1 of the side that accepts a link: it keeps another one."""
    return uint(1) + text(reason)


def read_entered(body: bytes) -> bytes:
    """Return the metadata of the side that has entered a link."""
    reader = Reader(body)
    assert reader.uint() == 0, body
    reader.text()  # the name
    metadata = reader.raw(reader.uint())
    assert not reader.flag(), "the engine offers pools to UCX"
    assert reader.uint() == 0, "the engine announces addresses"
    reader.done()
    return metadata


PING, PONG, DIAL = uint(0), uint(1), uint(3)


def bye(reason: str = "the test ends it", unlinked: bool = False) -> bytes:
    return uint(2) + text(reason) + flag(unlinked)


def name_request(model: int, number: int) -> bytes:
    return uint(0) + uint(0) + uint(model) + uint(number)


def name_blocks(model: int = 0) -> bytes:
    return uint(0) + uint(2) + uint(model)


def name_grant(slot: int, generation: int, secret: bytes) -> bytes:
    return uint(2) + uint(slot) + uint(generation) + secret


def name_of(token: bytes, **changed: Any) -> bytes:
    """The name of the grant of a token: slot, generation and secret."""
    number = int.from_bytes
    real = {"slot": number(token[20:24], "little"), "generation": number(token[24:32], "little"), "secret": token[32:]}
    return name_grant(**{**real, **changed})


def span(src: int, dst: int, length: int, count: int = 1, src_step: int = 0, dst_step: int = 0) -> bytes:
    """`count` pieces of `length` bytes."""
    return uint(src) + uint(dst) + uint(length) + uint(count) + sint(src_step) + sint(dst_step)


def plan_start(tensors: int, first: tuple[int, int]) -> bytes:
    """Number of tensors, then the first tensor and the step of the source, then those of the destination."""
    return uint(tensors) + b"".join(uint(tensor) + uint(1) for tensor in first)


def plan_spans(spans: list[bytes], tensors: int = 1, src: int = 0, dst: int = 0) -> bytes:
    """A plan of spans that are not repeated."""
    return plan_templates([template((0, 0), [(0, 0)], spans)], tensors, (src, dst))


def plan_blocks(length: int, pairs: list[tuple[int, int]] | bytes) -> bytes:
    """A plan of equal blocks of one tensor.

    `pairs` are numbers, or the byte string of the message, whose first byte is the width of the numbers.
    """
    return plan_templates([template((length, length), pairs, [span(0, 0, length)])])


def template(units: tuple[int, int], pairs: list[tuple[int, int]] | bytes, spans: list[bytes]) -> bytes:
    """Spans that are repeated at pairs of places. `pairs` as in `plan_blocks`."""
    return uint(units[0]) + uint(units[1]) + blob(pairs if isinstance(pairs, bytes) else pack(pairs)) + many(spans)


def plan_templates(templates: list[bytes], tensors: int = 1, first: tuple[int, int] = (0, 0)) -> bytes:
    return plan_start(tensors, first) + many(templates)


def pack(pairs: list[tuple[int, int]]) -> bytes:
    return b"\x04" + b"".join(number.to_bytes(4, "little") for pair in pairs for number in pair)


def _request(kind: int) -> bytes:
    """The start of a request: the time that its caller waits, and the kind."""
    return uint(NEVER) + uint(kind)


def describe(name: bytes) -> bytes:
    return _request(0) + name


def without_limit(request: bytes) -> bytes:
    """A request without the time that its caller waits."""
    return request[next(at for at, byte in enumerate(request) if byte < 128) + 1 :]


def read(name: bytes, cache: int, plan: bytes, start: int, end: int, generation: int | None = None) -> bytes:
    """Request 1: ask for bytes. `generation` is the one that the entry must have, for a name that is a grant."""
    entry = name + sint(cache) + some(None if generation is None else uint(generation))
    return _request(1) + entry + plan + uint(start) + uint(end) + flag(False)


def write(
    name: bytes, cache: int, plan: bytes, start: int, end: int, ahead: bool = False, shared: int | None = None
) -> bytes:
    """Request 2: send bytes."""
    body = _request(2) + name + sint(cache) + plan + uint(start) + uint(end) + flag(ahead)
    return body + some(None if shared is None else uint(shared))


def fetch(name: bytes, cache: int, plan: bytes, source: bytes, tensors: int, tensor_bytes: int) -> bytes:
    """Request 3: the owner reads these bytes from the memory of the caller."""
    return _request(3) + name + sint(cache) + plan + source + uint(tensors) + uint(tensor_bytes)


def pulled(name: bytes, cache: int, first: int, count: int) -> bytes:
    """The tensors of a cache that the caller has pulled, or the name of a grant that it is done with."""
    return name + sint(cache) + uint(first) + uint(count)


def finish(pulled: bytes, message: bytes | None = None) -> bytes:
    """Request 4: the end of a pull."""
    return _request(4) + some(pulled) + some(None if message is None else blob(message))


def unlink() -> bytes:
    return _request(5)


def ping() -> bytes:
    return _request(6)


def locate(encoded_addresses: bytes, count: int) -> bytes:
    """Request 7: ask which caches contain these addresses."""
    return _request(7) + uint(count) + encoded_addresses


def notify(messages: list[bytes]) -> bytes:
    """Request 8: deliver notifications."""
    return _request(8) + many([blob(one) for one in messages])


def checksums(name: bytes, cache: int, plan: bytes) -> bytes:
    """Request 9: ask for the checksums of the pairs of a plan, on the side that it reads."""
    return _request(9) + name + sint(cache) + plan + flag(False)


FIND = 11


def find(name: bytes) -> bytes:
    """Request 11: ask for the id of the cache with this name."""
    return _request(FIND) + blob(name)


def polled(arrived: tuple[int, int], of_those: tuple[int, int]) -> bytes:
    """Control message 4: what has arrived and what was polled, in messages and bytes."""
    return uint(4) + b"".join(map(uint, (*arrived, *of_those)))


def run(start: int, step: int, count: int) -> bytes:
    """`count` numbers at a constant distance."""
    return uint(start) + uint(step) + uint(count)


def in_region(runs: list[bytes], region: int = 0) -> bytes:
    """A location in an attached region: offsets of the tensors."""
    return uint(0) + bytes([region]) + many(runs)


def in_process(runs: list[bytes]) -> bytes:
    """A location in the caller's process: addresses of the tensors."""
    return uint(1) + many(runs)


HIDDEN = uint(2)

REPLIES = ("Described", "Ready", "Done", "Stale", "Unreachable", "Failed", "Located", "Checksums", "Found")
STALE = uint(3)


def ready(count: int) -> bytes:
    """Reply 1: this many bytes follow, or may be sent."""
    return uint(1) + uint(count)


def done(count: int = 0) -> bytes:
    return uint(2) + uint(count)


def found(cache: int) -> bytes:
    """Reply 8: the cache with this id has the name."""
    return uint(8) + sint(cache)


def unreachable(reason: str) -> bytes:
    return uint(4) + text(reason)


def failed(kind: int, message: str, arrived: list[bytes]) -> bytes:
    return uint(5) + bytes([kind]) + text(message) + many(arrived)


def sums(generation: int, values: list[int], count: int | None = None) -> bytes:
    """Reply 7: these checksums. `count` is their number, if it is to be wrong."""
    return uint(7) + uint(generation) + uint(len(values) if count is None else count) + b"".join(map(uint, values))


def described(
    *,
    location: bytes = HIDDEN,
    granted: Sequence[tuple[int, int]] = (),
    **given: int,
) -> bytes:
    """Reply 0: a cache of 2 tensors of 4 blocks of 256 bytes without gaps or layout, unless other numbers are given.

    `granted` has the ranges of rows that a grant lends, and `num_granted` is their number, if it is to be wrong.
    """
    cache = {"slot": 0, "generation": 0, "tensors": 2, "rows": 4, "row_bytes": 256, "placement": 0, "allocated": 1}
    cache.update(given)
    names = uint(0) + uint(cache["slot"]) + uint(cache["generation"]) + sint(cache.get("cache", 1))
    stride = cache.get("row_stride", cache["row_bytes"])
    sizes = uint(0) + uint(cache["tensors"]) + uint(cache["rows"]) + uint(cache["row_bytes"]) + uint(stride)
    rows = uint(cache.get("num_granted", len(granted))) + b"".join(uint(first) + uint(end) for first, end in granted)
    flags = bytes([True, cache["placement"], cache["allocated"], True])
    return names + sizes + flags + location + uint(0) + rows


def _read_described(reader: Reader) -> dict[str, Any]:
    told: dict[str, Any] = {"is": "Described"}
    _, told["generation"] = reader.uint(), reader.uint()
    told["cache"], told["row"] = reader.sint(), reader.uint()
    told["tensors"], told["rows"], told["row_bytes"] = reader.uint(), reader.uint(), reader.uint()
    told["row_stride"] = reader.uint()
    reader.raw(4)  # flags and the placement
    where = reader.uint()
    if where == 0:
        reader.byte()  # the region
    if where < 2:
        reader.many(lambda: (reader.uint(), reader.uint(), reader.uint()))
    if reader.flag():
        return told  # a layout follows
    told["granted"] = reader.many(lambda: (reader.uint(), reader.uint()))
    reader.done()
    return told


def read_reply(body: bytes) -> dict[str, Any]:
    """Decode an answer of the owner. Of a description, only ids, sizes and the rows that a grant lends are decoded."""
    reader = Reader(body)
    told: dict[str, Any] = {"is": REPLIES[reader.uint()]}
    if told["is"] == "Described":
        return _read_described(reader)
    if told["is"] in {"Ready", "Done"}:
        told["bytes"] = reader.uint()
    elif told["is"] == "Unreachable":
        told["reason"] = reader.text()
    elif told["is"] == "Failed":
        told["kind"], told["message"] = reader.byte(), reader.text()
        told["arrived"] = reader.many(lambda: (reader.uint(), reader.uint(), reader.uint()))
    elif told["is"] == "Checksums":
        told["generation"], told["sums"] = reader.uint(), reader.many(reader.uint)
    elif told["is"] == "Found":
        told["cache"] = reader.sint()
    elif told["is"] == "Located":
        told["spots"] = reader.many(lambda: (reader.sint(), reader.uint(), reader.uint()))
    reader.done()
    return told
