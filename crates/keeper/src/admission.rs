//! Which connections a keeper admits: the tokens that clients prove, and the roles in which they attach.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;

use llm_datadist_core::bindings::keeper::{peer_credentials, same_user};

use crate::client::{Client, Goodbye, Standing};
use crate::messages::{KeeperReply, VERSION};
use crate::roles::{ClientRole, Greeting, Nonce, RoleTokens};

/// Returns the reason if a client speaks another version.
pub(crate) fn check_version(version: u32) -> Result<(), Goodbye> {
    if version == VERSION {
        return Ok(());
    }
    let reason =
        format!("the keeper speaks version {VERSION}, the client version {version}; use one version");
    Err(Goodbye::refused("", &reason))
}

/// Answers the first message of a client that has a token.
pub(crate) fn greet(
    client: &mut Client,
    tokens: &RoleTokens,
    version: u32,
    nonce: Nonce,
) -> Result<KeeperReply, Goodbye> {
    check_version(version)?;
    if client.attached.is_some() || !matches!(client.standing, Standing::User) {
        return Err(Goodbye::refused("", "the client has greeted or attached already"));
    }
    if tokens.is_empty() {
        return Err(Goodbye::refused("token", "the keeper has no tokens; attach without one"));
    }
    let (greeting, nonce) = Greeting::answer(nonce)?;
    client.standing = Standing::Greeted(greeting);
    Ok(KeeperReply::Challenge(nonce))
}

/// Checks the proof of a token. A client may send one for each connection.
pub(crate) fn prove(
    client: &mut Client,
    tokens: &RoleTokens,
    proof: &[u8; 32],
) -> Result<KeeperReply, Goodbye> {
    if client.attached.is_some() {
        return Err(Goodbye::refused("", "the client has attached already"));
    }
    let Standing::Greeted(greeting) = client.standing else {
        return Err(Goodbye::refused("", "a proof must follow a greeting"));
    };
    let Some((role, answer)) = tokens.proved(&greeting, proof)? else {
        return Err(Goodbye::refused("token", "the token is none of those of the keeper"));
    };
    client.standing = Standing::Proved(role);
    Ok(KeeperReply::Proved(role, answer))
}

/// Returns the role in which a client may attach. The processes of the user of the keeper need no token.
pub(crate) fn role(client: &Client, tokens: &RoleTokens) -> Result<ClientRole, Goodbye> {
    match client.standing {
        Standing::Proved(role) => Ok(role),
        _ if peer_credentials(client.socket.as_fd()).is_some_and(same_user) => Ok(ClientRole::Admin),
        _ if tokens.is_empty() => {
            Err(Goodbye::refused("", "only processes of the user of the keeper may attach"))
        }
        _ => {
            Err(Goodbye::refused("token", "a process of another user than that of the keeper needs a token"))
        }
    }
}

/// Returns the connection that gives way to another one if `most` have not attached: the oldest one of the user that has most of them.
/// So a user cannot keep others from attaching.
pub(crate) fn gives_way(clients: &BTreeMap<u64, Client>, most: usize) -> Option<u64> {
    let pending = || clients.iter().filter(|(_, client)| client.attached.is_none());
    if pending().count() < most {
        return None;
    }
    let mut counts: HashMap<Option<u32>, usize> = HashMap::new();
    for (_, client) in pending() {
        *counts.entry(client.user).or_default() += 1;
    }
    let largest = counts.values().copied().max()?;
    pending().find(|(_, client)| counts.get(&client.user) == Some(&largest)).map(|(&number, _)| number)
}

#[cfg(test)]
mod tests {
    use std::iter::successors;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::{scope, sleep};
    use std::time::Duration;

    use llm_datadist_core::ErrorKind;
    use llm_datadist_core::bindings::keeper::{CloseOnFork, Region, Token, Window};
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::attachment::tests::{SilentPath, key, soon};
    use crate::messages::{
        AttachRequest, KeeperRequest, ListRequest, RefusalKind, Stored, ValueTerms, decoded, encoded,
    };
    use crate::sizes::{
        MAX_CLIENTS, MAX_OBSERVERS, MAX_PENDING, MESSAGE_BYTES, RESERVED_CLIENTS, RESERVED_OBSERVERS,
    };
    use crate::socket::{ListeningPath, PeerFile, connect_to, receive, send};
    use crate::{Keeper, KeeperAccess, KeeperOptions, Observer, Store, StoreOptions};

    const TOKENS: [(&str, ClientRole); 3] = [
        ("the token of readers", ClientRole::Read),
        ("the token of writers", ClientRole::Write),
        ("the token of operators", ClientRole::Admin),
    ];

    fn token(text: &str) -> Token {
        Token::new(&text.replace(' ', "-"))
    }

    fn tokens(path: &SilentPath) -> PathBuf {
        let lines = TOKENS.map(|(token, role)| format!("{role} {}\n", token.replace(' ', "-")));
        let file = path.socket().with_extension("tokens");
        std::fs::write(&file, lines.concat()).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        file
    }

    fn keeper(path: &SilentPath) -> Keeper {
        let (socket, tokens) = (path.socket(), RoleTokens::read(&tokens(path)).unwrap());
        Keeper::open(&KeeperOptions { memory: 64 * 10, value: 64, socket, tokens, group: None }).unwrap()
    }

    fn access(text: &str) -> KeeperAccess {
        KeeperAccess { token: Some(token(text)), keeper_user: None }
    }

    fn options(path: &SilentPath, access: KeeperAccess) -> StoreOptions {
        StoreOptions { access, ..path.store_options(64) }
    }

    /// A connection that sends what it likes.
    struct Stranger(OwnedFd);

    impl Stranger {
        fn connect(path: &SilentPath) -> Stranger {
            Stranger(connect_to(&path.socket(), None).unwrap())
        }

        /// Sends a message, with the memory of a client if it attaches.
        fn send(&self, request: &KeeperRequest) {
            let region = Region::ordinary("a test", 64 * 1024).unwrap();
            let memory = [region.descriptor().unwrap()];
            let files = if matches!(request, KeeperRequest::Attach(_)) { &memory[..] } else { &[] };
            send(&self.0, &encoded(request).unwrap(), files).unwrap();
        }

        fn reply(&self) -> Option<KeeperReply> {
            let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
            loop {
                match receive(&self.0, &mut buffer, &mut files) {
                    Err(Errno::AGAIN) => sleep(Duration::from_millis(1)),
                    received => return received.unwrap().map(|message| decoded(message).unwrap()),
                }
            }
        }

        fn asked(&self, request: &KeeperRequest) -> KeeperReply {
            self.send(request);
            self.reply().unwrap()
        }

        fn greeted(&self, nonce: Nonce) -> Greeting {
            match self.asked(&KeeperRequest::Greet(VERSION, nonce)) {
                KeeperReply::Challenge(other) => Greeting::of(nonce, other),
                other => panic!("{other:?}"),
            }
        }

        fn proved(path: &SilentPath, text: &str) -> Stranger {
            let stranger = Stranger::connect(path);
            let proof = stranger.greeted([7; 32]).client_proof(&token(text)).unwrap().bytes();
            assert!(matches!(stranger.asked(&KeeperRequest::Prove(proof)), KeeperReply::Proved(..)));
            stranger
        }

        /// Asserts that the keeper refuses what was sent last with this text, and ends the connection.
        fn refused(&self, text: &str) {
            match self.reply() {
                Some(KeeperReply::Refused(refusal)) => assert!(refusal.reason.contains(text), "{refusal:?}"),
                other => panic!("{other:?}"),
            }
            assert!(self.reply().is_none());
        }
    }

    fn attach_request() -> KeeperRequest {
        let terms = ValueTerms { value: 64, checksums: false };
        KeeperRequest::Attach(AttachRequest { version: VERSION, namespace: "n".into(), terms })
    }

    /// Returns the request after another one in the order of their numbers, with the least role that may send it. A new request needs an
    /// arm here.
    fn request_after(request: &KeeperRequest) -> Option<(KeeperRequest, ClientRole)> {
        use KeeperRequest as Request;
        let keys = || vec![key(200)];
        Some(match request {
            Request::Attach(_) => (Request::Put(0, keys(), Vec::new()), ClientRole::Write),
            // None of these slots has wrong bytes, or there are no such slots.
            Request::Put(..) => (Request::Touch(vec![0, 5, u32::MAX]), ClientRole::Read),
            Request::Touch(_) => (Request::Drop(keys()), ClientRole::Admin),
            Request::Drop(_) => (Request::Lease(keys(), 1), ClientRole::Read),
            Request::Lease(..) => (Request::Unlease(keys()), ClientRole::Read),
            Request::Unlease(_) => (Request::Stats, ClientRole::Read),
            Request::Stats => (Request::Observe(VERSION, false), ClientRole::Read),
            Request::Observe(..) => {
                (Request::List(ListRequest { from: 0, namespace: None, used_after: 0 }), ClientRole::Admin)
            }
            Request::List(_) => (Request::Namespaces(0), ClientRole::Admin),
            Request::Namespaces(_) => (Request::Clear(0), ClientRole::Admin),
            Request::Clear(_) => (Request::Changes(None), ClientRole::Admin),
            Request::Changes(_) => (Request::End, ClientRole::Admin),
            Request::End => (Request::Greet(VERSION, [7; 32]), ClientRole::Read),
            Request::Greet(..) => (Request::Prove([7; 32]), ClientRole::Read),
            Request::Prove(_) => (Request::Corrupt(u32::MAX, 2), ClientRole::Read),
            Request::Corrupt(..) => return None,
        })
    }

    /// Returns each request that a client may send after it has attached, with the least role that may send it.
    fn requests() -> Vec<(KeeperRequest, ClientRole)> {
        let all = successors(Some((attach_request(), ClientRole::Read)), |(last, _)| request_after(last));
        all.filter(|(request, _)| !is_first(request)).collect()
    }

    /// Returns whether a request belongs before the end of attaching. The keeper ends a connection that sends it later.
    fn is_first(request: &KeeperRequest) -> bool {
        use KeeperRequest::{Attach, Greet, Observe, Prove};
        matches!(request, Attach(_) | Observe(..) | Greet(..) | Prove(_))
    }

    /// Returns whether a request has a reply.
    fn has_reply(request: &KeeperRequest) -> bool {
        use KeeperRequest::{Corrupt, Touch, Unlease};
        !matches!(request, Corrupt(..) | Touch(_) | Unlease(_))
    }

    #[test]
    fn a_role_forbids_each_request_above_it_and_the_connection_goes_on() {
        let path = SilentPath::new();
        let keeper = keeper(&path);
        let own = Store::open(options(&path, KeeperAccess::default()), soon()).unwrap();
        own.put(&[key(1)], &[Window::of_slice(&[1; 64])], soon()).unwrap();
        let mut forbidden = 0;
        for (text, role) in &TOKENS[..2] {
            let stranger = Stranger::proved(&path, text);
            assert!(matches!(stranger.asked(&attach_request()), KeeperReply::Attached(_)));
            for (request, needed) in requests() {
                if !has_reply(&request) {
                    assert_eq!(needed, ClientRole::Read, "{request:?}");
                    stranger.send(&request);
                    continue;
                }
                let reply = stranger.asked(&request);
                let expected = (*role < needed).then_some((*role, needed));
                forbidden += u64::from(expected.is_some());
                let got = match reply {
                    KeeperReply::Forbidden(role, needed) => Some((role, needed)),
                    _ => None,
                };
                assert_eq!(got, expected, "{request:?}");
            }
            assert!(matches!(stranger.asked(&KeeperRequest::Stats), KeeperReply::Stats(_)));
        }
        let counted = own.stats(soon()).unwrap().keeper.unwrap();
        assert_eq!((counted.forbidden, counted.dropped, counted.corrupt), (forbidden, 0, 0));
        assert_eq!(own.exists(&[key(1), key(200)]).unwrap(), [true, true], "a writer has put the second one");
        assert!(keeper.running());
        // The role of operators, and that of processes of the same user without a token.
        for text in [Some(TOKENS[2].0), None] {
            let stranger =
                text.map_or_else(|| Stranger::connect(&path), |text| Stranger::proved(&path, text));
            assert!(matches!(stranger.asked(&attach_request()), KeeperReply::Attached(_)));
            for (request, _) in requests().into_iter().filter(|(request, _)| has_reply(request)) {
                if matches!(request, KeeperRequest::End) {
                    continue;
                }
                assert!(!matches!(stranger.asked(&request), KeeperReply::Forbidden(..)), "{request:?}");
            }
        }
    }

    /// Attaches a client with a token, for values with these terms.
    fn attached(path: &SilentPath, text: &str, terms: ValueTerms) -> Stranger {
        let stranger = Stranger::proved(path, text);
        let (version, namespace) = (VERSION, "n".into());
        let request = KeeperRequest::Attach(AttachRequest { version, namespace, terms });
        assert!(matches!(stranger.asked(&request), KeeperReply::Attached(_)));
        stranger
    }

    #[test]
    fn a_reader_keeps_no_writer_out_of_a_namespace() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let [other, same] =
            [1, 64].map(|value| attached(&path, TOKENS[0].0, ValueTerms { value, checksums: value == 1 }));
        let writer = Store::open(options(&path, access(TOKENS[1].0)), soon()).unwrap();
        let stored = writer.put(&[key(1)], &[Window::of_slice(&[1; 64])], soon()).unwrap();
        assert_eq!(stored, [Stored::Stored]);
        assert!(other.reply().is_none(), "the reader with other terms was disconnected");
        assert!(matches!(same.asked(&KeeperRequest::Stats), KeeperReply::Stats(_)));
        let again = Stranger::proved(&path, TOKENS[0].0);
        let terms = ValueTerms { value: 1, checksums: false };
        let (version, namespace) = (VERSION, "n".into());
        again.send(&KeeperRequest::Attach(AttachRequest { version, namespace, terms }));
        again.refused("value=1 must be 64");
    }

    #[test]
    fn a_reader_with_other_terms_finds_no_value_of_a_writer() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let shorter = StoreOptions { value: 1, ..options(&path, access(TOKENS[0].0)) };
        let reader = Store::open(shorter, soon()).unwrap();
        // As a call of the reader has it that begins before the reader is disconnected.
        let before = reader.attachment().unwrap().unwrap();
        let writer = Store::open(options(&path, access(TOKENS[1].0)), soon()).unwrap();
        writer.put(&[key(1)], &[Window::of_slice(&[1; 64])], soon()).unwrap();
        assert_eq!(before.location(&key(1)), None);
    }

    #[test]
    fn readers_leave_places_to_the_user_of_the_keeper() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let mut taken = Vec::new();
        for _ in 0..MAX_OBSERVERS - RESERVED_OBSERVERS {
            let stranger = Stranger::proved(&path, TOKENS[0].0);
            let reply = stranger.asked(&KeeperRequest::Observe(VERSION, false));
            assert!(matches!(reply, KeeperReply::Attached(_)));
            taken.push(stranger);
        }
        for _ in 0..MAX_CLIENTS - RESERVED_CLIENTS {
            taken.push(attached(&path, TOKENS[1].0, ValueTerms { value: 64, checksums: false }));
        }
        for request in [attach_request(), KeeperRequest::Observe(VERSION, false)] {
            let stranger = Stranger::proved(&path, TOKENS[1].0);
            stranger.send(&request);
            stranger.refused("which is the limit");
        }
        let own = Store::open(options(&path, KeeperAccess::default()), soon()).unwrap();
        let stats = Observer::open(&path.socket(), soon()).unwrap().stats(soon()).unwrap();
        assert_eq!((stats.clients, stats.observers), (57, 7));
        assert_eq!(own.drop_values(&[key(1)], soon()).unwrap(), 0);
    }

    #[test]
    fn a_client_of_version_2_is_told_both_versions() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let text = "the keeper speaks version 3, the client version 2";
        // An attach request with the namespace "n" and values of 64 bytes, and one that looks.
        for message in [&[0, 2, 1, b'n', 64][..], &[7, 2, 1]] {
            let stranger = Stranger::connect(&path);
            send(&stranger.0, message, &[]).unwrap();
            match stranger.reply() {
                Some(KeeperReply::Refused(refusal)) => {
                    assert_eq!(refusal.kind, RefusalKind::Argument);
                    assert!(refusal.reason.contains(text), "{refusal:?}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_wrong_report_silences_its_user_for_a_while_and_other_namespaces_are_not_checked() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let mut checked = options(&path, KeeperAccess::default());
        checked.checksums = true;
        let own = Store::open(checked.clone(), soon()).unwrap();
        own.put(&[key(1)], &[Window::of_slice(&[1; 64])], soon()).unwrap();
        let location = own.attachment().unwrap().unwrap().location(&key(1)).unwrap();
        let report = KeeperRequest::Corrupt(location.slot, location.generation);
        let terms = ValueTerms { value: 64, checksums: true };
        let stranger = Stranger::proved(&path, TOKENS[0].0);
        let (version, namespace) = (VERSION, "another".into());
        let attach = KeeperRequest::Attach(AttachRequest { version, namespace, terms });
        assert!(matches!(stranger.asked(&attach), KeeperReply::Attached(_)));
        let wrong = |stranger: &Stranger| match stranger.asked(&KeeperRequest::Stats) {
            KeeperReply::Stats(stats) => stats.wrong_reports,
            other => panic!("{other:?}"),
        };
        stranger.send(&report);
        assert_eq!(wrong(&stranger), 0, "the value is in another namespace");
        let stranger = attached(&path, TOKENS[0].0, terms);
        stranger.send(&KeeperRequest::Corrupt(location.slot, location.generation + 2));
        assert_eq!(wrong(&stranger), 0, "the value was replaced");
        (0..20).for_each(|_| stranger.send(&report));
        assert_eq!(wrong(&stranger), 1);
        assert_eq!(own.exists(&[key(1)]).unwrap(), [true]);
    }

    #[test]
    fn a_client_that_has_attached_proves_no_token() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let stranger = Stranger::connect(&path);
        let proof = stranger.greeted([7; 32]).client_proof(&token(TOKENS[0].0)).unwrap().bytes();
        assert!(matches!(stranger.asked(&attach_request()), KeeperReply::Attached(_)));
        stranger.send(&KeeperRequest::Prove(proof));
        stranger.refused("the client has attached already");
    }

    #[test]
    fn a_keeper_that_attaches_without_a_proof_is_no_keeper_that_is_away() {
        let path = SilentPath::new();
        let silent = path.start();
        let mut options = options(&path, access(TOKENS[0].0));
        options.namespace = "n".into();
        let refused = Store::open(options, soon()).unwrap_err();
        assert_eq!((refused.kind(), refused.argument_name()), (ErrorKind::System, Some("token")));
        drop(silent.join());
    }

    #[test]
    fn a_keeper_of_another_user_needs_a_token() {
        let path = SilentPath::new();
        let another = rustix::process::geteuid().as_raw() + 1;
        let access = KeeperAccess { token: None, keeper_user: Some(another) };
        let refused = Store::open(options(&path, access), soon()).unwrap_err();
        assert_eq!(
            (refused.kind(), refused.argument_name()),
            (ErrorKind::InvalidArgument, Some("keeper_user"))
        );
    }

    #[test]
    fn stores_and_observers_refuse_calls_above_their_role_and_go_on() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let [reader, writer, admin] =
            TOKENS.map(|(text, _)| Store::open(options(&path, access(text)), soon()).unwrap());
        let put = |store: &Store| store.put(&[key(1)], &[Window::of_slice(&[1; 64])], soon());
        let refused = put(&reader).unwrap_err();
        assert_eq!((refused.kind(), refused.argument_name()), (ErrorKind::NotEnabled, Some("token")));
        assert_eq!(refused.reason(), "the token has the role read, and this call needs the role write");
        assert_eq!(put(&writer).unwrap(), [Stored::Stored]);
        assert!(put(&reader).is_err(), "also if the keeper has the value");
        let mut bytes = [0; 64];
        assert_eq!(reader.get(&[key(1)], &[Window::of_slice_mut(&mut bytes)]).unwrap(), [true]);
        assert_eq!(bytes, [1; 64]);
        for (store, role) in [(&reader, "read"), (&writer, "write")] {
            let text = format!("the token has the role {role}, and this call needs the role admin");
            assert_eq!(store.drop_values(&[key(1)], soon()).unwrap_err().reason(), text);
            assert_eq!(store.clear(soon()).unwrap_err().reason(), text);
            assert_eq!(store.lease(&[key(1)], Duration::from_secs(1), soon()).unwrap(), [true]);
            assert_eq!(store.stats(soon()).unwrap().attached, 1, "no call has ended the connection");
        }
        assert_eq!(admin.drop_values(&[key(1)], soon()).unwrap(), 1);
        let looking = Observer::with_access(&path.socket(), &access(TOKENS[1].0), soon()).unwrap();
        for _ in 0..2 {
            assert_eq!(looking.stats(soon()).unwrap().clients, 3);
            assert_eq!(looking.values(None, 9, soon()).unwrap_err().kind(), ErrorKind::NotEnabled);
            assert_eq!(looking.changes(soon()).unwrap_err().kind(), ErrorKind::NotEnabled);
            assert_eq!(looking.ask_to_end(soon()).unwrap_err().kind(), ErrorKind::NotEnabled);
        }
        let admin = Observer::with_access(&path.socket(), &access(TOKENS[2].0), soon()).unwrap();
        assert_eq!(admin.namespaces(soon()).unwrap().len(), 1);
        admin.ask_to_end(soon()).unwrap();
    }

    #[test]
    fn wrong_and_replayed_proofs_are_refused() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        for text in ["the token of nobody", "the token of reader", "the token of readers "] {
            let refused = Store::open(options(&path, access(text)), soon()).unwrap_err();
            assert_eq!(
                (refused.kind(), refused.argument_name()),
                (ErrorKind::InvalidArgument, Some("token"))
            );
            assert!(!format!("{refused} {refused:?}").contains("the-token"), "{refused:?}");
        }
        let first = Stranger::connect(&path);
        let proof = first.greeted([9; 32]).client_proof(&token(TOKENS[2].0)).unwrap().bytes();
        let KeeperReply::Proved(ClientRole::Admin, answer) = first.asked(&KeeperRequest::Prove(proof)) else {
            panic!("no role");
        };
        for replayed in [proof, answer, [0; 32]] {
            let stranger = Stranger::connect(&path);
            stranger.greeted([9; 32]);
            stranger.send(&KeeperRequest::Prove(replayed));
            stranger.refused("the token is none of those of the keeper");
        }
        first.send(&KeeperRequest::Prove(proof));
        first.refused("a proof must follow a greeting");
        let stranger = Stranger::connect(&path);
        stranger.greeted([9; 32]);
        stranger.send(&KeeperRequest::Greet(VERSION, [9; 32]));
        stranger.refused("greeted or attached already");
        let stranger = Stranger::connect(&path);
        stranger.send(&KeeperRequest::Greet(VERSION + 1, [9; 32]));
        stranger.refused("use one version");
        let stranger = Stranger::connect(&path);
        assert!(matches!(stranger.asked(&attach_request()), KeeperReply::Attached(_)));
        stranger.send(&KeeperRequest::Greet(VERSION, [9; 32]));
        stranger.refused("greeted or attached already");
        let other = SilentPath::new();
        let without =
            KeeperOptions { memory: 640, value: 64, socket: other.socket(), ..KeeperOptions::default() };
        let _without = Keeper::open(&without).unwrap();
        let refused = Store::open(options(&other, access(TOKENS[2].0)), soon()).unwrap_err();
        assert_eq!(refused.reason(), "the keeper has no tokens; attach without one");
    }

    #[test]
    fn a_keeper_that_does_not_prove_the_token_gets_no_memory() {
        let path = SilentPath::new();
        let listening = ListeningPath::open(&path.socket()).unwrap();
        scope(|scope| {
            let listener = scope.spawn(|| {
                let socket = loop {
                    match listening.accept().unwrap() {
                        Some(socket) => break Stranger(socket),
                        None => sleep(Duration::from_millis(1)),
                    }
                };
                let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
                for reply in
                    [KeeperReply::Challenge([3; 32]), KeeperReply::Proved(ClientRole::Admin, [4; 32])]
                {
                    while receive(&socket.0, &mut buffer, &mut files) == Err(Errno::AGAIN) {
                        sleep(Duration::from_millis(1));
                    }
                    send(&socket.0, &encoded(&reply).unwrap(), &[]).unwrap();
                }
                loop {
                    match receive(&socket.0, &mut buffer, &mut files) {
                        Err(Errno::AGAIN) => sleep(Duration::from_millis(1)),
                        other => return (other.is_ok_and(|message| message.is_some()), files.len()),
                    }
                }
            });
            let refused = Store::open(options(&path, access(TOKENS[0].0)), soon()).unwrap_err();
            assert!(refused.reason().contains("has not proved that it has the token"), "{refused}");
            assert_eq!(listener.join().unwrap(), (false, 0), "neither a message nor memory");
        });
    }

    #[test]
    fn a_flood_of_wrong_proofs_leaves_attached_clients_alone() {
        let path = SilentPath::new();
        let _keeper = keeper(&path);
        let [reader, writer] =
            [0, 1].map(|at| Store::open(options(&path, access(TOKENS[at].0)), soon()).unwrap());
        let stop = AtomicBool::new(false);
        scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        // A connection that gives way to others is an attempt without a keeper.
                        let opened = Store::open(options(&path, access("the token of nobody")), soon());
                        let refused = opened.map(|store| store.stats(soon()).unwrap().attached);
                        assert!(refused.is_err() || refused.unwrap() == 0);
                    }
                });
            }
            for number in 0..200 {
                let value = [number; 64];
                assert_eq!(
                    writer.put(&[key(number)], &[Window::of_slice(&value)], soon()).unwrap(),
                    [Stored::Stored]
                );
                let mut bytes = [0; 64];
                assert_eq!(reader.get(&[key(number)], &[Window::of_slice_mut(&mut bytes)]).unwrap(), [true]);
                assert_eq!(bytes, value);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let stats = writer.stats(soon()).unwrap();
        assert_eq!((stats.attached, stats.keeper.unwrap().clients), (1, 2));
        assert!(stats.keeper.unwrap().refused > 0);
    }

    #[test]
    fn the_user_with_most_waiting_connections_gives_way() {
        let client = |user: u32, attached: bool| {
            let (socket, _) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            let forked = CloseOnFork::new(&socket);
            let attached = attached.then(|| crate::client::AttachedClient {
                namespace: 0,
                role: ClientRole::Read,
                memory: None,
                leases: crate::leases::ClientLeases::default(),
            });
            let (socket, standing) = (PeerFile::new(socket), Standing::User);
            Client { _forked: forked, socket, process: None, user: Some(user), standing, attached }
        };
        let mut clients = BTreeMap::new();
        // The honest one has waited longest.
        clients.insert(1, client(1000, false));
        (2..40).for_each(|number| _ = clients.insert(number, client(1000, true)));
        (40..40 + MAX_PENDING as u64 - 2).for_each(|number| _ = clients.insert(number, client(12345, false)));
        assert_eq!(gives_way(&clients, MAX_PENDING), None);
        clients.insert(90, client(7, false));
        assert_eq!(gives_way(&clients, MAX_PENDING), Some(40));
        clients.retain(|_, client| client.user != Some(12345));
        (40..60).for_each(|number| _ = clients.insert(number, client(1000, false)));
        assert_eq!(gives_way(&clients, MAX_PENDING), Some(1), "one user is as before");
    }
}
