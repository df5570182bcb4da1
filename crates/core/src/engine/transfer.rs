//! Pull and push.
//!
//! Both resolve their two ends, validate, plan, and let the receiving side read: from memory of the other
//! side that it can access, otherwise through a socket. `transfer` has the steps of one attempt.

use std::borrow::Borrow;
use std::sync::Arc;

use super::call_extras::CallExtras;
use super::{DataDist, End};
use crate::cache::Cache;
use crate::config::Mode;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Name, Verify};
use crate::session;
use crate::stats::Op;
use crate::transfer::{self, Call};
use crate::validate::{CheckedPull, CheckedPush, Layers, LocalCache, PullRows, PushRows};

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
        self.pull_with(from, to, rows, layers, CallExtras::default())
    }

    /// Does what [`pull`](Self::pull) does, with `extras`: the peer gets the notification before the call succeeds. Returns
    /// `Err(Busy)` if the peer has too many notifications that it has not polled; then nothing has moved. Returns
    /// `Err(GrantEnded)` if the grant ended before the bytes were in place, or if the peer never gave it.
    pub fn pull_with(
        &self,
        from: RemoteName,
        to: &End,
        rows: &PullRows,
        layers: Layers,
        extras: CallExtras,
    ) -> Result<()> {
        self.resources.stats.timed(Op::Pull, || {
            let deadline = self.deadline();
            let (local, checked) = self.checked_pull(from, to, rows, layers, extras.raw_layout)?;
            let verify = self.verify(&extras);
            let (notify, grant) = extras.checked()?;
            let link = self.links.find_other(from.cluster, deadline)?;
            let (resources, name) = (self.resources.clone(), from.name);
            let (execution, to_the_end) = (None, false);
            let call =
                Call { resources, link, name, local, deadline, execution, to_the_end, notify, grant, verify };
            call.pull_rows(&checked).map(drop)
        })
    }

    /// Pushes rows of a cache of this engine into a peer's cache (contract §7.14, §7.15). The bytes are in
    /// place there when this returns. All layers are one submission under one deadline. An error reports how
    /// far the push got.
    pub fn push(&self, from: &End, to: RemoteName, rows: &PushRows, layers: Layers) -> Result<()> {
        self.push_with(from, to, rows, layers, CallExtras::default())
    }

    /// Does what [`push`](Self::push) does, with `extras` as in [`pull_with`](Self::pull_with). A push takes no grant.
    pub fn push_with(
        &self,
        from: &End,
        to: RemoteName,
        rows: &PushRows,
        layers: Layers,
        extras: CallExtras,
    ) -> Result<()> {
        self.resources.stats.timed(Op::Push, || {
            let deadline = self.deadline();
            let (local, checked) = self.checked_push(from, to, rows, layers, extras.raw_layout)?;
            let verify = self.verify(&extras);
            let notify = extras.checked_of_push()?;
            let link = self.links.find_other(to.cluster, deadline)?;
            let (resources, name) = (self.resources.clone(), to.name.without_slot().0);
            let (execution, to_the_end, grant) = (None, false, None);
            let call =
                Call { resources, link, name, local, deadline, execution, to_the_end, notify, grant, verify };
            call.push_rows(to.name, &checked).map(drop)
        })
    }

    /// Sends `message` to a linked cluster, whose program polls for it. Returns once the message is in the window of the
    /// link; messages arrive in order, each at most once. If the link breaks, [`Event::LinkDown`](crate::Event) counts those
    /// that the peer has not confirmed. Returns `Err(Busy)` if the peer has too many notifications that it has not polled,
    /// and `Err(InvalidArgument)` if `message` has more than 64 KiB.
    pub fn notify(&self, cluster: ClusterId, message: Vec<u8>) -> Result<()> {
        self.other(cluster)?;
        session::check_notification(&message)?;
        let link = self.links.find_other(cluster, self.deadline())?;
        transfer::notify(self.lanes.handle(), &link, message, self.resources.config.links.pin_limit)
    }

    /// Returns how thoroughly a call checks the bytes that it has moved.
    pub(super) fn verify(&self, extras: &CallExtras) -> Verify {
        extras.verify.unwrap_or(self.resources.config.verify)
    }

    /// Checks what a pull needs of this side, and returns the local cache.
    pub(super) fn checked_pull<R: Borrow<PullRows>>(
        &self,
        from: RemoteName,
        to: &End,
        rows: R,
        layers: Layers,
        raw: bool,
    ) -> Result<(Arc<Cache>, CheckedPull<R>)> {
        self.other(from.cluster)?;
        let local = self.source(to)?;
        super::room_for_lists(rows.borrow().num_blocks())?;
        let checked = CheckedPull::new(with_layout(&local, raw), rows, layers)?;
        Ok((local, checked))
    }

    /// Checks what a push needs of this side, and returns the local cache.
    pub(super) fn checked_push<R: Borrow<PushRows>>(
        &self,
        from: &End,
        to: RemoteName,
        rows: R,
        layers: Layers,
        raw: bool,
    ) -> Result<(Arc<Cache>, CheckedPush<R>)> {
        self.other(to.cluster)?;
        let local = self.source(from)?;
        super::room_for_lists(rows.borrow().num_blocks())?;
        let checked = CheckedPush::new(with_layout(&local, raw), rows, layers)?;
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

/// Returns what a pull or push must know of a cache of this engine. With `raw`, its rows move as they are.
fn with_layout(cache: &Cache, raw: bool) -> LocalCache {
    LocalCache {
        layout: cache.layout_of_first(),
        mixed: cache.mixed().cloned(),
        kv: cache.kv().cloned(),
        raw,
    }
}
