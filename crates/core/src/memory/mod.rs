//! Memory access: the only module of the core in which addresses are dereferenced and unsafe code is allowed.
//!
//! # Promises
//!
//! The `SAFETY` comments of this module refer to these promises by number.
//!
//! 1. A [`Region`] owns its mapping. All [`Tensors`] carved from it hold a reference to it, so it outlives
//!    them.
//! 2. Memory of the caller enters only through the unsafe constructor of [`Adopted`]. Its caller promises
//!    that the addresses stay valid, readable and writable as long as the value, or anything made from it,
//!    exists.
//! 3. A [`Window`] exists only inside the tensor or the [`BounceBuffer`] from which it was cut, or is a slice that is borrowed as
//!    long as the window lives. Its bounds were checked when it was made. The same holds for each of several [`Windows`].
//! 4. Bytes move only in [`kernels::copy_all`], [`socket_io`], [`RingPair`], [`PeerProcess::read`], [`FabricRegion::read`] and
//!    [`read_bytes`], between two windows, between a window and the kernel or UCX, between a ring and a window or a
//!    private buffer, or from a window into a private buffer, and by raw addresses. No slice is ever made over memory that others may
//!    write.
//! 5. No process writes into the memory of another one. Memory of a peer is mapped read-only, or read through
//!    the kernel. A window of it is refused as a destination.
//! 6. Which rows may be read and written at the same time is decided by the pins of the `cache` module,
//!    before bytes move.

mod adopted;
mod bounce_buffer;
mod descriptors;
mod fabric_region;
mod fork;
mod generations;
pub mod kernels;
mod limits;
mod map_budget;
mod maps;
mod memfd;
mod page_merge;
mod pages;
mod peer_credentials;
mod peer_mapping;
mod peer_process;
mod process_id;
mod random;
mod region;
mod shared_mapping;
mod shared_rings;
mod shared_words;
pub mod socket_io;
mod tensors;
mod window;
mod window_bytes;

pub use adopted::Adopted;
pub use bounce_buffer::BounceBuffer;
pub use descriptors::{EventFd, above_standard_streams, shortage, uncreated};
pub use fabric_region::{FabricRegion, SharedRegion, load_ucx};
pub use fork::{CloseOnFork, abandon};
pub use generations::{Generations, PeerGenerations};
#[cfg(feature = "testing")]
pub use limits::refuse_beyond_room_under;
pub use limits::{refuse_beyond_room, usable_bytes, usable_under};
pub use map_budget::{MapBudget, Reservation};
pub use page_merge::{MergeRefusal, OwnPages};
pub use pages::page_size;
pub use peer_credentials::{
    Credentials, is_user, peer_credentials, peer_process_descriptor, same_user, take_descriptors,
};
pub use peer_mapping::PeerMapping;
#[cfg(feature = "testing")]
pub use peer_process::BEFORE_READ;
pub use peer_process::{PeerProcess, Probe, allow_readers, own_probe};
pub use process_id::{remember_process, this_process};
pub use random::random;
pub use region::Region;
pub use shared_rings::{OwnRings, RingPair, RingWait, SharedRings};
pub use shared_words::{PeerWords, SharedWords};
pub use tensors::{Spaced, Tensors};
pub use window::{Access, Reach, Window, Windows};
pub use window_bytes::read_bytes;
