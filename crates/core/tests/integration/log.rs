//! The engine's log, as seen by a Rust program that installs a subscriber of its own.
//!
//! One collector serves the whole binary, because events come from threads of the engine and a process has one global
//! subscriber. Tests run at the same time, so each looks only for lines with ids that no other test uses. Not for: how
//! the bindings pass lines on (`tests/test_engine_log.py`, `tests/test_cpp.py`).

use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use llm_datadist_core::bindings::engine_of_thread;
use llm_datadist_core::bindings::{CacheKey, DataDist};
use llm_datadist_core::{CacheKind, Placement};
use llm_datadist_embed::{Level, Line, Sink, install_log};

use crate::fixtures::{EventLog, Own, config, desc};

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

fn lines() -> MutexGuard<'static, Vec<Line>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Collector;

impl Sink for Collector {
    fn wants(&self, level: Level) -> bool {
        level <= Level::DEBUG
    }

    fn take(&self, line: Line) {
        lines().push(line);
    }
}

/// Collects every line of this process from now on.
pub fn collect() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        assert!(install_log(Collector, engine_of_thread), "no other subscriber in this binary");
    });
}

/// The texts since `collect` that hold all of `words`.
pub fn texts(words: &[&str]) -> Vec<String> {
    texts_up_to(Level::TRACE, words)
}

/// The texts of errors since `collect` that hold all of `words`.
pub fn errors(words: &[&str]) -> Vec<String> {
    texts_up_to(Level::ERROR, words)
}

fn texts_up_to(level: Level, words: &[&str]) -> Vec<String> {
    let matching = |line: &&Line| line.level <= level && words.iter().all(|word| line.text.contains(word));
    lines().iter().filter(matching).map(|line| line.text.clone()).collect()
}

#[test]
fn second_cache_under_the_key_of_a_live_one_is_a_warning_with_both_ids() {
    let engine = Arc::new(DataDist::open(config(1 << 20)).unwrap());
    let asked = engine.clone();
    // Takes the lock of the cache table. If the event were emitted under that lock, this call would never return.
    let log = EventLog::calling("llm_datadist::table", move || assert!(asked.stats().table.caches >= 1));
    let register = |keys: &[Option<CacheKey>]| {
        let shape = desc(Placement::Host, 1, 4, 8);
        Own::new(&shape, CacheKind::Batch, |adopted| engine.register(adopted, keys, Some(true)).unwrap())
    };
    let request = |id| Some(CacheKey::Request { model: 3, id });
    let (first, second, _third) = tracing::subscriber::with_default(log.clone(), || {
        let first = register(&[request(1), request(2)]);
        assert!(log.lines().is_empty(), "nothing is replaced yet");
        (first, register(&[request(2), request(1)]), register(&[request(3)]))
    });
    let lines = log.lines();
    let [(Level::WARN, line)] = lines.as_slice() else { panic!("one event for two keys: {lines:?}") };
    let ids = [("cache_id", &second), ("replaced_cache_id", &first)];
    let facts = ids.map(|(name, own)| format!(" {name}={}", own.cache.id().0));
    assert!(facts.iter().all(|fact| line.contains(fact)), "{line}");
    assert!(line.contains("req_id 2 of model 3 and 1 more keys"), "{line}");
}

#[test]
fn line_has_the_message_then_the_fields_and_no_control_characters() {
    collect();
    let from_a_peer = "a reason\nfrom a peer\u{1b}[2J";
    tracing::error!(target: "llm_datadist::test", peer = 77_001, "refused: {from_a_peer}");
    tracing::trace!(target: "llm_datadist::test", peer = 77_002, "not wanted");
    tracing::warn!(target: "llm_datadist::test", peer = 77_003, "{}", "long ".repeat(10_000));
    // Lines of other tests may have these numbers too, for example in a time.
    let all = lines();
    let of_this = || all.iter().filter(|line| line.target == "llm_datadist::test");
    let line = of_this().find(|line| line.text.contains("77001")).unwrap();
    assert_eq!(line.level, Level::ERROR);
    assert_eq!(line.text, "refused: a reason\\nfrom a peer\\u{1b}[2J, peer=77001");
    assert_eq!(line.file, "log.rs");
    assert!(line.line > 0);
    assert!(!of_this().any(|line| line.text.contains("77002")), "TRACE is not wanted");
    let long = of_this().find(|line| line.text.starts_with("long")).unwrap();
    assert!(long.text.len() < 5000, "{} bytes", long.text.len());
}
