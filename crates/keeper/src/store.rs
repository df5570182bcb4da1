//! The client of a keeper. If the keeper is away, every key is a miss.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::{Copy, Kernel, Window, copy_all};
use llm_datadist_core::bindings::{remember_process, this_process};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::attachment::Attachment;
use crate::index::Place;
use crate::key::{IndexKey, StoreKey};
use crate::messages::{KeeperReply, KeeperRequest, KeeperStats, Stored};
use crate::sizes::{self, MESSAGE_KEYS};
use crate::socket;

/// How long a call waits for a keeper that has just come back.
const ATTACH_WAIT: Duration = Duration::from_millis(50);
/// How long a store does not try again to attach.
const ATTACH_PAUSE: Duration = Duration::from_secs(1);
/// Values that are copied between two looks at their generations.
const BATCH: usize = 64;

/// What a store is opened with.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The path at which the keeper listens.
    pub socket: PathBuf,
    /// A text that stands for everything that gives values their meaning. Stores with other texts share nothing.
    pub namespace: String,
    /// Bytes of each value.
    pub value: u64,
}

/// A client of a keeper. Several threads may use it. It attaches again by itself when the keeper has come back.
#[derive(Debug)]
pub struct Store {
    process: u32,
    options: StoreOptions,
    state: Mutex<StoreState>,
    turns: Turns,
    counts: StoreCounts,
}

#[derive(Debug)]
struct StoreState {
    attached: Option<Arc<Attachment>>,
    /// Why the last attempt to attach failed, unless the keeper was away.
    refused: Option<String>,
    /// When it may try to attach.
    next_try: Instant,
    closed: bool,
}

/// The counts of a store since it was opened, and those of its keeper.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Values that `get` has copied.
    pub hits: u64,
    /// Keys of `get` that the keeper did not have.
    pub misses_absent: u64,
    /// Keys of `get` whose value was replaced while it was copied.
    pub misses_changed: u64,
    /// Keys of `get` while the keeper was away.
    pub misses_away: u64,
    /// Values of `put` that the keeper did not take in time, or while it was away.
    pub puts_away: u64,
    /// How often the store has attached to a keeper.
    pub attached: u64,
    /// Why the store could not attach when it last tried. `None` if it could, or if the keeper was away.
    pub refused: Option<String>,
    /// What the keeper has counted; `None` if it is away.
    pub keeper: Option<KeeperStats>,
}

#[derive(Debug, Default)]
struct StoreCounts {
    hits: AtomicU64,
    absent: AtomicU64,
    changed: AtomicU64,
    away: AtomicU64,
    puts_away: AtomicU64,
    attached: AtomicU64,
}

impl Store {
    /// Opens a store, and attaches to the keeper if there is one.
    ///
    /// Returns `Err(InvalidArgument)` for an argument that is out of range or that the keeper refuses, and `Err(System)` if the system
    /// refuses the connection. A keeper that is away, or does not answer before `deadline`, is no error.
    pub fn open(options: StoreOptions, deadline: Deadline) -> Result<Store> {
        remember_process();
        sizes::check_value(options.value)?;
        sizes::check_namespace(&options.namespace)?;
        socket::address(&options.socket)?;
        let attached = match attach(&options, deadline) {
            Err(error) if is_away(&error) => None,
            attached => Some(Arc::new(attached?)),
        };
        let counts = StoreCounts::default();
        counts.attached.store(attached.is_some().into(), Ordering::Relaxed);
        let state = Mutex::new(StoreState {
            attached,
            refused: None,
            next_try: Instant::now() + ATTACH_PAUSE,
            closed: false,
        });
        Ok(Store { process: this_process(), options, state, turns: Turns::default(), counts })
    }

    /// Returns the bytes of each value.
    pub fn value_bytes(&self) -> u64 {
        self.options.value
    }

    /// Returns whether the keeper has each key, without asking it. A value may be replaced right afterwards.
    pub fn exists(&self, keys: &[StoreKey]) -> Result<Vec<bool>> {
        sizes::check_keys(keys.len())?;
        let Some(attachment) = self.attachment()? else { return Ok(vec![false; keys.len()]) };
        Ok(keys.iter().map(|key| place(&attachment, key).is_some()).collect())
    }

    /// Copies the value of each key into the window at the same position. Returns which values are complete and right; the other
    /// windows may have any bytes. Asks the keeper nothing.
    pub fn get(&self, keys: &[StoreKey], into: &[Window<'_>]) -> Result<Vec<bool>> {
        sizes::check_keys(keys.len())?;
        self.check_windows("into", keys, into)?;
        let Some(attachment) = self.attachment()? else {
            self.counts.away.fetch_add(keys.len() as u64, Ordering::Relaxed);
            return Ok(vec![false; keys.len()]);
        };
        let kernel = Kernel::for_bytes(keys.len() as u64 * self.options.value);
        let (mut results, mut slots) = (Vec::with_capacity(keys.len()), Vec::new());
        for (keys, into) in keys.chunks(BATCH).zip(into.chunks(BATCH)) {
            let places: Vec<_> = keys.iter().map(|key| place(&attachment, key)).collect();
            let found = places.iter().zip(into).filter_map(|(place, into)| Some(((*place)?, *into)));
            let copies = found.map(|(place, into)| self.copy_of(&attachment, place, into));
            copy_all(&copies.collect::<Result<Vec<_>>>()?, kernel)?;
            for place in places {
                let right = |place: &Place| attachment.generations.still(place.slot, place.generation);
                let (count, hit) = match place {
                    None => (&self.counts.absent, false),
                    Some(place) if right(&place) => (&self.counts.hits, true),
                    Some(_) => (&self.counts.changed, false),
                };
                count.fetch_add(1, Ordering::Relaxed);
                slots.extend(place.filter(|_| hit).map(|place| place.slot));
                results.push(hit);
            }
        }
        attachment.touch(&slots);
        Ok(results)
    }

    /// Has the keeper copy the value of each key that it does not have, the end of a chain first. Returns what became of each value.
    /// If the keeper ends or does not answer before `deadline`, the values that it has not confirmed are [`Stored::Away`].
    pub fn put(&self, keys: &[StoreKey], values: &[Window<'_>], deadline: Deadline) -> Result<Vec<Stored>> {
        sizes::check_keys(keys.len())?;
        self.check_windows("values", keys, values)?;
        let mut results = vec![Stored::Away; keys.len()];
        if let Some(attachment) = self.attachment()? {
            self.put_to(&attachment, keys, values, deadline, &mut results)?;
        }
        let away = results.iter().filter(|&&result| result == Stored::Away).count();
        self.counts.puts_away.fetch_add(away as u64, Ordering::Relaxed);
        Ok(results)
    }

    fn put_to(
        &self,
        attachment: &Arc<Attachment>,
        keys: &[StoreKey],
        values: &[Window<'_>],
        deadline: Deadline,
        results: &mut [Stored],
    ) -> Result<()> {
        let Some(_turn) = self.turns.take(deadline)? else { return Ok(()) };
        let mut missing = Vec::with_capacity(keys.len());
        for (at, key) in keys.iter().enumerate() {
            match place(attachment, key) {
                Some(_) => results[at] = Stored::Present,
                None => missing.push(at),
            }
        }
        for part in missing.chunks(attachment.capacity()).rev() {
            let pairs: Vec<_> = part.iter().map(|&at| (keys[at], values[at])).collect();
            match attachment.put(&pairs, deadline) {
                Ok(stored) => part.iter().zip(stored).for_each(|(&at, stored)| results[at] = stored),
                Err(error) => return self.given_up(attachment, error),
            }
        }
        if missing.len() < keys.len() {
            let slots = keys.iter().filter_map(|key| place(attachment, key)).map(|place| place.slot);
            attachment.touch(&slots.collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Has the keeper drop the values of keys. Returns how many it had.
    ///
    /// Returns `Err(NotLinked)` if the keeper is away, and `Err(Timeout)` if it does not answer before `deadline`.
    pub fn drop_values(&self, keys: &[StoreKey], deadline: Deadline) -> Result<u64> {
        sizes::check_keys(keys.len())?;
        let attachment = self.attachment()?.ok_or_else(|| self.away())?;
        let Some(_turn) = self.turns.take(deadline)? else {
            return Err(deadline.error("waiting for other calls"));
        };
        let mut dropped = 0;
        for keys in keys.chunks(MESSAGE_KEYS) {
            match self.asked(&attachment, &KeeperRequest::Drop(keys.into()), deadline)? {
                KeeperReply::Dropped(count) => dropped += u64::from(count),
                _ => return Err(self.away()),
            }
        }
        Ok(dropped)
    }

    /// Has the keeper not replace the values of keys for `time`, at most [`MAX_LEASE`](crate::MAX_LEASE), or until this store has ended.
    /// Returns for each key whether it does. A store has leases for at most a quarter of the slots, and all stores together for half.
    ///
    /// A lease makes a hit likelier, and promises nothing: the keeper may end, and another store may drop the value. If the keeper is
    /// away or does not answer before `deadline`, nothing is leased.
    pub fn lease(&self, keys: &[StoreKey], time: Duration, deadline: Deadline) -> Result<Vec<bool>> {
        sizes::check_keys(keys.len())?;
        sizes::check_lease(time)?;
        let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1);
        let mut leased = Vec::with_capacity(keys.len());
        self.ask_in_parts(
            keys,
            deadline,
            |keys| KeeperRequest::Lease(keys, milliseconds),
            |reply| {
                if let KeeperReply::Leased(part) = reply {
                    leased.extend(part);
                }
            },
        )?;
        leased.resize(keys.len(), false);
        Ok(leased)
    }

    /// Ends the leases of this store on the values of keys.
    pub fn unlease(&self, keys: &[StoreKey], deadline: Deadline) -> Result<()> {
        sizes::check_keys(keys.len())?;
        self.ask_in_parts(keys, deadline, KeeperRequest::Unlease, |_| ())
    }

    /// Asks the keeper about keys, as many as a message has at a time. Leaves out what it does not answer before `deadline`.
    fn ask_in_parts(
        &self,
        keys: &[StoreKey],
        deadline: Deadline,
        request: impl Fn(Vec<StoreKey>) -> KeeperRequest,
        mut each: impl FnMut(KeeperReply),
    ) -> Result<()> {
        let Some(attachment) = self.attachment()? else { return Ok(()) };
        let Some(_turn) = self.turns.take(deadline)? else { return Ok(()) };
        for keys in keys.chunks(MESSAGE_KEYS) {
            match self.asked(&attachment, &request(keys.into()), deadline) {
                Ok(reply) => each(reply),
                Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// Returns the counts of this store, and those of the keeper if it answers before `deadline`.
    pub fn stats(&self, deadline: Deadline) -> Result<StoreStats> {
        let keeper = match self.attachment()? {
            Some(attachment) => self.keeper_stats(&attachment, deadline)?,
            None => None,
        };
        let StoreCounts { hits, absent, changed, away, puts_away, attached } = &self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Ok(StoreStats {
            hits: of(hits),
            misses_absent: of(absent),
            misses_changed: of(changed),
            misses_away: of(away),
            puts_away: of(puts_away),
            attached: of(attached),
            refused: self.state().refused.clone(),
            keeper,
        })
    }

    fn keeper_stats(&self, attachment: &Arc<Attachment>, deadline: Deadline) -> Result<Option<KeeperStats>> {
        let Some(_turn) = self.turns.take(deadline)? else { return Ok(None) };
        match self.asked(attachment, &KeeperRequest::Stats, deadline) {
            Ok(KeeperReply::Stats(stats)) => Ok(Some(stats)),
            Err(error) if error.kind() == ErrorKind::Interrupted => Err(error),
            _ => Ok(None),
        }
    }

    /// Ends the connection. Later calls fail, and calls that wait for the keeper end at once. Closing again does nothing.
    pub fn close(&self) {
        if self.process == this_process() {
            let mut state = self.state();
            state.closed = true;
            if let Some(attachment) = state.attached.take() {
                attachment.end();
            }
        }
    }

    fn asked(
        &self,
        attachment: &Arc<Attachment>,
        request: &KeeperRequest,
        deadline: Deadline,
    ) -> Result<KeeperReply> {
        let reply = attachment.ask(request, deadline);
        if reply.is_err() {
            self.forget(attachment);
        }
        reply
    }

    /// Ends an attachment whose put has failed. Returns the error if it is one of the caller.
    fn given_up(&self, attachment: &Arc<Attachment>, error: Error) -> Result<()> {
        self.forget(attachment);
        if error.kind() == ErrorKind::Interrupted { Err(error) } else { Ok(()) }
    }

    /// Ends an attachment that must not be used any more.
    fn forget(&self, attachment: &Arc<Attachment>) {
        attachment.end();
        let mut state = self.state();
        if state.attached.as_ref().is_some_and(|attached| Arc::ptr_eq(attached, attachment)) {
            state.attached = None;
            state.next_try = Instant::now();
        }
    }

    /// Returns the attachment if there is a keeper. Attaches again if its connection has ended, at most once a second.
    fn attachment(&self) -> Result<Option<Arc<Attachment>>> {
        if self.process != this_process() {
            let text = "this process was forked after the store was opened; the store belongs to its parent";
            return Err(Error::new(ErrorKind::Forked, text));
        }
        let mut state = self.state();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "the store was closed"));
        }
        if let Some(attachment) = state.attached.as_ref().filter(|attachment| attachment.alive()) {
            return Ok(Some(attachment.clone()));
        }
        if state.attached.take().is_some() || state.next_try <= Instant::now() {
            match attach(&self.options, Deadline::after(ATTACH_WAIT)) {
                Ok(attachment) => (state.attached, state.refused) = (Some(Arc::new(attachment)), None),
                Err(error) if is_away(&error) => state.refused = None,
                Err(error) => state.refused = Some(error.to_string()),
            }
            state.next_try = Instant::now() + ATTACH_PAUSE;
            self.counts.attached.fetch_add(state.attached.is_some().into(), Ordering::Relaxed);
        }
        Ok(state.attached.clone())
    }

    fn copy_of<'a>(&self, attachment: &'a Attachment, place: Place, into: Window<'a>) -> Result<Copy<'a>> {
        let at = u64::from(place.slot) * attachment.geometry.slot_bytes;
        Ok(Copy::one(attachment.values.window(0, at, self.options.value)?, into))
    }

    fn check_windows(&self, name: &str, keys: &[StoreKey], windows: &[Window<'_>]) -> Result<()> {
        if windows.len() != keys.len() {
            let allowed = format!("{}, one for each key", keys.len());
            return Err(Error::argument(&format!("len({name})"), windows.len(), allowed));
        }
        let value = self.options.value;
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

    fn away(&self) -> Error {
        Error::new(ErrorKind::NotLinked, "the keeper is away").with("socket", self.options.socket.display())
    }

    fn state(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A forked child leaks its copy: other values of the child may have the numbers of the descriptors.
impl Drop for Store {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.process != this_process() {
            std::mem::forget(state.attached.take());
        }
    }
}

/// Returns whether an attempt to attach failed because there is no keeper, or none that answers.
fn is_away(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotLinked | ErrorKind::Timeout)
}

fn attach(options: &StoreOptions, deadline: Deadline) -> Result<Attachment> {
    Attachment::open(&options.socket, &options.namespace, options.value, deadline)
}

/// Returns where the value of a key is, if the keeper has it.
fn place(attachment: &Attachment, key: &StoreKey) -> Option<Place> {
    let place = attachment.index.find(&IndexKey::of(attachment.geometry.namespace, key));
    place.filter(|place| place.slot < attachment.geometry.slots)
}

/// The order of calls that ask the keeper: one at a time.
#[derive(Debug, Default)]
struct Turns {
    taken: Mutex<bool>,
    returned: Condvar,
}

/// The turn of a call; returned on drop.
#[derive(Debug)]
struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for a turn. `None` if the deadline passes before.
    fn take(&self, deadline: Deadline) -> Result<Option<Turn<'_>>> {
        loop {
            let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            if *taken && !deadline.passed() {
                let waited = self.returned.wait_timeout(taken, deadline.wait_limit());
                taken = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if !*taken {
                *taken = true;
                return Ok(Some(Turn(self)));
            }
            drop(taken);
            match deadline.waiting("waiting for other calls") {
                Err(error) if error.kind() == ErrorKind::Timeout => return Ok(None),
                other => other?,
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{scope, sleep};

    use super::*;
    use crate::attachment::tests::SilentPath;

    #[test]
    fn close_during_puts_leaves_staged_bytes_alone() {
        let path = SilentPath::new();
        let keeper = path.start();
        let soon = || Deadline::after(Duration::from_secs(30));
        let options = StoreOptions { socket: path.socket(), namespace: "n".into(), value: 64 };
        let store = Store::open(options, soon()).unwrap();
        let keeper = keeper.join().unwrap();
        let put = |byte: u8| {
            let key = StoreKey::read(0, &[byte; 28]).unwrap();
            store.put(&[key], &[Window::of_slice(&[byte; 64])], soon()).unwrap()
        };
        scope(|scope| {
            let first = scope.spawn(|| put(1));
            assert!(matches!(keeper.message(), KeeperRequest::Put(_)));
            let second = scope.spawn(|| put(2));
            let attachment = store.state().attached.clone().unwrap();
            // This scope, the store, the first put, and the second one.
            while Arc::strong_count(&attachment) < 4 {
                sleep(Duration::from_millis(1));
            }
            store.close();
            assert_eq!(
                (first.join().unwrap(), second.join().unwrap()),
                (vec![Stored::Away], vec![Stored::Away])
            );
        });
        assert_eq!(keeper.staged(), [1; 64], "the keeper may still copy the first value");
    }
}
