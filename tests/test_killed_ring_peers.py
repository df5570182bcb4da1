"""Peers that are killed while a message or payload is in a ring: half of it is written, or the engine waits for room.

Not for: peers that break the protocol of rings (`test_hostile_rings.py`), processes that die at other points
(`test_peer_faults.py`).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hostile.client import GENERATIONS
from hostile.messages import ping
from hostile.mortal import CALLERS, OWNERS, WIDE_BYTES, WIDE_ROWS
from hostile.trial import ROW_BYTES, ROWS, TOKEN, Trial
from native.stores import line, process
from peers import LIMIT, OK, UNLINKED, by_blocks, equal, eventually, pattern

if TYPE_CHECKING:
    import subprocess
    from contextlib import AbstractContextManager

TESTS = Path(__file__).parent
MAX_RINGS = 4  # call streams of a link, in one direction
# So long that no limit ends a wait before the end of the stream does.
PATIENT = {"llm__LinkSilence": 600_000, "llm__SyncKvCacheWaitTime": 600_000}


def mortal(role: str, **given: Any) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that plays one role until the test kills it."""
    return process(sys.executable, "-m", "hostile.mortal", role, json.dumps(given), cwd=TESTS)


def next_link_works(trial: Trial) -> None:
    """Another engine links to the victim, and each of them pulls from the other over rings."""
    other = trial.join(40, "auto")
    assert other.links()[0]["transport"] == "shm"
    other.allocate("theirs", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(40)], seed=7)
    trial.victim.allocate("own", ROWS, ROW_BYTES, 2, blocks=True)
    trial.victim.pull_blocks(by_blocks(40), "own", range(ROWS), range(ROWS))
    assert equal(trial.victim.read("own"), pattern(7, 2, ROWS, ROW_BYTES))
    assert other.links()[0]["call_rings"] == 2, "not every call uses rings"


@pytest.mark.parametrize("role", CALLERS)
def test_killed_caller_ends_its_streams_only(role: str) -> None:
    """The process that is killed has a call stream of a link. Another process holds the link, and has a stream too."""
    with Trial(**PATIENT) as trial:
        trial.begin()
        link = trial.link(local=True)
        trial.tender.add(link)
        good = link.ringed_call()

        def only_the_good_stream() -> bool:
            return [one["call_rings"] for one in trial.victim.links() if one["cluster"] == 66] == [1]

        # The victim answers before it counts the stream.
        eventually(only_the_good_stream, what="the stream of the first process")
        given = {"cluster": 66, "token": TOKEN, "instance": link.peer.instance, "link": link.number}
        for _ in range(MAX_RINGS):  # the last one gets rings only if those of the first were released
            with mortal(role, name=trial.local_name, **given) as caller:
                assert line(caller) == "ready\n"
            eventually(only_the_good_stream, what="the end of the stream of the process that was killed")
            assert good.ask(ping())["is"] == "Done"
        assert not trial.tender.ended, "the link has ended"
        trial.judge(links=1, streams=2, busy=1, mapped=GENERATIONS)
        link.close()
        trial.recovers()
        next_link_works(trial)


@pytest.mark.parametrize("role", OWNERS)
def test_call_to_killed_owner_fails(role: str) -> None:
    with Trial(**PATIENT) as trial:
        trial.victim.allocate("wide", WIDE_ROWS, WIDE_BYTES, 2, blocks=True, seed=3)
        trial.begin()
        rows = list(range(WIDE_ROWS))
        random.Random(5).shuffle(rows)  # noqa: S311
        if role != "unread request":
            rows = rows[:1]
        for _ in range(2):
            with mortal(role, cluster=77, token=TOKEN) as owner:
                assert trial.victim.link_clusters([(77, line(owner).strip())])[0] == OK
                pull = trial.victim.begin("timed", "pull_blocks", by_blocks(77), "wide", rows, range(len(rows)))
                assert line(owner) == "ready\n"
                owner.kill()
                code, _, text = pull.result(LIMIT)
            assert code == UNLINKED, text
            assert "cluster=77" in text or "cluster 77" in text, text
            assert "clos" in text or "broke" in text, text
            eventually(lambda: 77 not in {link["cluster"] for link in trial.victim.links()}, what="the end of the link")
        # Bytes of a pull that failed may be in the row that it names.
        changed = 1 if role == "half payload" else 0
        rest = [tensor[changed:] for tensor in trial.victim.read("wide")]
        assert equal(rest, [tensor[changed:] for tensor in pattern(3, 2, WIDE_ROWS, WIDE_BYTES)])
        trial.judge(links=1, streams=1, busy=1, mapped=GENERATIONS)
        trial.recovers()
        next_link_works(trial)
