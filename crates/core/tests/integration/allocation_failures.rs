//! Lack of memory: each allocation of a call fails in turn. The call returns the error, and nothing has changed.
//!
//! Only allocations of `MIN_FAILING` bytes and more fail, which are lists. Any other failed allocation would end the process.
//! `protocol` tests how much memory a message may take, `tests/test_out_of_memory.py` limits of the system.

use std::mem;
use std::ops::Range;
use std::time::Duration;

use llm_datadist_core::bindings::{CacheKey, DataDist, End, Geometry, KvGeometry, Layers, Name, Rows, Words};
use llm_datadist_core::testing::model::{AddressLocation, CacheLayout};
use llm_datadist_core::testing::plan::{
    CacheCount, CopyPlan, KvPart, KvSequence, Moves, Piece, Pieces, Side, Span, Template, Templates,
    TensorSteps,
};
use llm_datadist_core::testing::protocol::{
    self, EntryVersion, HEADER, MESSAGE_LIMIT, NamedCache, Reply, Request, Run, WireCache, WireLocation,
    WirePlan,
};
use llm_datadist_core::testing::validate::{self, CheckedTransfer, RemoteCache};
use llm_datadist_core::{
    CacheDesc, CacheId, CacheKind, DataType, Deadline, ErrorKind, KvLayout, Placement, Result, TokenOrder,
};

use crate::counting_allocator;
use crate::fixtures::{
    Own, block_moves, block_plan, desc, kv_layout, listed, local_streams, patterned, pin_reads, pin_writes,
    plan_of_peer, pools, try_adopt,
};

/// The least size of a list of these tests. Allocations of a constant size are smaller.
const MIN_FAILING: usize = 16 << 10;
/// Entries of a list.
const MANY: u64 = 5000;

/// Runs `work` on prepared values repeatedly. Its first allocation fails, then its second, and so on until none fails.
/// `judge` receives each result and whether an allocation failed. Returns the number of allocations.
fn each_judged<P, T>(
    prepare: impl Fn() -> P,
    work: impl Fn(&mut P) -> Result<T>,
    judge: impl Fn(&P, Result<T>, bool),
) -> usize {
    for nth in 0.. {
        let mut prepared = prepare();
        let (result, failed) = counting_allocator::failing(MIN_FAILING, nth, || work(&mut prepared));
        if let (true, Err(error)) = (failed, &result) {
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        }
        assert!(!failed || result.is_err(), "allocation {nth} failed without an error");
        judge(&prepared, result, failed);
        if !failed {
            return nth;
        }
    }
    unreachable!()
}

/// Does the same for a call that succeeds once it has its memory. `after` checks the state after each failure.
fn each_fails<T>(work: impl Fn() -> Result<T>, after: impl Fn()) -> usize {
    let judge = |&(): &(), result: Result<T>, failed: bool| {
        if failed {
            after();
        } else if let Err(error) = result {
            panic!("{error}");
        }
    };
    each_judged(|| (), |()| work(), judge)
}

/// Does the same for a call without side effects that makes at least `least` such allocations.
fn only_fails<T>(what: &str, least: usize, work: impl Fn() -> Result<T>) {
    let failed = each_fails(work, || ());
    assert!(failed >= least, "{what}: {failed} allocations");
}

fn engine() -> DataDist {
    DataDist::open(pools(32 << 20, 12)).unwrap()
}

fn shuffled(k: u64) -> u64 {
    k * 1789 % MANY
}

/// Lists of every shape that is planned in its own way.
fn lists() -> Vec<(&'static str, Vec<(u64, u64)>)> {
    let list = |pair: &dyn Fn(u64) -> (u64, u64)| (0..MANY).map(pair).collect::<Vec<_>>();
    vec![
        ("in order", list(&|k| (k, k + MANY))),
        ("backwards", list(&|k| (MANY - k, k + MANY))),
        ("shuffled", list(&|k| (shuffled(k), MANY + shuffled(k * 7 % MANY)))),
        ("pairs of neighbours", list(&|k| (k / 2 * 6 + k % 2, MANY + shuffled(k / 2 * 2) / 2 * 2 + k % 2))),
        ("far apart", list(&|k| (shuffled(k) << 18, (MANY + k * 7 % MANY) << 18))),
        ("a destination twice", list(&|k| (shuffled(k), MANY + k / 2))),
        ("into one", list(&|k| (shuffled(k), 3))),
        ("a chain", list(&|k| (k, k + 1))),
    ]
}

#[test]
fn planning_fails_whole() {
    for (name, pairs) in lists() {
        let first = Piece { src: 0, dst: 5, len: 16 };
        let pieces = Pieces::rows(first, (16, 32), pairs.iter().copied()).unwrap();
        let (_, dst) = *pairs.last().unwrap();
        let pieces = pieces.with_last(Some(Piece { src: 16 * MANY, dst: 32 * dst + 5, len: 7 }));
        let cut = Moves { pieces, num_tensors: 1, ..Moves::default() };
        let blocks = block_moves(&pairs, 16, 2);
        for (moves, caches) in
            [(&blocks, CacheCount::One), (&blocks, CacheCount::Two), (&cut, CacheCount::Two)]
        {
            let planned = |_: &Moves, plan: Result<_>, failed| assert_eq!(plan.is_err(), failed, "{name}");
            let plan = |moves: &mut Moves| CopyPlan::moves_in_order(moves, caches);
            let failed = each_judged(|| moves.clone(), plan, planned);
            // If one span or pair is left of a list, it needs no other memory than the request.
            assert!(failed > 0 || ["in order", "into one", "a chain"].contains(&name), "{name}");
        }
    }
}

/// A cache of `MANY` blocks of 16 tokens, with these heads of 8.
fn kv_geometry(heads: Range<u32>, order: TokenOrder) -> KvGeometry {
    let (elements, data_type) = (16 * heads.len() * 8, DataType::Float16);
    let desc = CacheDesc { data_type, ..desc(Placement::Device, 4, MANY as usize, elements) };
    let layout = KvLayout { heads, order, ..kv_layout(16, 8, 8, 2) };
    KvGeometry::new(layout, &Geometry::new(&desc).unwrap(), data_type).unwrap()
}

#[test]
fn planning_between_layouts_fails_whole() {
    let src = kv_geometry(0..4, TokenOrder::Nhd);
    let ascending: Vec<u64> = (0..MANY).collect();
    let backwards: Vec<u64> = (0..MANY).rev().collect();
    for (heads, order, tokens) in [
        (0..4, TokenOrder::Nhd, None),
        (2..4, TokenOrder::Nhd, None),
        (2..4, TokenOrder::Hnd, None),
        (2..4, TokenOrder::Nhd, Some(5..16 * MANY)),
    ] {
        let dst = kv_geometry(heads.clone(), order);
        let src = KvSequence { geometry: &src, blocks: &ascending, tokens, words: &Words::ORIGINAL.src };
        let dst =
            KvSequence { geometry: &dst, blocks: &backwards, tokens: None, words: &Words::ORIGINAL.dst };
        let part = KvPart { layers: 0..2, heads };
        only_fails("between layouts", 3, || CopyPlan::between_layouts(&src, &dst, &part));
    }
}

#[test]
fn checking_arguments_fails_whole() {
    let geometry = Geometry::new(&desc(Placement::Device, 2, MANY as usize, 16)).unwrap();
    let layout = CacheLayout { geometry, kind: CacheKind::Blocks, placement: Placement::Device };
    let slots = CacheLayout { kind: CacheKind::Batch, ..layout };
    let remote = RemoteCache { layout, kv: None, row: 0, accessible: true };
    let list: Vec<i64> = (0..MANY).map(|k| shuffled(k) as i64).collect();
    let pairs: Vec<(i64, i64)> = list.iter().copied().zip(0..).collect();
    let checked = |local_side, rows| {
        CheckedTransfer::new(Words::ORIGINAL, local_side, layout, rows, Layers::ALL).unwrap()
    };
    let moves = |checked: &CheckedTransfer, remote: &RemoteCache| {
        checked.moves(remote)?;
        checked.rows().local_rows()
    };
    let blocks = || Rows::Blocks { remote: list.clone(), local: list.clone() };
    let pull = checked(Side::Destination, blocks());
    only_fails("pull", 2, || moves(&pull, &remote));
    let push = checked(Side::Source, blocks());
    only_fails("push", 2, || moves(&push, &remote));
    let one = Geometry::new(&desc(Placement::Device, 2, 1, 16 * MANY as usize)).unwrap();
    let slot = RemoteCache { layout: CacheLayout { geometry: one, ..slots }, ..remote.clone() };
    let cut = checked(Side::Destination, Rows::SlotToBlocks { local: list.clone() });
    only_fails("slot to blocks", 3, || moves(&cut, &slot));
    only_fails("copy", 1, || validate::copy_blocks(layout, &pairs));
    let keys: Vec<_> = (0..MANY).map(|id| Some(CacheKey::Request { model: 0, id })).collect();
    only_fails("keys", 2, || validate::bindings(&keys));
    let numbers: Vec<u64> = (0..MANY).collect();
    only_fails("lists of C++", 3, || validate::cpp::block_lists(&numbers, &[&numbers, &numbers]));
}

fn fetch(plan: WirePlan) -> Request {
    let source = WireLocation::Process { runs: vec![Run { start: 4096, step: 4096, count: 2 }] };
    let cache = NamedCache { name: Name::Key(CacheKey::Blocks { model: 1 }), id: CacheId(3) };
    Request::Fetch { cache, plan, source, num_tensors: 2, tensor_bytes: 1 << 40 }
}

/// Decodes a request as the owner of the cache does. Lack of memory is an error of decoding, or one in the decoded request.
fn served(body: &[u8]) -> Result<(Vec<u64>, Vec<u64>)> {
    let Request::Fetch { plan, .. } = protocol::decode(body)? else { panic!("another request") };
    let plan = CopyPlan::try_from(plan)?;
    Ok((plan.touched_rows(Side::Source, 16)?, plan.touched_rows(Side::Destination, 16)?))
}

#[test]
fn plans_are_sent_and_served_whole() {
    for (name, pairs) in lists() {
        let plan = block_plan(&pairs, 16, 2);
        let written = || protocol::encode(&fetch(WirePlan::try_from(&plan)?));
        let failed = each_fails(written, || ());
        let long = plan.templates()[0].num_spans() > 4000;
        assert!(failed >= 2 || !long, "{name}: {failed} allocations");
        let frame = protocol::encode(&fetch(WirePlan::try_from(&plan).unwrap())).unwrap();
        each_fails(|| served(&frame[HEADER..]), || ());
    }
    // Spans in no order and on no grid: each way in which a plan is checked.
    let span = |k: u64| Span {
        src: k,
        dst: shuffled(k) * 6 + shuffled(k) % 2,
        len: 1 + k % 3,
        count: 1,
        src_step: 0,
        dst_step: 0,
    };
    let comb = |k: u64| Span { dst: k / 2 * 64 + k % 2 * 8, count: 2, len: 8, dst_step: 16, ..span(k) };
    for (name, spans) in [
        ("scattered", (0..MANY).map(span).collect::<Vec<_>>()),
        ("far apart", (0..MANY).map(|k| Span { dst: span(k).dst << 20, ..span(k) }).collect()),
        ("combs", (0..MANY).map(comb).collect()),
    ] {
        let plan = plan_of_peer(2, 0, 0, spans).unwrap();
        let frame = protocol::encode(&fetch(WirePlan::try_from(&plan).unwrap())).unwrap();
        only_fails(name, 3, || served(&frame[HEADER..]));
    }
    let pairs: Vec<(u32, u32)> = (0..MANY).map(|k| (k as u32, (shuffled(k) as u32) << 18)).collect();
    let single = Span { len: 1, dst: 0, ..span(0) };
    let blocks = || listed(vec![Template::new((1, 1), pairs.clone(), vec![single])]);
    let first = TensorSteps::consecutive(0);
    let far_apart = |blocks: &mut Templates| CopyPlan::from_templates(1, first, first, mem::take(blocks));
    assert!(each_judged(blocks, far_apart, |_, plan, failed| assert_eq!(plan.is_err(), failed)) > 0);
}

#[test]
fn other_lists_of_messages_fail_whole() {
    let numbers: Vec<u64> = (0..MANY).map(|k| k * k * k).collect();
    let runs = Run::pack(&numbers).unwrap();
    assert!(runs.len() > 2000);
    only_fails("pack", 2, || Run::pack(&numbers));
    only_fails("unpack", 1, || Run::unpack(&runs, numbers.len() as u32));
    let reads = |frame: &[u8], what: &str| {
        only_fails(what, 1, || protocol::decode::<Reply>(&frame[HEADER..]));
        let reply = protocol::decode::<Reply>(&frame[HEADER..]).unwrap();
        only_fails(what, 1, || protocol::encode(&reply));
    };
    let geometry = Geometry::new(&desc(Placement::Host, 2, 4, 16)).unwrap();
    let layout = CacheLayout { geometry, kind: CacheKind::Batch, placement: Placement::Host };
    let mut record = WireCache::new(EntryVersion { index: 1, generation: 2 }, CacheId(3), 0, layout);
    record.location = WireLocation::Process { runs };
    reads(&protocol::encode(&Reply::Described(record)).unwrap(), "runs");
    let spot = AddressLocation { cache: CacheId(1), tensor: 2, offset: 1 << 40 };
    reads(&protocol::encode(&Reply::Located(vec![spot; MANY as usize])).unwrap(), "spots");
    let arrived = (0..MANY).map(|k| (3, 2 * k, 2 * k + 1)).collect();
    let failed = Reply::Failed { kind: 1, message: "no".into(), arrived };
    reads(&protocol::encode(&failed).unwrap(), "arrived");
    let locate = protocol::encode(&Request::Locate { addrs: numbers }).unwrap();
    only_fails("addresses", 1, || protocol::decode::<Request>(&locate[HEADER..]));
}

/// Without memory for the list of rows, a failure keeps its kind and its text, and no row counts as arrived.
#[test]
fn failures_without_memory_lose_only_their_rows() {
    // The tensors alternate, so each range has a list of its own.
    let arrived: Vec<_> = (0..MANY).map(|k| (k as u32 % 2, 2 * k, 2 * k + 1)).collect();
    let whole = Reply::error(1, "no", &arrived);
    assert_eq!(whole.arrived().len(), MANY as usize);
    let each = |work: &dyn Fn() -> usize| {
        for nth in 0.. {
            let (rows, failed) = counting_allocator::failing(MIN_FAILING, nth, work);
            assert_eq!(rows, if failed { 0 } else { MANY as usize });
            if !failed {
                return nth;
            }
        }
        unreachable!()
    };
    let received = each(&|| {
        let error = Reply::error(1, "no", &arrived);
        assert_eq!((error.kind(), error.to_string()), (whole.kind(), whole.to_string()));
        error.arrived().len()
    });
    let sent = each(&|| {
        let Reply::Failed { kind, message, arrived } = Reply::failed(&whole) else { panic!() };
        assert_eq!((kind, &*message), (1, "no"));
        arrived.len()
    });
    assert!(received > 1 && sent > 1, "{received} and {sent} allocations");
}

/// After a failure to allocate or register with many keys and tensors, the pool, the table and every key are unchanged.
#[test]
fn caches_are_entered_whole_or_not_at_all() {
    /// Enough keys that each shard of the table allocates a list of its own.
    const KEYS: u64 = 40_000;
    let key = |id: u64| CacheKey::Request { model: 7, id };
    let keys: Vec<_> = (0..KEYS).map(|id| Some(key(id))).collect();
    let state = |engine: &DataDist| {
        let snapshot = engine.stats();
        (snapshot.table, snapshot.device_pool.unwrap().pool.used_bytes)
    };
    let batch = desc(Placement::Device, 1, KEYS as usize, 16);
    // Reserved room is kept, so each allocation fails in an engine of its own.
    let made = each_judged(
        || {
            let engine = engine();
            (state(&engine), engine)
        },
        |(_, engine)| engine.allocate(&batch, CacheKind::Batch, &keys),
        |(before, engine), made, failed| {
            assert_eq!(made.is_err(), failed);
            assert!(!failed || (state(engine) == *before && engine.find_key(key(KEYS / 2)).is_err()));
        },
    );
    assert!(made > 64, "{made}");
    let engine = engine();
    let state = || state(&engine);
    // A registered cache takes over the keys of another cache, which keeps them until the call succeeds.
    let host = desc(Placement::Host, 1, KEYS as usize, 16);
    let memory = Own::loose(&host, CacheKind::Batch);
    let enter = || {
        let adopted = try_adopt(&host, CacheKind::Batch, memory.cache.addrs())?;
        engine.register(adopted, &keys, None).map(|cache| cache.id())
    };
    let first = enter().unwrap();
    let before = state();
    let holder = |id| engine.find_key(key(id)).unwrap().0.id();
    let made = each_fails(enter, || {
        assert_eq!(state(), before);
        assert!((0..KEYS).all(|id| holder(id) == first));
    });
    let newest = holder(0);
    assert!(made >= 3 && newest != first && (0..KEYS).all(|id| holder(id) == newest), "{made}");
    // Many tensors: the lists of their addresses.
    let tensors = desc(Placement::Device, MANY as u32, 1, 16);
    let before = state();
    for contiguous in [false, true] {
        let made = each_fails(
            || {
                let cache = if contiguous {
                    engine.allocate_named("many", &tensors, true)?
                } else {
                    engine.allocate(&tensors, CacheKind::Blocks, &[])?
                };
                engine.deallocate(cache.id())
            },
            || assert_eq!(state(), before),
        );
        assert!((made >= 1) && state() == before, "{made}");
    }
    assert_eq!(engine.find(newest).unwrap().addrs(), memory.cache.addrs());
}

#[test]
fn a_call_that_gets_no_memory_moves_nothing() {
    let engine = engine();
    let rows = 2 * MANY as usize;
    let (device, host) = (Placement::Device, Placement::Host);
    let own = Own::loose(&desc(device, 2, rows, 16), CacheKind::Blocks);
    let other = Own::loose(&desc(host, 2, rows, 16), CacheKind::Blocks);
    let (content, content_of_other) = (patterned(1, 2, rows * 16), patterned(2, 2, rows * 16));
    let ends = [End::Loose(own.cache.clone()), End::Loose(other.cache.clone())];
    let pairs: Vec<(i64, i64)> =
        (0..MANY).map(|k| (shuffled(k) as i64, (MANY + shuffled(7 * k % MANY)) as i64)).collect();
    let bytes = || -> u64 { engine.stats().ops.iter().map(|(_, op)| op.bytes).sum() };
    let moved = |from: &[Vec<u8>], to: &[Vec<u8>]| {
        let mut to = to.to_vec();
        for (from, to) in from.iter().zip(&mut to) {
            for &(src, dst) in &pairs {
                let (src, dst) = (src as usize * 16, dst as usize * 16);
                to[dst..dst + 16].copy_from_slice(&from[src..src + 16]);
            }
        }
        to
    };
    let copied = (moved(&content, &content), content_of_other.clone());
    let swapped = (content.clone(), moved(&content, &content_of_other));
    // Failed calls leave no pins behind: the same rows are pinned again in the next round.
    for (swaps, expected) in [(false, copied), (true, swapped)] {
        own.write(&content);
        other.write(&content_of_other);
        let before = bytes();
        let call = || {
            if swaps {
                engine.swap_blocks(&ends[0], &ends[1], &pairs).run()
            } else {
                engine.copy_blocks(&ends[0], &pairs).run()
            }
        };
        let failed = each_fails(call, || {
            assert!(own.read() == content && other.read() == content_of_other);
            assert_eq!(bytes(), before);
        });
        assert!(failed >= 5 && (own.read(), other.read()) == expected, "{failed}");
    }
}

/// A frame without memory for its body is discarded, whichever allocation fails. The stream remains usable.
#[test]
fn a_frame_that_gets_no_memory_is_read_away() {
    let soon = || Deadline::after(Duration::from_secs(20));
    let (local, remote) = local_streams("short");
    let large = protocol::encode(&Request::Locate { addrs: vec![1 << 40; 200_000] }).unwrap();
    let small = protocol::encode(&Request::Ping).unwrap();
    let hear = || remote.receive(MESSAGE_LIMIT, Duration::ZERO, soon());
    let mut failures = 0;
    for nth in 0.. {
        let failed = std::thread::scope(|scope| {
            scope.spawn(|| {
                local.send(&large, soon()).unwrap();
                local.send(&small, soon()).unwrap();
            });
            let (heard, failed) = counting_allocator::failing(MIN_FAILING, nth, hear);
            match heard {
                Err(error) => assert_eq!((error.kind(), failed), (ErrorKind::OutOfMemory, true), "{error}"),
                Ok(frame) => assert!(!failed && frame.unwrap().1 == large[HEADER..]),
            }
            assert_eq!(hear().unwrap().unwrap().1, small[HEADER..]);
            failed
        });
        if !failed {
            break;
        }
        failures += 1;
    }
    assert!(failures > 3, "{failures}");
    // After a short frame, bytes of a cache may follow that no call expects, so the stream ends.
    let short = protocol::encode(&Request::Locate { addrs: vec![1 << 40; 4000] }).unwrap();
    local.send(&short, soon()).unwrap();
    let (heard, failed) = counting_allocator::failing(MIN_FAILING, 0, hear);
    assert_eq!((heard.unwrap_err().kind(), failed), (ErrorKind::OutOfMemory, true));
    assert!(remote.is_closed());
}

/// Pins as well: the counters of a cache, and the rows that a waiting call will use.
#[test]
fn pins_fail_whole() {
    let rows = 2 * MANY;
    let own = Own::loose(&desc(Placement::Host, 1, rows as usize, 1), CacheKind::Blocks);
    let all = || (0..rows).collect::<Vec<u64>>();
    let late = || Deadline::after(Duration::ZERO);
    only_fails("numbers", 1, || pin_reads(&own.cache, vec![0], late()));
    let held = pin_writes(&own.cache, vec![5], late()).unwrap();
    let soon = || Deadline::after(Duration::from_millis(5));
    let pinned = each_judged(
        all,
        |list| pin_writes(&own.cache, std::mem::take(list), soon()),
        |_, pin, failed| {
            let kind = if failed { ErrorKind::OutOfMemory } else { ErrorKind::Timeout };
            assert_eq!(pin.unwrap_err().kind(), kind);
        },
    );
    assert!(pinned > 0);
    drop(held);
    pin_writes(&own.cache, all(), late()).unwrap();
}
