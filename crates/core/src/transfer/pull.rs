//! Pulls: this process reads the peer's memory, or asks the owner to send the bytes through streams. `copy::route` has the rules.

use std::sync::Arc;

use super::SHORT_CALL;
use super::call::{Call, Moved, TransferEnd};
use super::stream::Streams;
use crate::cache::{CallRows, Pin, RowUse};
use crate::copy::{DataPath, HeldPins, Hops, PathKind, Progress, STILL_READING};
use crate::error::{Error, ErrorKind, Result};
use crate::model::RowList;
use crate::plan::{CopyPlan, Side};
use crate::protocol::{NamedCache, WireUsedKey};
use crate::session::{BEING_PUSHED, KnownCache, PeerSnapshot, StreamLease, Validity};
use crate::validate::{CheckedTransfer, OwnerShare, PlannedTransfer};

/// Maximum number of rows of a short pull, so that planning costs little if the pull then turns out to be long.
const SHORT_ROWS: usize = 4;

impl Call {
    /// Pulls rows of the remote cache into the local one. Returns the number of bytes and what is left to do now.
    pub(super) fn pull_checked(
        &self,
        checked: &CheckedTransfer,
        share: &OwnerShare,
    ) -> Result<(u64, TransferEnd)> {
        let mut end = TransferEnd::default();
        let pulled = self.attempts(|known| {
            let planned = checked.plan(&known.remote, share)?;
            let (moved, left) = self.pull_planned(known, &planned, checked.rows().local_rows()?)?;
            end = left;
            Ok(moved)
        });
        if pulled.as_ref().is_err_and(|error| error.kind() == ErrorKind::GrantEnded)
            && let Some(grant) = self.grant_name()
        {
            self.link.view.forget(&grant);
        }
        let bytes = pulled?;
        if let Some(grant) = self.grant.filter(|grant| grant.done) {
            end.used_key = Some(WireUsedKey::of_grant(grant.token.grant));
        }
        Ok((bytes, end))
    }

    /// Pulls a few bytes on the calling thread if that needs no answer of the peer and no other call: the stored description of the
    /// remote cache is current, its memory is mapped, and the local rows are free. Returns `None` otherwise. The rows may have been
    /// written then, as by every pull that has begun.
    pub(super) fn pull_now(&self, checked: &CheckedTransfer) -> Option<(u64, Option<Pin>)> {
        if checked.rows().num_blocks() > SHORT_ROWS {
            return None;
        }
        let known = self.link.known_now(&self.name)?;
        self.check_local().and_then(|()| self.check_remote(&known)).ok()?;
        let PlannedTransfer { plans, read_tensors, .. } =
            checked.plan(&known.remote, &OwnerShare::default()).ok()?;
        let [plan] = &plans[..] else { return None };
        let snapshot = PeerSnapshot::begin(&self.link.view, &known).ok()?;
        let to = (self.local.tensors(), self.local.placement());
        let at_once = snapshot.kind() == PathKind::Mapped && to.0.host_addressable();
        let releases_key = read_tensors.is_some_and(|tensors| self.used_key(&known, tensors).is_some());
        if !at_once || releases_key || plan.is_empty() || plan.bytes() > SHORT_CALL {
            return None;
        }
        let writes = RowUse { writes: checked.rows().local_rows().ok()?, ..RowUse::default() };
        let pin = Arc::new(CallRows::of(self.local.clone(), writes).pin_now()?);
        snapshot.memory().read(self.job(plan), to, &Arc::default(), pin.clone()).ok()?;
        if snapshot.validate() != Validity::Valid || self.link.check().is_err() {
            return None;
        }
        self.count_read(snapshot.kind(), plan.bytes(), false);
        Some((plan.bytes(), Arc::into_inner(pin)))
    }

    /// Pulls the bytes of `planned` into `local_rows`: reads memory of the peer that this process can access, otherwise asks for
    /// streams. Also returns what is left to do.
    fn pull_planned(
        &self,
        known: &Arc<KnownCache>,
        planned: &PlannedTransfer,
        local_rows: RowList,
    ) -> Result<(Moved, TransferEnd)> {
        let PlannedTransfer { plans, read_tensors, tokens } = planned;
        debug_assert!(plans.len() == 1 || tokens.is_some(), "rows are listed for one plan");
        plans.iter().try_for_each(|plan| known.check_granted(plan))?;
        if plans.iter().all(CopyPlan::is_empty) {
            return Ok((Moved::Bytes(0), TransferEnd::default()));
        }
        let pinned = self.pin(RowUse { writes: local_rows, ..RowUse::default() })?;
        self.resources.still_registered(&self.local)?;
        let total = plans.iter().map(CopyPlan::bytes).sum();
        let mut progress = self.new_progress(total);
        // Tokens are parts of rows.
        let listed = tokens.is_none();
        let mut bytes = 0;
        for plan in plans {
            let moved = self
                .pull_bytes(known, plan, total, &mut progress, &pinned)
                .map_err(|error| if listed { self.with_arrived(error, plan, &progress) } else { error })
                .map_err(|error| error.with_replaced("of_bytes", total))?;
            match self.verified(moved, known, plan, Side::Destination)? {
                Moved::Bytes(moved) | Moved::Equal(moved) => bytes += moved,
                Moved::Stale => return Ok((Moved::Stale, TransferEnd::default())),
            }
        }
        let used_key = read_tensors.and_then(|tensors| self.used_key(known, tensors));
        let copied = used_key.filter(|_| listed).map(|_| (plans[0].clone(), progress));
        Ok((Moved::Bytes(bytes), TransferEnd { used_key, copied, slot: None }))
    }

    /// Returns the key that a pull of `count` tensors releases, if it releases one.
    fn used_key(&self, known: &KnownCache, (first, count): (u32, u32)) -> Option<WireUsedKey> {
        let cache = NamedCache { name: self.name_of(known), id: known.cache };
        let used_key = WireUsedKey { cache, first, count };
        (!self.resources.config.remote_accessible && known.consumable).then_some(used_key)
    }

    /// Moves the bytes of one plan of a pull of `total` bytes by the available path. `progress` ends empty if it is unknown whether
    /// the bytes that were read belonged to the cache.
    fn pull_bytes(
        &self,
        known: &Arc<KnownCache>,
        plan: &CopyPlan,
        total: u64,
        progress: &mut Arc<Progress>,
        pinned: &HeldPins,
    ) -> Result<Moved> {
        let snapshot = match PeerSnapshot::begin(&self.link.view, known) {
            Ok(snapshot) => snapshot,
            Err(reason) => {
                self.owner_sends(reason);
                return self.receive(None, known, plan, progress);
            }
        };
        if let Some(rings) = self.rings_instead_of(snapshot.kind(), total) {
            match self.receive(Some(rings), known, plan, progress) {
                // Rings cannot carry this: for example, other rows of the owner's cache have no pages. Nothing has moved, and
                // without an idle stream with rings the read in place would have been the first attempt.
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
                received => return received,
            }
        }
        if let Some(moved) = self.read_in_place(known, plan, &snapshot, progress, pinned)? {
            return Ok(moved);
        }
        *progress = self.new_progress(plan.bytes());
        self.receive(None, known, plan, progress)
    }

    /// Reads the bytes of a pull in the memory of the owner. Returns `None` if the owner has to send them.
    fn read_in_place(
        &self,
        known: &KnownCache,
        plan: &CopyPlan,
        snapshot: &PeerSnapshot<'_>,
        progress: &mut Arc<Progress>,
        pinned: &HeldPins,
    ) -> Result<Option<Moved>> {
        let to = (self.local.tensors(), self.local.placement());
        let read = snapshot.memory().read(self.job(plan), to, progress, pinned.clone());
        let failed = |error: &Error| error.kind() != ErrorKind::NotEnabled;
        if !snapshot.kind().sees_generations() && read.as_ref().is_err_and(failed) {
            // Whose bytes have arrived is unknown, and the owner is not asked about a read that has failed.
            *progress = self.new_progress(plan.bytes());
            return read.map(|_| None);
        }
        let validity = snapshot.validate();
        let read = match read {
            // The kernel may still write to the rows, so no other bytes may be written there.
            Err(error) if error.fact(STILL_READING).is_some() => {
                if validity != Validity::Valid {
                    *progress = self.new_progress(plan.bytes());
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
        self.count_read(snapshot.kind(), plan.bytes(), read? == Hops::Two);
        Ok(Some(Moved::Bytes(plan.bytes())))
    }

    /// Receives the bytes through streams, of which `first` may be the first one. On this path the owner reads, under its own
    /// pins. `progress` ends empty if a grant may have ended before some of the bytes were read.
    fn receive(
        &self,
        first: Option<StreamLease>,
        known: &Arc<KnownCache>,
        plan: &CopyPlan,
        progress: &mut Arc<Progress>,
    ) -> Result<Moved> {
        let streams = Streams { call: self.clone(), known: known.clone(), plan: plan.clone() };
        let short = first.is_some();
        let received = streams.receive(first, progress.clone());
        // A stream with rings may go on for a moment after its link has ended.
        let received = received.and_then(|received| self.link.check().map(|()| received));
        if let Ok((Moved::Bytes(bytes) | Moved::Equal(bytes), path)) = received {
            self.count_sent(path, short, bytes);
        }
        let received = received.map(|(moved, _)| moved);
        if received.is_err() && self.grant.is_some() {
            *progress = self.new_progress(plan.bytes());
        }
        received
    }

    /// Asks the owner, after a read with an outdated description, whether the memory belonged to the cache
    /// during the whole read, and was granted if there is a grant. `progress` ends empty otherwise.
    fn confirm(&self, known: &KnownCache, progress: &mut Arc<Progress>) -> Result<bool> {
        let unconfirmed = std::mem::replace(progress, self.new_progress(0));
        let unchanged = self.same_cache(known)?;
        if unchanged {
            *progress = unconfirmed;
        }
        Ok(unchanged)
    }
}
