//! Opens the private modules to tests and benchmarks (feature `testing`); never part of a release build. The
//! tools of the tests are in `crates/testing`.

/// Returns the memory of a cache.
pub fn tensors(cache: &crate::Cache) -> &std::sync::Arc<crate::memory::Tensors> {
    cache.tensors()
}

/// Starts a layer-wise transfer, as the engine does.
pub fn start_task(
    lanes: crate::transfer::ExecutorHandle,
    deliveries: Vec<crate::transfer::Delivery>,
    patience: Option<std::time::Duration>,
) -> crate::Result<std::sync::Arc<crate::Task>> {
    crate::Task::start(lanes, deliveries, patience)
}

/// Reports that a layer of a transfer will not be ready.
pub fn refuse_layer(task: &crate::Task, layer: u32, error: &crate::Error) {
    task.refuse(layer, error);
}

/// Re-exports private modules of the crate under their own names.
macro_rules! internals {
    ($($module:ident)*) => {
        $(
            #[allow(missing_docs, unused_imports, reason = "the module documents itself")]
            pub mod $module {
                pub use crate::$module::*;
            }
        )*
    };
}

internals! {
    cache config copy device error fallible huge_pages memory model net plan pool protocol session stats status
    token_file transfer validate
}
