"""Options of ``llm-datadist doctor``, and its exit status (docs/cli.md)."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist.commands.doctor import devices, engine, host, link, report
from llm_datadist.commands.doctor.finding import PROBLEM
from llm_datadist.commands.output import CommandParser, OutputError, complain, seconds, write, write_results
from llm_datadist.native import Error, InvalidArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_SERVED = "0.0.0.0:26500"
_SECONDS = 10.0
_NARROWEST, _WIDEST = 80, 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine this host, serve measurements or measure a link, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        if options.serve is not None:
            return _serve(options)
        return _examine(options) if options.to is None else _measure(parser, options)
    except link.MeasureError as error:
        return _failed(str(error), 2 if error.invalid else 1)
    except OutputError as error:
        return _failed(str(error), 1)
    except Error as error:
        return _failed(f"the engine failed: {link.shown(error)}", 2 if isinstance(error, InvalidArgument) else 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def _examine(options: argparse.Namespace) -> int:
    """Print what was found on this host."""
    root = Path("/")
    found = [*host.findings(root), *devices.findings(root), *engine.findings(root, _engine_options(options))]
    result = {"findings": [asdict(finding) for finding in found]}
    write_results(report.findings(found, _width()), result, options.json)
    return int(any(finding.verdict == PROBLEM for finding in found))


def _measure(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Measure the link and print the table."""
    address, limit_s = _resolved(parser, options.to), options.seconds or _SECONDS
    logger = logging.getLogger("LLM_DATADIST")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the table has the reasons of failures
    try:
        rows = link.measure(address, limit_s, _engine_options(options))
    finally:
        logger.setLevel(level)
    result = {"peer": address, "seconds": limit_s, "rows": [asdict(row) for row in rows]}
    write_results(report.measurements(address, rows, _width()), result, options.json)
    return 0


def _serve(options: argparse.Namespace) -> int:
    """Serve measurements. Ctrl-C is the usual end."""
    try:
        link.serve({"listen": options.serve, **_engine_options(options)}, options.seconds)
    except KeyboardInterrupt:
        write("doctor: ended")
    return 0


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("token_file", "ucx_library", "backend")}
    return {name: value for name, value in given.items() if value is not None}


def _failed(text: str, status: int) -> int:
    complain(f"doctor: {text}")
    return status


def _width() -> int:
    return min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST)


def _resolved(parser: argparse.ArgumentParser, address: str) -> str:
    """Return an address with a number in place of the name of a host."""
    name, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError) as error:
        parser.error(f"--to: {address!r} is not HOST:PORT or [IPV6]:PORT of a known host: {error}")
    # By default, `--serve` listens at an IPv4 address.
    family, *_, socket_address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return f"[{socket_address[0]}]:{port}" if family == socket.AF_INET6 else f"{socket_address[0]}:{port}"


def _check(parser: CommandParser, options: argparse.Namespace) -> None:
    """Check that the options belong together."""
    if options.serve is None and options.backend is not None:
        parser.error("--transfer-backend belongs to --serve; --to measures every path")
    if options.serve is None and options.to is None:
        for name in ("token_file", "seconds"):
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} belongs to --serve or --to")
    if options.serve is not None and options.json is not None:
        parser.error("--json belongs to a report or a measurement, not to --serve")
    parser.check_json(options.json)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="llm-datadist doctor",
        description="Examine this host: limits, networks, RDMA devices, and how an engine reads another process. With "
        "--to, measure the link to another machine, on which --serve runs.",
        epilog="Exit status: 0 if no problem was found or the link was measured; 1 for a problem, a peer that cannot "
        "be measured or a failure of the engine; 2 for options that cannot be used; 130 for Ctrl-C.",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    served = f"wait for measurements at this address until Ctrl-C ({_SERVED}); port 0 takes a free port"
    add("--serve", nargs="?", const=_SERVED, metavar="IP:PORT", help=served)
    add("--to", metavar="HOST:PORT", help="measure the link to this address in about ten seconds")
    add = parser.add_argument
    token = "file with the token of both sides; needed between hosts and between users"  # noqa: S105
    add("--token-file", type=os.path.abspath, metavar="FILE", help=token)
    add(
        "--ucx-library",
        type=os.path.abspath,
        metavar="FILE",
        help="library of UCX (libucp.so.0, which the system finds)",
    )
    moved = "with --serve: what may move bytes between hosts (auto); ucx fails if UCX cannot be used"
    add("--transfer-backend", dest="backend", choices=("auto", "sockets", "ucx"), help=moved)
    limit = f"how long to measure ({_SECONDS:g}), or to serve (until Ctrl-C)"
    add("--seconds", type=seconds(5), metavar="S", help=limit)
    add("--json", metavar="FILE", help="also write the results to FILE as JSON; - prints them in place of the table")
    return parser
