//! Who may do what: roles, and the tokens that give them to clients.
//!
//! A client that has a token proves it without sending it: both ends send a random number, and then a proof over both numbers. A
//! local socket delivers what the other end has sent, so the proofs need not cover the messages that follow.

use std::fmt;
use std::path::Path;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::{
    KeyProof, Token, link_token, random, read_token_file, secret_text,
};
use llm_datadist_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The name of the argument that has the file with the tokens of a keeper.
const TOKENS: &str = "tokens";
/// The longest file with the tokens of a keeper, in bytes.
const MAX_BYTES: u64 = 64 << 10;
/// The most tokens of a keeper. Each proof is compared with all of them.
const MAX_TOKENS: usize = 64;

/// Reads the file at `path` with the token of a client, the argument `token_file`.
///
/// Returns `Err(InvalidArgument)` unless it is a regular file of this user or of root, which no other user may access, with a token of at
/// least 16 characters without white space, which the file with the tokens of a keeper cannot have. No error has the token in its text.
pub fn read_token(path: &Path) -> Result<Token> {
    const FILE: &str = "token_file";
    let token = read_token_file(path, FILE)?;
    if String::from_utf8_lossy(token.bytes()).contains(char::is_whitespace) {
        let name = path.display().to_string();
        let why = "has white space; the file must have the token alone, without its role";
        return Err(
            Error::new(ErrorKind::InvalidArgument, format!("{FILE}={name:?} {why}")).of_argument(FILE)
        );
    }
    Ok(token)
}

/// A number that was drawn for one connection.
pub(crate) type Nonce = [u8; 32];

/// What a client may do. Each role may do what the ones before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ClientRole {
    /// Attach, find and copy values, lease them, and read counters.
    Read,
    /// Put values.
    Write,
    /// Drop and list values, and end the keeper.
    Admin,
}

impl ClientRole {
    const ALL: [ClientRole; 3] = [ClientRole::Read, ClientRole::Write, ClientRole::Admin];

    fn name(self) -> &'static str {
        match self {
            ClientRole::Read => "read",
            ClientRole::Write => "write",
            ClientRole::Admin => "admin",
        }
    }

    /// Returns the reason if a client with this role may not do what needs the role `needed`.
    pub(crate) fn check(self, needed: ClientRole) -> Result<()> {
        if self >= needed {
            return Ok(());
        }
        let text = format!("the token has the role {self}, and this call needs the role {needed}");
        Err(Error::new(ErrorKind::NotEnabled, text).of_argument("token"))
    }
}

impl fmt::Display for ClientRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The random numbers of a connection, which the proofs of both ends cover.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Greeting {
    client: Nonce,
    keeper: Nonce,
}

impl Greeting {
    /// The numbers that both ends have drawn.
    pub(crate) fn of(client: Nonce, keeper: Nonce) -> Greeting {
        Greeting { client, keeper }
    }

    /// Answers the number of a client with one that is drawn now.
    pub(crate) fn answer(client: Nonce) -> Result<(Greeting, Nonce)> {
        let keeper = random()?;
        Ok((Greeting { client, keeper }, keeper))
    }

    /// Returns the proof of a client with this token.
    pub(crate) fn client_proof(&self, token: &Token) -> Result<KeyProof> {
        self.proof(token, b"client of a keeper")
    }

    /// Returns the proof of a keeper with this token.
    pub(crate) fn keeper_proof(&self, token: &Token) -> Result<KeyProof> {
        self.proof(token, b"keeper")
    }

    fn proof(&self, token: &Token, side: &[u8]) -> Result<KeyProof> {
        KeyProof::over(token.bytes(), side, &[&self.client, &self.keeper])
    }
}

/// The tokens of a keeper, each with its role. `Debug` never shows them.
#[derive(Clone, Debug, Default)]
pub struct RoleTokens(Vec<(ClientRole, Token)>);

impl RoleTokens {
    /// Reads a file of tokens: a role and a token on each line, separated by spaces. Empty lines and lines that start with `#` do not
    /// count.
    ///
    /// Returns `Err(InvalidArgument)` unless it is a regular file of this user or of root, which no other user may access, with 1 to
    /// 64 tokens of at least 16 characters, each of them once. No error has a token in its text.
    pub fn read(path: &Path) -> Result<RoleTokens> {
        let text = secret_text(path, TOKENS, MAX_BYTES)?;
        Self::parse(&text).map_err(|why| {
            let text = format!("{TOKENS}={:?} {why}", path.display().to_string());
            Error::new(ErrorKind::InvalidArgument, text).of_argument(TOKENS)
        })
    }

    fn parse(text: &str) -> Result<RoleTokens, String> {
        let mut tokens: Vec<(ClientRole, Token)> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let (Some(role), Some(token), None) = (words.next(), words.next(), words.next()) else {
                return Err(format!("has no role and token on line {number}: two words are needed"));
            };
            let Some(role) = ClientRole::ALL.into_iter().find(|known| known.name() == role) else {
                return Err(format!("has no role on line {number}: read, write or admin is needed"));
            };
            if token.contains(char::is_control) {
                return Err(format!("has a control character on line {number}"));
            }
            let token = link_token("token", token).map_err(|error| format!("line {number}: {error}"))?;
            if tokens.iter().any(|(_, known)| *known == token) {
                return Err(format!("has the token of line {number} twice"));
            }
            if tokens.len() == MAX_TOKENS {
                return Err(format!("has more than {MAX_TOKENS} tokens"));
            }
            let pushed = fallible::push("the tokens of a keeper", &mut tokens, (role, token));
            pushed.map_err(|error| error.to_string())?;
        }
        if tokens.is_empty() { Err("has no token".into()) } else { Ok(RoleTokens(tokens)) }
    }

    /// Returns whether there are none: then only processes of the user of the keeper may attach.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the role of a client that has sent `proof`, and the proof of the keeper for it. `None` if the client has none of the
    /// tokens. Takes the same time for each of them.
    pub(crate) fn proved(
        &self,
        greeting: &Greeting,
        proof: &[u8; 32],
    ) -> Result<Option<(ClientRole, [u8; 32])>> {
        let mut found = None;
        for (role, token) in &self.0 {
            if greeting.client_proof(token)?.is(proof) {
                found = Some((*role, token));
            }
        }
        found.map(|(role, token)| Ok((role, greeting.keeper_proof(token)?.bytes()))).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: &str = "r-0123456789abcdef";
    const WRITE: &str = "w-0123456789abcdef";
    const ADMIN: &str = "a-0123456789abcdef";

    fn tokens() -> RoleTokens {
        RoleTokens::parse(&format!("# roles\nread {READ}\n\n write\t{WRITE} \r\nadmin {ADMIN}")).unwrap()
    }

    #[test]
    fn each_token_has_its_role() {
        let greeting = Greeting::of([1; 32], [2; 32]);
        let proof = |token: &str| greeting.client_proof(&Token::new(token)).unwrap().bytes();
        let proved = |proof: [u8; 32]| tokens().proved(&greeting, &proof).unwrap();
        for (token, role) in
            [(READ, ClientRole::Read), (WRITE, ClientRole::Write), (ADMIN, ClientRole::Admin)]
        {
            let (found, answer) = proved(proof(token)).unwrap();
            assert_eq!(found, role);
            assert!(greeting.keeper_proof(&Token::new(token)).unwrap().is(&answer));
            assert_eq!(proved(answer), None, "the proof of a keeper is none of a client");
        }
        assert_eq!(proved(proof("0123456789abcdef")), None);
        assert_eq!(proved(proof("")), None);
        // Another connection has other numbers.
        for other in [Greeting::of([1; 32], [3; 32]), Greeting::of([3; 32], [2; 32])] {
            assert_eq!(tokens().proved(&other, &proof(ADMIN)).unwrap(), None);
        }
        assert_eq!(RoleTokens::default().proved(&greeting, &proof(ADMIN)).unwrap(), None);
    }

    #[test]
    fn each_role_may_do_what_the_ones_before_it_may() {
        for (at, role) in ClientRole::ALL.into_iter().enumerate() {
            for (needed_at, needed) in ClientRole::ALL.into_iter().enumerate() {
                assert_eq!(role.check(needed).is_ok(), at >= needed_at, "{role} {needed}");
            }
        }
        let refused = ClientRole::Read.check(ClientRole::Admin).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotEnabled);
        assert_eq!(refused.to_string(), "the token has the role read, and this call needs the role admin");
    }

    #[test]
    fn wrong_lines_are_refused_without_their_tokens() {
        let many =
            (0..65).map(|number| format!("read secret-secret-{number:02}\n")).collect::<Vec<_>>().concat();
        for (text, why) in [
            ("", "has no token"),
            ("\n# read secret-secret-secret\n", "has no token"),
            ("read\n", "no role and token on line 1"),
            ("\nsecret-secret-secret\n", "no role and token on line 2"),
            ("read secret-secret secret-secret", "no role and token on line 1"),
            ("owner secret-secret-secret", "no role on line 1: read, write or admin"),
            ("secret-secret-secret read", "no role on line 1"),
            ("read secret", "line 1: token=(6 characters, not shown)"),
            ("read secret-secret-\0secret", "control character on line 1"),
            ("read secret-secret-secret\nadmin secret-secret-secret", "token of line 2 twice"),
            (&many, "more than 64 tokens"),
        ] {
            let refused = RoleTokens::parse(text).unwrap_err();
            assert!(refused.contains(why) && !refused.contains("secret"), "{text:?}: {refused}");
        }
        assert!(RoleTokens::parse(&many[..many.trim_end().rfind('\n').unwrap()]).is_ok());
        assert!(!format!("{:?}", tokens()).contains("0123456789"));
    }
}
