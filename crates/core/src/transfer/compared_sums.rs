//! Compares the checksums of this side with those of the owner.

use super::call::Call;
use crate::checksums::Checksums;
use crate::error::Result;
use crate::fallible;
use crate::plan::Piece;
use crate::protocol::{Reply, Request, digest};
use crate::session::{KnownCache, send_message};

/// Name of these lists in out-of-memory errors.
const BLOCKS: &str = "the blocks that are compared";
/// Name of the comparison in errors of its deadline.
pub(super) const COMPARING: &str = "comparing blocks with their source";

/// Result of a comparison.
#[derive(Default)]
pub(super) struct Compared {
    /// Number of blocks that were compared.
    pub(super) checked: usize,
    /// The blocks that differ.
    pub(super) different: Vec<Piece>,
}

impl Compared {
    /// Adds blocks, and whether both sides have the same bytes of each.
    pub(super) fn add(&mut self, blocks: impl Iterator<Item = Piece>, equal: &[bool]) -> Result<()> {
        self.checked += equal.len();
        for (block, _) in blocks.zip(equal).filter(|&(_, equal)| !equal) {
            fallible::push(BLOCKS, &mut self.different, block)?;
        }
        Ok(())
    }
}

impl Call {
    /// Asks the owner for `count` checksums while this side calculates its own with `own_sums`. Returns for each of them
    /// whether they are equal; `None` if the remote cache has changed.
    pub(super) fn compare(
        &self,
        known: &KnownCache,
        request: &Request,
        count: usize,
        own_sums: impl Fn(Checksums) -> Result<Vec<u64>>,
    ) -> Result<Option<Vec<bool>>> {
        let asked = digest(request)?;
        let bound = |generation| Checksums::bound_to(self.remote_name(), known.cache, generation, asked);
        let mut lease = self.link.lease(self.deadline)?;
        let mut own = Ok(Vec::new());
        let send = || {
            send_message(lease.stream(), request, self.deadline)?;
            // Both sides hash at the same time.
            own = bound(known.at.generation).and_then(&own_sums);
            Ok(())
        };
        let answer = self.link.exchange_with(&lease, self.deadline, send);
        let reply = answer.map_err(|error| self.link.break_reason_or(error))?;
        lease.reusable = true;
        drop(lease);
        let own = own?;
        match self.link.refusal(reply)? {
            Reply::Stale => Ok(None),
            Reply::Checksums { generation, sums } if sums.len() == count => {
                let own = if generation == known.at.generation {
                    own
                } else if self.same_cache(known)? {
                    own_sums(bound(generation)?)?
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
        self.link.check_grant(known)?;
        let now = self.described()?;
        Ok(now.cache == known.cache && now.remote == known.remote)
    }
}
