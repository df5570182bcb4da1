//! The classes of the module `hixl`: its data classes, and the engine that its class `Hixl` wraps.
//!
//! They convert Python values and call `llm_datadist_hixl`, which has every rule. A wrong type is a `TypeError`; every other failure is
//! a status number.

#![allow(clippy::doc_markdown, reason = "the comments of classes and methods are the docstrings of Python")]

mod descs;
mod engine;
mod values;

use llm_datadist_hixl::{OPTIONS, Status};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Adds the module `hixl` with the classes and the tables of numbers and keys.
pub(crate) fn add_classes(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let hixl = PyModule::new(py, "hixl")?;
    hixl.add_class::<descs::MemDesc>()?;
    hixl.add_class::<descs::TransferOpDesc>()?;
    hixl.add_class::<descs::TransferArgs>()?;
    hixl.add_class::<descs::GetTransferStatusArgs>()?;
    hixl.add_class::<descs::NotifyDesc>()?;
    hixl.add_class::<engine::HixlEngine>()?;
    hixl.add_function(wrap_pyfunction!(engine::capability, &hixl)?)?;
    let (codes, options) = (PyDict::new(py), PyDict::new(py));
    Status::ALL.iter().try_for_each(|(name, status)| codes.set_item(name, status.code()))?;
    OPTIONS.iter().try_for_each(|(name, key)| options.set_item(name, key))?;
    hixl.add("STATUS", codes)?;
    hixl.add("OPTIONS", options)?;
    module.add_submodule(&hixl)
}
