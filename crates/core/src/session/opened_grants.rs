//! What grants of a peer lend, as their owner describes it, and the limit on how many a link keeps.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::budget::BudgetShare;
use crate::error::Result;
use crate::grants::{RowRanges, covers};
use crate::model::{CacheId, GrantId};

/// Maximum number of grants that a link keeps, and of ranges of rows of one of them: 16 MiB. Others are asked for anew.
const MOST_KEPT: usize = 256;
const MOST_KEPT_RANGES: usize = 1 << 12;
/// Bytes that a grant takes beside its rows.
const GRANT_BYTES: u64 = (size_of::<OpenedGrant>()
    + size_of::<BudgetShare>()
    + 2 * size_of::<(GrantId, Arc<OpenedGrant>)>()) as u64;

/// What a grant of a peer lends.
#[derive(Debug)]
pub(crate) struct OpenedGrant {
    id: GrantId,
    cache: CacheId,
    rows: RowRanges,
    /// The memory that it takes.
    share: Arc<BudgetShare>,
}

/// The grants of the peer of one link.
#[derive(Debug, Default)]
pub(super) struct OpenedGrants(HashMap<GrantId, Arc<OpenedGrant>>);

impl OpenedGrants {
    pub(super) fn get(&self, id: &GrantId) -> Option<Arc<OpenedGrant>> {
        self.0.get(id).cloned()
    }

    /// Keeps a grant, unless it has too many rows or the budget of the peer has no memory for it. `lasts` says whether another one, as far as is known, has not ended.
    pub(super) fn keep(&mut self, grant: &Arc<OpenedGrant>, lasts: impl Fn(&OpenedGrant) -> bool) {
        if grant.rows.ranges().len() > MOST_KEPT_RANGES || grant.share.keep(GRANT_BYTES).is_err() {
            return;
        }
        if self.0.len() >= MOST_KEPT {
            self.0.retain(|_, grant| lasts(grant));
        }
        if self.0.len() >= MOST_KEPT {
            self.0.clear();
        }
        if self.0.try_reserve(1).is_ok() {
            self.0.insert(grant.id, grant.clone());
        }
    }

    pub(super) fn forget(&mut self, id: &GrantId) {
        self.0.remove(id);
    }
}

impl OpenedGrant {
    pub(super) fn new(
        id: GrantId,
        cache: CacheId,
        rows: RowRanges,
        share: Arc<BudgetShare>,
    ) -> Arc<OpenedGrant> {
        share.shrink_to(size_of_val(rows.ranges()) as u64);
        Arc::new(OpenedGrant { id, cache, rows, share })
    }

    pub(crate) fn id(&self) -> GrantId {
        self.id
    }

    /// Checks that `rows` of `cache` are lent by this grant.
    pub(crate) fn covers(&self, cache: CacheId, rows: &[u64]) -> Result<()> {
        covers((self.cache, &self.rows), cache, rows)
    }
}
