//! What this side asks of a peer, and what it keeps of the answers.
//!
//! A remote cache is described by its owner once, at first use; the description is good as long as the owner's generation
//! of its place says so. Not for: what a pull or push does with it (`datadist`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call_streams::Lease;
use super::link::Link;
use super::message_io;
use super::remote_cache::Known;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{CacheId, Deadline, Name};
use crate::protocol::{MAX_ADDRS, MESSAGE_LIMIT, Place, Record, Reply, Request, Spot};
use crate::validate::RemoteCache;

/// How much longer than the caller the answering side tries: a caller whose bytes flow looks at its clock every 100 ms.
const GRACE_MS: u64 = 150;
/// The fact of an error that the peer itself reported: it has ended what it was asked for.
pub(crate) const SAID_BY: &str = "said_by";
/// How long a reply is watched for before the thread sleeps: about one hand-over between two processes.
const PATIENCE: Duration = Duration::from_micros(60);

impl Link {
    /// The remote cache that `name` leads to: as known, if that is still true as far as can be seen from here, else as its
    /// owner describes it now.
    pub(crate) fn known(&self, name: Name, deadline: Deadline) -> Result<Arc<Known>> {
        match self.record(&name) {
            Some(known) if self.current(&known) => Ok(known),
            _ => self.describe(name, deadline),
        }
    }

    /// Whether nothing says that the owner changed the cache since it was described. Without a view of the owner's
    /// memory nothing can: there the owner compares.
    pub(crate) fn current(&self, known: &Known) -> bool {
        let Place { place, generation } = known.at;
        self.reach()
            .and_then(|reach| reach.generations())
            .is_none_or(|generations| generations.still(place, generation))
    }

    /// Asks the owner what `name` leads to.
    pub(crate) fn describe(&self, name: Name, deadline: Deadline) -> Result<Arc<Known>> {
        self.forget(&name);
        let limit_ms = limit_ms(deadline);
        let reply = self.ask(&Request::Describe { name: name.into(), limit_ms }, deadline)?;
        let Reply::Described(record) = reply else { return Err(self.unexpected(&reply)) };
        let known = Arc::new(self.read_record(&record).map_err(|error| self.named(error))?);
        self.remember(name, known.clone());
        Ok(known)
    }

    /// Asks which caches of the peer `addrs` lie in; one answer for each.
    pub(crate) fn locate(&self, addrs: &[u64], deadline: Deadline) -> Result<Vec<Spot>> {
        if addrs.len() > MAX_ADDRS {
            let allowed = format!("at most {MAX_ADDRS} for one destination");
            return Err(Error::argument("len(dst_addrs)", addrs.len(), allowed));
        }
        let addrs_asked = fallible::copied("the lists of a request", addrs)?;
        let request = Request::Locate { addrs: addrs_asked, limit_ms: limit_ms(deadline) };
        match self.ask(&request, deadline)? {
            Reply::Located(spots) if spots.len() == addrs.len() => Ok(spots),
            reply => Err(self.unexpected(&reply)),
        }
    }

    /// Releases the key behind `name`, now that tensors `first..first + count` of its row have arrived.
    pub(crate) fn consume(
        &self,
        name: Name,
        known: &Known,
        first: u32,
        count: u32,
        deadline: Deadline,
    ) -> Result<()> {
        let cache = known.cache.0;
        let request =
            Request::Consume { name: name.into(), cache, first, count, limit_ms: limit_ms(deadline) };
        self.done(&request, deadline).map(|_| ())
    }

    /// Asks whether the peer answers.
    pub(crate) fn ping(&self, deadline: Deadline) -> Result<()> {
        self.done(&Request::Ping { limit_ms: limit_ms(deadline) }, deadline).map(|_| ())
    }

    /// Asks the peer to drop the link.
    pub(crate) fn unlink(&self, deadline: Deadline) -> Result<()> {
        self.done(&Request::Unlink { limit_ms: limit_ms(deadline) }, deadline).map(|_| ())
    }

    /// One request whose answer is that it was done.
    pub(crate) fn done(&self, request: &Request, deadline: Deadline) -> Result<u64> {
        match self.ask(request, deadline)? {
            Reply::Done { bytes } => Ok(bytes),
            reply => Err(self.unexpected(&reply)),
        }
    }

    /// One request and its reply, on a stream of its own.
    pub(crate) fn ask(&self, request: &Request, deadline: Deadline) -> Result<Reply> {
        let mut lease = self.lease(deadline)?;
        let reply = self.exchange(&lease, request, deadline);
        lease.whole = reply.is_ok();
        drop(lease);
        // What the peer refused is an answer: the stream goes on, the call does not.
        reply.and_then(|reply| self.refusal(reply))
    }

    /// Sends `request` on the stream of `lease` and waits for the reply.
    pub(crate) fn exchange(&self, lease: &Lease<'_>, request: &Request, deadline: Deadline) -> Result<Reply> {
        let said = || message_io::say(lease.stream(), request, deadline);
        self.heard(lease, deadline, said).map_err(|error| self.why_or(error))
    }

    /// Waits for the reply to what `said` says on the stream of `lease`.
    pub(crate) fn heard(
        &self,
        lease: &Lease<'_>,
        deadline: Deadline,
        said: impl FnOnce() -> Result<()>,
    ) -> Result<Reply> {
        let started = Instant::now();
        let reply = said().and_then(|()| reply(lease, deadline));
        self.requests().count(started.elapsed(), reply.is_ok());
        if let Ok(Reply::Ready { bytes } | Reply::Done { bytes }) = reply {
            self.requests().moved(bytes);
        }
        reply
    }

    /// A reply that is an error, as that error.
    pub(crate) fn refusal(&self, reply: Reply) -> Result<Reply> {
        match reply {
            Reply::Failed { kind, message, facts, arrived } => {
                Err(self.named(Reply::error(kind, &message, &facts, arrived)).with(SAID_BY, "the peer"))
            }
            reply => Ok(reply),
        }
    }

    /// The error for a stream that failed: why the link broke, if it did.
    pub(crate) fn why_or(&self, error: Error) -> Error {
        match self.check() {
            Err(broke) if error.kind() == ErrorKind::NotLinked => self.named(broke),
            _ => self.named(error),
        }
    }

    #[cold]
    pub(crate) fn unexpected(&self, reply: &Reply) -> Error {
        let text = format!("the peer answered {:?}, which fits no request of this kind", reply.name());
        self.named(Error::new(ErrorKind::System, text))
    }

    fn read_record(&self, record: &Record) -> Result<Known> {
        let side = record.side()?;
        let tensors = match self.reach() {
            Some(reach) => {
                reach.tensors(&record.location, record.num_tensors, side.geometry.tensor_bytes())?
            }
            None => None,
        };
        Ok(Known {
            at: record.at,
            cache: CacheId(record.cache),
            remote: RemoteCache { side, row: record.row, accessible: record.accessible },
            consumable: record.allocated && !record.blocks,
            tensors,
        })
    }
}

/// Waits for a reply on the stream of `lease`.
pub(crate) fn reply(lease: &Lease<'_>, deadline: Deadline) -> Result<Reply> {
    message_io::hear(lease.stream(), MESSAGE_LIMIT, PATIENCE, deadline)
}

/// What is left of a deadline, for the peer, which has no clock in common with this side.
pub(crate) fn limit_ms(deadline: Deadline) -> u64 {
    // Rounded up: the side that asked gives up first, and says why.
    u64::try_from(deadline.left().as_millis()).unwrap_or(u64::MAX).saturating_add(GRACE_MS)
}
