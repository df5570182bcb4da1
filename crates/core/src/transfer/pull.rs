//! Pulls: this process reads the peer's memory, or asks the owner to send the bytes through streams. `copy::route` says which.

use std::borrow::Borrow;
use std::sync::Arc;

use super::call::{Call, Moved};
use super::stream::Streams;
use crate::cache::RowUse;
use crate::copy::{Hops, KeptAlive, Progress, STILL_READING, with_arrived_rows};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{CacheKey, Name};
use crate::plan::{CopyPlan, Moves, Side};
use crate::protocol::WirePulled;
use crate::session::{BEING_PUSHED, KnownCache, PeerSnapshot, ReservedNotification, StreamLease, Validity};
use crate::stats::Op;
use crate::validate::{CheckedPull, Conversion, PullRows};

/// What is left to do once the bytes of a pull are in place.
#[derive(Default)]
pub(super) struct PullEnd {
    /// The key that is to be released, or the grant that is to be reported as done.
    pulled: Option<WirePulled>,
    /// What was copied from the tensors of the key, for the list of rows that are in place. `None` if rows were converted: then no
    /// rows are listed.
    copied: Option<(Arc<CopyPlan>, Arc<Progress>)>,
}

impl Call {
    /// Pulls rows of the remote cache into the local one, then has the key released and delivers the notification. Returns
    /// the number of bytes.
    pub(crate) fn pull_rows(&self, checked: &CheckedPull<impl Borrow<PullRows>>) -> Result<u64> {
        let bytes = self.counted(|| {
            let notification = self.reserve_notification()?;
            let (bytes, end) = self.pull_checked(checked)?;
            self.finish(&end, notification).map_err(|error| self.named(error))?;
            Ok(bytes)
        })?;
        self.resources.stats.add_bytes(Op::Pull, bytes);
        Ok(bytes)
    }

    /// Pulls rows, and returns the number of bytes and what is left to do now.
    pub(super) fn pull_checked(
        &self,
        checked: &CheckedPull<impl Borrow<PullRows>>,
    ) -> Result<(u64, PullEnd)> {
        self.open_grant().map_err(|error| self.named(error))?;
        let mut end = PullEnd::default();
        let bytes = self.rounds(|known| {
            let (moved, left) = match checked.conversion(&known.remote)? {
                Some(conversion) => self.pull_converted(known, conversion, checked.rows().local_rows()?)?,
                None => self.pull_moves(known, &mut checked.moves(&known.remote)?)?,
            };
            end = left;
            Ok(moved)
        })?;
        if let Some(grant) = self.grant.filter(|grant| grant.done) {
            end.pulled = Some(WirePulled::of_grant(grant.token.grant));
        }
        Ok((bytes, end))
    }

    /// Has the owner release a key whose bytes are in place, or note that this side is done with a grant, and delivers the
    /// notification: one request.
    pub(super) fn finish(&self, end: &PullEnd, notification: Option<ReservedNotification>) -> Result<()> {
        let PullEnd { pulled, copied } = end;
        if pulled.is_none() && notification.is_none() {
            return Ok(());
        }
        if let Some(notification) = &notification {
            notification.await_turn(self.deadline)?;
        }
        self.commit()?;
        let finished = match notification {
            Some(notification) => notification.deliver(*pulled, self.deadline),
            None => self.link.finish(*pulled, self.deadline),
        };
        finished.map_err(|error| match copied {
            Some((plan, progress)) => self.with_arrived(error, plan, progress),
            None => error,
        })?;
        // These names are used once.
        let name = self.remote_name();
        if pulled.is_some() && matches!(name, Name::Key(CacheKey::Request { .. }) | Name::Grant(_)) {
            self.link.forget(&name);
        }
        Ok(())
    }

    /// Pulls the bytes of `moves`: reads memory of the peer that this process can access, otherwise asks for
    /// a stream. Also returns what is left to do.
    pub(super) fn pull_moves(&self, known: &Arc<KnownCache>, moves: &mut Moves) -> Result<(Moved, PullEnd)> {
        let plan = Arc::new(CopyPlan::moves(moves)?);
        known.check_granted(&plan)?;
        if plan.is_empty() {
            return Ok((Moved::Bytes(0), PullEnd::default()));
        }
        let writes = std::mem::take(&mut moves.dst_rows);
        let pinned = self.pin(RowUse { writes, ..RowUse::default() })?;
        self.resources.still_registered(&self.local)?;
        let mut progress = self.attempt(plan.bytes());
        let outcome = self.pull_bytes(known, &plan, &mut progress, &pinned);
        let outcome = outcome.map_err(|error| self.with_arrived(error, &plan, &progress))?;
        let outcome = self.verified(outcome, known, &plan, Side::Destination)?;
        let used_up = self.used_up(known, (moves.src_tensor, moves.num_tensors));
        let pulled = used_up.filter(|_| matches!(outcome, Moved::Bytes(_)));
        Ok((outcome, PullEnd { pulled, copied: pulled.map(|_| (plan, progress)) }))
    }

    /// Pulls rows by several plans: into rows of another KV layout, or between caches whose tensors differ. The key is to be
    /// released if all layers and heads of the remote cache are in place; without a conversion, as for one plan.
    fn pull_converted(
        &self,
        known: &Arc<KnownCache>,
        conversion: Conversion,
        local_rows: Vec<u64>,
    ) -> Result<(Moved, PullEnd)> {
        let pinned = self.pin(RowUse { writes: local_rows, ..RowUse::default() })?;
        self.resources.still_registered(&self.local)?;
        let mut progress = self.attempt(conversion.plans.iter().map(CopyPlan::bytes).sum());
        let mut bytes = 0;
        for plan in conversion.plans {
            let plan = Arc::new(plan);
            known.check_granted(&plan)?;
            let moved = self.pull_bytes(known, &plan, &mut progress, &pinned)?;
            match self.verified(moved, known, &plan, Side::Destination)? {
                Moved::Bytes(moved) | Moved::Equal(moved) => bytes += moved,
                Moved::Stale => return Ok((Moved::Stale, PullEnd::default())),
            }
        }
        let all = || (0, known.remote.layout.geometry.num_tensors());
        let used_up = self.used_up(known, conversion.read_tensors.unwrap_or_else(all));
        let complete = conversion.whole_source || conversion.read_tensors.is_some();
        Ok((Moved::Bytes(bytes), PullEnd { pulled: used_up.filter(|_| complete), copied: None }))
    }

    /// Returns the key that a pull of `count` tensors releases, if it releases one.
    fn used_up(&self, known: &KnownCache, (first, count): (u32, u32)) -> Option<WirePulled> {
        let pulled = WirePulled { name: self.name.into(), cache: known.cache.0, first, count };
        (!self.resources.config.remote_accessible && known.consumable).then_some(pulled)
    }

    /// Adds the rows that have arrived to the error of a pull.
    fn with_arrived(&self, error: Error, plan: &CopyPlan, progress: &Progress) -> Error {
        let sizes = self.local.sizes_of(plan.tensors_at(Side::Destination).first);
        with_arrived_rows(error, progress, plan, sizes.row_sizes())
    }

    /// Moves the bytes of a pull by the available path. `progress` ends empty if it is unknown whether the
    /// bytes that were read belonged to the cache.
    fn pull_bytes(
        &self,
        known: &Arc<KnownCache>,
        plan: &Arc<CopyPlan>,
        progress: &mut Arc<Progress>,
        pinned: &KeptAlive,
    ) -> Result<Moved> {
        let mut snapshot = match PeerSnapshot::begin(&self.link, known) {
            Ok(snapshot) => snapshot,
            Err(reason) => {
                self.owner_sends(reason);
                return self.receive(None, known, plan, progress);
            }
        };
        if let Some(rings) = self.rings_instead_of(snapshot.kind(), plan.bytes()) {
            return self.receive(Some(rings), known, plan, progress);
        }
        if let Some(moved) = self.read_in_place(known, plan, &mut snapshot, progress, pinned)? {
            return Ok(moved);
        }
        *progress = self.attempt(plan.bytes());
        self.receive(None, known, plan, progress)
    }

    /// Reads the bytes of a pull in the memory of the owner. Returns `None` if the owner has to send them.
    fn read_in_place(
        &self,
        known: &KnownCache,
        plan: &Arc<CopyPlan>,
        snapshot: &mut PeerSnapshot<'_>,
        progress: &mut Arc<Progress>,
        pinned: &KeptAlive,
    ) -> Result<Option<Moved>> {
        let to = (self.local.tensors(), self.local.placement());
        let read = snapshot.path().read(self.job(plan), to, progress, pinned.clone());
        let failed = |error: &Error| error.kind() != ErrorKind::NotEnabled;
        if !snapshot.kind().sees_generations() && read.as_ref().is_err_and(failed) {
            // Whose bytes have arrived is unknown, and the owner is not asked about a read that has failed.
            *progress = self.attempt(plan.bytes());
            return read.map(|_| None);
        }
        let validity = snapshot.validate();
        let read = match read {
            // The kernel may still write to the rows, so no other bytes may be written there.
            Err(error) if error.fact(STILL_READING).is_some() => {
                if validity != Validity::Valid {
                    *progress = self.attempt(plan.bytes());
                }
                return Err(error);
            }
            // The kernel allowed the read when the link was made, but does not now, or UCX has failed. The owner can
            // always send.
            Err(error) if error.kind() == ErrorKind::NotEnabled && !self.only_fabric() => {
                self.owner_sends(&error.to_string());
                return Ok(None);
            }
            Err(error) if error.kind() == ErrorKind::NotEnabled => return Err(error),
            read => read,
        };
        match validity {
            Validity::Valid => self.link.check()?,
            Validity::Changed if self.confirm(known, progress)? => {}
            Validity::Changed => return Ok(Some(Moved::Stale)),
            Validity::Pushed => {
                self.owner_sends(BEING_PUSHED);
                return Ok(None);
            }
        }
        let outcome = read?;
        self.count(snapshot.kind(), outcome.bytes, outcome.hops == Hops::Two);
        Ok(Some(Moved::Bytes(outcome.bytes)))
    }

    /// Receives the bytes through streams, of which `first` may be the first one. On this path the owner reads, under its own
    /// pins. `progress` ends empty if a grant may have ended before some of the bytes were read.
    fn receive(
        &self,
        first: Option<StreamLease>,
        known: &Arc<KnownCache>,
        plan: &Arc<CopyPlan>,
        progress: &mut Arc<Progress>,
    ) -> Result<Moved> {
        let streams = Streams { call: self.clone(), known: known.clone(), plan: plan.clone() };
        let received = streams.receive(first, progress.clone());
        // A stream with rings may go on for a moment after its link has ended.
        let received = received.and_then(|received| self.link.check().map(|()| received));
        if let Ok((Moved::Bytes(bytes) | Moved::Equal(bytes), path)) = received {
            self.count_sent(path, bytes);
        }
        let received = received.map(|(moved, _)| moved);
        if received.is_err() && self.grant.is_some() {
            *progress = self.attempt(plan.bytes());
        }
        received
    }

    /// Asks the owner, after a read with an outdated description, whether the memory belonged to the cache
    /// during the whole read, and was granted if there is a grant. `progress` ends empty otherwise.
    fn confirm(&self, known: &KnownCache, progress: &mut Arc<Progress>) -> Result<bool> {
        let unconfirmed = std::mem::replace(progress, self.attempt(0));
        let unchanged = self.same_cache(known)?;
        if unchanged {
            *progress = unconfirmed;
        }
        Ok(unchanged)
    }
}
