"""Errors, reasons and log lines of native engines use native words, and say which engine and peer they mean.

Not for: what each error is about (the tests of the calls).
"""

from __future__ import annotations

import copy
import errno
import logging
import pickle
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.native import (
    Busy,
    Cancelled,
    Closed,
    Error,
    GrantEnded,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    PeerDown,
    PeerLost,
    PeerUp,
    Timeout,
)
from peers import eventually

from .helpers import BLOCKS, LIMIT, ROW, TENSORS, address, allocate, fails, layout, next_of, refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from llm_datadist.native import Engine

    from .conftest import Open, Pair
    from .helpers import Remote

# Words of the original's API.
FOREIGN = ["cluster", "llm.", "LLM", "finaliz", "polled", "notification", "sync_kv", "link_", "src_blocks", "req_id"]
SILENT: dict[str, Any] = {"heartbeat": 0.1, "silence": 1.5}


def check_words(*texts: str | None) -> None:
    """No text may have a word of the original's API."""
    for text in texts:
        assert text is not None
        found = [word for word in FOREIGN if word in text]
        assert not found, (found, text)


def native(kind: type[Error], call: Callable[[], Any], code: str, *texts: str) -> Error:
    """A call must fail with this kind and code, with the texts, and in native words. Return the error."""
    error = fails(kind, call)
    assert error.code == code, repr(error)
    check_words(str(error), error.reason, error.argument or "", *error.facts, *error.facts.values())
    for text in texts:
        assert text in str(error), str(error)
    return error


def test_errors_of_arguments_and_own_caches(start: Open) -> None:
    engine = start(max_transfers=2)
    kv = allocate(engine)
    native(InvalidArgument, lambda: allocate(engine), "name_taken", "kv")
    native(InvalidArgument, lambda: engine.copy(kv[[1]], kv[[99]]), "invalid_argument", "99", "position=0")
    more = allocate(engine, "more", tensors=3)
    native(InvalidArgument, lambda: engine.copy(kv[[1]], more[[1]]), "invalid_argument", "tensors 3 and 4")
    native(InvalidArgument, lambda: engine.lend(kv[[99]], ttl=1.0), "invalid_argument", "rows")
    error = native(OutOfMemory, lambda: allocate(engine, "big", blocks=1 << 20), "out_of_memory")
    assert {str((1 << 20) * TENSORS * ROW), str(2 << 20)} & set(error.facts.values()), error.facts
    allocate(engine, "big")  # the name is free
    grant = engine.lend(kv[[1]], ttl=LIMIT)
    grant.revoke().result(LIMIT)
    native(GrantEnded, lambda: grant.renew(1.0), "grant_ended")
    started = [engine.copy(kv[[1]], kv[[2]]) for _ in range(2)]
    native(Busy, lambda: engine.copy(kv[[1]], kv[[2]]), "busy", "2")
    started[0].result(LIMIT)
    engine.copy(kv[[1]], kv[[2]]).result(LIMIT)
    kv.free().result(LIMIT)
    native(NotFound, lambda: kv.tensors, "not_found")
    engine.close()
    native(Closed, lambda: allocate(engine), "closed", "the engine was closed; open another one")


def test_error_about_swapped_rows_states_their_order(pair: Pair) -> None:
    mine, _ = pair.caches()
    theirs = pair.peer["kv"]
    calls = [lambda: pair.local.pull(theirs[0], mine[0]), lambda: pair.local.push(mine[0], theirs[0])]
    for name, call in zip(("dst", "src"), calls):
        required = "rows of a cache of this engine; dst comes before src"
        assert str(refused(name, call)) == f"{name}=<Rows of 'kv' of a peer: blocks [0]> must be {required}"


@pytest.mark.parametrize("given", ["no", 1, None])
def test_error_about_a_flag_names_the_argument(pair: Pair, given: Any) -> None:
    local, remote = pair.caches()[0], pair.peer["kv"]
    calls: dict[str, Callable[[], Any]] = {
        "last": lambda: pair.local.pull(local[0], remote[0], last=given),
        "layerwise": lambda: pair.local.push(remote[0], local[0], layerwise=given),
        "contiguous": lambda: allocate(pair.local, "other", contiguous=given),
        "shared": lambda: pair.local.register("other", [bytearray(64)], shared=given),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name} must be a bool, not '{type(given).__name__}'$"):
            call()


def test_flag_may_be_a_bool_of_numpy(pair: Pair) -> None:
    local, remote = pair.caches()[0], pair.peer["kv"]
    pair.local.pull(local[0], remote[0], last=np.bool_(True)).result(LIMIT)
    buffer = allocate(pair.local, "other", contiguous=np.bool_(True)).buffer
    assert memoryview(buffer).nbytes >= BLOCKS * TENSORS * ROW


def test_error_about_tokens_names_the_given_side(pair: Pair) -> None:
    mine, _ = (engine.allocate("laid out", layout(), blocks=4) for engine in (pair.local, pair.remote))
    theirs = pair.peer["laid out"]
    for dst, src, name in (
        (mine[[0]].part(tokens=range(10)), theirs[[0]], "dst"),
        (mine[[0]], theirs[[0]].part(tokens=range(10)), "src"),
    ):
        error = fails(InvalidArgument, lambda dst=dst, src=src: pair.local.pull(dst, src), name)  # type: ignore[misc]
        assert str(error).startswith(f"{name}: tokens 0..10 must be a range inside 0..4: 1 blocks of 4 tokens")


def test_error_about_a_layout_names_the_argument(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"^layout must be a KvLayout, not 'dict'$"):
        engine.allocate("kv", {}, blocks=1)  # type: ignore[call-overload]


def test_errors_of_opening(start: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = "{}:{}".format(*taken.getsockname())
        error = native(Error, lambda: start(listen=at), "failed", at)
        assert error.errno == errno.EADDRINUSE
    native(Error, lambda: start(backend="ucx"), "not_enabled", "option=token")
    native(Error, lambda: start(backend="ucx", token="b" * 16), "not_enabled", "option=ucx_library")
    native(InvalidArgument, lambda: start(silence=-1.0), "invalid_argument", "silence")


def test_errno_is_that_of_the_cause(start: Open) -> None:
    """Also of a class that derives from OSError, and in a copy."""
    refused = native(Timeout, lambda: start().link("127.0.0.1:1", timeout=0.2), "timeout", "127.0.0.1:1")
    assert isinstance(refused, TimeoutError)
    assert (refused.errno, refused.facts.get("errno")) == (errno.ECONNREFUSED, None)
    for again in (pickle.loads(pickle.dumps(refused)), copy.copy(refused)):  # noqa: S301  (our own bytes)
        assert (type(again), again.errno, str(again)) == (Timeout, errno.ECONNREFUSED, str(refused))
    assert native(OutOfMemory, lambda: allocate(start(), blocks=1 << 20), "out_of_memory").errno is None


def test_errors_of_calls_to_a_peer(pair: Pair) -> None:
    local, peer = pair.local, pair.peer
    mine, theirs = pair.caches()
    error = native(NotFound, lambda: local.pull(mine[[1]], peer["no"][[1]]), "not_found", "peer_name=remote")
    assert error.facts["incarnation"] == str(peer.incarnation)
    native(InvalidArgument, lambda: local.pull(mine[[1]], peer["kv"][[99]]), "invalid_argument", "99")
    for name, given, text in (("more", {"tensors": 3}, "3 tensors"), ("narrow", {"shape": (ROW - 1,)}, str(ROW - 1))):
        allocate(pair.remote, name, **given)
        rows = peer[name][[1]]
        native(InvalidArgument, lambda rows=rows: local.pull(mine[[1]], rows), "invalid_argument", text)  # type: ignore[misc]
        native(InvalidArgument, lambda rows=rows: local.push(rows, mine[[1]]), "invalid_argument", text)  # type: ignore[misc]
    pull = lambda: local.pull(mine[[1]], peer["kv"][[1]])  # noqa: E731
    native(InvalidArgument, lambda: peer.send(b"x" * (1 << 17)), "invalid_argument", "message")
    native(
        InvalidArgument,
        lambda: local.pull(mine[[1]], peer["kv"][[1]], notify=b"x" * (1 << 17)),
        "invalid_argument",
        "notify",
    )
    native(InvalidArgument, lambda: local.pull(mine[[1]], peer["kv"][[1]], grant=b"x"), "invalid_argument", "grant")
    token = pair.remote.lend(theirs[[1]], ttl=LIMIT)
    token.revoke().result(LIMIT)
    native(GrantEnded, lambda: local.pull(mine[[1]], peer["kv"][[1]], grant=token.token), "grant_ended", "remote")
    for _ in range(1024):
        peer.send(b"")
    native(Busy, lambda: peer.send(b""), "busy", "peer_name=remote", "limit=1024")
    pair.remote.events()
    peer.close().result(LIMIT)
    check_words(next_of(local, PeerDown).reason, next_of(pair.remote, PeerDown).reason)
    native(PeerLost, pull, "not_linked", "there is no link to remote; link again", "peer_name=remote")
    native(PeerLost, lambda: peer.send(b""), "not_linked", "there is no link to remote")


def test_errors_of_linking(start: Open) -> None:
    one = start(listen="127.0.0.1:0", token="a" * 16)
    other = start(token="b" * 16)
    of_one = address(one)
    error = native(PeerLost, lambda: other.link(of_one), "link_failed", "option=token", of_one)
    assert isinstance(error, ConnectionError)
    assert "bbbb" not in str(error), "the token is not shown"
    native(PeerLost, lambda: start().link(of_one), "link_failed", "option=token", of_one)
    native(InvalidArgument, lambda: one.link(of_one), "invalid_argument", "address")
    native(PeerLost, lambda: start(token="a" * 16).link(of_one, name="x"), "link_failed", "x")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = "{}:{}".format(*silent.getsockname())
        native(Timeout, lambda: other.link(at, timeout=0.3), "timeout", at)


def test_errors_of_peers_that_end(start: Open, begin_remote: Callable[..., Remote]) -> None:
    local = start(name="local", **SILENT)
    mine = allocate(local)

    def linked() -> tuple[Remote, Callable[..., Any]]:
        remote = begin_remote(name="remote", **SILENT)
        remote.do("kv = allocate(engine)")
        peer = local.link(remote.address).result(LIMIT)
        next_of(local, PeerUp)
        return remote, lambda **given: local.pull(mine[[1]], peer["kv"][[1]], **given)

    remote, pull = linked()
    with remote.stopped():
        native(Timeout, lambda: pull(timeout=0.3), "timeout", "timeout passed", "peer_name=remote")
        waiting = pull()
        assert waiting.cancel()
        native(Cancelled, lambda: waiting, "cancelled")
        down = next_of(local, PeerDown)
        check_words(down.reason)
        assert "option=silence" in down.reason
        native(PeerLost, pull, "not_linked", "the link to remote broke", "option=silence", remote.address)
    remote, pull = linked()
    remote.kill()
    check_words(next_of(local, PeerDown).reason)
    native(PeerLost, pull, "not_linked", "the link to remote broke")
    remote, pull = linked()
    remote.do("engine.close()")
    assert next_of(local, PeerDown).reason == "the peer was closed"
    native(PeerLost, pull, "not_linked", "the peer was closed")


def test_log_lines_name_the_engine(start: Open, held: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("LLM_DATADIST")
    level = logger.level
    held.callback(logger.setLevel, level)
    logger.setLevel(logging.INFO)
    held.callback(logger.removeHandler, caplog.handler)
    logger.addHandler(caplog.handler)
    local = start(name="local", **SILENT)
    remote = start(name="remote", listen="127.0.0.1:0", **SILENT)
    local.link(address(remote)).result(LIMIT)
    host, port = address(remote).split(":")
    stranger = socket.create_connection((host, int(port)))
    stranger.sendall(b"x" * 64)
    eventually(lambda: any("refused a connection" in text for text in caplog.messages))
    stranger.close()
    remote.close()
    eventually(lambda: any("broke" in text for text in caplog.messages))

    def line(*words: str) -> str:
        return next(text for text in caplog.messages if all(word in text for word in words))

    assert line("[local]", "linked with remote at")
    assert line("[remote]", "linked with local at")
    assert line("[remote]", "refused a connection")
    assert line("[local]", "the link to remote broke: the peer was closed")
    assert all(text.startswith(("[local] ", "[remote] ")) for text in caplog.messages), caplog.messages
    check_words(*caplog.messages)
