//! Pushes: the peer reads this process's memory if it can; otherwise this process sends the bytes.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use super::call::{Call, Moved};
use super::pull::PullEnd;
use super::stream::Streams;
use crate::cache::RowUse;
use crate::copy::{KeptAlive, PathKind};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Name;
use crate::plan::{CopyPlan, Side, TensorSteps};
use crate::protocol::{Reply, Request, WirePlan};
use crate::resources::MemoryLocation;
use crate::session::{KnownCache, REPORTED_BY, StreamLease, limit_ms, location};
use crate::stats::Op;
use crate::validate::{CheckedPush, Conversion, PushRows};

impl Call {
    /// Pushes rows of the local cache to the cache `to`, which is the name of this call with its slot, and then delivers
    /// the notification. Returns the number of bytes. A push without a tensor succeeds, as in the original, but it delivers
    /// no notification, because the peer has got nothing.
    pub(crate) fn push_rows(&self, to: Name, checked: &CheckedPush<impl Borrow<PushRows>>) -> Result<u64> {
        let bytes = self.counted(|| {
            if let Some(tensors_per_layer) = checked.layer_without_tensors() {
                self.push_checked(to, checked)?;
                tracing::warn!(
                    target: "llm_datadist::transfers",
                    "a push to {to} of cluster {} moved nothing and delivers no notification, because the source cache has \
                     fewer tensors than one layer (cache_id={}, num_tensors={}, tensor_num_per_layer={tensors_per_layer}); \
                     pass tensor_num_per_layer=1 to push all of its tensors",
                    self.link.cluster(), self.local.id(), self.local.num_tensors()
                );
                return Ok(0);
            }
            let notification = self.reserve_notification()?;
            let (bytes, slot) = self.push_checked(to, checked)?;
            self.finish(&PullEnd::default(), notification).map_err(|error| self.named(error))?;
            self.release_slot(slot)?;
            Ok(bytes)
        })?;
        self.resources.stats.add_bytes(Op::Push, bytes);
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
            let remote = known.remote.with_row(row);
            let with_name = |error: Error| error.with("name", to);
            if let Some(conversion) = checked.conversion(&remote).map_err(with_name)? {
                let all = conversion.whole_source;
                let outcome = self.push_converted(known, conversion, checked.rows().local_rows()?)?;
                slot = checked.rows().slot().filter(|_| all && matches!(outcome, Moved::Bytes(1..)));
                return Ok(outcome);
            }
            let mut moves = checked.moves(&remote).map_err(with_name)?;
            let local_rows = std::mem::take(&mut moves.src_rows);
            let plan = Arc::new(CopyPlan::moves(&mut moves)?);
            let outcome = self.push(known, &plan, local_rows)?;
            slot =
                checked.rows().slot().filter(|_| moves.all_tensors && matches!(outcome, Moved::Bytes(1..)));
            Ok(outcome)
        })?;
        Ok((bytes, slot))
    }

    /// Pushes rows by several plans: into rows of another KV layout, or between caches whose tensors differ.
    fn push_converted(
        &self,
        known: &Arc<KnownCache>,
        conversion: Conversion,
        local_rows: Vec<u64>,
    ) -> Result<Moved> {
        let pinned = self.pin(RowUse { reads: local_rows, ..RowUse::default() })?;
        self.attempt(conversion.plans.iter().map(CopyPlan::bytes).sum());
        let mut bytes = 0;
        for plan in conversion.plans {
            match self.push_plan(known, &Arc::new(plan), &pinned)? {
                Moved::Bytes(moved) | Moved::Equal(moved) => bytes += moved,
                Moved::Stale => return Ok(Moved::Stale),
            }
        }
        Ok(Moved::Bytes(bytes))
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
        if plan.is_empty() {
            return Ok(Moved::Bytes(0));
        }
        let pinned = self.pin(RowUse { reads: local_rows, ..RowUse::default() })?;
        // The bytes count as moved when the peer confirms them.
        self.attempt(plan.bytes());
        self.push_plan(known, plan, &pinned)
    }

    /// Pushes the bytes of `plan` while the rows that it reads are `pinned`.
    fn push_plan(&self, known: &Arc<KnownCache>, plan: &Arc<CopyPlan>, _pinned: &KeptAlive) -> Result<Moved> {
        let writing = self.link.pushes.begin(known.cache);
        self.resources.still_registered(&self.local)?;
        let limit = Duration::from_millis(limit_ms(self.deadline));
        let taken = self.push_bytes(known, plan);
        if taken.as_ref().is_err_and(|error| error.fact(REPORTED_BY).is_none()) {
            writing.unanswered(limit);
        } else {
            // The bytes are in place, so pulls may read them in place while they are compared.
            drop(writing);
        }
        self.verified(taken?, known, plan, Side::Source)
    }

    /// Returns the plan for the peer, and the number and the location of the tensors that it may read. If the tensors of the
    /// cache differ, these are only those of the plan, because a request describes equal tensors.
    fn read_tensors(
        &self,
        plan: &Arc<CopyPlan>,
        memory_location: MemoryLocation,
    ) -> Result<(Arc<CopyPlan>, u32, MemoryLocation)> {
        if self.local.mixed().is_none() {
            return Ok((plan.clone(), self.local.num_tensors(), memory_location));
        }
        let tensors = plan.tensors_at(Side::Source);
        let first = TensorSteps::consecutive(0);
        let plan = plan.in_tensor_steps(first, plan.tensors(Side::Destination), tensors.count);
        Ok((Arc::new(plan), tensors.count, memory_location.only(tensors)?))
    }

    /// Moves the bytes of a push by the available path.
    fn push_bytes(&self, known: &Arc<KnownCache>, plan: &Arc<CopyPlan>) -> Result<Moved> {
        let memory_location = self.resources.memory_location(&self.local)?;
        match self.link.path_of_peer(&memory_location) {
            Ok(path) => {
                // Pushes of other sizes are read by the peer, whatever moves this one.
                self.resources.described_to_peer(&self.local, &memory_location);
                if let Some(rings) = self.rings_instead_of(path, plan.bytes()) {
                    return self.send_bytes(known, plan, Some(rings));
                }
                if let Some(moved) = self.have_read(known, plan, memory_location, path)? {
                    return Ok(moved);
                }
            }
            Err(reason) => self.owner_sends(reason),
        }
        self.send_bytes(known, plan, None)
    }

    /// Has the peer read the bytes of a push on `path`. Returns `None` if this side has to send them.
    fn have_read(
        &self,
        known: &Arc<KnownCache>,
        plan: &Arc<CopyPlan>,
        memory_location: MemoryLocation,
        path: PathKind,
    ) -> Result<Option<Moved>> {
        let tensor_bytes = self.local.sizes_of(plan.src_tensor()).tensor_bytes();
        let (plan, num_tensors, memory_location) = self.read_tensors(plan, memory_location)?;
        let request = Request::Fetch {
            name: self.name.into(),
            cache: known.cache.0,
            plan: WirePlan::try_from(&*plan)?,
            source: location(memory_location)?,
            num_tensors,
            tensor_bytes,
            limit_ms: limit_ms(self.deadline),
        };
        let reply = if self.to_the_end {
            self.link.ask_to_the_end(&request, self.deadline)
        } else {
            self.link.ask(&request, self.deadline)
        };
        match reply? {
            Reply::Done { bytes } => {
                self.count(path, bytes, false);
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
        plan: &Arc<CopyPlan>,
        first: Option<StreamLease>,
    ) -> Result<Moved> {
        let streams = Streams { call: self.clone(), known: known.clone(), plan: plan.clone() };
        let (sent, path) = streams.send(first)?;
        if let Moved::Bytes(bytes) = sent {
            self.count_sent(path, bytes);
        }
        Ok(sent)
    }
}
