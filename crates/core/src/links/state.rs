//! Who is linked, who was, and who is about to be: one lock, held for look-ups only.
//!
//! Not for: sockets; whatever has to be closed or told is handed out, and done by the caller without the lock.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hashbrown::{HashMap, HashSet};

use super::communicator::{CommStatus, Communicator};
use super::link::{Kind, Link, broken};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ClusterId, Deadline};
use crate::stats::LinkState;
use crate::transport::{Address, Listener, Stream};

/// Strangers that may be greeting at a time; one more, and the oldest has to go.
const MOST_STRANGERS: usize = 64;
/// Lines that are kept for the log; the oldest go first.
const MOST_NOTES: usize = 256;
/// Broken links whose reason is kept.
const MOST_BROKEN: usize = 1024;

#[derive(Default)]
pub(super) struct State {
    entries: Mutex<Entries>,
    /// A link came, went, or is no longer being made.
    changed: Condvar,
}

#[derive(Default)]
struct Entries {
    closed: bool,
    /// In the order in which they were made.
    links: HashMap<ClusterId, Vec<Arc<Link>>>,
    broken: HashMap<ClusterId, (Instant, String)>,
    /// Clusters that a `link_clusters` is working on.
    linking: HashSet<ClusterId>,
    comms: HashMap<u64, Arc<Communicator>>,
    last_comm: u64,
    main: Option<Arc<dyn Listener>>,
    local: Option<(String, Arc<dyn Listener>)>,
    /// Those of communicators.
    others: HashMap<Address, Arc<dyn Listener>>,
    strangers: VecDeque<Arc<Stream>>,
    notes: VecDeque<String>,
}

/// The right to link one cluster; others who want to wait for it.
pub(super) struct TurnToLink<'a> {
    state: &'a State,
    cluster: ClusterId,
}

impl Drop for TurnToLink<'_> {
    fn drop(&mut self) {
        self.state.locked().linking.remove(&self.cluster);
        self.state.changed.notify_all();
    }
}

impl State {
    /// Waits while somebody else links `cluster`, and refuses if it is linked already.
    pub(super) fn turn_to_link(
        &self,
        cluster: ClusterId,
        both_ways: bool,
        deadline: Deadline,
    ) -> Result<TurnToLink<'_>> {
        let mut entries = self.locked();
        loop {
            entries.open()?;
            if let Some(link) = entries.linked_already(cluster, both_ways) {
                let error =
                    Error::new(ErrorKind::AlreadyLinked, format!("cluster {cluster} is linked already"));
                return Err(error.with("peer", &link.peer().address));
            }
            if entries.linking.insert(cluster) {
                return Ok(TurnToLink { state: self, cluster });
            }
            entries = self.wait(entries, deadline, "waiting for another call that links the same cluster")?;
        }
    }

    /// Enters a link; hands out those it replaces, which the same peer, or its predecessor, left behind.
    pub(super) fn enroll(&self, link: &Arc<Link>) -> Result<Vec<Arc<Link>>> {
        let mut entries = self.locked();
        entries.open()?;
        let all = entries.links.entry(link.peer().cluster).or_default();
        let replaced = |old: &Arc<Link>| {
            let restarted = old.peer().instance != link.peer().instance;
            old.kind() == link.kind() || restarted || !old.alive()
        };
        let (stale, kept) = all.drain(..).partition(replaced);
        *all = kept;
        all.push(link.clone());
        entries.broken.remove(&link.peer().cluster);
        drop(entries);
        self.changed.notify_all();
        Ok(stale)
    }

    /// Removes a link that has broken; `false` if it was not there any more.
    pub(super) fn remove(&self, link: &Arc<Link>) -> bool {
        let mut entries = self.locked();
        let cluster = link.peer().cluster;
        let Some(all) = entries.links.get_mut(&cluster) else { return false };
        let before = all.len();
        all.retain(|known| !Arc::ptr_eq(known, link));
        let (removed, last) = (all.len() < before, all.is_empty());
        if last {
            entries.links.remove(&cluster);
        }
        if let Some(why) = link.why().filter(|_| removed && last) {
            if entries.broken.len() >= MOST_BROKEN {
                entries.broken.clear();
            }
            entries.broken.insert(cluster, why.clone());
        }
        drop(entries);
        self.changed.notify_all();
        removed
    }

    /// Forgets that a link to `cluster` broke: it was unlinked, which needs no explanation.
    pub(super) fn forgive(&self, cluster: ClusterId) {
        self.locked().broken.remove(&cluster);
    }

    /// The links to `cluster`.
    pub(super) fn of(&self, cluster: ClusterId) -> Vec<Arc<Link>> {
        self.locked().links.get(&cluster).cloned().unwrap_or_default()
    }

    /// The link to `cluster` that calls use.
    pub(super) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        let mut entries = self.locked();
        loop {
            let live = entries.links.get(&cluster).and_then(|all| all.iter().rev().find(|link| link.alive()));
            if let Some(link) = live {
                return Ok(link.clone());
            }
            let preparing = entries.comms.values().find(|comm| comm.prepares(cluster)).cloned();
            let Some(comm) = preparing else { return Err(entries.missing(cluster)) };
            entries =
                self.wait(entries, deadline, "preparing").map_err(|error| comm.unprepared(cluster, error))?;
        }
    }

    /// The link a peer's stream belongs to.
    pub(super) fn by_id(&self, cluster: ClusterId, instance: u64, id: u64) -> Option<Arc<Link>> {
        let entries = self.locked();
        let all = entries.links.get(&cluster)?;
        all.iter().find(|link| link.id == id && link.peer().instance == instance && link.alive()).cloned()
    }

    /// All links, for the keeper; `None` once closed.
    pub(super) fn kept(&self) -> Option<Vec<Arc<Link>>> {
        let entries = self.locked();
        (!entries.closed).then(|| entries.links.values().flatten().cloned().collect())
    }

    /// Whether there is a link, or one on the way.
    pub(super) fn any(&self) -> bool {
        let entries = self.locked();
        !entries.links.is_empty()
            || !entries.linking.is_empty()
            || entries.comms.values().any(|comm| comm.preparing())
    }

    /// Whether a communicator was ever entered.
    pub(super) fn ranked(&self) -> bool {
        self.locked().last_comm > 0
    }

    /// A number for a new communicator. It counts from 1 and leaves out every number that is a status code, because
    /// callers compare the two (clients.md §1.2, client 8).
    pub(super) fn enter(&self, make: impl FnOnce(u64) -> Communicator) -> Result<Arc<Communicator>> {
        let mut entries = self.locked();
        entries.open()?;
        if entries.comms.len() >= super::communicator::MOST {
            let error = Error::new(ErrorKind::InvalidArgument, "too many communicators; unlink some");
            return Err(error.with("limit", super::communicator::MOST));
        }
        let taken =
            |id: u64| crate::status::StatusCode::ALL.iter().any(|code| code.value().cast_unsigned() == id);
        let mut id = entries.last_comm + 1;
        while taken(id) {
            id += 1;
        }
        entries.last_comm = id;
        let comm = Arc::new(make(id));
        entries.comms.insert(id, comm.clone());
        Ok(comm)
    }

    /// Takes a communicator out.
    pub(super) fn leave(&self, id: u64) -> Result<Arc<Communicator>> {
        let comm = self.locked().comms.remove(&id);
        self.changed.notify_all();
        comm.ok_or_else(|| unknown_comm(id))
    }

    /// How far a communicator is.
    pub(super) fn comm_status(&self, id: u64) -> Result<CommStatus> {
        self.locked().comms.get(&id).map(|comm| comm.status()).ok_or_else(|| unknown_comm(id))
    }

    /// The latest communicator of that name and these members.
    pub(super) fn comm(&self, comm: &crate::wire::Comm) -> Option<Arc<Communicator>> {
        let entries = self.locked();
        entries.comms.values().filter(|known| known.is(comm)).max_by_key(|known| known.id()).cloned()
    }

    /// The communicator of a number.
    pub(super) fn comm_by_id(&self, id: u64) -> Option<Arc<Communicator>> {
        self.locked().comms.get(&id).cloned()
    }

    /// Wakes whoever waits for a link: a communicator got further, or gave up.
    pub(super) fn announce(&self) {
        drop(self.locked());
        self.changed.notify_all();
    }

    /// A stranger that greets; the oldest of too many is sent away.
    pub(super) fn greet(&self, stranger: &Arc<Stream>) {
        let mut entries = self.locked();
        entries.strangers.push_back(stranger.clone());
        let oldest =
            (entries.strangers.len() > MOST_STRANGERS).then(|| entries.strangers.pop_front()).flatten();
        let closed = entries.closed;
        drop(entries);
        if closed {
            stranger.close();
        }
        if let Some(oldest) = oldest {
            oldest.close();
        }
    }

    /// A stranger that has greeted, or gone.
    pub(super) fn greeted(&self, stranger: &Arc<Stream>) {
        self.locked().strangers.retain(|known| !Arc::ptr_eq(known, stranger));
    }

    /// Where peers are listened for.
    pub(super) fn listening(&self) -> Option<SocketAddr> {
        match self.locked().main.as_ref()?.address() {
            Address::Tcp(address) => Some(address),
            _ => None,
        }
    }

    pub(super) fn take_main(&self) -> Option<Arc<dyn Listener>> {
        self.locked().main.take()
    }

    pub(super) fn put_main(&self, listener: Option<Arc<dyn Listener>>) {
        self.locked().main = listener;
    }

    /// The abstract name of the local socket.
    pub(super) fn local_name(&self) -> Option<String> {
        self.locked().local.as_ref().map(|(name, _)| name.clone())
    }

    pub(super) fn put_local(&self, name: String, listener: Arc<dyn Listener>) {
        self.locked().local = Some((name, listener));
    }

    /// Whether a communicator's listener is at `address` already.
    pub(super) fn listens_at(&self, address: &Address) -> bool {
        self.locked().others.contains_key(address)
    }

    pub(super) fn put_other(&self, asked: Address, listener: Arc<dyn Listener>) {
        self.locked().others.insert(asked, listener);
    }

    pub(super) fn take_other(&self, asked: &Address) -> Option<Arc<dyn Listener>> {
        self.locked().others.remove(asked)
    }

    /// Ends everything; hands out the listeners to close.
    pub(super) fn close(&self) -> Vec<Arc<dyn Listener>> {
        let mut entries = self.locked();
        entries.closed = true;
        let links: Vec<_> = entries.links.drain().flat_map(|(_, all)| all).collect();
        let comms: Vec<_> = entries.comms.drain().map(|(_, comm)| comm).collect();
        let strangers: Vec<_> = entries.strangers.drain(..).collect();
        let local = entries.local.take().map(|(_, listener)| listener);
        let listeners = entries.main.take().into_iter().chain(local);
        let listeners: Vec<_> = listeners.chain(entries.others.drain().map(|(_, other)| other)).collect();
        drop(entries);
        for comm in comms {
            comm.abandon();
        }
        for stranger in strangers {
            stranger.close();
        }
        for link in links {
            let _ = link.tell(&crate::wire::Control::Bye {
                reason: "the peer was finalized".into(),
                unlinked: false,
            });
            link.shatter("this engine was finalized");
        }
        self.changed.notify_all();
        listeners
    }

    /// A line for the log.
    pub(super) fn note(&self, line: String) {
        let mut entries = self.locked();
        if entries.notes.len() == MOST_NOTES {
            entries.notes.pop_front();
        }
        entries.notes.push_back(line);
    }

    pub(super) fn notes(&self) -> Vec<String> {
        self.locked().notes.drain(..).collect()
    }

    /// Every link as it is now.
    pub(super) fn states(&self) -> Vec<LinkState> {
        self.locked().links.values().flatten().map(|link| link.state()).collect()
    }

    /// Sleeps until something changes. The lock is let go before the caller is asked whether it was interrupted.
    fn wait<'a>(
        &'a self,
        entries: MutexGuard<'a, Entries>,
        deadline: Deadline,
        doing: &str,
    ) -> Result<MutexGuard<'a, Entries>> {
        drop(self.changed.wait_timeout(entries, deadline.nap()));
        deadline.waiting(doing)?;
        Ok(self.locked())
    }

    fn locked(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn open(&self) -> Result<()> {
        if self.closed { Err(Error::new(ErrorKind::Closed, "the engine was finalized")) } else { Ok(()) }
    }

    /// A link that keeps `link_clusters` from making another. One that the peer made counts unless both sides may.
    fn linked_already(&self, cluster: ClusterId, both_ways: bool) -> Option<&Arc<Link>> {
        let counts = |kind| kind == Kind::Outgoing || (kind == Kind::Incoming && !both_ways);
        self.links.get(&cluster)?.iter().find(|link| link.alive() && counts(link.kind()))
    }

    #[cold]
    fn missing(&self, cluster: ClusterId) -> Error {
        let broke = self.links.get(&cluster).and_then(|all| all.last()?.why());
        if let Some((when, why)) = broke.or_else(|| self.broken.get(&cluster)) {
            return broken(cluster, *when, why);
        }
        let known: Vec<u64> = self.links.keys().map(|id| id.0).take(16).collect();
        let error = Error::new(ErrorKind::NotLinked, format!("there is no link to cluster {cluster}"));
        error.with("linked", format_args!("{known:?}"))
    }
}

#[cold]
fn unknown_comm(id: u64) -> Error {
    Error::new(ErrorKind::NotLinked, "no communicator has this id").with("comm_id", id)
}
