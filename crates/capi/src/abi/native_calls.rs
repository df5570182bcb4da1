//! The functions of the native API that move bytes. Each starts a transfer and returns at once.

use llm_datadist_core::Result;
use llm_datadist_core::bindings::fallible;

use super::native_engines::entered;
use super::native_raw::{self, GivenPairs, MovingCall};
use super::native_transfers::kept;
use super::native_types::{LlmDatadistCall, LlmDatadistPair};
use super::raw;
use crate::native::HeldTransfer;

/// Starts to copy blocks inside an engine, within a cache or between two, and writes the handle of the transfer to `transfer`;
/// `llm_datadist_transfer_free` frees it. The pairs are copied in their order.
///
/// What the arguments and the caches of this engine decide is returned at once; nothing has started then. `LLM_DATADIST_BUSY`: too
/// many transfers run, or have an outcome that nobody took. Every other failure is the outcome of the transfer. The structures and
/// lists of the call may be freed when it returns.
///
/// # Safety
/// `pairs` points to `num_pairs` valid structures, `call` to one or is null for the defaults, and `transfer` to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_copy(
    engine: u64,
    pairs: *const LlmDatadistPair,
    num_pairs: usize,
    call: *const LlmDatadistCall,
    transfer: *mut u64,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { moved(MovingCall::Copy, engine, (pairs, num_pairs), call, transfer) }
}

/// Starts to read blocks of peers into blocks of this engine; otherwise like `llm_datadist_copy`. The pairs succeed or fail together.
///
/// If both caches of a pair have a layout, elements go where the layout of `dst` has them. If all pairs have the same `dst` and all
/// caches have layouts, each layer and head is read from one pair whose cache holds it. Until the transfer has ended, the blocks of
/// `dst` must not be used; if it fails, they are undefined. With a token, the pull fails with `LLM_DATADIST_GRANT_ENDED` if the grant
/// ended before all bytes were read.
///
/// # Safety
/// See `llm_datadist_copy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_pull(
    engine: u64,
    pairs: *const LlmDatadistPair,
    num_pairs: usize,
    call: *const LlmDatadistCall,
    transfer: *mut u64,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { moved(MovingCall::Pull, engine, (pairs, num_pairs), call, transfer) }
}

/// Starts to write blocks of this engine into blocks of peers, under the rules of `llm_datadist_pull`. The blocks of `src` must not be
/// written until the transfer has ended.
///
/// With `LLM_DATADIST_LAYERWISE`, a layer moves when `llm_datadist_transfer_ready` is called for it. All pairs then have one local
/// cache, and rows of whole blocks.
///
/// # Safety
/// See `llm_datadist_copy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_push(
    engine: u64,
    pairs: *const LlmDatadistPair,
    num_pairs: usize,
    call: *const LlmDatadistCall,
    transfer: *mut u64,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { moved(MovingCall::Push, engine, (pairs, num_pairs), call, transfer) }
}

/// # Safety
/// See `llm_datadist_copy`.
unsafe fn moved(
    kind: MovingCall,
    engine: u64,
    (pairs, count): (*const LlmDatadistPair, usize),
    call: *const LlmDatadistCall,
    transfer: *mut u64,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("transfer", transfer, 1) }?;
        // SAFETY: the caller's promise.
        let GivenPairs { rows, tokens } = unsafe { native_raw::pairs(kind, held, pairs, count) }?;
        // SAFETY: the caller's promise.
        let (extras, layerwise) = unsafe { native_raw::extras(kind, call, &tokens) }?;
        let mut pairs = fallible::with_capacity("the pairs of a call", rows.len())?;
        pairs.extend(rows.iter().map(|(dst, src)| (dst, src)));
        let start = || -> Result<HeldTransfer> {
            Ok(match kind {
                MovingCall::Copy => held.engine.copy(&pairs, extras)?.into(),
                MovingCall::Pull => held.engine.pull(&pairs, extras)?.into(),
                MovingCall::Push if layerwise => held.engine.push_layers(&pairs, extras)?.into(),
                MovingCall::Push => held.engine.push(&pairs, extras)?.into(),
            })
        };
        out.put(&[kept(held, start)?]);
        Ok(())
    })
}
