"""Mooncake: its transfer engine registers memory, its store puts and gets objects.

The store needs a master process, which is started here. Not for: large objects (``between``).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from comparison import Entry
from many.scene import GET, GET_ALL, OBJECT, PUT, PUT_ALL, REACH, REACH_ALL, Scene, arrived, ended
from rows import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

SEGMENT = 512 << 20
LOCAL = 64 << 20
START_S = 15


def entries(scene: Scene) -> Iterator[Entry]:
    """The entries for this operation."""
    yield from WAYS[scene.op](scene)


def reach(scene: Scene) -> Iterator[Entry]:
    """``register_memory`` for each piece, and ``batch_register_memory``. Unregistration is included."""
    from mooncake.engine import TransferEngine  # noqa: PLC0415

    engine = TransferEngine()
    checked(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
    pieces = scene.pieces()
    addresses = [int(piece.ctypes.data) for piece in pieces]
    sizes = [scene.size] * scene.count
    scene.ends.append(lambda: pieces.fill(0))  # held until the end

    def each() -> None:
        for address in addresses:
            checked(engine.register_memory(address, scene.size), "register_memory")
        for address in addresses:
            checked(engine.unregister_memory(address), "unregister_memory")

    def together() -> None:
        checked(engine.batch_register_memory(addresses, sizes), "batch_register_memory")
        checked(engine.batch_unregister_memory(addresses), "batch_unregister_memory")

    if scene.op == REACH:
        yield Entry("mooncake", each, "engine, register_memory")
    else:
        yield Entry("mooncake", together, "engine, batch_register_memory")


def put(scene: Scene) -> Iterator[Entry]:
    """``put_from`` a registered buffer into a segment of this process, and in one batch. Removal is not timed."""
    store = opened(master(scene), SEGMENT)
    objects = scene.objects
    checked(store.register_buffer(objects.ctypes.data, objects.nbytes), "register_buffer")
    names = [str(number) for number in range(scene.count)]
    addresses = [int(words.ctypes.data) for words in objects]
    sizes = [OBJECT] * scene.count

    def each() -> None:
        for name, address in zip(names, addresses):
            checked(store.put_from(name, address, OBJECT), "put_from")

    def together() -> None:
        codes = store.batch_put_from(names, addresses, sizes)
        checked(next((code for code in codes if code), 0), "batch_put_from")

    def undo() -> None:
        for name, words in zip(names, objects):
            if store.get(name) != words.tobytes():
                raise ValueError(f"object {name} was put wrong")
        # Forced, because objects that were read have a lease, and a put to an existing name succeeds without effect.
        removed = store.remove_all(True)
        if removed != scene.count:
            raise RuntimeError(f"remove_all removed {removed} of {scene.count} objects")

    if scene.op == PUT:
        yield Entry("mooncake", each, "store over tcp, put_from", after=undo, note=NOTE)
    else:
        yield Entry("mooncake", together, "store over tcp, batch_put_from", after=undo, note=NOTE)


def get(scene: Scene) -> Iterator[Entry]:
    """``get_into`` from the segment of another process, and in batches."""
    _, told = scene.other("mooncake")
    store = opened(told, 0)
    received = np.zeros_like(scene.objects)
    checked(store.register_buffer(received.ctypes.data, received.nbytes), "register_buffer")
    names = [str(number) for number in range(scene.count)]
    addresses = [int(words.ctypes.data) for words in received]
    sizes = [OBJECT] * scene.count

    def each() -> None:
        for name, address in zip(names, addresses):
            if store.get_into(name, address, OBJECT) != OBJECT:
                raise ValueError(f"get_into says no for object {name}")

    def together() -> None:
        for code in store.batch_get_into(names, addresses, sizes):
            if code != OBJECT:
                raise ValueError(f"batch_get_into says {code}")

    def clear() -> None:
        received.fill(0)

    def check() -> None:
        arrived(received, scene.objects)

    note = f"the object stays; {TCP}"
    if scene.op == GET:
        yield Entry("mooncake", each, "store over tcp, get_into", before=clear, after=check, note=note)
    else:
        yield Entry(
            "mooncake", together, "store over tcp, by name: batch_get_into", before=clear, after=check, note=note
        )


def owner(scene: Scene) -> str:
    """Run the other process: a master, and all objects in a segment."""
    address = master(scene)
    store = opened(address, SEGMENT)
    objects = scene.objects
    checked(store.register_buffer(objects.ctypes.data, objects.nbytes), "register_buffer")
    for number, words in enumerate(objects):
        checked(store.put_from(str(number), int(words.ctypes.data), OBJECT), "put_from")
    HELD.extend([store, scene])
    return address


def master(scene: Scene) -> str:
    """Start the store's master on a free port and wait until it answers."""
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    if program is None:
        raise Missing("no mooncake_master beside this Python")
    port, metrics = free_port(), free_port()
    words = [program, f"--rpc_port={port}", f"--metrics_port={metrics}", "--enable_metric_reporting=false"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    scene.ends.append(lambda: ended(process))
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return f"127.0.0.1:{port}"
        time.sleep(0.05)
    raise Missing(f"mooncake_master did not answer within {START_S} s")


def opened(address: str, segment: int) -> Any:
    """A client of the store, with a segment of its own or without."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

    store = MooncakeDistributedStore()
    checked(store.setup("127.0.0.1", "P2PHANDSHAKE", segment, LOCAL, "tcp", "", address), "setup")
    return store


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def checked(code: int, name: str) -> None:
    """Raise an exception unless the call returned 0."""
    if code:
        raise RuntimeError(f"{name} says {code}")


TCP = "its CPU wheel has no other way than tcp, also on one host"
NOTE = f"into a segment of the same process, by way of its master; {TCP}"
HELD: list[Any] = []
WAYS = {REACH: reach, REACH_ALL: reach, PUT: put, PUT_ALL: put, GET: get, GET_ALL: get}
