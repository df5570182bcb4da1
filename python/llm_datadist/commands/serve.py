"""``llm-datadist serve``: a keeper in a process of its own, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from llm_datadist import Error, InvalidArgument, Keeper
from llm_datadist.commands.output import CommandParser, complain, write

if TYPE_CHECKING:
    from collections.abc import Sequence

_STOP = (signal.SIGTERM, signal.SIGINT)
_LOOK_SECONDS = 5.0
"""How often the command looks whether the keeper still runs."""


def main(arguments: Sequence[str]) -> int:
    """Run a keeper until a signal ends it.

    Args:
        arguments: the arguments behind ``serve``.

    Returns:
        The exit status: 0 after a signal, 1 if the keeper cannot be opened or has stopped, 2 for wrong arguments.
    """
    options = _parser().parse_args(arguments)
    # The thread of the keeper inherits the mask, so that this thread alone receives the signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    try:
        with Keeper(memory=options.memory, socket=options.socket, value=options.value) as keeper:
            write(f"ready: {keeper.slots:,} values of {options.value} at {options.socket}")
            while signal.sigtimedwait(_STOP, _LOOK_SECONDS) is None:
                if keeper.closed:
                    complain("llm-datadist serve: the keeper has stopped")
                    return 1
    except Error as error:
        complain(f"llm-datadist serve: {error}")
        return 2 if isinstance(error, InvalidArgument) else 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _parser() -> CommandParser:
    description = "Keep values for other processes of this user, which use them with llm_datadist.Store."
    parser = CommandParser(prog="llm-datadist serve", description=description)
    parser.add_argument("--memory", required=True, metavar="SIZE", help="memory for values, such as 8GiB")
    parser.add_argument("--socket", required=True, metavar="PATH", help="path at which stores attach")
    parser.add_argument(
        "--value",
        default="64KiB",
        metavar="SIZE",
        help="size of the largest value; each takes so much (default: 64KiB)",
    )
    return parser
