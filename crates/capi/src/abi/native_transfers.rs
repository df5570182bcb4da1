//! The functions that ask, cancel and free one transfer. They need no engine, and any thread may call them.

use llm_datadist_core::{ArrivedRows, Deadline, Error, Result, Transfer};

use super::native_types::{LLM_DATADIST_RUNNING, LlmDatadistArrived, LlmDatadistRange};
use super::{native_raw, process, raw};
use crate::failure::{caught, keep, native};
use crate::native::{HeldEngine, HeldTransfer};

/// Returns whether the transfer has ended, so that nothing of it touches memory any more. Does not take its outcome.
///
/// Also returns true for an invalid handle, of which `llm_datadist_transfer_result` says why it is invalid. It never fails, so
/// the last failure stays.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_done(transfer: u64) -> bool {
    caught(|| Ok(found(transfer)?.transfer.done())).unwrap_or(true)
}

/// Waits until the transfer has ended, at most `timeout` seconds, 0 or above, and returns its outcome like
/// `llm_datadist_transfer_result`. Several threads may wait for the same transfer.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_wait(transfer: u64, timeout: f64) -> u32 {
    outcome(transfer, |transfer| {
        let deadline = Deadline::after(native_raw::seconds("timeout", timeout)?);
        transfer.wait(deadline).map(drop)
    })
}

/// Returns the status with which the transfer has ended, or `LLM_DATADIST_RUNNING` while it runs. Never waits.
///
/// After a failure, the contents of the rows that it writes are undefined, and `llm_datadist_last_error` has the reason. The function
/// takes the outcome: `llm_datadist_events` no longer returns it. The transfer keeps it, so that the function may be called again.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_result(transfer: u64) -> u32 {
    outcome(transfer, |_| Ok(()))
}

/// Writes at most `max_ranges` ranges of the blocks that a failed transfer has written completely to `ranges`, and the number of all of
/// them to `num_ranges`. The other blocks that it should write are undefined. The ranges of a tensor are ascending and disjoint. There
/// are none while the transfer runs, after a success, and between caches with different layouts. Does not take the outcome.
///
/// # Safety
/// `ranges` points to space for `max_ranges` structures, or is null if that is 0, and `num_ranges` to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_transfer_arrived(
    transfer: u64,
    max_ranges: usize,
    ranges: *mut LlmDatadistArrived,
    num_ranges: *mut usize,
) -> u32 {
    native(|| {
        // SAFETY: the caller's promise.
        let count = unsafe { raw::Out::new("num_ranges", num_ranges, 1) }?;
        // SAFETY: the caller's promise.
        let outs = unsafe { raw::Out::of_list("ranges", ranges, max_ranges) }?;
        let failure = found(transfer)?.transfer.peek().and_then(Result::err);
        let arrived = failure.as_ref().map_or(&[][..], Error::arrived);
        outs.put_each(ranges_of(arrived));
        count.put(&[ranges_of(arrived).count()]);
        Ok(())
    })
}

/// Returns complete blocks as C sees them (`arrived_blocks_are_ranges_of_tensors`).
pub(crate) fn ranges_of(arrived: &[ArrivedRows]) -> impl Iterator<Item = LlmDatadistArrived> {
    arrived.iter().flat_map(|of| of.rows.iter().map(|rows| (of.tensor, rows))).map(|(tensor, rows)| {
        LlmDatadistArrived {
            tensor,
            reserved: 0,
            blocks: LlmDatadistRange { first: rows.start, end: rows.end },
        }
    })
}

/// Cancels the transfer. Never waits: a transfer that has begun ends a little later. Returns true if it will end with
/// `LLM_DATADIST_CANCELLED`, and false if its outcome can no longer change or the handle is invalid. It never fails, so the last
/// failure stays.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_cancel(transfer: u64) -> bool {
    caught(|| Ok(found(transfer)?.transfer.cancel())).unwrap_or(false)
}

/// Reports that a layer is computed, and starts to send it. Never waits. Only for a push with `LLM_DATADIST_LAYERWISE`.
///
/// Layers are counted from 0, and may come in any order and from any thread. From now on the layer must not be written until the
/// transfer has ended. It succeeds when all layers of its rows were reported and are in place. Reporting a layer after the transfer
/// has failed does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_ready(transfer: u64, layer: u32) -> u32 {
    native(|| found(transfer)?.ready(layer))
}

/// Writes the peer of a transfer of `llm_datadist_link` that has succeeded to `peer`.
///
/// # Safety
/// `peer` points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_transfer_peer(transfer: u64, peer: *mut u64) -> u32 {
    native(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { raw::Out::new("peer", peer, 1) }?;
        let held = found(transfer)?;
        let required = "one of llm_datadist_link that has succeeded";
        let linked = held.transfer.peer().ok_or_else(|| Error::argument("transfer", transfer, required))?;
        out.put(&[linked.cluster.0]);
        Ok(())
    })
}

/// Writes the number of bytes that are known to be in place to `done`, and the number of bytes of the whole transfer to
/// `total`, which is 0 until it is known. Both are final once the transfer has ended. A push learns only at its end how many bytes
/// are in place.
///
/// # Safety
/// Both pointers refer to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_transfer_progress(
    transfer: u64,
    done: *mut u64,
    total: *mut u64,
) -> u32 {
    native(|| {
        // SAFETY: the caller's promise.
        let done = unsafe { raw::Out::new("done", done, 1) }?;
        // SAFETY: the caller's promise.
        let total = unsafe { raw::Out::new("total", total, 1) }?;
        let progress = found(transfer)?.transfer.progress();
        done.put(&[progress.done]);
        total.put(&[progress.total]);
        Ok(())
    })
}

/// Returns the nanoseconds from the start of the transfer to its end, or until now while it runs; 0 for an invalid handle. It
/// never fails, so the last failure stays.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_nanos(transfer: u64) -> u64 {
    caught(|| Ok(found(transfer)?.transfer.nanos())).unwrap_or(0)
}

/// Frees the handle of a transfer, which it neither cancels nor waits for. The event of the transfer is still returned. A layer-wise
/// push whose layers were not all reported is cancelled, because nobody could report them any more. May be called before the transfer
/// has ended, and after its engine was closed.
#[unsafe(no_mangle)]
pub extern "C" fn llm_datadist_transfer_free(transfer: u64) -> u32 {
    native(|| process::current().transfers.remove(transfer).map(drop))
}

/// Starts a transfer of `engine`, and returns a handle for it. `llm_datadist_events` returns its event only afterwards
/// (`handle_exists_before_the_event_is_returned`).
pub(super) fn kept<T: Into<HeldTransfer>>(
    engine: &HeldEngine,
    start: impl FnOnce() -> Result<T>,
) -> Result<u64> {
    let _starting = engine.starting();
    let held: HeldTransfer = start()?.into();
    Ok(process::current().transfers.add_numbered(held.transfer.number(), held))
}

/// Runs `wait`, and returns the outcome of a transfer as a status.
fn outcome(transfer: u64, wait: impl FnOnce(&Transfer) -> Result<()>) -> u32 {
    let mut running = false;
    let status = native(|| {
        // Without what reports its layers, so that freeing the handle cancels a layer-wise push meanwhile.
        let transfer = found(transfer)?.transfer;
        wait(&transfer)?;
        let outcome = transfer.outcome();
        running = outcome.is_none();
        outcome.transpose().map(drop)
    });
    if running {
        keep("the transfer still runs");
        return LLM_DATADIST_RUNNING;
    }
    status
}

fn found(handle: u64) -> Result<HeldTransfer> {
    process::current().transfers.get(handle)
}
