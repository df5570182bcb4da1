//! The last changes of a keeper: which values were stored and removed, for clients that follow them.

use std::collections::VecDeque;

use llm_datadist_core::Result;
use llm_datadist_core::bindings::fallible;

use crate::key::IndexKey;
use crate::messages::{ChangePage, ListedChange};
use crate::sizes::PAGE_VALUES;

/// How many changes a keeper remembers. A client that has asked for none of them in the meantime misses those before.
const REMEMBERED: usize = 1 << 16;

/// A queue of changes. The oldest one gives way to a new one.
#[derive(Debug)]
pub(crate) struct Changes {
    /// The key, and whether its value was stored.
    last: VecDeque<(IndexKey, bool)>,
    /// How many changes there were before those.
    forgotten: u64,
}

impl Changes {
    /// Creates an empty queue. Returns `Err(OutOfMemory)` if there is no memory for it.
    pub(crate) fn new() -> Result<Changes> {
        let mut last = VecDeque::new();
        let bytes = REMEMBERED * size_of::<(IndexKey, bool)>();
        let reserved = last.try_reserve_exact(REMEMBERED);
        reserved.map_err(|_| fallible::out_of_memory("the changes of values", bytes))?;
        Ok(Changes { last, forgotten: 0 })
    }

    /// Adds a change: a value was stored, or removed.
    pub(crate) fn add(&mut self, key: IndexKey, stored: bool) {
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
            self.forgotten += 1;
        }
        self.last.push_back((key, stored));
    }

    /// Returns a page of the changes from number `from` on, in their order. `None` stands for those that come after this call.
    pub(crate) fn page(&self, from: Option<u64>) -> ChangePage {
        let end = self.forgotten + self.last.len() as u64;
        let asked = from.unwrap_or(end).min(end);
        let begin = asked.max(self.forgotten);
        let skipped = usize::try_from(begin - self.forgotten).unwrap_or(usize::MAX);
        let change = |(key, stored): &(IndexKey, bool)| ListedChange {
            namespace: key.namespace(),
            key: key.key(),
            stored: *stored,
        };
        let changes: Vec<_> = self.last.iter().skip(skipped).take(PAGE_VALUES).map(change).collect();
        let next = begin + changes.len() as u64;
        ChangePage { changes, missed: begin - asked, next, more: next < end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_each_change_once_or_say_how_many_are_missing() {
        let mut changes = Changes::new().unwrap();
        let key = |number: u64| IndexKey([(number << 32) | 3, 0, 0, number]);
        let first = changes.page(None);
        assert_eq!((first.changes.len(), first.missed, first.next, first.more), (0, 0, 0, false));
        for number in 0..2000 {
            changes.add(key(number), number % 2 == 0);
        }
        let (mut from, mut seen) = (first.next, Vec::new());
        loop {
            let page = changes.page(Some(from));
            assert_eq!(page.missed, 0);
            seen.extend(page.changes);
            from = page.next;
            if !page.more {
                break;
            }
        }
        assert_eq!((seen.len(), from), (2000, 2000));
        assert!((0u64..).zip(&seen).all(|(number, change)| {
            (change.namespace, change.key, change.stored) == (3, key(number).key(), number % 2 == 0)
        }));
        for number in 2000..2000 + REMEMBERED as u64 + 7 {
            changes.add(key(number), true);
        }
        let page = changes.page(Some(from));
        assert_eq!((page.missed, page.changes[0].key, page.more), (7, key(2007).key(), true));
        assert_eq!(changes.page(Some(u64::MAX)), changes.page(None));
        assert_eq!(changes.last.len(), REMEMBERED);
    }
}
