//! Links on demand: one call makes the link to an address, or finds the one that there is (`ensure_link`).
//!
//! A call that finds a link that works returns it at once: heartbeats show that its peer lives, so nothing is sent. Calls for one
//! address with the same name that dial at once share the attempt (`link_attempts`). `dials` explains which connection is kept
//! when both sides dial.

use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::io::Errno;

use super::control_thread;
use super::establish::LinkRequest;
use super::link::{Kind, Link, check_name};
use super::link_attempts::{AttemptEnd, LinkTarget};
use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::events::PeerInfo;
use crate::model::{Deadline, WhileRefused};
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
    pub(super) target: LinkTarget,
}

impl LinkOnDemand {
    /// Returns the peer if there is a link that works to the engine that an earlier call has found at the address, and the engine
    /// has the name. Neither waits nor asks the peer.
    pub(crate) fn find(&self) -> Option<PeerInfo> {
        let shared = self.shared.upgrade()?;
        let link = shared.registry.found_at(&self.target, shared.silence_limit())?;
        Some(PeerInfo::clone(&link.peer))
    }

    /// Makes the link, and returns the peer. Calls `commit` before this side enters a new link; if that fails, there is
    /// none. Repeats an attempt that fails for a temporary reason until `deadline`; `while_refused` decides about refused connections.
    pub(crate) fn make(
        &self,
        commit: &dyn Fn() -> Result<()>,
        while_refused: WhileRefused,
        deadline: Deadline,
    ) -> Result<PeerInfo> {
        let shared = self.shared.upgrade().ok_or_else(Error::closed)?;
        let (address, name) = (self.target.0, self.target.1.as_deref());
        let request = LinkRequest { name, commit, ..LinkRequest::new(None, Kind::Ensured) };
        let made = self.make_before(&shared, &request, while_refused, deadline);
        // The link may have been there before, or the peer may have made it.
        let made = made.and_then(|link| check_name(&link.peer, name).map(|()| link));
        made.map(|link| PeerInfo::clone(&link.peer)).map_err(|error| {
            let cluster = request.reached.get().map(|(cluster, _)| cluster);
            let error = cluster.into_iter().fold(error, |error, cluster| error.with("cluster", cluster));
            error.with("address", address)
        })
    }

    /// Makes the link, and repeats an attempt that may succeed later. `request.reached` is the engine that the last attempt
    /// reached.
    fn make_before(
        &self,
        shared: &Arc<Shared>,
        request: &LinkRequest<'_>,
        while_refused: WhileRefused,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        control_thread::start(shared)?;
        let attempt = || {
            request.reached.set(None);
            // An attempt that has just ended may have made the link.
            if let Some(link) = shared.registry.found_at(&self.target, shared.silence_limit()) {
                return AttemptEnd::Linked(link);
            }
            match shared.connect(&Address::Tcp(self.target.0), request, deadline) {
                Ok(link) => AttemptEnd::Linked(self.found(link)),
                Err(error) => AttemptEnd::Failed(error, request.reached.get()),
            }
        };
        let mut pause = PAUSES.0;
        loop {
            let error = match shared.attempts.share(&self.target, deadline, attempt)? {
                AttemptEnd::Linked(link) => return Ok(link),
                AttemptEnd::Failed(error, reached) => {
                    request.reached.set(reached);
                    error
                }
            };
            let refused = error.own_errno() == Some(Errno::CONNREFUSED);
            if !may_pass(&error) || (refused && while_refused == WhileRefused::Fail) {
                return Err(error);
            }
            // The peer may have made the link, and may listen nowhere.
            let wanted = request.reached.get().map(|(cluster, instance)| (cluster, Some(instance)));
            if let Some(link) =
                shared.registry.await_link(wanted, shared.silence_limit(), deadline.at_most(pause))?
            {
                return Ok(self.found(link));
            }
            deadline.waiting("linking").map_err(|late| {
                if error.kind() == ErrorKind::Timeout { error.clone() } else { late.because(error.clone()) }
            })?;
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    /// Notes that the engine at the address is the peer of `link`, as its handshake has shown.
    fn found(&self, link: Arc<Link>) -> Arc<Link> {
        // A link keeps the first of several addresses of its peer. Calls for the others dial.
        let _ = link.found_at.set(self.target.0);
        link
    }
}

/// Whether another attempt may succeed. A peer that refuses for good, for example because of its token, sends a refusal
/// of kind `LinkFailed` or `InvalidArgument`. A lack of local resources is for the caller to decide.
fn may_pass(error: &Error) -> bool {
    if error.is_shortage() {
        return false;
    }
    match error.kind() {
        // The peer keeps another link; it closed the connection; it dropped the connection because it took too long.
        ErrorKind::AlreadyLinked | ErrorKind::NotLinked | ErrorKind::Timeout => true,
        ErrorKind::LinkFailed => error.own_errno().is_some_and(|errno| MAY_PASS.contains(&errno)),
        _ => false,
    }
}
