//! Memory: the one room of the core where addresses are dereferenced (unsafe room 1).
//!
//! # Promises
//!
//! 1. A [`Region`] owns its mapping and outlives every [`Tensors`] carved from it, because they hold it.
//! 2. Foreign memory has one entrance, the unsafe constructor of [`Adopted`]: whoever calls it promises that the
//!    addresses stay valid, readable and writable as long as the value, or anything made from it, lives.
//! 3. A [`Window`] exists only inside the tensor it was cut from; its bounds were checked when it was made.
//! 4. Bytes move only in [`kernel::copy`], by raw copies between two windows; no slice over memory that others may
//!    write is ever lent out.
//! 5. Who may read and write which rows at the same time is decided above, by the pins of `table`.
//!
//! Not for: which bytes to copy (`plan`), or who copies them (`engine`).

pub mod kernel;
mod region;
mod smaps;
mod tensors;

pub use region::{HugePages, Region};
pub use tensors::{Access, Adopted, Tensors, Window};
