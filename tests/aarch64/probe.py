"""Report which kernel calls of the engine work on this machine: `yes`, or `no` and the reason.

`tests/aarch64/steps.sh` runs it under emulation. A test that needs a missing call fails there even without a fault.
The Rust tests check the calls that they need themselves (`crates/core/tests/integration/emulation.rs`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
# Not in the module `fcntl` of every Python.
ADD_SEALS, SEAL_SHRINK, SEAL_FUTURE_WRITE = 1033, 2, 16
WIPE_ON_FORK, COLLAPSE = 18, 25
SET_PTRACER, PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
PEER_PIDFD, PASS_RIGHTS = 77, 83
PAGEMAP_SCAN = 0xC0606610


class Vector(ctypes.Structure):
    """A range of memory: `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def called(result: int) -> int:
    """Return the result of a function of the C library, or raise its error."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, errno.errorcode.get(code, str(code)))
    return result


def refused(change: Callable[[], object]) -> bool:
    """Return whether the kernel does not permit a call."""
    try:
        change()
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def child(run: Callable[[], bool]) -> bool:
    """Return whether `run` returned true in a forked child, which is killed after 20 s."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            os._exit(0 if run() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def memory(flags: int = mmap.MAP_PRIVATE) -> tuple[mmap.mmap, int]:
    """Map a page, and return it with its address."""
    page = mmap.mmap(-1, PAGE, flags | mmap.MAP_ANONYMOUS)
    return page, ctypes.addressof(ctypes.c_char.from_buffer(page))


def read_process(pid: int, address: int, length: int) -> bytes:
    """Read memory of a process through the kernel."""
    into = ctypes.create_string_buffer(length)
    local = Vector(ctypes.cast(into, ctypes.c_void_p), length)
    remote = Vector(address, length)
    called(LIBC.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
    return into.raw


def reads_own_memory() -> bool:
    page, address = memory()
    page[:5] = b"bytes"
    return read_process(os.getpid(), address, 5) == b"bytes"


def reads_other_process() -> bool:
    page, address = memory(mmap.MAP_SHARED)
    page[:5] = b"bytes"
    parent = os.getpid()
    return child(lambda: read_process(parent, address, 5) == b"bytes")


def lets_itself_be_read() -> bool:
    return called(LIBC.prctl(SET_PTRACER, PTRACER_ANY, 0, 0, 0)) == 0


def knows_process_descriptors() -> bool:
    os.close(os.pidfd_open(os.getpid()))
    return True


def knows_peer_descriptors() -> bool:
    one, other = socket.socketpair()
    with one, other:
        os.close(struct.unpack("i", one.getsockopt(socket.SOL_SOCKET, PEER_PIDFD, 4))[0])
    return True


def knows_peer_credentials() -> bool:
    one, other = socket.socketpair()
    with one, other:
        pid = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return int(pid) == os.getpid()


def passes_descriptors() -> bool:
    one, other = socket.socketpair()
    with one, other, tempfile.TemporaryFile() as file:
        socket.send_fds(one, [b"x"], [file.fileno()])
        _, descriptors, _, _ = socket.recv_fds(other, 1, 1)
        for descriptor in descriptors:
            os.close(descriptor)
    return len(descriptors) == 1


def refuses_descriptors() -> bool:
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, PASS_RIGHTS, 0)
    return True


def seals_memory() -> bool:
    descriptor = os.memfd_create("probe", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    own = mmap.mmap(descriptor, PAGE)
    fcntl.fcntl(descriptor, ADD_SEALS, SEAL_SHRINK | SEAL_FUTURE_WRITE)
    own[:1] = b"x"
    forbidden = refused(lambda: mmap.mmap(descriptor, PAGE)) and refused(lambda: os.ftruncate(descriptor, 0))
    return forbidden and mmap.mmap(descriptor, PAGE, prot=mmap.PROT_READ)[:1] == b"x"


def wipes_memory_of_children() -> bool:
    page, address = memory()
    page[:1] = b"x"
    called(LIBC.madvise(ctypes.c_void_p(address), PAGE, WIPE_ON_FORK))
    return child(lambda: page[:1] == b"\0")


def merges_pages() -> bool:
    unit = 2 << 20
    pages = mmap.mmap(-1, 2 * unit, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:] = bytes(2 * unit)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    called(LIBC.madvise(ctypes.c_void_p(-(-first // unit) * unit), unit, COLLAPSE))
    return True


def limits_address_space() -> bool:
    def limited() -> bool:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            mmap.mmap(-1, 2 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return True
        return False

    return child(limited)


def limits_descriptors() -> bool:
    def limited() -> bool:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            os.dup(0)
        except OSError as error:
            return error.errno == errno.EMFILE
        return False

    return child(limited)


def limits_file_sizes() -> bool:
    def limited() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))
        return resource.getrlimit(resource.RLIMIT_FSIZE)[0] == PAGE

    return child(limited)


def reserves_memory() -> bool:
    descriptor = os.memfd_create("probe")
    os.posix_fallocate(descriptor, 0, 8 * PAGE)
    return os.fstat(descriptor).st_blocks > 0


def knows_pages() -> bool:
    with Path("/proc/self/pagemap").open("rb") as pages:
        return len(pages.read(8)) == 8


def reports_page_sizes() -> bool:
    page, address = memory()
    page[:1] = b"x"
    # The size of the structure, flags, and the start and the end of the addresses.
    scan = struct.pack("12Q", 96, 0, address, address + PAGE, *[0] * 8)
    with Path("/proc/self/pagemap").open("rb") as pages:
        fcntl.ioctl(pages, PAGEMAP_SCAN, scan)
    return True


def tells_thread_ids() -> bool:
    return f"Pid:\t{os.getpid()}" in Path("/proc/self/status").read_text(encoding="ascii")


def faults_on_unmapped_addresses() -> bool:
    """Return whether a call with an unmapped address fails with an error, and not with a signal."""
    read, write = os.pipe()
    done = LIBC.write(write, ctypes.c_void_p(PAGE), 8)
    os.close(read)
    os.close(write)
    return done < 0 and ctypes.get_errno() == errno.EFAULT


PROBES = (
    reads_own_memory,
    reads_other_process,
    lets_itself_be_read,
    knows_process_descriptors,
    knows_peer_descriptors,
    knows_peer_credentials,
    passes_descriptors,
    refuses_descriptors,
    seals_memory,
    wipes_memory_of_children,
    merges_pages,
    limits_address_space,
    limits_descriptors,
    limits_file_sizes,
    reserves_memory,
    knows_pages,
    reports_page_sizes,
    tells_thread_ids,
    faults_on_unmapped_addresses,
)


def found(probe: Callable[[], bool]) -> str:
    """Return the result of a probe as text."""
    try:
        return "yes" if probe() else "no: another result"
    except (OSError, AttributeError) as error:
        return f"no: {error}"


def main() -> None:
    """Print a line for each probe."""
    lines = [f"{os.uname().machine}, pages of {PAGE} bytes"]
    lines += [f"{probe.__name__}: {found(probe)}" for probe in PROBES]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
