"""What the adapters of inference servers for a keeper share.

Not for: the adapters (`test_vllm_store_tier.py`).
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import Keeper, Store
from llm_datadist.integrations.store_access import MAX_KEYS, KeeperLog, namespace, parts, started_thread
from peers import together

if TYPE_CHECKING:
    from pathlib import Path

FACTS: dict[str, Any] = {"dtype": "bfloat16", "layers": ["a", "b"], "ranks": 1, "rank_free": False}
KEY = bytes(28)
LIMIT = 30.0


def test_same_facts_have_the_same_namespace() -> None:
    text = namespace("vllm 0.32", "m", "r", FACTS)
    assert text == namespace("vllm 0.32", "m", "r", dict(reversed(FACTS.items())))
    assert text.startswith("vllm 0.32 m r ")


@pytest.mark.parametrize(
    ("server", "model", "revision", "facts"),
    [
        ("vllm 0.33", "m", "r", {}),
        ("vllm 0.32", "n", "r", {}),
        ("vllm 0.32", "m", "s", {}),
        ("vllm 0.32", "m", "r", {"dtype": "float16"}),
        ("vllm 0.32", "m", "r", {"layers": ["b", "a"]}),
        ("vllm 0.32", "m", "r", {"ranks": 0}),
        ("vllm 0.32", "m", "r", {"rank_free": True}),
        ("vllm 0.32", "m", "r", {"more": 1}),
        ("vllm 0.32", "m " * 200, "r", {}),
    ],
)
def test_other_facts_have_another_namespace(server: str, model: str, revision: str, facts: dict[str, Any]) -> None:
    assert namespace(server, model, revision, {**FACTS, **facts}) != namespace("vllm 0.32", "m", "r", FACTS)


def test_texts_that_only_differ_where_they_are_cut_have_other_namespaces() -> None:
    model = "m" * 5000
    assert namespace("s", model + "1", "r", {}) != namespace("s", model + "2", "r", {})


@pytest.mark.parametrize(
    ("model", "revision", "facts", "text"),
    [
        ("", "r", {}, "^model must be known"),
        ("m", "", {}, "^revision must be known"),
        ("m", "r", {"layout": None}, "^layout must be known"),
        ("m", "", {"layout": ""}, "^revision, layout must be known"),
    ],
)
def test_unknown_facts_are_refused(model: str, revision: str, facts: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        namespace("s", model, revision, facts)


def test_a_store_takes_every_namespace(tmp_path: Path) -> None:
    text = namespace("s", "\U0001f600'\n\"" * 100, "\0" * 5000, FACTS)
    assert text.isprintable()
    with Keeper(memory="1MiB", socket=tmp_path / "k"), Store(tmp_path / "k", namespace=text) as store:
        assert store.put([KEY], [bytes(65536)]) == [True]


@pytest.mark.parametrize("count", [0, 1, MAX_KEYS, MAX_KEYS + 1, 3 * MAX_KEYS - 1])
def test_parts_have_each_item_once_and_begin_with_the_end(count: int) -> None:
    items = list(range(count))
    found = parts(items)
    assert [item for part in reversed(found) for item in part] == items
    assert all(0 < len(part) <= MAX_KEYS for part in found)


def test_a_store_takes_a_whole_part(tmp_path: Path) -> None:
    with Store(tmp_path / "k", namespace="n") as store:
        assert store.exists([KEY] * MAX_KEYS) == [False] * MAX_KEYS


def refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_calls_need_no_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool would report such a call as failed, keep it, and run it later."""
    pool = started_thread("name")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert [pool.submit(int).result(LIMIT) for _ in range(3)] == [0] * 3
    pool.shutdown()


def test_a_thread_that_cannot_start_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_thread("name")


def test_the_end_of_a_keeper_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    socket = tmp_path / "k"
    with Store(socket, namespace="n") as store:
        log = KeeperLog(logging.getLogger("test"), str(socket))
        done = store.put([KEY], [bytes(65536)])
        together(8, lambda _: log.noted(store, done))
        assert [record.message for record in caplog.records] == [
            f"the keeper at {socket} is away, so nothing is found or stored: no process answers there"
        ]
        caplog.clear()
        for _ in range(2):
            assert log.noted(store, [True]) == {}
        assert [record.message for record in caplog.records] == [f"the keeper at {socket} is back"]


def test_a_miss_of_a_keeper_that_is_there_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Keeper(memory="1MiB", socket=tmp_path / "k"), Store(tmp_path / "k", namespace="n") as store:
        log = KeeperLog(logging.getLogger("test"), "k")
        assert log.noted(store, store.get([KEY], [bytearray(65536)]))["misses_absent"] == 1
    assert log.noted(store, [False]) == {}
    assert caplog.records == []


class Counted:
    """A store that has counted what the test says."""

    misses_away = 0
    puts_away = 0
    refused: str | None = None

    def stats(self, *, keeper: bool) -> dict[str, Any]:
        assert not keeper, "the keeper was asked"
        return {"refused": self.refused, "misses_away": self.misses_away, "puts_away": self.puts_away}


def test_the_reason_of_a_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A keeper has come back with smaller slots."""
    store: Any = Counted()
    store.refused = "value=65536 is out of range (1 to 4096)"
    log = KeeperLog(logging.getLogger("test"), "k")
    log.noted(store, [False])
    assert caplog.messages == [], "no call has missed the keeper"
    store.misses_away = 3
    log.noted(store, [False] * 3)
    assert caplog.messages == [
        "the keeper at k is away, so nothing is found or stored: value=65536 is out of range (1 to 4096)"
    ]


def test_a_keeper_that_confirms_a_part_of_each_call_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """And not back and away in turns."""
    store: Any = Counted()
    log = KeeperLog(logging.getLogger("test"), "k")
    for _ in range(3):
        store.puts_away += 1
        log.noted(store, [True, False])
    assert [message[:20] for message in caplog.messages] == ["the keeper at k is a"]
    log.noted(store, [True, False])
    assert caplog.messages[1:] == ["the keeper at k is back"], "what is missing was not there"


def test_stores_of_one_keeper_are_counted_apart(caplog: pytest.LogCaptureFixture) -> None:
    first: Any = Counted()
    second: Any = Counted()
    first.misses_away = 5
    log = KeeperLog(logging.getLogger("test"), "k")
    log.noted(first, [False] * 5)
    log.noted(second, [True])
    second.puts_away = 1
    log.noted(second, [False])
    assert [message.split(",")[0] for message in caplog.messages] == [
        "the keeper at k is away",
        "the keeper at k is back",
        "the keeper at k is away",
    ]


def test_an_error_is_logged_once_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    log = KeeperLog(logging.getLogger("test"), "k")
    for text in ("a", "a", "b", "a"):
        log.error(OSError(text))
    assert [message[-1] for message in caplog.messages] == ["a", "b", "a"]
