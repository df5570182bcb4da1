//! Compares links, pulls and pushes between two processes with the limit of this machine, in one run. The
//! engine and hand-written loops take turns over the same memory and list of blocks. Prints ratios,
//! latencies, and the cost of a link.
//!
//! `cargo bench -p llm-datadist-core --bench transfer [-- --only pools,registered,tcp,latency,links,many,staged,stages,verify,layouts
//! --mib 512 --rounds 7 --blocks 16,64 --calls 10000 --lists 512,32768 --workers 4 --streams 1 --case 'NHD to HND' --all]`
//!
//! The other process runs this program too. Every round is verified outside the timed part, on a destination
//! that was overwritten before. Absolute figures mean little, because machines differ and are shared.

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
    reason = "sizes of a few GiB"
)]
#![allow(
    clippy::cast_ptr_alignment,
    clippy::multiple_unsafe_ops_per_block,
    reason = "hand-written copy loops"
)]
#![allow(unsafe_code, missing_docs, reason = "the hand-written loops are the point of comparison")]
#![allow(unreachable_pub, reason = "a program, not a library")]

#[path = "hand.rs"]
mod hand;
#[path = "transfer/latency.rs"]
mod latency;
#[path = "transfer/layouts.rs"]
mod layouts;
#[path = "transfer/links.rs"]
mod links;
#[path = "transfer/memory.rs"]
mod memory;
#[path = "transfer/prefill.rs"]
mod prefill;
#[path = "transfer/speed.rs"]
mod speed;
#[path = "transfer/staged.rs"]
mod staged;
#[path = "transfer/stages.rs"]
mod stages;
#[path = "transfer/verify.rs"]
mod verify;

/// What a run measures.
pub struct Options {
    only: Vec<String>,
    mib: u64,
    rounds: usize,
    blocks: Vec<u64>,
    /// Blocks of the calls whose stages are timed.
    lists: Vec<u64>,
    calls: usize,
    workers: Option<usize>,
    streams: usize,
    /// The only case of `layouts`; all if it is empty.
    case: String,
    /// Show every loop, not only the best.
    all: bool,
}

fn options() -> Options {
    let mut options = Options {
        only: vec![],
        mib: 512,
        rounds: 7,
        blocks: vec![16, 64, 256, 1024, 2048],
        lists: vec![1, 64, 512, 4096, 32768],
        calls: 10_000,
        workers: None,
        streams: 1,
        case: String::new(),
        all: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value after the option");
        match word.as_str() {
            "--only" => options.only = value().split(',').map(str::to_owned).collect(),
            "--mib" => options.mib = value().parse().unwrap(),
            "--rounds" => options.rounds = value().parse().unwrap(),
            "--blocks" => options.blocks = value().split(',').map(|kib| kib.parse().unwrap()).collect(),
            "--lists" => options.lists = value().split(',').map(|blocks| blocks.parse().unwrap()).collect(),
            "--calls" => options.calls = value().parse().unwrap(),
            "--workers" => options.workers = Some(value().parse().unwrap()),
            "--case" => options.case = value(),
            "--streams" => options.streams = value().parse().unwrap(),
            "--all" => options.all = true,
            _ => {} // what cargo itself passes
        }
    }
    options
}

/// What one word of `--only` runs.
type Part = fn(&Options);

fn main() {
    if std::env::args().nth(1).as_deref() == Some("--prefill") {
        return prefill::serve();
    }
    let options = options();
    let parts: [(&str, Part); 10] = [
        ("pools", speed::pools),
        ("registered", speed::registered),
        ("tcp", speed::tcp),
        ("latency", latency::latency),
        ("links", links::links),
        ("many", speed::many),
        ("staged", staged::staged),
        ("stages", stages::stages),
        ("verify", verify::verify),
        ("layouts", layouts::layouts),
    ];
    for (name, part) in parts {
        if options.only.is_empty() || options.only.iter().any(|only| only == name) {
            part(&options);
        }
    }
}
