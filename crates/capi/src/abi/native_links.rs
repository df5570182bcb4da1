//! The functions of the native API for peers: links, messages and grants.

use std::ffi::c_char;

use llm_datadist_core::{ClusterId, WhileRefused};

use super::native_engines::entered;
use super::native_transfers::kept;
use super::native_types::{LLM_DATADIST_TOKEN_SIZE, LlmDatadistRows};
use super::{native_raw, raw};

/// Starts to link with the engine that listens at an address, `ip:port` or `[ipv6]:port`, unless a link to it exists. Writes the handle
/// of a transfer to `transfer`; `llm_datadist_transfer_peer` returns its peer.
///
/// Both ends may call it. While no engine listens, this engine tries again until `timeout` seconds have passed; 0 stands for the time limit
/// of the engine. If `name` is not null, the peer must have it.
///
/// # Safety
/// The texts end in a null byte, and `transfer` points to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_link(
    engine: u64,
    address: *const c_char,
    name: *const c_char,
    timeout: f64,
    transfer: *mut u64,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("transfer", transfer, 1) }?;
        // SAFETY: the caller's promise.
        let address = unsafe { raw::text("address", address) }?;
        // SAFETY: the caller's promise.
        let name = unsafe { native_raw::optional_text("name", name) }?;
        let limit = native_raw::limit(timeout)?;
        out.put(&[kept(held, || held.engine.link(address, name, limit, WhileRefused::Retry))?]);
        Ok(())
    })
}

/// Starts to end the link to a peer, and writes the handle of a transfer to `transfer`. Transfers that run are finished first. This end
/// has dropped the link when the transfer ends, whatever its outcome. A peer that is not linked is no error.
///
/// # Safety
/// `transfer` points to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_peer_close(
    engine: u64,
    peer: u64,
    timeout: f64,
    transfer: *mut u64,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("transfer", transfer, 1) }?;
        let limit = native_raw::limit(timeout)?;
        out.put(&[kept(held, || held.engine.unlink(ClusterId(peer), limit))?]);
        Ok(())
    })
}

/// Sends a message of at most `LLM_DATADIST_MAX_MESSAGE` bytes to the program of a peer, whose `llm_datadist_events` returns it. Never
/// waits.
///
/// Messages of one peer arrive in order, each at most once. `LLM_DATADIST_BUSY`: the peer's program has not taken 1,024 messages or
/// 4 MiB. `LLM_DATADIST_PEER_LOST`: there is no link to this peer. Nothing was sent then.
///
/// # Safety
/// `message` points to `size` bytes. Null is an empty message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_send(engine: u64, peer: u64, message: *const u8, size: usize) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        held.engine.send(ClusterId(peer), unsafe { native_raw::message(message, size) }?)
    })
}

/// Lends blocks of a cache of this engine to readers for `ttl` seconds, and writes the token of the grant to `token`, which has space
/// for `LLM_DATADIST_TOKEN_SIZE` bytes. Sends nothing: the program gives the token to the readers, which pass it to
/// `llm_datadist_pull`.
///
/// While the grant lasts, the program must not write to the blocks. It ends when its time has passed, when `readers` readers have
/// finished their last pull, by `llm_datadist_revoke`, or when the cache is freed. Then comes the event `LLM_DATADIST_GRANT_CLOSED`.
/// `readers` is 1 to 4,096. A grant does not keep others out: a peer can pull the blocks without it.
///
/// # Safety
/// `rows` points to a valid structure, and `token` to its space.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_lend(
    engine: u64,
    rows: *const LlmDatadistRows,
    ttl: f64,
    readers: u32,
    token: *mut u8,
) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("token", token, LLM_DATADIST_TOKEN_SIZE) }?;
        // SAFETY: the caller's promise.
        let given = unsafe { raw::value("rows", rows) }?;
        // SAFETY: the caller's promise.
        let rows = unsafe { native_raw::rows(held, "rows", &given) }?;
        let ttl = native_raw::seconds("ttl", ttl)?;
        out.put(&held.engine.lend(&rows, ttl, readers)?.to_bytes());
        Ok(())
    })
}

/// Lets a grant of this engine last at least until `ttl` seconds from now. `LLM_DATADIST_GRANT_ENDED` if it has ended.
///
/// # Safety
/// `token` points to a token.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_renew(engine: u64, token: *const u8, ttl: f64) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let token = unsafe { native_raw::token(token) }?;
        held.engine.renew(&token, native_raw::seconds("ttl", ttl)?)
    })
}

/// Ends a grant of this engine. When the call returns, no pull under it succeeds any more, so the blocks may be written. Writes the
/// handle of a transfer to `transfer`, which ends when the reads that this engine serves have ended. `LLM_DATADIST_GRANT_ENDED` if the
/// grant has ended before.
///
/// # Safety
/// `token` points to a token, and `transfer` to space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_revoke(engine: u64, token: *const u8, transfer: *mut u64) -> u32 {
    entered(engine, |held| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("transfer", transfer, 1) }?;
        // SAFETY: the caller's promise.
        let token = unsafe { native_raw::token(token) }?;
        out.put(&[kept(held, || held.engine.revoke(&token))?]);
        Ok(())
    })
}
