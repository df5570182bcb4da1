"""Decode: the requests that are being received from prefill, each from the link to the last byte.

For each rank of prefill that it reads, a receive ensures a link, and asks for the blocks. Prefill lends them in
parts, and each part is pulled as its layers become ready. A receive ends when all of its pulls have ended, so nothing
writes to vLLM's blocks after that.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.integrations.vllm.group_caches import HEADS, PAGES, Owner, Tokens
from llm_datadist.integrations.vllm.incoming import Incoming
from llm_datadist.integrations.vllm.messages import MAX_NUMBER, Ask, Done, Gone, Lent
from llm_datadist.integrations.vllm.ranks import heads_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import LLMDataDist
    from llm_datadist.events import Transfer
    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.incoming import LentPart, Pull
    from llm_datadist.integrations.vllm.messages import Message, Ready
    from llm_datadist.integrations.vllm.ranks import Shard, Source
    from llm_datadist.integrations.vllm.step import Receive

__all__ = ["Outcome", "Receiving", "cluster_of"]

logger = logging.getLogger("vllm.llm_datadist")

# Maximum number of characters of a reason from prefill that are kept.
MAX_REASON = 1000


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
        transfer_seconds: sum of the durations of the pulls. A pull lasts as long as its longest transfer. Pulls that
            overlap are added.
        moved: bytes that were pulled, also those of parts that were withdrawn in the meantime.
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
    number: int
    sources: dict[int, Source]  # by cluster
    view: str
    incoming: Incoming
    begin: float
    deadline: float
    links: dict[Transfer, int] = field(default_factory=dict)
    pulls: dict[Transfer, _Running] = field(default_factory=dict)
    blocks: int = 0
    moved: int = 0
    nanos: int = 0
    failure: str = ""


@dataclass
class _Running:
    """A pull, with one transfer for each KV cache group."""

    pull: Pull
    transfers: int = 0
    nanos: int = 0
    lost: bool = False


class Receiving:
    """The receives of this worker. Only the transfer thread uses it.

    Args:
        engine: the engine.
        groups: the caches of the KV cache groups.
        shard: the part of the KV cache that this worker holds.
        limit_s: how long a receive may take between two signs of progress, in seconds.
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
        self._by_ticket: dict[str, list[_Ongoing]] = {}
        self._transfers: dict[Transfer, _Ongoing] = {}
        self._linked: set[int] = set()
        self._numbers = itertools.count()

    def begin(self, receive: Receive, now: float) -> None:
        """Begin to receive a request. A failure becomes the outcome of the receive."""
        try:
            self._begin(receive, now)
        except Exception as error:  # noqa: BLE001 - one request fails, not the thread
            if receive.request in self._ongoing:
                self._fail(self._ongoing[receive.request], str(error))
            else:
                self._report(receive, str(error), (0, 0, 0, 0))

    def _begin(self, receive: Receive, now: float) -> None:
        handover = receive.handover
        ranks = len(handover.addresses)
        wanted = self._shard.sources(ranks)
        by_cluster = {cluster_of(handover.engine_id, source.rank): source for source in wanted}
        view = PAGES if handover.block_sizes == [group.form.block_size for group in self._groups] else HEADS
        reads = {cluster for cluster, source in by_cluster.items() if source.reads}
        # If the heads differ, the engine converts all layers of a part in one transfer.
        by_layers = (
            view == PAGES
            and len(self._groups) == 1
            and [heads_of(by_cluster[cluster].rank, ranks, self._shard.total_heads) for cluster in reads]
            == [self._shard.heads]
        )
        layers = max(group.form.layers for group in self._groups)
        blocks = max(-(-receive.num_tokens // size) for size in handover.block_sizes)
        incoming = Incoming(self._missing(receive, view), blocks, reads, view, layers, by_layers=by_layers)
        number = next(self._numbers) % MAX_NUMBER
        ongoing = _Ongoing(receive, number, by_cluster, view, incoming, now, now + self._limit_s)
        self._ongoing[receive.request] = ongoing
        self._by_ticket.setdefault(handover.ticket, []).append(ongoing)
        for cluster in by_cluster:
            if ongoing.failure:
                return  # the receive has ended
            if cluster in self._linked:
                self._ask(ongoing, cluster)
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
            if cluster in ongoing.sources and ongoing.incoming.waits and not self._dials(ongoing, cluster):
                self._fail(ongoing, f"the link to cluster {cluster} broke")

    def heard(self, cluster: int, message: Lent | Ready | Gone) -> None:
        """Take news from prefill."""
        if isinstance(message, (Lent, Gone)):
            asking = [one for one in self._asking(cluster, message.ticket) if one.number == message.receive]
            for ongoing in asking:
                if isinstance(message, Lent):
                    self._lent(ongoing, cluster, message)
                else:
                    self._fail(ongoing, f"prefill does not lend it: {_printable(message.reason)}")
            return
        for ticket, number in message.parts:
            for ongoing in self._asking(cluster, ticket):
                if ongoing.incoming.ready(cluster, number, message.layers):
                    self._progressed(ongoing)
                    self._proceed(ongoing)

    def completed(self, transfer: Transfer) -> None:
        """Take the end of a link call or a pull."""
        ongoing = self._transfers.pop(transfer, None)
        if ongoing is None:
            return
        failure = transfer.exception()
        if transfer in ongoing.pulls:
            self._pulled(ongoing, transfer, failure)
        else:
            cluster = ongoing.links.pop(transfer)
            if failure is not None:
                self._fail(ongoing, str(failure))
            else:
                self._linked.add(cluster)
                if not ongoing.failure:
                    self._progressed(ongoing)
                    self._ask(ongoing, cluster)
        self._proceed(ongoing)

    def due(self, now: float) -> None:
        """Fail the receives whose time limit has passed."""
        for ongoing in [ongoing for ongoing in self._waiting() if ongoing.deadline <= now]:
            self._fail(ongoing, f"no progress within {self._limit_s:g} s")

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        return min((ongoing.deadline for ongoing in self._waiting()), default=None)

    def _waiting(self) -> list[_Ongoing]:
        """Return the receives that have not failed. A failed one ends when its last pull ends."""
        return [ongoing for ongoing in self._ongoing.values() if not ongoing.failure]

    def _missing(self, receive: Receive, view: str) -> list[set[int]]:
        """Return the indexes of the blocks that are needed, in blocks of prefill, for each KV cache group."""
        if view == PAGES or not receive.blocks:
            return [{index for index, block in enumerate(blocks) if block} for blocks in receive.blocks]
        sizes = receive.handover.block_sizes
        return [set(range(receive.first_token // size, -(-receive.num_tokens // size))) for size in sizes]

    def _link(self, ongoing: _Ongoing, cluster: int, address: str) -> None:
        transfer = self._engine.ensure_link(address, cluster_id=cluster, timeout_ms=self._left_ms(ongoing))
        ongoing.links[transfer] = cluster
        self._transfers[transfer] = ongoing

    def _dials(self, ongoing: _Ongoing, cluster: int) -> bool:
        return cluster in ongoing.links.values()

    def _ask(self, ongoing: _Ongoing, cluster: int) -> None:
        """Ask a rank of prefill for the request, if it is read."""
        if not ongoing.sources[cluster].reads or ongoing.incoming.complete:
            return
        handover = ongoing.receive.handover
        try:
            self._notify(cluster, Ask(handover.ticket, ongoing.number, ongoing.view, handover.prompt))
        except LLMException as error:
            # The link may have ended before the call that made it was reported. The next receive calls ensure_link
            # again.
            self._linked.discard(cluster)
            self._fail(ongoing, str(error))

    def _asking(self, cluster: int, ticket: str) -> list[_Ongoing]:
        of_ticket = self._by_ticket.get(ticket, ())
        return [ongoing for ongoing in of_ticket if cluster in ongoing.sources and not ongoing.failure]

    def _lent(self, ongoing: _Ongoing, cluster: int, message: Lent) -> None:
        try:
            wanted = ongoing.incoming.lent(cluster, message)
        except ValueError as error:
            self._fail(ongoing, str(error))
            return
        if wanted:
            self._progressed(ongoing)
            self._proceed(ongoing)

    def _pulled(self, ongoing: _Ongoing, transfer: Transfer, failure: BaseException | None) -> None:
        """Take the end of one transfer of a pull."""
        running = ongoing.pulls.pop(transfer)
        running.transfers -= 1
        running.nanos = max(running.nanos, transfer.nanos)
        ongoing.moved += transfer.bytes
        if isinstance(failure, LLMException) and failure.status_code == LLMStatusCode.LLM_GRANT_ENDED:
            running.lost = True
        elif failure is not None:
            self._fail(ongoing, str(failure))
        if running.transfers:
            return
        ongoing.nanos += running.nanos
        if running.lost:
            # If prefill has preempted the request, it lends the blocks again. If only the grants have expired, it makes
            # new ones when decode asks again.
            ongoing.incoming.lost(running.pull)
            for cluster in [] if ongoing.failure else ongoing.sources:
                self._ask(ongoing, cluster)
        elif not ongoing.failure:
            ongoing.blocks += ongoing.incoming.done(running.pull)
            self._progressed(ongoing)

    def _progressed(self, ongoing: _Ongoing) -> None:
        if not ongoing.failure:
            ongoing.deadline = time.monotonic() + self._limit_s

    def _left_ms(self, ongoing: _Ongoing) -> int:
        return max(1, int(1000 * (ongoing.deadline - time.monotonic())))

    def _proceed(self, ongoing: _Ongoing) -> None:
        """Start the pulls that can run. End the receive when no pull runs, and it is complete or has failed."""
        if ongoing.receive.request not in self._ongoing or ongoing.links:
            return
        if not ongoing.failure:
            try:
                for pull in ongoing.incoming.start():
                    self._pull(ongoing, pull)
            except Exception as error:  # noqa: BLE001 - one request fails, not the thread
                self._fail(ongoing, str(error))
                return
        if not ongoing.pulls and (ongoing.incoming.complete or ongoing.failure):
            self._end(ongoing)

    def _pull(self, ongoing: _Ongoing, pull: Pull) -> None:
        part, layers = pull.part, self._groups[0].form.layers
        ranks = len(ongoing.receive.handover.addresses)
        owners = [
            Owner(cluster, heads_of(ongoing.sources[cluster].rank, ranks, self._shard.total_heads), grants)
            for cluster, grants in part.grants.items()
        ]
        running = _Running(pull)
        for number, (group, wanted) in enumerate(zip(self._groups, part.wanted)):
            if not wanted:
                continue
            if ongoing.view == HEADS:
                transfer = self._pull_heads(group, number, owners, ongoing, part)
            else:
                theirs, ours = part.blocks[number], ongoing.receive.blocks[number]
                pairs = [(theirs[index - part.first], ours[index]) for index in wanted]
                some = None if len(pull.layers) == layers or len(self._groups) > 1 else pull.layers
                transfer = group.pull_pages(owners, pairs, self._left_ms(ongoing), some)
            running.transfers += 1
            ongoing.pulls[transfer] = running
            self._transfers[transfer] = ongoing

    def _pull_heads(
        self, group: GroupCaches, number: int, owners: list[Owner], ongoing: _Ongoing, part: LentPart
    ) -> Transfer:
        """Start to pull the tokens of a part between different block sizes."""
        receive = ongoing.receive
        size, theirs = group.form.block_size, receive.handover.block_sizes[number]
        first = max(receive.first_token, part.first * theirs)
        end = min(receive.num_tokens, part.end * theirs)
        src = part.blocks[number][first // theirs - part.first :]
        dst = receive.blocks[number][first // size : -(-end // size)]
        if not all(src) or not all(dst):
            raise ValueError(f"models with a sliding window need equal block sizes (prefill: {theirs}, decode: {size})")
        tokens = Tokens(first, end, first // theirs * theirs, first // size * size)
        return group.pull_heads(owners, src, dst, tokens, self._left_ms(ongoing))

    def _fail(self, ongoing: _Ongoing, failure: str) -> None:
        ongoing.failure = ongoing.failure or failure
        for transfer in [*ongoing.links, *ongoing.pulls]:
            transfer.cancel()
        self._proceed(ongoing)

    def _end(self, ongoing: _Ongoing) -> None:
        ticket = ongoing.receive.handover.ticket
        del self._ongoing[ongoing.receive.request]
        # A request for several completions (n > 1) is several requests here, with one ticket.
        others = [other for other in self._by_ticket.pop(ticket) if other is not ongoing]
        if others:
            self._by_ticket[ticket] = others
        self._report_done(ongoing, {cluster for other in others for cluster in other.sources})
        took = time.monotonic() - ongoing.begin
        figures = (took, ongoing.nanos / 1e9, ongoing.moved, ongoing.blocks)
        self._report(ongoing.receive, ongoing.failure, figures)

    def _report_done(self, ongoing: _Ongoing, still_read: set[int]) -> None:
        """Send ``Done`` to the ranks that no other receive reads. Without a link, the lease ends the loan."""
        for cluster, source in ongoing.sources.items():
            if cluster in self._linked and cluster not in still_read:
                ticket = ongoing.receive.handover.ticket
                try:
                    self._notify(cluster, Done(ticket, source.readers))
                except LLMException as error:
                    text = "cannot send Done of %s to cluster %d, so its blocks wait for the end of the lease: %s"
                    logger.warning(text, ticket, cluster, error)

    def _report(self, receive: Receive, failure: str, figures: tuple[float, float, int, int]) -> None:
        if failure:
            addresses = ", ".join(receive.handover.addresses)
            logger.error("request %s was not received from prefill at %s: %s", receive.request, addresses, failure)
        if receive.blocks:
            self._ended(Outcome(receive.request, failure, *figures))


def _printable(reason: str) -> str:
    """Return a reason that a peer has given, fit for the log."""
    return "".join(letter if letter.isprintable() else "?" for letter in reason[:MAX_REASON])
