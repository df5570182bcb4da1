//! The engine of Rust programs: wrong arguments, which it refuses itself, and its end. The example of the crate moves bytes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use llm_datadist_core::{
    BlockRows, CacheForm, CacheKind, ClusterId, DataType, Engine, Error, ErrorKind, KvLayout, PairExtras,
    Placement, Result, RowsPart, WhileRefused,
};

use crate::fixtures::{adopt, kv_layout};

fn open() -> Engine {
    Engine::builder().pool(1 << 20).option("page", "4KiB").open().unwrap()
}

fn plain(tensors: u64, blocks: u64, shape: &[i64], tensors_per_layer: Option<u32>) -> Result<CacheForm> {
    CacheForm::plain(tensors, blocks, shape, DataType::Uint8, Placement::Device, tensors_per_layer)
}

/// Checks that a call is refused, by its argument and text.
#[track_caller]
fn refused<T>(result: Result<T>, argument: &str, fact: &str) {
    let error = result.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.argument_name(), Some(argument), "{error}");
    assert!(error.to_string().contains(fact), "{error}");
}

#[test]
fn builder_checks_every_option() {
    refused(Engine::builder().pool(1).open(), "pool", "page");
    refused(Engine::builder().listen("here").open(), "listen", "here");
    refused(Engine::builder().name("").open(), "name", "1 to 128");
    refused(Engine::builder().option("timeout", Duration::ZERO).open(), "timeout", "seconds");
    refused(Engine::builder().option("accept_remote", 1_u64).open(), "accept_remote", "true or false");
    refused(Engine::builder().metadata(vec![0_u8; 16_385]).open(), "metadata", "16385");
    let unknown = Engine::builder().option("pol", 1_u64).open().err().unwrap();
    assert!(unknown.to_string().contains("did you mean \"pool\"?"), "{unknown}");
    let (one, two) = (open(), open());
    assert!(one.name() != two.name() && **one.name() != **two.name());
    let named = || Engine::builder().name("same").open().unwrap();
    let (one, two) = (named(), named());
    assert!(one.name() != two.name() && **one.name() == **two.name());
}

#[test]
fn forms_are_checked_before_they_reach_an_engine() {
    refused(plain(0, 8, &[64], None), "tensors", "1 to");
    refused(plain((1 << 24) + 1, 8, &[64], None), "tensors", "16777216");
    refused(plain(2, 0, &[64], None), "blocks", "1 to 4294967295");
    refused(plain(2, 1 << 32, &[64], None), "blocks", "1 to 4294967295");
    refused(plain(2, 8, &[64, 0], None), "shape", "shape[1]=0");
    refused(plain(2, 8, &[1; 31], None), "shape", "at most 30");
    refused(plain(2, 8, &[64], Some(0)), "tensors_per_layer", "a divisor of 2");
    refused(plain(2, 8, &[64], None).unwrap().with_stride(63), "stride", "at least 64");
    let one_element = plain(2, 8, &[], None).unwrap();
    assert_eq!(one_element.row_bytes(), 1);
    refused(one_element.check_addresses(&[u64::MAX]), "tensors", "below 2^64");
    let layout = kv_layout(4, 2, 8, 1);
    let laid_out =
        |layout: &KvLayout, blocks| CacheForm::laid_out(layout, DataType::Uint8, blocks, Placement::Device);
    refused(laid_out(&KvLayout { heads: 1..1, ..layout.clone() }, 8), "heads", "at least one head");
    refused(laid_out(&layout, 0), "blocks", "1 to 4294967295");
}

#[test]
fn registered_memory_is_what_the_form_describes() {
    let (engine, form) = (open(), plain(1, 8, &[64], None).unwrap());
    // No call reads or writes it.
    let memory = |kind| adopt(form.desc(), kind, &[1 << 20]);
    let other = plain(1, 16, &[64], None).unwrap();
    refused(engine.register("kv", &other, memory(CacheKind::Blocks), false), "form", "CacheForm::desc");
    refused(engine.register("kv", &form, memory(CacheKind::Batch), false), "form", "CacheKind::Blocks");
    let mut contiguous = form.clone();
    contiguous.contiguous = true;
    refused(engine.register("kv", &contiguous, memory(CacheKind::Blocks), false), "form", "contiguous");
    engine.register("kv", &form, memory(CacheKind::Blocks), false).unwrap();
}

#[test]
fn ranges_of_rows_are_checked() {
    let engine = open();
    let kv = engine.allocate("kv", &plain(2, 8, &[64], None).unwrap()).unwrap();
    let narrowed = |part: RowsPart| kv.rows([1, 2]).with_part(part);
    #[allow(clippy::reversed_empty_ranges, reason = "the argument of the test")]
    for (range, fact) in [(3..3, "3..3"), (5..4, "5..4"), (0..u64::MAX, "at most")] {
        let none = RowsPart::default();
        refused(narrowed(RowsPart { layers: Some(range.clone()), ..none.clone() }), "layers", fact);
        refused(narrowed(RowsPart { tokens: Some(range.clone()), ..none.clone() }), "tokens", fact);
        refused(narrowed(RowsPart { bytes: Some(range), ..none }), "bytes", fact);
    }
    let both = RowsPart { tokens: Some(0..1), bytes: Some(0..1), layers: None };
    refused(narrowed(both), "bytes", "left out beside tokens");
    let shown = narrowed(RowsPart { layers: Some(0..1), ..RowsPart::default() }).unwrap().to_string();
    assert_eq!(shown, "<Rows of 'kv': blocks [1, 2], layers 0 to 0>");
}

#[test]
fn calls_refuse_rows_of_other_engines_and_narrowed_loans() {
    let (one, two) = (open(), open());
    let form = plain(2, 8, &[64], None).unwrap();
    let (ours, theirs) = (one.allocate("kv", &form).unwrap(), two.allocate("kv", &form).unwrap());
    let none = PairExtras::default;
    refused(one.copy(&[(&ours.rows([0]), &theirs.rows([1]))], none()), "src", "rows of engine");
    refused(one.pull(&[(&ours.rows([0]), &ours.rows([1]))], none()), "src", "a cache of a peer");
    let lend = |rows: &BlockRows, ttl| one.lend(rows, ttl, 1);
    refused(lend(&ours.rows([0]), Duration::ZERO), "ttl", "above 0");
    refused(lend(&ours.rows([0]), Duration::MAX), "ttl", "4294967");
    refused(lend(&theirs.rows([0]), Duration::from_secs(1)), "rows", "rows of engine");
    let part = RowsPart { layers: Some(0..1), ..RowsPart::default() };
    refused(lend(&ours.rows([0]).with_part(part).unwrap(), Duration::from_secs(1)), "rows", "whole blocks");
    refused(one.link("127.0.0.1:0", None, None, WhileRefused::Retry), "address", "port");
}

#[test]
fn grants_and_messages_are_refused_where_they_would_have_no_effect() {
    let engine = open();
    let kv = engine.allocate("kv", &plain(2, 8, &[64], None).unwrap()).unwrap();
    let peer = engine.peer_cache(ClusterId(7), "kv").unwrap();
    let (own, other) = (kv.rows([0]), peer.rows([1]));
    let (own, other) = (&own, &other);
    let grants = |count| PairExtras { grants: vec![None; count], ..PairExtras::default() };
    refused(engine.pull(&[(own, other), (own, other)], grants(1)), "grants", "0 or 2, one for each pair");
    refused(engine.pull(&[(own, other)], grants(2)), "grants", "len(grants)=2");
    refused(engine.push_layers(&[(other, own)], grants(1)), "grants", "only a pull");
    refused(engine.copy(&[(own, own)], grants(1)), "grants", "only a pull");
    let notify = PairExtras { notify: Some(vec![0; 3]), ..PairExtras::default() };
    refused(engine.copy(&[(own, own)], notify), "notify", "len(notify)=3");
}

#[test]
fn closed_engine_refuses_calls_and_frees_its_memory() {
    let engine = open();
    let kv = engine.allocate("kv", &plain(2, 8, &[64], None).unwrap()).unwrap();
    let copy = engine.copy(&[(&kv.rows([0]), &kv.rows([1]))], PairExtras::default()).unwrap();
    engine.close(Duration::from_secs(60));
    assert_eq!(copy.outcome().unwrap(), Ok(128), "a close with a limit waits");
    engine.close(Duration::ZERO);
    let closed = |error: Error| assert_eq!(error.kind(), ErrorKind::Closed);
    closed(engine.address().unwrap_err());
    closed(engine.events(1).unwrap_err());
    closed(engine.tensors(&kv).unwrap_err());
    closed(engine.free(&kv).unwrap_err());
    closed(engine.stats().unwrap_err());
}

/// What belongs to memory of the program, and takes a while to drop.
struct Slow {
    drops: mpsc::Sender<()>,
    gone: Arc<AtomicBool>,
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.drops.send(()).unwrap();
        // Time for another close that does not wait.
        thread::sleep(Duration::from_millis(100));
        self.gone.store(true, Ordering::SeqCst);
    }
}

#[test]
fn second_close_returns_when_the_engine_is_gone_too() {
    let (engine, form) = (open(), plain(1, 8, &[64], None).unwrap());
    let (gone, (drops, dropping)) = (Arc::new(AtomicBool::new(false)), mpsc::channel());
    // No call reads or writes it.
    let memory = adopt(form.desc(), CacheKind::Blocks, &[1 << 20]);
    let memory = memory.owned_by(Arc::new(Slow { drops, gone: gone.clone() }));
    engine.register("kv", &form, memory, false).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| engine.close(Duration::ZERO));
        dropping.recv().unwrap();
        engine.close(Duration::ZERO);
        assert!(gone.load(Ordering::SeqCst), "the engine is still closing");
    });
}
