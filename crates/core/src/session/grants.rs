//! Grants of peers, as their reader.
//!
//! The owner describes a grant once. The answer is kept with the link while the grant lasts, as far as this process
//! can see, so that several pulls under one grant ask once.

use std::sync::Arc;

use super::client::limit_ms;
use super::link::Link;
use super::opened_grants::OpenedGrant;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::grants::RowRanges;
use crate::model::{CacheId, ClusterId, Deadline, GrantId, GrantToken};
use crate::protocol::{Reply, Request};

impl Link {
    /// Returns what the grant of a token lends; asks the owner unless it is known. Returns `Err(GrantEnded)` if the grant
    /// has ended, and `Err(InvalidArgument)` if another cluster gave it.
    pub(crate) fn open_grant(
        self: &Arc<Self>,
        token: &GrantToken,
        deadline: Deadline,
    ) -> Result<Arc<OpenedGrant>> {
        let id = self.grant_of(token)?;
        let known = self.grants.lock().get(&id);
        if let Some(known) = known {
            return self.check_grant(&known).map(|()| known);
        }
        self.ask_for_grant(id, deadline)
    }

    /// Asks the owner what a grant lends, whatever is known of it here. Returns `Err(GrantEnded)` if it has ended.
    fn ask_for_grant(self: &Arc<Self>, id: GrantId, deadline: Deadline) -> Result<Arc<OpenedGrant>> {
        let request = Request::OpenGrant { grant: id, limit_ms: limit_ms(deadline) };
        let (reply, share) = self.ask_for(&request, deadline)?;
        let Reply::Granted { cache, rows } = reply else { return Err(self.unexpected(&reply)) };
        let ranges = rows.into_iter().map(|(first, end)| first..end);
        let ranges = share.charged(|| fallible::collect(RowRanges::LIST, ranges));
        let ranges = ranges.map_err(|error| self.named(error))?;
        let Some(rows) = RowRanges::from_ranges(ranges) else {
            let text = "the peer sent the rows of a grant in a form that this version does not know";
            return Err(self.named(Error::new(ErrorKind::System, text)));
        };
        let grant = OpenedGrant::new(id, CacheId(cache), rows, share);
        self.grants.lock().keep(&grant, |other| self.grant_still(other));
        Ok(grant)
    }

    /// Asks the owner whether a grant has ended. Returns `Err(GrantEnded)` if so.
    pub(crate) fn ask_about_grant(self: &Arc<Self>, token: &GrantToken, deadline: Deadline) -> Result<()> {
        let id = self.grant_of(token)?;
        // Another call may know an older answer, so only a new one counts.
        self.ask_for_grant(id, deadline).inspect_err(|_| self.forget_grant(&id)).map(drop)
    }

    /// Returns the id of the grant of a token, which this peer must have given.
    pub(crate) fn grant_of(&self, token: &GrantToken) -> Result<GrantId> {
        if token.cluster != self.peer.cluster {
            let text =
                format!("the grant is from cluster {}, and the key names another cluster", token.cluster);
            return Err(self.named(Error::new(ErrorKind::InvalidArgument, text)));
        }
        if token.incarnation != self.peer.instance {
            let text = "the owner of the grant was restarted, which ended all its grants";
            return Err(self.named(Error::new(ErrorKind::GrantEnded, text)));
        }
        Ok(token.grant)
    }

    /// Checks, after a read in place, that the grant had not ended. Without a view of the owner's generations, the owner
    /// checks.
    pub(crate) fn check_grant(&self, grant: &OpenedGrant) -> Result<()> {
        if self.grant_still(grant) {
            return Ok(());
        }
        self.forget_grant(&grant.id());
        Err(self.named(Error::new(ErrorKind::GrantEnded, "the grant has ended")))
    }

    fn grant_still(&self, grant: &OpenedGrant) -> bool {
        let generations = self.peer_memory().and_then(|memory| memory.generations());
        generations.is_none_or(|of_peer| of_peer.grant_still(grant.id().slot, grant.id().generation))
    }

    /// Forgets a grant that has ended, or that this side has reported.
    pub(crate) fn forget_grant(&self, id: &GrantId) {
        self.grants.lock().forget(id);
    }

    /// Returns what identifies the peer as the reader of a grant.
    pub(super) fn reader(&self) -> (ClusterId, u64) {
        (self.peer.cluster, self.peer.instance)
    }
}
