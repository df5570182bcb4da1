"""What the native tests share: bytes of caches, waits with deadlines, refused calls, engines in other processes.

Expected bytes never come from an engine: a `Model` is a plain copy of the memory, which the test changes itself.
Not for: expectations (they belong to the tests).
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import pytest

from llm_datadist.native import Cache, Closed, Engine, Error, InvalidArgument, KvLayout, Message, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.native import Event

LIMIT = 60.0  # for waits that end sooner unless something is broken
THOROUGH = os.environ.get("LLM_DATADIST_THOROUGH", "") not in ("", "0")
BLOCKS, TENSORS, ROW = 16, 4, 96
Kind = TypeVar("Kind")


def allocate(engine: Engine, name: str = "kv", seed: int | None = None, **given: Any) -> Cache:
    """Allocate a cache of `BLOCKS` blocks without a layout; with a seed, fill it."""
    shape = {"blocks": BLOCKS, "tensors": TENSORS, "shape": (ROW,), "dtype": "uint8", **given}
    cache = engine.allocate(name, **shape)
    fill(cache, 0 if seed is None else seed)
    return cache


def address(engine: Engine) -> str:
    """Where an engine that listens can be reached."""
    assert engine.address is not None
    return engine.address


def layout(**given: Any) -> KvLayout:
    """Return a layout of two layers and four heads, whose tensors have `TENSORS` as number."""
    return KvLayout(**{"layers": 2, "block_tokens": 4, "heads": 4, "head_dim": 3, "dtype": "uint16", **given})


def row_bytes(cache: Cache) -> int:
    """The bytes of one block of one tensor."""
    return cache.block_bytes // len(cache.tensors)


def fill(cache: Cache, seed: int) -> None:
    """Write pseudo-random bytes into every tensor, through plain addresses."""
    for number, tensor in enumerate(cache.tensors):
        data = random.Random(f"{seed}/{number}").randbytes(tensor.nbytes)  # noqa: S311
        ctypes.memmove(tensor.address, data, len(data))


def contents(cache: Cache) -> list[bytes]:
    """The bytes of every tensor of a cache without gaps, read through plain addresses."""
    return [ctypes.string_at(tensor.address, tensor.nbytes) for tensor in cache.tensors]


def blocks_of(cache: Cache, blocks: Sequence[int]) -> list[list[bytes]]:
    """The bytes of blocks, by tensor."""
    size = row_bytes(cache)
    return [[tensor[block * size : (block + 1) * size] for block in blocks] for tensor in contents(cache)]


class Model:
    """A plain copy of the bytes of a cache."""

    def __init__(self, cache: Cache | Sequence[bytes], size: int = ROW) -> None:
        self.size = row_bytes(cache) if isinstance(cache, Cache) else size
        self.tensors = [bytearray(t) for t in (contents(cache) if isinstance(cache, Cache) else cache)]

    def write(
        self, dst: Sequence[int], source: Model, src: Sequence[int], part: tuple[int, int] | None = None,
        tensors: range | None = None, shift: int = 0,
    ) -> Model:  # fmt: skip
        """Copy blocks of another model (or this one), or `part` of each, in order. The bytes are read first."""
        first, end = part or (0, self.size)
        chosen = range(len(self.tensors)) if tensors is None else tensors
        read = [
            [bytes(source.tensors[t][b * source.size + first : b * source.size + end]) for b in src] for t in chosen
        ]
        for tensor, rows in zip(chosen, read):
            for block, row in zip(dst, rows):
                at = block * self.size + first + shift
                self.tensors[tensor][at : at + end - first] = row
        return self

    def check(self, cache: Cache) -> None:
        """Fail unless the cache has exactly these bytes."""
        for number, (ours, theirs) in enumerate(zip(self.tensors, contents(cache))):
            wrong = [b for b in range(len(ours) // self.size) if ours[b * self.size :][: self.size]
                     != theirs[b * self.size :][: self.size]]  # fmt: skip
            assert not wrong, f"tensor {number}: blocks {wrong} differ"


def fails(kind: type[Kind], call: Callable[[], Any], argument: str | None = None) -> Kind:
    """The call, or the transfer that it returns, must fail with exactly this kind of error. Return the error."""
    with pytest.raises(kind) as caught:  # type: ignore[type-var]  # noqa: PT012
        returned = call()
        if isinstance(returned, Transfer):
            returned.result(LIMIT)
    error = caught.value
    assert type(error) is kind, repr(error)
    assert str(error).strip(), "the error has no text"
    if argument is not None:
        assert isinstance(error, Error)
        assert error.argument == argument, (error.argument, str(error))
    return error


def refused(argument: str, call: Callable[[], Any], *texts: str) -> InvalidArgument:
    """The call itself, not its transfer, must raise `InvalidArgument` for this argument, with the texts."""
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert caught.value.argument == argument, (caught.value.argument, str(caught.value))
    for text in texts:
        assert text in str(caught.value)
    return caught.value


BAD_TIMES: list[Any] = [float("nan"), float("inf"), -float("inf"), -1, -0.5]
NO_TIMES: list[Any] = [True, False, "1", b"1", [1.0], 1j, object()]


def accepted(call: Callable[[], Any], *wrong: type[BaseException]) -> bool:
    """Make a call, or wait for the transfer that it returns. Return False if it raises one of these exceptions."""
    try:
        returned = call()
        if isinstance(returned, Transfer):
            returned.result(LIMIT)
    except wrong:
        return False
    return True


def check_times(call: Callable[[Any], Any], name: str = "timeout", *, zero: bool = False) -> None:
    """Every wrong time must be refused; `zero` says whether 0 is allowed."""
    for wrong in BAD_TIMES if zero else [*BAD_TIMES, 0, 0.0]:
        refused(name, lambda wrong=wrong: call(wrong))  # type: ignore[misc]
    for wrong in NO_TIMES:
        with pytest.raises(TypeError):
            call(wrong)


def gather(engine: Engine, enough: Callable[[list[Event]], bool]) -> list[Event]:
    """Take events until `enough` accepts them. Return all of them."""
    seen: list[Event] = []
    end = time.monotonic() + LIMIT
    while not enough(seen):
        left = end - time.monotonic()
        assert left > 0, f"still waiting after {seen}"
        select.select([engine], [], [], left)
        seen += engine.events()
    return seen


def of(kind: type[Kind], seen: Sequence[Any]) -> list[Kind]:
    """The events of one kind."""
    return [event for event in seen if isinstance(event, kind)]


def next_of(engine: Engine, kind: type[Kind]) -> Kind:
    """Take events until there is one of this kind, and return it."""
    return of(kind, gather(engine, lambda seen: bool(of(kind, seen))))[0]


def messages(engine: Engine, count: int) -> list[bytes]:
    """Take events until `count` messages have come, and return these."""
    return [event.data for event in of(Message, gather(engine, lambda s: len(of(Message, s)) >= count))]


def closed(call: Callable[[], Any]) -> None:
    """The call itself must raise `Closed`."""
    with pytest.raises(Closed):
        call()


TESTS = Path(__file__).resolve().parents[1]
SERVE = """
import ast, json, sys, traceback
from llm_datadist.native import *
from native.helpers import *
names = dict(globals())
for line in sys.stdin:
    try:
        body = ast.parse(json.loads(line)).body
        last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "<test>", "exec"), names)
        value = eval(compile(last, "<test>", "eval"), names) if last else None
        reply = {"value": repr(value)}
    except BaseException:
        reply = {"error": traceback.format_exc()}
    print(json.dumps(reply), flush=True)
"""


class Remote:
    """Another process with an open `engine`, in which a test runs Python code. Results are literals."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-W", "error", "-c", SERVE]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=TESTS, stdin=pipe, stdout=pipe, bufsize=0)  # noqa: S603
        self._read = b""
        given = {"pool": "2MiB", "page": "4KiB", "listen": "127.0.0.1:0", "timeout": LIMIT, **options}
        self.address: str = self.do(f"engine = Engine(**{given!r}); engine.address")

    def do(self, code: str) -> Any:
        """Run code. Return the value of its last expression."""
        self.start(code)
        return self.reply()

    def start(self, code: str) -> None:
        """Run code, without waiting for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")

    def reply(self) -> Any:
        """Wait for the code that was started."""
        assert self.process.stdout is not None
        end = time.monotonic() + LIMIT
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the other process does not answer"
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, "the other process has ended"
            self._read += piece
        line, self._read = self._read.split(b"\n", 1)
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return ast.literal_eval(answer["value"])

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        self.process.kill()
        self.end()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process for a while with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Close the pipes, and wait until the process has ended."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.process.wait()


def run_alone(code: str) -> str:
    """Run code in a new process, which must end well. Return its output."""
    command = [sys.executable, "-W", "error", "-c", "from native.helpers import *\n" + code]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT, check=False)  # noqa: S603
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
