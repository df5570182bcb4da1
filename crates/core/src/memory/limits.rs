//! Determines how much memory this process may use: the free memory of the machine, and the limits of the
//! process.
//!
//! It reads control groups of both versions, the limit of strict overcommit, and the resource limits. What cannot be read
//! counts as no limit.
//! The limits are read when an engine opens, and before much memory is touched at once.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind, Result};

/// Returns the bytes that this process can use now without evicting anything. Only half of a limit on the
/// address space or on the file size is counted, because other things need a part of it.
pub fn usable_bytes() -> u64 {
    let memory = usable_under(Path::new("/"));
    let room = address_space_left().map(|left| left / 2);
    let file = getrlimit(Resource::Fsize).current.map(|limit| limit / 2);
    [room, file].into_iter().flatten().fold(memory, u64::min)
}

/// Returns the bytes of address space that this process may still take; `None` without a limit.
pub(super) fn address_space_left() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    let taken = number(Path::new("/proc/self/statm")).unwrap_or(0).saturating_mul(page_bytes());
    Some(limit.saturating_sub(taken))
}

/// Returns the bytes of memory that the machine has; 64 GiB if it does not report them.
pub(super) fn machine_bytes() -> u64 {
    fields(&PathBuf::from("/proc/meminfo"), "MemTotal:").map_or(64 << 30, |kib| kib << 10)
}

/// Returns `Err` of kind [`ErrorKind::OutOfMemory`] if `bytes` exceeds what this process can use now. `what`
/// names the purpose in the error.
///
/// It is called before so much memory is touched at once. In a control group, allocations do not fail.
/// Instead, the kernel ends one of its processes when the group touches more memory than it may have.
pub fn refuse_beyond_room(what: &str, bytes: u64) -> Result<()> {
    refuse_beyond_room_under(Path::new("/"), what, bytes)
}

/// As [`refuse_beyond_room`], with the `proc` and `sys` folders under `root`.
pub fn refuse_beyond_room_under(root: &Path, what: &str, bytes: u64) -> Result<()> {
    let usable = usable_under(root);
    if bytes <= usable {
        return Ok(());
    }
    let text = format!(
        "{what} need more memory than this process may use now (control group, strict overcommit, or free memory)"
    );
    Err(Error::new(ErrorKind::OutOfMemory, text).with("bytes", bytes).with("usable_bytes", usable))
}

/// As [`usable_bytes`], but without the limits of the process, and with the `proc` and `sys` folders under
/// `root`.
pub fn usable_under(root: &Path) -> u64 {
    let available = fields(&root.join("proc/meminfo"), "MemAvailable:").map_or(u64::MAX, |kib| kib << 10);
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let rooms = groups.lines().filter_map(|line| group_room(root, line)).chain(commit_room(root));
    rooms.fold(available, u64::min)
}

/// Returns the bytes that the system may still commit; `None` without strict overcommit (`vm.overcommit_memory=2`). Beyond this
/// limit, the first touch of a page of shared memory ends the process with SIGBUS.
fn commit_room(root: &Path) -> Option<u64> {
    const STRICT: u64 = 2;
    number(&root.join("proc/sys/vm/overcommit_memory")).filter(|&mode| mode == STRICT)?;
    let [limit, taken] =
        ["CommitLimit:", "Committed_AS:"].map(|name| fields(&root.join("proc/meminfo"), name));
    Some(limit?.saturating_sub(taken?) << 10)
}

/// Returns the bytes left in the control group of one line of `/proc/self/cgroup`, or in a group above it,
/// whichever has the least. In a container the path is often one of the host that does not exist inside; the
/// top folder is then the container's own group.
fn group_room(root: &Path, line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let (tops, limit, used): (&[&str], _, _) = match controllers {
        "" => (&["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max", "memory.current"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            (&["sys/fs/cgroup/memory"], "memory.limit_in_bytes", "memory.usage_in_bytes")
        }
        _ => return None,
    };
    let own = Path::new(path.trim_start_matches('/'));
    let folders = tops.iter().flat_map(|top| own.ancestors().map(move |group| root.join(top).join(group)));
    folders.filter_map(|folder| left_in(&folder, limit, used)).min()
}

/// Returns the limit of a group minus what it uses and could not drop at once.
fn left_in(folder: &Path, limit: &str, used: &str) -> Option<u64> {
    let limit = number(&folder.join(limit))?;
    let used = number(&folder.join(used)).unwrap_or(0);
    // Version 1 reports totals that include the groups inside under separate names.
    let stat = folder.join("memory.stat");
    let either = |total: &str, own: &str| fields(&stat, total).or_else(|| fields(&stat, own)).unwrap_or(0);
    let droppable =
        either("total_inactive_file", "inactive_file") + either("total_active_file", "active_file");
    Some(limit.saturating_sub(used.saturating_sub(droppable)))
}

/// Returns the first number in a file; `None` if it starts with `max`.
fn number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.split_whitespace().next()?.parse().ok()
}

/// Returns the number after `name` in a file of names and numbers.
fn fields(file: &PathBuf, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut line| if line.next()? == name { line.next()?.parse().ok() } else { None })
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}
