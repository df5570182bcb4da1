//! The core of `llm_datadist`: an engine for the KV cache of large language models. It contains nothing
//! specific to Python.
//!
//! ```text
//!  operations   engine   transfer
//!  sessions     session   resources   stats   events
//!  movement     copy   huge_pages            copy: the only module that moves bytes of caches
//!  parts        cache   grants   pool   device   memory   net   protocol   token_file
//!  decisions    options   validate   plan    pure: no memory access, no I/O, no clock
//!  vocabulary   config   model   status   error   fallible   sync   threads
//! ```
//!
//! A module uses only modules of its own row or of rows below. `docs/architecture.md` has the exact table, which
//! `tools/lint/test_architecture.py` checks. The modules are private; this page is the whole interface:
//!
//! - **Open an engine:** [`DataDist::open`] with a [`Config`]: [`Role`], [`ClusterId`], [`Mode`],
//!   [`PoolConfig`] or [`Share`], [`LinkConfig`] with [`Token`] and [`TransportChoice`], and the choices
//!   [`KernelChoice`], [`SwapInPath`] and [`HugeChoice`].
//! - **Describe and hold memory:** [`CacheDesc`] ([`DataType`], [`Placement`], [`CacheKind`]), [`CacheKey`],
//!   [`CacheLayout`] with a [`Geometry`]; a [`KvLayout`] ([`TokenOrder`], [`KvPlanes`], [`KvLayoutNames`]) with a [`KvGeometry`];
//!   a [`Cache`] found by [`CacheId`]; [`Adopted`] memory of the caller.
//! - **Copy and swap:** [`End`], [`CopyArgs`].
//! - **Link:** [`PeerAddress`], [`CommStatus`], [`Deadline`].
//! - **Pull and push:** [`RemoteName`] with a [`Name`] or a text ([`RemoteCacheName`]), [`Rows`], [`Layers`] of
//!   [`LayerRange`]s; groups of [`GroupMember`]s and [`CopyMember`]s; the C++ class names its peers by [`CacheIndex`] and [`ExtParam`].
//! - **Run or start them:** each of these calls is an [`Operation`]. [`Operation::run`] waits for it, and [`Operation::start`] returns
//!   a [`Transfer`] with its [`TransferProgress`]. [`DataDist::poll`] returns [`Event`]s from the [`EventQueue`]; an [`AwaitQueue`] wakes an event loop.
//! - **Transfer layer by layer:** [`LayerwiseArgs`], [`Destination`], [`Target`]; a [`CacheTask`] with its
//!   [`Outcome`]s and the [`LayerProgress`] of each.
//! - **Observe:** [`Snapshot`] ([`PoolReport`], [`PoolState`], [`TableState`], [`LinkState`], [`OpState`], [`FabricState`]).
//!   The log is `tracing` events with targets `llm_datadist::*`.
//! - **Errors:** [`Error`] with its [`ErrorKind`], argument, facts and [`ArrivedRows`]; [`Words`] for the arguments in its text; [`StatusCode`] for the bindings.
//!
//! [`bindings`] serves `crates/py` and `crates/capi` alone. The feature `testing` adds the module `testing`,
//! which opens the private modules to tests and benchmarks.
//!
//! # Example
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
//!     row_stride: None,
//!     kv_layout: None,
//!     tensors: vec![],
//! };
//! let cache = engine.allocate(&desc, CacheKind::Blocks, &[])?;
//! engine.copy_blocks(&End::Managed(cache.id()), &[(0, 1), (1, 2)]).run()?;
//! engine.deallocate(cache.id())?;
//! # drop(cache);
//! assert_eq!(engine.stats().device_pool.unwrap().pool.used_bytes, 0);
//! # Ok::<(), Error>(())
//! ```
//!
//! Two engines, here in one process, usually in two. One listens; the other links, pulls and pushes.
//!
//! ```
//! use std::time::Duration;
//! use llm_datadist_core::*;
//!
//! let open = |role, cluster, listen: Option<&str>| {
//!     let mut config = Config::new(role, ClusterId(cluster));
//!     config.device_pool = Some(PoolConfig { memory_size: 1 << 20, page_shift: 16 });
//!     config.remote_accessible = true; // caches are named by id, and a pull leaves them in place
//!     config.links.listen = listen.map(|address| address.parse().unwrap());
//!     DataDist::open(config)
//! };
//! let prefill = open(Role::Prompt, 1, Some("127.0.0.1:0"))?;
//! let decode = open(Role::Decoder, 2, None)?;
//! let desc = CacheDesc {
//!     num_tensors: 2,
//!     shape: vec![8, 64],
//!     data_type: DataType::Float16,
//!     placement: Placement::Device,
//!     row_stride: None,
//!     kv_layout: None,
//!     tensors: vec![],
//! };
//! let theirs = prefill.allocate(&desc, CacheKind::Batch, &[])?;
//! let ours = decode.allocate(&desc, CacheKind::Batch, &[])?;
//!
//! let address = prefill.listening().expect("it listens");
//! let peer = PeerAddress { cluster: ClusterId(1), remote: vec![address], local: vec![] };
//! for linked in decode.link_clusters(&[peer.clone()], Duration::from_secs(3)) {
//!     linked?;
//! }
//! // Slot 3 of the peer into slot 0 of this engine: 128 bytes in each of two tensors.
//! let slot = |row| RemoteName { cluster: ClusterId(1), name: Name::Row { cache: theirs.id(), row } };
//! let here = End::Managed(ours.id());
//! decode.pull(slot(3), &here, Rows::slot(0, -1), Layers::ALL).run()?;
//! // Push the second tensor only, back into slot 7.
//! let second = LayerRange { first: 1, end: 2 };
//! let layers = Layers { src: Some(second), dst: Some(second), tensors_per_layer: 1 };
//! decode.push(&here, slot(7), Rows::slot(0, -1), layers).run()?;
//! let link = &decode.stats().links[0];
//! assert_eq!((link.cluster, link.transfers.bytes), (ClusterId(1), 3 * 128));
//!
//! // Layer by layer, while the next one is computed: the code that computes reports which layer is ready.
//! let args = LayerwiseArgs { tensors_per_layer: 1, ..LayerwiseArgs::default() };
//! let target = Target::Cache { name: Name::Row { cache: ours.id(), row: 2 }.into(), first_layer: Some(0) };
//! let src_layers = LayerRange { first: 0, end: 2 };
//! let to = Destination { cluster: ClusterId(2), target, src_layers, src_row: 3 };
//! let task = prefill.transfer_async(&End::Managed(theirs.id()), &args, vec![to], None)?;
//! task.layers().into_iter().try_for_each(|layer| task.ready(layer))?;
//! assert!(task.wait(Deadline::after(Duration::from_secs(3)))?);
//! assert!(matches!(task.outcomes()[0], Outcome::Done));
//!
//! // An error explains the cause in its text and as values.
//! let error = decode.pull(slot(8), &here, Rows::slot(0, -1), Layers::ALL).run().unwrap_err();
//! assert_eq!(error.kind(), ErrorKind::CacheNotFound);
//! assert_eq!(StatusCode::from(error.kind()).name(), "LLM_KV_CACHE_NOT_EXIST");
//! assert_eq!(error.fact("cluster"), Some("1"));
//! assert_eq!(decode.unlink_clusters(&[peer], Duration::from_secs(3), false).len(), 1);
//! # Ok::<(), Error>(())
//! ```

// The interface consists of the re-exports below only. `pub` inside a module makes an item visible to the
// other modules and, through `testing`, to the tests.
#![allow(unreachable_pub, clippy::len_without_is_empty, reason = "the modules are private")]
#![cfg_attr(
    feature = "testing",
    allow(missing_docs, reason = "the interface is checked without the feature")
)]
// Tests of the library may panic; the library may not.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

// The engine uses memfds, epoll and pidfds, 64-bit offsets, and numbers that peers map in place
// (docs/testing.md).
#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("llm_datadist supports Linux on 64-bit little-endian processors only");

pub mod bindings;
mod budget;
mod cache;
mod checksums;
mod config;
mod copy;
mod device;
mod engine;
mod error;
mod events;
mod fabric;
mod fallible;
mod grants;
mod huge_pages;
#[expect(unsafe_code, reason = "the only module of the core that dereferences addresses")]
mod memory;
mod model;
mod net;
mod options;
mod plan;
mod pool;
mod protocol;
mod resources;
mod session;
mod stats;
mod status;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod threads;
mod token_file;
mod transfer;
mod validate;

pub use cache::{Cache, TableState};
pub use config::{
    Backend, Config, FabricConfig, HugeChoice, KernelChoice, LinkConfig, Mode, PoolConfig, Role, Share,
    SwapInPath, Token, TransportChoice,
};
pub use engine::{
    CacheIndex, CallExtras, CopyMember, DataDist, End, EnsureOptions, GroupMember, LayerReceiver, Operation,
    RemoteName,
};
pub use error::{ArrivedRows, Error, ErrorKind, Result};
pub use events::{
    AwaitQueue, Event, EventQueue, LinkEnd, Notification, PeerInfo, Transfer, TransferProgress,
};
pub use grants::Grant;
pub use memory::Adopted;
pub use model::{
    CacheDesc, CacheId, CacheKey, CacheKind, CacheLayout, ClusterId, DataType, Deadline, Geometry, GrantEnd,
    GrantToken, GrantUse, KvGeometry, KvLayout, KvLayoutNames, KvPlanes, MixedSizes, NO_ID, Name, Placement,
    RemoteCacheName, RowSizes, SubRow, TensorDesc, TokenOrder, Verify, Words, tensor_bytes,
};
pub use pool::PoolState;
pub use session::{CommStatus, PeerAddress};
pub use stats::{FabricState, LinkState, OpState, PathState, PoolReport, Snapshot};
pub use status::StatusCode;
pub use transfer::{CacheTask, LayerProgress, LayerTask, Outcome};
pub use validate::{CopyArgs, Destination, ExtParam, LayerRange, Layers, LayerwiseArgs, Rows, Target};
