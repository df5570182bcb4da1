//! The functions of `libucp`, and those with which tests control them.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr::null_mut;

use crate::model::{Completed, Endpoint, ErrorHandler, Handle, Memory, Request, Worker, model};

#[repr(C)]
pub struct EndpointParams {
    mask: u64,
    address: *const u8,
    error_mode: c_uint,
    error_handler: Option<ErrorHandler>,
    error_argument: Handle,
}

#[repr(C)]
pub struct MapParams {
    mask: u64,
    address: Handle,
    length: usize,
    flags: c_uint,
    protection: c_uint,
}

#[repr(C)]
pub struct RequestParams {
    mask: u32,
    flags: u32,
    request: Handle,
    completed: Option<Completed>,
    datatype: u64,
    user_data: Handle,
}

const REMOTE_READ: c_uint = 1 << 8;
const PROTECTION_GIVEN: u64 = 1 << 3;
const MAGIC: u64 = 0xFA4E_0C9A_DD4E_5501;

unsafe fn text(from: *const c_char) -> String {
    // SAFETY: the caller passes a text that ends with a zero byte.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

fn status_as_pointer(status: i8) -> Handle {
    isize::from(status) as Handle
}

/// Packs numbers into bytes that the caller releases.
fn packed(numbers: &[u64], buffer: *mut Handle, len: *mut usize) {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    // SAFETY: `malloc` takes any size, and the result is checked.
    let memory = unsafe { libc::malloc(bytes.len()) };
    assert!(!memory.is_null());
    // SAFETY: allocated above with this size.
    unsafe { memory.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    // SAFETY: the caller passes two places for results.
    unsafe { buffer.write(memory) };
    // SAFETY: as above.
    unsafe { len.write(bytes.len()) };
}

unsafe fn unpacked<const N: usize>(bytes: *const u8) -> [u64; N] {
    // SAFETY: the caller passes bytes that were packed from as many numbers.
    let bytes = unsafe { std::slice::from_raw_parts(bytes, 8 * N) };
    std::array::from_fn(|at| bytes[8 * at..][..8].try_into().map_or(0, u64::from_ne_bytes))
}

/// Changes a setting of the context with this name. Returns whether there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_ucp_set(name: *const c_char, setting: *const c_char, value: i64) -> bool {
    // SAFETY: the caller passes two texts.
    let name = unsafe { text(name) };
    // SAFETY: as above.
    let setting = unsafe { text(setting) };
    let mut model = model();
    let found: Vec<usize> =
        model.names.iter().filter(|(_, known)| **known == name).map(|(context, _)| *context).collect();
    for context in &found {
        if let Some(settings) = model.contexts.get_mut(context) {
            settings.insert(setting.clone(), value);
        }
    }
    let workers = model.workers.iter().filter(|(_, worker)| found.contains(&worker.context));
    workers.for_each(|(number, _)| model.signal(*number));
    !found.is_empty()
}

/// Returns the number of handles of all kinds that are open.
#[unsafe(no_mangle)]
pub extern "C" fn fake_ucp_open_handles() -> usize {
    let model = model();
    let (contexts, workers) = (model.contexts.len(), model.workers.len());
    contexts
        + workers
        + model.endpoints.len()
        + model.memory.len()
        + model.keys.len()
        + model.requests.len()
        + model.configs.len()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_get_version(major: *mut c_uint, minor: *mut c_uint, patch: *mut c_uint) {
    // SAFETY: a static of this file. A volatile read sees what a test has changed in the file.
    let text = unsafe { (&raw const crate::FAKE_UCP_VERSION).read_volatile() };
    let version = String::from_utf8_lossy(&text[14..]);
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    for out in [major, minor, patch] {
        // SAFETY: the caller passes three places.
        unsafe { out.write(numbers.next().unwrap_or(0)) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_config_read(_: *const c_char, _: *const c_char, config: *mut Handle) -> i8 {
    let mut model = model();
    let number = model.next();
    model.configs.insert(number, HashMap::new());
    // SAFETY: the caller passes a place for the result.
    unsafe { config.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_config_modify(config: Handle, name: *const c_char, value: *const c_char) -> i8 {
    // SAFETY: the caller passes two texts.
    let name = unsafe { text(name) };
    // SAFETY: as above.
    let value = unsafe { text(value) };
    let mut model = model();
    if name == "FAKE_NAME" {
        model.names.insert(config as usize, value);
        return 0;
    }
    let Some(settings) = model.configs.get_mut(&(config as usize)) else { return -5 };
    match value.parse() {
        Ok(value) => {
            settings.insert(name, value);
            0
        }
        Err(_) if name == "TLS" => {
            settings.insert(name, i64::from(value == "rc,dc,ud,srd"));
            0
        }
        Err(_) => -12,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_config_release(config: Handle) {
    model().configs.remove(&(config as usize));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_init_version(
    _: c_uint,
    _: c_uint,
    _: *const u8,
    config: Handle,
    context: *mut Handle,
) -> i8 {
    let mut model = model();
    let settings = model.configs.get(&(config as usize)).cloned().unwrap_or_default();
    if let Some(status) = settings.get("REFUSE_ucp_init_version") {
        return i8::try_from(*status).unwrap_or(-1);
    }
    if settings.get("REQUIRE_RDMA") == Some(&1) && settings.get("TLS") != Some(&1) {
        return -6;
    }
    let number = model.next();
    if let Some(name) = model.names.remove(&(config as usize)) {
        model.names.insert(number, name);
    }
    model.contexts.insert(number, settings);
    // SAFETY: the caller passes a place for the result.
    unsafe { context.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_cleanup(context: Handle) {
    let mut model = model();
    model.contexts.remove(&(context as usize));
    model.names.remove(&(context as usize));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_create(context: Handle, _: *const u8, worker: *mut Handle) -> i8 {
    let mut model = model();
    if let Some(status) = model.refusal(context as usize, "ucp_worker_create") {
        return status;
    }
    // SAFETY: no memory is passed.
    let event_fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if event_fd < 0 {
        return -3;
    }
    let number = model.next();
    model.workers.insert(number, Worker { context: context as usize, event_fd, pending: VecDeque::new() });
    // SAFETY: the caller passes a place for the result.
    unsafe { worker.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_destroy(worker: Handle) {
    let mut model = model();
    if let Some(worker) = model.workers.remove(&(worker as usize)) {
        // SAFETY: opened for this worker, and closed once.
        unsafe { libc::close(worker.event_fd) };
        for request in worker.pending {
            model.requests.remove(&request);
        }
    }
    model.endpoints.retain(|_, endpoint| endpoint.worker != worker as usize);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_get_address(worker: Handle, address: *mut Handle, len: *mut usize) -> i8 {
    let context = model().workers.get(&(worker as usize)).map(|worker| worker.context);
    if let Some(status) = context.and_then(|context| model().refusal(context, "ucp_worker_get_address")) {
        return status;
    }
    packed(&[MAGIC, u64::from(std::process::id()), worker as u64], address, len);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_release_address(_: Handle, address: Handle) {
    // SAFETY: allocated by `packed`.
    unsafe { libc::free(address) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_progress(worker: Handle) -> c_uint {
    let mut count = 0;
    loop {
        let ripe = model().ripe(worker as usize);
        let Some((number, status)) = ripe else { return count };
        count += 1;
        let (status, call) = {
            let mut model = model();
            let Some(request) = model.requests.get_mut(&number) else { continue };
            let status = if status == 0 { request.copy() } else { status };
            request.status = status;
            (status, request.completed.map(|completed| (completed, request.user_data)))
        };
        if status == -25 {
            let endpoint = model().requests.get(&number).map(|request| request.endpoint);
            let handler = endpoint.and_then(|endpoint| {
                let model = model();
                let endpoint = model.endpoints.get(&endpoint)?;
                Some((endpoint.handler?, endpoint.argument))
            });
            if let Some((handler, argument)) = handler {
                handler(argument as Handle, endpoint.unwrap_or(0) as Handle, status);
            }
        }
        if let Some((completed, user_data)) = call {
            completed(number as Handle, status, user_data as Handle);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_get_efd(worker: Handle, event_fd: *mut c_int) -> i8 {
    let model = model();
    let Some(found) = model.workers.get(&(worker as usize)) else { return -5 };
    if let Some(status) = model.refusal(found.context, "ucp_worker_get_efd") {
        return status;
    }
    // SAFETY: the caller passes a place for the result.
    unsafe { event_fd.write(found.event_fd) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_arm(worker: Handle) -> i8 {
    let model = model();
    let Some(worker) = model.workers.get(&(worker as usize)) else { return -5 };
    let mut signals = 0;
    // SAFETY: an open eventfd, and a place for its value.
    let was_signalled = unsafe { libc::eventfd_read(worker.event_fd, &raw mut signals) } == 0;
    if was_signalled { -15 } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_ep_create(
    worker: Handle,
    params: *const EndpointParams,
    endpoint: *mut Handle,
) -> i8 {
    // SAFETY: the caller passes parameters.
    let params = unsafe { &*params };
    // SAFETY: the caller passes an address of this library.
    let [magic, ..] = unsafe { unpacked::<3>(params.address) };
    let mut model = model();
    let Some(context) = model.workers.get(&(worker as usize)).map(|worker| worker.context) else { return -5 };
    if magic != MAGIC {
        return -7;
    }
    if let Some(status) = model.refusal(context, "ucp_ep_create") {
        return status;
    }
    let number = model.next();
    let (handler, argument) = (params.error_handler, params.error_argument as usize);
    model.endpoints.insert(number, Endpoint { worker: worker as usize, handler, argument });
    // SAFETY: the caller passes a place for the result.
    unsafe { endpoint.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_ep_close_nbx(endpoint: Handle, _: *const RequestParams) -> Handle {
    let mut model = model();
    let Some(closed) = model.endpoints.remove(&(endpoint as usize)) else { return status_as_pointer(-5) };
    let context = model.workers.get(&closed.worker).map_or(0, |worker| worker.context);
    let (late, stuck) =
        (model.setting(context, "LATE") == Some(1), model.setting(context, "STUCK") == Some(1));
    let open = model.requests.iter_mut().filter(|(_, request)| {
        request.endpoint == endpoint as usize && request.status == 1 && request.len > 0
    });
    let mut late_copies = Vec::new();
    for (_, request) in open {
        if stuck {
            continue;
        }
        request.status = -16;
        if late {
            late_copies.push((request.local, request.remote, request.len, request.memory));
        }
    }
    if !late_copies.is_empty() {
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            for (local, remote, len, memory) in late_copies {
                let request = Request {
                    worker: 0,
                    endpoint: 0,
                    local,
                    remote,
                    len,
                    memory,
                    completed: None,
                    user_data: 0,
                    status: 1,
                };
                request.copy();
            }
        });
    }
    model.signal(closed.worker);
    null_mut()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_mem_map(context: Handle, params: *const MapParams, memory: *mut Handle) -> i8 {
    // SAFETY: the caller passes parameters.
    let params = unsafe { &*params };
    let mut model = model();
    if let Some(status) = model.refusal(context as usize, "ucp_mem_map") {
        return status;
    }
    let number = model.next();
    let remote = params.mask & PROTECTION_GIVEN == 0 || params.protection & REMOTE_READ != 0;
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let mapped = Memory { pid, start: params.address as u64, len: params.length as u64, remote };
    model.memory.insert(number, mapped);
    // SAFETY: the caller passes a place for the result.
    unsafe { memory.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_mem_unmap(_: Handle, memory: Handle) -> i8 {
    if model().memory.remove(&(memory as usize)).is_some() { 0 } else { -5 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_rkey_pack(
    context: Handle,
    memory: Handle,
    key: *mut Handle,
    len: *mut usize,
) -> i8 {
    let model = model();
    if let Some(status) = model.refusal(context as usize, "ucp_rkey_pack") {
        return status;
    }
    let Some(found) = model.memory.get(&(memory as usize)) else { return -5 };
    let pid = u64::try_from(found.pid).unwrap_or(0);
    packed(&[MAGIC, pid, found.start, found.len, u64::from(found.remote)], key, len);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_rkey_buffer_release(key: Handle) {
    // SAFETY: allocated by `packed`.
    unsafe { libc::free(key) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_ep_rkey_unpack(
    endpoint: Handle,
    key: *const u8,
    unpacked_key: *mut Handle,
) -> i8 {
    // SAFETY: the caller passes a key of this library.
    let [magic, pid, start, len, remote] = unsafe { unpacked::<5>(key) };
    let mut model = model();
    let worker = model.endpoints.get(&(endpoint as usize)).map(|endpoint| endpoint.worker);
    let context = worker.and_then(|worker| model.workers.get(&worker)).map(|worker| worker.context);
    if let Some(status) = context.and_then(|context| model.refusal(context, "ucp_ep_rkey_unpack")) {
        return status;
    }
    if magic != MAGIC {
        return -5;
    }
    let number = model.next();
    let pid = i32::try_from(pid).unwrap_or(0);
    model.keys.insert(number, Memory { pid, start, len, remote: remote != 0 });
    // SAFETY: the caller passes a place for the result.
    unsafe { unpacked_key.write(number as Handle) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_rkey_destroy(key: Handle) {
    model().keys.remove(&(key as usize));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_get_nbx(
    endpoint: Handle,
    local: Handle,
    len: usize,
    remote: u64,
    key: Handle,
    params: *const RequestParams,
) -> Handle {
    // SAFETY: the caller passes parameters.
    let params = unsafe { &*params };
    let mut model = model();
    let Some(worker) = model.endpoints.get(&(endpoint as usize)).map(|endpoint| endpoint.worker) else {
        return status_as_pointer(-5);
    };
    let Some(context) = model.workers.get(&worker).map(|worker| worker.context) else {
        return status_as_pointer(-5);
    };
    if let Some(status) = model.refusal(context, "ucp_get_nbx") {
        return status_as_pointer(status);
    }
    let open = model.workers[&worker].pending.len();
    let most = model.setting(context, "REQUESTS").and_then(|most| usize::try_from(most).ok());
    if most.is_some_and(|most| open >= most) {
        return status_as_pointer(-2);
    }
    let Some(memory) = model.keys.get(&(key as usize)).copied() else { return status_as_pointer(-5) };
    let number = model.next();
    let (completed, user_data) = (params.completed, params.user_data as usize);
    let endpoint = endpoint as usize;
    let request = Request {
        worker,
        endpoint,
        local: local as u64,
        remote,
        len,
        memory,
        completed,
        user_data,
        status: 1,
    };
    model.requests.insert(number, request);
    if let Some(found) = model.workers.get_mut(&worker) {
        found.pending.push_back(number);
    }
    model.signal(worker);
    number as Handle
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_request_check_status(request: Handle) -> i8 {
    model().requests.get(&(request as usize)).map_or(-5, |request| request.status)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_request_free(request: Handle) {
    let mut model = model();
    if let Some(freed) = model.requests.remove(&(request as usize))
        && let Some(worker) = model.workers.get_mut(&freed.worker)
    {
        worker.pending.retain(|pending| *pending != request as usize);
    }
}
