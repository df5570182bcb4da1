//! The values of a keeper: the slots, which key is in which, and which one is used again next.

use std::sync::Arc;
use std::time::Instant;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::{Copy, Kernel, Tensors, Window, copy_all, window_sums};
use llm_datadist_core::{Error, ErrorKind, Result};

use crate::changes::Changes;
use crate::index::{self, Location};
use crate::key::IndexKey;
use crate::leases::{ClientLeases, HeldValues};
use crate::messages::{ListRequest, ListedValue, Stored};
use crate::namespaces::{self, Namespaces};
use crate::recency::Recency;
use crate::shared_files::SharedFiles;
use crate::sizes::{PAGE_SLOTS, PAGE_VALUES};

/// The values, changed by one thread.
#[derive(Debug)]
pub(crate) struct SlotTable {
    /// The memory that outlives this process.
    pub(crate) shared: Arc<SharedFiles>,
    /// The slots as one tensor.
    bytes: Tensors,
    /// The key in each slot that was ever used.
    pub(crate) keys: Vec<Option<IndexKey>>,
    /// Used slots whose values were dropped.
    pub(crate) free: Vec<u32>,
    /// The values that can be replaced: those without a lease.
    pub(crate) recency: Recency,
    held: HeldValues,
    pub(crate) namespaces: Namespaces,
    /// The last values that were stored and removed.
    pub(crate) changes: Changes,
    /// Values that were overwritten because all slots were in use.
    pub(crate) evicted: u64,
}

/// Returns the bytes of memory that a full table uses: the values, the index, the namespaces, and what it has for each slot.
pub(crate) fn table_bytes(slots: u32, slot_bytes: u64) -> u64 {
    // A key, a free slot, two neighbours in the order of use with the number of the last use, and a generation.
    let each =
        size_of::<Option<IndexKey>>() + size_of::<u32>() + size_of::<(u32, u32)>() + 2 * size_of::<u64>();
    (index::words(slots) + namespaces::WORDS) * 8 + u64::from(slots) * (slot_bytes + each as u64)
}

/// Returns the slots that were ever used: those before the first one with the generation 0. Slots are used first in their order, and
/// get another generation when they are used.
fn used_slots(files: &SharedFiles) -> impl Iterator<Item = u32> {
    (0..files.slots).take_while(|&slot| files.generations.of(slot) != 0)
}

impl SlotTable {
    /// Creates a table over files, with the values that another process has left in them. Returns `Err(OutOfMemory)` if memory is short.
    pub(crate) fn over(files: Arc<SharedFiles>) -> Result<SlotTable> {
        let slots = files.slots;
        let mut table = SlotTable {
            bytes: files.tensor()?,
            keys: fallible::with_capacity("the keys of slots", slots as usize)?,
            free: fallible::with_capacity("the free slots", slots as usize)?,
            recency: Recency::over(files.uses.clone(), slots)?,
            held: HeldValues::new(slots),
            namespaces: Namespaces::over(files.namespaces.clone()),
            changes: Changes::new()?,
            evicted: 0,
            shared: files,
        };
        table.recover()?;
        Ok(table)
    }

    /// Forgets the values in files, and what a process has left half-written.
    pub(crate) fn forget_all(files: &SharedFiles) {
        files.index.clear();
        for slot in used_slots(files) {
            files.generations.bump(slot);
        }
    }

    /// Takes the values that another process has left. Each key and each slot counts once. A value is kept if its entry in the index is
    /// complete, and its slot has the generation of the entry: then its bytes are complete, and are still those of the key, because a
    /// slot gets another generation before other bytes. All other slots are free.
    fn recover(&mut self) -> Result<()> {
        let SlotTable { shared, keys, free, recency, namespaces, .. } = self;
        let (index, generations) = (&shared.index, &shared.generations);
        keys.extend(used_slots(shared).map(|_| None));
        if keys.is_empty() {
            namespaces.forget_unused();
            return Ok(());
        }
        let mut claims: Vec<Location> = Vec::new();
        for (key, location) in index.entries() {
            let Some(known) = keys.get_mut(location.slot as usize) else { continue };
            let right =
                generations.of(location.slot) == location.generation && namespaces.knows(key.namespace());
            match known {
                _ if !right => {}
                None => *known = Some(key),
                Some(same) if *same == key => {}
                Some(_) => claims.push(location),
            }
        }
        // If two keys have one slot, nobody can tell whose bytes it has.
        for location in claims {
            keys[location.slot as usize] = None;
        }
        index.clear();
        let mut latest = Vec::new();
        for (slot, _) in (0..).zip(&*keys).filter(|(_, key)| key.is_some()) {
            fallible::push("the values that are recovered", &mut latest, slot)?;
        }
        latest.sort_unstable_by_key(|&slot| std::cmp::Reverse(recency.used(slot)));
        latest.retain(|&slot| {
            let location = Location { slot, generation: generations.of(slot) };
            let key = keys[slot as usize].take();
            keys[slot as usize] = key.filter(|key| index.find(key).is_none() && index.insert(key, location));
            keys[slot as usize].is_some()
        });
        for &slot in latest.iter().rev() {
            recency.touch(slot);
        }
        for (slot, key) in (0..).zip(&*keys) {
            if let Some(key) = key {
                namespaces.add_value(key.namespace());
            } else {
                generations.bump(slot);
                free.push(slot);
            }
        }
        namespaces.forget_unused();
        Ok(())
    }

    /// Returns the number of slots.
    pub(crate) fn slots(&self) -> u32 {
        self.shared.slots
    }

    /// Returns the bytes of a slot.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.shared.slot_bytes
    }

    /// Returns the number of values.
    pub(crate) fn values(&self) -> u32 {
        u32::try_from(self.keys.len() - self.free.len()).unwrap_or(u32::MAX)
    }

    /// Copies `value`, which fits a slot, unless the key has a value. The value and its checksum become visible once they are complete.
    /// Replaces a value only if there is room for the key and the bytes.
    pub(crate) fn put_value(&mut self, key: &IndexKey, value: Window<'_>, checksum: u64) -> Result<Stored> {
        if let Some(location) = self.shared.index.find(key) {
            self.touch(std::iter::once(location.slot));
            return Ok(Stored::Present);
        }
        if value.len() > self.slot_bytes() {
            let (bytes, most) = (value.len(), self.slot_bytes());
            return Err(Error::new(ErrorKind::System, "a value is larger than a slot")
                .with("bytes", bytes)
                .with("slot_bytes", most));
        }
        if !self.shared.index.has_room(key) {
            return Ok(Stored::NoRoom);
        }
        let Some(slot) = self.take_slot() else { return Ok(Stored::NoRoom) };
        // From here on no reader accepts what the slot held.
        self.shared.generations.bump(slot);
        let generation = self.shared.generations.of(slot);
        let copied = self.fill(slot, value);
        self.shared.index.set_checksum(slot, checksum);
        if copied.is_err() || !self.shared.index.insert(key, Location { slot, generation }) {
            self.free.push(slot);
            return copied.map(|()| Stored::NoRoom);
        }
        self.keys[slot as usize] = Some(*key);
        self.namespaces.add_value(key.namespace());
        self.changes.add(*key, true);
        self.recency.touch(slot);
        Ok(Stored::Stored)
    }

    /// Makes the values of slots the most recently used ones, the last slot first: the start of a chain outlives its end. Ignores
    /// slots without a value.
    pub(crate) fn touch(&mut self, slots: impl DoubleEndedIterator<Item = u32>) {
        for slot in slots.rev() {
            let used = self.keys.get(slot as usize).is_some_and(Option::is_some);
            if used && !self.held.holds(self.location(slot)) {
                self.recency.touch(slot);
            }
        }
    }

    /// Returns the slot of a key.
    pub(crate) fn slot_of(&self, key: &IndexKey) -> Option<u32> {
        self.shared.index.find(key).map(|location| location.slot)
    }

    /// Leases the values of keys to a client until `end`. Returns for each key whether the client has a lease on its value now.
    pub(crate) fn lease(&mut self, client: &mut ClientLeases, keys: &[IndexKey], end: Instant) -> Vec<bool> {
        let lease = |key| {
            let Some(location) = self.shared.index.find(key) else { return false };
            let leased = self.held.lease(client, location, end);
            if leased {
                self.recency.remove(location.slot);
            }
            leased
        };
        keys.iter().map(lease).collect()
    }

    /// Ends the leases of a client for which `ended` returns `true`. Their values are now the most recently used ones.
    pub(crate) fn end_leases(
        &mut self,
        client: &mut ClientLeases,
        ended: impl FnMut(&Location, Instant) -> bool,
    ) {
        let SlotTable { shared, keys, recency, held, .. } = self;
        held.end(client, ended, |location| {
            // The value may have been dropped meanwhile.
            let same = shared.generations.of(location.slot) == location.generation;
            if same && keys[location.slot as usize].is_some() {
                recency.touch(location.slot);
            }
        });
    }

    /// Ends the lease of a client on the value of a key, which is now the most recently used one.
    pub(crate) fn unlease(&mut self, client: &mut ClientLeases, key: &IndexKey) {
        if let Some(location) = self.shared.index.find(key)
            && self.held.end_one(client, location)
        {
            self.recency.touch(location.slot);
        }
    }

    /// Returns the number of values that leases hold.
    pub(crate) fn held(&self) -> u32 {
        self.held.count()
    }

    /// Returns a page of values in the order of their slots, and the slot from which the next page begins. A value that stays in its slot
    /// is in exactly one page, whatever is used, put or dropped between two pages.
    pub(crate) fn list(&self, request: ListRequest) -> (Vec<ListedValue>, Option<u32>) {
        let ListRequest { from, namespace, used_after } = request;
        let used = u32::try_from(self.keys.len()).unwrap_or(u32::MAX);
        let end = used.min(from.saturating_add(PAGE_SLOTS));
        let mut page = Vec::new();
        for slot in from..end {
            if page.len() == PAGE_VALUES {
                return (page, Some(slot));
            }
            let listed = |key: &&IndexKey| namespace.is_none_or(|namespace| namespace == key.namespace());
            let used = self.recency.used(slot);
            if let Some(key) = self.keys[slot as usize].as_ref().filter(listed)
                && used > used_after
            {
                let leased = self.held.holds(self.location(slot));
                page.push(ListedValue { namespace: key.namespace(), key: key.key(), slot, used, leased });
            }
        }
        (page, (end < used).then_some(end))
    }

    /// Drops the values of a page. Returns how many there were, and the slot from which the next page begins.
    pub(crate) fn clear(&mut self, request: ListRequest) -> (u32, Option<u32>) {
        let (page, next) = self.list(request);
        let dropped = page.iter().filter(|value| self.drop_value(&IndexKey::of(value.namespace, &value.key)));
        (u32::try_from(dropped.count()).unwrap_or(u32::MAX), next)
    }

    /// Returns a slot with its generation now.
    fn location(&self, slot: u32) -> Location {
        Location { slot, generation: self.shared.generations.of(slot) }
    }

    /// Drops the value of a key. Returns whether there was one.
    pub(crate) fn drop_value(&mut self, key: &IndexKey) -> bool {
        let Some(slot) = self.slot_of(key) else { return false };
        self.empty(slot);
        self.free.push(slot);
        true
    }

    /// Drops the value of a slot if its bytes do not match its checksum. Returns whether it did; `None` without looking at the bytes if
    /// this location has no value of the namespace any more, or values of the namespace have no checksums.
    pub(crate) fn drop_corrupt(&mut self, namespace: u32, location: Location) -> Result<Option<bool>> {
        let Some(&Some(key)) = self.keys.get(location.slot as usize) else { return Ok(None) };
        let terms = self.namespaces.terms(namespace).filter(|terms| terms.checksums);
        let Some(terms) =
            terms.filter(|_| key.namespace() == namespace && self.location(location.slot) == location)
        else {
            return Ok(None);
        };
        let value = self.bytes.window(0, u64::from(location.slot) * self.slot_bytes(), terms.value)?;
        let sums = window_sums([(&key.key().bytes()[..], value)].into_iter())?;
        Ok(Some(sums != [self.shared.index.checksum(location.slot)] && self.drop_value(&key)))
    }

    /// Returns a slot that holds no value: a free one, one that was never used, or that of the least recently used value. `None` if
    /// leases hold all values.
    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.keys.len() < self.slots() as usize {
            self.keys.push(None);
            return u32::try_from(self.keys.len() - 1).ok();
        }
        let oldest = self.recency.oldest()?;
        self.empty(oldest);
        self.evicted += 1;
        Some(oldest)
    }

    /// Removes the value of a slot. Readers that are copying it will not accept what they get.
    fn empty(&mut self, slot: u32) {
        if let Some(key) = self.keys[slot as usize].take() {
            self.shared.index.remove(&key);
            self.shared.generations.bump(slot);
            self.recency.remove(slot);
            self.changes.add(key, false);
            self.namespaces.remove_value(key.namespace());
        }
    }

    fn fill(&self, slot: u32, value: Window<'_>) -> Result<()> {
        let slot = self.bytes.window(0, u64::from(slot) * self.slot_bytes(), value.len())?;
        copy_all(&[Copy::one(value, slot)], Kernel::for_bytes(value.len()))
    }
}

#[cfg(test)]
mod tests;
