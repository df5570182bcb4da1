//! Sizes of memory pools.

use std::fmt::Display;

use serde_json::Value;

use crate::config::{Config, PoolConfig};
use crate::error::{Error, Result};
use crate::validate::{clipped, decimal, json};

/// The units in which a text may give a size, and their bytes.
const SIZE_UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// Reads one memory pool: a JSON object with `memory_size` and, optionally, `page_shift`. An empty text means no pool.
pub(super) fn pool(option: &str, text: &str, limit: u64) -> Result<Option<PoolConfig>> {
    if text.is_empty() {
        return Ok(None);
    }
    pool_config(text, limit)
        .map(Some)
        .map_err(|error| error.with("option", option).with("text", clipped(text)))
}

fn pool_config(text: &str, limit: u64) -> Result<PoolConfig> {
    let invalid = |reason: String| Error::invalid(reason);
    let value: Value =
        json(text).map_err(|error| invalid("the pool configuration is not JSON".into()).because(error))?;
    let Value::Object(fields) = value else {
        return Err(invalid("the pool configuration must be one JSON object".into()));
    };
    let given = fields.get("memory_size").ok_or_else(|| invalid("memory_size is missing".into()))?;
    let memory_size = match given.as_str().map_or_else(|| given.as_u64(), size_with_unit) {
        Some(bytes @ 1..) if bytes <= limit => bytes,
        Some(1..) => {
            return Err(Error::argument("memory_size", given, format_args!("at most {limit} bytes")));
        }
        _ => {
            let allowed =
                "a whole number of bytes above 0, or a text with a unit: \"64MiB\" (KiB, MiB, GiB, TiB)";
            return Err(refused("memory_size", given, allowed));
        }
    };
    let page_shift = match fields.get("page_shift") {
        None => PoolConfig::DEFAULT_PAGE_SHIFT,
        Some(given) => match given.as_u64() {
            Some(shift) => page_shift(shift)?,
            None => return Err(refused("page_shift", given, "a whole number, 10 to 30")),
        },
    };
    let pool = PoolConfig { memory_size, page_shift };
    check_pages("memory_size", memory_size, pool)?;
    Ok(pool)
}

/// Checks that a pool has at least one page, and at most as many as page numbers can name.
pub(super) fn check_pages(name: &str, size: impl Display, pool: PoolConfig) -> Result<()> {
    let page = 1u64 << pool.page_shift;
    match pool.memory_size >> pool.page_shift {
        0 => Err(Error::argument(name, size, format_args!("at least one page, {page} bytes"))),
        pages if pages >= u64::from(u32::MAX) => {
            Err(Error::argument(name, size, format_args!("fewer than 2^32-1 pages of {page} bytes")))
        }
        _ => Ok(()),
    }
}

/// Sets the size of the device pool; `false` for 0.
pub(super) fn device_pool(config: &mut Config, memory_size: u64) -> bool {
    config.device_pool = Some(PoolConfig { memory_size, page_shift: PoolConfig::DEFAULT_PAGE_SHIFT });
    memory_size > 0
}

/// Sets the size of the host pool; `false` for 0.
pub(super) fn host_pool(config: &mut Config, memory_size: u64) -> bool {
    config.host_pool = Some(PoolConfig { memory_size, page_shift: PoolConfig::DEFAULT_PAGE_SHIFT });
    memory_size > 0
}

/// Sets the size of the pages of both pools; `false` for a size that is not allowed.
pub(super) fn page(config: &mut Config, bytes: u64) -> bool {
    for pool in [&mut config.device_pool, &mut config.host_pool].into_iter().flatten() {
        pool.page_shift = bytes.trailing_zeros();
    }
    bytes.is_power_of_two() && page_shift(bytes.trailing_zeros().into()).is_ok()
}

/// Returns the bytes that a text such as `64MiB` states: digits, then a unit without a space between.
pub fn size_with_unit(text: &str) -> Option<u64> {
    let (digits, unit) =
        SIZE_UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, bytes)))?;
    decimal::<u64>(digits)?.checked_mul(*unit)
}

/// Checks `page_shift` of a pool: 10 to 30.
pub fn page_shift(value: u64) -> Result<u32> {
    match u32::try_from(value) {
        Ok(shift @ 10..31) => Ok(shift),
        _ => Err(Error::out_of_range("page_shift", value, "10 to 30")),
    }
}

fn refused(name: &str, value: &Value, allowed: &str) -> Error {
    Error::argument(name, clipped(&value.to_string()), allowed)
}
