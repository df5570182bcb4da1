//! Links on demand: one call makes the link to an address, or finds the one that there is (`ensure_link`).
//!
//! `dials` explains which connection is kept when both sides dial.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::io::Errno;

use super::control_thread;
use super::establish::LinkRequest;
use super::link::{Kind, Link, check_name};
use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::events::PeerInfo;
use crate::model::Deadline;
use crate::net::Address;
use crate::protocol::MAX_METADATA;

/// Shortest and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// Connection errors while a peer is starting or briefly unreachable.
const MAY_PASS: [Errno; 10] = [
    Errno::CONNREFUSED,
    Errno::CONNRESET,
    Errno::CONNABORTED,
    Errno::TIMEDOUT,
    Errno::HOSTUNREACH,
    Errno::HOSTDOWN,
    Errno::NETUNREACH,
    Errno::NETDOWN,
    Errno::ADDRNOTAVAIL,
    Errno::PIPE,
];

/// Checks the length of the metadata of a program.
pub(crate) fn check_metadata(metadata: &[u8]) -> Result<()> {
    let allowed = format!("at most {MAX_METADATA} bytes");
    ensure(metadata.len() <= MAX_METADATA, || Error::argument("len(metadata)", metadata.len(), allowed))
}

/// A link that is made later, or found. Does not keep the engine alive.
pub(crate) struct LinkOnDemand {
    pub(super) shared: Weak<Shared>,
    pub(super) address: SocketAddr,
    /// The name that the engine must have, if it is given.
    pub(super) name: Option<String>,
}

impl LinkOnDemand {
    /// Makes the link, and returns the peer. Calls `commit` before this side enters a new link; if that fails, there is
    /// none. An attempt that fails for a reason that may pass is repeated until `deadline`.
    pub(crate) fn make(&self, commit: &dyn Fn() -> Result<()>, deadline: Deadline) -> Result<PeerInfo> {
        let shared = self.shared.upgrade().ok_or_else(Error::closed)?;
        let request =
            LinkRequest { name: self.name.as_deref(), commit, ..LinkRequest::new(None, Kind::Ensured) };
        let made = self.make_before(&shared, &request, deadline);
        // The link may have been there before, or the peer may have made it.
        let made = made.and_then(|link| check_name(&link.peer, self.name.as_deref()).map(|()| link));
        made.map(|link| PeerInfo::clone(&link.peer)).map_err(|error| {
            let cluster = request.reached.get().map(|(cluster, _)| cluster);
            let error = cluster.into_iter().fold(error, |error, cluster| error.with("cluster", cluster));
            error.with("address", self.address)
        })
    }

    fn make_before(
        &self,
        shared: &Arc<Shared>,
        request: &LinkRequest<'_>,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        control_thread::start(shared)?;
        let mut pause = PAUSES.0;
        loop {
            request.reached.set(None);
            let error = match shared.connect(&Address::Tcp(self.address), request, deadline) {
                Ok(link) => return Ok(link),
                Err(error) => error,
            };
            if !may_pass(&error) {
                return Err(error);
            }
            // The peer may have made the link, and may listen nowhere.
            let wanted = request.reached.get().map(|(cluster, instance)| (cluster, Some(instance)));
            if let Some(link) =
                shared.registry.await_link(wanted, shared.silence_limit(), deadline.at_most(pause))?
            {
                return Ok(link);
            }
            deadline.waiting("linking").map_err(|late| {
                if error.kind() == ErrorKind::Timeout { error.clone() } else { late.because(error.clone()) }
            })?;
            pause = (2 * pause).min(PAUSES.1);
        }
    }
}

/// Whether another attempt may succeed. A peer that refuses for good, for example because of its token, sends a refusal
/// of kind `LinkFailed` or `InvalidArgument`. A lack of local resources is for the caller to decide.
fn may_pass(error: &Error) -> bool {
    if error.is_shortage() {
        return false;
    }
    let errno = || error.fact("errno").and_then(|number| number.parse().ok()).map(Errno::from_raw_os_error);
    match error.kind() {
        // The peer keeps another link; it closed the connection; it dropped the connection because it took too long.
        ErrorKind::AlreadyLinked | ErrorKind::NotLinked | ErrorKind::Timeout => true,
        ErrorKind::LinkFailed => errno().is_some_and(|errno| MAY_PASS.contains(&errno)),
        _ => false,
    }
}
