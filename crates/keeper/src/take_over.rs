//! Copies the values of a keeper that is replaced by another one, which then takes its path.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::index::Place;
use crate::key::IndexKey;
use crate::messages::{ListedNamespace, ListedValue, Stored};
use crate::observer::Observer;
use crate::shared_files::SharedFiles;
use crate::socket::{ListeningPath, is_readable};
use crate::table::SlotTable;

/// How long the other keeper may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// What became of the values of the other keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenOver {
    /// Values that this keeper has now.
    pub values: u64,
    /// Values that it has not, because they do not fit.
    pub left: u64,
}

/// Copies the values of the keeper at the path of `listening`, has it end, and takes its path, unless `stop` is readable by then.
pub(crate) fn take_over(
    files: &Arc<SharedFiles>,
    listening: &ListeningPath,
    stop: &OwnedFd,
) -> Result<TakenOver> {
    let other = Observer::with_memory(listening.path(), answer())?;
    let mut copy = ValueCopy { other, table: SlotTable::over(files.clone())?, namespaces: HashMap::new() };
    let newest = copy.all()?;
    // What clients have put, used or dropped meanwhile. What they do from here on is lost.
    let listed = copy.newer_than(newest)?;
    let has = |value: &&ListedValue| copy.slot_of(value).is_some();
    let values = listed.iter().filter(has).count() as u64;
    let left = listed.len() as u64 - values;
    copy.forget_namespaces();
    if is_readable(stop) {
        return Err(Error::new(ErrorKind::Closed, "the keeper that was to take over has been stopped"));
    }
    copy.other.end(answer())?;
    listening.take()?;
    Ok(TakenOver { values, left })
}

fn answer() -> Deadline {
    Deadline::after(ANSWER)
}

/// A copy of the values of another keeper.
struct ValueCopy {
    other: Observer,
    table: SlotTable,
    /// For each namespace of the other keeper, the number that it has here, and the bytes of its values.
    namespaces: HashMap<u32, (u32, u64)>,
}

impl ValueCopy {
    /// Copies all values as far as the memory goes, the most recently used ones first. Returns the last use of the latest one.
    fn all(&mut self) -> Result<u64> {
        let listed = self.list()?;
        for value in &listed {
            if self.table.values() < self.table.slots() {
                self.copy(value)?;
            }
        }
        self.touch(&listed);
        Ok(listed.first().map_or(0, |value| value.used))
    }

    /// Copies the values that were put after the use `newest`, in place of those that were not used for the longest time, and drops those
    /// that the other keeper has no more. Returns all values of the other keeper.
    fn newer_than(&mut self, newest: u64) -> Result<Vec<ListedValue>> {
        let listed = self.list()?;
        let newer = listed.partition_point(|value| value.used > newest);
        for value in listed[..newer].iter().rev() {
            if self.slot_of(value).is_none() {
                self.copy(value)?;
            }
        }
        self.touch(&listed[..newer]);
        self.drop_others(&listed)?;
        Ok(listed)
    }

    /// Drops the values that are not listed: clients may have dropped them meanwhile.
    fn drop_others(&mut self, listed: &[ListedValue]) -> Result<()> {
        let unlisted = self.table.keys.iter().map(|_| true);
        let mut unlisted: Vec<bool> = fallible::collect("the values that were dropped meanwhile", unlisted)?;
        for slot in listed.iter().filter_map(|value| self.slot_of(value)) {
            unlisted[slot as usize] = false;
        }
        for (at, _) in unlisted.iter().enumerate().filter(|(_, unlisted)| **unlisted) {
            if let Some(key) = self.table.keys[at] {
                self.table.drop_value(&key);
            }
        }
        Ok(())
    }

    /// Returns the values of the other keeper, the most recently used ones first, once their namespaces are known here.
    fn list(&mut self) -> Result<Vec<ListedValue>> {
        let listed = self.other.values(None, usize::MAX, answer())?;
        for ListedNamespace { number, text, value, .. } in self.other.namespaces(answer())? {
            // A namespace that there is no room for is left.
            if !self.namespaces.contains_key(&number)
                && let Ok(here) = self.table.namespaces.attach(&text, value)
            {
                self.namespaces.insert(number, (here, value));
            }
        }
        Ok(listed)
    }

    /// Copies a value that fits, unless it is replaced meanwhile.
    fn copy(&mut self, value: &ListedValue) -> Result<()> {
        let Some((key, bytes)) = self.key(value).filter(|(_, bytes)| *bytes <= self.table.slot_bytes())
        else {
            return Ok(());
        };
        let from = self.other.memory()?;
        let Some(Place { slot, generation }) = from.place(value.namespace, &value.key) else { return Ok(()) };
        let stored = self
            .table
            .put(&key, from.values.window(0, u64::from(slot) * from.geometry.slot_bytes, bytes)?)?;
        if stored == Stored::Stored && !from.generations.still(slot, generation) {
            self.table.drop_value(&key);
        }
        Ok(())
    }

    /// Makes the order of use here that of values that are listed, the most recently used one first.
    fn touch(&mut self, listed: &[ListedValue]) {
        let slots: Vec<u32> = listed.iter().filter_map(|value| self.slot_of(value)).collect();
        self.table.touch(slots.into_iter());
    }

    fn slot_of(&self, value: &ListedValue) -> Option<u32> {
        self.table.slot_of(&self.key(value)?.0)
    }

    /// Returns the key that a value has here, and its bytes.
    fn key(&self, value: &ListedValue) -> Option<(IndexKey, u64)> {
        let &(namespace, bytes) = self.namespaces.get(&value.namespace)?;
        Some((IndexKey::of(namespace, &value.key), bytes))
    }

    /// Forgets the namespaces of which no value was copied.
    fn forget_namespaces(&mut self) {
        for (_, (here, _)) in self.namespaces.drain() {
            self.table.namespaces.detach(here);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use llm_datadist_core::bindings::keeper::Window;

    use super::*;
    use crate::attachment::tests::SilentPath;
    use crate::holder::KeeperOptions;
    use crate::keeper::Keeper;
    use crate::key::StoreKey;
    use crate::store::{Store, StoreOptions};

    fn key(number: u8) -> StoreKey {
        StoreKey::read(0, &[number; 28]).unwrap()
    }

    fn store(path: &Path, namespace: &str) -> Store {
        let options = StoreOptions { socket: path.into(), namespace: namespace.into(), value: 64 };
        Store::open(options, answer()).unwrap()
    }

    fn put(store: &Store, number: u8) {
        let stored = store.put(&[key(number)], &[Window::of_slice(&[number; 64])], answer()).unwrap();
        assert_eq!(stored, [Stored::Stored]);
    }

    #[test]
    fn values_that_are_put_or_used_meanwhile_replace_the_oldest() {
        let path = SilentPath::new();
        let options = KeeperOptions { memory: 64 * 100, value: 64, socket: path.socket() };
        let _keeper = Keeper::open(&options).unwrap();
        let (one, other) = (store(&path.socket(), "one"), store(&path.socket(), "other"));
        (0..6).for_each(|number| put(&one, number));
        let table = SlotTable::over(Arc::new(SharedFiles::new(4, 64).unwrap())).unwrap();
        let observer = Observer::with_memory(&path.socket(), answer()).unwrap();
        let mut copy = ValueCopy { other: observer, table, namespaces: HashMap::new() };
        let newest = copy.all().unwrap();
        // In the new memory are 2 to 5, the oldest one first.
        put(&other, 9);
        let mut bytes = [0; 64];
        assert_eq!(one.get(&[key(3)], &[Window::of_slice_mut(&mut bytes)]).unwrap(), [true]);
        assert_eq!(one.drop_values(&[key(5)], answer()).unwrap(), 1);
        // The message that the value was used arrives before this answer.
        assert_eq!(one.stats(answer()).unwrap().keeper.unwrap().values, 6);
        let listed = copy.newer_than(newest).unwrap();
        assert_eq!(listed.len(), 6);
        let has: Vec<bool> = listed.iter().map(|value| copy.slot_of(value).is_some()).collect();
        // 3 was used last, then 9 was put, then 4, 2, 1 and 0.
        assert_eq!(has, [true, true, true, false, false, false]);
        assert_eq!(copy.table.values(), 3, "5 was dropped");
        let order: Vec<u64> =
            listed[..3].iter().map(|value| copy.table.recency.used(copy.slot_of(value).unwrap())).collect();
        assert!(order.is_sorted_by(|later, earlier| later > earlier), "{order:?}");
    }
}
