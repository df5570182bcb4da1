//! Creates, ends and checks the links of this engine, also on demand, and switches its role.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::DataDist;
use crate::cache::CallRows;
use crate::config::Role;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{PeerInfo, Transfer};
use crate::model::{ClusterId, Deadline, WhileRefused};
use crate::protocol::{Comm, Request};
use crate::session::{CommStatus, PeerAddress};
use crate::stats::Op;
use crate::transfer::{CallPurpose, Execution, JobClass, watched, work_for};
use crate::validate;

/// Number of groups of addresses. Calls of one group share workers, so that silent addresses delay few others.
const GROUPS: u8 = 16;

impl DataDist {
    /// Returns the peers of all links, those that link calls made and those of communicators.
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.links.peers()
    }

    /// Returns the address at which the engine listens, with the actual port; `None` without a listener.
    pub fn listening(&self) -> Option<SocketAddr> {
        self.links.listening()
    }

    /// Links to each of `peers`, in parallel. Returns one result for each, in order (contract §6.8).
    pub fn link_clusters(&self, peers: &[PeerAddress], timeout: Duration) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout");
        each(peers, deadline, |peer, deadline| {
            let linked = self.timed(Op::Link, || self.links.link(peer, deadline));
            linked.map_err(|error| link_failed(error).with("cluster", peer.cluster))
        })
    }

    /// Ends the links to each of `peers`, in parallel. Returns one result for each, in order (contract §6.8).
    pub fn unlink_clusters(&self, peers: &[PeerAddress], timeout: Duration, force: bool) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout");
        each(peers, deadline, |peer, deadline| {
            let unlinked = self.timed(Op::Unlink, || self.links.unlink(peer, force, deadline));
            unlinked.map_err(|error| error.with("cluster", peer.cluster))
        })
    }

    /// Starts to end every link to `cluster` that [`unlink_clusters`](Self::unlink_clusters) would end, without the address of
    /// the peer. Once the call has begun, new calls over these links fail. The transfer ends when the calls in progress have
    /// ended and the peer has confirmed; with `force` it waits for neither. A call that fails after it has begun drops the links
    /// here, too. The limit is `sync_kv_timeout` if there is no `limit`. A cluster that is not linked is no error.
    ///
    /// Returns `Err(Busy)` as [`Operation::start`](super::Operation::start) does.
    pub fn start_unlink(
        &self,
        cluster: ClusterId,
        force: bool,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let (finder, link) = (self.links.finder(), self.links.finder().for_later(cluster));
        let work = move |_: &Arc<Execution>, deadline| {
            let unlinked = finder.unlink(cluster, force, deadline);
            unlinked.map(|()| 0).map_err(|error| link.named(error))
        };
        let class = JobClass::Waits((cluster.0 % 16) as u8);
        self.start_work(Op::Unlink, class, limit, (CallRows::none(), Box::new(work)))
    }

    /// Enters a communicator (contract §6.5). Returns its number at once; the links to its members are made
    /// in the background.
    pub fn link(&self, name: &str, clusters: &[(ClusterId, u32)], rank_table: &str) -> Result<u64> {
        let config = &self.resources.config;
        let _here = self.resources.engine.on_this_thread();
        validate::rank_table::members(name, clusters, config.cluster)?;
        let members = validate::rank_table::resolve(rank_table, clusters, config.cluster, &config.links)?;
        let pairs = clusters.iter().map(|&(cluster, rank)| (cluster.0, rank)).collect();
        self.links.enter(Comm { name: name.into(), members: pairs, listener: String::new() }, members)
    }

    /// Leaves a communicator (contract §6.6).
    pub fn unlink(&self, comm: u64) -> Result<()> {
        self.links.leave(comm)
    }

    /// Starts to link to the engine that listens at `address`, unless there is a link to it, and returns at once. The
    /// result of the [`Transfer`] is its [`peer`](Transfer::peer). A link that exists is a success, whichever side made it
    /// and by which call. If a call has found the peer at this address before, and the link works, the transfer has ended when
    /// this returns, and nothing was sent. Concurrent calls for one address with the same `name` share each attempt.
    /// If both sides link to each other at once, one link is made, and both calls succeed. If `name` is given, the engine there must
    /// have this name ([`Config::name`](crate::config::Config::name)); otherwise the call fails with `LinkFailed`, and makes no link.
    /// `while_refused` says whether the call waits for a listener.
    ///
    /// Returns `Err` for invalid arguments, and `Err(Busy)` as [`Operation::start`](super::Operation::start) does.
    pub fn ensure_link(
        &self,
        address: SocketAddr,
        limit: Duration,
        name: Option<String>,
        while_refused: WhileRefused,
    ) -> Result<Arc<Transfer>> {
        let deadline = self.limited(Instant::now(), Some(limit));
        validate::peer_port(address)?;
        name.as_deref().map_or(Ok(()), validate::engine_name)?;
        let link = self.links.on_demand(address, name);
        let call = self.calls.begin()?;
        let own = self.resources.config.cluster;
        let found = call.run_now(Op::Link, own, |transfer| {
            transfer.set_peer(link.find()?);
            Some((Ok(0), None))
        });
        let call = match found {
            Ok(linked) => return Ok(linked),
            Err(call) => call,
        };
        let work = move |execution: &Arc<Execution>, deadline| {
            let peer =
                link.make(&|| execution.transfer().commit(), while_refused, deadline).map_err(link_failed)?;
            execution.transfer().set_peer(peer);
            Ok(0)
        };
        let purpose = CallPurpose::new(Some(Op::Link), JobClass::Links(group_of(&address)), deadline);
        let purpose = CallPurpose { dials: Some(Box::new(address)), ..purpose };
        call.start(purpose, CallRows::none(), Box::new(work))
    }

    /// Returns the state of a communicator (contract §6.7).
    pub fn comm_status(&self, comm: u64) -> Result<CommStatus> {
        self.links.comm_status(comm)
    }

    /// Returns the current role of this engine.
    pub fn role(&self) -> Role {
        *self.role.lock()
    }

    /// Takes another role, and from now on listens at `listen`, or nowhere (contract §6.9). Returns
    /// `Err(LinksExist)` if there is a link, or if one is being made.
    pub fn switch_role(&self, role: Role, listen: Option<SocketAddr>) -> Result<()> {
        let _here = self.resources.engine.on_this_thread();
        self.links.listen(listen)?;
        *self.role.lock() = role;
        Ok(())
    }

    /// Checks the link to `cluster`: the peer must answer within `sync_kv_timeout` (contract §6.11).
    pub fn check_link(&self, cluster: ClusterId) -> Result<()> {
        let deadline = self.deadline();
        self.links.find(cluster, deadline)?.done(&Request::Ping, deadline).map(drop)
    }

    /// Does nothing, because peers read memory in place. Returns `Err(NotLinked)` without a link (contract
    /// §7.17).
    pub fn remap(&self) -> Result<()> {
        if self.links.any() { Ok(()) } else { Err(Error::new(ErrorKind::NotLinked, "there is no link")) }
    }

    pub(super) fn limit(&self, limit: Duration, name: &'static str) -> Deadline {
        Deadline::after(limit).named(name).watched(self.interrupted)
    }
}

/// Returns the group of an address.
fn group_of(address: &SocketAddr) -> u8 {
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    hasher.finish().to_le_bytes()[0] % GROUPS
}

/// Runs `call` for each of `peers`: on this thread for one peer, in parallel for more. The deadline is that
/// of the whole call, so as many as possible run at once. Only the caller's thread checks for interruption,
/// while it waits for the others.
pub(super) fn each(
    peers: &[PeerAddress],
    deadline: Deadline,
    call: impl Fn(&PeerAddress, Deadline) -> Result<()> + Sync,
) -> Vec<Result<()>> {
    if let [only] = peers {
        return vec![call(only, deadline)];
    }
    // Ends the waits of the other threads early once it is cancelled.
    let (call_of_all, next) = (Transfer::unreported(), AtomicUsize::new(0));
    let (results_to, results_from) = channel();
    let work = |results_to: Sender<_>, deadline: Deadline| {
        while let Some((index, peer)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            peers.get(index).map(|peer| (index, peer))
        } {
            let not_interrupted = deadline.interruption("waiting for its turn");
            // Fails only without a receiver, and the receiver lives until all results are sent.
            let _ = results_to.send((index, not_interrupted.and_then(|()| call(peer, deadline))));
        }
    };
    let mut results = Vec::with_capacity(peers.len());
    // A process makes links only a few times, so threads for the duration of the call cost little.
    std::thread::scope(|scope| {
        let work = &work;
        let mut started = 0;
        for _ in 0..peers.len().min(MAX_LINKING) {
            let (results_to, call_of_all) = (results_to.clone(), &call_of_all);
            let begun = Builder::new().name("llm-each".into()).spawn_scoped(scope, move || {
                let _current = work_for(call_of_all);
                work(results_to, watched(deadline));
            });
            started += usize::from(begun.is_ok());
        }
        if started == 0 {
            work(results_to.clone(), deadline);
        }
        drop(results_to);
        loop {
            match results_from.recv_timeout(Deadline::INTERRUPT_INTERVAL) {
                Ok(result) => results.push(result),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    if call_of_all.proceed().is_ok() && deadline.interruption("linking").is_err() {
                        call_of_all.cancel();
                    }
                }
            }
        }
    });
    results.sort_by_key(|&(index, _)| index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Clusters of one call that are linked at the same time.
const MAX_LINKING: usize = 64;

/// Error of a link that was not made. `NotLinked`, for example from a peer that refuses, `System` and
/// `NotEnabled` become `LinkFailed`.
pub(super) fn link_failed(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotLinked | ErrorKind::System | ErrorKind::NotEnabled => {
            Error::new(ErrorKind::LinkFailed, "the link could not be made").because(error)
        }
        _ => error,
    }
}
