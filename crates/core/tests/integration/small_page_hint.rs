//! The hint about small pages: it is logged once if peers read registered memory slowly, and never otherwise.

use std::time::Duration;

use llm_datadist_core::bindings::{
    Config, DataDist, End, HugeChoice, Layers, Name, PeerAddress, PoolConfig, RemoteName, Role, Rows,
};
use llm_datadist_core::testing::config::Token;
use llm_datadist_core::testing::huge_pages::SmallPageHint;
use llm_datadist_core::testing::memory::Region;
use llm_datadist_core::{CacheId, CacheKind, ClusterId, Placement};
use tracing::Level;

use crate::child_process::{self, report};
use crate::emulation::{PAGE_SIZES, PROCESS_READS};
use crate::fixtures::{EventLog, adopt, desc};
use crate::huge_pages::CHOICES;
use crate::registered_pages::Pages;

const UNIT: usize = Region::UNIT_BYTES as usize;
const LONG: Duration = Duration::from_secs(20);

fn log() -> EventLog {
    EventLog::new("llm_datadist::huge_pages")
}

/// Units of registered memory in small pages, whatever this system prefers.
fn small(units: usize) -> Pages {
    let pages = Pages::new(units);
    pages.advise(libc::MADV_NOHUGEPAGE);
    pages
}

#[test]
fn one_hint_is_given_where_registered_memory_lies_in_small_pages() {
    if PAGE_SIZES.skips() {
        return;
    }
    let heard = log();
    let _on_this_thread = tracing::subscriber::set_default(heard.clone());
    let hint = SmallPageHint::default();
    let (pages, other) = (small(4), small(2));
    let tell =
        |hint: &SmallPageHint, id, pages: &Pages| hint.described_to_peer(CacheId(id), &pages.tensors());
    tell(&hint, 7, &pages);
    assert_eq!(heard.lines(), [], "no page is there yet");
    pages.write(0, 4 * UNIT);
    other.write(0, 2 * UNIT);
    tell(&hint, 7, &pages);
    let lines = heard.lines();
    let [(level, text)] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!(*level, Level::WARN);
    assert!(text.contains("cache 7") && text.contains("huge_pages=\"eager\""), "{text}");
    tell(&hint, 7, &pages);
    tell(&hint, 8, &other);
    assert_eq!(heard.lines().len(), 1, "once");
    // Each engine has a hint of its own.
    tell(&SmallPageHint::default(), 7, &pages);
    assert_eq!(heard.lines().len(), 2);
}

/// An engine of a cluster and its listener.
fn engine(cluster: u64, choice: HugeChoice) -> DataDist {
    let mut config = Config::new(Role::Mix, ClusterId(cluster));
    config.device_pool = Some(PoolConfig { memory_size: 16 << 20, page_shift: 16 });
    (config.sync_timeout, config.huge_pages) = (LONG, choice);
    config.remote_accessible = true;
    config.links.listen = Some(([127, 0, 0, 1], 0).into());
    config.links.token = Some(Token::new("a token of the tests"));
    DataDist::open(config).unwrap()
}

/// Reports, for each choice, what the owner logs when a peer pulls registered memory in small pages by process id.
#[test]
#[ignore = "started by the test below"]
fn hints() {
    if child_process::role().is_none() {
        return;
    }
    let heard = log();
    tracing::subscriber::set_global_default(heard.clone()).unwrap();
    for choice in CHOICES {
        let before = heard.lines().len();
        let pages = small(4);
        pages.write(0, 4 * UNIT);
        let (local, remote) = (engine(1, HugeChoice::Off), engine(2, choice));
        let spec = desc(Placement::Device, 1, 4, UNIT);
        let adopted = adopt(&spec, CacheKind::Blocks, &[pages.at() as u64]);
        let source = remote.register(adopted, &[], Some(true)).unwrap();
        let to = local.allocate(&spec, CacheKind::Blocks, &[]).unwrap();
        let listening = vec![remote.listening().unwrap()];
        let peer = PeerAddress { cluster: ClusterId(2), remote: listening, local: vec![] };
        local.link_clusters(&[peer], LONG).remove(0).unwrap();
        let from = RemoteName { cluster: ClusterId(2), name: Name::Row { cache: source.id(), row: 0 } };
        let rows = Rows::Blocks { remote: vec![0, 1, 2, 3], local: vec![3, 2, 1, 0] };
        for _ in 0..2 {
            local.pull(from, &End::Managed(to.id()), rows.clone(), Layers::ALL).run().unwrap();
        }
        report(heard.lines().len() - before);
    }
}

#[test]
fn an_engine_hints_where_it_leaves_registered_memory_alone() {
    if !PAGE_SIZES.skips() && !PROCESS_READS.skips() {
        // Auto, off, eager.
        assert_eq!(child_process::run("small_page_hint::hints", "owner"), ["1", "0", "0"]);
    }
}
