//! The choice of kernel: learned, steady against single bad samples, and able to change its mind.
//!
//! Times here are made up, so nothing depends on the machine; without streaming stores there is nothing to choose, and
//! the test says so. Not for: whether the kernels copy right (`kernel`).

use std::time::Duration;

use llm_datadist_core::engine::Tuner;
use llm_datadist_core::mem::kernel::Kernel;
use llm_datadist_core::{ErrorKind, KernelChoice};

const TOTAL: u64 = 64 << 20;
const PIECE: u64 = 64 << 10;
const UNIT: u64 = 512 << 10;

/// Runs `units` units in which each kernel takes so many microseconds; how many chose streaming stores.
fn run(tuner: &Tuner, units: usize, plain: u64, streaming: u64) -> usize {
    let mut streamed = 0;
    for _ in 0..units {
        let kernel = tuner.choose(TOTAL, PIECE);
        let took = if kernel == Kernel::PLAIN { plain } else { streaming };
        streamed += usize::from(kernel != Kernel::PLAIN);
        tuner.learn(TOTAL, PIECE, kernel, UNIT, Duration::from_micros(took));
    }
    streamed
}

#[test]
fn the_faster_kernel_wins_and_a_bad_sample_does_not_turn_it() {
    let Some(streaming) = Kernel::streaming() else {
        assert_eq!(Tuner::new(KernelChoice::Streaming).unwrap_err().kind(), ErrorKind::NotEnabled);
        return;
    };
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    run(&tuner, 16, 100, 60);
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

#[test]
fn small_copies_and_forced_ones_are_not_learned() {
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    for _ in 0..100 {
        assert_eq!(tuner.choose(1 << 20, PIECE), Kernel::PLAIN);
    }
    assert!(!tuner.learns(1 << 20) && tuner.learns(TOTAL));
    let plain = Tuner::new(KernelChoice::Plain).unwrap();
    assert_eq!(run(&plain, 100, 100, 1), 0);
    assert_eq!(plain.bytes(), (100 * UNIT, 0));
}

#[test]
fn one_beside_learns_for_itself_and_counts_into_the_same_sums() {
    let tuner = Tuner::new(KernelChoice::Auto).unwrap();
    let beside = tuner.beside();
    if Kernel::streaming().is_some() {
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
