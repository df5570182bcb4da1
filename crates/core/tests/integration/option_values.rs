//! Options of the native API: what each value becomes, and what is refused.
//!
//! Not for: options as texts (`options`).

use std::collections::HashSet;
use std::time::Duration;

use llm_datadist_core::bindings::{Backend, Config, FabricConfig, HugeChoice, Mode, PoolConfig, SwapInPath};
use llm_datadist_core::testing::config::{LinkConfig, Token, TransportChoice};
use llm_datadist_core::testing::options::OptionValue::{self, Flag, Float, Int};
use llm_datadist_core::testing::options::{OPTIONS, check_native_names, config_from_values};
use llm_datadist_core::{Result, Verify};

use crate::arguments::refused;

const SECRET: &str = "sixteen letters!";

fn read(given: &[(&str, OptionValue)]) -> Result<Config> {
    config_from_values(given, &|_| None)
}

fn with(name: &str, value: OptionValue) -> Result<Config> {
    read(&[(name, value)])
}

fn text(value: &str) -> OptionValue {
    OptionValue::Text(value.into())
}

#[test]
fn defaults_are_those_of_the_native_api() {
    let config = read(&[]).unwrap();
    assert_eq!(config, Config::native());
    assert_eq!((config.mode, config.sync_timeout), (Mode::CacheManager, Duration::from_secs(10)));
}

#[test]
fn every_option_sets_its_value() {
    let given = [
        ("pool", text("64MiB")),
        ("host_pool", Int(40 << 30)),
        ("page", text("4KiB")),
        ("timeout", Float(0.25)),
        ("listen", text("[::1]:0")),
        ("backend", text("sockets")),
        ("ucx_library", text("/opt/libucp.so.0")),
        ("token", text(SECRET)),
        ("accept_remote", Flag(true)),
        ("heartbeat", Float(0.25)),
        ("silence", Int(1)),
        ("pin_limit", Int(60)),
        ("transport", text("tcp")),
        ("streams", Int(16)),
        ("addresses", text("10.0.0.1,fd00::1")),
        ("remote_memory", text("2TiB")),
        ("copy_workers", Int(256)),
        ("max_transfers", Int(1)),
        ("transfer_poll", Float(0.000_05)),
        ("swap_in_path", text("ring")),
        ("verify", text("full")),
        ("huge_pages", text("eager")),
    ];
    let expected = Config {
        device_pool: Some(PoolConfig { memory_size: 64 << 20, page_shift: 12 }),
        host_pool: Some(PoolConfig { memory_size: 40 << 30, page_shift: 12 }),
        sync_timeout: Duration::from_millis(250),
        copy_workers: Some(256),
        max_transfers: 1,
        transfer_poll: Duration::from_micros(50),
        swap_in: SwapInPath::Ring,
        verify: Verify::Full,
        huge_pages: HugeChoice::Eager,
        links: LinkConfig {
            listen: Some("[::1]:0".parse().unwrap()),
            fabric: FabricConfig {
                backend: Backend::Sockets,
                ucx_library: Some("/opt/libucp.so.0".into()),
                ..FabricConfig::default()
            },
            token: Some(Token::new(SECRET)),
            accept_remote: true,
            heartbeat: Duration::from_millis(250),
            silence: Duration::from_secs(1),
            pin_limit: Duration::from_secs(60),
            transport: TransportChoice::Tcp,
            streams: 16,
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            remote_memory: Some(2 << 40),
            ..LinkConfig::default()
        },
        ..Config::native()
    };
    assert_eq!(read(&given).unwrap(), expected);
    let file = with("token_file", text("/run/token")).unwrap().links;
    assert_eq!(file.token_file, Some("/run/token".into()));
    let covered: HashSet<_> = given.iter().map(|(name, _)| *name).chain(["token_file"]).collect();
    let names: Vec<_> = OPTIONS.iter().map(|row| row.native).filter(|name| !name.is_empty()).collect();
    assert_eq!(names.len(), covered.len(), "{names:?}");
    assert!(names.iter().all(|name| covered.contains(name)), "{names:?}");
}

#[test]
fn no_name_stands_for_two_options() {
    for names in
        [OPTIONS.iter().map(|row| row.name).collect::<Vec<_>>(), OPTIONS.iter().map(|row| row.key).collect()]
    {
        let given: Vec<_> = names.into_iter().filter(|name| !name.is_empty()).collect();
        let distinct: HashSet<_> = given.iter().collect();
        assert!(given.len() >= 39 && distinct.len() == given.len());
    }
}

#[test]
fn wrong_values_are_refused_with_name_value_and_range() {
    let size =
        "must be a number of bytes above 0, or such a text with a unit: \"64MiB\" (KiB, MiB, GiB, TiB)";
    let seconds = "must be a number of seconds, 0.000001 to 1000000000";
    for (name, value, message) in [
        ("pool", Int(0), format!("pool=0 {size}")),
        ("pool", Int(-1), format!("pool=-1 {size}")),
        ("pool", Int(1 << 64), format!("pool=18446744073709551616 {size}")),
        ("pool", Float(65536.0), format!("pool=65536.0 {size}")),
        ("pool", Flag(true), format!("pool=true {size}")),
        ("host_pool", text("4 GiB"), format!("host_pool=\"4 GiB\" {size}")),
        ("pool", text("4gb"), format!("pool=\"4gb\" {size}")),
        ("pool", text("0MiB"), format!("pool=\"0MiB\" {size}")),
        ("pool", text("65536"), format!("pool=\"65536\" {size}")),
        ("pool", text("1.5GiB"), format!("pool=\"1.5GiB\" {size}")),
        ("timeout", Int(0), format!("timeout=0 {seconds}")),
        ("timeout", Float(-1.0), format!("timeout=-1.0 {seconds}")),
        ("timeout", Float(f64::NAN), format!("timeout=NaN {seconds}")),
        ("timeout", Float(f64::INFINITY), format!("timeout=inf {seconds}")),
        ("timeout", Float(1e300), format!("timeout=1e300 {seconds}")),
        ("timeout", text("1"), format!("timeout=\"1\" {seconds}")),
        ("timeout", Flag(true), format!("timeout=true {seconds}")),
        ("heartbeat", Int(0), "heartbeat=0 must be a number of seconds, 0.001 to 3600".into()),
        ("pin_limit", Int(86_401), "pin_limit=86401 must be a number of seconds, 0.001 to 86400".into()),
        ("transfer_poll", Float(0.02), "transfer_poll=0.02 must be a number of seconds, 0 to 0.01".into()),
        ("copy_workers", Int(257), "copy_workers=257 must be a whole number, 1 to 256".into()),
        ("copy_workers", Float(4.0), "copy_workers=4.0 must be a whole number, 1 to 256".into()),
        ("copy_workers", Flag(true), "copy_workers=true must be a whole number, 1 to 256".into()),
        ("streams", Int(17), "streams=17 must be a whole number, 0 to 16".into()),
        ("accept_remote", Int(1), "accept_remote=1 must be true or false".into()),
        ("transport", text("rdma"), "transport=\"rdma\" must be auto or shm or tcp".into()),
        ("transport", Int(1), "transport=1 must be a text".into()),
        ("backend", text("hixl"), "backend=\"hixl\" must be auto or sockets or ucx".into()),
        ("verify", text("on"), "verify=\"on\" must be off or sample or full".into()),
        ("token", Int(5), "token=(not shown) must be a text".into()),
    ] {
        assert_eq!(refused(with(name, value), &[]).to_string(), message);
    }
    for (name, value, facts) in [
        ("page", Int(3000), &["page=3000", "power of two from 1KiB to 1GiB"][..]),
        ("page", Int(0), &["page=0", "power of two"]),
        ("page", Int(512), &["page=512", "power of two"]),
        ("page", text("2GiB"), &["page=\"2GiB\"", "power of two"]),
        ("listen", text("node-a:1"), &["listen=\"node-a:1\"", "not a host name"]),
        ("addresses", text("10.0.0.1,"), &["addresses=", "separated by commas"]),
        ("ucx_library", text("libucp.so"), &["ucx_library=\"libucp.so\"", "absolute path"]),
        ("token", text("short"), &["token=(5 characters, not shown)", "at least 16"]),
        ("token_file", text(SECRET), &["token_file=(16 characters, not shown)", "absolute path"]),
    ] {
        let message = refused(with(name, value), facts).to_string();
        assert!(!message.contains(SECRET), "{message}");
    }
}

#[test]
fn rules_that_join_options() {
    refused(with("pool", Int(65_535)), &["pool=65535", "at least one page, 65536 bytes"]);
    refused(with("host_pool", text("1023TiB")), &["host_pool=", "fewer than 2^32-1 pages"]);
    let small = read(&[("page", text("1GiB")), ("pool", text("512MiB"))]);
    refused(small, &["pool=536870912", "at least one page, 1073741824 bytes"]);
    // A heartbeat raises the default of the silence limit. A given limit must be two heartbeats.
    assert_eq!(with("heartbeat", Int(4)).unwrap().links.silence, Duration::from_secs(8));
    let short = read(&[("silence", Float(7.5)), ("heartbeat", Int(4))]);
    refused(short, &["silence=7.5 must be at least two heartbeats, 8 seconds"]);
    let both = read(&[("token", text(SECRET)), ("token_file", text("/run/token"))]);
    refused(both, &["token and token_file are both given"]);
}

#[test]
fn unknown_names_are_refused_with_the_nearest_one() {
    for (name, meant) in [
        ("heartbeet", "did you mean \"heartbeat\"?"),
        ("Copy_Worker", "did you mean \"copy_workers\"?"),
        ("link_pin_limit", "did you mean \"pin_limit\"?"),
        ("transfer_poll_us", "did you mean \"transfer_poll\"?"),
        ("nothing_like_it", "llm-datadist options lists every option"),
        ("rank_port", "llm-datadist options lists every option"),
        ("", "llm-datadist options lists every option"),
    ] {
        refused(check_native_names([name]), &[&format!("there is no option {name:?}"), meant]);
        refused(read(&[("pool", Int(0)), (name, Int(1))]), &[meant]);
    }
    check_native_names(["pool", "timeout", "silence"]).unwrap();
}

#[test]
fn environment_variables_replace_options_that_are_not_given() {
    let read = |given: &[(&str, OptionValue)], set: &[(&str, &str)]| {
        let value = |name: &str| set.iter().find(|(of, _)| *of == name).map(|(_, text)| (*text).to_owned());
        config_from_values(given, &value)
    };
    let (file, token, accept) =
        ("LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_TOKEN", "LLM_DATADIST_ACCEPT_REMOTE");
    let links = read(&[], &[(token, SECRET), (file, ""), (accept, "1")]).unwrap().links;
    assert_eq!((links.token, links.token_file, links.accept_remote), (Some(Token::new(SECRET)), None, true));
    let links = read(&[], &[(file, "/run/token")]).unwrap().links;
    assert_eq!((links.token, links.token_file), (None, Some("/run/token".into())));
    // A given option wins, also over the variable of the other way to give a token.
    let given = [("token", text(SECRET)), ("accept_remote", Flag(false))];
    let links = read(&given, &[(file, "/run/token"), (token, ""), (accept, "1")]).unwrap().links;
    assert_eq!((links.token, links.token_file, links.accept_remote), (Some(Token::new(SECRET)), None, false));
    let transport = "LLM_DATADIST_TRANSPORT";
    for (given, chosen) in
        [(&[][..], TransportChoice::Tcp), (&[("transport", text("shm"))], TransportChoice::Shm)]
    {
        assert_eq!(read(given, &[(transport, "tcp")]).unwrap().links.transport, chosen);
    }
    refused(read(&[], &[(transport, "TCP")]), &["LLM_DATADIST_TRANSPORT=\"TCP\" must be auto or shm or tcp"]);
    assert!(!read(&[], &[(accept, "")]).unwrap().links.accept_remote);
    refused(read(&[], &[(accept, "yes")]), &["LLM_DATADIST_ACCEPT_REMOTE=\"yes\" must be 0 or 1"]);
    refused(read(&[], &[(token, "short")]), &["LLM_DATADIST_TOKEN=(5 characters, not shown)"]);
    refused(read(&[], &[(token, ""), (file, "")]), &["LLM_DATADIST_TOKEN_FILE is set, but empty"]);
    refused(read(&[], &[(token, SECRET), (file, "/run/token")]), &["are both set; unset one of them"]);
}
