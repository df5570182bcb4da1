//! Converts the pointers and structures of the native API to Rust values, with `raw`.

use std::ffi::c_char;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::{fallible, validate};
use llm_datadist_core::{
    BlockRows, CacheForm, ClusterId, DataType, ElementTypes, Error, GrantToken, GrantUse, KvLayout, KvPlanes,
    MAX_SECONDS, PairExtras, Placement, Result, RowsCache, RowsPart, TokenOrder, pool_named,
};

use super::native_types::{
    LLM_DATADIST_LAYERWISE, LLM_DATADIST_MAX_MESSAGE, LLM_DATADIST_MORE_PULLS, LLM_DATADIST_TOKEN_SIZE,
    LlmDatadistCall, LlmDatadistForm, LlmDatadistKvLayout, LlmDatadistPair, LlmDatadistRange,
    LlmDatadistRows,
};
use super::{process, raw};
use crate::native::HeldEngine;

/// Returns a text, or `None` for null.
///
/// # Safety
/// See [`raw::text`].
pub(super) unsafe fn optional_text<'a>(name: &str, text: *const c_char) -> Result<Option<&'a str>> {
    // SAFETY: the caller's promise.
    if text.is_null() { Ok(None) } else { unsafe { raw::text(name, text) }.map(Some) }
}

/// Returns a time in seconds, 0 or above. Only 0 becomes 0: it may have a meaning of its own.
pub(super) fn seconds(name: &str, seconds: f64) -> Result<Duration> {
    let least = Duration::from_nanos(u64::from(seconds > 0.0));
    let time = Duration::try_from_secs_f64(seconds).ok().map(|time| time.max(least));
    let time = time.filter(|&time| time <= Duration::from_secs(MAX_SECONDS));
    time.ok_or_else(|| Error::argument(name, seconds, format_args!("0 to {MAX_SECONDS} seconds")))
}

/// Returns a time limit in seconds; `None` for 0, which stands for that of the engine.
pub(super) fn limit(given: f64) -> Result<Option<Duration>> {
    Ok(Some(seconds("timeout", given)?).filter(|limit| !limit.is_zero()))
}

/// Returns a copy of a message for a peer. One that is too long is not accessed.
///
/// # Safety
/// See [`raw::list`].
pub(super) unsafe fn message(first: *const u8, size: usize) -> Result<Vec<u8>> {
    if size > LLM_DATADIST_MAX_MESSAGE {
        let allowed = format!("at most {LLM_DATADIST_MAX_MESSAGE} bytes");
        return Err(Error::argument("len(message)", size, allowed));
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { raw::list("message", first, size) }?;
    fallible::collect("a message", bytes.iter().copied())
}

/// Returns the token of a grant.
///
/// # Safety
/// `at` is null, or points to the bytes of a token.
pub(super) unsafe fn token(at: *const u8) -> Result<GrantToken> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { raw::list("token", at, LLM_DATADIST_TOKEN_SIZE) }?;
    GrantToken::from_bytes("token", bytes)
}

/// Checks that only these flags are set.
fn flags(given: u32, allowed: u32) -> Result<()> {
    if given & !allowed == 0 {
        return Ok(());
    }
    Err(Error::argument("flags", given, format_args!("0, or the flags of this function ({allowed})")))
}

/// Returns a range; `None` if it stands for all.
fn range(LlmDatadistRange { first, end }: LlmDatadistRange) -> Option<Range<u64>> {
    (first != 0 || end != 0).then_some(first..end)
}

/// Returns a range of 32-bit numbers; `None` if it stands for all.
fn range32(name: &str, of: LlmDatadistRange) -> Result<Option<Range<u32>>> {
    let Some(range) = range(of) else { return Ok(None) };
    match (u32::try_from(range.start), u32::try_from(range.end)) {
        (Ok(first), Ok(end)) => Ok(Some(first..end)),
        _ => Err(Error::argument(name, format_args!("{range:?}"), "a range below 2^32")),
    }
}

/// Returns rows, which errors call `name`.
///
/// # Safety
/// See [`raw::list`] for the blocks, and [`raw::text`] for the name.
pub(super) unsafe fn rows(engine: &Arc<HeldEngine>, name: &str, of: &LlmDatadistRows) -> Result<BlockRows> {
    raw::known(name, of)?;
    // SAFETY: the caller's promise.
    let blocks = unsafe { raw::list(name, of.blocks, of.num_blocks) }?;
    let blocks = fallible::collect("the blocks of a call", blocks.iter().map(|&block| i64::from(block)))?;
    let cache = if of.cache != 0 && of.peer == 0 && of.name.is_null() {
        RowsCache::Own(process::current().cache(of.cache)?.own.clone())
    } else if of.cache == 0 && !of.name.is_null() {
        // SAFETY: the caller's promise.
        let cache = unsafe { raw::text("name", of.name) }?;
        RowsCache::Peer(engine.engine.peer_cache(ClusterId(of.peer), cache)?)
    } else {
        return Err(raw::refused(name, "not of one cache: set either cache, or peer and name"));
    };
    let part = RowsPart { layers: range(of.layers), tokens: range(of.tokens), bytes: range(of.bytes) };
    BlockRows::new(cache, blocks).with_part(part)
}

/// The pairs of a call, and the tokens of their grants.
pub(super) struct GivenPairs {
    /// The destination and the source of each pair.
    pub(super) rows: Vec<(BlockRows, BlockRows)>,
    /// The token of each pair.
    pub(super) tokens: Vec<Option<GrantToken>>,
}

/// Returns the pairs of a call.
///
/// # Safety
/// See [`raw::list`], [`rows`] for each side, and [`token`] for each token.
pub(super) unsafe fn pairs(
    call: MovingCall,
    engine: &Arc<HeldEngine>,
    first: *const LlmDatadistPair,
    count: usize,
) -> Result<GivenPairs> {
    // SAFETY: the caller's promise.
    let given = unsafe { raw::list("pairs", first, count) }?;
    if given.is_empty() {
        return Err(Error::argument("num_pairs", 0, "at least 1"));
    }
    let mut rows = fallible::with_capacity("the pairs of a call", count)?;
    let mut tokens = fallible::with_capacity("the pairs of a call", count)?;
    for (index, pair) in given.iter().enumerate() {
        // SAFETY: the caller's promise.
        let read = unsafe { self::pair(call, engine, pair) };
        let of_part = |error: Error| if count > 1 { error.with("part", index) } else { error };
        let (dst, src, token) = read.map_err(of_part)?;
        rows.push((dst, src));
        tokens.push(token);
    }
    Ok(GivenPairs { rows, tokens })
}

/// # Safety
/// See [`pairs`].
unsafe fn pair(
    call: MovingCall,
    engine: &Arc<HeldEngine>,
    pair: &LlmDatadistPair,
) -> Result<(BlockRows, BlockRows, Option<GrantToken>)> {
    raw::known("pairs", pair)?;
    // SAFETY: the caller's promise.
    let dst = unsafe { rows(engine, "dst", &pair.dst) }?;
    // SAFETY: the caller's promise.
    let src = unsafe { rows(engine, "src", &pair.src) }?;
    if pair.token.is_null() {
        return Ok((dst, src, None));
    }
    if call != MovingCall::Pull {
        return Err(raw::refused("token", "only for pulls"));
    }
    // SAFETY: the caller's promise.
    Ok((dst, src, Some(unsafe { token(pair.token) }?)))
}

/// Which call moves the rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MovingCall {
    Copy,
    Pull,
    Push,
}

/// What a call does beside moving bytes, and whether it is layer-wise. Null stands for the defaults.
///
/// # Safety
/// See [`raw::value`], [`message`], and [`optional_text`] for the word.
pub(super) unsafe fn extras(
    call: MovingCall,
    at: *const LlmDatadistCall,
    tokens: &[Option<GrantToken>],
) -> Result<(PairExtras, bool)> {
    let grants = |done| {
        if tokens.iter().all(Option::is_none) {
            return Ok(Vec::new());
        }
        let uses = tokens.iter().map(|token| token.map(|token| GrantUse { token, done }));
        fallible::collect("the grants of a call", uses)
    };
    if at.is_null() {
        return Ok((PairExtras { grants: grants(true)?, ..PairExtras::default() }, false));
    }
    // SAFETY: the caller's promise.
    let given = unsafe { raw::whole("call", at) }?;
    flags(
        given.flags,
        match call {
            MovingCall::Copy => 0,
            MovingCall::Pull => LLM_DATADIST_MORE_PULLS,
            MovingCall::Push => LLM_DATADIST_LAYERWISE,
        },
    )?;
    // SAFETY: the caller's promise.
    let verify = unsafe { optional_text("verify", given.verify) }?.map(validate::verify).transpose()?;
    let notify = match (given.message.is_null(), given.message_size) {
        (true, 0) => None,
        _ if call == MovingCall::Copy => return Err(raw::refused("message", "only for pulls and pushes")),
        // SAFETY: the caller's promise.
        (_, size) => Some(unsafe { message(given.message, size) }?),
    };
    let grants = grants(given.flags & LLM_DATADIST_MORE_PULLS == 0)?;
    let extras = PairExtras { grants, notify, verify, limit: limit(given.timeout)? };
    Ok((extras, given.flags & LLM_DATADIST_LAYERWISE != 0))
}

/// Returns what a cache is, of which these flags may be set. `addresses` is the number of tensors of registered memory.
///
/// # Safety
/// See [`raw::value`], and [`raw::list`] and [`raw::text`] for what the structure points to.
pub(super) unsafe fn form(
    at: *const LlmDatadistForm,
    allowed: u32,
    addresses: Option<usize>,
) -> Result<(CacheForm, u32)> {
    // SAFETY: the caller's promise.
    let given = unsafe { raw::whole("form", at) }?;
    flags(given.flags, allowed)?;
    // SAFETY: the caller's promise.
    let dtype = element_type(unsafe { raw::text("dtype", given.dtype) }?)?;
    // SAFETY: the caller's promise.
    let pool = unsafe { optional_text("pool", given.pool) }?.map_or(Ok(Placement::Device), pool_named)?;
    let form = if given.layout.is_null() {
        // SAFETY: the caller's promise.
        let shape = unsafe { raw::list("shape", given.shape, given.num_dims) }?;
        plain(&given, shape, dtype, pool, addresses)?
    } else {
        for (name, value) in [
            ("num_dims", given.num_dims as u64),
            ("tensors", given.tensors.into()),
            ("tensors_per_layer", given.tensors_per_layer.into()),
        ] {
            if value != 0 {
                return Err(Error::argument(name, value, "0 beside a layout, which says it"));
            }
        }
        // SAFETY: the caller's promise.
        let form = CacheForm::laid_out(&unsafe { layout(given.layout) }?, dtype, given.blocks, pool)?;
        addresses.map_or(Ok(()), |count| form.check_count(count))?;
        form
    };
    match (given.stride, addresses) {
        (0, _) => Ok((form, given.flags)),
        (stride, None) => Err(Error::argument("stride", stride, "0 in an allocated cache")),
        (stride, Some(_)) => Ok((form.with_stride(stride)?, given.flags)),
    }
}

fn plain(
    given: &LlmDatadistForm,
    shape: &[i64],
    dtype: DataType,
    pool: Placement,
    addresses: Option<usize>,
) -> Result<CacheForm> {
    let tensors = match (addresses, given.tensors) {
        (Some(count), 0) => count as u64,
        (Some(count), tensors) if tensors as usize != count => {
            return Err(Error::argument("tensors", tensors, format_args!("0 or {count}, as addresses")));
        }
        (_, tensors) => tensors.into(),
    };
    let per_layer = Some(given.tensors_per_layer).filter(|&count| count != 0);
    CacheForm::plain(tensors, given.blocks, shape, dtype, pool, per_layer)
}

fn element_type(word: &str) -> Result<DataType> {
    ElementTypes::find(word)
        .ok_or_else(|| Error::argument("dtype", format_args!("{word:?}"), ElementTypes::ALLOWED))
}

/// # Safety
/// See [`raw::value`], and [`raw::text`] for what the structure points to.
unsafe fn layout(at: *const LlmDatadistKvLayout) -> Result<KvLayout> {
    // SAFETY: the caller's promise.
    let given = unsafe { raw::whole("layout", at) }?;
    // SAFETY: the caller's promise.
    let order = unsafe { optional_text("order", given.order) }?;
    // SAFETY: the caller's promise.
    let kv = unsafe { optional_text("kv", given.kv) }?;
    // SAFETY: the caller's promise.
    let model = unsafe { optional_text("model", given.model) }?;
    let order = order.map_or(Ok(TokenOrder::Nhd), |word| {
        let found = TokenOrder::ALL.into_iter().find(|order| order.name() == word);
        found.ok_or_else(|| Error::argument("order", format_args!("{word:?}"), "\"NHD\" or \"HND\""))
    })?;
    let kv = kv.map_or(Ok(KvPlanes::Separate), |word| {
        let found = KvPlanes::ALL.into_iter().find(|planes| planes.name() == word);
        let allowed = "\"separate\", \"k_then_v\", \"latent\" or \"single\"";
        found.ok_or_else(|| Error::argument("kv", format_args!("{word:?}"), allowed))
    })?;
    let all = if kv == KvPlanes::Latent { 1 } else { given.total_heads };
    let heads = range32("heads", given.heads)?.unwrap_or(0..all);
    // The rules refuse an empty range by its own name.
    let as_many = heads.end.saturating_sub(heads.start).max(1);
    let total_heads = if given.total_heads == 0 { as_many } else { given.total_heads };
    Ok(KvLayout {
        tokens_per_block: given.block_tokens,
        heads,
        total_heads,
        head_dim: given.head_dim,
        order,
        kv,
        layers: range32("layers", given.layers)?.unwrap_or(0..0),
        model: model.unwrap_or_default().to_owned(),
    })
}
