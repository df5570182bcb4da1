//! What peers may cost this process: bounds derived from the descriptors it may open, and a budget for large requests.
//!
//! The numbers are published in docs/security.md (`tests/test_hostile_peers.py` holds the engine to them). Not for: bounds
//! of one request (`peer`), or how much of a peer's memory is mapped (`reach`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;

/// A request of up to so many bytes needs no part of the budget, so that peers which use it up keep no usual request
/// waiting (`test_slow_requests_of_others_do_not_starve_a_long_one`). The number of serving threads bounds these.
const FREE: u64 = 1 << 20;
/// Bytes of requests that one peer may have here at a time, received whole or in part.
const OF_ONE: u64 = 64 << 20;
/// Bytes of requests that all peers together may have here.
const OF_ALL: u64 = 256 << 20;
/// Bytes a second at which the body of a request has to arrive, after the time that every peer may be silent for.
const BODY_RATE: u64 = 8 << 20;

/// How many connections there may be of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connections {
    /// Connections that are not yet a link or a stream of one.
    pub(super) newcomers: usize,
    /// Links that peers made.
    pub(super) incoming: usize,
    /// Streams of all links on which peers call, beyond [`Connections::OF_EACH`] of each.
    pub(super) calls: usize,
}

impl Connections {
    /// Streams that a link may always have for its peer's calls; more depend on what other links have.
    pub(super) const OF_EACH: usize = 1;

    /// What the limit of open descriptors (`ulimit -n`) leaves room for.
    pub(super) fn of_this_process() -> Connections {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Connections::of(usize::try_from(descriptors).unwrap_or(usize::MAX))
    }

    fn of(descriptors: usize) -> Connections {
        Connections {
            newcomers: (descriptors / 16).clamp(4, 256),
            incoming: (descriptors.saturating_sub(48) / 4).clamp(4, 4096),
            calls: (descriptors / 8).clamp(8, 8192),
        }
    }
}

/// The bytes of large requests of all peers.
#[derive(Debug, Default)]
pub(super) struct Budget {
    used: Mutex<u64>,
    freed: Condvar,
}

/// The part of the budget that one peer uses.
#[derive(Debug)]
pub(super) struct PeerBudget {
    all: Arc<Budget>,
    used: Mutex<u64>,
}

/// Part of a budget, given back on drop.
#[derive(Debug)]
pub(crate) struct Held {
    of: Option<(Arc<PeerBudget>, u64)>,
}

impl PeerBudget {
    pub(super) fn new(all: &Arc<Budget>) -> Arc<PeerBudget> {
        Arc::new(PeerBudget { all: all.clone(), used: Mutex::default() })
    }

    /// Waits until a request of `bytes` fits, and says until when all of it must have arrived from a peer that may be
    /// silent for `silence`.
    pub(super) fn admit(self: &Arc<Self>, bytes: usize, silence: Duration) -> Result<(Held, Deadline)> {
        let bytes = bytes as u64;
        let until = Deadline::after(silence + Duration::from_secs(bytes / BODY_RATE))
            .named("the time that the body of a request is given");
        if bytes <= FREE {
            return Ok((Held { of: None }, until));
        }
        let mut all = locked(&self.all.used);
        // Both counts change under the lock of the first only.
        while *all + bytes > OF_ALL || *locked(&self.used) + bytes > OF_ONE {
            if until.passed() {
                let used = *locked(&self.used);
                let text = "the peer has too many unfinished requests";
                return Err(Error::new(ErrorKind::OutOfMemory, text)
                    .with("bytes", bytes)
                    .with("used_by_peer", used)
                    .with("limit_of_peer", OF_ONE)
                    .with("limit_of_all", OF_ALL));
            }
            all = self.all.freed.wait_timeout(all, until.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        *all += bytes;
        *locked(&self.used) += bytes;
        drop(all);
        Ok((Held { of: Some((self.clone(), bytes)) }, until))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some((peer, bytes)) = self.of.take() else { return };
        let mut all = locked(&peer.all.used);
        *all -= bytes;
        *locked(&peer.used) -= bytes;
        drop(all);
        peer.all.freed.notify_all();
    }
}

fn locked(count: &Mutex<u64>) -> MutexGuard<'_, u64> {
    count.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn connections_leave_room_for_the_application() {
        for (descriptors, newcomers, incoming, calls) in
            [(64, 4, 4, 8), (1024, 64, 244, 128), (1 << 20, 256, 4096, 8192)]
        {
            let expected = Connections { newcomers, incoming, calls };
            assert_eq!(Connections::of(descriptors), expected, "of {descriptors}");
            // A link inside one host takes two descriptors, and another for the stream that it may always have.
            let taken = newcomers + (2 + Connections::OF_EACH) * incoming + calls;
            assert!(taken <= descriptors * 15 / 16, "{taken} of {descriptors}");
        }
    }

    #[test]
    fn peers_have_a_budget_each_and_one_together() {
        let all = Arc::new(Budget::default());
        let peers: Vec<_> = (0..5).map(|_| PeerBudget::new(&all)).collect();
        let now = Duration::ZERO;
        let (first, _) = peers[0].admit(40 * MIB, now).unwrap();
        assert_eq!(locked(&all.used).to_owned(), 40 << 20);
        assert!(peers[0].admit(MIB, now).unwrap().0.of.is_none(), "small requests are free");
        let held: Vec<_> = peers[1..4].iter().map(|peer| peer.admit(60 * MIB, now).unwrap()).collect();
        drop(first);
        let (_whole, _) = peers[0].admit(64 * MIB, now).unwrap();
        drop(held);
        assert_eq!(locked(&all.used).to_owned(), 64 << 20);
    }
}
