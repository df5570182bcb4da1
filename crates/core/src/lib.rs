//! The core of `llm_datadist`: an engine for the KV cache of large language models. It contains nothing
//! specific to Python.
//!
//! ```text
//!  operations   native   engine   transfer
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
//! - **Open an engine:** [`DataDist::open`] with [`Config::native`]: [`PoolConfig`], [`LinkConfig`] with [`Token`] and
//!   [`TransportChoice`], and the choices [`SwapInPath`], [`HugeChoice`] and [`Verify`].
//! - **Caches by name:** [`OwnCache::allocate`] and [`OwnCache::register`] of [`Adopted`] memory, described by a [`CacheForm`]; a
//!   [`KvLayout`] says what blocks mean. [`PeerCache`] names a cache of a peer.
//! - **Rows:** [`OwnCache::rows`] and [`PeerCache::rows`] select blocks, and [`BlockRows::with_part`] the part of them that moves.
//! - **Copy, pull, push:** [`OwnPairs`] and [`PeerPairs`] of rows, with [`PairExtras`]. Each call returns a [`Transfer`] at once, or a
//!   [`LayerTask`] for a push whose layers the program reports. [`DataDist::poll`] returns [`Event`]s from the [`EventQueue`], and an
//!   [`AwaitQueue`] wakes an event loop.
//! - **Peers:** [`DataDist::ensure_link`], [`DataDist::notify`], [`DataDist::start_unlink`]; [`DataDist::grant`] lends blocks.
//! - **Observe:** [`Snapshot`] ([`PoolReport`], [`PoolState`], [`TableState`], [`LinkState`], [`OpState`], [`FabricState`]).
//!   The log is `tracing` events with targets `llm_datadist::*`.
//! - **Errors:** [`Error`] with its [`ErrorKind`], argument, facts and [`ArrivedRows`], and in [`ErrorWords`] its [`ErrorClass`].
//!
//! The other items are for the layer of the original's API and its C++ class: clusters with a [`Role`] and a [`ClusterId`], caches
//! with [`CacheKey`]s, [`End`]s of copies, [`Operation`]s that run or start, [`CacheTask`]s and [`StatusCode`]s.
//!
//! [`bindings`] serves `crates/py` and `crates/capi` alone. The feature `testing` adds the module `testing`,
//! which opens the private modules to tests and benchmarks.
//!
//! # Example
//!
//! Two engines, here in one process, usually in two.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use llm_datadist_core::*;
//!
//! let open = |name: &str, listen: Option<&str>| {
//!     let mut config = Config { name: name.into(), ..Config::native() };
//!     config.device_pool = Some(PoolConfig { memory_size: 1 << 20, page_shift: 16 });
//!     config.links.listen = listen.map(|address| address.parse().unwrap());
//!     DataDist::open(config).map(Arc::new)
//! };
//! let (prefill, decode) = (open("prefill", Some("127.0.0.1:0"))?, open("decode", None)?);
//! // Two layers of one tensor each, with eight blocks of 64 elements.
//! let form = CacheForm::plain(2, vec![8, 64], DataType::Float16, Placement::Device, None)?;
//! let theirs = OwnCache::allocate(prefill.clone(), &prefill, "kv", &form, false)?;
//! let ours = OwnCache::allocate(decode.clone(), &decode, "kv", &form, false)?;
//! let soon = || Deadline::after(Duration::from_secs(5));
//!
//! // Copy blocks 0 and 1 to blocks 4 and 5, in all tensors. The destination comes first.
//! let (dst, src) = (ours.rows([4, 5]), ours.rows([0, 1]));
//! let copies = OwnPairs::checked(&*decode, [(&dst, &src)].into_iter())?;
//! copies.copy(&decode, &PairExtras::default())?.join(soon())?;
//!
//! // Link, and pull a block by the name of the cache, under a grant of its owner.
//! let address = prefill.listening().expect("it listens");
//! let linking = decode.ensure_link(address, Duration::from_secs(5), None)?;
//! linking.join(soon())?;
//! let peer = linking.peer().expect("the peer of a success");
//! let grant = prefill.grant(&theirs.end(), &[3], Duration::from_secs(30), 1)?;
//! let token = prefill.grant_token(&grant); // a program sends it to its readers
//! let remote = PeerCache::new(decode.clone(), peer, "kv")?;
//! let (dst, src) = (ours.rows([7]), remote.rows([3]));
//! let pull = PeerPairs::checked(&*decode, PeerCall::Pull, [(&dst, &src)].into_iter())?;
//! let grants = vec![Some(GrantUse { token, done: true })];
//! let pulled = pull.start(&decode, PairExtras { grants, ..PairExtras::default() })?;
//! pulled.join(soon())?;
//! assert_eq!(pulled.progress().done, 2 * 128);
//!
//! // Push layer by layer: the code that computes reports which layer is ready.
//! let (dst, src) = (remote.rows([5]), ours.rows([7]));
//! let push = PeerPairs::checked(&*decode, PeerCall::Push, [(&dst, &src)].into_iter())?;
//! let task = push.start_layers(&decode, PairExtras { notify: Some(b"request 7".into()), ..PairExtras::default() })?;
//! (0..2).try_for_each(|layer| task.ready(layer))?;
//! task.transfer().join(soon())?;
//! let events = prefill.poll(100)?;
//! assert!(events.iter().any(|event| matches!(event, Event::Notification(message) if message.payload == b"request 7")));
//!
//! // An error explains the cause in its text and as values.
//! let (dst, src) = (ours.rows([7]), PeerCache::new(decode.clone(), peer, "other")?.rows([3]));
//! let pull = PeerPairs::checked(&*decode, PeerCall::Pull, [(&dst, &src)].into_iter())?;
//! let error = pull.start(&decode, PairExtras::default())?.join(soon()).unwrap_err();
//! assert_eq!(ErrorWords(&error).class(), ErrorClass::NotFound);
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
mod native;
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
    Backend, Config, FabricConfig, HugeChoice, LinkConfig, Mode, PoolConfig, Role, Share, SwapInPath, Token,
    TransportChoice,
};
pub use engine::{
    CacheIndex, CallExtras, CopyMember, DataDist, End, GroupMember, LayerReceiver, Operation, RemoteName,
};
pub use error::{ArrivedRows, Error, ErrorKind, Result};
pub use events::{
    AwaitQueue, Event, EventQueue, LinkEnd, Notification, PeerInfo, Transfer, TransferProgress,
};
pub use grants::Grant;
pub use memory::Adopted;
pub use model::{
    CacheDesc, CacheId, CacheKey, CacheKind, CacheLayout, ClusterId, DataType, Deadline, Geometry, GrantEnd,
    GrantToken, GrantUse, KvGeometry, KvLayout, KvPlanes, NO_ID, Name, Placement, RemoteCacheName, RowSizes,
    SubRow, TokenOrder, Verify, Words, tensor_bytes,
};
pub use native::{
    BlockRows, CacheForm, ElementTypes, EngineName, ErrorClass, ErrorWords, MAX_SECONDS, OwnCache, OwnPairs,
    PairExtras, PeerCache, PeerCall, PeerPairs, RowsCache, RowsOfPair, RowsPart, lent_cache, pool_named,
};
pub use pool::PoolState;
pub use session::{CommStatus, PeerAddress};
pub use stats::{FabricState, LinkState, OpState, PathState, PoolReport, Snapshot};
pub use status::StatusCode;
pub use transfer::{CacheTask, LayerProgress, LayerTask, Outcome};
pub use validate::{CopyArgs, Destination, ExtParam, LayerRange, Layers, LayerwiseArgs, Rows, Target};
