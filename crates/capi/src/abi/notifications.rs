//! The function that sends a message to a peer.

use llm_datadist_core::ClusterId;

use super::{entered, raw};

/// Sends a message of at most `LLM_DATADIST_MAX_NOTIFICATION` bytes to the program of a linked cluster, whose
/// `llm_datadist_poll` returns it. An addition to the original.
///
/// Does not wait for the peer: it returns when the message is in the window of the link. Messages over one link arrive in order,
/// each at most once. If the link breaks, its event counts the messages that the peer has not confirmed. The message may be freed
/// when the function returns.
///
/// `LLM_LINK_BUSY` if the peer has not polled 1,024 messages, or 4 MiB of them; `LLM_NOT_YET_LINK` if there is no link, or it
/// broke; `LLM_PARAM_INVALID` if the message is too long, or `cluster_id` is that of this object. Then nothing is sent. Any thread
/// may call it.
///
/// # Safety
/// `payload` points to `size` bytes. Null is an empty message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_notify(
    handle: u64,
    cluster_id: u64,
    payload: *const u8,
    size: usize,
) -> u32 {
    entered(handle, |open| {
        // SAFETY: the caller's promise.
        let message = unsafe { raw::message("payload", payload, size) }?;
        open.engine.notify(ClusterId(cluster_id), message)
    })
}
