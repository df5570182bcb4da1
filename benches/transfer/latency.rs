//! How long one small pull or push takes.
//!
//! Not for: throughput (`speed`).

use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{CacheKey, DataDist, End, Layers, Name, RemoteName, Rows};
use llm_datadist_core::{CacheKind, ClusterId};

use crate::Options;
use crate::memory::{Blocks, KEY, config, desc};
use crate::prefill::{LIMIT, Prefill};

const LEN: u64 = 16 << 10;
const ROWS: u64 = 1024;

pub fn latency(options: &Options) {
    println!("\none call of 16 KiB, {} calls each, microseconds", options.calls);
    println!("{:52} {:>8} {:>8} {:>8}", "", "p50", "p99", "max");
    for transport in ["shm", "tcp"] {
        one_sided(options, transport);
        released(options, transport);
    }
}

fn linked(transport: &str, one_sided: bool, remote_mib: u64) -> (DataDist, Prefill) {
    let mut prefill = Prefill::start();
    let peer = prefill.open(transport, one_sided, remote_mib, 1);
    let engine = DataDist::open(config(1, transport, one_sided, 32, 1)).unwrap();
    engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
    (engine, prefill)
}

/// If the owner's memory can be read in place, no request is sent to the owner.
fn one_sided(options: &Options, transport: &str) {
    let (engine, mut prefill) = linked(transport, true, 32);
    prefill.ask(&format!("blocks pool {ROWS} {LEN}"));
    let local = Blocks::pool(&engine, ROWS, LEN, false);
    local.fill(2);
    let remote = RemoteName { cluster: ClusterId(2), name: Name::Key(KEY) };
    let row = |call: usize| (call as i64 * 37) % ROWS as i64;
    for (pause, between) in PAUSES {
        show(options, &format!("{transport}, pull, remote-accessible{between}"), pause, |call| {
            let rows = Rows::Blocks { remote: vec![row(call)], local: vec![row(call + 5)] };
            engine.pull(remote, &local.end, rows, Layers::ALL).run().unwrap();
        });
        local.verify(1, &[row(0)], &[row(5)]);
        show(options, &format!("{transport}, push, remote-accessible{between}"), pause, |call| {
            let rows = Rows::Blocks { local: vec![row(call)], remote: vec![row(call)] };
            engine.push(&local.end, remote, rows, Layers::ALL).run().unwrap();
        });
        prefill.ask("fill 1");
    }
}

/// Each call uses a new key and asks the owner to release it.
fn released(options: &Options, transport: &str) {
    let calls = options.calls as u64 + WARM as u64;
    let (engine, mut prefill) = linked(transport, false, ((calls * LEN) >> 20) * 2 + 64);
    let cache = engine.allocate(&desc(1, LEN), CacheKind::Batch, &[]).unwrap();
    let local = End::Managed(cache.id());
    for (pause, between) in PAUSES {
        let first = prefill.number(&format!("requests {calls} {LEN}"));
        show(options, &format!("{transport}, pull, the key is released{between}"), pause, |call| {
            let name = Name::Key(CacheKey::Request { model: 1, id: first + call as u64 });
            let from = RemoteName { cluster: ClusterId(2), name };
            engine.pull(from, &local, Rows::slot(0, -1), Layers::ALL).run().unwrap();
        });
        let name = Name::Key(CacheKey::Request { model: 1, id: first });
        let gone = engine
            .pull(RemoteName { cluster: ClusterId(2), name }, &local, Rows::slot(0, -1), Layers::ALL)
            .run();
        assert!(gone.is_err(), "the key was not released");
    }
}

const PAUSES: [(Duration, &str); 2] =
    [(Duration::ZERO, ""), (Duration::from_millis(1), ", 1 ms between calls")];

/// Number of calls before the timed ones.
const WARM: usize = 100;

fn show(options: &Options, name: &str, pause: Duration, call: impl Fn(usize)) {
    let mut times = Vec::with_capacity(options.calls);
    for number in 0..WARM + options.calls {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let started = Instant::now();
        call(number);
        let took = started.elapsed();
        if number >= WARM {
            times.push(took);
        }
    }
    times.sort_unstable();
    let micros = |at: usize| times[at].as_secs_f64() * 1e6;
    let count = times.len();
    println!(
        "{name:52} {:8.2} {:8.2} {:8.1}",
        micros(count / 2),
        micros(count * 99 / 100),
        micros(count - 1)
    );
}
