//! The memory and the socket of a keeper. They outlive the process that serves from them, if it is a forked child.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use llm_datadist_core::bindings::keeper::{Mutex, refuse_beyond_room};
use llm_datadist_core::bindings::remember_process;
use llm_datadist_core::{Error, ErrorKind, Result};

use crate::roles::RoleTokens;
use crate::serving::KeeperLoop;
use crate::shared_files::SharedFiles;
use crate::sizes;
use crate::socket::{ListeningPath, connect_to, send};
use crate::table::{SlotTable, table_bytes};
use crate::take_over::{TakenOver, take_over};

/// What a keeper is opened with.
#[derive(Clone, Debug, Default)]
pub struct KeeperOptions {
    /// Bytes for values, at least one slot.
    pub memory: u64,
    /// Bytes of the largest value: 1 to 64 MiB. Each value takes a slot of this size, rounded up to a cache line.
    pub value: u64,
    /// The path at which clients attach.
    pub socket: PathBuf,
    /// The tokens with which processes of other users attach.
    pub tokens: RoleTokens,
    /// The number of the group whose processes may connect to the socket, besides those of the user. They need a token.
    pub group: Option<u32>,
}

/// The memory and the socket of a keeper, without a thread.
///
/// A process that has it may fork children that [serve](Self::serve) one after the other: what one has stored is found by the next
/// one, also if it was killed at any moment. Clients that connect meanwhile wait in the queue of the socket. Only children can do this:
/// the memory is sealed, so that nobody can map it for writing any more.
#[derive(Debug)]
pub struct Holder {
    listening: Arc<ListeningPath>,
    files: Arc<SharedFiles>,
    tokens: Arc<RoleTokens>,
    takes_over: bool,
    /// The values that this process has taken over, until it serves. Finding them again would take longer the more there are.
    taken: Mutex<Option<SlotTable>>,
}

impl Holder {
    /// Creates the memory and listens. With `take_over`, it listens beside the keeper that has the path, if there is one, until
    /// [`take_over`](Self::take_over) is called.
    ///
    /// Returns `Err(InvalidArgument)` for a size that is out of range, a path that cannot be one of a socket, or a group without tokens,
    /// `Err(OutOfMemory)` if
    /// this process may not use that much memory, and `Err(System)` if another program listens at the path (with its process), or
    /// if the system refuses a file or a socket.
    pub fn open(options: &KeeperOptions, take_over: bool) -> Result<Holder> {
        let &KeeperOptions { memory, value, ref socket, ref tokens, group } = options;
        remember_process();
        sizes::check_value(value)?;
        let (slots, slot_bytes) = (sizes::slots(memory, value)?, sizes::slot_bytes(value));
        // At least one client attaches.
        let bytes = table_bytes(slots, slot_bytes) + sizes::most_staging_bytes(slot_bytes);
        refuse_beyond_room("the values and keys of the keeper", bytes)?;
        if group.is_some() && tokens.is_empty() {
            let text = "group must not be given without tokens: nobody else could attach";
            return Err(Error::new(ErrorKind::InvalidArgument, text).of_argument("group"));
        }
        if group == Some(u32::MAX) {
            // To the system, it means not to change the group.
            return Err(Error::out_of_range("group", u32::MAX, format!("0 to {}", u32::MAX - 1)));
        }
        let found = take_over && connect_to(socket, None).is_ok();
        let listening = ListeningPath::open_for(socket, found, group)?;
        let (listening, files) = (Arc::new(listening), Arc::new(SharedFiles::new(slots, slot_bytes)?));
        Ok(Holder {
            listening,
            files,
            tokens: Arc::new(tokens.clone()),
            takes_over: found,
            taken: Mutex::new(None),
        })
    }

    /// Returns the number of values that fit.
    pub fn slots(&self) -> u32 {
        self.files.slots
    }

    /// Returns the bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.files.slot_bytes
    }

    /// Returns the bytes of memory for values.
    pub fn bytes(&self) -> u64 {
        self.files.bytes()
    }

    /// Returns whether another keeper has the path.
    pub fn takes_over(&self) -> bool {
        self.takes_over
    }

    /// Takes the bytes of the memory for values from the system, as far as there are so many. Call it only before there are values.
    pub fn prepare(&self, bytes: Range<u64>) -> Result<()> {
        self.files.prepare(bytes)
    }

    /// Copies the values of the keeper that has the path, the most recently used ones first as far as the memory goes. Then has it end,
    /// and takes its path, unless `stop` is readable by then.
    ///
    /// After an error, the other keeper has its path and its values, unless it had agreed to end before `stop` was readable, or a third
    /// keeper has taken the path. If its process was killed after it had agreed, its holder may have started another one, which has the
    /// values.
    pub fn take_over(&self, stop: &OwnedFd) -> Result<TakenOver> {
        let (taken, table) = take_over(&self.files, &self.listening, stop)?;
        *self.taken.lock() = Some(table);
        Ok(taken)
    }

    /// Creates the loop that serves from the memory, with the values that it has, until `stop` is readable.
    pub(crate) fn keeper_loop(&self, stop: OwnedFd) -> Result<KeeperLoop> {
        let table = SlotTable::over(self.files.clone())?;
        KeeperLoop::new(self.listening.clone(), stop, table, self.tokens.clone(), None)
    }

    /// Serves clients on this thread, until `stop` is readable or another keeper takes over. Returns whether the latter has happened.
    /// With `empty`, it forgets what is in the memory. Returns `Err(System)` if the system lets it wait for clients no more.
    ///
    /// Sends messages to `stop`, which keeps them apart (`SOCK_SEQPACKET`). The first one is the number of values that it has found, as
    /// a little-endian `u32`. Later ones are texts about clients that it has refused, at most one a minute.
    pub fn serve(&self, stop: OwnedFd, empty: bool) -> Result<bool> {
        if empty {
            *self.taken.lock() = None;
            SlotTable::forget_all(&self.files);
        }
        let failed = |errno| Error::new(ErrorKind::System, "the holder of the keeper has ended").errno(errno);
        let taken = self.taken.lock().take();
        let table = taken.map_or_else(|| SlotTable::over(self.files.clone()), Ok)?;
        send(&stop, &table.values().to_le_bytes(), &[]).map_err(failed)?;
        let report_to = stop.try_clone().map_err(|error| {
            Error::new(ErrorKind::System, "cannot duplicate the socket of the holder").because(error)
        })?;
        KeeperLoop::new(self.listening.clone(), stop, table, self.tokens.clone(), Some(report_to))?.run()
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Borrow;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use llm_datadist_core::bindings::keeper::{Copy, Kernel, Window, copy_all};

    use super::*;
    use crate::attachment::tests::{SilentPath, key, soon};
    use crate::keeper::Keeper;
    use crate::keeper_link::StoreOptions;
    use crate::key::IndexKey;
    use crate::messages::Stored;
    use crate::store::Store;
    use crate::view::StoreView;

    #[test]
    fn values_that_were_taken_over_are_not_searched_again() {
        let path = SilentPath::new();
        let options =
            KeeperOptions { memory: 4096, value: 64, socket: path.socket(), ..KeeperOptions::default() };
        let _keeper = Keeper::open(&options).unwrap();
        let holder = Holder::open(&options, true).unwrap();
        let (stop, other) = UnixStream::pair().unwrap();
        holder.take_over(&OwnedFd::from(stop.try_clone().unwrap())).unwrap();
        assert!(holder.taken.lock().is_some());
        drop(other);
        // It has nobody to serve: the other end is closed.
        holder.serve(stop.into(), false).unwrap_err();
        assert!(holder.taken.lock().is_none());
    }

    fn store(path: &SilentPath, checksums: bool) -> Store {
        Store::open(StoreOptions { checksums, ..path.store_options(100) }, soon()).unwrap()
    }

    fn put(store: &Store, number: u8) {
        let stored = store.put(&[key(number)], &[Window::of_slice(&[number; 100])], soon()).unwrap();
        assert_eq!(stored, [Stored::Stored]);
    }

    /// Returns the bytes of a value.
    fn got(store: &Store, number: u8) -> Option<[u8; 100]> {
        let mut bytes = [0; 100];
        store.get(&[key(number)], &[Window::of_slice_mut(&mut bytes)]).unwrap()[0].then_some(bytes)
    }

    /// Serves on a thread while `call` runs. Of a holder that is given away, the thread alone has the path then.
    fn serving<T>(holder: impl Borrow<Holder>, call: impl FnOnce() -> T) -> T {
        let (stop, stopped) = UnixStream::pair().unwrap();
        let keeper = holder.borrow().keeper_loop(stopped.into()).unwrap();
        drop(holder);
        std::thread::scope(|scope| {
            let served = scope.spawn(|| keeper.run().unwrap());
            let result = {
                // Also dropped if an assertion fails.
                let _stop = stop;
                call()
            };
            served.join().unwrap();
            result
        })
    }

    /// Waits until the store has attached to the next process.
    fn wait_for(store: &Store) {
        let end = Instant::now() + Duration::from_secs(30);
        while store.stats(soon()).unwrap().keeper.is_none() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn slot(files: &SharedFiles, number: u8) -> u32 {
        files.index.find(&IndexKey::of(0, &key(number))).unwrap().slot
    }

    /// Changes one bit of a value, as a defect of the memory does.
    fn flip(files: &SharedFiles, number: u8) {
        let (tensor, at) = (files.tensor().unwrap(), u64::from(slot(files, number)) * files.slot_bytes);
        let (byte, to) = ([number ^ 0x10], tensor.window(0, at + 99, 1).unwrap());
        copy_all(&[Copy::one(Window::of_slice(&byte), to)], Kernel::PLAIN).unwrap();
    }

    fn flipped(number: u8) -> [u8; 100] {
        let mut bytes = [number; 100];
        bytes[99] ^= 0x10;
        bytes
    }

    fn options(path: &SilentPath) -> KeeperOptions {
        KeeperOptions { memory: 128 * 8, value: 100, socket: path.socket(), ..KeeperOptions::default() }
    }

    #[test]
    fn a_value_with_a_flipped_bit_is_a_miss_and_is_dropped() {
        let path = SilentPath::new();
        let holder = Holder::open(&options(&path), false).unwrap();
        serving(&holder, || {
            let store = store(&path, true);
            (1..4).for_each(|number| put(&store, number));
            flip(&holder.files, 2);
            let mut bytes = [[0; 100]; 3];
            let windows = bytes.each_mut().map(|bytes| Window::of_slice_mut(bytes));
            assert_eq!(store.get(&[key(1), key(2), key(3)], &windows).unwrap(), [true, false, true]);
            assert_eq!((bytes[0], bytes[2]), ([1; 100], [3; 100]));
            let stats = store.stats(soon()).unwrap();
            assert_eq!((stats.hits, stats.hit_bytes, stats.misses_corrupt), (2, 200, 1));
            assert_eq!((stats.misses_absent, stats.misses_changed), (0, 0));
            let counted = stats.keeper.unwrap();
            assert_eq!((counted.corrupt, counted.dropped, counted.values), (1, 0, 2));
            assert_eq!(store.exists(&[key(2)]).unwrap(), [false]);
            put(&store, 2);
            assert_eq!(got(&store, 2), Some([2; 100]));
        });
    }

    #[test]
    fn a_view_does_not_confirm_a_value_with_a_flipped_bit() {
        let path = SilentPath::new();
        let holder = Holder::open(&options(&path), false).unwrap();
        serving(&holder, || {
            let store = Arc::new(store(&path, true));
            (1..3).for_each(|number| put(&store, number));
            let keys = || vec![key(1), key(2), key(3)];
            let view = StoreView::open(&store, keys(), Duration::from_secs(5), soon()).unwrap();
            assert_eq!(view.valid().unwrap(), [true, true, false]);
            flip(&holder.files, 2);
            assert_eq!(view.valid().unwrap(), [true, false, false]);
            // Only the first call of a view counts.
            let stats = store.stats(soon()).unwrap();
            assert_eq!((stats.hits, stats.misses_absent, stats.misses_corrupt), (2, 1, 0));
            assert_eq!(stats.keeper.unwrap().corrupt, 1, "the keeper has dropped it");
            put(&store, 2);
            flip(&holder.files, 2);
            let view = StoreView::open(&store, keys(), Duration::from_secs(5), soon()).unwrap();
            assert_eq!(view.valid().unwrap(), [true, false, false]);
            let stats = store.own_stats().unwrap();
            assert_eq!((stats.hits, stats.hit_bytes, stats.misses_corrupt), (3, 300, 1));
        });
    }

    #[test]
    fn without_checksums_a_flipped_bit_is_returned() {
        let path = SilentPath::new();
        let holder = Holder::open(&options(&path), false).unwrap();
        serving(&holder, || {
            let plain = store(&path, false);
            put(&plain, 2);
            flip(&holder.files, 2);
            assert_eq!(got(&plain, 2), Some(flipped(2)));
            assert_eq!(plain.stats(soon()).unwrap().misses_corrupt, 0);
            let other = StoreOptions { checksums: true, ..path.store_options(100) };
            let refused = Store::open(other, soon()).unwrap_err();
            assert_eq!(refused.argument_name(), Some("checksums"));
            let text = "checksums=True must be False, as in the namespace that the keeper has";
            assert_eq!(refused.reason(), text);
        });
    }

    #[test]
    fn the_next_process_and_the_next_keeper_have_the_checksums() {
        let path = SilentPath::new();
        let holder = Holder::open(&options(&path), false).unwrap();
        let first = serving(&holder, || {
            let store = store(&path, true);
            (1..5).for_each(|number| put(&store, number));
            store
        });
        flip(&holder.files, 2);
        let files = holder.files.clone();
        serving(holder, || {
            wait_for(&first);
            assert_eq!([1, 2].map(|number| got(&first, number)), [Some([1; 100]), None]);
            assert_eq!(first.stats(soon()).unwrap().misses_corrupt, 1);
            flip(&files, 3);
            let next = Holder::open(&options(&path), true).unwrap();
            let (stop, _other) = UnixStream::pair().unwrap();
            let taken = next.take_over(&stop.into()).unwrap();
            assert_eq!(taken, TakenOver { values: 3, left: 0 });
            serving(&next, || {
                wait_for(&first);
                assert_eq!([3, 4].map(|number| got(&first, number)), [None, Some([4; 100])]);
                assert_eq!(first.stats(soon()).unwrap().misses_corrupt, 2);
            });
        });
    }

    #[test]
    fn a_keeper_that_is_killed_after_it_has_agreed_to_end_is_not_waited_for() {
        let path = SilentPath::new();
        let [holder, newer] = [false, true].map(|newer| Holder::open(&options(&path), newer).unwrap());
        let [(_running, first), (again, second), (_stop, stopped)] =
            [(); 3].map(|()| UnixStream::pair().unwrap());
        let keeper = holder.keeper_loop(first.into()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(keeper.run().unwrap(), "it has agreed");
                // Its holder, which lives, starts another process.
                holder.keeper_loop(second.into()).unwrap().run().unwrap();
            });
            let refused = newer.take_over(&stopped.into()).unwrap_err();
            drop(again);
            assert!(refused.reason().contains("has ended the connection and serves again"), "{refused}");
        });
    }

    #[test]
    fn the_number_that_stands_for_no_group_is_refused() {
        let path = SilentPath::new();
        let file = path.socket().with_extension("tokens");
        std::fs::write(&file, "read 0123456789abcdef").unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let tokens = RoleTokens::read(&file).unwrap();
        let with_group = KeeperOptions { group: Some(u32::MAX), tokens, ..options(&path) };
        let refused = Holder::open(&with_group, false).unwrap_err();
        assert_eq!((refused.kind(), refused.argument_name()), (ErrorKind::InvalidArgument, Some("group")));
        assert!(!path.socket().exists());
    }

    #[test]
    fn a_group_without_tokens_is_refused() {
        let path = SilentPath::new();
        let refused = Holder::open(&KeeperOptions { group: Some(0), ..options(&path) }, false).unwrap_err();
        assert_eq!((refused.kind(), refused.argument_name()), (ErrorKind::InvalidArgument, Some("group")));
        assert!(!path.socket().exists());
    }
}
