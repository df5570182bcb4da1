//! Memory pools: the allocator, and the arenas that it divides into extents.

mod allocator;
mod arena;

pub use allocator::{Extent, Pool, PoolState};
pub use arena::Arena;
