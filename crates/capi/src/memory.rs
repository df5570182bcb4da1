//! How much memory this process may use: the size of a device pool that no option sizes.
//!
//! Not for: taking it. A pool is address space until it is touched.

use std::fs;

/// What is taken where nobody says how much there is.
const UNKNOWN: u64 = 4 << 30;

/// Bytes of the machine, or of the group this process is limited to.
pub(crate) fn usable() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| total(&text));
    let groups = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = groups.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok());
    limits.chain(machine).min().unwrap_or(UNKNOWN)
}

fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}
