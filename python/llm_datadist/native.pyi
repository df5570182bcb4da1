"""The native API: an engine for KV caches, its caches, and the transfers between engines.

An ``Engine`` owns memory pools, caches, links to other engines and the threads that move bytes. A process may open
several engines. Times are seconds and sizes are bytes, unless a description says otherwise.

Three rules hold for every call:

- A wrong argument raises at once: ``TypeError`` for a wrong type or an unknown keyword, ``InvalidArgument`` for a wrong
  value, with the name of the argument. ``bool`` is not accepted as a number.
- An operation that can wait returns a ``Transfer`` at once. Its failure is the outcome of the transfer. Only
  ``Transfer.result``, ``Engine(...)``, ``Engine.close`` and the end of a ``with`` block wait.
  ``Store.start_get`` and ``Store.start_put`` return a ``Transfer``, too. All other calls of a ``Store`` return their
  results; those that ask the keeper wait at most their ``timeout``.
- After ``Engine.close``, and in a forked child, calls raise ``Closed``. A child may open its own engine. Views of
  tensors stay readable.

Objects of this module may be used from any number of threads at once.
"""

import socket
from collections.abc import AsyncIterator, Generator, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, ClassVar, Generic, Literal, Protocol, SupportsIndex, TypeVar, final, type_check_only

from typing_extensions import Buffer, CapsuleType, Self, TypeAlias

from llm_datadist.errors import (
    Busy,
    Cancelled,
    Closed,
    Error,
    GrantEnded,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    PeerLost,
    Timeout,
    VerifyFailed,
)
from llm_datadist.stats import EngineStats, KeeperStats, StoredChanges, StoredNamespace, StoredValue, StoreStats

__all__ = [
    "Busy",
    "Cache",
    "CacheBuffer",
    "Cancelled",
    "Closed",
    "Completed",
    "Engine",
    "Error",
    "Event",
    "Grant",
    "GrantClosed",
    "GrantEnded",
    "InvalidArgument",
    "Keeper",
    "KeeperObserver",
    "KvLayout",
    "Message",
    "NotFound",
    "OutOfMemory",
    "Peer",
    "PeerDown",
    "PeerLost",
    "PeerUp",
    "RemoteCache",
    "Rows",
    "Store",
    "StoreView",
    "TensorView",
    "Timeout",
    "Transfer",
    "VerifyFailed",
]

_T_co = TypeVar("_T_co", covariant=True)

@type_check_only
class _SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@type_check_only
class _SupportsArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

_Size: TypeAlias = int | str
_Blocks: TypeAlias = SupportsIndex | slice | Sequence[SupportsIndex] | Buffer | _SupportsDLPack
_Span: TypeAlias = range | slice | tuple[int, int]
_Tensor: TypeAlias = int | Buffer | _SupportsDLPack | _SupportsArrayInterface
_Integers: TypeAlias = Sequence[SupportsIndex] | Buffer
_Memory: TypeAlias = Buffer | _SupportsDLPack | _SupportsArrayInterface
_Dtype: TypeAlias = str | Any
_Pool: TypeAlias = Literal["device", "host"]
_Verify: TypeAlias = Literal["off", "sample", "full"]
_Reason: TypeAlias = Literal["done", "expired", "revoked", "released"]
_Pair: TypeAlias = tuple[Rows, Rows]

@final
class Engine:
    """An open engine: pools, caches, links to peers, and threads.

    A process may have several engines, also linked with each other. They share one set of threads. ``with`` and ``async
    with`` call ``close`` at the end. Dropping the last reference closes the engine too.

    Peers know an engine by its incarnation, a random number that is drawn when it opens. So a program that restarts is
    another peer, even at the same address and with the same name.

    Args:
        pool: size of the device pool, from which ``allocate`` takes memory by default. ``None``: there is none. A size
            is a number of bytes, or a text of digits and a unit, such as ``"64MiB"`` (KiB, MiB, GiB or TiB, without a
            space or a decimal point). It is rounded down to whole pages and must hold one page. Both pools are in host
            memory so far; a program keeps active blocks in the device pool and idle blocks in the host pool.
        host_pool: size of the host pool, in the same form. ``None``: there is none.
        page: size of a page of both pools: a power of two from 1 KiB to 1 GiB. Every tensor takes whole pages.
        listen: address at which peers can link to this engine: ``"ip:port"`` or ``"[ipv6]:port"``. Port 0 takes a free
            port; ``address`` returns it. ``None``: no peer can link to this engine, but it can link to others.
        name: name that peers (``Peer.name``), log lines and statistics show: 1 to 128 bytes of UTF-8, printable. By
            default ``"<host name>/<process id>/<number>"``. Names need not be unique.
        metadata: bytes that peers read as ``Peer.metadata``, at most 16 KiB.
        token: secret that both ends of a link must have, at least 16 characters. ``None``: that of ``token_file`` or
            of the environment variable ``LLM_DATADIST_TOKEN_FILE`` or ``LLM_DATADIST_TOKEN``, if one is set. Without a
            token, only processes of the same user on the same host can link.
        token_file: absolute path of a file with the token, of mode 0600 or 0400, in place of ``token``.
        accept_remote: whether an engine without a token links with every peer that reaches it, of any user and host.
            Both ends of a link need it.
        timeout: seconds after which a call that has no ``timeout`` of its own fails with ``Timeout`` (finite, above 0).
        verify: how transfers compare the bytes that have moved with their source: ``"off"``, ``"sample"`` (one block in
            64, at least one) or ``"full"``.
        **options: further options by name, such as ``copy_workers=8``. ``llm-datadist options`` lists them. Times are
            seconds and sizes have the form of ``pool``.

    Raises:
        TypeError: an argument has the wrong type, or an option is unknown. The text names the most similar option.
        InvalidArgument: a value is out of range or has the wrong form; ``token`` and ``token_file`` are both given; the
            token file cannot be read or others may read it.
        OutOfMemory: the pools do not fit into the address space, or into memory with ``huge_pages="eager"``.
        Error: the address cannot be bound, or a thread cannot be started.
    """

    def __new__(
        cls,
        *,
        pool: _Size | None = None,
        host_pool: _Size | None = None,
        page: _Size = "64KiB",
        listen: str | None = None,
        name: str | None = None,
        metadata: bytes = b"",
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
        accept_remote: bool = False,
        timeout: float = 10.0,
        verify: _Verify = "off",
        **options: float | str | bool,
    ) -> Self: ...
    @property
    def name(self) -> str:
        """The name that peers see. It can still be read when the engine is closed."""

    @property
    def address(self) -> str | None:
        """The address at which the engine listens, with the port that was taken; ``None`` without ``listen``.

        It can still be read when the engine is closed, but nobody listens there any more.
        """

    @property
    def timeout(self) -> float:
        """The default time limit of a call in seconds. It can still be read when the engine is closed."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or this process is a forked child. This property never raises."""

    @property
    def peers(self) -> list[Peer]:
        """The peers that are linked now, whichever end made the link.

        Raises:
            Closed: the engine is closed.
        """

    def allocate(
        self,
        name: str,
        layout: KvLayout | None = None,
        /,
        *,
        blocks: int,
        tensors: int | None = None,
        shape: Sequence[int] | None = None,
        dtype: _Dtype | None = None,
        pool: _Pool = "device",
        tensors_per_layer: int | None = None,
        contiguous: bool = False,
    ) -> Cache:
        """Allocate a cache from a pool. Its contents are undefined.

        Give either a ``layout``, or ``tensors``, ``shape`` and ``dtype``. Peers find the cache by its name.

        Args:
            name: name of the cache: 1 to 128 bytes of UTF-8, printable. No other cache of this engine may have it.
            layout: what the blocks mean. Transfers between caches whose layouts differ convert the blocks.
            blocks: number of blocks, from 1 to 2**32 - 1. A block is one row of every tensor.
            tensors: number of tensors, at least 1.
            shape: dimensions of one block of one tensor, each at least 1. ``()`` is one element.
            dtype: type of the elements: ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float64"``, ``"int8"`` to
                ``"int64"``, ``"uint8"`` to ``"uint64"`` or ``"bool"``, or an object with such a name, such as
                ``numpy.float16`` or ``torch.bfloat16``.
            pool: pool from which the memory is taken: ``"device"`` or ``"host"``.
            tensors_per_layer: number of consecutive tensors that form a layer, for ``Rows.part(layers=...)`` and
                layer-wise pushes. It divides ``tensors``. By default 1. A layout knows it.
            contiguous: whether the tensors follow each other without gaps, as ``Cache.buffer`` needs.

        Raises:
            TypeError: an argument has the wrong type, or only some of ``tensors``, ``shape`` and ``dtype`` are given,
                or they are given beside a layout.
            InvalidArgument: the name is in use; a number is out of range; the engine has no such pool; the cache would
                have 2**63 bytes or more.
            OutOfMemory: the pool has no room. The error has the bytes that were asked for, and those that are free.
            Closed: the engine is closed.
        """

    def register(
        self,
        name: str,
        tensors: Sequence[_Tensor],
        layout: KvLayout | None = None,
        /,
        *,
        blocks: int | None = None,
        shape: Sequence[int] | None = None,
        dtype: _Dtype | None = None,
        stride: int | None = None,
        tensors_per_layer: int | None = None,
        pool: _Pool = "device",
        shared: bool = True,
    ) -> Cache:
        """Make a cache of memory that belongs to the program.

        The cache keeps the tensor objects alive until ``Cache.free`` has ended. It cannot keep memory alive that is
        given by address: that memory must stay valid until then.

        Args:
            name: name of the cache: 1 to 128 bytes of UTF-8, printable. No other cache of this engine may have it.
            tensors: the tensors, at least one, all objects or all addresses. An object is a writable buffer, or has
                ``__dlpack__`` or ``__array_interface__``, and is in host memory. Its first dimension is the blocks. The
                distance from one block to the next may be larger than a block; inside a block there are no gaps. An
                address is an ``int``.
            layout: what the blocks mean. Objects must have its number of tensors and its bytes in each block.
            blocks: number of blocks. Needed for addresses; for objects, it must be their first dimension if it is
                given.
            shape: dimensions of one block of one tensor. Needed for addresses without a layout; objects have it.
            dtype: type of the elements, as for ``allocate``. Needed for addresses without a layout; objects have it.
            stride: bytes from the start of one block to the start of the next in each tensor, at least the bytes of a
                block. Only for addresses; by default, blocks follow each other without gaps.
            tensors_per_layer: number of consecutive tensors that form a layer, as for ``allocate``.
            pool: the pool with which statistics and copies count the memory: ``"device"`` or ``"host"``.
            shared: whether peers may use the cache. If it is false, they cannot find it.

        Raises:
            TypeError: an argument has the wrong type, a tensor is none of the accepted kinds, an argument that
                addresses need is missing, or ``stride`` is given for objects.
            InvalidArgument: the name is in use; a tensor is read-only, not in host memory, or has gaps inside a block;
                tensors differ in shape or type; an address is 0; a number is out of range.
            OutOfMemory: there is no memory for the description of the cache.
            Closed: the engine is closed.
        """

    def copy(
        self,
        dst: Rows | Sequence[_Pair],
        src: Rows | None = None,
        /,
        *,
        verify: _Verify | None = None,
        timeout: float | None = None,
    ) -> Transfer[None]:
        """Start to copy blocks inside this engine: within a cache, or between two caches with blocks of equal size.

        Block ``i`` of ``src`` goes to block ``i`` of ``dst``, in all tensors. The pools of the two caches do not
        matter. Copying no blocks ends at once.

        Args:
            dst: blocks that are written, or a list of ``(dst, src)`` pairs. All pairs are checked before the first one
                is copied. If a copy fails later, the pairs before it are in place.
            src: blocks that are read, as many as ``dst`` has. Left out if ``dst`` is a list.
            verify: how the bytes are compared: ``"off"``, ``"sample"`` or ``"full"``. ``None``: as the engine does.
            timeout: seconds within which the copy must begin. A copy that has begun is finished. ``None``:
                ``Engine.timeout``.

        Returns:
            The transfer. Its outcome may be ``InvalidArgument``, ``NotFound`` (a cache was freed), ``Timeout``,
            ``VerifyFailed``, ``Cancelled`` or ``Closed``.

        Raises:
            TypeError: an argument has the wrong type, or ``src`` is missing.
            InvalidArgument: rows of a remote cache or of another engine; different numbers of blocks or bytes; a block
                that the cache does not have; a part with ``layers`` or ``tokens``; an unknown ``verify``.
            NotFound: a cache was freed.
            Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
            Closed: the engine is closed.
        """

    def pull(
        self,
        dst: Rows | Sequence[_Pair],
        src: Rows | None = None,
        /,
        *,
        grant: bytes | Sequence[bytes | None] | None = None,
        last: bool = True,
        notify: bytes | None = None,
        verify: _Verify | None = None,
        timeout: float | None = None,
    ) -> Transfer[None]:
        """Start to read blocks of a peer into blocks of this engine.

        Block ``i`` of ``src`` goes to block ``i`` of ``dst``, in all tensors, and the blocks of both have equal sizes.
        If both caches have a layout, each side is a sequence of tokens in place of a list of blocks: elements go where
        the layout of ``dst`` has them. The numbers of blocks may differ if the rows of an end are narrowed by
        ``tokens``. A block may occur in ``dst`` twice if nothing is converted; the last one counts.

        Until the transfer has ended, the blocks of ``dst`` must not be used. If it fails, they are undefined, except
        for those in ``Error.arrived``.

        Args:
            dst: local blocks that are written, at least one, or a list of ``(dst, src)`` pairs, possibly of several
                peers. The pairs succeed or fail together. If all pairs have the same ``dst`` and all caches have
                layouts, each head of each layer is read from one pair. If several pairs hold it, the engine takes the
                one with the fewest heads to read so far, and among equals the first in the list.
            src: blocks of a peer that are read. Left out if ``dst`` is a list.
            grant: token of a grant that lends ``src``. The pull fails if the grant ended before all bytes were read.
                For a list of pairs: one token for all of them, or a list with a token or ``None`` for each.
            last: whether this is this engine's last pull under the grant. When it succeeds, a grant with one reader
                ends, so pass ``last=False`` to all other pulls. No effect without a grant.
            notify: message for the peer, at most 64 KiB, which it gets as ``Message`` when the bytes are in place. All
                pairs must name one peer.
            verify: how the bytes are compared: ``"off"``, ``"sample"`` or ``"full"``. ``None``: as the engine does.
            timeout: time limit of the whole pull in seconds. ``None``: ``Engine.timeout``.

        Returns:
            The transfer. Its outcome may be ``NotFound`` (the peer has no such cache), ``InvalidArgument`` (blocks,
            layers, tokens or sizes that do not fit the remote cache), ``GrantEnded``, ``PeerLost``, ``Timeout``,
            ``VerifyFailed``, ``Busy`` (the peer's program has not read earlier messages), ``Cancelled`` or ``Closed``.
            For a list, the error names the pair as ``facts["part"]``.

        Raises:
            TypeError: an argument has the wrong type, or ``src`` is missing.
            InvalidArgument: ``dst`` is not local or ``src`` not remote; rows of another engine; no blocks; different
                numbers of blocks or tokens; a token of a wrong form; a message above 64 KiB; an unknown ``verify``.
            NotFound: the cache of ``dst`` was freed.
            Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
            Closed: the engine is closed.
        """

    def push(
        self,
        dst: Rows | Sequence[_Pair],
        src: Rows | None = None,
        /,
        *,
        notify: bytes | None = None,
        verify: _Verify | None = None,
        timeout: float | None = None,
        layerwise: bool = False,
    ) -> Transfer[None]:
        """Start to write blocks of this engine into blocks of a peer.

        Block ``i`` of ``src`` goes to block ``i`` of ``dst``, under the rules of ``pull``. Between caches with layouts,
        a push writes the layers and heads that both hold. Until the transfer has ended, the blocks of ``src`` must not
        be written. If it fails, the blocks of ``dst`` are undefined.

        Two engines must not transfer between the same blocks in opposite directions at the same time: such transfers
        wait for each other until their time limits.

        With ``layerwise=True``, a layer moves when ``Transfer.ready`` is called for it, so that the program can compute
        one layer while another one moves. Blocks move as they are, so the layouts of both caches must be the same in
        all but their layers. If the rows of one end are narrowed by ``layers``, those of the other end must be, too.

        Args:
            dst: blocks of a peer that are written, at least one, or a list of ``(dst, src)`` pairs, possibly of several
                peers, which succeed or fail together.
            src: local blocks that are read. Left out if ``dst`` is a list.
            notify: message for the peer, at most 64 KiB, which it gets as ``Message`` when the bytes are in place. All
                pairs must name one peer.
            verify: how the bytes are compared: ``"off"``, ``"sample"`` or ``"full"``. ``None``: as the engine does.
            timeout: time limit of the whole push in seconds. ``None``: ``Engine.timeout``. With ``layerwise``, it is
                the limit of each layer, from its ``ready`` on. Nothing limits the wait for a ``ready``; call
                ``Transfer.cancel`` if none will come.
            layerwise: whether the program reports each layer.

        Returns:
            The transfer. Its outcome may be that of a ``pull``, except ``GrantEnded``.

        Raises:
            TypeError: an argument has the wrong type, or ``src`` is missing.
            InvalidArgument: ``dst`` is not remote or ``src`` not local; rows of another engine; no blocks; different
                numbers of blocks or tokens; a message above 64 KiB; an unknown ``verify``; ``layerwise`` with rows that
                are narrowed by ``tokens`` or ``bytes``, or with rows of several caches of this engine.
            NotFound: the cache of this engine was freed.
            Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
            Closed: the engine is closed.
        """

    def link(self, address: str, /, *, name: str | None = None, timeout: float | None = None) -> Transfer[Peer]:
        """Start to link with the engine that listens at an address, unless a link to it exists.

        An existing link is a success, whichever end made it. A call for an address at which an earlier one has found a
        linked peer sends nothing, and its transfer has ended when this returns. Calls for one address with the same
        ``name`` share an attempt. Both ends may call ``link`` at once: one link is made, and both calls succeed. While
        no engine listens, this engine tries again until ``timeout`` has passed. A link that breaks is not made again by
        itself.

        Args:
            address: ``"ip:port"`` or ``"[ipv6]:port"``, with a port above 0. Host names are not accepted.
            name: name that the peer must have. ``None``: any.
            timeout: time limit of the whole call in seconds. ``None``: ``Engine.timeout``.

        Returns:
            A transfer whose result is the peer. Its outcome may be ``Timeout`` (no answer in time), ``PeerLost``
            (the peer refused, for example because of its token, version or name), ``Cancelled`` or ``Closed``.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: the address has another form, or is that of this engine.
            Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
            Closed: the engine is closed.
        """

    def lend(self, rows: Rows, /, *, ttl: float, readers: int = 1) -> Grant:
        """Lend blocks of this engine to readers for a limited time. The call sends nothing.

        The program sends ``Grant.token`` to the readers, which pass it to ``pull``. While the grant lasts, the program
        must not write to the blocks. A pull under the grant fails if the grant ended before the pull had read all its
        bytes.

        The grant ends when ``ttl`` seconds have passed, when ``readers`` readers have finished their last pull, by
        ``Grant.revoke``, or when the cache is freed. ``events`` then returns ``GrantClosed``. Reuse the blocks after
        that event or after ``revoke``, not by a clock of your own.

        A grant does not restrict access: a peer can pull the blocks without the token, and such a pull is not checked.

        Args:
            rows: local blocks that are lent, at least one. Their order does not matter.
            ttl: seconds until the grant ends, above 0 and at most 4,294,967.
            readers: number of readers that must finish before the grant ends early, from 1 to 4,096. A reader is one
                incarnation of a peer, and counts once.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: rows of a remote cache or of another engine; no blocks; a block that the cache does not
                have; rows that are narrowed by ``part``; a number out of range.
            NotFound: the cache was freed.
            Busy: 65,536 grants of this engine last, or have an event that nobody took.
            OutOfMemory: there is no memory for the list of blocks.
            Closed: the engine is closed.
        """

    def events(self, limit: int = 1024) -> list[Event]:
        """Return what has happened since the last call, oldest first. The call never waits.

        The engine keeps at most 4,096 ``PeerUp`` and ``PeerDown`` events, and drops those of the oldest links.

        An event goes to one caller. A transfer whose outcome was taken by ``result`` or ``await`` has no event.
        ``result`` and ``await`` still give the outcome of a transfer whose ``Completed`` was taken. Messages that
        arrived before a link ended are still returned.

        Args:
            limit: largest number of events, from 1 to 2**32 - 1. The others stay for the next call.

        Raises:
            TypeError: ``limit`` is not an integer.
            InvalidArgument: ``limit`` is out of range.
            OutOfMemory: there is no memory for the list. The events stay.
            Closed: the engine is closed.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``events`` has something to return.

        Use it with ``select``, ``selectors`` or ``epoll``, which also accept the engine itself. It belongs to the
        engine: do not read, write or close it.

        Raises:
            Closed: the engine is closed.
            Error: no descriptor is left.
        """

    def stats(self) -> EngineStats:
        """Return the counters of this engine as plain dicts and lists. Reading them does not interrupt transfers.

        Raises:
            Closed: the engine is closed.
        """

    def close(self, timeout: float | None = 0.0) -> None:
        """Close the engine: end all transfers, links and grants, and release the pools.

        Transfers that still run when ``timeout`` has passed end with ``Closed``. Handles of ended transfers keep their
        outcomes. No event comes any more, and an ``async for`` over the engine ends. Memory that views use stays valid
        until they are gone. Closing again does nothing.

        Args:
            timeout: seconds to wait for running transfers, 0 or above. ``None``: ``Engine.timeout``. New transfers are
                refused meanwhile.

        Raises:
            TypeError: ``timeout`` has the wrong type.
            InvalidArgument: ``timeout`` is negative or not finite.
        """

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over events as they come: ``async for event in engine``.

        The iteration ends without an error when the engine is closed. Each event goes to one iterator or one caller of
        ``events``.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class Cache:
    """A named set of tensors of this engine, cut into blocks. ``Engine.allocate`` and ``Engine.register`` make it.

    ``llm_datadist.Cache`` is another class, that of LLM-DataDist's API.

    ``cache[blocks]`` selects blocks: an integer, a slice, a list, tuple or range of integers, or a one-dimensional
    integer array in host memory. ``cache[:]`` is all blocks. The order of a list is kept. Negative numbers do not count
    from the end. A list is copied, so it may be changed afterwards.

    ``with`` calls ``free`` at the end and waits until it has ended, at most ``Engine.timeout``. Dropping the object
    does not free the cache.
    """

    @property
    def name(self) -> str:
        """The name of the cache."""

    @property
    def blocks(self) -> int:
        """The number of blocks, the same as ``len(cache)``."""

    @property
    def layout(self) -> KvLayout | None:
        """The layout, or ``None`` if the cache has none."""

    @property
    def pool(self) -> str:
        """The pool: ``"device"`` or ``"host"``."""

    @property
    def block_bytes(self) -> int:
        """The bytes of one block, over all tensors, without gaps."""

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks, without gaps: ``blocks * block_bytes``."""

    @property
    def engine(self) -> Engine:
        """The engine that owns the cache.

        Raises:
            Closed: the program has dropped the engine.
        """

    @property
    def tensors(self) -> list[TensorView]:
        """A view of each tensor. Its first dimension is the blocks.

        Raises:
            NotFound: the cache was freed.
            Closed: the engine is closed.
        """

    @property
    def buffer(self) -> CacheBuffer:
        """All bytes of a cache that was allocated with ``contiguous=True``, as one flat view.

        Raises:
            InvalidArgument: the cache is not contiguous.
            NotFound: the cache was freed.
            Closed: the engine is closed.
        """

    def __getitem__(self, blocks: _Blocks, /) -> Rows:
        """Select blocks.

        Raises:
            TypeError: not one of the forms above; a ``bool``, a ``float`` or a text.
            InvalidArgument: a negative number or one above 2**32 - 1; an array with more than one dimension or outside
                host memory. A block that the cache does not have is found by the call that uses the rows.
        """

    def __len__(self) -> int: ...
    __iter__: ClassVar[None]
    def free(self) -> Transfer[None]:
        """End the cache. Its name can be used again at once, and new transfers that name it fail with ``NotFound``.

        The memory of an allocated cache returns to the pool when the last transfer and view of it is gone, so ``free``
        has nothing to wait for: the transfer has ended when it is returned, and there is no ``Completed`` for it. The
        transfer of a registered cache ends when no transfer of this engine, and no request of a peer that it serves,
        uses the memory any more. A pull of a peer that still reads the memory by process id fails. Grants of the cache
        end with the reason ``"released"``. Freeing a cache again, or after ``Engine.close``, ends at once.

        Returns:
            The transfer. ``Timeout``: registered memory is still in use after ``Engine.timeout``, for example because a
            peer that reads the bytes of a push does not answer. Keep the memory, and call ``free`` again.

        Raises:
            Busy: ``max_transfers`` transfers run or have an outcome that was not taken. The registered cache is freed;
                call ``free`` again to learn when its memory may be used.
            Closed: this process is a forked child.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class RemoteCache:
    """A cache of a peer, by its name: ``peer["kv"]``. Making it sends nothing.

    The peer is asked when a transfer first uses the name. If it has no such cache, the transfer ends with ``NotFound``.
    If it frees the cache and makes another one of the same name, later transfers use the new one. ``cache[blocks]``
    selects blocks as for ``Cache``, but a slice needs its end, because the number of blocks is not known here. Two
    objects are equal if peer and name are equal.
    """

    @property
    def name(self) -> str:
        """The name of the cache."""

    @property
    def peer(self) -> Peer:
        """The peer that owns the cache."""

    def __getitem__(self, blocks: _Blocks, /) -> Rows:
        """Select blocks.

        Raises:
            TypeError: not one of the forms of ``Cache``; a ``bool``, a ``float`` or a text.
            InvalidArgument: a negative number or one above 2**32 - 1; a slice without an end, because the number of
                blocks is not known here; an array with more than one dimension or outside host memory.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    __iter__: ClassVar[None]

@final
class Rows:
    """Blocks of a cache, in order, and optionally only some layers, tokens or bytes of them. It cannot be changed.

    ``cache[...]`` makes it, for local and remote caches alike. It does not keep the cache. Two objects are equal if
    they have the same cache, the same blocks in the same order, and the same part of them.
    """

    @property
    def cache(self) -> Cache | RemoteCache:
        """The cache to which the blocks belong."""

    def __len__(self) -> int:
        """Return the number of blocks."""

    def part(
        self,
        *,
        layers: _Span | None = None,
        tokens: _Span | None = None,
        bytes: _Span | None = None,  # noqa: A002
    ) -> Rows:
        """Return the same blocks, narrowed. A range has step 1 and is not empty: ``range``, ``slice`` or a pair.

        A slice of a local cache may have open ends; one of a remote cache needs its end.

        Args:
            layers: layers of the cache, counted from 0. The other end of the transfer must have as many. The engine
                knows layers from the layout, or from ``tensors_per_layer``.
            tokens: tokens of the sequence that the blocks hold in their order, counted from 0. Both caches need a
                layout. If only one end has a range, as many tokens move from the start of the other end.
            bytes: bytes of every block in each tensor, counted from 0. Both ends move as many bytes of a block. Not
                together with ``tokens``.

        Raises:
            TypeError: an argument has the wrong type, or none is given.
            InvalidArgument: a range is empty, has another step or a negative end; ``tokens`` and ``bytes`` are both
                given; the rows were narrowed in the same way before. A range that exceeds the cache is found by the
                call that uses the rows.
        """

@final
class Peer:
    """Another engine, as long as it runs. A program that restarts is another peer.

    ``Engine.link`` and the event ``PeerUp`` return it. Two objects are equal if they stand for the same incarnation,
    also across links. Objects of an ended peer stay readable.
    """

    @property
    def name(self) -> str:
        """The name that the peer's program has given to its engine."""

    @property
    def incarnation(self) -> int:
        """The random number that the engine of the peer drew when it opened."""

    @property
    def address(self) -> str:
        """The address of the peer: where it listens, or where its connection comes from if it does not listen."""

    @property
    def transport(self) -> str:
        """How bytes move: ``"shm"`` (memory of the same host) or ``"tcp"``."""

    @property
    def metadata(self) -> bytes:
        """The ``metadata`` of the peer's engine, at most 16 KiB."""

    @property
    def alive(self) -> bool:
        """Whether a link to this incarnation exists now.

        It is false once its ``PeerDown`` can be taken, or the engine is closed.
        """

    def __getitem__(self, cache: str, /) -> RemoteCache:
        """Name a cache of the peer. Nothing is sent.

        Raises:
            TypeError: ``cache`` is not a text.
            InvalidArgument: the name is empty or longer than 128 bytes of UTF-8.
        """

    def send(self, message: bytes, /) -> None:
        """Send a message to the peer's program, which gets it as the event ``Message``. The call never waits.

        Messages of one peer arrive in order, each at most once. When the link ends, ``PeerDown.unconfirmed`` counts
        those whose arrival the peer has not confirmed.

        Args:
            message: ``bytes`` or ``bytearray``, at most 64 KiB.

        Raises:
            TypeError: ``message`` has the wrong type.
            InvalidArgument: the message is too long.
            Busy: the peer's program has not taken 1,024 messages or 4 MiB with ``events``. Nothing was sent.
            PeerLost: there is no link to this incarnation.
            Closed: the engine is closed.
        """

    def close(self, timeout: float | None = None) -> Transfer[None]:
        """Start to end the link.

        Transfers of this engine that run over it are finished first; new ones fail with ``PeerLost``. Both ends get
        ``PeerDown``. The peer is notified, and may link again. Closing a peer that is not linked ends at once.

        Args:
            timeout: seconds to wait until running transfers have ended and the peer has confirmed. ``None``:
                ``Engine.timeout``. This end has dropped the link when the transfer ends, whatever its outcome.

        Raises:
            TypeError: ``timeout`` has the wrong type.
            InvalidArgument: ``timeout`` is not above 0 or not finite.
            Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
            Closed: the engine is closed.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    __iter__: ClassVar[None]

@final
class Transfer(Generic[_T_co]):
    """The handle of an operation that was started. Its outcome is a result or an error, and never changes.

    The result of ``Engine.link`` is a ``Peer``, that of ``Store.start_get`` and ``Store.start_put`` is a list, and that
    of every other operation is ``None``. ``await transfer`` waits in an event loop without a thread.
    ``asyncio.ensure_future``, ``wait_for`` and ``gather`` take a transfer, and ``create_task`` does not. Several
    threads and several event loops may wait for one transfer, and each gets the outcome. Cancelling a coroutine that
    waits does not cancel the transfer: its blocks must not be reused before ``done``.

    Unless somebody takes the outcome with ``result`` or ``await`` first, ``events`` of its engine or store returns one
    ``Completed`` for it. Dropping the handle does not end the transfer, and its event still comes. A layer-wise push
    that is dropped before its last ``ready`` is cancelled, because nobody could report its layers.

    Handles compare and hash by identity.
    """

    @property
    def bytes(self) -> int:
        """The number of bytes that are known to be in place. Final when the transfer has ended."""

    @property
    def total(self) -> int:
        """The number of bytes that the transfer moves in all; 0 until it is known."""

    @property
    def nanos(self) -> int:
        """Nanoseconds from the start of the transfer to its end, or until now.

        Those of a transfer of a store begin when a thread begins it. Before, they are 0.
        """

    def done(self) -> bool:
        """Return whether the transfer has ended. Then nothing of it touches memory any more."""

    def result(self, timeout: float | None = None) -> _T_co:
        """Wait until the transfer has ended. Return its result, or raise its error. Ctrl-C interrupts the wait.

        Args:
            timeout: seconds to wait, 0 or above. ``None``: until it ends, which the time limit of the operation bounds.
                A layer-wise push has no such limit while it waits for ``ready``.

        Raises:
            TypeError: ``timeout`` has the wrong type.
            InvalidArgument: ``timeout`` is negative or not finite, or it is the outcome of the transfer.
            TimeoutError: ``timeout`` has passed and the transfer continues. If the error is also a ``Timeout``, it is
                the outcome of the transfer.
            Error: the outcome of the transfer, as the call that started it describes.
        """

    def cancel(self) -> bool:
        """Ask the transfer to end with ``Cancelled``, without waiting for its end.

        A transfer that waits ends at once, or within 100 ms if it waits for a peer. A copy of memory that has begun is
        finished first; a transfer of a store only finishes the part of its values that it copies. Until ``done``, the
        transfer may touch its memory.

        Returns:
            ``True`` if the transfer will end with ``Cancelled``, ``False`` if its outcome can no longer change.
        """

    def ready(self, layer: int, /) -> None:
        """Report that a layer is computed, and start to send it. The call never waits.

        Only for a push with ``layerwise=True``. Layers may come in any order and from any thread. From now on the layer
        must not be written until the transfer has ended. The transfer succeeds when all layers of its rows were
        reported and are in place. Reporting a layer after the transfer has failed does nothing.

        Args:
            layer: layer of the source cache, counted from 0.

        Raises:
            TypeError: ``layer`` is not an integer.
            InvalidArgument: the transfer is not layer-wise; the cache has no such layer; it was reported before.
        """

    def __await__(self) -> Generator[Any, None, _T_co]: ...
    def __class_getitem__(cls, key: Any) -> Any: ...

@final
class Grant:
    """Blocks that are lent to readers for a limited time. ``Engine.lend`` makes it.

    Dropping the object does not end the grant. Two objects are equal if they stand for the same grant.
    """

    @property
    def token(self) -> bytes:
        """The 48 bytes that name the grant. Send them to its readers only: nobody can guess them."""

    @property
    def rows(self) -> Rows:
        """The blocks that are lent."""

    @property
    def ended(self) -> _Reason | None:
        """Why the grant has ended, or ``None`` while it lasts.

        ``"done"``: its readers have finished. ``"expired"``: its time is over. ``"revoked"``: ``revoke`` was called.
        ``"released"``: the cache was freed.
        """

    def renew(self, ttl: float, /) -> None:
        """Let the grant last at least until ``ttl`` seconds from now. It never becomes shorter; ``revoke`` ends it.

        Args:
            ttl: seconds, above 0 and at most 4,294,967.

        Raises:
            TypeError: ``ttl`` is not a number.
            InvalidArgument: ``ttl`` is out of range.
            GrantEnded: the grant has ended.
            Closed: the engine is closed.
        """

    def revoke(self) -> Transfer[None]:
        """End the grant now. When the call returns, no pull under it succeeds any more, so the blocks may be written.

        A reader may still be reading the blocks; its pull fails. Revoking a grant that has ended does nothing.

        Returns:
            A transfer that ends when the reads that this engine serves have ended. If it serves none, it has ended when
            it is returned, and there is no ``Completed`` for it.

        Raises:
            Busy: reads are served, and ``max_transfers`` transfers run or have an outcome that was not taken. The grant
                has ended.
            OutOfMemory: reads are served, and there is no memory for the transfer. The grant has ended.
            Closed: the engine is closed.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Completed:
    """The event that a transfer has ended and nobody has taken its outcome. There is one for each such transfer."""

    __match_args__: ClassVar[tuple[str, ...]] = ("transfer", "error")

    @property
    def transfer(self) -> Transfer[Any]:
        """The handle that the call returned: the same object, unless the program has dropped it."""

    @property
    def error(self) -> Error | None:
        """The error of the transfer, or ``None`` if it succeeded."""

@final
class Message:
    """The event that the program at a peer has sent a message, by ``Peer.send`` or ``notify=``."""

    __match_args__: ClassVar[tuple[str, ...]] = ("peer", "data")

    @property
    def peer(self) -> Peer:
        """The peer that sent it. Its link may have ended since."""

    @property
    def data(self) -> bytes:
        """The message, at most 64 KiB."""

@final
class PeerUp:
    """The event that a link was made, by either end."""

    __match_args__: ClassVar[tuple[str, ...]] = ("peer",)

    @property
    def peer(self) -> Peer:
        """The other end."""

@final
class PeerDown:
    """The event that a link has ended, for whatever reason.

    It comes after the messages of the peer, and after the ends of the transfers over the link. It waits for them for at
    most one second, and not if the same peer has been linked again.
    """

    __match_args__: ClassVar[tuple[str, ...]] = ("peer", "reason", "unconfirmed")

    @property
    def peer(self) -> Peer:
        """The other end."""

    @property
    def reason(self) -> str:
        """Why the link ended, for people. Do not compare it."""

    @property
    def unconfirmed(self) -> int:
        """The number of messages to the peer whose arrival it has not confirmed. Each may have arrived or not."""

@final
class GrantClosed:
    """The event that a grant of this engine has ended.

    The blocks of the grant may be written again. There is one event for each grant, also after ``revoke``.
    """

    __match_args__: ClassVar[tuple[str, ...]] = ("grant", "reason")

    @property
    def grant(self) -> Grant:
        """The grant, equal to the object that ``Engine.lend`` returned."""

    @property
    def reason(self) -> _Reason:
        """Why the grant has ended, as ``Grant.ended`` says."""

Event: TypeAlias = Completed | Message | PeerUp | PeerDown | GrantClosed

@final
class KvLayout:
    """How the bytes of a block are ordered. It cannot be changed, compares and hashes by value, and can be pickled.

    A cache whose blocks have no such meaning needs no layout.

    Args:
        layers: the layers of the model that the cache holds, at least one: a number ``n`` for ``range(n)``, or a
            ``range`` of step 1 for a pipeline-parallel rank.
        block_tokens: number of tokens in a block, at least 1.
        heads: the key-value heads that the cache holds: a number ``n`` for ``range(n)``, or a ``range`` of step 1 for a
            tensor-parallel rank. Required, except with ``kv="latent"``, which has none.
        total_heads: number of key-value heads of the whole model. ``None``: as many as ``heads`` has. Give it together
            with a ``range``.
        head_dim: number of elements of one head of one token, or of one latent vector; at least 1.
        dtype: type of the elements, as for ``Engine.allocate``.
        order: ``"NHD"``: a block is ``[tokens, heads, head_dim]``. ``"HND"``: ``[heads, tokens, head_dim]``.
        kv: ``"separate"``: two tensors for each layer, keys and then values. ``"k_then_v"``: one tensor for each layer,
            whose blocks have the keys of all tokens and then the values. ``"latent"``: one tensor for each layer, with
            one vector for each token (MLA), the same in every rank. ``"single"``: one tensor for each layer, with one
            vector for each head of each token.
        model: name or version of the model, at most 256 bytes of UTF-8. Both ends of a transfer must have the same.

    Raises:
        TypeError: an argument has the wrong type, or ``heads`` is missing.
        InvalidArgument: a number is out of range; a range is empty or has another step; heads outside ``total_heads``;
            an unknown ``order``, ``kv`` or ``dtype``; ``model`` is too long.
    """

    def __new__(
        cls,
        *,
        layers: int | range,
        block_tokens: int,
        heads: int | range | None = None,
        total_heads: int | None = None,
        head_dim: int,
        dtype: _Dtype,
        order: Literal["NHD", "HND"] = "NHD",
        kv: Literal["separate", "k_then_v", "latent", "single"] = "separate",
        model: str = "",
    ) -> Self: ...
    @property
    def layers(self) -> range:
        """The layers of the model that the cache holds."""

    @property
    def block_tokens(self) -> int:
        """The number of tokens in a block."""

    @property
    def heads(self) -> range:
        """The key-value heads that the cache holds; ``range(1)`` for ``kv="latent"``."""

    @property
    def total_heads(self) -> int:
        """The number of key-value heads of the model."""

    @property
    def head_dim(self) -> int:
        """The number of elements of one head of one token."""

    @property
    def dtype(self) -> str:
        """The name of the element type, such as ``"bfloat16"``."""

    @property
    def order(self) -> Literal["NHD", "HND"]:
        """The order of dimensions in a block."""

    @property
    def kv(self) -> Literal["separate", "k_then_v", "latent", "single"]:
        """Where keys and values are."""

    @property
    def model(self) -> str:
        """The name or version of the model."""

    @property
    def tensors(self) -> int:
        """The number of tensors of a cache with this layout: one or two for each layer."""

    def shape(self, blocks: int, /) -> list[int]:
        """Return the shape of one tensor of ``blocks`` blocks.

        It is ``[blocks, tokens, heads, head_dim]`` for ``"NHD"`` and ``[blocks, heads, tokens, head_dim]`` for
        ``"HND"``. ``"k_then_v"`` has a dimension of 2 after the blocks, and ``"latent"`` has no dimension of heads.

        Raises:
            TypeError: ``blocks`` is not an integer.
            InvalidArgument: ``blocks`` is negative or above 2**63 - 1.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __replace__(self, /, **changes: Any) -> Self:
        """Return a layout in which some arguments are replaced, for ``copy.replace``."""

    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class TensorView:
    """One tensor of a cache, without a copy.

    ``numpy.asarray``, ``numpy.from_dlpack``, ``torch.from_dlpack`` and similar functions accept it. The memory is
    writable, and C-contiguous except for the gaps between blocks of a cache with a ``stride``. Pool memory stays mapped
    as long as the view, or an array made from it, exists. Memory that was registered by address belongs to the program,
    and no view keeps it alive.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, outermost first. The first one is the blocks."""

    @property
    def address(self) -> int:
        """The address of the first byte."""

    @property
    def nbytes(self) -> int:
        """The size in bytes, gaps between blocks not included."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array interface of numpy. ``bfloat16`` appears as ``uint16``; texts raise ``TypeError``."""

    def numpy(self) -> Any:
        """Return a ``numpy.ndarray`` over the same memory. ``bfloat16`` appears as ``uint16``.

        The array stays valid after ``Cache.free`` and ``Engine.close``, unless the memory was registered by address.

        Raises:
            ImportError: numpy is not installed. ``pip install llm-datadist[numpy]`` installs it.
        """

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Return a DLPack capsule, in the layout of version 1 if ``max_version`` allows it.

        Raises:
            BufferError: the caller asks for a stream, a device other than the CPU, or a copy.
            TypeError: the elements are texts, as in some caches of the original's API. DLPack has no type for them.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the type and the number of the device in DLPack's numbers."""

@final
class CacheBuffer:
    """All bytes of a contiguous cache as one flat array of ``uint8``, without a copy. ``Cache.buffer`` makes it.

    ``memoryview``, ``numpy.frombuffer``, ``torch.from_dlpack`` and similar functions accept it. The memory is writable,
    and stays mapped as long as the view, or an array made from it, exists.
    """

    @property
    def address(self) -> int:
        """The address of the first byte."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    def numpy(self) -> Any:
        """Return a ``numpy.ndarray`` of ``uint8`` over the same memory.

        Raises:
            ImportError: numpy is not installed. ``pip install llm-datadist[numpy]`` installs it.
        """

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a ``memoryview`` of the bytes."""

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Return a DLPack capsule, in the layout of version 1 if ``max_version`` allows it.

        Raises:
            BufferError: the caller asks for a stream, a device other than the CPU, or a copy.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the type and the number of the device in DLPack's numbers."""

@final
class Store:
    """A client of a keeper: values by key, shared with other processes of this host, which outlive this one.

    A key is 28 bytes: a digest of everything that decides the bytes of the value, such as ``hashlib.sha224``. If the
    keeper is away, every key is a miss and nothing raises; the store attaches again by itself. Several threads may use
    a store. A call has at most 4,096 keys. ``with`` calls ``close`` at the end.

    ``start_get`` and ``start_put`` return a ``Transfer`` at once. Wait for it, ``await`` it, or take what has ended
    from ``events`` when ``fileno`` is readable. At most 4,096 transfers of a store run or have an outcome that was not
    taken. The store releases the buffers of a transfer when the program learns of its end, or with the next call of
    ``start_get``, ``start_put`` or ``events``.

    Args:
        socket: path at which the keeper listens. The keeper need not be there yet.
        namespace: text of 1 to 4,096 bytes that stands for everything that gives values their meaning: model, revision,
            element type, layout, ranks, versions. Stores with other texts share nothing.
        value: bytes of each value, as a number or a text such as ``"64KiB"``. All stores of a namespace have the same.
        timeout: time limit in seconds of opening the store, and of each call that has no ``timeout`` of its own.
        queue: largest number of bytes of values of started calls that have not ended, as a number or a text. A further
            call raises ``Busy``.
        checksums: whether ``put`` gives each value a checksum (XXH3, 64 bits), and ``get`` compares it with the bytes
            that it has copied. A value that differs is a miss, and the keeper drops it. All stores of a namespace have
            the same.
        token: token that gives the store its role: ``put`` needs the role ``write``, ``drop`` and ``clear`` need
            ``admin``, and the other calls ``read``. ``None``: that of ``token_file``, or none. Processes of the user of
            the keeper need no token, and may do everything.
        token_file: path of a file with the token, of mode 0600 or 0400, in place of ``token``.
        keeper_user: number of the user whose keeper is trusted with the values. ``None``: this user. Another
            one needs a token.

    Raises:
        TypeError: an argument has the wrong type.
        InvalidArgument: an argument is out of range, or the keeper refuses it: its values are smaller, the namespace
            has values of another size or other ``checksums``, the keeper does not know the token, or its version
            differs.
        Error: the system refuses the connection, a process of another user listens at the socket, or the keeper has
            reached a limit.
    """

    def __new__(
        cls,
        socket: str | PathLike[str],
        /,
        *,
        namespace: str,
        value: _Size = "64KiB",
        timeout: float = 5.0,
        queue: _Size = "16GiB",
        checksums: bool = False,
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
        keeper_user: int | None = None,
    ) -> Self: ...
    def exists(self, keys: Sequence[bytes], /) -> list[bool]:
        """Say which keys the keeper has, without a message to it.

        A value may be replaced right afterwards, so only ``get`` says whether it could be read.

        Args:
            keys: list of keys, at most 4,096.

        Returns:
            For each key whether the keeper has it.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: a key does not have 28 bytes, or there are too many.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def get(
        self, keys: Sequence[bytes], into: Sequence[_Memory] | _Memory, /, *, rows: _Integers | None = None
    ) -> list[bool]:
        """Copy the values of keys out of the memory of the keeper, without a message to it.

        Args:
            keys: list of keys, at most 4,096.
            into: list of writable buffers or arrays in host memory, one for each key, each with the bytes of a value.
                They must not overlap.
            rows: if given, for each key the row of ``into`` that the value goes to. Then ``into`` is one writable
                buffer or array, with a multiple of the bytes of a value. A list or an array of integers.

        Returns:
            For each key whether its buffer has the value, complete and right, and with its checksum if the store has
            checksums. Other buffers may have any bytes.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: a key does not have 28 bytes, there are too many, or a buffer has another size or overlaps
                another one.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def view(self, keys: Sequence[bytes], /, *, ttl: float, timeout: float | None = None) -> StoreView:
        """Give the values of keys where they lie in the memory of the keeper, without a copy, with leases on them.

        Use the view in a ``with`` statement, and call its ``valid`` in it after the last use: the bytes may change at
        any time, with a lease as well. What was computed from a value counts only if ``valid`` says that the value was
        right.

        Args:
            keys: list of keys, at most 4,096.
            ttl: seconds for which the values are leased, above 0 and at most 10. The end of the ``with`` statement ends
                the leases of this store on the keys, also those of ``lease``, unless another view has them.
            timeout: time limit of the call in seconds. ``None``: that of the store. A value without a lease is there
                all the same.

        Returns:
            The view. If the keeper is away, it has no values.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: a key does not have 28 bytes, there are too many, or ``ttl`` is out of range.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def put(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | _Memory] | _Memory,
        /,
        *,
        rows: _Integers | None = None,
        timeout: float | None = None,
    ) -> list[bool]:
        """Have the keeper copy values. It keeps the value that it has of a key.

        Give the keys of a chain in its order: the end of a chain is replaced before its start.

        Args:
            keys: list of keys, at most 4,096.
            values: list of ``bytes``, buffers or arrays in host memory, one for each key, each with the bytes of a
                value. No other thread may write them during the call. A read-only buffer that is neither ``bytes`` nor
                an array is copied first.
            rows: if given, for each key the row of ``values`` that has the value. Then ``values`` is one writable
                buffer or array, with a multiple of the bytes of a value. A list or an array of integers.
            timeout: time limit in seconds. ``None``: that of the store.

        Returns:
            For each key whether the keeper has a value now. If the keeper is away or does not answer in time, no value
            that it has not confirmed.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: a key does not have 28 bytes, there are too many, or a value has another size.
            Error: the role of the token is ``read``; ``code`` is ``"not_enabled"``. The store can be used further.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def start_get(
        self,
        keys: Sequence[bytes],
        into: Sequence[_Memory] | _Memory,
        /,
        *,
        rows: _Integers | None = None,
        timeout: float | None = None,
    ) -> Transfer[list[bool]]:
        """Start a ``get``, and return at once.

        The result of the transfer is the list that ``get`` returns, and its ``bytes`` are those that were found. Its
        buffers are held until it has ended: nobody may use them before ``done``, and nothing is written into them
        afterwards. Gets do not wait for puts. A cancelled get finishes its current batch first: at most 64 values or
        about 64 MiB.

        Args:
            keys: list of keys, at most 4,096.
            into: as for ``get``.
            rows: as for ``get``.
            timeout: seconds from now. The transfer ends then with ``Timeout``, whether it has begun or not. ``None``:
                that of the store.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: an argument is out of range, as for ``get``, or the values have more bytes than ``queue``.
            Busy: 4,096 transfers run or have an outcome that was not taken, or those that run use ``queue`` bytes of
                values.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def start_put(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | _Memory] | _Memory,
        /,
        *,
        rows: _Integers | None = None,
        timeout: float | None = None,
    ) -> Transfer[list[bool]]:
        """Start a ``put``, and return at once.

        The result of the transfer is the list that ``put`` returns, and its ``bytes`` are those that the keeper has.
        Its values are held until it has ended: nobody may write them before ``done``. Puts of a store run one after the
        other, in the order in which they were started. A put that is cancelled gives the keeper no further values, and
        ends within 100 ms if it waits for the keeper. The store attaches again afterwards.

        Args:
            keys: list of keys, at most 4,096.
            values: as for ``put``.
            rows: as for ``put``.
            timeout: seconds from now. If the transfer has not begun then, it ends with ``Timeout``. If it has, what the
                keeper has not confirmed is not stored. ``None``: that of the store.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: an argument is out of range, as for ``put``, or the values have more bytes than ``queue``.
            Busy: 4,096 transfers run or have an outcome that was not taken, or those that run use ``queue`` bytes of
                values.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def events(self, limit: int = 1024) -> list[Completed]:
        """Return the transfers that have ended since the last call, in the order of their ends. The call never waits.

        A transfer whose outcome was taken by ``result`` or ``await`` has no event. ``result`` and ``await`` still give
        the outcome of a transfer whose ``Completed`` was taken.

        Args:
            limit: largest number of events, from 1 to 2**32 - 1. The others stay for the next call.

        Raises:
            TypeError: ``limit`` is not an integer.
            InvalidArgument: ``limit`` is out of range.
            OutOfMemory: there is no memory for the list. The events stay.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``events`` has something to return.

        Use it with ``select``, ``selectors`` or ``epoll``, which also accept the store itself. It belongs to the store:
        do not read, write or close it.

        Raises:
            Closed: the store is closed, or belongs to the parent of this process.
            Error: no descriptor is left.
        """

    def lease(self, keys: Sequence[bytes], /, *, ttl: float, timeout: float | None = None) -> list[bool]:
        """Have the keeper not replace the values of keys for a while.

        A lease makes a hit likelier, and promises nothing: the keeper may end, and another store may drop the
        value. It ends with its time, with the store, or with the process. All leases of a store hold at most a
        quarter of the slots of the keeper, and those of all stores half. Leasing a value again lets its lease last
        longer. A store has one lease on a value: it also ends when a view of this store on the key ends, unless another
        view has the key.

        Args:
            keys: list of keys, at most 4,096.
            ttl: seconds, above 0 and at most 10.
            timeout: time limit of the call in seconds. ``None``: that of the store.

        Returns:
            For each key whether the store has a lease on its value now.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: a key does not have 28 bytes, there are too many, or ``ttl`` is out of range.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def unlease(self, keys: Sequence[bytes], /, *, timeout: float | None = None) -> None:
        """End the leases of this store on the values of keys, without waiting for a reply.

        Leases of its views end, too: their values stay readable, and are likelier to become invalid. If the keeper
        takes no message for the time limit, the leases end with their time.

        Args:
            keys: list of keys, at most 4,096.
            timeout: time limit in seconds. ``None``: that of the store.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: a key does not have 28 bytes, or there are too many.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def drop(self, keys: Sequence[bytes], /, *, timeout: float | None = None) -> int:
        """Have the keeper drop the values of keys.

        Args:
            keys: list of keys, at most 4,096.
            timeout: time limit in seconds. ``None``: that of the store.

        Returns:
            How many of the keys had a value.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: a key does not have 28 bytes, or there are too many.
            Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The store can be used further.
            PeerLost: the keeper is away.
            Timeout: the keeper has not answered in time.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def clear(self, *, timeout: float | None = None) -> int:
        """Have the keeper drop all values of the namespace. Those that are put meanwhile may stay.

        An error of a call that has dropped some says how many: ``dropped=...`` in its text.

        Args:
            timeout: time limit in seconds. ``None``: that of the store.

        Returns:
            How many values there were.

        Raises:
            TypeError, InvalidArgument: ``timeout`` has the wrong type or is out of range.
            Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The store can be used further.
            PeerLost: the keeper is away.
            Timeout: the keeper has not answered in time.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def stats(self, *, keeper: bool = True, timeout: float | None = None) -> StoreStats:
        """Return the counts of this store, and those of the keeper.

        Args:
            keeper: whether to ask the keeper for its counters. ``False`` sends no message, so a keeper that hangs does
                not matter.
            timeout: time limit in seconds. ``None``: that of the store.

        Returns:
            A dict: ``llm_datadist.stats.StoreStats`` has its fields. The counters of the keeper are ``None`` if it is
            away or was not asked. They are also ``None`` if it does not answer in time: then the store attaches again,
            as after a ``put``.

        Raises:
            TypeError, InvalidArgument: an argument has the wrong type or is out of range.
            Closed: the store is closed, or belongs to the parent of this process.
        """

    def close(self) -> None:
        """End the connection to the keeper, which keeps the values. Closing again does nothing.

        Calls of other threads that wait for the keeper end. Transfers end with ``Closed``: this waits for the copies
        that run, at most 10 s. Handles of ended transfers keep their outcomes, and no event comes any more.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class StoreView:
    """The values of keys where they lie in the memory of the keeper. ``Store.view`` makes it.

    Use it in a ``with`` statement, and call ``valid`` in it after the last use of the values::

        with store.view(keys, ttl=5) as view:
            sums = [value and crc32(value) for value in view.values]
            right = view.valid()

    The bytes may change at any time: the keeper may have refused a lease, another store may drop a value, or the time
    of the leases may be over. What was computed from a value counts only if ``valid`` says that the value was right. A
    ``with`` statement that ends without a call of ``valid`` after the last use of ``values`` raises.

    Wait for every read to finish before you call ``valid``. A copy to a device and a send without a copy may read
    later: synchronize the stream first.

    The end of the ``with`` statement releases ``values``, and ends the leases without waiting for the keeper. An array
    or a slice that was made from a value stays readable as long as it lives, but its bytes may be those of other keys
    later. A value whose buffer another object holds at that time, such as a ``pickle.PickleBuffer`` or a call in
    another thread, is not released. What stays readable keeps all memory of the keeper in use, also after the keeper
    has ended.

    A view does not need the keeper. After the keeper has ended, after ``Store.close`` and in a forked child, its values
    stay readable and ``valid`` answers. Several threads may use it.
    """

    @property
    def values(self) -> tuple[memoryview | None, ...]:
        """For each key a read-only ``memoryview`` of its value, or ``None`` if the keeper does not have it.

        ``numpy.frombuffer`` and similar functions accept it, without a copy. Each use of this property needs a call of
        ``valid`` after it.

        Raises:
            ValueError: the ``with`` statement has ended.
        """

    @property
    def leased(self) -> list[bool]:
        """For each key whether the keeper has leased its value.

        A value without a lease is likelier to become invalid.
        """

    def valid(self) -> list[bool]:
        """Say which values are still right. Then everything that was read of them so far is right.

        The first call counts hits and misses, as ``Store.get`` does. It may be called again after more reads. If the
        store has checksums, each call reads all bytes of the values, and a value without its checksum is not right.

        Returns:
            For each key whether its value is right. ``False`` for a key without a value.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class Keeper:
    """A store of values that outlives the processes that use it, here in a thread of this process.

    ``llm-datadist serve`` runs one in a process of its own. Processes of the same user use it with a ``Store``, and
    others with a token. When its memory is full, the value that was not used for the longest time is replaced. ``with``
    calls ``close`` at the end.

    Args:
        memory: bytes for values, as a number or a text such as ``"8GiB"``. It is used as values arrive, and not
            before.
        socket: path at which stores attach, of at most 108 bytes. A socket that a dead keeper has left there is taken
            over. The file ``<socket>.lock`` beside it stays.
        value: bytes of the largest value, at most 64 MiB, in the same form. Each value takes so much memory.
        tokens: path of a file with tokens, of mode 0600 or 0400. Each line has a role (``read``, ``write`` or
            ``admin``) and a token of at least 16 characters. ``None``: only processes of this user attach.
        group: number of a group of this user. Its processes may connect to the socket, too, which then has mode 0660.
            Those of other users need a token, so ``tokens`` must be given.

    Raises:
        TypeError: an argument has the wrong type.
        InvalidArgument: a size is out of range, ``memory`` does not hold one value, the path cannot be one of a socket,
            the file of tokens cannot be read, can be read by others or has a wrong line, or ``group`` is given without
            ``tokens``.
        OutOfMemory: ``memory`` is more than this process may use: the free memory of the machine or of its control
            group.
        Error: another program listens at the path; the error has its process as the fact ``pid``. Or the system
            refuses a file, a socket, the group or a thread.
    """

    def __new__(
        cls,
        *,
        memory: _Size,
        socket: str | PathLike[str],
        value: _Size = "64KiB",
        tokens: str | PathLike[str] | None = None,
        group: int | None = None,
    ) -> Self: ...
    @property
    def slots(self) -> int:
        """How many values fit into the memory."""

    @property
    def closed(self) -> bool:
        """Whether it serves nobody. This property never raises.

        ``close`` was called, another keeper has taken over, its thread has ended, or this process is a forked child.
        """

    def close(self) -> None:
        """Forget all values and remove the socket. Stores then find nothing. Closing again does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class KeeperObserver:
    """A read-only client of a keeper: it lists values and namespaces, and reads counters.

    It has no namespace of its own. It does not attach again: after a call that the keeper has not answered, all calls
    fail. Open another one then. A keeper has at most 8. Several threads may use it. ``with`` calls ``close`` at the
    end.

    Args:
        socket: path at which the keeper listens.
        timeout: seconds after which attaching and each call give up.
        token: token that gives the observer its role: ``stats`` needs the role ``read``, and the other calls ``admin``.
            ``None``: that of ``token_file``, or none. Processes of the user of the keeper need no token, and may do
            everything.
        token_file: path of a file with the token, of mode 0600 or 0400, in place of ``token``.
        keeper_user: number of the user whose keeper is meant. ``None``: this user. Another one needs a token.

    Raises:
        TypeError: an argument has the wrong type.
        InvalidArgument: an argument is out of range, the version of the keeper differs, or the keeper does not accept
            the token.
        PeerLost: no keeper listens there.
        Timeout: the keeper has not answered in time.
        Error: the system refuses the connection, a process of another user listens at the socket, or the keeper has 8
            observers.
    """

    def __new__(
        cls,
        socket: str | PathLike[str],
        /,
        *,
        timeout: float = 5.0,
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
        keeper_user: int | None = None,
    ) -> Self: ...
    def stats(self) -> KeeperStats:
        """Return the counters of the keeper.

        Raises:
            PeerLost: the keeper has ended, or has not answered an earlier call.
            Timeout: the keeper has not answered in time, or calls of other threads took the time.
            Closed: the observer is closed, or belongs to the parent of this process.
        """

    def namespaces(self) -> list[StoredNamespace]:
        """Return the namespaces that the keeper knows, in the order of their numbers.

        A text occurs more than once while only readers with different settings use it.

        Raises:
            Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The observer can be used
                further.
            PeerLost: the keeper has ended, or has not answered an earlier call.
            Timeout: the keeper has not answered in time, or calls of other threads took the time.
            Closed: the observer is closed, or belongs to the parent of this process.
        """

    def values(self, namespace: int | None = None, /, *, limit: int = 1000) -> list[StoredValue]:
        """Return values that the keeper has, the most recently used ones first.

        They are not all of the same moment, because the keeper serves others meanwhile. A value that stays meanwhile is
        there exactly once, whatever is used. A key that is dropped and put again meanwhile may be missing, or be there
        twice with different slots.

        Args:
            namespace: number of a namespace. ``None``: the values of all.
            limit: most values to return.

        Raises:
            TypeError: an argument has the wrong type.
            InvalidArgument: an argument is out of range.
            Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The observer can be used
                further.
            PeerLost: the keeper has ended, or has not answered an earlier call.
            Timeout: the keeper has not answered in time, or calls of other threads took the time.
            Closed: the observer is closed, or belongs to the parent of this process.
        """

    def changes(self) -> StoredChanges:
        """Return which values were stored and removed since the last call, in this order.

        The first call returns none: call it before ``values`` to follow the keeper from then on without a gap. The
        keeper remembers the last 65,536 changes. If there were more since the last call, ``missed`` is the number of
        those that are not returned; call ``values`` again then. Each change is returned once, to one of the threads.

        Raises:
            Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The observer can be used
                further.
            PeerLost: the keeper has ended, or has not answered an earlier call.
            Timeout: the keeper has not answered in time, or calls of other threads took the time.
            Closed: the observer is closed, or belongs to the parent of this process.
        """

    def close(self) -> None:
        """End the connection to the keeper. Closing again does nothing.

        Calls of other threads that wait for the keeper end.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class _Holder:
    """The memory and the socket of a keeper, from which forked children serve one after the other."""

    def __new__(
        cls,
        *,
        memory: _Size,
        socket: str | PathLike[str],
        value: _Size,
        take_over: bool,
        tokens: str | PathLike[str] | None = None,
        group: int | None = None,
    ) -> Self: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def takes_over(self) -> bool: ...
    def prepare(self, begin: int, end: int) -> None: ...
    def take_over(self, stop: socket.socket) -> tuple[int, int]: ...
    def serve(self, stop: socket.socket, *, empty: bool) -> bool: ...
