//! Pulls under a grant: ask the owner what the grant lends, check that the plan reads nothing else, read, check that the
//! grant has not ended, and report after the last pull.
//!
//! After a read in place, this side compares the grant's generation. Bytes from a stream come with the owner's own check.

use std::sync::Arc;

use super::call::Call;
use crate::copy::PathKind;
use crate::error::{Error, ErrorKind, Result};
use crate::model::GrantId;
use crate::plan::{CopyPlan, Side};
use crate::session::{KnownCache, OpenedGrant};

impl Call {
    /// Finds out what the grant lends, and checks that it has not ended. Called once, before the first attempt.
    pub(super) fn open_grant(&self) -> Result<()> {
        let Some(grant) = &self.grant else { return Ok(()) };
        let opened = self.link.open_grant(&grant.given.token, self.deadline)?;
        // Cannot fail: a call opens its grant once, before the first attempt.
        let _ = grant.opened.set(opened);
        Ok(())
    }

    /// Checks that the plan reads only what the grant lends.
    pub(super) fn check_covered(&self, known: &KnownCache, plan: &CopyPlan) -> Result<()> {
        let Some(opened) = self.opened_grant() else { return Ok(()) };
        let sizes = known.remote.common_sizes(plan.tensors_at(Side::Source))?;
        opened.covers(known.cache, &plan.touched_rows(Side::Source, sizes.row_sizes())?)
    }

    /// Checks that the grant has not ended, as far as this side sees.
    pub(super) fn still_granted(&self) -> Result<()> {
        self.opened_grant().map_or(Ok(()), |opened| self.link.check_grant(opened))
    }

    /// Checks that the grant has not ended, after a read in place. Asks its owner if this side does not see
    /// generations on the path.
    pub(super) fn granted_until_now(&self, path: PathKind) -> Result<()> {
        match &self.grant {
            Some(grant) if !path.sees_generations() => {
                self.link.ask_about_grant(&grant.given.token, self.deadline)
            }
            _ => self.still_granted(),
        }
    }

    /// Returns the id of the grant, for a request to the owner.
    pub(super) fn grant_id(&self) -> Option<GrantId> {
        self.opened_grant().map(|opened| opened.id())
    }

    /// Returns the id of the grant if this call must report that it is done with it.
    pub(super) fn grant_to_report(&self) -> Option<GrantId> {
        self.grant_id().filter(|_| self.grant.as_ref().is_some_and(|grant| grant.given.done))
    }

    /// Forgets the grant if the owner reports that it has ended, or once it was reported.
    pub(super) fn note_grant(&self, failed: Option<&Error>) {
        let ended = match failed {
            None => self.grant_to_report(),
            Some(error) => self.grant_id().filter(|_| error.kind() == ErrorKind::GrantEnded),
        };
        if let Some(id) = ended {
            self.link.forget_grant(&id);
        }
    }

    /// Returns the error of a pull: the end of the grant if the cache was released, which ends its grants.
    pub(super) fn end_of_grant_or(&self, error: Error) -> Error {
        self.note_grant(Some(&error));
        let (Some(grant), ErrorKind::CacheNotFound) = (&self.grant, error.kind()) else { return error };
        // If the owner sends the bytes, this side does not see the end.
        self.grant_id().iter().for_each(|id| self.link.forget_grant(id));
        match self.link.open_grant(&grant.given.token, self.deadline) {
            Err(ended) if ended.kind() == ErrorKind::GrantEnded => self.named(ended),
            _ => error,
        }
    }

    fn opened_grant(&self) -> Option<&Arc<OpenedGrant>> {
        self.grant.as_ref()?.opened.get()
    }
}
