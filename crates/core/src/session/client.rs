//! Requests to a peer, and the descriptions of remote caches obtained this way.
//!
//! The owner describes a cache once, at its first use. The description is valid as long as the owner's
//! generation of the cache is unchanged. A grant is a name of its cache; its description has the rows that it lends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call_streams::StreamLease;
use super::known_cache::KnownCache;
use super::link::Link;
use super::message_io;
use crate::budget::BudgetShare;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::grants::{self, RowRanges};
use crate::model::{AddressLocation, Deadline, GrantToken, Name, RemoteCacheName};
use crate::net::POLL_TIME;
use crate::protocol::{MAX_ADDRS, Reply, Request, SHORT_REPLY, Timed, WireCache, WireUsedKey};
use crate::validate::RemoteCache;

/// Extra time that the owner keeps trying after the caller's deadline. A caller checks its deadline every 100 ms while bytes flow.
const GRACE: Duration = Duration::from_millis(150);
/// How long a reader waits for the reason of the end of a grant.
const REASON_TIME: Duration = Duration::from_millis(200);
/// Name of the error fact that marks an error reported by the peer. Such an error implies that the peer has
/// ended the request.
pub(crate) const REPORTED_BY: &str = "reported_by";

/// Where the description of a remote cache comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DescriptionSource {
    /// This side has stored it, and it still holds ([`Link::known`]). Otherwise it comes from the owner.
    Stored,
    /// The owner gives it now ([`Link::describe`]).
    Owner,
}

impl Link {
    /// Returns the remote cache that a caller names. Asks the owner for the id of a cache that is named by a text, unless it
    /// is known here. If the owner has released the cache with that id, the call asks again: another cache may have the name
    /// now (`a_name_that_was_freed_names_its_next_cache`).
    pub(crate) fn remote_cache(
        self: &Arc<Self>,
        name: &RemoteCacheName,
        from: DescriptionSource,
        deadline: Deadline,
    ) -> Result<Arc<KnownCache>> {
        let text = match name {
            RemoteCacheName::Name(name) => return self.description(*name, from, deadline),
            RemoteCacheName::Text(text) => text,
        };
        let known = self.view.names.lock().get(&**text);
        if let Some(cache) = known {
            match self.description(Name::of_cache(cache), from, deadline) {
                Err(error) if error.kind() == ErrorKind::CacheNotFound => {
                    self.view.names.lock().remove(&**text);
                }
                described => return described,
            }
        }
        let reply = self.ask(&Request::Find { name: (**text).to_owned() }, deadline)?;
        let Reply::Found { cache } = reply else { return Err(self.unexpected(&reply)) };
        self.view.names.lock().remember(text.clone(), cache);
        self.description(Name::of_cache(cache), from, deadline)
    }

    fn description(
        self: &Arc<Self>,
        name: Name,
        from: DescriptionSource,
        deadline: Deadline,
    ) -> Result<Arc<KnownCache>> {
        match from {
            DescriptionSource::Stored => self.known(name, deadline),
            DescriptionSource::Owner => self.describe(name, deadline),
        }
    }

    /// Returns the remote cache with the name `name` if its stored description is current, as far as is visible from here.
    pub(crate) fn known_now(&self, name: &RemoteCacheName) -> Option<Arc<KnownCache>> {
        let name = match name {
            RemoteCacheName::Name(name) => *name,
            RemoteCacheName::Text(text) => Name::of_cache(self.view.names.lock().get(&**text)?),
        };
        let known = self.view.records(&name).lock().get(&name);
        known.filter(|known| self.view.current(known))
    }

    /// Returns the remote cache with the name `name`. Uses the stored description if no change of the cache
    /// is visible from here; otherwise asks the owner. Returns `Err(GrantEnded)` if the end of a grant is visible.
    pub(crate) fn known(self: &Arc<Self>, name: Name, deadline: Deadline) -> Result<Arc<KnownCache>> {
        let known = self.view.records(&name).lock().get(&name);
        match known {
            Some(known) if self.view.current(&known) => Ok(known),
            known => {
                known.map_or(Ok(()), |known| self.check_grant(&known, deadline))?;
                self.describe(name, deadline)
            }
        }
    }

    /// Asks the owner for the description of the cache with the name `name`, and stores it.
    pub(crate) fn describe(self: &Arc<Self>, name: Name, deadline: Deadline) -> Result<Arc<KnownCache>> {
        self.view.forget(&name);
        let (reply, share) = self.ask_for(&Request::Describe { name }, deadline)?;
        let Reply::Described(record) = reply else { return Err(self.unexpected(&reply)) };
        let before = share.used();
        let known =
            share.charged(|| self.read_record(name, &record, &share)).map_err(|error| self.named(error))?;
        share.shrink_to(share.used() - before);
        let known = Arc::new(known);
        self.view.remember(name, known.clone());
        Ok(known)
    }

    /// Asks in which caches of the peer `addrs` lie, and returns one answer for each, with the memory that they take. Returns
    /// `Err` with `InvalidArgument` if there are more than `MAX_ADDRS`.
    pub(crate) fn locate(
        self: &Arc<Self>,
        addrs: &[u64],
        deadline: Deadline,
    ) -> Result<(Vec<AddressLocation>, Arc<BudgetShare>)> {
        if addrs.len() > MAX_ADDRS {
            let allowed = format!("at most {MAX_ADDRS} for one destination");
            return Err(Error::argument("len(dst_addrs)", addrs.len(), allowed));
        }
        let addrs_asked = fallible::copied("the lists of a request", addrs)?;
        match self.ask_for(&Request::Locate { addrs: addrs_asked }, deadline)? {
            (Reply::Located(locations), share) if locations.len() == addrs.len() => Ok((locations, share)),
            (reply, _) => Err(self.unexpected(&reply)),
        }
    }

    /// Tells the owner that a call has ended, and which key or grant it has used up.
    pub(crate) fn finish(self: &Arc<Self>, used_key: Option<WireUsedKey>, deadline: Deadline) -> Result<()> {
        self.done(&Request::Finish { used_key, message: None }, deadline).map(|_| ())
    }

    /// Sends one request that has no other result than its byte count, and returns that count.
    pub(crate) fn done(self: &Arc<Self>, request: &Request, deadline: Deadline) -> Result<u64> {
        match self.ask(request, deadline)? {
            Reply::Done { bytes } => Ok(bytes),
            reply => Err(self.unexpected(&reply)),
        }
    }

    /// Sends one request on a stream of its own, and returns the reply. Returns `Err` with the peer's error
    /// if the peer refuses.
    pub(crate) fn ask(self: &Arc<Self>, request: &Request, deadline: Deadline) -> Result<Reply> {
        self.ask_for(request, deadline).map(|(reply, _)| reply)
    }

    /// Does the same as [`ask`](Self::ask) for a reply that may be long. Also returns the memory that it takes.
    pub(super) fn ask_for(
        self: &Arc<Self>,
        request: &Request,
        deadline: Deadline,
    ) -> Result<(Reply, Arc<BudgetShare>)> {
        let lease = self.lease(deadline)?;
        self.ask_over(lease, request, deadline)
    }

    /// Does the same as [`ask_for`](Self::ask_for) on the stream of `lease`.
    pub(super) fn ask_over(
        &self,
        mut lease: StreamLease,
        request: &Request,
        deadline: Deadline,
    ) -> Result<(Reply, Arc<BudgetShare>)> {
        let send = || message_io::send_message(lease.stream(), &self.timed(request, deadline), deadline);
        let reply = self.exchange_for(&lease, request.longest_reply(), deadline, send);
        lease.reusable = reply.is_ok();
        drop(lease);
        // A refusal is a complete reply: the call fails, but the stream remains usable.
        let (reply, share) = reply.map_err(|error| self.break_reason_or(error))?;
        Ok((self.refusal(reply)?, share))
    }

    /// Does the same as [`ask`](Self::ask) for a request during which the peer reads memory of this process. If the
    /// caller gives up, this still waits until the peer has replied or the link has broken, which the heartbeat decides.
    /// The error is the first one.
    pub(crate) fn ask_to_the_end(self: &Arc<Self>, request: &Request, deadline: Deadline) -> Result<Reply> {
        let mut lease = self.lease(deadline)?;
        let answer = self.exchange(&lease, request, deadline);
        if answer
            .as_ref()
            .is_err_and(|error| matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Interrupted))
        {
            // Whatever arrives, or the end of the stream, says that the peer has ended the request. It is not worth waiting for
            // memory.
            let ended = Deadline::after(Duration::ZERO);
            let _ = message_io::receive_reply(
                lease.stream(),
                (SHORT_REPLY, Duration::ZERO),
                Deadline::after(Duration::MAX),
                |bytes| self.admit_reply(bytes, ended),
            );
        }
        lease.reusable = answer.is_ok();
        drop(lease);
        answer.and_then(|reply| self.refusal(reply))
    }

    /// Sends `request` on the stream of `lease`, and waits for the reply, which must be short.
    pub(crate) fn exchange(
        &self,
        lease: &StreamLease,
        request: &Request,
        deadline: Deadline,
    ) -> Result<Reply> {
        let send = || message_io::send_message(lease.stream(), &self.timed(request, deadline), deadline);
        self.exchange_with(lease, deadline, send).map_err(|error| self.break_reason_or(error))
    }

    /// Sends a message with `send` on the stream of `lease`, waits for the reply, which must be short, and counts the request.
    pub(crate) fn exchange_with(
        &self,
        lease: &StreamLease,
        deadline: Deadline,
        send: impl FnOnce() -> Result<()>,
    ) -> Result<Reply> {
        self.exchange_for(lease, SHORT_REPLY, deadline, send).map(|(reply, _)| reply)
    }

    /// Does the same as [`exchange_with`](Self::exchange_with) for a reply of at most `limit` bytes. Also returns the memory that
    /// it takes.
    fn exchange_for(
        &self,
        lease: &StreamLease,
        limit: usize,
        deadline: Deadline,
        send: impl FnOnce() -> Result<()>,
    ) -> Result<(Reply, Arc<BudgetShare>)> {
        let started = Instant::now();
        let reply = send().and_then(|()| self.receive_reply(lease, limit, deadline));
        let bytes = match &reply {
            Ok((Reply::Ready { bytes } | Reply::Done { bytes }, _)) => *bytes,
            _ => 0,
        };
        self.stats.count_request(started.elapsed(), reply.is_ok().then_some(bytes));
        reply
    }

    /// Waits for a short reply on the stream of `lease`.
    pub(crate) fn reply(&self, lease: &StreamLease, deadline: Deadline) -> Result<Reply> {
        self.receive_reply(lease, SHORT_REPLY, deadline).map(|(reply, _)| reply)
    }

    fn receive_reply(
        &self,
        lease: &StreamLease,
        limit: usize,
        deadline: Deadline,
    ) -> Result<(Reply, Arc<BudgetShare>)> {
        message_io::receive_reply(lease.stream(), (limit, POLL_TIME), deadline, |bytes| {
            self.admit_reply(bytes, deadline)
        })
    }

    /// Adds to `request` how long its caller still waits. This is a duration, because the clocks of the two hosts are unrelated.
    pub(crate) fn timed<'a>(&self, request: &'a Request, deadline: Deadline) -> Timed<&'a Request> {
        let limit = if request.writes() { self.limit_of_push(deadline) } else { limit_at_peer(deadline) };
        Timed { limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), request }
    }

    /// Returns how long the peer may write for a push. After this time, the push has ended even if the peer did not answer, so reads in
    /// place may resume.
    pub(crate) fn limit_of_push(&self, deadline: Deadline) -> Duration {
        limit_at_peer(deadline).min(self.pin_limit)
    }

    /// Turns a reply that reports a failure into `Err`.
    pub(crate) fn refusal(&self, reply: Reply) -> Result<Reply> {
        match reply {
            Reply::Failed { kind, message, arrived } => {
                Err(self.named(Reply::error(kind, &message, &arrived)).with(REPORTED_BY, "the peer"))
            }
            reply => Ok(reply),
        }
    }

    pub(crate) fn unexpected(&self, reply: &Reply) -> Error {
        let text = format!("unexpected reply {:?} from the peer", reply.name());
        self.named(Error::new(ErrorKind::System, text))
    }

    fn read_record(&self, name: Name, record: &WireCache, share: &Arc<BudgetShare>) -> Result<KnownCache> {
        let layout = record.layout()?;
        let kv = record.kv_geometry(&layout.geometry)?.map(Arc::new);
        let bytes = layout.geometry.tensor_bytes();
        let tensors = self.view.tensors(&record.location, record.num_tensors, bytes)?;
        let granted = match name {
            Name::Grant(grant) => Some((grant, granted_rows(&record.granted)?)),
            Name::Key(_) | Name::Row { .. } => None,
        };
        Ok(KnownCache {
            at: record.at,
            cache: record.cache,
            remote: RemoteCache { layout, kv, row: record.row, accessible: record.accessible },
            consumable: record.allocated && !record.blocks,
            tensors,
            granted,
            share: share.clone(),
        })
    }

    /// Checks that this peer gave the grant of a token. Returns `Err(InvalidArgument)` if another cluster gave it, and
    /// `Err(GrantEnded)` if the peer was restarted since. A native engine that was restarted is another cluster, so nobody knows which
    /// of both it is.
    pub(crate) fn check_token(&self, token: &GrantToken) -> Result<()> {
        if token.cluster != self.peer.cluster && self.peer.cluster.0 == self.peer.incarnation {
            let text = "this peer did not give the grant: its owner was restarted, or is another peer";
            return Err(self.named(Error::new(ErrorKind::GrantEnded, text)));
        }
        if token.cluster != self.peer.cluster {
            let text =
                format!("the grant is from cluster {}, and the key names another cluster", token.cluster);
            return Err(self.named(Error::new(ErrorKind::InvalidArgument, text)));
        }
        if token.incarnation != self.peer.incarnation {
            let text = "the owner of the grant was restarted, which ended all its grants";
            return Err(self.named(Error::new(ErrorKind::GrantEnded, text)));
        }
        Ok(())
    }

    /// Checks that the grant under which a cache was described has not ended, as far as this process sees. Asks the owner for the
    /// reason of an end, but not for long, because the owner may be stopped.
    pub(crate) fn check_grant(self: &Arc<Self>, known: &KnownCache, deadline: Deadline) -> Result<()> {
        use ErrorKind::{Cancelled, Closed, GrantEnded, Interrupted};
        let Some((grant, _)) = known.granted.as_ref().filter(|_| !self.view.grant_lasts(known)) else {
            return Ok(());
        };
        match self.describe(Name::Grant(*grant), deadline.at_most(REASON_TIME)) {
            // The owner's reason, or this call was stopped. Any other failure concerns only the request for the reason.
            Err(error) if matches!(error.kind(), GrantEnded | Interrupted | Cancelled | Closed) => Err(error),
            _ => Err(self.named(grants::ended(None))),
        }
    }
}

/// Returns the rows that a grant lends, as its owner described them.
fn granted_rows(ranges: &[(u64, u64)]) -> Result<RowRanges> {
    let ranges = fallible::collect(RowRanges::LIST, ranges.iter().map(|&(first, end)| first..end))?;
    let text = "the peer sent the rows of a grant in a form that this version does not know";
    RowRanges::from_ranges(ranges).ok_or_else(|| Error::new(ErrorKind::System, text))
}

/// Returns the remaining time with [`GRACE`], so that the caller's deadline passes first and the caller reports the timeout.
fn limit_at_peer(deadline: Deadline) -> Duration {
    deadline.left().saturating_add(GRACE)
}
