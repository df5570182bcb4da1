//! The client of a keeper. If the keeper is away, every key is a miss.

use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::{Copy, Kernel, Mutex, Window, copy_all};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::attachment::{Attachment, SharedMemory};
use crate::call_lock::CallLock;
use crate::index::Location;
use crate::jobs::StartedCalls;
use crate::keeper_link::{KeeperLink, StoreOptions};
use crate::key::StoreKey;
use crate::messages::{KeeperReply, KeeperRequest, Stored};
use crate::roles::ClientRole;
use crate::sizes::{self, MESSAGE_KEYS};
use crate::stats::{KeeperStats, StoreStats, nanos_since};
use crate::windows;

/// Values that are copied between two looks at their generations: at most so many, and about so many bytes.
const BATCH: usize = 64;
const BATCH_BYTES: u64 = 64 << 20;

/// A client of a keeper. Several threads may use it. It attaches again by itself when the keeper has come back.
#[derive(Debug)]
pub struct Store {
    keeper: KeeperLink,
    call_lock: CallLock,
    /// Without what `keeper` knows, and without the counts of the keeper.
    counts: Mutex<StoreStats>,
    /// The calls that were started and not waited for.
    pub(crate) jobs: StartedCalls,
}

impl Store {
    /// Opens a store, and attaches to the keeper if there is one.
    ///
    /// Returns `Err(InvalidArgument)` for an argument that is out of range or that the keeper refuses, and `Err(System)` if the system
    /// refuses the connection. A keeper that is away, or does not answer before `deadline`, is no error.
    pub fn open(options: StoreOptions, deadline: Deadline) -> Result<Store> {
        Ok(Store {
            keeper: KeeperLink::open(options, deadline)?,
            call_lock: CallLock::default(),
            counts: Mutex::default(),
            jobs: StartedCalls::default(),
        })
    }

    /// Returns whether each value has a checksum.
    pub(crate) fn checksums(&self) -> bool {
        self.keeper.checksums()
    }

    /// Returns the bytes of each value.
    pub fn value_bytes(&self) -> u64 {
        self.keeper.value()
    }

    /// Returns whether the keeper has each key, without asking it. A value may be replaced right afterwards.
    pub fn exists(&self, keys: &[StoreKey]) -> Result<Vec<bool>> {
        sizes::check_keys(keys.len())?;
        let Some(attachment) = self.attachment()? else { return Ok(vec![false; keys.len()]) };
        Ok(attachment.locations(keys).into_iter().map(|location| location.is_some()).collect())
    }

    /// Returns whether [`exists`](Self::exists) would return at once, because it would not try to attach.
    pub fn answers_at_once(&self) -> bool {
        self.keeper.answers_at_once()
    }

    /// Copies the value of each key into the window at the same position. Returns which values are complete and right; the other
    /// windows may have any bytes. Asks the keeper nothing. Returns `Err(InvalidArgument)` if two windows overlap.
    pub fn get(&self, keys: &[StoreKey], into: &[Window<'_>]) -> Result<Vec<bool>> {
        self.check_get(keys, into)?;
        self.get_while(keys, into, || Ok(()))
    }

    /// Returns an error if a call of [`get`](Self::get) must not have these arguments.
    pub(crate) fn check_get(&self, keys: &[StoreKey], into: &[Window<'_>]) -> Result<()> {
        sizes::check_keys(keys.len())?;
        windows::check_sizes("into", keys.len(), into, self.value_bytes())?;
        windows::check_disjoint(into)
    }

    /// Does what [`get`](Self::get) does with checked arguments, and fails as `proceed` does before a batch.
    pub(crate) fn get_while(
        &self,
        keys: &[StoreKey],
        into: &[Window<'_>],
        proceed: impl Fn() -> Result<()>,
    ) -> Result<Vec<bool>> {
        let begin = Instant::now();
        let attachment = self.attachment()?;
        let results = match &attachment {
            Some(attachment) => self.get_from(attachment, keys, into, proceed)?,
            None => vec![false; keys.len()],
        };
        if attachment.is_none() {
            self.count_away(keys.len());
        }
        let mut counts = self.counts.lock();
        counts.gets += 1;
        counts.get_nanos += nanos_since(begin);
        Ok(results)
    }

    fn get_from(
        &self,
        attachment: &Attachment,
        keys: &[StoreKey],
        into: &[Window<'_>],
        proceed: impl Fn() -> Result<()>,
    ) -> Result<Vec<bool>> {
        let kernel = Kernel::for_bytes(keys.len() as u64 * self.keeper.value());
        let (mut results, mut slots) = (Vec::with_capacity(keys.len()), Vec::new());
        let mut counts = StoreStats::default();
        let batch = usize::try_from(BATCH_BYTES / self.keeper.value()).unwrap_or(BATCH).clamp(1, BATCH);
        for (keys, into) in keys.chunks(batch).zip(into.chunks(batch)) {
            proceed()?;
            let locations = self.copied(attachment, keys, into, kernel)?;
            let checksums = self.checksums_at(attachment, &locations);
            let mut hits = still(&attachment.memory, &locations);
            let copied = keys.iter().zip(into);
            let corrupt = attachment.refuse_corrupt(&locations, &checksums, copied, &mut hits)?;
            self.count_found(&locations, &hits, corrupt, &mut counts);
            slots.extend(
                locations
                    .iter()
                    .zip(&hits)
                    .filter_map(|(location, &hit)| Some(location.filter(|_| hit)?.slot)),
            );
            results.extend(hits);
        }
        // Not those of a call that fails: nobody knows which of its values are there.
        self.add(&counts);
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
    ) -> Result<Vec<Option<Location>>> {
        let locations = attachment.locations(keys);
        let found = locations.iter().zip(into).filter_map(|(location, into)| Some(((*location)?, *into)));
        let from = |location| attachment.memory.window(location, self.keeper.value());
        let copies = found.map(|(location, into)| Ok(Copy::one(from(location)?, into)));
        copy_all(&copies.collect::<Result<Vec<_>>>()?, kernel)?;
        Ok(locations)
    }

    /// Returns for each location whether what was read there is its value, and counts it.
    #[cfg(test)]
    fn confirmed(&self, memory: &SharedMemory, locations: &[Option<Location>]) -> Vec<bool> {
        let (hits, mut counts) = (still(memory, locations), StoreStats::default());
        self.count_found(locations, &hits, 0, &mut counts);
        self.add(&counts);
        hits
    }

    /// Adds what was read to the counts.
    pub(crate) fn add(&self, read: &StoreStats) {
        let mut counts = self.counts.lock();
        counts.hits += read.hits;
        counts.hit_bytes += read.hit_bytes;
        counts.misses_changed += read.misses_changed;
        counts.misses_absent += read.misses_absent;
        counts.misses_corrupt += read.misses_corrupt;
    }

    /// Adds the hits and misses of keys to `counts`, of which `corrupt` had a wrong checksum.
    pub(crate) fn count_found(
        &self,
        locations: &[Option<Location>],
        hits: &[bool],
        corrupt: u64,
        counts: &mut StoreStats,
    ) {
        let count = |hits: &mut dyn Iterator<Item = bool>| hits.filter(|&hit| hit).count() as u64;
        let (found, hit) =
            (count(&mut locations.iter().map(Option::is_some)), count(&mut hits.iter().copied()));
        counts.hits += hit;
        counts.hit_bytes += hit * self.keeper.value();
        counts.misses_corrupt += corrupt;
        counts.misses_changed += found - hit - corrupt;
        counts.misses_absent += locations.len() as u64 - found;
    }

    /// Returns the checksums of the values at locations, before it is known whether they are still there. Empty if values have none.
    fn checksums_at(&self, attachment: &Attachment, locations: &[Option<Location>]) -> Vec<u64> {
        let checksum = |location: &Option<Location>| {
            location.map_or(0, |location| attachment.memory.index.checksum(location.slot))
        };
        if self.keeper.checksums() { locations.iter().map(checksum).collect() } else { Vec::new() }
    }

    /// Has the keeper copy the value of each key that it does not have, the end of a chain first. Returns what became of each value.
    /// If the keeper ends or does not answer before `deadline`, the values that it has not confirmed are [`Stored::Away`].
    pub fn put(&self, keys: &[StoreKey], values: &[Window<'_>], deadline: Deadline) -> Result<Vec<Stored>> {
        self.check_put(keys, values)?;
        // To look for an interruption each time may wait for the interpreter.
        self.put_while(keys, values, deadline, || Ok(()))
    }

    /// Does what [`put`](Self::put) does with checked arguments, and fails as `proceed` does before a part of the values.
    pub(crate) fn put_while(
        &self,
        keys: &[StoreKey],
        values: &[Window<'_>],
        deadline: Deadline,
        proceed: impl Fn() -> Result<()>,
    ) -> Result<Vec<Stored>> {
        let (begin, mut results) = (Instant::now(), vec![Stored::Away; keys.len()]);
        if let Some(attachment) = self.attachment()? {
            attachment.connection.check(ClientRole::Write)?;
            self.put_to(&attachment, keys, values, deadline, proceed, &mut results)?;
        }
        let mut counts = self.counts.lock();
        for result in &results {
            match result {
                Stored::Stored => {
                    counts.puts_stored += 1;
                    counts.put_bytes += self.keeper.value();
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

    /// Returns an error if a call of [`put`](Self::put) must not have these arguments.
    pub(crate) fn check_put(&self, keys: &[StoreKey], values: &[Window<'_>]) -> Result<()> {
        sizes::check_keys(keys.len())?;
        windows::check_sizes("values", keys.len(), values, self.value_bytes())
    }

    fn put_to(
        &self,
        attachment: &Arc<Attachment>,
        keys: &[StoreKey],
        values: &[Window<'_>],
        deadline: Deadline,
        proceed: impl Fn() -> Result<()>,
        results: &mut [Stored],
    ) -> Result<()> {
        let Some(_guard) = self.call_lock.lock(deadline)? else { return Ok(()) };
        attachment
            .put_missing(keys, values, deadline, proceed, results)
            .or_else(|error| self.given_up(attachment, error))
    }

    /// Has the keeper drop the values of keys. Returns how many it had.
    ///
    /// Returns `Err(NotLinked)` if the keeper is away, and `Err(Timeout)` if it does not answer before `deadline`.
    pub fn drop_values(&self, keys: &[StoreKey], deadline: Deadline) -> Result<u64> {
        sizes::check_keys(keys.len())?;
        let attachment = self.keeper.required()?;
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
        let attachment = self.keeper.required()?;
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
        error.unwrap_or_else(|| self.keeper.away()).with("dropped", dropped)
    }

    /// Has the keeper not replace the values of keys for `time`, at most [`MAX_LEASE`](crate::MAX_LEASE), or until this store has ended.
    /// Returns for each key whether it does. A store has leases for at most a quarter of the slots, and all stores together for half.
    ///
    /// A lease makes a hit likelier, and promises nothing: the keeper may end, and another store may drop the value. A store has one lease
    /// on a value, which also ends with a [view](crate::StoreView) of this store that has the key. If the keeper is away or does not answer before `deadline`, nothing is leased.
    pub fn lease(&self, keys: &[StoreKey], time: Duration, deadline: Deadline) -> Result<Vec<bool>> {
        sizes::check_keys(keys.len())?;
        sizes::check_lease(time)?;
        match self.attachment()? {
            Some(attachment) => self.lease_at(&attachment, keys, time, deadline),
            None => Ok(vec![false; keys.len()]),
        }
    }

    /// Leases as [`lease`](Self::lease), with the keeper of an attachment.
    pub(crate) fn lease_at(
        &self,
        attachment: &Arc<Attachment>,
        keys: &[StoreKey],
        time: Duration,
        deadline: Deadline,
    ) -> Result<Vec<bool>> {
        let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1);
        let mut leased = Vec::with_capacity(keys.len());
        if let Some(_guard) = self.call_lock.lock(deadline)? {
            for keys in keys.chunks(MESSAGE_KEYS) {
                match self.asked(attachment, &KeeperRequest::Lease(keys.into(), milliseconds), deadline) {
                    Ok(KeeperReply::Leased(part)) => leased.extend(part),
                    Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                    _ => break,
                }
            }
        }
        leased.resize(keys.len(), false);
        Ok(leased)
    }

    /// Ends the leases of this store on the values of keys, also those of its views, without a reply of the keeper. If its queue is full until `deadline`, they
    /// end with their time.
    pub fn unlease(&self, keys: &[StoreKey], deadline: Deadline) -> Result<()> {
        sizes::check_keys(keys.len())?;
        let Some(attachment) = self.attachment()? else { return Ok(()) };
        for keys in keys.chunks(MESSAGE_KEYS) {
            match attachment.connection.send(&KeeperRequest::Unlease(keys.into()), deadline) {
                Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                Err(_) => break,
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Returns the counts of this store, without those of the keeper. Asks the keeper nothing, and does not attach.
    pub fn own_stats(&self) -> Result<StoreStats> {
        let (attached, refused) = self.keeper.history()?;
        Ok(StoreStats { attached, refused, ..self.counts.lock().clone() })
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

    /// Ends the connection. Later calls fail, and calls that wait for the keeper end at once. Started calls end, too: this waits until
    /// none of them copies any more, at most 10 s. Closing again does nothing.
    pub fn close(&self) {
        if self.check_process().is_ok() {
            // Before the connection ends, so that no started call ends as if the keeper were away.
            self.jobs.close();
        }
        self.keeper.close();
    }

    /// Returns an error if the store was closed, or belongs to the parent of this process.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.keeper.check_open()
    }

    /// Returns `Err(Forked)` in a child of the process that opened the store.
    pub fn check_process(&self) -> Result<()> {
        self.keeper.check_process()
    }

    fn asked(
        &self,
        attachment: &Arc<Attachment>,
        request: &KeeperRequest,
        deadline: Deadline,
    ) -> Result<KeeperReply> {
        attachment.connection.check(request.needs())?;
        let reply = attachment.connection.ask(request, deadline);
        if reply.is_err() {
            self.keeper.forget(attachment);
        }
        reply
    }

    /// Ends an attachment whose put has failed. Returns the error if it is one of the caller.
    fn given_up(&self, attachment: &Arc<Attachment>, error: Error) -> Result<()> {
        self.keeper.forget(attachment);
        if error.kind() == ErrorKind::Interrupted { Err(error) } else { Ok(()) }
    }

    /// Returns the attachment if there is a keeper.
    pub(crate) fn attachment(&self) -> Result<Option<Arc<Attachment>>> {
        self.keeper.attachment()
    }

    /// Counts keys that were read while the keeper was away.
    pub(crate) fn count_away(&self, keys: usize) {
        self.counts.lock().misses_away += keys as u64;
    }
}

/// Returns for each location whether what was read there is its value.
pub(crate) fn still(memory: &SharedMemory, locations: &[Option<Location>]) -> Vec<bool> {
    locations
        .iter()
        .map(|location| location.as_ref().is_some_and(|location| memory.still(location)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::thread::{scope, sleep};

    use super::*;
    use crate::attachment::tests::{SilentKeeper, SilentPath, key, soon};
    use crate::socket::ListeningPath;

    #[test]
    fn close_during_puts_leaves_staged_bytes_alone() {
        let path = SilentPath::new();
        let keeper = path.start();
        let store = path.store(64);
        let keeper = keeper.join().unwrap();
        let put = |byte: u8| store.put(&[key(byte)], &[Window::of_slice(&[byte; 64])], soon()).unwrap();
        scope(|scope| {
            let first = scope.spawn(|| put(1));
            assert!(matches!(keeper.message(), KeeperRequest::Put(..)));
            let second = scope.spawn(|| put(2));
            let attachment = store.attachment().unwrap().unwrap();
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

    /// Opens a store whose keeper has a value of the key 1 that does not match its checksum.
    fn with_wrong_value(path: &SilentPath) -> (Store, SilentKeeper) {
        let keeper = path.start();
        let options = StoreOptions { checksums: true, ..path.store_options(64) };
        let store = Store::open(options, soon()).unwrap();
        let mut keeper = keeper.join().unwrap();
        keeper.store_wrong(&key(1));
        (store, keeper)
    }

    #[test]
    fn value_replaced_between_copy_and_check_is_a_miss() {
        let path = SilentPath::new();
        let _keeper = path.keeper(1, 64);
        let store = path.store(64);
        let put = |number: u8| store.put(&[key(number)], &[Window::of_slice(&[number; 64])], soon()).unwrap();
        put(1);
        let attachment = store.attachment().unwrap().unwrap();
        let mut value = [0; 64];
        let windows = [Window::of_slice_mut(&mut value)];
        let copied = || store.copied(&attachment, &[key(1)], &windows, Kernel::PLAIN).unwrap();
        assert_eq!(store.confirmed(&attachment.memory, &copied()), [true]);
        let locations = copied();
        assert!(locations[0].is_some());
        // There is one slot.
        put(2);
        assert_eq!(store.confirmed(&attachment.memory, &locations), [false]);
        // The same key in the same slot is another value.
        let (dropped, again) = (store.drop_values(&[key(2)], soon()).unwrap(), put(1));
        assert_eq!((dropped, again), (1, vec![Stored::Stored]));
        assert_eq!(store.confirmed(&attachment.memory, &locations), [false]);
        assert_eq!(store.confirmed(&attachment.memory, &copied()), [true]);
        let stats = store.stats(soon()).unwrap();
        assert_eq!((stats.hits, stats.misses_changed, stats.misses_absent), (2, 2, 0));
        assert_eq!(value, [1; 64]);
    }

    #[test]
    fn a_value_with_a_wrong_checksum_is_put_again_before_the_keeper_has_dropped_it() {
        let path = SilentPath::new();
        let (store, keeper) = with_wrong_value(&path);
        assert_eq!(store.exists(&[key(1)]).unwrap(), [true]);
        let mut value = [0; 64];
        assert_eq!(store.get(&[key(1)], &[Window::of_slice_mut(&mut value)]).unwrap(), [false]);
        let KeeperRequest::Corrupt(slot, generation) = keeper.message() else { panic!("no report") };
        // The keeper still has it.
        let attachment = store.attachment().unwrap().unwrap();
        assert!(attachment.memory.still(&Location { slot, generation }));
        assert_eq!(store.exists(&[key(1)]).unwrap(), [false]);
        // The first time, the keeper has dropped it. The second time, it has found it right.
        for stored in [Stored::Stored, Stored::Present] {
            scope(|scope| {
                let put =
                    scope.spawn(|| store.put(&[key(1)], &[Window::of_slice(&[1; 64])], soon()).unwrap());
                assert!(matches!(keeper.message(), KeeperRequest::Put(0, keys, _) if keys == [key(1)]));
                keeper.reply(&KeeperReply::Put(vec![stored]));
                assert_eq!(put.join().unwrap(), [stored]);
            });
        }
        assert_eq!(store.exists(&[key(1)]).unwrap(), [true], "the keeper has the last word");
    }

    #[test]
    fn a_value_with_a_wrong_checksum_is_never_counted_as_a_hit() {
        let path = SilentPath::new();
        let (store, _keeper) = with_wrong_value(&path);
        let attachment = store.attachment().unwrap().unwrap();
        let (keys, mut value) = ([key(1)], [0; 64]);
        let windows = [Window::of_slice_mut(&mut value)];
        let locations = store.copied(&attachment, &keys, &windows, Kernel::PLAIN).unwrap();
        let (checksums, mut hits) =
            (store.checksums_at(&attachment, &locations), still(&attachment.memory, &locations));
        assert_eq!(hits, [true]);
        let copied = keys.iter().zip(&windows);
        let corrupt = attachment.refuse_corrupt(&locations, &checksums, copied, &mut hits).unwrap();
        assert_eq!((corrupt, &hits[..]), (1, &[false][..]));
        assert_eq!(store.own_stats().unwrap(), StoreStats { attached: 1, ..StoreStats::default() });
        let mut counted = StoreStats::default();
        store.count_found(&locations, &hits, corrupt, &mut counted);
        assert_eq!((counted.hits, counted.hit_bytes, counted.misses_corrupt), (0, 0, 1));
        assert_eq!((counted.misses_changed, counted.misses_absent), (0, 0));
    }

    #[test]
    fn calls_do_not_wait_for_the_one_that_attaches() {
        let path = SilentPath::new();
        let mut store = path.store(64);
        store.keeper.wait_now(Duration::from_secs(30));
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
        let store = path.store(64);
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
        let store = path.store(64);
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
        let store = path.store(64);
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
