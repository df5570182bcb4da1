"""Views of values where they lie in the memory of a keeper.

Not for: which values a lease keeps, and views of one store beside each other (`crates/keeper/src/view.rs`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import Closed, InvalidArgument, Keeper, KeeperObserver, Store
from peers import eventually

from .stores import VALUE, child_of, key, opened, put, serving, value

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store(socket: Path, keeper: Keeper) -> Iterator[Store]:  # noqa: ARG001 (it is there first)
    with opened(socket) as store:
        assert all(put(store, *range(8)))
        yield store


def view(store: Store, *numbers: int) -> Any:
    return store.view([key(number) for number in numbers], ttl=10)


def mapped() -> list[tuple[int, int]]:
    """Return the addresses at which this process has memory of keepers mapped that it cannot write."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(r"(\w+)-(\w+) r--", line) for line in lines if "llm_datadist values" in line]
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]


def test_values_are_those_that_were_put_without_a_copy(store: Store) -> None:
    with view(store, 0, 100, 7) as seen:
        first, missing, last = seen.values
        assert missing is None
        assert (bytes(first), bytes(last)) == (value(0), value(7))
        assert seen.leased == [True, False, True]
        assert seen.values is seen.values
        address = np.frombuffer(first, dtype=np.uint8).ctypes.data
        assert any(begin <= address and address + VALUE <= end for begin, end in mapped())
        assert (first.nbytes, first.format, first.readonly) == (VALUE, "B", True)
        assert repr(seen) == "StoreView(keys=3, found=2)"
        assert seen.valid() == [True, False, True]
    stats = store.stats()
    assert (stats["hits"], stats["misses_absent"], stats["hit_bytes"]) == (2, 1, 2 * VALUE)
    assert stats["keeper"] is not None
    assert stats["keeper"]["leased"] == 0


def test_writing_raises(store: Store) -> None:
    with view(store, 0) as seen:
        (first,) = seen.values
        with pytest.raises(TypeError, match="read-only"):
            first[0] = 1
        array = np.frombuffer(first, dtype=np.uint8)
        for readonly in (array, np.asarray(first), np.asarray(first.obj), array.view(np.float32)):
            with pytest.raises(ValueError, match="read-only"):
                readonly[0] = 1
            with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                readonly.flags.writeable = True
        with pytest.raises(TypeError, match="not writable"):
            (ctypes.c_char * VALUE).from_buffer(first)
        with pytest.raises((BufferError, TypeError)):
            (ctypes.c_char * VALUE).from_buffer(first.obj)
        with open(os.devnull, "rb") as source, pytest.raises((BufferError, TypeError)):  # noqa: PTH123
            source.readinto(first)
        assert bytes(first) == value(0)
        seen.valid()


def test_dropped_value_is_not_valid_and_others_are(store: Store, socket: Path) -> None:
    with opened(socket) as other, view(store, 0, 1) as seen:
        assert seen.valid() == [True, True]
        other.drop([key(0)])
        other.put([key(0)], [value(0)])
        assert seen.valid() == [False, True]
        assert bytes(seen.values[1]) == value(1)
        assert seen.valid() == [False, True]


def test_with_statement_that_does_not_ask_raises(store: Store) -> None:
    with pytest.raises(RuntimeError, match=r"without a call of valid\(\)"), view(store, 0) as seen:
        assert bytes(seen.values[0]) == value(0)
    with pytest.raises(KeyError), view(store, 0) as seen:
        raise KeyError(bytes(seen.values[0][:1]))
    with view(store, 0):
        """Nothing was used."""
    with view(store, 100) as seen:
        assert seen.values == (None,)


def test_question_before_the_use_does_not_count(store: Store) -> None:
    for earlier in ([], [0]):
        seen = view(store, 0)
        for at in earlier:
            assert bytes(seen.values[at]) == value(0)
        assert seen.valid() == [True]
        assert bytes(seen.values[0]) == value(0)
        with pytest.raises(RuntimeError, match=r"without a call of valid\(\)"), seen:
            pass


@pytest.mark.parametrize("used", [False, True])
def test_values_are_gone_after_the_end(store: Store, used: bool) -> None:
    with view(store, 0) as seen:
        if used:
            assert seen.values[0] is not None
        seen.valid()
    with pytest.raises(ValueError, match="the view has ended"):
        seen.values  # noqa: B018


def test_value_whose_buffer_is_held_is_not_released(store: Store) -> None:
    with view(store, 0, 1) as seen:
        first, second = seen.values
        held = pickle.PickleBuffer(first)
        seen.valid()
    assert bytes(first) == value(0)
    with pytest.raises(ValueError, match="released"):
        second[0]
    held.release()
    first.release()


def test_end_releases_buffers_and_keeps_the_memory_of_arrays(store: Store, socket: Path) -> None:
    with view(store, 0, 1) as seen:
        first, second = seen.values
        array = np.frombuffer(second, dtype=np.uint8)
        part = second[:4]
        assert seen.valid() == [True, True]
    with pytest.raises(ValueError, match="released"):
        first[0]
    assert seen.valid() == [True, True]
    assert array.tobytes() == value(1)
    with opened(socket) as other:
        other.drop([key(number) for number in range(8)])
        assert all(put(other, *range(100, 164)))  # all slots
        assert array.tobytes() in [value(number) for number in range(100, 164)], "the bytes of another key"
    assert seen.valid() == [False, False]
    store.close()
    del seen, first, second, store
    gc.collect()
    assert part.tobytes() == array.tobytes()[:4]


def test_view_outlives_a_killed_keeper_and_its_store(socket: Path) -> None:
    with serving(socket) as served, opened(socket) as store:
        assert all(put(store, 0, 1))
        with view(store, 0, 1) as seen:
            served.kill()
            eventually(lambda: store.stats()["keeper"] is None)
            assert [bytes(found) for found in seen.values] == [value(0), value(1)]
            assert seen.valid() == [True, True]
            array = np.frombuffer(seen.values[1], dtype=np.uint8)
            store.close()
            assert seen.valid() == [True, True]
        assert array.tobytes() == value(1)


def test_next_process_of_a_keeper_does_not_make_changed_values_valid(socket: Path) -> None:
    with serving(socket) as served, opened(socket) as store:
        eventually(lambda: store.stats()["keeper"] is not None)
        before = store.stats()["attached"]
        assert all(put(store, *range(4)))
        with view(store, 0, 1) as seen:
            os.kill(child_of(served), signal.SIGKILL)
            eventually(lambda: store.stats()["attached"] == before + 1)
            assert seen.valid() == [True, True], "the values were recovered where they lie"
            store.drop([key(0)])
            assert bytes(seen.values[1]) == value(1)
            assert seen.valid() == [False, True]


def test_forked_child_reads_and_asks_and_leaves_the_leases(store: Store, socket: Path) -> None:
    with KeeperObserver(socket) as observer, view(store, 0, 1) as seen:
        values = seen.values
        pid = os.fork()
        if pid == 0:
            status = 2
            try:
                right = [bytes(found) for found in values] == [value(0), value(1)] and seen.valid() == [True, True]
                seen.__exit__(None, None, None)
                del seen, values
                gc.collect()
                try:
                    store.view([key(0)], ttl=1)
                except Closed:
                    status = 0 if right else 1
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert observer.stats()["leased"] == 2
        assert seen.valid() == [True, True]
    assert store.stats()["keeper"]["leased"] == 0  # type: ignore[index]


def test_values_with_checksums_are_valid(socket: Path, keeper: Keeper) -> None:  # noqa: ARG001 (it is there first)
    with opened(socket, checksums=True) as store:
        assert all(put(store, *range(2)))
        with view(store, 0, 100, 1) as seen:
            assert seen.valid() == [True, False, True]
        assert store.stats()["misses_corrupt"] == 0


def test_arguments_are_checked(store: Store) -> None:
    for ttl in (0, 11):
        with pytest.raises(InvalidArgument, match=f"ttl={ttl} must be above 0 and at most 10 seconds"):
            store.view([key(0)], ttl=ttl)
    with pytest.raises(InvalidArgument, match="4096"):
        store.view([key(0)] * 4097, ttl=1)
    with pytest.raises(TypeError):
        store.view(b"key", ttl=1)  # type: ignore[arg-type]
    with view(store) as seen:
        assert (seen.values, seen.leased, seen.valid()) == ((), [], [])


def test_last_buffer_unmaps_the_memory(store: Store) -> None:
    with view(store, 0) as seen:
        array = np.frombuffer(seen.values[0], dtype=np.uint8)
        seen.valid()
    before = len(mapped())
    store.close()
    del seen
    gc.collect()
    assert len(mapped()) == before
    del array
    gc.collect()
    eventually(lambda: len(mapped()) == before - 1)  # another thread unmaps it
