"""Options of ``llm-datadist doctor`` and its exit status.

| exit status | meaning                                                                     |
| ----------- | --------------------------------------------------------------------------- |
| 0           | nothing fails on this host; the link was measured, or served until the end  |
| 1           | a finding is a PROBLEM, or a transfer of a measured link failed             |
| 2           | the options cannot be used, or the peer cannot be reached                   |
| 130         | interrupted by Ctrl-C while measuring                                       |
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.doctor import host, paths, report, software
from llm_datadist.doctor.findings import PROBLEM
from llm_datadist.doctor.measure import measure
from llm_datadist.doctor.probe import OWNER, Probe
from llm_datadist.option_table import TOKEN_VARIABLES
from llm_datadist.standard_output import write

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_PORT = 26010
_SECONDS = 10.0
_MOST_SECONDS = 86_400.0
_STANDARD_OUTPUT = "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine this host, serve, or measure a link, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    run = _serve if options.serve is not None else _measure if options.to is not None else _examine
    try:
        return run(options)
    except ConnectionError as error:
        return _failed(f"{error}. {_WHY}", 2)
    except (ValueError, TypeError) as error:
        return _failed(str(error), 2)
    except LLMException as error:
        wrong = error.status_code == LLMStatusCode.LLM_PARAM_INVALID
        return _failed(f"{error.status_code.name}: {error}", 2 if wrong else 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


_WHY = (
    "Run `llm-datadist doctor --serve` there, allow the port in firewalls, and give both sides the same token "
    "(--token-file), without which a host admits no other"
)


def _examine(options: argparse.Namespace) -> int:
    findings = [*host.examine(), *software.examine(options.ucx_library or software.UCX_LIBRARY)]
    token = options.token_file is not None or any(name in os.environ for name in TOKEN_VARIABLES.values())
    expected = list(paths.expected(findings, token=token))
    text = f"{report.findings_text(findings)}\n\n{report.paths_text(expected)}"
    found = {"findings": [asdict(finding) for finding in findings], "paths": [path._asdict() for path in expected]}
    _print(options, text, found)
    return int(any(finding.verdict == PROBLEM for finding in findings))


def _serve(options: argparse.Namespace) -> int:
    address, port = options.serve
    probe = Probe(OWNER, f"{address}:{port}", _extra(options))
    try:
        write(f"serving at {address}:{port}; on the other host, run: llm-datadist doctor --to HOST:{port}")
        time.sleep(_MOST_SECONDS if options.seconds is None else options.seconds)
    except KeyboardInterrupt:
        pass
    finally:
        probe.close()
    return 0


def _measure(options: argparse.Namespace) -> int:
    seconds = _SECONDS if options.seconds is None else options.seconds
    name, port = options.to
    try:
        ip = socket.gethostbyname(name)
    except OSError as error:
        raise ConnectionError(f"cannot find {name}: {error}") from error
    rows = measure(ip, port, seconds, _extra(options))
    _print(options, report.rows_text(rows), {"link": [asdict(row) for row in rows]})
    return 0


def _extra(options: argparse.Namespace) -> dict[str, Any]:
    given = {"link_token_file": options.token_file, "ucx_library": options.ucx_library}
    return {name: value for name, value in given.items() if value is not None}


def _print(options: argparse.Namespace, text: str, found: dict[str, Any]) -> None:
    """Print the tables, and write the JSON. With ``--json -``, standard output gets only the JSON."""
    if options.json == _STANDARD_OUTPUT:
        print(text, file=sys.stderr)  # noqa: T201  (a command prints)
        write(json.dumps(found, indent=2))
        return
    write(text)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _failed(text: str, status: int) -> int:
    print(f"doctor: {text}", file=sys.stderr)  # noqa: T201  (a command prints)
    return status


def _address(text: str) -> tuple[str, int]:
    name, _, port = text.rpartition(":")
    if not (name and port.isdecimal() and 1 <= int(port) <= 65535):  # noqa: PLR2004  (the largest port)
        raise argparse.ArgumentTypeError(f"{text!r} must be HOST:PORT with a port of 1 to 65535")
    return name, int(port)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.1 <= seconds <= _MOST_SECONDS:  # noqa: PLR2004  (see the text)
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds from 0.1 to {_MOST_SECONDS:g}")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-datadist doctor",
        description="Examine this host: devices, networks, limits and versions, and the path that peers would use.",
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--to", type=_address, metavar="HOST:PORT", help="measure the link to a host that serves")
    ways.add_argument(
        "--serve",
        type=_address,
        nargs="?",
        const=("0.0.0.0", _PORT),  # noqa: S104  (without a token, only this user of this host is admitted)
        metavar="IP:PORT",
        help=f"serve until Ctrl-C, so that another host can measure the link (default 0.0.0.0:{_PORT})",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the token of both sides (link_token_file)")
    parser.add_argument("--ucx-library", metavar="FILE", help="library of UCX (ucx_library)")
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="how long --to measures (default 10), or --serve serves"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE as JSON; - for standard output")
    return parser
