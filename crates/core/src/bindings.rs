//! Items for `crates/py`, `crates/capi` and tests only: the engine of the original's API, with clusters, roles, keys, and
//! operations that run or start; what languages share; and support for libraries that are loaded into another program.

pub use crate::cache::Cache;
pub use crate::config::{
    Backend, Config, FabricConfig, HugeChoice, LinkConfig, Mode, PoolConfig, Role, Share, SwapInPath, Token,
    TransportChoice,
};
pub use crate::engine::{
    CacheIndex, CallExtras, CopyMember, DataDist, End, GroupMember, LayerReceiver, Operation, RemoteName,
};
pub use crate::events::AwaitQueue;
pub use crate::memory::{abandon as abandon_sockets, above_standard_streams, remember_process, this_process};
pub use crate::model::{
    CacheKey, CacheLayout, Geometry, KvGeometry, NO_ID, Name, RemoteCacheName, RowSizes, SubRow, Words,
    tensor_bytes,
};
pub use crate::native::{OwnPairs, PeerPairs};
pub use crate::plan::Side;
pub use crate::session::{CommStatus, PeerAddress};
pub use crate::status::StatusCode;
pub use crate::threads::engine_of_thread;
pub use crate::transfer::{CacheTask, Outcome};
pub use crate::validate::{CopyArgs, Destination, ExtParam, LayerRange, Layers, LayerwiseArgs, Rows, Target};

/// Builds lists whose length the caller chooses. A failed allocation returns an error and does not abort.
pub mod fallible {
    pub use crate::fallible::{collect, grow, out_of_memory, push, try_collect, with_capacity};
}

/// Rules for single arguments, which the bindings also check before a call reaches the engine.
pub mod validate {
    pub use crate::validate::{
        MAX_READERS, batch_cache, block_bytes_alone, block_lists, blocks_cache, cache_name, copy_size,
        destination, dimensions, equally_many, layerwise, not_empty, on_device, one_address, peer_address,
        push_size, push_spans, socket_address, tensors_per_layer, verify, whole_layers,
    };

    /// The rules for the table of a communicator.
    pub mod rank_table {
        pub use crate::validate::rank_table::{comm_name, max_members, members};
    }
}

/// Shared memory, descriptors, locks, waits, copies, checksums, tokens and asynchronous calls for `crates/keeper`.
pub mod keeper {
    pub use crate::config::Token;
    pub use crate::copy::window_sums;
    pub use crate::memory::kernels::{Copy, Kernel, copy_all};
    pub use crate::memory::{
        CloseOnFork, Generations, MapBudget, PeerGenerations, PeerMapping, PeerWords, Region, SharedWords,
        Tensors, Window, above_standard_streams, is_user, page_size, peer_credentials,
        peer_process_descriptor, random, refuse_beyond_room, same_user, take_descriptors,
    };
    pub use crate::net::{discard, is_crowded};
    pub use crate::options::link_token;
    pub use crate::session::{KeyProof, Poller, Watching};
    pub use crate::sync::{Condvar, Mutex};
    pub use crate::token_file::{read as read_token_file, secret_text};
    pub use crate::transfer::{ClientCallKind, ClientCalls};
}

/// Calls of the native API that every language makes in the same way.
pub mod native {
    pub use crate::native::{grant_time, lend, link};
}

/// The options of an engine, and rules for single values of them.
pub mod options {
    pub use crate::options::{
        OPTIONS, OptionRow, OptionValue, ResourceConfig, check_native_names, check_number, check_text,
        config_from_texts, config_from_values, mem_utilization, nearest, size_with_unit, value_of_text,
    };
}

/// Rules for arguments and options that only the C++ class accepts.
pub mod cpp {
    pub use crate::options::cpp::{Options, options, set_role};
    pub use crate::validate::cpp::{
        Stated, allocate, block_lists, clusters, copied, desc, ip_info, link_timeout, pushed, role, stated,
    };
}
