//! Limits on what peers may cost this process: numbers of connections, and the time of a request.
//!
//! The limits on connections follow from the number of descriptors that the process may open. The numbers are
//! published in docs/security.md (`tests/test_hostile_*.py` check them).

use std::time::Duration;

use rustix::process::{Resource, getrlimit};

/// Bytes per second at which the body of a request must arrive, after the time for which a peer may be
/// silent.
const BODY_RATE: u64 = 8 << 20;
/// A frame above this size takes memory for its content before it arrives.
const LONG_FRAME: usize = 1 << 20;

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
            pending: (descriptors / 16).clamp(16, 256),
            incoming: (descriptors.saturating_sub(48) / 4).clamp(4, 4096),
            calls: (descriptors / 8).clamp(8, 8192),
        }
    }
}

/// Bytes that the 65,536 spans of a plan, and their check, take beyond twice the length of their message.
const SPANS: u64 = 4 << 20;

/// Returns how many bytes to take from the budget, beside its frame, for a frame of `bytes` bytes that is about to arrive. What
/// a long message contains, and what it takes to check a plan, is at most twice as long as the message, and 4 MiB
/// (`a_plan_takes_a_bounded_multiple_of_its_bytes`, `the_spans_of_a_plan_take_bounded_memory`), so it need not be refused after it
/// has arrived.
pub(super) fn ahead(bytes: usize) -> u64 {
    if bytes > LONG_FRAME { 2 * bytes as u64 + SPANS } else { 0 }
}

/// Returns the time within which the body of a request must arrive from a peer that may be silent for `silence`.
pub(super) fn body_time(bytes: usize, silence: Duration) -> Duration {
    silence + Duration::from_secs(bytes as u64 / BODY_RATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_the_application() {
        for (descriptors, pending, incoming, calls) in
            [(64, 16, 4, 8), (128, 16, 20, 16), (1024, 64, 244, 128), (1 << 20, 256, 4096, 8192)]
        {
            let expected = Connections { pending, incoming, calls };
            assert_eq!(Connections::of(descriptors), expected, "of {descriptors}");
            // A link on one host uses two descriptors, plus one for the call stream that it may always have.
            let taken = pending + (2 + Connections::OF_EACH) * incoming + calls;
            assert!(taken <= descriptors * 15 / 16, "{taken} of {descriptors}");
        }
    }
}
