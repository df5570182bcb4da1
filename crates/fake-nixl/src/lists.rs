//! Functions that handle lists and parameters, and those with which tests control the stand-in.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};

use crate::model::{Handle, REFUSED_HERE, model, refusal};

/// Returns from a function that must refuse calls of this thread.
macro_rules! refuse_here {
    ($function:literal) => {
        if let Some(status) = refusal($function) {
            return status;
        }
    };
}

pub(crate) unsafe fn text(from: *const c_char) -> String {
    // SAFETY: the caller passes a text that ends with a zero byte.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

/// Changes a setting of the group with this name. Returns whether there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_nixl_set(name: *const c_char, setting: *const c_char, value: i64) -> bool {
    // SAFETY: the caller passes two texts.
    let name = unsafe { text(name) };
    // SAFETY: as above.
    let setting = unsafe { text(setting) };
    let mut model = model();
    let Some(settings) = model.groups.get_mut(&name) else { return false };
    settings.insert(setting, value);
    let agents: Vec<usize> =
        model.agents.iter().filter(|(_, agent)| agent.group == name).map(|(agent, _)| *agent).collect();
    for agent in agents {
        let mut released =
            model.agents.get_mut(&agent).map(|agent| std::mem::take(&mut agent.released)).unwrap_or_default();
        released.retain_mut(|request| model.advance(agent, request) == 1);
        if let Some(agent) = model.agents.get_mut(&agent) {
            agent.released = released;
        }
    }
    true
}

/// Has a function refuse the calls of this thread with a status; 0 ends that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_nixl_refuse(function: *const c_char, status: c_int) {
    // SAFETY: the caller passes a text.
    let function = unsafe { text(function) };
    REFUSED_HERE.with_borrow_mut(|refused| {
        if status == 0 {
            refused.remove(&function);
        } else {
            refused.insert(function, status);
        }
    });
}

/// Returns the number of agents, or of handles of all kinds, that are open.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_open_handles(agents_only: bool) -> usize {
    let model = model();
    let agents = model.agents.len();
    if agents_only {
        return agents;
    }
    agents + model.params.len() + model.lists.len() + model.names.len() + model.requests.len()
}

#[unsafe(no_mangle)]
pub extern "C" fn nixl_capi_is_stub() -> bool {
    refusal("nixl_capi_is_stub").is_some()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_params(params: *mut Handle) -> c_int {
    refuse_here!("nixl_capi_create_params");
    let mut model = model();
    let number = model.next();
    model.params.insert(number, HashMap::new());
    // SAFETY: the caller passes a place for the result.
    unsafe { params.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_params_add(
    params: Handle,
    name: *const c_char,
    value: *const c_char,
) -> c_int {
    refuse_here!("nixl_capi_params_add");
    // SAFETY: the caller passes two texts.
    let name = unsafe { text(name) };
    // SAFETY: as above.
    let value = unsafe { text(value) };
    let mut model = model();
    let Some(params) = model.params.get_mut(&(params as usize)) else { return -1 };
    params.insert(name, value);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_params(params: Handle) -> c_int {
    if model().params.remove(&(params as usize)).is_some() { 0 } else { -1 }
}

unsafe fn create_list(list: *mut Handle) -> c_int {
    let mut model = model();
    let number = model.next();
    model.lists.insert(number, Vec::new());
    // SAFETY: the caller passes a place for the result.
    unsafe { list.write(number as Handle) };
    0
}

fn add(list: Handle, start: usize, len: usize) -> c_int {
    let mut model = model();
    let Some(list) = model.lists.get_mut(&(list as usize)) else { return -1 };
    list.push((start as u64, len as u64));
    0
}

fn destroy_list(list: Handle) -> c_int {
    if model().lists.remove(&(list as usize)).is_some() { 0 } else { -1 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_reg_dlist(_: c_int, list: *mut Handle) -> c_int {
    refuse_here!("nixl_capi_create_reg_dlist");
    // SAFETY: passed on.
    unsafe { create_list(list) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_reg_dlist_add_desc(
    list: Handle,
    start: usize,
    len: usize,
    _: u64,
    _: *const c_void,
    _: usize,
) -> c_int {
    refuse_here!("nixl_capi_reg_dlist_add_desc");
    add(list, start, len)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_reg_dlist(list: Handle) -> c_int {
    destroy_list(list)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_xfer_dlist(_: c_int, list: *mut Handle) -> c_int {
    refuse_here!("nixl_capi_create_xfer_dlist");
    // SAFETY: passed on.
    unsafe { create_list(list) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_xfer_dlist_add_desc(
    list: Handle,
    start: usize,
    len: usize,
    _: u64,
) -> c_int {
    refuse_here!("nixl_capi_xfer_dlist_add_desc");
    add(list, start, len)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_xfer_dlist(list: Handle) -> c_int {
    destroy_list(list)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_mem_list(list: Handle) -> c_int {
    if model().names.remove(&(list as usize)) { 0 } else { -1 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_backend(backend: Handle) -> c_int {
    if model().names.remove(&(backend as usize)) { 0 } else { -1 }
}
