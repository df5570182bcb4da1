//! The engine's counters as a nested dict of numbers and strings: every field of the snapshot, under its name.

use llm_datadist_core::{LinkState, OpState, PoolReport, Snapshot};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Adds fields of a struct to a dict, each under its own name.
macro_rules! fields {
    ($dict:expr, $from:expr, $($field:ident)*) => { $($dict.set_item(stringify!($field), $from.$field)?;)* };
}

/// Returns `snapshot` as a dict. A pool that was not configured is absent.
pub(crate) fn dict<'py>(py: Python<'py>, snapshot: &Snapshot) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let pools = PyDict::new(py);
    for (name, report) in [("device", &snapshot.device_pool), ("host", &snapshot.host_pool)] {
        if let Some(report) = report {
            pools.set_item(name, pool(py, report)?)?;
        }
    }
    dict.set_item("pools", pools)?;
    let table = PyDict::new(py);
    fields!(table, snapshot.table, caches keys);
    dict.set_item("table", table)?;
    let ops = PyDict::new(py);
    for (name, state) in &snapshot.ops {
        ops.set_item(name, op(py, state)?)?;
    }
    dict.set_item("ops", ops)?;
    let swap_in = PyDict::new(py);
    swap_in.set_item("direct", snapshot.swap_in_direct)?;
    swap_in.set_item("ring", snapshot.swap_in_ring)?;
    dict.set_item("swap_in", swap_in)?;
    let verify = PyDict::new(py);
    verify.set_item("blocks", snapshot.verified_blocks)?;
    verify.set_item("mismatches", snapshot.mismatched_blocks)?;
    dict.set_item("verify", verify)?;
    let links = snapshot.links.iter().map(|state| link(py, state));
    dict.set_item("links", links.collect::<PyResult<Vec<_>>>()?)?;
    let ucx = PyDict::new(py);
    ucx.set_item("version", snapshot.ucx.version.as_deref())?;
    ucx.set_item("reason", snapshot.ucx.reason.as_deref())?;
    fields!(ucx, snapshot.ucx, reads bytes failures forced_closes renewals);
    dict.set_item("ucx", ucx)?;
    fields!(dict, snapshot, ring_bytes plain_bytes streaming_bytes copy_workers);
    Ok(dict)
}

fn pool<'py>(py: Python<'py>, report: &PoolReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(dict, report.pool, capacity_bytes page_bytes used_bytes free_bytes peak_used_bytes largest_free_run_bytes);
    fields!(dict, report.pool, used_ranges free_ranges allocations frees failures);
    fields!(dict, report, released_bytes huge_pages committed_bytes merged_bytes merge_errno);
    Ok(dict)
}

fn link<'py>(py: Python<'py>, state: &LinkState) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("cluster", state.cluster.0)?;
    dict.set_item("address", &state.address)?;
    dict.set_item("refusal", state.refusal.as_deref())?;
    fields!(dict, state, transport pools registered outgoing call_rings silent_ms);
    dict.set_item("call_rings_refusal", state.call_rings_refusal.as_deref())?;
    dict.set_item("requests", op(py, &state.requests)?)?;
    dict.set_item("transfers", op(py, &state.transfers)?)?;
    let paths = PyDict::new(py);
    for (name, state) in &state.paths {
        let path = PyDict::new(py);
        fields!(path, state, transfers bytes);
        paths.set_item(name, path)?;
    }
    dict.set_item("paths", paths)?;
    dict.set_item("staged_bytes", state.staged_bytes)?;
    dict.set_item("sockets_reason", state.sockets_reason.as_deref())?;
    Ok(dict)
}

fn op<'py>(py: Python<'py>, state: &OpState) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    fields!(dict, state, calls failures bytes total_nanos max_nanos p50_nanos p99_nanos);
    dict.set_item("buckets", state.buckets.to_vec())?;
    Ok(dict)
}
