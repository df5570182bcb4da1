//! The rank table of `link()`: who is a member, and where every end is looked for, in the shapes clients send.
//!
//! Not for: links, or which of the addresses answers. A fuzz target tries any other text.

use std::net::SocketAddr;

use llm_datadist_core::testing::config::LinkConfig;
use llm_datadist_core::testing::validate::rank_table::{RankMember, members, resolve};
use llm_datadist_core::{ClusterId, Result};

use crate::arguments::refused;

const TWO: [(ClusterId, u32); 2] = [(ClusterId(5), 0), (ClusterId(21), 1)];

fn read(text: &str) -> Result<Vec<RankMember>> {
    resolve(text, &TWO, TWO[0].0, &LinkConfig::default())
}

/// First address, rule and listening address of both ends.
fn found(text: &str) -> Vec<(String, &'static str, String)> {
    let ends = read(text).unwrap();
    assert_eq!(ends.iter().map(|end| (end.cluster, end.rank)).collect::<Vec<_>>(), TWO);
    ends.iter().map(|end| (end.host[0].to_string(), end.why, end.bind.to_string())).collect()
}

fn one(at: &str, why: &'static str, bind: &str) -> (String, &'static str, String) {
    (at.to_owned(), why, bind.to_owned())
}

#[test]
fn members_of_a_communicator() {
    let ids = |list: &[(u64, u32)]| -> Vec<(ClusterId, u32)> {
        list.iter().map(|&(id, rank)| (ClusterId(id), rank)).collect()
    };
    let ask = |name: &str, list: &[(u64, u32)], own| members(name, &ids(list), ClusterId(own));
    ask("c", &[(u64::MAX, 0), (0, u32::MAX)], 0).unwrap();
    ask(&"通".repeat(127), &[(4, 1), (3, 3), (2, 7), (1, 8)], 3).unwrap();
    let rules: &[(&str, &[(u64, u32)], u64, &[&str])] = &[
        ("", &[(1, 0)], 9, &["len(comm_name)=0", "1 to 127"]),
        (&"x".repeat(128), &[(1, 0), (2, 1)], 1, &["len(comm_name)=128"]),
        ("c", &[], 1, &["len(cluster_rank_info)=0", "2 to 4"]),
        ("c", &[(1, 0)], 1, &["len(cluster_rank_info)=1"]),
        ("c", &[(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)], 1, &["len(cluster_rank_info)=5"]),
        ("c", &[(1, 1), (2, 0)], 1, &["ranks [1, 0]", "ascending"]),
        ("c", &[(1, 1), (2, 1)], 1, &["ranks [1, 1]", "ascending"]),
        ("c", &[(1, 0), (1, 1)], 1, &["cluster 1 twice"]),
        ("c", &[(1, 0), (2, 1)], 3, &["clusters [1, 2]", "this one, 3"]),
    ];
    for (name, list, own, facts) in rules {
        refused(ask(name, list, *own), facts);
    }
}

/// vllm-ascend: server ids are host addresses, numbers are texts, the local device is not always first.
#[test]
fn a_table_of_two_hosts() {
    let table = r#"{"version": "1.2", "server_count": "2", "status": "completed", "server_list": [
        {"server_id": "192.0.2.8", "device": [
            {"device_id": "3", "device_ip": "198.51.100.8", "rank_id": "1", "super_device_id": "77"}]},
        {"server_id": "192.0.2.7", "device": [{"device_id": "0", "device_ip": "198.51.100.7", "rank_id": "0"}]}],
        "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "192.0.2.7"}]}]}"#;
    let expected = [
        one("192.0.2.7:16666", "server_id", "192.0.2.7:16666"),
        one("192.0.2.8:16669", "server_id", "192.0.2.8:16669"),
    ];
    assert_eq!(found(table), expected);
    // The port, then eight above it.
    let ports: Vec<u16> = read(table).unwrap()[1].host.iter().map(SocketAddr::port).collect();
    assert_eq!(ports, (16_669..=16_677).collect::<Vec<_>>());
    // The same with numbers where texts were.
    let numbers = table.replace(r#""1""#, "1").replace(r#""0""#, "0").replace(r#""3""#, "3");
    assert!(numbers.contains(r#""rank_id": 1,"#));
    assert_eq!(found(&numbers), expected);
}

/// `MindIE`: one server called "1", which a lenient reader takes for 0.0.0.1; the local device first.
#[test]
fn a_table_of_one_server() {
    let table = |count: &str, server: &str| {
        format!(
            r#"{{"server_count": "{count}", "server_list": [{{"server_id": "{server}", "device": [
                {{"device_id": "6", "device_ip": "198.51.100.2", "rank_id": "1"}},
                {{"device_id": "2", "device_ip": "198.51.100.1", "rank_id": "0"}}]}}]}}"#
        )
    };
    let why = "all ends are on one server";
    let loopback =
        [one("127.0.0.1:16668", why, "127.0.0.1:16668"), one("127.0.0.1:16672", why, "127.0.0.1:16672")];
    assert_eq!(found(&table("1", "1")), loopback);
    assert_eq!(found(&table("2", "1")), loopback);
    assert_eq!(found(&table("1", "")), loopback);
    assert_eq!(found(&table("1", "0.0.0.256")), loopback);
    assert_eq!(found(&table("1", "010.0.0.1")), loopback);
    assert_eq!(found(&table("1", "192.0.2.1"))[0].1, "server_id");
    assert_eq!(found(&table("1", "2001:db8::7"))[0].0, "[2001:db8::7]:16668");
}

/// Issue 2399 of vllm-ascend: "2" servers, which are the same one.
#[test]
fn the_same_server_twice() {
    let table = |first: &str, second: &str| {
        format!(
            r#"{{"server_count": "2", "server_list": [
                {{"server_id": "{first}", "device": [{{"device_id": "0", "device_ip": "198.51.100.1", "rank_id": "0"}}]}},
                {{"server_id": "{second}", "device": [{{"device_id": "1", "device_ip": "198.51.100.2", "rank_id": "1"}}]}}]}}"#
        )
    };
    assert_eq!(found(&table("node-a", "node-a"))[1].0, "127.0.0.1:16667");
    assert_eq!(found(&table("192.0.2.1", "192.0.2.1"))[1].0, "192.0.2.1:16667");
    // Two names that are not addresses: only the device's address is left, and there is no address to bind to.
    let apart = found(&table("node-a", "node-b"));
    assert_eq!(apart[0], one("198.51.100.1:16666", "device_ip", "0.0.0.0:16666"));
    assert_eq!(apart[1], one("198.51.100.2:16667", "device_ip", "0.0.0.0:16667"));
    let unnamed = found(&table("", ""));
    assert_eq!(unnamed[0].1, "device_ip");
}

#[test]
fn what_outranks_what() {
    let table = r#"{"server_count": "2", "server_list": [
        {"server_id": "192.0.2.1", "host_ip": "203.0.113.1", "device":
            [{"device_id": "0", "device_ip": "198.51.100.1", "device_port": "700", "rank_id": "0"}]},
        {"server_id": "192.0.2.2", "device":
            [{"device_id": "1", "device_ip": "2001:db8::2", "device_port": 65534, "rank_id": "1"}]}]}"#;
    assert_eq!(found(table)[0], one("203.0.113.1:700", "host_ip", "203.0.113.1:700"));
    assert_eq!(found(table)[1].0, "192.0.2.2:65534");
    // No port above the last one.
    assert_eq!(read(table).unwrap()[1].host.len(), 2);
    let mut links = LinkConfig { rank_port: 100, ..LinkConfig::default() };
    let mut host = |name: &str, at: &str| links.rank_hosts.insert(name.to_owned(), at.parse().unwrap());
    host("5", "203.0.113.5:1");
    host("21", "203.0.113.21:2");
    host("2001:db8::2", "[2001:db8::9]:3");
    let resolved = |table: &str| resolve(table, &TWO, TWO[1].0, &links);
    let both = resolved(table).unwrap();
    let expected: [SocketAddr; 2] = ["203.0.113.5:1".parse().unwrap(), "[2001:db8::9]:3".parse().unwrap()];
    assert_eq!((both[0].host.as_slice(), both[1].host.as_slice()), (&expected[..1], &expected[1..]));
    assert_eq!((both[0].why, both[1].why), ("rank_hosts has its cluster id", "rank_hosts has its device_ip"));
    // An address that stands for another host need not belong to this host.
    assert_eq!((both[0].bind.to_string(), both[1].bind.to_string()), ("0.0.0.0:1".into(), "[::]:3".into()));
    // With overrides, the table may be empty.
    assert_eq!(resolved("{}").unwrap()[1].host[0].to_string(), "203.0.113.21:2");
}

#[test]
fn tables_with_little_in_them() {
    let why = "all ends are on one server";
    let local =
        [one("127.0.0.1:16666", why, "127.0.0.1:16666"), one("127.0.0.1:16667", why, "127.0.0.1:16667")];
    for table in [
        r#"{"server_count": "1", "server_list": [{"device": [{}]}]}"#,
        r#"{"server_list": [{"device": [{}], "server_id": "1"}]}"#,
        r#"{"server_list": [{"device": [{}, {}]}]}"#,
        r#"{"server_list": [{}]}"#,
        r#"{"server_count": 1}"#,
        r#"{"server_count": "1", "server_list": null, "more": {"a": [1, 2]}}"#,
    ] {
        assert_eq!(found(table), local, "{table}");
    }
    // Devices without a rank belong to no member; their position in the list is not used.
    let nobody = r#"{"server_list": [{"server_id": "192.0.2.1", "device": [{}]}, {"server_id": "192.0.2.2", "device": [{}]}]}"#;
    refused(read(nobody), &["no address for rank 0", "cluster 5"]);
    let server = r#"{"server_list": [{"server_id": "192.0.2.1", "device": [{"device_id": "9"}]}]}"#;
    assert_eq!(found(server)[1], one("192.0.2.1:16667", "server_id", "192.0.2.1:16667"));
}

#[test]
fn unusable_tables() {
    for (table, facts) in [
        ("", &["not JSON", "text="][..]),
        ("rank table", &["not JSON", "text=rank table"]),
        ("[]", &["not a JSON object", "text=[]"]),
        (r#"{"server_list": 7}"#, &["rank_table.server_list=7", "a list of objects"]),
        (r#"{"server_list": ["x"]}"#, &["rank_table.server_list", "x"]),
        (r#"{"server_list": [{"device": {}}]}"#, &["rank_table.device={}"]),
        (r#"{"server_list": [{"device": [{"rank_id": "first"}]}]}"#, &["rank_table.rank_id=first"]),
        (r#"{"server_list": [{"device": [{"device_id": "-1"}]}]}"#, &["rank_table.device_id=-1"]),
        (r#"{"server_list": [{"device": [{"device_id": 1.5}]}]}"#, &["rank_table.device_id=1.5"]),
        (
            r#"{"server_count": "1", "server_list": [{"device": [{"rank_id": "0", "device_id": "65535"}]}]}"#,
            &["port=82201 is out of range", "device_id 65535"],
        ),
        (
            r#"{"server_count": "1", "server_list": [{"device": [{"rank_id": "0", "device_port": "0"}]}]}"#,
            &["port=0 is out of range"],
        ),
        (r#"{"server_list": [{"device": [{"rank_id": "0"}, {"rank_id": 0}]}]}"#, &["rank_id 0 twice"]),
        (
            r#"{"server_count": "2", "server_list": [{"server_id": "a", "device": [{"rank_id": "0", "device_ip": "x"}]},
                {"server_id": "b", "device": [{"rank_id": "1", "device_ip": "198.51.100.2"}]}]}"#,
            &[
                "no address for rank 0 (cluster 5)",
                "server_id a",
                "device_ip x",
                "server_id b",
                "198.51.100.2",
            ],
        ),
        ("{}", &["no address for rank 0", "server_id missing"]),
    ] {
        refused(read(table), facts);
    }
    let deep = "[".repeat(100_000);
    refused(read(&deep), &["not JSON"]);
    assert!(read(&deep).unwrap_err().to_string().len() < 1000);
    refused(resolve("{}", &TWO, ClusterId(6), &LinkConfig::default()), &["cluster 6 is no member"]);
}
