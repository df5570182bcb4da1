//! The members of a communicator: entering and leaving it, its listeners, and the search for the other members.
//!
//! The member with the higher rank dials repeatedly until `link_total_time` has passed. A member that was
//! linked before and is gone is searched for without a time limit, with longer pauses.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::communicator::{CommState, CommStatus, Communicator, FailedAttempt};
use super::dial::ANSWERED_AS;
use super::establish::LinkRequest;
use super::link::{EndReason, Kind, Link, UNLINKED_HERE};
use super::shared::Shared;
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::net::Address;
use crate::protocol::{Comm, Purpose};
use crate::sync::{Condvar, Mutex};
use crate::validate::rank_table::{RankMember, any};

/// Longest time of one attempt to reach one address. It is shorter if `link_retry_count` attempts would not
/// fit into `link_total_time`.
const TRY: Duration = Duration::from_secs(2);
/// Shortest and longest pause between two rounds of attempts. Pauses start short, because peers often start
/// together.
const PAUSES: std::ops::RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_secs(1);
/// Longest pause after `link_total_time` has passed, while a member that was linked before is gone.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Enters a communicator, starts searching for its members, and returns its id.
pub(super) fn enter(shared: &Arc<Shared>, comm: Comm, members: Vec<RankMember>) -> Result<u64> {
    let own = ClusterId(shared.me.party.cluster);
    let others = members.iter().map(|member| member.cluster).filter(|&cluster| cluster != own);
    let progress = CommState { missing: others.collect(), ..CommState::default() };
    let config = &shared.resources.config.links;
    let (limit, one_try) = (config.total, TRY.min(config.total / config.retries.max(1)));
    let entered = shared.registry.enter(|id| Communicator {
        id,
        comm,
        own,
        members,
        limit,
        one_try,
        progress: Mutex::new(progress),
        changed: Condvar::new(),
    })?;
    let begun = listen(shared, &entered).and_then(|()| start_search(shared, &entered));
    if let Err(error) = begun {
        let _ = leave(shared, entered.id);
        return Err(error);
    }
    Ok(entered.id)
}

/// Leaves a communicator and ends its links.
pub(super) fn leave(shared: &Arc<Shared>, id: u64) -> Result<()> {
    let comm = shared.registry.leave(id)?;
    for address in comm.abandon() {
        shared.listeners.leave(&address);
    }
    for member in &comm.members {
        for link in shared.registry.links_to(member.cluster) {
            if link.kind == Kind::Communicator(id) {
                link.calls.begin_unlink();
                shared.registry.drop_link(&link, UNLINKED_HERE);
            }
        }
    }
    Ok(())
}

/// Listens where other members will dial: at a local socket and, if a member has a higher rank, at a port of
/// this member's device.
fn listen(shared: &Arc<Shared>, comm: &Communicator) -> Result<()> {
    let Some(own) = comm.members.iter().find(|member| member.cluster == comm.own) else { return Ok(()) };
    let config = &shared.resources.config.links;
    let by_socket = config.transport != TransportChoice::Tcp;
    if by_socket {
        let local = comm.local_address(own, config.token.as_ref());
        if let Err(error) = open(shared, comm, &local, [local.clone()]) {
            let name = &comm.comm.name;
            tracing::warn!(target: "llm_datadist::links", "no local socket for link({name:?}): {error}");
        }
    }
    if comm.members.iter().all(|member| member.rank <= own.rank) {
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

/// Listens at the first of `addresses` that is available, until the communicator is left.
fn open(
    shared: &Arc<Shared>,
    comm: &Communicator,
    asked: &Address,
    addresses: impl IntoIterator<Item = Address>,
) -> Result<()> {
    shared.listeners.join(asked, addresses)?;
    let mut progress = comm.progress.lock();
    if !progress.left {
        progress.listening_at.push(asked.clone());
        return Ok(());
    }
    drop(progress);
    shared.listeners.leave(asked);
    Err(Error::new(ErrorKind::NotLinked, "the communicator was unlinked").with("comm_id", comm.id))
}

/// Handles a peer that ended but may return: if its link belongs to a communicator and this side dials, it
/// searches for the peer again.
pub(super) fn link_died(shared: &Arc<Shared>, link: &Arc<Link>, why: impl Into<EndReason>) {
    if !shared.registry.lost(link, why) {
        return;
    }
    let Kind::Communicator(id) = link.kind else { return };
    let Some(comm) = shared.registry.comm_by_id(id) else { return };
    if !comm.dials(link.peer.cluster) {
        return;
    }
    comm.miss(link.peer.cluster);
    if let Err(error) = start_search(shared, &comm) {
        let cluster = link.peer.cluster;
        tracing::error!(target: "llm_datadist::links", "stopped searching for cluster {cluster}; call link again: {error}");
    }
}

/// Starts the search thread, or wakes it if it is running.
fn start_search(shared: &Arc<Shared>, comm: &Arc<Communicator>) -> Result<()> {
    if std::mem::replace(&mut comm.progress.lock().searching, true) {
        comm.changed.notify_all();
        return Ok(());
    }
    let (weak, searching) = (Arc::downgrade(shared), comm.clone());
    let started = shared.threads.spawn("llm-search", move || {
        let deadline = Deadline::after(searching.limit).named("link_total_time");
        let (mut rest, mut reported) = (*PAUSES.start(), false);
        if let Some(shared) = weak.upgrade() {
            searching.announce_listening(&shared, deadline);
        }
        while let Some(shared) = weak.upgrade() {
            let began = Instant::now();
            searching.round(&shared, deadline);
            if !searching.goes_on(&shared, deadline, &mut reported) {
                return;
            }
            drop(shared);
            let most = if reported { MAX_PAUSE } else { (*PAUSES.end()).min(deadline.left()) };
            let woken = searching.rest(rest.min(most));
            // Keeps a minimum interval between rounds, however often members end the pause.
            std::thread::sleep(PAUSES.start().saturating_sub(began.elapsed()));
            rest = if woken { *PAUSES.start() } else { (rest * 2).min(MAX_PAUSE) };
        }
    });
    // Callers that asked meanwhile assumed that a search was running. None is, so the next caller tries again
    // and gets the error.
    started.map_err(|error| {
        comm.progress.lock().searching = false;
        Error::no_thread("the thread llm-search", error)
    })
}

impl Communicator {
    /// Whether this side dials `cluster`: the member with the higher rank does.
    fn dials(&self, cluster: ClusterId) -> bool {
        let rank = |id| self.members.iter().find(|member| member.cluster == id).map(|member| member.rank);
        rank(cluster) < rank(self.own)
    }

    /// Notifies the members on this host that dial this one that it is listening now. They may have started
    /// first and be in a pause (`announcement_ends_the_pause`).
    fn announce_listening(&self, shared: &Arc<Shared>, deadline: Deadline) {
        let config = &shared.resources.config.links;
        if config.transport == TransportChoice::Tcp {
            return;
        }
        let dialing = |member: &&RankMember| member.cluster != self.own && !self.dials(member.cluster);
        for member in self.members.iter().filter(dialing) {
            let dialer = shared.dialer(self.local_address(member, config.token.as_ref()));
            let limit = Deadline::after(self.one_try.min(deadline.left())).named("the limit of one attempt");
            // A member that is not running yet will find this side listening.
            let _ =
                dialer.handshake(Some(member.cluster), Purpose::Announce { comm: self.at(member) }, limit);
        }
    }

    /// Tries each missing member that this side dials.
    fn round(&self, shared: &Arc<Shared>, deadline: Deadline) {
        let missing = self.progress.lock().missing.clone();
        let dialed = |member: &&RankMember| missing.contains(&member.cluster) && self.dials(member.cluster);
        for member in self.members.iter().filter(dialed) {
            match self.connect_to(shared, member, deadline) {
                Ok(link) => {
                    self.join(member.cluster);
                    // The link may have broken before the member was recorded as linked.
                    if !link.alive() {
                        self.miss(member.cluster);
                    }
                    shared.registry.announce();
                }
                // The two configurations do not match, so further attempts are useless.
                Err(error) if is_useless(&error, member.cluster) => {
                    self.note(member.cluster, &error);
                    self.fail(member.cluster, &error.original().to_string());
                    shared.registry.announce();
                }
                Err(error) => self.note(member.cluster, &error),
            }
        }
    }

    /// Whether to make another round. If not, the search is marked as ended. Once the first limit has passed,
    /// members that were never linked are given up, and the others are searched for without a time limit
    /// (`a_member_that_returns_after_the_limit_is_linked_again`).
    fn goes_on(&self, shared: &Arc<Shared>, deadline: Deadline, reported: &mut bool) -> bool {
        let mut progress = self.progress.lock();
        let late = deadline.passed() && !progress.left && !progress.missing.is_empty() && !*reported;
        let note = late.then(|| self.report(&progress));
        if late {
            *reported = true;
            if progress.status == CommStatus::Preparing {
                progress.status = CommStatus::Failed;
            }
            let CommState { missing, linked_before, .. } = &mut *progress;
            missing.retain(|cluster| linked_before.contains(cluster) && self.dials(*cluster));
        }
        let continues = !progress.left && !progress.missing.is_empty();
        progress.searching = continues;
        drop(progress);
        if let Some(note) = note {
            tracing::error!(target: "llm_datadist::links", "{note}");
            shared.registry.announce();
        }
        continues
    }

    /// Tries the addresses at which a member may listen.
    fn connect_to(&self, shared: &Arc<Shared>, member: &RankMember, deadline: Deadline) -> Result<Arc<Link>> {
        let config = &shared.resources.config.links;
        let local = (config.transport != TransportChoice::Tcp)
            .then(|| self.local_address(member, config.token.as_ref()));
        let comm = self.at(member);
        let mut first = None;
        for address in local.into_iter().chain(member.host.iter().map(|&at| Address::Tcp(at))) {
            if self.progress.lock().left {
                break;
            }
            // Half of the remaining time, so that one unresponsive process leaves time for the next port.
            let left = if deadline.passed() { self.limit } else { deadline.left() };
            let limit = Deadline::after(self.one_try.min(left / 2)).named("the limit of one attempt");
            let kind = Kind::Communicator(self.id);
            let request = LinkRequest::new(Some(member.cluster), kind);
            let request = LinkRequest { comm: Some(&comm), ..request };
            let error = match shared.connect(&address, &request, limit) {
                Ok(link) => return Ok(link),
                Err(error) => error,
            };
            if is_useless(&error, member.cluster) {
                return Err(error.with("chosen_by", member.why));
            }
            // If the host does not answer, its other ports need no attempt. An unrelated process may accept
            // the connection at this port and stay silent; that says nothing about the other ports.
            let silent = error.kind() == ErrorKind::Timeout && error.fact("address").is_some();
            // Another process may have refused, so the other addresses are tried too. Its reason says more than an address where
            // no process listens.
            let (tcp, permanent) = (matches!(address, Address::Tcp(_)), error.is_permanent());
            if permanent && first.as_ref().is_none_or(|first: &Error| !first.is_permanent())
                || tcp && first.is_none()
            {
                first = Some(error.with("chosen_by", member.why));
            }
            if silent {
                break;
            }
        }
        Err(first.unwrap_or_else(|| Error::new(ErrorKind::LinkFailed, "the member has no address")))
    }

    /// Pauses for `rest`. Returns whether the pause was ended early.
    fn rest(&self, rest: Duration) -> bool {
        let mut progress = self.progress.lock();
        if progress.left || std::mem::take(&mut progress.member_listens) {
            return true;
        }
        let (mut progress, rested) = self.changed.wait_timeout(progress, rest);
        std::mem::take(&mut progress.member_listens) || !rested
    }

    /// Returns the result of the search, for the log.
    fn report(&self, progress: &CommState) -> String {
        let view: Vec<String> =
            progress.missing.iter().map(|cluster| self.view(*cluster, &progress.why)).collect();
        let what = match progress.status {
            CommStatus::Preparing => "failed",
            CommStatus::Ready | CommStatus::Failed => "has lost members and still searches for them",
        };
        format!("link({:?}) {what} after {} ms: {}", self.comm.name, self.limit.as_millis(), view.join("; "))
    }

    /// Returns what was tried for one member, for the log.
    fn view(&self, cluster: ClusterId, why: &BTreeMap<ClusterId, FailedAttempt>) -> String {
        let Some(member) = self.members.iter().find(|member| member.cluster == cluster) else {
            return cluster.to_string();
        };
        let at: Vec<String> = member.host.iter().map(ToString::to_string).collect();
        let way =
            if self.dials(cluster) { "was searched for at" } else { "did not connect; it would listen at" };
        let reason =
            why.get(&cluster).map_or(String::new(), |attempt| format!(" (reason: {})", attempt.text));
        let (rank, why) = (member.rank, member.why);
        format!("cluster {cluster}, rank {rank}, {way} {}, chosen by {why}{reason}", at.join(" "))
    }
}

/// Whether only another configuration can link the two members: `member` has entered the communicator and refuses, or this side
/// refuses the process that answers as `member`. Any other process may answer at an address at which the member may listen.
fn is_useless(error: &Error, member: ClusterId) -> bool {
    let answered = || error.fact(ANSWERED_AS).is_some_and(|cluster| cluster == member.to_string());
    error.kind() == ErrorKind::InvalidArgument || error.is_permanent() && answered()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::communicator::tests::communicator;

    #[test]
    fn announcement_ends_the_pause() {
        let missing = vec![ClusterId(2)];
        let waiting = communicator(CommState { missing, searching: true, ..CommState::default() });
        let hour = Duration::from_secs(3600);
        assert!(!waiting.rest(Duration::ZERO), "nobody has come");
        // Before the pause, and during it.
        waiting.member_listens();
        assert!(waiting.rest(hour));
        std::thread::scope(|scope| {
            let rested = scope.spawn(|| waiting.rest(hour));
            waiting.member_listens();
            assert!(rested.join().unwrap());
        });
    }
}
