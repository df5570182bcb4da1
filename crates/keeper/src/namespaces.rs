//! The namespaces of a keeper: texts of clients, with the numbers by which keys name them.

use std::collections::HashMap;

use crate::messages::{KeeperRefusal, RefusalKind};
use crate::sizes::MAX_NAMESPACES;

/// Texts, each with its number and the bytes of its values. A number never stands for another text.
#[derive(Debug, Default)]
pub(crate) struct Namespaces(HashMap<String, (u32, u64)>);

impl Namespaces {
    /// Returns the number of a text, with a new one for a text that was not known. Returns the reason if the values of this text have
    /// another size, or if there are too many texts.
    pub(crate) fn number(&mut self, text: &str, value: u64) -> Result<u32, KeeperRefusal> {
        match self.0.get(text) {
            Some(&(number, bytes)) if bytes == value => Ok(number),
            Some((_, bytes)) => {
                let reason =
                    format!("value={value} must be {bytes}, as in the namespace that the keeper has");
                Err(KeeperRefusal { kind: RefusalKind::Argument, argument: "value".into(), reason })
            }
            None if self.0.len() >= MAX_NAMESPACES => {
                let reason = format!(
                    "the keeper has {MAX_NAMESPACES} namespaces, which is the limit; restart it to forget them"
                );
                Err(KeeperRefusal { kind: RefusalKind::System, argument: "namespace".into(), reason })
            }
            None => {
                let number = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
                self.0.insert(text.into(), (number, value));
                Ok(number)
            }
        }
    }

    /// Returns how many there are.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_has_its_own_number_and_one_size() {
        let mut namespaces = Namespaces::default();
        assert_eq!(
            [namespaces.number("a", 64), namespaces.number("b", 64), namespaces.number("a", 64)],
            [Ok(0), Ok(1), Ok(0)]
        );
        let other = namespaces.number("a", 128).unwrap_err();
        assert_eq!((other.kind, &*other.argument), (RefusalKind::Argument, "value"));
        assert_eq!(other.reason, "value=128 must be 64, as in the namespace that the keeper has");
        for number in 2..MAX_NAMESPACES {
            namespaces.number(&number.to_string(), 1).unwrap();
        }
        let many = namespaces.number("c", 1).unwrap_err();
        assert_eq!((many.kind, &*many.argument), (RefusalKind::System, "namespace"));
        assert!(many.reason.contains("the limit"));
        assert_eq!(namespaces.number("b", 64), Ok(1));
    }
}
