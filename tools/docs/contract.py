"""The items of the API contract, and a pytest plugin that records which test proves which item and how it ended.

An item is something that the original documentation specifies or uses (contract §19), or a line of the acceptance
checklist (contract §20). A test names its items with `@pytest.mark.contract("19.allocate-cache", "20.16")`. `make
conformance` runs all marked tests and writes `docs/llm-datadist/conformance.md`. Not for: the proofs (these are the
marked tests), or whether the table is correct (`test_conformance.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "llm-datadist" / "conformance.md"
HEAD = 15  # lines of the table's page above its rows
SHARED = ROOT.parent / "shared"
SEEDS = SHARED / "seeds"
SPEC = SHARED / "spec" / "python-api.md"
NO_COMPILER = "no C++ compiler"
present = pytest.mark.shared_documents


class Item(NamedTuple):
    """One item: its key, the sections with its rules, and its title (verbatim from §19, shortened from §20)."""

    key: str
    section: str
    title: str


ITEMS = (
    Item("19.allocate-cache", "7.1, 12", "CacheManager.allocate_cache"),
    Item("19.double-reference", "12.3", "double reference (id + keys), delayed release"),
    Item("19.key-per-slot", "12.2", "one key per batch slot, placeholder UINT64_MAX, trailing omission"),
    Item("19.last-key-wins", "12.2", "duplicates: last wins"),
    Item("19.bound-key", "12.2", "LLMException when a key is already bound"),
    Item("19.pool-first", "7.1", "pool must be configured first"),
    Item("19.deallocate-cache", "7.2", "CacheManager.deallocate_cache, no-op when missing"),
    Item("19.remove-cache-key", "7.5", "CacheManager.remove_cache_key, no-op when missing"),
    Item("19.copy-cache", "7.9", "CacheManager.copy_cache"),
    Item("19.copy-cache-range", "7.9, 15", "offset, size −1/>0, req_id in logs"),  # noqa: RUF001
    Item("19.allocate-blocks-cache", "7.3", "CacheManager.allocate_blocks_cache"),
    Item("19.deallocate-blocks-cache", "7.4", "CacheManager.deallocate_blocks_cache"),
    Item("19.copy-blocks", "7.10", "CacheManager.copy_blocks"),
    Item("19.swap-blocks", "7.11", "CacheManager.swap_blocks"),
    Item("19.mem-pool-cfg", "5.1", "LLMConfig.mem_pool_cfg"),
    Item("19.host-mem-pool-cfg", "5.1", "LLMConfig.host_mem_pool_cfg, 20 GB"),
    Item("19.transfer-cache-async", "8, 9", "KvCacheManager.transfer_cache_async"),
    Item("19.transfer-blocks", "8", "block index rules, dst_block_memory_size 0 ≡ omitted"),
    Item("19.transfer-concurrency", "8.6", "concurrency restrictions"),
    Item("19.cpp-copy-kv-cache", "13.2", "C++ CopyKvCache"),
    Item("19.cpp-push-kv-cache", "13.3", "C++ PushKvCache, KvCacheExtParam"),
    Item("19.cpp-types", "13.1", "C++ Cache, CacheDesc, CacheIndex, AllocateCache, Initialize"),
    Item(
        "19.cpp-codes",
        "3.1",
        "C++ codes LLM_SUCCESS, LLM_PARAM_INVALID, LLM_NOT_YET_LINK, LLM_TIMEOUT, LLM_KV_CACHE_NOT_EXIST",
    ),
    Item("19.cache-desc", "4.2", "CacheDesc constructor"),
    Item("19.cache-key", "4.6", "CacheKey constructor (CacheKey(1, req_id=1))"),
    Item("19.blocks-cache-key", "4.5", "BlocksCacheKey constructor"),
    Item("19.cache", "4.3", "Cache, Cache.create_cpu_cache"),
    Item("19.kv-cache", "4.4", "KvCache"),
    Item("19.transfer-config", "4.11", "TransferConfig(dst_cluster_id, dst_addrs, range, batch)"),
    Item("19.layer-synchronizer", "4.9", "LayerSynchronizer.synchronize_layer"),
    Item("19.cache-task", "4.13, 8.4", "CacheTask.synchronize, get_results"),
    Item("19.llm-exception", "3.1", "LLMException"),
    Item("19.float16", "3.2", "DataType.DT_FLOAT16"),
    Item("19.llm-config", "5", "LLMConfig constructor"),
    Item("19.sync-kv-timeout", "5", "sync_kv_timeout"),
    Item("19.pulls-and-keys", "12.3", "pull_cache / push_cache (effect on keys)"),
    Item("19.pulls-and-transfers", "8.6", "pull_cache, pull_blocks (no concurrency with transfer)"),
    Item("19.star-import", "1.1", "star import from llm_datadist import *"),
    Item("20.1", "1.1", "26 top-level names, v2_list of 23, unknown attributes"),
    Item("20.2", "5", "LlmConfig: device ids, memory utilisation, global_resource_config, remote-cache flag"),
    Item("20.3", "4.5, 4.6", "key classes: texts, positions and keywords, prompt_cluster_id, negative ids"),
    Item("20.4", "4.2", "CacheDesc: negative tensors, sequence dimension beyond 32 bits"),
    Item("20.5", "4.11", "TransferConfig: constructor and setters"),
    Item("20.6", "8.1", "transfer_cache_async: source, synchronizer, block indices"),
    Item("20.7", "8.3, 8.4", "asynchronous results: time limits, failing synchronizer"),
    Item("20.8", "7.9, 7.12", "sizes of copy_cache and pull_cache"),
    Item("20.9", "7.12 to 7.15", "tensor_num_per_layer"),
    Item("20.10", "6.2", "init: missing options, second instance, repeated init, ge.flowGraphMemMaxSize"),
    Item("20.11", "6.5, 6.8, 6.9", "arguments of link, link_clusters, unlink_clusters, switch_role; before init"),
    Item("20.12", "6.3, 6.10", "finalize of a fresh object, shutdown handler"),
    Item("20.13", "3.3", "role strings"),
    Item("20.14", "7.17", "remap_registered_memory"),
    Item("20.15", "5.1, 7.1", "a pool serves its own placement"),
    Item("20.16", "12.3", "reference counting of keys"),
    Item("20.17", "12.2", "duplicate keys and repeated placeholders"),
    Item("20.18", "7.11", "swap between 10 and 20 blocks"),
    Item("20.19", "6.2, 6.3", "finalize and init again with the same options"),
    Item("20.20", "2, 18", "validators and lifecycle of §18"),
)
KEYS = [item.key for item in ITEMS]


def section(text: str, number: int) -> str:
    """Return the text of one chapter of the specification."""
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"the specification has no chapter {number}"
    return found.group()


def specified(text: str) -> dict[str, str]:
    """Return title → sections for every row of §19 that the founding documents specify or use."""
    row = r"^\| (.+?) \| (?:\*\*yes\*\*|used)(?: \(.*?\))? \| [^|]+ \| ([^|]+) \|$"
    rows = re.findall(row, section(text, 19), re.MULTILINE)
    return {title.replace("`", "").lstrip("\u2013 "): where.strip() for title, where in rows}


def lines(text: str) -> list[int]:
    """Return the numbers of the lines of the acceptance checklist."""
    return [int(number) for number in re.findall(r"^(\d+)\. ", section(text, 20), re.MULTILINE)]


class Ended(NamedTuple):
    """The outcome of one test, over all of its parameters."""

    failed: bool
    skipped: str  # the first reason, or an empty text

    @property
    def state(self) -> str:
        """The text for the outcome in the table."""
        return "fails" if self.failed else f"skipped: {self.skipped}" if self.skipped else "passes"


class Witness:
    """A pytest plugin that records the marked tests that were collected, and the outcomes of those that ran."""

    def __init__(self) -> None:
        self.proofs: dict[str, list[str]] = {}  # item → tests, as file::test
        self.ended: dict[str, Ended] = {}  # test → how it ended

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Record the marked tests."""
        for test in items:
            for key in claims(test):
                tests = self.proofs.setdefault(key, [])
                if named(test) not in tests:
                    tests.append(named(test))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the outcome of a marked test."""
        report = yield
        if any(True for _ in claims(item)):
            skip = report.longrepr if report.skipped else ("", 0, "")
            why = skip[2].removeprefix("Skipped: ") if isinstance(skip, tuple) else "expected to fail"
            before = self.ended.get(named(item), Ended(failed=False, skipped=""))
            self.ended[named(item)] = Ended(before.failed or report.failed, before.skipped or why)
        return report

    def states(self) -> dict[str, str]:
        """Return item → state for the items all of whose tests ran."""
        return {
            key: worst([(test, self.ended[test]) for test in tests])
            for key, tests in self.proofs.items()
            if all(test in self.ended for test in tests)
        }

    def table(self) -> str:
        """Return the committed page, with its rows replaced by those of this run."""
        head = TABLE.read_text(encoding="utf-8").splitlines()[:HEAD]
        states = self.states()
        rows = [
            f"| {item.key.partition('.')[0]} | {linked(item.section)} | {item.title.replace('|', '/')} "
            f"| {'<br>'.join(f'`{test}`' for test in self.proofs.get(item.key, []))} "
            f"| {states.get(item.key, 'no test')} |"
            for item in ITEMS
        ]
        return "\n".join([*head, *rows, ""])


def linked(sections: str) -> str:
    """Return the sections as links to the contract."""
    return re.sub(r"\d+(?:\.\d+)?", lambda number: f"[{number[0]}](contract.md#{number[0]})", sections)


def claims(test: pytest.Item) -> Iterator[str]:
    """Yield the items that the marker of a test names."""
    for mark in test.iter_markers("contract"):
        for key in mark.args:
            if key not in KEYS:
                raise pytest.UsageError(f"{test.nodeid}: no item {key!r} in tools/docs/contract.py")
            yield key


def named(test: pytest.Item) -> str:
    """Return the name of a test as `file::test`, without parameters."""
    return f"{test.path.name}::{getattr(test, 'originalname', test.name)}"


def worst(tests: list[tuple[str, Ended]]) -> str:
    """Return the state of an item from the outcomes of its tests."""
    failed = [f"fails: `{test}`" for test, ended in tests if ended.failed]
    skipped = [f"{ended.state} (`{test}`)" for test, ended in tests if ended.skipped]
    return [*failed, *skipped, "passes"][0]


def read_table(text: str) -> dict[str, tuple[list[str], str]]:
    """Return item → (tests, state) from the text of the committed table."""
    titles = {(item.key.partition(".")[0], linked(item.section), item.title): item.key for item in ITEMS}
    found = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.*?) \| (.+?) \|$", text, re.MULTILINE)
    return {
        titles[chapter, where, title]: (re.findall(r"`([^`]+)`", tests), state)
        for chapter, where, title, tests, state in found
        if (chapter, where, title) in titles
    }
