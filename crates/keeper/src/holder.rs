//! The memory and the socket of a keeper. They outlive the process that serves from them, if it is a forked child.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llm_datadist_core::bindings::keeper::refuse_beyond_room;
use llm_datadist_core::bindings::remember_process;
use llm_datadist_core::{Error, ErrorKind, Result};

use crate::serving::KeeperLoop;
use crate::shared_files::SharedFiles;
use crate::sizes;
use crate::socket::{ListeningPath, connect_to, send};
use crate::table::{SlotTable, table_bytes};
use crate::take_over::{TakenOver, take_over};

/// What a keeper is opened with.
#[derive(Clone, Debug)]
pub struct KeeperOptions {
    /// Bytes for values, at least one slot.
    pub memory: u64,
    /// Bytes of the largest value: 1 to 64 MiB. Each value takes a slot of this size, rounded up to a cache line.
    pub value: u64,
    /// The path at which clients attach.
    pub socket: PathBuf,
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
    takes_over: bool,
    /// The values that this process has taken over, until it serves. Finding them again would take longer the more there are.
    taken: Mutex<Option<SlotTable>>,
}

impl Holder {
    /// Creates the memory and listens. With `take_over`, it listens beside the keeper that has the path, if there is one, until
    /// [`take_over`](Self::take_over) is called.
    ///
    /// Returns `Err(InvalidArgument)` for a size that is out of range or a path that cannot be one of a socket, `Err(OutOfMemory)` if
    /// this process may not use that much memory, and `Err(System)` if another program listens at the path (with its process), or
    /// if the system refuses a file or a socket.
    pub fn open(options: &KeeperOptions, take_over: bool) -> Result<Holder> {
        let &KeeperOptions { memory, value, ref socket } = options;
        remember_process();
        sizes::check_value(value)?;
        let (slots, slot_bytes) = (sizes::slots(memory, value)?, sizes::slot_bytes(value));
        // At least one client attaches.
        let bytes = table_bytes(slots, slot_bytes) + sizes::most_staging_bytes(slot_bytes);
        refuse_beyond_room("the values and keys of the keeper", bytes)?;
        let found = take_over && connect_to(socket).is_ok();
        let listening = if found { ListeningPath::open_beside(socket) } else { ListeningPath::open(socket) };
        let (listening, files) = (Arc::new(listening?), Arc::new(SharedFiles::new(slots, slot_bytes)?));
        Ok(Holder { listening, files, takes_over: found, taken: Mutex::new(None) })
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
    /// After an error, the other keeper has its path and its values, unless it ends too late, or a third keeper takes the path.
    pub fn take_over(&self, stop: &OwnedFd) -> Result<TakenOver> {
        let (taken, table) = take_over(&self.files, &self.listening, stop)?;
        *self.taken() = Some(table);
        Ok(taken)
    }

    /// Creates the loop that serves from the memory, with the values that it has, until `stop` is readable.
    pub(crate) fn keeper_loop(&self, stop: OwnedFd) -> Result<KeeperLoop> {
        KeeperLoop::new(self.listening.clone(), stop, SlotTable::over(self.files.clone())?)
    }

    /// Serves clients on this thread, until `stop` is readable or another keeper takes over. Returns whether the latter has happened.
    /// Sends the number of values that it has found as four bytes to `stop`, the least one first, before it begins. With `empty`, it
    /// forgets what is in the memory. Returns `Err(System)` if the system lets it wait for clients no more.
    pub fn serve(&self, stop: OwnedFd, empty: bool) -> Result<bool> {
        if empty {
            *self.taken() = None;
            SlotTable::forget_all(&self.files);
        }
        let failed = |errno| Error::new(ErrorKind::System, "the holder of the keeper has ended").errno(errno);
        let taken = self.taken().take();
        let table = taken.map_or_else(|| SlotTable::over(self.files.clone()), Ok)?;
        send(&stop, &table.values().to_le_bytes(), &[]).map_err(failed)?;
        KeeperLoop::new(self.listening.clone(), stop, table)?.run()
    }

    fn taken(&self) -> MutexGuard<'_, Option<SlotTable>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::attachment::tests::SilentPath;
    use crate::keeper::Keeper;

    #[test]
    fn values_that_were_taken_over_are_not_searched_again() {
        let path = SilentPath::new();
        let options = KeeperOptions { memory: 4096, value: 64, socket: path.socket() };
        let _keeper = Keeper::open(&options).unwrap();
        let holder = Holder::open(&options, true).unwrap();
        let (stop, other) = UnixStream::pair().unwrap();
        holder.take_over(&OwnedFd::from(stop.try_clone().unwrap())).unwrap();
        assert!(holder.taken().is_some());
        drop(other);
        // It has nobody to serve: the other end is closed.
        holder.serve(stop.into(), false).unwrap_err();
        assert!(holder.taken().is_none());
    }
}
