//! Grants: lending blocks of a cache to readers for a limited time.

use std::sync::Arc;
use std::time::Duration;

use super::copies::room_for_lists;
use super::{DataDist, End};
use crate::cache::CallRows;
use crate::error::{Error, Result, ensure};
use crate::events::Transfer;
use crate::grants::{Grant, RowRanges};
use crate::model::{GrantEnd, GrantToken};
use crate::protocol::MAX_RANGES;
use crate::transfer::{Execution, JobClass};
use crate::validate;

impl DataDist {
    /// Lends blocks of a blocks cache for `ttl`, or until `readers` readers have reported that they are done. A grant
    /// neither locks the blocks nor gives access to them: it makes pulls that name it fail once it has ended.
    ///
    /// Returns `Err(InvalidArgument)` for arguments out of range, and `Err(Busy)` if too many grants have not ended.
    pub fn grant(&self, cache: &End, blocks: &[i64], ttl: Duration, readers: usize) -> Result<Arc<Grant>> {
        room_for_lists(blocks.len())?;
        let cache = self.own_cache(cache)?;
        let rows = RowRanges::of(validate::grant(cache.layout(), blocks, ttl, readers)?)?;
        let (ranges, allowed) = (rows.ranges().len(), format!("at most {MAX_RANGES}"));
        ensure(ranges <= MAX_RANGES, || Error::argument("the number of runs of blocks", ranges, allowed))?;
        let grants = &self.resources.grants;
        let grant = grants.lend(cache.id(), rows, ttl, readers)?;
        let watched = self.grant_clock.watch();
        // The cache may have been released since it was found, and its grants ended.
        let watched = watched.and_then(|()| self.resources.table.find(cache.id()).map(drop));
        if let Err(error) = watched {
            grants.withdraw(&grant);
            return Err(error);
        }
        Ok(grant)
    }

    /// Returns the token by which readers name a grant of this engine.
    pub fn grant_token(&self, grant: &Grant) -> GrantToken {
        let (cluster, incarnation) = (self.resources.config.cluster, self.links.incarnation());
        GrantToken { cluster, incarnation, grant: grant.id() }
    }

    /// Returns the grant of this engine that a token names. Returns `Err(GrantEnded)` if it has ended.
    pub fn find_grant(&self, token: &GrantToken) -> Result<Arc<Grant>> {
        let own = (self.resources.config.cluster, self.links.incarnation());
        ensure((token.cluster, token.incarnation) == own, || {
            Error::invalid("token is not that of a grant of this engine").of_argument("token")
        })?;
        self.resources.grants.find(&token.grant)
    }

    /// Extends a grant: from now on it lasts for `ttl`, unless it lasts longer already. Returns `Err(GrantEnded)` if it has ended.
    pub fn renew(&self, grant: &Arc<Grant>, ttl: Duration) -> Result<()> {
        validate::grant_ttl(ttl)?;
        // The alarm of the clock is not later than it must be: a grant is only extended.
        self.resources.grants.renew(grant, ttl)
    }

    /// Ends a grant at once. No read is accepted from now on, whether it has begun or not. A grant that has ended before is not an
    /// error. The transfer ends once no read under the grant is served, and fails with `Timeout` after `limit`, by default
    /// `sync_kv_timeout`. If none is served now, it has ended, and there is no event.
    ///
    /// Returns `Err(Busy)` as [`Operation::start`](super::Operation::start) does. The grant has ended after every error, too: giving
    /// memory back must not depend on room for one more transfer.
    pub fn start_revoke(&self, grant: &Arc<Grant>, limit: Option<Duration>) -> Result<Arc<Transfer>> {
        let (grants, revoked) = (self.resources.grants.clone(), grant.clone());
        grants.end(grant, GrantEnd::Revoked);
        if !grant.is_read() {
            return Ok(Transfer::succeeded());
        }
        let work = move |_: &Arc<Execution>, deadline| grants.wait_for_reads(&revoked, deadline).map(|()| 0);
        let class = JobClass::Waits((grant.id().slot % 16) as u8);
        self.start_work(None, class, limit, (CallRows::none(), Box::new(work)))
    }
}
