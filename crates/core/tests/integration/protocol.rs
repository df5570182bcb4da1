//! The bytes of the protocol: every message against the recorded bytes of its version, and invalid input.
//!
//! Sockets are tested in `transport`.

use std::ops::Range;
use std::sync::Arc;

use llm_datadist_core::bindings::CacheKey;
use llm_datadist_core::testing::model::{AddressLocation, CacheLayout, GrantId, MAX_NAME, Name};
use llm_datadist_core::testing::plan::{
    CopyPlan, MAX_TEMPLATE_SPANS, MAX_TEMPLATES, Side, Span, Template, TensorSteps,
};
use llm_datadist_core::testing::protocol::{
    self, Attach, Attached, BoundedBytes, CHECKSUM, Challenge, Comm, Confirm, ControlMessage, EnteredLink,
    EntryVersion, HANDSHAKE_LIMIT, HEADER, Header, Hello, LinkAnswer, MAX_ARRIVED, MAX_METADATA, MESSAGE,
    MESSAGE_LIMIT, METADATA_LIMIT, NamedCache, Party, Proof, Purpose, REFUSAL, REFUSAL_OF_ANOTHER_VERSION,
    Reply, Request, RingAnswer, RingOffer, Run, Timed, Welcome, WireCache, WireLocation, WirePlan,
    WireTemplates, WireUsedKey,
};
use llm_datadist_core::{ArrivedRows, CacheId, CacheKind, Error, ErrorKind, Placement};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::counting_allocator;
use crate::fixtures::{listed, plan_of_peer};

/// Checks the bytes of a message between its header and its checksum.
fn golden<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, expected: &str) {
    let frame = protocol::encode(message).unwrap();
    let bytes = message_bytes(&frame);
    assert_eq!(hex(bytes), expected, "{message:?}");
    let header = Header::parse(frame[..HEADER].try_into().unwrap(), MESSAGE_LIMIT).unwrap();
    assert_eq!(header, Header { kind: MESSAGE, length: frame.len() - HEADER });
    assert_eq!(&protocol::open::<T>(header.kind, &frame[HEADER..]).unwrap(), message);
    // A shorter or longer body is not that message.
    for cut in HEADER..frame.len() {
        assert_eq!(protocol::decode::<T>(&frame[HEADER..cut]).unwrap_err().kind(), ErrorKind::NotLinked);
    }
    let error = protocol::decode_message::<T>(&[bytes, &[0]].concat()).unwrap_err();
    assert_eq!((error.kind(), error.fact("unread")), (ErrorKind::NotLinked, Some("1")));
    for cut in 0..bytes.len() {
        let error = protocol::decode_message::<T>(&bytes[..cut]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotLinked);
    }
}

/// Returns the bytes of a message in its frame, without header and checksum.
fn message_bytes(frame: &[u8]) -> &[u8] {
    &frame[HEADER..frame.len() - CHECKSUM]
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

const PARTY: Party = Party { cluster: 1, instance: 300, remote_accessible: true };
const AT: EntryVersion = EntryVersion { index: 5, generation: 600 };

fn plan() -> WirePlan {
    let span = Span { src: 4096, dst: 0, len: 512, count: 3, src_step: -1024, dst_step: 512 };
    WirePlan {
        num_tensors: 2,
        src: TensorSteps::consecutive(0),
        dst: TensorSteps::consecutive(4),
        templates: spans(&[span, single(0, 9000, 512), single(8192, 1 << 40, 512)]),
    }
}

/// Spans that are not repeated.
fn spans(spans: &[Span]) -> WireTemplates {
    WireTemplates(Ok(listed(vec![template((0, 0), vec![(0, 0)], spans)])))
}

/// A plan of blocks of `len` bytes.
fn blocks(len: u64, pairs: Vec<(u32, u32)>) -> WirePlan {
    let blocks = template((len, len), pairs, &[single(512, 4096, len)]);
    WirePlan { templates: WireTemplates(Ok(listed(vec![blocks]))), ..plan() }
}

/// One piece of `len` bytes.
fn single(src: u64, dst: u64, len: u64) -> Span {
    Span { src, dst, len, count: 1, src_step: 0, dst_step: 0 }
}

fn template(units: (u64, u64), pairs: Vec<(u32, u32)>, spans: &[Span]) -> Template {
    Template::new(units, pairs, spans.to_vec())
}

/// A plan that reads every second tensor.
fn templates(templates: Vec<Template>) -> WirePlan {
    let (src, dst) = (TensorSteps { first: 1, step: 2 }, TensorSteps { first: 4, step: 1 });
    WirePlan { num_tensors: 2, src, dst, templates: WireTemplates(Ok(listed(templates))) }
}

/// Heads of two tokens, and a rest.
fn layout_plan() -> WirePlan {
    let heads = Span { count: 3, src_step: -16, dst_step: 300, ..single(64, 8, 16) };
    templates(vec![
        template((128, 16), vec![(1, 0), (300, 2)], &[heads, single(96, 1 << 20, 16)]),
        template((0, 0), vec![(0, 0)], &[single(5000, 6000, 7)]),
    ])
}

fn read(plan: WirePlan) -> Request {
    let cache = NamedCache { name: Name::Key(CacheKey::Blocks { model: 1 }), id: CacheId(3) };
    Request::Read { cache, generation: None, plan, range: 0..0, summed: false }
}

/// The id of a grant, and the bytes of a name that is one.
const GRANT: GrantId = GrantId { slot: 44, generation: 600, secret: [7; 16] };
const GRANTED: &str = "022cd80407070707070707070707070707070707";

/// The bytes of [`plan`] and of [`layout_plan`].
const PLAN: &str = "02000104010100000301000003802000800403ff0f800800a846800401000080408080808080208004010000";
const LAYOUT_PLAN: &str =
    "0201020401028001100902010000002c01020002400810031fd8046080804010010000000003010000018827f02e07010000";

fn record(location: WireLocation) -> WireCache {
    WireCache {
        at: AT,
        cache: CacheId(3),
        row: 2,
        num_tensors: 80,
        rows: 128,
        row_bytes: 65536,
        row_stride: 65536,
        blocks: true,
        placement: 1,
        allocated: true,
        accessible: false,
        location,
        layout: None,
        granted: Vec::new(),
    }
}

fn hello(purpose: Purpose, asked: Option<u64>) -> Hello {
    Hello { purpose, from: PARTY, asked, host: "abc".into(), nonce: [7; 16] }
}

/// The header and the checksum, of which the other tests of recorded bytes need no copies.
#[test]
fn frame_bytes() {
    let dial = protocol::encode(&ControlMessage::Dial).unwrap();
    assert_eq!(hex(&dial), "4c4412010900000003b64b1fbcd0c8251f");
    let proof = protocol::encode(&Proof { mac: [9; 32] }).unwrap();
    assert_eq!(hex(&proof), format!("4c44120128000000{}9931dd9a98964551", "09".repeat(32)));
}

#[test]
fn handshake_bytes() {
    let hello = |purpose, asked, start: &str| {
        golden(&hello(purpose, asked), &format!("{start}03616263{}", "07".repeat(16)));
    };
    let comm = Comm { name: "c".into(), members: vec![(1, 0), (u64::MAX, 1)], listener: "a:1".into() };
    let link = Purpose::Link { link: 9, comm: Some(comm), probe_local: false, ensure: false };
    hello(link, Some(2), "0009010163020100ffffffffffffffffff010103613a31000001ac02010102");
    let link = Purpose::Link { link: 9, comm: None, probe_local: true, ensure: true };
    hello(link, None, "000900010101ac020100");
    hello(Purpose::Call { link: 9, reverse: true, rings: false }, None, "0109010001ac020100");
    hello(Purpose::Call { link: 9, reverse: false, rings: true }, None, "0109000101ac020100");
    hello(Purpose::Meet, None, "0201ac020100");
    let comm = Comm { name: "c".into(), members: vec![(1, 0)], listener: "a".into() };
    hello(Purpose::Announce { comm }, None, "030163010100016101ac020100");
    golden(&RingOffer, "");
    golden(&RingAnswer::Used, "00");
    golden(&RingAnswer::Refused { reason: "no".into() }, "01026e6f");
    golden(&Challenge { nonce: [8; 16] }, "08080808080808080808080808080808");
    golden(&Proof { mac: [9; 32] }, &"09".repeat(32));
    let [mac, secret] = ["01", "03"].map(|byte| byte.repeat(32));
    let welcome = |local, secret| Welcome { from: PARTY, mac: [1; 32], local, secret };
    golden(&welcome(Some("x".into()), None), &format!("01ac0201{mac}01017800"));
    golden(&welcome(None, Some([3; 32])), &format!("01ac0201{mac}0001{secret}"));
    let attach = Attach { generations: true, pools: [None, Some(1 << 30)], probe: Some((300, [2; 16])) };
    golden(&attach, &format!("010001808080800401ac02{}", "02".repeat(16)));
    golden(&Attach { generations: false, pools: [Some(1), None], probe: None }, "0001010000");
    golden(&Attached { pools: Ok(()), process: Err("no".into()) }, "0001026e6f");
    let metadata = BoundedBytes(Arc::new(b"meta".to_vec()));
    golden(&Confirm { name: "ab".into(), metadata: metadata.clone(), fabric: None }, "026162046d65746100");
    let entered = EnteredLink { name: String::new(), metadata, fabric: None, addresses: vec![] };
    golden(&LinkAnswer::Entered(entered), "0000046d6574610000");
    golden(&LinkAnswer::Later { reason: "no".into() }, "01026e6f");
}

#[test]
fn metadata_is_bounded() {
    let confirm = |bytes| {
        let metadata = BoundedBytes(Arc::new(vec![7; bytes]));
        Confirm { name: "x".repeat(MAX_NAME), metadata, fabric: None }
    };
    let body = |bytes| protocol::encode(&confirm(bytes)).unwrap().split_off(HEADER);
    assert_eq!(protocol::decode::<Confirm>(&body(MAX_METADATA)).unwrap(), confirm(MAX_METADATA));
    assert!(body(MAX_METADATA).len() <= METADATA_LIMIT);
    let error = protocol::decode::<Confirm>(&body(MAX_METADATA + 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotLinked);
    // Nothing is allocated for a length that is not there.
    let claimed = b"\0\xff\xff\xff\xff\x0f";
    let (error, peak) =
        counting_allocator::peak(|| protocol::decode_message::<Confirm>(claimed).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::NotLinked);
    assert!(peak < 4096, "{peak}");
}

/// Names of engines and caches that could break a line of a log are refused.
#[test]
fn names_are_short_and_printable() {
    let find = |name: &str| Request::Find { name: name.into() };
    let confirm = |name: &str| Confirm { name: name.into(), metadata: BoundedBytes::default(), fabric: None };
    let entered = |name: &str| EnteredLink { name: name.into(), ..EnteredLink::default() };
    let longest = "é".repeat(MAX_NAME / 2);
    for good in ["", " ", "kv/layer 3", "漢字 🦀 e\u{301}", "'\"\\", &longest] {
        let read = [again(&find(good)), again(&confirm(good)), again(&entered(good))];
        assert!(read.iter().all(Result::is_ok), "{good}: {read:?}");
    }
    let unprintable =
        ['\0', '\n', '\u{1b}', '\u{7f}', '\u{85}', '\u{2028}', '\u{2029}', '\u{202e}', '\u{2066}'];
    for bad in unprintable.map(|sign| format!("a{sign}b")).into_iter().chain([longest + "x"]) {
        for read in [again(&find(&bad)), again(&confirm(&bad)), again(&entered(&bad))] {
            assert_eq!(read.unwrap_err().kind(), ErrorKind::NotLinked, "{bad:?}");
        }
    }
    // Not UTF-8: the last bytes of the message are the text.
    let mut bytes = message_bytes(&protocol::encode(&find("ab")).unwrap()).to_vec();
    *bytes.last_mut().unwrap() = 0xff;
    assert_eq!(protocol::decode_message::<Request>(&bytes).unwrap_err().kind(), ErrorKind::NotLinked);
}

/// Encodes a message and decodes it again.
fn again<T: Serialize + DeserializeOwned>(message: &T) -> Result<(), Error> {
    protocol::decode_message::<T>(message_bytes(&protocol::encode(message).unwrap())).map(drop)
}

#[test]
fn control_stream_bytes() {
    golden(&ControlMessage::Ping, "00");
    golden(&ControlMessage::Pong, "01");
    golden(&ControlMessage::Bye { reason: "end".into(), unlinked: true }, "0203656e6401");
    golden(&ControlMessage::Dial, "03");
    golden(&ControlMessage::Polled { arrived: (300, 5), polled: (1, 0) }, "04ac02050100");
}

#[test]
fn request_bytes() {
    let timed = |request| Timed { limit_ms: 1000, request };
    let named = NamedCache { name: Name::Key(CacheKey::Blocks { model: 1 }), id: CacheId(3) };
    let granted = NamedCache { name: Name::Grant(GRANT), ..named };
    for (name, bytes) in [
        (Name::Key(CacheKey::Request { model: 1, id: 2 }), "e8070000000102"),
        (Name::Key(CacheKey::Prefix { model: 1, id: 2 }), "e8070000010102"),
        (Name::Key(CacheKey::Blocks { model: 1 }), "e80700000201"),
        (Name::Row { cache: CacheId(-1), row: 2 }, "e80700010102"),
        (Name::Grant(GRANT), &format!("e80700{GRANTED}")),
    ] {
        golden(&timed(Request::Describe { name }), bytes);
    }
    let read = |cache, generation, summed| {
        timed(Request::Read { cache, generation, plan: plan(), range: 0..7168, summed })
    };
    golden(&read(named, None, false), &format!("e807010002010600{PLAN}00803800"));
    golden(&read(granted, Some(300), true), &format!("e80701{GRANTED}0601ac02{PLAN}00803801"));
    let checksums = |cache, side| timed(Request::Checksums { cache, plan: layout_plan(), side });
    golden(&checksums(named, Side::Source), &format!("e8070900020106{LAYOUT_PLAN}00"));
    golden(&checksums(granted, Side::Destination), &format!("e80709{GRANTED}06{LAYOUT_PLAN}01"));
    golden(&Reply::Checksums { generation: 300, sums: vec![1, u64::MAX] }, "07ac020201ffffffffffffffffff01");
    let write =
        |ahead, shared| timed(Request::Write { cache: named, plan: plan(), range: 0..7168, ahead, shared });
    golden(&write(false, None), &format!("e8070200020106{PLAN}0080380000"));
    golden(&write(true, None), &format!("e8070200020106{PLAN}0080380100"));
    golden(&write(false, Some(300)), &format!("e8070200020106{PLAN}0080380001ac02"));
    golden(&timed(Request::WritePart { write: 300, range: 7168..7169 }), "e8070aac0280388138");
    let source = WireLocation::Process { runs: vec![Run { start: 4096, step: 8192, count: 2 }] };
    let fetch = Request::Fetch { cache: named, plan: plan(), source, num_tensors: 2, tensor_bytes: 8192 };
    golden(&timed(fetch), &format!("e8070300020106{PLAN}01018020804002028040"));
    let cache = NamedCache { name: Name::Key(CacheKey::Request { model: 0, id: 0 }), ..named };
    let used_key = Some(WireUsedKey { cache, first: 0, count: 80 });
    golden(&timed(Request::Finish { used_key, message: None }), "e80704010000000006005000");
    let used_key = Some(WireUsedKey::of_grant(GRANT));
    let message = Some(BoundedBytes(b"no".to_vec()));
    golden(&timed(Request::Finish { used_key, message }), &format!("e8070401{GRANTED}00000001026e6f"));
    let messages = vec![BoundedBytes(b"no".to_vec()), BoundedBytes(vec![])];
    golden(&timed(Request::Notify { messages }), "e8070802026e6f00");
    golden(&timed(Request::Unlink), "e80705");
    golden(&Timed { limit_ms: 0, request: Request::Ping }, "0006");
    golden(&Timed { limit_ms: 5, request: Request::Locate { addrs: vec![4096, 300] } }, "0507028020ac02");
    golden(&timed(Request::Find { name: "é".into() }), "e8070b02c3a9");
    golden(&Reply::Found { cache: CacheId(300) }, "08d804");
    let location = AddressLocation { cache: CacheId(3), tensor: 2, offset: 300 };
    golden(&Reply::Located(vec![location]), "06010602ac02");
}

#[test]
fn reply_bytes() {
    let runs = vec![Run { start: 0, step: u64::MAX, count: 80 }];
    golden(
        &Reply::Described(record(WireLocation::Pool { pool: 1, runs })),
        "0005d80406025080018080048080040101010000010100ffffffffffffffffff01500000",
    );
    golden(&Reply::Described(record(WireLocation::Hidden)), "0005d804060250800180800480800401010100020000");
    let granted = vec![(0, 300), (301, 302)];
    let cache = WireCache { granted, ..record(WireLocation::Hidden) };
    golden(&Reply::Described(cache), "0005d80406025080018080048080040101010002000200ac02ad02ae02");
    golden(&Reply::Ready { bytes: 300 }, "01ac02");
    golden(&Reply::Done { bytes: 1 << 63 }, "0280808080808080808001");
    golden(&Reply::Stale, "03");
    golden(&Reply::Unreachable { reason: "no".into() }, "04026e6f");
    let failed = Reply::Failed { kind: 1, message: "no".into(), arrived: vec![(7, 2, 300)] };
    golden(&failed, "0501026e6f010702ac02");
}

/// A kind travels as its position in the list of kinds, whose order `errors` pins.
#[test]
fn error_kinds_keep_their_numbers() {
    for (number, kind) in (0..).zip(ErrorKind::ALL) {
        assert_eq!((protocol::kind_number(kind), protocol::kind_of(number)), (number, kind));
    }
    assert_eq!(protocol::kind_of(250), ErrorKind::System);
}

#[test]
fn a_refusal_crosses_versions() {
    let error = Error::new(ErrorKind::LinkFailed, "wrong token").with("peer", "x");
    let frame = protocol::refusal(&error);
    assert_eq!(hex(&frame), "4c4412ff1800000009000000".to_owned() + &hex(b"wrong token (peer=x)"));
    assert_eq!(frame[3], REFUSAL);
    // The version that wrote it does not matter.
    for version in [0, 1, 2, 3, 4, 5, 6, 7, 8, 255] {
        let mut header: [u8; HEADER] = frame[..HEADER].try_into().unwrap();
        header[2] = version;
        let header = Header::parse(header, HANDSHAKE_LIMIT).unwrap();
        assert_eq!(header, Header { kind: REFUSAL_OF_ANOTHER_VERSION, length: 24 });
        let refused = protocol::open::<Welcome>(header.kind, &frame[HEADER..]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::LinkFailed);
        assert_eq!(refused.to_string(), "the peer refused: wrong token (peer=x)");
    }
    // Its content does not matter either.
    for (body, kind) in [
        (&[][..], ErrorKind::System),
        (&[1, 0, 0], ErrorKind::System),
        (&[1, 0, 0, 0], ErrorKind::CacheNotFound),
        (&[1, 0, 1, 0], ErrorKind::System),
        (&[200, 0, 0, 0, 0xFF, 0xFE], ErrorKind::System),
    ] {
        assert_eq!(protocol::refused(body).kind(), kind, "{body:?}");
    }
}

#[test]
fn a_refusal_fits_into_a_greeting() {
    for sign in ["x", "é", "漢"] {
        let frame = protocol::refusal(&Error::new(ErrorKind::System, sign.repeat(HANDSHAKE_LIMIT)));
        let header = Header::parse(frame[..HEADER].try_into().unwrap(), HANDSHAKE_LIMIT).unwrap();
        assert_eq!(header.length, frame.len() - HEADER);
        assert!(header.length > HANDSHAKE_LIMIT - 4);
        let text = protocol::refused(&frame[HEADER..]).to_string();
        assert!(text.ends_with(sign) && !text.contains('\u{FFFD}'));
    }
}

#[test]
fn invalid_headers_are_refused() {
    let good = *b"LD\x12\x01\x10\0\0\0";
    assert_eq!(Header::parse(good, 16).unwrap(), Header { kind: MESSAGE, length: 16 });
    let with = |at: usize, byte: u8| {
        let mut bytes = good;
        bytes[at] = byte;
        Header::parse(bytes, MESSAGE_LIMIT).unwrap_err()
    };
    assert_eq!(with(0, b'H').kind(), ErrorKind::LinkFailed);
    assert_eq!(with(1, b'T').kind(), ErrorKind::LinkFailed);
    let version = with(2, 1);
    assert_eq!(version.kind(), ErrorKind::LinkFailed);
    assert!(version.to_string().contains("version 1, this process uses version 18"), "{version}");
    assert_eq!(with(3, 2).kind(), ErrorKind::NotLinked);
    let long = Header::parse(good, 15).unwrap_err();
    let facts = ["bytes", "limit"].map(|name| long.fact(name));
    assert_eq!((long.kind(), facts), (ErrorKind::NotLinked, [Some("16"), Some("15")]));
    assert_eq!(with(7, 0x80).fact("bytes"), Some("2147483664"));
}

#[test]
fn the_longest_message_is_written_and_a_longer_one_refused() {
    let bye = |bytes| protocol::encode(&ControlMessage::Bye { reason: "x".repeat(bytes), unlinked: false });
    // Beside the text: the kind, four bytes for its length, the flag, and the checksum.
    let longest = MESSAGE_LIMIT - 6 - CHECKSUM;
    assert_eq!(bye(longest).unwrap().len(), HEADER + MESSAGE_LIMIT);
    let error = bye(longest + 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.fact("limit"), Some(MESSAGE_LIMIT.to_string().as_str()));
}

/// Blocks are encoded as numbers of one width: the narrowest that holds all of them.
#[test]
fn block_bytes() {
    for (number, packed) in [
        (255, "05010102ff00"),
        (256, "09020100020000010000"),
        (0x0102_0304, "110401000000020000000403020100000000"),
    ] {
        let bytes = format!("01000201060002000104010180048004{packed}01800480208004010000000000");
        golden(&read(blocks(512, vec![(1, 2), (number, 0)])), &bytes);
    }
}

/// `plan.rs` reads plans piece by piece.
#[test]
fn plans_round_trip() {
    let pairs = |step: u32| (0..100).map(|k| (k * step, (k * 37) % 100 * step)).collect();
    let blocks = [1, 468, 8_388_608].map(|step| blocks(512, pairs(step)));
    for wire in [plan(), layout_plan()].into_iter().chain(blocks) {
        let plan = CopyPlan::try_from(wire.clone()).unwrap();
        let tensors = Side::BOTH.map(|side| plan.tensors(side));
        assert_eq!((plan.num_tensors(), tensors), (wire.num_tensors, [wire.src, wire.dst]));
        let templates = [plan.templates(), wire.templates.0.as_ref().unwrap()];
        let [planned, given] = templates.map(|all| all.iter().flat_map(Template::placed_spans));
        assert!(planned.eq(given));
        let sent = protocol::encode(&WirePlan::try_from(&plan).unwrap()).unwrap();
        assert_eq!(sent, protocol::encode(&wire).unwrap());
    }
}

/// Templates that touch different bytes.
fn apart(count: u64) -> Vec<Template> {
    let at = |k| template((64, 64), vec![(0, 0), (1, 1)], &[single(0, 128 * k, 16)]);
    (0..count).map(at).collect()
}

/// One template of spans that touch different bytes.
fn many_spans(count: u64) -> Vec<Template> {
    let distinct: Vec<Span> = (0..count).map(|k| single(k, 2 * k, 1)).collect();
    vec![template((0, 0), vec![(0, 0)], &distinct)]
}

/// A span of `count` pieces at several positions.
fn pieces(positions: u32, count: u64) -> Template {
    let pairs = (0..positions).map(|at| (at, at)).collect();
    template((64, 1 << 24), pairs, &[Span { count, dst_step: 1, ..single(0, 0, 1) }])
}

/// The plan of a message, which decodes even if its plan is not valid.
fn plan_in(frame: &[u8]) -> WirePlan {
    let Request::Read { plan, .. } = protocol::decode(&frame[HEADER..]).unwrap() else { panic!() };
    plan
}

/// The message itself decodes, so that its sender learns what is wrong with the plan.
#[test]
fn templates_that_lie_are_invalid_arguments() {
    let one = || template((64, 64), vec![(0, 0), (1, 1)], &[single(0, 0, 16)]);
    let meets = || template((64, 1 << 20), vec![(0, 0), (1, 1)], &[single(0, 79, 7)]);
    let huge = template((64, 1 << 62), vec![(0, 0), (1, 1)], &[single(0, 0, 1 << 62)]);
    let with = |change: fn(&mut Template)| {
        let mut changed = one();
        change(&mut changed);
        templates(vec![changed])
    };
    let steps = |src_step, dst_step, num_tensors| {
        let plan = templates(vec![one()]);
        let src = TensorSteps { step: src_step, ..plan.src };
        let dst = TensorSteps { step: dst_step, ..plan.dst };
        WirePlan { num_tensors, src, dst, ..plan }
    };
    let interleaved = |at| {
        templates(vec![template((64, 64), vec![(0, 0), (1, 1)], &[single(0, 0, 16), single(16, at, 16)])])
    };
    let cases: Vec<(&str, WirePlan, Option<&str>)> = vec![
        ("sound", templates(vec![one()]), None),
        ("no templates", templates(vec![]), None),
        ("as many templates as may be", templates(apart(MAX_TEMPLATES as u64)), None),
        ("one template twice", templates(vec![one(); 2]), Some("twice")),
        ("templates that meet in one byte", templates(vec![one(), meets()]), Some("twice")),
        ("too many templates", templates(apart(MAX_TEMPLATES as u64 + 1)), Some("256 templates")),
        ("as many spans as may be", templates(many_spans(MAX_TEMPLATE_SPANS as u64)), None),
        (
            "too many spans",
            templates(many_spans(MAX_TEMPLATE_SPANS as u64 + 1)),
            Some("65536 spans of templates"),
        ),
        ("a step of 0 in the source", steps(0, 1, 2), Some("step 0")),
        ("a step of 0 in the destination", steps(1, 0, 2), Some("step 0")),
        ("steps beyond 32 bits", steps(u32::MAX, 1, 2), Some("step 4294967295")),
        ("no tensors", steps(1, 1, 0), Some("0 tensors")),
        ("two equal spans", WirePlan { templates: spans(&[single(0, 0, 512); 2]), ..plan() }, Some("twice")),
        ("blocks", blocks(512, vec![(0, 1), (1, 0), (7, 2)]), None),
        ("a block twice", blocks(512, vec![(0, 1), (1, 2), (7, 1)]), Some("twice")),
        ("a high block twice", blocks(512, vec![(0, 1 << 30), (1, 2), (7, 1 << 30)]), Some("twice")),
        ("more blocks than numbers of one byte", blocks(512, vec![(0, 1); 257]), Some("twice")),
        ("no pairs", with(|it| it.pairs = vec![].into()), Some("at 0 pairs")),
        ("no spans", with(|it| it.spans = vec![].into()), Some("0 spans")),
        ("one place twice", with(|it| it.pairs = vec![(0, 1), (1, 1)].into()), Some("twice")),
        ("all places are one", with(|it| it.dst_unit = 0), Some("twice")),
        ("places that overlap", with(|it| it.dst_unit = 15), Some("twice")),
        ("places that interleave", interleaved(128), None),
        ("places that interleave and meet", interleaved(64), Some("twice")),
        ("a span without bytes", with(|it| it.spans = vec![single(0, 0, 0)].into()), Some("len: 0")),
        ("a read beyond 64 bits", with(|it| it.src_unit = u64::MAX), Some("18446744073709551615")),
        ("a write beyond 64 bits", with(|it| it.dst_unit = u64::MAX - 3), Some("18446744073709551612")),
        ("bytes beyond 63 bits", templates(vec![huge]), Some("2^63 or more")),
        ("too many pieces at a place", templates(vec![pieces(1, (1 << 24) + 1)]), Some("16777216 pieces")),
        ("too many pieces at all places", templates(vec![pieces(5, 1 << 24)]), Some("67108864 pieces")),
    ];
    for (name, plan, refused) in cases {
        let frame = protocol::encode(&read(plan)).unwrap();
        match (CopyPlan::try_from(plan_in(&frame)), refused) {
            (Ok(_), None) => {}
            (Err(error), Some(why)) => {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name}: {error}");
                assert!(error.to_string().contains(why), "{name}: {error}");
            }
            (result, expected) => panic!("{name}: {result:?}, and not {expected:?}"),
        }
    }
}

/// This side does not make a plan that the other side would refuse.
#[test]
fn plans_that_a_peer_would_refuse_are_not_sent() {
    let first = TensorSteps::consecutive(0);
    let plan = |all| CopyPlan::from_templates(1, first, first, listed(all)).unwrap();
    let sent = |all| WirePlan::try_from(&plan(all));
    let (templates, spans) = (MAX_TEMPLATES as u64, MAX_TEMPLATE_SPANS as u64);
    for (most, more, why) in [
        (apart(templates), apart(templates + 1), "more than 256 templates"),
        (many_spans(spans), many_spans(spans + 1), "more than 65536 spans of templates"),
    ] {
        sent(most).unwrap();
        let error = sent(more).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    // The spans of a template have fewer pieces than all its places may have.
    sent(vec![pieces(1, 1 << 24)]).unwrap();
    let all = plan(vec![pieces(4, 1 << 24)]);
    assert_eq!(all.num_pieces(), 1 << 26);
    assert_eq!(CopyPlan::try_from(WirePlan::try_from(&all).unwrap()).unwrap(), all);
}

#[test]
fn pairs_without_a_width_or_cut_short_are_refused() {
    // The packed pairs follow the kind, name, id, generation, tensors, count of templates, and the two units.
    let frame = protocol::encode(&read(blocks(512, vec![]))).unwrap();
    let at = HEADER + 16;
    assert_eq!(frame[at..][..2], [1, 1], "one byte: the width of no number");
    let decoded = |packed: &[u8]| {
        let rest = &message_bytes(&frame)[at + 2 - HEADER..];
        let body = [&frame[HEADER..at], &[packed.len() as u8], packed, rest].concat();
        protocol::decode_message::<Request>(&body)
    };
    // A width larger than needed is allowed.
    for (packed, pairs) in
        [(&[1, 5, 6, 7, 8][..], vec![(5, 6), (7, 8)]), (&[4, 5, 0, 0, 0, 6, 0, 0, 0], vec![(5, 6)])]
    {
        assert_eq!(decoded(packed).unwrap(), read(blocks(512, pairs)));
    }
    let refused: [&[u8]; 9] = [
        &[],
        &[0],
        &[3, 1, 2, 3, 4, 5, 6],
        &[8],
        &[255, 1, 1],
        &[1, 5],
        &[2, 5, 0, 6],
        &[2, 5, 0],
        &[4, 1, 0, 0, 0],
    ];
    for packed in refused {
        assert_eq!(decoded(packed).unwrap_err().kind(), ErrorKind::NotLinked, "{packed:?}");
    }
}

#[test]
fn records_describe_a_cache() {
    let remote = record(WireLocation::Hidden).layout().unwrap();
    assert_eq!((remote.kind, remote.placement), (CacheKind::Blocks, Placement::Device));
    let geometry = remote.geometry;
    assert_eq!((geometry.num_tensors(), geometry.rows(), geometry.row_bytes()), (80, 128, 65536));
    let made = WireCache::new(AT, CacheId(3), 2, remote);
    assert_eq!(made, WireCache { allocated: false, ..record(WireLocation::Hidden) });
    let layout: CacheLayout = made.layout().unwrap();
    assert_eq!(layout, remote);
    let good = record(WireLocation::Hidden);
    for bad in [
        WireCache { placement: 2, ..good.clone() },
        WireCache { num_tensors: 0, ..good.clone() },
        WireCache { num_tensors: u32::MAX, ..good.clone() },
        WireCache { rows: 0, ..good.clone() },
        WireCache { rows: u64::MAX, ..good.clone() },
        WireCache { row_bytes: 0, ..good.clone() },
        WireCache { row_bytes: 1 << 57, ..good.clone() },
        WireCache { row_stride: 65535, ..good.clone() },
        WireCache { row_stride: 1 << 57, ..good.clone() },
    ] {
        let error = bad.layout().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotLinked, "{bad:?}");
        assert!(error.to_string().contains("cache 3"), "{error}");
    }
}

#[test]
fn runs_of_many_tensors_are_short() {
    let cases: [(&[u64], usize); 7] = [
        (&[], 0),
        (&[5], 1),
        (&[5, 5], 1),
        (&[10, 20, 30, 40], 1),
        (&[40, 30, 20], 1),
        (&[1, 2, 3, 100, 101, 102], 2),
        (&[0, u64::MAX, u64::MAX - 1], 1),
    ];
    for (numbers, runs) in cases {
        let packed = Run::pack(numbers).unwrap();
        assert_eq!(packed.len(), runs, "{numbers:?}");
        assert_eq!(Run::unpack(&packed, numbers.len() as u32).unwrap(), numbers);
        assert_eq!(Run::unpack(&packed, numbers.len() as u32 + 1).unwrap_err().kind(), ErrorKind::NotLinked);
    }
    // A count is never trusted, however large it is.
    let huge = [Run { start: 0, step: 1, count: u32::MAX }; 3];
    let (error, peak) = counting_allocator::peak(|| Run::unpack(&huge[..1], u32::MAX).map(drop).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::NotLinked);
    assert!(peak < 4096);
    assert!(Run::unpack(&huge, 80).is_err());
}

#[test]
fn failures_keep_kind_and_message() {
    let error = Error::new(ErrorKind::OutOfMemory, "no room").with("asked_bytes", 5);
    let Reply::Failed { kind, message, arrived } = Reply::failed(&error) else { panic!() };
    let back = Reply::error(kind, &message, &arrived);
    assert_eq!((back.kind(), back.to_string()), (error.kind(), error.to_string()));
    assert_eq!(Reply::error(99, "odd", &[]).kind(), ErrorKind::System);
}

/// A message lists the ranges of all tensors in one list of at most [`MAX_ARRIVED`].
#[test]
fn failures_keep_the_rows_of_each_tensor() {
    let error = Reply::error(1, "no", &[(4, 0, 3), (4, 5, 6), (7, 2, 300), (7, 301, 302)]);
    let rows = |tensor, rows: &[Range<u64>]| ArrivedRows { tensor, rows: rows.to_vec() };
    assert_eq!(error.arrived(), [rows(4, &[0..3, 5..6]), rows(7, &[2..300, 301..302])]);
    let Reply::Failed { arrived, .. } = Reply::failed(&error) else { panic!() };
    assert_eq!(arrived, [(4, 0, 3), (4, 5, 6), (7, 2, 300), (7, 301, 302)]);
    let many = Reply::error(1, "no", &vec![(4, 0, 1); MAX_ARRIVED + 1]);
    let Reply::Failed { arrived, .. } = Reply::failed(&many) else { panic!() };
    assert_eq!(arrived.len(), MAX_ARRIVED);
    let long = Reply::Failed { kind: 1, message: "no".into(), arrived: vec![(4, 0, 1); MAX_ARRIVED + 1] };
    let frame = protocol::encode(&long).unwrap();
    assert_eq!(protocol::decode::<Reply>(&frame[HEADER..]).unwrap_err().kind(), ErrorKind::NotLinked);
}

/// A peer's plan, from its frame to the rows that are pinned, takes at most three times the memory of its
/// frame. As at the owner, the frame is dropped once it was decoded.
#[test]
fn a_plan_takes_a_bounded_multiple_of_its_bytes() {
    const ROW: u64 = 1 << 24;
    let span = |src, dst| single(src, dst, 1);
    let listed = |all: Vec<Span>| WirePlan { templates: spans(&all), ..plan() };
    let shuffled = |count: u64, k: u64| k * 1_000_003 % count;
    let many = 1 << 19;
    let pairs = |count: u32| (0..count).map(|k| (k, shuffled(count.into(), k.into()) as u32)).collect();
    let crossing = |k| Span { count: 2, dst_step: 2, ..span(9 * k, k / 2 * 8 + k % 2) };
    let near = (0..3 << 20).map(|k| span(0, k % 100));
    let interleaved = |at: u64, apart| [single(0, at, 4), single(4, at + apart, 4)];
    let cases: Vec<(&str, WirePlan, bool)> = vec![
        ("no bytes", listed(vec![Span { len: 0, ..span(0, 0) }; 3 << 18]), false),
        (
            "a destination each",
            listed((0..many).map(|k| span(5 * k, 3 * shuffled(many, k))).collect()),
            false,
        ),
        ("steps that cross", listed((0..many).map(crossing).collect()), false),
        ("the shortest, and one far away", listed(near.chain([span(0, 1 << 40)]).collect()), false),
        ("blocks", blocks(8, pairs(1 << 19)), true),
        ("far blocks", blocks(8, (0..1 << 19).map(|k: u32| (k, !k)).collect()), true),
        ("narrow blocks", blocks(8, vec![(1, 2); 9 << 18]), false),
        (
            "many pairs of narrow numbers",
            templates(
                (0..24).map(|at| template((8, 8), pairs(1 << 16), &interleaved(at << 20, 4))).collect(),
            ),
            true,
        ),
        (
            "pairs whose places interleave",
            templates(vec![template((8, 8), pairs(1 << 19), &interleaved(0, 1 << 25))]),
            true,
        ),
        (
            "spans of one template",
            templates(vec![template((8, 8), vec![(0, 0)], &vec![single(0, 0, 1); 3 << 18])]),
            false,
        ),
        ("only templates", templates(vec![template((0, 0), vec![], &[]); 4 << 18]), false),
        ("blocks without bytes", blocks(0, (0..1 << 19).map(|k: u32| (k, k << 8)).collect()), false),
    ];
    for (name, plan, taken) in cases {
        let frame = protocol::encode(&read(plan)).unwrap();
        assert!(frame.len() > 4 << 20, "{name}: {}", frame.len());
        let work = || {
            let plan = plan_in(&frame.clone());
            let plan = CopyPlan::try_from(plan)?;
            for side in Side::BOTH {
                plan.check_bounds(side, (8, 1 << 48))?;
            }
            Ok((Side::BOTH.map(|side| plan.touched_rows(side, ROW).unwrap().len()), plan))
        };
        let (result, peak): (Result<_, Error>, usize) = counting_allocator::peak(work);
        assert_eq!(result.is_ok(), taken, "{name}: {result:?}");
        // Each of up to 256 templates reserves a few kilobytes.
        let most = 3 * frame.len() + (1 << 20);
        assert!(peak > frame.len() && peak <= most, "{name}: {peak} for {}", frame.len());
    }
}

/// As many spans as a plan may have, in no order and on no grid, take 4 MiB beyond a multiple of their frame, which may be
/// shorter than they are.
#[test]
fn the_spans_of_a_plan_take_bounded_memory() {
    let count = MAX_TEMPLATE_SPANS as u64;
    let far = |k: u64| single(k << 30, ((k * 1_000_003 % count) << 30) + k % 7, 1);
    let all: Vec<Span> = (0..count).map(far).collect();
    let frame = protocol::encode(&read(WirePlan { templates: spans(&all), ..plan() })).unwrap();
    assert!((1 << 20..2 << 20).contains(&frame.len()), "{}", frame.len());
    let (plan, peak) = counting_allocator::peak(|| {
        let plan = plan_in(&frame.clone());
        CopyPlan::try_from(plan).unwrap()
    });
    assert_eq!(plan.num_pieces(), count);
    let most = 3 * frame.len() + (4 << 20);
    assert!(peak > 48 << 16 && peak <= most, "{peak} for {}", frame.len());
}

/// What follows the error of a plan is read and not kept. A short list of spans reserves room for a few.
#[test]
fn what_follows_the_error_of_a_plan_is_not_kept() {
    let decoded = |all| {
        let frame = protocol::encode(&read(templates(all))).unwrap();
        let (message, peak) = counting_allocator::peak(|| protocol::decode(&frame[HEADER..]).unwrap());
        let Request::Read { plan, range, .. } = message else { panic!() };
        assert_eq!(range, 0..0, "what follows the plan");
        (plan.templates.0, peak, frame.len())
    };
    let twice = template((8, 8), vec![(1, 2); 300], &[single(0, 0, 4)]);
    let long = template((8, 8), (0..1 << 16).map(|k| (k, k)).collect(), &[single(0, 0, 4)]);
    let (result, peak, bytes) = decoded([vec![twice], vec![long; 20]].concat());
    assert!(result.unwrap_err().to_string().contains("twice"));
    assert!(peak < 1 << 20 && bytes > 4 << 20, "{peak} for {bytes}");
    let (result, ..) = decoded(vec![template((8, 8), vec![(1, 2)], &[single(0, 0, 4), single(8, 8, 4)])]);
    assert!(result.unwrap()[0].spans.capacity() <= 8);
}

/// The rows that a plan pins, where a few bytes name many of them.
#[test]
fn the_rows_of_a_plan_take_memory_for_each_row_once() {
    const ROW: u64 = 4096;
    // A few bytes name a quarter of a million rows, three times. Memory depends on the rows alone.
    let count = 1u64 << 18;
    let step = 2 * ROW.cast_signed();
    let span = Span { src: 0, dst: 0, len: 1, count, src_step: step, dst_step: -step };
    let spans = (0..3).map(|k| Span { src: k, dst: k + 2 * ROW * (count - 1), ..span });
    let plan = plan_of_peer(1, 0, 0, spans.collect()).unwrap();
    for side in [Side::Source, Side::Destination] {
        let (rows, peak) = counting_allocator::peak(|| plan.touched_rows(side, ROW).unwrap());
        assert!(rows.iter().copied().eq((0..count).map(|k| 2 * k)));
        assert!(peak < 128 * rows.len(), "{peak} for {} rows", rows.len());
    }
}

/// A count that no elements follow reserves at most a megabyte, on each of two levels. The fuzz targets decode other bytes.
#[test]
fn counts_without_elements_reserve_bounded_memory() {
    fn one<T: DeserializeOwned + Serialize>(message: &T) {
        let frame = protocol::encode(message).unwrap();
        let bytes = message_bytes(&frame);
        for at in 0..bytes.len() {
            let body = [&bytes[..at], &[0xFF; 9], &[1]].concat();
            let (result, peak) = counting_allocator::peak(|| protocol::decode_message::<T>(&body).map(drop));
            assert!(peak < 3 << 20, "{peak} bytes at {at}");
            assert!(result.err().is_none_or(|error| error.kind() == ErrorKind::NotLinked), "{at}");
        }
    }
    let runs = vec![Run { start: 0, step: 1, count: 80 }];
    let comm = Comm { name: "c".into(), members: vec![(1, 0)], listener: "a".into() };
    one(&hello(Purpose::Announce { comm }, None));
    one(&read(plan()));
    one(&read(blocks(512, vec![(0, 1); 20])));
    one(&read(layout_plan()));
    one(&Reply::Described(record(WireLocation::Process { runs })));
    one(&Reply::Failed { kind: 1, message: "no".into(), arrived: vec![(7, 2, 300)] });
}
