//! How much memory this process may use: what the machine has to spare, and the limits it runs under.
//!
//! Control groups of both versions, and the limits of the process. What cannot be read sets no limit. Asked when an engine
//! opens, and before much memory is touched at once. Not for: holding anybody to it; the kernel does that.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind, Result};

/// Bytes that this process could use now without pushing anything out. An address space or a file size that is limited
/// counts by half, because other things need some of it too.
#[must_use]
pub fn usable_bytes() -> u64 {
    let memory = usable_under(Path::new("/"));
    let room = address_space_left().map(|left| left / 2);
    let file = getrlimit(Resource::Fsize).current.map(|limit| limit / 2);
    [room, file].into_iter().flatten().fold(memory, u64::min)
}

/// Bytes of address space that this process may still take; `None` if that is not limited.
#[must_use]
pub(super) fn address_space_left() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    let taken = number(Path::new("/proc/self/statm")).unwrap_or(0).saturating_mul(page_bytes());
    Some(limit.saturating_sub(taken))
}

/// Bytes of memory that the machine has; 64 GiB where it does not say.
#[must_use]
pub(super) fn machine_bytes() -> u64 {
    fields(&PathBuf::from("/proc/meminfo"), "MemTotal:").map_or(64 << 30, |kib| kib << 10)
}

/// `Err` if `bytes` are more than this process could use now: asked before that much is touched at once. In a control group
/// allocations do not fail: touching more memory than the group may have ends a process of the group instead.
pub fn refuse_beyond_room(what: &str, bytes: u64) -> Result<()> {
    refuse_beyond_room_under(Path::new("/"), what, bytes)
}

/// The same with the `proc` and `sys` folders under `root`.
pub fn refuse_beyond_room_under(root: &Path, what: &str, bytes: u64) -> Result<()> {
    let usable = usable_under(root);
    if bytes <= usable {
        return Ok(());
    }
    let text =
        format!("{what} need more memory than this process may use now (control group, or free memory)");
    Err(Error::new(ErrorKind::OutOfMemory, text).with("bytes", bytes).with("usable_bytes", usable))
}

/// As [`usable_bytes`], without the limits of the process, read from the `proc` and `sys` folders under `root`.
#[must_use]
pub fn usable_under(root: &Path) -> u64 {
    let available = fields(&root.join("proc/meminfo"), "MemAvailable:").map_or(u64::MAX, |kib| kib << 10);
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    groups.lines().filter_map(|line| group_room(root, line)).fold(available, u64::min)
}

/// What is left in the control group of one line of `/proc/self/cgroup`, and in those around it. In a container the
/// path is often one of the host, which does not exist inside, while the top folder is the container's own group.
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

/// The limit of a group, less what it uses and could not drop at once.
fn left_in(folder: &Path, limit: &str, used: &str) -> Option<u64> {
    let limit = number(&folder.join(limit))?;
    let used = number(&folder.join(used)).unwrap_or(0);
    // Version 1 counts the groups inside under names of their own.
    let stat = folder.join("memory.stat");
    let either = |total: &str, own: &str| fields(&stat, total).or_else(|| fields(&stat, own)).unwrap_or(0);
    let droppable =
        either("total_inactive_file", "inactive_file") + either("total_active_file", "active_file");
    Some(limit.saturating_sub(used.saturating_sub(droppable)))
}

/// The first number of a file; `None` for `max`.
fn number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.split_whitespace().next()?.parse().ok()
}

/// The number after `name` in a file of names and numbers.
fn fields(file: &PathBuf, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut line| if line.next()? == name { line.next()?.parse().ok() } else { None })
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}
