//! What engines do: opening and closing, caches, transfers, links, grants and events.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::WhileRefused;
use llm_datadist_core::bindings::native;
use llm_datadist_core::bindings::{Config, DataDist, Side};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::cache::NativeCache;
use super::cache_form::GivenForm;
use super::call::{self, GivenExtras, Pairs};
use super::engine::NativeEngine;
use super::events;
use super::grant::NativeGrant;
use super::layout::NativeLayout;
use super::optional_arg::OptionalArg;
use super::options::GivenOptions;
use super::peer::NativePeer;
use super::shared::EngineShared;
use super::transfer::NativeTransfer;
use super::values::{self, text};
use crate::convert::Any;
use crate::stats;

#[pymethods]
impl NativeEngine {
    #[new]
    #[pyo3(
        signature = (*, pool=OptionalArg::Missing, host_pool=OptionalArg::Missing, page=OptionalArg::Missing,
                     listen=OptionalArg::Missing, name=None, metadata=OptionalArg::Missing, token=OptionalArg::Missing,
                     token_file=OptionalArg::Missing, accept_remote=OptionalArg::Missing, timeout=OptionalArg::Missing,
                     verify=OptionalArg::Missing, **options),
        text_signature = "(*, pool=None, host_pool=None, page='64KiB', listen=None, name=None, metadata=b'', token=None, \
                          token_file=None, accept_remote=False, timeout=10.0, verify='off', **options)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public class")]
    fn new<'py>(
        py: Python<'py>,
        pool: OptionalArg<'_, 'py>,
        host_pool: OptionalArg<'_, 'py>,
        page: OptionalArg<'_, 'py>,
        listen: OptionalArg<'_, 'py>,
        name: Option<&Any<'py>>,
        metadata: OptionalArg<'_, 'py>,
        token: OptionalArg<'_, 'py>,
        token_file: OptionalArg<'_, 'py>,
        accept_remote: OptionalArg<'_, 'py>,
        timeout: OptionalArg<'_, 'py>,
        verify: OptionalArg<'_, 'py>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Self> {
        let arguments = [pool, host_pool, page, listen, token, token_file, accept_remote, timeout, verify];
        let config = GivenOptions { arguments, options, name }.config(py)?;
        let metadata =
            metadata.given().map_or_else(|| Ok(Vec::new()), |given| values::bytes("metadata", &given))?;
        Ok(NativeEngine { shared: EngineShared::open(py, Config { metadata, ..config })?, ends: true })
    }

    /// The name that peers see. It can still be read when the engine is closed.
    #[getter]
    fn name(&self) -> &str {
        &self.shared.name
    }

    /// The address at which the engine listens, with the port that was taken; ``None`` without ``listen``.
    ///
    /// It can still be read when the engine is closed, but nobody listens there any more.
    #[getter]
    fn address(&self, py: Python<'_>) -> Option<String> {
        self.shared.engine.address(py)
    }

    /// The default time limit of a call in seconds. It can still be read when the engine is closed.
    #[getter]
    fn timeout(&self) -> f64 {
        self.shared.timeout.as_secs_f64()
    }

    /// Whether ``close`` was called, or this process is a forked child. This property never raises.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.engine.closed()
    }

    /// The peers that are linked now, whichever end made the link.
    ///
    /// Raises:
    ///     Closed: the engine is closed.
    #[getter]
    fn peers(&self, py: Python<'_>) -> PyResult<Vec<Py<NativePeer>>> {
        let peers = self.shared.engine.attached(py, |engine| Ok(engine.peers()))?;
        peers.iter().map(|peer| NativePeer::of(py, &self.shared, peer)).collect()
    }

    /// Allocate a cache from a pool. Its contents are undefined.
    ///
    /// Give either a ``layout``, or ``tensors``, ``shape`` and ``dtype``. Peers find the cache by its name.
    ///
    /// Args:
    ///     name: name of the cache: 1 to 128 bytes of UTF-8, printable. No other cache of this engine may have it.
    ///     layout: what the blocks mean. Transfers between caches whose layouts differ convert the blocks.
    ///     blocks: number of blocks, from 1 to 2**32 - 1. A block is one row of every tensor.
    ///     tensors: number of tensors, at least 1.
    ///     shape: dimensions of one block of one tensor, each at least 1. ``()`` is one element.
    ///     dtype: type of the elements: ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float64"``, ``"int8"`` to
    ///         ``"int64"``, ``"uint8"`` to ``"uint64"`` or ``"bool"``, or an object with such a name, such as
    ///         ``numpy.float16`` or ``torch.bfloat16``.
    ///     pool: pool from which the memory is taken: ``"device"`` or ``"host"``.
    ///     tensors_per_layer: number of consecutive tensors that form a layer, for ``Rows.part(layers=...)`` and
    ///         layer-wise pushes. It divides ``tensors``. By default 1. A layout knows it.
    ///     contiguous: whether the tensors follow each other without gaps, as ``Cache.buffer`` needs.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type, or only some of ``tensors``, ``shape`` and ``dtype`` are given,
    ///         or they are given beside a layout.
    ///     InvalidArgument: the name is in use; a number is out of range; the engine has no such pool; the cache would
    ///         have 2**63 bytes or more.
    ///     OutOfMemory: the pool has no room. The error has the bytes that were asked for, and those that are free.
    ///     Closed: the engine is closed.
    #[pyo3(
        signature = (name, layout=None, /, *, blocks, tensors=None, shape=None, dtype=None, pool=None, tensors_per_layer=None,
                     contiguous=OptionalArg::Missing),
        text_signature = "($self, name, layout=None, /, *, blocks, tensors=None, shape=None, dtype=None, pool='device', \
                          tensors_per_layer=None, contiguous=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method")]
    fn allocate<'py>(
        slf: &Bound<'py, Self>,
        name: &Any<'py>,
        layout: Option<&Any<'py>>,
        blocks: &Any<'py>,
        tensors: Option<&Any<'py>>,
        shape: Option<&Any<'py>>,
        dtype: Option<&Any<'py>>,
        pool: Option<&Any<'py>>,
        tensors_per_layer: Option<&Any<'py>>,
        contiguous: OptionalArg<'_, 'py>,
    ) -> PyResult<NativeCache> {
        let (engine, pool) = (of_caches(slf)?, pool_or_device(slf.py(), pool));
        let layout = layout.map(NativeLayout::given).transpose()?;
        let form = GivenForm { layout, shape, dtype, tensors_per_layer, pool: &pool };
        let contiguous = values::truth_or(false, "contiguous", contiguous)?;
        NativeCache::allocate(engine, name, form, blocks, tensors, contiguous)
    }

    /// Make a cache of memory that belongs to the program.
    ///
    /// The cache keeps the tensor objects alive until ``Cache.free`` has ended. It cannot keep memory alive that is
    /// given by address: that memory must stay valid until then.
    ///
    /// Args:
    ///     name: name of the cache: 1 to 128 bytes of UTF-8, printable. No other cache of this engine may have it.
    ///     tensors: the tensors, at least one, all objects or all addresses. An object is a writable buffer, or has
    ///         ``__dlpack__`` or ``__array_interface__``, and is in host memory. Its first dimension is the blocks. The
    ///         distance from one block to the next may be larger than a block; inside a block there are no gaps. An
    ///         address is an ``int``.
    ///     layout: what the blocks mean. Objects must have its number of tensors and its bytes in each block.
    ///     blocks: number of blocks. Needed for addresses; for objects, it must be their first dimension if it is
    ///         given.
    ///     shape: dimensions of one block of one tensor. Needed for addresses without a layout; objects have it.
    ///     dtype: type of the elements, as for ``allocate``. Needed for addresses without a layout; objects have it.
    ///     stride: bytes from the start of one block to the start of the next in each tensor, at least the bytes of a
    ///         block. Only for addresses; by default, blocks follow each other without gaps.
    ///     tensors_per_layer: number of consecutive tensors that form a layer, as for ``allocate``.
    ///     pool: the pool with which statistics and copies count the memory: ``"device"`` or ``"host"``.
    ///     shared: whether peers may use the cache. If it is false, they cannot find it.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type, a tensor is none of the accepted kinds, an argument that
    ///         addresses need is missing, or ``stride`` is given for objects.
    ///     InvalidArgument: the name is in use; a tensor is read-only, not in host memory, or has gaps inside a block;
    ///         tensors differ in shape or type; an address is 0; a number is out of range.
    ///     OutOfMemory: there is no memory for the description of the cache.
    ///     Closed: the engine is closed.
    #[pyo3(
        signature = (name, tensors, layout=None, /, *, blocks=None, shape=None, dtype=None, stride=None,
                     tensors_per_layer=None, pool=None, shared=OptionalArg::Missing),
        text_signature = "($self, name, tensors, layout=None, /, *, blocks=None, shape=None, dtype=None, stride=None, \
                          tensors_per_layer=None, pool='device', shared=True)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method")]
    fn register<'py>(
        slf: &Bound<'py, Self>,
        name: &Any<'py>,
        tensors: &Any<'py>,
        layout: Option<&Any<'py>>,
        blocks: Option<&Any<'py>>,
        shape: Option<&Any<'py>>,
        dtype: Option<&Any<'py>>,
        stride: Option<&Any<'py>>,
        tensors_per_layer: Option<&Any<'py>>,
        pool: Option<&Any<'py>>,
        shared: OptionalArg<'_, 'py>,
    ) -> PyResult<NativeCache> {
        let (engine, pool) = (of_caches(slf)?, pool_or_device(slf.py(), pool));
        let layout = layout.map(NativeLayout::given).transpose()?;
        let form = GivenForm { layout, shape, dtype, tensors_per_layer, pool: &pool };
        let shared = values::truth_or(true, "shared", shared)?;
        NativeCache::register(engine, name, tensors, form, blocks, stride, shared)
    }

    /// Start to copy blocks inside this engine: within a cache, or between two caches with blocks of equal size.
    ///
    /// Block ``i`` of ``src`` goes to block ``i`` of ``dst``, in all tensors. The pools of the two caches do not
    /// matter. Copying no blocks ends at once.
    ///
    /// Args:
    ///     dst: blocks that are written, or a list of ``(dst, src)`` pairs. All pairs are checked before the first one
    ///         is copied. If a copy fails later, the pairs before it are in place.
    ///     src: blocks that are read, as many as ``dst`` has. Left out if ``dst`` is a list.
    ///     verify: how the bytes are compared: ``"off"``, ``"sample"`` or ``"full"``. ``None``: as the engine does.
    ///     timeout: seconds within which the copy must begin. A copy that has begun is finished. ``None``:
    ///         ``Engine.timeout``.
    ///
    /// Returns:
    ///     The transfer. Its outcome may be ``InvalidArgument``, ``NotFound`` (a cache was freed), ``Timeout``,
    ///     ``VerifyFailed``, ``Cancelled`` or ``Closed``.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type, or ``src`` is missing.
    ///     InvalidArgument: rows of a remote cache or of another engine; different numbers of blocks or bytes; a block
    ///         that the cache does not have; a part with ``layers`` or ``tokens``; an unknown ``verify``.
    ///     NotFound: a cache was freed.
    ///     Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
    ///     Closed: the engine is closed.
    #[pyo3(signature = (dst, src=None, /, *, verify=None, timeout=None))]
    fn copy<'py>(
        &self,
        py: Python<'py>,
        dst: &Any<'py>,
        src: Option<&Any<'py>>,
        verify: Option<&Any<'py>>,
        timeout: Option<&Any<'py>>,
    ) -> PyResult<Py<NativeTransfer>> {
        let given = GivenExtras { verify, timeout, ..GivenExtras::default() };
        call::copy(py, &self.shared, &Pairs::read(dst, src)?, &given)
    }

    /// Start to read blocks of a peer into blocks of this engine.
    ///
    /// Block ``i`` of ``src`` goes to block ``i`` of ``dst``, in all tensors, and the blocks of both have equal sizes.
    /// If both caches have a layout, each side is a sequence of tokens in place of a list of blocks: elements go where
    /// the layout of ``dst`` has them. The numbers of blocks may differ if the rows of an end are narrowed by
    /// ``tokens``. A block may occur in ``dst`` twice if nothing is converted; the last one counts.
    ///
    /// Until the transfer has ended, the blocks of ``dst`` must not be used. If it fails, they are undefined, except
    /// for those in ``Error.arrived``.
    ///
    /// Args:
    ///     dst: local blocks that are written, at least one, or a list of ``(dst, src)`` pairs, possibly of several
    ///         peers. The pairs succeed or fail together. If all pairs have the same ``dst`` and all caches have
    ///         layouts, each head of each layer is read from one pair. If several pairs hold it, the engine takes the
    ///         one with the fewest heads to read so far, and among equals the first in the list.
    ///     src: blocks of a peer that are read. Left out if ``dst`` is a list.
    ///     grant: token of a grant that lends ``src``. The pull fails if the grant ended before all bytes were read.
    ///         For a list of pairs: one token for all of them, or a list with a token or ``None`` for each.
    ///     last: whether this is this engine's last pull under the grant. When it succeeds, a grant with one reader
    ///         ends, so pass ``last=False`` to all other pulls. No effect without a grant.
    ///     notify: message for the peer, at most 64 KiB, which it gets as ``Message`` when the bytes are in place. All
    ///         pairs must name one peer.
    ///     verify: how the bytes are compared: ``"off"``, ``"sample"`` or ``"full"``. ``None``: as the engine does.
    ///     timeout: time limit of the whole pull in seconds. ``None``: ``Engine.timeout``.
    ///
    /// Returns:
    ///     The transfer. Its outcome may be ``NotFound`` (the peer has no such cache), ``InvalidArgument`` (blocks,
    ///     layers, tokens or sizes that do not fit the remote cache), ``GrantEnded``, ``PeerLost``, ``Timeout``,
    ///     ``VerifyFailed``, ``Busy`` (the peer's program has not read earlier messages), ``Cancelled`` or ``Closed``.
    ///     For a list, the error names the pair as ``facts["part"]``.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type, or ``src`` is missing.
    ///     InvalidArgument: ``dst`` is not local or ``src`` not remote; rows of another engine; no blocks; different
    ///         numbers of blocks or tokens; a token of a wrong form; a message above 64 KiB; an unknown ``verify``.
    ///     NotFound: the cache of ``dst`` was freed.
    ///     Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
    ///     Closed: the engine is closed.
    #[pyo3(
        signature = (dst, src=None, /, *, grant=None, last=OptionalArg::Missing, notify=None, verify=None, timeout=None),
        text_signature = "($self, dst, src=None, /, *, grant=None, last=True, notify=None, verify=None, timeout=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method")]
    fn pull<'py>(
        &self,
        py: Python<'py>,
        dst: &Any<'py>,
        src: Option<&Any<'py>>,
        grant: Option<&Any<'py>>,
        last: OptionalArg<'_, 'py>,
        notify: Option<&Any<'py>>,
        verify: Option<&Any<'py>>,
        timeout: Option<&Any<'py>>,
    ) -> PyResult<Py<NativeTransfer>> {
        let last = values::truth_or(true, "last", last)?;
        let given = GivenExtras { grant, last, notify, verify, timeout };
        call::move_rows(py, &self.shared, Side::Destination, &Pairs::read(dst, src)?, &given)
    }

    /// Start to write blocks of this engine into blocks of a peer.
    ///
    /// Block ``i`` of ``src`` goes to block ``i`` of ``dst``, under the rules of ``pull``. Between caches with layouts,
    /// a push writes the layers and heads that both hold. Until the transfer has ended, the blocks of ``src`` must not
    /// be written. If it fails, the blocks of ``dst`` are undefined.
    ///
    /// Two engines must not transfer between the same blocks in opposite directions at the same time: such transfers
    /// wait for each other until their time limits.
    ///
    /// With ``layerwise=True``, a layer moves when ``Transfer.ready`` is called for it, so that the program can compute
    /// one layer while another one moves. Blocks move as they are, so the layouts of both caches must be the same in
    /// all but their layers. If the rows of one end are narrowed by ``layers``, those of the other end must be, too.
    ///
    /// Args:
    ///     dst: blocks of a peer that are written, at least one, or a list of ``(dst, src)`` pairs, possibly of several
    ///         peers, which succeed or fail together.
    ///     src: local blocks that are read. Left out if ``dst`` is a list.
    ///     notify: message for the peer, at most 64 KiB, which it gets as ``Message`` when the bytes are in place. All
    ///         pairs must name one peer.
    ///     verify: how the bytes are compared: ``"off"``, ``"sample"`` or ``"full"``. ``None``: as the engine does.
    ///     timeout: time limit of the whole push in seconds. ``None``: ``Engine.timeout``. With ``layerwise``, it is
    ///         the limit of each layer, from its ``ready`` on. Nothing limits the wait for a ``ready``; call
    ///         ``Transfer.cancel`` if none will come.
    ///     layerwise: whether the program reports each layer.
    ///
    /// Returns:
    ///     The transfer. Its outcome may be that of a ``pull``, except ``GrantEnded``.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type, or ``src`` is missing.
    ///     InvalidArgument: ``dst`` is not remote or ``src`` not local; rows of another engine; no blocks; different
    ///         numbers of blocks or tokens; a message above 64 KiB; an unknown ``verify``; ``layerwise`` with rows that
    ///         are narrowed by ``tokens`` or ``bytes``, or with rows of several caches of this engine.
    ///     NotFound: the cache of this engine was freed.
    ///     Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
    ///     Closed: the engine is closed.
    #[pyo3(
        signature = (dst, src=None, /, *, notify=None, verify=None, timeout=None, layerwise=OptionalArg::Missing),
        text_signature = "($self, dst, src=None, /, *, notify=None, verify=None, timeout=None, layerwise=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method")]
    fn push<'py>(
        &self,
        py: Python<'py>,
        dst: &Any<'py>,
        src: Option<&Any<'py>>,
        notify: Option<&Any<'py>>,
        verify: Option<&Any<'py>>,
        timeout: Option<&Any<'py>>,
        layerwise: OptionalArg<'_, 'py>,
    ) -> PyResult<Py<NativeTransfer>> {
        let layerwise = values::truth_or(false, "layerwise", layerwise)?;
        let given = GivenExtras { notify, verify, timeout, ..GivenExtras::default() };
        let pairs = Pairs::read(dst, src)?;
        if layerwise {
            return call::push_layers(py, &self.shared, &pairs, &given);
        }
        call::move_rows(py, &self.shared, Side::Source, &pairs, &given)
    }

    /// Start to link with the engine that listens at an address, unless a link to it exists.
    ///
    /// An existing link is a success, whichever end made it. A call for an address at which an earlier one has found a
    /// linked peer sends nothing, and its transfer has ended when this returns. Calls for one address with the same
    /// ``name`` share an attempt. Both ends may call ``link`` at once: one link is made, and both calls succeed. While
    /// no engine listens, this engine tries again until ``timeout`` has passed. A link that breaks is not made again by
    /// itself.
    ///
    /// Args:
    ///     address: ``"ip:port"`` or ``"[ipv6]:port"``, with a port above 0. Host names are not accepted.
    ///     name: name that the peer must have. ``None``: any.
    ///     timeout: time limit of the whole call in seconds. ``None``: ``Engine.timeout``.
    ///
    /// Returns:
    ///     A transfer whose result is the peer. Its outcome may be ``Timeout`` (no answer in time), ``PeerLost``
    ///     (the peer refused, for example because of its token, version or name), ``Cancelled`` or ``Closed``.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: the address has another form, or is that of this engine.
    ///     Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
    ///     Closed: the engine is closed.
    #[pyo3(signature = (address, /, *, name=None, timeout=None))]
    fn link<'py>(
        &self,
        py: Python<'py>,
        address: &Any<'py>,
        name: Option<&Any<'py>>,
        timeout: Option<&Any<'py>>,
    ) -> PyResult<Py<NativeTransfer>> {
        let (address, name) = (text("address", address)?, name.map(|name| text("name", name)).transpose()?);
        let limit = timeout.map(|limit| values::seconds("timeout", limit)).transpose()?;
        let link = |engine: &DataDist| native::link(engine, &address, name, limit, WhileRefused::Retry);
        let transfer = self.shared.engine.attached(py, link)?;
        NativeTransfer::started(py, &self.shared, &transfer)
    }

    /// Lend blocks of this engine to readers for a limited time. The call sends nothing.
    ///
    /// The program sends ``Grant.token`` to the readers, which pass it to ``pull``. While the grant lasts, the program
    /// must not write to the blocks. A pull under the grant fails if the grant ended before the pull had read all its
    /// bytes.
    ///
    /// The grant ends when ``ttl`` seconds have passed, when ``readers`` readers have finished their last pull, by
    /// ``Grant.revoke``, or when the cache is freed. ``events`` then returns ``GrantClosed``. Reuse the blocks after
    /// that event or after ``revoke``, not by a clock of your own.
    ///
    /// A grant does not restrict access: a peer can pull the blocks without the token, and such a pull is not checked.
    ///
    /// Args:
    ///     rows: local blocks that are lent, at least one. Their order does not matter.
    ///     ttl: seconds until the grant ends, above 0 and at most 4,294,967.
    ///     readers: number of readers that must finish before the grant ends early, from 1 to 4,096. A reader is one
    ///         incarnation of a peer, and counts once.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: rows of a remote cache or of another engine; no blocks; a block that the cache does not
    ///         have; rows that are narrowed by ``part``; a number out of range.
    ///     NotFound: the cache was freed.
    ///     Busy: 65,536 grants of this engine last, or have an event that nobody took.
    ///     OutOfMemory: there is no memory for the list of blocks.
    ///     Closed: the engine is closed.
    #[pyo3(signature = (rows, /, *, ttl, readers=OptionalArg::Missing), text_signature = "($self, rows, /, *, ttl, readers=1)")]
    fn lend<'py>(
        &self,
        rows: &Any<'py>,
        ttl: &Any<'py>,
        readers: OptionalArg<'_, 'py>,
    ) -> PyResult<Py<NativeGrant>> {
        let (rows, ttl) = (call::rows("rows", rows)?, values::seconds("ttl", ttl)?);
        let readers = readers.given().map_or(Ok(1), |readers| values::readers(&readers))?;
        NativeGrant::lend(&self.shared, &rows, ttl, readers)
    }

    /// Return what has happened since the last call, oldest first. The call never waits.
    ///
    /// The engine keeps at most 4,096 ``PeerUp`` and ``PeerDown`` events, and drops those of the oldest links.
    ///
    /// An event goes to one caller. A transfer whose outcome was taken by ``result`` or ``await`` has no event.
    /// ``result`` and ``await`` still give the outcome of a transfer whose ``Completed`` was taken. Messages that
    /// arrived before a link ended are still returned.
    ///
    /// Args:
    ///     limit: largest number of events, from 1 to 2**32 - 1. The others stay for the next call.
    ///
    /// Raises:
    ///     TypeError: ``limit`` is not an integer.
    ///     InvalidArgument: ``limit`` is out of range.
    ///     OutOfMemory: there is no memory for the list. The events stay.
    ///     Closed: the engine is closed.
    #[pyo3(signature = (limit=OptionalArg::Missing), text_signature = "($self, limit=1024)")]
    fn events(&self, py: Python<'_>, limit: OptionalArg<'_, '_>) -> PyResult<Vec<Py<PyAny>>> {
        let limit = limit.given().map_or(Ok(1024), |limit| values::int32("limit", &limit, 1))?;
        events::taken(py, &self.shared, usize::try_from(limit).unwrap_or(usize::MAX))
    }

    /// Return a descriptor that is readable while ``events`` has something to return.
    ///
    /// Use it with ``select``, ``selectors`` or ``epoll``, which also accept the engine itself. It belongs to the engine: do not read,
    /// write or close it.
    ///
    /// Raises:
    ///     Closed: the engine is closed.
    ///     Error: no descriptor is left.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.shared.engine.attached(py, |engine| Ok(engine.events().descriptor()?.as_fd().as_raw_fd()))
    }

    /// Return the counters of this engine as plain dicts and lists. Reading them does not interrupt transfers.
    ///
    /// Raises:
    ///     Closed: the engine is closed.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.shared.engine.enter(py, |engine| Ok(engine.stats()))?;
        let counters = stats::dict(py, &snapshot.to_json())?;
        counters.set_item("engine", &*self.shared.name)?;
        Ok(counters)
    }

    /// Close the engine: end all transfers, links and grants, and release the pools.
    ///
    /// Transfers that still run when ``timeout`` has passed end with ``Closed``. Handles of ended transfers keep their
    /// outcomes. No event comes any more, and an ``async for`` over the engine ends. Memory that views use stays valid
    /// until they are gone. Closing again does nothing.
    ///
    /// Args:
    ///     timeout: seconds to wait for running transfers, 0 or above. ``None``: ``Engine.timeout``. New transfers are
    ///         refused meanwhile.
    ///
    /// Raises:
    ///     TypeError: ``timeout`` has the wrong type.
    ///     InvalidArgument: ``timeout`` is negative or not finite.
    #[pyo3(signature = (timeout=OptionalArg::Missing), text_signature = "($self, timeout=0.0)")]
    fn close(&self, py: Python<'_>, timeout: OptionalArg<'_, '_>) -> PyResult<()> {
        let limit = match timeout.given() {
            None => Duration::ZERO,
            Some(given) if given.is_none() => self.shared.timeout,
            Some(given) => values::seconds_from_zero("timeout", &given)?,
        };
        self.shared.close(py, limit)
    }

    /// Iterate over events as they come: ``async for event in engine``.
    ///
    /// The iteration ends without an error when the engine is closed. Each event goes to one iterator or one caller of ``events``.
    fn __aiter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Any<'py>> {
        awaiting(slf, "events")
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().shared.engine.attached(slf.py(), |_| Ok(()))?;
        Ok(slf)
    }

    #[pyo3(signature = (kind, error, trace, /))]
    #[expect(unused_variables, reason = "the parameters of the protocol")]
    fn __exit__(&self, py: Python<'_>, kind: &Any<'_>, error: &Any<'_>, trace: &Any<'_>) -> PyResult<()> {
        self.shared.close(py, Duration::ZERO)
    }

    fn __aenter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Any<'py>> {
        awaiting(slf, "enter")
    }

    #[pyo3(signature = (kind, error, trace, /))]
    #[expect(unused_variables, reason = "the parameters of the protocol")]
    fn __aexit__<'py>(
        slf: &Bound<'py, Self>,
        kind: &Any<'py>,
        error: &Any<'py>,
        trace: &Any<'py>,
    ) -> PyResult<Any<'py>> {
        awaiting(slf, "leave")
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let EngineShared { name, engine, .. } = &*self.shared;
        let address =
            self.shared.engine.address(py).map_or("None".to_owned(), |address| format!("'{address}'"));
        format!(
            "Engine(name='{}', address={address}, closed={})",
            &**name,
            if engine.closed() { "True" } else { "False" }
        )
    }
}

/// Returns the engine, whose caches know its Python object from now on.
fn of_caches<'a>(engine: &'a Bound<'_, NativeEngine>) -> PyResult<&'a Arc<EngineShared>> {
    let shared = &engine.get().shared;
    shared.set_python(engine.as_any()).map(|()| shared)
}

fn pool_or_device<'py>(py: Python<'py>, pool: Option<&Any<'py>>) -> Any<'py> {
    pool.map_or_else(|| intern!(py, "device").clone().into_any(), Any::clone)
}

/// Calls a function of the Python module for coroutines.
fn awaiting<'py>(engine: &Bound<'py, NativeEngine>, call: &str) -> PyResult<Any<'py>> {
    engine.py().import(intern!(engine.py(), "llm_datadist._await"))?.call_method1(call, (engine,))
}
