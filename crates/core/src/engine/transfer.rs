//! Pull and push.
//!
//! Both resolve their two ends, validate, plan, and let the receiving side read: from memory of the other
//! side that it can access, otherwise through a socket. `transfer` has the steps of one attempt.

use std::sync::Arc;

use super::{DataDist, End};
use crate::cache::Cache;
use crate::config::Mode;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Name};
use crate::plan::{CacheCount, CopyPlan};
use crate::session;
use crate::stats::Op;
use crate::transfer::{Call, Moved};
use crate::validate::{CheckedPull, CheckedPush, Layers, PullRows, PushRows, RemoteCache};

/// Name of a peer's cache or slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteName {
    /// The cluster that owns it.
    pub cluster: ClusterId,
    /// Its name at the owner.
    pub name: Name,
}

impl DataDist {
    /// Pulls rows of a peer's cache into a cache of this engine (contract §7.12, §7.13). An error lists the
    /// rows that arrived.
    pub fn pull(&self, from: RemoteName, to: &End, rows: &PullRows, layers: Layers) -> Result<()> {
        self.resources.stats.timed(Op::Pull, || {
            let deadline = self.deadline();
            self.other(from.cluster)?;
            let local = self.source(to)?;
            super::room_for_lists(rows.num_blocks())?;
            let checked = CheckedPull::new(local.layout(), rows, layers)?;
            let link = self.links.find_other(from.cluster, deadline)?;
            let call = Call { resources: self.resources.clone(), link, name: from.name, local, deadline };
            let attempt = |known: &_| call.pull(known, &mut checked.moves(known.remote)?);
            let bytes = call.counted(|| call.rounds(attempt))?;
            self.resources.count_bytes(Op::Pull, bytes);
            Ok(())
        })
    }

    /// Pushes rows of a cache of this engine into a peer's cache (contract §7.14, §7.15). The bytes are in
    /// place there when this returns. All layers are one submission under one deadline. An error reports how
    /// far the push got.
    pub fn push(&self, from: &End, to: RemoteName, rows: &PushRows, layers: Layers) -> Result<()> {
        self.resources.stats.timed(Op::Push, || {
            let deadline = self.deadline();
            self.other(to.cluster)?;
            let local = self.source(from)?;
            super::room_for_lists(rows.num_blocks())?;
            let checked = CheckedPush::new(local.layout(), rows, layers)?;
            let link = self.links.find_other(to.cluster, deadline)?;
            let (name, row) = to.name.without_slot();
            let call = Call { resources: self.resources.clone(), link, name, local, deadline };
            let bytes = call.counted(|| {
                call.rounds(|known| {
                    let remote = RemoteCache { row: row.unwrap_or(known.remote.row), ..known.remote };
                    // `call.name` does not include the slot.
                    let mut moves = checked.moves(remote).map_err(|error| error.with("name", to.name))?;
                    let local_rows = std::mem::take(&mut moves.src_rows);
                    let plan = Arc::new(CopyPlan::moves(&mut moves, CacheCount::Two)?);
                    let outcome = call.push(known, &plan, local_rows)?;
                    if let (PushRows::Slot { local: row }, Moved::Bytes(1..), true) =
                        (rows, &outcome, moves.all_tensors)
                    {
                        // A push releases the key of its slot, as a pull does (the original's
                        // `deprecated.md`; contract §17, further rulings).
                        self.resources.table.release_row(call.local.id(), *row);
                    }
                    Ok(outcome)
                })
            })?;
            self.resources.count_bytes(Op::Push, bytes);
            Ok(())
        })
    }

    /// Checks that `cluster` is not this engine. Without the cache manager another engine may have the same
    /// id; then the link identifies it.
    pub(super) fn other(&self, cluster: ClusterId) -> Result<()> {
        if self.resources.config.cluster == cluster && self.resources.config.mode == Mode::CacheManager {
            return Err(session::own(cluster));
        }
        Ok(())
    }

    /// Returns a cache of this engine that may take part in a transfer. Returns `Err(CacheNotFound)` for a
    /// handle, because its cache was never registered.
    pub(super) fn source(&self, end: &End) -> Result<Arc<Cache>> {
        match end {
            End::Managed(id) => self.resources.table.find(*id),
            End::Loose(_) => {
                let text = "a cache that was never registered cannot take part in a transfer";
                Err(Error::new(ErrorKind::CacheNotFound, text))
            }
        }
    }
}
