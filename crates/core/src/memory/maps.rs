//! Reads which address ranges of this process are mapped, and with which access rights.
//!
//! The source is `/proc/self/maps`. Without it (not Linux), every range counts as mapped.
//! It is read whole, so transfer calls must not use it repeatedly.

use std::fs::File;
use std::io::{BufRead, BufReader};

/// Returns the first address in `ranges` (start, bytes) that is not mapped readable, or not writable if
/// `writable` is set. Returns `None` if there is none, or if the kernel does not report mappings.
pub(super) fn first_unmapped(mut ranges: impl Iterator<Item = (u64, u64)>, writable: bool) -> Option<u64> {
    let mut mapped: Vec<(u64, u64)> = Vec::new();
    for line in lines() {
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

fn lines() -> impl Iterator<Item = String> {
    File::open("/proc/self/maps")
        .ok()
        .into_iter()
        .flat_map(|file| BufReader::new(file).lines().map_while(Result::ok))
}

/// Parses `from-to rights …`; `None` for a line that does not start a mapping.
fn header(line: &str) -> Option<(u64, u64, &str)> {
    let mut words = line.split(' ');
    let (from, to) = words.next()?.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    Some((address(from)?, address(to)?, words.next()?))
}
