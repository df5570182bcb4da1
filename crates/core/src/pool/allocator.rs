//! Splits the numbers `[0, capacity)` into page-aligned ranges, and merges the ranges that are freed.
//!
//! Nothing here is a pointer, so a pool can also manage device memory that the CPU cannot address. A pool has
//! no lock (the caller provides one), reads no clock and does no I/O.
//!
//! The algorithm is a two-level segregated fit over page counts: free runs are kept in lists by size class
//! (each count below 64 has its own, and above that every power of two has 32), and two levels of bitmaps
//! record which lists are not empty.
//!
//! - *Take* uses the head of the request's own class if it is long enough, else the head of the next class
//!   that has one: O(1). Only if neither exists, it searches its own class run by run. So `None` means that
//!   no free run is long enough (`a_fit_behind_the_head_of_its_own_class_is_found`).
//! - *Split* cuts the range from the high end of the run, so that the low remainder mostly keeps its class.
//! - *Free* merges with both neighbours in O(1): an extent carries the index of its node.
//!
//! Bookkeeping takes 32 bytes for each range, however many pages the pool has.

use crate::error::{Error, ErrorKind, Result};

/// Each power of two of page counts is divided into `1 << SPLIT_BITS` classes.
const SPLIT_BITS: u32 = 5;
const SPLIT: u32 = 1 << SPLIT_BITS;
/// First-level groups: one for the counts below `SPLIT`, and one for each power of two from there to 2^31.
const GROUPS: usize = (u32::BITS - SPLIT_BITS + 1) as usize;
const CLASSES: usize = GROUPS * SPLIT as usize;

/// The node that represents both ends of the address order and of every class list. It counts as used and has
/// no pages, so the hot paths need no check for a missing neighbour or an empty list.
const NIL: u32 = 0;

/// A range allocated by a [`Pool`], and the only way to free it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a dropped extent is never freed"]
pub struct Extent {
    /// Offset of the first byte from the start of the pool, a multiple of the page size.
    pub offset: u64,
    /// Length in bytes, a multiple of the page size.
    pub bytes: u64,
    /// Index of the node. As wide as the other fields on purpose: a move that reads a narrower store back as one load costs a third
    /// of the time of an allocate and free (`pair_same` in the benchmark).
    node: u64,
}

impl Extent {
    #[expect(clippy::cast_possible_truncation, reason = "an index of a node has 32 bits")]
    fn node(&self) -> u32 {
        self.node as u32
    }
}

/// Sizes and counters of a pool, read at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Serialize)]
pub struct PoolState {
    /// Bytes that can be allocated, in whole pages.
    pub capacity_bytes: u64,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Bytes of all allocated ranges, including rounding.
    pub used_bytes: u64,
    /// Bytes that are not allocated.
    pub free_bytes: u64,
    /// The highest `used_bytes` after any successful request.
    pub peak_used_bytes: u64,
    /// Bytes of the longest free run, which is the largest request that would succeed now.
    pub largest_free_run_bytes: u64,
    /// Number of allocated ranges.
    pub used_ranges: u64,
    /// Number of free runs. Two free runs are never adjacent.
    pub free_ranges: u64,
    /// Number of extents allocated since the pool was created.
    pub allocations: u64,
    /// Number of extents freed since the pool was created.
    pub frees: u64,
    /// Number of requests refused for lack of room since the pool was created.
    pub failures: u64,
}

/// A range in address order: used, free (then also in the list of its class), or spare (then linked only by
/// `next`).
#[derive(Clone, Copy, Debug)]
// Two nodes fit in a cache line, and none crosses one. This makes a churn of random frees a third faster
// (`churn_mixed`).
#[repr(align(32))]
struct Node {
    used: bool,
    page: u32,
    pages: u32,
    prev: u32,
    next: u32,
    class_prev: u32,
    class_next: u32,
}

/// Allocates page-aligned ranges of `[0, capacity)`.
///
/// ```
/// use llm_datadist_core::testing::pool::Pool;
/// # fn main() -> llm_datadist_core::Result<()> {
/// let mut pool = Pool::new(1 << 20, 16)?; // 1 MiB in pages of 64 KiB
/// let layers = pool.allocate_tensors(100_000, 4)?; // four tensors of two pages each, in one run
/// assert_eq!(layers.len(), 1);
/// assert_eq!(layers[0].bytes, 4 * 131_072);
/// layers.into_iter().for_each(|extent| pool.free(extent));
/// assert_eq!(pool.state().largest_free_run_bytes, 1 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pool {
    nodes: Vec<Node>,
    /// First of the spare nodes, which are linked by `next`.
    spare: u32,
    /// Bit g is set if a class of group g has a run.
    groups: u32,
    /// Bit s of word g is set if class s of group g has a run.
    splits: [u32; GROUPS],
    /// The most recently listed run of each class.
    heads: [u32; CLASSES],
    page_shift: u32,
    pages: u32,
    used_pages: u32,
    peak_used_pages: u32,
    spares: u32,
    /// Number of ranges allocated so far. Minus `frees` it is the number of used ranges.
    allocations: u64,
    frees: u64,
    failures: u64,
}

impl Pool {
    /// Creates an empty pool of `capacity` bytes in pages of `1 << page_shift` bytes (10 to 30). Bytes after
    /// the last whole page are never used. There must be 1 to 2^32 - 2 pages.
    pub fn new(capacity: u64, page_shift: u32) -> Result<Pool> {
        if !(10..=30).contains(&page_shift) {
            return Err(Error::out_of_range("page_shift", page_shift, "10 to 30"));
        }
        let pages = match u32::try_from(capacity >> page_shift) {
            Ok(pages) if pages > 0 && pages < u32::MAX => pages,
            _ => {
                let (least, limit) = (1u64 << page_shift, u64::from(u32::MAX) << page_shift);
                let range = format_args!("at least {least}, below {limit}");
                return Err(Error::out_of_range("capacity", capacity, range));
            }
        };
        let end = Node { used: true, page: 0, pages: 0, prev: 1, next: 1, class_prev: NIL, class_next: NIL };
        let run = Node { used: false, pages, prev: NIL, next: NIL, ..end };
        let mut pool = Pool {
            nodes: vec![end, run],
            spare: NIL,
            groups: 0,
            splits: [0; GROUPS],
            heads: [NIL; CLASSES],
            page_shift,
            pages,
            used_pages: 0,
            peak_used_pages: 0,
            spares: 0,
            allocations: 0,
            frees: 0,
            failures: 0,
        };
        pool.list(1);
        Ok(pool)
    }

    /// Allocates a range of at least `bytes` bytes; 0 bytes take one page. Returns `None` if no free run is
    /// long enough.
    #[cfg(feature = "testing")]
    #[inline]
    pub fn allocate(&mut self, bytes: u64) -> Option<Extent> {
        let Some(extent) = self.pages_for(bytes).and_then(|pages| self.take(pages)) else {
            self.failures += 1;
            return None;
        };
        self.peak_used_pages = self.peak_used_pages.max(self.used_pages);
        Some(extent)
    }

    /// Allocates room for `count` tensors of `bytes_each` bytes, each starting on a page. On `Err` no range
    /// is allocated.
    ///
    /// The result is one extent if a run is long enough. Otherwise it has the fewest extents possible, filled
    /// from the longest run down. An extent holds a whole number of tensors, each [`rounded`](Self::rounded)
    /// up to whole pages. No tensors need no extents.
    ///
    /// Returns `Err` of kind `OutOfMemory` if there is no room, with the facts `asked_bytes` (rounded),
    /// `free_bytes`, `largest_free_run_bytes` and `capacity_bytes`.
    pub fn allocate_tensors(&mut self, bytes_each: u64, count: u32) -> Result<Vec<Extent>> {
        let Some(extents) = self.pages_for(bytes_each).and_then(|each| self.take_tensors(each, count)) else {
            self.failures += 1;
            return Err(self.exhausted(bytes_each, count));
        };
        self.peak_used_pages = self.peak_used_pages.max(self.used_pages);
        Ok(extents)
    }

    /// Frees `extent`, which this pool has allocated.
    #[inline]
    #[expect(clippy::needless_pass_by_value, reason = "the caller cannot free the range again")]
    pub fn free(&mut self, extent: Extent) {
        debug_assert!(self.holds(&extent), "an extent of another pool");
        self.frees += 1;
        self.give_back(extent.node());
    }

    /// Whether this pool has allocated `extent`.
    fn holds(&self, extent: &Extent) -> bool {
        let node = self.nodes.get(extent.node() as usize);
        node.is_some_and(|node| {
            let (offset, bytes) = (self.bytes(node.page), self.bytes(node.pages));
            node.used && (offset, bytes) == (extent.offset, extent.bytes)
        })
    }

    pub fn page_bytes(&self) -> u64 {
        1 << self.page_shift
    }

    /// Returns the bytes that a range for `bytes` bytes takes: whole pages, at least one. Returns `None` if
    /// that exceeds 64 bits.
    pub fn rounded(&self, bytes: u64) -> Option<u64> {
        self.page_count(bytes).checked_mul(self.page_bytes())
    }

    /// Returns the current sizes and counters. The longest run is searched in the list of the highest class
    /// in use; all other values are stored.
    pub fn state(&self) -> PoolState {
        let used_ranges = self.allocations - self.frees;
        PoolState {
            capacity_bytes: self.bytes(self.pages),
            page_bytes: self.page_bytes(),
            used_bytes: self.bytes(self.used_pages),
            free_bytes: self.bytes(self.pages - self.used_pages),
            peak_used_bytes: self.bytes(self.peak_used_pages),
            largest_free_run_bytes: self.bytes(self.node(self.longest(1)).pages),
            used_ranges,
            free_ranges: (self.nodes.len() - 1) as u64 - u64::from(self.spares) - used_ranges,
            allocations: self.allocations,
            frees: self.frees,
            failures: self.failures,
        }
    }

    // -- pages and bytes --

    fn bytes(&self, pages: u32) -> u64 {
        u64::from(pages) << self.page_shift
    }

    fn page_count(&self, bytes: u64) -> u64 {
        // Adding first and then rounding down would overflow for the last page of 2^64.
        let last = bytes.saturating_sub(1);
        (last >> self.page_shift) + 1
    }

    /// Returns `None` if no pool has so many pages.
    fn pages_for(&self, bytes: u64) -> Option<u32> {
        u32::try_from(self.page_count(bytes)).ok()
    }

    // -- ranges --

    #[inline]
    fn take(&mut self, pages: u32) -> Option<Extent> {
        let run = self.find(pages);
        if run == NIL || !self.storable() { None } else { Some(self.carve(run, pages)) }
    }

    fn take_tensors(&mut self, each: u32, count: u32) -> Option<Vec<Extent>> {
        // This also keeps the products below within 32 bits.
        if u64::from(each) * u64::from(count) > u64::from(self.pages - self.used_pages) {
            return None;
        }
        let mut taken = Vec::new();
        let mut left = count;
        while left > 0 {
            let room = taken.try_reserve(1).is_ok();
            if room && let Some(extent) = self.take(left * each) {
                taken.push(extent);
                break;
            }
            // `take` is exact, so even the longest run holds fewer tensors than are left.
            let run = self.longest(each);
            let whole = self.node(run).pages / each;
            if whole == 0 || !room || !self.storable() {
                self.allocations -= taken.len() as u64;
                taken.iter().rev().for_each(|extent: &Extent| self.give_back(extent.node()));
                return None;
            }
            taken.push(self.carve(run, whole * each));
            left -= whole;
        }
        Some(taken)
    }

    /// Returns whether there is a node for one more range.
    #[inline]
    fn storable(&mut self) -> bool {
        self.spare != NIL || self.nodes.try_reserve(1).is_ok()
    }

    fn exhausted(&self, bytes_each: u64, count: u32) -> Error {
        let state = self.state();
        let asked =
            u128::from(self.page_count(bytes_each)) * u128::from(self.page_bytes()) * u128::from(count);
        Error::new(ErrorKind::OutOfMemory, "the pool has no room for the tensors")
            .with("asked_bytes", asked)
            .with("free_bytes", state.free_bytes)
            .with("largest_free_run_bytes", state.largest_free_run_bytes)
            .with("capacity_bytes", state.capacity_bytes)
    }

    /// Cuts `pages` pages off the high end of the free run, which has at least as many.
    #[inline]
    fn carve(&mut self, run: u32, pages: u32) -> Extent {
        self.allocations += 1;
        self.used_pages += pages;
        let Node { page, pages: had, next, .. } = *self.node(run);
        let rest = had - pages;
        let node = if rest == 0 {
            self.unlist(run);
            self.node_mut(run).used = true;
            run
        } else {
            self.resize(run, rest);
            let used = Node {
                used: true,
                page: page + rest,
                pages,
                prev: run,
                next,
                class_prev: NIL,
                class_next: NIL,
            };
            let node = self.store(used);
            self.node_mut(run).next = node;
            self.node_mut(next).prev = node;
            node
        };
        Extent { offset: self.bytes(page + rest), bytes: self.bytes(pages), node: node.into() }
    }

    /// Frees a used range, and merges it with its free neighbours. At most one of their nodes remains.
    #[inline]
    fn give_back(&mut self, node: u32) {
        let Node { page, pages, prev, next, .. } = *self.node(node);
        self.used_pages -= pages;
        let before = *self.node(prev);
        let after = *self.node(next);
        match (before.used, after.used) {
            (true, true) => {
                self.node_mut(node).used = false;
                self.list(node);
            }
            (false, true) => {
                self.discard(node);
                self.resize(prev, before.pages + pages);
            }
            (true, false) => {
                self.discard(node);
                self.node_mut(next).page = page;
                self.resize(next, pages + after.pages);
            }
            (false, false) => {
                self.unlist(next);
                self.discard(node);
                self.discard(next);
                self.resize(prev, before.pages + pages + after.pages);
            }
        }
    }

    // -- nodes --

    fn node(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "ranges do not overlap: never more nodes than pages and one"
    )]
    fn store(&mut self, node: Node) -> u32 {
        let index = self.spare;
        if index == NIL {
            self.nodes.push(node);
            return (self.nodes.len() - 1) as u32;
        }
        self.spare = self.node(index).next;
        self.spares -= 1;
        *self.node_mut(index) = node;
        index
    }

    /// Removes a node from the address order, and keeps it for the next split.
    fn discard(&mut self, index: u32) {
        let Node { prev, next, .. } = *self.node(index);
        self.node_mut(prev).next = next;
        self.node_mut(next).prev = prev;
        let spare = self.spare;
        let node = self.node_mut(index);
        node.next = spare;
        self.spare = index;
        self.spares += 1;
    }

    // -- free runs by class --

    /// Returns a free run of at least `pages` pages, or `NIL`.
    #[inline]
    fn find(&self, pages: u32) -> u32 {
        let own = class_of(pages);
        let head = self.heads[own];
        if self.node(head).pages >= pages {
            return head;
        }
        let (group, split) = (own / SPLIT as usize, own % SPLIT as usize);
        // `!1 << n` are the bits above bit n.
        let in_group = self.splits[group] & (!1 << split);
        if in_group != 0 {
            return self.heads[group * SPLIT as usize + in_group.trailing_zeros() as usize];
        }
        let groups = self.groups & (!1 << group);
        if groups != 0 {
            let group = groups.trailing_zeros() as usize;
            return self.heads[group * SPLIT as usize + self.splits[group].trailing_zeros() as usize];
        }
        self.walk(head, |run| run >= pages).0
    }

    /// Returns the free run that holds the most pieces of `each` pages, or `NIL` if nothing is free. It is
    /// either a longest run, or one that holds as many pieces as the longest possible run of its class.
    fn longest(&self, each: u32) -> u32 {
        if self.groups == 0 {
            return NIL;
        }
        let group = self.groups.ilog2();
        let class = group * SPLIT + self.splits[group as usize].ilog2();
        let best = longest_of(class) / each * each;
        let (found, longest) = self.walk(self.heads[class as usize], |run| run >= best);
        if found == NIL { longest } else { found }
    }

    /// Returns the first run of a class list whose page count `fits`, and the longest run before it.
    #[cold]
    fn walk(&self, head: u32, fits: impl Fn(u32) -> bool) -> (u32, u32) {
        let (mut run, mut longest) = (head, NIL);
        while run != NIL {
            let pages = self.node(run).pages;
            if fits(pages) {
                return (run, longest);
            }
            if pages > self.node(longest).pages {
                longest = run;
            }
            run = self.node(run).class_next;
        }
        (NIL, longest)
    }

    #[inline]
    fn list(&mut self, run: u32) {
        let class = class_of(self.node(run).pages);
        let head = std::mem::replace(&mut self.heads[class], run);
        self.node_mut(head).class_prev = run;
        let node = self.node_mut(run);
        node.class_prev = NIL;
        node.class_next = head;
        if head == NIL {
            let group = class / SPLIT as usize;
            self.splits[group] |= 1 << (class % SPLIT as usize);
            self.groups |= 1 << group;
        }
    }

    #[inline]
    fn unlist(&mut self, run: u32) {
        let Node { pages, class_prev, class_next, .. } = *self.node(run);
        self.node_mut(class_next).class_prev = class_prev;
        if class_prev != NIL {
            self.node_mut(class_prev).class_next = class_next;
            return;
        }
        let class = class_of(pages);
        self.heads[class] = class_next;
        if class_next == NIL {
            let group = class / SPLIT as usize;
            self.splits[group] &= !(1 << (class % SPLIT as usize));
            if self.splits[group] == 0 {
                self.groups &= !(1 << group);
            }
        }
    }

    /// Changes the length of a free run. The run moves to another list only if its class changes.
    #[inline]
    fn resize(&mut self, run: u32, pages: u32) {
        if class_of(self.node(run).pages) == class_of(pages) {
            self.node_mut(run).pages = pages;
        } else {
            self.unlist(run);
            self.node_mut(run).pages = pages;
            self.list(run);
        }
    }
}

/// Returns the class of a page count: the count itself below `SPLIT`; otherwise its power of two and the
/// `SPLIT_BITS` bits below the leading one.
#[inline]
fn class_of(pages: u32) -> usize {
    let shift = (pages | SPLIT).ilog2() - SPLIT_BITS;
    (shift * SPLIT + (pages >> shift)) as usize
}

/// Returns the highest page count of a class.
fn longest_of(class: u32) -> u32 {
    let shift = (class / SPLIT).saturating_sub(1);
    let first = (class - shift * SPLIT) << shift;
    first + ((1 << shift) - 1)
}
