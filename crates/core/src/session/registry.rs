//! The registry of links: existing links, recently broken ones, links in the making, and communicators.
//!
//! One lock guards it and is held for look-ups only. Links to be closed or notified are returned to the
//! caller, which does that without the lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};

use super::communicator::{CommStatus, Communicator};
use super::dials::{self, DialStart, Dials};
use super::limits::Connections;
use super::link::{
    EndReason, EngineId, Kind, Link, broken, check_name, is_same_peer, replaced_because, replaces,
};
use super::link_attempts::LinkTarget;
use super::refusals::{Reason, Refusal};
use crate::error::{Error, ErrorKind, Result};
use crate::events::{EventQueue, PeerInfo};
use crate::memory::EventFd;
use crate::model::{ClusterId, Deadline};
use crate::protocol::{Comm, ControlMessage};
use crate::stats::LinkState;
use crate::sync::{Condvar, Mutex, MutexGuard, OnDrop};

/// The error fact that marks a conflict with a working link of the same cluster. Retrying over another
/// transport cannot help then.
pub(super) const RIVAL_LINK: &str = "linked_from";
/// Maximum number of communicators of one process (contract §16).
const MAX_COMMS: usize = 512;
/// Maximum number of links of one engine, well above the 512 of contract §16.
const MAX_LINKS: usize = 4096;
/// Maximum number of ended links that are known.
const MAX_ENDED: usize = 1024;

/// The registry of one engine.
pub(super) struct Registry {
    own: EngineId,
    limits: Connections,
    events: Arc<EventQueue>,
    /// Wakes the control thread, which watches the links that are registered.
    control: Arc<EventFd>,
    entries: Mutex<Entries>,
    /// Notified when a link is added or removed, or is no longer being made.
    changed: Condvar,
}

#[derive(Default)]
struct Entries {
    closed: bool,
    /// The links to each cluster, oldest first.
    links: HashMap<ClusterId, Vec<Arc<Link>>>,
    /// The last link to each cluster that has none.
    ended: HashMap<ClusterId, EndedLink>,
    /// Clusters that a `link_clusters` call is linking.
    linking: HashSet<ClusterId>,
    /// The engines that `ensure_link` calls are linking.
    dials: Dials,
    comms: HashMap<u64, Arc<Communicator>>,
    last_comm: u64,
    /// The engine is switching its role, and new links are refused.
    refuses_links: bool,
}

/// A link that has ended.
struct EndedLink {
    /// Its peer, without the metadata.
    peer: PeerInfo,
    /// When and why it broke, unless it was unlinked.
    broke: Option<(Instant, EndReason)>,
}

impl Registry {
    pub(super) fn new(
        own: EngineId,
        limits: Connections,
        events: Arc<EventQueue>,
        control: Arc<EventFd>,
    ) -> Registry {
        Registry { own, limits, events, control, entries: Mutex::default(), changed: Condvar::new() }
    }

    /// Refuses a link from a peer if peers have made too many. Links of the same `cluster` do not count,
    /// because the new link replaces them.
    pub(super) fn room_for_incoming(&self, cluster: ClusterId) -> Result<(), Refusal> {
        let entries = self.entries.lock();
        if entries.incoming(cluster) < self.limits.incoming {
            return Ok(());
        }
        Err(Refusal::new(Reason::Full, self.too_many()))
    }

    fn too_many(&self) -> Error {
        let text =
            "peers have made too many links; a higher limit of open files (ulimit -n) makes room for more";
        Error::new(ErrorKind::LinkFailed, text).with("limit", self.limits.incoming)
    }

    /// Refuses new links until the returned guard is dropped. Returns `Err` with `LinksExist` if a link
    /// exists or is being made.
    pub(super) fn refuse_links(&self) -> Result<impl Drop> {
        let mut entries = self.entries.lock();
        entries.open()?;
        if entries.any() {
            let text = "there are links; unlink them before the role is switched";
            return Err(Error::new(ErrorKind::LinksExist, text));
        }
        entries.refuses_links = true;
        Ok(OnDrop(|| self.entries.lock().refuses_links = false))
    }

    /// Waits until no other caller links `cluster`, and returns the right to do so, for which other callers wait until it is
    /// dropped. Returns `Err` if the deadline passes or the engine closes.
    pub(super) fn lock_linking(&self, cluster: ClusterId, deadline: Deadline) -> Result<impl Drop> {
        let mut entries = self.entries.lock();
        loop {
            entries.open()?;
            if entries.linking.insert(cluster) {
                return Ok(OnDrop(move || {
                    self.entries.lock().linking.remove(&cluster);
                    self.changed.notify_all();
                }));
            }
            entries = self.wait(entries, deadline, "waiting for another call that links the same peer")?;
        }
    }

    /// Returns the link to the engine `to` if there is one; otherwise records that this side dials it (`dials`).
    pub(super) fn begin_dial(&self, to: EngineId, silence_limit: Duration) -> Result<DialStart<impl Drop>> {
        let mut entries = self.entries.lock();
        entries.open_for(Kind::Ensured)?;
        if let Some(link) = entries.kept(to.0, Some(to.1), silence_limit) {
            return Ok(DialStart::Linked(link.clone()));
        }
        let standing = || entries.links_of(to.0, Some(to.1)).filter(|link| link.stands());
        if let Some(link) = standing().find(|link| !link.calls.unlinks()) {
            return Ok(DialStart::Silent(link.clone()));
        }
        if let Some(link) = standing().next() {
            let text = format!("the link to {} is being unlinked", link.peer);
            return Err(Error::new(ErrorKind::AlreadyLinked, text));
        }
        // The peer would enter a link that this side then refuses.
        if let Some(rival) = entries.working(to.0, None, silence_limit) {
            return Err(taken((to, Kind::Ensured), rival));
        }
        entries.dials.begin(to);
        Ok(DialStart::Dials(OnDrop(move || self.entries.lock().dials.end(to))))
    }

    /// Returns the link to the engine that a link call has found at the address of `target`, if it is
    /// [kept](Link::is_kept). An engine with another name than that of `target` does not count: another one may listen
    /// there by now.
    pub(super) fn found_at(
        &self,
        (address, name): &LinkTarget,
        silence_limit: Duration,
    ) -> Option<Arc<Link>> {
        let entries = self.entries.lock();
        let is_found = |link: &&Arc<Link>| {
            link.found_at.get() == Some(address) && check_name(&link.peer, name.as_deref()).is_ok()
        };
        let mut all = entries.links.values().flatten();
        all.find(|link| is_found(link) && link.is_kept(silence_limit)).cloned()
    }

    /// Waits for a link to this cluster that is [kept](Link::is_kept), if one is `wanted`, and to this instance, if one is given.
    /// Returns `None` once `deadline` has passed, and `Err` if the caller was interrupted or the engine closes.
    pub(super) fn await_link(
        &self,
        wanted: Option<(ClusterId, Option<u64>)>,
        silence_limit: Duration,
        deadline: Deadline,
    ) -> Result<Option<Arc<Link>>> {
        let mut entries = self.entries.lock();
        loop {
            if entries.closed {
                return Err(Error::closed());
            }
            let kept = wanted.and_then(|(cluster, instance)| entries.kept(cluster, instance, silence_limit));
            if let Some(link) = kept {
                return Ok(Some(link.clone()));
            }
            if deadline.passed() {
                return Ok(None);
            }
            drop(self.changed.wait_timeout(entries, deadline.wait_limit()));
            deadline.interruption("waiting to dial again")?;
            entries = self.entries.lock();
        }
    }

    /// Enters a link and returns the links that it replaces, which the same peer or its predecessor left
    /// behind, and whether each was alive. Refuses a link of a communicator that was left
    /// (`a_communicator_that_is_left_at_once_leaves_nothing`). Also refuses a link that would replace
    /// one that [works](Link::works): the cluster id and instance number in a handshake prove nothing.
    pub(super) fn enroll(&self, link: &Arc<Link>, silence_limit: Duration) -> Result<Vec<(Arc<Link>, bool)>> {
        let mut entries = self.entries.lock();
        entries.open_for(link.kind)?;
        if link.kind == Kind::Ensured && link.is_incoming() {
            entries.may_enter(link, self.own, silence_limit)?;
        }
        if let Kind::Communicator(id) = link.kind
            && !entries.comms.contains_key(&id)
        {
            return Err(unknown_comm(id));
        }
        if entries.links.values().map(Vec::len).sum::<usize>() >= MAX_LINKS {
            return Err(
                Error::new(ErrorKind::LinkFailed, "there are too many links").with("limit", MAX_LINKS)
            );
        }
        // Checked by `room_for_incoming` as well, but other links may have been entered since.
        if link.is_incoming() && entries.incoming(link.peer.cluster) >= self.limits.incoming {
            return Err(self.too_many());
        }
        let all = entries.links.entry(link.peer.cluster).or_default();
        // Checked under the lock, so that one of two simultaneous links is refused. The check of the socket
        // does not wait.
        if let Some(rival) = all.iter().find(|old| replaces(link, old) && old.works(silence_limit)) {
            return Err(taken(((link.peer.cluster, link.peer.incarnation), link.kind), rival));
        }
        let (stale, kept): (Vec<Arc<Link>>, _) =
            all.drain(..).partition(|old| !old.alive() || replaces(link, old));
        *all = kept;
        all.push(link.clone());
        entries.ended.remove(&link.peer.cluster);
        // Under the lock, so that events are in the order of what happened.
        let stale: Vec<_> = stale.into_iter().map(|old| (old.clone(), old.alive())).collect();
        for (old, _) in &stale {
            self.events.link_down(old.end_info(replaced_because(link, old)));
        }
        self.events.link_up(PeerInfo::clone(&link.peer));
        drop(entries);
        self.changed.notify_all();
        self.control.signal();
        Ok(stale)
    }

    /// Removes a link that has ended, and records why it broke; `why` is the reason of one that has not broken yet.
    /// Returns `false` if the link was not registered any more.
    pub(super) fn remove(&self, link: &Arc<Link>, why: impl Into<EndReason>) -> bool {
        let mut entries = self.entries.lock();
        let cluster = link.peer.cluster;
        let Some(all) = entries.links.get_mut(&cluster) else { return false };
        let before = all.len();
        all.retain(|known| !Arc::ptr_eq(known, link));
        let (removed, last) = (all.len() < before, all.is_empty());
        let linked = all.iter().any(|other| is_same_peer(other, link));
        if last {
            entries.links.remove(&cluster);
        }
        if removed && last {
            if entries.ended.len() >= MAX_ENDED {
                entries.ended.clear();
            }
            let peer = PeerInfo { metadata: Arc::default(), ..PeerInfo::clone(&link.peer) };
            entries.ended.insert(cluster, EndedLink { peer, broke: link.break_reason().cloned() });
        }
        if removed && !linked {
            self.events.link_down(link.end_info(why));
        }
        drop(entries);
        self.changed.notify_all();
        removed
    }

    /// Ends a link that broke. Returns `false` if the link was already removed or replaced.
    pub(super) fn lost(&self, link: &Arc<Link>, why: impl Into<EndReason>) -> bool {
        let why = why.into();
        link.break_off(why.clone());
        let removed = self.remove(link, why.clone());
        // A link that this side is unlinking ends as expected, whichever side closes it first.
        if removed && !link.calls.unlinks() {
            // The first recorded reason is the one that counts.
            let why = link.break_reason().map_or(&why, |(_, why)| why);
            let native = self.own.0.0 == self.own.1;
            tracing::warn!(target: "llm_datadist::links", "the link to {} broke: {}", link.peer, why.for_engine(native));
        }
        removed
    }

    /// Ends a link that this side no longer wants.
    pub(super) fn drop_link(&self, link: &Arc<Link>, why: &'static str) {
        let _ =
            link.send_control(&ControlMessage::Bye { reason: "the peer unlinked".into(), unlinked: true });
        link.break_off(why);
        self.remove(link, why);
        self.forget_broken(link.peer.cluster);
        self.control.signal();
    }

    /// Discards the record of a broken link to `cluster`: it was unlinked on purpose, which needs no
    /// explanation.
    pub(super) fn forget_broken(&self, cluster: ClusterId) {
        if let Some(ended) = self.entries.lock().ended.get_mut(&cluster) {
            ended.broke = None;
        }
    }

    /// Returns the links to `cluster`.
    pub(super) fn links_to(&self, cluster: ClusterId) -> Vec<Arc<Link>> {
        self.entries.lock().links.get(&cluster).cloned().unwrap_or_default()
    }

    /// Returns the link that calls to `cluster` use: the oldest whose peer gave a sign of life within
    /// `silence_limit`, so that a later link takes no calls from it. If that is a link of a communicator, the
    /// latest such link to the same process is used. Without a recent sign of life, returns the latest link
    /// that is alive. Waits for a communicator that is still preparing the link. Returns `Err` with
    /// `NotLinked` if there is none.
    pub(super) fn find(
        &self,
        cluster: ClusterId,
        silence_limit: Duration,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let mut entries = self.entries.lock();
        loop {
            if let Some(link) = entries.links.get(&cluster).and_then(|all| usable(all, silence_limit)) {
                return Ok(link.clone());
            }
            let preparing = entries.comms.values().find(|comm| comm.prepares(cluster)).cloned();
            let Some(comm) = preparing else { return Err(entries.missing(cluster)) };
            entries =
                self.wait(entries, deadline, "preparing").map_err(|error| comm.unprepared(cluster, error))?;
        }
    }

    /// Returns the link to which a peer's stream belongs.
    pub(super) fn by_id(&self, cluster: ClusterId, instance: u64, id: u64) -> Option<Arc<Link>> {
        let entries = self.entries.lock();
        let all = entries.links.get(&cluster)?;
        all.iter().find(|link| link.id == id && link.peer.incarnation == instance && link.alive()).cloned()
    }

    /// Returns all links, for the control thread. `None` once the engine is closed.
    pub(super) fn all(&self) -> Option<Vec<Arc<Link>>> {
        let entries = self.entries.lock();
        (!entries.closed).then(|| entries.links.values().flatten().cloned().collect())
    }

    /// Whether a link exists or is being made.
    pub(super) fn any(&self) -> bool {
        self.entries.lock().any()
    }

    /// Whether a communicator was ever entered.
    pub(super) fn ranked(&self) -> bool {
        self.entries.lock().last_comm > 0
    }

    /// Registers a new communicator, which `make` creates for a given id. Ids count from 1 and skip the
    /// values of status codes, because callers compare the two. Returns `Err` with `InvalidArgument` if there
    /// are too many communicators.
    pub(super) fn enter(&self, make: impl FnOnce(u64) -> Communicator) -> Result<Arc<Communicator>> {
        let mut entries = self.entries.lock();
        entries.open()?;
        if entries.comms.len() >= MAX_COMMS {
            let error = Error::new(ErrorKind::InvalidArgument, "too many communicators; unlink some");
            return Err(error.with("limit", MAX_COMMS));
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

    /// Removes a communicator. Returns `Err` with `NotLinked` if the id is unknown.
    pub(super) fn leave(&self, id: u64) -> Result<Arc<Communicator>> {
        let comm = self.entries.lock().comms.remove(&id);
        self.changed.notify_all();
        comm.ok_or_else(|| unknown_comm(id))
    }

    /// Returns the progress of a communicator. Returns `Err` with `NotLinked` if the id is unknown.
    pub(super) fn comm_status(&self, id: u64) -> Result<CommStatus> {
        self.entries.lock().comms.get(&id).map(|comm| comm.status()).ok_or_else(|| unknown_comm(id))
    }

    /// Returns the latest communicator that matches `comm`.
    pub(super) fn comm(&self, comm: &Comm) -> Option<Arc<Communicator>> {
        let entries = self.entries.lock();
        entries.comms.values().filter(|known| known.is(comm)).max_by_key(|known| known.id).cloned()
    }

    /// Returns the communicator with the id `id`.
    pub(super) fn comm_by_id(&self, id: u64) -> Option<Arc<Communicator>> {
        self.entries.lock().comms.get(&id).cloned()
    }

    /// Records that a member of a communicator was linked, whichever side dialed.
    pub(super) fn joined(&self, id: u64, cluster: ClusterId) {
        if let Some(comm) = self.comm_by_id(id) {
            comm.join(cluster);
            self.announce();
        }
    }

    /// Wakes the threads that wait for a link, after a communicator has made progress or failed.
    pub(super) fn announce(&self) {
        drop(self.entries.lock());
        self.changed.notify_all();
    }

    /// Ends the pauses of all communicators with the members of `comm`: one of the members is now listening.
    pub(super) fn member_listens(&self, comm: &Comm) {
        let entries = self.entries.lock();
        let known = entries.comms.values().filter(|known| known.same_members(comm)).cloned();
        let known: Vec<_> = known.collect();
        drop(entries);
        for comm in known {
            comm.member_listens();
        }
    }

    /// Ends all links and communicators, and refuses new ones.
    pub(super) fn close(&self) {
        let mut entries = self.entries.lock();
        entries.closed = true;
        let links: Vec<_> = entries.links.drain().flat_map(|(_, all)| all).collect();
        let comms: Vec<_> = entries.comms.drain().map(|(_, comm)| comm).collect();
        drop(entries);
        for comm in comms {
            comm.abandon();
        }
        for link in links {
            let reason = "the peer was closed".into();
            let _ = link.send_control(&ControlMessage::Bye { reason, unlinked: false });
            link.break_off("this engine was closed");
        }
        self.changed.notify_all();
    }

    /// Returns the peer of every link that has not broken.
    pub(super) fn peers(&self) -> Vec<PeerInfo> {
        let entries = self.entries.lock();
        entries
            .links
            .values()
            .flatten()
            .filter(|link| link.alive())
            .map(|link| PeerInfo::clone(&link.peer))
            .collect()
    }

    /// Returns the state of every link.
    pub(super) fn states(&self) -> Vec<LinkState> {
        self.entries.lock().links.values().flatten().map(|link| link.state()).collect()
    }

    /// Sleeps until the registry changes. Releases the lock before it checks whether the caller was
    /// interrupted.
    fn wait<'a>(
        &'a self,
        entries: MutexGuard<'a, Entries>,
        deadline: Deadline,
        doing: &str,
    ) -> Result<MutexGuard<'a, Entries>> {
        drop(self.changed.wait_timeout(entries, deadline.wait_limit()));
        deadline.waiting(doing)?;
        Ok(self.entries.lock())
    }
}

impl Entries {
    fn open(&self) -> Result<()> {
        if self.closed {
            return Err(Error::closed());
        }
        if self.refuses_links {
            return Err(Error::new(ErrorKind::LinkFailed, "the engine is switching its role; try again"));
        }
        Ok(())
    }

    /// Does what [`open`](Self::open) does. A link on demand may be entered a little later.
    fn open_for(&self, kind: Kind) -> Result<()> {
        match self.open() {
            Err(error) if kind == Kind::Ensured && error.kind() == ErrorKind::LinkFailed => {
                Err(Error::new(ErrorKind::AlreadyLinked, error.to_string()))
            }
            open => open,
        }
    }

    /// Returns a link to `cluster` that is [kept](Link::is_kept), and to this instance, if one is given.
    fn kept(&self, cluster: ClusterId, instance: Option<u64>, silence_limit: Duration) -> Option<&Arc<Link>> {
        self.links_of(cluster, instance).find(|link| link.is_kept(silence_limit))
    }

    /// Returns a link to `cluster` that works, and to this instance, if one is given. This side may be unlinking it.
    fn working(
        &self,
        cluster: ClusterId,
        instance: Option<u64>,
        silence_limit: Duration,
    ) -> Option<&Arc<Link>> {
        self.links_of(cluster, instance).find(|link| link.works(silence_limit))
    }

    /// Returns the links to `cluster`, and to this instance, if one is given.
    fn links_of(&self, cluster: ClusterId, instance: Option<u64>) -> impl Iterator<Item = &Arc<Link>> {
        let is_wanted =
            move |link: &&Arc<Link>| instance.is_none_or(|instance| link.peer.incarnation == instance);
        self.links.get(&cluster).into_iter().flatten().filter(is_wanted)
    }

    /// Decides whether this side enters a link on demand that a peer makes. Returns `Err` with `AlreadyLinked` if another
    /// link is kept.
    fn may_enter(&self, link: &Link, own: EngineId, silence_limit: Duration) -> Result<()> {
        let peer = (link.peer.cluster, link.peer.incarnation);
        let linked = self.working(peer.0, Some(peer.1), silence_limit).is_some();
        let refused = dials::decide(linked, self.dials.to(peer), own, peer);
        refused.map_or(Ok(()), |why| Err(Error::new(ErrorKind::AlreadyLinked, why)))
    }

    /// Counts the links that peers or communicators made, except those to `cluster`.
    fn incoming(&self, cluster: ClusterId) -> usize {
        let counts = |link: &&Arc<Link>| link.is_incoming() && link.peer.cluster != cluster;
        self.links.values().flatten().filter(counts).count()
    }

    fn any(&self) -> bool {
        let preparing = || self.comms.values().any(|comm| comm.preparing());
        !self.links.is_empty() || !self.linking.is_empty() || self.dials.any() || preparing()
    }

    fn missing(&self, cluster: ClusterId) -> Error {
        if let Some(link) = self.links.get(&cluster).and_then(|all| all.last())
            && let Err(broke) = link.check()
        {
            return broke;
        }
        let known: Vec<u64> = self.links.keys().map(|id| id.0).take(16).collect();
        let error = match self.ended.get(&cluster) {
            Some(EndedLink { peer, broke: Some((when, why)) }) => return broken(peer, *when, why),
            Some(EndedLink { peer, .. }) => peer
                .named(Error::new(ErrorKind::NotLinked, format!("there is no link to {peer}; link again"))),
            None => {
                Error::new(ErrorKind::NotLinked, "there is no link to this peer").with("cluster", cluster)
            }
        };
        let error = error.with("linked", format_args!("{known:?}"));
        // A member of a communicator whose link has failed.
        let reason = self.comms.values().find_map(|comm| comm.reason(cluster));
        reason.into_iter().fold(error, |error, reason| error.with("because", reason))
    }
}

fn usable(all: &[Arc<Link>], silence_limit: Duration) -> Option<&Arc<Link>> {
    if let [only] = all {
        return only.alive().then_some(only);
    }
    let responsive = |link: &&Arc<Link>| link.alive() && link.control.silent() < silence_limit;
    let Some(oldest) = all.iter().find(responsive) else { return all.iter().rev().find(|link| link.alive()) };
    // Among several communicators with one process, the latest is used (contract §6.5).
    let same_process =
        |link: &&Arc<Link>| responsive(link) && link.peer.incarnation == oldest.peer.incarnation;
    let ranked = |link: &&Arc<Link>| matches!(link.kind, Kind::Communicator(_));
    if ranked(&oldest) {
        all.iter().rev().find(|link| ranked(link) && same_process(link))
    } else {
        Some(oldest)
    }
}

/// Returns the error for a link whose place a working link has.
fn taken(((_, instance), kind): (EngineId, Kind), rival: &Link) -> Error {
    let text = if rival.peer.incarnation == instance {
        format!("{} is linked already, and its link works", rival.peer)
    } else {
        format!("another process has the id of {}: two processes cannot share an id", rival.peer)
    };
    // A link on demand may succeed later: the rival may be a process that has just ended.
    let kind = if kind == Kind::Ensured { ErrorKind::AlreadyLinked } else { ErrorKind::LinkFailed };
    let error = Error::new(kind, text).with(RIVAL_LINK, &rival.peer.address);
    error.with("heard_ms_ago", rival.control.silent().as_millis())
}

fn unknown_comm(id: u64) -> Error {
    Error::new(ErrorKind::NotLinked, "no communicator has this id").with("comm_id", id)
}
