//! Decides whether a pull or push moves rows as they are or between two KV layouts, and plans the latter.

use std::ops::Range;
use std::sync::Arc;

use super::cache_rules::RemoteCache;
use super::layer_ranges::Layers;
use super::sub_rows::fits_row;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{
    Argument, CacheLayout, EqualTensors, KvGeometry, KvLayout, KvLayoutNames, MixedSizes, SideWords, SubRow,
    Words,
};
use crate::plan::{
    CopyPlan, KvPart, KvSequence, Plans, REQUEST, Side, check_same_model, moved_tokens, no_block_left_over,
};

/// The cache of this engine that a pull writes or a push reads.
#[derive(Clone, Debug)]
pub struct LocalCache {
    /// Sizes, kind and placement. The sizes are those of tensor 0 if the tensors differ.
    pub layout: CacheLayout,
    /// The sizes of all tensors if they differ.
    pub mixed: Option<Arc<MixedSizes>>,
    /// What its rows mean, if the caller described it.
    pub kv: Option<Arc<KvGeometry>>,
    /// Whether rows move as they are, whatever they mean.
    pub raw: bool,
}

impl From<CacheLayout> for LocalCache {
    /// Returns a cache without a KV layout.
    fn from(layout: CacheLayout) -> Self {
        LocalCache { layout, mixed: None, kv: None, raw: false }
    }
}

impl LocalCache {
    /// Whether lists of blocks are sequences of tokens, which may differ in length.
    pub(super) fn has_sequences(&self) -> bool {
        self.kv.is_some() && !self.raw
    }

    /// Returns the layers that a push names, or all tensors if it names none: a layout says which tensors a layer has.
    pub(super) fn layers(&self, given: Layers) -> Layers {
        let all = self.kv.is_some() && given.src.or(given.dst).is_none() && given.tensors_per_layer > 0;
        if all { Layers::ALL } else { given }
    }

    /// Returns `Err(InvalidArgument)` unless lists of blocks are sequences of tokens, because the argument `given` is a range
    /// of them.
    pub(super) fn needs_layout(&self, words: &Words, given: Argument<'_>) -> Result<()> {
        ensure(self.has_sequences(), || {
            let text = format!("a range of tokens needs {}", words.need_of_tokens);
            Error::invalid(text).of_argument(given.parameter())
        })
    }

    /// Returns the layouts of the local and the remote cache if their rows may have to be converted. `None` if rows move
    /// as they are.
    pub(super) fn layouts<'a>(
        &'a self,
        remote: &'a RemoteCache,
        (words, local_side): (&Words, Side),
    ) -> Result<Option<(&'a KvGeometry, &'a KvGeometry)>> {
        if self.raw { Ok(None) } else { both((words, local_side), self.kv.as_deref(), remote.kv.as_deref()) }
    }
}

impl LocalCache {
    /// Returns whether the tensors of this or of the remote cache differ. Then each run of them has a plan of its own.
    pub(super) fn is_mixed_with(&self, remote: &RemoteCache) -> bool {
        self.mixed.is_some() || remote.mixed.is_some()
    }

    /// Checks that `part` fits the rows of some tensors, which the cache must have; `offset` is the one that counts here.
    pub(super) fn fits_rows(
        &self,
        part: SubRow,
        offset: (&SideWords, u64),
        (first, count): (u64, u32),
    ) -> Result<()> {
        let Some(mixed) = &self.mixed else { return fits_row(part, offset, self.layout.geometry) };
        let moved = first..first + u64::from(count);
        let mut touched = mixed.counted().filter(|(run, tensors)| {
            let start = u64::from(run.first);
            start < moved.end && moved.start < start + u64::from(*tensors)
        });
        let fits = |(run, _): (&EqualTensors, u32)| {
            let named = |error: Error| error.with("tensor", run.first);
            fits_row(part, offset, run.geometry).map_err(named)
        };
        touched.try_for_each(fits)
    }
}

/// Checks that rows of two caches mean the same, because the call moves them as they are. The `words` are those of the caller,
/// whose local cache is the side that comes with them.
/// `Err(InvalidArgument)` if they do not, or if only one of them has a KV layout.
pub fn rows_alike(words: (&Words, Side), local: Option<&KvGeometry>, remote: &RemoteCache) -> Result<()> {
    let Some((local, remote)) = both(words, local, remote.kv.as_deref())? else { return Ok(()) };
    check_same_model(local, remote)?;
    ensure(same_rows(local.layout(), remote.layout()), || {
        Error::invalid(
            "this call moves rows as they are, but rows of the two caches have different KV layouts",
        )
        .with("local", local)
        .with("remote", remote)
    })
}

/// Checks that parts of rows of two caches mean the same: rows of the same layout, and the same layers in the same tensors
/// unless the caller named the layers. `Err(InvalidArgument)` if they do not.
pub(super) fn parts_alike(
    words: (&Words, Side),
    local: &KvGeometry,
    remote: &RemoteCache,
    layers_given: bool,
) -> Result<()> {
    rows_alike(words, Some(local), remote)?;
    let Some(remote) = remote.kv.as_deref() else { return Ok(()) };
    ensure(layers_given || local.layout().layers == remote.layout().layers, || {
        Error::invalid("parts of rows of caches with different layers need layer ranges")
            .with("local", local)
            .with("remote", remote)
    })
}

/// Checks that rows of two caches of this engine mean the same, because a copy or swap moves them as they are.
/// `Err(InvalidArgument)` if both have KV layouts and these differ. A cache without one may hold anything.
pub fn local_rows_alike(words: &Words, src: Option<&KvGeometry>, dst: Option<&KvGeometry>) -> Result<()> {
    let (Some(src), Some(dst)) = (src, dst) else { return Ok(()) };
    check_same_model(src, dst)?;
    let same_layers = src.layout().layers == dst.layout().layers;
    ensure(same_layers && same_rows(src.layout(), dst.layout()), || {
        let text = format!(
            "{} move rows as they are, but rows of the two caches have different KV layouts",
            words.copies
        );
        Error::invalid(text).with("src", src).with("dst", dst)
    })
}

/// Checks a KV layout by itself, without the sizes of a cache.
pub fn kv_layout(layout: &KvLayout, names: KvLayoutNames) -> Result<()> {
    layout.check_ranges(names)
}

fn both<'a>(
    (words, local_side): (&Words, Side),
    local: Option<&'a KvGeometry>,
    remote: Option<&'a KvGeometry>,
) -> Result<Option<(&'a KvGeometry, &'a KvGeometry)>> {
    let (which, layout) = match (local, remote) {
        (None, None) => return Ok(None),
        (Some(local), Some(remote)) => return Ok(Some((local, remote))),
        (Some(local), None) => (local_side.of(words.sides()).local, local),
        (None, Some(remote)) => (local_side.other().of(words.sides()).remote, remote),
    };
    let text = format!("only {which} has a KV layout: {}", words.one_layout);
    Err(Error::invalid(text).with("layout", layout))
}

/// Returns whether rows of both layouts have the same bytes in the same order.
fn same_rows(a: &KvLayout, b: &KvLayout) -> bool {
    let rows = |of: &KvLayout| (of.tokens_per_block, of.heads.clone(), of.order, of.kv);
    rows(a) == rows(b)
}

/// What moves between two caches with KV layouts: some tokens of a sequence on each side.
pub(super) struct TokenMove<'a> {
    pub(super) src: KvSequence<'a>,
    pub(super) dst: KvSequence<'a>,
}

impl TokenMove<'_> {
    /// Checks that both caches belong to one model. Returns whether moving rows as they are has the same result.
    /// `Err(InvalidArgument)` if it does not and the caller named layers, which otherwise follow from the layouts.
    pub(super) fn is_plain(&self, layers_given: bool) -> Result<bool> {
        let (from, to) = (self.src.geometry, self.dst.geometry);
        check_same_model(from, to)?;
        let (src, dst) = (from.layout(), to.layout());
        let whole_blocks = self.src.tokens.is_none() && self.dst.tokens.is_none();
        let plain = whole_blocks && self.src.blocks.len() == self.dst.blocks.len() && same_rows(src, dst);
        ensure(plain || !layers_given, || {
            Error::invalid("layer ranges need equal KV layouts and no token ranges; otherwise the layers follow from the layouts")
                .with("src", from)
                .with("dst", to)
        })?;
        no_block_left_over(&self.src, &self.dst)?;
        Ok(plain && (layers_given || src.layers == dst.layers))
    }

    /// Returns how many tokens move, whichever layers and heads they have.
    pub(super) fn tokens(&self) -> Result<u64> {
        moved_tokens(&self.src, &self.dst)
    }

    /// Plans the moves of `parts`, which have no layer and head in common.
    pub(super) fn plan(&self, parts: &[KvPart]) -> Result<PlannedTransfer> {
        let mut plans = Vec::new();
        for part in parts {
            for plan in CopyPlan::between_layouts(&self.src, &self.dst, part)? {
                fallible::push(REQUEST, &mut plans, plan)?;
            }
        }
        let heads = |part: &KvPart| part.layers.len() as u64 * part.heads.len() as u64;
        let read = parts.iter().map(heads).sum::<u64>();
        let layout = self.src.geometry.layout();
        let layers = layout.layers.end - layout.layers.start;
        let all = (0, layers * layout.tensors_per_layer());
        let read_tensors = (read == heads(&KvPart::of(layout))).then_some(all);
        Ok(PlannedTransfer { plans: plans.into(), read_tensors, tokens: Some(self.tokens()?) })
    }
}

/// What a pull or push moves. It has several plans between two KV layouts, or between caches whose tensors differ.
pub struct PlannedTransfer {
    /// What is copied. The plans write different bytes and may run in any order.
    pub plans: Plans,
    /// The first tensor of the source that is read, and the number of them. `None` if not all layers and heads of the source
    /// are read.
    pub read_tensors: Option<(u32, u32)>,
    /// How many tokens move between two KV layouts. `None` if rows move as they are.
    pub tokens: Option<u64>,
}

/// Checks that as many `tokens` move between the caches of one owner as between those of the owners before it, if there is
/// one and if both have KV layouts.
pub(super) fn equally_many_tokens(words: &Words, tokens: u64, expected: Option<u64>) -> Result<()> {
    ensure(expected.is_none_or(|expected| tokens == expected), || {
        let expected = expected.unwrap_or_default();
        Error::invalid(format!(
            "the lists of the owners hold different numbers of tokens, {expected} and {tokens}: name the tokens \
             that move ({})",
            words.token_ranges
        ))
    })
}

/// Checks a range of tokens that a caller gave.
pub(super) fn some_tokens(argument: Argument<'_>, tokens: Option<&Range<u64>>) -> Result<()> {
    let Some(tokens) = tokens else { return Ok(()) };
    ensure(!tokens.is_empty(), || {
        argument.must_be(format_args!("{tokens:?}"), "a range of at least one token")
    })
}
