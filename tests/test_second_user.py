"""Other users of the host: without a token they are refused, and both sides log the reason (docs/security.md).

The tests need root, because a child process becomes another user. Without root, they are skipped. Not for: tokens
between processes of one user (`test_link_security.py`), or costs of admitted peers (`test_hostile_peers.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hostile import other_user
from peers import (
    LINK_FAILED,
    OK,
    Ends,
    Peer,
    by_blocks,
    equal,
    eventually,
    free_ports,
    linked,
    options,
    pattern,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user"),
]

NOBODY, SOMEBODY = 65534, 12345  # the user that stands for all unmapped ones, and an ordinary user
TOKEN = "a token that both users know"  # noqa: S105
SETTINGS = ("token", "accept.?remote")  # options that would admit the peer, in any spelling


def as_user(ends: Ends, user: int, cluster: int = 3, **given: Any) -> Peer:
    """An engine of another user."""
    made = ends.adopt(Peer())
    made.spoiled = True
    made.become(user)
    return made.open(options(**given), cluster)


@contextmanager
def running(user: int, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command of `other_user`. The process ends at the end of its input."""
    arguments = [sys.executable, other_user.__file__, str(user), *command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:  # noqa: S603
        try:
            yield made
        finally:
            if made.poll() is None:
                made.kill()


def heard(process: subprocess.Popen[str]) -> Any:
    """Return the next line of `other_user`."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait(10)}"
    return json.loads(line)


def uses(local: Any, remote: Peer, seed: int = 1) -> None:
    """Check that bytes are transferred over a link."""
    remote.allocate("f", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=seed)
    local.allocate("n", 4, 5000, 2, blocks=True)
    local.pull_blocks(by_blocks(remote.cluster), "n", range(4), range(4))
    assert equal(local.read("n"), pattern(seed, 2, 4, 5000))


def local_names(pid: int) -> list[str]:
    """The abstract names at which a process listens."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this very loop, among others
            found = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
            own.update(found.groups() if found else ())
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7][1:] for row in rows if len(row) > 7 and row[7].startswith("@") and row[6] in own]


def errors(peer: Peer, what: str) -> list[str]:
    """The ERROR lines of a process's log that contain `what`."""
    return [line for line in peer.said().splitlines() if "ERROR" in line and what in line]


# -- no token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("user", [NOBODY, SOMEBODY])
def test_another_user_is_refused_without_a_token(ends: Ends, user: int, transport: str) -> None:
    """The call fails with LLM_LINK_FAILED, and the log says why and what would admit the peer."""
    remote = ends.peer(options(llm__LinkTransport=transport))
    local = as_user(ends, user, llm__LinkTransport=transport)
    assert local.link_clusters([remote.at]) == (LINK_FAILED, [LINK_FAILED])
    assert local.links() == remote.links() == []
    told = eventually(lambda: errors(local, "token"), what=f"a reason in the log: {local.said()}")[-1]
    for setting in SETTINGS:
        assert re.search(setting, told, re.IGNORECASE), told
    assert str(user) in told, f"who was refused: {told}"


@pytest.mark.parametrize("dials", [True, False])
def test_rank_table_with_another_user_fails_at_once_and_both_log_why(ends: Ends, dials: bool) -> None:
    """The member that dials does not wait for its limit, and both sides log the setting that would admit the other."""
    given = {"llm__RankPort": free_ports(), "llm__LinkTotalTime": 600}
    device = [{"device_id": str(rank), "rank_id": str(rank)} for rank in (0, 1)]
    server = {"server_id": "127.0.0.1", "device": device}
    text = json.dumps({"version": "1.2", "server_count": "1", "status": "completed", "server_list": [server]})
    own, other = ends.peer(options(**given), 1), as_user(ends, SOMEBODY, 2, **given)
    ranks = {1: 0, 2: 1} if dials else {2: 0, 1: 1}
    listening, dialing = (own, other) if dials else (other, own)
    listening.link("users", ranks, text)
    assert dialing.final_state(dialing.link("users", ranks, text)) == "FAILED"
    for peer in (own, other):
        uid = f"_uid={SOMEBODY}"
        told = eventually(lambda peer=peer, uid=uid: errors(peer, uid), what=f"a reason in the log: {peer.said()}")
        assert all(re.search(setting, told[-1], re.IGNORECASE) for setting in SETTINGS), told
    assert own.links() == other.links() == []


def test_a_refused_user_does_not_keep_the_owner_out(ends: Ends) -> None:
    """Another user that links first, with the same cluster id, does not keep the real peer from linking."""
    remote = ends.peer()
    stranger = as_user(ends, NOBODY, 1)
    assert stranger.link_clusters([remote.at])[1] == [LINK_FAILED]
    local = ends.local()
    linked(local, remote)
    uses(local, remote)
    assert stranger.link_clusters([remote.at])[1] == [LINK_FAILED]
    assert len(local.links()) == len(remote.links()) == 1


@pytest.mark.parametrize("user", [NOBODY, SOMEBODY])
def test_greetings_of_another_user_are_refused(ends: Ends, user: int) -> None:
    """A client that shares no code with the engine is refused too, with the reason that the listener logs."""
    remote = ends.adopt(Peer()).open(options(accessible=True))
    remote.spoiled = True
    names = local_names(remote.pid())
    assert names, "the engine has a local socket"
    for way, at in [("tcp", remote.address), *(("local", name) for name in names)]:
        with running(user, "greet", way, at) as process:
            refused = heard(process).get("refused", "")
        for setting in SETTINGS:
            assert re.search(setting, refused, re.IGNORECASE), (way, refused)
        # Each API shows its own names of options, in parentheses after the text.
        text = refused.partition(" (")[0]
        eventually(lambda text=text: errors(remote, text), what=f"{text!r} in the log: {remote.said()}")  # type: ignore[misc]
        assert way == "tcp" or str(user) in refused, refused
    assert remote.links() == []


def test_the_roles_may_be_exchanged(ends: Ends) -> None:
    """The side that dials refuses a listener of another user as well."""
    remote = as_user(ends, SOMEBODY, 3)
    local = ends.local()
    assert local.link_clusters([remote.at])[1] == [LINK_FAILED]
    assert local.links() == remote.links() == []


# -- what admits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(
    "admits", [{"llm__LinkToken": TOKEN}, {"llm__LinkAcceptRemote": 1}], ids=["token", "everybody"]
)
def test_another_user_is_admitted(ends: Ends, admits: dict[str, Any], transport: str) -> None:
    given = {**admits, "llm__LinkTransport": transport}
    remote, local = ends.peer(options(**given)), as_user(ends, NOBODY, **given)
    assert local.link_clusters([remote.at])[0] == OK
    uses(local, remote)
    assert remote.unlink_clusters([(3, None)], force=True)[0] == OK


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
@pytest.mark.parametrize("user", [0, NOBODY, SOMEBODY])
def test_processes_of_one_user_need_no_token(ends: Ends, user: int, transport: str) -> None:
    """Also over TCP, because they meet at the local socket first. NOBODY is a normal user if all users are mapped."""
    mapped = [int(number) for number in Path("/proc/self/uid_map").read_text().split()]
    if user == NOBODY and mapped != [0, 0, 2**32 - 1]:
        pytest.skip(f"user {NOBODY} stands for others here: /proc/self/uid_map has {mapped}")
    given = {"llm__LinkTransport": transport}
    remote, local = as_user(ends, user, 2, **given), as_user(ends, user, 3, **given)
    assert local.link_clusters([remote.at])[0] == OK
    uses(local, remote)
    (link,) = local.links()
    assert link["transport"] == ("tcp" if transport == "tcp" else "shm")


# -- others between ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", [0, SOMEBODY], ids=["forwarder of the same user", "forwarder of another user"])
def test_a_forwarder_on_the_loopback_admits_nobody(ends: Ends, user: int) -> None:
    """To the listener, a connection through the forwarder looks local."""
    remote = ends.peer(options(accessible=True))
    with running(user, "forward", remote.address) as process:
        at = heard(process)
        stranger = as_user(ends, NOBODY, accessible=True, llm__LinkTransport="tcp")
        assert stranger.link_clusters([(2, at)])[1] == [LINK_FAILED]
        with running(NOBODY, "greet", "tcp", at) as client:
            assert "token" in heard(client).get("refused", "")
        assert remote.links() == []
        local = ends.local(options(accessible=True))
        assert local.link_clusters([(2, at)])[0] == OK, "the same user meets at the local socket"
        uses(local, remote)
