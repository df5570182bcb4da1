"""Messages to peers, in order. Those for which a peer has no room wait here, and are sent again."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING

from llm_datadist import Busy, Closed, PeerLost
from llm_datadist.integrations.vllm.messages import encode

if TYPE_CHECKING:
    from msgspec import Struct

    from llm_datadist.native import Peer

__all__ = ["MAX_BYTES", "MAX_WAITING", "RESEND_S", "Outbox"]

logger = logging.getLogger("vllm.llm_datadist")

# Maximum number of messages that wait for one peer, and of their bytes. With more, its link is ended, so that both
# sides learn of it.
MAX_WAITING = 16_384
MAX_BYTES = 16 << 20
# Time between two attempts to send, in seconds.
RESEND_S = 0.02


class Outbox:
    """Sends messages to peers. Its owner calls all methods one at a time.

    A message arrives unless the link to the peer ends: the engine refuses more when the peer has not read 1,024
    messages or 4 MiB, and the rest waits here. A link over which a message cannot be sent is ended.
    """

    def __init__(self) -> None:
        self._waiting: dict[Peer, deque[bytes]] = {}
        self._bytes: Counter[Peer] = Counter()  # of the messages that wait
        # The peers whose link is to be ended, as soon as the engine has room for the call.
        self._ending: set[Peer] = set()

    def send(self, peer: Peer, message: Struct) -> None:
        """Send a message, or keep it until the peer has room for it.

        Raises:
            PeerLost: there is no link to the peer.
            Closed: the engine is closed.
        """
        if peer in self._ending:
            raise PeerLost(f"the link to {peer.name} is ending")
        payload = encode(message)
        waiting = self._waiting.setdefault(peer, deque())
        waiting.append(payload)
        self._bytes[peer] += len(payload)
        if len(waiting) == 1:
            self._send(peer, waiting)
        elif len(waiting) > MAX_WAITING or self._bytes[peer] > MAX_BYTES:
            logger.error("%s does not read %d messages, so the link to it is ended", peer.name, len(waiting))
            self._end(peer)

    def resend(self) -> None:
        """Send what waits, as far as the peers have room."""
        for peer in list(self._ending):
            self._close(peer)
        for peer, waiting in list(self._waiting.items()):
            try:
                self._send(peer, waiting)
            except (PeerLost, Closed) as error:  # noqa: PERF203 - its PeerDown ends what concerns the peer
                logger.warning("cannot send %d messages to %s: %s", len(waiting), peer.name, error)

    def next_due(self, now: float) -> float | None:
        """Return when ``resend`` has something to do, or ``None``."""
        return now + RESEND_S if self._waiting or self._ending else None

    def _send(self, peer: Peer, waiting: deque[bytes]) -> None:
        """Send what waits for a peer, as far as it has room."""
        try:
            while waiting:
                peer.send(waiting[0])
                self._bytes[peer] -= len(waiting.popleft())
        except Busy:
            return
        except (PeerLost, Closed):
            self._forget(peer)
            raise
        except Exception:
            # The peer may wait for the message without end.
            logger.exception("cannot send a message to %s, so the link to it is ended", peer.name)
            self._end(peer)
            return
        self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        """Drop what waits for a peer."""
        self._waiting.pop(peer, None)
        self._bytes.pop(peer, None)

    def _end(self, peer: Peer) -> None:
        self._forget(peer)
        self._ending.add(peer)
        self._close(peer)

    def _close(self, peer: Peer) -> None:
        try:
            peer.close()
        except Closed:
            pass
        except Exception:  # noqa: BLE001 - `resend` tries again
            return
        self._ending.discard(peer)
