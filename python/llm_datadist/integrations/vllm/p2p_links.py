"""The engine of one peer-to-peer tier, and its links to those of other schedulers.

It has no thread. All work runs in ``advance``, which vLLM calls when it polls.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm_datadist import Busy, Closed, Completed, Engine, Error, GrantClosed, Message, PeerDown, PeerLost
from llm_datadist.integrations.vllm.messages import MAX_REASON
from llm_datadist.integrations.vllm.outbox import Outbox
from llm_datadist.integrations.vllm.p2p_messages import VERSION, Contact, Offer, Refused, decode, decode_contact, encode
from llm_datadist.integrations.vllm.p2p_reads import Reads
from llm_datadist.integrations.vllm.p2p_writes import Writes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.integrations.vllm.allowed_peers import AllowedPeers
    from llm_datadist.native import Event, Peer, Transfer

__all__ = ["CACHE", "Links"]

logger = logging.getLogger("vllm.llm_datadist")

CACHE = "primary tier"


@dataclass(eq=False)
class _Remote:
    """Another scheduler."""

    peer_id: str  # vLLM's name of it
    contact: Contact
    link: Transfer[Peer] | None = None  # while the link is made
    peer: Peer | None = None
    unsent: list[Offer] = field(default_factory=list)  # sent when there is a link. Their grants limit the wait


class Links:
    """The engine over the primary tier of one scheduler. Its owner calls all methods one at a time.

    Args:
        name: name of the engine, which no other one has.
        view: the primary tier: a writable buffer of rows.
        listen: address at which the engine listens.
        allowed_peers: the addresses that it links to.
        timeout_s: time limit of a link, and of the transfer of some rows, in seconds.
        engine_options: further options of ``Engine``.

    Raises:
        Error: the engine cannot be opened.
        TypeError: the engine has no such option.
    """

    def __init__(
        self,
        name: str,
        view: memoryview,
        listen: str,
        allowed_peers: AllowedPeers,
        timeout_s: float,
        engine_options: Mapping[str, Any],
    ) -> None:
        self._allowed_peers = allowed_peers
        self._row_bytes = view.nbytes // len(view)
        self._engine = Engine(**{**engine_options, "name": name, "listen": listen, "timeout": timeout_s})
        try:
            cache = self._engine.register(CACHE, [view])
        except BaseException:
            self._engine.close()
            raise
        self._outbox = Outbox()
        self.reads = Reads(self._engine, cache, timeout_s, self._refuse)
        self.writes = Writes(self._engine, cache, timeout_s)
        self._remotes: dict[str, _Remote] = {}  # by vLLM's name
        self._engines: dict[str, _Remote] = {}  # by the name of the engine
        self._linking: dict[Transfer[Peer], _Remote] = {}
        self._reported: set[Peer] = set()  # peers whose ignored message was logged, until the link ends

    @property
    def address(self) -> str:
        """The address at which the engine listens."""
        return str(self._engine.address)

    def contact(self, address: str) -> bytes:
        """Return what another scheduler passes to ``add``, if it reaches this engine at an address."""
        return encode(Contact(VERSION, self._engine.name, address))

    def add(self, peer_id: str, contact: bytes, row_bytes: int) -> None:
        """Admit another scheduler, and start to link with it.

        Raises:
            ValueError: the contact cannot be read, its address is not allowed, or the rows have another size.
        """
        found = decode_contact(contact)
        address = self._allowed_peers.checked(found.address)
        if row_bytes != self._row_bytes:
            raise ValueError(f"rows of {peer_id} have {row_bytes} bytes, and rows of this engine {self._row_bytes}")
        known = self._engines.get(found.engine)
        if known is not None and known.peer_id != peer_id:
            raise ValueError(f"{peer_id} is known as {known.peer_id} already")
        if known is not None:
            return
        self.remove(peer_id)  # it was restarted
        remote = _Remote(peer_id, Contact(VERSION, found.engine, address))
        self._remotes[peer_id] = self._engines[found.engine] = remote
        with suppress(Busy):  # `write` tries again
            self._link(remote)

    def remove(self, peer_id: str) -> None:
        """End the link to another scheduler, and all writes to it. Loads from it end by ``Reads.finish``."""
        self.writes.forget(peer_id)
        remote = self._remotes.pop(peer_id, None)
        if remote is None:
            return
        del self._engines[remote.contact.engine]
        if remote.link is not None:
            remote.link.cancel()
        if remote.peer is not None:
            _close(remote.peer)

    def write(self, peer_id: str, local: Sequence[int], remote: Sequence[int]) -> int:
        """Offer rows to a peer.

        Returns:
            The number of the write, which ``writes`` reports when it has ended.

        Raises:
            ValueError: the peer is unknown, or the rows are no pairs.
            Error: the rows cannot be lent, or there is no link.
        """
        to = self._remotes.get(peer_id)
        if to is None:
            raise ValueError(f"{peer_id} is not a peer of this engine")
        if to.peer is not None and not to.peer.alive:
            self._down(to, "the link has ended")  # its event may come later, and must not concern this write
        number, offers = self.writes.begin(peer_id, local, remote)
        try:
            if to.peer is not None:
                for offer in offers:
                    self._outbox.send(to.peer, offer)
            else:
                self._link(to)
                to.unsent += offers
        except BaseException:
            self.writes.cancel([number])
            raise
        return number

    def advance(self) -> None:
        """Handle the events of the engine, and send and start what waits. This neither blocks nor raises."""
        try:
            self._outbox.resend()
            self.reads.resume()
            for event in self._events():
                self._guarded(event)
        except Exception:
            # The scheduler would end. The time limits end what does not go on.
            logger.exception("the links of the peer-to-peer tier cannot go on")

    def close(self) -> None:
        """End all transfers and links. Nothing touches the view any more, and nothing holds it."""
        self._engine.close()

    def _events(self) -> list[Event]:
        try:
            return self._engine.events()
        except (Error, MemoryError) as error:
            # The engine keeps them.
            if not isinstance(error, Closed):
                logger.exception("cannot take the events of the engine")
            return []

    def _guarded(self, event: Event) -> None:
        """Handle an event. A failure concerns one write or load, so the others go on."""
        try:
            self._happened(event)
        except Exception:
            # The bytes of a message include a token, which a log must not show.
            shown = f"Message of {event.peer}" if isinstance(event, Message) else event
            logger.exception("could not handle %r", shown)

    def _happened(self, event: Event) -> None:
        if isinstance(event, Completed):
            remote = self._linking.pop(event.transfer, None)
            if remote is None:
                self.reads.completed(event.transfer, event.error)
            else:
                self._linked(remote, event.transfer, event.error)
        elif isinstance(event, Message):
            self._heard(event)
        elif isinstance(event, GrantClosed):
            self.writes.grant_closed(event.grant, event.reason)
        elif isinstance(event, PeerDown):
            self._reported.discard(event.peer)
            for remote in self._remotes.values():
                if remote.peer == event.peer:
                    self._down(remote, f"the link has ended: {event.reason}")

    def _heard(self, event: Message) -> None:
        remote = self._engines.get(event.peer.name)
        if remote is None:
            self._ignored(event, "it is not a peer of this tier")
            return
        try:
            message = decode(event.data)
        except ValueError:
            self._ignored(event, "it is invalid")
            return
        if isinstance(message, Offer):
            self.reads.offered(remote.peer_id, event.peer, message)
        else:
            self.writes.refused(remote.peer_id, message.write, message.reason)

    def _ignored(self, event: Message, why: str) -> None:
        """Log once for each link, so that no peer fills the log."""
        if event.peer not in self._reported:
            self._reported.add(event.peer)
            text = "a message of %d bytes from %s is ignored: %s; the log has no others of this link"
            logger.warning(text, len(event.data), event.peer, why)

    def _link(self, remote: _Remote) -> None:
        """Start to link, unless that has begun. If the link breaks later, the next write makes another one."""
        if remote.link is None:
            remote.link = self._engine.link(remote.contact.address, name=remote.contact.engine)
            self._linking[remote.link] = remote

    def _linked(self, remote: _Remote, transfer: Transfer[Peer], error: Error | None) -> None:
        remote.link = None
        unsent, remote.unsent = remote.unsent, []
        if self._remotes.get(remote.peer_id) is not remote:  # it was removed meanwhile
            if error is None and remote.contact.engine not in self._engines:
                _close(transfer.result())
            return
        if error is not None:
            self._down(remote, f"no link to {remote.contact.address}: {error}")
            return
        remote.peer = transfer.result()
        try:
            for offer in unsent:
                self._outbox.send(remote.peer, offer)
        except PeerLost as lost:
            self._down(remote, str(lost))

    def _down(self, remote: _Remote, reason: str) -> None:
        """Note that there is no link, and fail the writes that have begun. The next one makes a link."""
        remote.peer = None
        self.writes.lost(remote.peer_id, reason)

    def _refuse(self, peer: Peer, number: int, reason: str) -> None:
        with suppress(PeerLost):  # then the owner fails the write itself
            self._outbox.send(peer, Refused(number, reason[:MAX_REASON]))


def _close(peer: Peer) -> None:
    """Start to end a link."""
    with suppress(Error):
        peer.close()
