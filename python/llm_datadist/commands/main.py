"""The commands ``serve``, ``store``, ``replay``, ``doctor``, ``options`` and ``--version``.

Sub-commands are imported when they are called, so that only ``replay`` imports numpy.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llm_datadist import __version__
from llm_datadist.commands.output import CommandParser, OutputError, complain, write

if TYPE_CHECKING:
    from collections.abc import Sequence

_NARROWEST, _WIDEST = 40, 100
_LOG_FORMAT = "[%(levelname)s] %(process)d:%(asctime)s.%(msecs)03d: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Args:
        arguments: the arguments without the name of the program; those of the process by default.

    Returns:
        The exit status: 0 for success, 1 if the results cannot be written, 2 for wrong arguments or a package that the
        command needs and that is missing, else the status of the sub-command.
    """
    try:
        return _run(arguments)
    except OutputError as error:
        complain(f"llm-datadist: {error}")
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # Log lines go to standard error, because standard output is for results. Handlers that the program set stay.
    logging.basicConfig(format=_LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr)
    if options.command == "options":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        from llm_datadist.commands.options import table  # noqa: PLC0415  (only this command needs it)

        write(table(min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)))
        return 0
    if options.command == "doctor":
        from llm_datadist.commands.doctor.cli import main as doctor  # noqa: PLC0415  (only this command needs it)

        return doctor(rest)
    if options.command == "serve":
        from llm_datadist.commands.serve import main as serve  # noqa: PLC0415  (only this command needs it)

        return serve(rest)
    if options.command == "store":
        from llm_datadist.commands.store.cli import main as store  # noqa: PLC0415  (only this command needs it)

        return store(rest)
    try:
        import numpy as np  # noqa: F401, PLC0415  (only this command needs it)
    except ImportError:
        complain("llm-datadist: replay needs numpy: pip install llm-datadist[replay]")
        return 2
    from llm_datadist.commands.replay.cli import main as replay  # noqa: PLC0415  (it imports numpy)

    return replay(rest)


def _parser() -> CommandParser:
    called = Path(sys.argv[0]).name
    program = "python -m llm_datadist" if called == "__main__.py" else "llm-datadist"
    parser = CommandParser(prog=program, description="Commands of llm_datadist.")
    parser.add_argument("--version", action="version", version=f"llm_datadist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", add_help=False, help="keep values for other processes, which outlive them")
    commands.add_parser("store", add_help=False, help="show what a keeper has, or drop values")
    commands.add_parser("replay", add_help=False, help="replay a request trace through a prefill and a decode process")
    commands.add_parser("doctor", add_help=False, help="examine this host, or measure the link to another one")
    commands.add_parser("options", help="print every option of an engine with its type, default and meaning")
    return parser
