"""Entry point of ``python -m llm_datadist``: hands the arguments to a sub-command. Not for the work itself.

Sub-commands are imported only when they are called, so that importing the package stays light.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sub-command that the arguments name and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m llm_datadist", description="Commands of llm_datadist.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("replay", add_help=False, help="replay a request trace as a serving node would")
    _, rest = parser.parse_known_args(arguments)
    from llm_datadist.replay.cli import main as replay  # noqa: PLC0415  (it imports numpy)

    return replay(rest)


if __name__ == "__main__":
    sys.exit(main())
