//! An engine whose threads cannot wait for requests ends its links and says why.

#![allow(unsafe_code, reason = "descriptors that are open already")]
use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use llm_datadist_core::CacheKind;

use super::{Held, Way, config, device, link, of, open, push_blocks, row};
use crate::child_process::{self, report};
use crate::fixtures::eventually;
use crate::log;

/// The epoll descriptors of this process.
fn pollers() -> Vec<RawFd> {
    let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_poller = |entry: &fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().contains("eventpoll"))
    };
    open.filter(is_poller).map(|entry| entry.file_name().to_string_lossy().parse().unwrap()).collect()
}

/// Puts another file in the place of a descriptor.
fn replace(number: RawFd) {
    let null = fs::File::open("/dev/null").unwrap();
    // SAFETY: the descriptor is open, and is not closed here.
    let mut poller = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::dup2(&null, &mut poller).unwrap();
    std::mem::forget(poller);
}

#[test]
#[ignore = "started by the test below"]
fn without_pollers() {
    if child_process::role().is_none() {
        return;
    }
    let way = Way::Tcp;
    let local = open(config(1, way), way);
    let before = pollers();
    let remote = open(config(2, way), way);
    let of_remote: Vec<RawFd> = pollers().into_iter().filter(|number| !before.contains(number)).collect();
    assert!(!before.is_empty() && !of_remote.is_empty());
    link(&local, &remote).unwrap();
    let [source, into] =
        [&local, &remote].map(|engine| Held::pool(engine, &device(1, 2, 64), CacheKind::Blocks));
    let push = || push_blocks(&local, &source, &[0], of(2, row(&into, 0)), &[1]);
    push().unwrap();
    of_remote.into_iter().for_each(replace);
    // Threads that are already waiting still wait on the old epoll set until an event wakes them. The link may end
    // between two pushes, so the log of this side has the reason, and the error of a push need not have it.
    let broke = ["the link to cluster 2 broke", "this engine cannot wait for requests: epoll_wait failed"];
    eventually("the end of the link", || push().is_err() && !log::texts(&broke).is_empty());
    let errors = || log::errors(&["no request can be answered, so all links end"]).len();
    eventually("the error", || errors() > 0);
    drop((local, remote));
    // Several threads may have failed, and one of them has ended the link.
    assert_eq!(errors(), 1);
    report("done");
}

#[test]
fn engine_that_cannot_wait_for_requests_ends_its_links_with_the_reason() {
    assert_eq!(child_process::run("links::broken_poller::without_pollers", "engine"), ["done"]);
}
