//! Lists whose length a caller or a peer chooses: every list of a plan, a message or the cache table. If an
//! allocation fails, the call returns `Err(OutOfMemory)` and does not abort
//! (`tests/integration/allocation_failures.rs` fails each in turn). `what` names the list in the error.
//!
//! On a thread that works for a peer, each list is charged to the budget for peers before it is allocated.

use std::hash::Hash;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::budget::charge;
pub(crate) use crate::budget::temporary;
use crate::error::{Error, ErrorKind, Result};

/// Returns the error for a failed allocation of `bytes` bytes for `what`.
pub fn out_of_memory(what: &str, bytes: usize) -> Error {
    Error::new(ErrorKind::OutOfMemory, format!("no memory for {what}")).with("asked_bytes", bytes)
}

/// Returns an empty list with room for `count` items.
pub fn with_capacity<T>(what: &str, count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    grow_exact(what, &mut list, count)?;
    Ok(list)
}

/// Returns a list of `count` equal values.
pub fn filled<T: Clone>(what: &str, value: T, count: usize) -> Result<Vec<T>> {
    let mut list = with_capacity(what, count)?;
    list.resize(count, value);
    Ok(list)
}

/// Collects items whose number is known.
pub fn collect<T>(what: &str, items: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut list = with_capacity(what, items.len())?;
    list.extend(items);
    Ok(list)
}

/// Returns an empty list with room for `count` items, of which `N` take no memory of their own.
pub fn inline_with_capacity<const N: usize, T>(what: &str, count: usize) -> Result<SmallVec<[T; N]>> {
    if count <= N { Ok(SmallVec::new()) } else { with_capacity(what, count).map(SmallVec::from_vec) }
}

/// Collects items whose number is known, of which `N` take no memory of their own.
pub fn collect_inline<const N: usize, T>(
    what: &str,
    items: impl ExactSizeIterator<Item = T>,
) -> Result<SmallVec<[T; N]>> {
    if items.len() <= N { Ok(items.collect()) } else { collect(what, items).map(SmallVec::from_vec) }
}

/// Collects items of which `count` are expected; the list may become longer.
pub fn collect_growing<T>(what: &str, count: usize, items: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let mut list = with_capacity(what, count)?;
    for item in items {
        push(what, &mut list, item)?;
    }
    Ok(list)
}

/// Collects the values of `items`. Returns the first error among them.
pub fn try_collect<T>(what: &str, items: impl ExactSizeIterator<Item = Result<T>>) -> Result<Vec<T>> {
    let mut list = with_capacity(what, items.len())?;
    for item in items {
        list.push(item?);
    }
    Ok(list)
}

/// Returns a copy of a list.
pub fn copied<T: Copy>(what: &str, items: &[T]) -> Result<Vec<T>> {
    let mut list = with_capacity(what, items.len())?;
    list.extend_from_slice(items);
    Ok(list)
}

/// Adds one item to a list.
pub fn push<T>(what: &str, list: &mut Vec<T>, item: T) -> Result<()> {
    grow(what, list, 1)?;
    list.push(item);
    Ok(())
}

/// Makes room for `more` further items.
#[inline]
pub fn grow<T>(what: &str, list: &mut Vec<T>, more: usize) -> Result<()> {
    if list.capacity() - list.len() >= more {
        return Ok(());
    }
    // Doubled, so that a list that grows item by item rarely moves.
    let doubled = list.capacity().saturating_mul(2).max(4) - list.len();
    grow_exact(what, list, doubled.max(more))
}

/// Makes room for `more` further items and no others.
pub fn grow_exact<T>(what: &str, list: &mut Vec<T>, more: usize) -> Result<()> {
    let items = list.len().saturating_add(more);
    charge(items.saturating_sub(list.capacity()).saturating_mul(size_of::<T>()))?;
    list.try_reserve_exact(more).map_err(|_| out_of_memory(what, items.saturating_mul(size_of::<T>())))
}

/// Returns an empty map with room for `count` entries.
pub fn map<K: Eq + Hash, V>(what: &str, count: usize) -> Result<HashMap<K, V>> {
    let mut map = HashMap::new();
    charge(count.saturating_mul(size_of::<(K, V)>()))?;
    map.try_reserve(count).map_err(|_| out_of_memory(what, count.saturating_mul(size_of::<(K, V)>())))?;
    Ok(map)
}
