//! How many layers one request pushes, if several are ready.
//!
//! Layers wait if they are computed faster than they are pushed. The messages for a layer cost as much as the bytes of a small
//! one, so one request pushes several. It must stay short compared with the limit of a layer, because a layer of a longer
//! request is in place later than it would be alone.

use std::time::Duration;

/// Maximum time of a request for several layers. Its messages take less than a hundredth of this, so a longer one saves nothing.
const LONGEST: Duration = Duration::from_millis(10);
/// Minimum ratio of the limit of a layer to that time.
const SHARE_OF_LIMIT: u32 = 8;

/// The number of layers in the next request, by the time of the last one.
#[derive(Debug)]
pub(super) struct RunLength {
    longest: Duration,
    most: u32,
}

impl RunLength {
    /// Begins with a single layer, whose limit is `limit`.
    pub(super) fn new(limit: Duration) -> Self {
        RunLength { longest: LONGEST.min(limit / SHARE_OF_LIMIT), most: 1 }
    }

    /// Returns the maximum number of layers in the next request.
    pub(super) fn most(&self) -> u32 {
        self.most
    }

    /// Learns that `layers` layers took this long.
    pub(super) fn learn(&mut self, layers: u32, took: Duration) {
        let each = (took / layers.max(1)).as_nanos().max(1);
        self.most = u32::try_from(self.longest.as_nanos() / each).unwrap_or(u32::MAX).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_stay_short() {
        let (second, us) = (Duration::from_secs(1), Duration::from_micros);
        // (limit of a layer, layers of the last request, its time) → layers of the next one, by hand
        for (limit, layers, took, most) in [
            (second, 1, us(1000), 10),
            (second, 4, us(4000), 10),
            (second, 1, us(9_999), 1),
            (second, 1, us(20_000), 1),
            (us(8000), 1, us(250), 4),
            (us(8000), 1, us(1001), 1),
            (Duration::ZERO, 1, us(1), 1),
            (Duration::MAX, 0, us(100), 100),
            (second, 1, Duration::ZERO, 10_000_000),
        ] {
            let mut run = RunLength::new(limit);
            assert_eq!(run.most(), 1, "a request of unknown duration");
            run.learn(layers, took);
            assert_eq!(run.most(), most, "{limit:?}, {layers} layers in {took:?}");
        }
    }
}
