//! A task under loom, in every order of a worker, the thread that reports layers, and the one that ends it.
//!
//! `make loom` runs it. Loom's clock does not move, so no wait times out, and no idle worker ends before its engine.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test")]

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering as Std};
use std::sync::{Arc, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use llm_datadist_core::bindings::LayerRange;
use llm_datadist_core::testing::transfer::{
    AsyncCalls, CacheTask, Delivery, Executor, LayerSink, LayerTask, Outcome,
};
use llm_datadist_core::testing::{begin_layer_task, refuse_layer, start_task};
use llm_datadist_core::{ClusterId, Deadline, Error, ErrorKind, EventQueue, Result};
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// Notes layers, and fails at one of them. It must not run after the task has reported its end.
struct Counts {
    /// One bit per layer.
    layers: Arc<AtomicUsize>,
    fails_at: Option<u32>,
    over: Arc<AtomicUsize>,
}

impl LayerSink for Counts {
    fn find(&self, _: Deadline) -> Result<u64> {
        assert_eq!(self.over.load(Ordering::SeqCst), 0, "found after the end");
        Ok(2)
    }

    fn push(&self, ready: LayerRange, _: u64, _: Deadline) -> Result<(u32, u64)> {
        let bit = 1 << ready.first;
        assert_eq!(self.layers.fetch_or(bit, Ordering::SeqCst) & bit, 0, "once");
        assert_eq!(self.over.load(Ordering::SeqCst), 0, "a layer after the end");
        if self.fails_at == Some(ready.first) {
            return Err(Error::new(ErrorKind::NotLinked, "injected"));
        }
        Ok((1, 1))
    }
}

/// Runs a task of two layers. This thread reports the layers as ready while `other` acts.
fn explore(fails_at: Option<u32>, other: fn(&CacheTask), ends: &'static [Option<ErrorKind>]) {
    let (ran, seen) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted, noted) = (ran.clone(), seen.clone());
    loom::model(move || {
        counted.fetch_add(1, Std::Relaxed);
        let executor = Executor::default();
        let (layers, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let sink = Counts { layers: layers.clone(), fails_at, over: over.clone() };
        let range = LayerRange { first: 0, end: 2 };
        let to = vec![Delivery { cluster: ClusterId(2), layers: range, sink: Ok(Arc::new(sink)) }];
        let calls = AsyncCalls::new(Arc::new(EventQueue::new(1)), executor.handle(), Weak::new());
        let task = Arc::new(start_task(&calls, 2, to, None).unwrap());
        let acts = {
            let task = task.clone();
            thread::spawn(move || other(&task))
        };
        _ = task.ready(0);
        _ = task.ready(1);
        assert!(task.wait(Deadline::after(Duration::from_secs(3600))).unwrap());
        over.store(1, Ordering::SeqCst);
        let outcome = match &task.outcomes()[0] {
            Outcome::Done => None,
            Outcome::Failed(error) => Some(error.kind()),
            other => panic!("{other:?}"),
        };
        let at = ends.iter().position(|end| *end == outcome).unwrap_or_else(|| panic!("{outcome:?}"));
        noted.fetch_or(1 << at, Std::Relaxed);
        let progress = task.progress()[0];
        assert_eq!(u64::from(progress.layers), progress.bytes);
        assert!(outcome.is_some() || progress.layers == 2);
        acts.join().unwrap();
        assert!(!task.cancel());
        // Waits for its worker, which must notice that the engine ends.
        drop(executor);
        assert_eq!(task.progress()[0], progress);
    });
    let ran = ran.load(Std::Relaxed);
    eprintln!("{ran} orders");
    assert!(ran > 3, "loom looked at {ran} orders");
    assert_eq!(seen.load(Std::Relaxed), (1 << ends.len()) - 1, "not every end came about");
}

#[test]
fn layers_come_to_an_end() {
    explore(None, |task| _ = task.ready(0), &[None]);
}

#[test]
fn a_failure_ends_it() {
    explore(Some(1), |task| _ = task.ready(1), &[Some(ErrorKind::NotLinked)]);
}

#[test]
fn it_is_cancelled_at_any_moment() {
    explore(None, |task| _ = task.cancel(), &[None, Some(ErrorKind::Cancelled)]);
}

#[test]
fn a_layer_is_refused_at_any_moment() {
    let refuse = |task: &CacheTask| refuse_layer(task, 1, &Error::new(ErrorKind::Timeout, "injected"));
    explore(None, refuse, &[None, Some(ErrorKind::Timeout)]);
}

/// Runs a push of one layer. This thread reports the layer while `other` acts.
fn explore_transfer(other: fn(&LayerTask, &AsyncCalls), ends: &'static [Option<ErrorKind>]) {
    let (ran, seen) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted, noted) = (ran.clone(), seen.clone());
    loom::model(move || {
        counted.fetch_add(1, Std::Relaxed);
        let executor = Executor::default();
        let events = Arc::new(EventQueue::new(1));
        let calls = Arc::new(AsyncCalls::new(events, executor.handle(), Weak::new()));
        let (layers, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let sink = Counts { layers: layers.clone(), fails_at: None, over: over.clone() };
        let range = LayerRange { first: 0, end: 1 };
        let to = vec![Delivery { cluster: ClusterId(2), layers: range, sink: Ok(Arc::new(sink)) }];
        let task = Arc::new(begin_layer_task(&calls, 1, to, Duration::from_secs(3600)).unwrap());
        let transfer = task.transfer().clone();
        let acts = {
            let (task, calls) = (task.clone(), calls.clone());
            thread::spawn(move || other(&task, &calls))
        };
        _ = task.ready(0);
        assert!(transfer.wait(Deadline::after(Duration::from_secs(3600))).unwrap());
        over.store(1, Ordering::SeqCst);
        let outcome = transfer.peek().unwrap();
        assert!(outcome.is_err() || layers.load(Ordering::SeqCst) == 1);
        let end = outcome.err().map(|error| error.kind());
        let at = ends.iter().position(|known| *known == end).unwrap_or_else(|| panic!("{end:?}"));
        noted.fetch_or(1 << at, Std::Relaxed);
        acts.join().unwrap();
        assert!(!transfer.cancel());
        // The caller may learn of the end before the call has left the list.
        assert!(calls.drain(Deadline::after(Duration::from_secs(3600))).unwrap());
        drop((task, executor));
        assert_eq!(transfer.peek().unwrap().err().map(|error| error.kind()), end);
    });
    eprintln!("{} orders", ran.load(Std::Relaxed));
    assert!(ran.load(Std::Relaxed) > 3);
    assert_eq!(seen.load(Std::Relaxed), (1 << ends.len()) - 1, "not every end came about");
}

#[test]
fn a_transfer_is_cancelled_at_any_moment() {
    explore_transfer(|task, _| _ = task.transfer().cancel(), &[None, Some(ErrorKind::Cancelled)]);
}

/// A task that its own thread runs.
struct ThisThread(thread::Thread);

impl Wake for ThisThread {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A task that registers while the transfer ends is woken, or sees the end. Loom reports a thread that nobody wakes.
#[test]
fn a_transfer_is_awaited_at_any_moment() {
    let awaits = |task: &LayerTask, _: &AsyncCalls| {
        let waker = Waker::from(Arc::new(ThisThread(thread::current())));
        let mut future = pin!(task.transfer().as_ref().into_future());
        while future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            thread::park();
        }
    };
    explore_transfer(awaits, &[None]);
}

#[test]
fn the_engine_of_a_transfer_closes_at_any_moment() {
    explore_transfer(|_, calls| calls.close(), &[None, Some(ErrorKind::Closed)]);
}
