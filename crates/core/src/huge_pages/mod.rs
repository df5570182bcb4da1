//! Puts what pools have touched into huge pages, in the background, where `huge_pages` asks for it.
//!
//! Copies get faster by it, reads of other processes through the kernel twice as fast, and a peer that maps a pool has one
//! page to map where it had 512. But a call that touches a unit while the kernel merges it waits, up to milliseconds, so
//! nothing is merged by default, and calls then pay one branch (`a_merger_that_merges_nothing_takes_nothing`). It looks for
//! work when much was moved or a link was made, on a thread that ends when there is nothing left
//! (`the_merger_ends_when_there_is_nothing_left`). Only memory that is touched anyway is merged: a unit of which less than
//! `ENOUGH` is in use stays as it is (`what_nobody_touched_stays_uncommitted`). Registered memory is merged only where that
//! is asked for by name, as far as it is there, once peers may read it through the kernel (`lent`); otherwise one hint is
//! logged where it lies in small pages (`hint`). What is to be committed ahead is committed and merged at once (`commit`).
//! Not for: how (`mem`).

mod commit;
mod merger;
mod pace;
mod pool_merge;
mod registered;
mod small_page_hint;

pub use merger::Merger;
pub use pace::Merged;
