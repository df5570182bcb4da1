//! Verified pulls and pushes: every bit that changes between the source and the destination is found, nothing is
//! released then, and a cache that changes meanwhile is handled as during the move.

use std::io::Write;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{CallExtras, Layers, Name, Outcome, RemoteName, Rows, Side, Target};
use llm_datadist_core::testing::checksums::Checksums;
use llm_datadist_core::testing::protocol::{Reply, Request, digest};
use llm_datadist_core::{CacheId, CacheKind, Deadline, Error, ErrorKind, Event, Placement, Result, Verify};

use crate::fixtures::Chance;
use crate::moved::{after_the_move, flip};

use super::asynchronous::outcome;
use super::fake_peer::{Fake, describe, described, hear_request, say};
use super::layerwise::{SLOTS, is_done, start, to, wait};
use super::{
    Held, LONG, Memory, Pair, WAYS, Way, block_rows, bytes_by, config, device, fails_with, member, of, open,
    pairs, pulling, pushing, request, row, times, under, verified,
};

fn pulled(pair: &Pair, from: RemoteName, into: &Held, rows: &Rows, verify: Verify) -> Result<(), Error> {
    pulling(&pair.local, from, into, rows.clone(), verified(verify)).run()
}

/// Makes a call that moves bytes into `near`, and runs `change` on another thread between the move and the comparison.
fn changed_meanwhile<T>(near: &Held, change: impl FnOnce() + Send, call: impl FnOnce() -> T) -> T {
    let (moved, was_moved) = mpsc::channel();
    let (changed, was_changed) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            was_moved.recv().unwrap();
            change();
            changed.send(()).unwrap();
        });
        after_the_move(&near.cache, move |_| {
            moved.send(()).unwrap();
            was_changed.recv().unwrap();
        });
        call()
    })
}

fn all() -> impl Iterator<Item = (Way, Memory)> {
    let memory = |registered| Memory { registered, placement: Placement::Device };
    WAYS.into_iter()
        .flat_map(move |way| [false, true].map(|registered| (way, memory(registered))))
        .inspect(|what| eprintln!("{what:?}"))
}

const TENSORS: u32 = 3;
const ROWS: usize = 70;
const ROW: usize = 1000;

#[test]
fn every_flipped_bit_fails_a_full_pull_and_names_its_block() {
    let mut chance = Chance(1);
    for (way, memory) in all() {
        let pair = Pair::new(way);
        let [near, far] = [&pair.local, &pair.remote]
            .map(|engine| memory.held(engine, (TENSORS, ROWS, ROW), CacheKind::Blocks, &[]));
        let bytes = far.fill(2);
        let from = of(2, row(&far, 0));
        let numbers: Vec<i64> = (0..ROWS as i64).collect();
        let backwards: Vec<i64> = numbers.iter().rev().copied().collect();
        let moved = block_rows(&numbers, &backwards);
        for _ in 0..times(20) {
            let (tensor, bit) =
                (chance.below(TENSORS.into()) as usize, chance.below((ROWS * ROW * 8) as u64));
            after_the_move(&near.cache, move |cache| flip(cache, tensor, bit));
            let error = fails_with(pulled(&pair, from, &near, &moved, Verify::Full), ErrorKind::VerifyFailed);
            let block = (bit / 8 / ROW as u64).to_string();
            assert_eq!(error.fact("blocks"), Some(block.as_str()), "{error}");
            assert_eq!((error.fact("cluster"), error.arrived()), (Some("2"), &[][..]));
        }
        let counted = pair.local.stats();
        assert_eq!(
            (counted.verified_blocks, counted.mismatched_blocks),
            (u64::from(times(20)) * ROWS as u64, u64::from(times(20)))
        );
        // The same change is not looked for, or does not happen.
        after_the_move(&near.cache, |_| panic!("a call without verification does not stop here"));
        pulled(&pair, from, &near, &moved, Verify::Off).unwrap();
        after_the_move(&near.cache, |_| ());
        pulled(&pair, from, &near, &moved, Verify::Full).unwrap();
        let row_of = |tensor: &[u8], at: usize| tensor[at * ROW..(at + 1) * ROW].to_vec();
        for (ours, theirs) in near.read().iter().zip(&bytes) {
            (0..ROWS).for_each(|at| assert_eq!(row_of(ours, at), row_of(theirs, ROWS - 1 - at)));
        }
    }
}

#[test]
fn every_flipped_bit_fails_a_full_push() {
    let mut chance = Chance(2);
    for (way, memory) in all() {
        let pair = Pair::with(way, |config| config.remote_accessible = true);
        let [near, far] = [&pair.local, &pair.remote]
            .map(|engine| memory.held(engine, (TENSORS, ROWS, ROW), CacheKind::Blocks, &[]));
        near.fill(2);
        let to = of(2, row(&far, 0));
        let rows = block_rows(&[3, 60], &[5, 9]);
        let push = |verify| pushing(&pair.local, &near, to, rows.clone(), verified(verify)).run();
        for _ in 0..times(20) {
            let (tensor, bit) = (chance.below(TENSORS.into()) as usize, chance.below((ROW * 8) as u64));
            let block = 5 + 4 * chance.below(2);
            after_the_move(&near.cache, move |cache| flip(cache, tensor, block * ROW as u64 * 8 + bit));
            let error = fails_with(push(Verify::Full), ErrorKind::VerifyFailed);
            assert_eq!(error.fact("blocks"), Some(block.to_string().as_str()));
        }
        push(Verify::Full).unwrap();
        assert_eq!(far.read()[0][60 * ROW..61 * ROW], near.read()[0][9 * ROW..10 * ROW]);
    }
}

#[test]
fn a_failed_comparison_releases_no_key_and_delivers_no_notification() {
    for pair in pairs() {
        pair.remote.poll(1).unwrap();
        let key = Some(request(1));
        let far = Held::new(&pair.remote, false, &device(2, 1, 200_000), CacheKind::Batch, &[key]);
        let near = Held::pool(&pair.local, &device(2, 3, 200_000), CacheKind::Batch);
        let bytes = far.fill(1);
        let pull = || {
            let extras = CallExtras { notify: Some(b"here".to_vec()), ..verified(Verify::Full) };
            pulling(&pair.local, of(2, Name::Key(request(1))), &near, Rows::slot(1, -1), extras).run()
        };
        after_the_move(&near.cache, |cache| flip(cache, 1, (200_000 + 70_000) * 8));
        let error = fails_with(pull(), ErrorKind::VerifyFailed);
        assert_eq!(error.fact("slots"), Some("1[65536..131072]"));
        assert!(pair.remote.poll(9).unwrap().is_empty());
        assert_eq!(pair.remote.stats().table.keys, 1, "the key is still there");
        pull().unwrap();
        assert_eq!(near.read()[1][200_000..400_000], bytes[1]);
        assert_eq!(pair.remote.stats().table.keys, 0);
        assert!(matches!(&pair.remote.poll(9).unwrap()[..], [Event::Notification(_)]));
    }
}

#[test]
fn a_sample_has_one_block_of_64_and_at_least_one() {
    let pair = Pair::new(Way::Shm);
    let [near, far] = pair.pools(&device(1, 640, 512), CacheKind::Blocks);
    let from = of(2, row(&far, 0));
    let mut checked = 0;
    for (count, least, most) in [(1, 1, 1), (2, 1, 1), (63, 1, 1), (64, 1, 1), (65, 1, 2), (640, 10, 10)] {
        let numbers: Vec<i64> = (0..count).collect();
        pulled(&pair, from, &near, &block_rows(&numbers, &numbers), Verify::Sample).unwrap();
        let now = pair.local.stats().verified_blocks;
        assert!((least..=most).contains(&(now - checked)), "{count} blocks: {}", now - checked);
        checked = now;
    }
    // A block that differs is found after some time, wherever it is.
    for block in [0u64, 39, 63] {
        let numbers: Vec<i64> = (0..64).collect();
        let found = (0..10_000).any(|_| {
            after_the_move(&near.cache, move |cache| flip(cache, 0, block * 512 * 8 + 77));
            pulled(&pair, from, &near, &block_rows(&numbers, &numbers), Verify::Sample).is_err()
        });
        assert!(found, "block {block}");
    }
}

#[test]
fn blocks_that_are_written_twice_count_once() {
    for pair in pairs() {
        let [near, far] = pair.pools(&device(2, 16, 256), CacheKind::Blocks);
        let bytes = far.fill(4);
        let moved = block_rows(&[1, 2, 3, 4, 3], &[7, 8, 7, 7, 8]);
        pulled(&pair, of(2, row(&far, 0)), &near, &moved, Verify::Full).unwrap();
        assert_eq!(
            near.read()[1][7 * 256..9 * 256],
            [&bytes[1][4 * 256..5 * 256], &bytes[1][3 * 256..4 * 256]].concat()
        );
        assert_eq!(pair.local.stats().verified_blocks, 2);
        // A slot that is cut into the same block twice: its end overwrites a part of its beginning.
        let slot = Held::new(&pair.remote, false, &device(2, 1, 300), CacheKind::Batch, &[Some(request(5))]);
        slot.fill(8);
        let rows = Rows::SlotToBlocks { local: vec![3, 3] };
        pulled(&pair, of(2, Name::Key(request(5))), &near, &rows, Verify::Full).unwrap();
        assert_eq!(pair.local.stats().verified_blocks, 4);
    }
}

#[test]
fn a_remote_cache_that_changes_before_the_comparison_is_pulled_again_or_gone() {
    for pair in pairs() {
        let near = Held::pool(&pair.local, &device(2, 1, 4096), CacheKind::Batch);
        let keys = [Some(request(1)), Some(request(2))];
        let far = Held::new(&pair.remote, false, &device(2, 2, 4096), CacheKind::Batch, &keys);
        let bytes = far.fill(1);
        let pull =
            |key| pulled(&pair, of(2, Name::Key(request(key))), &near, &Rows::slot(0, -1), Verify::Full);
        // Another key of the same cache goes: its generation changes, and the bytes are the same.
        let unkey = || pair.remote.remove_key(request(2)).unwrap();
        changed_meanwhile(&near, unkey, || pull(1)).unwrap();
        assert_eq!(near.read()[1], bytes[1][..4096]);
        let far = Held::new(&pair.remote, false, &device(2, 1, 4096), CacheKind::Batch, &[Some(request(3))]);
        far.fill(1);
        let free = || {
            pair.remote.deallocate(far.cache.id()).unwrap();
            pair.remote.remove_key(request(3)).unwrap();
        };
        fails_with(changed_meanwhile(&near, free, || pull(3)), ErrorKind::CacheNotFound);
    }
}

#[test]
fn the_comparison_belongs_to_the_time_limit_of_the_call() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.sync_timeout = Duration::from_secs(2));
        let [near, far] = pair.pools(&device(2, 8, 4096), CacheKind::Blocks);
        let from = of(2, row(&far, 0));
        after_the_move(&near.cache, |_| thread::sleep(Duration::from_millis(2001)));
        fails_with(pulled(&pair, from, &near, &block_rows(&[1], &[1]), Verify::Full), ErrorKind::Timeout);
        pulled(&pair, from, &near, &block_rows(&[1], &[1]), Verify::Full).unwrap();
    }
}

#[test]
fn a_grant_must_last_until_the_comparison() {
    for pair in pairs() {
        let [near, far] = pair.pools(&device(2, 8, 4096), CacheKind::Blocks);
        far.fill(3);
        let grant = pair.remote.grant(&far.end(), &[1, 2], LONG, 1).unwrap();
        let token = pair.remote.grant_token(&grant);
        let extras = CallExtras { verify: Some(Verify::Full), ..under(token) };
        let from = of(2, row(&far, 0));
        let pull = || pulling(&pair.local, from, &near, block_rows(&[2], &[5]), extras.clone()).run();
        pull().unwrap();
        let revoke = || pair.remote.start_revoke(&grant, None).unwrap().join(Deadline::after(LONG)).unwrap();
        assert_eq!(changed_meanwhile(&near, revoke, pull).unwrap_err().kind(), ErrorKind::GrantEnded);
    }
}

/// Pulls of at most 2 MiB of registered memory use rings. They are verified, and a grant limits them, as a read in place is.
#[test]
fn pulls_over_rings_are_verified_and_keep_to_their_grant() {
    const ROW: usize = 300 << 10;
    let pair = Pair::new(Way::Shm);
    let [near, far] = pair.registered(&device(2, 8, ROW), CacheKind::Blocks);
    let bytes = far.fill(3);
    let grant = pair.remote.grant(&far.end(), &[1, 2], LONG, 1).unwrap();
    let token = pair.remote.grant_token(&grant);
    let from = of(2, row(&far, 0));
    let pull = |block| {
        let extras = CallExtras { verify: Some(Verify::Full), ..under(token) };
        pulling(&pair.local, from, &near, block_rows(&[block], &[5]), extras).run()
    };
    pull(2).unwrap();
    assert_eq!(bytes_by("rings", &pair.local), 2 * ROW as u64);
    for (ours, theirs) in near.read().iter().zip(&bytes) {
        assert!(ours[5 * ROW..6 * ROW] == theirs[2 * ROW..3 * ROW]);
    }
    after_the_move(&near.cache, |cache| flip(cache, 1, (5 * ROW + 77) as u64 * 8));
    let error = pull(2).unwrap_err();
    assert_eq!((error.kind(), error.fact("blocks")), (ErrorKind::VerifyFailed, Some("5")), "{error}");
    fails_with(pull(3), ErrorKind::InvalidArgument);
    pair.remote.start_revoke(&grant, None).unwrap().join(Deadline::after(LONG)).unwrap();
    assert_eq!(pull(2).unwrap_err().kind(), ErrorKind::GrantEnded);
}

#[test]
fn a_group_fails_with_the_part_that_differs_and_releases_nothing() {
    let pair = Pair::new(Way::Shm);
    let [a, b] = [request(1), request(2)]
        .map(|key| Held::new(&pair.remote, false, &device(2, 1, 8192), CacheKind::Batch, &[Some(key)]));
    a.fill(1);
    b.fill(2);
    let near = [1, 2].map(|_| Held::pool(&pair.local, &device(2, 2, 4096), CacheKind::Blocks));
    let part = |at: usize| {
        let from = of(2, Name::Key(request(at as u64 + 1)));
        member(from, &near[at], Rows::SlotToBlocks { local: vec![0, 1] })
    };
    let group = || {
        let (parts, extras) = (vec![part(0), part(1)], verified(Verify::Full));
        outcome(&pair.local.transfer_group(Side::Destination, parts, false, extras, None).unwrap())
    };
    after_the_move(&near[1].cache, |cache| flip(cache, 0, 5000 * 8));
    let error = group().unwrap_err();
    assert_eq!((error.kind(), error.fact("part")), (ErrorKind::VerifyFailed, Some("1")), "{error}");
    assert_eq!(pair.remote.stats().table.keys, 2);
    group().unwrap();
    assert_eq!(pair.remote.stats().table.keys, 0);
}

#[test]
fn the_option_of_the_engine_counts_unless_the_call_says_otherwise() {
    let pair = Pair::with(Way::Tcp, |config| config.verify = Verify::Full);
    let [near, far] = pair.pools(&device(1, 4, 512), CacheKind::Blocks);
    let (from, rows) = (of(2, row(&far, 0)), block_rows(&[1, 2], &[1, 2]));
    pair.local.pull(from, &near.end(), rows.clone(), Layers::ALL).run().unwrap();
    assert_eq!(pair.local.stats().verified_blocks, 2);
    pulled(&pair, from, &near, &rows, Verify::Off).unwrap();
    assert_eq!(pair.local.stats().verified_blocks, 2);
}

#[test]
fn layers_follow_the_option_of_the_engine() {
    for way in WAYS {
        let pair = Pair::with(way, |config| {
            (config.remote_accessible, config.verify) = (true, Verify::Full);
        });
        let [near, far] = pair.pools(&device(4, 2, 70_000), CacheKind::Batch);
        let bytes = near.fill(1);
        let aims = || [to(2, Target::Cache { name: row(&far, 1).into(), first_layer: Some(0) }, 2)];
        let task = start(&pair.local, &near, &SLOTS, &aims());
        for layer in 0..2 {
            task.ready(layer).unwrap();
        }
        wait(&task);
        assert!(is_done(&task, 0), "{:?}", task.outcomes());
        assert_eq!(far.read()[3][70_000..], bytes[3][..70_000]);
        assert_eq!(pair.local.stats().verified_blocks, 4, "two pieces in each of two layers");
        after_the_move(&near.cache, |cache| flip(cache, 0, 5 * 8));
        let task = start(&pair.local, &near, &SLOTS, &aims());
        task.ready(0).unwrap();
        wait(&task);
        let [Outcome::Failed(error)] = &task.outcomes()[..] else { panic!("{:?}", task.outcomes()) };
        assert_eq!(error.kind(), ErrorKind::VerifyFailed, "{error}");
        assert_eq!(error.fact("slots"), Some("0[0..65536]"));
    }
}

/// A pull over a socket compares the checksum of its bytes. It asks for those of the blocks only if that one differs, or if the
/// owner's entry has another generation.
#[test]
fn blocks_are_compared_only_if_the_bytes_may_differ() {
    const FAR: CacheId = CacheId(5);
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let shape = device(2, 2, 1000);
    let near = Held::pool(&engine, &shape, CacheKind::Blocks);
    let name = Name::Row { cache: FAR, row: 0 };
    let bytes: Vec<u8> = (0..4000_u32).map(|at| (at % 251) as u8).collect();
    let right = |request: u64| {
        let mut block = Checksums::bound_to(name, FAR, 0, request).unwrap().block();
        block.add(&bytes);
        block.value()
    };
    type Sums = fn(u64, u64) -> Vec<u64>;
    // The checksums that follow the bytes, from the right one and from that of another request, and whether those of the
    // blocks are asked for.
    let cases: [(u64, Sums, bool); 7] = [
        (0, |right, _| vec![right], false),
        (0, |right, _| vec![right ^ 1], true),
        (0, |_, other| vec![other], true),
        (1, |right, _| vec![right], true),
        (0, |_, _| vec![], true),
        (0, |right, _| vec![right, right], true),
        (0, |right, _| vec![right], false),
    ];
    let (fake, _control) = Fake::linked_to(&engine);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (call, _) = fake.greet();
            describe(&call, described(FAR, &shape, CacheKind::Blocks));
            for (generation, sums, compares) in &cases {
                let request = hear_request(&call).unwrap();
                let asked = digest(&request).unwrap();
                let Request::Read { range: Range { start: 0, end: 4000 }, summed: true, .. } = request else {
                    panic!("{request:?}")
                };
                say(&call, &Reply::Ready { bytes: 4000 });
                let mut socket = std::fs::File::from(call.as_fd().try_clone_to_owned().unwrap());
                socket.write_all(&bytes).unwrap();
                let sums = sums(right(asked), right(asked ^ 1));
                say(&call, &Reply::Checksums { generation: *generation, sums });
                if *compares {
                    let request = hear_request(&call).unwrap();
                    let Request::Checksums { .. } = request else { panic!("{request:?}") };
                    say(&call, &Reply::Checksums { generation: 0, sums: vec![1, 2] });
                }
            }
        });
        for (at, (.., compares)) in cases.iter().enumerate() {
            let pulled =
                pulling(&engine, of(2, name), &near, block_rows(&[0, 1], &[0, 1]), verified(Verify::Full))
                    .run();
            let kind = pulled.map_err(|error| error.kind());
            assert_eq!(kind, if *compares { Err(ErrorKind::VerifyFailed) } else { Ok(()) }, "case {at}");
            assert_eq!(near.read().concat(), bytes);
        }
    });
    let counted = engine.stats();
    assert_eq!((counted.verified_blocks, counted.mismatched_blocks), (14, 10), "2 blocks of each pull");
}
