//! Merges the memory that pools have touched into huge pages, in the background, if the option `huge_pages`
//! requests it.
//!
//! Huge pages make copies faster and double the speed of reads from other processes through the kernel. But a
//! call that touches a unit (one huge page) while the kernel merges it waits, for up to several milliseconds.
//! So nothing is merged by default (`a_merger_without_registered_memory_takes_none`).
//!
//! The merger checks for work after much data was moved or when a link is made. Its thread ends when
//! nothing is left (`the_merger_ends_when_there_is_nothing_left`). It tries units that are in use a few times.
//! Those that stay in use, or for which memory was short, are left for a later check
//! (`units_in_use_are_tried_again_later`). It merges only memory that is in use: a unit of which less than
//! `ENOUGH` was touched stays as it is (`what_nobody_touched_stays_uncommitted`).
//!
//! Registered memory is merged only if the option requests that by name (`registered`). Otherwise one hint is
//! logged if it lies in small pages (`small_page_hint`).

mod merger;
mod pool_merge;
mod registered;
mod small_page_hint;
mod throttle;

pub use merger::Merger;
