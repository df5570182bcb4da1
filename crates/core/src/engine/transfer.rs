//! Pull and push.
//!
//! Both resolve their two ends, validate, plan, and let the receiving side read: from memory of the other
//! side that it can access, otherwise through a socket. `transfer` has the steps of one attempt.

use std::borrow::Borrow;
use std::sync::Arc;

use super::{DataDist, End};
use crate::cache::Cache;
use crate::config::Mode;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Name};
use crate::session;
use crate::stats::Op;
use crate::transfer::Call;
use crate::validate::{CheckedPull, CheckedPush, Layers, PullRows, PushRows};

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
            let (local, checked) = self.checked_pull(from, to, rows, layers)?;
            let link = self.links.find_other(from.cluster, deadline)?;
            let resources = self.resources.clone();
            let call = Call { resources, link, name: from.name, local, deadline, execution: None };
            call.pull_rows(&checked).map(drop)
        })
    }

    /// Pushes rows of a cache of this engine into a peer's cache (contract §7.14, §7.15). The bytes are in
    /// place there when this returns. All layers are one submission under one deadline. An error reports how
    /// far the push got.
    pub fn push(&self, from: &End, to: RemoteName, rows: &PushRows, layers: Layers) -> Result<()> {
        self.resources.stats.timed(Op::Push, || {
            let deadline = self.deadline();
            let (local, checked) = self.checked_push(from, to, rows, layers)?;
            let link = self.links.find_other(to.cluster, deadline)?;
            let (resources, name) = (self.resources.clone(), to.name.without_slot().0);
            let call = Call { resources, link, name, local, deadline, execution: None };
            call.push_rows(to.name, &checked).map(drop)
        })
    }

    /// Checks what a pull needs of this side, and returns the local cache.
    pub(super) fn checked_pull<R: Borrow<PullRows>>(
        &self,
        from: RemoteName,
        to: &End,
        rows: R,
        layers: Layers,
    ) -> Result<(Arc<Cache>, CheckedPull<R>)> {
        self.other(from.cluster)?;
        let local = self.source(to)?;
        super::room_for_lists(rows.borrow().num_blocks())?;
        let checked = CheckedPull::new(local.layout(), rows, layers)?;
        Ok((local, checked))
    }

    /// Checks what a push needs of this side, and returns the local cache.
    pub(super) fn checked_push<R: Borrow<PushRows>>(
        &self,
        from: &End,
        to: RemoteName,
        rows: R,
        layers: Layers,
    ) -> Result<(Arc<Cache>, CheckedPush<R>)> {
        self.other(to.cluster)?;
        let local = self.source(from)?;
        super::room_for_lists(rows.borrow().num_blocks())?;
        let checked = CheckedPush::new(local.layout(), rows, layers)?;
        Ok((local, checked))
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
