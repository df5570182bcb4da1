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
//! - [`Holder`] owns the memory, and serves clients in forked processes, one after the other. The values outlive each of them.
//! - [`Store`] is the client: [`exists`](Store::exists), [`get`](Store::get), [`put`](Store::put). If the keeper is away, it answers that
//!   nothing is there.
//! - [`StoreView`] has values where they lie, without a copy.
//! - [`Observer`] lists what a keeper has, for people and tools.
//!
//! ```text
//!  store   started   view   observer   take_over   holder   keeper    the ends
//!  keeper_link   serving   admission             what they do with messages
//!  attachment   connection   clients   refusals   client    what each has of the other
//!  table   leases   namespaces   changes   what only the keeper has
//!  shared_files            what outlives the process that serves
//!  index   recency         the order of keys, and of slots
//!  messages   socket       packets between the ends
//!  sizes   key   stats   roles   call_lock   jobs   windows   viewed   reported   dropped_on_thread
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod admission;
mod attachment;
mod call_lock;
mod changes;
mod client;
mod clients;
mod connection;
mod dropped_on_thread;
mod holder;
mod index;
mod jobs;
mod keeper;
mod keeper_link;
mod key;
mod leases;
mod messages;
mod namespaces;
mod observer;
mod recency;
mod refusals;
mod reported;
mod roles;
mod serving;
mod shared_files;
mod sizes;
mod socket;
mod started;
mod stats;
mod store;
mod table;
mod take_over;
mod view;
mod viewed;
mod windows;

pub use connection::KeeperAccess;
pub use holder::{Holder, KeeperOptions};
pub use keeper::Keeper;
pub use keeper_link::StoreOptions;
pub use key::{KEY_BYTES, StoreKey};
pub use messages::{ListedChange, ListedNamespace, ListedValue, Stored};
pub use observer::{NewChanges, Observer};
pub use roles::{ClientRole, RoleTokens, read_token};
pub use sizes::{MAX_KEYS, MAX_LEASE, MAX_NAMESPACE, MAX_VALUE};
pub use started::{JobMemory, StoreJob};
pub use stats::{KeeperStats, StoreStats};
pub use store::Store;
pub use take_over::TakenOver;
pub use view::{StoreView, ViewedValue};
