//! Checks of the memory that a caller gives for values.

use llm_datadist_core::bindings::keeper::Window;
use llm_datadist_core::{Error, Result};

/// Returns an error unless the argument `name` has a window of `value` bytes for each of `keys` keys.
pub(crate) fn check_sizes(name: &str, keys: usize, windows: &[Window<'_>], value: u64) -> Result<()> {
    if windows.len() != keys {
        let allowed = format!("{keys}, one for each key");
        return Err(Error::argument(&format!("len({name})"), windows.len(), allowed));
    }
    match windows.iter().position(|window| window.len() != value) {
        None => Ok(()),
        Some(at) => {
            let given = format!("{} bytes", windows[at].len());
            Err(Error::argument(
                &format!("{name}[{at}]"),
                given,
                format_args!("{value} bytes, a value of the store"),
            ))
        }
    }
}

/// Returns an error if two windows overlap: only one of them could have its value. All have the same length.
pub(crate) fn check_disjoint(windows: &[Window<'_>]) -> Result<()> {
    let mut order: Vec<usize> = (0..windows.len()).collect();
    order.sort_unstable_by_key(|&at| windows[at].addr());
    let mut pairs = order.iter().zip(order.iter().skip(1));
    match pairs.find(|&(&one, &next)| windows[one].overlaps(&windows[next])) {
        None => Ok(()),
        Some((one, next)) => {
            let (first, second) = (one.min(next), one.max(next));
            let value = format!("memory that overlaps into[{first}]");
            Err(Error::argument(&format!("into[{second}]"), value, "memory of its own"))
        }
    }
}
