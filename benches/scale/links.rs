//! One engine with many links: the cost of one more link, of a call over one of them, and of idle links; and
//! the cost of requests to an owner that has many keys.
//!
//! Not for: many engines that pull at once (`crowd`).

use std::time::Duration;

use llm_datadist_core::bindings::{DataDist, End, Layers, Name, PeerAddress, RemoteName, Rows};
use llm_datadist_core::{CacheKind, ClusterId, Placement};

use crate::Options;
use crate::curve::{Curve, Report};
use crate::heap::Count;
use crate::remote::{RemoteCache, numbered};
use crate::setup::{
    Blocks, LIMIT, OWNER, SHARED, Shuffle, address, config, desc, descriptors, mappings, nanos, on_cpu,
    status,
};

/// Cluster of the first engine of the herd.
const FIRST: u64 = 100;
/// How long an idle engine is observed: three heartbeats.
const IDLE: Duration = Duration::from_secs(3);

/// An engine that pulls; nobody dials it.
fn engine(transport: &str, one_sided: bool) -> DataDist {
    let mut config = config(1, transport, 2, 12);
    config.links.listen = None;
    config.remote_accessible = one_sided;
    config.copy_workers = Some(1);
    DataDist::open(config).unwrap()
}

pub fn links(options: &Options, report: &mut Report) {
    for transport in ["shm", "tcp"] {
        over(transport, options, report);
    }
}

fn over(transport: &str, options: &Options, report: &mut Report) {
    let new = |what: &str, unit, note| Curve::new(format!("{what}, {transport}"), unit, "links", note);
    let mut making = new("make one more link", "us", "one call of `link_clusters` for one peer");
    let mut calling = new("a pull of 16 KiB over one of them", "us", "a random one; the cache is known");
    let mut idle =
        new("CPU while nothing is asked", "us/s", "of the process with all the links, over three heartbeats");
    let note =
        "bytes on the heap of the process with all the links, each used once, counted by the allocator";
    let mut heap = new("memory of links", "B", note);
    let most = if options.quick { 16 } else { 512 };
    let mut remote = RemoteCache::start();
    let ports = remote.ask(&format!("herd {transport} {FIRST} {most}"));
    let peers: Vec<PeerAddress> = (FIRST..)
        .zip(ports.split_whitespace())
        .map(|(id, port)| address(ClusterId(id), port.parse().unwrap()))
        .collect();
    let engine = engine(transport, true);
    let local = Blocks::new(&engine, 1, 16 << 10, Placement::Device, None);
    let before = [status("Threads:"), descriptors(), mappings()];
    let count = Count::start();
    let (mut shuffle, mut have) = (Shuffle(44), 0);
    let sizes: Vec<u64> = options.sizes(2, most).into_iter().filter(|&size| size <= most).collect();
    for size in sizes {
        let mut made = Vec::new();
        for peer in &peers[have..size as usize] {
            made.push(
                nanos(|| engine.link_clusters(std::slice::from_ref(peer), LIMIT).remove(0).unwrap()) / 1e3,
            );
            pull(&engine, &local, peer.cluster);
        }
        have = size as usize;
        making.add(size, made);
        let called = (0..options.rounds()).map(|_| {
            let asked: Vec<ClusterId> =
                (0..1000).map(|_| peers[(shuffle.next() % size) as usize].cluster).collect();
            nanos(|| asked.iter().for_each(|&cluster| pull(&engine, &local, cluster))) / 1e3 / 1000.0
        });
        calling.add(size, called.collect());
        heap.add(size, vec![count.live().max(1) as f64]);
        if size.trailing_zeros() % 3 == 0 {
            std::thread::sleep(Duration::from_millis(100));
            let used = on_cpu();
            std::thread::sleep(IDLE);
            idle.add(size, vec![(on_cpu() - used) as f64 / 1e3 / IDLE.as_secs_f64()]);
        }
    }
    local.verify(&[0], &[0]);
    let after = [status("Threads:"), descriptors(), mappings()];
    drop(count);
    let names = ["threads of a link", "descriptors of a link", "mappings of a link"];
    for (at, (name, unit)) in names.into_iter().zip(["threads", "descriptors", "mappings"]).enumerate() {
        let each = (after[at] as f64 - before[at] as f64) / most as f64;
        report.figure(
            &format!("{name}, {transport}"),
            each,
            unit,
            "on the side that made it, each used once",
        );
    }
    for curve in [making, calling, idle, heap] {
        report.curve(&curve);
    }
}

fn pull(engine: &DataDist, local: &Blocks, cluster: ClusterId) {
    let from = RemoteName { cluster, name: Name::Key(SHARED) };
    let rows = Rows::Blocks { remote: vec![0], local: vec![0] };
    engine.pull(from, &local.end, rows, Layers::ALL).run().unwrap();
}

/// This process requests keys of an owner in another process.
pub fn asked(options: &Options, report: &mut Report) {
    for transport in ["shm", "tcp"] {
        released(transport, options, report);
    }
    known(options, report);
}

fn pull_key(engine: &DataDist, local: &End, id: u64) {
    let from = RemoteName { cluster: OWNER, name: Name::Key(numbered(id)) };
    engine.pull(from, local, Rows::slot(0, -1), Layers::ALL).run().unwrap();
}

fn slot(engine: &DataDist) -> End {
    End::Managed(engine.allocate(&desc(1, 64, 1, Placement::Device), CacheKind::Batch, &[]).unwrap().id())
}

/// The path of a request from prefill to decode: describe, copy, and release of the key by the owner.
fn released(transport: &str, options: &Options, report: &mut Report) {
    let name = format!("pull by a key never used before, which is released, {transport}");
    let note = "64 bytes: asking, copying, releasing; two round trips";
    let mut curve = Curve::new(name, "us", "keys in the owner's table", note);
    let mut remote = RemoteCache::start();
    let peer = remote.owner(transport, false, 0, 0, 0);
    let engine = engine(transport, false);
    engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
    let local = slot(&engine);
    let mut have = 0;
    for size in options.sizes(8, 1 << 20) {
        remote.ask(&format!("keys {} 16", size - have));
        have = size;
        let rounds = (0..options.rounds()).map(|_| {
            let first = remote.number("keys 200 1");
            nanos(|| (first..first + 200).for_each(|id| pull_key(&engine, &local, id))) / 1e3 / 200.0
        });
        curve.add(size, rounds.collect());
    }
    report.curve(&curve);
}

/// A peer stores descriptions. Another key costs the owner's peers nothing until they request it.
fn known(options: &Options, report: &mut Report) {
    const OF: &str = "keys that the peer has asked for";
    let mut first = Curve::new("first pull of a key, shm", "us", OF, "64 bytes, the owner is asked");
    let mut again = Curve::new("pull of a known key, shm", "us", OF, "64 bytes, nobody is asked");
    let mut remote = RemoteCache::start();
    let peer = remote.owner("shm", true, 0, 0, 0);
    let engine = engine("shm", true);
    engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
    let (local, mut have, mut shuffle) = (slot(&engine), 0, Shuffle(45));
    let mut more = |size: u64| {
        remote.ask(&format!("keys {} 16", size - have));
        let took = nanos(|| (have..size).for_each(|id| pull_key(&engine, &local, id))) / 1e3;
        let each = took / (size - have) as f64;
        have = size;
        each
    };
    let mut random = |size: u64, count: u64| {
        let asked: Vec<u64> = (0..count).map(|_| shuffle.next() % size).collect();
        nanos(|| asked.iter().for_each(|&id| pull_key(&engine, &local, id))) / 1e3 / count as f64
    };
    let requests = || engine.stats().links[0].requests.calls;
    for size in options.sizes(4, 1 << 16) {
        let each = more(size);
        // The very first call also opens a stream.
        if size > 1 {
            first.add(size, vec![each]);
        }
        again.add(size, (0..options.rounds()).map(|_| random(size, 2000)).collect());
    }
    report.curve(&first);
    report.curve(&again);
    if options.quick {
        return;
    }
    let size = 1 << 17;
    more(size);
    let (count, before) = (1 << 16, requests());
    let each = random(size, count);
    let share = (requests() - before) as f64 / count as f64;
    let note = "131,072 keys in use, in random order: more than a link remembers";
    report.figure("pull of a key beyond what a link remembers", each, "us", note);
    report.figure("share of such pulls that ask the owner", share, "", note);
}
