//! The grants of one engine, as their owner.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::row_ranges::RowRanges;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::memory::{Generations, random};
use crate::model::{CacheId, ClusterId, Deadline, GrantEnd, GrantId};
use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering};

/// Name of these lists in out-of-memory errors.
const GRANTS: &str = "the grants of an engine";
/// Maximum number of ended grants whose reason the owner keeps. The oldest one is dropped first.
const MAX_ENDED: usize = 4096;

/// One grant.
#[derive(Debug)]
pub struct Grant {
    id: GrantId,
    cache: CacheId,
    rows: RowRanges,
    /// Number of readers that must report before the grant ends.
    readers: usize,
    ended: OnceLock<GrantEnd>,
    /// Number of reads that this process serves.
    reads: AtomicUsize,
}

/// Who learns that a grant has ended.
pub trait GrantObserver: Send + Sync + fmt::Debug {
    /// Called once for each grant, after readers can see the end, and without a lock.
    fn grant_ended(&self, grant: &Arc<Grant>, why: GrantEnd);

    /// Returns the number of ended grants whose event was not polled.
    fn unpolled(&self) -> usize;
}

/// The grants of one engine.
#[derive(Debug)]
pub struct Grants {
    generations: Arc<Generations>,
    /// Authenticates ids. So an id of a grant that has ended is known without a record of it.
    key: [u8; 32],
    observer: Arc<dyn GrantObserver>,
    state: Mutex<State>,
    /// Notified when the last read under a grant has ended.
    unread: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The grants that have not ended, by slot.
    slots: Vec<Option<LiveGrant>>,
    free: Vec<u32>,
    live: usize,
    /// When each of them expires, with its slot.
    expiries: BTreeSet<(Instant, u32)>,
    /// The latest grants that have ended, by slot and generation, with the reason. At most [`MAX_ENDED`].
    ended: VecDeque<(u32, u64, GrantEnd)>,
    closed: bool,
}

#[derive(Debug)]
struct LiveGrant {
    grant: Arc<Grant>,
    expires: Instant,
    /// The readers that have reported: cluster and incarnation.
    reported: Vec<(ClusterId, u64)>,
}

/// A read under a grant that this process serves.
#[derive(Debug)]
pub struct GrantedRead {
    grants: Arc<Grants>,
    grant: Arc<Grant>,
}

/// The end of a grant, of which the observer learns when this is dropped. The caller then holds no lock.
#[derive(Debug)]
pub struct UnreportedEnd {
    /// `None` if the program has never got the grant.
    observer: Option<Arc<dyn GrantObserver>>,
    grant: Arc<Grant>,
    why: GrantEnd,
}

impl Drop for UnreportedEnd {
    fn drop(&mut self) {
        if let Some(observer) = &self.observer {
            observer.grant_ended(&self.grant, self.why);
        }
    }
}

impl Grant {
    /// Returns what names the grant at its owner.
    pub fn id(&self) -> GrantId {
        self.id
    }

    /// Returns the cache whose rows are lent.
    pub fn cache(&self) -> CacheId {
        self.cache
    }

    /// Whether this process serves a read under the grant. Once the grant has ended, no further read begins.
    pub fn is_read(&self) -> bool {
        self.reads.load(Ordering::SeqCst) > 0
    }

    /// Returns the rows that are lent.
    pub fn rows(&self) -> &RowRanges {
        &self.rows
    }

    /// Returns why the grant has ended, or `None` if it has not.
    pub fn ended(&self) -> Option<GrantEnd> {
        self.ended.get().copied()
    }
}

impl Grants {
    /// Creates the state without grants, whose ends are published in `generations` and reported to `observer`.
    ///
    /// Returns `Err(System)` if the system provides no random bytes.
    pub fn new(generations: Arc<Generations>, observer: Arc<dyn GrantObserver>) -> Result<Arc<Grants>> {
        let (key, state, unread) = (random()?, Mutex::default(), Condvar::new());
        Ok(Arc::new(Grants { generations, key, observer, state, unread }))
    }

    /// Lends `rows` of `cache` for `ttl`, or until `readers` readers have reported. Returns `Err(Busy)` if there are too
    /// many grants.
    pub fn lend(&self, cache: CacheId, rows: RowRanges, ttl: Duration, readers: usize) -> Result<Arc<Grant>> {
        let reported = fallible::with_capacity(GRANTS, readers)?;
        // Before the lock, because the observer has a lock of its own.
        let unreported = self.observer.unpolled();
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        let (count, limit) = (state.live + unreported, Generations::GRANTS as usize);
        if count >= limit {
            let text = "too many grants have not ended, or their end was not taken";
            return Err(Error::new(ErrorKind::Busy, text).with("grants", count).with("limit", limit));
        }
        let slot = state.slot()?;
        let generation = self.generations.of_grant(slot);
        let grant = Arc::new(Grant {
            id: GrantId { slot, generation, secret: self.secret(slot, generation) },
            cache,
            rows,
            readers,
            ended: OnceLock::new(),
            reads: AtomicUsize::new(0),
        });
        let expires = Instant::now() + ttl;
        state.slots[slot as usize] = Some(LiveGrant { grant: grant.clone(), expires, reported });
        state.live += 1;
        state.expiries.insert((expires, slot));
        Ok(grant)
    }

    /// Lends for `ttl` from now on, if that is longer than the grant lasts already. Returns `Err(GrantEnded)` if the grant has
    /// ended, also if its time has passed and the clock that ends grants is late.
    pub fn renew(&self, grant: &Arc<Grant>, ttl: Duration) -> Result<()> {
        let gone = || {
            let error = Error::new(ErrorKind::GrantEnded, "the grant has ended; lend the rows again");
            grant.ended().into_iter().fold(error, |error, why| error.with("ended", why.name()))
        };
        self.find(&grant.id).map_err(|_| gone())?;
        let mut state = self.state.lock();
        let State { slots, expiries, .. } = &mut *state;
        let live = slots.get_mut(grant.id.slot as usize).and_then(Option::as_mut);
        let live = live.filter(|live| Arc::ptr_eq(&live.grant, grant)).ok_or_else(gone)?;
        let expires = live.expires.max(Instant::now() + ttl);
        expiries.remove(&(live.expires, grant.id.slot));
        expiries.insert((expires, grant.id.slot));
        live.expires = expires;
        Ok(())
    }

    /// Returns the grant that `id` names. Returns `Err(GrantEnded)` if there is none, or none any more. The error says why a
    /// grant has ended, but only for the id of a grant that this engine gave.
    pub fn find(&self, id: &GrantId) -> Result<Arc<Grant>> {
        let mut state = self.state.lock();
        let Some(live) = state.live(id) else {
            drop(state);
            // Before the search for the reason, so that a forged token costs none.
            if !self.gave(id) {
                return Err(never_given());
            }
            return Err(ended(self.state.lock().why_ended(id)));
        };
        let (grant, expires) = (live.grant.clone(), live.expires);
        drop(state);
        if Instant::now() >= expires {
            // The clock that ends grants may be late.
            self.end(&grant, GrantEnd::Expired);
            return Err(ended(grant.ended()));
        }
        Ok(grant)
    }

    /// Begins a read under the grant that `id` names; otherwise like [`find`](Self::find).
    pub fn read(self: &Arc<Self>, id: &GrantId) -> Result<GrantedRead> {
        let grant = self.find(id)?;
        let state = self.state.lock();
        if let Some(why) = grant.ended() {
            return Err(ended(Some(why)));
        }
        // Under the lock, so that `revoke` waits for this read.
        grant.reads.fetch_add(1, Ordering::SeqCst);
        drop(state);
        Ok(GrantedRead { grants: self.clone(), grant })
    }

    /// Notes that a reader is done with the grant that `id` names. A reader that reports again counts once, and a report
    /// after the end changes nothing. The last one ends the grant; then the result tells the observer when it is dropped.
    /// Returns `Err(GrantEnded)` if there was no such grant.
    pub fn report(&self, id: &GrantId, reader: (ClusterId, u64)) -> Result<Option<UnreportedEnd>> {
        if !self.gave(id) {
            return Err(never_given());
        }
        let mut state = self.state.lock();
        let Some(live) = state.live(id) else { return Ok(None) };
        if !live.reported.contains(&reader) {
            live.reported.push(reader);
        }
        let last = live.reported.len() >= live.grant.readers;
        let grant = last.then(|| live.grant.clone());
        Ok(grant.and_then(|grant| self.take(&mut state, &grant, GrantEnd::Done)))
    }

    /// Ends a grant. Returns `false` if it had ended before. From then on no reader accepts what it has read under it.
    pub fn end(&self, grant: &Arc<Grant>, why: GrantEnd) -> bool {
        let unreported = self.take(&mut self.state.lock(), grant, why);
        unreported.is_some()
    }

    /// Ends a grant that the program has not got.
    pub fn withdraw(&self, grant: &Arc<Grant>) {
        let ended = self.take(&mut self.state.lock(), grant, GrantEnd::Revoked);
        if let Some(mut ended) = ended {
            ended.observer = None;
        }
    }

    fn take(&self, state: &mut State, grant: &Arc<Grant>, why: GrantEnd) -> Option<UnreportedEnd> {
        self.mark_ended(grant, why)?;
        let slot = grant.id.slot;
        let live = state.slots.get_mut(slot as usize)?.take()?;
        state.live -= 1;
        state.expiries.remove(&(live.expires, slot));
        state.free.push(slot);
        state.note_end(grant.id, why);
        Some(UnreportedEnd { observer: Some(self.observer.clone()), grant: grant.clone(), why })
    }

    /// Marks a grant as ended, under the lock. Readers see the end before the program does, which may reuse the blocks
    /// as soon as it sees it (`who_sees_the_end_knows_that_readers_see_it`). Returns `None` if the grant had ended.
    fn mark_ended(&self, grant: &Grant, why: GrantEnd) -> Option<()> {
        if grant.ended().is_some() {
            return None;
        }
        self.generations.bump_grant(grant.id.slot);
        grant.ended.set(why).ok()
    }

    /// Whether this engine has given a grant with this id.
    fn gave(&self, id: &GrantId) -> bool {
        same(&self.secret(id.slot, id.generation), &id.secret)
    }

    /// Returns the secret of the grant in an entry and generation.
    fn secret(&self, slot: u32, generation: u64) -> [u8; 16] {
        let mut secret = [0; 16];
        // A key of any length is valid.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(&self.key) else { return secret };
        mac.update(&slot.to_le_bytes());
        mac.update(&generation.to_le_bytes());
        secret.copy_from_slice(&mac.finalize().into_bytes()[..16]);
        secret
    }

    /// Ends all grants of a cache that was released.
    pub fn end_of_cache(&self, cache: CacheId) {
        let mut first = 0;
        loop {
            let state = self.state.lock();
            let live = state.slots.iter().enumerate().skip(first);
            let mut of_cache = live
                .filter_map(|(slot, live)| Some((slot, &live.as_ref()?.grant)))
                .filter(|(_, grant)| grant.cache == cache);
            let Some((slot, grant)) = of_cache.next().map(|(slot, grant)| (slot, grant.clone())) else {
                return;
            };
            drop(state);
            self.end(&grant, GrantEnd::Released);
            first = slot + 1;
        }
    }

    /// Waits until this process serves no read under a grant, which has ended.
    pub fn wait_for_reads(&self, grant: &Grant, deadline: Deadline) -> Result<()> {
        let mut state = self.state.lock();
        while grant.is_read() {
            drop(self.unread.wait_timeout(state, deadline.wait_limit()));
            deadline.waiting("waiting for reads of a revoked grant that this engine serves")?;
            state = self.state.lock();
        }
        Ok(())
    }

    /// Ends the grants whose time has passed. Called when the alarm goes off.
    pub fn expire(&self) {
        let mut state = self.state.lock();
        while let Some(&(expires, slot)) = state.expiries.first()
            && expires <= Instant::now()
        {
            let grant = state.slots[slot as usize].as_ref().map(|live| live.grant.clone());
            let Some(grant) = grant else { break };
            let unreported = self.take(&mut state, &grant, GrantEnd::Expired);
            drop(state);
            drop(unreported);
            state = self.state.lock();
        }
    }

    /// Returns when the first grant expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.state.lock().expiries.first().map(|&(expires, _)| expires)
    }

    /// Returns the number of grants that have not ended.
    pub fn live(&self) -> usize {
        self.state.lock().live
    }

    /// Ends all grants without events, and refuses new ones, because the engine closes.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.live = 0;
        state.expiries.clear();
        let live = std::mem::take(&mut state.slots);
        for live in live.iter().flatten() {
            self.mark_ended(&live.grant, GrantEnd::Released);
        }
        drop(state);
        drop(live);
    }
}

impl State {
    /// Returns a free slot, and makes room for its return.
    fn slot(&mut self) -> Result<u32> {
        if let Some(slot) = self.free.pop() {
            return Ok(slot);
        }
        fallible::grow(GRANTS, &mut self.slots, 1)?;
        let slots = self.slots.len() + 1;
        fallible::grow(GRANTS, &mut self.free, slots)?;
        self.slots.push(None);
        // The caller has checked that there are fewer slots than generations.
        Ok(u32::try_from(slots - 1).unwrap_or(u32::MAX))
    }

    fn live(&mut self, id: &GrantId) -> Option<&mut LiveGrant> {
        let live = self.slots.get_mut(usize::try_from(id.slot).ok()?)?.as_mut()?;
        let known = live.grant.id;
        (known.generation == id.generation && same(&known.secret, &id.secret)).then_some(live)
    }

    /// Notes why a grant has ended. If there is no memory for that, the reason is lost.
    fn note_end(&mut self, id: GrantId, why: GrantEnd) {
        if self.ended.len() == MAX_ENDED {
            self.ended.pop_front();
        }
        if self.ended.try_reserve(1).is_ok() {
            self.ended.push_back((id.slot, id.generation, why));
        }
    }

    /// Returns why the grant in an entry and generation has ended. `None` if it has not, or is not among the latest.
    fn why_ended(&self, id: &GrantId) -> Option<GrantEnd> {
        let mut latest = self.ended.iter().rev();
        latest
            .find(|&&(slot, generation, _)| (slot, generation) == (id.slot, id.generation))
            .map(|&(_, _, why)| why)
    }
}

impl GrantedRead {
    /// Returns the grant.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Checks, after the read, that the grant has not ended during it.
    pub fn finish(self) -> Result<()> {
        self.grants.find(&self.grant.id).map(drop)
    }
}

impl Drop for GrantedRead {
    fn drop(&mut self) {
        let state = self.grants.state.lock();
        let last = self.grant.reads.fetch_sub(1, Ordering::SeqCst) == 1;
        drop(state);
        if last {
            self.grants.unread.notify_all();
        }
    }
}

/// Returns the error for a grant that has ended. `why` is `None` if the reason is not known.
pub fn ended(why: Option<GrantEnd>) -> Error {
    let text = match why {
        Some(GrantEnd::Expired) => "the grant has expired; ask the owner for another one",
        Some(GrantEnd::Revoked) => "the owner has revoked the grant; ask it for another one",
        Some(GrantEnd::Done) => {
            "the readers of the grant have finished; ask the owner for another one, and pull with last=False if more pulls follow"
        }
        Some(GrantEnd::Released) => "the owner has freed the cache of the grant",
        None => "the grant has ended; ask the owner for another one",
    };
    let error = Error::new(ErrorKind::GrantEnded, text);
    why.into_iter().fold(error, |error, why| error.with("ended", why.name()))
}

/// Returns the error for a token that belongs to no grant. It reveals nothing about other grants.
fn never_given() -> Error {
    Error::new(ErrorKind::GrantEnded, "the owner has never given a grant with this token")
}

/// Compares two secrets in a time that does not depend on where they differ.
fn same(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}
