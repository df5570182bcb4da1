//! A keeper: a process that stores values of other processes, such as blocks of KV caches, and outlives them.
//!
//! The values are in slots of one memory file, and an index in a second file says which key is in which slot. Clients map both
//! read-only, so they look up and copy values without a message. Only the keeper writes: a client that puts a value has the keeper copy
//! it. When all slots are in use, the least recently used value is replaced.
//!
//! A value is right if the generation of its slot has not changed since it was put, or it is a miss. Nothing else decides this: a
//! keeper or a client may be killed at any time.
//!
//! - [`Keeper`] owns the memory and serves clients, on one thread.
//! - [`Store`] is the client: [`exists`](Store::exists), [`get`](Store::get), [`put`](Store::put). If the keeper is away, it answers that
//!   nothing is there.
//!
//! ```text
//!  store   keeper          the two ends
//!  attachment   serving    what they do with messages
//!  table   leases   namespaces   what only the keeper has
//!  index   recency         the order of keys, and of slots
//!  messages   socket       packets between the ends
//!  sizes   key
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod attachment;
mod index;
mod keeper;
mod key;
mod leases;
mod messages;
mod namespaces;
mod recency;
mod serving;
mod sizes;
mod socket;
mod store;
mod table;

pub use keeper::{Keeper, KeeperOptions};
pub use key::{KEY_BYTES, StoreKey};
pub use messages::{KeeperStats, Stored};
pub use sizes::{MAX_KEYS, MAX_LEASE, MAX_NAMESPACE, MAX_VALUE};
pub use store::{Store, StoreOptions, StoreStats};
