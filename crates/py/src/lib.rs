//! `llm_datadist._core`, the Python binding: converts arguments, calls the core and maps errors.
//!
//! Only this crate decides whether a Python value has the right type. `core::validate` decides what arguments mean; the
//! Python package has the names, defaults and docstrings of the public API.

#[macro_use]
mod arguments;
mod blocks;
mod cache;
mod cache_buffer;
mod caches;
mod checks;
mod convert;
mod copy_arguments;
mod datadist;
mod engine;
mod error;
mod handles;
mod hixl;
mod keys;
mod kv_caches;
mod layerwise_arguments;
mod links;
mod local_cache;
mod log;
mod native;
mod numpy;
mod operations;
mod options;
mod pull_push_arguments;
mod python_types;
#[expect(
    unsafe_code,
    reason = "DLPack capsules, the buffer protocol, the adoption of the caller's addresses, which interpreter runs, \
              numbers read from lists that `gil_used` below keeps other threads from changing"
)]
mod raw;
mod stats;
mod task;

use llm_datadist_embed::KeptLists;
use pyo3::prelude::*;

/// Adds functions to a module, each under its own name.
macro_rules! functions {
    ($module:expr, $($function:path)*) => { $($module.add_function(wrap_pyfunction!($function, $module)?)?;)* };
}

/// The allocator of this library only. Memory of Python and of other libraries is not affected.
#[global_allocator]
static LISTS: KeptLists = KeptLists::new();

/// Native module of `llm_datadist`; its stub `_core.pyi` documents every name.
// `gil_used`: `raw` reads lists, which is sound only while no other thread of the interpreter runs
// (`tests/test_bad_input.py`). This is a function and not a declarative module, because the refusal must
// precede the first class. Classes are made once per process and belong to the interpreter that made them
// (`tests/test_subinterpreter.py`).
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    raw::main_interpreter_only()?;
    module.add_class::<cache::LooseCache>()?;
    module.add_class::<cache::ManagedCache>()?;
    module.add_class::<cache::TensorView>()?;
    module.add_class::<caches::CacheCalls>()?;
    module.add_class::<datadist::DataDist>()?;
    module.add_class::<kv_caches::KvCaches>()?;
    module.add_class::<task::TransferTask>()?;
    validators(module)?;
    functions!(module, engine::abandon_sockets numpy::import_numpy python_types::register_types);
    functions!(module, log::open_log log::close_log log::take_log log::log_after_fork);
    native::add_classes(module)?;
    hixl::add_classes(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// Functions that check one argument.
fn validators(module: &Bound<'_, PyModule>) -> PyResult<()> {
    functions!(
        module,
        checks::check_cache_key checks::check_dict checks::check_dimensions checks::check_inner
        checks::check_int32 checks::check_int64 checks::check_isinstance checks::check_layer_range
        checks::check_list_int32 checks::check_list_int64 checks::check_list_uint64
        checks::check_positive_or_set_default
        checks::check_uint8 checks::check_uint16 checks::check_uint32 checks::check_uint64 checks::tensor_bytes
        options::check_mem_utilization options::check_option options::nearest options::option_rows
    );
    Ok(())
}
