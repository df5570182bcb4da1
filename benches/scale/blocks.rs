//! One call with many blocks: its time and the memory it needs while it runs.
//!
//! Not for: speed beside the limit of the machine (`copy`, `transfer`).

use llm_datadist_core::Placement;
use llm_datadist_core::bindings::{DataDist, Layers, Rows};

use crate::Options;
use crate::curve::{Curve, Report};
use crate::heap::Count;
use crate::remote::RemoteCache;
use crate::setup::{Blocks, LIMIT, Shuffle, config, nanos, shared};

/// Blocks of the largest call.
const MAX_BLOCKS: u64 = 1 << 16;
/// Minimum number of blocks of a round, so that small calls are repeated.
const LEAST: u64 = 1 << 12;

/// An engine linked with an owner, and blocks on both sides.
struct Bed {
    engine: DataDist,
    remote: RemoteCache,
    /// Twice as many blocks as the largest call, so that one half can be copied into the other.
    local: Blocks,
    host: Blocks,
    bytes: u64,
    most: u64,
}

/// A call to measure: sources and destinations, all below the number of blocks of the largest call.
type Call = fn(&Bed, &[i64], &[i64]);

impl Bed {
    fn new(transport: &str, most: u64, bytes: u64) -> Bed {
        let mut remote = RemoteCache::start();
        let peer = remote.owner(transport, true, most, bytes, 0);
        let mut config = config(1, transport, ((most * bytes) >> 20) * 2 + 2, 12);
        config.host_pool = config.device_pool;
        config.links.listen = None;
        let engine = DataDist::open(config).unwrap();
        engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
        let local = Blocks::new(&engine, most * 2, bytes, Placement::Device, None);
        let host = Blocks::new(&engine, most, bytes, Placement::Host, None);
        local.fill();
        host.poison();
        Bed { engine, remote, local, host, bytes, most }
    }

    fn copy(&self, from: &[i64], to: &[i64]) {
        let beyond = self.most as i64;
        let pairs: Vec<_> = from.iter().copied().zip(to.iter().map(|to| to + beyond)).collect();
        self.engine.copy_blocks(&self.local.end, &pairs).run().unwrap();
    }

    fn swap(&self, from: &[i64], to: &[i64]) {
        let pairs: Vec<_> = from.iter().copied().zip(to.iter().copied()).collect();
        self.engine.swap_blocks(&self.local.end, &self.host.end, &pairs).run().unwrap();
    }

    fn pull(&self, from: &[i64], to: &[i64]) {
        let rows = Rows::Blocks { remote: from.to_vec(), local: to.to_vec() };
        self.engine.pull(shared(), &self.local.end, rows, Layers::ALL).run().unwrap();
    }

    fn push(&self, from: &[i64], to: &[i64]) {
        let rows = Rows::Blocks { local: from.to_vec(), remote: to.to_vec() };
        self.engine.push(&self.local.end, shared(), rows, Layers::ALL).run().unwrap();
    }
}

pub fn blocks(options: &Options, report: &mut Report) {
    let most = *options.sizes(4, MAX_BLOCKS).last().unwrap();
    for bytes in [4096, 64] {
        let bed = Bed::new("shm", most, bytes);
        for (name, call) in [
            ("copy_blocks", Bed::copy as Call),
            ("swap_blocks", Bed::swap),
            ("pull, shm", Bed::pull),
            ("push, shm", Bed::push),
        ] {
            curve(&bed, name, call, options, report);
        }
        drop(bed);
        let bed = Bed::new("tcp", most, bytes);
        curve(&bed, "pull, tcp", Bed::pull, options, report);
        if bytes == 64 {
            held(bed, "tcp", options, report);
            held(Bed::new("shm", most, bytes), "shm", options, report);
        }
    }
}

/// Time of a call; every destination of the last one is verified.
fn curve(bed: &Bed, name: &str, call: Call, options: &Options, report: &mut Report) {
    let name = format!("{name} of blocks of {} bytes", bed.bytes);
    let mut curve =
        Curve::new(name.as_str(), "us", "blocks of the call", "shuffled on both sides, one tensor");
    let mut shuffle = Shuffle(46);
    for size in options.sizes(4, MAX_BLOCKS) {
        let again = (LEAST / size).max(1) as usize;
        let rounds = (0..=options.rounds()).map(|_| {
            let (from, to) = (shuffle.order(bed.most), shuffle.order(bed.most));
            let parts = from.chunks(size as usize).zip(to.chunks(size as usize)).take(again);
            let count = parts.len();
            let took = nanos(|| parts.for_each(|(from, to)| call(bed, from, to)));
            took / 1e3 / count as f64
        });
        // The first warms up.
        let times: Vec<f64> = rounds.skip(1).collect();
        curve.add(size, times);
    }
    if name.starts_with("swap") {
        let (from, to) = (shuffle.order(bed.most), shuffle.order(bed.most));
        bed.local.fill();
        bed.host.poison();
        call(bed, &from, &to);
        bed.host.verify(&from, &to);
    }
    if name.starts_with("pull") {
        let (from, to) = (shuffle.order(bed.most), shuffle.order(bed.most));
        bed.local.poison();
        call(bed, &from, &to);
        bed.local.verify(&from, &to);
        bed.local.fill();
    }
    report.curve(&curve);
}

/// The maximum memory that calls hold in addition to the blocks themselves, on both sides.
fn held(mut bed: Bed, transport: &str, options: &Options, report: &mut Report) {
    const NOTE: &str = "the most bytes on the heap during the call, counted by the allocator";
    let new = |name: String| Curve::new(name, "B", "blocks of the call", NOTE);
    let mut copying = new("memory of a call of copy_blocks".into());
    let mut pulling = new(format!("memory of a pull, {transport}"));
    let mut answering = new(format!("memory of the owner during a pull, {transport}"));
    let mut shuffle = Shuffle(47);
    for size in options.sizes(4, MAX_BLOCKS) {
        let (from, to) = (shuffle.order(bed.most), shuffle.order(bed.most));
        let (from, to) = (&from[..size as usize], &to[..size as usize]);
        for (curve, call) in [(&mut copying, Bed::copy as Call), (&mut pulling, Bed::pull)] {
            // Memory that an engine keeps from its first calls does not belong to this call.
            call(&bed, from, to);
            bed.remote.ask("count");
            let count = Count::start();
            call(&bed, from, to);
            curve.add(size, vec![count.most().max(1) as f64]);
            drop(count);
            let there = bed.remote.number("most");
            if curve.name.starts_with("memory of a pull") {
                answering.add(size, vec![there.max(1) as f64]);
            }
        }
    }
    if transport == "shm" {
        report.curve(&copying);
    }
    report.curve(&pulling);
    // If memory is read in place, the owner does nothing.
    if transport == "tcp" {
        report.curve(&answering);
    }
}
