"""Links: names, incarnations, messages, peers that are killed and peers that restart."""

from __future__ import annotations

import os
import select
import socket
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.native import (
    Busy,
    Cancelled,
    Completed,
    Engine,
    GrantEnded,
    Message,
    Peer,
    PeerDown,
    PeerLost,
    PeerUp,
    RemoteCache,
    Timeout,
)
from peers import eventually

from .helpers import (
    LIMIT,
    ROW,
    Model,
    accepted,
    address,
    allocate,
    check_times,
    contents,
    fails,
    gather,
    messages,
    next_of,
    of,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from .conftest import Open, Pair
    from .helpers import Remote

TRANSPORTS = ["auto", "tcp"]


def test_link(start: Open, carried_by: str) -> None:
    remote = start(name="remote", listen="127.0.0.1:0", metadata=b"rank 1", transport=carried_by)
    local = start(name="local", metadata=b"rank 0", transport=carried_by)
    transfer = local.link(address(remote), name="remote")
    peer = transfer.result(LIMIT)
    assert isinstance(peer, Peer)
    assert (peer.name, peer.address, peer.metadata, peer.alive) == ("remote", remote.address, b"rank 1", True)
    back = next_of(remote, PeerUp).peer
    assert (back.name, back.metadata, back.alive) == ("local", b"rank 0", True)
    assert next_of(local, PeerUp).peer == peer
    assert (local.peers, remote.peers) == ([peer], [back])
    assert peer.incarnation != back.incarnation
    assert (peer.transport == "tcp") == (carried_by == "tcp")
    assert "remote" in repr(peer)
    assert (local.events(), remote.events()) == ([], [])


def test_link_is_idempotent(pair: Pair) -> None:
    again = [pair.local.link(address(pair.remote)) for _ in range(3)]
    assert [transfer.result(LIMIT) for transfer in again] == [pair.peer] * 3
    assert {transfer.result(0) for transfer in again} == {pair.peer}
    assert (pair.local.events(), pair.remote.events(), len(pair.local.peers)) == ([], [], 1)


def test_completed_event_of_a_link(start: Open) -> None:
    remote, local = start(listen="127.0.0.1:0"), start()
    transfer = local.link(address(remote))
    seen = gather(local, lambda seen: len(seen) == 2)
    (completed,) = of(Completed, seen)
    (up,) = of(PeerUp, seen)
    assert completed.transfer is transfer
    assert completed.transfer.result(0) == up.peer


def test_peer_with_another_name(pair: Pair, start: Open) -> None:
    other = start(name="other", listen="127.0.0.1:0")
    error = fails(PeerLost, lambda: pair.local.link(address(other), name="remote"))
    assert error.code == "link_failed"
    assert f"the peer at {address(other)} is named 'other', not 'remote'" in str(error)
    eventually(lambda: other.peers == [])
    assert pair.local.peers == [pair.peer]
    fails(PeerLost, lambda: pair.local.link(address(pair.remote), name="other"))
    assert pair.peer.alive, "the link that exists stays"


@pytest.mark.parametrize(
    "wrong",
    ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000", "localhost:5", "::1:5", "[::1]", "1.2.3:4", " 1.2.3.4:5"],
)
def test_wrong_addresses(engine: Engine, wrong: str) -> None:
    refused("address", lambda: engine.link(wrong))


def test_wrong_arguments_of_link(start: Open) -> None:
    engine = start(listen="127.0.0.1:0")
    refused("address", lambda: engine.link(address(engine)))
    check_times(lambda time: engine.link("127.0.0.1:1", timeout=time))
    refused("name", lambda: engine.link("127.0.0.1:1", name="x" * 129))
    at: Any = "127.0.0.1:1"
    for arguments, keywords in (
        ((1,), {}), ((b"127.0.0.1:1",), {}), ((at,), {"name": 1}), ((at, "remote"), {}), ((at,), {"cluster_id": 1}),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            engine.link(*arguments, **keywords)  # type: ignore[arg-type]


def test_remote_caches_are_values(pair: Pair) -> None:
    one = pair.peer["kv"]
    assert isinstance(one, RemoteCache)
    assert (one.name, one.peer) == ("kv", pair.peer)
    assert one == pair.peer["kv"]
    assert one != pair.peer["b"]
    assert one != pair.back["kv"]
    assert len({one, pair.peer["kv"], pair.peer["b"]}) == 2


# Messages


def test_messages_arrive_in_order(pair: Pair) -> None:
    sent = [f"message {number}".encode() * (number % 7) for number in range(1000)]
    for message in sent:
        pair.peer.send(message)
    seen = gather(pair.remote, lambda seen: len(of(Message, seen)) >= 1000)
    assert [(event.peer, event.data) for event in seen if isinstance(event, Message)] == [
        (pair.back, message) for message in sent
    ]
    pair.back.send(bytearray(b"back"))  # type: ignore[arg-type]
    assert messages(pair.local, 1) == [b"back"]


def test_window_of_messages(pair: Pair) -> None:
    mine, _ = pair.caches()
    model = Model(mine)
    for number in range(1024):
        pair.peer.send(bytes([number % 256]))
    error = fails(Busy, lambda: pair.peer.send(b"one more"))
    assert error.code == "busy"
    fails(Busy, lambda: pair.local.pull(mine[[1]], pair.peer["kv"][[2]], notify=b"no"))
    model.check(mine)
    assert len(messages(pair.remote, 1024)) == 1024
    eventually(lambda: accepted(lambda: pair.peer.send(b"again"), Busy))
    assert messages(pair.remote, 1) == [b"again"]


def test_wrong_messages(pair: Pair) -> None:
    refused("message", lambda: pair.peer.send(bytes(65537)))
    for wrong in ("text", 1, None, [1]):
        with pytest.raises(TypeError):
            pair.peer.send(wrong)  # type: ignore[arg-type]
    pair.peer.send(bytes(65536))
    pair.peer.send(b"")
    assert messages(pair.remote, 2) == [bytes(65536), b""]


def test_descriptor(pair: Pair) -> None:
    assert pair.local.fileno() == pair.local.fileno()
    assert not os.get_inheritable(pair.local.fileno())
    assert select.select([pair.local], [], [], 0) == ([], [], [])
    pair.back.send(b"x")
    assert select.select([pair.local], [], [], LIMIT)[0] == [pair.local]
    pair.local.events()
    assert select.select([pair.local], [], [], 0) == ([], [], [])


# The end of a link


def test_closing_a_peer(pair: Pair) -> None:
    mine, _ = pair.caches()
    push = pair.local.push(pair.peer["kv"][[1]], mine[[2]], layerwise=True)
    assert pair.peer.close().result(LIMIT) is None
    assert not pair.peer.alive
    fails(PeerLost, lambda: push)
    fails(PeerLost, lambda: pair.peer.send(b"x"))
    fails(PeerLost, lambda: pair.local.pull(mine[[1]], pair.peer["kv"][[2]]))
    for engine, peer in ((pair.local, pair.peer), (pair.remote, pair.back)):
        down = next_of(engine, PeerDown)
        assert (down.peer, down.unconfirmed) == (peer, 0)
        assert down.reason
        assert (engine.peers, of(PeerDown, engine.events())) == ([], [])
    assert pair.peer.close().result(LIMIT) is None, "closing again is no error"
    check_times(pair.peer.close)
    again = pair.local.link(address(pair.remote)).result(LIMIT)
    assert again == pair.peer, "it is the same incarnation"
    pair.local.pull(mine[[1]], pair.peer["kv"][[2]]).result(LIMIT)


def test_peer_that_closes_its_engine(pair: Pair) -> None:
    pair.back.send(b"last words")
    assert select.select([pair.local], [], [], LIMIT)[0], "the message has arrived"
    pair.remote.close()
    seen = gather(pair.local, lambda seen: bool(of(PeerDown, seen)))
    assert [type(event) for event in seen] == [Message, PeerDown], "messages come before the end"
    assert not pair.peer.alive


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_killed_peer(start: Open, remote: Remote, carried_by: str, how: str) -> None:
    """Its transfers end with `PeerLost`, then there is one `PeerDown`, and the engine goes on."""
    local = start(transport=carried_by)
    mine = allocate(local, seed=1)
    peer = local.link(remote.address).result(LIMIT)
    next_of(local, PeerUp)
    hanging = [local.push(peer["kv"][[n]], mine[[n]], layerwise=True) for n in range(4)]
    hanging[0].ready(0)
    eventually(lambda: hanging[0].bytes == ROW)
    local.pull(mine[[5]], peer["kv"][[6]]).result(LIMIT)
    model = Model(mine)
    if how == "killed":
        remote.kill()
    else:
        remote.start("engine.close()")
    seen = gather(local, lambda seen: bool(of(PeerDown, seen)))
    assert {event.transfer for event in of(Completed, seen)} == set(hanging)
    assert {type(event.error) for event in of(Completed, seen)} == {PeerLost}
    assert isinstance(seen[-1], PeerDown), "it comes after the ends of the transfers"
    assert seen[-1].peer == peer
    assert (peer.alive, local.peers, peer.name) == (False, [], "remote")
    fails(PeerLost, lambda: local.pull(mine[[1]], peer["kv"][[2]]))
    fails(PeerLost, lambda: peer.send(b"x"))
    local.copy(mine[[7]], mine[[8]]).result(LIMIT)
    model.write([7], model, [8]).check(mine)


def test_restart_at_the_same_address(start: Open, begin_remote: Callable[..., Remote]) -> None:
    """The new process is another peer: nothing of the old one reaches it, and old objects do not name it."""
    local = start(name="local")
    mine = allocate(local, seed=1)
    old_remote = begin_remote(name="remote")
    old_remote.do("kv = allocate(engine, seed=2)")
    old = local.link(old_remote.address).result(LIMIT)
    old_remote.do("up = next_of(engine, PeerUp); up.peer.send(b'from the old one')")
    before = gather(local, lambda seen: bool(of(Message, seen)))
    old_rows = old["kv"][[3]]
    token = old_remote.do(f"grant = engine.lend(kv[[3]], ttl={LIMIT}); bytes(grant.token)")
    hanging = local.push(old_rows, mine[[3]], layerwise=True)
    old_remote.kill()
    new_remote = begin_remote(name="remote", listen=old_remote.address)
    new_remote.do("kv = allocate(engine, seed=4)")
    new = local.link(old_remote.address).result(LIMIT)
    assert (new.name, new.address, new == old, new.alive, old.alive) == ("remote", old.address, False, True, False)
    assert new.incarnation != old.incarnation
    fails(PeerLost, lambda: hanging)
    fails(PeerLost, lambda: local.pull(mine[[1]], old_rows))
    fails(PeerLost, lambda: local.push(old_rows, mine[[1]]))
    fails(PeerLost, lambda: old.send(b"for the old one"))
    assert old["kv"] != new["kv"]
    fails(GrantEnded, lambda: local.pull(mine[[1]], new["kv"][[3]], grant=token))
    local.pull(mine[[1]], new["kv"][[2]]).result(LIMIT)
    assert contents(mine)[0][96:192] == new_remote.do("contents(kv)")[0][2 * 96 : 3 * 96]
    new.send(b"for the new one")
    assert new_remote.do("messages(engine, 1)") == [b"for the new one"]
    seen = before + gather(local, lambda seen: bool(of(PeerUp, seen)) and bool(of(PeerDown, seen)))
    assert of(Completed, seen) == [], "their outcomes were taken"
    of_old = [type(event) for event in seen if event.peer == old]  # type: ignore[union-attr]
    assert of_old == [PeerUp, Message, PeerDown]
    assert [type(event) for event in seen if event.peer == new] == [PeerUp]  # type: ignore[union-attr]


def test_unconfirmed_messages(start: Open, remote: Remote) -> None:
    local = start(transport="tcp", silence=600.0)
    peer = local.link(remote.address).result(LIMIT)
    with remote.stopped():
        for _ in range(5):
            peer.send(b"never read")
        remote.process.kill()
    assert next_of(local, PeerDown).unconfirmed == 5


def test_attributes_cannot_be_set(pair: Pair) -> None:
    names: list[Any] = ["name", "alive", "other"]
    for name in names:
        with pytest.raises(AttributeError):
            setattr(pair.peer, name, 1)


def test_bytes_of_waiting_messages_are_bounded(pair: Pair) -> None:
    large = bytes(65536)
    for _ in range(64):
        pair.peer.send(large)
    with pytest.raises(Busy):
        pair.peer.send(b"x")
    assert messages(pair.remote, 64) == [large] * 64


def test_room_for_messages_does_not_shrink(pair: Pair) -> None:
    """Thousands of messages, some with pulls, are taken while they arrive. There is as much room as before."""
    mine, _ = pair.caches()
    pulls: list[Any] = []
    sent = got = 0
    while sent < 6000:
        if accepted(lambda: pair.peer.send(b"x"), Busy):
            sent += 1
        else:
            got += len(of(Message, pair.remote.events()))
        if sent % 10 == 0:
            pulls.append(pair.local.pull(mine[[0]], pair.peer["kv"][[1]], notify=b"y"))
            got += len(of(Message, pair.remote.events()))
    sent += sum(accepted(lambda pull=pull: pull, Busy) for pull in pulls)  # type: ignore[misc]
    gather(pair.remote, lambda seen: len(of(Message, seen)) >= sent - got)

    for _ in range(1024):
        # The last report of what was taken may still be on its way. Nobody takes any now, so smaller room stays full.
        eventually(lambda: accepted(lambda: pair.peer.send(b"x"), Busy))


def test_transfers_do_not_wait_for_a_worker_of_messages(pair: Pair) -> None:
    """More pulls with messages than workers, and a plain message between them."""
    mine, _ = pair.caches(blocks=64, shape=(4096,))
    pulls = []
    for block in range(64):
        pulls.append(pair.local.pull(mine[[block]], pair.peer["kv"][[block]], notify=b"call"))
        pair.peer.send(b"plain")
    for pull in pulls:
        pull.result(LIMIT)
    assert sorted(messages(pair.remote, 128)) == [b"call"] * 64 + [b"plain"] * 64


def test_messages_of_a_link_that_broke_are_still_there(start: Open, remote: Remote) -> None:
    local = start(listen="127.0.0.1:0")
    allocate(local)
    remote.do(f"peer = engine.link({local.address!r}).result(LIMIT)")
    remote.do("for number in range(19): peer.send(bytes([number]))")
    # It comes behind the others, so they have all arrived when the pull has ended.
    remote.do("engine.pull(kv[[0]], peer['kv'][[0]], notify=bytes([19])).result(LIMIT)")
    remote.kill()
    eventually(lambda: local.peers == [])
    assert messages(local, 20) == [bytes([number]) for number in range(20)]


def silent_addresses(held: ExitStack, count: int) -> list[str]:
    """Addresses that take connections and never answer."""
    doors = [held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128)) for _ in range(count)]
    return [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]


def test_silent_addresses_do_not_hold_up_others(start: Open, held: ExitStack) -> None:
    local, remote = start(), start(listen="127.0.0.1:0")
    calls = [local.link(at, timeout=600.0) for at in silent_addresses(held, 48)]
    # The calls to silent addresses keep their threads for much longer.
    local.link(address(remote)).result(LIMIT)
    assert not any(call.done() for call in calls)
    assert all(call.cancel() for call in calls)
    for call in calls:
        fails(Cancelled, lambda call=call: call)  # type: ignore[misc]


def test_time_of_a_link_counts_from_the_call(start: Open, held: ExitStack) -> None:
    """More calls than there are workers: those that wait for one end in time as well."""
    local, (silent,) = start(), silent_addresses(held, 1)
    for call in [local.link(silent, timeout=0.4) for _ in range(80)]:
        error = fails(Timeout, lambda call=call: call)  # type: ignore[misc]
        assert error.facts["address"] == silent
