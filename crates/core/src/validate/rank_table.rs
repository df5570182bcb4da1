//! Reads the rank table of `link()`: the address of each member of a communicator, and the rule that
//! determined it. The rules are lenient, to accept the tables that clients send: numbers may be strings,
//! unknown fields are ignored, and missing fields have substitutes. Host names are not resolved.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde_json::{Map, Value};

use super::json::json;
use super::values::{clipped, decimal, ip_address};
use crate::config::LinkConfig;
use crate::error::{Error, Result, ensure};
use crate::model::ClusterId;

/// Maximum number of members of a communicator.
const MEMBERS: usize = 4;
/// Number of ports after the first on which a member may listen if that one is in use.
const MORE_PORTS: u16 = 8;

/// One member of a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMember {
    /// Cluster id of the member.
    pub cluster: ClusterId,
    /// Rank of the member.
    pub rank: u32,
    /// Addresses on which the member may listen, best first: one IP address, with each port that it may use.
    pub host: Vec<SocketAddr>,
    /// The rule that determined the address.
    pub why: &'static str,
    /// Address to which the member binds its own listener: the host's address if the table has it, else any
    /// address.
    pub bind: SocketAddr,
    /// What the table itself states about the member, without the local configuration. Equal in both
    /// processes.
    pub description: String,
    /// Whether the address is from the local configuration instead of the table.
    pub configured: bool,
}

/// Checks that the name of a communicator has 1 to 127 characters.
pub fn comm_name(name: &str) -> Result<()> {
    let characters = name.chars().count();
    ensure((1..128).contains(&characters), || Error::out_of_range("len(comm_name)", characters, "1 to 127"))
}

/// Checks that a communicator has at most 4 members.
pub fn max_members(count: usize) -> Result<()> {
    ensure(count <= MEMBERS, || Error::out_of_range("len(cluster_rank_info)", count, "2 to 4 clusters"))
}

/// Checks the other arguments of `link()` (contract §6.5).
pub fn members(name: &str, clusters: &[(ClusterId, u32)], own: ClusterId) -> Result<()> {
    comm_name(name)?;
    max_members(clusters.len())?;
    if clusters.len() < 2 {
        return Err(Error::out_of_range("len(cluster_rank_info)", clusters.len(), "2 to 4 clusters"));
    }
    let invalid = |why: String| {
        Error::invalid(format!("cluster_rank_info is invalid: {why}")).of_argument("cluster_rank_info")
    };
    for two in clusters.windows(2) {
        if two[0].1 >= two[1].1 {
            let ranks: Vec<_> = clusters.iter().map(|&(_, rank)| rank).collect();
            return Err(invalid(format!("its ranks {ranks:?} must be ascending")));
        }
    }
    let ids: Vec<_> = clusters.iter().map(|&(id, _)| id.0).collect();
    if let Some(twice) = ids.iter().enumerate().find_map(|(at, id)| ids[..at].contains(id).then_some(id)) {
        return Err(invalid(format!("it names cluster {twice} twice")));
    }
    if !ids.contains(&own.0) {
        return Err(invalid(format!("its clusters {ids:?} must include this one, {own}")));
    }
    Ok(())
}

/// Returns the members of a communicator in the order of `clusters`, one of which must be `own`.
/// `Err(InvalidArgument)` if the table is invalid or gives no address for a member.
pub fn resolve(
    rank_table: &str,
    clusters: &[(ClusterId, u32)],
    own: ClusterId,
    links: &LinkConfig,
) -> Result<Vec<RankMember>> {
    if !clusters.iter().any(|&(cluster, _)| cluster == own) {
        return Err(Error::invalid(format!("cluster {own} is no member of the communicator")));
    }
    let table = RankTable::read(rank_table)?;
    let entries: Vec<RankEntry> =
        clusters.iter().map(|&(_, rank)| table.entry(rank)).collect::<Result<_>>()?;
    let together = table.one_server || one_server(&entries);
    let resolved = |(&(cluster, rank), entry): (&(ClusterId, u32), &RankEntry)| {
        let member = Member { cluster, rank, entry, together };
        member.resolve(links).map_err(|error| error.with("read", read(clusters, &entries)))
    };
    clusters.iter().zip(&entries).map(resolved).collect()
}

/// The fields of the table for one rank. Strings are never empty.
#[derive(Clone, Debug, Default)]
struct RankEntry {
    /// Position of the server in the list, for comparison only.
    server: Option<usize>,
    server_id: Option<String>,
    host_ip: Option<String>,
    device_ip: Option<String>,
    device_id: Option<u64>,
    device_port: Option<u64>,
    rank: Option<u64>,
}

struct RankTable {
    /// One entry for each device, and one for each server without devices.
    entries: Vec<RankEntry>,
    one_server: bool,
    servers: usize,
    shown: String,
}

impl RankTable {
    fn read(text: &str) -> Result<RankTable> {
        let shown = clipped(text);
        let invalid = |reason: &str| {
            Error::invalid(format!("rank_table {reason}")).of_argument("rank_table").with("text", &shown)
        };
        let table: Value = json(text).map_err(|error| invalid("is not JSON").because(error))?;
        let Value::Object(table) = table else { return Err(invalid("is not a JSON object")) };
        let servers = list(&table, "server_list").map_err(|error| error.with("text", &shown))?;
        let mut entries = Vec::new();
        for (server, fields) in servers.iter().enumerate() {
            let entry = RankEntry {
                server: Some(server),
                server_id: text_field(fields, "server_id"),
                host_ip: text_field(fields, "host_ip"),
                ..RankEntry::default()
            };
            let devices = list(fields, "device").map_err(|error| error.with("text", &shown))?;
            for device in &devices {
                let number = |name| number_field(device, name).map_err(|error| error.with("text", &shown));
                entries.push(RankEntry {
                    host_ip: text_field(device, "host_ip").or_else(|| entry.host_ip.clone()),
                    device_ip: text_field(device, "device_ip"),
                    device_id: number("device_id")?,
                    device_port: number("device_port")?,
                    rank: number("rank_id")?,
                    ..entry.clone()
                });
            }
            if devices.is_empty() {
                entries.push(entry);
            }
        }
        let one_server = text_field(&table, "server_count").as_deref() == Some("1");
        Ok(RankTable { entries, one_server, servers: servers.len(), shown })
    }

    /// Returns the entry of the device with this rank. If there is none and the table has one server, returns
    /// the fields that hold for all its devices. Positions in the list are not used.
    fn entry(&self, rank: u32) -> Result<RankEntry> {
        let mut of_rank = self.entries.iter().filter(|entry| entry.rank == Some(u64::from(rank)));
        let found = of_rank.next();
        if of_rank.next().is_some() {
            let text = format!("rank_table names rank_id {rank} twice");
            return Err(Error::invalid(text).of_argument("rank_table").with("text", &self.shown));
        }
        let only = || self.entries.first().filter(|_| self.servers == 1);
        let server = || {
            only().map(|entry| RankEntry {
                server: entry.server,
                server_id: entry.server_id.clone(),
                ..RankEntry::default()
            })
        };
        Ok(found.cloned().or_else(server).unwrap_or_default())
    }
}

/// Returns whether all members are on one server: in the same entry of the list, or in entries with the same
/// id.
fn one_server(entries: &[RankEntry]) -> bool {
    let same = |a: &RankEntry, b: &RankEntry| {
        (a.server.is_some() && a.server == b.server) || (a.server_id.is_some() && a.server_id == b.server_id)
    };
    entries.windows(2).all(|two| same(&two[0], &two[1]))
}

/// One member, and what is known about it.
struct Member<'a> {
    cluster: ClusterId,
    rank: u32,
    entry: &'a RankEntry,
    /// Whether all members are on one server.
    together: bool,
}

impl Member<'_> {
    fn resolve(&self, links: &LinkConfig) -> Result<RankMember> {
        let Member { cluster, rank, .. } = *self;
        if let Some((at, why)) = self.configured(links) {
            let bind = SocketAddr::new(any(at.ip()), at.port());
            return Ok(RankMember {
                cluster,
                rank,
                host: vec![at],
                why,
                bind,
                description: self.description(),
                configured: true,
            });
        }
        let (ip, why) = self.address()?;
        let first = self.port(links)?;
        let last = first.saturating_add(MORE_PORTS);
        let host = (first..=last).map(|port| SocketAddr::new(ip, port)).collect();
        // A device has addresses of its own, to which its host cannot bind.
        let bind = if why == DEVICE_IP { any(ip) } else { ip };
        Ok(RankMember {
            cluster,
            rank,
            host,
            why,
            bind: SocketAddr::new(bind, first),
            description: self.description(),
            configured: false,
        })
    }

    /// Describes the member by its own entry only, without the other entries and the local options. A server
    /// id that is not an IP address is left out: it may be a number that each process counts for itself.
    fn description(&self) -> String {
        let RankEntry { server_id, host_ip, device_ip, device_id, device_port, .. } = self.entry;
        let ip = |text: &Option<String>| text.as_deref().and_then(ip_address);
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let host = or_none(ip(host_ip).or_else(|| ip(server_id)).map(|ip| ip.to_string()));
        let device = or_none(device_id.map(|id| id.to_string()));
        let ip = or_none(ip(device_ip).map(|ip| ip.to_string()));
        let port = or_none(device_port.map(|port| port.to_string()));
        format!("host {host} device {device} {ip} port {port}")
    }

    /// Returns the address that the local configuration gives for this member.
    fn configured(&self, links: &LinkConfig) -> Option<(SocketAddr, &'static str)> {
        let by_device = self.entry.device_ip.as_ref().and_then(|ip| links.rank_hosts.get(ip));
        let by_cluster = || links.rank_hosts.get(&self.cluster.to_string());
        let by_device = by_device.map(|&at| (at, "rank_hosts has its device_ip"));
        by_device.or_else(|| by_cluster().map(|&at| (at, "rank_hosts has its cluster id")))
    }

    fn address(&self) -> Result<(IpAddr, &'static str)> {
        let ip = |text: &Option<String>| text.as_deref().and_then(ip_address);
        let loopback = || self.together.then_some((Ipv4Addr::LOCALHOST.into(), "all ends are on one server"));
        let host_ip = ip(&self.entry.host_ip).map(|ip| (ip, "host_ip"));
        let server_id = || ip(&self.entry.server_id).map(|ip| (ip, "server_id"));
        let device_ip = || ip(&self.entry.device_ip).map(|ip| (ip, DEVICE_IP));
        host_ip.or_else(server_id).or_else(loopback).or_else(device_ip).ok_or_else(|| {
            let text = format!(
                "rank_table gives no address for rank {} (cluster {}): no host_ip, no server_id or device_ip that is \
                 an IP address, more than one server, and no entry in rank_hosts",
                self.rank, self.cluster
            );
            Error::invalid(text)
        })
    }

    /// Returns `device_port`, else the port of device 0 plus the device number. The rank replaces a missing
    /// device number.
    fn port(&self, links: &LinkConfig) -> Result<u16> {
        let computed = || {
            let device = self.entry.device_id.unwrap_or(u64::from(self.rank));
            u64::from(links.rank_port).saturating_add(device)
        };
        let port = self.entry.device_port.unwrap_or_else(computed);
        u16::try_from(port).ok().filter(|&port| port > 0).ok_or_else(|| {
            let range = "1 to 65535; it is device_port, or rank_port + device_id";
            Error::out_of_range("port", port, range).with("rank", self.rank)
        })
    }
}

const DEVICE_IP: &str = "device_ip";

/// Returns the unspecified address of the same family.
pub(crate) fn any(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Returns what the table contains for each member, for error messages.
fn read(clusters: &[(ClusterId, u32)], entries: &[RankEntry]) -> String {
    let mut text = String::new();
    for ((cluster, rank), entry) in clusters.iter().zip(entries) {
        let text_field = |text: &Option<String>| text.as_deref().map_or_else(|| "missing".into(), clipped);
        let (server, host) = (text_field(&entry.server_id), text_field(&entry.host_ip));
        let (device, ip) =
            (entry.device_id.map_or("missing".into(), |id| id.to_string()), text_field(&entry.device_ip));
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "{}rank {rank} (cluster {cluster}): server_id {server}, host_ip {host}, device_id {device}, device_ip {ip}",
            if text.is_empty() { "" } else { "; " }
        );
    }
    text
}

/// Returns a list of objects; an empty list if the field is missing.
fn list<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<Vec<&'a Map<String, Value>>> {
    let refused = |value: &Value| {
        Error::argument(&format!("rank_table.{name}"), clipped(&value.to_string()), "a list of objects")
    };
    match fields.get(name) {
        None | Some(Value::Null) => Ok(vec![]),
        Some(Value::Array(list)) => {
            list.iter().map(|entry| entry.as_object().ok_or_else(|| refused(entry))).collect()
        }
        Some(other) => Err(refused(other)),
    }
}

/// Returns a string or number as text; `None` if it is missing, empty or of another type.
fn text_field(fields: &Map<String, Value>, name: &str) -> Option<String> {
    match fields.get(name)? {
        Value::String(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Returns a whole number, which may be given as a string; `None` if it is missing or empty.
fn number_field(fields: &Map<String, Value>, name: &str) -> Result<Option<u64>> {
    let Some(text) = text_field(fields, name) else { return Ok(None) };
    let refused = || Error::argument(&format!("rank_table.{name}"), clipped(&text), "a whole number");
    decimal(&text).map(Some).ok_or_else(refused)
}
