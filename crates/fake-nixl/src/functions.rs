//! The functions that take an agent.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use crate::lists::text;
use crate::model::{Agent, Handle, IN_PROGRESS, Model, Peer, Request, copy, covers, model, refusal};

const MAGIC: u64 = 0x0FA4_E017_1ADD_4E55;

/// `nixl_capi_agent_config_t` of NIXL 1.5.
#[repr(C)]
pub struct AgentConfig {
    progress_thread: bool,
    listen_thread: bool,
    port: c_int,
    synchronization: c_int,
    workers: u32,
    progress_delay_us: u64,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_configured_agent(
    name: *const c_char,
    config: *const AgentConfig,
    agent: *mut Handle,
) -> c_int {
    if let Some(status) = refusal("nixl_capi_create_configured_agent") {
        return status;
    }
    // SAFETY: the caller passes a text.
    let name = unsafe { text(name) };
    // SAFETY: the caller passes a configuration.
    let config = unsafe { &*config };
    let busy = config.progress_thread && config.progress_delay_us < 20_000;
    if busy || config.listen_thread || config.synchronization != 1 || config.workers != 1 {
        return -1;
    }
    let mut model = model();
    let number = model.next();
    model.agents.insert(number, Agent { name, ..Agent::default() });
    // SAFETY: the caller passes a place for the result.
    unsafe { agent.write(number as Handle) };
    0
}

/// Ends all requests of the agent, even unfinished ones. Releasing a request does not end it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_agent(agent: Handle) -> c_int {
    if let Some(status) = refusal("nixl_capi_destroy_agent") {
        return status;
    }
    let mut model = model();
    let late = model.setting(agent as usize, "LATE") == Some(1);
    let Some(agent) = model.agents.remove(&(agent as usize)) else { return -1 };
    if late && !agent.released.is_empty() {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            for request in agent.released {
                for piece in request.rest {
                    copy(request.pid, piece);
                }
            }
        });
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_get_plugin_params(
    agent: Handle,
    _: *const c_char,
    kinds: *mut Handle,
    params: *mut Handle,
) -> c_int {
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_get_plugin_params") {
        return status;
    }
    let (kind, param) = (model.next(), model.next());
    model.names.insert(kind);
    model.params.insert(param, HashMap::new());
    // SAFETY: the caller passes two places for results.
    unsafe { kinds.write(kind as Handle) };
    // SAFETY: as above.
    unsafe { params.write(param as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_backend(
    agent: Handle,
    name: *const c_char,
    params: Handle,
    backend: *mut Handle,
) -> c_int {
    if let Some(status) = refusal("nixl_capi_create_backend") {
        return status;
    }
    // SAFETY: the caller passes a text.
    let name = unsafe { text(name) };
    let mut model = model();
    let Some(params) = model.params.get(&(params as usize)) else { return -1 };
    let config = params.get("engine_config").cloned().unwrap_or_default();
    let settings: HashMap<&str, &str> = config.split(',').filter_map(|pair| pair.split_once('=')).collect();
    let group = (*settings.get("FAKE_NAME").unwrap_or(&"")).to_owned();
    let known = model.groups.entry(group.clone()).or_default();
    for (setting, value) in &settings {
        if let Ok(value) = value.parse() {
            known.entry((*setting).to_owned()).or_insert(value);
        }
    }
    if known.get("REQUIRE_RDMA") == Some(&1) && settings.get("TLS") != Some(&"ib") {
        return -2;
    }
    let Some(found) = model.agents.get_mut(&(agent as usize)) else { return -1 };
    (found.group, found.has_backend) = (group, name == "UCX");
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_create_backend") {
        return status;
    }
    let number = model.next();
    model.names.insert(number);
    // SAFETY: the caller passes a place for the result.
    unsafe { backend.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_register_mem(agent: Handle, list: Handle, _: Handle) -> c_int {
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_register_mem") {
        return status;
    }
    let Some(list) = model.lists.get(&(list as usize)).cloned() else { return -1 };
    let Some(agent) = model.agents.get_mut(&(agent as usize)) else { return -1 };
    if !agent.has_backend {
        return -6;
    }
    agent.registered.extend(list);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_deregister_mem(agent: Handle, list: Handle, _: Handle) -> c_int {
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_deregister_mem") {
        return status;
    }
    let Some(list) = model.lists.get(&(list as usize)).cloned() else { return -1 };
    let Some(agent) = model.agents.get_mut(&(agent as usize)) else { return -1 };
    for piece in list {
        let Some(at) = agent.registered.iter().position(|known| *known == piece) else { return -6 };
        agent.registered.swap_remove(at);
    }
    0
}

/// The metadata are a mark, the process, the number of registrations, these, and the name of the agent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_get_local_md(agent: Handle, data: *mut Handle, len: *mut usize) -> c_int {
    let model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_get_local_md") {
        return status;
    }
    let Some(agent) = model.agents.get(&(agent as usize)) else { return -1 };
    let registered = agent.registered.iter().flat_map(|(start, size)| [*start, *size]);
    let head = [MAGIC, u64::from(std::process::id()), agent.registered.len() as u64];
    let mut bytes: Vec<u8> = head.into_iter().chain(registered).flat_map(u64::to_ne_bytes).collect();
    bytes.extend_from_slice(agent.name.as_bytes());
    // SAFETY: `malloc` takes any size, and the result is checked.
    let memory = unsafe { libc::malloc(bytes.len()) };
    assert!(!memory.is_null());
    // SAFETY: allocated above with this size.
    unsafe { memory.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    // SAFETY: the caller passes two places for results.
    unsafe { data.write(memory) };
    // SAFETY: as above.
    unsafe { len.write(bytes.len()) };
    0
}

fn parsed(bytes: &[u8]) -> Option<(String, Peer)> {
    let (numbers, _) = bytes.as_chunks::<8>();
    let number = |at: usize| numbers.get(at).map(|bytes| u64::from_ne_bytes(*bytes));
    let count = usize::try_from(number(2)?).ok().filter(|count| *count < numbers.len())?;
    if number(0)? != MAGIC {
        return None;
    }
    let registered: Option<_> =
        (0..count).map(|at| Some((number(3 + 2 * at)?, number(4 + 2 * at)?))).collect();
    let name = String::from_utf8(bytes.get(8 * (3 + 2 * count)..)?.to_vec()).ok()?;
    Some((name, Peer { pid: i32::try_from(number(1)?).ok()?, registered: registered? }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_load_remote_md(
    agent: Handle,
    data: *const c_void,
    len: usize,
    name: *mut *mut c_char,
) -> c_int {
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_load_remote_md") {
        return status;
    }
    // SAFETY: the caller passes as many bytes.
    let Some((peer, known)) = parsed(unsafe { std::slice::from_raw_parts(data.cast(), len) }) else {
        return -8;
    };
    let Some(agent) = model.agents.get_mut(&(agent as usize)) else { return -1 };
    let Ok(copied) = std::ffi::CString::new(peer.clone()) else { return -8 };
    agent.peers.insert(peer, known);
    // SAFETY: a text that ends with a zero byte.
    let copied = unsafe { libc::strdup(copied.as_ptr()) };
    // SAFETY: the caller passes a place for the result.
    unsafe { name.write(copied) };
    0
}

fn request(model: &Model, agent: usize, lists: [Handle; 2], peer: &str) -> Result<Request, i32> {
    let found = model.agents.get(&agent).ok_or(-1)?;
    let peer = found.peers.get(peer).ok_or(-6)?;
    let [local, remote] = lists.map(|list| model.lists.get(&(list as usize)));
    let (local, remote) = (local.ok_or(-1)?, remote.ok_or(-1)?);
    let lens = |list: &Vec<(u64, u64)>| list.iter().map(|piece| piece.1).collect::<Vec<_>>();
    if lens(local) != lens(remote) {
        return Err(-8);
    }
    let known = local.iter().all(|piece| covers(&found.registered, *piece))
        && remote.iter().all(|piece| covers(&peer.registered, *piece));
    if !known {
        return Err(-6);
    }
    let rest = local.iter().zip(remote).rev().map(|((to, len), (from, _))| (*to, *from, *len)).collect();
    Ok(Request { agent, pid: peer.pid, rest, posted: false, released: false })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_xfer_req(
    agent: Handle,
    operation: c_int,
    local: Handle,
    remote: Handle,
    peer: *const c_char,
    created: *mut Handle,
    _: Handle,
) -> c_int {
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_create_xfer_req") {
        return status;
    }
    if operation != 0 {
        return -12;
    }
    // SAFETY: the caller passes a text.
    let peer = unsafe { text(peer) };
    let request = match request(&model, agent as usize, [local, remote], &peer) {
        Ok(request) => request,
        Err(status) => return status,
    };
    let number = model.next();
    model.requests.insert(number, request);
    // SAFETY: the caller passes a place for the result.
    unsafe { created.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_post_xfer_req(agent: Handle, request: Handle, _: Handle) -> c_int {
    let slow = model().setting(agent as usize, "SLOW_POST").unwrap_or(0);
    std::thread::sleep(Duration::from_millis(u64::try_from(slow).unwrap_or(0)));
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_post_xfer_req") {
        return status;
    }
    let Some(mut found) = model.requests.remove(&(request as usize)) else { return -1 };
    found.posted = true;
    let at_once = model.setting(agent as usize, "AT_ONCE") == Some(1);
    let status = if at_once { model.advance(agent as usize, &mut found) } else { IN_PROGRESS };
    model.requests.insert(request as usize, found);
    status
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_get_xfer_status(agent: Handle, request: Handle) -> c_int {
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_get_xfer_status") {
        return status;
    }
    if model.setting(agent as usize, "RESET") == Some(1) {
        return -13;
    }
    let Some(mut found) = model.requests.remove(&(request as usize)) else { return -1 };
    let status = if found.posted { model.advance(agent as usize, &mut found) } else { -7 };
    model.requests.insert(request as usize, found);
    status
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_release_xfer_req(agent: Handle, request: Handle) -> c_int {
    let mut model = model();
    if let Some(status) = model.refusal(agent as usize, "nixl_capi_release_xfer_req") {
        return status;
    }
    let Some(found) = model.requests.get_mut(&(request as usize)) else { return -1 };
    found.released = true;
    let (rest, pid, owner) = (std::mem::take(&mut found.rest), found.pid, found.agent);
    if found.posted
        && !rest.is_empty()
        && let Some(agent) = model.agents.get_mut(&owner)
    {
        agent.released.push(Request { agent: owner, pid, rest, posted: true, released: true });
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_xfer_req(request: Handle) -> c_int {
    let mut model = model();
    match model.requests.get(&(request as usize)).map(|request| request.released) {
        Some(true) => {
            model.requests.remove(&(request as usize));
            0
        }
        Some(false) => -3,
        None => -1,
    }
}
