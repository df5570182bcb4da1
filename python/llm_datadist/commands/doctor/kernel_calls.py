"""Tries the system calls that the engine needs, because containers may forbid them (seccomp), and opens an engine."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from dataclasses import dataclass

from llm_datadist.native import Engine, Error

_F_ADD_SEALS = 1033
_SEAL_SHRINK, _SEAL_FUTURE_WRITE = 0x0002, 0x0010
_PAGE = 4096


@dataclass(frozen=True)
class KernelCalls:
    """For each call, the reason why it fails, or ``None`` if it works."""

    shared_memory: str | None = None  # `memfd_create`, and sealing such a file against writes of others
    process_read: str | None = None  # `process_vm_readv`, tried with this process
    process_handle: str | None = None  # `pidfd_open`, tried with this process
    engine: str | None = None  # `Engine`, with a pool and a listener


def try_all() -> KernelCalls:
    """Try the calls."""
    return KernelCalls(_shared_memory(), _process_read(), _process_handle(), open_engine())


def _reason(call: str, error: OSError) -> str:
    number = error.errno or 0
    return f"{call} failed (errno={number}): {os.strerror(number)}"


def _shared_memory() -> str | None:
    try:
        descriptor = os.memfd_create("llm_datadist doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _reason("memfd_create", error)
    except AttributeError:
        return "this Python has no memfd_create"
    try:
        os.ftruncate(descriptor, _PAGE)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_FUTURE_WRITE)
    except OSError as error:
        return _reason("sealing a memory file", error)
    finally:
        os.close(descriptor)
    return None


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _process_read() -> str | None:
    source, target = ctypes.create_string_buffer(b"doctor"), ctypes.create_string_buffer(7)
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return "the C library has no process_vm_readv"
    call.restype = ctypes.c_ssize_t
    local = _Piece(ctypes.addressof(target), len(target))
    remote = _Piece(ctypes.addressof(source), len(source))
    number = ctypes.c_ulong
    read = call(os.getpid(), ctypes.byref(local), number(1), ctypes.byref(remote), number(1), number(0))
    if read == len(target) and target.value == source.value:
        return None
    return _reason("process_vm_readv", OSError(ctypes.get_errno() or errno.EIO, ""))


def _process_handle() -> str | None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return _reason("pidfd_open", error)
    except AttributeError:
        return "this Python has no pidfd_open"
    return None


class _Errors(logging.Handler):
    """Keeps the texts of lines at ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a line."""
        self.texts.append(record.getMessage())


def open_engine() -> str | None:
    """Open an engine with a pool and a listener, and close it. Return what fails, or ``None``.

    Limits of the process may refuse what no single system call shows. Environment variables count as for every engine,
    so that a token that cannot be read is found.
    """
    logger, errors = logging.getLogger("LLM_DATADIST"), _Errors()
    propagate, logger.propagate = logger.propagate, False  # the report has the lines
    logger.addHandler(errors)
    try:
        with Engine(pool="32MiB", listen="127.0.0.1:0"):
            pass
    except (Error, OSError, MemoryError, RuntimeError) as error:  # also a limit that Python meets first
        return f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(errors)
        logger.propagate = propagate
    return "; ".join(errors.texts) or None
