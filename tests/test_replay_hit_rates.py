"""Hit rates over the capacity of a cache: `replay --hit-rates`, and a real keeper, beside an LRU cache written here.

Not for: replays (`test_replay.py`), and reading traces (`test_replay_parts.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock
from xml.etree import ElementTree as ET

import pytest

from llm_datadist import Keeper, Store
from llm_datadist.commands.output import CommandParser, OutputError
from llm_datadist.commands.replay.cli import main
from llm_datadist.commands.replay.hit_rates import hit_rates
from llm_datadist.commands.replay.trace import Request, make_trace, read_trace
from test_replay_parts import GOOD, PUBLIC_TRACE, public_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

VALUE = 1024


def found_by_lru(requests: Sequence[Request], capacity: int) -> list[int]:
    """Return how many blocks each request finds as a whole prefix in an LRU cache. The last block is replaced first."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in requests:
        prefix = 0
        while prefix < len(request.blocks) and request.blocks[prefix] in cache:
            prefix += 1
        found.append(prefix)
        for block in reversed(request.blocks):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return found


def found_by_keeper(requests: Sequence[Request], capacity: int, socket: Path) -> list[int]:
    """Return how many blocks each request finds as a whole prefix in a keeper, whose values are compared."""

    def value(block: int) -> bytes:
        return block.to_bytes(8, "little") * (VALUE // 8)

    found = []
    keeper = Keeper(memory=capacity * VALUE, value=VALUE, socket=socket)
    with keeper, Store(socket, namespace="a trace", value=VALUE, timeout=60.0) as store:
        assert keeper.slots == capacity
        for request in requests:
            keys = [hashlib.sha224(b"%d" % block).digest() for block in request.blocks]
            prefix = [*store.exists(keys), False].index(False)
            buffers = [bytearray(VALUE) for _ in range(prefix)]
            assert store.get(keys[:prefix], buffers) == [True] * prefix
            assert buffers == [value(block) for block in request.blocks[:prefix]]
            store.put(keys, [value(block) for block in request.blocks])
            found.append(prefix)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_finds_what_a_cache_of_each_size_finds(seed: int) -> None:
    requests = make_trace(200, seed)
    capacities = [1, 2, 3, 7, 30, 100, 300, 1000, 2500, 4000, 99_999]
    assert [rate.hits for rate in hit_rates(requests, capacities)] == [
        sum(found_by_lru(requests, capacity)) for capacity in capacities
    ]


def test_blocks_after_one_that_is_gone_are_not_found() -> None:
    requests = [Request(0, 1, 1, blocks) for blocks in ((1, 2, 3), (9, 3), (1, 2, 3))]
    for capacity in range(1, 6):
        assert hit_rates(requests, [capacity])[0].hits == sum(found_by_lru(requests, capacity)), capacity
    assert [rate.hits for rate in hit_rates(requests)] == [0, 0, 3]  # 1, 2 and 4 blocks


@pytest.mark.parametrize("capacity", [400, 1500])
def test_keeper_finds_as_much_as_an_lru_cache(tmp_path: Path, capacity: int) -> None:
    requests = make_trace(200, seed=7)
    expected = found_by_lru(requests, capacity)
    assert 0 < sum(expected) < sum(found_by_lru(requests, 99_999))
    assert found_by_keeper(requests, capacity, tmp_path / "keeper") == expected


@public_trace
def test_public_trace_has_the_known_hit_rates() -> None:
    rates = hit_rates(read_trace(str(PUBLIC_TRACE)), [2000, 10_000, 20_000, 50_000, 182_790])
    assert [round(100 * rate.share, 1) for rate in rates] == [5.4, 21.2, 28.8, 35.5, 36.6]


def test_command_writes_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, picture = tmp_path / "rates.json", tmp_path / "rates.svg"
    shape = ["--requests", "150", "--layers", "32", "--heads", "8", "--head-dim", "128"]
    assert main(["--hit-rates", *shape, "--json", str(json_file), "--svg", str(picture)]) == 0
    found = json.loads(json_file.read_text())
    assert (found["requests"], found["block_bytes"]) == (150, 64 << 20)
    requests = make_trace(150, seed=1)
    total = sum(len(request.blocks) for request in requests)
    assert found["hit_rates"][-1]["blocks"] == found["distinct_blocks"]
    for row in found["hit_rates"]:
        assert row["hits"] == sum(found_by_lru(requests, row["blocks"]))
        assert row["share"] == row["hits"] / total
        assert row["bytes"] == row["blocks"] << 26
    printed = capsys.readouterr().out
    lines = [re.split(r"  +", line.strip()) for line in printed.splitlines()[3:]]
    assert lines == [
        [f"{row['blocks']:,}", f"{row['bytes'] / 2**30:,.3f}", f"{100 * row['share']:.1f} %"]
        for row in found["hit_rates"]
    ]
    root = ET.fromstring(picture.read_text())  # noqa: S314  (our own file)
    curve = root.findall(".//{*}path")[-1].attrib["d"]
    heights = [float(spot.split()[1]) for spot in curve[1:].split("L")]
    assert 1 < len(heights) < len(found["hit_rates"]), "the flat part is left out"
    assert heights == sorted(heights, reverse=True), "more memory finds more"


def test_picture_of_the_docs_is_up_to_date(tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[1] / "docs" / "how-to"
    (command,) = re.findall("^llm-datadist replay --hit-rates (.*)$", (docs / "store.md").read_text(), re.MULTILINE)
    picture = tmp_path / "hit-rates.svg"
    assert main(["--hit-rates", *command.replace("hit-rates.svg", str(picture)).split()]) == 0
    assert picture.read_text() == (docs / "hit-rates.svg").read_text()


def test_trace_of_one_block_has_a_picture(tmp_path: Path) -> None:
    path = write_trace(tmp_path, {**GOOD, "input_length": 5, "hash_ids": [4]})
    assert main([path, "--hit-rates", "--svg", str(tmp_path / "one.svg")]) == 0
    assert ET.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")  # noqa: S314


def test_title_has_the_name_of_any_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / os.fsdecode(b"a <b>&\x01\n\xff.jsonl")
    path.write_bytes(Path(write_trace(tmp_path, GOOD)).read_bytes())
    assert main([str(path), "--hit-rates", "--svg", str(tmp_path / "one.svg")]) == 0
    title = ET.parse(tmp_path / "one.svg").getroot().findtext(".//{*}text")  # noqa: S314
    assert title is not None
    assert title.startswith("a <b>&???.jsonl: 1 requests, ")
    assert str(tmp_path) in capsys.readouterr().out


def test_results_are_written_although_the_picture_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, json_file = write_trace(tmp_path, GOOD), tmp_path / "rates.json"
    monkeypatch.setattr(CommandParser, "check_json", Mock())  # the disk is full only later
    with pytest.raises(OutputError, match="/dev/full"):
        main([trace, "--hit-rates", "--svg", "/dev/full", "--json", str(json_file)])
    assert json.loads(json_file.read_text())["requests"] == 1
    assert "hit rate" in capsys.readouterr().out
