//! Commits the pools in huge pages if the option `huge_pages` requests it, and logs a hint about small pages.
//!
//! Huge pages make copies faster and double the speed of reads from other processes through the kernel. But a
//! call that touches a unit (one huge page) while the kernel merges it waits, for up to several milliseconds.
//! So the engine merges a pool only before it is open, and registered memory only while it is registered
//! (`memory::Adopted::merge`). It merges nothing later, and nothing by default
//! (`only_eager_engines_merge_registered_memory`).

mod pool_commit;
mod small_page_hint;

pub use pool_commit::{Merged, commit_pools};
pub use small_page_hint::SmallPageHint;
