//! `Engine`: the calls of the class `Hixl`, which return status numbers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use llm_datadist_core::CacheKind;
use llm_datadist_core::bindings::{fallible, this_process};
use llm_datadist_hixl::{ConnectState, Direction, Hixl, MemKind, OpDesc, Outcome, Status, TransferState};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PySequence, PyString};

use super::descs::{GetTransferStatusArgs, MemDesc, NotifyDesc, TransferArgs, TransferOpDesc};
use super::values::{self, integer, out_of_memory, text};
use crate::convert::Any;
use crate::native::wrong_type;
use crate::raw;

/// An engine of the module ``hixl``. Its methods return numbers; ``hixl.Hixl`` makes the public values of them.
#[pyclass(frozen, name = "Engine", module = "llm_datadist._core.hixl")]
pub(crate) struct HixlEngine {
    /// With the process that has made it. The lock is only held while attached to the interpreter, so no thread that a forked child
    /// lacks holds it.
    state: Mutex<(u32, Option<Arc<Hixl>>)>,
}

impl HixlEngine {
    /// Returns the engine. `None` in a forked child, which has none of its threads.
    fn engine(&self) -> Option<Arc<Hixl>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 == this_process() { state.1.clone() } else { None }
    }

    /// Runs `call` on the engine without the interpreter. A panic is a failure, because programs expect no exception.
    fn run<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&Hixl) -> Outcome<T> + Send) -> Outcome<T> {
        let engine = self.engine().ok_or(Status::Failed)?;
        // Unwind safe: what outlives the call is behind locks that stay consistent, and nothing that the call borrowed is used again.
        let survived = || catch_unwind(AssertUnwindSafe(|| call(&engine))).unwrap_or(Err(Status::Failed));
        py.detach(survived)
    }

    /// Runs `call`, and returns its status.
    fn status(&self, py: Python<'_>, call: impl FnOnce(&Hixl) -> Outcome<()> + Send) -> u32 {
        Status::of(&self.run(py, call)).code()
    }

    /// Runs `call`, and returns its status and its result.
    fn value<T: Send>(
        &self,
        py: Python<'_>,
        otherwise: T,
        call: impl FnOnce(&Hixl) -> Outcome<T> + Send,
    ) -> (u32, T) {
        match self.run(py, call) {
            Ok(value) => (Status::Success.code(), value),
            Err(status) => (status.code(), otherwise),
        }
    }
}

/// The number of a request, what the program has given with it, and its state.
type StateOfRequest = (u64, u64, u32);
/// The arguments that name another engine and limit a call.
type Remote = (String, i32);

fn remote(remote_engine: &Any<'_>, timeout_in_millis: &Any<'_>) -> PyResult<Remote> {
    Ok((text("remote_engine", remote_engine)?, integer("timeout_in_millis", timeout_in_millis)?))
}

/// Reads the operations of a transfer.
fn ops(value: &Any<'_>) -> PyResult<Vec<OpDesc>> {
    const WHAT: &str = "the operations of a transfer";
    let allowed = "a list of TransferOpDesc";
    let one = |item: &Any<'_>| {
        let desc = item
            .cast::<TransferOpDesc>()
            .map_err(|_| wrong_type("an entry of op_descs", "a TransferOpDesc", item))?;
        PyResult::Ok(desc.get().desc())
    };
    let texts = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>();
    if let Ok(list) = value.cast::<PyList>() {
        let mut descs = fallible::with_capacity(WHAT, list.len()).map_err(out_of_memory)?;
        for item in list.iter() {
            descs.push(one(&item)?);
        }
        return Ok(descs);
    }
    let sequence = value
        .cast::<PySequence>()
        .ok()
        .filter(|_| !texts)
        .ok_or_else(|| wrong_type("op_descs", allowed, value))?;
    let mut descs = Vec::new();
    for item in sequence.try_iter()? {
        fallible::push(WHAT, &mut descs, one(&item?)?).map_err(out_of_memory)?;
    }
    Ok(descs)
}

#[pymethods]
impl HixlEngine {
    #[new]
    fn new() -> Self {
        HixlEngine { state: Mutex::new((this_process(), Some(Arc::default()))) }
    }

    fn initialize(&self, py: Python<'_>, local_engine: &Any<'_>, options: &Any<'_>) -> PyResult<u32> {
        let (local_engine, given) = (text("local_engine", local_engine)?, values::options(options)?);
        if self.engine().is_none() {
            let fresh = (this_process(), Some(Arc::default()));
            let inherited =
                std::mem::replace(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner), fresh);
            // Its threads are those of the parent.
            std::mem::forget(inherited);
        }
        Ok(self
            .run(py, |engine| Ok(engine.initialize(&local_engine, &given)))
            .unwrap_or(Status::Failed)
            .code())
    }

    fn finalize(&self, py: Python<'_>) {
        // An engine that the parent process has made is not closed.
        let _ = self.run(py, |engine| {
            engine.finalize();
            Ok(())
        });
    }

    fn register_mem(&self, py: Python<'_>, mem_desc: &Any<'_>, mem_type: &Any<'_>) -> PyResult<(u32, u64)> {
        let desc = mem_desc.cast::<MemDesc>().map_err(|_| wrong_type("mem_desc", "a MemDesc", mem_desc))?;
        let (range, kind) = (desc.get().range(), MemKind::of(integer("mem_type", mem_type)?));
        let adopt = |desc: &_, addrs: &[u64]| raw::adopt(desc, CacheKind::Blocks, addrs);
        Ok(self.value(py, 0, |engine| engine.register_mem(range, kind, adopt)))
    }

    fn deregister_mem(&self, py: Python<'_>, mem_handle: &Any<'_>) -> PyResult<u32> {
        let handle = integer("mem_handle", mem_handle)?;
        Ok(self.status(py, |engine| engine.deregister_mem(handle)))
    }

    fn connect(&self, py: Python<'_>, remote_engine: &Any<'_>, timeout_in_millis: &Any<'_>) -> PyResult<u32> {
        let (engine, limit) = remote(remote_engine, timeout_in_millis)?;
        Ok(self.status(py, |hixl| hixl.connect(&engine, limit)))
    }

    fn disconnect(
        &self,
        py: Python<'_>,
        remote_engine: &Any<'_>,
        timeout_in_millis: &Any<'_>,
    ) -> PyResult<u32> {
        let (engine, limit) = remote(remote_engine, timeout_in_millis)?;
        Ok(self.status(py, |hixl| hixl.disconnect(&engine, limit)))
    }

    fn connect_async(
        &self,
        py: Python<'_>,
        remote_engine: &Any<'_>,
        timeout_in_millis: &Any<'_>,
    ) -> PyResult<u32> {
        let (engine, limit) = remote(remote_engine, timeout_in_millis)?;
        Ok(self.status(py, |hixl| hixl.connect_async(&engine, limit)))
    }

    fn disconnect_async(
        &self,
        py: Python<'_>,
        remote_engine: &Any<'_>,
        timeout_in_millis: &Any<'_>,
    ) -> PyResult<u32> {
        let (engine, limit) = remote(remote_engine, timeout_in_millis)?;
        Ok(self.status(py, |hixl| hixl.disconnect_async(&engine, limit)))
    }

    fn connect_state(&self, py: Python<'_>, remote_engine: &Any<'_>) -> PyResult<(u32, u32)> {
        let engine = text("remote_engine", remote_engine)?;
        let (status, state) = self.value(py, ConnectState::NotConnect, |hixl| hixl.connect_state(&engine));
        Ok((status, state as u32))
    }

    fn connect_states(&self, py: Python<'_>) -> (u32, Vec<(String, u32)>) {
        let (status, found) = self.value(py, Vec::new(), Hixl::connect_states);
        (status, found.into_iter().map(|(engine, state)| (engine, state as u32)).collect())
    }

    fn transfer_sync(
        &self,
        py: Python<'_>,
        remote_engine: &Any<'_>,
        op: &Any<'_>,
        op_descs: &Any<'_>,
        timeout_in_millis: &Any<'_>,
    ) -> PyResult<u32> {
        let (engine, limit) = remote(remote_engine, timeout_in_millis)?;
        let (direction, ops) = (Direction::of(integer("op", op)?), self::ops(op_descs)?);
        Ok(self.status(py, |hixl| hixl.transfer_sync(&engine, direction, &ops, limit)))
    }

    fn transfer_async(
        &self,
        py: Python<'_>,
        remote_engine: &Any<'_>,
        op: &Any<'_>,
        op_descs: &Any<'_>,
        args: &Any<'_>,
    ) -> PyResult<(u32, u64)> {
        let engine = text("remote_engine", remote_engine)?;
        let (direction, ops) = (Direction::of(integer("op", op)?), self::ops(op_descs)?);
        let args = args.cast::<TransferArgs>().map_err(|_| wrong_type("args", "a TransferArgs", args))?;
        let user_data = args.get().user_data();
        Ok(self.value(py, 0, |hixl| hixl.transfer_async(&engine, direction, &ops, user_data)))
    }

    fn transfer_state(&self, py: Python<'_>, req_id: &Any<'_>) -> PyResult<(u32, u32)> {
        let request = integer("req_id", req_id)?;
        let found = self.run(py, |hixl| Ok(hixl.transfer_state(request)));
        let found = found.unwrap_or((Status::Failed, TransferState::Failed));
        Ok((found.0.code(), found.1 as u32))
    }

    fn transfer_states(&self, py: Python<'_>, args: &Any<'_>) -> PyResult<(u32, Vec<StateOfRequest>)> {
        let given = args.cast::<GetTransferStatusArgs>();
        let args = given.map_err(|_| wrong_type("args", "a GetTransferStatusArgs", args))?.get();
        let (most, skip) = (args.max_query_count(), args.skip_waiting());
        let (status, found) = self.value(py, Vec::new(), |hixl| hixl.transfer_states(most, skip));
        Ok((status, found.into_iter().map(|one| (one.request, one.user_data, one.state as u32)).collect()))
    }

    fn send_notify(
        &self,
        py: Python<'_>,
        remote_engine: &Any<'_>,
        notify: &Any<'_>,
        timeout_in_millis: &Any<'_>,
    ) -> PyResult<u32> {
        let (engine, limit) = remote(remote_engine, timeout_in_millis)?;
        let notify = notify.cast::<NotifyDesc>().map_err(|_| wrong_type("notify", "a NotifyDesc", notify))?;
        let texts = notify.get().texts(py);
        let texts = texts.as_ref().map(|(name, text)| (&**name, &**text));
        Ok(self.status(py, |hixl| hixl.send_notify(&engine, texts, limit)))
    }

    fn notifies(&self, py: Python<'_>) -> (u32, Vec<NotifyDesc>) {
        let (status, notices) = self.value(py, Vec::new(), Hixl::notifies);
        (status, notices.iter().map(|notice| NotifyDesc::of(py, notice)).collect())
    }
}

impl Drop for HixlEngine {
    fn drop(&mut self) {
        let (process, engine) = std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        if process != this_process() {
            std::mem::forget(engine);
            return;
        }
        let mut engine = Some(engine);
        // The end of the engine waits for threads.
        Python::try_attach(|py| py.detach(|| drop(engine.take())));
    }
}

/// Returns the status and the value of a feature.
#[pyfunction]
pub(crate) fn capability(feature_type: &Any<'_>) -> PyResult<(u32, i32)> {
    let feature = integer("feature_type", feature_type)?;
    Ok(match Hixl::capability(feature) {
        Ok(value) => (Status::Success.code(), value),
        Err(status) => (status.code(), 0),
    })
}
