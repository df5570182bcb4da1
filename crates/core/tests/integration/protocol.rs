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

fn golden<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, bytes: &str) {
    let frame = protocol::encode(message).unwrap();
    assert_eq!(hex(&frame), bytes, "{message:?}");
    let header = Header::parse(frame[..HEADER].try_into().unwrap(), MESSAGE_LIMIT).unwrap();
    assert_eq!(header, Header { kind: MESSAGE, length: frame.len() - HEADER });
    assert_eq!(&protocol::open::<T>(header.kind, &frame[HEADER..]).unwrap(), message);
    // A shorter or longer body is not that message.
    for cut in HEADER..frame.len() {
        assert_eq!(protocol::decode::<T>(&frame[HEADER..cut]).unwrap_err().kind(), ErrorKind::NotLinked);
    }
    let bytes = message_bytes(&frame);
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

/// The bytes of a plan in a message.
fn sent(plan: &CopyPlan) -> Vec<u8> {
    protocol::encode(&WirePlan::try_from(plan).unwrap()).unwrap()
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

/// The id of a grant.
const GRANT: GrantId = GrantId { slot: 44, generation: 600, secret: [7; 16] };

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

#[test]
fn handshake_bytes() {
    let hello = |purpose, asked| Hello { purpose, from: PARTY, asked, host: "abc".into(), nonce: [7; 16] };
    let comm = Some(Comm { name: "c".into(), members: vec![(1, 0), (u64::MAX, 1)], listener: "a:1".into() });
    golden(
        &hello(Purpose::Link { link: 9, comm, probe_local: false, ensure: false }, Some(2)),
        "4c4412013b0000000009010163020100ffffffffffffffffff010103613a31000001ac02010102036162630707070707070707070707070707070791f86caccdde744f",
    );
    golden(
        &hello(Purpose::Link { link: 9, comm: None, probe_local: true, ensure: true }, None),
        "4c44120126000000000900010101ac0201000361626307070707070707070707070707070707a1bd2c3d40a7c5a1",
    );
    golden(
        &hello(Purpose::Call { link: 9, reverse: true, rings: false }, None),
        "4c441201250000000109010001ac020100036162630707070707070707070707070707070702e07ad5e4431963",
    );
    golden(
        &hello(Purpose::Call { link: 9, reverse: false, rings: true }, None),
        "4c441201250000000109000101ac020100036162630707070707070707070707070707070781f705a9b921343e",
    );
    golden(&RingOffer, "4c4412010800000099e9d85137db46ef");
    golden(&RingAnswer::Used, "4c4412010900000000682705db4aa834e9");
    golden(&RingAnswer::Refused { reason: "no".into() }, "4c4412010c00000001026e6f9514a6d342ee1590");
    golden(&Challenge { nonce: [8; 16] }, "4c4412011800000008080808080808080808080808080808fefe117c61ef0c50");
    golden(
        &Proof { mac: [9; 32] },
        "4c4412012800000009090909090909090909090909090909090909090909090909090909090909099931dd9a98964551",
    );
    golden(
        &Welcome { from: PARTY, mac: [1; 32], local: Some("x".into()), secret: None },
        "4c4412013000000001ac0201010101010101010101010101010101010101010101010101010101010101010101017800213c7818afedefe0",
    );
    golden(
        &Welcome { from: PARTY, mac: [1; 32], local: None, secret: Some([3; 32]) },
        "4c4412014e00000001ac020101010101010101010101010101010101010101010101010101010101010101010001030303030303030303030303030303030303030303030303030303030303030349d99ce0e0951f11",
    );
    golden(
        &hello(Purpose::Meet, None),
        "4c441201220000000201ac020100036162630707070707070707070707070707070746cea1058af59ff4",
    );
    let comm = Comm { name: "c".into(), members: vec![(1, 0)], listener: "a".into() };
    golden(
        &hello(Purpose::Announce { comm }, None),
        "4c44120129000000030163010100016101ac020100036162630707070707070707070707070707070738268c13af26b742",
    );
    let probe = Some((0x7fff_0000, [2; 16]));
    golden(
        &Attach { generations: true, pools: [None, Some(1 << 30)], probe },
        "4c441201260000000100018080808004018080fcff07020202020202020202020202020202021bca9c9a97d736e4",
    );
    golden(
        &Attach { generations: false, pools: [Some(1), None], probe: None },
        "4c4412010d0000000001010000007584748f6bdc5d",
    );
    golden(
        &Attached { pools: Ok(()), process: Err("no".into()) },
        "4c4412010d0000000001026e6f0b5a75b00ad9038a",
    );
    let metadata = BoundedBytes(Arc::new(b"meta".to_vec()));
    golden(
        &Confirm { name: "ab".into(), metadata: metadata.clone(), fabric: None },
        "4c44120111000000026162046d65746100d43fcc2a46aaf874",
    );
    golden(
        &LinkAnswer::Entered(EnteredLink { name: String::new(), metadata, fabric: None, addresses: vec![] }),
        "4c441201110000000000046d657461000079a3c1b431040a48",
    );
    golden(&LinkAnswer::Later { reason: "no".into() }, "4c4412010c00000001026e6f9514a6d342ee1590");
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
    let long = longest.clone() + "x";
    for bad in [
        "\0",
        "a\nb",
        "\u{1b}[2J",
        "\u{7f}",
        "\u{85}",
        "\u{2028}",
        "\u{2029}",
        "\u{202e}x",
        "\u{2066}",
        &long,
    ] {
        for read in [again(&find(bad)), again(&confirm(bad)), again(&entered(bad))] {
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
    golden(&ControlMessage::Ping, "4c4412010900000000682705db4aa834e9");
    golden(&ControlMessage::Pong, "4c441201090000000130e7211b8127418a");
    golden(
        &ControlMessage::Bye { reason: "end".into(), unlinked: true },
        "4c4412010e0000000203656e640183993e3cd2bdc751",
    );
    golden(&ControlMessage::Dial, "4c4412010900000003b64b1fbcd0c8251f");
    golden(
        &ControlMessage::Polled { arrived: (300, 5), polled: (1, 0) },
        "4c4412010e00000004ac0205010069e2463648ad344e",
    );
}

#[test]
fn request_bytes() {
    let timed = |request| Timed { limit_ms: 1000, request };
    let named = NamedCache { name: Name::Key(CacheKey::Blocks { model: 1 }), id: CacheId(3) };
    let granted = NamedCache { name: Name::Grant(GRANT), ..named };
    for (name, bytes) in [
        (Name::Key(CacheKey::Request { model: 1, id: 2 }), "4c4412010f000000e8070000000102a6b6ab15eb975c43"),
        (Name::Key(CacheKey::Prefix { model: 1, id: 2 }), "4c4412010f000000e8070000010102b7905a9706f5495f"),
        (Name::Key(CacheKey::Blocks { model: 1 }), "4c4412010e000000e8070000020176fe8d0084213779"),
        (Name::Row { cache: CacheId(-1), row: 2 }, "4c4412010e000000e80700010102ca8d112d3c2c1cb2"),
        (
            Name::Grant(GRANT),
            "4c4412011f000000e80700022cd80407070707070707070707070707070707b74442aee1d81139",
        ),
    ] {
        golden(&timed(Request::Describe { name }), bytes);
    }
    golden(
        &timed(Request::Read { cache: named, generation: None, plan: plan(), range: 0..7168, summed: false }),
        "4c44120140000000e80701000201060002000104010100000301000003802000800403ff0f800800a84680040100008040808080808020800401000000803800012667a88f4f263e",
    );
    golden(
        &timed(Request::Read {
            cache: granted,
            generation: Some(300),
            plan: plan(),
            range: 0..7168,
            summed: true,
        }),
        "4c44120153000000e80701022cd804070707070707070707070707070707070601ac0202000104010100000301000003802000800403ff0f800800a84680040100008040808080808020800401000000803801dd51137cf7f5f091",
    );
    for (side, cache, bytes) in [
        (
            Side::Source,
            named,
            "4c44120142000000e80709000201060201020401028001100902010000002c01020002400810031fd8046080804010010000000003010000018827f02e0701000000cca4f61f0f44c0c2",
        ),
        (
            Side::Destination,
            granted,
            "4c44120153000000e80709022cd80407070707070707070707070707070707060201020401028001100902010000002c01020002400810031fd8046080804010010000000003010000018827f02e0701000001df216f2e2412dea2",
        ),
    ] {
        golden(&timed(Request::Checksums { cache, plan: layout_plan(), side }), bytes);
    }
    golden(
        &Reply::Checksums { generation: 300, sums: vec![1, u64::MAX] },
        "4c4412011700000007ac020201ffffffffffffffffff01327a42645e4d8606",
    );
    let write =
        |ahead, shared| timed(Request::Write { cache: named, plan: plan(), range: 0..7168, ahead, shared });
    for (ahead, shared, bytes) in [
        (
            false,
            None,
            "4c44120140000000e807020002010602000104010100000301000003802000800403ff0f800800a84680040100008040808080808020800401000000803800004fe788172fbbc55d",
        ),
        (
            true,
            None,
            "4c44120140000000e807020002010602000104010100000301000003802000800403ff0f800800a8468004010000804080808080802080040100000080380100a9e9d98c57f3be2b",
        ),
        (
            false,
            Some(300),
            "4c44120142000000e807020002010602000104010100000301000003802000800403ff0f800800a8468004010000804080808080802080040100000080380001ac02fc26656067ea51e9",
        ),
    ] {
        golden(&write(ahead, shared), bytes);
    }
    golden(
        &timed(Request::WritePart { write: 300, range: 7168..7169 }),
        "4c44120111000000e8070aac0280388138599e8095ddeaace5",
    );
    let source = WireLocation::Process { runs: vec![Run { start: 4096, step: 8192, count: 2 }] };
    golden(
        &timed(Request::Fetch { cache: named, plan: plan(), source, num_tensors: 2, tensor_bytes: 8192 }),
        "4c44120145000000e807030002010602000104010100000301000003802000800403ff0f800800a84680040100008040808080808020800401000001018020804002028040a923951991ea7f74",
    );
    let cache = NamedCache { name: Name::Key(CacheKey::Request { model: 0, id: 0 }), ..named };
    let used_key = Some(WireUsedKey { cache, first: 0, count: 80 });
    golden(
        &timed(Request::Finish { used_key, message: None }),
        "4c44120114000000e80704010000000006005000b9e89b0ad7114fc2",
    );
    let used_key = Some(WireUsedKey::of_grant(GRANT));
    golden(
        &timed(Request::Finish { used_key, message: Some(BoundedBytes(b"no".to_vec())) }),
        "4c44120127000000e8070401022cd8040707070707070707070707070707070700000001026e6f0e8573adf9cad866",
    );
    golden(
        &timed(Request::Notify { messages: vec![BoundedBytes(b"no".to_vec()), BoundedBytes(vec![])] }),
        "4c44120110000000e8070802026e6f000cb9392b9f771b42",
    );
    golden(&timed(Request::Unlink), "4c4412010b000000e80705230c5d3a3e9a940a");
    golden(&Timed { limit_ms: 0, request: Request::Ping }, "4c4412010a0000000006dc1d6a3f9c696ef3");
    golden(
        &Timed { limit_ms: 5, request: Request::Locate { addrs: vec![4096, 300] } },
        "4c4412010f0000000507028020ac025ec1d1d6ed3e2311",
    );
    golden(&timed(Request::Find { name: "é".into() }), "4c4412010e000000e8070b02c3a971c50017bab8a290");
    golden(&Reply::Found { cache: CacheId(300) }, "4c4412010b00000008d8046f699d30b292650e");
    golden(
        &Reply::Located(vec![AddressLocation { cache: CacheId(3), tensor: 2, offset: 300 }]),
        "4c4412010e00000006010602ac02128526901f217672",
    );
}

#[test]
fn reply_bytes() {
    let runs = vec![Run { start: 0, step: u64::MAX, count: 80 }];
    golden(
        &Reply::Described(record(WireLocation::Pool { pool: 1, runs })),
        "4c4412012c0000000005d80406025080018080048080040101010000010100ffffffffffffffffff015000004fac5cba3bdf4e37",
    );
    golden(
        &Reply::Described(record(WireLocation::Hidden)),
        "4c4412011e0000000005d8040602508001808004808004010101000200003fc9a24f0a8d4197",
    );
    let granted = vec![(0, 300), (301, 302)];
    golden(
        &Reply::Described(WireCache { granted, ..record(WireLocation::Hidden) }),
        "4c441201250000000005d80406025080018080048080040101010002000200ac02ad02ae02e756707ce3a01154",
    );
    golden(&Reply::Ready { bytes: 300 }, "4c4412010b00000001ac02a57aa03f0e4fd958");
    golden(&Reply::Done { bytes: 1 << 63 }, "4c441201130000000280808080808080808001bca39e98960948cc");
    golden(&Reply::Stale, "4c4412010900000003b64b1fbcd0c8251f");
    golden(&Reply::Unreachable { reason: "no".into() }, "4c4412010c00000004026e6f2e15cdeed14fe459");
    golden(
        &Reply::Failed { kind: 1, message: "no".into(), arrived: vec![(7, 2, 300)] },
        "4c441201120000000501026e6f010702ac02e1d798771e5783e1",
    );
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
    assert!(
        version.to_string().contains("version 18") && version.to_string().contains("version 1"),
        "{version}"
    );
    assert_eq!(with(3, 2).kind(), ErrorKind::NotLinked);
    let long = Header::parse(good, 15).unwrap_err();
    assert_eq!(
        (long.kind(), long.fact("bytes"), long.fact("limit")),
        (ErrorKind::NotLinked, Some("16"), Some("15"))
    );
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

#[test]
fn plans_of_spans_round_trip() {
    let plan = CopyPlan::try_from(plan()).unwrap();
    assert_eq!(
        (plan.num_tensors(), plan.tensors(Side::Source).first, plan.tensors(Side::Destination).first),
        (2, 0, 4)
    );
    let spans: Vec<Span> = plan.templates().iter().flat_map(Template::placed_spans).collect();
    assert_eq!((spans.len(), plan.bytes()), (3, 2 * 5 * 512));
    let span = spans[0];
    assert_eq!((span.src, span.dst, span.len, span.count), (4096, 0, 512, 3));
    assert_eq!((span.src_step, span.dst_step), (-1024, 512));
    assert_eq!(sent(&plan), protocol::encode(&self::plan()).unwrap());
}

/// The message itself decodes, so that its sender learns what is wrong with the plan.
#[test]
fn plan_that_writes_a_byte_twice_is_an_invalid_argument() {
    let twice = WirePlan { templates: spans(&[single(0, 0, 512); 2]), ..plan() };
    for (name, request, refused) in [
        ("two spans", read(twice), true),
        ("blocks", read(blocks(512, vec![(0, 1), (1, 0), (7, 2)])), false),
        ("blocks, twice", read(blocks(512, vec![(0, 1), (1, 2), (7, 1)])), true),
        ("high blocks, twice", read(blocks(512, vec![(0, 1 << 30), (1, 2), (7, 1 << 30)])), true),
        ("more blocks than numbers of one byte", read(blocks(512, vec![(0, 1); 257])), true),
    ] {
        let frame = protocol::encode(&request).unwrap();
        let Request::Read { plan, .. } = protocol::decode(&frame[HEADER..]).unwrap() else { panic!() };
        let error = CopyPlan::try_from(plan).err();
        assert_eq!(error.is_some(), refused, "{name}: {error:?}");
        if let Some(error) = error {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name}");
            assert!(error.to_string().contains("twice"), "{name}: {error}");
        }
    }
}

/// Blocks are encoded as numbers of one width: the narrowest that holds all of them.
#[test]
fn block_bytes() {
    for (number, bytes) in [
        (
            255,
            "4c4412012b0000000100020106000200010401018004800405010102ff000180048020800401000000000007a7aa0cf37eb998",
        ),
        (
            256,
            "4c4412012f000000010002010600020001040101800480040902010002000001000001800480208004010000000000ff168fc52aa69787",
        ),
        (
            0x0102_0304,
            "4c441201370000000100020106000200010401018004800411040100000002000000040302010000000001800480208004010000000000dc204de550ba771e",
        ),
    ] {
        golden(&read(blocks(512, vec![(1, 2), (number, 0)])), bytes);
    }
}

#[test]
fn template_bytes() {
    golden(
        &read(layout_plan()),
        "4c441201430000000100020106000201020401028001100902010000002c01020002400810031fd8046080804010010000000003010000018827f02e070100000000000f5b6dd0b444e007",
    );
}

#[test]
fn plans_of_templates_round_trip() {
    let plan = CopyPlan::try_from(layout_plan()).unwrap();
    assert_eq!((plan.num_tensors(), plan.bytes()), (2, 2 * (2 * 4 * 16 + 7)));
    let tensors =
        |index| (plan.tensors(Side::Source).tensor(index), plan.tensors(Side::Destination).tensor(index));
    assert_eq!([0, 1].map(tensors), [(1, 4), (3, 5)]);
    let pieces: Vec<_> = plan.templates()[0].pieces().map(|piece| (piece.src, piece.dst)).collect();
    let of = |src: u64, dst: u64| {
        [(64, 8), (48, 308), (32, 608), (96, 1 << 20)].map(|(s, d)| (s + 128 * src, d + 16 * dst))
    };
    assert_eq!(pieces, [of(1, 0), of(300, 2)].concat());
    assert_eq!(sent(&plan), protocol::encode(&layout_plan()).unwrap());
}

/// The message itself decodes, so that its sender learns what is wrong with the plan.
#[test]
fn templates_that_lie_are_invalid_arguments() {
    let one = || template((64, 64), vec![(0, 0), (1, 1)], &[single(0, 0, 16)]);
    let meets = || template((64, 1 << 20), vec![(0, 0), (1, 1)], &[single(0, 79, 7)]);
    let with = |change: fn(&mut Template)| {
        let mut changed = one();
        change(&mut changed);
        templates(vec![changed])
    };
    let steps = |src_step, dst_step, num_tensors| {
        let plan = templates(vec![one()]);
        let (src, dst) =
            (TensorSteps { step: src_step, ..plan.src }, TensorSteps { step: dst_step, ..plan.dst });
        WirePlan { num_tensors, src, dst, ..plan }
    };
    let apart = |count: u64| {
        let at = |k| template((64, 64), vec![(0, 0), (1, 1)], &[single(0, 128 * k, 16)]);
        templates((0..count).map(at).collect())
    };
    let many_spans = |count: u64| {
        let distinct: Vec<Span> = (0..count).map(|k| single(k, 2 * k, 1)).collect();
        templates(vec![template((0, 0), vec![(0, 0)], &distinct)])
    };
    let cases: Vec<(&str, WirePlan, Option<&str>)> = vec![
        ("sound", templates(vec![one()]), None),
        ("no templates", templates(vec![]), None),
        ("as many templates as may be", apart(MAX_TEMPLATES as u64), None),
        ("one template twice", templates(vec![one(); 2]), Some("twice")),
        ("templates that meet in one byte", templates(vec![one(), meets()]), Some("twice")),
        ("too many templates", apart(MAX_TEMPLATES as u64 + 1), Some("256 templates")),
        ("as many spans as may be", many_spans(MAX_TEMPLATE_SPANS as u64), None),
        ("too many spans", many_spans(MAX_TEMPLATE_SPANS as u64 + 1), Some("65536 spans of templates")),
        ("a step of 0 in the source", steps(0, 1, 2), Some("step 0")),
        ("a step of 0 in the destination", steps(1, 0, 2), Some("step 0")),
        ("steps beyond 32 bits", steps(u32::MAX, 1, 2), Some("step 4294967295")),
        ("no tensors", steps(1, 1, 0), Some("0 tensors")),
        ("no pairs", with(|it| it.pairs = vec![].into()), Some("at 0 pairs")),
        ("no spans", with(|it| it.spans = vec![].into()), Some("0 spans")),
        ("one place twice", with(|it| it.pairs = vec![(0, 1), (1, 1)].into()), Some("twice")),
        ("all places are one", with(|it| it.dst_unit = 0), Some("twice")),
        ("places that overlap", with(|it| it.dst_unit = 15), Some("twice")),
        (
            "places that interleave",
            with(|it| it.spans = vec![single(0, 0, 16), single(16, 128, 16)].into()),
            None,
        ),
        (
            "places that interleave and meet",
            with(|it| it.spans = vec![single(0, 0, 16), single(16, 64, 16)].into()),
            Some("twice"),
        ),
        ("a span without bytes", with(|it| it.spans = vec![single(0, 0, 0)].into()), Some("len: 0")),
        ("a read beyond 64 bits", with(|it| it.src_unit = u64::MAX), Some("18446744073709551615")),
        ("a write beyond 64 bits", with(|it| it.dst_unit = u64::MAX - 3), Some("18446744073709551612")),
        (
            "bytes beyond 63 bits",
            with(|it| {
                it.dst_unit = 1 << 62;
                it.spans = vec![single(0, 0, 1 << 62)].into();
            }),
            Some("2^63 or more"),
        ),
        (
            "too many pieces at a place",
            with(|it| {
                let span = Span { count: (1 << 24) + 1, dst_step: 1, ..single(0, 0, 1) };
                it.spans = vec![span].into();
            }),
            Some("16777216 pieces"),
        ),
        (
            "too many pieces at all places",
            with(|it| {
                let span = Span { count: 1 << 24, dst_step: 1, ..single(0, 0, 1) };
                it.dst_unit = 1 << 24;
                it.pairs = (0..5).map(|at| (at, at)).collect();
                it.spans = vec![span].into();
            }),
            Some("67108864 pieces"),
        ),
    ];
    for (name, plan, refused) in cases {
        let frame = protocol::encode(&read(plan)).unwrap();
        let Request::Read { plan, .. } = protocol::decode(&frame[HEADER..]).unwrap() else { panic!() };
        match (CopyPlan::try_from(plan), refused) {
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
    let all = |count: u32| (0..count).map(|at| (at, at)).collect::<Vec<_>>();
    let plan = |num: usize, pairs: Vec<(u32, u32)>, dst_unit: u64, spans: Vec<Span>| {
        let template = |k: usize| {
            let spans: Vec<_> =
                spans.iter().map(|span| Span { dst: span.dst + 64 * k as u64, ..*span }).collect();
            Template::new((1 << 12, dst_unit), pairs.clone(), spans)
        };
        let first = TensorSteps::consecutive(0);
        CopyPlan::from_templates(1, first, first, listed((0..num).map(template).collect()))
    };
    let pieces = |count: u64| Span { count, src_step: 0, dst_step: 4, ..single(0, 0, 1) };
    let sent = |num, pairs, dst_unit, spans| WirePlan::try_from(&plan(num, pairs, dst_unit, spans).unwrap());
    assert!(sent(MAX_TEMPLATES, all(3), 16, vec![pieces(4)]).is_ok());
    let many = sent(MAX_TEMPLATES + 1, all(3), 16, vec![pieces(4)]).unwrap_err();
    assert!(many.to_string().contains("more than 256 templates"), "{many}");
    let span = |k: u64| single(k, 2 * k, 1);
    let long = |count: u64| sent(1, all(2), 1 << 40, (0..count).map(span).collect());
    assert!(long(MAX_TEMPLATE_SPANS as u64).is_ok());
    let long = long(MAX_TEMPLATE_SPANS as u64 + 1).unwrap_err();
    assert!(long.to_string().contains("more than 65536 spans of templates"), "{long}");
    // The spans of a template have fewer pieces than all its places may have.
    let listed = |count| plan_of_peer(1, 0, 0, vec![pieces(count)]).unwrap();
    let several = listed(1 << 24);
    assert!(WirePlan::try_from(&several).is_ok());
    let templates = plan(1, all(4), 1 << 26, vec![pieces(1 << 24)]).unwrap();
    assert_eq!(templates.num_pieces(), 1 << 26);
    let wire = WirePlan::try_from(&templates).unwrap();
    assert_eq!(CopyPlan::try_from(wire).unwrap(), templates);
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
fn plans_of_blocks_round_trip() {
    for step in [1u32, 468, 8_388_608] {
        let pairs: Vec<(u32, u32)> = (0..100).map(|k| (k * step, (k * 37) % 100 * step)).collect();
        let plan = CopyPlan::try_from(blocks(512, pairs.clone())).unwrap();
        assert_eq!(
            (plan.num_tensors(), plan.tensors(Side::Source).first, plan.tensors(Side::Destination).first),
            (2, 0, 4)
        );
        assert_eq!(plan.bytes(), 2 * 100 * 512);
        let moved = plan.tensor_pieces(0, 100 * 512).map(|piece| (piece.src, piece.dst, piece.len));
        let moved_by =
            |&(src, dst): &(u32, u32)| (512 + 512 * u64::from(src), 4096 + 512 * u64::from(dst), 512);
        assert!(moved.eq(pairs.iter().map(moved_by)));
        assert_eq!(sent(&plan), protocol::encode(&blocks(512, pairs)).unwrap());
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
    let span = |src, dst| Span { src, dst, len: 1, count: 1, src_step: 0, dst_step: 0 };
    let listed = |all: Vec<Span>| WirePlan { templates: spans(&all), ..plan() };
    let shuffled = |count: u64, k: u64| k * 1_000_003 % count;
    let many = 1 << 19;
    let cases: Vec<(&str, WirePlan, bool)> = vec![
        ("no bytes", listed(vec![Span { len: 0, ..span(0, 0) }; 3 << 18]), false),
        (
            "a destination each",
            listed((0..many).map(|k| span(5 * k, 3 * shuffled(many, k))).collect()),
            false,
        ),
        (
            "steps that cross",
            listed(
                (0..many).map(|k| Span { count: 2, dst_step: 2, ..span(9 * k, k / 2 * 8 + k % 2) }).collect(),
            ),
            false,
        ),
        (
            "the shortest, and one far away",
            listed((0..3 << 20).map(|k| span(0, k % 100)).chain([span(0, 1 << 40)]).collect()),
            false,
        ),
        (
            "blocks",
            blocks(8, (0..1 << 19).map(|k: u32| (k, shuffled(many, k.into()) as u32)).collect()),
            true,
        ),
        ("far blocks", blocks(8, (0..1 << 19).map(|k: u32| (k, !k)).collect()), true),
        ("narrow blocks", blocks(8, vec![(1, 2); 9 << 18]), false),
        (
            "many pairs of narrow numbers",
            templates(
                (0..24)
                    .map(|at| {
                        let pairs =
                            (0..1u32 << 16).map(|k| (k, shuffled(1 << 16, k.into()) as u32)).collect();
                        template((8, 8), pairs, &[single(0, at << 20, 4), single(4, (at << 20) + 4, 4)])
                    })
                    .collect(),
            ),
            true,
        ),
        (
            "pairs whose places interleave",
            templates(vec![template(
                (8, 8),
                (0..1 << 19).map(|k: u32| (k, shuffled(many, k.into()) as u32)).collect(),
                &[single(0, 0, 4), single(4, 1 << 25, 4)],
            )]),
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
            let body = frame[HEADER..].to_vec();
            let Request::Read { plan, .. } = protocol::decode(&body).unwrap() else { panic!() };
            drop(body);
            let plan = CopyPlan::try_from(plan)?;
            plan.check_bounds(Side::Source, (8, 1 << 48))?;
            plan.check_bounds(Side::Destination, (8, 1 << 48))?;
            Ok((
                plan.touched_rows(Side::Source, ROW)?.len(),
                plan.touched_rows(Side::Destination, ROW)?.len(),
                plan,
            ))
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
    let work = || {
        let body = frame[HEADER..].to_vec();
        let Request::Read { plan, .. } = protocol::decode(&body).unwrap() else { panic!() };
        drop(body);
        CopyPlan::try_from(plan).unwrap()
    };
    let (plan, peak) = counting_allocator::peak(work);
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
    one(&Hello {
        purpose: Purpose::Announce { comm },
        from: PARTY,
        asked: None,
        host: "a".into(),
        nonce: [7; 16],
    });
    one(&read(plan()));
    one(&read(blocks(512, vec![(0, 1); 20])));
    one(&read(layout_plan()));
    one(&Reply::Described(record(WireLocation::Process { runs })));
    one(&Reply::Failed { kind: 1, message: "no".into(), arrived: vec![(7, 2, 300)] });
}
