//! The client of a keeper. If the keeper is away, every key is a miss.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::{Copy, Kernel, Window, copy_all};
use llm_datadist_core::bindings::{remember_process, this_process};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::attachment::Attachment;
use crate::call_lock::CallLock;
use crate::index::Place;
use crate::key::StoreKey;
use crate::messages::{KeeperReply, KeeperRequest, Stored};
use crate::sizes::{self, MESSAGE_KEYS};
use crate::socket;
use crate::stats::{KeeperStats, StoreStats, nanos_since};

/// How long a call waits for a keeper that has just come back.
const ATTACH_WAIT: Duration = Duration::from_millis(50);
/// How long a store does not try again to attach: at first, and at most. The time doubles with each attempt. A keeper that was killed
/// is back soon if its holder lives.
const ATTACH_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];
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
    /// Locked by the call that tries to attach.
    attaching: Mutex<()>,
    /// How long it waits for the keeper.
    attach_wait: Duration,
    call_lock: CallLock,
    /// Without the reason of a refusal, and without the counts of the keeper.
    counts: Mutex<StoreStats>,
}

#[derive(Debug)]
struct StoreState {
    attached: Option<Arc<Attachment>>,
    /// Why the last attempt to attach failed, unless the keeper was away.
    refused: Option<String>,
    /// When it may try to attach.
    next_try: Instant,
    /// How long it does not try again after the next attempt.
    pause: Duration,
    closed: bool,
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
        let counts = Mutex::new(StoreStats { attached: attached.is_some().into(), ..StoreStats::default() });
        let state = Mutex::new(StoreState {
            attached,
            refused: None,
            next_try: Instant::now() + ATTACH_PAUSES[0],
            pause: ATTACH_PAUSES[0],
            closed: false,
        });
        Ok(Store {
            process: this_process(),
            options,
            state,
            attaching: Mutex::new(()),
            attach_wait: ATTACH_WAIT,
            call_lock: CallLock::default(),
            counts,
        })
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
    /// windows may have any bytes. Asks the keeper nothing. Returns `Err(InvalidArgument)` if two windows overlap.
    pub fn get(&self, keys: &[StoreKey], into: &[Window<'_>]) -> Result<Vec<bool>> {
        sizes::check_keys(keys.len())?;
        self.check_windows("into", keys, into)?;
        check_disjoint(into)?;
        let begin = Instant::now();
        let attachment = self.attachment()?;
        let results = match &attachment {
            Some(attachment) => self.get_from(attachment, keys, into)?,
            None => vec![false; keys.len()],
        };
        let mut counts = self.counts();
        if attachment.is_none() {
            counts.misses_away += keys.len() as u64;
        }
        counts.gets += 1;
        counts.get_nanos += nanos_since(begin);
        Ok(results)
    }

    fn get_from(&self, attachment: &Attachment, keys: &[StoreKey], into: &[Window<'_>]) -> Result<Vec<bool>> {
        let kernel = Kernel::for_bytes(keys.len() as u64 * self.options.value);
        let (mut results, mut slots) = (Vec::with_capacity(keys.len()), Vec::new());
        for (keys, into) in keys.chunks(BATCH).zip(into.chunks(BATCH)) {
            let places = self.copied(attachment, keys, into, kernel)?;
            let hits = self.confirmed(attachment, &places);
            slots.extend(
                places.iter().zip(&hits).filter_map(|(place, &hit)| Some(place.filter(|_| hit)?.slot)),
            );
            results.extend(hits);
        }
        attachment.touch(&slots);
        Ok(results)
    }

    /// Copies the values of keys, whatever happens to them meanwhile. Returns from where.
    fn copied(
        &self,
        attachment: &Attachment,
        keys: &[StoreKey],
        into: &[Window<'_>],
        kernel: Kernel,
    ) -> Result<Vec<Option<Place>>> {
        let places: Vec<_> = keys.iter().map(|key| place(attachment, key)).collect();
        let found = places.iter().zip(into).filter_map(|(place, into)| Some(((*place)?, *into)));
        let copies = found.map(|(place, into)| self.copy_of(attachment, place, into));
        copy_all(&copies.collect::<Result<Vec<_>>>()?, kernel)?;
        Ok(places)
    }

    /// Returns for each place whether what was copied from there is its value, and counts it.
    fn confirmed(&self, attachment: &Attachment, places: &[Option<Place>]) -> Vec<bool> {
        let right = |place: &Place| attachment.memory.generations.still(place.slot, place.generation);
        let hits: Vec<bool> = places.iter().map(|place| place.as_ref().is_some_and(right)).collect();
        let count = |hits: &mut dyn Iterator<Item = bool>| hits.filter(|&hit| hit).count() as u64;
        let (found, hit) = (count(&mut places.iter().map(Option::is_some)), count(&mut hits.iter().copied()));
        let mut counts = self.counts();
        counts.hits += hit;
        counts.hit_bytes += hit * self.options.value;
        counts.misses_changed += found - hit;
        counts.misses_absent += places.len() as u64 - found;
        hits
    }

    /// Has the keeper copy the value of each key that it does not have, the end of a chain first. Returns what became of each value.
    /// If the keeper ends or does not answer before `deadline`, the values that it has not confirmed are [`Stored::Away`].
    pub fn put(&self, keys: &[StoreKey], values: &[Window<'_>], deadline: Deadline) -> Result<Vec<Stored>> {
        sizes::check_keys(keys.len())?;
        self.check_windows("values", keys, values)?;
        let (begin, mut results) = (Instant::now(), vec![Stored::Away; keys.len()]);
        if let Some(attachment) = self.attachment()? {
            self.put_to(&attachment, keys, values, deadline, &mut results)?;
        }
        let mut counts = self.counts();
        for result in &results {
            match result {
                Stored::Stored => {
                    counts.puts_stored += 1;
                    counts.put_bytes += self.options.value;
                }
                Stored::Present => counts.puts_present += 1,
                Stored::NoRoom => counts.puts_no_room += 1,
                Stored::Away => counts.puts_away += 1,
            }
        }
        counts.puts += 1;
        counts.put_nanos += nanos_since(begin);
        drop(counts);
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
        let Some(_guard) = self.call_lock.lock(deadline)? else { return Ok(()) };
        let mut missing = Vec::with_capacity(keys.len());
        for (at, key) in keys.iter().enumerate() {
            match place(attachment, key) {
                Some(_) => results[at] = Stored::Present,
                None => missing.push(at),
            }
        }
        let touch_known = || {
            let slots = keys.iter().filter_map(|key| place(attachment, key)).map(|place| place.slot);
            attachment.touch(&slots.collect::<Vec<_>>());
        };
        // So that the new values do not replace those of this call.
        let some_known = missing.len() < keys.len();
        if some_known && !missing.is_empty() {
            touch_known();
        }
        let pairs: Vec<_> = missing.iter().map(|&at| (keys[at], values[at])).collect();
        let mut stored = vec![Stored::Away; missing.len()];
        let put = attachment.put(&pairs, &mut stored, deadline);
        missing.iter().zip(stored).for_each(|(&at, stored)| results[at] = stored);
        if let Err(error) = put {
            return self.given_up(attachment, error);
        }
        // In the order of the chain.
        if some_known {
            touch_known();
        }
        Ok(())
    }

    /// Has the keeper drop the values of keys. Returns how many it had.
    ///
    /// Returns `Err(NotLinked)` if the keeper is away, and `Err(Timeout)` if it does not answer before `deadline`.
    pub fn drop_values(&self, keys: &[StoreKey], deadline: Deadline) -> Result<u64> {
        sizes::check_keys(keys.len())?;
        let attachment = self.attachment()?.ok_or_else(|| self.away())?;
        let _guard = self.call_lock.lock_or_fail(deadline)?;
        let mut dropped = 0;
        for keys in keys.chunks(MESSAGE_KEYS) {
            match self.asked(&attachment, &KeeperRequest::Drop(keys.into()), deadline) {
                Ok(KeeperReply::Dropped(count)) => dropped += u64::from(count),
                other => return Err(self.dropped_before(other.err(), dropped)),
            }
        }
        Ok(dropped)
    }

    /// Has the keeper drop all values of the namespace. Returns how many it had. Those that are put meanwhile may stay.
    ///
    /// Returns `Err(NotLinked)` if the keeper is away, and `Err(Timeout)` if it does not answer before `deadline`.
    pub fn clear(&self, deadline: Deadline) -> Result<u64> {
        let attachment = self.attachment()?.ok_or_else(|| self.away())?;
        let _guard = self.call_lock.lock_or_fail(deadline)?;
        let (mut dropped, mut from) = (0, Some(0));
        while let Some(slot) = from {
            match self.asked(&attachment, &KeeperRequest::Clear(slot), deadline) {
                Ok(KeeperReply::Cleared(count, next)) => {
                    dropped += u64::from(count);
                    from = next.filter(|next| *next > slot);
                }
                other => return Err(self.dropped_before(other.err(), dropped)),
            }
        }
        Ok(dropped)
    }

    /// Returns the error of a call that has dropped values before it failed.
    fn dropped_before(&self, error: Option<Error>, dropped: u64) -> Error {
        error.unwrap_or_else(|| self.away()).with("dropped", dropped)
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
        let Some(_guard) = self.call_lock.lock(deadline)? else { return Ok(()) };
        for keys in keys.chunks(MESSAGE_KEYS) {
            match self.asked(&attachment, &request(keys.into()), deadline) {
                Ok(reply) => each(reply),
                Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// Returns the counts of this store, without those of the keeper. Asks the keeper nothing, and does not attach.
    pub fn own_stats(&self) -> Result<StoreStats> {
        self.check_process()?;
        let state = self.state();
        if state.closed {
            return Err(closed());
        }
        Ok(StoreStats { refused: state.refused.clone(), ..self.counts().clone() })
    }

    /// Returns the counts of this store, and those of the keeper if it answers before `deadline`. If it does not, the store attaches again.
    pub fn stats(&self, deadline: Deadline) -> Result<StoreStats> {
        let keeper = match self.attachment()? {
            Some(attachment) => self.keeper_stats(&attachment, deadline)?,
            None => None,
        };
        Ok(StoreStats { keeper, ..self.own_stats()? })
    }

    fn keeper_stats(&self, attachment: &Arc<Attachment>, deadline: Deadline) -> Result<Option<KeeperStats>> {
        let Some(_guard) = self.call_lock.lock(deadline)? else { return Ok(None) };
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
                attachment.connection.end();
            }
        }
    }

    fn asked(
        &self,
        attachment: &Arc<Attachment>,
        request: &KeeperRequest,
        deadline: Deadline,
    ) -> Result<KeeperReply> {
        let reply = attachment.connection.ask(request, deadline);
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
        attachment.connection.end();
        let mut state = self.state();
        if state.attached.as_ref().is_some_and(|attached| Arc::ptr_eq(attached, attachment)) {
            state.attached = None;
            state.next_try = Instant::now();
        }
    }

    /// Returns the attachment if there is a keeper. Attaches again if its connection has ended: at once, and then after pauses that become
    /// longer. Only one call does; the others take the keeper for away, and do not wait.
    fn attachment(&self) -> Result<Option<Arc<Attachment>>> {
        self.check_process()?;
        if let Some(attachment) = self.known()? {
            return Ok(Some(attachment));
        }
        let _attaching = match self.attaching.try_lock() {
            Ok(attaching) => attaching,
            Err(TryLockError::Poisoned(attaching)) => attaching.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        {
            let state = self.state();
            if state.next_try > Instant::now() {
                return Ok(state.attached.clone());
            }
        }
        let tried = attach(&self.options, Deadline::after(self.attach_wait));
        let mut state = self.state();
        let [first, longest] = ATTACH_PAUSES;
        state.next_try = Instant::now() + state.pause;
        state.pause = if tried.is_ok() { first } else { longest.min(2 * state.pause) };
        if state.closed {
            return Err(closed());
        }
        match tried {
            Ok(attachment) => (state.attached, state.refused) = (Some(Arc::new(attachment)), None),
            Err(error) if is_away(&error) => state.refused = None,
            Err(error) => state.refused = Some(error.to_string()),
        }
        self.counts().attached += u64::from(state.attached.is_some());
        Ok(state.attached.clone())
    }

    fn check_process(&self) -> Result<()> {
        if self.process == this_process() {
            return Ok(());
        }
        let text = "this process was forked after the store was opened; the store belongs to its parent";
        Err(Error::new(ErrorKind::Forked, text))
    }

    /// Returns the attachment if its connection has not ended. If it has, the next call that tries to attach may do so at once.
    fn known(&self) -> Result<Option<Arc<Attachment>>> {
        let mut state = self.state();
        if state.closed {
            return Err(closed());
        }
        if state.attached.as_ref().is_some_and(|attachment| !attachment.connection.alive()) {
            state.attached = None;
            state.next_try = Instant::now();
        }
        Ok(state.attached.clone())
    }

    fn copy_of<'a>(&self, attachment: &'a Attachment, place: Place, into: Window<'a>) -> Result<Copy<'a>> {
        let at = u64::from(place.slot) * attachment.memory.geometry.slot_bytes;
        Ok(Copy::one(attachment.memory.values.window(0, at, self.options.value)?, into))
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

    fn counts(&self) -> MutexGuard<'_, StoreStats> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
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

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store was closed")
}

/// Returns an error if two windows overlap: only one of them could have its value. All have the same length.
fn check_disjoint(windows: &[Window<'_>]) -> Result<()> {
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

/// Returns whether an attempt to attach failed because there is no keeper, or none that answers.
fn is_away(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotLinked | ErrorKind::Timeout)
}

fn attach(options: &StoreOptions, deadline: Deadline) -> Result<Attachment> {
    Attachment::open(&options.socket, &options.namespace, options.value, deadline)
}

/// Returns where the value of a key is, if the keeper has it.
fn place(attachment: &Attachment, key: &StoreKey) -> Option<Place> {
    attachment.memory.place(attachment.memory.geometry.namespace, key)
}

#[cfg(test)]
mod tests {
    use std::thread::{scope, sleep};

    use super::*;
    use crate::attachment::tests::{SilentKeeper, SilentPath};
    use crate::socket::ListeningPath;
    use crate::{Keeper, KeeperOptions};

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
            assert!(matches!(keeper.message(), KeeperRequest::Put(..)));
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

    fn key(number: u8) -> StoreKey {
        StoreKey::read(0, &[number; 28]).unwrap()
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    fn opened(path: &SilentPath) -> Store {
        Store::open(StoreOptions { socket: path.socket(), namespace: "n".into(), value: 64 }, soon()).unwrap()
    }

    #[test]
    fn value_replaced_between_copy_and_check_is_a_miss() {
        let path = SilentPath::new();
        let options = KeeperOptions { memory: 64, value: 64, socket: path.socket() };
        let _keeper = Keeper::open(&options).unwrap();
        let store = opened(&path);
        let put = |number: u8| store.put(&[key(number)], &[Window::of_slice(&[number; 64])], soon()).unwrap();
        put(1);
        let attachment = store.attachment().unwrap().unwrap();
        let mut value = [0; 64];
        let windows = [Window::of_slice_mut(&mut value)];
        let copied = || store.copied(&attachment, &[key(1)], &windows, Kernel::PLAIN).unwrap();
        assert_eq!(store.confirmed(&attachment, &copied()), [true]);
        let places = copied();
        assert!(places[0].is_some());
        // There is one slot.
        put(2);
        assert_eq!(store.confirmed(&attachment, &places), [false]);
        // The same key in the same slot is another value.
        let (dropped, again) = (store.drop_values(&[key(2)], soon()).unwrap(), put(1));
        assert_eq!((dropped, again), (1, vec![Stored::Stored]));
        assert_eq!(store.confirmed(&attachment, &places), [false]);
        assert_eq!(store.confirmed(&attachment, &copied()), [true]);
        let stats = store.stats(soon()).unwrap();
        assert_eq!((stats.hits, stats.misses_changed, stats.misses_absent), (2, 2, 0));
        assert_eq!(value, [1; 64]);
    }

    #[test]
    fn calls_do_not_wait_for_the_one_that_attaches() {
        let path = SilentPath::new();
        let mut store = opened(&path);
        store.attach_wait = Duration::from_secs(30);
        store.state().next_try = Instant::now();
        let listening = ListeningPath::open(&path.socket()).unwrap();
        scope(|scope| {
            let first = scope.spawn(|| store.exists(&[key(1)]));
            let asked = SilentKeeper::asked(listening);
            // The first call waits for the reply, which is sent later.
            assert_eq!(store.exists(&[key(1)]).unwrap(), [false]);
            let value = [1; 64];
            let stored = store.put(&[key(1)], &[Window::of_slice(&value)], soon()).unwrap();
            assert_eq!(stored, [Stored::Away]);
            let _keeper = asked.answer();
            assert_eq!(first.join().unwrap().unwrap(), [false]);
            assert_eq!(store.stats(Deadline::after(Duration::ZERO)).unwrap().attached, 1);
        });
    }

    #[test]
    fn overlapping_windows_are_refused() {
        let path = SilentPath::new();
        let store = opened(&path);
        let mut bytes = [0_u8; 256];
        let whole = Window::of_slice_mut(&mut bytes);
        let get = |begins: &[u64]| {
            let windows: Vec<_> = begins.iter().map(|&at| whole.part(at, 64)).collect();
            store.get(&vec![key(1); begins.len()], &windows).map_err(|error| error.to_string())
        };
        assert_eq!(get(&[128, 0, 64, 192]), Ok(vec![false; 4]));
        let overlaps = |second, first| -> Result<Vec<bool>, String> {
            Err(format!("into[{second}]=memory that overlaps into[{first}] must be memory of its own"))
        };
        assert_eq!(get(&[128, 0, 65]), overlaps(2, 0));
        assert_eq!(get(&[7, 100, 7]), overlaps(2, 0));
        assert_eq!(get(&[192, 191]), overlaps(1, 0));
    }

    #[test]
    fn own_stats_leave_the_connection_to_a_hung_keeper() {
        let path = SilentPath::new();
        let keeper = path.start();
        let store = opened(&path);
        let keeper = keeper.join().unwrap();
        let first = store.attachment().unwrap().unwrap();
        assert_eq!(store.own_stats().unwrap().keeper, None);
        assert_eq!(store.exists(&[key(1)]).unwrap(), [false]);
        assert!(first.connection.alive(), "the store still reads the memory of the keeper");
        // With the counts of the keeper, the store waits for it, and gives the connection up.
        assert_eq!(store.stats(Deadline::after(Duration::from_millis(1))).unwrap().keeper, None);
        assert!(matches!(keeper.message(), KeeperRequest::Stats), "the first message is that of stats");
        assert!(!first.connection.alive());
        store.close();
        assert_eq!(store.own_stats().unwrap_err().kind(), ErrorKind::Closed);
    }

    #[test]
    fn a_failed_drop_says_how_many_values_were_dropped_before() {
        let path = SilentPath::new();
        let keeper = path.start();
        let store = opened(&path);
        let keeper = keeper.join().unwrap();
        scope(|scope| {
            let cleared = scope.spawn(|| store.clear(soon()));
            assert!(matches!(keeper.message(), KeeperRequest::Clear(0)));
            keeper.reply(&KeeperReply::Cleared(7, Some(9)));
            assert!(matches!(keeper.message(), KeeperRequest::Clear(9)));
            drop(keeper);
            let error = cleared.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotLinked);
            assert!(error.to_string().contains("dropped=7"), "{error}");
        });
    }
}
