//! The classes of the native API: `Engine`, `Cache`, `Rows`, `Peer`, `Transfer`, `Grant`, the events, `KvLayout`, `Store`, `StoreView`,
//! `Keeper` and `KeeperObserver`.
//!
//! They convert Python values, call the core, and raise the exceptions of `llm_datadist.errors`. `core::native` and
//! `core::validate` have the rules for arguments.

#![allow(clippy::doc_markdown, reason = "the comments of classes and methods are the docstrings of Python")]

mod block_indices;
mod cache;
mod cache_form;
mod call;
mod dtypes;
mod engine;
mod engine_methods;
mod errors;
mod events;
mod grant;
mod holder;
mod index_arrays;
mod keeper;
mod layout;
mod loop_queue;
mod observer;
mod optional_arg;
mod options;
mod owner;
mod peer;
mod peer_methods;
mod remote_cache;
mod rows;
mod shared;
mod spans;
mod store;
mod store_shared;
mod store_values;
mod tensors;
mod transfer;
mod values;
mod view;

use pyo3::prelude::*;

use crate::cache::TensorView;
use crate::cache_buffer;

pub(crate) use cache::NativeCache;
pub(crate) use engine::NativeEngine;
pub(crate) use shared::EngineShared;
pub(crate) use values::{index, wrong_type};

/// Adds the module `native` with the classes.
pub(crate) fn add_classes(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let native = PyModule::new(module.py(), "native")?;
    native.add_class::<cache::NativeCache>()?;
    native.add_class::<engine::NativeEngine>()?;
    native.add_class::<events::GrantClosedEvent>()?;
    native.add_class::<events::MessageEvent>()?;
    native.add_class::<events::PeerDownEvent>()?;
    native.add_class::<events::PeerUpEvent>()?;
    native.add_class::<events::TransferEnded>()?;
    native.add_class::<grant::NativeGrant>()?;
    native.add_class::<holder::NativeHolder>()?;
    native.add_class::<keeper::NativeKeeper>()?;
    native.add_class::<layout::NativeLayout>()?;
    native.add_class::<loop_queue::LoopQueue>()?;
    native.add_class::<observer::NativeObserver>()?;
    native.add_class::<peer::NativePeer>()?;
    native.add_class::<remote_cache::NativeRemoteCache>()?;
    native.add_class::<rows::NativeRows>()?;
    native.add_class::<store::NativeStore>()?;
    native.add_class::<view::NativeView>()?;
    native.add_class::<transfer::NativeTransfer>()?;
    native.add_function(wrap_pyfunction!(shared::close_all, &native)?)?;
    native.add_class::<TensorView>()?;
    native.add("CacheBuffer", cache_buffer::class(module.py())?)?;
    module.add_submodule(&native)
}
