//! Single values of the configuration and of descriptors: each rule once, for setters and for option texts alike.
//!
//! Not for: option texts (`options`).

use crate::config::{KernelChoice, SwapInPath};
use crate::error::{Error, Result};

/// A device number: 0 or above.
pub fn device_id(value: i64) -> Result<()> {
    within("device_id", value, 0, i64::from(i32::MAX))
}

/// `sync_kv_timeout`: milliseconds, above 0.
pub fn sync_kv_timeout(value: i64) -> Result<()> {
    if value > 0 {
        Ok(())
    } else {
        Err(Error::argument("sync_kv_timeout", value, "above 0, in milliseconds"))
    }
}

/// `link_total_time`: seconds.
pub fn link_total_time(value: i64) -> Result<()> {
    within("link_total_time", value, 0, i64::from(u32::MAX))
}

/// `link_retry_count`: 1 to 100.
pub fn link_retry_count(value: i64) -> Result<()> {
    within("link_retry_count", value, 1, 100)
}

/// `mem_utilization`: a share.
pub fn mem_utilization(value: f64) -> Result<()> {
    if (0.0..=1.0).contains(&value) {
        Ok(())
    } else {
        Err(Error::argument("mem_utilization", value, "0.0 to 1.0"))
    }
}

/// `copy_workers`: 1 to 256.
pub fn copy_workers(value: i64) -> Result<()> {
    within("copy_workers", value, 1, 256)
}

/// `swap_in_path`: `auto`, `direct` or `ring`.
pub fn swap_in_path(text: &str) -> Result<SwapInPath> {
    let paths = [("auto", SwapInPath::Auto), ("direct", SwapInPath::Direct), ("ring", SwapInPath::Ring)];
    one_of("swap_in_path", text, &paths)
}

/// `copy_kernel`: `auto`, `plain` or `streaming`.
pub fn copy_kernel(text: &str) -> Result<KernelChoice> {
    let kernels = [
        ("auto", KernelChoice::Auto),
        ("plain", KernelChoice::Plain),
        ("streaming", KernelChoice::Streaming),
    ];
    one_of("copy_kernel", text, &kernels)
}

/// `page_shift` of a pool: 10 to 30.
pub fn page_shift(value: u64) -> Result<u32> {
    match u32::try_from(value) {
        Ok(shift @ 10..31) => Ok(shift),
        _ => Err(Error::argument("page_shift", value, "10 to 30")),
    }
}

/// The dimension indices of a descriptor of `rank` dimensions (python-api.md §4.2, rows 8 and 9).
pub fn dimensions(rank: usize, batch_dim_index: i64, seq_len_dim_index: i64) -> Result<()> {
    let rank = i64::try_from(rank).unwrap_or(i64::MAX);
    if rank == 0 {
        return Err(Error::argument("shape", "[]", "at least one dimension"));
    }
    within("batch_dim_index", batch_dim_index, 0, rank - 1)?;
    if seq_len_dim_index == -1 { Ok(()) } else { within("seq_len_dim_index", seq_len_dim_index, 0, rank - 1) }
}

fn within(name: &str, value: i64, low: i64, high: i64) -> Result<()> {
    if (low..=high).contains(&value) {
        Ok(())
    } else {
        Err(Error::argument(name, value, format_args!("{low} to {high}")))
    }
}

/// The value that one of the allowed words stands for.
pub(super) fn one_of<T: Copy>(name: &str, text: &str, allowed: &[(&str, T)]) -> Result<T> {
    let refused = || {
        let words: Vec<_> = allowed.iter().map(|&(word, _)| word).collect();
        Error::argument(name, format_args!("{:?}", clipped(text)), words.join(" or "))
    };
    allowed.iter().find(|(word, _)| *word == text).map(|&(_, value)| value).ok_or_else(refused)
}

/// Enough of a text to recognise it in a message.
pub(super) fn clipped(text: &str) -> String {
    let mut short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
