"""``llm-datadist serve``: a keeper in processes of its own, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import grp
import json
import os
import time
from typing import TYPE_CHECKING

from llm_datadist import Error, InvalidArgument
from llm_datadist.commands import systemd
from llm_datadist.commands.holder import StopSignals, hold
from llm_datadist.commands.output import CommandParser, complain, size, write
from llm_datadist.native import _Holder

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROGRESS_SECONDS = 1.0
_PREPARED_BYTES = 256 << 20
"""Bytes that are prepared at a time. A signal waits as long as that takes."""


def main(arguments: Sequence[str]) -> int:
    """Run a keeper until a signal ends it.

    Args:
        arguments: the arguments behind ``serve``.

    Returns:
        The exit status: 0 after a signal or once another keeper has taken over, 1 if the keeper cannot be started, 2
        for wrong arguments.
    """
    options = _parser().parse_args(arguments)
    try:
        with StopSignals() as stop:
            take_over = options.take_over
            holder = _Holder(
                memory=options.memory,
                socket=options.socket,
                value=options.value,
                take_over=take_over,
                tokens=options.tokens,
                group=options.group,
            )
            if options.prepare and (status := _prepared(holder, stop)) is not None:
                return status

            def ready(child: int) -> None:
                text = f"{holder.slots:,} values of {options.value} at {options.socket}"
                facts = {"ready": True, "slots": holder.slots, "slot_bytes": holder.slot_bytes}
                facts |= {"socket": options.socket, "pid": os.getpid(), "serving_pid": child}
                write(json.dumps(facts) if options.json else f"ready: {text}")
                systemd.notify("READY=1", f"STATUS={text}")

            return hold(holder, stop, ready)
    except Error as error:
        complain(f"llm-datadist serve: {error}")
        return 2 if isinstance(error, InvalidArgument) else 1


def _prepared(holder: _Holder, stop: StopSignals) -> int | None:
    """Touch all memory for values, and show how far that is.

    Processes of their own touch it, because memory counts for the processes that have touched it: if memory is short,
    the kernel ends the one that serves rather than this one, which keeps the values.

    Args:
        holder: the memory.
        stop: says when to end.

    Returns:
        The exit status of the command, or `None` if it goes on: 0 after a signal, 1 if a process has failed.
    """
    done, shown = 0, time.monotonic()
    while done < holder.bytes:
        end = min(done + _PREPARED_BYTES, holder.bytes)
        child = os.fork()
        if child == 0:
            os._exit(_prepare(holder, done, end))
        failed = os.waitpid(child, 0)[1] != 0
        if stop.arrived():
            return 0
        if failed:
            complain(f"llm-datadist serve: bytes {done} to {end} of the memory cannot be prepared")
            return 1
        done = end
        if time.monotonic() - shown >= _PROGRESS_SECONDS or done == holder.bytes:
            shown = time.monotonic()
            text = f"memory: {size(done)} of {size(holder.bytes)} prepared"
            complain(f"llm-datadist serve: {text}")
            # The start takes as long as it makes progress.
            systemd.notify(f"STATUS={text}", "EXTEND_TIMEOUT_USEC=60000000")
    return None


def _prepare(holder: _Holder, begin: int, end: int) -> int:
    try:
        holder.prepare(begin, end)
    except Error as error:
        complain(f"llm-datadist serve: {error}")
        return 1
    return 0


def _group(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise argparse.ArgumentTypeError(f"{name!r} is no group of this system") from None


def _parser() -> CommandParser:
    description = "Keep values for other processes, which use them with llm_datadist.Store."
    parser = CommandParser(prog="llm-datadist serve", description=description)
    parser.add_argument("--memory", required=True, metavar="SIZE", help="memory for values, such as 8GiB")
    parser.add_argument("--socket", required=True, metavar="PATH", help="path at which stores attach")
    parser.add_argument(
        "--value",
        default="64KiB",
        metavar="SIZE",
        help="size of the largest value; each takes so much (default: 64KiB)",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="copy the values of the keeper that listens at the path, if there is one, and take its place",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="take the memory for values from the system at the start"
    )
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help="file with a role (read, write or admin) and a token on each line, with which processes of other users "
        "attach; only its owner may read it",
    )
    parser.add_argument(
        "--group", type=_group, metavar="NAME", help="group whose processes may connect to the socket; needs --tokens"
    )
    parser.add_argument("--json", action="store_true", help="print the line at the start as JSON")
    return parser
