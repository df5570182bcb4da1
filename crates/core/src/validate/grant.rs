//! Checks grants.

use std::time::Duration;

use super::cache_rules::{blocks_cache, in_range, not_empty, numbers};
use crate::error::{Error, Result, ensure};
use crate::model::{CacheLayout, RowList};

/// Maximum number of readers of one grant: as many as there can be links.
pub const MAX_READERS: usize = 4096;

/// Checks the arguments of a grant, and returns the rows that it lends.
pub fn grant(layout: CacheLayout, blocks: &[i64], ttl: Duration, readers: usize) -> Result<Vec<u64>> {
    blocks_cache("cache", layout.kind)?;
    not_empty("rows", blocks)?;
    in_range("rows", blocks, layout.geometry)?;
    grant_ttl(ttl)?;
    let allowed = format!("1 to {MAX_READERS}");
    ensure((1..=MAX_READERS).contains(&readers), || Error::argument("readers", readers, allowed))?;
    numbers(blocks).map(RowList::into_vec)
}

/// Checks for how long a grant is given or renewed.
pub fn grant_ttl(ttl: Duration) -> Result<()> {
    let (ttl_ms, most) = (ttl.as_millis(), u128::from(u32::MAX));
    ensure((1..=most).contains(&ttl_ms), || Error::argument("ttl_ms", ttl_ms, format!("1 to {most}")))
}
