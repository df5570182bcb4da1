//! The choice of the copy kernel: learned for each source and piece size, steady against single bad samples, and able
//! to change. The times are made up, so nothing depends on the machine.

use std::collections::BTreeMap;
use std::time::Duration;

use llm_datadist_core::testing::copy::Source::{self, Buffer, Own, Peer};
use llm_datadist_core::testing::copy::Tuner;
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::{ErrorKind, KernelChoice};

const TOTAL: u64 = 64 << 20;
const PIECE: u64 = 64 << 10;
const UNIT: u64 = 512 << 10;

/// Copies `units` units with the given time of each kernel in microseconds. Returns how many units each kernel got.
fn copy(
    tuner: &Tuner,
    source: Source,
    units: usize,
    piece: u64,
    took: impl Fn(Kernel) -> u64,
) -> BTreeMap<&'static str, usize> {
    let mut chosen = BTreeMap::new();
    for _ in 0..units {
        let kernel = tuner.choose(source, TOTAL, piece);
        tuner.learn(source, TOTAL, piece, kernel, UNIT, Duration::from_micros(took(kernel)));
        *chosen.entry(kernel.name()).or_default() += 1;
    }
    chosen
}

/// The times with which `winner` is the fastest.
fn wins(winner: Kernel) -> impl Fn(Kernel) -> u64 {
    move |kernel| if kernel == winner { 60 } else { 80 }
}

#[test]
fn each_source_and_piece_size_has_a_winner_of_its_own() {
    let kernels = Kernel::all();
    if kernels.len() == 1 {
        return assert_eq!(kernels, [Kernel::PLAIN], "nothing to choose from");
    }
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    let sizes = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
    let cases = [Own, Peer, Buffer].into_iter().flat_map(|source| sizes.map(|piece| (source, piece)));
    let races: Vec<_> = cases.zip(kernels.iter().copied().cycle()).collect();
    for &((source, piece), winner) in &races {
        // Every kernel is tried, and until then none is preferred.
        let first = copy(&tuner, source, 12, piece, wins(winner));
        assert_eq!(first.into_values().collect::<Vec<_>>(), [3; 4]);
        copy(&tuner, source, 40, piece, wins(winner));
    }
    for &((source, piece), winner) in &races {
        let chosen = copy(&tuner, source, 500, piece, wins(winner));
        assert!(chosen[winner.name()] >= 490, "{source:?} {piece} {chosen:?}");
    }
    // Over a long time each of the others is tried again, and one that has become faster is found.
    let ((source, piece), winner) = races[0];
    assert_eq!(copy(&tuner, source, 1000, piece, wins(winner)).len(), 4);
    let faster = kernels[3];
    copy(&tuner, source, 9000, piece, wins(faster));
    let chosen = copy(&tuner, source, 300, piece, wins(faster));
    assert!(chosen[faster.name()] >= 290, "{chosen:?}");
}

#[test]
fn a_few_bad_samples_do_not_change_the_choice() {
    let Some(last) = Kernel::all().iter().copied().rfind(|kernel| kernel.streams()) else {
        return assert_eq!(Tuner::new(KernelChoice::Streaming).unwrap_err().kind(), ErrorKind::NotEnabled);
    };
    let tuner = Tuner::new(KernelChoice::Streaming).unwrap();
    copy(&tuner, Own, 40, PIECE, wins(last));
    // The thread lost its core for a hundred times as long as a unit takes.
    for _ in 0..3 {
        tuner.learn(Own, TOTAL, PIECE, last, UNIT, Duration::from_millis(6));
    }
    let chosen = copy(&tuner, Own, 300, PIECE, wins(last));
    assert!(chosen[last.name()] >= 290, "{chosen:?}");
    assert!(chosen.keys().all(|name| name.starts_with("streaming")), "forced: {chosen:?}");
    // A small copy is not learned from, and is streamed anyway.
    assert!(tuner.choose(Own, 1 << 10, 1 << 10).streams());
    assert_eq!(tuner.bytes(), (0, 343 * UNIT));
}

#[test]
fn small_copies_and_forced_ones_are_not_learned() {
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    for _ in 0..100 {
        let kernel = tuner.choose(Own, 1 << 20, PIECE);
        assert_eq!(kernel, Kernel::all()[..2].last().copied().unwrap());
        assert!(!kernel.streams());
    }
    assert!(!Tuner::learns(1 << 20) && Tuner::learns(TOTAL));
    let plain = Tuner::new(KernelChoice::Plain).unwrap();
    let chosen = copy(&plain, Own, 100, PIECE, |kernel| if kernel.streams() { 1 } else { 100 });
    assert!(chosen.keys().all(|name| name.starts_with("plain")), "{chosen:?}");
    assert_eq!(plain.bytes(), (100 * UNIT, 0));
}
