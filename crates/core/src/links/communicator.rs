//! Communicators: links by a rank table, which both sides ask for and none is first.
//!
//! Of two members the one of higher rank dials and the other listens; both keep at it until they have met or
//! `link_total_time` has passed. A member that was here before and comes back is let in again, and looked for again if
//! it is the one that listens (clients.md §3.2, rules 5 and 6). Not for: reading the table (`check`).

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Shared;
use super::link::{Kind, Link};
use crate::check::ranks::RankEnd;
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ClusterId, Deadline};
use crate::transport::Address;
use crate::wire::Comm;

/// Most communicators of one process (python-api.md §16).
pub(super) const MOST: usize = 512;
/// Limit of one try to reach one address.
const TRY: Duration = Duration::from_secs(2);
/// Rest between two rounds of tries: short at first, because peers often start together.
const RESTS: std::ops::RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_secs(1);

/// How far a communicator is. Once ready or failed it stays so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommStatus {
    /// Members are still missing.
    Preparing,
    /// Every member was met.
    Ready,
    /// Some were not, in time.
    Failed,
}

/// One communicator.
pub(super) struct Communicator {
    id: u64,
    comm: Comm,
    own: ClusterId,
    /// All members, this one included.
    ends: Vec<RankEnd>,
    limit: Duration,
    progress: Mutex<Progress>,
    changed: Condvar,
}

struct Progress {
    missing: Vec<ClusterId>,
    status: CommStatus,
    /// This side has left it.
    left: bool,
    /// A thread is looking for members.
    looking: bool,
    /// The last thing that went wrong with each.
    why: BTreeMap<ClusterId, String>,
}

/// Enters a communicator, and starts looking for its members.
pub(super) fn enter(shared: &Arc<Shared>, comm: Comm, ends: Vec<RankEnd>) -> Result<u64> {
    let own = ClusterId(shared.me.party.cluster);
    let others = ends.iter().map(|end| end.cluster).filter(|&cluster| cluster != own);
    let progress = Progress {
        missing: others.collect(),
        status: CommStatus::Preparing,
        left: false,
        looking: false,
        why: BTreeMap::new(),
    };
    let limit = shared.cluster.config.links.total;
    let entered = shared.state.enter(|id| Communicator {
        id,
        comm,
        own,
        ends,
        limit,
        progress: Mutex::new(progress),
        changed: Condvar::new(),
    })?;
    let begun = listen(shared, &entered).and_then(|()| look(shared, &entered));
    if let Err(error) = begun {
        let _ = leave(shared, entered.id);
        return Err(error);
    }
    Ok(entered.id)
}

/// Leaves a communicator and ends its links.
pub(super) fn leave(shared: &Arc<Shared>, id: u64) -> Result<()> {
    let comm = shared.state.leave(id)?;
    comm.abandon();
    for end in &comm.ends {
        for link in shared.state.of(end.cluster) {
            if link.kind() == Kind::Communicator(id) {
                shared.drop_link(&link, "it was unlinked here");
            }
        }
    }
    if let Some(listener) = shared.state.take_other(&comm.local_address(comm.own)) {
        listener.close();
    }
    Ok(())
}

/// A member has linked, whichever side dialled.
pub(super) fn joined(shared: &Arc<Shared>, id: u64, cluster: ClusterId) {
    if let Some(comm) = shared.state.comm_by_id(id) {
        comm.join(cluster);
        shared.state.announce();
    }
}

/// A link of a communicator broke: where this side dials, it looks for the member again.
pub(super) fn mend(shared: &Arc<Shared>, link: &Arc<Link>) {
    let Kind::Communicator(id) = link.kind() else { return };
    let Some(comm) = shared.state.comm_by_id(id) else { return };
    if !comm.dials(link.peer().cluster) {
        return;
    }
    comm.locked().missing.push(link.peer().cluster);
    if let Err(error) = look(shared, &comm) {
        shared.state.note(format!("cluster {} is not looked for again: {error}", link.peer().cluster));
    }
}

/// Listens where members of higher rank will look: at the port of this one's device, and at a local socket.
fn listen(shared: &Arc<Shared>, comm: &Communicator) -> Result<()> {
    let Some(own) = comm.ends.iter().find(|end| end.cluster == comm.own) else { return Ok(()) };
    if comm.ends.iter().all(|end| end.rank <= own.rank) {
        return Ok(());
    }
    let local = comm.local_address(comm.own);
    let near = shared.cluster.config.links.transport != TransportChoice::Tcp;
    if near && !shared.state.listens_at(&local) {
        match shared.listen_at(&local) {
            Ok(listener) => shared.state.put_other(local, listener),
            Err(error) => {
                shared.state.note(format!("no local socket for link({:?}): {error}", comm.comm.name));
            }
        }
    }
    let asked = Address::Tcp(own.bind);
    if shared.state.listens_at(&asked) {
        return Ok(());
    }
    let mut refused = None;
    // The ports that the others will try, in their order; the host may go by an address that is not its own (behind a
    // translation of addresses), then any will do.
    for ip in [own.bind.ip(), any(own.bind.ip())] {
        for at in &own.host {
            match shared.listen_at(&Address::Tcp(SocketAddr::new(ip, at.port()))) {
                Ok(listener) => {
                    shared.state.put_other(asked, listener);
                    return Ok(());
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
    }
    let error = refused.unwrap_or_else(|| Error::new(ErrorKind::LinkFailed, "there is no port to listen at"));
    if near && error.kind() != ErrorKind::Closed {
        let text = format!("link({:?}) is open to members of this host only: {error}", comm.comm.name);
        shared.state.note(text);
        return Ok(());
    }
    Err(error.with("chosen_by", own.why))
}

/// Any address of the same family.
fn any(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Starts the thread that looks for members, unless there is one.
fn look(shared: &Arc<Shared>, comm: &Arc<Communicator>) -> Result<()> {
    let mut progress = comm.locked();
    if std::mem::replace(&mut progress.looking, true) {
        drop(progress);
        comm.changed.notify_all();
        return Ok(());
    }
    drop(progress);
    let (weak, looking) = (Arc::downgrade(shared), comm.clone());
    let deadline = Deadline::after(comm.limit).named("link_total_time");
    shared.threads.spawn("llm-comm", move || {
        let mut rest = *RESTS.start();
        while let Some(shared) = weak.upgrade() {
            if !looking.round(&shared, deadline) {
                break;
            }
            drop(shared);
            looking.rest(rest.min(deadline.left()));
            rest = (rest * 2).min(*RESTS.end());
        }
        looking.locked().looking = false;
        if let Some(shared) = weak.upgrade() {
            looking.finish(&shared);
        }
    })
}

impl Communicator {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whether it goes by that name and has these members.
    pub(super) fn is(&self, comm: &Comm) -> bool {
        self.comm == *comm
    }

    pub(super) fn status(&self) -> CommStatus {
        self.locked().status
    }

    /// Whether members are still missing for the first time.
    pub(super) fn preparing(&self) -> bool {
        self.status() == CommStatus::Preparing
    }

    /// Whether it may still bring a link to `cluster`.
    pub(super) fn prepares(&self, cluster: ClusterId) -> bool {
        self.preparing() && self.locked().missing.contains(&cluster)
    }

    /// The error of a call that waited for it in vain.
    #[cold]
    pub(super) fn unprepared(&self, cluster: ClusterId, error: Error) -> Error {
        if error.kind() != ErrorKind::Timeout {
            return error;
        }
        let text =
            format!("the link to cluster {cluster} by link({:?}) is still being prepared", self.comm.name);
        let why =
            self.locked().why.get(&cluster).cloned().unwrap_or_else(|| "the member has not shown up".into());
        Error::new(ErrorKind::NotLinked, text).with("comm_id", self.id).with("because", why)
    }

    /// This side leaves.
    pub(super) fn abandon(&self) {
        self.locked().left = true;
        self.changed.notify_all();
    }

    fn join(&self, cluster: ClusterId) {
        let mut progress = self.locked();
        progress.missing.retain(|&missing| missing != cluster);
        if progress.missing.is_empty() && progress.status == CommStatus::Preparing {
            progress.status = CommStatus::Ready;
        }
        drop(progress);
        self.changed.notify_all();
    }

    /// Whether this side dials to `cluster`: the higher rank does.
    fn dials(&self, cluster: ClusterId) -> bool {
        let rank = |id| self.ends.iter().find(|end| end.cluster == id).map(|end| end.rank);
        rank(cluster) < rank(self.own)
    }

    /// Tries every missing member that this side dials; whether it is worth another round.
    fn round(&self, shared: &Arc<Shared>, deadline: Deadline) -> bool {
        let missing = self.locked().missing.clone();
        for end in self.ends.iter().filter(|end| missing.contains(&end.cluster) && self.dials(end.cluster)) {
            match self.reach(shared, end, deadline) {
                Ok(()) => {
                    self.join(end.cluster);
                    shared.state.announce();
                }
                Err(error) => {
                    self.locked().why.insert(end.cluster, error.to_string());
                }
            }
        }
        let progress = self.locked();
        !progress.left && !progress.missing.is_empty() && !deadline.passed()
    }

    /// Tries the addresses at which a member may be.
    fn reach(&self, shared: &Arc<Shared>, end: &RankEnd, deadline: Deadline) -> Result<()> {
        let local = (shared.cluster.config.links.transport != TransportChoice::Tcp)
            .then(|| self.local_address(end.cluster));
        let mut first = None;
        for address in local.into_iter().chain(end.host.iter().map(|&at| Address::Tcp(at))) {
            if self.locked().left {
                break;
            }
            let limit = Deadline::after(TRY.min(deadline.left())).named("the limit of one try");
            let kind = Kind::Communicator(self.id);
            let Err(error) = shared.connect(&address, end.cluster, Some(&self.comm), kind, limit) else {
                return Ok(());
            };
            // The further ports are of no use where the host itself does not answer.
            let silent = error.kind() == ErrorKind::Timeout;
            if matches!(address, Address::Tcp(_)) {
                first = first.or(Some(error.with("chosen_by", end.why)));
            }
            if silent {
                break;
            }
        }
        Err(first.unwrap_or_else(|| Error::new(ErrorKind::LinkFailed, "the member has no address")))
    }

    fn rest(&self, rest: Duration) {
        let progress = self.locked();
        if !progress.left {
            drop(self.changed.wait_timeout(progress, rest));
        }
    }

    /// Says what came of the search.
    fn finish(&self, shared: &Arc<Shared>) {
        let mut progress = self.locked();
        if progress.status != CommStatus::Preparing || progress.missing.is_empty() || progress.left {
            return;
        }
        progress.status = CommStatus::Failed;
        let view: Vec<String> =
            progress.missing.iter().map(|cluster| self.view(*cluster, &progress.why)).collect();
        drop(progress);
        let text = format!(
            "link({:?}) failed after {} ms: {}",
            self.comm.name,
            self.limit.as_millis(),
            view.join("; ")
        );
        shared.state.note(text);
        shared.state.announce();
    }

    /// What was tried for one member, for people.
    fn view(&self, cluster: ClusterId, why: &BTreeMap<ClusterId, String>) -> String {
        let Some(end) = self.ends.iter().find(|end| end.cluster == cluster) else {
            return cluster.to_string();
        };
        let at: Vec<String> = end.host.iter().map(ToString::to_string).collect();
        let way = if self.dials(cluster) { "was looked for at" } else { "did not come; it would listen at" };
        let last = why.get(&cluster).map_or(String::new(), |why| format!(" (last: {why})"));
        format!("cluster {cluster}, rank {}, {way} {}, chosen by {}{last}", end.rank, at.join(" "), end.why)
    }

    /// Where `listener` meets members of its host: a name that all of them can work out.
    fn local_address(&self, listener: ClusterId) -> Address {
        // Not a secret: whoever takes the name still has to greet.
        let mut hash = DefaultHasher::new();
        (&self.comm.name, &self.comm.members, listener).hash(&mut hash);
        Address::Unix(format!("llm_datadist.comm.{:016x}", hash.finish()))
    }

    fn locked(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
