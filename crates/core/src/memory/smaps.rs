//! Reads what the kernel reports about address ranges of this process: huge pages and access rights.
//!
//! The source is `/proc/self`. Without it (not Linux), huge pages count as none and every range as mapped.
//! These functions read whole files, so transfer calls must not use them repeatedly.

use std::fs::File;
use std::io::{BufRead, BufReader};

/// Returns the bytes in huge pages, summed over the mappings that start in `base..base + len`.
pub(super) fn huge_bytes(base: u64, len: u64) -> u64 {
    let mut sum = 0;
    let mut inside = false;
    for line in lines("/proc/self/smaps") {
        if let Some((from, _, _)) = header(&line) {
            inside = (base..base.saturating_add(len)).contains(&from);
        } else if inside
            && let Some(("ShmemPmdMapped" | "Shared_Hugetlb" | "Private_Hugetlb", amount)) =
                line.split_once(':')
        {
            let kib = amount.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok());
            sum += kib.unwrap_or(0) << 10;
        }
    }
    sum
}

/// Returns the first address in `ranges` (start, bytes) that is not mapped readable, or not writable if
/// `writable` is set. Returns `None` if there is none, or if the kernel does not report mappings.
pub(super) fn first_unmapped(mut ranges: impl Iterator<Item = (u64, u64)>, writable: bool) -> Option<u64> {
    let mut mapped: Vec<(u64, u64)> = Vec::new();
    for line in lines("/proc/self/maps") {
        let Some((from, to, rights)) = header(&line) else { continue };
        let usable = rights.starts_with('r') && (!writable || rights[1..].starts_with('w'));
        if !usable {
            continue;
        }
        match mapped.last_mut() {
            Some((_, end)) if *end == from => *end = to,
            _ => mapped.push((from, to)),
        }
    }
    if mapped.is_empty() {
        return None;
    }
    ranges.find_map(|(start, len)| {
        // Mappings are listed in ascending order.
        let index = mapped.partition_point(|&(_, end)| end <= start);
        match mapped.get(index) {
            Some(&(from, end)) if from <= start && start + len <= end => None,
            Some(&(from, end)) if from <= start => Some(end),
            _ => Some(start),
        }
    })
}

fn lines(path: &str) -> impl Iterator<Item = String> {
    File::open(path).ok().into_iter().flat_map(|file| BufReader::new(file).lines().map_while(Result::ok))
}

/// Parses `from-to rights …`; `None` for a line that does not start a mapping.
fn header(line: &str) -> Option<(u64, u64, &str)> {
    let mut words = line.split(' ');
    let (from, to) = words.next()?.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    Some((address(from)?, address(to)?, words.next()?))
}
