"""Attacks by peers that are admitted, or in a handshake: honest peers are not affected, and the costs stay bounded.

Each test runs one attack with `hostile`, a client of the wire protocol that shares no code with the engine. During the
attack, honest peers pull from the victim. `Trial.judge` checks their pulls and links, and that the victim stayed within
the limits of `hostile/budgets.py`. LLM_DATADIST_SOAK makes the attacks larger.
Not for: who is admitted (`test_link_security.py`, `test_second_user.py`), attacks with requests
(`test_hostile_requests.py`) and with plans (`test_hostile_plans.py`).
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hostile import budgets
from hostile import messages as m
from hostile.client import GENERATIONS, ask, dial_local, dial_tcp, frame, payload, take
from hostile.trial import GONE, PREY, PREY_BYTES, PREY_ROWS, SILENCE, SLACK, VICTIM, Trial, usage
from peers import OK, SOAK, options, pattern

if TYPE_CHECKING:
    from hostile.client import Wire


def _descriptors() -> int:
    """Raise the limit of open files of this process: large attacks need more than the usual 1,024 descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    return min(hard, 20_000) - 200


MANY = min(1000 if SOAK else 300, _descriptors())


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_a_fair_peer_reads_and_writes(local: bool) -> None:
    """Without this, the attacks could fail for the wrong reason."""
    with Trial(honest=[]) as trial:
        link, call = trial.fair_call(local=local)
        assert ask(call, m.ping()) == {"is": "Done", "bytes": 0}
        cache = ask(call, m.describe(m.name_blocks(1)))
        assert (cache["tensors"], cache["rows"], cache["row_bytes"]) == (2, PREY_ROWS, PREY_BYTES)
        range_ = (m.name_blocks(1), cache["cache"], m.plan_spans([m.span(0, 0, PREY)], 2), 0, 2 * PREY)
        assert ask(call, m.read(*range_)) == {"is": "Ready", "bytes": 2 * PREY}
        right = b"".join(tensor.tobytes() for tensor in pattern(5, 2, PREY_ROWS, PREY_BYTES))
        assert take(call, 2 * PREY) == right
        assert ask(call, m.write(*range_)) == {"is": "Ready", "bytes": 2 * PREY}
        call.send(payload(right[::-1]))
        assert m.read_reply(call.hear()) == {"is": "Done", "bytes": 2 * PREY}
        assert b"".join(tensor.tobytes() for tensor in trial.victim.read("prey")) == right[::-1]
        assert ask(call, m.unlink()) == {"is": "Done", "bytes": 0}
        assert link.control.ended()


def test_the_documentation_quotes_the_budgets() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "security.md").read_text(encoding="utf-8")
    assert budgets.table() in text, "run `python -m hostile.budgets` in the folder of the tests"


def test_descriptors_with_other_frames_are_closed() -> None:
    """Descriptors that come with a greeting, a ping or a request do not stay open at the victim."""
    with Trial(honest=["auto"]) as trial:
        link = trial.link(100, local=True)
        call = link.call()
        extra = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
        trial.begin()
        for number in range(40):
            some = extra[: 4 if number < 20 else 200]  # more descriptors than a frame may have end the stream
            with suppress(*GONE):
                link.control.say(m.PING, some)
            with suppress(*GONE):
                call.say(m.ping(), some)
                m.read_reply(call.hear())
            with suppress(*GONE):
                stranger = dial_local(trial.local_name)
                trial.held.callback(stranger.close)
                stranger.say(b"x", some)
        for descriptor in extra:
            os.close(descriptor)
        trial.judge(links=2, mapped=GENERATIONS)


GREETING = ("connect", "half header", "header", "half hello", "hello", "half proof")
AFTER = ("welcome", "half attach", "attach", "attached", "half confirm", "confirm")


@pytest.mark.parametrize("steps", [GREETING, AFTER], ids=["greeting", "after"])
@pytest.mark.parametrize("open_files", [64, None])
def test_floods_of_stalled_connections_keep_nobody_out(steps: tuple[str, ...], open_files: int | None) -> None:
    """The connections stop at every step of the handshake. The application can still open files."""
    with Trial(open_files=open_files, honest=["tcp"]) as trial:
        trial.begin()
        began = time.monotonic()
        count = min(MANY, 4 * (open_files or MANY))
        for number in range(count):
            trial.try_link(100 + number, local=steps == AFTER or number % 2 == 1, stop=steps[number % len(steps)])
            if number % 50 == 49:
                assert trial.victim.open_files(16) == "", f"after {number + 1} connections"
        took = time.monotonic() - began
        assert took < 120, f"{count} connections took {took:.1f} s"
        trial.join(40, "tcp")
        if open_files is None:
            trial.join(41, "auto")
        assert trial.victim.open_files(16) == ""
        # A peer that has sent the last message of the handshake has a link, even if it has not read the last answer.
        made = count // len(AFTER) if steps == AFTER else 0
        trial.judge(links=made + 4, mapped=(budgets.pending(open_files) + made + 2) * GENERATIONS)


@pytest.mark.parametrize("open_files", [64, 128])
def test_idle_strangers_keep_no_peer_out_of_small_process(open_files: int) -> None:
    """200 strangers connect and say nothing. An honest peer that comes behind them gets its link in one attempt."""
    with Trial(open_files=open_files, honest=["tcp"]) as trial:
        honest = trial.ends.peer(options(**{**trial.common, "llm__LinkTransport": "tcp"}), 40)
        for _ in range(200):
            trial.dial()
        assert honest.link_clusters([trial.victim.at], 5000)[1] == [OK]


def test_connections_that_stall_are_ended() -> None:
    """A connection that stalls is closed, at the latest after the handshake limit (5 s)."""
    with Trial(honest=["tcp"]) as trial:
        trial.begin()
        stalled: list[tuple[str, Wire]] = []
        for local, steps in ((False, GREETING), (True, GREETING + AFTER)):
            for step in steps:
                link = trial.link(100 + len(stalled), local=local, stop=step)
                stalled.append((f"{'local' if local else 'tcp'} {step}", link.control))
        until = time.monotonic() + 5 + SLACK
        left = [what for what, wire in stalled if not wire.ended(max(0.1, until - time.monotonic()))]
        trial.held.close()
        # After `confirm`, the link exists for the engine; only the peer has not read the last message.
        assert left in ([], ["local confirm"]), left
        trial.judge(links=1, mapped=2 * GENERATIONS)
        trial.recovers()


@pytest.mark.parametrize("limit", [64, 1024])
def test_links_leave_descriptors_to_the_application(limit: int) -> None:
    """A peer makes as many links, call streams and stalled connections as it can. The application can open files.

    The first link opens up to 200 call streams. Each further link, half of them over the local socket, opens two.
    """
    with Trial(open_files=limit, honest=["tcp"]) as trial:
        trial.begin()
        made = streams = failed = 0
        for number in range(min(MANY, limit)):
            if failed > 3:
                break  # the engine accepts nothing any more
            failed += 1
            with suppress(*GONE):
                peer = trial.attacker(100 + number)
                peer.step_limit = 1.0
                link = peer.link_local(trial.local_name) if number % 2 else peer.link_tcp(trial.victim.address)
                trial.held.callback(link.close)
                trial.tender.add(link)
                made += 1
                for _ in range(2 if number else 200):
                    link.call()
                    streams += 1
                failed = 0
        for _ in range(budgets.pending(limit) + 10):
            trial.try_link(99, stop="half hello")
        time.sleep(0.3)
        engine = usage(trial.victim.process.pid)["descriptors"]
        text = f"after {made} links and {streams} streams the process has {engine} of {limit} descriptors"
        assert trial.victim.open_files(8) == "", text
        trial.judge(links=made, streams=streams, mapped=made * GENERATIONS)


@pytest.mark.parametrize(("local", "count"), [(True, 250), (False, 20)])
def test_peers_that_do_not_read_their_control_stream_are_dropped(local: bool, count: int) -> None:
    """The peers send pings and never read the answers, until the socket buffers are full."""
    with Trial() as trial:
        window = {} if local else {"window": 1}
        left = [trial.link(100 + number, local=local, **window) for number in range(count)]
        trial.begin()
        ping = frame(m.PING)
        storm = ping * 2000
        until = time.monotonic() + 2 * SILENCE
        while left and time.monotonic() < until:
            for link in list(left):
                link.control.socket.settimeout(0)
                try:
                    # Whole pings only, because a partial message would be closed for another reason.
                    link.control.socket.send(storm[: len(ping) * random.randint(1, 2000)])  # noqa: S311
                except BlockingIOError:
                    pass
                except OSError:
                    left.remove(link)
            time.sleep(0.01)
        trial.judge(links=count, mapped=count * GENERATIONS)
        assert not left, f"{len(left)} of {count} links are still there"


@pytest.mark.parametrize("greets", [True, False])
def test_a_storm_of_requests_for_streams_is_bounded(greets: bool) -> None:
    """`Dial` asks the side that dialled the link to dial one more call stream."""
    with Trial() as trial:
        stall = threading.Event()
        listener, link = trial.listen(lambda wire: stall.wait(20) and wire.close())
        if not greets:
            listener.deaf = stall
        trial.begin()
        with suppress(OSError):
            link.control.send(frame(m.DIAL) * 20_000)
        time.sleep(2)
        trial.stop_pulls()
        stall.set()
        trial.judge(links=1, streams=budgets.value("link_streams"), busy=1)


def test_announcements_and_meetings_leave_nothing() -> None:
    """Streams that end after the greeting: for communicators that nobody entered, and for the secret."""
    with Trial() as trial:
        trial.begin()
        for number in range(MANY):
            local, meets = number % 2 == 1, number % 4 < 2
            announce = m.purpose_announce(m.comm("x" * 3000, [(100 + number, 0), (VICTIM, 1)], "nowhere"))
            told = {"secret": None}
            with suppress(*GONE):
                wire = dial_local(trial.local_name) if local else dial_tcp(trial.victim.address)
                trial.held.callback(wire.close)
                told = trial.attacker(100 + number).greet(wire, m.purpose_meet() if meets else announce)
            assert told["secret"] is None or (local and meets), "the secret leaves by the local socket only"
        trial.held.close()
        trial.judge(mapped=2 * GENERATIONS)
        trial.recovers()
