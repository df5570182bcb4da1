//! Pushes: the peer reads this process's memory if it can; otherwise this process sends the bytes.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use super::call::{Call, Moved};
use super::pull::PullEnd;
use super::stream::Streams;
use crate::cache::RowUse;
use crate::error::Result;
use crate::model::Name;
use crate::plan::{CacheCount, CopyPlan, LocalEnd};
use crate::protocol::{Reply, Request, WirePlan};
use crate::session::{KnownCache, REPORTED_BY, limit_ms, location};
use crate::stats::Op;
use crate::validate::{CheckedPush, PushRows, RemoteCache};

impl Call {
    /// Pushes rows of the local cache to the cache `to`, which is the name of this call with its slot, and then delivers
    /// the notification. Returns the number of bytes.
    pub(crate) fn push_rows(&self, to: Name, checked: &CheckedPush<impl Borrow<PushRows>>) -> Result<u64> {
        let bytes = self.counted(|| {
            let notification = self.reserve_notification()?;
            let (bytes, slot) = self.push_checked(to, checked)?;
            self.finish(&PullEnd::default(), notification).map_err(|error| self.named(error))?;
            self.release_slot(slot)?;
            Ok(bytes)
        })?;
        self.resources.count_bytes(Op::Push, bytes);
        Ok(bytes)
    }

    /// Pushes rows, and returns the number of bytes and the local slot whose key is to be released now, if there is one.
    pub(super) fn push_checked(
        &self,
        to: Name,
        checked: &CheckedPush<impl Borrow<PushRows>>,
    ) -> Result<(u64, Option<u32>)> {
        let (_, row) = to.without_slot();
        let mut slot = None;
        let bytes = self.rounds(|known| {
            let remote = RemoteCache { row: row.unwrap_or(known.remote.row), ..known.remote };
            let mut moves =
                checked.moves(self.local.geometry(), remote).map_err(|error| error.with("name", to))?;
            let local_rows = std::mem::take(&mut moves.src_rows);
            let plan = Arc::new(CopyPlan::moves(&mut moves, CacheCount::Two)?);
            let outcome = self.push(known, &plan, local_rows)?;
            if let (PushRows::Slot { local }, Moved::Bytes(1..), true) =
                (checked.rows(), &outcome, moves.all_tensors)
            {
                slot = Some(*local);
            }
            Ok(outcome)
        })?;
        Ok((bytes, slot))
    }

    /// Releases the key of a slot that was pushed, as a pull does (the original's `deprecated.md`; contract
    /// §17, further rulings).
    pub(super) fn release_slot(&self, slot: Option<u32>) -> Result<()> {
        if let Some(slot) = slot {
            self.commit()?;
            self.resources.table.release_row(self.local.id(), slot);
        }
        Ok(())
    }

    /// Pushes the bytes of `plan`: the peer reads this process's memory if it can, otherwise the bytes are
    /// sent.
    pub(crate) fn push(
        &self,
        known: &Arc<KnownCache>,
        plan: &Arc<CopyPlan>,
        local_rows: Vec<u64>,
    ) -> Result<Moved> {
        if plan.waves().is_empty() {
            return Ok(Moved::Bytes(0));
        }
        let writing = self.link.pushes.begin(known.cache);
        let _pinned = self.pin(RowUse { reads: local_rows, ..RowUse::default() })?;
        // The bytes count as moved when the peer confirms them.
        self.attempt(plan.bytes());
        self.resources.still_registered(&self.local)?;
        let limit = Duration::from_millis(limit_ms(self.deadline));
        let taken = self.push_bytes(known, plan);
        if taken.as_ref().is_err_and(|error| error.fact(REPORTED_BY).is_none()) {
            writing.unanswered(limit);
        } else {
            // The bytes are in place, so pulls may read them in place while they are compared.
            drop(writing);
        }
        self.verified(taken?, known, plan, LocalEnd::Source)
    }

    /// Moves the bytes of a push by the available path.
    fn push_bytes(&self, known: &Arc<KnownCache>, plan: &Arc<CopyPlan>) -> Result<Moved> {
        let memory_location = self.resources.memory_location(&self.local)?;
        if self.link.peer_memory().is_some_and(|memory| memory.seen(&memory_location)) {
            self.resources.described_to_peer(&self.local, &memory_location);
            let geometry = self.local.geometry();
            let request = Request::Fetch {
                name: self.name.into(),
                cache: known.cache.0,
                plan: WirePlan::try_from(&**plan)?,
                source: location(memory_location)?,
                num_tensors: geometry.num_tensors(),
                tensor_bytes: geometry.tensor_bytes(),
                limit_ms: limit_ms(self.deadline),
            };
            let reply = if self.to_the_end {
                self.link.ask_to_the_end(&request, self.deadline)
            } else {
                self.link.ask(&request, self.deadline)
            };
            match reply? {
                Reply::Done { bytes } => return Ok(Moved::Bytes(bytes)),
                Reply::Stale => return Ok(Moved::Stale),
                // The peer could read this memory when the link was made, but cannot now. Sockets always
                // work.
                Reply::Unreachable { .. } => {}
                reply => return Err(self.link.unexpected(&reply)),
            }
        }
        Streams { call: self.clone(), known: known.clone(), plan: plan.clone() }.send()
    }
}
