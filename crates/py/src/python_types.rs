//! The Python classes of the original's API, and their members as core values.
//!
//! At import, the package registers a function that returns them. It is called when a class is first needed, because programs of
//! the native API need none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use llm_datadist_core::bindings::{Role, StatusCode};
use llm_datadist_core::{DataType, Placement};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The first registration, which every call reads. One is leaked for each import.
static FIRST: OnceLock<&'static Registration> = OnceLock::new();
/// Whether there is a later registration.
static REPLACED: AtomicBool = AtomicBool::new(false);
/// The latest registration, if there is a later one.
static LATEST: Mutex<Option<&'static Registration>> = Mutex::new(None);

/// What one import of the package has registered.
struct Registration {
    /// Returns the module with the classes.
    load: Py<PyAny>,
    types: PyOnceLock<PythonTypes>,
}

/// The classes and enum members of the Python package that the binding uses.
pub(crate) struct PythonTypes {
    /// `LLMException`.
    pub(crate) exception: Py<PyType>,
    /// The `LLMException` that is also a `ValueError`.
    pub(crate) mismatch: Py<PyType>,
    /// `CacheDesc`.
    pub(crate) cache_desc: Py<PyType>,
    /// `CacheKey`.
    pub(crate) cache_key: Py<PyType>,
    /// `BlocksCacheKey`.
    pub(crate) blocks_cache_key: Py<PyType>,
    /// `CacheKeyByIdAndIndex`.
    pub(crate) cache_key_by_id: Py<PyType>,
    /// `Cache`.
    pub(crate) cache: Py<PyType>,
    /// `KvCache`.
    pub(crate) kv_cache: Py<PyType>,
    /// `LayerSynchronizer`.
    pub(crate) layer_synchronizer: Py<PyType>,
    /// `TransferConfig`.
    pub(crate) transfer_config: Py<PyType>,
    /// `TransferWithCacheKeyConfig`.
    pub(crate) transfer_key_config: Py<PyType>,
    /// `LLMClusterInfo`.
    pub(crate) cluster_info: Py<PyType>,
    /// Called with the text of an argument error before it is raised.
    pub(crate) log_error: Py<PyAny>,
    /// Called to hand the engine's lines to the log.
    pub(crate) drain_log: Py<PyAny>,
    /// Members of `LLMStatusCode`, in the order of `StatusCode::ALL`.
    status: Vec<Py<PyAny>>,
    /// Members of `DataType`, in the order of `DataType::ALL`.
    data_types: Vec<Py<PyAny>>,
    /// Members of `Placement`, in the order of `Placement::ALL`.
    placements: Vec<Py<PyAny>>,
    /// Members of `LLMRole`, with the core's.
    roles: Vec<(Role, Py<PyAny>)>,
}

/// Registers the function that returns the module with the classes.
#[pyfunction]
pub(crate) fn register_types(load: Py<PyAny>) {
    // The latest wins: a package that is imported again, after `sys.modules` was purged, works with its own classes.
    let registered: &'static Registration =
        Box::leak(Box::new(Registration { load, types: PyOnceLock::new() }));
    if FIRST.set(registered).is_err() {
        *LATEST.lock().unwrap_or_else(PoisonError::into_inner) = Some(registered);
        REPLACED.store(true, Ordering::Release);
    }
}

impl PythonTypes {
    /// Reads the classes, and checks that their numbers are those of the engine.
    fn new(module: &Bound<'_, PyAny>) -> PyResult<Self> {
        let named = |name: &str| module.getattr(name);
        let class = |name: &str| -> PyResult<Py<PyType>> { Ok(named(name)?.cast_into::<PyType>()?.unbind()) };
        Ok(PythonTypes {
            exception: class("LLMException")?,
            mismatch: class("LLMMismatchException")?,
            cache_desc: class("CacheDesc")?,
            cache_key: class("CacheKey")?,
            blocks_cache_key: class("BlocksCacheKey")?,
            cache_key_by_id: class("CacheKeyByIdAndIndex")?,
            cache: class("Cache")?,
            kv_cache: class("KvCache")?,
            layer_synchronizer: class("LayerSynchronizer")?,
            transfer_config: class("TransferConfig")?,
            transfer_key_config: class("TransferWithCacheKeyConfig")?,
            cluster_info: class("LLMClusterInfo")?,
            log_error: named("log_error")?.unbind(),
            drain_log: named("drain_log")?.unbind(),
            status: members(
                &named("LLMStatusCode")?,
                StatusCode::ALL.iter().map(|code| (code.name(), code.value())),
            )?,
            data_types: members(
                &named("DataType")?,
                DataType::ALL.iter().map(|&data_type| (data_type.name(), data_type as i64)),
            )?,
            placements: members(
                &named("Placement")?,
                [("HOST", Placement::Host as i64), ("DEVICE", Placement::Device as i64)],
            )?,
            roles: roles(&named("LLMRole")?)?,
        })
    }

    /// Returns the types. Returns `Err` if the package was not imported.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static PythonTypes> {
        let registered = if REPLACED.load(Ordering::Acquire) {
            *LATEST.lock().unwrap_or_else(PoisonError::into_inner)
        } else {
            FIRST.get().copied()
        };
        let Some(Registration { load, types }) = registered else {
            return Err(PyRuntimeError::new_err("import llm_datadist, not llm_datadist._core"));
        };
        if let Some(types) = types.get(py) {
            return Ok(types);
        }
        // Read before the cell is locked: the import runs Python code, which may come back here.
        let read = Self::new(load.bind(py).call0()?.as_any())?;
        Ok(types.get_or_init(py, || read))
    }

    /// Returns the member of `LLMStatusCode` for `code`.
    pub(crate) fn status(&self, code: StatusCode) -> Option<&Py<PyAny>> {
        self.status.get(StatusCode::ALL.iter().position(|&known| known == code)?)
    }

    /// Returns the element type that `value` stands for.
    pub(crate) fn data_type(&self, value: &Bound<'_, PyAny>) -> Option<DataType> {
        DataType::ALL.get(self.data_types.iter().position(|member| member.is(value))?).copied()
    }

    /// Returns the placement that `value` stands for.
    pub(crate) fn placement(&self, value: &Bound<'_, PyAny>) -> Option<Placement> {
        Placement::ALL.get(self.placements.iter().position(|member| member.is(value))?).copied()
    }

    /// Returns the role that `value` stands for.
    pub(crate) fn role(&self, value: &Bound<'_, PyAny>) -> Option<Role> {
        self.roles.iter().find(|(_, member)| member.is(value)).map(|&(role, _)| role)
    }
}

/// Returns the members of `class` with these names. Each must have this number, and there must be no others.
fn members(
    class: &Bound<'_, PyAny>,
    table: impl IntoIterator<Item = (&'static str, i64)>,
) -> PyResult<Vec<Py<PyAny>>> {
    let mut found = Vec::new();
    for (name, number) in table {
        let member = class.getattr(name)?;
        if member.getattr("value")?.extract::<i64>()? != number {
            return Err(PyRuntimeError::new_err(format!(
                "{class}.{name} is not the engine's number, {number}"
            )));
        }
        found.push(member.unbind());
    }
    if class.len()? == found.len() {
        Ok(found)
    } else {
        Err(PyRuntimeError::new_err(format!("{class} has members that the engine does not know")))
    }
}

fn roles(class: &Bound<'_, PyAny>) -> PyResult<Vec<(Role, Py<PyAny>)>> {
    let mut found = Vec::new();
    for member in class.try_iter()? {
        let member = member?;
        let role = Role::from_value(member.getattr("value")?.extract()?)
            .ok_or_else(|| PyRuntimeError::new_err(format!("{member} is not a role of the engine")))?;
        found.push((role, member.unbind()));
    }
    Ok(found)
}
