//! Pushes: the peer reads this process's memory if it can; otherwise this process sends the bytes.

use std::sync::Arc;
use std::time::Duration;

use super::call::{Call, Moved};
use super::stream::Streams;
use crate::cache::pin_reads;
use crate::error::Result;
use crate::plan::CopyPlan;
use crate::protocol::{Reply, Request, WirePlan};
use crate::session::{KnownCache, REPORTED_BY, limit_ms, location};

impl Call {
    /// Pushes the bytes of `plan`: the peer reads this process's memory if it can, otherwise the bytes are
    /// sent.
    pub(crate) fn push(
        &self,
        known: &Arc<KnownCache>,
        plan: &Arc<CopyPlan>,
        local_rows: Vec<u64>,
    ) -> Result<Moved> {
        if plan.waves().is_empty() {
            return Ok(Moved::Bytes(0));
        }
        // Before the rows are pinned: a read request of the peer that arrives meanwhile must know that this
        // side may hold them (`push_pull_and_copy_do_not_deadlock`).
        let writing = self.link.pushes.begin(known.cache);
        let _pinned = pin_reads(&self.local, local_rows, self.deadline)?;
        self.resources.still_registered(&self.local)?;
        let limit = Duration::from_millis(limit_ms(self.deadline));
        let taken = self.push_bytes(known, plan);
        if taken.as_ref().is_err_and(|error| error.fact(REPORTED_BY).is_none()) {
            writing.unanswered(limit);
        }
        taken
    }

    /// Moves the bytes of a push by the available path.
    fn push_bytes(&self, known: &Arc<KnownCache>, plan: &Arc<CopyPlan>) -> Result<Moved> {
        let memory_location = self.resources.memory_location(&self.local)?;
        if self.link.peer_memory().is_some_and(|memory| memory.seen(&memory_location)) {
            self.resources.described_to_peer(&self.local, &memory_location);
            let geometry = self.local.geometry();
            let request = Request::Fetch {
                name: self.name.into(),
                cache: known.cache.0,
                plan: WirePlan::try_from(&**plan)?,
                source: location(memory_location)?,
                num_tensors: geometry.num_tensors(),
                tensor_bytes: geometry.tensor_bytes(),
                limit_ms: limit_ms(self.deadline),
            };
            match self.link.ask(&request, self.deadline)? {
                Reply::Done { bytes } => return Ok(Moved::Bytes(bytes)),
                Reply::Stale => return Ok(Moved::Stale),
                // The peer could read this memory when the link was made, but cannot now. Sockets always
                // work.
                Reply::Unreachable { .. } => {}
                reply => return Err(self.link.unexpected(&reply)),
            }
        }
        Streams { call: self.clone(), known: known.clone(), plan: plan.clone() }.send()
    }
}
