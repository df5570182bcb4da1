"""The types of the dicts that ``Engine.stats``, ``LLMDataDist.stats``, ``Store.stats`` and a ``KeeperObserver`` return.

``docs/stats.md`` is generated from these docstrings. ``tests/test_stats.py`` compares the types with a real result.
"""

from __future__ import annotations

from typing import Optional, TypedDict

__all__ = [
    "EngineStats",
    "FabricStats",
    "KeeperStats",
    "LinkStats",
    "OpStats",
    "PathStats",
    "PoolStats",
    "Stats",
    "StoreStats",
    "StoredChange",
    "StoredChanges",
    "StoredNamespace",
    "StoredValue",
    "SwapInStats",
    "TableStats",
    "VerifyStats",
]


class OpStats(TypedDict):
    """Calls of one kind since the engine was opened.

    The fields are read one by one while calls are running, so a call may be counted in one field and not
    yet in another.
    """

    calls: int
    """Calls that ended, including failures."""
    failures: int
    """Calls that failed."""
    bytes: int
    """Bytes moved by calls that succeeded."""
    total_nanos: int
    """Total duration of all calls in nanoseconds."""
    max_nanos: int
    """Duration of the longest call in nanoseconds."""
    p50_nanos: int
    """Upper bound of the 50th percentile in nanoseconds: the next power of two, but at most ``max_nanos``."""
    p99_nanos: int
    """Upper bound of the 99th percentile in nanoseconds: the next power of two, but at most ``max_nanos``."""
    buckets: list[int]
    """40 counts. Entry ``i`` counts calls of at least ``2**(i-1)`` and less than ``2**i`` nanoseconds. The
    last entry counts calls of ``2**38`` nanoseconds (275 s) and more."""


class PoolStats(TypedDict):
    """One memory pool."""

    capacity_bytes: int
    """Bytes that can be allocated: whole pages."""
    page_bytes: int
    """Bytes of a page. Every tensor takes whole pages."""
    used_bytes: int
    """Allocated bytes, including the rounding to whole pages."""
    free_bytes: int
    """Bytes that are not allocated."""
    peak_used_bytes: int
    """Largest value of ``used_bytes`` so far."""
    largest_free_run_bytes: int
    """Bytes of the longest run of free pages: the largest request that would succeed now."""
    used_ranges: int
    """Runs of allocated pages."""
    free_ranges: int
    """Runs of free pages. Many short runs mean fragmentation."""
    allocations: int
    """Runs of pages allocated since the engine was opened."""
    frees: int
    """Runs of pages released since the engine was opened."""
    failures: int
    """Requests refused for lack of free pages."""
    released_bytes: int
    """Bytes of released caches that arrays, views or running calls still use, without the rounding to whole pages. They
    return to the pool when the last of these is gone."""
    huge_pages: str
    """How the engine asked the kernel for huge pages."""
    committed_bytes: int
    """Bytes that the engine committed by touching them."""
    merged_bytes: int
    """Bytes that the kernel merged into huge pages at the request of the engine."""
    merge_errno: Optional[int]
    """The error number with which the kernel refused to merge memory into huge pages because it is
    too old or does not permit merging; ``None`` if it never refused."""


class TableStats(TypedDict):
    """The cache table."""

    caches: int
    """Number of caches, including those that only a key still holds."""
    keys: int
    """Number of keys that are bound to a cache. Only the API of LLM-DataDist has keys."""


class SwapInStats(TypedDict):
    """Number of swap-ins (host to device) by path."""

    direct: int
    """Swap-ins copied straight to their blocks."""
    ring: int
    """Swap-ins copied through the staging ring."""


class VerifyStats(TypedDict):
    """Blocks that this engine has compared with their source (option ``verify``)."""

    blocks: int
    """Blocks that were compared."""
    mismatches: int
    """Blocks that differed."""


class PathStats(TypedDict):
    """The pulls and pushes of a link whose bytes moved on one path."""

    transfers: int
    """Number of pulls, pushes and requests that sent layers. A transfer between caches with different KV layouts may
    count more than once."""
    bytes: int
    """Bytes moved."""
    rules: dict[str, int]
    """`transfers` by the rule that chose the path: ``mapped_pool``, ``fabric_pool``, ``short_transfer``,
    ``process_memory`` or ``owner_sends`` ([links](links.md#how-bytes-travel)). Rules without transfers are left out."""


class LinkStats(TypedDict):
    """One current link."""

    cluster: int
    """Number of the peer: its ``incarnation``, or the cluster id of a ``LLMDataDist``."""
    address: str
    """Address of the peer."""
    transport: str
    """Transport of messages: ``"shm"``, ``"tcp"`` or ``"local"``."""
    pools: str
    """How the peer's pools are read: ``"mapped"``, ``"stream"`` (UCX, rings or sockets; ``paths`` shows which),
    or ``"none"`` if the peer offers no pool."""
    registered: str
    """How the peer's registered memory is read: ``"process"`` or ``"stream"``."""
    refusal: Optional[str]
    """The reason why the peer's pools are not mapped. Otherwise, the reason why its registered memory is
    not read by process id. ``None`` if there is no such reason."""
    outgoing: bool
    """Whether this side opened the link."""
    call_rings: int
    """Number of call streams, in both directions, whose messages and bytes go through rings in shared memory."""
    call_rings_refusal: Optional[str]
    """The reason why the last attempt to give a call stream rings failed. ``None`` if it succeeded, or if there was
    none. A side that could not even receive the offer of the other one has no reason."""
    silent_ms: int
    """Milliseconds since the peer's last control message."""
    requests: OpStats
    """Requests sent to the peer. ``bytes`` counts those that replies announced or confirmed. Reading the peer's memory
    in place adds none."""
    transfers: OpStats
    """Pulls and pushes that this engine has started, and layers that it has sent. The peer counts its
    requests as ``served``. A pull that reads memory in place adds no bytes there. Each layer of a request counts as a
    call with an equal share of the time; a failed request counts as one call."""
    paths: dict[str, PathStats]
    """Transfers that this engine has started and that succeeded, by path: ``mapped`` (the reader copies mapped memory
    of the owner), ``process`` (the reader uses ``process_vm_readv``), ``fabric`` (the reader uses UCX), ``rings`` (the
    owner sends the bytes through shared memory) and ``sockets`` (the owner sends them through a socket)."""
    staged_bytes: int
    """Bytes that passed a host buffer here, because no path reaches the memory of the device."""
    sockets_reason: Optional[str]
    """Why the owner most recently had to send the bytes of a pull or push, through rings or a socket. ``None`` if it
    never had to. Transfers that use rings although the memory can be read do not count."""


class FabricStats(TypedDict):
    """UCX, which reads pools of other hosts (option ``transfer_backend``)."""

    version: Optional[str]
    """Version of UCX. ``None`` if this engine does not use it."""
    reason: Optional[str]
    """The reason why this engine does not use it. ``None`` if it does."""
    reads: int
    """Reads that succeeded."""
    bytes: int
    """Bytes of these reads."""
    failures: int
    """Reads that failed or were given up."""
    forced_closes: int
    """Connections that were closed by force, to end a read."""
    renewals: int
    """Workers of UCX that were replaced: after 100 forced closes, or because requests did not end."""


class Stats(TypedDict):
    """All counters of an engine."""

    pools: dict[str, PoolStats]
    """The pools by name, ``"device"`` and ``"host"``; one that was not configured is absent."""
    table: TableStats
    """The cache table."""
    ops: dict[str, OpStats]
    """Calls by kind: ``allocate``, ``deallocate``, ``remove_key``, ``register``, ``copy_cache``, ``copy_blocks``,
    ``swap_in``, ``swap_out``, ``link``, ``unlink``, ``pull``, ``push``, ``transfer_layer``, ``served``. A copy from the
    host pool to the device pool is a ``swap_in``, the reverse a ``swap_out``, and any other copy of blocks
    ``copy_blocks``. Each layer of a layer-wise push is a ``transfer_layer``. ``served`` are the requests of peers."""
    swap_in: SwapInStats
    """Number of swap-ins by path."""
    verify: VerifyStats
    """Blocks that this engine has compared with their source."""
    ucx: FabricStats
    """UCX of this engine."""
    links: list[LinkStats]
    """The current links."""
    ring_bytes: int
    """Bytes of device memory that the staging ring holds."""
    plain_bytes: int
    """Bytes copied with ordinary stores."""
    streaming_bytes: int
    """Bytes copied with streaming stores."""
    copy_workers: int
    """Number of threads that copy, including the calling thread."""


class EngineStats(Stats):
    """What ``Engine.stats`` returns: the fields of ``Stats``, and the name of the engine."""

    engine: str
    """Name of the engine."""


class KeeperStats(TypedDict):
    """A keeper (``KeeperObserver.stats``, and ``Store.stats``). The counters start at 0 when it opens."""

    slots: int
    """Slots of its memory."""
    slot_bytes: int
    """Bytes of a slot."""
    values: int
    """Values that it has now."""
    leased: int
    """Values that leases hold now."""
    clients: int
    """Stores that are attached now."""
    observers: int
    """Connections of ``KeeperObserver`` now."""
    namespaces: int
    """Namespaces that it knows."""
    stored: int
    """Values that it has copied."""
    stored_bytes: int
    """Bytes of these values."""
    present: int
    """Values that it did not copy, because their keys had one."""
    no_room: int
    """Values that it did not copy, because leases hold all slots, or because the places of the index for the key are in
    use."""
    evicted: int
    """Values that were replaced because all slots were in use."""
    dropped: int
    """Values that stores have dropped."""
    corrupt: int
    """Values that it has dropped because their bytes did not have their checksum. A store has found them."""
    wrong_reports: int
    """Values that stores have reported as wrong, and that match their checksums. For 1 s after such a report, the
    keeper ignores the reports of its user."""
    touched: int
    """Values that stores have read or put again, as far as the keeper was told: a store says it without waiting."""
    leases: int
    """Leases that it has granted or renewed."""
    leases_refused: int
    """Keys that were not leased, because they had no value, or because of a limit."""
    puts: int
    """Requests to copy values, each of at most 4 MiB or one value. A call of ``Store.put`` makes one or several."""
    put_nanos: int
    """Total time of these requests in the keeper, in nanoseconds."""
    refused: int
    """Clients that it has refused, and told why: because of what they sent, because of a limit, or because of the
    system."""
    forbidden: int
    """Requests that the role of a client does not allow. Stores and observers refuse such calls before they ask."""


class StoreStats(TypedDict):
    """A store (``Store.stats``). The counters start at 0 when it opens."""

    hits: int
    """Values that ``get`` has copied, and those of views that were right."""
    hit_bytes: int
    """Bytes of these values."""
    misses_absent: int
    """Keys of ``get`` and of views without a value. The keeper does not know whether it ever had one."""
    misses_changed: int
    """Keys of ``get`` and of views whose value was replaced before it was checked."""
    misses_corrupt: int
    """Keys of ``get`` and of views whose value did not have its checksum. Without ``checksums``, this is 0."""
    misses_away: int
    """Keys of ``get`` and of views while the keeper was away."""
    gets: int
    """Calls of ``get``."""
    get_nanos: int
    """Total time of these calls in nanoseconds."""
    puts_stored: int
    """Values of ``put`` that the keeper has copied."""
    put_bytes: int
    """Bytes of these values."""
    puts_present: int
    """Values of ``put`` whose keys had one."""
    puts_no_room: int
    """Values of ``put`` for which the keeper had no room."""
    puts_away: int
    """Values of ``put`` that the keeper did not confirm in time, or while it was away."""
    puts: int
    """Calls of ``put``."""
    put_nanos: int
    """Total time of these calls in nanoseconds."""
    attached: int
    """How often the store has attached to a keeper."""
    refused: Optional[str]
    """The reason why the store could not attach when it last tried. ``None`` if it could, or if the keeper was away."""
    keeper: Optional[KeeperStats]
    """The counters of the keeper. ``None`` if it is away, was not asked, or does not answer in time."""


class StoredNamespace(TypedDict):
    """A namespace of a keeper (``KeeperObserver.namespaces``)."""

    number: int
    """The number by which the keeper knows it."""
    text: str
    """Its text."""
    value: int
    """Bytes of each of its values."""
    checksums: bool
    """Whether its values have checksums."""
    values: int
    """How many values it has."""


class StoredValue(TypedDict):
    """A value of a keeper (``KeeperObserver.values``)."""

    namespace: int
    """The number of its namespace."""
    key: bytes
    """Its key."""
    slot: int
    """The slot that has its bytes."""
    used: int
    """Of two values, the one with the larger number was used later. It is not a time."""
    leased: bool
    """Whether a lease holds it."""


class StoredChange(TypedDict):
    """A value that was stored or removed."""

    namespace: int
    """The number of its namespace."""
    key: bytes
    """Its key."""
    stored: bool
    """Whether it was stored. Otherwise it was replaced or dropped."""


class StoredChanges(TypedDict):
    """What has changed in a keeper since the last call (``KeeperObserver.changes``)."""

    changes: list[StoredChange]
    """The changes in their order."""
    missed: int
    """How many changes before those the keeper does not remember any more."""
