//! Memory: the one room of the core where addresses are dereferenced (unsafe room 1).
//!
//! # Promises
//!
//! 1. A [`Region`] owns its mapping and outlives every [`Tensors`] carved from it, because they hold it.
//! 2. Foreign memory has one entrance, the unsafe constructor of [`Adopted`]: whoever calls it promises that the
//!    addresses stay valid, readable and writable as long as the value, or anything made from it, lives.
//! 3. A [`Window`] exists only inside the tensor it was cut from; its bounds were checked when it was made.
//! 4. Bytes move only in [`kernels::copy`], [`vectored`] and [`PeerProcess::read`], between windows or a window and the
//!    kernel, by raw addresses; no slice over memory that others may write is ever lent out.
//! 5. Nobody writes into another process: its memory is mapped without the right to write, or read through the kernel,
//!    and a window of it is refused as a destination.
//! 6. Who may read and write which rows at the same time is decided above, by the pins of `table`.
//!
//! Not for: which bytes to copy (`plan`), or who copies them (`engine`).

mod adopted;
mod fork;
mod generations;
mod huge_pages;
pub mod kernels;
mod limits;
mod list_allocator;
mod map_budget;
mod memfd;
mod page_faults;
mod peer_credentials;
mod peer_mapping;
mod peer_process;
mod process_id;
mod region;
mod smaps;
pub mod socket_io;
#[cfg(feature = "testing")]
pub mod stalled;
mod tensors;
mod window;

pub use adopted::Adopted;
pub use fork::{Kept, abandon};
pub use generations::{Generations, PeerGenerations};
pub use huge_pages::{OwnPages, Refusal};
pub use limits::{refuse_beyond_room, refuse_beyond_room_under, usable_bytes, usable_under};
pub use list_allocator::KeptLists;
pub use map_budget::{MapBudget, Reserved};
pub use page_faults::{faulted, page_faults};
pub use peer_credentials::{Credentials, peer_credentials, same_user, take_descriptors};
pub use peer_mapping::PeerMapping;
pub use peer_process::{PeerProcess, Probe, allow_readers, own_probe};
pub use process_id::{remember_process, this_process};
pub use region::{HugePages, Region};
pub use tensors::Tensors;
pub use window::{Access, Reach, Window};
