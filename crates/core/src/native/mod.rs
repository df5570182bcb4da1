//! The native API: the engine of Rust and C programs, and what it shares with that of Python: caches by name, rows of them, and calls
//! on pairs of rows.
//!
//! `crates/py` and `crates/capi` convert the values of their language to these types. Rust programs use them as they are.

mod block_rows;
mod builder;
mod byte_pieces;
mod cache_form;
mod cache_names;
mod element_types;
mod engine;
mod error_words;
mod moved_rows;
mod pairs;
mod peers;

pub use block_rows::{BlockRows, RowsPart};
pub use builder::EngineBuilder;
pub use byte_pieces::BytesOfPair;
pub use cache_form::{CacheForm, pool_named};
pub use cache_names::{EngineName, OwnCache, PeerCache, RowsCache};
pub use element_types::ElementTypes;
pub use engine::Engine;
pub use error_words::{ErrorClass, ErrorWords};
pub use pairs::{OwnPairs, PairExtras, PeerPairs, RowsOfPair};
pub use peers::{grant_time, lend, link};

/// Maximum number of seconds of a time limit: 2^32 - 1 milliseconds.
pub const MAX_SECONDS: u64 = 4_294_967;
