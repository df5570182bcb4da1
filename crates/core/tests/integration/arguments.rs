//! Validation of call arguments and single values: the kind of each error, the facts in its message, and the bounds.

use llm_datadist_core::bindings::{CacheKey, CacheLayout, Geometry, Role};
use llm_datadist_core::testing::options;
use llm_datadist_core::testing::plan::{CacheCount, CopyPlan, Moves, Piece};
use llm_datadist_core::testing::validate::{self, CopyArgs};
use llm_datadist_core::{CacheDesc, CacheKind, DataType, Error, ErrorKind, Placement, Result};

use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

/// Checks that the result is `InvalidArgument`, and that its message is short and contains `facts`.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T>, facts: &[&str]) -> Error {
    refused_as(ErrorKind::InvalidArgument, result, facts)
}

/// Checks that the result is an error of this kind, and that its message is short and contains `facts`.
#[track_caller]
pub fn refused_as<T: std::fmt::Debug>(kind: ErrorKind, result: Result<T>, facts: &[&str]) -> Error {
    let error = result.expect_err(&format!("expected an error that names {facts:?}"));
    let message = error.to_string();
    assert_eq!(error.kind(), kind, "{message}");
    assert!(message.len() < 2000, "a message of {} bytes", message.len());
    for fact in facts {
        assert!(message.contains(fact), "{message}: no {fact:?}");
    }
    error
}

fn desc(num_tensors: u32, shape: &[i64], data_type: DataType, placement: Placement) -> CacheDesc {
    CacheDesc { num_tensors, shape: shape.to_vec(), data_type, placement, row_stride: None, kv_layout: None }
}

pub fn spec(tensors: u32, rows: i64, row_bytes: i64, kind: CacheKind, placement: Placement) -> CacheLayout {
    let desc = desc(tensors, &[rows, row_bytes], DataType::Uint8, placement);
    CacheLayout { geometry: Geometry::new(&desc).unwrap(), kind, placement }
}

#[test]
fn shapes() {
    let geometry = |num_tensors, shape: &[i64], data_type| {
        let geometry = Geometry::new(&desc(num_tensors, shape, data_type, Host));
        geometry.map(|g| (g.num_tensors(), g.rows(), g.row_bytes(), g.tensor_bytes()))
    };
    let max = i64::MAX as u64;
    assert_eq!(geometry(3, &[4, 16], DataType::Int32).unwrap(), (3, 4, 64, 256));
    assert_eq!(geometry(1, &[5], DataType::String).unwrap(), (1, 5, 16, 80));
    assert_eq!(geometry(1, &[1; 31], DataType::Bool).unwrap(), (1, 1, 1, 1));
    assert_eq!(geometry(1, &[3; 31], DataType::Int8).unwrap(), (1, 3, 3_u64.pow(30), 3_u64.pow(31)));
    assert_eq!(geometry(1, &[i64::MAX], DataType::Bool).unwrap(), (1, max, 1, max));
    assert_eq!(geometry(3, &[1 << 61], DataType::Uint8).unwrap(), (3, 1 << 61, 1, 1 << 61));
    for tensors in [0, u32::MAX] {
        let fact = format!("num_tensors={tensors}");
        refused(geometry(tensors, &[1], DataType::Bool), &[&fact, "1 to 16777216"]);
    }
    refused(geometry(1, &[], DataType::Bool), &["shape=[]", "1 to 31"]);
    refused(geometry(1, &[1; 32], DataType::Bool), &["shape", "1 to 31"]);
    for bad in [&[0][..], &[-1], &[4, 0, 4], &[4, -4], &[-1, i64::MIN]] {
        refused(geometry(1, bad, DataType::Bool), &[&format!("{bad:?}"), "above 0"]);
    }
    // 2^63 bytes or more, some of which wrap around to few bytes.
    for (num_tensors, shape, data_type) in [
        (1, &[1 << 62][..], DataType::Int16),
        (1, &[1 << 32, 1 << 31], DataType::Bool),
        (1, &[1 << 32, 1 << 32], DataType::Bool),
        (1, &[i64::MAX; 3], DataType::String),
        (2, &[1 << 62], DataType::Bool),
        (1 << 24, &[1 << 39], DataType::Bool),
        (1 << 24, &[i64::MAX], DataType::Bool),
    ] {
        refused(geometry(num_tensors, shape, data_type), &["2^63", "shape"]);
    }
    assert_eq!(DataType::ALL.len(), 14);
    for data_type in DataType::ALL {
        assert_eq!(DataType::from_value(*data_type as i64), Some(*data_type));
        assert_eq!(geometry(1, &[2], *data_type).unwrap().3, 2 * data_type.bytes());
        assert!(data_type.name().starts_with("DT_"));
    }
    for unknown in [-1, 5, 14, 26, 28, i64::MIN, i64::MAX] {
        assert_eq!(DataType::from_value(unknown), None);
    }
}

#[test]
fn allocations() {
    let allocate = |num_tensors, shape: &[i64], placement, keys: &[Option<CacheKey>], has_pool| {
        validate::allocate(&desc(num_tensors, shape, DataType::Uint8, placement), Batch, keys, has_pool)
    };
    refused(allocate(0, &[4], Device, &[], true), &["num_tensors=0"]);
    refused(allocate(0, &[4], Device, &[], false), &["num_tensors=0"]);
    refused(allocate(1, &[4], Device, &[], false), &["device", "mem_pool_cfg"]);
    refused(allocate(1, &[4], Host, &[], false), &["host", "host_mem_pool_cfg"]);
    refused(allocate(1, &[0], Device, &[], true), &["shape=[0]"]);
    let key = |id| CacheKey::Request { model: 0, id };
    let three = [Some(key(1)), None, None];
    refused(allocate(1, &[2, 9], Device, &three, true), &["len(cache_keys)=3", "at most 2"]);
    let keys = [Some(key(1)), None, Some(key(2)), Some(key(1))];
    let (layout, bound) = allocate(1, &[4, 9], Device, &keys, true).unwrap();
    assert_eq!(bound, [(2, key(2)), (3, key(1))]);
    assert_eq!((layout.kind, layout.placement), (Batch, Device));
    assert_eq!(validate::bindings(&[]).unwrap(), []);
    assert_eq!(validate::bindings(&[None]).unwrap(), []);
    assert_eq!(validate::bindings(&[Some(key(5))]).unwrap(), [(0, key(5))]);
}

#[test]
fn addresses() {
    let two = desc(2, &[4, 8], DataType::Int32, Host);
    let addresses = |addrs: &[u64]| validate::addresses(&two, Blocks, addrs);
    refused(addresses(&[]), &["addrs=[]"]);
    refused(addresses(&[4096]), &["len(addrs)=1", "num_tensors=2"]);
    refused(addresses(&[1, 2, 3]), &["len(addrs)=3"]);
    refused(addresses(&[4096, 0]), &["addrs[1]=0", "above 0"]);
    refused(addresses(&[u64::MAX - 127, 4096]), &["addrs[0]", "128 bytes", "2^64"]);
    let one = |num_tensors, shape: &[i64]| {
        validate::addresses(&desc(num_tensors, shape, DataType::Int8, Host), Batch, &[1])
    };
    refused(one(0, &[4]), &["len(addrs)=1", "num_tensors=0"]);
    refused(one(1, &[-4]), &["shape=[-4]"]);
    let layout = addresses(&[u64::MAX - 128, 1]).unwrap();
    assert_eq!((layout.kind, layout.placement, layout.geometry.row_bytes()), (Blocks, Host, 32));
}

fn args(dst: u32, src: u32, offset: u64, size: i64) -> CopyArgs {
    CopyArgs { dst_batch_index: dst, src_batch_index: src, offset, size }
}

fn listed(moves: &Moves) -> Vec<Piece> {
    moves.pieces.iter().collect()
}

#[test]
fn copies_of_slots() {
    let (src, dst) = (spec(2, 3, 100, Batch, Device), spec(2, 4, 64, Batch, Host));
    let copy = |args| validate::copy_cache(src, dst, args);
    let done = copy(args(3, 2, 10, 54)).unwrap();
    assert_eq!(listed(&done), [Piece { src: 210, dst: 202, len: 54 }]);
    assert_eq!((&done.src_rows[..], &done.dst_rows[..], done.num_tensors), (&[2][..], &[3][..], 2));
    for size in [0, -2, i64::MIN] {
        refused(copy(args(0, 0, 0, size)), &[&format!("size={size}"), "-1, or a number of bytes above 0"]);
    }
    refused(copy(args(4, 0, 0, 1)), &["dst_batch_index=4", "0 to 3"]);
    refused(copy(args(0, 3, 0, 1)), &["src_batch_index=3", "0 to 2"]);
    refused(copy(args(u32::MAX, 0, 0, 1)), &["dst_batch_index=4294967295"]);
    refused(copy(args(0, 0, 64, 1)), &["offset=64", "64 bytes"]);
    refused(copy(args(0, 0, u64::MAX, -1)), &["offset=18446744073709551615"]);
    refused(copy(args(0, 0, 0, -1)), &["size=-1", "100 bytes", "100 and 64"]);
    refused(copy(args(0, 0, 10, 55)), &["size=55", "offset 10"]);
    refused(copy(args(0, 0, 63, i64::MAX)), &["size=9223372036854775807"]);
    let more = validate::copy_cache(src, spec(3, 4, 100, Batch, Host), args(0, 0, 0, 1)).unwrap_err();
    assert_eq!(more.kind(), ErrorKind::TensorCountMismatch);
    assert!(more.to_string().contains("2 tensors") && more.to_string().contains('3'), "{more}");
    let blocks = spec(2, 4, 64, Blocks, Device);
    refused(validate::copy_cache(blocks, dst, args(0, 0, 0, 1)), &["src is a blocks cache", "continuous"]);
    refused(validate::copy_cache(src, blocks, args(0, 0, 0, 1)), &["dst is a blocks cache"]);
    // In the other direction, −1 is the rest of the smaller slot and fits.
    assert_eq!(listed(&validate::copy_cache(dst, src, args(0, 0, 60, -1)).unwrap())[0].len, 4);
    refused(validate::copy_kv_cache(dst, src, args(0, 0, 0, 1)), &["src_cache is in host memory"]);
    assert_eq!(validate::copy_kv_cache(src, dst, args(3, 2, 10, 54)).unwrap(), done);
    // The largest slot, and the slot with the highest index.
    let huge = spec(1, 1, i64::MAX, Batch, Host);
    let all = validate::copy_cache(huge, huge, args(0, 0, i64::MAX as u64 - 1, -1)).unwrap();
    assert_eq!((listed(&all)[0].src, listed(&all)[0].len), (i64::MAX as u64 - 1, 1));
    let many = spec(1, 1 << 40, 1 << 22, Batch, Host);
    let last = validate::copy_cache(many, many, args(u32::MAX, u32::MAX, 1, 1)).unwrap();
    assert_eq!(listed(&last)[0].dst, (u64::from(u32::MAX) << 22) + 1);
}

#[test]
fn copies_and_swaps_of_blocks() {
    let (cache, local) = (spec(2, 20, 128, Blocks, Device), spec(2, 10, 128, Blocks, Host));
    let slots = |rows, placement| spec(2, rows, 128, Batch, placement);
    let done = validate::copy_blocks(cache, &[(0, 19), (19, 0), (5, 5)]).unwrap();
    let block = |src: u64, dst: u64| Piece { src: src * 128, dst: dst * 128, len: 128 };
    assert_eq!(listed(&done), [block(0, 19), block(19, 0), block(5, 5)]);
    assert_eq!(
        (&done.src_rows[..], &done.dst_rows[..], done.num_tensors),
        (&[0, 19, 5][..], &[19, 0, 5][..], 2)
    );
    assert_eq!(listed(&validate::copy_blocks(cache, &[]).unwrap()), []);
    refused(validate::copy_blocks(slots(20, Device), &[]), &["cache is a continuous cache", "blocks"]);
    for bad in [-1, 20, i64::MIN, i64::MAX, 1 << 32] {
        let text = bad.to_string();
        refused(validate::copy_blocks(cache, &[(0, 1), (bad, 1)]), &["source block", &text, "0 to 19"]);
        refused(validate::copy_blocks(cache, &[(0, 1), (1, bad)]), &["destination block", &text, "0 to 19"]);
    }
    // 2^23 blocks of 2^30 bytes in 2^10 tensors are 2^63 bytes.
    let (huge, pairs) = (spec(1 << 10, 1 << 20, 1 << 30, Blocks, Device), vec![(0, 1); 1 << 23]);
    refused(validate::copy_blocks(huge, &pairs), &["8589934592 blocks", "2^63"]);
    validate::copy_blocks(huge, &pairs[1..]).unwrap();

    assert_eq!(listed(&validate::swap_blocks(local, cache, &[(9, 19)]).unwrap()), [block(9, 19)]);
    assert_eq!(listed(&validate::swap_blocks(cache, local, &[]).unwrap()), []);
    // In the order of the contract. Each of the first five also breaks the rule of a later case.
    let cases: [(CacheLayout, CacheLayout, (i64, i64), &[&str]); 10] = [
        (slots(10, Host), spec(2, 20, 64, Batch, Device), (0, 0), &["src_cache", "blocks cache"]),
        (local, spec(2, 10, 64, Batch, Device), (0, 0), &["dst_cache", "blocks cache"]),
        (local, spec(3, 20, 64, Blocks, Host), (99, 0), &["block sizes", "128", "64"]),
        (local, spec(3, 20, 128, Blocks, Device), (10, 0), &["num_tensors", "2", "3"]),
        (local, local, (10, 0), &["source block=10", "0 to 9"]),
        (local, cache, (0, 20), &["destination block=20", "0 to 19"]),
        (cache, local, (20, 0), &["source block=20", "0 to 19"]),
        (cache, local, (0, 10), &["destination block=10", "0 to 9"]),
        (local, local, (0, 0), &["placements", "host"]),
        (cache, cache, (0, 0), &["placements", "device"]),
    ];
    for (src, dst, pair, facts) in cases {
        refused(validate::swap_blocks(src, dst, &[pair]), facts);
    }
    // A row that a plan cannot name is refused after all of these.
    let wide = |placement| spec(1, (1 << 32) + 2, 1, Blocks, placement);
    let swap = |dst, pairs: &[(i64, i64)]| validate::swap_blocks(wide(Host), dst, pairs);
    refused(swap(wide(Host), &[(0, 1 << 32)]), &["placements", "host"]);
    let mut moves = swap(wide(Device), &[(1, 2), (0, 1 << 32), ((1 << 32) + 1, 0)]).unwrap();
    let error = refused(
        CopyPlan::moves_in_order(&mut moves, CacheCount::Two),
        &["destination block=4294967296 is out of range (0 to 4294967295)"],
    );
    assert_eq!(error.fact("position"), Some("1"));
}

#[test]
fn single_values() {
    for (name, low, high) in [
        ("device_id", 0, i64::from(i32::MAX)),
        ("sync_kv_timeout", 1, i64::MAX),
        ("link_total_time", 0, i64::from(u32::MAX)),
        ("link_retry_count", 1, 100),
        ("copy_workers", 1, 256),
        ("link_heartbeat", 1, 3_600_000),
        ("link_silence", 2, 86_400_000),
        ("link_pin_limit", 1, 86_400_000),
        ("link_streams", 0, 16),
        ("link_remote_memory", 0, i64::MAX),
        ("rank_port", 1, 65_535),
        ("batch_dim_index", 0, 3),
        ("seq_len_dim_index", -1, 3),
    ] {
        let check = |value| match name {
            "batch_dim_index" => validate::dimensions(4, value, -1),
            "seq_len_dim_index" => validate::dimensions(4, 0, value),
            _ => options::check_number(name, value),
        };
        check(low).unwrap();
        check(high).unwrap();
        for bad in [low.checked_sub(1), high.checked_add(1), Some(i64::MIN)].into_iter().flatten() {
            refused(check(bad), &[&format!("{name}={bad}")]);
        }
    }
    validate::dimensions(1, 0, -1).unwrap();
    refused(validate::dimensions(0, 0, -1), &["shape", "at least one"]);
    for (shift, valid) in
        [(9, false), (10, true), (30, true), (31, false), (1 << 32, false), ((1 << 32) + 16, false)]
    {
        assert_eq!(options::page_shift(shift).is_ok(), valid, "{shift}");
    }
    for share in [0.0, -0.0, 0.5, 1.0] {
        options::mem_utilization(share).unwrap();
    }
    for share in [-0.1, 1.000_001, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refused(options::mem_utilization(share), &["mem_utilization", "0.0 to 1.0"]);
    }
    let roles = [0, 1, 2, 3, 4, -1, i64::MAX].map(|value| Role::from_value(value).map(Role::name));
    assert_eq!(roles, [None, Some("Prompt"), Some("Decoder"), Some("Mix"), None, None, None]);
}
