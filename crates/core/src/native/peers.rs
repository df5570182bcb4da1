//! Calls about peers that every language makes in the same way: links and grants.

use std::sync::Arc;
use std::time::Duration;

use super::MAX_SECONDS;
use super::block_rows::BlockRows;
use super::cache_names::EngineName;
use super::pairs::lent_cache;
use crate::engine::DataDist;
use crate::error::{Error, Result, ensure};
use crate::events::Transfer;
use crate::grants::Grant;
use crate::model::WhileRefused;
use crate::validate;

/// Starts to link `engine` with the one that listens at an address, which must be another one and have this name.
pub fn link(
    engine: &DataDist,
    address: &str,
    name: Option<String>,
    limit: Option<Duration>,
    while_refused: WhileRefused,
) -> Result<Arc<Transfer>> {
    let at = validate::peer_address("address", address)?;
    ensure(engine.listening() != Some(at), || Error::argument("address", at, "that of another engine"))?;
    let limit = limit.unwrap_or(engine.config().sync_timeout);
    engine.ensure_link(at, limit, name, while_refused)
}

/// Lends rows of `engine`, which is called `owner`.
pub fn lend(
    engine: &DataDist,
    owner: &EngineName,
    rows: &BlockRows,
    ttl: Duration,
    readers: u32,
) -> Result<Arc<Grant>> {
    let (cache, ttl) = (lent_cache(owner, rows)?, grant_time(ttl)?);
    let readers = usize::try_from(readers).unwrap_or(usize::MAX);
    engine.grant(&cache.end(), rows.blocks(), ttl, readers)
}

/// Checks for how long a grant lasts. The engine counts milliseconds, of which it has at least one.
pub fn grant_time(ttl: Duration) -> Result<Duration> {
    ensure(!ttl.is_zero() && ttl <= Duration::from_secs(MAX_SECONDS), || {
        let required = format!("above 0 and at most {MAX_SECONDS} seconds");
        Error::argument("ttl", ttl.as_secs_f64(), required)
    })?;
    Ok(ttl.max(Duration::from_millis(1)))
}
