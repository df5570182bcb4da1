//! Lists whose length a caller or a peer chooses: a failed allocation is an error of the call, not the end of the process.
//!
//! Every list of a plan, a message or the table is made here, or reserved before it is filled (`tests/integration/short.rs` fails
//! each of these allocations in turn). Not for: lists whose length the engine itself bounds, and texts of errors.

use std::hash::Hash;

use hashbrown::{HashMap, HashSet};

use crate::error::{Error, ErrorKind, Result};

/// The error of an allocation that failed: what it was for, and its bytes.
#[cold]
#[must_use]
pub fn short(what: &str, bytes: usize) -> Error {
    Error::new(ErrorKind::OutOfMemory, format!("no memory for {what}")).with("asked_bytes", bytes)
}

/// An empty list with room for `count`.
pub fn room<T>(what: &str, count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|_| short(what, count.saturating_mul(size_of::<T>())))?;
    Ok(list)
}

/// A list of `count` equal values.
pub fn filled<T: Clone>(what: &str, value: T, count: usize) -> Result<Vec<T>> {
    let mut list = room(what, count)?;
    list.resize(count, value);
    Ok(list)
}

/// A list of items whose number is known.
pub fn collect<T>(what: &str, items: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut list = room(what, items.len())?;
    list.extend(items);
    Ok(list)
}

/// A list of items, `count` of them as far as anybody knows.
pub fn gathered<T>(what: &str, count: usize, items: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let mut list = room(what, count)?;
    for item in items {
        push(what, &mut list, item)?;
    }
    Ok(list)
}

/// The list of what `items` give, or the first error among them.
pub fn tried<T>(what: &str, items: impl ExactSizeIterator<Item = Result<T>>) -> Result<Vec<T>> {
    let mut list = room(what, items.len())?;
    for item in items {
        list.push(item?);
    }
    Ok(list)
}

/// A copy of a list.
pub fn copied<T: Copy>(what: &str, items: &[T]) -> Result<Vec<T>> {
    let mut list = room(what, items.len())?;
    list.extend_from_slice(items);
    Ok(list)
}

/// Adds one item.
pub fn push<T>(what: &str, list: &mut Vec<T>, item: T) -> Result<()> {
    grow(what, list, 1)?;
    list.push(item);
    Ok(())
}

/// Makes room for `more` items.
#[inline]
pub fn grow<T>(what: &str, list: &mut Vec<T>, more: usize) -> Result<()> {
    if list.capacity() - list.len() >= more {
        return Ok(());
    }
    list.try_reserve(more).map_err(|_| short(what, (list.len() + more).saturating_mul(size_of::<T>())))
}

/// An empty map with room for `count`.
pub fn map<K: Eq + Hash, V>(what: &str, count: usize) -> Result<HashMap<K, V>> {
    let mut map = HashMap::new();
    map.try_reserve(count).map_err(|_| short(what, count.saturating_mul(size_of::<(K, V)>())))?;
    Ok(map)
}

/// A set of items.
pub fn set<T: Eq + Hash>(what: &str, items: impl ExactSizeIterator<Item = T>) -> Result<HashSet<T>> {
    let mut set = HashSet::new();
    set.try_reserve(items.len()).map_err(|_| short(what, items.len().saturating_mul(size_of::<T>())))?;
    set.extend(items);
    Ok(set)
}
