//! Which of two paths has been faster lately: rings, or a read by process id.
//!
//! The speed of rings varies by a factor of ten on some machines, for a reason that is not known (`benches/results/log.md`). A read
//! by process id is usually slower, but steady. So a link compares them: most transfers use the path that has been faster, and a
//! few use the other one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::paths::PathKind;

/// One in this many transfers uses the slower path, so that a change is noticed. It is odd, so that it is not always the same layer
/// of a model.
const COMPARE_EVERY: u64 = 31;

/// The recent times of both paths, for transfers in one direction over one link.
#[derive(Debug, Default)]
pub struct FasterPath {
    transfers: AtomicU64,
    /// Nanoseconds for one MiB, or 0 if unknown.
    rings_time: AtomicU64,
    process_time: AtomicU64,
}

impl FasterPath {
    /// Returns whether the next transfer should use rings. Before a read by process id has been noted, this assumes that rings are
    /// faster.
    pub fn rings_next(&self) -> bool {
        let (rings, process) =
            (self.rings_time.load(Ordering::Relaxed), self.process_time.load(Ordering::Relaxed));
        let compares = self.transfers.fetch_add(1, Ordering::Relaxed) % COMPARE_EVERY == COMPARE_EVERY - 1;
        let faster = process == 0 || rings <= process;
        faster != compares
    }

    /// Notes that a transfer of `bytes` bytes took `time`. Ignores other paths than these two.
    pub fn note(&self, path: PathKind, bytes: u64, time: Duration) {
        let (recent, other) = match path {
            PathKind::Rings => (&self.rings_time, &self.process_time),
            PathKind::Process => (&self.process_time, &self.rings_time),
            _ => return,
        };
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let now = nanos.saturating_mul(1 << 20) / bytes.max(1);
        let before = recent.load(Ordering::Relaxed);
        // One transfer that waited, for example for rows, must not decide for long.
        let known = before.max(other.load(Ordering::Relaxed));
        let now = if known == 0 { now } else { now.min(known.saturating_mul(4)) };
        // Transfers that end at the same time may lose a note, which does not matter.
        recent.store(if before == 0 { now } else { before / 2 + now / 2 }.max(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const EACH: u64 = COMPARE_EVERY;

    /// Runs `count` transfers that take these microseconds, and returns how many of them used rings.
    fn run(paths: &FasterPath, count: u64, rings: u64, process: u64) -> u64 {
        let mut by_rings = 0;
        for _ in 0..count {
            let (path, micros) =
                if paths.rings_next() { (PathKind::Rings, rings) } else { (PathKind::Process, process) };
            paths.note(path, MIB / 2, Duration::from_micros(micros));
            by_rings += u64::from(path == PathKind::Rings);
        }
        by_rings
    }

    #[test]
    fn few_transfers_use_the_slower_path() {
        for (rings, process, expected) in [(40, 90, EACH - 1), (450, 90, 1), (90, 90, EACH - 1)] {
            let paths = FasterPath::default();
            assert_eq!(run(&paths, EACH, rings, process), EACH - 1, "{rings} {process}: the first ones");
            for _ in 0..10 {
                assert_eq!(run(&paths, EACH, rings, process), expected, "{rings} {process}");
            }
        }
    }

    #[test]
    fn a_change_of_speed_is_noticed() {
        let paths = FasterPath::default();
        run(&paths, 10 * EACH, 40, 90);
        // Rings are noted often.
        assert!(run(&paths, EACH, 450, 90) < 8);
        assert_eq!(run(&paths, EACH, 450, 90), 1);
        // They are noted once in many transfers now.
        run(&paths, 5 * EACH, 40, 90);
        assert_eq!(run(&paths, EACH, 40, 90), EACH - 1);
    }

    #[test]
    fn one_long_wait_does_not_decide_for_long() {
        let paths = FasterPath::default();
        run(&paths, 10 * EACH, 40, 90);
        paths.note(PathKind::Rings, MIB / 2, Duration::MAX);
        run(&paths, 3 * EACH, 40, 90);
        assert_eq!(run(&paths, EACH, 40, 90), EACH - 1);
    }

    #[test]
    fn times_of_other_paths_are_ignored() {
        let paths = FasterPath::default();
        run(&paths, 2 * EACH, 450, 90);
        for path in [PathKind::Mapped, PathKind::Fabric, PathKind::Sockets] {
            paths.note(path, MIB, Duration::from_nanos(1));
        }
        assert!(!paths.rings_next());
    }

    #[test]
    fn extreme_times_are_noted() {
        let paths = FasterPath::default();
        for path in [PathKind::Rings, PathKind::Process] {
            paths.note(path, 0, Duration::MAX);
            paths.note(path, u64::MAX, Duration::ZERO);
        }
        assert!(run(&paths, 100 * EACH, 40, 90) > EACH);
    }
}
