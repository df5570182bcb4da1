//! A pull or push whose arguments were checked.

use std::sync::Arc;
use std::time::Instant;

use super::async_call::Execution;
use super::call::{Call, TransferEnd};
use crate::cache::{Cache, Pin, RowUse};
use crate::error::Result;
use crate::model::{Deadline, GrantUse, RemoteCacheName, Verify};
use crate::plan::Side;
use crate::resources::Resources;
use crate::session::{Link, LinkOfCall};
use crate::stats::Op;
use crate::validate::{CheckedTransfer, OwnerShare};

/// A pull or push whose arguments were checked.
pub(crate) struct PeerTransfer {
    pub(crate) link: LinkOfCall,
    /// Name of the remote cache, with its slot.
    pub(crate) name: RemoteCacheName,
    pub(crate) local: Arc<Cache>,
    pub(crate) checked: CheckedTransfer,
    /// The notification that the peer gets at the end.
    pub(crate) notify: Option<Arc<Vec<u8>>>,
    /// The grant under which it pulls.
    pub(crate) grant: Option<Box<GrantUse>>,
    /// How thoroughly it checks the bytes that it has moved.
    pub(crate) verify: Verify,
}

/// Returns the rows of the local cache that a pull or push uses.
pub(crate) fn used_rows(checked: &CheckedTransfer) -> Result<RowUse> {
    let rows = checked.rows().local_rows()?;
    Ok(match checked.local_side() {
        Side::Source => RowUse { reads: rows, ..RowUse::default() },
        Side::Destination => RowUse { writes: rows, ..RowUse::default() },
    })
}

impl PeerTransfer {
    /// Moves the bytes: on a worker for `execution`, whose rows were free ([`Call::pin`] takes them), or on the calling thread.
    pub(crate) fn run(
        self,
        resources: Arc<Resources>,
        execution: Option<Arc<Execution>>,
        deadline: Deadline,
    ) -> Result<u64> {
        let link = self.link.find(deadline)?;
        self.call(resources, link, execution, deadline).transfer(&self)
    }

    /// Moves the bytes on the calling thread, and returns the rows as well, if the transfer is a short pull that need not wait. Returns
    /// `None` otherwise.
    pub(crate) fn run_now(
        &self,
        resources: &Arc<Resources>,
        deadline: Deadline,
    ) -> Option<(Result<u64>, Option<Pin>)> {
        let asks_peer = self.notify.is_some() || self.grant.is_some() || self.verify != Verify::Off;
        if asks_peer || self.checked.local_side() == Side::Source {
            return None;
        }
        let started = Instant::now();
        let call = self.call(resources.clone(), self.link.at_start()?, None, deadline);
        let _active = call.link.begin().ok()?;
        let (bytes, pin) = call.pull_now(&self.checked)?;
        call.link.stats.count_transfers(1, started.elapsed(), Some(bytes));
        resources.stats.add_bytes(Op::Pull, bytes);
        Some((Ok(bytes), pin))
    }

    /// Returns the call that moves the bytes over `link`; the other arguments are as in [`run`](Self::run).
    pub(super) fn call(
        &self,
        resources: Arc<Resources>,
        link: Arc<Link>,
        execution: Option<Arc<Execution>>,
        deadline: Deadline,
    ) -> Call {
        // A push asks its peer for the cache, whatever the slot.
        let name = match self.checked.local_side() {
            Side::Source => self.name.without_slot().0,
            Side::Destination => self.name.clone(),
        };
        Call {
            resources,
            link,
            words: (self.checked.words(), self.checked.local_side()),
            name,
            local: self.local.clone(),
            deadline,
            // The end of an asynchronous call says that no process reads its rows any more.
            to_the_end: execution.is_some(),
            execution,
            notify: self.notify.clone(),
            grant: self.grant.as_deref().copied(),
            verify: self.verify,
        }
    }

    /// Moves the bytes of `share` with `call`. Returns their number and what is left to do.
    pub(super) fn moved(&self, call: &Call, share: &OwnerShare) -> Result<(u64, TransferEnd)> {
        match self.checked.local_side() {
            Side::Source => call.push_checked(&self.name, &self.checked, share),
            Side::Destination => call.pull_checked(&self.checked, share),
        }
    }
}

impl Call {
    /// Moves rows between the local cache and the remote one. Then has the key released and delivers the notification. Returns
    /// the number of bytes. A push without a tensor succeeds, as in the original, but it delivers no notification, because the
    /// peer has got nothing.
    fn transfer(&self, of: &PeerTransfer) -> Result<u64> {
        let moved = || of.moved(self, &OwnerShare::default());
        let bytes = self.counted(|| {
            if let Some(tensors_per_layer) = of.checked.layer_without_tensors() {
                moved()?;
                tracing::warn!(
                    target: "llm_datadist::transfers",
                    "a push to {} of {} moved nothing and delivers no message, because the source cache has \
                     fewer tensors than one layer (cache_id={}, num_tensors={}, tensor_num_per_layer={tensors_per_layer}); \
                     pass tensor_num_per_layer=1 to push all of its tensors",
                    of.name, self.link.peer, self.local.id(), self.local.num_tensors()
                );
                return Ok(0);
            }
            let notification = self.reserve_notification()?;
            let (bytes, end) = moved()?;
            self.finish(&end, notification).map_err(|error| self.named(error))?;
            self.release_slot(end.slot)?;
            Ok(bytes)
        })?;
        self.resources.stats.add_bytes(of.checked.local_side().of((Op::Push, Op::Pull)), bytes);
        Ok(bytes)
    }
}
