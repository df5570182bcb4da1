//! Compares what a call has moved with its source: both sides hash their own memory, and this side compares the
//! checksums. A pull of a stream may have compared them while the bytes arrived (`Moved::Equal`).
//!
//! This happens before a key is released and before a notification is delivered, while the local rows are pinned. The
//! owner pins its rows while it hashes them. Between the move and that moment the owner's program must not write them.

use super::call::{Call, Moved};
use super::compared::{BLOCKS, Compared, block_sizes, differ, sample};
use crate::checksums::Checksums;
use crate::error::Result;
use crate::fallible;
use crate::model::Verify;
use crate::plan::{CopyPlan, PartLimits, Side, Template};
use crate::protocol::{MAX_CHECKSUMS, MAX_HASHED, NamedCache, Reply, Request, WirePlan, digest};
use crate::session::{KnownCache, send_message};

/// Name of the comparison in errors of its deadline.
const COMPARING: &str = "comparing blocks with their source";

impl Call {
    /// Compares the blocks of `plan`, which were moved, if this call verifies. Returns `Moved::Stale` if the remote cache
    /// has changed since it was described, and `Err(VerifyFailed)` if a block differs.
    pub(super) fn verified(
        &self,
        moved: Moved,
        known: &KnownCache,
        plan: &CopyPlan,
        local: Side,
    ) -> Result<Moved> {
        if self.verify == Verify::Off || matches!(moved, Moved::Stale) {
            return Ok(moved);
        }
        #[cfg(feature = "testing")]
        let moved = if changed(&self.local) { moved.unknown() } else { moved };
        let sizes = block_sizes(&self.local, local);
        if let Moved::Equal(bytes) = moved {
            self.resources.stats.count_verified(plan.compared(sizes, None)?.num_pairs(), 0);
            return Ok(Moved::Bytes(bytes));
        }
        let blocks = plan.compared(sizes, sample(self.verify)?)?;
        let Some(Compared { checked, different }) = self.compare_blocks(known, &blocks, local)? else {
            return Ok(Moved::Stale);
        };
        self.resources.stats.count_verified(checked, different.len());
        if different.is_empty() {
            return Ok(moved);
        }
        Err(differ(&self.local, local, checked, &different))
    }

    /// Compares the pairs of a plan of templates. Returns `None` if the remote cache has changed.
    fn compare_blocks(&self, known: &KnownCache, blocks: &CopyPlan, local: Side) -> Result<Option<Compared>> {
        let bytes = MAX_HASHED / u64::from(blocks.num_tensors()).max(1);
        let mut compared = Compared::default();
        for part in blocks.parts(PartLimits { bytes, pairs: MAX_CHECKSUMS }) {
            let part = part?;
            self.deadline.waiting(COMPARING)?;
            let Some(equal) = self.compare_part(known, &part, local)? else { return Ok(None) };
            compared.add(part.templates().iter().flat_map(Template::pair_blocks), &equal)?;
        }
        Ok(Some(compared))
    }

    /// Returns for each pair of `part` whether both sides have the same bytes; `None` if the remote cache has changed.
    fn compare_part(&self, known: &KnownCache, part: &CopyPlan, local: Side) -> Result<Option<Vec<bool>>> {
        let name = self.name_to_read(known);
        let request = Request::Checksums {
            cache: NamedCache { name, id: known.cache },
            plan: WirePlan::try_from(part)?,
            side: local.other(),
        };
        let asked = digest(&request)?;
        let (engine, memory) = (&self.resources.copy_engine, (self.local.tensors(), self.local.placement()));
        let own_sums = |generation| {
            let checksums = Checksums::bound_to(name, known.cache, generation, asked)?;
            engine.block_sums(memory, (part, local), checksums, self.deadline)
        };
        let mut lease = self.link.lease(self.deadline)?;
        let mut own = Ok(Vec::new());
        let send = || {
            send_message(lease.stream(), &self.link.timed(&request, self.deadline), self.deadline)?;
            // Both sides hash at the same time.
            own = own_sums(known.at.generation);
            Ok(())
        };
        let answer = self.link.exchange_with(&lease, self.deadline, send);
        let reply = answer.map_err(|error| self.link.break_reason_or(error))?;
        lease.reusable = true;
        drop(lease);
        let own = own?;
        match self.link.refusal(reply)? {
            Reply::Stale => Ok(None),
            Reply::Checksums { generation, sums } if sums.len() == part.num_pairs() => {
                let own = if generation == known.at.generation {
                    own
                } else if self.same_cache(known)? {
                    own_sums(generation)?
                } else {
                    return Ok(None);
                };
                fallible::collect(BLOCKS, own.iter().zip(&sums).map(|(own, theirs)| own == theirs)).map(Some)
            }
            reply => Err(self.link.unexpected(&reply)),
        }
    }

    /// Asks the owner whether the remote cache is still the one that was described, although its generation may have changed,
    /// for example because a key was released. Ids are never used again, so the same id means the same memory.
    pub(super) fn same_cache(&self, known: &KnownCache) -> Result<bool> {
        self.link.check_grant(known, self.deadline)?;
        let now = self.described()?;
        Ok(now.cache == known.cache && now.remote == known.remote)
    }
}

/// What a test does with the local cache between the move and the comparison. Returns whether it changed the cache.
#[cfg(feature = "testing")]
pub static MOVED: std::sync::OnceLock<fn(&crate::cache::Cache) -> bool> = std::sync::OnceLock::new();

#[cfg(feature = "testing")]
fn changed(cache: &crate::cache::Cache) -> bool {
    MOVED.get().is_some_and(|moved| moved(cache))
}
