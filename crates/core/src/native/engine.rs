//! `Engine`: the calls of the native API, each a few lines over the modules of the core.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use super::cache_form::CacheForm;
use super::cache_names::{EngineName, OwnCache, PeerCache};
use super::pairs::{OwnPairs, PairExtras, PeerPairs, RowsOfPair};
use super::{BlockRows, grant_time, lend, link};
use crate::config::Config;
use crate::engine::DataDist;
use crate::error::{Error, Result};
use crate::events::{Event, EventQueue, PeerInfo, Transfer};
use crate::grants::Grant;
use crate::memory::Adopted;
use crate::model::{ClusterId, GrantToken, WhileRefused};
use crate::plan::Side;
use crate::stats::Snapshot;
use crate::transfer::LayerTask;

/// An open engine: pools, caches, links to peers, and threads. Any number of threads may share it.
///
/// [`close`](Self::close) or drop ends it. After that, every call fails with [`Closed`](crate::error::ErrorKind::Closed), and handles of ended
/// transfers keep their outcomes. No call waits, except `close`: what takes time is a [`Transfer`], which a program joins or
/// awaits ([`TransferFuture`](crate::TransferFuture)).
///
/// A call refuses an invalid argument at once. It starts nothing then, and its error has the name of the argument. Calls that
/// start a transfer return [`Busy`](crate::error::ErrorKind::Busy) while `max_transfers` transfers run or have an outcome that was not taken.
/// Every other failure is the outcome of the transfer.
pub struct Engine {
    name: EngineName,
    /// Whether calls are refused, because the engine closes.
    closing: AtomicBool,
    /// Held by a `close` until nothing of the engine is left, so that another one does not return earlier.
    closer: Mutex<()>,
    /// Held shared by each call, so that `close` waits for it.
    open: RwLock<Option<DataDist>>,
}

impl Engine {
    pub(super) fn open(config: Config) -> Result<Self> {
        let engine = DataDist::open(config)?;
        let name = EngineName::new(&engine.config().name);
        let (closing, closer) = (AtomicBool::new(false), Mutex::default());
        Ok(Engine { name, closing, closer, open: RwLock::new(Some(engine)) })
    }

    /// Runs `call` on the engine, unless it is closed or closes. The engine stays open until `call` has returned, which must not
    /// wait (`close_waits_for_calls_that_have_begun`).
    #[doc(hidden)]
    pub fn run<T>(&self, call: impl FnOnce(&DataDist) -> Result<T>) -> Result<T> {
        if self.closing.load(Ordering::Acquire) { Err(Error::closed()) } else { self.run_until_closed(call) }
    }

    /// Does the same as [`run`](Self::run), also while the engine closes.
    #[doc(hidden)]
    pub fn run_until_closed<T>(&self, call: impl FnOnce(&DataDist) -> Result<T>) -> Result<T> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        call(open.as_ref().ok_or_else(Error::closed)?)
    }

    /// Returns the name that peers, errors and the log show.
    pub fn name(&self) -> &EngineName {
        &self.name
    }

    /// Returns the address at which the engine listens, with the port that was taken.
    pub fn address(&self) -> Result<Option<SocketAddr>> {
        self.run(|engine| Ok(engine.listening()))
    }

    /// Allocates a cache from a pool. Peers find it by `name`: 1 to 128 bytes of printable text that no other cache of the engine
    /// has. The contents are undefined.
    pub fn allocate(&self, name: &str, form: &CacheForm) -> Result<Arc<OwnCache>> {
        self.run(|engine| OwnCache::allocate(&self.name, engine, name, form))
    }

    /// Makes a cache of memory of the program, which [`Adopted::new`] takes over with [`CacheForm::desc`] and
    /// [`CacheKind::Blocks`](crate::CacheKind::Blocks). Peers find it if it is `shared`. The memory is in use until the transfer
    /// of [`free`](Self::free) has succeeded or the engine is closed.
    pub fn register(
        &self,
        name: &str,
        form: &CacheForm,
        memory: Adopted,
        shared: bool,
    ) -> Result<Arc<OwnCache>> {
        self.run(|engine| OwnCache::register(&self.name, engine, name, form, (memory, shared)))
    }

    /// Returns the address of every tensor of a cache. Block `i` begins at `i` times the bytes of a block, or the stride. Memory
    /// of a pool stays mapped until the engine is closed.
    pub fn tensors(&self, cache: &OwnCache) -> Result<Vec<u64>> {
        self.run(|engine| Ok(engine.find(cache.id)?.addrs().to_vec()))
    }

    /// Ends a cache. Its name can be used again at once, new transfers that name it fail with
    /// [`CacheNotFound`](crate::error::ErrorKind::CacheNotFound), and its grants end.
    ///
    /// The transfer ends when nothing of this engine uses registered memory any more. If it fails with
    /// [`Timeout`](crate::error::ErrorKind::Timeout), the memory is still in use. After every error, also of this call, the cache is gone, and
    /// the same call waits again.
    pub fn free(&self, cache: &OwnCache) -> Result<Arc<Transfer>> {
        // Also while the engine closes, because transfers may still use the memory.
        self.run_until_closed(|engine| engine.start_free(cache.id, None))
    }

    /// Names a cache of a peer. Sends nothing; the first transfer looks the name up.
    pub fn peer_cache(&self, peer: ClusterId, name: &str) -> Result<Arc<PeerCache>> {
        PeerCache::new(&self.name, peer, name)
    }

    /// Starts to copy blocks inside the engine, within a cache or between two, the pairs in their order.
    #[expect(clippy::needless_pass_by_value, reason = "as `pull` and `push` take it")]
    pub fn copy(&self, pairs: &[RowsOfPair<'_>], extras: PairExtras) -> Result<Arc<Transfer>> {
        self.run(|engine| OwnPairs::checked(&self.name, pairs.iter().copied())?.copy(engine, &extras))
    }

    /// Starts to read blocks of peers into blocks of this engine. The pairs succeed or fail together.
    ///
    /// If both caches of a pair have a layout, elements go where the layout of the destination has them. Until the transfer has
    /// ended, the destination must not be used; if it fails, [`Error::arrived`] lists the rows of it that are complete. With a
    /// grant, the pull fails with [`GrantEnded`](crate::error::ErrorKind::GrantEnded) if the grant ended before all bytes were read.
    pub fn pull(&self, pairs: &[RowsOfPair<'_>], extras: PairExtras) -> Result<Arc<Transfer>> {
        self.run(|engine| self.pairs(Side::Destination, pairs)?.start(engine, extras))
    }

    /// Starts to write blocks of this engine into blocks of peers, under the rules of [`pull`](Self::pull). The source must not
    /// be written until the transfer has ended.
    pub fn push(&self, pairs: &[RowsOfPair<'_>], extras: PairExtras) -> Result<Arc<Transfer>> {
        self.run(|engine| self.pairs(Side::Source, pairs)?.start(engine, extras))
    }

    /// Starts a push whose layers the program reports with [`LayerTask::ready`]. All pairs have one local cache, and rows of
    /// whole blocks. The limit is that of each layer. Dropping the task before its last layer cancels the push.
    pub fn push_layers(&self, pairs: &[RowsOfPair<'_>], extras: PairExtras) -> Result<LayerTask> {
        self.run(|engine| self.pairs(Side::Source, pairs)?.start_layers(engine, extras))
    }

    fn pairs<'a>(&self, local_side: Side, pairs: &[RowsOfPair<'a>]) -> Result<PeerPairs<'a>> {
        PeerPairs::checked(&self.name, local_side, pairs.iter().copied())
    }

    /// Starts to link with the engine that listens at `ip:port` or `[ipv6]:port`, unless a link to it exists.
    /// [`Transfer::peer`] is the result. A call for an address at which an earlier one has found a linked peer sends nothing, and
    /// its transfer has ended when this returns. Concurrent calls for one address with the same `name` share each attempt. The
    /// default limit is that of the engine. A peer whose name is not `name` is refused. `while_refused` says whether the call waits for a
    /// listener.
    pub fn link(
        &self,
        address: &str,
        name: Option<&str>,
        limit: Option<Duration>,
        while_refused: WhileRefused,
    ) -> Result<Arc<Transfer>> {
        self.run(|engine| link(engine, address, name.map(str::to_owned), limit, while_refused))
    }

    /// Starts to end the link to a peer, after the transfers that run. A peer that is not linked is no error.
    pub fn unlink(&self, peer: ClusterId, limit: Option<Duration>) -> Result<Arc<Transfer>> {
        self.run(|engine| engine.start_unlink(peer, false, limit))
    }

    /// Sends a message of at most 64 KiB to the program of a peer. Messages arrive in order, each at most once. Returns
    /// [`Busy`](crate::error::ErrorKind::Busy) while the peer's program has not taken 1,024 messages or 4 MiB.
    pub fn send(&self, peer: ClusterId, message: Vec<u8>) -> Result<()> {
        self.run(|engine| engine.notify(peer, message))
    }

    /// Returns the peers that are linked now.
    pub fn peers(&self) -> Result<Vec<PeerInfo>> {
        self.run(|engine| Ok(engine.peers()))
    }

    /// Lends blocks of this engine for `ttl`, or until `readers` readers (1 to 4,096) have finished their last pull. Sends
    /// nothing: the program gives the token to the readers, which pull under it ([`PairExtras::grants`]). The program must not
    /// write the blocks before the event [`GrantEnded`](Event::GrantEnded).
    pub fn lend(&self, rows: &BlockRows, ttl: Duration, readers: u32) -> Result<GrantToken> {
        self.run(|engine| {
            lend(engine, &self.name, rows, ttl, readers).map(|grant| engine.grant_token(&grant))
        })
    }

    /// Returns the token of a grant of this engine, as [`lend`](Self::lend) has returned it.
    pub fn token(&self, grant: &Grant) -> Result<GrantToken> {
        self.run(|engine| Ok(engine.grant_token(grant)))
    }

    /// Lets a grant of this engine last at least until `ttl` from now.
    pub fn renew(&self, token: &GrantToken, ttl: Duration) -> Result<()> {
        self.run(|engine| engine.renew(&engine.find_grant(token)?, grant_time(ttl)?))
    }

    /// Ends a grant of this engine. When the call returns, no pull under it succeeds any more. The transfer ends when the reads
    /// that this engine serves have ended.
    pub fn revoke(&self, token: &GrantToken) -> Result<Arc<Transfer>> {
        self.run(|engine| engine.start_revoke(&engine.find_grant(token)?, None))
    }

    /// Returns at most `most` events, oldest first. Never waits. Each transfer whose outcome nobody takes by [`Transfer::join`]
    /// or [`Transfer::outcome`] gives one [`Completed`](Event::Completed).
    pub fn events(&self, most: usize) -> Result<Vec<Event>> {
        self.run(|engine| engine.poll(most))
    }

    /// Returns the queue of events, whose [`descriptor`](EventQueue::descriptor) is readable while there are some.
    pub fn event_queue(&self) -> Result<Arc<EventQueue>> {
        self.run(|engine| Ok(engine.events().clone()))
    }

    /// Returns all counters, and the state of the pools, caches and links.
    pub fn stats(&self) -> Result<Snapshot> {
        self.run(|engine| Ok(engine.stats()))
    }

    /// Refuses new calls, waits for transfers that run at most `limit`, and closes the engine. When it returns, nothing of the
    /// engine is left. Closing again does nothing.
    pub fn close(&self, limit: Duration) {
        self.closing.store(true, Ordering::Release);
        if !limit.is_zero() {
            // Fails only if the engine is closed, because nothing interrupts this wait.
            let _ = self.run_until_closed(|engine| engine.drain(limit));
        }
        let _alone = self.closer.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        // Without the lock of calls, so that other calls are refused at once.
        drop(engine);
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("name", &self.name).finish_non_exhaustive()
    }
}
