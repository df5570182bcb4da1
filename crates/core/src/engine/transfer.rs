//! Pull and push.
//!
//! Both resolve their two ends, validate, plan, and let the receiving side read: from memory of the other
//! side that it can access, otherwise through a stream. `transfer` has the steps of one attempt.

use std::sync::Arc;

use super::copies::room_for_lists;
use super::operation::{Operation, Prepared};
use super::{DataDist, End, RemoteName};
use crate::cache::Cache;
use crate::config::Mode;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::model::{ClusterId, GrantUse, RemoteCacheName, Verify, Words};
use crate::plan::Side;
use crate::session;
use crate::stats::Op;
use crate::transfer::{self, PeerTransfer};
use crate::validate::{self, CheckedTransfer, Layers, LocalCache, Rows};

/// What a pull or push does beside moving bytes.
#[derive(Clone, Debug)]
pub struct CallExtras {
    /// The notification that the peer gets at its end.
    pub notify: Option<Vec<u8>>,
    /// The grant under which it pulls. Groups have one for each part instead.
    pub grant: Option<GrantUse>,
    /// How thoroughly it checks the bytes that it has moved; as the engine is configured if `None`.
    pub verify: Option<Verify>,
    /// The argument names that its error messages use; by default those of the original's API.
    pub words: &'static Words,
}

impl Default for CallExtras {
    fn default() -> Self {
        CallExtras { notify: None, grant: None, verify: None, words: Words::ORIGINAL }
    }
}

impl DataDist {
    /// Pulls rows of a peer's cache into a cache of this engine (contract §7.12, §7.13). An error lists the
    /// rows that arrived. Returns `Err(CacheNotFound)` if no cache that the peer shares has the name.
    pub fn pull(
        &self,
        from: RemoteName<impl Into<RemoteCacheName>>,
        to: &End,
        rows: Rows,
        layers: Layers,
    ) -> Operation<'_> {
        self.transfer(Side::Destination, from, to, (rows, layers), CallExtras::default())
    }

    /// Pushes rows of a cache of this engine into a peer's cache (contract §7.14, §7.15). The bytes are in
    /// place there when it has ended. All layers are one submission under one deadline. An error reports how
    /// far the push got.
    pub fn push(
        &self,
        from: &End,
        to: RemoteName<impl Into<RemoteCacheName>>,
        rows: Rows,
        layers: Layers,
    ) -> Operation<'_> {
        self.transfer(Side::Source, to, from, (rows, layers), CallExtras::default())
    }

    /// Does what [`pull`](Self::pull) or [`push`](Self::push) does, with `extras`; the cache of this engine is the side `local_side`.
    /// The peer gets the notification before the call succeeds. Returns `Err(Busy)` if the peer has too many notifications that it
    /// has not polled; then nothing has moved. Returns `Err(GrantEnded)` if the grant ended before the bytes were in place, or if
    /// the peer never gave it. A push takes no grant.
    pub fn transfer(
        &self,
        local_side: Side,
        remote: RemoteName<impl Into<RemoteCacheName>>,
        local: &End,
        moves: (Rows, Layers),
        extras: CallExtras,
    ) -> Operation<'_> {
        let remote = remote.of_any_form();
        Operation::new(self, local_side.of((Op::Push, Op::Pull)), || {
            let (local, checked) = self.checked(local_side, &remote, local, moves, &extras)?;
            let (link, name) = (self.links.finder().for_later(remote.cluster), remote.name);
            let verify = self.verify(&extras);
            no_grant_in_push(local_side, extras.grant)?;
            let (notify, grant) = (checked_notification(extras.notify)?, extras.grant.map(Box::new));
            Ok(Prepared::Transfer(PeerTransfer { link, name, local, checked, notify, grant, verify }))
        })
    }

    /// Sends `message` to a linked cluster, whose program polls for it. Returns once the message is in the window of the
    /// link; messages arrive in order, each at most once. If the link breaks, [`Event::LinkDown`](crate::Event) counts those
    /// that the peer has not confirmed. Returns `Err(Busy)` if the peer has too many notifications that it has not polled,
    /// and `Err(InvalidArgument)` if `message` has more than 64 KiB.
    pub fn notify(&self, cluster: ClusterId, message: Vec<u8>) -> Result<()> {
        self.other(cluster)?;
        session::check_notification("message", &message)?;
        let link = self.links.find_other(cluster, self.deadline())?;
        transfer::notify(self.executor.handle(), &link, message, self.resources.config.links.pin_limit)
    }

    /// Returns how thoroughly a call checks the bytes that it has moved.
    pub(super) fn verify(&self, extras: &CallExtras) -> Verify {
        extras.verify.unwrap_or(self.resources.config.verify)
    }

    /// Checks what a pull or push needs of this engine, whose cache is the side `local_side`, and returns this cache.
    pub(super) fn checked(
        &self,
        local_side: Side,
        remote: &RemoteName<RemoteCacheName>,
        local: &End,
        (rows, layers): (Rows, Layers),
        extras: &CallExtras,
    ) -> Result<(Arc<Cache>, CheckedTransfer)> {
        self.other(remote.cluster)?;
        validate::caller_name(&remote.name)?;
        let local = self.own_cache(local)?;
        room_for_lists(rows.num_blocks())?;
        let cache = LocalCache { layout: local.layout(), kv: local.kv().cloned() };
        let checked = CheckedTransfer::new(extras.words, local_side, cache, rows, layers)?;
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
    pub(super) fn own_cache(&self, end: &End) -> Result<Arc<Cache>> {
        match end {
            End::Managed(id) => self.resources.table.find(*id),
            End::Loose(_) => {
                let text = "a cache that was never registered cannot take part in a transfer";
                Err(Error::new(ErrorKind::CacheNotFound, text))
            }
        }
    }
}

/// Refuses a grant in a push: grants are for readers.
pub(super) fn no_grant_in_push(local_side: Side, grant: Option<GrantUse>) -> Result<()> {
    ensure(grant.is_none() || local_side == Side::Destination, || {
        Error::new(ErrorKind::InvalidArgument, "a push takes no grant")
    })
}

/// Checks a notification that a call delivers.
pub(super) fn checked_notification(notify: Option<Vec<u8>>) -> Result<Option<Arc<Vec<u8>>>> {
    if let Some(message) = &notify {
        session::check_notification("notify", message)?;
    }
    Ok(notify.map(Arc::new))
}
