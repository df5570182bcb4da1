//! Push: the bytes of a copy made by hand, over every transport, in both modes, between all kinds of memory.
//!
//! `tests/test_push.py` and `tests/test_cpp.py` cover refusals and order between processes.

use std::cell::Cell;

use llm_datadist_core::{
    CacheDesc, CacheId, CacheIndex, CacheKey, CacheKind, ClusterId, DataType, ErrorKind, ExtParam,
    LayerRange, Layers, Name, Placement, PushRows, Role,
};

use super::{Held, Pair, WAYS, Way, config, device, each, of, open, push_slot, request, row};
use crate::fixtures::desc;

use CacheKind::{Batch, Blocks};

fn per(src: Option<(u32, u32)>, dst: Option<(u32, u32)>, tensors_per_layer: u32) -> Layers {
    let range = |ends: Option<(u32, u32)>| ends.map(|(first, end)| LayerRange { first, end });
    Layers { src: range(src), dst: range(dst), tensors_per_layer }
}

#[test]
fn slots_are_pushed() {
    // Local and remote tensors, rows and bytes of a row; local and remote row; layers; then the first tensor read, the
    // first one written, and how many.
    type Case = ((u32, usize, usize), (u32, usize, usize), (u32, u32), Layers, (usize, usize, usize));
    let cases: [Case; 5] = [
        ((2, 3, 64), (2, 3, 64), (1, 2), per(None, None, 2), (0, 0, 2)),
        // The remote slot is larger: the size of the local one counts.
        ((4, 2, 99), (4, 3, 128), (1, 1), per(None, None, 1), (0, 0, 4)),
        ((6, 2, 64), (8, 2, 64), (0, 1), per(Some((1, 3)), Some((2, 4)), 2), (2, 4, 4)),
        ((3, 1, 4097), (3, 2, 4097), (0, 1), per(Some((2, 3)), Some((0, 1)), 1), (2, 0, 1)),
        // One tensor and two to a layer make no layer.
        ((1, 1, 64), (1, 1, 64), (0, 0), per(None, None, 2), (0, 0, 0)),
    ];
    each(|_, _, pair, ends| {
        for (case, (ours, theirs, rows, layers, (src, dst, count))) in cases.into_iter().enumerate() {
            let shape = |placement, (tensors, rows, bytes)| desc(placement, tensors, rows, bytes);
            let local = Held::new(&pair.local, ends.local.0, &shape(ends.local.1, ours), Batch, &[]);
            let remote = Held::new(&pair.remote, ends.remote.0, &shape(ends.remote.1, theirs), Batch, &[]);
            let (bytes, mut expected) = (local.fill(1), remote.fill(2));
            for tensor in 0..count {
                let from = &bytes[src + tensor][rows.0 as usize * ours.2..][..ours.2];
                expected[dst + tensor][rows.1 as usize * theirs.2..][..ours.2].copy_from_slice(from);
            }
            let (to, slot) = (of(2, row(&remote, rows.1)), PushRows::Slot { local: rows.0 });
            pair.local.push(&local.end(), to, &slot, layers).unwrap();
            assert!(remote.read() == expected, "case {case}");
            assert!(local.read() == bytes, "the source changed");
            local.free(&pair.local);
            remote.free(&pair.remote);
        }
    });
}

#[test]
fn blocks_are_pushed() {
    let model = Cell::new(0);
    let (from, to) = ([0, 1, 2, 7, 6, 3, 3, 5], [2, 3, 4, 1, 0, 8, 5, 2]);
    each(|_, _, pair, ends| {
        for (layers, (src, dst, count)) in
            [(per(None, None, 1), (0, 0, 4)), (per(Some((1, 2)), Some((0, 1)), 2), (2, 0, 2))]
        {
            let key = CacheKey::Blocks { model: model.replace(model.get() + 1) };
            let (ours, theirs) = (desc(ends.local.1, 4, 8, 100), desc(ends.remote.1, 4, 9, 100));
            let local = Held::new(&pair.local, ends.local.0, &ours, Blocks, &[]);
            let remote = Held::new(&pair.remote, ends.remote.0, &theirs, Blocks, &[Some(key)]);
            let (bytes, mut expected) = (local.fill(3), remote.fill(4));
            for tensor in 0..count {
                for (from, to) in from.into_iter().zip(to) {
                    let block = &bytes[src + tensor][from * 100..][..100];
                    expected[dst + tensor][to * 100..][..100].copy_from_slice(block);
                }
            }
            let [from, to] = [from, to].map(|blocks| blocks.map(|block| block as i64).to_vec());
            let rows = PushRows::Blocks { local: from, remote: to };
            pair.local.push(&local.end(), of(2, Name::Key(key)), &rows, layers).unwrap();
            assert!(remote.read() == expected);
            local.free(&pair.local);
            remote.free(&pair.remote);
        }
    });
}

#[test]
fn a_push_to_a_missing_slot_names_that_slot() {
    each(|_, _, pair, ends| {
        let shape = |placement| desc(placement, 2, 3, 64);
        let local = Held::new(&pair.local, ends.local.0, &shape(ends.local.1), Batch, &[]);
        let remote = Held::new(&pair.remote, ends.remote.0, &shape(ends.remote.1), Batch, &[]);
        let error = push_slot(&pair.local, &local, 0, of(2, row(&remote, 9))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.fact("name").is_some_and(|name| name.starts_with("slot 9 of")), "{error}");
    });
}

/// Contract §17.4: a push of a whole slot ends the reference by key.
#[test]
fn a_push_of_every_tensor_releases_the_local_key() {
    for way in WAYS {
        let pair = Pair::new(way);
        let keys = [Some(request(1)), Some(request(2))];
        let local = Held::new(&pair.local, false, &device(2, 2, 64), Batch, &keys);
        let remote = Held::pool(&pair.remote, &device(2, 2, 64), Batch);
        for (layers, bound) in [(per(Some((0, 1)), Some((1, 2)), 1), true), (Layers::ALL, false)] {
            let to = of(2, row(&remote, 1));
            pair.local.push(&local.end(), to, &PushRows::Slot { local: 1 }, layers).unwrap();
            assert_eq!(pair.local.find_key(request(2)).is_ok(), bound);
        }
        assert!(pair.local.find_key(request(1)).is_ok());
    }
}

/// The example of `PushKvCache`: INT32 of 4 × 16, four tensors, slot 3, layer 3 of one tensor.
#[test]
fn push_kv_cache_pushes_a_layer_or_all() {
    for way in WAYS {
        let pair = Pair::new(way);
        let (shape, data_type) = (vec![4, 16], DataType::Int32);
        let shape = CacheDesc { num_tensors: 4, shape, data_type, placement: Placement::Device };
        let [local, remote] = [&pair.local, &pair.remote].map(|engine| Held::pool(engine, &shape, Batch));
        let (bytes, mut expected) = (local.fill(1), remote.fill(2));
        let to = CacheIndex { cluster: ClusterId(2), cache: remote.cache.id(), row: 3 };
        let ext = ExtParam { src_layer_range: (3, 3), dst_layer_range: (3, 3), tensor_num_per_layer: 1 };
        pair.local.push_kv_cache(local.cache.id(), to, 3, -1, ext).unwrap();
        expected[3][3 * 64..].copy_from_slice(&bytes[3][3 * 64..]);
        assert!(remote.read() == expected, "{way:?}");
        pair.local.push_kv_cache(local.cache.id(), to, 0, -1, ExtParam::default()).unwrap();
        for tensor in 0..4 {
            expected[tensor][3 * 64..].copy_from_slice(&bytes[tensor][..64]);
        }
        assert!(remote.read() == expected, "{way:?}");
    }
}

/// The role is the one that the engine has now.
#[test]
fn push_kv_cache_is_refused_to_a_decoder() {
    let engine = open(llm_datadist_core::Config { role: Role::Decoder, ..config(3, Way::Tcp) }, Way::Tcp);
    let cache = Held::pool(&engine, &device(2, 1, 64), Batch);
    let to = CacheIndex { cluster: ClusterId(2), cache: CacheId(1), row: 0 };
    let push = || engine.push_kv_cache(cache.cache.id(), to, 0, -1, ExtParam::default()).unwrap_err().kind();
    assert_eq!(push(), ErrorKind::InvalidArgument);
    for (role, expected) in [
        (Role::Prompt, ErrorKind::NotLinked),
        (Role::Decoder, ErrorKind::InvalidArgument),
        (Role::Mix, ErrorKind::NotLinked),
    ] {
        engine.switch_role(role, None).unwrap();
        assert_eq!(push(), expected, "{role:?}");
    }
}
