//! A client's connection to a keeper, with the memory that both share.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llm_datadist_core::bindings::keeper::{
    CloseOnFork, Copy, Generations, Kernel, MapBudget, PeerGenerations, PeerMapping, PeerWords, Region,
    Tensors, Window, copy_all,
};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::index::{self, Index, Place};
use crate::key::{IndexKey, StoreKey};
use crate::messages::{
    AttachRequest, KeeperRefusal, KeeperReply, KeeperRequest, RefusalKind, SharedGeometry, Stored, VERSION,
    decoded, encoded,
};
use crate::sizes::{self, MESSAGE_BYTES};
use crate::socket::{PeerFile, connect_to, receive, send};

/// A connection on which the keeper has attached this process.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Declared before the socket, so that it drops first.
    _forked: CloseOnFork,
    socket: OwnedFd,
    pub(crate) geometry: SharedGeometry,
    pub(crate) index: Index<PeerWords>,
    pub(crate) generations: PeerGenerations,
    /// The slots as one tensor.
    pub(crate) values: Tensors,
    /// The memory of this process from which the keeper copies values. `None` while it may do so, which is for ever after a put
    /// without a reply, and if this attachment only looks.
    staging: Mutex<Option<Tensors>>,
    value: u64,
}

impl Attachment {
    /// Attaches to the keeper at `path`, for values of `value` bytes in a namespace.
    ///
    /// Returns `Err(NotLinked)` if no keeper listens there or it ends meanwhile, `Err(Timeout)` if it does not answer in time,
    /// `Err(InvalidArgument)` with the reason if it refuses, and another error if memory or descriptors are short here.
    pub(crate) fn open(path: &Path, namespace: &str, value: u64, deadline: Deadline) -> Result<Attachment> {
        let bytes = sizes::staging_bytes(value);
        let region = Arc::new(Region::ordinary("llm_datadist staging", bytes)?);
        let memory = region.descriptor().ok_or_else(not_sealed)?;
        let request = AttachRequest { version: VERSION, namespace: namespace.into(), value };
        let attachment = Self::attach(path, &KeeperRequest::Attach(request), &[memory], deadline)?;
        let staging = Mutex::new(Some(Tensors::carved(region.clone(), [0], bytes, ())?));
        Ok(Attachment { staging, value, ..attachment })
    }

    /// Attaches without memory to look at what the keeper has. Returns the errors of [`open`](Self::open).
    pub(crate) fn observe(path: &Path, deadline: Deadline) -> Result<Attachment> {
        Self::attach(path, &KeeperRequest::Observe(VERSION), &[], deadline)
    }

    /// Connects, sends the first message, and maps what the keeper answers with. The attachment has no staging memory.
    fn attach(
        path: &Path,
        request: &KeeperRequest,
        memory: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<Attachment> {
        let socket = connect_to(path)?;
        let forked = CloseOnFork::new(&socket);
        send(&socket, &encoded(request)?, memory).map_err(ended)?;
        let (reply, files) = received(&socket, deadline)?;
        let geometry = match reply {
            KeeperReply::Attached(geometry) => geometry,
            KeeperReply::Refused(refusal) => return Err(refused(refusal)),
            _ => return Err(unexpected()),
        };
        let SharedGeometry { slots, slot_bytes, .. } = geometry;
        let all =
            u64::from(slots).checked_mul(slot_bytes).filter(|_| (1..=Generations::CACHES).contains(&slots));
        let (Some(all), Ok(files)) = (all, <[PeerFile; 3]>::try_from(files)) else {
            return Err(unexpected());
        };
        let [values, index, generations] = files.each_ref().map(PeerFile::duplicate);
        let budget = MapBudget::new(None);
        let values = PeerMapping::map(values?, all, &budget, deadline)?;
        Ok(Attachment {
            _forked: forked,
            socket,
            geometry,
            index: Index::new(PeerWords::map(index?, index::words(slots), &budget, deadline)?, slots),
            generations: PeerGenerations::map(generations?, &budget, deadline)?,
            values: Tensors::mapped(values, [0], all)?,
            staging: Mutex::new(None),
            value: 0,
        })
    }

    /// Returns whether the keeper has not ended the connection.
    pub(crate) fn alive(&self) -> bool {
        let mut watched = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut watched, Some(&now)) {
                Err(Errno::INTR) => {}
                other => return other == Ok(0),
            }
        }
    }

    /// Returns where the value of a key is, if the keeper has it.
    pub(crate) fn place(&self, namespace: u32, key: &StoreKey) -> Option<Place> {
        self.index.find(&IndexKey::of(namespace, key)).filter(|place| place.slot < self.geometry.slots)
    }

    /// Has the keeper copy values, the last ones first, and writes to `results` what became of each. This process copies some into one
    /// half of the staging memory while the keeper copies those of the other half. At most one thread may call this at a time.
    ///
    /// After an error, the keeper may still read the staging memory and store what it has under the keys of this call. So each later
    /// call returns `Err(NotLinked)`, and changes nothing there.
    pub(crate) fn put(
        &self,
        pairs: &[(StoreKey, Window<'_>)],
        results: &mut [Stored],
        deadline: Deadline,
    ) -> Result<()> {
        let staging = self.staging().take().ok_or_else(|| ended(Errno::PIPE))?;
        let capacity = sizes::staged_values(self.value);
        // A value that needs more than half of the memory takes turns with the keeper.
        let halves = capacity.min(2);
        let part = capacity / halves;
        let mut sent = VecDeque::with_capacity(halves);
        for (turn, (pairs, results)) in pairs.chunks(part).zip(results.chunks_mut(part)).rev().enumerate() {
            if sent.len() == halves {
                self.take_results(sent.pop_front(), deadline)?;
            }
            self.stage(&staging, turn % halves * part, pairs, deadline)?;
            sent.push_back(results);
        }
        while !sent.is_empty() {
            self.take_results(sent.pop_front(), deadline)?;
        }
        *self.staging() = Some(staging);
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
        let mut copies = Vec::with_capacity(pairs.len());
        for (at, (_, value)) in (first as u64..).zip(pairs) {
            copies.push(Copy::one(*value, staging.window(0, at * self.value, self.value)?));
        }
        copy_all(&copies, Kernel::for_bytes(pairs.len() as u64 * self.value))?;
        let first = u32::try_from(first).unwrap_or(u32::MAX);
        self.send(&KeeperRequest::Put(first, pairs.iter().map(|(key, _)| *key).collect()), deadline)
    }

    /// Waits for what became of the values of one message.
    fn take_results(&self, results: Option<&mut [Stored]>, deadline: Deadline) -> Result<()> {
        let Some(results) = results else { return Ok(()) };
        match self.reply(deadline)? {
            KeeperReply::Put(stored) if stored.len() == results.len() => {
                results.copy_from_slice(&stored);
                Ok(())
            }
            _ => Err(unexpected()),
        }
    }

    fn staging(&self) -> MutexGuard<'_, Option<Tensors>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, and returns the reply. At most one thread may call this at a time. After an error, the reply may still come, so
    /// the attachment must not be used any more.
    pub(crate) fn ask(&self, request: &KeeperRequest, deadline: Deadline) -> Result<KeeperReply> {
        self.send(request, deadline)?;
        self.reply(deadline)
    }

    fn send(&self, request: &KeeperRequest, deadline: Deadline) -> Result<()> {
        let message = encoded(request)?;
        loop {
            match send(&self.socket, &message, &[]) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => wait(&self.socket, PollFlags::OUT, deadline)?,
                Err(errno) => return Err(ended(errno)),
            }
        }
    }

    fn reply(&self, deadline: Deadline) -> Result<KeeperReply> {
        match received(&self.socket, deadline)?.0 {
            KeeperReply::Refused(refusal) => Err(refused(refusal)),
            reply => Ok(reply),
        }
    }

    /// Tells the keeper that these slots were read, unless its queue is full.
    pub(crate) fn touch(&self, slots: &[u32]) {
        // The end of the chain first, because what the keeper hears last is used again last.
        for slots in slots.chunks(sizes::MESSAGE_KEYS).rev() {
            let Ok(message) = encoded(&KeeperRequest::Touch(slots.into())) else { return };
            // A lost message makes the order of use less exact, and nothing else.
            let _ = send(&self.socket, &message, &[]);
        }
    }

    /// Ends the connection. Calls that wait for a reply fail at once.
    pub(crate) fn end(&self) {
        // Fails only if the keeper has ended it.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// Waits for the next message of the keeper.
fn received(socket: &OwnedFd, deadline: Deadline) -> Result<(KeeperReply, Vec<PeerFile>)> {
    let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
    loop {
        match receive(socket, &mut buffer, &mut files) {
            Ok(Some(message)) => return Ok((decoded(message)?, files)),
            Ok(None) => return Err(ended(Errno::PIPE)),
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(errno) => return Err(ended(errno)),
        }
    }
}

/// Waits until the socket is ready, or the keeper has ended the connection.
fn wait(socket: impl AsFd, flags: PollFlags, deadline: Deadline) -> Result<()> {
    loop {
        let limit = Timespec::try_from(deadline.wait_limit()).ok();
        match poll(&mut [PollFd::new(&socket, flags)], limit.as_ref()) {
            Ok(0) | Err(Errno::INTR) => deadline.waiting("waiting for the keeper")?,
            Ok(_) => return Ok(()),
            Err(errno) => return Err(Error::new(ErrorKind::System, "poll failed").errno(errno)),
        }
    }
}

fn ended(errno: Errno) -> Error {
    Error::new(ErrorKind::NotLinked, "the keeper has ended the connection").errno(errno)
}

fn refused(refusal: KeeperRefusal) -> Error {
    let KeeperRefusal { kind, argument, reason } = refusal;
    let kind = match kind {
        RefusalKind::Argument => ErrorKind::InvalidArgument,
        RefusalKind::System => ErrorKind::System,
    };
    let error = Error::new(kind, reason).with("reported_by", "the keeper");
    if argument.is_empty() { error } else { error.of_argument(&argument) }
}

fn unexpected() -> Error {
    Error::new(ErrorKind::NotLinked, "the keeper has sent a reply that does not fit")
}

fn not_sealed() -> Error {
    let text = "this kernel cannot share memory that others may only read; a store needs Linux 5.1";
    Error::new(ErrorKind::NotEnabled, text)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread::{JoinHandle, sleep, spawn};
    use std::time::Duration;

    use super::*;
    use crate::shared_files::SharedFiles;
    use crate::socket::ListeningPath;
    use crate::table::SlotTable;

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

    /// A keeper that attaches one client, and answers nothing else.
    pub(crate) struct SilentKeeper {
        socket: OwnedFd,
        /// The staging memory of the client.
        memory: PeerFile,
        _listening: ListeningPath,
        _table: SlotTable,
    }

    /// A client that waits for the reply to its first message.
    pub(crate) struct AskedKeeper {
        listening: ListeningPath,
        socket: OwnedFd,
        memory: PeerFile,
    }

    impl AskedKeeper {
        /// Attaches the client.
        pub(crate) fn answer(self) -> SilentKeeper {
            let AskedKeeper { listening, socket, memory } = self;
            let table = SlotTable::over(Arc::new(SharedFiles::new(4, 64).unwrap())).unwrap();
            let geometry = SharedGeometry { namespace: 0, slots: 4, slot_bytes: 64 };
            let reply = encoded(&KeeperReply::Attached(geometry)).unwrap();
            send(&socket, &reply, &table.shared.descriptors().unwrap()).unwrap();
            SilentKeeper { socket, memory, _listening: listening, _table: table }
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
            AskedKeeper { listening, socket, memory: memory.into_iter().next().unwrap() }
        }

        /// Waits for the next message of the client.
        pub(crate) fn message(&self) -> KeeperRequest {
            message(&self.socket).0
        }

        /// Returns the first bytes that the client has staged.
        pub(crate) fn staged(&self) -> [u8; 64] {
            let mut bytes = [0; 64];
            assert_eq!(rustix::io::pread(self.memory.as_fd(), &mut bytes, 0), Ok(64));
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
        let soon = || Deadline::after(Duration::from_secs(30));
        let attachment = Attachment::open(&path.socket(), "n", 64, soon()).unwrap();
        let keeper = keeper.join().unwrap();
        let put = |byte: u8, deadline| {
            let key = StoreKey::read(0, &[byte; 28]).unwrap();
            attachment.put(&[(key, Window::of_slice(&[byte; 64]))], &mut [Stored::Away], deadline)
        };
        assert_eq!(put(1, Deadline::after(Duration::from_millis(1))).unwrap_err().kind(), ErrorKind::Timeout);
        assert!(matches!(keeper.message(), KeeperRequest::Put(..)));
        assert_eq!(put(2, soon()).unwrap_err().kind(), ErrorKind::NotLinked);
        assert_eq!(keeper.staged(), [1; 64], "the keeper may still copy the first value");
    }
}
