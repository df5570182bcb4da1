//! The choice of kernel: learned, steady against single bad samples, and able to change its mind.
//!
//! Times here are made up, so nothing depends on the machine; without streaming stores there is nothing to choose, and
//! the test says so. Not for: whether the kernels copy right (`kernel`).

use std::time::Duration;

use llm_datadist_core::testing::copy::Tuner;
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::{ErrorKind, KernelChoice};

const TOTAL: u64 = 64 << 20;
const PIECE: u64 = 64 << 10;
const UNIT: u64 = 512 << 10;

/// The kernel of this CPU that streams and has four pages under way.
fn streaming() -> Option<Kernel> {
    Kernel::all().iter().copied().rfind(|kernel| kernel.streams())
}

/// Runs `units` units in which each kernel takes so many microseconds; how many chose streaming stores.
fn run(tuner: &Tuner, units: usize, plain: u64, streaming: u64) -> usize {
    let mut streamed = 0;
    for _ in 0..units {
        let kernel = tuner.choose(TOTAL, PIECE);
        let took = if kernel.streams() { streaming } else { plain };
        streamed += usize::from(kernel.streams());
        tuner.learn(TOTAL, PIECE, kernel, UNIT, Duration::from_micros(took));
    }
    streamed
}

#[test]
fn the_faster_kernel_wins_and_a_bad_sample_does_not_turn_it() {
    let Some(streaming) = streaming() else {
        assert_eq!(Tuner::new(KernelChoice::Streaming).unwrap_err().kind(), ErrorKind::NotEnabled);
        return;
    };
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    run(&tuner, 32, 100, 60);
    assert!(run(&tuner, 200, 100, 60) >= 195);
    // Somebody took the core away for a hundred times as long as a unit takes.
    for _ in 0..3 {
        tuner.learn(TOTAL, PIECE, streaming, UNIT, Duration::from_millis(6));
    }
    assert!(run(&tuner, 200, 100, 60) >= 195);
    // The machine changed: within a few looks at the other kernel the verdict follows.
    run(&tuner, 4000, 60, 100);
    assert!(run(&tuner, 200, 60, 100) <= 5);
}

/// Units in which each kernel takes its time; how many units each got.
fn race(tuner: &Tuner, units: usize, piece: u64, took: impl Fn(Kernel) -> u64) -> Vec<(&'static str, usize)> {
    let mut chosen = Vec::new();
    for _ in 0..units {
        let kernel = tuner.choose(TOTAL, piece);
        tuner.learn(TOTAL, piece, kernel, UNIT, Duration::from_micros(took(kernel)));
        match chosen.iter_mut().find(|(name, _)| *name == kernel.name()) {
            Some((_, count)) => *count += 1,
            None => chosen.push((kernel.name(), 1)),
        }
    }
    chosen
}

#[test]
fn each_size_of_pieces_has_a_winner_of_its_own() {
    let kernels = Kernel::all();
    if kernels.len() == 1 {
        return assert_eq!(kernels, [Kernel::PLAIN], "nothing to choose from");
    }
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    let sizes = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
    let winners = kernels.iter().copied().cycle();
    let races: Vec<(u64, Kernel)> = sizes.into_iter().zip(winners).collect();
    let time = |winner| move |kernel| if kernel == winner { 60 } else { 80 };
    for &(piece, winner) in &races {
        // Every kernel is tried, and until then none is preferred.
        let first = race(&tuner, 12, piece, time(winner));
        assert_eq!(first.iter().map(|(_, count)| count).collect::<Vec<_>>(), [&3, &3, &3, &3]);
        race(&tuner, 40, piece, time(winner));
    }
    for &(piece, winner) in &races {
        let chosen = race(&tuner, 500, piece, time(winner));
        let won = chosen.iter().find(|(name, _)| *name == winner.name()).unwrap().1;
        assert!(won >= 490, "{piece} {chosen:?}");
    }
    // Over a long time each of the others is tried again.
    let chosen = race(&tuner, 1000, races[0].0, time(races[0].1));
    assert_eq!(chosen.len(), 4, "{chosen:?}");
    // And one that has become faster is found.
    let last = kernels[3];
    race(&tuner, 9000, races[0].0, time(last));
    let chosen = race(&tuner, 300, races[0].0, time(last));
    assert!(chosen.iter().any(|&(name, count)| name == last.name() && count >= 290), "{chosen:?}");
}

#[test]
fn forced_streaming_stores_learn_which_of_them() {
    let Some(last) = streaming() else {
        return assert!(Tuner::new(KernelChoice::Streaming).is_err());
    };
    let tuner = Tuner::new(KernelChoice::Streaming).unwrap();
    race(&tuner, 40, PIECE, |kernel| if kernel == last { 60 } else { 80 });
    let chosen = race(&tuner, 300, PIECE, |kernel| if kernel == last { 60 } else { 80 });
    assert!(chosen.iter().any(|&(name, count)| name == last.name() && count >= 290), "{chosen:?}");
    assert!(chosen.iter().all(|&(name, _)| name.starts_with("streaming")), "{chosen:?}");
    // A small copy learns nothing, and is streamed all the same.
    assert!(tuner.choose(1 << 10, 1 << 10).streams());
    assert_eq!(tuner.bytes(), (0, 340 * UNIT));
}

#[test]
fn small_copies_and_forced_ones_are_not_learned() {
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    for _ in 0..100 {
        let kernel = tuner.choose(1 << 20, PIECE);
        assert_eq!(kernel, Kernel::all()[..2].last().copied().unwrap());
        assert!(!kernel.streams());
    }
    assert!(!Tuner::learns(1 << 20) && Tuner::learns(TOTAL));
    let plain = Tuner::new(KernelChoice::Plain).unwrap();
    assert_eq!(run(&plain, 100, 100, 1), 0);
    assert_eq!(plain.bytes(), (100 * UNIT, 0));
}

#[test]
fn one_beside_learns_for_itself_and_counts_into_the_same_sums() {
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    let beside = tuner.beside();
    if streaming().is_some() {
        // In one memory streaming stores win, in the other they lose.
        run(&tuner, 200, 100, 60);
        run(&beside, 200, 60, 100);
        assert!(run(&tuner, 200, 100, 60) >= 195);
        assert!(run(&beside, 200, 60, 100) <= 5);
    } else {
        run(&tuner, 400, 1, 1);
        run(&beside, 400, 1, 1);
    }
    let (plain, streaming) = tuner.bytes();
    assert_eq!(plain + streaming, 800 * UNIT);
    assert_eq!(beside.bytes(), tuner.bytes());
    let forced = Tuner::new(KernelChoice::Plain).unwrap().beside();
    assert_eq!(run(&forced, 100, 100, 1), 0);
}
