//! Measures how cost grows with size: keys, caches, links, blocks of a call, cores, engines that pull from
//! one, and the memory of each. It only writes the points; `benches/scaling/slopes.py` determines the slopes.
//!
//! `cargo bench -p llm-datadist-core --bench scale [-- --json FILE --quick
//! --only keys,caches,asked,links,blocks,cores,fan,storm,memory]`
//!
//! With `--json` the groups that ran replace those in FILE, so a long run can be done in parts. Other
//! processes run this program too. `copy` and `transfer` compare with other code and with the limit of the
//! machine.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark stops at the first surprise"
)]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "counts of a million, sizes of a few GiB"
)]
#![allow(
    unsafe_code,
    missing_docs,
    reason = "a counting allocator, and memory that is filled; nothing here is public"
)]
#![allow(unreachable_pub, reason = "a program, not a library")]

#[path = "scale/blocks.rs"]
mod blocks;
#[path = "scale/cores.rs"]
mod cores;
#[path = "scale/crowd.rs"]
mod crowd;
#[path = "scale/curve.rs"]
mod curve;
#[path = "scale/heap.rs"]
mod heap;
#[path = "scale/links.rs"]
mod links;
#[path = "scale/remote.rs"]
mod remote;
#[path = "scale/setup.rs"]
mod setup;
#[path = "scale/table.rs"]
mod table;

use curve::Report;

#[global_allocator]
static ALLOCATOR: heap::Counting = heap::Counting;

/// How much a run does.
pub struct Options {
    only: Vec<String>,
    json: Option<String>,
    /// Runs a hundredth of everything, as a smoke test.
    quick: bool,
}

impl Options {
    /// Returns `1, step, step², …, most`; only up to a tenth of the way with `--quick`.
    fn sizes(&self, step: u64, most: u64) -> Vec<u64> {
        let most = if self.quick { most.min(64) } else { most };
        let mut sizes: Vec<u64> = std::iter::successors(Some(1), |size| Some(size * step))
            .take_while(|&size| size < most)
            .collect();
        sizes.push(most);
        sizes
    }

    fn rounds(&self) -> usize {
        if self.quick { 1 } else { 7 }
    }
}

fn options() -> Options {
    let mut options = Options { only: vec![], json: None, quick: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value after the option");
        match word.as_str() {
            "--only" => options.only = value().split(',').map(str::to_owned).collect(),
            "--json" => options.json = Some(value()),
            "--quick" => options.quick = true,
            _ => {} // what cargo itself passes
        }
    }
    options
}

/// What one word of `--only` runs.
type Part = fn(&Options, &mut Report);

fn main() {
    if std::env::args().nth(1).as_deref() == Some("--remote") {
        return remote::serve();
    }
    let options = options();
    let parts: [(&str, Part); 9] = [
        // Runs first, because threads of the other parts may free memory while it counts.
        ("memory", table::memory),
        ("keys", table::keys),
        ("caches", table::caches),
        ("asked", links::asked),
        ("links", links::links),
        ("blocks", blocks::blocks),
        ("cores", cores::cores),
        ("fan", crowd::fan),
        ("storm", crowd::storm),
    ];
    let mut report = Report::default();
    for (name, part) in parts {
        if options.only.is_empty() || options.only.iter().any(|only| only == name) {
            report.group(name);
            part(&options, &mut report);
        }
    }
    if let Some(path) = &options.json {
        report.write(path, options.quick);
    }
}
