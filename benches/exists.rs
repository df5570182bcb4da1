//! `exists` of 1,000 keys of a keeper: microseconds a call, beside a `HashSet` with as many keys in this process.
//! The `HashSet` has the default hash function, `SipHash`.
//!
//! `cargo bench -p llm-datadist-keeper --bench exists`. Medians of rounds, in which the two take turns, over keys in random order.
//! The keepers are full: their indexes are as crowded as they get. The index of the small one fits into the cache of a core, and that
//! of the large one does not. Not for: the call from Python (`store.py`).

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]
#![allow(clippy::cast_precision_loss, reason = "microseconds of a call")]
#![allow(missing_docs, reason = "nothing here is public")]

use std::collections::HashSet;
use std::hint::black_box;
use std::time::{Duration, Instant};

use llm_datadist_core::Deadline;
use llm_datadist_core::bindings::keeper::Window;
use llm_datadist_keeper::{Keeper, KeeperOptions, Store, StoreKey, StoreOptions, Stored};

const VALUE: usize = 64;
const KEYS: usize = 1000;
const ROUNDS: usize = 2001;

/// A key of random bytes, as digests have.
fn key(number: u64) -> StoreKey {
    let mut bytes = [0; 28];
    let mut state = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for part in bytes.chunks_mut(4) {
        state ^= state >> 27;
        state = state.wrapping_mul(0x3C79_AC49_2BA7_B653).wrapping_add(number);
        state ^= state >> 33;
        part.copy_from_slice(&state.to_le_bytes()[..4]);
    }
    StoreKey::read(0, &bytes).unwrap()
}

/// Some of the keys from `begin` on, in random order.
fn keys(begin: u64, slots: u64, dice: &mut u64) -> Vec<StoreKey> {
    (0..KEYS)
        .map(|_| {
            *dice ^= *dice << 13;
            *dice ^= *dice >> 7;
            *dice ^= *dice << 17;
            key(begin + *dice % slots)
        })
        .collect()
}

fn micros(call: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    call();
    begin.elapsed().as_nanos() as f64 / 1e3
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Prints the times for a keeper with so many keys.
fn measure(slots: u64) {
    let socket = std::env::temp_dir().join(format!("bench-exists-{}", std::process::id()));
    let options = KeeperOptions {
        memory: slots * VALUE as u64,
        value: VALUE as u64,
        socket: socket.clone(),
        ..KeeperOptions::default()
    };
    let keeper = Keeper::open(&options).unwrap();
    assert_eq!(u64::from(keeper.slots()), slots, "the keeper has another capacity");
    let soon = || Deadline::after(Duration::from_secs(60));
    let options = StoreOptions {
        socket: socket.clone(),
        namespace: "a benchmark".into(),
        value: VALUE as u64,
        ..StoreOptions::default()
    };
    let store = Store::open(options, soon()).unwrap();
    let value = [7; VALUE];
    let mut set = HashSet::new();
    for begin in (0..slots).step_by(4096) {
        let keys: Vec<_> = (begin..begin + 4096).map(key).collect();
        let windows: Vec<_> = keys.iter().map(|_| Window::of_slice(&value)).collect();
        assert!(store.put(&keys, &windows, soon()).unwrap().iter().all(|&stored| stored == Stored::Stored));
        set.extend((begin..begin + 4096).map(key));
    }
    let mut dice = 0x2545_F491_4F6C_DD1D;
    for (label, begin) in [("present", 0), ("absent", slots)] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let asked = keys(begin, slots, &mut dice);
            ours.push(micros(|| {
                let found = black_box(store.exists(&asked).unwrap());
                assert!(found.iter().all(|&found| found == (begin == 0)));
            }));
            let asked = keys(begin, slots, &mut dice);
            theirs.push(micros(|| {
                let found: Vec<bool> = asked.iter().map(|key| set.contains(key)).collect();
                assert!(black_box(found).iter().all(|&found| found == (begin == 0)));
            }));
        }
        let (ours, theirs) = (median(ours), median(theirs));
        println!(
            "{slots:7} keys, {label:8} {ours:7.1}   HashSet {theirs:7.1}   {:.2} of its time",
            ours / theirs
        );
    }
    drop(keeper);
    std::fs::remove_file(socket.with_extension("lock")).unwrap();
}

fn main() {
    println!("exists of {KEYS} keys, microseconds, medians of {ROUNDS} rounds");
    measure(1 << 12);
    measure(1 << 17);
}
