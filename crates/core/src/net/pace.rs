//! The minimum pace at which a peer must move bytes, so that a stalled peer does not hold rows and threads
//! for long. It applies in addition to the deadlines of calls.

use std::time::{Duration, Instant};

/// Progress of the peer of one stream since its pace was last sufficient.
#[derive(Debug)]
pub struct Pace {
    limit: Duration,
    since: Instant,
    moved: u64,
}

impl Pace {
    /// Bytes that must move within the limit, unless fewer remain.
    pub const MIN_BYTES: u64 = 64 << 10;

    pub(super) fn new(limit: Duration) -> Self {
        Pace { limit, since: Instant::now(), moved: 0 }
    }

    /// Gives the peer its full time again, because a transfer begins.
    pub(super) fn begin(&mut self) {
        (self.since, self.moved) = (Instant::now(), 0);
    }

    /// Counts bytes that moved. [`MIN_BYTES`](Self::MIN_BYTES) of them give the peer its full time again.
    pub(super) fn add(&mut self, bytes: u64) {
        self.moved = self.moved.saturating_add(bytes);
        if self.moved >= Self::MIN_BYTES {
            self.begin();
        }
    }

    /// Returns the time that the peer still has.
    pub(super) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.since.elapsed())
    }

    /// Returns the bytes that moved since the pace was last sufficient, and the limit.
    pub(super) fn facts(&self) -> (u64, Duration) {
        (self.moved, self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_enough_bytes_give_the_peer_its_time_again() {
        let mut pace = Pace::new(Duration::ZERO);
        pace.add(Pace::MIN_BYTES - 1);
        assert_eq!((pace.left(), pace.facts().0), (Duration::ZERO, Pace::MIN_BYTES - 1));
        let mut pace = Pace::new(Duration::from_secs(3600));
        let before = pace.since;
        pace.add(Pace::MIN_BYTES - 1);
        assert_eq!(pace.since, before);
        pace.add(1);
        assert!(pace.since > before && pace.facts().0 == 0);
    }
}
