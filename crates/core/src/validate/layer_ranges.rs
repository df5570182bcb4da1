//! Converts ranges of layers to tensors, for pull, push and the original's `PushKvCache`, each of which has
//! its own rules.
//!
//! `checked_transfer` determines which rows of these tensors move.

use super::cache_rules::{batch_cache, on_device};
use crate::config::Role;
use crate::error::{Error, Result, ensure};
use crate::model::{CacheLayout, Geometry, SideWords, Words};
use crate::plan::{Moves, Pieces};

/// The layers `first..end`. The range is empty if `end` is not above `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRange {
    /// Index of the first layer.
    pub first: u32,
    /// Index after the last layer.
    pub end: u32,
}

/// The layers of a transfer. The source is the remote cache in a pull and the local cache in a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers {
    /// Layers that are read; `None` for all.
    pub src: Option<LayerRange>,
    /// Layers that are written; `None` for all.
    pub dst: Option<LayerRange>,
    /// Number of tensors in one layer.
    pub tensors_per_layer: u32,
}

impl Layers {
    /// All layers.
    pub const ALL: Layers = Layers { src: None, dst: None, tensors_per_layer: 1 };
}

/// The original's `KvCacheExtParam`. Both ends of a range are included; (−1, −1) means all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtParam {
    /// Layers that are read.
    pub src_layer_range: (i32, i32),
    /// Layers that are written.
    pub dst_layer_range: (i32, i32),
    /// Number of tensors in one layer.
    pub tensor_num_per_layer: u8,
}

impl Default for ExtParam {
    fn default() -> Self {
        ExtParam { src_layer_range: (-1, -1), dst_layer_range: (-1, -1), tensor_num_per_layer: 2 }
    }
}

impl ExtParam {
    /// Returns whether it names all layers of both caches.
    fn all(self) -> bool {
        self.src_layer_range == (-1, -1) && self.dst_layer_range == (-1, -1)
    }
}

/// Checks that the `size` of a push is −1 (all bytes).
pub fn push_size(size: i64) -> Result<()> {
    ensure(size == -1, || Error::argument("size", size, "-1"))
}

/// Checks the source and the layers of the original's `PushKvCache`, after [`push_kv_alone`]. The layers it
/// returns are an argument of [`CheckedTransfer::new`](super::CheckedTransfer::new).
pub fn push_kv_cache(local: CacheLayout, ext: ExtParam) -> Result<Layers> {
    on_device("src_cache", local.placement)?;
    batch_cache("src_cache", local.kind)?;
    push_kv_layers(local.geometry, ext)
}

/// Does the same for `PushKvBlocks` of the C++ class, whose source may be of either kind.
pub fn push_kv_blocks(local: CacheLayout, ext: ExtParam) -> Result<Layers> {
    on_device("src_cache", local.placement)?;
    push_kv_layers(local.geometry, ext)
}

/// Checks the arguments of the original's pushes that do not depend on a cache: role, size and layers, which have
/// rules of their own (contract §13.3). The role mix may push as well as prompt (contract, C++ §4, §7).
pub fn push_kv_alone(call: &str, role: Role, size: i64, ext: ExtParam) -> Result<()> {
    if role == Role::Decoder {
        let text = format!("{call} is for the roles Prompt and Mix only; this is {}", role.name());
        return Err(Error::invalid(text));
    }
    push_size(size)?;
    ext_alone(ext)?;
    let layers = |(first, last): (i32, i32)| i64::from(last) - i64::from(first) + 1;
    same_spans(Words::ORIGINAL, layers(ext.src_layer_range), layers(ext.dst_layer_range))
}

/// Checks the rules that do not depend on a cache: the order of the two ends of a range, one range without
/// the other, and layers without tensors (contract, C++ §5).
pub fn ext_alone(ext: ExtParam) -> Result<()> {
    if !ext.all() {
        for (name, (first, last)) in [("src", ext.src_layer_range), ("dst", ext.dst_layer_range)] {
            if first < 0 || last < first {
                let allowed = "(first, last) with 0 <= first <= last, or (-1, -1) for both ranges";
                return Err(Error::argument(
                    &format!("{name}_layer_range"),
                    format_args!("({first}, {last})"),
                    allowed,
                ));
            }
        }
    }
    tensors_per_layer(Words::ORIGINAL, u32::from(ext.tensor_num_per_layer))
}

fn push_kv_layers(local: Geometry, ext: ExtParam) -> Result<Layers> {
    if ext.all() && ext.tensor_num_per_layer == ExtParam::default().tensor_num_per_layer {
        // The caller gave no layer arguments, so the default holds even for a cache of one tensor.
        return Ok(Layers::ALL);
    }
    layer_of(local, ext)?;
    if ext.all() { Ok(Layers::ALL) } else { ext_layers(local, ext, (local.num_tensors(), u32::MAX)) }
}

/// Checks the layers of the C++ class's pulls. The ranges have the same form, and the destination is the
/// local cache (contract, C++ §5).
pub fn pull_kv_layers(local: Geometry, ext: ExtParam) -> Result<Layers> {
    if ext.all() {
        return tensors_per_layer(Words::ORIGINAL, u32::from(ext.tensor_num_per_layer)).map(|()| Layers::ALL);
    }
    layer_of(local, ext)?;
    ext_layers(local, ext, (u32::MAX, local.num_tensors()))
}

/// Checks that `tensor_num_per_layer` is 1 to the number of tensors.
fn layer_of(local: Geometry, ext: ExtParam) -> Result<()> {
    let (tensors, per_layer) = (local.num_tensors(), u32::from(ext.tensor_num_per_layer));
    ensure((1..=tensors).contains(&per_layer), || {
        Error::out_of_range("tensor_num_per_layer", per_layer, format_args!("1 to {tensors}"))
    })
}

/// Returns both ranges, checked against the known numbers of source and destination tensors (`u32::MAX` if
/// unknown). The default of `tensor_num_per_layer` need not divide the number of tensors; the last tensors
/// then belong to no layer (contract, C++ §5).
fn ext_layers(local: Geometry, ext: ExtParam, (src, dst): (u32, u32)) -> Result<Layers> {
    let per_layer = u32::from(ext.tensor_num_per_layer);
    let whole = local.num_tensors().is_multiple_of(per_layer);
    if ext.tensor_num_per_layer != ExtParam::default().tensor_num_per_layer {
        divisible(Words::ORIGINAL, local, per_layer)?;
    }
    let layers = |tensors: u32| if tensors == u32::MAX { tensors } else { tensors / per_layer };
    let src = inclusive("src_layer_range", ext.src_layer_range, layers(src))?;
    let dst = inclusive("dst_layer_range", ext.dst_layer_range, layers(dst))?;
    if whole {
        return Ok(Layers { src: Some(src), dst: Some(dst), tensors_per_layer: per_layer });
    }
    same_spans(Words::ORIGINAL, span(src), span(dst))?;
    // The same tensors, as layers of one tensor each.
    let tensors = |range: LayerRange| LayerRange {
        first: range.first.saturating_mul(per_layer),
        end: range.end.saturating_mul(per_layer),
    };
    Ok(Layers { src: Some(tensors(src)), dst: Some(tensors(dst)), tensors_per_layer: 1 })
}

/// Converts `first` and `last`, both included, to a range within `layers` layers.
fn inclusive(name: &str, (first, last): (i32, i32), layers: u32) -> Result<LayerRange> {
    match (u32::try_from(first), u32::try_from(last)) {
        (Ok(first), Ok(last)) if first <= last && last < layers => Ok(LayerRange { first, end: last + 1 }),
        _ => {
            let highest = i64::from(layers.min(i32::MAX.unsigned_abs() + 1)) - 1;
            let allowed =
                format!("(first, last) with 0 <= first <= last <= {highest}, or (-1, -1) for both ranges");
            Err(Error::argument(name, format_args!("({first}, {last})"), allowed))
        }
    }
}

/// `count` tensors, copied from tensor `src` of one cache into tensor `dst` of the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorRun {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) count: u32,
}

impl TensorRun {
    pub(super) fn moves(self, pieces: Pieces) -> Moves {
        // Both were found to be inside a cache, whose number of tensors fits in 32 bits.
        let first = |tensor: u64| u32::try_from(tensor).unwrap_or(u32::MAX);
        let (src_tensor, dst_tensor) = (first(self.src), first(self.dst));
        Moves { pieces, src_tensor, dst_tensor, num_tensors: self.count, ..Moves::default() }
    }
}

/// Returns the first tensor of a range of layers, and the number of its tensors.
fn tensors(range: LayerRange, per_layer: u32) -> (u64, u64) {
    let layers = u64::from(range.end.saturating_sub(range.first));
    (u64::from(range.first) * u64::from(per_layer), layers * u64::from(per_layer))
}

pub(super) fn layers_given(range: Option<LayerRange>) -> Option<LayerRange> {
    range.filter(|range| range.end > range.first)
}

/// Returns the tensors of a pull (contract §7.12). An empty range means all layers. A source range without a
/// destination range must have as many tensors as the local cache.
pub(super) fn pull_layers(words: &Words, local: Geometry, layers: Layers) -> Result<TensorRun> {
    let per_layer = layers.tensors_per_layer;
    let all = (0, u64::from(local.num_tensors()));
    let (src, dst) = (layers_given(layers.src), layers_given(layers.dst));
    if src.is_some() || dst.is_some() {
        divisible(words, local, per_layer)?;
    }
    let (first, count) = dst.map_or(all, |range| tensors(range, per_layer));
    if first + count > all.1 {
        return Err(outside(&words.dst, (first, count), words.dst.one_cache, local));
    }
    let (src_first, src_count) = src.map_or((0, count), |range| tensors(range, per_layer));
    if src_count != count {
        let text = format!("{} names {src_count} tensors and {count} are written", words.src.layers);
        return Err(Error::invalid(text).of_argument(words.src.layers.parameter()));
    }
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    Ok(TensorRun { src: src_first, dst: first, count })
}

/// Returns the tensors of a push (contract §7.14). Without ranges, these are all complete layers of the local
/// cache, in both caches. There are none if the local cache has fewer tensors than one layer.
pub(super) fn push_layers(words: &Words, local: Geometry, layers: Layers) -> Result<TensorRun> {
    tensors_per_layer(words, layers.tensors_per_layer)?;
    push_spans(words, layers)?;
    let per_layer = layers.tensors_per_layer;
    let whole = local.num_tensors() / per_layer;
    let all = LayerRange { first: 0, end: whole };
    let (src, dst) = (layers.src.unwrap_or(all), layers.dst.unwrap_or(all));
    if src.end == 0 {
        return Ok(TensorRun { src: 0, dst: 0, count: 0 });
    }
    let (first, count) = tensors(src, per_layer);
    let (dst_first, _) = tensors(dst, per_layer);
    if first + count > u64::from(local.num_tensors()) {
        return Err(outside(&words.src, (first, count), words.src.one_cache, local));
    }
    divisible(words, local, per_layer)?;
    Ok(TensorRun { src: first, dst: dst_first, count: u32::try_from(count).unwrap_or(u32::MAX) })
}

/// Checks that the number of tensors of a layer is above 0.
pub fn tensors_per_layer(words: &Words, count: u32) -> Result<()> {
    ensure(count > 0, || words.tensors_per_layer.must_be(0, "above 0"))
}

/// Checks the ranges of a push without regard to a cache: both or none are given, each has at least one
/// layer, and both have the same length.
pub fn push_spans(words: &Words, layers: Layers) -> Result<()> {
    let (src, dst) = match (layers.src, layers.dst) {
        (None, None) => return Ok(()),
        (Some(src), Some(dst)) => (src, dst),
        (src, _) => {
            let (src_layers, dst_layers) = (words.src.layers, words.dst.layers);
            let (given, missing) =
                if src.is_some() { (src_layers, dst_layers) } else { (dst_layers, src_layers) };
            let text = format!("{given} was given without {missing}");
            return Err(Error::invalid(text).of_argument(missing.parameter()));
        }
    };
    for (argument, range) in [(words.src.layers, src), (words.dst.layers, dst)] {
        if range.end <= range.first {
            let value = format_args!("{}..{}", range.first, range.end);
            return Err(argument.must_be(value, "a range of at least one layer"));
        }
    }
    same_spans(words, span(src), span(dst))
}

fn span(range: LayerRange) -> i64 {
    i64::from(range.end) - i64::from(range.first)
}

fn same_spans(words: &Words, src: i64, dst: i64) -> Result<()> {
    ensure(src == dst, || {
        let (src_layers, dst_layers) = (words.src.layers, words.dst.layers);
        Error::invalid(format!("{src_layers} has {src} layers and {dst_layers} {dst}"))
    })
}

fn divisible(words: &Words, local: Geometry, per_layer: u32) -> Result<()> {
    if local.num_tensors().is_multiple_of(per_layer) {
        return Ok(());
    }
    let allowed = format_args!("a divisor of {}, {}", words.num_tensors, local.num_tensors());
    Err(words.tensors_per_layer.must_be(per_layer, allowed))
}

/// Checks that the remote cache, whose side has the `words`, has `count` tensors from tensor `first` on.
pub(super) fn within(words: &SideWords, first: u64, count: u32, of: Geometry) -> Result<()> {
    ensure(first + u64::from(count) <= u64::from(of.num_tensors()), || {
        outside(words, (first, u64::from(count)), words.remote, of)
    })
}

fn outside(words: &SideWords, (first, count): (u64, u64), cache: &str, of: Geometry) -> Error {
    let value = format_args!("tensors {first} to {}", first + count - 1);
    words.tensors.must_be(value, format_args!("within the {} tensors of {cache}", of.num_tensors()))
}
