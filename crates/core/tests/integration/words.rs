//! The texts of one rule for the callers of both APIs, and the argument that each error names.

use std::sync::Arc;

use llm_datadist_core::bindings::{CacheLayout, Geometry, KvGeometry, Layers, Rows, SubRow, Words};
use llm_datadist_core::testing::plan::Side::{self, Destination, Source};
use llm_datadist_core::testing::validate::{self, CheckedTransfer, LocalCache, OwnerShare, RemoteCache};
use llm_datadist_core::{CacheKind, DataType, Error, ErrorKind, Placement, Result};

use crate::fixtures::{desc, kv_layout};
use crate::transfer::layers;

/// A rule that a call breaks, as the callers of an API see it.
type Broken = Box<dyn Fn(&'static Words) -> Result<()>>;
/// What an error says: its text, and the argument that it names.
type Said = (&'static str, Option<&'static str>);

/// A cache of blocks in device memory.
fn spec(num_tensors: u32, blocks: usize, block_bytes: usize) -> CacheLayout {
    let geometry = Geometry::new(&desc(Placement::Device, num_tensors, blocks, block_bytes)).unwrap();
    CacheLayout { geometry, kind: CacheKind::Blocks, placement: Placement::Device }
}

fn remote(layout: CacheLayout) -> RemoteCache {
    RemoteCache { layout, kv: None, row: 0, accessible: true }
}

fn blocks(local: &[i64], remote: &[i64]) -> Rows {
    Rows::Blocks { local: local.to_vec(), remote: remote.to_vec() }
}

fn part(src_offset: u64, dst_offset: u64, length: Option<u64>) -> SubRow {
    SubRow { src_offset, dst_offset, length }
}

fn sub_rows(part: SubRow) -> Rows {
    Rows::SubRows { local: vec![0], remote: vec![0], part }
}

/// A transfer between a local cache of 4 tensors of 10 blocks of 64 bytes and a remote cache.
fn transfer(local_side: Side, rows: Rows, layers: Layers, to: RemoteCache) -> Broken {
    between(local_side, spec(4, 10, 64).into(), rows, layers, to)
}

fn between(local_side: Side, local: LocalCache, rows: Rows, layers: Layers, to: RemoteCache) -> Broken {
    Box::new(move |words| {
        let checked = CheckedTransfer::new(words, local_side, local.clone(), rows.clone(), layers)?;
        checked.plan(&to, &OwnerShare::default()).map(drop)
    })
}

/// What rows mean in a cache of 4 tensors with 16 tokens of 512 bytes in a block.
fn kv_geometry(blocks: usize) -> KvGeometry {
    KvGeometry::new(kv_layout(16, 4, 8, 2), &spec(4, blocks, 512).geometry, DataType::Uint8).unwrap()
}

fn local_tokens(blocks: usize) -> LocalCache {
    LocalCache { kv: Some(Arc::new(kv_geometry(blocks))), ..spec(4, blocks, 512).into() }
}

fn remote_tokens(blocks: usize) -> RemoteCache {
    let LocalCache { layout, kv, .. } = local_tokens(blocks);
    RemoteCache { kv, ..remote(layout) }
}

/// A pull of tokens between caches with equal layouts, from and into two blocks.
fn tokens(src: Option<(u64, u64)>, dst: Option<(u64, u64)>) -> Broken {
    let range = |range: Option<(u64, u64)>| range.map(|(start, end)| start..end);
    let (local_tokens, remote_tokens) = (range(dst), range(src));
    let rows = Rows::Sequence { local: vec![0, 1], remote: vec![0, 1], local_tokens, remote_tokens };
    between(Destination, self::local_tokens(8), rows, Layers::ALL, self::remote_tokens(8))
}

#[track_caller]
fn says(broken: &Broken, original: Said, native: Said) {
    for (words, (text, argument)) in [(Words::ORIGINAL, original), (Words::NATIVE, native)] {
        let error = broken(words).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        let message = error.to_string();
        // The facts of an error are the same in both APIs.
        assert_eq!(message.split(" (src=").next().unwrap().split(" (local=").next(), Some(text));
        assert_eq!(error.argument_name(), argument, "{error}");
    }
}

#[test]
fn blocks_of_a_transfer() {
    let whole = || remote(spec(4, 10, 64));
    let pull = |local: &[i64], from: &[i64]| transfer(Destination, blocks(local, from), Layers::ALL, whole());
    let push = |local: &[i64], to: &[i64]| transfer(Source, blocks(local, to), Layers::ALL, whole());
    says(
        &pull(&[0, 4096], &[0, 1]),
        ("dst_blocks[1]=4096 is out of range (0 to 9)", Some("dst_blocks")),
        ("dst: block 4096 is out of range (0 to 9)", Some("dst")),
    );
    says(
        &push(&[-1], &[1]),
        ("src_blocks[0]=-1 is out of range (0 to 9)", Some("src_blocks")),
        ("src: block -1 is out of range (0 to 9)", Some("src")),
    );
    says(
        &pull(&[0], &[10]),
        ("src_blocks[0]=10 is out of range (0 to 9)", Some("src_blocks")),
        ("src: block 10 is out of range (0 to 9)", Some("src")),
    );
    says(
        &pull(&[], &[0]),
        ("dst_blocks=[] must be a list of at least one block", Some("dst_blocks")),
        ("dst: [] must be a list of at least one block", Some("dst")),
    );
    says(
        &push(&[], &[0]),
        ("src_blocks=[] must be a list of at least one block", Some("src_blocks")),
        ("src: [] must be a list of at least one block", Some("src")),
    );
    says(
        &pull(&[0, 1], &[0]),
        ("src_blocks has 1 entries, and dst_blocks has 2", None),
        ("src has 1 blocks, and dst has 2", None),
    );
}

#[test]
fn caches_of_a_transfer() {
    let slots = CacheLayout { kind: CacheKind::Batch, ..spec(4, 10, 64) };
    let one = || blocks(&[0], &[0]);
    let locally = |side| between(side, slots.into(), one(), Layers::ALL, remote(spec(4, 10, 64)));
    says(
        &locally(Destination),
        ("dst_cache is a continuous cache; this call needs a blocks cache", Some("dst_cache")),
        ("dst is a continuous cache; this call needs a blocks cache", Some("dst")),
    );
    says(
        &locally(Source),
        ("src_cache is a continuous cache; this call needs a blocks cache", Some("src_cache")),
        ("src is a continuous cache; this call needs a blocks cache", Some("src")),
    );
    says(
        &transfer(Destination, one(), Layers::ALL, remote(slots)),
        ("the remote cache is a continuous cache; this call needs a blocks cache", None),
        ("src is a continuous cache; this call needs a blocks cache", Some("src")),
    );
    let private = RemoteCache { accessible: false, ..remote(spec(4, 10, 64)) };
    says(
        &transfer(Source, one(), Layers::ALL, private),
        ("the remote cache was registered with remote_accessible False", None),
        ("dst was registered as not shared", Some("dst")),
    );
    says(
        &transfer(Destination, one(), Layers::ALL, remote(spec(4, 10, 32))),
        ("a block has 64 bytes in the local cache and 32 in the remote cache", None),
        ("a block has 64 bytes in dst and 32 in src", None),
    );
    says(
        &transfer(Destination, one(), Layers::ALL, remote(spec(6, 10, 64))),
        ("the remote cache has 6 tensors, and the local range has 4", None),
        ("src has 6 tensors, and the range of dst has 4", None),
    );
}

#[test]
fn layers_of_a_transfer() {
    let whole = || remote(spec(4, 10, 64));
    let one = || blocks(&[0], &[0]);
    let pull = |layers| transfer(Destination, one(), layers, whole());
    let push = |layers| transfer(Source, one(), layers, whole());
    says(
        &pull(layers(None, Some((1, 3)), 2)),
        ("dst_layer_range=tensors 2 to 5 must be within the 4 tensors of cache", Some("dst_layer_range")),
        ("dst: tensors 2 to 5 must be within the 4 tensors of dst", Some("dst")),
    );
    says(
        &push(layers(Some((1, 3)), Some((0, 2)), 2)),
        ("src_layer_range=tensors 2 to 5 must be within the 4 tensors of src_cache", Some("src_layer_range")),
        ("src: tensors 2 to 5 must be within the 4 tensors of src", Some("src")),
    );
    says(
        &transfer(Source, one(), Layers::ALL, remote(spec(2, 10, 64))),
        (
            "dst_layer_range=tensors 0 to 3 must be within the 2 tensors of the remote cache",
            Some("dst_layer_range"),
        ),
        ("dst: tensors 0 to 3 must be within the 2 tensors of dst", Some("dst")),
    );
    says(
        &pull(layers(Some((0, 3)), Some((0, 2)), 1)),
        ("src_layer_range names 3 tensors and 2 are written", Some("src_layer_range")),
        ("the layer range of src names 3 tensors and 2 are written", Some("src")),
    );
    says(
        &push(layers(Some((0, 3)), None, 1)),
        ("src_layer_range was given without dst_layer_range", Some("dst_layer_range")),
        ("the layer range of src was given without the layer range of dst", Some("dst")),
    );
    says(
        &push(layers(Some((2, 2)), Some((0, 1)), 1)),
        ("src_layer_range=2..2 must be a range of at least one layer", Some("src_layer_range")),
        ("the layer range of src: 2..2 must be a range of at least one layer", Some("src")),
    );
    says(
        &push(layers(Some((0, 2)), Some((0, 3)), 1)),
        ("src_layer_range has 2 layers and dst_layer_range 3", None),
        ("the layer range of src has 2 layers and the layer range of dst 3", None),
    );
    says(
        &pull(layers(None, None, 0)),
        ("tensor_num_per_layer=0 must be above 0", Some("tensor_num_per_layer")),
        ("tensors_per_layer=0 must be above 0", Some("tensors_per_layer")),
    );
    says(
        &pull(layers(None, Some((0, 1)), 3)),
        ("tensor_num_per_layer=3 must be a divisor of num_tensors, 4", Some("tensor_num_per_layer")),
        ("tensors_per_layer=3 must be a divisor of tensors, 4", Some("tensors_per_layer")),
    );
}

#[test]
fn parts_of_blocks() {
    let pull = |part| transfer(Destination, sub_rows(part), Layers::ALL, remote(spec(4, 10, 32)));
    says(
        &pull(part(0, 64, None)),
        ("dst_offset=64 is out of range (0 to 63)", Some("dst_offset")),
        ("dst: byte offset 64 is out of range (0 to 63)", Some("dst")),
    );
    says(
        &pull(part(32, 0, None)),
        ("src_offset=32 is out of range (0 to 31)", Some("src_offset")),
        ("src: byte offset 32 is out of range (0 to 31)", Some("src")),
    );
    says(
        &pull(part(8, 0, Some(40))),
        ("length=40 is out of range (1 to 24, the bytes of a row after src_offset=8)", Some("length")),
        ("src: length 40 is out of range (1 to 24, the bytes of a row after byte offset 8)", Some("src")),
    );
}

#[test]
fn ranges_of_tokens() {
    let without = between(
        Destination,
        spec(4, 10, 64).into(),
        Rows::Sequence { local: vec![0], remote: vec![0], local_tokens: None, remote_tokens: Some(0..4) },
        Layers::ALL,
        remote(spec(4, 10, 64)),
    );
    says(
        &without,
        ("a range of tokens needs caches with KV layouts", Some("src_tokens")),
        ("a range of tokens needs caches with KV layouts", Some("src")),
    );
    says(
        &tokens(None, Some((5, 5))),
        ("dst_tokens=5..5 must be a range of at least one token", Some("dst_tokens")),
        ("dst: tokens 5..5 must be a range of at least one token", Some("dst")),
    );
    says(
        &tokens(Some((0, 33)), None),
        ("src_tokens=0..33 must be a range inside 0..32: 2 blocks of 16 tokens", Some("src_tokens")),
        ("src: tokens 0..33 must be a range inside 0..32: 2 blocks of 16 tokens", Some("src")),
    );
    says(
        &tokens(Some((0, 5)), Some((0, 7))),
        ("src_tokens=0..5 must be as many tokens as dst_tokens=0..7", Some("src_tokens")),
        ("src: tokens 0..5 must be as many tokens as 0..7 of dst", Some("src")),
    );
    let one_layout = |side| {
        between(side, local_tokens(8), blocks(&[0], &[0]), Layers::ALL, remote(local_tokens(8).layout))
    };
    let advice = "only the local cache has a KV layout: describe both caches, or neither (layout=";
    for (side, native) in [
        (Destination, "only dst has a KV layout: describe both caches, or neither (layout="),
        (Source, "only src has a KV layout: describe both caches, or neither (layout="),
    ] {
        for (words, text) in [(Words::ORIGINAL, advice), (Words::NATIVE, native)] {
            let error = one_layout(side)(words).unwrap_err();
            assert!(error.to_string().starts_with(text), "{error}");
            assert_eq!(error.argument_name(), None);
        }
    }
    let twice = Rows::Sequence {
        local: vec![3, 3],
        remote: vec![0, 1],
        local_tokens: Some(0..20),
        remote_tokens: None,
    };
    says(
        &between(Destination, local_tokens(8), twice, Layers::ALL, remote_tokens(8)),
        ("dst_blocks contains block 3 twice", Some("dst_blocks")),
        ("dst contains block 3 twice", Some("dst")),
    );
}

#[test]
fn lists_of_several_owners_hold_equally_many_tokens() {
    let share = OwnerShare { parts: None, tokens: Some(16) };
    let (rows, layers) = (blocks(&[0, 1], &[0, 1]), Layers::ALL);
    let checked = CheckedTransfer::new(Words::NATIVE, Source, local_tokens(8), rows, layers).unwrap();
    let text = "the lists of the owners hold different numbers of tokens, 16 and 32: name the tokens that move, \
                of src or of dst";
    assert_eq!(checked.check_share(&remote_tokens(8), &share).unwrap_err().to_string(), text);
}

#[test]
fn copies_within_and_between_caches() {
    let cache = spec(2, 10, 64);
    let within = |pair: (i64, i64), part: SubRow| -> Broken {
        Box::new(move |words| validate::copy_within(words, cache, &[pair], part).map(drop))
    };
    says(
        &within((10, 0), SubRow::default()),
        ("source block=10 is out of range (0 to 9) (position=0)", None),
        ("src: block 10 is out of range (0 to 9) (position=0)", Some("src")),
    );
    says(
        &within((0, 12), SubRow::default()),
        ("destination block=12 is out of range (0 to 9) (position=0)", None),
        ("dst: block 12 is out of range (0 to 9) (position=0)", Some("dst")),
    );
    says(
        &within((0, 1), part(0, 16, Some(32))),
        (
            "dst_offset=16 must be src_offset=0, or at least length=32 bytes before or after it, in one cache",
            Some("dst_offset"),
        ),
        (
            "dst: byte offset 16 must be byte offset 0, or at least 32 bytes before or after it, in one cache",
            Some("dst"),
        ),
    );
    let to = |dst: CacheLayout, part: SubRow| -> Broken {
        Box::new(move |words| validate::copy_between(words, cache, dst, &[(0, 0)], part).map(drop))
    };
    says(
        &to(spec(2, 10, 32), SubRow::default()),
        ("src_cache and dst_cache do not match: block sizes 64 and 32", None),
        ("src and dst do not match: block sizes 64 and 32", None),
    );
    says(
        &to(spec(3, 10, 64), SubRow::default()),
        ("src_cache and dst_cache do not match: num_tensors 2 and 3", None),
        ("src and dst do not match: tensors 2 and 3", None),
    );
}

#[test]
fn an_error_names_its_argument() {
    let named = |name: &str| {
        let error = Error::argument(name, 3, "4");
        assert_eq!(error.to_string(), format!("{name}=3 must be 4"));
        error.argument_name().map(str::to_owned)
    };
    for (name, argument) in [
        ("size", "size"),
        ("addrs[17]", "addrs"),
        ("len(cache_keys)", "cache_keys"),
        ("llm.listenIpInfo", "llm.listenIpInfo"),
    ] {
        assert_eq!(named(name).as_deref(), Some(argument));
    }
    assert_eq!(named("the range of a transfer"), None);
    assert_eq!(
        Error::new(ErrorKind::InvalidArgument, "size and length are both given").argument_name(),
        None
    );
    let kept = Error::argument("size", 3, "4").with("cluster", 5);
    assert_eq!(kept.argument_name(), Some("size"));
}
