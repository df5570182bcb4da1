//! What the handles of the native API stand for: engines, caches and transfers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use llm_datadist_core::bindings::options::value_of_text;
use llm_datadist_core::{Engine, Error, ErrorKind, LayerTask, OwnCache, Result, Transfer};

/// An engine of the native API.
pub(crate) struct HeldEngine {
    /// The engine.
    pub(crate) engine: Engine,
    /// Held shared from the start of a transfer until its handle exists.
    starting: RwLock<()>,
}

impl HeldEngine {
    /// Opens an engine with these options.
    pub(crate) fn open(options: BTreeMap<String, String>) -> Result<Arc<Self>> {
        let mut builder = Engine::builder();
        for (option, text) in options {
            builder = match &*option {
                "name" => builder.name(text),
                "metadata" => builder.metadata(text),
                _ => builder.option(&option, value_of_text(&option, &text)),
            };
        }
        Ok(Arc::new(HeldEngine { engine: builder.open()?, starting: RwLock::default() }))
    }

    /// Returns a guard for the time from the start of a transfer until its handle exists.
    pub(crate) fn starting(&self) -> RwLockReadGuard<'_, ()> {
        self.starting.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every transfer that has started has a handle. That is soon, because starts do not wait.
    pub(crate) fn wait_for_handles(&self) {
        drop(self.starting.write().unwrap_or_else(PoisonError::into_inner));
    }
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

    /// Ends the cache. It may be called again, until the transfer has succeeded.
    pub(crate) fn free(&self) -> Result<Arc<Transfer>> {
        let transfer = self.engine.engine.free(&self.own)?;
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
