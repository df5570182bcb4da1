//! Decides whether a pull or push moves rows as they are or between two KV layouts, and plans the latter.

use std::ops::Range;
use std::sync::Arc;

use super::cache_rules::RemoteCache;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{Argument, CacheLayout, KvGeometry, KvLayout, Words};
use crate::plan::{
    CopyPlan, KvPart, KvSequence, Plans, REQUEST, Side, check_same_model, moved_tokens, no_block_left_over,
};

/// The cache of this engine that a pull writes or a push reads.
#[derive(Clone, Debug)]
pub struct LocalCache {
    /// Sizes, kind and placement.
    pub layout: CacheLayout,
    /// What its rows mean, if the caller described it.
    pub kv: Option<Arc<KvGeometry>>,
}

impl From<CacheLayout> for LocalCache {
    /// Returns a cache without a KV layout.
    fn from(layout: CacheLayout) -> Self {
        LocalCache { layout, kv: None }
    }
}

/// Checks that rows of two caches mean the same, because the call moves them as they are. The `words` are those of the caller,
/// whose local cache is the side that comes with them.
/// `Err(InvalidArgument)` if they do not, or if only one of them has a KV layout.
pub fn rows_alike(words: (&Words, Side), local: Option<&KvGeometry>, remote: &RemoteCache) -> Result<()> {
    layouts(words, local, remote)?.map_or(Ok(()), equal_rows)
}

fn equal_rows((local, remote): (&KvGeometry, &KvGeometry)) -> Result<()> {
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
pub(super) fn parts_alike((local, remote): (&KvGeometry, &KvGeometry), layers_given: bool) -> Result<()> {
    equal_rows((local, remote))?;
    ensure(layers_given || local.layout().layers == remote.layout().layers, || {
        Error::invalid("parts of rows of caches with different layers need layer ranges")
            .with("local", local)
            .with("remote", remote)
    })
}

/// Checks that rows of two caches of this engine mean the same, because a copy moves them as they are.
/// `Err(InvalidArgument)` if both have KV layouts and these differ. A cache without one may hold anything.
pub fn local_rows_alike(src: Option<&KvGeometry>, dst: Option<&KvGeometry>) -> Result<()> {
    let (Some(src), Some(dst)) = (src, dst) else { return Ok(()) };
    check_same_model(src, dst)?;
    let same_layers = src.layout().layers == dst.layout().layers;
    ensure(same_layers && same_rows(src.layout(), dst.layout()), || {
        let text = "copies move rows as they are, but rows of the two caches have different KV layouts";
        Error::invalid(text).with("src", src).with("dst", dst)
    })
}

/// Returns the layouts of the local and the remote cache if their rows may have to be converted. `None` if rows move as they
/// are. `Err(InvalidArgument)` if only one of them has a layout.
pub(super) fn layouts<'a>(
    (words, local_side): (&Words, Side),
    local: Option<&'a KvGeometry>,
    remote: &'a RemoteCache,
) -> Result<Option<(&'a KvGeometry, &'a KvGeometry)>> {
    let (which, layout) = match (local, remote.kv.as_deref()) {
        (None, None) => return Ok(None),
        (Some(local), Some(remote)) => return Ok(Some((local, remote))),
        (Some(local), None) => (local_side.of(words.sides()).local, local),
        (None, Some(remote)) => (local_side.other().of(words.sides()).remote, remote),
    };
    let text = format!("only {which} has a KV layout: describe both caches, or neither");
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

/// What a pull or push moves. It may have several plans between two KV layouts.
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
pub(super) fn equally_many_tokens(tokens: u64, expected: Option<u64>) -> Result<()> {
    ensure(expected.is_none_or(|expected| tokens == expected), || {
        let expected = expected.unwrap_or_default();
        Error::invalid(format!(
            "the lists of the owners hold different numbers of tokens, {expected} and {tokens}: name the tokens \
             that move, of src or of dst"
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
