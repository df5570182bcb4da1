//! Chooses how many ready layers one request pushes.
//!
//! Layers queue up if they are computed faster than they are pushed. The messages for a small layer cost as much as its bytes, so
//! one request pushes several layers. A request must stay short compared with the limit of a layer, because all its layers are
//! reported together, at its end.

use std::time::Duration;

/// Maximum expected time of a request that pushes several layers. The messages take less than 1 % of it, so a longer request saves
/// almost nothing.
const MAX_TIME: Duration = Duration::from_millis(10);
/// Minimum ratio of the time that is left for a layer to the expected time of such a request.
const SHARE_OF_LIMIT: u32 = 8;

/// Bytes in the next request, derived from the time that the last request took.
#[derive(Debug, Default)]
pub(super) struct RunLength {
    /// Bytes and time of the last request, if there was one.
    last: Option<(u64, Duration)>,
}

impl RunLength {
    /// Returns the maximum number of bytes of a request for several layers, of which the first one must be in place when `left`
    /// has passed. It is 0 before the first request.
    pub(super) fn max_bytes(&self, left: Duration) -> u64 {
        let Some((bytes, took)) = self.last else { return 0 };
        let longest = MAX_TIME.min(left / SHARE_OF_LIMIT).as_nanos();
        let most = u128::from(bytes).saturating_mul(longest) / took.as_nanos().max(1);
        u64::try_from(most).unwrap_or(u64::MAX)
    }

    /// Adapts to a request that pushed `bytes` bytes in `took`.
    pub(super) fn learn(&mut self, bytes: u64, took: Duration) {
        self.last = Some((bytes, took));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_several_layers_stay_short() {
        let (second, us) = (Duration::from_secs(1), Duration::from_micros);
        assert_eq!(RunLength::default().max_bytes(second), 0, "the first request pushes one layer");
        // (time that is left, bytes of the last request, its time) → bytes of the next one
        for (left, bytes, took, most) in [
            (second, 100, us(1000), 1000),
            (second, 400, us(4000), 1000),
            (second, 100, us(20_000), 50),
            (us(8000), 100, us(250), 400),
            (us(8000), 100, us(2000), 50),
            (Duration::ZERO, 100, us(1), 0),
            (Duration::MAX, 100, us(100), 10_000),
            (second, 7, Duration::ZERO, 70_000_000),
            (second, u64::MAX, us(1), u64::MAX),
            (second, 0, us(1), 0),
        ] {
            let mut run = RunLength::default();
            run.learn(bytes, took);
            assert_eq!(run.max_bytes(left), most, "{left:?}, {bytes} bytes in {took:?}");
        }
    }
}
