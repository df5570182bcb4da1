//! Push: the bytes of a copy made by hand, over every transport, in both modes, between all kinds of memory; and the
//! seed's `PushKvCache`.
//!
//! Not for: what goes wrong (`broken`, `races`).

use llm_datadist_core::{
    CacheId, CacheIndex, CacheKey, CacheKind, ClusterId, ErrorKind, ExtParam, LayerRange, Layers, Name,
    Placement, PushRows, Role, StatusCode,
};

use super::{Held, Pair, WAYS, Way, config, each, of, open, request, row};
use crate::bed::desc;

use CacheKind::{Batch, Blocks};

#[expect(clippy::unnecessary_wraps, reason = "as the arguments are")]
fn range(first: u32, end: u32) -> Option<LayerRange> {
    Some(LayerRange { first, end })
}

fn per(src: Option<LayerRange>, dst: Option<LayerRange>, tensors_per_layer: u32) -> Layers {
    Layers { src, dst, tensors_per_layer }
}

#[test]
fn slots_are_pushed() {
    // Near and far: tensors, rows, bytes of a row; near and far row; layers; first tensor read, first written, how many.
    type Case = ((u32, usize, usize), (u32, usize, usize), (u32, u32), Layers, (usize, usize, usize));
    let cases: [Case; 5] = [
        ((2, 3, 64), (2, 3, 64), (1, 2), per(None, None, 2), (0, 0, 2)),
        // The far slot is larger: the near slot is what travels.
        ((4, 2, 99), (4, 3, 128), (1, 1), per(None, None, 1), (0, 0, 4)),
        ((6, 2, 64), (8, 2, 64), (0, 1), per(range(1, 3), range(2, 4), 2), (2, 4, 4)),
        ((3, 1, 4097), (3, 2, 4097), (0, 1), per(range(2, 3), range(0, 1), 1), (2, 0, 1)),
        // One tensor and two to a layer: no layer, nothing to do.
        ((1, 1, 64), (1, 1, 64), (0, 0), per(None, None, 2), (0, 0, 0)),
    ];
    each(|_, _, pair, ends| {
        for (seed, (ours, theirs, rows, layers, (src, dst, count))) in cases.into_iter().enumerate() {
            let shape = |placement, (tensors, rows, bytes)| desc(placement, tensors, rows, bytes);
            let local = Held::new(&pair.local, ends.local.0, &shape(ends.local.1, ours), Batch, &[]);
            let remote = Held::new(&pair.remote, ends.remote.0, &shape(ends.remote.1, theirs), Batch, &[]);
            let (bytes, mut expected) = (local.fill(1), remote.fill(2));
            for tensor in 0..count {
                for at in 0..ours.2 {
                    expected[dst + tensor][rows.1 as usize * theirs.2 + at] =
                        bytes[src + tensor][rows.0 as usize * ours.2 + at];
                }
            }
            let to = of(2, row(&remote, rows.1));
            pair.local.push(&local.end(), to, &PushRows::Slot { local: rows.0 }, layers).unwrap();
            assert!(remote.read() == expected, "case {seed}");
            assert!(local.read() == bytes, "the source changed");
            for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
                engine.deallocate(held.cache.id()).unwrap();
                engine.unregister(held.cache.id()).unwrap();
            }
        }
    });
}

#[test]
fn push_to_a_missing_slot_names_that_slot() {
    each(|_, _, pair, ends| {
        let shape = |placement| desc(placement, 2, 3, 64);
        let local = Held::new(&pair.local, ends.local.0, &shape(ends.local.1), Batch, &[]);
        let remote = Held::new(&pair.remote, ends.remote.0, &shape(ends.remote.1), Batch, &[]);
        let (to, rows) = (of(2, row(&remote, 9)), PushRows::Slot { local: 0 });
        let error = pair.local.push(&local.end(), to, &rows, Layers::ALL).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.fact("name").is_some_and(|name| name.starts_with("slot 9 of")), "{error}");
    });
}

#[test]
fn blocks_are_pushed() {
    let model = std::cell::Cell::new(0);
    each(|_, _, pair, ends| {
        for (layers, (src, dst, count)) in
            [(per(None, None, 1), (0usize, 0usize, 4usize)), (per(range(1, 2), range(0, 1), 2), (2, 0, 2))]
        {
            let key = CacheKey::Blocks { model: model.replace(model.get() + 1) };
            let local = Held::new(&pair.local, ends.local.0, &desc(ends.local.1, 4, 8, 100), Blocks, &[]);
            let remote =
                Held::new(&pair.remote, ends.remote.0, &desc(ends.remote.1, 4, 9, 100), Blocks, &[Some(key)]);
            let (bytes, mut expected) = (local.fill(3), remote.fill(4));
            let (ours, theirs) = ([0, 1, 2, 7, 6, 3, 3, 5], [2, 3, 4, 1, 0, 8, 5, 2]);
            for tensor in 0..count {
                for (from, to) in ours.into_iter().zip(theirs) {
                    for at in 0..100 {
                        expected[dst + tensor][to * 100 + at] = bytes[src + tensor][from * 100 + at];
                    }
                }
            }
            let rows = PushRows::Blocks {
                local: ours.map(|at| at as i64).to_vec(),
                remote: theirs.map(|at| at as i64).to_vec(),
            };
            pair.local.push(&local.end(), of(2, Name::Key(key)), &rows, layers).unwrap();
            assert!(remote.read() == expected);
            for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
                engine.deallocate(held.cache.id()).unwrap();
                engine.unregister(held.cache.id()).unwrap();
            }
        }
    });
}

/// When a push returns, its bytes are where the peer finds them; the source may be overwritten at once.
#[test]
fn a_push_is_there_when_it_returns_and_needs_its_source_no_more() {
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = desc(Placement::Device, 2, 2, 64 << 10);
        let local = Held::new(&pair.local, false, &shape, Batch, &[]);
        let remote = Held::new(&pair.remote, false, &shape, Batch, &[]);
        for round in 0..8 {
            let bytes = local.fill(round);
            let slot = u32::from(round % 2);
            let rows = PushRows::Slot { local: slot };
            pair.local.push(&local.end(), of(2, row(&remote, slot)), &rows, Layers::ALL).unwrap();
            local.fill(99);
            let at = slot as usize * (64 << 10);
            let got = remote.read();
            assert!((0..2).all(|t| got[t][at..][..64 << 10] == bytes[t][at..][..64 << 10]), "{way:?}");
            // The owner writes over it: nothing that comes late puts the pushed bytes back.
            let own = remote.fill(77);
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert!(remote.read() == own, "{way:?}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_its_code() {
    use ErrorKind::{CacheNotFound as Missing, InvalidArgument as Wrong, NotLinked};
    for way in WAYS {
        let pair = Pair::with(way, |config| config.remote_accessible = true);
        let local = Held::new(&pair.local, false, &desc(Placement::Device, 4, 2, 128), Batch, &[]);
        let parts = Held::new(&pair.local, false, &desc(Placement::Device, 4, 4, 64), Blocks, &[]);
        let remote = Held::new(&pair.remote, false, &desc(Placement::Device, 4, 2, 128), Batch, &[]);
        let small = Held::new(&pair.remote, false, &desc(Placement::Device, 4, 2, 127), Batch, &[]);
        let key = CacheKey::Blocks { model: 3 };
        let blocks = Held::new(&pair.remote, false, &desc(Placement::Device, 4, 8, 64), Blocks, &[Some(key)]);
        let closed = crate::bed::Own::new(&desc(Placement::Host, 4, 2, 128), Batch, |adopted| {
            pair.remote.register(adopted, &[], Some(false)).unwrap()
        });
        let slot = |local| PushRows::Slot { local };
        let pairs = |local: &[i64], remote: &[i64]| PushRows::Blocks {
            local: local.to_vec(),
            remote: remote.to_vec(),
        };
        let (all, to) = (Layers::ALL, row(&remote, 0));
        let nowhere = || llm_datadist_core::End::Managed(CacheId(99));
        let shut = Name::Row { cache: closed.cache.id(), row: 0 };
        let cases = [
            ("no such cache here", 2, nowhere(), to, slot(0), all, Missing),
            ("own id", 1, local.end(), to, slot(0), all, Wrong),
            ("not linked", 7, local.end(), to, slot(0), all, NotLinked),
            (
                "no such cache there",
                2,
                local.end(),
                Name::Row { cache: CacheId(99), row: 0 },
                slot(0),
                all,
                Missing,
            ),
            (
                "no such key there",
                2,
                parts.end(),
                Name::Key(CacheKey::Blocks { model: 4 }),
                pairs(&[0], &[0]),
                all,
                Missing,
            ),
            ("slot there", 2, local.end(), row(&remote, 2), slot(0), all, Wrong),
            ("slot here", 2, local.end(), to, slot(2), all, Wrong),
            ("a smaller slot", 2, local.end(), row(&small, 0), slot(0), all, Wrong),
            ("closed", 2, local.end(), shut, slot(0), all, Wrong),
            ("layer there", 2, local.end(), to, slot(0), per(range(0, 1), range(4, 5), 1), Wrong),
            ("layer here", 2, local.end(), to, slot(0), per(range(4, 5), range(0, 1), 1), Wrong),
            ("divisor", 2, local.end(), to, slot(0), per(range(0, 1), range(0, 1), 3), Wrong),
            ("one range", 2, local.end(), to, slot(0), per(range(0, 1), None, 1), Wrong),
            ("block there", 2, parts.end(), Name::Key(key), pairs(&[0], &[8]), all, Wrong),
            ("block here", 2, parts.end(), Name::Key(key), pairs(&[4], &[0]), all, Wrong),
            ("unequal", 2, parts.end(), Name::Key(key), pairs(&[0], &[0, 1]), all, Wrong),
        ];
        let before = [&remote, &small, &blocks].map(|held| held.fill(7));
        for (what, cluster, end, name, rows, layers, kind) in cases {
            let error = pair.local.push(&end, of(cluster, name), &rows, layers).unwrap_err();
            assert_eq!(error.kind(), kind, "{way:?} {what}: {error}");
        }
        assert!(before == [&remote, &small, &blocks].map(Held::read));
    }
}

/// Seed `deprecated.md`: a push of a whole slot ends the reference by key.
#[test]
fn a_push_of_every_tensor_releases_the_near_key() {
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = desc(Placement::Device, 2, 2, 64);
        let local = Held::new(&pair.local, false, &shape, Batch, &[Some(request(1)), Some(request(2))]);
        let remote = Held::new(&pair.remote, false, &shape, Batch, &[]);
        let push = |local: &Held, layers| {
            pair.local
                .push(&local.end(), of(2, row(&remote, 1)), &PushRows::Slot { local: 1 }, layers)
                .unwrap();
        };
        push(&local, per(range(0, 1), range(1, 2), 1));
        assert!(pair.local.find_key(request(2)).is_ok(), "one of two tensors");
        push(&local, Layers::ALL);
        assert!(pair.local.find_key(request(2)).is_err());
        assert!(pair.local.find_key(request(1)).is_ok());
    }
}

/// The seed's example (`PushKvCache.md`): INT32 of 4 × 16, four tensors, slot 3, layer 3 of one tensor; and each of its
/// results.
#[test]
fn push_kv_cache_is_the_seeds() {
    for way in WAYS {
        let pair = Pair::new(way);
        let shape = llm_datadist_core::CacheDesc {
            num_tensors: 4,
            shape: vec![4, 16],
            data_type: llm_datadist_core::DataType::Int32,
            placement: Placement::Device,
        };
        let local = Held::new(&pair.local, false, &shape, Batch, &[]);
        let remote = Held::new(&pair.remote, false, &shape, Batch, &[]);
        let (bytes, mut expected) = (local.fill(1), remote.fill(2));
        let index =
            |cluster, cache, row| CacheIndex { cluster: ClusterId(cluster), cache: CacheId(cache), row };
        let to = index(2, remote.cache.id().0, 3);
        let ext = ExtParam { src_layer_range: (3, 3), dst_layer_range: (3, 3), tensor_num_per_layer: 1 };
        pair.local.push_kv_cache(local.cache.id(), to, 3, -1, ext).unwrap();
        expected[3][3 * 64..].copy_from_slice(&bytes[3][3 * 64..]);
        assert!(remote.read() == expected, "{way:?}");
        pair.local.push_kv_cache(local.cache.id(), to, 0, -1, ExtParam::default()).unwrap();
        for tensor in 0..4 {
            expected[tensor][3 * 64..].copy_from_slice(&bytes[tensor][..64]);
        }
        assert!(remote.read() == expected, "{way:?}");

        let push = |cache, to, row, size, ext| {
            StatusCode::from(pair.local.push_kv_cache(CacheId(cache), to, row, size, ext).unwrap_err().kind())
        };
        let own = local.cache.id().0;
        let wrong = StatusCode::ParamInvalid;
        assert_eq!(push(own, to, 3, 64, ext), wrong);
        assert_eq!(push(own, to, 4, -1, ext), wrong);
        assert_eq!(push(own, to, 3, -1, ExtParam { src_layer_range: (2, 3), ..ext }), wrong);
        assert_eq!(push(own, to, 3, -1, ExtParam { dst_layer_range: (4, 4), ..ext }), wrong);
        assert_eq!(push(own, to, 3, -1, ExtParam { tensor_num_per_layer: 3, ..ext }), wrong);
        assert_eq!(push(own, index(1, 1, 3), 3, -1, ext), wrong);
        assert_eq!(push(own, index(9, 1, 3), 3, -1, ext), StatusCode::NotYetLink);
        assert_eq!(push(99, to, 3, -1, ext), StatusCode::KvCacheNotExist);
        assert_eq!(push(own, index(2, 99, 3), 3, -1, ext), StatusCode::KvCacheNotExist);
        assert!(remote.read() == expected, "{way:?}");
    }
    // The role is the one the engine has now.
    let mut decoder = config(3, Way::Tcp);
    decoder.role = Role::Decoder;
    let decoder = open(decoder, Way::Tcp);
    let cache = Held::new(&decoder, false, &desc(Placement::Device, 2, 1, 64), Batch, &[]);
    let to = CacheIndex { cluster: ClusterId(2), cache: CacheId(1), row: 0 };
    let push = || decoder.push_kv_cache(cache.cache.id(), to, 0, -1, ExtParam::default()).unwrap_err();
    assert_eq!(push().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn push_kv_cache_asks_for_the_role_that_was_switched_to() {
    let mut decoder = config(3, Way::Tcp);
    decoder.role = Role::Decoder;
    let engine = open(decoder, Way::Tcp);
    let cache = Held::new(&engine, false, &desc(Placement::Device, 2, 1, 64), Batch, &[]);
    let to = CacheIndex { cluster: ClusterId(2), cache: CacheId(1), row: 0 };
    let push = || engine.push_kv_cache(cache.cache.id(), to, 0, -1, ExtParam::default()).unwrap_err().kind();
    engine.switch_role(Role::Prompt, None).unwrap();
    assert_eq!(push(), ErrorKind::NotLinked);
    engine.switch_role(Role::Decoder, None).unwrap();
    assert_eq!(push(), ErrorKind::InvalidArgument);
    engine.switch_role(Role::Mix, None).unwrap();
    assert_eq!(push(), ErrorKind::NotLinked);
}
