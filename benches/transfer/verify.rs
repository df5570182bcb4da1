//! What verification costs: the same pull without it, with a sample, and with every block, beside hashing the same
//! bytes once with the same crate.
//!
//! The engines hash on their copy workers, both at the same time; the loop hashes on one thread.

use std::hint::black_box;

use llm_datadist_core::bindings::{CallExtras, DataDist, Layers, Name, RemoteName, Rows, Side};
use llm_datadist_core::{ClusterId, Verify};

use crate::Options;
use crate::hand::{Shuffle, median, timed};
use crate::memory::{Blocks, KEY, config};
use crate::prefill::{LIMIT, Prefill};

/// MiB of the pulls.
const SIZES: [u64; 3] = [16, 64, 512];
/// Bytes of a block.
const BLOCK: u64 = 64 << 10;
/// Seed of the shuffled lists.
const SEED: u64 = 0x5EED_0004;

/// Prints a line for each transport and size.
pub fn verify(options: &Options) {
    println!("\nverification: blocks of {} KiB, {} rounds, medians in ms", BLOCK >> 10, options.rounds);
    println!(
        "{:6} {:>5} {:>8} {:>8} {:>8} {:>8} {:>12} {:>10} {:>20}",
        "", "MiB", "off", "sample", "full", "hash", "sample / off", "full / off", "full / (off + 2 hash)"
    );
    for transport in ["shm", "tcp"] {
        for mib in SIZES.into_iter().filter(|&mib| mib <= options.mib) {
            line(options, transport, mib);
        }
    }
}

fn line(options: &Options, transport: &str, mib: u64) {
    let mut prefill = Prefill::start();
    let peer = prefill.open(transport, true, mib + 1, options.streams);
    let mut own = config(1, transport, true, mib + 1, options.streams);
    own.copy_workers = options.workers;
    let engine = DataDist::open(own).unwrap();
    engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
    let rows = (mib << 20) / BLOCK;
    prefill.ask(&format!("blocks pool {rows} {BLOCK}"));
    let target = Blocks::pool(&engine, rows, BLOCK, false);
    let mut shuffle = Shuffle(SEED);
    let (from, to) = (shuffle.order(rows), shuffle.order(rows));
    let remote = RemoteName { cluster: ClusterId(2), name: Name::Key(KEY) };
    let moved = Rows::Blocks { remote: from.clone(), local: to.clone() };
    let pull = |verify| {
        let extras = CallExtras { verify: Some(verify), ..CallExtras::default() };
        engine
            .transfer(Side::Destination, remote, &target.end, (moved.clone(), Layers::ALL), extras)
            .run()
            .unwrap();
    };
    let hash = || {
        for &row in &to {
            // SAFETY: a block of a cache of this process, which nothing writes meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(target.at(row) as *const u8, BLOCK as usize) };
            black_box(twox_hash::XxHash3_64::oneshot_with_seed(1, bytes));
        }
    };
    let ways: [&dyn Fn(); 4] =
        [&|| pull(Verify::Off), &|| pull(Verify::Sample), &|| pull(Verify::Full), &hash];
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..=options.rounds * 3 {
        for step in 0..ways.len() {
            let who = (step + round) % ways.len();
            let took = timed(ways[who]);
            if round > 0 {
                times[who].push(took);
            }
        }
    }
    target.verify(1, &from, &to);
    let [off, sample, full, hash] = [0, 1, 2, 3].map(|who: usize| median(&mut times[who]));
    println!(
        "{transport:6} {mib:5} {:8.2} {:8.2} {:8.2} {:8.2} {:12.3} {:10.2} {:20.2}",
        off * 1e3,
        sample * 1e3,
        full * 1e3,
        hash * 1e3,
        sample / off,
        full / off,
        full / (off + 2.0 * hash),
    );
}
