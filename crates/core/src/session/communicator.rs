//! Communicators: the links between all members of a rank table, for which every member calls `link`.
//!
//! Of two members, the one with the higher rank dials, and the other listens. Both try until they are linked
//! or `link_total_time` has passed. A member that was linked before and returns is admitted again; if it is
//! the listening one, this side also searches for it again. The search is in `member_search`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::Shared;
use super::link::Kind;
use super::member_search::look;
use crate::config::{Token, TransportChoice};
use crate::error::{Error, ErrorKind, Result};
use crate::model::ClusterId;
use crate::net::Address;
use crate::protocol::Comm;
use crate::validate::rank_table::RankEnd;

/// Most communicators of one process (contract §16).
pub(super) const MOST: usize = 512;
/// Longest time of one attempt to reach one address. It is shorter if `link_retry_count` attempts would not
/// fit into `link_total_time`.
const TRY: Duration = Duration::from_secs(2);
/// The progress of a communicator. `Ready` and `Failed` are final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommStatus {
    /// Not all members have been linked yet.
    Preparing,
    /// Every member has been linked.
    Ready,
    /// A member could not be linked in time, or can never be linked.
    Failed,
}

/// One communicator.
pub(super) struct Communicator {
    pub(super) id: u64,
    pub(super) comm: Comm,
    pub(super) own: ClusterId,
    /// All members, including this one.
    pub(super) ends: Vec<RankEnd>,
    /// Time limit of the first search.
    pub(super) limit: Duration,
    /// Time limit of one attempt.
    pub(super) one_try: Duration,
    pub(super) progress: Mutex<Progress>,
    pub(super) changed: Condvar,
}

/// The mutable state of a communicator.
pub(super) struct Progress {
    /// Members that are awaited or searched for now.
    pub(super) missing: Vec<ClusterId>,
    /// Members that have been linked at least once.
    pub(super) met: Vec<ClusterId>,
    /// The addresses at which this side listens for the communicator.
    pub(super) doors: Vec<Address>,
    pub(super) status: CommStatus,
    /// Whether this side has left the communicator.
    pub(super) left: bool,
    /// Whether a thread searches for members.
    pub(super) looking: bool,
    /// Whether a member has reported, since the last check, that it is listening.
    pub(super) knocked: bool,
    /// The latest failure for each member.
    pub(super) why: BTreeMap<ClusterId, String>,
}

/// Enters a communicator, starts searching for its members, and returns its id.
pub(super) fn enter(shared: &Arc<Shared>, comm: Comm, ends: Vec<RankEnd>) -> Result<u64> {
    let own = ClusterId(shared.me.party.cluster);
    let others = ends.iter().map(|end| end.cluster).filter(|&cluster| cluster != own);
    let progress = Progress {
        missing: others.collect(),
        met: vec![],
        doors: vec![],
        status: CommStatus::Preparing,
        left: false,
        looking: false,
        knocked: false,
        why: BTreeMap::new(),
    };
    let config = &shared.cluster.config.links;
    let (limit, one_try) = (config.total, TRY.min(config.total / config.retries.max(1)));
    let entered = shared.state.enter(|id| Communicator {
        id,
        comm,
        own,
        ends,
        limit,
        one_try,
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
    for door in comm.abandon() {
        shared.listeners.leave(shared, &door);
    }
    for end in &comm.ends {
        for link in shared.state.of(end.cluster) {
            if link.kind() == Kind::Communicator(id) {
                shared.drop_link(&link, "it was unlinked here");
            }
        }
    }
    Ok(())
}

/// Records that a member was linked, whichever side dialed.
pub(super) fn joined(shared: &Arc<Shared>, id: u64, cluster: ClusterId) {
    if let Some(comm) = shared.state.comm_by_id(id) {
        comm.join(cluster);
        shared.state.announce();
    }
}

/// Listens where other members will dial: at a local socket and, if a member has a higher rank, at a port of
/// this member's device.
fn listen(shared: &Arc<Shared>, comm: &Communicator) -> Result<()> {
    let Some(own) = comm.ends.iter().find(|end| end.cluster == comm.own) else { return Ok(()) };
    let config = &shared.cluster.config.links;
    let by_socket = config.transport != TransportChoice::Tcp;
    if by_socket {
        let local = comm.local_address(own, config.token.as_ref());
        if let Err(error) = open(shared, comm, &local, [local.clone()]) {
            let name = &comm.comm.name;
            tracing::warn!(target: "llm_datadist::links", "no local socket for link({name:?}): {error}");
        }
    }
    if comm.ends.iter().all(|end| end.rank <= own.rank) {
        return Ok(());
    }
    // The ports that other members try, in the same order.
    let at = |ip: IpAddr| own.host.iter().map(move |at| Address::Tcp(SocketAddr::new(ip, at.port())));
    let ip = own.bind.ip();
    let asked = Address::Tcp(own.bind);
    let Err(error) = open(shared, comm, &asked, at(ip)) else { return Ok(()) };
    let elsewhere = error.fact("errno") == Some(&rustix::io::Errno::ADDRNOTAVAIL.raw_os_error().to_string());
    let proven = config.token.is_some() || config.accept_remote;
    let error = if elsewhere && proven {
        // The address of this member in the table does not belong to this host (container, network address
        // translation). Listen on all addresses: peers must authenticate with a token, or every peer is
        // admitted.
        tracing::warn!(
            target: "llm_datadist::links",
            "link({:?}) listens on all interfaces: {ip} (chosen by {}) is no address of this host",
            comm.comm.name,
            own.why
        );
        let Err(error) = open(shared, comm, &asked, at(any(ip))) else { return Ok(()) };
        error
    } else {
        error
    };
    if by_socket && error.kind() != ErrorKind::Closed {
        tracing::warn!(
            target: "llm_datadist::links",
            "link({:?}) is open to members of this host only: {error}",
            comm.comm.name
        );
        return Ok(());
    }
    Err(error.with("chosen_by", own.why))
}

/// Listens at the first of `places` that is available, until the communicator is left.
fn open(
    shared: &Arc<Shared>,
    comm: &Communicator,
    asked: &Address,
    places: impl IntoIterator<Item = Address>,
) -> Result<()> {
    shared.listeners.join(shared, asked, places)?;
    let mut progress = comm.locked();
    if !progress.left {
        progress.doors.push(asked.clone());
        return Ok(());
    }
    drop(progress);
    shared.listeners.leave(shared, asked);
    Err(Error::new(ErrorKind::NotLinked, "the communicator was left").with("comm_id", comm.id))
}

/// Returns the entry of a member in the table and its first port, which distinguishes jobs on one host that
/// use the same names.
fn with_port(end: &RankEnd) -> String {
    let port = end.host.first().map_or(0, SocketAddr::port);
    format!("{} at {port}", end.description)
}

/// Returns the unspecified address of the same family.
fn any(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

impl Communicator {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whether `comm` has the same name and members, and names this member as the listener.
    pub(super) fn is(&self, comm: &Comm) -> bool {
        let own = self.ends.iter().find(|end| end.cluster == self.own);
        let here = |own: &RankEnd| comm.listener == own.description || comm.listener == with_port(own);
        (&self.comm.name, &self.comm.members) == (&comm.name, &comm.members) && own.is_some_and(here)
    }

    /// Whether `comm` has the same name and members.
    pub(super) fn same_members(&self, comm: &Comm) -> bool {
        (&self.comm.name, &self.comm.members) == (&comm.name, &comm.members)
    }

    /// Records that a member is listening, and ends the pause of the search.
    pub(super) fn knocked(&self) {
        self.locked().knocked = true;
        self.changed.notify_all();
    }

    /// Marks the communicator as failed because a member can never be linked.
    pub(super) fn fail(&self, cluster: ClusterId, why: &str) {
        let mut progress = self.locked();
        // The peer that was refused may not be a member, or may have been linked before.
        if progress.status != CommStatus::Preparing || !progress.missing.contains(&cluster) {
            return;
        }
        progress.missing.retain(|&missing| missing != cluster);
        progress.why.insert(cluster, why.to_owned());
        progress.status = CommStatus::Failed;
        drop(progress);
        tracing::error!(
            target: "llm_datadist::links",
            "link({:?}) failed: cluster {cluster} cannot be linked: {why}",
            self.comm.name
        );
        self.changed.notify_all();
    }

    /// Returns the communicator as sent to `listener`. A port from this side's configuration is left out,
    /// because it may differ at the listener behind a network address translation.
    pub(super) fn at(&self, listener: &RankEnd) -> Comm {
        let text = if listener.configured { listener.description.clone() } else { with_port(listener) };
        Comm { listener: text, ..self.comm.clone() }
    }

    pub(super) fn status(&self) -> CommStatus {
        self.locked().status
    }

    /// Whether members have not been linked for the first time yet.
    pub(super) fn preparing(&self) -> bool {
        self.status() == CommStatus::Preparing
    }

    /// Whether it may still make a link to `cluster`.
    pub(super) fn prepares(&self, cluster: ClusterId) -> bool {
        self.preparing() && self.locked().missing.contains(&cluster)
    }

    /// Adds the state of the communicator to the timeout `error` of a call that waited for it. Returns other
    /// errors unchanged.
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

    /// Marks the communicator as left, and returns the addresses at which this side listened.
    pub(super) fn abandon(&self) -> Vec<Address> {
        let mut progress = self.locked();
        progress.left = true;
        let doors = std::mem::take(&mut progress.doors);
        drop(progress);
        self.changed.notify_all();
        doors
    }

    /// Records that a member was linked.
    pub(super) fn join(&self, cluster: ClusterId) {
        let mut progress = self.locked();
        progress.missing.retain(|&missing| missing != cluster);
        if !progress.met.contains(&cluster) {
            progress.met.push(cluster);
        }
        if progress.met.len() + 1 == self.ends.len() && progress.status == CommStatus::Preparing {
            progress.status = CommStatus::Ready;
        }
        drop(progress);
        self.changed.notify_all();
    }

    /// Records that a linked member is gone.
    pub(super) fn miss(&self, cluster: ClusterId) {
        let mut progress = self.locked();
        if !progress.missing.contains(&cluster) {
            progress.missing.push(cluster);
        }
    }

    /// Returns the local socket at which `listener` waits for members on its host; all members compute the
    /// same name. Without a token the name contains the user id, so that other users do not take it by
    /// accident. With a token only processes that know the token can compute it.
    pub(super) fn local_address(&self, listener: &RankEnd, token: Option<&Token>) -> Address {
        let Comm { name, members, .. } = &self.comm;
        let text = format!("{name:?} {members:?} {} {}", listener.cluster, with_port(listener));
        let digest = match token.and_then(|token| Hmac::<Sha256>::new_from_slice(token.bytes()).ok()) {
            Some(mut mac) => {
                mac.update(b"local socket ");
                mac.update(text.as_bytes());
                mac.finalize().into_bytes()
            }
            None => Sha256::digest(text.as_bytes()),
        };
        let user = match token {
            Some(_) => "token".to_owned(),
            None => rustix::process::geteuid().as_raw().to_string(),
        };
        let mut name = format!("llm_datadist.{user}.comm.");
        for byte in &digest[..16] {
            // Writing to a `String` cannot fail.
            let _ = write!(name, "{byte:02x}");
        }
        Address::Unix(name)
    }

    pub(super) fn locked(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
