//! Who is linked, who was, and who is about to be: one lock, held for look-ups only.
//!
//! Not for: sockets; whatever has to be closed or told is handed out, and done by the caller without the lock.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};

use super::communicator::{CommStatus, Communicator};
use super::limits::Connections;
use super::link::{Kind, Link, Peer, broken};
use super::refusals::{Reason, Refusal};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::stats::LinkState;

/// The fact of an error which says that a link of the same cluster works already: nothing else is worth trying.
pub(super) const PLACE_TAKEN: &str = "linked_from";
/// Links of one engine, far above what anybody makes (contract §16 names 512).
const MOST_LINKS: usize = 4096;
/// Broken links whose reason is kept.
const MOST_BROKEN: usize = 1024;

pub(super) struct State {
    limits: Connections,
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
    /// The engine is taking another role: no link may come about.
    quiet: bool,
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

/// No link comes about while this lives.
pub(super) struct Quiet<'a>(&'a State);

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.0.locked().quiet = false;
    }
}

impl State {
    pub(super) fn new(limits: Connections) -> State {
        State { limits, entries: Mutex::default(), changed: Condvar::new() }
    }

    /// Refuses a link that a peer makes, if there are too many of those; one of the same cluster takes its place.
    pub(super) fn room_for_incoming(&self, cluster: ClusterId) -> Result<(), Refusal> {
        let entries = self.locked();
        if entries.incoming(cluster) < self.limits.incoming {
            return Ok(());
        }
        Err(Refusal::new(Reason::Full, self.too_many()))
    }

    #[cold]
    fn too_many(&self) -> Error {
        let text =
            "peers have made too many links; a higher limit of open files (ulimit -n) makes room for more";
        Error::new(ErrorKind::LinkFailed, text).with("limit", self.limits.incoming)
    }

    /// Refuses if there is a link, or one on the way; until what is returned goes, none can come about.
    pub(super) fn quiet(&self) -> Result<Quiet<'_>> {
        let mut entries = self.locked();
        entries.open()?;
        if entries.any() {
            let text = "there are links; unlink them before the role is switched";
            return Err(Error::new(ErrorKind::LinksExist, text));
        }
        entries.quiet = true;
        Ok(Quiet(self))
    }

    /// Waits while somebody else links `cluster`.
    pub(super) fn turn_to_link(&self, cluster: ClusterId, deadline: Deadline) -> Result<TurnToLink<'_>> {
        let mut entries = self.locked();
        loop {
            entries.open()?;
            if entries.linking.insert(cluster) {
                return Ok(TurnToLink { state: self, cluster });
            }
            entries = self.wait(entries, deadline, "waiting for another call that links the same cluster")?;
        }
    }

    /// A link that keeps `link_clusters` from making another. One that the peer made counts unless both sides may.
    pub(super) fn linked_already(&self, cluster: ClusterId, both_ways: bool) -> Option<Arc<Link>> {
        let counts = |kind| kind == Kind::Outgoing || (kind == Kind::Incoming && !both_ways);
        self.of(cluster).into_iter().find(|link| link.alive() && counts(link.kind()))
    }

    /// Enters a link; hands out those it replaces, which the same peer, or its predecessor, left behind. One of a
    /// communicator that has been left is refused (`nothing_is_left_of_a_communicator_that_was_left_at_once`), and so is one
    /// that would replace a link which [works](Link::works): a cluster id and an instance number in a greeting prove nothing.
    pub(super) fn enroll(&self, link: &Arc<Link>, patience: Duration) -> Result<Vec<Arc<Link>>> {
        let mut entries = self.locked();
        entries.open()?;
        if let Kind::Communicator(id) = link.kind()
            && !entries.comms.contains_key(&id)
        {
            return Err(unknown_comm(id));
        }
        if entries.links.values().map(Vec::len).sum::<usize>() >= MOST_LINKS {
            return Err(
                Error::new(ErrorKind::LinkFailed, "there are too many links").with("limit", MOST_LINKS)
            );
        }
        // Asked before the link was made as well; others may have come meanwhile.
        if link.kind() != Kind::Outgoing && entries.incoming(link.peer().cluster) >= self.limits.incoming {
            return Err(self.too_many());
        }
        let all = entries.links.entry(link.peer().cluster).or_default();
        // Under the lock, so that of two that come at once one is refused. The look at the socket waits for nothing.
        if let Some(rival) = all.iter().find(|old| replaces(link, old) && old.works(patience)) {
            return Err(taken(link, rival));
        }
        let (stale, kept) = all.drain(..).partition(|old| !old.alive() || replaces(link, old));
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

    /// The link to `cluster` that calls use: the oldest whose peer was heard of within `patience`, so that one which comes
    /// later takes no calls from it, except a later communicator with the same process; else the latest that lives.
    pub(super) fn find(
        &self,
        cluster: ClusterId,
        patience: Duration,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let mut entries = self.locked();
        loop {
            if let Some(link) = entries.links.get(&cluster).and_then(|all| usable(all, patience)) {
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

    /// All links, for the control thread; `None` once closed.
    pub(super) fn kept(&self) -> Option<Vec<Arc<Link>>> {
        let entries = self.locked();
        (!entries.closed).then(|| entries.links.values().flatten().cloned().collect())
    }

    /// Whether there is a link, or one on the way.
    pub(super) fn any(&self) -> bool {
        self.locked().any()
    }

    /// Whether a communicator was ever entered.
    pub(super) fn ranked(&self) -> bool {
        self.locked().last_comm > 0
    }

    /// A number for a new communicator. It counts from 1 and leaves out every number that is a status code, because
    /// callers compare the two.
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
    pub(super) fn comm(&self, comm: &crate::protocol::Comm) -> Option<Arc<Communicator>> {
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

    /// A member of the communicator `comm` is there now: nobody waits before dialling it again.
    pub(super) fn knocked(&self, comm: &crate::protocol::Comm) {
        let entries = self.locked();
        let known = entries.comms.values().filter(|known| known.same_members(comm)).cloned();
        let known: Vec<_> = known.collect();
        drop(entries);
        for comm in known {
            comm.knocked();
        }
    }

    /// Ends everything.
    pub(super) fn close(&self) {
        let mut entries = self.locked();
        entries.closed = true;
        let links: Vec<_> = entries.links.drain().flat_map(|(_, all)| all).collect();
        let comms: Vec<_> = entries.comms.drain().map(|(_, comm)| comm).collect();
        drop(entries);
        for comm in comms {
            comm.abandon();
        }
        for link in links {
            let reason = "the peer was finalized".into();
            let _ = link.tell(&crate::protocol::Control::Bye { reason, unlinked: false });
            link.shatter("this engine was finalized");
        }
        self.changed.notify_all();
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
        if self.closed {
            return Err(Error::new(ErrorKind::Closed, "the engine was finalized"));
        }
        if self.quiet {
            return Err(Error::new(ErrorKind::LinkFailed, "the engine is taking another role; link again"));
        }
        Ok(())
    }

    /// Links that peers made, without those of `cluster`.
    fn incoming(&self, cluster: ClusterId) -> usize {
        let counts = |link: &&Arc<Link>| link.kind() != Kind::Outgoing && link.peer().cluster != cluster;
        self.links.values().flatten().filter(counts).count()
    }

    fn any(&self) -> bool {
        let preparing = || self.comms.values().any(|comm| comm.preparing());
        !self.links.is_empty() || !self.linking.is_empty() || preparing()
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

fn usable(all: &[Arc<Link>], patience: Duration) -> Option<&Arc<Link>> {
    if let [only] = all {
        return only.alive().then_some(only);
    }
    let heard = |link: &&Arc<Link>| link.alive() && link.silent() < patience;
    let Some(oldest) = all.iter().find(heard) else { return all.iter().rev().find(|link| link.alive()) };
    // Of several communicators with one process, the latest is used (contract §6.5).
    let again = |link: &&Arc<Link>| heard(link) && link.peer().instance == oldest.peer().instance;
    let ranked = |link: &&Arc<Link>| matches!(link.kind(), Kind::Communicator(_));
    if ranked(&oldest) { all.iter().rev().find(|link| ranked(link) && again(link)) } else { Some(oldest) }
}

/// Whether `link` would take the place of `other`, of the same cluster id.
fn replaces(link: &Link, other: &Link) -> bool {
    other.kind() == link.kind() || other.peer().instance != link.peer().instance
}

/// The refusal of a link whose place another has that works.
#[cold]
fn taken(link: &Link, rival: &Link) -> Error {
    let Peer { cluster, instance, .. } = link.peer();
    let text = if rival.peer().instance == *instance {
        format!("cluster {cluster} is linked already, and its link works")
    } else {
        format!("another process of cluster {cluster} is linked: two processes cannot share a cluster id")
    };
    let error = Error::new(ErrorKind::LinkFailed, text).with(PLACE_TAKEN, &rival.peer().address);
    error.with("heard_ms_ago", rival.silent().as_millis())
}

#[cold]
fn unknown_comm(id: u64) -> Error {
    Error::new(ErrorKind::NotLinked, "no communicator has this id").with("comm_id", id)
}
