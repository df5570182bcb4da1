//! Limits on what peers may cost this process: numbers of connections, and memory for large requests.
//!
//! The limits on connections follow from the number of descriptors that the process may open. The numbers are
//! published in docs/security.md (`tests/test_hostile_*.py` check them).

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex};

/// Largest request, in bytes, that needs no budget. The number of serving threads bounds the memory of such
/// requests.
const FREE: u64 = 64 << 10;
/// Bytes of large requests, received completely or in part, that one peer and all peers together may have
/// here at a time.
const LARGE: Bounds = Bounds { of_one: 64 << 20, of_all: 192 << 20 };
/// The same for requests of up to [`Bounds::of_one`] bytes. They have their own budget, so that peers that
/// exhaust the other one do not delay usual requests
/// (`test_slow_requests_of_others_do_not_starve_a_long_one`).
const MEDIUM: Bounds = Bounds { of_one: 1 << 20, of_all: 64 << 20 };
/// Bytes per second at which the body of a request must arrive, after the time for which a peer may be
/// silent.
const BODY_RATE: u64 = 8 << 20;

/// The largest number of connections of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connections {
    /// Connections that are not yet a link or a stream of a link.
    pub(super) pending: usize,
    /// Links that peers made.
    pub(super) incoming: usize,
    /// Call streams that peers use over all links, beyond [`Connections::OF_EACH`] for each link.
    pub(super) calls: usize,
}

impl Connections {
    /// Call streams that the peer of a link may always have. More depend on the number used over other links.
    pub(super) const OF_EACH: usize = 1;

    /// Most connections accepted in one go: a fraction of those that may be pending, so that a flood leaves
    /// them time for the handshake.
    pub(super) fn at_once(&self) -> usize {
        (self.pending / 4).max(1)
    }

    /// Returns the limits for this process, derived from its limit of open descriptors (`ulimit -n`).
    pub(super) fn of_this_process() -> Connections {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Connections::of(usize::try_from(descriptors).unwrap_or(usize::MAX))
    }

    fn of(descriptors: usize) -> Connections {
        Connections {
            pending: (descriptors / 16).clamp(4, 256),
            incoming: (descriptors.saturating_sub(48) / 4).clamp(4, 4096),
            calls: (descriptors / 8).clamp(8, 8192),
        }
    }
}

/// The budget for one size class of requests, in bytes.
#[derive(Debug)]
struct Bounds {
    of_one: u64,
    of_all: u64,
}

/// The size classes that have a budget, in the order of the counts.
const CLASSES: [Bounds; 2] = [MEDIUM, LARGE];

/// The bytes in use by requests of all peers, for each size class.
#[derive(Debug, Default)]
pub(super) struct Budget {
    used: Mutex<[u64; 2]>,
    freed: Condvar,
}

/// The part of the budget that one peer uses.
#[derive(Debug)]
pub(super) struct PeerBudget {
    all: Arc<Budget>,
    used: Mutex<[u64; 2]>,
}

/// A share of the budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    /// The peer, the size class and the number of bytes.
    of: Option<(Arc<PeerBudget>, usize, u64)>,
}

impl PeerBudget {
    pub(super) fn new(all: &Arc<Budget>) -> Arc<PeerBudget> {
        Arc::new(PeerBudget { all: all.clone(), used: Mutex::default() })
    }

    /// Waits until a request of `bytes` fits. Returns the share of the budget, and the deadline by which all
    /// of the request must have arrived from a peer that may be silent for `silence`. Returns `Err` with
    /// `OutOfMemory` if it does not fit by then.
    pub(super) fn admit(
        self: &Arc<Self>,
        bytes: usize,
        silence: Duration,
    ) -> Result<(BudgetShare, Deadline)> {
        let bytes = bytes as u64;
        let until = Deadline::after(silence + Duration::from_secs(bytes / BODY_RATE))
            .named("the time limit of a request body");
        if bytes <= FREE {
            return Ok((BudgetShare { of: None }, until));
        }
        let class = usize::from(bytes > MEDIUM.of_one);
        let Bounds { of_one, of_all } = CLASSES[class];
        let mut all = self.all.used.lock();
        // Both counts change only under the lock of the first one.
        while all[class] + bytes > of_all || self.used.lock()[class] + bytes > of_one {
            if until.passed() {
                let used = self.used.lock()[class];
                let text = "the peer, or all peers together, have too many unfinished requests";
                return Err(Error::new(ErrorKind::OutOfMemory, text)
                    .with("bytes", bytes)
                    .with("used_by_peer", used)
                    .with("limit_of_peer", of_one)
                    .with("limit_of_all", of_all));
            }
            all = self.all.freed.wait_timeout(all, until.left()).0;
        }
        all[class] += bytes;
        self.used.lock()[class] += bytes;
        drop(all);
        Ok((BudgetShare { of: Some((self.clone(), class, bytes)) }, until))
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        let Some((peer, class, bytes)) = self.of.take() else { return };
        let mut all = peer.all.used.lock();
        all[class] -= bytes;
        peer.used.lock()[class] -= bytes;
        drop(all);
        peer.all.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn connections_leave_room_for_the_application() {
        for (descriptors, pending, incoming, calls) in
            [(64, 4, 4, 8), (1024, 64, 244, 128), (1 << 20, 256, 4096, 8192)]
        {
            let expected = Connections { pending, incoming, calls };
            assert_eq!(Connections::of(descriptors), expected, "of {descriptors}");
            // A link on one host uses two descriptors, plus one for the call stream that it may always have.
            let taken = pending + (2 + Connections::OF_EACH) * incoming + calls;
            assert!(taken <= descriptors * 15 / 16, "{taken} of {descriptors}");
        }
    }

    #[test]
    fn peers_have_a_budget_each_and_one_together_by_class() {
        let all = Arc::new(Budget::default());
        let peers: Vec<_> = (0..4).map(|_| PeerBudget::new(&all)).collect();
        let now = Duration::ZERO;
        assert!(peers[0].admit(64 << 10, now).unwrap().0.of.is_none(), "small requests are free");
        let large: Vec<_> = peers[..3].iter().map(|peer| peer.admit(60 * MIB, now).unwrap()).collect();
        assert_eq!(*all.used.lock(), [0, 180 << 20]);
        // A medium request does not wait for large ones, but a peer may have only one medium request of this
        // size at a time.
        let medium = peers[0].admit(MIB, now).unwrap();
        assert_eq!(peers[0].admit(MIB, now).unwrap_err().kind(), ErrorKind::OutOfMemory);
        let _other = peers[1].admit(MIB / 2, now).unwrap();
        drop(medium);
        let _again = peers[0].admit(MIB, now).unwrap();
        drop(large);
        let (_whole, _) = peers[3].admit(64 * MIB, now).unwrap();
        assert_eq!(*all.used.lock(), [3 << 19, 64 << 20]);
    }
}
