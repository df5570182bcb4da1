//! The engine of `llm_datadist`: pools, cache table, copy engine. Knows nothing of Python.
//!
//! ```text
//!  operations   datadist/{remote, transfer, layerwise}   peer
//!  progress     task   lanes
//!  resources    links   cluster   stats
//!  movement     engine/{wave, ring, stream, route, tuner, workers}    the only thing that moves bytes
//!  resources    table/{pin, remote}   arena   device   transport   wire   mem
//!  thought      check   plan   pool        pure: no memory, no I/O, no clock
//!  words        keys   desc   config   id   status   error   counters
//! ```
//!
//! Arrows point down; `docs/architecture.md` has the table, `tests/test_architecture.py` reads it.
//!
//! ```
//! use llm_datadist_core::*;
//!
//! let mut config = Config::new(Role::Prompt, ClusterId(1));
//! config.device_pool = Some(PoolConfig { memory_size: 1 << 20, page_shift: 16 });
//! let engine = DataDist::open(config)?;
//! let desc = CacheDesc {
//!     num_tensors: 2,
//!     shape: vec![8, 1024],
//!     data_type: DataType::Float16,
//!     placement: Placement::Device,
//! };
//! let cache = engine.allocate(&desc, CacheKind::Blocks, &[])?;
//! engine.copy_blocks(&End::Managed(cache.id()), &[(0, 1), (1, 2)])?;
//! engine.deallocate(cache.id())?;
//! # drop(cache);
//! assert_eq!(engine.stats().device_pool.unwrap().pool.used_bytes, 0);
//! # Ok::<(), Error>(())
//! ```

// Tests of the library may panic; the library may not.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod arena;
pub mod check;
pub mod cluster;
pub mod config;
pub mod counters;
pub mod datadist;
pub mod desc;
pub mod device;
pub mod engine;
pub mod error;
pub mod id;
pub mod keys;
mod lanes;
pub mod links;
#[expect(unsafe_code, reason = "unsafe room 1: the only place of the core that dereferences addresses")]
pub mod mem;
mod peer;
pub mod plan;
pub mod pool;
pub mod stats;
pub mod status;
mod sync;
pub mod table;
pub mod task;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transport;
pub mod wire;

pub use check::{
    CopyArgs, Destination, ExtParam, LayerRange, Layers, LayerwiseArgs, PullRows, PushRows, Target,
};
pub use config::{
    Config, KernelChoice, LinkConfig, Mode, PoolConfig, Role, Share, SwapInPath, Token, TransportChoice,
};
pub use counters::OpState;
pub use datadist::{CacheIndex, DataDist, End, FarName};
pub use desc::{CacheDesc, CacheKind, DataType, Geometry, Placement, tensor_bytes};
pub use error::{Error, ErrorKind, Result};
pub use id::{CacheId, ClusterId, Deadline};
pub use keys::{CacheKey, NO_ID, Name};
pub use links::{CommStatus, PeerAddress};
pub use mem::{Access, Adopted, abandon as abandon_sockets};
pub use stats::{LinkState, PoolReport, Snapshot};
pub use status::StatusCode;
pub use table::Cache;
pub use task::{Carried, Outcome, Task};
