//! Which of two paths has been faster lately: rings, or a read by process id.
//!
//! Through rings, bytes move as fast as two cores can exchange cache lines. The kernel may run the two threads on cores that share
//! a cache, on distant ones, or on one and the same. A read by process id takes one thread, but the kernel examines each page.
//! Which one is faster changes from moment to moment, so a link compares them: most transfers use the path that has been faster,
//! and a few use the other one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::paths::PathKind;

/// One in this many transfers uses the slower path, so that a change is noticed.
const COMPARED: u64 = 32;

/// The recent speeds of both paths, for transfers in one direction over one link.
#[derive(Debug, Default)]
pub struct FasterPath {
    transfers: AtomicU64,
    /// Nanoseconds for one MiB, or 0 if unknown.
    rings: AtomicU64,
    process: AtomicU64,
}

impl FasterPath {
    /// Returns whether the next transfer should use rings. Before a read by process id has been noted, this assumes that rings are
    /// faster.
    pub fn rings_next(&self) -> bool {
        let (rings, process) = (self.rings.load(Ordering::Relaxed), self.process.load(Ordering::Relaxed));
        let compares = self.transfers.fetch_add(1, Ordering::Relaxed) % COMPARED == COMPARED - 1;
        let faster = process == 0 || rings <= process;
        faster != compares
    }

    /// Notes that a transfer of `bytes` bytes took `time`. Ignores other paths than these two.
    pub fn note(&self, path: PathKind, bytes: u64, time: Duration) {
        let recent = match path {
            PathKind::Rings => &self.rings,
            PathKind::Process => &self.process,
            _ => return,
        };
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let now = nanos.saturating_mul(1 << 20) / bytes.max(1);
        let before = recent.load(Ordering::Relaxed);
        // Transfers that end at the same time may lose a note, which does not matter.
        recent.store(if before == 0 { now.max(1) } else { before / 2 + now / 2 }.max(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

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
    fn one_transfer_in_32_uses_the_slower_path() {
        for (rings, process, expected) in [(40, 90, 31), (450, 90, 1), (90, 90, 31)] {
            let paths = FasterPath::default();
            assert_eq!(run(&paths, 32, rings, process), 31, "{rings} {process}: the first ones");
            for _ in 0..10 {
                assert_eq!(run(&paths, 32, rings, process), expected, "{rings} {process}");
            }
        }
    }

    #[test]
    fn a_change_of_speed_is_noticed() {
        let paths = FasterPath::default();
        run(&paths, 320, 40, 90);
        // Rings are noted often.
        assert!(run(&paths, 32, 450, 90) < 8);
        assert_eq!(run(&paths, 32, 450, 90), 1);
        // They are noted once in 32 transfers now.
        run(&paths, 5 * 32, 40, 90);
        assert_eq!(run(&paths, 32, 40, 90), 31);
    }

    #[test]
    fn times_of_other_paths_are_ignored() {
        let paths = FasterPath::default();
        run(&paths, 32, 40, 90);
        for path in [PathKind::Mapped, PathKind::Fabric, PathKind::Sockets] {
            paths.note(path, MIB, Duration::from_nanos(1));
        }
        paths.note(PathKind::Rings, 0, Duration::MAX);
        paths.note(PathKind::Process, 0, Duration::MAX);
        assert!(paths.rings_next(), "both are as slow as can be");
    }
}
