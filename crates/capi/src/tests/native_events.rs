//! Two engines of this process: links, transfers between them, messages, grants, and the events of all of these.
//!
//! Not for: peers that do not answer or die (`tests/c/native.c`).

use std::ffi::CString;
use std::ptr::{null, null_mut, without_provenance};
use std::slice;

use super::native::{
    CALL, LONG, Node, ROWS, fails, has_native_words, pair, progress, start, started, succeeds,
};
use super::{reason, text};
use crate::abi::*;

/// Space for an event. The library writes every field.
const EMPTY: LlmDatadistEvent = LlmDatadistEvent {
    kind: 0,
    status: 7,
    transfer: 7,
    peer: LlmDatadistPeer {
        peer: 7,
        name: without_provenance(7),
        address: without_provenance(7),
        transport: without_provenance(7),
        metadata: without_provenance(7),
        metadata_size: 7,
        reserved: [7; 2],
    },
    message: without_provenance(7),
    message_size: 7,
    reason: without_provenance(7),
    unconfirmed: 7,
    token: [7; LLM_DATADIST_TOKEN_SIZE],
    reserved: [7; 4],
};

pub(super) fn events(node: &Node, most: usize) -> Vec<LlmDatadistEvent> {
    let (mut events, mut count) = (vec![EMPTY; most], 77);
    // SAFETY: the list has space for as many events as are asked for.
    let status = unsafe { llm_datadist_events(node.engine, most, events.as_mut_ptr(), &raw mut count) };
    assert!(status == 0 && count <= most, "{}", reason());
    events.truncate(count);
    events
}

pub(super) fn descriptor(node: &Node) -> i32 {
    let mut descriptor = -1;
    // SAFETY: it lives here.
    assert_eq!(unsafe { llm_datadist_event_descriptor(node.engine, &raw mut descriptor) }, 0, "{}", reason());
    descriptor
}

pub(super) fn readable(descriptor: i32, milliseconds: i32) -> bool {
    let mut asked = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, which lives here.
    unsafe { libc::poll(&raw mut asked, 1, milliseconds) == 1 }
}

/// Waits for `count` events of a kind, takes at most `most` at a time, and returns what `read` makes of them. Others are dropped.
fn awaited<T>(
    node: &Node,
    kind: u32,
    (count, most): (usize, usize),
    read: impl Fn(&LlmDatadistEvent) -> T,
) -> Vec<T> {
    let (mut all, descriptor) = (Vec::new(), descriptor(node));
    while all.len() < count {
        assert!(readable(descriptor, 60_000), "no event came");
        all.extend(events(node, most).iter().filter(|event| event.kind == kind).map(&read));
    }
    assert_eq!(all.len(), count);
    all
}

/// A copy of the message of an event.
fn message(event: &LlmDatadistEvent) -> Vec<u8> {
    assert_eq!((event.kind, event.status, event.transfer), (LLM_DATADIST_MESSAGE, 0, 0));
    // SAFETY: this thread has not asked for events again.
    unsafe { slice::from_raw_parts(event.message, event.message_size) }.to_vec()
}

fn messages(node: &Node, count: usize, most: usize) -> Vec<Vec<u8>> {
    awaited(node, LLM_DATADIST_MESSAGE, (count, most), message)
}

/// Two linked engines, and each as the peer of the other one.
pub(super) struct Linked {
    pub(super) one: Node,
    pub(super) two: Node,
    /// What `one` calls `two`.
    to_two: u64,
    /// What `two` calls `one`.
    to_one: u64,
}

fn address(node: &Node) -> CString {
    let mut address = [0; LLM_DATADIST_ADDRESS_SIZE];
    // SAFETY: there is space for it.
    let status = unsafe { llm_datadist_engine_address(node.engine, address.as_mut_ptr(), address.len()) };
    assert_eq!(status, 0, "{}", reason());
    CString::new(text(address.as_ptr())).unwrap()
}

fn link(one: &Node, two: &Node, name: *const std::ffi::c_char) -> (u32, u64) {
    let at = address(two);
    // SAFETY: everything lives here.
    started(|out| unsafe { llm_datadist_link(one.engine, at.as_ptr(), name, LONG, out) })
}

impl Linked {
    pub(super) fn new() -> Linked {
        let (one, two) =
            (Node::new(&[("name", "one")]), Node::new(&[("name", "two"), ("metadata", "about two")]));
        let (status, transfer) = link(&one, &two, c"two".as_ptr());
        assert_eq!(status, 0, "{}", reason());
        assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0, "{}", reason());
        let mut to_two = 0;
        // SAFETY: it lives here.
        assert_eq!(unsafe { llm_datadist_transfer_peer(transfer, &raw mut to_two) }, 0, "{}", reason());
        assert_eq!(llm_datadist_transfer_free(transfer), 0);
        let [to_one] = awaited(&two, LLM_DATADIST_PEER_UP, (1, 9), |event| event.peer.peer)[..] else {
            panic!()
        };
        awaited(&one, LLM_DATADIST_PEER_UP, (1, 9), |_| ());
        Linked { one, two, to_two, to_one }
    }

    fn send(&self, message: &[u8]) -> u32 {
        // SAFETY: the message lives in the caller.
        unsafe { llm_datadist_send(self.one.engine, self.to_two, message.as_ptr(), message.len()) }
    }

    fn sent(&self, message: &[u8]) {
        assert_eq!(self.send(message), 0, "{}", reason());
    }

    /// Rows of the cache of `two`, as `one` names them.
    fn remote(&self, blocks: &'static [u32]) -> LlmDatadistRows {
        let name = c"kv".as_ptr();
        LlmDatadistRows { peer: self.to_two, name, blocks: blocks.as_ptr(), num_blocks: blocks.len(), ..ROWS }
    }

    /// Starts to pull blocks of `two` into `one`.
    fn pull(
        &self,
        dst: &'static [u32],
        src: &'static [u32],
        token: *const u8,
        call: &LlmDatadistCall,
    ) -> (u32, u64) {
        let pair = LlmDatadistPair { token, ..pair(self.one.rows(dst), self.remote(src)) };
        start(llm_datadist_pull, self.one.engine, &[pair], call)
    }

    pub(super) fn push(
        &self,
        dst: &'static [u32],
        src: &'static [u32],
        call: &LlmDatadistCall,
    ) -> (u32, u64) {
        start(llm_datadist_push, self.one.engine, &[pair(self.remote(dst), self.one.rows(src))], call)
    }

    /// Starts a push whose layers, 0 and 1, nobody has reported.
    pub(super) fn layerwise_push(&self) -> u64 {
        let (status, push) =
            self.push(&[4], &[2], &LlmDatadistCall { flags: LLM_DATADIST_LAYERWISE, ..CALL });
        assert_eq!(status, 0, "{}", reason());
        push
    }
}

fn with_message(message: &[u8]) -> LlmDatadistCall {
    LlmDatadistCall { message: message.as_ptr(), message_size: message.len(), ..CALL }
}

#[test]
fn pulls_and_pushes_move_bytes_between_engines() {
    let linked = Linked::new();
    linked.one.fill(1);
    linked.two.fill(2);
    succeeds(linked.pull(&[5, 6], &[1, 0], null(), &CALL));
    assert!(linked.one.has(5, 2, 1) && linked.one.has(6, 2, 0) && linked.one.has(4, 1, 4));
    succeeds(linked.push(&[7], &[3], &with_message(b"pushed")));
    assert!(linked.two.has(7, 1, 3) && linked.two.has(6, 2, 6));
    assert_eq!(messages(&linked.two, 1, 9), [b"pushed"]);
    // The layers 0 and 1 have two tensors each.
    let push = linked.layerwise_push();
    assert_eq!(llm_datadist_transfer_ready(push, 1), 0, "{}", reason());
    fails(llm_datadist_transfer_ready(push, 1), LLM_DATADIST_INVALID_ARGUMENT, &["layer"]);
    fails(llm_datadist_transfer_ready(push, 2), LLM_DATADIST_INVALID_ARGUMENT, &["layer"]);
    assert_eq!(llm_datadist_transfer_result(push), LLM_DATADIST_RUNNING);
    assert_eq!(reason(), "the transfer still runs");
    assert_eq!(llm_datadist_transfer_ready(push, 0), 0, "{}", reason());
    succeeds((0, push));
    assert!(linked.two.has(4, 1, 2));
}

/// Nobody could report the layers of a push whose handle is freed.
#[test]
fn freeing_the_handle_of_a_layerwise_push_cancels_it() {
    let linked = Linked::new();
    let push = linked.layerwise_push();
    assert_eq!(llm_datadist_transfer_free(push), 0, "{}", reason());
    let ended = awaited(&linked.one, LLM_DATADIST_COMPLETED, (1, 9), |event| (event.transfer, event.status));
    assert_eq!(ended, [(push, LLM_DATADIST_CANCELLED)]);
}

/// A failure has the same status in the event and in the result, which also sets the reason.
#[test]
fn failures_are_outcomes_with_a_reason() {
    let linked = Linked::new();
    let wrong = LlmDatadistRows { name: c"other".as_ptr(), ..linked.remote(&[0]) };
    let pair = pair(linked.one.rows(&[0]), wrong);
    let (status, transfer) = start(llm_datadist_pull, linked.one.engine, &[pair], null());
    assert_eq!(status, 0, "{}", reason());
    let ended = awaited(&linked.one, LLM_DATADIST_COMPLETED, (1, 9), |event| (event.transfer, event.status));
    assert_eq!(ended, [(transfer, LLM_DATADIST_NOT_FOUND)]);
    for _ in 0..2 {
        fails(linked.one.try_copy(9, 0).0, LLM_DATADIST_INVALID_ARGUMENT, &[]);
        fails(llm_datadist_transfer_result(transfer), LLM_DATADIST_NOT_FOUND, &["other"]);
        assert_eq!(text(llm_datadist_last_error_code()), "not_found");
    }
    assert_eq!(progress(transfer).1, 0);
    assert_eq!(linked.pull(&[0], &[9], null(), &CALL).0, 0, "{}", reason());
    let ended = awaited(&linked.one, LLM_DATADIST_COMPLETED, (1, 9), |event| event.status);
    assert_eq!(ended, [LLM_DATADIST_INVALID_ARGUMENT], "the peer has no such block");
}

/// Events come in order, each once, and the descriptor is readable exactly while there are any.
#[test]
fn events_and_their_descriptor() {
    let node = Node::new(&[]);
    let early = descriptor(&node);
    assert!(!readable(early, 0) && events(&node, 9).is_empty());
    let transfers: Vec<u64> = (0..4)
        .map(|_| {
            let transfer = node.copy(2, 0);
            while !llm_datadist_transfer_done(transfer) {
                std::thread::yield_now();
            }
            transfer
        })
        .collect();
    assert!(readable(early, 60_000) && descriptor(&node) == early);
    // An outcome that was taken is no event any more.
    assert_eq!(llm_datadist_transfer_result(transfers[1]), 0);
    assert_eq!(llm_datadist_transfer_free(transfers[2]), 0);
    let ended = awaited(&node, LLM_DATADIST_COMPLETED, (2, 2), |event| *event);
    assert_eq!([ended[0].transfer, ended[1].transfer], [transfers[0], transfers[2]]);
    for event in &ended {
        assert!(event.status == 0 && event.message.is_null() && event.reason.is_null());
        assert_eq!(
            (event.peer.peer, event.unconfirmed, event.token, event.reserved),
            (0, 0, [0; 48], [0; 4])
        );
    }
    awaited(&node, LLM_DATADIST_COMPLETED, (1, 9), |_| ());
    assert!(!readable(early, 0) && events(&node, 9).is_empty());
    assert_eq!(llm_datadist_transfer_result(transfers[0]), 0, "the transfer keeps its outcome");
}

#[test]
fn messages_have_any_length_up_to_the_limit() {
    let linked = Linked::new();
    let sent = [vec![7; LLM_DATADIST_MAX_MESSAGE], Vec::new(), vec![1]];
    for message in &sent {
        linked.sent(message);
    }
    assert_eq!(messages(&linked.two, 3, 2), sent);
}

/// The messages of a thread stay where they are while other threads take theirs.
#[test]
fn messages_belong_to_the_thread_that_took_them() {
    let linked = Linked::new();
    (0..10_u8).for_each(|number| linked.sent(&[number; 100]));
    // Comes behind the messages, so they have all arrived.
    succeeds(linked.pull(&[0], &[0], null(), &with_message(b"last")));
    let first = events(&linked.two, 6);
    let rest = std::thread::scope(|scope| scope.spawn(|| messages(&linked.two, 5, 9)).join().unwrap());
    assert!((0..6_u8).zip(&first).all(|(number, event)| message(event) == [number; 100]));
    assert!(rest[0] == [6; 100] && rest[4] == b"last");
}

/// A call that fails takes nothing.
#[test]
fn failed_call_loses_no_event() {
    let linked = Linked::new();
    linked.sent(b"kept");
    assert!(readable(descriptor(&linked.two), 60_000));
    let mut count = 7;
    // SAFETY: null is refused, before an event is taken.
    let status = unsafe { llm_datadist_events(linked.two.engine, 1, null_mut(), &raw mut count) };
    fails(status, LLM_DATADIST_INVALID_ARGUMENT, &["events is null"]);
    assert_eq!((count, messages(&linked.two, 1, 9)), (7, vec![b"kept".to_vec()]));
    // Null is space for no event.
    // SAFETY: nothing is written to the list.
    let status = unsafe { llm_datadist_events(linked.two.engine, 0, null_mut(), &raw mut count) };
    assert_eq!((status, count), (0, 0), "{}", reason());
}

#[test]
fn peer_of_another_name_is_not_linked() {
    let (one, two) = (Node::new(&[]), Node::new(&[("name", "two")]));
    let (status, wrong) = link(&one, &two, c"three".as_ptr());
    assert_eq!(status, 0, "{}", reason());
    fails(llm_datadist_transfer_wait(wrong, LONG), LLM_DATADIST_PEER_LOST, &["'two'", "'three'"]);
    assert_eq!(text(llm_datadist_last_error_code()), "link_failed");
}

#[test]
fn links_come_and_go() {
    let linked = Linked::new();
    let (mut peers, mut count) = ([EMPTY.peer; 2], 0);
    // SAFETY: there is space for two.
    assert_eq!(unsafe { llm_datadist_peers(linked.one.engine, 2, peers.as_mut_ptr(), &raw mut count) }, 0);
    let two = &peers[0];
    assert_eq!((count, two.peer, text(two.name)), (1, linked.to_two, "two".into()));
    assert_eq!(text(two.address), address(&linked.two).to_str().unwrap());
    assert!(["shm", "tcp"].contains(&text(two.transport).as_str()));
    // SAFETY: this thread has not asked again.
    assert_eq!(unsafe { slice::from_raw_parts(two.metadata, two.metadata_size) }, b"about two");
    // SAFETY: a handle lives in `started`.
    succeeds(started(|out| unsafe { llm_datadist_peer_close(linked.one.engine, linked.to_two, LONG, out) }));
    for (node, peer) in [(&linked.one, linked.to_two), (&linked.two, linked.to_one)] {
        let down = awaited(node, LLM_DATADIST_PEER_DOWN, (1, 9), |event| {
            has_native_words(&text(event.reason));
            (event.peer.peer, event.unconfirmed, text(event.reason).len() > 5)
        });
        assert_eq!(down, [(peer, 0, true)]);
    }
    fails(linked.send(b"x"), LLM_DATADIST_PEER_LOST, &["there is no link to two", "peer_name=two"]);
    assert_eq!(text(llm_datadist_last_error_code()), "not_linked");
}

#[test]
fn grants_protect_pulls_that_name_them() {
    let linked = Linked::new();
    linked.two.fill(2);
    let (rows, mut token) = (linked.two.rows(&[1, 2]), [0_u8; LLM_DATADIST_TOKEN_SIZE]);
    let lend = |token: &mut [u8; LLM_DATADIST_TOKEN_SIZE]| {
        // SAFETY: everything lives here.
        let status =
            unsafe { llm_datadist_lend(linked.two.engine, &raw const rows, LONG, 1, token.as_mut_ptr()) };
        assert_eq!(status, 0, "{}", reason());
    };
    lend(&mut token);
    let more = LlmDatadistCall { flags: LLM_DATADIST_MORE_PULLS, ..CALL };
    succeeds(linked.pull(&[4], &[1], token.as_ptr(), &more));
    // SAFETY: the token lives in the caller.
    let renew = |node: &Node, token: &[u8]| unsafe { llm_datadist_renew(node.engine, token.as_ptr(), LONG) };
    assert_eq!(renew(&linked.two, &token), 0, "{}", reason());
    succeeds(linked.pull(&[5], &[2], token.as_ptr(), &CALL));
    assert!(linked.one.has(4, 2, 1) && linked.one.has(5, 2, 2));
    let closed =
        |node| awaited(node, LLM_DATADIST_GRANT_CLOSED, (1, 9), |event| (event.token, text(event.reason)));
    assert_eq!(closed(&linked.two), [(token, "done".into())]);
    fails(renew(&linked.two, &token), LLM_DATADIST_GRANT_ENDED, &[]);
    fails(renew(&linked.one, &token), LLM_DATADIST_INVALID_ARGUMENT, &["token"]);
    lend(&mut token);
    // SAFETY: the token lives here.
    succeeds(started(|out| unsafe { llm_datadist_revoke(linked.two.engine, token.as_ptr(), out) }));
    assert_eq!(closed(&linked.two), [(token, "revoked".into())]);
    let (_, late) = linked.pull(&[4], &[1], token.as_ptr(), &CALL);
    fails(llm_datadist_transfer_wait(late, LONG), LLM_DATADIST_GRANT_ENDED, &[]);
}
