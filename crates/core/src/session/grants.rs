//! Grants of peers, as their reader: which link a token belongs to, and whether a grant has ended as far as this process sees.
//!
//! A grant is a name, so its description is kept with those of other names. It has the rows that the grant lends.

use std::sync::Arc;

use super::known_cache::KnownCache;
use super::link::Link;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::grants::RowRanges;
use crate::model::{Deadline, GrantToken, Name};
use crate::protocol::WirePulled;

impl Link {
    /// Checks that this peer gave the grant of a token. Returns `Err(InvalidArgument)` if another cluster gave it, and
    /// `Err(GrantEnded)` if the peer was restarted since.
    pub(crate) fn check_token(&self, token: &GrantToken) -> Result<()> {
        if token.cluster != self.peer.cluster {
            let text =
                format!("the grant is from cluster {}, and the key names another cluster", token.cluster);
            return Err(self.named(Error::new(ErrorKind::InvalidArgument, text)));
        }
        if token.incarnation != self.peer.instance {
            let text = "the owner of the grant was restarted, which ended all its grants";
            return Err(self.named(Error::new(ErrorKind::GrantEnded, text)));
        }
        Ok(())
    }

    /// Tells the owner of a grant that this side is done with it.
    pub(crate) fn release_grant(self: &Arc<Self>, token: &GrantToken, deadline: Deadline) -> Result<()> {
        self.check_token(token)?;
        // Whether or not it succeeds, this side probably does not pull under the grant any more.
        self.forget(&Name::Grant(token.grant));
        self.finish(Some(WirePulled::of_grant(token.grant)), deadline)
    }

    /// Checks that the grant under which a cache was described has not ended, as far as this process sees.
    pub(crate) fn check_grant(&self, known: &KnownCache) -> Result<()> {
        let Some((grant, _)) = known.granted.as_ref().filter(|_| !self.grant_lasts(known)) else {
            return Ok(());
        };
        self.forget(&Name::Grant(*grant));
        Err(self.named(Error::new(ErrorKind::GrantEnded, "the grant has ended")))
    }

    /// Whether the grant under which a cache was described lasts, as far as this process sees. Without a view of the owner's
    /// generations, the owner checks.
    pub(super) fn grant_lasts(&self, known: &KnownCache) -> bool {
        let generations = self.peer_memory().and_then(|memory| memory.generations());
        let (Some((grant, _)), Some(of_peer)) = (&known.granted, generations) else { return true };
        of_peer.grant_still(grant.slot, grant.generation)
    }
}

/// Returns the rows that a grant lends, as its owner described them.
pub(super) fn granted_rows(ranges: &[(u64, u64)]) -> Result<RowRanges> {
    let ranges = fallible::collect(RowRanges::LIST, ranges.iter().map(|&(first, end)| first..end))?;
    let text = "the peer sent the rows of a grant in a form that this version does not know";
    RowRanges::from_ranges(ranges).ok_or_else(|| Error::new(ErrorKind::System, text))
}
