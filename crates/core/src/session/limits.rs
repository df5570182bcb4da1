//! What peers may cost this process: bounds derived from the descriptors it may open, and a budget for large requests.
//!
//! The numbers are published in docs/security.md (`tests/test_hostile_peers.py` holds the engine to them). Not for: bounds
//! of one request (`peer`), or how much of a peer's memory is mapped (`reach`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;

/// A request of up to so many bytes needs no part of a budget: what the serving threads hold at most is bounded by their
/// number.
const FREE: u64 = 64 << 10;
/// Bytes of requests that one peer, and all peers together, may have here at a time, received whole or in part.
const LARGE: Bounds = Bounds { of_one: 64 << 20, of_all: 192 << 20 };
/// The same for requests of up to [`Bounds::of_one`] bytes, which have a budget of their own, so that peers which use up the
/// other keep no usual request waiting (`test_slow_requests_of_others_do_not_starve_a_long_one`).
const MEDIUM: Bounds = Bounds { of_one: 1 << 20, of_all: 64 << 20 };
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

    /// Connections that are accepted in one go: few of those that may greet, so that a flood leaves them time to.
    pub(super) fn at_once(&self) -> usize {
        (self.newcomers / 4).max(1)
    }

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

/// What requests of one size class may take.
#[derive(Debug)]
struct Bounds {
    of_one: u64,
    of_all: u64,
}

/// The size classes that have a budget, in the order of the counts.
const CLASSES: [Bounds; 2] = [MEDIUM, LARGE];

/// The bytes of requests of all peers, by class.
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

/// Part of a budget, given back on drop.
#[derive(Debug)]
pub(crate) struct Held {
    /// Whose, in which class, and how many bytes.
    of: Option<(Arc<PeerBudget>, usize, u64)>,
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
        let class = usize::from(bytes > MEDIUM.of_one);
        let Bounds { of_one, of_all } = CLASSES[class];
        let mut all = locked(&self.all.used);
        // Both counts change under the lock of the first only.
        while all[class] + bytes > of_all || locked(&self.used)[class] + bytes > of_one {
            if until.passed() {
                let used = locked(&self.used)[class];
                let text = "the peer, or all peers together, have too many unfinished requests";
                return Err(Error::new(ErrorKind::OutOfMemory, text)
                    .with("bytes", bytes)
                    .with("used_by_peer", used)
                    .with("limit_of_peer", of_one)
                    .with("limit_of_all", of_all));
            }
            all = self.all.freed.wait_timeout(all, until.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        all[class] += bytes;
        locked(&self.used)[class] += bytes;
        drop(all);
        Ok((Held { of: Some((self.clone(), class, bytes)) }, until))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some((peer, class, bytes)) = self.of.take() else { return };
        let mut all = locked(&peer.all.used);
        all[class] -= bytes;
        locked(&peer.used)[class] -= bytes;
        drop(all);
        peer.all.freed.notify_all();
    }
}

fn locked(counts: &Mutex<[u64; 2]>) -> MutexGuard<'_, [u64; 2]> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn peers_have_a_budget_each_and_one_together_by_class() {
        let all = Arc::new(Budget::default());
        let peers: Vec<_> = (0..4).map(|_| PeerBudget::new(&all)).collect();
        let now = Duration::ZERO;
        assert!(peers[0].admit(64 << 10, now).unwrap().0.of.is_none(), "small requests are free");
        let large: Vec<_> = peers[..3].iter().map(|peer| peer.admit(60 * MIB, now).unwrap()).collect();
        assert_eq!(*locked(&all.used), [0, 180 << 20]);
        // A medium one waits for no large one, but only one of a peer is there at a time.
        let medium = peers[0].admit(MIB, now).unwrap();
        assert_eq!(peers[0].admit(MIB, now).unwrap_err().kind(), ErrorKind::OutOfMemory);
        let _other = peers[1].admit(MIB / 2, now).unwrap();
        drop(medium);
        let _again = peers[0].admit(MIB, now).unwrap();
        drop(large);
        let (_whole, _) = peers[3].admit(64 * MIB, now).unwrap();
        assert_eq!(*locked(&all.used), [3 << 19, 64 << 20]);
    }
}
