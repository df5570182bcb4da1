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
//! - **Open an engine:** [`Engine::builder`] with its pools, address and options, then [`EngineBuilder::open`].
//! - **Caches:** [`Engine::allocate`] and [`Engine::register`] make an [`OwnCache`] as a [`CacheForm`] describes it. A [`KvLayout`] says
//!   what blocks mean. [`Engine::peer_cache`] names a [`PeerCache`].
//! - **Rows:** [`OwnCache::rows`] and [`PeerCache::rows`] select blocks, and [`BlockRows::with_part`] the [`RowsPart`] that moves.
//! - **Copy, pull, push:** [`Engine::copy`], [`Engine::pull`] and [`Engine::push`] of pairs of rows, with [`PairExtras`], return a
//!   [`Transfer`] at once. [`Transfer::join`] waits for its end, and `transfer.as_ref().await` does so in async code
//!   ([`TransferFuture`]). [`Engine::push_layers`] returns a [`LayerTask`], to which the program
//!   reports layers.
//! - **Peers:** [`Engine::link`], [`Engine::peers`], [`Engine::send`] and [`Engine::unlink`], with a [`PeerInfo`] for each peer.
//! - **Grants:** [`Engine::lend`] lends blocks, and returns the [`GrantToken`] for a pull with [`GrantUse`].
//! - **Events:** [`Engine::events`] returns [`Event`]s. The [`EventQueue`] has a descriptor for an event loop.
//! - **Observe:** [`Engine::stats`] returns a [`Snapshot`]. The log is `tracing` events with targets `llm_datadist::*`.
//! - **Errors:** [`Error`] with its [`ErrorKind`], argument, facts and [`ArrivedRows`], and in [`ErrorWords`] its [`ErrorClass`].
//!
//! The module `bindings`, which this page does not show, serves `crates/py` and `crates/capi`: the layer of the original's API,
//! and what languages share. The feature `testing` adds the module `testing`, which opens the private modules to tests and
//! benchmarks.
//!
//! # Example
//!
//! Two engines, here in one process, usually in two (`examples/prefill_decode.rs`).
//!
//! ```
//! use std::time::Duration;
//! use llm_datadist_core::*;
//!
//! let prefill = Engine::builder().name("prefill").pool(1 << 20).listen("127.0.0.1:0").open()?;
//! let decode = Engine::builder().name("decode").pool(1 << 20).option("timeout", 5.0).open()?;
//! // Two layers of one tensor each, with eight blocks of 64 elements.
//! let form = CacheForm::plain(2, 8, &[64], DataType::Float16, Placement::Device, None)?;
//! let (theirs, ours) = (prefill.allocate("kv", &form)?, decode.allocate("kv", &form)?);
//! let soon = || Deadline::after(Duration::from_secs(5));
//!
//! // Copy blocks 0 and 1 to blocks 4 and 5, in all tensors. The destination comes first.
//! decode.copy(&[(&ours.rows([4, 5]), &ours.rows([0, 1]))], PairExtras::default())?.join(soon())?;
//!
//! // Link, and pull a block by the name of the cache, under a grant of its owner.
//! let linking = decode.link(&prefill.address()?.unwrap().to_string(), Some("prefill"), None, WhileRefused::Retry)?;
//! linking.join(soon())?;
//! let peer = linking.peer().expect("the peer of a success").cluster;
//! let token = prefill.lend(&theirs.rows([3]), Duration::from_secs(30), 1)?; // a program sends it to its readers
//! let remote = decode.peer_cache(peer, "kv")?;
//! let grants = vec![Some(GrantUse { token, done: true })];
//! let under_grant = PairExtras { grants, ..PairExtras::default() };
//! let pull = decode.pull(&[(&ours.rows([7]), &remote.rows([3]))], under_grant)?;
//! pull.join(soon())?;
//! assert_eq!(pull.progress().done, 2 * 128);
//!
//! // Push layer by layer: the code that computes reports which layer is ready.
//! let notify = PairExtras { notify: Some(b"request 7".into()), ..PairExtras::default() };
//! let push = decode.push_layers(&[(&remote.rows([5]), &ours.rows([7]))], notify)?;
//! (0..2).try_for_each(|layer| push.ready(layer))?;
//! push.transfer().join(soon())?;
//! let events = prefill.events(100)?;
//! assert!(events.iter().any(|event| matches!(event, Event::Notification(message) if message.payload == b"request 7")));
//!
//! // An error explains the cause in its text and as values.
//! let other = decode.peer_cache(peer, "other")?;
//! let pull = decode.pull(&[(&ours.rows([7]), &other.rows([3]))], PairExtras::default())?;
//! let error = pull.join(soon()).unwrap_err();
//! assert_eq!(ErrorWords(&error).class(), ErrorClass::NotFound);
//! decode.close(Duration::ZERO);
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

#[doc(hidden)]
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
#[doc(hidden)]
pub mod testing;
mod threads;
mod token_file;
mod transfer;
mod validate;

pub use cache::TableState;
pub use error::{ArrivedRows, Error, ErrorKind, Result};
pub use events::{
    Event, EventQueue, LinkEnd, Notification, PeerInfo, Transfer, TransferFuture, TransferProgress,
};
pub use grants::Grant;
pub use memory::Adopted;
pub use model::{
    CacheDesc, CacheId, CacheKind, ClusterId, DataType, Deadline, GrantEnd, GrantToken, GrantUse, KvLayout,
    KvPlanes, Placement, TokenOrder, Verify, WhileRefused,
};
pub use native::{
    BlockRows, BytesOfPair, CacheForm, ElementTypes, Engine, EngineBuilder, EngineName, ErrorClass,
    ErrorWords, MAX_SECONDS, OwnCache, PairExtras, PeerCache, RowsCache, RowsOfPair, RowsPart, pool_named,
};
pub use options::OptionValue;
pub use plan::Piece;
pub use pool::PoolState;
pub use stats::{FabricState, LinkState, OpState, PathState, PoolReport, Snapshot};
pub use transfer::{LayerProgress, LayerTask};
