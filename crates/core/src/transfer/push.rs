//! Pushes: the peer reads this process's memory if it can; otherwise this process sends the bytes.

use std::sync::Arc;

use super::call::{Call, Moved, TransferEnd};
use super::stream::Streams;
use crate::cache::RowUse;
use crate::copy::{HeldPins, PathKind, Progress};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{RemoteCacheName, RowList};
use crate::plan::{CopyPlan, Side};
use crate::protocol::{NamedCache, Reply, Request, WirePlan};
use crate::resources::MemoryLocation;
use crate::session::{KnownCache, REPORTED_BY, StreamLease, location};
use crate::validate::{CheckedTransfer, OwnerShare};

impl Call {
    /// Pushes rows of the local cache to the cache `to`, which is the name of this call with its slot. Returns the number of
    /// bytes and what is left to do now.
    pub(super) fn push_checked(
        &self,
        to: &RemoteCacheName,
        checked: &CheckedTransfer,
        share: &OwnerShare,
    ) -> Result<(u64, TransferEnd)> {
        let (_, row) = to.without_slot();
        let mut slot = None;
        let bytes = self.attempts(|known| {
            let remote = known.remote.with_row(row);
            let planned = checked.plan(&remote, share).map_err(|error| error.with("name", to))?;
            let outcome = self.push(known, &planned.plans, checked.rows().local_rows()?)?;
            let all = planned.read_tensors.is_some_and(|(_, count)| count == self.local.num_tensors());
            slot = checked.rows().local_slot().filter(|_| all && matches!(outcome, Moved::Bytes(1..)));
            Ok(outcome)
        })?;
        Ok((bytes, TransferEnd { slot, ..TransferEnd::default() }))
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

    /// Pushes the bytes of `plans`: the peer reads this process's memory if it can, otherwise the bytes are
    /// sent.
    pub(crate) fn push(
        &self,
        known: &Arc<KnownCache>,
        plans: &[CopyPlan],
        local_rows: RowList,
    ) -> Result<Moved> {
        if plans.iter().all(CopyPlan::is_empty) {
            return Ok(Moved::Bytes(0));
        }
        let pinned = self.pin(RowUse { reads: local_rows, ..RowUse::default() })?;
        // The bytes count as moved when the peer confirms them.
        let total = plans.iter().map(CopyPlan::bytes).sum();
        self.new_progress(total);
        let (mut bytes, sent) = (0, Arc::default());
        for plan in plans {
            let pushed = self.push_plan(known, plan, (total, &sent), &pinned);
            match pushed.map_err(|error| error.with_replaced("of_bytes", total))? {
                Moved::Bytes(moved) | Moved::Equal(moved) => bytes += moved,
                Moved::Stale => return Ok(Moved::Stale),
            }
        }
        Ok(Moved::Bytes(bytes))
    }

    /// Pushes the bytes of `plan`, one of a push of `total` bytes, while the rows that it reads are `pinned`. `sent` counts the bytes
    /// that this side sends.
    fn push_plan(
        &self,
        known: &Arc<KnownCache>,
        plan: &CopyPlan,
        (total, sent): (u64, &Arc<Progress>),
        _pinned: &HeldPins,
    ) -> Result<Moved> {
        let writing = self.link.view.pushes().begin(known.cache);
        self.resources.still_registered(&self.local)?;
        let limit = self.link.limit_of_push(self.deadline);
        let taken = self.push_bytes(known, plan, (total, sent));
        if taken.as_ref().is_err_and(|error| error.fact(REPORTED_BY).is_none()) {
            writing.unanswered(limit);
        } else {
            // The bytes are in place, so pulls may read them in place while they are compared.
            drop(writing);
        }
        self.verified(taken?, known, plan, Side::Source)
    }

    /// Moves the bytes of one plan of a push of `total` bytes by the available path.
    fn push_bytes(
        &self,
        known: &Arc<KnownCache>,
        plan: &CopyPlan,
        (total, sent): (u64, &Arc<Progress>),
    ) -> Result<Moved> {
        let memory_location = self.resources.memory_location(&self.local)?;
        match self.link.view.path_of_peer(&memory_location) {
            Ok(path) => {
                // Pushes of other sizes are read by the peer, whatever moves this one.
                self.resources.described_to_peer(&self.local, &memory_location);
                if let Some(rings) = self.rings_instead_of(path, total) {
                    return self.send_bytes(known, plan, sent, Some(rings));
                }
                if let Some(moved) = self.have_read(known, plan, memory_location, path)? {
                    return Ok(moved);
                }
            }
            Err(reason) => self.owner_sends(reason),
        }
        self.send_bytes(known, plan, sent, None)
    }

    /// Has the peer read the bytes of a push on `path`. Returns `None` if this side has to send them.
    fn have_read(
        &self,
        known: &Arc<KnownCache>,
        plan: &CopyPlan,
        memory_location: MemoryLocation,
        path: PathKind,
    ) -> Result<Option<Moved>> {
        let request = Request::Fetch {
            cache: NamedCache { name: self.name_of(known), id: known.cache },
            plan: WirePlan::try_from(plan)?,
            source: location(memory_location)?,
            num_tensors: self.local.num_tensors(),
            tensor_bytes: self.local.geometry().tensor_bytes(),
        };
        let reply = if self.to_the_end {
            self.link.ask_to_the_end(&request, self.deadline)
        } else {
            self.link.ask(&request, self.deadline)
        };
        match reply? {
            Reply::Done { bytes } => {
                self.count_read(path, bytes, false);
                Ok(Some(Moved::Bytes(bytes)))
            }
            Reply::Stale => Ok(Some(Moved::Stale)),
            // The peer could read this memory when the link was made, but cannot now. This side can always send it.
            Reply::Unreachable { reason } if !self.only_fabric() => {
                self.owner_sends(&reason);
                Ok(None)
            }
            Reply::Unreachable { reason } => {
                let text = format!("the peer reports that it cannot read through UCX: {reason}");
                Err(self.named(Error::new(ErrorKind::NotEnabled, text)))
            }
            reply => Err(self.link.unexpected(&reply)),
        }
    }

    /// Sends the bytes of a push through streams, of which `first` may be the first one.
    fn send_bytes(
        &self,
        known: &Arc<KnownCache>,
        plan: &CopyPlan,
        sent: &Arc<Progress>,
        first: Option<StreamLease>,
    ) -> Result<Moved> {
        let streams = Streams { call: self.clone(), known: known.clone(), plan: plan.clone() };
        let short = first.is_some();
        let (moved, path) = streams.send(first, sent.clone())?;
        if let Moved::Bytes(bytes) = moved {
            self.count_sent(path, short, bytes);
        }
        Ok(moved)
    }
}
