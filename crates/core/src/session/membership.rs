//! Entering and leaving a communicator: its listeners, its search and its links.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::communicator::{CommState, Communicator};
use super::link::{Kind, UNLINKED_HERE};
use super::member_search::start_search;
use super::shared::Shared;
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::model::ClusterId;
use crate::net::Address;
use crate::protocol::Comm;
use crate::sync::{Condvar, Mutex};
use crate::validate::rank_table::{RankMember, any};

/// Longest time of one attempt to reach one address. It is shorter if `link_retry_count` attempts would not
/// fit into `link_total_time`.
const TRY: Duration = Duration::from_secs(2);

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
                link.begin_unlink();
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

/// Listens at the first of `places` that is available, until the communicator is left.
fn open(
    shared: &Arc<Shared>,
    comm: &Communicator,
    asked: &Address,
    places: impl IntoIterator<Item = Address>,
) -> Result<()> {
    shared.listeners.join(asked, places)?;
    let mut progress = comm.progress.lock();
    if !progress.left {
        progress.listening_at.push(asked.clone());
        return Ok(());
    }
    drop(progress);
    shared.listeners.leave(asked);
    Err(Error::new(ErrorKind::NotLinked, "the communicator was unlinked").with("comm_id", comm.id))
}
