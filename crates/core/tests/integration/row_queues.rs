//! The queues of rows against a naive twin, which looks at all calls for each question.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use llm_datadist_core::bindings::Cache;
use llm_datadist_core::testing::cache::{CallRows, Pin, RowUse, WaitingCall};
use llm_datadist_core::{CacheKind, Deadline, Placement};
use proptest::prelude::*;

use crate::fixtures::{adopt, desc};

const ROWS: u64 = 5;

/// What one call does with the rows of one cache.
#[derive(Clone, Debug)]
struct Use {
    cache: usize,
    reads: Vec<u64>,
    writes: Vec<u64>,
}

/// What a call is in the twin.
#[derive(Clone, Debug)]
struct Asked {
    uses: Vec<Use>,
    passes: bool,
}

impl Asked {
    fn conflicts(&self, other: &Asked) -> bool {
        let touches = |used: &Use, row: &u64| used.reads.contains(row) || used.writes.contains(row);
        let meet = |a: &Use, b: &Use| {
            a.cache == b.cache
                && (a.writes.iter().any(|row| touches(b, row)) || b.writes.iter().any(|row| touches(a, row)))
        };
        self.uses.iter().any(|a| other.uses.iter().any(|b| meet(a, b)))
    }
}

enum State {
    Waits { call: WaitingCall, notified: Arc<AtomicBool>, was_ready: bool },
    Holds { _pin: Pin },
}

struct Twin {
    caches: Vec<Arc<Cache>>,
    /// Every call that waits or holds its rows, in the order of their start.
    calls: Vec<(Asked, State)>,
}

#[derive(Clone, Debug)]
enum Step {
    Enter(Asked),
    /// Takes the rows at once or not at all.
    Try(Asked),
    /// Has the n-th waiting call begin, if it may.
    Begin(usize),
    /// Removes the n-th call, whatever it does.
    Drop(usize),
}

impl Twin {
    fn new() -> Self {
        let cache =
            || Cache::loose(adopt(&desc(Placement::Host, 1, ROWS as usize, 1), CacheKind::Blocks, &[4096]));
        let mut caches = vec![cache(), cache()];
        caches.sort_by_key(Arc::as_ptr);
        Twin { caches, calls: Vec::new() }
    }

    fn rows(&self, asked: &Asked) -> CallRows {
        if let [a, b] = &asked.uses[..] {
            // Of two caches, one is read and the other written.
            return CallRows::copy(
                (self.caches[a.cache].clone(), a.reads.clone().into()),
                (self.caches[b.cache].clone(), b.writes.clone().into()),
            );
        }
        let Use { cache, reads, writes } = asked.uses[0].clone();
        CallRows::of(self.caches[cache].clone(), RowUse { reads: reads.into(), writes: writes.into() })
    }

    /// Whether a call at `position` (the end, for a call that only starts) could begin.
    fn may_begin(&self, asked: &Asked, position: usize) -> bool {
        self.calls.iter().enumerate().all(|(index, (other, state))| {
            let before = match state {
                State::Holds { .. } => true,
                // Requests of peers come before other calls, otherwise the earlier call comes first.
                State::Waits { .. } if other.passes == asked.passes => index < position,
                State::Waits { .. } => other.passes,
            };
            index == position || !before || !asked.conflicts(other)
        })
    }

    fn step(&mut self, step: Step) {
        let passed = Deadline::after(Duration::ZERO);
        match step {
            Step::Enter(asked) => {
                let notified = Arc::new(AtomicBool::new(false));
                let tell = notified.clone();
                let on_ready = Arc::new(move || tell.store(true, Ordering::SeqCst));
                let call = self.rows(&asked).enter(asked.passes, Some(on_ready)).unwrap();
                let was_ready = call.is_ready();
                self.calls.push((asked, State::Waits { call, notified, was_ready }));
            }
            Step::Try(asked) => {
                let may = self.may_begin(&asked, self.calls.len());
                match self.rows(&asked).pin_for_peer(passed, || asked.passes) {
                    Ok(pin) => {
                        assert!(may, "{asked:?} must wait");
                        self.calls.push((asked, State::Holds { _pin: pin }));
                    }
                    Err(error) => {
                        assert!(!may && error.fact("row").is_some(), "{asked:?} need not wait: {error}");
                    }
                }
            }
            Step::Begin(number) if !self.calls.is_empty() => {
                let position = number % self.calls.len();
                if !matches!(&self.calls[position].1, State::Waits { call, .. } if call.is_ready()) {
                    return;
                }
                let (asked, State::Waits { call, .. }) = self.calls.remove(position) else { unreachable!() };
                let pin = call.pin(passed).expect("its rows are free");
                self.calls.insert(position, (asked, State::Holds { _pin: pin }));
            }
            Step::Drop(number) if !self.calls.is_empty() => {
                self.calls.remove(number % self.calls.len());
            }
            _ => {}
        }
        self.compare();
    }

    fn compare(&mut self) {
        for position in 0..self.calls.len() {
            let may = self.may_begin(&self.calls[position].0, position);
            let (asked, State::Waits { call, notified, was_ready }) = &mut self.calls[position] else {
                continue;
            };
            assert_eq!(call.is_ready(), may, "{asked:?}");
            if may && !*was_ready {
                assert!(notified.swap(false, Ordering::SeqCst), "{asked:?} was not notified");
            }
            *was_ready = may;
        }
    }
}

fn asked() -> impl Strategy<Value = Asked> {
    let rows = || prop::collection::vec(0..ROWS, 0..4);
    let one = (0..2usize, rows(), rows(), any::<bool>()).prop_map(|(cache, reads, writes, passes)| Asked {
        uses: vec![Use { cache, reads, writes }],
        passes,
    });
    let two = (0..2usize, rows(), rows()).prop_map(|(src, reads, writes)| {
        let used = |cache, reads, writes| Use { cache, reads, writes };
        Asked { uses: vec![used(src, reads, vec![]), used(1 - src, vec![], writes)], passes: false }
    });
    prop_oneof![3 => one, 2 => two]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => asked().prop_map(Step::Enter),
        2 => asked().prop_map(Step::Try),
        3 => any::<usize>().prop_map(Step::Begin),
        4 => any::<usize>().prop_map(Step::Drop),
    ]
}

proptest! {
    #[test]
    fn calls_take_turns_as_the_twin_says(steps in prop::collection::vec(step(), 1..80)) {
        let mut twin = Twin::new();
        for step in steps {
            twin.step(step);
        }
        twin.calls.clear();
        for cache in 0..2 {
            let all = Asked { uses: vec![Use { cache, reads: vec![], writes: (0..ROWS).collect() }], passes: false };
            twin.rows(&all).pin(Deadline::after(Duration::ZERO)).expect("nothing is left");
        }
    }
}
