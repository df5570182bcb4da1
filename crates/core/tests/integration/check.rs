//! Every refusal: its kind, and the facts in its text; and that what is legal passes.

use std::collections::BTreeMap;
use std::time::Duration;

use llm_datadist_core::testing::config::{LinkConfig, Token, TransportChoice};
use llm_datadist_core::testing::validate::{self, CopyArgs, Pools, Side};
use llm_datadist_core::{
    CacheDesc, CacheKey, CacheKind, ClusterId, Config, DataType, Error, ErrorKind, Geometry, HugeChoice,
    KernelChoice, Placement, PoolConfig, Result, Role, SwapInPath,
};

use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

/// Refused as an argument without meaning, and the text says `facts`.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, facts: &[&str]) -> Error {
    refused_as(ErrorKind::InvalidArgument, result, facts)
}

#[track_caller]
fn refused_as<T: std::fmt::Debug>(kind: ErrorKind, result: Result<T>, facts: &[&str]) -> Error {
    let error = result.expect_err(&format!("should be refused, with {facts:?}"));
    assert_eq!(error.kind(), kind, "{error}");
    assert!(!facts.is_empty());
    for fact in facts {
        assert!(error.to_string().contains(fact), "{error}: no {fact:?}");
    }
    error
}

fn desc(num_tensors: u32, shape: &[i64], data_type: DataType, placement: Placement) -> CacheDesc {
    CacheDesc { num_tensors, shape: shape.to_vec(), data_type, placement }
}

fn bytes(num_tensors: u32, shape: &[i64]) -> CacheDesc {
    desc(num_tensors, shape, DataType::Uint8, Device)
}

const BOTH: Pools = Pools { host: true, device: true };

#[test]
fn shapes() {
    let geometry =
        |num_tensors, shape: &[i64], data_type| Geometry::new(&desc(num_tensors, shape, data_type, Host));
    let sizes = |g: Geometry| (g.num_tensors(), g.rows(), g.row_bytes(), g.tensor_bytes());
    assert_eq!(sizes(geometry(3, &[4, 16], DataType::Int32).unwrap()), (3, 4, 64, 256));
    assert_eq!(sizes(geometry(1, &[5], DataType::String).unwrap()), (1, 5, 16, 80));
    assert_eq!(sizes(geometry(1, &[1; 31], DataType::Bool).unwrap()), (1, 1, 1, 1));
    refused(geometry(0, &[1], DataType::Bool), &["num_tensors=0", "1 to 16777216"]);
    refused(geometry(u32::MAX, &[1], DataType::Bool), &["num_tensors=4294967295", "1 to 16777216"]);
    refused(geometry(1, &[], DataType::Bool), &["shape=[]", "1 to 31"]);
    refused(geometry(1, &[1; 32], DataType::Bool), &["shape", "1 to 31"]);
    for bad in [&[0][..], &[-1], &[4, 0, 4], &[4, -4], &[i64::MIN], &[-1, i64::MIN]] {
        refused(geometry(1, bad, DataType::Bool), &[&format!("{bad:?}"), "above 0"]);
    }
    // One below 2^63 bytes, and everything from there on, however it is made up.
    assert_eq!(geometry(1, &[i64::MAX], DataType::Bool).unwrap().tensor_bytes(), i64::MAX as u64);
    assert_eq!(geometry(3, &[1 << 61], DataType::Uint8).unwrap().rows(), 1 << 61);
    for (num_tensors, shape, data_type) in [
        (1, vec![1 << 62], DataType::Int16),
        (1, vec![1 << 32, 1 << 31], DataType::Bool),
        (1, vec![1 << 32, 1 << 32], DataType::Bool),
        (1, vec![i64::MAX, i64::MAX, i64::MAX], DataType::String),
        (1, vec![3; 31], DataType::Int8).clone(),
        (1, vec![i64::MAX], DataType::String),
        (2, vec![1 << 62], DataType::Bool),
        (4, vec![1 << 62], DataType::Bool),
        (1 << 24, vec![1 << 39], DataType::Bool),
        (1 << 24, vec![i64::MAX], DataType::Bool),
    ] {
        if shape == [3; 31] {
            assert!(geometry(1, &shape, data_type).is_ok(), "3^31 is below 2^63");
            continue;
        }
        refused(geometry(num_tensors, &shape, data_type), &["2^63", "shape"]);
    }
    assert_eq!(DataType::ALL.len(), 14);
    for data_type in DataType::ALL {
        assert_eq!(DataType::from_value(*data_type as i64), Some(*data_type));
        assert_eq!(geometry(1, &[2], *data_type).unwrap().tensor_bytes(), 2 * data_type.bytes());
        assert!(data_type.name().starts_with("DT_"));
    }
    for unknown in [-1, 5, 14, 26, 28, i64::MIN, i64::MAX] {
        assert_eq!(DataType::from_value(unknown), None);
    }
}

#[test]
fn allocate() {
    let key = |id| Some(CacheKey::Request { model: 0, id });
    let nowhere = Pools::default();
    refused(validate::allocate(&bytes(0, &[4]), Batch, &[], BOTH), &["num_tensors=0"]);
    refused(validate::allocate(&bytes(0, &[4]), Batch, &[], nowhere), &["num_tensors=0"]);
    refused(validate::allocate(&bytes(1, &[4]), Batch, &[], nowhere), &["device", "mem_pool_cfg"]);
    let host = desc(1, &[4], DataType::Uint8, Host);
    let only_device = Pools { host: false, device: true };
    refused(validate::allocate(&host, Batch, &[], only_device), &["host", "host_mem_pool_cfg"]);
    refused(validate::allocate(&bytes(1, &[0]), Batch, &[], BOTH), &["shape=[0]"]);
    refused(
        validate::allocate(&bytes(1, &[2, 9]), Batch, &[key(1), None, None], BOTH),
        &["len(cache_keys)=3", "at most 2"],
    );
    let keys = [key(1), None, key(2), key(1)];
    let checked = validate::allocate(&bytes(1, &[4, 9]), Batch, &keys, BOTH).unwrap();
    assert_eq!(checked.keys, [(2, key(2).unwrap()), (3, key(1).unwrap())]);
    assert_eq!((checked.side.kind, checked.side.placement), (Batch, Device));
    assert_eq!(validate::bindings(&[]).unwrap(), []);
    assert_eq!(validate::bindings(&[None]).unwrap(), []);
    assert_eq!(validate::bindings(&[key(5)]).unwrap(), [(0, key(5).unwrap())]);
}

#[test]
fn addresses() {
    let two = desc(2, &[4, 8], DataType::Int32, Host);
    refused(validate::addresses(&two, Batch, &[]), &["addrs=[]"]);
    refused(validate::addresses(&two, Batch, &[4096]), &["len(addrs)=1", "num_tensors=2"]);
    refused(validate::addresses(&two, Batch, &[1, 2, 3]), &["len(addrs)=3"]);
    refused(validate::addresses(&two, Batch, &[4096, 0]), &["addrs[1]=0", "above 0"]);
    refused(validate::addresses(&two, Batch, &[u64::MAX - 127, 4096]), &["addrs[0]", "128 bytes", "2^64"]);
    refused(
        validate::addresses(&desc(0, &[4], DataType::Int8, Host), Batch, &[1]),
        &["len(addrs)=1", "num_tensors=0"],
    );
    refused(validate::addresses(&desc(1, &[-4], DataType::Int8, Host), Batch, &[1]), &["shape=[-4]"]);
    let side = validate::addresses(&two, Blocks, &[u64::MAX - 128, 1]).unwrap();
    assert_eq!((side.kind, side.placement, side.geometry.row_bytes()), (Blocks, Host, 32));
}

fn side(num_tensors: u32, rows: i64, row_bytes: i64, kind: CacheKind, placement: Placement) -> Side {
    let desc = desc(num_tensors, &[rows, row_bytes], DataType::Uint8, placement);
    Side { geometry: Geometry::new(&desc).unwrap(), kind, placement }
}

fn args(dst: u32, src: u32, offset: u64, size: i64) -> CopyArgs {
    CopyArgs { dst_batch_index: dst, src_batch_index: src, offset, size }
}

#[test]
fn copy_cache() {
    let (src, dst) = (side(2, 3, 100, Batch, Device), side(2, 4, 64, Batch, Host));
    let copy = |args| validate::copy_cache(src, dst, args);
    let done = copy(args(3, 2, 10, 54)).unwrap();
    assert_eq!((done.src_row, done.dst_row, done.src_offset, done.dst_offset), (2, 3, 210, 202));
    assert_eq!((done.bytes, done.num_tensors), (54, 2));
    for size in [0, -2, i64::MIN] {
        refused(copy(args(0, 0, 0, size)), &[&format!("size={size}"), "-1, or a number of bytes above 0"]);
        refused(validate::copy_size(size), &["size"]);
    }
    refused(copy(args(4, 0, 0, 1)), &["dst_batch_index=4", "0 to 3"]);
    refused(copy(args(0, 3, 0, 1)), &["src_batch_index=3", "0 to 2"]);
    refused(copy(args(u32::MAX, 0, 0, 1)), &["dst_batch_index=4294967295"]);
    refused(copy(args(0, 0, 64, 1)), &["offset=64", "64 bytes"]);
    refused(copy(args(0, 0, u64::MAX, -1)), &["offset=18446744073709551615"]);
    refused(copy(args(0, 0, 0, -1)), &["size=-1", "100 bytes", "100 and 64"]);
    refused(copy(args(0, 0, 10, 55)), &["size=55", "offset 10"]);
    refused(copy(args(0, 0, 63, i64::MAX)), &["size=9223372036854775807"]);
    let more = validate::copy_cache(src, side(3, 4, 100, Batch, Host), args(0, 0, 0, 1));
    refused_as(ErrorKind::TensorCountMismatch, more, &["2 tensors", "3"]);
    // The other way −1 is the rest of the smaller slot, and fits.
    assert_eq!(validate::copy_cache(dst, src, args(0, 0, 60, -1)).unwrap().bytes, 4);
    // The largest slots there are.
    let huge = side(1, 1, i64::MAX, Batch, Host);
    let all = validate::copy_cache(huge, huge, args(0, 0, i64::MAX as u64 - 1, -1)).unwrap();
    assert_eq!((all.src_offset, all.bytes), (i64::MAX as u64 - 1, 1));
    let many = side(1, 1 << 40, 1 << 22, Batch, Host);
    let last = validate::copy_cache(many, many, args(u32::MAX, u32::MAX, 1, 1)).unwrap();
    assert_eq!(last.dst_offset, (u64::from(u32::MAX) << 22) + 1);
    // From a device only.
    refused(
        validate::copy_kv_cache(dst, src, args(0, 0, 0, 1)),
        &["src_cache", "host", "src_cache is in host memory"],
    );
    assert_eq!(validate::copy_kv_cache(src, dst, args(3, 2, 10, 54)).unwrap(), done);
    refused(validate::batch_cache("src", Blocks), &["src", "blocks cache", "continuous"]);
    assert!(validate::batch_cache("src", Batch).is_ok());
}

#[test]
fn blocks() {
    let cache = side(2, 20, 128, Blocks, Device);
    let done = validate::copy_blocks(cache, &[(0, 19), (19, 0), (5, 5)]).unwrap();
    assert_eq!(
        (done.pairs.as_slice(), done.block_bytes, done.num_tensors),
        (&[(0, 19), (19, 0), (5, 5)][..], 128, 2)
    );
    assert_eq!(validate::copy_blocks(cache, &[]).unwrap().pairs, []);
    refused(
        validate::copy_blocks(side(2, 20, 128, Batch, Device), &[]),
        &["cache is a continuous cache", "blocks"],
    );
    for bad in [-1, 20, i64::MIN, i64::MAX, 1 << 32] {
        let text = bad.to_string();
        refused(validate::copy_blocks(cache, &[(0, 1), (bad, 1)]), &["source block", &text, "0 to 19"]);
        refused(validate::copy_blocks(cache, &[(0, 1), (1, bad)]), &["destination block", &text, "0 to 19"]);
    }
    let local = side(2, 10, 128, Blocks, Host);
    assert_eq!(validate::swap_blocks(local, cache, &[(9, 19)]).unwrap().pairs, [(9, 19)]);
    assert_eq!(validate::swap_blocks(cache, local, &[]).unwrap().pairs, []);
    refused(validate::swap_blocks(local, cache, &[(10, 0)]), &["source block=10", "0 to 9"]);
    refused(validate::swap_blocks(local, cache, &[(0, 20)]), &["destination block=20", "0 to 19"]);
    refused(validate::swap_blocks(cache, local, &[(0, 10)]), &["destination block=10", "0 to 9"]);
    let mismatch = |src, dst, facts: &[&str]| {
        refused_as(ErrorKind::InvalidArgument, validate::swap_blocks(src, dst, &[(0, 0)]), facts)
    };
    mismatch(local, side(2, 20, 64, Blocks, Device), &["block sizes", "128", "64"]);
    mismatch(local, side(3, 20, 128, Blocks, Device), &["num_tensors", "2", "3"]);
    mismatch(local, local, &["placements", "host"]);
    mismatch(cache, cache, &["placements", "device"]);
    refused(validate::swap_blocks(side(2, 10, 128, Batch, Host), cache, &[]), &["src_cache", "blocks cache"]);
    refused(
        validate::swap_blocks(local, side(2, 10, 128, Batch, Device), &[]),
        &["dst_cache", "blocks cache"],
    );
    // The order of the contract: kinds, sizes, counts, indices, placements.
    refused(validate::swap_blocks(local, local, &[(10, 0)]), &["source block"]);
    refused_as(
        ErrorKind::InvalidArgument,
        validate::swap_blocks(local, side(3, 20, 64, Blocks, Host), &[(99, 0)]),
        &["block sizes"],
    );
}

fn read(options: &[(&str, &str)]) -> Result<Config> {
    let options: BTreeMap<String, String> =
        options.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    validate::config(Role::Prompt, ClusterId(7), &options)
}

#[test]
fn pool_texts() {
    let device = |text: &str| read(&[("llm.MemPoolConfig", text)]).map(|config| config.device_pool);
    let host = |text: &str| read(&[("llm.HostMemPoolConfig", text)]).map(|config| config.host_pool);
    let pool = |memory_size, page_shift| Some(PoolConfig { memory_size, page_shift });
    let good = [
        (r#"{"memory_size": 18737418240, "page_shift": 16}"#, pool(18_737_418_240, 16)),
        (r#"{"memory_size": 65536}"#, pool(65_536, 16)),
        (r#"{"memory_size": "64KiB"}"#, pool(65_536, 16)),
        (r#"{"memory_size": "64MiB"}"#, pool(64 << 20, 16)),
        (r#"{"memory_size": "3GiB", "page_shift": 20}"#, pool(3 << 30, 20)),
        (r#"{"memory_size": "20GiB"}"#, pool(20 << 30, 16)),
        ("\t\r\n {\"page_shift\":10,\"memory_size\":1024} \n", pool(1024, 10)),
        (r#"{"memory_size": 1073741824, "page_shift": 30}"#, pool(1 << 30, 30)),
        (r#"{"memory_size": 65537, "other": [1, {"x": null}], "größe": "🦀"}"#, pool(65_537, 16)),
        (r#"{"memory_size": 1, "memory_size": 131072}"#, pool(131_072, 16)), // as JSON readers do: the last one
        (r#"{"memory\u005fsize": 65536}"#, pool(65_536, 16)),
        ("", None),
    ];
    for (text, expected) in good {
        assert_eq!(device(text).unwrap(), expected, "{text}");
        assert_eq!(host(text).unwrap(), expected, "{text}");
    }
    assert_eq!(device(r#"{"memory_size": "1TiB"}"#).unwrap(), pool(1 << 40, 16));
    refused(host(r#"{"memory_size": "1TiB"}"#), &["memory_size=\"1TiB\"", "21474836480"]);
    let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let inside = format!("{{\"memory_size\": 65536, \"x\": {}1{}}}", "[".repeat(1000), "]".repeat(1000));
    let long = format!("{{\"memory_size\": \"{}\"}}", "ü".repeat(50_000));
    let bad: Vec<(&str, &[&str])> = vec![
        (" ", &["not JSON"]),
        ("{", &["not JSON"]),
        ("nonsense", &["not JSON"]),
        ("{'memory_size': 65536}", &["not JSON"]),
        ("{\"memory_size\": 65536,}", &["not JSON"]),
        ("{\"memory_size\": 65536} x", &["not JSON"]),
        ("\u{feff}{\"memory_size\": 65536}", &["not JSON"]),
        ("{\"memory_size\": NaN}", &["not JSON"]),
        ("{\"memory_size\": Infinity}", &["not JSON"]),
        ("{\"memory_size\": 0x10000}", &["not JSON"]),
        ("{\"memory_size\": 65_536}", &["not JSON"]),
        ("{\"memory_size\": 065536}", &["not JSON"]),
        ("{\"memory_size\": +65536}", &["not JSON"]),
        ("{\"memory_size\": }", &["not JSON"]),
        ("{\"memory_size\": \u{0663}\u{0662}}", &["not JSON"]),
        (&nested, &["not JSON"]),
        (&inside, &["not JSON"]),
        ("[]", &["one JSON object"]),
        ("[{\"memory_size\": 65536}]", &["one JSON object"]),
        ("null", &["one JSON object"]),
        ("65536", &["one JSON object"]),
        ("\"memory_size\"", &["one JSON object"]),
        ("{}", &["memory_size is missing"]),
        ("{\"page_shift\": 16}", &["memory_size is missing"]),
        ("{\"Memory_Size\": 65536}", &["memory_size is missing"]),
        ("{\"memory_size\": 0}", &["memory_size=0", "above 0"]),
        ("{\"memory_size\": -1}", &["memory_size=-1"]),
        ("{\"memory_size\": -0}", &["memory_size"]),
        ("{\"memory_size\": 1e6}", &["memory_size"]),
        ("{\"memory_size\": 65536.0}", &["memory_size=65536.0"]),
        ("{\"memory_size\": \"65536\"}", &["memory_size=\"65536\"", "a text with a unit"]),
        ("{\"memory_size\": \"64 MiB\"}", &["memory_size=\"64 MiB\"", "KiB, MiB, GiB, TiB"]),
        ("{\"memory_size\": \"64mib\"}", &["memory_size"]),
        ("{\"memory_size\": \"64MB\"}", &["memory_size"]),
        ("{\"memory_size\": \"MiB\"}", &["memory_size"]),
        ("{\"memory_size\": \"1.5MiB\"}", &["memory_size"]),
        ("{\"memory_size\": \"-1MiB\"}", &["memory_size"]),
        ("{\"memory_size\": \"0MiB\"}", &["memory_size"]),
        ("{\"memory_size\": \"16777216TiB\"}", &["memory_size"]),
        ("{\"memory_size\": true}", &["memory_size=true"]),
        ("{\"memory_size\": null}", &["memory_size=null"]),
        ("{\"memory_size\": [65536]}", &["memory_size"]),
        ("{\"memory_size\": {\"a\": 1}}", &["memory_size"]),
        ("{\"memory_size\": 18446744073709551616}", &["memory_size"]),
        ("{\"memory_size\": 1e400}", &["not JSON"]),
        ("{\"memory_size\": 99999999999999999999999999999999}", &["memory_size"]),
        (&long, &["memory_size"]),
        ("{\"memory_size\": 65535}", &["memory_size=65535", "65536"]),
        ("{\"memory_size\": 1073741823, \"page_shift\": 30}", &["1073741824"]),
    ];
    let shifts = [
        "9",
        "31",
        "-1",
        "16.0",
        "1e1",
        "\"16\"",
        "true",
        "null",
        "[16]",
        "18446744073709551615",
        "4294967312",
    ];
    let shifts: Vec<String> = shifts
        .iter()
        .map(|shift| format!("{{\"memory_size\": 4294967296, \"page_shift\": {shift}}}"))
        .collect();
    let bad =
        bad.into_iter().chain(shifts.iter().map(|text| (text.as_str(), &["page_shift", "10 to 30"][..])));
    let mut looked_at = 0;
    for (text, facts) in bad {
        let error = refused(device(text), facts);
        assert_eq!(error.fact("option"), Some("mem_pool_cfg"));
        assert!(text.starts_with(error.fact("text").unwrap().trim_end_matches('…')));
        assert!(
            error.to_string().len() < 1000,
            "a text of {} bytes makes a message of {}",
            text.len(),
            error.to_string().len()
        );
        assert_eq!(refused(host(text), facts).fact("option"), Some("host_mem_pool_cfg"));
        looked_at += 1;
    }
    assert_eq!(looked_at, 49 + 11);
    // Too many pages; the host limit.
    let limit = u64::from(u32::MAX) << 10;
    let text = |size: u64| format!("{{\"memory_size\": {size}, \"page_shift\": 10}}");
    assert_eq!(device(&text(limit - 1)).unwrap(), pool(limit - 1, 10));
    refused(device(&text(limit)), &["2^32-1 pages"]);
    refused(device(&text(u64::MAX)), &["2^32-1 pages"]);
    assert_eq!(host(&text(20 << 30)).unwrap(), pool(20 << 30, 10));
    refused(host(&text((20 << 30) + 1)), &["memory_size=21474836481", "21474836480"]);
}

#[test]
fn option_texts() {
    let config = read(&[]).unwrap();
    assert_eq!((config.role, config.cluster), (Role::Prompt, ClusterId(7)));
    assert_eq!((config.sync_timeout, config.device_id), (Duration::from_secs(1), 0));
    assert_eq!((config.device_pool, config.host_pool, config.remote_accessible), (None, None, false));
    assert_eq!((config.swap_in, config.kernel), (SwapInPath::Auto, KernelChoice::Auto));
    assert_eq!(config.huge_pages, HugeChoice::Auto);

    let config = read(&[
        ("llm.SyncKvCacheWaitTime", "9223372036854775807"),
        ("ge.exec.deviceId", "2147483647"),
        ("llm.EnableCacheManager", "1"),
        ("llm.EnableRemoteCacheAccessible", "1"),
        ("llm.CopyWorkers", "256"),
        ("llm.SwapInPath", "ring"),
        ("llm.CopyKernel", "plain"),
        ("llm.HugePages", "eager"),
        ("llm.LinkTotalTime", "0"),
        ("llm.LinkRetryCount", "100"),
        ("llm.RdmaTrafficClass", "4294967295"),
        ("llm.RdmaServiceLevel", "0"),
        ("llm.TransferBackend", "hixl"),
        ("unknown", "whatever"),
    ])
    .unwrap();
    assert_eq!(config.sync_timeout, Duration::from_millis(i64::MAX as u64));
    assert_eq!(
        (config.device_id, config.remote_accessible, config.copy_workers),
        (i32::MAX as u32, true, Some(256))
    );
    assert_eq!((config.swap_in, config.kernel), (SwapInPath::Ring, KernelChoice::Plain));
    assert_eq!(config.huge_pages, HugeChoice::Eager);
    let words = ["auto", "off", "merge", "merge_registered", "eager"];
    let choices = words.map(|word| read(&[("llm.HugePages", word)]).unwrap().huge_pages);
    let all = [
        HugeChoice::Auto,
        HugeChoice::Off,
        HugeChoice::Merge,
        HugeChoice::MergeRegistered,
        HugeChoice::Eager,
    ];
    assert_eq!(choices, all);

    let not_a_number = [
        "",
        " ",
        "1 ",
        " 1",
        "+1",
        "-1",
        "0x10",
        "1e3",
        "1.0",
        "1_000",
        "NaN",
        "true",
        "0;1",
        "١",
        "99999999999999999999",
    ];
    let mut looked_at = 0;
    for (key, more) in [
        ("llm.SyncKvCacheWaitTime", &["0", "9223372036854775808"][..]),
        ("ge.exec.deviceId", &["2147483648"]),
        ("llm.LinkTotalTime", &["4294967296"]),
        ("llm.LinkRetryCount", &["0", "101"]),
        ("llm.RdmaTrafficClass", &["4294967296"]),
        ("llm.RdmaServiceLevel", &["4294967296"]),
        ("llm.CopyWorkers", &["0", "257"]),
        ("llm.EnableCacheManager", &["2", "01", "yes", "True"]),
        ("llm.EnableRemoteCacheAccessible", &["2", "10"]),
        ("llm.SwapInPath", &["Auto", "ring ", "directly"]),
        ("llm.CopyKernel", &["PLAIN", "fast"]),
        ("llm.HugePages", &["Auto", "merge-registered"]),
        ("llm.TransferBackend", &["HIXL", "nixl"]),
        ("llm.LinkAcceptRemote", &["2", "yes"]),
        ("llm.LinkHeartbeat", &["0", "3600001"]),
        ("llm.LinkSilence", &["0", "1999", "86400001"]),
        ("llm.LinkTransport", &["SHM", "rdma"]),
        ("llm.LinkStreams", &["0", "17"]),
        ("llm.LinkRemoteMemory", &["-1", "1G", "9223372036854775808"]),
        ("llm.RankPort", &["0", "65536"]),
    ] {
        for text in not_a_number.iter().chain(more) {
            let error = read(&[(key, text)]).map(|_| ()).expect_err(&format!("{key} = {text:?}"));
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{key} = {text:?}");
            let known = [
                "sync_kv_timeout",
                "device_id",
                "link_total_time",
                "link_retry_count",
                "copy_workers",
                "swap_in_path",
                "copy_kernel",
                "huge_pages",
                "link_heartbeat",
                "link_silence",
                "link_transport",
                "link_streams",
                "link_remote_memory",
                "rank_port",
            ];
            let names_it =
                error.to_string().contains(key) || known.iter().any(|name| error.to_string().contains(name));
            assert!(names_it, "{error}");
            looked_at += 1;
        }
        let long = read(&[(key, &"x".repeat(100_000))]).map(|_| ()).unwrap_err().to_string();
        assert!(long.len() < 1000, "{key}: a message of {} bytes", long.len());
    }
    assert_eq!(looked_at, 20 * 15 + 41);
}

#[test]
fn single_values() {
    for good in [0, 1, i64::from(i32::MAX)] {
        validate::number("device_id", good).unwrap();
    }
    for bad in [-1, i64::from(i32::MAX) + 1, i64::MIN, i64::MAX] {
        refused(validate::number("device_id", bad), &["device_id", &bad.to_string()]);
    }
    validate::number("sync_kv_timeout", 1).unwrap();
    validate::number("sync_kv_timeout", i64::MAX).unwrap();
    for bad in [0, -1, i64::MIN] {
        refused(
            validate::number("sync_kv_timeout", bad),
            &["sync_kv_timeout", &bad.to_string(), "milliseconds"],
        );
    }
    validate::number("link_total_time", 0).unwrap();
    refused(validate::number("link_total_time", -1), &["link_total_time=-1"]);
    for (value, ok) in [(0, false), (1, true), (100, true), (101, false), (i64::MIN, false)] {
        assert_eq!(validate::number("link_retry_count", value).is_ok(), ok);
    }
    for good in [0.0, -0.0, 0.5, 1.0] {
        validate::mem_utilization(good).unwrap();
    }
    for bad in [-0.1, 1.000_001, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refused(validate::mem_utilization(bad), &["mem_utilization", "0.0 to 1.0"]);
    }
    for (value, ok) in [(9, false), (10, true), (30, true), (31, false), (1 << 32, false), (u64::MAX, false)]
    {
        assert_eq!(validate::page_shift(value).is_ok(), ok, "{value}");
    }
    validate::dimensions(1, 0, -1).unwrap();
    validate::dimensions(4, 3, 3).unwrap();
    refused(validate::dimensions(0, 0, -1), &["shape", "at least one"]);
    for (batch, seq, name) in
        [(4, -1, "batch"), (-1, -1, "batch"), (0, 4, "seq_len"), (0, -2, "seq_len"), (0, i64::MIN, "seq")]
    {
        refused(validate::dimensions(4, batch, seq), &[name, "0 to 3"]);
    }
}

#[test]
fn an_engine_without_a_pool_says_so() {
    let config = Config::new(Role::Mix, ClusterId(u64::MAX));
    let engine = llm_datadist_core::DataDist::open(config).unwrap();
    refused(engine.allocate(&bytes(1, &[4]), Batch, &[]), &["mem_pool_cfg"]);
    assert!(engine.stats().device_pool.is_none());
    assert_eq!(
        [1, 2, 3].map(|value| Role::from_value(value).map(Role::name)),
        [Some("Prompt"), Some("Decoder"), Some("Mix")]
    );
    assert!([0, 4, -1, i64::MAX].iter().all(|value| Role::from_value(*value).is_none()));
}

#[test]
fn pairs_that_add_up_to_more_than_can_be_counted() {
    let huge = desc(1 << 10, &[1 << 20, 1 << 30], DataType::Uint8, Device);
    let side = Side { geometry: Geometry::new(&huge).unwrap(), kind: Blocks, placement: Device };
    // 2^23 blocks of 2^30 bytes in 2^10 tensors are 2^63 bytes.
    let pairs = vec![(0, 1); 1 << 23];
    refused(validate::copy_blocks(side, &pairs), &["8589934592 blocks", "2^63"]);
    validate::copy_blocks(side, &pairs[1..]).unwrap();
}

#[test]
fn a_blocks_cache_has_no_slots() {
    let geometry = Geometry::new(&bytes(1, &[4, 16])).unwrap();
    let side = |kind| Side { geometry, kind, placement: Device };
    let args = CopyArgs { dst_batch_index: 0, src_batch_index: 0, offset: 0, size: -1 };
    refused(validate::copy_cache(side(Blocks), side(Batch), args), &["src is a blocks cache"]);
    refused(validate::copy_cache(side(Batch), side(Blocks), args), &["dst is a blocks cache"]);
    validate::copy_cache(side(Batch), side(Batch), args).unwrap();
}

#[test]
fn link_options() {
    let links = |options: &[(&str, &str)]| read(options).map(|config| config.links);
    assert_eq!(links(&[]).unwrap(), LinkConfig::default());
    let all = links(&[
        ("llm.ListenIp", "127.0.0.1"),
        ("llm.ListenPort", "0"),
        ("llm.LinkTotalTime", "7"),
        ("llm.LinkRetryCount", "100"),
        ("llm.TransferBackend", "hixl"),
        ("llm.LinkToken", "sixteen letters!"),
        ("llm.LinkAcceptRemote", "1"),
        ("llm.LinkHeartbeat", "250"),
        ("llm.LinkSilence", "500"),
        ("llm.LinkTransport", "tcp"),
        ("llm.LinkStreams", "16"),
        ("llm.LinkRemoteMemory", "12345678901"),
        ("llm.RankPort", "65535"),
        ("llm.RankHosts", r#"{"5": "[::1]:70", "192.0.2.9": "192.0.2.8:1"}"#),
    ])
    .unwrap();
    let hosts = [("192.0.2.9", "192.0.2.8:1"), ("5", "[::1]:70")];
    let expected = LinkConfig {
        pin_limit: Duration::from_secs(600),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        token: Some(Token::new("sixteen letters!")),
        token_file: None,
        accept_remote: true,
        heartbeat: Duration::from_millis(250),
        silence: Duration::from_millis(500),
        total: Duration::from_secs(7),
        retries: 100,
        transport: TransportChoice::Tcp,
        streams: 16,
        remote_memory: Some(12_345_678_901),
        rank_port: 65_535,
        rank_hosts: hosts.iter().map(|&(name, at)| (name.to_owned(), at.parse().unwrap())).collect(),
        both_ways: true,
    };
    assert_eq!(all, expected);
    // 0 seconds is what the environment says, and without one the default.
    let total = |given: &str, env: &str| {
        links(&[("llm.LinkTotalTime", given), ("env.HCCL_CONNECT_TIMEOUT", env)]).map(|links| links.total)
    };
    for (given, env, seconds) in [("0", "", 120), ("0", "0", 120), ("0", "600", 600), ("5", "600", 5)] {
        assert_eq!(total(given, env).unwrap(), Duration::from_secs(seconds), "{given}, {env}");
    }
    assert_eq!(links(&[("env.HCCL_CONNECT_TIMEOUT", "9")]).unwrap().total, Duration::from_secs(9));
    refused(total("0", "soon"), &["env.HCCL_CONNECT_TIMEOUT", "soon"]);
    // A slow heartbeat alone takes the silence along; a silence below two of them is refused.
    let slow = links(&[("llm.LinkHeartbeat", "4000")]).unwrap();
    assert_eq!(slow.silence, Duration::from_secs(8));
    assert_eq!(links(&[("llm.LinkHeartbeat", "10")]).unwrap().silence, LinkConfig::default().silence);
    refused(
        links(&[("llm.LinkHeartbeat", "4000"), ("llm.LinkSilence", "7999")]),
        &["link_silence=7999", "8000"],
    );
    assert_eq!(links(&[("llm.RankHosts", "")]).unwrap().rank_hosts.len(), 0);
}

#[test]
fn listening_addresses() {
    let listen = |options: &[(&str, &str)]| read(options).map(|config| config.links.listen);
    for (text, expected) in [
        ("127.0.0.1:26000", "127.0.0.1:26000"),
        ("0.0.0.0:0", "0.0.0.0:0"),
        ("[::1]:65535", "[::1]:65535"),
        ("[2001:db8::1]:7", "[2001:db8::1]:7"),
    ] {
        let (ip, port) = text.rsplit_once(':').unwrap();
        let expected = Some(expected.parse().unwrap());
        // As given, in both spellings, and as the Python front splits it.
        assert_eq!(listen(&[("llm.listenIpInfo", text)]).unwrap(), expected);
        assert_eq!(listen(&[("llm.ListenIpInfo", text)]).unwrap(), expected);
        let split = [("llm.listenIpInfo", text), ("llm.ListenIp", ip), ("llm.ListenPort", port)];
        assert_eq!(listen(&split).unwrap(), expected);
    }
    assert_eq!(listen(&[("llm.ListenIp", "::1"), ("llm.ListenPort", "1")]).unwrap(), "[::1]:1".parse().ok());
    assert_eq!(listen(&[("llm.listenIpInfo", ""), ("llm.ListenIp", "")]).unwrap(), None);
    for text in [
        "localhost:1",
        "127.0.0.1",
        "127.0.0.1:",
        ":1",
        "1:1",
        "127.0.0.1:65536",
        "127.0.0.1:+1",
        "127.0.0.1: 1",
        "::1:1",
        "[::1]",
        "[127.0.0.1]:1",
        "[::1:1",
        "127.1:1",
        "127.0.0.01:1",
        "127.0.0.1:1;127.0.0.1:2",
    ] {
        refused(listen(&[("llm.listenIpInfo", text)]), &["llm.listenIpInfo", text, "ip:port"]);
    }
    refused(
        listen(&[("llm.ListenIp", "node-a"), ("llm.ListenPort", "1")]),
        &["llm.ListenIp", "node-a", "not a host name"],
    );
    let split = [("llm.listenIpInfo", "node-a:1"), ("llm.ListenIp", "node-a"), ("llm.ListenPort", "1")];
    refused(listen(&split), &["llm.listenIpInfo=\"node-a:1\"", "not a host name"]);
    refused(
        listen(&[("llm.ListenIp", "::1"), ("llm.ListenPort", "70000")]),
        &["llm.ListenPort", "70000", "65535"],
    );
    refused(listen(&[("llm.ListenIp", "::1")]), &["llm.ListenIp", "together with llm.ListenPort"]);
    refused(listen(&[("llm.ListenPort", "1")]), &["llm.ListenPort", "together with llm.ListenIp"]);
}

#[test]
fn a_token_never_shows() {
    for (token, ok) in
        [("", false), ("fifteen-letters", false), ("sixteen letters!", true), ("ключключключключ", true)]
    {
        let read = read(&[("llm.LinkToken", token)]);
        assert_eq!(read.is_ok(), ok, "{} bytes", token.len());
        match read {
            Ok(config) => {
                assert_eq!(config.links.token.as_ref().unwrap().bytes(), token.as_bytes());
                assert!(!format!("{config:?}").contains(token));
            }
            Err(error) => {
                let text = format!("{error} {error:?}");
                assert!(token.is_empty() || !text.contains(token), "{text}");
                let count = format!("({} characters, not shown)", token.chars().count());
                assert!(
                    text.contains("link_token") && text.contains(&count) && text.contains("at least 16"),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn token_comes_from_an_option_or_from_a_file() {
    let file = read(&[("llm.LinkTokenFile", "/run/secrets/token")]).unwrap().links;
    assert!(file.token.is_none());
    assert_eq!(file.token_file, Some("/run/secrets/token".into()), "named, and not opened here");
    let both = read(&[("llm.LinkTokenFile", "/run/secrets/token"), ("llm.LinkToken", "sixteen letters!")]);
    refused(both, &["llm.LinkToken and llm.LinkTokenFile are both given"]);
    for path in ["", "/a\0b", "sixteen letters!", "run/secret", &format!("/{}", "x".repeat(4095))] {
        let count = format!("({} characters, not shown)", path.chars().count());
        let error =
            refused(read(&[("llm.LinkTokenFile", path)]), &["link_token_file", &count, "absolute path"]);
        assert!(path.is_empty() || !error.to_string().contains(path), "it may be the token itself: {error}");
    }
}

/// Everything that reads JSON refuses what is nested deeper than 64 levels, and says so. Nothing runs out of stack.
#[test]
fn deep_json_is_refused_like_other_malformed_json() {
    let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let objects = |levels: usize| format!("{}1{}", "{\"a\":".repeat(levels), "}".repeat(levels));
    let texts =
        [nested(65), objects(65), nested(100_000), "[{\"a\":".repeat(100_000), "[".repeat(10_000_000)];
    type Reader = fn(&str) -> Result<()>;
    let readers: [(&str, Reader); 5] = [
        ("mem_pool_cfg", |text| read(&[("llm.MemPoolConfig", text)]).map(drop)),
        ("host_mem_pool_cfg", |text| read(&[("llm.HostMemPoolConfig", text)]).map(drop)),
        ("rank_hosts", |text| validate::text("rank_hosts", text)),
        ("llm.BufPoolCfg", |text| validate::cpp::buffer_pool(text).map(drop)),
        ("rank_table", |text| {
            let clusters = [(ClusterId(1), 0), (ClusterId(2), 1)];
            validate::rank_table::ends(text, &clusters, ClusterId(1), &LinkConfig::default()).map(drop)
        }),
    ];
    for (name, reader) in readers {
        for text in &texts {
            let error = reader(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let shown = error.to_string();
            assert!(shown.contains("nested deeper than 64 levels") && shown.contains(name), "{shown}");
            assert!(shown.len() < 2000, "{} bytes", shown.len());
        }
        // 64 levels are read, and refused for what they say; brackets inside of a text do not count.
        let deep_text = format!("[{:?}]", "[".repeat(1000));
        for text in [nested(64), objects(64), deep_text, r#"["\\\"[[", "\\"]"#.into()] {
            let shown = reader(&text).unwrap_err().to_string();
            assert!(!shown.contains("nested deeper"), "{shown}");
        }
    }
}

#[test]
fn hosts_of_ranks() {
    validate::text("rank_hosts", "{}").unwrap();
    for (text, fact) in [
        ("", "not JSON"),
        ("x", "not JSON"),
        ("[]", "not an object"),
        (r#"{"5": 7}"#, "\"5\" is 7"),
        (r#"{"5": "node-a:7"}"#, "not a host name"),
        (r#"{"5": "192.0.2.1"}"#, "ip:port"),
        (r#"{"5": "192.0.2.1:0"}"#, "192.0.2.1:0"),
    ] {
        refused(validate::text("rank_hosts", text), &["rank_hosts", fact]);
    }
    let error = validate::text("rank_hosts", &format!(r#"{{"{}": 1}}"#, "x".repeat(100_000))).unwrap_err();
    assert!(error.to_string().len() < 1000);
}
