//! Many engines that pull from one owner, and link again after it has died and restarted.
//!
//! Not for: one engine with many links (`links`).

use std::fmt;
use std::str::FromStr;
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{DataDist, Layers, PeerAddress, Rows};
use llm_datadist_core::{ErrorKind, Placement};

use crate::Options;
use crate::curve::{Curve, Report};
use crate::remote::RemoteCache;
use crate::setup::{Blocks, OWNER, Shuffle, address, config, nanos, on_cpu, shared};

/// The cache from which all engines pull, and the number of blocks of one pull.
const ROWS: u64 = 4096;
const BYTES: u64 = 16 << 10;
const TAKEN: u64 = 64;
/// Pause after a failed link, as in a client that retries.
const REST: Duration = Duration::from_millis(10);
/// Cluster of the first engine of a crowd.
const FIRST: u64 = 1000;

struct Decoder {
    engine: DataDist,
    local: Blocks,
}

/// Engines that have no listener, each with room for one pull.
#[derive(Default)]
pub struct Crowd {
    decoders: Vec<Decoder>,
}

/// How a crowd was linked: milliseconds until the last and the median engine, and failed attempts.
#[derive(Debug)]
pub struct Linked {
    last: f64,
    median: f64,
    failed: u64,
}

/// What a crowd pulled at once.
#[derive(Debug)]
pub struct Pulled {
    seconds: f64,
    bytes: u64,
    /// Milliseconds of a pull.
    mean: f64,
    p99: f64,
    /// Seconds of CPU.
    cpu: f64,
}

impl Crowd {
    pub fn grow(&mut self, transport: &str, count: u64) {
        for index in self.decoders.len() as u64..count {
            let mut config = config(FIRST + index, transport, 2, 12);
            config.links.listen = None;
            config.copy_workers = Some(1);
            let engine = DataDist::open(config).unwrap();
            let local = Blocks::new(&engine, TAKEN, BYTES, Placement::Device, None);
            local.poison();
            self.decoders.push(Decoder { engine, local });
        }
    }

    /// Links every engine, all at once and repeatedly until it succeeds. `during` runs meanwhile, and returns
    /// since when linking can succeed.
    pub fn link(&self, peer: &PeerAddress, during: impl FnOnce() -> Instant) -> Linked {
        let ready = Barrier::new(self.decoders.len() + 1);
        let (mut ends, mut failures) = (Vec::new(), Vec::new());
        let work = |decoder: &Decoder| {
            ready.wait();
            decoder.link(peer)
        };
        let work = &work;
        let since = std::thread::scope(|scope| {
            let threads: Vec<_> =
                self.decoders.iter().map(|decoder| scope.spawn(move || work(decoder))).collect();
            ready.wait();
            let since = during();
            for thread in threads {
                let (end, failed) = thread.join().unwrap();
                ends.push(end.saturating_duration_since(since).as_secs_f64() * 1e3);
                failures.extend(failed);
            }
            since
        });
        ends.sort_by(f64::total_cmp);
        let failed = failures.iter().filter(|&&at| at > since).count() as u64;
        Linked { last: ends[ends.len() - 1], median: ends[ends.len() / 2], failed }
    }

    /// Every engine pulls continuously for `time`.
    pub fn pull(&self, time: Duration) -> Pulled {
        let (ready, until) = (Barrier::new(self.decoders.len() + 1), OnceLock::new());
        let before = on_cpu();
        let work = |index: usize, decoder: &Decoder| {
            ready.wait();
            // All engines stop at the same time. One that starts late, because there are few cores, pulls
            // once.
            decoder.pull_until(&mut Shuffle(index as u64 + 1), *until.wait())
        };
        let work = &work;
        let mut started = Instant::now();
        let pulled: Vec<(Vec<f64>, Vec<i64>)> = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .decoders
                .iter()
                .enumerate()
                .map(|(index, one)| scope.spawn(move || work(index, one)))
                .collect();
            ready.wait();
            started = Instant::now();
            until.get_or_init(|| started + time);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (seconds, cpu) = (started.elapsed().as_secs_f64(), (on_cpu() - before) as f64 / 1e9);
        for (decoder, (_, from)) in self.decoders.iter().zip(&pulled) {
            decoder.local.verify(from, &(0..TAKEN as i64).collect::<Vec<_>>());
        }
        let mut times: Vec<f64> = pulled.into_iter().flat_map(|(times, _)| times).collect();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[(times.len() as f64 * share) as usize] / 1e6;
        Pulled {
            seconds,
            bytes: times.len() as u64 * TAKEN * BYTES,
            mean: times.iter().sum::<f64>() / times.len() as f64 / 1e6,
            p99: at(0.99),
            cpu,
        }
    }

    /// Whether no engine has a link.
    fn alone(&self) -> bool {
        self.decoders.iter().all(|decoder| decoder.engine.stats().links.is_empty())
    }
}

impl Decoder {
    /// Returns when the engine was linked, and the times of failed attempts.
    fn link(&self, peer: &PeerAddress) -> (Instant, Vec<Instant>) {
        let mut failed = Vec::new();
        loop {
            let linked =
                self.engine.link_clusters(std::slice::from_ref(peer), Duration::from_secs(5)).remove(0);
            match linked {
                Ok(()) => return (Instant::now(), failed),
                Err(error) if error.kind() == ErrorKind::AlreadyLinked => {
                    return (Instant::now(), failed);
                }
                Err(error) => {
                    failed.push(Instant::now());
                    assert!(failed.len() < 6000, "no link after a minute: {error}");
                    std::thread::sleep(REST);
                }
            }
        }
    }

    /// Nanoseconds of each pull, and what the last one pulled.
    fn pull_until(&self, shuffle: &mut Shuffle, until: Instant) -> (Vec<f64>, Vec<i64>) {
        let (mut times, to) = (Vec::new(), (0..TAKEN as i64).collect::<Vec<_>>());
        let mut from;
        loop {
            from = (0..TAKEN).map(|_| (shuffle.next() % ROWS) as i64).collect::<Vec<_>>();
            let rows = Rows::Blocks { remote: from.clone(), local: to.clone() };
            times.push(nanos(|| {
                self.engine.pull(shared(), &self.local.end, rows, Layers::ALL).run().unwrap();
            }));
            if Instant::now() >= until {
                break;
            }
        }
        (times, from)
    }
}

/// Crowds in another process pull from an engine of this process.
pub fn fan(options: &Options, report: &mut Report) {
    for transport in ["shm", "tcp"] {
        let name = |what: &str| format!("{what}, {transport}");
        let new = |what: &str, unit, note| Curve::new(name(what), unit, "engines that pull from one", note);
        let note = "64 blocks of 16 KiB a pull, out of 64 MiB; all engines at once, without a pause";
        let mut speed = new("bytes pulled from one engine", "GB/s", note);
        let (mut mean, mut p99) =
            (new("one pull of 1 MiB, mean", "ms", note), new("one pull of 1 MiB, p99", "ms", note));
        let mut served = new("CPU of the owner", "s/GB", "");
        let mut used = new("CPU of those that pull", "s/GB", "");
        let mut linking =
            new("the last of new engines is linked", "ms", "as many again link at once, into the same owner");
        let config = config(OWNER.0, transport, 65, 12);
        let engine = DataDist::open(config).unwrap();
        Blocks::new(&engine, ROWS, BYTES, Placement::Device, Some(crate::setup::SHARED)).fill();
        let port = engine.listening().unwrap().port();
        let mut remote = RemoteCache::start();
        for size in
            options.sizes(2, 512).into_iter().filter(|&size| size < 16 || size.trailing_zeros() % 3 == 0)
        {
            let linked: Linked = remote.ask(&format!("decoders {transport} {size} {port}")).parse().unwrap();
            linking.add(size, vec![linked.last]);
            // Every mapping is touched before the clock starts.
            remote.ask("pull 150");
            let rounds = options.rounds().min(3);
            let mut all: Vec<[f64; 5]> = vec![];
            for _ in 0..rounds {
                let before = on_cpu();
                let pulled: Pulled = remote.ask("pull 300").parse().unwrap();
                let gigabytes = pulled.bytes as f64 / 1e9;
                let owner = (on_cpu().saturating_sub(before)) as f64 / 1e9;
                all.push([
                    gigabytes / pulled.seconds,
                    pulled.mean,
                    pulled.p99,
                    owner / gigabytes,
                    pulled.cpu / gigabytes,
                ]);
            }
            let column = |at: usize| all.iter().map(|round| round[at]).collect::<Vec<_>>();
            for (at, curve) in
                [&mut speed, &mut mean, &mut p99, &mut served, &mut used].into_iter().enumerate()
            {
                curve.add(size, column(at));
            }
        }
        for curve in [speed, mean, p99, served, used, linking] {
            report.curve(&curve);
        }
        report.figure(
            &name("threads of the owner"),
            crate::setup::status("Threads:") as f64,
            "threads",
            "with 512 engines linked that have pulled",
        );
    }
}

/// The owner is killed while it has many links. It is started again, and all engines link again.
pub fn storm(options: &Options, report: &mut Report) {
    for transport in ["shm", "tcp"] {
        let new = |what: &str, unit, note| {
            Curve::new(format!("{what}, {transport}"), unit, "engines linked with the one that dies", note)
        };
        let mut noticed = new("all have noticed", "ms", "from SIGKILL until no engine has a link");
        let note = "from the moment at which the owner listens again; each engine tries every 10 ms";
        let (mut half, mut last) =
            (new("half are linked again", "ms", note), new("all are linked again", "ms", note));
        let mut failed = 0;
        let mut crowd = Crowd::default();
        let mut remote = RemoteCache::start();
        let peer = remote.owner(transport, true, 16, BYTES, 0);
        let port = peer.remote[0].port();
        for size in options.sizes(4, 512) {
            crowd.grow(transport, size);
            crowd.link(&address(OWNER, port), Instant::now);
            let rounds = options.rounds().min(3);
            let (mut seen, mut medians, mut lasts) = (vec![], vec![], vec![]);
            for _ in 0..rounds {
                let killed = Instant::now();
                remote.kill();
                while !crowd.alone() {
                    assert!(killed.elapsed() < Duration::from_secs(30), "nobody noticed");
                    std::thread::sleep(Duration::from_micros(500));
                }
                seen.push(killed.elapsed().as_secs_f64() * 1e3);
                let mut again = None;
                let linked = crowd.link(&peer, || {
                    let mut remote = RemoteCache::start();
                    remote.owner(transport, true, 16, BYTES, port);
                    again = Some(remote);
                    Instant::now()
                });
                remote = again.unwrap();
                medians.push(linked.median);
                lasts.push(linked.last);
                failed += linked.failed;
            }
            noticed.add(size, seen);
            half.add(size, medians);
            last.add(size, lasts);
        }
        for curve in [noticed, half, last] {
            report.curve(&curve);
        }
        let name = format!("tries that failed though the owner listened, {transport}");
        report.figure(&name, failed as f64, "tries", "of all sizes and rounds together");
    }
}

/// The numbers of a line.
fn numbers<const N: usize>(line: &str) -> [f64; N] {
    let all: Vec<f64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    all.try_into().unwrap()
}

impl fmt::Display for Linked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.last, self.median, self.failed)
    }
}

impl FromStr for Linked {
    type Err = ();

    fn from_str(line: &str) -> Result<Linked, ()> {
        let [last, median, failed] = numbers(line);
        Ok(Linked { last, median, failed: failed as u64 })
    }
}

impl fmt::Display for Pulled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pulled { seconds, bytes, mean, p99, cpu } = self;
        write!(f, "{seconds} {bytes} {mean} {p99} {cpu}")
    }
}

impl FromStr for Pulled {
    type Err = ();

    fn from_str(line: &str) -> Result<Pulled, ()> {
        let [seconds, bytes, mean, p99, cpu] = numbers(line);
        Ok(Pulled { seconds, bytes: bytes as u64, mean, p99, cpu })
    }
}
