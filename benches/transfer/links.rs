//! The cost of links: making them, keeping them, and what a peer learns.
//!
//! Not for: transfers.

use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{CacheKey, DataDist, End, Layers, Name, RemoteName, Rows};
use llm_datadist_core::{CacheKind, ClusterId};

use crate::Options;
use crate::memory::{config, desc};
use crate::prefill::{LIMIT, Prefill, address};

pub fn links(options: &Options) {
    println!("\nlinks");
    making(options);
    idle();
    knowing();
    five_hundred();
}

/// Links and unlinks repeatedly; also starts an engine until it is linked.
fn making(options: &Options) {
    for transport in ["shm", "tcp"] {
        let mut prefill = Prefill::start();
        let peer = [prefill.open(transport, true, 64, 1)];
        let open = || DataDist::open(config(1, transport, true, 64, 1)).unwrap();
        let engine = open();
        let (mut link, mut start) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds * 10 {
            let started = Instant::now();
            engine.link_clusters(&peer, LIMIT).remove(0).unwrap();
            link.push(started.elapsed());
            engine.unlink_clusters(&peer, LIMIT, false).remove(0).unwrap();
        }
        drop(engine);
        for _ in 0..options.rounds * 10 {
            let started = Instant::now();
            let engine = open();
            engine.link_clusters(&peer, LIMIT).remove(0).unwrap();
            start.push(started.elapsed());
            engine.unlink_clusters(&peer, LIMIT, false).remove(0).unwrap();
        }
        for (name, mut times) in [("link_clusters to a live peer", link), ("engine start to linked", start)] {
            times.sort_unstable();
            let ms = |at: usize| times[at].as_secs_f64() * 1e3;
            let count = times.len();
            println!(
                "{transport:4} {name:32} p50 {:.2} ms, max {:.2} ms of {count}",
                ms(count / 2),
                ms(count - 1)
            );
        }
    }
}

/// Nanoseconds that the threads of this process have been on a CPU.
pub fn on_cpu() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let one = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap_or_default();
        text.split_whitespace().next().map_or(0, |nanos| nanos.parse::<u64>().unwrap())
    };
    tasks.map(one).sum()
}

/// Measures what two linked processes use while no request is sent.
fn idle() {
    for transport in ["shm", "tcp"] {
        let mut prefill = Prefill::start();
        let peer = prefill.open(transport, true, 64, 1);
        let engine = DataDist::open(config(1, transport, true, 64, 1)).unwrap();
        engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let (local, remote) = (on_cpu(), prefill.number("cpu"));
        std::thread::sleep(Duration::from_secs(5));
        let (local, remote) = (on_cpu() - local, prefill.number("cpu") - remote);
        println!(
            "{transport:4} idle over 5 s: {:.4} s of CPU here, {:.4} s there (most of it the question)",
            local as f64 / 1e9,
            remote as f64 / 1e9
        );
    }
}

/// Measures what a peer learns about caches and keys that it does not use, and about one that it uses.
fn knowing() {
    let mut prefill = Prefill::start();
    let peer = prefill.open("shm", true, 256, 1);
    let engine = DataDist::open(config(1, "shm", true, 1, 1)).unwrap();
    let alone: Vec<u64> = (0..101).map(|id| prefill.number(&format!("more {id}"))).collect();
    engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
    let requests = || engine.stats().links[0].requests.calls;
    let linked: Vec<u64> = (101..202).map(|id| prefill.number(&format!("more {id}"))).collect();
    prefill.ask("keys 10000 10");
    let crowded: Vec<u64> = (202..303).map(|id| prefill.number(&format!("more {id}"))).collect();
    let middle = |mut nanos: Vec<u64>| {
        nanos.sort_unstable();
        nanos[nanos.len() / 2]
    };
    println!(
        "one more cache with a key, ns at its owner: {} unlinked, {} linked, {} with 10,000 caches and 100,000 keys before it",
        middle(alone),
        middle(linked),
        middle(crowded)
    );
    println!("  requests of the peer meanwhile: {}, answered there: {}", requests(), prefill.ask("served"));
    let cache = engine.allocate(&desc(1, 64), CacheKind::Batch, &[]).unwrap();
    let pull = |key: CacheKey| {
        let started = Instant::now();
        let from = RemoteName { cluster: ClusterId(2), name: Name::Key(key) };
        let rows = Rows::slot(0, -1);
        engine.pull(from, &End::Managed(cache.id()), rows, Layers::ALL).run().unwrap();
        started.elapsed().as_nanos() as u64
    };
    let first: Vec<u64> = (0..1000).map(|id| pull(CacheKey::Request { model: 2, id: id * 97 })).collect();
    let asked = requests();
    let again: Vec<u64> = (0..1000).map(|id| pull(CacheKey::Request { model: 2, id: id * 97 })).collect();
    println!(
        "  1,000 pulls of keys never used before: {asked} requests, {} ns each; once more: {} requests, {} ns each",
        middle(first),
        requests() - asked,
        middle(again)
    );
}

/// One engine linked with 512 others.
fn five_hundred() {
    const COUNT: u64 = 512;
    let mut prefill = Prefill::start();
    let engine = DataDist::open(config(1, "shm", true, 1, 1)).unwrap();
    let ports = prefill.ask(&format!("engines 100 {COUNT}"));
    let peers: Vec<_> =
        (100..).zip(ports.split_whitespace()).map(|(id, port)| address(id, port.parse().unwrap())).collect();
    let (before, threads) = (status("VmRSS:"), status("Threads:"));
    let started = Instant::now();
    for linked in engine.link_clusters(&peers, LIMIT) {
        linked.unwrap();
    }
    let took = started.elapsed();
    let after = status("VmRSS:");
    println!(
        "{COUNT} links in one call: {:.0} ms; {} KiB of memory here, {:.1} KiB a link; {} threads more, {} in all",
        took.as_secs_f64() * 1e3,
        after - before,
        (after - before) as f64 / COUNT as f64,
        status("Threads:") - threads,
        status("Threads:"),
    );
    std::thread::sleep(Duration::from_millis(200));
    let used = on_cpu();
    std::thread::sleep(Duration::from_secs(5));
    println!("  idle over 5 s: {:.4} s of CPU here", (on_cpu() - used) as f64 / 1e9);
    let started = Instant::now();
    for unlinked in engine.unlink_clusters(&peers, LIMIT, false) {
        unlinked.unwrap();
    }
    println!("  unlinked in {:.0} ms", started.elapsed().as_secs_f64() * 1e3);
}

/// A number of `/proc/self/status`.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
