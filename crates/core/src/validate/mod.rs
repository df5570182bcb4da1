//! Turns raw arguments into checked requests. Only this module has the rules for arguments.
//!
//! Other modules refuse a call only because of the current state, for example because a key is already bound.
//! The checks receive descriptions (`CacheLayout`) and never the cache table, so they are pure: no memory, no I/O,
//! no clock. They return `Err(InvalidArgument)` for what breaks their rule, unless stated otherwise.

mod allocate;
mod cache_rules;
mod checked_transfer;
mod conversion;
mod copy;
pub mod cpp;
mod grant;
mod json;
mod layer_destination;
mod layer_ranges;
mod layerwise;
pub mod rank_table;
mod rows;
mod sub_rows;
mod text_names;
mod values;

pub use allocate::{accessible, addresses, allocate, bindings};
pub use cache_rules::{
    RemoteCache, batch_cache, blocks_cache, caller_name, check_accessible, copy_size, equally_many,
    not_empty, on_device,
};
pub use checked_transfer::{CheckedTransfer, OwnerShare};
pub use conversion::{LocalCache, PlannedTransfer, local_rows_alike, rows_alike};
pub use copy::{
    CopyArgs, copy_between, copy_blocks, copy_cache, copy_kv_blocks, copy_kv_cache, copy_on_device,
    copy_rows, copy_within, swap_blocks, swap_rows,
};
pub use grant::{MAX_READERS, grant, grant_ttl};
pub(crate) use json::json;
pub use layer_destination::{LayerDestination, destination_layers, equal_layers, layer_moves};
pub use layer_ranges::{
    ExtParam, LayerRange, Layers, ext_alone, pull_kv_layers, push_kv_alone, push_kv_blocks, push_kv_cache,
    push_size, push_spans, tensors_per_layer,
};
pub use layerwise::{
    Destination, LayerRows, LayerwiseArgs, Target, block_bytes_alone, block_lists, destination,
    layers_of_blocks, layerwise, whole_layers,
};
pub use rows::Rows;
pub use text_names::{cache_name, engine_name};
pub(crate) use values::{clipped, decimal, fault_of_ip, ip_address, one_of, shown_range, within};
pub use values::{dimensions, one_address, peer_address, peer_port, socket_address, verify};
