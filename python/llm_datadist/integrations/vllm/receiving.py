"""Decode: the requests that are being received from prefill, each from the link to the last byte.

For each rank of prefill that it reads, a receive makes sure of a link, asks for the blocks, and waits for the grants.
When all have come, it starts the pulls, one for each KV cache group. It ends when all of them have ended, so nothing
writes to vLLM's blocks after that.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from llm_datadist import LLMException
from llm_datadist.integrations.vllm.group_caches import HEADS, PAGES, Owner
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone
from llm_datadist.integrations.vllm.ranks import heads_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import LLMDataDist
    from llm_datadist.events import Transfer
    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.messages import Lent, Message
    from llm_datadist.integrations.vllm.ranks import Shard, Source
    from llm_datadist.integrations.vllm.step import Receive

__all__ = ["Outcome", "Receiving", "cluster_of"]

logger = logging.getLogger("vllm.llm_datadist")


def cluster_of(engine_id: str, rank: int) -> int:
    """Return the cluster id of the engine of a rank: 63 bits of a hash."""
    digest = blake2b(f"{engine_id}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Outcome:
    """How a receive has ended.

    Attributes:
        request: the id of the request.
        failure: why it failed, or an empty text.
        receive_seconds: time since the receive began.
        transfer_seconds: time of the longest pull.
        moved: bytes in place.
        blocks: number of blocks.
    """

    request: str
    failure: str
    receive_seconds: float
    transfer_seconds: float
    moved: int
    blocks: int


@dataclass
class _Ongoing:
    receive: Receive
    sources: dict[int, Source]  # by cluster
    view: str
    begin: float
    deadline: float
    lent: dict[int, list[list[bytes]]] = field(default_factory=dict)
    links: dict[Transfer, int] = field(default_factory=dict)
    pulls: set[Transfer] = field(default_factory=set)
    blocks: int = 0
    moved: int = 0
    nanos: int = 0
    failure: str = ""


class Receiving:
    """The receives of this worker. Only the transfer thread uses it.

    Args:
        engine: the engine.
        groups: the caches of the KV cache groups.
        shard: the part of the KV cache that this worker holds.
        limit_s: time limit of a receive, in seconds.
        notify: sends a message to a cluster.
        ended: takes the outcome of each receive that has blocks.
    """

    def __init__(
        self,
        engine: LLMDataDist,
        groups: list[GroupCaches],
        shard: Shard,
        limit_s: float,
        notify: Callable[[int, Message], None],
        ended: Callable[[Outcome], None],
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._shard = shard
        self._limit_s = limit_s
        self._notify = notify
        self._ended = ended
        self._ongoing: dict[str, _Ongoing] = {}
        self._transfers: dict[Transfer, _Ongoing] = {}
        self._linked: set[int] = set()

    def begin(self, receive: Receive, now: float) -> None:
        """Begin to receive a request. Whatever fails is the outcome of the receive."""
        try:
            self._begin(receive, now)
        except Exception as error:  # noqa: BLE001 - one request fails, not the thread
            if receive.request in self._ongoing:
                self._fail(self._ongoing[receive.request], str(error))
            else:
                self._report(receive, str(error), (0, 0, 0, 0))

    def _begin(self, receive: Receive, now: float) -> None:
        handover = receive.handover
        wanted = self._shard.sources(len(handover.addresses))
        by_cluster = {cluster_of(handover.engine_id, source.rank): source for source in wanted}
        view = PAGES if handover.block_sizes == [group.form.block_size for group in self._groups] else HEADS
        ongoing = _Ongoing(receive, by_cluster, view, now, now + self._limit_s)
        self._ongoing[receive.request] = ongoing
        for cluster in by_cluster:
            if ongoing.failure:
                return  # the receive has ended
            if cluster in self._linked:
                self._greet(ongoing, cluster)
            else:
                self._link(ongoing, cluster, handover.addresses[by_cluster[cluster].rank])
        self._proceed(ongoing)

    def linked(self, cluster: int) -> None:
        """Note that there is a link to a cluster."""
        self._linked.add(cluster)

    def unlinked(self, cluster: int) -> None:
        """Fail the receives that wait for a cluster. Pulls that run end by themselves."""
        self._linked.discard(cluster)
        for ongoing in list(self._ongoing.values()):
            if cluster in ongoing.sources and cluster not in ongoing.lent and not self._dials(ongoing, cluster):
                self._fail(ongoing, f"the link to cluster {cluster} broke")

    def heard(self, cluster: int, message: Lent | Gone) -> None:
        """Take the answer of prefill."""
        for ongoing in self._asking(cluster, message.request):
            if isinstance(message, Gone):
                self._fail(ongoing, f"prefill does not lend it: {message.reason}")
            elif len(message.grants) != len(self._groups):
                self._fail(ongoing, f"prefill lends {len(message.grants)} KV cache groups, not {len(self._groups)}")
            else:
                ongoing.lent[cluster] = message.tokens()
                self._proceed(ongoing)

    def completed(self, transfer: Transfer) -> None:
        """Take the end of a link call or a pull."""
        ongoing = self._transfers.pop(transfer, None)
        if ongoing is None:
            return
        failure = transfer.exception()
        cluster = ongoing.links.pop(transfer, None)
        if cluster is None:
            ongoing.pulls.discard(transfer)
            ongoing.moved += transfer.bytes
            ongoing.nanos = max(ongoing.nanos, transfer.nanos)
        if failure is not None:
            self._fail(ongoing, str(failure))
        elif cluster is not None:
            self._linked.add(cluster)
            if not ongoing.failure:
                self._greet(ongoing, cluster)
        self._proceed(ongoing)

    def due(self, now: float) -> None:
        """Fail the receives whose time limit has passed."""
        for ongoing in [ongoing for ongoing in self._ongoing.values() if ongoing.deadline <= now]:
            ongoing.deadline = float("inf")
            self._fail(ongoing, f"not received within {self._limit_s:g} s")

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        return min((ongoing.deadline for ongoing in self._ongoing.values()), default=None)

    def _link(self, ongoing: _Ongoing, cluster: int, address: str) -> None:
        left_ms = max(1, int(1000 * (ongoing.deadline - time.monotonic())))
        transfer = self._engine.ensure_link(address, cluster_id=cluster, timeout_ms=left_ms)
        ongoing.links[transfer] = cluster
        self._transfers[transfer] = ongoing

    def _dials(self, ongoing: _Ongoing, cluster: int) -> bool:
        return cluster in ongoing.links.values()

    def _greet(self, ongoing: _Ongoing, cluster: int) -> None:
        """Ask a rank of prefill for the request, or report that nothing of it is needed."""
        source, request = ongoing.sources[cluster], ongoing.receive.handover.request
        wanted = source.reads and bool(ongoing.receive.blocks)
        message: Message = Ask(request, source.readers, ongoing.view) if wanted else Done(request, source.readers)
        try:
            self._notify(cluster, message)
        except LLMException as error:
            self._fail(ongoing, str(error))
            return
        if not wanted:
            ongoing.lent[cluster] = []

    def _asking(self, cluster: int, request: str) -> list[_Ongoing]:
        return [
            ongoing
            for ongoing in self._ongoing.values()
            if ongoing.receive.handover.request == request
            and cluster in ongoing.sources
            and cluster not in ongoing.lent
            and not ongoing.failure
        ]

    def _proceed(self, ongoing: _Ongoing) -> None:
        """Start the pulls when all grants have come, and end the receive when nothing of it runs any more."""
        if ongoing.receive.request not in self._ongoing or ongoing.links or ongoing.pulls:
            return
        complete = len(ongoing.lent) == len(ongoing.sources)
        if complete and ongoing.receive.blocks and not ongoing.blocks and not ongoing.failure:
            try:
                self._pull(ongoing)
            except Exception as error:  # noqa: BLE001 - one request fails, not the thread
                self._fail(ongoing, str(error))
                return
        if not ongoing.pulls and (complete or ongoing.failure):
            self._end(ongoing)

    def _pull(self, ongoing: _Ongoing) -> None:
        receive = ongoing.receive
        ranks = len(receive.handover.addresses)
        owners = [
            Owner(cluster, heads_of(source.rank, ranks, self._shard.total_heads), ongoing.lent[cluster])
            for cluster, source in ongoing.sources.items()
            if source.reads
        ]
        left_ms = max(1, int(1000 * (ongoing.deadline - time.monotonic())))
        for group, src, dst in zip(self._groups, receive.handover.blocks, receive.blocks):
            if ongoing.view == HEADS:
                transfer = self._pull_heads(group, owners, receive, (src, dst), left_ms)
                ongoing.blocks += len(dst)
            else:
                pairs = [(src[index] if index < len(src) else 0, ours) for index, ours in enumerate(dst) if ours]
                if not all(theirs for theirs, _ in pairs):
                    raise ValueError("prefill lacks a block that decode needs")
                ongoing.blocks += len(pairs)
                if not pairs:
                    continue
                transfer = group.pull_pages(owners, pairs, left_ms)
            ongoing.pulls.add(transfer)
            self._transfers[transfer] = ongoing
        if not ongoing.pulls:
            raise ValueError("prefill has none of the blocks that are needed")

    def _pull_heads(
        self,
        group: GroupCaches,
        owners: list[Owner],
        receive: Receive,
        blocks: tuple[list[int], list[int]],
        left_ms: int,
    ) -> Transfer:
        src, dst = blocks
        size = group.form.block_size
        first_block = receive.first_token // size
        end_block = -(-receive.num_tokens // size)
        dst = dst[first_block:end_block]
        if not all(src) or not all(dst):
            raise ValueError("blocks without content need equal block sizes")
        tokens = (receive.first_token, first_block * size, receive.num_tokens)
        return group.pull_heads(owners, src, dst, tokens, left_ms)

    def _fail(self, ongoing: _Ongoing, failure: str) -> None:
        ongoing.failure = ongoing.failure or failure
        for transfer in [*ongoing.links, *ongoing.pulls]:
            transfer.cancel()
        self._proceed(ongoing)

    def _end(self, ongoing: _Ongoing) -> None:
        del self._ongoing[ongoing.receive.request]
        if ongoing.failure:
            self._give_up(ongoing)
        took = time.monotonic() - ongoing.begin
        figures = (took, ongoing.nanos / 1e9, ongoing.moved, ongoing.blocks)
        self._report(ongoing.receive, ongoing.failure, figures)

    def _give_up(self, ongoing: _Ongoing) -> None:
        """Tell prefill that its blocks are not needed any more, where there is a link. The lease ends anyway."""
        for cluster, source in ongoing.sources.items():
            if cluster in self._linked:
                with suppress(LLMException):
                    self._notify(cluster, Done(ongoing.receive.handover.request, source.readers))

    def _report(self, receive: Receive, failure: str, figures: tuple[float, float, int, int]) -> None:
        if failure:
            logger.error("request %s was not received from prefill: %s", receive.request, failure)
        if receive.blocks:
            self._ended(Outcome(receive.request, failure, *figures))
