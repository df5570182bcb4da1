//! What the handles of the native API stand for: engines, caches and transfers.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use llm_datadist_core::bindings::options::{OptionValue, config_from_values, value_of_text};
use llm_datadist_core::bindings::validate;
use llm_datadist_core::{
    Config, DataDist, EngineName, Error, ErrorKind, LayerTask, OwnCache, Result, Transfer,
};

/// An engine of the native API.
pub(crate) struct HeldEngine {
    name: String,
    /// Whether calls are refused, because the engine closes.
    closing: AtomicBool,
    /// Held shared by each call, so that `close` waits for it. Taken before `starting`.
    open: RwLock<Option<DataDist>>,
    /// Held shared from the start of a transfer until its handle exists.
    starting: RwLock<()>,
}

impl EngineName for HeldEngine {
    fn name(&self) -> &str {
        &self.name
    }
}

impl HeldEngine {
    /// Opens an engine with these options.
    pub(crate) fn open(mut options: BTreeMap<String, String>) -> Result<Arc<Self>> {
        let (name, metadata) = (options.remove("name"), options.remove("metadata"));
        let name = name.map_or_else(|| Ok(default_name()), |name| validate::cache_name(&name).map(|()| name));
        let values: Vec<(&str, OptionValue)> =
            options.iter().map(|(name, text)| (&**name, value_of_text(name, text))).collect();
        // A token that is no UTF-8 must not count as none.
        let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let config = config_from_values(&values, &variable)?;
        let metadata = metadata.unwrap_or_default().into_bytes();
        let engine = DataDist::open(Config { name: name?, metadata, ..config })?;
        let name = engine.config().name.clone();
        let (open, starting) = (RwLock::new(Some(engine)), RwLock::default());
        Ok(Arc::new(HeldEngine { name, closing: AtomicBool::new(false), open, starting }))
    }

    /// Runs `call` on the engine, unless it is closed or closes. The engine stays open until `call` has returned, which must not wait
    /// (`close_waits_for_calls_that_have_begun`).
    pub(crate) fn run<T>(&self, call: impl FnOnce(&DataDist) -> Result<T>) -> Result<T> {
        if self.closing.load(Ordering::Acquire) { Err(closed()) } else { self.run_until_closed(call) }
    }

    /// Does the same as [`run`](Self::run), also while the engine closes.
    pub(crate) fn run_until_closed<T>(&self, call: impl FnOnce(&DataDist) -> Result<T>) -> Result<T> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        call(open.as_ref().ok_or_else(closed)?)
    }

    /// Returns a guard for the time from the start of a transfer until its handle exists, inside of [`run`](Self::run).
    pub(crate) fn starting(&self) -> RwLockReadGuard<'_, ()> {
        self.starting.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every transfer that has started has a handle. That is soon, because starts do not wait.
    pub(crate) fn wait_for_handles(&self) {
        drop(self.starting.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Refuses new calls, waits for transfers that run at most `limit`, and closes the engine. When it returns, nothing of the
    /// engine is left.
    pub(crate) fn close(&self, limit: Duration) -> Result<()> {
        self.closing.store(true, Ordering::Release);
        let drained = if limit.is_zero() {
            Ok(())
        } else {
            self.run_until_closed(|engine| engine.drain(limit).map(drop))
        };
        let engine = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        // Without the lock, so that other calls are refused at once.
        drop(engine);
        drained
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the engine was closed")
}

/// Returns the name of an engine that got none: that of the host, of the process, and a number.
fn default_name() -> String {
    static NAMED: AtomicU64 = AtomicU64::new(1);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}/{}/{}", host.trim(), std::process::id(), NAMED.fetch_add(1, Ordering::Relaxed))
}

/// A cache of an engine.
pub(crate) struct HeldCache {
    /// The engine.
    pub(crate) engine: Arc<HeldEngine>,
    /// What rows need to know about it.
    pub(crate) own: Arc<OwnCache>,
    /// The transfer that ends when its memory is free, if the program has freed it.
    freed: Mutex<Option<Arc<Transfer>>>,
}

impl HeldCache {
    /// Creates the value for a cache of `engine`.
    pub(crate) fn new(engine: Arc<HeldEngine>, own: Arc<OwnCache>) -> Arc<Self> {
        Arc::new(HeldCache { engine, own, freed: Mutex::default() })
    }

    /// Ends the cache of `engine`. It may be called again, until the transfer has succeeded.
    pub(crate) fn free(&self, engine: &DataDist) -> Result<Arc<Transfer>> {
        let transfer = engine.start_free(self.own.id, None)?;
        *self.freed.lock().unwrap_or_else(PoisonError::into_inner) = Some(transfer.clone());
        Ok(transfer)
    }

    /// Whether the program has freed it, and nothing uses its memory any more.
    pub(crate) fn is_gone(&self) -> bool {
        let freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
        freed.as_ref().is_some_and(|transfer| matches!(transfer.peek(), Some(Ok(_))))
    }
}

/// A transfer, and what reports the layers of a layer-wise push. The push is cancelled if its handle is freed before its last layer.
#[derive(Clone)]
pub(crate) struct HeldTransfer {
    /// The record of the transfer, which outlives the engine.
    pub(crate) transfer: Arc<Transfer>,
    layers: Option<Arc<LayerTask>>,
}

impl From<Arc<Transfer>> for HeldTransfer {
    fn from(transfer: Arc<Transfer>) -> Self {
        HeldTransfer { transfer, layers: None }
    }
}

impl From<LayerTask> for HeldTransfer {
    fn from(task: LayerTask) -> Self {
        HeldTransfer { transfer: task.transfer().clone(), layers: Some(Arc::new(task)) }
    }
}

impl HeldTransfer {
    /// Reports a layer.
    pub(crate) fn ready(&self, layer: u32) -> Result<()> {
        let text = "ready is for transfers of llm_datadist_push with LLM_DATADIST_LAYERWISE";
        let task = self.layers.as_ref().ok_or_else(|| Error::new(ErrorKind::InvalidArgument, text))?;
        task.ready(layer)
    }
}
