//! The calls of a store that return at once. Their end is an event of the store.

use std::sync::{Arc, OnceLock};

use llm_datadist_core::bindings::keeper::{ClientLane, Window};
use llm_datadist_core::{Deadline, EventQueue, Result, Transfer};

use crate::key::StoreKey;
use crate::messages::Stored;
use crate::store::Store;

/// The memory of the values of a call. It is dropped before the end of the call is reported.
pub trait JobMemory: Send + 'static {
    /// Returns a window of each value.
    fn windows(&self) -> Result<Vec<Window<'_>>>;
}

/// A get or a put that was started.
#[derive(Clone, Debug)]
pub struct StoreJob {
    /// Its record. Its outcome is the number of bytes that were found, or that the keeper has.
    pub transfer: Arc<Transfer>,
    results: Arc<OnceLock<Vec<bool>>>,
}

impl StoreJob {
    /// Returns for each key whether its value was found, or whether the keeper has it; `None` unless the job has succeeded.
    pub fn results(&self) -> Option<&[bool]> {
        self.results.get().map(Vec::as_slice).filter(|_| matches!(self.transfer.peek(), Some(Ok(_))))
    }
}

fn has_value(stored: Stored) -> bool {
    matches!(stored, Stored::Stored | Stored::Present)
}

impl Store {
    /// Returns the same store, whose started calls may use so many bytes of values at a time. The default is 16 GiB.
    #[must_use]
    pub fn with_queue(mut self, bytes: u64) -> Store {
        self.jobs.limit = bytes;
        self
    }

    /// Starts a [`get`](Store::get), and returns at once.
    ///
    /// It ends with `Err(Timeout)` if it has not finished when `deadline` passes, with `Err(Cancelled)` if it is cancelled, and with
    /// `Err(Closed)` if the store is closed. A batch of values that is being copied is finished first; nothing is written after the end.
    /// Returns `Err(InvalidArgument)` as [`get`](Store::get) does, and `Err(Busy)` if too many calls or bytes have not ended.
    pub fn start_get(
        self: &Arc<Self>,
        keys: Vec<StoreKey>,
        into: impl JobMemory,
        deadline: Deadline,
    ) -> Result<StoreJob> {
        self.check_open()?;
        self.check_get(&keys, &into.windows()?)?;
        let get = |store: &Store, keys: &[StoreKey], into: &[Window<'_>], deadline: Deadline| {
            store.get_while(keys, into, || deadline.waiting("copying values"))
        };
        self.start(ClientLane::Reads, keys, into, deadline, get)
    }

    /// Starts a [`put`](Store::put), and returns at once. Puts of a store run one after the other, in the order in which they were
    /// started.
    ///
    /// It ends with `Err(Timeout)` if it has not begun when `deadline` passes. If it has, values that the keeper has not confirmed by then
    /// count as not stored. It ends with `Err(Cancelled)` if it is cancelled, and with `Err(Closed)` if the store is closed. No value is
    /// read after the end. Returns `Err(InvalidArgument)` as [`put`](Store::put) does, and `Err(Busy)` if too many calls or bytes have not
    /// ended.
    pub fn start_put(
        self: &Arc<Self>,
        keys: Vec<StoreKey>,
        values: impl JobMemory,
        deadline: Deadline,
    ) -> Result<StoreJob> {
        self.check_open()?;
        self.check_put(&keys, &values.windows()?)?;
        let put = |store: &Store, keys: &[StoreKey], values: &[Window<'_>], deadline: Deadline| {
            let stored = store.put(keys, values, deadline)?;
            Ok(stored.into_iter().map(has_value).collect())
        };
        self.start(ClientLane::Writes, keys, values, deadline, put)
    }

    fn start(
        self: &Arc<Self>,
        lane: ClientLane,
        keys: Vec<StoreKey>,
        memory: impl JobMemory,
        deadline: Deadline,
        call: impl FnOnce(&Store, &[StoreKey], &[Window<'_>], Deadline) -> Result<Vec<bool>> + Send + 'static,
    ) -> Result<StoreJob> {
        let results = Arc::new(OnceLock::new());
        let (store, value, filled) = (self.clone(), self.value_bytes(), results.clone());
        let bytes = value.saturating_mul(keys.len() as u64);
        let transfer = self.jobs.start(lane, bytes, deadline, move |deadline| {
            let done = call(&store, &keys, &memory.windows()?, deadline)?;
            let bytes = value * done.iter().filter(|&&done| done).count() as u64;
            // It runs once.
            let _ = filled.set(done);
            Ok(bytes)
        })?;
        Ok(StoreJob { transfer, results })
    }

    /// Returns the queue of the started calls that have ended, and whose outcome nobody has taken. It is closed with the store.
    pub fn events(&self) -> Result<&Arc<EventQueue>> {
        self.check_open()?;
        Ok(self.jobs.events())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use llm_datadist_core::bindings::keeper::{Copy, Kernel, Region, Tensors, copy_all};
    use llm_datadist_core::{ErrorKind, Event};

    use super::*;
    use crate::attachment::tests::SilentPath;
    use crate::messages::KeeperRequest;
    use crate::{Keeper, KeeperOptions, StoreOptions};

    const VALUE: u64 = 64;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60)).named("timeout")
    }

    fn key(number: u8) -> StoreKey {
        StoreKey::read(0, &[number; 28]).unwrap()
    }

    fn opened(path: &SilentPath) -> Arc<Store> {
        let options = StoreOptions {
            socket: path.socket(),
            namespace: "n".into(),
            value: VALUE,
            ..StoreOptions::default()
        };
        Arc::new(Store::open(options, soon()).unwrap())
    }

    /// Values of a call. Counts those that were not dropped.
    struct Values(Tensors, u64, Arc<AtomicUsize>);

    impl Values {
        fn new(bytes: &[u8], held: &Arc<AtomicUsize>) -> Values {
            held.fetch_add(1, Ordering::SeqCst);
            let (count, size) = (bytes.len() as u64, VALUE * bytes.len().max(1) as u64);
            let region = Arc::new(Region::ordinary("values", size).unwrap());
            let values = Values(Tensors::carved(region, [0], size, ()).unwrap(), count, held.clone());
            for (window, &byte) in values.windows().unwrap().into_iter().zip(bytes) {
                copy_all(&[Copy::one(Window::of_slice(&[byte; 64]), window)], Kernel::PLAIN).unwrap();
            }
            values
        }
    }

    impl JobMemory for Values {
        fn windows(&self) -> Result<Vec<Window<'_>>> {
            (0..self.1).map(|at| self.0.window(0, at * VALUE, VALUE)).collect()
        }
    }

    impl Drop for Values {
        fn drop(&mut self) {
            self.2.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn put(store: &Arc<Store>, numbers: &[u8], deadline: Deadline) -> Result<StoreJob> {
        let held = Arc::default();
        store.start_put(
            numbers.iter().map(|&number| key(number)).collect(),
            Values::new(numbers, &held),
            deadline,
        )
    }

    fn get(store: &Arc<Store>, numbers: &[u8]) -> Result<StoreJob> {
        let held = Arc::default();
        let keys = numbers.iter().map(|&number| key(number)).collect();
        store.start_get(keys, Values::new(&vec![0; numbers.len()], &held), soon())
    }

    fn keeper(path: &SilentPath) -> Keeper {
        Keeper::open(&KeeperOptions {
            memory: 64 * VALUE,
            value: VALUE,
            socket: path.socket(),
            ..KeeperOptions::default()
        })
        .unwrap()
    }

    #[test]
    fn jobs_have_one_result_each_and_drop_their_memory_before() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let (store, held) = (opened(&path), Arc::default());
        let first = store.start_put(vec![key(1), key(2)], Values::new(&[1, 2], &held), soon()).unwrap();
        first.transfer.join(soon()).unwrap();
        assert_eq!((held.load(Ordering::SeqCst), first.results()), (0, Some(&[true, true][..])));
        assert_eq!(first.transfer.progress().done, 2 * VALUE);
        assert!(store.events().unwrap().poll(9).unwrap().is_empty(), "its outcome was taken");
        let second = get(&store, &[2, 3]).unwrap();
        assert!(second.transfer.wait(soon()).unwrap());
        let events = store.events().unwrap().poll(9).unwrap();
        assert!(matches!(&events[..], [Event::Completed(ended)] if Arc::ptr_eq(ended, &second.transfer)));
        assert_eq!(second.results(), Some(&[true, false][..]));
        assert_eq!(second.transfer.progress().done, VALUE);
        assert_eq!(store.own_stats().unwrap().hits, 1);
    }

    #[test]
    fn gets_pass_puts_at_a_hung_keeper_and_late_puts_end_unsent() {
        let path = SilentPath::new();
        let asked = path.start();
        let store = opened(&path);
        let silent = asked.join().unwrap();
        let first = put(&store, &[1], soon()).unwrap();
        assert!(matches!(silent.message(), KeeperRequest::Put(..)));
        let late = put(&store, &[2], Deadline::after(Duration::from_millis(5))).unwrap();
        let next = put(&store, &[3], soon()).unwrap();
        get(&store, &[1]).unwrap().transfer.join(soon()).unwrap();
        assert_eq!(late.transfer.join(soon()).unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!((late.results(), first.transfer.done()), (None, false));
        assert!(next.transfer.cancel(), "it waits behind the first one");
        assert_eq!(next.transfer.join(soon()).unwrap_err().kind(), ErrorKind::Cancelled);
        assert_eq!(silent.staged(), [1; 64]);
        store.close();
        assert_eq!(first.transfer.join(soon()).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(put(&store, &[4], soon()).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(store.events().unwrap_err().kind(), ErrorKind::Closed);
    }

    #[test]
    fn bytes_of_jobs_that_have_not_ended_are_bounded() {
        let path = SilentPath::new();
        let asked = path.start();
        let options = StoreOptions {
            socket: path.socket(),
            namespace: "n".into(),
            value: VALUE,
            ..StoreOptions::default()
        };
        let store = Arc::new(Store::open(options, soon()).unwrap().with_queue(3 * VALUE));
        let _silent = asked.join().unwrap();
        let first = put(&store, &[1, 2], soon()).unwrap();
        let error = get(&store, &[1, 2]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(
            error.to_string().contains("bytes=128") && error.to_string().contains("in_use=128"),
            "{error}"
        );
        get(&store, &[1]).unwrap().transfer.join(soon()).unwrap();
        assert!(first.transfer.cancel());
        assert_eq!(first.transfer.join(soon()).unwrap_err().kind(), ErrorKind::Cancelled);
        get(&store, &[1, 2, 3]).unwrap().transfer.join(soon()).unwrap();
        store.close();
    }

    #[test]
    fn wrong_arguments_are_refused_at_once() {
        let path = SilentPath::new();
        let (store, held) = (opened(&path), Arc::default());
        let wrong = store.start_get(vec![key(1)], Values::new(&[1, 2], &held), soon()).unwrap_err();
        assert_eq!(wrong.to_string(), "len(into)=2 must be 1, one for each key");
        assert_eq!(held.load(Ordering::SeqCst), 0);
        let wrong = store.start_put(vec![key(1); 5000], Values::new(&[], &held), soon()).unwrap_err();
        assert_eq!(wrong.kind(), ErrorKind::InvalidArgument);
        // Without a keeper, jobs end at once.
        let (away, missed) = (put(&store, &[1], soon()).unwrap(), get(&store, &[1]).unwrap());
        away.transfer.join(soon()).unwrap();
        missed.transfer.join(soon()).unwrap();
        assert_eq!((away.results(), missed.results()), (Some(&[false][..]), Some(&[false][..])));
    }

    #[test]
    fn a_store_that_is_dropped_keeps_its_jobs_until_they_end() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let store = opened(&path);
        let jobs: Vec<_> = (0..50).map(|number| put(&store, &[number], soon()).unwrap()).collect();
        drop(store);
        for job in jobs {
            job.transfer.join(soon()).unwrap();
            assert_eq!(job.results(), Some(&[true][..]));
        }
    }
}
