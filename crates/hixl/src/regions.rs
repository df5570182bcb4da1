//! Memory that this engine has registered. Each region is a cache of one block, whose name no other one ever has.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use llm_datadist_core::{
    Adopted, CacheDesc, CacheForm, ClusterId, DataType, Deadline, Engine, ErrorKind, OwnCache, Placement,
    Result,
};

use crate::messages::{Message, WireRegion};
use crate::open_engine::OpenEngine;
use crate::status::{Outcome, Status};
use crate::sync::{lock, read, write};

/// How long the end of a region, of a link or of the engine waits for transfers that use memory: longer than a link to a silent peer
/// lasts, and the end of the link ends its transfers (`docs/links.md`).
pub(crate) const IN_USE: Duration = Duration::from_secs(10);

/// How long the end of a region waits for peers that know it.
const FORGET: Duration = Duration::from_secs(1);

/// The next number of a region. A process never uses a number twice, so a handle of a finalized engine is never valid again.
static REGISTERED: AtomicU64 = AtomicU64::new(1);

/// What the program says about memory. Both kinds are host memory here. Ranges of different kinds may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants are those of the public enumeration")]
pub enum MemKind {
    Device = 0,
    Host = 1,
}

/// A range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemRange {
    /// Address of the first byte.
    pub addr: u64,
    /// Number of bytes.
    pub len: u64,
    /// Whether peers cannot use it.
    pub local_only: bool,
}

/// A registered range.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) range: MemRange,
    kind: MemKind,
    /// Its handle, and the number in the name of its cache.
    pub(crate) number: u64,
    pub(crate) cache: Arc<OwnCache>,
    /// The peers that have asked for it.
    known_by: Mutex<HashSet<ClusterId>>,
}

/// The regions of one engine.
#[derive(Debug, Default)]
pub(crate) struct Regions(RwLock<Table>);

#[derive(Debug, Default)]
struct Table {
    /// By kind and address.
    by_addr: [BTreeMap<u64, Arc<Region>>; 2],
    by_number: HashMap<u64, Arc<Region>>,
    /// Regions that no call finds any more, but that transfers may still use.
    in_use: HashMap<u64, Arc<Region>>,
}

/// Returns the name of the cache of a region.
pub(crate) fn cache_name(number: u64) -> String {
    format!("hixl/{number}")
}

impl MemKind {
    /// Returns the kind with this number. `None` if there is none, which every call refuses.
    pub fn of(number: i64) -> Option<Self> {
        [MemKind::Device, MemKind::Host].into_iter().find(|kind| *kind as i64 == number)
    }
}

impl MemRange {
    /// Whether `len` bytes from `addr` on lie inside.
    fn holds(&self, addr: u64, len: u64) -> bool {
        addr >= self.addr && len <= self.len && addr - self.addr <= self.len - len
    }
}

impl Region {
    /// Whether `len` bytes from `addr` on lie inside.
    pub(crate) fn holds(&self, addr: u64, len: u64) -> bool {
        self.range.holds(addr, len)
    }
}

impl Table {
    /// Returns the regions that hold a range, at most one of each kind.
    fn find(
        &self,
        addr: u64,
        len: u64,
        visible: impl Fn(&Region) -> bool,
    ) -> impl Iterator<Item = &Arc<Region>> {
        let last = self.by_addr.iter().filter_map(move |regions| regions.range(..=addr).next_back());
        last.map(|(_, region)| region).filter(move |region| visible(region) && region.holds(addr, len))
    }

    /// Returns the region of this range, if there is one, or an error if the range overlaps another one of its kind.
    fn same(&self, range: MemRange, kind: MemKind) -> Outcome<Option<u64>> {
        let Some(end) = range.addr.checked_add(range.len) else { return Err(Status::ParamInvalid) };
        let below = self.by_addr[kind as usize].range(..end).next_back().map(|(_, region)| region);
        match below {
            Some(region) if region.range == range => Ok(Some(region.number)),
            Some(region) if region.range.addr + region.range.len > range.addr => Err(Status::ParamInvalid),
            _ => Ok(None),
        }
    }
}

impl Regions {
    /// Registers a range and returns its handle. A range that is registered already has the same handle, and one call ends it.
    /// `adopt` makes the promise about the memory.
    pub(crate) fn register(
        &self,
        engine: &Engine,
        range: MemRange,
        kind: MemKind,
        adopt: impl FnOnce(&CacheDesc, &[u64]) -> Result<Adopted>,
    ) -> Outcome<u64> {
        let bytes = i64::try_from(range.len).ok().filter(|_| range.addr > 0 && range.len > 0);
        let bytes = bytes.ok_or(Status::ParamInvalid)?;
        let mut table = write(&self.0);
        if let Some(number) = table.same(range, kind)? {
            return Ok(number);
        }
        let number = REGISTERED.fetch_add(1, Ordering::Relaxed);
        let register = || {
            let form = CacheForm::plain(1, 1, &[bytes], DataType::Uint8, Placement::Host, None)?;
            let adopted = adopt(form.desc(), &[range.addr])?.unordered();
            engine.register(&cache_name(number), &form, adopted, !range.local_only)
        };
        let cache = register().map_err(|error| Status::from_error("register_mem", &error))?;
        let region = Arc::new(Region { range, kind, number, cache, known_by: Mutex::default() });
        table.by_addr[kind as usize].insert(range.addr, region.clone());
        table.by_number.insert(number, region);
        Ok(number)
    }

    /// Begins to end a region: no call and no peer finds it from now on. `None` if there is none.
    fn begin_end(&self, number: u64) -> Option<Arc<Region>> {
        let mut table = write(&self.0);
        let known = table.by_number.remove(&number);
        if let Some(region) = &known {
            table.by_addr[region.kind as usize].remove(&region.range.addr);
        }
        let region = known.or_else(|| table.in_use.get(&number).cloned())?;
        // Until it has ended, another call with this handle waits as well.
        table.in_use.insert(number, region.clone());
        Some(region)
    }

    /// Returns the region that holds a range.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Arc<Region>> {
        read(&self.0).find(addr, len, |_| true).next().cloned()
    }

    /// Returns the regions in which addresses lie, for a peer.
    pub(crate) fn locate(&self, peer: ClusterId, addrs: &[u64]) -> Vec<WireRegion> {
        let table = read(&self.0);
        let one = |&addr: &u64| {
            let found = table.find(addr, 1, |region| !region.range.local_only);
            // Of two kinds, the region in which more bytes follow.
            let found = found.max_by_key(|region| region.range.addr + region.range.len);
            found.map_or(WireRegion::default(), |region| {
                lock(&region.known_by).insert(peer);
                WireRegion { addr: region.range.addr, len: region.range.len, number: region.number }
            })
        };
        addrs.iter().map(one).collect()
    }
}

impl OpenEngine {
    /// Ends a region: peers forget it, and nothing uses its memory afterwards. No peer reaches it from the start of the call on. An
    /// unknown handle is a success. After `Timeout`, transfers still use the memory, and the same call waits again.
    pub(crate) fn deregister(&self, number: u64) -> Outcome<()> {
        if number == 0 {
            return Err(Status::ParamInvalid);
        }
        let Some(region) = self.regions.begin_end(number) else { return Ok(()) };
        self.forget_at_peers(&region);
        let freed = self.engine.free(&region.cache).and_then(|freed| freed.join(Deadline::after(IN_USE)));
        freed.map_err(|error| Status::from_error("deregister_mem", &error))?;
        write(&self.regions.0).in_use.remove(&number);
        Ok(())
    }

    /// Has the peers that know a region forget it, so that their later transfers do not fail because of it. A peer that does not
    /// answer in time forgets it when it reads the message.
    fn forget_at_peers(&self, region: &Region) {
        let (deadline, peers) = (Deadline::after(FORGET), std::mem::take(&mut *lock(&region.known_by)));
        let ask = |peer| {
            let id = self.replies.begin(peer);
            let message = Message::Ended { id, number: region.number }.encode();
            match self.engine.send(peer, message.clone()) {
                Err(error) if error.kind() == ErrorKind::Busy => {
                    self.outbox.send(&self.engine, peer, message);
                }
                // The link has ended, and with it what the peer knows.
                Err(_) => self.replies.forget(id),
                Ok(()) => {}
            }
            id
        };
        let asked: Vec<_> = peers.into_iter().map(ask).collect();
        // A question that was forgotten has the reply that the link has ended.
        for id in asked {
            let _ = self.replies.wait(id, deadline);
        }
    }
}
