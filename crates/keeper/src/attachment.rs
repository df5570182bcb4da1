//! What a store has of a keeper: a connection, and the memory that both share.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use llm_datadist_core::bindings::keeper::{
    Copy, Generations, Kernel, MapBudget, Mutex, PeerGenerations, PeerMapping, PeerWords, Region, Tensors,
    Window, copy_all, window_sums,
};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::connection::{KeeperAccess, KeeperConnection, ended, unexpected};
use crate::dropped_on_thread::{DroppedOnThread, drop_on_thread};
use crate::index::{self, Index, Location};
use crate::key::{IndexKey, StoreKey};
use crate::messages::{
    AttachRequest, KeeperReply, KeeperRequest, SharedGeometry, Stored, VERSION, ValueTerms,
};
use crate::reported::ReportedLocations;
use crate::sizes;
use crate::socket::PeerFile;
use crate::viewed::ViewedKeys;

/// An attached store: a connection, with the memory that both ends share.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub(crate) connection: KeeperConnection,
    /// Views keep it mapped.
    pub(crate) memory: DroppedOnThread<SharedMemory>,
    /// The memory of this process from which the keeper copies values. `None` while it may do so, which is for ever after a put
    /// without a reply.
    staging: Mutex<Option<Tensors>>,
    terms: ValueTerms,
    /// The keys of the views whose leases this client has.
    pub(crate) viewed: ViewedKeys,
    reported: ReportedLocations,
}

/// Values that were sent in one message, and where the results go.
type SentPart<'a> = (&'a [(StoreKey, Window<'a>)], &'a mut [Stored]);

/// The memory of a keeper. This process has mapped it read-only.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    pub(crate) geometry: SharedGeometry,
    pub(crate) index: Index<PeerWords>,
    pub(crate) generations: PeerGenerations,
    /// The slots as one tensor.
    pub(crate) values: Tensors,
}

impl SharedMemory {
    /// Returns the memory for several owners. It is freed when the last process unmaps it, which takes longer the more memory there is.
    pub(crate) fn shared(self) -> DroppedOnThread<SharedMemory> {
        DroppedOnThread::new(self, drop_on_thread)
    }

    /// Maps the memory that the keeper has answered with.
    pub(crate) fn map(
        geometry: SharedGeometry,
        files: Vec<PeerFile>,
        deadline: Deadline,
    ) -> Result<SharedMemory> {
        let SharedGeometry { slots, slot_bytes, .. } = geometry;
        let all =
            u64::from(slots).checked_mul(slot_bytes).filter(|_| (1..=Generations::CACHES).contains(&slots));
        let (Some(all), Ok(files)) = (all, <[PeerFile; 3]>::try_from(files)) else {
            return Err(unexpected());
        };
        let [values, index, generations] = files.each_ref().map(PeerFile::duplicate);
        let budget = MapBudget::new(None);
        let values = PeerMapping::map(values?, all, &budget, deadline)?;
        Ok(SharedMemory {
            geometry,
            index: Index::new(PeerWords::map(index?, index::words(slots), &budget, deadline)?, slots),
            generations: PeerGenerations::map(generations?, &budget, deadline)?,
            values: Tensors::mapped(values, [0], all)?,
        })
    }

    /// Returns where the value of a key is, if the keeper has it.
    pub(crate) fn location(&self, namespace: u32, key: &StoreKey) -> Option<Location> {
        self.index.find(&IndexKey::of(namespace, key)).filter(|location| location.slot < self.geometry.slots)
    }

    /// Returns where the value of each key is, if the keeper has it.
    fn locations(&self, namespace: u32, keys: &[StoreKey]) -> Vec<Option<Location>> {
        keys.iter().map(|key| self.location(namespace, key)).collect()
    }

    /// Returns whether everything that was read at `location` so far was the value that was found there.
    pub(crate) fn still(&self, location: &Location) -> bool {
        self.generations.still(location.slot, location.generation)
    }

    /// Returns the first `bytes` bytes of a slot.
    pub(crate) fn window(&self, location: Location, bytes: u64) -> Result<Window<'_>> {
        self.values.window(0, u64::from(location.slot) * self.geometry.slot_bytes, bytes)
    }
}

impl Attachment {
    /// Attaches to the keeper at `path`, for values with these terms in a namespace.
    ///
    /// Returns `Err(NotLinked)` if no keeper listens there or it ends meanwhile, `Err(Timeout)` if it does not answer in time,
    /// `Err(InvalidArgument)` with the reason if it refuses, and another error if memory or descriptors are short here.
    pub(crate) fn open(
        path: &Path,
        access: &KeeperAccess,
        namespace: &str,
        terms: ValueTerms,
        deadline: Deadline,
    ) -> Result<Attachment> {
        let bytes = sizes::staging_bytes(terms.value);
        let region = Arc::new(Region::ordinary("llm_datadist staging", bytes)?);
        let memory = region.descriptor().ok_or_else(not_sealed)?;
        let request =
            KeeperRequest::Attach(AttachRequest { version: VERSION, namespace: namespace.into(), terms });
        let (connection, geometry, files) =
            KeeperConnection::open(path, access, &request, &[memory], deadline)?;
        let memory = SharedMemory::map(geometry, files, deadline)?.shared();
        let staging = Mutex::new(Some(Tensors::carved(region.clone(), [0], bytes, ())?));
        let (viewed, reported) = (ViewedKeys::default(), ReportedLocations::default());
        Ok(Attachment { connection, memory, staging, terms, viewed, reported })
    }

    /// Returns where the value of a key is, if the keeper has it and this client has not reported it as wrong.
    pub(crate) fn location(&self, key: &StoreKey) -> Option<Location> {
        self.found(key).filter(|location| !self.reported.has(location))
    }

    fn found(&self, key: &StoreKey) -> Option<Location> {
        self.memory.location(self.memory.geometry.namespace, key)
    }

    /// Has the keeper copy the value of each key that it does not have, the end of a chain first, and writes to `results` what became of
    /// each. Fails as `proceed` does before a part of them. At most one thread may call this at a time. After an error, the attachment must
    /// not be used any more.
    pub(crate) fn put_missing(
        &self,
        keys: &[StoreKey],
        values: &[Window<'_>],
        deadline: Deadline,
        proceed: impl Fn() -> Result<()>,
        results: &mut [Stored],
    ) -> Result<()> {
        let mut missing = Vec::with_capacity(keys.len());
        for (at, key) in keys.iter().enumerate() {
            match self.location(key) {
                Some(_) => results[at] = Stored::Present,
                None => missing.push(at),
            }
        }
        let touch_known = || {
            let slots = keys.iter().filter_map(|key| self.location(key)).map(|location| location.slot);
            self.touch(&slots.collect::<Vec<_>>());
        };
        // So that the new values do not replace those of this call.
        let some_known = missing.len() < keys.len();
        if some_known && !missing.is_empty() {
            touch_known();
        }
        let pairs: Vec<_> = missing.iter().map(|&at| (keys[at], values[at])).collect();
        let mut stored = vec![Stored::Away; missing.len()];
        let put = self.put(&pairs, &mut stored, deadline, proceed);
        missing.iter().zip(stored).for_each(|(&at, stored)| results[at] = stored);
        put?;
        // In the order of the chain.
        if some_known {
            touch_known();
        }
        Ok(())
    }

    /// Returns for each key what [`location`](Self::location) does.
    pub(crate) fn locations(&self, keys: &[StoreKey]) -> Vec<Option<Location>> {
        let found = self.memory.locations(self.memory.geometry.namespace, keys).into_iter();
        found.map(|location| location.filter(|location| !self.reported.has(location))).collect()
    }

    /// Has the keeper copy values, the last ones first, and writes to `results` what became of each. This process copies some into one
    /// half of the staging memory while the keeper copies those of the other half, and fails as `proceed` does before each such part. At
    /// most one thread may call this at a time.
    ///
    /// After an error, the keeper may still read the staging memory and store what it has under the keys of this call. So each later
    /// call returns `Err(NotLinked)`, and changes nothing there.
    fn put(
        &self,
        pairs: &[(StoreKey, Window<'_>)],
        results: &mut [Stored],
        deadline: Deadline,
        proceed: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let staging = self.staging.lock().take().ok_or_else(|| ended(Errno::PIPE))?;
        let capacity = sizes::staged_values(self.terms.value);
        // A value that needs more than half of the memory takes turns with the keeper.
        let halves = capacity.min(2);
        let part = capacity / halves;
        let mut sent = VecDeque::with_capacity(halves);
        for (round, (pairs, results)) in pairs.chunks(part).zip(results.chunks_mut(part)).rev().enumerate() {
            if sent.len() == halves {
                self.take_results(sent.pop_front(), deadline)?;
            }
            proceed()?;
            self.stage(&staging, round % halves * part, pairs, deadline)?;
            sent.push_back((pairs, results));
        }
        while !sent.is_empty() {
            self.take_results(sent.pop_front(), deadline)?;
        }
        *self.staging.lock() = Some(staging);
        Ok(())
    }

    /// Copies values into the staging memory, behind the first `first` ones, and has the keeper copy them.
    fn stage(
        &self,
        staging: &Tensors,
        first: usize,
        pairs: &[(StoreKey, Window<'_>)],
        deadline: Deadline,
    ) -> Result<()> {
        let bytes = self.terms.value;
        let mut copies = Vec::with_capacity(pairs.len());
        for (at, (_, value)) in (first as u64..).zip(pairs) {
            copies.push(Copy::one(*value, staging.window(0, at * bytes, bytes)?));
        }
        copy_all(&copies, Kernel::for_bytes(pairs.len() as u64 * bytes))?;
        let checksums = if self.terms.checksums {
            window_sums(pairs.iter().map(|(key, value)| (&key.bytes()[..], *value)))?
        } else {
            Vec::new()
        };
        let (first, keys) = (u32::try_from(first).unwrap_or(u32::MAX), pairs.iter().map(|(key, _)| *key));
        self.connection.send(&KeeperRequest::Put(first, keys.collect(), checksums), deadline)
    }

    /// Waits for what became of the values of one message.
    fn take_results(&self, sent: Option<SentPart<'_>>, deadline: Deadline) -> Result<()> {
        let Some((pairs, results)) = sent else { return Ok(()) };
        match self.connection.reply(deadline)? {
            KeeperReply::Put(stored) if stored.len() == results.len() => {
                results.copy_from_slice(&stored);
                // The keeper has read the reports before this message, and found these values right.
                let present = pairs.iter().zip(stored).filter(|(_, stored)| *stored == Stored::Present);
                let locations = present.filter_map(|((key, _), _)| self.found(key));
                locations.for_each(|location| self.reported.forget(&location));
                Ok(())
            }
            _ => Err(unexpected()),
        }
    }

    /// Makes each hit whose bytes do not have their checksum a miss, and reports its location. Returns how many there were.
    pub(crate) fn refuse_corrupt<'a>(
        &self,
        locations: &[Option<Location>],
        checksums: &[u64],
        copied: impl Iterator<Item = (&'a StoreKey, &'a Window<'a>)>,
        hits: &mut [bool],
    ) -> Result<u64> {
        if checksums.is_empty() {
            return Ok(0);
        }
        let found: Vec<_> = copied.enumerate().filter(|(at, _)| hits[*at]).collect();
        let sums = window_sums(found.iter().map(|(_, (key, value))| (&key.bytes()[..], **value)))?;
        let mut wrong = Vec::new();
        for ((at, _), _) in found.iter().zip(sums).filter(|((at, _), sum)| checksums[*at] != *sum) {
            hits[*at] = false;
            wrong.extend(locations[*at]);
        }
        self.report_corrupt(&wrong);
        Ok(wrong.len() as u64)
    }

    /// Tells the keeper which locations have values that do not match their checksums, as far as its queue has room. This client takes
    /// these values for absent from now on, so that they can be put again at once.
    pub(crate) fn report_corrupt(&self, locations: &[Location]) {
        for location in locations {
            // What it does not hear now, it hears at the next `get`.
            if !self.connection.send_if_room(&KeeperRequest::Corrupt(location.slot, location.generation)) {
                return;
            }
            self.reported.add(*location);
        }
    }

    /// Has the keeper end the leases of this client on keys, unless its queue is full: then they end with their time.
    pub(crate) fn unlease(&self, keys: &[StoreKey]) {
        for keys in keys.chunks(sizes::MESSAGE_KEYS) {
            self.connection.send_if_room(&KeeperRequest::Unlease(keys.into()));
        }
    }

    /// Tells the keeper that these slots were read, unless its queue is full.
    pub(crate) fn touch(&self, slots: &[u32]) {
        // The end of the chain first, because what the keeper hears last is used again last.
        for slots in slots.chunks(sizes::MESSAGE_KEYS).rev() {
            // A lost message makes the order of use less exact, and nothing else.
            self.connection.send_if_room(&KeeperRequest::Touch(slots.into()));
        }
    }
}

fn not_sealed() -> Error {
    let text = "this kernel cannot share memory that others may only read; a store needs Linux 5.1";
    Error::new(ErrorKind::NotEnabled, text)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread::{JoinHandle, sleep, spawn};
    use std::time::Duration;

    use super::*;
    use crate::messages::{decoded, encoded};
    use crate::shared_files::SharedFiles;
    use crate::sizes::MESSAGE_BYTES;
    use crate::socket::{ListeningPath, receive, send};
    use crate::table::SlotTable;
    use crate::{Keeper, KeeperOptions, Store, StoreOptions};

    pub(crate) fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    pub(crate) fn key(number: u8) -> StoreKey {
        StoreKey::read(0, &[number; 28]).unwrap()
    }

    /// Returns another key for every number.
    pub(crate) fn numbered_key(number: u32) -> StoreKey {
        let mut bytes = [7; 28];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        StoreKey::read(0, &bytes).unwrap()
    }

    /// The path of a keeper that is not there yet. It is removed when dropped.
    pub(crate) struct SilentPath(PathBuf);

    impl SilentPath {
        pub(crate) fn new() -> SilentPath {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("silent-{}-{number}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            SilentPath(path)
        }

        pub(crate) fn socket(&self) -> PathBuf {
            self.0.join("socket")
        }

        /// Opens a keeper with this many slots for values of at most `value` bytes.
        pub(crate) fn keeper(&self, slots: u64, value: u64) -> Keeper {
            let (memory, socket) = (slots * value, self.socket());
            Keeper::open(&KeeperOptions { memory, value, socket, ..KeeperOptions::default() }).unwrap()
        }

        /// Returns the options of a store in the namespace "n", with values of `value` bytes.
        pub(crate) fn store_options(&self, value: u64) -> StoreOptions {
            let (socket, namespace) = (self.socket(), "n".into());
            StoreOptions { socket, namespace, value, ..StoreOptions::default() }
        }

        /// Opens a store with values of `value` bytes.
        pub(crate) fn store(&self, value: u64) -> Store {
            Store::open(self.store_options(value), soon()).unwrap()
        }

        /// Starts the keeper. It listens when this returns.
        pub(crate) fn start(&self) -> JoinHandle<SilentKeeper> {
            let listening = ListeningPath::open(&self.socket()).unwrap();
            spawn(move || SilentKeeper::asked(listening).answer())
        }
    }

    impl Drop for SilentPath {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// A keeper that attaches one client, and answers nothing else by itself.
    pub(crate) struct SilentKeeper {
        socket: OwnedFd,
        /// The staging memory of the client; `None` if it is an observer.
        memory: Option<PeerFile>,
        _listening: ListeningPath,
        table: SlotTable,
    }

    /// A client that waits for the reply to its first message.
    pub(crate) struct AskedKeeper {
        listening: ListeningPath,
        socket: OwnedFd,
        memory: Option<PeerFile>,
    }

    impl AskedKeeper {
        /// Attaches the client.
        pub(crate) fn answer(self) -> SilentKeeper {
            let AskedKeeper { listening, socket, memory } = self;
            let table = SlotTable::over(Arc::new(SharedFiles::new(4, 64).unwrap())).unwrap();
            let geometry = SharedGeometry { namespace: 0, slots: 4, slot_bytes: 64 };
            let reply = encoded(&KeeperReply::Attached(geometry)).unwrap();
            let shared = table.shared.descriptors().unwrap();
            send(&socket, &reply, if memory.is_some() { &shared } else { &[] }).unwrap();
            SilentKeeper { socket, memory, _listening: listening, table }
        }
    }

    impl SilentKeeper {
        /// Waits for the first message of a client.
        pub(crate) fn asked(listening: ListeningPath) -> AskedKeeper {
            let socket = loop {
                match listening.accept().unwrap() {
                    Some(socket) => break socket,
                    None => sleep(Duration::from_millis(1)),
                }
            };
            let (_, memory) = message(&socket);
            AskedKeeper { listening, socket, memory: memory.into_iter().next() }
        }

        /// Waits for the next message of the client.
        pub(crate) fn message(&self) -> KeeperRequest {
            message(&self.socket).0
        }

        /// Waits until the client has ended, and returns whether it has sent no further message.
        pub(crate) fn ended(&self) -> bool {
            let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
            loop {
                match receive(&self.socket, &mut buffer, &mut files) {
                    Err(Errno::AGAIN) => sleep(Duration::from_millis(1)),
                    received => return !matches!(received, Ok(Some(_))),
                }
            }
        }

        /// Answers the last message of the client.
        pub(crate) fn reply(&self, reply: &KeeperReply) {
            send(&self.socket, &encoded(reply).unwrap(), &[]).unwrap();
        }

        /// Stores a value that does not match its checksum.
        pub(crate) fn store_wrong(&mut self, key: &StoreKey) {
            let stored = self.table.put_value(&IndexKey::of(0, key), Window::of_slice(&[1; 64]), 0);
            assert_eq!(stored.unwrap(), Stored::Stored);
        }

        /// Returns the first bytes that the client has staged.
        pub(crate) fn staged(&self) -> [u8; 64] {
            let mut bytes = [0; 64];
            assert_eq!(rustix::io::pread(self.memory.as_ref().unwrap().as_fd(), &mut bytes, 0), Ok(64));
            bytes
        }
    }

    fn message(socket: &OwnedFd) -> (KeeperRequest, Vec<PeerFile>) {
        let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
        loop {
            match receive(socket, &mut buffer, &mut files) {
                Err(Errno::AGAIN) => sleep(Duration::from_millis(1)),
                received => return (decoded(received.unwrap().unwrap()).unwrap(), files),
            }
        }
    }

    #[test]
    fn staged_bytes_stay_once_a_put_had_no_reply() {
        let path = SilentPath::new();
        let keeper = path.start();
        let terms = ValueTerms { value: 64, checksums: false };
        let attachment =
            Attachment::open(&path.socket(), &KeeperAccess::default(), "n", terms, soon()).unwrap();
        let keeper = keeper.join().unwrap();
        let put = |byte: u8, deadline| {
            attachment.put(
                &[(key(byte), Window::of_slice(&[byte; 64]))],
                &mut [Stored::Away],
                deadline,
                || Ok(()),
            )
        };
        assert_eq!(put(1, Deadline::after(Duration::from_millis(1))).unwrap_err().kind(), ErrorKind::Timeout);
        assert!(matches!(keeper.message(), KeeperRequest::Put(..)));
        assert_eq!(put(2, soon()).unwrap_err().kind(), ErrorKind::NotLinked);
        assert_eq!(keeper.staged(), [1; 64], "the keeper may still copy the first value");
    }
}
