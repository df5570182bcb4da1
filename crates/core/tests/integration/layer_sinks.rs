//! Scripted sinks of layers for the tests of layer-wise tasks, and the record of what they did.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::LayerRange;
use llm_datadist_core::testing::transfer::{Delivery, LayerSink};
use llm_datadist_core::{ClusterId, Deadline, Error, ErrorKind, Result};

use crate::fixtures::{LONG, eventually};

/// Bytes of a layer.
pub const BYTES: u64 = 10;

/// What a sink does next.
pub type Does = fn() -> Result<()>;
pub const PUSH: Does = || Ok(());
pub const FAIL: Does = || Err(Error::new(ErrorKind::NotLinked, "scripted"));
pub const PANIC: Does = || panic!("scripted");

/// The script of a sink, which may stall at a gate, and the record of what it did. By default, everything succeeds.
#[derive(Default)]
pub struct Script {
    /// What it does instead of finding its destination.
    pub find: Option<Does>,
    /// What its next pushes do. Further ones succeed.
    pub pushes: Mutex<VecDeque<Does>>,
    pub fails_at: Option<u32>,
    /// Maximum number of layers that a request pushes after its first layer.
    pub more: u32,
    /// Whether the gate is in `find`, not in the pushes, and requests have as many layers as they may.
    pub shut_at_find: bool,
    pub shut: Mutex<bool>,
    pub opened: Condvar,
    pub at_gate: AtomicBool,
    pub finds: AtomicU32,
    pub pushed: Mutex<Vec<u32>>,
    /// The layers of each request: the first one, and the one after the last.
    pub requests: Mutex<Vec<(u32, u32)>>,
    /// Whether the task has dropped the sink.
    pub dropped: AtomicBool,
}

impl Script {
    pub fn good() -> Arc<Script> {
        Arc::default()
    }

    pub fn stalled() -> Arc<Script> {
        Arc::new(Script { shut: Mutex::new(true), ..Script::default() })
    }

    pub fn open(&self) {
        *self.shut.lock().unwrap() = false;
        self.opened.notify_all();
    }

    fn wait_for_gate(&self) {
        let shut = self.shut.lock().unwrap();
        let waited = self.opened.wait_timeout_while(shut, LONG, |shut| *shut).unwrap();
        assert!(!waited.1.timed_out());
    }

    /// Waits until a layer has reached the gate.
    pub fn arrived(&self) {
        eventually("a layer", || self.is_at_gate());
    }

    pub fn is_at_gate(&self) -> bool {
        self.at_gate.load(Ordering::SeqCst)
    }

    pub fn finds(&self) -> u32 {
        self.finds.load(Ordering::SeqCst)
    }

    /// The layers that were pushed, in order.
    pub fn pushed(&self) -> Vec<u32> {
        self.pushed.lock().unwrap().clone()
    }

    pub fn dropped(&self) -> bool {
        self.dropped.load(Ordering::SeqCst)
    }
}

/// A sink with this script, and its number of layers.
struct Scripted(Arc<Script>, u32);

impl LayerSink for Scripted {
    fn find(&self, _: Deadline) -> Result<u64> {
        assert_eq!(self.0.finds.fetch_add(1, Ordering::SeqCst), 0, "found twice");
        if self.0.shut_at_find {
            self.0.wait_for_gate();
        }
        self.0.find.map_or(Ok(()), |find| find())?;
        Ok(u64::from(self.1) * BYTES)
    }

    /// Also stops before the layer at which it fails.
    fn push(&self, ready: LayerRange, max_bytes: u64, deadline: Deadline) -> Result<(u32, u64)> {
        let script = &*self.0;
        let fails_next = |&layer: &u32| script.fails_at != Some(layer + 1);
        let count = if script.shut_at_find {
            (max_bytes / BYTES).clamp(1, u64::from(ready.end - ready.first)) as u32
        } else {
            let more = (ready.first..ready.end - 1).take(script.more as usize).take_while(fails_next);
            1 + more.count() as u32
        };
        let end = ready.first + count;
        assert!(script.finds() == 1 && !script.dropped());
        script.at_gate.store(true, Ordering::SeqCst);
        script.wait_for_gate();
        script.requests.lock().unwrap().push((ready.first, end));
        deadline.check("pushing")?;
        let next = script.pushes.lock().unwrap().pop_front();
        next.unwrap_or(if script.fails_at == Some(ready.first) { FAIL } else { PUSH })()?;
        script.pushed.lock().unwrap().extend(ready.first..end);
        Ok((count, u64::from(count) * BYTES))
    }

    fn named(&self, error: Error) -> Error {
        error.with("peer", "somewhere")
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        // Slow, so that a task that does not wait for it is noticed.
        thread::sleep(Duration::from_millis(2));
        assert!(!self.0.dropped.swap(true, Ordering::SeqCst));
    }
}

/// A destination of the layers `first..end`.
pub fn delivery(cluster: u64, (first, end): (u32, u32), script: &Arc<Script>) -> Delivery {
    let sink: Arc<dyn LayerSink> = Arc::new(Scripted(script.clone(), end.saturating_sub(first)));
    Delivery { cluster: ClusterId(cluster), layers: LayerRange { first, end }, sink: Ok(sink) }
}
