//! Validation of option texts and of the JSON in them: what each becomes, and what is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use llm_datadist_core::bindings::{Backend, Config, FabricConfig, HugeChoice, PoolConfig, Role, SwapInPath};
use llm_datadist_core::testing::config::{LinkConfig, Token, TransportChoice};
use llm_datadist_core::testing::options::{self, cpp};
use llm_datadist_core::{ClusterId, Result};

use crate::arguments::refused;

fn read(given: &[(&str, &str)]) -> Result<Config> {
    let given: BTreeMap<String, String> =
        given.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    options::config_from_texts(Role::Prompt, ClusterId(7), &given)
}

#[test]
fn pools() {
    let device = |text: &str| read(&[("llm.MemPoolConfig", text)]).map(|config| config.device_pool);
    let host = |text: &str| read(&[("llm.HostMemPoolConfig", text)]).map(|config| config.host_pool);
    let pool = |memory_size, page_shift| Some(PoolConfig { memory_size, page_shift });
    for (text, expected) in [
        (r#"{"memory_size": 18737418240, "page_shift": 16}"#, pool(18_737_418_240, 16)),
        (r#"{"memory_size": 65536}"#, pool(65_536, 16)),
        (r#"{"memory_size": "64KiB"}"#, pool(65_536, 16)),
        (r#"{"memory_size": "64MiB"}"#, pool(64 << 20, 16)),
        (r#"{"memory_size": "20GiB", "page_shift": 20}"#, pool(20 << 30, 20)),
        ("\t\r\n {\"page_shift\":10,\"memory_size\":1024} \n", pool(1024, 10)),
        (r#"{"memory_size": 1073741824, "page_shift": 30}"#, pool(1 << 30, 30)),
        (r#"{"memory_size": 65537, "other": [1, {"x": null}], "größe": "🦀"}"#, pool(65_537, 16)),
        (r#"{"memory_size": 1, "memory_size": 131072}"#, pool(131_072, 16)), // as JSON readers do: the last one
        (r#"{"memory\u005fsize": 65536}"#, pool(65_536, 16)),
        ("", None),
    ] {
        assert_eq!(device(text).unwrap(), expected, "{text}");
        assert_eq!(host(text).unwrap(), expected, "{text}");
    }
    let refused_by_both = |text: &str, facts: &[&str]| {
        let error = refused(device(text), facts);
        assert_eq!(error.fact("option"), Some("mem_pool_cfg"));
        let shown: String = text.chars().take(120).collect();
        let more = if shown.len() < text.len() { "…" } else { "" };
        assert_eq!(error.fact("text"), Some(&*format!("{shown}{more}")));
        assert_eq!(refused(host(text), facts).fact("option"), Some("host_mem_pool_cfg"));
    };
    for (texts, fact) in [
        (&[" ", "{", "nonsense", "{'memory_size': 65536}", "{\"memory_size\": 65536} x"][..], "not JSON"),
        (&["[]", "[{\"memory_size\": 65536}]", "null", "65536", "\"memory_size\""], "one JSON object"),
        (&["{}", "{\"page_shift\": 16}", "{\"Memory_Size\": 65536}"], "memory_size is missing"),
    ] {
        texts.iter().for_each(|text| refused_by_both(text, &[fact]));
    }
    let size = |value: &str| format!("{{\"memory_size\": {value}}}");
    for value in ["", "NaN", "0x10000", "65_536", "065536", "+65536", "65536,", "1e400", "٣٢"] {
        refused_by_both(&size(value), &["not JSON"]);
    }
    for value in ["0", "-1", "true", "null", "65536.0", "\"65536\"", "\"64 MiB\""] {
        refused_by_both(&size(value), &[&format!("memory_size={value}"), "above 0, or a text with a unit"]);
    }
    let long = format!("\"{}\"", "ü".repeat(50_000));
    let no_units = ["-0", "1e6", "[65536]", "\"64mib\"", "\"64MB\"", "\"MiB\"", "\"1.5MiB\"", "\"0MiB\""];
    let no_sizes = ["18446744073709551616", "\"16777216TiB\"", "\"-1MiB\"", "{\"a\": 1}", &long];
    for value in no_units.into_iter().chain(no_sizes) {
        refused_by_both(&size(value), &["memory_size", "KiB, MiB, GiB, TiB"]);
    }
    refused_by_both(&size("65535"), &["memory_size=65535", "65536"]);
    refused_by_both(&size("1073741823, \"page_shift\": 30"), &["1073741824"]);
    for shift in ["9", "31", "-1", "16.0", "1e1", "\"16\"", "true", "null", "[16]", "4294967312"] {
        refused_by_both(&size(&format!("4294967296, \"page_shift\": {shift}")), &["page_shift", "10 to 30"]);
    }
    // The largest number of pages, and the limit of the host pool.
    let small_pages = |bytes: u64| size(&format!("{bytes}, \"page_shift\": 10"));
    let limit = u64::from(u32::MAX) << 10;
    assert_eq!(device(&small_pages(limit - 1)).unwrap(), pool(limit - 1, 10));
    refused(device(&small_pages(limit)), &["2^32-1 pages"]);
    refused(device(&small_pages(u64::MAX)), &["2^32-1 pages"]);
    assert_eq!(device(&size("\"1TiB\"")).unwrap(), pool(1 << 40, 16));
    refused(host(&size("\"1TiB\"")), &["memory_size=\"1TiB\"", "21474836480"]);
    refused(host(&small_pages((20 << 30) + 1)), &["memory_size=21474836481", "21474836480"]);
}

#[test]
fn local_options() {
    let config = read(&[]).unwrap();
    assert_eq!((config.role, config.cluster), (Role::Prompt, ClusterId(7)));
    assert_eq!((config.sync_timeout, config.device_id), (Duration::from_secs(1), 0));
    assert_eq!((config.device_pool, config.host_pool, config.remote_accessible), (None, None, false));
    assert_eq!((config.swap_in, config.huge_pages), (SwapInPath::Auto, HugeChoice::Auto));
    assert_eq!((config.max_transfers, config.transfer_poll), (4096, Duration::from_micros(50)));

    let config = read(&[
        ("llm.SyncKvCacheWaitTime", "9223372036854775807"),
        ("ge.exec.deviceId", "2147483647"),
        ("llm.EnableCacheManager", "1"),
        ("llm.EnableRemoteCacheAccessible", "1"),
        ("llm.CopyWorkers", "256"),
        ("llm.MaxTransfers", "1048576"),
        ("llm.TransferPollUs", "10000"),
        ("llm.SwapInPath", "ring"),
        ("llm.RdmaTrafficClass", "4294967295"),
        ("llm.RdmaServiceLevel", "0"),
        ("unknown", "whatever"),
    ])
    .unwrap();
    assert_eq!(config.sync_timeout, Duration::from_millis(i64::MAX as u64));
    assert_eq!((config.device_id, config.copy_workers), (i32::MAX as u32, Some(256)));
    assert_eq!((config.max_transfers, config.transfer_poll), (1 << 20, Duration::from_millis(10)));
    assert!(config.remote_accessible);
    assert_eq!(config.swap_in, SwapInPath::Ring);
    for (word, choice) in [("auto", HugeChoice::Auto), ("off", HugeChoice::Off), ("eager", HugeChoice::Eager)]
    {
        assert_eq!(read(&[("llm.HugePages", word)]).unwrap().huge_pages, choice);
    }
}

#[test]
fn link_options() {
    let links = |options: &[(&str, &str)]| read(options).map(|config| config.links);
    assert_eq!(links(&[]).unwrap(), LinkConfig::default());
    let all = links(&[
        ("llm.ListenIp", "127.0.0.1"),
        ("llm.ListenPort", "0"),
        ("llm.LinkTotalTime", "7"),
        ("llm.LinkRetryCount", "100"),
        ("llm.TransferBackend", "hixl"),
        ("llm.LinkToken", "sixteen letters!"),
        ("llm.LinkAcceptRemote", "1"),
        ("llm.LinkHeartbeat", "250"),
        ("llm.LinkSilence", "500"),
        ("llm.LinkPinLimit", "9"),
        ("llm.LinkTransport", "tcp"),
        ("llm.LinkStreams", "16"),
        ("llm.LinkAddresses", "10.0.0.1, [fd00::1]"),
        ("llm.LinkRemoteMemory", "12345678901"),
        ("llm.RankPort", "65535"),
        ("llm.UcxLibrary", "/opt/libucp.so.0"),
        ("llm.RankHosts", r#"{"5": "[::1]:70", "192.0.2.9": "192.0.2.8:1"}"#),
    ]);
    let hosts = [("192.0.2.9", "192.0.2.8:1"), ("5", "[::1]:70")];
    let expected = LinkConfig {
        pin_limit: Duration::from_millis(9),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        token: Some(Token::new("sixteen letters!")),
        accept_remote: true,
        heartbeat: Duration::from_millis(250),
        silence: Duration::from_millis(500),
        total: Duration::from_secs(7),
        retries: 100,
        transport: TransportChoice::Tcp,
        streams: 16,
        addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        remote_memory: Some(12_345_678_901),
        rank_port: 65_535,
        rank_hosts: hosts.iter().map(|&(name, at)| (name.to_owned(), at.parse().unwrap())).collect(),
        both_ways: true,
        fabric: FabricConfig { ucx_library: Some("/opt/libucp.so.0".into()), ..FabricConfig::default() },
        ..LinkConfig::default()
    };
    assert_eq!(all.unwrap(), expected);
    for (name, backend) in [("auto", Backend::Auto), ("sockets", Backend::Sockets), ("ucx", Backend::Ucx)] {
        let links = links(&[("llm.TransferBackend", name)]).unwrap();
        assert_eq!((links.fabric.backend, links.both_ways), (backend, false));
    }
    assert_eq!(LinkConfig::default().pin_limit, Duration::from_secs(600));
    assert_eq!(links(&[("llm.RankHosts", "")]).unwrap().rank_hosts.len(), 0);
    // 0 seconds stands for the environment variable, and without one for the default.
    let total = |given: &str, env: &str| {
        links(&[("llm.LinkTotalTime", given), ("env.HCCL_CONNECT_TIMEOUT", env)]).map(|links| links.total)
    };
    for (given, env, seconds) in [("0", "", 120), ("0", "0", 120), ("0", "600", 600), ("5", "600", 5)] {
        assert_eq!(total(given, env).unwrap(), Duration::from_secs(seconds), "{given}, {env}");
    }
    assert_eq!(links(&[("env.HCCL_CONNECT_TIMEOUT", "9")]).unwrap().total, Duration::from_secs(9));
    refused(total("0", "soon"), &["env.HCCL_CONNECT_TIMEOUT", "soon"]);
    // A heartbeat raises the default of the silence limit to two heartbeats. A given limit must be that long.
    let slow = links(&[("llm.LinkHeartbeat", "4000")]).unwrap();
    assert_eq!(slow.silence, Duration::from_secs(8));
    assert_eq!(links(&[("llm.LinkHeartbeat", "10")]).unwrap().silence, LinkConfig::default().silence);
    let short = links(&[("llm.LinkHeartbeat", "4000"), ("llm.LinkSilence", "7999")]);
    refused(short, &["link_silence=7999", "8000"]);
}

#[test]
fn malformed_values_are_refused() {
    let malformed =
        ["", " ", "1 ", " 1", "+1", "-1", "0x10", "1e3", "1.0", "1_000", "NaN", "true", "0;1", "١"];
    for (key, name, invalid) in [
        ("llm.SyncKvCacheWaitTime", "sync_kv_timeout", &["0", "9223372036854775808"][..]),
        ("ge.exec.deviceId", "device_id", &["2147483648"]),
        ("llm.LinkTotalTime", "link_total_time", &["4294967296"]),
        ("llm.LinkRetryCount", "link_retry_count", &["0", "101"]),
        ("llm.RdmaTrafficClass", "llm.RdmaTrafficClass", &["4294967296"]),
        ("llm.RdmaServiceLevel", "llm.RdmaServiceLevel", &["4294967296"]),
        ("llm.CopyWorkers", "copy_workers", &["0", "257"]),
        ("llm.MaxTransfers", "max_transfers", &["0", "1048577"]),
        ("llm.TransferPollUs", "transfer_poll_us", &["10001"]),
        ("llm.EnableCacheManager", "llm.EnableCacheManager", &["2", "01", "yes", "True"]),
        ("llm.EnableRemoteCacheAccessible", "llm.EnableRemoteCacheAccessible", &["2", "10"]),
        ("llm.SwapInPath", "swap_in_path", &["Auto", "ring ", "directly"]),
        ("llm.HugePages", "huge_pages", &["Auto", "merge-registered"]),
        ("llm.TransferBackend", "llm.TransferBackend", &["HIXL", "nixl"]),
        ("llm.LinkAcceptRemote", "llm.LinkAcceptRemote", &["2", "yes"]),
        ("llm.LinkHeartbeat", "link_heartbeat", &["0", "3600001"]),
        ("llm.LinkSilence", "link_silence", &["0", "1999", "86400001"]),
        ("llm.LinkPinLimit", "link_pin_limit", &["0", "86400001"]),
        ("llm.LinkTransport", "link_transport", &["SHM", "rdma"]),
        ("llm.LinkStreams", "link_streams", &["-1", "17"]),
        (
            "llm.LinkAddresses",
            "link_addresses",
            &[
                "",
                "::",
                "224.0.0.1",
                "10.0.0.1,",
                "fd00::1,fd00::1",
                "::ffff:0.0.0.0",
                "10.0.0.1,::ffff:10.0.0.1",
            ],
        ),
        ("llm.LinkRemoteMemory", "link_remote_memory", &["-1", "1G", "9223372036854775808"]),
        ("llm.RankPort", "rank_port", &["0", "65536"]),
    ] {
        for text in malformed.iter().chain(invalid).copied().chain([&*"x".repeat(100_000)]) {
            let message = refused(read(&[(key, text)]), &[]).to_string();
            assert!(message.contains(key) || message.contains(name), "{key}={text:?}: {message}");
        }
    }
}

#[test]
fn settings_of_the_backend_are_checked_with_hixl_only() {
    let with = |backend: &str, config: &str| {
        read(&[("llm.TransferBackend", backend), ("llm.GlobalResourceConfig", config)])
    };
    for config in [
        "{}",
        r#"{"connect_pool.thread_num": 64, "connect_pool.task_queue_capacity": "65535", "unknown": []}"#,
        r#"{"connect_pool": {"thread_num": 1}, "comm_resource_config": {"qos": 7, "protocol_desc": ["roce:host"]}}"#,
        r#"{"channel_pool.high_waterline": 0.8, "channel_pool.low_waterline": "0.3"}"#,
        r#"{"local_comm_res_path": "/no/such/file"}"#,
    ] {
        with("hixl", config).unwrap();
    }
    for (config, fact) in [
        ("", "a JSON object"),
        ("x", "a JSON object"),
        ("[]", "a JSON object"),
        (r#"{"connect_pool.thread_num": 65}"#, "connect_pool.thread_num is a whole number, 1 to 64"),
        (r#"{"connect_pool": {"thread_num": 0}}"#, "connect_pool.thread_num is a whole number, 1 to 64"),
        (r#"{"connect_pool": 3}"#, "connect_pool is an object"),
        (r#"{"connect_pool.thread_num": "+3"}"#, "connect_pool.thread_num"),
        (r#"{"comm_resource_config.qos": "7"}"#, "qos is a number, 0 to 7"),
        (r#"{"comm_resource_config.protocol_desc": ["tcp"]}"#, "roce:device or hccs:device"),
        (r#"{"channel_pool.high_waterline": 0.8}"#, "given with a larger high_waterline"),
        (r#"{"channel_pool": {"high_waterline": "nan", "low_waterline": 0.1}}"#, "a number between 0 and 1"),
        (r#"{"fabric_memory.enable_aicpu_unfold": 1}"#, "true or false"),
        (r#"{"fabric_memory.task_stream_num": 2}"#, "1 unless enable_aicpu_unfold is false"),
        (r#"{"local_comm_res_path": 7}"#, "local_comm_res_path is a text"),
    ] {
        refused(with("hixl", config), &["llm.GlobalResourceConfig=", fact]);
        for backend in ["auto", "sockets"] {
            with(backend, config).unwrap();
        }
        read(&[("llm.GlobalResourceConfig", config)]).unwrap();
    }
    refused(with("hixl", &"[".repeat(100_000)), &["llm.GlobalResourceConfig=", "a JSON object"]);
}

#[test]
fn values_that_were_removed_are_refused_with_those_that_remain() {
    let facts = ["hixl or auto or sockets or ucx", "Use ucx", "giving up a NIXL read"];
    refused(read(&[("llm.TransferBackend", "nixl")]), &facts);
    for word in ["merge", "merge_registered"] {
        let facts = [&format!("huge_pages={word:?}"), "auto or off or eager"];
        refused(read(&[("llm.HugePages", word)]), &facts);
    }
}

#[test]
fn listening_addresses() {
    let listen = |options: &[(&str, &str)]| read(options).map(|config| config.links.listen);
    let split = |ip, port| listen(&[("llm.ListenIp", ip), ("llm.ListenPort", port)]);
    for text in ["127.0.0.1:26000", "0.0.0.0:0", "[::1]:65535", "[2001:db8::1]:7"] {
        let (ip, port) = text.rsplit_once(':').unwrap();
        let expected = Some(text.parse().unwrap());
        // As given, in both spellings, and as the Python package splits it.
        assert_eq!(listen(&[("llm.listenIpInfo", text)]).unwrap(), expected);
        assert_eq!(listen(&[("llm.ListenIpInfo", text)]).unwrap(), expected);
        assert_eq!(split(ip, port).unwrap(), expected);
    }
    assert_eq!(split("::1", "1").unwrap(), "[::1]:1".parse().ok());
    assert_eq!(listen(&[("llm.listenIpInfo", ""), ("llm.ListenIp", "")]).unwrap(), None);
    let no_names = ["localhost:1", "127.0.0.1", "127.0.0.1:", ":1", "1:1", "127.1:1", "127.0.0.01:1"];
    let no_ports = ["127.0.0.1:65536", "127.0.0.1:+1", "127.0.0.1: 1", "127.0.0.1:1;127.0.0.1:2"];
    let no_brackets = ["::1:1", "[::1]", "[127.0.0.1]:1", "[::1:1"];
    for text in no_names.into_iter().chain(no_ports).chain(no_brackets) {
        refused(listen(&[("llm.listenIpInfo", text)]), &["llm.listenIpInfo", text, "ip:port"]);
    }
    refused(split("node-a", "1"), &["llm.ListenIp", "node-a", "not a host name"]);
    refused(split("::1", "70000"), &["llm.ListenPort", "70000", "65535"]);
    // The message names the option that the program gave.
    let whole = [("llm.listenIpInfo", "node-a:1"), ("llm.ListenIp", "node-a"), ("llm.ListenPort", "1")];
    refused(listen(&whole), &["llm.listenIpInfo=\"node-a:1\"", "not a host name"]);
    refused(listen(&[("llm.ListenIp", "::1")]), &["llm.ListenIp", "together with llm.ListenPort"]);
    refused(listen(&[("llm.ListenPort", "1")]), &["llm.ListenPort", "together with llm.ListenIp"]);
}

#[test]
fn token_is_never_shown() {
    for token in ["sixteen letters!", "ключключключключ"] {
        let config = read(&[("llm.LinkToken", token)]).unwrap();
        assert_eq!(config.links.token.as_ref().unwrap().bytes(), token.as_bytes());
        assert!(!format!("{config:?}").contains(token));
    }
    for (token, count) in [("", 0), ("fifteen-letters", 15), ("ключключключклю", 15)] {
        let count = format!("({count} characters, not shown)");
        let error = refused(read(&[("llm.LinkToken", token)]), &["link_token", &count, "at least 16"]);
        assert!(token.is_empty() || !format!("{error} {error:?}").contains(token), "{error}");
    }
}

#[test]
fn token_file_is_an_absolute_path() {
    let file = read(&[("llm.LinkTokenFile", "/run/secrets/token")]).unwrap().links;
    assert_eq!((file.token, file.token_file), (None, Some("/run/secrets/token".into())), "it is not opened");
    for path in ["", "/a\0b", "sixteen letters!", "run/secret", &format!("/{}", "x".repeat(4095))] {
        let count = format!("({} characters, not shown)", path.chars().count());
        let error = refused(read(&[("llm.LinkTokenFile", path)]), &["link_token_file", &count, "absolute"]);
        assert!(path.is_empty() || !error.to_string().contains(path), "it may be the token itself: {error}");
    }
}

#[test]
fn rank_hosts() {
    assert!(options::check_text("rank_hosts", "{}").is_ok());
    let long = format!(r#"{{"{}": 1}}"#, "x".repeat(100_000));
    for (text, fact) in [
        ("", "not JSON"),
        ("x", "not JSON"),
        ("[]", "not an object"),
        (r#"{"5": 7}"#, "\"5\" is 7"),
        (r#"{"5": "node-a:7"}"#, "not a host name"),
        (r#"{"5": "192.0.2.1"}"#, "ip:port"),
        (r#"{"5": "192.0.2.1:0"}"#, "192.0.2.1:0"),
        (&long, "xxx"),
    ] {
        refused(options::check_text("rank_hosts", text), &["rank_hosts", fact]);
    }
}

/// Options in the order in which they are read.
const IN_ORDER: &str = "
    llm.MemPoolConfig llm.HostMemPoolConfig llm.EnableCacheManager llm.EnableRemoteCacheAccessible
    llm.MemoryUtilization ge.flowGraphMemMaxSize llm.SyncKvCacheWaitTime ge.exec.deviceId
    llm.RdmaTrafficClass llm.RdmaServiceLevel llm.listenIpInfo llm.LinkTotalTime llm.LinkRetryCount
    llm.TransferBackend llm.UcxLibrary llm.LinkToken llm.LinkAcceptRemote llm.LinkHeartbeat
    llm.LinkSilence llm.LinkPinLimit llm.LinkTransport llm.LinkStreams llm.LinkAddresses
    llm.LinkRemoteMemory llm.RankPort llm.RankHosts llm.CopyWorkers llm.TransferPollUs llm.SwapInPath
    llm.Verify llm.HugePages";

#[test]
fn first_wrong_option_in_reading_order_is_reported() {
    let wrong: Vec<_> = IN_ORDER.split_whitespace().map(|key| (key, "x")).collect();
    let mut messages = BTreeSet::new();
    for at in 0..wrong.len() {
        let alone = refused(read(&wrong[at..=at]), &[]).to_string();
        assert_eq!(refused(read(&wrong[at..]), &[]).to_string(), alone);
        // `llm.HugePages` is also known as `huge_pages`.
        let plain = |text: &str| text.to_lowercase().replace('_', "").replace("config", "cfg");
        let name = plain(wrong[at].0.rsplit('.').next().unwrap());
        assert!(plain(&alone).contains(&name), "{name}: {alone}");
        messages.insert(alone);
    }
    assert_eq!(messages.len(), 31, "each names its option");
    let both = [("llm.LinkToken", "x"), ("llm.LinkTokenFile", "x"), ("llm.LinkAcceptRemote", "x")];
    refused(read(&both), &["llm.LinkToken and llm.LinkTokenFile are both given"]);
    refused(read(&[&both[..], &[("llm.UcxLibrary", "x")]].concat()), &["ucx_library"]);
    // Options of `KvCacheManager` mode are not read in the other mode.
    let ignored =
        [("llm.EnableCacheManager", "1"), ("llm.MemoryUtilization", "x"), ("ge.flowGraphMemMaxSize", "x")];
    assert_eq!(read(&ignored).unwrap().device_share, None);
}

/// `tests/test_unusual_option_values.py` gives such texts to everything that reads JSON.
#[test]
fn json_nested_deeper_than_64_levels_is_refused() {
    let lists = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let objects = |levels: usize| format!("{}1{}", "{\"a\":".repeat(levels), "}".repeat(levels));
    let deep = [lists(65), objects(65), lists(100_000), "[{\"a\":".repeat(100_000), "[".repeat(10_000_000)];
    for text in deep {
        refused(options::check_text("rank_hosts", &text), &["nested deeper than 64 levels", "rank_hosts"]);
        refused(cpp::buffer_pool(&text), &["nested deeper than 64 levels", "llm.BufPoolCfg"]);
    }
    // Valid nesting, and brackets inside strings, are refused for another reason.
    let in_string = format!("[{:?}]", "[".repeat(1000));
    for text in [lists(64), objects(64), in_string, r#"["\\\"[[", "\\"]"#.into()] {
        let error = options::check_text("rank_hosts", &text).unwrap_err().to_string();
        assert!(!error.contains("nested deeper"), "{error}");
    }
}
