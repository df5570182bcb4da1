"""The C++ class: the seeds' two examples as programs, and its calls among C++ and Python processes.

Not for: header and install (`test_cpp_install.py`), null pointers and handles (`crates/capi/src/tests`), or rules of
the core's `validate` that the Python calls share (`test_transfer_arguments.py`).
"""

from __future__ import annotations

import re
import signal
import subprocess
from typing import TYPE_CHECKING, Any, Callable

import pytest
from contract import NO_COMPILER, SEEDS, present

from cpp_programs import (
    COMPILERS,
    DECODER,
    DEVICE,
    DISABLED,
    FAILED,
    FULL,
    GONE,
    HOST,
    INVALID,
    LATE,
    LINKED,
    MIX,
    PROMPT,
    SOURCES,
    SUCCESS,
    UINT8,
    UNLINKED,
    Cpp,
    listed,
    run,
)
from peers import LIMIT, OK, End, Ends, by_blocks, by_slot, equal, options, pattern, stop_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.skipif(not COMPILERS, reason=NO_COMPILER)


# -- the examples of the seeds ---------------------------------------------------------------------------------------


@pytest.mark.contract("19.cpp-copy-kv-cache", "19.cpp-push-kv-cache")
@present
@pytest.mark.parametrize("page", ["CopyKvCache", "PushKvCache"])
def test_the_programs_contain_the_examples_of_the_seeds(page: str) -> None:
    text = (SEEDS / f"{page}.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^## 调用示例\n+```\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    if page == "CopyKvCache":
        assert example.endswith(")\n"), "the page has its semicolon now"
        example = example[:-1] + ";\n"  # the only change
    part = "seed_copy" if page == "CopyKvCache" else "seed_push"
    assert (SOURCES / f"{part}.inc").read_text(encoding="utf-8") == example
    assert f'#include "{part}.inc"' in (SOURCES / f"{part}.cpp").read_text(encoding="utf-8")


@pytest.mark.contract("19.cpp-copy-kv-cache", "19.cpp-types")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_example_of_copy_kv_cache(built: Callable[..., Path], compiler: str) -> None:
    assert run([built("seed_copy", compiler, "second")]) == "copied\n"


@pytest.mark.contract("19.cpp-push-kv-cache", "19.cpp-types")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_example_of_push_kv_cache_in_two_processes(built: Callable[..., Path], compiler: str) -> None:
    program = built("seed_push", compiler)
    assert run([program, "both"]) == "pushed\nreceived\n", "also in one process"
    with subprocess.Popen(  # noqa: S603
        [program, "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as receiver:
        try:
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            assert run([program, "push", port]) == "pushed\n"
            out, err = receiver.communicate("now\n", timeout=LIMIT)
        finally:
            receiver.kill()
    assert (receiver.returncode, out) == (0, "received\n"), err


# -- the class, command by command -----------------------------------------------------------------------------------


@pytest.fixture
def cpp(built: Callable[..., Path]) -> Iterator[Callable[..., Cpp]]:
    """A function that starts a process of the class. All processes must end with status 0 when the test ends."""
    started: list[Cpp] = []

    def start(cluster: int, role: int = PROMPT) -> Cpp:
        started.append(Cpp(built("end"), cluster, role))
        return started[-1]

    yield start
    try:
        for end in started:
            end.close()
    finally:
        for end in started:
            end.process.kill()


def pair(cpp: Callable[..., Cpp], **given: Any) -> tuple[Cpp, Cpp]:
    """Two linked processes: 1 linked to 2."""
    local, remote = cpp(1).open(**given), cpp(2, DECODER).open(**given)
    assert local.ask("link", 2, remote.port) == [SUCCESS, SUCCESS], local.reason
    return local, remote


def refused(end: Cpp, rows: list[tuple[str, str, str]]) -> None:
    """Each command must return its status, and its reason must contain its fact."""
    for expected, fact, command in rows:
        assert end.ask(command) == [expected], (command, end.reason)
        assert fact in end.reason, (command, end.reason)


@pytest.mark.contract("19.cpp-push-kv-cache", "19.cpp-codes")
def test_what_a_transfer_refuses(cpp: Callable[..., Cpp]) -> None:
    local, remote = pair(cpp)
    target = remote.make("f", 4, 5, 40, 2)
    remote.make("narrow", 4, 5, 39, 2)
    local.make("n", 4, 5, 40, 1)
    local.make("host", 4, 5, 40, 1, "register", HOST)
    local.make("lent", 4, 5, 40, 1, "loose", HOST)
    rows = [
        (INVALID, "size=40", "push n 2 1 0 0 40"),
        (INVALID, "src_batch_index=5", "push n 2 1 0 5 -1"),
        (INVALID, "host memory", "push host 2 1 0 0 -1"),
        (INVALID, "tensor_num_per_layer=0", "push n 2 1 0 0 -1 -1 -1 -1 -1 0"),
        (INVALID, "cluster_id=1", "push n 1 1 0 0 -1"),
        (UNLINKED, "7", "push n 7 1 0 0 -1"),
        (GONE, "99", "push n 2 99 0 0 -1"),
        (INVALID, "dst_cache_index.batch_index=1", "push_blocks n 2 1 1 1 0 1 0"),
        (INVALID, "size=0", "pull 2 1 0 n 0 0"),
        (GONE, "slot 5", "pull 2 1 5 n 0 -1"),
        (GONE, "-1", "pull 2 1 0 nobody 0 -1"),
        (UNLINKED, "9", "pull 9 1 0 n 0 -1"),
        # With two faults, the one that is wrong for every cache is reported before the cache is looked up.
        (INVALID, "size=40", "push nobody 2 1 0 0 40"),
        (INVALID, "cluster_id=1", "push nobody 1 1 0 0 -1"),
        (INVALID, "host memory", "push lent 2 1 0 0 -1"),
        (GONE, "-1", "push nobody 2 1 0 0 -1"),
        (INVALID, "dst_layer_range=(1, 0)", "push_blocks nobody 2 1 0 1 0 1 0 0 1 1 0 1"),
        (GONE, "-1", "push_blocks nobody 2 1 0 1 0 1 0"),
        (INVALID, "size=0", "pull 2 1 0 nobody 0 0"),
        (INVALID, "cluster_id=1", "pull 1 1 0 nobody 0 -1"),
        (INVALID, "src_layer_range=(-1, 2)", "pull_blocks 2 1 0 nobody 1 0 1 0 -1 2 0 0 1"),
        (GONE, "-1", "pull_blocks 2 1 0 nobody 1 0 1 0"),
        (INVALID, "src_cache_index.batch_index=2", "pull_blocks 2 1 2 n 1 0 1 0"),
    ]
    refused(local, rows)
    assert equal(remote.read("f"), pattern(2, 4, 5, 40))
    assert equal(local.read("n"), pattern(1, 4, 5, 40))
    assert remote.ask("deallocate", target) == [SUCCESS]
    assert local.ask("push n 2 1 0 0 -1") == [GONE]
    assert local.ask("pull 2 1 0 n 0 -1") == [GONE]


@pytest.mark.contract("19.cpp-codes")
def test_a_peer_that_hangs_is_a_timeout(cpp: Callable[..., Cpp]) -> None:
    local, remote = pair(cpp, llm__SyncKvCacheWaitTime=300, llm__LinkTransport="tcp")
    local.make("n", 2, 2, 8, 1)
    remote.make("f", 2, 2, 8, 2)
    try:
        stop_process(remote.process.pid)
        for command in ("push n 2 1 0 0 -1", "pull 2 1 0 n 0 -1"):
            refused(local, [(LATE, "limit_ms=300", command)])
    finally:
        remote.process.send_signal(signal.SIGCONT)
    assert equal(local.read("n"), pattern(1, 2, 2, 8))


@pytest.mark.contract("19.cpp-push-kv-cache")
def test_the_role_decoder_does_not_push_and_mix_does(cpp: Callable[..., Cpp]) -> None:
    mix, decoder = cpp(1, MIX).open(), cpp(2, DECODER).open()
    assert mix.ask("link", 2, decoder.port) == [SUCCESS, SUCCESS]
    assert mix.ask("set_role", DECODER)[0] == LINKED
    mix.make("c", 2, 2, 8, 1)
    decoder.make("c", 2, 2, 8, 2)
    commands = ("push c 1 1 0 0 -1", "push_blocks c 1 1 0 1 0 1 0", "push nobody 1 1 0 0 -1")
    refused(decoder, [(INVALID, "Decoder", command) for command in commands])
    assert mix.ask("push c 2 1 0 0 -1") == [SUCCESS], mix.reason
    assert mix.ask("unlink", 2, decoder.port) == [SUCCESS, SUCCESS]
    assert decoder.ask("set_role", PROMPT) == [INVALID, str(decoder.port)], "decoders must find it somewhere"
    assert "llm.ListenIpInfo" in decoder.reason
    assert decoder.ask("set_role", MIX) == [SUCCESS, "0"], "without an address it listens nowhere"
    assert decoder.ask("set_role", PROMPT, "llm.ListenIpInfo=nowhere")[0] == INVALID
    assert decoder.ask("set_role", 4)[0] == INVALID
    assert decoder.ask("set_role", PROMPT, "llm.ListenIpInfo=127.0.0.1:0")[0] == SUCCESS
    assert decoder.ask("link", 1, mix.port) == [SUCCESS, SUCCESS], decoder.reason
    assert decoder.ask("push c 1 1 0 0 -1") == [SUCCESS], decoder.reason


def test_with_links_that_go_both_ways_a_role_is_a_label(cpp: Callable[..., Cpp]) -> None:
    remote, local = cpp(2).open(llm__TransferBackend="hixl"), cpp(1, DECODER).open(llm__TransferBackend="hixl")
    remote.make("c", 2, 2, 8, 1)
    local.make("c", 2, 2, 8, 2)
    assert local.ask("link", 2, remote.port) == [SUCCESS, SUCCESS]
    assert local.ask("push c 2 1 0 1 -1") == [SUCCESS], local.reason
    for tensor, other in zip(remote.read("c"), pattern(2, 2, 2, 8)):
        assert tensor[0].tolist() == other[1].tolist()
    fixed, never = cpp(3).open(llm__TransferBackend="hixl"), cpp(4).open(llm__EnableSwitchRole=0)
    assert fixed.ask("set_role", MIX) == [SUCCESS, str(fixed.port)]
    assert fixed.ask("set_role", MIX, "llm.ListenIpInfo=127.0.0.1:1")[0] == DISABLED
    assert never.ask("set_role", MIX)[0] == DISABLED
    assert "llm.EnableSwitchRole" in never.reason


def test_links(cpp: Callable[..., Cpp]) -> None:
    local, remote = pair(cpp)
    assert local.ask("link", 2, remote.port) == ["5010b008"] * 2, "linked already"
    assert local.ask("unlink", 5, remote.port) == [SUCCESS, SUCCESS], "a cluster that is not linked"
    assert local.ask("force", 2, remote.port) == remote.ask("force", 1, local.port) == [SUCCESS, SUCCESS]
    assert local.ask("link", 2, remote.port) == [SUCCESS, SUCCESS], "good again"
    assert local.ask("link", 3, 1)[0] == "5010b009"
    assert "cluster=3" in local.reason


@pytest.mark.contract("19.cpp-copy-kv-cache")
def test_copies_by_id_and_by_address(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1).open()
    end.make("a", 2, 4, 16, 1)
    end.make("b", 2, 5, 16, 2)
    end.make("own", 2, 4, 16, 3, "register", HOST)
    end.make("loose", 2, 4, 16, 4, "loose", HOST)
    end.make("lent", 2, 4, 16, 5, "loose", DEVICE)
    bytes_of = {name: pattern(seed, 2, rows, 16) for name, seed, rows in (
        ("a", 1, 4), ("b", 2, 5), ("own", 3, 4), ("loose", 4, 4), ("lent", 5, 4)
    )}  # fmt: skip
    for src, dst in (("a", "b"), ("a", "a"), ("b", "own"), ("a", "loose"), ("lent", "a"), ("lent", "loose")):
        assert end.ask("copy", src, dst, 2, 1, 4, 9) == [SUCCESS], (src, dst, end.reason)
        assert end.ask("copy", src, dst, 0, 3, 0, -1) == [SUCCESS], (src, dst, end.reason)
        for to, out in zip(bytes_of[dst], bytes_of[src]):
            to[1, 4:13] = out[2, 4:13]
            to[3] = out[0]
    for src, dst in (("a", "b"), ("b", "a"), ("a", "loose"), ("loose", "b"), ("own", "a"), ("a", "own")):
        lists = f"2 {listed([0, 1])} {listed([2, 3])}"
        assert end.ask("copy_blocks", src, dst, listed([3, 0]), lists) == [SUCCESS], (src, dst, end.reason)
        for to, out in zip(bytes_of[dst], bytes_of[src]):
            to[[0, 1]] = to[[2, 3]] = out[[3, 0]].copy()
    for name, content in bytes_of.items():
        assert equal(end.read(name), content), name


@pytest.mark.contract("19.cpp-copy-kv-cache", "19.cpp-codes")
def test_what_a_copy_refuses(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1).open()
    names = (("a", 2, 4, 16), ("narrow", 2, 4, 15), ("few", 1, 4, 16))
    for name, tensors, rows, size in names:
        end.make(name, tensors, rows, size, 1)
    end.make("host", 2, 4, 16, 1, "register", HOST)
    end.make("loose", 2, 4, 16, 1, "loose", HOST)
    end.make("gone", 2, 4, 16, 1, "loose")
    assert end.ask("claim gone 99 4 2") == [SUCCESS]
    rows = [
        (INVALID, "host memory", "copy host a 0 0 0 -1"),
        (INVALID, "dst_batch_index=4", "copy a a 0 4 0 -1"),
        (INVALID, "offset=16", "copy a a 0 1 16 -1"),
        (INVALID, "size=0", "copy a a 0 1 0 0"),
        (INVALID, "2 tensors", "copy a few 0 1 0 -1"),
        (INVALID, "dst_blocks_list[1] has 2", "copy_blocks a a 1 0 2 1 1 2 1 2"),
        (INVALID, "block sizes 16 and 15", "copy_blocks a narrow 1 0 1 1 1"),
        (INVALID, "destination block=4", "copy_blocks a a 1 0 1 1 4"),
        (INVALID, "one must be device", "copy_blocks host loose 1 0 1 1 0"),
        (GONE, "99", "copy gone a 0 0 0 -1"),
        (INVALID, "size=0", "copy gone a 0 0 0 0"),
        (GONE, "99", "copy_blocks gone a 1 0 1 1 0"),
        (INVALID, "dst_blocks_list[0] has 2", "copy_blocks a gone 1 0 1 2 1 2"),
    ]
    refused(end, rows)
    for name, tensors, rows_, size in names:
        assert equal(end.read(name), pattern(1, tensors, rows_, size)), "a refused copy moved something"
    # A structure must not contradict the cache that its id names.
    for expected, fact, change in [
        (INVALID, "cache_desc", "claim a 1 5 2"),
        (INVALID, "tensor_addrs", "claim a 1 4 1"),
        (GONE, "77", "claim a 77 4 0"),
        (SUCCESS, "", "claim a 1 4 0"),  # the id is enough
        (GONE, "0", "claim a 0 4 2"),  # only -1 means the addresses
        (GONE, "-2", "claim a -2 4 2"),
    ]:
        assert end.ask(change) == [SUCCESS]
        refused(end, [(expected, fact, "copy a narrow 0 0 0 8")])
    assert end.ask("claim a 1 4 0") == [SUCCESS]
    assert end.ask("place a", HOST) == [SUCCESS]
    refused(end, [(INVALID, "host memory", "copy a narrow 0 0 0 8")])


@pytest.mark.contract("19.cpp-types")
def test_caches_come_and_go(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1).open()
    assert end.ask("allocate", "x", HOST, 1, UINT8, 4, 16)[0] == INVALID
    assert end.ask("allocate", "x", DEVICE, 2, UINT8, 4, 1 << 20)[0] == FULL
    assert "longest" in end.reason or "free" in end.reason
    for _ in range(5):
        first = end.make("x", 1, 2, 1 << 19, 1)
        assert end.ask("deallocate", first) == [SUCCESS]
        assert end.ask("deallocate", first) == [SUCCESS], "one that is not there"
    own = end.make("own", 1, 4, 16, 1, "register")
    assert end.ask("deallocate", own) == [SUCCESS]
    assert end.ask("copy own own 0 1 0 -1") == [SUCCESS], "a registered cache is not deallocated"
    assert end.ask("unregister", own) == [SUCCESS]
    assert end.ask("unregister", own) == [SUCCESS], "one that is not there"
    assert end.ask("copy own own 0 1 0 -1") == [GONE]
    assert end.ask("finalize") == [SUCCESS]
    assert end.ask("finalize") == [SUCCESS]
    assert end.ask("copy own own 0 1 0 -1") == [FAILED]
    assert end.open().make("again", 1, 4, 16, 1) == 1, "may be initialized again"


def test_initialize_reads_its_options(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1)
    for given, fact in [
        (["llm.DeviceId=x"], 'llm.DeviceId="x"'),
        (["llm.DeviceId=0", "llm.HugePages=on"], 'huge_pages="on" must be auto or off or eager'),
    ]:
        # The program calls `ListeningPort` before `LastErrorMessage`, which must keep the reason.
        assert end.ask("init", *given) == [INVALID, "0"]
        assert fact in end.reason
    assert end.ask("init", "llm.DeviceId=0", "llm.HugePages=off") == [SUCCESS, "0"], end.reason
    assert end.ask("allocate", "x", DEVICE, 4, UINT8, 1, 64 << 20)[0] == SUCCESS, "the machine's pool"
    sized = cpp(2)
    assert sized.ask("init", "llm.DeviceId=0", 'llm.BufPoolCfg={"buf_pool_size":1048576}') == [SUCCESS, "0"]
    assert sized.ask("allocate", "x", DEVICE, 1, UINT8, 1, (1 << 20) + 1)[0] == FULL
    assert sized.ask("allocate", "x", DEVICE, 1, UINT8, 1, 1 << 20)[0] == SUCCESS


# -- C++ and Python --------------------------------------------------------------------------------------------------


def python_end(ends: Ends, **given: Any) -> End:
    """The Python end here, cluster 9, which listens."""
    return ends.local(options(accessible=True, listen="127.0.0.1:0", **given), cluster=9)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("registered", [False, True])
def test_a_python_process_links_pulls_from_and_pushes_to_the_class(
    ends: Ends, cpp: Callable[..., Cpp], registered: bool, transport: str
) -> None:
    local, remote = python_end(ends, llm__LinkTransport=transport), cpp(2).open(llm__LinkTransport=transport)
    target = remote.make("f", 4, 5, 40, 2, "register" if registered else "allocate")
    local.make("n", 5, 40, 4, registered=registered, seed=1)
    ours, theirs = pattern(1, 4, 5, 40), pattern(2, 4, 5, 40)
    assert local.link_clusters([remote.at])[0] == OK
    local.push_cache(by_slot(2, target, 3), "n", 1)
    local.pull_cache(by_slot(2, target, 0), "n", 4)
    local.push_cache(by_slot(2, target, 2), "n", 0, src_layers=(1, 2), dst_layers=(0, 1))
    for tensor in range(4):
        theirs[tensor][3] = ours[tensor][1]
        ours[tensor][4] = theirs[tensor][0]
    for tensor in (0, 1):
        theirs[tensor][2] = ours[tensor + 2][0]
    assert equal(remote.read("f"), theirs)
    assert equal(local.read("n"), ours)
    assert local.unlink_clusters([remote.at])[0] == OK


@pytest.mark.contract("19.cpp-push-kv-cache")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_class_links_pulls_from_and_pushes_to_a_python_process(
    ends: Ends, cpp: Callable[..., Cpp], blocks: bool, transport: str
) -> None:
    remote, local = python_end(ends, llm__LinkTransport=transport), cpp(2).open(llm__LinkTransport=transport)
    keys = [by_blocks(9)] if blocks else []
    target = remote.make("f", 5, 40, 4, blocks=blocks, keys=keys, seed=1)
    local.make("n", 4, 5, 40, 2, "register" if transport == "tcp" else "allocate")
    ours, theirs = pattern(2, 4, 5, 40), pattern(1, 4, 5, 40)
    port = remote.listening().rpartition(":")[2]
    assert local.ask("link", 9, port) == [SUCCESS, SUCCESS], local.reason
    # To the class, slots and blocks of Python are both rows.
    assert local.ask("push_blocks", "n", 9, target, 0, listed([0, 1]), listed([4, 2])) == [SUCCESS], local.reason
    assert local.ask("pull_blocks", 9, target, 0, "n", listed([3, 0]), listed([3, 4])) == [SUCCESS], local.reason
    for tensor in range(4):
        theirs[tensor][[4, 2]] = ours[tensor][[0, 1]]
        ours[tensor][[3, 4]] = theirs[tensor][[3, 0]]
    slots = INVALID if blocks else SUCCESS
    assert local.ask("push", "n", 9, target, 0, 2, -1) == [slots], local.reason
    assert local.ask("pull", 9, target, 0, "n", 1, 7) == [slots], local.reason
    if not blocks:
        for tensor in range(4):
            theirs[tensor][0] = ours[tensor][2]
            ours[tensor][1, :7] = theirs[tensor][0, :7]
        assert local.ask("push", "n", 9, target, 1, 0, -1, 1, 1, 0, 0, 2) == [SUCCESS], local.reason
        assert local.ask("pull", 9, target, 0, "n", 2, -1, 0, 0, 3, 3, 1) == [SUCCESS], local.reason
        for tensor in (0, 1):
            theirs[tensor][1] = ours[tensor + 2][0]
        ours[3][2] = theirs[0][0]
    assert equal(remote.read("f"), theirs)
    assert equal(local.read("n"), ours)


def test_a_python_process_in_the_other_mode_is_told_why(ends: Ends, cpp: Callable[..., Cpp]) -> None:
    local, remote = ends.local(options(), cluster=9), cpp(2).open()
    code, codes = local.link_clusters([remote.at])
    assert code != OK
    assert codes == [code]


def test_many_threads_use_one_object(built: Callable[..., Path]) -> None:
    assert run([built("threads")]) == "done\n"
