"""The regions of peers, and the thread that answers peers who ask for ours."""

from __future__ import annotations

import json
import logging
import os
import selectors
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist import LLMException
from llm_datadist.events import LinkDown, Notification
from llm_datadist.integrations.transfer_engine.regions import Region, Regions

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import LLMDataDist

__all__ = ["MAX_NOTIFIES", "Peers"]

logger = logging.getLogger("llm_datadist.transfer_engine")

# Regions in one message: a message has at most 64 KiB, and a region at most 60 characters.
_PER_MESSAGE = 1000
MAX_REGIONS = 2**20
MAX_NOTIFIES = 65_536


@dataclass
class _Answer:
    """The part of a peer's list that has come."""

    regions: list[Region] = field(default_factory=list)
    complete: bool = False
    failure: str = ""


class Peers:
    """What is known of the peers of one engine.

    Args:
        engine: the engine.
        own: returns the regions of this side.
    """

    def __init__(self, engine: LLMDataDist, own: Callable[[], Regions]) -> None:
        self._engine = engine
        self._own = own
        self._changed = threading.Condition()
        self._known: dict[int, Regions] = {}
        self._answers: dict[int, _Answer] = {}
        self._notifies: list[tuple[str, str]] = []
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            engine.poll()  # from now on, the engine keeps news about links
            self._thread = threading.Thread(target=self._run, name="llm_datadist-transfer-engine", daemon=True)
            self._thread.start()
        except Exception:
            os.close(self._wake)
            raise

    def regions(self, cluster: int, limit_s: float, *, anew: bool = False) -> Regions:
        """Return the regions of a linked peer, and ask it unless they are known.

        Args:
            cluster: the cluster of the peer.
            limit_s: how long to wait for its answer, in seconds.
            anew: whether to ask although they are known.

        Raises:
            LLMException: the link is busy or broken.
            TimeoutError: the peer does not answer.
            ValueError: the answer is not a list of regions.
        """
        with self._changed:
            known = self._known.get(cluster)
            if known is not None and not anew:
                return known
            answer = self._answers.get(cluster)
            if answer is None:
                answer = self._answers[cluster] = _Answer()
                self._ask(cluster)
            if not self._changed.wait_for(lambda: answer.complete, limit_s):
                self._answers.pop(cluster, None)
                raise TimeoutError(f"cluster {cluster} did not list its memory within {limit_s:g} s")
            if answer.failure:
                raise ValueError(answer.failure)
            return self._known[cluster]

    def forget(self, cluster: int) -> None:
        """Forget the regions of a peer, which has taken one of them back."""
        with self._changed:
            self._known.pop(cluster, None)

    def take_notifies(self) -> list[tuple[str, str]]:
        """Return the notifications that peers have sent, as pairs of a name and a text, and forget them."""
        with self._changed:
            taken, self._notifies = self._notifies, []
        return taken

    def notify(self, cluster: int, name: str, text: str) -> None:
        """Send a notification to a linked peer."""
        self._engine.notify(cluster, json.dumps({"notify": [name, text]}).encode())

    def close(self) -> None:
        """Stop the thread."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _ask(self, cluster: int) -> None:
        try:
            self._engine.notify(cluster, json.dumps({"list": 0}).encode())
        except BaseException:  # also Ctrl-C: the next transfer must ask again, and not wait for this answer
            self._answers.pop(cluster, None)
            raise

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._engine, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing:
                selector.select()
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                for event in self._engine.poll():
                    if isinstance(event, Notification):
                        self._heard(event.cluster_id, event.payload)
                    elif isinstance(event, LinkDown):
                        self._unlinked(event.peer.cluster_id)

    def _heard(self, cluster: int, payload: bytes) -> None:
        try:
            message = json.loads(payload)
            kind, value = next(iter(message.items()))
            if kind == "list":
                self._send_list(cluster, int(value))
            elif kind == "regions":
                self._take_list(cluster, value)
            elif kind == "notify":
                self._take_notify(cluster, *map(str, value))
        except LLMException as error:  # the link is busy or broken; the peer gives up after its time limit
            logger.warning("cannot answer cluster %d: %s", cluster, error)
        except Exception as error:  # noqa: BLE001 - whatever a peer sends, the thread goes on
            logger.warning("cluster %d sent what cannot be read: %s", cluster, error)

    def _send_list(self, cluster: int, first: int) -> None:
        """Send one part of the list. The peer asks for the next one, so that a long list never fills the link."""
        own = self._own()
        part = json.loads(own.to_json(first, _PER_MESSAGE))
        self._engine.notify(cluster, json.dumps({"regions": [first, len(own), part]}).encode())

    def _take_list(self, cluster: int, value: list[object]) -> None:
        with self._changed:
            answer = self._answers.get(cluster)
            if answer is None:
                return
            try:
                first, total, part = value
                found = Regions.list_from(part)
                if first != len(answer.regions) or not isinstance(total, int) or total > MAX_REGIONS:
                    raise ValueError(f"part {first} of {total} regions was not asked for")  # noqa: TRY301
            except ValueError as error:
                answer.failure, answer.complete = f"cluster {cluster} sent a wrong list: {error}", True
            else:
                answer.regions += found
                answer.complete = len(answer.regions) >= total or not found
            if answer.complete:
                self._known[cluster] = Regions(answer.regions)
                self._answers.pop(cluster, None)
                self._changed.notify_all()
                return
            more = len(answer.regions)
        self._engine.notify(cluster, json.dumps({"list": more}).encode())

    def _take_notify(self, cluster: int, name: str, text: str) -> None:
        with self._changed:
            if len(self._notifies) < MAX_NOTIFIES:
                self._notifies.append((name, text))
                return
        logger.error("a notification of cluster %d was dropped: %d wait to be taken", cluster, MAX_NOTIFIES)

    def _unlinked(self, cluster: int) -> None:
        with self._changed:
            self._known.pop(cluster, None)
            answer = self._answers.pop(cluster, None)
            if answer is not None:
                answer.failure, answer.complete = f"the link to cluster {cluster} broke", True
                self._changed.notify_all()
