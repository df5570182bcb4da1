"""Notifications of the module `hixl`."""

from __future__ import annotations

from typing import Any

import pytest

import hixl
from hixl_ends import LIMIT, Child, End, connected, ends, listener, paired, pattern

pytestmark = [
    pytest.mark.usefixtures("hixl_way"),
    pytest.mark.parametrize("hixl_way", ["rings", "tcp"], indirect=True),
]


def target_of(target: Any, *senders: Any) -> str:
    address = listener()
    assert target.initialize(address) == hixl.SUCCESS
    for sender in senders:
        assert sender.initialize("127.0.0.1:0") == hixl.SUCCESS
        assert sender.call("connect", address, LIMIT) == hixl.SUCCESS
    return address


def test_each_notification_arrives_once_and_in_order() -> None:
    with ends(End, End, Child) as (target, a, b):
        address = target_of(target, a, b)
        assert target.notifies() == (hixl.SUCCESS, [])
        for k in range(100):
            assert a.notify(address, "a", str(k)) == hixl.SUCCESS
            if k % 2:
                assert b.notify(address, "b", str(k)) == hixl.SUCCESS
        status, notifies = target.notifies()
        assert status == hixl.SUCCESS
        assert [text for name, text in notifies if name == "a"] == [str(k) for k in range(100)]
        assert [text for name, text in notifies if name == "b"] == [str(k) for k in range(1, 100, 2)]
        assert len(notifies) == 150
        assert target.notifies() == (hixl.SUCCESS, [])


@pytest.mark.parametrize(
    ("text", "status"),
    [(text, hixl.SUCCESS) for text in ("", "x" * 1024, "𝄞" * 256, "a\0b", "ä")]
    + [(text, hixl.PARAM_INVALID) for text in ("x" * 1025, "𝄞" * 256 + "x", "\ud800")],
)
def test_texts_within_limits_arrive_and_others_are_refused(text: str, status: int) -> None:
    with connected(End, End) as pair:
        assert pair.local.notify(pair.address, text, "m") == pair.local.notify(pair.address, "n", text) == status
        assert pair.remote.notifies() == (hixl.SUCCESS, [(text, "m"), ("n", text)] if status == hixl.SUCCESS else [])


def test_without_connection() -> None:
    with ends(End, End) as (sender, target):
        address = paired(sender, target).address
        assert sender.notify(address, "n", "m") == hixl.NOT_CONNECTED
        assert sender.notify("nonsense", "n", "m") == hixl.NOT_CONNECTED


def test_4096_are_kept_for_each_link() -> None:
    with ends(Child, End, End) as (target, a, b):
        address = target_of(target, a, b)
        for k in range(4096):
            assert a.notify(address, "a", str(k)) == hixl.SUCCESS
        assert a.notify(address, "a", "too many") == hixl.RESOURCE_EXHAUSTED
        assert b.notify(address, "b", "other link") == hixl.SUCCESS
        expected = [("a", str(k)) for k in range(4096)] + [("b", "other link")]
        assert target.notifies() == (hixl.SUCCESS, expected)
        assert a.notify(address, "a", "again") == hixl.SUCCESS
        # They are kept after the link and the sender have ended.
        a.finalize()
        assert target.notifies() == (hixl.SUCCESS, [("a", "again")])


def test_notification_after_a_write_comes_after_its_bytes() -> None:
    with connected(End, Child, size=1 << 20) as pair:
        for k in range(20):
            pair.local.write("m", 0, pattern(k, 1 << 20))
            assert pair.move(1) == hixl.SUCCESS
            assert pair.local.notify(pair.address, "written", str(k)) == hixl.SUCCESS
            assert pair.remote.notifies() == (hixl.SUCCESS, [("written", str(k))])
            assert pair.remote.bytes("m") == pattern(k, 1 << 20)


def test_limit_of_one_millisecond() -> None:
    """Each call succeeds, or it times out and the notification is not delivered."""
    with connected(End, Child) as pair:
        codes = [(k, pair.local.notify(pair.address, "n", str(k), 1)) for k in range(300)]
        assert {code for _, code in codes} <= {hixl.SUCCESS, hixl.TIMEOUT}
        assert pair.local.notify(pair.address, "n", "end") == hixl.SUCCESS
        arrived = [("n", str(k)) for k, code in codes if code == hixl.SUCCESS] + [("n", "end")]
        assert pair.remote.notifies() == (hixl.SUCCESS, arrived)
