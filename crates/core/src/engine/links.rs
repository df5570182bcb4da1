//! Links: who this engine is linked with, and as what.
//!
//! Not for: what travels over them (`transfer`).

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use super::DataDist;
use crate::config::Role;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::protocol::Comm;
use crate::session::{CommStatus, PeerAddress};
use crate::stats::Op;
use crate::validate;

impl DataDist {
    /// Where peers are listened for, with the port that was chosen; `None` without a listener.
    #[must_use]
    pub fn listening(&self) -> Option<SocketAddr> {
        self.links.listening()
    }

    #[must_use]
    /// Links to each of `peers`, in parallel; one result for each, in order (contract §6.8).
    pub fn link_clusters(&self, peers: &[PeerAddress], timeout: Duration) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout");
        each(peers, deadline, |peer, deadline| {
            let linked = self.cluster.stats.timed(Op::Link, || self.links.link(peer, deadline));
            linked.map_err(|error| link_failed(error).with("cluster", peer.cluster))
        })
    }

    #[must_use]
    /// Ends the links to each of `peers`, in parallel; one result for each, in order (contract §6.8).
    pub fn unlink_clusters(&self, peers: &[PeerAddress], timeout: Duration, force: bool) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout");
        each(peers, deadline, |peer, deadline| {
            let unlinked = self.cluster.stats.timed(Op::Unlink, || self.links.unlink(peer, force, deadline));
            unlinked.map_err(|error| error.with("cluster", peer.cluster))
        })
    }

    /// Enters a communicator (contract §6.5): its number at once, links to its members in the background.
    pub fn link(&self, name: &str, clusters: &[(ClusterId, u32)], rank_table: &str) -> Result<u64> {
        let config = &self.cluster.config;
        validate::rank_table::members(name, clusters, config.cluster)?;
        let ends = validate::rank_table::ends(rank_table, clusters, config.cluster, &config.links)?;
        let members = clusters.iter().map(|&(cluster, rank)| (cluster.0, rank)).collect();
        self.links.enter(Comm { name: name.into(), members, listener: String::new() }, ends)
    }

    /// Leaves a communicator (contract §6.6).
    pub fn unlink(&self, comm: u64) -> Result<()> {
        self.links.leave(comm)
    }

    /// How far a communicator is (contract §6.7).
    pub fn comm_status(&self, comm: u64) -> Result<CommStatus> {
        self.links.comm_status(comm)
    }

    /// What this engine does for others now.
    #[must_use]
    pub fn role(&self) -> Role {
        *self.role.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes another role, and listens at `listen` from now on, or nowhere (contract §6.9). Only without links.
    pub fn switch_role(&self, role: Role, listen: Option<SocketAddr>) -> Result<()> {
        self.links.listen(listen)?;
        *self.role.lock().unwrap_or_else(PoisonError::into_inner) = role;
        Ok(())
    }

    /// Whether the link to `cluster` works: the peer answers within `sync_kv_timeout` (contract §6.11).
    pub fn check_link(&self, cluster: ClusterId) -> Result<()> {
        let deadline = self.deadline();
        self.links.find(cluster, deadline)?.ping(deadline)
    }

    /// Nothing to do for memory that peers read in place; refused without a link (contract §7.17).
    pub fn remap(&self) -> Result<()> {
        if self.links.any() { Ok(()) } else { Err(Error::new(ErrorKind::NotLinked, "there is no link")) }
    }

    pub(super) fn limit(&self, limit: Duration, name: &'static str) -> Deadline {
        Deadline::after(limit).named(name).watched(self.interrupted)
    }
}

/// Does `call` for each of `peers`: here for one, in parallel for more. The limit is that of the whole call, so as many
/// as possible are tried at once. Only the thread of the caller is asked whether to go on, while it waits for the others.
pub(super) fn each(
    peers: &[PeerAddress],
    deadline: Deadline,
    call: impl Fn(&PeerAddress, Deadline) -> Result<()> + Sync,
) -> Vec<Result<()>> {
    if let [only] = peers {
        return vec![call(only, deadline)];
    }
    let (stop, next) = (Arc::new(AtomicBool::new(false)), AtomicUsize::new(0));
    let (telling, told) = channel();
    let work = |telling: Sender<_>, deadline: Deadline| {
        while let Some((index, peer)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            peers.get(index).map(|peer| (index, peer))
        } {
            let on = deadline.interruption("waiting for its turn");
            // Fails only if nobody listens, and somebody does until all is said.
            let _ = telling.send((index, on.and_then(|()| call(peer, deadline))));
        }
    };
    let mut results = Vec::with_capacity(peers.len());
    // Links are made a few times in the life of a process: threads for the length of the call are no cost there.
    std::thread::scope(|scope| {
        let work = &work;
        let mut started = 0;
        for _ in 0..peers.len().min(AT_ONCE) {
            let (telling, stop) = (telling.clone(), stop.clone());
            let begun = Builder::new().name("llm-each".into()).spawn_scoped(scope, move || {
                STOP.set(Some(stop));
                work(telling, deadline.watched(Some(stopped)));
            });
            started += usize::from(begun.is_ok());
        }
        if started == 0 {
            work(telling.clone(), deadline);
        }
        drop(telling);
        loop {
            match told.recv_timeout(NAP) {
                Ok(result) => results.push(result),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    if !stop.load(Ordering::Relaxed) && deadline.interruption("linking").is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            }
        }
    });
    results.sort_by_key(|&(index, _)| index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Clusters of one call that are linked at the same time.
const AT_ONCE: usize = 64;
/// How often the caller is asked whether to go on.
const NAP: Duration = Duration::from_millis(100);

thread_local! {
    /// Says that the call this thread works for was interrupted.
    static STOP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

fn stopped() -> bool {
    STOP.with_borrow(|stop| stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)))
}

/// The error of a link that was not made: what a peer that refused calls not linked is a failed link here.
#[cold]
pub(super) fn link_failed(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotLinked | ErrorKind::System | ErrorKind::NotEnabled => {
            Error::new(ErrorKind::LinkFailed, "the link could not be made").because(error)
        }
        _ => error,
    }
}
