//! Copies the values of a keeper that is replaced by another one, which then takes its path.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::peer_credentials;
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::connection::REPORTED_BY;
use crate::index::Location;
use crate::key::IndexKey;
use crate::messages::{ListedNamespace, ListedValue, Stored, ValueTerms};
use crate::observer::Observer;
use crate::shared_files::SharedFiles;
use crate::socket::{FileNumbers, ListeningPath, connect_to, is_readable};
use crate::table::SlotTable;

/// How long the other keeper may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long this keeper waits for the other one to agree to end.
const AGREEING: Duration = Duration::from_secs(300);
/// How often it looks whether a keeper that has ended the connection serves again, and how long it waits for an answer then.
const ALIVE: Duration = Duration::from_secs(1);
/// How often it looks whether the other one has ended.
const LOOK: Duration = Duration::from_millis(5);
/// How often the values of the other keeper are listed: until a round copies at most so many bytes, and at most so often.
const LITTLE: u64 = 16 << 20;
const MAX_ROUNDS: u32 = 10;
/// Values that are copied between two looks at `stop`.
const BATCH: usize = 64;

/// What became of the values of the other keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenOver {
    /// Values that this keeper has now.
    pub values: u64,
    /// Values that were listed and that it has not, because they do not fit or have changed since.
    pub left: u64,
}

/// Copies the values of the keeper at the path of `listening`, has it end, and takes its path, unless `stop` is readable by then.
/// Returns the table of the values, too.
pub(crate) fn take_over(
    files: &Arc<SharedFiles>,
    listening: &ListeningPath,
    stop: &OwnedFd,
) -> Result<(TakenOver, SlotTable)> {
    let mut copy = ValueCopy::new(listening.path(), files)?;
    // The socket of the other keeper: if another one is there later, a third keeper was faster.
    let replaced = listening.found();
    let mut listed = Vec::new();
    for _ in 0..MAX_ROUNDS {
        let (values, copied) = copy.round(stop)?;
        listed = values;
        if copied <= LITTLE {
            break;
        }
    }
    check_stop(stop)?;
    copy.replace(&listed, listening, replaced, stop, AGREEING)
}

/// Has the other keeper end, whose socket is `replaced`, and takes its path. After an error, the other keeper has its path and its
/// values, whenever it reads the request, unless it has agreed to end before, or a third keeper has taken the path.
fn replace(
    other: &Observer,
    listening: &ListeningPath,
    replaced: Option<FileNumbers>,
    stop: &OwnedFd,
    time: Duration,
) -> Result<()> {
    let asked = other.ask_to_end(answer());
    let time = match &asked {
        Ok(()) => time,
        // It may be ending by itself.
        Err(error) if error.kind() == ErrorKind::NotLinked => time.min(ANSWER),
        Err(error) => return Err(error.clone()),
    };
    let (end, mut agreed) = (Instant::now() + time, false);
    loop {
        let next = Instant::now() + ALIVE;
        let taken = take_path(listening, replaced, stop, Some(if agreed { next } else { next.min(end) }));
        if matches!(taken, Ok(true)) {
            return Ok(());
        }
        let late = end <= Instant::now();
        if late || taken.is_err() {
            // If the other keeper has agreed, its values are only here now. It first frees its memory.
            agreed |= other.take_back();
        }
        taken?;
        let why = if late && !agreed {
            format!("the keeper has not agreed to end within {} s", time.as_secs())
        } else if other.has_ended() && serves(listening.path()) {
            "the keeper has ended the connection and serves again".into()
        } else {
            continue;
        };
        return Err(asked.err().unwrap_or_else(|| goes_on(listening, &why)));
    }
}

/// Takes the path once the keeper whose socket is `replaced` has ended. Returns whether it has by `end`, if that is given. Returns
/// `Err(Closed)` once `stop` is readable, and `Err(System)` if another keeper takes the path first, with its process.
fn take_path(
    listening: &ListeningPath,
    replaced: Option<FileNumbers>,
    stop: &OwnedFd,
    end: Option<Instant>,
) -> Result<bool> {
    loop {
        let lock = flock(&listening.lock, FlockOperation::NonBlockingLockExclusive);
        let another = listening.found().is_some_and(|found| Some(found) != replaced);
        if another || !matches!(lock, Err(Errno::WOULDBLOCK | Errno::INTR)) {
            return listening.take(replaced, Duration::ZERO).map(|()| true);
        }
        check_stop(stop)?;
        if end.is_some_and(|end| end <= Instant::now()) {
            return Ok(false);
        }
        sleep(LOOK);
    }
}

/// Returns whether the keeper at a path answers, also if it refuses. One that is ending, or was stopped, does not. An error of this
/// process, as if it has no descriptor left, says nothing about the keeper.
fn serves(path: &Path) -> bool {
    Observer::open(path, Deadline::after(ALIVE))
        .map_or_else(|error| error.fact(REPORTED_BY).is_some(), |_| true)
}

fn goes_on(listening: &ListeningPath, why: &str) -> Error {
    let text = format!("{why}; it goes on with its values");
    let error = Error::new(ErrorKind::System, text).with("socket", listening.path().display());
    let socket = connect_to(listening.path(), None).ok();
    let process = socket.and_then(|socket| peer_credentials(socket.as_fd())?.pid);
    process.map_or(error.clone(), |process| error.with("pid", process))
}

fn answer() -> Deadline {
    Deadline::after(ANSWER).named("the limit for an answer of the other keeper")
}

fn check_stop(stop: &OwnedFd) -> Result<()> {
    if is_readable(stop) {
        return Err(Error::new(ErrorKind::Closed, "the keeper that was to take over has been stopped"));
    }
    Ok(())
}

/// A copy of the values of another keeper.
struct ValueCopy {
    other: Observer,
    table: SlotTable,
    /// For each slot here, the location from which its value was copied.
    locations: Vec<Location>,
    /// For each namespace of the other keeper, the number that it has here, and the bytes of its values.
    namespaces: HashMap<u32, (u32, u64)>,
}

impl ValueCopy {
    /// Attaches to the keeper at `path`.
    fn new(path: &Path, files: &Arc<SharedFiles>) -> Result<ValueCopy> {
        let other = Observer::with_memory(path, answer())?;
        // No value has the generation 0.
        let nowhere = Location { slot: 0, generation: 0 };
        let locations = fallible::collect("the locations of values", (0..files.slots).map(|_| nowhere))?;
        Ok(ValueCopy { other, table: SlotTable::over(files.clone())?, locations, namespaces: HashMap::new() })
    }

    /// Makes the values those that the other keeper has, the most recently used ones as far as the memory goes. Returns all values of
    /// the other keeper, and how many bytes were copied.
    ///
    /// What clients do meanwhile is found by the next round: the list is not one of a single moment.
    fn round(&mut self, stop: &OwnedFd) -> Result<(Vec<ListedValue>, u64)> {
        let listed = self.other.all_values(answer)?;
        // Before the namespaces are read: a text may have other terms now, and values here would still bind it to the ones before.
        self.drop_changed(&listed)?;
        self.read_namespaces()?;
        let fit = listed.iter().enumerate().filter(|(_, value)| self.key(value).is_some());
        let most = fit.take(self.table.slots() as usize).last().map_or(0, |(last, _)| last + 1);
        let latest = &listed[..most];
        self.drop_changed(latest)?;
        let mut copied = 0;
        for values in latest.chunks(BATCH) {
            check_stop(stop)?;
            for value in values {
                copied += self.copy(value)?;
            }
        }
        self.touch(latest);
        Ok((listed, copied))
    }

    /// Has the other keeper end, and takes its path. Returns what was copied of the values that were listed.
    fn replace(
        mut self,
        listed: &[ListedValue],
        listening: &ListeningPath,
        replaced: Option<FileNumbers>,
        stop: &OwnedFd,
        time: Duration,
    ) -> Result<(TakenOver, SlotTable)> {
        replace(&self.other, listening, replaced, stop, time)?;
        // The other keeper changes nothing any more. Until it ended, it has answered its clients.
        self.drop_changed(listed)?;
        let values = listed.iter().filter(|value| self.slot_of(value).is_some()).count() as u64;
        self.forget_namespaces();
        Ok((TakenOver { values, left: listed.len() as u64 - values }, self.table))
    }

    /// Drops the values that are not listed, and those that the other keeper has no more, or has at another location: clients may have
    /// dropped them meanwhile, and put other bytes under the same keys.
    fn drop_changed(&mut self, listed: &[ListedValue]) -> Result<()> {
        let changed = self.table.keys.iter().map(|_| true);
        let mut changed: Vec<bool> = fallible::collect("the values that have changed", changed)?;
        let other = self.other.memory()?;
        for value in listed {
            if let Some(slot) = self.slot_of(value)
                && other.location(value.namespace, &value.key) == Some(self.locations[slot as usize])
            {
                changed[slot as usize] = false;
            }
        }
        for (at, _) in changed.iter().enumerate().filter(|(_, changed)| **changed) {
            if let Some(key) = self.table.keys[at] {
                self.table.drop_value(&key);
            }
        }
        Ok(())
    }

    /// Reads the namespaces of the other keeper. They are known here as those of readers, so that only values that are copied fix the
    /// terms of a text. For another number, a text may have other terms.
    fn read_namespaces(&mut self) -> Result<()> {
        for ListedNamespace { number, text, value, checksums, .. } in self.other.namespaces(answer())? {
            // A namespace that there is no room for is left.
            if !self.namespaces.contains_key(&number)
                && let Ok(here) = self.table.namespaces.attach_reader(&text, ValueTerms { value, checksums })
            {
                self.namespaces.insert(number, (here, value));
            }
        }
        Ok(())
    }

    /// Copies a value that fits and is not here yet, unless it is replaced meanwhile. Returns how many bytes were copied.
    fn copy(&mut self, value: &ListedValue) -> Result<u64> {
        let Some((key, bytes)) = self.key(value) else { return Ok(0) };
        let other = self.other.memory()?;
        let Some(location) = other.location(value.namespace, &value.key) else { return Ok(0) };
        let from = other.values.window(0, u64::from(location.slot) * other.geometry.slot_bytes, bytes)?;
        let stored = self.table.put_value(&key, from, other.index.checksum(location.slot))?;
        let Some(slot) = self.table.slot_of(&key).filter(|_| stored == Stored::Stored) else { return Ok(0) };
        self.locations[slot as usize] = location;
        if !other.generations.still(location.slot, location.generation) {
            self.table.drop_value(&key);
        }
        Ok(bytes)
    }

    /// Makes the order of use here that of values that are listed, the most recently used one first.
    fn touch(&mut self, listed: &[ListedValue]) {
        let slots: Vec<u32> = listed.iter().filter_map(|value| self.slot_of(value)).collect();
        self.table.touch(slots.into_iter());
    }

    fn slot_of(&self, value: &ListedValue) -> Option<u32> {
        self.table.slot_of(&self.key(value)?.0)
    }

    /// Returns the key that a value has here, and its bytes; `None` if it does not fit.
    fn key(&self, value: &ListedValue) -> Option<(IndexKey, u64)> {
        let &(namespace, bytes) = self.namespaces.get(&value.namespace)?;
        (bytes <= self.table.slot_bytes()).then(|| (IndexKey::of(namespace, &value.key), bytes))
    }

    /// Forgets the namespaces of which no value was copied.
    fn forget_namespaces(&mut self) {
        for (_, (here, _)) in self.namespaces.drain() {
            self.table.namespaces.detach_reader(here);
        }
    }
}

#[cfg(test)]
mod tests;
