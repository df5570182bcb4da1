//! Two processes: prefill lends blocks and sends their token, and decode pulls them.
//!
//! `cargo run -p llm-datadist-core --example prefill_decode` starts decode, which starts this program again as prefill.

use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use llm_datadist_core::{
    CacheForm, DataType, Deadline, Engine, Event, GrantToken, GrantUse, KvLayout, KvPlanes, PairExtras,
    Placement, TokenOrder, WhileRefused,
};
use rustix::event::{PollFd, PollFlags, poll};

type Failure = Box<dyn std::error::Error>;

/// A cache of 256 blocks, of which each holds 16 tokens of four layers.
fn form() -> Result<CacheForm, llm_datadist_core::Error> {
    let layout = KvLayout {
        tokens_per_block: 16,
        heads: 0..2,
        total_heads: 2,
        head_dim: 64,
        order: TokenOrder::Nhd,
        kv: KvPlanes::Separate,
        layers: 0..4,
        model: String::new(),
    };
    CacheForm::laid_out(&layout, DataType::Float16, 256, Placement::Device)
}

/// Waits for events, as an event loop does beside its other descriptors.
fn next_events(engine: &Engine) -> Result<Vec<Event>, Failure> {
    let descriptor = engine.event_queue()?.descriptor()?;
    poll(&mut [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)], None)?;
    Ok(engine.events(100)?)
}

fn prefill() -> Result<(), Failure> {
    let engine = Engine::builder().name("prefill").pool(64 << 20).listen("127.0.0.1:0").open()?;
    let kv = engine.allocate("kv", &form()?)?;
    // Where a model would compute blocks 3 and 4.
    let token = engine.lend(&kv.rows([3, 4]), Duration::from_secs(30), 1)?;
    writeln!(stdout(), "{}", engine.address()?.ok_or("it listens")?)?;
    loop {
        for event in next_events(&engine)? {
            match event {
                Event::LinkUp(peer) => engine.send(peer.cluster, token.to_bytes().to_vec())?,
                Event::GrantEnded(_, why) => {
                    writeln!(stdout(), "the grant has ended: {}", why.name())?;
                    // Serve until decode closes the pipe.
                    stdin().read_to_end(&mut Vec::new())?;
                    return Ok(());
                }
                _ => {}
            }
        }
    }
}

fn decode() -> Result<(), Failure> {
    let mut other = Command::new(std::env::current_exe()?)
        .arg("prefill")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(other.stdout.take().ok_or("a pipe")?).lines();
    let engine = Engine::builder().name("decode").pool(64 << 20).open()?;
    let kv = engine.allocate("kv", &form()?)?;
    let address = lines.next().ok_or("prefill has ended")??;
    let link = engine.link(&address, Some("prefill"), None, WhileRefused::Retry)?;
    link.join(Deadline::after(Duration::from_secs(10)))?;

    let mut pull = None;
    while pull.is_none() {
        for event in next_events(&engine)? {
            if let Event::Notification(message) = event {
                let token = GrantToken::from_bytes("payload", &message.payload)?;
                let remote = engine.peer_cache(message.peer.cluster, "kv")?;
                let grants = vec![Some(GrantUse { token, done: true })];
                let pairs = [(&kv.rows([20, 21]), &remote.rows([3, 4]))];
                pull = Some(engine.pull(&pairs, PairExtras { grants, ..PairExtras::default() })?);
            }
        }
    }
    let pull = pull.ok_or("a pull")?;
    pull.join(Deadline::after(Duration::from_secs(10)))?;
    writeln!(stdout(), "pulled {} bytes; {}", pull.progress().done, lines.next().ok_or("a line")??)?;
    drop(other.stdin.take());
    other.wait()?;
    engine.close(Duration::ZERO);
    Ok(())
}

fn main() -> Result<(), Failure> {
    if std::env::args().nth(1).as_deref() == Some("prefill") { prefill() } else { decode() }
}
