//! What all objects of one native engine share.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use llm_datadist_core::bindings::Config;
use llm_datadist_core::bindings::this_process;
use llm_datadist_core::{EngineName, Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use super::errors::raise;
use crate::engine::Engine;
use crate::handles::Handles;

/// Name of the Python module that passes the log lines of all engines on.
const LOG: &str = "llm_datadist.engine_log";

/// The engines that were opened and not forgotten, each with the process that opened it. The lock is only held while attached to the
/// interpreter, so no thread that a forked child lacks holds it.
static OPENED: Mutex<Vec<(u32, Weak<EngineShared>)>> = Mutex::new(Vec::new());

/// The engine that caches, peers, transfers and grants belong to. Each of them holds a reference, so that none of them needs the
/// Python object `Engine`, and no cycle of Python objects arises.
pub(crate) struct EngineShared {
    /// The engine of the core, open or closed.
    pub(crate) engine: Engine,
    /// The name that peers and the log show.
    pub(crate) name: EngineName,
    /// The time limit of calls without a `timeout`.
    pub(crate) timeout: Duration,
    /// The handles of transfers whose outcome was not taken, by number. A layer-wise one is a weak reference: if the program drops
    /// it, nobody can report its layers.
    pub(crate) transfers: Handles<u64, Py<PyAny>>,
    /// The grants whose end was not an event yet, by slot and generation.
    pub(crate) grants: Handles<(u32, u64), Py<PyAny>>,
    /// A weak reference to the Python object.
    python: OnceLock<Py<PyWeakrefReference>>,
}

impl EngineShared {
    /// Opens an engine. It is closed when the interpreter exits, if it is still open then.
    pub(crate) fn open(py: Python<'_>, config: Config) -> PyResult<Arc<Self>> {
        let (name, timeout) = (config.name.clone(), config.sync_timeout);
        log(py, "start")?;
        let engine = match Engine::open(py, config, raise) {
            Ok(engine) => engine,
            Err(error) => {
                log(py, "stop")?;
                return Err(error);
            }
        };
        let shared = Arc::new(Self::new(engine, &name, timeout));
        opened_engines().push((this_process(), Arc::downgrade(&shared)));
        forget_closed(py)?;
        Ok(shared)
    }

    /// Returns what the native objects of an engine share that the original's API has opened, and closes.
    pub(crate) fn of_original(py: Python<'_>, engine: &Engine) -> PyResult<Arc<Self>> {
        let config = engine.attached(py, |engine| {
            // From now on, news about links and grants are kept.
            engine.poll(0)?;
            Ok(engine.config().clone())
        })?;
        Ok(Arc::new(Self::new(engine.failing_with(raise), &config.name, config.sync_timeout)))
    }

    fn new(engine: Engine, name: &str, timeout: Duration) -> Self {
        let name = EngineName::new(name);
        let (transfers, grants, python) = (Handles::default(), Handles::default(), OnceLock::new());
        EngineShared { engine, name, timeout, transfers, grants, python }
    }

    /// Sets the Python object, of which a weak reference is kept.
    pub(crate) fn set_python(&self, engine: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.python.get().is_none() {
            let _ = self.python.set(PyWeakrefReference::new(engine)?.unbind());
        }
        Ok(())
    }

    /// Returns the Python object `Engine`. If the program has dropped it, the engine is closed.
    pub(crate) fn python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let engine = self.python.get().and_then(|engine| engine.bind(py).upgrade());
        engine.ok_or_else(|| raise(py, &Error::new(ErrorKind::Closed, "the engine was dropped")))
    }

    /// Closes the engine: waits for transfers that run at most `limit`, then ends them. Closing again does nothing.
    pub(crate) fn close(&self, py: Python<'_>, limit: Duration) -> PyResult<()> {
        if self.engine.is_inherited() {
            return Ok(());
        }
        self.engine.close_within(py, limit)?;
        self.end(py);
        forget_closed(py)
    }

    /// Closes the engine, and neither waits for transfers nor calls Python.
    pub(crate) fn end(&self, py: Python<'_>) {
        self.engine.close(py);
        self.transfers.clear();
        self.grants.clear();
    }
}

fn opened_engines() -> MutexGuard<'static, Vec<(u32, Weak<EngineShared>)>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets the engines that were closed or dropped. The log thread ends with the last one.
fn forget_closed(py: Python<'_>) -> PyResult<()> {
    // Looked at without the lock: a reference that is made here may be the last one in the end, and then closes the engine.
    let opened = std::mem::take(&mut *opened_engines());
    let mut closed = 0;
    for (process, engine) in opened.into_iter().filter(|(process, _)| *process == this_process()) {
        if engine.upgrade().is_some_and(|engine| engine.engine.is_open()) {
            opened_engines().push((process, engine));
        } else {
            closed += 1;
        }
    }
    (0..closed).try_for_each(|_| log(py, "stop"))
}

/// Starts or stops passing log lines to Python's logging.
fn log(py: Python<'_>, call: &str) -> PyResult<()> {
    py.import(LOG)?.call_method0(call).map(drop)
}

/// Closes all engines that are open. It is called when the interpreter exits.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>) -> PyResult<()> {
    let opened: Vec<_> = opened_engines().iter().filter_map(|(_, engine)| engine.upgrade()).collect();
    let closed: Vec<_> = opened.iter().map(|engine| engine.close(py, Duration::ZERO)).collect();
    closed.into_iter().collect()
}
