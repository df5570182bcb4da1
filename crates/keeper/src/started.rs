//! The calls of a store that return at once. Their end is an event of the store.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use llm_datadist_core::bindings::keeper::{ClientCallKind, Window};
use llm_datadist_core::{Deadline, EventQueue, Result, Transfer};

use crate::key::StoreKey;
use crate::messages::Stored;
use crate::stats::nanos_since;
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
    /// Nanoseconds from its start until a thread has begun it.
    waited: Arc<OnceLock<u64>>,
    results: Arc<OnceLock<Vec<bool>>>,
}

impl StoreJob {
    /// Returns how many nanoseconds the job took, or has taken so far, since a thread has begun it.
    pub fn nanos(&self) -> u64 {
        self.waited.get().map_or(0, |waited| self.transfer.nanos().saturating_sub(*waited))
    }

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
    /// Returns `Err(InvalidArgument)` as [`get`](Store::get) does and for values above the bytes of the queue, and `Err(Busy)` if too
    /// many calls or bytes have not ended.
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
        self.start(ClientCallKind::Reads, keys, into, deadline, get)
    }

    /// Starts a [`put`](Store::put), and returns at once. Puts of a store run one after the other, in the order in which they were
    /// started.
    ///
    /// It ends with `Err(Timeout)` if it has not begun when `deadline` passes. If it has, values that the keeper has not confirmed by then
    /// count as not stored. It ends with `Err(Cancelled)` if it is cancelled, and with `Err(Closed)` if the store is closed; the keeper
    /// may have some of the values then. No value is read after the end. Returns `Err(InvalidArgument)` as [`put`](Store::put) does and
    /// for values above the bytes of the queue, and `Err(Busy)` if too many calls or bytes have not ended.
    pub fn start_put(
        self: &Arc<Self>,
        keys: Vec<StoreKey>,
        values: impl JobMemory,
        deadline: Deadline,
    ) -> Result<StoreJob> {
        self.check_open()?;
        self.check_put(&keys, &values.windows()?)?;
        let put = |store: &Store, keys: &[StoreKey], values: &[Window<'_>], deadline: Deadline| {
            let stored = store.put_while(keys, values, deadline, || deadline.waiting("storing values"))?;
            Ok(stored.into_iter().map(has_value).collect())
        };
        self.start(ClientCallKind::Writes, keys, values, deadline, put)
    }

    fn start(
        self: &Arc<Self>,
        kind: ClientCallKind,
        keys: Vec<StoreKey>,
        memory: impl JobMemory,
        deadline: Deadline,
        call: impl FnOnce(&Store, &[StoreKey], &[Window<'_>], Deadline) -> Result<Vec<bool>> + Send + 'static,
    ) -> Result<StoreJob> {
        let (results, waited, started) =
            (Arc::new(OnceLock::new()), Arc::new(OnceLock::new()), Instant::now());
        let (store, value, filled, begun) =
            (self.clone(), self.value_bytes(), results.clone(), waited.clone());
        let bytes = value.saturating_mul(keys.len() as u64);
        let transfer = self.jobs.start(kind, bytes, deadline, move |deadline| {
            // Like the results, it is set once, because a job runs once.
            let _ = begun.set(nanos_since(started));
            let done = call(&store, &keys, &memory.windows()?, deadline)?;
            let bytes = value * done.iter().filter(|&&done| done).count() as u64;
            let _ = filled.set(done);
            Ok(bytes)
        })?;
        Ok(StoreJob { transfer, waited, results })
    }

    /// Returns the queue of the started calls that have ended, and whose outcome nobody has taken. It is closed with the store.
    pub fn events(&self) -> Result<&Arc<EventQueue>> {
        self.check_open()?;
        self.jobs.events()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::{scope, sleep};
    use std::time::Duration;

    use llm_datadist_core::bindings::keeper::{Copy, Kernel, Region, Tensors, copy_all};
    use llm_datadist_core::{Error, ErrorKind};

    use super::*;
    use crate::attachment::tests::{SilentPath, key};
    use crate::messages::{KeeperReply, KeeperRequest};

    const VALUE: u64 = 64;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60)).named("timeout")
    }

    fn opened(path: &SilentPath) -> Arc<Store> {
        Arc::new(path.store(VALUE))
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

    fn put(store: &Arc<Store>, numbers: &[u8]) -> Result<StoreJob> {
        let held = Arc::default();
        store.start_put(
            numbers.iter().map(|&number| key(number)).collect(),
            Values::new(numbers, &held),
            soon(),
        )
    }

    fn get(store: &Arc<Store>, numbers: &[u8]) -> Result<StoreJob> {
        let held = Arc::default();
        let keys = numbers.iter().map(|&number| key(number)).collect();
        store.start_get(keys, Values::new(&vec![0; numbers.len()], &held), soon())
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
        let (away, missed) = (put(&store, &[1]).unwrap(), get(&store, &[1]).unwrap());
        away.transfer.join(soon()).unwrap();
        missed.transfer.join(soon()).unwrap();
        assert_eq!((away.results(), missed.results()), (Some(&[false][..]), Some(&[false][..])));
    }

    #[test]
    fn a_store_that_is_dropped_keeps_its_jobs_until_they_end() {
        let path = SilentPath::new();
        let _keeper = path.keeper(64, VALUE);
        let store = opened(&path);
        let jobs: Vec<_> = (0..50).map(|number| put(&store, &[number]).unwrap()).collect();
        drop(store);
        for job in jobs {
            job.transfer.join(soon()).unwrap();
            assert_eq!(job.results(), Some(&[true][..]));
        }
    }

    /// Memory of a job that its thread can only use once the returned sender is dropped.
    struct GatedValues(Values, std::sync::Mutex<Option<Receiver<()>>>, AtomicUsize, Sender<()>);

    impl GatedValues {
        /// Also returns a receiver that hears of the beginning of the job.
        fn new(held: &Arc<AtomicUsize>) -> (GatedValues, Sender<()>, Receiver<()>) {
            let ((open, gate), (begun, begins)) = (channel(), channel());
            let gate = std::sync::Mutex::new(Some(gate));
            (GatedValues(Values::new(&[0], held), gate, AtomicUsize::new(0), begun), open, begins)
        }
    }

    impl JobMemory for GatedValues {
        fn windows(&self) -> Result<Vec<Window<'_>>> {
            // The first use is the check of the arguments.
            if self.2.fetch_add(1, Ordering::SeqCst) == 1 {
                let gate = self.1.lock().unwrap().take().unwrap();
                self.3.send(()).unwrap();
                gate.recv().unwrap_err();
            }
            self.0.windows()
        }
    }

    #[test]
    fn a_job_is_reported_when_it_touches_nothing_any_more_and_close_waits_for_that() {
        let path = SilentPath::new();
        let _keeper = path.keeper(64, VALUE);
        let (store, held) = (opened(&path), Arc::default());
        put(&store, &[1]).unwrap().transfer.join(soon()).unwrap();
        let (values, open, begins) = GatedValues::new(&held);
        let job = store.start_get(vec![key(1)], values, soon()).unwrap();
        begins.recv().unwrap();
        assert!(store.events().unwrap().poll(9).unwrap().is_empty());
        assert_eq!((job.transfer.done(), held.load(Ordering::SeqCst)), (false, 1));
        scope(|scope| {
            let closes = [(); 2].map(|()| {
                let closing = || {
                    store.close();
                    held.load(Ordering::SeqCst)
                };
                scope.spawn(closing)
            });
            // Calls are refused as soon as the store is being closed.
            while get(&store, &[1]).is_ok() {
                sleep(Duration::from_millis(1));
            }
            sleep(Duration::from_millis(50));
            assert!(closes.iter().all(|close| !close.is_finished()), "the job still runs");
            drop(open);
            assert_eq!(closes.map(|close| close.join().unwrap()), [0, 0]);
        });
        assert_eq!(job.transfer.join(soon()).unwrap_err().kind(), ErrorKind::Closed);
    }

    #[test]
    fn a_cancelled_put_sends_no_further_values() {
        let path = SilentPath::new();
        let asked = path.start();
        let store = opened(&path);
        let silent = asked.join().unwrap();
        let (keys, held) = (some_keys(4096), Arc::default());
        let job = store.start_put(keys, Values::new(&[1; 4096], &held), soon()).unwrap();
        let sent = || match silent.message() {
            KeeperRequest::Put(_, keys, _) => keys.len(),
            other => panic!("{other:?}"),
        };
        let (first, second) = (sent(), sent());
        assert_eq!((first, second), (512, 512), "both halves of the staging memory");
        assert!(job.transfer.cancel());
        silent.reply(&KeeperReply::Put(vec![Stored::Stored; first]));
        assert_eq!(job.transfer.join(soon()).unwrap_err().kind(), ErrorKind::Cancelled);
        assert!(silent.ended(), "another part was sent after the cancellation");
    }

    #[test]
    fn a_put_that_is_stopped_leaves_fewer_values_than_keys() {
        let path = SilentPath::new();
        let _keeper = path.keeper(4096, VALUE);
        let (store, keys, value) = (opened(&path), some_keys(4096), [7; 64]);
        let values = vec![Window::of_slice(&value); keys.len()];
        let parts = AtomicUsize::new(0);
        let stopped = store.put_while(&keys, &values, soon(), || stop_at(&parts, 3));
        assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Interrupted);
        let there = store.exists(&keys).unwrap().iter().filter(|&&there| there).count();
        assert!(there < 4096, "{there}");
        assert_eq!(parts.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_get_that_is_stopped_finishes_its_batch_writes_no_further_one_and_counts_nothing() {
        let path = SilentPath::new();
        let _keeper = path.keeper(256, VALUE);
        let (store, keys, value) = (opened(&path), some_keys(100), [7; 64]);
        store.put(&keys, &vec![Window::of_slice(&value); 100], soon()).unwrap();
        let (mut into, batches) = (vec![0_u8; 100 * 64], AtomicUsize::new(0));
        let whole = Window::of_slice_mut(&mut into);
        let windows: Vec<_> = (0..100).map(|at| whole.part(at * VALUE, VALUE)).collect();
        let stopped = store.get_while(&keys, &windows, || stop_at(&batches, 2));
        assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Interrupted);
        let stats = store.own_stats().unwrap();
        assert_eq!((stats.gets, stats.hits, stats.hit_bytes), (0, 0, 0));
        let (copied, others) = into.split_at(64 * 64);
        assert!(copied.iter().all(|&byte| byte == 7) && others.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_batch_has_about_64_mib() {
        let path = SilentPath::new();
        let value = 24 << 20;
        let _keeper = path.keeper(1, value);
        let store = path.store(value);
        let (bytes, batches) = ([0; 64], AtomicUsize::new(0));
        // Nothing is there, so nothing is copied into these windows.
        let windows = vec![Window::of_slice(&bytes); 5];
        let found = store.get_while(&some_keys(5), &windows, || stop_at(&batches, 99)).unwrap();
        assert_eq!((found, batches.load(Ordering::SeqCst)), (vec![false; 5], 3), "two values in a batch");
    }

    #[test]
    fn no_call_starts_after_the_first_close() {
        let path = SilentPath::new();
        let store = opened(&path);
        // As if the store were closed right after a call has found it open.
        store.jobs.close();
        for error in [put(&store, &[1]).unwrap_err(), store.events().map(drop).unwrap_err()] {
            assert_eq!((error.kind(), error.reason()), (ErrorKind::Closed, "the store was closed"));
        }
        let store = opened(&path);
        get(&store, &[1]).unwrap().transfer.join(soon()).unwrap();
        store.jobs.close();
        let error = put(&store, &[1]).unwrap_err();
        assert_eq!((error.kind(), error.reason()), (ErrorKind::Closed, "the store was closed"));
    }

    #[test]
    fn a_store_answers_at_once_unless_it_would_attach() {
        let path = SilentPath::new();
        let store = opened(&path);
        while store.answers_at_once() {
            sleep(Duration::from_millis(1));
        }
        let _keeper = path.keeper(64, VALUE);
        assert_eq!(store.exists(&[key(1)]).unwrap(), [false]);
        assert!(store.answers_at_once());
        store.close();
        assert!(store.answers_at_once());
    }

    fn some_keys(count: u32) -> Vec<StoreKey> {
        let bytes = |number: u32| [number.to_le_bytes(); 7].concat();
        (0..count).map(|number| StoreKey::read(0, &bytes(number)).unwrap()).collect()
    }

    /// Fails the call number `last`, counted from 1.
    fn stop_at(calls: &AtomicUsize, last: usize) -> Result<()> {
        match calls.fetch_add(1, Ordering::SeqCst) + 1 {
            call if call == last => Err(Error::new(ErrorKind::Interrupted, "stopped")),
            _ => Ok(()),
        }
    }
}
