//! The least pace at which a peer has to move bytes, so that one that stalls does not hold rows and threads for long.
//!
//! Not for: deadlines of calls, which apply besides (`id::Deadline`).

use std::time::{Duration, Instant};

/// How far the peer of one stream has come since its pace was last found good.
#[derive(Debug)]
pub struct Pace {
    limit: Duration,
    since: Instant,
    moved: u64,
}

impl Pace {
    /// Bytes that have to move within the limit, unless fewer remain.
    pub const LEAST: u64 = 64 << 10;

    pub(super) fn new(limit: Duration) -> Self {
        Pace { limit, since: Instant::now(), moved: 0 }
    }

    /// A transfer begins: the peer has all of its time again.
    pub(super) fn begin(&mut self) {
        (self.since, self.moved) = (Instant::now(), 0);
    }

    /// Notes bytes that moved.
    pub(super) fn moved(&mut self, bytes: u64) {
        self.moved = self.moved.saturating_add(bytes);
        if self.moved >= Self::LEAST {
            self.begin();
        }
    }

    /// How long the peer still has.
    pub(super) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.since.elapsed())
    }

    /// Bytes that moved since the pace was last good, and the time they were given.
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
        pace.moved(Pace::LEAST - 1);
        assert_eq!((pace.left(), pace.facts().0), (Duration::ZERO, Pace::LEAST - 1));
        let mut pace = Pace::new(Duration::from_secs(3600));
        let before = pace.since;
        pace.moved(Pace::LEAST - 1);
        assert_eq!(pace.since, before);
        pace.moved(1);
        assert!(pace.since > before && pace.facts().0 == 0);
    }
}
