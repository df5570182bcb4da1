//! Pull and push.
//!
//! Both resolve their two ends, validate, plan, and let the receiving side read: from memory of the other
//! side that it can access, otherwise through a socket. What this side knows of a remote cache may be out of
//! date. Then its owner or its generation number shows it, and the call starts over within its deadline.

use std::sync::Arc;

use super::{DataDist, End};
use crate::cache::Cache;
use crate::config::Mode;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Name};
use crate::plan::{CopyPlan, Ends};
use crate::session;
use crate::stats::Op;
use crate::transfer::{Call, Moved};
use crate::validate::{self, Layers, PullRows, PushRows, RemoteCache};

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
        self.cluster.stats.timed(Op::Pull, || {
            let deadline = self.deadline();
            let local = self.local(from.cluster, to)?;
            super::room_for_lists(pulled_blocks(rows))?;
            validate::pull_local(local.layout(), rows, layers)?;
            let link = self.links.find_other(from.cluster, deadline)?;
            let call = Call { cluster: self.cluster.clone(), link, name: from.name, local, deadline };
            let bytes = call.counted(|| {
                call.rounds(|known| {
                    let mut moves = validate::pull(call.local.layout(), known.remote, rows, layers)?;
                    call.pull(known, &mut moves)
                })
            })?;
            self.cluster.moved(Op::Pull, bytes);
            Ok(())
        })
    }

    /// Pushes rows of a cache of this engine into a peer's cache (contract §7.14, §7.15). The bytes are in
    /// place there when this returns. All layers are one submission under one deadline. An error reports how
    /// far the push got.
    pub fn push(&self, from: &End, to: RemoteName, rows: &PushRows, layers: Layers) -> Result<()> {
        self.cluster.stats.timed(Op::Push, || {
            let deadline = self.deadline();
            let local = self.local(to.cluster, from)?;
            super::room_for_lists(pushed_blocks(rows))?;
            validate::push_local(local.layout(), rows, layers)?;
            let link = self.links.find_other(to.cluster, deadline)?;
            let (name, row) = to.name.without_slot();
            let call = Call { cluster: self.cluster.clone(), link, name, local, deadline };
            let bytes = call.counted(|| {
                call.rounds(|known| {
                    let remote = RemoteCache { row: row.unwrap_or(known.remote.row), ..known.remote };
                    // `call.name` is without the slot.
                    let mut moves = validate::push(call.local.layout(), remote, rows, layers)
                        .map_err(|error| error.with("name", to.name))?;
                    let local_rows = std::mem::take(&mut moves.src_rows);
                    let plan = Arc::new(CopyPlan::moves(&mut moves, Ends::TwoCaches)?);
                    let outcome = call.push(known, &plan, local_rows)?;
                    if let (PushRows::Slot { local: row }, Moved::Bytes(1..), true) =
                        (rows, &outcome, moves.all_tensors)
                    {
                        // A push releases the key of its slot, as a pull does (the original's
                        // `deprecated.md`; contract §17, further rulings).
                        self.cluster.table.release_row(call.local.id(), *row);
                    }
                    Ok(outcome)
                })
            })?;
            self.cluster.moved(Op::Push, bytes);
            Ok(())
        })
    }

    /// Returns the cache of this engine at one end of a transfer with `cluster`.
    fn local(&self, cluster: ClusterId, end: &End) -> Result<Arc<Cache>> {
        self.other(cluster)?;
        self.source(end)
    }

    /// Checks that `cluster` is not this engine. Without the cache manager another engine may have the same
    /// id; then the link identifies it.
    pub(super) fn other(&self, cluster: ClusterId) -> Result<()> {
        if self.links.is_own_id(cluster) && self.cluster.config.mode == Mode::CacheManager {
            return Err(session::own(cluster));
        }
        Ok(())
    }

    /// Returns a cache of this engine that may take part in a transfer. Returns `Err(CacheNotFound)` for a
    /// handle, because its cache was never registered.
    pub(super) fn source(&self, end: &End) -> Result<Arc<Cache>> {
        match end {
            End::Managed(id) => self.cluster.table.find(*id),
            End::Loose(_) => {
                let text = "a cache that was never registered cannot take part in a transfer";
                Err(Error::new(ErrorKind::CacheNotFound, text))
            }
        }
    }
}

/// Returns how many blocks a pull names.
fn pulled_blocks(rows: &PullRows) -> usize {
    match rows {
        PullRows::Slot { .. } | PullRows::Part { .. } => 0,
        PullRows::Blocks { local, .. } | PullRows::Rows { local, .. } | PullRows::SlotToBlocks { local } => {
            local.len()
        }
    }
}

/// Returns how many blocks a push names.
fn pushed_blocks(rows: &PushRows) -> usize {
    match rows {
        PushRows::Slot { .. } => 0,
        PushRows::Blocks { local, .. } | PushRows::Rows { local, .. } => local.len(),
    }
}
