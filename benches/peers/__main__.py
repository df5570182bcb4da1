"""Compares ours with other systems: ``make bench-peers``, or ``.venv-peers/bin/python benches/peers [--quick]``.

Runs every group of ``groups``, each part in its own process with a time limit, and writes ``peers.json``, ``peers.md``
and a picture. A run of some groups keeps the rows of the others. In this folder, a *peer* is another system, and the
*limit* is a hand-written copy loop. Not for: measuring (the groups).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import environment
import picture
import report
import scale
from ask import BREADCRUMB, Ask
from groups import GROUPS, QUICK_ROUNDS, Group
from rows import LIMIT, OURS, Extra, Row, read, written

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIES = 4
RESULTS = environment.ROOT / "benches" / "results"
PICTURES = environment.ROOT / "docs" / "performance"
Found = Union[Row, Extra]


def main() -> None:
    """Read the options, and measure and render accordingly."""
    options = parsed()
    if options.part:
        group, part, record = options.part
        child(group, part, Path(record), Ask.of(options.ask))
        return
    file = options.out / "peers.json"
    for folder in (options.out, options.pictures):
        folder.mkdir(parents=True, exist_ok=True)
    if not options.render:
        all_groups(options, file)
    document, rows = read(options.source or file)
    link = f"{os.path.relpath(options.pictures, options.out)}/" if options.pictures != options.out else ""
    (options.out / "peers.md").write_text(report.markdown(document, rows, link))
    if "scale" in document["extra"]:
        scale.draw(document["extra"]["scale"], options.pictures)
    brief = sorted(name for name, moment in document["groups"].items() if moment["quick"])
    said = picture.draw(rows, options.pictures, f"quick run of {', '.join(brief)}" if brief else "")
    if said:
        print(said, flush=True)


def parsed() -> argparse.Namespace:
    """Parse the options."""
    names = [group.name for group in GROUPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds: minutes instead of tens of them")
    parser.add_argument("--only", default=",".join(names), help=f"groups: {','.join(names)}")
    parser.add_argument("--systems", default="", help="peers, beside ours and the limit; all by default")
    parser.add_argument("--rounds", type=int, default=0, help="rounds after the warm-up: 5, of faults 1; 2 when quick")
    parser.add_argument("--mib", type=int, default=256, help="moved in one round")
    parser.add_argument("--apart", action="store_true", help="bind the two sides of each pair to different processors")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of peers.json and peers.md")
    parser.add_argument("--pictures", type=Path, help="folder of the pictures: docs/performance, or that of --out")
    parser.add_argument("--render", action="store_true", help="measure nothing: write table and picture anew")
    parser.add_argument("--source", type=Path, help="render this peers.json instead of the one in --out")
    parser.add_argument("--parts", default="", help="of a full run's parts those with one of these words: A,B")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.pictures = options.pictures or (PICTURES if options.out == RESULTS else options.out)
    unknown = set(options.only.split(",")) - set(names)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not among {', '.join(names)}")
    return options


def all_groups(options: argparse.Namespace, file: Path) -> None:
    """Measure the requested groups. Write the file after each, so that an interrupted run keeps the earlier ones."""
    document, rows = read(file) if file.exists() else ({"groups": {}, "extra": {}}, [])
    document["environment"] = environment.described()
    wanted = [group for group in GROUPS if group.name in options.only.split(",")]
    announce([(group.name, group.about_s(options.quick, rounds_of(options, group))) for group in wanted])
    for group in wanted:
        ask = Ask(
            quick=options.quick,
            rounds=rounds_of(options, group),
            systems=tuple(filter(None, options.systems.split(","))),
            mib=options.mib,
            apart=options.apart,
        )
        began = time.monotonic()
        found = list(whole_group(group, ask, [word for word in options.parts.split(",") if word]))
        rows = [row for row in rows if row.group != group.name]
        rows += [item for item in found if isinstance(item, Row)]
        document["extra"].update({item.name: item.value for item in found if isinstance(item, Extra)})
        document["groups"][group.name] = {
            **environment.moment(),
            "rounds": ask.rounds,
            "MiB a round": ask.mib,
            "quick": ask.quick,
            "sides on different processors": ask.apart,
            "seconds": round(time.monotonic() - began),
        }
        rows.sort(key=lambda row: order(row.group))
        file.write_text(written(document, rows))


def rounds_of(options: argparse.Namespace, group: Group) -> int:
    """The requested number of rounds, or the default of the group."""
    return int(options.rounds or (QUICK_ROUNDS if options.quick else group.rounds))


def announce(times: list[tuple[str, float]]) -> None:
    """Print the approximate duration with all peers installed."""
    for name, seconds in (*times, ("all", sum(seconds for _, seconds in times))):
        print(f"{name:10} about {seconds / 60:4.1f} min", flush=True)


def order(group: str) -> int:
    """The position of a group in the file."""
    return [known.name for known in GROUPS].index(group)


def whole_group(group: Group, ask: Ask, words: list[str]) -> Iterator[Found]:
    """Run every part of a group in turn. With `words`, run the parts of a full run whose name has one of them."""
    try:
        listed = importlib.import_module(group.module).parts
        known = listed(dataclasses.replace(ask, quick=ask.quick and not words))
    except ImportError as failure:
        yield Row(group.name, "all", OURS, note=f"not here: {failure}")
        return
    for part in (part for part in known if not words or any(word in part for word in words)):
        began = time.monotonic()
        yield from whole_part(group, part, ask)
        print(f"{group.name:10} {part:32} {time.monotonic() - began:6.1f} s", flush=True)


def whole_part(group: Group, part: str, ask: Ask) -> Iterator[Found]:
    """Run one part. If a peer ends the process, run the part again without this peer."""
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            record = Path(folder) / "record"
            record.touch()
            ended = in_process(group, part, record, dataclasses.replace(ask, folder=folder))
            at_it = crumb(Path(folder))
            found = list(recorded(record))
        if ended is None:
            yield from found
            return
        print(f"{group.name} {part}: {at_it or 'nobody'} was running: {ended}", flush=True)
        if at_it in ("", OURS, LIMIT):
            yield from found
            yield Row(group.name, part, at_it or OURS, note=ended)
            return
        yield Row(group.name, part, at_it, note=f"took the process down: {ended}")
        ask = dataclasses.replace(ask, without=(*ask.without, at_it))
    yield Row(group.name, part, OURS, note="given up: too many peers took the process down")


def in_process(group: Group, part: str, record: Path, ask: Ask) -> Optional[str]:
    """Run one part in its own process. Return the failure as text, or None."""
    limit = group.quick_s if ask.quick else group.limit_s
    log = Path(ask.folder) / "log"
    words = [sys.executable, str(Path(__file__).parent), "--part", group.name, part, str(record), "--ask", ask.text()]
    with log.open("w") as out:
        # The part gets its own session, so that `end` can kill its child processes too.
        process = subprocess.Popen(  # noqa: S603  (this program)
            words, env=environment.variables(), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            end(process)
            raise
        end(process)
    if code == 0:
        return None
    last = " ".join(log.read_text(errors="replace").splitlines()[-1:])[-240:]
    if code is None:
        return f"cut off after {limit} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}: {last}"
    return f"ended with {code}: {last}"


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a part and all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def crumb(folder: Path) -> str:
    """The system that ran last."""
    path = folder / BREADCRUMB
    return path.read_text() if path.exists() else ""


def recorded(record: Path) -> Iterator[Found]:
    """The rows and documents that a part wrote before it ended."""
    for line in record.read_text().splitlines():
        kind, fields = json.loads(line)
        yield Row(**fields) if kind == "row" else Extra(**fields)


def child(group: str, part: str, record: Path, ask: Ask) -> None:
    """Run one part, in its process."""
    module = importlib.import_module(next(known.module for known in GROUPS if known.name == group))
    with record.open("a") as lines:
        for item in module.run(ask, part):
            kind = "row" if isinstance(item, Row) else "extra"
            lines.write(json.dumps([kind, dataclasses.asdict(item)]) + "\n")
            lines.flush()
    # The threads of some peers crash at a normal exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if shutil.which("git") is None:
        print("no git: the commit is not known")
    main()
