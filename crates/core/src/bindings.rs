//! For `crates/py` and `crates/capi` only: rules that their setters and constructors share with the engine,
//! and what a library loaded into another program needs.

pub use crate::memory::{abandon as abandon_sockets, remember_process, this_process};

/// Lists whose length the caller chooses: a failed allocation is an error, not the end of the process.
pub mod fallible {
    pub use crate::fallible::{collect, grow, out_of_memory, push, with_capacity};
}

/// The rules for single arguments, for what a caller builds before it reaches the engine.
pub mod validate {
    pub use crate::validate::{
        batch_cache, block_bytes_alone, block_lists, blocks_cache, config, copy_size, destination,
        dimensions, equally_many, layerwise, mem_utilization, not_empty, number, on_device, one_address,
        push_size, push_spans, socket_address, tensors_per_layer, text, whole_layers,
    };

    /// The rules for the table of a communicator.
    pub mod rank_table {
        pub use crate::validate::rank_table::{comm_name, members, most_members};
    }
}

/// The rules for what only the C++ class accepts.
pub mod cpp {
    pub use crate::validate::cpp::{
        Options, Stated, allocate, block_lists, clusters, copied, desc, ip_info, link_timeout, options,
        pushed, role, set_role, stated,
    };
}
