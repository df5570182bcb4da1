//! `llm_datadist._core`: the Python binding. Convert, enter, call, map the error; nothing is decided here.
//!
//! Not for: what arguments mean (`core::check`), or names, defaults and docstrings of the public API (the Python
//! front). This crate is the one place that says whether a Python value has the right *type*.

mod blocks;
mod cache;
mod checks;
mod convert;
mod datadist;
mod door;
mod error;
mod front;
mod kv;
mod layerwise;
mod links;
mod local;
mod near;
#[expect(
    unsafe_code,
    reason = "unsafe room 3: DLPack capsules, the adoption of the caller's addresses, numbers read from lists that \
              `gil_used` below keeps other threads from changing"
)]
mod raw;
mod stats;
mod task;
mod transfer;

use llm_datadist_core::{DataType, KeptLists, StatusCode};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Memory of this library alone: Python's own, and that of other libraries, is not touched.
#[global_allocator]
static LISTS: KeptLists = KeptLists::new();

/// Native module of `llm_datadist`; its stub `_core.pyi` documents every name.
// `gil_used`: `raw` reads lists on the word that no other thread of the interpreter runs (`tests/test_bad_input.py`).
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use crate::cache::{LooseCache, ManagedCache, TensorView};
    #[pymodule_export]
    use crate::checks::{
        check_cache_key, check_copy_kernel, check_copy_workers, check_device_id, check_dict,
        check_dimensions, check_huge_pages, check_inner, check_int32, check_int64, check_isinstance,
        check_layer_range, check_link_heartbeat, check_link_retry_count, check_link_silence,
        check_link_streams, check_link_token, check_link_total_time, check_link_transport, check_list_int32,
        check_list_int64, check_list_uint64, check_mem_utilization, check_positive_or_set_default,
        check_rank_hosts, check_rank_port, check_swap_in_path, check_sync_kv_timeout, check_uint8,
        check_uint16, check_uint32, check_uint64, tensor_bytes,
    };
    #[pymodule_export]
    use crate::datadist::DataDist;
    #[pymodule_export]
    use crate::door::abandon_sockets;
    #[pymodule_export]
    use crate::front::register_types;
    #[pymodule_export]
    use crate::kv::KvCaches;
    #[pymodule_export]
    use crate::task::TransferTask;

    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("STATUS_CODES", super::status_codes(module.py())?)?;
        module.add("DATA_TYPES", super::data_types(module.py())?)
    }
}

/// Name → number of every status code, in the order of the contract.
fn status_codes(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let table = PyDict::new(py);
    for code in StatusCode::ALL {
        table.set_item(code.name(), code.value())?;
    }
    Ok(table)
}

/// Name → number of every element type, in the order of the public class.
fn data_types(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let table = PyDict::new(py);
    for &data_type in DataType::ALL {
        table.set_item(data_type.name(), data_type as i64)?;
    }
    Ok(table)
}
