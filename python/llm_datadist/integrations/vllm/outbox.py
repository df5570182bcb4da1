"""Messages to peers, in order. Those for which a peer has no room wait here, and are sent again."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from llm_datadist import Busy, Error
from llm_datadist.integrations.vllm.messages import encode

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.messages import Message
    from llm_datadist.native import Peer

__all__ = ["MAX_WAITING", "RESEND_S", "Outbox"]

logger = logging.getLogger("vllm.llm_datadist")

# Maximum number of messages that wait for one peer. With more, its link is ended, so that both sides learn of it.
MAX_WAITING = 16_384
# Time between two attempts to send, in seconds.
RESEND_S = 0.02


class Outbox:
    """Sends messages to peers. Only the transfer thread uses it.

    A message arrives unless the link to the peer ends: the engine refuses more when the peer has not read 1,024
    messages or 4 MiB, and the rest waits here.
    """

    def __init__(self) -> None:
        self._waiting: dict[Peer, deque[bytes]] = {}

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message, or keep it until the peer has room for it.

        Raises:
            Error: there is no link to the peer.
        """
        payload = encode(message)
        waiting = self._waiting.get(peer)
        if waiting is None:
            try:
                peer.send(payload)
            except Busy:
                self._waiting[peer] = deque([payload])
        elif len(waiting) < MAX_WAITING:
            waiting.append(payload)
        else:
            logger.error("%s has not read %d messages, so the link to it is ended", peer.name, MAX_WAITING)
            del self._waiting[peer]
            peer.close()

    def resend(self) -> None:
        """Send what waits, as far as the peers have room."""
        for peer, waiting in list(self._waiting.items()):
            try:
                while waiting:
                    peer.send(waiting[0])
                    waiting.popleft()
            except Busy:
                continue
            except Error as error:  # its PeerDown ends what concerns the peer
                logger.warning("cannot send %d messages to %s: %s", len(waiting), peer.name, error)
            del self._waiting[peer]

    def next_due(self, now: float) -> float | None:
        """Return when ``resend`` has something to do, or ``None``."""
        return now + RESEND_S if self._waiting else None
