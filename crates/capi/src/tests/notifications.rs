//! Messages between two objects of this process, and the events of their link: order, limits, and what their pointers lead to.
//!
//! `tests/cpp/notifications.cpp` covers peers that stop or die, and programs that run out of memory.

use std::ffi::{CStr, c_char};
use std::ptr::{from_ref, null, without_provenance};
use std::slice;
use std::time::{Duration, Instant};

use llm_datadist_core::StatusCode;

use super::asynchronous::{LONG, descriptor, polled, with_cache};
use super::forks::{alone, in_a_child};
use super::{ALL, Engine, INDEX, LOCAL, SMALL, cache, failed, initialize, peer, reason, refused};
use crate::abi::{
    LLM_DATADIST_EVENT_COMPLETED, LLM_DATADIST_EVENT_LINK_DOWN, LLM_DATADIST_EVENT_LINK_UP,
    LLM_DATADIST_EVENT_NOTIFICATION, LLM_DATADIST_MAX_NOTIFICATION, LlmDatadistBlocks, LlmDatadistCluster,
    LlmDatadistEvent, LlmDatadistExtParam, LlmDatadistIp, llm_datadist_finalize, llm_datadist_link_clusters,
    llm_datadist_listening, llm_datadist_new, llm_datadist_notify, llm_datadist_poll,
    llm_datadist_pull_blocks, llm_datadist_pull_blocks_async, llm_datadist_push_cache,
    llm_datadist_transfer_wait, llm_datadist_unlink_clusters, llm_datadist_unpoll,
};
use crate::failure;

fn open(cluster: u64) -> Engine {
    let engine = Engine(llm_datadist_new(cluster, 1));
    let options = [SMALL[0], SMALL[1], ("llm.ListenIpInfo", "127.0.0.1:0")];
    assert_eq!(initialize(engine.0, &options), 0, "{}", reason());
    engine
}

/// Calls `call` with cluster 2 as its only cluster.
fn with_peer(other: &Engine, call: impl FnOnce(*const LlmDatadistCluster, *mut u32, *mut usize) -> u32) {
    let address = LlmDatadistIp { port: llm_datadist_listening(other.0), ..LOCAL };
    let (cluster, mut ret, mut count) = (peer(2, &address), 0, 0);
    assert_eq!(call(&raw const cluster, &raw mut ret, &raw mut count), 0, "{}", reason());
}

fn link(one: &Engine, two: &Engine) {
    // SAFETY: the pointers lead to values of the caller.
    with_peer(two, |cluster, ret, count| unsafe {
        llm_datadist_link_clusters(one.0, cluster, 1, LONG, ret, count)
    });
}

fn unlink(one: &Engine, two: &Engine) {
    // SAFETY: as above.
    with_peer(two, |cluster, ret, count| unsafe {
        llm_datadist_unlink_clusters(one.0, cluster, 1, LONG, false, ret, count)
    });
}

/// Clusters 1 and 2, linked.
fn linked() -> (Engine, Engine) {
    let (one, two) = (open(1), open(2));
    link(&one, &two);
    (one, two)
}

fn notify(engine: &Engine, cluster: u64, message: &[u8]) -> u32 {
    // SAFETY: the message lives in the caller.
    unsafe { llm_datadist_notify(engine.0, cluster, message.as_ptr(), message.len()) }
}

fn sent(engine: &Engine, cluster: u64, message: &[u8]) {
    assert_eq!(notify(engine, cluster, message), 0, "{}", reason());
}

/// A copy of the message of an event, which is of no other kind.
fn message(event: &LlmDatadistEvent) -> (u64, Vec<u8>) {
    assert_eq!((event.kind, event.status, event.transfer), (LLM_DATADIST_EVENT_NOTIFICATION, 0, 0));
    assert!(event.address.is_null() && event.transport.is_null() && event.reason.is_null());
    // SAFETY: this thread has not polled again.
    let bytes = unsafe { slice::from_raw_parts(event.payload, event.payload_size) };
    (event.cluster_id, bytes.to_vec())
}

fn text(text: *const c_char) -> String {
    // SAFETY: this thread has not polled again, and the text ends in a null byte.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

/// Waits until events can be polled.
fn await_events(engine: &Engine) {
    let mut asked = libc::pollfd { fd: descriptor(engine), events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, which lives here.
    assert_eq!(unsafe { libc::poll(&raw mut asked, 1, LONG) }, 1, "no event came");
}

/// Waits for `count` messages and takes at most `most` at a time.
fn received(engine: &Engine, count: usize, most: usize) -> Vec<(u64, Vec<u8>)> {
    let mut all = Vec::new();
    while all.len() < count {
        await_events(engine);
        let (status, events) = polled(engine, most);
        assert!(status == 0 && !events.is_empty(), "{}", reason());
        all.extend(events.iter().map(message));
    }
    assert_eq!(all.len(), count);
    all
}

#[test]
fn messages_arrive_in_order_in_both_directions() {
    let (one, two) = linked();
    let messages: Vec<Vec<u8>> =
        (0..300_u32).map(|number| number.to_le_bytes().repeat(number as usize)).collect();
    for message in &messages {
        sent(&one, 2, message);
        sent(&two, 1, message);
    }
    for (engine, from, most) in [(&two, 1, 7), (&one, 2, 1000)] {
        let all: Vec<_> = messages.iter().map(|message| (from, message.clone())).collect();
        assert!(received(engine, 300, most) == all);
        assert!(matches!(polled(engine, 9), (0, events) if events.is_empty()));
    }
}

#[test]
fn full_window_refuses_messages_until_the_peer_polls() {
    let (one, two) = linked();
    for number in 0..1024_u32 {
        sent(&one, 2, &number.to_le_bytes());
    }
    failed(notify(&one, 2, b"one more"), StatusCode::LinkBusy, &["1024 messages", "cluster"]);
    let all = received(&two, 1024, 100);
    assert!((0..1024_u32).zip(&all).all(|(number, got)| *got == (1, number.to_le_bytes().to_vec())));
    // The peer reports what it has polled a little later.
    let until = Instant::now() + Duration::from_secs(60);
    while notify(&one, 2, b"again") != 0 {
        assert!(Instant::now() < until, "{}", reason());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(received(&two, 1, 100), [(1, b"again".to_vec())]);
}

#[test]
fn messages_that_are_too_long_are_refused_unread() {
    let (one, two) = linked();
    let most = vec![7; LLM_DATADIST_MAX_NOTIFICATION];
    sent(&one, 2, &most);
    sent(&one, 2, b"");
    assert_eq!(received(&two, 2, 9), [(1, most), (1, Vec::new())]);
    let invalid = without_provenance(64);
    // SAFETY: these pointers are refused before they are followed.
    unsafe {
        for size in [LLM_DATADIST_MAX_NOTIFICATION + 1, usize::MAX] {
            let fact = format!("len(payload)={size} must be at most 65536 bytes");
            refused(llm_datadist_notify(one.0, 2, invalid, size), &[&fact]);
        }
        refused(llm_datadist_notify(one.0, 2, null(), 1), &["payload is null"]);
        assert_eq!(llm_datadist_notify(one.0, 2, null(), 0), 0, "an empty message: {}", reason());
    }
    refused(notify(&one, 1, b"x"), &["cluster"]);
    failed(notify(&one, 9, b"x"), StatusCode::NotYetLink, &["9"]);
    assert_eq!(received(&two, 1, 9), [(1, Vec::new())]);
}

const ROW: LlmDatadistBlocks = LlmDatadistBlocks { blocks: &raw const FIRST, count: 1 };
static FIRST: u64 = 0;

/// Starts to pull row 0 of cache 1 of cluster 2 to cache 1, with a message.
fn pull(engine: &Engine, notify: *const u8, notify_size: usize) -> (u32, u64) {
    let (own, mut transfer) = (cache(), 0);
    let ext = LlmDatadistExtParam { notify, notify_size, ..ALL };
    let (index, own, ext) = (&raw const INDEX, &raw const own, &raw const ext);
    // SAFETY: everything lives here, and invalid messages are refused before they are read.
    let status =
        unsafe { llm_datadist_pull_blocks_async(engine.0, index, own, ROW, ROW, ext, 0, &raw mut transfer) };
    (status, transfer)
}

#[test]
fn message_comes_with_a_transfer_behind_earlier_ones() {
    let (one, two) = linked();
    let (one, two) = (with_cache(one), with_cache(two));
    for number in 0..20_u8 {
        sent(&one, 2, &[number]);
    }
    let empty: &[u8] = b"";
    for attached in [b"pulled", empty] {
        let (status, transfer) = pull(&one, attached.as_ptr(), attached.len());
        assert_eq!(status, 0, "{}", reason());
        assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0, "{}", reason());
    }
    let all: Vec<_> = polled(&two, 100).1.iter().map(|event| message(event).1).collect();
    let earlier = (0..20_u8).map(|number| vec![number]);
    assert_eq!(all, earlier.chain([b"pulled".to_vec(), Vec::new()]).collect::<Vec<_>>());
    let invalid = without_provenance(64);
    refused(pull(&one, invalid, LLM_DATADIST_MAX_NOTIFICATION + 1).0, &["len(notify)=65537"]);
    refused(pull(&one, null(), 1).0, &["notify is null"]);
}

/// It is the outcome of the transfer.
#[test]
fn full_window_refuses_transfers_with_a_message() {
    let (one, two) = linked();
    let (one, two) = (with_cache(one), with_cache(two));
    for _ in 0..1024 {
        sent(&one, 2, b"");
    }
    let (status, transfer) = pull(&one, b"x".as_ptr(), 1);
    assert_eq!(status, 0, "{}", reason());
    failed(llm_datadist_transfer_wait(transfer, LONG), StatusCode::LinkBusy, &["1024 messages"]);
    let (status, transfer) = pull(&one, null(), 0);
    assert_eq!((status, llm_datadist_transfer_wait(transfer, LONG)), (0, 0), "{}", reason());
    received(&two, 1024, 1024);
}

#[test]
fn calls_that_wait_deliver_no_message() {
    let (one, two) = linked();
    let (one, two) = (with_cache(one), with_cache(two));
    let (own, ext) = (cache(), LlmDatadistExtParam { notify: b"x".as_ptr(), notify_size: 1, ..ALL });
    let (index, own, ext) = (&raw const INDEX, &raw const own, &raw const ext);
    // SAFETY: everything lives here.
    unsafe {
        refused(llm_datadist_pull_blocks(one.0, index, own, ROW, ROW, ext), &["ext_param.notify"]);
        refused(llm_datadist_push_cache(one.0, own, index, 0, -1, ext), &["ext_param.notify"]);
        assert_eq!(llm_datadist_push_cache(one.0, own, index, 0, -1, from_ref(&ALL)), 0, "{}", reason());
    }
    assert!(polled(&two, 9).1.is_empty());
}

/// The messages of a thread's last poll stay where they are while other threads poll, and are put back in their order.
#[test]
fn last_poll_of_a_thread_can_be_undone() {
    let (one, two) = linked();
    for number in 0..10_u8 {
        sent(&one, 2, &[number; 100]);
    }
    // Comes behind the messages, so they have all arrived.
    let (one, two) = (with_cache(one), with_cache(two));
    let (_, transfer) = pull(&one, b"last".as_ptr(), 4);
    assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0, "{}", reason());
    let (_, events) = polled(&two, 6);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            refused(llm_datadist_unpoll(two.0, 1), &["num_events=1", "0 to 0"]);
            assert_eq!(message(&polled(&two, 1).1[0]).1, [6; 100]);
            assert_eq!(llm_datadist_unpoll(two.0, 1), 0);
        });
    });
    assert!((0..6_u8).zip(&events).all(|(number, event)| message(event).1 == [number; 100]));
    refused(llm_datadist_unpoll(two.0, 7), &["num_events=7", "0 to 6"]);
    refused(llm_datadist_unpoll(one.0, 1), &["0 to 0"]);
    assert_eq!(llm_datadist_unpoll(two.0, 4), 0, "{}", reason());
    assert_eq!(llm_datadist_unpoll(two.0, 2), 0, "{}", reason());
    refused(llm_datadist_unpoll(two.0, 1), &["0 to 0"]);
    let all: Vec<_> = received(&two, 11, 4).into_iter().map(|(_, message)| message).collect();
    let expected = (0..10_u8).map(|number| vec![number; 100]).chain([b"last".to_vec()]);
    assert_eq!(all, expected.collect::<Vec<_>>());

    // The queue of the next engine of an object is another one.
    sent(&one, 2, b"before");
    received(&two, 1, 9);
    assert_eq!(llm_datadist_finalize(two.0), 0);
    failed(llm_datadist_unpoll(two.0, 1), StatusCode::Failed, &["Finalize"]);
    assert_eq!(initialize(two.0, &SMALL), 0, "{}", reason());
    refused(llm_datadist_unpoll(two.0, 1), &["0 to 0"]);
}

/// A forked child cannot reach the queue of its parent, and drops its copies of the events when it polls.
#[test]
fn child_cannot_put_back_events_of_its_parent() {
    alone("tests::notifications::child_cannot_put_back_events_of_its_parent", || {
        let (one, two) = linked();
        for number in 0..3_u8 {
            sent(&one, 2, &[number]);
        }
        received(&two, 3, 3);
        sent(&one, 2, b"parent");
        await_events(&two);
        let (_, events) = polled(&two, 1);
        in_a_child(|| {
            let refused = llm_datadist_unpoll(two.0, 1) == failure::status(StatusCode::Failed);
            let own = open(3);
            let nothing = llm_datadist_unpoll(own.0, 1) == failure::status(StatusCode::ParamInvalid);
            refused && nothing && polled(&own, 9).1.is_empty() && llm_datadist_finalize(own.0) == 0
        });
        assert_eq!(message(&events[0]), (1, b"parent".to_vec()));
        assert_eq!(llm_datadist_unpoll(two.0, 1), 0, "{}", reason());
    });
}

/// An event that was put back has the same outcome, and its transfer counts once.
#[test]
fn outcomes_of_transfers_can_be_put_back() {
    let (one, two) = linked();
    let (one, _two) = (with_cache(one), with_cache(two));
    let (_, transfer) = pull(&one, null(), 0);
    for _ in 0..3 {
        await_events(&one);
        let (_, events) = polled(&one, 9);
        assert_eq!((events.len(), events[0].kind), (1, LLM_DATADIST_EVENT_COMPLETED));
        assert_eq!((events[0].transfer, events[0].status), (transfer, 0));
        assert_eq!(llm_datadist_unpoll(one.0, 1), 0);
    }
    assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0);
    assert!(polled(&one, 9).1.is_empty(), "the outcome was taken");
}

#[test]
fn links_come_and_go() {
    let (one, two) = (open(1), open(2));
    assert!(polled(&one, 9).1.is_empty(), "events of links are kept from now on");
    link(&one, &two);
    let (_, events) = polled(&one, 9);
    let [up] = events.as_slice() else { panic!("{} events", events.len()) };
    assert_eq!((up.kind, up.status, up.cluster_id), (LLM_DATADIST_EVENT_LINK_UP, 0, 2));
    assert!(up.incarnation != 0 && up.payload.is_null() && up.reason.is_null());
    let (incarnation, address) = (up.incarnation, text(up.address));
    assert!(address.contains(':'), "{address}");
    assert!(["shm", "tcp"].contains(&text(up.transport).as_str()));
    unlink(&one, &two);
    for _ in 0..2 {
        let (_, events) = polled(&one, 9);
        let [down] = events.as_slice() else { panic!("{} events", events.len()) };
        assert_eq!((down.kind, down.cluster_id, down.unacknowledged), (LLM_DATADIST_EVENT_LINK_DOWN, 2, 0));
        assert_eq!((down.incarnation, text(down.address)), (incarnation, address.clone()));
        assert!(text(down.reason).len() > 5, "{}", text(down.reason));
        assert_eq!(llm_datadist_unpoll(one.0, 1), 0, "{}", reason());
    }
    failed(notify(&one, 2, b"x"), StatusCode::NotYetLink, &["2"]);
}

/// A poll that fails takes nothing.
#[test]
fn failed_poll_loses_no_message() {
    let (one, two) = linked();
    sent(&one, 2, b"kept");
    await_events(&two);
    let (mut events, mut count) = (polled(&one, 1).1, 7);
    // SAFETY: null is refused, before an event is taken.
    unsafe {
        refused(llm_datadist_poll(two.0, 1, std::ptr::null_mut(), &raw mut count), &["events is null"]);
        refused(
            llm_datadist_poll(two.0, 1, events.as_mut_ptr(), std::ptr::null_mut()),
            &["num_events is null"],
        );
    }
    events.clear();
    assert_eq!(count, 0);
    assert_eq!(received(&two, 1, 9), [(1, b"kept".to_vec())]);
}
