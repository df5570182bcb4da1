//! The regions of a peer that this engine knows. A peer tells it when one of them ends (`Message::Ended`). A peer never uses the name
//! of a region again, so a transfer that uses an outdated entry fails and moves nothing (`regions`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, RwLock};

use llm_datadist_core::PeerCache;

use crate::sync::{read, write};

/// A region of a peer.
#[derive(Clone, Debug)]
pub(crate) struct RemoteRegion {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// The number of the region at the peer.
    pub(crate) number: u64,
    pub(crate) cache: Arc<PeerCache>,
}

/// What is known of the regions of one peer, by address. Entries do not overlap: a new one replaces those that it overlaps.
#[derive(Debug, Default)]
pub(crate) struct RemoteRegions(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    by_addr: BTreeMap<u64, RemoteRegion>,
    /// The latest regions that have ended, because a call may add what the peer has replied before.
    ended: BTreeSet<u64>,
}

/// Maximum number of entries. The peer is asked again for those that are left out.
const MAX_ENTRIES: usize = 1 << 16;
/// Maximum number of regions that have ended.
const MAX_ENDED: usize = 1024;

impl RemoteRegion {
    /// Whether `len` bytes from `addr` on lie inside.
    pub(crate) fn holds(&self, addr: u64, len: u64) -> bool {
        addr >= self.addr && len <= self.len && addr - self.addr <= self.len - len
    }
}

impl RemoteRegions {
    /// Returns the region that holds a range, if it is known.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<RemoteRegion> {
        let known = read(&self.0);
        let (_, region) = known.by_addr.range(..=addr).next_back()?;
        region.holds(addr, len).then(|| region.clone())
    }

    /// Adds what the peer has reported.
    pub(crate) fn add(&self, region: RemoteRegion) {
        let mut known = write(&self.0);
        if known.ended.contains(&region.number) {
            return;
        }
        let regions = &mut known.by_addr;
        if regions.len() >= MAX_ENTRIES {
            regions.clear();
        }
        let end = region.addr.saturating_add(region.len);
        while let Some((&at, last)) = regions.range(..end).next_back()
            && last.addr + last.len > region.addr
        {
            regions.remove(&at);
        }
        regions.insert(region.addr, region);
    }

    /// Forgets a region that has ended at the peer.
    pub(crate) fn forget(&self, number: u64) {
        let mut known = write(&self.0);
        known.by_addr.retain(|_, region| region.number != number);
        known.ended.insert(number);
        if known.ended.len() > MAX_ENDED {
            known.ended.pop_first();
        }
    }

    /// Forgets all, because an entry was outdated.
    pub(crate) fn clear(&self) {
        write(&self.0).by_addr.clear();
    }
}
