"""Sockets, frames, greetings and links of a peer that need not follow the protocol.

`Wire` is one socket that carries frames. `Peer` is an identity that dials links and call streams, and can stop at any
step of a greeting. `Listener` accepts connections of an engine. `Tender` answers the pings of many links, so that they
stay alive during the attack. Not for: the bytes of messages (`messages`) or what an attack may cost (`budgets`).
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import hmac
import mmap
import os
import selectors
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import xxhash

from . import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 18
MAGIC = b"LD"
MESSAGE, REFUSAL = 1, 255
CHECKSUM = 8  # bytes of the checksum that ends the body of a message
LIMIT = 10.0  # seconds: the time limit of one step of an attack
GENERATIONS = 1 << 27  # bytes of the generations: 2^24 numbers of 8 bytes
AHEAD = 48 << 10  # most cache bytes that may directly follow a `Write`
STRETCH = 4 << 20  # bytes from one run of zeros to the next
ZEROS = bytes(64)
SEALS = 0x2 | 0x4 | 0x10  # F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE
F_ADD_SEALS = 1033
PAGE = 4096
RING, PAYLOAD_RING = 64 << 10, 1 << 20  # bytes of the rings for messages and for cache bytes
RING_FILE = PAGE + RING + PAYLOAD_RING

# The steps of a greeting at which a dialler may stop. Before "welcome", it is not authenticated.
STEPS = ("connect", "half header", "header", "half hello", "hello", "half proof", "proof", "welcome")


def header(length: int, kind: int = MESSAGE, version: int = VERSION) -> bytes:
    """The eight bytes before a body. `length` may differ from the length of the body."""
    return MAGIC + bytes([version, kind]) + struct.pack("<I", length)


def sealed(message: bytes) -> bytes:
    """Return the body of a message: its bytes and their checksum."""
    return message + struct.pack("<Q", xxhash.xxh64_intdigest(message))


def opened(body: bytes) -> bytes:
    """Check and remove the checksum of a body."""
    message = body[:-CHECKSUM]
    assert sealed(message) == body, "the checksum of a message is wrong"
    return message


def frame(message: bytes, kind: int = MESSAGE, version: int = VERSION) -> bytes:
    """Return the frame of a message, with its checksum. The body of a refusal has none."""
    body = message if kind == REFUSAL else sealed(message)
    return header(len(body), kind, version) + body


class EndedError(ConnectionError):
    """The other side closed the stream or refused. The text is its reason."""


def body_of(start: bytes, exactly: Callable[[int], bytes]) -> bytes:
    """Read the rest of the frame whose header is `start`, and return its message. Raise `EndedError` for a refusal."""
    magic, version, kind, length = struct.unpack("<2sBBI", start)
    body = exactly(length)
    assert magic == MAGIC, magic
    if kind == REFUSAL:
        raise EndedError(body[4:].decode())
    assert version == VERSION, f"the engine speaks version {version}, this client {VERSION}"
    return opened(body)


class Wire:
    def __init__(self, made: socket.socket, limit: float = LIMIT) -> None:
        self.socket = made
        made.settimeout(limit)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def say(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one frame, with copies of descriptors."""
        data = frame(body)
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            data = data[self.socket.sendmsg([data], [rights]) :]
        self.socket.sendall(data)

    def hear(self) -> bytes:
        """Return the body of the next message; close its descriptors. Raises `EndedError` for a refusal or the end."""
        body, descriptors = self.hear_with()
        for descriptor in descriptors:
            os.close(descriptor)
        return body

    def hear_with(self) -> tuple[bytes, list[int]]:
        """Return the body of the next message and its descriptors, which the caller closes."""
        room = socket.CMSG_SPACE(8 * 4) if self.socket.family == socket.AF_UNIX else 0
        start, extra, _, _ = self.socket.recvmsg(8, room)
        rights = [array.array("i", data[: len(data) - len(data) % 4]) for _, _, data in extra]
        descriptors = [descriptor for some in rights for descriptor in some]
        return body_of(start + self.exactly(8 - len(start)), self.exactly), descriptors

    def exactly(self, count: int) -> bytes:
        got = bytearray()
        while len(got) < count:
            more = self.socket.recv(min(count - len(got), 1 << 20))
            if not more:
                raise EndedError("the other side closed the stream without a reason")
            got += more
        return bytes(got)

    def ended(self, limit: float = LIMIT) -> bool:
        """Whether the other side ends the stream within the limit. Data before the end is ignored."""
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                if not self.socket.recv(1 << 16):
                    return True
            except (TimeoutError, socket.timeout):  # two classes before Python 3.10
                return False
            except OSError:
                return True
        return False

    def close(self) -> None:
        self.socket.close()


def own_rings() -> tuple[int, mmap.mmap]:
    """Return the descriptor of the rings that this side writes, which the caller closes, and their mapping."""
    own = memory(RING_FILE, 0)
    mapped = mmap.mmap(own, RING_FILE)
    fcntl.fcntl(own, F_ADD_SEALS, SEALS)
    return own, mapped


def peer_rings(received: list[int]) -> mmap.mmap:
    """Map the rings of the engine, whose descriptor was received, and close the descriptor."""
    (other,) = received
    theirs = mmap.mmap(other, RING_FILE, prot=mmap.PROT_READ)
    os.close(other)
    return theirs


class Rings:
    """One ring in each direction. `word` reads a word of the engine; `forge` writes a word of this side."""

    WRITTEN, READ, AWAITS_BYTES, AWAITS_ROOM, CLOSED = 0, 64, 128, 192, 256

    def __init__(self, wire: Wire, own: mmap.mmap, theirs: mmap.mmap, words: int, start: int, size: int) -> None:
        self.wire, self.own, self.theirs = wire, own, theirs
        self.start, self.size = start, size
        self.words, self.their_words = (memoryview(file).cast("Q")[words // 8 :] for file in (own, theirs))
        self.written = self.read = 0

    def word(self, at: int) -> int:
        return self.their_words[at // 8]

    def forge(self, at: int, value: int) -> None:
        # In one store: `struct.pack_into` stores zeros first, which the engine might see.
        self.words[at // 8] = value

    def put(self, data: bytes) -> None:
        """Write bytes into the ring without checking the room or waking the engine."""
        while data:
            at = self.written % self.size
            part = data[: self.size - at]
            self.own[self.start + at : self.start + at + len(part)] = part
            self.written += len(part)
            data = data[len(part) :]
        self.forge(self.WRITTEN, self.written)

    def send(self, data: bytes) -> None:
        self.put(data)
        self.wake()

    def wake(self) -> None:
        self.wire.send(b"\0")

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until the engine has changed its words in this way."""
        until = time.monotonic() + LIMIT
        while not holds():
            words = [self.word(at) for at in (self.WRITTEN, self.READ, self.AWAITS_BYTES, self.AWAITS_ROOM)]
            assert time.monotonic() < until, f"the engine does not go on: {words}, {self.written}, {self.read}"
            time.sleep(0.001)

    def exactly(self, count: int) -> bytes:
        got = bytearray()
        while len(got) < count:
            self.wait(lambda: self.word(self.WRITTEN) > self.read)
            more = min(self.word(self.WRITTEN) - self.read, count - len(got))
            at = self.start + self.read % self.size
            part = self.theirs[at : min(at + more, self.start + self.size)]
            got += part
            self.read += len(part)
            self.forge(self.READ, self.read)
        return bytes(got)


class PayloadRings(Rings):
    """The rings for cache bytes. Where zeros stand before them, the bytes begin with a page of the ring."""

    def give(self, data: bytes) -> None:
        """Send cache bytes, all of which fit the ring."""
        self.send(bytes(-self.written % PAGE if len(data) > AHEAD else 0) + data)

    def take(self, count: int) -> bytes:
        """Receive cache bytes."""
        zeros = self.exactly(-self.read % PAGE if count > AHEAD else 0)
        assert not any(zeros), zeros
        return self.exactly(count)


class RingWire(Rings):
    """A call stream with rings: those for messages, and in `payload` those for cache bytes."""

    def __init__(self, wire: Wire, own: mmap.mmap, theirs: mmap.mmap) -> None:
        super().__init__(wire, own, theirs, 0, PAGE, RING)
        self.payload = PayloadRings(wire, own, theirs, PAGE // 2, PAGE + RING, PAYLOAD_RING)

    def say(self, body: bytes) -> None:
        self.send(frame(body))

    def hear(self) -> bytes:
        """Return the body of the next message."""
        return body_of(self.exactly(8), self.exactly)

    def ask(self, request: bytes) -> dict[str, Any]:
        return ask(self, request)


class Link:
    def __init__(self, peer: Peer, number: int, control: Wire, dial: Callable[[], Wire] | None) -> None:
        self.peer, self.number, self.control = peer, number, control
        self.dial = dial
        self.seen: dict[str, str | None] = {}
        self.metadata = b""  # of the engine
        self.calls: list[Wire] = []

    def call(self, *, rings: bool = False) -> Wire:
        assert self.dial is not None, "the engine dialled this link"
        wire = self.dial()
        self.calls.append(wire)
        told = self.peer.greet(wire, m.purpose_call(self.number, rings))
        assert told["proved"], "the engine does not know the key"
        return wire

    def offer_rings(self, descriptors: Sequence[int]) -> tuple[Wire, str | None, list[int]]:
        """Offer these descriptors as a ring on a new call stream.

        Return the stream, the reason of a refusal or `None`, and the descriptors received.
        """
        wire = self.call(rings=True)
        wire.say(m.RING_OFFER, descriptors)
        body, received = wire.hear_with()
        return wire, m.read_ring_answer(body), received

    def ringed_call(self) -> RingWire:
        """Open a call stream with rings."""
        own, mapped = own_rings()
        wire, refused, received = self.offer_rings([own])
        os.close(own)
        assert refused is None, refused
        return RingWire(wire, mapped, peer_rings(received))

    def close(self) -> None:
        for wire in [self.control, *self.calls]:
            wire.close()


def ask(wire: Wire | RingWire, request: bytes) -> dict[str, Any]:
    wire.say(request)
    return m.read_reply(wire.hear())


def check_refused(reply: dict[str, Any], kind: int, text: str = "") -> None:
    """Check that an answer reports a failure of this kind."""
    assert (reply["is"], reply.get("kind")) == ("Failed", kind), reply
    assert text in reply["message"], reply


def payload(data: bytes) -> bytes:
    """Cache bytes with padding: zeros before byte 0 and each 4 MiB, where more than 48 KiB are still to come."""
    out = bytearray()
    for at in range(0, len(data), STRETCH):
        if len(data) - at > AHEAD:
            out += ZEROS
        out += data[at : at + STRETCH]
    return bytes(out)


def take(wire: Wire, count: int) -> bytes:
    """Receive cache bytes that travel as `payload` says."""
    out = bytearray()
    for at in range(0, count, STRETCH):
        if count - at > AHEAD:
            assert wire.exactly(len(ZEROS)) == ZEROS
        out += wire.exactly(min(STRETCH, count - at))
    return bytes(out)


def memory(length: int, seals: int = SEALS, flags: int = 0) -> int:
    """Return a sparse, sealed memfd of that many bytes. The caller closes it."""
    descriptor = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, length)
    fcntl.fcntl(descriptor, F_ADD_SEALS, seals)
    return descriptor


class Offer:
    """The description of a peer's memory, and its descriptors. The default is a valid offer without pools."""

    def __init__(self, region: int | None = None, generations: int | None = None) -> None:
        """`region` is the length of a host pool, and `generations` the descriptor of the generations."""
        self.body = m.attach(region)
        self.descriptors = [memory(GENERATIONS) if generations is None else generations]
        if region is not None:
            self.descriptors.append(memory(region))
        self.mapped = GENERATIONS + (region or 0)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Peer:
    """The identity of a client: a cluster id, an instance number, and a token or none."""

    def __init__(self, cluster: int, token: str | None, *, instance: int | None = None) -> None:
        self.instance = int.from_bytes(os.urandom(8), "little") if instance is None else instance
        self.party = m.party(cluster, self.instance)
        self.name = f"cluster {cluster}".encode()  # by which tests recognize it
        self.key = (token or "").encode()  # the key that authenticates it
        self.host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.step_limit = LIMIT  # time limit of a step of its greetings, in seconds

    def greet(self, wire: Wire, purpose: bytes, *, stop: str = "welcome") -> dict[str, Any]:
        """Greet as the side that dials, up to the step `stop`. Return the `Welcome`, or `{}` if it stops before."""
        hello = m.hello(purpose, self.party, self.host, os.urandom(16))
        said, body = frame(hello), sealed(hello)
        cut = {"connect": 0, "half header": 4, "header": 8, "half hello": 8 + len(body) // 2}.get(stop)
        wire.send(said[:cut])
        if cut is not None or stop == "hello":
            return {}
        challenge = wire.hear()
        assert len(challenge) == 16, challenge
        proof = frame(hmac.new(self.key, b"dialer\0" + body + challenge, hashlib.sha256).digest())
        wire.send(proof[:20] if stop == "half proof" else proof)
        if stop in {"half proof", "proof"}:
            return {}
        told = m.read_welcome(wire.hear())
        signed = hmac.new(self.key, b"acceptor\0" + body + challenge + sealed(told["unsigned"]), hashlib.sha256)
        told["proved"] = hmac.compare_digest(signed.digest(), told["mac"])
        return told

    def link_tcp(self, address: str, *, stop: str = "up", window: int | None = None) -> Link:
        """Make a link over TCP. Instead of "up", `stop` may be "welcome", "half confirm" or "confirm".

        `window` is the receive buffer.
        """
        return self._link(lambda: dial_tcp(address, window, self.step_limit), stop)

    def link_local(self, name: str, offer: Offer | None = None, *, stop: str = "up") -> Link:
        """Make a link over the local socket, and offer memory, whose descriptors are closed then.

        `stop` may also be a step of `_attach`.
        """
        with closing(offer or Offer()) as made:
            return self._link(lambda: dial_local(name, self.step_limit), stop, made)

    def _link(self, dial: Callable[[], Wire], stop: str, offer: Offer | None = None) -> Link:
        number = int.from_bytes(os.urandom(8), "little")
        link = Link(self, number, dial(), dial)
        try:
            self.greet(link.control, m.purpose_link(number), stop=stop if stop in STEPS else "welcome")
            if stop not in STEPS and offer is not None:
                self._attach(link, offer, stop)
            if stop == "half confirm":
                link.control.send(frame(m.confirm(bytes(1000)))[:500])
            if stop in {"confirm", "up"}:
                link.control.say(m.confirm(name=self.name))
            if stop == "up":
                link.metadata = m.read_entered(link.control.hear())
        except BaseException:
            link.close()
            raise
        return link

    def _attach(self, link: Link, offer: Offer, stop: str) -> None:
        """Offer memory, up to the step "half attach", "attach", or all of it."""
        if stop == "half attach":
            link.control.send(frame(offer.body)[:10])
            return
        link.control.say(offer.body, offer.descriptors)
        link.control.hear()
        if stop != "attach":
            link.control.say(m.ATTACHED)
            link.seen = m.read_attached(link.control.hear())

    def local_name(self, address: str) -> str:
        """Return the abstract name of an engine's local socket, which the engine tells to processes of its host."""
        with closing(dial_tcp(address)) as wire:
            told = self.greet(wire, m.purpose_link(1, probe=True))
        assert told["local"], told
        return str(told["local"])

    def answer(self, wire: Wire, local: str | None = None) -> dict[str, Any]:
        """Greet as the side that accepts, and return the `Hello` of the engine that dialled."""
        hello = wire.hear()
        challenge = os.urandom(16)
        wire.say(challenge)
        wire.hear()  # the proof, which is not checked
        unsigned = m.welcome(self.party, bytes(32), local)
        said = sealed(hello) + challenge + sealed(unsigned)
        mac = hmac.new(self.key, b"acceptor\0" + said, hashlib.sha256).digest()
        wire.say(m.welcome(self.party, mac, local))
        return m.read_hello(hello)


def dial_tcp(address: str, window: int | None = None, limit: float = LIMIT) -> Wire:
    host, port = address.rsplit(":", 1)
    assert host == "127.0.0.1", "only the loopback is attacked"
    wire = Wire(socket.socket(), limit)
    if window is not None:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.socket.connect((host, int(port)))
    return wire


def dial_local(name: str, limit: float = LIMIT) -> Wire:
    wire = Wire(socket.socket(socket.AF_UNIX), limit)
    wire.socket.connect(b"\0" + name.encode())
    return wire


class Listener:
    """A listener that an engine links to. It calls `serve` with each call stream, in a new thread.

    With an offer of memory, it redirects the engine to a local socket and sends the offer there. With `rings`, it
    accepts the rings of call streams and calls `rings` instead of `serve`. It calls `linked` with each link.
    """

    def __init__(
        self,
        peer: Peer,
        serve: Callable[[Wire], None],
        offer: Offer | None = None,
        *,
        rings: Callable[[RingWire], None] | None = None,
        linked: Callable[[Link], None] = lambda _: None,
    ) -> None:
        self.peer, self.serve, self.offer = peer, serve, offer
        self.rings, self.linked = rings, linked
        self.door = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        self.doors = [self.door]
        self.local: str | None = None
        if offer is not None:
            self.local = f"hostile.{os.urandom(8).hex()}"
            self.doors.append(socket.socket(socket.AF_UNIX))
            self.doors[1].bind(b"\0" + self.local.encode())
            self.doors[1].listen(256)
        self.links: list[Link] = []
        self.wires: list[Wire] = []
        self.answer_to_link = m.entered(name=peer.name)
        self.deaf: threading.Event | None = None  # no greeting is answered until it is set
        self.threads = [threading.Thread(target=self._accept, args=(door,), daemon=True) for door in self.doors]
        for thread in list(self.threads):
            thread.start()

    def _accept(self, door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                wire = Wire(door.accept()[0])
                self.wires.append(wire)
                thread = threading.Thread(target=self._greet, args=(wire,), daemon=True)
                self.threads.append(thread)
                thread.start()

    def _greet(self, wire: Wire) -> None:
        with suppress(OSError, AssertionError):
            if self.deaf is not None:
                self.deaf.wait(2 * LIMIT)
                return
            probed = wire.socket.family != socket.AF_UNIX
            told = self.peer.answer(wire, self.local if probed else None)
            if told["is"] == "Link":
                if self.local is not None and probed:
                    return
                if self.offer is not None:
                    wire.say(self.offer.body, self.offer.descriptors)
                    wire.hear()
                    wire.say(m.ATTACHED)
                    wire.hear()
                wire.hear()  # the confirmation
                wire.say(self.answer_to_link)
                link = Link(self.peer, told["link"], wire, None)
                self.links.append(link)
                self.linked(link)
                return
            if told["rings"] and self.rings is not None:
                self.rings(self._accept_rings(wire))
                return
            if told["rings"]:
                wire.hear()
                wire.say(m.ring_refused("this listener has no rings"))
            self.serve(wire)

    def _accept_rings(self, wire: Wire) -> RingWire:
        _, received = wire.hear_with()
        own, mapped = own_rings()
        wire.say(m.RING_USED, [own])
        os.close(own)
        return RingWire(wire, mapped, peer_rings(received))

    def __enter__(self) -> Listener:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        for door in self.doors:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            door.close()
        for wire in self.wires:
            with suppress(OSError):
                wire.socket.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(LIMIT)
        for wire in self.wires:
            wire.close()


class Tender:
    """Answers pings on many control streams from one thread, so that the engine considers the peer alive."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.ended: list[Link] = []  # links that the engine closed
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def add(self, *links: Link) -> None:
        with self.lock:
            for link in links:
                self.selector.register(link.control.socket, selectors.EVENT_READ, link)

    def _run(self) -> None:
        pings, pong = frame(m.PING), frame(m.PONG)
        while not self.over.is_set():
            for key, _ in self.selector.select(0.05):
                link = key.data
                try:
                    data = link.control.socket.recv(1 << 16)
                    count = data.count(pings)
                    if count:
                        link.control.socket.sendall(pong * count)
                except OSError:
                    data = b""
                if not data:
                    with self.lock:
                        self.selector.unregister(key.fileobj)
                    self.ended.append(link)

    def __enter__(self) -> Tender:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(LIMIT)
        self.selector.close()
