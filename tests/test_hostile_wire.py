"""The hostile client itself: its encoding, and that a fair use of it is answered as the protocol says.

Not for: attacks (`test_hostile_peers.py`).
"""

from __future__ import annotations

import pytest

from hostile import budgets
from hostile import messages as m
from hostile.client import GENERATIONS, VERSION, EndedError, Peer, Tender, ask, dial_tcp, frame, payload, take
from hostile.postcard import Reader, sint, uint
from hostile.trial import PREY_BYTES, PREY_ROWS, TOKEN, Trial
from peers import pattern


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**32 - 1, "ffffffff0f"), (2**64 - 1, "ff" * 9 + "01")],
)
def test_unsigned_numbers(number: int, encoded: str) -> None:
    """The examples of the postcard specification, among others."""
    assert uint(number).hex() == encoded
    assert Reader(uint(number)).uint() == number


@pytest.mark.parametrize(
    ("number", "encoded"), [(0, "00"), (-1, "01"), (1, "02"), (-64, "7f"), (64, "8001"), (-(2**63), "ff" * 9 + "01")]
)
def test_signed_numbers(number: int, encoded: str) -> None:
    assert sint(number).hex() == encoded
    assert Reader(sint(number)).sint() == number


def test_frames() -> None:
    assert frame(b"body") == b"LD" + bytes([VERSION, 1, 4, 0, 0, 0]) + b"body"


def test_zeros_stand_before_long_payloads() -> None:
    """None before few bytes, one line before many, and one more at each 4 MiB of which many are left."""
    assert payload(b"x" * (48 << 10)) == b"x" * (48 << 10)
    assert payload(b"x" * ((48 << 10) + 1)) == bytes(64) + b"x" * ((48 << 10) + 1)
    assert len(payload(bytes((4 << 20) + 1))) == (4 << 20) + 1 + 64
    assert len(payload(bytes(8 << 20))) == (8 << 20) + 128


@pytest.mark.parametrize("way", ["tcp", "local"])
def test_a_fair_peer_reads_and_writes(way: str) -> None:
    """Otherwise the attacks would fail for the wrong reason."""
    with Trial(honest=[]) as trial, Tender() as tender:
        peer = trial.attacker()
        name = peer.local_name(trial.victim.address)
        link = peer.link_local(name) if way == "local" else peer.link_tcp(trial.victim.address)
        tender.add(link)
        call = link.call()
        assert ask(call, m.ping()) == {"is": "Done", "bytes": 0}
        cache = ask(call, m.describe(m.name_blocks(1)))
        assert (cache["tensors"], cache["rows"], cache["row_bytes"]) == (2, PREY_ROWS, PREY_BYTES)
        total = 2 * PREY_ROWS * PREY_BYTES
        plan = m.plan_spans([1], [m.span(0, 0, total // 2)], 2)
        assert ask(call, m.read(m.name_blocks(1), cache["cache"], plan, 0, total)) == {"is": "Ready", "bytes": total}
        right = b"".join(tensor.tobytes() for tensor in pattern(5, 2, PREY_ROWS, PREY_BYTES))
        assert take(call, total) == right
        assert ask(call, m.write(m.name_blocks(1), cache["cache"], plan, 0, total)) == {"is": "Ready", "bytes": total}
        call.send(payload(right[::-1]))
        assert m.read_reply(call.hear()) == {"is": "Done", "bytes": total}
        assert b"".join(tensor.tobytes() for tensor in trial.victim.read("prey")) == right[::-1]
        assert ask(call, m.unlink()) == {"is": "Done", "bytes": 0}
        assert link.control.ended()
        link.close()


def test_a_wrong_token_is_refused_with_a_reason() -> None:
    with Trial(honest=[]) as trial:
        stranger = Peer(66, TOKEN + "!")
        with pytest.raises(EndedError, match="token"):
            stranger.link_tcp(trial.victim.address)
        wire = dial_tcp(trial.victim.address)
        wire.send(frame(b"x", version=99))
        with pytest.raises(EndedError, match="version"):
            wire.hear()
        wire.close()


def test_budgets_follow_the_limit_of_open_files() -> None:
    assert [budgets.pending(limit) for limit in (16, 64, 1024, 1 << 20)] == [4, 4, 64, 256]
    assert [budgets.incoming(limit) for limit in (16, 64, 1024, 1 << 20)] == [4, 4, 244, 4096]
    assert [budgets.streams(limit) for limit in (16, 64, 1024, 1 << 20)] == [8, 8, 128, 8192]
    assert budgets.mapped() > GENERATIONS
