"""How decode uses links and messages, with an engine that the tests control."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from llm_datadist import Busy, GrantEnded, PeerLost, Timeout
from llm_datadist.integrations.vllm.handover import Handover
from llm_datadist.integrations.vllm.identity import Identity
from llm_datadist.integrations.vllm.messages import MAX_REASON, Ask, Done, Gone, Hold, Lent, Ready
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.receiving import Receiving
from llm_datadist.integrations.vllm.step import Await, Receive

NAME = "prefill"


class Decode:
    """The receives of a worker, with the links that it has asked for and the messages that it has sent."""

    def __init__(self) -> None:
        self.unreachable: set[str] = set()  # addresses at which a link call raises at once
        identity = Identity({"model": NAME})
        self.models: dict[str, str] = {}  # of addresses, if it is another one
        self.peers: dict[str, Mock] = {}
        self.links: list[Mock] = []
        self.limits: list[float] = []  # their time limits
        self.sent: list[tuple[Any, Any]] = []
        self.outcomes: list[Any] = []
        self.refuses = False
        self.pulls: list[Mock] = []
        engine: Any = SimpleNamespace(link=self._link)
        group: Any = SimpleNamespace(form=SimpleNamespace(block_size=32, layers=2), pull_pages=self._pull)
        self.receiving = Receiving(engine, [group], Shard(0, 1, 2), identity, 5.0, self._send, self.outcomes.append)

    def _link(self, address: str, *, name: str, timeout: float) -> Mock:
        self.limits.append(timeout)
        if address in self.unreachable:
            raise Busy("no more link calls")
        link = Mock()
        # Link calls to one engine have the same peer.
        peer = link.result.return_value = self.peers.setdefault(address, Mock(address=address, alive=True))
        peer.name = name
        peer.metadata = Identity({"model": self.models.get(address, NAME)}).metadata()
        self.links.append(link)
        return link

    def _send(self, peer: Any, message: Any) -> None:
        if self.refuses:
            raise PeerLost("there is no link")
        self.sent.append((peer, message))

    def _pull(self, *_: Any) -> Mock:
        self.pulls.append(Mock(nanos=1, bytes=1))
        return self.pulls[-1]

    def hold(self, request: str, engine: str = NAME, *, ports: tuple[int, ...] = (1,), block_size: int = 32) -> None:
        handover = Handover("t", engine, [f"{engine}:{port}" for port in ports], "100:", [block_size])
        self.receiving.hold(Await(request, handover))

    def begin(self, request: str, engine: str = NAME, *, held: bool = False, **given: Any) -> None:
        if not held:
            self.hold(request, engine, **given)
        self.receiving.begin(Receive(request, [[1, 2, 3, 4]], 0, 100), time.monotonic())

    def lend(self, peer: Any, receive: int = 0) -> None:
        self.receiving.heard(peer, Lent("t", receive, 0, 0, [[5, 6, 7, 8]], [[b"grant"]], 2, True))

    def kinds(self, peer: Any = None) -> list[type]:
        """The messages that were sent."""
        return [type(message) for to, message in self.sent if peer in (None, to)]

    def failures(self) -> list[str]:
        return [outcome.failure for outcome in self.outcomes]

    def link_up(self) -> Any:
        """Report the newest link call as successful. Return the peer."""
        self.receiving.completed(self.links[-1], None)
        return self.links[-1].result()

    def linked(self, request: str, engine: str = NAME) -> Any:
        """Begin a receive whose link is made at once. Return the peer."""
        self.begin(request, engine)
        return self.link_up()


@pytest.fixture
def decode() -> Decode:
    return Decode()


def test_link_that_ended_before_its_call_was_reported_is_made_again(decode: Decode) -> None:
    decode.begin("one")
    decode.refuses = True
    decode.link_up()
    assert "there is no link" in decode.outcomes[0].failure
    decode.refuses = False
    peer = decode.linked("two")
    assert len(decode.links) == 2
    assert decode.kinds(peer) == [Hold, Ask]


def test_every_receive_gets_its_link_from_the_engine(decode: Decode) -> None:
    """The engine knows which links exist, and returns one of them at once."""
    peer = decode.linked("one")
    assert (peer.address, peer.name) == (f"{NAME}:1", f"{NAME}/0")
    decode.begin("two")
    assert (len(decode.links), decode.link_up()) == (2, peer)
    decode.receiving.unlinked(peer, "killed")
    assert [outcome.failure for outcome in decode.outcomes] == [f"the link to {NAME}/0 broke: killed"] * 2
    decode.begin("three")
    assert len(decode.links) == 3


def test_a_request_is_held_from_its_arrival(decode: Decode) -> None:
    """There is no time limit until vLLM has blocks for it."""
    decode.hold("one")
    peer = decode.link_up()
    assert [message for _, message in decode.sent] == [Hold("t", 1)]
    assert decode.receiving.next_due() is None
    decode.begin("one", held=True)
    assert decode.receiving.next_due() is not None
    assert decode.kinds() == [Hold, Ask]
    decode.lend(peer)
    decode.receiving.completed(decode.pulls[0], None)
    assert decode.kinds() == [Hold, Ask, Done]
    assert [(outcome.request, outcome.failure, outcome.blocks) for outcome in decode.outcomes] == [("one", "", 4)]
    assert decode.receiving.next_due() is None


@pytest.mark.parametrize("linked", [True, False])
def test_a_request_that_needs_no_blocks_is_released(decode: Decode, linked: bool) -> None:
    """It is in the prefix cache, or was aborted in the queue. Prefill learns it even if the link is not made yet."""
    decode.hold("one")
    if linked:
        decode.link_up()
    decode.receiving.cancel("one")
    if not linked:
        assert not decode.links[0].cancel.called
        decode.link_up()
    assert decode.kinds() == [Hold, Done]
    assert decode.outcomes == []
    decode.receiving.cancel("one")
    assert decode.kinds() == [Hold, Done]


@pytest.mark.parametrize("pulls", [True, False])
def test_a_receive_that_is_aborted_ends_with_its_pulls(decode: Decode, pulls: bool) -> None:
    peer = decode.linked("one")
    if pulls:
        decode.lend(peer)
    decode.receiving.cancel("one")
    if pulls:
        assert decode.outcomes == []
        decode.pulls[0].cancel.assert_called_once_with()
        decode.receiving.completed(decode.pulls[0], PeerLost("cancelled"))
    assert [(outcome.request, outcome.failure, outcome.cancelled) for outcome in decode.outcomes] == [("one", "", True)]
    assert decode.kinds() == [Hold, Ask, Done]
    assert decode.receiving.next_due() is None


def test_a_request_whose_link_ends_in_the_queue_fails_when_it_has_blocks(decode: Decode) -> None:
    decode.hold("one")
    peer = decode.link_up()
    decode.receiving.unlinked(peer, "killed")
    assert decode.outcomes == []
    decode.begin("one", held=True)
    assert decode.failures() == [f"the link to {NAME}/0 broke: killed"]


@pytest.mark.parametrize("held", [True, False])
def test_a_refused_connection_fails_the_receive_at_once(decode: Decode, held: bool) -> None:
    decode.hold("one") if held else decode.begin("one")
    refused = Timeout("timeout passed while linking", errno=errno.ECONNREFUSED)
    decode.receiving.completed(decode.links[0], refused)
    if held:
        decode.begin("one", held=True)
    assert decode.failures() == [str(refused)]
    assert len(decode.links) == 1


def test_a_prefill_that_does_not_fit_is_released(decode: Decode) -> None:
    decode.models[f"{NAME}:1"] = "another"
    decode.hold("one")
    decode.link_up()
    assert decode.kinds() == [Hold, Done], "also while the request waits in the queue"
    decode.begin("one", held=True)
    assert decode.failures() == ["prefill does not fit to decode: model is 'another' in prefill, 'prefill' here"]
    assert decode.kinds() == [Hold, Done]


def test_requests_share_a_link_call(decode: Decode) -> None:
    """Also those that arrive while it is repeated. One that has failed in the meantime is not held."""
    decode.begin("one")
    decode.receiving.completed(decode.links[0], Timeout("no answer"))
    decode.begin("two")
    decode.begin("three")
    decode.receiving.cancel("two")
    assert len(decode.links) == 2
    peer = decode.link_up()
    assert decode.kinds(peer) == [Hold, Ask, Hold, Ask]
    assert [outcome.request for outcome in decode.outcomes] == ["two"]


def test_a_link_call_that_cannot_be_repeated_fails_all_that_wait(decode: Decode) -> None:
    decode.begin("one")
    decode.begin("two")
    decode.unreachable.add(f"{NAME}:1")
    decode.receiving.completed(decode.links[0], Timeout("no answer"))
    assert decode.failures() == ["no more link calls"] * 2


def test_silence_is_given_the_whole_time_limit(decode: Decode) -> None:
    decode.begin("one")
    decode.receiving.completed(decode.links[0], Timeout("no answer"))
    assert decode.outcomes == []
    assert decode.limits == [0.5, 5.0]


def test_a_preempted_part_is_read_when_it_is_lent_again(decode: Decode) -> None:
    peer = decode.linked("one")
    decode.lend(peer)
    decode.receiving.completed(decode.pulls[0], GrantEnded("revoked"))
    assert decode.outcomes == []
    decode.receiving.heard(peer, Lent("t", 0, 1, 0, [[1, 2, 3, 4]], [[b"grant"]], 2, True))
    decode.receiving.completed(decode.pulls[1], None)
    assert decode.failures() == [""]
    assert decode.kinds() == [Hold, Ask, Done]


def test_receives_fail_in_the_order_of_their_deadlines(decode: Decode) -> None:
    """Progress of one receive moves its deadline behind those of the others."""
    for request in ("one", "two"):
        decode.begin(request)
    decode.lend(decode.link_up())
    due = decode.receiving.next_due()
    assert due is not None
    decode.receiving.due(due)
    assert [outcome.request for outcome in decode.outcomes] == ["two"]
    text = "no progress within 5 s; prefill has lent no blocks of it, and may have it in its queue"
    assert text in decode.failures()[0]


def test_a_link_and_computed_layers_are_progress(decode: Decode) -> None:
    """Layers also if decode cannot pull them yet, because the block sizes differ. An older message is none."""
    decode.begin("one", block_size=64)
    due = [decode.receiving.next_due()]
    peer = decode.link_up()
    due.append(decode.receiving.next_due())
    decode.receiving.heard(peer, Lent("t", 0, 0, 0, [[5, 6]], [[b"keys", b"values"]], 0, True))
    due.append(decode.receiving.next_due())
    decode.receiving.heard(peer, Ready([("t", 0)], 1))
    due.append(decode.receiving.next_due())
    assert sorted({*due}) == due
    decode.receiving.heard(peer, Ready([("t", 0)], 1))
    assert decode.receiving.next_due() == due[-1]
    assert decode.pulls == []


def test_each_prefill_with_a_ticket_gets_done(decode: Decode) -> None:
    """A proxy has given a ticket to one prefill, and then to another one."""
    peers = [decode.linked(f"from {engine}", engine) for engine in (NAME, "other")]
    for peer in peers:
        number = next(message.receive for to, message in decode.sent if to is peer and isinstance(message, Ask))
        decode.receiving.heard(peer, Gone("t", number, "over"))
    done = [to for to, message in decode.sent if isinstance(message, Done)]
    assert done == peers


def test_done_is_sent_when_the_last_receive_of_a_ticket_ends(decode: Decode) -> None:
    """One of them may still be in the queue, or be linking."""
    for request in ("one", "two"):
        decode.hold(request)
    decode.receiving.cancel("two")
    peer = decode.link_up()
    assert decode.kinds() == [Hold, Hold]
    decode.hold("three")
    assert decode.link_up() == peer
    decode.begin("one", held=True)
    decode.receiving.heard(peer, Gone("t", 0, "over"))
    assert decode.kinds() == [Hold, Hold, Hold, Ask]
    decode.receiving.cancel("three")
    assert decode.kinds() == [Hold, Hold, Hold, Ask, Done]


def test_linked_ranks_get_done_although_a_link_call_raises(decode: Decode) -> None:
    decode.begin("one", ports=(1, 2))
    first, second = decode.links
    decode.receiving.completed(second, None)
    decode.receiving.completed(first, PeerLost("refused"))
    decode.sent.clear()
    decode.unreachable.add(f"{NAME}:1")
    decode.begin("two", ports=(1, 2))
    assert decode.link_up() == second.result()
    assert decode.kinds(second.result()) == [Hold, Done]
    assert decode.failures() == ["refused", "no more link calls"]


@pytest.mark.parametrize("raises", [True, False])
def test_ranks_that_are_linked_after_a_failure_get_done(decode: Decode, raises: bool) -> None:
    """The receive does not wait for their links, and one that has not failed reads on."""
    if raises:
        decode.unreachable.add(f"{NAME}:1")
    decode.begin("one", ports=(1, 2))
    if not raises:
        decode.receiving.completed(decode.links[0], PeerLost("refused"))
    assert decode.failures() == ["no more link calls" if raises else "refused"]
    peer = decode.link_up()
    assert decode.kinds() == decode.kinds(peer) == [Hold, Done]
    assert len(decode.outcomes) == 1


def test_a_failed_receive_leaves_a_rank_to_another_one(decode: Decode) -> None:
    """They wait for one link, and have one ticket."""
    decode.begin("one", ports=(1, 2))
    first, second = decode.links
    decode.receiving.completed(first, PeerLost("refused"))
    decode.begin("two", ports=(1, 2))
    decode.receiving.completed(second, None)
    assert decode.kinds(second.result()) == [Hold, Ask]
    assert decode.kinds(decode.link_up()) == [Hold, Ask]
    assert decode.failures() == ["refused"]


def test_reason_of_a_peer_is_fit_for_the_log(decode: Decode) -> None:
    decode.begin("one")
    decode.receiving.heard(decode.link_up(), Gone("t", 0, "line\nbreak \udc80" + "x" * 2000))
    failure = decode.outcomes[0].failure
    assert "line?break ?" in failure
    assert failure.isprintable()
    assert len(failure) < MAX_REASON + 100


def test_a_peer_that_is_gone_gets_no_done(decode: Decode) -> None:
    """Its link has ended, so prefill has freed the blocks."""
    peer = decode.linked("one")
    decode.refuses = True
    decode.receiving.unlinked(peer, "killed")
    assert decode.kinds() == [Hold, Ask]
    assert len(decode.outcomes) == 1
