//! Writes the seed corpora into `seeds`: one of every message, plans of all forms, and texts from the documentation.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use llm_datadist_core::testing::model::{AddressLocation, CacheId, CacheKey, GrantId, Name};
use llm_datadist_core::testing::plan::{Side, Span, Template, TensorSteps};
use llm_datadist_core::testing::protocol::{
    self, Attach, Attached, BoundedBytes, Challenge, Comm, Confirm, ControlMessage, EnteredLink,
    EntryVersion, Hello, LinkAnswer, NamedCache, Party, Proof, Purpose, Reply, Request, RingAnswer,
    RingOffer, Run, Timed, Welcome, WireCache, WireLayout, WireLocation, WirePlan, WireTemplates,
    WireUsedKey,
};
use llm_datadist_core::{Error, ErrorKind, KvLayout, KvPlanes, TokenOrder};
use serde::Serialize;

const GRANT: GrantId = GrantId { slot: 1, generation: 2, secret: [3; 16] };
const NAME: Name = Name::Row { cache: CacheId(3), row: 2 };

fn main() {
    let mut messages: Vec<(u8, &str, Vec<u8>)> = Vec::new();
    let mut add = |which: u8, name: &'static str, frame: Vec<u8>| messages.push((which, name, frame));
    greeting(&mut add);
    control(&mut add);
    requests(&mut add);
    replies(&mut add);
    for (which, name, frame) in &messages {
        write("frames", name, &[&[*which][..], frame].concat());
        write("messages", name, &[&[*which][..], message(frame)].concat());
    }
    let refusal = protocol::refusal(&Error::new(ErrorKind::LinkFailed, "no token was proved"));
    write("frames", "refusal", &[&[0x80][..], &refusal].concat());
    let two: Vec<u8> = [&[0x80][..], &messages[0].2, &messages[2].2].concat();
    write("frames", "two", &two);
    for (name, plan) in plans() {
        let sizes = [0, 8, 0, 64, 0, 0, 8, 0, 64, 0, 2, 0]; // 8 tensors of 16 KiB at each end, rows of 512 bytes
        write("plans", name, &[&sizes[..], message(&frame(&plan))].concat());
    }
    texts();
}

fn write(target: &str, name: &str, bytes: &[u8]) {
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target);
    fs::create_dir_all(&folder).expect("the folder of the seeds");
    fs::write(folder.join(name), bytes).expect("a seed");
}

/// Returns the bytes of the message in `frame`, without its checksum.
fn message(frame: &[u8]) -> &[u8] {
    &frame[protocol::HEADER..frame.len() - protocol::CHECKSUM]
}

fn frame<T: Serialize>(message: &T) -> Vec<u8> {
    protocol::encode(message).expect("a message")
}

fn greeting(add: &mut dyn FnMut(u8, &'static str, Vec<u8>)) {
    let from = Party { cluster: 1, instance: 300, remote_accessible: true };
    let comm = Some(Comm { name: "c".into(), members: vec![(1, 0), (2, 1)], listener: "a:1".into() });
    let hello = |purpose| Hello { purpose, from, asked: Some(2), host: "host".into(), nonce: [7; 16] };
    add(0, "hello-link", frame(&hello(Purpose::Link { link: 9, comm, probe_local: true, ensure: false })));
    add(0, "hello-call", frame(&hello(Purpose::Call { link: 9, reverse: true, rings: false })));
    add(0, "hello-rings", frame(&hello(Purpose::Call { link: 9, reverse: false, rings: true })));
    add(1, "challenge", frame(&Challenge { nonce: [8; 16] }));
    add(2, "proof", frame(&Proof { mac: [9; 32] }));
    add(
        3,
        "welcome",
        frame(&Welcome { from, mac: [1; 32], local: Some("name".into()), secret: Some([4; 32]) }),
    );
    let probe = Some((0x7f00_0000_1000, [3; 16]));
    add(4, "attach", frame(&Attach { generations: true, pools: [Some(1 << 20), None], probe }));
    add(5, "attached", frame(&Attached { pools: Ok(()), process: Err("refused".into()) }));
    let metadata = BoundedBytes(Arc::new(b"metadata".to_vec()));
    add(11, "ring-offer", frame(&RingOffer));
    add(12, "ring-used", frame(&RingAnswer::Used));
    add(12, "ring-refused", frame(&RingAnswer::Refused { reason: "no".into() }));
    add(9, "confirm", frame(&Confirm { name: "name".into(), metadata: metadata.clone(), fabric: None }));
    let addresses = vec![([10, 0, 0, 1], 26000).into(), ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 1).into()];
    let entered = EnteredLink { name: "name".into(), metadata, fabric: None, addresses };
    add(10, "entered", frame(&LinkAnswer::Entered(entered)));
    add(10, "later", frame(&LinkAnswer::Later { reason: "there is a link already".into() }));
}

fn control(add: &mut dyn FnMut(u8, &'static str, Vec<u8>)) {
    add(6, "ping", frame(&ControlMessage::Ping));
    add(6, "bye", frame(&ControlMessage::Bye { reason: "done".into(), unlinked: true }));
    add(6, "dial", frame(&ControlMessage::Dial));
    add(6, "polled", frame(&ControlMessage::Polled { arrived: (3, 300), polled: (2, 1 << 40) }));
}

fn requests(add: &mut dyn FnMut(u8, &'static str, Vec<u8>)) {
    let plan = || plans().swap_remove(0).1;
    let mut ask = |name, request| add(7, name, frame(&Timed { limit_ms: 1000, request }));
    let request = Name::Key(CacheKey::Request { model: 1, id: 2 });
    ask("describe", Request::Describe { name: request });
    ask("describe-grant", Request::Describe { name: Name::Grant(GRANT) });
    let cache = NamedCache { name: NAME, id: CacheId(3) };
    let grant = NamedCache { name: Name::Grant(GRANT), ..cache };
    let read =
        |cache, generation, summed| Request::Read { cache, generation, plan: plan(), range: 0..4096, summed };
    ask("read", read(cache, None, false));
    ask("read-granted", read(grant, Some(300), true));
    ask("write", Request::Write { cache, plan: plan(), range: 0..8, ahead: true, shared: None });
    let source = WireLocation::Pool { pool: 1, runs: vec![Run { start: 0, step: 4096, count: 2 }] };
    ask("fetch", Request::Fetch { cache, plan: plan(), source, num_tensors: 2, tensor_bytes: 4096 });
    let message = BoundedBytes(b"message".to_vec());
    let used_key = Some(WireUsedKey { cache, first: 0, count: 2 });
    ask("finish", Request::Finish { used_key, message: None });
    let used_key = Some(WireUsedKey::of_grant(GRANT));
    ask("finish-all", Request::Finish { used_key, message: Some(message.clone()) });
    let (_, of_pairs) =
        plans().into_iter().find(|(name, _)| *name == "templates").expect("a plan of templates");
    ask("checksums", Request::Checksums { cache: grant, plan: of_pairs, side: Side::Source });
    ask("notify", Request::Notify { messages: vec![message.clone(), message] });
    let of_a_part = Request::Write { cache, plan: plan(), range: 0..8, ahead: false, shared: Some(300) };
    ask("write-shared", of_a_part);
    ask("write-part", Request::WritePart { write: 300, range: 8..16 });
    ask("unlink", Request::Unlink);
    ask("find", Request::Find { name: "kv".into() });
    ask("locate", Request::Locate { addrs: vec![0, 4096, u64::MAX] });
}

fn replies(add: &mut dyn FnMut(u8, &'static str, Vec<u8>)) {
    let record = WireCache {
        at: EntryVersion { index: 5, generation: 600 },
        cache: CacheId(3),
        row: 2,
        num_tensors: 4,
        rows: 128,
        row_bytes: 65536,
        row_stride: 66048,
        blocks: true,
        placement: 1,
        allocated: true,
        accessible: false,
        location: WireLocation::Process {
            runs: vec![Run { start: 4096, step: 1 << 23, count: 3 }, Run { start: 1, step: 0, count: 1 }],
        },
        layout: None,
        granted: vec![],
    };
    let granted = WireCache { granted: vec![(0, 3), (5, 6)], ..record.clone() };
    add(8, "described", frame(&Reply::Described(record.clone())));
    add(8, "described-granted", frame(&Reply::Described(granted)));
    let layout = WireLayout {
        data_type: 1,
        layout: KvLayout {
            tokens_per_block: 16,
            heads: 8..16,
            total_heads: 16,
            head_dim: 128,
            order: TokenOrder::Hnd,
            kv: KvPlanes::Separate,
            layers: 0..2,
            model: "a model".into(),
        },
    };
    add(8, "described-layout", frame(&Reply::Described(WireCache { layout: Some(layout), ..record })));
    add(8, "found", frame(&Reply::Found { cache: CacheId(3) }));
    add(8, "done", frame(&Reply::Done { bytes: 1 << 40 }));
    add(8, "ready", frame(&Reply::Ready { bytes: 4096 }));
    add(8, "unreachable", frame(&Reply::Unreachable { reason: "no permission".into() }));
    let arrived = vec![(1, 0, 3), (1, 5, 6)];
    add(8, "failed", frame(&Reply::Failed { kind: 4, message: "gone".into(), arrived }));
    add(8, "checksums", frame(&Reply::Checksums { generation: 300, sums: vec![0, 1 << 40, u64::MAX] }));
    add(
        8,
        "located",
        frame(&Reply::Located(vec![AddressLocation { cache: CacheId(3), tensor: 1, offset: 4096 }])),
    );
}

fn plans() -> Vec<(&'static str, WirePlan)> {
    let plan = |templates: Vec<Template>| WirePlan {
        num_tensors: 2,
        src: TensorSteps::consecutive(0),
        dst: TensorSteps::consecutive(4),
        templates: WireTemplates(Ok(Arc::new(templates.into()))),
    };
    let span = Span { src: 4096, dst: 0, len: 512, count: 3, src_step: -1024, dst_step: 512 };
    let one = |src, dst| Span { src, dst, len: 512, count: 1, src_step: 0, dst_step: 0 };
    let pairs = |pairs: &[(u32, u32)]| pairs.to_vec();
    let template =
        |units, pairs: Vec<(u32, u32)>, spans: &[Span]| Template::new(units, pairs, spans.to_vec());
    let templates = |templates| WirePlan { src: TensorSteps { first: 0, step: 2 }, ..plan(templates) };
    let spans = |spans: &[Span]| plan(vec![template((0, 0), pairs(&[(0, 0)]), spans)]);
    let heads = Span { src: 0, dst: 64, len: 64, count: 4, src_step: 128, dst_step: 256 };
    let blocks = |pairs| {
        let one = Span { src: 512, dst: 1024, ..one(0, 0) };
        plan(vec![template((512, 512), pairs, &[one])])
    };
    vec![
        ("spans", spans(&[span, one(0, 9000), one(8192, 20_000)])),
        ("blocks", blocks(pairs(&[(0, 1), (5, 2), (3, 9)]))),
        (
            "templates",
            templates(vec![
                template((512, 1024), pairs(&[(0, 3), (7, 0), (7, 5)]), &[heads]),
                template((0, 0), pairs(&[(0, 0)]), &[one(9, 9000), one(5, 10_000)]),
            ]),
        ),
        (
            "places-that-interleave",
            templates(vec![template((64, 64), pairs(&[(0, 0), (1, 1), (2, 2)]), &[heads])]),
        ),
        (
            "template-of-blocks",
            templates(vec![template((512, 512), pairs(&[(4, 2), (1, 1)]), &[one(0, 512)])]),
        ),
        ("same-destination", blocks(pairs(&[(0, 4), (5, 4)]))),
        ("wide-pairs", blocks(pairs(&[(0, 1), (300, 70_000)]))),
        ("past-the-end", spans(&[one(u64::MAX - 10, 16_384)])),
        ("fan-out", spans(&[Span { src_step: 0, ..span }])),
    ]
}

fn texts() {
    let options: [(&str, &[u8]); 4] = [
        ("cache-manager", b"\0llm.EnableCacheManager=1\nllm.EnableRemoteCacheAccessible=1\nllm.MemPoolConfig={\"memory_size\":1048576,\"page_shift\":16}\nllm.SyncKvCacheWaitTime=500\nge.exec.deviceId=0\n"),
        ("links", b"\x01llm.ListenIpInfo=127.0.0.1:0\nllm.LinkToken=sixteen-characters-at-least\nllm.LinkHeartbeat=100\nllm.LinkSilence=400\nllm.LinkTransport=tcp\nllm.LinkStreams=4\nllm.LinkAcceptRemote=1\nllm.RankPort=16666\nllm.RankHosts={\"1\":\"127.0.0.1:5\"}\nllm.LinkTotalTime=3\nllm.LinkRetryCount=2\n"),
        ("copies", b"\x02llm.CopyWorkers=4\nllm.SwapInPath=ring\nllm.HugePages=off\nllm.MemoryUtilization=0.5\nge.flowGraphMemMaxSize=1048576\nllm.RdmaTrafficClass=132\nenv.HCCL_CONNECT_TIMEOUT=120\n"),
        ("class", b"\x01llm.DeviceId=0\nllm.BufPoolCfg={\"buf_pool_size\":4194304}\nllm.EnableSwitchRole=1\nllm.TransferBackend=hixl\nllm.ListenIpInfo=127.0.0.1:0\nllm.LocalCommRes=x\n"),
    ];
    for (name, text) in options {
        write("options", name, text);
    }
    let pools: [(&str, &str); 6] = [
        ("pool", r#"{"memory_size": 18737418240, "page_shift": 16}"#),
        ("default-page", r#"{"memory_size": 1048576}"#),
        ("float", r#"{"memory_size": 1e6, "page_shift": 10}"#),
        ("nested", r#"{"memory_size": [[{"page_shift": null}]]}"#),
        ("buffers", r#"{"buf_pool_size": 4194304}"#),
        (
            "classes",
            r#"{"buf_cfg":[{"total_size":2097152,"blk_size":256,"max_buf_size":8192},{"total_size":4194304,"blk_size":4096,"max_buf_size":1048576}]}"#,
        ),
    ];
    for (name, text) in pools {
        write("pool_json", name, text.as_bytes());
    }
    let tables: [(&str, &str); 3] = [
        (
            "one-server",
            r#"{"server_count":"1","status":"completed","version":"1.0","server_list":[{"server_id":"node_0","device":[{"device_id":"0","rank_id":"0","device_ip":"192.168.1.1"},{"device_id":"1","rank_id":"1","device_ip":"192.168.1.2"},{"device_id":2,"rank_id":2},{"device_id":7,"rank_id":7}]}]}"#,
        ),
        (
            "two-servers",
            r#"{"server_count":"2","server_list":[{"server_id":"10.0.0.1","host_ip":"10.0.0.1","device":[{"device_id":"0","rank_id":"0","device_port":"17000"}]},{"server_id":"10.0.0.2","device":[{"device_id":"4","rank_id":1,"host_ip":"fd00::2"}]}]}"#,
        ),
        ("bare", r#"{"server_list":[{"device":[]}]}"#),
    ];
    for (name, text) in tables {
        for members in 0..3u8 {
            write(
                "rank_table",
                &format!("{name}-{}", members + 2),
                &[&[members][..], text.as_bytes()].concat(),
            );
        }
    }
}
