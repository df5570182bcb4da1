//! Checks the names that programs give to engines and caches.

use crate::error::{Error, Result, ensure};
use crate::model::{MAX_NAME, is_name};

/// Checks the name of an engine. An engine may have none, which is the empty text.
pub fn engine_name(name: &str) -> Result<()> {
    ensure(is_name(name), || not_a_name(name, 0))
}

/// Checks the name of a cache.
pub fn cache_name(name: &str) -> Result<()> {
    ensure(!name.is_empty() && is_name(name), || not_a_name(name, 1))
}

fn not_a_name(name: &str, least: usize) -> Error {
    let mut shown: String = name.escape_debug().take(MAX_NAME).collect();
    if name.len() > MAX_NAME {
        shown = format!("{shown}... ({} bytes)", name.len());
    }
    Error::argument(
        "name",
        format_args!("'{shown}'"),
        format!("{least} to {MAX_NAME} bytes of printable text"),
    )
}
