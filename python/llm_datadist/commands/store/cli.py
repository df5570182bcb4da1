"""Options of ``llm-datadist store``, and its exit status (docs/cli.md)."""

from __future__ import annotations

import argparse
import contextlib
import pwd
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from llm_datadist.commands.output import CommandParser, complain, seconds, write_results
from llm_datadist.commands.store import report, top
from llm_datadist.native import Error, InvalidArgument, KeeperObserver, PeerLost, Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.stats import StoredNamespace

_KEY_BYTES = 28
_LIMIT = 100
_TIMEOUT = 5.0


class Shown(NamedTuple):
    """A result: for people, and for programs."""

    text: str
    data: dict[str, Any]


class UnknownNamespaceError(Exception):
    """The keeper has no namespace of this name."""


class DropFailedError(Exception):
    """The keeper has not dropped all values."""


def main(arguments: Sequence[str]) -> int:
    """Show what a keeper has, or drop values.

    Args:
        arguments: the arguments behind ``store``.

    Returns:
        The exit status: 0 for success, 1 if no keeper answers or it has no such namespace, 2 for wrong arguments, 130
        for Ctrl-C, except of ``top``, of which that is the usual end.
    """
    parser, actions = _parser()
    options = parser.parse_args(arguments)
    actions[options.action].check_json(options.json)
    try:
        if options.action == "top":
            return top.run(options.socket, options.interval, options.json, _access(options))
        with KeeperObserver(options.socket, timeout=options.timeout, **_access(options)) as observer:
            shown = _SHOW[options.action](observer, options)
        write_results(shown.text, shown.data, options.json)
    except PeerLost:
        return _failed(f"no keeper listens at {options.socket}", 1)
    except (UnknownNamespaceError, DropFailedError) as error:
        return _failed(str(error), 1)
    except Error as error:
        return _failed(str(error), 2 if isinstance(error, InvalidArgument) else 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    return 0


def _stats(observer: KeeperObserver, options: argparse.Namespace) -> Shown:
    counted = observer.stats()
    return Shown(report.stats(options.socket, counted), dict(counted))


def _ls(observer: KeeperObserver, options: argparse.Namespace) -> Shown:
    if options.namespace is None:
        listed = observer.namespaces()
        return Shown("\n".join(report.namespaces(listed)), {"namespaces": listed})
    namespace = _namespace(observer, options.namespace)
    values = observer.values(namespace["number"], limit=options.limit)
    rows = [{**row, "key": row["key"].hex()} for row in values]
    return Shown(report.values(values, namespace), {"namespace": namespace, "values": rows})


def _drop(observer: KeeperObserver, options: argparse.Namespace) -> Shown:
    namespace = _namespace(observer, options.namespace)
    # Only if there are values, because a store that attaches disconnects readers with other settings.
    dropped = _drop_values(namespace, options) if namespace["values"] else 0
    return Shown(f"dropped {dropped:,} values", {"dropped": dropped})


def _drop_values(namespace: StoredNamespace, options: argparse.Namespace) -> int:
    dropped = 0
    terms: dict[str, Any] = {"value": namespace["value"], "checksums": namespace["checksums"]}
    with Store(
        options.socket, namespace=namespace["text"], timeout=options.timeout, **terms, **_access(options)
    ) as store:
        calls = [store.clear] if options.all else [partial(store.drop, keys) for keys in _batches(options.key)]
        for call in calls:
            with _failure(dropped):
                dropped += call()
    return dropped


@contextlib.contextmanager
def _failure(dropped: int) -> Iterator[None]:
    """Add to an error what earlier calls have dropped. Its text has what its own call has dropped."""
    try:
        yield
    except Error as error:
        before = f"; earlier calls have dropped {dropped:,} values" if dropped else ""
        raise DropFailedError(f"{error}{before}") from error


_SHOW = {"stats": _stats, "ls": _ls, "drop": _drop}


def _access(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a client shows to a keeper of another user."""
    return {"token_file": options.token_file, "keeper_user": options.keeper_user}


def _user(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,10}", text):
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a user of this system nor a number of one") from None


def _batches(keys: list[bytes]) -> list[list[bytes]]:
    """Return keys in lists that one call takes."""
    return [keys[at : at + 4096] for at in range(0, len(keys), 4096)]


def _namespace(observer: KeeperObserver, name: str) -> StoredNamespace:
    """Return the namespace with this text, or else with this number.

    A text occurs more than once while only readers with different settings use it. At most one of them has values.
    """
    listed = observer.namespaces()
    found = [row for row in listed if row["text"] == name] or [row for row in listed if str(row["number"]) == name]
    if not found:
        raise UnknownNamespaceError(f"--namespace: {name!r} is none of the {len(listed):,} namespaces of the keeper")
    return max(found, key=lambda row: row["values"] > 0)


def _key(text: str) -> bytes:
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}", text):
        digits = f"{2 * _KEY_BYTES} hexadecimal digits ({_KEY_BYTES} bytes)"
        raise argparse.ArgumentTypeError(f"{text!r} is no key: {digits} are needed, and it has {len(text)} characters")
    return bytes.fromhex(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 999,999,999")
    return int(text)


def _failed(text: str, status: int) -> int:
    complain(f"llm-datadist store: {text}")
    return status


def _parser() -> tuple[CommandParser, dict[str, CommandParser]]:
    description = "Show what a keeper has (llm-datadist serve), or drop values."
    parser = CommandParser(prog="llm-datadist store", description=description)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summaries = {
        "stats": "print its counters",
        "ls": "list its namespaces, or the values of one, the most recently used first",
        "drop": "drop values, and print how many",
        "top": "show its counters and namespaces every second, until q or Ctrl-C",
    }
    parsers = {}
    for action, summary in summaries.items():
        one = parsers[action] = actions.add_parser(action, help=summary, description=f"{summary.capitalize()}.")
        one.add_argument("--socket", required=True, metavar="PATH", help="path at which the keeper listens")
        one.add_argument("--json", metavar="FILE", help=_JSON[action == "top"])
        one.add_argument("--token-file", metavar="FILE", help=f"file with a token of the keeper: role {_ROLES[action]}")
        one.add_argument("--keeper-user", type=_user, metavar="USER", help="user of the keeper (default: this user)")
        if action != "top":
            text = f"most seconds to wait for the keeper (default: {_TIMEOUT:.0f})"
            one.add_argument("--timeout", type=seconds(4), default=_TIMEOUT, metavar="S", help=text)
    named = "text of a namespace, or its number"
    parsers["ls"].add_argument("--namespace", metavar="NAME", help=f"list its values: {named}")
    parsers["ls"].add_argument(
        "--limit", type=_count, default=_LIMIT, metavar="COUNT", help=f"most values to list (default: {_LIMIT})"
    )
    parsers["drop"].add_argument("--namespace", required=True, metavar="NAME", help=named)
    what = parsers["drop"].add_mutually_exclusive_group(required=True)
    what.add_argument("--key", type=_key, action="append", metavar="HEX", help="key to drop; may be given again")
    what.add_argument("--all", action="store_true", help="drop all values of the namespace")
    parsers["top"].add_argument(
        "--interval", type=seconds(4), default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )
    return parser, parsers


_ROLES = {"stats": "read", "ls": "admin", "drop": "admin", "top": "admin"}

_JSON = (
    "also write the results to FILE as JSON; - prints them, and the text goes to standard error",
    "also write one line of JSON to FILE at each refresh; - prints the lines, and no text",
)
